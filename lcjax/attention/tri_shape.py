"""The tri-shape of MInference's code: sinks and a window, and last queries that see everything."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from lcjax.attention.base import AttentionMetadata, Pass, Pattern, partial_attention
from lcjax.errors import NonNegativeInt, PositiveInt
from pallas_kernels import causal, merge, prefix, window


@Pattern.register_subclass("tri_shape")
@dataclass(frozen=True)
class TriShape(Pattern):
    """Prompt tokens see the first and the near tokens; the last ones see all tokens before them.

    A query sees the first `sinks` tokens, and the keys at distances below `window` (the A-shape,
    which `longformer` with `global_tokens` 0 to sinks - 1 is for all queries). The last `last`
    queries of each document see all tokens before them, so the answer can attend to the whole
    prompt.

    The method needs no training and is for prompts only: what a token sees depends on how many
    follow it, so neither training nor perplexity is meaningful. The last queries are those of a
    call. A prompt is therefore read in one call, whatever `prefill_chunk` is; in each turn of a
    conversation the last new tokens see everything, and calls with at most `last` queries, such as
    decoding, see all keys.
    """

    examples = ({"sinks": 2, "window": 6, "last": 4},)
    needs_whole_prompt = True
    is_causal = False

    sinks: NonNegativeInt = 128  # first tokens that stay visible, as in the released code
    window: PositiveInt = 3968  # visible near tokens, the token itself included
    last: PositiveInt = 100  # queries that see all tokens before them

    @property
    def supports_soft_cap(self) -> bool:
        return True

    def passes(self, metadata: AttentionMetadata) -> list[Pass]:
        """Returns the A-shape, and the other tokens, which only the last queries see."""
        near = window(self.window) | prefix(self.sinks)
        return [
            Pass(metadata.q_positions, metadata.k_positions, causal() & near),
            Pass(metadata.q_positions, metadata.k_positions, causal() & ~near),
        ]

    def attend(self, q, k, v, metadata):
        self.check_metadata(metadata)
        metadata = metadata.replace(num_heads=q.shape[2])
        q_segments, k_segments = metadata.q_segments, metadata.k_segments
        if q_segments is None:
            q_segments, k_segments = (jnp.ones(x.shape[:2], jnp.int32) for x in (q, k))
        # Queries without a segment visit no blocks, so the second pass costs what the last need.
        last_segments = jnp.where(_is_last(q_segments, self.last), q_segments, 0)
        only_last = metadata.replace(q_segments=last_segments, k_segments=k_segments)
        shape, others = self.passes(metadata)
        out, _ = merge(
            [
                partial_attention(q, k, v, shape, metadata),
                partial_attention(q, k, v, others, only_last),
            ]
        )
        return out


def _is_last(segments: Int[Array, "B T"], count: int) -> Bool[Array, "B T"]:
    """Returns which queries are among the `count` last ones of their document in the row."""
    # A query is one of them if its document has ended `count` slots later.
    later = jnp.pad(segments[:, count:], [(0, 0), (0, min(count, segments.shape[1]))])
    return (segments != 0) & (later != segments)
