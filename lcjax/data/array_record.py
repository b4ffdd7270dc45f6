"""Random access to the records of an ArrayRecord file, through the reader that comes with grain.

A record is bytes, whose meaning the file does not tell. The first one decides for the whole file:
a `tf.train.Example` (TFDS and MaxText write these), a JSON object, or the document itself in UTF-8.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from lcjax.data.files import Files
from lcjax.data.readers import Reader, decode, parse_json
from lcjax.errors import InputError


class ArrayRecords(Reader):
    """The records of one file."""

    def __init__(self, name: str, path: Path, on_bad_text: str, files: Files):
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
        return self._files.opened.get(self._path, self._open)

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
