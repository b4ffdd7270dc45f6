"""Paths that users name: on local disks, or as URLs of object stores and servers.

`to_path` returns a `pathlib.Path`, or a `URLPath` for `gs://`, `s3://`, `https://` and every other
scheme of fsspec. A `URLPath` has those methods of `pathlib.Path` that this library calls, so most
code handles both alike. The differences:

- A file appears as a whole when the `with` block of its `open` ends without an error, because
  uploads to object stores are atomic. `rename` is not, and there is no append, lock or memory map.
- A folder exists as long as it contains a file.
- Failures are raised as a `StorageError`, also by `exists`. fsspec's own `exists` reports a missing
  file after a failed connection, and a run would then start again from the beginning.

A file that must be mapped into memory is copied to an anonymous temporary file; the system frees
its space when the process ends, even if it is killed. Files that other libraries write go through a
`Staging`.
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
import stat
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

from lcjax.errors import InputError, install_command, one_line

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
# Stores without folders. fsspec must not cache their listings; their `mkdir` creates buckets.
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
_CHUNK = 1 << 24  # most bytes of one read
_PUT_EVERY = 30.0  # seconds between two puts of a file to which lines are appended
_BUFFER = 1 << 22  # least bytes that an open file requests at once
_PREFIX = "lcjax-staging-"  # of temporary folders; `_namespace()` and the process id follow


class StorageError(InputError, OSError):
    """A store failed or denied a request; the message names the URL."""


def is_storage_failure(error: BaseException | None) -> bool:
    """Whether an error is a StorageError, or one is among its causes and contexts."""
    while error is not None and not isinstance(error, StorageError):
        error = error.__cause__ or error.__context__
    return error is not None


def to_path(name: "str | os.PathLike | URLPath") -> "Path | URLPath":
    """Returns the path of a name: a `URLPath` for a URL, else a `pathlib.Path`.

    `~` at the beginning of a local path is the home folder.

    Raises:
      InputError: no installed package reads URLs of this scheme.
    """
    if isinstance(name, URLPath):
        return name
    match = _URL.match(str(name))
    if match is None:
        return Path(os.path.expanduser(name))
    scheme = match[1].lower()
    if scheme in ("file", "local"):
        return Path(os.path.expanduser(str(name)[match.end() :]))
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
    """Returns the local path of a name; raises an InputError with `reason` if it is a URL."""
    path = to_path(name)
    if isinstance(path, URLPath):
        raise InputError(f"{key}={name} must be a local path: {reason}")
    return path


class URLPath(ProxyUPath):
    """A file or folder at a URL, with methods of `pathlib.Path`; the module lists differences."""

    @property
    def _is_web(self) -> bool:
        return self.protocol in _WEB

    @contextlib.contextmanager
    def _errors(self, *, is_write: bool = False) -> Iterator[None]:
        """Raises a StorageError for every failure but those that `pathlib` raises, too."""
        try:
            yield
        except (FileExistsError, NotADirectoryError, InputError):
            raise
        except Exception as error:  # packages raise classes of their own
            if isinstance(error, FileNotFoundError) and not is_write:
                raise
            reason = one_line(error)[:300]
            if isinstance(error, FileNotFoundError):
                reason = f"there is no such bucket or folder ({reason})"
            if isinstance(error, NotImplementedError):
                reason = f"{self.protocol}:// cannot do this"
            login = _LOGIN.get(self.protocol)
            is_denied = _DENIED.search(f"{type(error).__name__} {reason}") is not None
            if is_denied and login is not None:
                reason = f"{reason}; log in ({login}), or give another URL"
            raise StorageError(f"{self}: {reason}") from error

    def _info(self) -> dict[str, Any] | None:
        """Returns the store's metadata of this file or folder; None if it does not exist."""
        with self._errors():
            try:
                info = self.fs.info(self.path)
            except (FileNotFoundError, NotADirectoryError) as error:
                # For web servers fsspec raises "not found" for any failure, with its cause.
                cause = error.__cause__
                if cause is None or isinstance(cause, FileNotFoundError):
                    return None
                if getattr(cause, "status", None) in (404, 410):
                    return None
                raise cause from None
        # Web servers have no folders; an HTML page that lists files counts as one.
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
        """Returns an object with `st_size` only; `modified` needs a request of its own."""
        info = self._info()
        if info is None:
            raise FileNotFoundError(errno.ENOENT, "no such file", str(self))
        if info.get("size") is None:
            raise StorageError(f"{self}: the server does not say its size; download the file")
        return SimpleNamespace(st_size=int(info["size"]))

    def modified(self) -> float:
        """Returns the time of the last write, in seconds since the epoch, by the store's clock."""
        with self._errors():
            return self.fs.modified(self.path).timestamp()

    def absolute(self) -> "URLPath":
        return self

    def resolve(self, strict: bool = False) -> "URLPath":
        return self

    def samefile(self, other: Any) -> bool:
        return str(self) == str(other)

    def _child(self, name: str) -> "URLPath":
        """Returns the path of a name from the store's listing of this folder."""
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
        children.pop(str(self), None)  # an empty object may stand for the folder itself
        # A web page also links to files outside this folder.
        yield from (c for c in children.values() if c.parent == self)

    def glob(self, pattern: str, **_: Any) -> "Iterator[URLPath]":
        with self._errors():
            # A folder's name may have wildcards: `lr[3e-3]`.
            names = sorted(self.fs.glob(f"{glob.escape(self.path.rstrip('/'))}/{pattern}"))
        yield from map(self._child, names)

    def rglob(self, pattern: str, **_: Any) -> "Iterator[URLPath]":
        """Yields the files below this folder whose names match; no folders."""
        yield from (path for path in self.files() if fnmatch.fnmatchcase(path.name, pattern))

    def files(self) -> "list[URLPath]":
        """Lists all files below this folder."""
        with self._errors():
            names = sorted(self.fs.find(self.path))
        return [child for child in map(self._child, names) if child != self]

    def open(self, mode: str = "r", encoding: str | None = None, **text: Any) -> Any:
        """Returns a context manager with the open file, to read or to write anew ("w", "wb")."""
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
        """Returns `size` bytes of the file from byte `start` on."""
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
        """Writes a file that must not exist yet; raises a FileExistsError if it does.

        In stores with conditional writes (gs, s3) only one of several processes succeeds. In others
        two processes that call this at the same moment may both succeed.
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
        """Copies a file or folder to a free path, then deletes the original; this is not atomic."""
        files = self.files() or [self]
        with self._errors():
            for file in files:
                name = file.relative_to(self).as_posix() if file != self else ""
                self.fs.cp_file(file.path, (target / name if name else target).path)
        for file in files:
            file.unlink(missing_ok=True)
        return target


class _Reader(io.RawIOBase):
    """A raw stream of a file at a URL; each read requests a range of bytes."""

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

    On a local disk the lines are in the file when `write` returns. A file at a URL cannot be
    appended to, so lines are appended to a local copy. `flush` uploads it, and so does `write` if
    the last upload was more than 30 s ago. A killed process loses the lines after its last upload.
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
        """Uploads lines that are not yet at the URL; returns when they are stored."""
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
    """Closes all files, even if some of them fail to close, and raises the first failure.

    With `error`, an exception that is already being raised, failures are only warnings, so that
    they do not hide it.
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
    """Deletes a file, or a folder with all of its content."""
    if isinstance(path, URLPath):
        # One by one: `fs.rm` reads a name with *, ? or [ as a pattern and deletes all matches.
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


