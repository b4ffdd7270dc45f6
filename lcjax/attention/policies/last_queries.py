"""Policies that use the attention of the last queries: snapkv, finch, tova and simlayerkv."""

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from lcjax.attention.candidates import (
    Candidates,
    attention_by_head,
    last_queries,
    observe_last_queries,
    turn,
)
from lcjax.attention.eviction import CachePolicy
from lcjax.errors import Fraction, InputError, Interval, NonNegativeInt, OneOf, PositiveInt


class LastQueries(CachePolicy):
    """A policy that keeps the last queries, which may come from several chunks of a text."""

    scores_attention: ClassVar[bool] = True

    @property
    @abc.abstractmethod
    def num_queries(self) -> int:
        """The number of last queries."""

    def state(self, layer):
        return last_queries(self.num_queries, layer)

    def observe(self, seen):
        return observe_last_queries(seen)

    def move(self, state, by, rotation):
        queries = state["queries"].swapaxes(1, 2)
        by = jnp.broadcast_to(by[:, None], queries.shape[:2])
        return {"queries": turn(queries, by, rotation).swapaxes(1, 2)}

    def attention(
        self, slots: Candidates, reduce: Callable[..., Array], *by_head: Float[Array, "B K ..."]
    ) -> Float[Array, "B K ..."]:
        """Returns `reduce` of the attention weights of the last queries on each key head.

        The weights of queries that a row does not have are 0. Arguments as in `attention_by_head`.
        """
        queries, index = slots.state["queries"], self.query_index(slots)
        return attention_by_head(slots, queries, index, reduce, *by_head)

    def query_index(self, slots: Candidates) -> Int[Array, "B W"]:
        """Returns the order indices of the last queries; -1: a row does not have as many."""
        return slots.state["query_order"][:, 0, :, 0] - 1


class Window(LastQueries):
    """A policy with a window of last queries, or of the tokens of a question, that always stay."""

    window: int

    @property
    def num_queries(self) -> int:
        return self.window

    @property
    def protected(self) -> int:
        return self.window

    def check_question(self, tokens: int) -> None:
        if not 1 <= tokens <= self.window:
            raise InputError(
                f"question has {tokens} tokens, and model.cache.window={self.window} is the largest"
                " number of them; give at least 1, or a larger window"
            )

    def size(self, slots: Candidates) -> Int[Array, " B"]:
        """Returns the tokens of the window of each row."""
        number = (self.query_index(slots) >= 0).sum(-1)  # of the queries that a row has
        return number if slots.question is None else jnp.minimum(number, slots.question)

    def in_window(self, slots: Candidates) -> Bool[Array, "B K S"]:
        size = self.window if slots.question is None else slots.question[:, None, None]
        return slots.index >= slots.tokens[:, None, None] - size

    def mean_attention(
        self, slots: Candidates, factors: Float[Array, "B W"] | None = None
    ) -> Float[Array, "B K S"]:
        """Returns the mean of the attention weights of the window's queries on each key.

        It is a mean over the query heads of a key head, too. `factors` multiply the weights of each
        query.
        """
        size = self.size(slots)[:, None, None]
        factors = 1.0 if factors is None else factors[:, None]
        is_asking = jnp.arange(self.window) >= self.window - size
        shape = *slots.keys.shape[:2], self.window
        factors = jnp.broadcast_to(jnp.where(is_asking, factors, 0.0), shape)

        def reduce(weights, factors):
            return (weights * factors[:, None, :, None]).sum(2).mean(1)

        return self.attention(slots, reduce, factors) / jnp.maximum(size, 1)


@CachePolicy.register_subclass("snapkv")
@dataclass(frozen=True)
class SnapKV(Window):
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

    def score(self, slots):
        mean, in_window = self.mean_attention(slots), self.in_window(slots)
        # Neighbours in the text: those in the window, and places without a token, count as 0.
        before = slots.from_first(jnp.where(in_window, 0, mean), 0.0)
        pooled = slots.to_slots(pool(before, self.pool, self.pooling))
        return jnp.where(in_window, jnp.inf, pooled)


