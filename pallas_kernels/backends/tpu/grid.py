"""The split of attention into the grid steps of the TPU kernels.

Tiling. The G query heads that share a key head are rows of one matrix, so keys are never repeated:
row r of a key head is query r // G of head r % G. If tables differ by query head, the queries of
one head precede those of the next. Rows are split into blocks of `rows`, a multiple of the 128
lanes; a table's block of queries may be several of them. Head sizes are padded to whole lanes, as
they are in memory anyway.

Visits. A TPU runs its grid in order and plans memory transfers one step ahead, from scalars that
are fetched before the kernel starts. So a table of visible blocks becomes one flat list per batch
row and key head, and every step of the grid reads one int32 of it:

    row block (14 bits) | key block (14 bits) | kind (2) | first | last of its output block

Lists are sorted by row block (forward, dq) or by key block (dk, dv). An output block without a
visit still has one step, which writes its zeros. Shorter lists are padded with steps that do
nothing and move no data. Scalar memory is small (1 MB), so long lists are split into several calls:
by batch row and head first, then by output block. Many calls for output blocks are one kernel in a
loop, which is compiled once.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.explanations import KernelBlocks, VisitedFraction, report
from pallas_kernels.tables import BlockTable, namespace

LANES = 128
KEYS = 2048  # most keys of a block
# Rows and keys of a step's blocks, forward and backward, by dtype and head size. Blocks of 128 are
# slow: the overhead of a step exceeds its products. A block of keys is read again for every block
# of rows, so more rows cause less memory traffic: with 1,024 rows v6e is bound by its products,
# with 512 by its memory. A kernel may use 16 MB of VMEM (v5e's limit); scores of [1024, 1024]
# float32 are 4 MB, and a backward step holds four such arrays besides its operands. Products of
# float32 in full precision are six of bfloat16, so smaller blocks keep the matrix units busy too.
BLOCKS = {
    ("bfloat16", 128): ((1024, 1024), (512, 1024)),
    ("bfloat16", 256): ((512, 1024), (512, 512)),
    ("float32", 128): ((512, 512), (512, 512)),
    ("float32", 256): ((512, 512), (256, 512)),
}
# The overhead of a step, in scores: the 0.35 us of a step of a Pallas grid are 0.2 of the time of
# the bundles of 1,024 x 1,024 scores on v6e, and less on the other generations. Per score
# (benchmarks/tpu_bundles.py), blocks of 512 x 512 need as many bundles as blocks of 1,024 x 1,024
# on v5e and a quarter more on v6e; blocks of 256 x 256 need three times as many.
STEP_SCORES = 0.2 * 2**20
LEAST_BLOCK = 512  # fewest rows or keys of a block that is chosen for its smaller size

NOTHING, PARTIAL, FULL = 0, 1, 2
BITS = 14
LIMIT = 1 << BITS  # blocks along either axis
SCALAR_BYTES = 2**19  # of one call's lists; the rest of the 1 MB is left to the compiler
UNROLLED = 4  # most ranges of output blocks whose calls are compiled apart

MIB = 2**20
# VMEM of a core by kind of device (JAX's tpu_info); v4 and unknown devices count as 16 MB.
VMEM = {
    **dict.fromkeys(("TPU v5 lite", "TPU v5e", "TPU v6 lite", "TPU v6e"), 128 * MIB),
    **dict.fromkeys(("TPU v5", "TPU v5p", "TPU7", "TPU7x"), 64 * MIB),
}
# Devices on which a forward step without a mask takes fewer bundles if its keys are not divided
UNDIVIDED = ("TPU v6 lite", "TPU v6e")

Array = np.ndarray | jax.Array


def device_kind() -> str:
    """Returns the kind of the device that programs are for.

    That is the abstract device of the mesh in use, for which programs are compiled ahead of time,
    or else this process' first device.
    """
    return (jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]).device_kind


def vmem() -> int:
    """Returns the bytes of VMEM of the TPU that programs are for."""
    return VMEM.get(device_kind(), 16 * MIB)


def lanes(n: int) -> int:
    """Returns n rounded up to whole lanes."""
    return -(-n // LANES) * LANES


def divide(rows: int, most: int) -> int:
    """Returns the largest divisor of `rows` up to `most` that fills whole lanes, or 0."""
    return next((n for n in range(most, 0, -LANES) if rows % n == 0), 0)


@dataclass(frozen=True)
class Tiling:
    """The sizes of rows and keys; `by_head` if tables differ by query head of a key head."""

    batch: int
    heads: int
    group: int
    queries: int
    keys: int
    by_head: bool
    rows: int  # rows of a block
    split: int  # row blocks in a table's block of queries
    count: int  # row blocks of a key head
    key_block: int
    key_count: int
    reason: str = field(default="", compare=False)  # the choice of the sizes, for `explain`

    @property
    def period(self) -> int:
        """The number of row blocks after which the queries repeat for the next head."""
        return self.count // self.group if self.by_head else self.count

    def to_rows(self, x):
        """[B, T, N, ...] -> [B, K, rows, ...]."""
        rest = x.shape[3:]
        x = x.reshape(*x.shape[:2], self.heads, self.group, *rest)
        if self.by_head:
            x = _pad(jnp.moveaxis(x, 1, 3), 3, self.period * self.rows)
            return x.reshape(self.batch, self.heads, -1, *rest)
        x = jnp.moveaxis(x, 1, 2)
        return _pad(x.reshape(self.batch, self.heads, -1, *rest), 2, self.count * self.rows)

    def from_rows(self, x):
        """[B, K, rows, ...] -> [B, T, N, ...]."""
        rest = x.shape[3:]
        if self.by_head:
            x = x.reshape(self.batch, self.heads, self.group, -1, *rest)[:, :, :, : self.queries]
            x = jnp.moveaxis(x, 3, 1)
        else:
            x = x[:, :, : self.queries * self.group]
            x = x.reshape(self.batch, self.heads, self.queries, self.group, *rest)
            x = jnp.moveaxis(x, 2, 1)
        return x.reshape(self.batch, self.queries, self.heads * self.group, *rest)

    def to_channels_first(self, x):
        """[B, T, N, H] -> [B, K, G, H, padded T], for blocks with queries of one head."""
        x = jnp.moveaxis(_pad(x, 1, self.period * self.rows), 1, 3)
        return x.reshape(self.batch, self.heads, self.group, *x.shape[2:])

    def from_channels_first(self, x):
        """[B, K, G, H, padded T] -> [B, T, N, H]."""
        x = x[..., : self.queries].reshape(self.batch, -1, x.shape[3], self.queries)
        return jnp.moveaxis(x, 3, 1)

    def query_vector(self, x):
        """[1 or B, T] -> [1 or B, 1, rows of one period]."""
        x = x if self.by_head else jnp.repeat(x, self.group, axis=1)
        return _pad(x, 1, self.period * self.rows)[:, None]

    def query_bits(self, x):
        """[B, T, W] words -> int32 [B, rows of one period, W]."""
        x = jax.lax.bitcast_convert_type(x, jnp.int32)
        return _pad(x, 1, self.period * self.rows)

    def head_vector(self, x):
        """[N] -> [K, 1, rows]."""
        x = jnp.broadcast_to(x, (1, self.queries, x.shape[0]))
        return replace(self, batch=1).to_rows(x)[0][:, None]

    def keys_from_channels_first(self, x):
        """[B, K, 1, H, padded S] -> [B, S, K, H]."""
        return jnp.moveaxis(x[:, :, 0, :, : self.keys], 3, 1)

    def to_keys(self, x):
        """[B, S, K, H] -> [B, K, padded S, padded H]."""
        return _pad(x, 1, self.key_count * self.key_block).swapaxes(1, 2)

    def from_keys(self, x, size: int):
        """[B, K, padded S, padded H] -> [B, S, K, size]."""
        return x[:, :, : self.keys, :size].swapaxes(1, 2)

    def key_vector(self, x):
        """[1 or B, S] -> [1 or B, 1, padded S]."""
        return _pad(x, 1, self.key_count * self.key_block)[:, None]


def _pad(x, axis: int, length: int):
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, length - x.shape[axis])
    return jnp.pad(x, widths)


def pad_lanes(x):
    """Returns `x` with its last axis padded to whole lanes."""
    return _pad(x, x.ndim - 1, lanes(x.shape[-1]))


def step_blocks(q, v, backward: bool) -> tuple[int, int]:
    """Returns the rows and keys of a step."""
    size = lanes(max(q.shape[-1], v.shape[-1]))
    return BLOCKS[str(q.dtype), size][backward]


def table_blocks(q, k, v, step: tuple[int, int], by_head: bool = False) -> tuple[int, int]:
    """Returns the sizes of a table's blocks of queries and keys, for calls without a table.

    Args:
      step: the most rows and keys of a step.
      by_head: blocks hold queries of one head.
    """
    rows, most_keys = step
    (queries, n), (keys, heads) = q.shape[1:3], k.shape[1:3]
    group = 1 if by_head else n // heads
    by_rows = ((divide(size * group, rows), -size) for size in (128, 256, 512, 1024))
    q_block = -max(by_rows)[1]
    if _reads_more_than_computes(queries * group, q, v):
        most_keys = KEYS
    return q_block, min(most_keys, lanes(keys))


def _reads_more_than_computes(rows: int, q, v) -> bool:
    """Returns whether a call decodes: it reads the cache only once, and computes little."""
    return rows <= LANES and max(q.shape[-1], v.shape[-1]) <= LANES


def reason_of(tiling: Tiling, q, v, step: tuple[int, int], table: BlockTable | None) -> str:
    """Returns why a tiling has its sizes.

    Args:
      step: the most rows and keys of a step, from which the tiling was made.
      table: the caller's table or None.
    """
    rows, keys = step
    size = lanes(max(q.shape[-1], v.shape[-1]))
    reasons = [f"{rows} rows x {keys} keys of {q.dtype} heads up to {size} fit into 16 MB of VMEM"]
    width = 1 if tiling.by_head else tiling.group
    if table is not None:
        reasons.append(f"the caller's table has blocks of {table.q_block} x {table.k_block}")
    elif _reads_more_than_computes(tiling.queries * width, q, v):
        reasons.append(f"{KEYS} keys for at most {LANES} rows, which compute little")
    if tiling.rows != rows and tiling.period == 1:
        reasons.append("one block holds all queries")
    elif tiling.rows != rows:
        reasons.append(f"{tiling.rows} rows divide a table's block of queries")
    if tiling.key_block != keys and tiling.key_count == 1:
        reasons.append("one block holds all keys")
    return "; ".join(reasons)


def fraction_of(calls: list | LoopedCalls, axis: int, tiling: Tiling) -> VisitedFraction | None:
    """Returns the fraction of pairs of blocks that `kernel_calls` visit; None if traced."""
    others = tiling.key_count if axis == 0 else tiling.count
    if isinstance(calls, LoopedCalls):
        return calls.fraction(others)
    pairs = visited = tested = 0
    for call in (call for ranges in calls for row in ranges for call in row):
        if not isinstance(call.steps, np.ndarray):
            return None
        kind = unpack(call.steps).kind
        pairs += call.steps.size // call.size * call.blocks * others
        visited, tested = visited + (kind != NOTHING).sum(), tested + (kind == PARTIAL).sum()
    return VisitedFraction.of(pairs, visited, tested)


def report_kernel(
    kernel: str, tiling: Tiling, calls: list | LoopedCalls, axis: int, *, tests_all: bool = False
) -> None:
    """Reports the blocks of a kernel to `explain`.

    Args:
      calls, axis: as in `fraction_of`.
      tests_all: whether the kernel tests full blocks, too.
    """

    def blocks():
        heads = 1 if tiling.by_head else tiling.group
        fraction = fraction_of(calls, axis, tiling)
        if fraction is not None and tests_all:
            fraction = fraction._replace(tested=1.0)
        return KernelBlocks(
            kernel=kernel,
            queries=min(tiling.rows // heads, tiling.queries),
            heads=heads,
            rows=tiling.rows,
            keys=tiling.key_block,
            reason=tiling.reason,
            fraction=fraction,
        )

    report(blocks)


def make_tiling(q, k, *, lists: int, q_block: int, k_block: int, step: tuple[int, int]) -> Tiling:
    """Returns the tiling for blocks of a table.

    Args:
      lists: the number of tables along heads (1, K or N).
      q_block, k_block: queries and keys of a block of the table.
      step: the most rows and keys of a step.
    """
    (batch, queries, n), (keys, heads) = q.shape[:3], k.shape[1:3]
    by_head = lists > heads
    width = 1 if by_head else n // heads
    key_block = min(k_block, lanes(keys))
    rows, most_keys = step
    most = min(rows, max(LANES, rows * most_keys // key_block // LANES * LANES))
    table_rows = -(-queries // q_block)
    if table_rows == 1:  # few queries: a block has no more rows than they need
        rows = min(lanes(queries * width), most)
        split = -(-queries * width // rows)
    else:
        rows = divide(q_block * width, most)
        split = q_block * width // rows
    return Tiling(
        batch=batch,
        heads=heads,
        group=n // heads,
        queries=queries,
        keys=keys,
        by_head=by_head,
        rows=rows,
        split=split,
        count=split * table_rows * (n // heads if by_head else 1),
        key_block=key_block,
        key_count=-(-keys // key_block),
    )


class Step(NamedTuple):
    """One entry of a list, unpacked; `row` and `col` are block numbers."""

    row: Array
    col: Array
    kind: Array
    first: Array
    last: Array


class Visits(NamedTuple):
    """Visits [lists of batch rows, lists of heads, n] ordered by row; only valid ones count."""

    row: Array
    col: Array
    kind: Array
    valid: Array


@dataclass(frozen=True)
class Call:
    """The ranges of batch rows and heads, and the output blocks, of one kernel call.

    `steps` int32 [lists * size] concatenates the lists, one per batch row if `by_batch` and per
    head if `by_head`. `grid` is the number of a list's steps that run: a traced scalar if the table
    is traced. The `blocks` output blocks begin with block `first`; None: with the last of `steps`.
    """

    steps: Array
    size: int
    grid: int | jax.Array
    batch: tuple[int, int]
    heads: tuple[int, int]
    first: int | None
    blocks: int
    by_batch: bool
    by_head: bool

    def first_block(self, steps):
        """Returns the number of the first output block, from the list that a kernel reads."""
        return steps[self.steps.shape[0] - 1] if self.first is None else self.first

    def offset(self, b, h, s):
        """Returns the offset in `steps` of step `s` of batch row `b` and head `h` of the call."""
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


def list_visits(table, *, heads: int, split: int) -> Visits:
    """Returns the visits of a BlockTable; a block of queries is split into `split` row blocks.

    A table per query head becomes one for each of `heads` key heads, in which the queries of one
    head precede those of the next.
    """
    index, full, seen = table.index, table.full, table.seen
    xp = namespace(index, full, seen)
    batches, lists, nq, capacity = index.shape
    num_lists = min(lists, heads)
    shape = (batches, num_lists, lists // num_lists * nq * split)
    full, seen = (xp.repeat(x, split, axis=2).reshape(*shape, 1) for x in (full, seen))
    col = xp.repeat(index, split, axis=2).reshape(*shape, capacity)
    row = xp.broadcast_to(np.arange(shape[2], dtype=np.int32)[:, None], col.shape)
    slot = np.arange(capacity, dtype=np.int32)
    kind = xp.where(slot < full, FULL, PARTIAL)
    listed = Visits(*(x.reshape(batches, num_lists, -1) for x in (row, col, kind, slot < seen)))
    if xp is np and batches * num_lists == 1:  # half of a causal table's slots are empty
        used = listed.valid[0, 0].nonzero()[0]
        listed = Visits(*(x[..., used if used.size else slice(1)] for x in listed))
    return listed


class SortedVisits(NamedTuple):
    """Visits sorted by output block: those of block i are the packed `codes` from starts[i] on."""

    codes: Array  # [lists of batch rows, lists of heads, n]
    starts: Array  # [.., .., blocks + 1]


def sort_visits(visits: Visits, axis: int, blocks: int) -> SortedVisits:
    """Sorts visits by row block (`axis` 0) or by key block (1), of which there are `blocks`."""
    xp = namespace(*visits)
    codes = pack(Step(*visits[:3], np.int32(0), np.int32(0)))
    # In 16 bits, which NumPy sorts by radix
    key = xp.where(visits.valid, visits[axis], LIMIT).astype(np.int16)
    numbers = np.arange(blocks + 1, dtype=np.int16)
    if xp is np:
        most = max(int(visits.valid.sum(-1).max()), 1)
        ranks = np.argsort(key, axis=-1, stable=True)[..., :most]
        key, codes = (np.take_along_axis(x, ranks, -1) for x in (key, codes))
    else:
        key, codes = jax.lax.sort((key, codes), is_stable=True, num_keys=1)
    # Unrolled, so that a program of kernels has no loop besides theirs
    search = np.searchsorted if xp is np else partial(jnp.searchsorted, method="scan_unrolled")
    starts = _each_list(lambda x: search(x, numbers), key)
    return SortedVisits(codes, starts.astype(np.int32))


def _each_list(function, *arrays):
    """Applies a function of vectors to each list of arrays [.., .., n]."""
    if namespace(*arrays) is not np:
        return jax.vmap(jax.vmap(function))(*arrays)
    shape = arrays[0].shape[:2]
    rows = zip(*(x.reshape(-1, x.shape[-1]) for x in arrays), strict=True)
    return np.stack([function(*row) for row in rows]).reshape(*shape, -1)


def order(visits: SortedVisits, axis: int, first: int | jax.Array, blocks: int, most: int):
    """Returns packed lists [.., .., size] of output blocks, and their lengths [.., ..].

    Args:
      axis: that of `sort_visits`.
      first: the first of `blocks` output blocks.
      most: an output block has at most so many visits.
    """
    xp = namespace(*visits)
    starts = visits.starts[..., first + np.arange(blocks + 1)]
    counts = xp.diff(starts)
    steps = xp.maximum(counts, 1)  # a block without visits has a step that does nothing
    ends = xp.cumsum(steps, -1)
    used, total = ends[..., -1], visits.codes.shape[-1]
    size = int(used.max()) if xp is np else min(total + blocks, most * blocks)
    slot = xp.minimum(np.arange(size, dtype=np.int32), used[..., None] - 1)
    if xp is np:
        block = _each_list(lambda x, y: np.searchsorted(x, y, side="right"), ends, slot)
    else:  # a comparison with all, since TPUs are slow at searches and at sums by index
        block = (ends[..., None, :] <= slot[..., None]).sum(-1, dtype=np.int32)
    to_visit = starts[..., :-1] - (ends - steps)
    source = slot + xp.take_along_axis(to_visit, block, -1)
    codes = xp.take_along_axis(visits.codes, xp.minimum(source, total - 1), -1)
    blank = (block + first).astype(np.int32) << (BITS + 4, 4)[axis]
    codes = xp.where(xp.take_along_axis(counts, block, -1) > 0, codes, blank)
    live = np.arange(size) < used[..., None]
    edge = xp.ones_like(live[..., :1])
    turn = block[..., 1:] != block[..., :-1]
    is_first = live & xp.concatenate([edge, turn], -1)
    is_last = live & (xp.concatenate([turn, edge], -1) | (np.arange(size) == used[..., None] - 1))
    row, col, kind, _, _ = unpack(codes)
    return pack(Step(row, col, xp.where(live, kind, NOTHING), is_first, is_last)), used


def _ranges(visits: SortedVisits, blocks: int, most: int) -> list[tuple[int, int]]:
    """Returns ranges of consecutive output blocks whose list fits into one call."""
    if namespace(*visits) is np:
        counts = np.diff(visits.starts).max((0, 1))
    else:  # traced counts are not known; these are the largest possible ones
        counts = np.full(blocks, most)
    ends = np.cumsum(np.maximum(counts, 1))
    ranges, lo = [], 0
    while lo < blocks:
        before = ends[lo - 1] if lo else 0
        hi = int(np.searchsorted(ends, before + SCALAR_BYTES // 4, side="right"))
        ranges.append((lo, max(hi, lo + 1)))
        lo = ranges[-1][1]
    return ranges


def kernel_calls(visits: Visits, axis: int, *, rows: int, cols: int, batch: int, heads: int):
    """Returns the kernel calls for all output blocks, [ranges of blocks][of batch rows][of heads].

    The output blocks are the `rows` row blocks for `axis` 0, and the `cols` key blocks for 1.
    """
    blocks, most = (rows, visits.row.shape[-1] // rows) if axis == 0 else (cols, rows)
    by_block = sort_visits(visits, axis, blocks)
    ranges = _ranges(by_block, blocks, most)
    if len(ranges) > UNROLLED:
        if namespace(*by_block) is np:
            most = max(int(np.diff(by_block.starts).max()), 1)
        looped = LoopedCalls(by_block, axis, blocks, most, batch, heads)
        if len(looped) <= 4 * len(ranges):  # more, where few blocks have most visits
            return looped
    return [
        _split_lists(*order(by_block, axis, lo, hi - lo, most), lo, hi - lo, batch, heads)
        for lo, hi in ranges
    ]


@dataclass(frozen=True)
class LoopedCalls:
    """The `kernel_calls` of many ranges of output blocks, which are equal: a loop runs them."""

    visits: SortedVisits
    axis: int
    blocks: int  # output blocks
    most: int  # visits of an output block
    batch: int
    heads: int

    @property
    def range_blocks(self) -> int:
        """The output blocks of a range: a divisor of all, if there is one that is large enough."""
        fit = max(SCALAR_BYTES // 4 // self.most, 1)
        return next((n for n in range(fit, fit // 2, -1) if self.blocks % n == 0), fit)

    def __len__(self) -> int:
        return -(-self.blocks // self.range_blocks)

    def run(self, run):
        """Returns the outputs [batch, heads, ...] of `run(call)` for all calls."""
        visits, count = SortedVisits(*map(jnp.asarray, self.visits)), self.range_blocks

        def one_range(first):
            steps, used = order(visits, self.axis, first, count, self.most)
            calls = _split_lists(steps, used, first, count, self.batch, self.heads)
            return _join_lists(calls, run)

        # The last range begins earlier, so that all have equally many blocks.
        firsts = np.minimum(np.arange(len(self)) * count, self.blocks - count)
        rest = self.blocks - (len(self) - 1) * count

        def join_ranges(x):  # [ranges, batch, heads, rows, width], or a vector with one row
            axis = 4 if x.shape[3] == 1 else 3
            before = jnp.moveaxis(x[:-1], 0, axis - 1)
            shape = list(x.shape[1:])
            shape[axis - 1] *= len(self) - 1
            start = x.shape[axis] // count * (count - rest)
            last = jax.lax.slice_in_dim(x[-1], start, None, axis=axis - 1)
            return jnp.concatenate([before.reshape(shape), last], axis - 1)

        return jax.tree.map(join_ranges, jax.lax.map(one_range, firsts.astype(np.int32)))

    def fraction(self, others: int) -> VisitedFraction | None:
        """Returns the fraction of visited pairs with `others` blocks; None if traced."""
        codes, starts = self.visits
        if not isinstance(codes, np.ndarray):
            return None
        is_visit = np.arange(codes.shape[-1]) < starts[..., -1:]
        tested = (is_visit & (unpack(codes).kind == PARTIAL)).sum()
        pairs = np.prod(codes.shape[:2]) * self.blocks * others
        return VisitedFraction.of(pairs, is_visit.sum(), tested)


def _split_lists(steps, used, first: int | jax.Array, blocks: int, batch: int, heads: int):
    (by_batch, by_head), size = (n > 1 for n in steps.shape[:2]), steps.shape[2]
    lists = max(1, SCALAR_BYTES // (4 * size))
    call_heads = min(heads, lists) if by_head else heads
    call_rows = max(1, lists // (call_heads if by_head else 1)) if by_batch else batch
    dynamic = not isinstance(steps, np.ndarray)

    def call(b, h):
        row_range = (b, min(b + call_rows, batch))
        head_range = (h, min(h + call_heads, heads))
        part = tuple(
            slice(*ends) if split else slice(None)
            for ends, split in ((row_range, by_batch), (head_range, by_head))
        )
        grid = used[part].max().astype(np.int32) if dynamic else size
        flat, number = steps[part].reshape(-1), first
        if not isinstance(first, int):
            flat, number = jnp.append(flat, first), None
        return Call(flat, size, grid, row_range, head_range, number, blocks, by_batch, by_head)

    return [[call(b, h) for h in range(0, heads, call_heads)] for b in range(0, batch, call_rows)]


def calls_of(visits: Visits, tiling: Tiling, axis: int):
    """Returns the `kernel_calls` of a tiling."""
    sizes = dict(rows=tiling.count, cols=tiling.key_count, batch=tiling.batch, heads=tiling.heads)
    return kernel_calls(visits, axis, **sizes)


def run_calls(calls: list | LoopedCalls, run):
    """Runs `run(call)` for all `kernel_calls`; concatenates the outputs [batch, heads, ...]."""
    if isinstance(calls, LoopedCalls):
        return calls.run(run)
    return _join([_join_lists(lists, run) for lists in calls], -2)


def _join_lists(calls: list[list[Call]], run):
    """Runs the calls [of batch rows][of heads] of a range of output blocks."""
    return _join([_join([run(call) for call in row], 1) for row in calls], 0)


def _join(parts, axis: int):
    """Concatenates matrices [batch, heads, rows, size] and vectors [batch, heads, 1, rows]."""
    if len(parts) == 1:
        return parts[0]

    def join(*xs):
        vector = axis == -2 and xs[0].shape[2] == 1
        return jnp.concatenate(xs, 3 if vector else axis)

    return jax.tree.map(join, *parts)


class ChannelsFirst(NamedTuple):
    """An output [batch, heads, group, width, length], computed in blocks [width, resident]."""

    dtype: jnp.dtype
    group: int
    width: int
    length: int


def run_kernel(
    kernel,
    name: str,
    x,
    call: Call,
    *,
    axis,
    resident,
    operand,
    outputs,
    scratch,
    interpret,
    whole=None,
    vmem: int | None = None,
):
    """Runs a kernel on a call's grid.

    Args:
      axis: whether row blocks (0) or key blocks (1) are resident while the others are streamed.
      resident: the length of a resident block.
      operand: (name, value) -> the block of an operand that a step reads.
      outputs: (dtype, width) of each output, width None for a vector; or (dtype, width, rows) if
        its rows are not those of the resident block; or ChannelsFirst; or None for no output.
      whole: (dtype, sizes) of an additional output, which has one block for each key head.
      vmem: bytes of VMEM that the kernel may use; None: 16 MB.
    """
    batch, heads = (hi - lo for lo, hi in (call.batch, call.heads))
    blocks = call.blocks

    def shape(output):
        if isinstance(output, ChannelsFirst):
            dtype, *sizes = output
            return jax.ShapeDtypeStruct((batch, heads, *sizes), dtype)
        dtype, width, rows = with_rows(output, resident)
        length = blocks * rows
        sizes = (1, length) if width is None else (length, width)
        return jax.ShapeDtypeStruct((batch, heads, *sizes), dtype)

    def block(output):
        if isinstance(output, ChannelsFirst):
            width, length = output[2:]
            return channels_first_block(width, length, resident, call, axis, first=(0, 0))
        return _output(*with_rows(output, resident)[1:], call=call, axis=axis)

    def each(f):
        return tuple(None if output is None else f(output) for output in outputs)

    out_shapes, out_specs = each(shape), each(block)
    if whole is not None:
        dtype, sizes = whole
        out_shapes += (jax.ShapeDtypeStruct((batch, heads, *sizes), dtype),)

        def head(b, h, s, steps):
            return b, h, *(0,) * len(sizes)

        # A second buffer would save microseconds and occupy a third of VMEM.
        out_specs += (pl.BlockSpec((None, None, *sizes), head, pipeline_mode=pl.Buffered(1)),)
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(batch, heads, call.grid),
        in_specs=[{name: operand(name, value) for name, value in x.items()}],
        out_specs=out_specs,
        scratch_shapes=scratch,
    )
    run = pl.pallas_call(
        kernel,
        out_shape=out_shapes,
        grid_spec=grid_spec,
        interpret=interpret,
        name=name,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=vmem
        ),
    )
    return run(jnp.asarray(call.steps), x)


def with_rows(item, resident: int):
    dtype, width, *rows = item
    return dtype, width, *(rows or [resident])


def channels_first_block(width: int, length: int, size: int, call: Call, axis: int, first):
    """Returns the BlockSpec of [width, size] of an array [B, K, G, width, length].

    Args:
      axis: whether row blocks (0) or key blocks (1) lie along `length`.
      first: the batch row and the head of the array at which the call starts.
    """

    def index(b, h, s, steps):
        number = (col_of if axis else row_of)(steps[call.offset(b, h, s)])
        period = jnp.int32(length // size)
        head, block = jax.lax.div(number, period), jax.lax.rem(number, period)
        return b + first[0], h + first[1], head, 0, block

    return pl.BlockSpec((None, None, None, width, size), index)


def _output(width: int | None, rows: int, *, call: Call, axis: int):
    def index(b, h, s, steps):
        code = steps[call.offset(b, h, s)]
        block = (col_of if axis else row_of)(code) - call.first_block(steps)
        return (b, h, 0, block) if width is None else (b, h, block, 0)

    sizes = (1, rows) if width is None else (rows, width)
    return pl.BlockSpec((None, None, *sizes), index)
