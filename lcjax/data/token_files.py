"""Sources of type tokens: text that was tokenised once, read from maps of its ids.

What `python -m lcjax.data prepare` writes is a folder: `index.json`, and for every shard a `.bin`
with the ids of its documents one after the other, without special tokens, and a `.npy` with a line
per document (`DOCUMENT`). A bare `.bin` has ids alone; its documents are told by the token that
they begin or end with (LongLoRA, LCEG: they begin with the first token of the file).
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from lcjax.data.config import INDEX, PLAN, TokenSource
from lcjax.data.files import FileCache, FileList
from lcjax.data.readers import Document, Reader
from lcjax.errors import InputError

FORMAT = 1
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
# Where a document begins in the .bin, how long its text was, the hash of its name as a number in
# [0, 1) that decides about validation, and the place of its label in the shard's list of them.
DOCUMENT = np.dtype([("start", "<i8"), ("characters", "<i8"), ("unit", "<f8"), ("label", "<i4")])
_SCAN = 1 << 24  # tokens looked at at once for the starts of documents


class TokenFiles:
    """The shards of a folder, or one or more bare `.bin` files."""

    def __init__(self, source: TokenSource, tokenizer: Any = None):
        self.source = source
        path = Path(source.path).expanduser()
        index = path / INDEX
        self._index = read_index(path) if index.is_file() else None
        if self._index is None:
            if source.upsample:
                raise InputError(
                    f"data.path={source.path} has ids alone, and upsample counts the characters of"
                    " the text: prepare it from the text"
                )
            self.paths = FileList(_bare_files(source, path))
            self.labels = []
        else:
            shards = [s for s in self._index["shards"] if s["documents"]]
            self.paths = FileList([(s["name"], path / f"{s['name']}.bin") for s in shards])
            _check_shards(shards, self.paths, DTYPES[self._index["dtype"]])
            self._own = [s["labels"] for s in shards]
            self.labels = sorted({label for own in self._own for label in own})
        if unknown := set(source.labels) - set(self.labels):
            raise InputError(
                f"data.sources: labels={sorted(unknown)} are not in {source.path}, which has"
                f" {', '.join(self.labels) or 'none'}"
            )
        if tokenizer is not None:
            self.check_tokenizer(tokenizer)

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Ids mean something to the tokenizer that made them only."""
        if self._index is None:
            self._check_first(tokenizer)
        if self._index is not None and self._index["tokenizer"] != tokenizer.fingerprint:
            raise InputError(
                f"{self.source.path} was made with the tokenizer {self._index['tokenizer_name']}"
                f" ({self._index['tokenizer']}), the model's is another"
                f" ({tokenizer.fingerprint}): prepare the text again with the model's"
            )

    def _check_first(self, tokenizer: Any) -> None:
        """What a bare file begins with must be no ordinary token, which comes again and again."""
        source = self.source
        special = {tokenizer.bos_id, *tokenizer.eos_ids} - {None}
        if not special or source.document_start is not None or source.document_end is not None:
            return
        for _, path in self.paths:
            first = np.fromfile(path, DTYPES[source.dtype], 1)
            if len(first) and int(first[0]) not in special:
                raise InputError(
                    f"{path} begins with token {first[0]}, not with one of {sorted(special)}, so"
                    " where documents begin is not known: set document_start or document_end to"
                    " the token that marks it, or document_start=-1 for one document"
                )

    def open(self, index: int, files: FileCache) -> Reader:
        name, path = self.paths[index]
        if self._index is None:
            return BareFile(name, path, self.source, files)
        dtype, labels = DTYPES[self._index["dtype"]], self._own[index]
        return Shard(name, path, dtype, labels, self.source.labels, files)

    def document(self, reader: "BareFile | Shard", index: int) -> Document:
        return Document(reader.name(index), reader.record(index), *reader.about(index))


class _Ids(Reader):
    """Documents as slices of a map of ids."""

    def __init__(self, name: str, path: Path, dtype: np.dtype, files: FileCache):
        super().__init__(name, path)
        self._dtype, self._files = dtype, files
        self.starts, self.lengths = np.zeros(0, np.int64), np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self.starts)

    def record(self, index: int) -> np.ndarray:
        """int32 ids."""
        start = int(self.starts[index])
        return self._map()[start : start + int(self.lengths[index])].astype(np.int32)

    def about(self, index: int) -> tuple[str, int]:
        """Its label, and the length of its text."""
        raise NotImplementedError

    def bounded(self, first: int | None, last: int | None) -> np.ndarray:
        """How many of the tokens `first` and `last` each document has at its ends."""
        return np.zeros(len(self), np.int64)

    def _map(self) -> np.ndarray:
        return np.frombuffer(self._files.map(self._path), self._dtype)


