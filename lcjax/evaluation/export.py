"""Answers and prompts in the file formats of the official scorers.

lm_eval: `results.json` and `samples_*.jsonl` of lm-evaluation-harness, one folder per method.
longbench: `TASK/LENGTH/pred/METHOD/SET.jsonl` and `result.json`, as LongBench's `eval.py` reads and
writes them. For LongBench-E the folder is `pred_e`, and scores are by number of words, as with
`--e`.
ruler: `TASK/METHOD/LENGTH/SET.jsonl` and `summary.csv`, as RULER's `evaluate.py` writes it.

Every task has its own folder, as several tasks may share the name of a data set (qasper).
"""

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from lcjax.errors import InputError, check_one_of
from lcjax.evaluation import study
from lcjax.evaluation.eval_config import EvalConfig, corpora, tokenizer_of
from lcjax.evaluation.prompt_task import GenerationTask
from lcjax.evaluation.records import clean, folder_name, to_lines
from lcjax.evaluation.results import Results
from lcjax.evaluation.run import check, limits_of
from lcjax.evaluation.statistics import group_by
from lcjax.evaluation.task import Record, Records, Task, Unit
from lcjax.evaluation.tasks.longbench import LongBench, by_band
from lcjax.files import CHECKSUMS, check_outputs, read_sums, write_whole
from lcjax.storage import to_path

_DIGEST = "digest"  # of the text of a prompt: a key of its lines


def check_formats(names: Sequence[str]) -> None:
    """Raises an InputError for the name of an unknown format."""
    for name in names:
        check_one_of("--export", name, _FORMATS)


def export(run: Results, formats: Sequence[str], out: Path) -> list[Path]:
    """Writes a run in some formats.

    Args:
      run: The results.
      formats: Any of lm_eval, longbench, ruler.
      out: The output folder, with one subfolder per format.

    Returns:
      The written files.

    Raises:
      InputError: a format is unknown, or a file of other origin would be replaced.
    """
    check_formats(formats)
    texts: dict[Path, str] = {}
    for name in formats:
        texts |= _FORMATS[name](run, out / name)
    sums = run.folder / CHECKSUMS  # with the names of earlier exports
    written = {run.folder / name for name in read_sums(sums)} if sums.is_file() else set()
    for path, text in texts.items():
        if path.exists() and path not in written and path.read_bytes() != text.encode():
            raise InputError(f"{path} would be replaced, and is not of this run; move it away")
    for path, text in texts.items():
        write_whole(path, text)
    return list(texts)


def _cells_with_answers(run: Results, name: str) -> list[tuple[str, Task, int, list[Record]]]:
    cells = [cell for cell in run.cells() if all("answer" in record for record in cell[3])]
    if not cells:
        raise InputError(
            f"--export={name}: {run.folder} has no answers, which that format is made of; lm_eval"
            " takes every task"
        )
    return cells


def _part_of(task: Task, fields: Mapping[str, Any]) -> str:
    """Returns the data set or subtask of a record or of a unit's fields; else the task."""
    return str(fields.get("dataset") or fields.get("task") or task.label)


def _folder(run: Results, method: str) -> str:
    """Returns the folder name of a method; equal names are numbered."""
    names = [folder_name(name) for name in run.order]
    index = run.order.index(method)
    num_equal = names[:index].count(names[index])
    return f"{names[index]}_{num_equal + 1}" if num_equal else names[index]


def _by_part(task: Task, records: Records) -> dict[str, list[Record]]:
    return group_by(records, lambda record: _part_of(task, record))


def _lm_eval(run: Results, out: Path) -> dict[Path, str]:
    files = {}
    for method, cells in group_by(run.cells(), itemgetter(0)).items():
        folder, results = out / _folder(run, method), _lm_eval_results(run, method)
        for _, task, length, records in cells:
            name, metric = f"{task.label}_{length}", task.metric.name
            value = task.summarise(records)["value"]
            results["results"][name] = {
                "alias": name,
                f"{metric},none": value,
                f"{metric}_stderr,none": _standard_error(task, records),
            }
            results["versions"][name] = records[0]["protocol"]
            shots = {record.get("shots", 0) for record in records}
            results["n-shot"][name] = shots.pop() if len(shots) == 1 else "N/A"
            results["higher_is_better"][name] = {metric: not task.metric.lower_is_better}
            results["n-samples"][name] = {"original": len(records), "effective": len(records)}
            results["configs"][name] = {"task": name, "metadata": {"length": length}}
            results["group_subtasks"][name] = []
            rows = [_sample(task, record, metric) for record in records]
            files[folder / f"samples_{name}.jsonl"] = to_lines(rows, ascii=False)
        text = json.dumps(clean(results), indent=2, ensure_ascii=False)
        files[folder / "results.json"] = f"{text}\n"
    return files


def _lm_eval_results(run: Results, method: str) -> dict[str, Any]:
    names = ("results", "group_subtasks", "configs", "versions", "n-shot", "higher_is_better")
    model = run.models[method]
    return {
        **{name: {} for name in (*names, "n-samples")},
        "config": {
            "model": "lcjax",
            "model_args": f"path={model.path or model.preset},method={method}",
            "batch_size": run.config.batch_size,
            "device": run.environment.get("device"),
            "random_seed": run.config.seed,
        },
        "lcjax": {"hash": run.hash, "versions": run.environment.get("versions")},
        "git_hash": run.environment.get("commit"),
    }


