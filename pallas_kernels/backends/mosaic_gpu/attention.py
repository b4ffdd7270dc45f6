"""Block-sparse attention for Hopper GPUs: forward, dq, and dk with dv, in Pallas' Mosaic GPU.

Every kernel visits lists of visible blocks, so dense, causal, windowed, packed, per-head and top-k
attention share one kernel, and time is proportional to the number of visible blocks. Nothing is
accumulated in global memory: results are bitwise reproducible.

A program of the grid has some compute warpgroups and one that moves memory. Each compute warpgroup
holds 64 rows of the resident side (queries in the forward pass and for dq, keys for dk and dv),
while tiles of the streamed side pass through a ring of stages in shared memory.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels import nvidia
from pallas_kernels import online_softmax as online
from pallas_kernels.dispatch import (
    unsupported_blocks,
    unsupported_dtypes,
    unsupported_mask,
    user_table,
    visible_blocks,
)
from pallas_kernels.explanations import KernelBlocks, report
from pallas_kernels.masks import Mask
from pallas_kernels.tables import BlockTable, transpose

LARGEST_HEAD = 128
LARGEST_GRID = 65535  # most heads, or tiles of 64 rows
# Range of ptxas versions (CUDA 12.8.0 to 12.9.0) that miscompile causal masks in a similar kernel
# of JAX (jax.experimental.pallas.ops.gpu.attention_mgpu, jax 0.11). That kernel refuses 12.9.1 as
# well, because it checks the version of the runtime, which has no patch level.
MISCOMPILING = (12, 8, 0), (12, 9, 86)
ROWS = 64  # of a warpgroup's matrix products
HEAD = 16  # head sizes are padded to multiples of it: the narrowest tile of the matrix unit
BLOCK = 128  # rows of a block of a table, if the caller passes no table
CELLS = 2**22  # most pairs of blocks of such a table; longer inputs get larger blocks
INTERLEAVED = 8  # most heads, times batch rows, whose programs alternate
INTERLEAVED_BYTES = 2**25  # of their streamed tiles, which stay in the 50 MB of an H100's L2 cache
PROCESSORS = 132  # multiprocessors of an H100 or H200; the shared memory of each holds one program
# Number of queries of a causal call whose products with a key take as long as the memory traffic of
# that key's float32 cotangents for one query head: 8 bytes a number at 3.35 TB/s, 4 products at 450
# TFLOP/s.
SUM_QUERIES = 512
SUMS_BYTES = 2**29  # most bytes of these cotangents for all query heads
MANY_VISITS = 16  # of a program; shorter ones end before a second kernel would have started
FORWARD, D_QUERIES, D_KEYS = "forward", "d_queries", "d_keys"


@dataclass(frozen=True)
class TileAxis:
    """An axis of queries or keys: tiles of `tile` rows, `pieces` of them in a table's block."""

    length: int
    tile: int
    pieces: int
    padded: int

    @property
    def count(self) -> int:
        return self.padded // self.tile

    def pad(self, x, axis: int):
        """Returns `x` padded with zeros to whole tiles along `axis`."""
        if x is None or x.shape[axis] == self.padded:
            return x
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, self.padded - x.shape[axis])
        return jnp.pad(x, widths)


