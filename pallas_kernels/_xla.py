"""Blockwise attention in plain XLA: O(T) memory, forward and backward, on every backend.

Queries and keys are cut into blocks. For each block of queries a loop walks only the key blocks
that its mask lets it see, keeping a running maximum, denominator and output (Milakov and
Gimelshein 2018; FlashAttention, Dao et al. 2022, algorithm 1). The backward pass recomputes the
probabilities from the saved lse and walks the same blocks (FlashAttention-2, Dao 2023, sec. 3.1).

Keys and values are held as [B, K, S, H], so that a block of them is one slice, already in the
order of the product. A cache that is stored in this order is never copied (XLA drops the swap of
axes), and a decoding step touches only the part of it that it sees. The G queries that share a key
head are rows of one matrix: keys are never repeated and every product is one batched matrix product
[rows, H] x [H, keys] over B and K.
"""

from __future__ import annotations

import math
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
    """How many queries and keys are handled at a time, and at most how many scores.

    `scores` bounds batch * heads * queries * keys of one step by looping over batch rows and key
    heads: on a CPU a step's scores must stay in the cache. None: all of them at once, which also
    keeps those axes free to be sharded.
    """

    q: int
    k: int
    scores: int | None = None


class Cut(NamedTuple):
    """The loop structure: `chunks` of [batch, heads], in each `nq` x `nk` blocks of bq x bk."""

    batch: int
    heads: int
    batch_chunks: int
    head_chunks: int
    nq: int
    bq: int
    nk: int
    bk: int
    group: int


class Places(NamedTuple):
    """Order indices [blocks, rows] and segments [blocks, batch, rows] of queries and keys."""

    q_index: jax.Array
    k_index: jax.Array
    q_segments: jax.Array | None
    k_segments: jax.Array | None


class Visits(NamedTuple):
    """Which key blocks each query block walks, by batch chunk (or one row for all of them).

    `order[c, i, :full[c, i]]` need no mask, `order[c, i, full[c, i]:seen[c, i]]` need one, the
    rest are invisible.
    """

    order: jax.Array
    full: jax.Array
    seen: jax.Array


