"""safetensors files by byte range: one file, or shards with an index.

Layout: 8 bytes little-endian header size, a JSON header `{name: {dtype, shape, data_offsets}}`,
then the tensors. Only the bytes of the rows asked for are read, into memory of their own: pages of
a mapped file would count as a second copy of the model while it loads.
"""

import json
import math
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from lcjax.checkpoints.weights import TensorInfo
from lcjax.errors import InputError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_CODES = {name: code for code, name in _NAMES.items()}
_BITS = {
    "F64": 64,
    "F32": 32,
    "F16": 16,
    "BF16": 16,
    "I64": 64,
    "I32": 32,
    "I16": 16,
    "I8": 8,
    "U64": 64,
    "U32": 32,
    "U16": 16,
}
_BITS |= {
    "U8": 8,
    "BOOL": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "C64": 64,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
_MAX_HEADER = 100_000_000  # bytes; the limit of the reference library
# Adapters, and another layout of the same weights.
_NOT_THE_MODEL = ("adapter_", "trainable_params", "consolidated")
_NUMBERED = re.compile(r"-\d+-of-(\d+)$")


class SafetensorsFolder:
    """The `*.safetensors` of a Hugging Face folder, or `files`, as one source of tensors."""

    def __init__(self, folder: str | Path, files: Sequence[Path] | None = None):
        self.path = str(folder)
        self._places: dict[str, tuple[Path, int]] = {}  # file and offset of every tensor
        self.tensors: dict[str, TensorInfo] = {}
        for file in _files(Path(folder)) if files is None else files:
            for name, info, offset in read_header(file):
                if name in self.tensors:
                    raise InputError(f"{self.path}: {name} is in two files; remove the stray one")
                self.tensors[name], self._places[name] = info, (file, offset)

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows of the leading axis."""
        info, (file, offset) = self.tensors[name], self._places[name]
        dtype = np.dtype(getattr(ml_dtypes, info.dtype, None) or info.dtype)
        row = math.prod(info.shape[1:])
        count, skip = (stop - start) * row, offset + start * row * dtype.itemsize
        block = np.fromfile(file, dtype, count, offset=skip)
        return block.reshape(stop - start, *info.shape[1:])


def has_weights(folder: Path) -> bool:
    return (folder / INDEX).is_file() or bool(_loose(folder))


def _loose(folder: Path) -> list[Path]:
    """The weights of a folder without an index."""
    files = sorted(folder.glob("*.safetensors"))
    return [file for file in files if not file.name.startswith(_NOT_THE_MODEL)]


def _files(folder: Path) -> list[Path]:
    index, single = folder / INDEX, folder / SINGLE
    if single.is_file():  # before an index that may lie beside it, as in transformers
        return [single]
    if not index.is_file():
        found = _loose(folder)
        if not found:
            raise InputError(f"{folder}: no *.safetensors file")
        _check_numbered(folder, found)
        return found
    try:
        found = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        outside = sorted({name for name in found if Path(name).name != name})
        names = sorted(set(found))
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        raise InputError(f"{index}: not an index of shards ({error}); download it again") from error
    if outside:
        raise InputError(f"{index}: names files outside its folder: {', '.join(outside)}")
    if missing := [n for n in names if not (folder / n).is_file()]:
        raise InputError(
            f"{folder}: {len(missing)} of {len(names)} shards are missing: "
            f"{', '.join(missing[:10])}; download them"
        )
    return [folder / name for name in names]


def _check_numbered(folder: Path, files: list[Path]) -> None:
    """`model-00001-of-00003` says how many there are, also where the index is missing."""
    totals = {int(m[1]) for file in files if (m := _NUMBERED.search(file.stem))}
    if totals and len(files) < max(totals):
        raise InputError(
            f"{folder}: {max(totals) - len(files)} of {max(totals)} shards are missing beside "
            f"{files[0].name}, and so is {INDEX}; download them"
        )


def read_header(file: Path) -> list[tuple[str, TensorInfo, int]]:
    """(name, what it is, offset in the file) of every tensor of one file."""
    size = file.stat().st_size
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8:
            raise InputError(f"{file}: not a safetensors file, or truncated ({size} bytes)")
        if length > _MAX_HEADER:
            raise InputError(
                f"{file}: not a safetensors file: it announces a header of {length:,} bytes, and "
                f"the format allows {_MAX_HEADER:,}; download it again"
            )
        if 8 + length > size:
            raise _truncated(file, size, 8 + length)
        text = stream.read(length)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        entries = [_fields(name, entry) for name, entry in header.items()]
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else error
        raise InputError(
            f"{file}: its safetensors header is damaged ({reason}); download it again"
        ) from error
    body = size - 8 - length
    end = _check_places(file, entries)
    if body < end:
        raise _truncated(file, size, 8 + length + end)
    if body > end:
        raise InputError(f"{file}: {body - end} bytes more than its header says; replace it")
    return [_entry(file, 8 + length, *entry) for entry in entries]


def _fields(name: str, entry: dict[str, Any]) -> tuple[str, str, tuple[int, ...], int, int]:
    """(name, dtype, shape, begin, end) of a header's entry, each of its type."""
    code, shape = entry["dtype"], entry["shape"]
    begin, end = entry["data_offsets"]
    if not isinstance(code, str):
        raise ValueError(f"{name} has dtype {code!r}")
    if not isinstance(shape, list) or not all(map(_is_count, shape)):
        raise ValueError(f"{name} has shape {shape!r}")
    if not (_is_count(begin) and _is_count(end) and begin <= end):
        raise ValueError(f"{name} has data_offsets {[begin, end]!r}")
    return name, code, tuple(shape), begin, end


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0  # a JSON true is no number


def _check_places(file: Path, entries: list[tuple]) -> int:
    """The end of the last tensor; two tensors in one place are refused."""
    last, stop = "", 0
    for name, _, _, begin, end in sorted(entries, key=lambda entry: entry[3:]):
        if begin < stop:
            raise InputError(
                f"{file}: its safetensors header is damaged ({name} overlaps {last}); download it "
                "again"
            )
        last, stop = name, end
    return stop


def _truncated(file: Path, size: int, wanted: int) -> InputError:
    return InputError(
        f"{file}: truncated: {size:,} bytes, but its header needs {wanted:,}; download it again"
    )


def _entry(
    file: Path, body: int, name: str, code: str, shape: tuple[int, ...], begin: int, end: int
) -> tuple[str, TensorInfo, int]:
    bits = math.prod(shape) * _BITS.get(code, 0)
    if code in _BITS and 8 * (end - begin) != bits:
        raise InputError(
            f"{file}: the header gives {name} {end - begin} bytes, but {code} {list(shape)} takes "
            f"{bits // 8}; download it again"
        )
    return name, TensorInfo(shape, _NAMES.get(code, code)), body + begin


def write_file(
    file: Path, tensors: dict[str, TensorInfo], arrays: Iterable[tuple[str, np.ndarray]]
) -> None:
    """Writes one file, tensor by tensor in the order of `tensors`; synced to the disk."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers insists on it
    position = 0
    for name, info in tensors.items():
        stop = position + nbytes(info)
        header[name] = {
            "dtype": _CODES[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [position, stop],
        }
        position = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8
    with open(file, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        _write_arrays(out, tensors, arrays)
        out.flush()
        os.fsync(out.fileno())


def _write_arrays(
    out: BinaryIO, tensors: dict[str, TensorInfo], arrays: Iterable[tuple[str, np.ndarray]]
) -> None:
    for (name, info), (given, array) in zip(tensors.items(), arrays, strict=True):
        if name != given or array.shape != info.shape or array.dtype.name != info.dtype:
            raise ValueError(
                f"{given} {array.dtype} {array.shape} came where {name} {info} was due"
            )
        out.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def nbytes(info: TensorInfo) -> int:
    return math.prod(info.shape) * (4 if info.dtype == "float32" else 2)
