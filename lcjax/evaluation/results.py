"""Results of a run on disk: read, reported again, and scored again."""

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import draccus

from lcjax import config as config_lib
from lcjax.checkpoints.build import ModelSection
from lcjax.errors import InputError
from lcjax.evaluation import report, study
from lcjax.evaluation.eval_config import EvalConfig, sections, tokenizer_of
from lcjax.evaluation.records import (
    CONFIG,
    COSTS,
    EARLIER,
    INPUTS,
    MARKER,
    by_cell,
    check_origin,
    costs_file,
    describe,
    fingerprint,
    named_records,
    parse,
    read_marker,
    record_lines,
    records_file,
    split_costs,
    write_folder_sums,
)
from lcjax.evaluation.report.report import NOTES
from lcjax.evaluation.task import Record, Task
from lcjax.files import FolderSums, read_json, read_text, write_whole
from lcjax.storage import check_regular, is_url, to_path

# Key of a marker: the folder of the trained models, relative to the run folder.
TRAINED_IN = "trained_in"


@dataclasses.dataclass(frozen=True)
class Results:
    """The content of a run folder; a run that was stopped has fewer records."""

    folder: Path
    config: EvalConfig
    settings: dict[str, Any]  # of the run and its trainings
    tasks: dict[Task, list[Record]]  # records by task, without tasks that have none
    environment: dict[str, Any]  # versions, commit, device and models, from summary.json
    notes: str  # Markdown about trainings
    models_folder: Path  # the run folder with the models of the study
    inputs: dict[str, str]  # identities of checkpoints and datastores, if recorded

    @property
    def hash(self) -> str:
        """Hash of the settings that determine the records."""
        return fingerprint(self.settings)

    @property
    def order(self) -> list[str]:
        return [method.name for method in self.config.methods]

    @property
    def models(self) -> dict[str, ModelSection]:
        """The model section of each method, also after the run folder was moved."""
        section = dataclasses.replace(self.config.run, folder=str(self.models_folder))
        config = study.with_trained(dataclasses.replace(self.config, run=section))
        return dict(zip(self.order, sections(config), strict=True))

    def cells(self) -> Iterator[tuple[str, Task, int, list[Record]]]:
        """Yields (method, task, length, records) of every cell, in the order of the run."""
        groups = {task: by_cell(records, self.order) for task, records in self.tasks.items()}
        for name in self.order:
            for task, cells in groups.items():
                for (method, length), records in cells.items():
                    if method == name:
                        yield method, task, length, records


def read(folder: str | Path) -> Results:
    """Reads a run folder.

    Raises:
      InputError: `folder` is no run of eval.py, or has no records.
    """
    folder = to_path(folder)
    check_regular(folder)
    if not (folder / MARKER).exists():
        raise InputError(
            f"{folder} holds no run of eval.py ({MARKER} is not there); name the run.folder of one"
        )
    if not config_lib.read_yaml(folder / CONFIG):
        raise InputError(f"{folder / CONFIG} is empty; restore it, or run the evaluation again")
    config = config_lib.parse(EvalConfig, [f"--config={folder / CONFIG}"], is_stored=True)
    marker = read_marker(folder)
    methods = {method.name for method in config.methods}
    earlier = marker.get(EARLIER, {}).get("methods", {})
    tasks = {
        task: [r for r in _records(folder, task.label) if r["method"] not in earlier]
        for task in config.tasks
    }
    tasks = {task: records for task, records in tasks.items() if records}
    for task, records in tasks.items():
        unknown = {record["method"] for record in records} - methods
        if unknown:
            raise InputError(
                f"{folder}: {task.label} has records of {', '.join(sorted(unknown))}, which"
                f" {CONFIG} does not name; put the method back there, or take its lines out"
            )
    if not tasks:
        raise InputError(f"{folder} holds no records; let python eval.py run first")
    notes = folder / NOTES
    text = read_text(notes) if notes.exists() else ""
    models_folder = marker.get(TRAINED_IN, "")
    if is_url(models_folder) or is_url(folder):
        models_folder = to_path(models_folder or folder)
    else:
        models_folder = Path(os.path.normpath(folder / models_folder))
    return Results(
        folder, config, marker["config"], tasks, _environment(folder), text, models_folder,
        marker.get(INPUTS, {}),
    )  # fmt: skip


def _environment(folder: Path) -> dict[str, Any]:
    path = folder / "summary.json"
    if not path.exists():
        return {"versions": {}, "device": None}
    summary = read_json(path)
    environment = {key: summary.get(key) for key in ("versions", "commit", "device", "models")}
    return environment | {"versions": environment["versions"] or {}}


