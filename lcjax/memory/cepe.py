"""CEPE: chunks of a context, encoded in parallel, read by cross-attention.

Yen, Gao and Chen 2024 (arXiv 2402.16617, sec. 2). A small bidirectional encoder reads every chunk
by itself, positions from 0. Its last hidden states Phi are what all reading layers attend to,
between their self-attention and their MLP:

    h <- h + Wo softmax(Wq norm(h) (Wk Phi)^T / sqrt(H)) Wv Phi

without gate, rotation or order: a permutation of the chunks changes nothing, and a row without any
context is the decoder as it was.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp

from lcjax.errors import InputError, whole_number
from lcjax.memory.cross_attention import CrossAttention
from lcjax.models.config import ModelConfig
from lcjax.models.decoder import Decoder
from lcjax.models.layers import Linear
from lcjax.models.memory import Encoded, Memory, check_chunks
from lcjax.parallel.sharding import keep_tokens


@Memory.register_subclass("cepe")
@dataclasses.dataclass(frozen=True)
class Cepe(Memory):
    """Which encoder, and how many layers, from the last one down, read what it says."""

    states: ModelConfig  # the encoder; its width is E
    layers: int
    # Contexts of more tokens than this are attended to more sharply: with m tokens, logits are
    # multiplied by (0.1 ln(m / trained_context) + 1)^2, as YaRN does for longer texts. The paper
    # says so of its needle test, without a formula; the released code has none. None: never.
    trained_context: int | None = None

    def reader_layers(self, num_layers: int) -> tuple[bool, ...]:
        return tuple(layer >= num_layers - self.layers for layer in range(num_layers))

    def encodes_as(self, other: Memory | None) -> "Cepe":
        trained = getattr(other, "trained_context", self.trained_context)
        return dataclasses.replace(self, trained_context=trained)

    def of_layers(self, count: int) -> "Cepe":
        return dataclasses.replace(self, layers=count)

    @property
    def max_chunk_size(self) -> int:
        return self.states.max_length

    @property
    def default_chunk_size(self) -> int:
        return min(256, self.max_chunk_size)  # what the paper trains with

    def projected(self, params: dict, config: ModelConfig, encoded: Encoded) -> Encoded:
        """`encoded` with the keys and values of every reading layer in place of the states.

        Costs 2 K H numbers for each token and layer instead of E for each token, and saves the
        projections of every later step. For parameters of layers kept apart.
        """
        dtype = config.compute_dtype()
        layers = []
        for number, reads in enumerate(self.reader_layers(config.num_layers)):
            if reads:
                branch = params[f"layers_{number}"]["memory"]
                pair = (branch[name]["kernel"].astype(dtype) for name in ("key", "value"))
                states = encoded.states.astype(dtype)
                layers.append(tuple(jnp.einsum("BME,EKH->BKMH", states, kernel) for kernel in pair))
        return Encoded(encoded.mask, layers=tuple(layers))

    def check(self, config: ModelConfig) -> None:
        if self.trained_context is not None:
            way_out = "null leaves attention to long contexts as it is"
            whole_number("model.memory.trained_context", self.trained_context, 1, way_out)
        if not 1 <= self.layers <= config.num_layers:
            raise InputError(
                f"model.memory.layers={self.layers} must lie in 1 ... {config.num_layers}, the"
                " layers of the decoder; null takes all of them"
            )
        if self.states.vocab_size < config.vocab_size:
            raise InputError(
                f"model.memory.encoder knows {self.states.vocab_size} tokens, fewer than the"
                f" decoder's {config.vocab_size}: contexts are read by the decoder's tokenizer;"
                " give an encoder that was trained with it"
            )
        if config.block != "sequential":
            raise InputError(
                f"model.memory.type=cepe stands between attention and MLP, and block="
                f"{config.block} computes both at once (Phi-2); choose a Llama-like decoder"
            )

    def encoder(self, config: ModelConfig, mesh: jax.sharding.Mesh | None) -> nn.Module:
        changes = {name: getattr(config, name) for name in ("dtype", "param_dtype", "remat")}
        return ChunkEncoder(self.states.replace(**changes), mesh)

    def reader(self, config: ModelConfig, mesh: jax.sharding.Mesh | None, **options) -> nn.Module:
        return StatesAttention(config.replace(lora=None), mesh, **options)


class ChunkEncoder(nn.Module):
    """A bidirectional transformer over every chunk by itself."""

    config: ModelConfig
    mesh: jax.sharding.Mesh | None = None

    def setup(self):
        self.model = Decoder(self.config.replace(mlm_head=False), self.mesh)
        nn.share_scope(self, self.model)  # `encoder/embed`, not `encoder/model/embed`

    def __call__(self, chunks: jax.Array, mask: jax.Array) -> Encoded:
        """Phi [B, C P, E] of chunks int32 [B, C, P]; `mask` is true where there is text."""
        check_chunks(chunks, mask, self.config.max_length)
        rows, count, length = chunks.shape
        tokens, seen = (x.reshape(rows * count, length) for x in (chunks, mask))
        # Padding has an id that the table may not hold, and a place like any other.
        positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
        states, _ = self.model(
            jnp.where(seen, tokens, 0), positions=positions, segments=seen.astype(jnp.int32)
        )
        states = states.reshape(rows, count * length, -1)
        return Encoded(mask.reshape(rows, -1), keep_tokens(states, self.mesh))


class StatesAttention(CrossAttention):
    """Cross-attention to the encoder's states, which every layer projects for itself."""

    def queries(self, q: jax.Array, encoded: Encoded) -> jax.Array:
        trained = self.config.memory.trained_context
        if trained is None:
            return q
        more = jnp.maximum(encoded.mask.astype(jnp.int32).sum(1) / trained, 1.0)
        sharper = jnp.square(0.1 * jnp.log(more) + 1)[:, None, None, None]
        return (q * sharper).astype(q.dtype)

    def keys(self, encoded: Encoded) -> tuple[jax.Array, jax.Array]:
        if encoded.layers is not None:
            return tuple(part.swapaxes(1, 2) for part in encoded.layers[0])
        c, states = self.config, encoded.states.astype(self.config.compute_dtype())
        inputs, sizes = (c.memory.states.width,), (c.num_kv_heads, c.head_dim)
        return tuple(
            Linear(inputs, sizes, c, mesh=self.mesh, name=name)(states) for name in ("key", "value")
        )
