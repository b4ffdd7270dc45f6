"""Blockwise attention in plain XLA: O(T) memory, forward and backward, on every platform.

Queries and keys are split into blocks. For each block of queries a loop visits only the key blocks
that the mask or table shows, with a running maximum, denominator and output (Milakov and Gimelshein
2018; FlashAttention, Dao et al. 2022, algorithm 1). The backward pass recomputes the probabilities
from the saved lse and visits the same blocks (FlashAttention-2, Dao 2023, sec. 3.1).

Query heads that share a key head are rows of one product, so they visit the same blocks. If their
tables differ, one query head per key head is computed at a time, as attention of K query heads over
K key heads. With `Spec.splits`, parts of the keys are computed in parallel and merged: a decoding
step of one row has few products, and parts of a long cache make a batch of them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import online_softmax as online
from pallas_kernels.backends.xla import blocks as tiles
from pallas_kernels.backends.xla.blocks import BlockSizes, Positions, Tiling, add, dot
from pallas_kernels.biases import Bias
from pallas_kernels.dispatch import Operands, Spec, user_table
from pallas_kernels.explanations import report
from pallas_kernels.folded import are_alike, as_rows
from pallas_kernels.online_softmax import merge_parts
from pallas_kernels.tables import BlockTable


def unsupported(q, k, v, operands: Operands, spec: Spec) -> str | None:
    """Returns None: this implementation runs all inputs."""
    return None


class Loop(NamedTuple):
    """Everything that the steps of one pass share."""

    tiling: Tiling
    positions: Positions
    table: BlockTable
    spec: Spec
    bias: Bias | None

    def bias_of(self, chunk):
        """Returns the bias of the chunk's query heads."""
        heads = self.tiling.heads * self.tiling.group
        first = tiles.chunk_start(self.tiling, chunk).head * self.tiling.group
        return jax.tree.map(
            lambda x: lax.dynamic_slice_in_dim(x, first, heads, x.ndim - 1), self.bias
        )

    def index_of(self, chunk, i, j):
        """Returns the order indices [batch or 1, bq] and [batch or 1, bk] of a pair of blocks."""
        pair = tiles.take(self.positions.q_index, i), tiles.take(self.positions.k_index, j)
        return tuple(tiles.rows_of(x, self.tiling, chunk) for x in pair)


def _loop(kernel: str, q, k, operands: Operands, spec: Spec, blocks: BlockSizes) -> Loop:
    """Returns the loop of a pass; `kernel` is its name in the report of `explain`."""
    t, s = q.shape[1], k.shape[1]
    given = user_table(operands, spec)
    tiling = tiles.make_tiling(q, k, blocks, given, operands.key_bits is not None)
    table = tiles.block_table(operands, spec, t, s, tiling)
    has_user_table = given is not None
    report(
        lambda: tiles.kernel_blocks(kernel, blocks, tiling, table, has_user_table=has_user_table)
    )
    return Loop(tiling, tiles.positions(operands, spec, t, s, tiling), table, spec, operands.bias)


def forward(
    q, k, v, operands: Operands, spec: Spec, *, platform="default", blocks=None, kernel="forward"
):
    """Returns out [B, T, N, Hv] in q's dtype and lse float32 [B, T, N]."""
    run = functools.partial(forward, platform=platform, blocks=blocks)
    if spec.splits is not None or user_table(operands, spec) is not None or not are_alike(k, v):
        k, v = as_rows((k, v))
    if _splits_keys(k, operands, spec):
        return _split_forward(run, q, k, v, operands, spec)
    if _has_table_per_query_head(k, operands, spec):
        return _forward_by_group(run, q, k, v, operands, spec)
    blocks = blocks or tiles.forward_blocks(q.shape[1], k.shape[1], platform)
    loop, t = _loop(kernel, q, k, operands, spec, blocks), q.shape[1]
    tiling = loop.tiling
    q = tiles.pad(q, tiling.nq * tiling.bq)
    k, v = tiles.heads_first(k, tiling), tiles.heads_first(v, tiling)

    def chunk(c):
        bias = loop.bias_of(c)
        return lax.map(lambda i: _forward_rows(loop, q, k, v, bias, c, i), jnp.arange(tiling.nq))

    out, lse = lax.map(chunk, jnp.arange(tiling.chunks))
    return tuple(tiles.join_chunks(x, tiling, t, tiling.group) for x in (out, lse))


