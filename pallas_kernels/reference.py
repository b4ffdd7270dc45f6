"""Dense float32 attention: the specification that every fast implementation is tested against."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import key_bits as bits
from pallas_kernels.masks import Mask, by_heads
from pallas_kernels.tables import BlockTable, namespace


def expand(table: BlockTable, queries: int, keys: int):
    """Returns which pairs of a query and a key the table lists, bool [b, h, T, S]."""
    nk = -(-keys // table.k_block)
    # Entries that are not listed only repeat the last block of their list.
    chosen = table.index[..., None] == np.arange(nk, dtype=np.int32)
    blocks = (chosen & table.listed[..., None]).any(-2)
    xp = namespace(blocks)
    tokens = xp.repeat(xp.repeat(blocks, table.q_block, 2), table.k_block, 3)
    return tokens[:, :, :queries, :keys]


def visibility(
    mask: Mask, q_index, k_index, q_segments=None, k_segments=None, *, heads: int = 1, table=None
) -> jax.Array:
    """Returns the attention mask, bool [1 or B, 1 or N, T, S]: mask, segments and listed blocks.

    q_index [T] or [B, T], k_index [S] or [B, S]. The axis of heads has N = `heads` entries where
    the mask or the table differ by head, else 1.
    """
    q, k = (jnp.atleast_2d(x) for x in (q_index, k_index))
    q, k = q[:, :, None], k[:, None, :]
    parts = by_heads(mask, heads)
    seen = [jnp.asarray(part.element(q, k))[:, None] for part, _ in parts]
    if len(parts) > 1:
        counts = [count for _, count in parts]
        seen = [jnp.repeat(x, count, 1) for x, count in zip(seen, counts, strict=True)]
    seen = jnp.concatenate(seen, 1)
    if q_segments is not None:
        q_segments, k_segments = jnp.asarray(q_segments), jnp.asarray(k_segments)
        same = q_segments[:, :, None] == k_segments[:, None, :]
        seen = seen & (same & (k_segments != 0)[:, None, :])[:, None]
    if table is not None:
        listed = expand(table, q.shape[1], k.shape[2])
        if listed.shape[1] > 1:
            listed = jnp.repeat(listed, heads // listed.shape[1], 1)
        seen = seen & listed
    return seen


def attention(
    q,
    k,
    v,
    q_index=None,
    k_index=None,
    q_segments=None,
    k_segments=None,
    *,
    mask: Mask,
    scale: float,
    soft_cap: float | None = None,
    bias=None,
    sinks=None,
    table: BlockTable | None = None,
    key_bits=None,
):
    """Returns softmax(cap(scale q k^T) + bias) v over visible keys, and the logits' log-sum-exp.

    cap(x) = soft_cap tanh(x / soft_cap).

    Args:
      bias: float [N, T, S] or [B, N, T, S]; or a function of (q_index [1 or B, T], k_index) that
        returns it; or an object with such a method `logits`.
      sinks: [N] logits that only add to the denominator (and to lse).
      table: hides all blocks that it does not list, in addition to the mask; if it overflowed, all
        results are NaN.
      key_bits: as in `flash`.

    Returns:
      out [B, T, N, Hv] in q's dtype and lse float32 [B, T, N]. A query that sees no key gets out 0,
      lse -inf and zero gradients. Memory is O(T S): for tests and small inputs.
    """
    t, heads, s = q.shape[1], q.shape[2], k.shape[1]
    q_index = jnp.arange(t) if q_index is None else q_index
    k_index = jnp.arange(s) if k_index is None else k_index
    logits = scale * products("BTNH,BSNH->BNTS", q, _every_head(k, heads))
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    if bias is not None:
        bias = getattr(bias, "logits", bias)
        indices = (jnp.atleast_2d(x) for x in (q_index, k_index))
        logits = logits + (bias(*indices) if callable(bias) else bias)
    positions = q_index, k_index, q_segments, k_segments
    seen = visibility(mask, *positions, heads=heads, table=table)
    if key_bits is not None:
        seen = seen & bits.unpack(key_bits)[:, None, :, :s]
    weights, lse = _softmax(logits, seen, sinks)
    out = products("BNTS,BSNH->BTNH", weights, _every_head(v, heads)).astype(q.dtype)
    lse = lse.swapaxes(1, 2)
    if table is None or table.overflow is None:
        return out, lse
    return tuple(jnp.where(table.overflow, jnp.nan, x).astype(x.dtype) for x in (out, lse))


def _every_head(x, heads: int):
    """[B, S, K, H] -> [B, S, N, H]: query head n reads key head n // (N / K)."""
    return jnp.repeat(x, heads // x.shape[2], 2)


def products(formula: str, x, y):
    """Returns the einsum of x and y, computed in float32 with full precision."""
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return jnp.einsum(formula, x, y, precision=jax.lax.Precision.HIGHEST)


def _softmax(logits, seen, sinks):
    """Returns the weights [B, N, T, S] of the keys that are seen, and the log-sum-exp [B, N, T]."""
    top = jnp.max(jnp.where(seen, logits, -jnp.inf), -1, keepdims=True)
    if sinks is not None:
        sinks = jnp.asarray(sinks, jnp.float32)[:, None, None]
        top = jnp.maximum(top, sinks)
    has_keys = top > -jnp.inf
    # The maximum is a constant shift without a gradient. Rows that see no key need a finite one.
    top = jax.lax.stop_gradient(jnp.where(has_keys, top, 0.0))
    p = jnp.where(seen, jnp.exp(jnp.where(seen, logits - top, 0.0)), 0.0)
    total = jnp.sum(p, -1, keepdims=True)
    total = total if sinks is None else total + jnp.exp(sinks - top)
    total = jnp.where(has_keys, total, 1.0)
    return p / total, jnp.where(has_keys, jnp.log(total) + top, -jnp.inf)[..., 0]
