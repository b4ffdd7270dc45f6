"""Block-sparse attention for TPU: one Pallas kernel forward, and one or two backward.

If dq of a key head fits into VMEM, one kernel computes dq, dk and dv. Otherwise, and with a bias,
one kernel computes dq, and another dk and dv.

The grid has one step per visited pair of blocks (`grid.py`), so time is proportional to the number
of visible blocks for every mask, also if tables differ by head or are computed on the device. Batch
and heads are axes of the grid. Sums run in a fixed order inside one core and nothing is accumulated
in memory: results are bitwise reproducible.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import key_bits
from pallas_kernels import online_softmax as online
from pallas_kernels.backends.tpu import decode as decoding
from pallas_kernels.backends.tpu import grid, kernels
from pallas_kernels.backends.tpu.grid import (
    LANES,
    Call,
    Tiling,
    calls_of,
    col_of,
    pad_lanes,
    report_kernel,
    row_of,
    run_calls,
    run_kernel,
    with_rows,
)
from pallas_kernels.backends.tpu.kernels import (
    LOG2_E,
    MAX_LEVELS,
    KernelSpec,
    bias_levels,
    hide_padding,
    level_gradient,
    level_operands,
)
from pallas_kernels.biases import Alibi, RelativeBias
from pallas_kernels.dispatch import unsupported_dtypes, unsupported_mask, user_table, visible_blocks
from pallas_kernels.quantised import is_quantised
from pallas_kernels.tables import namespace

LARGEST_HEAD = 256
STEP_BYTES = 16 * grid.MIB  # VMEM that a step may use besides a dq that stays in VMEM
F32 = jnp.float32
ROW_OPERANDS = ("q", "d_out", "q_index", "q_segments", "slopes", "lse", "di")
MATRICES = ("q", "k", "v", "d_out")
BITS = "key_bits"  # a block has those of its rows, of `key_bits.SPAN` keys
SCALARS = ("starts", "levels")  # operands that lie in scalar memory as a whole


def forward(q, k, v, operands, spec, *, platform="tpu", interpret=False):
    """Returns out [B, T, N, Hv] in q's dtype and lse float32 [B, T, N]."""
    plain = not _relative(operands) and operands.key_bits is None
    if plain and decoding.fits(q, k, v, operands, spec):
        return decoding.forward(q, k, v, operands, spec, interpret=interpret)
    plan = _plan(q, k, v, operands, spec, backward=False)
    by_head = _plan_by_head(q, k, v, operands, spec, plan, backward=False)
    q_axis = int(by_head is not None)
    tiling, calls = by_head or (plan.tiling, calls_of(plan.visits, plan.tiling, 0))
    # XLA stores heads whose size is no multiple of the lanes along sublanes (`decode`).
    axes = [int(x.shape[-1] % LANES != 0) for x in (k, v)]
    kernel_spec, x = _prepare(q, k, v, operands, spec, tiling, *axes, q_axis)
    h, hv = q.shape[-1], v.shape[-1]
    channels_first = grid.ChannelsFirst(q.dtype, tiling.group, hv, tiling.period * tiling.rows)
    run = functools.partial(
        launch,
        kernels.forward,
        kernel_spec,
        tiling,
        x,
        axis=0,
        outputs=[channels_first if q_axis else (q.dtype, hv), (F32, None)],
        scratch=[
            *((F32, LANES), (F32, LANES), (F32, hv), _scratch(kernel_spec, 0)),
            (q.dtype, h) if q_axis else None,
        ],
        interpret=interpret,
    )
    report_kernel("forward", tiling, calls, 0)
    out, lse = run_calls(calls, run)
    out = tiling.from_channels_first(out) if q_axis else tiling.from_rows(out)
    return out, tiling.from_rows(lse[:, :, 0])


