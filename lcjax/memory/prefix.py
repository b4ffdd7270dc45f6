"""Prefix memories: the decoder encodes windows of the context one by one, before the text.

Each window attends to the slots of all windows before it, and its own slots, keys and values of
every layer, are appended to them. Keys are stored unrotated. For the next window, or for the text,
M filled slots have positions 0 ... M - 1, and the tokens begin at position M. Slots share one
softmax with the keys of the text. Rows without slots give the same result as the plain decoder.

Checkpoints are Llama folders. Tensors have the names of the released code (Activation Beacon's
`beacon_q_proj`, AutoCompressor's `embed_summary`). The settings are in the field `lcjax_memory` of
config.json, or in the fields of the released code, which are read and not written. A program that
reads the folder as a Llama ignores all of these.
"""

import abc
import dataclasses
from typing import Annotated, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from lcjax.attention import Causal
from lcjax.attention.base import rotate_queries
from lcjax.errors import InputError, Range, check_fields
from lcjax.memory.context_tree import without_padding
from lcjax.models import cache as cache_lib
from lcjax.models.decoder import Decoder, DecoderOutput
from lcjax.models.layer_groups import unstack
from lcjax.models.layers import CollectKeyValues, LayerInputs
from lcjax.models.memory import (
    HF_FIELD,
    EncodedContext,
    Memory,
    TrainingRows,
    VisibleKeys,
    check_chunks,
    token_axis,
)
from lcjax.models.model_config import ModelConfig
from lcjax.parallel.sharding import LENGTH, attention_layout, init_on_mesh
from lcjax.rope import Rotation
from pallas_kernels import flash

WindowSize = Annotated[int, Range(1, hint="the papers take 1024 or more")]


