"""LM-Infinite (Han et al. 2023, arXiv 2308.16137) and its ceiling without a mask, ReRoPE."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from lcjax.attention.base import Pass, Pattern, Places, check_at_least
from pallas_kernels import Mask, causal, prefix, window


def near_and_far(places: Places, size: int, distance: int, far: Mask) -> list[Pass]:
    """The last `size` keys at their own distance, older ones of `far` all at `distance`."""
    far = causal() & ~window(size) & far
    ceiling = jnp.full_like(places.q_positions, distance)
    return [
        Pass(places.q_positions, places.k_positions, causal() & window(size)),
        Pass(ceiling, jnp.zeros_like(places.k_positions), far, together=True),
    ]


@Pattern.register_subclass("lm_infinite")
@dataclass(frozen=True)
class LMInfinite(Pattern):
    """A window and the first tokens of the text, no key further away than `distance`.

    Query i sees key j of its window, 0 <= i - j < window, at distance i - j, and of the keys before
    the window the first `sinks`, all of them at one distance (sec. 4: the Lambda-shaped mask and
    the distance ceiling). The released code caps the distance by the length of the text, too; that
    differs only where `distance` is set above `window`, and would let a prompt read at once differ
    from one read token by token.
    """

    examples = ({"window": 9, "sinks": 3}, {"window": 6, "sinks": 1, "distance": 4})
    moves_keys = True

    window: int = 4096  # visible keys at their own distance, the token itself included
    sinks: int = 10  # first tokens that stay visible (LCEG 10; the paper 5 to 100)
    distance: int | None = None  # at which these seem to be; null: `window`

    def __post_init__(self):
        check_at_least("pattern.window", self.window, 1)
        check_at_least("pattern.sinks", self.sinks, 1)
        if self.distance is not None:
            check_at_least("pattern.distance", self.distance, 1)

    # ALiBi stops growing at `distance`, too (sec. 4, for MPT).
    encodings = ("rope", "alibi")

    def passes(self, places: Places) -> list[Pass]:
        distance = self.window if self.distance is None else self.distance
        return near_and_far(places, self.window, distance, prefix(self.sinks))

    def kept(self) -> tuple[int, int]:
        return self.sinks, self.window
