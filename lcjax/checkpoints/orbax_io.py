"""Saves checkpoints of a run in the background of training, and restores them after any failure.

The only module that uses orbax (API v1). A checkpoint is a folder `<run>/checkpoints/<step>` with
the train state and the position in the data. orbax writes it under a temporary name and renames
it when it is complete, so a killed process or a full disk leaves the earlier ones as they were.
Several processes write one checkpoint together, and restore the same one or none.

When a checkpoint is complete, each process adds a file with the SHA-256 sums of the files that it
wrote, also in the background. The sums are verified before anything is restored, so a flipped bit
is found. `sha256sum -c checksums.0` in a checkpoint's folder does the same. For 1.2 GB on 2 CPU
cores, the sums took a fifth of the time of a save and a third of the time of a restore. Checkpoints
without sums are restored unchecked: those of older versions, and one whose process was killed
before it wrote them.

A run folder at a URL (`lcjax.storage`) has checkpoints of the same files. orbax writes each into a
temporary local folder, which is uploaded in the background. The sums are uploaded last and mark a
complete checkpoint: at a URL, a folder without them is no checkpoint. Older checkpoints are deleted
after that. To restore a checkpoint, it is copied to a temporary folder. (orbax 0.12 can write to
gs:// itself, but takes s3:// for a local path.)
"""

import asyncio
import concurrent.futures
import contextlib
import json
import logging
import os
import re
import shutil
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from lcjax.errors import InputError, check_integer, one_line
from lcjax.files import check_sums, sums_of, write_sums
from lcjax.parallel import distributed
from lcjax.storage import Staging, URLPath, is_storage_failure, remove, to_path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

FOLDER = "checkpoints"
_CHECKSUMS = "checksums.{}"  # in the folder of a checkpoint; one for each process
_MARK = _CHECKSUMS.format(0)  # at a URL: the file that marks a complete checkpoint
_PARTIAL = ".partial"  # suffix of a folder to which a checkpoint is being copied
_OF_PROCESS = re.compile(r"ocdbt\.process_(\d+)")  # folder of the arrays that a process wrote
# Errors of orbax and tensorstore for files that are truncated, missing or not theirs.
_DAMAGE = (OSError, ValueError, LookupError)
_WRITE_FAILURE = (OSError, ValueError)
# Statuses of errors about the contents of files; errors with other statuses are about storage.
_STATUS = re.compile(r"([A-Z]+(?:_[A-Z]+)*): ")
_OF_CONTENT = ("DATA_LOSS", "OUT_OF_RANGE", "NOT_FOUND", "INVALID_ARGUMENT", "FAILED_PRECONDITION")
_MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_PAUSE = 1.0  # seconds before a failed read is tried once more
# By default orbax cuts every array that several devices hold into a part for each of them, and
# compiles a program for every shape and device. That pays for large arrays only.
_ARRAY_OPTIONS = ocp.options.ArrayOptions(
    saving=ocp.options.ArrayOptions.Saving(min_slice_bytes_for_replica_parallel=2**20)
)


class CheckpointError(InputError):
    """A checkpoint could not be written or read; the message names the last complete one."""


class _Position:
    """The data position as one JSON file; the same on every process, written by the first.

    It is a state of `lcjax.data.Loader`, with `last_finite` of `Checkpoints` as another key.
    """

    _file = "position.json"

    def __init__(self, value: dict | None = None):
        self.value = value

    async def save(self, directory):
        text = json.dumps(self.value)

        async def write():
            folder = await directory.await_creation()
            if distributed.is_main_process():
                await asyncio.to_thread((folder / self._file).write_text, text)

        return write()

    async def load(self, directory):
        async def read():
            value = json.loads(await asyncio.to_thread((directory / self._file).read_text))
            fields = value if isinstance(value, dict) else {}
            if not all(isinstance(fields.get(key), dict) for key in ("identity", "position")):
                raise CheckpointError(f"data/{self._file} is no position in the data")
            if fields.get("last_finite") is not None:
                check_integer(f"data/{self._file}: last_finite", fields["last_finite"], 0)
            self.value = value

        return read()


class _Rotation:
    """Preserves the newest `keep` checkpoints, and the newest one up to step `last_finite`."""

    def __init__(self, keep: int):
        self._keep, self.last_finite = keep, None

    def should_preserve(self, checkpoints: Sequence, *, context: Any) -> list[bool]:
        del context
        steps = [checkpoint.step for checkpoint in checkpoints]
        return [step in self.preserved(steps) for step in steps]

    def preserved(self, steps: Sequence[int]) -> set[int | None]:
        return {*steps[-self._keep :], _newest(steps, self.last_finite)}