@dataclasses.dataclass(frozen=True)
class PrefixMemory(Memory):
    """A memory that encodes each window of up to `chunk` tokens as a few keys and values."""

    chunk: WindowSize

    @abc.abstractmethod
    def encode_window(
        self,
        reader: "WindowReader",
        embedding: Float[Array, "n D"],
        tokens: Int[Array, "B P"],
        mask: Bool[Array, "B P"],
        key: jax.Array | None,
    ) -> EncodedContext:
        """Encodes one window as `max_slots` slots.

        Args:
          reader: applies the decoder after the slots of earlier windows.
          embedding: embeddings of the memory's own tokens, n = `num_embeddings`.
          tokens: the window, with padding before the text.
          mask: true where there is text.
          key: a random key in training, else None.
        """

    @property
    @abc.abstractmethod
    def num_embeddings(self) -> int:
        """Number of embeddings of the memory's own tokens."""

    def max_slots(self, tokens: int) -> int:
        """Returns the number of slots that are computed for a window, at least `num_slots`."""
        return self.num_slots(tokens)

    @abc.abstractmethod
    def tokens_read(self, tokens: int) -> int:
        """Returns how many tokens the decoder processes for a window of `tokens` tokens.

        The memory's own tokens are included.
        """

    @property
    def gradient_windows(self) -> int | None:
        """Number of successive windows that gradients flow through; None: all.

        The text counts as the last window.
        """
        return None

    def check(self, config: ModelConfig) -> None:
        kind = self.get_choice_name(type(self))
        check_fields("model.memory", self)
        if self.chunk >= config.max_length:
            raise InputError(
                f"model.memory.chunk={self.chunk} leaves no room for the memory of earlier windows:"
                f" the model was trained on {config.max_length} tokens, for both; set it to"
                f" {config.max_length // 2} or less"
            )
        if config.block != "sequential" or config.position != "rope":
            raise InputError(
                f"model.memory.type={kind} needs a decoder like Llama, with block=sequential and"
                f" position=rope; this model has block={config.block}, position={config.position}"
            )
        if config.rope.depends_on_length or config.rope.learned:
            raise InputError(
                f"model.memory.type={kind} needs a rotation that is the same at every length, and"
                f" that of rope type {config.rope.type} is not; choose default, linear, ntk or yarn"
            )
        if config.layers:
            raise InputError(
                f"model.memory.type={kind} needs layers that are all alike; leave model.layers out"
            )
        if not isinstance(config.pattern, Causal):
            raise InputError(
                f"model.memory.type={kind} needs full causal attention, and model.pattern is"
                f" {config.pattern!r}; leave model.pattern out"
            )

    @property
    def max_chunk_size(self) -> int:
        return self.chunk

    def check_training(self, rows: TrainingRows) -> None:
        windows, count = self.gradient_windows, rows.num_chunks
        if windows and not rows.has_targets and count % windows == 0:
            raise InputError(
                f"model.memory.gradient_segments={windows} lets no gradient of the loss reach the"
                f" memory, because it divides data.chunks.count={count}; set"
                " data.chunks.learned=true, or leave gradient_segments out"
            )
        # Targets in chunks are what the decoder reads itself, unless a teacher gives them.
        super().check_training(rows._replace(has_targets=rows.has_targets and rows.has_teacher))

    def encoder(self, config: ModelConfig, mesh: jax.sharding.Mesh | None) -> nn.Module:
        return WindowEncoder(config, mesh)

    @property
    def encoder_inputs(self) -> tuple[str, ...]:
        return ("params", "rotation", "after", "key", "collect_hidden")

    @property
    def is_prefix(self) -> bool:
        return True

    def prefix_partials(
        self, q: Float[Array, "B T N H"], context: LayerInputs, mesh: jax.sharding.Mesh | None
    ) -> list[tuple[jax.Array, jax.Array]]:
        encoded = context.memory
        k, v = (part.swapaxes(1, 2) for part in encoded.layers[0])
        k_segments = encoded.mask.astype(jnp.int32)
        k = context.rotation.rotate(k, jnp.cumsum(k_segments, axis=1) - 1)
        q = rotate_queries(q, context.positions, context.rotation)
        return [
            flash(
                q,
                k,
                v,
                q_segments=jnp.ones(q.shape[:2], jnp.int32),
                k_segments=k_segments,
                layout=attention_layout(mesh),
            )
        ]

    def weight_uses(self, path: str, length: int, context: tuple[int, int] | None) -> float:
        if not path.startswith("layers"):
            return 1.0
        num_chunks, size = context or (0, 0)
        is_memory, tokens = "/memory/" in path, self.tokens_read(size) if context else 0
        if self.attention_module is not None and "/attention/" in path:
            # The memory's tokens have separate projections.
            tokens = tokens - size if is_memory else size
        return float(not is_memory) + num_chunks * tokens / length

    def attention_flops(
        self, config: ModelConfig, length: int, context: tuple[int, int], visible_keys: VisibleKeys
    ) -> tuple[float, float]:
        (num_chunks, size), slots = context, self.num_slots(context[1])
        keys = visible_keys(config, size) + (num_chunks - 1) / 2 * slots
        pairs = num_chunks * self.tokens_read(size) * keys / length + num_chunks * slots
        return 0.0, 4 * config.num_heads * config.head_dim * config.num_layers * pairs

    def hf_axes(self, config: ModelConfig) -> dict[str, int]:
        return {"R": self.num_embeddings}


def is_released(hf: dict[str, Any], field: str) -> bool:
    """Whether a `config.json` is of an author's code with this field, and not of lcjax.

    The field is null or 0 in models without the memory.
    """
    return HF_FIELD not in hf and bool(hf.get(field))


