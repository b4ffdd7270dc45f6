"""RETRO: each chunk of the text reads neighbours that were retrieved for the previous chunk.

"Improving language models by retrieving from trillions of tokens" (Borgeaud et al. 2022, arXiv
2112.04426, sec. 2). A text is split into chunks C_0, C_1, ... of m tokens. For each complete chunk
C_u, k neighbours are retrieved from a datastore: passages of r tokens (a chunk similar to C_u, and
its continuation). A bidirectional encoder encodes every neighbour independently. Some layers, P =
6, 9, 12, ... counted from 1, read the states E_u of the neighbours of C_u by chunked
cross-attention, between self-attention and MLP:

    h_i <- h_i + Wo softmax(Wq norm(h_i) (Wk E_u)^T / sqrt(H)) Wv E_u,  u = floor((i + 1) / m) - 1

for token i of a document: the last token of C_u and the first m - 1 tokens of C_{u+1} read the
neighbours of C_u, and the first m - 1 tokens of a document read none. As a mask this is
block-diagonal, `chunks(m, shift=1)`, where all slots of E_u have the order index of the last token
of C_u.

This is the form that the paper calls RETRO-fitting: a trained decoder is frozen, and the encoder
and the cross-attention are learned (`train.trainable: [memory]`). It differs from the paper:

- The encoder is not conditioned on the decoder's states of C_u; it reads the neighbours alone. So
  neighbours are encoded once, before the decoder reads the text, and may be stored.
- The encoder starts as a copy of the decoder's embedding and first layers, which attend in both
  directions, with the decoder's width and rotary positions. The paper trains a narrower encoder
  from random weights.
- Cross-attention starts as a copy of self-attention with an output projection of 0. Its logits have
  no relative positions: the order of neighbours has no effect, and that of their tokens only
  through the encoder's states.
- A chunk may have any number of neighbours, also none, of up to r tokens each.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from lcjax.attention import Bidirectional, Causal, order_indices
from lcjax.errors import InputError, PositiveInt, check_fields
from lcjax.memory.cepe import ChunkEncoder
from lcjax.memory.cross_attention import (
    CrossAttention,
    CrossAttentionMemory,
    OutputShare,
    init_reader,
)
from lcjax.memory.shared_llm import lower_config, lower_params
from lcjax.models.layers import LayerInputs
from lcjax.models.memory import (
    EncodedContext,
    Memory,
    MemorySection,
    ReadConfig,
    TrainingRows,
    VisibleKeys,
    WriteConfig,
    add_to_readers,
)
from lcjax.models.model_config import ModelConfig
from pallas_kernels import chunks

_HF_FIELD = "lcjax_retro"


@Memory.register_subclass("retro")
@dataclasses.dataclass(frozen=True)
class Retro(CrossAttentionMemory):
    """Options of RETRO: the encoder, the sizes of chunks and neighbours, and the reader layers."""

    states: ModelConfig  # config of the encoder
    chunk: PositiveInt  # m, tokens of a chunk of the text
    neighbours: PositiveInt  # k, neighbours of a chunk
    neighbour_tokens: PositiveInt  # r, tokens of a neighbour with its continuation
    layers: tuple[int, ...]  # P, reader layers, counted from 1

    by_chunk: ClassVar[bool] = True

    def check(self, config: ModelConfig) -> None:
        check_fields("model.memory", self)
        if not self.layers or not set(self.layers) <= {*range(1, config.num_layers + 1)}:
            raise InputError(
                f"model.memory.layers={list(self.layers)} must be layers of the decoder, some of"
                f" 1 ... {config.num_layers}; null takes {list(default_layers(config.num_layers))}"
            )
        if config.block != "sequential" or config.position != "rope" or config.rope.learned:
            raise InputError(
                "model.memory.type=retro needs a decoder like Llama, with block=sequential,"
                " position=rope and a rotation that is not learned; this model has"
                f" block={config.block}, position={config.position}, rope {config.rope.type}"
            )

    @property
    def max_chunk_size(self) -> int:
        return self.neighbour_tokens

    def check_training(self, rows: TrainingRows) -> None:
        super().check_training(rows._replace(retrieved=None))
        if rows.num_chunks % self.neighbours:
            raise InputError(
                f"data.chunks.count={rows.num_chunks} must be a multiple of"
                f" model.memory.neighbours={self.neighbours}, the number of passages for each chunk"
                " of the text"
            )
        if rows.retrieved not in (None, (self.chunk, self.neighbours)):
            stride, count = rows.retrieved
            raise InputError(
                f"the stored rows have {count} passages for each"
                f" {f'{stride} tokens' if stride else 'row'}, and model.memory reads neighbours="
                f"{self.neighbours} for each chunk={self.chunk} tokens; store rows with"
                f" data.chunks.stride={self.chunk} and count={self.neighbours} x (data.length //"
                f" {self.chunk}), or set model.memory to the numbers of the rows"
            )

    def encoder(self, config: ModelConfig, mesh: jax.sharding.Mesh | None) -> nn.Module:
        return NeighbourEncoder(self.encoder_config_for(config), mesh, self)

    @property
    def encoder_inputs(self) -> tuple[str, ...]:
        return ("numbers", "segments")

    def reader_layers(self, num_layers: int) -> tuple[bool, ...]:
        return tuple(layer in self.layers for layer in range(1, num_layers + 1))

    def uniform_layers(self, num_layers: int) -> bool:
        """Returns False: only some layers read, and the encoder copies the first layers."""
        return False

    def reader(self, config: ModelConfig, mesh: jax.sharding.Mesh | None, **options) -> nn.Module:
        return ChunkedCrossAttention(config, mesh, **options)

    def group_by_chunk(self, chunks: Sequence[Any]) -> list[Sequence[Any]]:
        """Groups the passages of a row: passage i belongs to chunk i // k of the text."""
        return [chunks[i : i + self.neighbours] for i in range(0, len(chunks), self.neighbours)]

    def with_num_readers(self, count: int) -> "Retro":
        return dataclasses.replace(self, layers=tuple(range(1, count + 1)))

    def attention_flops(
        self, config: ModelConfig, length: int, context: tuple[int, int], visible_keys: VisibleKeys
    ) -> tuple[float, float]:
        inside, _ = super().attention_flops(config, length, context, visible_keys)
        visible = min(self.neighbours, context[0]), context[1]
        return inside, super().attention_flops(config, length, visible, visible_keys)[1]

    @classmethod
    def from_hf(cls, hf: dict[str, Any], where: str, read_config: ReadConfig) -> ModelConfig | None:
        if (fields := hf.get(_HF_FIELD)) is None:
            return None
        try:
            fields = fields | {"layers": tuple(fields["layers"])}
            encoder = read_config(fields.pop("encoder"), f"{where}: {_HF_FIELD}.encoder")
            memory = cls(_bidirectional(encoder), **fields)
        except (AttributeError, KeyError, TypeError):
            raise InputError(
                f"{where}: {_HF_FIELD}={fields!r:.200} is not as this version writes it; copy"
                " config.json again from where the model was saved"
            ) from None
        return read_config(hf, where).replace(memory=memory)

    def to_hf(self, config: ModelConfig, write_config: WriteConfig) -> dict[str, Any]:
        fields = {
            "encoder": write_config(self.states.replace(pattern=Causal())),
            "chunk": self.chunk,
            "neighbours": self.neighbours,
            "neighbour_tokens": self.neighbour_tokens,
            "layers": list(self.layers),
        }
        return write_config(config.replace(memory=None)) | {_HF_FIELD: fields}


