"""Reads the index of a GGUF file (llama.cpp's format, versions 2 and 3).

Layout: magic, version, two counts, key/value metadata, tensor index, padding, tensor data. Reading
it here instead of through `gguf.GGUFReader` takes tenths of a second instead of several for a
vocabulary of 50,000, and notices a truncated file before any tensor is read.
"""

import dataclasses
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np

from lcjax.errors import InputError

# struct formats of the scalar value types; 8 is a string, 9 an array
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One stored tensor; rows of quantised ones are bytes."""

    name: str
    shape: tuple[int, ...]  # row-major: the last axis is contiguous and the quantised one
    kind: str  # "F32", "Q4_K", ...
    data: np.ndarray  # uint8 [rows, bytes of a row], a view of the file


class _Cursor:
    def __init__(self, data: np.ndarray, position: int):
        self.data = data
        self.position = position

    def scalars(self, code: str, count: int = 1) -> tuple:
        form = f"<{count}{code}"
        found = struct.unpack_from(form, self.data, self.position)
        self.position += struct.calcsize(form)
        return found

    def string(self) -> str:
        (size,) = self.scalars("Q")
        start, stop = self.position, self.position + size
        if stop > len(self.data):
            raise EOFError
        self.position = stop
        return bytes(self.data[start:stop]).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            (item,), (count,) = self.scalars("I"), self.scalars("Q")
            if count > len(self.data):
                raise EOFError
            if item in _SCALARS:
                return list(self.scalars(_SCALARS[item], count))
            return [self.value(item) for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"value type {kind}")
        return self.scalars(_SCALARS[kind])[0]


def read_index(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(metadata, tensors) of a file; the tensors are views, nothing is copied."""
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    size = path.stat().st_size
    data = np.asarray(np.memmap(path, np.uint8, "r")) if size else np.empty(0, np.uint8)
    if bytes(data[:4]) != b"GGUF":
        raise InputError(
            f"{path}: not a GGUF file (it does not start with GGUF); of a Hugging Face model give "
            "the folder, not one of its files"
        )
    try:
        return _parse(path, data)
    except (struct.error, EOFError) as error:
        raise InputError(
            f"{path}: truncated: the file of {size:,} bytes ends before its index says so; "
            "download it again"
        ) from error
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: damaged GGUF index ({error}); download it again") from error


def _parse(path: Path, data: np.ndarray) -> tuple[dict[str, Any], dict[str, Tensor]]:
    cursor = _Cursor(data, 4)
    (version,) = cursor.scalars("I")
    if version not in (2, 3):
        raise ValueError(f"version {version}, readable are 2 and 3 in little-endian order")
    num_tensors, num_keys = cursor.scalars("Q", 2)
    metadata = {}
    for _ in range(num_keys):
        key = cursor.string()
        metadata[key] = cursor.value(*cursor.scalars("I"))
    index = []
    for _ in range(num_tensors):
        name = cursor.string()
        (rank,) = cursor.scalars("I")
        shape = cursor.scalars("Q", rank)[::-1]
        index.append((name, shape, *cursor.scalars("I"), *cursor.scalars("Q")))
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1:
        raise ValueError(f"general.alignment {alignment!r}")
    start = -(-cursor.position // alignment) * alignment
    return metadata, {row[0]: _tensor(path, data, start, *row) for row in index}


def _tensor(
    path: Path,
    data: np.ndarray,
    start: int,
    name: str,
    shape: tuple[int, ...],
    kind: int,
    offset: int,
) -> Tensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if kind not in set(GGMLQuantizationType):
        raise InputError(
            f"{path}: tensor {name} has quantisation type {kind}, which the installed package gguf "
            "does not know; upgrade gguf (pip install -U gguf), or use a file in F16, Q8_0 or Q4_K"
        )
    quantisation = GGMLQuantizationType(kind)
    block, block_bytes = GGML_QUANT_SIZES[quantisation]
    if not shape:
        raise ValueError(f"{name} has no axes")
    if shape[-1] % block:
        raise ValueError(f"{name} has rows of {shape[-1]}, no multiple of {block}")
    row_bytes = shape[-1] // block * block_bytes
    rows = math.prod(shape[:-1])
    begin = start + offset
    if begin + rows * row_bytes > len(data):
        raise EOFError
    stored = data[begin : begin + rows * row_bytes].reshape(rows, row_bytes)
    return Tensor(name, shape, quantisation.name, stored)
