"""From documents to rows: tokenise, shuffle, repeat, pack and mix, with grain's datasets.

A row travels as one array `pair` [T, 2], each token beside its target. A packer moves both
together, so the target of a token does not depend on where a row is cut.
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
Element = dict[str, np.ndarray]  # "pair", and once packed "pair_segment_ids", "pair_positions"


class Tokenise:
    """(name, text) -> {"pair": int32 [n, 2]}: each token of a document beside its target.

    The last token has no target: -1. A target that is not learned is stored as -2 - target. The
    result is None for a document that is left out. The value may also be token ids, with or without
    BOS and EOS, or a conversation.
    """

    def __init__(self, config: DataConfig, tokenizer: Any, source: Source = Source()):
        self._tokenizer = tokenizer
        self.min_tokens = source.min_document_tokens or config.min_document_tokens
        # A tokenizer may have a BOS that only chat templates use, not texts.
        add_bos = tokenizer.add_bos if config.add_bos is None else config.add_bos
        self.bos = _special("bos", add_bos, tokenizer.bos_id)
        self.eos = _special("eos", config.add_eos, next(iter(tokenizer.eos_ids), None))
        pack = source.pack or config.pack
        # Rows of whole documents limit the length of a document.
        has_limit = pack in ("first_fit", "best_fit", "single") and config.overlong != "split"
        self._limit = config.length if has_limit else None
        self._drop, self._single = config.overlong == "drop", pack == "single"
        cuts_beginning = config.chunks is not None and config.chunks.text == "beginning"
        self._beginning = config.chunks if cuts_beginning else None
        stride = source.stride or config.length
        self._windows = Windows(config.length, stride) if pack == "windows" else None
        self._length = config.length
        is_chat = isinstance(source, ChatSource)
        is_chat = is_chat or (isinstance(source, SeqioSource) and bool(source.prompt))
        self._chat = ChatTokenise(tokenizer, source) if is_chat else None
        # A chat template has BOS and EOS of its own.
        self._adds_special_to_chat = is_chat and bool(source.prompt)
        self._convert = None
        if isinstance(source, SeqioSource) and source.converter:
            # The task adds BOS and EOS of its own; add only those that the config demands.
            special = {
                "bos_id": self.bos if config.add_bos else None,
                "eos_id": self.eos if config.add_eos else None,
            }
            self._convert = functools.partial(
                context_chunks, config.chunks, config.decoder_length, **special
            )

    def __call__(self, document: tuple[str, Any]) -> Element | None:
        name, value = document
        if self._chat is not None:
            ids, is_learned = self._chat(name, value)
            self._check_ids(name, ids)
            return self._conversation(ids, is_learned)
        if isinstance(value, str):
            ids = np.array(self._tokenizer.encode(value) if value.strip() else [], np.int32)
        else:
            ids = self._without_special(name, value)
        if len(ids) < self.min_tokens:
            return None
        bos, eos = ([] if token is None else [token] for token in (self.bos, self.eos))
        return self._element(np.concatenate([bos, ids, eos]).astype(np.int32))

    def _conversation(self, ids: np.ndarray, is_learned: np.ndarray) -> Element | None:
        if len(ids) < self.min_tokens or not is_learned.any():
            return None
        if self._adds_special_to_chat:  # ids of a seqio task may contain these
            if self.bos is not None and ids[0] != self.bos:
                ids = np.append(np.int32(self.bos), ids)
                is_learned = np.append(False, is_learned)
            if self.eos is not None and ids[-1] != self.eos:
                ids = np.append(ids, np.int32(self.eos))
                is_learned = np.append(is_learned, True)
        return self._element(ids, is_learned)

    def _element(self, tokens: np.ndarray, is_learned: np.ndarray | None = None) -> Element | None:
        targets = tokens[1:]
        if is_learned is not None:
            targets = np.where(is_learned[1:], targets, -2 - targets)
        pair = np.stack([tokens, np.append(targets, np.int32(-1))], axis=1)
        if self._beginning is not None:
            pair = fit_document(pair, self._beginning, self._length, drop=self._drop)
            return None if pair is None else {"pair": pair}
        if self._limit is not None and len(pair) > self._limit:
            return None if self._drop else {"pair": pair[: self._limit]}
        return {"pair": pair}

    def _without_special(self, name: str, ids: np.ndarray) -> np.ndarray:
        """Checks ids, and removes the BOS and EOS that are added later."""
        self._check_ids(name, ids)
        has_bos = self.bos is not None and len(ids) > 0 and ids[0] == self.bos
        has_eos = self.eos is not None and len(ids) > int(has_bos) and ids[-1] == self.eos
        return ids[int(has_bos) : len(ids) - int(has_eos)]

    def _check_ids(self, name: str, ids: np.ndarray) -> None:
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self._tokenizer.vocab_size:
            raise InputError(
                f"{name} has the token {int(ids.max())}, and the tokenizer only"
                f" {self._tokenizer.vocab_size}: these are ids of another tokenizer, or dtype is"
                " wrong"
            )

    @property
    def reason_empty(self) -> str:
        """The reason for an error where no document remains."""
        if self._windows is not None:
            return f"pack=windows needs documents of data.length={self._length} tokens"
        return f"empty, skipped, or below data.min_document_tokens={self.min_tokens}"

    def convert(self, corpus: Documents, **order: Any) -> grain.IterDataset | None:
        """Returns the rows of the converter of a seqio source; None for all other sources."""
        return self._convert and corpus.rows(self._convert, **order)

    def counts(self, corpus: Documents) -> Iterator[int]:
        """Yields the number of tokens that enter rows, for every document or converted row."""
        if isinstance(corpus.source, TeacherSource):
            return itertools.repeat(self._length, corpus.count)
        if (rows := self.convert(corpus)) is not None:
            return (self._length for _ in rows)
        return (self._num_tokens(self(document)) for document in corpus)

    def _num_tokens(self, element: Element | None) -> int:
        if element is None:
            return 0
        tokens = len(element["pair"])
        if self._single:
            return -(-tokens // self._length) * self._length
        return tokens if self._windows is None else len(self._windows.starts(tokens)) * self._length


class BatchFields:
    """Row of a packer -> the fields of a training batch."""

    def __init__(self, document_mask: bool):
        self._document_mask = document_mask

    def __call__(self, row: Element) -> Batch:
        segments, positions = row["pair_segment_ids"], row["pair_positions"]
        tokens, targets = row["pair"][:, 0], row["pair"][:, 1]
        is_text = segments > 0
        if not self._document_mask:
            segments = is_text.astype(np.int32)
            positions = np.where(is_text, np.arange(len(is_text), dtype=np.int32), 0)
        return {
            "tokens": np.ascontiguousarray(tokens),
            "targets": np.maximum(np.where(targets < -1, -2 - targets, targets), 0),
            "segments": segments,
            "positions": positions,
            "weights": (is_text & (targets >= 0)).astype(np.float32),
        }


def make_batch_fields(config: DataConfig) -> Callable[[dict[str, np.ndarray]], Batch]:
    """Returns the function from a row of any source to the fields of a training batch."""
    fields = BatchFields(config.document_mask)
    cut = _cut(config)

    def make(row: dict[str, np.ndarray]) -> Batch:
        # Rows of a teacher and of a converter have these fields from the start.
        return cut(fields(row)) if "pair" in row else row

    return make


def _cut(config: DataConfig) -> Callable[[Batch], Batch]:
    if (chunks := config.chunks) is None:
        return lambda row: row
    return CutBeginning(chunks) if chunks.text == "beginning" else CutContext(chunks, config.length)


class PadBatch:
    """Stacks rows; the last batch is completed with rows of padding."""

    def __init__(self, batch_size: int):
        self._batch_size = batch_size

    def __call__(self, rows: list[Batch]) -> Batch:
        return grain.experimental.batch_and_pad(rows, batch_size=self._batch_size)


def mixed_rows(
    corpora: list[Documents], config: DataConfig, tokenises: list[Tokenise]
) -> grain.IterDataset:
    """Packs each source separately, then draws rows by weight, so that shares hold in tokens.

    Mixing documents instead would give sources of long documents more than their share.
    """
    streams = []
    for i, (corpus, tokenise) in enumerate(zip(corpora, tokenises, strict=True)):
        seed = derived_seed(config.seed, i)
        order = {"shuffle": config.shuffle, "seed": seed, "repeat": config.repeat}
        if (rows := tokenise.convert(corpus, **order)) is not None:
            streams.append(rows)
            continue
        if _has_fixed_rows(corpus):
            rows = _fixed_rows(corpus, config, tokenise)
            rows = rows.shuffle(seed=seed) if config.shuffle else rows
            streams.append(_read_ahead(rows.repeat(config.repeat), config))
            continue
        if isinstance(corpus, Corpus):
            docs = grain.MapDataset.source(corpus)
            docs = docs.shuffle(seed=seed) if config.shuffle else docs
            elements = _read_ahead(docs.repeat(config.repeat).map(tokenise), config)
        else:
            elements = corpus.elements(tokenise, **order)
        streams.append(_pack(elements, config, corpus.source, shuffle=config.shuffle))
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
    """Reads all documents once, source after source.

    Neighbouring sources with equal settings are packed together.
    """

    def packing(pair):
        source = pair[0].source
        converter = isinstance(source, SeqioSource) and source.converter
        return _has_fixed_rows(pair[0]), source.pack, source.stride, converter

    parts = []
    pairs = zip(corpora, tokenises, strict=True)
    for (has_fixed_rows, *_, converter), group in itertools.groupby(pairs, packing):
        group = list(group)
        if converter:
            parts += [tokenise.convert(corpus) for corpus, tokenise in group]
            continue
        if has_fixed_rows:
            parts += [_read_ahead(_fixed_rows(c, config, t), config) for c, t in group]
            continue
        elements = _concatenate([_elements_in_order(c, config, t) for c, t in group])
        parts.append(_pack(elements, config, group[0][0].source, shuffle=False))
    return _concatenate(parts)


def _elements_in_order(corpus: Documents, config: DataConfig, tokenise: Tokenise):
    if isinstance(corpus, Corpus):
        return _read_ahead(grain.MapDataset.source(corpus).map(tokenise), config)
    return corpus.elements(tokenise)


def _concatenate(parts: list[grain.IterDataset]) -> grain.IterDataset:
    if len(parts) == 1:
        return parts[0]
    return grain.experimental.InterleaveIterDataset(parts, cycle_length=1)


def _has_fixed_rows(corpus: Documents) -> bool:
    source = corpus.source
    return isinstance(source, TeacherSource) or (isinstance(source, TokenSource) and source.rows)


def _fixed_rows(corpus: Corpus, config: DataConfig, tokenise: Tokenise) -> grain.MapDataset:
    if isinstance(corpus.source, TeacherSource):
        return grain.MapDataset.source(corpus).map(lambda document: document[1])
    stride = corpus.source.stride or config.length
    return grain.MapDataset.source(FixedRows(corpus, tokenise, config.length, stride))


def _read_ahead(docs: grain.MapDataset, config: DataConfig) -> grain.IterDataset:
    # grain's own default of 500 documents ahead would be gigabytes of books.
    options = grain.ReadOptions(config.threads, prefetch_buffer_size=4 * config.threads)
    return docs.to_iter_dataset(options)


def _special(name: str, add: bool | None, token: int | None) -> int | None:
    if add and token is None:
        raise InputError(f"data.add_{name}=true, but the tokenizer has no {name.upper()} token")
    return None if add is False else token


_PACKERS = {
    "first_fit": grain.experimental.FirstFitPackIterDataset,
    "best_fit": grain.experimental.BestFitPackIterDataset,
}


def _pack(
    elements: grain.IterDataset, config: DataConfig, source: Source, *, shuffle: bool
) -> grain.IterDataset:
    """Packs tokenised documents into rows by the `pack` of the source or of the data."""
    length, pack = config.length, source.pack or config.pack
    stride = source.stride or length
    if pack not in ("windows", "concat") and config.overlong == "split":
        elements = grain.experimental.FlatMapIterDataset(elements, _SplitOverlong(length))
    if pack == "windows":
        windows = Windows(length, stride, first_only=config.overlong == "truncate")
        return grain.experimental.FlatMapIterDataset(elements, windows).map(_one_segment)
    if pack == "single":
        return elements.map(functools.partial(_pad, length=length))
    if pack == "concat":
        rows = grain.experimental.ConcatThenSplitIterDataset(
            elements, length_struct={"pair": stride}
        )
        return rows if stride == length else _OverlappingRows(rows, length // stride)
    return _PACKERS[pack](
        elements,
        length_struct={"pair": length},
        num_packing_bins=config.packing_bins,
        seed=config.seed,
        shuffle_bins=shuffle,
    )


class _SplitOverlong(grain.experimental.FlatMapTransform):
    """Splits documents into pieces of at most a row; targets cross from one piece to the next."""

    def __init__(self, length: int):
        self._length = length

    def flat_map(self, element):
        pair = element["pair"]
        return [{"pair": pair[i : i + self._length]} for i in range(0, len(pair), self._length)]


class Windows(grain.experimental.FlatMapTransform):
    """Every full row within a document, `stride` apart; shorter documents give none.

    CEPE's train-filter (Yen et al. 2024, arXiv 2402.16617, sec. 3.1), where a row is the text of
    the encoder and of the decoder.
    """

    def __init__(self, length: int, stride: int, *, first_only: bool = False):
        self._length, self._stride, self._first_only = length, stride, first_only

    def flat_map(self, element: Element) -> list[Element]:
        starts = self.starts(len(element["pair"]))
        return [{"pair": element["pair"][i : i + self._length]} for i in starts]

    def starts(self, num_tokens: int) -> range:
        """Returns the starts of the windows of a document."""
        starts = range(0, num_tokens - self._length + 1, self._stride)
        return starts[:1] if self._first_only else starts


def _one_segment(element: Element) -> Element:
    """Adds the fields of a packer, with one segment."""
    positions = np.arange(len(element["pair"]), dtype=np.int32)
    return element | {"pair_segment_ids": np.ones_like(positions), "pair_positions": positions}


def _pad(element: Element, *, length: int) -> Element:
    """Pads a document of at most `length` tokens to a row of one segment."""
    missing = length - len(element["pair"])
    widths = {"pair": ((0, missing), (0, 0))}
    row = _one_segment(element)
    return {name: np.pad(x, widths.get(name, (0, missing))) for name, x in row.items()}


def _join(parts: list[Element]) -> Element:
    """Joins neighbouring rows; a document that continues in the next part stays one segment."""
    pair = np.concatenate([part["pair"] for part in parts])
    segments, last = [], 0
    for part, previous in zip(parts, [None, *parts[:-1]], strict=True):
        ids = part["pair_segment_ids"]
        # The last place of a part has a target exactly if its document continues.
        continues = previous is not None and ids[0] and previous["pair"][-1, 1] != -1
        ids = np.where(ids > 0, ids + last - int(continues), 0)
        segments.append(ids)
        last = max(last, int(ids.max()))
    segments = np.concatenate(segments).astype(np.int32)
    positions = segment_positions(segments)
    return {"pair": pair, "pair_segment_ids": segments, "pair_positions": positions}


class _OverlappingRows(grain.IterDataset):
    """Rows of `count` parts, each of which begins one part after the previous row."""

    def __init__(self, parts: grain.IterDataset, count: int):
        super().__init__(parts)
        self._count = count

    def __iter__(self) -> grain.DatasetIterator:
        return _OverlappingIterator(iter(self._parent), self._count)


class _OverlappingIterator(grain.DatasetIterator):
    def __init__(self, parts: grain.DatasetIterator, count: int):
        super().__init__(parts)
        self._count, self._buffer = count, []
        self._states: list[Any] = [parts.get_state()]  # before each part of the buffer, and after

    def __next__(self) -> Element:
        if len(self._buffer) == self._count:
            self._buffer, self._states = self._buffer[1:], self._states[1:]
        while len(self._buffer) < self._count:
            self._buffer.append(next(self._parent))
            self._states.append(self._parent.get_state())
        return _join(self._buffer)

    def get_state(self) -> dict[str, Any]:
        """The state before the first part of the next row, which is read again."""
        return {"parts": self._states[int(len(self._buffer) == self._count)]}

    def set_state(self, state: dict[str, Any]) -> None:
        self._parent.set_state(state["parts"])
        self._buffer, self._states = [], [state["parts"]]


class FixedRows:
    """Row i holds the tokens from `i * stride` on of all documents, concatenated in stored order.

    Long-context studies prepare their data in this way (LongLoRA, Fu et al., LCEG): text is cut
    into rows anywhere, and rows are read in random order. The tokens of a row are computed from its
    index; nothing is packed. A last row that is not full is left out, as is one whose last token
    has no target (LCEG cuts a row only if the next token exists).
    """

    def __init__(self, corpus: Corpus, tokenise: Tokenise, length: int, stride: int):
        self._corpus, self._tokenise = corpus, tokenise
        self._length, self._stride = length, stride
        special = tokenise.bos, tokenise.eos
        lengths = np.concatenate([reader.lengths for reader in corpus.readers])
        stored = np.concatenate([reader.num_special(*special) for reader in corpus.readers])
        if corpus.indices is not None:
            lengths, stored = lengths[corpus.indices], stored[corpus.indices]
        self._documents = np.flatnonzero(lengths - stored >= tokenise.min_tokens)
        num_special = sum(token is not None for token in special)
        self._ends = np.cumsum((lengths - stored + num_special)[self._documents])
        total = int(self._ends[-1]) if len(self._ends) else 0
        self._count = max(0, (total - 1 - length) // stride + 1) if total > length else 0
        if not self._count:
            raise InputError(
                f"data.path={corpus.source.name}: {total:,} tokens fill no row of data.length="
                f"{length}; lower it"
            )

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: int) -> Element:
        begin = int(row) * self._stride
        end = begin + self._length
        first = int(np.searchsorted(self._ends, begin, side="right"))
        last = int(np.searchsorted(self._ends, end, side="left"))
        pairs, segments, positions = [], [], []
        for segment, i in enumerate(range(first, last + 1), start=1):
            pair = self._tokenise(self._corpus[int(self._documents[i])])["pair"]
            start = int(self._ends[i]) - len(pair)
            pair = pair[max(begin - start, 0) : end - start]
            pairs.append(pair)
            segments.append(np.full(len(pair), segment, np.int32))
            positions.append(np.arange(len(pair), dtype=np.int32))
        names = ("pair", "pair_segment_ids", "pair_positions")
        fields = zip(names, (pairs, segments, positions), strict=True)
        return {name: np.concatenate(parts) for name, parts in fields}
