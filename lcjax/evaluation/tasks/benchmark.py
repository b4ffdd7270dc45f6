"""Benchmarks of several data sets in official files, as far as they are alike."""

import abc
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lcjax.errors import InputError, one_of, whole_numbers
from lcjax.evaluation import metrics
from lcjax.evaluation.corpus import Corpus
from lcjax.evaluation.generation import Example, GenerationTask, PromptTask, counts
from lcjax.evaluation.prompt import Budget, Layout, Segment, cut_text
from lcjax.evaluation.task import Limits, Metric, Record, Unit
from lcjax.evaluation.tasks.local_files import find

# Of an answer, and the facts of its unit, which hold the references.
Score = Callable[[str, Record], float]
AGGREGATES = ("flat", "category_macro")
BUDGETS = ("official", "total")


def best_of(metric: Callable[[str, str], float], *, strip: bool = False) -> Score:
    """The highest score over all references; `strip` takes the blanks around the answer away."""
    return lambda answer, facts: metrics.best(
        metric, answer.strip() if strip else answer, facts["references"]
    )


@dataclasses.dataclass(frozen=True)
class DataSet:
    """One file of a benchmark: what is generated for it, and how that is scored."""

    name: str
    group: str  # category, as the benchmark's own table has it
    new_tokens: int
    scores: Mapping[str, Score]  # the first one is what tables show
    chat: bool = True  # whether a chat template may go around its prompts
    first_line: bool = False  # whether only the first line of an answer counts
    stop: tuple[str, ...] = ()

    def showing(self, name: str) -> "DataSet":
        """The same, with another one of the scores in the tables."""
        return dataclasses.replace(self, scores={name: self.scores[name], **self.scores})

    def judged(self, answer: str, facts: Record) -> dict[str, float]:
        """All flavours of one answer, the shown one also as `score`."""
        text = metrics.first_line(answer) if self.first_line else answer
        found = {name: float(score(text, facts)) for name, score in self.scores.items()}
        return {"score": next(iter(found.values())), **found}


