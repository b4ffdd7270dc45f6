"""Caches whose tokens read a few pages of keys, which they choose by a summary of each page."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from lcjax.attention.base import AttentionMetadata, attend_by_head, rotate_queries
from lcjax.attention.cache import Arrays, FullCache, LayerShape, Tokens, View
from lcjax.attention.causal import Causal
from lcjax.errors import InputError
from pallas_kernels import gather, merge


class NewToken(NamedTuple):
    """A token of each row that is alone in its call, and chooses pages."""

    q: Float[Array, "B N H"]  # rotated
    index: Int[Array, " B"]  # order index
    features: dict[str, Float[Array, "B ..."]]  # `Features.queries`


class PageTokens(NamedTuple):
    """The tokens of some pages, whose summaries are computed."""

    keys: Float[Array, "B K P page H"]
    values: Float[Array, "B K P page H"]
    is_token: Bool[Array, "B 1 P page 1"]
    positions: Num[Array, "B P page"]
    metadata: AttentionMetadata  # rotation and features of the call


class PageReader(abc.ABC):
    """What chooses pages: a method of a cache, such as Quest, or a pattern, such as MoBA.

    Attributes:
      page: tokens of a page. Pages count the tokens of a row from its first one.
      num_pages: number of pages that a token reads.
      dense_len: tokens of a text that all read all pages before them.
      summaries_per_page: number of vectors V in each summary of a page, one after the other.
      exact_layers: first layers that read all pages.
      chooses_by_query_head: whether each query head chooses, or those of a key head together.
      setting: the key and value of a config that select it, for errors.
    """

    page: int
    num_pages: int
    dense_len: int = 0
    summaries_per_page: int = 1
    exact_layers: int = 0
    chooses_by_query_head: bool
    setting: ClassVar[str]

    @abc.abstractmethod
    def summary_dtypes(self, layer: LayerShape) -> dict[str, jnp.dtype]:
        """Returns the names of the summaries of a page, and their dtypes in a layer."""

    def summary_size(self, layer: LayerShape) -> int:
        """Returns the numbers of a vector of a summary in a layer: by default those of a key."""
        return layer.head_dim

    @abc.abstractmethod
    def summarise(self, pages: PageTokens) -> dict[str, Float[Array, "B K P*V _"]]:
        """Returns the summaries of pages."""

    @abc.abstractmethod
    def choose_pages(
        self, token: NewToken, arrays: Arrays, slots: Tokens
    ) -> tuple[Int[Array, "B h M"], Bool[Array, "B h M"]]:
        """Returns the pages that a token of each row reads, and whether each is one.

        Args:
          token: the token.
          arrays: those of the layer: keys, values, features [B, h, S, _], and summaries of all
            pages [B, K, P V, _].
          slots: the tokens in the slots, the new one included.
        """


@dataclass(frozen=True)
class PagedCache(FullCache):
    """All keys and values, and summaries [B, K, P V, _] of the tokens of each page.

    A page begins at an order index, not at a slot, so that padding does not move pages. A call
    computes the summaries of the pages of its tokens from their keys. Summaries of pages behind the
    last token may be out of date after a text was cut; they are not read before they are computed
    anew. A token that is alone in its call reads the pages that it chooses; those of a longer call
    attend as the pattern of the layer says. If the chosen keys of all heads are as many as the
    cache has, they are not copied: the call reads all keys and hides the others. It also does so
    while a row has at most `dense_len` tokens.
    """

    holds_keys_only: ClassVar[bool] = False
    continues: ClassVar[bool] = False  # its pages would begin anew
    shares_slots: ClassVar[bool] = False  # a page has consecutive keys
    differs_by_layer: ClassVar[bool] = True

    reader: PageReader

    def for_layer(self, layer, num_layers):
        is_exact = layer < self.reader.exact_layers
        return FullCache(rotated=self.rotated) if is_exact else self

    def fit(self, length, chunk):
        if not self._chooses(length):
            return FullCache(rotated=self.rotated, features=self.features), length
        if not self.rotated:
            raise InputError(
                f"{self.reader.setting} summarises keys that are rotated, and exact=True rotates"
                " them again while the text grows; leave one of the two out"
            )
        return self, length

    def _chooses(self, length: int) -> bool:
        """Returns whether the last of `length` tokens has more pages than it reads."""
        return self.reader.num_pages < self._num_pages(length) and length > self.reader.dense_len

    def _num_pages(self, slots: int) -> int:
        return -(-slots // self.reader.page)

    def _num_summaries(self, slots: int) -> int:
        return self._num_pages(slots) * self.reader.summaries_per_page

    def num_visible(self, length, tokens):
        if tokens > 1 or not self._chooses(length):
            return length
        return min(length, self.reader.num_pages * self.reader.page)

    def num_multiplied(self, length, tokens):
        if tokens > 1 or not self._chooses(length):
            return length
        # At most two products with the summaries of a page cost what a key costs, a logit and a
        # weighted value.
        summaries = self._num_pages(length) * -(-self.reader.summaries_per_page // 2)
        return self.num_visible(length, tokens) + summaries

    def read_arrays(self, layer, length, tokens, devices=1):
        if tokens > 1 or not self._chooses(length):
            return super().arrays(layer, length)
        keys = min(length, self._choices(layer) * self.num_visible(length, tokens))
        arrays = super().arrays(layer, keys) | self.feature_arrays(layer, length)
        return arrays | self._summaries(layer, length)

    def _choices(self, layer: LayerShape) -> int:
        """Returns how many choices the query heads of a key head make."""
        by_query_head = self.reader.chooses_by_query_head
        return layer.num_heads // layer.num_kv_heads if by_query_head else 1

    def after_prompt(self, length):
        return self.fit(length, None)

    def arrays(self, layer, slots):
        return super().arrays(layer, slots) | self._summaries(layer, slots)

    def _summaries(self, layer: LayerShape, slots: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shapes and dtypes of the summaries of the pages of `slots` slots."""
        size = self.reader.summary_size(layer)
        shape = layer.num_kv_heads, self._num_summaries(slots), size
        dtypes = self.reader.summary_dtypes(layer)
        return {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in dtypes.items()}

    def branch(self, arrays, pick):
        picked = super().branch({name: arrays[name] for name in self.slot_arrays}, pick)
        *_, slots, _ = picked["keys"].shape
        places = jnp.arange(self._num_summaries(slots))

        def copy(x):
            x = jnp.take(x, places, axis=-2, mode="fill", fill_value=0)
            return jnp.broadcast_to(x, (*picked["keys"].shape[:-2], *x.shape[-2:]))

        return picked | {name: copy(x) for name, x in arrays.items() if name not in picked}

    def attend(self, arrays, q, k, v, pattern, view, metadata):
        arrays = arrays | self.append(arrays, k, v, pattern, view, metadata)
        keys, values = arrays["keys"], arrays["values"]
        places = _slots_by_order(view, self._num_pages(keys.shape[2]) * self.reader.page)
        arrays = arrays | self._summaries_of_new(arrays, view, places, metadata)
        if q.shape[1] == 1:
            return self.read_pages(arrays, q, view, places, metadata), arrays
        metadata = self.with_features(arrays, metadata)
        return pattern.attend(q, keys.swapaxes(1, 2), values.swapaxes(1, 2), metadata), arrays

    def _summaries_of_new(
        self, arrays: Arrays, view: View, places: Int[Array, "B S"], metadata: AttentionMetadata
    ) -> Arrays:
        """Returns summaries with those of the pages of the new tokens."""
        size, index = self.reader.page, view.new.index
        # Pages that new tokens may lie in
        count = 1 if index.shape[1] == 1 else (index.shape[1] - 1) // size + 2
        pages = jnp.maximum(index[:, :1], 0) // size + jnp.arange(count)
        order = (pages[..., None] * size + jnp.arange(size)).reshape(len(pages), -1)
        slots = jnp.take_along_axis(places, order, 1, mode="clip")[:, None]

        def of_pages(x):
            x = _entries(x, slots)
            return x.reshape(*x.shape[:2], count, size, -1)

        is_token = (order <= index[:, -1:]).reshape(-1, 1, count, size, 1)
        positions = jnp.take_along_axis(view.slots.positions, slots[:, 0], axis=1)
        positions = positions.reshape(len(pages), count, size)
        pair = of_pages(arrays["keys"]), of_pages(arrays["values"])
        new = self.reader.summarise(PageTokens(*pair, is_token, positions, metadata))
        rows, each = jnp.arange(len(pages))[:, None], self.reader.summaries_per_page
        places = (pages[..., None] * each + jnp.arange(each)).reshape(len(pages), -1)
        is_written = jnp.repeat(is_token[:, 0, :, 0, 0], each, axis=1)

        def write(name, new):
            inside = jnp.where(is_written, places, arrays[name].shape[2])
            return arrays[name].at[rows, :, inside].set(new.swapaxes(1, 2), mode="drop")

        return {name: write(name, x) for name, x in new.items()}

    def read_pages(
        self,
        arrays: Arrays,
        q: Float[Array, "B 1 N H"],
        view: View,
        places: Int[Array, "B S"],
        metadata: AttentionMetadata,
    ) -> Float[Array, "B 1 N H"]:
        """Computes attention of one token of each row over the pages that it chooses.

        Args:
          arrays: those of the layer, with the new tokens.
          q: unrotated queries.
          view: slots of the call.
          places: the slot of the token with order index 0, 1, ... of each row.
          metadata: positions, rotation and features of the new tokens.
        """
        size, last = self.reader.page, view.new.index[:, -1]
        rotated = rotate_queries(q, metadata.q_positions, metadata.rotation)[:, 0]
        features = jax.tree.map(lambda x: x[:, 0], metadata.features.queries)
        token = NewToken(rotated, last, features)
        pages, is_page = self.reader.choose_pages(token, arrays, view.slots)
        keys, values = arrays["keys"], arrays["values"]

        def in_place():
            is_read = gather.is_listed(pages, is_page, -(-keys.shape[2] // size))
            is_read |= (last < self.reader.dense_len)[:, None, None]
            index = jnp.where(view.slots.segments != 0, view.slots.index, -1)
            visible = jnp.take_along_axis(is_read, jnp.maximum(index, 0)[:, None] // size, axis=2)
            visible &= ((index >= 0) & (index <= last[:, None]))[:, None]
            partial = _attend_to_visible(rotated, keys, values, visible, metadata.soft_cap)
            return merge([partial, *metadata.extra_partials])[0]

        def from_copies():
            order = pages[..., None] * size + jnp.arange(size)
            is_token = is_page[..., None] & (order <= last[:, None, None, None])
            order = jnp.where(is_token, order, -1).reshape(*order.shape[:2], -1)
            slots = jax.vmap(lambda places, order: places[order])(places, jnp.maximum(order, 0))
            pair = [_entries(x, slots) for x in (keys, values)]
            order = jnp.broadcast_to(order, pair[0].shape[:3])
            return attend_by_head(q, *pair, order, Causal(), metadata)

        choices = max(1, pages.shape[1] // keys.shape[1])  # of a key head
        if choices * pages.shape[2] * size >= keys.shape[2]:
            return in_place()  # copies of the chosen keys would be more than all keys
        if not self.reader.dense_len:
            return from_copies()
        reads_all = (last >= 0) & (last < self.reader.dense_len)
        return jax.lax.cond(reads_all.any(), in_place, from_copies)


def _attend_to_visible(
    q: Float[Array, "B N H"],
    keys: Float[Array, "B K S H"],
    values: Float[Array, "B K S H"],
    visible: Bool[Array, "B h S"],
    soft_cap: float | None,
) -> tuple[Float[Array, "B 1 N H"], Float[Array, "B 1 N"]]:
    """Returns the partial of one token of each row over the keys that each head sees."""
    rows, heads, size = q.shape
    kv_heads, slots = keys.shape[1:3]
    q = q.reshape(rows, kv_heads, -1, size)
    visible = jnp.broadcast_to(visible, (rows, max(visible.shape[1], kv_heads), slots))
    visible = visible.reshape(rows, kv_heads, -1, slots)
    logits = gather.einsum("BKGH,BKSH->BKGS", q, keys.astype(q.dtype)) * size**-0.5
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    logits = jnp.where(visible, logits, -jnp.inf)
    largest = logits.max(-1, keepdims=True)
    largest = jnp.where(largest > -jnp.inf, largest, 0)
    weights = jnp.exp(logits - largest)
    total = weights.sum(-1, keepdims=True)
    out = gather.einsum("BKGS,BKSH->BKGH", weights.astype(values.dtype), values)
    out = (out / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)).astype(q.dtype)
    lse = (largest + jnp.log(total))[..., 0]
    return out.reshape(rows, 1, heads, -1), lse.reshape(rows, 1, heads)


def _slots_by_order(view: View, length: int) -> Int[Array, "B length"]:
    """Returns the slot of the token with order index 0, 1, ... of each row."""
    slots = view.slots
    order = jnp.where(slots.segments != 0, slots.index, length)
    rows, places = jnp.arange(len(order))[:, None], jnp.arange(order.shape[1], dtype=jnp.int32)
    zeros = jnp.zeros((len(order), length), jnp.int32)
    return zeros.at[rows, order].set(places, mode="drop")


def _entries(x: Float[Array, "B K S H"], slots: Int[Array, "B h M"]) -> Float[Array, "B h M H"]:
    """Returns the entries in `slots`; h is 1, or a multiple of K: some for each query head."""
    rows, heads, _, size = x.shape
    count, length = max(slots.shape[1], heads), slots.shape[2]
    slots = jnp.broadcast_to(slots, (rows, count, length)).reshape(rows, heads, -1, 1)
    return jnp.take_along_axis(x, slots, axis=2).reshape(rows, count, length, size)
