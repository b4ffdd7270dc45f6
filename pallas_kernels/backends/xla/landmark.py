"""The two passes of grouped softmax over older blocks, in plain XLA, on every platform.

The loops are those of `attention.py`, with whole landmark blocks in place of keys: tiles, skipped
blocks and masks count landmark blocks, and only products are over tokens.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import online_softmax as online
from pallas_kernels.backends.xla import blocks as tiles
from pallas_kernels.backends.xla.blocks import add, dot
from pallas_kernels.dispatch import Spec
from pallas_kernels.explanations import report
from pallas_kernels.tables import BlockTable

_KEYS = 512  # tokens of a step, about
_QUERIES = {"forward": 256, "backward": 128}  # of a step on a CPU; twice as many elsewhere


class Loop(NamedTuple):
    """Everything that the steps of one pass share."""

    tiling: tiles.Tiling  # of keys in tokens
    in_blocks: tiles.Tiling  # the same, counted in landmark blocks
    positions: tiles.Positions
    table: BlockTable
    spec: Spec

    def logits(self, query, key):
        """Returns logits [.., R, C, block] with -inf for landmarks, and landmarks' [.., R, C]."""
        x = self.spec.scale * dot(query, key, 1, 1)
        x = x.reshape(*x.shape[:3], -1, self.spec.block)
        landmark = jnp.arange(self.spec.block) == self.spec.block - 1
        return jnp.where(landmark, -jnp.inf, x), x[..., -1]

    def visible(self, chunk, i, j):
        return tiles.visible(self.spec.mask, self.positions, self.in_blocks, chunk, i, j)


