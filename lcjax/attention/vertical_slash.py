"""MInference's sparse heads (Jiang et al. 2024, arXiv 2407.02490): a sparse prefill.

Letters: R = B N rows, one for each row and head of the batch; M selected keys.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from lcjax.attention.base import AttentionMetadata, Pass, Pattern, rotate_qk
from lcjax.attention.prompt_blocks import PromptHead, attend_blocks, ranks
from lcjax.errors import InputError, NonNegativeInt, OneOf, PositiveInt, check_fields
from lcjax.rope.rotation import no_rotation
from lcjax.storage import to_path
from pallas_kernels import causal, flash, gather, merge, per_head, prefix, tables, window

PROBES = 64  # last queries, whose attention chooses keys for all queries (sec. 3.2)
MIN_COLUMNS, MIN_DIAGONALS = 30, 50
# Number of first columns and nearest diagonals that are always chosen, as in the released code.
FORCED_COLUMNS, FORCED_DIAGONALS = 30, 100
BLOCK = 64
_SEARCH_BLOCK = 32  # of block_sparse heads in the search
_SEARCH_FORCED = 30  # nearest diagonals that are always chosen there
_SEARCH_ROWS = 256  # queries whose attention is computed at a time there
KINDS = ("vertical_and_slash", "stream_llm", "block_sparse")  # names of the published files


@dataclass(frozen=True)
class SparseHead:
    """What one query head of `vertical_slash` sees.

    - `vertical_and_slash`: the best `vertical` columns and `slash` diagonals.
    - `stream_llm` (A-shape): the first `vertical` keys, and those at distances below `slash`.
    - `block_sparse`: for each block of 64 queries the `vertical` blocks of 64 keys whose mean has
      the greatest product with the mean query. Its own block must be among them to be visible. The
      released code takes 100, whatever a file says.
    """

    kind: Annotated[str, OneOf(KINDS)] = "vertical_and_slash"
    vertical: PositiveInt = 1000
    slash: NonNegativeInt = 6096

    def __post_init__(self):
        check_fields("pattern.heads", self)
        if self.kind == "stream_llm" and not self.slash:
            raise InputError(
                "pattern.heads: slash=0 of a stream_llm head hides tokens from themselves; give at"
                " least 1"
            )

    @property
    def computed_with(self) -> tuple[str, int]:
        """Equal for heads of a layer that are computed together."""
        return self.kind, self.vertical if self.kind == "block_sparse" else 0


@Pattern.register_subclass("vertical_slash")
@dataclass(frozen=True)
class VerticalSlash(Pattern):
    """Prompt tokens see some keys and some distances, chosen per head by the last queries.

    The attention of the last 64 queries is summed for each column (key) and each diagonal
    (distance). All queries see the `vertical` best columns, and the blocks of 64 x 64 that contain
    the `slash` best diagonals, rounded outwards to whole blocks of keys. Calls with fewer than 64
    queries, such as decoding, see all keys. All heads and layers have the same budget, unless
    `file` or `heads` has one for each head (`SparseHead`), as the paper searches them offline
    (`search_head_budgets`).

    The method needs no training and is for prompts only: the visible keys of early tokens depend on
    the last tokens, so neither training nor perplexity is meaningful. Each call chooses keys for
    its own queries. A prompt is therefore read in one call, whatever `prefill_chunk` is, and each
    turn of a conversation chooses again for its new text. Each row has one choice of columns and
    diagonals; in a packed row the last document makes it. Heads of other kinds see the same keys
    in a packed row as in separate ones.
    """

    examples = ({"vertical": 96},)
    needs_whole_prompt = True
    is_causal = False

    vertical: PositiveInt = 1000  # number of columns (the released code's default), at least 30
    slash: PositiveInt = 6096  # number of diagonals, at least 50
    # JSON of MInference: for each layer {head: [kind, vertical, slash, score]}; null: none
    file: str | None = None
    # The query heads of a layer, in place of `vertical` and `slash`; empty: all have these
    heads: tuple[SparseHead, ...] = ()

    def __post_init__(self):
        super().__post_init__()
        if self.file is not None and self.heads:
            raise InputError(
                f"pattern.file={self.file} has the heads of all layers; leave pattern.heads out"
            )

    @property
    def differs_by_layer(self) -> bool:
        return self.file is not None

    def for_layer(self, layer, num_layers):
        if self.file is None:
            return self
        heads = read_head_budgets(self.file)
        if len(heads) != num_layers:
            raise InputError(
                f"pattern.file={self.file} has heads of {len(heads)} layers, and the model has"
                f" {num_layers}; give the file of this model"
            )
        return dataclasses.replace(self, file=None, heads=heads[layer])

    def passes(self, metadata: AttentionMetadata) -> list[Pass]:
        """Returns a pass of full attention, which calls with fewer than 64 queries use."""
        return [Pass(metadata.q_positions, metadata.k_positions, causal())]

    def attend(self, q, k, v, metadata):
        if q.shape[1] < PROBES:
            return super().attend(q, k, v, metadata)
        self.check_metadata(metadata)
        budgets = self._budgets(q.shape[2])
        q, k = rotate_qk(q, k, metadata)
        metadata = metadata.replace(rotation=no_rotation(), keys_rotated=True)
        outs, order, group = [], [], q.shape[2] // k.shape[2]
        for common in dict.fromkeys(budget.computed_with for budget in budgets):
            same = [budget.computed_with == common for budget in budgets]
            heads = np.flatnonzero(same)
            arrays = q, k, v
            if not all(same):
                arrays = q[:, :, heads], k[:, :, heads // group], v[:, :, heads // group]
            attend = _ATTEND[common[0]]
            outs.append(attend(*arrays, metadata, [budgets[i] for i in heads]))
            order.append(heads)
        if len(outs) == 1:
            return outs[0]
        return jnp.concatenate(outs, axis=2)[:, :, np.argsort(np.concatenate(order))]

    def _budgets(self, num_heads: int) -> tuple[SparseHead, ...]:
        """Returns the budget of each of the query heads of a layer."""
        if self.file is not None:
            raise InputError(
                f"pattern.file={self.file} has heads of all layers; call `for_layer` first"
            )
        budgets = self.heads or (SparseHead(KINDS[0], self.vertical, self.slash),) * num_heads
        if len(budgets) != num_heads:
            raise InputError(
                f"pattern.heads has budgets of {len(budgets)} heads, and a layer has {num_heads}"
                " query heads; give those of this model"
            )
        return budgets


def read_head_budgets(file: str) -> tuple[tuple[SparseHead, ...], ...]:
    """Reads the heads of each layer from a JSON of MInference (`VerticalSlash.file`).

    Raises:
      InputError: it is no such file.
    """
    try:
        return _parse_head_budgets(to_path(file).read_text())
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = f"no head {error}" if isinstance(error, KeyError) else error
        raise InputError(
            f"pattern.file={file} is no list of layers {{head: [kind, vertical, slash, score]}}"
            f" ({reason}); give a JSON file of MInference, or of search_head_budgets"
        ) from None


@functools.lru_cache(maxsize=4)  # each layer of a model reads the same text
def _parse_head_budgets(text: str) -> tuple[tuple[SparseHead, ...], ...]:
    layers = json.loads(text)
    heads = [[layer[str(head)] for head in range(len(layer))] for layer in layers]
    return tuple(tuple(SparseHead(*head[:3]) for head in layer) for layer in heads)


def _attend_vertical_slash(q, k, v, metadata: AttentionMetadata, budgets: list[SparseHead]):
    """Attends to the best columns and diagonals of each head."""
    implementation = metadata.without_layout().implementation
    rows, heads = q.shape[0], q.shape[2]
    with jax.named_scope("choose"):
        head_metadata = _head_metadata(metadata, rows, heads)
        q, k, v = (_heads_as_rows(x, heads // x.shape[2]) for x in (q, k, v))
        column_scores, diagonal_scores = lax.map(
            lambda row: _scores(*row), (q[:, :, 0], k[:, :, 0], head_metadata)
        )
        counts = [
            np.tile([max(getattr(budget, name), least) for budget in budgets], rows)
            for name, least in (("vertical", MIN_COLUMNS), ("slash", MIN_DIAGONALS))
        ]
        columns, is_column = _top_k(column_scores, counts[0])
        _, is_diagonal = _top_k(diagonal_scores, counts[1])
    with jax.named_scope("attention"):
        partials = [
            _attend_columns(q, k, v, head_metadata, columns, implementation),
            _attend_diagonals(q, k, v, head_metadata, is_column, is_diagonal, implementation),
        ]
    out, _ = merge(partials)
    return jnp.moveaxis(out.reshape(rows, heads, *out.shape[1::2]), 1, 2)


def _attend_stream(q, k, v, metadata: AttentionMetadata, budgets: list[SparseHead]):
    """Attends to the first keys and the near ones of each head."""
    parts = [
        (causal() & (window(budget.slash) | prefix(budget.vertical)), len(list(heads)))
        for budget, heads in itertools.groupby(budgets)
    ]
    metadata = metadata.without_layout()
    out, _ = flash(
        q, k, v, parts[0][0] if len(parts) == 1 else per_head(*parts),
        q_index=metadata.q_order, k_index=metadata.k_order, q_segments=metadata.q_segments,
        k_segments=metadata.k_segments, implementation=metadata.implementation,
    )  # fmt: skip
    return out


def _attend_block_sparse(q, k, v, metadata: AttentionMetadata, budgets: list[SparseHead]):
    """Attends to the best blocks of each head; all heads see equally many."""

    def choose(head: PromptHead):
        current = head.first // BLOCK + jnp.arange(len(head.q) // BLOCK)
        return _best_blocks(head.q, head.k, current, budgets[0].vertical, BLOCK)

    return attend_blocks(q, k, v, metadata, BLOCK, choose)


def _best_blocks(
    q: Float[Array, "T H"],
    k: Float[Array, "S H"],
    current: Int[Array, " nq"],
    count: int,
    block: int,
) -> Bool[Array, "nq nk"]:
    """Returns the `count` blocks up to the own one whose mean key fits the mean query best."""
    means = (x.astype(jnp.float32).reshape(-1, block, x.shape[-1]).mean(1) for x in (q, k))
    scores = gather.einsum("QH,CH->QC", *means)
    scores = jnp.where(jnp.arange(scores.shape[1]) <= current[:, None], scores, -jnp.inf)
    return ranks(scores) < count


_ATTEND = {
    "vertical_and_slash": _attend_vertical_slash,
    "stream_llm": _attend_stream,
    "block_sparse": _attend_block_sparse,
}


# Among which the released code searches. There, a block_sparse head keeps 1/vertical of the blocks
# of 32 keys.
CANDIDATES = (
    SparseHead("stream_llm", 100, 800),
    *(SparseHead(KINDS[0], *pair) for pair in ((30, 800), (100, 750), (500, 700), (3500, 100))),
    SparseHead("block_sparse", 8, 1),
)


def search_head_budgets(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    candidates: Sequence[SparseHead] = CANDIDATES,
    start: int = 2500,
) -> dict[str, list]:
    """Searches the budget of each head of a layer, as MInference's released code does (sec. 3.2).

    The candidate wins that keeps most attention (`attention_mass`). As in the released code, a
    stream_llm winner is written as vertical_and_slash of the same numbers, and a block_sparse one
    as vertical_and_slash with 1,000 columns and 6,096 diagonals.

    Args:
      q, k: rotated queries and keys of a text.
      candidates: the budgets to choose from.
      start: number of first queries that do not count.

    Returns:
      The entry of the layer in a JSON of `VerticalSlash.file`: {head: [kind, vertical, slash, share
      of the attention that is kept]}.
    """
    if len(q) <= start:
        raise InputError(
            f"the text has {len(q)} tokens, and the first {start} do not count in a search; give a"
            " longer one, or a smaller start"
        )
    return best_budgets(attention_mass(q, k, tuple(candidates), start), candidates)


def best_budgets(
    masses: Float[Array, "N candidates"], candidates: Sequence[SparseHead]
) -> dict[str, list]:
    """Returns what `search_head_budgets` returns, given the shares that heads keep."""
    entries = {}
    for head, shares in enumerate(np.asarray(masses)):
        best = candidates[int(shares.argmax())]
        numbers = (1000, 6096) if best.kind == "block_sparse" else (best.vertical, best.slash)
        entries[str(head)] = [KINDS[0], *numbers, float(shares.max())]
    return entries


@functools.partial(jax.jit, static_argnames=("candidates", "start"))
def attention_mass(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    candidates: tuple[SparseHead, ...],
    start: int,
) -> Float[Array, "N candidates"]:
    """Returns the share of attention that heads would keep, the mean over queries from `start` on.

    Diagonals are exact here, without rounding to blocks, and the nearest 30 are always chosen; a
    stream_llm head sees distances up to `slash`; a block_sparse head has the best 1/`vertical` of
    the blocks of 32 keys.
    """
    group = q.shape[1] // k.shape[1]
    return lax.map(
        lambda head: _mass_by_head(q[:, head], k[:, head // group], candidates, start),
        jnp.arange(q.shape[1]),
    )


def _mass_by_head(
    q: Float[Array, "T H"], k: Float[Array, "T H"], candidates: tuple[SparseHead, ...], start: int
) -> Float[Array, " candidates"]:
    """Returns `attention_mass` of one head; a few queries at a time, which bounds memory."""
    length, slots = len(q), jnp.arange(len(k))
    rules = [_search_rule(q, k, candidate) for candidate in candidates]
    rows = start + jnp.arange(-(-(length - start) // _SEARCH_ROWS) * _SEARCH_ROWS)

    def mass(rows):
        queries = jnp.minimum(rows, length - 1)
        distances = queries[:, None] - slots
        logits = gather.einsum("TH,SH->TS", q[queries], k) * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(jnp.where(distances >= 0, logits, -1e30), axis=-1)
        weights = jnp.where((rows < length)[:, None], weights, 0.0)
        return jnp.stack([(weights * rule(queries, distances)).sum() for rule in rules])

    return lax.map(mass, rows.reshape(-1, _SEARCH_ROWS)).sum(0) / (length - start)


def _search_rule(q: Float[Array, "T H"], k: Float[Array, "T H"], candidate: SparseHead):
    """Returns a function from queries [t] and distances [t, S] to the keys [t, S] that are seen."""
    slots = jnp.arange(len(k))
    if candidate.kind == "stream_llm":
        return lambda _, distances: (slots < candidate.vertical) | (distances <= candidate.slash)
    if candidate.kind == "block_sparse":
        size = -(-len(q) // _SEARCH_BLOCK) * _SEARCH_BLOCK
        padded = (jnp.pad(x, [(0, size - len(x)), (0, 0)]) for x in (q, k))
        current = jnp.arange(size // _SEARCH_BLOCK)
        count = max(1, len(current) // candidate.vertical)
        chosen = _best_blocks(*padded, current, count, _SEARCH_BLOCK)
        blocks = slots // _SEARCH_BLOCK
        return lambda queries, _: chosen[queries // _SEARCH_BLOCK][:, blocks]
    ones = jnp.ones(len(k), jnp.int32)
    scores = _scores(q, k, _HeadMetadata(slots, slots, slots, ones, ones), _SEARCH_FORCED)
    is_column, is_diagonal = (
        _top_k(x[None], np.array([count]))[1][0]
        for x, count in zip(scores, (candidate.vertical, candidate.slash), strict=True)
    )
    return lambda _, distances: is_column | is_diagonal[jnp.maximum(distances, 0)]


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
    q: Float[Array, "T H"],
    k: Float[Array, "S H"],
    metadata: _HeadMetadata,
    forced_diagonals: int = FORCED_DIAGONALS,
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
    return columns, jnp.where(distances < forced_diagonals, jnp.inf, diagonals)


class _Columns(NamedTuple):
    """Selected keys of each row."""

    ids: Int[Array, "R M"]
    is_valid: Bool[Array, "R M"]  # rows select different numbers of keys


def _top_k(
    scores: Float[Array, "R S"], counts: Int[np.ndarray, " R"]
) -> tuple[_Columns, Bool[Array, "R S"]]:
    """Returns the greatest scores of each row, as many as `counts`, and their mask."""
    num_keys = scores.shape[1]
    _, ids = lax.top_k(scores, min(int(counts.max()), num_keys))
    is_valid = np.arange(ids.shape[1]) < counts[:, None]
    chosen = jnp.where(is_valid, ids, num_keys)
    mask = jnp.zeros(scores.shape, bool)
    mask = mask.at[jnp.arange(len(ids))[:, None], chosen].set(True, mode="drop")
    return _Columns(ids, is_valid), mask


def _attend_columns(q, k, v, metadata: _HeadMetadata, columns: _Columns, implementation):
    """Returns the partial (out, lse) over the chosen columns."""
    ids = columns.ids
    k, v = (jnp.take_along_axis(x, ids[:, :, None, None], axis=1) for x in (k, v))
    k_index, k_segments = (
        jnp.take_along_axis(x, ids, axis=1) for x in (metadata.k_index, metadata.k_segments)
    )
    k_segments = jnp.where(columns.is_valid, k_segments, 0)
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
