"""Dense float32 attention: the specification that every fast implementation is tested against."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.masks import Mask


def visibility(mask: Mask, q_index, k_index, q_segments=None, k_segments=None) -> jax.Array:
    """Who sees whom, bool [B or 1, T, S]: the mask, and the same non-zero segment."""
    seen = jnp.asarray(mask.element(q_index[:, None], k_index[None, :]))[None]
    if q_segments is not None:
        same = q_segments[:, :, None] == k_segments[:, None, :]
        seen = seen & same & (k_segments != 0)[:, None, :]
    return seen


def attention(q, k, v, q_index, k_index, q_segments, k_segments, *, mask, scale):
    """softmax(scale q k^T) v over the visible keys, and the logarithm of its denominator.

    Returns out [B, T, N, Hv] in q's dtype and lse float32 [B, T, N]. A query that sees no key gets
    out 0, lse -inf and zero gradients. Memory is O(T S): for tests and small inputs.
    """
    b, t, n, h = q.shape
    kv_heads = k.shape[2]
    q_index = jnp.arange(t) if q_index is None else q_index
    k_index = jnp.arange(k.shape[1]) if k_index is None else k_index
    grouped = q.reshape(b, t, kv_heads, n // kv_heads, h).astype(jnp.float32) * scale
    logits = jnp.einsum(
        "BTKGH,BSKH->BTKGS", grouped, k.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
    )
    seen = visibility(mask, q_index, k_index, q_segments, k_segments)[:, :, None, None, :]
    top = jnp.max(jnp.where(seen, logits, -jnp.inf), -1, keepdims=True)
    some = top > -jnp.inf
    # The maximum is a constant shift: no gradient. Where nothing is seen it must stay finite.
    top = jax.lax.stop_gradient(jnp.where(some, top, 0.0))
    p = jnp.where(seen, jnp.exp(jnp.where(seen, logits - top, 0.0)), 0.0)
    total = jnp.where(some, jnp.sum(p, -1, keepdims=True), 1.0)
    out = jnp.einsum(
        "BTKGS,BSKH->BTKGH",
        p / total,
        v.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )
    lse = jnp.where(some, jnp.log(total) + top, -jnp.inf)[..., 0]
    return out.reshape(b, t, n, v.shape[-1]).astype(q.dtype), lse.reshape(b, t, n)
