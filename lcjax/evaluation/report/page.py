"""`report.html`: one file that shows a run, and `compare.html`; nothing in them is fetched."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lcjax.config.files import write_whole
from lcjax.evaluation.report import differences, examples
from lcjax.evaluation.report.examples import anchor
from lcjax.evaluation.report.page_style import SCRIPT, STYLE
from lcjax.evaluation.report.page_svg import inline
from lcjax.evaluation.report.page_templates import TEMPLATES
from lcjax.evaluation.report.tables import aggregated, ranked
from lcjax.evaluation.task import Record, Task


@dataclasses.dataclass(frozen=True)
class Section:
    """What a page says of one task."""

    task: Task
    cells: Sequence[Record]
    records: Sequence[Record]
    aggregates: Mapping[str, Record]
    figures: Sequence[Path]
    gaps: Sequence[differences.Gap] = ()  # between its rows


def write(
    path: Path,
    sections: Sequence[Section],
    summary: Mapping[str, Any],
    *,
    figures: Sequence[Path] = (),
    cost_figure: Path,
    notes: str = "",
) -> Path:
    """The page of a run; `figures` are those of several tasks together."""
    cells = [cell for section in sections for cell in section.cells]
    parts = [task_part(section) for section in sections]
    page = {
        "title": path.parent.resolve().name,
        "eyebrow": "Evaluation",
        "lead": _lead(sections),
        "overview": _overview(sections) if len(sections) > 1 else None,
        "tasks": parts,
        "figures": figures_of(figures, "all"),
        "cost": {"rows": costs(cells), "figures": figures_of([cost_figure], "cost")},
        "facts": _facts(summary, cells),
        "config": yaml.safe_dump(summary["config"], sort_keys=False, allow_unicode=True),
        "notes": _notes(notes),
    }
    write_whole(path, render("run", page))
    return path


def render(template: str, page: Mapping[str, Any]) -> str:
    """The HTML of one of the templates."""
    return _environment().get_template(template).render(style=STYLE, script=SCRIPT, **page)


@functools.cache
def _environment():
    import jinja2

    made = jinja2.Environment(
        loader=jinja2.DictLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    made.filters["count"] = lambda value: f"{value:,}"
    return made


def _lead(sections: Sequence[Section]) -> str:
    """What was compared, in a sentence."""
    cells = [cell for section in sections for cell in section.cells]
    methods = len({cell["method"] for cell in cells})
    lengths = sorted({cell["length"] for cell in cells})
    words = [f"{length:,}" for length in lengths]
    reach = words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]
    if len(words) > 5:
        reach = f"{words[0]} to {words[-1]} ({len(words)} lengths)"
    answers = sum(len(section.records) for section in sections)
    return (
        f"{_many(methods, 'method')} on {_many(len(sections), 'task')} with contexts of {reach}"
        f" tokens; {_many(answers, 'example')} in all."
    )


def _many(count: int, thing: str) -> str:
    return f"{count:,} {thing}{'s' * (count != 1)}"


def _overview(sections: Sequence[Section]) -> dict[str, Any]:
    """Methods by tasks, at the longest length."""
    longest = max(cell["length"] for section in sections for cell in section.cells)
    methods = dict.fromkeys(cell["method"] for s in sections for cell in s.cells)
    rows: dict[str, list] = {method: [] for method in methods}
    for section in sections:
        own = [cell for cell in section.cells if cell["length"] == longest]
        values = {cell["method"]: cell["value"] for cell in own}
        _, found = ranked(own, "value", section.task.metric)
        for method in methods:
            entry = found[method][0] if method in found else None
            rows[method].append(_entry(entry, values.get(method)))
    heads = [
        {
            "label": section.task.label,
            "anchor": anchor("task", section.task.label),
            "arrow": _arrow(section.task),
        }
        for section in sections
    ]
    return {"length": longest, "heads": heads, "rows": rows}


def _arrow(task: Task) -> str:
    return "lower is better" if task.metric.lower_is_better else "higher is better"


def _entry(entry, value: float | None, note: str = "", link: str = "") -> dict[str, Any]:
    text = entry.text if entry is not None else ""
    place = {1: "best", 2: "second", None: ""}[entry.place if entry is not None else None]
    return {"text": text, "place": place, "value": value, "note": note, "link": link}


def task_part(section: Section) -> dict[str, Any]:
    """What the templates ask of one task."""
    task, cells, first = section.task, section.cells, section.cells[0]
    shown = examples.of_task(task, section.records)
    facts = [f"BOS {first['bos']}", f"n = {_span(cell['windows'] for cell in cells)} a cell"]
    if first["stride"] is not None:
        facts.append(f"stride {first['stride']:,}")
    trained = sorted({cell["trained"] for cell in cells})
    facts.append("trained length " + ", ".join(f"{length:,}" for length in trained))
    title = task.metric.title
    return {
        "title": title[0].upper() + title[1:],
        "label": task.label,
        "anchor": anchor("task", task.label),
        "arrow": _arrow(task),
        "protocol": first["protocol"],
        "facts": facts,
        "table": _table(section, shown),
        "aggregates": _aggregates(section.aggregates),
        "differences": differences.shown(task, section.gaps),
        "figures": figures_of(section.figures, anchor(task.label)),
        "examples": shown,
        "bits": len({cell["tokenizer"] for cell in cells}) > 1 and "bits_per_byte" in first,
    }


def _span(counts) -> str:
    found = sorted(set(counts))
    return f"{found[0]:,}" if len(found) == 1 else f"{found[0]:,} to {found[-1]:,}"


def _table(section: Section, shown: examples.Shown) -> dict[str, Any]:
    metric = section.task.metric
    lengths, rows = ranked(section.cells, "value", metric)
    cells = {(cell["method"], cell["length"]): cell for cell in section.cells}
    linked = {(group["method"], group["length"]): group["anchor"] for group in shown.groups}
    table = {}
    for method, entries in rows.items():
        table[method] = []
        for length, entry in zip(lengths, entries, strict=True):
            cell = cells.get((method, length), {})
            note = interval_text(cell, metric)
            link = linked.get((method, length), "")
            table[method].append(_entry(entry, cell.get("value"), note, link))
    intervals = any(entry["note"] for row in table.values() for entry in row)
    links = any(entry["link"] for row in table.values() for entry in row)
    return {"lengths": lengths, "rows": table, "intervals": intervals, "links": links}


def interval_text(cell: Record, metric) -> str:
    """`5.91 – 6.32`, or nothing where no interval is known or the number is not shown."""
    low, high, value = (cell.get(key) for key in ("ci_low", "ci_high", "value"))
    if low is None or high is None or low != low or high != high:
        return ""
    if value is None or not value <= metric.dash_above:
        return ""
    return f"{low:,.{metric.decimals}f} – {high:,.{metric.decimals}f}"


def _aggregates(found: Mapping[str, Record]) -> dict[str, Any] | None:
    if not found:
        return None
    heads, rows = aggregated(found)
    title = "At the longest length" if "length" in heads else "Over all lengths"
    return {"title": title, "heads": heads, "rows": rows}


_CAPTIONS = {
    "by_position": "Mean loss of the tokens at each position of the longest windows; the band is"
    " one standard error over documents.",
    "by_depth": "Every panel has the same scale. The dashed line stands behind the last length that"
    " the model was trained for; hatched cells were not measured.",
    "by_task": "Every panel has the same scale; hatched cells were not measured.",
    "by_shots": "One line a method, at the longest length: the score over the number of"
    " demonstrations.",
    "by_passages": "One line a method, at the longest length: the score over the number of"
    " passages.",
    "cost": "Tokens read or written per second without compilation, and the peak of the busiest"
    " device (on a CPU: of the process), over all tasks.",
    "perplexity_accuracy": "Each point is a method. r is Pearson's correlation, ρ Spearman's, with"
    " 95 % intervals: with as few methods they are wide, and a high r alone proves little.",
    "": "",  # over lengths: by what is drawn
}


def figures_of(paths: Sequence[Path], name: str) -> list[dict[str, str]]:
    """Pictures in the page, each with its caption."""
    found = []
    for index, path in enumerate(paths):
        svg = inline(path, f"{name}-{index}")
        if svg is not None:
            kind = next(key for key in _CAPTIONS if path.stem.endswith(key))
            found.append({"svg": svg, "caption": _CAPTIONS[kind] if kind else _over_lengths(svg)})
    return found


def _over_lengths(svg: str) -> str:
    """The caption of what `plots.over_lengths` has drawn."""
    if "context length in tokens" not in svg:
        return "A dot a method, with its 95 % interval where one is known."
    line = "; the dashed line stands at the trained length" * ("trained length" in svg)
    return f"One line a method{line}."


def costs(cells: Sequence[Record]) -> list[dict[str, Any]]:
    """One row per method and length: speed and peak over all tasks."""
    groups: dict[tuple[str, int], list[Record]] = {}
    for cell in cells:
        groups.setdefault((cell["method"], cell["length"]), []).append(cell)
    rows = []
    for (method, length), own in groups.items():
        seconds = sum(cell["seconds"] for cell in own)
        read = sum((cell["tokens_per_second"] or 0) * cell["seconds"] for cell in own)
        peaks = [cell["peak_bytes"] for cell in own if cell["peak_bytes"] is not None]
        bound = max((cell["peak_bytes_at_most"] or 0 for cell in own), default=0) or None
        known = len(peaks) == len(own) or (peaks and max(peaks) == bound)
        rows.append(
            {
                "method": method,
                "length": length,
                "speed": read / seconds if seconds else None,
                "peak": max(peaks) if known else bound,
                "bound": not known,
                "seconds": seconds,
                "compile_seconds": sum(cell["compile_seconds"] for cell in own),
            }
        )
    return rows


def _facts(summary: Mapping[str, Any], cells: Sequence[Record]) -> list[tuple[str, str]]:
    config = summary["config"]
    model = config.get("model") or {}
    protocols = sorted({str(cell["protocol"]) for cell in cells})
    tokenizers = sorted({str(cell["tokenizer"])[:16] for cell in cells})
    versions = ", ".join(f"{name} {version}" for name, version in summary["versions"].items())
    facts = [
        ("model", model.get("path") or model.get("preset") or "one for each method"),
        ("protocols", ", ".join(protocols)),
        ("seed", str(summary["seed"])),
        ("tokenizer", ", ".join(tokenizers)),
        ("device", summary["device"] or "not recorded"),
        ("versions", versions or "not recorded"),
        *([("commit", summary["commit"])] if summary.get("commit") else []),
        ("settings' hash", summary["hash"]),
    ]
    return facts


def _notes(text: str) -> list[list[str]]:
    """The rows of a Markdown table."""
    rows = [
        [cell.strip() for cell in line.strip("| ").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    return [row for row in rows if not set("".join(row)) <= set("-: ")]
