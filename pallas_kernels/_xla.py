"""Blockwise attention in plain XLA: O(T) memory, forward and backward, on every backend.

Queries and keys are cut into blocks. For each block of queries a loop walks only the key blocks
that its mask lets it see, keeping a running maximum, denominator and output (Milakov and
Gimelshein 2018; FlashAttention, Dao et al. 2022, algorithm 1). The backward pass recomputes the
probabilities from the saved lse and walks the same blocks (FlashAttention-2, Dao 2023, sec. 3.1).

All work arrays have the block number first, [blocks, B, K, rows, channels], so that taking a block
is one contiguous slice; the G queries that share a key head are rows of one matrix, so that keys
are never repeated and every product is one large batched matrix product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.masks import Mask

# Start of the running maximum. Finite, so that rows without a visible key so far never compute
# inf - inf; far below any logit, so that it never decides a maximum.
LOWEST = -1e28


@dataclass(frozen=True)
class Blocks:
    """Rows of queries and of keys handled at a time."""

    q: int
    k: int


class Visits(NamedTuple):
    """Which key blocks each query block walks: `order[i, :full[i]]` need no mask,
    `order[i, full[i]:seen[i]]` need one, the rest are invisible."""

    order: jax.Array
    full: jax.Array
    seen: jax.Array


class Places(NamedTuple):
    """Order indices and segments, padded and cut in blocks: [blocks, rows], [blocks, B, rows]."""

    q_index: jax.Array
    k_index: jax.Array
    q_segments: jax.Array | None
    k_segments: jax.Array | None


def _even(length: int, block: int) -> tuple[int, int]:
    """Cuts `length` in equal blocks of at most `block`: their number and size."""
    count = max(1, -(-length // block))
    return count, -(-length // count)


def _cut(x, block: int, heads: int):
    """[B, T, N, ...] -> [blocks, B, heads, rows * N/heads, ...], zero-padded."""
    b, t, n, *rest = x.shape
    count, size = _even(t, block)
    x = jnp.pad(x, [(0, 0), (0, count * size - t)] + [(0, 0)] * (x.ndim - 2))
    x = x.reshape(b, count, size, heads, n // heads, *rest)
    x = jnp.moveaxis(x, (1, 3), (0, 2))
    return x.reshape(count, b, heads, size * (n // heads), *rest)


def _join(x, length: int, group: int):
    """The way back from `_cut`: [blocks, B, K, rows * G, ...] -> [B, T, K * G, ...]."""
    count, b, heads, rows, *rest = x.shape
    x = x.reshape(count, b, heads, rows // group, group, *rest)
    x = jnp.moveaxis(x, (0, 2), (1, 3))
    return x.reshape(b, count * (rows // group), heads * group, *rest)[:, :length]


def _places(q_index, k_index, q_segments, k_segments, t: int, s: int, blocks: Blocks) -> Places:
    (nq, bq), (nk, bk) = _even(t, blocks.q), _even(s, blocks.k)
    if q_segments is None and nk * bk != s:
        # Padded keys are hidden as keys of segment 0.
        q_segments, k_segments = np.ones((1, t), np.int32), np.ones((1, s), np.int32)

    def cut(x, count, size, **mode):
        if x is None:
            return None
        xp = np if isinstance(x, np.ndarray) else jnp
        pad = [(0, 0)] * (x.ndim - 1) + [(0, count * size - x.shape[-1])]
        x = xp.pad(x, pad, **mode)
        return xp.moveaxis(x.reshape(*x.shape[:-1], count, size), -2, 0)

    # Repeating the last place keeps block bounds tight; padded queries have zero cotangents and
    # are cut off again, so what they see does not matter.
    return Places(
        cut(q_index, nq, bq, mode="edge"),
        cut(k_index, nk, bk, mode="edge"),
        cut(q_segments, nq, bq, mode="edge"),
        cut(k_segments, nk, bk),
    )


def _segment_bounds(q, k):
    """(any, all) [nq, nk] of "same, non-zero segment" for blocks q [nq, B, bq], k [nk, B, bk]."""
    xp = np if isinstance(q, np.ndarray) and isinstance(k, np.ndarray) else jnp
    info = np.iinfo(np.int32)

    def ends(x):  # of the segments other than padding
        return xp.where(x == 0, info.max, x).min(-1), xp.where(x == 0, info.min, x).max(-1)

    (q_lo, q_hi), (k_lo, k_hi) = ends(q), ends(k)
    q_lo, q_hi, k_lo, k_hi = q_lo[:, None], q_hi[:, None], k_lo[None], k_hi[None]
    some = (q_lo <= k_hi) & (k_lo <= q_hi)
    padded = (q == 0).any(-1)[:, None] | (k == 0).any(-1)[None]
    whole = (q_lo == k_hi) & (k_lo == q_hi) & (q_lo == q_hi) & ~padded
    return some.any(-1), whole.all(-1)


def _visits(mask: Mask, places: Places) -> Visits:
    q, k = places.q_index, places.k_index
    some, whole = mask.bounds(
        q.min(-1)[:, None], q.max(-1)[:, None], k.min(-1)[None], k.max(-1)[None]
    )
    if places.q_segments is not None:
        same, alike = _segment_bounds(places.q_segments, places.k_segments)
        some, whole = some & same, whole & alike
    xp = np if isinstance(some, np.ndarray) else jnp
    whole = whole & some
    order = xp.argsort(2 - some.astype(np.int32) - whole, axis=1, stable=True)
    counts = [xp.sum(x, 1).astype(np.int32) for x in (whole, some)]
    return Visits(jnp.asarray(order.astype(np.int32)), *map(jnp.asarray, counts))


def _take(x, i):
    return None if x is None else lax.dynamic_index_in_dim(jnp.asarray(x), i, 0, keepdims=False)


def _visible(mask: Mask, places: Places, i, j, group: int):
    """bool [B or 1, 1, rows of the query block, rows of the key block]."""
    seen = mask.element(_take(places.q_index, i)[:, None], _take(places.k_index, j)[None, :])
    seen = jnp.asarray(seen)[None]
    if places.q_segments is not None:
        q, k = _take(places.q_segments, i)[:, :, None], _take(places.k_segments, j)[:, None, :]
        seen = seen & (q == k) & (k != 0)
    return jnp.repeat(seen, group, axis=1)[:, None]


def _walk(visits: Visits, i, step, carry):
    """Runs `carry = step(j, masked, carry)` over the key blocks that query block i sees."""
    order, full, seen = (_take(x, i) for x in visits)

    def run(masked):
        return lambda n, carry: step(_take(order, n), masked, carry)

    return lax.fori_loop(full, seen, run(True), lax.fori_loop(0, full, run(False), carry))


def _dot(x, y, contract: tuple[int, int]):
    """Batched matrix product over the first two axes, accumulated in float32."""
    dims = (((contract[0] + 2,), (contract[1] + 2,)), ((0, 1), (0, 1)))
    return lax.dot_general(x, y, dims, preferred_element_type=jnp.float32)


def forward(q, k, v, q_index, k_index, q_segments, k_segments, mask, scale, blocks):
    """out [B, T, N, Hv] in q's dtype and lse float32 [B, T, N]."""
    (b, t, n, _), (s, heads, hv) = q.shape, (k.shape[1], k.shape[2], v.shape[3])
    group = n // heads
    places = _places(q_index, k_index, q_segments, k_segments, t, s, blocks)
    visits = _visits(mask, places)
    qs, ks, vs = _cut(q, blocks.q, heads), _cut(k, blocks.k, heads), _cut(v, blocks.k, heads)

    def one(i):
        query = (_take(qs, i) * jnp.float32(scale)).astype(q.dtype)

        def step(j, masked, carry):
            top, total, out = carry
            logits = _dot(query, _take(ks, j), (1, 1))
            if masked:
                logits = jnp.where(_visible(mask, places, i, j, group), logits, -jnp.inf)
            new = jnp.maximum(top, jnp.max(logits, -1))
            keep = jnp.exp(top - new)
            p = jnp.exp(logits - new[..., None])
            total = total * keep + jnp.sum(p, -1)
            out = out * keep[..., None] + _dot(p.astype(v.dtype), _take(vs, j), (1, 0))
            return new, total, out

        rows = query.shape[2]
        start = (
            jnp.full((b, heads, rows), LOWEST, jnp.float32),
            jnp.zeros((b, heads, rows), jnp.float32),
            jnp.zeros((b, heads, rows, hv), jnp.float32),
        )
        top, total, out = _walk(visits, i, step, start)
        some = total > 0
        safe = jnp.where(some, total, 1.0)
        return (out / safe[..., None]).astype(q.dtype), jnp.where(
            some, top + jnp.log(safe), -jnp.inf
        )

    out, lse = lax.map(one, jnp.arange(len(qs)))
    return _join(out, t, group), _join(lse, t, group)


