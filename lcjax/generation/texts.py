"""Scores of texts that are read at once, each in a row of its own or one behind the other.

Texts of different lengths fill rows of one length with padding, which costs as much as text. Where
that is an eighth of all or more, they are read as documents of fewer rows, which are long.
Padding never changes a score: its tokens are not read, and where a pattern weighs keys or queries
before it masks them, segments mark it.
"""

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lcjax.errors import InputError, whole_number
from lcjax.generation.shapes import LONGEST_ROW, bucketed, packing_saves
from lcjax.models import Decoder, head
from lcjax.models.loss import token_nll
from lcjax.models.memory import Encoded
from lcjax.parallel import distributed
from lcjax.parallel.sharding import keep_rows, padding_rows
from lcjax.rope import Rotation


class Text(NamedTuple):
    """A text that is read, and what is asked of the tokens from place `first` on."""

    tokens: Sequence[int]
    first: int
    targets: Sequence[int]  # behind each of these tokens


class Rows(NamedTuple):
    """Texts in R rows of W places with at most m targets each, all int32."""

    tokens: np.ndarray  # [R, W]
    places: np.ndarray  # [R, m], of the tokens before the targets
    targets: np.ndarray  # [R, m]
    segments: np.ndarray | None  # [R, W], texts numbered from 1, 0 for padding; None: one each row
    positions: np.ndarray | None  # [R, W], in the own text; None: that in the row


def token_ids(name: str, ids: Any, vocab_size: int) -> np.ndarray:
    """`ids` as int32 [n], if they are a list of token ids of the vocabulary.

    Raises:
      InputError: they are not; the message calls them `name`.
    """
    try:
        array = np.asarray(ids)
    except ValueError:  # lists of unequal lengths
        array = np.zeros((1, 1))
    if array.ndim != 1:
        raise InputError(f"{name}={_brief(ids)} must be a list of token ids, whole numbers")
    if array.dtype.kind not in "iu" or (isinstance(ids, list | tuple) and bool in map(type, ids)):
        for token in ids:
            whole_number(f"{name}: token", token, 0)
    outside = array[(array < 0) | (array >= vocab_size)]
    if outside.size:
        raise InputError(f"{name}: token={outside[0]} must lie between 0 and {vocab_size - 1}")
    return array.astype(np.int32)


