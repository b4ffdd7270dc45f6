"""Landmark attention: the logit of a block's last token, its landmark, weights the whole block.

The grouped softmax of Mohtashami and Jaggi 2023, arXiv 2305.16300, sec. 3.1. The last token of
every block, its landmark, stands for the block. A first softmax distributes a query's attention
over the ordinary tokens of its own block and the landmarks of older blocks. A second softmax
distributes the weight of each landmark over the ordinary tokens of that block:

    a = softmax over {own ordinary tokens j <= i} and {landmarks of older blocks} of s_ij
    out_i = sum_own a_j v_j + sum_blocks a_landmark(b) sum_{j in b} softmax_{j in b}(s_ij) v_j

The query's own block is ordinary attention. Older blocks are visited once, in O(T) memory: the
outer softmax is a running one (Milakov and Gimelshein 2018), and the inner one needs a single
block.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import dispatch
from pallas_kernels.arguments import check_arrays, on_any_mesh
from pallas_kernels.dispatch import Operands, Spec
from pallas_kernels.flash import flash
from pallas_kernels.masks import Mask, causal, chunks, integer, tail_of, window
from pallas_kernels.online_softmax import merge
from pallas_kernels.sharded import Layout, gathered

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

OLDER = causal() & ~window(1)  # of block numbers: the blocks before the query's own


def older_spec(block: int, scale: float) -> Spec:
    """Returns the static part of the grouped softmax over older blocks."""
    return Spec(OLDER, float(scale), block=block)


def own_block(block: int) -> Mask:
    """Returns the mask of the ordinary tokens of the query's own block, up to the query."""
    return causal() & chunks(block) & ~tail_of(block, 1)


@on_any_mesh
def landmark_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    block: int,
    *,
    scale: float | None = None,
    q_index: Int[Array, "*B T"] | None = None,
    k_index: Int[Array, "*B S"] | None = None,
    q_segments: Int[Array, "B T"] | None = None,
    k_segments: Int[Array, "B S"] | None = None,
    layout: Layout | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
    """Returns attention with the grouped softmax, and the log-sum-exp of its outer softmax.

    The landmark of a block is its last token: order index p with p % block == block - 1.

    Args:
      q: queries; N is a multiple of K.
      k: keys.
      v: values.
      block: the number of tokens of a block, including the landmark.
      scale: None means H ** -0.5.
      q_index, k_index: order indices within the document, shared by all rows or one set per row; by
        default 0, 1, .... The tokens of a row must be in order; padding may lie between them. A
        block whose first key is missing is not seen.
      q_segments, k_segments: documents; 0 is padding.
      layout: as in `flash`; keys of a sharded length are gathered, and must be in order.
      implementation: as in `flash`: a name of `pallas_kernels.dispatch.LANDMARK`, "reference"
        (dense, for tests), or None for the platform's default.

    Returns:
      out in q's dtype and lse in float32, both differentiable.
    """
    positions = dict(q_index=q_index, k_index=k_index)
    positions |= dict(q_segments=q_segments, k_segments=k_segments)
    check_arrays("landmark_attention", q, k, v, scale, **positions)
    block = integer("landmark_attention: block", block, 2)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if layout is not None:
        run = functools.partial(_of_operands, block, scale, implementation)
        rows = [None if x is None else jnp.atleast_2d(jnp.asarray(x)) for x in positions.values()]
        return gathered(run, q, k, v, Operands(*rows), layout)
    if implementation == "reference":
        rows = *_rows(q_index, q_segments, q), *_rows(k_index, k_segments, k)
        return _dense(q, k, v, *rows, block=block, scale=scale)
    options = {"scale": scale, "implementation": implementation}
    own = functools.partial(flash, q, k, v, own_block(block), **positions, **options)
    if k.shape[1] < block or 0 in q.shape[:2]:
        return own()
    if k_index is None and k_segments is None:
        whole = k.shape[1] // block * block
        k, v, numbers, segments = k[:, :whole], v[:, :whole], None, None
    else:
        rows = _rows(k_index, k_segments, k)
        k, v, numbers, segments = _complete_blocks(k, v, *rows, block)
    q_numbers, q_segments = _query_blocks(q, q_index, q_segments, numbers, segments, block)
    old = older_blocks(
        q, k, v, block, q_numbers=q_numbers, k_numbers=numbers,
        q_segments=q_segments, k_segments=segments, **options,
    )  # fmt: skip
    return merge([own(), old])