def _newest(steps: Sequence[int], last: int | None) -> int | None:
    """Returns the newest of `steps` that is not after `last`; None if there is none."""
    return max((step for step in steps if last is not None and step <= last), default=None)


class Checkpoints:
    """The checkpoints of one run folder; use it as a context manager.

    Attributes:
      last_finite: the newest step whose state gave a finite loss and gradient in the next step;
        None if none did. The training loop sets it, and `restore` reads it. A state can be ruined
        long before a loss shows it, so the newest checkpoint up to this step is preserved in
        addition to the newest `keep`.
    """

    def __init__(self, folder: str | Path, *, keep: int = 2):
        _quiet_orbax()
        self._folder = to_path(folder).absolute() / FOLDER
        # orbax syncs and locks its files, which not all mounted folders support.
        is_direct = jax.process_count() > 1 or _can_sync(self._folder)
        self._staging = Staging(self._folder, always=not is_direct)
        self.last_finite: int | None = None
        self._rotation = _Rotation(keep)
        self._executor = concurrent.futures.ThreadPoolExecutor(1)
        self._unfinished: concurrent.futures.Future | None = None  # the last save
        self._orbax = ocp.training.Checkpointer(
            self._staging.local,
            # The training loop decides when to save.
            save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),
            preservation_policy=self._rotation,
            cleanup_tmp_directories=True,
        )
        self._published: list[int] = []  # steps in the run folder, if a temporary folder is used
        self._reload()
        _check_shared(self._folder, self.steps)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind, *_) -> None:
        try:
            self.wait()
            self._orbax.close()
        except _WRITE_FAILURE as error:
            if kind is None:  # must not hide an error of the `with` block
                raise self._failure(error) from error
        finally:
            self._executor.shutdown()
            self._staging.close()

    @property
    def steps(self) -> list[int]:
        if self._staging.is_temporary:
            return self._published
        return [checkpoint.step for checkpoint in self._orbax.checkpoints]

    def _reload(self) -> None:
        """Lists the checkpoints again."""
        self._orbax.reload()
        if self._staging.is_temporary:
            self._published = steps_in(self._folder)

    @property
    def finite_step(self) -> int | None:
        """The step of the newest checkpoint from which a later step was finite."""
        return _newest(self.steps, self.last_finite)

    def save(self, step: int, state: Any, position: dict) -> None:
        """Copies `state` to the host and returns; files are written in the background.

        Raises the error of the previous save, if there was one.
        """
        self.wait()
        if step in self.steps:
            return
        self._rotation.last_finite = self.last_finite
        data = _Position(position | {"last_finite": self.last_finite})
        try:
            with ocp.Context(array_options=_ARRAY_OPTIONS):
                response = self._orbax.save_checkpointables_async(
                    step, {"state": state, "data": data}, force=True
                )
        except _WRITE_FAILURE as error:
            raise self._failure(error) from error

        def finish():
            response.result()
            _write_checksums(self._staging.local / str(step))
            if self._staging.is_temporary:
                self._publish(step)

        self._unfinished = self._executor.submit(finish)

    def _publish(self, step: int) -> None:
        """Moves a checkpoint out of the temporary folder."""
        local, place = self._staging.local / str(step), self._folder / str(step)
        if isinstance(place, URLPath):
            remove(place)  # a partial upload of a process that was killed
            with Staging(place, local) as staging:
                staging.upload(last=_MARK)
        else:
            for leftover in self._folder.glob(f"*{_PARTIAL}"):
                shutil.rmtree(leftover, ignore_errors=True)
            partial = place.with_name(place.name + _PARTIAL)
            with Staging(partial, local) as staging:
                staging.upload()
            partial.rename(place)
        self._published = sorted({*self._published, step})
        shutil.rmtree(local)
        self._delete_surplus()

    def wait(self) -> None:
        """Waits until the last save is complete on disk; raises its error if it failed."""
        unfinished, self._unfinished = self._unfinished, None
        try:
            if unfinished is not None:
                unfinished.result()
        except _WRITE_FAILURE as error:
            raise self._failure(error) from error

    def restore(self, abstract_state: Any) -> tuple[int, Any, dict] | None:
        """Returns (step, state, data position) of the newest readable checkpoint, or None.

        Arrays are sharded as in `abstract_state`, whatever mesh they were saved from. A damaged
        checkpoint is renamed, so that its step can be written again, and the previous one is read.
        All processes restore the same step: a checkpoint that any process cannot read counts as
        damaged. If storage fails, nothing is renamed and no older step is read.

        Raises:
          CheckpointError: storage fails, or none of the checkpoints can be read.
        """
        steps, errors = self.steps, {}
        for step in reversed(steps):
            path = self._folder / str(step)
            loaded, error = _load_together(path, abstract_state, with_data=True)
            if loaded is None:
                errors[step] = error
                continue
            for damaged_step, error in errors.items():
                self._set_aside(damaged_step, error)
            state, position = loaded
            self.last_finite = position.pop("last_finite", None)
            self._rotation.last_finite = self.last_finite
            self._delete_surplus()
            return step, state, position
        if steps:
            # Nothing is renamed: if all of them fail, the cause may lie elsewhere.
            raise CheckpointError(
                f"none of the checkpoints {steps} in {self._folder} can be read"
                f" ({_brief(errors[steps[0]])}); start again with run.existing=overwrite or"
                " another run.folder"
            )
        return None

    def _delete_surplus(self) -> None:
        """Deletes surplus checkpoints, which a killed process may have deleted in part."""
        steps = self.steps
        surplus = [step for step in steps if step not in self._rotation.preserved(steps)]
        if self._staging.is_temporary:  # partial uploads, too
            names = (path.name for path in self._folder.iterdir())
            surplus += [int(name) for name in names if name.isdigit() and int(name) not in steps]
        if not surplus:
            return
        if distributed.is_main_process():
            for step in surplus:
                _delete(self._folder / str(step))
        distributed.barrier("surplus checkpoints deleted")
        self._reload()

    def _set_aside(self, step: int, error: Exception) -> None:
        damaged = self._folder / str(step)
        target = damaged.with_name(f"{step}.damaged")
        warnings.warn(_damaged(damaged, error) + f"; moved to {target.name}", stacklevel=3)
        if distributed.is_main_process():
            for number in range(2, 1000):
                if not target.exists():
                    break
                target = damaged.with_name(f"{step}.damaged{number}")
            if isinstance(damaged, URLPath):
                (damaged / _MARK).unlink(missing_ok=True)
            damaged.rename(target)
        distributed.barrier("damaged checkpoint moved")
        self._reload()

    def _failure(self, error: Exception) -> CheckpointError:
        steps = steps_in(self._folder)
        last = f"step {steps[-1]} is complete and will be resumed" if steps else "none before"
        return CheckpointError(
            f"a checkpoint could not be written to {self._folder}: {_brief(error)}; {last}; "
            "make room (or lower train.keep) and start the same command again"
        )


