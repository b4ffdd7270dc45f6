"""Compares runs, or the methods of one run, with paired differences over their examples."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lcjax.errors import InputError, suggestion
from lcjax.evaluation import cost_plots, plots
from lcjax.evaluation.records import by_cell, folder_name, hashed_settings, named_records
from lcjax.evaluation.report import cell_of, differences, page
from lcjax.evaluation.report.tables import grid, markdown, to_csv
from lcjax.evaluation.results import Results, read
from lcjax.evaluation.task import Record, Task
from lcjax.files import check_outputs, write_whole
from lcjax.storage import to_path
from lcjax.tree import flatten

_FILES = ("compare.html", "compare.md", "compare.csv", "differences.csv")
_MARK = "· lcjax</title>"  # in every page

Rows = dict[tuple[str, str], str]  # label of the row of (run, method)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Cells of all runs, paired differences, written files, and the printed text."""

    cells: list[Record]
    differences: list[Record]  # one for each pair of rows, task and length
    files: list[Path]
    text: str


def compare(
    folders: Sequence[str | Path], out: str | Path | None = None, against: str | None = None
) -> Comparison:
    """Compares the methods of runs.

    Writes compare.html, compare.md, compare.csv and differences.csv.

    Rows are methods, prefixed with the name of the run if several runs have a method of that name.

    Args:
      folders: Run folders.
      out: Output folder; None is a folder beside the first run, named after all runs.
      against: The row that every other row is compared with. None is the same method of the first
        run, or the first row if the first run lacks that method.

    Raises:
      InputError: There is no run or only one row, or `against` is not a row.
    """
    if not folders:
        raise InputError("compare: name the folder of a run, such as runs/quickstart_eval")
    runs = _by_name([read(folder) for folder in folders])
    rows = _rows(runs)
    _check(runs, rows, against)
    if out is None:
        out = to_path(folders[0]).parent / f"compare_{folder_name('_'.join(runs))}"
    out, by_task = to_path(out), _by_task(runs)
    figures = [out / "figures" / f"{task.label}.png" for task, _ in by_task]
    check_outputs([*(out / name for name in _FILES), *figures], _MARK)
    with named_records(*folders):
        sections = [_section(task, group, rows, against, out) for task, group in by_task]
    return _write(out, runs, sections)


def _check(runs: Mapping[str, Results], rows: Rows, against: str | None) -> None:
    labels = list(rows.values())
    if len(labels) < 2:
        raise InputError(
            f"compare: {next(iter(runs))} has one method, {labels[0]}; name a second run"
        )
    if against is not None and against not in labels:
        raise InputError(f"--against={against} is no row; {suggestion(against, labels)}")


def _by_task(runs: dict[str, Results]) -> list[tuple[Task, dict[str, list[Record]]]]:
    """Groups records by task and run; tasks that differ in their scoring are separate."""
    groups: dict[tuple, tuple[Task, dict[str, list[Record]]]] = {}
    for name, run in runs.items():
        for task, records in run.tasks.items():
            fields = (*task.scoring_settings, *task.table_settings)
            settings = (task.label, *(getattr(task, field) for field in fields))
            groups.setdefault(settings, (task, {}))[1][name] = records
    named = []
    for number, (settings, (task, by_run)) in enumerate(groups.items(), 1):
        others = [other for other in groups if other[0] == task.label and other != settings]
        if others:  # name what differs
            varied = [v for v, *rest in zip(settings, *others) if any(v != other for other in rest)]
            texts = ("_".join(v) or "all" if isinstance(v, tuple) else str(v) for v in varied)
            name = folder_name("_".join([task.label, *texts]))
            if len(name) > 100:  # a list of tasks may be too long for the name of a file
                name = f"{task.label}_{number}"
            task = dataclasses.replace(task, name=name)
        named.append((task, by_run))
    return named


def _by_name(runs: Sequence[Results]) -> dict[str, Results]:
    """Returns runs by folder name, after the name of the parent folder if names are equal."""
    names = [run.folder.resolve().name for run in runs]
    if len(set(names)) < len(names):
        names = ["/".join(run.folder.resolve().parts[-2:]) for run in runs]
    if len(set(names)) < len(names):
        raise InputError(
            "compare: the same run is named twice; name each once, or one alone for its methods"
        )
    return dict(zip(names, runs, strict=True))


