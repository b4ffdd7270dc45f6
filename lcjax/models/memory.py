"""The context outside a decoder's window, and the interface of the methods that encode it.

`Memory` is part of a model and of its checkpoints. `MemorySection`, the section `model.memory` of a
config, adds a memory and its initial weights to a decoder without one.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import draccus
import flax.linen as nn
import jax
import jax.numpy as jnp
from draccus.utils import DraccusException
from jaxtyping import Array, Bool, Float, Int

from lcjax.errors import InputError, check_fields, one_line
from lcjax.parallel.sharding import init_on_mesh
from lcjax.tree import union

if TYPE_CHECKING:
    from lcjax.models.layers import LayerInputs
    from lcjax.models.model_config import ModelConfig

# A row of the table of tensor names: (stored tensor, its axes, path, axes of the parameter), as
# `lcjax.checkpoints.hf_names` describes them.
TensorRow = tuple[str, str, str, str]
ReadConfig = Callable[[dict[str, Any], str], "ModelConfig"]  # (config.json, its name) -> config
WriteConfig = Callable[["ModelConfig"], dict[str, Any]]  # config -> config.json
# (model, length) -> mean number of keys that a token sees
VisibleKeys = Callable[["ModelConfig", int], float]


HF_FIELD = "lcjax_memory"  # field of config.json with the settings of a memory


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EncodedContext:
    """An encoded context of M slots, visible to all tokens of a row unless `index` is set.

    It has either `states`, which every reader layer projects to keys and values, or `layers`: the
    keys and values of each reader layer, in the order of layers.
    """

    mask: Bool[Array, "B M"]  # true where a slot is filled
    states: Float[Array, "B M E"] | None = None
    layers: tuple[tuple[Float[Array, "B K M H"], Float[Array, "B K M H"]], ...] | None = None
    num_chunks: Int[Array, " B"] | None = None  # chunks of each row that hold text
    # The decoder's hidden states of the tokens of chunks, for `data.chunks.learned`
    hidden: Float[Array, "B C P D"] | None = None
    # The text token that each slot belongs to, if tokens see only some slots (RETRO):
    index: Int[Array, "B M"] | None = None  # its order index
    segments: Int[Array, "B M"] | None = None  # its document, from 1; 0: none

    def with_layer(self, key_values: tuple[jax.Array, jax.Array]) -> "EncodedContext":
        """Returns a copy with `key_values` as the keys and values of its only layer."""
        return dataclasses.replace(self, layers=(key_values,))

    def for_layer(self, number: int) -> "EncodedContext":
        """Returns the part that reader layer `number` reads; reader layers count from 0."""
        return self if self.layers is None else self.with_layer(self.layers[number])

    def packed(self) -> "EncodedContext":
        """Returns a copy with the filled slots of each row first, in the same order.

        Attention skips blocks of keys that no query sees. If the padding stays at the end of every
        chunk, all blocks have visible keys; if it follows all text, it fills blocks to skip.
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
    """Returns the slot axis of masks [B, M], states [B, M, E], or keys and values [B, K, M, H]."""
    return 2 if x.ndim == 4 else 1


class TrainingRows(NamedTuple):
    """What the rows of a training give a memory to read."""

    num_chunks: int  # chunks of a row
    has_targets: bool = False  # whether the loss includes the tokens of the chunks
    has_teacher: bool = False  # whether the loss is a divergence from a teacher
    # Of stored rows with passages: tokens of the text between two searches (None: one search for
    # the whole row), and passages of a search.
    retrieved: tuple[int | None, int] | None = None


