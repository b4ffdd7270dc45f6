"""Random access to the records of one file: text, lines of JSON, Parquet, Arrow, ArrayRecord.

A record is a str, which is the document, or a mapping of fields, one of which holds the document.
The name of a record is the same on every machine. Its location is for error messages.
"""

import abc
import hashlib
import json
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import grain
import numpy as np
from tqdm import tqdm

from lcjax.checkpoints.tokenizer import check_text
from lcjax.data.data_config import Source, TextConfig, TextSource
from lcjax.data.files import (
    FileCache,
    FileList,
    content,
    find_files,
    gzip_chunks,
    import_pyarrow,
    kind,
    plain_chunks,
)
from lcjax.errors import InputError, one_line
from lcjax.files import parse_json
from lcjax.storage import URLPath, is_storage_failure

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

_MAX_NAMED = 5  # bad records that are named one by one
_PROGRESS_BYTES = 1 << 28  # indexing a file of at least this size shows a progress bar


def decode(
    data: bytes | bytearray, *, location: str, offset: int = 0, on_bad_text: str = "error"
) -> str:
    """Decodes UTF-8 text and removes its byte order mark.

    Args:
      data: the bytes.
      location: file and record, for error messages.
      offset: offset of `data` in the file, for error messages.
      on_bad_text: what to do with invalid bytes: error, skip (return an empty text) or replace.

    Raises:
      InputError: the bytes are not UTF-8, and `on_bad_text` is error.
    """
    try:
        errors = "replace" if on_bad_text == "replace" else "strict"
        return data.decode("utf-8", errors).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        if on_bad_text == "skip":
            return ""
        guess = "UTF-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "LATIN1"
        raise InputError(
            f"{location} is not UTF-8: byte 0x{data[error.start]:02x} at offset"
            f" {offset + error.start}; convert it (`iconv -f {guess} -t UTF-8`) or set"
            " data.on_bad_text=skip (or replace)"
        ) from None


def unit_hash(data: bytes | str) -> float:
    """Returns a hash of `data` in [0, 1) that is the same on every machine."""
    if isinstance(data, str):
        data = data.encode(errors="surrogateescape")  # file names may be other bytes than UTF-8
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") / 2**64


class Document(NamedTuple):
    """A document, and the fields by which up-sampling selects it."""

    name: str
    value: Any  # text, token ids, a conversation, or a stored row
    label: str = ""  # label of its share in an up-sampling
    characters: int = 0  # length of its text, for an up-sampling

    @property
    def pair(self) -> tuple[str, Any]:
        return self.name, self.value


class Reader(abc.ABC):
    """Base class of readers, which give random access to the records of one file."""

    _separator = ":"  # between the path and the number of a record, in error messages

    def __init__(self, files: "SourceFiles", index: int, cache: FileCache):
        """Opens file `index` of `files`; `cache` is shared by all readers of the source."""
        self._files, self._cache = files, cache
        self._name, self._path = files.paths[index]

    @abc.abstractmethod
    def __len__(self) -> int:
        """Returns the number of records."""

    @abc.abstractmethod
    def record(self, index: int) -> Any:
        """Returns one record: a str, a mapping of fields, or token ids."""

    def document(self, index: int) -> Document:
        """Returns a record as a document, without interpreting its fields."""
        return Document(self.name(index), self.record(index))

    def name(self, index: int) -> str:
        return f"{self._name}:{index + 1}"

    def location(self, index: int) -> str:
        return f"{self._path}{self._separator}{index + 1}"

    def title(self, index: int, field: str) -> str:
        """Returns the text in `field` of a record, or the name of a file that is one document."""
        record = self.record(index) if field else None
        if not isinstance(record, Mapping):
            return ""
        value = field_value(record, field, self.location(index), "chunking.title_field")
        return "" if value is None else str(value)

    def split_hash(self, index: int) -> float:
        """Returns the hash in [0, 1) of a record that selects the validation split."""
        return unit_hash(self.name(index))

    def _decode(self, data: bytes | bytearray, index: int, offset: int = 0) -> str:
        on_bad_text = self._files.config.on_bad_text
        return decode(data, location=self.location(index), offset=offset, on_bad_text=on_bad_text)


