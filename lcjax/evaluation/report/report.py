"""Writes summary, tables, figures and page from records."""

import dataclasses
import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from lcjax.evaluation import cost_plots, plots
from lcjax.evaluation.cost_plots import byte_unit
from lcjax.evaluation.records import COST, COSTS, FORMAT, REPORT, by_cell, clean, fingerprint
from lcjax.evaluation.report import differences, page
from lcjax.evaluation.report import published as published_lib
from lcjax.evaluation.report.tables import (
    format_aggregates,
    grid,
    latex,
    markdown,
    to_csv,
)
from lcjax.evaluation.task import Metric, Record, Records, Task
from lcjax.files import write_whole

_PACKAGES = ("lcjax", "jax", "jaxlib", "flax", "numpy", "tokenizers")
NOTES = "tables/training.md"
_MEASURED = ("tokens_per_second", *COST)  # fields of a cell
_COMMON = ("protocol", "stride", "bos", "trained", "tokenizer")
# Fields of tasks with prompts, methods that split windows, and prompts with retrieved passages
_OPTIONAL = ("budget", "decoder", "decoder_passages")


@dataclasses.dataclass(frozen=True)
class Report:
    """Results of a run: cells (one per task, method and length), files, and the printed text."""

    cells: list[Record]
    summary: Record
    files: list[Path]
    text: str  # the tables, as printed


def cell_of(task: Task, method: str, length: int, records: Records) -> Record:
    """Computes one cell of a table: the task's numbers, their settings, time and memory."""
    common = {key: records[0].get(key) for key in _COMMON}
    common |= {key: records[0][key] for key in _OPTIONAL if key in records[0]}
    return {
        "task": task.label,
        "method": method,
        "length": length,
        **common,
        **task.summarise(records),
        **dict(zip(("ci_low", "ci_high"), task.interval(records), strict=True)),
        **_cost(records),
    }


def _cost(records: Records) -> Record:
    """Returns tokens per second without compilation, peak memory, and bytes of a row's cache.

    `peak_bytes` is None if memory did not exceed an earlier peak of the process. The peak of the
    cell is then at most `peak_bytes_at_most`. `cache_bytes` is None where it is not known.
    """
    seconds = sum(record["seconds"] for record in records)
    peaks = [record["peak_bytes"] for record in records if record["peak_bytes"] is not None]
    bounds = [record.get("peak_bytes_at_most") or 0 for record in records]
    caches = [record.get("cache_bytes") or 0 for record in records]
    return {
        "seconds": seconds,
        "compile_seconds": sum(record["compile_seconds"] for record in records),
        "tokens_per_second": sum(r["read"] for r in records) / seconds if seconds else None,
        "peak_bytes": max(peaks, default=None),
        "peak_bytes_at_most": max(bounds) or None,
        "cache_bytes": max(caches) or None,
    }


