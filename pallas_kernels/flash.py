"""Attention as a partial that can be merged: the output and the log-sum-exp of its logits.

`flash` is the public function and holds the one gradient rule of all backends. What a backend is
given and must answer (`forward`, `backward`, `unsupported` over `Operands` and `Spec`), and how one
is chosen, is written in `pallas_kernels/dispatch.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values

from pallas_kernels import dispatch, reference
from pallas_kernels._checks import (
    check_arrays,
    check_mask,
    check_options,
    check_places,
    check_scale,
)
from pallas_kernels._meshes import on_any_mesh
from pallas_kernels.biases import Bias, of_heads
from pallas_kernels.block_table import BlockTable
from pallas_kernels.dispatch import Constant, Operands, Spec
from pallas_kernels.masks import Mask, by_heads, everything
from pallas_kernels.merging import with_sinks
from pallas_kernels.sharded import Layout, over_mesh


@on_any_mesh
def flash(
    q,
    k,
    v,
    mask: Mask | None = None,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    bias: Bias | None = None,
    sinks=None,
    table: BlockTable | None = None,
    q_index=None,
    k_index=None,
    q_segments=None,
    k_segments=None,
    k_lengths=None,
    splits: int | None = None,
    layout: Layout | None = None,
    implementation: str | None = None,
):
    """softmax(cap(scale q k^T) + bias) v over visible keys, and the log-sum-exp of their logits.

    q [B, T, N, H], k [B, S, K, H], v [B, S, K, Hv] with N a multiple of K. Returns out
    [B, T, N, Hv] in q's dtype and lse float32 [B, T, N]; both are differentiable in q, k, v, the
    bias and the sinks, once and in reverse: forward mode (`jax.jvp`, `jax.jacfwd`, `jax.hessian`)
    is not supported. A query that sees no key gets out 0, lse -inf and zero gradients. Softmax and
    sums are float32 for every input dtype.

    mask: tests order indices (`pallas_kernels.masks`), for all heads or per head; None shows all.
    scale: None means H ** -0.5.
    soft_cap: logits become soft_cap tanh(logit / soft_cap), before the bias and the mask.
    bias: `Alibi` or `RelativeBias`, a function of k_index - q_index.
    sinks [N]: learned logits that only add to the denominator (and to lse).
    table: a `BlockTable`: only the blocks it lists are visible, on top of the mask; calling a block
        full is a promise that the mask shows all of it. NumPy tables are part of the compiled
        program. Where a traced table overflowed its capacity, everything returned is NaN.
    q_index [T] or [B, T], k_index [S] or [B, S]: integer places of queries and keys in the text, by
        default 0, 1, ...; they may be traced (a decoding step passes offset + arange(T)).
    q_segments int [B, T], k_segments int [B, S]: keys are seen only inside the same segment;
        segment 0 is padding, which sees nothing and is seen by nobody.
    k_lengths int [B]: only that many first keys of a row are there.
    splits: see `pallas_kernels.decode`.
    layout: a `Layout`: over which axes of a mesh rows, heads and the length are split, and whether
        a length that is cut is put together by a ring or an all-to-all exchange
        (`pallas_kernels.sharded`). None leaves it to the compiler, which cannot split kernels.
    implementation: a name of `pallas_kernels.dispatch.BACKENDS`, "reference" (dense, for tests), or
        None for the platform's own: on GPUs what was measured to be right and fastest there
        (`pallas_kernels.measured`; `explain` says which, and why).

    Axes of a mesh may be Auto or Explicit; inside `jax.shard_map` give that check_vma=False.

    Raises:
      TypeError: q, k or v not floating, places not integers, a mask, bias or table that is none, a
        traced scale.
      ValueError: shapes that do not belong together, and options that cannot be.
    """
    check_arrays("flash", q, k, v)
    check_places("flash", q, k, q_index, k_index, q_segments, k_segments, k_lengths)
    check_mask("flash", mask)
    check_scale("flash", scale)
    check_options("flash", q, k, soft_cap, bias, sinks, table, splits)
    q_segments, k_segments = _with_lengths(q, k, q_segments, k_segments, k_lengths)
    mask = everything() if mask is None else mask
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    soft_cap = None if soft_cap is None else float(soft_cap)
    if 0 in (*q.shape[:2], k.shape[1]):
        out, lse = _of_nothing(q, v)
        return (out, lse) if sinks is None else with_sinks(out, lse, sinks)
    places = _rows(q_index), _rows(k_index), q_segments, k_segments
    if implementation == dispatch.REFERENCE:
        options = dict(soft_cap=soft_cap, bias=bias, sinks=sinks, table=table)
        return reference.attention(q, k, v, *places, mask=mask, scale=scale, **options)
    static = table is not None and table.static
    operands = Operands(*places, bias, None if static else table)
    spec = Spec(mask, scale, soft_cap, Constant(table) if static else None, splits)
    if layout is None:
        attention = functools.partial(_attention, implementation)
        out, lse = _by_heads(attention, q, k, v, operands, spec)
    else:
        out, lse = over_mesh(_by_heads, q, k, v, operands, spec, implementation, layout)
    if table is not None and table.overflow is not None:
        out, lse = (jnp.where(table.overflow, jnp.nan, x).astype(x.dtype) for x in (out, lse))
    return (out, lse) if sinks is None else with_sinks(out, lse, sinks)


def _rows(index):
    """[T] or [B, T] -> [1 or B, T]."""
    return None if index is None else jnp.atleast_2d(jnp.asarray(index, jnp.int32))


def _of_nothing(q, v):
    """Attention without a row, a query or a key: no backend has a block of size 0."""
    shape = q.shape[:3]
    return jnp.zeros((*shape, v.shape[3]), q.dtype), jnp.full(shape, -jnp.inf, jnp.float32)


def _with_lengths(q, k, q_segments, k_segments, k_lengths):
    """int32 segments, in which keys from k_lengths on are padding."""
    if q_segments is None and k_lengths is None:
        return None, None
    if q_segments is None:
        q_segments, k_segments = (jnp.ones(x.shape[:2], jnp.int32) for x in (q, k))
    q_segments, k_segments = (jnp.asarray(x, jnp.int32) for x in (q_segments, k_segments))
    if k_lengths is None:
        return q_segments, k_segments
    there = jnp.arange(k.shape[1]) < jnp.asarray(k_lengths)[:, None]
    return q_segments, jnp.where(there, k_segments, 0)


def _by_heads(attention: Callable, q, k, v, operands: Operands, spec: Spec):
    """Attention whose mask differs by heads: one call for each run of heads that share a mask."""
    heads, group = q.shape[2], q.shape[2] // k.shape[2]
    parts, start = [], 0
    for mask, count in by_heads(spec.mask, heads):
        while count:
            # Whole groups of queries that share a key head, or a part of one group.
            some = min(count, group - start % group)
            if start % group == 0 and count >= group:
                some = count - count % group
            parts.append((mask, start, some))
            start, count = start + some, count - some
    if len(parts) == 1:
        return attention(q, k, v, operands, spec)
    results = [attention(*_of_heads(q, k, v, operands, spec, *part)) for part in parts]
    out, lse = (jnp.concatenate(x, 2) for x in zip(*results, strict=True))
    return out, lse


def _of_heads(q, k, v, operands: Operands, spec: Spec, mask: Mask, start: int, count: int):
    """(q, k, v, operands, spec) of `count` query heads from `start` on."""
    key_heads, group = k.shape[2], q.shape[2] // k.shape[2]
    first, some = start // group, -(-count // group)

    def cut(table):
        if table is None or table.seen.shape[1] == 1:
            return table
        if table.seen.shape[1] == key_heads:
            return table.heads(lambda x: x[:, first : first + some])
        return table.heads(lambda x: x[:, start : start + count])

    operands = operands._replace(
        bias=of_heads(operands.bias, start, count), table=cut(operands.table)
    )
    table = spec.table if spec.table is None else Constant(cut(spec.table.tree))
    spec = replace(spec, mask=mask, table=table)
    keys = slice(first, first + some)
    return q[:, :, start : start + count], k[:, :, keys], v[:, :, keys], operands, spec


def _attention(implementation: str | None, q, k, v, operands: Operands, spec: Spec):
    return _differentiable(q, k, v, operands, spec, implementation)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _differentiable(q, k, v, operands, spec, implementation):
    return dispatch.choose_and_run("forward", implementation, (q, k, v), operands, spec)


def _forward(q, k, v, operands, spec, implementation):
    q, k, v, operands = custom_vjp_primal_tree_values((q, k, v, operands))
    out, lse = dispatch.choose_and_run("forward", implementation, (q, k, v), operands, spec)
    # What a remat policy may keep by name: with it the backward pass computes no attention again.
    out, lse = (checkpoint_name(x, "attention") for x in (out, lse))
    return (out, lse), (q, k, v, operands, out, lse)


def _backward(spec, implementation, saved, cotangents):
    *arrays, operands, out, lse = saved
    # A cotangent is symbolic where nothing depends on its output: some backends need to know.
    d_out, d_lse = (None if isinstance(x, SymbolicZero) else x for x in cotangents)
    d_out = jnp.zeros_like(out) if d_out is None else d_out
    arrays = (*arrays, out, lse, d_out, d_lse)
    run = functools.partial(dispatch.choose_and_run, "backward", implementation)
    *d_arrays, d_bias = run(arrays, operands, spec)
    if d_bias is not None:
        d_bias = jax.tree.map(lambda d, x: d.astype(x.dtype), d_bias, operands.bias)
    return *d_arrays, Operands(bias=d_bias)


_differentiable.defvjp(_forward, _backward, symbolic_zeros=True)
