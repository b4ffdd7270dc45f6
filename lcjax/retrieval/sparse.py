"""Search by words: BM25 in five variants and tf-idf, through the package `bm25s`.

The score of a document is a sum over the terms of a query. A term that occurs tf times in a
document of length L (mean length A), and in df of N documents, adds (Kamphuis et al. 2020)

    lucene      ln(1 + (N - df + 0.5) / (df + 0.5))     * tf / (tf + K)
    robertson   max(0, ln((N - df + 0.5) / (df + 0.5))) * tf / (tf + K)
    atire       ln(N / df)                              * tf (k1 + 1) / (tf + K)
    bm25l       ln((N + 1) / (df + 0.5))                * (k1 + 1) (c + delta) / (k1 + c + delta)
    bm25+       ln((N + 1) / df)                        * (tf (k1 + 1) / (tf + K) + delta)
    tfidf       ln(N / df)                              * tf

with K = k1 (1 - b + b L / A) and c = tf / (1 - b + b L / A). `bm25s` computes these numbers when
the index is built, so a search only adds them. For robertson, `bm25s` omits the factor k1 + 1, as
Lucene does, which does not change the order, and replaces a negative idf by 0.

A term is a run of at least two letters, digits and marks, in lower case. In scripts without spaces
between words, and in Korean, whose particles are written without a space, the terms are all
characters and all pairs of neighbours (Nie et al. 2000, "On the use of words and n-grams for
Chinese information retrieval").
"""

import dataclasses
import functools
import json
import logging
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from tqdm.auto import tqdm

from lcjax.checkpoints.tokenizer import check_text
from lcjax.errors import (
    INT32_MAX,
    Fraction,
    InputError,
    Interval,
    OneOf,
    check_arguments,
    check_fields,
    check_integer,
    check_type,
    missing_extra,
    one_line,
)
from lcjax.files import atomic_file, read_json
from lcjax.retrieval.passages import UNSPACED
from lcjax.retrieval.search import check_valid

METHODS = ("lucene", "robertson", "atire", "bm25l", "bm25+", "tfidf")
_SETTINGS = "sparse.json"
_TERMS = 2  # version of the rule that splits texts into terms; 1 did so at spaces alone
_PAIRED = f"{UNSPACED}\uac00-\ud7a3"  # scripts whose characters and pairs are terms
_DELTA = {"bm25+": 1.0}  # default delta, from the papers; 0.5 for bm25l; others have none
# ATIRE's score for b = 0 and k1 -> infinity is tf * ln(N / df)
_INFINITE_K1 = 1e12


@dataclasses.dataclass(frozen=True)
class Sparse:
    """Settings of a search by words."""

    # Lucene, robertson, atire, bm25l, bm25+ or tfidf
    method: Annotated[str, OneOf(METHODS)] = "lucene"
    # Saturation: larger values count repeated words more; Pyserini has 0.9
    k1: Annotated[float, Interval(least=0, most=1e6)] = 1.5
    b: Fraction = 0.75  # normalisation by passage length, 0 (none) ... 1 (full); Pyserini has 0.4
    # Delta of bm25l and bm25+; null: 0.5 and 1
    delta: Annotated[float, Interval(least=0, most=1e6)] | None = None
    # Language of the stop words to leave out, one of those of bm25s, such as english; null: none
    stopwords: str | None = "english"
    # Language of the Snowball stemmer, such as english (pip install PyStemmer); null: whole words
    stemmer: str | None = None

    def __post_init__(self):
        check_fields("sparse", self)


