"""From documents to batches with grain: tokenise, shuffle, repeat, pack, mix, and batch.

A row is one array `pair` [T, 2] of tokens and their targets. Packers move both together, so the
target of a token does not depend on where a row is cut.
"""

import atexit
import functools
import itertools
import json
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import grain
import numpy as np

from lcjax.attention.inserted import InsertedTokens
from lcjax.checkpoints import Tokenizer
from lcjax.checkpoints.long_text import encode_long
from lcjax.data.chat import ChatTokenise
from lcjax.data.chunks import cut_context, fit_document, hide_context, segment_positions
from lcjax.data.corpus import (
    Corpus,
    Documents,
    all_empty,
    corpus_identity,
    derived_seed,
    largest_text,
    open_split,
)
from lcjax.data.data_config import (
    RESUMABLE,
    ChatSource,
    DataConfig,
    Masking,
    SeqioSource,
    StoredSource,
    TokenSource,
)
from lcjax.data.files import LRUCache
from lcjax.data.readers import is_reported, unit_hash
from lcjax.data.streams import StreamedCorpus, Tokenise
from lcjax.data.token_files import check_ids
from lcjax.errors import InputError, check_arguments

Batch = dict[str, np.ndarray]
Element = dict[str, np.ndarray]  # "pair"; if packed also "pair_segment_ids", "pair_positions"

_BYTES_HELD = 4.5  # for each byte of a document: its text, its ids, and their targets
_LONG_BYTES = 1 << 22  # of a tokenised document that is kept for the next epochs
_KEPT_BYTES = 1 << 30  # of all that are kept, or one document
_AHEAD_BYTES = 1 << 28  # of text that threads read ahead, or one document


@check_arguments
def make_loader(
    config: DataConfig,
    tokenizer: Tokenizer,
    batch_size: int,
    *,
    rows: Sequence[int] | None = None,
    split: str = "train",
    inserted: InsertedTokens | None = None,
    documents: bool = False,
) -> "Loader":
    """Returns an iterator over batches: dicts of arrays [B, T] for the rows of this process.

    T is `config.decoder_length`.

    - `tokens` int32: the text; 0 on padding.
    - `targets` int32: the token after `tokens[t]` in the same document. Targets are attached before
      documents are cut, so the last place of a row has its target, which is the first token of the
      next row. No prediction is lost or repeated at a cut, and none crosses a document boundary.
    - `segments` int32: 1, 2, ... for the documents of a row, 0 on padding. With
      `document_mask: false`, 1 for all text of the row.
    - `positions` int32: from 0 in every segment. A document that continues in the next row starts
      there at 0 again, because that row cannot attend to the previous one.
    - `weights` float32: 1 where there is a target, 0 at ends of documents and on padding.

    With `config.chunks`, K chunks of Tc tokens that precede `tokens`:

    - `chunks` int32 [B, K, Tc]: the context; 0 on padding.
    - `chunk_mask` bool [B, K, Tc]: true where there is text that `chunks.noise` does not hide.
    - with `chunks.learned`, `chunk_targets` int32 and `chunk_weights` float32 [B, K, Tc]: `targets`
      and `weights` of the tokens in `chunks`.

    With a source of type teacher, for the K most probable next tokens of every place:

    - `teacher_ids` int32 [B, T, K] and `teacher_probabilities` float16 [B, T, K].
    - `teacher_rest` float16 [B, T]: the probability of all other tokens.

    Every process builds the same global batch and selects its rows. So the global batches do not
    depend on the number of processes, all processes end together, and a position saved with one
    number of processes resumes with another.

    Args:
      config: the section `data`.
      tokenizer: the model's tokenizer.
      batch_size: rows of the global batch.
      rows: indices of the rows of this process, from `lcjax.parallel.sharding.process_rows`; None:
        all.
      split: `train`, or `validation`, which reads the held-out documents once and in order. The
        last batch of a finite split is completed with padding.
      inserted: tokens to insert into the rows after they are cut. T is then
        `inserted.row_length(config.length)`.
      documents: adds `documents` int32, the `document_number` of every token's document, 0 on
        padding. For rows that are packed here.

    Raises:
      InputError: a source cannot be read, or holds too few tokens for one batch.
    """
    indices = list(range(batch_size) if rows is None else rows)
    if not indices or not 0 <= min(indices) <= max(indices) < batch_size:
        raise InputError(
            f"rows={indices} must be a non-empty list of indices in 0 ... {batch_size - 1}"
        )
    corpora = open_split(config, split, tokenizer)
    sources = [SourceRows(c, config, tokenizer, documents=documents) for c in corpora]
    is_train = split == "train"
    _check_num_tokens(
        sources,
        required=batch_size * config.length if is_train else 1,
        repeat=config.repeat if is_train else 1,
    )
    dataset = mixed_rows(sources, config) if is_train else rows_in_order(sources)
    dataset = dataset.map(functools.partial(batch_fields, config=config))
    if config.masking is not None:
        if inserted is not None:
            raise InputError("data.masking hides tokens that inserted ones attend to: leave it out")
        dataset = dataset.random_map(RandomMask(config.masking, tokenizer), seed=config.seed)
    if config.chunks is not None and config.chunks.noise is not None and is_train:
        hide = functools.partial(hide_context, noise=config.chunks.noise)
        dataset = dataset.random_map(hide, seed=config.seed)
    batches = batch_rows(dataset, batch_size, indices)
    if inserted is not None:
        if config.chunks is not None:
            raise InputError("data.chunks cannot be used with inserted tokens; leave it out")
        inserted.row_length(config.length)  # raises an InputError before any batch is read
        eos_ids = tuple(tokenizer.eos_ids)
        batches = batches.map(lambda batch: inserted.in_row(batch, eos_ids))
    batches = grain.experimental.ThreadPrefetchIterDataset(
        batches, prefetch_buffer_size=config.prefetch
    )
    return Loader(iter(batches), _identity(sources, config, tokenizer, split, inserted))


