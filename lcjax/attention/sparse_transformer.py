"""Sparse Transformer (Child et al. 2019, arXiv 1904.10509): two sparse steps reach every token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from lcjax.attention.base import AttentionMetadata, Pass, Pattern
from lcjax.errors import InputError, OneOf, PositiveInt
from pallas_kernels import Mask, by_heads, causal, chunks, per_head, stride, tail_of, window


@Pattern.register_subclass("sparse_transformer")
@dataclass(frozen=True)
class SparseTransformer(Pattern):
    """Near tokens, and a sparse set through which two layers reach all older tokens.

    With l = stride, a query of the kind `strided` sees the last l tokens and every l-th token
    before them. The kind `fixed` divides the text into segments of l tokens; a query sees its
    segment and the last `summary` tokens of each older segment (sec. 4.3). The window holds l
    tokens, as in the released code; the formula of the paper has l + 1. `columns` gives heads
    different summaries, as in that code: head h sees group h mod columns of `summary` tokens,
    counted from the end of the segment.

    The paper also alternates the two sets between layers. `model.layers` alternates this pattern
    with others, such as full attention (GPT-3, Brown et al. 2020, sec. 2.1).
    """

    examples = (
        {"stride": 6, "heads": "split"},
        {"stride": 8, "kind": "fixed", "summary": 2},
    )

    kind: Annotated[str, OneOf(("strided", "fixed"))] = "strided"  # or fixed
    stride: PositiveInt = 128  # l; near the square root of the length, in the paper 128 or 256
    # C: tokens of a segment that later segments see; fixed only (8, 16 or 32)
    summary: PositiveInt = 8
    # Both sets in every head; split: near tokens in the first half of heads
    heads: Annotated[str, OneOf(("merged", "split"))] = "merged"
    columns: PositiveInt = 1  # number of summary groups that heads alternate between; fixed only

    def __post_init__(self):
        super().__post_init__()
        if self.kind == "fixed" and self.summary * self.columns > self.stride:
            raise InputError(
                f"pattern.summary={self.summary} times pattern.columns={self.columns} must not "
                f"exceed pattern.stride={self.stride}"
            )

    def passes(self, metadata: AttentionMetadata) -> list[Pass]:
        mask = causal() & self._mask(metadata.num_heads)
        return [Pass(metadata.q_positions, metadata.k_positions, mask)]

    def _mask(self, heads: int) -> Mask:
        near = window(self.stride) if self.kind == "strided" else chunks(self.stride)
        if self.heads == "merged":
            return near | self._far(0, heads)
        if heads < 2:
            raise InputError(
                f"pattern.heads='split' halves the heads and needs 2; there is {heads}"
            )
        half = heads // 2
        return per_head((near, half), *by_heads(self._far(half, heads), heads - half))

    def _far(self, first: int, last: int) -> Mask:
        """Returns the sparse set of heads `first` ... `last` - 1."""
        if self.kind == "strided":
            return stride(self.stride)
        groups = [self._summaries(head % self.columns) for head in range(first, last)]
        return groups[0] if self.columns == 1 else per_head(*((group, 1) for group in groups))

    def _summaries(self, group: int) -> Mask:
        """Returns the mask of one group of summary tokens in every segment."""
        tail = tail_of(self.stride, (group + 1) * self.summary)
        return tail & ~tail_of(self.stride, group * self.summary) if group else tail
