"""Figures of what methods cost: time and memory by length, and scores against them."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from lcjax.evaluation.plots import GREY, canvas, series_style, value_axis
from lcjax.evaluation.statistics import Record, Records, at_longest, group_by, is_finite
from lcjax.evaluation.task import Metric

# Methods differ in cost if one has this many times the bytes, or the seconds, of another. Seconds
# vary from run to run, and those of a cell that took less than a second say nothing.
_BYTES_FACTOR, _SECONDS_FACTOR, _LEAST_SECONDS = 1.05, 1.5, 1.0
_SECONDS = Metric("seconds", "seconds per example", True, 2)
# Where a label is tried: pixels between it and its point, and directions from the point, in turns
_GAPS = (3, 9, 16, 25, 36, 50, 70, 95, 125, 160)
_TURNS = np.array([0, 1, 15, 2, 14, 8, 7, 9, 6, 10, 3, 13, 4, 12, 5, 11]) / 16
_DIRECTIONS = np.stack([np.cos(2 * np.pi * _TURNS), np.sin(2 * np.pi * _TURNS)], axis=1)
_MARK = 5  # half the width of a mark, pixels

Cost = Callable[[Record], float | None]  # of a cell; None: unknown


@dataclasses.dataclass(frozen=True)
class ByteUnit:
    """The unit in which a table or a figure shows bytes."""

    name: str
    size: int

    def text(self, count: float | None) -> str:
        """Formats a number of bytes with three digits; `?` if it is not known."""
        return "?" if count is None else f"{float(f'{count / self.size:.3g}'):,.10g}"


def byte_unit(largest: float) -> ByteUnit:
    """Returns the unit for numbers of bytes of which `largest` is the largest."""
    for name, size in (("GB", 10**9), ("MB", 10**6)):
        if largest >= size:
            return ByteUnit(name, size)
    return ByteUnit("kB", 10**3)


def cost_bars(rows: Records, path: Path) -> Path:
    """Draws tokens per second and peak memory by length, one bar per method.

    `rows` are those of `report.page.costs`. A peak that is only a bound is hatched.
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
        by_length = {row["length"]: row for row in rows if row["method"] == method}
        x = [i + (index - (len(methods) - 1) / 2) * width for i in range(len(lengths))]
        y = [(by_length.get(length, {}).get(key) or 0) / unit for length in lengths]
        colour = series_style(index)["color"]
        bars = axes.bar(x, y, 0.92 * width, label=method, color=colour, zorder=3)
        for bar, length in zip(bars, lengths, strict=True):
            if key == "peak" and by_length.get(length, {}).get("bound"):
                bar.set(fill=False, edgecolor=colour, hatch="////", linewidth=0.8)
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.tick_params(axis="x", length=0, labelrotation=45 if len(lengths) > 4 else 0)
    axes.grid(axis="x", visible=False)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")


def over_costs(cells: Records, metric: Metric, path: Path) -> list[Path]:
    """Draws scores against the bytes of a row's KV cache, and against the seconds of an example.

    Each method has a point with its name and 95 % interval at the longest length, and faint points
    at the others. A line joins the methods that no other one beats at the same cost or less.

    Returns:
      `path`; nothing if methods differ neither in bytes nor in seconds.
    """
    longest = [cell for cell in at_longest(cells) if is_finite(cell["value"])]
    costs = _costs_to_draw(longest)
    if not costs:
        return []
    with canvas(path, 4.8 * len(costs) + 0.6, max(4.4, 0.24 * len(longest) + 2.0)) as figure:
        panels = figure.subplots(1, len(costs), squeeze=False, sharey=True)[0]
        ends = [end for cell in longest for end in _interval(cell)]
        value_axis(panels[0], [*(cell["value"] for cell in _known(cells)), *ends], metric)
        panels[0].set_ylabel(metric.name)
        for cost, axes in zip(costs, panels, strict=True):
            _cost_axis(axes, cost, _known(cells, cost))
            _draw_lengths(axes, cost, cells)
        title = f"{metric.heading} by cost at {longest[0]['length']:,} tokens"
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
        figure.draw_without_rendering()  # lays out the panels, on which the places of names depend
        for cost, axes in zip(costs, panels, strict=True):
            _draw_longest(axes, cost, cells, metric)
    return [path]


