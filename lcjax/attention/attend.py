"""Rotates queries and keys as a pattern says, computes its passes and merges them."""

from __future__ import annotations

import jax

from lcjax.attention.base import Pattern
from lcjax.errors import InputError
from lcjax.rope.base import Rotation, rotate
from pallas_kernels import flash, merge


def attend(
    q,
    k,
    v,
    *,
    pattern: Pattern,
    rotation: Rotation,
    q_positions,
    k_positions,
    q_index=None,
    k_index=None,
    q_segments=None,
    k_segments=None,
    keys_rotated: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """Attention of q [B, T, N, H] over k [B, S, K, H] and v [B, S, K, Hv]: out [B, T, N, Hv].

    q and k are unrotated; `q_positions` [B, T] and `k_positions` [B, S] say where they stand, the
    pattern may move them. Order indices and segments are those of `pallas_kernels.flash`.
    `keys_rotated` says that k already carries its rotation at `k_positions` (a cache that stores
    rotated keys), which only patterns that leave keys where they are can use.
    """
    partials = []
    for step in pattern.passes(q_positions, k_positions):
        if keys_rotated and step.k_positions is not k_positions:
            raise InputError(
                f"pattern {pattern!r} moves keys to other positions, so the cache must keep "
                "unrotated keys"
            )
        with jax.named_scope("rope"):
            query = rotate(q, step.q_positions, rotation.inv_freq, rotation.scale)
            query = (query * rotation.query_scale).astype(q.dtype)
            key = (
                k
                if keys_rotated
                else rotate(k, step.k_positions, rotation.inv_freq, rotation.scale)
            )
        with jax.named_scope("attention"):
            partials.append(
                flash(
                    query,
                    key,
                    v,
                    step.mask,
                    q_index=q_index,
                    k_index=k_index,
                    q_segments=q_segments,
                    k_segments=k_segments,
                    implementation=implementation,
                )
            )
    out, _ = partials[0] if len(partials) == 1 else merge(partials)
    return out
