"""The numbers of a paper beside those of a run."""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lcjax.errors import InputError
from lcjax.evaluation.report.tables import markdown, to_csv
from lcjax.evaluation.statistics import is_finite
from lcjax.evaluation.task import Record, Records, Task
from lcjax.files import write_whole


@dataclasses.dataclass(frozen=True)
class Row:
    """The published numbers of a method."""

    method: str  # name of a method of the config
    values: tuple[float | None, ...]  # one for each of `lengths`; null: not published


@dataclasses.dataclass(frozen=True)
class Published:
    """A table of a paper, which the report shows beside the numbers of the run."""

    task: str  # label of the task
    source: str  # such as LCEG (arXiv 2409.12181), table 2
    lengths: tuple[int, ...]  # of the columns, in tokens
    rows: tuple[Row, ...]
    # Lengths of the run that stand for them, such as twice as many for a model that was trained on
    # twice as many tokens; null: the column has none. Empty: the same lengths.
    run_lengths: tuple[int | None, ...] = ()
    field: str = "value"  # of the task's numbers in its CSV file
    percent: bool = False  # whether 100 is published for a 1 of the task

    def __post_init__(self):
        for row in self.rows:
            if len(row.values) != len(self.lengths):
                raise InputError(
                    f"published: {row.method} has {len(row.values)} values for"
                    f" {len(self.lengths)} lengths; write null for one that is not published"
                )
        if self.run_lengths and len(self.run_lengths) != len(self.lengths):
            raise InputError(
                f"published.run_lengths={list(self.run_lengths)} must name one length for each of"
                f" {list(self.lengths)}, or null"
            )

    @property
    def columns(self) -> list[tuple[int, int | None]]:
        """Pairs of a published length and that of the run."""
        return list(zip(self.lengths, self.run_lengths or self.lengths, strict=True))

    def check(self, tasks: Sequence[Task], methods: Sequence[str], key: str) -> None:
        """Raises an InputError for names that the config lacks; `key` is the place of this."""
        labels = [task.label for task in tasks]
        if self.task not in labels:
            raise InputError(f"{key}.task={self.task} is none of the tasks {', '.join(labels)}")
        unknown = [row.method for row in self.rows if row.method not in methods]
        if unknown:
            raise InputError(
                f"{key}.rows: {unknown[0]} is none of the methods {', '.join(methods)}"
            )


def comparisons(table: Published, cells: Records) -> list[Record]:
    """Returns one record for each published number, with that of the run if there is one.

    Args:
      table: what is published.
      cells: of the task (`report.cell_of`).
    """
    by_key = {(cell["method"], cell["length"]): cell for cell in cells}
    records = []
    for row in table.rows:
        for (published_at, run_at), value in zip(table.columns, row.values, strict=True):
            if value is None:
                continue
            run = by_key.get((row.method, run_at), {}).get(table.field)
            run = 100 * run if table.percent and is_finite(run) else run
            difference = run - value if is_finite(run) else None
            records.append(
                {
                    "task": table.task, "method": row.method, "length": run_at, "value": run,
                    "published_length": published_at, "published": value,
                    "difference": difference, "field": table.field, "source": table.source,
                }
            )  # fmt: skip
    return records


def same_order(records: Records) -> tuple[int, int]:
    """Counts pairs of methods in a column, and those that the run orders as the paper does.

    Pairs that either of them has as equal do not count.
    """
    count = agreed = 0
    for one, other in itertools.combinations(records, 2):
        if one["published_length"] != other["published_length"]:
            continue
        if not (is_finite(one["value"]) and is_finite(other["value"])):
            continue
        sign = (one["published"] - other["published"]) * (one["value"] - other["value"])
        count += sign != 0
        agreed += sign > 0
    return agreed, count


def grid(table: Published, records: Records) -> list[list[str]]:
    """A header and one row for each method: `published → run` for each length."""
    numbers = [repr(value) for row in table.rows for value in row.values if value is not None]
    decimals = max((len(text.partition(".")[2]) for text in numbers), default=0)
    by_key = {(record["method"], record["published_length"]): record for record in records}
    heads = [
        f"{at:,}" if at == run_at else f"{at:,} → {'–' if run_at is None else f'{run_at:,}'}"
        for at, run_at in table.columns
    ]

    def text(record: Record | None) -> str:
        if record is None:
            return ""
        value = record["value"]
        run = f"{value:,.{decimals}f}" if is_finite(value) else "–"
        return f"{record['published']:,.{decimals}f} → {run}"

    return [
        ["method", *heads],
        *(
            [r.method, *(text(by_key.get((r.method, at))) for at in table.lengths)]
            for r in table.rows
        ),
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
        task = by_label[table.task]
        records = comparisons(table, [cell for cell in cells if cell["task"] == table.task])
        agreed, count = same_order(records)
        note = f"{agreed} of {count} pairs of methods are in the paper's order." if count else ""
        heading = f"{task.heading}: {table.source} → this run"
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
