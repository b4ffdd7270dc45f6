"""Attention of prompts over chosen blocks of keys; blocks begin at the first token of a document.

Rows are padded, and a packed row holds several documents, so blocks of slots are no blocks of a
document. `attend_blocks` therefore moves the tokens of one document of each row to slot 0, lets the
pattern choose blocks there, and moves the outputs back.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Num

from lcjax.attention.base import AttentionMetadata, Pass, Pattern, rotate_qk
from pallas_kernels import causal, flash, tables


class BlockedPrompt(NamedTuple):
    """One document of each row in whole blocks; T and S are multiples of the block size.

    Key slot i holds the token with order index i, and query slot i the one with order index
    first + i. Slots without a token hold zeros.
    """

    q: Float[Array, "B T N H"]  # rotated
    k: Float[Array, "B S K H"]  # rotated
    v: Float[Array, "B S K Hv"]
    is_query: Bool[Array, "B T"]
    is_key: Bool[Array, "B S"]
    first: Int[Array, " B"]  # order index of query slot 0, a multiple of the block size
    of_queries: tuple[Num[Array, "B T n m"], ...] = ()  # what a choice reads beside q and k
    of_keys: tuple[Num[Array, "B S n m"], ...] = ()


class PromptHead(NamedTuple):
    """What one query head of one row chooses by."""

    q: Float[Array, "T H"]
    k: Float[Array, "S H"]
    is_query: Bool[Array, " T"]
    is_key: Bool[Array, " S"]
    first: Int[Array, ""]


class PromptBlocks(Pattern):
    """A pattern whose blocks of queries choose blocks of keys, in prompts only.

    Calls with fewer than `block` queries, such as decoding, see all keys.
    """

    needs_whole_prompt: ClassVar[bool] = True
    is_causal: ClassVar[bool] = False

    block: int  # tokens of a block

    @abc.abstractmethod
    def choose(self, head: PromptHead) -> Bool[Array, "nq nk"]:
        """Returns which blocks of keys each block of queries sees; see `attend_blocks`."""

    def passes(self, metadata: AttentionMetadata) -> list[Pass]:
        """Returns a pass of full attention."""
        return [Pass(metadata.q_positions, metadata.k_positions, causal())]

    def attend(self, q, k, v, metadata):
        if q.shape[1] < self.block:
            return super().attend(q, k, v, metadata)
        self.check_metadata(metadata)
        return attend_blocks(q, k, v, metadata, self.block, self.choose)


def ranks(scores: Float[Array, "... M"]) -> Int[Array, "... M"]:
    """Returns the place of each score among those of its row, the greatest and earliest first."""
    return jnp.argsort(jnp.argsort(-scores, axis=-1, stable=True), axis=-1)


def attend_blocks(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    metadata: AttentionMetadata,
    block: int,
    choose: Callable[[PromptHead], Bool[Array, "nq nk"]],
) -> Float[Array, "B T N Hv"]:
    """Computes `attend_chosen` for a choice of one head.

    Args:
      q, k, v: unrotated queries and keys, and values.
      metadata: positions, documents, rotation and kernel options.
      block: tokens of a block.
      choose: maps one head of one document to the blocks of keys that each block of queries sees.
        Blocks after the own one do not count.

    Returns:
      The output, in the dtype of `q`.
    """
    choose_all = functools.partial(_map_heads, choose)
    return attend_chosen(q, k, v, metadata, block, choose_all)


def attend_chosen(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    metadata: AttentionMetadata,
    block: int,
    choose: Callable[[BlockedPrompt], Bool[Array, "B N nq nk"]],
    of_queries: Sequence[Num[Array, "B T n m"]] = (),
    of_keys: Sequence[Num[Array, "B S n m"]] = (),
) -> Float[Array, "B T N Hv"]:
    """Computes causal attention in which each block of queries sees the chosen blocks of keys.

    Documents of a packed row are computed one after another, each at the cost of the whole row, in
    a loop that has no gradient.

    Args:
      q, k, v: unrotated queries and keys, and values.
      metadata: positions, documents, rotation and kernel options.
      block: tokens of a block.
      choose: maps one document of each row to the blocks of keys that each block of queries sees.
        Blocks after the own one do not count.
      of_queries, of_keys: numbers of queries and of keys that `choose` reads beside q and k.

    Returns:
      The output, in the dtype of `q`.
    """
    q, k = rotate_qk(q, k, metadata)
    q_order = jnp.broadcast_to(metadata.q_order, q.shape[:2])
    k_order = jnp.broadcast_to(metadata.k_order, k.shape[:2])

    def attend_document(is_query, is_key):
        arrays = [q, *of_queries], [k, v, *of_keys]
        prompt, slots = _to_blocks(*arrays, q_order, k_order, is_query, is_key, block)
        out = _attend(prompt, metadata, block, choose)
        out = jnp.take_along_axis(out, slots[:, :, None, None], axis=1)
        return jnp.where(is_query[:, :, None, None], out, 0)

    if metadata.q_segments is None:
        return attend_document(jnp.ones(q.shape[:2], bool), jnp.ones(k.shape[:2], bool))
    documents = _number_documents(metadata.q_segments)

    def add_document(number, out):
        is_query = documents == number
        segment = jnp.max(jnp.where(is_query, metadata.q_segments, 0), axis=1, keepdims=True)
        is_key = (metadata.k_segments == segment) & (segment != 0)
        return out + attend_document(is_query, is_key)

    out = jnp.zeros((*q.shape[:3], v.shape[3]), q.dtype)
    return lax.fori_loop(1, documents.max() + 1, add_document, out)


def _number_documents(segments: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Numbers the documents of each row, runs of one segment, from 1; padding is 0."""
    previous = jnp.pad(segments[:, :-1], [(0, 0), (1, 0)])
    is_start = (segments != 0) & (segments != previous)
    return jnp.where(segments != 0, jnp.cumsum(is_start, axis=1, dtype=jnp.int32), 0)


