"""The files of a source, and random access to the bytes of plain, gzip and zstd files."""

import glob
import gzip
import hashlib
import importlib.util
import json
import mmap
import os
import struct
import sysconfig
import tempfile
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lcjax.errors import InputError

TEXT = (".txt", ".md", ".py")  # one document per file
LINES = (".jsonl",)  # many documents per file
BINARY = (".parquet", ".arrow", ".array_record")  # the same, and never packed again
PACKED = (".gz", ".zst")
READABLE = ", ".join(TEXT + LINES + BINARY) + " (also .gz, .zst behind the text ones)"

# Tests hold files that are broken on purpose; site-packages is not the standard library.
_NOT_STDLIB = {"test", "tests", "idle_test", "site-packages", "dist-packages"}


def kind(path: Path) -> str | None:
    """The suffix that decides how a file is read, compression taken off; None: not readable."""
    suffix = path.suffix.lower()
    inner = Path(path.stem).suffix.lower() if suffix in PACKED else suffix
    if inner in TEXT + LINES or (suffix not in PACKED and inner in BINARY):
        return inner
    if suffix == ".arrayrecord":
        return ".array_record"
    return None


def find_files(path: str) -> list[tuple[str, Path]]:
    """Name and place of every file of a source, in the order of the names.

    Names are relative to the source, so that they, and with them the validation split, are the
    same on every machine.
    """
    if path == "python:stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        files = [f for f in _walk(root, skip=_NOT_STDLIB) if f.suffix == ".py"]
        return _named(files, root, path)
    if path.startswith("python:"):
        raise InputError(f"data.path={path} is not known: only python:stdlib is")
    if path.startswith("package:"):
        return _package_files(path)
    return _plain_files(path, Path(path).expanduser())


def _plain_files(given: str, path: Path) -> list[tuple[str, Path]]:
    if path.is_dir():
        return _named(_datasets_files(given, path, _walk(path)), path, given)
    if path.is_file():
        return _named([path], path.parent, given)
    if not glob.has_magic(str(path)):
        raise InputError(f"data.path={given} does not exist: give a file, a folder or a glob")
    fixed = []
    for part in path.parts:
        if glob.has_magic(part):
            break
        fixed.append(part)
    found = [Path(f) for f in glob.glob(str(path), recursive=True)]
    return _named([f for f in found if f.is_file()], Path(*fixed), given)


def _datasets_files(given: str, root: Path, files: list[Path]) -> list[Path]:
    """The files without those that Hugging Face `datasets` keeps beside the data of its folders."""
    if (root / "dataset_dict.json").is_file():
        splits = json.loads((root / "dataset_dict.json").read_text()).get("splits", [])
        raise InputError(
            f"data.path={given} holds the splits {', '.join(splits)} of a dataset: name one of"
            f" them, as {Path(given, *splits[:1])}"
        )
    saved = {}
    for folder in {file.parent for file in files if file.suffix == ".arrow"}:
        state = folder / "state.json"
        if state.is_file():
            listed = json.loads(state.read_text()).get("_data_files", [])
            saved[folder] = {entry["filename"] for entry in listed}
    return [f for f in files if f.suffix != ".arrow" or f.name in saved.get(f.parent, {f.name})]


def _package_files(given: str) -> list[tuple[str, Path]]:
    """Files in an installed package; finding it does not run any of its code."""
    name, _, inside = given.removeprefix("package:").partition("/")
    module = name.replace("-", "_")
    # find_spec of a dotted name would import the parent package.
    spec = importlib.util.find_spec(module) if module.isidentifier() else None
    if spec is None or not (spec.submodule_search_locations or spec.has_location):
        raise InputError(
            f"data.path={given}: no package {name!r} is installed here; try `pip install {name}`"
        )
    roots = spec.submodule_search_locations or [spec.origin]
    root = Path(next(iter(roots)))
    return _plain_files(given, root / inside if inside else root)


def _walk(root: Path, skip: set[str] = frozenset()) -> list[Path]:
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [
            s for s in subfolders if s not in skip and s != "__pycache__" and s[0] != "."
        ]
        files += [Path(folder, name) for name in names if name[0] != "."]
    return files


def _named(files: list[Path], root: Path, given: str) -> list[tuple[str, Path]]:
    found = sorted((f.relative_to(root).as_posix(), f) for f in files if kind(f))
    if not found:
        raise InputError(f"data.path={given} has no file that can be read; these can: {READABLE}")
    return found


_LOOKED_AT = 32  # files whose first and last bytes tell whether a corpus is still the same
_ENDS = 1 << 12  # bytes at either end of them
_OPEN = 64  # files open at the same time; systems allow 256 to 1024 for a process
_KEPT = 1 << 30  # bytes of unpacked zstd frames and Parquet row groups held in memory
_CHUNK = 1 << 24


