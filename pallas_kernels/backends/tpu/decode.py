"""Few queries over many keys on TPU: decoding, whose time is that of reading the cache once.

Keys are read in the memory layout of a cache [B, K, S, H], without a copy that pads or transposes
them. XLA stores heads that do not fill the 128 lanes as [B, K, H, S], because that needs no
padding; then a step's block is [H, keys], and the products contract its other axis. The element
test hides the part of a last block that lies beyond the keys. Codes of 8 bits are converted in
VMEM, so that a step moves half the bytes; the scales of its slots multiply logits and weights.

The queries of the heads that share a key head are rows of one product, padded to whole sublanes
only: with 128 rows a step would take longer to compute than to read. The visited blocks can be
split into `splits` parts, which run in parallel on a chip with several cores (v4, v5p) and are
merged by log-sum-exp.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import online_softmax as online
from pallas_kernels.backends.tpu import kernels
from pallas_kernels.backends.tpu.grid import (
    FULL,
    LANES,
    NOTHING,
    PARTIAL,
    SCALAR_BYTES,
    Step,
    Tiling,
)
from pallas_kernels.backends.tpu.kernels import Block, KernelSpec
from pallas_kernels.biases import RelativeBias
from pallas_kernels.dispatch import user_table, visible_blocks
from pallas_kernels.explanations import KernelBlocks, report
from pallas_kernels.online_softmax import merge_parts
from pallas_kernels.quantised import unscaled
from pallas_kernels.tables import BlockTable

F32 = jnp.float32
KEY_BYTES = 2**19  # of the keys of a step: enough to hide the overhead of a step (0.3 us)
SCORES = 2**18  # of a step: a few float32 arrays of this size fit into VMEM besides its operands
SUBLANES = {"float32": 8, "bfloat16": 16}
CODES = ("int8", "float8_e4m3fn")


def fits(q, k, v, operands, spec) -> bool:
    """Returns whether these kernels can run: rows are few, and scalar memory holds the lists."""
    if q.shape[1] * q.shape[2] // k.shape[2] > LANES:
        return False
    table, keys, heads = user_table(operands, spec), k.shape[1], k.shape[2]
    if table is None:
        blocks, lists = -(-keys // _key_block(q, k, v)), 1
    else:
        blocks, lists = table.capacity, table.seen.shape[1]
        is_aligned = keys <= table.k_block or table.k_block % LANES == 0
        if lists > heads or table.seen.shape[2] > 1 or not is_aligned:
            return False
    return 4 * q.shape[0] * lists * blocks <= SCALAR_BYTES


def unsupported_codes(q, k, v, operands, spec) -> str | None:
    """Returns why these kernels cannot read keys and values as codes, or None."""
    if (arrays := unscaled(k, v)) is None:
        return "codes of fewer than 8 bits are unpacked by XLA's blockwise attention"
    dtypes = [str(x.dtype) for x in (q, *arrays[:2])]
    if dtypes[0] not in SUBLANES or not set(dtypes[1:]) <= {dtypes[0], *CODES}:
        return f"q, k and v are {', '.join(dtypes)}; codes must be {' or '.join(CODES)}"
    if isinstance(operands.bias, RelativeBias) or not fits(q, k, v, operands, spec):
        return f"the kernel that reads codes is for decoding: at most {LANES} rows for a key head"
    return None


def forward(q, k, v, operands, spec, *, interpret=False):
    """Returns out [B, T, N, Hv] in q's dtype and lse float32 [B, T, N]."""
    blocks = q.shape[1], _key_block(q, k, v)
    table = visible_blocks(operands, spec, q.shape[1], k.shape[1], *blocks)
    tiling, lists = _tiling(q, k, table), _BlockLists(table, _parts(q, k, spec))
    report(lambda: _kernel_blocks(q, k, v, operands, spec, tiling, table))
    kernel_spec, x = _prepare(q, k, v, operands, spec, tiling)
    outs, lses = _launch(kernel_spec, tiling, lists, x, q.dtype, v.shape[-1], interpret)
    out, lse = merge_parts(outs, lses[..., 0])
    return tiling.from_rows(out).astype(q.dtype), tiling.from_rows(lse)


def _parts(q, k, spec) -> int:
    """Returns the number of parts: 2 for a single row and head, as a chip has at most two cores."""
    if spec.splits is not None:
        return spec.splits
    return 1 if q.shape[0] * k.shape[2] > 1 else 2


