"""AutoCompressor: segments of a text, summed up in vectors that stand before the next ones.

Chevalier, Wettig, Ajith and Chen 2023, "Adapting language models to compress contexts" (arXiv
2305.14788, sec. 3). Behind the tokens of segment i stand kappa summary tokens with embeddings of
their own, before them the summaries of all earlier segments:

    sigma_i = the last hidden states, after the final norm, of the summary tokens in
              [sigma_1 ... sigma_{i-1} | segment i | summary tokens]

all causal, one token after the other ("summary accumulation"). So what a layer makes of sigma_i
depends on earlier summaries alone: it is computed once, as keys and values, and kept.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from lcjax.errors import InputError, whole_number
from lcjax.memory.leading import Leading, Reader, all_of
from lcjax.models.config import ModelConfig
from lcjax.models.memory import Encoded, Memory


@Memory.register_subclass("auto_compressor")
@dataclasses.dataclass(frozen=True)
class AutoCompressor(Leading):
    """How many vectors sum up a segment of up to `chunk` tokens."""

    summary: int = 50  # kappa
    # In training gradients flow through so many segments, the text as the last of all: then what
    # was kept is read without (the paper's sub-steps). None: through all.
    gradient_segments: int | None = None

    @property
    def reach(self) -> int | None:
        return self.gradient_segments

    @property
    def tokens(self) -> int:
        return self.summary

    def num_slots(self, tokens: int) -> int:
        return self.summary

    def slots(self, tokens: int) -> int:
        return self.summary

    def tokens_read(self, tokens: int) -> int:
        return tokens + 2 * self.summary  # behind the segment, and as what is kept of it

    def check(self, config: ModelConfig) -> None:
        super().check(config)
        whole_number("model.memory.summary", self.summary, 1, "the paper takes 50")
        if self.gradient_segments is not None:
            name = "model.memory.gradient_segments"
            whole_number(name, self.gradient_segments, 2, "null trains through all")
        if self.chunk + self.summary > config.max_length:
            raise InputError(
                f"model.memory.summary={self.summary} finds no room behind chunk={self.chunk} in"
                f" the {config.max_length} tokens that the model was trained to read; at most"
                f" {config.max_length - self.chunk}"
            )

    def window(
        self, read: Reader, embedding: jax.Array, tokens: jax.Array, mask: jax.Array, key: Any
    ) -> Encoded:
        del key  # nothing is drawn
        rows, count = len(tokens), self.summary
        place, length = jnp.cumsum(mask, axis=1) - 1, mask.sum(1, keepdims=True)
        there = jnp.broadcast_to(length > 0, (rows, count))
        own = jnp.broadcast_to(embedding, (rows, *embedding.shape))
        hidden, _ = read(
            jnp.concatenate([read.embedded(tokens), own], 1),
            jnp.concatenate([place, length + jnp.arange(count)], 1),
            jnp.concatenate([mask, there], 1),
        )
        summary, keep = hidden[:, -count:], all_of(count, rows)
        _, layers = read(summary, keep.index, there, keep=keep)
        return read.kept(there, layers, hidden[:, :-count])
