"""Paths that users name: on local disks, or as URLs of object stores and servers.

`to_path` returns a `pathlib.Path`, or a `URLPath` for `gs://`, `s3://`, `https://` and every other
scheme of fsspec. A `URLPath` has those methods of `pathlib.Path` that this library calls, so most
code does not tell the two apart. They differ in this:

- A file appears whole when the `with` block of its `open` ends without an error, since a put is
  atomic in object stores. There is no rename, append, lock or memory map.
- A folder exists as long as there is a file in it.
- All errors but a missing file are a `StorageError`. fsspec's own `exists` takes a failed
  connection for a missing file, with which a run would start again from nothing.

What must be mapped into memory is copied into an anonymous temporary file, whose space the system
frees when the process ends, however it ends. What other libraries write goes through a `Staging`.
"""

import concurrent.futures
import contextlib
import errno
import fnmatch
import glob
import hashlib
import io
import mmap
import os
import re
import shutil
import socket
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import fsspec
import numpy as np
from upath.extensions import ProxyUPath

from lcjax.errors import InputError, install_command

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
# Stores without folders, whose listings fsspec would cache; their `mkdir` makes buckets.
_OBJECT_STORES = frozenset(
    ("gs", "gcs", "s3", "s3a", "az", "abfs", "abfss", "oci", "oss", "hf", "memory")
)
_WEB = ("http", "https")
_EXTRAS = {"gs": "gs", "gcs": "gs", "s3": "s3", "s3a": "s3", **dict.fromkeys(_WEB, "http")}
_LOGIN = {
    **dict.fromkeys(("gs", "gcs"), "`gcloud auth application-default login`"),
    **dict.fromkeys(("s3", "s3a"), "`aws configure`, or AWS_ACCESS_KEY_ID with its secret"),
}
_DENIED = re.compile("credential|denied|forbidden|unauthorized|anonymous|40[13]", re.IGNORECASE)
_CHUNK = 1 << 24  # bytes of a range that is read at once
_PUT_EVERY = 30.0  # seconds between two puts of a file to which lines are appended
_BUFFER = 1 << 22  # bytes that an open file reads at least
_PREFIX = "lcjax-staging-"  # of temporary folders; machine and number of the process follow


class StorageError(InputError, OSError):
    """A store did not answer, or refused; the message names the URL."""


def is_storage_failure(error: BaseException | None) -> bool:
    """Whether an error is a StorageError, or was raised from one or while one was handled."""
    while error is not None and not isinstance(error, StorageError):
        error = error.__cause__ or error.__context__
    return error is not None


def to_path(name: "str | os.PathLike | URLPath") -> "Path | URLPath":
    """Returns the path of a name: a `URLPath` for a URL, else a `pathlib.Path`.

    Raises:
      InputError: no installed package reads URLs of this scheme.
    """
    if isinstance(name, URLPath):
        return name
    match = _URL.match(str(name))
    if match is None:
        return Path(name)
    scheme = match[1].lower()
    if scheme in ("file", "local"):
        return Path(str(name)[match.end() :])
    try:
        fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        extra = _EXTRAS.get(scheme)
        way_out = install_command(extra) if extra else str(error)
        raise InputError(f"{name}: {scheme}:// needs a package: {way_out}") from None
    except ValueError:
        raise InputError(
            f"{name}: {scheme}:// is unknown; give a local path, or gs://, s3://, https:// or"
            " another scheme of fsspec"
        ) from None
    options = {"use_listings_cache": False} if scheme in _OBJECT_STORES else {}
    return URLPath(str(name).rstrip("/"), **options)


def is_url(name: Any) -> bool:
    return isinstance(to_path(name), URLPath)


def local_path(key: str, name: str | os.PathLike, reason: str) -> Path:
    """Returns the path of a name, and raises an InputError for a URL, which `reason` excludes."""
    path = to_path(name)
    if isinstance(path, URLPath):
        raise InputError(f"{key}={name} must be a local path: {reason}")
    return path


