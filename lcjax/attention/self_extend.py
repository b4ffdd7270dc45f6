"""Self-Extend (Jin et al. 2024, arXiv 2401.01325): distant tokens share positions."""

from __future__ import annotations

from dataclasses import dataclass

from lcjax.attention.base import Pass, Pattern, Places, check_at_least
from pallas_kernels import causal, window


@Pattern.register_subclass("self_extend")
@dataclass(frozen=True)
class SelfExtend(Pattern):
    """Full attention whose far keys stand at positions divided by `group`.

    With W = window and G = group, key j of query i stands at its own distance while i - j < W, and
    at floor(i/G) + W - floor(W/G) - floor(j/G) beyond (the two floors are taken apart, and W/G
    is floored as in the paper, not in every file of its code). A model trained for C tokens
    reads (C - W) G + W of them, untrained.
    """

    examples = ({"window": 6, "group": 3}, {"window": 5, "group": 2})
    moves_keys = True
    encodings = ("rope",)

    window: int = 1024  # keys at their own distance, the token itself included
    group: int = 64  # tokens that share one position beyond the window

    def __post_init__(self):
        check_at_least("pattern.window", self.window, 1)
        check_at_least("pattern.group", self.group, 1)

    def passes(self, places: Places) -> list[Pass]:
        near, shift = causal() & window(self.window), self.window - self.window // self.group
        grouped_q = places.q_positions // self.group + shift
        grouped_k = places.k_positions // self.group
        return [
            Pass(places.q_positions, places.k_positions, near),
            Pass(grouped_q, grouped_k, causal() & ~window(self.window)),
        ]
