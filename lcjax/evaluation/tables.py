"""Tables from cells: Markdown and terminal (method by length), CSV (one line a cell)."""

import csv
import io
import math
from collections.abc import Sequence

from lcjax.evaluation.task import Metric, Record

# First what a cell is, then its numbers, then what it cost.
_LEADING = ("task", "protocol", "method", "length", "value")
_TRAILING = ("tokens_per_second", "peak_bytes", "peak_bytes_at_most", "seconds", "compile_seconds")


def grid(cells: Sequence[Record], key: str, metric: Metric) -> list[list[str]]:
    """Header and one row per method, one column per length; the best of a column is `**bold**`."""
    methods = list(dict.fromkeys(cell["method"] for cell in cells))
    lengths = sorted({cell["length"] for cell in cells})
    values = {(cell["method"], cell["length"]): cell.get(key) for cell in cells}
    rows = [["method", *(f"{length:,}" for length in lengths)]]
    rows += [[method] for method in methods]
    for length in lengths:
        column = [values.get((method, length)) for method in methods]
        best = _best([v for v in column if _shown(v, metric)], metric, len(column))
        for row, value in zip(rows[1:], column, strict=True):
            text = _text(value, metric)
            row.append(f"**{text}**" if _shown(value, metric) and text == best else text)
    return rows


def _shown(value: float | None, metric: Metric) -> bool:
    return value is not None and math.isfinite(value) and value <= metric.dash_above


def _best(values: list[float], metric: Metric, rivals: int) -> str | None:
    """The printed form of the best, so that what looks equal is bold together."""
    if rivals < 2 or not values:
        return None
    return _text(min(values) if metric.lower_is_better else max(values), metric)


def _text(value: float | None, metric: Metric) -> str:
    if value is None:
        return ""
    if math.isnan(value):
        return "nan"
    return f"{value:,.{metric.decimals}f}" if value <= metric.dash_above else "–"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns, numbers to the right."""
    widths = [max(3, *(len(cell) for cell in column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("| " + " | ".join(cells) + " |")
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([lines[0], "| " + " | ".join(rule) + " |", *lines[1:]]) + "\n"


def to_csv(cells: Sequence[Record]) -> str:
    """One line per method and length, numbers in full; empty where there is none."""
    keys = list(dict.fromkeys(key for cell in cells for key in cell))
    middle = [key for key in keys if key not in _LEADING + _TRAILING]
    order = [key for key in (*_LEADING, *middle, *_TRAILING) if key in keys]
    out = io.StringIO()
    writer = csv.DictWriter(out, order, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows({k: "" if v is None else v for k, v in cell.items()} for cell in cells)
    return out.getvalue()
