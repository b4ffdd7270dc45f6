"""Base classes of benchmarks that consist of several data sets in official files."""

import abc
import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np

from lcjax.errors import InputError, NonNegativeInt, OneOf, PositiveInt, check_one_of
from lcjax.evaluation.corpus import TokenizedCorpus
from lcjax.evaluation.metrics import qa
from lcjax.evaluation.prompt import Budget, PromptEncoder, Segment, cut_text, document_segments
from lcjax.evaluation.prompt_task import Example, GenerationTask, PromptTask, counts
from lcjax.evaluation.statistics import at_longest, group_by
from lcjax.evaluation.task import Limits, Metric, Record, Records, Unit, mean_by
from lcjax.evaluation.tasks.local_files import find

Score = Callable[[str, Record], float]  # of an answer and the fields of its unit
AGGREGATES = ("flat", "category_macro")
BUDGETS = ("official", "total")


def best_of(metric: Callable[[str, str], float], *, strip: bool = False) -> Score:
    """Returns the score that is the maximum of `metric` over all references.

    With `strip` the answer is stripped first.
    """
    return lambda answer, fields: qa.best(
        metric, answer.strip() if strip else answer, fields["references"]
    )


@dataclasses.dataclass(frozen=True)
class DataSet:
    """One file of a benchmark: how answers are generated and scored."""

    name: str
    group: str  # category in the benchmark's own table
    new_tokens: int
    scores: Mapping[str, Score]  # tables show the first
    chat: bool = True  # whether a chat template may surround its prompts
    first_line: bool = False  # whether only the first line of an answer counts
    stop: tuple[str, ...] = ()

    def with_main_score(self, name: str) -> "DataSet":
        """Returns the data set with the score `name` first, which tables show."""
        return dataclasses.replace(self, scores={name: self.scores[name], **self.scores})

    def score(self, answer: str, fields: Record) -> dict[str, float]:
        """Returns all scores of an answer; `score` is the one that tables show."""
        text = qa.first_line(answer) if self.first_line else answer
        scores = {name: float(score(text, fields)) for name, score in self.scores.items()}
        return {"score": next(iter(scores.values())), **scores}


