"""Full causal attention."""

from __future__ import annotations

from dataclasses import dataclass

from lcjax.attention.base import Pass, Pattern
from pallas_kernels import causal


@Pattern.register_subclass("causal")
@dataclass(frozen=True)
class Causal(Pattern):
    """Every token sees itself and all tokens before it."""

    def passes(self, q_positions, k_positions) -> list[Pass]:
        return [Pass(q_positions, k_positions, causal())]