class URLPath(ProxyUPath):
    """A file or folder at a URL; see the top of this module."""

    @property
    def _is_web(self) -> bool:
        return self.protocol in _WEB

    @contextlib.contextmanager
    def _errors(self, *, is_write: bool = False) -> Iterator[None]:
        try:
            yield
        except (FileExistsError, NotADirectoryError, InputError):
            raise
        except Exception as error:  # packages raise classes of their own
            if isinstance(error, FileNotFoundError) and not is_write:
                raise
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            if isinstance(error, FileNotFoundError):
                reason = f"there is no such bucket or folder ({reason})"
            if isinstance(error, NotImplementedError):
                reason = f"{self.protocol}:// cannot do this"
            login = _LOGIN.get(self.protocol)
            is_denied = _DENIED.search(f"{type(error).__name__} {reason}") is not None
            way_out = f"; log in ({login}), or name another" * (is_denied and login is not None)
            raise StorageError(f"{self}: {reason}{way_out}") from error

    def _info(self) -> dict[str, Any] | None:
        """What the store says of this file or folder; None if there is none."""
        with self._errors():
            try:
                info = self.fs.info(self.path)
            except (FileNotFoundError, NotADirectoryError) as error:
                # For the web fsspec says "not found" of any failure, from which it raises.
                cause = error.__cause__
                if cause is None or isinstance(cause, FileNotFoundError):
                    return None
                if getattr(cause, "status", None) in (404, 410):
                    return None
                raise cause from None
        # Web servers have no folders; an index page lists files.
        is_page = self._is_web and "html" in (info.get("mimetype") or "")
        if is_page and self.suffix not in (".html", ".htm"):
            return {**info, "type": "directory"}
        return info

    def exists(self, **_: Any) -> bool:
        return self._info() is not None

    def is_file(self, **_: Any) -> bool:
        return (self._info() or {}).get("type") == "file"

    def is_dir(self, **_: Any) -> bool:
        return (self._info() or {}).get("type") == "directory"

    def is_symlink(self) -> bool:
        return False

    def stat(self, **_: Any) -> SimpleNamespace:
        """`st_size` alone; `modified` is a request of its own."""
        info = self._info()
        if info is None:
            raise FileNotFoundError(errno.ENOENT, "no such file", str(self))
        if info.get("size") is None:
            raise StorageError(f"{self}: the server does not say its size; download the file")
        return SimpleNamespace(st_size=int(info["size"]))

    def modified(self) -> float:
        """Returns when the file was written, in seconds, on the clock of the store."""
        with self._errors():
            return self.fs.modified(self.path).timestamp()

    def absolute(self) -> "URLPath":
        return self

    def resolve(self, strict: bool = False) -> "URLPath":
        return self

    def expanduser(self) -> "URLPath":
        return self

    def samefile(self, other: Any) -> bool:
        return str(self) == str(other)

    def _child(self, name: str) -> "URLPath":
        """The path of a name that the store lists below this one."""
        root = self.fs._strip_protocol(self.path).rstrip("/")
        relative = self.fs._strip_protocol(name).removeprefix(root).strip("/")
        return self / relative if relative else self

    def iterdir(self) -> "Iterator[URLPath]":
        with self._errors():
            try:
                names = self.fs.ls(self.path, detail=False)
            except FileNotFoundError:
                return
        children = {str(child): child for child in map(self._child, names)}
        children.pop(str(self), None)  # object stores may hold an empty object of this name
        # A page of a web server links to other places, too.
        yield from (c for c in children.values() if c.parent == self)

    def glob(self, pattern: str, **_: Any) -> "Iterator[URLPath]":
        with self._errors():
            # A folder may be called `lr[3e-3]`.
            names = sorted(self.fs.glob(f"{glob.escape(self.path.rstrip('/'))}/{pattern}"))
        yield from map(self._child, names)

    def rglob(self, pattern: str, **_: Any) -> "Iterator[URLPath]":
        """Yields files, no folders."""
        yield from (path for path in self.files() if fnmatch.fnmatchcase(path.name, pattern))

    def files(self) -> "list[URLPath]":
        """Lists all files below this folder."""
        with self._errors():
            names = sorted(self.fs.find(self.path))
        return [child for child in map(self._child, names) if child != self]

    def open(self, mode: str = "r", encoding: str | None = None, **text: Any) -> Any:
        """Opens a file for reading, or for writing whole ("w", "wb"): a context manager."""
        encoding = None if "b" in mode else encoding or "utf-8"
        if mode in ("w", "wb"):
            return self._writer(mode, encoding, **text)
        if mode not in ("r", "rb"):
            raise ValueError(f"mode {mode!r} of a file at a URL")
        raw = io.BufferedReader(_Reader(self), _BUFFER)
        return raw if encoding is None else io.TextIOWrapper(raw, encoding, **text)

    @contextlib.contextmanager
    def _writer(self, mode: str, encoding: str | None, **text: Any) -> Iterator[IO]:
        with tempfile.NamedTemporaryFile(mode, encoding=encoding, prefix="lcjax-", **text) as file:
            yield file
            file.flush()
            self.put(Path(file.name))

    def read_bytes(self) -> bytes:
        with self._errors():
            return self.fs.cat_file(self.path)

    def read_text(self, encoding: str | None = None, errors: str | None = None) -> str:
        data = io.BytesIO(self.read_bytes())
        return io.TextIOWrapper(data, encoding or "utf-8", errors).read()

    def read_range(self, start: int, size: int) -> bytes:
        """Reads `size` bytes from byte `start` on."""
        if size == 0:
            return b""
        with self._errors():
            data = self.fs.cat_file(self.path, start=start, end=start + size)
            if len(data) != size:
                reason = "it has changed meanwhile"
                if self._is_web and len(data) > size:
                    reason = "its server reads no ranges of files; download the file"
                raise StorageError(f"{self}: {len(data):,} bytes instead of {size:,}: {reason}")
        return data

    def write_bytes(self, data: bytes) -> int:
        with self._errors(is_write=True):
            self._make_parent()
            self.fs.pipe_file(self.path, data)
        return len(data)

    def write_text(self, text: str, encoding: str | None = None, **_: Any) -> int:
        return self.write_bytes(text.encode(encoding or "utf-8"))

    def create(self, data: bytes) -> None:
        """Writes a file that must not exist yet; raises FileExistsError.

        Stores that compare before they write (gs, s3) let one of several processes do so. In others
        two that ask at the same moment may both succeed.
        """
        with self._errors(is_write=True):
            self._make_parent()
            self.fs.pipe_file(self.path, data, mode="create")

    def put(self, file: Path) -> None:
        """Uploads a local file to this path."""
        with self._errors(is_write=True):
            self._make_parent()
            self.fs.put_file(str(file), self.path)

    def get(self, file: Path) -> None:
        """Downloads this file to a local one."""
        with self._errors():
            self.fs.get_file(self.path, str(file))

    def _make_parent(self) -> None:
        if self.protocol not in _OBJECT_STORES:
            self.fs.makedirs(self.parent.path, exist_ok=True)

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        """Does nothing: a folder begins to exist with its first file."""

    def rmdir(self, *_: Any) -> None:
        """Does nothing: a folder ceases to exist with its last file."""

    def unlink(self, missing_ok: bool = False) -> None:
        with self._errors():
            try:
                self.fs.rm_file(self.path)
            except FileNotFoundError:
                if not missing_ok:
                    raise

    def rename(self, target: "URLPath", **_: Any) -> "URLPath":
        """Copies a file or folder to a path that is free, and deletes it here. Not atomic."""
        files = self.files() or [self]
        with self._errors():
            for file in files:
                name = file.relative_to(self).as_posix() if file != self else ""
                self.fs.cp_file(file.path, (target / name if name else target).path)
        for file in files:
            file.unlink(missing_ok=True)
        return target


