"""Shifted sparse attention (S2-Attn) of LongLoRA (Chen et al. 2023, arXiv 2309.12307)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import jax.numpy as jnp

from lcjax.attention.base import POSITIONS, AttentionMetadata, Pass, Pattern, partial_attention
from lcjax.attention.causal import Causal
from lcjax.errors import InputError, Interval, Range
from pallas_kernels import causal, chunks, per_head
from pallas_kernels.biases import of_heads

# Default group size as a share of the row; 1/2 is no better, 1/8 costs 0.1 perplexity (table 7)
_FRACTION = 0.25


@Pattern.register_subclass("s2")
@dataclass(frozen=True)
class ShiftedSparse(Pattern):
    """Causal attention inside groups, which are shifted by half a group in half of the heads.

    It is for training only (sec. 3.2); evaluation and generation use full causal attention. Groups
    do not wrap around: the first and the last group of the shifted heads are half as long, as in
    the released kernel path (the paper's "variant 2", B.3). Each document has its own groups.
    """

    examples = ({"group": 8}, {"group": 6})
    encodings = POSITIONS

    # Tokens in a group; must divide the length of a row
    group: Annotated[int, Range(2)] | None = None
    # Group size as a share of the row, if group is null; null: 1/4
    fraction: Annotated[float, Interval(above=0, most=1, hint="the paper has 0.25")] | None = None
    # Wraps groups around as in the paper's listing: the first half group sees future tokens
    wrap: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.group is not None:
            if self.fraction is not None:
                raise InputError(
                    f"pattern.group={self.group} and pattern.fraction={self.fraction}: set only one"
                )
            if self.wrap and self.group % 2:
                raise InputError(
                    f"pattern.group={self.group} must be even to wrap around; nearest: "
                    f"{self.group - 1}, {self.group + 1}"
                )

    def passes(self, metadata: AttentionMetadata) -> list[Pass]:
        if self.wrap:
            raise InputError("pattern.wrap=true moves keys and queries and has no passes")
        group, unshifted = self._group_size(metadata), _half(metadata.num_heads)
        shifted = metadata.num_heads - unshifted
        groups = per_head((chunks(group), unshifted), (chunks(group, group // 2), shifted))
        return [Pass(metadata.q_positions, metadata.k_positions, causal() & groups)]

    def for_inference(self) -> Causal:
        return Causal()

    def attend(self, q, k, v, metadata):
        if not self.wrap:
            return super().attend(q, k, v, metadata)
        self.check_metadata(metadata)
        metadata = metadata.replace(num_heads=q.shape[2])
        group, unshifted, length = self._group_size(metadata), _half(metadata.num_heads), q.shape[1]
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        attention_pass = Pass(metadata.q_positions, metadata.k_positions, causal() & chunks(group))
        index = (jnp.arange(length, dtype=jnp.int32) - group // 2) % length
        shifted = metadata.replace(q_index=index, k_index=index, row_indices=None)
        halves = ((metadata, 0, unshifted), (shifted, unshifted, q.shape[2] - unshifted))
        outs = []
        for half, first, count in halves:
            half = half.replace(bias=of_heads(metadata.bias, first, count))
            half_qkv = (x[:, :, first : first + count] for x in (q, k, v))
            out, _ = partial_attention(*half_qkv, attention_pass, half)
            outs.append(out)
        return jnp.concatenate(outs, axis=2)

    def _group_size(self, metadata: AttentionMetadata) -> int:
        """Returns the number of tokens of a group; raises an InputError if it does not fit."""
        length, multiple = metadata.k_positions.shape[1], 2 if self.wrap else 1
        fraction = _FRACTION if self.fraction is None else self.fraction
        size = length * fraction if self.group is None else self.group
        if size < 2 or length % size or size % multiple:
            setting = f"pattern.group={size:g}"
            if self.group is None:
                setting = f"pattern.fraction={fraction:g} of {length} tokens (a group of {size:g})"
            rule = f"divide the length {length}" + (" and be even" if self.wrap else "")
            nearest = _nearest_divisors(length, size, multiple)
            raise InputError(f"{setting} must {rule}; nearest groups: {nearest}")
        return int(size)


def _half(heads: int) -> int:
    if heads < 2:
        raise InputError(f"pattern.type=s2 shifts half of the heads and needs 2; there is {heads}")
    return heads // 2


def _nearest_divisors(length: int, size: float, multiple: int) -> str:
    """Returns the divisors of `length` next to `size` as text."""
    valid = [n for n in range(2, length + 1) if length % n == 0 and n % multiple == 0]
    below = [n for n in valid if n < size][-1:]
    above = [n for n in valid if n >= size][:1]
    return ", ".join(map(str, below + above)) or "none, change the length"
