"""StreamingLLM (Xiao et al. 2023, arXiv 2309.17453): attention sinks and recent tokens."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from lcjax.attention.base import Pass, Pattern, Places
from lcjax.errors import whole_number, whole_numbers
from pallas_kernels import causal, prefix, since_chunk


@Pattern.register_subclass("streaming")
@dataclass(frozen=True)
class Streaming(Pattern):
    """The first `sinks` tokens and the last ones, with positions counted inside the cache.

    The method reads `first` tokens, then `stride` at a time, and before each chunk keeps the first
    `sinks` and the last `recent` keys. With c the start of a query's chunk it sees the keys from
    lo = max(c - recent, 0) on at their own distance, and sinks before lo as if they stood right
    before lo (sec. 3.2). That is exact for every layer, since keys depend on earlier tokens only.
    `stride: 1` is the published method: sinks, `recent` past tokens and the token itself. The
    stride is part of the method: larger ones see more (CEPE evaluates with 2,048). The released
    chat demo evicts before each turn instead (`evict_for_space`), which is not offered:
    docs/methods.md says what differs.
    """

    examples = ({"sinks": 2, "recent": 5}, {"sinks": 3, "recent": 4, "stride": 5, "first": 9})

    sinks: int = 4  # first tokens that stay visible (sec. 3.1)
    recent: int = 2044  # keys kept beside the sinks; sinks + recent + stride <= the trained length
    stride: int = 1  # tokens read between two evictions
    first: int | None = None  # tokens read before the first eviction; null: sinks + recent

    def __post_init__(self):
        whole_number("pattern.sinks", self.sinks, 0)
        whole_numbers("pattern", self, 1, "recent", "stride", "first")

    # With ALiBi, distances count places in the cache as well (sec. 3.2).
    encodings = ("rope", "alibi")

    @property
    def _first(self) -> int:
        return self.sinks + self.recent if self.first is None else self.first

    def passes(self, places: Places) -> list[Pass]:
        order, first = places.q_order, self._first
        chunk = jnp.where(order < first, 0, first + (order - first) // self.stride * self.stride)
        # Tokens that were evicted between the sinks and lo; the sinks move up by as many.
        gap = jnp.maximum(chunk - self.recent - self.sinks, 0)
        local = since_chunk(self.stride, first, self.recent)
        near = Pass(places.q_positions, places.k_positions, causal() & local)
        if self.sinks == 0:
            return [near]
        far = causal() & ~local & prefix(self.sinks)
        return [near, Pass(places.q_positions - gap, places.k_positions, far)]

    def cache_window(self) -> tuple[int, int]:
        return self.sinks, max(self.recent + self.stride, self._first - self.sinks)