def backward(
    q, k, v, out, lse, d_out, d_lse, q_index, k_index, q_segments, k_segments, mask, scale, blocks
):
    """Cotangents of q, k, v. That of lse enters through `di = rowsum(out * d_out) - d_lse`."""
    (t, n), (s, heads) = q.shape[1:3], k.shape[1:3]
    group = n // heads
    places = _places(q_index, k_index, q_segments, k_segments, t, s, blocks)
    visits = _visits(mask, places)
    di = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), -1) - d_lse
    # An empty row is masked everywhere; any finite lse keeps its probabilities finite until then.
    lse = jnp.where(jnp.isfinite(lse), lse, 0.0)
    qs, dos, lses, dis = (_cut(x, blocks.q, heads) for x in (q, d_out, lse, di))
    ks, vs = _cut(k, blocks.k, heads), _cut(v, blocks.k, heads)

    def one(sums, i):
        query = (_take(qs, i) * jnp.float32(scale)).astype(q.dtype)
        do, row_lse, row_di = _take(dos, i), _take(lses, i)[..., None], _take(dis, i)[..., None]

        def step(j, masked, carry):
            dq, dks, dvs = carry
            key, value = _take(ks, j), _take(vs, j)
            p = jnp.exp(_dot(query, key, (1, 1)) - row_lse)
            if masked:
                p = jnp.where(_visible(mask, places, i, j, group), p, 0.0)
            ds = (p * (_dot(do, value, (1, 1)) - row_di)).astype(q.dtype)
            dq = dq + _dot(ds, key, (1, 0))
            dk, dv = _dot(ds, query, (0, 0)), _dot(p.astype(do.dtype), do, (0, 0))
            dks = lax.dynamic_update_index_in_dim(dks, _take(dks, j) + dk, j, 0)
            dvs = lax.dynamic_update_index_in_dim(dvs, _take(dvs, j) + dv, j, 0)
            return dq, dks, dvs

        dq, *sums = _walk(visits, i, step, (jnp.zeros(query.shape, jnp.float32), *sums))
        return tuple(sums), (dq * scale).astype(q.dtype)

    sums = (jnp.zeros(ks.shape, jnp.float32), jnp.zeros(vs.shape, jnp.float32))
    (dk, dv), dq = lax.scan(one, sums, jnp.arange(len(qs)))
    return _join(dq, t, group), _join(dk, s, 1).astype(k.dtype), _join(dv, s, 1).astype(v.dtype)
