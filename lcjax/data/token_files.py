"""Sources of type tokens: text that was tokenised before, read from memory maps.

`python -m lcjax.data prepare` writes a folder: `index.json`, and for every shard a `.bin` file with
the ids of its documents, concatenated without special tokens, and a `.npy` file with one entry per
document (`DOCUMENT`). A bare `.bin` file holds ids only. Its documents are separated by the token
that they begin or end with (LongLoRA, LCEG: the first token of the file begins each document).
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from lcjax.data.config import INDEX, PLAN, TokenSource
from lcjax.data.files import FileCache, FileList
from lcjax.data.readers import Document, Reader, SourceFiles
from lcjax.errors import InputError

FORMAT = 1
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
# Offset of a document in the .bin file, characters of its text, the hash of its name in [0, 1) that
# decides about the validation split, and the index of its label in the labels of the shard.
DOCUMENT = np.dtype([("start", "<i8"), ("characters", "<i8"), ("unit", "<f8"), ("label", "<i4")])
_SCAN = 1 << 24  # tokens searched at once for the starts of documents


class TokenFiles(SourceFiles):
    """The shards of a folder, or one or more bare `.bin` files."""

    def __init__(self, source: TokenSource, tokenizer: Any = None):
        self.source = source
        path = Path(source.path).expanduser()
        index = path / INDEX
        self._index = read_index(path) if index.is_file() else None
        if self._index is None:
            if source.upsample:
                raise InputError(
                    f"data.path={source.path} has ids only, and upsample counts the characters of"
                    " the text: prepare it from the text"
                )
            self.paths = FileList(_bare_files(source, path))
            self.labels = []
        else:
            shards = [s for s in self._index["shards"] if s["documents"]]
            self.paths = FileList([(s["name"], path / f"{s['name']}.bin") for s in shards])
            _check_shards(shards, self.paths, DTYPES[self._index["dtype"]])
            self._shard_labels = [s["labels"] for s in shards]
            self.labels = sorted({label for labels in self._shard_labels for label in labels})
        if unknown := set(source.labels) - set(self.labels):
            raise InputError(
                f"data.sources: labels={sorted(unknown)} are not in {source.path}, which has"
                f" {', '.join(self.labels) or 'none'}"
            )
        if tokenizer is not None:
            self.check_tokenizer(tokenizer)

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Raises an `InputError` where the ids are those of another tokenizer."""
        if self._index is None:
            self._check_first_token(tokenizer)
        if self._index is not None and self._index["tokenizer"] != tokenizer.fingerprint:
            raise InputError(
                f"{self.source.path} was made with the tokenizer {self._index['tokenizer_name']}"
                f" ({self._index['tokenizer']}), the model's is another"
                f" ({tokenizer.fingerprint}): prepare the text again with the model's"
            )

    def _check_first_token(self, tokenizer: Any) -> None:
        """Checks that a bare file begins with a special token, which separates documents."""
        source = self.source
        special = {tokenizer.bos_id, *tokenizer.eos_ids} - {None}
        if not special or source.document_start is not None or source.document_end is not None:
            return
        for _, path in self.paths:
            first = np.fromfile(path, DTYPES[source.dtype], 1)
            if len(first) and int(first[0]) not in special:
                raise InputError(
                    f"{path} begins with token {first[0]}, not with one of {sorted(special)}, so"
                    " the beginnings of documents are unknown: set document_start or"
                    " document_end to the token that marks them, or document_start=-1 for one"
                    " document"
                )

    def open(self, index: int, cache: FileCache) -> Reader:
        name, path = self.paths[index]
        if self._index is None:
            return BareReader(name, path, self.source, cache)
        dtype, labels = DTYPES[self._index["dtype"]], self._shard_labels[index]
        return ShardReader(name, path, dtype, labels, self.source.labels, cache)


class _TokenReader(Reader):
    """Documents as slices of a memory map of ids."""

    def __init__(self, name: str, path: Path, dtype: np.dtype, cache: FileCache):
        super().__init__(name, path, cache)
        self._dtype = dtype
        self.starts, self.lengths = np.zeros(0, np.int64), np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self.starts)

    def record(self, index: int) -> np.ndarray:
        """int32 ids."""
        start = int(self.starts[index])
        return self._map()[start : start + int(self.lengths[index])].astype(np.int32)

    def num_special(self, bos: int | None, eos: int | None) -> np.ndarray:
        """Counts for each document whether it begins with `bos` and ends with `eos`: int64 [n]."""
        return np.zeros(len(self), np.int64)

    def _map(self) -> np.ndarray:
        return np.frombuffer(self._cache.map(self._path), self._dtype)