def check_regular(path: Path | URLPath) -> None:
    """Raises an InputError for a pipe, socket or device, whose reader could wait or read forever.

    Of a folder, its entries and those of its folders are checked.
    """
    if isinstance(path, URLPath):
        return
    is_folder = stat.S_ISDIR(_mode(path))
    for entry in (*path.glob("*"), *path.glob("*/*")) if is_folder else (path,):
        mode = _mode(entry)
        if mode and not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise InputError(f"{entry} is a pipe, socket or device; put a regular file there")


def _mode(path: Path) -> int:
    try:
        return path.stat().st_mode
    except (OSError, ValueError):  # who opens it gets this error again
        return 0


def read_range(path: Path | URLPath, start: int, size: int) -> np.ndarray:
    """Returns `size` bytes from byte `start` on as a new array, uint8 [size]."""
    if isinstance(path, URLPath):
        return np.frombuffer(path.read_range(start, size), np.uint8)
    check_regular(path)
    return np.fromfile(path, np.uint8, size, offset=start)


def read_chunks(path: Path | URLPath) -> Iterator[bytes]:
    """Yields the content of a file in order, in pieces of at most 16 MiB."""
    if isinstance(path, URLPath):
        size = path.stat().st_size
        yield from (path.read_range(i, min(_CHUNK, size - i)) for i in range(0, size, _CHUNK))
        return
    check_regular(path)
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk


