"""What all backends do around a running softmax (Milakov and Gimelshein 2018), in one place."""

from __future__ import annotations

import math

import jax.numpy as jnp

# Start of the running maximum. Finite, so that rows without a visible key so far never compute
# inf - inf; far below any logit, so that it never decides a maximum.
LOWEST = -1e28


def scales(scale: float, dtype) -> tuple[float, float]:
    """(factor of the queries, factor of the scores) that make up `scale`.

    Scaling the queries saves a pass over the scores. In 16 bits only a power of two is exact.
    """
    exact = dtype == jnp.float32 or math.frexp(scale)[0] == 0.5
    return (scale, 1.0) if exact else (1.0, scale)


def start(rows: tuple[int, ...], size: int):
    """(maximum, denominator, weighted values) before the first key: float32 [*rows] and values'."""
    zeros = jnp.zeros(rows, jnp.float32)
    return zeros + LOWEST, zeros, jnp.zeros((*rows, size), jnp.float32)


def finish(top, total, out, dtype):
    """(out in dtype, lse) after the last key; 0 and -inf where no key was seen."""
    some = total > 0
    safe = jnp.where(some, total, 1.0)
    lse = jnp.where(some, top + jnp.log(safe), -jnp.inf)
    return (out / safe[..., None]).astype(dtype), lse


def row_cotangent(out, d_out, d_lse):
    """di float32 [B, T, N]: what every logit's cotangent has subtracted, that of lse included."""
    di = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), -1)
    return di if d_lse is None else di - d_lse


def mixed_dtypes(q, k, v) -> str | None:
    """Why kernels that take float32 or bfloat16 alone cannot take these, or None."""
    dtypes = {str(x.dtype) for x in (q, k, v)}
    if dtypes in ({"float32"}, {"bfloat16"}):
        return None
    found = ", ".join(sorted(dtypes))
    return f"q, k and v must all be float32 or all bfloat16, they are {found}"
