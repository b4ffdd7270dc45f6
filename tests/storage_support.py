"""Places that tests reach by URL: an object store that kills its writers, and a web server."""

import contextlib
import datetime
import functools
import http.server
import os
import re
import threading
import urllib.parse
from pathlib import Path

import fsspec
from fsspec import AbstractFileSystem

from lcjax.storage import URLPath, remove, to_path

ROOT, KILL_AT = "LCJAX_TEST_STORE", "LCJAX_TEST_KILL_AT"  # environment variables


class Killed(BaseException):
    """Ends a writer as if its process were killed: from then on its store stays as it is."""


class FolderStore(AbstractFileSystem):
    """An object store: the objects of `store://bucket` are files of the folder $LCJAX_TEST_STORE.

    Before change number $LCJAX_TEST_KILL_AT of an object, counted from 1, the process ends.
    """

    protocol = "store"
    cachable = False
    num_changes = 0
    die_at = None  # in this process instead: the change from which on all raise `Killed`

    def _file(self, path):
        return Path(os.environ[ROOT], urllib.parse.quote(self._strip_protocol(path), safe=""))

    def _keys(self, path=""):
        prefix = self._strip_protocol(path)
        keys = sorted(urllib.parse.unquote(name) for name in os.listdir(os.environ[ROOT]))
        return [key for key in keys if not prefix or key.startswith(prefix + "/")]

    def _change(self):
        FolderStore.num_changes += 1
        if self.die_at is not None and self.num_changes >= self.die_at:
            raise Killed
        if self.num_changes == int(os.environ.get(KILL_AT, 0)):
            os._exit(9)

    def info(self, path, **_):
        key, file = self._strip_protocol(path), self._file(path)
        if file.is_file():
            return {"name": key, "size": file.stat().st_size, "type": "file"}
        if not self._keys(key):
            raise FileNotFoundError(path)
        return {"name": key, "size": 0, "type": "directory"}

    def ls(self, path, detail=True, **_):
        key = self._strip_protocol(path)
        if self._file(key).is_file():
            names = [key]
        elif not (keys := self._keys(key)):
            raise FileNotFoundError(path)
        else:
            start = len(key) + 1 if key else 0
            names = list(dict.fromkeys(k[:start] + k[start:].split("/")[0] for k in keys))
        return [self.info(name) for name in names] if detail else names

    def modified(self, path):
        return datetime.datetime.fromtimestamp(self._file(path).stat().st_mtime, datetime.UTC)

    def cat_file(self, path, start=None, end=None, **_):
        return self._file(path).read_bytes()[start:end]

    def pipe_file(self, path, value, mode="overwrite", **_):
        if mode == "create" and self._file(path).exists():
            raise FileExistsError(path)
        self._change()
        self._file(path).write_bytes(value)

    def put_file(self, lpath, rpath, **_):
        self.pipe_file(rpath, Path(lpath).read_bytes())

    def rm_file(self, path):
        if not self._file(path).exists():
            raise FileNotFoundError(path)
        self._change()
        self._file(path).unlink()

    def cp_file(self, path1, path2, **_):
        self.pipe_file(path2, self.cat_file(path1))

    def makedirs(self, path, exist_ok=False):
        pass


fsspec.register_implementation("store", FolderStore, clobber=True)


@contextlib.contextmanager
def dying_at(change: int | None):
    """Kills the writers of this process before their `change`-th change; None: counts only."""
    FolderStore.num_changes, FolderStore.die_at = 0, change
    try:
        yield FolderStore
    except Killed:
        pass
    finally:
        FolderStore.die_at = None


@contextlib.contextmanager
def failing(place: URLPath, method: str, *, call: int = 1, path: str = ""):
    """Lets calls of a store's `method` fail from number `call` on; gives the list of their paths.

    Only calls count that have an argument in which `path` is.
    """
    store, paths = type(place.fs), []
    before = getattr(store, method)

    def fail(self, *args, **options):
        if matches := [name for name in args if path in str(name)]:
            paths.append(matches[0])
            if len(paths) >= call:
                raise ConnectionError("connection reset")
        return before(self, *args, **options)

    setattr(store, method, fail)
    try:
        yield paths
    finally:
        setattr(store, method, before)


def memory(name: str) -> URLPath:
    """An empty folder in memory."""
    folder = to_path(f"memory://{name}")
    remove(folder)
    return folder


def upload(folder: Path, place: URLPath) -> URLPath:
    for file in filter(Path.is_file, folder.rglob("*")):
        (place / file.relative_to(folder).as_posix()).write_bytes(file.read_bytes())
    return place


class _Ranges(http.server.SimpleHTTPRequestHandler):
    """A file server that answers requests for a range of bytes, as `http.server` does not."""

    def __init__(self, *args, requests, has_ranges, **options):
        self.requests, self.has_ranges = requests, has_ranges
        super().__init__(*args, **options)

    def do_GET(self):
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        file = Path(self.translate_path(self.path))
        self.requests.append((self.path, self.headers.get("Range")))
        if span is None or not file.is_file() or not self.has_ranges:
            super().do_GET()
            return
        start, stop = int(span[1]), int(span[2]) + 1
        with file.open("rb") as data:
            data.seek(start)
            part = data.read(stop - start)
        self.send_response(206)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{file.stat().st_size}")
        self.end_headers()
        self.wfile.write(part)

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def web_server(folder: Path, *, has_ranges: bool = True):
    """Serves a folder; gives its URL and the list of (path, range) of requests."""
    requests = []
    handler = functools.partial(
        _Ranges, directory=str(folder), requests=requests, has_ranges=has_ranges
    )
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", requests
        finally:
            server.shutdown()
            thread.join()
