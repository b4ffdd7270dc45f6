"""Scores of several continuations of one prompt, such as the answers to a multiple-choice question.

A prompt goes into the cache once, and each of its continuations is read after it, as generation
reads a prompt and then writes: of a question with four answers a quarter of the work is left. Where
all continuations are single tokens, the prompt's own logits say everything. A prompt with only one
continuation is one text with it.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lcjax.errors import InputError
from lcjax.generation.generate import Piece, read_on, read_prompts
from lcjax.generation.prefix import Prefix
from lcjax.generation.sampling import Sampling
from lcjax.generation.shapes import prefill_chunk_size
from lcjax.generation.texts import Text, score_texts, token_ids
from lcjax.models import Decoder, head
from lcjax.models.loss import over_chunks
from lcjax.models.memory import Encoded
from lcjax.parallel import distributed
from lcjax.parallel.sharding import keep_rows, padding_rows
from lcjax.rope import Rotation

Ids = Sequence[int]

_ROOM = 32  # slots at least for continuations: prompts of one size are then read by one program
_SIZES = [0, *(8 * 4**n for n in range(12))]  # tokens of continuations that are read


class Continuation(NamedTuple):
    """What a model says of a continuation."""

    nll: np.ndarray  # float32 [m], -log p of every token behind all before it
    greedy: bool  # whether the model itself would write it, the most probable token each time


def check(prompts: Sequence[Ids], continuations: Sequence[Sequence[Ids]], vocab_size: int) -> None:
    """Refuses prompts or continuations without a token, and what is no token of the vocabulary."""
    if len(prompts) != len(continuations) or not len(prompts):
        raise InputError(
            f"continuations={len(continuations)} lists for {len(prompts)} prompts; give a list of"
            " continuations for each prompt, and at least one prompt"
        )
    if not all(len(prompt) for prompt in prompts):
        raise InputError("prompts: one has no token to predict from; begin it with BOS")
    if not all(len(row) and all(len(ids) for ids in row) for row in continuations):
        raise InputError("continuations: each prompt needs at least one, and each a token")
    for number, (prompt, row) in enumerate(zip(prompts, continuations)):
        token_ids(f"prompts[{number}]", prompt, vocab_size)
        for place, ids in enumerate(row):
            token_ids(f"continuations[{number}][{place}]", ids, vocab_size)


def scored(
    model: Decoder,
    params: dict,
    prompts: Sequence[Ids],
    continuations: Sequence[Sequence[Ids]],
    *,
    rotations: Callable[[np.ndarray], Rotation],
    memory: Encoded | None = None,
    prefix: Prefix | None = None,
) -> list[list[Continuation]]:
    """What `model` says of the continuations of each prompt, read in the cheaper way.

    Args:
      rotations: the rotation of a batch of texts of these lengths, shared or stacked. That of a
        prompt counts the longest of its continuations.
      memory: read beside the prompts; its rows are theirs, and those that the mesh lacks.
      prefix: what all prompts begin with, read before.
    """
    check(prompts, continuations, model.config.vocab_size)
    lengths = np.array(
        [len(prompt) + max(map(len, row)) for prompt, row in zip(prompts, continuations)]
    )
    longest = int(lengths.max()) - 1  # the last token is predicted, not read
    model.config.check_length(longest)
    texts = {"prompts": prompts, "continuations": continuations, "memory": memory}
    one = prefix is None and all(len(row) == 1 for row in continuations)
    if one and model.config.pattern.is_position_based and longest <= prefill_chunk_size(None):
        return at_once(model, params, **texts, rotation=rotations(lengths))
    lengths = np.pad(lengths, (0, padding_rows(model.mesh, len(prompts))), "wrap")
    return by_cache(model, params, **texts, rotation=rotations(lengths), prefix=prefix)


def by_cache(
    model: Decoder,
    params: dict,
    prompts: Sequence[Ids],
    continuations: Sequence[Sequence[Ids]],
    *,
    rotation: Rotation,
    memory: Encoded | None = None,
    prefix: Prefix | None = None,
) -> list[list[Continuation]]:
    """What `model` says of the continuations of each prompt; arguments as of `scored`.

    Programs are compiled for a few sizes of prompts and of continuations.
    """
    count, filler = len(prompts), padding_rows(model.mesh, len(prompts))
    prompts = [*prompts, *[prompts[0]] * filler]
    rounds = _rounds([*continuations, *[continuations[0]] * filler])
    lengths = np.array([len(prompt) for prompt in prompts])
    room, chunk = max(ids.shape[1] for ids, _ in rounds) - 1, prefill_chunk_size(None)
    logits, cache = read_prompts(
        model, params, prompts, rotation, room=max(room, _ROOM), chunk=chunk, memory=memory,
        prefix=prefix,
    )  # fmt: skip

    def follow(cache, tokens, targets, real, positions):
        return _follow(model, params, cache, tokens, targets, real, positions, rotation, memory)

    found = [_read_round(follow, logits, cache, lengths, *each, chunk) for each in rounds]
    return [
        [
            Continuation(nll[row, : len(ids)], bool(best[row, : len(ids)].all()))
            for ids, (nll, best) in zip(continuations[row], found)
        ]
        for row in range(count)
    ]


def at_once(
    model: Decoder,
    params: dict,
    prompts: Sequence[Ids],
    continuations: Sequence[Sequence[Ids]],
    *,
    rotation: Rotation,
    memory: Encoded | None = None,
) -> list[list[Continuation]]:
    """As `by_cache`, of one continuation for each prompt, which is read with it as one text.

    For patterns under which no token depends on what follows it.
    """
    pairs = [(prompt, row[0]) for prompt, row in zip(prompts, continuations, strict=True)]
    texts = [Text([*prompt, *ids[:-1]], len(prompt) - 1, ids) for prompt, ids in pairs]
    found = score_texts(model, params, _projected, texts, rotation=rotation, memory=memory)
    return [[Continuation(nll, bool(best.all()))] for nll, best in found]


def _projected(hidden, projection, targets):
    """`_scored` of `targets` [B, m] behind hidden states [B, m, D]."""

    def score(hidden, projection, targets):
        return _scored(projection(hidden), targets)

    return over_chunks(score, hidden, projection, targets)


def _read_round(follow, logits, cache, lengths, ids, sizes, chunk: int) -> list[np.ndarray]:
    """-log p and whether it is the most probable, [B, m] each, of one continuation per prompt."""
    parts = [tuple(x[:, None] for x in _first(logits, ids[:, 0]))]
    for start in range(0, ids.shape[1] - 1, chunk):
        text, targets = (x[:, start : start + chunk] for x in (ids[:, :-1], ids[:, 1:]))
        places = start + np.arange(text.shape[1])[None]
        real = (places < sizes[:, None] - 1).astype(np.int32)
        scores, cache = follow(cache, text, targets, real, lengths[:, None] + places)
        parts.append(scores)
    return [
        np.concatenate([distributed.gather(x) for x in kind], 1)
        for kind in zip(*parts, strict=True)
    ]


def _rounds(continuations: Sequence[Sequence[Ids]]) -> list[tuple[np.ndarray, np.ndarray]]:
    """The first continuation of every prompt, then the second, ...: ids int32 [B, m], sizes [B].

    A prompt without as many repeats its first one, and nobody looks at it.
    """
    found = []
    for number in range(max(map(len, continuations))):
        rows = [row[number] if number < len(row) else row[0] for row in continuations]
        sizes = np.array([len(ids) for ids in rows])
        # The last token is only predicted. Few sizes, since each is a program.
        read = next(size for size in _SIZES if size >= sizes.max() - 1)
        ids = np.zeros((len(rows), 1 + read))
        for row, own in enumerate(rows):
            ids[row, : len(own)] = own
        found.append((ids.astype(np.int32), sizes))
    return found


def _scored(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """-log p of `targets` [...], and whether each is the most probable, of logits [..., V]."""
    picked = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return jax.nn.logsumexp(logits, -1) - picked, logits.argmax(-1) == targets


_first = jax.jit(_scored)


@functools.partial(jax.jit, static_argnums=0)
def _follow(model, params, cache, tokens, targets, segments, positions, rotation, memory):
    """`_scored` of the tokens after `tokens` [B, T], and a cache with these in it.

    The one given stays as it is, for the next continuation.
    """
    hidden, cache = read_on(model, params, cache, tokens, segments, positions, rotation, memory)
    targets = keep_rows(targets, model.mesh)
    return _projected(hidden, head(params, model.config), targets), cache


def by_rows(
    nll: Callable[..., np.ndarray],
    stream: Callable[[Sequence[Ids], Sampling], Iterable[Piece]],
    prompts: Sequence[Ids],
    continuations: Sequence[Sequence[Ids]],
    *,
    follows_length: bool,
) -> list[list[Continuation]]:
    """As `by_cache`, for what scores whole texts: each prompt is read with every continuation.

    `nll` is called with tokens, first and lengths, as `LanguageModel.nll`; `stream` writes what
    continuations are compared with, the most probable tokens. Where rotations follow the length,
    every prompt is written on for its own longest continuation, not for that of the batch.
    """
    written: list[list[int]] = [[] for _ in prompts]
    longest = [max(map(len, row)) for row in continuations]
    for most in sorted(set(longest)) if follows_length else [max(longest)]:
        for piece in stream(prompts, Sampling(max_new_tokens=most)):
            if longest[piece.row] == most or not follows_length:
                written[piece.row] += piece.ids
    found: list[list[Continuation]] = [[] for _ in prompts]
    begins = [len(prompt) for prompt in prompts]
    for ids, sizes in _rounds(continuations):
        ends = begins + sizes
        tokens = np.zeros((len(prompts), ends.max()), np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : ends[row]] = [*prompt, *ids[row, : sizes[row]]]
        losses = np.asarray(nll(tokens, first=min(begins), lengths=ends))
        for row, own in enumerate(continuations):
            if len(found[row]) < len(own):
                size = sizes[row]
                same = written[row][:size] == ids[row, :size].tolist()
                found[row].append(Continuation(losses[row, begins[row] : ends[row]], same))
    return found
