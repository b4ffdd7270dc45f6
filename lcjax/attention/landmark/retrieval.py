"""How Landmark attention reads its cache: the best blocks, moved close to the query.

Let P tokens be in the cache, b = P // block whole blocks of them, K = min(top_k, b). Positions are
those of the released code ("stingy", arXiv 2305.16300, sec. 3.2.1): only K + 1 blocks of
positions before the open block are ever used.

    first = (b - K - 1) block                          where retrieved blocks begin
    scoring block n: its last token at first + m block + block - 1, m = max(0, n - (b - K) + 1)
    attending to block n in slot s: from first + s block, + block if n >= b - K

So the last K blocks are scored where they stand and all older ones at one place; the selected ones
fill the slots in the order of the text, old ones from the left, recent ones to the right. Keys stay
rotated to their true positions: landmarks are turned further, and of each query there is one copy
per slot, turned back by as much as the block should move.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lcjax.attention.base import rotate_queries
from lcjax.rope.base import Rotation, rotate
from pallas_kernels import flash, gather, merge
from pallas_kernels.landmark import older_blocks, own_block

if TYPE_CHECKING:
    from lcjax.attention.base import Places
    from lcjax.attention.landmark.pattern import Landmark


class Past(NamedTuple):
    """What was read before this call."""

    slots: jax.Array  # int32 [B, C, block], the slots of the cache that hold each block
    blocks: jax.Array  # int32 [B], whole blocks, the b above
    taken: jax.Array  # int32 [B], the K above
    block: int

    @property
    def recent(self) -> jax.Array:
        """The number [B] of the first block that is scored where it stands."""
        return self.blocks - self.taken

    @property
    def first(self) -> jax.Array:
        """The position [B] at which retrieved blocks begin; it may be negative."""
        return (self.recent - 1) * self.block

    def scoring_shift(self) -> jax.Array:
        """How far each block moves to be scored, [B, C]."""
        number = jnp.arange(self.slots.shape[1])
        place = jnp.maximum(0, number - self.recent[:, None] + 1)
        return self.first[:, None] + (place - number) * self.block

    def slot_shift(self, ids: jax.Array) -> jax.Array:
        """How far the blocks `ids` [B, ..., M] move to their slots 0 .. M - 1."""
        recent, first = (
            jnp.expand_dims(x, tuple(range(1, ids.ndim))) for x in (self.recent, self.first)
        )
        place = jnp.arange(ids.shape[-1]) + (ids >= recent)
        return first + (place - ids) * self.block


def retrieve(
    pattern: Landmark,
    q: jax.Array,
    turned: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rotation: Rotation,
    places: Places,
    implementation: str | None = None,
) -> jax.Array:
    """Out [B, T, N, Hv] of queries q, unrotated, and `turned` to their positions, [B, T, N, H].

    k and v [B, S, K, H] are the cache with the new tokens in it, keys rotated to their positions.
    """
    scale, block = q.shape[-1] ** -0.5, pattern.block
    order, asked = _rows(places.q_order, places.q_segments, q)
    slots, past = _past(pattern, order, asked, *_rows(places.k_order, places.k_segments, k))
    own = flash(
        turned,
        k,
        v,
        own_block(block),
        q_index=places.q_index,
        k_index=places.k_index,
        q_segments=places.q_segments,
        k_segments=places.k_segments,
        implementation=implementation,
    )
    parts = [own]
    if q.shape[1] > 1:
        parts.append(_closed_here(turned, k, v, slots, past, order, asked, scale, implementation))
    if past.slots.shape[1]:
        with jax.named_scope("retrieve"):
            parts.append(
                _retrieved(
                    pattern, q, turned, k, v, rotation, places.q_positions, past, asked, scale
                )
            )
    return merge(parts)[0]


def _rows(order, segments, x):
    """Order indices [B, T], and which rows hold a token, bool [B, T]."""
    shape = x.shape[:2]
    there = jnp.ones(shape, bool) if segments is None else segments != 0
    return jnp.broadcast_to(order, shape), there


def _past(pattern: Landmark, order, asked, k_order, there) -> tuple[jax.Array, Past]:
    """Slots [B, S] by place in the text, and what lies before the first new token of each row."""
    (rows, length), block = k_order.shape, pattern.block
    row, at = jnp.arange(rows)[:, None], jnp.arange(length, dtype=jnp.int32)
    slots = jnp.zeros((rows, length), jnp.int32)
    slots = slots.at[row, jnp.where(there, k_order, length)].set(at, mode="drop")
    read = jnp.min(jnp.where(asked, order, length), 1)
    read = jnp.where(asked.any(1), read, 0).astype(jnp.int32)
    count = length // block
    by_block = slots[:, : count * block].reshape(rows, count, block)
    return slots, Past(by_block, read // block, jnp.minimum(pattern.top_k, read // block), block)


def _closed_here(turned, k, v, slots, past: Past, order, asked, scale, implementation):
    """Blocks that the new tokens themselves close, for the new tokens after them."""
    block, rows = past.block, jnp.arange(k.shape[0])[:, None]
    count = min(turned.shape[1] // block + 1, max(past.slots.shape[1], 1))
    numbers = past.blocks[:, None] + jnp.arange(count)
    tokens = numbers[..., None] * block + jnp.arange(block)
    tokens = jnp.minimum(tokens.reshape(len(rows), -1), slots.shape[1] - 1)
    here = jnp.take_along_axis(slots, tokens, 1)
    return older_blocks(
        turned,
        k[rows, here],
        v[rows, here],
        block,
        scale=scale,
        q_numbers=order // block,
        k_numbers=numbers,
        q_segments=asked.astype(jnp.int32),
        k_segments=jnp.ones_like(numbers),
        # Blocks alone have no dense form.
        implementation=None if implementation == "reference" else implementation,
    )


def _retrieved(pattern, q, turned, k, v, rotation, positions, past: Past, asked, scale):
    """The partial over the selected blocks of the past."""
    marks = rotate(gather.landmarks(k, past.slots), past.scoring_shift(), rotation.inv_freq)
    exists = jnp.arange(past.slots.shape[1]) < past.blocks[:, None]
    per_token = pattern.select == "per_token_and_head"
    per = "token_and_head" if per_token else "head_and_chunk"
    # To the first layer all landmarks are the same vector, so ties are common.
    ids, there = gather.best_blocks(
        turned, marks, pattern.top_k, per, asked=asked, exists=exists, scale=scale
    )
    shift, rows = past.slot_shift(ids), jnp.arange(len(ids))
    rows = jnp.expand_dims(rows, tuple(range(1, ids.ndim)))
    slots = past.slots[rows, ids]
    elements = q.shape[0] * q.shape[2] * slots.shape[-1] * slots.shape[-2]
    elements *= k.shape[3] + v.shape[3]

    def of_query(query, position, shift, there, keys, values):
        size = query.shape[-1]
        copies = jnp.broadcast_to(query[:, :, None], (*shift.shape, size))
        moved = (position[:, None, None] - shift).reshape(len(query), -1)
        copies = rotate_queries(copies.reshape(*moved.shape, 1, size), moved, rotation)
        return _slots(copies.reshape(*shift.shape, size), keys, values, there, scale)

    if per_token:

        def run(x):
            query, position, shift, there, slots = x
            read = gather.tokens(k, slots), gather.tokens(v, slots)
            return of_query(query, position, shift, there, *read)

        arrays = (q, positions, shift, there, slots)
    else:
        read = gather.tokens(k, slots), gather.tokens(v, slots)
        run = lambda x: of_query(*x, shift, there, *read)  # noqa: E731
        arrays = (q, positions)
    out, lse = gather.by_query(run, arrays, elements)
    return out, jnp.where(asked[..., None], lse, -jnp.inf)


def _slots(q, keys, values, there, scale):
    """Grouped softmax of one query: q [B, N, M, H], keys [B, N, M, block, H], there [B, N, M]."""
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    sums = {"precision": precision, "preferred_element_type": jnp.float32}
    logits = scale * jnp.einsum("BNMH,BNMPH->BNMP", q, keys, **sums)
    landmark = jnp.where(there, logits[..., -1], -jnp.inf)
    lse = jax.nn.logsumexp(landmark, -1)
    weight = jnp.exp(landmark - jnp.where(lse > -jnp.inf, lse, 0.0)[..., None])
    p = weight[..., None] * jax.nn.softmax(logits[..., :-1], -1)
    out = jnp.einsum("BNMP,BNMPH->BNH", p.astype(values.dtype), values[..., :-1, :], **sums)
    return out.astype(q.dtype), lse
