"""Quest: a generated token reads the pages of keys that it may attend to most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from lcjax.attention.base import attend_by_head, rotate_queries
from lcjax.attention.cache import Arrays, FullCache, View
from lcjax.attention.cache_method import CacheMethod
from lcjax.errors import InputError, NonNegativeInt, OneOf, PositiveInt

_LEAST_PAGES = 3  # as in the authors' code


@CacheMethod.register_subclass("quest")
@dataclass(frozen=True)
class Quest(CacheMethod):
    """Reads the pages that a query may attend to most (Tang et al. 2024, arXiv 2406.10774).

    Nothing is evicted. A layer keeps the least and the greatest value of each channel of the keys
    of a page. They bound the logits of a query on the page from above, and only the pages with the
    greatest bounds are read. That holds for tokens that are read one by one, such as generated
    ones; several tokens at once, such as a prompt, read all pages. Pages count the tokens of a row
    from its first one.
    """

    examples: ClassVar[tuple[dict, ...]] = (
        {"tokens": 32, "page": 8, "exact_layers": 0},
        {"tokens": 32, "page": 8, "exact_layers": 1, "share": "none", "keep_last": False},
    )
    tokens: PositiveInt = 2048  # that a query reads; at least three pages
    page: PositiveInt = 16  # tokens of a page
    exact_layers: NonNegativeInt = 2  # first layers that read all pages
    # Bounds by which the query heads of a key head choose: their greatest, their sum, or each its
    # own (the authors' form), which reads more pages
    share: Annotated[str, OneOf(("max", "sum", "none"))] = "max"
    keep_last: bool = True  # the last page is always read, as in the authors' kernel

    @property
    def num_pages(self) -> int:
        """The number of pages that a query reads."""
        return max(self.tokens // self.page, _LEAST_PAGES)

    @property
    def scoring_chunk(self):
        return 1

    def layer_cache(self, pattern, soft_cap):
        return pattern.layer_cache if pattern.is_bounded else PagedCache(self)

    def bounds(
        self, q: Float[Array, "B N H"], low: Float[Array, "B K P H"], high: Float[Array, "B K P H"]
    ) -> Float[Array, "B h P"]:
        """Returns bounds of the products q k over the keys of each page.

        Args:
          q: rotated queries.
          low, high: the least and the greatest value of each channel.

        Returns:
          One for each key head, or with `share: none` for each query head.
        """
        rows, heads, size = q.shape
        q = q.reshape(rows, low.shape[1], -1, size).astype(jnp.float32)
        product = "BKGH,BKPH->BKGP"
        options = {"precision": jax.lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
        bound = jnp.einsum(product, jnp.maximum(q, 0), high.astype(jnp.float32), **options)
        bound += jnp.einsum(product, jnp.minimum(q, 0), low.astype(jnp.float32), **options)
        if self.share == "none":
            return bound.reshape(rows, heads, -1)
        return bound.max(2) if self.share == "max" else bound.sum(2)

    def choose(
        self, bounds: Float[Array, "B h P"], last: Int[Array, " B"]
    ) -> tuple[Int[Array, "B h M"], Bool[Array, "B h M"]]:
        """Returns the pages that are read, and whether each is one; of equal bounds the later.

        Args:
          bounds: those of `bounds`.
          last: order index of the last token of each row.
        """
        pages, last_page = jnp.arange(bounds.shape[-1]), (last // self.page)[:, None, None]
        bounds = jnp.nan_to_num(bounds, nan=0.0, posinf=jnp.finfo(jnp.float32).max)
        if self.keep_last:
            bounds = jnp.where(pages == last_page, jnp.inf, bounds)
        bounds = jnp.where(pages <= last_page, bounds, -jnp.inf)
        best, places = jax.lax.top_k(bounds[..., ::-1], min(self.num_pages, len(pages)))
        return len(pages) - 1 - places, best > -jnp.inf


@dataclass(frozen=True)
class PagedCache(FullCache):
    """All keys and values, and the bounds `low` and `high` [B, K, P, H] of the keys of each page.

    A page begins at an order index, not at a slot, so that padding does not move pages. A call
    computes the bounds of the pages of its tokens from their keys. Bounds of pages behind the last
    token may be out of date after a text was cut; they are not read before they are computed anew.
    """

    holds_keys_only: ClassVar[bool] = False
    continues: ClassVar[bool] = False  # its pages would begin anew
    shares_slots: ClassVar[bool] = False  # a page has consecutive keys
    differs_by_layer: ClassVar[bool] = True

    quest: Quest

    def for_layer(self, layer, num_layers):
        is_exact = layer < self.quest.exact_layers
        return FullCache(rotated=self.rotated) if is_exact else self

    def fit(self, length, chunk):
        if not self.rotated:
            raise InputError(
                "model.cache.type=quest bounds keys that are rotated, and exact=True rotates them"
                " again while the text grows; leave one of the two out"
            )
        return self if self._chooses(length) else FullCache(), length

    def _chooses(self, length: int) -> bool:
        """Returns whether a text of `length` tokens has more pages than a query reads."""
        return self.quest.num_pages < self._num_pages(length)

    def _num_pages(self, slots: int) -> int:
        return -(-slots // self.quest.page)

    def num_visible(self, length, tokens):
        return min(length, self.quest.num_pages * self.quest.page) if tokens == 1 else length

    def num_multiplied(self, length, tokens):
        # Both products of a page's bound cost what a key costs, a logit and a weighted value.
        bounds = self._num_pages(length) if tokens == 1 and self._chooses(length) else 0
        return self.num_visible(length, tokens) + bounds

    def read_arrays(self, layer, length, tokens, devices=1):
        if tokens > 1 or not self._chooses(length):
            return super().arrays(layer, length)
        choices = layer.num_heads // layer.num_kv_heads if self.quest.share == "none" else 1
        keys = min(length, choices * self.num_visible(length, tokens))
        bounds = self.arrays(layer, length)
        return super().arrays(layer, keys) | {name: bounds[name] for name in ("low", "high")}

    def after_prompt(self, length):
        return self.fit(length, None)

    def arrays(self, layer, slots):
        shape = layer.num_kv_heads, self._num_pages(slots), layer.head_dim
        bound = jax.ShapeDtypeStruct(shape, layer.dtype)
        return super().arrays(layer, slots) | {"low": bound, "high": bound}

    def branch(self, arrays, pick):
        picked = super().branch({name: arrays[name] for name in ("keys", "values")}, pick)
        *_, slots, _ = picked["keys"].shape
        pages = jnp.arange(self._num_pages(slots))

        def copy(x):
            x = jnp.take(x, pages, axis=-2, mode="fill", fill_value=0)
            return jnp.broadcast_to(x, (*picked["keys"].shape[:-2], *x.shape[-2:]))

        return picked | {name: copy(arrays[name]) for name in ("low", "high")}

    def attend(self, arrays, q, k, v, pattern, view, metadata):
        arrays = arrays | self.append(arrays, k, v, pattern, view, metadata)
        keys, values = arrays["keys"], arrays["values"]
        places = _slots_by_order(view, self._num_pages(keys.shape[2]) * self.quest.page)
        arrays = arrays | self._bounds_of_new(arrays, view, places)
        if q.shape[1] == 1:
            return self._read_pages(arrays, q, view, places, pattern, metadata), arrays
        return pattern.attend(q, keys.swapaxes(1, 2), values.swapaxes(1, 2), metadata), arrays

    def _bounds_of_new(self, arrays: Arrays, view: View, places: Int[Array, "B S"]) -> Arrays:
        """Returns bounds with those of the pages of the new tokens."""
        size, index = self.quest.page, view.new.index
        count = (index.shape[1] - 1) // size + 2  # pages that new tokens may lie in
        pages = jnp.maximum(index[:, :1], 0) // size + jnp.arange(count)
        order = (pages[..., None] * size + jnp.arange(size)).reshape(len(pages), -1)
        keys = _gather(arrays["keys"], jnp.take_along_axis(places, order, 1, mode="clip")[:, None])
        keys = keys.reshape(*keys.shape[:2], count, size, -1)
        is_token = (order <= index[:, -1:]).reshape(-1, 1, count, size, 1)
        pages = jnp.where(is_token[:, 0, :, 0, 0], pages, arrays["low"].shape[2])

        def write(name, bound, fill):
            new = bound(jnp.where(is_token, keys, jnp.asarray(fill, keys.dtype)), axis=3)
            rows = jnp.arange(len(pages))[:, None]
            return arrays[name].at[rows, :, pages].set(new.swapaxes(1, 2), mode="drop")

        return {"low": write("low", jnp.min, jnp.inf), "high": write("high", jnp.max, -jnp.inf)}

    def _read_pages(self, arrays: Arrays, q, view: View, places, pattern, metadata):
        """Computes attention of one token of each row over the pages that it chooses."""
        size, last = self.quest.page, view.new.index[:, -1]
        rotated = rotate_queries(q, metadata.q_positions, metadata.rotation)[:, 0]
        bounds = self.quest.bounds(rotated, arrays["low"], arrays["high"])
        pages, is_page = self.quest.choose(bounds, last)
        order = pages[..., None] * size + jnp.arange(size)
        is_token = is_page[..., None] & (order <= last[:, None, None, None])
        order = jnp.where(is_token, order, -1).reshape(*order.shape[:2], -1)
        slots = jax.vmap(lambda places, order: places[order])(places, jnp.maximum(order, 0))
        pair = (_gather(arrays[name], slots) for name in ("keys", "values"))
        return attend_by_head(q, *pair, order, pattern, metadata)


def _slots_by_order(view: View, length: int) -> Int[Array, "B length"]:
    """Returns the slot of the token with order index 0, 1, ... of each row."""
    slots = view.slots
    order = jnp.where(slots.segments != 0, slots.index, length)
    rows, places = jnp.arange(len(order))[:, None], jnp.arange(order.shape[1], dtype=jnp.int32)
    zeros = jnp.zeros((len(order), length), jnp.int32)
    return zeros.at[rows, order].set(places, mode="drop")


def _gather(x: Float[Array, "B K S H"], slots: Int[Array, "B h M"]) -> Float[Array, "B h M H"]:
    """Returns the entries in `slots`; h is 1, or a multiple of K: some for each query head."""
    rows, heads, _, size = x.shape
    count, length = max(slots.shape[1], heads), slots.shape[2]
    slots = jnp.broadcast_to(slots, (rows, count, length)).reshape(rows, heads, -1, 1)
    return jnp.take_along_axis(x, slots, axis=2).reshape(rows, count, length, size)
