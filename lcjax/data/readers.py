"""Random access to the records of one file: text, lines of JSON, Parquet, Arrow, ArrayRecord.

A record is a str, which is the document, or a mapping of fields, one of which holds the document.
Names of records are the same on every machine; `where` is for error messages.
"""

import hashlib
import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from tqdm import tqdm

from lcjax.data.config import Source, TextSource
from lcjax.data.files import FileCache, FileList, content, find_files, gzip_chunks, kind
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


class Reader:
    """What all readers share; those of files with one document have no numbers in the names."""

    def __init__(self, name: str, path: Path):
        self._name, self._path = name, path

    def __len__(self) -> int:
        raise NotImplementedError

    def record(self, index: int) -> Any:
        raise NotImplementedError

    def name(self, index: int) -> str:
        return f"{self._name}:{index + 1}"

    def where(self, index: int) -> str:
        return f"{self._path}:{index + 1}"

    def unit(self, index: int) -> float:
        """A number in [0, 1) that belongs to the document for good."""
        return unit_hash(self.name(index).encode())


class Document(NamedTuple):
    """A document and what decides whether it is taken."""

    name: str
    value: Any  # text, token ids, or the parts of a conversation
    label: str
    characters: int

    @property
    def pair(self) -> tuple[str, Any]:
        return self.name, self.value


class SourceFiles(Protocol):
    """The files of one source, and how documents are read from them."""

    source: Source
    paths: FileList

    def open(self, index: int, files: FileCache) -> Reader:
        """The records of one file."""
        ...

    def document(self, reader: Reader, index: int) -> Document:
        """What the source makes of a record."""
        ...


class TextFile(Reader):
    """A file that is one document."""

    def __init__(self, name: str, path: Path, on_bad_text: str, files: FileCache):
        super().__init__(name, path)
        self._on_bad_text, self._files = on_bad_text, files

    def __len__(self) -> int:
        return 1

    def name(self, index: int) -> str:
        return self._name

    def where(self, index: int) -> str:
        return str(self._path)

    def record(self, index: int) -> str:
        packed = self._path.suffix.lower() == ".gz"  # read at once: no need of a temporary file
        chunks = gzip_chunks(self._path) if packed else content(self._path, self._files).chunks()
        return decode(b"".join(chunks), where=str(self._path), on_bad_text=self._on_bad_text)


class JsonLines(Reader):
    """A file with one JSON object per line, found by byte offset (8 bytes of memory a line)."""

    def __init__(self, name: str, path: Path, on_bad_text: str, files: FileCache):
        super().__init__(name, path)
        self._on_bad_text = on_bad_text
        self._content = content(path, files)
        self._starts = line_starts(self._content.chunks(), path.name, path.stat().st_size)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def record(self, index: int) -> dict[str, Any] | str:
        """The object; an empty document for a blank line."""
        start, end = int(self._starts[index]), int(self._starts[index + 1])
        data = self._content.read(start, end)
        where = self.where(index)
        line = decode(data, where=where, offset=start, on_bad_text=self._on_bad_text)
        return parse_json(line, where) if line.strip() else ""


def parse_json(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{where} is not JSON: {error.msg} at column {error.colno}; each line of a .jsonl"
            ' file is one object such as {"text": ...}'
        ) from None
    if not isinstance(record, dict):
        raise InputError(f"{where} is a JSON {type(record).__name__}, not an object")
    return record


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


def field_of(record: Any, name: str, where: str, key: str = "text_field") -> Any:
    """The value of a field, which the setting `key` names; `a.b` is field b of that in field a."""
    value = record
    for part in [name] if name in record else name.split("."):
        if not isinstance(value, dict) or part not in value:
            raise no_field(where, name, record, key)
        value = value[part]
    return value


def text_of(record: Any, name: str, where: str) -> str:
    """The document in a record."""
    if isinstance(record, str):
        return record
    value = field_of(record, name, where)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise InputError(f"{where}: field {name!r} holds a {type(value).__name__}, not text")
    return value


def no_field(where: str, name: str, present: Iterable[str], key: str) -> InputError:
    return InputError(
        f"{where} has no field {name!r}; it has {', '.join(sorted(present)) or 'none'}:"
        f" name the right one with data.sources.0.{key}"
    )


