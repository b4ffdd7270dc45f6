"""Running softmax (Milakov and Gimelshein 2018), and partial attentions merged by log-sum-exp."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Float

# Start of the running maximum. Finite, so that rows without a visible key so far never compute
# inf - inf; far below any logit, so that it never decides a maximum.
LOWEST = -1e28


def merge(
    partials: Sequence[tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]],
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
    """Merges attentions over disjoint sets of keys into the attention over their union.

    lse = log sum_a exp(lse_a), out = sum_a exp(lse_a - lse) out_a: exact, and differentiable in
    every out_a and lse_a. A row that is empty in all of them keeps out 0 and lse -inf.
    """
    if not partials:
        raise ValueError("merge([]): at least one (out, lse) is needed")
    if any(len(x) != 2 or x[1].shape != x[0].shape[:-1] for x in partials):
        raise ValueError("merge: give a list of pairs (out [..., Hv], lse [...])")
    outs, lses = zip(*partials, strict=True)
    if len({x.shape for x in outs}) > 1:
        raise ValueError(f"merge: outputs of one shape are needed; got {[x.shape for x in outs]}")
    weights, total, lse = _weights(jnp.stack(lses))
    mixed = sum(w[..., None] * x.astype(jnp.float32) for w, x in zip(weights, outs, strict=True))
    return (mixed / total[..., None]).astype(outs[0].dtype), lse


def merge_parts(
    outs: Float[Array, "P B T N Hv"], lses: Float[Array, "P B T N"]
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
    """Returns `merge` of stacked parts: XLA compiles one sum, not a kernel for each part."""
    if len(outs) == 1:
        return outs[0], lses[0]
    weights, total, lse = _weights(lses)
    mixed = jnp.sum(weights[..., None] * outs.astype(jnp.float32), 0)
    return (mixed / total[..., None]).astype(outs.dtype), lse


def _weights(lses):
    """Returns the parts' weights [P, ...], their denominator (never 0), and the union's lse."""
    lses = lses.astype(jnp.float32)
    top = jnp.max(lses, 0)
    some = top > -jnp.inf
    top = jax.lax.stop_gradient(jnp.where(some, top, 0.0))
    # exp(-inf - finite) is 0 with gradient 0, so empty partials need no special case.
    weights = jnp.exp(lses - top)
    total = jnp.where(some, jnp.sum(weights, 0), 1.0)
    return weights, total, jnp.where(some, top + jnp.log(total), -jnp.inf)


def with_sinks(out, lse, sinks):
    """Merges with the partial (0, sinks [N]): adds a learned logit per head to the denominator.

    With sinks a query may attend to nothing (gpt-oss, OpenAI 2025; sinks of 0 are StreamingLLM's
    zero sink, arXiv 2309.17453, sec. 3.3).
    """
    total = jnp.logaddexp(lse, sinks.astype(jnp.float32))
    share = jnp.exp(lse - jnp.where(total > -jnp.inf, total, 0.0))
    return (out.astype(jnp.float32) * share[..., None]).astype(out.dtype), total


def scales(scale: float, dtype) -> tuple[float, float]:
    """Returns a factor of the queries and one of the scores, whose product is `scale`.

    Scaling the queries saves a pass over the scores. In 16 bits this is exact only for a power of
    two; other scales apply to the scores.
    """
    exact = dtype == jnp.float32 or math.frexp(scale)[0] == 0.5
    return (scale, 1.0) if exact else (1.0, scale)


def start(rows: tuple[int, ...], size: int):
    """Returns (maximum, denominator, weighted values) before the first key, in float32."""
    zeros = jnp.zeros(rows, jnp.float32)
    return zeros + LOWEST, zeros, jnp.zeros((*rows, size), jnp.float32)


def finish(top, total, out, dtype):
    """Returns (out in dtype, lse) after the last key; 0 and -inf where no key was seen."""
    some = total > 0
    safe = jnp.where(some, total, 1.0)
    lse = jnp.where(some, top + jnp.log(safe), -jnp.inf)
    return (out / safe[..., None]).astype(dtype), lse


def row_cotangent(out, d_out, d_lse):
    """Returns di = rowsum(out * d_out) - d_lse, float32 [B, T, N].

    The cotangent of a row's logits is p (d_out v^T - di).
    """
    di = sum_of_products(out.astype(jnp.float32), d_out.astype(jnp.float32))
    return di if d_lse is None else di - d_lse


def sum_of_products(x, y):
    """Returns the sum of x * y over the last axis.

    XLA for CPUs (jax 0.10.2) takes 7 to 50 times as long for it if the first axis is 1.
    """
    if len(x) == 1:
        return jnp.sum(x.squeeze(0) * y.squeeze(0), -1)[None]
    return jnp.sum(x * y, -1)
