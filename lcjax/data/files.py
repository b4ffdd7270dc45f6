"""Bytes of plain, gzip and zstd files at any place, with few of the files open at the same time."""

import gzip
import mmap
import tempfile
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any

from lcjax.data import zstd
from lcjax.errors import InputError

_OPEN = 64  # files open at the same time; systems allow 256 to 1024 for a process
_KEPT = 1 << 30  # bytes of unpacked zstd frames and Parquet row groups held in memory
_CHUNK = 1 << 24


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
        self._frames = zstd.Frames(path, self._map)

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
