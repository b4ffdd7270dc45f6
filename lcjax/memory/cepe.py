"""CEPE: cross-attention to chunks of a context that are encoded in parallel.

Yen, Gao and Chen 2024 (arXiv 2402.16617, sec. 2.1). A small bidirectional encoder encodes every
chunk independently, with positions from 0. All reader layers attend to its last hidden states Phi,
between their self-attention and their MLP:

    h <- h + Wo softmax(Wq norm(h) (Wk Phi)^T / sqrt(H)) Wv Phi

without gate, rotation or order: a permutation of the chunks changes nothing, and rows without
context give the same result as the plain decoder.

Checkpoints are published as hyen/CEPE-LLaMA-2-7B, hyen/CEPED-LLaMA-2-Chat-7B (class
LlamaForCausalContextLM) and, for the encoder alone, hyen/LLaMA-MLM-Large (LlamaForMLM). Tensor
names and fields of config.json are those of the released code (princeton-nlp/CEPE).
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from lcjax.attention import Bidirectional, Causal
from lcjax.errors import InputError, PositiveInt, check_fields
from lcjax.memory.cross_attention import (
    RELEASED_CLASS,
    CrossAttention,
    CrossAttentionMemory,
    OutputShare,
    ReaderLayers,
    init_reader,
)
from lcjax.models.decoder import Decoder
from lcjax.models.memory import (
    EncodedContext,
    Memory,
    MemorySection,
    ReadConfig,
    WriteConfig,
    add_to_readers,
    check_chunks,
)
from lcjax.models.model_config import ModelConfig
from lcjax.parallel.sharding import keep_tokens

_ENCODER_CLASS = "LlamaForMLM"
_HF_FIELD = "lcjax_cepe"  # field of config.json for settings that the released code lacks


@Memory.register_subclass("cepe")
@dataclasses.dataclass(frozen=True)
class Cepe(CrossAttentionMemory):
    """Options of CEPE: the encoder, and the number of reader layers, which are the last ones."""

    states: ModelConfig  # config of the encoder; its width is E
    layers: int  # number of reader layers
    # Sharpens attention to longer contexts: with m > trained_context tokens, logits are multiplied
    # by (0.1 ln(m / trained_context) + 1)^2, as YaRN does for longer texts. The paper mentions this
    # for its needle test (app. D), without a formula; the released code does not have it. None:
    # never.
    trained_context: PositiveInt | None = None

    def check(self, config: ModelConfig) -> None:
        check_fields("model.memory", self)
        if not 1 <= self.layers <= config.num_layers:
            raise InputError(
                f"model.memory.layers={self.layers} must lie in 1 ... {config.num_layers}, the"
                " layers of the decoder; null takes all of them"
            )
        if self.states.vocab_size < config.vocab_size:
            raise InputError(
                f"model.memory.encoder has a vocabulary of {self.states.vocab_size} tokens, fewer"
                f" than the decoder's {config.vocab_size}; give an encoder that was trained with"
                " the decoder's tokenizer"
            )
        if config.block != "sequential":
            raise InputError(
                "model.memory.type=cepe needs a decoder like Llama, with block=sequential; this"
                f" model has block={config.block}, which computes attention and MLP at once"
            )

    @property
    def max_chunk_size(self) -> int:
        return self.states.max_length

    @property
    def default_chunk_size(self) -> int:
        return min(256, self.max_chunk_size)  # as in the paper's training

    def encodes_as(self, other: Memory | None) -> "Cepe":
        trained = getattr(other, "trained_context", self.trained_context)
        return dataclasses.replace(self, trained_context=trained)

    def encoder(self, config: ModelConfig, mesh: jax.sharding.Mesh | None) -> nn.Module:
        return ChunkEncoder(self.encoder_config_for(config), mesh)

    def reader_layers(self, num_layers: int) -> tuple[bool, ...]:
        return tuple(layer >= num_layers - self.layers for layer in range(num_layers))

    def reader(self, config: ModelConfig, mesh: jax.sharding.Mesh | None, **options) -> nn.Module:
        return StatesAttention(config, mesh, **options)

    def with_num_readers(self, count: int) -> "Cepe":
        return dataclasses.replace(self, layers=count)

    @classmethod
    def from_hf(cls, hf: dict[str, Any], where: str, read_config: ReadConfig) -> ModelConfig | None:
        """Reads a decoder with its encoder, or the config of an encoder alone."""
        if _ENCODER_CLASS in (hf.get("architectures") or ()):
            return _encoder_from_hf(hf, where, read_config)
        # SharedLLM's folders have CEPE's fields and a depth.
        if not hf.get("do_cross_attention") or "segment_tree_depth" in hf:
            return None
        config, inner = read_config(hf, where), hf.get("encoder_config")
        if not isinstance(inner, dict):
            raise InputError(f"{where}: encoder_config={inner!r} must be the config of the encoder")
        encoder = _encoder_from_hf(inner, f"{where}: encoder_config", read_config)
        supported = {"num_cross_attn_hidden_states": 1, "encode_mode": "context_only"}
        for key, value in supported.items():
            if hf.get(key, value) != value:
                raise InputError(f"{where}: {key}={hf[key]!r} is not supported; supported: {value}")
        width = hf.get("encoder_hidden_size", encoder.width)
        if width != encoder.width:
            raise InputError(
                f"{where}: encoder_hidden_size={width}, but the encoder's hidden_size is"
                f" {encoder.width}; correct one of them"
            )
        layers = hf.get("num_cross_attn_layers") or config.num_layers
        trained = (hf.get(_HF_FIELD) or {}).get("trained_context")
        memory = cls(states=encoder, layers=layers, trained_context=trained)
        return config.replace(memory=memory)

    def to_hf(self, config: ModelConfig, write_config: WriteConfig) -> dict[str, Any]:
        extra = {"trained_context": self.trained_context}
        return write_config(config.replace(memory=None)) | {
            "architectures": [RELEASED_CLASS],
            "is_decoder": True,
            "do_cross_attention": True,
            "num_cross_attn_layers": self.layers,
            "num_cross_attn_hidden_states": 1,
            "encoder_hidden_size": self.states.width,
            "encoder_config": _encoder_to_hf(self.states, write_config),
            "encoder_is_model": True,
            "train_encoder": True,
            "encode_mode": "context_only",
            "train_batch_mode": "none",
            "offload_hidden_states": False,
            "lm_loss_cof": 1.0,
            "kl_loss_cof": 1.0,
            "kl_loss_mode": "drop",  # the released default cannot be read by the released code
            **({} if self.trained_context is None else {_HF_FIELD: extra}),
        }

    def unsupported_by_released_code(self) -> str | None:
        trained = self.trained_context
        return None if trained is None else f"trained_context={trained} as null"


class ChunkEncoder(nn.Module):
    """A bidirectional transformer that encodes every chunk independently."""

    config: ModelConfig
    mesh: jax.sharding.Mesh | None = None

    def setup(self):
        self.model = Decoder(self.config.replace(mlm_head=False), self.mesh)
        nn.share_scope(self, self.model)  # `encoder/embed`, not `encoder/model/embed`

    def __call__(self, chunks: Int[Array, "B C P"], mask: Bool[Array, "B C P"]) -> EncodedContext:
        """Returns states Phi [B, C P, E] of chunks; `mask` is true where there is text."""
        check_chunks(chunks, mask, self.config.max_length)
        rows, count, length = chunks.shape
        tokens, mask = (x.reshape(rows * count, length) for x in (chunks, mask))
        # Padding has positions like other tokens; its ids may be outside the embedding table.
        positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
        output = self.model(
            jnp.where(mask, tokens, 0), positions=positions, segments=mask.astype(jnp.int32)
        )
        states = output.hidden.reshape(rows, count * length, -1)
        return EncodedContext(mask.reshape(rows, -1), keep_tokens(states, self.mesh))


class StatesAttention(CrossAttention):
    """Cross-attention to the encoder's states, sharper for contexts beyond the trained length."""

    def queries(self, q: jax.Array, encoded: EncodedContext) -> jax.Array:
        trained = self.config.memory.trained_context
        if trained is None:
            return q
        ratio = jnp.maximum(encoded.mask.astype(jnp.int32).sum(1) / trained, 1.0)
        scale = jnp.square(0.1 * jnp.log(ratio) + 1)[:, None, None, None]
        return (q * scale).astype(q.dtype)


