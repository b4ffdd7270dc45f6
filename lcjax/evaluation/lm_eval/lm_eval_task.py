"""lm-evaluation-harness as a benchmark: any of its tasks, for every method of a run.

The harness makes the prompts and scores the answers. Documents of all tasks run together, the
longest first. Prompts of more than `length` tokens lose their beginning. With several processes the
first one loads the harness and its data, and broadcasts the documents to the others.
"""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import numpy as np

from lcjax.errors import InputError, NonNegativeInt, OneOf, PositiveInt, check_fields
from lcjax.evaluation.corpus import TokenizedCorpus
from lcjax.evaluation.lm_eval import harness
from lcjax.evaluation.lm_eval.requests import (
    Answer,
    Encoder,
    GenerateUntil,
    Loglikelihood,
    LoglikelihoodRolling,
    Request,
    check,
    prompts_of,
    render_chat,
    respond,
)
from lcjax.evaluation.prompt import TEMPLATES
from lcjax.evaluation.task import Limits, Metric, Record, Records, Task, Unit
from lcjax.parallel import distributed

# Metrics of the harness where lower is better, for reports without the harness.
LOWER = ("perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte", "brier_score", "ter")


@Task.register_subclass("lm_eval")
@dataclasses.dataclass(frozen=True)
class LmEval(Task):
    """Tasks and groups of the harness.

    Each task shows its first metric, or the one after a colon: `hellaswag:acc_norm`. The value of
    the benchmark is the mean over tasks where higher is better. If every name ends in a metric
    where lower is better, such as `wikitext:word_perplexity`, it is the mean of these.
    """

    generates: ClassVar[bool] = True
    ranks_options: ClassVar[bool] = True
    needs_data: ClassVar[bool] = False
    table_settings: ClassVar[tuple[str, ...]] = ("tasks",)

    tasks: tuple[str, ...] = ()  # names of tasks or groups, with an optional :METRIC
    include_path: str | None = None  # folder with more tasks as YAML files
    # Examples before each question; null: each task's own
    num_fewshot: NonNegativeInt | None = None
    max_examples: PositiveInt | None = None  # per task, the first ones; null: all
    max_new_tokens: PositiveInt = 256  # for tasks that do not set it
    # chat: the tokenizer's chat template around the prompts, with examples as turns
    template: Annotated[str, OneOf(TEMPLATES)] = "none"
    system: str | None = None  # system message before each prompt
    unsafe_code: bool = False  # whether tasks may run code that the model writes

    @property
    def metric(self) -> Metric:
        names = [name.partition(":")[0] for name in self.tasks]
        title = names[0] if len(names) == 1 else "mean over tasks"
        metrics = self._metrics
        lower = bool(metrics) and all(metrics.get(name) in LOWER for name in names)
        return Metric("score", f"lm-eval, {title}", lower, 4)

    @property
    def _metrics(self) -> dict[str, str]:
        """The metric after a colon, by name of a task or group."""
        pairs = (name.partition(":") for name in self.tasks)
        return {task: metric for task, _, metric in pairs if metric}

    def check(self, limits: Limits, key: str) -> None:
        if not self.tasks:
            raise InputError(
                f"{key}.tasks is empty; name tasks of the harness, such as --tasks piqa,hellaswag"
            )
        check_fields(key, self)
        harness.check_installed()

        def load() -> None:
            self._suite(limits.seed)

        distributed.from_main(load)

    def _suite(self, seed: int = 0) -> harness.Suite:
        """Returns the harness's tasks, loaded once; only the first process calls it."""
        if "suite" not in self._cache:
            self._cache["suite"] = harness.Suite(
                [name.partition(":")[0] for name in self.tasks],
                metrics=self._metrics,
                include_path=self.include_path,
                num_fewshot=self.num_fewshot,
                max_examples=self.max_examples,
                seed=seed,
                unsafe_code=self.unsafe_code,
            )
        return self._cache["suite"]

    @functools.cached_property
    def _cache(self) -> dict[str, Any]:
        """Caches the suite, and the documents by chat template: each takes seconds to make."""
        return {}

    def plan(self, corpus: TokenizedCorpus, length: int, limits: Limits) -> list[Unit]:
        encoder = Encoder(corpus.tokenizer, length, self.max_new_tokens, limits.seed)
        documents = self._documents(corpus.tokenizer, limits.seed)
        units = [
            self._unit(index, document, encoder, length) for index, document in enumerate(documents)
        ]
        # Batches then have similar lengths, and a lack of memory shows in the first one.
        return sorted(units, key=lambda unit: -max(r.size for r in _requests(unit)))

    def _documents(self, tokenizer, seed: int) -> list[harness.HarnessDocument]:
        chat = functools.partial(render_chat, tokenizer) if self.template == "chat" else None
        name = "documents" + (chat([{"role": "user", "content": "text"}]) if chat else "")

        def make() -> list[dict]:
            suite = self._suite(seed)
            documents = suite.documents(chat, system=self.system)
            return [vars(document) for document in documents]

        if name not in self._cache:
            rows = distributed.from_main(make)
            self._cache[name] = [harness.HarnessDocument(**row) for row in rows]
            self._check_has_mean(self._cache[name])
        return self._cache[name]

    def _check_has_mean(self, documents: Sequence[harness.HarnessDocument]) -> None:
        """Raises InputError if no task counts in the benchmark's mean."""
        metrics = {d.task: d.fields["metric"] for d in documents}
        lower = {d.task for d in documents if metrics[d.task] in d.fields["lower"]}
        if self.metric.lower_is_better or set(metrics) - lower:
            return
        names = ",".join(f"{task}:{metric}" for task, metric in metrics.items())
        raise InputError(
            f"tasks: lower is better for all metrics; name them, so that tables show it: {names}"
        )

    def _unit(
        self, index: int, document: harness.HarnessDocument, encoder: Encoder, length: int
    ) -> Unit:
        by_request = tuple(
            tuple(encoder.request(kind, arguments, repeat) for repeat in range(repeats))
            for kind, arguments, repeats in document.requests
        )
        requests = list(itertools.chain(*by_request))
        tokens = [token for request in requests for token in _ids(request)]
        fields = {
            "protocol": "lm_eval",
            "length": length,
            "bos": "document" if encoder.tokenizer.add_bos else "none",
            "template": self.template,
            "task": document.task,
            "dataset": document.dataset,
            "document": document.number,
            "size": _num_tokens(requests),
            "truncated": max(request.cut for request in requests),
            **document.fields,
        }
        if index == 0 and not isinstance(requests[0], LoglikelihoodRolling):
            fields["prompt"] = encoder.tokenizer.decode(requests[0].prompt)
        samplings = (r.sampling for r in requests if isinstance(r, GenerateUntil))
        shape = (*dict.fromkeys(type(r).__name__ for r in requests), *dict.fromkeys(samplings))
        return Unit(index, shape, np.asarray(tokens, np.int32), fields, requests=by_request)

    def check_model(self, model, units: Sequence[Unit]) -> None:
        check(model, [request for unit in units for request in _requests(unit)])

    def prompts(self, unit: Unit) -> list[tuple[int, ...]]:
        return prompts_of(_requests(unit))

    def score(self, model, units: Sequence[Unit], batch: int) -> list[Record]:
        requests = [request for unit in units for request in _requests(unit)]
        answers = iter(respond(model, requests, batch))
        return [
            self._record(
                unit,
                [list(itertools.islice(answers, len(r))) for r in unit.requests],
                model.tokenizer,
            )
            for unit in units
        ]

    def _record(self, unit: Unit, by_request: list[list[Answer]], tokenizer) -> Record:
        answers = list(itertools.chain(*by_request))
        record = {"responses": answers, **_answer(_requests(unit), answers, tokenizer)}
        if not distributed.is_main_process():
            return record | {"scores": {}, "correct": None}
        fields = unit.fields
        scores = self._suite().score_document(fields["dataset"], fields["document"], by_request)
        value = scores.get(_key(scores, unit.fields["metric"]))
        is_mean = unit.fields["metric"] not in unit.fields["aggregation"]
        correct = float(value) if is_mean and isinstance(value, int | float) else None
        return {**record, "scores": scores, "correct": correct}

    def summarise(self, records: Records) -> Record:
        """Returns the mean, and every number of every task and group as `task:metric`."""
        by_task = harness.task_numbers(records, self._task_aggregation)
        values = [value for _, value, counts in self._numbers(records, by_task) if counts]
        numbers = {
            f"{task}:{key.removesuffix(',none')}": value
            for task, by_key in by_task.items()
            for key, value in by_key.items()
        }
        value = float(np.mean(values)) if values else math.nan
        truncated = sum(record["truncated"] > 0 for record in records)
        return {"value": value, "windows": len(records), "truncated": truncated, **numbers}

    def _task_aggregation(self, dataset: str, metric: str, values: Sequence[Any]) -> float:
        return self._suite().aggregate(dataset, metric, values)

    def _numbers(self, records, by_task) -> list[tuple[str, float, bool]]:
        """Returns `task (metric)`, the number, and whether the mean includes it, for every task."""
        fields = {record["task"]: record for record in records}
        numbers = []
        for task, values in by_task.items():
            metric = fields[task]["metric"]
            key = _key(values, metric)
            if key is None:
                known = ", ".join(dict.fromkeys(k.partition(",")[0] for k in values))
                raise InputError(f"tasks: {task} has no metric {metric}; known: {known}")
            counts = self._counts(fields[task])
            numbers.append((f"{task} ({metric})", values[key], counts))
        return numbers

    def interval(self, records: Records) -> tuple[float, float]:
        """Returns the interval over documents with their weights in the value, or NaN."""
        records = [r for r in records if self._counts(r)]
        if not records or any(record["correct"] is None for record in records):
            return math.nan, math.nan
        return super().interval(records)

    def weights(self, records: Records) -> list[float]:
        """Returns equal weights of tasks, by a group's own rule inside it; 0 outside the mean."""
        sizes = collections.Counter(record["dataset"] for record in records)
        parents = {record["dataset"]: record["task"] for record in records}
        members = collections.Counter(parents.values())
        totals = collections.Counter(record["task"] for record in records)
        return [
            self._counts(r) / totals[r["task"]]
            if r["by_size"]
            else self._counts(r) / members[r["task"]] / sizes[r["dataset"]]
            for r in records
        ]

    def _counts(self, record: Record) -> bool:
        return (record["metric"] in record["lower"]) == self.metric.lower_is_better

    def cluster(self, record: Record) -> object:
        """Returns the document and its task; numbers of documents repeat across tasks."""
        return record["dataset"], record["document"]

    def part(self, record: Record) -> str:
        return record["task"]

    def aggregates(self, cells: Records, records: Records) -> Record:
        """Returns the numbers of each method and task at the longest length."""
        longest, rows = max(cell["length"] for cell in cells), {}
        for cell in cells:
            if cell["length"] == longest:
                key = cell["method"], longest
                group = [r for r in records if (r["method"], r["length"]) == key]
                by_task = harness.task_numbers(group, self._task_aggregation)
                numbers = self._numbers(group, by_task)
                values = {name: round(value, 4) for name, value, _ in numbers}
                rows[cell["method"]] = {"length": longest, **values}
        return rows


