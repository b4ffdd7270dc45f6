"""Block tables: which blocks of keys each block of queries visits, and which need an element test.

A table is static (NumPy leaves) if all its inputs are, and traced otherwise. Making it from a mask
takes O(blocks of queries x blocks of keys) array operations, and from a list O(listed blocks);
never O(T S). A transposed table lists for each block of keys the blocks of queries that visit it;
the pass over keys of a backward kernel needs it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.explanations import VisitedFraction
from pallas_kernels.masks import Mask, PerHead, integer

# Static tables are made from this many pairs of blocks at a time, to save memory.
CELLS = 2**21
_LEAVES = ("index", "full", "seen", "overflow")


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=_LEAVES, meta_fields=("q_block", "k_block")
)
@dataclass(frozen=True, eq=False)
class BlockTable:
    """The visited key blocks of every query block; b is 1 or B, h is 1, K or N.

    Attributes:
      index: int32 [b, h, nq, capacity], key blocks in visiting order: the `full` ones first, then
        the others, both ascending unless stated otherwise. The tail repeats the last one.
      full: int32 [b, h, nq], the number of full blocks: all their pairs are visible, so kernels do
        not test them.
      seen: int32 [b, h, nq], the number of all visited blocks.
      overflow: bool [], whether a traced table exceeds its capacity, so that blocks are missing
        and results computed from it are invalid. None: it cannot overflow.
      q_block: queries of a block; the last one may be shorter.
      k_block: keys of a block; a shorter last block is never full, so that kernels may read it
        padded.
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
        """Which entries of `index` are not repeats, bool [b, h, nq, capacity]."""
        return np.arange(self.capacity) < self.seen[..., None]

    @property
    def known_full(self):
        """Which entries of `index` are full blocks, bool [b, h, nq, capacity]."""
        return np.arange(self.capacity) < self.full[..., None]

    def fraction(self, keys: int) -> VisitedFraction | None:
        """Returns the fraction of pairs of blocks that are visited; None for a traced table."""
        if not self.static:
            return None
        pairs = self.seen.size * -(-keys // self.k_block)
        return VisitedFraction.of(pairs, self.seen.sum(), (self.seen - self.full).sum())

    def tested(self) -> BlockTable:
        """Returns the table without full blocks: kernels test the elements of all blocks."""
        return replace(self, full=0 * self.full)

    def heads(self, change: Callable) -> BlockTable:
        """Returns the table with `change` applied to index, full and seen (heads: axis 1)."""
        arrays = {name: change(getattr(self, name)) for name in ("index", "full", "seen")}
        return replace(self, **arrays)

    def lists(self) -> BlockLists:
        """Returns the concatenated lists of the query blocks."""
        first = np.arange(self.seen.shape[2], dtype=np.int32) * self.capacity
        index = self.index.reshape(*self.seen.shape[:2], -1)
        return BlockLists(index, np.broadcast_to(first, self.seen.shape), self.full, self.seen)


@dataclass(frozen=True, eq=False)
class BlockLists:
    """Lists of the blocks that every block visits, for kernels; b is 1 or B, h is 1, K or N.

    Attributes:
      index: int32 [b, h, entries], the lists of all blocks; entries outside of lists are undefined.
      first: int32 [b, h, blocks], the offset of a block's list in `index`.
      full: int32 [b, h, blocks], the number of full blocks of a list, which come first and need no
        element test.
      seen: int32 [b, h, blocks], the number of all blocks of a list.
    """

    index: jax.Array | np.ndarray
    first: jax.Array | np.ndarray
    full: jax.Array | np.ndarray
    seen: jax.Array | np.ndarray


def on_device(*arrays) -> bool:
    return any(isinstance(x, jax.Array) for x in arrays)


def namespace(*arrays):
    """Returns the module jax.numpy if any array is a JAX array, else NumPy."""
    return jnp if on_device(*arrays) else np


def choose(columns, some, whole, capacity: int | None):
    """Returns (index, full, seen) of the visible candidates: full blocks first, then the others.

    Args:
      columns: the block of each candidate; None means 0, 1, ...
      some, whole: flags [..., candidates]: whether some, and whether all, pairs of a block are
        visible.
      capacity: the length of a row of `index`; longer rows are truncated. None: the length of the
        longest row if that is known, else the number of candidates.
    """
    xp = namespace(some, whole)
    whole = whole & some
    order = xp.argsort(-(some.astype(np.int8) + whole.astype(np.int8)), axis=-1, stable=True)
    full, seen = (x.sum(-1).astype(np.int32) for x in (whole, some))
    if capacity is None:
        capacity = some.shape[-1] if xp is jnp else max(1, int(seen.max()))
    slot = xp.minimum(np.arange(capacity, dtype=np.int32), xp.maximum(seen - 1, 0)[..., None])
    index = xp.take_along_axis(order, slot, -1)
    if columns is not None:
        index = xp.take_along_axis(columns, index, -1)
    return index.astype(np.int32), full, seen


def build(columns, some, whole, capacity: int | None, q_block: int, k_block: int) -> BlockTable:
    """Returns a table of candidates with flags [b, h, nq, candidates]; arguments as in `choose`."""
    return _fitted(*choose(columns, some, whole, capacity), capacity, q_block, k_block)


def build_static(
    pieces: Iterable, shape: tuple[int, int, int], capacity: int | None, q_block: int, k_block: int
) -> BlockTable:
    """Returns a table [b, h, nq] of NumPy flags (some, whole) [rows, nk] of consecutive rows."""
    parts = [choose(None, some, whole, None) for some, whole in pieces]
    index, full, seen = ([part[i] for part in parts] for i in range(3))
    width = max(x.shape[-1] for x in index) if capacity is None else capacity
    index = np.concatenate([_widen(x, width) for x in index])
    full, seen = np.concatenate(full), np.concatenate(seen)
    arrays = index.reshape(*shape, -1), full.reshape(shape), seen.reshape(shape)
    return _fitted(*arrays, capacity, q_block, k_block)


def row_pieces(rows: int, columns: int) -> Iterable[slice]:
    """Returns slices of rows with about CELLS cells each."""
    step = max(1, CELLS // columns)
    return (slice(start, start + step) for start in range(0, rows, step))


def stack_heads(parts: list[tuple[BlockTable, int]]) -> BlockTable:
    """Concatenates the tables of consecutive heads, given as pairs (table, number of repeats)."""
    width = max(part.capacity for part, _ in parts)
    leaves = {}
    xp = namespace(*(x for part, _ in parts for x in (part.index, part.seen)))
    for name in ("index", "full", "seen"):
        arrays = [
            (_widen(part.index, width) if name == "index" else getattr(part, name), times)
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
    """[..., c] -> [..., capacity], by repeating the last entry, or by truncation."""
    xp, more = namespace(index), capacity - index.shape[-1]
    if more <= 0:
        return index[..., :capacity]
    return xp.pad(index, [(0, 0)] * (index.ndim - 1) + [(0, more)], mode="edge")


def _fitted(index, full, seen, capacity: int | None, q_block: int, k_block: int) -> BlockTable:
    """Returns a table. If it overflows its capacity: raises if that is known, else sets a flag."""
    overflow = None
    if capacity is not None:
        integer("a block table: capacity", capacity, 1)
        most = seen.max()
        if isinstance(most, jax.core.Tracer):
            overflow, seen = most > capacity, jnp.minimum(seen, capacity)
            full = jnp.minimum(full, capacity)
        elif int(most) > capacity:
            raise ValueError(
                f"a block table: capacity={capacity} is too small, since a query block visits "
                f"{int(most)} key blocks; give at least {int(most)}"
            )
    q_block, k_block = (integer("a block table: block", x, 1) for x in (q_block, k_block))
    return BlockTable(index, full, seen, overflow, q_block, k_block)


class BlockBounds(NamedTuple):
    """Bounds of every block of queries or keys; arrays [1 or B, blocks].

    The order indices are within lo..hi. The segments other than padding are within first..last
    (first > last: the block is padding); both are None without segments. mixed: whether the block
    contains padding.
    """

    lo: jax.Array | np.ndarray
    hi: jax.Array | np.ndarray
    first: jax.Array | np.ndarray | None
    last: jax.Array | np.ndarray | None
    mixed: jax.Array | np.ndarray

    def take(self, f: Callable) -> BlockBounds:
        return BlockBounds(*(None if x is None else f(x) for x in self))

    def row(self, b: int) -> BlockBounds:
        return self.take(lambda x: x[min(b, len(x) - 1)])

    def piece(self, part: slice) -> BlockBounds:
        """Returns a slice of the blocks of one row, as a column."""
        return self.take(lambda x: x[part, None])

    @property
    def count(self) -> int:
        return self.lo.shape[-1]

    @property
    def batch(self) -> int:
        return max(len(x) for x in self if x is not None)


def block_bounds(index, segments, length: int, block: int, is_padded: bool = False) -> BlockBounds:
    """Returns the bounds of blocks; with is_padded a shorter last block counts as mixed."""
    integer("a block table: block", block, 1)
    count = -(-integer("a block table: length", length, 1) // block)

    def split(x):
        xp = namespace(x)
        x = xp.asarray(x).reshape(-1, length)
        x = xp.pad(x, [(0, 0), (0, count * block - length)], mode="edge")
        if xp is jnp:
            # Without this, XLA for TPUs (libtpu 0.0.42) flattens the array and has no code for the
            # reshape after that, in 8 rows of a window's keys and the tokens after them.
            x = lax.optimization_barrier(x)
        return x.reshape(-1, count, block)

    if index is None:
        lo = np.arange(0, length, block, dtype=np.int32)[None]
        hi = np.minimum(lo + (block - 1), np.int32(length - 1))
    else:
        index = split(index)
        lo, hi = index.min(-1), index.max(-1)
    mixed = np.zeros((1, count), bool)
    mixed[0, -1] = is_padded and length % block != 0
    if segments is None:
        return BlockBounds(lo, hi, None, None, mixed)
    segments, limits = split(segments), np.iinfo(np.int32)
    xp = namespace(segments)
    first = xp.where(segments == 0, limits.max, segments).min(-1)
    last = xp.where(segments == 0, limits.min, segments).max(-1)
    return BlockBounds(lo, hi, first, last, mixed | (segments == 0).any(-1))


def block_visibility(mask: Mask, q: BlockBounds, k: BlockBounds, known_full=False):
    """Returns (any, all) of pairs of blocks under the mask and the segments; q and k broadcast."""
    some, whole = mask.bounds(q.lo, q.hi, k.lo, k.hi)
    whole = (whole | known_full) & ~(q.mixed | k.mixed)
    if (q.first is None) != (k.first is None):
        raise ValueError("a block table: give both q_segments and k_segments, or neither")
    if q.first is not None:
        some = some & (q.first <= k.last) & (k.first <= q.last)
        whole = whole & (q.first == k.last) & (q.last == k.first)
    return some, whole & some


def _visibility_by_rows(mask: Mask, q: BlockBounds, k: BlockBounds) -> Iterable:
    """Yields the flags of `block_visibility`, [rows, nk] at a time, batch row by batch row."""
    for b in range(max(q.batch, k.batch)):
        rows, columns = q.row(b), k.row(b)
        for piece in row_pieces(q.count, k.count):
            yield block_visibility(mask, rows.piece(piece), columns)


def _gather_blocks(x, index):
    """Returns x[b, index[b, ...]] of x [1 or B, nk] for every entry of a table."""
    x = namespace(x, index).asarray(x)
    if len(x) == 1:
        return x[0][index]
    return x[np.arange(len(x))[:, None, None, None], index]


def from_mask(
    mask: Mask,
    *,
    queries: int,
    keys: int,
    q_block: int,
    k_block: int,
    q_index=None,
    k_index=None,
    q_segments=None,
    k_segments=None,
    capacity: int | None = None,
) -> BlockTable:
    """Returns the table of the blocks that are visible under `mask` and the segments.

    The table has b = B if indices or segments are given per batch row, else b = 1; and h = N for a
    mask per head, else h = 1.

    Args:
      queries, keys: the lengths T and S.
      q_block, k_block: the sizes of a block.
      q_index, k_index: order indices [T] or [B, T], and [S] or [B, S]; by default 0, 1, ...
      q_segments, k_segments: segments [B, T] and [B, S]; 0 is padding.
      capacity: the most key blocks of a query block; None: as many as are needed or possible.
    """
    if not isinstance(mask, Mask):
        raise TypeError(f"from_mask: the mask is a {type(mask).__name__}, must be as causal()")
    if isinstance(mask, PerHead):
        make = functools.partial(
            from_mask, queries=queries, keys=keys, q_block=q_block, k_block=k_block,
            q_index=q_index, k_index=k_index, q_segments=q_segments, k_segments=k_segments,
            capacity=capacity,
        )  # fmt: skip
        return stack_heads([(make(part), heads) for part, heads in mask.parts])
    q = block_bounds(q_index, q_segments, queries, q_block)
    k = block_bounds(k_index, k_segments, keys, k_block, is_padded=True)
    if not on_device(*q, *k):
        pieces, batch = _visibility_by_rows(mask, q, k), max(q.batch, k.batch)
        return build_static(pieces, (batch, 1, q.count), capacity, q_block, k_block)
    some, whole = block_visibility(
        mask, q.take(lambda x: x[:, :, None]), k.take(lambda x: x[:, None])
    )
    return from_block_mask(
        some[:, None], q_block=q_block, k_block=k_block, full=whole[:, None], capacity=capacity
    )


def from_block_mask(
    visible, *, q_block: int, k_block: int, full=None, capacity: int | None = None
) -> BlockTable:
    """Returns the table of the blocks of `visible` bool [nq, nk], [h, nq, nk] or [b, h, nq, nk].

    Args:
      full: bool of the same shape, blocks whose pairs are all visible; a shorter last key block
        must not be full. None: no block.
      capacity: as in `from_mask`.
    """
    if not (hasattr(visible, "dtype") and visible.dtype == bool):
        kind = getattr(visible, "dtype", type(visible).__name__)
        raise TypeError(f"from_block_mask: visible is {kind}, must be a bool array of blocks")
    if not 2 <= visible.ndim <= 4:
        raise ValueError(
            f"from_block_mask: visible has shape {visible.shape}, must be [nq, nk], "
            "[heads, nq, nk] or [batch, heads, nq, nk]"
        )
    full = visible & False if full is None else full
    if full.shape != visible.shape:
        raise ValueError(
            f"from_block_mask: full has shape {full.shape}, must be visible's {visible.shape}"
        )
    some, whole = (x.reshape((1,) * (4 - x.ndim) + x.shape) for x in (visible, full))
    if not on_device(some, whole):
        some2, whole2 = (x.reshape(-1, x.shape[-1]) for x in (some, whole))
        pieces = ((some2[rows], whole2[rows]) for rows in row_pieces(*some2.shape))
        return build_static(pieces, some.shape[:3], capacity, q_block, k_block)
    return build(None, some, whole, capacity, q_block, k_block)


def from_top_k(
    indices,
    valid=None,
    *,
    keys: int,
    q_block: int,
    k_block: int,
    also: Mask | None = None,
    q_index=None,
    k_index=None,
    capacity: int | None = None,
) -> BlockTable:
    """Returns the table of chosen key blocks, and of the blocks of the mask `also`.

    Blocks are visited once, in ascending order, and none is full.

    Args:
      indices: int [b, h, nq, k], the key blocks chosen for each query block. Repeats, and numbers
        that are no block of keys, are ignored.
      valid: bool of the same shape; choices where it is false are ignored.
      also: a mask whose blocks are added. They become visible as a whole, so the mask of the
        attention must still hide what `also` hides.
      q_index, k_index: order indices for `also`, as in `from_mask`.
      capacity: as in `from_mask`.
    """
    shape = np.shape(indices) if valid is None else np.shape(valid)
    if np.ndim(indices) != 4 or shape != np.shape(indices):
        raise ValueError(
            f"from_top_k: indices {np.shape(indices)} must be [batch or 1, heads or 1, query "
            f"blocks, choices], and valid must have their shape or be None; it has {shape}"
        )
    if not np.issubdtype(indices.dtype, np.integer):
        raise TypeError(f"from_top_k: indices are {indices.dtype}, must be integers")
    count = -(-keys // k_block)
    is_valid = (indices >= 0) & (indices < count)
    is_valid = is_valid if valid is None else is_valid & valid
    xp = namespace(indices, is_valid)
    listed = [xp.where(is_valid, indices, count)]
    if isinstance(also, PerHead):
        listed = [_every_head(listed[0], also.heads)]
    if also is not None:
        queries = indices.shape[2] * q_block if q_index is None else np.shape(q_index)[-1]
        table = from_mask(
            also, queries=queries, keys=keys, q_block=q_block, k_block=k_block,
            q_index=q_index, k_index=k_index,
        )  # fmt: skip
        xp = namespace(*listed, table.index)
        listed.append(xp.where(table.listed, table.index, count))
    shape = np.broadcast_shapes(*(x.shape[:3] for x in listed))
    listed = [xp.broadcast_to(x, (*shape, x.shape[-1])) for x in listed]
    columns = xp.sort(xp.concatenate(listed, -1), -1)
    before = xp.concatenate([xp.full_like(columns[..., :1], -1), columns[..., :-1]], -1)
    fresh = (columns < count) & (columns != before)
    columns = xp.minimum(columns, count - 1)
    table = build(columns, fresh, fresh & False, capacity, q_block, k_block)
    if capacity is not None:
        return table
    return replace(table, index=table.index[..., :count])  # no row has more than `count` blocks


def restrict(
    table: BlockTable,
    mask: Mask,
    *,
    queries: int,
    keys: int,
    q_index=None,
    k_index=None,
    q_segments=None,
    k_segments=None,
) -> BlockTable:
    """Returns the blocks of `table` that are visible under `mask` and the segments.

    It takes O(listed blocks) operations. Full blocks of the table stay full with respect to the
    mask; segments and a shorter last key block still apply to them. Full blocks, and the others,
    keep the order of the table.
    """
    if isinstance(mask, PerHead):
        options = dict(queries=queries, keys=keys, q_index=q_index, k_index=k_index)
        options |= dict(q_segments=q_segments, k_segments=k_segments)
        every_head = table.heads(lambda x: _every_head(x, mask.heads))
        parts, start = [], 0
        for part, count in mask.parts:
            heads = slice(start, start := start + count)
            of_part = every_head.heads(lambda x, heads=heads: x[:, heads])
            parts.append((restrict(of_part, part, **options), 1))
        return stack_heads(parts)
    q = block_bounds(q_index, q_segments, queries, table.q_block)
    k = block_bounds(k_index, k_segments, keys, table.k_block, is_padded=True)
    q, k = q.take(lambda x: x[:, None, :, None]), k.take(lambda x: _gather_blocks(x, table.index))
    some, whole = block_visibility(mask, q, k, table.known_full)
    some = some & table.listed
    columns = namespace(some, table.index).broadcast_to(table.index, some.shape)
    restricted = build(columns, some, whole, None, table.q_block, table.k_block)
    return replace(restricted, overflow=table.overflow)


def transpose(table: BlockTable, keys: int) -> BlockLists:
    """Returns the same pairs as lists of the query blocks of every key block, ascending.

    A traced table takes one sort of its entries, and memory for these only. No list overflows.
    """
    nk = -(-keys // table.k_block)
    return _transpose_static(table, nk) if table.static else _transpose_traced(table, nk)


def _transpose_traced(table: BlockTable, nk: int) -> BlockLists:
    """`transpose` of a traced table."""
    b, h, nq, capacity = table.index.shape
    # Each block of keys has two consecutive sort keys, for its full pairs and for the others. They
    # are unsigned, which XLA needs for a radix sort on a GPU.
    kinds = 2 * table.index + jnp.where(table.known_full, 0, 1)
    kinds = jnp.where(table.listed, kinds, 2 * nk).astype(jnp.uint32)
    rows = lax.broadcasted_iota(jnp.int32, kinds.shape, 2)
    lists = (x.reshape(b, h, nq * capacity) for x in (kinds, rows))
    kinds, rows = lax.sort(tuple(lists), num_keys=1, is_stable=True)
    # Unrolled, because each of the few steps of a loop would be a kernel launch or more.
    numbers = np.arange(2 * nk + 1, dtype=np.uint32)
    find = functools.partial(jnp.searchsorted, v=numbers, method="scan_unrolled")
    bounds = jax.vmap(jax.vmap(find))(kinds).astype(jnp.int32)
    first, middle, end = bounds[..., :-1:2], bounds[..., 1::2], bounds[..., 2::2]
    return BlockLists(rows, first, middle - first, end - first)


def _transpose_static(table: BlockTable, nk: int) -> BlockLists:
    """`transpose` of a static table."""
    b, h, nq, _ = table.index.shape
    kind = table.listed.astype(np.int8) + table.known_full
    lists, counts = [], []
    for index, kinds in zip(table.index.reshape(b * h, nq, -1), kind.reshape(b * h, nq, -1)):
        rows, slots = np.nonzero(kinds)
        dense = np.zeros((nk, nq), np.int8)
        dense[index[rows, slots], rows] = kinds[rows, slots]
        parts = [dense[piece] for piece in row_pieces(nk, nq)]
        # Full pairs precede the others, so that the non-zero entries are in the order of a list.
        columns = [np.nonzero(np.concatenate([x == 2, x == 1], 1))[1] % nq for x in parts]
        lists.append(np.concatenate(columns).astype(np.int32))
        counts.append([(dense == 2).sum(1), (dense > 0).sum(1)])
    width = max(1, *(len(x) for x in lists))
    index = np.stack([np.pad(x, (0, width - len(x))) for x in lists]).reshape(b, h, width)
    full, seen = np.moveaxis(np.asarray(counts, np.int32).reshape(b, h, 2, nk), 2, 0)
    return BlockLists(index, np.cumsum(seen, -1, dtype=np.int32) - seen, full, seen)


def _every_head(x, heads: int):
    """[b, h, ...] -> [b, heads, ...]: repeats every head of x for its query heads."""
    if heads % x.shape[1]:
        raise ValueError(
            f"a block table of {x.shape[1]} heads does not fit a mask of {heads} heads; "
            "1, the key heads or the query heads must have a table each"
        )
    return namespace(x).repeat(x, heads // x.shape[1], 1)
