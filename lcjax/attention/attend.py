"""The entry to attention under any pattern, and the order indices that its masks test."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from lcjax.attention.base import Pattern, Places
from lcjax.errors import InputError
from lcjax.rope.base import Rotation
from pallas_kernels import Bias, Layout


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    pattern: Pattern,
    rotation: Rotation,
    q_positions: jax.Array,
    k_positions: jax.Array,
    q_index: jax.Array | None = None,
    k_index: jax.Array | None = None,
    q_segments: jax.Array | None = None,
    k_segments: jax.Array | None = None,
    row: tuple[jax.Array | None, jax.Array | None] | None = None,
    bias: Bias | None = None,
    layout: Layout | None = None,
    keys_rotated: bool = False,
    more: Sequence[tuple[jax.Array, jax.Array]] = (),
    implementation: str | None = None,
) -> jax.Array:
    """Attention of q [B, T, N, H] over k [B, S, K, H] and v [B, S, K, Hv]: out [B, T, N, Hv].

    q and k are unrotated; `q_positions` [B, T] and `k_positions` [B, S] say where they stand, the
    pattern may move them. Order indices, segments, `row`, `bias`, `layout` are those of `Places`.
    `keys_rotated` says that k already carries its rotation, at `pattern.key_positions` (a cache
    that stores rotated keys), which patterns that move keys refuse. `more` are partials (out, lse)
    of the same queries over other keys, which are in one softmax with those of the pattern.
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
    if more:
        options["more"] = more
    return pattern.attend(q, k, v, rotation, places, **options)


def order_indices(segments: jax.Array) -> jax.Array:
    """The place of every token in its own document, int32 [B, T], of `segments` [B, T].

    A document is a stretch of equal segments.
    """
    at = jnp.arange(segments.shape[1], dtype=jnp.int32)
    starts = segments[:, 1:] != segments[:, :-1]
    starts = jnp.pad(starts, [(0, 0), (1, 0)])  # the first token starts at 0 anyway
    return at - jax.lax.cummax(jnp.where(starts, at, 0), axis=1)
