"""Native sparse attention (Yuan et al. 2025, arXiv 2502.11089), with means as compressed keys.

Letters: C strides of keys, R = 3 branches.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

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
from lcjax.attention.chosen_blocks import complete_blocks
from lcjax.attention.on_devices import DocumentTokens, on_devices
from lcjax.attention.pages import PagedCache
from lcjax.attention.windows import ChosenByWindows
from lcjax.errors import PositiveInt, Range
from lcjax.rope.rotation import no_rotation
from pallas_kernels import causal, gather, stride, window

_BRANCHES = ("compressed", "chosen", "window")  # the order of their gates


@Pattern.register_subclass("nsa")
@dataclass(frozen=True)
class NSA(ChosenByWindows):
    """A token sees means of past keys, blocks that it chooses by them, and the nearest tokens.

    Each of the three is a branch with a softmax of its own, and a gate of each query head and token
    weights its output, in float32:

        out = sum over branches of scale sigmoid(W x) attention.

    The compressed branch reads the means of the rotated keys and of the values of windows. A window
    is `kernel` tokens, one begins every `stride` tokens of a document, and a token reads those that
    end at the token or before it (eq. 7). By default windows are the blocks, as in
    flash-linear-attention; those of the paper overlap, with `kernel` 32 and `stride` 16.

    Blocks of `block` tokens count from the first token of a document. The branch of chosen blocks
    reads `top_k` whole blocks: the first one, the token's own up to itself, the one before that,
    and those with the best scores, for the query heads of a key head together (eq. 9 and 10):

        p[c] = sum over these heads of the probability of window c in the compressed branch,
        score[j] = sum over windows c of p[c] times the number of strides that c and block j share.

    Scores that differ by no more than their rounding error count as equal, and of equal blocks the
    later ones are read. The choice has no gradient. The third branch reads the last `window`
    tokens, the token itself included.

    At the start W is 0, and the scales of the branches are 0, 2 and 0. So the gates are 0, 1 and 0,
    and a dense model is unchanged in texts of up to `block` x `top_k` tokens. Model and gates learn
    from the loss of the model. The gates of the paper have no scales: set them to 1. Native means
    that models are trained with it from the start. The authors of InfLLM-V2 report that a converted
    model lost much (RULER 59.9 for 84.3 at 32K tokens); theirs has the paper's separate keys and
    values, and begins with other gates.

    Not here are the paper's own keys and values of each branch, and its trained network that
    compresses a window with the positions of tokens in it: compression is a mean. The paper's
    models have not been published.
    """

    examples = (
        {"block": 8, "top_k": 4, "window": 12},
        {"block": 5, "top_k": 3, "window": 3},
        {"block": 6, "top_k": 3, "window": 5, "kernel": 4, "stride": 2},
    )
    setting: ClassVar[str] = "model.pattern.type=nsa"
    first: ClassVar[int] = 1
    local: ClassVar[int] = 1

    block: PositiveInt = 64  # tokens
    # Blocks that the second branch reads, with the first one, the own one and the one before it
    top_k: Annotated[int, Range(3)] = 16
    # Tokens of a window of the first branch, and from the start of one to that of the next. None:
    # as `block`; a number as default would not divide other blocks.
    kernel: PositiveInt | None = None
    stride: PositiveInt | None = None
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
        local = self.top_k - 1 + -(-self.window // self.block)
        # The second mask shows one key for each window before `near`. For the windows within `near`
        # it has these additional blocks, which hide windows, too.
        near = self._near_mask(local + local // max(self.kernel_stride - 1, 1))
        masks = near, causal() & stride(self.kernel_stride) & ~near
        return [Pass(metadata.q_positions, metadata.k_positions, mask) for mask in masks]

    def pool(self, overlapping):
        """Returns log of the sum of p times the number of shared strides (eq. 9)."""
        weighted = (log_p + math.log(shared) for shared, log_p in overlapping)
        return functools.reduce(jnp.logaddexp, weighted)

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
        if k.shape[1] >= self.kernel_size:
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
        """Computes the branch of means; 0 for tokens before the end of the first window."""
        strides = complete_blocks(keys, self.kernel_stride)
        ends = self.window_ends(strides.numbers)
        metadata = metadata.replace(
            k_positions=ends,
            k_index=ends,
            q_segments=queries.with_segments().segments,
            k_segments=jnp.where(self.is_window(strides), strides.segments, 0),
        )
        with jax.named_scope("compress"):
            k, v = (self.window_means(strides.means(x).astype(x.dtype)) for x in (k, v))
        one = Pass(metadata.q_positions, ends, causal())
        return partial_attention(q, k, v, one, metadata)[0]

    # The means that a generated token reads, for `BranchCache`

    def summary_dtypes(self, layer):
        return {"means": layer.dtype, "value_means": layer.dtype}

    def summarise(self, pages):
        means = self.stride_means(pages.values, pages.is_token)
        return super().summarise(pages) | {"value_means": means}


@dataclass(frozen=True)
class BranchCache(PagedCache):
    """The cache of NSA: pages with the means of keys and values of their strides.

    A token that is alone in its call reads the pages that it chooses, the means of all windows that
    are complete up to it, and the nearest keys. Of `num_visible` keys, some may count twice.
    """

    reader: NSA

    def num_visible(self, length, tokens):
        visible = super().num_visible(length, tokens)
        return min(length, visible + self.reader.window) if visible < length else length

    def num_multiplied(self, length, tokens):
        if tokens > 1 or not self._chooses(length):
            return length
        # The mean of a window costs what a key costs, a logit and a weighted value.
        return self.num_visible(length, tokens) + self._num_summaries(length)

    def read_pages(self, arrays, q, view, places, metadata):
        keys, values, last = arrays["keys"], arrays["values"], view.new.index[:, -1:]

        def branch(keys, values, index):
            index = jnp.broadcast_to(index[:, None], keys.shape[:3])
            return attend_by_head(q, keys, values, index, Causal(), metadata)

        def windows(means):
            return self.reader.window_means(means.swapaxes(1, 2)).swapaxes(1, 2)

        def nearest(x):
            return jnp.take_along_axis(x, slots[:, None, :, None], axis=2)

        size = min(self.reader.window, keys.shape[2])
        index = jnp.maximum(last - jnp.arange(size - 1, -1, -1, dtype=jnp.int32), -1)
        slots = jnp.take_along_axis(places, jnp.maximum(index, 0), axis=1)
        means = [windows(arrays[name]) for name in ("means", "value_means")]
        ends = self.reader.window_ends(jnp.arange(means[0].shape[2], dtype=jnp.int32))
        return gated_sum(
            metadata.features.queries["gates"],
            branch(*means, jnp.broadcast_to(ends, (len(q), ends.size))),
            super().read_pages(arrays, q, view, places, metadata),
            branch(nearest(keys), nearest(values), index),
        ).astype(q.dtype)


def gated_sum(
    gates: Float[Array, "B T N R"], *branches: Float[Array, "B T N Hv"]
) -> Float[Array, "B T N Hv"]:
    """Returns the float32 sum of the branches, each times its gate."""
    weighted = (gates[..., n, None] * x.astype(jnp.float32) for n, x in enumerate(branches))
    return sum(weighted)
