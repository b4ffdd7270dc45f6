"""Paired differences between rows of a table, over the examples that both rows share."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from lcjax.evaluation.report.tables import markdown
from lcjax.evaluation.statistics import Difference, paired
from lcjax.evaluation.task import Record, Records, Task

Key = tuple[str, str, str]  # row, base row, part of the task
# Meaning of the sign of a difference, by direction of the metric.
_MARKS = {"lower": {-1: "better", 1: "worse"}, "higher": {-1: "worse", 1: "better"}}


@dataclasses.dataclass(frozen=True)
class Gap:
    """The difference of a row of one task from its base row, at one length."""

    row: str
    base: str
    part: str  # a part of the task (`Task.part`); empty for all of it
    length: int
    difference: Difference


def paired_differences(
    task: Task,
    groups: Mapping[str, Mapping[int, Records]],
    bases: Mapping[str, str],
) -> list[Gap]:
    """Computes the difference of every row from its base row.

    Args:
      task: The task of the records.
      groups: Records by row and length.
      bases: The base row of each row to compare.

    Returns:
      One gap per row, length and part of the task, if the rows have common examples.
    """
    gaps = []
    for row, base in bases.items():
        for length, records in groups[row].items():
            base_records = groups[base].get(length, [])
            parts = list(dict.fromkeys(task.part(record) for record in records))
            for part in ("", *(parts if len(parts) > 1 else ())):
                in_part = [r for r in records if not part or task.part(r) == part]
                difference = of_records(task, base_records, in_part)
                if difference.count:
                    gaps.append(Gap(row, base, part, length, difference))
    return gaps


def of_records(task: Task, base: Records, other: Records) -> Difference:
    """Computes the difference over units with the same tokens and protocol.

    The weights are those of the task's number, so the mean is the difference of the two numbers if
    both have the same units.
    """
    by_key = {(r["window"], r["digest"], r["protocol"]): r for r in base}
    pairs = []
    for record in other:
        match = by_key.get((record["window"], record["digest"], record["protocol"]))
        if match is not None and None not in (task.example(match), task.example(record)):
            pairs.append((match, record))
    matches, records = zip(*pairs, strict=True) if pairs else ((), ())
    columns = task.values(matches), task.values(records), records, task.weights(records)
    weighted = [row for row in zip(*columns, strict=True) if row[-1]]
    a, b, records, weights = zip(*weighted, strict=True) if weighted else ((), (), (), ())
    clusters = [task.cluster(record) for record in records]
    return paired(a, b, weights=weights, clusters=clusters)


def lines(task: Task, gaps: Sequence[Gap]) -> list[Record]:
    """Returns the rows of differences.csv."""
    return [
        {
            "task": task.label,
            "part": gap.part,
            "row": gap.row,
            "against": gap.base,
            "length": gap.length,
            **dataclasses.asdict(gap.difference),
            "mark": gap.difference.mark,
        }
        for gap in gaps
    ]


def table(gaps: Sequence[Gap]) -> tuple[list[int], dict[Key, list[Difference | None]]]:
    """Returns the lengths, and the differences at these lengths by (row, base, part)."""
    lengths = sorted({gap.length for gap in gaps})
    by_key = {(gap.row, gap.base, gap.part, gap.length): gap.difference for gap in gaps}
    names = dict.fromkeys((gap.row, gap.base, gap.part) for gap in gaps)
    return lengths, {name: [by_key.get((*name, n)) for n in lengths] for name in names}


def text(task: Task, gaps: Sequence[Gap]) -> list[str]:
    """Returns Markdown of the differences, with intervals and counts; empty without gaps."""
    if not gaps:
        return []
    lengths, rows = table(gaps)
    grid = [["row", *(f"{length:,}" for length in lengths)]]
    for (row, base, part), entries in rows.items():
        name = f"{row} against {base}, {part}" if part else f"{row} against {base}"
        grid.append([name, *(_cell(task, difference) for difference in entries)])
    return [
        f"{unit(task)}, paired: [95 % interval] (examples), * p < 0.05, ** p < 0.01:\n",
        markdown(grid),
    ]


def _cell(task: Task, difference: Difference | None) -> str:
    if difference is None:
        return ""
    mean, low, high = _numbers(task, difference)
    interval = "" if math.isnan(difference.low) else f" [{low}, {high}]"
    return f"{mean}{interval} ({difference.count})"


def _numbers(task: Task, difference: Difference) -> tuple[str, str, str]:
    """Returns the mean with its mark of significance, and both ends of the interval, as text."""
    digits = max(task.metric.decimals, 3)
    mean, low, high = (
        f"{value:+.{digits}f}" for value in (difference.mean, difference.low, difference.high)
    )
    return mean + difference.mark, low, high


def unit(task: Task) -> str:
    """Returns the unit of a difference."""
    return f"Difference in {task.metric.example_unit or task.metric.name}"


def template_variables(task: Task, gaps: Sequence[Gap]) -> dict[str, Any]:
    """Returns the variables of the page's templates for the differences of a task."""
    lengths, rows = table(gaps)
    entries = {
        name: [None if difference is None else _entry(task, difference) for difference in row]
        for name, row in rows.items()
    }
    return {"lengths": lengths, "rows": entries, "unit": unit(task)}


def _entry(task: Task, difference: Difference) -> dict[str, Any]:
    marks = _MARKS["lower" if task.metric.lower_is_better else "higher"]
    mean, low, high = _numbers(task, difference)
    interval = "" if math.isnan(difference.low) else f"{low} to {high}, "
    note = f"{interval}n = {difference.count}"
    return {
        "mean": difference.mean,
        "text": mean.replace("-", "−"),
        "kind": marks[int(math.copysign(1, difference.mean))] if difference.mark else "",
        "note": note.replace("-", "−"),
    }