@dataclasses.dataclass(frozen=True)
class FileBenchmark(PromptTask):
    """Data sets in local files, and a mean over them.

    A subclass says where the files stand (`files`) and what they ask (`read`).
    """

    judging: ClassVar[tuple[str, ...]] = ("aggregate",)
    known: ClassVar[Mapping[str, DataSet]] = {}
    sets: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # names for several, beside categories
    title: ClassVar[str] = ""
    source: ClassVar[str] = ""  # where the files come from

    path: str = ""  # folder with the official files
    tasks: tuple[str, ...] = ()  # data sets, categories, or names of several; empty: all
    max_examples: int | None = None  # of every data set, the first ones; null: all
    aggregate: str = "flat"  # flat: mean over data sets; category_macro: over means of categories

    @abc.abstractmethod
    def files(self, name: str) -> tuple[str, ...]:
        """Names under which the file of a data set may stand in `path`."""

    @abc.abstractmethod
    def read(self, data: DataSet, path: Path, corpus: Corpus) -> Iterator[Example]:
        """Examples of a file, with prompts of full length.

        `corpus.once` keeps what several lengths or data sets read.
        """

    @property
    def metric(self) -> Metric:
        count = len(self.chosen())
        rule = {"flat": f"mean of {count}", "category_macro": "mean of category means"}
        what = self.chosen()[0].name if count == 1 else rule[self.aggregate]
        return Metric("score", f"{self.title}, {what}", False, 4)

    def chosen(self) -> list[DataSet]:
        """The data sets of `tasks`, in the benchmark's order."""
        several = self._several()
        wanted = {n for name in self.tasks for n in several.get(name, (name,))}
        return [data for name, data in self.known.items() if name in wanted or not self.tasks]

    def _several(self) -> dict[str, Sequence[str]]:
        """Data sets by what names several of them."""
        groups: dict[str, list[str]] = {}
        for data in self.known.values():
            groups.setdefault(data.group, []).append(data.name)
        return {**groups, **self.sets}

    def check(self, limits: Limits, key: str) -> None:
        super().check(limits, key)
        one_of(f"{key}.aggregate", self.aggregate, AGGREGATES)
        names = dict.fromkeys([*self._several(), *self.known])
        for name in self.tasks:
            one_of(f"{key}.tasks", name, names)
        whole_numbers(key, self, 1, "max_examples")
        for data in filter(self.has_file, self.chosen()):
            find(self.path, self.files(data.name), key, self.source)

    def has_file(self, data: DataSet) -> bool:
        """Whether a data set is read from a file, as most are."""
        return True

    def examples(self, corpus: Corpus, length: int, limits: Limits) -> Iterator[Example]:
        for data in self.chosen():
            yield from self.examples_of(data, corpus, length, limits)

    def examples_of(
        self, data: DataSet, corpus: Corpus, length: int, limits: Limits
    ) -> Iterator[Example]:
        """Examples of one data set, as they are asked."""
        path, empty = find(self.path, self.files(data.name), self.label, self.source), True
        for example in itertools.islice(self.read(data, path, corpus), self.max_examples):
            empty = False
            yield self.asked(example, data, corpus.tokenizer, length)
        if empty:
            raise InputError(f"{path} has no line that fits; it is not the official file")

    def asked(self, example: Example, data: DataSet, tokenizer, length: int) -> Example:
        """An example of a data set as it is asked at one length."""
        facts, new = {"dataset": data.name, **example.facts}, example.max_new_tokens
        return dataclasses.replace(example, facts=facts, max_new_tokens=new or data.new_tokens)

    def weights(self, records: Sequence[Record]) -> list[float]:
        """Data sets or categories count alike."""
        names = [record["dataset"] for record in records]
        sizes = {name: names.count(name) for name in set(names)}
        groups = [self.known[name].group for name in sizes]
        flat = self.aggregate == "flat"
        share = {
            name: 1 / len(sizes)
            if flat
            else 1 / len(set(groups)) / groups.count(self.known[name].group)
            for name in sizes
        }
        return [share[name] / sizes[name] for name in names]

    def summarise(self, records: Sequence[Record]) -> Record:
        """The value, what it is a mean of, both means, categories, data sets; all from 0 to 1."""
        scores = self.scores_by_set(records)
        groups: dict[str, list[float]] = {}
        for name, score in scores.items():
            groups.setdefault(self.known[name].group, []).append(score)
        by_group = {name: float(np.mean(values)) for name, values in groups.items()}
        means = {
            "flat": float(np.mean(list(scores.values()))),
            "category_macro": float(np.mean(list(by_group.values()))),
        }
        return {
            "value": means[self.aggregate],
            **counts(records),
            "aggregate": f"{self.aggregate}({','.join(scores)})",
            **means,
            **{f"category:{name}": mean for name, mean in by_group.items()},
            **scores,
        }

    def aggregates(self, cells: Sequence[Record], records: Sequence[Record]) -> Record:
        """The paper's table at the longest length, in percent: categories, data sets, means.

        None where a method was not asked what another one was.
        """
        longest = max(cell["length"] for cell in cells)
        own = [cell for cell in cells if cell["length"] == longest]
        names = [name for name in self.known if any(name in cell for cell in own)]
        groups = dict.fromkeys(f"category:{self.known[name].group}" for name in names)

        def percent(score: float | None) -> float | None:
            return None if score is None else round(100 * score, 2)

        shown = [*groups, *names, "flat", "category_macro"]
        return {
            cell["method"]: {"length": longest, **{key: percent(cell.get(key)) for key in shown}}
            for cell in own
        }

    def flavours(self, records: Sequence[Record], names: Sequence[str]) -> Record:
        """Means of other scores than the shown one: of every data set, and over these."""
        found = {}
        for name in names:
            values = [{**record, "correct": record["scores"][name]} for record in records]
            by_set = self.scores_by_set(values)
            found[f"all:{name}"] = float(np.mean(list(by_set.values())))
            found |= {f"{data}:{name}": mean for data, mean in by_set.items()}
        return found

    def scores_by_set(self, records: Sequence[Record]) -> dict[str, float]:
        """Mean score of each data set."""
        found: dict[str, list[float]] = {}
        for record in records:
            found.setdefault(record["dataset"], []).append(record["correct"])
        return {name: float(np.mean(found[name])) for name in self.known if name in found}


