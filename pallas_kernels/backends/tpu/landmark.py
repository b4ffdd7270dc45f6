"""Grouped softmax over older blocks for TPU: forward, dq, and dk with dv, each one Pallas kernel.

The grid, its lists of visits and the layout of rows are those of block-sparse attention beside it
(`_tpu.py`). Its keys are whole landmark blocks wherever their documents begin
(`landmark_attention` gathers them), so every step holds whole blocks: the softmax inside a block is
made and used within a step, in the backward pass a second time, and only the outer one is carried
from step to step.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.backends import online_softmax as online
from pallas_kernels.backends.tpu import landmark_kernels as kernels
from pallas_kernels.backends.tpu import tables
from pallas_kernels.backends.tpu.attention import LARGEST_HEAD
from pallas_kernels.backends.tpu.landmark_layout import LARGEST_BLOCK, LandmarkBlocks, layout
from pallas_kernels.backends.tpu.launch import every_call, start
from pallas_kernels.backends.tpu.layout import Layout, wide
from pallas_kernels.backends.tpu.tables import Call, Visits, col_of, row_of
from pallas_kernels.dispatch import LandmarkOperands
from pallas_kernels.landmark import older_table

F32 = jnp.float32
NEVER = np.iinfo(np.int32).max  # number of a block that nobody sees
ROW_MATRICES, ROW_VECTORS = ("q", "d_out"), ("q_numbers", "q_segments", "lse", "di")


def forward(q, k, v, operands, spec, *, platform="tpu", interpret=False):
    """out [B, T, N, Hv] in q's dtype and lse float32 [B, T, N]."""
    cut, blocks, found = _plan(q, k, v, operands, spec, backward=False)
    body, x = _prepare(q, k, operands, spec, cut, blocks)
    x["k"], x["v_turned"] = _keys(k, cut, blocks), _keys(v, cut, blocks).swapaxes(2, 3)
    size = x["v_turned"].shape[2]
    run = functools.partial(
        _launch,
        kernels.forward,
        body,
        cut,
        x,
        axis=0,
        outputs=[(q.dtype, size), (F32, None)],
        scratch=[(1, cut.rows), (1, cut.rows), (size, cut.rows)],
        interpret=interpret,
    )
    out, lse = every_call(found, cut, 0, run)
    return cut.from_rows(out)[..., : v.shape[-1]], cut.from_rows(lse[:, :, 0])


def backward(q, k, v, out, lse, d_out, d_lse, operands, spec, *, platform="tpu", interpret=False):
    """Cotangents of q, k and v; that of lse enters through `di`."""
    cut, blocks, found = _plan(q, k, v, operands, spec, backward=True)
    body, x = _prepare(q, k, operands, spec, cut, blocks)
    di = online.row_cotangent(out, d_out, d_lse)
    x["lse"] = cut.to_rows(jnp.where(jnp.isfinite(lse), lse, 0.0))[:, :, None]
    x["di"] = cut.to_rows(di)[:, :, None]
    x["d_out"] = cut.to_rows(wide(d_out.astype(q.dtype)))
    x["k"], x["v"] = _keys(k, cut, blocks), _keys(v, cut, blocks)
    h, hv = x["k"].shape[-1], x["v"].shape[-1]

    def run(kernel, axis, x, outputs, scratch):
        fixed = dict(axis=axis, outputs=outputs, scratch=scratch, interpret=interpret)
        one = functools.partial(_launch, kernel, body, cut, x, **fixed)
        return every_call(found, cut, axis, one)

    turned = x | {"k_turned": x["k"].swapaxes(2, 3)}
    (dq,) = run(kernels.d_queries, 0, turned, [(q.dtype, h)], [(h, cut.rows)])
    sizes = [(cut.key_block, h), (cut.key_block, hv)]
    dk, dv = run(kernels.d_keys, 1, x, [(k.dtype, h), (v.dtype, hv)], sizes)
    dk = blocks.narrow(cut.from_keys(dk, k.shape[-1]))
    dv = blocks.narrow(cut.from_keys(dv, v.shape[-1]))
    return cut.from_rows(dq)[..., : q.shape[-1]], dk, dv


