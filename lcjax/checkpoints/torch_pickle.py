"""Reads `pytorch_model.bin` without torch and without running untrusted code.

A torch checkpoint is a zip of raw storages and a pickle that describes the tensors in them. A
pickle can call any function by name. This reader allows a few names, which only describe tensors,
and raises an error for any other name.
"""

import collections
import math
import pickle
import struct
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from lcjax.checkpoints.weights import TensorInfo, shard_files
from lcjax.errors import InputError
from lcjax.storage import map_file, to_path

INDEX = "pytorch_model.bin.index.json"
SINGLE = "pytorch_model.bin"
_STORAGES = {
    "FloatStorage": np.dtype(np.float32),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "DoubleStorage": np.dtype(np.float64),
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "ShortStorage": np.dtype(np.int16),
    "CharStorage": np.dtype(np.int8),
    "ByteStorage": np.dtype(np.uint8),
    "BoolStorage": np.dtype(np.bool_),
}


class _StorageType(NamedTuple):
    name: str


class _Storage(NamedTuple):
    key: str
    dtype: np.dtype
    size: int


class _Tensor(NamedTuple):
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


# The replacements of torch's functions are immutable, because a pickle may also set attributes.
class _RebuildTensor:
    """Replaces torch._utils._rebuild_tensor_v2."""

    __slots__ = ()

    def __call__(self, storage, offset, shape, stride, *_unused: Any) -> _Tensor:
        if not isinstance(storage, _Storage):
            raise pickle.UnpicklingError("it has a tensor without a storage")
        return _Tensor(storage, int(offset), tuple(map(int, shape)), tuple(map(int, stride)))


class _RebuildParameter:
    """Replaces torch._utils._rebuild_parameter."""

    __slots__ = ()

    def __call__(self, data: Any, *_unused: Any) -> Any:
        return data


_ALLOWED = {
    ("torch._utils", "_rebuild_tensor_v2"): _RebuildTensor(),
    ("torch._utils", "_rebuild_parameter"): _RebuildParameter(),
    ("collections", "OrderedDict"): collections.OrderedDict,
} | {("torch", name): _StorageType(name) for name in _STORAGES}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it calls {module}.{name}, which no tensor needs")
        return _ALLOWED[module, name]

    def persistent_load(self, pid: Any) -> _Storage:
        kind, storage, key, _device, size = pid
        if kind != "storage" or not isinstance(storage, _StorageType):
            raise pickle.UnpicklingError(f"it refers to {kind!r}")
        return _Storage(str(key), _STORAGES[storage.name], int(size))


class TorchFolder:
    """The `pytorch_model*.bin` of a Hugging Face folder, or `files`, as one source of tensors."""

    def __init__(self, folder: str | Path, files: Sequence[Path] | None = None):
        self.path = str(folder)
        self._arrays: dict[str, np.ndarray] = {}
        for file in bin_files(to_path(folder)) if files is None else files:
            arrays = _read(file)
            if twice := self._arrays.keys() & arrays.keys():
                name = min(twice)
                raise InputError(f"{self.path}: {name} is in two files; remove the stray one")
            self._arrays |= arrays
        self.tensors = {n: TensorInfo(a.shape, a.dtype.name) for n, a in self._arrays.items()}

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        return self._arrays[name][start:stop]


def bin_files(folder: Path) -> list[Path]:
    """Returns the pickled weight files of a folder; empty if there are none."""
    return shard_files(folder, SINGLE, INDEX, sorted(folder.glob("pytorch_model*.bin")))


def pickle_error(where: str, names: list[str]) -> InputError:
    """Returns the error for pickles that are not allowed, with the reason and ways out."""
    return InputError(
        f"{where}: its weights are pickles ({', '.join(names[:3])}), which can run any code when "
        "opened; convert them where you trust them (transformers: AutoModelForCausalLM"
        ".from_pretrained(X).save_pretrained(Y) writes safetensors), or run python -m "
        "lcjax.convert SRC DST --allow-pickle, whose reader refuses everything but tensors, and "
        "use DST"
    )


def _read(file: Path) -> dict[str, np.ndarray]:
    """Returns tensors by name, as views of the mapped file."""
    try:
        with file.open("rb") as data, zipfile.ZipFile(data) as archive:
            members = {info.filename: info for info in archive.infolist()}
            (root,) = {n.rpartition("/")[0] for n in members if n.endswith("/data.pkl")}
            order = (
                archive.read(f"{root}/byteorder") if f"{root}/byteorder" in members else b"little"
            )
            with archive.open(f"{root}/data.pkl") as stream:
                state = _Unpickler(stream).load()
    except (zipfile.BadZipFile, ValueError, EOFError, OSError) as error:
        raise InputError(
            f"{file}: not a torch checkpoint of version 1.6 or later, or truncated ({error}); "
            "download it again, or convert it to safetensors"
        ) from error
    except (pickle.UnpicklingError, TypeError, AttributeError, LookupError) as error:
        raise InputError(f"{file}: refused: {error}; do not open this file") from error
    if order.strip() != b"little" or not isinstance(state, dict):
        raise InputError(f"{file}: not a little-endian dictionary of tensors; use safetensors")
    data = np.frombuffer(map_file(file), np.uint8)
    return {
        str(name): _view(file, data, members, root, name, tensor)
        for name, tensor in state.items()
        if isinstance(tensor, _Tensor)
    }


def _view(
    file: Path, data: np.ndarray, members: dict, root: str, name: str, tensor: _Tensor
) -> np.ndarray:
    storage = tensor.storage
    member = members.get(f"{root}/data/{storage.key}")
    last = tensor.offset + sum(
        (n - 1) * s for n, s in zip(tensor.shape, tensor.stride, strict=True)
    )
    is_inside = (
        member is not None
        and member.compress_type == zipfile.ZIP_STORED
        and member.file_size >= storage.size * storage.dtype.itemsize
        and min((tensor.offset, *tensor.shape, *tensor.stride), default=0) >= 0
        and (math.prod(tensor.shape) == 0 or last < storage.size)
    )
    if not is_inside:
        raise InputError(f"{file}: {name} does not lie inside its storage; download it again")
    start = _data_start(data, member.header_offset)
    size = storage.size * storage.dtype.itemsize
    flat = data[start : start + size].view(storage.dtype)
    steps = tuple(s * storage.dtype.itemsize for s in tensor.stride)
    return np.lib.stride_tricks.as_strided(
        flat[tensor.offset :], tensor.shape, steps, writeable=False
    )


def _data_start(data: np.ndarray, header: int) -> int:
    """Returns the offset of a zip member's data, after its local header's name and extra field."""
    name, extra = struct.unpack("<HH", bytes(data[header + 26 : header + 30]))
    return header + 30 + name + extra
