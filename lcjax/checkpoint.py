"""Checkpoints of a run: written beside the training, found again after any accident.

The only module that knows orbax (API v1). A checkpoint is a folder `<run>/checkpoints/<step>` with
the train state and the position in the data. orbax writes it under a temporary name and renames
it when it is complete, so a killed process or a full disk leaves the earlier ones as they were.
"""

import asyncio
import json
import logging
import warnings
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from lcjax.errors import InputError

FOLDER = "checkpoints"
# What orbax and tensorstore raise for files that are cut short, missing or not theirs.
_DAMAGE = (OSError, ValueError, LookupError)
_WRITE_FAILURE = (OSError, ValueError)


class CheckpointError(InputError):
    """A checkpoint could not be written or read; the message says what is left and what to do."""


class _Position:
    """The data position as one JSON file; the same on every process, written by the first."""

    _file = "position.json"

    def __init__(self, value: dict | None = None):
        self.value = value

    async def save(self, directory):
        text = json.dumps(self.value)

        async def write():
            folder = await directory.await_creation()
            if jax.process_index() == 0:
                await asyncio.to_thread((folder / self._file).write_text, text)

        return write()

    async def load(self, directory):
        async def read():
            self.value = json.loads(await asyncio.to_thread((directory / self._file).read_text))

        return read()


class Checkpoints:
    """The checkpoints of one run folder; use it as a context manager."""

    def __init__(self, folder: str | Path, *, keep: int = 2):
        _quiet_orbax()
        self._folder = Path(folder).absolute() / FOLDER
        self._orbax = ocp.training.Checkpointer(
            self._folder,
            # When to save is the training loop's decision.
            save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),
            preservation_policy=ocp.training.preservation_policies.LatestN(keep),
            cleanup_tmp_directories=True,
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind, *_) -> None:
        try:
            self._orbax.close()
        except _WRITE_FAILURE as error:
            if kind is None:  # else the first error is the one to see
                raise self._failure(error) from error

    @property
    def steps(self) -> list[int]:
        return [found.step for found in self._orbax.checkpoints]

    def save(self, step: int, state: Any, position: dict) -> None:
        """Copies `state` to the host and returns; files are written in the background.

        Raises what went wrong with the save before, if anything did.
        """
        if step in self.steps:
            return
        try:
            self._orbax.save_checkpointables_async(
                step, {"state": state, "data": _Position(position)}, force=True
            )
        except _WRITE_FAILURE as error:
            raise self._failure(error) from error

    def wait(self) -> None:
        """Returns when the last save is complete on disk; raises if it could not be."""
        try:
            self._orbax.wait()
        except _WRITE_FAILURE as error:
            raise self._failure(error) from error

    def restore(self, abstract_state: Any) -> tuple[int, Any, dict] | None:
        """(step, state, data position) of the newest checkpoint that can be read, or None.

        Arrays are laid out as `abstract_state` says, whatever mesh they were saved from. A damaged
        checkpoint is renamed, so that its step can be written again, and the one before is taken.
        """
        found, damaged = self.steps, {}
        for step in reversed(found):
            try:
                state, position = _load(self._folder / str(step), abstract_state, with_data=True)
            except _DAMAGE as error:
                damaged[step] = error
                continue
            for bad, error in damaged.items():
                self._set_aside(bad, error)
            return step, state, position
        if found:
            # Nothing is moved: when all of them fail, the cause may lie elsewhere.
            raise CheckpointError(
                f"none of the checkpoints {found} in {self._folder} can be read"
                f" ({_brief(damaged[found[0]])}); start again with run.existing=overwrite or"
                " another run.folder"
            )
        return None

    def _set_aside(self, step: int, error: Exception) -> None:
        damaged = self._folder / str(step)
        aside = damaged.with_name(f"{step}.damaged")
        warnings.warn(_damaged(damaged, error) + f"; moved to {aside.name}", stacklevel=3)
        if jax.process_index() == 0:
            for number in range(2, 1000):
                if not aside.exists():
                    break
                aside = damaged.with_name(f"{step}.damaged{number}")
            damaged.rename(aside)
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("lcjax: damaged checkpoint moved")
        self._orbax.reload()

    def _failure(self, error: Exception) -> CheckpointError:
        complete = sorted(int(p.name) for p in self._folder.glob("*") if p.name.isdigit())
        kept = f"step {complete[-1]} is complete and will be resumed" if complete else "none before"
        return CheckpointError(
            f"a checkpoint could not be written to {self._folder}: {_brief(error)}; {kept}; "
            "make room (or lower train.keep) and start the same command again"
        )


def load_state(folder: str | Path, abstract_state: Any, *, step: int | None = None) -> Any:
    """The train state of `<folder>/checkpoints`, read only: of `step`, else the newest readable.

    Leaves that `abstract_state` does not name are not read.
    """
    _quiet_orbax()
    root = Path(folder).absolute() / FOLDER
    steps = sorted(int(path.name) for path in root.glob("*") if path.name.isdigit())
    if not steps or (step is not None and step not in steps):
        wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise CheckpointError(f"{root} holds {wanted}; there are: {steps or 'none'}")
    for candidate in reversed(steps if step is None else [step]):
        try:
            return _load(root / str(candidate), abstract_state, with_data=False)[0]
        except _DAMAGE as error:
            warnings.warn(_damaged(root / str(candidate), error), stacklevel=2)
    unread = f"checkpoint {step}" if step is not None else f"any of the checkpoints {steps}"
    raise CheckpointError(f"cannot read {unread} in {root}; files are missing or cut short")


def _load(path: Path, abstract_state: Any, *, with_data: bool) -> tuple[Any, dict | None]:
    position = _Position()
    wanted = {"state": abstract_state} | ({"data": position} if with_data else {})
    context = ocp.Context()
    context.pytree.loading.partial_load = not with_data
    with context:
        loaded = ocp.load_checkpointables(path, wanted)
    return loaded["state"], position.value


def _damaged(path: Path, error: Exception) -> str:
    return f"checkpoint {path} is damaged ({_brief(error)}), looking at the one before"


def _brief(error: Exception) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())[:200]


class _OrbaxFilter(logging.Filter):
    """orbax logs every failed thread with its stack; the error that it then raises is enough."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "orbax" not in record.pathname or record.levelno >= logging.CRITICAL


def _quiet_orbax() -> None:
    logger = logging.getLogger("absl")
    if not any(isinstance(known, _OrbaxFilter) for known in logger.filters):
        logger.addFilter(_OrbaxFilter())