def backward(q, k, v, out, lse, d_out, d_lse, operands, spec, *, platform="tpu", interpret=False):
    """Returns the cotangents of q, k, v and the bias; that of lse enters through `di`."""
    di = online.row_cotangent(out, d_out, d_lse)
    # A row without keys is masked everywhere; any finite lse keeps it finite until then.
    safe = jnp.where(jnp.isfinite(lse), lse, 0.0)
    d_out = d_out.astype(q.dtype)
    plan = _plan(q, k, v, operands, spec, backward=True)

    def prepare(tiling: Tiling, axis: int):
        kernel_spec, x = _prepare(q, k, v, operands, spec, tiling, axis, axis, axis)
        x["lse"] = tiling.to_rows(safe * LOG2_E)[:, :, None]  # the kernels compute powers of 2
        x["di"] = tiling.to_rows(di)[:, :, None]
        x["d_out"] = tiling.to_channels_first(d_out) if axis else tiling.to_rows(pad_lanes(d_out))
        return kernel_spec, x

    def fused(axis: int, tiling: Tiling, calls: list[Call]):
        vmem = whole_dq(q.dtype, q.shape[-1], tiling, calls)
        if operands.bias is not None or vmem is None:
            return None
        results = _fused(*prepare(tiling, axis), tiling, calls, interpret, vmem)
        return *_cotangents(*results, q, k, v, tiling, axis), None

    by_head = None
    if operands.bias is None:
        by_head = _plan_by_head(q, k, v, operands, spec, plan, backward=True)
    if by_head is not None and (found := fused(1, *by_head)) is not None:
        return found
    tiling, visits = plan
    calls = calls_of(visits, tiling, 1)
    if (found := fused(0, tiling, calls)) is not None:
        return found
    kernel_spec, x = prepare(tiling, 0)

    def run(kernel, axis, calls, outputs, scratch):
        report_kernel(kernel.__name__, tiling, calls, axis)
        fixed = dict(axis=axis, outputs=outputs, scratch=scratch, interpret=interpret)
        return run_calls(calls, functools.partial(launch, kernel, kernel_spec, tiling, x, **fixed))

    h, hv, sums, acc_sums = x["k"].shape[-1], x["v"].shape[-1], None, None
    if operands.bias is not None:  # one sum for each row, or for each level
        rows = tiling.rows if kernel_spec.levels is None else LANES
        sums, acc_sums = (F32, None, rows), (F32, LANES, rows)
    outputs, scratch = [(q.dtype, h), sums], [(F32, h), acc_sums, _scratch(kernel_spec, 0)]
    dq, d_bias = run(kernels.d_queries, 0, calls_of(visits, tiling, 0), outputs, scratch)
    outputs, scratch = (
        [(k.dtype, h), (v.dtype, hv)],
        [(F32, h), (F32, hv), _scratch(kernel_spec, 1)],
    )
    dk, dv = run(kernels.d_keys, 1, calls, outputs, scratch)
    if kernel_spec.levels is not None:
        d_bias = level_gradient(d_bias, operands.bias, kernel_spec.levels)
    elif d_bias is not None:
        d_bias = Alibi(jnp.sum(tiling.from_rows(d_bias[:, :, 0]), (0, 1)))
    return *_cotangents(dk, dv, dq, q, k, v, tiling, 0), d_bias


def _cotangents(dk, dv, dq, q, k, v, tiling: Tiling, axis: int):
    """Returns dq, dk and dv in the layouts of q, k and v."""
    if axis:
        dk, dv = (tiling.keys_from_channels_first(x) for x in (dk, dv))
        return tiling.from_channels_first(dq), dk, dv
    dq = tiling.from_rows(dq)[..., : q.shape[-1]]
    return dq, tiling.from_keys(dk, k.shape[-1]), tiling.from_keys(dv, v.shape[-1])


def whole_dq(dtype, size: int, tiling: Tiling, calls: list[Call]) -> int | None:
    """Returns the bytes of VMEM for dq of a key head besides a step; None if it does not fit.

    VMEM holds its float32 sums and its output.
    """
    if len(calls) > 1:  # each call would have a part of dq of a head whose keys are split
        return None
    row = grid.lanes(size) * (4 + jnp.dtype(dtype).itemsize)
    vmem = STEP_BYTES + tiling.count * tiling.rows * row
    return vmem if vmem <= 0.9 * grid.vmem() else None


def _fused(kernel_spec: KernelSpec, x, tiling: Tiling, calls, interpret: bool, vmem: int):
    """Returns dk, dv and dq, computed by one kernel that may use `vmem` bytes."""
    axis, dtype, rows = kernel_spec.q_axis, x["q"].dtype, tiling.count * tiling.rows
    sizes = h, hv = [x[name].shape[-2 if axis else -1] for name in ("k", "v")]
    outputs, dq, turned = [(dtype, h), (dtype, hv)], (rows, h), [None, None]
    if axis:
        outputs = [grid.ChannelsFirst(dtype, 1, size, x["k"].shape[-1]) for size in sizes]
        dq, turned = x["q"].shape[2:], [(dtype, h), (dtype, hv)]
    run = functools.partial(
        launch,
        kernels.d_all,
        kernel_spec,
        tiling,
        x,
        axis=1,
        outputs=outputs,
        scratch=[(F32, h), (F32, hv), (F32, h, rows), None, *turned],
        interpret=interpret,
        whole=(dtype, dq),
        vmem=vmem,
    )
    report_kernel("d_all", tiling, calls, 1)
    return run_calls(calls, run)


