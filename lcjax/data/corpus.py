"""Documents of a source by index, and their split into training and validation."""

import bisect
from collections.abc import Iterator

import numpy as np

from lcjax.data.config import DataConfig, SeqioSource, TextSource
from lcjax.data.files import Files
from lcjax.data.paths import find_files, kind
from lcjax.data.readers import JsonLines, ParquetRows, TextFile, unit_hash
from lcjax.data.seqio_source import SeqioCorpus
from lcjax.errors import InputError


class Corpus:
    """All documents of one source as a sequence of (name, text), in an order that never changes.

    `indices` picks some of them, such as one side of the validation split.
    """

    mixes = False  # sources of its own, at rates that only an endless stream can keep

    def __init__(self, source: TextSource, readers: list, size: int, indices=None):
        self.source, self.size = source, size
        self._readers, self._indices = readers, indices
        self._starts = np.cumsum([0] + [len(reader) for reader in readers]).tolist()

    def __len__(self) -> int:
        return self._starts[-1] if self._indices is None else len(self._indices)

    @property
    def count(self) -> int:
        return len(self)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: int) -> tuple[str, str]:
        reader, at = self._locate(index)
        return reader.name(at), reader.text(at)

    def name(self, index: int) -> str:
        reader, at = self._locate(index)
        return reader.name(at)

    def split(self, holdout: float, which: str) -> "Corpus":
        """The documents held out for validation, or the others.

        A document belongs to the validation split when the hash of its name, a number in [0, 1),
        is below `holdout`: no seed, no file order and no machine changes that.
        """
        if holdout == 0.0 and which == "train":
            return self
        held = np.fromiter(
            (unit_hash(self.name(i).encode()) < holdout for i in range(len(self))), bool, len(self)
        )
        indices = np.flatnonzero(held if which == "validation" else ~held)
        return Corpus(self.source, self._readers, self.size, indices)

    def _locate(self, index: int):
        index = int(index if self._indices is None else self._indices[index])
        place = bisect.bisect_right(self._starts, index) - 1
        return self._readers[place], index - self._starts[place]


def open_corpus(source: TextSource, *, on_bad_text: str = "error") -> Corpus:
    """Finds the files of a source and indexes those that hold many documents."""
    readers, size, files = [], 0, Files()
    for name, path in find_files(source.path):
        size += path.stat().st_size
        match kind(path):
            case ".jsonl":
                readers.append(JsonLines(name, path, source.text_field, on_bad_text, files))
            case ".parquet":
                readers.append(ParquetRows(name, path, source.text_field, files))
            case _:
                readers.append(TextFile(name, path, on_bad_text, files))
    corpus = Corpus(source, readers, size)
    if len(corpus) == 0 or size == 0:
        raise InputError(f"data.path={source.path} holds no document: its files are empty")
    return corpus


def open_split(config: DataConfig, split: str = "train") -> list[Corpus | SeqioCorpus]:
    """One corpus per source, cut to the `train` or the `validation` split."""
    if split not in ("train", "validation"):
        raise InputError(f"split={split} is not one of train, validation")
    if split == "validation" and config.holdout == 0.0:
        raise InputError("data.holdout=0.0 keeps nothing for validation: set it to, say, 0.01")
    found = [
        SeqioCorpus(source, on_bad_text=config.on_bad_text)
        if isinstance(source, SeqioSource)
        else open_corpus(source, on_bad_text=config.on_bad_text)
        for source in config.resolved_sources()
    ]
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


def documents(data: DataConfig | str, split: str = "train") -> Iterator[tuple[str, str]]:
    """(name, text) of every document that is not empty, in the order of the files.

    Args:
      data: a data section, or just a path as in `data.path`.
      split: `train` (everything when nothing is held out) or `validation`.
    """
    config = DataConfig(path=data) if isinstance(data, str) else data
    corpora = open_split(config, split)
    empty = True
    for corpus in corpora:
        for name, text in corpus:
            if not isinstance(text, str):
                raise InputError(
                    f"{name} is token ids, and text is needed here: set data.sources.0.tokens=false"
                )
            if text.strip():
                empty = False
                yield name, text
    if empty:
        raise all_empty(corpora)


def all_empty(corpora: list[Corpus | SeqioCorpus]) -> InputError:
    """The error for sources whose documents have no text."""
    paths = ", ".join(corpus.source.name for corpus in corpora)
    known = [corpus.count for corpus in corpora if corpus.count is not None]
    return InputError(
        f"data.path={paths}: none of the {f'{sum(known)} ' if known else ''}documents has enough"
        " text (empty, skipped, or below data.min_document_tokens)"
    )