def tile_axis(length: int, block: int, tile: int) -> TileAxis:
    """Splits an axis into tiles of at most `tile` rows that divide its blocks.

    Tiles need not divide a single block that covers the whole axis.
    """
    if length <= block:
        tile = tile_of_length(length, tile)
        pieces = -(-length // tile)
        return TileAxis(length, tile, pieces, pieces * tile)
    tile = next(n for n in range(tile, 0, -ROWS) if block % n == 0)
    return TileAxis(length, tile, block // tile, -(-length // block) * block)


def tile_of_length(length: int, tile: int) -> int:
    """Returns the rows of a tile, at most `tile`, for an axis that can be split anywhere.

    Three warpgroups are chosen if they add at most a sixteenth to the padded rows of two.
    """
    if length <= ROWS:
        return ROWS
    if tile <= 2 * ROWS:
        return tile
    larger, smaller = (-(-length // n) * n for n in (tile, tile - ROWS))
    return tile_of_length(length, tile - ROWS) if 16 * larger > 17 * smaller else tile


@dataclass(frozen=True)
class Tiling:
    """The tiles of one kernel; a program holds `groups` times 64 rows of the resident side."""

    queries: TileAxis
    keys: TileAxis
    groups: int
    stages: int


@dataclass(frozen=True)
class KernelSpec:
    """The static part of a kernel."""

    mask: Mask
    soft_cap: float | None
    scale: float
    heads: int
    key_heads: int
    tiling: Tiling
    joined: bool  # a key head's list concatenates the blocks of all its query heads
    per_query_head: bool  # dk and dv have a program for each query head, and are summed afterwards
    interleaved: int  # consecutive heads whose programs alternate in the grid

    @property
    def group(self) -> int:
        return self.heads // self.key_heads


def forward(q, k, v, operands, spec, *, platform="cuda", interpret=False):
    """Returns out [B, T, N, Hv] in q's dtype and lse float32 [B, T, N]."""
    table = _table(_tiles(FORWARD, q, v, operands, spec), q, k, operands, spec)
    kernel_spec, x = _prepare(FORWARD, q, k, v, operands, spec, table)
    out, lse = _kernels().run_forward(kernel_spec, x, interpret)
    return out[:, : q.shape[1], :, : v.shape[-1]], lse[:, :, : q.shape[1]].swapaxes(1, 2)


def backward(q, k, v, out, lse, d_out, d_lse, operands, spec, *, platform="cuda", interpret=False):
    """Returns the cotangents of q, k and v; that of lse enters through `di`."""
    table = _table(_tiles(D_QUERIES, q, v, operands, spec), q, k, operands, spec)
    # A row without keys is masked everywhere; any finite lse keeps it finite until then.
    lse = jnp.where(jnp.isfinite(lse), lse, 0.0) * math.log2(math.e)
    rows = {"d_out": d_out.astype(q.dtype)}
    # A score's cotangent is p (d_out v^T - di): the kernels' sums of d_out v^T start at -di.
    rows |= {"lse": lse, "start": -online.row_cotangent(out, d_out, d_lse)}
    kernel_spec, x = _prepare(D_QUERIES, q, k, v, operands, spec, table, rows)
    dq = _kernels().run_d_queries(kernel_spec, x, interpret)
    kernel_spec, x = _prepare(D_KEYS, q, k, v, operands, spec, table, rows)
    dk, dv = _kernels().run_d_keys(kernel_spec, x, interpret)
    pairs = (dq, q), (dk, k), (dv, v)
    return *(x[:, : like.shape[1], :, : like.shape[3]] for x, like in pairs), None


def unsupported(q, k, v, operands, spec) -> str | None:
    """Returns why these kernels cannot run the inputs, or None; reads no values of arrays."""
    if (reason := _unsupported_here()) is not None:
        return reason
    if (reason := unsupported_dtypes(q, k, v, "bfloat16", "float16")) is not None:
        return reason
    largest = max(q.shape[-1], v.shape[-1])
    if largest > LARGEST_HEAD:
        return (
            f"the head size {largest} is above {LARGEST_HEAD}: dk and dv of {ROWS} keys do not fit "
            "in a warpgroup's registers"
        )
    if q.shape[1] < ROWS:
        return f"{q.shape[1]} queries are fewer than the {ROWS} rows of a warpgroup's product"
    tiles = -(-max(q.shape[1], k.shape[1]) // ROWS)
    if max(tiles, q.shape[2]) > LARGEST_GRID:
        return f"{tiles} tiles of {q.shape[2]} heads are more than a grid's {LARGEST_GRID}"
    if operands.bias is not None:
        return "these kernels add no bias to the logits"
    if (reason := unsupported_mask(operands, spec)) is not None:
        return reason
    return unsupported_blocks(q, k, user_table(operands, spec), ROWS)


def _unsupported_here() -> str | None:
    """Returns why these kernels cannot run in this process for any inputs, or None."""
    if nvidia.capability() != 90:
        return "these kernels are for Hopper GPUs (compute capability 9.0)"
    version = nvidia.assembler()
    if version is not None and MISCOMPILING[0] <= version < MISCOMPILING[1]:
        text = ".".join(map(str, version))
        return f"ptxas {text} miscompiles these kernels; use that of CUDA 12.9.1 or later"
    try:
        _kernels()
    except (ImportError, AttributeError) as error:
        return f"jax {jax.__version__} does not have what they are written in ({error})"
    return None


def _kernels():
    """Imports the module of the kernels, which fails in some versions of JAX."""
    return importlib.import_module("pallas_kernels.backends.mosaic_gpu.kernels")


def _table(tiles: nvidia.Warpgroups, q, k, operands, spec):
    """Returns the blocks to visit, query-major; `tiles` are those of the kernel."""
    return visible_blocks(operands, spec, q.shape[1], k.shape[1], *blocks(tiles, q, k))


def _tiles(kernel: str, q, v, operands, spec) -> nvidia.Warpgroups:
    """Returns the warpgroups and tiles of a kernel for a call."""
    indices = operands.q_index, operands.k_index
    vectors = any(x is not None for x in indices) + (operands.q_segments is not None)
    size = max(q.shape[-1], v.shape[-1])
    return nvidia.mosaic_gpu(kernel, size, spec.soft_cap is not None, vectors)


def _kernel_spec(kernel: str, q, k, v, operands, spec, table) -> KernelSpec:
    """Returns the static part of a kernel; reads only shapes."""
    tiles = _tiles(kernel, q, v, operands, spec)
    tiling = make_tiling(kernel, tiles, q, k, table.q_block, table.k_block)
    per_query_head = kernel == D_KEYS and _has_few_programs(tiling, q, k, v)
    return KernelSpec(
        mask=spec.mask,
        soft_cap=spec.soft_cap,
        scale=spec.scale,
        heads=q.shape[2],
        key_heads=k.shape[2],
        tiling=tiling,
        joined=table.index.shape[1] > k.shape[2] and not per_query_head,
        per_query_head=per_query_head,
        interleaved=_interleaved(kernel, q, k, v, per_query_head),
    )


def _has_few_programs(tiling: Tiling, q, k, v) -> bool:
    """Returns whether idle multiprocessors cost more than a separate sum of dk and dv over heads.

    Multiprocessors are idle if there are few programs, one for each tile of a key head. Programs
    are assumed to be equally long, or under a causal mask up to twice as long as their mean.
    """
    group, programs = q.shape[2] // k.shape[2], q.shape[0] * k.shape[2] * tiling.keys.count
    waves = -(-programs // PROCESSORS)
    busy = programs / (PROCESSORS * max(waves, 2))
    sums = 4 * q.shape[0] * tiling.keys.padded * q.shape[2] * (q.shape[3] + v.shape[3])
    return (
        group > 1
        and group * tiling.queries.count >= MANY_VISITS
        and sums <= SUMS_BYTES
        and busy < 0.95 * q.shape[1] / (q.shape[1] + SUM_QUERIES)
    )


def _interleaved(kernel: str, q, k, v, per_query_head: bool) -> int:
    """Returns the number of heads whose programs alternate.

    Under a causal mask the programs with the longest lists start first. If all programs of a head
    ran before those of the next, the long ones of the last head would start when few others remain.
    Programs that run at the same time read the streamed tiles of that many heads from L2.
    """
    group = q.shape[2] // k.shape[2]
    if kernel == D_KEYS:
        heads = q.shape[2] if per_query_head else k.shape[2]
        streamed, group = q.shape[1] * q.shape[2] // heads, 1
    else:
        heads, streamed = q.shape[2], k.shape[1]
    each = q.shape[0] * streamed * (q.shape[3] + v.shape[3]) * q.dtype.itemsize
    for count in range(min(heads, INTERLEAVED // q.shape[0]), 1, -1):
        if heads % count == 0 and -(-count // group) * each <= INTERLEAVED_BYTES:
            return count
    return 1


def _prepare(kernel: str, q, k, v, operands, spec, table, rows=None):
    """Returns the static part of a kernel, and its operands padded to whole tiles."""
    kernel_spec = _kernel_spec(kernel, q, k, v, operands, spec, table)
    tiling = kernel_spec.tiling
    report(lambda: _kernel_blocks(kernel, q, v, operands, spec, table, tiling))
    x = {"q": tiling.queries.pad(_wide(q), 1)}
    x |= {"k": tiling.keys.pad(_wide(k), 1), "v": tiling.keys.pad(_wide(v), 1)}
    for name, axis in (("q", tiling.queries), ("k", tiling.keys)):
        for vector in (f"{name}_index", f"{name}_segments"):
            value = getattr(operands, vector)
            value = None if value is None else jnp.asarray(value, jnp.int32)
            x[vector] = axis.pad(value, 1)
    if rows is not None:
        x["d_out"] = tiling.queries.pad(_wide(rows["d_out"]), 1)
        x |= {name: tiling.queries.pad(rows[name].swapaxes(1, 2), 2) for name in ("lse", "start")}
    return kernel_spec, x | list_operands(table, kernel, kernel_spec)


def _kernel_blocks(kernel: str, q, v, operands, spec, table, tiling: Tiling) -> KernelBlocks:
    """Returns the report of a kernel."""
    tiles = _tiles(kernel, q, v, operands, spec)
    reasons = [tiles.reason]
    shrunk = "needs the least padding"
    if user_table(operands, spec) is not None:
        reasons.append(f"the caller's table has blocks of {table.q_block} x {table.k_block}")
        shrunk = "divides them"
    if kernel == D_KEYS:
        listed, resident, streamed = table, tiling.keys, tiling.queries
    else:
        listed = _with_padding_tested(table, tiling.keys)
        resident, streamed = tiling.queries, tiling.keys
    for side, axis, most in (
        ("resident", resident, tiles.groups * ROWS),
        ("streamed", streamed, tiles.streamed),
    ):
        if axis.tile < most:
            reasons.append(f"a {side} tile of {axis.tile} rows {shrunk}")
    return KernelBlocks(
        kernel=kernel,
        queries=tiling.queries.tile,
        heads=1,
        rows=tiling.queries.tile,
        keys=tiling.keys.tile,
        reason="; ".join(reasons),
        fraction=listed.fraction(tiling.keys.length),
    )


def _wide(x):
    """Returns x with its last axis padded to a multiple of HEAD."""
    padding = -x.shape[-1] % HEAD
    return jnp.pad(x, [(0, 0)] * 3 + [(0, padding)]) if padding else x


def blocks(tiles: nvidia.Warpgroups, q, k) -> tuple[int, int]:
    """Returns the sizes of a table's blocks, for calls without a table."""
    q_block = max(BLOCK, tile_of_length(q.shape[1], tiles.groups * ROWS))
    k_block = BLOCK
    while (-(-q.shape[1] // q_block)) * (-(-k.shape[1] // k_block)) > CELLS:
        q_block, k_block = 2 * q_block, 2 * k_block
    return q_block, k_block


def make_tiling(kernel: str, tiles: nvidia.Warpgroups, q, k, q_block: int, k_block: int) -> Tiling:
    resident, streamed = tiles.groups * ROWS, tiles.streamed
    if kernel == D_KEYS:
        queries, keys = (
            tile_axis(q.shape[1], q_block, streamed),
            tile_axis(k.shape[1], k_block, resident),
        )
        return Tiling(queries, keys, keys.tile // ROWS, tiles.stages)
    queries, keys = (
        tile_axis(q.shape[1], q_block, resident),
        tile_axis(k.shape[1], k_block, streamed),
    )
    return Tiling(queries, keys, queries.tile // ROWS, tiles.stages)


def list_operands(table, kernel: str, spec: KernelSpec) -> dict:
    """Returns the table's BlockLists as operands of a kernel.

    If `joined`, the lists of the query heads of a group become one list, in which block numbers
    continue from head to head.
    """
    tiling, group = spec.tiling, spec.group
    if kernel == D_KEYS:
        if spec.joined:
            table = table.heads(lambda x: x.reshape(len(x), -1, group * x.shape[2], *x.shape[3:]))
        lists = transpose(table, tiling.keys.length)
    else:
        lists = _with_padding_tested(table, tiling.keys).lists()
    return dict(index=lists.index, first=lists.first, full=lists.full, seen=lists.seen)


def _with_padding_tested(table: BlockTable, keys: TileAxis) -> BlockTable:
    """Returns the table, whose single block may be full although its last, padded tile is not."""
    is_padded = keys.length <= table.k_block and keys.length < keys.padded
    return table.tested() if is_padded else table
