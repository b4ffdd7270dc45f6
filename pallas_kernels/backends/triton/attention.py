"""Block-sparse attention for NVIDIA GPUs in Pallas-Triton: forward, dq, and dk with dv.

Every program visits the listed blocks of its own block, and reads the list from memory while the
kernel runs. So time is proportional to the number of visible blocks, forward and backward, for
every mask, also if tables differ by head or are computed on the device. Arrays are read in their
own layout: nothing is padded, transposed or repeated per head. Sums run in a fixed order in one
program and nothing is accumulated in memory: results are bitwise reproducible.

With few queries (decoding), the queries of all heads that share a key head are rows of one product,
over a cache [B, K, S, H] in its own layout. If few programs would run, several of them share a
list. The outputs have the layout of the cache, too.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import key_bits, nvidia
from pallas_kernels import online_softmax as online
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
from pallas_kernels.explanations import KernelBlocks, report
from pallas_kernels.quantised import is_quantised, unscaled
from pallas_kernels.tables import BlockLists, BlockTable, transpose

LARGEST_HEAD = 256
LARGEST_GRID = 65535  # most heads, or batch rows
PACKED = 64  # most rows of a key head that decoding computes as one block
PROGRAMS = 256  # programs that keep a GPU busy; lists are split if fewer would run
PAIRS = 2**24  # most pairs of blocks in a mask's table; longer inputs get larger blocks
F32 = jnp.float32


def forward(q, k, v, operands, spec, *, platform="cuda", interpret=False):
    """Returns out [B, T, N, Hv] in q's dtype and lse float32 [B, T, N]."""
    packed = _packs(q, k, operands, spec)
    kernel_spec, x = _prepare("decode" if packed else "forward", q, k, v, operands, spec, interpret)
    heads, (k, v, *scales) = k.shape[2], unscaled(k, v)
    x |= {"q": q, "k": k, "v": v}
    if packed:
        x |= {"q": _pack(q, heads), "k": k.swapaxes(1, 2), "v": v.swapaxes(1, 2)}
    for name, scale in zip(("k_scale", "v_scale"), scales, strict=True):
        x[name] = None if scale is None else scale[..., 0].swapaxes(1, 2)
    # Parts are merged in float32.
    outputs = [(q.dtype if kernel_spec.parts == 1 else F32, v.shape[-1]), "vector"]
    outs, lses = by_rows(kernels.forward, kernel_spec, x, outputs)
    if not packed:
        return outs[0], lses[0].swapaxes(1, 2)
    out, lse = (_unpack(x, q.shape[1]) for x in online.merge_parts(outs, lses))
    return out.astype(q.dtype), lse


def backward(q, k, v, out, lse, d_out, d_lse, operands, spec, *, platform="cuda", interpret=False):
    """Returns the cotangents of q, k, v and the bias; that of lse enters through `di`."""
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
    """Returns the arrays of a backward pass; rows without keys have probabilities exp(-inf) = 0."""
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2_E).swapaxes(1, 2)
    di = online.row_cotangent(out, d_out, d_lse).swapaxes(1, 2)
    return {"q": q, "k": k, "v": v, "d_out": d_out.astype(q.dtype), "lse": lse, "di": di}


def unsupported(q, k, v, operands, spec) -> str | None:
    """Returns why these kernels cannot run the inputs, or None; reads no values of arrays."""
    if (reason := unsupported_arrays(q, *_like_arrays(q, k, v))) is not None:
        return reason
    if is_quantised(k, v) and not _packs(q, k, operands, spec):
        return f"codes are read where at most {PACKED} rows share a key head, without a bias"
    if (reason := unsupported_mask(operands, spec, reads_bits=True)) is not None:
        return reason
    if operands.bias is not None and not isinstance(operands.bias, Alibi):
        return "these kernels support only linear biases (Alibi)"
    return unsupported_blocks(q, k, user_table(operands, spec), MIN_TILE)