def write(
    folder: Path,
    config: Mapping,
    tasks: Mapping[Task, Records],
    *,
    order: Sequence[str],
    published: Sequence[published_lib.Published],
    notes: str,
    environment: Mapping[str, Any],
) -> Report:
    """Writes summary.json, tables/, costs/, figures/ and report.html.

    Every method is also compared with the first one, over the examples that both have answered.

    Args:
      folder: The run folder.
      config: The settings of the run.
      tasks: Records by task.
      order: Names of the methods in the order of the tables.
      published: Numbers of papers, which are shown beside those of the run.
      notes: Markdown that follows the tables.
      environment: Versions, device and models that computed the records.

    Returns:
      Cells, summary, files and text.
    """
    sections = [_section(folder, task, records, order) for task, records in tasks.items()]
    files = [file for section, _, saved in sections for file in (*saved, *section.figures)]
    texts = [text for _, text, _ in sections]
    sections = [section for section, _, _ in sections]
    gaps = [line for s in sections for line in differences.lines(s.task, s.gaps)]
    if gaps:
        files.append(folder / "tables" / "differences.csv")
        write_whole(files[-1], to_csv(gaps))
    cells = [cell for section in sections for cell in section.cells]
    # Published fields may also be numbers over all lengths.
    overall = [{**s.aggregates.get(c["method"], {}), **c} for s in sections for c in s.cells]
    shown, lines = published_lib.tables(published, overall, list(tasks))
    text, saved = published_lib.write(folder / "tables", shown, lines)
    files += saved
    texts += [text] * bool(text)
    if notes:
        files.append(folder / NOTES)
        write_whole(files[-1], notes)
        texts.append(notes)
    summary = {
        "format": FORMAT,
        **environment,
        "hash": fingerprint(config),
        "seed": config.get("seed"),
        "config": json.loads(json.dumps(config, default=str)),
        "tasks": [_entry(section) for section in sections],
    }
    path = folder / "summary.json"
    write_whole(path, json.dumps(clean(summary), indent=1, default=str) + "\n")
    cost = cost_plots.cost_bars(page.costs(cells), folder / "figures" / "cost.png")
    by_task = {section.task: section.cells for section in sections}
    models = environment.get("models") or {}
    approximate = [name for name, model in models.items() if not _is_exact(model)]
    figures = plots.perplexity_against_accuracy(by_task, folder / "figures", approximate)
    html = page.write(
        folder / REPORT,
        sections,
        summary,
        figures=figures,
        cost_figure=cost,
        published=shown,
        notes=notes,
    )
    return Report(cells, summary, [path, *files, *figures, cost, html], "\n".join(texts))


def _section(
    folder: Path, task: Task, records: Records, order: Sequence[str]
) -> tuple[page.Section, str, list[Path]]:
    """Returns the results of one task, the text of its tables, and the files of the tables."""
    groups = by_cell(records, order)
    records = [record for group in groups.values() for record in group]
    cells = [cell_of(task, *key, group) for key, group in groups.items()]
    aggregates = task.aggregates(cells, records)
    by_method: dict[str, dict[int, list[Record]]] = {}
    for (method, length), group in groups.items():
        by_method.setdefault(method, {})[length] = group
    first, *others = by_method
    gaps = differences.paired_differences(task, by_method, dict.fromkeys(others, first))
    results, compared = _tables(task, cells, aggregates), differences.text(task, gaps)
    cost = _cost_text(cells)
    texts = "\n".join([results, *compared])
    saved = _save_tables(folder / "tables", task, cells, texts, task.tables(records))
    saved += _save_costs(folder / COSTS, task, cells, cost)
    text = "\n".join([results, cost, *compared])
    figures = task.figures(cells, records, folder / "figures")
    figures += cost_plots.over_costs(
        cells, task.metric, folder / "figures" / f"{task.label}_by_cost.png"
    )
    return page.Section(task, cells, records, aggregates, figures, gaps), text, saved


def _is_exact(model: Mapping[str, Any] | None) -> bool:
    """Returns whether all layers of a config (plain values) have full causal attention."""
    if model is None:
        return True
    patterns = [model["pattern"], *(kind.get("pattern") for kind in model.get("layers") or ())]
    is_full = all(p is None or p["type"] == "causal" for p in patterns)
    return is_full and model.get("memory") is None


def _entry(section: page.Section) -> Record:
    """Returns the entry of a task in summary.json."""
    return {
        "task": section.task.label,
        "metric": dataclasses.asdict(section.task.metric),
        "cells": _without_cost(section.cells),
        "aggregates": section.aggregates,
    }


def current_environment() -> dict[str, Any]:
    """Returns the versions, commit and device of this process."""
    device = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    return {"versions": versions(), "commit": _commit(), "device": device}


