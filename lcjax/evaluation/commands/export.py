"""Records in the formats of the official scorers, which can then judge the same answers.

lm_eval: `results.json` and `samples_*.jsonl` of lm-evaluation-harness, one folder a method.
longbench: `pred/METHOD/DATASET.jsonl` and `result.json`, as LongBench's `eval.py` reads and writes.
ruler: `METHOD/LENGTH/TASK.jsonl` and `summary.csv`, as RULER's `evaluate.py` reads and writes.
"""

import csv
import io
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lcjax.errors import InputError, one_of
from lcjax.evaluation.finished import Finished
from lcjax.evaluation.records import clean
from lcjax.evaluation.task import Record, Task
from lcjax.files import write_whole


def export(run: Finished, formats: Sequence[str], out: Path) -> list[Path]:
    """Writes the run under `out`, one folder a format; returns the files."""
    for name in formats:
        one_of("--export", name, _FORMATS)
    return [path for name in formats for path in _FORMATS[name](run, out / name)]


def _cells(run: Finished) -> Iterator[tuple[str, Task, int, list[Record]]]:
    """(method, task, length, records) of every cell, in the order of the run."""
    for method in run.order:
        for task, records in run.tasks.items():
            own = [record for record in records if record["method"] == method]
            for length in sorted({record["length"] for record in own}):
                found = [record for record in own if record["length"] == length]
                yield method, task, length, sorted(found, key=lambda record: record["window"])


def _answered(run: Finished, name: str) -> list[tuple[str, Task, int, list[Record]]]:
    cells = [cell for cell in _cells(run) if all("answer" in record for record in cell[3])]
    if not cells:
        raise InputError(
            f"--export={name}: {run.folder} has no answers, which that format is made of; lm_eval"
            " takes every task"
        )
    return cells


def part_of(task: Task, facts: Mapping[str, Any]) -> str:
    """The data set or sub-task that facts or a record name, or the task itself."""
    return str(facts.get("dataset") or facts.get("task") or task.label)


def _folder(run: Finished, method: str) -> str:
    """The name of a method as that of a folder; two that become equal are counted."""
    plain = [re.sub(r"[^\w.+-]+", "_", name).strip("_.") or "_" for name in run.order]
    place = run.order.index(method)
    twins = plain[:place].count(plain[place])
    return f"{plain[place]}_{twins + 1}" if twins else plain[place]


def _lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    write_whole(path, "".join(json.dumps(clean(row), ensure_ascii=False) + "\n" for row in rows))
    return path


def _lm_eval(run: Finished, out: Path) -> list[Path]:
    methods: dict[str, list[tuple[Task, int, list[Record]]]] = {}
    for method, task, length, records in _cells(run):
        methods.setdefault(method, []).append((task, length, records))
    files = []
    for method, cells in methods.items():
        folder, results = out / _folder(run, method), _lm_eval_frame(run, method)
        for task, length, records in cells:
            name, metric = f"{task.label}_{length}", task.metric.name
            value = task.summarise(records)["value"]
            results["results"][name] = {
                "alias": name,
                f"{metric},none": value,
                f"{metric}_stderr,none": _standard_error(task, records),
            }
            results["versions"][name] = records[0]["protocol"]
            results["n-shot"][name] = 0
            results["higher_is_better"][name] = {metric: not task.metric.lower_is_better}
            results["n-samples"][name] = {"original": len(records), "effective": len(records)}
            results["configs"][name] = {"task": name, "metadata": {"length": length}}
            results["group_subtasks"][name] = []
            rows = [_sample(task, record, metric) for record in records]
            files.append(_lines(folder / f"samples_{name}.jsonl", rows))
        path = folder / "results.json"
        write_whole(path, json.dumps(clean(results), indent=2, ensure_ascii=False) + "\n")
        files.append(path)
    return files


def _lm_eval_frame(run: Finished, method: str) -> dict[str, Any]:
    names = ("results", "group_subtasks", "configs", "versions", "n-shot", "higher_is_better")
    own = next(entry for entry in run.config.methods if entry.name == method)
    model = own.path or run.config.model.path or run.config.model.preset
    return {
        **{name: {} for name in (*names, "n-samples")},
        "config": {
            "model": "lcjax",
            "model_args": f"path={model},method={method}",
            "batch_size": run.config.batch_size,
            "device": run.made.get("device"),
            "random_seed": run.config.seed,
        },
        "lcjax": {"hash": run.hash, "versions": run.made.get("versions")},
    }


