"""Sources of type tokens: token ids that were computed before, read from memory maps.

`python -m lcjax.data prepare` writes a folder: `index.json`, and for every shard a `.bin` file with
the ids of its documents, concatenated without special tokens, and a `.npy` file with one entry per
document (`DOCUMENT`). A bare `.bin` file holds ids only. Its documents are separated by a token
with which each of them begins or ends (in LongLoRA and LCEG, the first token of the file begins
each document).
"""

import io
from pathlib import Path
from typing import Any

import numpy as np

from lcjax.data.data_config import TOKENS, FolderKind, StoredSource, TokenSource
from lcjax.data.files import FileCache, FileList
from lcjax.data.readers import Document, Reader, SourceFiles
from lcjax.errors import InputError
from lcjax.files import FolderSums, parse_json
from lcjax.storage import URLPath, check_regular, read_range, to_path

FORMAT = 1
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
# Offset of a document in the .bin file (in ids), characters of its text, the hash of its name in
# [0, 1) that selects the validation split, and the index of its label in the labels of the shard.
DOCUMENT = np.dtype([("start", "<i8"), ("characters", "<i8"), ("unit", "<f8"), ("label", "<i4")])
_SCAN = 1 << 24  # tokens that are searched at once for the starts of documents


class TokenFolder(SourceFiles):
    """The shards of a folder that `prepare` wrote."""

    def __init__(self, source: TokenSource, tokenizer: Any = None):
        self.source, folder = source, to_path(source.path)
        index, self.sums = read_index(folder, TOKENS)
        _check_fields(index, folder)
        check_tokenizer(source, index, index["tokenizer_name"], tokenizer)
        self.dtype = DTYPES[index["dtype"]]
        self.shards = [shard for shard in index["shards"] if shard["documents"]]
        labels = {label for shard in self.shards for label in shard["labels"]}
        _check_labels(source, sorted(labels))
        counts = {shard["name"]: shard["tokens"] for shard in self.shards}
        self.paths = list_shards(folder, counts, self.dtype.itemsize, TOKENS)

    def reader_class(self, path: Path) -> type[Reader]:
        return ShardReader


class BareFiles(SourceFiles):
    """One or more bare `.bin` files."""

    def __init__(self, source: TokenSource, tokenizer: Any = None):
        if source.upsample:
            raise InputError(
                f"data.path={source.path} has ids only, and upsample counts the characters of the"
                " text: prepare it from the text"
            )
        self.source, self.dtype = source, DTYPES[source.dtype]
        self.paths = FileList(_bare_files(source))
        _check_labels(source, [])
        if tokenizer is not None:
            self._check_first_token({tokenizer.bos_id, *tokenizer.eos_ids} - {None})

    def _check_first_token(self, special: set[int]) -> None:
        """Checks that files begin with one of the special tokens, which separate documents."""
        source = self.source
        if not special or source.document_start is not None or source.document_end is not None:
            return
        for _, path in self.paths:
            size = self.dtype.itemsize
            first = read_range(path, 0, size if path.stat().st_size >= size else 0).view(self.dtype)
            if len(first) and int(first[0]) not in special:
                raise InputError(
                    f"{path} begins with token {first[0]}, not with one of {sorted(special)}, so"
                    " the beginnings of documents are unknown: set document_start or"
                    " document_end to the token that marks them, or document_start=-1 for one"
                    " document"
                )

    def reader_class(self, path: Path) -> type[Reader]:
        return BareReader


def token_files(source: TokenSource, tokenizer: Any = None) -> SourceFiles:
    """Finds the files of a folder of shards, or bare files; checks the ids against `tokenizer`."""
    is_folder = (to_path(source.path) / TOKENS.index).is_file()
    return (TokenFolder if is_folder else BareFiles)(source, tokenizer)


class _TokenReader(Reader):
    """Base class of readers whose documents are slices of a memory map of ids."""

    starts: np.ndarray  # int64 [n]: offsets of the documents in the file, in ids
    lengths: np.ndarray  # int64 [n]

    def __len__(self) -> int:
        return len(self.starts)

    def record(self, index: int) -> np.ndarray:
        """Returns the int32 ids of a document."""
        start = int(self.starts[index])
        return self._map()[start : start + int(self.lengths[index])].astype(np.int32)

    def num_special(self, bos: int | None, eos: int | None) -> np.ndarray:
        """Returns int64 [n], the number of special tokens of each document: first bos, last eos."""
        return np.zeros(len(self), np.int64)

    def _map(self) -> np.ndarray:
        return np.frombuffer(self._cache.map(self._path), self._files.dtype)


