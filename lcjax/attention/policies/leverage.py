"""Policies that score tokens by leverage, exact or approximate: cur, leverage and cap.

The leverage of a row x of a matrix X is x^T (X^T X)^-1 x: how much of the space of all rows it
alone spans.
"""

from dataclasses import dataclass
from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from lcjax.attention.candidates import Candidates, for_each_head
from lcjax.attention.eviction import CachePolicy
from lcjax.attention.policies.expected_attention import ExpectedQuery
from lcjax.errors import NonNegativeFloat, NonNegativeInt, OneOf, PositiveInt

_HIGHEST = jax.lax.Precision.HIGHEST
_JITTERS = tuple(10.0**power for power in range(-2, 7))  # the first is that of kvpress


@CachePolicy.register_subclass("cur")
@dataclass(frozen=True)
class Cur(CachePolicy):
    """Keeps tokens whose keys and values are long beside their neighbours' (CurDKV, 2509.15038).

    Squared norms stand for leverage scores. Each is divided by the sum of those of its part of
    `local_window` tokens, and the score is the product of the key's and the value's share, or what
    `by` says; the sinks always stay. As in kvpress, without its random projection.
    """

    examples = ({"tokens": 32, "local_window": 8}, {"ratio": 0.5, "local_window": None})
    scores_part = True

    sinks: NonNegativeInt = 4
    # Tokens among which a norm is a share; null: all of a head
    local_window: PositiveInt | None = 16
    by: Annotated[str, OneOf(("product", "mean", "keys", "values"))] = "product"

    def score(self, slots):
        shares = {
            "keys": self._shares(slots, slots.keys),
            "values": self._shares(slots, slots.values),
        }
        if self.by in shares:
            scores = shares[self.by]
        elif self.by == "mean":
            scores = (shares["keys"] + shares["values"]) / 2
        else:
            scores = shares["keys"] * shares["values"]
        # Scores of a head add up to 1, so that heads can share what stays.
        scores /= jnp.maximum(scores.sum(-1, keepdims=True), 1e-30)
        return jnp.where(slots.index < self.sinks, jnp.inf, scores)

    def _shares(self, slots: Candidates, x: Float[Array, "B K S H"]) -> Float[Array, "B K S"]:
        """Returns the squared norm of each token over the sum of those of its part."""
        squares = jnp.where(slots.is_token, jnp.square(x.astype(jnp.float32)).sum(-1), 0)
        if self.local_window is None:
            return squares / jnp.maximum(squares.sum(-1, keepdims=True), 1e-30)
        first = slots.from_first(squares, 0.0)
        size = first.shape[-1]
        first = jnp.pad(first, [(0, 0), (0, 0), (0, -size % self.local_window)])
        parts = first.reshape(*first.shape[:2], -1, self.local_window)
        parts /= jnp.maximum(parts.sum(-1, keepdims=True), 1e-30)
        return slots.to_slots(parts.reshape(first.shape)[..., :size])


@CachePolicy.register_subclass("leverage")
@dataclass(frozen=True)
class Leverage(CachePolicy):
    """Keeps keys of great leverage, which few others stand for (Compactor, arXiv 2507.08143).

    The rows are the unrotated keys of a head minus their mean, multiplied by a Gaussian matrix of
    `sketch` columns. Cached keys are rotated back. The score is standardised over the heads and
    tokens of a row, as in kvpress, where rows of a batch share mean and deviation.
    """

    scores_part = True

    sketch: PositiveInt = 48
    seed: NonNegativeInt = 0  # of the sketch, which is the same in all layers and rows

    def score(self, slots):
        sketch = gaussian_sketch(slots, self.sketch, self.seed)
        return standardised(sketched_leverage(slots, slots.is_token, sketch), slots.is_token)


