"""Reads `pytorch_model.bin` without torch and without running untrusted code.

A torch checkpoint is a zip of raw storages and a pickle that describes the tensors in them. A
pickle can call any function by name. This reader interprets the pickle itself: it knows the few
operations and names that describe tensors, and raises an error for any other. Sizes and offsets of
the zip and the pickle are believed only as far as they lie inside the file.
"""

import math
import mmap
import pickletools
import struct
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from lcjax.checkpoints.weights import TensorInfo, shard_files
from lcjax.errors import InputError, one_line
from lcjax.storage import map_file, to_path

INDEX = "pytorch_model.bin.index.json"
SINGLE = "pytorch_model.bin"
_STORAGES = {
    "torch FloatStorage": np.dtype(np.float32),
    "torch HalfStorage": np.dtype(np.float16),
    "torch BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "torch DoubleStorage": np.dtype(np.float64),
    "torch LongStorage": np.dtype(np.int64),
    "torch IntStorage": np.dtype(np.int32),
    "torch ShortStorage": np.dtype(np.int16),
    "torch CharStorage": np.dtype(np.int8),
    "torch ByteStorage": np.dtype(np.uint8),
    "torch BoolStorage": np.dtype(np.bool_),
}
_TENSOR, _PARAMETER = "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter"
_DICT = "collections OrderedDict"
_NAMES = {*_STORAGES, _TENSOR, _PARAMETER, _DICT}
_VALUES = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_ARGUMENTS = {
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINUNICODE",
    "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES",
}  # fmt: skip
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_MAX_DIMS = 32


class _Refusal(Exception):
    """The pickle does something that no description of tensors needs."""


class _Global(NamedTuple):
    name: str  # module and name


class _Storage(NamedTuple):
    key: str
    dtype: np.dtype
    size: int


class _Tensor(NamedTuple):
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _Unpickler:
    """Interprets a pickle of tensors; values are never hashed, compared or printed."""

    def __init__(self):
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def load(self, pickled: bytes) -> Any:
        """Returns the pickled value: dictionaries, lists and tuples of `_Tensor` and plain data.

        Raises:
          _Refusal: an operation or name has nothing to do with tensors.
          ValueError, LookupError, TypeError, AttributeError: the pickle is damaged.
        """
        stack, memo = self._stack, self._memo
        for operation, argument, _ in pickletools.genops(pickled):
            match operation.name:
                case "PROTO" | "FRAME":
                    pass
                case "STOP":
                    return stack.pop()
                case "MARK":
                    self._marks.append(len(stack))
                case name if name in _ARGUMENTS:
                    stack.append(argument)
                case name if name in _VALUES:
                    stack.append(_VALUES[name])
                case "EMPTY_DICT":
                    stack.append({})
                case "EMPTY_LIST":
                    stack.append([])
                case "TUPLE":
                    stack.append(tuple(self._since_mark()))
                case name if name in _TUPLES:
                    stack.append(tuple(self._pop(_TUPLES[name])))
                case "BINPUT" | "LONG_BINPUT" | "MEMOIZE":
                    memo[len(memo) if argument is None else argument] = stack[-1]
                case "BINGET" | "LONG_BINGET":
                    stack.append(memo[argument])
                case "GLOBAL":
                    stack.append(_global(argument))
                case "STACK_GLOBAL":
                    stack.append(_global("{} {}".format(*map(_text, self._pop(2)))))
                case "BINPERSID":
                    stack.append(_storage(stack.pop()))
                case "REDUCE":
                    stack.append(_call(*self._pop(2)))
                case "APPEND" | "APPENDS":
                    items = self._pop(1) if operation.name == "APPEND" else self._since_mark()
                    _typed(stack[-1], list).extend(items)
                case "SETITEM" | "SETITEMS":
                    items = self._pop(2) if operation.name == "SETITEM" else self._since_mark()
                    _update(stack[-1], items[::2], items[1::2])
                case "BUILD":  # sets attributes, such as the _metadata of a state dict
                    _typed(stack[-2], dict), stack.pop()
                case name:
                    raise _Refusal(f"it has the operation {name}, which no tensor needs")
        raise ValueError("it does not end")

    def _pop(self, count: int) -> list[Any]:
        items = self._stack[-count:]
        if len(items) < count:
            raise IndexError("too few values")
        del self._stack[-count:]
        return items

    def _since_mark(self) -> list[Any]:
        start = self._marks.pop()
        items = self._stack[start:]
        del self._stack[start:]
        return items


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"a {type(value).__name__} instead of a {kind.__name__}")
    return value


def _text(value: Any) -> str:
    return _typed(value, str)


def _count(value: Any) -> int:
    if _typed(value, int) < 0:
        raise ValueError("a negative size, offset or stride")
    return value


def _update(target: Any, keys: Sequence[Any], values: Sequence[Any]) -> None:
    """Adds items to a dictionary; a key that is a container could take forever to hash."""
    for key, value in zip(keys, values, strict=True):
        if not isinstance(key, str | int | float | None):
            raise TypeError(f"a {type(key).__name__} as a key")
        _typed(target, dict)[key] = value


def _global(name: str) -> _Global:
    if name not in _NAMES:
        raise _Refusal(f"it calls {ascii(name.replace(' ', '.'))[1:-1]:.90}, which no tensor needs")
    return _Global(name)


