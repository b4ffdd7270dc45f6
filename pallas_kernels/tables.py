"""Block tables: which blocks of keys each block of queries visits, and which need an element test.

A table is static (NumPy leaves) when all it is made from is, and traced otherwise. It costs
O(blocks of queries x blocks of keys) array operations from a mask and O(listed blocks) from a
list, never O(T S). Transposed it lists for each block of keys the blocks of queries that visit it,
as the pass over keys of a backward kernel needs.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.algebra import Mask, PerHead
from pallas_kernels.atoms import Everything
from pallas_kernels.block_table import (
    BlockLists,
    BlockTable,
    build,
    build_static,
    namespace,
    on_device,
    row_pieces,
    stack_heads,
)
from pallas_kernels.blocks import at, blocks_of, meet, meetings


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
    """The blocks that `mask` and the segments let be seen.

    q_index [T] or [B, T], k_index [S] or [B, S]: order indices, by default 0, 1, ...;
    q_segments [B, T], k_segments [B, S]: segment 0 is padding. A table of a batch, or of N heads
    for a mask per head, has an entry for each; others have one for all.
    """
    if isinstance(mask, PerHead):
        # Several parts: the capacity of all is that of the largest.
        make = functools.partial(
            from_mask, queries=queries, keys=keys, q_block=q_block, k_block=k_block,
            q_index=q_index, k_index=k_index, q_segments=q_segments, k_segments=k_segments,
            capacity=capacity,
        )  # fmt: skip
        return stack_heads([(make(part), heads) for part, heads in mask.parts])
    q = blocks_of(q_index, q_segments, queries, q_block)
    k = blocks_of(k_index, k_segments, keys, k_block, cut_is_mixed=True)
    if not on_device(*q, *k):
        pieces, batch = meetings(mask, q, k), max(q.batch, k.batch)
        return build_static(pieces, (batch, 1, q.count), capacity, q_block, k_block)
    some, whole = meet(mask, q.take(lambda x: x[:, :, None]), k.take(lambda x: x[:, None]))
    return from_block_mask(
        some[:, None], q_block=q_block, k_block=k_block, full=whole[:, None], capacity=capacity
    )


def from_block_mask(
    visible, *, q_block: int, k_block: int, full=None, capacity: int | None = None
) -> BlockTable:
    """The blocks of `visible` bool [nq, nk], [h, nq, nk] or [b, h, nq, nk].

    full: bool of the same shape, blocks whose pairs are all visible (not a shorter last key
    block); None claims it of no block.
    """
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
    """Chosen key blocks, indices int [b, h, nq, k], and those that the mask `also` may see.

    Blocks may be chosen several times and are visited once, in ascending order; choices where
    `valid` (bool, same shape) is false or that are no block of keys are left out. None of them is
    called full. `also` is tested on q_index and k_index as in `from_mask` (default 0, 1, ...); its
    blocks become visible as wholes, so the mask of the attention must still hide what `also` does.
    """
    shape = np.shape(indices) if valid is None else np.shape(valid)
    if np.ndim(indices) != 4 or shape != np.shape(indices):
        raise ValueError(
            f"from_top_k: indices {np.shape(indices)} must be [batch or 1, heads or 1, query "
            f"blocks, choices], and valid, if given, of their shape; it is {shape}"
        )
    if not np.issubdtype(indices.dtype, np.integer):
        raise TypeError(f"from_top_k: indices are {indices.dtype}, must be integers")
    count = -(-keys // k_block)
    there = (indices >= 0) & (indices < count)
    there = there if valid is None else there & valid
    xp = namespace(indices, there)
    listed = [xp.where(there, indices, count)]
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
    made = build(columns, fresh, fresh & False, capacity, q_block, k_block)
    return made if capacity is not None else _narrow(made, count)


def from_lengths(
    k_lengths,
    *,
    queries: int,
    keys: int,
    q_block: int,
    k_block: int,
    q_lengths=None,
    mask: Mask | None = None,
    q_index=None,
    k_index=None,
    capacity: int | None = None,
) -> BlockTable:
    """The first k_lengths[b] keys of each row, int [B], for its first q_lengths[b] queries."""

    def segments(lengths, size):
        if lengths is None:
            return np.ones((1, size), np.int32)
        lengths = lengths if isinstance(lengths, jax.Array) else np.asarray(lengths)
        return (np.arange(size) < lengths[:, None]).astype(np.int32)

    return from_mask(
        Everything() if mask is None else mask, queries=queries, keys=keys, q_block=q_block,
        k_block=k_block, q_index=q_index, k_index=k_index, capacity=capacity,
        q_segments=segments(q_lengths, queries), k_segments=segments(k_lengths, keys),
    )  # fmt: skip


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
    """The blocks of `table` that `mask` and the segments let be seen, as `from_mask` has them.

    Costs O(listed blocks). What the table calls full stays so with respect to the mask; segments
    and a shorter last key block are applied on top. The order within each kind is the table's.
    """
    if isinstance(mask, PerHead):
        places = dict(queries=queries, keys=keys, q_index=q_index, k_index=k_index)
        places |= dict(q_segments=q_segments, k_segments=k_segments)
        wide = table.heads(lambda x: _every_head(x, mask.heads))
        parts, start = [], 0
        for part, count in mask.parts:
            cut = slice(start, start := start + count)
            parts.append((restrict(wide.heads(lambda x, cut=cut: x[:, cut]), part, **places), 1))
        return stack_heads(parts)
    q = blocks_of(q_index, q_segments, queries, table.q_block)
    k = blocks_of(k_index, k_segments, keys, table.k_block, cut_is_mixed=True)
    q, k = q.take(lambda x: x[:, None, :, None]), k.take(lambda x: at(x, table.index))
    some, whole = meet(mask, q, k, table.known_full)
    some = some & table.listed
    columns = namespace(some, table.index).broadcast_to(table.index, some.shape)
    made = build(columns, some, whole, None, table.q_block, table.k_block)
    return replace(made, overflow=table.overflow)


def transpose(table: BlockTable, keys: int) -> BlockLists:
    """The same pairs of blocks, listed for every block of keys: blocks of queries, ascending.

    A traced table costs one sort of its entries, and memory for them alone. Lists are as long as
    they need be: none overflows that the table has room for.
    """
    nk = -(-keys // table.k_block)
    return _gathered(table, nk) if table.static else _sorted(table, nk)


def _sorted(table: BlockTable, nk: int) -> BlockLists:
    """`transpose` of a traced table."""
    b, h, nq, capacity = table.index.shape
    # Each block of keys has two numbers in a row, of its full pairs and of the others. They are
    # unsigned, as XLA wants them for sorting by radix on a GPU.
    kinds = 2 * table.index + jnp.where(table.known_full, 0, 1)
    kinds = jnp.where(table.listed, kinds, 2 * nk).astype(jnp.uint32)
    rows = lax.broadcasted_iota(jnp.int32, kinds.shape, 2)
    lists = (x.reshape(b, h, nq * capacity) for x in (kinds, rows))
    kinds, rows = lax.sort(tuple(lists), num_keys=1, is_stable=True)
    # Unrolled: a loop of few steps, each a launch or more.
    numbers = np.arange(2 * nk + 1, dtype=np.uint32)
    find = functools.partial(jnp.searchsorted, v=numbers, method="scan_unrolled")
    bounds = jax.vmap(jax.vmap(find))(kinds).astype(jnp.int32)
    first, middle, end = bounds[..., :-1:2], bounds[..., 1::2], bounds[..., 2::2]
    return BlockLists(rows, first, middle - first, end - first)


def _gathered(table: BlockTable, nk: int) -> BlockLists:
    """`transpose` of a static table."""
    b, h, nq, _ = table.index.shape
    kind = table.listed.astype(np.int8) + table.known_full
    lists, counts = [], []
    for index, what in zip(table.index.reshape(b * h, nq, -1), kind.reshape(b * h, nq, -1)):
        rows, places = np.nonzero(what)
        dense = np.zeros((nk, nq), np.int8)
        dense[index[rows, places], rows] = what[rows, places]
        parts = [dense[cut] for cut in row_pieces(nk, nq)]
        # Full pairs in front of the others: what is there lies in the order of a list.
        found = [np.nonzero(np.concatenate([x == 2, x == 1], 1))[1] % nq for x in parts]
        lists.append(np.concatenate(found).astype(np.int32))
        counts.append([(dense == 2).sum(1), (dense > 0).sum(1)])
    wide = max(1, *(len(x) for x in lists))
    index = np.stack([np.pad(x, (0, wide - len(x))) for x in lists]).reshape(b, h, wide)
    full, seen = np.moveaxis(np.asarray(counts, np.int32).reshape(b, h, 2, nk), 2, 0)
    return BlockLists(index, np.cumsum(seen, -1, dtype=np.int32) - seen, full, seen)


def _every_head(x, heads: int):
    """[b, h, ...] -> [b, heads, ...]: every head of x serves as many query heads as the others."""
    if heads % x.shape[1]:
        raise ValueError(
            f"a block table of {x.shape[1]} heads does not fit a mask of {heads} heads; "
            "1, the key heads or the query heads must have a table each"
        )
    return namespace(x).repeat(x, heads // x.shape[1], 1)


def _narrow(table: BlockTable, count: int) -> BlockTable:
    """The table without room for more than `count` blocks in a row, which no row has."""
    return replace(table, index=table.index[..., :count])
