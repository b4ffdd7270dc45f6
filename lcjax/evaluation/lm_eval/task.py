"""lm-evaluation-harness as a benchmark: any of its tasks, for every method of a run.

The harness makes the prompts and judges the answers; documents of all tasks run together, the
longest first, and `length` is the window beyond which prompts lose their beginning. Only the first
of several processes has the harness load data; others are told what to ask.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lcjax.errors import InputError, one_of, whole_numbers
from lcjax.evaluation.corpus import Corpus
from lcjax.evaluation.lm_eval import harness, numbers
from lcjax.evaluation.lm_eval.answers import Answer, check, prompts_of, respond
from lcjax.evaluation.lm_eval.chat import conversation
from lcjax.evaluation.lm_eval.requests import Choice, Encoder, Request, Rolling, Writing
from lcjax.evaluation.prompt import TEMPLATES
from lcjax.evaluation.report import plots
from lcjax.evaluation.task import Limits, Metric, Record, Task, Unit
from lcjax.parallel import distributed

# Numbers of the harness of which less is better, by name: what a report needs without it.
LOWER = ("perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte", "brier_score", "ter")


@dataclasses.dataclass(frozen=True)
class Asked:
    """The requests of a document, and how often each is repeated."""

    dataset: str
    number: int
    requests: tuple[Request, ...]
    repeats: tuple[int, ...]


@Task.register_subclass("lm_eval")
@dataclasses.dataclass(frozen=True)
class LmEval(Task):
    """Tasks and groups of the harness.

    The number of each is its first metric, or the one behind a colon: `hellaswag:acc_norm`. The
    benchmark's is the mean over tasks of which more is better; where every name ends in a metric of
    which less is better, such as `wikitext:word_perplexity`, the mean of those.
    """

    generates: ClassVar[bool] = True
    chooses: ClassVar[bool] = True
    needs_data: ClassVar[bool] = False

    tasks: tuple[str, ...] = ()  # names of tasks or groups, each perhaps with :METRIC
    include_path: str | None = None  # folder with YAML tasks of your own
    num_fewshot: int | None = None  # examples before each question; null: as each task has it
    max_examples: int | None = None  # of every task, the first ones; null: all
    max_new_tokens: int = 256  # of answers whose task does not say how many
    template: str = "none"  # chat: the tokenizer's chat template around the prompts
    system: str | None = None  # what a system says before everything else
    multiturn: bool = True  # with chat, examples are turns of the conversation
    unsafe_code: bool = False  # whether tasks may run code that the model writes

    @property
    def metric(self) -> Metric:
        names = [name.partition(":")[0] for name in self.tasks]
        title = names[0] if len(names) == 1 else "mean over tasks"
        lower = bool(self._wanted) and all(self._wanted.get(n) in LOWER for n in names)
        return Metric("score", f"lm-eval, {title}", lower, 4)

    @property
    def _wanted(self) -> dict[str, str]:
        """The metric of each name with one, which may stand for several tasks."""
        pairs = (name.partition(":") for name in self.tasks)
        return {task: metric for task, _, metric in pairs if metric}

    def check(self, limits: Limits, key: str) -> None:
        if not self.tasks:
            raise InputError(
                f"{key}.tasks is empty; name tasks of the harness, such as --tasks piqa,hellaswag"
            )
        one_of(f"{key}.template", self.template, TEMPLATES)
        whole_numbers(key, self, 0, "num_fewshot")
        whole_numbers(key, self, 1, "max_examples", "max_new_tokens")
        harness.installed()

        def opened() -> None:
            self._suite(limits.seed)

        distributed.from_first(opened)

    def _suite(self, seed: int = 0) -> harness.Suite:
        """The harness's tasks, opened once; only in the first process."""
        if "suite" not in self._held:
            self._held["suite"] = harness.Suite(
                [name.partition(":")[0] for name in self.tasks],
                metrics=self._wanted,
                include_path=self.include_path,
                num_fewshot=self.num_fewshot,
                max_examples=self.max_examples,
                seed=seed,
                unsafe_code=self.unsafe_code,
            )
        return self._held["suite"]

    @functools.cached_property
    def _held(self) -> dict[str, Any]:
        """The suite, and documents by how conversations are written: what takes seconds to make."""
        return {}

    def plan(self, corpus: Corpus, length: int, limits: Limits) -> list[Unit]:
        encoder = Encoder(corpus.tokenizer, length, self.max_new_tokens, limits.seed)
        documents = self._documents(corpus.tokenizer, limits.seed)
        units = [
            self._unit(index, document, encoder, length) for index, document in enumerate(documents)
        ]
        # Batches are then of one length, and what does not fit is known at once.
        return sorted(units, key=lambda unit: -max(r.size for r in unit.payload.requests))

    def _documents(self, tokenizer, seed: int) -> list[harness.Document]:
        chat = functools.partial(conversation, tokenizer) if self.template == "chat" else None
        name = "documents" + (chat([{"role": "user", "content": "text"}]) if chat else "")

        def make() -> list[dict]:
            suite = self._suite(seed)
            found = suite.documents(chat, system=self.system, multiturn=self.multiturn)
            return [vars(document) for document in found]

        if name not in self._held:
            rows = distributed.from_first(make)
            self._held[name] = [harness.Document(**row) for row in rows]
            self._check_shown(self._held[name])
        return self._held[name]

    def _check_shown(self, documents: Sequence[harness.Document]) -> None:
        """Refuses a mean over nothing."""
        shown = {d.task: d.facts["metric"] for d in documents}
        lower = {d.task for d in documents if shown[d.task] in d.facts["lower"]}
        if self.metric.lower_is_better or set(shown) - lower:
            return
        names = ",".join(f"{task}:{metric}" for task, metric in shown.items())
        raise InputError(
            f"tasks: of all numbers less is better; name them, that tables may say so: {names}"
        )

    def _unit(self, index: int, document: harness.Document, encoder: Encoder, length: int) -> Unit:
        requests = tuple(
            encoder.request(kind, arguments, repeat)
            for kind, arguments, repeats in document.requests
            for repeat in range(repeats)
        )
        tokens = [token for request in requests for token in _ids(request)]
        facts = {
            "protocol": "lm_eval",
            "length": length,
            "bos": "document" if encoder.tokenizer.add_bos else "none",
            "template": self.template,
            "task": document.task,
            "dataset": document.dataset,
            "document": document.number,
            "size": _read(requests),
            "truncated": max(request.cut for request in requests),
            **document.facts,
        }
        if index == 0 and not isinstance(requests[0], Rolling):  # what a reader wants to see once
            facts["prompt"] = encoder.tokenizer.decode(requests[0].prompt)
        alike = tuple(r.sampling for r in requests if isinstance(r, Writing))
        shape = (*dict.fromkeys(type(r).__name__ for r in requests), *dict.fromkeys(alike))
        repeats = tuple(count for _, _, count in document.requests)
        asked = Asked(document.dataset, document.number, requests, repeats)
        return Unit(index, shape, np.asarray(tokens, np.int32), facts, asked)

    def check_model(self, model, units: Sequence[Unit]) -> None:
        check(model, [request for unit in units for request in unit.payload.requests])

    def prompts(self, unit: Unit) -> list[tuple[int, ...]]:
        return prompts_of(unit.payload.requests)

    def score(self, model, units: Sequence[Unit], batch: int) -> list[Record]:
        answers = respond(model, [r for u in units for r in u.payload.requests], batch)
        left = iter(answers)
        return [
            self._record(unit, [next(left) for _ in unit.payload.requests], model.tokenizer)
            for unit in units
        ]

    def _record(self, unit: Unit, answers: list[Answer], tokenizer) -> Record:
        asked: Asked = unit.payload
        record = {"responses": answers, **_said(asked.requests, answers, tokenizer)}
        if not distributed.first():
            return record | {"scores": {}, "correct": None}
        left = iter(answers)
        by_request = [[next(left) for _ in range(count)] for count in asked.repeats]
        scores = self._suite().judge(asked.dataset, asked.number, by_request)
        key = _key(scores, unit.facts["metric"])
        value = scores.get(key)
        mean = unit.facts["metric"] not in unit.facts["aggregation"]
        single = mean and isinstance(value, int | float)
        return {**record, "scores": scores, "correct": float(value) if single else None}

    def summarise(self, records: Sequence[Record]) -> Record:
        """The mean, and every number of every task and group as `task:metric`."""
        found = numbers.of_tasks(records, self._own)
        shown = self._numbers(records, found)
        counted = [value for _, value, counts in shown if counts]
        every = {
            f"{task}:{key.removesuffix(',none')}": value
            for task, values in found.items()
            for key, value in values.items()
        }
        value = float(np.mean(counted)) if counted else math.nan
        truncated = sum(record["truncated"] > 0 for record in records)
        return {"value": value, "windows": len(records), "truncated": truncated, **every}

    def _own(self, dataset: str, metric: str, values: Sequence[Any]) -> float:
        return self._suite().aggregate(dataset, metric, values)

    def _numbers(self, records, found) -> list[tuple[str, float, bool]]:
        """`task (metric)`, its number and whether that counts in the mean, of every task."""
        facts = {record["task"]: record for record in records}
        shown = []
        for task, values in found.items():
            metric = facts[task]["metric"]
            key = _key(values, metric)
            if key is None:
                known = ", ".join(dict.fromkeys(k.partition(",")[0] for k in values))
                raise InputError(f"tasks: {task} has no metric {metric}; known: {known}")
            down = metric in facts[task]["lower"]
            shown.append((f"{task} ({metric})", values[key], down == self.metric.lower_is_better))
        return shown

    def interval(self, records: Sequence[Record]) -> tuple[float, float]:
        """Over documents, each with the share that it has in the value; or NaN."""
        records = [r for r in records if self._counts(r)]
        if not records or any(record["correct"] is None for record in records):
            return math.nan, math.nan
        return super().interval(records)

    def weights(self, records: Sequence[Record]) -> list[float]:
        """Tasks count alike, in a group as its rule says; 0 where better is the other way."""
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
        """Documents are counted in each data set."""
        return record["dataset"], record["document"]

    def part(self, record: Record) -> str:
        return record["task"]

    def aggregates(self, cells: Sequence[Record], records: Sequence[Record]) -> Record:
        """Methods by tasks at the longest length."""
        longest, found = max(cell["length"] for cell in cells), {}
        for cell in cells:
            if cell["length"] == longest:
                own = [
                    r for r in records if (r["method"], r["length"]) == (cell["method"], longest)
                ]
                shown = self._numbers(own, numbers.of_tasks(own, self._own))
                values = {name: round(value, 4) for name, value, _ in shown}
                found[cell["method"]] = {"length": longest, **values}
        return found

    def figures(
        self, cells: Sequence[Record], records: Sequence[Record], folder: Path
    ) -> list[Path]:
        return [plots.over_lengths(cells, self.metric, folder / f"{self.label}.png")]


def _key(scores, metric: str) -> str | None:
    """The first filter's score of a metric: `exact_match` is `exact_match,strict-match`."""
    return next((key for key in scores if key.partition(",")[0] == metric), None)


def _ids(request: Request) -> list[int]:
    if isinstance(request, Rolling):
        return [token for window in request.windows for token in _ids(window)]
    more = request.continuation if isinstance(request, Choice) else ()
    return [*request.prompt, *more]


def _read(requests: Sequence[Request]) -> int:
    """Tokens that a model reads or writes for a document; a shared prompt counts once."""
    prompts = {r.prompt for r in requests if isinstance(r, Choice)}
    more = [len(r.continuation) if isinstance(r, Choice) else r.size for r in requests]
    return sum(map(len, prompts)) + sum(more)


def _said(requests: Sequence[Request], answers: Sequence[Answer], tokenizer) -> Record:
    """What a reader takes for the answer: the likeliest continuation, or the text."""
    if isinstance(requests[0], Writing):
        return {"answer": answers[0]}
    if isinstance(requests[0], Choice) and len(requests) > 1:
        best = max(range(len(answers)), key=lambda number: answers[number][0])
        return {"answer": tokenizer.decode(requests[best].continuation)}
    return {}