def _requests(unit: Unit) -> list[Request]:
    """Returns all requests of a unit, repetitions included."""
    return list(itertools.chain(*unit.requests))


def _key(scores, metric: str) -> str | None:
    """Returns the key of a metric with its first filter, such as `exact_match,strict-match`."""
    return next((key for key in scores if key.partition(",")[0] == metric), None)


def _ids(request: Request) -> list[int]:
    if isinstance(request, LoglikelihoodRolling):
        return [token for window in request.windows for token in _ids(window)]
    continuation = request.continuation if isinstance(request, Loglikelihood) else ()
    return [*request.prompt, *continuation]


def _num_tokens(requests: Sequence[Request]) -> int:
    """Returns the number of tokens read or generated; a shared prompt counts once."""
    prompts = {r.prompt for r in requests if isinstance(r, Loglikelihood)}
    sizes = [len(r.continuation) if isinstance(r, Loglikelihood) else r.size for r in requests]
    return sum(map(len, prompts)) + sum(sizes)


def _answer(requests: Sequence[Request], answers: Sequence[Answer], tokenizer) -> Record:
    """Returns the answer to show: the most likely continuation, or the generated text."""
    if isinstance(requests[0], GenerateUntil):
        return {"answer": answers[0]}
    if isinstance(requests[0], Loglikelihood) and len(requests) > 1:
        best = max(range(len(answers)), key=lambda index: answers[index][0])
        return {"answer": tokenizer.decode(requests[best].continuation)}
    return {}