class Shard(_Ids):
    """A shard that `prepare` wrote; `wanted` are the labels to be read, all if empty."""

    def __init__(
        self,
        name: str,
        path: Path,
        dtype: np.dtype,
        labels: list[str],
        wanted: list[str],
        files: FileCache,
    ):
        super().__init__(name, path, dtype, files)
        table = np.load(path.with_suffix(".npy"), mmap_mode="r")
        ends = np.append(table["start"][1:], path.stat().st_size // dtype.itemsize)
        lengths = ends - table["start"]
        numbers = [number for number, label in enumerate(labels) if label in wanted]
        keep = np.isin(table["label"], numbers) if wanted else slice(None)
        self._table, self._labels = table[keep], labels
        self.starts, self.lengths = self._table["start"], lengths[keep]

    def split_hash(self, index: int) -> float:
        return float(self._table["unit"][index])

    def about(self, index: int) -> tuple[str, int]:
        line = self._table[index]
        return self._labels[line["label"]], int(line["characters"])


class BareFile(_Ids):
    """A `.bin` of nothing but ids."""

    def __init__(self, name: str, path: Path, source: TokenSource, files: FileCache):
        dtype = DTYPES[source.dtype]
        super().__init__(name, path, dtype, files)
        size = path.stat().st_size
        if size % dtype.itemsize:
            raise InputError(
                f"{path} has {size} bytes, no whole number of {source.dtype} ids: set dtype to"
                f" {' or '.join(set(DTYPES) - {source.dtype})}, or fetch the file again"
            )
        ids = self._map()
        if source.document_end is not None:
            ends = _places(ids, source.document_end) + 1
            ends = ends if len(ends) and ends[-1] == len(ids) else np.append(ends, len(ids))
            self.starts = np.concatenate([[0], ends[:-1]])
        elif source.document_start == -1:
            self.starts = np.zeros(1, np.int64)
        else:
            first = source.document_start
            self.starts = _places(ids, int(ids[0]) if first is None else first)
            if not len(self.starts) or self.starts[0]:  # what lies before the first mark
                self.starts = np.concatenate([[0], self.starts])
        self.lengths = np.diff(np.append(self.starts, len(ids)))

    def about(self, index: int) -> tuple[str, int]:
        return self._name.split("/")[0].split(".")[0], 0

    def bounded(self, first: int | None, last: int | None) -> np.ndarray:
        ids, ends = self._map(), self.starts + self.lengths - 1
        count = np.zeros(len(self), np.int64)
        for token, places in ((first, self.starts), (last, ends)):
            count += 0 if token is None else ids[places] == token
        return np.minimum(count, self.lengths)


def read_index(folder: Path) -> dict[str, Any]:
    """The index of a folder of shards."""
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{folder / INDEX} cannot be read: {error}; prepare it again") from None
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise InputError(
            f"{folder / INDEX} is no index of format {FORMAT}: write it anew with"
            " `python -m lcjax.data prepare`"
        )
    return index


def _check_shards(shards: list[dict], found: FileList, dtype: np.dtype) -> None:
    for shard, (_, path), size in zip(shards, found, found.sizes, strict=True):
        if size != shard["tokens"] * dtype.itemsize:
            raise InputError(
                f"{path} has {size // dtype.itemsize:,} ids, and had {shard['tokens']:,} when it"
                " was prepared: it was changed or cut; prepare the text again"
            )


def _bare_files(source: TokenSource, path: Path) -> list[tuple[str, Path]]:
    if path.is_file():
        return [(path.name, path)]
    found = sorted(path.rglob("*.bin")) if path.is_dir() else []
    if (path / PLAN).is_file():
        raise InputError(
            f"data.path={source.path} is not finished: run the same `python -m lcjax.data prepare`"
            " once more, it goes on from where it was"
        )
    if not found:
        raise InputError(
            f"data.path={source.path} holds no tokens: give a folder that `python -m lcjax.data"
            " prepare` wrote, or .bin files"
        )
    return [(file.relative_to(path).as_posix(), file) for file in found]


def _places(ids: np.ndarray, token: int) -> np.ndarray:
    found = [np.flatnonzero(ids[at : at + _SCAN] == token) + at for at in range(0, len(ids), _SCAN)]
    return np.concatenate([np.zeros(0, np.int64), *found])
