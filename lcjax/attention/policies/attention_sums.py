"""Policies that add up the attention that a key receives: observed_attention and h2o."""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp

from lcjax.attention.candidates import Seen, attention_by_head, by_blocks
from lcjax.attention.eviction import CachePolicy
from lcjax.errors import NonNegativeInt


class AttentionSums(CachePolicy):
    """A policy that keeps the sum of the attention weights of each key, over all later queries.

    Kernels return no sums over queries, so weights are computed a second time, in blocks.
    """

    scores_attention: ClassVar[bool] = True

    slot_state: ClassVar[tuple[str, ...]] = ("received",)

    def observe(self, seen: Seen):
        # A slot that a new token takes may hold the sum of a token that was evicted.
        received = jnp.where(seen.is_new, 0, seen.slots.state["received"][..., 0])

        def add(total, queries, index):
            # Each query head of a key head has an equal part: the mean.
            sums = attention_by_head(seen.slots, queries, index, lambda x: x.sum(2).mean(1))
            return total + sums

        return {"received": by_blocks(add, received, seen.queries, seen.index)[..., None]}


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
