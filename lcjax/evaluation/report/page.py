"""`report.html` and `compare.html`: one self-contained file each, rendered from `templates/`."""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import jinja2
import yaml

from lcjax.evaluation.cost_plots import byte_unit
from lcjax.evaluation.plots import COLOURS, GREY
from lcjax.evaluation.records import by_cell
from lcjax.evaluation.report import differences
from lcjax.evaluation.report.published import Table
from lcjax.evaluation.report.tables import format_aggregates, table_entries
from lcjax.evaluation.statistics import at_longest, group_by
from lcjax.evaluation.task import Record, Records, Task
from lcjax.files import write_whole

MAX_EXAMPLES = 12  # of one cell
_MAX_CHARS = 600  # of an answer
# Fields that every record has or that the page shows elsewhere.
_HIDDEN = frozenset(
    {"method", "length", "trained", "tokenizer", "digest", "protocol", "wording", "stride", "bos"}
    | {"size", "seconds", "compile_seconds", "read", "peak_bytes", "peak_bytes_at_most", "weight"}
    | {"cache_bytes"}
    | {"answer", "references", "key", "correct", "score", "scored", "prompt", "budget", "first"}
    | {"ids", "finish", "nan", "template", "prompt_tokens", "max_new_tokens", "decoder", "nll"}
    | {"decoder_passages"}
    | {"bytes"}
)
# Colours of figures, and the colours of the page that replace them.
_PAGE_COLOURS = {
    "#000000": "var(--ink)",
    "#ffffff": "var(--paper)",
    GREY.lower(): "var(--muted)",
    "#e4e4e4": "var(--grid)",
    "#cccccc": "var(--rule)",
    **{colour.lower(): f"var(--c{index})" for index, colour in enumerate(COLOURS)},
}
_REM = 52 / 604.8  # rem per point: a figure of 8.4 inches (604.8 points) is 52 rem wide
# Captions by the name of a figure's file, or by its end after the name of a task.
_CAPTIONS = {
    "_by_position": "Mean loss of the tokens at each position of the longest windows; the band is"
    " one standard error over documents.",
    "_by_gold_position": "One line a method, at the longest length: the score over the position of"
    " the document with the answer.",
    "_by_depth": "Every panel has the same scale. The dashed line stands behind the last length"
    " that the model was trained for; hatched cells were not measured.",
    "_by_task": "Every panel has the same scale; hatched cells were not measured.",
    "_by_shots": "One line a method, at the longest length: the score over the number of"
    " demonstrations.",
    "_by_passages": "One line a method, at the longest length: the score over the number of"
    " passages.",
    "_by_cost": "A point a method at the longest length, with its 95 % interval where one is known;"
    " faint points are shorter lengths. The KV cache is that of a row at the end of its prompt,"
    " seconds those of an example without compilation. The grey line joins the methods that no"
    " other one beats at the same cost or less.",
    "cost": "Tokens read or written per second without compilation, and the peak of the busiest"
    " device (on a CPU: of the process), over all tasks.",
    "perplexity_accuracy": "Each point is a method, a hollow one without full attention. r is"
    " Pearson's correlation, ρ Spearman's, with"
    " 95 % intervals: with as few methods they are wide, and a high r alone proves little.",
}


@dataclasses.dataclass(frozen=True)
class Section:
    """Results of one task for a page."""

    task: Task
    cells: Records
    records: Records
    aggregates: Mapping[str, Record]
    figures: Sequence[Path]
    gaps: Sequence[differences.Gap] = ()  # paired differences between its rows


@dataclasses.dataclass(frozen=True)
class Examples:
    """Examples to show, in one group per cell, with the names of their columns."""

    title: str
    heads: list[str]
    groups: list[dict[str, Any]]
    unit: str  # of the losses of examples without answers
    prompt: str | None = None  # the text of one prompt


