"""Patterns with at most one option, a size: causal, bidirectional, sliding-window and chunked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lcjax.attention.base import AttentionMetadata, Pass, Pattern
from lcjax.attention.cache import LayerCache, RingCache
from lcjax.errors import PositiveInt
from pallas_kernels import causal, chunks, everything, window


@Pattern.register_subclass("causal")
@dataclass(frozen=True)
class Causal(Pattern):
    """Every token sees itself and all tokens before it."""

    allows_eviction: ClassVar[bool] = True

    def passes(self, metadata: AttentionMetadata) -> list[Pass]:
        return [Pass(metadata.q_positions, metadata.k_positions, causal())]


@Pattern.register_subclass("bidirectional")
@dataclass(frozen=True)
class Bidirectional(Pattern):
    """Every token sees the whole document, later tokens too (Devlin et al. 2019, BERT)."""

    needs_whole_prompt: ClassVar[bool] = True
    is_causal: ClassVar[bool] = False

    def passes(self, metadata: AttentionMetadata) -> list[Pass]:
        return [Pass(metadata.q_positions, metadata.k_positions, everything())]


@Pattern.register_subclass("sliding")
@dataclass(frozen=True)
class Sliding(Pattern):
    """Every token sees itself and the `window - 1` tokens before it.

    Longformer (Beltagy et al. 2020, sec. 3.1), Mistral 7B.
    """

    examples = ({"window": 7}, {"window": 1})

    # Visible tokens, the token itself included (Hugging Face's `sliding_window`)
    window: PositiveInt

    def passes(self, metadata: AttentionMetadata) -> list[Pass]:
        return [Pass(metadata.q_positions, metadata.k_positions, causal() & window(self.window))]

    @property
    def layer_cache(self) -> LayerCache:
        return RingCache(0, self.window)


@Pattern.register_subclass("chunked")
@dataclass(frozen=True)
class Chunked(Pattern):
    """Every token sees itself and the tokens before it in its chunk of `size` tokens.

    Chunks of a text are read independently, as in Llama 4's local layers. LCEG's figure 3 has a
    base model in chunks of its trained length as reference.
    """

    examples = ({"size": 6}, {"size": 1})

    size: PositiveInt  # tokens of a chunk; the first one begins at the first token

    def passes(self, metadata: AttentionMetadata) -> list[Pass]:
        return [Pass(metadata.q_positions, metadata.k_positions, causal() & chunks(self.size))]

    @property
    def layer_cache(self) -> LayerCache:
        return RingCache(0, self.size)
