"""Landmark attention (Mohtashami & Jaggi 2023, arXiv 2305.16300), and its retrieval from a cache.

Let the cache hold b complete blocks, and K = min(top_k, b). Positions
are those of the released code ("stingy", arXiv 2305.16300, sec. 3.2.1), which uses only K + 1
blocks of positions before the incomplete block:

    first position of retrieved blocks: first = (b - K - 1) block
    scoring block n: its last token at first + m block + block - 1, m = max(0, n - (b - K) + 1)
    attending to block n at rank s: from first + s block, + block if n >= b - K

So the last K blocks are scored at their true positions and all older ones at one position. The
selected blocks are ranked in the order of the text: old blocks fill the positions from the left,
recent ones from the right. Keys in the cache stay rotated to their true positions. For scoring,
landmarks are rotated by their shift; for attention, each query has one copy per rank, rotated back
by the shift of the block.

Letters of shapes: C blocks of the cache, M selected blocks, P tokens of a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from lcjax.attention.base import AttentionMetadata, Pass, Pattern, rotate_qk, rotate_queries
from lcjax.attention.landmark.tokens import LOSSES, Landmarks
from lcjax.errors import InputError, NonNegativeInt, OneOf, PositiveInt, Range, check_integer
from lcjax.rope.rotation import rotate
from pallas_kernels import causal, flash, gather, landmark_attention, merge
from pallas_kernels.landmark import older_blocks, own_block

SELECT = ("per_token_and_head", "per_head_and_chunk")

Partial = tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]  # output, log-sum-exp


@Pattern.register_subclass("landmark")
@dataclass(frozen=True)
class Landmark(Pattern):
    """A softmax over blocks, by their landmark tokens, and a softmax inside each block.

    Every `block`-th token is a landmark (`lcjax.attention.landmark.tokens` inserts them). A token
    sees the ordinary tokens of its own block. It also sees those of older blocks, weighted by the
    attention that the block's landmark receives (sec. 3.1). Tokens of one call, as in training, see
    all older blocks of the call. Of earlier calls, they see the `top_k` blocks of the cache with
    the best landmarks, moved to positions at which no distance exceeds the trained length (sec. 3.2
    and 3.2.1). So a long text must be read in calls of `chunk` tokens.
    """

    examples = (
        {"block": 8, "top_k": 12, "train_length": 160},  # every block is selected
        {"block": 5, "top_k": None},
    )
    inserts_tokens = True

    # Tokens, the landmark included (the paper 51; epfml's LLaMA and LCEG 64)
    block: Annotated[int, Range(2)] = 64
    # Cached blocks that a query sees; null: all, at their true positions
    top_k: PositiveInt | None = 5
    # Or per_head_and_chunk: one choice for all tokens of a call
    select: Annotated[str, OneOf(SELECT)] = "per_token_and_head"
    train_length: int = 512  # the trained length in tokens, landmarks included
    token: NonNegativeInt | None = None  # id of the landmark token
    # Targets around landmarks: predict, skip or drop (see tokens.py)
    loss: Annotated[str, OneOf(LOSSES)] = "predict"

    def __post_init__(self):
        super().__post_init__()
        if self.top_k is None:
            return
        check_integer("pattern.train_length", self.train_length, self.block)
        if self.chunk < 1:
            raise InputError(
                f"pattern.top_k={self.top_k} blocks of {self.block} leave no room in "
                f"pattern.train_length={self.train_length}, which must hold top_k + 2 blocks; at "
                f"most {max(self.train_length // self.block - 2, 0)}"
            )

    @property
    def inserted_tokens(self) -> Landmarks:
        if self.token is None:
            raise InputError(
                "pattern.token is not set: give the id of the landmark token; the released models "
                "have 32001, the second one after Llama's vocabulary"
            )
        return Landmarks(self.token, self.block - 1, self.loss, longest=self.chunk)

    @property
    def chunk(self) -> int | None:
        """Maximum tokens of a call: whole blocks of the trained length, less top_k + 1 blocks.

        None: no limit, since nothing is retrieved (`top_k` is None).
        """
        if self.top_k is None:
            return None
        return (self.train_length // self.block - self.top_k - 1) * self.block

    def passes(self, metadata: AttentionMetadata) -> list[Pass]:
        """Returns a causal pass over the keys of a call; `attend` weights them by blocks."""
        return [Pass(metadata.q_positions, metadata.k_positions, causal())]

    def attend(self, q, k, v, metadata):
        self.check_metadata(metadata)
        rotated_q, k = rotate_qk(q, k, metadata)
        if self.top_k is not None and k.shape[1] != q.shape[1]:
            return _attend_cached_blocks(self, q, rotated_q, k, v, metadata.without_layout())
        out, _ = landmark_attention(
            rotated_q,
            k,
            v,
            self.block,
            q_index=metadata.q_index,
            k_index=metadata.k_index,
            q_segments=metadata.q_segments,
            k_segments=metadata.k_segments,
            layout=metadata.layout,
            implementation=metadata.implementation,
        )
        return out


class CachedBlocks(NamedTuple):
    """The blocks that were in the cache before this call."""

    slots: Int[Array, "B C P"]  # the slots of the cache that hold each block
    num_blocks: Int[Array, " B"]  # number of complete blocks, b in the module's docstring
    num_selected: Int[Array, " B"]  # K in the module's docstring
    block: int  # tokens of a block

    @property
    def first_recent(self) -> Int[Array, " B"]:
        """The first block that is scored at its true position."""
        return self.num_blocks - self.num_selected

    @property
    def first_position(self) -> Int[Array, " B"]:
        """The position at which retrieved blocks begin; it may be negative."""
        return (self.first_recent - 1) * self.block

    def scoring_shift(self) -> Int[Array, "B C"]:
        """Returns the number of positions by which each block moves for scoring."""
        ids = jnp.arange(self.slots.shape[1])
        rank = jnp.maximum(0, ids - self.first_recent[:, None] + 1)
        return self.first_position[:, None] + (rank - ids) * self.block

    def selection_shift(self, ids: Int[Array, "B ... M"]) -> Int[Array, "B ... M"]:
        """Returns the number of positions by which the selected blocks `ids` move for attention.

        They move to the positions of ranks 0 .. M - 1.
        """
        first_recent, first_position = (
            jnp.expand_dims(x, tuple(range(1, ids.ndim)))
            for x in (self.first_recent, self.first_position)
        )
        rank = jnp.arange(ids.shape[-1]) + (ids >= first_recent)
        return first_position + (rank - ids) * self.block


class _Inputs(NamedTuple):
    """The inputs of one call over a cache."""

    pattern: Landmark
    metadata: AttentionMetadata
    q: Float[Array, "B T N H"]  # unrotated
    rotated_q: Float[Array, "B T N H"]
    k: Float[Array, "B S K H"]  # the cache with the new tokens; rotated to the true positions
    v: Float[Array, "B S K Hv"]
    q_order: Int[Array, "B T"]
    is_query: Bool[Array, "B T"]  # false for padding

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5


def _attend_cached_blocks(
    pattern: Landmark,
    q: Float[Array, "B T N H"],
    rotated_q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    metadata: AttentionMetadata,
) -> Float[Array, "B T N Hv"]:
    """Computes attention over each query's own block, blocks of the call, and selected blocks."""
    q_order, is_query = _order_and_mask(metadata.q_order, metadata.q_segments, q)
    k_order, is_key = _order_and_mask(metadata.k_order, metadata.k_segments, k)
    inputs = _Inputs(pattern, metadata, q, rotated_q, k, v, q_order, is_query)
    slots, cached = _cached_blocks(inputs, k_order, is_key)
    partials = [
        flash(
            rotated_q,
            k,
            v,
            own_block(pattern.block),
            q_index=metadata.q_index,
            k_index=metadata.k_index,
            q_segments=metadata.q_segments,
            k_segments=metadata.k_segments,
            implementation=metadata.implementation,
        )
    ]
    if q.shape[1] > 1:
        partials.append(_attend_new_blocks(inputs, slots, cached))
    if cached.slots.shape[1]:
        with jax.named_scope("retrieve"):
            partials.append(_attend_selected(inputs, cached))
    return merge(partials)[0]