def unsupported(q, k, v, operands, spec) -> str | None:
    """Why these kernels cannot run the inputs, or None; reads shapes and dtypes."""
    if (reason := online.mixed_dtypes(q, k, v)) is not None:
        return reason
    largest = max(q.shape[-1], v.shape[-1])
    if largest > LARGEST_HEAD:
        return f"the head size {largest} is above {LARGEST_HEAD}: a step would not fit into VMEM"
    if spec.block > LARGEST_BLOCK:
        return (
            f"blocks of {spec.block} tokens are above {LARGEST_BLOCK}: a step holds whole blocks, "
            "whose scores would not fit into VMEM"
        )
    for back in (False, True):
        cut, _ = layout(q, k, v, spec.block, back)
        if max(cut.count, cut.key_count) >= tables.LIMIT:
            return (
                f"{cut.count} x {cut.key_count} blocks of a step are more than "
                f"{tables.LIMIT - 1} along an axis"
            )
    return None


def _plan(q, k, v, operands, spec, backward: bool) -> tuple[Layout, LandmarkBlocks, Visits]:
    """The layout, and the visits of blocks that it is for."""
    cut, blocks = layout(q, k, v, spec.block, backward)
    sizes = dict(q_block=blocks.q_block, k_block=blocks.step)
    table = older_table(operands, spec.block, cut.queries, blocks.count, **sizes)
    return cut, blocks, tables.visits(table, heads=cut.heads, split=cut.split)


def _keys(x, cut: Layout, blocks: LandmarkBlocks):
    return cut.to_keys(wide(blocks.spread(x)))


def _prepare(q, k, operands: LandmarkOperands, spec, cut: Layout, blocks: LandmarkBlocks):
    """The kernels' static part, and the operands that all kernels read in their layout."""
    before, factor = online.scales(spec.scale, q.dtype)
    body = kernels.Body(
        block=spec.block,
        height=blocks.height,
        blocks=blocks.step,
        count=blocks.count,
        rows=cut.rows,
        group=cut.group,
        factor=factor,
        scale=spec.scale,
    )

    def vector(x):
        return None if x is None else cut.query_vector(jnp.asarray(x, jnp.int32))

    return body, {
        "q": cut.to_rows(wide(q * jnp.asarray(before, q.dtype))),
        "q_numbers": vector(operands.q_numbers),
        "q_segments": vector(operands.q_segments),
        "k_numbers": blocks.vector(operands.k_numbers, cut.key_count, NEVER),
        "k_segments": blocks.vector(operands.k_segments, cut.key_count, 0),
    }


def _launch(kernel, body, cut: Layout, x, call: Call, *, axis, outputs, scratch, interpret):
    """One kernel call, as `_tpu_launch.start` says; scratch: shapes, float32."""
    return start(
        functools.partial(kernel, body, call),
        f"lcjax_landmark_{kernel.__name__}",
        x,
        call,
        axis=axis,
        staying=cut.key_block if axis else cut.rows,
        operand=lambda name, value: _operand(name, value, cut, call),
        outputs=outputs,
        scratch=[pltpu.VMEM(sizes, F32) for sizes in scratch],
        interpret=interpret,
    )


def _operand(name: str, value, cut: Layout, call: Call):
    """The block of an operand that a step reads."""
    if value is None:
        return None
    by_row = name in ROW_MATRICES + ROW_VECTORS

    def index(b, h, s, steps):
        code = steps[call.place(b, h, s)]
        block = (row_of if by_row else col_of)(code)
        lead = (b + call.batch[0] if value.shape[0] > 1 else 0,)
        if name in ("k_numbers", "k_segments"):
            return (*lead, block, 0, 0)
        if value.ndim == 4:
            lead = (*lead, h + call.heads[0])
        along_lanes = name in ROW_VECTORS or name.endswith("turned")
        return (*lead, 0, block) if along_lanes else (*lead, block, 0)

    size = cut.rows if by_row else cut.key_block
    if name in ("k_numbers", "k_segments"):
        sizes = value.shape[2:]
    elif name in ROW_VECTORS:
        sizes = (1, size)
    else:
        sizes = (value.shape[2], size) if name.endswith("turned") else (size, value.shape[-1])
    return pl.BlockSpec((*(None,) * (value.ndim - 2), *sizes), index)
