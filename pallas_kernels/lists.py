"""Atoms that hold a list: keys, queries, starts of documents, random blocks.

Where arrays are traced, a short list is unrolled into comparisons with scalars, because a kernel's
body cannot hold arrays of its own; a long one is looked up (then `arithmetic` is false).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.algebra import Mask
from pallas_kernels.atoms import floor_divide

UNROLLED = 128  # longest list that is unrolled
# A table of random blocks is summed over rectangles up to this many cells (16 MB).
SUMMED_CELLS = 2**22
NO_BLOCK = -(2**31)  # no key has this block


def _count_up_to(values: tuple[int, ...], x, side: str = "right"):
    """How many of the sorted `values` are at most x ("right") or below x ("left")."""
    if not isinstance(x, jax.Array):
        return np.searchsorted(np.asarray(values, np.int64), x, side=side)
    if len(values) > UNROLLED:
        return jnp.searchsorted(jnp.asarray(values, x.dtype), x, side=side)
    at_most = (x >= v if side == "right" else x > v for v in values)
    return sum((flag.astype(x.dtype) for flag in at_most), 0 * x)


def _pick(values: tuple[int, ...], i, default: int):
    """values[i], or `default` where i is no place of the list."""
    if isinstance(i, jax.Array) and len(values) <= UNROLLED:
        picked = jnp.full_like(i, default)
        for place, value in enumerate(values):
            picked = jnp.where(i == place, value, picked)
        return picked
    xp = jnp if isinstance(i, jax.Array) else np
    inside = (i >= 0) & (i < len(values))
    return xp.where(inside, xp.asarray(values, np.int32)[xp.clip(i, 0, len(values) - 1)], default)


@dataclass(frozen=True)
class _Listed(Mask):
    places: tuple[int, ...]

    @property
    def arithmetic(self) -> bool:
        return len(self.places) <= UNROLLED

    def _inside(self, lo, hi):
        """How many listed places there are from lo to hi."""
        return _count_up_to(self.places, hi) - _count_up_to(self.places, lo, "left")


@dataclass(frozen=True)
class KeysIn(_Listed):
    """The keys of a list of places, for every query."""

    def element(self, q, k):
        return self._inside(k, k) + 0 * q > 0

    def bounds(self, q_lo, q_hi, k_lo, k_hi):
        count = self._inside(k_lo, k_hi) + 0 * q_lo
        return count > 0, count > k_hi - k_lo


@dataclass(frozen=True)
class QueriesIn(_Listed):
    """All keys, for the queries of a list of places."""

    def element(self, q, k):
        return self._inside(q, q) + 0 * k > 0

    def bounds(self, q_lo, q_hi, k_lo, k_hi):
        count = self._inside(q_lo, q_hi) + 0 * k_lo
        return count > 0, count > q_hi - q_lo


@dataclass(frozen=True)
class Documents(_Listed):
    """The same document, where documents begin at the listed places."""

    def element(self, q, k):
        return _count_up_to(self.places, q) == _count_up_to(self.places, k)

    def bounds(self, q_lo, q_hi, k_lo, k_hi):
        q_lo, q_hi, k_lo, k_hi = (_count_up_to(self.places, x) for x in (q_lo, q_hi, k_lo, k_hi))
        return (q_lo <= k_hi) & (k_lo <= q_hi), (q_lo == k_hi) & (q_hi == k_lo)


@dataclass(frozen=True)
class RandomBlocks(Mask):
    """Key blocks listed for each block of queries: `k // block in table[q // block]`."""

    block: int
    table: tuple[tuple[int, ...], ...]

    @property
    def arithmetic(self) -> bool:
        return len(self.table) <= UNROLLED

    @functools.cached_property
    def _columns(self) -> tuple[tuple[int, ...], ...]:
        width = max(map(len, self.table), default=0)
        return tuple(zip(*(row + (NO_BLOCK,) * (width - len(row)) for row in self.table)))

    @functools.cached_property
    def _sums(self) -> np.ndarray | None:
        """sums[i, j]: listed pairs of query blocks below i and key blocks below j."""
        rows, columns = (
            len(self.table),
            1 + max((max(r, default=-1) for r in self.table), default=-1),
        )
        if (rows + 1) * (columns + 1) > SUMMED_CELLS:
            return None
        sums = np.zeros((rows + 1, columns + 1), np.int32)
        for i, row in enumerate(self.table):
            sums[i + 1, np.asarray(row, np.int64) + 1] = 1
        return sums.cumsum(0, dtype=np.int32).cumsum(1, dtype=np.int32)

    def element(self, q, k):
        q, k = floor_divide(q, self.block), floor_divide(k, self.block)
        seen = 0 * q + 0 * k != 0
        for column in self._columns:
            seen = seen | (_pick(column, q, NO_BLOCK) == k)
        return seen

    def bounds(self, q_lo, q_hi, k_lo, k_hi):
        q_lo, q_hi, k_lo, k_hi = (x // self.block for x in (q_lo, q_hi, k_lo, k_hi))
        if self._sums is None:  # too large to sum: any block of the table may be listed
            some = (q_hi >= 0) & (q_lo < len(self.table)) & (k_hi + 0 * q_lo >= 0)
            return some, some & (0 * q_lo != 0)
        traced = any(isinstance(x, jax.Array) for x in (q_lo, q_hi, k_lo, k_hi))
        xp, rows, columns = (jnp if traced else np), *(n - 1 for n in self._sums.shape)
        sums = xp.asarray(self._sums)
        i, j = xp.clip(q_lo, 0, rows), xp.clip(k_lo, 0, columns)
        m, n = xp.clip(q_hi + 1, 0, rows), xp.clip(k_hi + 1, 0, columns)
        count = sums[m, n] - sums[i, n] - sums[m, j] + sums[i, j]
        return count > 0, count == (q_hi - q_lo + 1) * (k_hi - k_lo + 1)
