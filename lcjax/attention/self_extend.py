"""Self-Extend (Jin et al. 2024, arXiv 2401.01325): distant tokens share positions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from lcjax.attention.base import Pass, Pattern, Places
from lcjax.errors import whole_numbers
from lcjax.rope.base import Rotation
from pallas_kernels import causal, window


@Pattern.register_subclass("self_extend")
@dataclass(frozen=True)
class SelfExtend(Pattern):
    """Full attention whose far keys stand at positions divided by `group`.

    With W = window and G = group, key j of query i stands at its own distance while i - j < W, and
    at floor(i/G) + W - floor(W/G) - floor(j/G) beyond (the two floors are taken apart, and W/G
    is floored as in the paper, not in every file of its code). A model trained for C tokens
    reads (C - W) G + W of them, untrained.

    With `scale_base` b, query i is multiplied by max(1, ln(i + 1) / ln b), which keeps attention as
    sharp over many keys as it was over b of them (an option of the released code).
    """

    examples = (
        {"window": 6, "group": 3},
        {"window": 5, "group": 2},
        {"window": 5, "group": 2, "scale_base": 7},
    )
    moves_keys = True
    encodings = ("rope",)
    is_position_based = True  # `attend` here asks order indices alone

    window: int = 1024  # keys at their own distance, the token itself included
    group: int = 64  # tokens that share one position beyond the window
    scale_base: int | None = None  # keys from which queries grow: the trained length; null: never

    def __post_init__(self):
        whole_numbers("pattern", self, 1, "window", "group")
        whole_numbers("pattern", self, 2, "scale_base")

    def passes(self, places: Places) -> list[Pass]:
        near, shift = causal() & window(self.window), self.window - self.window // self.group
        grouped_q = places.q_positions // self.group + shift
        grouped_k = places.k_positions // self.group
        return [
            Pass(places.q_positions, places.k_positions, near),
            Pass(grouped_q, grouped_k, causal() & ~window(self.window)),
        ]

    def attend(self, q, k, v, rotation: Rotation, places: Places, **options) -> jax.Array:
        if self.scale_base is not None:
            # Counted in the own document, like the keys; padding before it counts -1.
            seen = jnp.maximum(jnp.atleast_2d(places.q_order) + 1, 1).astype(jnp.float32)
            growth = jnp.maximum(1.0, jnp.log(seen) / math.log(self.scale_base))
            scale = rotation.query_scale * growth[..., None, None]  # [B, T, 1, 1]
            rotation = rotation._replace(query_scale=scale)
        return super().attend(q, k, v, rotation, places, **options)
