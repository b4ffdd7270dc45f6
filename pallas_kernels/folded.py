"""Keys and values whose heads are rows, read in the memory layout of a cache.

A cache may hold other tokens for each key head, and attention then takes its B x K heads as rows of
one head each. XLA's CPU compiler copies a cache that is reshaped between the write of a token and
a loop that reads blocks of it, in every step. The blockwise XLA implementation therefore reshapes
blocks; kernels get the reshaped array.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

if TYPE_CHECKING:
    from jaxtyping import Array, Float


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FoldedHeads:
    """The keys or values [B K, S, 1, H] of the array [B, K, S, H]. They have no gradient."""

    array: Float[Array, "B K S H"] | Any

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape [B K, S, 1, H]."""
        rows, heads, slots, size = self.array.shape
        return rows * heads, slots, 1, size

    @property
    def dtype(self):
        return self.array.dtype

    @property
    def ndim(self) -> int:
        return 4

    def rows(self) -> Float[Array, "B*K S 1 H"]:
        """Returns the keys as one array."""
        return self.array.reshape(self.shape)


def as_rows(tree: Any) -> Any:
    """Returns a pytree of arrays in place of one of arrays and `FoldedHeads`."""

    def is_folded(x):
        return isinstance(x, FoldedHeads)

    return jax.tree.map(lambda x: x.rows() if is_folded(x) else x, tree, is_leaf=is_folded)


def are_alike(k: Any, v: Any) -> bool:
    """Returns whether both are arrays or codes, or `FoldedHeads` of the same heads of a text."""
    shapes = [x.array.shape[:3] if isinstance(x, FoldedHeads) else None for x in (k, v)]
    return shapes[0] == shapes[1]
