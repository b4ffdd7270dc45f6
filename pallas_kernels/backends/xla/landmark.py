"""The two passes of grouped softmax over older blocks, in plain XLA, on every platform.

Loops are those of the blockwise attention beside it (`_xla.py`), with whole blocks in place of
keys: what is cut, skipped and masked is counted in blocks, only products are of tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.backends import online_softmax as online
from pallas_kernels.backends.xla import blocks as cutting
from pallas_kernels.backends.xla import visits as visiting
from pallas_kernels.backends.xla.blocks import add, dot
from pallas_kernels.block_table import BlockTable
from pallas_kernels.dispatch import LandmarkSpec, Operands, Spec
from pallas_kernels.landmark import OLDER

_KEYS = 512  # about as many in a step
_QUERIES = {"forward": 256, "backward": 128}  # on a CPU; twice as many elsewhere


class Loop(NamedTuple):
    """All that the steps of one pass share."""

    cut: cutting.Cut  # of keys in tokens
    in_blocks: cutting.Cut  # the same, counted in landmark blocks
    places: cutting.Places
    table: BlockTable
    block: int
    scale: float

    def logits(self, query, key):
        """Ordinary logits [.., R, C, block], the last column -inf, and landmarks' [.., R, C]."""
        x = self.scale * dot(query, key, 1, 1)
        x = x.reshape(*x.shape[:3], -1, self.block)
        landmark = jnp.arange(self.block) == self.block - 1
        return jnp.where(landmark, -jnp.inf, x), x[..., -1]

    def visible(self, chunk, i, j):
        return visiting.visible(OLDER, self.places, self.in_blocks, chunk, i, j)


