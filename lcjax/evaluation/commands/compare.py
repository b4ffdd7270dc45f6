"""Several runs side by side, and what differs between them beyond chance."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lcjax.errors import InputError
from lcjax.evaluation.finished import Finished, read
from lcjax.evaluation.records import binding, by_cell, folder_name
from lcjax.evaluation.report import cell_of, page, plots
from lcjax.evaluation.report.tables import grid, markdown, to_csv
from lcjax.evaluation.statistics import Difference, paired
from lcjax.evaluation.task import Record, Task
from lcjax.files import write_whole
from lcjax.tree import flatten

Pair = tuple[str, str]  # a row, and the one that it is compared with
_MARKS = {"lower": {-1: "better", 1: "worse"}, "higher": {-1: "worse", 1: "better"}}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What the files say: cells of all runs, paired differences, and the text that is printed."""

    cells: list[Record]
    differences: list[Record]  # one for each pair of rows, task and length
    files: list[Path]
    text: str


def compare(folders: Sequence[str | Path], out: str | Path | None = None) -> Comparison:
    """Writes compare.html, compare.md, compare.csv and differences.csv.

    Rows are methods, with the name of their run where several have one of that name. Each is
    compared with the same method of the first run, or, where there is none, with the first row.
    `out` None is a folder beside the first run, named after all.
    """
    if len(folders) < 2:
        raise InputError("compare needs at least two runs: python eval.py compare RUN RUN")
    runs = _named([read(folder) for folder in folders])
    names = list(runs)
    if out is None:
        out = Path(folders[0]).parent / f"compare_{folder_name('_'.join(names))}"
    out = Path(out)
    rows = _rows(runs)
    parts = [_part(task, own, rows, out) for task, own in _by_task(runs)]
    return _write(out, runs, parts)


def _by_task(runs: dict[str, Finished]) -> list[tuple[Task, dict[str, list[Record]]]]:
    """Records of every task by run; what is judged in two ways is not one number, but two."""
    found: dict[tuple, tuple[Task, dict[str, list[Record]]]] = {}
    for name, run in runs.items():
        for task, records in run.tasks.items():
            rules = (task.label, *(getattr(task, field) for field in task.judging))
            found.setdefault(rules, (task, {}))[1][name] = records
    labels = [label for label, *_ in found]
    return [
        (task if labels.count(task.label) == 1 else _named_after(task, rules), own)
        for rules, (task, own) in found.items()
    ]


def _named_after(task: Task, rules: Sequence[object]) -> Task:
    return dataclasses.replace(task, name="_".join(map(str, rules)))


def _named(runs: Sequence[Finished]) -> dict[str, Finished]:
    """By folder name, with the parent's where two are equal."""
    names = [run.folder.resolve().name for run in runs]
    if len(set(names)) < len(names):
        names = ["/".join(run.folder.resolve().parts[-2:]) for run in runs]
    if len(set(names)) < len(names):
        raise InputError("compare: the same run is named twice; name each once")
    return dict(zip(names, runs, strict=True))


def _rows(runs: dict[str, Finished]) -> dict[tuple[str, str], str]:
    """What each (run, method) is called."""
    every = [method for run in runs.values() for method in run.order]
    single = all(len(run.order) == 1 for run in runs.values())
    named = {}
    for name, run in runs.items():
        for method in run.order:
            plain = name if single else f"{name}: {method}"
            named[name, method] = method if every.count(method) == 1 else plain
    return named


@dataclasses.dataclass(frozen=True)
class _Part:
    """One task over all runs."""

    task: Task
    cells: list[Record]
    differences: list[tuple[Pair, int, Difference]]  # at a length
    figures: list[Path]


def _part(
    task: Task, own: dict[str, list[Record]], rows: dict[tuple[str, str], str], out: Path
) -> _Part:
    groups: dict[tuple[str, str], dict[int, list[Record]]] = {}
    cells = []
    by_run = {name: by_cell(records) for name, records in own.items()}
    for (name, method), label in rows.items():
        found = by_run.get(name, {})
        by_length = {n: records for (other, n), records in found.items() if other == method}
        if by_length:
            groups[name, method] = by_length
            cells += [cell_of(task, label, n, records) for n, records in by_length.items()]
    differences = _differences(task, groups, rows)
    figure = plots.over_lengths(cells, task.metric, out / "figures" / f"{task.label}.png")
    return _Part(task, cells, differences, [figure])


def _differences(task: Task, groups, rows) -> list[tuple[Pair, int, Difference]]:
    first_run, first_row = next(iter(groups))[0], next(iter(groups))
    found = []
    for row, by_length in groups.items():
        base = (first_run, row[1])
        if row[0] == first_run or base not in groups:
            base = first_row
        if row == base:
            continue
        for length, records in by_length.items():
            result = _paired(task, groups[base].get(length, []), records)
            if result.count:
                found.append(((rows[row], rows[base]), length, result))
    return found


