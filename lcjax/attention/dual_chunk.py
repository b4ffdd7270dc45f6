"""Dual Chunk Attention, ChunkLlama (An et al. 2024, arXiv 2402.17463)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import jax.numpy as jnp
from jaxtyping import Array, Int, Num

from lcjax.attention.base import AttentionMetadata, Pass, Pattern
from lcjax.errors import InputError, OneOf, PositiveInt, Range
from lcjax.rope.rotation import Rotation
from pallas_kernels import causal, chunk_distance, chunks


@Pattern.register_subclass("dual_chunk")
@dataclass(frozen=True)
class DualChunk(Pattern):
    """Full attention in which no distance exceeds `chunk`; needs no training.

    The text is divided into pieces of c = chunk - local tokens, and key j has position j mod c.
    Query i has position i mod c for keys of its piece, min(i mod c + c, chunk) for keys of the
    previous piece, which keeps the distance of the `local` nearest keys exact, and
    min(2c - 1, chunk) for older keys (sec. 3). `chunk` and `local` are `chunk_size` and
    `local_window` of the released code; the paper has pieces of `chunk` tokens and clamps at the
    trained length - 1.

    With `train_length` C, the logits of a request of n > C tokens are multiplied by a factor.
    `growth="square"` is a later addition to the released code and not part of the paper's results:
    it multiplies cos and sin of queries and keys by 0.05 ln(n / C) + 1, and so the logits by its
    square. `growth="linear"` is that of Qwen2.5-1M (arXiv 2501.15383; vLLM's
    dual_chunk_flash_attn): it multiplies only keys, and so the logits, by 0.1 ln(n / C) + 1. In
    both codes the factor grows with the text, but older keys keep their factor. Here a request has
    one factor, for the length of its prompt and new tokens together.
    """

    examples = (
        {"chunk": 7, "local": 3},
        {"chunk": 8, "local": 6},
        {"chunk": 7, "local": 3, "train_length": 10},
        {"chunk": 7, "local": 3, "train_length": 10, "growth": "linear"},
    )
    encodings = ("rope",)

    # The largest distance: 3/4 of the trained length in the released code
    chunk: Annotated[int, Range(2)] = 3072
    # Nearest keys at exact distance: 1/8 of the trained length, 1/4 in the code's perplexity script
    local: PositiveInt = 512
    # Longer requests scale logits; null: never, as in the paper
    train_length: PositiveInt | None = None
    # square (ChunkLlama's code) or linear (Qwen2.5-1M)
    growth: Annotated[str, OneOf(("square", "linear"))] = "square"

    def __post_init__(self):
        super().__post_init__()
        if self.local >= self.chunk:
            raise InputError(
                f"pattern.local={self.local} must be below pattern.chunk={self.chunk}; the "
                f"released code has a sixth of it: {max(self.chunk // 6, 1)}"
            )

    @property
    def _piece(self) -> int:
        return self.chunk - self.local

    @property
    def depends_on_length(self) -> bool:
        return self.train_length is not None

    def at_length(self, rotation: Rotation, length: int) -> Rotation:
        if self.train_length is None or length <= self.train_length:
            return rotation
        log = math.log(length / self.train_length)
        if self.growth == "linear":  # a factor of queries has the same effect as one of keys
            return rotation._replace(query_scale=rotation.query_scale * (0.1 * log + 1))
        return rotation._replace(scale=rotation.scale * (0.05 * log + 1))

    def key_positions(
        self, positions: Num[Array, "B S"], order: Int[Array, "*B S"]
    ) -> Num[Array, "B S"]:
        return positions - order // self._piece * self._piece

    def passes(self, metadata: AttentionMetadata) -> list[Pass]:
        piece = self._piece
        same_piece = self.key_positions(metadata.q_positions, metadata.q_order)
        next_piece = jnp.minimum(same_piece + piece, self.chunk)
        later_piece = jnp.full_like(same_piece, min(2 * piece - 1, self.chunk))
        k_positions = metadata.k_positions
        return [
            Pass(same_piece, k_positions, causal() & chunks(piece)),
            Pass(next_piece, k_positions, chunk_distance(piece, 1, 1)),
            Pass(later_piece, k_positions, chunk_distance(piece, 2)),
        ]
