"""What differs between rows of a table beyond chance: the same examples, one by one."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from lcjax.evaluation.report.tables import markdown
from lcjax.evaluation.statistics import Difference, paired
from lcjax.evaluation.task import Record, Task

Key = tuple[str, str, str]  # a row, the one that it is compared with, and a part of the task
_MARKS = {"lower": {-1: "better", 1: "worse"}, "higher": {-1: "worse", 1: "better"}}


@dataclasses.dataclass(frozen=True)
class Gap:
    """How far a row of one task is from the row that it is compared with, at one length."""

    row: str
    base: str
    part: str  # one of the task's own parts; empty: all of it
    length: int
    found: Difference


def between(
    task: Task,
    groups: Mapping[str, Mapping[int, Sequence[Record]]],
    bases: Mapping[str, str],
) -> list[Gap]:
    """Every row of `bases` against its value; `groups` are records by row and length.

    Also by the parts of the task, where it has several. Rows without common examples have none.
    """
    gaps = []
    for row, base in bases.items():
        for length, records in groups[row].items():
            twins = groups[base].get(length, [])
            parts = list(dict.fromkeys(task.part(record) for record in records))
            for part in ("", *(parts if len(parts) > 1 else ())):
                own = [r for r in records if not part or task.part(r) == part]
                found = of_records(task, twins, own)
                if found.count:
                    gaps.append(Gap(row, base, part, length, found))
    return gaps


def of_records(task: Task, base: Sequence[Record], other: Sequence[Record]) -> Difference:
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


def lines(task: Task, gaps: Sequence[Gap]) -> list[Record]:
    """As lines of a CSV file."""
    return [
        {
            "task": task.label,
            "part": gap.part,
            "row": gap.row,
            "against": gap.base,
            "length": gap.length,
            **dataclasses.asdict(gap.found),
            "mark": gap.found.mark,
        }
        for gap in gaps
    ]


def table(gaps: Sequence[Gap]) -> tuple[list[int], dict[Key, list[Difference | None]]]:
    """The lengths, and by (row, base, part) the differences at these lengths."""
    lengths = sorted({gap.length for gap in gaps})
    found = {(gap.row, gap.base, gap.part, gap.length): gap.found for gap in gaps}
    names = dict.fromkeys((gap.row, gap.base, gap.part) for gap in gaps)
    return lengths, {name: [found.get((*name, n)) for n in lengths] for name in names}


def text(task: Task, gaps: Sequence[Gap]) -> list[str]:
    """As Markdown: number, interval and examples of every comparison; empty where there is none."""
    if not gaps:
        return []
    lengths, rows = table(gaps)
    grid = [
        ["row", *(f"{length:,}" for length in lengths)],
        *([_name(*name), *(_cell(task, found) for found in row)] for name, row in rows.items()),
    ]
    return [
        f"{unit(task)}, paired: [95 % interval] (examples), * p < 0.05, ** p < 0.01:\n",
        markdown(grid),
    ]


def _name(row: str, base: str, part: str) -> str:
    return f"{row} against {base}" + f", {part}" * bool(part)


def _cell(task: Task, found: Difference | None) -> str:
    if found is None:
        return ""
    if math.isnan(found.low):
        return f"{_number(task, found)} ({found.count})"
    digits = _digits(task)
    ends = f"{found.low:+.{digits}f}, {found.high:+.{digits}f}"
    return f"{_number(task, found)} [{ends}] ({found.count})"


def _digits(task: Task) -> int:
    return max(task.metric.decimals, 3)


def _number(task: Task, found: Difference) -> str:
    return f"{found.mean:+.{_digits(task)}f}{found.mark}"


def unit(task: Task) -> str:
    """What a difference is counted in."""
    if task.metric.name == "perplexity":
        return "Difference in nats a token"
    return f"Difference in {task.metric.name}"


def shown(task: Task, gaps: Sequence[Gap]) -> dict[str, Any]:
    """What the templates ask of a task's differences."""
    lengths, rows = table(gaps)
    entries = {
        name: [None if found is None else _entry(task, found) for found in row]
        for name, row in rows.items()
    }
    return {"lengths": lengths, "rows": entries, "unit": unit(task)}


def _entry(task: Task, found: Difference) -> dict[str, Any]:
    side = _MARKS["lower" if task.metric.lower_is_better else "higher"]
    note = f"n = {found.count}"
    if not math.isnan(found.low):
        digits = _digits(task)
        note = f"{found.low:+.{digits}f} to {found.high:+.{digits}f}, {note}"
    return {
        "mean": found.mean,
        "text": _number(task, found).replace("-", "−"),
        "kind": side[int(math.copysign(1, found.mean))] if found.mark else "",
        "note": note.replace("-", "−"),
    }
