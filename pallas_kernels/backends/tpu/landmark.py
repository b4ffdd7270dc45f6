"""Grouped softmax over older landmark blocks for TPU: one kernel forward, one or two backward.

If dq of a key head fits into VMEM, one kernel computes dq, dk and dv; otherwise one kernel computes
dq, and another dk and dv.

The grid, its lists of visits and the tiling of rows are those of block-sparse attention
(`grid.py`). The keys are whole landmark blocks, wherever their documents begin
(`landmark_attention` gathers them), so every step holds whole blocks. The softmax inside a block is
computed and used within a step (and again in the backward pass); only the outer softmax is carried
from step to step.

A step multiplies some whole landmark blocks by one block of R rows. Scores are always
[blocks, height, rows]: the tokens of a block lie along sublanes and are padded to `height`, so that
the softmax inside it reduces whole registers. A number per query is one row of lanes, [1, R]. Sums
over keys, in the forward pass and for dq, are accumulated as [size, rows] from transposed keys
[size, keys]: no step transposes anything.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import online_softmax as online
from pallas_kernels.backends.tpu import grid
from pallas_kernels.backends.tpu.attention import LARGEST_HEAD, whole_dq
from pallas_kernels.backends.tpu.grid import (
    LANES,
    NOTHING,
    Call,
    Step,
    Tiling,
    Visits,
    calls_of,
    col_of,
    pad_lanes,
    report_kernel,
    row_of,
    run_calls,
    run_kernel,
)
from pallas_kernels.backends.tpu.kernels import dot, read, with_d_queries
from pallas_kernels.dispatch import Operands, unsupported_dtypes, visible_blocks
from pallas_kernels.online_softmax import LOWEST

F32 = jnp.float32
NEVER = np.iinfo(np.int32).max  # block number of padding, which no query sees
ROW_MATRICES, ROW_VECTORS = ("q", "d_out"), ("q_index", "q_segments", "lse", "di")
SUBLANES = 8
LARGEST_BLOCK = 1024  # keys of a step


def forward(q, k, v, operands, spec, *, platform="tpu", interpret=False):
    """Returns out [B, T, N, Hv] in q's dtype and lse float32 [B, T, N]."""
    tiling, blocks, visits = _plan(q, k, v, operands, spec, backward=False)
    kernel_spec, x = _prepare(q, k, operands, spec, tiling, blocks)
    x["k"], x["v_transposed"] = _keys(k, tiling, blocks), _keys(v, tiling, blocks).swapaxes(2, 3)
    size = x["v_transposed"].shape[2]
    run = functools.partial(
        _launch,
        landmark_forward,
        kernel_spec,
        tiling,
        x,
        axis=0,
        outputs=[(q.dtype, size), (F32, None)],
        scratch=[(1, tiling.rows), (1, tiling.rows), (size, tiling.rows)],
        interpret=interpret,
    )
    calls = calls_of(visits, tiling, 0)
    report_kernel("forward", tiling, calls, 0, tests_all=True)
    out, lse = run_calls(calls, run)
    return tiling.from_rows(out)[..., : v.shape[-1]], tiling.from_rows(lse[:, :, 0])


