"""Native sparse attention (Yuan et al. 2025, arXiv 2502.11089), as flash-linear-attention has it.

Letters: C complete blocks of keys, R = 3 branches, m chosen blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from lcjax.attention.base import (
    AttentionMetadata,
    Features,
    Parameter,
    Pass,
    Pattern,
    attend_by_head,
    partial_attention,
    rotate_qk,
)
from lcjax.attention.cache import LayerCache
from lcjax.attention.causal import Causal
from lcjax.attention.chosen_blocks import Blocks, ChosenBlocks, complete_blocks, group_scores
from lcjax.attention.on_devices import DocumentTokens, on_devices
from lcjax.attention.pages import PagedCache
from lcjax.errors import PositiveInt, Range
from lcjax.rope.rotation import no_rotation
from pallas_kernels import causal, gather, stride, window

_BRANCHES = ("compressed", "chosen", "window")  # the order of their gates


@Pattern.register_subclass("nsa")
@dataclass(frozen=True)
class NSA(ChosenBlocks):
    """A token sees means of past blocks, blocks that it chooses by them, and the nearest tokens.

    Each of the three is a branch with a softmax of its own, and a gate of each query head and token
    weights its output, in float32:

        out = sum over branches of scale sigmoid(W x) attention.

    Blocks of `block` tokens count from the first token of a document. The branch of compressed
    blocks reads the mean of the rotated keys and the mean of the values of every block that ends at
    the token or before it. The branch of chosen blocks reads `top_k` whole blocks: the first one,
    the token's own up to itself, the one before that, and those with the best scores, where the
    score is the sum over the query heads of a key head of their probabilities in the first branch.
    They choose together. Scores that differ by no more than their rounding error count as equal,
    and of equal blocks the later ones are read. The third branch reads the last `window` tokens,
    the token itself included. The choice has no gradient.

    At the start W is 0, and the scales of the branches are 0, 2 and 0. So the gates are 0, 1 and 0,
    and a dense model is unchanged in texts of up to `block` x `top_k` tokens. Model and gates learn
    from the loss of the model. The gates of the paper have no scales: set them to 1. Native means
    that models are trained with it from the start. The authors of InfLLM-V2 report that a converted
    model lost much (RULER 59.9 for 84.3 at 32K tokens); theirs has the paper's separate keys and
    values, and begins with other gates.

    Not here is what the paper has and flash-linear-attention has not: keys and values of their own
    for each branch, compression of overlapping windows by a trained network, and scores of blocks
    from those windows. Its models have not been published.
    """

    examples = (
        {"block": 8, "top_k": 4, "window": 12},
        {"block": 5, "top_k": 3, "window": 3},
    )
    setting: ClassVar[str] = "model.pattern.type=nsa"
    chooses_by_query_head: ClassVar[bool] = False
    local: ClassVar[int] = 1

    block: PositiveInt = 64  # tokens
    # Blocks that the second branch reads, with the first one, the own one and the one before it
    top_k: Annotated[int, Range(3)] = 16
    window: PositiveInt = 512  # tokens of the third branch, the token itself included

    @property
    def parameters(self):
        gate, scale = "self_attn.g_proj.weight", "self_attn.g_scale"
        return {
            "branch_gate": Parameter("DNR", gate, "NR,D", "zeros"),
            "branch_scale": Parameter("NR", scale, "N,R", (0.0, 2.0, 0.0)),
        }

    @property
    def sizes(self):
        return {"R": len(_BRANCHES)}

    @property
    def query_copies(self) -> int:
        return super().query_copies + 1  # outputs of the two other branches

    @property
    def layer_cache(self) -> LayerCache:
        return BranchCache(self)

    def passes(self, metadata: AttentionMetadata) -> list[Pass]:
        """Returns passes over as many keys as the branches read."""
        if self.reads_all(metadata.k_positions.shape[1]):
            return super().passes(metadata)
        near = self._near_mask(self.top_k - 1 + -(-self.window // self.block))
        masks = near, causal() & stride(self.block) & ~near
        return [Pass(metadata.q_positions, metadata.k_positions, mask) for mask in masks]

    def choice_flops(self, layer, length, keys):
        if self.reads_all(length):
            return 0.0
        return 2 * layer.num_heads * layer.head_dim * keys / self.block

    def features(self, parameters, x, q, k, metadata):
        logits = gather.einsum("BTD,DNR->BTNR", x, parameters["branch_gate"])
        scale = parameters["branch_scale"].astype(jnp.float32)
        return Features({"gates": scale * jax.nn.sigmoid(logits)}, {}, {})

    def attend(self, q, k, v, metadata):
        self.check_metadata(metadata)
        return on_devices(self._attend, q, k, v, metadata, by_head=True)

    def _attend(self, q, k, v, queries, keys, metadata, axis=None):
        """Computes all branches on one device."""
        q, k = rotate_qk(q, k, metadata)
        metadata = metadata.replace(rotation=no_rotation(), keys_rotated=True)

        def branch(mask):
            one = Pass(metadata.q_positions, metadata.k_positions, mask)
            return partial_attention(q, k, v, one, metadata)[0]

        if self.reads_all(k.shape[1]):
            chosen = branch(causal())
        else:
            chosen = super()._attend(q, k, v, queries, keys, metadata, axis)
        nearest = branch(causal() & window(self.window))
        compressed = jnp.zeros_like(chosen)
        if k.shape[1] >= self.block:
            compressed = self._attend_to_means(q, k, v, queries, keys, metadata)
        gates = metadata.features.queries["gates"]
        return gated_sum(gates, compressed, chosen, nearest).astype(q.dtype)

    def _attend_to_means(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B S K H"],
        v: Float[Array, "B S K Hv"],
        queries: DocumentTokens,
        keys: DocumentTokens,
        metadata: AttentionMetadata,
    ) -> Float[Array, "B T N Hv"]:
        """Computes the branch of compressed blocks; 0 for tokens before the end of the first."""
        blocks = complete_blocks(keys, self.block)
        ends = self._ends(blocks.numbers)
        metadata = metadata.replace(
            k_positions=ends,
            k_index=ends,
            q_segments=queries.with_segments().segments,
            k_segments=jnp.maximum(blocks.segments, 0),
        )
        with jax.named_scope("compress"):
            k, v = (_means(blocks, x) for x in (k, v))
        one = Pass(metadata.q_positions, ends, causal())
        return partial_attention(q, k, v, one, metadata)[0]

    def _ends(self, numbers: Int[Array, "B C"]) -> Int[Array, "B C"]:
        """Returns the order indices of the last tokens of blocks with these numbers."""
        return (numbers + 1) * self.block - 1

    def choose(self, q, k, queries, keys, blocks, metadata):
        means = blocks.means(k).astype(k.dtype)  # as a cache keeps them
        ends = self._ends(blocks.numbers)

        def best(q, query, is_candidate):
            visible = (blocks.segments == query.segments[:, None]) & (ends <= query.index[:, None])
            return self._best(q, means, blocks.numbers, visible, is_candidate)

        elements = q.shape[0] * q.shape[2] * means.shape[1]
        return self.choose_by_query(best, q, queries, blocks, elements)

    def _best(
        self,
        q: Float[Array, "B N H"],
        means: Float[Array, "B C K H"],
        numbers: Int[Array, "B C"],
        visible: Bool[Array, "B C"],
        is_candidate: Bool[Array, "B C"],
    ) -> tuple[Int[Array, "B K m"], Bool[Array, "B K m"]]:
        """Returns the best past blocks of a query in each row, and whether each is one.

        Args:
          q: rotated queries.
          means: mean keys of blocks.
          numbers: those of the blocks in their document.
          visible: blocks whose means the query compares.
          is_candidate: blocks that the query may choose.
        """
        lengths = gather.lengths(means)
        scores, margin = group_scores(q, means, lengths, visible)
        scores = jnp.where((numbers == 0)[:, None], jnp.inf, scores)
        return gather.best(scores, self.num_chosen, is_candidate[:, None], margin)

    # The choice of a generated token, for `PagedCache`

    def summary_dtypes(self, layer):
        return {"means": layer.dtype, "value_means": layer.dtype}

    def summarise(self, pages):
        return {
            "means": _mean_of_pages(pages.keys, pages.is_token),
            "value_means": _mean_of_pages(pages.values, pages.is_token),
        }

    def choose_past_pages(self, token, arrays, slots):
        means = arrays["means"].swapaxes(1, 2)
        numbers = jnp.arange(means.shape[1], dtype=jnp.int32)[None]
        visible = self._ends(numbers) <= token.index[:, None]
        is_candidate = numbers < (token.index // self.block - self.local)[:, None]
        return self._best(token.q, means, numbers, visible, is_candidate)


@dataclass(frozen=True)
class BranchCache(PagedCache):
    """The cache of NSA: pages with the mean of their keys and that of their values.

    A token that is alone in its call reads the pages that it chooses, the means of all pages that
    are complete up to it, and the nearest keys. Of `num_visible` keys, some may count twice.
    """

    reader: NSA

    def num_visible(self, length, tokens):
        visible = super().num_visible(length, tokens)
        return min(length, visible + self.reader.window) if visible < length else length

    def read_pages(self, arrays, q, view, places, metadata):
        keys, values, last = arrays["keys"], arrays["values"], view.new.index[:, -1:]

        def branch(keys, values, index):
            index = jnp.broadcast_to(index[:, None], keys.shape[:3])
            return attend_by_head(q, keys, values, index, Causal(), metadata)

        def nearest(x):
            return jnp.take_along_axis(x, slots[:, None, :, None], axis=2)

        size = min(self.reader.window, keys.shape[2])
        index = jnp.maximum(last - jnp.arange(size - 1, -1, -1, dtype=jnp.int32), -1)
        slots = jnp.take_along_axis(places, jnp.maximum(index, 0), axis=1)
        pages = jnp.arange(arrays["means"].shape[2], dtype=jnp.int32)
        ends = jnp.broadcast_to(self.reader._ends(pages), (len(q), pages.size))
        return gated_sum(
            metadata.features.queries["gates"],
            branch(arrays["means"], arrays["value_means"], ends),
            super().read_pages(arrays, q, view, places, metadata),
            branch(nearest(keys), nearest(values), index),
        ).astype(q.dtype)


def gated_sum(
    gates: Float[Array, "B T N R"], *branches: Float[Array, "B T N Hv"]
) -> Float[Array, "B T N Hv"]:
    """Returns the float32 sum of the branches, each times its gate."""
    weighted = (gates[..., n, None] * x.astype(jnp.float32) for n, x in enumerate(branches))
    return sum(weighted)


def _means(blocks: Blocks, x: Float[Array, "B S K H"]) -> Float[Array, "B C K H"]:
    """Returns the means over the tokens of each block, in the dtype of x."""
    entries = blocks.take(x).astype(jnp.float32)
    return entries.reshape(*blocks.slots.shape, *x.shape[2:]).mean(2).astype(x.dtype)


def _mean_of_pages(
    x: Float[Array, "B K P page H"], is_token: Bool[Array, "B 1 P page 1"]
) -> Float[Array, "B K P H"]:
    return jnp.where(is_token, x, 0).astype(jnp.float32).mean(3).astype(x.dtype)
