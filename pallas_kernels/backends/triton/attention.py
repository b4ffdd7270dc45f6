"""Block-sparse attention for NVIDIA GPUs in Pallas-Triton: forward, dq, and dk with dv.

Every program visits the listed blocks that its own block meets, read from the table in memory
while the kernel runs, so time follows the number of visible blocks, forward and backward, whatever
the mask, also where the table is per head or computed on the device. Arrays are read in their own
layout: nothing is padded, transposed or repeated per head. Sums run in a fixed order in one program
and nothing is accumulated in memory: results are the same bit by bit in every run.

Few queries (decoding) are rows of one product with all heads that share a key head, over a cache
[B, K, S, H] in its own layout, and a list is split over several programs where few would run.
Their outputs have that layout, too.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from pallas_kernels import online_softmax as online
from pallas_kernels import tuning
from pallas_kernels.backends.triton import kernels
from pallas_kernels.backends.triton.kernels import (
    LOG2_E,
    MIN_TILE,
    Axis,
    KernelSpec,
    axis,
    by_keys,
    by_rows,
    next_power_of_two,
)
from pallas_kernels.biases import Alibi
from pallas_kernels.dispatch import (
    unsupported_blocks,
    unsupported_dtypes,
    unsupported_mask,
    user_table,
    visible_blocks,
)
from pallas_kernels.tables import BlockLists, BlockTable, transpose

LARGEST_HEAD = 256
LARGEST_GRID = 65535  # heads, or batch rows
PACKED = 64  # most rows of a key head that are one block of decoding
PROGRAMS = 256  # that keep a GPU busy; where fewer would run, lists are split
PAIRS = 2**24  # of blocks in a mask's table; beyond it larger blocks are listed
F32 = jnp.float32


def forward(q, k, v, operands, spec, *, platform="cuda", interpret=False):
    """out [B, T, N, Hv] in q's dtype and lse float32 [B, T, N]."""
    packed = _packs(q, k, operands, spec)
    kernel_spec, x = _prepare("decode" if packed else "forward", q, k, v, operands, spec, interpret)
    x |= {"q": q, "k": k, "v": v}
    if packed:
        x |= {"q": _pack(q, k.shape[2]), "k": k.swapaxes(1, 2), "v": v.swapaxes(1, 2)}
    # Parts are merged in float32.
    outputs = [(q.dtype if kernel_spec.parts == 1 else F32, v.shape[-1]), "vector"]
    outs, lses = by_rows(kernels.forward, kernel_spec, x, outputs)
    if not packed:
        return outs[0], lses[0].swapaxes(1, 2)
    out, lse = (_unpack(x, q.shape[1]) for x in online.merge_parts(outs, lses))
    return out.astype(q.dtype), lse


def backward(q, k, v, out, lse, d_out, d_lse, operands, spec, *, platform="cuda", interpret=False):
    """Cotangents of q, k, v and of the bias; that of lse enters through `di`."""
    arrays = residuals(q, k, v, out, lse, d_out, d_lse)
    kernel_spec, x = _prepare("d_queries", q, k, v, operands, spec, interpret)
    outputs = [(q.dtype, q.shape[-1]), None if operands.bias is None else "number"]
    dq, d_bias = by_rows(kernels.d_queries, kernel_spec, x | arrays, outputs)
    kernel_spec, x = _prepare("d_keys", q, k, v, operands, spec, interpret)
    dk, dv = by_keys(kernels.d_keys, kernel_spec, x | arrays)
    if d_bias is not None:
        d_bias = Alibi(jnp.sum(d_bias, (0, 1, 3)))
    return dq[0], dk, dv, d_bias


def residuals(q, k, v, out, lse, d_out, d_lse) -> dict:
    """The arrays of a backward pass; a row without keys has probabilities exp(-inf) = 0."""
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2_E).swapaxes(1, 2)
    di = online.row_cotangent(out, d_out, d_lse).swapaxes(1, 2)
    return {"q": q, "k": k, "v": v, "d_out": d_out.astype(q.dtype), "lse": lse, "di": di}


def unsupported(q, k, v, operands, spec) -> str | None:
    """Why these kernels cannot run the inputs, or None; reads shapes, dtypes and structure."""
    if (reason := unsupported_arrays(q, k, v)) is not None:
        return reason
    if (reason := unsupported_mask(spec)) is not None:
        return reason
    if operands.bias is not None and not isinstance(operands.bias, Alibi):
        return "the bias looks its values up by distance; these kernels know linear biases alone"
    return unsupported_blocks(q, k, user_table(operands, spec), MIN_TILE)


def unsupported_arrays(q, k, v) -> str | None:
    """Why no Triton kernel of this package can run arrays of these shapes and dtypes, or None."""
    if tuning.architecture() is None:
        return "no NVIDIA GPU of compute capability 8.0 or above is known to this process"
    if kernels.plt is None:
        return "this version of JAX has no Pallas-Triton"
    if (reason := unsupported_dtypes(q, k, v, "float32", "bfloat16")) is not None:
        return reason
    if (largest := max(q.shape[-1], v.shape[-1])) > LARGEST_HEAD:
        return f"the head size {largest} is above {LARGEST_HEAD}: registers would not hold a block"
    if q.dtype == F32 and largest > tuning.LARGEST_EXACT:
        return f"float32 heads of {largest}: above {tuning.LARGEST_EXACT} registers are spilled"
    if max(q.shape[0], q.shape[2]) > LARGEST_GRID:
        return f"{q.shape[0]} rows of {q.shape[2]} heads are more than a grid's {LARGEST_GRID}"
    return None


