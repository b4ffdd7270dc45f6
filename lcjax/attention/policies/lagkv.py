"""LagKV: scores of tokens relative to the tokens that follow them."""

from dataclasses import dataclass
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from lcjax.attention.eviction import CachePolicy
from lcjax.errors import InputError, NonNegativeInt, Range

_Lag = Annotated[int, Range(2, hint="a part has a range")]


@CachePolicy.register_subclass("lagkv")
@dataclass(frozen=True)
class LagKV(CachePolicy):
    """Keeps tokens whose keys and values vary most, by the range of the next ones (2504.04704).

    After `sinks` tokens come parts of `lag` tokens. Each channel is scaled by its range in the next
    part, and the score of a token is the standard deviation over its channels, in a softmax over
    the part, averaged over keys and values. Parts lose equally many tokens, because a score is the
    rank in its part; with `cross` parts compete. Sinks, the last full part and what follows score
    1. As in kvpress; needs neither attention nor queries.
    """

    examples = ({"tokens": 32, "lag": 8}, {"ratio": 0.5, "lag": 8, "cross": True})
    scores_part = True

    sinks: NonNegativeInt = 4
    lag: _Lag = 128
    cross: bool = False

    def score(self, slots):
        num_slots, counts = slots.index.shape[-1], slots.counts
        places = jnp.arange(num_slots) - self.sinks
        num_full = jnp.maximum(counts - self.sinks, 0) // self.lag
        is_scored = (places >= 0) & (places < (num_full - 1) * self.lag)
        recency = places / jnp.maximum(counts - self.sinks, 1)
        parts = [
            self._parts(slots.from_first(x.astype(jnp.float32), 0.0))
            for x in (slots.keys, slots.values)
        ]
        scores = sum(map(_spread, parts)) / 2
        if not self.cross:
            order = jnp.argsort(jnp.argsort(scores, axis=-1), axis=-1)
            scores = order.astype(jnp.float32) / self.lag
        scores = scores.reshape(*scores.shape[:2], -1)[..., : max(num_slots - self.sinks, 0)]
        scores = jnp.pad(scores, [(0, 0), (0, 0), (num_slots - scores.shape[-1], 0)])
        scores = jnp.where(is_scored, scores, 1.0)
        short = jnp.where(places < 0, 1.0, recency)
        return slots.to_slots(jnp.where(num_full < 2, short, scores))

    def _parts(self, x: Float[Array, "B K S H"]) -> Float[Array, "B K P L H"]:
        x = x[:, :, self.sinks :]
        x = jnp.pad(x, [(0, 0), (0, 0), (0, -x.shape[2] % self.lag), (0, 0)])
        return x.reshape(*x.shape[:2], -1, self.lag, x.shape[-1])


@CachePolicy.register_subclass("lagkv_original")
@dataclass(frozen=True)
class LagKVOriginal(CachePolicy):
    """LagKV as in its authors' code (arXiv 2504.04704): each part is cut once, and never again.

    After `sinks` tokens come parts of `lag` tokens. As soon as the part behind it is full, a part
    keeps its int(lag (1 - ratio)) tokens of the greatest scores, those of `LagKV`. Which tokens
    stay does not depend on chunks, as their scores depend on their own part and the next one.
    """

    examples = ({"ratio": 0.5, "lag": 8, "sinks": 3},)

    sinks: NonNegativeInt = 16
    lag: _Lag = 1024

    def __post_init__(self):
        super().__post_init__()
        if self.ratio is None:
            raise InputError(
                "model.cache.type=lagkv_original evicts a share of each part; give ratio, or take"
                " type lagkv"
            )
        self._check_alone("type=lagkv_original", "layers", "heads", "critical", "span", "part")

    @property
    def _part_budget(self) -> int:
        return max(int(self.lag * (1 - self.ratio)), 1)

    def budgets(self, length, layer=None):
        read = np.arange(length + 1)
        num_cut = np.maximum((read - self.sinks) // self.lag - 1, 0)
        return read - num_cut * (self.lag - self._part_budget)

    def is_due(self, before, after):
        return (after - self.sinks) // self.lag > (before - self.sinks) // self.lag

    def score(self, slots):
        num_slots, lost = slots.index.shape[-1], self.lag - self._part_budget
        # Parts that were cut before, each of which lost as many tokens
        num_cut = (slots.tokens[:, None, None] - slots.counts) // max(lost, 1)
        num_full = (slots.tokens[:, None, None] - self.sinks) // self.lag
        first = self.sinks + num_cut * self._part_budget  # place of the first part that is whole
        places = jnp.arange(num_slots) - first
        is_scored = (places >= 0) & (places < (num_full - 1 - num_cut) * self.lag)
        whole = jnp.arange(-(-num_slots // self.lag) * self.lag)
        moved = jnp.minimum(first + whole, num_slots - 1)  # [B, K, P L]

        def parts(x):
            x = slots.from_first(x.astype(jnp.float32), 0.0)
            x = jnp.take_along_axis(x, moved[..., None], axis=2)
            return x.reshape(*x.shape[:2], -1, self.lag, x.shape[-1])

        scores = (_spread(parts(slots.keys)) + _spread(parts(slots.values))) / 2
        ranks = jnp.argsort(jnp.argsort(scores, axis=-1), axis=-1)
        stays = (ranks >= lost).reshape(*scores.shape[:2], -1)
        stays = jnp.take_along_axis(stays, jnp.clip(places, 0, stays.shape[-1] - 1), axis=2)
        return slots.to_slots(jnp.where(is_scored & ~stays, -1.0, jnp.inf))


def _spread(parts: Float[Array, "B K P L H"]) -> Float[Array, "B K P L"]:
    """Returns the softmax over each part of the tokens' standard deviations over channels."""
    following = jnp.roll(parts, -1, axis=2)
    low, high = (f(following, axis=3, keepdims=True) for f in (jnp.min, jnp.max))
    span = high - low
    scaled = (parts - low) / jnp.where(span == 0, 1, span)
    return jax.nn.softmax(jnp.std(scaled, axis=-1, ddof=1), axis=-1)
