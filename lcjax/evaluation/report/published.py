"""Published numbers of a paper, compared with those of a run."""

import dataclasses
import itertools
import math
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lcjax.errors import InputError
from lcjax.evaluation.report.tables import markdown, to_csv
from lcjax.evaluation.statistics import group_by, is_finite
from lcjax.evaluation.task import Record, Records, Task
from lcjax.files import write_whole


@dataclasses.dataclass(frozen=True)
class Row:
    """The published numbers of a method."""

    method: str  # name of a method of the config; in `others`, the paper's
    values: tuple[float | None, ...]  # one for each column; null: not published


class Column(NamedTuple):
    """A published column, and the length and the field of the run that correspond to it."""

    published_length: int
    length: int | None  # None: the run has none
    field: str
    heading: str


@dataclasses.dataclass(frozen=True)
class Published:
    """A table of a paper, which the report compares with the numbers of the run."""

    task: str  # label of the task
    source: str  # such as LCEG (arXiv 2409.12181), table 2
    lengths: tuple[int, ...]  # of the columns, in tokens; with `fields` only one
    rows: tuple[Row, ...]
    # Rows of the paper whose methods the config does not run: shown without a number of the run.
    others: tuple[Row, ...] = ()
    # Lengths of the run that correspond to `lengths`, such as twice as many tokens for a model with
    # twice the trained length; null: the column has none. Empty: the same lengths.
    run_lengths: tuple[int | None, ...] = ()
    mean_over: tuple[str, ...] = ()  # further tasks: numbers are means over these and `task`
    # Weights of these tasks in the mean, such as numbers of data sets; empty: equal ones
    weights: tuple[tuple[str, float], ...] = ()
    field: str = "value"  # field of the task's numbers in its CSV file
    # Fields, one per column: data sets of a benchmark such as narrativeqa, its categories, seconds,
    # or numbers over all lengths such as mean. Empty: columns are lengths.
    fields: tuple[str, ...] = ()
    percent: bool = False  # whether published numbers are percent: 100 for a 1 of the task
    unit: float = 1.0  # number of the run that is 1 in the paper, such as 1e9 bytes
    # Method whose number of the same column is the unit, for speeds that are ratios; empty: none
    relative_to: str = ""

    def __post_init__(self):
        names = "fields" if self.fields else "lengths"
        if self.fields and len(self.lengths) != 1:
            raise InputError(
                f"published.lengths={list(self.lengths)} must be the one length of"
                f" fields={list(self.fields)}"
            )
        rows = (*self.rows, *self.others)
        for row in rows:
            if len(row.values) != len(self.columns):
                raise InputError(
                    f"published: {row.method} has {len(row.values)} values for"
                    f" {len(self.columns)} {names}; write null for one that is not published"
                )
        methods = [row.method for row in rows]
        for method in methods:
            if (count := methods.count(method)) > 1:
                raise InputError(
                    f"published: {method} has {count} rows; write one, or another entry"
                )
        if self.run_lengths and len(self.run_lengths) != len(self.lengths):
            raise InputError(
                f"published.run_lengths={list(self.run_lengths)} must name one length for each of"
                f" {list(self.lengths)}, or null"
            )

    @property
    def columns(self) -> list[Column]:
        """The columns, from left to right."""
        pairs = list(zip(self.lengths, self.run_lengths or self.lengths))
        if self.fields:
            return [Column(*pairs[0], field, field) for field in self.fields]
        return [Column(*pair, self.field, _length_heading(*pair)) for pair in pairs]

    def check(self, tasks: Sequence[Task], methods: Sequence[str], key: str) -> None:
        """Raises an InputError for names that the config lacks; `key` is the table's place."""
        labels = [task.label for task in tasks]
        for name, task in (("task", self.task), *(("mean_over", t) for t in self.mean_over)):
            if task not in labels:
                raise InputError(f"{key}.{name}={task} is none of the tasks {', '.join(labels)}")
            if self.weights and not dict(self.weights).get(task, 0) > 0:
                raise InputError(
                    f"{key}.weights={[*map(list, self.weights)]} must have a number above 0 for"
                    f" each task of the mean; {task} has none"
                )
        names = [row.method for row in self.rows] + [self.relative_to] * bool(self.relative_to)
        unknown = [name for name in names if name not in methods]
        if unknown:
            raise InputError(
                f"{key}.rows: {unknown[0]} is none of the methods {', '.join(methods)}"
            )
        if run := [row.method for row in self.others if row.method in methods]:
            raise InputError(f"{key}.others: {run[0]} is a method of this config; move it to rows")


def _length_heading(published: int, run: int | None) -> str:
    if published == run:
        return f"{published:,}"
    return f"{published:,} → {'–' if run is None else f'{run:,}'}"


