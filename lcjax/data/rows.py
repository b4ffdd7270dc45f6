"""From documents to rows: tokenise, shuffle, repeat, pack and mix, all of it grain's but the map.

A row travels as one array `pair` [T, 2], each token beside its target, so that a packer moves both
together and the target of a token never depends on where a row was cut.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import grain
import numpy as np

from lcjax.data.beginning import CutBeginning, fitted
from lcjax.data.chat_files import ChatTokenise
from lcjax.data.chunks import Cut
from lcjax.data.config import DataConfig
from lcjax.data.corpus import Corpus
from lcjax.data.fixed_rows import FixedRows
from lcjax.data.opening import Documents
from lcjax.data.packing import Windows, pack
from lcjax.data.seqio_chunks import context_chunks
from lcjax.data.sources import ChatSource, SeqioSource, Source, TeacherSource, TokenSource
from lcjax.data.stream import derived_seed
from lcjax.errors import InputError

Batch = dict[str, np.ndarray]


class Tokenise:
    """(name, text) -> {"pair": int32 [n, 2]}: each token of a document beside the one after it.

    The last token has none: -1; a target that is not learned is -2 - target. None for a document
    that is left out. In place of the text may stand its token ids, with BOS and EOS or without, or
    a conversation.
    """

    def __init__(self, config: DataConfig, tokenizer: Any, source: Source = Source()):
        self._tokenizer = tokenizer
        self.least = source.min_document_tokens or config.min_document_tokens
        # A tokenizer may have a BOS that its model never saw before a text (chat templates do).
        wanted = tokenizer.add_bos if config.add_bos is None else config.add_bos
        self.bos = _special("bos", wanted, tokenizer.bos_id)
        self.eos = _special("eos", config.add_eos, next(iter(tokenizer.eos_ids), None))
        # Where rows hold whole documents, every one must fit a row.
        how = source.pack or config.pack
        whole = how in ("first_fit", "best_fit", "single")
        self._limit = config.length if whole and config.overlong != "split" else None
        self._drop, self._single = config.overlong == "drop", how == "single"
        begins = config.chunks is not None and config.chunks.text == "beginning"
        self._begins = config.chunks if begins else None
        stride = source.stride or config.length
        self._windows = Windows(config.length, stride) if how == "windows" else None
        self._length = config.length
        chat = isinstance(source, ChatSource) or (isinstance(source, SeqioSource) and source.prompt)
        self._chat = ChatTokenise(tokenizer, source) if chat else None
        self._marks_chat = chat and bool(source.prompt)  # else the template has its own
        self._convert = None
        if isinstance(source, SeqioSource) and source.converter:
            # The task has put marks where it wants them.
            marks = {
                "bos_id": self.bos if config.add_bos else None,
                "eos_id": self.eos if config.add_eos else None,
            }
            self._convert = functools.partial(
                context_chunks, config.chunks, config.decoder_length, **marks
            )

    def __call__(self, document: tuple[str, Any]) -> dict[str, np.ndarray] | None:
        name, value = document
        if self._chat is not None:
            ids, learned = self._chat(name, value)
            self._check(name, ids)
            return self._conversation(ids, learned)
        if isinstance(value, str):
            ids = np.array(self._tokenizer.encode(value) if value.strip() else [], np.int32)
        else:
            ids = self._checked(name, value)
        if len(ids) < self.least:
            return None
        marks = [[] if mark is None else [mark] for mark in (self.bos, self.eos)]
        return self._fitting(np.concatenate([marks[0], ids, marks[1]]).astype(np.int32))

    def _conversation(self, ids: np.ndarray, learned: np.ndarray) -> dict[str, np.ndarray] | None:
        """As for text, but targets that are not learned are -2 - target."""
        if len(ids) < self.least or not learned.any():
            return None
        if self._marks_chat:  # ids of a seqio task may have these already
            if self.bos is not None and ids[0] != self.bos:
                ids, learned = np.append(np.int32(self.bos), ids), np.append(False, learned)
            if self.eos is not None and ids[-1] != self.eos:
                ids, learned = np.append(ids, np.int32(self.eos)), np.append(learned, True)
        return self._fitting(ids, learned)

    def _fitting(
        self, tokens: np.ndarray, learned: np.ndarray | None = None
    ) -> dict[str, np.ndarray] | None:
        targets = tokens[1:]
        if learned is not None:
            targets = np.where(learned[1:], targets, -2 - targets)
        pair = np.stack([tokens, np.append(targets, np.int32(-1))], axis=1)
        if self._begins is not None:
            pair = fitted(pair, self._begins, self._length, drop=self._drop)
            return None if pair is None else {"pair": pair}
        if self._limit is not None and len(pair) > self._limit:
            return None if self._drop else {"pair": pair[: self._limit]}
        return {"pair": pair}

    def _checked(self, name: str, ids: np.ndarray) -> np.ndarray:
        """Ids less the BOS and EOS that are added here."""
        self._check(name, ids)
        first = self.bos is not None and len(ids) > 0 and ids[0] == self.bos
        last = self.eos is not None and len(ids) > int(first) and ids[-1] == self.eos
        return ids[int(first) : len(ids) - int(last)]

    def _check(self, name: str, ids: np.ndarray) -> None:
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self._tokenizer.vocab_size:
            raise InputError(
                f"{name} has the token {int(ids.max())}, and the tokenizer only"
                f" {self._tokenizer.vocab_size}: these are ids of another tokenizer, or dtype is"
                " wrong"
            )

    @property
    def why_none(self) -> str:
        """What is wrong where no document is left."""
        if self._windows is not None:
            return f"pack=windows needs documents of data.length={self._length} tokens"
        return f"empty, skipped, or below data.min_document_tokens={self.least}"

    def converted(self, corpus: Documents, **order: Any) -> grain.IterDataset | None:
        """The rows that the converter of a seqio source makes; None for all other sources."""
        return self._convert and corpus.rows(self._convert, **order)

    def counts(self, corpus: Documents) -> Iterator[int]:
        """Tokens of every document, or row of a converter, that come into rows."""
        if isinstance(corpus.source, TeacherSource):
            return itertools.repeat(self._length, corpus.count)
        if (rows := self.converted(corpus)) is not None:
            return (self._length for _ in rows)
        return (self.used(self(document)) for document in corpus)

    def used(self, element: dict[str, np.ndarray] | None) -> int:
        """Tokens of a document that come into rows."""
        if element is None:
            return 0
        tokens = len(element["pair"])
        if self._single:
            return -(-tokens // self._length) * self._length
        return tokens if self._windows is None else len(self._windows.starts(tokens)) * self._length


class Fields:
    """grain's packed row -> the fields of a training batch."""

    def __init__(self, document_mask: bool):
        self._document_mask = document_mask

    def __call__(self, row: dict[str, np.ndarray]) -> Batch:
        segments, positions = row["pair_segment_ids"], row["pair_positions"]
        tokens, targets = row["pair"][:, 0], row["pair"][:, 1]
        text = segments > 0
        if not self._document_mask:
            segments = text.astype(np.int32)
            positions = np.where(text, np.arange(len(text), dtype=np.int32), 0)
        return {
            "tokens": np.ascontiguousarray(tokens),
            "targets": np.maximum(np.where(targets < -1, -2 - targets, targets), 0),
            "segments": segments,
            "positions": positions,
            "weights": (text & (targets >= 0)).astype(np.float32),
        }


