"""Documents file after file: nothing is indexed before the first, memory holds one file's index.

In an epoch the files come in random order, and the documents of a file in random order. Documents
that were chosen by length (`upsample`) are so from whatever number of terabytes, in that order.
"""

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import grain
import numpy as np

from lcjax.data.corpus import Document, SourceFiles
from lcjax.data.files import Files
from lcjax.data.upsample import Selection
from lcjax.errors import InputError


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
        files = np.arange(len(self.files.found))
        files = order(len(files), seed, epoch) if shuffle else files
        for at in range(first_file, len(files)):
            file = int(files[at])
            reader = self.files.open(file, Files())
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
        return (reader.unit(index) < self._holdout) == (self._side == "validation")

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
