"""Attention over the few keys of a pass that every query chooses, head by head."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from lcjax.attention.partial import moved_bias, rotate_both
from lcjax.rope.base import Rotation
from pallas_kernels import gather

if TYPE_CHECKING:
    from lcjax.attention.base import Pass, Places


def best_keys(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    step: Pass,
    rotation: Rotation,
    places: Places,
    count: int,
) -> tuple[jax.Array, jax.Array]:
    """(out [B, T, N, Hv], lse float32 [B, T, N]) of a pass, over its `count` greatest logits.

    A query for which the pass has fewer keys sees none of them. q and k are unrotated. The choice
    has no gradient; the logits of what is chosen have theirs.
    """
    q, k = rotate_both(q, k, step, rotation, keys_rotated=False)
    _, shift = moved_bias(step, places)
    pairs = (places.q_order, q), (places.k_order, k)
    orders = [jnp.broadcast_to(order, x.shape[:2]) for order, x in pairs]
    segments = [
        jnp.ones(x.shape[:2], jnp.int32) if given is None else given
        for given, x in ((places.q_segments, q), (places.k_segments, k))
    ]

    def of_query(x):
        query, order, segment = x  # [B, N, H], [B], [B]
        seen = step.mask.element(order[:, None], orders[1])
        seen = seen & (segments[1] == segment[:, None]) & (segment != 0)[:, None]
        enough = (seen.sum(-1) >= count)[:, None]
        slots = _chosen(query, k, seen, count)
        keys, values = (gather.tokens(x, slots[:, :, None])[:, :, 0] for x in (k, v))
        out, lse = _softmax(query, keys, values)
        return jnp.where(enough[..., None], out, 0), jnp.where(enough, lse, -jnp.inf)

    elements = q.shape[0] * q.shape[2] * (k.shape[1] + count * (k.shape[3] + v.shape[3]))
    out, lse = gather.by_query(of_query, (q, orders[0], segments[0]), elements)
    return out, lse if shift is None else lse + shift


def _chosen(query: jax.Array, k: jax.Array, seen: jax.Array, count: int) -> jax.Array:
    """int32 [B, N, count]: the slots of the best keys of query [B, N, H] in k [B, S, K, H]."""
    query, k = (lax.stop_gradient(x) for x in (query, k))
    marks = gather.scores(query[:, None], k)[:, 0]
    _, slots = lax.top_k(jnp.where(seen[:, None], marks, -jnp.inf), count)
    return slots


def _softmax(query: jax.Array, keys: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The partial of query [B, N, H] over keys and values [B, N, M, H]."""
    precision = lax.Precision.HIGHEST if query.dtype == jnp.float32 else None
    sums = {"precision": precision, "preferred_element_type": jnp.float32}
    logits = query.shape[-1] ** -0.5 * jnp.einsum("BNH,BNMH->BNM", query, keys, **sums)
    lse = jax.nn.logsumexp(logits, -1)
    p = jnp.exp(logits - lse[..., None])
    out = jnp.einsum("BNM,BNMH->BNH", p.astype(values.dtype), values, **sums)
    return out.astype(query.dtype), lse
