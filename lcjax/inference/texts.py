"""Scores of texts that are read at once, each in a row of its own or one behind the other.

Texts of different lengths fill rows of one length with padding, which costs as much as text. Where
that is an eighth of all or more, they are read as documents of fewer rows, which are long.
"""

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lcjax import distributed
from lcjax.inference.shapes import LONGEST_ROW, bucketed, packing_saves
from lcjax.loss import token_nll
from lcjax.models import Decoder, head
from lcjax.models.memory import Encoded
from lcjax.rope import Rotation
from lcjax.sharding import keep_rows, padding_rows


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
    segments: np.ndarray | None  # [R, W], texts numbered from 1; None: each has its own row
    positions: np.ndarray | None  # [R, W], in the own text; None: that in the row


def text_nll(
    model: Decoder,
    params: dict,
    tokens: np.ndarray,
    lengths: Sequence[int],
    rotation: Callable[[int], Rotation],
    first: int,
    memory: Encoded | None = None,
) -> np.ndarray:
    """-log p(tokens[t] | tokens[:t]) for first <= t < lengths, float32 [B, T - first].

    Texts are int [B, T]; `memory` is read beside.
    """
    # What comes behind a text counts where others weigh it before they hide it.
    whole = not model.config.pattern.any_order
    texts = [
        Text(row if whole else row[:length], first - 1, row[first:length])
        for row, length in zip(tokens, lengths, strict=True)
    ]
    # What a rotation follows is the length of the texts themselves.
    turned = rotation(tokens.shape[1])
    scored = score_texts(model, params, token_nll, texts, rotation=turned, memory=memory)
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
    program serves texts and targets of about these lengths; the rows of `memory` are those of the
    texts, and those that the mesh lacks.
    """
    rows, parts = _laid_out(model, texts, alone=memory is not None)
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
    documents = (segments, positions) if packed else (None, None)
    return Rows(tokens, places, targets, *documents), parts


def _places(
    model: Decoder, sizes: Sequence[int], alone: bool
) -> tuple[list[tuple[int, int]], tuple[int, int], bool]:
    """Row and first place of each text, the shape of all rows, and whether texts share one."""
    config, longest, count = model.config, max(sizes), len(sizes)
    rows = count, -(-sum(sizes) // LONGEST_ROW)
    count, few = (n + padding_rows(model.mesh, n) for n in rows)
    wide = bucketed(longest) if config.pattern.any_order else longest
    if config.position == "learned":
        wide = min(wide, max(config.max_length, longest))
    elif config.pattern.any_order and not alone:
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
