"""Figures of a report: of one task, and of perplexity against accuracy.

matplotlib is imported when a figure is drawn, and no window is opened.
"""

import itertools
from collections.abc import Collection, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lcjax.errors import InputError, import_package
from lcjax.evaluation.statistics import (
    Correlation,
    Records,
    group_by,
    is_finite,
    pearson,
    spearman,
)
from lcjax.files import atomic_file

if TYPE_CHECKING:
    from lcjax.evaluation.task import Metric, Task

# The palette of Okabe and Ito for colour-blind readers, without yellow, which is faint on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#333333")
_MARKERS = "osD^vPX*"
_LINES = (
    "-",
    (0, (5, 1.5)),
    (0, (1, 1.2)),
    (0, (4, 1.2, 1, 1.2)),
)  # the next one after each cycle of colours
GREY = "#777777"
_STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 12,
    "axes.labelsize": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.8,
    "lines.linewidth": 2.0,
    "lines.markersize": 6,
    "legend.frameon": False,
    "savefig.dpi": 160,
    "svg.fonttype": "none",
    "svg.hashsalt": "lcjax",  # ids inside a file would otherwise differ from run to run
}
_WRITER = "lcjax, long-context language models"  # in each PNG, near its beginning
_HEAD = 4096  # bytes
_SVG_METADATA = ("Creator", "Date", "Format", "Type")


@contextmanager
def canvas(path: Path, width: float, height: float):
    """Yields a figure that is saved as PNG and SVG on exit; equal numbers give equal bytes."""
    matplotlib = import_package("matplotlib", path.name)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        for text in figure.findobj(Text):  # a `$` of a name begins no formula; ticks come later
            if "$" in text.get_text():
                text.set_parse_math(False)
        with atomic_file(path, "wb") as file:
            figure.savefig(file, format="png", metadata={"Software": _WRITER})
        with atomic_file(path.with_suffix(".svg"), "wb") as file:
            figure.savefig(file, format="svg", metadata=dict.fromkeys(_SVG_METADATA))


def check_picture(path: Path) -> Path:
    """Returns `path`; raises an InputError unless `canvas` may write a picture there.

    An existing PNG, and the SVG beside it, are replaced only if `canvas` wrote the PNG.
    """
    if path.suffix != ".png":
        raise InputError(f"out={path} must end with .png; an SVG is written beside it")
    head = b""
    if path.is_file():
        with path.open("rb") as file:
            head = file.read(_HEAD)
    if _WRITER.encode() not in head:
        for file in (path, path.with_suffix(".svg")):
            if file.exists() or file.is_symlink():
                raise InputError(f"out={file} exists and is no picture of lcjax; name another file")
    return path


def over_lengths(cells: Records, metric: "Metric", path: Path) -> Path:
    """Draws one line per method over the lengths, on a log2 axis.

    A single length is drawn with one row per method.
    """
    lengths = sorted({cell["length"] for cell in cells})
    if len(lengths) == 1:
        return _at_one_length(cells, metric, path)
    methods = group_by(cells, "method")
    with canvas(path, 8.4, _height(len(methods))) as figure:
        axes = figure.add_subplot()
        for index, (method, group) in enumerate(methods.items()):
            group = sorted(group, key=lambda cell: cell["length"])
            x = [cell["length"] for cell in group]
            y = [_number(cell["value"]) for cell in group]
            axes.plot(x, y, label=method, **series_style(index), zorder=3)
        axes.set_xscale("log", base=2)
        _count_ticks(axes, lengths)
        axes.set_xlim(lengths[0] / 1.12, lengths[-1] * 1.12)
        value_axis(axes, [_number(cell["value"]) for cell in cells], metric)
        axes.set_xlabel("context length in tokens")
        axes.set_ylabel(metric.name)
        axes.set_title(f"{metric.heading} by context length")
        _mark_trained(axes, {cell["trained"] for cell in cells}, axes.get_xlim())
        _legend(axes)
    return path


