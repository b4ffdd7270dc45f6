"""`python -m lcjax.retrieval chunks` and `windows`: text with the passages retrieved for it.

`chunks` stores rows for a training, and `windows` a file for the task `rag_lm` of an evaluation.
There are two ways to choose the passages, which a memory reads as chunks in training:

- One search for a row (RetDoc in CEPE, Yen et al. 2024, arXiv 2402.16617, app. E.1): the first 256
  tokens of the row are the query, and all tokens of the row read the passages.
- With `data.chunks.stride`, one search for every `stride` tokens of a document (RETRO, Borgeaud et
  al. 2022, arXiv 2112.04426): these tokens are the query, and the tokens after them read the
  passages. RETRO calls the tokens of a query a chunk, and its passages neighbours.

Passages of the documents in a row are left out, because they would hold the text to be predicted.
Rows come from `data:` in the order of a training (`lcjax.data.stored_rows`). `windows` makes one
search for a window, as in CEPE's section 4.1.
"""

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from tqdm.auto import tqdm

from lcjax.data.corpus import check_outside_data, check_sources
from lcjax.data.data_config import RETRIEVED, DataConfig, SeqioSource, Source, TokenSource
from lcjax.data.jobs import begin, parse_part
from lcjax.data.loader import document_number, make_loader
from lcjax.data.prepare import open_tokenizer
from lcjax.data.stored_rows import RowsConfig, write_rows
from lcjax.errors import (
    InputError,
    NonEmpty,
    OneOf,
    PositiveInt,
    check_arguments,
)
from lcjax.files import atomic_file, check_path
from lcjax.parallel.run_lock import RunLock
from lcjax.parallel.sharding import Mesh
from lcjax.retrieval.datastore import FAISS_KINDS, Datastore
from lcjax.retrieval.passages import Passage
from lcjax.retrieval.retriever import KINDS, Hit, Retriever


@dataclasses.dataclass(frozen=True)
class ChunksConfig(RowsConfig):
    """Settings of `python -m lcjax.retrieval chunks`."""

    # Tokenizer of the model to be trained, as model.path
    tokenizer: Annotated[str, NonEmpty("give --tokenizer=")] = ""
    store: Annotated[str, NonEmpty("give --store=FOLDER")] = ""  # folder of the datastore
    # null: by the indices of the datastore
    kind: Annotated[str, OneOf(KINDS)] | None = None
    encoder: str | None = None  # encoder of queries; null: the one that made the vectors
    # Search of vectors: exact, or an existing index: ivf, ivf_pq or hnsw
    index: Annotated[str, OneOf(("exact", *FAISS_KINDS))] = "exact"
    # First tokens of a row that are its query; not used with a stride
    query_tokens: PositiveInt = 256
    # Whether passages may come from the documents of the row. Documents are compared by name
    same_document: bool = False
    mesh: Mesh | None = None  # devices that search vectors; null: one device

    def __post_init__(self):
        super().__post_init__()
        chunks = self.data.chunks
        if chunks is None or chunks.text != "retrieved":
            raise InputError(
                "data.chunks must give the number and length of passages in a row, with text:"
                " retrieved, as {count: 16, length: 256, text: retrieved}"
            )


@dataclasses.dataclass(frozen=True)
class WindowsConfig(ChunksConfig):
    """Settings of `python -m lcjax.retrieval windows`.

    A window has `data.length` tokens. `rows` is the largest number of windows of each source, and
    `out` is a file of JSON lines.
    """

    def __post_init__(self):
        super().__post_init__()
        if not self.out.endswith(".jsonl"):
            raise InputError(
                f"out={self.out} must be a file of JSON lines, such as {self.out}.jsonl"
            )
        if self.data.chunks.stride is not None:
            raise InputError(
                f"data.chunks.stride={self.data.chunks.stride}: the task rag_lm has one query for a"
                " window; leave it out"
            )