def _packs(q, k, operands, spec) -> bool:
    """Whether the queries of all heads that share a key head are rows of one block."""
    table, (queries, n), heads = user_table(operands, spec), q.shape[1:3], k.shape[2]
    if operands.bias is not None or queries * (n // heads) > PACKED:
        return False
    return table is None or (table.seen.shape[2] == 1 and table.seen.shape[1] <= heads)


def _pack(x, heads: int):
    """[B, T, N, H] -> [B, K, T G, H]; of one query nothing moves in memory."""
    batch, t, n, size = x.shape
    x = x.reshape(batch, t, heads, n // heads, size).swapaxes(1, 2)
    return x.reshape(batch, heads, -1, size)


def _unpack(x, t: int):
    """[B, K, T G, ...] -> [B, T, N, ...]."""
    batch, heads, rows, rest = *x.shape[:3], x.shape[3:]
    x = x.reshape(batch, heads, t, rows // t, *rest).swapaxes(1, 2)
    return x.reshape(batch, t, -1, *rest)


def _prepare(kind: str, q, k, v, operands, spec, interpret: bool):
    """The static part of a kernel, and the operands beside its arrays."""
    packed, transposed = kind == "decode", kind == "d_keys"
    busy = spec.soft_cap is not None or any(x is not None for x in operands[:5])
    tile = tuning.triton(kind, next_power_of_two(max(q.shape[-1], v.shape[-1])), q.dtype, busy)
    copies = q.shape[2] // k.shape[2] if packed else 1
    rows, keys, table = _table(q, k, operands, spec, tile, copies)
    block_lists = transpose(table, k.shape[1]) if transposed else table.lists()
    parts = 1
    if packed:
        parts = spec.splits or _parts(table, q.shape[0] * k.shape[2], keys.steps)
    full, seen = block_lists.full, block_lists.seen
    kernel_spec = KernelSpec(
        mask=spec.mask,
        scale=spec.scale,
        soft_cap=spec.soft_cap,
        rows=rows,
        keys=keys,
        size=q.shape[-1],
        v_size=v.shape[-1],
        group=1 if packed else q.shape[2] // k.shape[2],
        transposed=transposed,
        has_full=not table.static or bool(np.any(full > 0)),
        has_partial=not table.static or bool(np.any(seen > full)),
        by_head=transposed and seen.shape[1] > k.shape[2],
        cache=packed,
        copies=copies,
        parts=parts,
        warps=tile.warps,
        stages=tile.stages,
        interpret=interpret,
    )
    return kernel_spec, vectors(operands, copies) | list_operands(block_lists, rows, keys)


def list_operands(lists: BlockLists, rows: Axis, keys: Axis) -> dict:
    """The operands of a kernel that visits the listed blocks."""
    # Half the bytes of a list, which is part of the program where the table is known.
    small = max(rows.blocks, keys.blocks) < 2**15
    index = jnp.asarray(lists.index, jnp.int16 if small else jnp.int32)
    return {"index": index} | {x: jnp.asarray(getattr(lists, x)) for x in ("first", "full", "seen")}


def _table(q, k, operands, spec, tile, copies: int) -> tuple[Axis, Axis, BlockTable]:
    """Steps of rows and of keys, and the blocks that each block of queries visits."""
    queries, keys = q.shape[1], k.shape[1]
    q_block, k_block = table_blocks(queries * copies, keys, tile)
    q_block = q_block if copies == 1 else queries
    table = visible_blocks(operands, spec, queries, keys, q_block, k_block)
    rows = axis(queries * copies, table.q_block * copies, tile.rows)
    columns = axis(keys, table.k_block, tile.keys)
    # A lone block may be full where its last step, which reaches beyond the keys, is not.
    is_ragged = keys <= table.k_block and columns.is_ragged(listed=True)
    return rows, columns, table.tested() if is_ragged else table


def table_blocks(rows: int, keys: int, tile) -> tuple[int, int]:
    """The block sizes of a mask's table: steps, or several of them if there are too many."""
    q_block, k_block = (
        min(tile.rows, next_power_of_two(rows)),
        min(tile.keys, next_power_of_two(keys)),
    )
    while -(-rows // q_block) * -(-keys // k_block) > PAIRS:
        q_block, k_block = 2 * q_block, 2 * k_block
    return q_block, k_block


def _parts(table: BlockTable, programs: int, steps: int) -> int:
    """The number of programs that share a list: enough to keep a GPU busy, if lists are long."""
    longest = int(table.seen.max()) if table.static else table.capacity
    return max(1, min(-(-PROGRAMS // programs), longest * steps))


def vectors(operands, copies: int = 1):
    """Indices, segments and slopes."""

    def rows(x):
        return x if x is None or copies == 1 else jnp.repeat(x, copies, axis=1)

    x = dict(zip(("q_index", "k_index", "q_segments", "k_segments"), operands[:4], strict=True))
    x |= {name: rows(x[name]) for name in ("q_index", "q_segments")}
    x = {
        name: None if value is None else jnp.asarray(value, jnp.int32) for name, value in x.items()
    }
    slopes = None if operands.bias is None else operands.bias.slopes.astype(F32)
    return x | {"slopes": slopes}
