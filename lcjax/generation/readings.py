"""Prompts that were read and not yet cut, for cache methods that cut them in other ways.

Most of the time of a comparison of cache policies goes into reading the same prompts again, for
each policy and ratio. What layers hold of a prompt before its cut depends on the policy only if it
observes queries (`LayerCache.reading`), so any other method can cut the same arrays.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lcjax.models import ModelConfig
from lcjax.models.cache import Cache, with_kinds


class Reading(NamedTuple):
    """The result of reading prompts."""

    logits: jax.Array
    cache: Cache
    seconds: float = 0.0  # that it took, without compilation


class Readings:
    """Readings of at most `num_bytes` bytes on all devices together.

    Methods read the same prompts one after the other, so the last reading is the one that is needed
    latest. If there is no space for it, readings of other methods make way, and then it is not
    kept. Keeping the last ones would lose all of prompts that are a little more than the space.

    Attributes:
      saved_seconds: the time of all readings that were used again.
    """

    def __init__(self, num_bytes: int, stopwatch: Callable[[], Any]):
        """Keeps no reading yet.

        Args:
          num_bytes: their maximum size.
          stopwatch: makes a context manager that measures `seconds`, and those of `compiling`.
        """
        self._num_bytes, self._stopwatch, self.saved_seconds = num_bytes, stopwatch, 0.0
        self._readings: dict[tuple[Hashable, Hashable], Reading] = {}  # by method and prompts

    def __len__(self) -> int:
        return len(self._readings)

    def __iter__(self) -> Iterator[Reading]:
        return iter(self._readings.values())

    def read(
        self,
        config: ModelConfig,
        prompts: Sequence[Sequence[int]],
        length: int | None,
        chunk: int,
        empty: Cache,
        read: Callable[[], Reading],
    ) -> Reading:
        """Returns what `read` returns, or returned for a method that reads prompts alike.

        The cache stays valid if the result is cut, and the cut cache is written in place
        (`separated`).

        Args:
          config: the model with its method.
          prompts: token ids of each row.
          length: minimum number of tokens that rotations are made for.
          chunk: tokens that are read at once.
          empty: the cache before it is read.
          read: reads the prompts into that cache.
        """
        layers = tuple(empty.kinds[number].reading for number in empty.kind_by_layer)
        texts = tuple(tuple(map(int, prompt)) for prompt in prompts)
        key = (config.replace(cache=None), layers), (texts, length, chunk, empty.capacity)
        reading = self._readings.get(key)
        if reading is not None:
            self.saved_seconds += reading.seconds
        else:
            with self._stopwatch() as watch:
                reading = jax.block_until_ready(read())
            reading = reading._replace(seconds=watch.seconds - watch.compiling)
            self._keep(key, reading)
        return reading._replace(cache=with_kinds(reading.cache, empty))

    def _keep(self, key: tuple[Hashable, Hashable], reading: Reading) -> None:
        """Adds a reading if there is space for it beside those of its method."""
        others = [other for other in self._readings if other[0] != key[0]]
        size = _size(reading) + sum(map(_size, self._readings.values()))
        if size - sum(_size(self._readings[other]) for other in others) > self._num_bytes:
            return
        while size > self._num_bytes:
            size -= _size(self._readings.pop(others.pop(0)))
        self._readings[key] = reading


def _size(reading: Reading) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves((reading.logits, reading.cache)))


def separated(cache: Cache, other: Cache) -> Cache:
    """Returns `cache` with copies of the arrays that `other` has, too."""
    shared = set(map(id, jax.tree.leaves(other)))
    return jax.tree.map(lambda x: jnp.copy(x) if id(x) in shared else x, cache)
