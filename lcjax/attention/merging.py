"""Merging: values of evicted tokens are added to those of the survivors with the nearest keys."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from lcjax.attention.candidates import Candidates, for_each_head
from lcjax.errors import Fraction, Interval, check_fields

_BLOCK = 128  # tokens whose similarities to all survivors are computed at once
_EPSILON = 1e-6


@dataclasses.dataclass(frozen=True)
class Merging:
    """Adds what is evicted to what stays: the merging of kvpress, the section `model.cache.merge`.

    Each evicted token t has one survivor s, that whose rotated key has the greatest cosine c to its
    own. The value of s becomes (v_s + sum of w v_t) / (1 + sum of w) over its tokens, where
    w = max(c, 0) |v_t| / (|v_t| + |v_s|). Only tokens with c of at least `threshold` are merged,
    and of the tokens that a head evicts at a cut only a `fraction` with the greatest c, rounded as
    the quantiles of kvpress. Keys stay as they are. After Token Merging (arXiv 2210.09461) and D2O
    (arXiv 2406.13035).
    """

    threshold: Fraction = 0.0
    fraction: Annotated[float, Interval(above=0, most=1)] = 1.0

    def __post_init__(self):
        check_fields("model.cache.merge", self)

    def merged_values(
        self, slots: Candidates, places: Int[Array, "B K M"]
    ) -> Float[Array, "B K M H"]:
        """Returns the values of the survivors in slots `places`; -1: there is none."""
        arrays = slots.keys, slots.values, slots.is_token, places
        return for_each_head(self._merge_head, slots.layout, *arrays)

    def _merge_head(
        self,
        keys: Float[Array, "B S H"],
        values: Float[Array, "B S H"],
        is_token: Bool[Array, "B S"],
        places: Int[Array, "B M"],
    ) -> Float[Array, "B M H"]:
        """Returns the merged values of one key head."""
        rows, size = jnp.arange(len(keys))[:, None], keys.shape[1]
        survives = jnp.where(places >= 0, places, size)
        stays = jnp.zeros(is_token.shape, bool).at[rows, survives].set(True, mode="drop")
        similarity, target = _nearest(_unit(keys), places)
        is_merged = is_token & ~stays & (similarity >= self.threshold)
        limit = self._limit(jnp.where(is_merged, similarity, -jnp.inf), (is_token & ~stays).sum(-1))
        is_merged &= similarity >= limit
        old = jnp.take_along_axis(values, jnp.maximum(places, 0)[..., None], axis=1)
        norms = jnp.linalg.norm(values.astype(jnp.float32), axis=-1)
        of_target = jnp.take_along_axis(norms, jnp.take_along_axis(places, target, 1), 1)
        weight = jnp.maximum(similarity, 0) * norms / (norms + of_target + _EPSILON)
        weight = jnp.where(is_merged, weight, 0)
        parts = weight[..., None] * values.astype(jnp.float32)
        parts = jnp.zeros(old.shape, jnp.float32).at[rows, target].add(parts)
        weight = jnp.zeros(places.shape, jnp.float32).at[rows, target].add(weight)[..., None]
        merged = (old.astype(jnp.float32) + parts) / (1 + weight)
        return jnp.where(weight > 0, merged.astype(old.dtype), old)

    def _limit(
        self, similarity: Float[Array, "B S"], evicted: Int[Array, " B"]
    ) -> Float[Array, "B 1"]:
        """Returns the least similarity with which one of `evicted` tokens is merged.

        `similarity` is -inf where nothing is merged. At least the quantile of 1 - fraction are
        n - ceil((n - 1) (1 - fraction)) of n numbers.
        """
        n = np.arange(similarity.shape[1] + 1)
        number = n - np.ceil((n - 1) * (1 - self.fraction))
        last = jnp.asarray(np.maximum(number - 1, 0), jnp.int32)[evicted]
        best_first = -jnp.sort(-similarity, axis=-1)
        return jnp.take_along_axis(best_first, last[:, None], axis=1)


def _unit(x: Float[Array, "B S H"]) -> Float[Array, "B S H"]:
    """Returns vectors of norm 1, in float32."""
    x = x.astype(jnp.float32)
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), _EPSILON)


def _nearest(
    keys: Float[Array, "B S H"], places: Int[Array, "B M"]
) -> tuple[Float[Array, "B S"], Int[Array, "B S"]]:
    """Returns the greatest cosine of each key to those in slots `places`, and which of them it is.

    Args:
      keys: of norm 1.
      places: -1: there is none.
    """
    survivors = jnp.take_along_axis(keys, jnp.maximum(places, 0)[..., None], axis=1)

    def nearest(block):
        cosines = jnp.einsum("BTH,BMH->BTM", block, survivors, precision=jax.lax.Precision.HIGHEST)
        cosines = jnp.where(places[:, None] >= 0, cosines, -jnp.inf)
        return cosines.max(-1), cosines.argmax(-1).astype(jnp.int32)

    rows, size, width = keys.shape
    padded = jnp.pad(keys, [(0, 0), (0, -size % _BLOCK), (0, 0)])
    blocks = padded.reshape(rows, -1, min(_BLOCK, padded.shape[1]), width).swapaxes(0, 1)
    pair = jax.lax.map(nearest, blocks)
    return tuple(x.swapaxes(0, 1).reshape(rows, -1)[:, :size] for x in pair)