def _rows(q, k) -> int:
    """Returns the number of rows of a key head, padded to whole sublanes."""
    tile = SUBLANES[str(q.dtype)]
    return -(-q.shape[1] * q.shape[2] // k.shape[2] // tile) * tile


def _key_limits(q, k, v) -> dict[str, int]:
    """Returns the most keys of a step by the reason for the limit."""
    size = max(k.shape[-1], v.shape[-1]) * max(k.dtype.itemsize, v.dtype.itemsize)
    limits = {
        f"{KEY_BYTES} bytes of keys hide the overhead of a step": KEY_BYTES // size,
        f"{SCORES} scores fit into VMEM": SCORES // _rows(q, k),
    }
    whole_lanes = {reason: most // LANES * LANES for reason, most in limits.items()}
    return {"one block holds all keys": k.shape[1]} | whole_lanes


def _key_block(q, k, v) -> int:
    """Returns the keys of a step: all, or whole lanes of them within KEY_BYTES and SCORES."""
    return min(_key_limits(q, k, v).values())


def _kernel_blocks(q, k, v, operands, spec, tiling: Tiling, table: BlockTable) -> KernelBlocks:
    """Returns the report of the kernel."""
    limits = _key_limits(q, k, v)
    reason = min(limits, key=limits.get)
    if user_table(operands, spec) is not None:
        reason = f"the caller's table has blocks of {table.k_block} keys"
    rows = f"rows are padded to {SUBLANES[str(q.dtype)]} sublanes"
    return KernelBlocks(
        kernel="decode",
        queries=tiling.queries,
        heads=tiling.group,
        rows=tiling.rows,
        keys=tiling.key_block,
        reason=f"{reason}; {rows}; {_parts(q, k, spec)} parts of the keys",
        fraction=table.fraction(tiling.keys),
    )


def _tiling(q, k, table: BlockTable) -> Tiling:
    (batch, queries, n), (keys, heads) = q.shape[:3], k.shape[1:3]
    key_block = min(table.k_block, keys)
    return Tiling(
        batch=batch,
        heads=heads,
        group=n // heads,
        queries=queries,
        keys=keys,
        by_head=False,
        rows=_rows(q, k),
        split=1,
        count=1,
        key_block=key_block,
        key_count=-(-keys // key_block),
    )


class _BlockLists:
    """The visited blocks as scalars of the kernel, split into `splits` parts.

    Batch rows or heads that have the same list in the table share it.
    """

    def __init__(self, table: BlockTable, splits: int):
        self.shape, self.capacity, self.splits = table.seen.shape[:2], table.capacity, splits
        self.scalars = tuple(
            jnp.asarray(x, jnp.int32).reshape(-1) for x in (table.index, table.full, table.seen)
        )
        steps = (table.seen.max() + splits - 1) // splits
        self.steps = max(1, int(steps)) if table.static else jnp.maximum(steps, 1)

    def visit(self, part, b, h, n, index, full, seen):
        """Returns (block, kind) of step n of a part; steps after its last repeat its block."""
        number = (b if self.shape[0] > 1 else 0) * self.shape[1] + (h if self.shape[1] > 1 else 0)
        size = jax.lax.div(seen[number] + self.splits - 1, jnp.int32(self.splits))
        slot = part * size + n
        live = (n < size) & (slot < seen[number])
        last = jnp.minimum((part + 1) * size, seen[number]) - 1
        block = index[number * self.capacity + jnp.maximum(jnp.minimum(slot, last), 0)]
        kind = jnp.where(slot < full[number], FULL, PARTIAL)
        return block, jnp.where(live, kind, NOTHING)


def _values(block: Block, masked: bool):
    """Returns the values of the block's keys, and their scales [1, keys] or None.

    They are 0 after the last key.
    """
    spec, value, scale = block.spec, block.keys("v"), block.x["v_scale"]
    scale = None if scale is None else scale[...]
    if not (masked and spec.ragged):
        return value, scale

    # The memory after the keys is undefined: it may hold NaN, and 0 times NaN is NaN.
    def only_keys(x, axis):
        number = block.step.col * spec.key_block
        number = number + jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
        return jnp.where(number < spec.keys, x, jnp.zeros_like(x))

    return only_keys(value, spec.v_axis), None if scale is None else only_keys(scale, 1)


def _kernel(spec: KernelSpec, lists: _BlockLists, index, full, seen, x, out, lse, top, total, acc):
    part, b, h, n = (pl.program_id(axis) for axis in range(4))
    col, kind = lists.visit(part, b, h, n, index, full, seen)
    block = Block(spec, Step(0, col, kind, None, None), x, {}, transposed=False)
    pl.when(n == 0)(lambda: kernels.start_softmax(top, total, acc))

    def visit(masked: bool):
        logits, _ = block.logits()
        if masked:
            logits = block.masked(logits, -jnp.inf)
        (values, scale), factor = _values(block, masked), block.exponent_factor
        kernels.add_to_softmax(logits, values, spec.v_axis, top, total, acc, factor, scale)

    kernels.visit_as(kind, visit)

    @pl.when(n == pl.num_programs(3) - 1)
    def _():
        normalised, sums = kernels.end_softmax(top, total, acc, block.exponent_factor)
        out[...], lse[...] = normalised.astype(out.dtype), sums[:, :1]


def _prepare(q, k, v, operands, spec, tiling: Tiling):
    """Returns the static part of the kernel, and its operands; keys keep their memory layout."""
    before, factor = online.scales(spec.scale, q.dtype)
    k, v, *scales = unscaled(k, v)
    k_axis, v_axis = (int(x.shape[-1] % LANES != 0) for x in (k, v))
    kernel_spec = KernelSpec(
        mask=spec.mask,
        soft_cap=spec.soft_cap,
        factor=factor,
        scale=spec.scale,
        rows=tiling.rows,
        key_block=tiling.key_block,
        keys=tiling.keys,
        group=tiling.group,
        period=1,
        k_axis=k_axis,
        v_axis=v_axis,
    )
    x = {
        "q": tiling.to_rows(q * jnp.asarray(before, q.dtype)),
        "k": k.transpose((0, 2, 3, 1) if k_axis else (0, 2, 1, 3)),
        "v": v.transpose((0, 2, 3, 1) if v_axis else (0, 2, 1, 3)),
    }
    for name, scale in zip(("k_scale", "v_scale"), scales, strict=True):
        x[name] = None if scale is None else scale.transpose((0, 2, 3, 1))
    return kernel_spec, x | _vectors(operands, tiling)


def _vectors(operands, tiling: Tiling):
    """Returns indices, segments and slopes: [.., rows, 1] for rows, [.., 1, S] for keys."""

    def rows(x):
        return None if x is None else tiling.query_vector(x).swapaxes(1, 2)

    def keys(x):
        return None if x is None else x[:, None]

    slopes = None
    if operands.bias is not None:
        slopes = tiling.head_vector(operands.bias.slopes.astype(F32)).swapaxes(1, 2)
    return {
        "q_index": rows(operands.q_index),
        "k_index": keys(operands.k_index),
        "q_segments": rows(operands.q_segments),
        "k_segments": keys(kernels.hide_padding(operands.k_segments)),
        "slopes": slopes,
    }


def _launch(
    kernel_spec: KernelSpec, tiling: Tiling, lists: _BlockLists, x, dtype, v_size: int, interpret
):
    """Returns out [splits, B, K, rows, Hv] and lse [splits, B, K, rows, 1]."""
    grid = (lists.splits, tiling.batch, tiling.heads, lists.steps)
    # Parts are merged in float32.
    dtype = dtype if lists.splits == 1 else F32

    def output(width):
        return pl.BlockSpec(
            (None, None, None, tiling.rows, width), lambda part, b, h, n, *_: (part, b, h, 0, 0)
        )

    run = pl.pallas_call(
        functools.partial(_kernel, kernel_spec, lists),
        out_shape=tuple(
            jax.ShapeDtypeStruct((*grid[:3], tiling.rows, width), kind)
            for width, kind in ((v_size, dtype), (1, F32))
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=grid,
            in_specs=[{name: _operand(name, v, kernel_spec, lists) for name, v in x.items()}],
            out_specs=(output(v_size), output(1)),
            scratch_shapes=[
                pltpu.VMEM((tiling.rows, width), F32) for width in (LANES, LANES, v_size)
            ],
        ),
        interpret=interpret,
        name="lcjax_decode",
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
        ),
    )
    return run(*lists.scalars, x)


def _operand(name: str, value, kernel_spec: KernelSpec, lists: _BlockLists):
    """Returns the BlockSpec of the block of an operand that a step reads."""
    if value is None:
        return None
    key_axis = {
        "k": kernel_spec.k_axis,
        "v": kernel_spec.v_axis,
        "k_index": 1,
        "k_segments": 1,
        "k_scale": 1,
        "v_scale": 1,
    }.get(name)
    # Indices and segments are the same for all heads, slopes for all batch rows.
    along = {"slopes": (1,)}.get(name, (0,) if value.ndim == 3 else (0, 1))
    sizes = list(value.shape[-2:])
    if key_axis is not None:
        sizes[key_axis] = kernel_spec.key_block

    def index(part, b, h, n, *scalars):
        lead, block = [(b, h)[axis] for axis in along], [0, 0]
        if value.shape[0] == 1:
            lead[0] = 0
        if key_axis is not None:
            block[key_axis], _ = lists.visit(part, b, h, n, *scalars)
        return (*lead, *block)

    return pl.BlockSpec((*(None,) * len(along), *sizes), index)
