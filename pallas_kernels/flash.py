"""Attention as a partial that can be merged: the output and the log-sum-exp of its logits."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels import _xla, reference
from pallas_kernels.masks import Mask, everything

IMPLEMENTATIONS = ("xla", "reference")
CPU_SCORES = 5 * 2**18  # 5 MB of float32: a step's scores and probabilities share the L3 cache


def flash(
    q,
    k,
    v,
    mask: Mask | None = None,
    *,
    scale: float | None = None,
    q_index=None,
    k_index=None,
    q_segments=None,
    k_segments=None,
    implementation: str | None = None,
):
    """softmax(scale q k^T) v over visible keys, and the log-sum-exp of their logits.

    q [B, T, N, H], k [B, S, K, H], v [B, S, K, Hv] with N a multiple of K. Returns out
    [B, T, N, Hv] in q's dtype and lse float32 [B, T, N], both differentiable. A query that sees no
    key gets out 0, lse -inf and zero gradients. Softmax and sums are float32 for every input dtype.

    mask: tests order indices (`pallas_kernels.masks`); None shows everything.
    scale: None means H ** -0.5.
    q_index [T], k_index [S]: integer places of queries and keys in the text, by default 0, 1, ...;
        they may be traced (a decoding step passes offset + arange(T)).
    q_segments int [B, T], k_segments int [B, S]: keys are seen only inside the same segment;
        segment 0 is padding, which sees nothing and is seen by nobody.
    implementation: "xla", "reference", or None for the best one on this backend.
    """
    _check(q, k, v, q_index, k_index, q_segments, k_segments)
    mask = everything() if mask is None else mask
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    name = "xla" if implementation is None else implementation
    places = (q_index, k_index, q_segments, k_segments)
    if name == "xla":
        return _blockwise(q, k, v, places, mask, scale)
    if name == "reference":
        return reference.attention(q, k, v, *places, mask=mask, scale=scale)
    raise ValueError(
        f"flash(implementation={name!r}): unknown; choose one of {', '.join(IMPLEMENTATIONS)}"
    )


def merge(partials: Sequence[tuple[jax.Array, jax.Array]]):
    """Merges attentions over disjoint sets of keys into the attention over their union.

    lse = log sum_a exp(lse_a), out = sum_a exp(lse_a - lse) out_a: exact, and differentiable in
    every out_a and lse_a. Partials are (out [B, T, N, Hv], lse [B, T, N]); a row that is empty in
    all of them stays out 0, lse -inf.
    """
    if not partials:
        raise ValueError("merge([]): at least one (out, lse) is needed")
    outs, lses = zip(*partials, strict=True)
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _blockwise(q, k, v, places, mask, scale):
    arrays = (q, k, v, *places)
    return _on_platform(_xla.forward, _forward_blocks, arrays, mask, scale)


def _blockwise_forward(q, k, v, places, mask, scale):
    out, lse = _blockwise(q, k, v, places, mask, scale)
    return (out, lse), (q, k, v, places, out, lse)


def _blockwise_backward(mask, scale, saved, cotangents):
    q, k, v, places, out, lse = saved
    arrays = (q, k, v, out, lse, *cotangents, *places)
    return *_on_platform(_xla.backward, _backward_blocks, arrays, mask, scale), None


_blockwise.defvjp(_blockwise_forward, _blockwise_backward)


# Compiled once per shape also when called outside jit, and traced once for all layers of a model.
@functools.partial(jax.jit, static_argnames=("run", "blocks", "mask", "scale"))
def _on_platform(run, blocks, arrays, mask, scale):
    """`run` with the blocks of the platform it is lowered for, which need not be this machine's."""
    lengths = arrays[0].shape[1], arrays[1].shape[1]
    cpu, other = (
        functools.partial(run, mask=mask, scale=scale, blocks=blocks(*lengths, on_cpu=on_cpu))
        for on_cpu in (True, False)
    )
    return jax.lax.platform_dependent(*arrays, cpu=cpu, default=other)


def _forward_blocks(queries: int, keys: int, *, on_cpu: bool) -> _xla.Blocks:
    """Block sizes: large enough to keep the matrix units busy, small enough to skip and to cache.

    A CPU keeps the scores of one step in its cache; the limits are measured
    (benchmarks/attention_cpu.py). Few queries (decoding) make few scores, so their key blocks are
    longer: fewer steps, and still only the part of a cache that is visible is read.
    """
    if not on_cpu:
        return _xla.Blocks(q=512, k=1024)
    if queries <= 64:
        return _xla.Blocks(q=64, k=1024, scores=CPU_SCORES)
    size = 256 if keys <= 2048 else 512  # the diagonal's masked half weighs less when longer
    return _xla.Blocks(q=size, k=size, scores=CPU_SCORES)


def _backward_blocks(queries: int, keys: int, *, on_cpu: bool) -> _xla.Blocks:
    """As forward; the backward pass holds twice the scores, so its blocks are smaller."""
    if not on_cpu:
        return _xla.Blocks(q=512, k=512)
    return _xla.Blocks(q=256, k=256, scores=CPU_SCORES)


def _check(q, k, v, q_index, k_index, q_segments, k_segments):
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise ValueError(
            "flash: q, k, v must be [batch, length, heads, size]; "
            f"got {q.shape}, {k.shape}, {v.shape}"
        )
    (b, t, n, h), (s, heads) = q.shape, k.shape[1:3]
    if k.shape[0] != b or k.shape[3] != h or v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"flash: q {q.shape}, k {k.shape}, v {v.shape}: k must share q's batch and head size, "
            "v must share k's batch, length and heads"
        )
    if n % heads:
        raise ValueError(f"flash: {n} query heads must be a multiple of {heads} key heads")
    if (q_segments is None) != (k_segments is None):
        raise ValueError("flash: give both q_segments and k_segments, or neither")
    for name, x, shape in (
        ("q_index", q_index, (t,)),
        ("k_index", k_index, (s,)),
        ("q_segments", q_segments, (b, t)),
        ("k_segments", k_segments, (b, s)),
    ):
        if x is not None and jnp.shape(x) != shape:
            raise ValueError(f"flash: {name} has shape {jnp.shape(x)}, must be {shape}")
