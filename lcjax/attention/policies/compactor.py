"""Policies that score keys by attention without a causal mask: non_causal and compactor."""

from dataclasses import dataclass
from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from lcjax.attention.candidates import Candidates, Seen, attention_by_head, on_each_device
from lcjax.attention.eviction import CachePolicy
from lcjax.attention.policies.last_queries import LastQueries, pool
from lcjax.attention.policies.leverage import gaussian_sketch, sketched_leverage, standardised
from lcjax.errors import Interval, NonNegativeInt, PositiveInt


@CachePolicy.register_subclass("non_causal")
@dataclass(frozen=True)
class NonCausal(LastQueries):
    """Keeps keys to which their neighbours attend, earlier and later ones (arXiv 2507.08143).

    All queries of a block of `block` tokens attend to all of its keys, with logits q k that are not
    divided by sqrt(H). The score of a key is the sum of its weights, averaged over the query heads
    of a key head, times the norm of its value, as a mean over 3 neighbours. It is standardised over
    the heads and tokens of a row. Blocks are counted from the first token of a row. A cut inside a
    block counts the queries and keys of the block so far.

    As in kvpress after release 0.5.5. Its rows of a batch share mean and deviation, which changes
    no order. In release 0.5.5 zeros fill the last block (`fills_block`).
    """

    examples = ({"tokens": 32, "block": 8}, {"ratio": 0.5, "block": 16, "fills_block": True})
    slot_state = ("received",)  # sums of weights, of keys in blocks whose queries are all known

    block: PositiveInt = 256
    # Whether the missing tokens of a block take part as queries and keys of zeros, as in kvpress
    # 0.5.5: they take weight from the keys of the block, and give each of them an equal part
    fills_block: bool = False

    @property
    def ends(self) -> tuple[int, int]:
        """How many of the first and of the last tokens are in no block."""
        return 0, 0

    @property
    def num_queries(self) -> int:
        return self.block + self.ends[1]

    def is_scored(self, slots: Candidates) -> Bool[Array, "B K S"]:
        """Returns which slots hold tokens of blocks."""
        first, last = self.ends
        stop = slots.tokens[:, None, None] - last
        return slots.is_token & (slots.index >= first) & (slots.index < stop)

    def observe(self, seen: Seen):
        last, slots = super().observe(seen), seen.slots
        received = jnp.where(seen.is_new, 0, slots.state["received"][..., 0])
        is_new = seen.index >= 0
        begin = self._whole_blocks(slots.tokens - is_new.sum(-1, dtype=jnp.int32))
        end = self._whole_blocks(slots.tokens)

        def add(received):
            queries = jnp.concatenate([slots.state["queries"], seen.queries], axis=2)
            # Padding of the call may stand anywhere; it goes in front.
            padding = [(0, 0), (self.num_queries, 0)]
            is_query = jnp.pad(is_new, padding, constant_values=True)
            order = jnp.argsort(is_query, axis=-1, stable=True)[:, None, :, None]
            queries = jnp.take_along_axis(queries, order, axis=2)

            def step(received, number):
                block = begin + number
                is_whole = (block < end).astype(jnp.int32)
                return self._add_block(slots, received, queries, block, is_whole * self.block), None

            most = -(-seen.index.shape[1] // self.block)
            return jax.lax.scan(step, received, jnp.arange(most, dtype=jnp.int32))[0]

        received = jax.lax.cond((begin < end).any(), add, lambda x: x, received)
        return last | {"received": received[..., None]}

    def _whole_blocks(self, tokens: Int[Array, " B"]) -> Int[Array, " B"]:
        """Returns the number of blocks whose tokens were all read."""
        return jnp.maximum(tokens - sum(self.ends), 0) // self.block

    def _add_block(
        self,
        slots: Candidates,
        received: Float[Array, "B K S"],
        queries: Float[Array, "B N M H"],
        block: Int[Array, " B"],
        length: Int[Array, " B"],
    ) -> Float[Array, "B K S"]:
        """Returns `received` with the sums of weights of the keys of one block.

        Args:
          slots: the keys.
          received: the sums of all keys.
          queries: the last of them is that of the last token.
          block: its number.
          length: its tokens, counted from its first.
        """
        place = jnp.arange(self.block, dtype=jnp.int32)
        index = (self.ends[0] + block * self.block)[:, None] + place  # [B, P]
        is_query = place < length[:, None]
        number = jnp.clip(queries.shape[2] - slots.tokens[:, None] + index, 0, queries.shape[2] - 1)
        block_queries = jnp.take_along_axis(queries, number[:, None, :, None], axis=2)
        by_head = jnp.broadcast_to(index[:, None], (*slots.index.shape[:2], self.block))
        places = on_each_device(_slots_of, slots.layout, slots.index, by_head)
        is_key = slots.take(slots.index, places) == index[:, None]
        is_key &= is_query[:, None] & (places < received.shape[-1])
        keys = slots.take(slots.keys, places[..., None]).astype(jnp.float32)
        query_index = jnp.where(is_query | self.fills_block, 0, -1)
        block_slots = slots._replace(
            keys=jnp.where(is_key[..., None], keys, 0),
            index=jnp.where(is_key | self.fills_block, 0, -1),
        )
        # Logits of `attention_by_head` are divided by sqrt(H).
        block_queries = jnp.where(is_query[:, None, :, None], block_queries.astype(jnp.float32), 0)
        block_queries *= block_queries.shape[-1] ** 0.5
        sums = attention_by_head(
            block_slots, block_queries, query_index, lambda weights: weights.sum(2).mean(1)
        )
        places = jnp.where(is_key, places, received.shape[-1])
        return jnp.put_along_axis(received, places, sums, axis=2, inplace=False, mode="drop")

    def attention_score(self, slots: Candidates) -> Float[Array, "B K S"]:
        """Returns the standardised score of the tokens of blocks, and 0 for others."""
        received, block = slots.state["received"][..., 0], self._whole_blocks(slots.tokens)
        length = jnp.maximum(slots.tokens - sum(self.ends) - block * self.block, 0)
        received = self._add_block(slots, received, slots.state["queries"], block, length)
        norms = jnp.linalg.norm(slots.values.astype(jnp.float32), axis=-1)
        is_scored = self.is_scored(slots)
        first = slots.from_first(jnp.where(is_scored, received * norms, 0), 0.0)
        return standardised(slots.to_slots(pool(first, 3, "mean")), is_scored)

    def score(self, slots):
        return self.attention_score(slots)


def _slots_of(order: Int[Array, "B K S"], index: Int[Array, "B K P"]) -> Int[Array, "B K P"]:
    """Returns the slots of the tokens `index`; where there is none, any slot or S."""
    # Empty slots get the index of a token before them, so that indices are sorted.
    order = jax.lax.cummax(order, axis=2)
    return jax.vmap(jax.vmap(jnp.searchsorted))(order, index).astype(jnp.int32)


@CachePolicy.register_subclass("compactor")
@dataclass(frozen=True)
class Compactor(NonCausal):
    """Keeps keys that neighbours attend to, or that no other key stands for (arXiv 2507.08143).

    The score is that of `NonCausal` plus `blending` times that of `Leverage`, both over the tokens
    between the first `sinks` and the last `recent`, which always stay. As in kvpress, whose rows of
    a batch share means and deviations; here each row has its own.
    """

    examples = ({"tokens": 32, "block": 8}, {"ratio": 0.5, "block": 16, "sinks": 2, "recent": 0})

    sinks: NonNegativeInt = 8
    recent: NonNegativeInt = 4
    # Weight of the leverage; null: the share of the tokens that is evicted (with a threshold 0.35,
    # as in the paper)
    blending: Annotated[float, Interval(least=0)] | None = None
    sketch: PositiveInt = 48
    seed: NonNegativeInt = 0  # of the sketch, which is the same in all layers and rows

    @property
    def ends(self) -> tuple[int, int]:
        return self.sinks, self.recent

    @property
    def protected(self) -> int:
        return self.recent

    def gaussian(self, slots: Candidates) -> Float[Array, "1 K H k"]:
        """Returns the sketch of the keys."""
        return gaussian_sketch(slots, self.sketch, self.seed)

    def score(self, slots):
        is_scored = self.is_scored(slots)
        leverage = standardised(
            sketched_leverage(slots, is_scored, self.gaussian(slots)), is_scored
        )
        scores = self._weight(slots) * leverage + self.attention_score(slots)
        return jnp.where(is_scored, scores, jnp.inf)

    def _weight(self, slots: Candidates) -> float | Float[Array, "B 1 1"]:
        """Returns the weight of the leverage in each row."""
        if self.blending is not None:
            return self.blending
        if self.threshold is not None:
            return 0.35
        if self.ratio is not None:
            return self.ratio
        return jnp.maximum(1 - self.tokens / jnp.maximum(slots.tokens, 1), 0)[:, None, None]
