"""Folders that are complete or absent: a killed process never leaves half a model."""

import contextlib
import glob
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from lcjax.errors import InputError


def check_destination(folder: Path, overwrite: bool, way_out: str = "overwrite=True") -> None:
    """Refuses a file or a folder with files, unless it may be replaced; `way_out` is how."""
    if folder.exists() and not overwrite and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(
            f"{folder} exists and is not empty; choose another folder, or replace it with {way_out}"
        )


@contextlib.contextmanager
def finished_or_absent(folder: Path, overwrite: bool) -> Iterator[Path]:
    """A hidden folder that becomes `folder` when the block ends without an error."""
    folder = folder.absolute()
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        partial.mkdir()
        yield partial
        _publish(partial, folder, overwrite)
    except OSError as error:
        raise InputError(
            f"{folder}: could not be written ({error}); nothing was left behind, make room and try "
            "again"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Removes what killed processes left, and nothing that a running one still writes."""
    kinds = ["partial"]
    if folder.exists():  # else what was set aside may be the only copy
        kinds.append("old")
    for kind in kinds:
        for left in folder.parent.glob(f"{glob.escape(f'.{folder.name}')}.{kind}-*"):
            pid = left.name.rpartition("-")[2]
            if pid.isdigit() and not _is_another_running(int(pid)):
                shutil.rmtree(left, ignore_errors=True)


def _is_another_running(pid: int) -> bool:
    """Whether `pid` runs and is not this process, whose number an earlier one may have had."""
    if pid == os.getpid():
        return False
    if os.name != "posix":  # elsewhere signal 0 would end the process
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # of another user
        return True
    return True


def _publish(partial: Path, folder: Path, overwrite: bool) -> None:
    old = folder.with_name(f".{folder.name}.old-{os.getpid()}")
    if overwrite and folder.exists():
        folder.rename(old)
    try:
        partial.rename(folder)  # also onto an empty folder
    except BaseException:
        if old.exists():
            old.rename(folder)
        raise
    if old.is_dir():
        shutil.rmtree(old)
    else:
        old.unlink(missing_ok=True)
