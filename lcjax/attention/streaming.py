"""StreamingLLM (Xiao et al. 2023, arXiv 2309.17453): attention sinks and recent tokens."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from lcjax.attention.base import AttentionMetadata, Pass, Pattern
from lcjax.attention.cache import LayerCache, RingCache
from lcjax.errors import NonNegativeInt, PositiveInt
from pallas_kernels import causal, prefix, since_chunk


@Pattern.register_subclass("streaming")
@dataclass(frozen=True)
class Streaming(Pattern):
    """The first `sinks` tokens and the last tokens, with positions counted inside the cache.

    The method reads `first` tokens, then `stride` at a time. Before each chunk it evicts all keys
    but the first `sinks` and the last `recent`. Let c be the start of a query's chunk and
    lo = max(c - recent, 0). The query sees the keys from lo on at their true distance, and the
    sinks at the positions just before lo (sec. 3.2). That is exact for every layer, since keys
    depend on earlier tokens only.

    `stride: 1` is the published method: sinks, `recent` past tokens and the token itself. With a
    larger stride queries see more tokens (CEPE evaluates with 2,048). The released chat demo evicts
    before each turn instead (`evict_for_space`), which is not implemented; docs/methods.md
    describes the difference.
    """

    examples = ({"sinks": 2, "recent": 5}, {"sinks": 3, "recent": 4, "stride": 5, "first": 9})
    # ALiBi's distances count places in the cache, too (sec. 3.2).
    encodings = ("rope", "alibi", "transformer_xl")

    sinks: NonNegativeInt = 4  # first tokens that stay visible (sec. 3.1)
    # Keys kept beside the sinks; sinks + recent + stride <= the trained length
    recent: PositiveInt = 2044
    stride: PositiveInt = 1  # tokens read between two evictions
    first: PositiveInt | None = None  # tokens read before the first eviction; null: sinks + recent

    @property
    def _first_chunk(self) -> int:
        return self.sinks + self.recent if self.first is None else self.first

    def passes(self, metadata: AttentionMetadata) -> list[Pass]:
        order, first = metadata.q_order, self._first_chunk
        chunk = jnp.where(order < first, 0, first + (order - first) // self.stride * self.stride)
        # Number of evicted tokens, by which the sinks move towards the query
        gap = jnp.maximum(chunk - self.recent - self.sinks, 0)
        local = since_chunk(self.stride, first, self.recent)
        near = Pass(metadata.q_positions, metadata.k_positions, causal() & local)
        if self.sinks == 0:
            return [near]
        far = causal() & ~local & prefix(self.sinks)
        return [near, Pass(metadata.q_positions - gap, metadata.k_positions, far)]

    @property
    def layer_cache(self) -> LayerCache:
        recent = max(self.recent + self.stride, self._first_chunk - self.sinks)
        return RingCache(self.sinks, recent)
