"""Retrievers: search the passages of a datastore that fit a question best.

    retriever = Retriever.open("stores/plays", kind="hybrid")
    hits = retriever.search(["Who is Ophelia's brother?"], k=5)[0]

Sparse search compares words, dense search compares vectors. Hybrid search sums the reciprocal ranks
of both (reciprocal rank fusion, Cormack et al. 2009). A slower model (`Reranker`) can rank the best
results of any search again.
"""

import dataclasses
import random
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lcjax.errors import (
    InputError,
    Interval,
    check_arguments,
    check_integer,
    check_one_of,
    check_seed,
)
from lcjax.parallel.sharding import Mesh, make_mesh
from lcjax.retrieval.datastore import Datastore
from lcjax.retrieval.encoder import Encoder
from lcjax.retrieval.faiss_index import KINDS as FAISS_KINDS
from lcjax.retrieval.passages import Passage, join_words, sentences, split_words
from lcjax.retrieval.search import ExactIndex
from lcjax.retrieval.sparse import SparseIndex, top_rows

KINDS = ("sparse", "dense", "hybrid")
_DROPPED = 0.2  # share of the words that the sanity test leaves out of a sentence
_WORDS = (6, 40)  # least and most words of a sentence of the sanity test
_LEAST = 0.9  # least rate at which the sanity test must find verbatim sentences

