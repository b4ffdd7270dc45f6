"""Documents that are read in order, one file after the other, with a restorable position."""

import abc
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import grain
import numpy as np

from lcjax.data.data_config import Source
from lcjax.data.files import FileCache
from lcjax.data.readers import Document, SourceFiles
from lcjax.data.upsample import Selection
from lcjax.errors import InputError

Tokenise = Callable[[tuple[str, Any]], Any]  # (name, value) to an element of a dataset, or None


class StreamedCorpus(abc.ABC):
    """The documents of one source, or of one of its splits, which can only be read in order."""

    count = None  # unknown until everything is read
    is_mixture = False  # whether it mixes sources at rates that hold only for endless streams
    files: SourceFiles | None = None
    source: Source
    start: dict[str, Any]  # the state before the first document
    _holdout, _split = 0.0, "train"

    def split(self, holdout: float, split: str) -> "StreamedCorpus":
        """Returns the documents of the `train` or the `validation` split, as `Corpus` does."""
        corpus = copy.copy(self)
        corpus._holdout, corpus._split = holdout, split
        return corpus

    def in_split(self, split_hash: float) -> bool:
        """Returns whether the document with this hash belongs to the split and is read."""
        is_held_out = split_hash < self._holdout
        return is_held_out == (self._split == "validation") and self.source.selects(split_hash)

    @abc.abstractmethod
    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Yields (name, value) of every document of one epoch, in the order of the source."""

    @abc.abstractmethod
    def read_elements(
        self, tokenise: Tokenise, state: dict[str, Any], **order: Any
    ) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Yields `tokenise(document)` from `state` on, with the state after each document.

        The options of `order` are `shuffle: bool`, `seed: int`, and `repeat: int | None`, the
        number of epochs. Without options, documents are read once and in order.
        """

    def elements(self, tokenise: Tokenise, **order: Any) -> grain.IterDataset:
        """Returns a grain dataset of `tokenise(document)`; `order` as in `read_elements`."""
        return StreamedDataset(functools.partial(self.read_elements, tokenise, **order), self.start)


class StreamedDataset(grain.IterDataset):
    """A grain dataset of elements that are read in order, with a restorable position.

    `read(state)` yields pairs of an element and the state after it; an element that is None is left
    out. `start` is the state before the first element.
    """

    def __init__(self, read: Callable[[dict], Iterator[tuple[Any, dict]]], start: dict[str, Any]):
        super().__init__()
        self._read, self._start = read, start

    def __iter__(self) -> grain.DatasetIterator:
        return _StreamedIterator(self._read, self._start)


class _StreamedIterator(grain.DatasetIterator):
    def __init__(self, read: Callable[[dict], Iterator[tuple[Any, dict]]], state: dict[str, Any]):
        super().__init__()
        self._read, self._state, self._elements = read, state, None

    def __next__(self) -> Any:
        if self._elements is None:
            self._elements = self._read(self._state)
        for element, state in self._elements:
            self._state = state
            if element is not None:
                return element
        raise StopIteration

    def get_state(self) -> dict[str, Any]:
        return self._state

    def set_state(self, state: dict[str, Any]) -> None:
        self._state, self._elements = state, None


class StreamPosition(NamedTuple):
    """Position of a stream: before the `document`-th document of the `file`-th file of an epoch."""

    epoch: int = 0
    file: int = 0
    document: int = 0


class Stream(StreamedCorpus):
    """The documents of one source, or of one of its splits, file after file.

    With `shuffle`, an epoch reads the files in random order, and the documents of each file in
    random order. Up-sampling by length selects documents in this order. Reading begins without
    indexing the corpus, and memory holds the index of one file only.
    """

    def __init__(self, files: SourceFiles):
        self.files, self.source = files, files.source
        self.start = {"place": list(StreamPosition()), "selection": None}

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return (document.pair for document, _, _ in self.read())

    def read_elements(
        self, tokenise: Tokenise, state: dict[str, Any], **order: Any
    ) -> Iterator[tuple[Any, dict[str, Any]]]:
        position, selection_state = StreamPosition(*state["place"]), state["selection"]
        documents = self.read(position=position, selection_state=selection_state, **order)
        for document, position, selection_state in documents:
            after = {"place": list(position), "selection": selection_state}
            yield tokenise(document.pair), after

    def read(
        self,
        *,
        shuffle: bool = False,
        repeat: int | None = 1,
        seed: int = 0,
        position: StreamPosition = StreamPosition(),
        selection_state: dict | None = None,
    ) -> Iterator[tuple[Document, StreamPosition, dict | None]]:
        """Yields documents from `position` on, with the position and selection state after each."""
        upsample = self.source.upsample if self._split == "train" else None
        while repeat is None or position.epoch < repeat:
            selection = Selection(upsample, position.epoch) if upsample else None
            # A position inside an epoch implies that the epoch has a document.
            has_documents = position != StreamPosition(position.epoch)
            if selection and has_documents:
                selection.set_state(selection_state)
            if not (selection and selection.full):
                for document, after in self._epoch(position, shuffle=shuffle, seed=seed):
                    fields = document.characters, document.label, document.name
                    if selection and not selection.keep(*fields):
                        continue
                    has_documents = True
                    yield document, after, selection.get_state() if selection else None
                    if selection and selection.full:
                        break
            if not has_documents:
                mode = f" with upsample.mode={upsample.mode}" if upsample else ""
                raise InputError(
                    f"data.path={self.source.name} gives no document in an epoch{mode}"
                )
            position = StreamPosition(position.epoch + 1)

    def _epoch(
        self, position: StreamPosition, *, shuffle: bool, seed: int
    ) -> Iterator[tuple[Document, StreamPosition]]:
        epoch, first_file, first = position
        files = np.arange(len(self.files.paths))
        files = order(len(files), seed, epoch) if shuffle else files
        for i in range(first_file, len(files)):
            file = int(files[i])
            reader = self.files.open(file, FileCache())
            count = len(reader)
            indices = order(count, seed, epoch, file) if shuffle else np.arange(count)
            for j in range(first, count):
                index = int(indices[j])
                if self.in_split(reader.split_hash(index)):
                    yield self.files.document(reader, index), StreamPosition(epoch, i, j + 1)
            first = 0


def order(count: int, *seeds: int) -> np.ndarray:
    """Returns a random permutation of `count`; RandomState is stable across NumPy versions."""
    return np.random.RandomState(list(seeds)).permutation(count)
