"""Reads safetensors files by byte range, and writes them: one file, or shards with an index.

Layout: 8 bytes little-endian header size, a JSON header `{name: {dtype, shape, data_offsets}}`,
then the tensors. Only the bytes of the requested rows are read. They are read into new memory: the
pages of a mapped file would count as a second copy of the model while it loads.
"""

import itertools
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from lcjax.checkpoints.weights import TensorInfo, shard_files
from lcjax.errors import InputError
from lcjax.files import atomic_file
from lcjax.storage import read_range, to_path

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_CODES = {name: code for code, name in _NAMES.items()}
_QUANTISED = {"U8": "uint8", "F8_E4M3": "float8_e4m3fn"}  # dtypes of codes
_BITS = {  # bits of one number
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
_MAX_HEADER = 100_000_000  # bytes; the limit of the reference library
# Prefixes of files with adapters, or with another layout of the same weights.
_NOT_THE_MODEL = ("adapter_", "trainable_params", "consolidated")


class SafetensorsFolder:
    """The `*.safetensors` of a Hugging Face folder, or only `files`, as one source of tensors."""

    def __init__(self, folder: str | Path, files: Sequence[Path] | None = None):
        self.path = str(folder)
        self._places: dict[str, tuple[Path, int]] = {}  # file and offset of every tensor
        self.tensors: dict[str, TensorInfo] = {}
        folder = to_path(folder)
        if files is None:
            files = shard_files(folder, SINGLE, INDEX, _loose(folder))
        if not files:
            raise InputError(f"{self.path}: no *.safetensors file")
        for file in files:
            for name, info, offset in read_header(file):
                if name in self.tensors:
                    raise InputError(f"{self.path}: {name} is in two files; remove the stray one")
                self.tensors[name], self._places[name] = info, (file, offset)

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Returns rows `start:stop` of the leading axis."""
        info, (file, offset) = self.tensors[name], self._places[name]
        stored = _QUANTISED.get(info.dtype, info.dtype)
        dtype = np.dtype(getattr(ml_dtypes, stored, None) or stored)
        row = math.prod(info.shape[1:])
        count, skip = (stop - start) * row, offset + start * row * dtype.itemsize
        block = read_range(file, skip, count * dtype.itemsize).view(dtype)
        return block.reshape(stop - start, *info.shape[1:])


def has_weights(folder: Path) -> bool:
    return (folder / INDEX).is_file() or bool(_loose(folder))


def _loose(folder: Path) -> list[Path]:
    """Returns the weight files of a folder without an index."""
    files = sorted(folder.glob("*.safetensors"))
    return [file for file in files if not file.name.startswith(_NOT_THE_MODEL)]


def read_header(file: Path) -> list[tuple[str, TensorInfo, int]]:
    """Returns (name, shape and dtype, offset in the file) of every tensor of one file."""
    if not file.is_file():
        raise InputError(f"{file}: no such file, or no regular one; download it again")
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8:
            raise InputError(f"{file}: not a safetensors file, or truncated ({size} bytes)")
        if length > _MAX_HEADER:
            raise InputError(
                f"{file}: not a safetensors file: it announces a header of {length:,} bytes, and "
                f"the format allows {_MAX_HEADER:,}; download it again"
            )
        start = 8 + length
        if start > size:
            raise _truncated(file, size, start)
        text = stream.read(length)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        entries = [_entry(*item) for item in header.items()]
        in_file = sorted(entries, key=lambda entry: entry[2:])
        for (last, _, _, stop), (name, _, begin, _) in itertools.pairwise(in_file):
            if begin < stop:
                raise ValueError(f"{name} overlaps {last}")
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else error
        raise InputError(
            f"{file}: its safetensors header is damaged ({reason}); download it again"
        ) from error
    end = start + max((stop for *_, stop in entries), default=0)
    if size < end:
        raise _truncated(file, size, end)
    if size > end:
        raise InputError(f"{file}: {size - end} bytes more than its header says; replace it")
    return [(name, info, start + begin) for name, info, begin, _ in entries]


def _truncated(file: Path, size: int, required: int) -> InputError:
    return InputError(
        f"{file}: truncated: {size:,} bytes, but its header needs {required:,}; download it again"
    )


def _entry(name: str, entry: dict[str, Any]) -> tuple[str, TensorInfo, int, int]:
    """Returns (name, shape and dtype, begin, end) of an entry of the header."""
    code, shape = entry["dtype"], entry["shape"]
    begin, end = entry["data_offsets"]
    if not isinstance(code, str):
        raise ValueError(f"{name} has dtype {code!r}")
    if not isinstance(shape, list) or not all(map(_is_count, shape)):
        raise ValueError(f"{name} has shape {shape!r}")
    if not (_is_count(begin) and _is_count(end) and begin <= end):
        raise ValueError(f"{name} has data_offsets {[begin, end]!r}")
    if code in _BITS and 8 * (end - begin) != (bits := math.prod(shape) * _BITS[code]):
        raise ValueError(f"{name} has {end - begin} bytes, but {code} {shape} takes {bits // 8}")
    return name, TensorInfo(tuple(shape), _NAMES.get(code, code)), begin, end


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0  # a JSON true is no number


def write_file(
    file: Path, tensors: dict[str, TensorInfo], arrays: Iterable[tuple[str, np.ndarray]]
) -> None:
    """Writes one file, tensor by tensor in the order of `tensors`; atomic and synced to disk."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers requires it
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
    with atomic_file(file, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for (name, info), (array_name, array) in zip(tensors.items(), arrays, strict=True):
            if name != array_name or array.shape != info.shape or array.dtype.name != info.dtype:
                raise ValueError(f"{array_name} {array.dtype} {array.shape} is not {name} {info}")
            out.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def nbytes(info: TensorInfo) -> int:
    return math.prod(info.shape) * (4 if info.dtype == "float32" else 2)
