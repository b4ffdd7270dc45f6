"""Exact nearest-neighbour search in JAX, traceable and sharded.

Every search returns float32 scores and rows, best first. Equal scores are in the order of rows.
Where fewer than k rows exist, the row is -1 and the score -inf.
"""

import functools
import math
import mmap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int
from tqdm import tqdm

from lcjax.errors import (
    INT32_MAX,
    InputError,
    Interval,
    check_integer,
    check_one_of,
    check_type,
)

METRICS = ("dot", "l2")

_LANES = 128  # rows of a block are a multiple of this, so that groups divide it
_CPU_BLOCK_BYTES = 6 << 20  # a float32 block of this size stays in the cache until its maxima
_BLOCK_ROWS = 65_536  # on accelerators, where a larger product keeps the cores busy
_SCORE_BYTES = 1 << 28  # largest size of the scores of one block
_ROWS_PER_RESULT = 400  # rows in a selection of k rows, for each of the k
# Further candidates for "l2": exact distances may change the order near rank k.
_EXTRA_CANDIDATES = 16
_QUERY_BATCH = 512
_GATHER_NUMBERS = 1 << 24  # largest number of elements of candidates' vectors that exist at once
_DELAY = 5  # seconds of a search after which the progress bar appears


def top_k(
    queries: Float[Array, "Q D"],
    vectors: Float[Array, "N D"],
    k: int,
    *,
    valid: Bool[Array, " N"] | None = None,
    metric: str = "dot",
    block_size: int | None = None,
    recall_target: float | None = None,
) -> tuple[Float[Array, "Q k"], Int[Array, "Q k"]]:
    """Returns the k vectors with the largest scores for each query, exactly; traceable.

    The matrix is read in blocks. The memory is that of a block and at most 256 MB of scores.

    Among the rows of several blocks, only the k groups of adjacent rows with the largest maxima are
    searched.
    No other group holds a result: each of the k groups has an element that is at least as large as
    every element of the other group, and an equal one is in a smaller row.

    The scores of `metric="l2"` are negative squared distances. They are computed in two steps:

    - k + 16 candidates are chosen by 2 q.v - |v|^2. One of the vectors is the origin, so that an
      offset that all vectors share causes no cancellation.
    - The scores of the candidates are sums of squared differences, with a relative error below
      (D + 3) 2^-24.

    A row can be missed only if its squared distance is within about D 2^-24 (|q| + |v|)^2 of the
    k-th, with lengths from that origin.

    Args:
      queries: [Q, D] of a floating type; converted to float32.
      vectors: [N, D] float32, bfloat16 or float16; products are summed in float32.
      k: number of results, at least 1; may exceed N.
      valid: [N] bool, rows that may be returned; None: all.
      metric: "dot" or "l2".
      block_size: rows of one matrix product, rounded up to a multiple of 128; None: a size that
        suits the device.
      recall_target: None: exact. A number in (0, 1]: `jax.lax.approx_max_k` with this recall, which
        is faster on TPUs and exact on CPUs.

    Returns:
      Scores [Q, k] float32 and rows [Q, k] int32. NaN scores are returned as infinity.

    Raises:
      InputError: a shape, type or option is invalid.
    """
    check_vectors(vectors)
    _check_queries(queries, vectors.shape[1])
    check_valid(valid, vectors.shape[0])
    check_options(k, metric, recall_target)
    if block_size is not None:
        check_integer("block_size", block_size, 1)
    num_rows = vectors.shape[0]
    num_queries, dim = queries.shape
    block = _block_rows(num_rows, num_queries, dim, block_size)
    center = None
    if metric == "l2":
        # Row 0 may be an outlier as an origin: the key of the first token of a text is.
        row = num_rows // 2 if valid is None else jnp.argmax(jnp.roll(valid, -(num_rows // 2)))
        row = row if valid is None else (row + num_rows // 2) % num_rows
        center = jnp.nan_to_num(jnp.asarray(vectors)[row].astype(jnp.float32))
    return _top_k(
        jnp.asarray(queries, jnp.float32),
        jnp.asarray(vectors),
        None if valid is None else jnp.asarray(valid),
        center,
        k=k,
        block=block,
        recall_target=recall_target,
    )


def _block_rows(num_rows: int, num_queries: int, dim: int, rows: int | None = None) -> int:
    """Returns the rows of one matrix product.

    It depends on the arguments and the platform only, so all shards compute the same products.
    """
    if rows is None:
        if jax.default_backend() == "cpu":
            rows = min(max(_CPU_BLOCK_BYTES // (4 * dim), 1024), _BLOCK_ROWS)
        else:
            rows = _BLOCK_ROWS
        rows = min(rows, max(_SCORE_BYTES // (4 * num_queries), _LANES))
        rows = 2 ** round(math.log2(rows))
    return _round_up(min(rows, num_rows), _LANES)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _top_k(
    queries: jax.Array,
    vectors: jax.Array,
    valid: jax.Array | None,
    center: jax.Array | None,
    *,
    k: int,
    block: int,
    recall_target: float | None,
) -> tuple[jax.Array, jax.Array]:
    """Computes `top_k` of checked arguments; by squared distance if `center` is not None."""
    num_rows = vectors.shape[0]
    if num_rows < block:
        valid = jnp.ones(num_rows, bool) if valid is None else valid
        valid = jnp.pad(valid, (0, block - num_rows))
        vectors = jnp.pad(vectors, ((0, block - num_rows), (0, 0)))
    num_queries = queries.shape[0]
    num_candidates = k if center is None else k + _EXTRA_CANDIDATES
    num_blocks = -(-vectors.shape[0] // block)
    last = vectors.shape[0] - block
    # The time of a selection hardly depends on its input size: a large k selects from more blocks.
    most = min(_SCORE_BYTES // (4 * num_queries * block), num_blocks)
    group_size = max(min(round(_ROWS_PER_RESULT * num_candidates / block), most), 1)
    num_groups = -(-num_blocks // group_size)

    def score_block(first):
        matrix = lax.dynamic_slice_in_dim(vectors, first, block).astype(jnp.float32)
        return _scores(queries, matrix, center)

    def scan_blocks(best, group):
        blocks = group * group_size + jnp.arange(group_size)
        # The last block overlaps the one before it if the block size does not divide the rows.
        firsts = jnp.minimum(blocks * block, last)
        scores = lax.map(score_block, firsts).reshape(-1, num_queries)
        rows = (firsts[:, None] + jnp.arange(block)).reshape(-1)
        mask = None
        if last % block or num_blocks % group_size:
            mask = rows >= jnp.repeat(blocks * block, block)
        if valid is not None:
            mask = valid[rows] if mask is None else mask & valid[rows]
        scores, places = _select(scores, mask, num_candidates, recall_target, num_rows)
        return _merge(best, (scores, rows[places]), num_candidates), None

    shape = (num_queries, num_candidates)
    best = (jnp.full(shape, -jnp.inf), jnp.full(shape, -1, jnp.int32))
    (scores, rows), _ = lax.scan(scan_blocks, best, jnp.arange(num_groups))
    rows = jnp.where(scores == -jnp.inf, -1, rows)
    if center is None:
        return scores, rows
    return _by_distance(queries, vectors, rows, k)


def _scores(queries: jax.Array, matrix: jax.Array, center: jax.Array | None) -> jax.Array:
    """Returns [rows, Q] dot products, or negative squared distances up to rounding."""
    if center is None:
        return jnp.einsum("ND,QD->NQ", matrix, queries, precision=lax.Precision.HIGHEST)
    matrix, queries = matrix - center, queries - center
    dots = jnp.einsum("ND,QD->NQ", matrix, queries, precision=lax.Precision.HIGHEST)
    return 2 * dots - jnp.square(matrix).sum(1)[:, None] - jnp.square(queries).sum(1)


def _select(
    scores: jax.Array, mask: jax.Array | None, k: int, recall_target: float | None, num_rows: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the best scores [Q, min(k, N)] and their places among the N rows of `scores`.

    Args:
      scores: [N, Q]. Rows are the first axis, so that maxima of groups compare whole lane vectors.
      mask: [N] bool, rows that may be returned; None: all.
      k: number of results.
      recall_target: as in `top_k`.
      num_rows: number of rows of the whole matrix.
    """
    size, num_queries = scores.shape
    k = min(k, size)
    # About this group size minimises the number of maxima plus the elements of k groups.
    group = min(2 ** math.ceil(math.log2(math.sqrt(size / k))), _LANES)
    if recall_target is not None or group < 8:
        scores = scores if mask is None else jnp.where(mask[:, None], scores, -jnp.inf)
        scores = _ordered(scores.T)
        if recall_target is None:
            return lax.top_k(scores, k)
        return lax.approx_max_k(
            scores,
            k,
            recall_target=recall_target,
            reduction_input_size_override=max(num_rows, size),
        )
    masked = scores if mask is None else jnp.where(mask[:, None], scores, -jnp.inf)
    maxima = masked.reshape(size // group, group, num_queries).max(1).T
    _, groups = lax.top_k(_ordered(maxima), k)
    # Sorted by row, because `lax.top_k` returns the first of equal scores.
    groups = jnp.sort(groups, axis=1)
    places = (groups[:, :, None] * group + jnp.arange(group)).reshape(num_queries, -1)
    candidates = scores[places, jnp.arange(num_queries)[:, None]]
    if mask is not None:
        candidates = jnp.where(mask[places], candidates, -jnp.inf)
    best, indices = lax.top_k(_ordered(candidates), k)
    return best, jnp.take_along_axis(places, indices, axis=1)


def _ordered(x: jax.Array) -> jax.Array:
    """Maps -0.0 to 0.0, which `lax.top_k` would put before it, and NaN of any sign to infinity."""
    x = jnp.where(x == 0, 0.0, x)
    return jnp.where(jnp.isnan(x), jnp.inf, x)


def _merge(
    best: tuple[jax.Array, jax.Array], other: tuple[jax.Array, jax.Array], k: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the k best of two lists; equal scores of `best` come before those of `other`."""
    scores, places = lax.top_k(jnp.concatenate([best[0], other[0]], axis=1), k)
    rows = jnp.take_along_axis(jnp.concatenate([best[1], other[1]], axis=1), places, axis=1)
    return scores, rows


def _by_distance(
    queries: jax.Array, vectors: jax.Array, rows: jax.Array, k: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the k nearest of the candidates `rows` [Q, C], by sums of squared differences."""
    rows = jnp.sort(rows, axis=1)

    def negative_distances(query_and_rows):
        query, row = query_and_rows
        return -jnp.square(vectors[row].astype(jnp.float32) - query).sum(-1)

    batch = max(_GATHER_NUMBERS // (rows.shape[1] * vectors.shape[1]), 1)
    scores = lax.map(negative_distances, (queries, rows), batch_size=min(batch, queries.shape[0]))
    # Distances that are not finite come first, so that `ExactIndex.search` can report them.
    scores = jnp.where(jnp.isfinite(scores), scores, jnp.inf)
    scores = jnp.where(rows < 0, -jnp.inf, scores)
    scores, places = lax.top_k(_ordered(scores), k)
    return scores, jnp.take_along_axis(rows, places, axis=1)


@functools.partial(jax.jit, static_argnames=("k", "block", "recall_target", "mesh"))
def _search_shards(
    queries: jax.Array,
    vectors: jax.Array,
    valid: jax.Array,
    center: jax.Array | None,
    first: jax.Array,
    best: tuple[jax.Array, jax.Array],
    *,
    k: int,
    block: int,
    recall_target: float | None,
    mesh: jax.sharding.Mesh,
) -> tuple[jax.Array, jax.Array]:
    """Merges the k best rows of a sharded matrix with the k best rows of the parts before it.

    Args:
      queries: [Q, D], replicated.
      vectors: [N, D], sharded over the axis "rows".
      valid: [N] bool, sharded like the vectors.
      center: [D] or None, as in `_top_k`.
      first: index of the first row of `vectors` in the whole matrix.
      best: scores and rows [Q, k] of the rows before `first`.
      k: number of results.
      block: rows of a block of `_top_k`.
      recall_target: as in `top_k`.
      mesh: mesh with the single axis "rows".
    """

    def search_shard(queries, vectors, valid, center, first, best):
        scores, rows = _top_k(
            queries, vectors, valid, center, k=k, block=block, recall_target=recall_target
        )
        rows = jnp.where(rows < 0, -1, rows + first + lax.axis_index("rows") * vectors.shape[0])
        parts = (
            lax.all_gather(part, "rows", axis=1, tiled=True)  # in the order of rows
            for part in (scores, rows)
        )
        return _merge(best, tuple(parts), k)

    everywhere, by_rows = PartitionSpec(), PartitionSpec("rows")
    return jax.shard_map(
        search_shard,
        mesh=mesh,
        in_specs=(everywhere, by_rows, by_rows, everywhere, everywhere, everywhere),
        out_specs=everywhere,
        check_vma=False,
    )(queries, vectors, valid, center, first, best)


class ExactIndex:
    """Exact search in a matrix of vectors that may be larger than the memory of the devices.

    Vectors that fit into `memory` are placed on the devices once. Larger matrices, such as a numpy
    memory map, are streamed: a part is sent while the part before it is searched. On a CPU, a part
    whose memory is aligned is not copied, so the vectors must not change while the index is in use.

    The result does not depend on the parts or the devices, because all products have the same
    shape.
    """

    def __init__(
        self,
        vectors: np.ndarray | jax.Array,
        *,
        valid: np.ndarray | None = None,
        metric: str = "dot",
        mesh: jax.sharding.Mesh | None = None,
        recall_target: float | None = None,
        memory: int = 4 << 30,
    ):
        """Keeps the vectors; they are read by searches, which raise errors for non-finite numbers.

        Args:
          vectors: [N, D] float32, bfloat16 or float16. A JAX array is never streamed.
          valid: [N] bool, rows that may be returned; None: all.
          metric: "dot" or "l2" (the score is the negative squared distance).
          mesh: mesh whose devices share the rows, regardless of its axes; None: the first device.
          recall_target: as in `top_k`.
          memory: bytes of vectors on each device; at least two blocks of `top_k` are used.

        Raises:
          InputError: a shape, type or option is invalid.
        """
        check_vectors(vectors)
        check_valid(valid, len(vectors))
        check_options(1, metric, recall_target)
        check_integer("memory", memory, 1, most=2**63 - 1)
        check_type("mesh", mesh, jax.sharding.Mesh, type(None))
        devices = np.array(jax.devices()[:1]) if mesh is None else mesh.devices.reshape(-1)
        self._vectors = vectors
        self._valid = np.ones(len(vectors), bool) if valid is None else np.asarray(valid)
        self._recall_target = recall_target
        self._mesh = jax.sharding.Mesh(devices, ("rows",))
        self._memory = memory
        self._resident: tuple[jax.Array, jax.Array, int] | None = None
        self._center = None
        if metric == "l2":
            rows = np.flatnonzero(self._valid)
            row = rows[len(rows) // 2] if len(rows) else 0
            self._center = np.nan_to_num(np.asarray(vectors[row], np.float32))

    def __len__(self) -> int:
        return len(self._vectors)

    @property
    def dim(self) -> int:
        return self._vectors.shape[1]

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns scores [Q, k] float32 and rows [Q, k] int64, best first.

        Args:
          queries: [Q, D] of a floating type; converted to float32.
          k: number of results, at least 1; may exceed N.

        Raises:
          InputError: a query, or its score with a vector, is not finite.
        """
        queries = finite_queries(queries, self.dim)
        check_options(k)
        if not len(queries):
            return np.zeros((0, k), np.float32), np.zeros((0, k), np.int64)
        batches = [
            _padded(queries[first : first + _QUERY_BATCH])
            for first in range(0, len(queries), _QUERY_BATCH)
        ]
        block = _block_rows(len(self), len(batches[0]), self.dim)
        search = functools.partial(
            _search_shards, k=k, block=block, recall_target=self._recall_target, mesh=self._mesh
        )
        best = [
            (np.full((len(batch), k), -np.inf, np.float32), np.full((len(batch), k), -1, np.int32))
            for batch in batches
        ]
        part_rows = self._part_rows(block)
        firsts = range(0, len(self), part_rows)
        total = len(firsts) * len(batches)
        with tqdm(total=total, desc="search", delay=_DELAY, leave=False, disable=None) as bar:
            for first in firsts:
                # Dispatched before the wait, so these vectors are sent while the previous part is
                # searched.
                vectors, valid, origin = self._part(first, part_rows)
                jax.block_until_ready(best)
                _advise(self._vectors, first - part_rows, first, "MADV_DONTNEED")
                _advise(self._vectors, first + part_rows, first + 2 * part_rows, "MADV_WILLNEED")
                for i, batch in enumerate(batches):
                    args = (batch, vectors, valid, self._center, np.int32(origin), best[i])
                    best[i] = search(*args)
                    if len(firsts) == 1:  # nothing to overlap, so the bar can show finished work
                        jax.block_until_ready(best[i])
                    bar.update()
            best = jax.device_get(best)
        if self._resident is None:
            _advise(self._vectors, len(self) - part_rows, len(self), "MADV_DONTNEED")
        scores = np.concatenate([scores for scores, _ in best])[: len(queries)]
        rows = np.concatenate([rows for _, rows in best])[: len(queries)].astype(np.int64)
        if np.isposinf(scores[:, 0]).any():
            row = rows[np.argmax(scores[:, 0]), 0]
            raise InputError(
                f"vectors: row {row} has no finite score; it holds NaN, infinite or huge numbers"
            )
        return scores, rows

    def _part_rows(self, block: int) -> int:
        """Returns the rows of a part: all rows if they fit, else those of half of the memory.

        The other half holds the part that is being sent.
        """
        row_bytes = self.dim * self._vectors.dtype.itemsize
        fits = len(self) * row_bytes <= self._memory * self._mesh.size
        if fits or isinstance(self._vectors, jax.Array):
            return len(self)
        return max(self._memory // (2 * row_bytes * block), 1) * block * self._mesh.size

    def _part(self, first: int, part_rows: int) -> tuple[jax.Array, jax.Array, int]:
        """Returns the vectors and mask of a part on the devices, and the index of its first row.

        The last part begins before `first`, which avoids a copy for padding; rows before `first`
        are masked. A part is padded only if the whole matrix has fewer rows.
        """
        if self._resident is not None:
            return self._resident
        shard_rows = -(-part_rows // self._mesh.size)
        if self._mesh.size > 1:
            shard_rows = _round_up(shard_rows, _LANES)
        num_rows = shard_rows * self._mesh.size
        sharding = NamedSharding(self._mesh, PartitionSpec("rows"))
        origin = max(min(first, len(self) - num_rows), 0)

        def place(array):
            if isinstance(array, jax.Array):
                padding = [(0, num_rows - len(array))] + [(0, 0)] * (array.ndim - 1)
                return jax.device_put(jnp.pad(array, padding), sharding)

            def read_shard(index):
                begin, end, _ = index[0].indices(num_rows)
                shard = np.asarray(array[origin + begin : origin + end])
                if len(shard) == end - begin:
                    return shard  # without a copy
                padding = [(0, end - begin - len(shard))] + [(0, 0)] * (array.ndim - 1)
                return np.pad(shard, padding)

            shape = (num_rows, *array.shape[1:])
            return jax.make_array_from_callback(shape, sharding, read_shard)

        valid = self._valid
        if origin < first:
            valid = valid.copy()
            valid[:first] = False
        part = place(self._vectors), place(valid), origin
        if part_rows == len(self):
            self._resident = part
        return part


def _padded(queries: np.ndarray) -> np.ndarray:
    """Pads a batch of queries to one of few sizes, so that few programs are compiled."""
    size = len(queries)
    size = 1 << (size - 1).bit_length() if size <= 64 else _round_up(size, 64)
    return np.pad(queries, ((0, size - len(queries)), (0, 0)))


def _advise(vectors: np.ndarray, first: int, last: int, advice: str) -> None:
    """Calls `madvise` for rows of a read-only memory map; does nothing for other arrays.

    Without MADV_DONTNEED, pages of rows that were searched count as memory of this process. They
    stay in the page cache of the system.
    """
    base, is_read_only = vectors, False
    while isinstance(base, np.ndarray):
        # MADV_DONTNEED would lose written pages of a copy-on-write map.
        is_read_only |= isinstance(base, np.memmap) and base.mode == "r"
        base = base.base
    first, last = max(first, 0), min(last, len(vectors))
    if not is_read_only or not isinstance(base, mmap.mmap) or first >= last:
        return
    if not vectors.flags.c_contiguous or not hasattr(mmap, advice):
        return
    origin = vectors.ctypes.data - np.frombuffer(base, np.uint8).ctypes.data
    row_bytes = vectors.dtype.itemsize * vectors.shape[1]
    begin = (origin + first * row_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    base.madvise(getattr(mmap, advice), begin, origin + last * row_bytes - begin)


# Checks of arguments
# -------------------


def check_vectors(vectors: Any, dim: int | None = None) -> None:
    if getattr(vectors, "ndim", None) != 2:
        shape = getattr(vectors, "shape", type(vectors).__name__)
        raise InputError(f"vectors: shape {shape} must be [rows, dimension]")
    if not all(vectors.shape):
        raise InputError(f"vectors: shape {vectors.shape} has no numbers; add passages first")
    if vectors.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise InputError(
            f"vectors: type {vectors.dtype} must be float32, bfloat16 or float16; convert them"
        )
    if len(vectors) > INT32_MAX:
        raise InputError(f"vectors: {len(vectors)} rows are more than {INT32_MAX}; split them")
    if dim is not None and vectors.shape[1] != dim:
        raise InputError(f"vectors: dimension {vectors.shape[1]}, but those indexed have {dim}")


def _check_queries(queries: Any, dim: int) -> None:
    if getattr(queries, "ndim", None) != 2:
        shape = getattr(queries, "shape", type(queries).__name__)
        raise InputError(f"queries: shape {shape} must be [queries, dimension]")
    if not jnp.issubdtype(queries.dtype, jnp.floating):
        raise InputError(f"queries: type {queries.dtype} must be a floating type")
    if queries.shape[1] != dim:
        raise InputError(f"queries: dimension {queries.shape[1]}, but the vectors have {dim}")


def check_valid(valid: Any, num_rows: int) -> None:
    if valid is None:
        return
    shape, dtype = (getattr(valid, name, type(valid).__name__) for name in ("shape", "dtype"))
    if shape != (num_rows,) or str(dtype) != "bool":
        raise InputError(f"valid: {dtype} of shape {shape} must be bool of shape ({num_rows},)")


def check_options(k: Any, metric: str = "dot", recall_target: float | None = None) -> None:
    check_integer("k", k, 1)
    check_one_of("metric", metric, METRICS)
    if recall_target is not None:
        Interval(above=0, most=1, hint="None is exact").check("recall_target", recall_target)


def finite_queries(queries: Any, dim: int) -> np.ndarray:
    queries = np.asarray(queries)
    _check_queries(queries, dim)
    queries = np.ascontiguousarray(queries, np.float32)
    if not np.isfinite(queries).all():
        row = np.argmin(np.isfinite(queries).all(1))
        raise InputError(f"queries: query {row} holds NaN or infinite numbers")
    return queries


def finite_rows(vectors: np.ndarray, rows: Any) -> np.ndarray:
    part = np.ascontiguousarray(vectors[rows], np.float32)
    if not np.isfinite(part).all():
        row = np.arange(len(vectors))[rows][np.argmin(np.isfinite(part).all(1))]
        raise InputError(f"vectors: row {row} holds NaN or infinite numbers")
    return part
