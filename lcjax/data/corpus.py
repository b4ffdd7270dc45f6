"""The documents of the sources in `data:`, by index or as a stream, and their splits."""

import bisect
import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import grain
import numpy as np

from lcjax.data.chat import ChatFiles
from lcjax.data.config import (
    ChatSource,
    DataConfig,
    SeqioSource,
    Source,
    TeacherSource,
    TextConfig,
    TokenSource,
)
from lcjax.data.files import FileCache
from lcjax.data.readers import Document, Reader, SourceFiles, TextFiles
from lcjax.data.seqio_source import SeqioCorpus
from lcjax.data.teacher_files import TeacherFiles
from lcjax.data.token_files import TokenFiles
from lcjax.data.upsample import Selection
from lcjax.errors import InputError


class Corpus:
    """All documents of one source as a sequence of (name, text), in an order that never changes.

    `indices` picks some of them, such as one side of the validation split.
    """

    mixes = False  # sources of its own, at rates that only an endless stream can keep

    def __init__(self, files: SourceFiles, readers: list[Reader] | None = None, indices=None):
        self.files, self.source, self.indices = files, files.source, indices
        if readers is None:
            shared = FileCache()
            readers = [files.open(i, shared) for i in range(len(files.paths))]
        self.readers = readers
        self._starts = np.cumsum([0] + [len(reader) for reader in readers]).tolist()

    def __len__(self) -> int:
        return self._starts[-1] if self.indices is None else len(self.indices)

    @property
    def count(self) -> int:
        return len(self)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: int) -> tuple[str, Any]:
        return self.files.document(*self.locate(index)).pair

    def split(self, holdout: float, which: str) -> "Corpus":
        """The documents held out for validation, or the others.

        A document belongs to the validation split when the hash of its name, a number in [0, 1),
        is below `holdout`: no seed, no file order and no machine changes that.
        """
        if holdout == 0.0 and which == "train":
            return self
        units = (reader.split_hash(at) for reader, at in map(self.locate, range(len(self))))
        held = np.fromiter((unit < holdout for unit in units), bool, len(self))
        indices = np.flatnonzero(held if which == "validation" else ~held)
        return Corpus(self.files, self.readers, indices)

    def locate(self, index: int) -> tuple[Reader, int]:
        """The reader that holds a document, and its number there."""
        index = int(index if self.indices is None else self.indices[index])
        place = bisect.bisect_right(self._starts, index) - 1
        return self.readers[place], index - self._starts[place]


class Place(NamedTuple):
    """Where a stream stands: before document `document` of the `file`-th file of an epoch."""

    epoch: int = 0
    file: int = 0
    document: int = 0


