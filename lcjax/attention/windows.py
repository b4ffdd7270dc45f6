"""Blocks of keys chosen by the means of overlapping windows: what InfLLM-V2 and NSA share.

Letters: C complete blocks of keys, W windows of keys in the order of the text, m chosen blocks.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from lcjax.attention.chosen_blocks import Blocks, ChosenBlocks, complete_blocks, group_scores
from lcjax.errors import InputError, PositiveInt
from pallas_kernels import gather


@dataclass(frozen=True)
class ChosenByWindows(ChosenBlocks):
    """A token sees its own and near blocks, and past blocks with the most attention to windows.

    A window is `kernel` tokens of a document, and one begins every `stride` tokens. The means of
    their rotated keys have probabilities, which the query heads of a key head sum:

        p[c] = sum over the query heads of softmax over c (q . mean[c] / sqrt(H)).

    A token compares only windows that are complete up to itself. `pool` computes the score of a
    block from the windows that overlap it. Each token reads the first `first` blocks.

    A cache keeps the means of strides, the `stride` tokens between the starts of two windows. The
    mean of a window is that of its strides, computed when it is read.
    """

    chooses_by_query_head: ClassVar[bool] = False
    first: ClassVar[int] = 0  # blocks at the start of a document always read; may be a field

    # Tokens of a window, and from the start of one to that of the next; None: as `block`
    kernel: PositiveInt | None
    stride: PositiveInt | None

    def __post_init__(self):
        super().__post_init__()
        for name, value in (("block", self.block), ("kernel", self.kernel_size)):
            if value % self.kernel_stride:
                raise InputError(
                    f"pattern.{name}={value} must be a multiple of"
                    f" pattern.stride={self.kernel_stride}"
                )

    @abc.abstractmethod
    def pool(
        self, overlapping: Iterator[tuple[int, Float[Array, "B K W"]]]
    ) -> Float[Array, "B K W"]:
        """Returns the score of a block that begins at each window.

        Args:
          overlapping: of the windows that overlap such a block, one after the other, the number of
            strides that they share with it, and log p; -inf where there is no such window.
        """

    @property
    def kernel_size(self) -> int:
        """The number of tokens of a window."""
        return self.block if self.kernel is None else self.kernel

    @property
    def kernel_stride(self) -> int:
        """The number of tokens from the start of a window to that of the next."""
        return self.block if self.stride is None else self.stride

    @property
    def _strides(self) -> int:
        """The number of strides of a block."""
        return self.block // self.kernel_stride

    @property
    def _window_strides(self) -> int:
        """The number of strides of a window."""
        return self.kernel_size // self.kernel_stride

    def choice_flops(self, layer, length, keys):
        if self.reads_all(length):
            return 0.0
        return 2 * layer.num_heads * layer.head_dim * keys / self.kernel_stride

    def window_means(self, means: Float[Array, "B W K H"]) -> Float[Array, "B W K H"]:
        """Returns the means of the windows that begin at strides with these means."""
        size, wide = self._window_strides, means.astype(jnp.float32)
        wide = jnp.pad(wide, [(0, 0), (0, size - 1), (0, 0), (0, 0)])
        wide = sum(wide[:, n : n + means.shape[1]] for n in range(size)) / size
        return wide.astype(means.dtype)

    def window_ends(self, numbers: Int[Array, "*B W"]) -> Int[Array, "*B W"]:
        """Returns the order indices of the last tokens of windows from strides of these numbers."""
        return numbers * self.kernel_stride + self.kernel_size - 1

    def is_window(self, strides: Blocks) -> Bool[Array, "B W"]:
        """Returns whether the window from each stride on is complete and in one document."""
        return _is_run(strides, self._window_strides)

    def choose(self, q, k, queries, keys, blocks, metadata):
        del metadata
        strides = complete_blocks(keys, self.kernel_stride)
        means = strides.means(lax.stop_gradient(k)).astype(k.dtype)  # as a cache keeps them
        windows = self._windows(means, strides.numbers, self.is_window(strides))
        starts_block = _is_run(strides, self._strides) & (strides.numbers % self._strides == 0)
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
        means = self.window_means(means)
        return _Windows(means, gather.lengths(means), self.window_ends(numbers), is_window)

    def block_scores(self, scores: Float[Array, "B K W"]) -> Float[Array, "B K W"]:
        """Returns the score of a block that begins at each window, by log p of the windows."""
        before, after = self._window_strides - 1, self._strides
        padded = jnp.pad(scores, [(0, 0), (0, 0), (before, after - 1)], constant_values=-jnp.inf)

        def overlapping():
            for n in range(-before, after):  # the window that begins n strides after the block
                shared = min(n + self._window_strides, self._strides) - max(n, 0)
                yield shared, padded[..., n + before :][..., : scores.shape[-1]]

        return self.pool(overlapping())

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
        scores = self.block_scores(scores)
        if self._strides > 1:  # else a block begins at every window
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
        return {"means": self.stride_means(pages.keys, pages.is_token)}

    def stride_means(
        self, x: Float[Array, "B K P page H"], is_token: Bool[Array, "B 1 P page 1"]
    ) -> Float[Array, "B K W H"]:
        """Returns the means of the strides of pages, in the dtype of x."""
        rows, heads, pages, _, size = x.shape
        wide = jnp.where(is_token, x, 0).astype(jnp.float32)
        wide = wide.reshape(rows, heads, pages * self._strides, self.kernel_stride, size)
        return wide.mean(3).astype(x.dtype)

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


def _is_run(strides: Blocks, count: int) -> Bool[Array, "B W"]:
    """Returns whether `count` strides from each on are consecutive strides of one document."""
    numbers, segments = strides.numbers, strides.segments
    ends = [
        jnp.pad(x, [(0, 0), (0, count - 1)], constant_values=-1)[:, count - 1 :]
        for x in (numbers, segments)
    ]
    return (segments > 0) & (ends[1] == segments) & (ends[0] == numbers + count - 1)
