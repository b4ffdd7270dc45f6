"""Calls lm-evaluation-harness for its tasks: it makes the documents and scores the answers.

The harness's own code makes prompts, filters answers, and computes scores. This library runs the
model. The numbers of tasks and groups come from records alone, by the harness's rules: a record
holds its scores by `metric,filter`, the aggregation of each metric that is not a mean, and its
group.
"""

import dataclasses
import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lcjax.errors import InputError, install_command, one_line, suggestion
from lcjax.evaluation.statistics import group_by
from lcjax.evaluation.task import Records

OWN = "own"  # an aggregation function of the task itself, without a registered name
Answers = Sequence[Sequence[Any]]  # by request of a document and repetition
# Aggregates the values of (task of the harness, metric) by the task's own function.
TaskAggregation = Callable[[str, str, Sequence[Any]], float]


@dataclasses.dataclass(frozen=True)
class HarnessDocument:
    """One document of a task of the harness, in plain values."""

    task: str  # the row of tables: the group if it aggregates, else the task
    dataset: str  # the task of the harness
    number: int
    requests: list[tuple[str, list[Any], int]]  # kind, arguments, repetitions
    fields: dict[str, Any]


def check_installed() -> None:
    """Raises InputError if lm-eval is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise InputError(
            f"tasks: type=lm_eval needs lm-evaluation-harness; {install_command('eval')}"
        )


class Suite:
    """Tasks of the harness with their data."""

    def __init__(
        self,
        names: Sequence[str],
        *,
        metrics: Mapping[str, str] | None = None,
        include_path: str | None = None,
        num_fewshot: int | None = None,
        max_examples: int | None = None,
        seed: int = 0,
        unsafe_code: bool = False,
    ):
        """Loads tasks.

        Args:
          names: Names of tasks, groups or tags of the harness.
          metrics: The metric to show, for some of `names`; it applies to all tasks of a group.
          include_path: Folder with more tasks as YAML files.
          num_fewshot: Examples before each question; None keeps the number of each task.
          max_examples: Documents of each task, the first ones; None for all.
          seed: Seed of the few-shot examples.
          unsafe_code: Whether tasks may run code that the model writes.

        Raises:
          InputError: lm-eval, a task or a metric does not exist, or a task cannot run here.
        """
        check_installed()
        from lm_eval.tasks import TaskManager

        if include_path is not None and not Path(include_path).is_dir():
            raise InputError(
                f"include_path={include_path!r} is no folder; name one with YAML tasks"
            )
        manager = TaskManager(include_path=include_path)
        for name in names:
            if name not in manager.task_index:
                matches = suggestion(name, manager.all_tasks)
                raise InputError(f"tasks: {name} is no task of lm-eval; {matches[:200]}")
        self._seed, self._max_examples = seed, max_examples
        self._tasks, self._parents, self.groups = {}, {}, {}
        self._metrics: dict[str, str] = {}  # the metric of tables, by task
        for name in names:
            loaded = self._load(manager, name)
            self._add(name, loaded)
            if metrics and name in metrics:
                self._set_metric(metrics[name], loaded["tasks"])
        for name, task in self._tasks.items():
            _check_allowed(name, task, unsafe_code)
            _set_shots(task, num_fewshot)
        self._instances: dict[tuple[str, int], list] = {}

    @staticmethod
    def _load(manager, name: str) -> dict:
        try:
            return manager.load([name])
        except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
            reason = one_line(error)[:300]
            raise InputError(
                f"tasks: {name} cannot be loaded ({type(error).__name__}: {reason}); its data comes"
                " from the hub unless a YAML file in include_path names local files"
            ) from error

    def _add(self, name: str, loaded: Mapping) -> None:
        group = loaded["groups"].get(name)
        rules = (group.aggregate_metric_list or []) if group is not None else []
        if rules:
            self.groups[name] = {"metric": rules[0].metric, "by_size": rules[0].weight_by_size}
        for leaf, task in loaded["tasks"].items():
            if leaf in self._tasks:
                raise InputError(f"tasks: {leaf} is part of {name} and of an earlier name")
            self._tasks[leaf], self._parents[leaf] = task, name if rules else leaf

    def _set_metric(self, metric: str, tasks: Mapping[str, Any]) -> None:
        """Sets the metric of `tasks`; raises InputError if a row of the table lacks it."""
        metrics: dict[str, dict] = {}
        for leaf, task in tasks.items():
            metrics.setdefault(self._parents[leaf], {}).update(task.aggregation())
            self._metrics[leaf] = metric
        for row, names in metrics.items():
            if metric not in names:
                raise InputError(f"tasks: {row} has no metric {metric}; known: {', '.join(names)}")

    def documents(
        self, chat: Callable[..., str] | None = None, *, system: str | None = None
    ) -> list[HarnessDocument]:
        """Returns every document of every task.

        Args:
          chat: Applies the model's chat template to messages, in which few-shot examples are turns
            of the conversation; None for plain text.
          system: The system message.
        """
        self._instances, documents = {}, []
        for dataset, task in self._tasks.items():
            task.set_fewshot_seed(self._seed)
            task.build_all_requests(
                limit=self._max_examples,
                system_instruction=system,
                apply_chat_template=chat is not None,
                fewshot_as_multiturn=chat is not None,
                chat_template=chat,
            )
            fields = self._record_fields(dataset, task)
            by_document = group_by(task.instances, lambda instance: instance.doc_id)
            for number, instances in by_document.items():
                instances.sort(key=lambda instance: instance.idx)
                self._instances[dataset, number] = instances
                requests = [
                    (i.request_type, _plain(list(i.args)), i.repeats or 1) for i in instances
                ]
                target = _target(task, instances[0].doc)
                more = {"references": [target]} if len(target) < 1000 else {}
                parent = self._parents[dataset]
                documents.append(
                    HarnessDocument(parent, dataset, number, requests, {**fields, **more})
                )
        return documents

    def _record_fields(self, dataset: str, task) -> dict[str, Any]:
        """Returns the fields of records that aggregation needs."""
        from lm_eval.api.registry import AGGREGATION_REGISTRY

        names = {function: name for name, function in AGGREGATION_REGISTRY.items()}
        rules = {metric: names.get(f, OWN) for metric, f in task.aggregation().items()}
        higher = task.higher_is_better()
        group = self.groups.get(self._parents[dataset], {})
        default = group.get("metric", next(iter(rules), ""))
        return {
            "metric": self._metrics.get(dataset, default),
            "lower": sorted(name for name, better in higher.items() if better is False),
            "aggregation": {name: rule for name, rule in rules.items() if rule != "mean"},
            "by_size": bool(group.get("by_size", True)),
            "shots": task.get_config("num_fewshot") or 0,
        }

    def score_document(self, dataset: str, number: int, answers: Answers) -> dict[str, Any]:
        """Returns every metric of a document by `metric,filter`, such as `acc,none`."""
        task, instances = self._tasks[dataset], self._instances[dataset, number]
        all_instances = task.instances
        try:
            task._instances = instances  # the harness filters all instances of a task
            for instance, responses in zip(instances, answers, strict=True):
                instance.resps, instance.filtered_resps = list(responses), {}
            task.apply_filters()
            metrics = {}
            for name in instances[0].filtered_resps:
                filtered = [instance.filtered_resps[name] for instance in instances]
                scores = task.process_results(instances[0].doc, filtered)
                metrics |= {f"{metric},{name}": _plain(value) for metric, value in scores.items()}
            return metrics
        finally:
            task._instances = all_instances

    def aggregate(self, dataset: str, metric: str, values: Sequence[Any]) -> float:
        """Aggregates the values of a task's documents by the task's own function."""
        return float(self._tasks[dataset].aggregation()[metric](list(values)))


def _target(task, doc: Any) -> str:
    """Returns the right answer as text; an index into choices becomes the choice."""
    target = task.doc_to_target(doc)
    if isinstance(target, int) and task.get_config("doc_to_choice") is not None:
        choices = task.doc_to_choice(doc)
        return str(choices[target]) if 0 <= target < len(choices) else str(target)
    return str(target)


def _check_allowed(name: str, task, unsafe_code: bool) -> None:
    if getattr(task, "UNSAFE_CODE", False) and not unsafe_code:
        raise InputError(
            f"tasks: {name} runs code that the model writes; allow it with unsafe_code=true"
        )
    if getattr(task, "MULTIMODAL", False):
        raise InputError(f"tasks: {name} needs images or audio; leave it out")


def _set_shots(task, num_fewshot: int | None) -> None:
    """Sets the examples as `simple_evaluate`: a task with num_fewshot=0 stays zero-shot."""
    default = task.get_config("num_fewshot")
    if num_fewshot is not None and default != 0:
        task.set_config(key="num_fewshot", value=num_fewshot)
    elif default is None:
        task.set_config(key="num_fewshot", value=0)


def _plain(value: Any) -> Any:
    """Converts metrics and arguments to values that JSON can hold."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def aggregate(rule: str, values: Sequence[Any]) -> float:
    """Applies one of the harness's named aggregations, as in `metric_list` of its YAML files."""
    check_installed()
    from lm_eval.api.registry import get_aggregation

    return float(get_aggregation(rule)(list(values)))