class Stream:
    """The documents of one source, or one side of the validation split within it."""

    count = None  # known only after reading everything
    mixes = False

    def __init__(self, files: SourceFiles):
        self.files, self.source = files, files.source
        self._holdout, self._side = 0.0, "train"

    def split(self, holdout: float, which: str) -> "Stream":
        """The documents held out for validation, or the others: as `Corpus` splits them."""
        side = copy.copy(self)
        side._holdout, side._side = holdout, which
        return side

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """(name, text) of every document of one epoch, in the order of the files."""
        return (document.pair for document, _, _ in self.read(shuffle=False, repeat=1))

    def elements(
        self, tokenise, *, shuffle: bool = False, seed: int = 0, repeat: int | None = 1
    ) -> grain.IterDataset:
        """What `tokenise` makes of the documents, as a grain dataset."""
        return _Elements(self, tokenise, shuffle=shuffle, seed=seed, repeat=repeat)

    def read(
        self,
        *,
        shuffle: bool,
        repeat: int | None,
        seed: int = 0,
        place: Place = Place(),
        selection: dict | None = None,
    ) -> Iterator[tuple[Document, Place, dict | None]]:
        """Documents from `place` on, each with the place and the selection's state after it."""
        upsample = self.source.upsample if self._side == "train" else None
        while repeat is None or place.epoch < repeat:
            chosen = Selection(upsample, place.epoch) if upsample else None
            found = place != Place(place.epoch)  # what came before has shown that there is some
            if chosen and found:
                chosen.set_state(selection)
            if not (chosen and chosen.full):
                for document, after in self._epoch(place, shuffle=shuffle, seed=seed):
                    taken = document.characters, document.label, document.name
                    if chosen and not chosen.keep(*taken):
                        continue
                    found = True
                    yield document, after, chosen.get_state() if chosen else None
                    if chosen and chosen.full:
                        break
            if not found:
                raise self._empty()
            place = Place(place.epoch + 1)

    def _epoch(self, place: Place, *, shuffle: bool, seed: int) -> Iterator[tuple[Document, Place]]:
        epoch, first_file, first = place
        files = np.arange(len(self.files.paths))
        files = order(len(files), seed, epoch) if shuffle else files
        for at in range(first_file, len(files)):
            file = int(files[at])
            reader = self.files.open(file, FileCache())
            count = len(reader)
            indices = order(count, seed, epoch, file) if shuffle else np.arange(count)
            for number in range(first, count):
                index = int(indices[number])
                if self._belongs(reader, index):
                    yield self.files.document(reader, index), Place(epoch, at, number + 1)
            first = 0

    def _belongs(self, reader, index: int) -> bool:
        if self._holdout == 0.0:
            return True
        return (reader.split_hash(index) < self._holdout) == (self._side == "validation")

    def _empty(self) -> InputError:
        why = f" with upsample.mode={self.source.upsample.mode}" if self.source.upsample else ""
        return InputError(f"data.path={self.source.name} gives no document in an epoch{why}")


def order(count: int, *seeds: int) -> np.ndarray:
    """A permutation of `count`; NumPy promises that the numbers of RandomState never change."""
    return np.random.RandomState(list(seeds)).permutation(count)


def derived_seed(seed: int, index: int) -> int:
    """Another seed per source; grain adds the epoch to it, so neighbours must not be close."""
    return int(np.random.SeedSequence([seed, index]).generate_state(1)[0]) >> 1


class _Elements(grain.IterDataset):
    """A stream that can be entered anywhere."""

    def __init__(self, stream: Stream, tokenise, **order):
        super().__init__()
        self._stream, self._tokenise, self._order = stream, tokenise, order

    def __iter__(self) -> grain.DatasetIterator:
        return _ElementsIterator(self._stream, self._tokenise, self._order)


class _ElementsIterator(grain.DatasetIterator):
    def __init__(self, stream: Stream, tokenise, order: dict[str, Any]):
        super().__init__()
        self._stream, self._tokenise, self._order = stream, tokenise, order
        self._place, self._selection, self._documents = Place(), None, None

    def __next__(self):
        if self._documents is None:
            self._documents = self._stream.read(
                **self._order, place=self._place, selection=self._selection
            )
        for document, place, selection in self._documents:
            self._place, self._selection = place, selection
            if (element := self._tokenise(document.pair)) is not None:
                return element
        raise StopIteration

    def get_state(self) -> dict[str, Any]:
        return {"place": list(self._place), "selection": self._selection}

    def set_state(self, state: dict[str, Any]) -> None:
        self._place, self._selection = Place(*state["place"]), state["selection"]
        self._documents = None


Documents = Corpus | Stream | SeqioCorpus


def source_files(source: Source, on_bad_text: str = "error", tokenizer: Any = None) -> SourceFiles:
    """The files of a source, found but not opened; token ids must be those of `tokenizer`."""
    match source:
        case TokenSource():
            files = TokenFiles(source, tokenizer)
        case TeacherSource():
            files = TeacherFiles(source, tokenizer)
        case ChatSource():
            files = ChatFiles(source, on_bad_text)
        case _:
            files = TextFiles(source, on_bad_text)
    if files.paths.size == 0:
        raise _no_documents(source)
    return files


def check_sources(config: TextConfig) -> None:
    """Refuses sources without files; opens none, so it takes no time before a model is read."""
    for source in config.resolved_sources():
        if not isinstance(source, SeqioSource):  # its files are known once TensorFlow is imported
            _check_rows(source_files(source, config.on_bad_text), config)


