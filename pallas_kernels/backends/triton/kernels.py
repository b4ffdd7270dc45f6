"""Kernel bodies for GPUs in Pallas-Triton: the forward pass, dq, and dk with dv.

A program owns one block of rows (forward, dq) or of keys (dk, dv) of one head and walks the list of
blocks that it meets: first those that need no test of elements, then the others. A listed block may
be several steps. Logits are held in base 2, so that an exponential is one instruction, and are
[keys, rows] where keys stay, so that what is summed over never has to be turned in registers.
"""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.backends import online_softmax as online
from pallas_kernels.backends.triton.layout import Body

LOG2_E = math.log2(math.e)
F32 = jnp.float32


def dot(body: Body, a, b, axis: int, of: int = 1):
    """a times b, over axis `of` of a and `axis` of b, in float32."""
    precision = None
    if a.dtype == F32:  # on tensor cores as three products of parts, which lose next to nothing
        exact = lax.Precision.HIGHEST
        precision = exact if body.interpret else lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    dims = (((of,), (axis,)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=F32)


def count(start, size: int):
    return start + lax.broadcasted_iota(jnp.int32, (size,), 0)


def _inside(start, size: int, end, width: int, wide: int):
    """bool [size, wide] of what is there of a matrix, or None: all of it."""
    rows = None if end is None else (count(start, size) < end)[:, None]
    columns = None if width == wide else (count(0, wide) < width)[None]
    parts = [jnp.broadcast_to(x, (size, wide)) for x in (rows, columns) if x is not None]
    return functools.reduce(jnp.logical_and, parts) if parts else None


def matrix(ref, start, size: int, width: int, end=None, head=None):
    """Rows [size, padded width] from `start` on, 0 from `end` on; head: of [rows, heads, width]"""
    mask = _inside(start, size, end, width, ref.shape[-1])
    rows = pl.ds(start, size)
    part = ref.at[rows, :] if head is None else ref.at[rows, head, :]
    return plt.load(part, mask=mask, other=None if mask is None else 0.0)


def _vector(ref, start, size: int, cut: bool, other=0, head=None):
    """Elements [size] from `start` on, `other` beyond the end."""
    part = ref.at[pl.ds(start, size)] if head is None else ref.at[head, pl.ds(start, size)]
    if not cut:
        return plt.load(part)
    return plt.load(part, mask=count(start, size) < ref.shape[-1], other=other)


def put(ref, start, value, width: int, end=None):
    mask = _inside(start, len(value), end, width, ref.shape[-1])
    plt.store(ref.at[pl.ds(start, len(value)), :], value.astype(ref.dtype), mask=mask)


def visit(body: Body, x, step, carry, head=0):
    """`carry = step(masked, start, carry)` over the blocks that the program's list names."""
    walked = body.rows if body.turned else body.keys
    head = head if body.by_head else 0
    whole, seen = (x[name][head] * walked.steps for name in ("full", "seen"))
    first, low, high = x["first"][head], jnp.int32(0), seen
    if body.parts > 1:
        share = lax.div(seen + (body.parts - 1), body.parts)
        low = jnp.minimum(lax.rem(pl.program_id(0), body.parts) * share, seen)
        high = jnp.minimum(low + share, seen)

    def start(n):
        block = x["index"][head, first + lax.div(n, walked.steps)].astype(jnp.int32)
        return (block * walked.steps + lax.rem(n, walked.steps)) * walked.unit

    def run(masked):
        return lambda n, carry: step(masked, start(n), carry)

    middle = jnp.clip(whole, low, high) if body.mixed else high
    if body.whole:
        carry = lax.fori_loop(low, middle, run(False), carry)
        low = middle
    return lax.fori_loop(low, high, run(True), carry) if body.mixed else carry


def row_of(body: Body):
    """First row of the program; later blocks, which see most of a text, run first."""
    return (body.rows.blocks - 1 - lax.div(pl.program_id(0), body.parts)) * body.rows.unit


class Block:
    """The logits of a step, [rows, keys] or turned."""

    def __init__(self, body: Body, x):
        self.body, self.x = body, x

    def matrix(self, name: str, start, head=None):
        """Rows of "q" or "d_out", or keys of "k" or "v"."""
        body, rows = self.body, name in ("q", "d_out")
        axis, end = (body.rows, body.end_of_rows) if rows else (body.keys, body.end_of_keys)
        return matrix(self.x[name], start, axis.unit, body.width(name), end, head)

    def row_vector(self, name: str, row, other, head=None):
        return _vector(self.x[name], row, self.body.rows.unit, self.body.cut_rows, other, head)

    def along(self, rows=None, keys=None):
        """A vector of rows or of keys, as it meets the logits."""
        if rows is not None:
            return rows[None] if self.body.turned else rows[:, None]
        return keys[:, None] if self.body.turned else keys[None]

    def _key_place(self, key):
        return count(key, self.body.keys.unit)

    def index(self, row, key):
        """(order indices of the queries, of the keys)."""
        x, body = self.x, self.body
        if x["q_index"] is not None:
            rows = self.row_vector("q_index", row, 0)
        else:
            rows = lax.div(count(row, body.rows.unit), body.copies)
        keys = self._key_place(key)
        if x["k_index"] is not None:
            keys = _vector(x["k_index"], key, body.keys.unit, body.cut_keys)
        return self.along(rows=rows), self.along(keys=keys)

    def seen(self, row, key):
        x, body = self.x, self.body
        seen = body.mask.element(*self.index(row, key))
        if x["q_segments"] is not None:
            q = self.along(rows=self.row_vector("q_segments", row, 0))
            k = _vector(x["k_segments"], key, body.keys.unit, body.cut_keys)
            k = self.along(keys=k)
            seen = seen & (q == k) & (k != 0)
        if body.cut_keys:
            seen = seen & self.along(keys=self._key_place(key) < body.keys.length)
        return seen

    def distance(self, row, key):
        q, k = self.index(row, key)
        return jnp.abs(q - k).astype(F32)

    def logits(self, products, row, key, head=0):
        """(x, factor > 0, cap's tanh or None): the logits in base 2 are factor x."""
        body, slopes, bent = self.body, self.x["slopes"], None
        if body.soft_cap is None and slopes is None and body.scale > 0:
            return products, body.scale * LOG2_E, bent
        if body.soft_cap is None:
            logits = products * (body.scale * LOG2_E)
        else:
            bent = jnp.tanh(products * (body.scale / body.soft_cap))
            logits = bent * (body.soft_cap * LOG2_E)
        if slopes is not None:
            logits = logits - (slopes[head] * LOG2_E) * self.distance(row, key)
        return logits, 1.0, bent

    def probabilities(self, masked: bool, products, lse, row, key, head=0):
        """(p from the saved lse in base 2, cap's tanh or None)."""
        logits, factor, bent = self.logits(products, row, key, head)
        p = jnp.exp2(logits * factor - self.along(rows=lse))
        return (jnp.where(self.seen(row, key), p, 0.0) if masked else p), bent


def forward(body: Body, x, out, lse):
    """Online softmax over the key blocks of a row block (FlashAttention, Dao et al. 2022)."""
    row, block = row_of(body), Block(body, x)
    query = block.matrix("q", row)

    def step(masked: bool, key, carry):
        top, total, acc = carry
        products = dot(body, query, block.matrix("k", key), 1)
        logits, factor, _ = block.logits(products, row, key)
        if masked:
            logits = jnp.where(block.seen(row, key), logits, -jnp.inf)
        new = jnp.maximum(top, jnp.max(logits, 1) * factor)
        p, keep = jnp.exp2(logits * factor - new[:, None]), jnp.exp2(top - new)
        value = block.matrix("v", key)
        acc = acc * keep[:, None] + dot(body, p.astype(value.dtype), value, 0)
        return new, total * keep + jnp.sum(p, 1), acc

    start = online.start((body.rows.unit,), x["v"].shape[-1])
    top, total, acc = visit(body, x, step, start)
    finish(body, row, top, total, acc, out, lse)


def finish(body: Body, row, top, total, acc, out, lse):
    """Stores what a running softmax, its maximum in base 2, comes to."""
    some = total > 0
    safe = jnp.where(some, total, 1.0)
    put(out, row, acc / safe[:, None], body.v_size, body.end_of_rows)
    sums = jnp.where(some, top * (1 / LOG2_E) + jnp.log(safe), -jnp.inf)
    mask = count(row, len(sums)) < body.rows.length if body.cut_rows else None
    plt.store(lse.at[pl.ds(row, len(sums))], sums, mask=mask)


def d_queries(body: Body, x, dq, d_slope):
    """Cotangent of the queries of a row block, and of the head's slope as these rows see it."""
    row, block = row_of(body), Block(body, x)
    query, d_out = block.matrix("q", row), block.matrix("d_out", row)
    lse, di = block.row_vector("lse", row, jnp.inf), block.row_vector("di", row, 0)

    def step(masked: bool, key, carry):
        acc, slope = carry
        k = block.matrix("k", key)
        p, bent = block.probabilities(masked, dot(body, query, k, 1), lse, row, key)
        d = p * (dot(body, d_out, block.matrix("v", key), 1) - di[:, None])
        if slope is not None:
            slope = slope - jnp.sum(d * block.distance(row, key), 1)
        d = d if bent is None else d * (1 - bent * bent)
        return acc + dot(body, d.astype(k.dtype), k, 0), slope

    slope = None if d_slope is None else jnp.zeros(body.rows.unit, F32)
    start = jnp.zeros((body.rows.unit, x["k"].shape[-1]), F32), slope
    acc, slope = visit(body, x, step, start)
    put(dq, row, acc * body.scale, body.size, body.end_of_rows)
    if slope is not None:
        d_slope[0] = jnp.sum(slope)


def d_keys(body: Body, x, dk, dv):
    """Cotangents of a block of keys and of values: sums over all rows, so over the group too."""
    key, block = pl.program_id(0) * body.keys.unit, Block(body, x)
    k, v = block.matrix("k", key), block.matrix("v", key)

    def step(head, masked: bool, row, carry):
        acc_k, acc_v = carry
        lane = None if body.group == 1 else head
        query, d_out = block.matrix("q", row, lane), block.matrix("d_out", row, lane)
        lse = block.row_vector("lse", row, jnp.inf, lane)
        p, bent = block.probabilities(masked, dot(body, k, query, 1), lse, row, key, head)
        acc_v = acc_v + dot(body, p.astype(d_out.dtype), d_out, 0)
        di = block.row_vector("di", row, 0, lane)
        d = p * (dot(body, v, d_out, 1) - di[None])
        d = d if bent is None else d * (1 - bent * bent)
        return acc_k + dot(body, d.astype(query.dtype), query, 0), acc_v

    sum_k, sum_v = over_heads(body, x, step, body.keys.unit)
    put(dk, key, sum_k * body.scale, body.size, body.end_of_keys)
    put(dv, key, sum_v, body.v_size, body.end_of_keys)


def over_heads(body: Body, x, step, keys: int):
    """Sums [keys, size], of keys and of values, over the rows of all heads that share them."""

    def of_head(head, carry):
        return visit(body, x, functools.partial(step, head), carry, head)

    sums = tuple(jnp.zeros((keys, x[name].shape[-1]), F32) for name in ("k", "v"))
    return of_head(0, sums) if body.group == 1 else lax.fori_loop(0, body.group, of_head, sums)


def launch(kernel, body: Body, x, specs, *, grid, outputs):
    """`kernel` on `grid`; outputs: (shape, block) or None each."""
    shapes, blocks = (tuple(x) for x in zip(*(o or (None, None) for o in outputs), strict=True))
    return pl.pallas_call(
        functools.partial(kernel, body),
        out_shape=shapes,
        grid=grid,
        in_specs=[specs],
        out_specs=blocks,
        interpret=body.interpret,
        name=f"lcjax_{kernel.__name__}",
        compiler_params=plt.CompilerParams(num_warps=body.warps, num_stages=body.stages),
    )(x)
