"""AutoCompressor: summarises segments of a text in vectors that precede the next segments.

Chevalier, Wettig, Ajith and Chen 2023, "Adapting language models to compress contexts" (arXiv
2305.14788, sec. 3). kappa summary tokens with learned embeddings follow the tokens of segment i,
and the summaries of all earlier segments precede them:

    sigma_i = the last hidden states, after the final norm, of the summary tokens in
              [sigma_1 ... sigma_{i-1} | segment i | summary tokens]

with causal attention ("summary accumulation"). So a layer's keys and values of sigma_i depend only
on earlier summaries, and are computed once.

Published as princeton-nlp/AutoCompressor-Llama-2-7b-6k; the tensors and fields of config.json that
are read are those of its class, LlamaAutoCompressorModel (princeton-nlp/AutoCompressors at 80352a4,
auto_compressor.py and train.py).
"""

import dataclasses
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from lcjax.errors import InputError, Range, check_integer
from lcjax.memory.prefix import (
    PrefixMemory,
    WindowReader,
    WindowSize,
    check_released,
    check_token,
    collect_range,
    init_embeddings,
    is_released,
)
from lcjax.models.memory import EncodedContext, Memory, MemorySection, ReadConfig, TensorRow
from lcjax.models.model_config import ModelConfig

# Tokens of a segment in the released evaluation (run/eval_llama.sh). No field of config.json has
# them: the training drew the lengths of segments.
_RELEASED_CHUNK = 2048

SummarySize = Annotated[int, Range(1, hint="the paper takes 50")]
GradientSegments = Annotated[int, Range(2, hint="null trains through all")]


@Memory.register_subclass("auto_compressor")
@dataclasses.dataclass(frozen=True)
class AutoCompressor(PrefixMemory):
    """Options of AutoCompressor; segments have up to `chunk` tokens."""

    # kappa, summary vectors of a segment
    summary: SummarySize = 50
    # Number of successive segments that gradients flow through in training; the text is the last
    # segment. Slots of earlier segments are detached (the paper's sub-steps). None: all segments.
    gradient_segments: GradientSegments | None = None

    @property
    def gradient_windows(self) -> int | None:
        return self.gradient_segments

    @property
    def num_embeddings(self) -> int:
        return self.summary

    def num_slots(self, tokens: int) -> int:
        return self.summary

    def tokens_read(self, tokens: int) -> int:
        return tokens + 2 * self.summary  # summary tokens, then summary vectors

    def check(self, config: ModelConfig) -> None:
        super().check(config)
        if self.chunk + self.summary > config.max_length:
            raise InputError(
                f"model.memory.summary={self.summary} plus chunk={self.chunk} exceeds the trained"
                f" length {config.max_length}; use summary <= {config.max_length - self.chunk}"
            )

    def encode_window(
        self,
        reader: WindowReader,
        embedding: Float[Array, "n D"],
        tokens: Int[Array, "B P"],
        mask: Bool[Array, "B P"],
        key: jax.Array | None,
    ) -> EncodedContext:
        rows, count = len(tokens), self.summary
        positions, length = jnp.cumsum(mask, axis=1) - 1, mask.sum(1, keepdims=True)
        summary_mask = jnp.broadcast_to(length > 0, (rows, count))
        embeddings = jnp.broadcast_to(embedding, (rows, *embedding.shape))
        hidden = reader(
            jnp.concatenate([reader.embed(tokens), embeddings], 1),
            jnp.concatenate([positions, length + jnp.arange(count)], 1),
            jnp.concatenate([mask, summary_mask], 1),
        ).hidden
        summary, collect = hidden[:, -count:], collect_range(count, rows)
        output = reader(summary, collect.index, summary_mask, collect=collect)
        return reader.slots(summary_mask, output.key_values, hidden[:, :-count])

    @classmethod
    def from_hf(cls, hf: dict[str, Any], where: str, read_config: ReadConfig) -> ModelConfig | None:
        if not is_released(hf, "summary_length"):
            return super().from_hf(hf, where, read_config)
        config = read_config(hf, where)
        check_released(cls, hf, where, {"accumulate_summary": True})
        summary = hf["summary_length"]
        check_integer(f"{where}: summary_length", summary, 1, "the paper takes 50")
        memory = cls(min(_RELEASED_CHUNK, config.max_length // 2), summary)
        return config.replace(memory=memory)

    def hf_rows(self, config: ModelConfig, decoder_rows: list[TensorRow]) -> list[TensorRow]:
        return [("embed_summary.weight", "R,D", "encoder/embedding", "RD")]


@MemorySection.register_subclass("auto_compressor")
@dataclasses.dataclass(frozen=True)
class AutoCompressorSection(MemorySection):
    """AutoCompressor (arXiv 2305.14788): segments before the text are summarised in vectors."""

    chunk: WindowSize = 1536  # tokens of a segment
    summary: SummarySize = 50  # summary vectors of a segment
    # Successive segments of a text that gradients flow through in training, as 2 of 4 in the paper
    # (with data.chunks.learned); null: all.
    gradient_segments: GradientSegments | None = None
    init_token: int = 2  # token whose embedding initialises the summary tokens': EOS, for Llama

    def memory(self, config: ModelConfig, encoder: ModelConfig | None = None) -> AutoCompressor:
        check_token(self.init_token, config)
        return AutoCompressor(self.chunk, self.summary, self.gradient_segments)

    def init_params(
        self,
        params: dict,
        config: ModelConfig,
        encoder: dict | None,
        mesh: jax.sharding.Mesh | None,
    ) -> dict:
        """Adds the embeddings of the summary tokens."""
        return init_embeddings(params, config, self.init_token, mesh)
