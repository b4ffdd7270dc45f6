"""Layers without attention: the settings of a token mixer, and the state that its layer keeps.

A mixer takes the place of attention in a layer (`LayerKind.mixer`). It reads a text with a state of
fixed size, so its cache does not grow with the text.
"""

import abc
import dataclasses
import math
from typing import Annotated, ClassVar

import draccus
import jax
import jax.numpy as jnp

from lcjax.attention.cache import Arrays, LayerShape, NoSlots
from lcjax.errors import InputError, Interval, PositiveInt, check_fields


@dataclasses.dataclass(frozen=True)
class Mixer(draccus.ChoiceRegistry, abc.ABC):
    """Settings of the token mixer of a layer without attention: `LayerKind.mixer`."""

    def __post_init__(self):
        check_fields("mixer", self)

    @property
    @abc.abstractmethod
    def width(self) -> int:
        """The number of channels that the output projection of the layer reads."""

    @abc.abstractmethod
    def state(self, dtype: jnp.dtype) -> Arrays:
        """Returns shapes and dtypes of the state of one row, each [heads, _, _].

        `dtype` is that of activations.
        """

    @property
    @abc.abstractmethod
    def channels(self) -> int:
        """The most numbers of a token that exist at a time while the layer mixes tokens."""

    @abc.abstractmethod
    def split(self, devices: int) -> "Mixer":
        """Returns the mixer of the heads on one of `devices` devices; all if it cannot split."""

    @abc.abstractmethod
    def flops(self) -> float:
        """Returns the forward FLOPs of a token beside the products with weights."""

    @abc.abstractmethod
    def exchanged(self) -> jax.ShapeDtypeStruct:
        """Returns what a device sends of a row to those that share its tokens, [heads, _, _]."""


@Mixer.register_subclass("gated_delta_net")
@dataclasses.dataclass(frozen=True)
class GatedDeltaNet(Mixer):
    """Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464, sec. 3.4), `models.gated_delta_net`."""

    key_heads: PositiveInt  # G, heads of queries and keys
    value_heads: PositiveInt  # U, heads of values; a multiple of G
    key_dim: PositiveInt  # C, channels of a query or a key
    value_dim: PositiveInt  # Y, channels of a value
    taps: PositiveInt = 4  # W, tokens of the short convolution of queries, keys and values
    # Learning rates up to 2 in place of 1, so that the eigenvalues of a state's transition may be
    # negative (Grazzi et al. 2024, arXiv 2411.12537; OLMo Hybrid)
    negative_eigenvalues: bool = False
    # Of the gated norm; null: that of the model
    norm_epsilon: Annotated[float, Interval(above=0)] | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.value_heads % self.key_heads:
            raise InputError(
                f"mixer.key_heads={self.key_heads} must divide value_heads={self.value_heads}: each"
                " head of keys serves as many heads of values"
            )

    @property
    def width(self):
        return self.value_heads * self.value_dim

    def state(self, dtype):
        def inputs(heads, size):  # of the convolution, those that later tokens need
            return jax.ShapeDtypeStruct((heads, self.taps - 1, size), dtype)

        keys = inputs(self.key_heads, self.key_dim)
        state = (self.value_heads, self.key_dim, self.value_dim)
        return {
            "state": jax.ShapeDtypeStruct(state, jnp.float32),
            "queries": keys,
            "keys": keys,
            "values": inputs(self.value_heads, self.value_dim),
        }

    @property
    def channels(self):
        # Queries and keys of all heads of values, values, gates and outputs
        return self.value_heads * (2 * self.key_dim + 3 * self.value_dim)

    def split(self, devices):
        if self.value_heads % devices:
            return self
        values = self.value_heads // devices
        keys = self.key_heads // devices if self.key_heads % devices == 0 else self.key_heads
        # Keys that devices cannot share are computed on all of them, and each reads some.
        return dataclasses.replace(self, key_heads=math.gcd(keys, values), value_heads=values)

    def exchanged(self):
        # Its affine map of the state
        shape = self.value_heads, self.key_dim, self.key_dim + self.value_dim
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def flops(self):
        # The recurrence: k^T S, the update k u^T and q^T S. Chunks of 64 tokens multiply 1.8 times
        # as much for heads of 128 channels.
        return 6.0 * self.value_heads * self.key_dim * self.value_dim


@dataclasses.dataclass(frozen=True)
class StateCache(NoSlots):
    """The state of a mixer: of fixed size, whatever number of tokens it has read."""

    keeps_all: ClassVar[bool] = False
    holds_keys_only: ClassVar[bool] = False

    mixer: Mixer

    def arrays(self, layer: LayerShape, slots: int):
        return self.mixer.state(layer.dtype)