@dataclasses.dataclass(frozen=True)
class WindowReader:
    """Applies the decoder to a window after the slots of earlier windows."""

    model: Decoder
    params: dict
    rotation: Rotation
    before: EncodedContext | None  # slots of earlier windows; None: there are none
    # int32 [B, P], the tokens of the window whose hidden states are collected; None: none
    hidden_index: jax.Array | None = None

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        return self.model.apply({"params": self.params}, tokens, method="embedded")

    def __call__(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        mask: Bool[Array, "B T"],
        **options: Any,
    ) -> DecoderOutput:
        """Calls `Decoder.__call__` with input embeddings x after the slots of earlier windows.

        Positions count the window's tokens from 0, without padding.
        """
        return self.model.apply(
            {"params": self.params},
            x,
            positions=positions,
            segments=mask.astype(jnp.int32),
            rotation=self.rotation,
            memory=self.before,
            **options,
        )

    def slots(
        self, mask: Bool[Array, "B R"], layers: Any, hidden: Float[Array, "B P D"]
    ) -> EncodedContext:
        """Converts collected keys and values [B, R, K, H] of the layers to slots.

        Args:
          mask: true where a slot is filled.
          layers: (keys, values) of each layer, or one such pair stacked over layers.
          hidden: hidden states of the window's tokens.
        """
        config, mesh = self.model.config, self.model.mesh
        pairs = unstack(layers, config.num_layers) if config.stacked else layers
        layers = tuple(
            tuple(cache_lib.keep_heads(part.swapaxes(1, 2), mesh) for part in pair)
            for pair in pairs
        )
        if self.hidden_index is None:
            return EncodedContext(mask, layers=layers)
        hidden = jnp.take_along_axis(hidden, self.hidden_index[..., None], axis=1)
        return EncodedContext(mask, layers=layers, hidden=hidden[:, None])


def collect_range(count: int, rows: int, start: int = 0) -> CollectKeyValues:
    """Selects unrotated keys and values of `count` tokens of each row, from `start` on."""
    index = jnp.broadcast_to(start + jnp.arange(count, dtype=jnp.int32), (rows, count))
    return CollectKeyValues(index, None)


class WindowEncoder(nn.Module):
    """Encodes windows one by one with the decoder."""

    config: ModelConfig  # config of the decoder, its memory included
    mesh: jax.sharding.Mesh | None = None

    @nn.compact
    def __call__(
        self,
        chunks: Int[Array, "B C P"],
        mask: Bool[Array, "B C P"],
        *,
        params: dict | None,
        rotation: Rotation | None = None,
        after: EncodedContext | None = None,
        key: jax.Array | None = None,
        collect_hidden: bool = False,
    ) -> EncodedContext | None:
        """Encodes windows and returns their slots; None in `init`.

        Args:
          chunks: token ids of the windows.
          mask: true where there is text.
          params: parameters of the decoder; None in `init`.
          rotation: rotation of the text; None: that of `config.rope`, which depends on no length.
          after: slots of earlier windows, which are not returned.
          key: a random key in training, else None.
          collect_hidden: whether to return `EncodedContext.hidden`, for the loss of the windows.
        """
        c, memory = self.config, self.config.memory
        dtype, shape = jnp.dtype(c.param_dtype), (memory.num_embeddings, c.width)
        embedding = self.param("embedding", nn.initializers.normal(0.02), shape, dtype)
        if self.is_initializing():
            return None
        check_chunks(chunks, mask, memory.max_chunk_size)
        if self.mesh is not None and self.mesh.shape[LENGTH] > 1:
            raise InputError(
                f"mesh.context={self.mesh.shape[LENGTH]}: this memory reads its windows one after"
                " the other and cannot divide them among devices; set mesh.context=1"
            )
        if rotation is None:
            rotation = c.rope.rotation(c.rotary_dim, chunks.shape[2])
        model = Decoder(c, self.mesh, parent=None)

        def encode_window(before, tokens, mask, key):
            tokens, length = without_padding(tokens, mask)
            # Padding precedes the text, so that the memory's own tokens follow it directly.
            padding = tokens.shape[1] - length[:, None]
            source = jnp.arange(tokens.shape[1]) - padding
            hidden_index = None
            if collect_hidden:  # the places to which the tokens of the chunk have moved
                hidden_index = jnp.maximum(padding + jnp.cumsum(mask, axis=1) - 1, 0)
            tokens = jnp.take_along_axis(tokens, jnp.maximum(source, 0), 1)
            reader = WindowReader(model, params, rotation, before, hidden_index)
            embeddings = embedding.astype(c.compute_dtype())
            return memory.encode_window(reader, embeddings, tokens, source >= 0, key)

        return _encode_windows(encode_window, c, chunks, mask, after, key)


