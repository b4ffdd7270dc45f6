"""Policies that score keys by the attention of the last queries: snapkv and tova."""

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lcjax.attention.candidates import Candidates, attention_by_head, turn
from lcjax.attention.eviction import CachePolicy
from lcjax.errors import InputError, OneOf, PositiveInt


class LastQueries(CachePolicy):
    """A policy that keeps the last queries, which may come from several chunks of a text."""

    @property
    @abc.abstractmethod
    def num_queries(self) -> int:
        """The number of last queries."""

    def state(self, layer):
        shape = (layer.num_heads, self.num_queries, layer.head_dim)
        places = jax.ShapeDtypeStruct((1, self.num_queries, 1), jnp.int32)
        # Order indices plus 1; 0: there is no query yet.
        return {"queries": jax.ShapeDtypeStruct(shape, layer.dtype), "query_order": places}

    def observe(self, seen):
        def last(old, new, is_new):
            """Returns the last of the old and the new entries [B, _, n, _] that are tokens."""
            both = jnp.concatenate([old, new.astype(old.dtype)], axis=2)
            # Padding may precede or follow the new tokens; it goes in front.
            is_entry = jnp.pad(is_new, [(0, 0), (old.shape[2], 0)], constant_values=True)
            order = jnp.argsort(is_entry, axis=-1, stable=True)[:, -old.shape[2] :]
            return jnp.take_along_axis(both, order[:, None, :, None], axis=2)

        state, is_new = seen.slots.state, seen.index >= 0
        places = seen.index[:, None, :, None] + 1
        return {
            "queries": last(state["queries"], seen.queries, is_new),
            "query_order": last(state["query_order"], places, is_new),
        }

    def move(self, state, by, rotation):
        queries = state["queries"].swapaxes(1, 2)
        by = jnp.broadcast_to(by[:, None], queries.shape[:2])
        return {"queries": turn(queries, by, rotation).swapaxes(1, 2)}

    def attention(
        self, slots: Candidates, reduce: Callable[[Float[Array, "B G W S"]], Array]
    ) -> Float[Array, "B K ..."]:
        """Returns `reduce` of the attention weights of the last queries on each key head.

        The weights of queries that a row does not have are 0.
        """
        return attention_by_head(slots, slots.state["queries"], self.query_index(slots), reduce)

    def query_index(self, slots: Candidates) -> Int[Array, "B W"]:
        """Returns the order indices of the last queries; -1: a row does not have as many."""
        return slots.state["query_order"][:, 0, :, 0] - 1


@CachePolicy.register_subclass("snapkv")
@dataclass(frozen=True)
class SnapKV(LastQueries):
    """Keeps what the last `window` queries attend to (Li et al. 2024, arXiv 2404.14469).

    The score of a key is the mean of its attention weights over these queries, pooled over `pool`
    neighbours and averaged over the query heads of a key head, as in kvpress. Keys in the window
    always stay. The authors' code uses max pooling and window 32; there `pooling: max` averages
    heads before it pools.
    """

    examples = ({"tokens": 32, "window": 8}, {"ratio": 0.5, "window": 8, "pooling": "max"})

    window: PositiveInt = 64
    pool: PositiveInt = 5
    pooling: Annotated[str, OneOf(("mean", "max"))] = "mean"

    def __post_init__(self):
        super().__post_init__()
        if self.pool % 2 == 0:
            raise InputError(f"model.cache.pool={self.pool} must be odd, as a key has neighbours")

    @property
    def num_queries(self) -> int:
        return self.window

    @property
    def protected(self) -> int:
        return self.window

    def score(self, slots):
        number = (self.query_index(slots) >= 0).sum(-1)  # of the queries that a row has
        mean = self.attention(slots, lambda weights: weights.sum(2).mean(1))
        mean = mean / jnp.maximum(number, 1)[:, None, None]
        in_window = slots.index >= slots.tokens[:, None, None] - self.window
        # Neighbours in the text: those in the window, and places without a token, count as 0.
        before = slots.from_first(jnp.where(in_window, 0, mean), 0.0)
        pooled = slots.to_slots(_pool(before, self.pool, self.pooling))
        return jnp.where(in_window, jnp.inf, pooled)


def _pool(x: Float[Array, "B K S"], size: int, pooling: str) -> Float[Array, "B K S"]:
    window, padding = (1, 1, size), ((0, 0), (0, 0), (size // 2, size // 2))
    if pooling == "max":
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, (1, 1, 1), padding)
    return jax.lax.reduce_window(x, 0.0, jax.lax.add, window, (1, 1, 1), padding) / size


@CachePolicy.register_subclass("tova")
@dataclass(frozen=True)
class Tova(LastQueries):
    """Keeps what the last query attends to (Oren et al. 2024, arXiv 2401.06104).

    The score is the mean of its attention weights over all heads, so all heads keep the same
    tokens, and the last one always stays, as in kvpress. In the authors' code it may go
    (`keep_last: false`).
    """

    keep_last: bool = True

    @property
    def num_queries(self) -> int:
        return 1

    @property
    def protected(self) -> int:
        return int(self.keep_last)

    def score(self, slots):
        weights = self.attention(slots, lambda weights: weights.mean((1, 2)))
        weights = jnp.broadcast_to(weights.mean(1, keepdims=True), weights.shape)
        is_last = slots.index == slots.tokens[:, None, None] - 1
        return jnp.where(is_last & self.keep_last, jnp.inf, weights)