def _even(length: int, block: int) -> tuple[int, int]:
    """Number and size of equal blocks of about `block`: without padding where nearly as good."""
    least = max(1, -(-length // block))
    exact = (n for n in range(least, least + least // 2 + 1) if length % n == 0)
    count = next(exact, least)
    return count, -(-length // count)


def _largest_divisor(n: int, most: int) -> int:
    return max(d for d in range(1, n + 1) if n % d == 0 and d <= max(1, most))


def _plan(q, k, blocks: Blocks) -> Cut:
    (b, t, n), (s, heads) = q.shape[:3], k.shape[1:3]
    (nq, bq), (nk, bk), group = _even(t, blocks.q), _even(s, blocks.k), n // heads
    batch, some = b, heads
    if blocks.scores is not None:
        fit = blocks.scores // (bq * group * bk)
        some = _largest_divisor(heads, fit)
        batch = _largest_divisor(b, fit // heads)
    return Cut(batch, some, b // batch, heads // some, nq, bq, nk, bk, group)


def _pad(x, length: int):
    return jnp.pad(x, [(0, 0), (0, length - x.shape[1])] + [(0, 0)] * (x.ndim - 2))


def _heads_first(x, cut: Cut):
    """[B, S, K, H] -> [B, K, S, H], padded to whole blocks."""
    return _pad(x, cut.nk * cut.bk).swapaxes(1, 2)


def _queries(x, cut: Cut, chunk, i):
    """Block i [batch, heads, bq * G, ...] of x [B, T, N, ...]."""
    heads, rest = cut.heads * cut.group, x.shape[3:]
    first = _chunk_start(cut, chunk, cut.group)
    first = (first[0], i * cut.bq, first[1], *(0,) * len(rest))
    x = lax.dynamic_slice(_wide(x), first, (cut.batch, cut.bq, heads, *rest))
    x = jnp.moveaxis(x.reshape(cut.batch, cut.bq, cut.heads, cut.group, *rest), 2, 1)
    return x.reshape(cut.batch, cut.heads, cut.bq * cut.group, *rest)


def _keys(x, cut: Cut, chunk, j):
    """Block j [batch, heads, bk, H] of x [B, K, S, H]."""
    first = (*_chunk_start(cut, chunk, 1), j * cut.bk, 0)
    return lax.dynamic_slice(_wide(x), first, (cut.batch, cut.heads, cut.bk, x.shape[3]))


def _chunk_start(cut: Cut, chunk, group: int):
    """First batch row and first head of a chunk."""
    row = chunk // cut.head_chunks * cut.batch
    return row, chunk % cut.head_chunks * cut.heads * group


def _wide(x):
    # Probabilities' cotangents may exceed float16's range.
    return x.astype(jnp.float32) if x.dtype == jnp.float16 else x


def _join(x, cut: Cut, length: int, group: int):
    """[chunks, blocks, batch, heads, rows * group, ...] -> [B, length, heads * group, ...]."""
    blocks, rows, rest = x.shape[1], x.shape[4] // group, x.shape[5:]
    x = x.reshape(
        cut.batch_chunks, cut.head_chunks, blocks, cut.batch, cut.heads, rows, group, *rest
    )
    x = jnp.moveaxis(x, (0, 3, 2, 5, 1, 4, 6), range(7))
    heads = cut.head_chunks * cut.heads * group
    return x.reshape(cut.batch_chunks * cut.batch, blocks * rows, heads, *rest)[:, :length]


def _places(q_index, k_index, q_segments, k_segments, t: int, s: int, cut: Cut) -> Places:
    # NumPy defaults make the block bounds constants of the program.
    q_index = np.arange(t, dtype=np.int32) if q_index is None else q_index
    k_index = np.arange(s, dtype=np.int32) if k_index is None else k_index
    if q_segments is None and cut.nk * cut.bk != s:
        # Padded keys are hidden as keys of segment 0.
        q_segments, k_segments = np.ones((1, t), np.int32), np.ones((1, s), np.int32)

    def blocks(x, count, size, **mode):
        if x is None:
            return None
        xp = np if isinstance(x, np.ndarray) else jnp
        pad = [(0, 0)] * (x.ndim - 1) + [(0, count * size - x.shape[-1])]
        x = xp.pad(x, pad, **mode)
        return xp.moveaxis(x.reshape(*x.shape[:-1], count, size), -2, 0)

    # Repeating the last place keeps block bounds tight; padded queries have zero cotangents and
    # are cut off again, so what they see does not matter.
    return Places(
        blocks(q_index, cut.nq, cut.bq, mode="edge"),
        blocks(k_index, cut.nk, cut.bk, mode="edge"),
        blocks(q_segments, cut.nq, cut.bq, mode="edge"),
        blocks(k_segments, cut.nk, cut.bk),
    )


def _segment_bounds(q, k, chunks: int):
    """(any, all) [chunks, nq, nk] of "same non-zero segment", q [nq, B, bq], k [nk, B, bk]."""
    xp = np if isinstance(q, np.ndarray) and isinstance(k, np.ndarray) else jnp
    info = np.iinfo(np.int32)

    def ends(x):  # of the segments other than padding
        return xp.where(x == 0, info.max, x).min(-1), xp.where(x == 0, info.min, x).max(-1)

    (q_lo, q_hi), (k_lo, k_hi) = ends(q), ends(k)
    q_lo, q_hi, k_lo, k_hi = q_lo[:, None], q_hi[:, None], k_lo[None], k_hi[None]
    some = (q_lo <= k_hi) & (k_lo <= q_hi)
    padded = (q == 0).any(-1)[:, None] | (k == 0).any(-1)[None]
    whole = (q_lo == k_hi) & (k_lo == q_hi) & (q_lo == q_hi) & ~padded

    def by_chunk(x):
        return xp.moveaxis(x.reshape(*x.shape[:2], chunks, -1), 2, 0)

    return by_chunk(some).any(-1), by_chunk(whole).all(-1)


def _visits(mask: Mask, places: Places, cut: Cut) -> Visits:
    q, k = places.q_index, places.k_index
    some, whole = mask.bounds(
        q.min(-1)[:, None], q.max(-1)[:, None], k.min(-1)[None], k.max(-1)[None]
    )
    some, whole = some[None], (whole & some)[None]
    if places.q_segments is not None:
        chunks = min(cut.batch_chunks, places.q_segments.shape[1])
        same, alike = _segment_bounds(places.q_segments, places.k_segments, chunks)
        some, whole = some & same, whole & alike
    xp = np if isinstance(some, np.ndarray) else jnp
    order = xp.argsort(2 - some.astype(np.int32) - whole, axis=-1, stable=True)
    counts = [xp.sum(x, -1).astype(np.int32) for x in (whole, some)]
    return Visits(*(jnp.asarray(x.astype(np.int32)) for x in (order, *counts)))


def _take(x, i):
    return lax.dynamic_index_in_dim(jnp.asarray(x), i, 0, keepdims=False)


def _visible(mask: Mask, places: Places, cut: Cut, chunk, i, j):
    """bool [batch or 1, 1, rows of the query block, rows of the key block]."""
    seen = mask.element(_take(places.q_index, i)[:, None], _take(places.k_index, j)[None, :])
    seen = jnp.asarray(seen)[None]
    if places.q_segments is not None:
        q, k = _take(places.q_segments, i), _take(places.k_segments, j)
        if q.shape[0] > cut.batch:
            start = chunk // cut.head_chunks * cut.batch
            q, k = (lax.dynamic_slice_in_dim(x, start, cut.batch) for x in (q, k))
        q, k = q[:, :, None], k[:, None, :]
        seen = seen & (q == k) & (k != 0)
    return jnp.repeat(seen, cut.group, axis=1)[:, None]


def _walk(visits: Visits, cut: Cut, chunk, i, step, carry):
    """Runs `carry = step(j, masked, carry)` over the key blocks that query block i sees."""
    row = chunk // cut.head_chunks if visits.order.shape[0] > 1 else 0
    order, full, seen = (_take(_take(x, row), i) for x in visits)

    def run(masked):
        return lambda n, carry: step(_take(order, n), masked, carry)

    return lax.fori_loop(full, seen, run(True), lax.fori_loop(0, full, run(False), carry))


def _dot(x, y, axis_x: int, axis_y: int):
    """Batched matrix product over the first two axes, accumulated in float32."""
    dims = (((axis_x + 2,), (axis_y + 2,)), ((0, 1), (0, 1)))
    return lax.dot_general(x, y, dims, preferred_element_type=jnp.float32)


def forward(q, k, v, q_index, k_index, q_segments, k_segments, *, mask, scale, blocks):
    """out [B, T, N, Hv] in q's dtype and lse float32 [B, T, N]."""
    cut, t, s = _plan(q, k, blocks), q.shape[1], k.shape[1]
    places = _places(q_index, k_index, q_segments, k_segments, t, s, cut)
    visits = _visits(mask, places, cut)
    # Scaling the queries saves a pass over the scores. In 16 bits only a power of two is exact.
    exact = q.dtype == jnp.float32 or math.frexp(scale)[0] == 0.5
    before, after = (scale, 1.0) if exact else (1.0, scale)
    q, k, v = _pad(q, cut.nq * cut.bq), _heads_first(k, cut), _heads_first(v, cut)

    def one(chunk, i):
        query = _queries(q, cut, chunk, i) * jnp.asarray(before, q.dtype)

        def step(j, masked, carry):
            top, total, out = carry
            logits = after * _dot(query, _keys(k, cut, chunk, j), 1, 1)
            if masked:
                logits = jnp.where(_visible(mask, places, cut, chunk, i, j), logits, -jnp.inf)
            new = jnp.maximum(top, jnp.max(logits, -1))
            keep = jnp.exp(top - new)
            p = jnp.exp(logits - new[..., None])
            value = _keys(v, cut, chunk, j)
            total = total * keep + jnp.sum(p, -1)
            out = out * keep[..., None] + _dot(p.astype(value.dtype), value, 1, 0)
            return new, total, out

        shape = query.shape[:3]
        start = (
            jnp.full(shape, LOWEST, jnp.float32),
            jnp.zeros(shape, jnp.float32),
            jnp.zeros((*shape, v.shape[3]), jnp.float32),
        )
        top, total, out = _walk(visits, cut, chunk, i, step, start)
        some = total > 0
        safe = jnp.where(some, total, 1.0)
        lse = jnp.where(some, top + jnp.log(safe), -jnp.inf)
        return (out / safe[..., None]).astype(q.dtype), lse

    chunks, rows = jnp.arange(cut.batch_chunks * cut.head_chunks), jnp.arange(cut.nq)
    out, lse = lax.map(lambda c: lax.map(lambda i: one(c, i), rows), chunks)
    return _join(out, cut, t, cut.group), _join(lse, cut, t, cut.group)


def backward(
    q,
    k,
    v,
    out,
    lse,
    d_out,
    d_lse,
    q_index,
    k_index,
    q_segments,
    k_segments,
    *,
    mask,
    scale,
    blocks,
):
    """Cotangents of q, k, v. That of lse enters through `di = rowsum(out * d_out) - d_lse`.

    Scores are held key-major, [.., keys, queries]: then four of the five products read their
    operands as they lie in memory and only that of dq needs a transposed operand, a small one.
    Query-major has two such products, over the large operand.
    """
    cut, t, s = _plan(q, k, blocks), q.shape[1], k.shape[1]
    places = _places(q_index, k_index, q_segments, k_segments, t, s, cut)
    visits = _visits(mask, places, cut)
    di = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), -1) - d_lse
    # An empty row is masked everywhere; any finite lse keeps its probabilities finite until then.
    lse = jnp.where(jnp.isfinite(lse), lse, 0.0)
    dtypes = q.dtype, k.dtype, v.dtype
    q, d_out, lse, di = (_pad(x, cut.nq * cut.bq) for x in (q, d_out, lse, di))
    k, v = _heads_first(k, cut), _heads_first(v, cut)

    def one(chunk, sums, i):
        query, do, row_lse, row_di = (_queries(x, cut, chunk, i) for x in (q, d_out, lse, di))
        row_lse, row_di = row_lse[:, :, None, :], row_di[:, :, None, :]

        def step(j, masked, carry):
            dqt, dk, dv = carry
            key = _keys(k, cut, chunk, j)
            p = jnp.exp(scale * _dot(key, query, 1, 1) - row_lse)
            if masked:
                p = jnp.where(_visible(mask, places, cut, chunk, i, j).mT, p, 0.0)
            dp = _dot(_keys(v, cut, chunk, j), do, 1, 1)
            ds = (p * (dp - row_di)).astype(key.dtype)
            dqt = dqt + _dot(key.mT, ds, 1, 0)
            return (
                dqt,
                _add(dk, j, _dot(ds, query, 1, 0)),
                _add(dv, j, _dot(p.astype(do.dtype), do, 1, 0)),
            )

        zero = jnp.zeros((cut.batch, cut.heads, q.shape[3], query.shape[2]), jnp.float32)
        dqt, *sums = _walk(visits, cut, chunk, i, step, (zero, *sums))
        return tuple(sums), (scale * dqt.mT).astype(dtypes[0])

    def all_rows(chunk):
        shape = (cut.nk, cut.batch, cut.heads, cut.bk)
        sums = tuple(jnp.zeros((*shape, x.shape[3]), jnp.float32) for x in (k, v))
        (dk, dv), dq = lax.scan(lambda sums, i: one(chunk, sums, i), sums, jnp.arange(cut.nq))
        return dq, (scale * dk).astype(dtypes[1]), dv.astype(dtypes[2])

    dq, dk, dv = lax.map(all_rows, jnp.arange(cut.batch_chunks * cut.head_chunks))
    return _join(dq, cut, t, cut.group), _join(dk, cut, s, 1), _join(dv, cut, s, 1)


def _add(sums, j, update):
    return lax.dynamic_update_index_in_dim(sums, _take(sums, j) + update, j, 0)