def _paired(task: Task, base: Sequence[Record], other: Sequence[Record]) -> Difference:
    """Over units of which both have read the same tokens under the same protocol.

    They are weighed as in the number of the task, of which the mean is then the difference.
    """
    before = {(r["window"], r["digest"], r["protocol"]): r for r in base}
    pairs = []
    for record in other:
        twin = before.get((record["window"], record["digest"], record["protocol"]))
        values = None if twin is None else (task.example(twin), task.example(record))
        if values is not None and None not in values:
            pairs.append((*values, record))
    weights = task.weights([record for *_, record in pairs])
    counted = [(*pair, weight) for pair, weight in zip(pairs, weights, strict=True) if weight]
    a, b, records, weights = zip(*counted, strict=True) if counted else ((), (), (), ())
    clusters = [task.cluster(record) for record in records]
    return paired(a, b, weights=weights, clusters=None if None in clusters else clusters)


def _write(out: Path, runs: dict[str, Finished], parts: Sequence[_Part]) -> Comparison:
    cells = [cell for part in parts for cell in part.cells]
    differences = [
        {
            "task": part.task.label,
            "row": row,
            "against": base,
            "length": length,
            **dataclasses.asdict(found),
            "mark": found.mark,
        }
        for part in parts
        for (row, base), length, found in part.differences
    ]
    text = "\n".join(_text(part) for part in parts)
    files = [out / name for name in ("compare.html", "compare.md", "compare.csv")]
    write_whole(files[0], page.render("compare", _page(out, runs, parts)))
    write_whole(files[1], text)
    write_whole(files[2], to_csv(cells))
    if differences:
        files.append(out / "differences.csv")
        write_whole(files[-1], to_csv(differences))
    return Comparison(cells, differences, files, text)


def _text(part: _Part) -> str:
    texts = [
        f"### {part.task.metric.title}\n",
        markdown(grid(part.cells, "value", part.task.metric)),
    ]
    if part.differences:
        lengths, rows = _table(part)
        head = ["row", *(f"{length:,}" for length in lengths)]
        lines = [
            [
                " against ".join(name),
                *("" if f is None else f"{_number(part.task, f)} ({f.count})" for f in row),
            ]
            for name, row in rows.items()
        ]
        texts.append(f"{_unit(part.task)}, paired (examples); * p < 0.05, ** p < 0.01:\n")
        texts.append(markdown([head, *lines]))
    return "\n".join(texts)


def _table(part: _Part) -> tuple[list[int], dict[Pair, list[Difference | None]]]:
    lengths = sorted({length for _, length, _ in part.differences})
    found = {(rows, length): value for rows, length, value in part.differences}
    names = dict.fromkeys(rows for rows, _, _ in part.differences)
    return lengths, {name: [found.get((name, n)) for n in lengths] for name in names}


def _number(task: Task, found: Difference) -> str:
    digits = max(task.metric.decimals, 3)
    return f"{found.mean:+.{digits}f}{found.mark}"


def _unit(task: Task) -> str:
    if task.metric.name == "perplexity":
        return "Difference in nats a token"
    return f"Difference in {task.metric.name}"


def _page(out: Path, runs: dict[str, Finished], parts: Sequence[_Part]) -> dict[str, Any]:
    described = [
        {
            "name": name,
            "examples": sum(map(len, run.tasks.values())),
            "hash": run.hash,
        }
        for name, run in runs.items()
    ]
    return {
        "title": " against ".join(runs) if len(runs) == 2 else f"{len(runs)} runs",
        "eyebrow": "Comparison",
        "lead": "Differences are taken example by example, over what both rows have answered: a"
        " small one that holds everywhere counts more than a large one by chance.",
        "runs": described,
        "changed": _changed(runs),
        "tasks": [_shown(part) for part in parts],
    }


def _shown(part: _Part) -> dict[str, Any]:
    task = page.task_part(page.Section(part.task, part.cells, [], {}, part.figures))
    lengths, rows = _table(part) if part.differences else ([], {})
    side = _MARKS["lower" if part.task.metric.lower_is_better else "higher"]
    shown = {}
    for name, row in rows.items():
        shown[name] = [
            None
            if found is None
            else {
                "mean": found.mean,
                "text": _number(part.task, found).replace("-", "−"),
                "kind": side[int(math.copysign(1, found.mean))] if found.mark else "",
                "note": _note(found),
            }
            for found in row
        ]
    return {**task, "differences": {"lengths": lengths, "rows": shown}, "unit": _unit(part.task)}


def _note(found: Difference) -> str:
    if math.isnan(found.low):
        return f"n = {found.count}"
    return f"{found.low:+.3f} to {found.high:+.3f}, n = {found.count}".replace("-", "−")


def _changed(runs: dict[str, Finished]) -> dict[str, list[str]]:
    """Settings that decide numbers and are not the same in all runs."""
    trees = [flatten(binding(run.settings), separator=".", lists=True) for run in runs.values()]
    rows = {key: [_plain(tree.get(key)) for tree in trees] for key in sorted(set().union(*trees))}
    return {key: row for key, row in rows.items() if len(set(row)) > 1}


def _plain(value: Any) -> str:
    return "–" if value is None else str(value)