def _like_arrays(q, k, v) -> tuple:
    """Returns k and v, but in place of codes of 8 bits arrays of their shape in q's dtype."""
    if (arrays := unscaled(k, v)) is None:
        return k, v
    pairs = zip(arrays[:2], arrays[2:], strict=True)
    return tuple(x if s is None else jax.ShapeDtypeStruct(x.shape, q.dtype) for x, s in pairs)


def unsupported_arrays(q, k, v) -> str | None:
    """Returns why no Triton kernel can run arrays of these shapes and dtypes, or None."""
    if nvidia.architecture() is None:
        return "no NVIDIA GPU of compute capability 8.0 or above is known to this process"
    if kernels.plt is None:
        return "this version of JAX has no Pallas-Triton"
    if (reason := unsupported_dtypes(q, k, v, "float32", "bfloat16")) is not None:
        return reason
    if (largest := max(q.shape[-1], v.shape[-1])) > LARGEST_HEAD:
        return f"the head size {largest} is above {LARGEST_HEAD}: registers would not hold a block"
    if q.dtype == F32 and largest > nvidia.LARGEST_EXACT:
        return f"float32 heads of {largest}: above {nvidia.LARGEST_EXACT} registers are spilled"
    if max(q.shape[0], q.shape[2]) > LARGEST_GRID:
        return f"{q.shape[0]} rows of {q.shape[2]} heads are more than a grid's {LARGEST_GRID}"
    return None


