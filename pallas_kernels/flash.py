"""Attention as a partial that can be merged: the output and the log-sum-exp of its logits.

`flash` and `decode` are the public functions; this module holds the one gradient rule of all
backends. `pallas_kernels/dispatch.py` defines the interface of a backend and chooses one.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch, reference
from pallas_kernels.arguments import check_arrays, check_options, on_any_mesh
from pallas_kernels.biases import Bias
from pallas_kernels.dispatch import Constant, Operands, Spec, join_heads, split_heads
from pallas_kernels.folded import FoldedHeads, as_rows
from pallas_kernels.masks import Mask, everything
from pallas_kernels.online_softmax import with_sinks
from pallas_kernels.quantised import Quantised, dequantise, swap_heads
from pallas_kernels.sharded import Layout, over_mesh
from pallas_kernels.tables import BlockTable

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int, UInt32


@on_any_mesh
def flash(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"] | Quantised | FoldedHeads,
    v: Float[Array, "B S K Hv"] | Quantised | FoldedHeads,
    mask: Mask | None = None,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    bias: Bias | None = None,
    sinks: Float[Array, " N"] | None = None,
    table: BlockTable | None = None,
    key_bits: UInt32[Array, "B T W"] | None = None,
    q_index: Int[Array, "*B T"] | None = None,
    k_index: Int[Array, "*B S"] | None = None,
    q_segments: Int[Array, "B T"] | None = None,
    k_segments: Int[Array, "B S"] | None = None,
    k_lengths: Int[Array, " B"] | None = None,
    splits: int | None = None,
    layout: Layout | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
    """Returns softmax(cap(scale q k^T) + bias) v over visible keys, and the logits' log-sum-exp.

    Both results have gradients with respect to q, k, v, the bias and the sinks. Second derivatives
    (`jax.hessian`, `jax.jvp` of a gradient) are those of the dense formula, so they take memory
    O(T S); a layout that splits the length has none. Forward mode of the call itself (`jax.jvp`,
    `jax.jacfwd`) needs implementation="reference". A query that sees no key gets out 0, lse -inf
    and zero gradients. Softmax and sums are float32 for every input dtype. Mesh axes may be Auto or
    Explicit; a surrounding `jax.shard_map` needs check_vma=False.

    Args:
      q: queries; N is a multiple of K.
      k: keys, as an array, as codes (`pallas_kernels.quantised`), or as an array whose heads are
        rows (`FoldedHeads`); the last two have no gradient.
      v: values, as one of these.
      mask: a rule over order indices (`pallas_kernels.masks`), for all heads or per head; None
        shows all keys.
      scale: None means H ** -0.5.
      soft_cap: maps logits to soft_cap tanh(logit / soft_cap), before the bias and the mask.
      bias: `Alibi` or `RelativeBias`, a function of k_index - q_index.
      sinks: learned logits that only add to the denominator (and to lse).
      table: hides all blocks that it does not list, in addition to the mask. The mask must show
        every pair of a block that the table marks as full, because it is not tested there. NumPy
        tables are constants of the compiled program. If a traced table overflowed its capacity,
        all results are NaN.
      key_bits: the keys that each query may see, the same for all heads, in addition to the mask
        (`pallas_kernels.key_bits.pack`); W is that of all S keys. Blocks without any are not
        visited. They stand alone, without a table and a layout, and `splits` has no effect.
      q_index, k_index: order indices of queries and keys, shared by all rows or one set per row; by
        default 0, 1, .... They may be traced (a decoding step passes offset + arange(T)).
      q_segments, k_segments: a query sees only keys of its own segment; segment 0 is padding, which
        sees no key and is visible to no query.
      k_lengths: the number of valid keys of each row; the keys after them are padding.
      splits: see `decode`.
      layout: the mesh axes over which rows, heads and the length are sharded, and the method for a
        sharded length, a ring or an all-to-all exchange (`pallas_kernels.sharded`). None leaves
        sharding to the compiler, which cannot partition kernels.
      implementation: a name of `pallas_kernels.dispatch.BACKENDS`, "reference" (dense, for tests),
        or None for the platform's default: on GPUs the fastest one that was measured there
        (`pallas_kernels.timings`), else the first one that passed a self-check, which the first
        call starts (`pallas_kernels.self_check`). `explain` reports the choice and its reasons.

    Returns:
      out in q's dtype, and lse in float32.

    Raises:
      TypeError: q, k or v not floating or of different dtypes, indices or segments not integers, an
        invalid mask, bias or table, a traced scale.
      ValueError: shapes that do not match, and invalid options.
    """
    positions = dict(q_index=q_index, k_index=k_index, q_segments=q_segments)
    positions |= dict(k_segments=k_segments, k_lengths=k_lengths)
    check_arrays("flash", q, k, v, scale, **positions)
    check_options(q, k, mask, soft_cap, bias, sinks, table, splits, layout, key_bits)
    q_segments, k_segments = _with_lengths(q, k, q_segments, k_segments, k_lengths)
    if isinstance(k, Quantised):
        q = k.queries(q)
    mask = everything() if mask is None else mask
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    soft_cap = None if soft_cap is None else float(soft_cap)
    if 0 in (*q.shape[:2], k.shape[1]):
        out, lse = _empty(q, v)
        return (out, lse) if sinks is None else with_sinks(out, lse, sinks)
    positions = _rows(q_index), _rows(k_index), q_segments, k_segments
    if implementation == dispatch.REFERENCE:
        options = dict(soft_cap=soft_cap, bias=bias, sinks=sinks, table=table, key_bits=key_bits)
        k, v = (dequantise(x, q.dtype) for x in as_rows((k, v)))
        return reference.attention(q, k, v, *positions, mask=mask, scale=scale, **options)
    static = table is not None and table.static
    key_bits = None if key_bits is None else jnp.asarray(key_bits)
    operands = Operands(*positions, bias, None if static else table, key_bits)
    spec = Spec(mask, scale, soft_cap, Constant(table) if static else None, splits)
    if layout is None:
        results = []
        for *arrays, spec_of_heads in split_heads(q, k, v, operands, spec):
            results.append(_attention(*arrays, (implementation, spec_of_heads)))
        out, lse = join_heads(results)
    else:
        out, lse = over_mesh(q, *as_rows((k, v)), operands, spec, implementation, layout)
    if table is not None and table.overflow is not None:
        out, lse = (jnp.where(table.overflow, jnp.nan, x).astype(x.dtype) for x in (out, lse))
    return (out, lse) if sinks is None else with_sinks(out, lse, sinks)


def decode(
    q: Float[Array, "B T N H"],
    keys: Float[Array, "B K S H"] | Quantised,
    values: Float[Array, "B K S Hv"] | Quantised,
    mask: Mask | None = None,
    *,
    splits: int | None = None,
    **options,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
    """Returns `flash` of few queries over a cache of keys and values, read in its memory layout.

    The axis of heads precedes that of keys, as in a cache that grows along S: a step reads
    contiguous parts of the cache, and does not reorder, pad or copy it. Key blocks that no query
    sees, such as unfilled ones or those before a window, are not read. TPUs have a separate kernel
    for at most 128 rows per key head (T queries times G query heads).

    Args:
      q: queries; N is a multiple of K.
      keys, values: the cache, as arrays or as codes whose arrays are [B, K, S / n, ...].
      mask: as in `flash`.
      splits: the number of parts into which the visible keys are split; the parts are computed in
        parallel and merged by log-sum-exp, which is exact. It helps devices with more cores than
        there are rows and heads. None: the platform's default.
      **options: those of `flash`. The result is differentiable in the same arguments as flash's.

    Raises:
      ValueError, TypeError: as `flash` does.
    """
    shapes = [getattr(x, "shape", ()) for x in (q, keys, values)]
    if any(len(shape) != 4 for shape in shapes) or q.shape[2] % max(keys.shape[1], 1):
        raise ValueError(
            f"decode: q {shapes[0]}, keys {shapes[1]} and values {shapes[2]} must be arrays: q "
            "[batch, length, heads, size], keys and values [batch, heads, length, size] of a "
            "number of heads that divides that of q; flash takes [batch, length, heads, size]"
        )
    k, v = jax.tree.map(swap_heads, (keys, values))
    return flash(q, k, v, mask, splits=splits, **options)


def _rows(index):
    """[T] or [B, T] -> [1 or B, T]."""
    return None if index is None else jnp.atleast_2d(jnp.asarray(index, jnp.int32))


def _empty(q, v):
    """Returns (out, lse) without rows, queries or keys: no backend has a block of size 0."""
    shape = q.shape[:3]
    return jnp.zeros((*shape, v.shape[3]), q.dtype), jnp.full(shape, -jnp.inf, jnp.float32)


def _with_lengths(q, k, q_segments, k_segments, k_lengths):
    """Returns int32 (q_segments, k_segments), in which keys from k_lengths on are padding."""
    if q_segments is None and k_lengths is None:
        return None, None
    if q_segments is None:
        q_segments, k_segments = (jnp.ones(x.shape[:2], jnp.int32) for x in (q, k))
    q_segments, k_segments = (jnp.asarray(x, jnp.int32) for x in (q_segments, k_segments))
    if k_lengths is None:
        return q_segments, k_segments
    is_valid = jnp.arange(k.shape[1]) < jnp.asarray(k_lengths)[:, None]
    return q_segments, jnp.where(is_valid, k_segments, 0)


_attention = dispatch.differentiable(
    functools.partial(dispatch.choose_and_run, "forward"),
    functools.partial(dispatch.choose_and_run, "backward"),
    name="attention",
)
