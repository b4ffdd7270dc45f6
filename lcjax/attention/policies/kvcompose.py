"""KVCompose: a model reads a text twice, and keeps the keys that it reads most the second time."""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from lcjax.attention.budgets import Composite, HeadBudget
from lcjax.attention.candidates import Seen, attention_by_head, by_blocks
from lcjax.attention.eviction import CachePolicy, Reading


@CachePolicy.register_subclass("kvcompose")
@dataclass(frozen=True)
class KVCompose(CachePolicy):
    """Keeps what a model reads of a text when it reads it again (2025, arXiv 2509.05165).

    After a prompt, with all of its keys, the model reads the prompt a second time. A key receives
    the mean over the query heads of its group of the largest attention weight from these tokens;
    the score is that plus its mean over the key heads of the layer. The tokens that are read again
    see the prompt and each other and never enter the cache. By default heads of a layer keep
    equally many tokens, each its own, and layers share what stays (`heads: {type: composite}`). As
    in kvpress; its form without structure is `heads: {type: across_layers, floor: 0}`.

    While a prompt is read again, the cache has slots for it twice. Tokens after a prompt stay.
    """

    examples = ({"ratio": 0.5}, {"tokens": 32, "heads": None})
    slot_state: ClassVar[tuple[str, ...]] = ("received",)  # inf: a token was not read again yet
    reads_again: ClassVar[bool] = True

    heads: HeadBudget | None = Composite()

    def readings(self, text, start, encode):
        return [Reading(text, start, start + len(text))] if text else []

    def observe(self, seen: Seen):
        slots = seen.slots
        received = jnp.where(seen.is_new, jnp.inf, slots.state["received"][..., 0])
        if "span" in slots.state:
            start, stop = (slots.state["span"][:, :, i] for i in range(2))  # [B, 1, 1]
            is_scored = (slots.index >= start) & (slots.index < stop)
            mean = self._largest(seen).mean(2)
            # Tokens since the last cut have the same slots in all heads.
            scores = mean + mean.mean(1, keepdims=True)
            received = jnp.where(is_scored, scores, received)
        return {"received": received[..., None]}

    def _largest(self, seen: Seen) -> Float[Array, "B K G S"]:
        """Returns the largest weight of each key over the new queries, for each query head."""
        rows, kv_heads, slots = seen.slots.index.shape
        group = seen.queries.shape[1] // kv_heads

        def step(largest, queries, index):
            weights = attention_by_head(seen.slots, queries, index, lambda x: x.max(2))
            return jnp.maximum(largest, weights)

        initial = jnp.zeros((rows, kv_heads, group, slots), jnp.float32)
        return by_blocks(step, initial, seen.queries, seen.index)

    def score(self, slots):
        return slots.state["received"][..., 0]
