"""InfLLM-V2, attention that is dense in short texts and sparse in long ones (arXiv 2509.24663).

Letters: C complete blocks of keys, W windows of keys in the order of the text, m chosen blocks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from lcjax.attention.base import Pattern
from lcjax.attention.chosen_blocks import ChosenBlocks, complete_blocks, group_scores
from lcjax.errors import InputError, NonNegativeInt, PositiveInt
from pallas_kernels import gather


@Pattern.register_subclass("inf_llm_v2")
@dataclass(frozen=True)
class InfLLMV2(ChosenBlocks):
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
    chooses_by_query_head: ClassVar[bool] = False

    block: PositiveInt = 64  # tokens
    top_k: PositiveInt = 96  # blocks that a token reads, the first and the near ones included
    kernel: PositiveInt = 32  # tokens of a window, a multiple of `stride`
    stride: PositiveInt = 16  # tokens from the start of a window to that of the next; divides block
    first: NonNegativeInt = 1  # blocks at the start of a document that are always read
    local: NonNegativeInt = 32  # blocks before its own that a token always reads
    dense_len: NonNegativeInt = 8192  # first tokens that read all tokens before them

    def __post_init__(self):
        super().__post_init__()
        for name in ("block", "kernel"):
            value = getattr(self, name)
            if value % self.stride:
                raise InputError(
                    f"pattern.{name}={value} must be a multiple of pattern.stride={self.stride}"
                )
        least = self.first + self.local + 1
        if self.top_k < least:
            raise InputError(
                f"pattern.top_k={self.top_k} must be at least {least}: pattern.first={self.first},"
                f" pattern.local={self.local} and the token's own block"
            )

    @property
    def _strides(self) -> int:
        """The number of strides of a block."""
        return self.block // self.stride

    def choice_flops(self, layer, length, keys):
        if self.reads_all(length):
            return 0.0
        return 2 * layer.num_heads * layer.head_dim * keys / self.stride

    def choose(self, q, k, queries, keys, blocks, metadata):
        del metadata
        strides = complete_blocks(keys, self.stride)
        is_run = functools.partial(_is_run, strides.numbers, strides.segments)
        means = strides.means(k).astype(k.dtype)  # as a cache keeps them
        windows = self._windows(means, strides.numbers, is_run(self.kernel // self.stride))
        starts_block = is_run(self._strides) & (strides.numbers % self._strides == 0)
        count = starts_block.shape[1]
        places = jnp.where(starts_block, jnp.arange(count, dtype=jnp.int32), count)
        places = jnp.sort(places, axis=1)[:, : blocks.numbers.shape[1]]

        def best(q, query, is_candidate):
            visible = (strides.segments == query.segments[:, None]) & windows.visible(query.index)
            return self._best(q, windows, visible, places, blocks.numbers, is_candidate)

        elements = q.shape[0] * q.shape[2] * count
        return self.choose_by_query(best, q, queries, blocks, elements)

    def _windows(
        self,
        means: Float[Array, "B W K H"],
        numbers: Int[Array, "B W"],
        is_window: Bool[Array, "B W"],
    ) -> _Windows:
        """Returns the windows that begin at strides with these mean keys and numbers."""
        size, wide = self.kernel // self.stride, means.astype(jnp.float32)
        wide = jnp.pad(wide, [(0, 0), (0, size - 1), (0, 0), (0, 0)])
        wide = sum(wide[:, n : n + means.shape[1]] for n in range(size)) / size
        ends = numbers * self.stride + self.kernel - 1
        return _Windows(wide.astype(means.dtype), jnp.linalg.norm(wide, axis=-1), ends, is_window)

    def _best(
        self,
        q: Float[Array, "B N H"],
        windows: _Windows,
        visible: Bool[Array, "B W"],
        places: Int[Array, "B C"],
        numbers: Int[Array, "B C"],
        is_candidate: Bool[Array, "B C"],
    ) -> tuple[Int[Array, "B K m"], Bool[Array, "B K m"]]:
        """Returns the best past blocks of a query in each row, and whether each is one.

        Args:
          q: rotated queries.
          windows: the windows of keys, one from each stride on.
          visible: windows that the query compares.
          places: the window at the start of each block.
          numbers: those of the blocks in their document.
          is_candidate: blocks that the query may choose.
        """
        scores, margin = group_scores(q, windows.means, windows.lengths, visible)
        before, after = self.kernel // self.stride - 1, self._strides
        padded = jnp.pad(scores, [(0, 0), (0, 0), (before, after - 1)], constant_values=-jnp.inf)
        overlapping = (padded[..., n : n + scores.shape[-1]] for n in range(before + after))
        scores = functools.reduce(jnp.maximum, overlapping)
        scores = jnp.take_along_axis(scores, places[:, None], 2, mode="clip")
        scores = jnp.maximum(scores, -1e30)  # a block without a complete window comes last
        scores = jnp.where((numbers < self.first)[:, None], jnp.inf, scores)
        return gather.best(scores, self.num_chosen, is_candidate[:, None], margin)

    # The choice of a generated token, for `PagedCache`

    @property
    def summaries_per_page(self) -> int:
        return self._strides

    def summary_dtypes(self, layer):
        return {"means": layer.dtype}

    def summarise(self, pages):
        rows, heads, count, _, size = pages.keys.shape
        wide = jnp.where(pages.is_token, pages.keys, 0).astype(jnp.float32)
        means = wide.reshape(rows, heads, count * self._strides, self.stride, size).mean(3)
        return {"means": means.astype(pages.keys.dtype)}

    def choose_past_pages(self, token, arrays, slots):
        means, last = arrays["means"].swapaxes(1, 2), token.index
        numbers = jnp.arange(means.shape[1], dtype=jnp.int32)[None]
        windows = self._windows(means, numbers, numbers >= 0)
        pages = jnp.arange(numbers.size // self._strides, dtype=jnp.int32)[None]
        is_candidate = pages < (last // self.block - self.local)[:, None]
        places = pages * self._strides
        return self._best(token.q, windows, windows.visible(last), places, pages, is_candidate)


class _Windows(NamedTuple):
    """Windows of keys, one from each stride on; some are incomplete or cross documents."""

    means: Float[Array, "B W K H"]
    lengths: Float[Array, "B W K"]  # of the means
    ends: Int[Array, "B W"]  # order index of the last token
    is_window: Bool[Array, "B W"]

    def visible(self, index: Int[Array, " B"]) -> Bool[Array, "B W"]:
        """Returns which windows end at or before a token of each row."""
        return self.is_window & (self.ends <= index[:, None])


def _is_run(
    numbers: Int[Array, "B W"], segments: Int[Array, "B W"], count: int
) -> Bool[Array, "B W"]:
    """Returns whether `count` strides from each on are consecutive strides of one document."""
    ends = [
        jnp.pad(x[:, count - 1 :], [(0, 0), (0, count - 1)], constant_values=-1)
        for x in (numbers, segments)
    ]
    return (segments > 0) & (ends[1] == segments) & (ends[0] == numbers + count - 1)
