"""The `model.memory` section of a recipe: adds a memory and its initial weights to a decoder."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import draccus
import jax
import jax.numpy as jnp
from draccus.utils import DraccusException

from lcjax.errors import InputError, one_line
from lcjax.models.memory import Memory
from lcjax.models.model_config import ModelConfig
from lcjax.parallel.sharding import param_shardings
from lcjax.tree import union


@dataclasses.dataclass(frozen=True)
class MemorySection(draccus.ChoiceRegistry, abc.ABC):
    """Options of a memory that is added to a decoder without one.

    A checkpoint with a memory contains its options (`lcjax.models.memory.Memory`) instead.
    """

    # Checkpoint or preset of the encoder; None: the encoder is made of the decoder's weights.
    encoder: ClassVar[str | None] = None

    @abc.abstractmethod
    def memory(self, config: ModelConfig, encoder: ModelConfig | None = None) -> Memory:
        """Returns the memory of a decoder.

        Args:
          config: config of the decoder.
          encoder: config of the encoder `self.encoder`, if it is not None.
        """

    @abc.abstractmethod
    def init_params(
        self,
        params: dict,
        config: ModelConfig,
        encoder: dict | None,
        mesh: jax.sharding.Mesh | None,
    ) -> dict:
        """Returns `params` with the initial weights of the memory.

        Args:
          params: parameters of the decoder.
          config: config of the decoder, its memory included.
          encoder: parameters of the encoder `self.encoder`, if it is not None.
          mesh: the devices of the new weights.
        """

    def to_dict(self) -> dict[str, Any]:
        """Returns the section as plain values, including `type`."""
        return {"type": self.get_choice_name(type(self))} | dataclasses.asdict(self)

    @staticmethod
    def from_dict(fields: dict[str, Any]) -> "MemorySection":
        """Restores a section from the values of `to_dict`.

        Fields without a type are those of CEPE, as older runs wrote them.
        """
        try:
            return draccus.decode(MemorySection, {"type": "cepe"} | fields)
        except DraccusException as error:
            raise InputError(
                f"the settings {fields} of a memory cannot be read ({one_line(error)}); import"
                " the module that registers its types first"
            ) from None


def add_to_readers(
    params: dict,
    config: ModelConfig,
    init_layer: Callable[[dict], dict],
    mesh: jax.sharding.Mesh | None,
) -> dict:
    """Returns `params` with new weights in every reader layer.

    Args:
      params: parameters of the decoder.
      config: config of the decoder, its memory included.
      init_layer: (parameters of a layer) -> additional parameters of this layer.
      mesh: the devices of the new weights.
    """
    reads = config.memory.reader_layers(config.num_layers)
    names = [f"layers_{i}" for i, layer_reads in enumerate(reads) if layer_reads]
    names = ["layers"] if "layers" in params else names

    def init(layers):  # copies arrays, so that trained weights share no buffer with frozen ones
        return {name: jax.tree.map(jnp.copy, init_layer(layer)) for name, layer in layers.items()}

    return union(params, init_on_mesh(init, {name: params[name] for name in names}, mesh))


def init_on_mesh(
    init: Callable[[dict], dict], params: dict, mesh: jax.sharding.Mesh | None
) -> dict:
    """Returns `init(params)`, computed on `mesh` with the shardings of the sharding rules."""
    shardings = None if mesh is None else param_shardings(mesh, jax.eval_shape(init, params))
    return jax.jit(init, out_shardings=shardings)(params)
