"""Random access to the documents of one file: whole text files, JSON lines, Parquet rows."""

import hashlib
import json
import threading
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tqdm import tqdm

from lcjax.data.files import Files, content, gzip_chunks
from lcjax.errors import InputError

_SHOW_PROGRESS = 1 << 28  # bytes of a file from which on indexing shows a bar


def decode(data: bytes, *, where: str, offset: int = 0, on_bad_text: str = "error") -> str:
    """UTF-8 text without its byte order mark; `offset` places an error within the file."""
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        if on_bad_text == "skip":
            return ""
        if on_bad_text == "replace":
            return data.decode("utf-8", "replace")
        guess = "UTF-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "LATIN1"
        raise InputError(
            f"{where} is not UTF-8: byte 0x{data[error.start]:02x} at offset"
            f" {offset + error.start}; convert it (`iconv -f {guess} -t UTF-8`) or set"
            " data.on_bad_text=skip (or replace)"
        ) from None


def unit_hash(data: bytes) -> float:
    """A number in [0, 1) that depends on nothing but `data`."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") / 2**64


class TextFile:
    """A file that is one document."""

    def __init__(self, name: str, path: Path, on_bad_text: str, files: Files):
        self._name, self._path, self._on_bad_text = name, path, on_bad_text
        self._files = files

    def __len__(self) -> int:
        return 1

    def name(self, index: int) -> str:
        return self._name

    def text(self, index: int) -> str:
        packed = self._path.suffix.lower() == ".gz"  # read at once: no need of a temporary file
        chunks = gzip_chunks(self._path) if packed else content(self._path, self._files).chunks()
        return decode(b"".join(chunks), where=str(self._path), on_bad_text=self._on_bad_text)


class JsonLines:
    """A file with one JSON object per line, found by byte offset (8 bytes of memory a line)."""

    def __init__(self, name: str, path: Path, text_field: str, on_bad_text: str, files: Files):
        self._name, self._path, self._field = name, path, text_field
        self._on_bad_text = on_bad_text
        self._content = content(path, files)
        self._starts = line_starts(self._content.chunks(), path.name, path.stat().st_size)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def name(self, index: int) -> str:
        return f"{self._name}:{index + 1}"

    def text(self, index: int) -> str:
        where = f"{self._path}:{index + 1}"
        start, end = int(self._starts[index]), int(self._starts[index + 1])
        data = self._content.read(start, end)
        line = decode(data, where=where, offset=start, on_bad_text=self._on_bad_text)
        if not line.strip():
            return ""
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(
                f"{where} is not JSON: {error.msg} at column {error.colno}; each line of a .jsonl"
                f" file is one object such as {{{json.dumps(self._field)}: ...}}"
            ) from None
        if not isinstance(record, dict):
            raise InputError(f"{where} is a JSON {type(record).__name__}, not an object")
        if self._field not in record:
            raise _no_field(where, self._field, record)
        return _string(record[self._field], where, self._field)


class ParquetRows:
    """The rows of a Parquet file, read by row groups; the last ones of a source are kept."""

    def __init__(self, name: str, path: Path, text_field: str, files: Files):
        self._name, self._path, self._field, self._files = name, path, text_field, files
        self._lock = threading.Lock()
        file = self._file()
        if text_field not in file.schema_arrow.names:
            raise _no_field(str(path), text_field, file.schema_arrow.names)
        meta = file.metadata
        rows = [meta.row_group(i).num_rows for i in range(meta.num_row_groups)]
        self._starts = np.cumsum([0, *rows])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def name(self, index: int) -> str:
        return f"{self._name}:{index + 1}"

    def text(self, index: int) -> str:
        group = int(np.searchsorted(self._starts, index, side="right")) - 1
        with self._lock:  # a ParquetFile is not safe to read from two threads
            column = self._files.blocks.get((self._path, group), lambda: self._read(group))
        value = column[index - int(self._starts[group])].as_py()
        return _string(value, f"{self._path}: row {index + 1}", self._field)

    def _file(self):
        return self._files.opened.get(self._path, self._open)

    def _open(self):
        pyarrow = _pyarrow()
        try:
            return pyarrow.parquet.ParquetFile(self._path, memory_map=True)
        except (pyarrow.ArrowException, OSError) as error:
            raise InputError(f"{self._path} is not a readable Parquet file: {error}") from None

    def _read(self, group: int):
        pyarrow, file = _pyarrow(), self._file()
        try:
            return file.read_row_group(group, columns=[self._field]).column(self._field)
        except (pyarrow.ArrowException, OSError) as error:
            raise InputError(f"{self._path}: row group {group} is damaged: {error}") from None


def line_starts(chunks: Iterable[bytes], label: str, size: int) -> np.ndarray:
    """Byte offsets of the lines of a content, and its end: int64 [lines + 1].

    `size`, the bytes of the file, decides whether a bar shows how much was read.
    """
    starts, read, ended = [np.zeros(1, np.int64)], 0, True
    # None shows the bar on a terminal only.
    hide = True if size < _SHOW_PROGRESS else None
    with tqdm(unit="B", unit_scale=True, desc=f"index {label}", disable=hide) as bar:
        for chunk in chunks:
            starts.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == 10) + (read + 1))
            read, ended = read + len(chunk), chunk[-1] == 10
            bar.update(len(chunk))
    # The last line may lack its line feed.
    return np.concatenate(starts if ended else [*starts, np.array([read])])


def _pyarrow():
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise InputError("reading .parquet files needs `pip install pyarrow`") from None
    return pyarrow


def _no_field(where: str, name: str, present) -> InputError:
    return InputError(
        f"{where} has no field {name!r}; it has {', '.join(sorted(present)) or 'none'}:"
        " name the right one with data.sources.0.text_field"
    )


def _string(value, where: str, name: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise InputError(f"{where}: field {name!r} holds a {type(value).__name__}, not text")
    return value