@check_arguments
def loader_bytes(config: DataConfig) -> int:
    """Returns an estimate of the memory that a loader needs for the largest text file."""
    return int(_BYTES_HELD * largest_text(config))


def batch_rows(
    dataset: grain.IterDataset, batch_size: int, rows: Sequence[int]
) -> grain.IterDataset:
    """Returns the `rows` of every batch; the last one is completed with zeros."""
    pad = functools.partial(grain.experimental.batch_and_pad, batch_size=batch_size)
    batches = dataset.batch(batch_size, batch_fn=pad)
    return batches.map(lambda batch: {key: value[rows] for key, value in batch.items()})


def document_number(name: str) -> int:
    """Returns a hash of a document's name, in 1 ... 2^31 - 2."""
    return 1 + int(unit_hash(name) * (2**31 - 2))


class Loader(grain.DatasetIterator):
    """An iterator over batches whose position can be saved and restored exactly.

    It is a grain iterator: `get_state` and `set_state` return and take a JSON-ready dict, and orbax
    saves and loads it as a checkpointable. The state contains the identity of the text and of the
    settings; `set_state` refuses another identity, because batches would differ from there on. The
    batch size may change: reading resumes at the row after the last batch.
    """

    def __init__(self, batches: grain.DatasetIterator, identity: dict[str, Any]):
        super().__init__(batches)
        self._identity = identity
        # grain's reading threads must end before Python unloads its modules.
        self._at_exit = functools.partial(_close, weakref.ref(self))
        atexit.register(self._at_exit)

    def __next__(self) -> Batch:
        self._assert_not_closed()
        return next(self._parent)

    def close(self) -> None:
        """Ends the threads that read ahead; the loader yields no more batches."""
        if not self._closed:
            super().close()
            self._parents = ()
            atexit.unregister(self._at_exit)

    def get_state(self) -> dict[str, Any]:
        # The round trip detaches the state from grain's live objects and turns tuples into lists,
        # so a state is equal before and after it is written to a file.
        state = {"identity": self._identity, "position": self._parent.get_state()}
        return json.loads(json.dumps(state))

    def set_state(self, state: dict[str, Any]) -> None:
        for key, value in self._identity.items():
            saved = state["identity"].get(key)
            if saved != value:
                raise InputError(
                    f"{key} was {saved} when the position in the data was saved and is {value}"
                    " now: restore it, or start the data again"
                )
        try:
            self._parent.set_state(_slices_as_tuples(state["position"]))
        except (IndexError, ValueError) as error:
            # A stream that ends before the position is a ValueError of grain's packer.
            if isinstance(error, ValueError) and not isinstance(error.__cause__, StopIteration):
                raise
            raise InputError(
                "the saved position lies after the end of the data: raise data.repeat"
            ) from None


