"""Runs that are on disk, read again."""

import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lcjax import config as config_lib
from lcjax.checkpoints.build import ModelSection
from lcjax.errors import InputError
from lcjax.evaluation import report, study
from lcjax.evaluation.config import EvalConfig
from lcjax.evaluation.methods import sections
from lcjax.evaluation.records import (
    CONFIG,
    MARKER,
    WEIGHTS,
    by_cell,
    fingerprint,
    parse,
    records_file,
)
from lcjax.evaluation.report.report import NOTES
from lcjax.evaluation.task import Record, Task

TRAINED_IN = "trained_in"  # of a marker: where the models lie, seen from its folder


@dataclasses.dataclass(frozen=True)
class Finished:
    """What a run folder holds; a run that was stopped has fewer records."""

    folder: Path
    config: EvalConfig
    settings: dict[str, Any]  # as they decide the records, with those of trainings
    tasks: dict[Task, list[Record]]  # those that have records
    made: dict[str, Any]  # versions and device, as far as the run noted them
    notes: str  # Markdown about trainings
    trained_in: Path  # the run whose folder holds what was trained; most often this one
    weights: dict[str, str]  # what the checkpoint of each method held, as far as it was noted

    @property
    def hash(self) -> str:
        """Of what decides the records."""
        return fingerprint(self.settings)

    @property
    def order(self) -> list[str]:
        return [method.name for method in self.config.methods]

    @property
    def models(self) -> dict[str, ModelSection]:
        """What each method was loaded from; a run may have been moved, with what it trained."""
        here = dataclasses.replace(self.config.run, folder=str(self.trained_in))
        config = study.with_trained(dataclasses.replace(self.config, run=here))
        return dict(zip(self.order, sections(config), strict=True))

    def cells(self) -> Iterator[tuple[str, Task, int, list[Record]]]:
        """(method, task, length, records) of every cell, in the order of the run."""
        groups = {task: by_cell(records, self.order) for task, records in self.tasks.items()}
        for name in self.order:
            for task, cells in groups.items():
                for (method, length), records in cells.items():
                    if method == name:
                        yield method, task, length, records


def read(folder: str | Path) -> Finished:
    """The run in `folder`."""
    folder = Path(folder)
    if not (folder / MARKER).exists():
        raise InputError(
            f"{folder} holds no run of eval.py ({MARKER} is not there); name the run.folder of one"
        )
    config = config_lib.parse(EvalConfig, [f"--config={folder / CONFIG}"])
    marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    tasks = {task: _records(records_file(folder, task.label)) for task in config.tasks}
    tasks = {task: records for task, records in tasks.items() if records}
    known = {method.name for method in config.methods}
    for task, records in tasks.items():
        strangers = {record["method"] for record in records} - known
        if strangers:
            raise InputError(
                f"{folder}: {task.label} has records of {', '.join(sorted(strangers))}, which"
                f" {CONFIG} does not name; put the method back there, or take its lines out"
            )
    if not tasks:
        raise InputError(f"{folder} holds no records; let python eval.py run first")
    notes = folder / NOTES
    text = notes.read_text(encoding="utf-8") if notes.exists() else ""
    trained_in = Path(os.path.normpath(folder / marker.get(TRAINED_IN, "")))
    return Finished(
        folder, config, marker["config"], tasks, _made(folder), text, trained_in,
        marker.get(WEIGHTS, {}),
    )  # fmt: skip


def _made(folder: Path) -> dict[str, Any]:
    path = folder / "summary.json"
    if not path.exists():
        return {"versions": {}, "device": None}
    summary = json.loads(path.read_text(encoding="utf-8"))
    return {key: summary.get(key) for key in ("versions", "commit", "device", "models")}


def _records(path: Path) -> list[Record]:
    """Lines that are no records are named and left out."""
    records, damaged = parse(path.read_bytes()) if path.exists() else ({}, [])
    for number in damaged:
        print(f"warning: {path}:{number} is not a record and is left out", file=sys.stderr)
    return list(records.values())


def rebuild(run: Finished) -> report.Report:
    """Tables, figures, summary and page of a run, made again from its records alone."""
    return report.write(
        run.folder, run.settings, run.tasks, order=run.order, notes=run.notes, made=run.made
    )
