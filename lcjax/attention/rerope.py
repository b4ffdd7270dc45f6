"""ReRoPE (Su 2023, kexue.fm/archives/9708): full attention under a ceiling of the distance."""

from __future__ import annotations

from dataclasses import dataclass

from lcjax.attention.base import Pass, Pattern, Places, near_and_far
from lcjax.errors import whole_number
from pallas_kernels import everything


@Pattern.register_subclass("rerope")
@dataclass(frozen=True)
class ReRoPE(Pattern):
    """Every token sees all tokens before it; distances above `window` count as `window`.

    This is LM-Infinite's distance ceiling without its mask, an ablation of that paper (sec. 5.2).
    """

    examples = ({"window": 6},)
    moves_keys = True
    encodings = ("rope",)

    window: int  # keys at their own distance, the token itself included; at most the trained length

    def __post_init__(self):
        whole_number("pattern.window", self.window, 1)

    def passes(self, places: Places) -> list[Pass]:
        return near_and_far(places, self.window, self.window, everything())