def _forward_rows(loop: Loop, q, k, v, bias, chunk, i):
    """Returns out and lse of query block i."""
    tiling = loop.tiling
    before, after = online.scales(loop.spec.scale, q.dtype)
    query = tiles.query_block(q, tiling, chunk, i) * jnp.asarray(before, q.dtype)

    def step(j, partial, carry):
        top, total, out = carry
        key, scale = tiles.read_block(k, tiling, chunk, j, q.dtype)
        logits = after * dot(query, key, 1, 1)
        if scale is not None:
            logits *= scale[:, :, None]
        if loop.spec.soft_cap is not None:
            logits = loop.spec.soft_cap * jnp.tanh(logits / loop.spec.soft_cap)
        if bias is not None:
            logits += tiles.by_query(bias.logits(*loop.index_of(chunk, i, j)), tiling)
        if partial:
            seen = tiles.visible(loop.spec.mask, loop.positions, tiling, chunk, i, j)
            logits = jnp.where(seen, logits, -jnp.inf)
        new = jnp.maximum(top, jnp.max(logits, -1))
        keep = jnp.exp(top - new)
        p = jnp.exp(logits - new[..., None])
        total = total * keep + jnp.sum(p, -1)
        value, scale = tiles.read_block(v, tiling, chunk, j, q.dtype)
        if scale is not None:
            p *= scale[:, :, None]
        out = out * keep[..., None] + dot(p.astype(value.dtype), value, 1, 0)
        return new, total, out

    start = online.start(query.shape[:3], v.shape[3])
    return online.finish(*tiles.walk(loop.table, tiling, chunk, i, step, start), q.dtype)


def backward(
    q, k, v, out, lse, d_out, d_lse, operands: Operands, spec: Spec, *,
    platform="default", blocks=None,
):  # fmt: skip
    """Returns the cotangents of q, k, v and the bias."""
    if _has_table_per_query_head(k, operands, spec):
        run = functools.partial(backward, platform=platform, blocks=blocks)
        return _backward_by_group(run, k, v, (q, out, lse, d_out, d_lse), operands, spec)
    blocks = blocks or tiles.backward_blocks(platform)
    loop, t, s = _loop("backward", q, k, operands, spec, blocks), q.shape[1], k.shape[1]
    tiling, dtypes, scale = loop.tiling, (q.dtype, k.dtype, v.dtype), spec.scale
    rows = tiles.backward_rows(q, out, lse, d_out, d_lse, tiling)
    k, v = tiles.heads_first(k, tiling), tiles.heads_first(v, tiling)

    def chunk(c):
        bias, shape = loop.bias_of(c), (tiling.nk, tiling.batch, tiling.heads, tiling.bk)
        sums = [jnp.zeros((*shape, x.shape[3]), jnp.float32) for x in (k, v)]
        sums.append(jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), bias))
        step = functools.partial(_backward_rows, loop, rows, k, v, bias, c)
        (dk, dv, d_bias), dq = lax.scan(step, tuple(sums), jnp.arange(tiling.nq))
        return dq, (scale * dk).astype(dtypes[1]), dv.astype(dtypes[2]), d_bias

    dq, dk, dv, d_bias = lax.map(chunk, jnp.arange(tiling.chunks))
    dq = tiles.join_chunks(dq, tiling, t, tiling.group)
    dk, dv = (tiles.join_chunks(x, tiling, s, 1) for x in (dk, dv))
    return dq, dk, dv, jax.tree.map(lambda x: _join_bias(x, tiling), d_bias)


def _backward_rows(loop: Loop, rows, k, v, bias, chunk, sums, i):
    """Returns (dk, dv, d_bias) with the part of query block i added, and the dq of the block.

    Scores are key-major, [.., keys, queries]: four of the five products then read their operands in
    their memory layout, and only that of dq transposes an operand, which is small. Query-major
    scores would need two transposed products, over the large operand.
    """
    tiling, scale, cap = loop.tiling, loop.spec.scale, loop.spec.soft_cap
    query, do, di, lse = (tiles.query_block(x, tiling, chunk, i) for x in rows)
    di, lse = di[:, :, None, :], lse[:, :, None, :]

    def step(j, partial, carry):
        dqt, dk, dv, d_bias = carry
        key = tiles.key_block(k, tiling, chunk, j)
        logits = scale * dot(key, query, 1, 1)
        if cap is not None:
            bent = jnp.tanh(logits / cap)
            logits = cap * bent
        if bias is not None:
            index = loop.index_of(chunk, i, j)
            logits += tiles.by_query(bias.logits(*index), tiling).mT
        p = jnp.exp(logits - lse)
        if partial:
            seen = tiles.visible(loop.spec.mask, loop.positions, tiling, chunk, i, j)
            p = jnp.where(seen.mT, p, 0.0)
        ds = p * (dot(tiles.key_block(v, tiling, chunk, j), do, 1, 1) - di)
        if bias is not None:
            more = bias.gradient(*index, tiles.by_head(ds.mT, tiling))
            d_bias = jax.tree.map(jnp.add, d_bias, more)
        ds = ds if cap is None else ds * (1 - bent * bent)
        ds = ds.astype(key.dtype)
        dqt = dqt + dot(key.mT, ds, 1, 0)
        dk = add(dk, j, dot(ds, query, 1, 0))
        return dqt, dk, add(dv, j, dot(p.astype(do.dtype), do, 1, 0)), d_bias

    zero = jnp.zeros((tiling.batch, tiling.heads, query.shape[3], query.shape[2]), jnp.float32)
    dqt, *sums = tiles.walk(loop.table, tiling, chunk, i, step, (zero, *sums))
    return tuple(sums), (scale * dqt.mT).astype(rows[0].dtype)