@dataclasses.dataclass(frozen=True)
class Memory(draccus.ChoiceRegistry, abc.ABC):
    """The method that encodes contexts and the layers that read them: `ModelConfig.memory`.

    Subclass one of its two families. Layers read a `lcjax.memory.CrossAttentionMemory` between
    self-attention and MLP. Self-attention reads a `lcjax.memory.PrefixMemory`.
    """

    # Configuration

    @abc.abstractmethod
    def check(self, config: "ModelConfig") -> None:
        """Raises an InputError if the method is not defined for this decoder."""

    @property
    @abc.abstractmethod
    def max_chunk_size(self) -> int:
        """The maximum number of tokens of a chunk."""

    @property
    def default_chunk_size(self) -> int:
        """The default number of tokens of the chunks that a long text is split into."""
        return self.max_chunk_size

    def check_chunk(self, length: int, key: str) -> None:
        """Raises an InputError if chunks of `length` tokens are too long.

        Args:
          length: tokens of a chunk.
          key: the setting with this length, for the message.
        """
        if length > self.max_chunk_size:
            raise InputError(
                f"{key}={length} is more than the {self.max_chunk_size} tokens that the encoder was"
                f" made for; leave it out for {self.default_chunk_size}"
            )

    def check_training(self, rows: TrainingRows) -> None:
        """Raises an InputError if the model cannot be trained on such rows."""
        if rows.has_targets:
            raise InputError(
                "data.chunks.learned=true adds the tokens of chunks to the loss, which needs a"
                " memory whose chunks the decoder itself reads (beacon, auto_compressor), and no"
                " teacher (train.distill); leave it out"
            )
        if rows.retrieved is not None and (stride := rows.retrieved[0]) is not None:
            raise InputError(
                f"data.chunks.stride={stride}: the passages of each part of a row would be read by"
                " all of its tokens; store rows with stride: null, or set model.memory.type=retro"
            )

    def num_slots(self, tokens: int) -> int:
        """Returns the number of slots that a chunk of `tokens` tokens fills."""
        return tokens

    def for_inference(self) -> "Memory":
        """Returns the memory without training-only settings."""
        return self

    def encodes_as(self, other: "Memory | None") -> "Memory":
        """Returns a copy that takes from `other` the settings that do not affect encoding.

        A context that was encoded with `other` can be reused if the result equals `other`.
        """
        return self

    @property
    def by_chunk(self) -> bool:
        """Whether each chunk of the text has its own list of passages (RETRO).

        Such a memory has an attribute `chunk`, the tokens of a chunk of the text, and a method
        `group_by_chunk`, which groups the passages of a row by chunk.
        """
        return False

    @property
    def query_dependent(self) -> bool:
        """Whether the encoding depends on a question."""
        return "query" in self.encoder_inputs

    def without_query(self) -> "Memory":
        """Returns a copy with the query-independent policy and the same output shapes."""
        return self

    # Encoding

    @property
    def encoder_config(self) -> "ModelConfig | None":
        """The encoder's config; None: the decoder encodes chunks, or it is no `ModelConfig`."""
        return None

    @abc.abstractmethod
    def encoder(self, config: "ModelConfig", mesh: jax.sharding.Mesh | None) -> nn.Module:
        """Returns a module that maps chunks to an `EncodedContext`.

        Its arguments are chunks int32 [B, C, P], mask bool [B, C, P], and the keyword arguments
        `encoder_inputs`.
        """

    @property
    def encoder_inputs(self) -> tuple[str, ...]:
        """The names of the encoder's keyword arguments, a selection of these:

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
        """Returns the `inputs` that the encoder takes.

        An input may be a function without arguments, which is called only if its value is needed.
        """
        selected = {name: x for name, x in inputs.items() if name in self.encoder_inputs}
        return {name: x() if callable(x) else x for name, x in selected.items()}

    def project_states(
        self, params: dict, config: "ModelConfig", encoded: EncodedContext
    ) -> EncodedContext:
        """Returns `encoded` with its states projected to the keys and values of reader layers.

        By default returns it unchanged.
        """
        return encoded

    # Reading

    @property
    def is_prefix(self) -> bool:
        """Whether the filled slots precede the text in one sequence of positions."""
        return False

    def reader_layers(self, num_layers: int) -> tuple[bool, ...]:
        """Returns whether each layer reads the context."""
        return (True,) * num_layers

    def uniform_layers(self, num_layers: int) -> bool:
        """Returns whether all layers read the context in the same way and so can be scanned."""
        return all(self.reader_layers(num_layers))

    def reader(
        self, config: "ModelConfig", mesh: jax.sharding.Mesh | None, **options: Any
    ) -> nn.Module | None:
        """Returns the cross-attention module of a reader layer, between self-attention and MLP.

        The module maps x [B, T, D] and `LayerInputs` to the update of x [B, T, D]. None: no module.
        `config` is the decoder's, without LoRA: adapters are for self-attention and MLP.
        """
        return None

    @property
    def attention_module(self) -> type[nn.Module] | None:
        """The class of the layers' self-attention module; None: `lcjax.models.layers.Attention`."""
        return None

    def prefix_partials(
        self, q: Float[Array, "B T N H"], context: "LayerInputs", mesh: jax.sharding.Mesh | None
    ) -> list[tuple[jax.Array, jax.Array]]:
        """Returns partial attentions (out, lse) to merge with the self-attention of queries `q`."""
        return []

    # Cost

    def with_num_readers(self, count: int) -> "Memory":
        """Returns a copy of the memory with `count` reader layers."""
        return self

    @abc.abstractmethod
    def weight_uses(self, path: str, length: int, context: tuple[int, int] | None) -> float:
        """Returns how many tokens a weight is multiplied with per token of the text.

        Args:
          path: path of a parameter of the decoder, such as "layers/memory/key/kernel".
          length: tokens of the text.
          context: (chunks, tokens per chunk); None: no context.
        """

    @abc.abstractmethod
    def attention_flops(
        self,
        config: "ModelConfig",
        length: int,
        context: tuple[int, int],
        visible_keys: VisibleKeys,
    ) -> tuple[float, float]:
        """Returns forward attention FLOPs per token of the text: inside chunks, and all others.

        Args:
          config: config of the decoder.
          length: tokens of the text.
          context: (chunks, tokens per chunk).
          visible_keys: (model, length) -> mean number of keys that a token sees.
        """

    # Hugging Face folders

    @classmethod
    def from_hf(
        cls, hf: dict[str, Any], where: str, read_config: ReadConfig
    ) -> "ModelConfig | None":
        """Returns the config of a decoder with this memory; None: `hf` describes another model.

        By default the settings are read from the field that `to_hf` writes by default.

        Args:
          hf: the contents of a `config.json`.
          where: the name of this file, for messages.
          read_config: reads the config of a model without a memory.
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

        By default the settings, which must be plain values, are in the separate field `HF_FIELD`.
        A program that reads the folder as a Llama ignores it.

        Args:
          config: config of the decoder.
          write_config: writes the config of a model without a memory.
        """
        fields = {"type": self.get_choice_name(type(self))} | dataclasses.asdict(self)
        fields = {key: list(x) if isinstance(x, tuple) else x for key, x in fields.items()}
        return write_config(config.replace(memory=None)) | {HF_FIELD: fields}

    def hf_rows(self, config: "ModelConfig", decoder_rows: list[TensorRow]) -> list[TensorRow]:
        """Returns the tensor names of the memory's parameters, without those of an encoder model.

        A row with `layers/` in its path describes a parameter of every reader layer.

        Args:
          config: config of the decoder.
          decoder_rows: the rows of the decoder.
        """
        return []

    def hf_axes(self, config: "ModelConfig") -> dict[str, int]:
        """Returns the sizes of the axis letters of `hf_rows` that the decoder's rows lack."""
        return {}

    def unsupported_by_released_code(self) -> str | None:
        """Returns a setting that the released code reads differently, and how, for a message.

        None: the released code reads all settings correctly.
        """
        return None


