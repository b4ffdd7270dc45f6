"""Figures of all tasks together: what methods cost, and perplexity against accuracy."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from lcjax.evaluation.report.plots import GREY, canvas, look, tokens
from lcjax.evaluation.statistics import Correlation, pearson, spearman
from lcjax.evaluation.task import Record, Task


def cost_bars(rows: Sequence[Record], path: Path) -> Path:
    """Tokens per second and peak memory by length, one bar a method.

    `rows` are those of `report.page.costs`; a peak that is only a bound is hatched.
    """
    methods = list(dict.fromkeys(row["method"] for row in rows))
    lengths = sorted({row["length"] for row in rows})
    wide = max(7.2, 1.6 + 0.9 * len(lengths) + 0.16 * len(lengths) * len(methods))
    with canvas(path, min(wide, 14), 3.4 + 0.26 * -(-len(methods) // 3)) as figure:
        panels = figure.subplots(1, 2)
        _bars(panels[0], rows, methods, lengths, "speed", 1.0)
        _bars(panels[1], rows, methods, lengths, "peak", 1e9)
        panels[0].set_ylabel("tokens per second")
        panels[1].set_ylabel("peak memory, GB")
        if any(row["bound"] for row in rows):
            panels[1].set_title("hatched: at most this", fontsize=9, fontweight="normal", pad=4)
        figure.supxlabel("context length in tokens", fontsize=10)
        handles, names = panels[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper left", ncols=3, fontsize=9)
    return path


def _bars(axes, rows, methods: list[str], lengths: list[int], key: str, unit: float) -> None:
    width = 0.8 / len(methods)
    for index, method in enumerate(methods):
        own = {row["length"]: row for row in rows if row["method"] == method}
        x = [i + (index - (len(methods) - 1) / 2) * width for i in range(len(lengths))]
        y = [(own.get(length, {}).get(key) or 0) / unit for length in lengths]
        colour = look(index)["color"]
        bars = axes.bar(x, y, 0.92 * width, label=method, color=colour, zorder=3)
        for bar, length in zip(bars, lengths, strict=True):
            if key == "peak" and own.get(length, {}).get("bound"):
                bar.set(fill=False, edgecolor=colour, hatch="////", linewidth=0.8)
    axes.set_xticks(range(len(lengths)), [tokens(length) for length in lengths])
    axes.tick_params(axis="x", length=0, labelrotation=45 if len(lengths) > 4 else 0)
    axes.grid(axis="x", visible=False)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")


def perplexity_against_accuracy(
    points: Mapping[str, tuple[float, float]],
    names: tuple[str, str],
    path: Path,
    *,
    methods: Sequence[str] = (),
) -> Path:
    """One point a method, the least-squares line, and how far both go together.

    Args:
      points: (perplexity, accuracy) by method.
      names: of the axes, such as ("perplexity (last_k) at 32,768", "mean of 3 tasks").
      path: of the PNG; the SVG lies beside it.
      methods: all of the run, in the order that gives them their colours; those of `points` if
        empty.
    """
    x, y = (np.asarray(values, float) for values in zip(*points.values(), strict=True))
    with canvas(path, 7.2, max(4.6, 0.3 * len(points) + 1.6)) as figure:
        axes = figure.add_subplot()
        order = list(methods or points)
        for method, (a, b) in points.items():
            style = {**look(order.index(method)), "linestyle": "none"}
            axes.plot(a, b, label=method, **style, zorder=3)
        if np.ptp(x) > 0:
            slope, start = np.polyfit(x, y, 1)
            ends = np.asarray([x.min(), x.max()])
            axes.plot(ends, start + slope * ends, color=GREY, linewidth=1.2, zorder=2)
        lines = (
            f"n = {len(points)}",
            _words("Pearson r", pearson(x, y)),
            _words("Spearman ρ", spearman(x, y)),
        )
        axes.set_title("Perplexity against accuracy")
        axes.set_xlabel(names[0] + "\n" + ", ".join(lines))
        axes.set_ylabel(names[1])
        axes.legend(loc="center left", bbox_to_anchor=(1.02, 0.5), borderaxespad=0)
    return path


def _words(name: str, found: Correlation) -> str:
    if found.value != found.value:
        return f"{name} undefined"
    return f"{name} = {found.value:.2f} [{found.low:.2f}, {found.high:.2f}]"


def together(cells: Mapping[Task, Sequence[Record]], folder: Path) -> list[Path]:
    """The scatter of a run, where at least three methods have a perplexity and an accuracy.

    At the longest length; the first task of perplexity, the mean of all tasks where higher is
    better.
    """
    length = max(cell["length"] for own in cells.values() for cell in own)
    at = {
        task: {c["method"]: c["value"] for c in own if c["length"] == length and _known(c["value"])}
        for task, own in cells.items()
    }
    losses = [task for task in cells if task.metric.name == "perplexity"]
    shares = [task for task in cells if not task.metric.lower_is_better]
    if not losses or not shares:
        return []
    points = {
        method: (value, float(np.mean([at[task][method] for task in shares])))
        for method, value in at[losses[0]].items()
        if all(method in at[task] for task in shares) and value <= losses[0].metric.dash_above
    }
    if len(points) < 3:
        return []
    what = shares[0].metric.title if len(shares) == 1 else f"mean of {len(shares)} tasks"
    names = (f"{losses[0].metric.title} at {tokens(length)} tokens", what)
    methods = list(dict.fromkeys(cell["method"] for own in cells.values() for cell in own))
    path = folder / "perplexity_accuracy.png"
    return [perplexity_against_accuracy(points, names, path, methods=methods)]


def _known(value: float | None) -> bool:
    return value is not None and bool(np.isfinite(value))
