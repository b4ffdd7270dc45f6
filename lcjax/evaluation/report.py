"""From records to what people read: summary, tables and figures."""

import dataclasses
import importlib.metadata
import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax

from lcjax.evaluation.records import FORMAT, clean
from lcjax.evaluation.tables import grid, markdown, to_csv
from lcjax.evaluation.task import Metric, Record, Task

_PACKAGES = ("lcjax", "jax", "jaxlib", "flax", "numpy", "tokenizers")
_COMMON = ("protocol", "stride", "bos", "trained", "tokenizer")


@dataclasses.dataclass(frozen=True)
class Report:
    """What a run found: cells (one per task, method and length), the files, and the text."""

    cells: list[Record]
    summary: Record
    files: list[Path]
    text: str  # the tables, as printed


def cell_of(task: Task, method: str, length: int, records: Sequence[Record]) -> Record:
    """One cell of a table: the task's numbers, what they depend on, and what they cost."""
    common = {key: records[0].get(key) for key in _COMMON}
    return {
        "task": task.label,
        "method": method,
        "length": length,
        **common,
        **task.summarise(records),
        **_cost(records),
    }


def _cost(records: Sequence[Record]) -> Record:
    """Tokens read per second without compilation, and the peak: the cell's own, and a bound.

    `peak_bytes` is None where memory did not rise above what the process had needed before: the
    cell then needed at most `peak_bytes_at_most`, and how much less cannot be known.
    """
    seconds = sum(record["seconds"] for record in records)
    peaks = [record["peak_bytes"] for record in records if record["peak_bytes"] is not None]
    bounds = [record.get("peak_bytes_at_most") or 0 for record in records]
    return {
        "seconds": seconds,
        "compile_seconds": sum(record["compile_seconds"] for record in records),
        "tokens_per_second": sum(r["read"] for r in records) / seconds if seconds else None,
        "peak_bytes": max(peaks, default=None),
        "peak_bytes_at_most": max(bounds) or None,
    }


def write(
    folder: Path,
    config: Mapping,
    tasks: Mapping[Task, Sequence[Record]],
    *,
    order: Sequence[str],
    notes: str = "",
) -> Report:
    """Writes summary.json, tables/ and figures/ of a run; methods come in the order given.

    `notes` is Markdown that follows the tables.
    """
    cells, files, texts, entries = [], [], [], []
    for task, unsorted in tasks.items():
        records = sorted(
            unsorted, key=lambda r: (order.index(r["method"]), r["length"], r["window"])
        )
        groups: dict[tuple[str, int], list[Record]] = {}
        for record in records:
            groups.setdefault((record["method"], record["length"]), []).append(record)
        own = [cell_of(task, *key, group) for key, group in groups.items()]
        aggregates = task.aggregates(own, records)
        text = _tables(task, own, aggregates)
        files += _save_tables(folder / "tables", task, own, text)
        files += task.figures(own, records, folder / "figures")
        metric = dataclasses.asdict(task.metric)
        metric.pop("dash_above")
        entry = {"task": task.label, "metric": metric, "cells": own, "aggregates": aggregates}
        entries.append(entry)
        cells += own
        texts.append(text)
    if notes:
        files.append(folder / "tables" / "training.md")
        files[-1].write_text(notes, encoding="utf-8")
        texts.append(notes)
    summary = {
        "format": FORMAT,
        "versions": versions(),
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "seed": config.get("seed"),
        "config": config,
        "tasks": entries,
    }
    path = folder / "summary.json"
    path.write_text(json.dumps(clean(summary), indent=1, default=str) + "\n", encoding="utf-8")
    return Report(cells, summary, [path, *files], "\n".join(texts))


def versions() -> dict[str, str]:
    """Versions of what computed the numbers."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"  # such as lcjax itself, run from a checkout
    return found


def _tables(task: Task, cells: Sequence[Record], aggregates: Mapping) -> str:
    """Markdown: the number, then what explains it, then what it cost."""
    first = cells[0]
    facts = [f"protocol `{first['protocol']}`", f"BOS {first['bos']}"]
    if first["stride"] is not None:
        facts.insert(1, f"stride {first['stride']}")
    trained = sorted({cell["trained"] for cell in cells})
    facts.append("trained length " + ", ".join(f"{length:,}" for length in trained))
    parts = [f"### {task.metric.title}\n", ", ".join(facts) + "\n"]
    parts.append(markdown(grid(cells, "value", task.metric)))
    if len({cell["tokenizer"] for cell in cells}) > 1 and "bits_per_byte" in first:
        parts.append("Tokenizers differ: compare bits per byte.\n")
        parts.append(markdown(grid(cells, "bits_per_byte", Metric("", "", True, 3))))
    if any(cell.get("nan_tokens") for cell in cells):
        parts.append("Perplexity without the windows that gave NaN:\n")
        parts.append(markdown(grid(cells, "value_without_nan", task.metric)))
    if aggregates:
        keys = list(next(iter(aggregates.values())))
        rows = [["method", *keys]]
        rows += [[name, *(f"{entry[k]:,}" for k in keys)] for name, entry in aggregates.items()]
        parts.append(markdown(rows))
    parts.append("Tokens per second / peak memory in GB (busiest device; on a CPU the process):\n")
    parts.append(markdown(_cost_grid(cells)))
    if any(cell["peak_bytes"] is None for cell in cells):
        parts.append(
            "≤: the allocator keeps one peak per process and an earlier cell had set it, so this is"
            " a bound; evaluate the method alone, in another run.folder, for its own peak.\n"
        )
    return "\n".join(parts)


def _cost_grid(cells: Sequence[Record]) -> list[list[str]]:
    table = grid(cells, "tokens_per_second", Metric("", "", False, 0))
    memory = {(cell["method"], f"{cell['length']:,}"): _memory(cell) for cell in cells}
    for row in table[1:]:
        for column, length in enumerate(table[0][1:], 1):
            used = memory.get((row[0], length))
            row[column] = f"{row[column].strip('*') or '?'} / {used}" if used else ""
    return table


def _memory(cell: Record) -> str:
    """The cell's peak in GB, or the bound on it."""
    if cell["peak_bytes"] is not None:
        return f"{cell['peak_bytes'] / 1e9:,.2f}"
    bound = cell["peak_bytes_at_most"]
    return "?" if bound is None else f"≤ {bound / 1e9:,.2f}"


def _save_tables(folder: Path, task: Task, cells: Sequence[Record], text: str) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{task.label}.md", folder / f"{task.label}.csv"]
    files[0].write_text(text, encoding="utf-8")
    files[1].write_text(to_csv(cells), encoding="utf-8")
    return files