def _packs(q, k, operands, spec) -> bool:
    """Returns whether the queries of all heads that share a key head are rows of one block."""
    table, (queries, n), heads = user_table(operands, spec), q.shape[1:3], k.shape[2]
    if operands.bias is not None or operands.key_bits is not None:
        return False
    if queries * (n // heads) > PACKED:
        return False
    return table is None or (table.seen.shape[2] == 1 and table.seen.shape[1] <= heads)


def _pack(x, heads: int):
    """[B, T, N, H] -> [B, K, T G, H]; for one query the layout in memory is the same."""
    batch, t, n, size = x.shape
    x = x.reshape(batch, t, heads, n // heads, size).swapaxes(1, 2)
    return x.reshape(batch, heads, -1, size)


def _unpack(x, t: int):
    """[B, K, T G, ...] -> [B, T, N, ...]."""
    batch, heads, rows, rest = *x.shape[:3], x.shape[3:]
    x = x.reshape(batch, heads, t, rows // t, *rest).swapaxes(1, 2)
    return x.reshape(batch, t, -1, *rest)


def _prepare(kind: str, q, k, v, operands, spec, interpret: bool):
    """Returns the static part of a kernel, and the operands besides q, k, v and residuals."""
    packed, transposed = kind == "decode", kind == "d_keys"
    extra = spec.soft_cap, *operands[:5], operands.key_bits
    busy = any(x is not None for x in extra)
    tile = nvidia.triton(kind, next_power_of_two(max(q.shape[-1], v.shape[-1])), q.dtype, busy)
    copies = q.shape[2] // k.shape[2] if packed else 1
    rows, keys, table = _table(q, k, operands, spec, tile, copies)
    block_lists = transpose(table, k.shape[1]) if transposed else table.lists()
    parts = 1
    if packed:
        parts = spec.splits or _parts(table, q.shape[0] * k.shape[2], keys.steps)
    full, seen = block_lists.full, block_lists.seen
    given = user_table(operands, spec)
    report(lambda: kernel_blocks(kind, tile, rows, keys, copies, table, parts, given))
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
    x = vectors(operands, copies) | list_operands(block_lists, rows, keys)
    if operands.key_bits is not None:
        words = jax.lax.bitcast_convert_type(operands.key_bits, jnp.int32)
        x["key_bits"] = words.swapaxes(1, 2) if transposed else words
    return kernel_spec, x


def kernel_blocks(
    kernel: str,
    tile: nvidia.Tile,
    rows: Axis,
    keys: Axis,
    copies: int,
    table: BlockTable,
    parts: int = 1,
    user_table: BlockTable | None = None,
    block: int = 1,
) -> KernelBlocks:
    """Returns the report of a kernel; `block` is the number of keys that a step counts as one."""
    reasons = [tile.reason]
    if user_table is not None:
        reasons.append(f"the caller's table has blocks of {table.q_block} x {table.k_block}")
    for name, steps, most in (("rows", rows, tile.rows), ("keys", keys, tile.keys)):
        if steps.unit < most:
            whole = steps.blocks == 1
            reasons.append(f"a step holds all {name}" if whole else f"{name} divide the table's")
    if parts > 1:
        reasons.append(f"{parts} programs share the keys of a list, which keeps the GPU busy")
    return KernelBlocks(
        kernel=kernel,
        queries=min(rows.unit, rows.length) // copies,
        heads=copies,
        rows=rows.unit,
        keys=keys.unit * block,
        reason="; ".join(reasons),
        fraction=table.fraction(keys.length),
    )


def list_operands(lists: BlockLists, rows: Axis, keys: Axis) -> dict:
    """Returns the operands by which a kernel visits the listed blocks."""
    # 16 bits halve the lists, which are constants of the program if the table is static.
    small = max(rows.blocks, keys.blocks) < 2**15
    index = jnp.asarray(lists.index, jnp.int16 if small else jnp.int32)
    return {"index": index} | {x: jnp.asarray(getattr(lists, x)) for x in ("first", "full", "seen")}


def _table(q, k, operands, spec, tile, copies: int) -> tuple[Axis, Axis, BlockTable]:
    """Returns the steps of rows and of keys, and the blocks that each block of queries visits."""
    queries, keys = q.shape[1], k.shape[1]
    q_block, k_block = table_blocks(queries * copies, keys, tile)
    q_block = q_block if copies == 1 else queries
    if operands.key_bits is not None:
        k_block = max(k_block, key_bits.LANES)
    table = visible_blocks(operands, spec, queries, keys, q_block, k_block)
    rows = axis(queries * copies, table.q_block * copies, tile.rows)
    columns = axis(keys, table.k_block, tile.keys)
    # A single block may be full although its last step, which reaches beyond the keys, is not.
    is_ragged = keys <= table.k_block and columns.is_ragged(listed=True)
    return rows, columns, table.tested() if is_ragged else table


def table_blocks(rows: int, keys: int, tile) -> tuple[int, int]:
    """Returns the block sizes of a mask's table: a step, or several for very long inputs."""
    q_block, k_block = (
        min(tile.rows, next_power_of_two(rows)),
        min(tile.keys, next_power_of_two(keys)),
    )
    while -(-rows // q_block) * -(-keys // k_block) > PAIRS:
        q_block, k_block = 2 * q_block, 2 * k_block
    return q_block, k_block


def _parts(table: BlockTable, programs: int, steps: int) -> int:
    """Returns how many programs share a list: enough to keep a GPU busy, if lists are long."""
    longest = int(table.seen.max()) if table.static else table.capacity
    return max(1, min(-(-PROGRAMS // programs), longest * steps))


def vectors(operands, copies: int = 1):
    """Returns indices, segments and slopes; those of queries are repeated for `copies` rows."""

    def rows(x):
        return x if x is None or copies == 1 else jnp.repeat(x, copies, axis=1)

    x = dict(zip(("q_index", "k_index", "q_segments", "k_segments"), operands[:4], strict=True))
    x |= {name: rows(x[name]) for name in ("q_index", "q_segments")}
    x = {
        name: None if value is None else jnp.asarray(value, jnp.int32) for name, value in x.items()
    }
    slopes = None if operands.bias is None else operands.bias.slopes.astype(F32)
    return x | {"slopes": slopes}