def _scratch(kernel_spec: KernelSpec, axis: int):
    """Returns VMEM for the scores of a step if a bias is computed tile by tile, else None."""
    if kernel_spec.levels is None:
        return None
    return (
        (F32, kernel_spec.rows, kernel_spec.key_block)
        if axis
        else (F32, kernel_spec.key_block, kernel_spec.rows)
    )


def _relative(operands) -> bool:
    return isinstance(operands.bias, RelativeBias)


def unsupported(q, k, v, operands, spec) -> str | None:
    """Returns why these kernels cannot run the inputs, or None; reads no values of arrays."""
    if is_quantised(k, v):
        reason = decoding.unsupported_codes(q, k, v, operands, spec)
    else:
        reason = unsupported_dtypes(q, k, v, "float32", "bfloat16")
    if reason is not None:
        return reason
    if max(q.shape[-1], v.shape[-1]) > LARGEST_HEAD:
        largest = max(q.shape[-1], v.shape[-1])
        return f"the head size {largest} is above {LARGEST_HEAD}: a step would not fit into VMEM"
    if (reason := unsupported_mask(operands, spec, reads_bits=True)) is not None:
        return reason
    if _relative(operands) and operands.bias.table.shape[0] > MAX_LEVELS:
        buckets = operands.bias.table.shape[0]
        return f"the bias has {buckets} buckets, the kernels hold {MAX_LEVELS}: a lane each"
    return _table_unsupported(q, k, v, operands, spec)


def _table_unsupported(q, k, v, operands, spec) -> str | None:
    table = user_table(operands, spec)
    (queries, n), (keys, heads) = q.shape[1:3], k.shape[1:3]
    if table is not None:
        width = 1 if _lists(q, k, operands, table) > heads else n // heads
        if queries > table.q_block and table.q_block * width % LANES:
            return (
                f"blocks of {table.q_block} queries times {width} heads are "
                f"{table.q_block * width} rows, no multiple of {LANES}"
            )
        if keys > table.k_block and (table.k_block % LANES or table.k_block > grid.KEYS):
            return f"blocks of {table.k_block} keys are no multiple of {LANES} up to {grid.KEYS}"
    for backward in (False, True):
        tiling = _tiling(q, k, v, operands, table, grid.step_blocks(q, v, backward))
        if max(tiling.count, tiling.key_count) >= grid.LIMIT:
            return (
                f"{tiling.count} x {tiling.key_count} blocks are more than {grid.LIMIT - 1} along "
                "an axis; larger blocks make fewer"
            )
    return None


def _lists(q, k, operands, table, by_head: bool = False) -> int:
    """Returns the number of tables along heads.

    A bias by buckets is read as scalars of one query head, so query heads are separate with it.
    They are also separate with `key_bits`, of which a query has a row.
    """
    by_head |= _relative(operands) or operands.key_bits is not None
    if by_head and q.shape[2] > k.shape[2]:
        return q.shape[2]
    return 1 if table is None else table.index.shape[1]


def _tiling(q, k, v, operands, table, step: tuple[int, int], by_head: bool = False) -> Tiling:
    """Returns the tiling for a caller's table or None; `step`: the most rows and keys of a step."""
    lists = _lists(q, k, operands, table, by_head)
    if table is not None:
        q_block, k_block = table.q_block, table.k_block
    else:
        q_block, k_block = grid.table_blocks(q, k, v, step, by_head=lists > k.shape[2])
    tiling = grid.make_tiling(q, k, lists=lists, q_block=q_block, k_block=k_block, step=step)
    return replace(tiling, reason=grid.reason_of(tiling, q, v, step, table))


