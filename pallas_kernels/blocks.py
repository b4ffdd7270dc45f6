"""What is known of blocks of queries and of keys, and so of the pairs of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import numpy as np

from pallas_kernels.algebra import Mask
from pallas_kernels.atoms import integer
from pallas_kernels.block_table import namespace, row_pieces


class Blocks(NamedTuple):
    """What is known of every block of queries or keys; arrays [1 or B, blocks].

    The order indices are within lo..hi. The segments other than padding are within first..last
    (first > last: there are none); both are None without segments. mixed: not all rows count.
    """

    lo: jax.Array | np.ndarray
    hi: jax.Array | np.ndarray
    first: jax.Array | np.ndarray | None
    last: jax.Array | np.ndarray | None
    mixed: jax.Array | np.ndarray

    def take(self, f: Callable) -> Blocks:
        return Blocks(*(None if x is None else f(x) for x in self))

    def row(self, b: int) -> Blocks:
        return self.take(lambda x: x[min(b, len(x) - 1)])

    def piece(self, some: slice) -> Blocks:
        """Some blocks of one row, as a column."""
        return self.take(lambda x: x[some, None])

    @property
    def count(self) -> int:
        return self.lo.shape[-1]

    @property
    def batch(self) -> int:
        return max(len(x) for x in self if x is not None)


def blocks_of(index, segments, length: int, block: int, cut_is_mixed: bool = False) -> Blocks:
    integer("a block table: block", block, 1)
    count = -(-integer("a block table: length", length, 1) // block)

    def split(x):
        xp = namespace(x)
        x = xp.asarray(x).reshape(-1, length)
        x = xp.pad(x, [(0, 0), (0, count * block - length)], mode="edge")
        return x.reshape(-1, count, block)

    if index is None:
        lo = np.arange(0, length, block, dtype=np.int32)[None]
        hi = np.minimum(lo + (block - 1), np.int32(length - 1))
    else:
        index = split(index)
        lo, hi = index.min(-1), index.max(-1)
    mixed = np.zeros((1, count), bool)
    mixed[0, -1] = cut_is_mixed and length % block != 0
    if segments is None:
        return Blocks(lo, hi, None, None, mixed)
    segments, limits = split(segments), np.iinfo(np.int32)
    xp = namespace(segments)
    first = xp.where(segments == 0, limits.max, segments).min(-1)
    last = xp.where(segments == 0, limits.min, segments).max(-1)
    return Blocks(lo, hi, first, last, mixed | (segments == 0).any(-1))


def meet(mask: Mask, q: Blocks, k: Blocks, known_full=False):
    """(any, all) of pairs of blocks; the arrays of q and k broadcast against each other."""
    some, whole = mask.bounds(q.lo, q.hi, k.lo, k.hi)
    whole = (whole | known_full) & ~(q.mixed | k.mixed)
    if (q.first is None) != (k.first is None):
        raise ValueError("a block table: give both q_segments and k_segments, or neither")
    if q.first is not None:
        some = some & (q.first <= k.last) & (k.first <= q.last)
        whole = whole & (q.first == k.last) & (q.last == k.first)
    return some, whole & some


def meetings(mask: Mask, q: Blocks, k: Blocks) -> Iterable:
    """The answers of `meet`, [rows, nk] at a time, for all queries of each batch row in turn."""
    for b in range(max(q.batch, k.batch)):
        rows, columns = q.row(b), k.row(b)
        for piece in row_pieces(q.count, k.count):
            yield meet(mask, rows.piece(piece), columns)


def at(x, index):
    """x[b, index[b, ...]] of x [1 or B, nk] for every place of the table."""
    x = namespace(x, index).asarray(x)
    if len(x) == 1:
        return x[0][index]
    return x[np.arange(len(x))[:, None, None, None], index]