def finish(config: DataConfig) -> Callable[[dict[str, np.ndarray]], Batch]:
    """What makes a row of any source a row of the training batch."""
    fields = Fields(config.document_mask)
    cut = _cut(config)

    def finished(row: dict[str, np.ndarray]) -> Batch:
        return cut(fields(row)) if "pair" in row else row  # else it was made so before

    return finished


def _cut(config: DataConfig) -> Callable[[Batch], Batch]:
    if (chunks := config.chunks) is None:
        return lambda row: row
    return CutBeginning(chunks) if chunks.text == "beginning" else Cut(chunks, config.length)


class PadBatch:
    """Stacks rows; missing ones of the last batch become rows of padding."""

    def __init__(self, batch_size: int):
        self._batch_size = batch_size

    def __call__(self, rows: list[Batch]) -> Batch:
        return grain.experimental.batch_and_pad(rows, batch_size=self._batch_size)


def mixed_rows(
    corpora: list[Documents], config: DataConfig, tokenises: list[Tokenise]
) -> grain.IterDataset:
    """Each source packed for itself, then rows drawn by weight: shares hold in tokens.

    Mixing documents instead would give sources of long documents more than their share.
    """
    streams = []
    for i, (corpus, tokenise) in enumerate(zip(corpora, tokenises, strict=True)):
        seed = derived_seed(config.seed, i)
        order = {"shuffle": config.shuffle, "seed": seed, "repeat": config.repeat}
        if (rows := tokenise.converted(corpus, **order)) is not None:
            streams.append(rows)
            continue
        if _cut_once(corpus):
            rows = _fixed_rows(corpus, config, tokenise)
            rows = rows.shuffle(seed=seed) if config.shuffle else rows
            streams.append(read_ahead(rows.repeat(config.repeat), config))
            continue
        if isinstance(corpus, Corpus):
            docs = grain.MapDataset.source(corpus)
            docs = docs.shuffle(seed=seed) if config.shuffle else docs
            pieces = read_ahead(docs.repeat(config.repeat).map(tokenise), config)
        else:
            pieces = corpus.elements(tokenise, **order)
        streams.append(pack(pieces, config, corpus.source, shuffle=config.shuffle))
    rows = streams[0]
    if len(streams) > 1:
        weights = [corpus.source.weight for corpus in corpora]
        rows = grain.IterDataset.mix(streams, weights)
    if config.shuffle_rows > 1:
        rows = grain.experimental.WindowShuffleIterDataset(
            rows, window_size=config.shuffle_rows, seed=derived_seed(config.seed, len(corpora))
        )
    return rows


