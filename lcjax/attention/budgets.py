"""How the tokens that a cache policy keeps are divided: among layers, heads or spans of a text."""

from __future__ import annotations

import abc
import dataclasses
import functools
import io
import json
from collections.abc import Callable, Sequence
from typing import Annotated, ClassVar

import draccus
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from lcjax.attention.cache_storage import LayerShape
from lcjax.attention.candidates import Candidates, for_each_head, on_each_device
from lcjax.errors import (
    Fraction,
    InputError,
    Interval,
    NonEmpty,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    check_fields,
)
from lcjax.storage import to_path
from pallas_kernels import Layout


@dataclasses.dataclass(frozen=True)
class LayerBudget(draccus.ChoiceRegistry, abc.ABC):
    """How layers share what stays: the section `model.cache.layers`."""

    examples: ClassVar[tuple[dict, ...]] = ({},)
    replaces_ratio: ClassVar[bool] = False  # whether it has shares of its own

    def __post_init__(self):
        check_fields("model.cache.layers", self)

    @abc.abstractmethod
    def divide(
        self,
        read: Int[np.ndarray, " T"],
        mean: Float[np.ndarray, " T"],
        protected: int,
        layer: int,
        num_layers: int,
    ) -> Int[np.ndarray, " T"]:
        """Returns the tokens that heads of one layer keep.

        Args:
          read: numbers of tokens that were read.
          mean: tokens that a head keeps of each of them if all layers keep equally many.
          protected: how many of the last tokens always stay.
          layer: number of the layer, from 0.
          num_layers: number of layers that evict tokens.
        """

    def mean(
        self, read: Int[np.ndarray, " T"], mean: Float[np.ndarray, " T"]
    ) -> Float[np.ndarray, " T"]:
        """Returns the mean over layers of the tokens that heads keep; arguments as in `divide`."""
        return mean


@LayerBudget.register_subclass("pyramid")
@dataclasses.dataclass(frozen=True)
class Pyramid(LayerBudget):
    """PyramidKV (arXiv 2406.02069): lower layers keep more, linearly fewer towards the last one.

    The last layer keeps 1/beta of the mean. kvpress counts the window among the tokens kept, and
    gives all layers equally many if the last one would keep less than its window.
    """

    beta: Annotated[float, Interval(least=1)] = 20.0

    def divide(self, read, mean, protected, layer, num_layers):
        low = mean / self.beta
        high = 2 * mean - low
        clipped = high >= read - protected
        high = np.where(clipped, read - protected, high)
        low = np.where(clipped, 2 * mean - high, low)
        step = (high - low) / max(num_layers - 1, 1)
        fits = (read >= high) & (high >= low) & (low >= protected)
        return np.round(np.where(fits, high - layer * step, mean)).astype(np.int64)