def _rows(runs: dict[str, Results]) -> Rows:
    methods = [method for run in runs.values() for method in run.order]
    single = all(len(run.order) == 1 for run in runs.values())
    rows = {}
    for name, run in runs.items():
        for method in run.order:
            label = name if single else f"{name}: {method}"
            rows[name, method] = method if methods.count(method) == 1 else label
    return rows


def _section(
    task: Task, records: dict[str, list[Record]], rows: Rows, against: str | None, out: Path
) -> page.Section:
    """Returns the results of one task over all runs; `records` are by run."""
    groups: dict[str, dict[int, list[Record]]] = {}
    cells = []
    by_run = {name: by_cell(group) for name, group in records.items()}
    for (name, method), label in rows.items():
        run_cells = by_run.get(name, {})
        by_length = {n: group for (other, n), group in run_cells.items() if other == method}
        if by_length:
            groups[label] = by_length
            cells += [cell_of(task, label, n, group) for n, group in by_length.items()]
    bases = _bases({key: label for key, label in rows.items() if label in groups}, against)
    gaps = differences.paired_differences(task, groups, bases)
    figures = [plots.over_lengths(cells, task.metric, out / "figures" / f"{task.label}.png")]
    figures += cost_plots.over_costs(
        cells, task.metric, out / "figures" / f"{task.label}_by_cost.png"
    )
    return page.Section(task, cells, [], {}, figures, gaps)


def _bases(rows: Rows, against: str | None) -> dict[str, str]:
    """Returns the base row of each row of a task."""
    (first_run, _), first = next(iter(rows.items()))
    bases = {}
    for (run, method), label in rows.items():
        same = first if run == first_run else rows.get((first_run, method), first)
        bases[label] = same if against is None else against
    labels = rows.values()
    return {row: base for row, base in bases.items() if row != base and base in labels}


def _write(out: Path, runs: dict[str, Results], sections: Sequence[page.Section]) -> Comparison:
    cells = [cell for section in sections for cell in section.cells]
    gaps = [line for s in sections for line in differences.lines(s.task, s.gaps)]
    text = "\n".join(_text(section) for section in sections)
    files = [out / name for name in _FILES[:3]]
    write_whole(files[0], page.render("compare", _page(runs, sections)))
    write_whole(files[1], text)
    write_whole(files[2], to_csv(cells))
    if gaps:
        files.append(out / _FILES[3])
        write_whole(files[-1], to_csv(gaps))
    return Comparison(cells, gaps, files, text)


def _text(section: page.Section) -> str:
    metric = section.task.metric
    table = markdown(grid(section.cells, "value", metric))
    parts = [f"### {section.task.heading}\n", table, *differences.text(section.task, section.gaps)]
    return "\n".join(parts)


def _page(runs: dict[str, Results], sections: Sequence[page.Section]) -> dict[str, Any]:
    rows = [
        {"name": name, "examples": sum(map(len, run.tasks.values())), "hash": run.hash}
        for name, run in runs.items()
    ]
    return {
        "title": " against ".join(runs) if len(runs) < 3 else f"{len(runs)} runs",
        "eyebrow": "Comparison",
        "lead": "Differences are taken example by example, over what both rows have answered: a"
        " small one that holds everywhere counts more than a large one by chance.",
        "runs": rows,
        "changed": _changed(runs),
        "tasks": [page.task_part(section) for section in sections],
    }


def _changed(runs: dict[str, Results]) -> dict[str, list[str]]:
    """Returns the settings that determine the numbers and differ between runs."""
    trees = [
        flatten(hashed_settings(run.settings), separator=".", lists=True) for run in runs.values()
    ]
    rows = {key: [_plain(tree.get(key)) for tree in trees] for key in sorted(set().union(*trees))}
    return {key: row for key, row in rows.items() if len(set(row)) > 1}


def _plain(value: Any) -> str:
    return "–" if value is None else str(value)
