"""Expected attention: scores of keys for queries that are still to come."""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lcjax.attention.candidates import Candidates, Seen, for_each_head
from lcjax.attention.eviction import CachePolicy
from lcjax.errors import NonNegativeFloat, NonNegativeInt, PositiveInt
from lcjax.rope.rotation import angles


class ExpectedQuery(CachePolicy):
    """A policy that keeps the mean of the unrotated queries, and how later positions rotate it."""

    sinks: int  # first tokens, whose queries do not count
    future: int  # positions whose rotations are averaged

    def state(self, layer):
        def numbers(*shape):
            return jax.ShapeDtypeStruct(shape, jnp.float32)

        return {
            "query_sum": numbers(layer.num_heads, 1, layer.head_dim),
            "num_queries": numbers(1, 1, 1),
            # Radians per position, and the mean of their cosines and sines over positions 0, 1,
            # ..., of all channels; those of channels that do not turn are 0, 1 and 0.
            "turns": numbers(1, 3, layer.head_dim),
        }

    def observe(self, seen: Seen):
        state, q = seen.slots.state, self.counted_queries(seen)
        number = (seen.index >= self.sinks).sum(-1).astype(jnp.float32)
        added = {
            "query_sum": state["query_sum"] + q.sum(2, keepdims=True),
            "num_queries": state["num_queries"] + number[:, None, None, None],
        }
        if seen.index.shape[1] > 1 or self.future == 1:  # the same for all calls of a request
            added["turns"] = jnp.broadcast_to(self._turns(seen), state["turns"].shape)
        return added

    def counted_queries(self, seen: Seen) -> Float[Array, "B N T H"]:
        """Returns the unrotated queries in float32, 0 for sinks and padding."""
        is_counted = (seen.index >= self.sinks)[:, None, :, None]
        q = jnp.where(is_counted, seen.unrotated.astype(jnp.float32), 0)
        return q * seen.rotation.query_scale

    def mean_query(self, slots: Candidates) -> Float[Array, "B N H"]:
        """Returns the mean of the unrotated queries after the sinks."""
        return (slots.state["query_sum"] / jnp.maximum(slots.state["num_queries"], 1))[:, :, 0]

    def _turns(self, seen: Seen) -> Float[Array, "B 1 3 H"]:
        rotation, size = seen.rotation, seen.queries.shape[-1]
        inv_freq = jnp.asarray(rotation.inv_freq, jnp.float32)
        inv_freq = inv_freq if inv_freq.ndim > 1 else inv_freq[None]
        positions = jnp.arange(self.future)[None]
        angle = angles(positions, inv_freq)  # [1 or B, future, R / 2]
        scale = jnp.reshape(rotation.scale, (-1, 1))
        rest = size - 2 * inv_freq.shape[-1]

        def both(x, fill):
            return jnp.pad(jnp.concatenate([x, x], -1), [(0, 0), (0, rest)], constant_values=fill)

        rows = (inv_freq, scale * jnp.cos(angle).mean(1), scale * jnp.sin(angle).mean(1))
        rows = (both(x, fill) for x, fill in zip(rows, (0.0, 1.0, 0.0), strict=True))
        return jnp.stack(jnp.broadcast_arrays(*rows), axis=1)[:, None]

    def mean_rotation(self, slots: Candidates) -> Float[Array, "B H H"]:
        """Returns the mean rotation R over the positions that follow the text, as a matrix."""
        frequency, cos, sin = (slots.state["turns"][:, 0, i] for i in range(3))  # [B, H]
        start = angles(slots.next_position[:, None], frequency)[:, 0]
        # exp(i (T + j) w) = exp(i T w) exp(i j w)
        c, s = jnp.cos(start), jnp.sin(start)
        cos, sin = c * cos - s * sin, s * cos + c * sin
        size = frequency.shape[-1]
        half = (frequency != 0).sum(-1, keepdims=True) // 2  # pairs (j, j + R / 2)
        channel = jnp.arange(size)
        partner = jnp.where(channel < half, channel + half, channel - half)  # [B, H]
        sign = jnp.where(channel < half, -1.0, 1.0)
        is_turned = channel < 2 * half
        diagonal = jnp.eye(size) * cos[:, :, None]
        across = jax.nn.one_hot(partner, size) * jnp.where(is_turned, sign * sin, 0)[:, :, None]
        return diagonal + across