def _close(reference: weakref.ref) -> None:
    if (loader := reference()) is not None:
        loader.close()


def _check_num_tokens(sources: list["SourceRows"], *, required: int, repeat: int | None) -> None:
    """Raises an InputError if the text has fewer than `required` tokens.

    With less text the loader would loop for ever, or fill a batch with copies. Reads no more
    documents than the check needs.
    """
    epochs, total = repeat or 1, 0
    for source in sources:
        num_tokens = 0
        for tokens in source.counts():
            num_tokens += tokens
            if num_tokens and (total + num_tokens) * epochs >= required:
                break
        if num_tokens == 0:
            raise all_empty([source.corpus], source.reason_empty)
        total += num_tokens
    # One pass over a mixture ends with its smallest task, so it does not count all tokens.
    is_endless = repeat is None and any(source.corpus.is_mixture for source in sources)
    if total * epochs < required and not is_endless:
        raise InputError(
            f"data holds {total:,} tokens, too few for one batch of {required:,} (batch size x"
            f" data.length): give more text, lower one of these, or read it several times with"
            f" data.repeat={-(-required // total)} or more"
        )


def _identity(
    sources: list["SourceRows"],
    config: DataConfig,
    tokenizer: Any,
    split: str,
    inserted: InsertedTokens | None,
) -> dict[str, Any]:
    """Returns everything that determines the batches and their order."""
    fields = {f"data.{k}": v for k, v in asdict(config).items() if k not in RESUMABLE}
    # The location of the text may change, its content may not; sources include `length_shares`.
    del fields["data.path"], fields["data.sources"], fields["data.length_shares"]
    fields |= corpus_identity([source.corpus for source in sources])
    fields["tokenizer"] = tokenizer.fingerprint
    fields["split"] = split
    # The name under which runs of older versions stored it.
    fields["landmarks"] = None if inserted is None else inserted.identity()
    return fields


def mixed_rows(sources: list["SourceRows"], config: DataConfig) -> grain.IterDataset:
    """Packs each source separately, then draws rows by weight, so that shares hold in tokens.

    Mixing documents instead would give sources of long documents more than their share.
    """
    streams = []
    for i, source in enumerate(sources):
        seed = derived_seed(config.seed, i)
        streams.append(source.rows(shuffle=config.shuffle, seed=seed, repeat=config.repeat))
    rows = streams[0]
    if len(streams) > 1:
        rows = grain.IterDataset.mix(streams, [source.corpus.source.weight for source in sources])
    if config.shuffle_rows > 1:
        rows = grain.experimental.WindowShuffleIterDataset(
            rows, window_size=config.shuffle_rows, seed=derived_seed(config.seed, len(sources))
        )
    return rows


def rows_in_order(sources: list["SourceRows"]) -> grain.IterDataset:
    """Reads all documents once, source after source.

    Neighbouring sources with equal settings are packed together.
    """

    def packing(source: SourceRows) -> tuple:
        return source.is_packed, source.corpus.source.pack, source.corpus.source.stride

    parts = []
    for (is_packed, *_), group in itertools.groupby(sources, packing):
        group = list(group)
        if is_packed:
            elements = concatenate([source.elements() for source in group])
            parts.append(group[0].pack(elements))
        else:
            parts += [source.rows() for source in group]
    return concatenate(parts)


