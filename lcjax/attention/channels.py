"""ThinK: a cache keeps only some channels of the keys of a prompt, chosen by its last queries."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from lcjax.attention.cache import Arrays, LayerShape
from lcjax.attention.candidates import Seen, last_queries, observe_last_queries, on_each_device
from lcjax.errors import Interval, PositiveInt, check_fields
from pallas_kernels import Layout


@dataclasses.dataclass(frozen=True)
class Channels:
    """Drops channels of keys: ThinK (arXiv 2407.21018), the section `model.cache.channels`.

    At the end of a prompt each key head drops the int(H ratio) channels with the least product of
    mean(q^2) over the last `window` queries of its group and mean(k^2) over the keys that stay.
    That is the Frobenius norm of q_j k_j^T, by which the paper chooses (section 3.2). Queries are
    multiplied by the same channels. Keys of later tokens keep all channels until the next cut, and
    then lose the same ones; in the paper's code and in kvpress they keep them for good. The paper
    also keeps all channels of the last 32 tokens of a prompt, which kvpress does not, as here.
    """

    ratio: Annotated[float, Interval(above=0, below=1)] = 0.5  # of the channels, that are dropped
    window: PositiveInt = 32

    def __post_init__(self):
        check_fields("model.cache.channels", self)

    def num_kept(self, head_dim: int) -> int:
        """Returns how many of `head_dim` channels a key keeps."""
        return head_dim - int(head_dim * self.ratio)

    def state(self, layer: LayerShape) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the arrays of a row that a prompt needs until its end (`CachePolicy.state`)."""
        return last_queries(self.window, layer)

    @property
    def observing(self) -> Channels:
        """What `observe` depends on (`CachePolicy.observing`)."""
        return self

    def observe(self, seen: Seen) -> Arrays:
        """Returns the last queries (`CachePolicy.observe`)."""
        return observe_last_queries(seen)

    def choose(
        self, state: Arrays, keys: Float[Array, "B K S H"], is_token: Bool[Array, "B K S"]
    ) -> Int[Array, "B K 1 D"]:
        """Returns the numbers of the D channels that stay, in ascending order.

        Args:
          state: the arrays of `state`.
          keys: rotated keys.
          is_token: whether a slot holds a token.
        """
        rows, kv_heads, _, size = keys.shape
        # Sums in place of means, since all channels have as many queries and keys.
        queries = jnp.where(state["query_order"] > 0, state["queries"].astype(jnp.float32), 0)
        queries = jnp.square(queries).sum(2).reshape(rows, kv_heads, -1, size).sum(2)
        squares = jnp.square(keys.astype(jnp.float32))
        products = queries * jnp.where(is_token[..., None], squares, 0).sum(2)
        best = jax.lax.top_k(products, self.num_kept(size))[1]
        return jnp.sort(best, axis=-1)[:, :, None]


def take_channels(
    x: Float[Array, "B K S H"], channels: Int[Array, "B K 1 D"], layout: Layout | None = None
) -> Float[Array, "B K S D"]:
    """Returns the channels of `x` whose numbers are `channels`."""

    def take(x, channels):
        return jnp.take_along_axis(x, channels, axis=-1)

    return on_each_device(take, layout, x, channels)


def restore_channels(
    x: Float[Array, "B K S D"],
    channels: Int[Array, "B K 1 D"],
    size: int,
    layout: Layout | None = None,
) -> Float[Array, "B K S H"]:
    """Returns `size` channels with `x` in those of numbers `channels`, and 0 in the others."""
    is_kept = (channels[..., None] == jnp.arange(size)).any(-2)
    place = jnp.maximum(jnp.cumsum(is_kept, -1) - 1, 0)
    return jnp.where(is_kept, take_channels(x, place, layout), 0)