def _of_operands(block: int, scale: float, implementation, q, k, v, operands: Operands):
    positions = dict(zip(Operands._fields[:4], operands[:4], strict=True))
    options = dict(scale=scale, implementation=implementation)
    return landmark_attention(q, k, v, block, **positions, **options)


def older_blocks(
    q, k, v, block: int, *, scale: float, q_numbers=None, k_numbers=None,
    q_segments=None, k_segments=None, implementation: str | None = None,
):  # fmt: skip
    """Returns the partial attention of `landmark_attention` over blocks before the query's own.

    Args:
      k, v: C whole blocks, [B, C * block, K, H] and [B, C * block, K, Hv].
      q_numbers, k_numbers: int [B, T] and [B, C], block numbers within the document; None means
        t // block and 0, 1, ...
      k_segments: int [B, C], the segment of each block.
      implementation: as in `landmark_attention`, without "reference".
    """
    operands = Operands(q_numbers, k_numbers, q_segments, k_segments)
    return _older(q, k, v, operands, (implementation, older_spec(block, scale)))


def _rows(index, segments, k):
    """Returns order indices and segments [B, S]; by default 0, 1, ... and 1."""
    shape = k.shape[:2]
    index = jnp.arange(shape[1], dtype=jnp.int32) if index is None else index
    segments = jnp.ones(shape, jnp.int32) if segments is None else segments
    return jnp.broadcast_to(index, shape), segments


def _query_blocks(q, index, segments, k_numbers, k_segments, block: int):
    if index is None and k_numbers is None:
        return None, None
    index, rows = _rows(index, segments, q)
    return index // block, None if k_segments is None else rows


def _complete_blocks(k, v, index, segments, block: int):
    """Gathers the complete blocks: k, v [B, C * block, ...], numbers and segments [B, C].

    C = S // block is enough, because the blocks of a row do not overlap. Unused entries have
    segment 0.
    """
    (rows, length), offset = index.shape, index % block
    at, count = jnp.arange(length, dtype=jnp.int32), length // block
    place, token_at = _without_padding(segments)
    closes, close = _closing(index, segments, block)
    rank = jnp.cumsum(closes, axis=1, dtype=jnp.int32) - closes
    row = jnp.arange(rows)[:, None]
    ends = jnp.full((rows, count), length, jnp.int32)
    ends = ends.at[row, jnp.where(closes, rank, count)].set(at, mode="drop")
    exists, end = ends < length, jnp.minimum(ends, length - 1)
    first = jnp.take_along_axis(place, end, 1) - (block - 1)
    places = first[..., None] + jnp.arange(block, dtype=jnp.int32)
    places = jnp.where(exists[..., None], places, length).reshape(rows, -1)
    slots = _take(token_at, places, length)
    back = jnp.where(close < length, rank * block + offset, count * block)
    numbers = jnp.take_along_axis(index, end, 1) // block
    k_segments = jnp.where(exists, jnp.take_along_axis(segments, end, 1), 0)
    return _gather(k, slots, back), _gather(v, slots, back), numbers, k_segments


def _closing(index, segments, block: int):
    """Returns which tokens end a complete block, and the slot of the last token of each block.

    bool and int32 [B, S]; the slot is S for tokens of an incomplete block and for padding.
    """
    length, offset = index.shape[1], index % block
    place, token_at = _without_padding(segments)
    closes = (segments != 0) & (offset == block - 1) & (place >= block - 1)
    close = _take(token_at, place + block - 1 - offset, length)
    is_closed = (segments != 0) & _take(closes, close, False)
    return closes, jnp.where(is_closed, close, length)


