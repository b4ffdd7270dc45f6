"""Which keys each query sees, one bit for each pair: for choices that no block table can express.

A word of 32 bits holds keys that are 128 apart: bit n of word 128 m + i belongs to key 4096 m + 128
n + i. So a kernel has the bits of 128 consecutive keys in as many lanes, after one `and`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.tables import namespace

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int, UInt32

BITS, LANES = 32, 128
SPAN = BITS * LANES  # keys of 128 words


def num_words(keys: int) -> int:
    """Returns the number of words W for so many keys."""
    return -(-keys // SPAN) * LANES


def pack(visible: Bool[Array, "... S"]) -> UInt32[Array, "... W"]:
    """Returns the words of the keys that are visible; those of a NumPy array are one."""
    xp, (*shape, keys) = namespace(visible), visible.shape
    padded = xp.pad(visible, [(0, 0)] * len(shape) + [(0, -keys % SPAN)])
    tiles = padded.reshape(*shape, -1, BITS, LANES).astype(np.uint32)
    places = np.arange(BITS, dtype=np.uint32)[:, None]
    return (tiles << places).sum(-2, dtype=np.uint32).reshape(*shape, -1)


def unpack(
    words: UInt32[Array, "... W"], first: Int[Array, ""] | int = 0, count: int | None = None
) -> Bool[Array, "... 128*count"]:
    """Returns which keys are visible, of `count` tiles of 128 keys from tile `first` on.

    None: of all tiles, with those that fill the last words.
    """
    words = words.reshape(*words.shape[:-1], -1, LANES)
    count = words.shape[-2] * BITS if count is None else count
    tiles = first + jnp.arange(count, dtype=jnp.int32)
    words = jnp.take(words, tiles // BITS, axis=-2, mode="clip")
    bits = (words >> (tiles % BITS).astype(jnp.uint32)[:, None]) & jnp.uint32(1)
    return bits.reshape(*words.shape[:-2], -1) != 0


def visited(
    words: UInt32[Array, "B T W"], q_block: int, k_block: int, keys: int
) -> Bool[Array, "B nq nk"]:
    """Returns the blocks in which a query sees a key; `k_block` is a multiple of 128."""
    rows, queries, _ = words.shape
    words = jnp.pad(words, [(0, 0), (0, -queries % q_block), (0, 0)])
    words = words.reshape(rows, -1, q_block, words.shape[2])
    words = jax.lax.reduce(words, jnp.uint32(0), jax.lax.bitwise_or, (2,))
    tiles = unpack(words).reshape(*words.shape[:2], -1, LANES).any(-1)
    count, size = -(-keys // k_block), k_block // LANES
    tiles = jnp.pad(tiles, [(0, 0), (0, 0), (0, max(0, count * size - tiles.shape[2]))])
    return tiles[:, :, : count * size].reshape(*tiles.shape[:2], count, size).any(-1)