def _plan_by_head(
    q, k, v, operands, spec, plan: Plan, backward: bool
) -> tuple[Tiling, list] | None:
    """Returns a tiling whose blocks of rows hold queries of one head, and its calls.

    The kernels then read matrices [H, length].

    XLA stores heads whose size is no multiple of the lanes in this layout. A copy to [length, H]
    would write twice the bytes, because of padding.

    Returns None for other sizes, and if such blocks cost more than `plan` or take several calls.
    """
    table = user_table(operands, spec)
    is_cut = table is not None and q.shape[1] > table.q_block and table.q_block % LANES
    if q.shape[-1] % LANES == 0 or v.shape[-1] % LANES == 0 or is_cut:
        return None
    by_head = plan
    if q.shape[2] > k.shape[2] and not plan.tiling.by_head:
        by_head = _plan(q, k, v, operands, spec, backward, by_head=True)
    tiling, visits = by_head
    if max(tiling.count, tiling.key_count) >= grid.LIMIT:
        return None
    if isinstance(visits.valid, np.ndarray) and _cost(by_head) > 1.1 * _cost(plan):
        return None
    calls = calls_of(visits, tiling, int(backward))
    return (tiling, calls) if len(calls) == 1 else None


class Plan(NamedTuple):
    """The tiling of a pass, and the visits of its blocks."""

    tiling: Tiling
    visits: grid.Visits