def _without_padding(segments):
    """Returns each slot's rank among the tokens of its row, and the slot of the token of each rank.

    Both are int32 [B, S]; the slot is S for ranks that no token has. While rows of several lengths
    are generated, the landmark of one row is padding in the others, so padding may lie inside
    blocks.
    """
    rows, length = segments.shape
    is_token = segments != 0
    place = jnp.cumsum(is_token, axis=1, dtype=jnp.int32) - 1
    token_at = jnp.full((rows, length), length, jnp.int32)
    at, row = jnp.arange(length, dtype=jnp.int32), jnp.arange(rows)[:, None]
    return place, token_at.at[row, jnp.where(is_token, place, length)].set(at, mode="drop")


def _take(x, index, beyond):
    """Returns x [B, S] at index [B, M]; `beyond` where an index is at least S."""
    return jnp.take_along_axis(x, index, 1, mode="fill", fill_value=beyond)


@jax.custom_vjp
def _gather(x, slots, back):
    """Returns x[slots], [B, S, ...] -> [B, M, ...], with 0 where slots is S; `back` inverts slots.

    With `back` the gradient is a gather too, and not a scatter, whose order of sums could vary.
    """
    take = functools.partial(jnp.take, axis=0, mode="fill", fill_value=0)
    return jax.vmap(take)(x, slots)


_gather.defvjp(
    lambda x, slots, back: (_gather(x, slots, back), (slots, back)),
    lambda saved, dy: (_gather(dy, saved[1], saved[0]), None, None),
)


_older = dispatch.differentiable(
    functools.partial(dispatch.choose_and_run, "forward"),
    functools.partial(dispatch.choose_and_run, "backward"),
)


def _dense(q, k, v, q_index, q_segments, k_index, k_segments, *, block: int, scale: float):
    """Computes the formula of this module on all scores at once: for tests and small inputs."""
    (b, t, n, h), (length, heads) = q.shape, k.shape[1:3]
    query = q.reshape(b, t, heads, n // heads, h).astype(jnp.float32) * scale
    exact = {"precision": lax.Precision.HIGHEST}
    x = jnp.einsum("BTKGH,BSKH->SBTKG", query, k.astype(jnp.float32), **exact)
    same = (q_segments[:, :, None] == k_segments[:, None]) & (k_segments != 0)[:, None]
    own = own_block(block).element(q_index[:, :, None], k_index[:, None]) & same
    closes, close = _closing(k_index, k_segments, block)
    older = same & (k_index[:, None] // block < q_index[:, :, None] // block)
    own, older = (jnp.moveaxis(m, 2, 0)[..., None, None] for m in (own, older))
    closes, close = closes.T[:, :, None, None, None], close.T
    logits = jnp.where(own | (older & closes), x, -jnp.inf)
    top = jnp.max(logits, 0)
    some = top > -jnp.inf
    shift = lax.stop_gradient(jnp.where(some, top, 0.0))
    total = jnp.where(some, jnp.sum(jnp.exp(logits - shift), 0), 1.0)
    a = jnp.exp(logits - shift) / total

    def by_block(reduce, y):
        return jax.vmap(lambda y, ids: reduce(y, ids, length + 1), 1, 1)(y, close)

    def of_token(y):
        return jnp.take_along_axis(y, close[..., None, None, None], 0)

    ordinary = ~closes & (close < length)[..., None, None, None]
    inner = jnp.where(ordinary, x, -jnp.inf)
    inner_top = lax.stop_gradient(of_token(by_block(jax.ops.segment_max, inner)))
    p = jnp.exp(inner - jnp.where(ordinary, inner_top, 0.0))
    p = p / jnp.where(ordinary, of_token(by_block(jax.ops.segment_sum, p)), 1.0)
    shared = jnp.take_along_axis(a, jnp.minimum(close, length - 1)[..., None, None, None], 0)
    weights = jnp.where(own, a, jnp.where(older & ordinary, shared * p, 0.0))
    out = jnp.einsum("SBTKG,BSKH->BTKGH", weights, v.astype(jnp.float32), **exact)
    lse = jnp.where(some, shift + jnp.log(total), -jnp.inf)
    return out.reshape(b, t, n, -1).astype(q.dtype), lse.reshape(b, t, n)