class SourceFiles(abc.ABC):
    """The files of one source, with the rules to read documents from them."""

    source: Source
    paths: FileList

    @abc.abstractmethod
    def reader_class(self, path: Path) -> type[Reader]:
        """Returns the reader class for a file."""

    def open(self, index: int, cache: FileCache) -> Reader:
        """Opens file `index` and returns its reader."""
        _, path = self.paths[index]
        return self.reader_class(path)(self, index, cache)

    def document(self, reader: Reader, index: int) -> Document:
        """Returns record `index` of a reader as a document."""
        return reader.document(index)


class TextReader(Reader):
    """Reads a file that is one document."""

    def __len__(self) -> int:
        return 1

    def name(self, index: int) -> str:
        return self._name

    def title(self, index: int, field: str) -> str:
        return self._name

    def location(self, index: int) -> str:
        return str(self._path)

    def record(self, index: int) -> str:
        suffix = self._path.suffix.lower()  # a single read needs no temporary file
        if suffix == ".zst":
            parts = content(self._path, self._cache).chunks()
        else:
            parts = (gzip_chunks if suffix == ".gz" else plain_chunks)(self._path)
        data = bytearray()  # joining a list of parts would hold a large file twice
        for part in parts:
            data += part
        return self._decode(data, index)


class JsonLinesReader(Reader):
    """Reads a file with one JSON object per line by byte offsets (8 bytes of memory per line)."""

    def __init__(self, files: "SourceFiles", index: int, cache: FileCache):
        super().__init__(files, index, cache)
        path = self._path
        self._content = content(path, cache)
        self._starts = line_starts(self._content.chunks(), path.name, path.stat().st_size)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def record(self, index: int) -> dict[str, Any] | str:
        """Returns the object of a line, or an empty document for a blank line."""
        start, end = int(self._starts[index]), int(self._starts[index + 1])
        line = self._decode(self._content.read(start, end), index, offset=start)
        return _parse_json(line, self.location(index)) if line.strip() else ""


def _parse_json(line: str, location: str) -> dict[str, Any]:
    try:
        record = parse_json(line)
    except ValueError as error:  # also raised for integers with too many digits for Python
        reason = error
        if isinstance(error, json.JSONDecodeError):
            reason = f"{error.msg} at column {error.colno}"
        raise InputError(
            f"{location} is not JSON: {reason}; each line of a .jsonl file is one object such as"
            ' {"text": ...}'
        ) from None
    if not isinstance(record, dict):
        raise InputError(f"{location} is a JSON {type(record).__name__}, not an object")
    return record


def line_starts(chunks: Iterable[bytes], label: str, size: int) -> np.ndarray:
    """Returns the byte offsets of the lines of a content, and of its end.

    Args:
      chunks: the content in order.
      label: name of the file for the progress bar.
      size: bytes of the file; a large one shows a progress bar.

    Returns:
      int64 [lines + 1].
    """
    starts, num_bytes, ends_with_newline = [np.zeros(1, np.int64)], 0, True
    # With disable=None, tqdm shows the bar on a terminal only.
    disable = True if size < _PROGRESS_BYTES else None
    with tqdm(unit="B", unit_scale=True, desc=f"index {label}", disable=disable) as bar:
        for chunk in chunks:
            newlines = np.flatnonzero(np.frombuffer(chunk, np.uint8) == 10)
            starts.append(newlines + (num_bytes + 1))
            num_bytes, ends_with_newline = num_bytes + len(chunk), chunk[-1] == 10
            bar.update(len(chunk))
    # The last line may lack its line feed.
    return np.concatenate(starts if ends_with_newline else [*starts, np.array([num_bytes])])


class OpenFileReader(Reader):
    """Base class of readers whose file stays open in the cache of the source."""

    def _handle(self) -> Any:
        return self._cache.handles.get(self._path, self._open)

    @abc.abstractmethod
    def _open(self) -> Any:
        """Opens the file."""


