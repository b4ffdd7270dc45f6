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

from lcjax.data.chat import ChatTokenise
from lcjax.data.chunks import CutBeginning, CutContext, fit_document, segment_positions
from lcjax.data.config import (
    ChatSource,
    DataConfig,
    SeqioSource,
    Source,
    TeacherSource,
    TokenSource,
)
from lcjax.data.corpus import Corpus, Documents, derived_seed
from lcjax.data.seqio_source import context_chunks
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
            pair = fit_document(pair, self._begins, self._length, drop=self._drop)
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
    return CutBeginning(chunks) if chunks.text == "beginning" else CutContext(chunks, config.length)


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


Element = dict[str, np.ndarray]
_PACKERS = {
    "first_fit": grain.experimental.FirstFitPackIterDataset,
    "best_fit": grain.experimental.BestFitPackIterDataset,
}


def pack(
    pieces: grain.IterDataset, config: DataConfig, source: Source, *, shuffle: bool
) -> grain.IterDataset:
    """Rows of the elements of `pieces`, cut or fitted as `pack` of the source or the data says."""
    length, how = config.length, source.pack or config.pack
    stride = source.stride or length
    if how not in ("windows", "concat") and config.overlong == "split":
        pieces = grain.experimental.FlatMapIterDataset(pieces, _SplitOverlong(length))
    if how == "windows":
        windows = Windows(length, stride, first_only=config.overlong == "truncate")
        return grain.experimental.FlatMapIterDataset(pieces, windows).map(_row)
    if how == "single":
        return pieces.map(functools.partial(_padded, length=length))
    if how == "concat":
        rows = grain.experimental.ConcatThenSplitIterDataset(pieces, length_struct={"pair": stride})
        return rows if stride == length else _Overlapping(rows, length // stride)
    return _PACKERS[how](
        pieces,
        length_struct={"pair": length},
        num_packing_bins=config.packing_bins,
        seed=config.seed,
        shuffle_bins=shuffle,
    )


class _SplitOverlong(grain.experimental.FlatMapTransform):
    """Pieces of at most a row; their targets still reach into the next piece."""

    def __init__(self, length: int):
        self._length = length

    def flat_map(self, element):
        pair = element["pair"]
        return [{"pair": pair[i : i + self._length]} for i in range(0, len(pair), self._length)]


class Windows(grain.experimental.FlatMapTransform):
    """Every full row inside a document, `stride` apart; shorter documents give none.

    CEPE's train-filter (Yen et al. 2024, arXiv 2402.16617, sec. 3.1), where a row is what the
    encoder reads and what the decoder reads behind it.
    """

    def __init__(self, length: int, stride: int, *, first_only: bool = False):
        self._length, self._stride, self._first_only = length, stride, first_only

    def flat_map(self, element: Element) -> list[Element]:
        starts = self.starts(len(element["pair"]))
        return [{"pair": element["pair"][i : i + self._length]} for i in starts]

    def starts(self, tokens: int) -> range:
        """Where the windows of a document of so many tokens begin."""
        starts = range(0, tokens - self._length + 1, self._stride)
        return starts[:1] if self._first_only else starts


def _row(element: Element) -> Element:
    """A window as the packers give rows: one segment."""
    places = np.arange(len(element["pair"]), dtype=np.int32)
    return element | {"pair_segment_ids": np.ones_like(places), "pair_positions": places}


def _padded(element: Element, *, length: int) -> Element:
    """A document of at most `length` tokens as the packers give rows: one segment, and padding."""
    missing = length - len(element["pair"])
    pads = {"pair": ((0, missing), (0, 0))}
    return {name: np.pad(x, pads.get(name, (0, missing))) for name, x in _row(element).items()}


def join(parts: list[Element]) -> Element:
    """Neighbouring rows as one: a document that goes on over the seam stays one segment."""
    pair = np.concatenate([part["pair"] for part in parts])
    segments, last = [], 0
    for part, before in zip(parts, [None, *parts[:-1]], strict=True):
        ids = part["pair_segment_ids"]
        # The last place of a part has a target exactly if its document goes on.
        goes_on = before is not None and ids[0] and before["pair"][-1, 1] != -1
        ids = np.where(ids > 0, ids + last - int(goes_on), 0)
        segments.append(ids)
        last = max(last, int(ids.max()))
    segments = np.concatenate(segments).astype(np.int32)
    positions = segment_positions(segments)
    return {"pair": pair, "pair_segment_ids": segments, "pair_positions": positions}


class _Overlapping(grain.IterDataset):
    """Rows of `count` parts each, every one beginning one part after the row before it."""

    def __init__(self, parts: grain.IterDataset, count: int):
        super().__init__(parts)
        self._count = count

    def __iter__(self) -> grain.DatasetIterator:
        return _OverlappingIterator(iter(self._parent), self._count)


class _OverlappingIterator(grain.DatasetIterator):
    def __init__(self, parts: grain.DatasetIterator, count: int):
        super().__init__(parts)
        self._count, self._held = count, []
        self._states: list[Any] = [parts.get_state()]  # before each part that is held, and after

    def __next__(self) -> Element:
        if len(self._held) == self._count:
            self._held, self._states = self._held[1:], self._states[1:]
        while len(self._held) < self._count:
            self._held.append(next(self._parent))
            self._states.append(self._parent.get_state())
        return join(self._held)

    def get_state(self) -> dict[str, Any]:
        """Parts that the next row needs again are read again."""
        again = int(len(self._held) == self._count)
        return {"parts": self._states[again]}

    def set_state(self, state: dict[str, Any]) -> None:
        self._parent.set_state(state["parts"])
        self._held, self._states = [], [state["parts"]]


class FixedRows:
    """Row i holds the places from `i * stride` on of all documents run together.

    A last row that is not full is left out, as is one whose last token has no successor
    (LCEG cuts a row only once the token after it is there).
    """

    def __init__(self, corpus: Corpus, tokenise: Any, length: int, stride: int):
        self._corpus, self._tokenise = corpus, tokenise
        self._length, self._stride = length, stride
        lengths = np.concatenate([reader.lengths for reader in corpus.readers])
        marks = tokenise.bos, tokenise.eos
        inside = np.concatenate([reader.bounded(*marks) for reader in corpus.readers])
        if corpus.indices is not None:
            lengths, inside = lengths[corpus.indices], inside[corpus.indices]
        self._documents = np.flatnonzero(lengths - inside >= tokenise.least)
        added = sum(mark is not None for mark in marks)
        self._ends = np.cumsum((lengths - inside + added)[self._documents])
        total = int(self._ends[-1]) if len(self._ends) else 0
        self._count = max(0, (total - 1 - length) // stride + 1) if total > length else 0
        if not self._count:
            raise InputError(
                f"data.path={corpus.source.name}: {total:,} tokens fill no row of data.length="
                f"{length}; lower it"
            )

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        begin = int(row) * self._stride
        end = begin + self._length
        first = int(np.searchsorted(self._ends, begin, side="right"))
        last = int(np.searchsorted(self._ends, end, side="left"))
        pairs, segments, positions = [], [], []
        for number, at in enumerate(range(first, last + 1), start=1):
            pair = self._tokenise(self._corpus[int(self._documents[at])])["pair"]
            start = int(self._ends[at]) - len(pair)
            pair = pair[max(begin - start, 0) : end - start]
            pairs.append(pair)
            segments.append(np.full(len(pair), number, np.int32))
            positions.append(np.arange(len(pair), dtype=np.int32))
        names = ("pair", "pair_segment_ids", "pair_positions")
        fields = zip(names, (pairs, segments, positions), strict=True)
        return {name: np.concatenate(parts) for name, parts in fields}