@dataclasses.dataclass(frozen=True)
class FileBenchmark(PromptTask):
    """Data sets in local files, and a mean over them.

    A subclass defines the names of the files (`files`) and their prompts (`read`).
    """

    scoring_settings: ClassVar[tuple[str, ...]] = ("aggregate",)
    table_settings: ClassVar[tuple[str, ...]] = ("tasks",)
    datasets: ClassVar[Mapping[str, DataSet]] = {}
    selections: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # further names in `tasks`
    title: ClassVar[str] = ""
    source: ClassVar[str] = ""  # of the files, for messages

    path: str = ""  # folder with the official files
    tasks: tuple[str, ...] = ()  # data sets, categories, or names of several; empty: all
    max_examples: PositiveInt | None = None  # per data set, the first ones unless drawn; null: all
    # Flat: mean over data sets; category_macro: over means of categories
    aggregate: Annotated[str, OneOf(AGGREGATES)] = "flat"

    @abc.abstractmethod
    def files(self, name: str) -> tuple[str, ...]:
        """Returns the names that the file of a data set may have in `path`."""

    @abc.abstractmethod
    def read(self, data: DataSet, path: Path, corpus: TokenizedCorpus) -> Iterator[Example]:
        """Yields the examples of a file, with prompts of full length."""

    @property
    def metric(self) -> Metric:
        names = self.averaged([data.name for data in self.selection()])
        rule = {"flat": f"mean of {len(names)}", "category_macro": "mean of category means"}
        text = names[0] if len(names) == 1 else rule[self.aggregate]
        return Metric("score", f"{self.title}, {text}", False, 4)

    def selection(self) -> list[DataSet]:
        """Returns the data sets of `tasks`, in the benchmark's order."""
        groups = self._groups()
        names = {n for name in self.tasks for n in groups.get(name, (name,))}
        return [data for name, data in self.datasets.items() if name in names or not self.tasks]

    def _groups(self) -> dict[str, Sequence[str]]:
        """Returns data sets by the names of categories and selections."""
        names = group_by(self.datasets, lambda name: self.datasets[name].group)
        return {**names, **self.selections}

    def check(self, limits: Limits, key: str) -> None:
        super().check(limits, key)
        names = dict.fromkeys([*self._groups(), *self.datasets])
        for name in self.tasks:
            check_one_of(f"{key}.tasks", name, names)
        for data in filter(self.has_file, self.selection()):
            find(self.path, self.files(data.name), key, self.source)

    def has_file(self, data: DataSet) -> bool:
        """Returns whether a data set is read from a file; False if it is generated."""
        return True

    def examples(self, corpus: TokenizedCorpus, length: int, limits: Limits) -> Iterator[Example]:
        for data in self.selection():
            yield from self.examples_of(data, corpus, length, limits)

    def examples_of(
        self, data: DataSet, corpus: TokenizedCorpus, length: int, limits: Limits
    ) -> Iterator[Example]:
        """Yields the examples of one data set, prepared for one length."""
        path, is_empty = find(self.path, self.files(data.name), self.label, self.source), True
        for example in itertools.islice(self.read(data, path, corpus), self.max_examples):
            is_empty = False
            yield self.prepare(example, data, corpus.tokenizer, length)
        if is_empty:
            raise InputError(f"{path} contains no valid row; use the official file")

    def prepare(self, example: Example, data: DataSet, tokenizer, length: int) -> Example:
        """Returns an example with the settings of its data set, for one length."""
        fields = {"dataset": data.name, **example.fields}
        new_tokens = example.max_new_tokens or data.new_tokens
        return dataclasses.replace(example, fields=fields, max_new_tokens=new_tokens)

    def averaged(self, names: Sequence[str]) -> list[str]:
        """Returns the data sets of `names` whose mean is the number of the task: all of them."""
        return list(names)

    def weights(self, records: Records) -> list[float]:
        """Returns weights that are equal for all averaged data sets, or for all categories."""
        sizes = collections.Counter(record["dataset"] for record in records)
        names = set(self.averaged(list(sizes)))
        groups = collections.Counter(self.datasets[name].group for name in names)

        def weight(name: str) -> float:
            if name not in names:
                return 0.0
            share = 1 / len(names)
            if self.aggregate != "flat":
                share = 1 / len(groups) / groups[self.datasets[name].group]
            return share / sizes[name]

        return [weight(record["dataset"]) for record in records]

    def summarise(self, records: Records) -> Record:
        """Returns the value, its rule, both means, and the mean of each category and data set."""
        scores = self.scores_by_set(records)
        groups = group_by(scores, lambda name: self.datasets[name].group)
        by_group = {g: float(np.mean([scores[n] for n in names])) for g, names in groups.items()}
        averaged = self.averaged(list(scores))
        averaged_groups = dict.fromkeys(self.datasets[name].group for name in averaged)
        means = {
            "flat": float(np.mean([scores[name] for name in averaged])),
            "category_macro": float(np.mean([by_group[name] for name in averaged_groups])),
        }
        return {
            "value": means[self.aggregate],
            **counts(records),
            "aggregate": f"{self.aggregate}({','.join(averaged)})",
            **means,
            **{f"category:{name}": mean for name, mean in by_group.items()},
            **scores,
        }

    def aggregates(self, cells: Records, records: Records) -> Record:
        """Returns the paper's table at the longest length in percent: categories, data sets, means.

        A number is None if the cell of a method lacks it.
        """
        cells = at_longest(cells)
        names = [name for name in self.datasets if any(name in cell for cell in cells)]
        groups = dict.fromkeys(f"category:{self.datasets[name].group}" for name in names)

        def percent(score: float | None) -> float | None:
            return None if score is None else round(100 * score, 2)

        keys = [*groups, *names, "flat", "category_macro"]
        return {
            cell["method"]: {
                "length": cell["length"],
                **{key: percent(cell.get(key)) for key in keys},
            }
            for cell in cells
        }

    def further_means(self, records: Records, names: Sequence[str]) -> Record:
        """Returns means of scores that tables do not show: per data set, and over data sets."""
        means = {}
        for name in names:
            values = [{**record, "correct": record["scores"][name]} for record in records]
            by_set = self.scores_by_set(values)
            averaged = [by_set[data] for data in self.averaged(list(by_set))]
            means[f"all:{name}"] = float(np.mean(averaged))
            means |= {f"{data}:{name}": mean for data, mean in by_set.items()}
        return means

    def scores_by_set(self, records: Records) -> dict[str, float]:
        """Returns the mean score of each data set."""
        means = mean_by(records, "dataset")
        return {name: means[name] for name in self.datasets if name in means}