def backward(q, k, v, out, lse, d_out, d_lse, operands, spec, *, platform="tpu", interpret=False):
    """Returns the cotangents of q, k and v; that of lse enters through `di`."""
    tiling, blocks, visits = _plan(q, k, v, operands, spec, backward=True)
    kernel_spec, x = _prepare(q, k, operands, spec, tiling, blocks)
    di = online.row_cotangent(out, d_out, d_lse)
    x["lse"] = tiling.to_rows(jnp.where(jnp.isfinite(lse), lse, 0.0))[:, :, None]
    x["di"] = tiling.to_rows(di)[:, :, None]
    x["d_out"] = tiling.to_rows(pad_lanes(d_out.astype(q.dtype)))
    x["k"], x["v"] = _keys(k, tiling, blocks), _keys(v, tiling, blocks)
    h, hv = x["k"].shape[-1], x["v"].shape[-1]

    def run(kernel, axis, calls, x, outputs, scratch, **more):
        name = kernel.__name__.removeprefix("landmark_")
        report_kernel(name, tiling, calls, axis, tests_all=True)
        fixed = dict(axis=axis, outputs=outputs, scratch=scratch, interpret=interpret, **more)
        return run_calls(calls, functools.partial(_launch, kernel, kernel_spec, tiling, x, **fixed))

    calls, outputs = calls_of(visits, tiling, 1), [(k.dtype, h), (v.dtype, hv)]
    scratch = [(tiling.key_block, h), (tiling.key_block, hv)]
    if (vmem := whole_dq(q.dtype, h, tiling, calls)) is not None:
        whole = tiling.count * tiling.rows, h
        options = dict(whole=(q.dtype, whole), vmem=vmem)
        dk, dv, dq = run(landmark_d_all, 1, calls, x, outputs, [*scratch, whole], **options)
    else:
        transposed = x | {"k_transposed": x["k"].swapaxes(2, 3)}
        (dq,) = run(
            landmark_d_queries, 0, calls_of(visits, tiling, 0), transposed,
            [(q.dtype, h)], [(h, tiling.rows)],
        )  # fmt: skip
        dk, dv = run(landmark_d_keys, 1, calls, x, outputs, scratch)
    dk = blocks.unpad(tiling.from_keys(dk, k.shape[-1]))
    dv = blocks.unpad(tiling.from_keys(dv, v.shape[-1]))
    return tiling.from_rows(dq)[..., : q.shape[-1]], dk, dv, None


def unsupported(q, k, v, operands, spec) -> str | None:
    """Returns why these kernels cannot run the inputs, or None; reads no values of arrays."""
    if (reason := unsupported_dtypes(q, k, v, "float32", "bfloat16")) is not None:
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
        tiling, _ = make_tiling(q, k, v, spec.block, back)
        if max(tiling.count, tiling.key_count) >= grid.LIMIT:
            return (
                f"{tiling.count} x {tiling.key_count} blocks of a step are more than "
                f"{grid.LIMIT - 1} along an axis"
            )
    return None


def _plan(q, k, v, operands, spec, backward: bool) -> tuple[Tiling, LandmarkBlocks, Visits]:
    """Returns the tiling, the layout of landmark blocks in it, and the visits of its blocks."""
    tiling, blocks = make_tiling(q, k, v, spec.block, backward)
    sizes = blocks.q_block, blocks.step
    table = visible_blocks(operands, spec, tiling.queries, blocks.count, *sizes)
    return tiling, blocks, grid.list_visits(table, heads=tiling.heads, split=tiling.split)


def _keys(x, tiling: Tiling, blocks: LandmarkBlocks):
    return tiling.to_keys(pad_lanes(blocks.pad(x)))


def _prepare(q, k, operands: Operands, spec, tiling: Tiling, blocks: LandmarkBlocks):
    """Returns the static part of the kernels, and the operands that all kernels read."""
    before, factor = online.scales(spec.scale, q.dtype)
    kernel_spec = LandmarkSpec(
        block=spec.block,
        height=blocks.height,
        blocks=blocks.step,
        count=blocks.count,
        rows=tiling.rows,
        group=tiling.group,
        factor=factor,
        scale=spec.scale,
    )

    def vector(x):
        return None if x is None else tiling.query_vector(jnp.asarray(x, jnp.int32))

    return kernel_spec, {
        "q": tiling.to_rows(pad_lanes(q * jnp.asarray(before, q.dtype))),
        "q_index": vector(operands.q_index),
        "q_segments": vector(operands.q_segments),
        "k_index": blocks.vector(operands.k_index, tiling.key_count, NEVER),
        "k_segments": blocks.vector(operands.k_segments, tiling.key_count, 0),
    }