def _order_and_mask(
    order: Int[Array, "*B T"], segments: Int[Array, "B T"] | None, x: Float[Array, "B T N H"]
) -> tuple[Int[Array, "B T"], Bool[Array, "B T"]]:
    """Returns order indices with a row axis, and whether each entry is a token."""
    shape = x.shape[:2]
    is_token = jnp.ones(shape, bool) if segments is None else segments != 0
    return jnp.broadcast_to(order, shape), is_token


def _cached_blocks(
    inputs: _Inputs, k_order: Int[Array, "B S"], is_key: Bool[Array, "B S"]
) -> tuple[Int[Array, "B S"], CachedBlocks]:
    """Returns the slot of each order index, and the blocks before each row's first new token."""
    (rows, length), block, is_query = k_order.shape, inputs.pattern.block, inputs.is_query
    row_ids, slot_ids = jnp.arange(rows)[:, None], jnp.arange(length, dtype=jnp.int32)
    slots = jnp.zeros((rows, length), jnp.int32)
    slots = slots.at[row_ids, jnp.where(is_key, k_order, length)].set(slot_ids, mode="drop")
    num_tokens = jnp.min(jnp.where(is_query, inputs.q_order, length), 1)
    num_tokens = jnp.where(is_query.any(1), num_tokens, 0).astype(jnp.int32)
    max_blocks = length // block
    block_slots = slots[:, : max_blocks * block].reshape(rows, max_blocks, block)
    num_blocks = num_tokens // block
    num_selected = jnp.minimum(inputs.pattern.top_k, num_blocks)
    return slots, CachedBlocks(block_slots, num_blocks, num_selected, block)