@CachePolicy.register_subclass("expected_attention")
@dataclass(frozen=True)
class ExpectedAttention(ExpectedQuery):
    """Keeps keys that a normal distribution of later queries would attend to (arXiv 2510.00636).

    Unrotated queries after the first `sinks` tokens have mean m and covariance C. With R, the mean
    rotation over the next `future` positions, the logit of a key k is

        (R m) k / sqrt(H) + k^T R C R^T k / (2 H)

    Scores are its softmax over the tokens after the sinks, averaged over the query heads of a key
    head, plus `epsilon`, times the norm of the value. Sinks always stay. As in kvpress.
    """

    scores_attention: ClassVar[bool] = True

    examples = ({"tokens": 32}, {"ratio": 0.5, "covariance": False, "value_norm": False})

    sinks: NonNegativeInt = 4
    future: PositiveInt = 512  # positions whose rotations are averaged
    epsilon: NonNegativeFloat = 0.0  # with `heads` of type adaptive, 0.01 in the published results
    covariance: bool = True
    value_norm: bool = True

    def state(self, layer):
        shape = (layer.num_heads, layer.head_dim, layer.head_dim)
        squares = {"query_squares": jax.ShapeDtypeStruct(shape, jnp.float32)}
        return super().state(layer) | (squares if self.covariance else {})

    def observe(self, seen: Seen):
        added = super().observe(seen)
        if self.covariance:
            q, precision = self.counted_queries(seen), jax.lax.Precision.HIGHEST
            squares = jnp.einsum("BNTH,BNTI->BNHI", q, q, precision=precision)
            added["query_squares"] = seen.slots.state["query_squares"] + squares
        return added

    def score(self, slots):
        rows, heads, _, size = slots.keys.shape
        state = slots.state
        query = self.mean_query(slots)
        matrix = self.mean_rotation(slots)  # [B, H, H]
        precision = jax.lax.Precision.HIGHEST
        keys = slots.keys.astype(jnp.float32)
        # R^T k, which both terms need
        turned = jnp.einsum("BIH,BKSI->BKSH", matrix, keys, precision=precision)
        mean = query.reshape(rows, heads, -1, size)
        is_scored = slots.is_token & (slots.index >= self.sinks)

        def head(turned, mean, is_scored, *covariance):
            logits = jnp.einsum("BGH,BSH->BGS", mean, turned, precision=precision) * size**-0.5
            for each in covariance:
                spread = jnp.einsum("BSH,BGHI->BGSI", turned, each, precision=precision)
                logits += (spread * turned[:, None]).sum(-1) / (2 * size)
            logits = jnp.where(is_scored[:, None], logits, -jnp.inf)
            logits -= jnp.maximum(logits.max(-1, keepdims=True), jnp.finfo(jnp.float32).min)
            weights = jnp.exp(logits)
            return (weights / jnp.maximum(weights.sum(-1, keepdims=True), 1e-30)).mean(1)

        inputs = [turned, mean, is_scored]
        if self.covariance:
            outer = jnp.einsum("BNH,BNI->BNHI", query, query, precision=precision)
            number = jnp.maximum(state["num_queries"], 1)
            covariance = state["query_squares"] / number - outer
            inputs.append(covariance.reshape(rows, heads, -1, size, size))
        scores = for_each_head(head, slots.layout, *inputs) + self.epsilon
        if self.value_norm:
            scores *= jnp.linalg.norm(slots.values.astype(jnp.float32), axis=-1)
        return jnp.where(slots.index < self.sinks, jnp.inf, scores)
