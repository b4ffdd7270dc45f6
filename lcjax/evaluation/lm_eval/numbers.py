"""From the scores of documents to the numbers of tasks and groups, by the harness's own rules.

A record says all that is needed: its scores by `metric,filter`, how those of a task become one
(`aggregation`; a mean where nothing is said), and to which group the task belongs.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lcjax.evaluation.lm_eval import harness
from lcjax.evaluation.task import Record

# (task of the harness, metric, values of its documents): for what only the task itself knows
Own = Callable[[str, str, Sequence[Any]], float]


def _ratio(pairs: Sequence[Sequence[float]]) -> float:
    """Of sums: log-likelihoods to words or bytes."""
    above, below = zip(*pairs, strict=True)
    return math.fsum(_floats(above)) / math.fsum(below)


def _floats(values: Sequence[Any]) -> np.ndarray:
    """Records hold null for NaN."""
    return np.array([math.nan if value is None else value for value in values], np.float64)


# lm-eval 0.4.13, api/metrics.py; its other ones are asked of itself.
_RULES: dict[str, Callable[[Sequence[Any]], float]] = {
    "mean": lambda values: float(np.mean(_floats(values))),
    "nanmean": lambda values: float(np.nanmean(_floats(values))),
    "perplexity": lambda values: math.exp(-float(np.mean(_floats(values)))),
    "weighted_perplexity": lambda values: math.exp(-_ratio(values)),
    "bits_per_byte": lambda values: -_ratio(values) / math.log(2),
}


def of_datasets(records: Sequence[Record], own: Own) -> dict[str, dict[str, float]]:
    """Every number of every task of the harness, by `metric,filter`."""
    values: dict[str, dict[str, list]] = {}
    rules: dict[str, dict[str, str]] = {}
    for record in records:
        dataset = record["dataset"]
        rules[dataset] = record["aggregation"]
        for key, score in record["scores"].items():
            values.setdefault(dataset, {}).setdefault(key, []).append(score)
    return {
        dataset: {
            key: _number(dataset, key.partition(",")[0], rules[dataset], scores, own)
            for key, scores in found.items()
        }
        for dataset, found in values.items()
    }


def _number(dataset: str, metric: str, rules: dict[str, str], values: list, own: Own) -> float:
    rule = rules.get(metric, "mean")
    if rule == harness.OWN:
        return own(dataset, metric, values)
    return _RULES[rule](values) if rule in _RULES else harness.aggregate(rule, values)


def of_tasks(records: Sequence[Record], own: Own) -> dict[str, dict[str, float]]:
    """The same by what was asked for: a group has the mean over its tasks, as its rule weighs."""
    parents = {record["dataset"]: record["task"] for record in records}
    counts = {name: sum(r["dataset"] == name for r in records) for name in parents}
    by_size = {record["task"]: record["by_size"] for record in records}
    found: dict[str, dict[str, float]] = {}
    datasets = of_datasets(records, own)
    for task in dict.fromkeys(parents.values()):
        members = [name for name in datasets if parents[name] == task]
        for key in dict.fromkeys(key for name in members for key in datasets[name]):
            having = [name for name in members if key in datasets[name]]
            weights = [counts[name] if by_size[task] else 1 for name in having]
            numbers = [datasets[name][key] for name in having]
            found.setdefault(task, {})[key] = float(np.average(numbers, weights=weights))
    return found