def _mean_cell(table: Published, cells: Records) -> Record:
    """Returns the numbers of a table: the cell of its task, or the mean over several."""
    if len(cells) <= len(table.mean_over):  # a task is not scored yet
        return {}
    fields = {column.field for column in table.columns} & set.intersection(*map(set, cells))
    columns = {field: [cell[field] for cell in cells] for field in fields}
    by_task = dict(table.weights)
    weights = [by_task.get(cell["task"], 1.0) for cell in cells]

    def mean(values: list) -> float | None:
        if not all(map(is_finite, values)):
            return None
        return math.fsum(map(operator.mul, weights, values)) / math.fsum(weights)

    return {field: mean(values) for field, values in columns.items()}


def comparisons(table: Published, cells: Records) -> list[Record]:
    """Returns one record for each published number, with that of the run if there is one.

    Records of `others` have no length and no number of the run, so no order counts them.

    Args:
      table: The published table.
      cells: Cells (`report.cell_of`) of its task and of the tasks in `mean_over`.
    """
    groups = group_by(cells, lambda cell: (cell["method"], cell["length"]))
    by_key = {key: _mean_cell(table, group) for key, group in groups.items()}
    records = []
    for index, row in enumerate((*table.rows, *table.others)):
        is_run = index < len(table.rows)
        for column, value in zip(table.columns, row.values, strict=True):
            if value is None:
                continue
            cell = by_key.get((row.method, column.length), {}) if is_run else {}
            unit = table.unit
            if table.relative_to:
                unit = by_key.get((table.relative_to, column.length), {}).get(column.field)
            run = cell.get(column.field)
            run = run / unit if is_finite(run) and is_finite(unit) and unit else None
            run = 100 * run if table.percent and run is not None else run
            # A run of some data sets of a benchmark has no number for the others.
            has_number = is_run and (not table.fields or column.field in cell)
            length = column.length if has_number else None
            records.append(
                {
                    "task": table.task, "method": row.method, "length": length, "value": run,
                    "published_length": column.published_length, "published": value,
                    "difference": None if run is None else run - value, "field": column.field,
                    "source": table.source,
                }
            )  # fmt: skip
    return records


def same_order(records: Records) -> tuple[int, int]:
    """Counts pairs of methods in a column, and those that the run orders as the paper does.

    Pairs with equal numbers in the run or in the paper do not count.
    """
    count = agreed = 0
    for one, other in itertools.combinations(records, 2):
        if any(one[key] != other[key] for key in ("published_length", "field")):
            continue
        if not (is_finite(one["value"]) and is_finite(other["value"])):
            continue
        sign = (one["published"] - other["published"]) * (one["value"] - other["value"])
        count += sign != 0
        agreed += sign > 0
    return agreed, count


def grid(table: Published, records: Records) -> list[list[str]]:
    """Returns a header and one row for each method: `published → run` in each column.

    Rows of `others` have the published number alone.
    """
    rows, others = (*table.rows, *table.others), {row.method for row in table.others}
    numbers = [repr(value) for row in rows for value in row.values if value is not None]
    decimals = max((len(text.partition(".")[2]) for text in numbers), default=0)
    by_key = {(r["method"], r["published_length"], r["field"]): r for r in records}

    def text(row: Row, column: Column) -> str:
        record = by_key.get((row.method, column.published_length, column.field))
        if record is None:
            return ""
        value, number = record["value"], f"{record['published']:,.{decimals}f}"
        if row.method in others:
            return number
        return f"{number} → {f'{value:,.{decimals}f}' if is_finite(value) else '–'}"

    return [
        ["method", *(column.heading for column in table.columns)],
        *([row.method, *(text(row, column) for column in table.columns)] for row in rows),
    ]


class Table(NamedTuple):
    """A published table beside the run, as it is shown."""

    heading: str
    grid: list[list[str]]  # a header and one row for each method
    note: str  # how far the order of methods agrees; empty: nothing to compare


def tables(
    published: Sequence[Published], cells: Records, tasks: Sequence[Task]
) -> tuple[list[Table], Records]:
    """Returns the tables that are shown, and one record for each published number."""
    by_label, shown, lines = {task.label: task for task in tasks}, [], []
    for table in published:
        if table.task not in by_label:  # none of its cells is scored yet
            continue
        task, labels = by_label[table.task], [table.task, *table.mean_over]
        records = comparisons(table, [cell for cell in cells if cell["task"] in labels])
        agreed, count = same_order(records)
        note = f"{agreed} of {count} pairs of methods are in the paper's order." if count else ""
        name = f"mean of {', '.join(labels)}" if table.mean_over else task.heading
        heading = f"{name}: {table.source} → this run"
        shown.append(Table(heading, grid(table, records), note))
        lines += records
    return shown, lines


def write(folder: Path, shown: Sequence[Table], lines: Records) -> tuple[str, list[Path]]:
    """Writes published.md and published.csv; returns the Markdown and the files."""
    if not shown:
        return "", []
    parts = [f"### {heading}\n\n{markdown(rows)}\n{note}\n" for heading, rows, note in shown]
    files = [folder / f"published.{kind}" for kind in ("md", "csv")]
    for file, text in zip(files, ("\n".join(parts), to_csv(lines)), strict=True):
        write_whole(file, text)
    return "\n".join(parts), files
