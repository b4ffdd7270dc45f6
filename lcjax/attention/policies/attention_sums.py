"""Policies that add up the attention that a key receives: observed_attention and h2o."""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

from lcjax.attention.candidates import Seen, attention_by_head
from lcjax.attention.eviction import CachePolicy
from lcjax.errors import NonNegativeInt

_BLOCK = 128  # queries whose weights are computed at once


class AttentionSums(CachePolicy):
    """A policy that keeps the sum of the attention weights of each key, over all later queries.

    Kernels return no sums over queries, so weights are computed a second time, in blocks.
    """

    slot_state: ClassVar[tuple[str, ...]] = ("received",)

    def observe(self, seen: Seen):
        queries, index, slots = seen.queries, seen.index, seen.slots
        extra = -queries.shape[2] % min(_BLOCK, queries.shape[2])
        queries = jnp.pad(queries, [(0, 0), (0, 0), (0, extra), (0, 0)])
        index = jnp.pad(index, [(0, 0), (0, extra)], constant_values=-1)
        size = min(_BLOCK, queries.shape[2])
        blocks = queries.shape[2] // size

        def add(total, block):
            part = jax.lax.dynamic_slice_in_dim(queries, block * size, size, 2)
            places = jax.lax.dynamic_slice_in_dim(index, block * size, size, 1)
            # Each query head of a key head has an equal part: the mean.
            sums = attention_by_head(slots, part, places, lambda weights: weights.sum(2).mean(1))
            return total + sums, None

        received = slots.state["received"][..., 0]
        # A slot that a new token takes may hold the sum of a token that was evicted.
        oldest = jnp.min(jnp.where(seen.index >= 0, seen.index, jnp.iinfo(jnp.int32).max), axis=-1)
        received = jnp.where(slots.index >= oldest[:, None, None], 0, received)
        received, _ = jax.lax.scan(add, received, jnp.arange(blocks))
        return {"received": received[..., None]}


@CachePolicy.register_subclass("observed_attention")
@dataclass(frozen=True)
class ObservedAttention(AttentionSums):
    """Keeps keys that received most attention from each later query, on average (as in kvpress)."""

    def score(self, slots):
        seen_by = slots.tokens[:, None, None] - slots.index
        return slots.state["received"][..., 0] / jnp.maximum(seen_by, 1)


@CachePolicy.register_subclass("h2o")
@dataclass(frozen=True)
class H2O(AttentionSums):
    """Keeps keys that received most attention in all, and the last `recent` (arXiv 2306.14048).

    The sum over queries favours early tokens, as in the authors' code. In a key head it is the mean
    over its query heads.
    """

    examples = ({"tokens": 32, "recent": 8},)

    recent: NonNegativeInt = 128

    @property
    def protected(self) -> int:
        return self.recent

    def score(self, slots):
        is_recent = slots.index >= slots.tokens[:, None, None] - self.recent
        return jnp.where(is_recent, jnp.inf, slots.state["received"][..., 0])