class ParquetRows(Reader):
    """The rows of a Parquet file, read by row groups; the last ones of a source are kept."""

    def __init__(self, name: str, path: Path, fields: Mapping[str, str], files: FileCache):
        super().__init__(name, path)
        self._files = files
        self._lock = threading.Lock()
        file = self._file()
        self._columns = _columns(fields, file.schema_arrow.names, path)
        meta = file.metadata
        rows = [meta.row_group(i).num_rows for i in range(meta.num_row_groups)]
        self._starts = np.cumsum([0, *rows])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def where(self, index: int) -> str:
        return f"{self._path}: row {index + 1}"

    def record(self, index: int) -> dict[str, Any]:
        group = int(np.searchsorted(self._starts, index, side="right")) - 1
        with self._lock:  # a ParquetFile is not safe to read from two threads
            table = self._files.blocks.get((self._path, group), lambda: self._read(group))
        return _row(table, index - int(self._starts[group]))

    def _file(self):
        return self._files.handles.get(self._path, self._open)

    def _open(self):
        pyarrow = _pyarrow(".parquet")
        try:
            return pyarrow.parquet.ParquetFile(self._path, memory_map=True)
        except (pyarrow.ArrowException, OSError) as error:
            raise InputError(f"{self._path} is not a readable Parquet file: {error}") from None

    def _read(self, group: int):
        pyarrow, file = _pyarrow(".parquet"), self._file()
        try:
            return file.read_row_group(group, columns=self._columns)
        except (pyarrow.ArrowException, OSError) as error:
            raise InputError(f"{self._path}: row group {group} is damaged: {error}") from None


class ArrowRows(Reader):
    """The rows of an Arrow file, of the streaming or the random access kind, read from its map."""

    def __init__(self, name: str, path: Path, fields: Mapping[str, str], files: FileCache):
        super().__init__(name, path)
        self._files = files
        table = self._table()
        self._columns = _columns(fields, table.column_names, path)
        self._rows = table.num_rows

    def __len__(self) -> int:
        return self._rows

    def where(self, index: int) -> str:
        return f"{self._path}: row {index + 1}"

    def record(self, index: int) -> dict[str, Any]:
        table = self._table()
        return {name: table.column(name)[index].as_py() for name in self._columns}

    def _table(self):
        return self._files.handles.get(self._path, self._open)

    def _open(self):
        pyarrow = _pyarrow(".arrow")
        try:
            mapped = pyarrow.memory_map(str(self._path))
            try:
                return pyarrow.ipc.open_stream(mapped).read_all()
            except pyarrow.ArrowInvalid:
                return pyarrow.ipc.open_file(mapped).read_all()
        except (pyarrow.ArrowException, OSError) as error:
            raise InputError(f"{self._path} is not a readable Arrow file: {error}") from None


def _columns(fields: Mapping[str, str], present: Sequence[str], path: Path) -> list[str]:
    """The columns that hold the fields, given by setting; `a.b` lies in column a."""
    columns = []
    for key, name in fields.items():
        column = name if name in present else name.split(".")[0]
        if column not in present:
            raise no_field(str(path), name, present, key)
        columns.append(column)
    return list(dict.fromkeys(columns))


def _row(table: Any, index: int) -> dict[str, Any]:
    return {name: table.column(name)[index].as_py() for name in table.column_names}


def _pyarrow(suffix: str) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise InputError(f"reading {suffix} files needs `pip install pyarrow`") from None
    return pyarrow


class ArrayRecords(Reader):
    """The records of one file."""

    def __init__(self, name: str, path: Path, on_bad_text: str, files: FileCache):
        super().__init__(name, path)
        self._files, self._on_bad_text = files, on_bad_text
        self._length = len(self._file())
        self._kind = _kind(self._bytes(0)) if self._length else "text"

    def __len__(self) -> int:
        return self._length

    def where(self, index: int) -> str:
        return f"{self._path}: record {index + 1}"

    def record(self, index: int) -> dict[str, Any] | str:
        data, where = self._bytes(index), self.where(index)
        if self._kind == "example":
            example = parse_example(data)
            if example is None:
                raise InputError(f"{where} is no tf.train.Example, as the first one of the file is")
            return {key: self._feature(value, where) for key, value in example.items()}
        text = decode(data, where=where, on_bad_text=self._on_bad_text)
        return parse_json(text, where) if self._kind == "json" and text else text

    def _feature(self, values: list, where: str) -> Any:
        """A feature of one value is that value."""
        if values and isinstance(values[0], bytes):
            bad = self._on_bad_text
            values = [decode(value, where=where, on_bad_text=bad) for value in values]
        return values[0] if len(values) == 1 else values

    def _bytes(self, index: int) -> bytes:
        try:
            return self._file()[index]
        except (RuntimeError, ValueError, IndexError) as error:
            raise InputError(f"{self.where(index)} is damaged: {_line(error)}") from None

    def _file(self) -> Any:
        return self._files.handles.get(self._path, self._open)

    def _open(self) -> Any:
        import grain

        try:
            return grain.sources.ArrayRecordDataSource([str(self._path)])
        except ImportError:
            raise InputError(
                "reading .array_record files needs `pip install array-record`"
            ) from None
        except (RuntimeError, ValueError, OSError) as error:
            raise InputError(
                f"{self._path} is not a readable ArrayRecord file: {_line(error)}"
            ) from None


