"""Training pairs of queries and passages for an encoder: the section `retriever.pairs`.

Pairs are read from records, or made from plain text: two random crops of one piece of text, or a
sentence and the passage around it. They are converted to rows of token ids in fixed shapes, in an
order that a resumed run continues (`lcjax.data.Loader`).
"""

import abc
import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import draccus
import grain
import numpy as np

from lcjax.checkpoints.bert_folder import BertTokenizer
from lcjax.checkpoints.tokenizer import check_text
from lcjax.data import DataConfig, Loader, TextSource, check_sources
from lcjax.data.corpus import Corpus, Documents, corpus_identity, open_split
from lcjax.data.data_config import TextConfig
from lcjax.data.files import FileCache, FileList, kind
from lcjax.data.loader import batch_rows, concatenate, mixed_rows, read_elements
from lcjax.data.readers import Document, JsonLinesReader, Reader, RecordFiles
from lcjax.errors import Fraction, InputError, Interval, Range, check_fields
from lcjax.files import parse_json
from lcjax.retrieval.encoder import with_title
from lcjax.retrieval.passages import sentences
from lcjax.storage import URLPath, check_regular, to_path

Ids = Sequence[int]
# Fields of a record: their names here and in DPR's files.
_QUERY, _POSITIVES = ("query", "question"), ("positive", "positive_ctxs")
_NEGATIVES = ("negatives", "hard_negative_ctxs")
# Fields of `data` that determine the pairs and their order.
_DATA_FIELDS = ("shuffle", "shuffle_rows", "seed", "holdout", "min_document_tokens")

_ROW_FIELDS = ("query_tokens", "passage_tokens", "negatives")


class PairRecord(NamedTuple):
    """A query with its passages; a passage is a pair (title, text)."""

    query: str
    positives: list[tuple[str, str]]
    negatives: list[tuple[str, str]]


class PairIds(NamedTuple):
    """Token ids of a pair without special tokens; the first passage is the positive."""

    query: Ids
    passages: list[Ids]


@dataclasses.dataclass(frozen=True)
class PairRows:
    """Converts pairs to rows of token ids."""

    tokenizer: BertTokenizer
    prefixes: tuple[str, str]  # of queries and of passages
    query_tokens: int  # maximum tokens of a query, special tokens included
    passage_tokens: int
    negatives: int  # number of hard negatives of a query

    def encode(self, texts: Sequence[str], *, is_query: bool) -> list[list[int]]:
        """Returns the token ids of texts with their prefix."""
        prefix = self.prefixes[not is_query]
        return self.tokenizer.encode([prefix + text for text in texts])

    @functools.cached_property
    def prefix_ids(self) -> tuple[list[int], list[int]]:
        """Token ids of the prefix of queries and of the prefix of passages."""
        query, passage = self.tokenizer.encode(self.prefixes)
        return query, passage

    def fields(self, pair: PairIds) -> dict[str, np.ndarray]:
        """Returns the fields of a row; `open_pairs` lists them with their shapes."""
        query, length = self._row(pair.query, self.query_tokens)
        passages = [self._row(ids, self.passage_tokens) for ids in pair.passages]
        digests = [hashlib.blake2b(row.tobytes(), digest_size=4).digest() for row, _ in passages]
        return {
            "query": query,
            "query_length": length,
            "passages": np.stack([row for row, _ in passages]),
            "passage_lengths": np.array([length for _, length in passages], np.int32),
            "passage_ids": np.frombuffer(b"".join(digests), np.int32),
            "weights": np.float32(1),
        }

    def _row(self, ids: Ids, size: int) -> tuple[np.ndarray, np.int32]:
        row = [self.tokenizer.cls_id, *ids[: size - 2], self.tokenizer.sep_id]
        return np.pad(np.array(row, np.int32), (0, size - len(row))), np.int32(len(row))


