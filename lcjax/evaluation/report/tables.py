"""Tables from cells: Markdown and terminal, LaTeX, CSV (one line a cell).

Rows are methods and columns are lengths, as in the papers. The best number of a column is **bold**,
and the second of three or more is _underlined_.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lcjax.evaluation.statistics import is_finite
from lcjax.evaluation.task import Metric, Record, Records

# First and last columns of CSV files.
_LEADING = ("task", "protocol", "method", "length", "value")
_TRAILING = (
    *("tokens_per_second", "peak_bytes", "peak_bytes_at_most", "cache_bytes"),
    *("seconds", "compile_seconds"),
)


class Entry(NamedTuple):
    """One printed number, its place in its column (1: best, 2: second), and its interval."""

    text: str
    place: int | None
    value: float | None
    interval: str


def table_entries(
    cells: Records, key: str, metric: Metric
) -> tuple[list[int], dict[str, list[Entry]]]:
    """Returns the lengths, and the entries of every method at these lengths."""
    methods = list(dict.fromkeys(cell["method"] for cell in cells))
    lengths = sorted({cell["length"] for cell in cells})
    by_key = {(cell["method"], cell["length"]): cell for cell in cells}
    rows: dict[str, list[Entry]] = {method: [] for method in methods}
    for length in lengths:
        column = [by_key.get((method, length), {}) for method in methods]
        places = _places([cell.get(key) for cell in column], metric)
        for method, cell in zip(methods, column, strict=True):
            value = cell.get(key)
            text = _text(value, metric)
            rows[method].append(Entry(text, places.get(text), value, interval_text(cell, metric)))
    return lengths, rows


def grid(cells: Records, key: str, metric: Metric) -> list[list[str]]:
    """Returns a header and one row per method, one column per length, with Markdown marks."""
    lengths, rows = table_entries(cells, key, metric)
    marks = {None: "{}", 1: "**{}**", 2: "_{}_"}
    return [
        ["method", *(f"{length:,}" for length in lengths)],
        *([name, *(marks[e.place].format(e.text) for e in row)] for name, row in rows.items()),
    ]


def interval_text(cell: Record, metric: Metric) -> str:
    """Returns `5.91 – 6.32`, or an empty string without an interval."""
    low, high = cell.get("ci_low"), cell.get("ci_high")
    return f"{_text(low, metric)} – {_text(high, metric)}" if is_finite(low) else ""


def _places(column: Sequence[float | None], metric: Metric) -> dict[str, int]:
    """Returns places by printed number, so equal texts share one; none for a single method."""
    values = sorted(filter(is_finite, column), reverse=not metric.lower_is_better)
    texts = list(dict.fromkeys(_text(value, metric) for value in values))
    num_places = min(2, len(column) - 1)  # the second of two is the last
    return {text: place for place, text in enumerate(texts[:num_places], 1)}


def _text(value: float | None, metric: Metric) -> str:
    return "" if value is None else f"{value:,.{metric.decimals}f}"


def format_aggregates(by_method: Mapping[str, Record]) -> tuple[list[str], dict[str, list[str]]]:
    """Returns the column names and, by method, the printed numbers of `Task.aggregates`.

    A field that a method lacks is empty.
    """
    heads = list(dict.fromkeys(head for entry in by_method.values() for head in entry))
    return heads, {name: [_plain(entry.get(h)) for h in heads] for name, entry in by_method.items()}


def _plain(value: float | str | None) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else f"{value:,}"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Formats a Markdown table with aligned columns; all but the first are right-aligned."""
    widths = [max(3, *(len(cell) for cell in column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("| " + " | ".join(cells) + " |")
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([lines[0], "| " + " | ".join(rule) + " |", *lines[1:]]) + "\n"


def to_csv(cells: Records) -> str:
    """Formats cells as CSV, one line per cell with full numbers; missing values are empty."""
    keys = list(dict.fromkeys(key for cell in cells for key in cell))
    middle = [key for key in keys if key not in _LEADING + _TRAILING]
    order = [key for key in (*_LEADING, *middle, *_TRAILING) if key in keys]
    out = io.StringIO()
    writer = csv.DictWriter(out, order, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows({k: "" if v is None else v for k, v in cell.items()} for cell in cells)
    return out.getvalue()


_TEX = str.maketrans(
    {c: f"\\{c}" for c in "&%$#_{}"}
    | {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}"}
    | {"–": "--", "≤": r"$\le$"}
)


def latex(cells: Records, key: str, metric: Metric) -> str:
    """Formats a booktabs `tabular`; the best number is bold and the second underlined."""
    lengths, rows = table_entries(cells, key, metric)
    marks = {None: "{}", 1: r"\textbf{{{}}}", 2: r"\underline{{{}}}"}
    table = [["method", *(f"{length:,}" for length in lengths)]]
    for name, row in rows.items():
        texts = (marks[entry.place].format(entry.text.translate(_TEX)) for entry in row)
        table.append([name.translate(_TEX), *texts])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [" & ".join(map(str.ljust, row, widths)).rstrip() + r" \\" for row in table]
    body = [r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule"]
    direction = "lower" if metric.lower_is_better else "higher"
    return "\n".join(
        [
            f"% {metric.title}, {direction} is better; \\usepackage{{booktabs}}",
            rf"\begin{{tabular}}{{l{'r' * len(lengths)}}}",
            *body,
            r"\end{tabular}",
            "",
        ]
    )