class ShardReader(_TokenReader):
    """A shard that `prepare` wrote; `read_labels` are the labels to read, all if empty."""

    def __init__(
        self,
        name: str,
        path: Path,
        dtype: np.dtype,
        labels: list[str],
        read_labels: list[str],
        cache: FileCache,
    ):
        super().__init__(name, path, dtype, cache)
        table = _read_table(path.with_suffix(".npy"))
        ends = np.append(table["start"][1:], path.stat().st_size // dtype.itemsize)
        lengths = ends - table["start"]
        label_ids = [i for i, label in enumerate(labels) if label in read_labels]
        rows = np.isin(table["label"], label_ids) if read_labels else slice(None)
        self._table, self._labels = table[rows], labels
        self.starts, self.lengths = self._table["start"], lengths[rows]

    def split_hash(self, index: int) -> float:
        return float(self._table["unit"][index])

    def document(self, index: int) -> Document:
        row = self._table[index]
        label, characters = self._labels[row["label"]], int(row["characters"])
        return Document(self.name(index), self.record(index), label, characters)


class BareReader(_TokenReader):
    """A `.bin` file without an index."""

    def __init__(self, name: str, path: Path, source: TokenSource, cache: FileCache):
        dtype = DTYPES[source.dtype]
        super().__init__(name, path, dtype, cache)
        size = path.stat().st_size
        if size % dtype.itemsize:
            raise InputError(
                f"{path} has {size} bytes, no whole number of {source.dtype} ids: set dtype to"
                f" {' or '.join(set(DTYPES) - {source.dtype})}, or fetch the file again"
            )
        ids = self._map()
        if source.document_end is not None:
            ends = _find_token(ids, source.document_end) + 1
            ends = ends if len(ends) and ends[-1] == len(ids) else np.append(ends, len(ids))
            self.starts = np.concatenate([[0], ends[:-1]])
        elif source.document_start == -1:
            self.starts = np.zeros(1, np.int64)
        else:
            first = source.document_start
            self.starts = _find_token(ids, int(ids[0]) if first is None else first)
            if not len(self.starts) or self.starts[0]:  # text before the first mark
                self.starts = np.concatenate([[0], self.starts])
        self.lengths = np.diff(np.append(self.starts, len(ids)))

    def num_special(self, bos: int | None, eos: int | None) -> np.ndarray:
        ids, ends = self._map(), self.starts + self.lengths - 1
        count = np.zeros(len(self), np.int64)
        for token, places in ((bos, self.starts), (eos, ends)):
            count += 0 if token is None else ids[places] == token
        return np.minimum(count, self.lengths)


def read_index(folder: Path) -> dict[str, Any]:
    """Reads the index of a folder of shards."""
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{folder / INDEX} cannot be read: {error}; prepare it again") from None
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise InputError(
            f"{folder / INDEX} is no index of format {FORMAT}: write it again with"
            " `python -m lcjax.data prepare`"
        )
    _check_index(index, folder / INDEX)
    return index


def _check_index(index: dict[str, Any], file: Path) -> None:
    """Raises an InputError unless the index has the fields that `prepare` writes."""
    shards = index.get("shards")
    is_valid = (
        index.get("dtype") in DTYPES
        and all(isinstance(index.get(name), str) for name in ("tokenizer", "tokenizer_name"))
        and isinstance(shards, list)
        and all(isinstance(shard, dict) and _is_shard(shard) for shard in shards)
    )
    if not is_valid:
        raise InputError(
            f"{file} was changed: its fields are not those that `python -m lcjax.data prepare`"
            " writes; prepare the text again"
        )
    for shard in shards:
        if Path(shard["name"]).name != shard["name"]:  # would read a file outside of the folder
            raise InputError(f"{file}: the shard {shard['name']!r} must be a file of this folder")


def _is_shard(shard: dict[str, Any]) -> bool:
    counts, labels = (shard.get("documents"), shard.get("tokens")), shard.get("labels")
    return (
        isinstance(shard.get("name"), str)
        and all(type(count) is int and count >= 0 for count in counts)
        and isinstance(labels, list)
        and all(isinstance(label, str) for label in labels)
    )


def _read_table(path: Path) -> np.ndarray:
    """Maps the table of a shard's documents: [n] of `DOCUMENT`."""
    try:
        table = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{path} cannot be read ({error}): prepare the text again") from None
    if table.dtype != DOCUMENT or table.ndim != 1:
        raise InputError(f"{path} is no table of documents: prepare the text again")
    return table


def _check_shards(shards: list[dict], paths: FileList, dtype: np.dtype) -> None:
    for shard, (_, path), size in zip(shards, paths, paths.sizes, strict=True):
        if size != shard["tokens"] * dtype.itemsize:
            raise InputError(
                f"{path} has {size // dtype.itemsize:,} ids, and had {shard['tokens']:,} when it"
                " was prepared: it was changed or cut; prepare the text again"
            )


def _bare_files(source: TokenSource, path: Path) -> list[tuple[str, Path]]:
    if path.is_file():
        return [(path.name, path)]
    files = sorted(path.rglob("*.bin")) if path.is_dir() else []
    if (path / PLAN).is_file():
        raise InputError(
            f"data.path={source.path} is not finished: run the same `python -m lcjax.data prepare`"
            " once more; it resumes"
        )
    if not files:
        raise InputError(
            f"data.path={source.path} holds no tokens: give a folder that `python -m lcjax.data"
            " prepare` wrote, or .bin files"
        )
    return [(file.relative_to(path).as_posix(), file) for file in files]


def _find_token(ids: np.ndarray, token: int) -> np.ndarray:
    parts = [np.flatnonzero(ids[i : i + _SCAN] == token) + i for i in range(0, len(ids), _SCAN)]
    return np.concatenate([np.zeros(0, np.int64), *parts])
