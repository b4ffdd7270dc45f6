"""InfLLM-V2, attention that is dense in short texts and sparse in long ones (arXiv 2509.24663)."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp

from lcjax.attention.base import Pattern
from lcjax.attention.windows import ChosenByWindows
from lcjax.errors import InputError, NonNegativeInt, PositiveInt


@Pattern.register_subclass("inf_llm_v2")
@dataclass(frozen=True)
class InfLLMV2(ChosenByWindows):
    """A token sees the first and the nearest blocks, and past blocks with the most attention.

    Blocks of `block` tokens count from the first token of a document. A token reads `top_k` of
    them in one softmax: the first `first` ones, its own, the `local` ones before it, and those with
    the best scores. The query heads of a key head choose together. The scores come from compressed
    keys, the means of windows of `kernel` rotated keys that begin every `stride` tokens
    (arXiv 2509.24663, used in MiniCPM4 and MiniCPM4.1):

        p[c] = sum over the query heads of softmax over c (q . mean[c] / sqrt(H)),
        score[j] = max of p[c] over the windows c that overlap block j.

    A token compares only windows that are complete up to itself. Scores that differ by no more
    than their rounding error count as equal, and of equal blocks the later ones are read; that is
    common, since two neighbouring blocks may have their best score from the same window. In the
    released code the device's sort decides.

    The first `dense_len` tokens of a document read all tokens before them, so shorter texts have
    full attention. In the released code a prompt of more tokens chooses for its first ones, too;
    here tokens that are read one by one read what a prompt reads.

    There are no parameters: the authors continue the training of a model with full attention. The
    choice has no gradient. A layer holds at most 8 copies of its queries and outputs at a time.
    """

    examples = (
        {"block": 8, "top_k": 4, "kernel": 4, "stride": 2, "local": 1, "dense_len": 0},
        {"block": 6, "top_k": 3, "kernel": 6, "stride": 3, "first": 0, "local": 0, "dense_len": 22},
    )
    setting: ClassVar[str] = "model.pattern.type=inf_llm_v2"

    block: PositiveInt = 64  # tokens
    top_k: PositiveInt = 96  # blocks that a token reads, the first and the near ones included
    kernel: PositiveInt = 32  # tokens of a window, a multiple of `stride`
    stride: PositiveInt = 16  # tokens from the start of a window to that of the next; divides block
    first: NonNegativeInt = 1  # blocks at the start of a document that are always read
    local: NonNegativeInt = 32  # blocks before its own that a token always reads
    dense_len: NonNegativeInt = 8192  # first tokens that read all tokens before them

    def __post_init__(self):
        super().__post_init__()
        least = self.first + self.local + 1
        if self.top_k < least:
            raise InputError(
                f"pattern.top_k={self.top_k} must be at least {least}: pattern.first={self.first},"
                f" pattern.local={self.local} and the token's own block"
            )

    def pool(self, overlapping):
        return functools.reduce(jnp.maximum, (score for _, score in overlapping))
