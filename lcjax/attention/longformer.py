"""Longformer's windows with dilation and global tokens (Beltagy et al. 2020, arXiv 2004.05150)."""

from __future__ import annotations

from dataclasses import dataclass

from lcjax.attention.base import AttentionMetadata, Pass, Pattern
from lcjax.attention.cache import LayerCache, RingCache
from lcjax.errors import InputError, NonNegativeInt, PositiveInt
from pallas_kernels import Mask, band, causal, keys_in, per_head, queries_in, stride


@Pattern.register_subclass("longformer")
@dataclass(frozen=True)
class Longformer(Pattern):
    """A window, dilated in some heads, and global tokens, which all tokens see.

    With r = dilation, a token sees itself and the `window - 1` tokens r, 2r, ... before it (fig. 2c
    of the paper), and the tokens at `global_tokens`, which see all tokens before them (fig. 2d).

    This is the causal form for language models. The encoder that the paper pretrains has a window
    to both sides, and separate query, key and value projections for global tokens, which no
    checkpoint of a decoder has.
    """

    examples = (
        {"window": 5, "global_tokens": (0, 9)},
        {"window": 4, "dilation": 2, "dilated_heads": 2, "global_tokens": (0,)},
    )

    window: PositiveInt = 512  # visible tokens of the window, the token itself included
    global_tokens: tuple[NonNegativeInt, ...] = ()  # order indices of the global tokens
    dilation: PositiveInt = 1  # distance between neighbouring tokens of a dilated window
    # How many of the last heads dilate (sec. 4.1: 2); null: all
    dilated_heads: PositiveInt | None = None

    def passes(self, metadata: AttentionMetadata) -> list[Pass]:
        mask = self._window_mask(metadata.num_heads)
        if self.global_tokens:
            is_global = keys_in(self.global_tokens) | queries_in(self.global_tokens)
            mask = mask | causal() & is_global
        return [Pass(metadata.q_positions, metadata.k_positions, mask)]

    def _window_mask(self, heads: int) -> Mask:
        dilated_heads = heads if self.dilated_heads is None else self.dilated_heads
        if dilated_heads > heads:
            raise InputError(
                f"pattern.dilated_heads={dilated_heads} must not exceed the {heads} heads"
            )
        plain = band(0, self.window - 1)
        if self.dilation == 1:
            return plain
        dilated = band(0, (self.window - 1) * self.dilation) & stride(self.dilation)
        if dilated_heads == heads:
            return dilated
        return per_head((plain, heads - dilated_heads), (dilated, dilated_heads))

    @property
    def layer_cache(self) -> LayerCache:
        sinks = max(self.global_tokens, default=-1) + 1
        return RingCache(sinks, (self.window - 1) * self.dilation + 1)