@LayerBudget.register_subclass("pyramid_original")
@dataclasses.dataclass(frozen=True)
class PyramidOriginal(LayerBudget):
    """PyramidKV as in its authors' code: whole numbers, and the window beside them."""

    beta: Annotated[float, Interval(least=1)] = 20.0

    def divide(self, read, mean, protected, layer, num_layers):
        capacity = mean.astype(np.int64)
        base = capacity - protected
        low = (base // self.beta).astype(np.int64)
        high = 2 * base - low
        clipped = high >= read - protected
        high = np.where(clipped, read - protected, high)
        low = np.where(clipped, 2 * base - high, low)
        counts = high - layer * ((high - low) // max(num_layers - 1, 1)) + protected
        counts = np.where(read < 2 * base, capacity, counts)
        return np.where(read < capacity, read, counts)


@LayerBudget.register_subclass("ratios")
@dataclasses.dataclass(frozen=True)
class LayerRatios(LayerBudget):
    """A share that is evicted for each layer, in place of `model.cache.ratio`."""

    examples: ClassVar[tuple[dict, ...]] = ({"ratios": (0.25, 0.75)},)
    replaces_ratio: ClassVar[bool] = True

    ratios: tuple[Annotated[float, Interval(least=0, below=1)], ...] = ()

    def divide(self, read, mean, protected, layer, num_layers):
        if len(self.ratios) != num_layers:
            raise InputError(
                f"model.cache.layers.ratios has {len(self.ratios)} numbers; give one for each of"
                f" the {num_layers} layers that evict tokens"
            )
        return (read * (1 - self.ratios[layer])).astype(np.int64)

    def mean(self, read, mean):
        return read * (1 - float(np.mean(self.ratios)))


@dataclasses.dataclass(frozen=True)
class HeadBudget(draccus.ChoiceRegistry, abc.ABC):
    """How the key heads of a layer share what stays: the section `model.cache.heads`."""

    examples: ClassVar[tuple[dict, ...]] = ({},)
    differs_by_layer: ClassVar[bool] = False  # whether counts depend on the layer

    across_layers: ClassVar[bool] = False  # whether heads of all layers share
    # Whether a ratio keeps int(n (1 - ratio)) of the n tokens of all layers; else it evicts
    # int(n ratio)
    rounds_down: ClassVar[bool] = False
    needs_attention: ClassVar[bool] = False  # whether scores must be weights of attention
    # A head keeps at most this multiple of an equal share; its cache has as many slots.
    most: Annotated[float, Interval(least=1)] = 2.0

    def __post_init__(self):
        check_fields("model.cache.heads", self)

    def protect(self, scores: Float[Array, "B K S"], slots: Candidates) -> Float[Array, "B K S"]:
        """Returns scores in which those of tokens that always stay are inf."""
        return scores

    def check_layer(self, layer: LayerShape, num_layers: int) -> None:
        """Raises an InputError if the budget is made for other layers.

        Args:
          layer: sizes of a layer that evicts tokens.
          num_layers: number of such layers, 1 unless they differ (`differs_by_layer`).
        """

    def ranked(self, scores: Sequence[Float[Array, "B K S"]]) -> list[Float[Array, "B U S"]]:
        """Returns the scores by which layers share what stays, of U heads or other units of each.

        Args:
          scores: those of each layer; -inf for empty slots.
        """
        return list(scores)

    @abc.abstractmethod
    def counts(
        self,
        scores: Float[Array, "B K S"],
        counts: Int[Array, "B K"],
        most: int,
        slots: Candidates | None,
        layer: tuple[int, int],
    ) -> Int[Array, "B K"]:
        """Returns how many tokens each head keeps.

        Args:
          scores: -inf for empty slots.
          counts: equal shares.
          most: slots of a head.
          slots: the slots of the layer; None if all layers share.
          layer: its number among the layers that evict tokens, and their number.
        """


@HeadBudget.register_subclass("adaptive")
@dataclasses.dataclass(frozen=True)
class AdaptiveHeads(HeadBudget):
    """Ada-KV (arXiv 2407.11550): the best tokens of all heads of a layer stay.

    With K heads and equal shares of n, the first max(1, int(floor n)) tokens of each head stay, and
    K n in all, as in kvpress. Heads have `most` n slots each; what does not fit into a head goes to
    others.
    """

    floor: Fraction = 0.2  # the part of an equal share that each head keeps in any case

    def counts(self, scores, counts, most, slots, layer):
        rows, slots = len(scores), scores.shape[-1]
        best = jax.lax.top_k(scores, min(most, slots))[0]
        is_safe = jnp.arange(best.shape[-1]) < _share(self.floor, slots)[counts][..., None]
        is_token = best > -jnp.inf
        ranked = jnp.where(is_safe & is_token, jnp.inf, best).reshape(rows, -1)
        stays = _greatest(ranked, counts.sum(-1))
        return (stays.reshape(best.shape) & is_token).sum(-1, dtype=jnp.int32)


@HeadBudget.register_subclass("adaptive_original")
@dataclasses.dataclass(frozen=True)
class AdaptiveOriginal(HeadBudget):
    """Ada-KV as in its authors' code: each head keeps a mixture of its share and an equal one.

    Tokens that always stay, such as SnapKV's window, are apart. If heads keep b others each, and of
    the K b best of all heads c are those of one head, that head keeps
    round(c (1 - floor) + int(b floor)) of them, so the sum over heads may differ from K b by
    rounding. The paper has a floor of 0.2, and the example in the authors' README 0.5.
    """

    floor: Fraction = 0.2
    # Whether scores are first multiplied by the part of their sum that the best b of a head have
    normalized: bool = False

    @property
    def needs_attention(self) -> bool:
        return self.normalized

    def counts(self, scores, counts, most, slots, layer):
        best = jax.lax.top_k(scores, min(most, scores.shape[-1]))[0]
        is_safe = jnp.isposinf(best)
        protected = is_safe.sum(-1, dtype=jnp.int32)
        base = jnp.maximum(counts - protected, 0)
        ranked = jnp.where(is_safe, -jnp.inf, best)
        if self.normalized:
            place = jnp.arange(best.shape[-1]) - protected[..., None]
            is_base = jnp.isfinite(best) & (place < base[..., None])
            whole = jnp.where(jnp.isfinite(scores), scores, 0).sum(-1)
            part = jnp.where(is_base, best, 0).sum(-1) / jnp.maximum(whole, 1e-30)
            ranked = jnp.where(jnp.isfinite(ranked), ranked * part[..., None], ranked)
        stays = _greatest(ranked.reshape(len(best), -1), base.sum(-1)).reshape(best.shape)
        shares = (stays & (ranked > -jnp.inf)).sum(-1)
        equal = np.floor(self.floor * np.arange(scores.shape[-1] + 1)).astype(np.float32)
        mixed = jnp.round(shares * (1 - self.floor) + jnp.asarray(equal)[base])
        return mixed.astype(jnp.int32) + protected


@HeadBudget.register_subclass("across_layers")
@dataclasses.dataclass(frozen=True)
class AcrossLayers(AdaptiveHeads):
    """The best tokens of all heads of all layers stay, as in KVzip (arXiv 2505.23416).

    All layers are cut together, at the end of a prompt; generated tokens stay.
    """

    across_layers: ClassVar[bool] = True

    floor: Fraction = 0.0


@HeadBudget.register_subclass("composite")
@dataclasses.dataclass(frozen=True)
class Composite(AcrossLayers):
    """Layers share what stays, and heads of a layer keep equally many: KVCompose (2509.05165).

    A composite token is the best token of each head of a layer, or the second best of each, and so
    on; its score is the mean over heads. Of the composite tokens of all layers the best stay, at
    least one of each layer. The first layer has the greatest score of all layers at each rank, so
    that it keeps most, as in kvpress, where other layers may not be longer.
    """

    rounds_down: ClassVar[bool] = True

    def ranked(self, scores):
        def composite(x):
            best_first = -jnp.sort(-x, axis=-1)
            is_empty = jnp.isneginf(best_first).any(1, keepdims=True)
            return jnp.where(is_empty, -jnp.inf, best_first.mean(1, keepdims=True))

        layers = [composite(x) for x in scores]
        return [functools.reduce(jnp.maximum, layers), *layers[1:]]

    def counts(self, scores, counts, most, slots, layer):
        if slots is not None:  # one layer alone
            return counts
        return super().counts(scores, counts, most, slots, layer)


@functools.lru_cache(maxsize=8)
def read_head_table(file: str, key: str, num_layers: int, way_out: str) -> Float[np.ndarray, "L K"]:
    """Reads a number for each key head: lines of numbers, or .json with a list of lists.

    Args:
      file: path of the file.
      key: the config key that names it, for errors.
      num_layers: number of layers that evict tokens.
      way_out: the end of an error about a file that is missing or no such table.

    Raises:
      InputError: it is no such file, or that of another model.
    """
    path = to_path(file)
    try:
        if path.suffix == ".json":
            table = json.loads(path.read_text())
            table = np.array(table["scores"] if isinstance(table, dict) else table, np.float64)
        else:
            table = np.loadtxt(io.StringIO(path.read_text()), np.float64, ndmin=2)
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else error
        raise InputError(
            f"{key}={file} is no table of numbers, a line for each layer ({reason}); {way_out}"
        ) from None
    if table.ndim != 2 or not np.isfinite(table).all():
        raise InputError(f"{key}={file} must have a line of numbers for each layer; {way_out}")
    if len(table) != num_layers:
        raise InputError(
            f"{key}={file} has {len(table)} lines, and the model has {num_layers} layers that evict"
            " tokens; give the file of this model"
        )
    return np.clip(table, 0, 1)


@HeadBudget.register_subclass("rates")
@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadRates(HeadBudget):
    """Shares that heads keep, from a file: LU-KV (arXiv 2602.08585), as in kvpress.

    Of T tokens, the heads of a layer keep round(T x sum of their shares) in all, each the floor of
    T times its share, and those of the greatest remainders one more; every head at least one. The
    file is made for `model.cache.ratio`, which still bounds the slots of a head, as `most` says.
    """

    examples: ClassVar[tuple[dict, ...]] = ()  # needs a file
    differs_by_layer: ClassVar[bool] = True

    # Kept shares [L, K]: lines of numbers, or .json with a list of lists
    file: Annotated[str, NonEmpty()]
    sinks: NonNegativeInt = 4  # first tokens that always stay
    recent: NonNegativeInt = 1  # last tokens that always stay

    def check_layer(self, layer, num_layers):
        self._table(num_layers, layer.num_kv_heads)

    def _table(self, num_layers: int, num_heads: int) -> Float[np.ndarray, "L K"]:
        key, way_out = "model.cache.heads.file", "give LU-KV's shares for this model and ratio"
        table = read_head_table(self.file, key, num_layers, way_out)
        if table.shape[1] != num_heads:
            raise InputError(
                f"{key}={self.file} has {table.shape[1]} numbers in a line, and the model has"
                f" {num_heads} key heads; give the file of this model"
            )
        return table

    def protect(self, scores, slots):
        last = slots.tokens[:, None, None] - self.recent
        is_safe = slots.is_token & ((slots.index < self.sinks) | (slots.index >= last))
        return jnp.where(is_safe, jnp.inf, scores)

    def counts(self, scores, counts, most, slots, layer):
        table = self._table(layer[1], scores.shape[1])[layer[0]]
        shares = jnp.asarray(table, jnp.float32)[None] * slots.tokens[:, None]
        least = jnp.floor(shares)
        missing = jnp.round(shares.sum(-1)) - least.sum(-1)
        is_rounded_up = _greatest(shares - least, missing.astype(jnp.int32))
        return jnp.clip(least.astype(jnp.int32) + is_rounded_up, 1, most)


@dataclasses.dataclass(frozen=True)
class Critical:
    """Two-stage selection of CriticalKV (arXiv 2502.03805): the section `model.cache.critical`.

    Of the n tokens of a head, max(1, int(n first)) are those of the greatest scores. The others are
    those of the greatest (score + epsilon) x norm, where the norm is that of the value after the
    output projection: the sum of absolute values, averaged over the query heads of a key head. As
    in kvpress, with `heads` after n is known for each head. An adapter of the output projection
    that is not merged is not part of the norm.
    """

    first: Fraction = 0.5
    epsilon: NonNegativeFloat = 1e-4

    def __post_init__(self):
        check_fields("model.cache.critical", self)

    def rescore(
        self,
        scores: Float[Array, "B K S"],
        norms: Float[Array, "B K S"],
        counts: Int[Array, "B K"],
    ) -> Float[Array, "B K S"]:
        """Returns scores by which `counts` tokens of each head are chosen; -inf: empty slots."""
        is_first = _greatest(scores, _share(self.first, scores.shape[-1])[counts])
        weighted = jnp.where(scores > -jnp.inf, (scores + self.epsilon) * norms, -jnp.inf)
        return jnp.where(is_first & (scores > -jnp.inf), jnp.inf, weighted)


@dataclasses.dataclass(frozen=True)
class Threshold:
    """Evicts tokens of low scores, however many they are: the section `model.cache.threshold`.

    DMS (arXiv 2506.05345), as in kvpress, without the paper's trained evictors: a token goes when
    it leaves the window of the last tokens with a score below `score`, and otherwise stays for
    good. After a call of several tokens, all that it moved out of the window are judged at once.
    Heads and rows keep different numbers of tokens, and no slot is used again.
    """

    score: float
    window: PositiveInt = 128  # last tokens, which are not judged yet

    def __post_init__(self):
        check_fields("model.cache.threshold", self)

    def evicts(
        self, scores: Float[Array, "B K S"], slots: Candidates, before: Int[Array, " B"] | int
    ) -> Bool[Array, "B K S"]:
        """Returns which tokens go.

        Args:
          scores: -inf for empty slots.
          slots: the slots, with the new tokens of a call.
          before: tokens of each row before the call.
        """
        first = jnp.asarray(before - self.window).reshape(-1, 1, 1)
        last = (slots.tokens - self.window)[:, None, None]
        leaves = (slots.index >= first) & (slots.index < last)
        return slots.is_token & leaves & (scores < self.score)


def value_norms(
    values: Float[Array, "B T K H"], kernel: Float[Array, "N H D"], layout: Layout | None
) -> Float[Array, "B T K"]:
    """Returns the 1-norms of values after the output projection, averaged over query heads."""
    kv_heads = values.shape[2]
    kernel = kernel.reshape(1, kv_heads, -1, *kernel.shape[1:]).astype(values.dtype)

    # One by one, since the results are G times as wide as hidden states
    def head(value, kernels):
        out = jnp.einsum("BTH,GHD->BTGD", value, kernels[0], preferred_element_type=jnp.float32)
        return jnp.abs(out).sum(-1).mean(-1)

    return for_each_head(head, layout, values.swapaxes(1, 2), kernel).swapaxes(1, 2)


def in_spans(
    slots: Candidates,
    scores: Float[Array, "B K S"],
    size: int,
    tokens: int | None,
    ratio: float | None,
    length: int,
) -> tuple[Float[Array, "B K S"], Int[Array, "B K"]]:
    """Scores spans of `size` tokens in place of tokens: ChunkKV (arXiv 2502.00299).

    The score of a span is the mean over its tokens of the sum over heads. Of C spans, the last one
    maybe shorter, max(1, int(C (1 - ratio))) stay, or `tokens` // `size`, as in kvpress. C counts
    all tokens read, of which there are at most `length`.

    Returns:
      The scores, and how many tokens each head keeps, which is inexact by a span.
    """
    heads = scores.shape[1]
    finite = jnp.isfinite(scores)
    largest = jnp.where(finite, scores, 0).max((1, 2), keepdims=True) + 1
    first = slots.from_first(jnp.where(finite, scores, largest).sum(1, keepdims=True), 0.0)
    is_token = slots.from_first(slots.is_token[:, :1], False)
    padding = [(0, 0), (0, 0), (0, -first.shape[-1] % size)]
    first, is_token = (jnp.pad(x, padding) for x in (first, is_token))
    spans = (*first.shape[:2], -1, size)
    first, is_token = first.reshape(spans), is_token.reshape(spans)
    lengths = is_token.sum(-1)
    means = jnp.where(is_token, first, 0).sum(-1) / jnp.maximum(lengths, 1)
    means = jnp.where(lengths > 0, means, -jnp.inf)
    number = -(-slots.tokens // size)
    if ratio is None:
        num_spans = max(tokens // size, 1)
    else:
        num_spans = _share(1 - ratio, -(-length // size))[number]
    stays = _greatest(means, jnp.minimum(num_spans, number)[:, None])
    counts = (lengths * stays).sum(-1)
    each = jnp.repeat(jnp.where(stays, 0.0, -jnp.inf), size, axis=-1)
    each = slots.to_slots(each[..., : scores.shape[-1]])
    return jnp.where(slots.is_token, each, -jnp.inf), jnp.broadcast_to(counts, (len(counts), heads))


class TextParts:
    """The slots of a layer, arranged by parts of `size` tokens of the text of each row.

    Args:
      slots: the slots.
      size: tokens of a part, counted from the first token of a row, also those evicted before.
      length: maximum number of tokens of a row; it gives the number C of parts.
    """

    def __init__(self, slots: Candidates, size: int, length: int):
        self._slots, self._size, self._count = slots, size, -(-length // size)
        starts = size * jnp.arange(self._count, dtype=jnp.int32)
        self.tokens = jnp.clip(slots.tokens[:, None] - starts, 0, size)  # [B, C], read of each part
        # [B, K, C P], the slot of each token; S if it is gone
        self._source = on_each_device(self._sources, slots.layout, slots.index)

    def split(self, x: Shaped[Array, "B K S ..."], fill: float) -> Shaped[Array, "B K C P ..."]:
        """Arranges entries of slots by parts; places whose tokens are gone get `fill`."""
        source = self._source.reshape(*self._source.shape, *[1] * (x.ndim - 3))
        is_held = source < self._slots.index.shape[-1]
        x = jnp.where(is_held, self._slots.take(x, source), fill)
        return x.reshape(*x.shape[:2], self._count, self._size, *x.shape[3:])

    def join(self, x: Shaped[Array, "B K C P"]) -> Shaped[Array, "B K S"]:
        """Moves entries of parts back to the slots; those of empty slots do not matter."""
        x = x.reshape(*x.shape[:2], -1)
        return self._slots.take(x, jnp.maximum(self._slots.index, 0))

    def _sources(self, index: Int[Array, "B K S"]) -> Int[Array, "B K C*P"]:
        size = self._count * self._size
        empty = jnp.full((*index.shape[:2], size), index.shape[-1], jnp.int32)
        places = jnp.where(index < 0, size, index)
        slots = jnp.broadcast_to(jnp.arange(index.shape[-1], dtype=jnp.int32), index.shape)
        return jnp.put_along_axis(empty, places, slots, axis=2, inplace=False, mode="drop")

    def shares(self, ratio: float) -> Int[Array, "B C"]:
        """Returns max(1, int(n (1 - ratio))) of the n tokens of each part."""
        return jnp.where(self.tokens > 0, _share(1 - ratio, self._size)[self.tokens], 0)

    def divided(self, counts: Int[Array, "B K"]) -> Int[Array, "B K C"]:
        """Returns how many of the `counts` tokens of each head a part keeps, in proportion."""
        tokens = self._slots.tokens[:, None, None]
        ends = jnp.cumsum(self.tokens, axis=-1)[:, None]
        upto = _proportion(counts[..., None], ends, jnp.maximum(tokens, 1))
        return jnp.diff(upto, axis=-1, prepend=0)


def _proportion(
    count: Int[Array, "B K 1"], part: Int[Array, "B 1 C"], whole: Int[Array, "B 1 1"]
) -> Int[Array, "B K C"]:
    """Returns count x part // whole, of count and part up to whole < 2^28.

    The product may overflow int32. A float32 quotient is off by less than 2, and what is left to
    correct is right modulo 2^32.
    """
    near = jnp.round(count * (part / whole)).astype(jnp.int32)
    return near + (count * part - near * whole) // whole


def first_of_parts(
    parts: TextParts,
    scores: Float[Array, "B K S"],
    counts: Int[Array, "B K C"],
    rescore: Callable[..., Array] | None,
    norms: Float[Array, "B K S"] | None,
) -> Float[Array, "B K S"]:
    """Puts the best `counts` tokens of each part before all others: their score is inf.

    Args:
      parts: the parts of the text.
      scores: -inf for empty slots.
      counts: how many tokens stay of each part.
      rescore: as `Critical.rescore`, of the scores, norms and counts of parts; None: scores stay.
      norms: those of the values in slots; only for `rescore`.
    """
    split = parts.split(scores, -jnp.inf)
    if rescore is not None:
        split = rescore(split, parts.split(norms, 0.0), counts)
    is_best = _greatest(split[..., ::-1], counts)[..., ::-1]  # of equal scores later tokens stay
    others = jnp.minimum(scores, jnp.finfo(jnp.float32).max)
    return jnp.where(parts.join(is_best) & (scores > -jnp.inf), jnp.inf, others)


def part_budgets(length: int, size: int, ratio: float) -> Int[np.ndarray, " T"]:
    """Returns how many tokens stay of 0, 1, ... `length` if each part keeps its share."""
    whole, rest = np.divmod(np.arange(length + 1), size)
    shares = np.maximum((np.arange(size + 1) * (1 - ratio)).astype(np.int64), 1)
    return whole * shares[size] + np.where(rest > 0, shares[rest], 0)


def _share(share: float, most: int) -> Int[Array, " most+1"]:
    """Returns max(1, int(n share)) of n = 0 ... `most`, with the products of float64."""
    return jnp.asarray(np.maximum((share * np.arange(most + 1)).astype(np.int32), 1))


def _greatest(x: Float[Array, "... S"], count: Int[Array, ...]) -> Bool[Array, "... S"]:
    """Returns which numbers are the `count` greatest; of equal ones the first."""
    order = jnp.argsort(-x, axis=-1, stable=True)
    first = jnp.arange(x.shape[-1]) < count[..., None]
    return jnp.put_along_axis(jnp.zeros(x.shape, bool), order, first, -1, inplace=False)
