"""Biases of the logits that depend on the head and on the distance `k_index - q_index`.

A bias is a pytree. The last axis of its leaves is that of query heads, so slices of the leaves are
the bias of some heads. Its parameters get gradients. Kernels call two methods, block by block:

- `logits(q_index [..., T], k_index [..., S]) -> float32 [..., N, T, S]`
- `gradient(q_index, k_index, d_logits [..., N, T, S])`: the cotangent of the parameters, summed
  over everything but the heads.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.masks import integer


def _distance(q_index, k_index):
    """Returns k - q, int32 [..., T, S]."""
    return jnp.asarray(k_index)[..., None, :] - jnp.asarray(q_index)[..., :, None]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["slopes"], meta_fields=[])
@dataclass(frozen=True)
class Alibi:
    """-slopes[n] |q - k|: attention with linear biases (Press et al. 2022, section 3)."""

    slopes: jax.Array  # float [N]; `alibi_slopes(N)` gives those of the paper

    @property
    def num_heads(self) -> int:
        return self.slopes.shape[-1]

    def logits(self, q_index, k_index):
        away = jnp.abs(_distance(q_index, k_index)).astype(jnp.float32)
        return -self.slopes.astype(jnp.float32)[:, None, None] * away[..., None, :, :]

    def gradient(self, q_index, k_index, d_logits):
        away = jnp.abs(_distance(q_index, k_index)).astype(jnp.float32)
        sums = -jnp.sum(d_logits * away[..., None, :, :], (-2, -1))
        return Alibi(jnp.sum(sums, tuple(range(sums.ndim - 1))))


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["table"],
    meta_fields=["max_distance", "bidirectional"],
)
@dataclass(frozen=True)
class RelativeBias:
    """table[bucket(k - q), n]: T5's relative bias (Raffel et al. 2020, section 2.1).

    The first half of the buckets hold one distance each. The others hold logarithmically growing
    ranges up to `max_distance`, and the last one also all larger distances. Bidirectional tables
    use their second half for keys ahead of the query; in other tables these keys share bucket 0.
    """

    table: jax.Array  # float [buckets, N]
    max_distance: int = 128
    bidirectional: bool = False

    @property
    def num_heads(self) -> int:
        return self.table.shape[-1]

    @property
    def thresholds(self) -> tuple[int, ...]:
        """The shortest distance of each bucket after the first, of one direction."""
        return _thresholds(self.table.shape[0] // (1 + self.bidirectional), self.max_distance)

    def buckets(self, q_index, k_index):
        """Returns the bucket of each query and key, int32 [..., T, S]."""
        ahead = _distance(q_index, k_index)
        away = jnp.abs(ahead) if self.bidirectional else jnp.maximum(-ahead, 0)
        thresholds = self.thresholds
        # Buckets are looked up by distance; distances beyond the last threshold share its bucket.
        known = np.searchsorted(thresholds, np.arange(thresholds[-1] + 1), side="right")
        bucket = jnp.asarray(known.astype(np.int32))[jnp.minimum(away, thresholds[-1])]
        if not self.bidirectional:
            return bucket
        return bucket + jnp.where(ahead > 0, self.table.shape[0] // 2, 0)

    def logits(self, q_index, k_index):
        values = self.table.astype(jnp.float32)[self.buckets(q_index, k_index)]
        return jnp.moveaxis(values, -1, -3)

    def gradient(self, q_index, k_index, d_logits):
        # A product with one-hot buckets is faster than a scatter, which adds element by element.
        buckets = self.buckets(q_index, k_index)
        chosen = jax.nn.one_hot(buckets, self.table.shape[0], dtype=jnp.float32)
        chosen = jnp.broadcast_to(chosen, (*d_logits.shape[:-3], *chosen.shape[-3:]))
        table = jnp.einsum(
            "...NTS,...TSX->XN", d_logits, chosen, precision=jax.lax.Precision.HIGHEST
        )
        return RelativeBias(table, self.max_distance, self.bidirectional)


Bias = Alibi | RelativeBias


def _thresholds(buckets: int, max_distance: int) -> tuple[int, ...]:
    """Returns the first distance of buckets 1, 2, ...; the later half is spaced logarithmically.

    bucket(d) = d for d < e = buckets / 2, else e + floor(log(d/e) / log(max_distance/e) (buckets -
    e)), in float32 like the published models, whose boundaries depend on its rounding.
    """
    exact = buckets // 2
    if exact < 1 or max_distance <= exact:
        raise ValueError(
            f"RelativeBias: {buckets} buckets a direction with max_distance={max_distance}; give "
            f"at least 2 buckets, and a distance above half of them ({exact})"
        )
    far = np.arange(exact, max_distance + 1)
    steps = np.log(far.astype(np.float32) / np.float32(exact)) / np.float32(
        math.log(max_distance / exact)
    )
    bucket = exact + (steps * np.float32(buckets - exact)).astype(np.int64)
    bucket = np.minimum(bucket, buckets - 1)
    logarithmic = (int(far[np.argmax(bucket >= b)]) for b in range(exact + 1, buckets))
    return *range(1, exact + 1), *logarithmic


def alibi_slopes(heads: int) -> np.ndarray:
    """Returns float32 [heads]: 2^(-8 i / heads) for i = 1.., as in the paper's released code.

    If `heads` is no power of two, these are the slopes of the next lower power of two, followed by
    every second slope of the next higher one.
    """
    power = 2 ** int(math.log2(integer("alibi_slopes: heads", heads, 1)))
    slopes = [2.0 ** (-8.0 * i / power) for i in range(1, power + 1)]
    between = [2.0 ** (-4.0 * i / power) for i in range(1, 2 * power, 2)]
    return np.array((slopes + between)[:heads], np.float32)


def of_heads(tree, first: int, count: int):
    """Returns the slice [first, first + count) of the last axis of every leaf."""
    return jax.tree.map(lambda x: x[..., first : first + count], tree)
