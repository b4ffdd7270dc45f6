"""What indexers share, which learn the choice of keys from the probabilities of attention.

Letters: I index heads, J channels of an index head.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from lcjax.attention.base import AttentionMetadata, Pattern
from lcjax.errors import Interval
from lcjax.rope.rotation import Rotation
from pallas_kernels import gather

_EPSILON = 1e-6  # of `rms_norm`


@dataclasses.dataclass(frozen=True)
class DistilledPattern(Pattern):
    """A pattern whose parameters learn the probabilities of attention, and nothing else.

    A training adds the mean of `divergence` over tokens and layers, times `divergence_factor`. In
    the first stage attention is full (`dense`), and the parameters alone are trained.
    """

    # First stage of training: attention is full, and the parameters learn it
    dense: bool = dataclasses.field(default=False, kw_only=True)
    # Of the divergence in the loss; 0 leaves it out
    divergence_factor: Annotated[float, Interval(least=0, most=1)] = dataclasses.field(
        default=1.0, kw_only=True
    )

    @abc.abstractmethod
    def divergence(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        metadata: AttentionMetadata,
    ) -> Float[Array, "B T"]:
        """Returns how far the choice of each query is from the probabilities of attention.

        Args:
          q, k: unrotated queries and keys, through which no gradient flows.
          metadata: as in `attend`.
        """


def adds_divergence(pattern: Pattern) -> bool:
    """Returns whether a training under `pattern` adds its divergence to the loss."""
    return isinstance(pattern, DistilledPattern) and pattern.divergence_factor > 0


def index_rotation(rotation: Rotation, size: int) -> Rotation:
    """Returns the rotation of index heads with `size` channels, without scales.

    It has the frequencies of the layer; if they are too many for the channels, some, evenly spaced.
    """
    frequencies, pairs, fitting = rotation.inv_freq, rotation.inv_freq.shape[-1], size // 2
    if fitting < pairs:
        frequencies = frequencies[..., np.arange(fitting) * pairs // max(fitting, 1)]
    return Rotation(frequencies)


def rms_norm(x: Float[Array, "... J"], factor: Float[Array, " J"]) -> Float[Array, "... J"]:
    """Returns x over its root mean square, times a factor of each channel."""
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + _EPSILON)
    return (wide * factor.astype(jnp.float32)).astype(x.dtype)


def logits(
    q: Float[Array, "B N H"], k: Float[Array, "B S K H"], soft_cap: float | None
) -> Float[Array, "B K G S"]:
    """Returns the float32 logits of one query of each row, by key head."""
    grouped = q.reshape(len(q), k.shape[2], -1, q.shape[2])
    x = gather.einsum("BKGH,BSKH->BKGS", grouped, k.astype(q.dtype)) * q.shape[2] ** -0.5
    return x if soft_cap is None else soft_cap * jnp.tanh(x / soft_cap)


def log_softmax(x: Float[Array, "... S"], visible: Bool[Array, "... S"]) -> Float[Array, "... S"]:
    """Returns the log-softmax over visible entries; -inf for others, and in rows without any."""
    x = jnp.where(visible, x, -jnp.inf)
    largest = jax.lax.stop_gradient(x.max(-1, keepdims=True))
    x = x - jnp.where(largest > -jnp.inf, largest, 0)
    total = jnp.where(visible, jnp.exp(x), 0).sum(-1, keepdims=True)
    return x - jnp.log(jnp.where(total > 0, total, 1))


def kl_divergence(
    teacher: Float[Array, "... S"], scores: Float[Array, "... S"], visible: Bool[Array, "... S"]
) -> Float[Array, ...]:
    """Returns the divergence of the softmax of `scores` over visible keys from the teacher.

    Args:
      teacher: probabilities, through which no gradient flows.
      scores: those of the indexer.
      visible: the keys over which both are distributions; others have no part.
    """
    teacher = jax.lax.stop_gradient(teacher)
    apart = jnp.log(jnp.where(teacher > 0, teacher, 1)) - log_softmax(scores, visible)
    return jnp.where(visible & (teacher > 0), teacher * apart, 0).sum(-1)