def _plan(q, k, v, operands, spec, backward: bool, by_head: bool = False) -> Plan:
    """Returns the tiling, and the visits of its blocks.

    Args:
      by_head: blocks of rows hold queries of one head also where heads have the same table.

    Smaller blocks take more steps, and compute fewer scores that the mask hides. They are chosen if
    they save a tenth of the cost, as for windows of up to half a block, and the visits are static.
    """
    rows, keys = grid.step_blocks(q, v, backward)
    usual = _plan_with(q, k, v, operands, spec, (rows, keys), by_head)
    if user_table(operands, spec) is not None or not isinstance(usual.visits.valid, np.ndarray):
        return usual
    steps = [x for x in ((rows, keys // 2), (rows // 2, keys // 2)) if min(x) >= grid.LEAST_BLOCK]
    smaller = (_plan_with(q, k, v, operands, spec, step, by_head) for step in steps)
    plan = min((usual, *smaller), key=lambda plan: _cost(plan) * (0.9 if plan is usual else 1))
    if plan is usual:
        return usual
    saved = f"{rows} x {keys} would cost {_cost(usual) / _cost(plan):.1f} times as much here"
    tiling = replace(plan.tiling, reason=f"{plan.tiling.reason}; {saved}")
    return plan._replace(tiling=tiling)


def _plan_with(q, k, v, operands, spec, step: tuple[int, int], by_head: bool) -> Plan:
    tiling = _tiling(q, k, v, operands, user_table(operands, spec), step, by_head)
    blocks = grid.table_blocks(q, k, v, step, by_head=tiling.by_head)
    table = visible_blocks(operands, spec, q.shape[1], k.shape[1], *blocks)
    heads, lists = tiling.heads, table.index.shape[1]
    if tiling.by_head and lists <= heads:  # query heads are separate and share their lists
        repeat = namespace(table.index, table.seen).repeat
        heads, table = lists, table.heads(lambda x: repeat(x, tiling.group, 1))
    return Plan(tiling, grid.list_visits(table, heads=heads, split=tiling.split))


def _cost(plan: Plan) -> float:
    """Returns the cost of all steps, in scores; inf for more blocks than a list can number."""
    tiling, visits = plan
    if max(tiling.count, tiling.key_count) >= grid.LIMIT:
        return math.inf
    return visits.valid.sum() * (tiling.rows * tiling.key_block + grid.STEP_SCORES)


def _prepare(
    q, k, v, operands, spec, tiling: Tiling, k_axis: int = 0, v_axis: int = 0, q_axis: int = 0
):
    """Returns the static part of the kernels, and the operands in their layout.

    With `k_axis` 1 a kernel reads k [B, K, H, S], the memory layout of a cache whose head size is
    no multiple of the lanes; `v_axis` and `q_axis` likewise.
    """
    before, factor = online.scales(spec.scale, q.dtype)
    kernel_spec = KernelSpec(
        mask=spec.mask,
        soft_cap=spec.soft_cap,
        factor=factor,
        scale=spec.scale,
        rows=tiling.rows,
        key_block=tiling.key_block,
        keys=tiling.keys,
        group=1 if tiling.by_head else tiling.group,
        period=tiling.period,
        levels=bias_levels(operands.bias, tiling.group) if _relative(operands) else None,
        undivided=grid.device_kind() in grid.UNDIVIDED,
        k_axis=k_axis,
        v_axis=v_axis,
        q_axis=q_axis,
    )

    def vector(x, pad):
        return None if x is None else pad(jnp.asarray(x, jnp.int32))

    def pad(x, axis):
        return x if axis else pad_lanes(x)

    def keys(x, axis):
        x = tiling.to_keys(pad(x, axis))
        return x.swapaxes(2, 3) if axis else x

    slopes = operands.bias.slopes if isinstance(operands.bias, Alibi) else None
    scaled = q * jnp.asarray(before, q.dtype)
    x = {
        "q": tiling.to_channels_first(scaled) if q_axis else tiling.to_rows(pad(scaled, k_axis)),
        "k": keys(k, k_axis),
        "v": keys(v, v_axis),
        "q_index": vector(operands.q_index, tiling.query_vector),
        "k_index": vector(operands.k_index, tiling.key_vector),
        "q_segments": vector(operands.q_segments, tiling.query_vector),
        "k_segments": vector(hide_padding(operands.k_segments), tiling.key_vector),
        "slopes": None if slopes is None else tiling.head_vector(slopes.astype(F32)),
    }
    if kernel_spec.levels is not None:
        x |= level_operands(operands.bias, kernel_spec.levels)
    if operands.key_bits is not None:
        x[BITS] = tiling.query_bits(operands.key_bits)
    return kernel_spec, x


def launch(
    kernel,
    kernel_spec: KernelSpec,
    tiling: Tiling,
    x,
    call: Call,
    *,
    axis,
    outputs,
    scratch,
    interpret,
    whole=None,
    vmem=None,
):
    """Runs one kernel call; arguments as in `grid.run_kernel`, scratch in the form of outputs."""
    resident = tiling.key_block if axis else tiling.rows
    columns = {
        name: pltpu.VMEM((resident, LANES), value.dtype)
        for name, value in x.items()
        if value is not None
        and name not in (*MATRICES, *SCALARS, BITS)
        and (name in ROW_OPERANDS) == (axis == 0)
    }

    def memory(item):
        dtype, width, rows = with_rows(item, resident)
        return pltpu.VMEM((rows, width), dtype)

    return run_kernel(
        functools.partial(kernel, kernel_spec, call),
        f"lcjax_{kernel.__name__}",
        x,
        call,
        axis=axis,
        resident=resident,
        operand=lambda name, value: _operand(name, value, tiling, call, kernel_spec),
        outputs=outputs,
        scratch=(columns, *(None if item is None else memory(item) for item in scratch)),
        interpret=interpret,
        whole=whole,
        vmem=vmem,
    )


def _operand(name: str, value, tiling: Tiling, call: Call, kernel_spec: KernelSpec):
    """Returns the BlockSpec of the block of an operand that a step reads."""
    if value is None:
        return None
    if name in SCALARS:
        return pl.BlockSpec(memory_space=pltpu.SMEM)
    if name == BITS:
        return _bits_block(value, tiling, call)
    by_row = name in ROW_OPERANDS
    size = tiling.rows if by_row else tiling.key_block
    block_of = row_of if by_row else col_of
    # Indices and segments are the same for all heads, slopes for all batch rows.
    along = {"slopes": (1,)}.get(name, (0,) if value.ndim == 3 else (0, 1))
    if name in ("q", "d_out") and kernel_spec.q_axis:
        first = call.batch[0], call.heads[0]
        return grid.channels_first_block(*value.shape[3:], size, call, 0, first)
    axis = {"k": kernel_spec.k_axis, "v": kernel_spec.v_axis}.get(name, 0)
    by_lanes = name not in MATRICES or axis == 1

    def index(b, h, s, steps):
        code = steps[call.offset(b, h, s)]
        block = block_of(code)
        if name in ("q_index", "q_segments"):
            block = jax.lax.rem(block, tiling.period)
        lead = [(b + call.batch[0], h + call.heads[0])[i] for i in along]
        if value.shape[0] == 1:
            lead[0] = 0
        return (*lead, 0, block) if by_lanes else (*lead, block, 0)

    sizes = (value.shape[-2], size) if by_lanes else (size, value.shape[-1])
    return pl.BlockSpec((*(None,) * len(along), *sizes), index)


def _bits_block(words, tiling: Tiling, call: Call):
    """Returns the BlockSpec of the words [B, padded T, W] of a step: those of its rows and keys."""

    def index(b, h, s, steps):
        code = steps[call.offset(b, h, s)]
        span = jax.lax.div(col_of(code) * tiling.key_block, jnp.int32(key_bits.SPAN))
        row = jax.lax.rem(row_of(code), tiling.period)
        return 0 if words.shape[0] == 1 else b + call.batch[0], row, span

    return pl.BlockSpec((None, tiling.rows, key_bits.LANES), index)
