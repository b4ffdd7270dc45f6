"""LM-Infinite (Han et al. 2023, arXiv 2308.16137): a Lambda-shaped mask and a distance ceiling."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from lcjax.attention.base import Pass, Pattern, Places
from lcjax.attention.best_keys import best_keys
from lcjax.attention.near_far import at_distance, near_and_far
from lcjax.attention.partial import partial_attention
from lcjax.errors import InputError, whole_numbers
from lcjax.rope.base import Rotation
from pallas_kernels import causal, merge, prefix, window


@Pattern.register_subclass("lm_infinite")
@dataclass(frozen=True)
class LMInfinite(Pattern):
    """A window and the first tokens of the text, no key further away than `distance`.

    Query i sees key j of its window, 0 <= i - j < window, at distance i - j, and of the keys before
    the window the first `sinks`, all of them at one distance (sec. 4: the Lambda-shaped mask and
    the distance ceiling). The released code caps the distance by the length of the text, too; that
    differs only where `distance` is set above `window`, and would let a prompt read at once differ
    from one read token by token.

    With `top_k`, every query and head also sees the keys between the sinks and the window that have
    the greatest logits at the distance `top_k_position`, with these logits; only where there are at
    least `top_k` of them. In the released code the last query of a call alone chooses, and from the
    fifth layer on. Here every query does, so that a prompt read at once equals one read token by
    token, and in every layer, since all layers are one program. It costs the logits of all keys,
    and a cache of the whole text.
    """

    examples = (
        {"window": 9, "sinks": 3},
        {"window": 6, "sinks": 1, "distance": 4},
        {"window": 6, "sinks": 2, "top_k": 3},
    )
    moves_keys = True

    window: int = 4096  # visible keys at their own distance, the token itself included
    sinks: int = 10  # first tokens that stay visible (LCEG 10; the paper 5 to 100)
    distance: int | None = None  # at which these seem to be; null: `window`
    top_k: int | None = None  # keys that a query chooses from the rest (passkey script: 5)
    top_k_position: int | None = None  # their distance; null: half of `window`, as released

    def __post_init__(self):
        whole_numbers("pattern", self, 1, "window", "sinks", "distance", "top_k")
        whole_numbers("pattern", self, 0, "top_k_position")
        if self.top_k_position is not None and self.top_k is None:
            raise InputError(
                f"pattern.top_k_position={self.top_k_position} places the keys that pattern.top_k "
                "chooses, and that is not set; set it, or leave both out"
            )

    # ALiBi stops growing at `distance`, too (sec. 4, for MPT).
    encodings = ("rope", "alibi")

    def passes(self, places: Places) -> list[Pass]:
        distance = self.window if self.distance is None else self.distance
        return near_and_far(places, self.window, distance, prefix(self.sinks))

    @property
    def any_order(self) -> bool:
        return self.top_k is None

    def kept(self) -> tuple[int, int] | None:
        return (self.sinks, self.window) if self.top_k is None else None

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        rotation: Rotation,
        places: Places,
        *,
        keys_rotated: bool = False,
        implementation: str | None = None,
    ) -> jax.Array:
        if self.top_k is None or k.shape[1] < self.sinks + self.top_k + self.window:
            return super().attend(
                q, k, v, rotation, places,
                keys_rotated=keys_rotated, implementation=implementation,
            )  # fmt: skip
        self.check_unrotated(keys_rotated)
        partials = [
            partial_attention(q, k, v, step, rotation, places, implementation=implementation)
            for step in self.passes(places)
        ]
        with jax.named_scope("choose"):
            rest = self._rest(places)
            partials.append(best_keys(q, k, v, rest, rotation, places, self.top_k))
        return merge(partials)[0]

    def _rest(self, places: Places) -> Pass:
        """The keys between the sinks and the window, where `top_k` are chosen from."""
        chosen_at = self.window // 2 if self.top_k_position is None else self.top_k_position
        rest = causal() & ~window(self.window) & ~prefix(self.sinks)
        return at_distance(places, chosen_at, rest)