def _launch(kernel, kernel_spec, tiling: Tiling, x, call: Call, *, axis, scratch, **options):
    """Runs one kernel call; arguments as in `grid.run_kernel`, `scratch` as float32 shapes."""
    return run_kernel(
        functools.partial(kernel, kernel_spec, call),
        f"lcjax_{kernel.__name__}",
        x,
        call,
        axis=axis,
        resident=tiling.key_block if axis else tiling.rows,
        operand=lambda name, value: _operand(name, value, tiling, call),
        scratch=[pltpu.VMEM(sizes, F32) for sizes in scratch],
        **options,
    )


def _operand(name: str, value, tiling: Tiling, call: Call):
    """Returns the BlockSpec of the block of an operand that a step reads."""
    if value is None:
        return None
    by_row = name in ROW_MATRICES + ROW_VECTORS

    def index(b, h, s, steps):
        code = steps[call.offset(b, h, s)]
        block = (row_of if by_row else col_of)(code)
        lead = (b + call.batch[0] if value.shape[0] > 1 else 0,)
        if name in ("k_index", "k_segments"):
            return (*lead, block, 0, 0)
        if value.ndim == 4:
            lead = (*lead, h + call.heads[0])
        along_lanes = name in ROW_VECTORS or name.endswith("transposed")
        return (*lead, 0, block) if along_lanes else (*lead, block, 0)

    size = tiling.rows if by_row else tiling.key_block
    if name in ("k_index", "k_segments"):
        sizes = value.shape[2:]
    elif name in ROW_VECTORS:
        sizes = (1, size)
    else:
        sizes = (value.shape[2], size) if name.endswith("transposed") else (size, value.shape[-1])
    return pl.BlockSpec((*(None,) * (value.ndim - 2), *sizes), index)


@dataclass(frozen=True)
class LandmarkBlocks:
    """The layout of landmark blocks in a step's keys: `step` blocks of `height` keys each."""

    block: int
    height: int
    step: int
    count: int
    q_block: int  # queries of a block of the table

    def pad(self, x):
        """[B, count * block, K, H] -> [B, count * height, K, H]."""
        if self.block == self.height:
            return x
        x = x.reshape(x.shape[0], self.count, self.block, *x.shape[2:])
        x = jnp.pad(x, [(0, 0), (0, 0), (0, self.height - self.block), (0, 0), (0, 0)])
        return x.reshape(x.shape[0], -1, *x.shape[3:])

    def unpad(self, x):
        """Inverts `pad`; x may have further padding at its end."""
        x = x[:, : self.count * self.height]
        x = x.reshape(x.shape[0], self.count, self.height, *x.shape[2:])[:, :, : self.block]
        return x.reshape(x.shape[0], -1, *x.shape[3:])

    def vector(self, x, steps: int, fill: int):
        """[1 or B, count] -> columns [1 or B, steps, blocks of a step, 1]."""
        if x is None:
            return None
        padding = steps * self.step - self.count
        x = jnp.pad(jnp.asarray(x, jnp.int32), [(0, 0), (0, padding)], constant_values=fill)
        return x.reshape(x.shape[0], steps, self.step, 1)


