"""Answers of a finished run, judged again by other settings of its tasks."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import draccus

from lcjax import config as config_lib
from lcjax.checkpoints.load import load_tokenizer
from lcjax.config.files import write_whole
from lcjax.errors import InputError
from lcjax.evaluation import report
from lcjax.evaluation.config import EvalConfig
from lcjax.evaluation.finished import TRAINED_IN, Finished, read
from lcjax.evaluation.methods import tokenizer_of
from lcjax.evaluation.records import CONFIG, WEIGHTS, describe, records_file, to_lines
from lcjax.evaluation.task import Record


def score(
    folder: str | Path,
    out: str | Path | None = None,
    overrides: Sequence[str] = (),
    *,
    tokenizer: Callable[[str], Any] = load_tokenizer,
) -> report.Report:
    """Judges the answers of a run again, in the new folder `out`; `overrides` as in a command.

    None is the run's own folder with `_scored` behind its name. `tokenizer` opens that of a
    checkpoint by path.
    """
    run = read(folder)
    out = Path(out) if out is not None else run.folder.with_name(f"{run.folder.name}_scored")
    if out.resolve() == run.folder.resolve():
        raise InputError(f"--out={out} is the run itself, whose records are kept; name another")
    if (out / "records").exists():
        raise InputError(f"--out={out} holds records already; name another folder")
    config = config_lib.parse(EvalConfig, [f"--config={run.folder / CONFIG}", *overrides])
    _check_same_questions(run.config, config)
    opened = _Tokenizers(run, tokenizer)
    tasks = {
        new: [new.rescored(record, opened.of(record)) for record in run.tasks[old]]
        for old, new in zip(run.config.tasks, config.tasks, strict=True)
        if old in run.tasks
    }
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, folder=str(out)))
    settings = {**draccus.encode(config), **_trainings(run)}
    for task, records in tasks.items():
        write_whole(records_file(out, task.label), to_lines(records))
    notes = {TRAINED_IN: os.path.relpath(run.trained_in, out), WEIGHTS: run.weights}
    describe(out, config, settings, **notes)
    return report.write(out, settings, tasks, order=run.order, notes=run.notes, made=run.made)


def _trainings(run: Finished) -> dict[str, Any]:
    """What decides trained models, which a config only names."""
    return {key: run.settings[key] for key in ("trainings",) if key in run.settings}


def _check_same_questions(before: EvalConfig, config: EvalConfig) -> None:
    """Only what judges answers may change: everything else decides what the model was asked."""
    rest = dataclasses.replace(config, tasks=before.tasks, run=before.run)
    if changed := _changed(before, rest):
        raise InputError(
            f"{changed[0]} decides what the model was asked; score changes --tasks.* alone"
        )
    if len(config.tasks) != len(before.tasks):
        raise InputError("tasks: score keeps the tasks of the run; change fields of --tasks.* only")
    for index, (old, new) in enumerate(zip(before.tasks, config.tasks)):
        free = ("name", *old.judging)
        changed = [field for field in _changed(old, new) if field not in free]
        if type(old) is not type(new):
            changed = ["type"]
        if changed:
            raise InputError(
                f"tasks.{index}.{changed[0]} decides what the model was asked; of {old.label} score"
                f" may change {', '.join(free)}"
            )


def _changed(old: Any, new: Any) -> list[str]:
    """Names of the fields of a dataclass that differ."""
    names = [field.name for field in dataclasses.fields(old)]
    return [name for name in names if getattr(old, name) != getattr(new, name, None)]


class _Tokenizers:
    """That of the model which wrote a record, opened when it is first asked for."""

    def __init__(self, run: Finished, load: Callable[[str], Any]):
        self._sections, self._load, self._opened = run.models, load, {}

    def of(self, record: Record) -> Any:
        """None where nothing was answered."""
        if "answer" not in record:
            return None
        section = self._sections[record["method"]]
        key = section.tokenizer, section.path, section.preset
        if key not in self._opened:
            self._opened[key] = tokenizer_of(section, self._load)
        return self._opened[key]