def concatenate(parts: list[grain.IterDataset]) -> grain.IterDataset:
    """Reads one dataset after another."""
    if len(parts) == 1:
        return parts[0]
    return grain.experimental.InterleaveIterDataset(parts, cycle_length=1)


def read_elements(
    corpus: Documents, tokenise: Tokenise, threads: int, **order: Any
) -> grain.IterDataset:
    """Returns a dataset of `tokenise(document)` for the documents where it is not None.

    Args:
      corpus: the documents.
      tokenise: returns the element of a document, or None to leave it out.
      threads: number of threads that read and tokenise ahead; streams use none.
      **order: options as in `StreamedCorpus.read_elements`.
    """
    if isinstance(corpus, StreamedCorpus):
        return corpus.elements(tokenise, **order)
    dataset = grain.MapDataset.source(corpus).map(tokenise)
    return _in_order(dataset, threads, ahead=corpus.documents_of(_AHEAD_BYTES), **order)


def _in_order(
    dataset: grain.MapDataset,
    threads: int,
    *,
    ahead: int | None = None,
    shuffle: bool = False,
    seed: int = 0,
    repeat: int | None = 1,
) -> grain.IterDataset:
    dataset = dataset.shuffle(seed=seed) if shuffle else dataset
    # grain's default buffer of 500 documents would hold gigabytes of books.
    ahead = 4 * threads if ahead is None else min(4 * threads, ahead)
    options = grain.ReadOptions(min(threads, ahead), prefetch_buffer_size=ahead)
    return dataset.repeat(repeat).to_iter_dataset(options)


class _TokenisedDocuments:
    """The tokenised documents of a corpus by index; long ones are tokenised once.

    The threads that read ahead begin the next epochs before the first batch of a short corpus.
    """

    def __init__(self, corpus: Corpus, tokenise: Tokenise):
        self._corpus, self._tokenise = corpus, tokenise
        self._kept = LRUCache(_KEPT_BYTES, lambda element: element["pair"].nbytes)
        self._is_long: set[int] = set()
        # A thread that wants a document which another thread tokenises waits for it.
        self._locks = [threading.Lock() for _ in range(64)]

    def __len__(self) -> int:
        return len(self._corpus)

    def __getitem__(self, index: int) -> Element | None:
        def make() -> Element | None:
            return self._tokenise(self._corpus[index])

        index = int(index)
        with self._locks[index % len(self._locks)]:
            if index in self._is_long:
                return self._kept.get(index, make)
            element = make()
            if element is not None and element["pair"].nbytes >= _LONG_BYTES:
                self._is_long.add(index)
                self._kept.get(index, lambda: element)
            return element


_PACKERS = {
    "first_fit": grain.experimental.FirstFitPackIterDataset,
    "best_fit": grain.experimental.BestFitPackIterDataset,
}