def _records(folder: Path, task: str) -> list[Record]:
    """Reads the records of a task; lines that are not records are reported and skipped."""
    paths = records_file(folder, task), costs_file(folder, task)
    sums = FolderSums(folder, "it lacks lines, or was changed by hand")
    for path in paths:
        try:
            sums.check(path.relative_to(folder).as_posix())
        except InputError as error:
            print(f"warning: {error}", file=sys.stderr)
    records, damaged = parse(*(path.read_bytes() if path.exists() else b"" for path in paths))
    for kind, number in damaged:
        path = paths[kind == COSTS]
        print(f"warning: {path}:{number} is not a record and is left out", file=sys.stderr)
    return list(records.values())


def rebuild(run: Results) -> report.Report:
    """Writes tables, figures, summary and page of a run again, from its records alone."""
    with named_records(run.folder):
        result = report.write(
            run.folder,
            run.settings,
            run.tasks,
            order=run.order,
            published=run.config.published,
            notes=run.notes,
            environment=run.environment,
        )
    write_folder_sums(run.folder)
    return result


def score(
    folder: str | Path, out: str | Path | None = None, overrides: Sequence[str] = ()
) -> report.Report:
    """Scores the answers of a run again, without running the model.

    Args:
      folder: The run folder.
      out: The new folder; None appends `_scored` to the name of the run folder.
      overrides: Settings of tasks as on the command line, such as `--tasks.0.match=first_digits`.

    Returns:
      The report of the new folder.

    Raises:
      InputError: `out` has records, or a changed setting affects the prompts.
    """
    run = read(folder)
    out = to_path(out) if out is not None else run.folder.with_name(f"{run.folder.name}_scored")
    if out.resolve() == run.folder.resolve():
        raise InputError(f"--out={out} is the run itself, whose records are kept; name another")
    if (out / "records").exists():
        raise InputError(f"--out={out} holds records already; name another folder")
    check_origin(out)
    words = [f"--config={run.folder / CONFIG}", *overrides]
    config = config_lib.parse(EvalConfig, words, is_stored=True)
    _check_same_prompts(run.config, config)
    tokenizer_for = _tokenizers(run)
    with named_records(run.folder):
        tasks = {
            new: [new.rescore(record, tokenizer_for(record)) for record in run.tasks[old]]
            for old, new in zip(run.config.tasks, config.tasks, strict=True)
            if old in run.tasks
        }
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, folder=str(out)))
    settings = draccus.encode(config)
    if "trainings" in run.settings:  # the config has only their files' names
        settings["trainings"] = run.settings["trainings"]
    for task, records in tasks.items():
        results, costs = split_costs(records)
        write_whole(costs_file(out, task.label), record_lines(costs))
        write_whole(records_file(out, task.label), record_lines(results))
    models = str(run.models_folder)
    if not is_url(models) and not is_url(out):
        models = os.path.relpath(models, out)
    marker = {TRAINED_IN: models, INPUTS: run.inputs}
    describe(out, config, settings, **marker)
    return rebuild(dataclasses.replace(run, folder=out, settings=settings, tasks=tasks))


def _check_same_prompts(before: EvalConfig, config: EvalConfig) -> None:
    """Raises InputError if a changed setting affects more than the scores."""
    others = dataclasses.replace(config, tasks=before.tasks, run=before.run)
    if changed := _changed_fields(before, others):
        raise InputError(f"{changed[0]} affects the prompts; `score` can change only --tasks.*")
    if len(config.tasks) != len(before.tasks):
        raise InputError("tasks: score keeps the tasks of the run; change fields of --tasks.* only")
    for index, (old, new) in enumerate(zip(before.tasks, config.tasks)):
        free = ("name", *old.scoring_settings)
        changed = [field for field in _changed_fields(old, new) if field not in free]
        if type(old) is not type(new):
            changed = ["type"]
        if changed:
            raise InputError(
                f"tasks.{index}.{changed[0]} affects the prompts; for {old.label}, `score` can"
                f" change only {', '.join(free)}"
            )


def _changed_fields(old: Any, new: Any) -> list[str]:
    """Returns the names of the fields that differ between two dataclasses."""
    names = [field.name for field in dataclasses.fields(old)]
    return [name for name in names if getattr(old, name) != getattr(new, name, None)]


def _tokenizers(run: Results) -> Callable[[Record], Any]:
    """Returns a function from a record to its tokenizer, or to None without an answer."""
    model_sections, loaded = run.models, {}

    def tokenizer(record: Record) -> Any:
        if "answer" not in record:
            return None
        section = model_sections[record["method"]]
        key = section.tokenizer, section.path, section.preset
        if key not in loaded:
            loaded[key] = tokenizer_of(section)
        return loaded[key]

    return tokenizer
