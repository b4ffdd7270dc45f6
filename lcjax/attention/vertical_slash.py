"""MInference's vertical-slash heads (Jiang et al. 2024, arXiv 2407.02490): a sparse prefill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lcjax.attention.base import Pass, Pattern, Places, rotate_qk
from lcjax.errors import whole_numbers
from lcjax.rope.base import Rotation
from pallas_kernels import causal, flash, merge, tables

PROBES = 64  # last queries, whose attention chooses for all (sec. 3.2)
FIRST, LAST = 30, 100  # columns and diagonals that are always chosen, as in the released code
LEAST_VERTICAL, LEAST_SLASH = 30, 50
BLOCK = 64


@Pattern.register_subclass("vertical_slash")
@dataclass(frozen=True)
class VerticalSlash(Pattern):
    """A prompt reads some keys and some distances, which its last queries choose per head.

    The attention of the last 64 queries is summed over columns (keys) and over diagonals
    (distances). All queries see the `vertical` best columns, and the blocks of 64 x 64 that the
    `slash` best diagonals pass through, rounded outwards to whole blocks of keys. Calls with fewer
    than 64 queries, such as decoding, see everything. A head's budget is the same in all heads and
    layers; the paper looks for one per head, offline.

    Untrained, and for prompts only: what an early token sees depends on the last ones, so neither
    training nor perplexity means anything under it. The choice is one per row: the last document
    of a packed row makes it.
    """

    examples = ({"vertical": 96},)
    prefill_only = True

    vertical: int = 1000  # columns (the released code's default; at least 30)
    slash: int = 6096  # diagonals (at least 50)

    def __post_init__(self):
        whole_numbers("pattern", self, 1, "vertical", "slash")

    def passes(self, places: Places) -> list[Pass]:
        """What is seen where nothing is chosen."""
        return [Pass(places.q_positions, places.k_positions, causal())]

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        rotation: Rotation,
        places: Places,
        *,
        keys_rotated: bool = False,
        implementation: str | None = None,
    ) -> jax.Array:
        if q.shape[1] < PROBES:
            return super().attend(
                q, k, v, rotation, places,
                keys_rotated=keys_rotated, implementation=implementation,
            )  # fmt: skip
        implementation = places.partitionable(implementation)
        q, k = rotate_qk(q, k, places, rotation, keys_rotated=keys_rotated)
        rows, heads = q.shape[0], q.shape[2]
        with jax.named_scope("choose"):
            where = _rows(places, rows, heads)
            q, k, v = (
                _heads_as_rows(q, 1),
                *(_heads_as_rows(x, heads // x.shape[2]) for x in (k, v)),
            )
            columns, diagonals = lax.map(lambda row: _sums(*row), (q[:, :, 0], k[:, :, 0], where))
            chosen = _best(columns, max(self.vertical, LEAST_VERTICAL))
            slashes = _best(diagonals, max(self.slash, LEAST_SLASH))
        with jax.named_scope("attention"):
            partials = [
                _vertical(q, k, v, where, chosen, implementation),
                _slash(q, k, v, where, chosen, slashes, implementation),
            ]
        out, _ = merge(partials)
        return jnp.moveaxis(out.reshape(rows, heads, *out.shape[1::2]), 1, 2)


class _Rows(NamedTuple):
    """`Places` of rows that stand for one head each, and the slots of their queries."""

    q_slots: jax.Array  # int32 [R, T], so that slot - slot is the distance inside a document
    q_index: jax.Array  # int32 [R, T]
    k_index: jax.Array  # int32 [R, S]
    q_segments: jax.Array  # int32 [R, T]
    k_segments: jax.Array  # int32 [R, S]


def _rows(places: Places, rows: int, heads: int) -> _Rows:
    queries, keys = places.q_positions.shape[1], places.k_positions.shape[1]
    slots = None if places.row is None else places.row[0]
    if slots is None:  # the last of what the keys hold
        slots = jnp.arange(keys - queries, keys, dtype=jnp.int32)
    segments = places.q_segments, places.k_segments
    if segments[0] is None:
        segments = tuple(jnp.ones((rows, size), jnp.int32) for size in (queries, keys))

    def spread(x):
        wide = jnp.broadcast_to(jnp.atleast_2d(jnp.asarray(x, jnp.int32)), (rows, x.shape[-1]))
        return jnp.repeat(wide, heads, axis=0)

    return _Rows(*map(spread, (slots, places.q_order, places.k_order, *segments)))


def _heads_as_rows(x: jax.Array, repeats: int) -> jax.Array:
    """[B, T, N, H] -> [B N', T, 1, H], every head `repeats` times."""
    x = jnp.moveaxis(jnp.repeat(x, repeats, axis=2), 2, 1)
    return x.reshape(-1, x.shape[2], 1, x.shape[3])


def _sums(q: jax.Array, k: jax.Array, where: _Rows) -> tuple[jax.Array, jax.Array]:
    """(columns, diagonals) float32 [S] of one head: what its probes give to keys and to distances.

    q [T, H], k [S, H]. Forced ones are inf, those that nobody may see -inf.
    """
    q, k = (lax.stop_gradient(x) for x in (q, k))  # a choice has no gradient
    keys, ahead = k.shape[0], jnp.arange(k.shape[0], dtype=jnp.int32)
    # The last queries that are no padding: padding, if any, is at the other end.
    last = jnp.max(jnp.where(where.q_segments != 0, jnp.arange(q.shape[0]), PROBES - 1))
    probes = lax.dynamic_slice_in_dim(jnp.arange(q.shape[0]), last - PROBES + 1, PROBES)
    slots, order, segments = (x[probes] for x in (where.q_slots, where.q_index, where.q_segments))
    seen = (where.k_index <= order[:, None]) & (where.k_segments == segments[:, None])
    seen = seen & (segments[:, None] != 0)
    exact = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    logits = jnp.einsum(
        "TH,SH->TS", q[probes], k, precision=exact, preferred_element_type=jnp.float32
    )
    scaled = jnp.where(seen, logits * q.shape[-1] ** -0.5, -1e30)  # finite: some see no key
    weights = jnp.where(seen, jax.nn.softmax(scaled, axis=-1), 0.0)
    columns = jnp.where(where.k_index < FIRST, jnp.inf, weights.sum(0))
    columns = jnp.where(where.k_segments == 0, -jnp.inf, columns)
    slot = slots[:, None] - ahead  # the key at each distance from each probe
    across = jnp.take_along_axis(weights, jnp.clip(slot, 0, keys - 1), axis=1)
    diagonals = jnp.where(slot >= 0, across, 0.0).sum(0)
    return columns, jnp.where(ahead < LAST, jnp.inf, diagonals)


def _best(scores: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """(indices int32 [R, M], flags bool [R, S]) of the best `count` of `scores` [R, S]."""
    _, best = lax.top_k(scores, min(count, scores.shape[1]))
    flags = jnp.zeros(scores.shape, bool).at[jnp.arange(len(best))[:, None], best].set(True)
    return best, flags


def _vertical(q, k, v, where: _Rows, chosen, implementation):
    """The partial of the chosen columns."""
    index = chosen[0]
    k, v = (jnp.take_along_axis(x, index[:, :, None, None], axis=1) for x in (k, v))
    k_index, k_segments = (
        jnp.take_along_axis(x, index, axis=1) for x in (where.k_index, where.k_segments)
    )
    return flash(
        q, k, v, causal(), q_index=where.q_index, k_index=k_index, q_segments=where.q_segments,
        k_segments=k_segments, implementation=implementation,
    )  # fmt: skip


def _slash(q, k, v, where: _Rows, chosen, slashes, implementation):
    """The partial of the other keys in the blocks of the chosen diagonals."""
    return flash(
        q, k, v, causal(), table=_table(where, slashes[1]), q_index=where.q_index,
        k_index=where.k_index, q_segments=where.q_segments,
        k_segments=jnp.where(chosen[1], 0, where.k_segments), implementation=implementation,
    )  # fmt: skip


def _table(where: _Rows, slashes: jax.Array):
    """The blocks that diagonals `slashes` bool [R, S] pass through.

    In a block of queries from slot s, the diagonal d covers the keys s - d to s - d + 63 (a block
    of the released kernel), so it meets the block of keys from n on where |s - d - n| < 64.
    """
    keys = slashes.shape[1]
    up_to = jnp.pad(jnp.cumsum(slashes, axis=1, dtype=jnp.int32), [(0, 0), (1, 0)])
    starts = where.q_slots[:, ::BLOCK, None] - jnp.arange(0, keys, BLOCK, dtype=jnp.int32)
    low, high = (
        jnp.clip(x, 0, keys).reshape(len(slashes), -1) for x in (starts - BLOCK + 1, starts + BLOCK)
    )
    count = jnp.take_along_axis(up_to, high, axis=1) - jnp.take_along_axis(up_to, low, axis=1)
    visible = (count > 0).reshape(len(slashes), 1, *starts.shape[1:])
    return tables.from_block_mask(visible, q_block=BLOCK, k_block=BLOCK)
