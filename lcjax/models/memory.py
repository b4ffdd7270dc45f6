"""What a decoder reads beside its window: how a context gets in, whatever method encoded it."""

import dataclasses
from typing import TYPE_CHECKING, Any

import draccus
import flax.linen as nn
import jax

if TYPE_CHECKING:
    from lcjax.models.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Encoded:
    """An encoded context of M tokens, which all tokens of a row see.

    Either `states`, which every layer projects for itself, or `layers`: keys and values
    [B, K, M, H] of each layer that reads the context, the first one first.
    """

    mask: jax.Array  # bool [B, M]: what is there
    states: jax.Array | None = None  # [B, M, E]
    layers: tuple[tuple[jax.Array, jax.Array], ...] | None = None

    def of_layer(self, number: int) -> "Encoded":
        """As the `number`-th of the layers that read the context sees it."""
        if self.layers is None:
            return self
        return dataclasses.replace(self, layers=(self.layers[number],))


@dataclasses.dataclass(frozen=True)
class Memory(draccus.ChoiceRegistry):
    """How a context is encoded and which layers read it: the `memory` of a `ModelConfig`."""

    def reading(self, num_layers: int) -> tuple[bool, ...]:
        """Which of the layers read the context, the first one first."""
        raise NotImplementedError(f"{type(self).__name__} has to define `reading`")

    def check(self, config: "ModelConfig") -> None:
        """Refuses a decoder that the method is not defined for."""

    def encoder(self, config: "ModelConfig", mesh: jax.sharding.Mesh | None) -> nn.Module:
        """A module: (chunks int32 [B, C, P], mask bool [B, C, P]) -> `Encoded`."""
        raise NotImplementedError(f"{type(self).__name__} has to define `encoder`")

    def reader(
        self, config: "ModelConfig", mesh: jax.sharding.Mesh | None, **options: Any
    ) -> nn.Module:
        """A module of a layer: (x [B, T, D], `Encoded`) -> what is added to x."""
        raise NotImplementedError(f"{type(self).__name__} has to define `reader`")
