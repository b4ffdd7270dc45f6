"""Blockwise attention in plain XLA: O(T) memory, forward and backward, on every platform.

Queries and keys are cut into blocks. For each block of queries a loop walks only the key blocks
that its mask or table lets it see, keeping a running maximum, denominator and output (Milakov and
Gimelshein 2018; FlashAttention, Dao et al. 2022, algorithm 1). The backward pass recomputes the
probabilities from the saved lse and walks the same blocks (FlashAttention-2, Dao 2023, sec. 3.1).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backends import online_softmax as online
from pallas_kernels.backends.xla import apart
from pallas_kernels.backends.xla import blocks as cutting
from pallas_kernels.backends.xla import splits as splitting
from pallas_kernels.backends.xla import visits as visiting
from pallas_kernels.backends.xla.blocks import Blocks, Cut, Places, add, dot
from pallas_kernels.biases import Bias
from pallas_kernels.block_table import BlockTable
from pallas_kernels.dispatch import Operands, Spec, given_table


def unsupported(q, k, v, operands: Operands, spec: Spec) -> str | None:
    """Nothing: this is the implementation that the others fall back to."""
    return None


class Loop(NamedTuple):
    """All that the steps of one pass share."""

    cut: Cut
    places: Places
    table: BlockTable
    spec: Spec
    bias: Bias | None

    def bias_of(self, chunk):
        """The bias of the chunk's query heads."""
        heads = self.cut.heads * self.cut.group
        first = cutting.chunk_start(self.cut, chunk)[1] * self.cut.group
        return jax.tree.map(
            lambda x: lax.dynamic_slice_in_dim(x, first, heads, x.ndim - 1), self.bias
        )

    def index_of(self, chunk, i, j):
        """Order indices [batch or 1, bq], [batch or 1, bk] of a block."""
        pair = cutting.take(self.places.q_index, i), cutting.take(self.places.k_index, j)
        return tuple(cutting.rows_of(x, self.cut, chunk) for x in pair)


def _loop(q, k, operands: Operands, spec: Spec, blocks: Blocks) -> Loop:
    t, s = q.shape[1], k.shape[1]
    cut = cutting.plan(q, k, blocks, given_table(operands, spec))
    table = visiting.table_of(operands, spec, t, s, cut)
    return Loop(cut, cutting.places(operands, t, s, cut), table, spec, operands.bias)


def forward(q, k, v, operands: Operands, spec: Spec, *, platform="default", blocks=None):
    """out [B, T, N, Hv] in q's dtype and lse float32 [B, T, N]."""
    if splitting.needed(k, operands, spec):
        run = functools.partial(forward, platform=platform, blocks=blocks)
        return splitting.forward(run, q, k, v, operands, spec)
    if apart.needed(k, operands, spec):
        run = functools.partial(forward, platform=platform, blocks=blocks)
        return apart.forward(run, q, k, v, operands, spec)
    blocks = blocks or cutting.forward_blocks(q.shape[1], k.shape[1], platform)
    loop, t = _loop(q, k, operands, spec, blocks), q.shape[1]
    cut = loop.cut
    q = cutting.pad(q, cut.nq * cut.bq)
    k, v = cutting.heads_first(k, cut), cutting.heads_first(v, cut)

    def chunk(c):
        bias = loop.bias_of(c)
        return lax.map(lambda i: _forward_rows(loop, q, k, v, bias, c, i), jnp.arange(cut.nq))

    out, lse = lax.map(chunk, jnp.arange(cut.chunks))
    return cutting.join(out, cut, t, cut.group), cutting.join(lse, cut, t, cut.group)


def _forward_rows(loop: Loop, q, k, v, bias, chunk, i):
    """out and lse of query block i."""
    cut = loop.cut
    before, after = online.scales(loop.spec.scale, q.dtype)
    query = cutting.queries(q, cut, chunk, i) * jnp.asarray(before, q.dtype)

    def step(j, partial, carry):
        top, total, out = carry
        logits = after * dot(query, cutting.keys(k, cut, chunk, j), 1, 1)
        if loop.spec.soft_cap is not None:
            logits = loop.spec.soft_cap * jnp.tanh(logits / loop.spec.soft_cap)
        if bias is not None:
            logits += cutting.by_query(bias.logits(*loop.index_of(chunk, i, j)), cut)
        if partial:
            seen = visiting.visible(loop.spec.mask, loop.places, cut, chunk, i, j)
            logits = jnp.where(seen, logits, -jnp.inf)
        new = jnp.maximum(top, jnp.max(logits, -1))
        keep = jnp.exp(top - new)
        p = jnp.exp(logits - new[..., None])
        value = cutting.keys(v, cut, chunk, j)
        total = total * keep + jnp.sum(p, -1)
        out = out * keep[..., None] + dot(p.astype(value.dtype), value, 1, 0)
        return new, total, out

    start = online.start(query.shape[:3], v.shape[3])
    return online.finish(*visiting.walk(loop.table, cut, chunk, i, step, start), q.dtype)