class _Reader(io.RawIOBase):
    """The bytes of a file at a URL, read by ranges."""

    def __init__(self, path: URLPath):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "is a folder", str(path))
        self.name = str(path)
        self._path, self._size, self._position = path, path.stat().st_size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        size = max(0, min(len(buffer), self._size - self._position))
        buffer[:size] = self._path.read_range(self._position, size)
        self._position += size
        return size


def check_writable(folder: URLPath) -> None:
    """Raises a StorageError if no file can be written into a folder at a URL."""
    file = folder / "lcjax-write-test"
    file.write_bytes(b"")
    file.unlink()


class AppendedFile:
    """A text file to which lines are appended.

    On a local disk they are in the file when `write` returns. A URL cannot be appended to: there a
    local copy grows, which is put to it by `flush`, and by a `write` every 30 s. A process that is
    killed loses the lines since then.
    """

    def __init__(self, path: Path | URLPath):
        self._path, self._copy = path, None
        if isinstance(path, URLPath):
            self._copy = tempfile.NamedTemporaryFile("ab", prefix="lcjax-")  # noqa: SIM115
            self._copy.write(path.read_bytes() if path.exists() else b"")
            self._last_put, self._is_put = time.monotonic(), True
        else:
            self._file = path.open("a", encoding="utf-8")

    def write(self, text: str) -> None:
        if self._copy is None:
            self._file.write(text)
            self._file.flush()
            return
        self._copy.write(text.encode())
        self._is_put = False
        if time.monotonic() - self._last_put > _PUT_EVERY:
            self._last_put = time.monotonic()
            with contextlib.suppress(OSError):  # the next put may succeed
                self.flush()

    def flush(self) -> None:
        """Returns when all lines are at the URL."""
        if self._copy is not None and not self._is_put:
            self._copy.flush()
            self._path.put(Path(self._copy.name))
            self._last_put, self._is_put = time.monotonic(), True

    def close(self) -> None:
        if self._copy is None:
            self._file.close()
            return
        try:
            self.flush()
        finally:
            self._copy.close()

    def __enter__(self) -> "AppendedFile":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def close_all(files: Iterable[Any], error: BaseException | None) -> None:
    """Closes all files, also after one that fails, and raises the first failure.

    After an `error`, which is the one to see, failures are warnings.
    """
    failures = []
    for file in files:
        try:
            file.close()
        except Exception as failure:  # packages raise classes of their own
            failures.append(failure)
    if failures and error is None:
        raise failures[0]
    for failure in failures:
        warnings.warn(f"not closed: {failure}", stacklevel=3)