def _at_one_length(cells: Records, metric: "Metric", path: Path) -> Path:
    """Draws a dot per method, with a bar for its 95 % interval if it has one."""
    values = [_number(cell["value"]) for cell in cells]
    ends = [[_number(cell.get(key)) for key in ("ci_low", "ci_high")] for cell in cells]
    with canvas(path, 8.4, max(2.4, 0.3 * len(cells) + 1.4)) as figure:
        axes = figure.add_subplot()
        for row, (value, interval) in enumerate(zip(values, ends, strict=True)):
            style = {**series_style(row), "linestyle": "none"}
            axes.plot(interval, [row, row], color=style["color"], linewidth=1.6, zorder=2)
            axes.plot(value, row, **style, zorder=3)
        names = [cell["method"].replace("$", r"\$") for cell in cells]
        axes.set_yticks(range(len(cells)), names)
        axes.set_ylim(len(cells) - 0.5, -0.5)
        value_axis(axes, [*values, *itertools.chain(*ends)], metric, "x")
        axes.set_xlabel(metric.name)
        axes.set_title(f"{metric.heading} at {cells[0]['length']:,} tokens")
    return path


def value_axis(axes, values: Sequence[float], metric: "Metric", along: str = "y") -> None:
    """Sets limits and scale: 0 to 1 for shares, and log for losses that differ by a factor of 8."""
    limit, axis = getattr(axes, f"set_{along}lim"), getattr(axes, f"{along}axis")
    finite = [value for value in values if np.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    if not finite or (not metric.lower_is_better and low >= 0 and high <= 1):
        limit(-0.04, 1.04)
    elif metric.lower_is_better and low > 0 and high > 8 * low:
        from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

        getattr(axes, f"set_{along}scale")("log")
        limit(low / (high / low) ** 0.06, high * (high / low) ** 0.06)
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        axis.set_minor_formatter(NullFormatter())
    else:
        margin = 0.12 * (high - low) or 0.05 * abs(high) or 0.05
        limit(low - margin, high + margin)


def over_counts(
    cells: Records,
    panels: Mapping[str, Mapping[str, int]],
    labels: tuple[str, str],
    path: Path,
    *,
    scale: str = "log",
    levels: Mapping[str, str] | None = None,
) -> Path:
    """Draws scores over a count, such as demonstrations, with one line per cell.

    Args:
      cells: Cells of one length.
      panels: For each title of a panel, the count of each field of scores.
      labels: Labels of the x and y axes.
      path: The PNG file.
      scale: Scale of the x axis: log or linear.
      levels: Names of scores without a count, by field; horizontal lines in the cell's colour.
    """
    levels = {f: n for f, n in (levels or {}).items() if any(f in cell for cell in cells)}
    styles = dict(zip(levels, _LINES[1:], strict=False))
    with canvas(path, 8.4, max(_height(len(cells)), 3.3 * len(panels) + 0.4)) as figure:
        rows = figure.subplots(len(panels), 1, squeeze=False, sharex=True)[:, 0]
        for axes, (title, counts) in zip(rows, panels.items(), strict=True):
            for index, cell in enumerate(cells):
                y = [_number(cell.get(name)) for name in counts]
                axes.plot(
                    list(counts.values()), y, label=cell["method"], **series_style(index), zorder=3
                )
                for field in levels:
                    axes.axhline(
                        _number(cell.get(field)), color=series_style(index)["color"],
                        linestyle=styles[field], linewidth=1.2, zorder=2,
                    )  # fmt: skip
            for field, name in levels.items():
                axes.plot([], [], color=GREY, linestyle=styles[field], linewidth=1.2, label=name)
            axes.set_ylim(-0.04, 1.04)
            axes.set_ylabel(labels[1])
            axes.set_title(title)
            _legend(axes)
        all_counts = sorted({count for counts in panels.values() for count in counts.values()})
        place = np.log if scale == "log" else float
        ticks, gap = all_counts[-1:], (place(all_counts[-1]) - place(all_counts[0])) / 18
        for count in all_counts[-2::-1]:
            if place(ticks[0]) - place(count) >= gap:  # labels that are closer would touch
                ticks.insert(0, count)
        rows[-1].set_xscale(scale)
        _count_ticks(rows[-1], ticks)
        rows[-1].set_xlabel(labels[0])
    return path


def over_positions(curves: Records, path: Path) -> Path:
    """Draws the mean loss by position in the window, with one standard error over documents."""
    with canvas(path, 8.4, _height(len(curves))) as figure:
        axes = figure.add_subplot()
        for index, curve in enumerate(curves):
            x, y = np.asarray(curve["position"]), np.asarray(curve["nll"])
            style = {**series_style(index), "marker": None}
            axes.plot(x, y, label=curve["method"], linewidth=1.6, zorder=3, **style)
            if curve["standard_error"] is not None:
                band = np.asarray(curve["standard_error"])
                axes.fill_between(
                    x, y - band, y + band, alpha=0.18, linewidth=0, color=style["color"]
                )
        longest, start = max(curve["length"] for curve in curves), 0
        if curves[0]["log"]:
            axes.set_xscale("log", base=2)
            ticks = [2**k for k in range(0, int(np.log2(longest)) + 1, 2)]
            start = min(float(np.min(curve["position"])) for curve in curves)
        else:
            ticks = [longest * k // 8 for k in range(9)]
        _count_ticks(axes, ticks)
        axes.set_xlim(start, longest)
        axes.set_xlabel("position in the window, in tokens")
        axes.set_ylabel("negative log-likelihood, nats per token")
        axes.set_title(f"Loss by position in windows of {longest:,} tokens")
        _mark_trained(axes, {curve["trained"] for curve in curves}, axes.get_xlim())
        _legend(axes)
    return path


def heat_maps(records: Records, title: str, path: Path, *, by: str = "depth") -> Path:
    """Draws accuracy by length and depth, one panel per method, with depth 0 on top.

    Args:
      records: Records with `correct`, `length`, `trained` and the field `by`.
      title: The title of the figure.
      path: The PNG file.
      by: The field of the rows. Rows of a field other than depth are not sorted, and their cells
        show numbers.
    """
    methods = group_by(records, "method")
    lengths = sorted({record["length"] for record in records})
    rows = list(dict.fromkeys(record[by] for record in records))
    names = rows
    if by == "depth":
        rows = sorted(rows)
        # Depths on a sigmoid differ by less than a percent near the ends.
        digits = 0 if len({f"{depth:.0%}" for depth in rows}) == len(rows) else 2
        names = [f"{depth:.{digits}%}" for depth in rows]
    columns = 2 if len(methods) == 4 else min(3, len(methods))
    lines = -(-len(methods) // columns)
    wide, high = max(2.6, 0.62 * len(lengths) + 1.2), max(2.4, 0.3 * len(rows) + 1.3)
    label_width = 1 + 0.07 * max(map(len, names))
    with canvas(path, max(5.2, columns * wide + label_width), lines * high + 0.5) as figure:
        panels = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True).ravel()
        for axes, (method, group) in zip(panels, methods.items(), strict=False):
            mesh = _panel(axes, group, lengths, rows, by)
            axes.set_title(method, fontsize=10.5)
            axes.set_yticks(np.arange(len(rows)) + 0.5, names)
        for axes in panels[len(methods) :]:
            axes.set_visible(False)
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
        trained = {record["trained"] for record in records}
        has_line = any(lengths[0] <= length < lengths[-1] for length in trained)
        note = " (dashed: trained length)" if has_line else ""
        figure.supxlabel(f"context length in tokens{note}", fontsize=10)
        if by == "depth":
            figure.supylabel("depth of what is hidden", fontsize=10)
        bar = figure.colorbar(mesh, ax=list(panels), shrink=0.9, pad=0.02)
        bar.outline.set_visible(False)
    return path


def _panel(axes, records: Records, lengths: list[int], rows: list, by: str):
    sums, counts = np.zeros((len(rows), len(lengths))), np.zeros((len(rows), len(lengths)))
    for record in records:
        cell = rows.index(record[by]), lengths.index(record["length"])
        sums[cell] += record["correct"]
        counts[cell] += 1
    share = np.ma.masked_where(counts == 0, sums / np.maximum(counts, 1))
    axes.patch.set(hatch="///", edgecolor="#CCCCCC")  # visible in cells without a measurement
    mesh = axes.pcolormesh(
        np.arange(len(lengths) + 1),
        np.arange(len(rows) + 1),
        share,
        cmap="cividis",
        vmin=0,
        vmax=1,
        edgecolors="white",
        linewidth=0.6,
    )
    if by != "depth":
        _numbers(axes, share)
    axes.set_ylim(len(rows), 0)  # panels share the axis: inverting it twice would undo it
    axes.grid(False)
    axes.spines[:].set_visible(False)
    turn = 45 if len(lengths) > 5 else 0
    axes.set_xticks(np.arange(len(lengths)) + 0.5, [f"{n:,}" for n in lengths], rotation=turn)
    axes.tick_params(length=0)
    trained = records[0]["trained"]
    num_trained = sum(length <= trained for length in lengths)
    # A line between the lengths within and beyond the trained length.
    if 0 < num_trained < len(lengths):
        axes.axvline(num_trained, color="white", linewidth=4)
        axes.axvline(num_trained, color="#D55E00", linewidth=2.4, linestyle=(0, (3, 1.5)))
    return mesh


def _numbers(axes, share: np.ma.MaskedArray) -> None:
    """Writes the number in every cell; black and white are avoided, as a dark page swaps them."""
    for (row, column), value in np.ma.ndenumerate(share):
        axes.text(
            column + 0.5, row + 0.5, f"{value:.2f}", ha="center", va="center", fontsize=8.5,
            color="#111111" if value > 0.5 else "#FEFEFE",
        )  # fmt: skip


def _scatter_panels(
    panels: Mapping[str, Mapping[str, tuple[float, float]]],
    label: str,
    path: Path,
    *,
    methods: Sequence[str],
    approximate: Collection[str] = (),
) -> Path:
    """Draws one point per method in each panel, the least-squares line, and the correlations.

    Args:
      panels: (perplexity, accuracy) by method, by the title of the panel.
      label: Label of the x axes, such as "perplexity (last_k) at 32,768 tokens".
      path: The PNG file; the SVG is written beside it.
      methods: All methods of the run, in the order of their colours.
      approximate: Methods without exact attention, whose marks are hollow.
    """
    order = list(methods)
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    with canvas(path, 4.4 * columns + 2.8, max(4.2 * rows, 0.3 * len(order) + 1.6)) as figure:
        axes = figure.subplots(rows, columns, squeeze=False).ravel()
        for panel, (title, points) in zip(axes, panels.items(), strict=False):
            _scatter(panel, points, order, approximate)
            panel.set_title(title)
            panel.set_xlabel(f"{label}\n{_correlations(points)}")
        for panel in axes[len(panels) :]:
            panel.set_visible(False)
        is_exact = set(order).isdisjoint(approximate)
        note = "" if is_exact else " (hollow: approximate attention)"
        figure.suptitle(f"Perplexity against accuracy{note}", x=0.01, ha="left", fontweight="bold")
        handles: dict[str, Any] = {}
        for panel in axes[: len(panels)]:
            for handle, name in zip(*panel.get_legend_handles_labels(), strict=True):
                handles.setdefault(name, handle)
        names = [name for name in order if name in handles]
        figure.legend([handles[name] for name in names], names, loc="outside right center")
    return path


def _scatter(axes, points: Mapping, order: Sequence[str], approximate: Collection[str]) -> None:
    for method, (a, b) in points.items():
        style = {**series_style(order.index(method)), "linestyle": "none"}
        if method in approximate:
            style |= {"markerfacecolor": "none", "markeredgewidth": 1.6}
        axes.plot(a, b, label=method, **style, zorder=3)
    x, y = (np.asarray(values, float) for values in zip(*points.values(), strict=True))
    if np.ptp(x) > 0:
        slope, start = np.polyfit(x, y, 1)
        ends = np.asarray([x.min(), x.max()])
        axes.plot(ends, start + slope * ends, color=GREY, linewidth=1.2, zorder=2)


def _correlations(points: Mapping[str, tuple[float, float]]) -> str:
    x, y = (np.asarray(values, float) for values in zip(*points.values(), strict=True))
    pearson_text = _correlation_text("Pearson r", pearson(x, y))
    return f"n = {len(x)}, {pearson_text}\n{_correlation_text('Spearman ρ', spearman(x, y))}"


def _correlation_text(name: str, result: Correlation) -> str:
    if result.value != result.value:
        return f"{name} undefined"
    return f"{name} = {result.value:.2f} [{result.low:.2f}, {result.high:.2f}]"


def perplexity_against_accuracy(
    cells: Mapping["Task", Records], folder: Path, approximate: Collection[str] = ()
) -> list[Path]:
    """Draws perplexity against accuracy of a run, with one panel for each task of accuracy.

    Perplexity is that of the first perplexity task, and accuracy that of every task where higher is
    better (`Task.overall`). Panels with less than three methods are left out.
    """
    losses = [task for task in cells if task.metric.name == "perplexity"]
    if not losses:
        return []
    perplexities, panels = _overall(losses[0], cells[losses[0]]), {}
    for task in (task for task in cells if not task.metric.lower_is_better):
        shares = _overall(task, cells[task])
        both = {name: (x, shares[name]) for name, x in perplexities.items() if name in shares}
        if len(both) >= 3:
            panels[f"{task.label}: {task.metric.name}"] = both
    if not panels:
        return []
    length = max(cell["length"] for cell in cells[losses[0]])
    label = f"{losses[0].metric.title} at {length:,} tokens"
    methods = list(dict.fromkeys(cell["method"] for group in cells.values() for cell in group))
    path = folder / "perplexity_accuracy.png"
    return [_scatter_panels(panels, label, path, methods=methods, approximate=approximate)]


def _overall(task: "Task", cells: Records) -> dict[str, float]:
    """Returns the number of each method that has all lengths, if it is finite."""
    lengths, groups = {cell["length"] for cell in cells}, group_by(cells, "method")
    values = {m: task.overall(group) for m, group in groups.items() if len(group) == len(lengths)}
    return {method: value for method, value in values.items() if is_finite(value)}


def series_style(index: int) -> dict:
    """Returns the colour, marker and line style of the `index`-th line of a figure."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "linestyle": _LINES[index // len(COLOURS) % len(_LINES)],
    }


def _height(methods: int) -> float:
    """Returns the height in inches of a figure with a legend of `methods` rows beside it."""
    return max(4.4, 0.29 * methods + 0.6)


def _number(value: float | None) -> float:
    return float("nan") if value is None else float(value)


def _count_ticks(axes, counts: Sequence[int]) -> None:
    axes.set_xticks(counts, [f"{count:,}" for count in counts])
    axes.minorticks_off()


def _mark_trained(axes, trained: set[int], limits: tuple[float, float]) -> None:
    for length in sorted(trained):
        if limits[0] <= length <= limits[1]:
            axes.axvline(length, color=GREY, linestyle=(0, (5, 4)), linewidth=1.2, zorder=1)
            axes.annotate(
                f"trained length {length:,}",
                (length, 1),
                xycoords=("data", "axes fraction"),
                xytext=(-5, -4),
                textcoords="offset points",
                rotation=90,
                ha="right",
                va="top",
                fontsize=8.5,
                color=GREY,
                # Hides the lines behind the text.
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
                zorder=4,
            )


def _legend(axes) -> None:
    axes.legend(loc="center left", bbox_to_anchor=(1.02, 0.5), borderaxespad=0, labelspacing=0.7)