def steps_in(folder: Path) -> list[int]:
    """Returns the steps of the complete checkpoints in a folder, in ascending order."""
    paths = [path for path in folder.glob("*") if path.name.isdigit()]
    if isinstance(folder, URLPath):
        paths = [path for path in paths if (path / _MARK).is_file()]
    return sorted(int(path.name) for path in paths)


def _delete(path: Path) -> None:
    """Deletes a checkpoint as far as possible; at a URL, its mark is deleted first."""
    if not isinstance(path, URLPath):
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        (path / _MARK).unlink(missing_ok=True)
        remove(path)


def _write_checksums(path: Path) -> None:
    """Writes the sums of the files of a complete checkpoint that this process wrote.

    The first process also writes the sums of the common files.
    """
    process = jax.process_index()

    def writer(file: Path) -> int:
        match = _OF_PROCESS.search(str(file.relative_to(path)))
        return int(match[1]) if match else 0

    # Other processes write their sums at the same moment.
    in_folder = set(path.rglob("*")) - set(path.glob("*" + _CHECKSUMS.format("*")))
    files = [file for file in sorted(in_folder) if file.is_file() and writer(file) == process]
    write_sums(path / _CHECKSUMS.format(process), sums_of(files, path))


def load_state(folder: str | Path, abstract_state: Any, *, step: int | None = None) -> Any:
    """Returns the train state of `step` in `<folder>/checkpoints`; None: the newest readable one.

    Changes nothing in the folder. Leaves that `abstract_state` lacks are not read.

    Raises:
      CheckpointError: there is no such checkpoint, or it cannot be read.
    """
    _quiet_orbax()
    root = to_path(folder).absolute() / FOLDER
    steps = steps_in(root)
    _check_shared(root, steps)
    if not steps or (step is not None and step not in steps):
        absent = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise CheckpointError(f"{root} holds {absent}; there are: {steps or 'none'}")
    for candidate in reversed(steps if step is None else [step]):
        path = root / str(candidate)
        loaded, error = _load_together(path, abstract_state, with_data=False)
        if loaded is not None:
            return loaded[0]
        warnings.warn(_damaged(path, error), stacklevel=2)
    names = f"checkpoint {step}" if step is not None else f"any of the checkpoints {steps}"
    raise CheckpointError(f"cannot read {names} in {root}; files are missing or cut short")


