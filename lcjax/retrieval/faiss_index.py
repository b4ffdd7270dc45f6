"""Approximate search: indices of FAISS on the host (extra `retrieval`).

An index of codes (`ivf_pq`) proposes candidates, and `RefinedIndex` scores them by their vectors.
"""

import math
import os
from typing import Any

import numpy as np

from lcjax.errors import (
    InputError,
    check_arguments,
    check_integer,
    check_one_of,
    check_seed,
    missing_extra,
)
from lcjax.files import atomic_file
from lcjax.retrieval.search import (
    METRICS,
    ExactIndex,
    check_options,
    check_vectors,
    finite_queries,
    finite_rows,
)

KINDS = ("ivf", "ivf_pq", "hnsw")
REFINE_FACTOR = 8  # candidates of an index of codes for each row of the result (docs/retrieval.md)
_EF_CONSTRUCTION = 200  # candidates during the construction of a graph
_TARGET_RECALL = 0.97  # recall@10 that `build` tunes a search for
_FAISS_ROWS = 1 << 16  # rows that are converted, checked and added at once
_CANDIDATE_NUMBERS = 1 << 24  # largest number of elements of candidates' vectors that exist at once


class FaissIndex:
    """An approximate index of FAISS on the host. Needs the extra `retrieval`.

    `build` chooses how many lists (`ivf`, `ivf_pq`) or nodes (`hnsw`) a search visits: about the
    fewest that reach a recall@10 of 0.97 on vectors of the index itself. The same vectors and seed
    give the same index. The graph of `hnsw` also depends on the order of threads, unless
    `faiss.omp_set_num_threads(1)` is called before.
    """

    def __init__(self, index: Any):
        self._index = index
        # recall@10 on 256 rows of the index; None unless `build` has tuned the width
        self.tuned_recall: float | None = None

    @classmethod
    def build(
        cls,
        vectors: np.ndarray,
        *,
        kind: str = "ivf",
        metric: str = "dot",
        nlist: int | None = None,
        nprobe: int | None = None,
        m: int | None = None,
        train_size: int | None = None,
        seed: int = 0,
    ) -> "FaissIndex":
        """Builds an index of all rows.

        Args:
          vectors: [N, D] float32, bfloat16 or float16; a memory map is read in blocks.
          kind: "ivf" (inverted lists of whole vectors), "ivf_pq" (of product-quantised vectors,
            `m` bytes each) or "hnsw" (a graph with `m` neighbours a node).
          metric: "dot" or "l2" (the score is the negative squared distance).
          nlist: lists; None: about the square root of N.
          nprobe: lists that a search visits; None: about the fewest that reach a recall@10 of 0.97.
            The queries are 256 rows of the index, and a query itself does not count as a result.
            For "ivf_pq" it is the recall of `RefinedIndex`, and at most 0.99 of the recall with all
            lists, because the codes limit the recall that can be reached.
          m: bytes of a vector ("ivf_pq") or neighbours of a node ("hnsw"); None: the largest
            divisor of D up to D / 4 for "ivf_pq", 32 for "hnsw".
          train_size: rows drawn to train lists and codes; None: 64 for each list, at least 16,384.
          seed: seed of the choice of training rows and queries.

        Raises:
          InputError: an argument is invalid, a number is not finite, or FAISS is not installed.
        """
        faiss = faiss_module()
        check_vectors(vectors)
        check_one_of("kind", kind, KINDS)
        check_one_of("metric", metric, METRICS)
        check_seed("seed", seed)
        num_rows, dim = vectors.shape
        for name, value in (
            ("nlist", nlist),
            ("nprobe", nprobe),
            ("m", m),
            ("train_size", train_size),
        ):
            if value is not None:
                check_integer(name, value, 1)
        generator = np.random.default_rng(seed)
        metric_type = faiss.METRIC_L2 if metric == "l2" else faiss.METRIC_INNER_PRODUCT
        if kind == "hnsw":
            index = faiss.IndexHNSWFlat(dim, m or 32, metric_type)
            index.hnsw.efConstruction = _EF_CONSTRUCTION
        else:
            nlist = nlist or default_lists(num_rows)
            if nlist > num_rows:
                raise InputError(f"nlist={nlist} must be at most the number of rows, {num_rows}")
            if train_size is not None and train_size < nlist:
                raise InputError(f"train_size={train_size} must be at least nlist={nlist}")
            size = min(train_size or max(64 * nlist, 1 << 14), num_rows)
            index = _inverted_lists(faiss, kind, metric_type, dim, nlist, m, size)
            index.cp.seed = seed
            index.cp.min_points_per_centroid = 1  # no warning for small corpora
            rows = np.sort(generator.choice(num_rows, size, replace=False))
            index.train(finite_rows(vectors, rows))
        result = cls(index)
        result.add(vectors)
        if kind == "hnsw":
            result._tune(vectors, num_rows, generator)
        elif nprobe is None:
            result._tune(vectors, nlist, generator)
        else:
            result._set_width(nprobe)
        return result

    def __len__(self) -> int:
        return self._index.ntotal

    @property
    def dim(self) -> int:
        return self._index.d

    @property
    def kind(self) -> str:
        names = {"IndexHNSWFlat": "hnsw", "IndexIVFPQ": "ivf_pq", "IndexIVFFlat": "ivf"}
        return names[type(self._index).__name__]

    @property
    def metric(self) -> str:
        return "l2" if self._index.metric_type == faiss_module().METRIC_L2 else "dot"

    @property
    def width(self) -> int:
        """Number of lists that a search visits (nprobe), or of candidates in a graph (efSearch)."""
        return self._index.hnsw.efSearch if self.kind == "hnsw" else self._index.nprobe

    def describe(self) -> str:
        """Returns a text with the width of a search, and its recall if `build` has measured it."""
        name = "efSearch" if self.kind == "hnsw" else f"nprobe (of {self._index.nlist} lists)"
        recall = "" if self.tuned_recall is None else f", recall@10 {self.tuned_recall:.3f}"
        return f"{self.kind}: {name} {self.width}{recall}"

    def _set_width(self, width: int) -> None:
        if self.kind == "hnsw":
            self._index.hnsw.efSearch = width
        else:
            self._index.nprobe = width

    def _tune(self, vectors: np.ndarray, most: int, generator: np.random.Generator) -> None:
        """Sets about the smallest width with the target recall.

        Doubles the width up to the target, and bisects the last interval to 1/8 of its upper end.
        """
        k = 10
        rows = np.sort(generator.choice(len(vectors), min(256, len(vectors)), replace=False))
        queries = np.asarray(vectors[rows], np.float32)

        def neighbours(index):
            _, results = index.search(queries, min(k + 1, len(vectors)))
            return [set(result) - {row} for result, row in zip(results, rows)]

        exact = neighbours(ExactIndex(vectors, metric=self.metric))
        index = RefinedIndex(self, vectors) if self.kind == "ivf_pq" else self

        def recall_of(width):
            self._set_width(width)
            pairs = zip(neighbours(index), exact)
            return float(np.mean([len(a & b) / max(len(b), 1) for a, b in pairs]))

        target = _TARGET_RECALL
        if self.kind == "ivf_pq":
            target = min(target, 0.99 * recall_of(most))
        least = 16 if self.kind == "hnsw" else 1  # FAISS's defaults
        low, high = least - 1, least
        while high < most and recall_of(high) < target:
            low, high = high, min(2 * high, most)
        while high - low > max(high // 8, 1):
            middle = (low + high) // 2
            low, high = (low, middle) if recall_of(middle) >= target else (middle, high)
        self.tuned_recall = recall_of(high)

    def add(self, vectors: np.ndarray) -> None:
        """Adds vectors; their rows are numbered from `len(self)` on."""
        check_vectors(vectors, self.dim)
        for first in range(0, len(vectors), _FAISS_ROWS):
            part = finite_rows(vectors, slice(first, first + _FAISS_ROWS))
            if self.kind == "hnsw":
                # FAISS does not save the state of the generator of levels. Seeded here, a loaded
                # index grows like the index in memory.
                self._index.hnsw.rng = faiss_module().RandomGenerator(len(self))
            self._index.add(part)

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns scores [Q, k] float32 and rows [Q, k] int64, best first."""
        queries = finite_queries(queries, self.dim)
        check_options(k)
        scores, rows = self._index.search(queries, k)
        return _best_first(-scores if self.metric == "l2" else scores, rows, k)

    @check_arguments
    def save(self, file: str | os.PathLike) -> None:
        """Writes the index to a file, atomically."""
        faiss = faiss_module()
        with atomic_file(file, "wb") as stream:
            faiss.write_index(self._index, faiss.PyCallbackIOWriter(stream.write))

    @classmethod
    def load(
        cls, file: str | os.PathLike, *, dim: int | None = None, count: int | None = None
    ) -> "FaissIndex":
        """Reads an index that `save` has written.

        Args:
          file: the file.
          dim: dimension that the index must have; None: any.
          count: number of rows that the index must have; None: any.

        Raises:
          InputError: the file is not such an index, or the index has another size.
        """
        faiss = faiss_module()
        try:
            result = cls(faiss.read_index(os.fspath(file)))
            result.kind  # noqa: B018 -- a KeyError for other indices
        except (RuntimeError, KeyError, TypeError):
            raise InputError(
                f"{file}: not an index of FaissIndex.save, or damaged; build it again"
            ) from None
        for name, value, size in (("dim", dim, result.dim), ("count", count, len(result))):
            if value is not None and value != size:
                raise InputError(f"{file}: {name}={size}, but {value} is needed; build it again")
        return result


class RefinedIndex:
    """An approximate index whose candidates are scored exactly, like FAISS's IndexRefine.

    Rows and scores are those of exact search, except that rows which are not candidates are
    missing.
    """

    @check_arguments
    def __init__(self, index: FaissIndex, vectors: np.ndarray, refine_factor: int = REFINE_FACTOR):
        """Combines an index with its vectors.

        Args:
          index: index that proposes the candidates.
          vectors: [N, D], the rows of the index. Only the candidates of a memory map are read.
          refine_factor: number of candidates for each row of the result.
        """
        check_vectors(vectors, index.dim)
        check_integer("refine_factor", refine_factor, 1)
        if len(vectors) != len(index):
            raise InputError(f"vectors: {len(vectors)} rows, but the index has {len(index)}")
        self._index, self._vectors, self._refine_factor = index, vectors, refine_factor

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns scores [Q, k] float32 and rows [Q, k] int64, best first."""
        queries = finite_queries(queries, self._index.dim)
        check_options(k)
        num_candidates = max(min(k * self._refine_factor, len(self._vectors)), k)
        _, rows = self._index.search(queries, num_candidates)
        scores = np.empty(rows.shape, np.float32)
        size = max(_CANDIDATE_NUMBERS // (num_candidates * queries.shape[1]), 1)
        for first in range(0, len(queries), size):
            part = slice(first, first + size)
            vectors = np.asarray(self._vectors[np.maximum(rows[part], 0)], np.float32)
            if self._index.metric == "l2":
                vectors -= queries[part, None]
                scores[part] = -np.einsum("QCD,QCD->QC", vectors, vectors)
            else:
                scores[part] = np.einsum("QCD,QD->QC", vectors, queries[part])
        return _best_first(scores, rows, k)


def _best_first(scores: np.ndarray, rows: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the k best of candidates [Q, C], equal scores in the order of rows; -1 is padding."""
    scores = np.where(rows < 0, -np.inf, scores).astype(np.float32)
    order = np.lexsort((rows, -scores), axis=1)[:, :k]
    return np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1)


def default_lists(num_rows: int) -> int:
    """Returns about the square root of N, with at least 39 rows in a list, FAISS's minimum."""
    return max(min(2 ** round(math.log2(num_rows) / 2), num_rows // 39), 1)


def faiss_module() -> Any:
    """Imports FAISS; raises an InputError if it is not installed."""
    try:
        import faiss
    except ImportError as error:
        raise missing_extra("an index of FAISS", "faiss-cpu", "retrieval", error) from None
    return faiss


def _inverted_lists(
    faiss: Any, kind: str, metric_type: int, dim: int, nlist: int, m: int | None, train_size: int
) -> Any:
    coarse = faiss.IndexFlat(dim, metric_type)
    if kind == "ivf":
        return faiss.IndexIVFFlat(coarse, dim, nlist, metric_type)
    m = m or max(part for part in range(1, max(dim // 4, 1) + 1) if dim % part == 0)
    if dim % m:
        raise InputError(f"m={m} must divide the dimension of the vectors, {dim}")
    if train_size < 2:
        raise InputError("kind=ivf_pq trains its codes on 2 rows or more, not on 1: use kind=ivf")
    bits = max(min(8, int(math.log2(train_size))), 1)
    index = faiss.IndexIVFPQ(coarse, dim, nlist, m, bits, metric_type)
    index.pq.cp.min_points_per_centroid = 1
    return index


def recall(index: Any, exact: Any, queries: np.ndarray, k: int) -> float:
    """Returns the mean share of the k rows of `exact` that `index` returns, too (recall@k).

    Args:
      index: an object with `search(queries, k)`.
      exact: the reference, with the same method; its rows of -1 do not count.
      queries: [Q, D], at least one.
      k: rows for each query.
    """
    for name, value in (("index", index), ("exact", exact)):
        if not hasattr(value, "search"):
            raise InputError(
                f"{name} is of type {type(value).__name__}, without search(queries, k)"
            )
    if not np.size(queries):
        raise InputError("queries: recall needs at least one query")
    _, rows = index.search(queries, k)
    _, reference = exact.search(queries, k)
    shares = [
        np.isin(right[right >= 0], left).mean()
        for left, right in zip(rows, reference)
        if (right >= 0).any()
    ]
    return float(np.mean(shares)) if shares else 1.0