@dataclasses.dataclass(frozen=True)
class AnswerBenchmark(FileBenchmark, GenerationTask):
    """Answers that each data set judges by its own rules."""

    max_new_tokens: int | None = None  # null: the official number of each data set
    budget_rule: str = "total"  # total: everything counts; official: the template and answer do not

    @property
    def shown(self) -> str:
        return "score"

    def rules(self, data: DataSet) -> DataSet:
        """A data set as the settings of the task judge it."""
        return data

    def check(self, limits: Limits, key: str) -> None:
        super().check(limits, key)
        one_of(f"{key}.budget_rule", self.budget_rule, BUDGETS)

    def budget(self, length: int, new_tokens: int) -> Budget:
        total = self.budget_rule == "total"
        return Budget(length, new_tokens, template=total, new=total)

    def asked(self, example: Example, data: DataSet, tokenizer, length: int) -> Example:
        example = super().asked(example, data, tokenizer, length)
        return dataclasses.replace(
            example,
            facts={"protocol": f"{self.label}_{self.budget_rule}", **example.facts},
            max_new_tokens=self.max_new_tokens or data.new_tokens,
            stop=data.stop,
            template=None if data.chat else "none",
        )

    def told(self, example: Example, line: str, tokenizer, length: int) -> Example:
        """`example`, with `line` before its question where the end of its text will be cut."""
        prompt = Layout(tokenizer, example.template or self.template).prompt(example.segments)
        *before, last = example.segments
        if self.budget(length, example.max_new_tokens).left(prompt) >= 0 or last.kind != "question":
            return example
        text = line.rstrip() + "\n\n" + last.text.lstrip()
        return dataclasses.replace(example, segments=[*before, Segment("question", text)])

    def judge(self, answer: str, unit: Unit, tokenizer) -> dict[str, float]:
        return self.rules(self.known[unit.facts["dataset"]]).judged(answer, unit.facts)


@dataclasses.dataclass(frozen=True)
class TextCutBenchmark(AnswerBenchmark):
    """Prompts that lose their middle, by the official rule or by the library's own.

    `budget_rule=official`: the whole prompt, of which `reserve` tokens of the length are left for
    the rest, is cut as text and tokenised again; a chat template and the answer come on top.
    `budget_rule=total`: everything counts, and only the document is cut.
    """

    cut: ClassVar[str] = "middle"

    # official: the prompt is cut as text, template and answer come on top; total: everything counts
    budget_rule: str = "official"
    reserve: int = 0  # tokens of the length that prompts leave free, with the official budget

    def check(self, limits: Limits, key: str) -> None:
        super().check(limits, key)
        whole_numbers(key, self, 0, "reserve")
        if self.budget_rule == "official" and limits.lengths[0] <= self.reserve:
            raise InputError(
                f"lengths: {limits.lengths[0]} leaves no room beside {key}.reserve={self.reserve};"
                " use longer ones, or lower it"
            )

    def asked(self, example: Example, data: DataSet, tokenizer, length: int) -> Example:
        example = super().asked(example, data, tokenizer, length)
        if self.budget_rule == "total":
            return example
        segments, lost = cut_segments(tokenizer, example.segments, length - self.reserve)
        facts = {**example.facts, "cut_tokens": lost}
        return dataclasses.replace(example, segments=segments, facts=facts)


def cut_segments(
    tokenizer: Any, segments: Sequence[Segment], length: int
) -> tuple[list[Segment], int]:
    """`cut_text` of the whole prompt, its roles by where they stood in it; and the lost tokens."""
    whole = "".join(segment.text for segment in segments)
    text, lost = cut_text(tokenizer, whole, length)
    if not lost:
        return list(segments), 0
    documents = [i for i, segment in enumerate(segments) if segment.kind == "context_doc"]
    if not documents:
        return [Segment("question", text)], lost
    head = len("".join(segment.text for segment in segments[: documents[0]]))
    tail = len("".join(segment.text for segment in segments[documents[-1] + 1 :]))
    middle = max(len(text) - tail, min(head, len(text)))
    parts = {
        "instruction": text[:head],
        "context_doc": text[head:middle],
        "question": text[middle:],
    }
    return [Segment(kind, part) for kind, part in parts.items() if part], lost