@check_arguments
def write_chunks(config: ChunksConfig, *, part: str | None = None) -> dict[str, Any] | None:
    """Writes the missing shards of a folder of rows with retrieved passages.

    Args:
      config: settings.
      part: `i/n` writes only the shards i, i + n, ... (i counts from 0). Every part reads the whole
        text, but searches only for its own rows. After all parts, a call without `part` writes the
        index.

    Returns:
      The index of the folder, which is the content of `retrieved.json`; None with `part`.

    Raises:
      InputError: the folder was written from other text, passages or settings, the datastore does
        not support the search, or it has no passage for the rows.
    """
    share = (0, 1) if part is None else parse_part(part)
    data, tokenizer, retriever = _open(config)
    loader = make_loader(data, tokenizer, config.batch_size, documents=not config.same_document)
    identity = _identity(config, retriever.store) | loader.get_state()["identity"]
    identity = json.loads(json.dumps(identity))
    try:
        index = begin(config.folder, identity, RETRIEVED.index, RETRIEVED.plan)
        if index is None:
            fields = {
                "stride": config.data.chunks.stride,
                "tokenizer": tokenizer.fingerprint,
                RETRIEVED.name: config.tokenizer,
                "identity": identity,
            }
            shape = config.row_shape(tokenizer.vocab_size)
            chunks = _RetrievedChunks(config, retriever, tokenizer)
            # Several parts may write different shards at the same time, so they take no lock.
            with RunLock(config.folder, "out") if share[1] == 1 else contextlib.nullcontext():
                index = write_rows(config, RETRIEVED, shape, loader, chunks.add, fields, share)
    finally:
        loader.close()
    if index is None:
        return None
    print(
        f"{config.out}: {index['rows']:,} rows; read them with data.sources: [{{type: retrieved,"
        f" path: {config.out}}}]"
    )
    return index


@check_arguments
def write_windows(config: WindowsConfig) -> int:
    """Writes windows with retrieved passages to a file that the task `rag_lm` reads.

    A line has the `domain` (the label of a source of tokens, or the last part of its path), the
    window's `input_ids`, and its `chunks`, the best first: `ids`, the first `data.chunks.length`
    tokens of a passage, and `score`. Shorter passages, which `rag_lm` does not read, are left out:
    of twice `data.chunks.count` passages the best `count` that are long enough are written. The
    file appears when it is complete.

    Returns:
      The number of windows.

    Raises:
      InputError: A source has no whole window, or the datastore does not support the search.
    """
    data, tokenizer, retriever = _open(config)
    chunks, count = _RetrievedChunks(config, retriever, tokenizer), 0
    with atomic_file(config.folder) as file:
        for source in data.resolved_sources():
            before = count
            for line in _windows(config, data, source, tokenizer, chunks):
                file.write(json.dumps(line) + "\n")
                count += 1
            if count == before:
                raise InputError(
                    f"data.sources: {source.name} has no window of {data.length} tokens; lower"
                    " data.length, or leave it out"
                )
    print(f"{config.out}: {count:,} windows; evaluate on them with the task rag_lm and its path")
    return count


def _windows(
    config: WindowsConfig,
    data: DataConfig,
    source: Source,
    tokenizer: Any,
    chunks: "_RetrievedChunks",
) -> Iterator[dict[str, Any]]:
    """Yields the lines of `write_windows` for one source."""
    size, most, count = config.data.chunks.length, config.data.chunks.count, 0
    data = dataclasses.replace(data, path="", sources=[source], repeat=1)
    domain = "+".join(getattr(source, "labels", ())) or Path(source.name).name
    loader = make_loader(data, tokenizer, config.batch_size, documents=not config.same_document)
    with contextlib.closing(loader), tqdm(desc=domain, unit="window", total=config.rows) as bar:
        for batch in loader:
            is_whole = batch["segments"].all(1)  # the last rows of a source may be padded
            remaining = None if config.rows is None else config.rows - count
            batch = {key: value[is_whole][:remaining] for key, value in batch.items()}
            for (row, _), hits in chunks.search(batch, 2 * most):
                passages = [{"ids": chunks.ids(hit).tolist(), "score": hit.score} for hit in hits]
                passages = [passage for passage in passages if len(passage["ids"]) == size]
                ids = batch["tokens"][row].tolist()
                yield {"domain": domain, "input_ids": ids, "chunks": passages[:most]}
                count += 1
                bar.update()
            if count == config.rows:  # before another batch is read
                return


def _open(config: ChunksConfig) -> tuple[DataConfig, Any, Retriever]:
    """Checks paths; returns the text without passages, the tokenizer and the retriever."""
    check_path("out", config.out)
    # The loader makes the decoder's rows; the passages are added here.
    data = dataclasses.replace(config.data, chunks=None)
    check_outside_data("out", config.folder, data)
    check_sources(data)
    if not config.same_document:
        check_named(data.resolved_sources())
    tokenizer = open_tokenizer(config.tokenizer)
    options = {"encoder": config.encoder, "index": config.index, "mesh": config.mesh}
    return data, tokenizer, Retriever.open(Datastore(config.store), config.kind, **options)


def check_named(sources: list[Any], way_out: str = "same_document") -> None:
    """Raises an InputError for sources whose documents have no names.

    Args:
      sources: sources of the rows.
      way_out: name of the setting that allows passages of the same document, for the message.
    """
    for source in sources:
        if isinstance(source, TokenSource | SeqioSource):
            raise InputError(
                f"data.sources: {source.name} does not name the documents of its text, so their"
                f" passages cannot be left out; give the text itself, or {way_out}=true where the"
                " datastore holds other text"
            )


