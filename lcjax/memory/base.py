"""The `model.memory` section of a config: which memory a decoder gets, and its first weights."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import draccus
import jax
import jax.numpy as jnp
from draccus.utils import DraccusException
from jax.sharding import Mesh

from lcjax.errors import InputError
from lcjax.models.config import ModelConfig
from lcjax.models.memory import Memory
from lcjax.parallel.sharding import param_shardings
from lcjax.tree import union


@dataclasses.dataclass(frozen=True)
class MemorySection(draccus.ChoiceRegistry, abc.ABC):
    """A memory for a decoder that has none; a checkpoint that has one brings its own."""

    # The checkpoint or preset of the encoder; None: it is made of the decoder's own weights.
    encoder: ClassVar[str | None] = None

    @abc.abstractmethod
    def memory(self, config: ModelConfig, encoder: ModelConfig | None = None) -> Memory:
        """Returns the memory of a decoder with this config; `encoder` is that of `self.encoder`."""

    @abc.abstractmethod
    def init_params(
        self, params: dict, config: ModelConfig, encoder: dict | None, mesh: Mesh | None
    ) -> dict:
        """Returns `params` with the initial weights of the memory.

        Args:
          params: of the decoder.
          config: of the decoder, its memory included.
          encoder: weights of `self.encoder`.
          mesh: the devices of the new weights.
        """

    def to_dict(self) -> dict[str, Any]:
        """Returns the section as plain values, with the `type` of each choice."""
        return {"type": self.get_choice_name(type(self))} | dataclasses.asdict(self)

    @staticmethod
    def from_dict(fields: dict[str, Any]) -> "MemorySection":
        """The inverse of `to_dict`; fields without a type are of CEPE, as older runs wrote them."""
        try:
            return draccus.decode(MemorySection, {"type": "cepe"} | fields)
        except DraccusException as error:
            reason = " ".join(str(error).split())
            raise InputError(
                f"the settings {fields} of a memory cannot be read ({reason}); import the module"
                " that registers its types first"
            ) from None


def add_to_readers(
    params: dict,
    config: ModelConfig,
    init_layer: Callable[[dict], dict],
    mesh: Mesh | None,
) -> dict:
    """Returns `params` with new weights in every reader layer.

    Args:
      params: of the decoder.
      config: of the decoder, its memory included.
      init_layer: (parameters of a layer) -> new parameters of this layer.
      mesh: the devices of the new weights.
    """
    reads = config.memory.reader_layers(config.num_layers)
    names = [f"layers_{i}" for i, layer_reads in enumerate(reads) if layer_reads]
    names = ["layers"] if "layers" in params else names

    def init(layers):  # copies, so that trained weights share no buffer with frozen ones
        return {name: jax.tree.map(jnp.copy, init_layer(layer)) for name, layer in layers.items()}

    return union(params, init_on_mesh(init, {name: params[name] for name in names}, mesh))


def init_on_mesh(init: Callable[[dict], dict], params: dict, mesh: Mesh | None) -> dict:
    """Returns `init(params)`, computed on the devices of `mesh` as the sharding table says."""
    shardings = None if mesh is None else param_shardings(mesh, jax.eval_shape(init, params))
    return jax.jit(init, out_shardings=shardings)(params)
