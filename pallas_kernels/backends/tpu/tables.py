"""Packed lists of the blocks that a TPU kernel visits, one grid step per entry.

A TPU walks its grid in order and plans memory transfers one step ahead, from scalars that were
fetched before the kernel starts. So a table of visible blocks becomes one flat list per batch row
and key head, and every step of the grid reads one int32 of it:

    rows block (14 bits) | key block (14 bits) | kind (2) | first | last of its output block

Lists are sorted by rows block (forward, dq) or by key block (dk, dv). An output block without a
visit still has one step, which writes its zeros. Lists of different lengths are filled up with
steps that do nothing and move no data. Scalar memory is small (1 MB), so long lists are cut into
several calls: by batch row and head first, then by output block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

NOTHING, PARTIAL, FULL = 0, 1, 2
BITS = 14
LIMIT = 1 << BITS  # blocks along either axis
SCALAR_BYTES = 2**19  # of one call's lists; the rest of the 1 MB is the compiler's

Array = np.ndarray | jax.Array


class Step(NamedTuple):
    """One entry of a list, unpacked; `row` and `col` are block numbers."""

    row: Array
    col: Array
    kind: Array
    first: Array
    last: Array


class Visits(NamedTuple):
    """Visits [lists of batch rows, lists of heads, n] ordered by row; only the valid ones count."""

    row: Array
    col: Array
    kind: Array
    valid: Array


@dataclass(frozen=True)
class Call:
    """What one kernel call computes: ranges of batch rows, of heads and of output blocks.

    `steps` int32 [lists * size] holds the lists behind each other, one per batch row if `by_batch`
    and per head if `by_head`; `grid` is how many of a list's steps are run: a traced scalar when
    the table is traced.
    """

    steps: Array
    size: int
    grid: int | jax.Array
    batch: tuple[int, int]
    heads: tuple[int, int]
    blocks: tuple[int, int]
    by_batch: bool
    by_head: bool

    def place(self, b, h, s):
        """Where step `s` of batch row `b` and head `h`, counted within the call, lies."""
        heads = self.heads[1] - self.heads[0] if self.by_head else 1
        number = (b if self.by_batch else 0) * heads + (h if self.by_head else 0)
        return number * self.size + s


def row_of(code):
    return (code >> (BITS + 4)) & (LIMIT - 1)


def col_of(code):
    return (code >> 4) & (LIMIT - 1)


def pack(step: Step):
    row, col, kind, first, last = (x.astype(np.int32) for x in step)
    return (row << (BITS + 4)) | (col << 4) | (kind << 2) | (first << 1) | last


def unpack(code) -> Step:
    return Step(row_of(code), col_of(code), (code >> 2) & 3, (code & 2) != 0, (code & 1) != 0)


def _xp(*arrays):
    return np if all(isinstance(x, np.ndarray) for x in arrays) else jnp


def visits(table, *, heads: int, split: int) -> Visits:
    """The visits of a BlockTable for `heads` key heads, each block of queries cut into `split`.

    A table per query head becomes one per key head with the group's queries behind each other.
    """
    index, full, seen = table.index, table.full, table.seen
    xp = _xp(index, full, seen)
    batches, lists, nq, capacity = index.shape
    own = min(lists, heads)
    shape = (batches, own, lists // own * nq * split)
    full, seen = (xp.repeat(x, split, axis=2).reshape(*shape, 1) for x in (full, seen))
    col = xp.repeat(index, split, axis=2).reshape(*shape, capacity)
    row = xp.broadcast_to(np.arange(shape[2], dtype=np.int32)[:, None], col.shape)
    slot = np.arange(capacity, dtype=np.int32)
    kind = xp.where(slot < full, FULL, PARTIAL)
    found = Visits(*(x.reshape(batches, own, -1) for x in (row, col, kind, slot < seen)))
    if xp is np and batches * own == 1:  # half of a causal table's slots are empty
        found = Visits(*(x[..., found.valid[0, 0]] for x in found))
    return found


def _touched(major, valid, blocks: int):
    """bool [.., blocks]: which output blocks have a valid visit."""
    xp = _xp(major, valid)
    lists = np.indices(major.shape[:2], sparse=True)
    where = (lists[0][..., None], lists[1][..., None], xp.where(valid, major, blocks))
    marks = xp.zeros((*major.shape[:2], blocks + 1), bool)
    if xp is np:
        marks[where] = True
    else:
        marks = marks.at[where].set(True)
    return marks[..., :blocks]


def _key(valid, major):
    """What lists are sorted by. 16 bits: NumPy sorts them by radix."""
    return _xp(valid, major).where(valid, major, LIMIT).astype(np.int16)


def _split(found: Visits, axis: int, ranges) -> list[Visits]:
    """NumPy visits by ranges of output blocks; a range alone would look through all visits."""
    key = _key(found.valid, found[axis])
    ranks = np.argsort(key, axis=-1, stable=True)[..., : int(found.valid.sum(-1).max())]
    key, row, col, kind = (np.take_along_axis(x, ranks, -1) for x in (key, *found[:3]))
    edges = np.array([lo for lo, _ in ranges] + [ranges[-1][1]], np.int16)
    ends = np.array([np.searchsorted(x, edges) for x in key.reshape(np.prod(key.shape[:2]), -1)])
    ends = ends.reshape(*key.shape[:2], -1)

    def part(start, end):
        place = start + np.arange((end - start).max())
        valid, place = place < end, np.minimum(place, max(key.shape[-1] - 1, 0))
        return Visits(*(np.take_along_axis(x, place, -1) for x in (row, col, kind)), valid)

    return [part(ends[..., i : i + 1], ends[..., i + 1 : i + 2]) for i in range(len(ranges))]


def order(found: Visits, axis: int, lo: int, hi: int, most: int):
    """Packed lists [.., .., size] for output blocks `lo` to `hi`, and the lengths [.., ..].

    `axis` 0 sorts by row, 1 by key block; an output block has at most `most` visits.
    """
    xp = _xp(*found)
    major = found[axis]
    inside = found.valid & (major >= lo) & (major < hi)
    empty = ~_touched(major, inside, hi)[..., lo:]
    blanks = xp.broadcast_to(np.arange(lo, hi, dtype=np.int32), empty.shape)
    sides = [xp.zeros_like(blanks), xp.zeros_like(blanks)]
    sides[axis] = blanks
    parts = (*sides, xp.full_like(blanks, NOTHING), empty)
    row, col, kind, valid = (
        xp.concatenate([a, b], -1) for a, b in zip((*found[:3], inside), parts, strict=True)
    )
    key = _key(valid, (row, col)[axis])
    used = valid.sum(-1)
    size = int(used.max()) if xp is np else min(key.shape[-1], most * (hi - lo))
    ranks = xp.argsort(key, axis=-1, stable=True)
    slot = np.arange(size)
    ranks = xp.take_along_axis(ranks, xp.minimum(slot, used[..., None] - 1), -1)
    row, col, kind, key = (xp.take_along_axis(x, ranks, -1) for x in (row, col, kind, key))
    live = slot < used[..., None]
    edge = xp.ones_like(live[..., :1])
    turn = key[..., 1:] != key[..., :-1]
    first = live & xp.concatenate([edge, turn], -1)
    last = live & (xp.concatenate([turn, edge], -1) | (slot == used[..., None] - 1))
    return pack(Step(row, col, xp.where(live, kind, NOTHING), first, last)), used


def _ranges(found: Visits, axis: int, blocks: int, most: int) -> list[tuple[int, int]]:
    """Consecutive output blocks whose list fits into one call."""
    if _xp(*found) is np:
        lists = np.prod(found.valid.shape[:2])
        pairs = zip(*(x.reshape(lists, -1) for x in (found[axis], found.valid)), strict=True)
        counts = np.max([np.bincount(x[ok], minlength=blocks) for x, ok in pairs], 0)
    else:  # the counts are not known: as many as there can be
        counts = np.full(blocks, most)
    ends = np.cumsum(np.maximum(counts, 1))
    ranges, lo = [], 0
    while lo < blocks:
        before = ends[lo - 1] if lo else 0
        hi = int(np.searchsorted(ends, before + SCALAR_BYTES // 4, side="right"))
        ranges.append((lo, max(hi, lo + 1)))
        lo = ranges[-1][1]
    return ranges


def calls(found: Visits, axis: int, *, rows: int, cols: int, batch: int, heads: int):
    """The kernel calls that cover all output blocks, [ranges of blocks][of batch rows][of heads].

    `axis` 0: the output blocks are the `rows` row blocks, 1: they are the `cols` key blocks.
    """
    blocks, most = (rows, found.row.shape[-1] // rows) if axis == 0 else (cols, rows)
    ranges = _ranges(found, axis, blocks, most)
    whole = len(ranges) == 1 or _xp(*found) is not np
    parts = [found] * len(ranges) if whole else _split(found, axis, ranges)
    return [
        _cut(*order(part, axis, *ends, most), ends, batch, heads)
        for part, ends in zip(parts, ranges, strict=True)
    ]


def _cut(steps, used, blocks, batch: int, heads: int):
    (by_batch, by_head), size = (n > 1 for n in steps.shape[:2]), steps.shape[2]
    lists = max(1, SCALAR_BYTES // (4 * size))
    some_heads = min(heads, lists) if by_head else heads
    some_rows = max(1, lists // (some_heads if by_head else 1)) if by_batch else batch
    dynamic = not isinstance(steps, np.ndarray)

    def call(b, h):
        rows, own = (b, min(b + some_rows, batch)), (h, min(h + some_heads, heads))
        part = tuple(
            slice(*ends) if split else slice(None)
            for ends, split in ((rows, by_batch), (own, by_head))
        )
        grid = used[part].max().astype(np.int32) if dynamic else size
        return Call(steps[part].reshape(-1), size, grid, rows, own, blocks, by_batch, by_head)

    return [[call(b, h) for h in range(0, heads, some_heads)] for b in range(0, batch, some_rows)]