def _storage(pid: Any) -> _Storage:
    kind, storage, key, _device, size = _typed(pid, tuple)
    if _text(kind) != "storage" or _typed(storage, _Global).name not in _STORAGES:
        raise _Refusal("it refers to something that is no storage")
    return _Storage(_text(key), _STORAGES[storage.name], _count(size))


def _call(function: Any, arguments: Any) -> Any:
    """Returns what torch's function of this name describes."""
    name, arguments = _typed(function, _Global).name, _typed(arguments, tuple)
    if name == _PARAMETER:
        return arguments[0]
    if name == _DICT:
        items: dict[Any, Any] = {}
        for pair in arguments[0] if arguments else ():
            _update(items, pair[:1], pair[1:])
        return items
    if name == _TENSOR:
        storage, offset, shape, stride = arguments[:4]
        shape, stride = (tuple(map(_count, _typed(sizes, tuple))) for sizes in (shape, stride))
        if len(shape) != len(stride) or len(shape) > _MAX_DIMS:
            raise ValueError(f"a tensor of {len(shape)} sizes and {len(stride)} strides")
        return _Tensor(_typed(storage, _Storage), _count(offset), shape, stride)
    raise _Refusal(f"it calls {name}")


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
        data = map_file(file)
        members = _members(data)
        (pickled,) = (name for name in members if name.endswith("/data.pkl"))
        root = pickled.removesuffix("/data.pkl")
        order = data[members.get(f"{root}/byteorder", slice(0))] or b"little"
        state = _Unpickler().load(data[members[pickled]])
    except InputError:
        raise
    except _Refusal as error:
        raise InputError(f"{file}: refused: {error}; do not open this file") from error
    except (zipfile.BadZipFile, ValueError, OSError, LookupError, TypeError) as error:
        raise InputError(
            f"{file}: not a torch checkpoint of version 1.6 or later, or damaged"
            f" ({one_line(error):.200}); download it again, or convert it to safetensors"
        ) from error
    if order.strip() != b"little" or not isinstance(state, dict):
        raise InputError(f"{file}: not a little-endian dictionary of tensors; use safetensors")
    return {
        name: _view(file, np.frombuffer(data, np.uint8), members, root, name, tensor)
        for name, tensor in state.items()
        if isinstance(tensor, _Tensor) and isinstance(name, str)
    }


def _members(data: mmap.mmap) -> dict[str, slice]:
    """Returns where the members of a zip are in the file, each in a place of its own.

    Raises:
      zipfile.BadZipFile, ValueError: there is no zip, or a member is compressed, encrypted or not
        where the directory says.
    """
    try:
        archive = zipfile.ZipFile(data)
    except (NotImplementedError, struct.error, OverflowError) as error:
        raise ValueError(one_line(error)) from None
    members: dict[str, slice] = {}
    end = 0
    for info in sorted(archive.infolist(), key=lambda info: info.header_offset):
        name = info.orig_filename.encode("utf-8" if info.flag_bits & 0x800 else "cp437")
        header = data[max(info.header_offset, 0) :][: 30 + len(name)]
        if info.header_offset < end or len(header) < 30 + len(name):
            raise ValueError(f"the places of its members overlap or lie outside ({name!r:.60})")
        signature, name_size, extra_size = struct.unpack_from("<4s22xHH", header)
        start = info.header_offset + 30 + name_size + extra_size
        end = start + info.file_size
        if (
            signature != b"PK\3\4"
            or header[30:] != name
            or name_size != len(name)
            or info.flag_bits & 1  # encrypted
            or info.compress_type != zipfile.ZIP_STORED
            or info.compress_size != info.file_size
            or end > archive.start_dir
            or info.filename in members
        ):
            raise ValueError(f"its member {name!r:.60} is damaged, compressed or there twice")
        if info.filename.endswith("/data.pkl") and zlib.crc32(data[start:end]) != info.CRC:
            raise ValueError(f"its member {name!r:.60} has another checksum")
        members[info.filename] = slice(start, end)
    return members


def _view(
    file: Path, data: np.ndarray, members: dict, root: str, name: str, tensor: _Tensor
) -> np.ndarray:
    storage, itemsize = tensor.storage, tensor.storage.dtype.itemsize
    member = members.get(f"{root}/data/{storage.key}", slice(0, -1))
    numbers = math.prod(max(n, 1) for n in tensor.shape)
    last = tensor.offset + sum(
        (n - 1) * s for n, s in zip(tensor.shape, tensor.stride, strict=True)
    )
    if (
        member.stop - member.start != storage.size * itemsize
        or tensor.offset > storage.size
        or numbers * itemsize > data.size  # strides of 0 may repeat numbers
        or (0 not in tensor.shape and last >= storage.size)
    ):
        raise InputError(
            f"{file}: {ascii(name)[1:-1]:.90} does not lie inside its storage; download it again"
        )
    if 0 in tensor.shape:
        return np.zeros(tensor.shape, storage.dtype)
    flat = data[member].view(storage.dtype)[tensor.offset :]
    steps = tuple(stride * itemsize for stride in tensor.stride)
    return np.lib.stride_tricks.as_strided(flat, tensor.shape, steps, writeable=False)
