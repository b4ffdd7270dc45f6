"""Selection of the best blocks of keys: summaries, scores, the best k, and their tokens.

One vector summarises a block, such as its last key, the landmark. Queries are scored against
summaries instead of keys, and only the tokens of the best blocks are gathered.

Letters: C blocks, M selected blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# At most this many elements are gathered at a time: 64 MB in float32.
BUDGET = 2**24
SCOPES = ("token_and_head", "head_and_chunk", "chunk")
# Scores count as equal if they differ by less than this fraction of |q| |summary|. Rounding of
# float32 through some tens of layers changes them by 2^-16 of it, products of bfloat16 by 2^-12.
TIE = 2.0**-12
FEW = 64  # as many largest values are found by sorting


def best_blocks(
    q,
    summary,
    count: int,
    per: str = "token_and_head",
    *,
    is_query=None,
    exists=None,
    scale=1.0,
    dtype=None,
):
    """Returns (ids, is_valid) [..., M] of the `count` blocks whose summaries match queries best.

    Scores that differ by no more than their rounding error count as equal, and the later of equal
    blocks are chosen. Otherwise rounding would decide between blocks with identical summaries, such
    as all landmarks in the first layer, and the choice would depend on the batch and the compiler.

    Args:
      q: float [B, T, N, H].
      summary: float [B, C, K, H]; K divides N.
      count: number of blocks; M = min(count, C).
      per: the queries that share a choice, as in `pooled`.
      is_query: bool [B, T], queries that are not padding; None: all.
      exists: bool [B, C], blocks that may be chosen; None: all.
      scale: factor of the products; it matters for "head_and_chunk", which applies a softmax.
      dtype: of the layers before q, whose rounding decides which scores are equal; None: that of q.

    Returns:
      int32 ids in ascending order, and whether each is a block: [B, T, N, M] for
      "token_and_head", [B, N, M] for "head_and_chunk", [B, M] for "chunk".
    """
    margin = tie(dtype or q.dtype) * scale * _score_bound(q, summary, exists)
    x = pooled(scale * scores(q, summary), per, is_query, exists)
    if per == "head_and_chunk":  # rounding changes both the score and the softmax's sum
        if is_query is not None:
            margin = jnp.where(is_query[..., None, None], margin, 0.0)
        margin = 2 * margin.max(1)
    else:
        margin = pooled(margin, per, is_query)
    if exists is not None:
        exists = jnp.expand_dims(exists, tuple(range(1, x.ndim - 1)))
    return best(x, count, exists, margin=margin)


def tie(dtype) -> float:
    """Returns the share of a bound of scores, computed in `dtype`, that rounding may change."""
    return max(TIE, float(jnp.finfo(dtype).eps) / 8)


def lengths(x):
    """Returns the float32 lengths [...] of vectors [..., H], which bound their products."""
    return jnp.linalg.norm(x.astype(jnp.float32), axis=-1)


def is_listed(ids, is_valid, count: int):
    """Returns whether 0 ... count - 1 are among the valid ids [..., M]: bool [..., count]."""
    flat = jnp.where(is_valid, ids, count).reshape(-1, ids.shape[-1])
    rows = jnp.arange(len(flat))[:, None]
    listed = jnp.zeros((len(flat), count), bool).at[rows, flat].set(True, mode="drop")
    return listed.reshape(*ids.shape[:-1], count)


def _score_bound(q, summary, exists=None):
    """Returns |q| times the largest |summary|, a bound of |`scores`|: float32 [B, T, N, 1]."""
    size = [
        jnp.linalg.norm(lax.stop_gradient(x).astype(jnp.float32), axis=-1) for x in (q, summary)
    ]
    longest = size[1] if exists is None else jnp.where(exists[..., None], size[1], 0.0)
    longest = jnp.repeat(longest.max(1), q.shape[2] // summary.shape[2], axis=-1)  # [B, N]
    return (size[0] * longest[:, None])[..., None]


def landmarks(k, slots):
    """Returns the last key of every block, [B, C, K, H], of k [B, S, K, H].

    Args:
      slots: int [B, C, block], the slots of the tokens of every block.
    """
    return jax.vmap(lambda x, at: jnp.take(x, at, axis=0, mode="clip"))(k, slots[..., -1])


def einsum(equation: str, x, y):
    """Computes an einsum with float32 sums; accelerators do not round float32 operands."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(equation, x, y, precision=precision, preferred_element_type=jnp.float32)