def _to_blocks(
    queries, keys, q_order, k_order, is_query, is_key, block: int
) -> tuple[BlockedPrompt, Int[Array, "B T"]]:
    """Returns one document of each row in blocks, and the query slot of each query."""
    num_queries, num_keys = q_order.shape[1], k_order.shape[1]
    start = jnp.min(jnp.where(is_query, q_order, num_keys), axis=1)
    first = start // block * block
    # Queries that continue a text may begin inside a block, and so lie in one block more.
    size = num_queries if num_queries == num_keys else num_queries + block - 1
    places = q_order - first[:, None]
    (q, *of_queries), query_slots, is_query = _move(queries, places, is_query, size, block)
    (k, v, *of_keys), _, is_key = _move(keys, k_order, is_key, num_keys, block)
    others = tuple(of_queries), tuple(of_keys)
    return BlockedPrompt(q, k, v, is_query, is_key, first, *others), query_slots


def _move(arrays, slots: Int[Array, "B T"], is_token: Bool[Array, "B T"], size: int, block: int):
    """Moves tokens to `slots` of at least `size`; returns arrays, slots, and where tokens are."""
    rows, length = slots.shape
    size = -(-size // block) * block
    places = jnp.where(is_token, slots, size)
    source = jnp.full((rows, size), length, jnp.int32)
    numbers = jnp.arange(length, dtype=jnp.int32)
    source = source.at[jnp.arange(rows)[:, None], places].set(numbers, mode="drop")

    def move(x):
        index = source[:, :, None, None]
        return jnp.take_along_axis(x, index, axis=1, mode="fill", fill_value=0)

    return [move(x) for x in arrays], jnp.clip(places, 0, size - 1), source < length


def _attend(prompt: BlockedPrompt, metadata: AttentionMetadata, block: int, choose):
    """Returns the output [B, T, N, Hv] in the slots of `prompt`."""
    with jax.named_scope("choose"):
        visible = choose(prompt)
        q_blocks, k_blocks = visible.shape[2:]
        current = prompt.first[:, None] // block + jnp.arange(q_blocks)
        is_past = jnp.arange(k_blocks) <= current[:, :, None]
        visible = visible & is_past[:, None]
    with jax.named_scope("attention"):
        out, _ = flash(
            prompt.q,
            prompt.k,
            prompt.v,
            causal(),
            table=tables.from_block_mask(visible, q_block=block, k_block=block),
            q_index=prompt.first[:, None] + jnp.arange(prompt.q.shape[1], dtype=jnp.int32),
            k_index=jnp.arange(prompt.k.shape[1], dtype=jnp.int32),
            q_segments=prompt.is_query.astype(jnp.int32),
            k_segments=prompt.is_key.astype(jnp.int32),
            implementation=metadata.without_layout().implementation,
        )
    return out


def _map_heads(choose, prompt: BlockedPrompt) -> Bool[Array, "B N nq nk"]:
    """Applies `choose` to one head of one row after another: scores of one exist at a time."""
    q, k = (lax.stop_gradient(x) for x in (prompt.q, prompt.k))  # a choice has no gradient
    rows, heads, group = q.shape[0], q.shape[2], q.shape[2] // k.shape[2]

    def choose_one(number):
        row, head = number // heads, number % heads
        return choose(
            PromptHead(
                q[row, :, head],
                k[row, :, head // group],
                prompt.is_query[row],
                prompt.is_key[row],
                prompt.first[row],
            )
        )

    visible = lax.map(choose_one, jnp.arange(rows * heads))
    return visible.reshape(rows, heads, *visible.shape[1:])