def _loop(q, k, operands, spec: Spec, direction: str, platform: str) -> Loop:
    on_cpu, block = platform == "cpu", spec.block
    count, t = k.shape[1] // block, q.shape[1]
    size = _QUERIES[direction] * (1 if on_cpu else 2)
    copies = 1 if direction == "forward" else 2  # the backward pass holds twice the scores
    scores = tiles.CPU_SCORES // (copies * block) if on_cpu else None
    rule = f"landmark {direction} {'on a CPU' if on_cpu else 'on accelerators'}"
    blocks = tiles.BlockSizes(q=size, k=max(1, _KEYS // block), scores=scores, rule=rule)
    shape = jax.ShapeDtypeStruct((k.shape[0], count, *k.shape[2:]), k.dtype)
    in_blocks = tiles.make_tiling(q, shape, blocks)
    table = tiles.block_table(operands, spec, t, count, in_blocks)
    positions = tiles.positions(operands, spec, t, count, in_blocks)
    in_tokens = in_blocks._replace(bk=in_blocks.bk * block)
    sizes = replace(blocks, k=blocks.k * block, scores=scores and scores * block)
    report(lambda: tiles.kernel_blocks(direction, sizes, in_tokens, table, has_user_table=False))
    return Loop(in_tokens, in_blocks, positions, table, spec)


def forward(q, k, v, operands, spec, *, platform):
    """Returns out [B, T, N, Hv] in q's dtype and lse float32 [B, T, N]."""
    loop, t = _loop(q, k, operands, spec, "forward", platform), q.shape[1]
    tiling = loop.tiling
    q = tiles.pad(q, tiling.nq * tiling.bq)
    k, v = tiles.heads_first(k, tiling), tiles.heads_first(v, tiling)

    def chunk(c):
        return lax.map(lambda i: _forward_rows(loop, q, k, v, c, i), jnp.arange(tiling.nq))

    out, lse = lax.map(chunk, jnp.arange(tiling.chunks))
    return tuple(tiles.join_chunks(x, tiling, t, tiling.group) for x in (out, lse))


def unsupported(q, k, v, operands, spec) -> str | None:
    """Returns None: this implementation runs all inputs."""
    return None


def _forward_rows(loop: Loop, q, k, v, chunk, i):
    """Returns out and lse of query block i."""
    query = tiles.query_block(q, loop.tiling, chunk, i)

    def step(j, partial, carry):
        top, total, out = carry
        logits, landmark = loop.logits(query, tiles.key_block(k, loop.tiling, chunk, j))
        if partial:
            landmark = jnp.where(loop.visible(chunk, i, j), landmark, -jnp.inf)
        inner = jnp.exp(logits - jnp.max(logits, -1, keepdims=True))
        new = jnp.maximum(top, jnp.max(landmark, -1))
        keep = jnp.exp(top - new)
        weight = jnp.exp(landmark - new[..., None])
        p = inner * (weight / jnp.sum(inner, -1))[..., None]
        value = tiles.key_block(v, loop.tiling, chunk, j)
        total = total * keep + jnp.sum(weight, -1)
        p = p.reshape(*p.shape[:3], -1).astype(value.dtype)
        return new, total, out * keep[..., None] + dot(p, value, 1, 0)

    start = online.start(query.shape[:3], v.shape[3])
    carry = tiles.walk(loop.table, loop.in_blocks, chunk, i, step, start)
    return online.finish(*carry, q.dtype)


def backward(q, k, v, out, lse, d_out, d_lse, operands, spec, *, platform):
    """Returns the cotangents of q, k and v, and None for that of a bias."""
    loop, (t, s) = _loop(q, k, operands, spec, "backward", platform), (q.shape[1], k.shape[1])
    tiling, dtypes = loop.tiling, (q.dtype, k.dtype, v.dtype)
    rows = tiles.backward_rows(q, out, lse, d_out, d_lse, tiling)
    k, v = tiles.heads_first(k, tiling), tiles.heads_first(v, tiling)

    def chunk(c):
        shape = (tiling.nk, tiling.batch, tiling.heads, tiling.bk)
        sums = tuple(jnp.zeros((*shape, x.shape[3]), jnp.float32) for x in (k, v))
        step = functools.partial(_backward_rows, loop, rows, k, v, c)
        (dk, dv), dq = lax.scan(step, sums, jnp.arange(tiling.nq))
        return dq.astype(dtypes[0]), dk.astype(dtypes[1]), dv.astype(dtypes[2])

    dq, dk, dv = lax.map(chunk, jnp.arange(tiling.chunks))
    dq = tiles.join_chunks(dq, tiling, t, tiling.group)
    return dq, tiles.join_chunks(dk, tiling, s, 1), tiles.join_chunks(dv, tiling, s, 1), None


def _backward_rows(loop: Loop, rows, k, v, chunk, sums, i):
    """Returns (dk, dv) with the part of query block i added, and the dq of the block.

    Let w be the weight of a landmark block, p the probabilities inside it, g_j = v_j . d_out and
    g = sum p_j g_j. Then d landmark = w (g - di), d logit_j = w p_j (g_j - g).
    """
    query, do, di, lse = (tiles.query_block(x, loop.tiling, chunk, i) for x in rows)

    def step(j, partial, carry):
        dq, dk, dv = carry
        key = tiles.key_block(k, loop.tiling, chunk, j)
        logits, marks = loop.logits(query, key)
        weight = jnp.exp(marks - lse[..., None])
        if partial:
            weight = jnp.where(loop.visible(chunk, i, j), weight, 0.0)
        p = jnp.exp(logits - jnp.max(logits, -1, keepdims=True))
        p = p / jnp.sum(p, -1, keepdims=True)
        g = dot(do, tiles.key_block(v, loop.tiling, chunk, j), 1, 1).reshape(p.shape)
        mean = online.sum_of_products(p, g)[..., None]
        weight = weight[..., None]
        landmark = jnp.arange(loop.spec.block) == loop.spec.block - 1
        ds = weight * jnp.where(landmark, mean - di[..., None, None], p * (g - mean))
        ds, p = (x.reshape(*x.shape[:3], -1) for x in (ds, weight * p))
        ds = loop.spec.scale * ds.astype(key.dtype)
        dq = dq + dot(ds, key, 1, 0)
        dk = add(dk, j, dot(ds, query, 0, 0))
        return dq, dk, add(dv, j, dot(p.astype(do.dtype), do, 0, 0))

    zero = jnp.zeros(query.shape, jnp.float32)
    dq, *sums = tiles.walk(loop.table, loop.in_blocks, chunk, i, step, (zero, *sums))
    return tuple(sums), dq