def write(
    path: Path,
    sections: Sequence[Section],
    summary: Mapping[str, Any],
    *,
    figures: Sequence[Path] = (),
    cost_figure: Path,
    published: Sequence[Table] = (),
    notes: str = "",
) -> Path:
    """Writes the page of a run.

    Args:
      path: The file to write.
      sections: Results by task.
      summary: The content of summary.json.
      figures: Figures of several tasks together.
      cost_figure: The figure of `cost_plots.cost_bars`.
      published: Tables of papers beside the run.
      notes: Markdown table of the trainings of a study.

    Returns:
      `path`.
    """
    cells = [cell for section in sections for cell in section.cells]
    parts = [task_part(section) for section in sections]
    rows = costs(cells)
    largest = max((row["cache"] or 0 for row in rows), default=0)
    page = {
        "title": path.parent.resolve().name,
        "eyebrow": "Evaluation",
        "lead": _lead(sections),
        "overview": _overview(sections) if len(sections) > 1 else None,
        "tasks": parts,
        "figures": figures_of(figures, "all"),
        "cost": {
            "rows": rows,
            "cache_unit": byte_unit(largest) if largest else None,
            "figures": figures_of([cost_figure], "cost"),
        },
        "details": _run_details(summary, cells),
        "config": yaml.safe_dump(summary["config"], sort_keys=False, allow_unicode=True),
        "published": published,
        "notes": _notes(notes),
    }
    write_whole(path, render("run", page))
    return path


def render(template: str, page: Mapping[str, Any]) -> str:
    """Renders `templates/{template}.html` with the variables `page`."""
    return _environment().get_template(f"{template}.html").render(**page)


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("lcjax.evaluation.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["count"] = lambda value: f"{value:,}"
    return environment


def _lead(sections: Sequence[Section]) -> str:
    """Returns the sentence below the title."""
    cells = [cell for section in sections for cell in section.cells]
    methods = len({cell["method"] for cell in cells})
    lengths = sorted({cell["length"] for cell in cells})
    words = [f"{length:,}" for length in lengths]
    lengths_text = words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]
    if len(words) > 5:
        lengths_text = f"{words[0]} to {words[-1]} ({len(words)} lengths)"
    num_examples = sum(len(section.records) for section in sections)
    return (
        f"{_plural(methods, 'method')} on {_plural(len(sections), 'task')} with contexts of"
        f" {lengths_text} tokens; {_plural(num_examples, 'example')} in all."
    )


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun if count == 1 else f'{noun}s'}"


def _overview(sections: Sequence[Section]) -> dict[str, Any]:
    """Returns the table of methods by tasks at the longest length."""
    cells = at_longest([cell for section in sections for cell in section.cells])
    methods = dict.fromkeys(cell["method"] for s in sections for cell in s.cells)
    rows: dict[str, list] = {method: [] for method in methods}
    for section in sections:
        in_task = [cell for cell in cells if cell["task"] == section.task.label]
        _, entries = table_entries(in_task, "value", section.task.metric)
        for method in methods:
            rows[method] += entries.get(method, [None])
    heads = [
        {
            "label": section.task.label,
            "anchor": anchor("task", section.task.label),
            "arrow": _arrow(section.task),
        }
        for section in sections
    ]
    return {"length": cells[0]["length"], "heads": heads, "rows": rows}


def _arrow(task: Task) -> str:
    return "lower is better" if task.metric.lower_is_better else "higher is better"


def task_part(section: Section) -> dict[str, Any]:
    """Returns the variables of the templates for one task."""
    task, cells, first = section.task, section.cells, section.cells[0]
    examples = examples_of(task, section.records)
    details = [f"BOS {first['bos']}", f"n = {_range([cell['windows'] for cell in cells])} a cell"]
    if first["stride"] is not None:
        details.append(f"stride {first['stride']:,}")
    trained = sorted({cell["trained"] for cell in cells})
    details.append("trained length " + ", ".join(f"{length:,}" for length in trained))
    return {
        "title": task.heading,
        "label": task.label,
        "anchor": anchor("task", task.label),
        "arrow": _arrow(task),
        "protocol": first["protocol"],
        "details": details,
        "table": _table(section, examples),
        "aggregates": _aggregates(section.aggregates),
        "differences": differences.template_variables(task, section.gaps),
        "figures": figures_of(section.figures, anchor(task.label)),
        "examples": examples,
        "bits": len({cell["tokenizer"] for cell in cells}) > 1 and "bits_per_byte" in first,
    }