def scores(q, summary):
    """Returns the unscaled float32 products [B, T, N, C] of q and of summaries [B, C, K, H]."""
    grouped = q.reshape(*q.shape[:2], summary.shape[2], -1, q.shape[3])
    x = einsum("BTKGH,BCKH->BTKGC", grouped, summary.astype(q.dtype))
    return x.reshape(*q.shape[:3], -1)


def pooled(x, per: str, is_query=None, exists=None):
    """Returns scores [B, T, N, C] pooled over the queries that share a choice.

    "token_and_head": unchanged. "head_and_chunk": [B, N, C], the largest value over the chunk's
    tokens of a log-softmax over blocks (Landmark attention's offloaded cache). "chunk": [B, C], the
    mean over tokens, summed over heads (InfLLM).

    Queries where is_query, bool [B, T], is false do not count in the last two. "head_and_chunk"
    leaves blocks where exists, bool [B, C], is false out of its softmax.
    """
    if per not in SCOPES:
        raise ValueError(f"pooled(per={per!r}): choose one of {', '.join(SCOPES)}")
    if per == "token_and_head":
        return x
    is_query = jnp.ones(x.shape[:2], bool) if is_query is None else is_query
    if per == "chunk":
        total = jnp.where(is_query[..., None, None], x, 0.0).sum((1, 2))
        return total / jnp.maximum(is_query.sum(1), 1)[:, None]
    if exists is not None:
        x = jnp.where(exists[:, None, None], x, -jnp.inf)
        x = jnp.where(exists.any(-1)[:, None, None, None], x, 0.0)
    return jnp.where(is_query[..., None, None], jax.nn.log_softmax(x, -1), -jnp.inf).max(1)


def best(x, count: int, exists=None, margin=0.0):
    """Returns (ids, is_valid) [..., M] of the `count` blocks with the highest scores [..., C].

    M = min(count, C). ids are ascending. If fewer blocks exist, the remaining entries are not valid
    and have id 0.

    Args:
      exists: bool, broadcastable to x, blocks that may be chosen; None: all.
      margin: [..., 1]. Scores within it of the lowest chosen score count as equal; of these the
        later blocks are chosen.
    """
    return listed(is_best(x, count, exists, margin), count)


def listed(is_chosen, count: int):
    """Returns (ids, is_valid) [..., M] of up to `count` chosen blocks, as `best` does.

    Args:
      is_chosen: bool [..., C]; at most `count` blocks of a row are chosen.
    """
    blocks = is_chosen.shape[-1]
    count = min(count, blocks)
    if count <= FEW:
        numbers = jnp.where(is_chosen, jnp.arange(blocks, dtype=jnp.int32), blocks)
        ids = -lax.top_k(-numbers, count)[0]
    else:  # the place at which the number of chosen blocks becomes 1, 2, ...
        flat = jnp.cumsum(is_chosen, -1, dtype=jnp.int32).reshape(-1, blocks)
        places = jnp.arange(1, count + 1, dtype=jnp.int32)
        ids = jax.vmap(lambda x: jnp.searchsorted(x, places).astype(jnp.int32))(flat)
        ids = ids.reshape(*is_chosen.shape[:-1], count)
    is_valid = ids < blocks
    return jnp.where(is_valid, ids, 0), is_valid


def kth_largest(x, k: int):
    """Returns the k-th largest of the float32 values of each row, [..., C] -> [..., 1].

    Sorting is slow where k is large. For more than `FEW` the bits of the value are found, two at a
    time, from how many values are at least as large: 48 counts in 16 passes.
    """
    x = x.astype(jnp.float32)
    if k <= FEW:
        return lax.top_k(x, k)[0][..., -1:]
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    order = jnp.where(bits >= sign, ~bits, bits | sign)  # sorted as the values are

    def add_bits(number, found):
        place, start = (30 - 2 * number).astype(jnp.uint32), found
        for two in (1, 2, 3):  # the largest that enough values reach
            larger = start | (jnp.uint32(two) << place)
            enough = (order >= larger).sum(-1, keepdims=True, dtype=jnp.int32) >= k
            found = jnp.where(enough, larger, found)
        return found

    found = lax.fori_loop(0, 16, add_bits, jnp.zeros((*x.shape[:-1], 1), jnp.uint32))
    bits = jnp.where(found >= sign, found ^ sign, ~found)
    return lax.bitcast_convert_type(bits, jnp.float32)


def is_best(x, count: int, exists=None, margin=0.0):
    """Returns whether each block is one that `best` chooses, bool [..., C]."""
    if exists is not None:
        x = jnp.where(exists, x, -jnp.inf)
    count = min(count, x.shape[-1])
    least = kth_largest(x, count)
    above = x > least + margin
    equal = (x >= least - margin) & ~above & (x > -jnp.inf)
    needed = count - above.sum(-1, keepdims=True, dtype=jnp.int32)
    return above | _last_of(equal, needed)


