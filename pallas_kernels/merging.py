"""Attentions over parts of the keys, merged by their log-sum-exp."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def merge(partials: Sequence[tuple[jax.Array, jax.Array]]):
    """Merges attentions over disjoint sets of keys into the attention over their union.

    lse = log sum_a exp(lse_a), out = sum_a exp(lse_a - lse) out_a: exact, and differentiable in
    every out_a and lse_a. Partials are (out [B, T, N, Hv], lse [B, T, N]); a row that is empty in
    all of them stays out 0, lse -inf.
    """
    if not partials:
        raise ValueError("merge([]): at least one (out, lse) is needed")
    if any(len(x) != 2 or x[1].shape != x[0].shape[:-1] for x in partials):
        raise ValueError("merge: give a list of pairs (out [..., Hv], lse [...])")
    outs, lses = zip(*partials, strict=True)
    if len({x.shape for x in outs}) > 1:
        raise ValueError(f"merge: outputs of one shape are needed; got {[x.shape for x in outs]}")
    lses = jnp.stack([x.astype(jnp.float32) for x in lses])
    top = jnp.max(lses, 0)
    some = top > -jnp.inf
    top = jax.lax.stop_gradient(jnp.where(some, top, 0.0))
    # exp(-inf - finite) is 0 with gradient 0, so empty partials need no special case.
    weights = jnp.exp(lses - top)
    total = jnp.where(some, jnp.sum(weights, 0), 1.0)
    mixed = sum(w[..., None] * x.astype(jnp.float32) for w, x in zip(weights, outs, strict=True))
    out = (mixed / total[..., None]).astype(outs[0].dtype)
    return out, jnp.where(some, top + jnp.log(total), -jnp.inf)


def with_sinks(out, lse, sinks):
    """Adds a learned logit per head to the denominator: merges with the partial (0, sinks).

    Attention that may look at nothing (gpt-oss, OpenAI 2025; with sinks 0 StreamingLLM's zero
    sink, arXiv 2309.17453, sec. 3.3). sinks [N].
    """
    total = jnp.logaddexp(lse, sinks.astype(jnp.float32))
    kept = jnp.exp(lse - jnp.where(total > -jnp.inf, total, 0.0))
    return (out.astype(jnp.float32) * kept[..., None]).astype(out.dtype), total