@dataclasses.dataclass(frozen=True)
class AnswerBenchmark(FileBenchmark, GenerationTask):
    """Generated answers, scored by the rules of each data set."""

    main_score: ClassVar[str] = "score"

    max_new_tokens: int | None = None  # null: the official number of each data set

    def scoring(self, data: DataSet) -> DataSet:
        """Returns the data set with the scores that the settings of the task select."""
        return data

    def prepare(self, example: Example, data: DataSet, tokenizer, length: int) -> Example:
        example = super().prepare(example, data, tokenizer, length)
        example = dataclasses.replace(
            example,
            max_new_tokens=self.max_new_tokens or data.new_tokens,
            stop=data.stop,
            template=None if data.chat else "none",
        )
        return self._mark_cut(example, tokenizer, length) if example.cut_mark else example

    def _mark_cut(self, example: Example, tokenizer, length: int) -> Example:
        """Inserts the mark of an example before its question if the text's end will be cut."""
        prompt = PromptEncoder(tokenizer, example.template or self.template).prompt(
            example.segments
        )
        *before, last = example.segments
        if self.budget(length, example.max_new_tokens).left(prompt) >= 0 or last.kind != "question":
            return example
        text = example.cut_mark.rstrip() + "\n\n" + last.text.lstrip()
        return dataclasses.replace(example, segments=[*before, Segment("question", text)])

    def score_answer(self, answer: str, unit: Unit, tokenizer) -> dict[str, float]:
        return self.scoring(self.datasets[unit.fields["dataset"]]).score(answer, unit.fields)


@dataclasses.dataclass(frozen=True)
class TextCutBenchmark(AnswerBenchmark):
    """Prompts whose middle is cut, by the official rule or by the library's own.

    `budget_rule=official`: the whole prompt is cut as text to the length less `reserve` tokens, and
    tokenised again; a chat template and the answer are not counted.
    `budget_rule=total`: everything counts, and only the document is cut.
    """

    cut: ClassVar[str] = "middle"

    # official: the prompt is cut as text, template and answer come on top; total: everything counts
    budget_rule: Annotated[str, OneOf(BUDGETS)] = "official"
    # Tokens of the length that prompts leave unused, with the official budget
    reserve: NonNegativeInt = 0

    def check(self, limits: Limits, key: str) -> None:
        super().check(limits, key)
        if self.budget_rule == "official" and self.cut_length(limits.lengths[0]) <= 0:
            raise InputError(
                f"lengths: {limits.lengths[0]} leaves no room for prompts with"
                f" {key}.reserve={self.reserve}; use longer ones, or a smaller reserve"
            )

    def cut_length(self, length: int) -> int:
        """Returns the number of tokens to which prompts are cut, with the official budget."""
        return length - self.reserve

    def budget(self, length: int, new_tokens: int) -> Budget:
        return Budget(length, new_tokens, prompt_only=self.budget_rule == "official")

    def prepare(self, example: Example, data: DataSet, tokenizer, length: int) -> Example:
        example = super().prepare(example, data, tokenizer, length)
        fields = {"protocol": f"{self.label}_{self.budget_rule}", **example.fields}
        if self.budget_rule == "total":
            return dataclasses.replace(example, fields=fields)
        segments, num_cut = cut_segments(tokenizer, example.segments, self.cut_length(length))
        fields["cut_tokens"] = num_cut
        return dataclasses.replace(example, segments=segments, fields=fields)


def cut_segments(
    tokenizer: Any, segments: Sequence[Segment], length: int
) -> tuple[list[Segment], int]:
    """Truncates the middle of a whole prompt as text (`cut_text`).

    Returns:
      The segments, split where the documents began and ended, and the number of removed tokens.
    """
    whole = "".join(segment.text for segment in segments)
    text, num_cut = cut_text(tokenizer, whole, length)
    if not num_cut:
        return list(segments), 0
    documents = [i for i, segment in enumerate(segments) if segment.kind == "context_doc"]
    if not documents:
        return [Segment("question", text)], num_cut
    head = len("".join(segment.text for segment in segments[: documents[0]]))
    tail = len("".join(segment.text for segment in segments[documents[-1] + 1 :]))
    middle = max(len(text) - tail, min(head, len(text)))
    return document_segments(text[:head], text[head:middle], text[middle:]), num_cut


def by_name(datasets: Sequence[DataSet]) -> dict[str, DataSet]:
    return {data.name: data for data in datasets}
