"""Self-Extend (Jin et al. 2024, arXiv 2401.01325): distant tokens share positions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import jax.numpy as jnp

from lcjax.attention.base import AttentionMetadata, Pass, Pattern
from lcjax.errors import PositiveInt, Range
from pallas_kernels import causal, window


@Pattern.register_subclass("self_extend")
@dataclass(frozen=True)
class SelfExtend(Pattern):
    """Full attention in which far keys have positions divided by `group`.

    With W = window and G = group, query i sees key j at distance i - j if i - j < W, and at
    distance floor(i/G) + W - floor(W/G) - floor(j/G) otherwise. i/G and j/G are floored separately;
    W/G is floored as in the paper, but not in every file of its code. A model trained for C tokens
    reads (C - W) G + W tokens without further training.

    With `scale_base` b, query i is multiplied by max(1, ln(i + 1) / ln b), which keeps attention as
    sharp over many keys as over b keys (an option of the released code).
    """

    examples = (
        {"window": 6, "group": 3},
        {"window": 5, "group": 2},
        {"window": 5, "group": 2, "scale_base": 7},
    )
    moves_keys = True
    encodings = ("rope",)
    is_position_based = True  # although it overrides `attend`

    window: PositiveInt = 1024  # keys at their own distance, the token itself included
    group: PositiveInt = 64  # tokens that share one position beyond the window
    # Keys from which queries grow: the trained length; null: never
    scale_base: Annotated[int, Range(2)] | None = None

    def passes(self, metadata: AttentionMetadata) -> list[Pass]:
        near, shift = causal() & window(self.window), self.window - self.window // self.group
        grouped_q = metadata.q_positions // self.group + shift
        grouped_k = metadata.k_positions // self.group
        return [
            Pass(metadata.q_positions, metadata.k_positions, near),
            Pass(grouped_q, grouped_k, causal() & ~window(self.window)),
        ]

    def attend(self, q, k, v, metadata):
        if self.scale_base is not None:
            # Visible keys in the same document; padding before it has the order index -1.
            num_keys = jnp.maximum(jnp.atleast_2d(metadata.q_order) + 1, 1).astype(jnp.float32)
            growth = jnp.maximum(1.0, jnp.log(num_keys) / math.log(self.scale_base))
            scale = metadata.rotation.query_scale * growth[..., None, None]  # [B, T, 1, 1]
            rotation = metadata.rotation._replace(query_scale=scale)
            metadata = metadata.replace(rotation=rotation)
        return super().attend(q, k, v, metadata)
