"""Runs that are on disk: read again, reported again, judged again."""

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import draccus

from lcjax import config as config_lib
from lcjax.convert.load import load_tokenizer
from lcjax.errors import InputError
from lcjax.evaluation import report
from lcjax.evaluation.config import EvalConfig
from lcjax.evaluation.records import FORMAT, MARKER, clean, fingerprint
from lcjax.evaluation.task import Record, Task
from lcjax.files import write_whole


@dataclasses.dataclass(frozen=True)
class Finished:
    """What a run folder holds; a run that was stopped has fewer records."""

    folder: Path
    config: EvalConfig
    settings: dict[str, Any]  # as they decide the records
    tasks: dict[Task, list[Record]]
    made: dict[str, Any]  # versions and device, as far as the run noted them

    @property
    def hash(self) -> str:
        """Of what decides the records."""
        return fingerprint(self.settings)

    @property
    def order(self) -> list[str]:
        return [method.name for method in self.config.methods]


def read(folder: str | Path, overrides: Sequence[str] = ()) -> Finished:
    """The run in `folder`; `overrides` such as `--tasks.0.match=token_ids` change its config."""
    folder = Path(folder)
    if not (folder / MARKER).exists():
        raise InputError(
            f"{folder} holds no run of eval.py ({MARKER} is not there); name the run.folder of one"
        )
    config = config_lib.parse(EvalConfig, [f"--config={folder / 'config.yaml'}", *overrides])
    marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    tasks = {task: _records(folder / "records" / f"{task.label}.jsonl") for task in config.tasks}
    tasks = {task: records for task, records in tasks.items() if records}
    known = {method.name for method in config.methods}
    for task, records in tasks.items():
        strangers = {record["method"] for record in records} - known
        if strangers:
            raise InputError(
                f"{folder}: {task.label} has records of {', '.join(sorted(strangers))}, which"
                " config.yaml does not name; put the method back there, or take its lines out"
            )
    if not tasks:
        raise InputError(f"{folder} holds no records; let python eval.py run first")
    return Finished(folder, config, marker["config"], tasks, _made(folder))


def _made(folder: Path) -> dict[str, Any]:
    path = folder / "summary.json"
    if not path.exists():
        return {"versions": {}, "device": None}
    summary = json.loads(path.read_text(encoding="utf-8"))
    return {key: summary.get(key) for key in ("versions", "device")}


def _records(path: Path) -> list[Record]:
    """By method, length and unit, the last line counts; lines that are none are named."""
    found: dict[tuple, Record] = {}
    if not path.exists():
        return []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            record = json.loads(line)
            found[record["method"], record["length"], record["window"]] = record
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
            print(f"warning: {path}:{number} is not a record and is left out", file=sys.stderr)
    return list(found.values())


def rebuild(folder: str | Path) -> report.Report:
    """Tables, figures, summary and page of a run, made again from its records alone."""
    run = read(folder)
    notes = run.folder / "tables" / "training.md"
    text = notes.read_text(encoding="utf-8") if notes.exists() else ""
    return report.write(
        run.folder, run.settings, run.tasks, order=run.order, notes=text, made=run.made
    )


def score(
    folder: str | Path,
    out: str | Path | None = None,
    overrides: Sequence[str] = (),
    *,
    tokenizer: Callable[[str], Any] = load_tokenizer,
) -> report.Report:
    """Judges the answers of a run again, by other settings of its tasks, in the new folder `out`.

    None is the run's own folder with `_scored` behind its name. Tasks without answers keep their
    records. `tokenizer` opens that of a checkpoint by path.
    """
    run = read(folder, overrides)
    out = Path(out) if out is not None else run.folder.with_name(f"{run.folder.name}_scored")
    if out.resolve() == run.folder.resolve():
        raise InputError(f"--out={out} is the run itself, whose records are kept; name another")
    if (out / "records").exists():
        raise InputError(f"--out={out} holds records already; name another folder")
    config = dataclasses.replace(
        run.config, run=dataclasses.replace(run.config.run, folder=str(out))
    )
    _check_same_questions(run, config)
    tasks = {task: _rescored(run, task, records, tokenizer) for task, records in run.tasks.items()}
    settings = draccus.encode(config)
    for task, records in tasks.items():
        lines = "".join(json.dumps(clean(record)) + "\n" for record in records)
        write_whole(out / "records" / f"{task.label}.jsonl", lines)
    entry = {"format": FORMAT, "hash": fingerprint(settings), "config": settings}
    write_whole(out / MARKER, json.dumps(entry, indent=1, default=str) + "\n")
    config_lib.dump(config, out / "config.yaml")
    return report.write(out, settings, tasks, order=run.order, made=run.made)


def _check_same_questions(run: Finished, config: EvalConfig) -> None:
    """Only tasks may change: everything else decides what the model was asked."""
    before = read(run.folder).config
    kept = dataclasses.replace(config, tasks=before.tasks, run=before.run)
    if kept != before:
        changed = [
            field.name
            for field in dataclasses.fields(kept)
            if getattr(kept, field.name) != getattr(before, field.name)
        ]
        raise InputError(
            f"{changed[0]} decides what the model was asked; score changes --tasks.* alone"
        )


def _rescored(run: Finished, task: Task, records: Sequence[Record], tokenizer) -> list[Record]:
    if not any("answer" in record for record in records):
        return list(records)
    paths = {m.name: m.path or run.config.model.path for m in run.config.methods}
    opened: dict[str | None, Any] = {}
    found = []
    for record in records:
        path = paths[record["method"]]
        if path is None:
            raise InputError("model.path is not set, so the answers have no tokenizer to judge by")
        if path not in opened:
            opened[path] = tokenizer(path)
        found.append(task.rescored(record, opened[path]))
    return found