def _identity(config: ChunksConfig, store: Datastore) -> dict[str, Any]:
    """Returns all settings that determine the rows, except for the text."""
    names = ("kind", "encoder", "index", "query_tokens", "same_document", "rows", "batch_size")
    return {
        "passages of the datastore": store.fingerprint,
        "chunks": dataclasses.asdict(config.data.chunks),
        **{name: getattr(config, name) for name in names},
    }


class _RetrievedChunks:
    """Adds the tokens of retrieved passages to batches of rows."""

    def __init__(self, config: ChunksConfig, retriever: Retriever, tokenizer: Any):
        self._config, self._retriever, self._tokenizer = config, retriever, tokenizer
        self._num_passages = config.data.chunks.num_passages(config.data.length)
        self._has_hits = False

    def add(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Adds `chunks` int32 and `chunk_mask` bool, both [B, count, length], to a batch."""
        chunks = self._config.data.chunks
        shape = len(batch["tokens"]), chunks.count, chunks.length
        fields = {"chunks": np.zeros(shape, np.int32), "chunk_mask": np.zeros(shape, bool)}
        results = self.search(batch, self._num_passages)
        for (row, search), hits in results:
            for number, hit in enumerate(hits, search * self._num_passages):
                ids = self.ids(hit)
                fields["chunks"][row, number, : len(ids)] = ids
                fields["chunk_mask"][row, number, : len(ids)] = True
        self._has_hits = self._has_hits or bool(fields["chunk_mask"].any())
        if not self._has_hits:
            raise InputError(
                f"store={self._config.store} has no passage for the first {len(results)} searches;"
                " name a datastore of more text, or same_document=true if it is the same text"
            )
        return batch | fields

    def search(
        self, batch: dict[str, np.ndarray], k: int
    ) -> list[tuple[tuple[int, int], list[Hit]]]:
        """Returns the best `k` passages of each search with its row and its number in the row."""
        keys, queries, documents = [], [], []
        for row, tokens in enumerate(batch["tokens"]):
            numbers = set(batch["documents"][row].tolist()) if "documents" in batch else set()
            for search, part in enumerate(self._query_parts(batch, row)):
                keys.append((row, search))
                queries.append(self._tokenizer.decode(tokens[part], skip_special=True))
                documents.append(numbers)
        results = search_other_documents(self._retriever, queries, documents, k)
        return list(zip(keys, results, strict=True))

    def ids(self, hit: Hit) -> np.ndarray:
        """Returns the first `data.chunks.length` tokens of a passage, int32."""
        ids = self._tokenizer.encode(hit.passage.full_text)
        return np.asarray(ids[: self._config.data.chunks.length], np.int32)

    def _query_parts(self, batch: dict[str, np.ndarray], row: int) -> list[slice]:
        """Returns the range of tokens of each query of a row."""
        stride, is_text = self._config.data.chunks.stride, batch["segments"][row] > 0
        if stride is None:
            return [slice(0, min(self._config.query_tokens, int(is_text.sum())))]
        # Whole chunks of every document, as `lcjax.memory.retro.last_tokens` counts them
        ends = np.flatnonzero(is_text & ((batch["positions"][row] + 1) % stride == 0)) + 1
        return [slice(end - stride, end) for end in ends.tolist()]


def search_other_documents(
    retriever: Retriever, queries: list[str], documents: list[set[int]], k: int
) -> list[list[Hit]]:
    """Returns the best `k` passages of each query without those of its own documents.

    Args:
      retriever: retriever to search with.
      queries: texts of the queries.
      documents: for each query, the numbers (`document_number`) of the documents to leave out.
      k: number of passages; a query has fewer hits if fewer passages remain.
    """
    num_rows, hits = retriever.store.num_rows, [[] for _ in queries]
    num = min(2 * k, num_rows)
    missing = range(len(queries))
    while missing:
        results = retriever.search([queries[i] for i in missing], num)
        is_short = []
        for i, result in zip(missing, results):
            others = [hit for hit in result if not _numbers(hit.passage) & documents[i]]
            hits[i] = others[:k]
            # A result of fewer than `num` passages is complete: a larger search finds no more.
            if len(hits[i]) < k and len(result) == num < num_rows:
                is_short.append(i)
        missing, num = is_short, min(4 * num, num_rows)
    return hits


def _numbers(passage: Passage) -> set[int]:
    """Returns the numbers (`document_number`) of all names that the passage's document may have.

    A source of the training may be a subfolder of that of the datastore, or one of its several
    sources. The names of its documents then lack the first parts of the path.
    """
    parts = passage.document.split("/")
    return {document_number("/".join(parts[i:])) for i in range(len(parts))}
