"""Attention to blocks of keys that queries choose: what MoBA and its relatives share.

Letters: C complete blocks of keys, m blocks that a query chooses, h choices of a token (one for all
heads, or one for each key head or query head), g = N/h query heads that share a choice, R rows of
queries (one for each token and chosen block).
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from lcjax.attention.base import (
    AttentionMetadata,
    Pass,
    Pattern,
    partial_attention,
    rotate_qk,
)
from lcjax.attention.cache import Arrays, LayerCache, Tokens
from lcjax.attention.on_devices import DocumentTokens, on_devices
from lcjax.attention.pages import NewToken, PagedCache, PageReader
from lcjax.errors import PositiveInt
from lcjax.rope.rotation import no_rotation
from pallas_kernels import (
    BlockTable,
    Mask,
    causal,
    chunk_distance,
    chunks,
    flash,
    gather,
    merge,
    prefix,
)
from pallas_kernels.rows import Groups, block_owners, combine_rows, group_rows, take_rows

_MAX_COPIES = 8  # copies of all queries that a layer holds at a time, if they are many numbers


class Blocks(NamedTuple):
    """The complete blocks of the documents of a row, at most C, in the order of the text."""

    slots: Int[Array, "B C block"]  # of their tokens
    numbers: Int[Array, "B C"]  # of the block in its document
    segments: Int[Array, "B C"]  # of the document; -1: there is no such block

    def take(self, x: Float[Array, "B S K H"]) -> Float[Array, "B C*block K H"]:
        """Returns the entries of the tokens of all blocks."""
        slots = self.slots.reshape(len(self.slots), -1)
        return jax.vmap(lambda x, slots: jnp.take(x, slots, axis=0, mode="clip"))(x, slots)

    def means(self, x: Float[Array, "B S K H"]) -> Float[Array, "B C K H"]:
        """Returns the float32 mean of the entries of each block."""
        entries = self.take(x).astype(jnp.float32)
        return entries.reshape(*self.slots.shape, *x.shape[2:]).mean(2)


def complete_blocks(keys: DocumentTokens, block: int) -> Blocks:
    """Returns the blocks all of whose tokens are among the keys.

    They are at most a `block`-th of the keys, also in rows of many documents.
    """
    (rows, length), count = keys.index.shape, keys.index.shape[1] // block
    index, segments = keys.index, keys.segments
    slots = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (rows, length))
    if segments is None:
        segments = jnp.ones_like(index)
    else:  # padding may lie anywhere
        slots = jnp.argsort(segments == 0, axis=1, stable=True).astype(jnp.int32)
        index, segments = (jnp.take_along_axis(x, slots, axis=1) for x in (index, segments))
    ends = [
        jnp.pad(x[:, block - 1 :], [(0, 0), (0, min(block - 1, length))], constant_values=-1)
        for x in (index, segments)
    ]
    is_block = (index % block == 0) & (segments > 0)
    is_block &= (ends[0] == index + block - 1) & (ends[1] == segments)
    places = jnp.arange(length, dtype=jnp.int32)
    starts = jnp.sort(jnp.where(is_block, places, length), axis=1)[:, :count]
    of_block = jnp.minimum(starts[..., None] + jnp.arange(block), length - 1)
    at_start = functools.partial(jnp.take_along_axis, indices=of_block[..., 0], axis=1)
    slots = jnp.take_along_axis(slots, of_block.reshape(rows, -1), axis=1)
    segments = jnp.where(starts < length, at_start(segments), -1)
    return Blocks(slots.reshape(of_block.shape), at_start(index) // block, segments)


@dataclass(frozen=True)
class ChosenBlocks(Pattern, PageReader):
    """A token sees its own block up to itself, near blocks, and past blocks that it chooses.

    Blocks of `block` tokens count from the first token of a document. A token reads `top_k` blocks
    in one softmax: its own, the `local` blocks before it, and others that `choose` returns. Only
    complete blocks of the token's document are chosen. The choice has no gradient.

    Each of the first `dense_len` tokens of a document reads all tokens before it.
    """

    setting: ClassVar[str]
    local: ClassVar[int] = 0  # blocks before its own that a token always reads; may be a field
    dense_len: ClassVar[int] = 0  # tokens of a text that all read all before them; may be a field

    block: PositiveInt  # tokens
    top_k: PositiveInt  # blocks that a token reads, its own and the near ones included

    @abc.abstractmethod
    def choose(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B S K H"],
        queries: DocumentTokens,
        keys: DocumentTokens,
        blocks: Blocks,
        metadata: AttentionMetadata,
    ) -> Int[Array, "B h T m"]:
        """Returns the past blocks that queries read, without gradient.

        `choose_by_query` computes it for a few queries at a time.

        Args:
          q, k: rotated queries and keys of one device.
          queries, keys: their positions, order indices and documents.
          blocks: the complete blocks of the keys.
          metadata: that of the call, whose rotation is applied already. On several devices, its
            features of queries have key heads or query heads as their third axis.

        Returns:
          Numbers 0 ... C - 1 of `blocks` that are `candidates` of the query, each at most once; C
          for none. h is 1, K or N.
        """

    @abc.abstractmethod
    def choose_past_pages(
        self, token: NewToken, arrays: Arrays, slots: Tokens
    ) -> tuple[Int[Array, "B h m"], Bool[Array, "B h m"]]:
        """Returns what `choose` returns for the last token of each row, as in `choose_pages`."""

    @property
    def num_chosen(self) -> int:
        """The number of blocks that a token chooses, m."""
        return self.top_k - self.local - 1

    @property
    def page(self) -> int:
        return self.block

    @property
    def num_pages(self) -> int:
        return self.top_k

    @property
    def supports_soft_cap(self) -> bool:
        return True

    @property
    def query_copies(self) -> int:
        return min(self.num_chosen, _MAX_COPIES)

    @property
    def layer_cache(self) -> LayerCache:
        return PagedCache(self)

    def passes(self, metadata: AttentionMetadata) -> list[Pass]:
        """Returns a pass over the latest blocks, which are as many keys as any choice."""
        mask = causal()
        if not self.reads_all(metadata.k_positions.shape[1]):
            mask = self._near_mask(self.top_k - 1)
        return [Pass(metadata.q_positions, metadata.k_positions, mask)]

    def reads_all(self, keys: int) -> bool:
        """Returns whether every token of a text of so many tokens reads all before it."""
        return keys <= max(self.block * self.top_k, self.dense_len)

    def _near_mask(self, local: int) -> Mask:
        """Returns the mask of the own block, `local` blocks before it, and texts read as whole."""
        near = chunk_distance(self.block, 0, local)
        if self.dense_len:
            near = near | (chunks(self.dense_len) & prefix(self.dense_len))
        return causal() & near

    def attend(self, q, k, v, metadata):
        if self.reads_all(k.shape[1]) or not self.num_chosen:
            return super().attend(q, k, v, metadata)
        self.check_metadata(metadata)
        return on_devices(self._attend, q, k, v, metadata, by_head=True)

    def _attend(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B S K H"],
        v: Float[Array, "B S K Hv"],
        queries: DocumentTokens,
        keys: DocumentTokens,
        metadata: AttentionMetadata,
        axis: str | None = None,
    ) -> Float[Array, "B T N Hv"]:
        """Computes attention on one device, to the near blocks and to the chosen ones."""
        del axis
        q, k = rotate_qk(q, k, metadata)
        metadata = metadata.replace(rotation=no_rotation(), keys_rotated=True)
        with jax.named_scope("choose"):
            blocks = complete_blocks(keys, self.block)
            chosen = self.choose(q, k, queries, keys, blocks, metadata)
            if self.dense_len:
                reads_all = (queries.index < self.dense_len)[:, None, :, None]
                chosen = jnp.where(reads_all, blocks.numbers.shape[1], chosen)
        mask = self._near_mask(self.local)
        near = Pass(metadata.q_positions, metadata.k_positions, mask)
        current = partial_attention(q, k, v, near, metadata)
        with jax.named_scope("attention"):
            options = {"soft_cap": metadata.soft_cap, "implementation": metadata.implementation}
            pair = blocks.take(k), blocks.take(v)
            others = attend_to_chosen(q, *pair, chosen, self.block, **options)
            return merge([others, current])[0].astype(q.dtype)

    def candidates(
        self, blocks: Blocks, index: Int[Array, " B"], segments: Int[Array, " B"]
    ) -> Bool[Array, "B C"]:
        """Returns which blocks a token of each row may choose: those before its near blocks.

        Args:
          blocks: the complete blocks.
          index, segments: order index and document of the token.
        """
        is_before = blocks.numbers < (index // self.block - self.local)[:, None]
        return (blocks.segments == segments[:, None]) & is_before

    def choose_by_query(
        self,
        best: Callable[[Any, DocumentTokens, Bool[Array, "B C"]], tuple[jax.Array, jax.Array]],
        arrays: Any,
        queries: DocumentTokens,
        blocks: Blocks,
        elements: int,
    ) -> Int[Array, "B h T m"]:
        """Returns `choose` by a function of one query, for a few queries at a time.

        Args:
          best: a function of arrays [B, ...], the tokens [B] and their `candidates`. It returns
            blocks [B, h, m] and whether each is one.
          arrays: what it reads of each query, [B, T, ...].
          queries: the tokens of the queries.
          blocks: the complete blocks.
          elements: numbers that `best` computes for one query of all rows.
        """
        count = blocks.numbers.shape[1]

        def of_query(arrays):
            arrays, query = arrays
            ids, is_block = best(
                arrays, query, self.candidates(blocks, query.index, query.segments)
            )
            return jnp.where(is_block, ids, count)

        arrays = jax.lax.stop_gradient(arrays), queries.with_segments()
        return gather.by_query(of_query, arrays, elements).swapaxes(1, 2)

    def choose_pages(self, token, arrays, slots):
        near = token.index[:, None] // self.block - jnp.arange(self.local, -1, -1, dtype=jnp.int32)
        if not self.num_chosen:
            near = near[:, None]
            return jnp.maximum(near, 0), near >= 0
        ids, is_block = self.choose_past_pages(token, arrays, slots)
        near = jnp.broadcast_to(near[:, None], (*ids.shape[:2], self.local + 1))
        ids = jnp.concatenate([ids, jnp.maximum(near, 0)], -1)
        return ids, jnp.concatenate([is_block, near >= 0], -1)


def group_scores(
    q: Float[Array, "B N H"],
    means: Float[Array, "B W K H"],
    lengths: Float[Array, "B W K"],
    visible: Bool[Array, "B W"],
) -> tuple[Float[Array, "B K W"], Float[Array, "B K 1"]]:
    """Returns the scores of means of keys for the query heads of each key head together.

    They are logarithms of the sum over these heads of softmax over the visible means.

    Args:
      q: rotated queries.
      means: the mean keys.
      lengths: those of the means.
      visible: means that the query compares.

    Returns:
      The scores, and by how much rounding may change them.
    """
    rows, kv_heads, size = len(q), means.shape[2], q.shape[-1]
    logits = gather.scores(q[:, None], means)[:, 0] * size**-0.5
    logits = jnp.where(visible[:, None], logits, -jnp.inf)
    total = jax.nn.logsumexp(logits, -1, keepdims=True)
    logits -= jnp.where(total > -jnp.inf, total, 0)
    scores = jax.nn.logsumexp(logits.reshape(rows, kv_heads, -1, logits.shape[-1]), 2)
    # Rounding changes a logit and the softmax's sum. See `gather.TIE`.
    longest = jnp.where(visible[..., None], lengths, 0).max(1)  # [B, K]
    of_query = gather.lengths(q).reshape(rows, kv_heads, -1)
    margin = 2 * gather.tie(q.dtype) * size**-0.5 * of_query.max(-1) * longest
    return scores, margin[..., None]


def attend_to_chosen(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B C*block K H"],
    v: Float[Array, "B C*block K Hv"],
    chosen: Int[Array, "B h T m"],
    block: int,
    *,
    soft_cap: float | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
    """Computes attention to all keys of the chosen blocks, in one softmax for each query.

    The m copies of the queries are made for a tile of tokens after the other if those of all tokens
    would be many numbers, and more than `_MAX_COPIES` times the queries. The backward pass computes
    the attention of a tile again.

    Args:
      q: queries, to which all keys of their chosen blocks are visible.
      k, v: keys and values of the blocks, block after block.
      chosen: different blocks of each query, in any order; C for none. h is 1, K or N.
      block: keys of a block.
      soft_cap, implementation: those of `pallas_kernels.flash`.

    Returns:
      The output, and the log-sum-exp of the logits, both float32; 0 and -inf where no block is
      chosen.
    """
    options = {"soft_cap": soft_cap, "implementation": implementation}
    length, copies, count = q.shape[1], chosen.shape[-1], k.shape[1] // block
    tiles = -(-copies // _MAX_COPIES) if copies * q.size > gather.BUDGET else 1
    tiles = min(tiles, length)
    if tiles == 1:
        return _attend_tile(q, k, v, chosen, block, **options)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def of_tile(tile, k, v):
        q, chosen = tile
        return _attend_tile(q, k, v, chosen.swapaxes(1, 2) + count, block, **options)

    # Zeros, with which the last tile is filled, then stand for no block.
    return gather.in_tiles(of_tile, (q, chosen.swapaxes(1, 2) - count), tiles, (k, v))


def _attend_tile(q, k, v, chosen, block, **options):
    """Computes `attend_to_chosen` for all tokens at once.

    Every pair of a token and a chosen block is a row, of the g heads that share the choice. Rows of
    one block of keys lie together and fill blocks of queries, so that kernels need no mask and
    visit no other key.
    """
    batch, length, heads, _ = q.shape
    choices, copies = chosen.shape[1], chosen.shape[3]
    count, pairs = k.shape[1] // block, length * copies
    rows = 128 if pairs >= 256 * count else 16  # of a block of queries
    by_head = functools.partial(group_rows, count=count, block=rows)
    groups = jax.vmap(jax.vmap(by_head))(chosen)

    def by_choice(x):  # [B, T, N, ...] -> [B, h, T, g, ...]
        return x.reshape(*x.shape[:2], choices, -1, *x.shape[3:]).swapaxes(1, 2)

    def of_heads(x):  # [B, h, T, g, ...] -> [B, T, N, ...]
        x = x.swapaxes(1, 2)
        return x.reshape(*x.shape[:2], heads, *x.shape[4:])

    flat = by_choice(q).reshape(batch, choices, length, -1)
    of_rows = jax.vmap(jax.vmap(take_rows))(flat, groups.token, groups.places)
    of_rows = of_rows.reshape(*of_rows.shape[:3], -1, q.shape[-1])
    out, lse = flash(of_heads(of_rows), k, v, table=_table(groups, count, block), **options)
    out, lse = by_choice(out), by_choice(lse)
    places = groups.places.reshape(*groups.places.shape[:2], -1)
    of_pairs = jax.vmap(jax.vmap(take_rows))(lse, places, groups.pair[..., None])
    of_pairs = jnp.moveaxis(of_pairs, -1, 2).reshape(batch, choices, -1, length, copies)
    of_pairs = jnp.where((chosen < count)[:, :, None], of_pairs, -jnp.inf)
    largest = jax.lax.stop_gradient(of_pairs.max(-1, keepdims=True))
    largest = jnp.where(largest > -jnp.inf, largest, 0)
    weights = jnp.exp(of_pairs - largest)
    total = weights.sum(-1, keepdims=True)
    is_some = total > 0
    total = jnp.where(is_some, total, 1)
    combine = jax.vmap(combine_rows, (1, 0, None), 1)  # one head after the other
    mixed = jax.vmap(jax.vmap(combine))(out, weights / total, groups)
    lse = jnp.where(is_some, largest + jnp.log(total), -jnp.inf)[..., 0]
    return of_heads(mixed), of_heads(lse.swapaxes(2, 3))


def _table(groups: Groups, count: int, block: int) -> BlockTable:
    """Returns the table in which a block of rows visits the keys of its block, and no others."""
    rows = groups.pair.shape[-1] // groups.block
    k_block = next((size for size in (128, 64) if block % size == 0), block)
    parts = block // k_block
    owners = jax.vmap(jax.vmap(lambda sizes: block_owners(sizes, rows, groups.block)))(groups.sizes)
    seen = jnp.where(owners < count, parts, 0).astype(jnp.int32)
    index = parts * jnp.minimum(owners, count - 1)[..., None] + jnp.arange(parts, dtype=jnp.int32)
    return BlockTable(index, seen, seen, None, groups.block, k_block)