def _costs_to_draw(longest: Records) -> list[Cost]:
    """Returns the costs in which methods differ; seconds also where only bytes do."""
    bytes_differ = _differ(map(_cache_bytes, longest), _BYTES_FACTOR)
    is_timed = max((cell["seconds"] for cell in longest), default=0) >= _LEAST_SECONDS
    seconds_differ = is_timed and _differ(map(_seconds, longest), _SECONDS_FACTOR)
    is_known = any(map(_seconds, longest))
    return [_cache_bytes] * bytes_differ + [_seconds] * (
        seconds_differ or (bytes_differ and is_known)
    )


def _cache_bytes(cell: Record) -> float | None:
    return cell["cache_bytes"]


def _seconds(cell: Record) -> float | None:
    """Returns the seconds of an example; None if they were not measured."""
    return cell["seconds"] / cell["windows"] or None


def _differ(costs: Iterable[float | None], factor: float) -> bool:
    known = [cost for cost in costs if cost]
    return bool(known) and max(known) >= factor * min(known)


def _known(cells: Records, cost: Cost | None = None) -> list[Record]:
    """Returns the cells with a finite score and, if `cost` is given, a known cost."""
    known = [cell for cell in cells if is_finite(cell["value"])]
    return known if cost is None else [cell for cell in known if cost(cell)]


def _interval(cell: Record) -> list[float]:
    """Returns the ends of the 95 % interval; none if it is unknown."""
    ends = [cell.get(key) for key in ("ci_low", "ci_high")]
    return ends if all(map(is_finite, ends)) else []


