"""Which keys each query sees, one bit for each pair: for choices that no block table can express.

Bit s % 32 of word s // 32 belongs to key s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, UInt32

BITS = 32  # of a word


def pack(visible: Bool[Array, "... S"]) -> UInt32[Array, "... W"]:
    """Returns the words of the keys that are visible; W is S / 32, rounded up."""
    keys = visible.shape[-1]
    padding = [(0, 0)] * (visible.ndim - 1) + [(0, -keys % BITS)]
    grouped = jnp.pad(visible, padding).reshape(*visible.shape[:-1], -1, BITS)
    places = jnp.arange(BITS, dtype=jnp.uint32)
    return (grouped.astype(jnp.uint32) << places).sum(-1, dtype=jnp.uint32)


def unpack(words: UInt32[Array, "... W"]) -> Bool[Array, "... 32*W"]:
    """Returns which keys are visible, with those that fill the last word."""
    places = jnp.arange(BITS, dtype=jnp.uint32)
    bits = (words[..., None] >> places) & jnp.uint32(1)
    return bits.reshape(*words.shape[:-1], -1) != 0