def _check_rows(files: SourceFiles, config: TextConfig) -> None:
    """Rows that are stored must be those that the settings speak of."""
    if isinstance(files, TeacherFiles) and isinstance(config, DataConfig):
        files.check_rows(config)


def open_corpus(source: Source, *, on_bad_text: str = "error", tokenizer: Any = None) -> Documents:
    """Finds the files of a source and indexes those that hold many documents."""
    if isinstance(source, SeqioSource):
        corpus = SeqioCorpus(source, on_bad_text=on_bad_text)
        if tokenizer is not None:
            corpus.check_vocabulary(tokenizer)
        return corpus
    files = source_files(source, on_bad_text, tokenizer)
    if source.stream or source.upsample:
        return Stream(files)
    corpus = Corpus(files)
    if len(corpus) == 0:
        raise _no_documents(source)
    return corpus


def open_split(config: TextConfig, split: str = "train", tokenizer: Any = None) -> list[Documents]:
    """One corpus per source, cut to the `train` or the `validation` split."""
    if split not in ("train", "validation"):
        raise InputError(f"split={split} is not one of train, validation")
    if split == "validation" and config.holdout == 0.0:
        raise InputError("data.holdout=0.0 keeps nothing for validation: set it to, say, 0.01")
    sources = config.resolved_sources()
    found = [
        open_corpus(source, on_bad_text=config.on_bad_text, tokenizer=tokenizer)
        for source in sources
    ]
    for corpus in found:
        if isinstance(corpus, Corpus):
            _check_rows(corpus.files, config)
    corpora = [corpus.split(config.holdout, split) for corpus in found]
    if split == "validation":
        corpora = [corpus for corpus in corpora if corpus.count != 0]
    if not corpora or any(corpus.count == 0 for corpus in corpora):
        raise InputError(
            f"data.holdout={config.holdout} leaves no document for {split} out of"
            f" {sum(corpus.count or 0 for corpus in found)}: choose another fraction, or cut the"
            " text into more documents"
        )
    return corpora


def documents(data: TextConfig | str, split: str = "train") -> Iterator[tuple[str, str]]:
    """(name, text) of every document that is not empty, in the order of the files.

    Args:
      data: a data section, or just a path as in `data.path`.
      split: `train` (everything when nothing is held out) or `validation`.
    """
    config = TextConfig(path=data) if isinstance(data, str) else data
    corpora = open_split(config, split)
    empty = True
    for corpus in corpora:
        for name, text in corpus:
            if not isinstance(text, str):
                raise InputError(f"{name} is no text, {_way_out(corpus.source)}")
            if text.strip():
                empty = False
                yield name, text
    if empty:
        raise all_empty(corpora)


def _way_out(source: Source) -> str:
    if isinstance(source, SeqioSource) and source.tokens and not source.prompt:
        return "but token ids, and text is needed here: set data.sources.0.tokens=false"
    return "and text is needed here: name the source it was made from, with type: text"


def all_empty(corpora: list[Documents], why: str = "empty or skipped") -> InputError:
    """The error for sources whose documents have no text."""
    paths = ", ".join(corpus.source.name for corpus in corpora)
    known = [corpus.count for corpus in corpora if corpus.count is not None]
    return InputError(
        f"data.path={paths}: none of the {f'{sum(known)} ' if known else ''}documents has enough"
        f" text ({why})"
    )


def identity_of(corpora: list[Documents]) -> dict[str, Any]:
    """What tells whether a position in the data is one in the same text."""
    return {
        "data text fields": [corpus.source.reads for corpus in corpora],
        "data weights": [corpus.source.weight for corpus in corpora],
        "number of documents": [corpus.count for corpus in corpora],
        "bytes of text": [_found(corpus, "size") for corpus in corpora],
        "text of the corpus": [_found(corpus, "fingerprint") for corpus in corpora],
    }


def _found(corpus: Documents, what: str) -> Any:
    """seqio's tasks do not tell their files."""
    return None if isinstance(corpus, SeqioCorpus) else getattr(corpus.files.paths, what)


def _no_documents(source: Source) -> InputError:
    return InputError(f"data.path={source.name} holds no document: its files are empty")