def rows_in_order(
    corpora: list[Documents], config: DataConfig, tokenises: list[Tokenise]
) -> grain.IterDataset:
    """All documents once, source after source; those that are packed alike are packed together."""

    def alike(pair):
        source = pair[0].source
        converter = isinstance(source, SeqioSource) and source.converter
        return _cut_once(pair[0]), source.pack, source.stride, converter

    parts = []
    for (cut_once, *_, converter), group in itertools.groupby(
        zip(corpora, tokenises, strict=True), alike
    ):
        pairs = list(group)
        if converter:
            parts += [t.converted(c) for c, t in pairs]
            continue
        if cut_once:
            parts += [read_ahead(_fixed_rows(c, config, t), config) for c, t in pairs]
            continue
        pieces = _in_turn([_pieces_in_order(c, config, t) for c, t in pairs])
        parts.append(pack(pieces, config, pairs[0][0].source, shuffle=False))
    return _in_turn(parts)


def _pieces_in_order(corpus: Documents, config: DataConfig, tokenise: Tokenise):
    if isinstance(corpus, Corpus):
        return read_ahead(grain.MapDataset.source(corpus).map(tokenise), config)
    return corpus.elements(tokenise)


def _in_turn(parts: list[grain.IterDataset]) -> grain.IterDataset:
    if len(parts) == 1:
        return parts[0]
    return grain.experimental.InterleaveIterDataset(parts, cycle_length=1)


def _cut_once(corpus: Documents) -> bool:
    source = corpus.source
    return isinstance(source, TeacherSource) or (isinstance(source, TokenSource) and source.rows)


def _fixed_rows(corpus: Corpus, config: DataConfig, tokenise: Tokenise) -> grain.MapDataset:
    if isinstance(corpus.source, TeacherSource):
        return grain.MapDataset.source(corpus).map(lambda named: named[1])
    stride = corpus.source.stride or config.length
    return grain.MapDataset.source(FixedRows(corpus, tokenise, config.length, stride))


def read_ahead(docs: grain.MapDataset, config: DataConfig) -> grain.IterDataset:
    # grain's own default of 500 documents ahead would be gigabytes of books.
    read = grain.ReadOptions(config.threads, prefetch_buffer_size=4 * config.threads)
    return docs.to_iter_dataset(read)


def _special(name: str, wanted: bool | None, token: int | None) -> int | None:
    if wanted and token is None:
        raise InputError(f"data.add_{name}=true, but the tokenizer has no {name.upper()} token")
    return None if wanted is False else token