def backward(
    q, k, v, out, lse, d_out, d_lse, operands: Operands, spec: Spec, *,
    platform="default", blocks=None,
):  # fmt: skip
    """Cotangents of q, k, v and the bias."""
    if apart.needed(k, operands, spec):
        run = functools.partial(backward, platform=platform, blocks=blocks)
        return apart.backward(run, k, v, (q, out, lse, d_out, d_lse), operands, spec)
    blocks = blocks or cutting.backward_blocks(q.shape[1], k.shape[1], platform)
    loop, t, s = _loop(q, k, operands, spec, blocks), q.shape[1], k.shape[1]
    cut, dtypes, scale = loop.cut, (q.dtype, k.dtype, v.dtype), spec.scale
    rows = cutting.backward_rows(q, out, lse, d_out, d_lse, cut)
    k, v = cutting.heads_first(k, cut), cutting.heads_first(v, cut)

    def chunk(c):
        bias, shape = loop.bias_of(c), (cut.nk, cut.batch, cut.heads, cut.bk)
        sums = [jnp.zeros((*shape, x.shape[3]), jnp.float32) for x in (k, v)]
        sums.append(jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), bias))
        step = functools.partial(_backward_rows, loop, rows, k, v, bias, c)
        (dk, dv, d_bias), dq = lax.scan(step, tuple(sums), jnp.arange(cut.nq))
        return dq, (scale * dk).astype(dtypes[1]), dv.astype(dtypes[2]), d_bias

    dq, dk, dv, d_bias = lax.map(chunk, jnp.arange(cut.chunks))
    dq, dk, dv = (
        cutting.join(x, cut, *rest) for x, *rest in ((dq, t, cut.group), (dk, s, 1), (dv, s, 1))
    )
    return dq, dk, dv, jax.tree.map(lambda x: _join_bias(x, cut), d_bias)


def _backward_rows(loop: Loop, rows, k, v, bias, chunk, sums, i):
    """(dk, dv, d_bias) with the part of query block i added, and its dq.

    Scores are held key-major, [.., keys, queries]: then four of the five products read their
    operands as they lie in memory and only that of dq needs a transposed operand, a small one.
    Query-major has two such products, over the large operand.
    """
    cut, scale, cap = loop.cut, loop.spec.scale, loop.spec.soft_cap
    query, do, di, lse = (cutting.queries(x, cut, chunk, i) for x in rows)
    di, lse = di[:, :, None, :], lse[:, :, None, :]

    def step(j, partial, carry):
        dqt, dk, dv, d_bias = carry
        key = cutting.keys(k, cut, chunk, j)
        logits = scale * dot(key, query, 1, 1)
        if cap is not None:
            bent = jnp.tanh(logits / cap)
            logits = cap * bent
        if bias is not None:
            index = loop.index_of(chunk, i, j)
            logits += cutting.by_query(bias.logits(*index), cut).mT
        p = jnp.exp(logits - lse)
        if partial:
            seen = visiting.visible(loop.spec.mask, loop.places, cut, chunk, i, j)
            p = jnp.where(seen.mT, p, 0.0)
        ds = p * (dot(cutting.keys(v, cut, chunk, j), do, 1, 1) - di)
        if bias is not None:
            more = bias.gradient(*index, cutting.by_head(ds.mT, cut))
            d_bias = jax.tree.map(jnp.add, d_bias, more)
        ds = ds if cap is None else ds * (1 - bent * bent)
        ds = ds.astype(key.dtype)
        dqt = dqt + dot(key.mT, ds, 1, 0)
        dk = add(dk, j, dot(ds, query, 1, 0))
        return dqt, dk, add(dv, j, dot(p.astype(do.dtype), do, 1, 0)), d_bias

    zero = jnp.zeros((cut.batch, cut.heads, query.shape[3], query.shape[2]), jnp.float32)
    dqt, *sums = visiting.walk(loop.table, cut, chunk, i, step, (zero, *sums))
    return tuple(sums), (scale * dqt.mT).astype(rows[0].dtype)


def _join_bias(x, cut: Cut):
    """[chunks, ..., heads of a chunk] -> [..., N], summed over the batch."""
    x = x.reshape(cut.batch_chunks, cut.head_chunks, *x.shape[1:]).sum(0)
    x = jnp.moveaxis(x, 0, -2)
    return x.reshape(*x.shape[:-2], -1)
