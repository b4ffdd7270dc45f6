"""A lock on a run folder: two runs that write into one folder would corrupt each other.

The lock is a file in the folder with the host and the process that hold it. A process that was
killed leaves it behind, so a lock is stale if its process has ended (on the same host), or if
nobody has refreshed it for ten minutes (on another one).
"""

import contextlib
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

from lcjax.errors import InputError
from lcjax.parallel import distributed

LOCK = "lock.json"

_REFRESH = 60.0  # seconds between two refreshes of a lock
_STALE = 600.0  # seconds without a refresh after which a lock of another host is stale
_INCOMPLETE = 2.0  # seconds in which a new lock may be incomplete
_PAUSE = 0.02  # seconds between two looks at a lock that changes


class RunLock:
    """Holds the lock of a run folder; a context manager for all processes of a job.

    The folder is created if it does not exist, and removed at the end if nothing was written.
    """

    def __init__(self, folder: str | Path, key: str = "run.folder"):
        """`key` names the folder in error messages."""
        self._folder, self._key = Path(folder), key
        self._file = self._folder / LOCK
        self._owner = _this_process()
        self._stop = threading.Event()

    def __enter__(self) -> "RunLock":
        """Takes the lock, or raises an InputError that names the process which holds it."""
        distributed.from_first(self._acquire)
        if distributed.first():
            threading.Thread(target=self._refresh, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        if distributed.first():
            if _read(self._file) == self._owner:
                self._file.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # not empty
                self._folder.rmdir()

    def _acquire(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            while not self._create():
                self._remove_stale()
        except (OSError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"{self._key}={self._folder} cannot be written ({error}); name another folder"
            ) from None

    def _create(self) -> bool:
        """Creates the file; returns False if there is one."""
        try:
            with self._file.open("x", encoding="utf-8") as file:
                json.dump(self._owner, file)
        except FileExistsError:
            return False
        return True

    def _remove_stale(self) -> None:
        """Removes the lock if it is stale; raises an InputError if it is not."""
        # Of several starts only one at a time looks at the lock and removes it: a second one could
        # otherwise remove the new lock of the first.
        guard = self._file.with_name(f"{LOCK}.guard")
        try:
            guard.open("x").close()
        except FileExistsError:
            if (age := _age(guard)) is not None and age > _REFRESH:  # its process was killed
                guard.unlink(missing_ok=True)
            time.sleep(_PAUSE)
            return
        try:
            owner, age = _read(self._file), _age(self._file)
            if age is None:  # released meanwhile
                return
            if owner is None and age < _INCOMPLETE:  # being written
                time.sleep(_PAUSE)
                return
            if not _is_stale(owner, age):
                owner = owner or {"pid": "?", "host": "another host", "since": "a moment ago"}
                raise InputError(
                    f"{self._key}={self._folder} is in use by process {owner['pid']} on"
                    f" {owner['host']} since {owner['since']}; wait for its end, or name another"
                    f" folder. If it no longer runs, remove {self._file}"
                )
            self._file.unlink(missing_ok=True)
        finally:
            guard.unlink(missing_ok=True)

    def _refresh(self) -> None:
        while not self._stop.wait(_REFRESH):
            with contextlib.suppress(OSError):
                os.utime(self._file)


def _this_process() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": _start_time(os.getpid()),
        "boot": _boot_id(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def _start_time(pid: int) -> str | None:
    """Clock ticks from boot to the start of a process: tells apart processes of the same number.

    None where there is no such process, or no /proc.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[19]


def _boot_id() -> str | None:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return None


def _read(file: Path) -> dict[str, Any] | None:
    """Returns the owner in a lock file; None if it is not there, or incomplete."""
    try:
        owner = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    is_owner = isinstance(owner, dict) and owner.keys() >= _this_process().keys()
    return owner if is_owner and isinstance(owner["pid"], int) else None


def _age(file: Path) -> float | None:
    try:
        return time.time() - file.stat().st_mtime
    except OSError:
        return None


def _is_stale(owner: dict[str, Any] | None, age: float) -> bool:
    if owner is None or owner["host"] != socket.gethostname():
        return age > _STALE
    if owner["boot"] != _boot_id():
        return True  # the machine was started again
    if owner["started"] is not None:
        return owner["started"] != _start_time(owner["pid"])
    try:
        os.kill(owner["pid"], 0)
    except ProcessLookupError:
        return True
    except OSError:  # a process of another user
        return False
    return False