def _cost_axis(axes, cost: Cost, cells: Records) -> None:
    """Sets scale, limits, ticks and label of the x axis."""
    costs = sorted(set(map(cost, cells)), reverse=True)
    if cost is _seconds:
        value_axis(axes, costs, _SECONDS, "x")
        axes.set_xlabel(_SECONDS.title)
        return
    axes.set_xscale("log")
    unit, ratio = byte_unit(costs[0]), costs[0] / costs[-1]
    ticks = costs[:1]
    for count in costs[1:]:
        if ticks[-1] / count >= ratio**0.1:  # labels that are closer would touch
            ticks.append(count)
    axes.set_xlim(costs[-1] / ratio**0.12, costs[0] * ratio**0.12)
    axes.set_xticks(ticks, [unit.text(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel(f"KV cache of a row at the end of its prompt, {unit.name}")


def _draw_lengths(axes, cost: Cost, cells: Records) -> None:
    """Draws faint points of all lengths, with one line per method."""
    for index, group in enumerate(group_by(cells, "method").values()):
        group = sorted(_known(group, cost), key=lambda cell: cell["length"])
        style = series_style(index) | {"linestyle": "-", "linewidth": 0.8, "markersize": 3}
        x, y = [cost(cell) for cell in group], [cell["value"] for cell in group]
        axes.plot(x, y, **style, alpha=0.3, zorder=2)


def _draw_longest(axes, cost: Cost, cells: Records, metric: Metric) -> None:
    """Draws points, intervals and names at the longest length, and the line of the best ones.

    Points of equal score and cost stand side by side.
    """
    order = list(group_by(cells, "method"))
    cells = _known(at_longest(cells), cost)
    centres = axes.transData.transform([(cost(cell), cell["value"]) for cell in cells])
    centres = _side_by_side(centres)
    places = axes.transData.inverted().transform(centres)
    for cell, (x, y) in zip(cells, places, strict=True):
        style = series_style(order.index(cell["method"])) | {"linestyle": "none", "markersize": 7}
        ends = _interval(cell)
        axes.plot([x] * len(ends), ends, color=style["color"], linewidth=1.2, alpha=0.5, zorder=2)
        axes.plot(x, y, **style, zorder=4)
    points = [(cost(cell), cell["value"]) for cell in cells]
    best = best_at_cost(points, lower_is_better=metric.lower_is_better)
    axes.plot(*places[best].T, color=GREY, linewidth=1.4, zorder=3)
    _write_names(axes, [cell["method"] for cell in cells], centres)


def best_at_cost(
    points: Sequence[tuple[float, float]], *, lower_is_better: bool = False
) -> list[int]:
    """Returns the indices of points (cost, value) that no other one beats at the same cost or less.

    They are in the order of their costs. Of equal points it is the first one.
    """
    sign = 1 if lower_is_better else -1
    best: list[int] = []
    for index in sorted(range(len(points)), key=lambda i: (points[i][0], sign * points[i][1])):
        if not best or sign * points[index][1] < sign * points[best[-1]][1]:
            best.append(index)
    return best


def _side_by_side(centres: np.ndarray) -> np.ndarray:
    """Returns the places of marks [n, 2] in pixels, moved sideways where they would overlap.

    Marks keep their order: it is the mean of moving them to the right and to the left.
    """
    right = _moved_right(centres)
    left = -_moved_right(centres[::-1] * (-1, 1))[::-1]  # reversed, so that equal ones are, too
    return np.stack([(right + left) / 2, centres[:, 1]], axis=1)


def _moved_right(centres: np.ndarray) -> np.ndarray:
    """Returns x of marks [n], moved as far to the right as the marks left of them require."""
    moved = centres[:, 0].copy()
    order = np.argsort(moved, kind="stable")
    for place, number in enumerate(order):
        before = order[:place]
        beside = before[np.abs(centres[before, 1] - centres[number, 1]) < 2 * _MARK]
        moved[number] = max([moved[number], *(moved[beside] + 2 * _MARK)])
    return moved


def _write_names(axes, names: Sequence[str], centres: np.ndarray) -> None:
    """Writes names beside their marks, where they cover no mark and no other name.

    A name that finds no place near its mark is joined to it by a thin line.

    Args:
      axes: the panel.
      names: the names.
      centres: places of the marks, pixels [n, 2].
    """
    occupied = [_box(centre, 2 * _MARK) for centre in centres]
    panel = np.array(axes.get_window_extent().extents)
    to_data = axes.transData.inverted()
    for number in np.lexsort(centres.T[::-1]):
        centre = centres[number]
        note = axes.text(
            *to_data.transform(centre), names[number], ha="center", va="center", fontsize=8.5,
            color="#333333", zorder=5, parse_math=False,
        )  # fmt: skip
        note.set_in_layout(False)
        size = np.array(note.get_window_extent().size)
        note.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0, "alpha": 0.6})
        shift, gap = _free_place(centre, size, occupied, panel, np.delete(centres, number, axis=0))
        note.set_position(to_data.transform(centre + shift))
        occupied.append(_box(centre + shift, size))
        if gap > _GAPS[1]:
            line = to_data.transform([centre, centre + shift])
            axes.plot(*line.T, color=GREY, linewidth=0.6, zorder=3)


def _free_place(
    centre: np.ndarray,
    size: np.ndarray,
    occupied: Sequence[np.ndarray],
    panel: np.ndarray,
    others: np.ndarray,
) -> tuple[np.ndarray, float]:
    """Returns where the middle of a name lies from its mark, and the gap between them, in pixels.

    It is the nearest place where the name covers nothing and no other mark lies between them, or
    else the one where that is least so.

    Args:
      centre: place of the mark, [2].
      size: width and height of the name, [2].
      occupied: boxes (x0, y0, x1, y1) of marks and names.
      panel: box of the panel.
      others: places of the other marks, [n, 2].
    """
    best = None
    for gap, direction in itertools.product(_GAPS, _DIRECTIONS):
        shift = direction * (size / 2 + gap)
        box = _box(centre + shift, size + 1)
        covered = sum(_overlap(box, other) for other in occupied)
        covered += np.prod(size + 1) - _overlap(box, panel)
        between = centre + np.linspace(0, 1, 20)[:, None] * shift
        covered += (np.abs(between[:, None] - others).max(-1) < _MARK).sum()
        if best is None or covered < best[0] - 1e-6:
            best = covered, shift, gap
        if covered < 1e-6:
            break
    return best[1:]


def _box(centre: np.ndarray, size: np.ndarray | float) -> np.ndarray:
    return np.concatenate([centre - size / 2, centre + np.asarray(size) / 2])


def _overlap(a: np.ndarray, b: np.ndarray) -> float:
    """Returns the area that two boxes share."""
    return float(np.prod(np.maximum(np.minimum(a[2:], b[2:]) - np.maximum(a[:2], b[:2]), 0)))