def _ratio(pairs: Sequence[Sequence[float]]) -> float:
    """Returns the sum of log-likelihoods divided by the sum of words or bytes."""
    log_likelihoods, counts = zip(*pairs, strict=True)
    return math.fsum(_floats(log_likelihoods)) / math.fsum(counts)


def _floats(values: Sequence[Any]) -> np.ndarray:
    """Converts to float64; records hold null for NaN."""
    return np.array([math.nan if value is None else value for value in values], np.float64)


# lm-eval 0.4.13, api/metrics.py. Other named aggregations call lm-eval.
_RULES: dict[str, Callable[[Sequence[Any]], float]] = {
    "mean": lambda values: float(np.mean(_floats(values))),
    "nanmean": lambda values: float(np.nanmean(_floats(values))),
    "perplexity": lambda values: math.exp(-float(np.mean(_floats(values)))),
    "weighted_perplexity": lambda values: math.exp(-_ratio(values)),
    "bits_per_byte": lambda values: -_ratio(values) / math.log(2),
}


def dataset_numbers(
    records: Records, task_aggregation: TaskAggregation
) -> dict[str, dict[str, float]]:
    """Returns the numbers of every task of the harness, by `metric,filter`."""
    values: dict[str, dict[str, list]] = {}
    rules: dict[str, dict[str, str]] = {}
    for record in records:
        dataset = record["dataset"]
        rules[dataset] = record["aggregation"]
        for key, score in record["scores"].items():
            values.setdefault(dataset, {}).setdefault(key, []).append(score)

    def number(dataset: str, key: str, scores: list) -> float:
        metric = key.partition(",")[0]
        rule = rules[dataset].get(metric, "mean")
        if rule == OWN:
            return task_aggregation(dataset, metric, scores)
        return _RULES[rule](scores) if rule in _RULES else aggregate(rule, scores)

    return {
        dataset: {key: number(dataset, key, scores) for key, scores in by_key.items()}
        for dataset, by_key in values.items()
    }


def task_numbers(
    records: Records, task_aggregation: TaskAggregation
) -> dict[str, dict[str, float]]:
    """Returns the numbers of each row of the table; a group has a weighted mean over its tasks."""
    parents = {record["dataset"]: record["task"] for record in records}
    counts = {name: sum(r["dataset"] == name for r in records) for name in parents}
    by_size = {record["task"]: record["by_size"] for record in records}
    means: dict[str, dict[str, float]] = {}
    datasets = dataset_numbers(records, task_aggregation)
    for task in dict.fromkeys(parents.values()):
        members = [name for name in datasets if parents[name] == task]
        for key in dict.fromkeys(key for name in members for key in datasets[name]):
            names = [name for name in members if key in datasets[name]]
            weights = [counts[name] if by_size[task] else 1 for name in names]
            numbers = [datasets[name][key] for name in names]
            means.setdefault(task, {})[key] = float(np.average(numbers, weights=weights))
    return means
