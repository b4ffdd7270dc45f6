"""Attention of encoders: every token of a document sees all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lcjax.attention.base import Pass, Pattern, Places
from pallas_kernels import everything


@Pattern.register_subclass("bidirectional")
@dataclass(frozen=True)
class Bidirectional(Pattern):
    """Every token sees the whole document, later tokens too (Devlin et al. 2019, BERT)."""

    prefill_only: ClassVar[bool] = True

    def passes(self, places: Places) -> list[Pass]:
        return [Pass(places.q_positions, places.k_positions, everything())]