@CachePolicy.register_subclass("cap")
@dataclass(frozen=True)
class Cap(ExpectedQuery):
    """Keeps values that add most to the space of all, weighted by relevance (CapKV, 2604.25975).

    The anchor is the mean query after the sinks, rotated as on average over the next `future`
    positions. A token weighs w = exp(`sharpness` cos(key, anchor)), over the largest of its head,
    and its score is w v^T (I + sum of (w + `epsilon`) v v^T)^-1 v, averaged over the query heads of
    a key head. Sinks always stay. As in kvpress; in the paper keys and anchor are not normalised.
    """

    sinks: NonNegativeInt = 4
    future: PositiveInt = 512  # positions whose rotations are averaged
    sharpness: NonNegativeFloat = 5.0
    epsilon: NonNegativeFloat = 1e-6

    def score(self, slots):
        rows, heads, _, size = slots.keys.shape
        anchor = jnp.einsum(
            "BHI,BNI->BNH", self.mean_rotation(slots), self.mean_query(slots), precision=_HIGHEST
        )
        is_scored = slots.is_token & (slots.index >= self.sinks)

        def head(keys, values, anchor, is_scored):
            keys, values = keys.astype(jnp.float32), values.astype(jnp.float32)
            values = jnp.where(is_scored[..., None], values, 0)
            cosines = jnp.einsum("BGH,BSH->BGS", _unit(anchor), _unit(keys), precision=_HIGHEST)
            cosines = jnp.where(is_scored[:, None], cosines, -1)
            largest = cosines.max(-1, keepdims=True)
            weights = jnp.exp(self.sharpness * (cosines - largest))
            scaled = jnp.sqrt(weights + self.epsilon)[..., None] * values[:, None]
            matrix = jnp.einsum("BGSH,BGSI->BGHI", scaled, scaled, precision=_HIGHEST)
            lower = jnp.linalg.cholesky(matrix + jnp.eye(size))
            columns = jnp.broadcast_to(values.mT[:, None], (*lower.shape[:3], values.shape[1]))
            half = jax.scipy.linalg.solve_triangular(lower, columns, lower=True)
            return (weights * jnp.square(half).sum(2)).mean(1)

        anchor = anchor.reshape(rows, heads, -1, size)
        scores = for_each_head(head, slots.layout, slots.keys, slots.values, anchor, is_scored)
        return jnp.where(slots.index < self.sinks, jnp.inf, scores)


def _unit(x: Float[Array, "... H"]) -> Float[Array, "... H"]:
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


def gaussian_sketch(slots: Candidates, columns: int, seed: int) -> Float[Array, "1 K H k"]:
    """Returns normal numbers of variance 1 / `columns`, others in each head."""
    shape = (1, slots.keys.shape[1], slots.keys.shape[-1], columns)
    return jax.random.normal(jax.random.key(seed), shape) * columns**-0.5


def sketched_leverage(
    slots: Candidates, is_scored: Bool[Array, "B K S"], sketch: Float[Array, "B K H k"]
) -> Float[Array, "B K S"]:
    """Returns the leverage of centred unrotated keys under a sketch, among those that are scored.

    A jitter is added to the Gram matrix, ten times as much while it has no Cholesky factor.

    Args:
      slots: the keys.
      is_scored: which tokens are rows of the matrix.
      sketch: by which rows are multiplied; of one row for all.
    """

    def head(keys, is_scored, sketch):
        number = jnp.maximum(is_scored.sum(-1), 1)[:, None, None]
        keys = jnp.where(is_scored[..., None], keys, 0)
        centred = jnp.where(is_scored[..., None], keys - keys.sum(1, keepdims=True) / number, 0)
        rows = jnp.matmul(centred, sketch, precision=_HIGHEST)
        gram = jnp.einsum("BSH,BSI->BHI", rows, rows, precision=_HIGHEST)
        jitter = jnp.array(_JITTERS)[:, None, None, None] * jnp.eye(gram.shape[-1])
        lower = jnp.linalg.cholesky(gram + jitter)  # [J, B, k, k]
        works = jnp.isfinite(lower).all((2, 3))
        lower = jnp.take_along_axis(lower, works.argmax(0)[None, :, None, None], axis=0)[0]
        half = jax.scipy.linalg.solve_triangular(lower, rows.mT, lower=True)
        return jnp.square(half).sum(1)

    return for_each_head(head, slots.layout, slots.unrotated_keys(), is_scored, sketch)


def standardised(
    scores: Float[Array, "B K S"], is_scored: Bool[Array, "B K S"]
) -> Float[Array, "B K S"]:
    """Returns `scores` minus their mean, over their deviation, each over heads and tokens."""
    number = is_scored.sum((1, 2), keepdims=True)
    mean = jnp.where(is_scored, scores, 0).sum((1, 2), keepdims=True) / jnp.maximum(number, 1)
    centred = jnp.where(is_scored, scores - mean, 0)
    variance = jnp.square(centred).sum((1, 2), keepdims=True) / jnp.maximum(number - 1, 1)
    return centred / jnp.maximum(jnp.sqrt(variance), 1e-6)
