"""Policies that read keys and places alone: random, knorm, keydiff, streaming, think."""

from dataclasses import dataclass
from typing import Annotated

import jax
import jax.numpy as jnp

from lcjax.attention.channels import Channels
from lcjax.attention.eviction import CachePolicy
from lcjax.errors import InputError, Interval, NonNegativeInt


@CachePolicy.register_subclass("random")
@dataclass(frozen=True)
class Random(CachePolicy):
    """Keeps random tokens, others in every layer and head: the lower end of comparisons.

    The numbers depend on `seed`, layer, head and the place of a token in its text.
    """

    seed: NonNegativeInt = 0

    @property
    def differs_by_layer(self) -> bool:
        return True

    def score(self, slots):
        key = jax.random.fold_in(jax.random.key(self.seed), slots.layer)
        heads = jnp.arange(slots.index.shape[1], dtype=jnp.int32)[:, None]

        def number(head, index):
            return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, head), index))

        heads = jnp.broadcast_to(heads, slots.index.shape)
        flat = jax.vmap(number)(heads.ravel(), jnp.maximum(slots.index, 0).ravel())
        return flat.reshape(slots.index.shape)


@CachePolicy.register_subclass("knorm")
@dataclass(frozen=True)
class Knorm(CachePolicy):
    """Keeps keys of a small norm, which receive much attention (Devoto et al. 2024, 2406.11430)."""

    def score(self, slots):
        return -jnp.linalg.norm(slots.keys.astype(jnp.float32), axis=-1)


@CachePolicy.register_subclass("keydiff")
@dataclass(frozen=True)
class KeyDiff(CachePolicy):
    """Keeps keys that differ from the mean direction of all keys (Park et al. 2025, 2504.15364).

    The score is -cos(k_t, mean of k / |k|) over the rotated keys of a head.
    """

    scores_part = True

    def score(self, slots):
        keys = slots.keys.astype(jnp.float32)
        unit = keys / jnp.maximum(jnp.linalg.norm(keys, axis=-1, keepdims=True), 1e-12)
        # Proportional to the mean; its length does not change the cosine.
        total = jnp.where(slots.is_token[..., None], unit, 0).sum(2, keepdims=True)
        direction = total / jnp.maximum(jnp.linalg.norm(total, axis=-1, keepdims=True), 1e-12)
        return -(unit * direction).sum(-1)


@CachePolicy.register_subclass("streaming")
@dataclass(frozen=True)
class StreamingCache(CachePolicy):
    """Keeps the first `sinks` tokens and the last ones (StreamingLLM, arXiv 2309.17453).

    Tokens keep their true positions, as in kvpress. The paper places them anew, as do
    `positions: consecutive` and `model.pattern.type=streaming`.
    """

    scores_part = True

    sinks: NonNegativeInt = 4

    def __post_init__(self):
        super().__post_init__()
        if self.tokens is not None and self.tokens < self.sinks:
            raise InputError(
                f"model.cache.tokens={self.tokens} has no room for sinks={self.sinks} first tokens;"
                " give more tokens, or fewer sinks"
            )

    def score(self, slots):
        # After a cut by another policy, these are the first tokens that are left.
        return jnp.where(slots.ranks < self.sinks, jnp.inf, slots.index)


@CachePolicy.register_subclass("think")
@dataclass(frozen=True)
class ThinK(CachePolicy):
    """Keeps all tokens, and some channels of their keys (Xu et al. 2024, arXiv 2407.21018).

    Any other policy drops channels of the keys that it keeps if it has `channels`.
    """

    examples = ({"channels": Channels(window=8)},)

    ratio: Annotated[float, Interval(0, 0, hint="all tokens stay; set channels.ratio")] = 0.0
    channels: Channels = Channels()

    def score(self, slots):
        return slots.index