def _join_bias(x, tiling: Tiling):
    """[chunks, ..., heads of a chunk] -> [..., N], summed over the batch."""
    x = x.reshape(tiling.batch_chunks, tiling.head_chunks, *x.shape[1:]).sum(0)
    x = jnp.moveaxis(x, 0, -2)
    return x.reshape(*x.shape[:-2], -1)


def _has_table_per_query_head(k, operands: Operands, spec: Spec) -> bool:
    table = user_table(operands, spec)
    return table is not None and table.seen.shape[1] not in (1, k.shape[2])


def _forward_by_group(run, q, k, v, operands: Operands, spec: Spec):
    """Returns out and lse by `run(q, k, v, operands, spec)` for one query head per key head."""
    groups = _split_heads(q, k), _group_operands(k, operands, spec)
    spec = dataclasses.replace(spec, table=None)
    results = lax.map(lambda group: run(group[0], k, v, group[1], spec), groups)
    return tuple(_join_heads(x) for x in results)


def _backward_by_group(run, k, v, rows, operands: Operands, spec: Spec):
    """Returns cotangents by `run` for one query head per key head; dk and dv are sums over them.

    Args:
      rows: (q, out, lse, d_out, d_lse).
    """
    groups = jax.tree.map(lambda x: _split_heads(x, k), rows), _group_operands(k, operands, spec)
    spec = dataclasses.replace(spec, table=None)

    def step(sums, group):
        (q, *rows), operands = group
        dq, dk, dv, d_bias = run(q, k, v, *rows, operands, spec)
        return (sums[0] + dk, sums[1] + dv), (dq, d_bias)

    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (k, v))
    (dk, dv), (dq, d_bias) = lax.scan(step, zeros, groups)
    d_bias = jax.tree.map(lambda x: _merge_last(jnp.moveaxis(x, 0, -1)), d_bias)
    return _join_heads(dq), dk.astype(k.dtype), dv.astype(v.dtype), d_bias


def _split_heads(x, k):
    """[B, T, N, ...] -> [G, B, T, K, ...]."""
    return jnp.moveaxis(x.reshape(*x.shape[:2], k.shape[2], -1, *x.shape[3:]), 3, 0)


def _join_heads(x):
    """[G, B, T, K, ...] -> [B, T, N, ...]."""
    x = jnp.moveaxis(x, 0, 3)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


def _merge_last(x):
    """[..., K, G] -> [..., N]."""
    return x.reshape(*x.shape[:-2], -1)


def _group_operands(k, operands: Operands, spec: Spec) -> Operands:
    """Operands with a leading axis of G: of the bias and the table its part, of others a copy."""
    heads, table = k.shape[2], user_table(operands, spec)
    group = table.seen.shape[1] // heads

    def of_table(name):
        x = jnp.asarray(getattr(table, name))
        return jnp.moveaxis(x.reshape(x.shape[0], heads, group, *x.shape[2:]), 2, 0)

    def of_bias(x):
        return jnp.moveaxis(x.reshape(*x.shape[:-1], heads, group), -1, 0)

    parts = {name: of_table(name) for name in ("index", "full", "seen")}
    positions = (x if x is None else jnp.broadcast_to(x, (group, *x.shape)) for x in operands[:4])
    table = dataclasses.replace(table, overflow=None, **parts)
    return Operands(*positions, jax.tree.map(of_bias, operands.bias), table)


def _splits_keys(k, operands: Operands, spec: Spec) -> bool:
    """Returns whether keys are split: not if a caller's table or bits are those of all keys."""
    has_parts = spec.splits is not None and min(spec.splits, k.shape[1]) > 1
    return has_parts and user_table(operands, spec) is None and operands.key_bits is None


def _split_forward(run, q, k, v, operands: Operands, spec: Spec):
    """Returns out and lse, merged from `run(q, k, v, operands, spec)` of each part of the keys."""
    keys, count = k.shape[1], min(spec.splits, k.shape[1])
    q_index, k_index, q_segments, k_segments = operands[:4]
    unit = max(getattr(x, "slots_per_entry", 1) for x in (k, v))
    size = -(-keys // (count * unit)) * unit
    if k_index is None:
        k_index = jnp.arange(keys, dtype=jnp.int32)[None]
    if k_segments is None and size * count != keys:  # the last part is padded
        q_segments, k_segments = (jnp.ones(x.shape[:2], jnp.int32) for x in (q, k))
    if q_index is None:
        q_index = jnp.arange(q.shape[1], dtype=jnp.int32)[None]
    spec = dataclasses.replace(spec, splits=None)

    def split(x):
        part = size * x.shape[1] // keys  # fewer than `size` entries if slots share them
        x = tiles.pad(x, part * count)
        return x.reshape(len(x), count, part, *x.shape[2:])

    def part(k, v, k_index, k_segments):
        operands_of_part = Operands(q_index, k_index, q_segments, k_segments, operands.bias)
        return run(q, k, v, operands_of_part, spec, kernel=f"forward, each of {count} parts")

    parts = jax.tree.map(split, (k, v, k_index, k_segments))
    return merge_parts(*jax.vmap(part, in_axes=1)(*parts))