def _check_shared(folder: Path, steps: list[int]) -> None:
    """Raises a CheckpointError if processes see different folders: it is not on shared storage."""
    if not distributed.equal_on_all_processes(str(steps)):
        raise CheckpointError(
            f"{folder} holds other checkpoints for this process ({steps or 'none'}) than for others"
            " of the job; run.folder must lie on storage that all machines share"
        )


def _load_together(
    path: Path, abstract_state: Any, *, with_data: bool
) -> tuple[tuple[Any, dict | None] | None, Exception | None]:
    """Returns ((state, position), None) if every process could read its part, else (None, error).

    A failed read is tried once more. Raises a CheckpointError if the storage fails, rather than the
    contents of the files.
    """
    for attempt in (1, 2):
        loaded, error = None, None
        try:
            loaded = _load(path, abstract_state, with_data=with_data)
        except _DAMAGE as failure:
            error = failure
        worst = distributed.max_over_processes(0 if error is None else 1 + _may_be_whole(error))
        if worst == 0:
            return loaded, None
        if attempt == 1:
            loaded = None  # memory may not hold a second state
            time.sleep(_PAUSE)
    error = error or CheckpointError("another process of the job cannot read its part")
    if worst == 2:
        raise CheckpointError(
            f"checkpoint {path} cannot be read now ({_brief(error)}), although it may be whole;"
            " nothing was changed: start the same command again when its storage answers"
        ) from error
    return None, error


def _may_be_whole(error: Exception) -> bool:
    """Returns whether the storage failed (no answer, no permission), not the files' contents."""
    if is_storage_failure(error):  # before `_root`: its cause may be any error of a package
        return True
    error = _root(error)
    if isinstance(error, OSError):
        return not isinstance(error, _MISSING)
    status = _STATUS.match(str(error))
    return status is not None and status[1] not in _OF_CONTENT


def _load(path: Path, abstract_state: Any, *, with_data: bool) -> tuple[Any, dict | None]:
    with Staging(path) as staging:
        staging.download()
        return _load_local(staging.local, abstract_state, with_data=with_data)


def _load_local(path: Path, abstract_state: Any, *, with_data: bool) -> tuple[Any, dict | None]:
    # Checked before orbax reads, which logs a lot about files that it cannot read.
    checksums = sorted(path.glob(_CHECKSUMS.format("*")))
    check_sums(checksums, part=jax.process_index(), num_parts=jax.process_count())
    position = _Position()
    abstract = {"state": abstract_state} | ({"data": position} if with_data else {})
    # Each process reads its parts alone: if one failed, the others would wait for it.
    index = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=index, active_processes={index})
    context = ocp.Context(multiprocessing_options=alone if jax.process_count() > 1 else None)
    context.pytree.loading.partial_load = not with_data
    with context:
        loaded = ocp.load_checkpointables(path, abstract)
    return loaded["state"], position.value


def _damaged(path: Path, error: Exception) -> str:
    return f"checkpoint {path} is damaged ({_brief(error)}), looking at the one before"


def _brief(error: Exception) -> str:
    return one_line(_root(error))[:200]


def _root(error: Exception) -> Exception:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


class _OrbaxFilter(logging.Filter):
    """Drops orbax's log of every failed thread with its stack; the raised error is enough."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "orbax" not in record.pathname or record.levelno >= logging.CRITICAL


def _quiet_orbax() -> None:
    logger = logging.getLogger("absl")
    if not any(isinstance(known, _OrbaxFilter) for known in logger.filters):
        logger.addFilter(_OrbaxFilter())


def _can_sync(folder: Path | URLPath) -> bool:
    """Returns whether files in a folder can be synced, locked, and renamed over others.

    Some mounted folders do not support it (FUSE, network file systems). A URL does not need it.
    """
    if isinstance(folder, URLPath) or fcntl is None:
        return True
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f".lcjax-{os.getpid()}.tmp"
    try:
        with path.open("w") as file:
            os.fsync(file.fileno())
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.lockf(file, fcntl.LOCK_UN)  # on NFS flock is a lock of this kind, too
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.with_suffix(".to").touch()
        path.replace(path.with_suffix(".to"))
    except OSError:
        return False
    finally:
        for file in (path, path.with_suffix(".to")):
            file.unlink(missing_ok=True)
    return True