def _standard_error(task: Task, records: Records) -> float | str:
    """Returns the standard error of the mean, or "N/A" (as lm-eval) if it is not a mean."""
    values = task.values([record for record in records if task.example(record) is not None])
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


def _longbench(run: Results, out: Path) -> dict[Path, str]:
    """Returns one folder of predictions per method and length, with scores from 0 to 100."""
    files = {}
    for method, task, length, records in _cells_with_answers(run, "longbench"):
        by_length = isinstance(task, LongBench) and task.e
        parent = out / task.label / str(length) / ("pred_e" if by_length else "pred")
        folder = parent / _folder(run, method)
        parts = _by_part(task, records)
        for name, group in parts.items():
            rows = (
                {
                    "pred": record["answer"],
                    "answers": task.references(record),
                    "all_classes": record.get("all_classes"),
                    "length": record["size"] if record.get("words") is None else record["words"],
                }
                for record in group
            )
            files[folder / f"{name}.jsonl"] = to_lines(rows, ascii=False)
        scores = {
            name: {band: _percent(task, members) for band, members in by_band(group).items()}
            if by_length
            else _percent(task, group)
            for name, group in parts.items()
        }
        files[folder / "result.json"] = json.dumps(scores, ensure_ascii=False, indent=4)
    return files


def _percent(task: Task, records: Records) -> float | None:
    """Returns the mean in percent, or None where LongBench writes NaN, which is invalid JSON."""
    values = [v for record in records if (v := task.example(record)) is not None]
    return round(100 * float(np.mean(values)), 2) if values else None


def _ruler(run: Results, out: Path) -> dict[Path, str]:
    files = {}
    for method, task, length, records in _cells_with_answers(run, "ruler"):
        folder = out / task.label / _folder(run, method) / str(length)
        parts = _by_part(task, records)
        for name, group in parts.items():
            rows = (
                {
                    "index": record["window"],
                    "pred": record["answer"],
                    "input": record.get(
                        "prompt", ""
                    ),  # only records of the first example have it; scorers ignore it
                    "outputs": task.references(record),
                    "others": {"id": record["window"]},
                    "truncation": record.get("truncated", -1),
                    "length": record["size"],
                }
                for record in group
            )
            files[folder / f"{name}.jsonl"] = to_lines(rows, ascii=False)
        files[folder / "summary.csv"] = _ruler_summary(task, parts)
    return files


def _ruler_summary(task: Task, parts: Mapping[str, Records]) -> str:
    """Returns the table that RULER's script writes: numbered columns and named rows."""
    nulls = [
        f"{sum(not record['answer'].strip() for record in group)}/{len(group)}"
        for group in parts.values()
    ]
    rows = [
        ["Tasks", *parts],
        ["Score", *(_percent(task, group) for group in parts.values())],
        ["Nulls", *nulls],
    ]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerows([range(len(rows[0])), *rows])
    return out.getvalue()


_FORMATS: dict[str, Callable[[Results, Path], dict[Path, str]]] = {
    "lm_eval": _lm_eval,
    "longbench": _longbench,
    "ruler": _ruler,
}


def make_data(config: EvalConfig, out: str | Path | None = None) -> list[Path]:
    """Writes the prompts of a config's tasks as JSONL, without loading a model.

    The files are `OUT/TASK/LENGTH/SET.jsonl`, one per data set or subtask of tasks that generate. A
    line has RULER's keys: index, input (the prompt as text), outputs (the references), length
    (tokens including those to be generated), and others (the fields of a record).

    Args:
      config: The config of a run; of its model only the tokenizer is loaded.
      out: The folder; None is `data` in the run folder.

    Returns:
      The written files.

    Raises:
      InputError: The config has no task that generates, or a length has no prompt.
    """
    check(config)
    tasks = [task for task in config.tasks if isinstance(task, GenerationTask)]
    if not tasks:
        raise InputError("tasks: none of them generates answers, so there is no prompt to write")
    out = to_path(out) if out is not None else to_path(config.run.folder) / "data"
    by_task = corpora(config, tokenizer_of(study.with_trained(config).model))
    files = []
    for task in tasks:
        corpus, limits = by_task[task.label], limits_of(config, task)
        for length in limits.lengths:
            units = task.plan(corpus, length, limits)
            if not units:
                raise InputError(f"lengths: {length} gives no prompt in {task.label}")
            parts = group_by(units, lambda unit, task=task: _part_of(task, unit.fields))
            for name, group in parts.items():
                path = out / task.label / str(length) / f"{name}.jsonl"
                rows = (_prompt_line(task, unit, corpus.tokenizer) for unit in group)
                check_outputs([path], f'"{_DIGEST}": "')
                write_whole(path, to_lines(rows, ascii=False))
                files.append(path)
    return files


def _prompt_line(task: Task, unit: Unit, tokenizer) -> dict[str, Any]:
    fields = {
        key: value for key, value in unit.fields.items() if key not in ("prompt", "references")
    }
    return {
        "index": unit.index,
        "input": tokenizer.decode(unit.tokens.tolist()),
        "outputs": task.references(unit.fields),
        "length": unit.fields["size"],
        "others": {"id": unit.index, _DIGEST: unit.digest, **fields},
    }