def default_layers(num_layers: int) -> tuple[int, ...]:
    """Returns P = 6, 9, 12, ... up to `num_layers`; the last layer if there are fewer than 6."""
    return tuple(range(min(6, num_layers), num_layers + 1, 3))


class NeighbourEncoder(ChunkEncoder):
    """A bidirectional transformer that encodes every neighbour independently."""

    memory: Retro | None = None

    def __call__(
        self,
        chunks: Int[Array, "B C r"],
        mask: Bool[Array, "B C r"],
        *,
        numbers: Int[Array, "B C"] | None = None,
        segments: Int[Array, "B T"] | None = None,
    ) -> EncodedContext:
        """Returns the states of neighbours, with the first token of the text that reads each one.

        Args:
          chunks: token ids of the neighbours.
          mask: true where there is text.
          numbers: the number of the text chunk that each neighbour belongs to; None: 0, 0, .., 1,
            1, .. with `Retro.neighbours` for each chunk. Only whole chunks count; in a packed row,
            those of the second document follow those of the first.
          segments: documents of the text from 1, 0 is padding; None: one document.
        """
        encoded = super().__call__(chunks, mask)
        rows, count, length = chunks.shape
        if numbers is None:
            numbers = jnp.broadcast_to(jnp.arange(count) // self.memory.neighbours, (rows, count))
        ends = last_tokens(numbers, self.memory.chunk, segments)
        index, documents = (jnp.repeat(x, length, axis=1) for x in ends)
        return dataclasses.replace(encoded, index=index, segments=documents)


def last_tokens(
    numbers: Int[Array, "B C"], size: int, segments: Int[Array, "B T"] | None
) -> tuple[Int[Array, "B C"], Int[Array, "B C"]]:
    """Returns the order index and the document of the last token of some chunks of the text.

    The document is 0 for a chunk that the row does not have.

    Args:
      numbers: numbers of the chunks; only whole chunks of a row are counted.
      size: tokens of a chunk.
      segments: documents of the text; None: one document.
    """
    if segments is None:
        return (numbers + 1) * size - 1, jnp.ones_like(numbers)
    order = order_indices(segments)
    is_last = (segments > 0) & ((order + 1) % size == 0)
    tokens = jnp.argsort(~is_last, axis=1, stable=True)  # last tokens of chunks come first
    tokens = jnp.take_along_axis(tokens, numbers, axis=1, mode="clip")
    index, documents = (jnp.take_along_axis(x, tokens, axis=1) for x in (order, segments))
    return index, jnp.where(numbers < is_last.sum(1, keepdims=True), documents, 0)


class ChunkedCrossAttention(CrossAttention):
    """Cross-attention of every token to the neighbours of the last complete chunk."""

    def visible_slots(self, context: LayerInputs) -> dict[str, Any]:
        metadata, encoded = context.attention_metadata(), context.memory
        slots = super().visible_slots(context) | {
            "mask": chunks(self.config.memory.chunk, shift=1),
            "q_index": metadata.q_order,
            "k_index": encoded.index,
            "k_segments": jnp.where(encoded.mask, encoded.segments, 0),
        }
        if metadata.q_segments is not None:
            slots["q_segments"] = metadata.q_segments
        return slots


@MemorySection.register_subclass("retro")
@dataclasses.dataclass(frozen=True)
class RetroSection(MemorySection):
    """RETRO-fitting (arXiv 2112.04426): chunks of the text read neighbours of the chunk before.

    The encoder starts as a copy of the first layers of the same checkpoint.
    """

    encoder_layers: PositiveInt = 2
    chunk: PositiveInt = 64  # tokens of a chunk of the text
    neighbours: PositiveInt = 2  # neighbours of a chunk
    neighbour_tokens: PositiveInt = 128  # tokens of a neighbour, with its continuation
    # Reader layers, counted from 1; null: 6, 9, 12, ..., or the last layer of fewer than 6
    layers: tuple[int, ...] | None = None
    # Initial output projection as a share of self-attention's; 0 leaves the decoder as it was.
    output_share: OutputShare = 0.0

    def memory(self, config: ModelConfig, encoder: ModelConfig | None = None) -> Retro:
        if self.encoder_layers > config.num_layers:
            raise InputError(
                f"model.memory.encoder_layers={self.encoder_layers} must lie in 1 ..."
                f" {config.num_layers}: the encoder begins as the first layers of the decoder"
            )
        return Retro(
            states=_bidirectional(lower_config(config, self.encoder_layers)),
            chunk=self.chunk,
            neighbours=self.neighbours,
            neighbour_tokens=self.neighbour_tokens,
            layers=tuple(self.layers or default_layers(config.num_layers)),
        )

    def init_params(
        self,
        params: dict,
        config: ModelConfig,
        encoder: dict | None,
        mesh: jax.sharding.Mesh | None,
    ) -> dict:
        """Adds the encoder, and cross-attention copied from self-attention (`init_reader`)."""

        def init_layer(layer: dict) -> dict:
            return {"memory": init_reader(layer, self.output_share, config.width)}

        lower = lower_params(params, self.encoder_layers, mesh)
        return add_to_readers(params, config, init_layer, mesh) | lower


def _bidirectional(config: ModelConfig) -> ModelConfig:
    return config.replace(pattern=Bidirectional(), tie_embeddings=True)