def _last_of(is_one, count):
    """Returns the last `count` [..., 1] true entries of each row, bool [..., C].

    Entries of long rows are counted in tiles of 128 first, since their cumulative sums are slow.
    """
    if is_one.shape[-1] <= 1024:
        return is_one & (_sums_behind(is_one.astype(jnp.int32)) <= count)
    tiles = jnp.pad(is_one, [(0, 0)] * (is_one.ndim - 1) + [(0, -is_one.shape[-1] % 128)])
    tiles = tiles.reshape(*is_one.shape[:-1], -1, 128)
    behind = _sums_behind(tiles.sum(-1, dtype=jnp.int32))  # from each tile on
    fits = behind <= count
    first = (~fits).sum(-1, keepdims=True, dtype=jnp.int32)
    before = jnp.maximum(first - 1, 0)  # the tile that does not fit as a whole
    tile = jnp.take_along_axis(tiles, before[..., None], axis=-2)[..., 0, :]
    rest = jnp.where(first < fits.shape[-1], jnp.take_along_axis(behind, first, -1, mode="clip"), 0)
    skipped = ((_sums_behind(tile.astype(jnp.int32)) + rest) > count).sum(-1, keepdims=True)
    start = 128 * before + jnp.where(first > 0, skipped, 0)
    return is_one & (jnp.arange(is_one.shape[-1]) >= start)


def _sums_behind(x):
    """Returns the sums of each row from each entry on."""
    return jnp.cumsum(x[..., ::-1], -1)[..., ::-1]


def tokens(x, slots):
    """Returns x [B, S, K, H] at the slots of each query head, [B, ..., N, M, block, H].

    Args:
      slots: int [B, ..., N, M, block]; every query head reads its own slots of its key head.
    """
    heads = slots.shape[-3]
    head = jnp.arange(heads) // (heads // x.shape[2])

    def of_row(x, slots):
        return x.at[slots, head[:, None, None]].get(mode="clip")

    return jax.vmap(of_row)(x, slots)


def by_query(run: Callable[[Any], Any], arrays, elements: int):
    """Applies `run` to every query, a few queries at a time: arrays [B, T, ...] -> [B, T, ...].

    Args:
      run: a function from arrays [B, ...] to arrays [B, ...].
      elements: the number of elements that `run` gathers for one query of the whole batch. As many
        queries run together as stay within `BUDGET` elements, at least one.
    """
    num_queries = max(1, BUDGET // max(1, elements))
    first = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), arrays)
    length = jax.tree.leaves(first)[0].shape[0]
    results = lax.map(run, first, batch_size=min(num_queries, length))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), results)


def by_tile(run: Callable[..., Any], arrays, elements: int, shared: tuple = ()):
    """Applies `run` to tiles of queries, one after the other: arrays [B, T, ...] -> [B, T, ...].

    Unlike `by_query`, `run` has all queries of a tile, which read the keys together.

    Args:
      run: a function from arrays [B, t, ...], and `shared`, to arrays [B, t, ...].
      elements: the largest arrays of `run` have so many numbers for one query of the whole batch.
        A tile has as many queries as stay within `BUDGET` numbers, at least one.
      shared: as in `in_tiles`.
    """
    length = jax.tree.leaves(arrays)[0].shape[1]
    size = min(length, max(1, BUDGET // max(1, elements)))
    return in_tiles(run, arrays, -(-length // size), shared)


def in_tiles(run: Callable[..., Any], arrays, count: int, shared: tuple = ()):
    """Applies `run` to `count` tiles of queries, as `by_tile`; the last one is filled with zeros.

    Args:
      shared: arrays that every tile reads, whose gradients are added up in float32.
    """
    if count == 1:
        return run(arrays, *shared)
    length = jax.tree.leaves(arrays)[0].shape[1]
    size = -(-length // count)
    dtypes, wide = [x.dtype for x in shared], [x.astype(jnp.float32) for x in shared]

    def split(x):
        x = jnp.pad(x, [(0, 0), (0, count * size - length)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(len(x), count, size, *x.shape[2:]).swapaxes(0, 1)

    def of_tile(tile):
        return run(tile, *(x.astype(dtype) for x, dtype in zip(wide, dtypes, strict=True)))

    results = lax.map(of_tile, jax.tree.map(split, arrays))
    return jax.tree.map(
        lambda x: x.swapaxes(0, 1).reshape(x.shape[1], -1, *x.shape[3:])[:, :length], results
    )
