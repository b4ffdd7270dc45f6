"""InfLLM (Xiao et al. 2024, arXiv 2402.04617): retrieval of older blocks; needs no training.

Queries are processed one chunk after another. A chunk needs only the keys of its window and a few
gathered blocks, independent of the length of the text. The chunks of one row are processed in
order, because the summary of a block depends on the attention that its keys received in the window.
The chunks of different rows are processed in parallel.

Letters: Q queries of a chunk, W keys of its window, P keys of a part, C blocks of a text, M chosen
blocks. Keys and values are [B, K, S, H], as in a cache.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Num

from lcjax.attention.base import AttentionMetadata, Pass, Pattern, near_and_far, rotate_queries
from lcjax.attention.cache import FullCache, LayerCache
from lcjax.errors import InputError, NonNegativeInt, PositiveInt
from pallas_kernels import Mask, causal, flash, gather, merge, prefix, window

# (received [B, N, 1, S], summaries [B, N, C, H]) in float32; empty if no block is complete.
_State = tuple[jax.Array, ...]


@Pattern.register_subclass("inf_llm")
@dataclass(frozen=True)
class InfLLM(Pattern):
    """A window, the first tokens, and the most relevant blocks of older tokens.

    Query i sees key j of its window, 0 <= i - j < window, at distance i - j. All older keys are at
    one distance, window - 1: the first `sinks` tokens, the chosen blocks, and tokens that are in no
    complete block yet (sec. 3.1 and 3.2). Tokens after the sinks form blocks of `block` tokens. A
    block can be chosen as soon as the window has passed all of it (in the released code one token
    later). Its summary is, per head, the mean unrotated key of the `representatives` tokens that
    received most attention, summed over the queries that had them in their window. `chunk` tokens
    of a text share one choice: the `top_k` blocks with the greatest product of summary and mean
    query, summed over heads, or separately for every head with `per_head`. A chunk that is read in
    several calls, as in decoding, chooses again in each call.

    The single distance and the choice of representatives follow the released code; the paper has
    distance `window`, and means of logits instead of sums of attention. The masks here are exact
    and disjoint; the released code counts some keys twice in a prompt. All keys stay in device
    memory; the released code moves old blocks to the host and caches the popular ones, which does
    not change the results. With `chunk` above 1, the choice for a token also depends on later
    tokens of its chunk, so perplexities are slightly too low, as in the paper.
    """

    examples = (
        {"window": 9, "sinks": 3, "block": 4, "top_k": 2, "representatives": 2, "chunk": 1},
        {"window": 6, "sinks": 0, "block": 3, "top_k": 3, "representatives": 2, "chunk": 1,
         "per_head": True},
    )  # fmt: skip
    moves_keys = True

    # Keys at their own distance, the token itself included (released: n_local)
    window: PositiveInt = 4096
    sinks: NonNegativeInt = 128  # first tokens that stay visible (n_init)
    block: PositiveInt = 128  # tokens of a block (block_size)
    top_k: PositiveInt = 16  # blocks that are read (topk)
    representatives: PositiveInt = 4  # tokens of a block whose keys form its summary (repr_topk)
    chunk: PositiveInt = 512  # consecutive tokens with one choice (exc_block_size)
    per_head: bool = False  # whether every query head chooses for itself

    def __post_init__(self):
        super().__post_init__()
        if self.representatives > self.block:
            raise InputError(
                f"pattern.representatives={self.representatives} must be at most "
                f"pattern.block={self.block}, the tokens of a block"
            )

    def num_blocks(self, tokens: int | Int[Array, " ..."]) -> int | Int[Array, " ..."]:
        """Returns the number of blocks before the window of the last of `tokens` tokens."""
        return (tokens - self.window - self.sinks) // self.block

    def passes(self, metadata: AttentionMetadata) -> list[Pass]:
        """Returns passes that choose the latest blocks, with as many keys as any other choice."""
        far = prefix(self.sinks) | LatestBlocks(self)
        return near_and_far(metadata, self.window, self.window - 1, far)

    @property
    def layer_cache(self) -> LayerCache:
        return _InfLLMCache(self)

    def state_shapes(self, slots: int, size: int) -> dict[str, tuple[int, int]]:
        """Returns the shapes, for each head, of what is known about a text's keys.

        `received` is the attention that each key received in the window, and `summaries` are those
        of the blocks. There is neither if no block is complete.

        Args:
          slots: number of keys.
          size: channels of a head.
        """
        blocks = self.num_blocks(slots)
        return {"received": (1, slots), "summaries": (blocks, size)} if blocks > 0 else {}

    def attend(self, q, k, v, metadata):
        rows, heads, size = q.shape[0], q.shape[2], q.shape[3]
        shapes = self.state_shapes(k.shape[1], size)
        if shapes and q.shape[1] != k.shape[1]:
            raise InputError(
                f"pattern inf_llm: {q.shape[1]} queries are fewer than the {k.shape[1]} keys, so "
                "the attention to older keys is unknown; give all queries, or use a cache"
            )
        state = tuple(jnp.zeros((rows, heads, *shape), jnp.float32) for shape in shapes.values())
        is_packed = metadata.q_segments is not None
        return _attend_chunks(self, q, k, v, state, metadata, is_packed)[0]


@dataclass(frozen=True)
class _InfLLMCache(FullCache):
    """All keys and values, with the attention that keys received and the summaries of blocks."""

    holds_keys_only: ClassVar[bool] = False
    continues: ClassVar[bool] = False
    shares_slots: ClassVar[bool] = False  # summaries are those of consecutive keys

    inf_llm: InfLLM

    def arrays(self, layer, slots):
        shapes = self.inf_llm.state_shapes(slots, layer.head_dim)
        return super().arrays(layer, slots) | {
            name: jax.ShapeDtypeStruct((layer.num_heads, *shape), jnp.float32)
            for name, shape in shapes.items()
        }

    def attend(self, arrays, q, k, v, pattern, view, metadata):
        if len(arrays) == 2:  # too few slots for a block
            return super().attend(arrays, q, k, v, pattern, view, metadata)
        new = self.append(arrays, k, v, pattern, view, metadata)
        state = arrays["received"], arrays["summaries"]
        pair = new["keys"].swapaxes(1, 2), new["values"].swapaxes(1, 2)
        # Each row of a cache holds one document.
        out, state = _attend_chunks(self.inf_llm, q, *pair, state, metadata, is_packed=False)
        received, summaries = state
        return out, new | {"received": received, "summaries": summaries}


@dataclass(frozen=True)
class LatestBlocks(Mask):
    """Mask of the last `top_k` blocks that a chunk's first query may choose, and of later keys."""

    pattern: InfLLM

    def _first_key(self, q):
        p = self.pattern
        # Multiplied by a comparison, so that it works for Python integers and for arrays.
        blocks = p.num_blocks(q // p.chunk * p.chunk + 1) - p.top_k
        return p.sinks + blocks * (blocks > 0) * p.block

    def element(self, q, k):
        return k >= self._first_key(q)

    def bounds(self, q_lo, q_hi, k_lo, k_hi):
        return k_hi >= self._first_key(q_lo), k_lo >= self._first_key(q_hi)


class _Tokens(NamedTuple):
    """The order indices, documents and positions of tokens."""

    index: Int[Array, "B S"]
    segments: Int[Array, "B S"]  # 0 is padding
    positions: Num[Array, "B S"]


class _Inputs(NamedTuple):
    """The inputs of one call."""

    pattern: InfLLM
    metadata: AttentionMetadata
    q: Float[Array, "B T N H"]
    k: Float[Array, "B K S H"]
    v: Float[Array, "B K S Hv"]
    queries: _Tokens
    keys: _Tokens
    chunk_ids: Int[Array, "B T"]  # the chunk of each query, counted in the call; -1 for padding


class _Chunk(NamedTuple):
    """The queries of one chunk in every row; a row without such a chunk has no valid query."""

    start: Int[Array, " B"]  # the first of Q consecutive queries of the row
    is_query: Bool[Array, "B Q"]  # whether a query belongs to the chunk
    q: Float[Array, "B Q N H"]
    tokens: _Tokens  # [B, Q]
    segment: Int[Array, " B"]  # the document of the chunk
    first_index: Int[Array, " B"]  # order index of the chunk's first query
    base_slot: Int[Array, " B"]  # slot of the first token of the document
    num_blocks: Int[Array, " B"]  # number of blocks to choose from


class _Keys(NamedTuple):
    """Some of the keys that a chunk attends to."""

    k: Float[Array, "B K P H"]  # K or N heads
    v: Float[Array, "B K P Hv"]
    index: Int[Array, "B P"]
    is_valid: Bool[Array, "B P"]
    positions: Num[Array, "B P"]


def _attend_chunks(
    pattern: InfLLM,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    state: _State,
    metadata: AttentionMetadata,
    is_packed: bool,
) -> tuple[Float[Array, "B T N Hv"], _State]:
    """Returns attention, computed chunk by chunk, and the new state.

    With `is_packed` a row may hold several documents.
    """
    pattern.check_metadata(metadata)
    rows, length = q.shape[:2]
    queries = _tokens(metadata.q_order, metadata.q_segments, metadata.q_positions)
    keys = _tokens(metadata.k_order, metadata.k_segments, metadata.k_positions)
    chunk_ids, starts = _split_chunks(queries, pattern.chunk)
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    metadata = metadata.without_layout()
    inputs = _Inputs(pattern, metadata, q, k, v, queries, keys, chunk_ids)
    # One document has at most this many chunks; packed documents may have one for every token.
    max_chunks = 1 + -(-(length - 1) // pattern.chunk)
    rounds = -(-length // max_chunks) if is_packed else 1
    total = max_chunks * rounds
    starts = jnp.pad(starts, [(0, 0), (0, total)], constant_values=length)
    starts = starts[:, :total].T.reshape(rounds, max_chunks, rows)
    ids = jnp.arange(total, dtype=jnp.int32).reshape(rounds, max_chunks)
    step = _skip_empty(length, lambda carry, x: _attend_chunk(inputs, carry, *x))
    steps = _skip_empty(length, lambda carry, x: lax.scan(step, carry, x)[0])
    out = jnp.zeros((*q.shape[:3], v.shape[3]), q.dtype)
    return lax.scan(steps, (out, state), (ids, starts))[0]


def _skip_empty(length: int, update):
    """Returns a scan step that applies `update` only if some row has another chunk."""

    def step(carry, x):
        has_chunk = (x[1] < length).any()
        return lax.cond(has_chunk, update, lambda carry, x: carry, carry, x), None

    return step


def _tokens(index, segments, positions) -> _Tokens:
    segments = jnp.ones(positions.shape, jnp.int32) if segments is None else segments
    return _Tokens(jnp.broadcast_to(index, positions.shape).astype(jnp.int32), segments, positions)


def _split_chunks(queries: _Tokens, chunk: int) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """Returns the chunk of every query (-1: padding), and the sorted starts of chunks (T: none)."""
    index, segments, _ = queries
    previous = jnp.pad(segments[:, :-1], [(0, 0), (1, 0)])
    is_start = (segments != 0) & ((index % chunk == 0) | (segments != previous))
    chunk_ids = jnp.where(segments != 0, jnp.cumsum(is_start, axis=1) - 1, -1)
    length = index.shape[1]
    return chunk_ids, jnp.sort(jnp.where(is_start, jnp.arange(length), length), axis=1)


def _attend_chunk(
    inputs: _Inputs,
    carry: tuple[Float[Array, "B T N Hv"], _State],
    chunk_id: Int[Array, ""],
    start: Int[Array, " B"],
) -> tuple[Float[Array, "B T N Hv"], _State]:
    """Adds the chunk `chunk_id`, which starts at `start`, to the output and the state."""
    (out, state), pattern = carry, inputs.pattern
    chunk = _select_chunk(inputs, chunk_id, start)
    near = _slice_keys(inputs, chunk, _window_start(inputs, chunk), _window_size(inputs, chunk))
    with jax.named_scope("window"):
        q = rotate_queries(chunk.q, chunk.tokens.positions, inputs.metadata.rotation)
        k = inputs.metadata.rotation.rotate(near.k.swapaxes(1, 2), near.positions)
        mask = causal() & window(pattern.window)
        local = _attend_keys(inputs, chunk, q, k, near.v.swapaxes(1, 2), near, mask)
    total = local
    if inputs.k.shape[2] > pattern.window:
        with jax.named_scope("memory"):
            distance = jnp.full(chunk.is_query.shape, pattern.window - 1)
            far_q = rotate_queries(chunk.q, distance, inputs.metadata.rotation)
            parts = _sinks_and_tail(inputs, chunk)
            if state:
                received, summaries = state
                summaries = _update_summaries(inputs, chunk, received, summaries)
                parts.append(_choose_blocks(inputs, chunk, far_q, summaries))
            far = _attend_far(inputs, chunk, far_q, parts)
        total = merge([local, far])
    if state:
        with jax.named_scope("received"):
            weights = _window_weights(inputs, chunk, q, k, near, mask, local[1], total[1])
            received = _add(received, weights[:, :, None], _window_start(inputs, chunk), 3)
        state = received, summaries
    old = _slice(out, chunk.start, chunk.is_query.shape[1], 1)
    new = jnp.where(chunk.is_query[..., None, None], total[0], old)
    return _update(out, new, chunk.start, 1), state


def _select_chunk(inputs: _Inputs, chunk_id: Int[Array, ""], start: Int[Array, " B"]) -> _Chunk:
    pattern, length = inputs.pattern, inputs.chunk_ids.shape[1]
    size = min(pattern.chunk, length)
    start = jnp.minimum(start, length - size)
    tokens = _Tokens(*(_slice(x, start, size, 1) for x in inputs.queries))
    is_query = _slice(inputs.chunk_ids, start, size, 1) == chunk_id
    segment = jnp.where(is_query, tokens.segments, 0).max(1)
    first_index = jnp.where(is_query, tokens.index, 2**30).min(1)
    first_index = jnp.where(is_query.any(1), first_index, 0)
    is_base = (inputs.keys.segments == segment[:, None]) & (inputs.keys.index == 0)
    num_blocks = jnp.maximum(pattern.num_blocks(first_index + 1), 0)
    q = _slice(inputs.q, start, size, 1)
    base_slot = jnp.argmax(is_base, 1)
    return _Chunk(start, is_query, q, tokens, segment, first_index, base_slot, num_blocks)


def _window_start(inputs: _Inputs, chunk: _Chunk) -> Int[Array, " B"]:
    """Returns the first slot of the W keys that the windows of a chunk's queries cover."""
    slots = inputs.k.shape[2]
    start = chunk.base_slot + jnp.maximum(chunk.first_index - inputs.pattern.window + 1, 0)
    return jnp.minimum(start, slots - _window_size(inputs, chunk))


def _window_size(inputs: _Inputs, chunk: _Chunk) -> int:
    return min(inputs.pattern.window + chunk.is_query.shape[1] - 1, inputs.k.shape[2])


def _slice_keys(inputs: _Inputs, chunk: _Chunk, start: Int[Array, " B"], size: int) -> _Keys:
    """Returns `size` keys from slot `start` of each row on, or the last `size` keys."""
    k, v = (_slice(x, start, size, 2) for x in (inputs.k, inputs.v))
    index, segments, positions = (_slice(x, start, size, 1) for x in inputs.keys)
    return _Keys(k, v, index, segments == chunk.segment[:, None], positions)


def _sinks_and_tail(inputs: _Inputs, chunk: _Chunk) -> list[_Keys]:
    """Returns the first tokens, and the tokens after the last block that may be chosen."""
    pattern, slots = inputs.pattern, inputs.k.shape[2]
    sinks = _slice_keys(inputs, chunk, chunk.base_slot, min(pattern.sinks, slots))
    tail_index = pattern.sinks + chunk.num_blocks * pattern.block
    # The first query has less than a block of them, and each later query at most one more.
    size = min(pattern.block + chunk.is_query.shape[1] - 2, slots)
    tail = _slice_keys(inputs, chunk, chunk.base_slot + tail_index, size)
    return [
        sinks._replace(is_valid=sinks.is_valid & (sinks.index < pattern.sinks)),
        tail._replace(is_valid=tail.is_valid & (tail.index >= tail_index[:, None])),
    ]


def _update_summaries(
    inputs: _Inputs,
    chunk: _Chunk,
    received: Float[Array, "B N 1 S"],
    summaries: Float[Array, "B N C H"],
) -> Float[Array, "B N C H"]:
    """Writes the summaries of the blocks that the window has passed since the last chunk.

    The attention received by such a block no longer changes, so recomputing one does no harm.
    """
    pattern = inputs.pattern
    count = min(-(-pattern.chunk // pattern.block), summaries.shape[2])
    start = jnp.maximum(chunk.num_blocks - count, 0)
    slots = _block_slots(pattern, chunk, start[:, None] + jnp.arange(count))  # [B, count, block]
    weights = jax.vmap(lambda x, ids: jnp.take(x, ids, axis=1, mode="clip"))(
        received[:, :, 0], slots
    )
    _, best = lax.top_k(weights, pattern.representatives)
    slots = jnp.take_along_axis(slots[:, None], best, 3)  # [B, N, count, representatives]
    keys = _gather_heads(lax.stop_gradient(inputs.k), slots).astype(jnp.float32).mean(3)
    has_query = chunk.is_query.any(1)[:, None, None, None]
    keys = jnp.where(has_query, keys, _slice(summaries, start, count, 2))
    return _update(summaries, keys, start, 2)


def _block_slots(
    pattern: InfLLM, chunk: _Chunk, block_ids: Int[Array, "B ..."]
) -> Int[Array, "B ... block"]:
    """Returns the slots of the tokens of blocks."""
    base = jnp.expand_dims(chunk.base_slot + pattern.sinks, tuple(range(1, block_ids.ndim + 1)))
    return base + block_ids[..., None] * pattern.block + jnp.arange(pattern.block)


def _choose_blocks(
    inputs: _Inputs,
    chunk: _Chunk,
    far_q: Float[Array, "B Q N H"],
    summaries: Float[Array, "B N C H"],
) -> _Keys:
    """Returns the blocks whose summaries have the greatest product with the mean rotated query."""
    pattern = inputs.pattern
    is_query = chunk.is_query[..., None, None]
    total = jnp.where(is_query, lax.stop_gradient(far_q).astype(jnp.float32), 0.0).sum(1)
    mean = total / jnp.maximum(chunk.is_query.sum(1), 1)[:, None, None]
    exists = jnp.arange(summaries.shape[2]) < chunk.num_blocks[:, None]
    per = "token_and_head" if pattern.per_head else "chunk"
    block_ids, is_valid = gather.best_blocks(
        mean[:, None], summaries.swapaxes(1, 2), pattern.top_k, per, exists=exists
    )
    block_ids, is_valid = (  # [B, N or 1, M]
        x.reshape(len(x), -1, x.shape[-1]) for x in (block_ids, is_valid)
    )
    slots = _block_slots(pattern, chunk, block_ids).reshape(*block_ids.shape[:2], -1)
    if not pattern.per_head:
        slots = jnp.broadcast_to(slots, (len(slots), inputs.k.shape[1], slots.shape[2]))
    # All of them are before the window of every query, and every head has as many valid blocks.
    is_valid = jnp.repeat(is_valid[:, 0], pattern.block, axis=1)
    index = jnp.broadcast_to((chunk.first_index - pattern.window)[:, None], is_valid.shape)
    k, v = (_gather_heads(x, slots) for x in (inputs.k, inputs.v))
    return _Keys(k, v, index, is_valid, index)


def _attend_far(
    inputs: _Inputs, chunk: _Chunk, far_q: Float[Array, "B Q N H"], parts: list[_Keys]
) -> tuple[Float[Array, "B Q N Hv"], Float[Array, "B Q N"]]:
    """Returns the partial (out, lse) over the keys before the window, all at position 0."""
    heads = max(part.k.shape[1] for part in parts)

    def concatenate_heads(name):
        arrays = [getattr(part, name) for part in parts]
        arrays = [jnp.repeat(x, heads // x.shape[1], axis=1) for x in arrays]
        return jnp.concatenate(arrays, 2).swapaxes(1, 2)

    k, v = concatenate_heads("k"), concatenate_heads("v")
    index = jnp.concatenate([part.index for part in parts], 1)
    is_valid = jnp.concatenate([part.is_valid for part in parts], 1)
    keys = _Keys(k, v, index, is_valid, jnp.zeros_like(index))
    k = inputs.metadata.rotation.rotate(k, keys.positions)  # by angle 0, but with the scale
    return _attend_keys(inputs, chunk, far_q, k, v, keys, ~window(inputs.pattern.window))


def _attend_keys(
    inputs: _Inputs,
    chunk: _Chunk,
    q: Float[Array, "B Q N H"],
    k: Float[Array, "B P K H"],
    v: Float[Array, "B P K Hv"],
    keys: _Keys,
    mask: Mask,
) -> tuple[Float[Array, "B Q N Hv"], Float[Array, "B Q N"]]:
    """Returns the partial (out, lse) of a chunk over rotated keys with the indices of `keys`."""
    return flash(
        q, k, v, mask,
        q_index=chunk.tokens.index, k_index=keys.index,
        q_segments=chunk.is_query.astype(jnp.int32), k_segments=keys.is_valid.astype(jnp.int32),
        implementation=inputs.metadata.implementation,
    )  # fmt: skip


def _window_weights(
    inputs: _Inputs,
    chunk: _Chunk,
    q: Float[Array, "B Q N H"],
    k: Float[Array, "B W K H"],
    near: _Keys,
    mask: Mask,
    local_lse: Float[Array, "B Q N"],
    total_lse: Float[Array, "B Q N"],
) -> Float[Array, "B N W"]:
    """Returns the float32 attention that the window's keys receive from the chunk's queries.

    It is the column sum of P' = P exp(local_lse - total_lse), where P are the weights inside the
    window. Since out = P v, the gradient of flash in v is P^T d_out, so d_out = exp(local_lse -
    total_lse) gives the sums. One value channel per query head of a key head keeps the heads apart.
    """
    q, k, local_lse, total_lse = (lax.stop_gradient(x) for x in (q, k, local_lse, total_lse))
    rows, heads, kv_heads = q.shape[0], q.shape[2], k.shape[2]
    group = heads // kv_heads
    # [B, Q, N]
    share = jnp.exp(local_lse - jnp.where(total_lse > -jnp.inf, total_lse, 0.0))
    channel = jnp.tile(jnp.eye(group, dtype=q.dtype), (kv_heads, 1))  # [N, G]
    v = jnp.zeros((rows, k.shape[1], kv_heads, group), k.dtype)
    _, backward = jax.vjp(lambda v: _attend_keys(inputs, chunk, q, k, v, near, mask)[0], v)
    (sums,) = backward(share[..., None].astype(q.dtype) * channel)
    return jnp.moveaxis(sums.reshape(rows, k.shape[1], heads), 1, 2).astype(jnp.float32)


def _gather_heads(x: Float[Array, "B K S H"], slots: Int[Array, "B N ..."]) -> Array:
    """Gathers x at the slots of each head, [B, N, ..., H]; N is K or a multiple of it."""
    head = jnp.arange(slots.shape[1]) // (slots.shape[1] // x.shape[1])
    head = jnp.expand_dims(head, tuple(range(1, slots.ndim - 1)))
    return jax.vmap(lambda x, ids: x.at[head, ids].get(mode="clip"))(x, slots)


def _slice(x: Array, start: Int[Array, " B"], size: int, axis: int) -> Array:
    """Returns `size` entries of an axis from each row's `start` on, or the last `size` entries."""
    return jax.vmap(functools.partial(lax.dynamic_slice_in_dim, slice_size=size, axis=axis - 1))(
        x, start
    )


def _update(x: Array, values: Array, start: Int[Array, " B"], axis: int) -> Array:
    """Returns x with `values` in place of the entries that `_slice` returns."""
    write = functools.partial(lax.dynamic_update_slice_in_dim, axis=axis - 1)
    return jax.vmap(write)(x, values, start)


def _add(x: Array, values: Array, start: Int[Array, " B"], axis: int) -> Array:
    """Returns x with `values` added to the entries that `_slice` returns."""
    return _update(x, _slice(x, start, values.shape[axis], axis) + values, start, axis)