def _standard_error(task: Task, records: Sequence[Record]) -> float | str:
    """Of a mean; "N/A", as lm-eval has it, where the number is none."""
    values = [value for record in records if (value := task.example(record)) is not None]
    if task.metric.lower_is_better or len(values) < 2:
        return "N/A"
    return float(np.std(values, ddof=1) / math.sqrt(len(values)))


def _sample(task: Task, record: Record, metric: str) -> dict[str, Any]:
    answer, references = record.get("answer"), task.references(record)
    return {
        "doc_id": record["window"],
        "doc": {key: value for key, value in record.items() if key != "answer"},
        "target": references[0] if references else "",
        "arguments": {},
        "resps": [] if answer is None else [[answer]],
        "filtered_resps": [] if answer is None else [answer],
        "filter": "none",
        "metrics": [metric],
        "doc_hash": record["digest"],
        metric: task.example(record),
    }


def _longbench(run: Finished, out: Path) -> list[Path]:
    """One folder of predictions for each method and length, in LongBench's own numbers of 0-100."""
    folders: dict[Path, dict[str, list[tuple[Task, Record]]]] = {}
    for method, task, length, records in _answered(run, "longbench"):
        sets = folders.setdefault(out / str(length) / "pred" / _folder(run, method), {})
        for record in records:
            sets.setdefault(part_of(task, record), []).append((task, record))
    files = []
    for folder, sets in folders.items():
        for name, found in sets.items():
            rows = [
                {
                    "pred": record["answer"],
                    "answers": task.references(record),
                    "all_classes": record.get("all_classes"),
                    "length": record.get("words", record["size"]),
                }
                for task, record in found
            ]
            files.append(_lines(folder / f"{name}.jsonl", rows))
        files.append(folder / "result.json")
        scores = {name: _percent(found) for name, found in sets.items()}
        write_whole(files[-1], json.dumps(scores, ensure_ascii=False, indent=4))
    return files


def _percent(found: Sequence[tuple[Task, Record]]) -> float:
    values = [task.example(record) for task, record in found]
    return round(100 * float(np.mean([v for v in values if v is not None])), 2)


def _ruler(run: Finished, out: Path) -> list[Path]:
    folders: dict[Path, dict[str, list[tuple[Task, Record]]]] = {}
    for method, task, length, records in _answered(run, "ruler"):
        tasks = folders.setdefault(out / _folder(run, method) / str(length), {})
        for record in records:
            tasks.setdefault(part_of(task, record), []).append((task, record))
    files = []
    for folder, tasks in folders.items():
        for name, found in tasks.items():
            rows = [
                {
                    "index": record["window"],
                    "pred": record["answer"],
                    "input": record.get("prompt", ""),  # the first example's; scores do not read it
                    "outputs": task.references(record),
                    "others": {"id": record["window"]},
                    "truncation": record.get("truncated", -1),
                    "length": record["size"],
                }
                for task, record in found
            ]
            files.append(_lines(folder / f"{name}.jsonl", rows))
        files.append(folder / "summary.csv")
        write_whole(files[-1], _ruler_summary(tasks))
    return files


def _ruler_summary(tasks: Mapping[str, Sequence[tuple[Task, Record]]]) -> str:
    """The table that RULER's script writes: its columns are numbered, its rows named."""
    nulls = [
        f"{sum(not record['answer'].strip() for _, record in found)}/{len(found)}"
        for found in tasks.values()
    ]
    rows = [
        ["Tasks", *tasks],
        ["Score", *(_percent(found) for found in tasks.values())],
        ["Nulls", *nulls],
    ]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerows([range(len(rows[0])), *rows])
    return out.getvalue()


_FORMATS: dict[str, Callable[[Finished, Path], list[Path]]] = {
    "lm_eval": _lm_eval,
    "longbench": _longbench,
    "ruler": _ruler,
}