class Pairs(draccus.ChoiceRegistry, abc.ABC):
    """Base class of the sources of pairs: the types of the section `retriever.pairs`."""

    def check(self, data: DataConfig, rows: int, negatives: int) -> None:
        """Raises an InputError if the pairs do not suit a batch of `rows` with `negatives` each."""
        del rows
        if negatives:
            raise InputError(
                f"retriever.negatives={negatives} are read from records; set"
                " retriever.pairs.type=records, or negatives=0"
            )
        check_sources(data)

    def corpora(self, data: DataConfig, split: str) -> list[Documents]:
        return open_split(data, split)

    @abc.abstractmethod
    def elements(
        self, corpus: Documents, rows: PairRows, data: DataConfig, **order: Any
    ) -> grain.IterDataset:
        """Returns the elements of a corpus from which pairs are sampled.

        `order` has the options of `StreamedCorpus.read_elements`.
        """

    @abc.abstractmethod
    def sample(
        self, element: Any, random: np.random.Generator, rows: PairRows, is_train: bool
    ) -> PairIds:
        """Samples a pair from an element."""


@Pairs.register_subclass("records")
@dataclasses.dataclass(frozen=True)
class Records(Pairs):
    """Reads records of a query, its positive passages and optional hard negatives.

    The file holds lines of JSON with `query`, `positive` and `negatives`, where a passage is a text
    or {title, text}, or has DPR's format (`question`, `positive_ctxs`, `hard_negative_ctxs`,
    Karpukhin et al. 2020, arXiv 2004.04906). If a record has several positives, or more negatives
    than `retriever.negatives`, every epoch of training reads random ones. Validation reads the
    first ones.
    """

    path: str = ""  # .jsonl (also .gz and .zst), or .json with a list of records

    def check(self, data: DataConfig, rows: int, negatives: int) -> None:
        if data.path or data.sources:
            raise InputError(
                "data.path and data.sources are not read with retriever.pairs.type=records; leave"
                " them out, or set the type to crops or inverse_cloze"
            )
        corpus = self._open(data)
        num_pairs = 0
        for i in range(len(corpus)):
            _, record = corpus[i]
            if not isinstance(record, PairRecord):
                continue
            num_pairs += 1
            if len(record.negatives) < negatives:
                raise InputError(
                    f"{corpus.locate(i).reader.location(i)} has {len(record.negatives)} negatives,"
                    f" and retriever.negatives={negatives}; lower it, or write more with `python -m"
                    " lcjax.retrieval negatives`"
                )
        if num_pairs < rows:
            raise InputError(
                f"retriever.pairs.path={self.path} has {num_pairs} records, fewer than"
                f" train.batch_size={rows}; lower it or give more records"
            )

    def corpora(self, data: DataConfig, split: str) -> list[Documents]:
        if split == "validation" and data.holdout == 0.0:
            raise InputError("data.holdout=0.0 leaves nothing for validation: set it to, say, 0.01")
        corpus = self._open(data).split(data.holdout, split)
        if not len(corpus):
            raise InputError(
                f"data.holdout={data.holdout} leaves no record of {self.path} for {split}: choose"
                " another fraction"
            )
        return [corpus]

    def _open(self, data: DataConfig) -> Corpus:
        path = to_path(self.path)
        if not self.path or not path.is_file():
            problem = " is empty" if not self.path else f"={self.path} is no file"
            raise InputError(
                f"retriever.pairs.path{problem}; name a .jsonl file of {{query, positive,"
                " negatives}, or a .json of DPR"
            )
        return Corpus(PairFiles(path, data))

    def elements(
        self, corpus: Documents, rows: PairRows, data: DataConfig, **order: Any
    ) -> grain.IterDataset:
        def element(document: tuple[str, Any]) -> PairRecord | None:
            return document[1] if isinstance(document[1], PairRecord) else None

        return read_elements(corpus, element, data.threads, **order)

    def sample(
        self, element: PairRecord, random: np.random.Generator, rows: PairRows, is_train: bool
    ) -> PairIds:
        positive, order = 0, np.arange(len(element.negatives))
        if is_train:
            positive = random.integers(len(element.positives))
            order = random.permutation(len(element.negatives))
        negatives = [element.negatives[i] for i in order[: rows.negatives]]
        texts = [with_title(*passage) for passage in (element.positives[positive], *negatives)]
        (query,) = rows.encode([element.query], is_query=True)
        return PairIds(query, rows.encode(texts, is_query=False))