def _range(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _table(section: Section, examples: Examples) -> dict[str, Any]:
    lengths, rows = table_entries(section.cells, "value", section.task.metric)
    intervals = any(entry.interval for row in rows.values() for entry in row)
    links = {(group["method"], group["length"]): group["anchor"] for group in examples.groups}
    return {"lengths": lengths, "rows": rows, "intervals": intervals, "links": links}


def _aggregates(by_method: Mapping[str, Record]) -> dict[str, Any] | None:
    if not by_method:
        return None
    heads, rows = format_aggregates(by_method)
    title = "At the longest length" if "length" in heads else "Over all lengths"
    return {"title": title, "heads": heads, "rows": rows}


def figures_of(paths: Sequence[Path], name: str) -> list[dict[str, str]]:
    """Returns the SVG and caption of each figure; figures without an SVG file are left out."""
    figures = []
    for index, path in enumerate(paths):
        svg = inline_svg(path, f"{name}-{index}")
        if svg is not None:
            caption = next((_CAPTIONS[key] for key in _CAPTIONS if _names(key, path)), None)
            caption = caption or _caption_over_lengths(svg)
            figures.append({"svg": svg, "caption": caption})
    return figures


def _names(key: str, path: Path) -> bool:
    return path.stem.endswith(key) if key.startswith("_") else path.stem == key


def _caption_over_lengths(svg: str) -> str:
    """Returns the caption of a figure of `plots.over_lengths`."""
    if "context length in tokens" not in svg:
        return "A dot a method, with its 95 % interval where one is known."
    if "trained length" in svg:
        return "One line a method; the dashed line stands at the trained length."
    return "One line a method."


def costs(cells: Records) -> list[dict[str, Any]]:
    """Returns a row per method and length: speed, memory and seconds over all tasks."""
    rows = []
    for (method, length), group in group_by(cells, itemgetter("method", "length")).items():
        seconds = sum(cell["seconds"] for cell in group)
        num_tokens = sum((cell["tokens_per_second"] or 0) * cell["seconds"] for cell in group)
        peaks = [cell["peak_bytes"] for cell in group if cell["peak_bytes"] is not None]
        bound = max((cell["peak_bytes_at_most"] or 0 for cell in group), default=0) or None
        known = len(peaks) == len(group) or (peaks and max(peaks) == bound)
        rows.append(
            {
                "method": method,
                "length": length,
                "speed": num_tokens / seconds if seconds else None,
                "peak": max(peaks) if known else bound,
                "bound": not known,
                "cache": max(cell["cache_bytes"] or 0 for cell in group) or None,
                "seconds": seconds,
                "compile_seconds": sum(cell["compile_seconds"] for cell in group),
            }
        )
    return rows


def _run_details(summary: Mapping[str, Any], cells: Records) -> list[tuple[str, str]]:
    config = summary["config"]
    model = config.get("model") or {}
    protocols = sorted({str(cell["protocol"]) for cell in cells})
    tokenizers = sorted({str(cell["tokenizer"])[:16] for cell in cells})
    versions = ", ".join(f"{name} {version}" for name, version in summary["versions"].items())
    return [
        ("model", model.get("path") or model.get("preset") or "one for each method"),
        ("protocols", ", ".join(protocols)),
        ("seed", str(summary["seed"])),
        ("tokenizer", ", ".join(tokenizers)),
        ("device", summary["device"] or "not recorded"),
        ("versions", versions or "not recorded"),
        *([("commit", summary["commit"])] if summary.get("commit") else []),
        ("settings' hash", summary["hash"]),
    ]


def _notes(text: str) -> list[list[str]]:
    """Returns the rows of a Markdown table."""
    rows = [
        [cell.strip() for cell in line.strip("| ").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    return [row for row in rows if not set("".join(row)) <= set("-: ")]


def anchor(*words: object) -> str:
    """Returns the id of an element of the page."""
    return re.sub(r"[^\w.-]+", "-", "-".join(map(str, words)))


def examples_of(task: Task, records: Records) -> Examples:
    """Returns wrong answers of every cell, or the windows of highest loss without answers."""
    has_answers = any("answer" in record for record in records)
    heads = _columns(records)
    longest, groups = max((record["length"] for record in records), default=0), []
    for (method, length), cell in by_cell(records).items():
        if not has_answers and length < longest:
            continue
        chosen = _wrong_answers(task, cell) if has_answers else _high_losses(task, cell)
        if chosen:
            rows = [_row(task, record, heads, has_answers) for record in chosen[:MAX_EXAMPLES]]
            groups.append(
                {
                    "method": method,
                    "length": length,
                    "anchor": anchor("examples", task.label, method, length),
                    "rows": rows,
                    "count": len(chosen),
                    "of": len(cell),
                }
            )
    prompts = [record["prompt"] for record in records if record.get("prompt")]
    shortest = min(prompts, key=len, default=None)
    if shortest is not None and len(shortest) > 4000:
        shortest = f"{shortest[:2000]}\n\n[...]\n\n{shortest[-2000:]}"
    title = "Answers that are not right" if has_answers else "Windows with the highest loss"
    return Examples(title, heads, groups, task.metric.example_unit, shortest)


def _wrong_answers(task: Task, records: Records) -> list[Record]:
    """Returns records below the best score (at least 1; more for BLEU), the worst first."""
    scores = [task.example(record) for record in records]
    best = max(1.0, *(score for score in scores if score is not None), 0.0)
    wrong = sorted((s, i) for i, s in enumerate(scores) if s is not None and s < best)
    return [records[index] for _, index in wrong]


def _high_losses(task: Task, records: Records) -> list[Record]:
    """Returns the five records of highest loss, NaN first; none of a single record."""
    if len(records) < 2:
        return []
    losses = {id(r): math.inf if (v := task.example(r)) is None else v for r in records}
    return sorted(records, key=lambda record: -losses[id(record)])[:5]


def _columns(records: Records) -> list[str]:
    """Returns at most five fields with short values that differ between records."""
    values: dict[str, set] = {}
    for record in records:
        for key, value in record.items():
            if key not in _HIDDEN and isinstance(value, str | int | float):
                values.setdefault(key, set()).add(value)
    varied = [
        key
        for key, field in values.items()
        if len(field) > 1 and not field <= {True, False} and max(map(len, map(str, field))) < 60
    ]
    return varied[:5]


def _row(task: Task, record: Record, heads: Sequence[str], has_answers: bool) -> dict[str, Any]:
    score = task.example(record)
    return {
        "details": [_short(record.get(head)) for head in heads],
        "answer": _cut(record.get("answer", "")) if has_answers else None,
        "expected": [_cut(text) for text in task.references(record)] if has_answers else None,
        "score": "nan" if score is None else f"{score:.3g}",
        "value": score,
    }


def _short(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else "" if value is None else str(value)


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]} [...]"


def inline_svg(path: Path, name: str) -> str | None:
    """Returns the SVG of a figure in the colours of the page; None if it has no SVG file.

    `name` prefixes the ids of the figure, which must be unique in the page.
    """
    path = path.with_suffix(".svg")
    _, tag, text = (path.read_text(encoding="utf-8") if path.exists() else "").partition("<svg")
    if not tag:
        return None
    attributes, _, body = text.partition(">")
    # The width keeps one scale for all figures, so their text has one size.
    width = re.search(r' width="([\d.]+)pt"', attributes)
    style = f' style="--wide: {float(width[1]) * _REM:.1f}rem"' if width else ""
    attributes = re.sub(r'\s+(xmlns(:\w+)?|width|height)="[^"]*"', "", attributes)
    body = re.sub(r"<style[^>]*>.*?</style>\s*", "", body, flags=re.S)
    text = _prefix_ids(f"{attributes}>{body}".replace("xlink:href", "href"), name)
    text = re.sub(
        "#[0-9a-fA-F]{6}", lambda m: _PAGE_COLOURS.get(m.group().lower(), m.group()), text
    )
    return f'<svg role="img" stroke-linejoin="round"{style}{text}'


def _prefix_ids(text: str, name: str) -> str:
    """Prefixes ids that are referred to with `name`, and deletes the others."""
    used = set(re.findall(r'href="#([^"]+)"', text)) | set(re.findall(r"url\(#([^)]+)\)", text))
    text = re.sub(r' id="([^"]+)"', lambda m: f' id="{name}-{m[1]}"' if m[1] in used else "", text)
    text = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', text)
    return re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", text)
