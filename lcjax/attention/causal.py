"""Full causal attention."""

from __future__ import annotations

from dataclasses import dataclass

from lcjax.attention.base import Pass, Pattern, Places
from pallas_kernels import causal


@Pattern.register_subclass("causal")
@dataclass(frozen=True)
class Causal(Pattern):
    """Every token sees itself and all tokens before it."""

    def passes(self, places: Places) -> list[Pass]:
        return [Pass(places.q_positions, places.k_positions, causal())]
