"""How landmark blocks are laid out for the TPU kernels: whole registers, whole blocks in a step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.backends.tpu import layout as layouts
from pallas_kernels.backends.tpu.layout import LANES, Layout

SUBLANES = 8
LARGEST_BLOCK = 1024  # keys of a step


@dataclass(frozen=True)
class LandmarkBlocks:
    """How landmark blocks lie in a step's keys: `step` of them, `height` keys each."""

    block: int
    height: int
    step: int
    count: int
    q_block: int  # queries of a table's block

    def spread(self, x):
        """[B, count * block, K, H] -> [B, count * height, K, H]."""
        if self.block == self.height:
            return x
        x = x.reshape(x.shape[0], self.count, self.block, *x.shape[2:])
        x = jnp.pad(x, [(0, 0), (0, 0), (0, self.height - self.block), (0, 0), (0, 0)])
        return x.reshape(x.shape[0], -1, *x.shape[3:])

    def narrow(self, x):
        """The inverse of `spread`, for keys that may be padded at the end."""
        x = x[:, : self.count * self.height]
        x = x.reshape(x.shape[0], self.count, self.height, *x.shape[2:])[:, :, : self.block]
        return x.reshape(x.shape[0], -1, *x.shape[3:])

    def vector(self, x, steps: int, fill: int):
        """[1 or B, count] -> columns [1 or B, steps, blocks of a step, 1]."""
        if x is None:
            return None
        more = steps * self.step - self.count
        x = jnp.pad(jnp.asarray(x, jnp.int32), [(0, 0), (0, more)], constant_values=fill)
        return x.reshape(x.shape[0], steps, self.step, 1)


def height_of(block: int) -> int:
    """Keys that a block takes: whole sublanes, and some blocks of it fill whole lanes."""
    least = -(-block // SUBLANES) * SUBLANES
    heights = range(least, LARGEST_BLOCK + 1, SUBLANES)
    return next(height for height in heights if math.lcm(height, LANES) <= LARGEST_BLOCK)


def layout(q, k, v, block: int, backward: bool) -> tuple[Layout, LandmarkBlocks]:
    """The layout of rows and of keys padded to whole steps, and how blocks lie in the latter."""
    height, count = height_of(block), k.shape[1] // block
    unit = math.lcm(height, LANES)
    keys = -(-count * height // unit) * unit
    _, most = layouts.step_blocks(q, v, backward)
    k_block = min(max(most // unit, 1) * unit, keys)
    padded = jax.ShapeDtypeStruct((k.shape[0], keys, *k.shape[2:]), k.dtype)
    q_block, _ = layouts.table_blocks(q, padded, v, backward)
    sizes = dict(lists=1, q_block=q_block, k_block=k_block, backward=backward)
    blocks = LandmarkBlocks(block, height, k_block // height, count, q_block)
    return layouts.layout(q, padded, v, **sizes), blocks
