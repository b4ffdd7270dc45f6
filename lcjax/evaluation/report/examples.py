"""Examples that a page shows: wrong answers of every cell, or the windows with the highest loss."""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

from lcjax.evaluation.records import by_cell
from lcjax.evaluation.task import Record, Task

MOST = 12  # of one cell; the records hold all
_LONGEST = 600  # characters of an answer
# What every record has, what is said elsewhere, and what is said of the run.
_HIDDEN = frozenset(
    {"method", "length", "trained", "tokenizer", "digest", "protocol", "wording", "stride", "bos"}
    | {"size", "seconds", "compile_seconds", "read", "peak_bytes", "peak_bytes_at_most", "weight"}
    | {"answer", "references", "key", "correct", "score", "scored", "prompt", "budget", "first"}
    | {
        "ids",
        "finish",
        "nan",
        "template",
        "prompt_tokens",
        "max_new_tokens",
        "decoder",
        "nll",
        "bytes",
    }
)


def anchor(*words: object) -> str:
    """A name for a place in the page."""
    return re.sub(r"[^\w.-]+", "-", "-".join(map(str, words)))


@dataclasses.dataclass(frozen=True)
class Shown:
    """Groups of examples, one a cell, with the names of their columns."""

    title: str
    heads: list[str]
    groups: list[dict[str, Any]]
    prompt: str | None = None  # what one question looks like


def of_task(task: Task, records: Sequence[Record]) -> Shown:
    """What a reader wants to look into: mistakes, or hard windows where nothing is answered."""
    answers = any("answer" in record for record in records)
    heads = _columns(records)
    longest, groups = max((record["length"] for record in records), default=0), []
    for (method, length), own in by_cell(records).items():
        if not answers and length < longest:
            continue
        found = _wrong(task, own) if answers else _hard(task, own)
        if found:
            rows = [_row(task, record, heads, answers) for record in found[:MOST]]
            groups.append(
                {
                    "method": method,
                    "length": length,
                    "anchor": anchor("examples", task.label, method, length),
                    "rows": rows,
                    "count": len(found),
                    "of": len(own),
                }
            )
    prompts = [record["prompt"] for record in records if record.get("prompt")]
    shortest = min(prompts, key=len, default=None)
    if shortest is not None and len(shortest) > 4000:
        shortest = f"{shortest[:2000]}\n\n[...]\n\n{shortest[-2000:]}"
    title = "Answers that are not right" if answers else "Windows with the highest loss"
    return Shown(title, heads, groups, shortest)


def _wrong(task: Task, records: Sequence[Record]) -> list[Record]:
    """The worst first. Right is 1, or the best of scores from 0 to 100, such as BLEU."""
    scores = [task.example(record) for record in records]
    best = max(1.0, *(score for score in scores if score is not None), 0.0)
    wrong = sorted((s, i) for i, s in enumerate(scores) if s is not None and s < best)
    return [records[index] for _, index in wrong]


def _hard(task: Task, records: Sequence[Record]) -> list[Record]:
    """At most five, and none where there is no choice; windows without a number come first."""
    if len(records) < 2:
        return []
    losses = {id(r): math.inf if (v := task.example(r)) is None else v for r in records}
    return sorted(records, key=lambda record: -losses[id(record)])[:5]


def _columns(records: Sequence[Record]) -> list[str]:
    """Fields that tell examples apart: single values that are not the same in all records."""
    values: dict[str, set] = {}
    for record in records:
        for key, value in record.items():
            if key not in _HIDDEN and isinstance(value, str | int | float):
                values.setdefault(key, set()).add(value)
    varied = [
        key
        for key, found in values.items()
        if len(found) > 1 and not found <= {True, False} and max(map(len, map(str, found))) < 60
    ]
    return varied[:5]


def _row(task: Task, record: Record, heads: Sequence[str], answers: bool) -> dict[str, Any]:
    score = task.example(record)
    return {
        "facts": [_short(record.get(head)) for head in heads],
        "answer": _cut(record.get("answer", "")) if answers else None,
        "expected": [_cut(text) for text in task.references(record)] if answers else None,
        "score": "nan" if score is None else f"{score:.3g}",
        "value": score,
    }


def _short(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else "" if value is None else str(value)


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} [...]"
