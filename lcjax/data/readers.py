"""Random access to the records of one file: whole text files, lines of JSON.

A record is a str, the document itself, or a mapping of fields, one of which holds it. Names are the
same on every machine; `where` is for messages.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

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


class TextFile(Reader):
    """A file that is one document."""

    def __init__(self, name: str, path: Path, on_bad_text: str, files: Files):
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

    def __init__(self, name: str, path: Path, on_bad_text: str, files: Files):
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
