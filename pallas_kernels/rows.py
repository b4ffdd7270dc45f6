"""Pairs of a token and one of its choices, such as an expert or a block of keys, grouped by choice.

Each pair is a row of an array. Rows with the same choice lie together and fill whole blocks, so
that a kernel computes a block with one matrix or one block of keys. Floats are moved by gathers
only, forward and backward, so results do not depend on the order in which a device adds numbers.

Letters: M tokens, k choices of each, E possible choices, R rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_FEW_ROWS = 16  # minimum rows of a block, unless there are fewer pairs than choices
_MANY_ROWS = 512  # maximum rows of a block: larger products are no faster, and need more padding


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("sizes", "token", "pair", "places"),
    meta_fields=("block",),
)
@dataclass(frozen=True, eq=False)
class Groups:
    """An arrangement of pairs (token, choice) in R rows, grouped by choice.

    The group of a choice fills whole blocks; its last rows may be padding.
    """

    sizes: Int[Array, " E"]  # rows of each group, multiples of `block`
    block: int  # rows of a block
    token: Int[Array, " R"]  # token of each row; M for padding
    pair: Int[Array, " R"]  # index in [M k] of each row's pair; M k for padding
    places: Int[Array, "M k"]  # row of each pair; R for choices outside 0 ... E - 1


def block_rows(pairs: int, count: int) -> int:
    """Returns the number of rows of a block for pairs with `count` possible choices.

    It is about a quarter of a mean group, so that padding adds an eighth of the work on average. A
    few pairs get one block each: reading weights then takes most of the time, and the weights of
    unused experts are not read.
    """
    if pairs <= count:
        return 1
    return min(max(_FEW_ROWS, 2 ** int(math.log2(pairs / (4 * count) + 1))), _MANY_ROWS)


def max_rows(pairs: int, count: int, block: int | None = None) -> int:
    """Returns the rows of the most blocks that pairs with `count` possible choices can need.

    In the worst case the last block of every group has one row.

    Args:
      pairs: number of pairs.
      count: number of possible choices.
      block: rows of a block; None: those of `block_rows`.
    """
    block = block_rows(pairs, count) if block is None else block
    groups = min(count, pairs)
    return block * (groups + (pairs - groups) // block)


def group_rows(chosen: Int[Array, "M k"], count: int, block: int | None = None) -> Groups:
    """Groups the pairs of each token and each of its choices by choice.

    Args:
      chosen: the choices of tokens; those outside 0 ... count - 1 are in no group.
      count: number of possible choices, E.
      block: rows of a block; None: those of `block_rows`.
    """
    tokens, top_k = chosen.shape
    pairs = tokens * top_k
    block = block_rows(pairs, count) if block is None else block
    rows = max_rows(pairs, count, block)
    choice = chosen.reshape(-1)
    choice = jnp.where((choice >= 0) & (choice < count), choice, count)  # others come last
    order = jnp.argsort(choice, stable=True)
    sizes = jnp.zeros(count + 1, jnp.int32).at[choice].add(1)[:count]
    padded = -(-sizes // block) * block
    starts, padded_starts = jnp.cumsum(sizes) - sizes, jnp.cumsum(padded) - padded
    rank = (
        jnp.zeros(pairs, jnp.int32)
        .at[order]
        .set(jnp.arange(pairs, dtype=jnp.int32), unique_indices=True)
    )
    inner = jnp.minimum(choice, count - 1)
    places = jnp.where(choice < count, padded_starts[inner] + rank - starts[inner], rows)
    owner = jnp.repeat(jnp.minimum(block_owners(padded, rows // block, block), count - 1), block)
    offset = jnp.arange(rows, dtype=jnp.int32) - padded_starts[owner]
    is_pair = offset < sizes[owner]
    pair = jnp.where(is_pair, order[jnp.where(is_pair, starts[owner] + offset, 0)], pairs)
    return Groups(padded, block, pair // top_k, pair, places.reshape(chosen.shape))


def block_owners(sizes: Int[Array, " E"], blocks: int, block: int) -> Int[Array, " B"]:
    """Returns the group of each block of rows; E for blocks after the last group."""
    starts = block * jnp.arange(blocks, dtype=jnp.int32)
    return (jnp.cumsum(sizes)[None] <= starts[:, None]).sum(1, dtype=jnp.int32)


@jax.custom_vjp
def take_rows(
    x: Float[Array, "M D"], index: Int[Array, " R"], places: Int[Array, "M k"]
) -> Float[Array, "R D"]:
    """Returns the rows x[index]; any row for an index of M, since a fill would copy the result.

    Args:
      x: the rows.
      index: the row of x for each row of the result.
      places: the rows of the result that copy each row of x; R: no such row. The gradient gathers
        these rows. JAX's own rule would scatter and add, in an order that is not deterministic on
        GPUs.
    """
    return jnp.take(x, index, axis=0, mode="clip")


def _take_forward(x, index, places):
    return take_rows(x, index, places), places


def _take_backward(places, dy):
    return _sum_rows(dy, places).astype(dy.dtype), None, None


take_rows.defvjp(_take_forward, _take_backward)


@jax.custom_vjp
def combine_rows(
    rows: Float[Array, "R D"], weights: Float[Array, "M k"], groups: Groups
) -> Float[Array, "M D"]:
    """Returns the float32 sum of the rows of each token's pairs, times the weights of pairs."""
    return _sum_rows(rows, groups.places, weights)


def _combine_forward(rows, weights, groups):
    return combine_rows(rows, weights, groups), (rows, weights, groups)


def _combine_backward(saved, dy):
    rows, weights, groups = saved
    of_rows = jnp.take(weights.reshape(-1), groups.pair, mode="fill", fill_value=0)[:, None]
    of_rows *= jnp.take(dy.astype(rows.dtype), groups.token, axis=0, mode="clip")
    of_weights = [(dy * row).sum(-1) for row in _rows_of_tokens(rows, groups.places)]
    return of_rows.astype(rows.dtype), jnp.stack(of_weights, 1), None


combine_rows.defvjp(_combine_forward, _combine_backward)


def _sum_rows(
    rows: Float[Array, "R D"],
    places: Int[Array, "M k"],
    weights: Float[Array, "M k"] | None = None,
) -> Float[Array, "M D"]:
    """Returns the float32 sum of the rows at k places, times their weights; R: no row."""
    total = jnp.zeros((len(places), rows.shape[1]), jnp.float32)
    for number, row in enumerate(_rows_of_tokens(rows, places)):
        total += row if weights is None else row * weights[:, number, None]
    return total


def _rows_of_tokens(rows: jax.Array, places: jax.Array) -> Iterator[Float[Array, "M D"]]:
    """Yields the rows at the first, second, ... place of each token in float32; R: zeros.

    One after the other, so that no float32 array of all k rows of a token exists. TPUs would also
    pad its axis of k.
    """
    for place in places.T:
        row = jnp.take(rows, place, axis=0, mode="clip").astype(jnp.float32)
        yield jnp.where((place < len(rows))[:, None], row, 0)