class FoundFiles(list):
    """(name, path) of the files of a source, and what tells whether they are still the same."""

    def __init__(self, found: list[tuple[str, Path]]):
        super().__init__(found)
        self.sizes = [path.stat().st_size for _, path in found]
        self.size = sum(self.sizes)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the names and sizes of all files, and of the ends of some of them.

        Not of all bytes: that would read the whole corpus before the first batch.
        """
        digest = hashlib.blake2b(digest_size=8)
        for (name, _), size in zip(self, self.sizes, strict=True):
            digest.update(f"{name}\0{size}\0".encode())
        step = max(1, len(self) // _LOOKED_AT)
        for _, path in self[::step]:
            with open(path, "rb") as file:
                digest.update(file.read(_ENDS))
                file.seek(max(0, path.stat().st_size - _ENDS))
                digest.update(file.read(_ENDS))
        return digest.hexdigest()


class Recent:
    """The values asked for last: as many as fit `limit`, one at least.

    A value that is dropped lives on while a thread still reads it, and then frees what it holds.
    """

    def __init__(self, limit: int, size: Callable[[Any], int] = lambda value: 1):
        self._limit, self._size, self._total = limit, size, 0
        self._values: OrderedDict[Hashable, Any] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        made = make()  # not under the lock: threads unpack different blocks at the same time
        with self._lock:
            if key not in self._values:
                self._values[key] = made
                self._total += self._size(made)
            self._values.move_to_end(key)
            while self._total > self._limit and len(self._values) > 1:
                self._total -= self._size(self._values.popitem(last=False)[1])
            return self._values[key]


class Files:
    """What the readers of one source share, so that thousands of files need no more than a few."""

    def __init__(self):
        self.opened = Recent(_OPEN)
        self.blocks = Recent(_KEPT, lambda block: block.nbytes)
        self._spool = None
        self._spool_map: mmap.mmap | None = None
        self._lock = threading.Lock()

    def map(self, path: Path) -> mmap.mmap:
        """The content of a file that is not empty; many threads can read it at once."""
        return self.opened.get(path, lambda: _map(path))

    @property
    def spool(self):
        """One temporary file, gone when closed: the plain content of all .gz files."""
        if self._spool is None:
            self._spool = tempfile.TemporaryFile(prefix="lcjax-")  # noqa: SIM115
        return self._spool

    def spooled(self, start: int, end: int) -> bytes:
        with self._lock:
            if self._spool_map is None or len(self._spool_map) < end:
                self._spool.flush()
                self._spool_map = mmap.mmap(self._spool.fileno(), 0, access=mmap.ACCESS_READ)
            return self._spool_map[start:end]


class Plain:
    """A file as it is."""

    def __init__(self, path: Path, files: Files):
        self._path, self._files = path, files

    def chunks(self) -> Iterator[bytes]:
        """All of it once, in order: what an index is made from."""
        with open_file(self._path) as file:
            while chunk := file.read(_CHUNK):
                yield chunk

    def read(self, start: int, end: int) -> bytes:
        return self._files.map(self._path)[start:end]


class Gzip:
    """A .gz file, which has no random access: `chunks` also unpacks it to a temporary file."""

    def __init__(self, path: Path, files: Files):
        self._path, self._files, self._start = path, files, 0

    def chunks(self) -> Iterator[bytes]:
        spool = self._files.spool
        self._start = spool.seek(0, 2)
        for chunk in gzip_chunks(self._path):
            spool.write(chunk)
            yield chunk

    def read(self, start: int, end: int) -> bytes:
        return self._files.spooled(self._start + start, self._start + end)


class Zstd:
    """A .zst file, read by its frames: the one or two that hold a document are unpacked for it.

    Memory: 16 bytes a frame, and the frames read last, up to 1 GiB for all files of a source.
    """

    def __init__(self, path: Path, files: Files):
        self._path, self._files = path, files
        self._frames = Frames(path, self._map)

    def chunks(self) -> Iterator[bytes]:
        return self._frames.chunks()

    def read(self, start: int, end: int) -> bytes:
        pieces = []
        for index in self._frames.covering(start, end):
            block = self._files.blocks.get(
                (self._path, index), lambda index=index: memoryview(self._frames.unpack(index))
            )
            at = self._frames.start(index)
            pieces.append(block[max(start - at, 0) : end - at])
        return b"".join(pieces)

    def _map(self):
        return self._files.map(self._path)


def content(path: Path, files: Files) -> Plain | Gzip | Zstd:
    """The plain bytes of a file, whatever packs it."""
    return {".gz": Gzip, ".zst": Zstd}.get(path.suffix.lower(), Plain)(path, files)


def gzip_chunks(path: Path) -> Iterator[bytes]:
    with open_file(path) as raw:
        stream = gzip.GzipFile(fileobj=raw)
        try:
            while chunk := stream.read(_CHUNK):
                yield chunk
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise InputError(f"{path} is damaged or cut short: {error}") from None


def open_file(path: Path):
    try:
        return open(path, "rb")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None


def _map(path: Path) -> mmap.mmap:
    with open_file(path) as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


LARGEST = 1 << 28  # bytes of an unpacked frame: several are held in memory, one per thread made
_MAGIC = 0xFD2FB528
_SKIPPABLE = 0x184D2A50  # the last four bits are free
_CONTENT = (0, 2, 4, 8)  # bytes of the content size, by bits 6-7


class Frames:
    """The frames of one file; `chunks` has to be run through once before the others are used."""

    def __init__(self, path: Path, data: Callable[[], bytes]):
        """`data` gives the packed bytes: a map of the file, asked for whenever it is read."""
        self._path, self._data = path, data
        self._ends = np.zeros(1, np.int64)  # in the unpacked content, behind a first 0
        self._bounds = np.zeros((0, 2), np.int64)  # in the file

    def chunks(self) -> Iterator[bytes]:
        """All of the content once, in order."""
        self._bounds = np.array(self._find(), np.int64).reshape(-1, 2)
        ends = [0]
        for index in range(len(self._bounds)):
            size = 0
            for chunk in self._stream(index):
                size += len(chunk)
                if size > LARGEST:
                    raise self._too_large(index)
                yield chunk
            ends.append(ends[-1] + size)
        self._ends = np.array(ends, np.int64)

    def covering(self, start: int, end: int) -> range:
        """Indices of the frames that hold the bytes `start` ... `end` of the content."""
        first = int(np.searchsorted(self._ends, start, side="right")) - 1
        return range(first, int(np.searchsorted(self._ends, end, side="left")))

    def start(self, index: int) -> int:
        return int(self._ends[index])

    def unpack(self, index: int) -> bytes:
        return b"".join(self._stream(index))

    def _find(self) -> list[tuple[int, int]]:
        if self._path.stat().st_size == 0:
            return []
        try:
            return frame_bounds(self._data())
        except (struct.error, IndexError, ValueError) as error:
            why = error if type(error) is ValueError else "it ends inside a frame"
            raise InputError(f"{self._path} is damaged or cut short: {why}") from None

    def _stream(self, index: int) -> Iterator[bytes]:
        pyarrow = _pyarrow()
        start, end = self._bounds[index].tolist()
        packed = pyarrow.BufferReader(pyarrow.py_buffer(memoryview(self._data())[start:end]))
        try:
            with pyarrow.CompressedInputStream(packed, "zstd") as stream:
                while chunk := stream.read(_CHUNK):
                    yield chunk
        except (pyarrow.ArrowException, OSError) as error:
            raise InputError(f"{self._path} is damaged at byte {start}: {error}") from None

    def _too_large(self, index: int) -> InputError:
        name = self._path.name
        return InputError(
            f"{self._path}: the zstd frame at byte {self._bounds[index][0]} unpacks to more than"
            f" {LARGEST >> 20} MiB and could only be read from its start: write smaller frames"
            f" (`zstd -dc {name} | split -C 64M --filter=zstd - > new.jsonl.zst`) or unpack it"
        )


def frame_bounds(data: bytes) -> list[tuple[int, int]]:
    """(start, end) of all frames with content, from the sizes in the headers."""
    bounds, at = [], 0
    while at < len(data):
        (magic,) = struct.unpack_from("<I", data, at)
        if magic & ~0xF == _SKIPPABLE:
            (size,) = struct.unpack_from("<I", data, at + 4)
            end = at + 8 + size
        elif magic == _MAGIC:
            end = _frame_end(data, at)
            bounds.append((at, end))
        else:
            raise ValueError(f"no zstd frame begins at byte {at}")
        if end > len(data):
            raise ValueError(f"the frame at byte {at} goes on after the end of the file")
        at = end
    return bounds


def _frame_end(data: bytes, start: int) -> int:
    descriptor = data[start + 4]
    single, checksum = descriptor >> 5 & 1, descriptor >> 2 & 1
    if descriptor & 3:
        raise ValueError(f"the frame at byte {start} needs a dictionary; unpack it first")
    size = _CONTENT[descriptor >> 6] or single
    at = start + 5 + (not single) + size
    last = False
    while not last:
        header = data[at] | data[at + 1] << 8 | data[at + 2] << 16
        last, run = header & 1, header >> 1 & 3 == 1
        at += 3 + (1 if run else header >> 3)  # a run is one byte to be repeated
    return at + 4 * checksum


def _pyarrow():
    try:
        import pyarrow
    except ImportError:
        raise InputError(
            "reading .zst files needs `pip install pyarrow`; .gz needs nothing"
        ) from None
    return pyarrow