def _attend_new_blocks(inputs: _Inputs, slots: Int[Array, "B S"], cached: CachedBlocks) -> Partial:
    """Returns the partial of new tokens over earlier blocks that end among the new tokens."""
    block, rows = cached.block, jnp.arange(inputs.k.shape[0])[:, None]
    count = min(inputs.q.shape[1] // block + 1, max(cached.slots.shape[1], 1))
    block_ids = cached.num_blocks[:, None] + jnp.arange(count)
    k_order = block_ids[..., None] * block + jnp.arange(block)
    k_order = jnp.minimum(k_order.reshape(len(rows), -1), slots.shape[1] - 1)
    block_slots = jnp.take_along_axis(slots, k_order, 1)
    implementation = inputs.metadata.implementation
    return older_blocks(
        inputs.rotated_q,
        inputs.k[rows, block_slots],
        inputs.v[rows, block_slots],
        block,
        scale=inputs.scale,
        q_numbers=inputs.q_order // block,
        k_numbers=block_ids,
        q_segments=inputs.is_query.astype(jnp.int32),
        k_segments=jnp.ones_like(block_ids),
        # `older_blocks` has no reference implementation.
        implementation=None if implementation == "reference" else implementation,
    )


def _attend_selected(inputs: _Inputs, cached: CachedBlocks) -> Partial:
    """Returns the partial over the selected blocks of the cache."""
    pattern, q, k, v, scale = inputs.pattern, inputs.q, inputs.k, inputs.v, inputs.scale
    rotation, positions = inputs.metadata.rotation, inputs.metadata.q_positions
    landmarks = gather.landmarks(k, cached.slots)
    landmarks = rotate(landmarks, cached.scoring_shift(), rotation.inv_freq)
    exists = jnp.arange(cached.slots.shape[1]) < cached.num_blocks[:, None]
    per_token = pattern.select == "per_token_and_head"
    per = "token_and_head" if per_token else "head_and_chunk"
    # In the first layer all landmarks are the same vector, so ties are common.
    block_ids, is_valid = gather.best_blocks(
        inputs.rotated_q,
        landmarks,
        pattern.top_k,
        per,
        is_query=inputs.is_query,
        exists=exists,
        scale=scale,
    )
    shift, rows = cached.selection_shift(block_ids), jnp.arange(len(block_ids))
    rows = jnp.expand_dims(rows, tuple(range(1, block_ids.ndim)))
    slots = cached.slots[rows, block_ids]
    elements = q.shape[0] * q.shape[2] * slots.shape[-1] * slots.shape[-2]
    elements *= k.shape[3] + v.shape[3]

    def attend_query(query, position, shift, is_valid, keys, values):
        size = query.shape[-1]
        copies = jnp.broadcast_to(query[:, :, None], (*shift.shape, size))
        moved = (position[:, None, None] - shift).reshape(len(query), -1)
        copies = rotate_queries(copies.reshape(*moved.shape, 1, size), moved, rotation)
        return _attend_blocks(copies.reshape(*shift.shape, size), keys, values, is_valid, scale)

    if per_token:

        def attend_one(query_inputs):
            *arrays, slots = query_inputs
            return attend_query(*arrays, gather.tokens(k, slots), gather.tokens(v, slots))

        query_inputs = (q, positions, shift, is_valid, slots)
    else:
        keys, values = gather.tokens(k, slots), gather.tokens(v, slots)

        def attend_one(query_inputs):
            return attend_query(*query_inputs, shift, is_valid, keys, values)

        query_inputs = (q, positions)
    out, lse = gather.by_query(attend_one, query_inputs, elements)
    return out, jnp.where(inputs.is_query[..., None], lse, -jnp.inf)


def _attend_blocks(
    q: Float[Array, "B N M H"],
    keys: Float[Array, "B N M P H"],
    values: Float[Array, "B N M P Hv"],
    is_valid: Bool[Array, "B N M"],
    scale: float,
) -> tuple[Float[Array, "B N Hv"], Float[Array, "B N"]]:
    """Returns the grouped softmax (out, lse) of one query per row, with a copy for each block."""
    logits = scale * gather.einsum("BNMH,BNMPH->BNMP", q, keys)
    landmark_logits = jnp.where(is_valid, logits[..., -1], -jnp.inf)
    lse = jax.nn.logsumexp(landmark_logits, -1)
    block_weights = jnp.exp(landmark_logits - jnp.where(lse > -jnp.inf, lse, 0.0)[..., None])
    weights = block_weights[..., None] * jax.nn.softmax(logits[..., :-1], -1)
    weights = weights.astype(values.dtype)
    out = gather.einsum("BNMP,BNMPH->BNH", weights, values[..., :-1, :])
    return out.astype(q.dtype), lse
