"""Documents of a source by index, and their split into training and validation."""

import bisect
import hashlib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from lcjax.data.files import Files
from lcjax.data.readers import Reader
from lcjax.data.sources import Source

_LOOKED_AT = 32  # files whose first and last bytes tell whether a corpus is still the same
_ENDS = 1 << 12  # bytes at either end of them


class Document(NamedTuple):
    """A document and what decides whether it is taken."""

    name: str
    value: Any  # text, token ids, or the parts of a conversation
    label: str
    characters: int

    @property
    def pair(self) -> tuple[str, Any]:
        return self.name, self.value


class FoundFiles(list):
    """(name, path) of the files of a source, and what tells whether they are still the same."""

    def __init__(self, found: list[tuple[str, Path]]):
        super().__init__(found)
        self.sizes = [path.stat().st_size for _, path in found]
        self.size = sum(self.sizes)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the names and sizes of all files, and of the ends of some of them.

        Not of all bytes: that would read the whole corpus before the first batch.
        """
        digest = hashlib.blake2b(digest_size=8)
        for (name, _), size in zip(self, self.sizes, strict=True):
            digest.update(f"{name}\0{size}\0".encode())
        step = max(1, len(self) // _LOOKED_AT)
        for _, path in self[::step]:
            with open(path, "rb") as file:
                digest.update(file.read(_ENDS))
                file.seek(max(0, path.stat().st_size - _ENDS))
                digest.update(file.read(_ENDS))
        return digest.hexdigest()


class SourceFiles(Protocol):
    """The files of one source, and how documents are read from them."""

    source: Source
    found: FoundFiles

    def open(self, index: int, files: Files) -> Reader:
        """The records of one file."""
        ...

    def document(self, reader: Reader, index: int) -> Document:
        """What the source makes of a record."""
        ...


class Corpus:
    """All documents of one source as a sequence of (name, text), in an order that never changes.

    `indices` picks some of them, such as one side of the validation split.
    """

    mixes = False  # sources of its own, at rates that only an endless stream can keep

    def __init__(self, files: SourceFiles, readers: list[Reader] | None = None, indices=None):
        self.files, self.source, self.indices = files, files.source, indices
        if readers is None:
            shared = Files()
            readers = [files.open(i, shared) for i in range(len(files.found))]
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
        units = (reader.unit(at) for reader, at in map(self.locate, range(len(self))))
        held = np.fromiter((unit < holdout for unit in units), bool, len(self))
        indices = np.flatnonzero(held if which == "validation" else ~held)
        return Corpus(self.files, self.readers, indices)

    def locate(self, index: int) -> tuple[Reader, int]:
        """The reader that holds a document, and its number there."""
        index = int(index if self.indices is None else self.indices[index])
        place = bisect.bisect_right(self._starts, index) - 1
        return self.readers[place], index - self._starts[place]
