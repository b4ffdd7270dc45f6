"""Finds the files of a source, and gives random access to plain, gzip and zstd content."""

import collections
import glob
import gzip
import hashlib
import itertools
import mmap
import os
import re
import struct
import sys
import sysconfig
import tempfile
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from lcjax.errors import InputError, import_package
from lcjax.files import package_path, read_json
from lcjax.storage import StorageError, URLPath, check_regular, read_range, to_path

TEXT = (".txt", ".md", ".py")  # one document per file
LINES = (".jsonl",)  # many documents per file
BINARY = (".parquet", ".arrow", ".array_record")  # many documents per file; never compressed
COMPRESSED = (".gz", ".zst")
READABLE = ", ".join(TEXT + LINES + BINARY) + " (text formats also as .gz and .zst)"

LARGEST_FRAME = 1 << 28  # bytes of an unpacked zstd frame; each thread holds one in memory

# Folders of tests hold deliberately broken files; site-packages is not the standard library.
_NOT_STDLIB = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
_FINGERPRINT_FILES = 32  # approximate number of files whose ends enter the fingerprint
_FINGERPRINT_BYTES = 1 << 12  # bytes at each end of such a file
_NUM_REQUESTS = 16  # requests to a store at the same time
_MAX_OPEN = 64  # files open at the same time; systems allow 256 to 1024 for a process
_CACHE_BYTES = 1 << 30  # unpacked zstd frames and Parquet row groups held in memory
_CHUNK = 1 << 24
_MAGIC = 0xFD2FB528
_SKIPPABLE = 0x184D2A50  # the last four bits are free
_CONTENT_SIZE = (0, 2, 4, 8)  # bytes of the field that holds the content size, by bits 6-7


def import_pyarrow(what: str) -> ModuleType:
    """Imports pyarrow, for Parquet, Arrow and zstd files; `what` names the file in the error."""
    for module in ("pyarrow", "pyarrow.parquet"):
        import_package(module, what, "parquet")
    return sys.modules["pyarrow"]


def kind(path: Path) -> str | None:
    """Returns the suffix, without compression, that selects the reader; None if unreadable."""
    suffix = path.suffix.lower()
    inner = Path(path.stem).suffix.lower() if suffix in COMPRESSED else suffix
    if inner in TEXT + LINES or (suffix not in COMPRESSED and inner in BINARY):
        return inner
    if suffix == ".arrayrecord":
        return ".array_record"
    return None


def find_files(source: str) -> list[tuple[str, Path]]:
    """Lists (name, path) of every readable file of a source, sorted by name.

    Names are relative to the source, so they are the same on every machine. They determine the
    validation split.

    Args:
      source: a file, a folder or a glob, each as a path or URL; `python:stdlib`, or
        `package:NAME[/folder or glob]`.

    Raises:
      InputError: the source does not exist or has no readable file.
    """
    if source == "python:stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        files = [f for f in _walk(root, skip=_NOT_STDLIB) if f.suffix == ".py"]
        return _with_names(files, root, source)
    if source.startswith("python:"):
        raise InputError(f"data.path={source} is not known: only python:stdlib is")
    if source.startswith("package:"):
        try:
            path = package_path(source)
        except InputError as error:
            raise InputError(f"data.path={error}") from None
        return _files_at(source, path)
    return _files_at(source, to_path(source))


def _files_at(source: str, path: Path) -> list[tuple[str, Path]]:
    if path.is_dir():
        return _with_names(_without_caches(source, path, _walk(path)), path, source)
    if path.is_file():
        return _with_names([path], path.parent, source)
    if isinstance(path, URLPath):
        return _with_names(*_glob_url(source, path), source)
    if not glob.has_magic(str(path)):
        check_regular(path)
        raise InputError(f"data.path={source} does not exist: give a file, a folder or a glob")
    root = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), path.parts))
    matches = map(Path, glob.glob(str(path), recursive=True))
    return _with_names([file for file in matches if not file.is_dir()], root, source)


def _glob_url(source: str, path: URLPath) -> tuple[list[URLPath], URLPath]:
    """Returns the files of a glob at a URL, and the folder above its first pattern."""
    if not glob.has_magic(str(path)):
        raise InputError(f"data.path={source} does not exist: give a file, a folder or a glob")
    root = path
    while glob.has_magic(str(root)):
        root = root.parent
    return _not_hidden(root.glob(path.relative_to(root).as_posix()), root), root


