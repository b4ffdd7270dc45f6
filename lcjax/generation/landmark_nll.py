"""Scores of a text by a model with landmarks: read a chunk at a time, old blocks from a cache."""

import functools
from collections.abc import Callable

import jax
import numpy as np

from lcjax.attention.landmark.tokens import Landmarks
from lcjax.generation.generate import read_on
from lcjax.models import Decoder, head
from lcjax.models import cache as cache_lib
from lcjax.models.loss import token_nll
from lcjax.models.memory import Encoded
from lcjax.parallel import distributed
from lcjax.parallel.sharding import padding_rows
from lcjax.rope import Rotation


def landmark_nll(
    model: Decoder,
    params: dict,
    tokens: np.ndarray,
    lengths: np.ndarray,
    rotations: Callable[[np.ndarray], Rotation],
    first: int,
    memory: Encoded | None = None,
) -> np.ndarray:
    """-log p(tokens[t] | tokens[:t]) for first <= t < lengths, float32 [B, T - first], else 0.

    The ordinary tokens int [B, T] are read with landmarks after full blocks, `pattern.chunk` at a
    time: what was read before is retrieved, and `memory` is read beside. Each is predicted where
    the model learned to: from the landmark before it if landmarks are predicted, else from the last
    ordinary token. `rotations(lengths)` gives the rotation of texts of these lengths, landmarks
    counted.
    """
    pattern = model.config.pattern
    landmarks = Landmarks.of(pattern)
    lacking = padding_rows(model.mesh, len(tokens))  # for equally many on every device
    scored = np.arange(first, tokens.shape[1]) < np.asarray(lengths)[:, None]
    tokens = np.concatenate([tokens, tokens[:1].repeat(lacking, 0)])
    lengths = np.concatenate([lengths, lengths[:1].repeat(lacking)])
    rows, count = tokens.shape
    place = np.arange(count) + np.arange(count) // landmarks.every
    length = place[-1]  # the last token is not read
    asked = place[first:] - 1 if landmarks.loss == "predict" else place[first - 1 : -1]
    chunk = min(pattern.chunk or length, -(-length // pattern.block) * pattern.block)
    padded = -(-length // chunk) * chunk
    text = np.full((rows, padded), landmarks.token, np.int32)
    text[:, place[:-1]] = tokens[:, :-1]
    targets = np.zeros((rows, padded), np.int32)
    targets[:, asked] = tokens[:, first:]
    read = place[np.maximum(lengths, 1) - 1]  # the last token of a row is not read either
    # A choice of blocks may be that of all queries of a chunk, so padding must not take part.
    segments = (np.arange(padded) < read[:, None]).astype(np.int32)
    positions = np.broadcast_to(np.arange(padded, dtype=np.int32), text.shape)
    slots = cache_lib.whole_blocks(padded)
    cache = cache_lib.create(model.config, rows, slots, chunk=chunk, mesh=model.mesh)
    rotation, nll = rotations(np.maximum(read, 1)), []
    for start in range(0, padded, chunk):
        part = (x[:, start : start + chunk] for x in (text, targets, segments, positions))
        scores, cache = _read(model, params, cache, *part, rotation, memory)
        nll.append(scores)
    found = np.concatenate([distributed.gather(scores) for scores in nll], 1)[:, asked]
    return np.where(scored, found[: len(scored)], 0)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _read(model, params, cache, tokens, targets, segments, positions, rotation, memory):
    """The scores [B, T] of `targets`, and the cache with `tokens` [B, T] in it."""
    hidden, cache = read_on(model, params, cache, tokens, segments, positions, rotation, memory)
    return token_nll(hidden, head(params, model.config), targets), cache