# Maps (queries, k) to scores float32 [q, k] and rows int64 [q, k], best first. The row is -1 where
# a query has fewer than k results.
SearchFunction = Callable[[Sequence[str], int], tuple[np.ndarray, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Hit:
    """A passage that a search returned, with its score."""

    passage: Passage
    score: float


class Reranker(Protocol):
    """A model that scores a question and a passage together."""

    def score(self, query: str, passages: Sequence[str]) -> np.ndarray:
        """Returns a float score [passages] of each passage; larger is better."""
        ...


class Retriever:
    """Searches the passages of a datastore.

    A retriever searches the passages that the datastore had when the retriever was made. Open it
    again after `append` or `delete`.
    """

    @check_arguments
    def __init__(
        self,
        store: Datastore,
        searches: Sequence[SearchFunction],
        *,
        rerank: Reranker | None = None,
        k_candidates: int = 100,
        rank_constant: float = 60.0,
    ):
        """Combines one or several searches of a datastore. Most callers use `open`.

        Args:
          store: the datastore of the passages.
          searches: one search, or several whose reciprocal ranks are summed.
          rerank: model that scores the best candidates again.
          k_candidates: number of passages of each search that are fused or ranked again.
          rank_constant: a passage of rank r, counted from 1, adds 1 / (rank_constant + r).
        """
        check_integer("k_candidates", k_candidates, 1)
        Interval(least=0).check("rank_constant", rank_constant)
        if rerank is not None and not hasattr(rerank, "score"):
            raise InputError(
                f"rerank={getattr(rerank, 'name', repr(rerank)):.60} cannot score(query, passages):"
                " open a cross-encoder or ColBERT with open_encoder(path)"
            )
        self.store, self._searches, self._rerank = store, list(searches), rerank
        self._k_candidates, self._rank_constant = k_candidates, rank_constant

    @classmethod
    def open(
        cls,
        folder: str | Path | Datastore,
        kind: str | None = None,
        *,
        encoder: Encoder | str | Path | None = None,
        index: str = "exact",
        rerank: Reranker | None = None,
        k_candidates: int = 100,
        rank_constant: float = 60.0,
        mesh: Mesh | None = None,
    ) -> "Retriever":
        """Opens a datastore for searching.

        Args:
          folder: the datastore, or its folder.
          kind: sparse, dense or hybrid. None: hybrid if the datastore has an index of words and
            vectors, else the one that it has; `encoder` or an `index` that is not exact implies a
            search of vectors.
          encoder: encoder of the queries, or its path if it has moved; None: the encoder that made
            the vectors.
          index: search of the vectors: exact, or an index that was built: ivf, ivf_pq or hnsw.
          rerank: model that scores the best candidates again, such as a `CrossEncoder`.
          k_candidates: number of passages of each search that are fused or ranked again.
          rank_constant: a passage of rank r, counted from 1, adds 1 / (rank_constant + r) to the
            score of a hybrid search.
          mesh: devices that share the vectors of an exact search and the texts of the encoder;
            None: one device.

        Raises:
          InputError: the folder is not a datastore, has no such index, or has vectors of another
            encoder.
        """
        check_one_of("index", index, ("exact", *FAISS_KINDS))
        store = folder if isinstance(folder, Datastore) else Datastore(folder)
        if kind is None:
            has_words, has_vectors = (store.index[key] for key in ("sparse", "encoders"))
            # A given encoder or index of vectors is never ignored silently.
            is_dense = has_vectors or encoder is not None or index != "exact"
            kind = "hybrid" if has_words and is_dense else "dense" if is_dense else "sparse"
        check_one_of("kind", kind, KINDS)
        searches: list[SearchFunction] = []
        if kind != "dense":
            searches.append(_sparse_search(store))
        if kind != "sparse":
            if encoder is None or isinstance(encoder, str | Path):
                encoder = store.open_encoder(encoder, mesh)
            searches.append(_dense_search(store, encoder, index, mesh))
        return cls(
            store,
            searches,
            rerank=rerank,
            k_candidates=k_candidates,
            rank_constant=rank_constant,
        )

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """Returns the k best passages of each query.

        Args:
          queries: list of questions.
          k: number of passages for each query.

        Returns:
          The hits of each query, best first. A query has fewer than k hits if fewer passages match.
          The score of a hit is that of the re-ranker if there is one. Otherwise it is that of the
          search (BM25, or the product of vectors), or for hybrid search the sum of
          1 / (rank_constant + rank).

        Raises:
          InputError: an argument has the wrong type.
        """
        check_integer("k", k, 1)
        queries = _check_queries(queries)
        if not queries:
            return []
        is_simple = len(self._searches) == 1 and self._rerank is None
        num = k if is_simple else max(k, self._k_candidates)
        num = min(num, self.store.num_rows)
        results = [search(queries, num) for search in self._searches]
        if len(results) == 1:
            ranked = [_pairs(*row) for row in zip(*results[0])]
        else:
            rows = zip(*(rows for _, rows in results))
            ranked = [fuse_ranks(lists, self._rank_constant) for lists in rows]
        if self._rerank is not None:
            ranked = [self._rank_again(query, pairs[:num]) for query, pairs in zip(queries, ranked)]
        return [self._hits(pairs[:k]) for pairs in ranked]

    def _rank_again(self, query: str, pairs: list[tuple[int, float]]) -> list[tuple[int, float]]:
        if not pairs:
            return []
        rows = np.array([row for row, _ in pairs])
        passages = [passage.full_text for passage in self.store.passages(rows)]
        scores = np.asarray(self._rerank.score(query, passages), np.float64)
        if scores.shape != (len(rows),) or not np.isfinite(scores).all():
            raise InputError(
                f"rerank.score returned {list(scores.shape)}, not {len(rows)} finite numbers, one"
                " for each passage"
            )
        return [(int(rows[i]), float(scores[i])) for i in top_rows(scores, len(scores))]

    def _hits(self, pairs: list[tuple[int, float]]) -> list[Hit]:
        passages = self.store.passages([row for row, _ in pairs])
        return [Hit(passage, score) for passage, (_, score) in zip(passages, pairs)]


def _check_queries(queries: Sequence[str]) -> list[str]:
    if isinstance(queries, str) or not isinstance(queries, Iterable):
        raise InputError("queries must be a list of texts: write search([question], k)")
    queries = list(queries)
    for i, query in enumerate(queries):
        if not isinstance(query, str):
            raise InputError(f"queries[{i}]={query!r:.60} must be a text")
    return queries


def _pairs(scores: np.ndarray, rows: np.ndarray) -> list[tuple[int, float]]:
    return [(int(row), float(score)) for row, score in zip(rows, scores) if row >= 0]


def fuse_ranks(lists: Iterable[np.ndarray], constant: float) -> list[tuple[int, float]]:
    """Fuses ranked lists: scores each row by the sum over the lists of 1 / (constant + rank).

    Args:
      lists: rows of each list, best first; negative rows are padding.
      constant: number added to ranks, which count from 1.

    Returns:
      Pairs (row, score), best first, and equal scores in the order of rows.
    """
    scores: dict[int, float] = {}
    for rows in lists:
        for rank, row in enumerate(rows[rows >= 0].tolist(), 1):
            scores[row] = scores.get(row, 0.0) + 1 / (constant + rank)
    return sorted(scores.items(), key=lambda pair: (-pair[1], pair[0]))


def _sparse_search(store: Datastore) -> SearchFunction:
    index: SparseIndex = store.sparse()
    valid = store.valid
    return lambda queries, k: index.search(queries, k, valid=valid)


def _dense_search(
    store: Datastore, encoder: Encoder, index: str, mesh: Mesh | None
) -> SearchFunction:
    valid = store.valid
    if index == "exact":
        vectors = store.vectors(encoder)  # raises an InputError for another encoder
        devices = None if mesh is None else make_mesh(mesh)
        exact = ExactIndex(vectors, valid=valid, mesh=devices)
        return lambda queries, k: exact.search(encoder.encode_queries(queries), k)
    faiss = store.faiss(index, encoder)

    def search(queries: Sequence[str], k: int) -> tuple[np.ndarray, np.ndarray]:
        return _search_valid(faiss, encoder.encode_queries(queries), k, valid)

    return search


def _search_valid(
    index: Any, queries: np.ndarray, k: int, valid: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Searches an index that cannot mask rows: doubles the results until k of them are valid."""
    if valid is None:
        return index.search(queries, k)
    num = k
    while True:
        num = min(2 * num, len(valid))
        scores, rows = index.search(queries, num)
        is_valid = (rows >= 0) & valid[rows]
        # An approximate index may return fewer rows than requested.
        if num == len(valid) or (is_valid.sum(1) >= k).all():
            break
    order = np.argsort(~is_valid, axis=1, kind="stable")[:, :k]
    scores, rows = (np.take_along_axis(x, order, 1) for x in (scores, rows))
    is_valid = np.take_along_axis(is_valid, order, 1)
    return np.where(is_valid, scores, -np.inf), np.where(is_valid, rows, -1)


@dataclasses.dataclass(frozen=True)
class SanityTest:
    """Rates at which a search with a sentence of a passage returns that passage.

    `rates` maps the variants of the sentences (verbatim, dropped words, swapped words) to hit@1,
    hit@10 and MRR (of ten hits).
    """

    num_sentences: int
    rates: dict[str, dict[str, float]]

    @property
    def passed(self) -> bool:
        return all(rate >= _LEAST for rate in self.rates["verbatim"].values())

    def table(self) -> str:
        """Returns the rates as a Markdown table."""
        names = list(self.rates["verbatim"])
        lines = [f"| {self.num_sentences} sentences | {' | '.join(names)} |"]
        lines.append("|---|" + "---:|" * len(names))
        for variant, rates in self.rates.items():
            lines.append(f"| {variant} | {' | '.join(f'{rate:.3f}' for rate in rates.values())} |")
        return "\n".join(lines)


@check_arguments
def check(retriever: Retriever, n: int = 100, seed: int = 0) -> SanityTest:
    """Tests a retriever: searches sentences of the passages and returns the rates of hits.

    Each sentence is searched verbatim, with words left out, and with words swapped. Any passage
    that contains the sentence counts as a hit, because passages may overlap. Warns if a rate of
    verbatim sentences is below 0.9.

    Args:
      retriever: the retriever to test.
      n: number of sentences, each from a different passage. Fewer are searched if fewer passages
        have a sentence of 6 to 40 words.
      seed: seed of the choice of sentences, and of the words that are left out or swapped.

    Raises:
      InputError: no passage has a sentence of 6 to 40 words.
    """
    check_integer("n", n, 1)
    check_seed("seed", seed)
    generator = random.Random(seed)
    samples = _sample_sentences(retriever.store, n, generator)
    variants = {
        "verbatim": lambda text: text,
        "dropped words": lambda text: join_words(_drop(split_words(text), generator)),
        "swapped words": lambda text: join_words(_swap(split_words(text), generator)),
    }
    rates = {}
    for name, change in variants.items():
        results = retriever.search([change(sample) for sample in samples], 10)
        ranks = np.array([_rank(*pair) for pair in zip(samples, results)])
        rates[name] = {
            "hit@1": float((ranks == 1).mean()),
            "hit@10": float((ranks > 0).mean()),
            "MRR": float(np.where(ranks > 0, 1 / np.maximum(ranks, 1), 0).mean()),
        }
    result = SanityTest(len(samples), rates)
    if not result.passed:
        low = {name: round(rate, 3) for name, rate in rates["verbatim"].items() if rate < _LEAST}
        warnings.warn(
            f"sentences of the passages themselves are found too rarely ({low}, below {_LEAST}):"
            " check the chunking, the encoder's pooling and prefixes, or the index",
            stacklevel=2,
        )
    return result


def _rank(sample: str, hits: list[Hit]) -> int:
    """Returns the rank, from 1, of the first passage that contains a sentence; 0 if none does."""
    contains = (sample in _plain(hit.passage.text) for hit in hits)
    return next((rank for rank, is_hit in enumerate(contains, 1) if is_hit), 0)


def _sample_sentences(store: Datastore, n: int, generator: random.Random) -> list[str]:
    rows = np.arange(store.num_rows) if store.valid is None else np.flatnonzero(store.valid)
    samples: list[str] = []
    # 20 n passages, because some have no sentence of the right length.
    for row in generator.sample(range(len(rows)), min(len(rows), 20 * n)):
        (passage,) = store.passages([rows[row]])
        fitting = [
            plain
            for sentence in sentences(passage.text)
            if _WORDS[0] <= len(split_words(plain := _plain(sentence))) <= _WORDS[1]
        ]
        if fitting:
            samples.append(generator.choice(fitting))
        if len(samples) == n:
            break
    if not samples:
        raise InputError(
            f"{store.folder}: no passage has a sentence of {_WORDS[0]} to {_WORDS[1]} words to test"
            " the search with"
        )
    return samples


def _plain(text: str) -> str:
    """Returns a text with every run of white space replaced by one space."""
    return re.sub(r"\s+", " ", text).strip()


def _drop(words: list[str], generator: random.Random) -> list[str]:
    num_dropped = max(1, round(_DROPPED * len(words)))
    dropped = set(generator.sample(range(len(words)), num_dropped))
    return [word for i, word in enumerate(words) if i not in dropped]


def _swap(words: list[str], generator: random.Random) -> list[str]:
    """Swaps a word with the next one with probability 1/2; each word is swapped at most once."""
    words, i = list(words), 0
    while i + 1 < len(words):
        if generator.random() < 0.5:
            words[i], words[i + 1] = words[i + 1], words[i]
            i += 1
        i += 1
    return words