class ParquetReader(OpenFileReader):
    """Reads the rows of a Parquet file; row groups are cached by the cache of the source."""

    _separator = ": row "

    def __init__(self, files: "RecordFiles", index: int, cache: FileCache):
        super().__init__(files, index, cache)
        self._lock = threading.Lock()
        file = self._handle()
        self._columns = _columns(files, file.schema_arrow.names, self._path)
        meta = file.metadata
        rows = [meta.row_group(i).num_rows for i in range(meta.num_row_groups)]
        self._starts = np.cumsum([0, *rows])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def record(self, index: int) -> dict[str, Any]:
        group = int(np.searchsorted(self._starts, index, side="right")) - 1
        with self._lock:  # a ParquetFile is not safe to read from two threads
            table = self._cache.blocks.get((self._path, group), lambda: self._read(group))
        try:
            return _row(table, index - int(self._starts[group]))
        except (ValueError, IndexError) as error:  # no UTF-8; fewer rows than the footer says
            raise InputError(f"{self.location(index)} is damaged: {one_line(error)}") from None

    def _open(self) -> "pyarrow.parquet.ParquetFile":
        pyarrow = import_pyarrow(str(self._path))
        try:
            if isinstance(self._path, URLPath):  # reads the footer, and then single row groups
                return pyarrow.parquet.ParquetFile(self._path.open("rb"))
            return pyarrow.parquet.ParquetFile(self._path, memory_map=True)
        except InputError:  # raised by a remote store
            raise
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            reason = one_line(error)
            raise InputError(f"{self._path} is not a readable Parquet file: {reason}") from None

    def _read(self, group: int) -> "pyarrow.Table":
        pyarrow = import_pyarrow(str(self._path))
        try:
            table = self._handle().read_row_group(group, columns=self._columns)
            table.validate(full=False)
            return table
        except InputError:
            raise
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            reason = one_line(error)
            raise InputError(f"{self._path}: row group {group} is damaged: {reason}") from None


class ArrowReader(OpenFileReader):
    """Reads the rows of an Arrow file (stream or file format), as Hugging Face `datasets` writes.

    pyarrow maps the file into memory; the package `datasets` is not needed.
    """

    _separator = ": row "

    def __len__(self) -> int:
        return self._handle().num_rows

    def record(self, index: int) -> dict[str, Any]:
        try:
            return self._handle().row(index)
        except ValueError as error:  # of pyarrow, and of text that is no UTF-8
            raise InputError(f"{self.location(index)} is damaged: {one_line(error)}") from None

    def _open(self) -> "_Batches":
        pyarrow = import_pyarrow(str(self._path))
        try:
            memory_map = self._map(pyarrow)
            try:
                table = pyarrow.ipc.open_stream(memory_map).read_all()
            except pyarrow.ArrowInvalid:
                table = pyarrow.ipc.open_file(memory_map).read_all()
            columns = _columns(self._files, table.column_names, self._path)
            return _Batches(table.select(columns))
        except InputError:  # no such column, or raised by a remote store
            raise
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            reason = one_line(error)
            raise InputError(f"{self._path} is not a readable Arrow file: {reason}") from None

    def _map(self, pyarrow: ModuleType) -> "pyarrow.NativeFile":
        if not isinstance(self._path, URLPath):
            return pyarrow.memory_map(str(self._path))
        data = self._cache.map(self._path) if self._path.stat().st_size else b""
        return pyarrow.BufferReader(pyarrow.py_buffer(data))


class _Batches:
    """The rows of an Arrow table in a memory map.

    Each batch of rows is validated before its first row is read: pyarrow would read outside of the
    map, and end the process, where offsets are damaged.
    """

    def __init__(self, table: "pyarrow.Table"):
        table.validate()
        self._batches, self._valid = table.to_batches(), set()
        self._starts = np.cumsum([0, *(batch.num_rows for batch in self._batches)])
        self.num_rows = int(self._starts[-1])

    def row(self, index: int) -> dict[str, Any]:
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        batch = self._batches[number]
        if number not in self._valid:
            batch.validate(full=True)
            self._valid.add(number)
        return _row(batch, index - int(self._starts[number]))


def _row(table: "pyarrow.Table", index: int) -> dict[str, Any]:
    return {name: _dense(table.column(name)[index].as_py()) for name in table.column_names}


def _dense(value: Any) -> Any:
    """Removes nulls from the objects of lists: a column has each key for all objects of a list."""
    if isinstance(value, list) and isinstance(value[0] if value else None, list | dict):
        return [_dense(item) for item in value]
    if isinstance(value, dict):
        return {key: _dense(item) for key, item in value.items() if item is not None}
    return value


def _columns(files: "RecordFiles", names: Sequence[str], path: Path) -> list[str]:
    """Returns the columns that hold the fields of `files`; a field `a.b` is in column a."""
    columns = [name for name in files.optional if name in names]
    for setting, name in files.fields.items():
        column = name if name in names else name.split(".")[0]
        if column not in names:
            raise _no_field(str(path), name, names, setting)
        if names.count(column) > 1:
            raise InputError(f"{path} has {names.count(column)} columns {column!r}: rename one")
        columns.append(column)
    return list(dict.fromkeys(columns))