def _loop(q, k, operands, spec: LandmarkSpec, direction: str, platform: str) -> Loop:
    on_cpu, block = platform == "cpu", spec.block
    count, t = k.shape[1] // block, q.shape[1]
    size = _QUERIES[direction] * (1 if on_cpu else 2)
    held = 1 if direction == "forward" else 2  # the backward pass holds twice the scores
    scores = cutting.CPU_SCORES // (held * block) if on_cpu else None
    blocks = cutting.Blocks(q=size, k=max(1, _KEYS // block), scores=scores)
    shape = jax.ShapeDtypeStruct((k.shape[0], count, *k.shape[2:]), k.dtype)
    in_blocks = cutting.plan(q, shape, blocks)
    if operands.q_numbers is None:
        operands = operands._replace(q_numbers=np.arange(t, dtype=np.int32)[None] // block)
    operands = Operands(*operands)
    table = visiting.table_of(operands, Spec(OLDER, spec.scale), t, count, in_blocks)
    where = cutting.places(operands, t, count, in_blocks)
    in_tokens = in_blocks._replace(bk=in_blocks.bk * block)
    return Loop(in_tokens, in_blocks, where, table, block, spec.scale)


def forward(q, k, v, operands, spec, *, platform):
    """out [B, T, N, Hv] in q's dtype and lse float32 [B, T, N]."""
    loop, t = _loop(q, k, operands, spec, "forward", platform), q.shape[1]
    cut = loop.cut
    q = cutting.pad(q, cut.nq * cut.bq)
    k, v = cutting.heads_first(k, cut), cutting.heads_first(v, cut)

    def chunk(c):
        return lax.map(lambda i: _forward_rows(loop, q, k, v, c, i), jnp.arange(cut.nq))

    out, lse = lax.map(chunk, jnp.arange(cut.chunks))
    return cutting.join(out, cut, t, cut.group), cutting.join(lse, cut, t, cut.group)


def unsupported(q, k, v, operands, spec) -> str | None:
    """Why this cannot run the inputs: it can run all of them."""
    return None


def _forward_rows(loop: Loop, q, k, v, chunk, i):
    """out and lse of query block i."""
    query = cutting.queries(q, loop.cut, chunk, i)

    def step(j, partial, carry):
        top, total, out = carry
        logits, landmark = loop.logits(query, cutting.keys(k, loop.cut, chunk, j))
        if partial:
            landmark = jnp.where(loop.visible(chunk, i, j), landmark, -jnp.inf)
        inner = jnp.exp(logits - jnp.max(logits, -1, keepdims=True))
        new = jnp.maximum(top, jnp.max(landmark, -1))
        keep = jnp.exp(top - new)
        weight = jnp.exp(landmark - new[..., None])
        p = inner * (weight / jnp.sum(inner, -1))[..., None]
        value = cutting.keys(v, loop.cut, chunk, j)
        total = total * keep + jnp.sum(weight, -1)
        p = p.reshape(*p.shape[:3], -1).astype(value.dtype)
        return new, total, out * keep[..., None] + dot(p, value, 1, 0)

    start = online.start(query.shape[:3], v.shape[3])
    found = visiting.walk(loop.table, loop.in_blocks, chunk, i, step, start)
    return online.finish(*found, q.dtype)


def backward(q, k, v, out, lse, d_out, d_lse, operands, spec, *, platform):
    """Cotangents of q, k and v."""
    loop, (t, s) = _loop(q, k, operands, spec, "backward", platform), (q.shape[1], k.shape[1])
    cut, dtypes = loop.cut, (q.dtype, k.dtype, v.dtype)
    rows = cutting.backward_rows(q, out, lse, d_out, d_lse, cut)
    k, v = cutting.heads_first(k, cut), cutting.heads_first(v, cut)

    def chunk(c):
        shape = (cut.nk, cut.batch, cut.heads, cut.bk)
        sums = tuple(jnp.zeros((*shape, x.shape[3]), jnp.float32) for x in (k, v))
        step = lambda sums, i: _backward_rows(loop, rows, k, v, c, i, sums)  # noqa: E731
        (dk, dv), dq = lax.scan(step, sums, jnp.arange(cut.nq))
        return dq.astype(dtypes[0]), dk.astype(dtypes[1]), dv.astype(dtypes[2])

    dq, dk, dv = lax.map(chunk, jnp.arange(cut.chunks))
    return tuple(
        cutting.join(x, cut, *rest) for x, *rest in ((dq, t, cut.group), (dk, s, 1), (dv, s, 1))
    )


def _backward_rows(loop: Loop, rows, k, v, chunk, i, sums):
    """(dk, dv) with the part of query block i added, and its dq.

    With w the weight of a block, p the probabilities inside it, g_j = v_j . d_out and their mean
    g = sum p_j g_j:
    d landmark = w (g - di), d logit_j = w p_j (g_j - g).
    """
    query, do, di, lse = (cutting.queries(x, loop.cut, chunk, i) for x in rows)

    def step(j, partial, carry):
        dq, dk, dv = carry
        key = cutting.keys(k, loop.cut, chunk, j)
        logits, marks = loop.logits(query, key)
        weight = jnp.exp(marks - lse[..., None])
        if partial:
            weight = jnp.where(loop.visible(chunk, i, j), weight, 0.0)
        p = jnp.exp(logits - jnp.max(logits, -1, keepdims=True))
        p = p / jnp.sum(p, -1, keepdims=True)
        g = dot(do, cutting.keys(v, loop.cut, chunk, j), 1, 1).reshape(p.shape)
        mean = jnp.sum(p * g, -1, keepdims=True)
        weight = weight[..., None]
        landmark = jnp.arange(loop.block) == loop.block - 1
        ds = weight * jnp.where(landmark, mean - di[..., None, None], p * (g - mean))
        ds, p = (x.reshape(*x.shape[:3], -1) for x in (ds, weight * p))
        ds = loop.scale * ds.astype(key.dtype)
        dq = dq + dot(ds, key, 1, 0)
        dk = add(dk, j, dot(ds, query, 0, 0))
        return dq, dk, add(dv, j, dot(p.astype(do.dtype), do, 0, 0))

    zero = jnp.zeros(query.shape, jnp.float32)
    dq, *sums = visiting.walk(loop.table, loop.in_blocks, chunk, i, step, (zero, *sums))
    return tuple(sums), dq
