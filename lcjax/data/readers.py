"""Random access to the documents of one file: whole text files, JSON lines, Parquet rows."""

import gzip
import json
import mmap
import shutil
import tempfile
import threading
import zlib
from collections import OrderedDict
from pathlib import Path

import numpy as np
from tqdm import tqdm

from lcjax.errors import InputError

_SHOW_PROGRESS = 1 << 28  # bytes of a file from which on indexing shows a bar
_CACHED_GROUPS = 4  # Parquet row groups held in memory


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


class TextFile:
    """A file that is one document."""

    def __init__(self, name: str, path: Path, on_bad_text: str):
        self._name, self._path, self._on_bad_text = name, path, on_bad_text

    def __len__(self) -> int:
        return 1

    def name(self, index: int) -> str:
        return self._name

    def text(self, index: int) -> str:
        if self._path.suffix.lower() in (".gz", ".zst"):
            with _unpacked(self._path) as file:
                data = file.read()
        else:
            with _open(self._path) as file:
                data = file.read()
        return decode(data, where=str(self._path), on_bad_text=self._on_bad_text)


class JsonLines:
    """A file with one JSON object per line, found by byte offset (8 bytes of memory a line).

    A compressed file, which has no random access, is unpacked once into a temporary file.
    """

    def __init__(self, name: str, path: Path, text_field: str, on_bad_text: str):
        self._name, self._path, self._field = name, path, text_field
        self._on_bad_text = on_bad_text
        packed = path.suffix.lower() in (".gz", ".zst")
        with _unpacked(path) if packed else _open(path) as file:
            self._starts = line_starts(file, path.name)
            # A map of the file is read by many threads at once, without seeks to fight over.
            full = len(self) > 0
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if full else b""

    def __len__(self) -> int:
        return len(self._starts) - 1

    def name(self, index: int) -> str:
        return f"{self._name}:{index + 1}"

    def text(self, index: int) -> str:
        where = f"{self._path}:{index + 1}"
        start, end = int(self._starts[index]), int(self._starts[index + 1])
        line = decode(
            self._map[start:end], where=where, offset=start, on_bad_text=self._on_bad_text
        )
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
    """The rows of a Parquet file, one row group at a time, the last few of them kept."""

    def __init__(self, name: str, path: Path, text_field: str):
        self._name, self._path, self._field = name, path, text_field
        pyarrow = _pyarrow()
        try:
            self._file = pyarrow.parquet.ParquetFile(path, memory_map=True)
        except (pyarrow.ArrowException, OSError) as error:
            raise InputError(f"{path} is not a readable Parquet file: {error}") from None
        if text_field not in self._file.schema_arrow.names:
            raise _no_field(str(path), text_field, self._file.schema_arrow.names)
        meta = self._file.metadata
        rows = [meta.row_group(i).num_rows for i in range(meta.num_row_groups)]
        self._starts = np.cumsum([0, *rows])
        self._groups: OrderedDict = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def name(self, index: int) -> str:
        return f"{self._name}:{index + 1}"

    def text(self, index: int) -> str:
        group = int(np.searchsorted(self._starts, index, side="right")) - 1
        with self._lock:  # a ParquetFile is not safe to read from two threads
            if group not in self._groups:
                self._groups[group] = self._read(group)
            self._groups.move_to_end(group)
            while len(self._groups) > _CACHED_GROUPS:
                self._groups.popitem(last=False)
            column = self._groups[group]
        value = column[index - int(self._starts[group])].as_py()
        return _string(value, f"{self._path}: row {index + 1}", self._field)

    def _read(self, group: int):
        pyarrow = _pyarrow()
        try:
            return self._file.read_row_group(group, columns=[self._field]).column(self._field)
        except (pyarrow.ArrowException, OSError) as error:
            raise InputError(f"{self._path}: row group {group} is damaged: {error}") from None


def line_starts(file, label: str) -> np.ndarray:
    """Byte offsets of the lines of an open file, and its end: int64 [lines + 1]."""
    size = file.seek(0, 2)
    file.seek(0)
    starts, read = [np.zeros(1, np.int64)], 0
    # None shows the bar on a terminal only.
    hide = True if size < _SHOW_PROGRESS else None
    with tqdm(total=size, unit="B", unit_scale=True, desc=f"index {label}", disable=hide) as bar:
        while chunk := file.read(1 << 24):
            starts.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == 10) + (read + 1))
            read += len(chunk)
            bar.update(len(chunk))
    offsets = np.concatenate(starts)
    # The last line may lack its line feed.
    return offsets if offsets[-1] == size else np.append(offsets, size)


def _open(path: Path):
    try:
        return open(path, "rb")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None


def _unpacked(path: Path):
    """A temporary file, gone when closed, with the plain content of a .gz or .zst file."""
    plain = tempfile.TemporaryFile(prefix="lcjax-")  # noqa: SIM115 (handed to the caller)
    with _open(path) as raw:
        if path.suffix.lower() == ".gz":
            stream, damage = gzip.GzipFile(fileobj=raw), (gzip.BadGzipFile, EOFError, zlib.error)
        else:
            zstandard = _zstandard()
            stream = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
            damage = (zstandard.ZstdError,)
        try:
            shutil.copyfileobj(stream, plain, 1 << 20)
        except damage as error:
            raise InputError(f"{path} is damaged or cut short: {error}") from None
    plain.seek(0)
    return plain


def _zstandard():
    try:
        import zstandard
    except ImportError:
        raise InputError(
            "reading .zst files needs `pip install zstandard`; .gz needs nothing"
        ) from None
    return zstandard


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
