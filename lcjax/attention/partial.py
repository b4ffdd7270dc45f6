"""One pass: rotates queries and keys to its positions and attends over the keys of its mask."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from lcjax.rope.base import Rotation, rotate
from pallas_kernels import Alibi, Bias, flash

if TYPE_CHECKING:
    from lcjax.attention.base import Pass, Places


def partial_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    step: Pass,
    rotation: Rotation,
    places: Places,
    *,
    keys_rotated: bool = False,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(out [B, T, N, Hv], lse float32 [B, T, N]) of one pass over unrotated q and k."""
    q, k = rotate_both(q, k, step, rotation, keys_rotated=keys_rotated)
    q_index, k_index = tested_indices(step, places)
    bias, shift = moved_bias(step, places)
    with jax.named_scope("attention"):
        out, lse = flash(
            q,
            k,
            v,
            step.mask,
            q_index=q_index,
            k_index=k_index,
            q_segments=places.q_segments,
            k_segments=places.k_segments,
            bias=bias,
            layout=places.layout,
            implementation=implementation,
        )
    return out, lse if shift is None else lse + shift


def rotate_both(
    q: jax.Array, k: jax.Array, at: Pass | Places, rotation: Rotation, *, keys_rotated: bool
) -> tuple[jax.Array, jax.Array]:
    """q and k at the positions of a pass, or at their own; rotated keys are left as they are."""
    with jax.named_scope("rope"):
        q = rotate_queries(q, at.q_positions, rotation)
        if not keys_rotated:
            k = rotate(k, at.k_positions, rotation.inv_freq, rotation.scale)
    return q, k


def rotate_queries(q: jax.Array, positions: jax.Array, rotation: Rotation) -> jax.Array:
    """q [B, T, N, H] at `positions` [B, T], with the scale that only queries have."""
    rotated = rotate(q, positions, rotation.inv_freq, rotation.scale)
    return (rotated * rotation.query_scale).astype(q.dtype)


def moved_bias(step: Pass, places: Places) -> tuple[Bias | None, jax.Array | None]:
    """The bias of a pass whose tokens stand elsewhere: (by order indices, what to add to lse).

    Where all keys are at one distance, and where a query has moved under a bias that is linear in
    it, all logits of a query change by one number. So the partial stays as it is, and its
    log-sum-exp [B, T, N] takes that number.
    """
    bias, own_keys = places.bias, step.k_positions is places.k_positions
    if bias is None or (own_keys and step.q_positions is places.q_positions):
        return bias, None
    if step.together:
        logits = bias.logits(step.q_positions, step.k_positions[:, :1])  # [B, N, T, 1]
        return None, jnp.swapaxes(logits[..., 0], 1, 2)
    if not (own_keys and isinstance(bias, Alibi)):
        raise TypeError(f"no rule moves {type(bias).__name__} with the tokens of {step!r}")
    nearer = places.q_positions - step.q_positions  # [B, T]
    return bias, bias.slopes.astype(jnp.float32) * nearer.astype(jnp.float32)[..., None]


def tested_indices(step: Pass, places: Places) -> tuple[jax.Array | None, jax.Array | None]:
    """What the mask of `step` tests: order indices, or places in the row where they serve as well.

    A mask of differences gives the same answer for both, and places in a whole row are known before
    the program runs, which keeps the tables of visible blocks static.
    """
    if places.row is not None and step.mask.shift_invariant:
        return places.row
    return places.q_index, places.k_index
