"""Causal depthwise convolution over a few tokens of one document, with the inputs of the next call.

Letters: C channels, W taps.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from pallas_kernels.arguments import check_shapes, on_any_mesh
from pallas_kernels.sharded import Layout, on_shards

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


@functools.partial(on_any_mesh, second=(0, None, 2))
def causal_convolution(
    x: Float[Array, "B T C"],
    kernel: Float[Array, "W C"],
    *,
    state: Float[Array, "B W-1 C"] | None = None,
    segments: Int[Array, "B T"] | None = None,
    layout: Layout | None = None,
) -> tuple[Float[Array, "B T C"], Float[Array, "B W-1 C"]]:
    """Returns a depthwise causal convolution of each channel, and the inputs that the next needs.

    y_t = sum_w kernel[w] x_{t - W + 1 + w} over the tokens of the same document: the short
    convolution of queries, keys and values (Yang et al. 2024, arXiv 2412.06464, sec. 3.4).

    Args:
      x: inputs.
      kernel: W taps; the last one is that of the token itself, as in torch's Conv1d.
      state: the W - 1 inputs before the first token; None means 0. With segments they belong to the
        document of the row's first token, and directly precede it.
      segments: documents, numbered from 1; 0 is padding, whose output is 0. Padding may precede,
        follow and separate documents, but not interrupt one.
      layout: shards rows, length, and channels over its axis `heads`. A device receives W - 1
        inputs from its left neighbour.

    Returns:
      y in x's dtype, with sums in float32; and the state after the row's last token in x's dtype:
      the last W - 1 inputs of its document, 0 where it has fewer.

    Raises:
      TypeError: x or kernel has no floating-point dtype, or segments are not integers.
      ValueError: shapes do not match, the kernel has no taps, or devices have fewer than W - 1
        tokens each.
    """
    taps = kernel.shape[0] if getattr(kernel, "ndim", 0) else 1
    if not taps:
        raise ValueError(f"causal_convolution: kernel has shape {kernel.shape}; give it a tap")
    arrays = {"x": (x, "BTC"), "kernel": (kernel, "WC"), "state": (state, "BPC")}
    check_shapes("causal_convolution", arrays, segments, layout, {"P": taps - 1})
    if state is None:
        state = jnp.zeros((x.shape[0], taps - 1, x.shape[2]), x.dtype)
    state = state.astype(x.dtype)
    segments = None if segments is None else jnp.asarray(segments, jnp.int32)
    if x.shape[1] == 0:
        return x, state
    if layout is None:
        return _convolve(x, kernel, state, segments, None)
    layout = layout.of_tokens(x)
    tokens = x.shape[1] // layout.size(layout.length)
    if layout.length is not None and tokens < taps - 1:
        raise ValueError(
            f"causal_convolution: {tokens} tokens for each device along {layout.length!r} must be "
            f"at least the {taps - 1} that the next device needs; split the length less"
        )
    of_x = layout.spec(x, heads=True)
    of_state = PartitionSpec(of_x[0], None, of_x[2])
    of_segments = None if segments is None else layout.spec(segments)
    specs = of_x, PartitionSpec(None, of_x[2]), of_state, of_segments
    local = functools.partial(_convolve, axis=layout.length)
    return on_shards(local, (x, kernel, state, segments), specs, (of_x, of_state), layout.mesh)


def _convolve(x, kernel, state, segments, axis: str | None):
    """Computes `causal_convolution` on one device, or on each device along a mesh axis."""
    length, before = x.shape[1], kernel.shape[0] - 1
    rows = _rows(x, segments, axis)
    inputs, ids = _with_state(x, state, segments, rows)
    if axis is not None and before:
        inputs, ids = (_with_neighbour(y, before, rows, axis) for y in (inputs, ids))
    is_token = None if segments is None else segments != 0

    def tap(w):
        product = inputs[:, w : w + length].astype(jnp.float32) * kernel[w].astype(jnp.float32)
        if ids is None:
            return product
        return jnp.where(((ids[:, w : w + length] == segments) & is_token)[..., None], product, 0)

    y = sum(tap(w) for w in range(before + 1)).astype(x.dtype)
    last = _last_inputs(inputs, ids, before, rows)
    if axis is not None:
        last = lax.psum(jnp.where(rows.is_last[:, None, None], last, 0), axis)
    return y, jnp.where(rows.has_token[:, None, None], last, state)


class _Rows(NamedTuple):
    """What this device has of each row, [B]."""

    is_first: jax.Array  # whether the row's first token is here
    is_last: jax.Array  # whether its last token is here
    has_token: jax.Array  # whether the row has a token on any device
    first: jax.Array  # the index of this device's first token
    last: jax.Array  # and of its last one


def _rows(x, segments, axis: str | None) -> _Rows:
    batch, length = x.shape[:2]
    is_token = jnp.ones((batch, length), bool) if segments is None else segments != 0
    first = jnp.argmax(is_token, axis=1)
    last = length - 1 - jnp.argmax(is_token[:, ::-1], axis=1)
    has_token = is_token.any(1)
    if axis is None:
        return _Rows(has_token, has_token, has_token, first, last)
    by_device, index = lax.all_gather(has_token, axis), lax.axis_index(axis)
    device = jnp.arange(by_device.shape[0])[:, None]
    earlier, later = ((by_device & side).any(0) for side in (device < index, device > index))
    return _Rows(has_token & ~earlier, has_token & ~later, by_device.any(0), first, last)


def _with_state(x, state, segments, rows: _Rows):
    """Returns inputs [B, W-1 + T, C] and their documents, with the state before the first token.

    The state overwrites padding. Documents are None without segments.
    """
    before = state.shape[1]
    padded = jnp.pad(x, [(0, 0), (before, 0), (0, 0)])
    if segments is None:
        head = jnp.where(rows.is_first[:, None, None], state, 0)
        return lax.dynamic_update_slice_in_dim(padded, head, 0, 1), None
    update = functools.partial(lax.dynamic_update_slice_in_dim, axis=0)
    is_first, first = rows.is_first[:, None], rows.first[:, None]
    inputs = jnp.where(is_first[..., None], jax.vmap(update)(padded, state, rows.first), padded)
    at = jnp.arange(padded.shape[1])
    is_state = is_first & (at >= first) & (at < first + before)
    document = jnp.take_along_axis(segments, first, axis=1)
    return inputs, jnp.where(is_state, document, jnp.pad(segments, [(0, 0), (before, 0)]))


def _with_neighbour(inputs, before: int, rows: _Rows, axis: str):
    """Returns inputs, or documents, that begin with the last ones of the left neighbour.

    Those of rows that begin on this device begin with the state or with padding.
    """
    if inputs is None:
        return None
    pairs = [(i, i + 1) for i in range(lax.axis_size(axis) - 1)]
    received = lax.ppermute(inputs[:, -before:], axis, pairs)
    is_first = rows.is_first.reshape(-1, *[1] * (inputs.ndim - 1))
    head = jnp.where(is_first, inputs[:, :before], received)
    return jnp.concatenate([head, inputs[:, before:]], 1)


def _last_inputs(inputs, ids, before: int, rows: _Rows):
    """Returns the inputs [B, W-1, C] of the last document up to its last token; 0 before it."""
    if ids is None:
        return inputs[:, inputs.shape[1] - before :]
    take = functools.partial(lax.dynamic_slice_in_dim, slice_size=before)
    window, documents = (jax.vmap(take)(y, rows.last + 1) for y in (inputs, ids))
    document = jnp.take_along_axis(ids, rows.last[:, None] + before, axis=1)
    return jnp.where((documents == document)[..., None], window, 0)
