"""Block tables, the lists that kernels read, and how tables are made from flags of blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.atoms import integer

# Static tables are made from this many pairs of blocks at a time, to stay small in memory.
CELLS = 2**21
_LEAVES = ("index", "full", "seen", "overflow")


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=_LEAVES, meta_fields=("q_block", "k_block")
)
@dataclass(frozen=True, eq=False)
class BlockTable:
    """The visited key blocks of every query block; b is 1 or B, h is 1, K or N.

    index int32 [b, h, nq, capacity]: key blocks in visiting order, first the `full` ones, each
        kind ascending unless a maker says otherwise; the tail repeats the last one.
    full int32 [b, h, nq]: how many are visible to all their queries, without an element test.
    seen int32 [b, h, nq]: how many are visited at all.
    overflow bool [] or None: a traced table did not fit into its capacity, so its blocks are not
        all there and what is computed from it must not be used. None: it cannot happen.
    q_block, k_block: rows of a block; the last block of either may be shorter. A shorter last key
        block is never full, so that kernels may read it padded.
    """

    index: jax.Array | np.ndarray
    full: jax.Array | np.ndarray
    seen: jax.Array | np.ndarray
    overflow: jax.Array | None
    q_block: int
    k_block: int

    @property
    def capacity(self) -> int:
        return self.index.shape[-1]

    @property
    def static(self) -> bool:
        """Whether the table is known outside of a traced program."""
        return not on_device(self.index, self.full, self.seen)

    @property
    def listed(self):
        """bool [b, h, nq, capacity]: which entries of `index` are visited, not repeats."""
        return np.arange(self.capacity) < self.seen[..., None]

    @property
    def known_full(self):
        """bool [b, h, nq, capacity]: which entries of `index` are full."""
        return np.arange(self.capacity) < self.full[..., None]

    def tested(self) -> BlockTable:
        """The table with no block called full: kernels test the elements of all."""
        return replace(self, full=0 * self.full)

    def heads(self, change: Callable) -> BlockTable:
        """The table with `change` applied to the arrays along their axis of heads, 1."""
        arrays = {name: change(getattr(self, name)) for name in ("index", "full", "seen")}
        return replace(self, **arrays)

    def lists(self) -> BlockLists:
        """The lists of the query blocks, one behind the other."""
        first = np.arange(self.seen.shape[2], dtype=np.int32) * self.capacity
        index = self.index.reshape(*self.seen.shape[:2], -1)
        return BlockLists(index, np.broadcast_to(first, self.seen.shape), self.full, self.seen)


@dataclass(frozen=True, eq=False)
class BlockLists:
    """For every block the blocks that it meets, as kernels read them; b is 1 or B, h is 1, K or N.

    index int32 [b, h, entries]: the lists of all blocks; what is in none of them has no meaning.
    first int32 [b, h, blocks]: where in `index` a block's list starts.
    full, seen int32 [b, h, blocks]: how many of a list need no element test, which come first, and
        how many there are.
    """

    index: jax.Array | np.ndarray
    first: jax.Array | np.ndarray
    full: jax.Array | np.ndarray
    seen: jax.Array | np.ndarray

    @property
    def static(self) -> bool:
        """Whether the lists are known outside of a traced program."""
        return not on_device(self.index, self.full, self.seen)


def on_device(*arrays) -> bool:
    return any(isinstance(x, jax.Array) for x in arrays)


def namespace(*arrays):
    """NumPy for arrays that are known, jax.numpy as soon as one is traced or on a device."""
    return jnp if on_device(*arrays) else np


def choose(columns, some, whole, capacity: int | None):
    """(index, full, seen) of candidates with flags [..., candidates]: full ones, then others.

    columns: the block that each candidate is; None means 0, 1, ... A capacity of None is what the
    fullest row needs if that is known, else the number of candidates. Rows are cut off at it.
    """
    xp = namespace(some, whole)
    whole = whole & some
    order = xp.argsort(-(some.astype(np.int8) + whole.astype(np.int8)), axis=-1, stable=True)
    full, seen = (x.sum(-1).astype(np.int32) for x in (whole, some))
    if capacity is None:
        capacity = some.shape[-1] if xp is jnp else max(1, int(seen.max()))
    place = xp.minimum(np.arange(capacity, dtype=np.int32), xp.maximum(seen - 1, 0)[..., None])
    index = xp.take_along_axis(order, place, -1)
    if columns is not None:
        index = xp.take_along_axis(columns, index, -1)
    return index.astype(np.int32), full, seen


def build(columns, some, whole, capacity: int | None, q_block: int, k_block: int) -> BlockTable:
    """A table from candidates with flags [b, h, nq, candidates], see `choose`."""
    return _fitted(*choose(columns, some, whole, capacity), capacity, q_block, k_block)


def build_static(
    pieces: Iterable, shape: tuple[int, int, int], capacity: int | None, q_block: int, k_block: int
) -> BlockTable:
    """A table [b, h, nq] from NumPy flags (some, whole) [rows, nk] of consecutive rows."""
    parts = [choose(None, some, whole, None) for some, whole in pieces]
    index, full, seen = ([part[i] for part in parts] for i in range(3))
    wide = max(x.shape[-1] for x in index) if capacity is None else capacity
    index = np.concatenate([_widen(x, wide) for x in index])
    full, seen = np.concatenate(full), np.concatenate(seen)
    arrays = index.reshape(*shape, -1), full.reshape(shape), seen.reshape(shape)
    return _fitted(*arrays, capacity, q_block, k_block)


def row_pieces(rows: int, columns: int) -> Iterable[slice]:
    """Slices of rows, of about CELLS cells each."""
    step = max(1, CELLS // columns)
    return (slice(start, start + step) for start in range(0, rows, step))


def stack_heads(parts: list[tuple[BlockTable, int]]) -> BlockTable:
    """One table from (table, times it is repeated) of consecutive heads."""
    wide = max(part.capacity for part, _ in parts)
    leaves = {}
    xp = namespace(*(x for part, _ in parts for x in (part.index, part.seen)))
    for name in ("index", "full", "seen"):
        arrays = [
            (_widen(part.index, wide) if name == "index" else getattr(part, name), times)
            for part, times in parts
        ]
        batch = max(len(x) for x, _ in arrays)
        arrays = [
            xp.broadcast_to(xp.repeat(x, times, 1), (batch, times * x.shape[1], *x.shape[2:]))
            for x, times in arrays
        ]
        leaves[name] = xp.concatenate(arrays, 1)
    return replace(parts[0][0], **leaves, overflow=any_overflow(*(part for part, _ in parts)))


def any_overflow(*tables: BlockTable):
    flags = [table.overflow for table in tables if table.overflow is not None]
    return functools.reduce(jnp.logical_or, flags) if flags else None


def _widen(index, capacity: int):
    """[..., c] -> [..., capacity]; the last entry is repeated already."""
    xp, more = namespace(index), capacity - index.shape[-1]
    if more <= 0:
        return index[..., :capacity]
    return xp.pad(index, [(0, 0)] * (index.ndim - 1) + [(0, more)], mode="edge")


def _fitted(index, full, seen, capacity: int | None, q_block: int, k_block: int) -> BlockTable:
    """A table, if what it has seen fits: an error now where that is known, else a flag."""
    overflow = None
    if capacity is not None:
        integer("a block table: capacity", capacity, 1)
        most = seen.max()
        if isinstance(most, jax.core.Tracer):
            overflow, seen = most > capacity, jnp.minimum(seen, capacity)
            full = jnp.minimum(full, capacity)
        elif int(most) > capacity:
            raise ValueError(
                f"a block table: capacity {capacity} is too small, a block visits {int(most)} "
                f"others; give at least {int(most)}"
            )
    return BlockTable(index, full, seen, overflow, q_block, k_block)