def rows_of_tokens(tokens: Any, lengths: Any, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """`tokens` as int32 [B, T] with 0 behind `lengths`, and these as int [B]; all of T if None.

    Raises:
      InputError: they are not whole numbers in the range that the vocabulary and T allow.
    """
    try:
        array = np.asarray(tokens)
    except ValueError:
        array = np.zeros(0)
    if array.ndim != 2 or array.dtype.kind not in "iu" or not array.size:
        raise InputError(
            f"tokens={_brief(tokens)} must be token ids, whole numbers in rows of one length"
            " [B, T]; pad shorter rows to that, and give lengths"
        )
    rows, width = array.shape
    lengths = np.full(rows, width) if lengths is None else np.asarray(lengths)
    whole = lengths.dtype.kind in "iu" and lengths.shape == (rows,)
    if not whole or (lengths < 0).any() or (lengths > width).any():
        raise InputError(
            f"lengths={_brief(lengths)} must be {rows} whole numbers from 0 to the {width} tokens"
            " of a row, one for each row"
        )
    array = np.where(np.arange(width) < lengths[:, None], array, 0)
    for row, ids in enumerate(array):
        token_ids(f"tokens[{row}]", ids, vocab_size)
    return array.astype(np.int32), lengths


def _brief(value: Any) -> str:
    """The beginning of `value` on one line, for a message."""
    return " ".join(repr(value).split())[:60]


def text_nll(
    model: Decoder,
    params: dict,
    tokens: np.ndarray,
    lengths: np.ndarray,
    rotations: Callable[[np.ndarray], Rotation],
    first: int,
    memory: Encoded | None = None,
) -> np.ndarray:
    """-log p(tokens[t] | tokens[:t]) for first <= t < lengths, float32 [B, T - first], else 0.

    Texts are int [B, T]; `rotations(lengths)` gives the rotation of texts of these lengths;
    `memory` is read beside.
    """
    texts = [
        Text(row[:length], first - 1, row[first:length])
        for row, length in zip(tokens, lengths, strict=True)
    ]
    rotation = rotations(np.maximum(lengths, 1))
    scored = score_texts(model, params, token_nll, texts, rotation=rotation, memory=memory)
    nll = np.zeros((len(tokens), tokens.shape[1] - first), np.float32)
    for row, found in zip(nll, scored, strict=True):
        row[: len(found)] = found
    return nll


def score_texts(
    model: Decoder,
    params: dict,
    score: Callable[..., Any],
    texts: Sequence[Text],
    *,
    rotation: Rotation,
    memory: Encoded | None = None,
) -> list[Any]:
    """What `score` says of the targets of each text, a tree of [m].

    `score(hidden, projection, targets)` gives a tree of [R, m] for hidden states [R, m, D]. A
    program serves texts and targets of about these lengths. `rotation` is one for all texts or,
    stacked, that of each; the rows of `memory` are those of the texts, and those that the mesh
    lacks.
    """
    stacked = rotation.inv_freq.ndim > 1
    rows, parts = _laid_out(model, texts, alone=memory is not None or stacked)
    if stacked:
        rotation = rotation.rows(np.arange(len(rows.tokens)) % len(texts))
    found = _score(model, score, params, rows, rotation, memory)
    found = jax.tree.map(distributed.gather, found)
    return [jax.tree.map(operator.itemgetter(part), found) for part in parts]


@partial(jax.jit, static_argnums=(0, 1))
def _score(model: Decoder, score, params, rows: Rows, rotation: Rotation, memory):
    """`score` of the hidden states before the targets; only these are projected to logits."""
    tokens, targets = (keep_rows(x, model.mesh) for x in (rows.tokens, rows.targets))
    given = {"positions": rows.positions, "segments": rows.segments}
    hidden, _ = model.apply({"params": params}, tokens, rotation=rotation, memory=memory, **given)
    hidden = jnp.take_along_axis(hidden, rows.places[..., None], 1)
    return score(hidden, head(params, model.config), targets)


def _laid_out(
    model: Decoder, texts: Sequence[Text], alone: bool
) -> tuple[Rows, list[tuple[int, slice]]]:
    """The rows of texts, and in which of them and where the targets of each text are.

    alone: every text has its own row.
    """
    at, shape, packed = _places(model, [len(text.tokens) for text in texts], alone)
    asked = np.zeros(shape[0], int)
    parts = []
    for (row, _), text in zip(at, texts, strict=True):
        parts.append((row, slice(asked[row], asked[row] + len(text.targets))))
        asked[row] += len(text.targets)
    most = bucketed(int(asked.max()), least=8)
    tokens, segments, positions = (np.zeros(shape, np.int32) for _ in range(3))
    places, targets = (np.zeros((shape[0], most), np.int32) for _ in range(2))
    for number, ((row, start), (_, part), text) in enumerate(zip(at, parts, texts), 1):
        own = slice(start, start + len(text.tokens))
        tokens[row, own], segments[row, own] = text.tokens, number
        positions[row, own] = np.arange(len(text.tokens))
        places[row, part] = start + text.first + np.arange(len(text.targets))
        targets[row, part] = text.targets
    if not packed and (model.config.pattern.is_position_based or segments.all()):
        segments = None  # what stands behind a text is seen by none of its tokens
    return Rows(tokens, places, targets, segments, positions if packed else None), parts


def _places(
    model: Decoder, sizes: Sequence[int], alone: bool
) -> tuple[list[tuple[int, int]], tuple[int, int], bool]:
    """Row and first place of each text, the shape of all rows, and whether texts share one."""
    config, longest, count = model.config, max(sizes), len(sizes)
    rows = count, -(-sum(sizes) // LONGEST_ROW)
    count, few = (n + padding_rows(model.mesh, n) for n in rows)
    wide = bucketed(longest) if config.pattern.is_position_based else longest
    if config.position == "learned":
        wide = min(wide, max(config.max_length, longest))
    elif config.pattern.is_position_based and not alone:
        at, filled = _packed(sizes, few)
        if packing_saves(few * bucketed(filled), count * wide):
            return at, (few, bucketed(filled)), True
    return [(row, 0) for row in range(len(sizes))], (count, wide), False


def _packed(sizes: Sequence[int], rows: int) -> tuple[list[tuple[int, int]], int]:
    """Row and first place of each text in equally long rows, and how long these are.

    The longest text first, each where there is least: at most a third longer than need be (Graham
    1969, Bounds on Multiprocessing Timing Anomalies).
    """
    at, filled = [(0, 0)] * len(sizes), [0] * rows
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        row = filled.index(min(filled))
        at[number] = row, filled[row]
        filled[row] += sizes[number]
    return at, max(filled)
