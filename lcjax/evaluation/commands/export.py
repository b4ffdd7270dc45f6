"""Records in the formats of the official scorers, which can then judge the same answers.

lm_eval: `results.json` and `samples_*.jsonl` of lm-evaluation-harness, one folder a method.
longbench: `TASK/LENGTH/pred/METHOD/SET.jsonl` and `result.json`, the latter two folders as
LongBench's `eval.py` reads and writes them; of LongBench-E `pred_e` and scores by words, as with
its `--e`.
ruler: `TASK/METHOD/LENGTH/SET.jsonl` and `summary.csv`, the latter as RULER's `evaluate.py` does.

Tasks have folders of their own, as several may have a data set of one name (qasper, gov_report).
"""

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lcjax.config.files import write_whole
from lcjax.errors import InputError, one_of
from lcjax.evaluation.finished import Finished
from lcjax.evaluation.records import clean, folder_name, to_lines
from lcjax.evaluation.task import Record, Task
from lcjax.evaluation.tasks.longbench import LongBench, by_band


def export(run: Finished, formats: Sequence[str], out: Path) -> list[Path]:
    """Writes the run under `out`, one folder a format; returns the files."""
    for name in formats:
        one_of("--export", name, _FORMATS)
    return [path for name in formats for path in _FORMATS[name](run, out / name)]


def _answered(run: Finished, name: str) -> list[tuple[str, Task, int, list[Record]]]:
    cells = [cell for cell in run.cells() if all("answer" in record for record in cell[3])]
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
    plain = [folder_name(name) for name in run.order]
    place = run.order.index(method)
    twins = plain[:place].count(plain[place])
    return f"{plain[place]}_{twins + 1}" if twins else plain[place]


def _lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    write_whole(path, to_lines(rows, ascii=False))
    return path


def _by_part(task: Task, records: Sequence[Record]) -> dict[str, list[Record]]:
    parts: dict[str, list[Record]] = {}
    for record in records:
        parts.setdefault(part_of(task, record), []).append(record)
    return parts


def _lm_eval(run: Finished, out: Path) -> list[Path]:
    methods: dict[str, list[tuple[Task, int, list[Record]]]] = {}
    for method, task, length, records in run.cells():
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
    model = run.models[method]
    return {
        **{name: {} for name in (*names, "n-samples")},
        "config": {
            "model": "lcjax",
            "model_args": f"path={model.path or model.preset},method={method}",
            "batch_size": run.config.batch_size,
            "device": run.made.get("device"),
            "random_seed": run.config.seed,
        },
        "lcjax": {"hash": run.hash, "versions": run.made.get("versions")},
        "git_hash": run.made.get("commit"),
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
    files = []
    for method, task, length, records in _answered(run, "longbench"):
        even = isinstance(task, LongBench) and task.e
        place = out / task.label / str(length) / ("pred_e" if even else "pred")
        folder = place / _folder(run, method)
        parts = _by_part(task, records)
        for name, own in parts.items():
            rows = (
                {
                    "pred": record["answer"],
                    "answers": task.references(record),
                    "all_classes": record.get("all_classes"),
                    "length": record["size"] if record.get("words") is None else record["words"],
                }
                for record in own
            )
            files.append(_lines(folder / f"{name}.jsonl", rows))
        files.append(folder / "result.json")
        scores = {
            name: {band: _percent(task, inside) for band, inside in by_band(own).items()}
            if even
            else _percent(task, own)
            for name, own in parts.items()
        }
        write_whole(files[-1], json.dumps(scores, ensure_ascii=False, indent=4))
    return files


def _percent(task: Task, records: Sequence[Record]) -> float | None:
    """None without records, where LongBench's script writes NaN, which is no JSON."""
    values = [v for record in records if (v := task.example(record)) is not None]
    return round(100 * float(np.mean(values)), 2) if values else None


def _ruler(run: Finished, out: Path) -> list[Path]:
    files = []
    for method, task, length, records in _answered(run, "ruler"):
        folder = out / task.label / _folder(run, method) / str(length)
        parts = _by_part(task, records)
        for name, own in parts.items():
            rows = (
                {
                    "index": record["window"],
                    "pred": record["answer"],
                    "input": record.get("prompt", ""),  # the first example's; scores do not read it
                    "outputs": task.references(record),
                    "others": {"id": record["window"]},
                    "truncation": record.get("truncated", -1),
                    "length": record["size"],
                }
                for record in own
            )
            files.append(_lines(folder / f"{name}.jsonl", rows))
        files.append(folder / "summary.csv")
        write_whole(files[-1], _ruler_summary(task, parts))
    return files


def _ruler_summary(task: Task, parts: Mapping[str, Sequence[Record]]) -> str:
    """The table that RULER's script writes: its columns are numbered, its rows named."""
    nulls = [
        f"{sum(not record['answer'].strip() for record in own)}/{len(own)}"
        for own in parts.values()
    ]
    rows = [
        ["Tasks", *parts],
        ["Score", *(_percent(task, own) for own in parts.values())],
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