class SourceRows:
    """The rows of one source: its documents, tokenised and packed.

    Three kinds of rows are not packed: stored rows, rows of a seqio converter, and rows of a source
    of tokens with `rows: true`.
    """

    def __init__(
        self, corpus: Documents, config: DataConfig, tokenizer: Any, *, documents: bool = False
    ):
        source, self._documents = corpus.source, documents
        self.corpus, self._config, self._tokenizer = corpus, config, tokenizer
        self.length, self.stride = config.length, source.stride or config.length
        self.min_tokens = source.min_document_tokens or config.min_document_tokens
        self.max_tokens = source.max_document_tokens
        self._pack = source.packing(config.pack)
        self._windows = Windows(self.length, self.stride, first_only=config.overlong == "truncate")
        # A tokenizer may have a BOS that only chat templates use, not texts.
        add_bos = tokenizer.add_bos if config.add_bos is None else config.add_bos
        self.bos = _special("bos", add_bos, tokenizer.bos_id)
        self.eos = _special("eos", config.add_eos, next(iter(tokenizer.eos_ids), None))
        is_seqio = isinstance(source, SeqioSource)
        is_chat = isinstance(source, ChatSource) or (is_seqio and bool(source.prompt))
        self._chat = ChatTokenise(tokenizer, source) if is_chat else None
        self._left_out: set[str] = set()  # names of conversations without anything to learn
        self._is_converted = is_seqio and bool(source.converter)
        is_cut = isinstance(source, TokenSource) and source.rows
        self.is_packed = self._pack is not None and not is_cut
        self.tokenised = None  # the documents by index; None for streams
        if isinstance(corpus, Corpus):
            self.tokenised = _TokenisedDocuments(corpus, self.tokenise)

    def rows(self, **order: Any) -> grain.IterDataset:
        """Returns the rows; `order` has options as in `StreamedCorpus.read_elements`."""
        if self._is_converted:
            # The task adds BOS and EOS of its own; add only those that the config demands.
            config = self._config
            special = {
                "bos_id": self.bos if config.add_bos else None,
                "eos_id": self.eos if config.add_eos else None,
            }
            return self.corpus.rows(config.chunks, config.decoder_length, **special, **order)
        if isinstance(self.corpus.source, StoredSource):
            rows = grain.MapDataset.source(self.corpus).map(lambda document: document[1])
            return _in_order(rows, self._config.threads, **order)
        if not self.is_packed:
            rows = grain.MapDataset.source(FixedRows(self))
            return _in_order(rows, self._config.threads, **order)
        return self.pack(self.elements(**order), shuffle=order.get("shuffle", False))

    def elements(self, **order: Any) -> grain.IterDataset:
        """Returns tokenised documents; `order` as in `StreamedCorpus.read_elements`."""
        if self.tokenised is None:
            return self.corpus.elements(self.tokenise, **order)
        dataset, ahead = (
            grain.MapDataset.source(self.tokenised),
            self.corpus.documents_of(_AHEAD_BYTES),
        )
        return _in_order(dataset, self._config.threads, ahead=ahead, **order)

    def tokenise(self, document: tuple[str, Any]) -> Element | None:
        """Returns {"pair": int32 [n, 2]}: the tokens of a document and their targets.

        The last token has no target, which is stored as -1. A target that is not learned is stored
        as -2 - target. With `documents`, a third column has the `document_number`. Returns None for
        a document that is left out. The value of a document may be a text, token ids with or
        without BOS and EOS, or a conversation.
        """
        name, value = document
        if self._chat is not None:
            if isinstance(value, str):
                return None  # a blank line, or a bad record
            try:
                ids, is_learned = self._chat(name, value)
            except InputError as error:
                if self.corpus.files is None:
                    raise
                self.corpus.files.skip(error)
                return None
            check_ids(name, ids, self._tokenizer.vocab_size)
            if not is_learned.any():
                return self._leave_out(name, "no answer to learn")
        else:
            ids = self._document_ids(name, value)
            is_learned = np.ones(len(ids), bool)
        if len(ids) < self.min_tokens or not is_learned.any():
            return None
        if self.max_tokens is not None and len(ids) > self.max_tokens:
            return None
        bos, eos = self._missing_special(ids)
        # Written in place, because a document may have millions of tokens.
        pair = np.empty((len(bos) + len(ids) + len(eos), 2 + self._documents), np.int32)
        tokens, targets = pair[:, 0], pair[:, 1]
        tokens[: len(bos)], tokens[len(pair) - len(eos) :] = bos, eos
        tokens[len(bos) : len(bos) + len(ids)] = ids
        targets[:-1], targets[-1] = tokens[1:], -1
        if not is_learned.all():
            is_learned = np.pad(is_learned, (len(bos), len(eos)), constant_values=(False, True))
            np.subtract(-2, targets[:-1], out=targets[:-1], where=~is_learned[1:])
        if self._documents:
            pair[:, 2] = document_number(name)
        element = self._fit(pair)
        if self._chat is not None and element is not None and not _has_targets(element):
            return self._leave_out(name, f"no answer in its first data.length={self.length} tokens")
        return element

    def _leave_out(self, name: str, reason: str) -> None:
        """Reports a conversation from which nothing can be learned."""
        if name in self._left_out:
            return
        self._left_out.add(name)
        if is_reported(len(self._left_out)):
            print(f"left out {name}: {reason} ({len(self._left_out):,} so far)", file=sys.stderr)

    def _fit(self, pair: np.ndarray) -> Element | None:
        """Shortens or drops a document that exceeds a row, for packings of whole documents."""
        config, drops = self._config, self._config.overlong == "drop"
        if config.chunks is not None and config.chunks.text == "beginning":
            pair = fit_document(pair, config.chunks, self.length, drop=drops)
        elif (
            len(pair) > self.length
            and config.overlong != "split"
            and self._pack not in ("concat", "windows")
        ):
            pair = None if drops else pair[: self.length]
        return None if pair is None else {"pair": pair}

    def _document_ids(self, name: str, value: str | np.ndarray) -> np.ndarray:
        """Returns the ids of a document without BOS and EOS, which are added later."""
        if isinstance(value, str):
            is_empty = not value or value.isspace()
            ids = [] if is_empty else encode_long(self._tokenizer, value, name=name)
            return np.asarray(ids, np.int32)
        check_ids(name, value, self._tokenizer.vocab_size)
        has_bos = self.bos is not None and len(value) > 0 and value[0] == self.bos
        has_eos = self.eos is not None and len(value) > int(has_bos) and value[-1] == self.eos
        return value[int(has_bos) : len(value) - int(has_eos)]

    def _missing_special(self, ids: np.ndarray) -> tuple[list[int], list[int]]:
        """Returns the BOS and the EOS to add: lists of one token, or empty."""
        bos = [] if self.bos is None else [self.bos]
        eos = [] if self.eos is None else [self.eos]
        if self._chat is None:
            return bos, eos
        if not self.corpus.source.prompt:
            return [], []  # a chat template has BOS and EOS of its own
        # The ids of a seqio task may contain them.
        return [] if bos == [ids[0]] else bos, [] if eos == [ids[-1]] else eos

    @property
    def reason_empty(self) -> str:
        """The reason why no document remains, for an error."""
        if self._pack == "windows":
            return f"pack=windows needs documents of data.length={self.length} tokens"
        longest = "" if self.max_tokens is None else f" or above {self.max_tokens} tokens"
        return f"empty, skipped, or below data.min_document_tokens={self.min_tokens}{longest}"

    def counts(self) -> Iterator[int]:
        """Yields the number of tokens that enter rows, for every document or converted row."""
        if isinstance(self.corpus.source, StoredSource):
            return itertools.repeat(self.length, self.corpus.count)
        if self._is_converted:
            return (self.length for _ in self.rows())
        if self.tokenised is None:
            return (self._num_tokens(self.tokenise(document)) for document in self.corpus)
        return map(self._num_tokens, map(self.tokenised.__getitem__, range(len(self.tokenised))))

    def _num_tokens(self, element: Element | None) -> int:
        if element is None:
            return 0
        num_tokens = len(element["pair"])
        match self._pack:
            case "single":
                return -(-num_tokens // self.length) * self.length
            case "windows":
                return len(self._windows.starts(num_tokens)) * self.length
            case _:
                return num_tokens

    def pack(self, elements: grain.IterDataset, *, shuffle: bool = False) -> grain.IterDataset:
        """Packs tokenised documents into rows by the `pack` of the source or of the data."""
        config, length = self._config, self.length
        if self._pack == "concat":
            rows = grain.experimental.ConcatThenSplitIterDataset(
                elements, length_struct={"pair": self.stride}
            )
            overlap = length // self.stride
            return rows if overlap == 1 else _OverlappingRows(rows, overlap)
        if self._pack == "windows":
            elements = grain.experimental.FlatMapIterDataset(elements, self._windows)
        elif config.overlong == "split":
            elements = grain.experimental.FlatMapIterDataset(elements, SplitOverlong(length))
        if self._pack in ("windows", "single"):
            return elements.map(functools.partial(_pad, length=length))
        return _PACKERS[self._pack](
            elements,
            length_struct={"pair": length},
            num_packing_bins=config.packing_bins,
            seed=config.seed,
            shuffle_bins=shuffle,
        )


def _has_targets(element: Element) -> bool:
    return bool((element["pair"][:, 1] >= 0).any())


def _special(name: str, add: bool | None, token: int | None) -> int | None:
    if add and token is None:
        raise InputError(f"data.add_{name}=true, but the tokenizer has no {name.upper()} token")
    return None if add is False else token


class SplitOverlong(grain.experimental.FlatMapTransform):
    """Splits documents into pieces of at most a row; targets cross from one piece to the next."""

    def __init__(self, length: int):
        self._length = length

    def flat_map(self, element):
        pair = element["pair"]
        return [{"pair": pair[i : i + self._length]} for i in range(0, len(pair), self._length)]


class Windows(grain.experimental.FlatMapTransform):
    """Cuts all full rows from a document, `stride` apart; shorter documents yield none.

    CEPE's train-filter data (Yen et al. 2024, arXiv 2402.16617, sec. 2.2), where a row contains the
    text of the encoder and that of the decoder.
    """

    def __init__(self, length: int, stride: int, *, first_only: bool = False):
        self._length, self._stride, self._first_only = length, stride, first_only

    def flat_map(self, element: Element) -> list[Element]:
        starts = self.starts(len(element["pair"]))
        return [{"pair": element["pair"][i : i + self._length]} for i in starts]

    def starts(self, num_tokens: int) -> range:
        """Returns the first token of each window of a document."""
        starts = range(0, num_tokens - self._length + 1, self._stride)
        return starts[:1] if self._first_only else starts


def _row(pair: np.ndarray, segments: np.ndarray) -> Element:
    """Returns a row with the fields that grain's packers return."""
    positions = segment_positions(segments)
    return {"pair": pair, "pair_segment_ids": segments, "pair_positions": positions}


def _pad(element: Element, *, length: int) -> Element:
    """Pads a document of at most `length` tokens to a row of one segment."""
    pair, missing = element["pair"], length - len(element["pair"])
    segments = np.pad(np.ones(len(pair), np.int32), (0, missing))
    return _row(np.pad(pair, ((0, missing), (0, 0))), segments)


def _join(parts: list[Element]) -> Element:
    """Joins neighbouring rows; a document that continues in the next part stays one segment."""
    pair = np.concatenate([part["pair"] for part in parts])
    segments, last = [], 0
    for part, previous in zip(parts, [None, *parts[:-1]], strict=True):
        ids = part["pair_segment_ids"]
        # The last token of a part has a target if and only if its document continues.
        continues = previous is not None and ids[0] and previous["pair"][-1, 1] != -1
        ids = np.where(ids > 0, ids + last - int(continues), 0)
        segments.append(ids)
        last = max(last, int(ids.max()))
    return _row(pair, np.concatenate(segments).astype(np.int32))


class _OverlappingRows(grain.IterDataset):
    """Rows of `count` parts; each row begins one part after the previous row."""

    def __init__(self, parts: grain.IterDataset, count: int):
        super().__init__(parts)
        self._count = count

    def __iter__(self) -> grain.DatasetIterator:
        return _OverlappingIterator(iter(self._parent), self._count)


class _OverlappingIterator(grain.DatasetIterator):
    def __init__(self, parts: grain.DatasetIterator, count: int):
        super().__init__(parts)
        self._count, self._buffer = count, []
        self._states: list[Any] = [parts.get_state()]  # before each buffered part, and at the end

    def __next__(self) -> Element:
        if len(self._buffer) == self._count:
            self._buffer, self._states = self._buffer[1:], self._states[1:]
        while len(self._buffer) < self._count:
            self._buffer.append(next(self._parent))
            self._states.append(self._parent.get_state())
        return _join(self._buffer)

    def get_state(self) -> dict[str, Any]:
        """Returns the state before the first part of the next row, which is then read again."""
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

    def __init__(self, source: SourceRows):
        self._source, corpus = source, source.corpus
        special, length = (source.bos, source.eos), source.length
        lengths = np.concatenate([reader.lengths for reader in corpus.readers])
        stored = np.concatenate([reader.num_special(*special) for reader in corpus.readers])
        if corpus.indices is not None:
            lengths, stored = lengths[corpus.indices], stored[corpus.indices]
        self._documents = np.flatnonzero(lengths - stored >= source.min_tokens)
        num_special = sum(token is not None for token in special)
        self._ends = np.cumsum((lengths - stored + num_special)[self._documents])
        total = int(self._ends[-1]) if len(self._ends) else 0
        self._count = max(0, (total - 1 - length) // source.stride + 1) if total > length else 0
        if not self._count:
            raise InputError(
                f"data.path={corpus.source.name}: {total:,} tokens fill no row of data.length="
                f"{length}; lower it"
            )

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: int) -> Element:
        begin = int(row) * self._source.stride
        end = begin + self._source.length
        first = int(np.searchsorted(self._ends, begin, side="right"))
        last = int(np.searchsorted(self._ends, end, side="left"))
        pairs = []
        for i in range(first, last + 1):
            pair = self._source.tokenised[int(self._documents[i])]["pair"]
            start = int(self._ends[i]) - len(pair)
            pairs.append(pair[max(begin - start, 0) : end - start])
        numbers = np.arange(1, len(pairs) + 1, dtype=np.int32)
        return _row(np.concatenate(pairs), np.repeat(numbers, [len(pair) for pair in pairs]))


def batch_fields(row: dict[str, np.ndarray], config: DataConfig) -> Batch:
    """Turns a row of any source into the fields of a training batch."""
    if "pair" not in row:
        return row  # stored rows and rows of a converter already have these fields
    segments, positions = row["pair_segment_ids"], row["pair_positions"]
    tokens, targets = row["pair"][:, 0], row["pair"][:, 1]
    is_text = segments > 0
    if not config.document_mask:
        segments = is_text.astype(np.int32)
        positions = np.where(is_text, np.arange(len(is_text), dtype=np.int32), 0)
    batch = {
        "tokens": np.ascontiguousarray(tokens),
        "targets": np.maximum(np.where(targets < -1, -2 - targets, targets), 0),
        "segments": segments,
        "positions": positions,
        "weights": (is_text & (targets >= 0)).astype(np.float32),
    }
    if row["pair"].shape[1] == 3:
        batch["documents"] = np.where(is_text, row["pair"][:, 2], 0)
    return cut_context(batch, config.chunks, config.decoder_length) if config.chunks else batch


class RandomMask:
    """Replaces random tokens of a row by [MASK]; only their targets and weights remain."""

    def __init__(self, config: Masking, tokenizer: Any):
        self._rate = config.rate
        self._mask_id = tokenizer.vocab_size if config.token is None else config.token
        names = ("bos_id", "pad_id", "unk_id")  # tokenizers need not have all of them
        special = {getattr(tokenizer, name, None) for name in names} | {*tokenizer.eos_ids}
        self._never = sorted((special | {self._mask_id, *config.keep}) - {None})

    def __call__(
        self, row: dict[str, np.ndarray], random: np.random.Generator
    ) -> dict[str, np.ndarray]:
        tokens = row["tokens"]
        # One random number per position, so that the masked positions do not depend on the text.
        is_masked = random.random(tokens.shape) < self._rate
        is_masked &= (row["segments"] > 0) & ~np.isin(tokens, self._never)
        return row | {
            "tokens": np.where(is_masked, np.int32(self._mask_id), tokens),
            "targets": np.where(is_masked, tokens, 0),
            "weights": is_masked.astype(np.float32),
        }


def _slices_as_tuples(state: Any) -> Any:
    """Restores the tuples in the state of grain's concat packer, which JSON turns into lists.

    The packer compares slices with the tuple (-1, -1), which means that no remainder exists. The
    list [-1, -1] would count as a remainder, and the next document would be lost (grain 0.2.18).
    """
    if isinstance(state, dict):
        return {
            key: {k: tuple(v) for k, v in value.items()}
            if key == "remainder_slices"
            else _slices_as_tuples(value)
            for key, value in state.items()
        }
    return [_slices_as_tuples(item) for item in state] if isinstance(state, list) else state