def height_of(block: int) -> int:
    """Returns the padded keys of a block: whole sublanes, such that a few blocks fill lanes."""
    least = -(-block // SUBLANES) * SUBLANES
    heights = range(least, LARGEST_BLOCK + 1, SUBLANES)
    return next(height for height in heights if math.lcm(height, LANES) <= LARGEST_BLOCK)


def make_tiling(q, k, v, block: int, backward: bool) -> tuple[Tiling, LandmarkBlocks]:
    """Returns the tiling of rows and padded keys, and the layout of landmark blocks in it."""
    height, count = height_of(block), k.shape[1] // block
    unit = math.lcm(height, LANES)
    keys = -(-count * height // unit) * unit
    step = grid.step_blocks(q, v, backward)
    k_block = min(max(step[1] // unit, 1) * unit, keys)
    padded = jax.ShapeDtypeStruct((k.shape[0], keys, *k.shape[2:]), k.dtype)
    q_block, _ = grid.table_blocks(q, padded, v, step)
    blocks = LandmarkBlocks(block, height, k_block // height, count, q_block)
    tiling = grid.make_tiling(q, padded, lists=1, q_block=q_block, k_block=k_block, step=step)
    reason = f"{grid.reason_of(tiling, q, v, step, None)}; steps hold whole blocks of {height} keys"
    return replace(tiling, reason=reason), blocks


@dataclass(frozen=True)
class LandmarkSpec:
    """The static part of a kernel.

    Row r of a row block is query `(block * rows + r) // group`. `scale` is the scale of the logits;
    `factor` is the part of it by which the queries are not multiplied yet.
    """

    block: int  # tokens of a landmark block, the landmark included
    height: int  # keys of a padded landmark block, a multiple of the sublanes
    blocks: int  # landmark blocks of a step
    count: int  # number of landmark blocks
    rows: int
    group: int
    factor: float
    scale: float

    @property
    def ragged(self) -> bool:
        return self.count % self.blocks != 0


class _StepScores:
    """The scores of one step, and which of them are visible."""

    def __init__(self, spec: LandmarkSpec, step: Step, x):
        self.spec, self.step, self.x = spec, step, x

    @property
    def slot(self):
        return lax.broadcasted_iota(jnp.int32, (1, self.spec.height, 1), 1)

    def q_number(self):
        """Returns the number of the block of each query, [1, rows]."""
        if self.x["q_index"] is not None:
            return self.x["q_index"][...]
        spec = self.spec
        row = self.step.row * spec.rows + lax.broadcasted_iota(jnp.int32, (1, spec.rows), 1)
        return lax.div(row, jnp.int32(spec.group * spec.block))

    def visible(self):
        """Returns which blocks each query sees, bool [blocks, rows]."""
        spec, x = self.spec, self.x
        number = lax.broadcasted_iota(jnp.int32, (spec.blocks, 1), 0) + self.step.col * spec.blocks
        seen = (number if x["k_index"] is None else x["k_index"][...]) < self.q_number()
        if x["k_segments"] is not None:
            segments = x["k_segments"][...]
            seen = seen & (x["q_segments"][...] == segments) & (segments != 0)
        return seen & (number < spec.count) if spec.ragged else seen

    def products(self, keys: str, rows: str):
        """Returns the products of keys and rows as [blocks, height, rows]."""
        spec = self.spec
        x = dot(self.x[keys][...], self.x[rows][...], 1)
        return x.reshape(spec.blocks, spec.height, spec.rows)

    def scores(self):
        """Returns exp(ordinary logits - maximum), its sums, and the logits of landmarks.

        The exponentials [blocks, height, rows] are 0 for landmarks and for padding. The others are
        [blocks, rows].
        """
        spec = self.spec
        logits = self.products("k", "q")
        if spec.factor != 1.0:
            logits = logits * spec.factor
        start = (spec.block - 1) // SUBLANES * SUBLANES  # landmarks are in these sublanes only
        near = slice(start, start + SUBLANES)
        marks = jnp.where(self.slot[:, near] == spec.block - 1, logits[:, near], 0.0)
        logits = jnp.where(self.slot < spec.block - 1, logits, -jnp.inf)
        p = jnp.exp(logits - jnp.max(logits, 1, keepdims=True))
        return p, jnp.sum(p, 1), jnp.sum(marks, 1)

    def flat(self, x, like):
        """Returns x [blocks, height, rows] as a matrix in the dtype of `like`."""
        return x.reshape(-1, self.spec.rows).astype(like.dtype)

    def gradients(self):
        """Returns the weights and the cotangent of the logits, both [blocks, height, rows].

        Let w be the weight of a block, p the probabilities inside it, g_j = v_j . d_out and
        g = sum p_j g_j. Then d landmark = w (g - di), d logit_j = w p_j (g_j - g).
        """
        p, total, marks = self.scores()
        # A row without keys is masked everywhere; any finite lse keeps it finite until then.
        weight = jnp.where(self.visible(), jnp.exp(marks - self.x["lse"][...]), 0.0)
        g = self.products("v", "d_out")
        mean = jnp.sum(p * g, 1) / total
        d_mark = weight * (mean - self.x["di"][...])
        p = p * (weight / total)[:, None]
        landmark = self.slot == self.spec.block - 1
        return p, jnp.where(landmark, d_mark[:, None], p * (g - mean[:, None]))


def landmark_forward(spec: LandmarkSpec, call: Call, steps, x, out, lse, top, total, acc):
    """Computes an online softmax over landmarks, and the softmax inside the block of each."""
    step = read(call, steps)

    @pl.when(step.first)
    def _():
        top[...] = jnp.full_like(top, LOWEST)
        total[...] = jnp.zeros_like(total)
        acc[...] = jnp.zeros_like(acc)

    @pl.when(step.kind != NOTHING)
    def _():
        scores = _StepScores(spec, step, x)
        p, inside, marks = scores.scores()
        marks = jnp.where(scores.visible(), marks, -jnp.inf)
        old = top[...]
        new = jnp.maximum(old, jnp.max(marks, 0, keepdims=True))
        weight, keep = jnp.exp(marks - new), jnp.exp(old - new)
        top[...] = new
        total[...] = total[...] * keep + jnp.sum(weight, 0, keepdims=True)
        p = p * (weight / inside)[:, None]
        value = x["v_transposed"][...]
        acc[...] = acc[...] * keep + dot(value, scores.flat(p, value), 0)

    @pl.when(step.last)
    def _():
        has_keys = total[...] > 0
        safe = jnp.where(has_keys, total[...], 1.0)
        out[...] = (acc[...] / safe).T.astype(out.dtype)
        lse[...] = jnp.where(has_keys, top[...] + jnp.log(safe), -jnp.inf)


def landmark_d_queries(spec: LandmarkSpec, call: Call, steps, x, dq, acc):
    """Computes dq of a row block."""
    step = read(call, steps)

    @pl.when(step.first)
    def _():
        acc[...] = jnp.zeros_like(acc)

    @pl.when(step.kind != NOTHING)
    def _():
        scores = _StepScores(spec, step, x)
        key = x["k_transposed"][...]
        _, d_logits = scores.gradients()
        acc[...] += dot(key, scores.flat(d_logits, key), 0)

    @pl.when(step.last)
    def _():
        dq[...] = (acc[...] * spec.scale).T.astype(dq.dtype)


def landmark_d_keys(spec: LandmarkSpec, call: Call, steps, x, dk, dv, acc_k, acc_v, add_to_dq=None):
    """Computes dk and dv of a step's blocks: sums over all rows, and so over the group.

    `add_to_dq` is as in `with_d_queries`.
    """
    step = read(call, steps)

    @pl.when(step.first)
    def _():
        acc_k[...] = jnp.zeros_like(acc_k)
        acc_v[...] = jnp.zeros_like(acc_v)

    @pl.when(step.kind != NOTHING)
    def _():
        scores = _StepScores(spec, step, x)
        weights, d_logits = scores.gradients()
        query, d_out = x["q"][...], x["d_out"][...]
        d_products = scores.flat(d_logits, query)
        acc_k[...] += dot(d_products, query, 0)
        acc_v[...] += dot(scores.flat(weights, d_out), d_out, 0)
        if add_to_dq is not None:
            add_to_dq(step, d_products)

    @pl.when(step.last)
    def _():
        dk[...] = (acc_k[...] * spec.factor).astype(dk.dtype)
        dv[...] = acc_v[...].astype(dv.dtype)


def landmark_d_all(spec: LandmarkSpec, call: Call, steps, x, dk, dv, dq, acc_k, acc_v, acc_q):
    """Computes `landmark_d_keys`, and dq of all queries of a key head.

    Scores and the softmax inside a block are computed once for both.
    """
    d_keys = functools.partial(landmark_d_keys, spec, call, steps, x, dk, dv, acc_k, acc_v)
    with_d_queries(d_keys, spec, x["k"], dq, acc_q)
