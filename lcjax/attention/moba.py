"""MoBA, a mixture of block attention (Lu et al. 2025, arXiv 2502.13189).

Letters: C complete blocks of keys, n blocks that a query reads, R rows of queries (one for each
query and chosen block).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from lcjax.attention.base import AttentionMetadata, Pass, Pattern, partial_attention, rotate_qk
from lcjax.attention.cache import LayerCache
from lcjax.attention.pages import PagedCache, PageReader
from lcjax.errors import PositiveInt
from lcjax.rope.rotation import no_rotation
from pallas_kernels import BlockTable, causal, chunk_distance, chunks, flash, gather
from pallas_kernels.rows import Groups, block_owners, combine_rows, group_rows, take_rows


@Pattern.register_subclass("moba")
@dataclass(frozen=True)
class MoBA(Pattern, PageReader):
    """A token sees its own block up to itself, and the past blocks that match its query best.

    Blocks of `block` tokens count from the first token of a document. Each query head scores a past
    block by the product of its query and the mean of the block's keys, both rotated, in float32
    (sec. 2.2), and reads the `top_k - 1` best blocks and its own in one softmax. Scores that differ
    by less than 2^-12 of |q| |mean| (2^-10 in bfloat16) count as equal, and of equal blocks the
    later ones are read. A token with fewer past blocks reads all of them, so a text of up to
    `block` x `top_k` tokens has full attention.

    There are no parameters: a model with full attention can go on with MoBA and back at any step,
    for all layers or some (`model.layers`). The choice has no gradient. Each head of a generated
    token reads `top_k` blocks of the cache, too; the released code reads all keys there. A layer
    holds `top_k - 1` copies of its queries and outputs at a time.

    The paper continues Llama 3.1 8B to a million tokens with blocks of 4,096 and 12 of them, and
    full attention in the last 3 layers (sec. 3.3).
    """

    examples = ({"block": 8, "top_k": 3}, {"block": 5, "top_k": 2})
    setting: ClassVar[str] = "model.pattern.type=moba"
    chooses_by_query_head: ClassVar[bool] = True

    block: PositiveInt = 4096  # tokens
    top_k: PositiveInt = 12  # blocks that a token reads, its own included

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
        return self.top_k - 1

    @property
    def layer_cache(self) -> LayerCache:
        return PagedCache(self)

    def passes(self, metadata: AttentionMetadata) -> list[Pass]:
        """Returns a pass over the latest blocks, which are as many keys as any choice."""
        mask = causal()
        if not self._reads_all(metadata.k_positions.shape[1]):
            mask = mask & chunk_distance(self.block, 0, self.top_k - 1)
        return [Pass(metadata.q_positions, metadata.k_positions, mask)]

    def _reads_all(self, keys: int) -> bool:
        return keys <= self.block * self.top_k

    def attend(self, q, k, v, metadata):
        if self._reads_all(k.shape[1]) or self.top_k == 1:
            return super().attend(q, k, v, metadata)
        self.check_metadata(metadata)
        queries = _Tokens.of(metadata.q_positions, metadata.q_index, metadata.q_segments)
        keys = _Tokens.of(metadata.k_positions, metadata.k_index, metadata.k_segments)
        layout, rotation = metadata.layout, metadata.rotation
        plain = metadata.replace(layout=None, row_indices=None)

        def local(q, k, v, queries, keys, rotation):
            return self._attend(q, k, v, queries, keys, plain.replace(rotation=rotation))

        if layout is None:
            return local(q, k, v, queries, keys, rotation)
        layout = layout.fitting(q, k)
        by_row, of_rotation = PartitionSpec(layout.rows), PartitionSpec()
        if rotation.inv_freq.ndim > 1:  # one for each row
            of_rotation = by_row
        heads = layout.heads if k.shape[2] % layout.size(layout.heads) == 0 else None
        of_queries = PartitionSpec(layout.rows, layout.length)
        of_keys = PartitionSpec(layout.rows, None, heads)
        return jax.shard_map(
            local,
            mesh=layout.mesh,
            in_specs=(
                *(PartitionSpec(*of_queries, heads), of_keys, of_keys),
                *(of_queries, by_row, of_rotation),
            ),
            out_specs=PartitionSpec(*of_queries, heads),
            check_vma=False,
        )(q, k, v, queries, keys, rotation)

    def _attend(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B S K H"],
        v: Float[Array, "B S K H"],
        queries: _Tokens,
        keys: _Tokens,
        metadata: AttentionMetadata,
    ) -> Float[Array, "B T N H"]:
        """Computes attention on one device, to the own block and to the chosen ones."""
        metadata = metadata.replace(
            q_positions=queries.positions, k_positions=keys.positions,
            q_index=queries.index, k_index=keys.index,
            q_segments=queries.segments, k_segments=keys.segments,
        )  # fmt: skip
        q, k = rotate_qk(q, k, metadata)
        with jax.named_scope("choose"):
            blocks = _complete_blocks(keys, self.block)
            keys_of_blocks, values_of_blocks = blocks.take(k), blocks.take(v)
            summaries = self._means(keys_of_blocks.reshape(*blocks.slots.shape, *k.shape[2:]))
            chosen = self._choose(q, summaries, queries, blocks)
        metadata = metadata.replace(rotation=no_rotation(), keys_rotated=True)
        near = Pass(metadata.q_positions, metadata.k_positions, causal() & chunks(self.block))
        current = partial_attention(q, k, v, near, metadata)
        with jax.named_scope("attention"):
            options = {"soft_cap": metadata.soft_cap, "implementation": metadata.implementation}
            pair = keys_of_blocks, values_of_blocks
            return _with_chosen(current, q, *pair, chosen, self.block, **options)

    def _means(self, keys: Float[Array, "*A block K H"]) -> Float[Array, "*A K H"]:
        """Returns the float32 mean key of each block, through which no gradient flows."""
        return jax.lax.stop_gradient(keys).astype(jnp.float32).mean(-3)

    def _choose(
        self,
        q: Float[Array, "B T N H"],
        summaries: Float[Array, "B C K H"],
        queries: _Tokens,
        blocks: _Blocks,
    ) -> Int[Array, "B N T n-1"]:
        """Returns the past blocks that queries read; C for none."""
        count = summaries.shape[1]

        def of_query(arrays):
            q, index, segments = arrays
            is_past = (blocks.segments == segments[:, None]) & (
                blocks.numbers < (index // self.block)[:, None]
            )
            ids, is_block = self._best(q, summaries, is_past)
            return jnp.where(is_block, ids, count)

        index, segments = queries.index, queries.segments
        if segments is None:
            segments = jnp.ones(index.shape, jnp.int32)
        arrays = jax.lax.stop_gradient(q), index, segments
        chosen = gather.by_query(of_query, arrays, q.shape[0] * q.shape[2] * count)
        return chosen.swapaxes(1, 2)

    def _best(
        self,
        q: Float[Array, "B N H"],
        summaries: Float[Array, "B C K H"],
        is_past: Bool[Array, "B C"],
    ) -> tuple[Int[Array, "B N n-1"], Bool[Array, "B N n-1"]]:
        """Returns the best past blocks of a query in each row, and whether each is one."""
        wide = q[:, None].astype(jnp.float32)
        options = {"exists": is_past, "dtype": q.dtype}
        ids, is_block = gather.best_blocks(wide, summaries, self.top_k - 1, **options)
        return ids[:, 0], is_block[:, 0]

    # The choice of a generated token, for `PagedCache`

    def summary_dtypes(self, layer):
        return {"means": jnp.dtype("float32")}

    def summarise(self, keys, is_token):
        keys = jnp.where(is_token, keys, 0).swapaxes(1, 2)  # blocks before heads
        return {"means": self._means(keys.swapaxes(2, 3)).swapaxes(1, 2)}

    def choose_pages(self, q, summaries, last):
        means = summaries["means"].swapaxes(1, 2)
        current = last // self.block
        ids, is_block = self._best(q, means, jnp.arange(means.shape[1]) < current[:, None])
        current = jnp.broadcast_to(current[:, None, None], (*ids.shape[:2], 1))
        is_current = jnp.ones(current.shape, bool)
        return jnp.concatenate([ids, current], -1), jnp.concatenate([is_block, is_current], -1)


class _Tokens(NamedTuple):
    """Positions, order indices and documents of tokens."""

    positions: Int[Array, "B S"]
    index: Int[Array, "B S"]
    segments: Int[Array, "B S"] | None  # 0 is padding; None: one document

    @classmethod
    def of(cls, positions, index, segments) -> _Tokens:
        index = jnp.arange(positions.shape[1], dtype=jnp.int32) if index is None else index
        return cls(positions, jnp.broadcast_to(index, positions.shape), segments)


class _Blocks(NamedTuple):
    """The complete blocks of the documents of a row, at most C, in the order of the text."""

    slots: Int[Array, "B C block"]  # of their tokens
    numbers: Int[Array, "B C"]  # of the block in its document
    segments: Int[Array, "B C"]  # of the document; -1: there is no such block

    def take(self, x: Float[Array, "B S K H"]) -> Float[Array, "B C*block K H"]:
        """Returns the entries of the tokens of all blocks."""
        slots = self.slots.reshape(len(self.slots), -1)
        return jax.vmap(lambda x, slots: jnp.take(x, slots, axis=0, mode="clip"))(x, slots)


def _complete_blocks(keys: _Tokens, block: int) -> _Blocks:
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
        jnp.pad(x[:, block - 1 :], [(0, 0), (0, block - 1)], constant_values=-1)
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
    return _Blocks(slots.reshape(of_block.shape), at_start(index) // block, segments)


def _with_chosen(
    current: tuple[Float[Array, "B T N H"], Float[Array, "B T N"]],
    q: Float[Array, "B T N H"],
    k: Float[Array, "B C*block K H"],
    v: Float[Array, "B C*block K H"],
    chosen: Int[Array, "B N T n-1"],
    block: int,
    **options,
) -> Float[Array, "B T N H"]:
    """Returns attention over the current block, of which this is the partial, and chosen blocks.

    Every pair of a query and a chosen block is a row. Rows of one block of keys lie together and
    fill blocks of queries, so that kernels need no mask and visit no other key.
    """
    count, pairs = k.shape[1] // block, chosen.shape[2] * chosen.shape[3]
    rows = 128 if pairs >= 256 * count else 16  # of a block of queries
    by_head = functools.partial(group_rows, count=count, block=rows)
    groups = jax.vmap(jax.vmap(by_head))(chosen)
    of_rows = jax.vmap(jax.vmap(take_rows))(q.swapaxes(1, 2), groups.token, groups.places)
    table = _table(groups, count, block)
    out, lse = flash(of_rows.swapaxes(1, 2), k, v, table=table, **options)
    out, lse = out.swapaxes(1, 2), lse.swapaxes(1, 2)[..., None]
    flat = groups.places.reshape(*groups.places.shape[:2], -1)
    of_pairs = jax.vmap(jax.vmap(take_rows))(lse, flat, groups.pair[..., None])
    of_pairs = jnp.where(chosen < count, of_pairs.reshape(chosen.shape), -jnp.inf)
    current_out, current_lse = (x.swapaxes(1, 2) for x in current)
    lses = jnp.concatenate([current_lse[..., None], of_pairs], -1)
    largest = jax.lax.stop_gradient(lses.max(-1, keepdims=True))  # -inf for padding
    weights = jnp.exp(lses - jnp.where(largest > -jnp.inf, largest, 0))
    total = jnp.where(largest > -jnp.inf, weights.sum(-1, keepdims=True), 1)
    mixed = jax.vmap(jax.vmap(combine_rows))(out, weights[..., 1:], groups)
    mixed += weights[..., :1] * current_out.astype(jnp.float32)
    return (mixed / total).astype(q.dtype).swapaxes(1, 2)


def _table(groups: Groups, count: int, block: int) -> BlockTable:
    """Returns the table in which a block of rows visits the keys of its block, and no others."""
    rows = groups.pair.shape[-1] // groups.block
    k_block = next((size for size in (128, 64) if block % size == 0), block)
    parts = block // k_block
    owners = jax.vmap(jax.vmap(lambda sizes: block_owners(sizes, rows, groups.block)))(groups.sizes)
    seen = jnp.where(owners < count, parts, 0).astype(jnp.int32)
    index = parts * jnp.minimum(owners, count - 1)[..., None] + jnp.arange(parts, dtype=jnp.int32)
    return BlockTable(index, seen, seen, None, groups.block, k_block)