class ArrayRecordReader(OpenFileReader):
    """Reads the records of an ArrayRecord file through grain.

    A record is bytes without a type. The first record determines the type of all records of the
    file: a `tf.train.Example` (written by TFDS and MaxText), a JSON object, or a document in UTF-8.
    """

    _separator = ": record "

    def __init__(self, files: "SourceFiles", index: int, cache: FileCache):
        super().__init__(files, index, cache)
        self._length = len(self._handle())
        self._kind = _record_kind(self._bytes(0)) if self._length else "text"

    def __len__(self) -> int:
        return self._length

    def record(self, index: int) -> dict[str, Any] | str:
        data = self._bytes(index)
        if self._kind == "example":
            example = parse_example(data)
            if example is None:
                raise InputError(
                    f"{self.location(index)} is no tf.train.Example, but the first record of the"
                    " file is one"
                )
            return {key: self._feature(values, index) for key, values in example.items()}
        text = self._decode(data, index)
        return _parse_json(text, self.location(index)) if self._kind == "json" and text else text

    def _feature(self, values: list, index: int) -> Any:
        """Decodes bytes; a list of one value becomes that value."""
        if values and isinstance(values[0], bytes):
            values = [self._decode(value, index) for value in values]
        return values[0] if len(values) == 1 else values

    def _bytes(self, index: int) -> bytes:
        try:
            return self._handle()[index]
        except (RuntimeError, ValueError, IndexError) as error:
            reason = one_line(error)[:200]
            raise InputError(f"{self.location(index)} is damaged: {reason}") from None

    def _open(self) -> grain.sources.ArrayRecordDataSource:
        if isinstance(self._path, URLPath):
            raise InputError(
                f"{self._path}: ArrayRecord files are read from local disks only; copy it, or write"
                " it as Parquet or JSON lines"
            )
        try:
            return grain.sources.ArrayRecordDataSource([str(self._path)])
        except (RuntimeError, ValueError, OSError) as error:
            raise InputError(
                f"{self._path} is not a readable ArrayRecord file: {one_line(error)[:200]}"
            ) from None


def _record_kind(data: bytes) -> str:
    if parse_example(data):
        return "example"
    try:
        return "json" if isinstance(parse_json(data), dict) else "text"
    except ValueError:
        return "text"


def parse_example(data: bytes) -> dict[str, list] | None:
    """Parses a `tf.train.Example` into {feature: values}; returns None for other bytes.

    The message is Example{1: Features{1: entries {1: name, 2: Feature{1: bytes | 2: floats |
    3: ints}}}}, where the three kinds of list hold their values as field 1.
    """
    try:
        features = {}
        for _, message in _fields(data, only=1):
            for _, entry in _fields(message, only=1):
                pair = dict(_fields(entry))
                name, feature = pair[1].decode(), dict(_fields(pair.get(2, b"")))
                features[name] = next((_values(k, v) for k, v in feature.items()), [])
        return features
    except (ValueError, KeyError, IndexError, AttributeError, TypeError):
        return None


def _values(kind: int, data: bytes) -> list:
    fields = list(_fields(data, only=1))
    if kind == 1:
        return [value for _, value in fields]
    if kind == 2:
        return [float(v) for _, part in fields for v in np.frombuffer(part, "<f4")]
    if kind != 3:
        raise ValueError("no list of a Feature")
    values = []
    for _, part in fields:
        if isinstance(part, int):
            values.append(part)
            continue
        offset = 0
        while offset < len(part):
            value, offset = _varint(part, offset)
            values.append(value)
    return [value - 2**64 if value >= 2**63 else value for value in values]


def _fields(data: bytes, only: int | None = None) -> Iterator[tuple[int, Any]]:
    """Yields (number, value) of the fields of a protocol buffer message.

    Raises a ValueError if the bytes are not a message, or if a field has another number than
    `only`.
    """
    offset = 0
    while offset < len(data):
        key, offset = _varint(data, offset)
        number, wire = key >> 3, key & 7
        if only is not None and number != only:
            raise ValueError("another message")
        if wire == 0:
            value, offset = _varint(data, offset)
        elif wire in (1, 2, 5):
            size = {1: 8, 5: 4}.get(wire, 0)
            if wire == 2:
                size, offset = _varint(data, offset)
            value, offset = data[offset : offset + size], offset + size
            if offset > len(data):
                raise ValueError("cut short")
        else:
            raise ValueError("no such wire type")
        yield number, value


