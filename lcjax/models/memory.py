"""The context outside a decoder's window, and the interface of the methods that encode it."""

import abc
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import draccus
import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from lcjax.errors import InputError

if TYPE_CHECKING:
    from lcjax.models.config import ModelConfig
    from lcjax.models.layers import LayerInputs

# A row of the table of tensor names: (stored tensor, its axes, path, axes of the parameter), as
# `lcjax.checkpoints.hf_names` describes them.
TensorRow = tuple[str, str, str, str]
ReadConfig = Callable[[dict[str, Any], str], "ModelConfig"]  # (config.json, its name) -> config
WriteConfig = Callable[["ModelConfig"], dict[str, Any]]  # config -> config.json
VisibleKeys = Callable[["ModelConfig", int], float]  # (model, length) -> keys a token sees


HF_FIELD = "lcjax_memory"  # of config.json


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EncodedContext:
    """An encoded context of M slots, which all tokens of a row see unless `index` is given.

    Either `states`, which every reader layer projects itself, or `layers`: the keys and values of
    each reader layer, the first one first.
    """

    mask: Bool[Array, "B M"]  # true where a slot is filled
    states: Float[Array, "B M E"] | None = None
    layers: tuple[tuple[Float[Array, "B K M H"], Float[Array, "B K M H"]], ...] | None = None
    num_chunks: Int[Array, " B"] | None = None  # chunks of each row that hold text
    # The decoder's hidden states of the chunks' own tokens, where training asks for them.
    hidden: Float[Array, "B C P D"] | None = None
    # Where a token sees some slots only: the token of the text that each slot belongs to.
    index: Int[Array, "B M"] | None = None  # its order index
    segments: Int[Array, "B M"] | None = None  # its document, from 1; 0: none

    def with_layer(self, key_values: tuple[jax.Array, jax.Array]) -> "EncodedContext":
        """Returns a copy for the layer that reads these keys and values."""
        return dataclasses.replace(self, layers=(key_values,))

    def for_layer(self, number: int) -> "EncodedContext":
        """Returns the copy that reader layer `number` reads."""
        return self if self.layers is None else self.with_layer(self.layers[number])

    def packed(self) -> "EncodedContext":
        """Returns a copy with the filled slots of each row first, in their order.

        Attention skips blocks of keys that no query sees. Padding at the end of every chunk leaves
        visible keys in all blocks; after all text it fills blocks of its own.
        """
        order = jnp.argsort(~self.mask, axis=1, stable=True)

        def pack(x, *, axis):
            index = order.reshape(order.shape[0], *[1] * (axis - 1), -1, *[1] * (x.ndim - axis - 1))
            return jnp.take_along_axis(x, index, axis)

        layers = self.layers and tuple(
            tuple(pack(part, axis=2) for part in layer) for layer in self.layers
        )
        slots = {"mask": self.mask, "states": self.states}
        slots |= {"index": self.index, "segments": self.segments}
        slots = {name: x if x is None else pack(x, axis=1) for name, x in slots.items()}
        return dataclasses.replace(self, **slots, layers=layers, hidden=None)


def token_axis(x: jax.Array) -> int:
    """Returns the slot axis of a mask [B, M], states [B, M, E], or keys and values [B, K, M, H]."""
    return 2 if x.ndim == 4 else 1