def pool(x: Float[Array, "B K S"], size: int, pooling: str) -> Float[Array, "B K S"]:
    """Returns the `pooling` (mean or max) of each number and its neighbours, `size` in all.

    Beyond both ends there are zeros for a mean, and nothing for a maximum.
    """
    window, padding = (1, 1, size), ((0, 0), (0, 0), (size // 2, size // 2))
    if pooling == "max":
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, (1, 1, 1), padding)
    return jax.lax.reduce_window(x, 0.0, jax.lax.add, window, (1, 1, 1), padding) / size


@CachePolicy.register_subclass("finch")
@dataclass(frozen=True)
class Finch(Window):
    """Keeps what the question attends to (Corallo and Papotti 2024, arXiv 2408.00167).

    The window is the question at the end of a prompt, of at most `window` tokens
    (`read_prefix(lm, ids, question=n)`); where it is not known, the last `window` tokens. The score
    of a key is the mean of its attention weights over the window, each times the number of keys
    before the query, averaged over the query heads of a key head. With `part` each part of so many
    tokens of the prompt keeps its share of them. What stays stands at consecutive positions. As in
    kvpress; the paper reads the parts one after the other, each with the question.
    """

    examples = ({"tokens": 32, "window": 8}, {"ratio": 0.5, "window": 8, "part": 20})

    positions: Annotated[str, OneOf(("text", "consecutive"))] = "consecutive"
    window: PositiveInt = 64

    def score(self, slots):
        before = slots.next_position[:, None] - self.window + jnp.arange(self.window)
        scores = self.mean_attention(slots, before.astype(jnp.float32))
        return jnp.where(self.in_window(slots), jnp.inf, scores)


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


@CachePolicy.register_subclass("simlayerkv")
@dataclass(frozen=True)
class SimLayerKV(LastQueries):
    """Keeps the first and last tokens in lazy layers (Zhang et al. 2024, arXiv 2410.13846).

    A layer is lazy if the last `last_queries` queries put more than `lazy_threshold` of their
    attention on the first `sinks` tokens and the `recent` ones before these queries, a mean over
    heads and queries, and if there are as many tokens. It then keeps the sinks and the last
    `recent` - `last_queries` tokens at the end of a prompt; other layers keep everything, and so
    does what follows. As in kvpress, but decided for each row; there rows are averaged.

    The cache of a layer that is lazy in all rows of a batch has slots for what it keeps. So the
    size of a cache depends on the text, and programs are compiled for each set of such layers.
    """

    examples = ({"lazy_threshold": 0.1, "sinks": 2, "recent": 12, "last_queries": 3},)

    ratio: Annotated[float, Interval(0, 0, hint="layers that are not lazy keep all tokens")] = 0.0
    lazy_threshold: Fraction = 0.9
    sinks: NonNegativeInt = 4
    recent: PositiveInt = 1024
    last_queries: PositiveInt = 1

    def __post_init__(self):
        super().__post_init__()
        self._check_alone("lazy_threshold", "layers", "heads", "critical", "span", "part")
        if self.last_queries >= self.recent:
            raise InputError(
                f"model.cache.last_queries={self.last_queries} must be fewer than recent="
                f"{self.recent}, the last tokens that a lazy layer keeps with the next ones"
            )
        if self.positions != "text":
            raise InputError(
                "model.cache.positions=consecutive gives the next token one position in all"
                " layers, and lazy ones keep fewer tokens; use positions=text"
            )

    @property
    def num_queries(self) -> int:
        return self.last_queries

    @property
    def cuts_text(self) -> bool:
        return False

    @property
    def differs_by_layer(self) -> bool:
        return True

    @property
    def lazy_tokens(self) -> int:
        return self.sinks + self.recent - self.last_queries

    def loses_nothing(self, length, layer):
        return self.channels is None and length < self.sinks + self.recent

    def is_lazy(self, slots):
        first = slots.tokens[:, None, None] - self.last_queries
        is_near = (slots.index >= first - self.recent) & (slots.index < first)
        is_near |= slots.index < self.sinks

        def reduce(weights, is_near):
            return jnp.where(is_near[:, None, None], weights, 0).sum(-1).mean(1).sum(-1)

        near = self.attention(slots, reduce, is_near).mean(1)
        queries = (self.query_index(slots) >= 0).sum(-1)
        is_long = slots.tokens >= self.sinks + self.recent
        return is_long & (near > self.lazy_threshold * queries)

    def score(self, slots):
        return jnp.where(slots.index < self.sinks, jnp.inf, slots.index)
