"""MInference's vertical-slash heads (Jiang et al. 2024, arXiv 2407.02490): a sparse prefill.

Letters: R = B N rows, one for each row and head of the batch; M selected keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from lcjax.attention.base import AttentionMetadata, Pass, Pattern, rotate_qk
from lcjax.errors import PositiveInt
from pallas_kernels import causal, flash, gather, merge, tables

PROBES = 64  # last queries, whose attention chooses keys for all queries (sec. 3.2)
MIN_COLUMNS, MIN_DIAGONALS = 30, 50
# Number of first columns and nearest diagonals that are always chosen, as in the released code.
FORCED_COLUMNS, FORCED_DIAGONALS = 30, 100
BLOCK = 64


@Pattern.register_subclass("vertical_slash")
@dataclass(frozen=True)
class VerticalSlash(Pattern):
    """Prompt tokens see some keys and some distances, chosen per head by the last queries.

    The attention of the last 64 queries is summed for each column (key) and each diagonal
    (distance). All queries see the `vertical` best columns, and the blocks of 64 x 64 that contain
    the `slash` best diagonals, rounded outwards to whole blocks of keys. Calls with fewer than 64
    queries, such as decoding, see all keys. All heads and layers have the same budget; the paper
    searches a budget for each head offline.

    The method needs no training and is for prompts only: the visible keys of early tokens depend on
    the last tokens, so neither training nor perplexity is meaningful. Each call chooses keys for
    its own queries. A prompt is therefore read in one call, whatever `prefill_chunk` is, and each
    turn of a conversation chooses again for its new text. Each row has one choice; in a packed row
    the last document makes it.
    """

    examples = ({"vertical": 96},)
    needs_whole_prompt = True
    is_causal = False

    vertical: PositiveInt = 1000  # number of columns (the released code's default), at least 30
    slash: PositiveInt = 6096  # number of diagonals, at least 50

    def passes(self, metadata: AttentionMetadata) -> list[Pass]:
        """Returns a pass of full attention, which calls with fewer than 64 queries use."""
        return [Pass(metadata.q_positions, metadata.k_positions, causal())]

    def attend(self, q, k, v, metadata):
        if q.shape[1] < PROBES:
            return super().attend(q, k, v, metadata)
        self.check_metadata(metadata)
        implementation = metadata.without_layout().implementation
        q, k = rotate_qk(q, k, metadata)
        rows, heads = q.shape[0], q.shape[2]
        with jax.named_scope("choose"):
            head_metadata = _head_metadata(metadata, rows, heads)
            q, k, v = (_heads_as_rows(x, heads // x.shape[2]) for x in (q, k, v))
            column_scores, diagonal_scores = lax.map(
                lambda row: _scores(*row), (q[:, :, 0], k[:, :, 0], head_metadata)
            )
            columns, is_column = _top_k(column_scores, max(self.vertical, MIN_COLUMNS))
            _, is_diagonal = _top_k(diagonal_scores, max(self.slash, MIN_DIAGONALS))
        with jax.named_scope("attention"):
            partials = [
                _attend_columns(q, k, v, head_metadata, columns, implementation),
                _attend_diagonals(q, k, v, head_metadata, is_column, is_diagonal, implementation),
            ]
        out, _ = merge(partials)
        return jnp.moveaxis(out.reshape(rows, heads, *out.shape[1::2]), 1, 2)


class _HeadMetadata(NamedTuple):
    """Order indices and segments of the R rows, and the slots of their queries."""

    q_slots: Int[Array, "R T"]  # in a document, query slot - key slot is the distance
    q_index: Int[Array, "R T"]
    k_index: Int[Array, "R S"]
    q_segments: Int[Array, "R T"]
    k_segments: Int[Array, "R S"]


def _head_metadata(metadata: AttentionMetadata, rows: int, heads: int) -> _HeadMetadata:
    num_queries, num_keys = metadata.q_positions.shape[1], metadata.k_positions.shape[1]
    slots = None if metadata.row_indices is None else metadata.row_indices[0]
    if slots is None:  # the queries are the last tokens among the keys
        slots = jnp.arange(num_keys - num_queries, num_keys, dtype=jnp.int32)
    segments = metadata.q_segments, metadata.k_segments
    if segments[0] is None:
        segments = tuple(jnp.ones((rows, size), jnp.int32) for size in (num_queries, num_keys))

    def repeat(x):
        x = jnp.atleast_2d(jnp.asarray(x, jnp.int32))
        return jnp.repeat(jnp.broadcast_to(x, (rows, x.shape[-1])), heads, axis=0)

    return _HeadMetadata(*map(repeat, (slots, metadata.q_order, metadata.k_order, *segments)))


def _heads_as_rows(x: Float[Array, "B T K H"], repeats: int) -> Float[Array, "R T 1 H"]:
    """Moves heads to the row axis; repeats each head `repeats` times."""
    x = jnp.moveaxis(jnp.repeat(x, repeats, axis=2), 2, 1)
    return x.reshape(-1, x.shape[2], 1, x.shape[3])


def _scores(
    q: Float[Array, "T H"], k: Float[Array, "S H"], metadata: _HeadMetadata
) -> tuple[Float[Array, " S"], Float[Array, " S"]]:
    """Returns the float32 attention of one head's probes to each key and to each distance.

    It is inf for forced columns and diagonals, and -inf for keys that are padding.
    """
    q, k = (lax.stop_gradient(x) for x in (q, k))  # a choice has no gradient
    num_keys, distances = k.shape[0], jnp.arange(k.shape[0], dtype=jnp.int32)
    # Probes are the last queries that are not padding; if there are fewer, padding, masked below.
    last = jnp.max(jnp.where(metadata.q_segments != 0, jnp.arange(q.shape[0]), PROBES - 1))
    probes = lax.dynamic_slice_in_dim(jnp.arange(q.shape[0]), last - PROBES + 1, PROBES)
    slots, order, segments = (
        x[probes] for x in (metadata.q_slots, metadata.q_index, metadata.q_segments)
    )
    visible = (metadata.k_index <= order[:, None]) & (metadata.k_segments == segments[:, None])
    visible = visible & (segments[:, None] != 0)
    logits = gather.einsum("TH,SH->TS", q[probes], k)
    # -1e30 is finite, so that softmax gives no NaN for probes that see no key.
    logits = jnp.where(visible, logits * q.shape[-1] ** -0.5, -1e30)
    weights = jnp.where(visible, jax.nn.softmax(logits, axis=-1), 0.0)
    columns = jnp.where(metadata.k_index < FORCED_COLUMNS, jnp.inf, weights.sum(0))
    columns = jnp.where(metadata.k_segments == 0, -jnp.inf, columns)
    k_slots = slots[:, None] - distances  # the key at each distance from each probe
    by_distance = jnp.take_along_axis(weights, jnp.clip(k_slots, 0, num_keys - 1), axis=1)
    diagonals = jnp.where(k_slots >= 0, by_distance, 0.0).sum(0)
    return columns, jnp.where(distances < FORCED_DIAGONALS, jnp.inf, diagonals)


def _top_k(scores: Float[Array, "R S"], count: int) -> tuple[Int[Array, "R M"], Bool[Array, "R S"]]:
    """Returns the indices of the `count` greatest scores of each row, and their mask."""
    _, ids = lax.top_k(scores, min(count, scores.shape[1]))
    mask = jnp.zeros(scores.shape, bool).at[jnp.arange(len(ids))[:, None], ids].set(True)
    return ids, mask


def _attend_columns(q, k, v, metadata: _HeadMetadata, columns: Int[Array, "R M"], implementation):
    """Returns the partial (out, lse) over the chosen columns."""
    k, v = (jnp.take_along_axis(x, columns[:, :, None, None], axis=1) for x in (k, v))
    k_index, k_segments = (
        jnp.take_along_axis(x, columns, axis=1) for x in (metadata.k_index, metadata.k_segments)
    )
    return flash(
        q, k, v, causal(), q_index=metadata.q_index, k_index=k_index,
        q_segments=metadata.q_segments, k_segments=k_segments, implementation=implementation,
    )  # fmt: skip


def _attend_diagonals(
    q,
    k,
    v,
    metadata: _HeadMetadata,
    is_column: Bool[Array, "R S"],
    is_diagonal: Bool[Array, "R S"],
    implementation,
):
    """Returns the partial (out, lse) over the chosen diagonals' blocks, without chosen columns."""
    return flash(
        q, k, v, causal(), table=_block_table(metadata, is_diagonal), q_index=metadata.q_index,
        k_index=metadata.k_index, q_segments=metadata.q_segments,
        k_segments=jnp.where(is_column, 0, metadata.k_segments), implementation=implementation,
    )  # fmt: skip


def _block_table(metadata: _HeadMetadata, is_diagonal: Bool[Array, "R S"]):
    """Returns the table of blocks that the chosen diagonals pass through.

    In a block of queries from slot s, the diagonal d covers the keys s - d to s - d + 63 (a block
    of the released kernel), so it meets the block of keys from n on if |s - d - n| < 64.
    """
    rows, num_keys = is_diagonal.shape
    # counts[:, d] is the number of chosen diagonals below d.
    counts = jnp.pad(jnp.cumsum(is_diagonal, axis=1, dtype=jnp.int32), [(0, 0), (1, 0)])
    starts = metadata.q_slots[:, ::BLOCK, None] - jnp.arange(0, num_keys, BLOCK, dtype=jnp.int32)
    low, high = (
        jnp.clip(x, 0, num_keys).reshape(rows, -1) for x in (starts - BLOCK + 1, starts + BLOCK)
    )
    count = jnp.take_along_axis(counts, high, axis=1) - jnp.take_along_axis(counts, low, axis=1)
    visible = (count > 0).reshape(rows, 1, *starts.shape[1:])
    return tables.from_block_mask(visible, q_block=BLOCK, k_block=BLOCK)