@dataclasses.dataclass(frozen=True)
class Memory(draccus.ChoiceRegistry, abc.ABC):
    """How a context is encoded and which layers read it: the `memory` of a `ModelConfig`.

    Implement one of its two families: `lcjax.memory.CrossAttentionMemory`, which layers read
    between self-attention and MLP, or `lcjax.memory.PrefixMemory`, which self-attention reads.
    """

    # What a config says

    @abc.abstractmethod
    def check(self, config: "ModelConfig") -> None:
        """Raises an InputError for a decoder that the method is not defined for."""

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

    def check_training_chunks(self, count: int, *, has_targets: bool, has_teacher: bool) -> None:
        """Raises an InputError if the model cannot be trained with such chunks.

        Args:
          count: chunks of a row.
          has_targets: whether the loss includes the tokens of the chunks.
          has_teacher: whether the loss is a divergence from a teacher.
        """
        if has_targets:
            raise InputError(
                "data.chunks.learned=true adds the tokens of chunks to the loss, which needs a"
                " memory whose chunks the decoder itself reads (beacon, auto_compressor), and no"
                " teacher (train.distill); leave it out"
            )

    def check_retrieved(self, stride: int | None, num_passages: int) -> None:
        """Raises an InputError if the model does not read passages as rows have them.

        Args:
          stride: `data.chunks.stride`, tokens of the text from one search to the next.
          num_passages: passages of a search.
        """
        if stride is not None:
            raise InputError(
                f"data.chunks.stride={stride} gives each part of a row passages of its own, and all"
                " tokens would read them; store rows with stride: null, or set"
                " model.memory.type=retro"
            )

    def num_slots(self, tokens: int) -> int:
        """Returns the number of slots that a chunk of `tokens` tokens fills."""
        return tokens

    def for_inference(self) -> "Memory":
        """Returns the memory without the settings that are for training only."""
        return self

    def encodes_as(self, other: "Memory | None") -> "Memory":
        """Returns a copy with those settings of `other` that do not change encoded contexts."""
        return self

    @property
    def by_chunk(self) -> bool:
        """Whether a row of contexts is a list of passages for each chunk of the text.

        Such a memory has `chunk`, the tokens of a chunk of the text, and `deal_chunks`.
        """
        return False

    @property
    def query_dependent(self) -> bool:
        """Whether the encoding depends on a question: the `query` of the encoder."""
        return False

    def without_query(self) -> "Memory":
        """Returns a copy with the query-independent policy and the same output shapes."""
        return self

    # Encoding

    @property
    def encoder_config(self) -> "ModelConfig | None":
        """The model that encodes chunks; None: the decoder itself, or no model of this kind."""
        return None

    @abc.abstractmethod
    def encoder(self, config: "ModelConfig", mesh: Mesh | None) -> nn.Module:
        """Returns a module (chunks int32 [B, C, P], mask bool [B, C, P], ...) -> EncodedContext.

        Its further arguments are keywords, those of `encoder_inputs`.
        """

    @property
    def encoder_inputs(self) -> tuple[str, ...]:
        """Names of the keyword arguments that the encoder takes, of these:

        - params: parameters of the decoder.
        - rotation: the rotation of the text.
        - after: the encoded context of earlier chunks.
        - numbers: int32 [B, C], the place of each chunk in its context (`by_chunk`: the chunk of
          the text that reads it).
        - segments: int32 [B, T], documents of the text.
        - tags: uint32 [B, C], a hash of each chunk.
        - path: bool [B, C, h - 1], the choices in each chunk's tree.
        - key: a random key, in training.
        - query: float32 [B, D], the embedding of a question.
        - has_query: bool [B], which rows have a question.
        - collect_hidden: whether to return `EncodedContext.hidden`.
        """
        return ()

    def select_inputs(self, **inputs: Any) -> dict[str, Any]:
        """Returns those of `inputs` that the encoder takes; a function is called for its value."""
        selected = {name: x for name, x in inputs.items() if name in self.encoder_inputs}
        return {name: x() if callable(x) else x for name, x in selected.items()}

    def project_states(
        self, params: dict, config: "ModelConfig", encoded: EncodedContext
    ) -> EncodedContext:
        """Returns `encoded` with the keys and values of the reader layers in place of states."""
        return encoded

    # Reading

    @property
    def is_prefix(self) -> bool:
        """Whether the context precedes the text in one sequence of positions."""
        return False

    def reader_layers(self, num_layers: int) -> tuple[bool, ...]:
        """Returns for each layer whether it reads the context."""
        return (True,) * num_layers

    def uniform_layers(self, num_layers: int) -> bool:
        """Whether all layers read the context in the same way, so that they can be scanned."""
        return all(self.reader_layers(num_layers))

    def reader(self, config: "ModelConfig", mesh: Mesh | None, **options: Any) -> nn.Module | None:
        """Returns a module (x [B, T, D], LayerInputs) -> [B, T, D] between attention and MLP."""
        return None

    @property
    def attention_module(self) -> type[nn.Module] | None:
        """The self-attention module of the layers; None: the decoder's own."""
        return None

    def prefix_length(self, encoded: EncodedContext) -> Int[Array, "B 1"] | int:
        """Returns the number of positions before the text that the context takes."""
        return 0

    def prefix_partials(
        self, q: Float[Array, "B T N H"], context: "LayerInputs", mesh: Mesh | None
    ) -> list[tuple[jax.Array, jax.Array]]:
        """Returns partial attentions (out, lse) to merge with the self-attention of queries `q`."""
        return []

    # Cost

    def with_num_readers(self, count: int) -> "Memory":
        """Returns the memory of a decoder of which `count` layers read."""
        return self

    @abc.abstractmethod
    def weight_uses(self, path: str, length: int, context: tuple[int, int] | None) -> float:
        """Returns how many tokens a weight multiplies per token of a text of `length` tokens.

        Args:
          path: of a parameter of the decoder, such as "layers/memory/key/kernel".
          length: tokens of the text.
          context: (chunks, tokens of each); None: no context.
        """

    @abc.abstractmethod
    def attention_flops(
        self,
        config: "ModelConfig",
        length: int,
        context: tuple[int, int],
        visible_keys: VisibleKeys,
    ) -> tuple[float, float]:
        """Returns FLOPs per token of the text: of attention inside chunks, and of all else.

        Args:
          config: of the decoder.
          length: tokens of the text.
          context: (chunks, tokens of each).
          visible_keys: (model, length) -> keys that a token of it sees, on average.
        """

    # Hugging Face folders

    @classmethod
    def from_hf(
        cls, hf: dict[str, Any], where: str, read_config: ReadConfig
    ) -> "ModelConfig | None":
        """Returns the config of a decoder with a memory; None: `hf` describes no such model.

        By default settings are read from the field that `to_hf` writes by default.

        Args:
          hf: the contents of a `config.json`.
          where: its name, for messages.
          read_config: reads a model without a memory.
        """
        if (settings := hf.get(HF_FIELD)) is None:
            return None
        kinds = Memory.get_known_choices()
        try:
            fields = {key: tuple(x) if isinstance(x, list) else x for key, x in settings.items()}
            memory = kinds[fields.pop("type")](**fields)
        except (AttributeError, KeyError, TypeError):
            raise InputError(
                f"{where}: {HF_FIELD}={settings!r} is not as this version writes it; it knows the"
                f" types {', '.join(kinds)}; import the module that registers another one first"
            ) from None
        return read_config(hf, where).replace(memory=memory)

    def to_hf(self, config: "ModelConfig", write_config: WriteConfig) -> dict[str, Any]:
        """Returns the `config.json` of a decoder with this memory.

        By default the settings, which must be plain values, are in a field of their own. A program
        that reads the folder as a Llama ignores it.

        Args:
          config: of the decoder.
          write_config: writes a model without a memory.
        """
        fields = {"type": self.get_choice_name(type(self))} | dataclasses.asdict(self)
        fields = {key: list(x) if isinstance(x, tuple) else x for key, x in fields.items()}
        return write_config(config.replace(memory=None)) | {HF_FIELD: fields}

    def hf_rows(self, config: "ModelConfig", decoder_rows: list[TensorRow]) -> list[TensorRow]:
        """Returns the tensor names of the memory's parameters, but for a model that encodes.

        Rows with `layers/` in their path are of every reader layer.

        Args:
          config: of the decoder.
          decoder_rows: its own rows.
        """
        return []

    def hf_axes(self, config: "ModelConfig") -> dict[str, int]:
        """Returns the sizes of the letters in `hf_rows` that the decoder's rows do not have."""
        return {}

    def misread_by_released(self) -> str | None:
        """Returns the setting that the released code misreads, and how; None: it reads all."""
        return None


def check_memory(memory: Memory | None) -> None:
    """Raises an InputError for a model that cannot read a context."""
    if memory is None:
        raise InputError(
            "context: this model has no memory to read it with; put it in front of the text, or"
            f" load a model with one (model.memory.type={', '.join(Memory.get_known_choices())})"
        )


def check_chunks(chunks: jax.Array, mask: jax.Array, max_size: int) -> None:
    """Raises an InputError for chunks [B, C, P] that an encoder of `max_size` cannot read."""
    if chunks.ndim != 3 or mask.shape != chunks.shape:
        raise InputError(
            f"chunks of shape {chunks.shape} with a mask of shape {mask.shape}: both must be [rows,"
            " chunks, tokens of a chunk]"
        )
    if chunks.shape[2] > max_size:
        raise InputError(
            f"chunks of {chunks.shape[2]} tokens are longer than the {max_size} that the encoder"
            " was made for; cut them into shorter ones"
        )