class SparseIndex:
    """An inverted index of texts, whose rows are in the order of addition."""

    def __init__(self, settings: Sparse, bm25: Any):
        """Wraps `bm25`, a `bm25s.BM25` that has indexed texts; use `build` or `load`."""
        self.settings, self._bm25 = settings, bm25
        self._terms = _Terms(settings)

    @classmethod
    @check_arguments
    def build(
        cls, texts: Iterable[str], *, progress: bool = False, **settings: Any
    ) -> "SparseIndex":
        """Builds an index of the words of texts.

        Args:
          texts: the documents; may be an iterator.
          progress: whether to show a progress bar.
          **settings: fields of `Sparse`.

        Raises:
          InputError: bm25s is not installed, or no text has a word.
        """
        settings = Sparse(**settings)
        tokens = _Terms(settings).tokenize(_checked(texts), progress)
        if not tokens.vocab:
            raise InputError("no passage has a word to search for: choose other text or stopwords")
        is_tfidf = settings.method == "tfidf"
        delta = _DELTA.get(settings.method, 0.5) if settings.delta is None else settings.delta
        bm25 = _bm25s().BM25(
            method="atire" if is_tfidf else settings.method,
            k1=_INFINITE_K1 if is_tfidf else settings.k1,
            b=0.0 if is_tfidf else settings.b,
            delta=delta,
        )
        bm25.index(tokens, create_empty_token=False, show_progress=progress)
        return cls(settings, bm25)

    @staticmethod
    @check_arguments
    def check(settings: Sparse) -> None:
        """Raises an InputError if bm25s, the stop words or the stemmer are not available."""
        _Terms(settings)

    def __len__(self) -> int:
        return int(self._bm25.scores["num_docs"])

    @check_arguments
    def scores(self, query: str) -> tuple[np.ndarray, np.ndarray]:
        """Scores all texts for one query.

        Args:
          query: a question.

        Returns:
          Scores float32 [n], and bool [n]: whether a text has one of the words of the query.
        """
        return self._scores(query)

    def _scores(self, query: str) -> tuple[np.ndarray, np.ndarray]:
        bm25, vocabulary = self._bm25, self._bm25.vocab_dict
        ids = [vocabulary[word] for word in self._terms(query) if word in vocabulary]
        has_word = np.zeros(len(self), bool)
        if not ids:
            return np.zeros(len(self), np.float32), has_word
        starts, texts = bm25.scores["indptr"], bm25.scores["indices"]
        for i in set(ids):
            rows = texts[starts[i] : starts[i + 1]]
            if len(rows) and not 0 <= rows.min() <= rows.max() < len(self):
                raise _damaged(f"names a text outside of 0 ... {len(self) - 1}")
            has_word[rows] = True
        scores = bm25.get_scores_from_ids(ids)
        if not np.isfinite(scores).all():
            raise _damaged("holds NaN or infinite scores")
        return scores, has_word

    @check_arguments
    def search(
        self, queries: Sequence[str], k: int, *, valid: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the k texts with the highest scores among those that have a word of the query.

        Args:
          queries: questions.
          k: number of texts for each query.
          valid: bool [n], texts that may be returned; None: all.

        Returns:
          Scores float32 [queries, k] and rows int64 [queries, k], best first, equal scores in the
          order of rows. -inf and -1 fill the places if fewer than k texts have a word of the query.
        """
        check_integer("k", k, 1)
        check_valid(valid, len(self))
        scores = np.full((len(queries), k), -np.inf, np.float32)
        rows = np.full((len(queries), k), -1, np.int64)
        for i, query in enumerate(queries):
            check_type("queries: one", query, str)
            text_scores, candidates = self._scores(query)
            candidates = np.flatnonzero(candidates if valid is None else candidates & valid)
            best = top_rows(text_scores[candidates], k)
            rows[i, : len(best)] = candidates[best]
            scores[i, : len(best)] = text_scores[candidates[best]]
        return scores, rows

    @check_arguments
    def save(self, folder: str | Path) -> None:
        """Writes the index into a folder; `sparse.json` is its last file."""
        self._bm25.save(str(folder), show_progress=False)
        with atomic_file(Path(folder) / _SETTINGS) as file:
            json.dump(dataclasses.asdict(self.settings) | {"terms": _TERMS}, file)

    @classmethod
    def load(cls, folder: str | Path) -> "SparseIndex":
        """Opens an index; its arrays are memory-mapped.

        Raises:
          InputError: a file is missing or damaged, or bm25s is not installed.
        """
        library = _bm25s()
        try:
            if not (settings := read_json(Path(folder) / _SETTINGS, {})):
                raise ValueError(f"{_SETTINGS} is missing")
            bm25 = library.BM25.load(str(folder), mmap=True)
            _check_files(bm25)
            older = settings.pop("terms", 1) != _TERMS
            if older and not all(map(str.isascii, bm25.vocab_dict)):
                raise ValueError("an older version, which split other terms, wrote it")
            return cls(Sparse(**settings), bm25)
        except (OSError, ValueError, TypeError, LookupError, EOFError, AttributeError) as error:
            raise InputError(
                f"{folder} is no readable index of words ({one_line(error)}); build the"
                " datastore again"
            ) from None


def _damaged(reason: str) -> InputError:
    return InputError(
        f"the index of words is damaged: it {reason}; copy the datastore again, or build it again"
    )


def _check_files(bm25: Any) -> None:
    """Raises a ValueError or a TypeError unless the parts of a loaded index fit together.

    `bm25s` loads any arrays and settings. Rows of texts are checked when a search reads them.
    """
    data, texts, starts = (bm25.scores[name] for name in ("data", "indices", "indptr"))
    for name, array, kinds in (
        ("data", data, "f"),
        ("indices", texts, "iu"),
        ("indptr", starts, "iu"),
    ):
        if array.ndim != 1 or array.dtype.kind not in kinds:
            raise ValueError(f"{name} is {array.dtype} of shape {array.shape}")
    types = np.dtype(bm25.dtype), np.dtype(bm25.int_dtype)
    if (types[0].kind, types[1].kind) != ("f", "i"):
        raise ValueError(f"params.index.json has the types {types[0]} and {types[1]}")
    count = bm25.scores["num_docs"]  # None if it is missing
    if type(count) is not int or not 0 < count <= INT32_MAX:
        raise ValueError(f"params.index.json has num_docs={count!r:.40}")
    ids = list(bm25.vocab_dict.values())
    if any(type(i) is not int for i in ids) or sorted(ids) != list(range(len(starts) - 1)):
        raise ValueError("vocab.index.json does not number the words of indptr")
    if bm25.nonoccurrence_array is not None and bm25.nonoccurrence_array.shape != (len(ids),):
        raise ValueError("nonoccurrence_array is of another size")
    is_sorted = starts[0] == 0 and bool((starts[:-1] <= starts[1:]).all())
    if not is_sorted or not len(data) == len(texts) == starts[-1]:
        raise ValueError("its files do not fit together")


def top_rows(scores: np.ndarray, k: int) -> np.ndarray:
    """Returns the indices int [<= k] of the k highest scores, best first, equal ones in order."""
    places = np.arange(len(scores))
    if len(scores) > k:
        least = np.partition(scores, len(scores) - k)[len(scores) - k]
        places = np.flatnonzero(scores >= least)
    return places[np.argsort(-scores[places], kind="stable")[:k]]


class _Terms:
    """Splits texts into terms, leaves out stop words, and reduces the others to their stems."""

    def __init__(self, settings: Sparse):
        self._stopwords, self._stem = settings.stopwords, _stemmer(settings.stemmer)
        try:
            self._left_out = frozenset(self._tokenizer().stopwords or ())
        except ValueError as error:
            raise InputError(f"sparse.stopwords={self._stopwords}: {error}") from None

    def __call__(self, text: str) -> list[str]:
        """Returns the terms of a text in order."""
        words = [word for word in _split(text) if word not in self._left_out]
        return list(map(self._stem, words)) if self._stem else words

    def tokenize(self, texts: Iterable[str], progress: bool) -> Any:
        """Returns the `Tokenized` term ids of texts, numbered in the order of first occurrence."""
        tokenizer = self._tokenizer()
        texts = tqdm(texts, "words", disable=not progress, leave=False)
        ids = list(tokenizer.streaming_tokenize(texts, allow_empty=False))
        vocabulary = tokenizer.stem_to_sid if self._stem else tokenizer.word_to_id
        return _bm25s().tokenization.Tokenized(ids, vocabulary)

    def _tokenizer(self) -> Any:
        return _bm25s().tokenization.Tokenizer(
            lower=False, splitter=_split, stopwords=self._stopwords, stemmer=self._stem
        )


def _checked(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        check_text(text)
        yield text


def _split(text: str) -> list[str]:
    """Splits a text into terms in lower case, as described at the top."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
    text = text.lower()
    patterns = _patterns()
    if text.isascii() or not patterns.other.search(text):
        return patterns.words.findall(text)
    return patterns.terms.findall(patterns.run.sub(_with_pairs, text))


def _with_pairs(run: re.Match) -> str:
    characters = _patterns().character.findall(run[0])
    pairs = map("".join, zip(characters, characters[1:]))
    return f" {' '.join([*characters, *pairs])} "


class _Patterns(NamedTuple):
    words: re.Pattern  # terms of a text in which `other` occurs nowhere; much faster than `terms`
    other: re.Pattern
    run: re.Pattern  # characters of scripts whose pairs are terms
    character: re.Pattern  # a character and its marks
    terms: re.Pattern  # terms of a text whose runs are split


@functools.cache
def _patterns() -> _Patterns:
    # Python's \w has no marks, such as the vowel signs of Hindi. Beyond 0xffff a class is slow.
    marks = "".join(c for c in map(chr, range(0x10000)) if unicodedata.category(c)[0] == "M")
    with_marks = rf"[{marks}]+\w*"
    return _Patterns(
        words=re.compile(r"\w\w+"),
        other=re.compile(f"[{_PAIRED}{marks}]"),
        run=re.compile(f"[{_PAIRED}]+"),
        character=re.compile(f".[{marks}]*"),
        terms=re.compile(rf"\w\w+(?:{with_marks})*|\w(?:{with_marks})+|[{_PAIRED}]"),
    )


def _stemmer(language: str | None) -> Callable[[str], str] | None:
    if language is None:
        return None
    try:
        import Stemmer
    except ImportError:
        raise InputError(
            f"sparse.stemmer={language} needs PyStemmer: pip install PyStemmer, or set null"
        ) from None
    try:
        return Stemmer.Stemmer(language).stemWord
    except KeyError:
        known = ", ".join(Stemmer.algorithms())
        raise InputError(f"sparse.stemmer={language} must be one of {known}") from None


def _bm25s() -> Any:
    try:
        import bm25s
    except ImportError as error:
        raise missing_extra("a search by words", "bm25s", "retrieval", error) from None
    logging.getLogger("bm25s").setLevel(logging.WARNING)  # it sets itself to DEBUG
    return bm25s
