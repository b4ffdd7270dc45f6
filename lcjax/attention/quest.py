"""Quest: a generated token reads the pages of keys that it may attend to most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from lcjax.attention.cache_method import CacheMethod
from lcjax.attention.pages import PagedCache, PageReader
from lcjax.errors import NonNegativeInt, OneOf, PositiveInt

_LEAST_PAGES = 3  # as in the authors' code


@CacheMethod.register_subclass("quest")
@dataclass(frozen=True)
class Quest(CacheMethod, PageReader):
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

    setting: ClassVar[str] = "model.cache.type=quest"

    @property
    def chooses_by_query_head(self) -> bool:
        return self.share == "none"

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

    def summary_dtypes(self, layer):
        return {"low": layer.dtype, "high": layer.dtype}

    def summarise(self, pages):
        def bound(of, fill):
            fill = jnp.asarray(fill, pages.keys.dtype)
            return of(jnp.where(pages.is_token, pages.keys, fill), axis=3)

        return {"low": bound(jnp.min, jnp.inf), "high": bound(jnp.max, -jnp.inf)}

    def choose_pages(self, token, arrays, slots):
        return self.choose(self.bounds(token.q, arrays["low"], arrays["high"]), token.index)