def _not_hidden(files: Iterable[URLPath], root: URLPath) -> list[URLPath]:
    hidden = re.compile(r"(^|/)(\.|__pycache__/)")
    return [file for file in files if not hidden.search(file.relative_to(root).as_posix())]


def _without_caches(source: str, root: Path, files: list[Path]) -> list[Path]:
    """Removes the caches that Hugging Face `datasets` keeps beside its data files."""
    if (root / "dataset_dict.json").is_file():
        splits = read_json(root / "dataset_dict.json").get("splits", [])
        raise InputError(
            f"data.path={source} holds the splits {', '.join(splits)} of a dataset: name one of"
            f" them, as {Path(source, *splits[:1])}"
        )
    data_files = {}
    for folder in {file.parent for file in files if file.suffix == ".arrow"}:
        state = folder / "state.json"
        if state.is_file():
            entries = read_json(state).get("_data_files", [])
            data_files[folder] = {entry["filename"] for entry in entries}
    return [
        file
        for file in files
        if file.suffix != ".arrow" or file.name in data_files.get(file.parent, {file.name})
    ]


def _walk(root: Path, skip: set[str] = frozenset()) -> list[Path]:
    if isinstance(root, URLPath):
        return _not_hidden(root.files(), root)
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [
            s for s in subfolders if s not in skip and s != "__pycache__" and s[0] != "."
        ]
        files += [Path(folder, name) for name in names if name[0] != "."]
    return files


def _with_names(files: list[Path], root: Path, source: str) -> list[tuple[str, Path]]:
    named = sorted((file.relative_to(root).as_posix(), file) for file in files if kind(file))
    if not named:
        raise InputError(f"data.path={source} has no readable file; readable are {READABLE}")
    for name, file in named:
        if not isinstance(file, URLPath) and not file.is_file():
            link = "a link to a file that does not exist" if file.is_symlink() else "no file"
            check_regular(file)
            raise InputError(
                f"data.path={source}: {name} is {link}; complete the download, or remove it"
            )
    return named