def _kind(data: bytes) -> str:
    if parse_example(data):
        return "example"
    try:
        return "json" if isinstance(json.loads(data), dict) else "text"
    except ValueError:
        return "text"


def parse_example(data: bytes) -> dict[str, list] | None:
    """Features of a `tf.train.Example`; None for bytes that are none.

    Example{1: Features{1: entries {1: name, 2: Feature{1: bytes | 2: floats | 3: ints}}}},
    where the three kinds of list hold their values as field 1.
    """
    try:
        features = {}
        for _, packed in _fields(data, only=1):
            for _, entry in _fields(packed, only=1):
                pair = dict(_fields(entry))
                name, feature = pair[1].decode(), dict(_fields(pair.get(2, b"")))
                features[name] = next((_values(k, v) for k, v in feature.items()), [])
        return features
    except (ValueError, KeyError, IndexError, AttributeError, UnicodeDecodeError):
        return None


def _values(kind: int, data: bytes) -> list:
    fields = list(_fields(data, only=1))
    if kind == 1:
        return [value for _, value in fields]
    if kind == 2:
        return [float(v) for _, part in fields for v in np.frombuffer(part, "<f4")]
    if kind != 3:
        raise ValueError("no list of a Feature")
    found = []
    for _, part in fields:
        if isinstance(part, int):
            found.append(part)
            continue
        at = 0
        while at < len(part):
            value, at = _varint(part, at)
            found.append(value)
    return [value - 2**64 if value >= 2**63 else value for value in found]


def _fields(data: bytes, only: int | None = None):
    """(number, value) of the fields of a protocol buffer message; lengths must come out even."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if only is not None and number != only:
            raise ValueError("another message")
        if wire == 0:
            value, at = _varint(data, at)
        elif wire in (1, 2, 5):
            size = {1: 8, 5: 4}.get(wire, 0)
            if wire == 2:
                size, at = _varint(data, at)
            value, at = data[at : at + size], at + size
            if at > len(data):
                raise ValueError("cut short")
        else:
            raise ValueError("no such wire type")
        yield number, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value, at, shift = value | (byte & 127) << shift, at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError("no integer")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


class RecordFiles:
    """The files of a source of records; `fields` are those that it reads, by setting."""

    def __init__(self, source: Source, fields: Iterable[str], on_bad_text: str = "error"):
        self.source, self._on_bad_text = source, on_bad_text
        self._fields: dict[str, str] = {
            key: name for key in fields if (name := getattr(source, key))
        }
        self.paths = FileList(find_files(source.path))

    def open(self, index: int, files: FileCache) -> Reader:
        (name, path), bad = self.paths[index], self._on_bad_text
        match kind(path):
            case ".jsonl":
                return JsonLines(name, path, bad, files)
            case ".array_record":
                return ArrayRecords(name, path, bad, files)
            case ".parquet":
                return ParquetRows(name, path, self._fields, files)
            case ".arrow":
                return ArrowRows(name, path, self._fields, files)
            case _:
                return TextFile(name, path, bad, files)

    def document(self, reader: Reader, index: int) -> Document:
        raise NotImplementedError


class TextFiles(RecordFiles):
    """Documents are one field of a record, or all of a file."""

    source: TextSource

    def __init__(self, source: TextSource, on_bad_text: str = "error"):
        super().__init__(source, ("text_field", "label_field"), on_bad_text)

    def document(self, reader: Reader, index: int) -> Document:
        record, where, name = reader.record(index), reader.where(index), reader.name(index)
        text = text_of(record, self.source.text_field, where)
        return Document(name, text, self._label(record, where, name), len(text))

    def _label(self, record: Any, where: str, name: str) -> str:
        field = self.source.label_field
        if field and isinstance(record, dict):
            return str(field_of(record, field, where, "label_field"))
        folder, inside, _ = name.partition("/")
        # At the top a file of many documents is a kind of text, one of a single document is none.
        return folder if inside else folder.split(".")[0] if ":" in folder else "."