class ShardReader(_TokenReader):
    """Reads a shard that `prepare` wrote.

    It has only the documents whose label is in `labels` of the source; empty `labels` select all.
    """

    def __init__(self, files: TokenFolder, index: int, cache: FileCache):
        super().__init__(files, index, cache)
        shard = files.shards[index]
        table = _read_table(self._path.with_suffix(".npy"), files.sums, shard)
        lengths = np.diff(np.append(table["start"], shard["tokens"]))
        self._labels, read_labels = shard["labels"], files.source.labels
        label_ids = [i for i, label in enumerate(self._labels) if label in read_labels]
        rows = np.isin(table["label"], label_ids) if read_labels else slice(None)
        self._table = table[rows]
        self.starts, self.lengths = self._table["start"], lengths[rows]

    def split_hash(self, index: int) -> float:
        return float(self._table["unit"][index])

    def document(self, index: int) -> Document:
        row = self._table[index]
        label, characters = self._labels[row["label"]], int(row["characters"])
        return Document(self.name(index), self.record(index), label, characters)


class BareReader(_TokenReader):
    """Reads a `.bin` file without an index."""

    def __init__(self, files: BareFiles, index: int, cache: FileCache):
        super().__init__(files, index, cache)
        source, size = files.source, files.paths.sizes[index]
        if size % files.dtype.itemsize:
            raise InputError(
                f"{self._path} has {size} bytes, no whole number of {source.dtype} ids: set dtype"
                f" to {' or '.join(set(DTYPES) - {source.dtype})}, or fetch the file again"
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


def _read_table(path: Path, sums: FolderSums, shard: dict[str, Any]) -> np.ndarray:
    """Returns the table of a shard's documents, `DOCUMENT` [n]; a local file is mapped."""
    way_out = "prepare the text again"
    try:
        if isinstance(path, URLPath):
            data = path.read_bytes()
            sums.check(path.name, data)
            table = np.load(io.BytesIO(data), allow_pickle=False)
        else:
            sums.check(path.name)
            table = np.load(path, mmap_mode="r", allow_pickle=False)
    except InputError:  # another sum, or raised by a remote store
        raise
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{path} cannot be read ({error}): {way_out}") from None
    if table.dtype != DOCUMENT or table.ndim != 1:
        raise InputError(f"{path} is no table of documents: {way_out}")
    if len(table) != shard["documents"]:
        raise InputError(
            f"{path} has {len(table):,} documents, and {TOKENS.index} says"
            f" {shard['documents']:,}: {way_out}"
        )
    starts = np.append(table["start"], shard["tokens"])
    is_wrong = starts[:-1] > starts[1:]
    is_wrong[0] |= starts[0] != 0
    is_wrong |= (table["label"] < 0) | (table["label"] >= len(shard["labels"]))
    if is_wrong.any():
        row = int(is_wrong.argmax())
        raise InputError(
            f"{path} is damaged: document {row + 1} begins at id {starts[row]} with label"
            f" {table['label'][row]}, and starts must rise from 0 to {shard['tokens']:,} and labels"
            f" be below {len(shard['labels'])}; copy the folder again, or {way_out}"
        )
    return table


def _bare_files(source: TokenSource) -> list[tuple[str, Path]]:
    path = to_path(source.path)
    if path.is_file():
        return [(path.name, path)]
    files = sorted(path.rglob("*.bin")) if path.is_dir() else []
    check_finished(path, TOKENS)
    if not files:
        raise InputError(
            f"data.path={source.path} holds no tokens: give a folder that `python -m lcjax.data"
            " prepare` wrote, or .bin files"
        )
    # An empty file cannot be mapped.
    return [(file.relative_to(path).as_posix(), file) for file in files if file.stat().st_size]


def _find_token(ids: np.ndarray, token: int) -> np.ndarray:
    parts = [np.flatnonzero(ids[i : i + _SCAN] == token) + i for i in range(0, len(ids), _SCAN)]
    return np.concatenate([np.zeros(0, np.int64), *parts])


def read_index(folder: Path, kind: FolderKind) -> tuple[dict[str, Any], FolderSums]:
    """Reads the index of a folder, and the sums of its files."""
    path, way_out = folder / kind.index, f"write it again with `{kind.command}`"
    check_regular(folder)
    sums = FolderSums(folder, f"copy it again, or {way_out}")
    try:
        data = path.read_bytes()
        sums.check(path.name, data)
        index = parse_json(data)
    except InputError:  # another sum, or raised by a remote store
        raise
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}; {way_out}") from None
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise InputError(f"{path} is no index of format {FORMAT}: {way_out}")
    return index, sums