def _encode_windows(encode_window, config, chunks, mask, after, key) -> EncodedContext:
    """Encodes chunks [B, C, P] one after the other, each after the slots of those before."""
    rows, count, size = chunks.shape
    keys = None if key is None else jax.random.split(key, count)
    if count == 1:
        return encode_window(after, chunks[:, 0], mask[:, 0], None if keys is None else keys[0])
    num_slots, period = config.memory.max_slots(size), config.memory.gradient_windows
    slots = _append_empty(after, config, rows, count * num_slots)
    start = slots.mask.shape[1] - count * num_slots

    def step(slots, inputs):
        number, tokens, window_mask, key = inputs
        slots = _stop_gradient(slots, number, period)
        new = encode_window(slots, tokens, window_mask, key)
        offset = start + number * num_slots

        def write(old, x):
            return jax.lax.dynamic_update_slice_in_dim(old, x, offset, token_axis(old))

        return jax.tree.map(write, slots, dataclasses.replace(new, hidden=None)), new.hidden

    inputs = jnp.arange(count), chunks.swapaxes(0, 1), mask.swapaxes(0, 1), keys
    slots, hidden = jax.lax.scan(step, slots, inputs)  # hidden [C, B, 1, P, D]
    if hidden is not None:
        hidden = hidden[:, :, 0].swapaxes(0, 1)
    slots = jax.tree.map(lambda x: jax.lax.slice_in_dim(x, start, None, axis=token_axis(x)), slots)
    return dataclasses.replace(_stop_gradient(slots, count, period), hidden=hidden)


def _stop_gradient(
    slots: EncodedContext, number: int | jax.Array, period: int | None
) -> EncodedContext:
    """Returns the slots that window `number` reads; without gradient if it begins a new period."""
    if period is None:
        return slots
    stop = number % period == 0
    return jax.tree.map(lambda x: jnp.where(stop, jax.lax.stop_gradient(x), x), slots)


def _append_empty(
    after: EncodedContext | None, config: ModelConfig, rows: int, count: int
) -> EncodedContext:
    """Returns the slots `after`, if not None, followed by `count` empty slots."""
    shape = (rows, config.num_kv_heads, count, config.head_dim)
    pair = (jnp.zeros(shape, config.compute_dtype()),) * 2
    empty = EncodedContext(jnp.zeros((rows, count), bool), layers=(pair,) * config.num_layers)
    if after is None:
        return empty
    return jax.tree.map(lambda old, x: jnp.concatenate([old, x], token_axis(x)), after, empty)


def check_released(
    memory: type[PrefixMemory], hf: dict[str, Any], where: str, computed: dict[str, Any]
) -> None:
    """Raises an InputError unless fields of a released `config.json` have the `computed` values."""
    kind = Memory.get_choice_name(memory)
    for key, value in computed.items():
        if hf.get(key) != value:
            raise InputError(
                f"{where}: {key}={hf.get(key)!r:.60} is not supported, only {value!r} is; train the"
                f" Llama that this model was trained from with model.memory.type={kind}"
            )


def check_token(token: int, config: ModelConfig) -> None:
    """Raises an InputError unless `token` is an id of the vocabulary."""
    if not 0 <= token < config.vocab_size:
        raise InputError(
            f"model.memory.init_token={token} must lie between 0 and {config.vocab_size - 1}: the"
            " token whose embedding initialises those of the memory (EOS in the papers)"
        )


def init_embeddings(
    params: dict, config: ModelConfig, token: int, mesh: jax.sharding.Mesh | None
) -> dict:
    """Adds the memory's embeddings to `params`, all initialised with the embedding of `token`."""

    def init(embed):
        embedding = jnp.tile(embed["embedding"][token], (config.memory.num_embeddings, 1))
        return {"encoder": {"embedding": embedding}}

    return params | init_on_mesh(init, params["embed"], mesh)