@MemorySection.register_subclass("cepe")
@dataclasses.dataclass(frozen=True)
class CepeSection(MemorySection):
    """CEPE (arXiv 2402.16617): an encoder of chunks, and cross-attention in the last layers."""

    # Checkpoint of the encoder (a run of masked language modelling, hyen/LLaMA-MLM-Large), or the
    # name of a preset, which gets random weights.
    encoder: str = "cepe-encoder"
    # Number of reader layers, which are the last ones; null: all
    layers: ReaderLayers | None = None
    # Initial output projection as a share of self-attention's; 0 leaves the decoder as it was (the
    # paper), 1 copies it (the released configs of the warm-up).
    output_share: OutputShare = 0.0

    def memory(self, config: ModelConfig, encoder: ModelConfig | None = None) -> Cepe:
        if not isinstance(encoder.pattern, Bidirectional):
            raise InputError(
                f"model.memory.encoder={self.encoder} has causal attention; give a masked language"
                " model, such as hyen/LLaMA-MLM-Large"
            )
        if encoder.width > config.width:
            raise InputError(
                f"model.memory.encoder has {encoder.width} channels, more than the decoder's"
                f" {config.width}, whose weights initialise cross-attention; give a narrower one"
            )
        return Cepe(states=encoder, layers=self.layers or config.num_layers)

    def init_params(
        self,
        params: dict,
        config: ModelConfig,
        encoder: dict | None,
        mesh: jax.sharding.Mesh | None,
    ) -> dict:
        """Adds the encoder, and cross-attention copied from self-attention (`init_reader`)."""
        width = config.memory.states.width

        def init_layer(layer):
            return {"memory": init_reader(layer, self.output_share, width)}

        weights = {name: branch for name, branch in encoder.items() if name != "mlm"}
        return add_to_readers(params, config, init_layer, mesh) | {"encoder": weights}


def _encoder_from_hf(hf: dict[str, Any], where: str, read_config: ReadConfig) -> ModelConfig:
    plain = hf | {"model_type": hf.get("model_type") or "llama", "tie_word_embeddings": True}
    return read_config(plain, where).replace(pattern=Bidirectional(), mlm_head=True)


def _encoder_to_hf(config: ModelConfig, write_config: WriteConfig) -> dict[str, Any]:
    plain = config.replace(pattern=Causal(), mlm_head=False)
    return write_config(plain) | {"is_decoder": False, "pad_token_id": 0}


def encoder_to_hf(config: ModelConfig, write_config: WriteConfig) -> dict[str, Any]:
    """Returns the `config.json` of an encoder alone, a masked language model."""
    if not isinstance(config.pattern, Bidirectional):  # readers of the class assume it
        raise InputError(
            f"{_ENCODER_CLASS} has attention in both directions only, and this encoder has"
            f" model.pattern={config.pattern}; keep the run folder instead"
        )
    return _encoder_to_hf(config, write_config) | {"architectures": [_ENCODER_CLASS]}
