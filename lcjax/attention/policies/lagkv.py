"""LagKV: scores of tokens relative to the tokens that follow them."""

from dataclasses import dataclass
from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lcjax.attention.eviction import CachePolicy
from lcjax.errors import NonNegativeInt, Range


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

    sinks: NonNegativeInt = 4
    lag: Annotated[int, Range(2, hint="a part has a range")] = 128
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


def _spread(parts: Float[Array, "B K P L H"]) -> Float[Array, "B K P L"]:
    """Returns the softmax over each part of the tokens' standard deviations over channels."""
    following = jnp.roll(parts, -1, axis=2)
    low, high = (f(following, axis=3, keepdims=True) for f in (jnp.min, jnp.max))
    span = high - low
    scaled = (parts - low) / jnp.where(span == 0, 1, span)
    return jax.nn.softmax(jnp.std(scaled, axis=-1, ddof=1), axis=-1)