@dataclasses.dataclass(frozen=True)
class MemorySection(draccus.ChoiceRegistry, abc.ABC):
    """Options of a memory that is added to a decoder without one.

    A checkpoint with a memory contains its options (`Memory`) instead.
    """

    # Checkpoint or preset of the encoder; None: the encoder is made of the decoder's weights.
    encoder: ClassVar[str | None] = None

    def __post_init__(self):
        check_fields("model.memory", self)

    @abc.abstractmethod
    def memory(self, config: "ModelConfig", encoder: "ModelConfig | None" = None) -> Memory:
        """Returns the memory of a decoder.

        Args:
          config: config of the decoder.
          encoder: config of the encoder `self.encoder`, if it is not None.
        """

    @abc.abstractmethod
    def init_params(
        self,
        params: dict,
        config: "ModelConfig",
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
    config: "ModelConfig",
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


def check_memory(memory: Memory | None) -> None:
    """Raises an InputError if `memory` is None: the model cannot read a context."""
    if memory is None:
        raise InputError(
            "context: this model has no memory to read it with; put it in front of the text, or"
            f" load a model with one (model.memory.type={', '.join(Memory.get_known_choices())})"
        )


def check_chunks(chunks: jax.Array, mask: jax.Array, max_size: int) -> None:
    """Raises an InputError unless chunks and mask are [B, C, P] and P is at most `max_size`."""
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