def map_file(path: Path | URLPath) -> mmap.mmap:
    """Maps a non-empty file, or a temporary copy of one at a URL, into memory for reading.

    Many threads can read the map at the same time.
    """
    if not isinstance(path, URLPath):
        check_regular(path)
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with tempfile.TemporaryFile(prefix="lcjax-") as copy:
        for chunk in read_chunks(path):
            copy.write(chunk)
        copy.flush()
        return mmap.mmap(copy.fileno(), 0, access=mmap.ACCESS_READ)


class Staging:
    """A local folder for libraries that can only write to a disk, and its final place.

    If the place is a local folder, files are written directly into it. If it is a URL, they are
    written into a temporary folder, and `upload` copies new and changed files. Temporary folders of
    killed processes are removed when the next one is created. Use it as a context manager.

    Attributes:
      place: the final place of the files.
      local: the folder to write them into.
      is_temporary: whether `local` is a temporary folder, which `close` removes.
    """

    def __init__(self, place: Path | URLPath, local: Path | None = None, *, always: bool = False):
        """`local` is a folder of the caller; `always`: make a temporary one for a local place."""
        self.place = place
        self._uploaded: dict[Path, tuple[int, int]] = {}  # size and time of change when uploaded
        self.is_temporary = local is None and (always or isinstance(place, URLPath))
        self.local = _temporary_folder() if self.is_temporary else local or place

    def upload(self, last: str = "") -> None:
        """Copies new and changed files to `place`; returns when all of them have arrived.

        `last` is the name of a file that is copied after all others have arrived.
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
                    shutil.copyfile(file, target)  # without times: some disks cannot set them
                self._uploaded[file] = state

        files = list(filter(Path.is_file, self.local.rglob("*")))
        with concurrent.futures.ThreadPoolExecutor() as pool:
            list(pool.map(put, (file for file in files if file.name != last)))
        for file in files:
            if file.name == last:
                put(file)

    def download(self) -> None:
        """Copies the files at a URL into `local`; does nothing for a local place."""
        files = self.place.files() if isinstance(self.place, URLPath) else []

        def get(file: URLPath) -> None:
            copy = self.local / file.relative_to(self.place).as_posix()
            copy.parent.mkdir(parents=True, exist_ok=True)
            file.get(copy)

        with concurrent.futures.ThreadPoolExecutor() as pool:
            list(pool.map(get, files))

    def close(self) -> None:
        """Removes a temporary folder; files that were not uploaded are lost."""
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
    """Returns a digest of the host name and the PID namespace, in which process ids are unique.

    Several machines or containers may share the folder of temporary files.
    """
    name = socket.gethostname()
    with contextlib.suppress(OSError):  # no /proc
        name += os.readlink("/proc/self/ns/pid")
    return hashlib.sha256(name.encode()).hexdigest()[:8]


def is_running(pid: int) -> bool:
    """Whether a process with the id `pid` runs on this machine; always True without POSIX."""
    if os.name != "posix":  # elsewhere signal 0 would end the process
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # the process belongs to another user
        return True
    return True