def check_finished(folder: Path, kind: FolderKind) -> None:
    if (folder / kind.plan).is_file():
        raise InputError(
            f"data.path={folder} is not finished: run the same `{kind.command}`"
            " once more; it resumes"
        )


def _check_fields(index: dict[str, Any], folder: Path) -> None:
    """Raises an InputError unless the index has the fields that `prepare` writes."""
    shards = index.get("shards")
    is_valid = (
        index.get("dtype") in list(DTYPES)  # a list, since the value may not be hashable
        and all(isinstance(index.get(name), str) for name in ("tokenizer", "tokenizer_name"))
        and isinstance(shards, list)
        and all(map(_is_shard, shards))
        and all(
            index.get(name) == sum(shard[name] for shard in shards)
            for name in ("documents", "tokens")
        )
    )
    if not is_valid:
        raise InputError(
            f"the index of {folder} was changed: its fields are not those that `python -m"
            " lcjax.data prepare` writes; prepare the text again"
        )


def _is_shard(shard: Any) -> bool:
    types = {"name": str, "documents": int, "tokens": int, "labels": list}
    return (
        isinstance(shard, dict)
        and all(type(shard.get(name)) is kind for name, kind in types.items())
        and all(isinstance(label, str) for label in shard["labels"])
    )


def check_ids(name: str, ids: np.ndarray, vocab_size: int) -> None:
    """Raises an `InputError` unless the ids of the document `name` are of a vocabulary."""
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise InputError(
            f"{name} has the token {int(ids.max())}, and the tokenizer only {vocab_size}: these are"
            " ids of another tokenizer, or dtype is wrong"
        )


def check_tokenizer(
    source: TokenSource | StoredSource, index: dict[str, Any], name: str, tokenizer: Any
) -> None:
    """Raises an `InputError` if stored ids are from another tokenizer, that of model `name`."""
    if tokenizer is not None and index["tokenizer"] != tokenizer.fingerprint:
        raise InputError(
            f"{source.path} was made with the tokenizer of {name} ({index['tokenizer']}), the"
            f" model's is another ({tokenizer.fingerprint}): make it again with the model's"
        )


def _check_labels(source: TokenSource, labels: list[str]) -> None:
    if unknown := set(source.labels) - set(labels):
        raise InputError(
            f"data.sources: labels={sorted(unknown)} are not in {source.path}, which has"
            f" {', '.join(labels) or 'none'}"
        )


def list_shards(folder: Path, counts: dict[str, int], size: int, kind: FolderKind) -> FileList:
    """Lists the `.bin` files of a folder, and checks their sizes.

    Args:
      folder: the folder.
      counts: number of entries of each shard, by its name.
      size: bytes of an entry.
      kind: kind of the folder, for error messages.
    """
    files = [(name, folder / f"{name}.bin") for name in counts]
    for name, path in files:
        if Path(name).name != name:  # a path could name a file outside of the folder
            raise InputError(f"{folder}: the shard {name!r} must be a file of this folder")
        num_bytes, expected = path.stat().st_size if path.is_file() else 0, counts[name] * size
        if num_bytes != expected:
            raise InputError(
                f"{path} has {num_bytes:,} bytes, and {counts[name]:,} entries of {size:,} take"
                f" {expected:,}: it was cut or moved; copy it again, or write the folder again with"
                f" `{kind.command}`"
            )
    return FileList(files)