def _commit() -> str | None:
    """Returns the commit, with `-dirty` if the checkout has changes; None without a checkout."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    words = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        result = subprocess.run([*words, "--exclude=*"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that compute the numbers."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"  # such as lcjax itself in a checkout
    return versions


def _tables(task: Task, cells: Records, aggregates: Mapping) -> str:
    """Returns Markdown with the number of a task, and the numbers that explain it."""
    first = cells[0]
    details = [f"protocol `{first['protocol']}`", f"BOS {first['bos']}"]
    if first["stride"] is not None:
        details.insert(1, f"stride {first['stride']}")
    trained = sorted({cell["trained"] for cell in cells})
    details.append("trained length " + ", ".join(f"{length:,}" for length in trained))
    parts = [f"### {task.heading}\n", ", ".join(details) + "\n"]
    parts.append(markdown(grid(cells, "value", task.metric)))
    if len({cell["tokenizer"] for cell in cells}) > 1 and "bits_per_byte" in first:
        parts.append("Tokenizers differ: compare bits per byte.\n")
        parts.append(markdown(grid(cells, "bits_per_byte", Metric("", "", True, 3))))
    if any(cell.get("nan_tokens") for cell in cells):
        parts.append("Perplexity without the windows that gave NaN:\n")
        parts.append(markdown(grid(cells, "value_without_nan", task.metric)))
    if aggregates:
        heads, rows = format_aggregates(aggregates)
        parts.append(markdown([["method", *heads], *([name, *row] for name, row in rows.items())]))
    return "\n".join(parts)


def _cost_text(cells: Records) -> str:
    """Returns Markdown with speed, peak bytes of devices, and bytes of the KV cache."""
    parts = ["Tokens per second / peak memory in GB (busiest device; on a CPU the process):\n"]
    parts.append(markdown(_cost_grid(cells, lambda cell: f"{_speed(cell)} / {_peak_gb(cell)}")))
    if any(cell["peak_bytes"] is None for cell in cells):
        parts.append(
            "≤: the allocator keeps one peak per process and an earlier cell had set it, so this is"
            " a bound; evaluate the method at that length alone, in another run.folder, for its own"
            " peak.\n"
        )
    if largest := max(cell["cache_bytes"] or 0 for cell in cells):
        unit = byte_unit(largest)
        parts.append(f"KV cache of a row at the end of its prompt, {unit.name}:\n")
        parts.append(markdown(_cost_grid(cells, lambda cell: unit.text(cell["cache_bytes"]))))
    return "\n".join(parts)


def _cost_grid(cells: Records, text: Callable[[Record], str]) -> list[list[str]]:
    """Returns a header and one row per method, one column per length; `text` formats a cell."""
    lengths = sorted({cell["length"] for cell in cells})
    by_key = {(cell["method"], cell["length"]): text(cell) for cell in cells}
    methods = dict.fromkeys(cell["method"] for cell in cells)
    rows = [[method, *(by_key.get((method, n), "") for n in lengths)] for method in methods]
    return [["method", *(f"{length:,}" for length in lengths)], *rows]


def _speed(cell: Record) -> str:
    speed = cell["tokens_per_second"]
    return "?" if speed is None else f"{speed:,.0f}"


def _peak_gb(cell: Record) -> str:
    """Returns the cell's peak in GB, or its bound."""
    if cell["peak_bytes"] is not None:
        return f"{cell['peak_bytes'] / 1e9:,.2f}"
    bound = cell["peak_bytes_at_most"]
    return "?" if bound is None else f"≤ {bound / 1e9:,.2f}"


def _save_tables(
    folder: Path, task: Task, cells: Records, text: str, further: Mapping[str, Records]
) -> list[Path]:
    contents = {
        ".md": text,
        ".csv": to_csv(_without_cost(cells)),
        ".tex": latex(cells, "value", task.metric),
        **{f"_{name}.csv": to_csv(rows) for name, rows in further.items()},
    }
    files = [folder / f"{task.label}{ending}" for ending in contents]
    for file, content in zip(files, contents.values(), strict=True):
        write_whole(file, content)
    return files


def _save_costs(folder: Path, task: Task, cells: Records, text: str) -> list[Path]:
    files = [folder / f"{task.label}.{kind}" for kind in ("md", "csv")]
    write_whole(files[0], text + "\n")
    names = ("task", "method", "length", *_MEASURED)
    write_whole(files[1], to_csv([{name: cell[name] for name in names} for cell in cells]))
    return files


def _without_cost(cells: Records) -> list[Record]:
    return [{k: v for k, v in cell.items() if k not in _MEASURED} for cell in cells]
