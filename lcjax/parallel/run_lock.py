"""A lock on a run folder: two runs that write into one folder would corrupt each other.

The lock is a file in the folder. It names the process that holds it, which refreshes the file
while it runs. A process that was killed leaves the file behind. The same machine detects at once
that the process has ended; on other machines a lock is stale after a minute without a refresh.

A folder at a URL is locked in the same way. Stores that can create an object only if it is absent
(gs, s3) let one run of several that start at the same moment take the lock.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lcjax.errors import InputError
from lcjax.parallel import distributed
from lcjax.storage import StorageError, URLPath, check_regular, to_path

LOCK = "lock.json"
GUARD = "lock.json.guard"

_REFRESH = 15.0  # seconds between two refreshes of a lock
_STALE = 60.0  # seconds without a refresh after which a lock of another machine is stale
_PAUSE = 0.05  # seconds between two reads of a lock


class RunLock:
    """Holds the lock of a run folder; a context manager for all processes of a job.

    The folder is created if it does not exist. It is then removed at the end if it is empty.
    """

    def __init__(self, folder: str | Path, key: str = "run.folder"):
        """`key` names the folder in error messages."""
        self._folder, self._key = to_path(folder), key
        self._file, self._guard_file = self._folder / LOCK, self._folder / GUARD
        self._owner = _this_process()
        self._seen: dict[Path | URLPath, tuple[float, float]] = {}  # see `_age`
        self._stop = threading.Event()
        self._refresher = threading.Thread(target=self._refresh, daemon=True)
        self._has_created_folder = False

    def __enter__(self) -> "RunLock":
        """Takes the lock, or raises an InputError that names the process which holds it."""
        distributed.from_main(self._acquire)
        if distributed.is_main_process():
            self._refresher.start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        if distributed.is_main_process():
            self._refresher.join()  # a refresh would write the lock again after it was removed
            with contextlib.suppress(OSError):
                if _read(self._file) == self._owner:
                    self._file.unlink()
                if self._has_created_folder:
                    self._folder.rmdir()  # fails if results are in it

    def _acquire(self) -> None:
        check_regular(self._folder)
        try:
            self._has_created_folder = not self._folder.exists()
            last_refresh = None
            while not self._create():
                last_refresh = self._remove_if_stale(last_refresh)
        except (OSError, ValueError) as error:
            if isinstance(error, InputError) and not isinstance(error, StorageError):
                raise
            raise InputError(
                f"{self._key}={self._folder} cannot be written ({error}); name another folder"
            ) from None

    def _create(self) -> bool:
        """Creates the lock; returns False if it exists already."""
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            _create_file(self._file, json.dumps(self._owner))
        except (FileExistsError, FileNotFoundError):  # not found: the folder was removed meanwhile
            return False
        return True

    def _remove_if_stale(self, last_refresh: float | None) -> float | None:
        """Removes the lock if it is stale; raises an InputError if its process runs.

        Args:
          last_refresh: return value of the previous call; None: this is the first call.

        Returns:
          The time of the lock's last refresh, if it is not known yet whether its process runs.
        """
        with self._guard() as now:
            owner, refresh = _read(self._file), _modified(self._file)
            if now is None or refresh is None:  # another process is here, or it was released
                return last_refresh
            if _is_local(owner):
                is_stale = owner["started"] != _start_time(owner["pid"])
                is_running = not is_stale
            else:
                is_running = last_refresh is not None and refresh != last_refresh
                is_stale = self._age(self._file, refresh, now) > _STALE
            name = "another process"
            if owner is not None:
                name = f"process {owner['pid']} on {owner['host']} since {owner['since']}"
            if is_running:
                raise InputError(
                    f"{self._key}={self._folder} is in use by {name}; wait for its end, or name"
                    f" another folder. If it no longer runs, remove {self._file}"
                )
            if is_stale:
                self._file.unlink(missing_ok=True)
            elif last_refresh is None:
                print(
                    f"{self._key}={self._folder} may be in use by {name}; waiting up to"
                    f" {_STALE:g} s for a sign of it",
                    file=sys.stderr,
                )
        time.sleep(0 if is_stale else _PAUSE)
        return refresh

    @contextlib.contextmanager
    def _guard(self) -> Iterator[float | None]:
        """Lets only one process at a time check the lock and remove it.

        A second process could otherwise remove the new lock of the first. Yields the current time
        on the clock of the file system; None if another process holds the guard.
        """
        try:
            _create_file(self._guard_file, "")
        except FileNotFoundError:  # the folder was removed meanwhile
            yield None
            return
        except FileExistsError:
            modified = _modified(self._guard_file)
            if modified is not None and (
                self._age(self._guard_file, modified, time.time()) > _STALE
            ):  # its process was killed
                self._guard_file.unlink(missing_ok=True)
            time.sleep(_PAUSE)
            yield None
            return
        try:
            yield _modified(self._guard_file)
        finally:
            self._guard_file.unlink(missing_ok=True)

    def _age(self, file: Path | URLPath, modified: float, now: float) -> float:
        """Returns the seconds without a change of a file: by its time, and as seen from here.

        The time of a file may be in the future, if a clock was wrong or the file was copied.
        """
        seen, start = self._seen.get(file, (None, 0.0))
        if seen != modified:
            start = time.monotonic()
            self._seen[file] = modified, start
        return max(now - modified, time.monotonic() - start)

    def _refresh(self) -> None:
        while not self._stop.wait(_REFRESH):
            with contextlib.suppress(OSError):
                if _read(self._file) == self._owner:
                    _touch(self._file)


def _this_process() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": _start_time(os.getpid()),
        "machine": _machine(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def _machine() -> str | None:
    """Returns an id of the machine's boot and PID namespace (container); None without /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _start_time(pid: int) -> str | None:
    """Returns the start time of a process in clock ticks from boot; None if it does not run.

    It distinguishes processes that were given the same number one after the other.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in "ZX" else fields[18]  # zombies have ended


def _read(file: Path) -> dict[str, Any] | None:
    """Returns the owner in a lock file; None if the file is missing or incomplete."""
    try:
        owner = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    is_owner = isinstance(owner, dict) and owner.keys() >= _this_process().keys()
    return owner if is_owner and isinstance(owner["pid"], int) else None


def _create_file(path: Path | URLPath, text: str) -> None:
    """Writes a small file that must not exist yet; raises FileExistsError."""
    if isinstance(path, URLPath):
        path.create(text.encode())
        return
    file = path.open("x", encoding="utf-8")
    try:
        with file:
            file.write(text)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _touch(path: Path | URLPath) -> None:
    """Sets the modification time of a small file to now."""
    try:
        if not isinstance(path, URLPath):
            os.utime(path)
            return
    except OSError:  # file systems that cannot set times
        pass
    path.write_bytes(path.read_bytes())


def _modified(file: Path | URLPath) -> float | None:
    """Returns a file's modification time in seconds of the file system's clock; None if missing."""
    try:
        return file.modified() if isinstance(file, URLPath) else file.stat().st_mtime
    except OSError:
        return None


def _is_local(owner: dict[str, Any] | None) -> bool:
    """Returns whether the owner is a process of this machine and PID namespace."""
    return owner is not None and owner["machine"] is not None and owner["machine"] == _machine()
