"""Attention under any pattern: the entry point, and order indices from segments."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from lcjax.attention.base import Pattern, Places
from lcjax.errors import InputError
from lcjax.rope.rotation import Rotation
from pallas_kernels import Bias, Layout


def attend(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    *,
    pattern: Pattern,
    rotation: Rotation,
    q_positions: Num[Array, "B T"],
    k_positions: Num[Array, "B S"],
    q_index: Int[Array, "*B T"] | None = None,
    k_index: Int[Array, "*B S"] | None = None,
    q_segments: Int[Array, "B T"] | None = None,
    k_segments: Int[Array, "B S"] | None = None,
    row: tuple[Int[Array, " T"] | None, Int[Array, " S"] | None] | None = None,
    bias: Bias | None = None,
    layout: Layout | None = None,
    keys_rotated: bool = False,
    extra_partials: Sequence[tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]] = (),
    implementation: str | None = None,
) -> Float[Array, "B T N Hv"]:
    """Computes attention of q over k and v under a pattern.

    Args:
      q, k, v: unrotated queries and keys, and values; K divides N.
      pattern: visible keys, and the positions at which they are seen.
      rotation: frequencies of the rotation.
      q_positions, k_positions: true positions; the pattern may move them.
      q_index, k_index: order indices int32, as in `Places`.
      q_segments, k_segments: documents from 1; 0 is padding.
      row: places in the row, as in `Places`.
      bias: added to the logits, by the distance of order indices.
      layout: mesh axes over which rows, heads and length are split.
      keys_rotated: `k` is already rotated, to `pattern.key_positions` (a cache of rotated keys).
      extra_partials: partials (out, lse) of the same queries over other keys, which share one
        softmax with the keys of the pattern.
      implementation: of `pallas_kernels.flash`; None chooses one.

    Returns:
      The output, in the dtype of `q`.

    Raises:
      InputError: a bias for a pattern that takes rope only, or rotated keys for a pattern that
        moves keys.
    """
    if bias is not None and pattern.encodings == ("rope",):
        raise InputError(
            f"pattern {pattern!r} places tokens itself and takes no bias of the logits"
        )
    places = Places(
        q_positions, k_positions, q_index, k_index, q_segments, k_segments, row, q.shape[2], bias,
        layout,
    )  # fmt: skip
    options = {"keys_rotated": keys_rotated, "implementation": implementation}
    if extra_partials:
        options["extra_partials"] = extra_partials
    return pattern.attend(q, k, v, rotation, places, **options)


def order_indices(segments: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """The place of every token in its own document, int32; a document is a run of equal values."""
    slots = jnp.arange(segments.shape[1], dtype=jnp.int32)
    is_start = segments[:, 1:] != segments[:, :-1]
    is_start = jnp.pad(is_start, [(0, 0), (1, 0)])  # the first token starts at 0 anyway
    return slots - jax.lax.cummax(jnp.where(is_start, slots, 0), axis=1)
