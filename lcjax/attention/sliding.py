"""Sliding-window causal attention (Longformer, Beltagy et al. 2020, sec. 3.1; Mistral 7B)."""

from __future__ import annotations

from dataclasses import dataclass

from lcjax.attention.base import Pass, Pattern, check_at_least
from pallas_kernels import causal, window


@Pattern.register_subclass("sliding")
@dataclass(frozen=True)
class Sliding(Pattern):
    """Every token sees itself and the `window - 1` tokens before it."""

    window: int  # visible tokens, the token itself included (Hugging Face's `sliding_window`)

    def __post_init__(self):
        check_at_least("pattern.window", self.window, 1)

    def passes(self, q_positions, k_positions) -> list[Pass]:
        return [Pass(q_positions, k_positions, causal() & window(self.window))]
