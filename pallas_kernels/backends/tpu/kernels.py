"""Kernel bodies for TPU: what one grid step computes of the forward pass, of dq and of dk, dv.

A step multiplies one block of R rows (queries of one key head, see `_tpu.Rows`) by one block of
keys. Scores are [rows, keys] in the forward pass and for dq and [keys, rows] for dk, dv, so the
block that stays while others pass by is always the long side of the matrix products and no operand
is ever transposed. Vectors over the passing side (places, segments, lse) lie along lanes as they
are; those over the staying side are turned into columns once, at its first step.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.backends.online_softmax import LOWEST
from pallas_kernels.backends.tpu import levels
from pallas_kernels.backends.tpu.tables import FULL, PARTIAL, Call, Step, unpack
from pallas_kernels.masks import Mask

LANES = 128


@dataclass(frozen=True)
class Body:
    """What is static in a kernel.

    Row r of a row block stands for query `(block % period * rows + r) // group`. The queries come
    scaled already unless `factor` is not 1; `scale` is the whole scale.
    """

    mask: Mask
    soft_cap: float | None
    factor: float
    scale: float
    rows: int
    key_block: int
    keys: int
    group: int
    period: int
    levels: levels.Levels | None = None

    @property
    def ragged(self) -> bool:
        return self.keys % self.key_block != 0


def dot(a, b, axis: int):
    """a [m, n] times b, over axis `axis` of b, accumulated in float32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((1,), (axis,)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def read(call: Call, steps) -> Step:
    b, h, s = (pl.program_id(axis) for axis in range(3))
    return unpack(steps[call.place(b, h, s)])


def _fill(columns, x):
    """Vectors [1, n] as columns, repeated over the lanes."""
    for name, ref in columns.items():
        ref[...] = jnp.broadcast_to(x[name][...], (LANES, ref.shape[0])).T


class Block:
    """The vectors of one step, each [rows, 1] or [1, keys] ([1, rows], [keys, 1] if `turned`)."""

    def __init__(self, body: Body, step: Step, x, columns, turned: bool):
        self.body, self.step, self.x, self.columns, self.turned = body, step, x, columns, turned

    def vector(self, name):
        if name in self.columns:
            return self.columns[name][:, :1]
        return self.x[name][...]

    def _count(self, size: int, axis: int):
        shape = (size, 1) if axis == 0 else (1, size)
        return lax.broadcasted_iota(jnp.int32, shape, axis)

    @property
    def key_place(self):
        size = self.body.key_block
        return self.step.col * size + self._count(size, 0 if self.turned else 1)

    @property
    def k_index(self):
        return self.key_place if self.x["k_index"] is None else self.vector("k_index")

    @property
    def q_index(self):
        if self.x["q_index"] is not None:
            return self.vector("q_index")
        body = self.body
        place = lax.rem(self.step.row, body.period) * body.rows
        place = place + self._count(body.rows, 1 if self.turned else 0)
        return place if body.group == 1 else lax.div(place, jnp.int32(body.group))

    def seen(self):
        seen = self.body.mask.element(self.q_index, self.k_index)
        if self.x["q_segments"] is not None:
            q, k = self.vector("q_segments"), self.vector("k_segments")
            seen = seen & (q == k) & (k != 0)
        return seen & (self.key_place < self.body.keys) if self.body.ragged else seen

    def distance(self):
        return jnp.abs(self.q_index - self.k_index).astype(jnp.float32)

    def products(self):
        pair = (self.x["k"], self.x["q"]) if self.turned else (self.x["q"], self.x["k"])
        return dot(pair[0][...], pair[1][...], 1)

    def logits(self, part=None):
        """(logits, cap's tanh or None), [rows, keys] or turned; part: see `_tpu_levels.visit`."""
        logits, cap = self.products(), self.body.soft_cap
        if self.body.factor != 1.0:
            logits = logits * self.body.factor
        bent = None
        if cap is not None:
            bent = jnp.tanh(logits * (1 / cap))
            logits = cap * bent
        if self.x["slopes"] is not None:
            logits = logits - self.vector("slopes") * self.distance()
        return (logits if part is None else logits + part.value()), bent

    def probabilities(self, masked: bool, part):
        """(p, cap's tanh) from the saved lse."""
        logits, bent = self.logits(part)
        p = jnp.exp(logits - self.vector("lse"))
        return (jnp.where(self.seen(), p, 0.0) if masked else p), bent

    def gradients(self, masked: bool, part):
        """(p, cotangent of the logits, cotangent of the products before `factor`)."""
        pair = ("v", "d_out") if self.turned else ("d_out", "v")
        p, bent = self.probabilities(masked, part)
        d_logits = p * (dot(self.x[pair[0]][...], self.x[pair[1]][...], 1) - self.vector("di"))
        d_products = d_logits if bent is None else d_logits * (1 - bent * bent)
        return p, d_logits, d_products


def visit_as(kind, run):
    """Runs `run(masked)` as the kind of a step asks."""
    pl.when(kind == FULL)(lambda: run(False))
    pl.when(kind == PARTIAL)(lambda: run(True))


def start_softmax(top, total, acc):
    top[...] = jnp.full_like(top, LOWEST)
    total[...] = jnp.zeros_like(total)
    acc[...] = jnp.zeros_like(acc)


def add_to_softmax(logits, value, axis: int, top, total, acc):
    """Adds keys to a running softmax; their values' axis `axis` counts them."""
    old = top[...]
    new = jnp.maximum(old, jnp.max(logits, 1, keepdims=True))
    p = jnp.exp(logits - new[:, :1])
    keep = jnp.exp(old - new)
    top[...] = new
    total[...] = total[...] * keep + jnp.sum(p, 1, keepdims=True)
    acc[...] = acc[...] * keep[:, :1] + dot(p.astype(value.dtype), value, axis)


def end_softmax(top, total, acc):
    """The output [rows, size] in float32 and the lse [rows, lanes], the same in every lane."""
    some = total[...] > 0
    safe = jnp.where(some, total[...], 1.0)
    return acc[...] / safe[:, :1], jnp.where(some, top[...] + jnp.log(safe), -jnp.inf)


def forward(body: Body, call: Call, steps, x, out, lse, columns, top, total, acc, scratch):
    """Online softmax over the key blocks of a row block (FlashAttention, Dao et al. 2022)."""
    step, key_head = read(call, steps), pl.program_id(1) + call.heads[0]
    block = Block(body, step, x, columns, turned=False)

    @pl.when(step.first)
    def _():
        _fill(columns, x)
        start_softmax(top, total, acc)

    def visit(masked: bool, part):
        logits, _ = block.logits(part)
        if masked:
            logits = jnp.where(block.seen(), logits, -jnp.inf)
        add_to_softmax(logits, x["v"][...], 0, top, total, acc)

    levels.visit(block, key_head, scratch, visit)

    @pl.when(step.last)
    def _():
        wide, sums = end_softmax(top, total, acc)
        out[...] = wide.astype(out.dtype)
        lse[...] = sums.T[:1]


def d_queries(body: Body, call: Call, steps, x, dq, d_bias, columns, acc, acc_bias, scratch):
    """Cotangent of the queries of a row block, and of its rows' slopes or its head's levels."""
    step, key_head = read(call, steps), pl.program_id(1) + call.heads[0]
    block = Block(body, step, x, columns, turned=False)

    @pl.when(step.first)
    def _():
        _fill(columns, x)
        acc[...] = jnp.zeros_like(acc)
        if d_bias is not None:
            acc_bias[...] = jnp.zeros_like(acc_bias)

    def visit(masked: bool, part):
        key = x["k"][...]
        _, d_logits, d_products = block.gradients(masked, part)
        acc[...] += dot(d_products.astype(key.dtype), key, 0)
        if part is not None:
            part.collect(d_logits, acc_bias)
        elif d_bias is not None:
            acc_bias[...] -= jnp.sum(d_logits * block.distance(), 1, keepdims=True)

    levels.visit(block, key_head, scratch, visit)

    @pl.when(step.last)
    def _():
        dq[...] = (acc[...] * body.scale).astype(dq.dtype)
        if d_bias is not None:
            sums = acc_bias[...]
            if body.levels is not None:
                sums = jnp.broadcast_to(jnp.sum(sums, 1, keepdims=True), sums.shape)
            d_bias[...] = sums.T[:1]


def d_keys(body: Body, call: Call, steps, x, dk, dv, columns, acc_k, acc_v, scratch):
    """Cotangents of a block of keys and of values: sums over all rows, so over the group too."""
    step, key_head = read(call, steps), pl.program_id(1) + call.heads[0]
    block = Block(body, step, x, columns, turned=True)

    @pl.when(step.first)
    def _():
        _fill(columns, x)
        acc_k[...] = jnp.zeros_like(acc_k)
        acc_v[...] = jnp.zeros_like(acc_v)

    def visit(masked: bool, part):
        query, d_out = x["q"][...], x["d_out"][...]
        p, _, d_products = block.gradients(masked, part)
        acc_v[...] += dot(p.astype(d_out.dtype), d_out, 0)
        acc_k[...] += dot(d_products.astype(query.dtype), query, 0)

    levels.visit(block, key_head, scratch, visit)

    @pl.when(step.last)
    def _():
        dk[...] = (acc_k[...] * body.factor).astype(dk.dtype)
        dv[...] = acc_v[...].astype(dv.dtype)