def _varint(data: bytes, offset: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[offset]
        value, offset, shift = value | (byte & 127) << shift, offset + 1, shift + 7
        if byte < 128:
            return value, offset
        if shift > 63:
            raise ValueError("no integer")


_READERS = {
    ".jsonl": JsonLinesReader,
    ".array_record": ArrayRecordReader,
    ".parquet": ParquetReader,
    ".arrow": ArrowReader,
}


class RecordFiles(SourceFiles):
    """The files of a source of records."""

    def __init__(
        self,
        source: Source,
        config: TextConfig,
        fields: Mapping[str, str],
        optional: Sequence[str] = (),
    ):
        """Finds the files.

        Args:
          source: the source.
          config: the settings of all sources.
          fields: maps settings of `source` to the fields of records that they name.
          optional: further fields, which records may lack.
        """
        self.source, self.config, self.fields, self.optional = source, config, fields, optional
        self.paths, self._num_skipped = FileList(find_files(source.path)), 0

    def reader_class(self, path: Path) -> type[Reader]:
        return _READERS.get(kind(path), TextReader)

    def document(self, reader: Reader, index: int) -> Document:
        """Returns record `index` of a reader as a document.

        With `on_bad_record: skip` it returns an empty document for a bad record.
        """
        try:
            return self._document(reader.record(index), reader.location(index), reader.name(index))
        except InputError as error:
            self.skip(error)
            return Document(reader.name(index), "", ".")

    def skip(self, error: InputError) -> None:
        """Reports the error of a record that is left out; raises it if `on_bad_record` is error."""
        # A failure of the store must not skip a document: rows would depend on the network.
        if self.config.on_bad_record == "error" or is_storage_failure(error):
            raise error
        self._num_skipped += 1
        if is_reported(self._num_skipped):
            count, name = self._num_skipped, self.source.name
            print(f"skipped bad record {count:,} of {name}: {error}", file=sys.stderr)

    @abc.abstractmethod
    def _document(self, record: dict | str, location: str, name: str) -> Document:
        """Converts a record to a document; raises an InputError for a bad record."""


def is_reported(count: int) -> bool:
    """Whether to print the nth record that is left out: the first ones, and powers of 10."""
    return count <= _MAX_NAMED or str(count).strip("0") == "1"


class TextFiles(RecordFiles):
    """The files of a source of type text: a document is a field of a record, or a whole file."""

    source: TextSource

    def __init__(self, source: TextSource, config: TextConfig):
        fields = {"text_field": source.text_field, "label_field": source.label_field}
        super().__init__(source, config, {key: name for key, name in fields.items() if name})

    def _document(self, record: dict | str, location: str, name: str) -> Document:
        text = _text(record, self.source.text_field, location)
        return Document(name, text, self._label(record, location, name), len(text))

    def _label(self, record: Any, location: str, name: str) -> str:
        field = self.source.label_field
        if field and isinstance(record, dict):
            return str(field_value(record, field, location, "label_field"))
        folder, separator, _ = name.partition("/")
        # A top-level file of many documents is a label; files of one document share the label ".".
        return folder if separator else folder.split(".")[0] if ":" in folder else "."


def field_value(record: Any, name: str, location: str, setting: str = "text_field") -> Any:
    """Returns the value of a field; `a.b` is field b of the mapping in field a.

    Args:
      record: mapping of fields.
      name: name of the field.
      location: file and record, for error messages.
      setting: setting of the source that has the value `name`, for error messages.
    """
    value = record
    for part in [name] if name in record else name.split("."):
        if not isinstance(value, dict) or part not in value:
            raise _no_field(location, name, record, setting)
        value = value[part]
    return value


def _text(record: Any, name: str, location: str) -> str:
    if isinstance(record, str):
        return record
    value = field_value(record, name, location)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise InputError(f"{location}: field {name!r} holds a {type(value).__name__}, not text")
    return checked_text(value, location)


def checked_text(text: str, location: str) -> str:
    """Returns the text of a record; raises an InputError if UTF-8 cannot hold it."""
    try:
        check_text(text)
    except InputError as error:
        raise InputError(f"{location}: {error}") from None
    return text


def _no_field(location: str, name: str, names: Iterable[str], setting: str) -> InputError:
    key = setting if "." in setting else f"{setting} of this source in data.sources"
    return InputError(
        f"{location} has no field {name!r}; it has {', '.join(sorted(names)) or 'none'}:"
        f" name the right one with {key}"
    )
