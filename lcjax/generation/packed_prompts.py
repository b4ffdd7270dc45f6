"""Prompts of different lengths, read one behind the other and then laid in a cache row by row.

Read into rows of one length, as a cache has them, each would cost as much as the longest.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from lcjax.generation.shapes import LONGEST_ROW, bucketed, packing_saves
from lcjax.models import Decoder
from lcjax.models import cache as cache_lib
from lcjax.models.cache import Cache
from lcjax.models.layers import Keep
from lcjax.rope import Rotation


class Prompts(NamedTuple):
    """B prompts in a row of W places, and where they go in a cache of B rows, all int32."""

    tokens: np.ndarray  # [1, W]
    segments: np.ndarray  # [1, W], prompts numbered from 1, 0 behind them
    positions: np.ndarray  # [1, W], in the own prompt
    ends: np.ndarray  # [B], places of the last tokens
    source: np.ndarray  # [1, B * T], the place of what goes to each of T slots


def better(
    model: Decoder, cache: Cache, sizes: Sequence[int], width: int, rotation: Rotation
) -> bool:
    """Whether prompts may be read so, and are fewer tokens than in rows of `width`.

    In one row, not too long, of one rotation, that nothing is split over, and not under a pattern
    that notes something of its keys, which it does where they stay. A prompt alone has programs of
    few sizes.
    """
    config = model.config
    if len(sizes) == 1 or sum(sizes) > LONGEST_ROW:
        return False
    if not packing_saves(bucketed(sum(sizes)), len(sizes) * width):
        return False
    if model.mesh is not None or config.position == "learned" or cache.rolling is not None:
        return False
    pattern = config.pattern
    if not pattern.is_position_based or pattern.cache_state_shapes(cache.capacity, config.head_dim):
        return False
    return rotation.inv_freq.ndim == 1


def read(
    model: Decoder,
    params: dict,
    cache: Cache,
    prompts: Sequence[Sequence[int]],
    segments: np.ndarray,
    positions: np.ndarray,
    rotation: Rotation,
) -> tuple[jax.Array, Cache]:
    """The logits [B, V] after `prompts`, and the empty `cache`, which is given up, with them in it.

    There they lie on the right of T slots, with `segments` and `positions` [B, T]; `rotation` is
    that of all rows.
    """
    rows = _laid_out(prompts, segments.shape[1])
    return _read(model, params, cache, rows, segments, positions, rotation)


def _laid_out(prompts: Sequence[Sequence[int]], slots: int) -> Prompts:
    sizes = np.array([len(prompt) for prompt in prompts])
    ends, total = np.cumsum(sizes), int(sizes.sum())
    starts = ends - sizes
    texts = (
        np.concatenate(prompts),
        np.repeat(np.arange(1, len(sizes) + 1), sizes),
        np.arange(total) - np.repeat(starts, sizes),
    )
    wide = [np.pad(x, (0, bucketed(total) - total))[None] for x in texts]
    # What a slot before a prompt holds is seen by nobody.
    source = np.maximum(ends[:, None] - slots + np.arange(slots), starts[:, None]).reshape(1, -1)
    return Prompts(*(x.astype(np.int32) for x in (*wide, ends - 1, source)))


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def _read(model, params, cache, rows: Prompts, segments, positions, rotation):
    pattern, at = model.config.pattern, None
    if cache.rotated:
        at = pattern.key_positions(positions, positions).reshape(1, -1)
    hidden, kept = model.apply(
        {"params": params}, rows.tokens, positions=rows.positions, segments=rows.segments,
        rotation=rotation, keep=Keep(rows.source, at),
    )  # fmt: skip

    def write(slots, new):
        """[.., B, K, S, H] with [.., 1, B * T, K, H] in the first T slots."""
        *rest, batch, heads, _, size = slots.shape
        new = new.reshape(*rest, batch, -1, heads, size).swapaxes(-3, -2).astype(slots.dtype)
        return jax.lax.dynamic_update_slice(slots, new, (0,) * slots.ndim)

    cache, _ = cache_lib.extend(cache, segments, positions)
    cache = cache_lib.replace_layers(cache, jax.tree.map(write, cache.layers, kept))
    logits = model.apply({"params": params}, hidden[0, rows.ends], method="logits")
    return logits, cache
