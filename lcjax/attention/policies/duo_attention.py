"""DuoAttention: some key heads keep all tokens, the others the first and the last ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from lcjax.attention.budgets import read_head_table
from lcjax.attention.cache import Arrays, FullCache, LayerCache, LayerShape, View
from lcjax.attention.cache_method import CacheMethod
from lcjax.attention.eviction import CachePolicy, Evicting, of_prefix
from lcjax.attention.policies.key_geometry import StreamingCache
from lcjax.errors import Fraction, InputError, NonEmpty, NonNegativeInt, PositiveInt

_STREAMING = "streaming."  # prefix of the names of arrays of streaming heads


@CacheMethod.register_subclass("duo_attention")
@dataclass(frozen=True)
class DuoAttention(CacheMethod):
    """Keeps all tokens in retrieval heads, the first and last ones in others (arXiv 2410.10819).

    Of all key heads of the model, the round(`share` L K) of the lowest scores stream: they keep the
    first `sinks` and the last `recent` tokens, at their true positions. The two groups of a layer
    have arrays of their own, so the memory of the others is saved. A call of several tokens sees
    what its streaming heads kept before it, and its own tokens, as in the authors' code.

    `chunk` and `every` are those of cache policies: without `chunk`, streaming heads read a prompt
    in full and drop tokens at its end, as in kvpress.
    """

    examples: ClassVar[tuple[dict, ...]] = ()  # needs a file
    evicts: ClassVar[bool] = True

    # Scores of key heads [L, K] from 0 (streams) to 1 (retrieves): lines of numbers separated by
    # tabs, as the authors publish them, or .json with a list of lists (`train.head_gates`)
    file: Annotated[str, NonEmpty()]
    share: Fraction = 0.5  # of key heads that stream
    sinks: NonNegativeInt = 128
    recent: PositiveInt = 256
    # By name only: in the order of fields it has the place that it has in the base class
    chunk: PositiveInt | None = dataclasses.field(default=None, kw_only=True)
    # Generated tokens between two cuts of streaming heads; 1 as in the authors' code
    every: PositiveInt = 64

    @property
    def _policy(self) -> CachePolicy:
        options = {"chunk": self.chunk, "every": self.every, "sinks": self.sinks}
        return StreamingCache(tokens=self.sinks + self.recent, **options)

    def layer_cache(self, pattern, soft_cap):
        if pattern.is_bounded:
            return pattern.layer_cache
        return HeadGroups(self, Evicting(self._policy, soft_cap))

    def scores(self, num_layers: int) -> Float[np.ndarray, "L K"]:
        """Returns the numbers of the file, which has a line for each of `num_layers`."""
        way_out = "give the authors' .tsv of this model, or the heads.json of train.head_gates"
        return read_head_table(self.file, "model.cache.file", num_layers, way_out)

    def streams(self, num_layers: int) -> Bool[np.ndarray, "L K"]:
        """Returns which key heads stream; of equal scores, those of the first layers."""
        scores = self.scores(num_layers)
        count = round(scores.size * self.share)
        streams = np.zeros(scores.size, bool)
        streams[np.argsort(scores, axis=None, kind="stable")[:count]] = True
        return streams.reshape(scores.shape)


@dataclass(frozen=True)
class HeadGroups(LayerCache):
    """Two groups of key heads: a full cache for some, and an evicting one for the others."""

    keeps_all: ClassVar[bool] = False
    evicts: ClassVar[bool] = True
    differs_by_layer: ClassVar[bool] = True

    method: DuoAttention
    stream: Evicting
    full: FullCache = FullCache()
    heads: tuple[int, ...] = ()  # key heads of `stream`, of `num_heads`
    num_heads: int = 0

    @property
    def acts_on_prompt(self) -> bool:
        return self.stream.acts_on_prompt

    @property
    def acts_on_chunk(self) -> bool:
        return self.stream.acts_on_chunk

    def for_layer(self, layer, num_layers):
        streams = self.method.streams(num_layers)[layer]
        heads = tuple(np.flatnonzero(streams).tolist())
        return dataclasses.replace(self, heads=heads, num_heads=len(streams))

    def fit(self, length, chunk):
        stream, slots = dataclasses.replace(self.stream, rotated=self.rotated).fit(length, chunk)
        full = FullCache(rotated=self.rotated)
        if not stream.evicts or not self.method.share:
            return full, length
        if len(self.heads) == self.num_heads:
            return stream, slots
        return dataclasses.replace(self, stream=stream, full=full), length

    def for_prompt(self, slots, tokens):
        stream, _ = self.stream.for_prompt(self.stream.slots, tokens)
        return dataclasses.replace(self, stream=stream), slots

    def num_visible(self, length, tokens):
        share = len(self.heads) / self.num_heads
        return round((1 - share) * length + share * self.stream.num_visible(length, tokens))

    def after_prompt(self, length):
        fitted, slots = self.fit(length, None)
        if not fitted.evicts:
            return fitted, slots
        if not isinstance(fitted, HeadGroups):  # all heads stream
            return fitted, fitted.num_kept
        stream = dataclasses.replace(fitted.stream, slots=fitted.stream.num_kept)
        return dataclasses.replace(fitted, stream=stream), slots

    @property
    def _groups(self) -> list[tuple[str, LayerCache, np.ndarray]]:
        """Prefix of the names of arrays, cache and key heads of each group."""
        stream = np.array(self.heads, int)
        full = np.setdiff1d(np.arange(self.num_heads), stream)
        groups = [("", self.full, full), (_STREAMING, self.stream, stream)]
        return groups[: 1 + bool(self.heads)]

    def arrays(self, layer, slots):
        if layer.num_kv_heads != self.num_heads:
            raise InputError(
                f"model.cache.file={self.method.file} has scores of {self.num_heads} key heads, and"
                f" the model has {layer.num_kv_heads} in a layer; give the file of this model"
            )

        def of_group(kind, shape):
            return kind.arrays(shape, self.stream.slots if kind.evicts else slots)

        return self._of_groups(layer, of_group)

    def read_arrays(self, layer, length, tokens, devices=1):
        return self._of_groups(layer, lambda kind, shape: kind.read_arrays(shape, length, tokens))

    def _of_groups(self, layer: LayerShape, of_group: Callable) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the arrays that `of_group` returns for cache and sizes of each group."""
        arrays, group = {}, layer.num_heads // layer.num_kv_heads
        for prefix, kind, heads in self._groups:
            shape = layer._replace(num_heads=len(heads) * group, num_kv_heads=len(heads))
            group_arrays = of_group(kind, shape)
            arrays |= {prefix + name: array for name, array in group_arrays.items()}
        return arrays

    def shared(self, rows, slots):
        sizes = slots, self.stream.slots
        return tuple(
            kind.shared(rows, size) for (_, kind, _), size in zip(self._groups, sizes, strict=False)
        )

    def reserve(self, slots, new, filled):
        groups = tuple(
            kind.reserve(group_slots, new, filled)
            for (_, kind, _), group_slots in zip(self._groups, slots, strict=True)
        )
        return View(tuple(group.slots for group in groups), new, filled, None, self, groups)

    def attend(self, arrays, q, k, v, pattern, view, metadata):
        outs, order, result = [], [], {}
        rows, length, count, size = q.shape
        partials = metadata.extra_partials

        def of_heads(x, heads):  # [B, T, N, ...]
            x = x.reshape(rows, length, self.num_heads, -1, *x.shape[3:])[:, :, heads]
            return x.reshape(rows, length, -1, *x.shape[4:])

        for (prefix, kind, heads), group_view in zip(self._groups, view.groups, strict=True):
            group_arrays = of_prefix(arrays, prefix)
            queries = of_heads(q, heads)
            pair, place = (k[:, :, heads], v[:, :, heads]), group_view.update_metadata(metadata)
            of_group = [[of_heads(x, heads) for x in partial] for partial in partials]
            place = place.replace(extra_partials=of_group)
            out, group_arrays = kind.attend(
                group_arrays, queries, *pair, pattern, group_view, place
            )
            outs.append(out.reshape(rows, length, len(heads), -1, size))
            order.append(heads)
            result |= {prefix + name: array for name, array in group_arrays.items()}
        out = jnp.concatenate(outs, 2)[:, :, np.argsort(np.concatenate(order))]
        return out.reshape(rows, length, count, size), result

    def begin_prompt(self, arrays, slots, tokens):
        if not self.heads:
            return self, arrays, slots
        stream_arrays = of_prefix(arrays, _STREAMING)
        stream, stream_arrays, last = self.stream.begin_prompt(stream_arrays, slots[1], tokens)
        return self._with_stream(stream, arrays, stream_arrays, (slots[0], last))

    def end_prompt(self, arrays, slots, prompt, new, chunk, counts=None):
        if not self.heads or not self.acts_on_prompt:
            return self, arrays, slots
        stream_arrays = of_prefix(arrays, _STREAMING)
        stream, stream_arrays, last = self.stream.end_prompt(
            stream_arrays, slots[1], prompt, new, chunk
        )
        return self._with_stream(stream, arrays, stream_arrays, (slots[0], last))

    def extend_slots(self, arrays, slots, read, new, chunk):
        full = {name: arrays[name] for name in ("keys", "values")}
        _, grown, first = self.full.extend_slots(full, slots[0], read, new, chunk)
        if not self.heads:
            return self, grown, (first,)
        stream_arrays = of_prefix(arrays, _STREAMING)
        stream, stream_arrays, last = self.stream.extend_slots(
            stream_arrays, slots[1], read, new, chunk
        )
        return self._with_stream(stream, grown, stream_arrays, (first, last))

    def _with_stream(self, stream: Evicting, full: Arrays, stream_arrays: Arrays, slots: tuple):
        """Returns cache, arrays and shared arrays with other ones of streaming heads."""
        arrays = {name: full[name] for name in ("keys", "values")}
        arrays |= {_STREAMING + name: array for name, array in stream_arrays.items()}
        return dataclasses.replace(self, stream=stream), arrays, slots