def remove(path: Path | URLPath) -> None:
    """Deletes a file or a folder with all that is in it."""
    if isinstance(path, URLPath):
        # One by one: `fs.rm` takes a name with *, ? or [ for a pattern, and deletes what matches.
        with path._errors():
            files = [path._child(name) for name in path.fs.find(path.path)]
        with concurrent.futures.ThreadPoolExecutor() as pool:
            list(pool.map(lambda file: file.unlink(missing_ok=True), files))
        with contextlib.suppress(OSError), path._errors():  # some stores have folders
            for name in sorted(path.fs.find(path.path, withdirs=True), reverse=True):
                path.fs.rmdir(name)
    elif path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def read_range(path: Path | URLPath, start: int, size: int) -> np.ndarray:
    """Reads `size` bytes from byte `start` on, into new memory: uint8 [size]."""
    if isinstance(path, URLPath):
        return np.frombuffer(path.read_range(start, size), np.uint8)
    return np.fromfile(path, np.uint8, size, offset=start)


def chunks(path: Path | URLPath) -> Iterator[bytes]:
    """Yields the bytes of a file in order."""
    if isinstance(path, URLPath):
        size = path.stat().st_size
        yield from (path.read_range(i, min(_CHUNK, size - i)) for i in range(0, size, _CHUNK))
        return
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk


def map_file(path: Path | URLPath) -> mmap.mmap:
    """Maps a file that is not empty, of a URL a temporary copy; many threads can read at once."""
    if not isinstance(path, URLPath):
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with tempfile.TemporaryFile(prefix="lcjax-") as copy:
        for chunk in chunks(path):
            copy.write(chunk)
        copy.flush()
        return mmap.mmap(copy.fileno(), 0, access=mmap.ACCESS_READ)


class Staging:
    """A local folder for programs that write to disks only, and its place in the end.

    For a local place it is that folder. For a URL it is a temporary one, from which `upload` copies
    what has changed. Those of killed processes are removed when the next one is made. Use it as a
    context manager.

    Attributes:
      place: where the files are in the end.
      local: where they are to be written.
      is_temporary: whether these are two folders.
    """

    def __init__(self, place: Path | URLPath, local: Path | None = None, *, always: bool = False):
        """`local` is a folder of the caller; `always` makes a temporary one for a local place."""
        self.place = place
        self._uploaded: dict[Path, tuple[int, int]] = {}  # size and time of change
        self.is_temporary = local is None and (always or isinstance(place, URLPath))
        self.local = _temporary_folder() if self.is_temporary else local or place

    def upload(self, last: str = "") -> None:
        """Copies new and changed files to their place; returns when they are there.

        `last` is a file that is copied when all others are there.
        """
        if self.local == self.place:
            return

        def put(file: Path) -> None:
            status = file.stat()
            state = status.st_size, status.st_mtime_ns
            if self._uploaded.get(file) != state:
                target = self.place / file.relative_to(self.local).as_posix()
                if isinstance(target, URLPath):
                    target.put(file)
                else:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(file, target)  # without times, which may not be set there
                self._uploaded[file] = state

        files = list(filter(Path.is_file, self.local.rglob("*")))
        with concurrent.futures.ThreadPoolExecutor() as pool:
            list(pool.map(put, (file for file in files if file.name != last)))
        for file in files:
            if file.name == last:
                put(file)

    def download(self) -> None:
        """Copies the files of a URL into the temporary folder."""
        files = self.place.files() if isinstance(self.place, URLPath) else []

        def get(file: URLPath) -> None:
            copy = self.local / file.relative_to(self.place).as_posix()
            copy.parent.mkdir(parents=True, exist_ok=True)
            file.get(copy)

        with concurrent.futures.ThreadPoolExecutor() as pool:
            list(pool.map(get, files))

    def close(self) -> None:
        """Removes the temporary folder; what was not uploaded is lost."""
        if self.is_temporary:
            shutil.rmtree(self.local, ignore_errors=True)

    def __enter__(self) -> "Staging":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _temporary_folder() -> Path:
    prefix = f"{_PREFIX}{_namespace()}-"
    for leftover in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        pid = leftover.name.removeprefix(prefix).partition("-")[0]
        if pid.isdigit() and not is_running(int(pid)):
            shutil.rmtree(leftover, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-"))


def _namespace() -> str:
    """A digest of the machine or container whose processes have numbers of their own.

    Several of them may share the folder of temporary files.
    """
    name = socket.gethostname()
    with contextlib.suppress(OSError):  # no /proc
        name += os.readlink("/proc/self/ns/pid")
    return hashlib.sha256(name.encode()).hexdigest()[:8]


def is_running(pid: int) -> bool:
    """Whether a process of this machine has the number `pid`."""
    if os.name != "posix":  # elsewhere signal 0 would end the process
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # of another user
        return True
    return True