class FileList(list):
    """(name, path) of the files of a source, with their sizes and a fingerprint."""

    def __init__(self, files: list[tuple[str, Path]]):
        super().__init__(files)
        with ThreadPoolExecutor(_NUM_REQUESTS) as pool:  # `stat` of a URL is a request
            self.sizes = list(pool.map(lambda file: file[1].stat().st_size, files))
        self.size = sum(self.sizes)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the names and sizes of all files, and of the first and last bytes of some files.

        A hash of all bytes would read the whole corpus before the first batch.
        """
        digest = hashlib.blake2b(digest_size=8)
        for (name, _), size in zip(self, self.sizes, strict=True):
            digest.update(f"{name}\0{size}\0".encode(errors="surrogateescape"))
        step = max(1, len(self) // _FINGERPRINT_FILES)
        for _, path in self[::step]:
            size = path.stat().st_size
            part = min(size, _FINGERPRINT_BYTES)
            for start in (0, size - part):
                digest.update(read_range(path, start, part))
        return digest.hexdigest()


class LRUCache:
    """A cache of the last used values, up to a total size of `limit`, but at least one value.

    `functools.lru_cache` limits the number of values; this cache limits the sum of their sizes. A
    thread may still use an evicted value, whose resources are freed afterwards.
    """

    def __init__(self, limit: int, size: Callable[[Any], int] = lambda value: 1):
        self._limit, self._size, self._total = limit, size, 0
        self._values: OrderedDict[Hashable, Any] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Returns the value of `key`, and calls `make()` if it is missing."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        value = make()  # not under the lock, so that threads can unpack blocks in parallel
        with self._lock:
            if key not in self._values:
                self._values[key] = value
                self._total += self._size(value)
            self._values.move_to_end(key)
            while self._total > self._limit and len(self._values) > 1:
                self._total -= self._size(self._values.popitem(last=False)[1])
            return self._values[key]


class FileCache:
    """Open files and unpacked blocks, shared by the readers of one source.

    It limits the number of open files for sources of thousands of files. Files at a URL cannot be
    mapped, so they are copied to a temporary file; a request for each document would be slow.
    """

    def __init__(self):
        self.handles = LRUCache(_MAX_OPEN)
        self.blocks = LRUCache(_CACHE_BYTES, lambda block: block.nbytes)
        self._spool = None
        self._spool_map: mmap.mmap | None = None
        self._copies: dict[URLPath, tuple[int, int]] = {}  # (start, end) of files in the spool
        self._lock, self._copying = threading.Lock(), threading.Lock()

    def map(self, path: Path) -> mmap.mmap | memoryview:
        """Maps a non-empty file into memory; many threads can read the map at once."""
        if not isinstance(path, URLPath):
            return self.handles.get(path, lambda: _map(path))
        with self._copying:
            if path not in self._copies:
                collections.deque(self.copy(path), maxlen=0)
        return self._view_spool(*self._copies[path])

    def copy(self, path: URLPath) -> Iterator[bytes]:
        """Yields the bytes of a file in order, and copies them to the temporary file for `map`."""
        start = self.spool.seek(0, 2)
        for chunk in plain_chunks(path):
            self.spool.write(chunk)
            yield chunk
        self._copies[path] = start, self.spool.tell()

    @property
    def spool(self):
        """The temporary file for unpacked .gz files and copies of URLs; deleted when closed."""
        if self._spool is None:
            self._spool = tempfile.TemporaryFile(prefix="lcjax-")  # noqa: SIM115
        return self._spool

    def read_spool(self, start: int, end: int) -> bytes:
        return bytes(self._view_spool(start, end))

    def _view_spool(self, start: int, end: int) -> memoryview:
        with self._lock:
            if self._spool_map is None or len(self._spool_map) < end:
                self._spool.flush()
                self._spool_map = mmap.mmap(self._spool.fileno(), 0, access=mmap.ACCESS_READ)
            return memoryview(self._spool_map)[start:end]


class PlainContent:
    """Random access to the bytes of an uncompressed file."""

    def __init__(self, path: Path, cache: FileCache):
        self._path, self._cache = path, cache

    def chunks(self) -> Iterator[bytes]:
        """Yields all bytes in order, from which readers build their index."""
        is_url = isinstance(self._path, URLPath)
        return self._cache.copy(self._path) if is_url else plain_chunks(self._path)

    def read(self, start: int, end: int) -> bytes:
        return bytes(self._cache.map(self._path)[start:end])


class GzipContent(PlainContent):
    """Random access to a .gz file; `chunks` unpacks it into the temporary file for `read`."""

    _start = 0  # offset of this file in the temporary file

    def chunks(self) -> Iterator[bytes]:
        spool = self._cache.spool
        self._start = spool.seek(0, 2)
        for chunk in gzip_chunks(self._path):
            spool.write(chunk)
            yield chunk

    def read(self, start: int, end: int) -> bytes:
        return self._cache.read_spool(self._start + start, self._start + end)


class ZstdContent(PlainContent):
    """Random access to a .zst file; `read` unpacks only the frames that it needs.

    A zstd file is a sequence of frames (RFC 8878) that are compressed independently. A byte can be
    read only after all bytes before it in its frame. The ends of the frames follow from the headers
    alone. `chunks` must run once before `read`. Memory: 16 bytes per frame, and the last used
    frames, up to 1 GiB for all files of a source.
    """

    _bounds: np.ndarray  # int64 [frames, 2]: start and end of each frame in the file
    _ends: np.ndarray  # int64 [frames + 1]: frame ends in the unpacked content, after a first 0

    def chunks(self) -> Iterator[bytes]:
        self._bounds = np.array(self._find_frames(), np.int64).reshape(-1, 2)
        ends = [0]
        for index in range(len(self._bounds)):
            size = 0
            for chunk in self._stream(index):
                size += len(chunk)
                if size > LARGEST_FRAME:
                    raise self._too_large(index)
                yield chunk
            ends.append(ends[-1] + size)
        self._ends = np.array(ends, np.int64)

    def read(self, start: int, end: int) -> bytes:
        first = int(np.searchsorted(self._ends, start, side="right")) - 1
        last = int(np.searchsorted(self._ends, end, side="left"))
        pieces = []
        for index in range(first, last):
            block = self._cache.blocks.get(
                (self._path, index), lambda index=index: memoryview(self.unpack(index))
            )
            offset = int(self._ends[index])
            pieces.append(block[max(start - offset, 0) : end - offset])
        return b"".join(pieces)

    def unpack(self, index: int) -> bytes:
        """Returns the content of one frame."""
        return b"".join(self._stream(index))

    def _find_frames(self) -> list[tuple[int, int]]:
        if self._path.stat().st_size == 0:
            return []
        try:
            return frame_bounds(self._cache.map(self._path))
        except StorageError:
            raise
        except (struct.error, IndexError, ValueError) as error:
            reason = error if type(error) is ValueError else "it ends inside a frame"
            raise InputError(f"{self._path} is damaged or cut short: {reason}") from None

    def _stream(self, index: int) -> Iterator[bytes]:
        start, end = self._bounds[index].tolist()
        frame = memoryview(self._cache.map(self._path))[start:end]
        pyarrow = import_pyarrow(f"{self._path} (zstd)")
        try:
            buffer = pyarrow.BufferReader(pyarrow.py_buffer(frame))
            with pyarrow.CompressedInputStream(buffer, "zstd") as stream:
                while chunk := stream.read(_CHUNK):
                    yield chunk
        except (pyarrow.ArrowException, OSError) as error:
            raise InputError(f"{self._path} is damaged at byte {start}: {error}") from None

    def _too_large(self, index: int) -> InputError:
        name = self._path.name
        return InputError(
            f"{self._path}: the zstd frame at byte {self._bounds[index][0]} unpacks to more than"
            f" {LARGEST_FRAME >> 20} MiB, and a frame can only be read from its start: write"
            f" smaller frames (`zstd -dc {name} | split -C 64M --filter=zstd - > new.jsonl.zst`) or"
            " unpack it"
        )


def frame_bounds(data: bytes) -> list[tuple[int, int]]:
    """Returns (start, end) of all zstd frames with content, from the sizes in the headers."""
    bounds, start = [], 0
    while start < len(data):
        (magic,) = struct.unpack_from("<I", data, start)
        if magic & ~0xF == _SKIPPABLE:
            (size,) = struct.unpack_from("<I", data, start + 4)
            end = start + 8 + size
        elif magic == _MAGIC:
            end = _frame_end(data, start)
            bounds.append((start, end))
        else:
            raise ValueError(f"no zstd frame begins at byte {start}")
        if end > len(data):
            raise ValueError(f"the frame at byte {start} exceeds the end of the file")
        start = end
    return bounds


def _frame_end(data: bytes, start: int) -> int:
    descriptor = data[start + 4]
    single, checksum = descriptor >> 5 & 1, descriptor >> 2 & 1
    if descriptor & 3:
        raise ValueError(f"the frame at byte {start} needs a dictionary; unpack it first")
    size = _CONTENT_SIZE[descriptor >> 6] or single
    offset = start + 5 + (not single) + size
    is_last = False
    while not is_last:
        header = data[offset] | data[offset + 1] << 8 | data[offset + 2] << 16
        is_last, is_run = header & 1, header >> 1 & 3 == 1
        offset += 3 + (1 if is_run else header >> 3)  # a run stores the byte that it repeats
    return offset + 4 * checksum


def content(path: Path, cache: FileCache) -> PlainContent:
    """Returns the uncompressed content of a file, by its suffix."""
    classes = {".gz": GzipContent, ".zst": ZstdContent}
    return classes.get(path.suffix.lower(), PlainContent)(path, cache)


def plain_chunks(path: Path) -> Iterator[bytes]:
    """Yields the bytes of a file in order."""
    with open_file(path) as file:
        while chunk := file.read(_CHUNK):
            yield chunk


def gzip_chunks(path: Path) -> Iterator[bytes]:
    """Yields the unpacked bytes of a .gz file in order."""
    with open_file(path) as raw:
        stream = gzip.GzipFile(fileobj=raw)
        try:
            while chunk := stream.read(_CHUNK):
                yield chunk
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise InputError(f"{path} is damaged or cut short: {error}") from None


def open_file(path: Path):
    """Opens a file for reading bytes; raises an `InputError` if this fails."""
    check_regular(path)
    try:
        return path.open("rb")
    except InputError:  # raised by a remote store
        raise
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None


def _map(path: Path) -> mmap.mmap:
    with open_file(path) as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