@dataclasses.dataclass(frozen=True)
class TextPairs(Pairs):
    """Base class of types that make pairs from the text of `data:`."""

    def elements(
        self, corpus: Documents, rows: PairRows, data: DataConfig, **order: Any
    ) -> grain.IterDataset:
        least = corpus.source.min_document_tokens or data.min_document_tokens

        def pieces(document: tuple[str, Any]) -> list[Any] | None:
            name, text = document
            if not isinstance(text, str):
                raise InputError(
                    f"{name} holds no text; pairs are made from sources of type text: leave out"
                    " token ids, conversations and stored rows"
                )
            return self.pieces(text, rows, least) or None

        documents = read_elements(corpus, pieces, data.threads, **order)
        return grain.experimental.FlatMapIterDataset(documents, _Unpack())

    @abc.abstractmethod
    def pieces(self, text: str, rows: PairRows, least: int) -> list[Any]:
        """Cuts a document into pieces, each of which gives a pair.

        Args:
          text: text of the document.
          rows: encodes texts.
          least: minimum tokens of a document; shorter ones give no pieces.
        """


class _Unpack(grain.experimental.FlatMapTransform):
    """Flattens elements that are lists."""

    def flat_map(self, element: list[Any]) -> list[Any]:
        return element


@Pairs.register_subclass("crops")
@dataclasses.dataclass(frozen=True)
class Crops(TextPairs):
    """Pairs two random crops of one text (Contriever, Izacard et al. 2022, arXiv 2112.09118).

    Lengths and deleted tokens are drawn independently for both crops.
    """

    # Maximum tokens of the pieces into which documents are cut
    length: Annotated[int, Range(2)] = 256
    # Minimum length of a crop, as a share of the piece
    least: Annotated[float, Interval(above=0, most=1)] = 0.05
    most: Fraction = 0.5  # maximum length of a crop, as a share of the piece
    # Probability that a token is left out
    delete: Annotated[float, Interval(least=0, most=0.9)] = 0.1

    def __post_init__(self):
        check_fields("retriever.pairs", self)
        if self.least > self.most:
            raise InputError(
                f"retriever.pairs.least={self.least} must be above 0 and at most most={self.most}"
            )

    def pieces(self, text: str, rows: PairRows, least: int) -> list[np.ndarray]:
        (ids,) = rows.tokenizer.encode([text])
        if len(ids) < max(least, 2):
            return []
        # Pieces have equal lengths, because a short rest would give crops of a word or two.
        return np.array_split(np.array(ids, np.int32), -(-len(ids) // self.length))

    def sample(
        self, element: np.ndarray, random: np.random.Generator, rows: PairRows, is_train: bool
    ) -> PairIds:
        del is_train
        query, passage = rows.prefix_ids
        return PairIds(
            [*query, *self._crop(element, random)], [[*passage, *self._crop(element, random)]]
        )

    def _crop(self, ids: np.ndarray, random: np.random.Generator) -> list[int]:
        length = max(1, int(len(ids) * random.uniform(self.least, self.most)))
        start = random.integers(len(ids) - length + 1)
        crop = ids[start : start + length]
        is_kept = random.random(length) >= self.delete
        return (crop[is_kept] if is_kept.any() else crop[:1]).tolist()


@Pairs.register_subclass("inverse_cloze")
@dataclasses.dataclass(frozen=True)
class InverseCloze(TextPairs):
    """Pairs a sentence and the passage around it (ORQA, Lee et al. 2019, arXiv 1906.00300).

    A passage has as many whole sentences as fit into `retriever.passage_tokens`, at least two.
    """

    keep: Fraction = 0.1  # probability that the sentence stays in its passage

    def __post_init__(self):
        check_fields("retriever.pairs", self)

    def pieces(self, text: str, rows: PairRows, least: int) -> list[list[list[int]]]:
        encoded = [ids for ids in rows.tokenizer.encode(sentences(text)) if ids]
        if sum(map(len, encoded)) < least:
            return []
        limit = rows.passage_tokens - 2 - len(rows.prefix_ids[1])
        passages: list[list[list[int]]] = [[]]
        for ids in encoded:
            if passages[-1] and sum(map(len, passages[-1])) + len(ids) > limit:
                passages.append([])
            passages[-1].append(ids)
        return [passage for passage in passages if len(passage) > 1]

    def sample(
        self,
        element: list[list[int]],
        random: np.random.Generator,
        rows: PairRows,
        is_train: bool,
    ) -> PairIds:
        del is_train
        sentence = int(random.integers(len(element)))
        is_kept = random.random() < self.keep
        around = [ids for i, ids in enumerate(element) if is_kept or i != sentence]
        query, passage = rows.prefix_ids
        return PairIds(
            [*query, *element[sentence]], [[*passage, *itertools.chain.from_iterable(around)]]
        )


class PairFiles(RecordFiles):
    """A file of records of queries and passages."""

    def __init__(self, path: Path, config: TextConfig):
        # Does not call the base class, which rejects the suffix .json.
        self.source, self.config, self.fields = TextSource(str(path)), config, {}
        self.paths, self._num_skipped = FileList([(path.name, path)]), 0

    def reader_class(self, path: Path) -> type[Reader]:
        if kind(path) == ".jsonl":
            return JsonLinesReader
        if path.suffix.lower() == ".json":
            return JsonListReader
        raise InputError(f"retriever.pairs.path={path} is neither .jsonl nor .json")

    def _document(self, record: dict | str, location: str, name: str) -> Document:
        if isinstance(record, str) and not record.strip():  # an empty line
            return Document(name, None)
        return Document(name, read_pair(record, location))


class JsonListReader(Reader):
    """Reads a JSON list of records, all at once."""

    def __init__(self, files: RecordFiles, index: int, cache: FileCache):
        super().__init__(files, index, cache)
        if isinstance(self._path, URLPath):  # not cached: not all servers report a modified time
            self._records = _read_list(self._path)
        else:
            self._records = _read_local_list(self._path, self._path.stat().st_mtime_ns)

    def __len__(self) -> int:
        return len(self._records)

    def record(self, index: int) -> Any:
        return self._records[index]


@functools.lru_cache(maxsize=1)  # the checks, the training and the validation open the same file
def _read_local_list(path: Path, modified: int) -> list[Any]:
    del modified
    return _read_list(path)


def _read_list(path: Path) -> list[Any]:
    check_regular(path)
    data = path.read_bytes()
    try:
        records = parse_json(data)
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}; copy it again") from None
    if not isinstance(records, list):
        raise InputError(f"{path} is no list of records; name a .jsonl file for lines")
    return records


def read_pair(record: Any, location: str) -> PairRecord:
    """Converts a record of either format to a `PairRecord`; `location` is for error messages.

    Raises:
      InputError: the record has no query or no positive passage, or a field has the wrong type.
    """
    if not isinstance(record, dict):
        raise InputError(f"{location} is no record with query and positive")
    query = _field(record, _QUERY)
    if not isinstance(query, str) or not query.strip():
        raise InputError(f"{location} has no query: its field {_QUERY[0]} must be a text")
    positives, negatives = (
        _passages(_field(record, names), f"{location}: {names[0]}")
        for names in (_POSITIVES, _NEGATIVES)
    )
    if not positives:
        raise InputError(
            f"{location} has no positive passage; add one, or leave such records out with"
            " data.on_bad_record=skip"
        )
    for text in (query, *itertools.chain(*positives, *negatives)):
        try:
            check_text(text)
        except InputError as error:
            raise InputError(f"{location}: {error}") from None
    return PairRecord(query, positives, negatives)


def _field(record: dict, names: Sequence[str]) -> Any:
    return next((record[name] for name in names if record.get(name) is not None), None)


def _passages(value: Any, where: str) -> list[tuple[str, str]]:
    """Returns (title, text) of the passages in a text, {title, text}, or a list of them."""
    if value is None:
        return []
    passages = []
    for passage in value if isinstance(value, list) else [value]:
        fields = passage if isinstance(passage, dict) else {"text": passage}
        title, text = fields.get("title") or "", fields.get("text")
        if not isinstance(text, str) or not isinstance(title, str):
            raise InputError(f"{where}={passage!r:.60} must be a text or {{title, text}}")
        if text.strip():
            passages.append((title, text))
    return passages


@dataclasses.dataclass(frozen=True)
class _SourcePairs:
    """The elements of one corpus, with the interface of the sources of `mixed_rows`."""

    corpus: Documents
    pairs: Pairs
    make_rows: PairRows
    data: DataConfig

    def rows(self, **order: Any) -> grain.IterDataset:
        return self.pairs.elements(self.corpus, self.make_rows, self.data, **order)


def open_pairs(
    pairs: Pairs,
    rows: PairRows,
    data: DataConfig,
    *,
    batch_size: int,
    local_rows: Sequence[int],
    split: str,
) -> Loader:
    """Returns a resumable iterator over batches of pairs.

    With Q and P tokens of queries and passages, and N = 1 + `rows.negatives`, a batch has:

    - `query` int32 [B, Q] and `query_length` int32 [B]; 0 is padding.
    - `passages` int32 [B, N, P] and `passage_lengths` int32 [B, N]; the first one is the positive.
    - `passage_ids` int32 [B, N]: hashes, which are equal for passages of equal tokens.
    - `weights` float32 [B]: 1, or 0 for the rows that complete the last batch of a validation.

    Args:
      pairs: source of the pairs.
      rows: converts pairs to rows of token ids.
      data: text, order and validation split.
      batch_size: number of rows of the global batch.
      local_rows: indices of the rows of this process.
      split: "train", or "validation", which reads the held-out pairs once and in order.

    Raises:
      InputError: there are fewer pairs than rows in a batch, or no pairs for validation.
    """
    is_train = split == "train"
    sources = [_SourcePairs(corpus, pairs, rows, data) for corpus in pairs.corpora(data, split)]
    _check_count(sources, batch_size if is_train else 1, split)
    if is_train:
        elements = mixed_rows(sources, data)
    else:
        elements = concatenate([source.rows() for source in sources])

    def make(element: Any, random: np.random.Generator) -> dict[str, np.ndarray]:
        return rows.fields(pairs.sample(element, random, rows, is_train))

    batches = batch_rows(elements.random_map(make, seed=data.seed), batch_size, local_rows)
    batches = grain.experimental.ThreadPrefetchIterDataset(
        batches, prefetch_buffer_size=data.prefetch
    )
    return Loader(iter(batches), _identity(sources, split))


def _check_count(sources: Sequence[_SourcePairs], required: int, split: str) -> None:
    """Raises an InputError if an epoch has fewer than `required` pairs; reads only as many."""

    def each() -> Iterator[Any]:
        for source in sources:
            yield from source.rows()

    count = sum(1 for _ in itertools.islice(each(), required))
    if not count and split == "validation":
        holdout = sources[0].data.holdout
        raise InputError(f"data.holdout={holdout} leaves no pair for validation: raise it")
    if count < required:
        raise InputError(
            f"data has {count} pairs for training, fewer than train.batch_size={required}: a batch"
            " would hold a text twice; give more text, or lower it"
        )


def _identity(sources: Sequence[_SourcePairs], split: str) -> dict[str, Any]:
    """Returns all settings and fingerprints that determine the batches and their order."""
    first = sources[0]
    settings = dataclasses.asdict(first.pairs)
    settings.pop("path", None)  # the location of a file may change, its content may not
    rows = {name: getattr(first.make_rows, name) for name in _ROW_FIELDS}
    return {
        **{f"data.{name}": getattr(first.data, name) for name in _DATA_FIELDS},
        **{f"retriever.pairs.{name}": value for name, value in settings.items()},
        **{f"retriever.{name}": value for name, value in rows.items()},
        "prefixes": list(first.make_rows.prefixes),
        "tokenizer": first.make_rows.tokenizer.fingerprint,
        "pairs": type(first.pairs).__name__,
        "split": split,
        **corpus_identity([source.corpus for source in sources]),
    }
