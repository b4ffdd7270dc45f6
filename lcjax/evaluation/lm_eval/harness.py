"""The only file that calls lm-evaluation-harness for its tasks: documents out, scores back.

Its own code makes the prompts, filters the answers, judges them and gives the number of a task;
what is between, asking the model, is this library's.
"""

import dataclasses
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lcjax.config.read import near
from lcjax.errors import InputError

HINT = 'pip install "lcjax[eval]", or pip install "lm-eval>=0.4.13,<0.5"'
OWN = "own"  # an aggregation that only the task itself knows
Answers = Sequence[Sequence[Any]]  # of each request of a document, of each repetition


@dataclasses.dataclass(frozen=True)
class Document:
    """A question of the harness, in plain values."""

    task: str  # the row of tables: a group with a rule for its number, or the data set
    dataset: str  # the task of the harness that it belongs to
    number: int
    requests: list[tuple[str, list[Any], int]]  # kind, arguments, repetitions
    facts: dict[str, Any]


def installed() -> None:
    """Raises InputError where lm-eval is not there."""
    if importlib.util.find_spec("lm_eval") is None:
        raise InputError(f"tasks: type=lm_eval needs lm-evaluation-harness; {HINT}")


class Suite:
    """Some of the harness's tasks, with their data."""

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
        """`metrics`: what is shown of some names, for every task that such a name stands for."""
        installed()
        from lm_eval.tasks import TaskManager

        if include_path is not None and not Path(include_path).is_dir():
            raise InputError(
                f"include_path={include_path!r} is no folder; name one with YAML tasks"
            )
        manager = TaskManager(include_path=include_path)
        for name in names:
            if name not in manager.task_index:
                found = near(name, manager.all_tasks)
                raise InputError(f"tasks: {name} is no task of lm-eval; {found[:200]}")
        self._seed, self._most = seed, max_examples
        self._tasks, self._parents, self.groups = {}, {}, {}
        self._shown: dict[str, str] = {}  # metrics that were asked for, by data set
        for name in names:
            loaded = self._load(manager, name)
            self._add(name, loaded)
            if metrics and name in metrics:
                self._show(metrics[name], loaded["tasks"])
        for name, task in self._tasks.items():
            _check_allowed(name, task, unsafe_code)
            _set_shots(task, num_fewshot)
        self._instances: dict[tuple[str, int], list] = {}

    @staticmethod
    def _load(manager, name: str) -> dict:
        try:
            return manager.load([name])
        except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
            why = " ".join(str(error).split())[:300]
            raise InputError(
                f"tasks: {name} cannot be loaded ({type(error).__name__}: {why}); its data comes"
                " from the hub unless a YAML file in include_path names local files"
            ) from error

    def _add(self, name: str, loaded: Mapping) -> None:
        group = loaded["groups"].get(name)
        rules = (group.aggregate_metric_list or []) if group is not None else []
        if rules:
            self.groups[name] = {"metric": rules[0].metric, "by_size": rules[0].weight_by_size}
        for leaf, task in loaded["tasks"].items():
            if leaf in self._tasks:
                raise InputError(f"tasks: {leaf} stands in {name} and before; name it once")
            self._tasks[leaf], self._parents[leaf] = task, name if rules else leaf

    def _show(self, metric: str, tasks: Mapping[str, Any]) -> None:
        """Refuses a metric that one of the rows does not have."""
        known: dict[str, dict] = {}
        for leaf, task in tasks.items():
            known.setdefault(self._parents[leaf], {}).update(task.aggregation())
            self._shown[leaf] = metric
        for row, names in known.items():
            if metric not in names:
                raise InputError(f"tasks: {row} has no metric {metric}; known: {', '.join(names)}")

    def documents(
        self,
        chat: Callable[..., str] | None = None,
        *,
        system: str | None = None,
        multiturn: bool = True,
    ) -> list[Document]:
        """Every document of every task; `chat` puts conversations in the model's format."""
        self._instances, found = {}, []
        for dataset, task in self._tasks.items():
            task.set_fewshot_seed(self._seed)
            task.build_all_requests(
                limit=self._most,
                system_instruction=system,
                apply_chat_template=chat is not None,
                fewshot_as_multiturn=multiturn and chat is not None,
                chat_template=chat,
            )
            facts, own = self._facts(dataset, task), {}
            for instance in task.instances:
                own.setdefault(instance.doc_id, []).append(instance)
            for number, instances in own.items():
                instances.sort(key=lambda instance: instance.idx)
                self._instances[dataset, number] = instances
                asked = [(i.request_type, _plain(list(i.args)), i.repeats or 1) for i in instances]
                target = _target(task, instances[0].doc)
                more = {"references": [target]} if len(target) < 1000 else {}
                parent = self._parents[dataset]
                found.append(Document(parent, dataset, number, asked, {**facts, **more}))
        return found

    def _facts(self, dataset: str, task) -> dict[str, Any]:
        """What records say of a task: how its numbers become one, and which way is up."""
        from lm_eval.api.registry import AGGREGATION_REGISTRY

        known = {function: name for name, function in AGGREGATION_REGISTRY.items()}
        rules = {metric: known.get(f, OWN) for metric, f in task.aggregation().items()}
        higher = task.higher_is_better()
        shown = next(iter(rules), "")
        group = self.groups.get(self._parents[dataset], {})
        shown = group.get("metric", shown)
        return {
            "metric": self._shown.get(dataset, shown),
            "lower": sorted(name for name, better in higher.items() if better is False),
            "aggregation": {name: rule for name, rule in rules.items() if rule != "mean"},
            "by_size": bool(group.get("by_size", True)),
            "shots": task.get_config("num_fewshot") or 0,
        }

    def judge(self, dataset: str, number: int, answers: Answers) -> dict[str, Any]:
        """Every metric of a document by name and filter, such as `acc,none`."""
        task, instances = self._tasks[dataset], self._instances[dataset, number]
        before = task.instances
        try:
            task._instances = instances  # filters are applied to all that a task has
            for instance, given in zip(instances, answers, strict=True):
                instance.resps, instance.filtered_resps = list(given), {}
            task.apply_filters()
            found = {}
            for name in instances[0].filtered_resps:
                filtered = [instance.filtered_resps[name] for instance in instances]
                scores = task.process_results(instances[0].doc, filtered)
                found |= {f"{metric},{name}": _plain(value) for metric, value in scores.items()}
            return found
        finally:
            task._instances = before

    def aggregate(self, dataset: str, metric: str, values: Sequence[Any]) -> float:
        """A task's own number from the values of its documents."""
        return float(self._tasks[dataset].aggregation()[metric](list(values)))


def aggregate(rule: str, values: Sequence[Any]) -> float:
    """One of the harness's named aggregations, that of `metric_list` in its YAML files."""
    installed()
    from lm_eval.api.registry import get_aggregation

    return float(get_aggregation(rule)(list(values)))


def _target(task, doc: Any) -> str:
    """The right answer as text: of choices, the one whose number it is."""
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
        raise InputError(f"tasks: {name} shows pictures or sounds; leave it out")


def _set_shots(task, wanted: int | None) -> None:
    """As `simple_evaluate`: a task that is zero-shot by its own settings stays so."""
    own = task.get_config("num_fewshot")
    if wanted is not None and own != 0:
        task.set_config(key="num_fewshot", value=wanted)
    elif own is None:
        task.set_config(key="num_fewshot", value=0)


def _plain(value: Any) -> Any:
    """`value` for JSON: what metrics and arguments are made of."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return value if isinstance(value, str | int | float | bool | None) else str(value)
