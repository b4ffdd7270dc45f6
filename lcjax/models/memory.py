"""The context beside a decoder's window, and the interface of the methods that encode it."""

import abc
import dataclasses
from typing import TYPE_CHECKING, Any

import draccus
import flax.linen as nn
import jax
import jax.numpy as jnp

from lcjax.errors import InputError

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
    chunks: jax.Array | None = None  # int32 [B], how many there are, where queries count them
    # [B, C, P, D], where asked for: what the decoder says of each token of the chunks that it read
    hidden: jax.Array | None = None

    def with_layer(self, pair: tuple[jax.Array, jax.Array]) -> "Encoded":
        """As a layer sees it that reads these keys and values."""
        return dataclasses.replace(self, layers=(pair,))

    def of_layer(self, number: int) -> "Encoded":
        """As the `number`-th of the layers that read the context sees it."""
        if self.layers is None:
            return self
        return self.with_layer(self.layers[number])

    def packed(self) -> "Encoded":
        """What is there before what is not, row by row; tokens keep their order otherwise.

        Attention skips blocks of keys that nobody sees. Padding at the end of every chunk leaves
        something to see in all of them; behind all text it fills blocks of its own.
        """
        order = jnp.argsort(~self.mask, axis=1, stable=True)

        def moved(x, *, axis):
            index = order.reshape(order.shape[0], *[1] * (axis - 1), -1, *[1] * (x.ndim - axis - 1))
            return jnp.take_along_axis(x, index, axis)

        layers = self.layers and tuple(
            tuple(moved(part, axis=2) for part in layer) for layer in self.layers
        )
        states = None if self.states is None else moved(self.states, axis=1)
        return Encoded(moved(self.mask, axis=1), states, layers, self.chunks)


def token_axis(x: jax.Array) -> int:
    """Where tokens are in a mask [B, M], states [B, M, E], or keys and values [B, K, M, H]."""
    return 2 if x.ndim == 4 else 1


@dataclasses.dataclass(frozen=True)
class Memory(draccus.ChoiceRegistry, abc.ABC):
    """How a context is encoded and which layers read it: the `memory` of a `ModelConfig`."""

    @abc.abstractmethod
    def reader_layers(self, num_layers: int) -> tuple[bool, ...]:
        """Whether each of the layers reads the context."""

    def uniform_layers(self, num_layers: int) -> bool:
        """Whether all layers read the context in the same way, so that they can be scanned."""
        return all(self.reader_layers(num_layers))

    def check(self, config: "ModelConfig") -> None:
        """Raises an InputError for a decoder that the method is not defined for."""

    def for_inference(self) -> "Memory":
        """The memory without the settings that are for training only."""
        return self

    def encodes_as(self, other: "Memory | None") -> "Memory":
        """This memory with the settings of `other` that do not change how contexts are encoded."""
        return self

    @abc.abstractmethod
    def encoder(self, config: "ModelConfig", mesh: jax.sharding.Mesh | None) -> nn.Module:
        """A module: (chunks int32 [B, C, P], mask bool [B, C, P], options) -> `Encoded`."""

    def reader(
        self, config: "ModelConfig", mesh: jax.sharding.Mesh | None, **options: Any
    ) -> nn.Module:
        """A module of a reader layer: (x [B, T, D], `Encoded`) -> what is added to x."""
        raise TypeError(f"{type(self).__name__} is read by self-attention")

    @property
    def is_prefix(self) -> bool:
        """Whether the context stands before the text, in one softmax with it.

        Self-attention then reads its keys, which are not rotated, and the positions of the text
        follow those of the context. The decoder itself encodes: the encoder takes its `params`, a
        `rotation`, and the states `after` which it goes on.
        """
        return False

    @property
    def attention(self) -> type[nn.Module] | None:
        """The self-attention module of the layers; None: the decoder's own."""
        return None

    @property
    @abc.abstractmethod
    def max_chunk_size(self) -> int:
        """Tokens of the longest chunk that can be encoded."""

    @property
    def default_chunk_size(self) -> int:
        """Tokens of the chunks that a long text is split into by default."""
        return self.max_chunk_size

    def check_chunk(self, length: int, key: str) -> None:
        """Raises an InputError, which names `key`, if chunks of `length` tokens are too long."""
        if length > self.max_chunk_size:
            raise InputError(
                f"{key}={length} is more than the {self.max_chunk_size} tokens that the encoder was"
                f" made for; leave it out for {self.default_chunk_size}"
            )

    def num_slots(self, tokens: int) -> int:
        """Slots that the states of a chunk of `tokens` tokens fill."""
        return tokens

    def parts(self, chunk: int) -> tuple[int, ...]:
        """Sizes of the parts of a chunk that are encoded without seeing each other."""
        return (chunk,)

    @property
    def shared_keys(self) -> bool:
        """Whether the encoder returns keys and values: reader layers project queries only."""
        return False

    @property
    def ordered(self) -> bool:
        """Whether the encoder takes the `numbers` of chunks, and `key` and `tags` for its draws."""
        return False

    @property
    def query_dependent(self) -> bool:
        """Whether the encoding depends on a question: the `query` of the encoder."""
        return False

    def without_query(self) -> "Memory":
        """A copy with the query-independent policy and the same output shapes, for `eval_shape`."""
        return self

    @abc.abstractmethod
    def of_layers(self, count: int) -> "Memory":
        """The memory of a decoder in which `count` layers read: for the cost of one layer more."""

    @abc.abstractmethod
    def projected(self, params: dict, config: "ModelConfig", encoded: Encoded) -> Encoded:
        """`encoded` with the keys and values of the reader layers in place of its states."""


def check_memory(memory: Memory | None) -> None:
    """Refuses to read a context with a model that cannot."""
    if memory is None:
        raise InputError(
            "context: this model has no memory to read it with; put it in front of the text, or"
            " load a model with one (model.memory.type=cepe, shared_llm, beacon, auto_compressor)"
        )


def check_chunks(chunks: jax.Array, mask: jax.Array, longest: int) -> None:
    """Refuses chunks [B, C, P] that an encoder of so many tokens was not made for."""
    if chunks.ndim != 3 or mask.shape != chunks.shape:
        raise InputError(
            f"chunks of shape {chunks.shape} with a mask of shape {mask.shape}: both must be [rows,"
            " chunks, tokens of a chunk]"
        )
    if chunks.shape[2] > longest:
        raise InputError(
            f"chunks of {chunks.shape[2]} tokens are longer than the {longest} that the encoder was"
            " made for; cut them into shorter ones"
        )
