"""Sliding-window causal attention (Longformer, Beltagy et al. 2020, sec. 3.1; Mistral 7B)."""

from __future__ import annotations

from dataclasses import dataclass

from lcjax.attention.base import Pass, Pattern, Places
from lcjax.errors import whole_number
from pallas_kernels import causal, window


@Pattern.register_subclass("sliding")
@dataclass(frozen=True)
class Sliding(Pattern):
    """Every token sees itself and the `window - 1` tokens before it."""

    examples = ({"window": 7}, {"window": 1})

    window: int  # visible tokens, the token itself included (Hugging Face's `sliding_window`)

    def __post_init__(self):
        whole_number("pattern.window", self.window, 1)

    def passes(self, places: Places) -> list[Pass]:
        return [Pass(places.q_positions, places.k_positions, causal() & window(self.window))]

    def cache_window(self) -> tuple[int, int]:
        return 0, self.window
