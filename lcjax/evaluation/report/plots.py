"""Figures of a report. matplotlib is imported when one is drawn, and never opens a window."""

from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from lcjax.evaluation.task import Metric, Record

# Okabe and Ito's colours, which colour-blind readers can tell apart; yellow is too faint on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#333333")
_MARKERS = "osD^vPX*"
_LINES = ("-", (0, (5, 1.5)), (0, (1, 1.2)), (0, (4, 1.2, 1, 1.2)))  # one for each round of colours
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
    "svg.hashsalt": "lcjax",  # names inside a file, which would differ from run to run
}
_SVG_METADATA = ("Creator", "Date", "Format", "Type")


@contextmanager
def canvas(path: Path, width: float, height: float):
    """A figure that is saved on leaving, as PNG and as SVG; equal numbers give equal bytes."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Software": None})
        # The same as lines and text: for papers, and for the page of the run.
        figure.savefig(path.with_suffix(".svg"), metadata=dict.fromkeys(_SVG_METADATA))


def over_lengths(cells: Sequence[Record], metric: Metric, path: Path) -> Path:
    """One line per method over the lengths, on a log2 axis with token counts as ticks.

    Of a single length, where lines would be dots upon each other, one row per method.
    """
    lengths = sorted({cell["length"] for cell in cells})
    if len(lengths) == 1:
        return _at_one_length(cells, metric, path)
    methods = by_method(cells)
    with canvas(path, 8.4, _height(len(methods))) as figure:
        axes = figure.add_subplot()
        for index, (method, own) in enumerate(methods.items()):
            own = sorted(own, key=lambda cell: cell["length"])
            x = [cell["length"] for cell in own]
            y = [_number(cell["value"]) for cell in own]
            axes.plot(x, y, label=method, **look(index), zorder=3)
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [tokens(length) for length in lengths])
        axes.minorticks_off()
        axes.set_xlim(lengths[0] / 1.12, lengths[-1] * 1.12)
        _value_axis(axes, [_number(cell["value"]) for cell in cells], metric)
        axes.set_xlabel("context length in tokens")
        axes.set_ylabel(metric.name)
        axes.set_title(metric.title[0].upper() + metric.title[1:] + " by context length")
        _mark_trained(axes, {cell["trained"] for cell in cells}, axes.get_xlim())
        _legend(axes)
    return path


def _at_one_length(cells: Sequence[Record], metric: Metric, path: Path) -> Path:
    """A dot per method, with a bar over its 95 % interval where one is known."""
    values = [_number(cell["value"]) for cell in cells]
    ends = [[_number(cell.get(key)) for key in ("ci_low", "ci_high")] for cell in cells]
    with canvas(path, 8.4, max(2.4, 0.3 * len(cells) + 1.4)) as figure:
        axes = figure.add_subplot()
        for row, (value, interval) in enumerate(zip(values, ends, strict=True)):
            style = {**look(row), "linestyle": "none"}
            axes.plot(interval, [row, row], color=style["color"], linewidth=1.6, zorder=2)
            axes.plot(value, row, **style, zorder=3)
        axes.set_yticks(range(len(cells)), [cell["method"] for cell in cells])
        axes.set_ylim(len(cells) - 0.5, -0.5)
        shown = [end for both, value in zip(ends, values) if value <= metric.dash_above
                 for end in both]  # fmt: skip
        _value_axis(axes, [*values, *shown], metric, "x")
        axes.set_xlabel(metric.name)
        title = metric.title[0].upper() + metric.title[1:]
        axes.set_title(f"{title} at {tokens(cells[0]['length'])} tokens")
    return path


def _value_axis(axes, values: Sequence[float], metric: Metric, along: str = "y") -> None:
    """Shares from 0 to 1; losses in log when methods are worlds apart, as far as tables print."""
    limit, axis = getattr(axes, f"set_{along}lim"), getattr(axes, f"{along}axis")
    finite = [value for value in values if np.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    if not finite or (not metric.lower_is_better and low >= 0 and high <= 1):
        limit(-0.04, 1.04)
    elif metric.lower_is_better and low > 0 and high > 8 * low:
        from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

        getattr(axes, f"set_{along}scale")("log")
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        axis.set_minor_formatter(NullFormatter())
        if high > metric.dash_above:
            limit(low / 1.3, max(metric.dash_above, 2 * low))
    else:
        room = 0.12 * (high - low) or 0.05 * abs(high) or 0.05
        limit(low - room, high + room)


def over_counts(
    cells: Sequence[Record],
    panels: Mapping[str, Mapping[str, int]],
    labels: tuple[str, str],
    path: Path,
) -> Path:
    """Scores over how many of something a prompt holds, one line per cell, on a log axis.

    `panels` are names of scores with their numbers, by the title of a panel.
    """
    with canvas(path, 8.4, max(_height(len(cells)), 3.3 * len(panels) + 0.4)) as figure:
        rows = figure.subplots(len(panels), 1, squeeze=False, sharex=True)[:, 0]
        for axes, (title, counts) in zip(rows, panels.items(), strict=True):
            for index, cell in enumerate(cells):
                y = [_number(cell.get(name)) for name in counts]
                axes.plot(list(counts.values()), y, label=cell["method"], **look(index), zorder=3)
            axes.set_ylim(-0.04, 1.04)
            axes.set_ylabel(labels[1])
            axes.set_title(title)
            _legend(axes)
        every = sorted({count for counts in panels.values() for count in counts.values()})
        shown, least = every[-1:], (every[-1] / every[0]) ** (1 / 18)
        for count in every[-2::-1]:
            if shown[0] >= least * count:  # labels that are closer would touch
                shown.insert(0, count)
        rows[-1].set_xscale("log")
        rows[-1].set_xticks(shown, [tokens(count) for count in shown])
        rows[-1].minorticks_off()
        rows[-1].set_xlabel(labels[0])
    return path


def over_positions(curves: Sequence[Record], path: Path) -> Path:
    """Mean loss by position in the window, with a band of one standard error over documents."""
    with canvas(path, 8.4, _height(len(curves))) as figure:
        axes = figure.add_subplot()
        for index, curve in enumerate(curves):
            x, y = np.asarray(curve["position"]), np.asarray(curve["nll"])
            look = {"color": COLOURS[index % len(COLOURS)]}
            line = {"linestyle": _LINES[index // len(COLOURS) % len(_LINES)]}
            axes.plot(x, y, label=curve["method"], linewidth=1.6, zorder=3, **line, **look)
            if curve["standard_error"] is not None:
                band = np.asarray(curve["standard_error"])
                axes.fill_between(x, y - band, y + band, alpha=0.18, linewidth=0, **look)
        longest, left = max(curve["length"] for curve in curves), 0
        if curves[0]["log"]:
            axes.set_xscale("log", base=2)
            ticks = [2**k for k in range(0, int(np.log2(longest)) + 1, 2)]
            left = min(float(np.min(curve["position"])) for curve in curves)
        else:
            ticks = [longest * k // 8 for k in range(9)]
        axes.set_xticks(ticks, [tokens(tick) for tick in ticks])
        axes.minorticks_off()
        axes.set_xlim(left, longest)
        axes.set_xlabel("position in the window, in tokens")
        axes.set_ylabel("negative log-likelihood, nats per token")
        axes.set_title(f"Loss by position in windows of {tokens(longest)} tokens")
        _mark_trained(axes, {curve["trained"] for curve in curves}, axes.get_xlim())
        _legend(axes)
    return path


def heat_maps(records: Sequence[Record], title: str, path: Path, *, by: str = "depth") -> Path:
    """Accuracy by length and depth, one panel a method, one colour scale, depth 0 on top.

    `by` is the field that rows are made of; those of another one stand as they come, with their
    numbers.
    """
    methods = by_method(records)
    lengths = sorted({record["length"] for record in records})
    rows = list(dict.fromkeys(record[by] for record in records))
    names = rows
    if by == "depth":
        rows = sorted(rows)
        names = [f"{depth:.0%}" for depth in rows]
    columns = 2 if len(methods) == 4 else min(3, len(methods))
    lines = -(-len(methods) // columns)
    wide, high = max(2.6, 0.62 * len(lengths) + 1.2), max(2.4, 0.3 * len(rows) + 1.3)
    beside = 1 + 0.07 * max(map(len, names))
    with canvas(path, max(5.2, columns * wide + beside), lines * high + 0.5) as figure:
        panels = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True).ravel()
        for axes, (method, own) in zip(panels, methods.items(), strict=False):
            picture = _panel(axes, own, lengths, rows, by)
            axes.set_title(method, fontsize=10.5)
            axes.set_yticks(np.arange(len(rows)) + 0.5, names)
        for axes in panels[len(methods) :]:
            axes.set_visible(False)
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
        trained = {record["trained"] for record in records}
        crossed = any(lengths[0] <= length < lengths[-1] for length in trained)
        note = " (dashed: trained length)" * crossed
        figure.supxlabel(f"context length in tokens{note}", fontsize=10)
        if by == "depth":
            figure.supylabel("depth of what is hidden", fontsize=10)
        bar = figure.colorbar(picture, ax=list(panels), shrink=0.9, pad=0.02)
        bar.outline.set_visible(False)
    return path


def _panel(axes, records: Sequence[Record], lengths: list[int], rows: list, by: str):
    sums, counts = np.zeros((len(rows), len(lengths))), np.zeros((len(rows), len(lengths)))
    for record in records:
        cell = rows.index(record[by]), lengths.index(record["length"])
        sums[cell] += record["correct"]
        counts[cell] += 1
    share = np.ma.masked_where(counts == 0, sums / np.maximum(counts, 1))
    axes.patch.set(hatch="///", edgecolor="#CCCCCC")  # shows through where nothing was measured
    picture = axes.pcolormesh(
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
    axes.set_xticks(np.arange(len(lengths)) + 0.5, [tokens(n) for n in lengths], rotation=turn)
    axes.tick_params(length=0)
    trained = records[0]["trained"]
    inside = sum(length <= trained for length in lengths)
    # Between columns: the last length that the model was trained for, and the first it was not.
    if 0 < inside < len(lengths):
        axes.axvline(inside, color="white", linewidth=4)
        axes.axvline(inside, color="#D55E00", linewidth=2.4, linestyle=(0, (3, 1.5)))
    return picture


def _numbers(axes, share: np.ma.MaskedArray) -> None:
    """In every cell that was measured; neither ink nor paper, which a dark page exchanges."""
    for (row, column), value in np.ma.ndenumerate(share):
        axes.text(
            column + 0.5, row + 0.5, f"{value:.2f}", ha="center", va="center", fontsize=8.5,
            color="#111111" if value > 0.5 else "#FEFEFE",
        )  # fmt: skip


def by_method(items: Sequence[Record]) -> dict[str, list[Record]]:
    groups: dict[str, list[Record]] = {}
    for item in items:
        groups.setdefault(item["method"], []).append(item)
    return groups


def look(index: int) -> dict:
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "linestyle": _LINES[index // len(COLOURS) % len(_LINES)],
    }


def _height(methods: int) -> float:
    """Inches of a figure whose legend, beside it, names so many."""
    return max(4.4, 0.29 * methods + 0.6)


def _number(value: float | None) -> float:
    return float("nan") if value is None else float(value)


def tokens(count: int) -> str:
    return f"{count:,}"


def _mark_trained(axes, trained: set[int], limits: tuple[float, float]) -> None:
    for length in sorted(trained):
        if limits[0] <= length <= limits[1]:
            axes.axvline(length, color=GREY, linestyle=(0, (5, 4)), linewidth=1.2, zorder=1)
            axes.annotate(
                f"trained length {tokens(length)}",
                (length, 1),
                xycoords=("data", "axes fraction"),
                xytext=(-5, -4),
                textcoords="offset points",
                rotation=90,
                ha="right",
                va="top",
                fontsize=8.5,
                color=GREY,
                # Lines pass behind it.
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
                zorder=4,
            )


def _legend(axes) -> None:
    axes.legend(loc="center left", bbox_to_anchor=(1.02, 0.5), borderaxespad=0, labelspacing=0.7)
