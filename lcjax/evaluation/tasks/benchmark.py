"""Benchmarks of several data sets in official files: LongBench, InfiniteBench, ZeroSCROLLS."""

import abc
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lcjax.errors import InputError, one_of, whole_numbers
from lcjax.evaluation.corpus import Corpus
from lcjax.evaluation.generation import Example, GenerationTask
from lcjax.evaluation.metrics import first_line
from lcjax.evaluation.prompt import TEMPLATES, Budget, Layout, Segment, cut_text
from lcjax.evaluation.statistics import bootstrap
from lcjax.evaluation.task import Limits, Metric, Record, Unit
from lcjax.evaluation.tasks.local_files import find

# Of an answer, and the facts of its unit, which hold the references.
Score = Callable[[str, Record], float]
AGGREGATES = ("flat", "category_macro")
BUDGETS = ("official", "total")


@dataclasses.dataclass(frozen=True)
class DataSet:
    """One file of a benchmark: what is generated for it, and how that is scored."""

    name: str
    group: str  # category, as the benchmark's own table has it
    new_tokens: int
    scores: Mapping[str, Score]  # the first is the official one
    chat: bool = True  # whether a chat template may go around its prompts
    first_line: bool = False  # whether only the first line of an answer counts
    stop: tuple[str, ...] = ()

    def judged(self, answer: str, facts: Record) -> dict[str, float]:
        text = first_line(answer) if self.first_line else answer
        return {name: float(score(text, facts)) for name, score in self.scores.items()}


@dataclasses.dataclass(frozen=True)
class FileBenchmark(GenerationTask):
    """Prompts from local files, cut by the official rule or by the library's own.

    `budget=official`: the whole prompt, of which `reserve` tokens of the length are left for the
    rest, loses its middle as text and is tokenised again; a chat template and the answer come on
    top. `budget=total`: everything counts, and only the document is cut.
    """

    known: ClassVar[Mapping[str, DataSet]] = {}
    sets: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # names for several data sets
    title: ClassVar[str] = ""
    source: ClassVar[str] = ""  # where the files come from
    cut: ClassVar[str] = "middle"

    path: str = ""  # folder with the official files
    tasks: tuple[str, ...] = ()  # data sets, or names of several; empty: all
    max_examples: int | None = None  # of every data set, the first ones; null: all
    max_new_tokens: int | None = None  # null: the official number of each data set
    budget_rule: str = "official"
    reserve: int = 0  # tokens of the length that prompts leave free, with the official budget
    aggregate: str = "flat"  # flat: mean over data sets; category_macro: over means of categories

    @abc.abstractmethod
    def files(self, name: str) -> tuple[str, ...]:
        """Names under which the file of a data set may stand in `path`."""

    @abc.abstractmethod
    def read(self, data: DataSet, path: Path) -> Iterator[Example]:
        """Examples of a file, with prompts of full length."""

    @property
    def label(self) -> str:
        return self.name or self.title.lower()

    @property
    def shown(self) -> str:
        return "score"

    @property
    def metric(self) -> Metric:
        count = len(self.chosen())
        rule = {"flat": f"mean of {count}", "category_macro": "mean of category means"}
        what = self.chosen()[0].name if count == 1 else rule[self.aggregate]
        return Metric("score", f"{self.title}, {what}", False, 4)

    def chosen(self) -> list[DataSet]:
        """The data sets of `tasks`, in the benchmark's order."""
        wanted = {n for name in self.tasks for n in self.sets.get(name, (name,))}
        return [data for name, data in self.known.items() if name in wanted or not self.tasks]

    def check(self, limits: Limits, key: str) -> None:
        for field, known in (
            ("template", TEMPLATES), ("budget_rule", BUDGETS), ("aggregate", AGGREGATES)
        ):  # fmt: skip
            one_of(f"{key}.{field}", getattr(self, field), known)
        unknown = [name for name in self.tasks if name not in self.known and name not in self.sets]
        if unknown:
            known = ", ".join([*self.sets, *self.known])
            raise InputError(f"{key}.tasks: {unknown[0]} is none of {known}")
        whole_numbers(key, self, 1, "max_examples", "max_new_tokens")
        whole_numbers(key, self, 0, "reserve")
        if self.budget_rule == "official" and limits.lengths[0] <= self.reserve:
            raise InputError(
                f"lengths: {limits.lengths[0]} leaves no room beside {key}.reserve={self.reserve};"
                " use longer ones, or lower it"
            )
        for data in self.chosen():
            find(self.path, self.files(data.name), key, self.source)

    def budget(self, length: int, new_tokens: int) -> Budget:
        total = self.budget_rule == "total"
        return Budget(length, new_tokens, template=total, new=total)

    def plan(self, corpus: Corpus, length: int, limits: Limits) -> list[Unit]:
        layouts = {kind: Layout(corpus.tokenizer, kind) for kind in TEMPLATES}
        units: list[Unit] = []
        for example in self.examples(corpus, length, limits):
            data = self.known[example.facts["dataset"]]
            layout = layouts[self.template if data.chat else "none"]
            units.append(self._unit(len(units), example, layout, length))
        return units

    def examples(self, corpus: Corpus, length: int, limits: Limits) -> Iterator[Example]:
        for data in self.chosen():
            path = find(self.path, self.files(data.name), self.label, self.source)
            count = 0
            for example in itertools.islice(self.read(data, path), self.max_examples):
                count += 1
                yield self._fitted(example, data, corpus.tokenizer, length)
            if not count:
                raise InputError(f"{path} has no line that fits; it is not the official file")

    def _fitted(self, example: Example, data: DataSet, tokenizer, length: int) -> Example:
        segments, lost = list(example.segments), 0
        if self.budget_rule == "official":
            segments, lost = self.cut_official(tokenizer, segments, length - self.reserve)
        facts = {"dataset": data.name, "protocol": f"{self.label}_{self.budget_rule}"}
        return dataclasses.replace(
            example,
            segments=segments,
            facts={**facts, "cut_tokens": lost, **example.facts},
            max_new_tokens=self.max_new_tokens or data.new_tokens,
            stop=data.stop,
        )

    def cut_official(
        self, tokenizer, segments: Sequence[Segment], length: int
    ) -> tuple[list[Segment], int]:
        """A prompt cut as the official script does, and the tokens that it lost."""
        return cut_segments(tokenizer, segments, length)

    def judge(self, answer: str, unit: Unit, tokenizer) -> dict[str, float]:
        return self.judged(answer, unit.facts)

    def judged(self, answer: str, facts: Record) -> dict[str, float]:
        """All flavours of one answer, the one that tables show first as `score`."""
        scores = self.known[facts["dataset"]].judged(answer, facts)
        return {"score": next(iter(scores.values())), **scores}

    def value(self, records: Sequence[Record]) -> float:
        weights = self._weights(records)
        return float(np.dot(weights, [record["correct"] for record in records]))

    def interval(self, records: Sequence[Record]) -> tuple[float, float]:
        """Bootstrap of the value; where all examples count alike, of their mean or share."""
        weights = self._weights(records)
        if np.allclose(weights, weights[0]):
            return super().interval(records)
        return bootstrap([record["correct"] for record in records], weights=weights)

    def _weights(self, records: Sequence[Record]) -> np.ndarray:
        """What share each record has in the value: data sets or categories count alike."""
        names = [record["dataset"] for record in records]
        counts = {name: names.count(name) for name in set(names)}
        groups = [self.known[name].group for name in counts]
        flat = self.aggregate == "flat"
        share = {
            name: 1 / len(counts)
            if flat
            else 1 / len(set(groups)) / groups.count(self.known[name].group)
            for name in counts
        }
        return np.asarray([share[name] / counts[name] for name in names])

    def summarise(self, records: Sequence[Record]) -> Record:
        """The value, what it is a mean of, both means, categories, data sets; all from 0 to 1."""
        scores = self.scores_by_set(records)
        groups: dict[str, list[float]] = {}
        for name, score in scores.items():
            groups.setdefault(self.known[name].group, []).append(score)
        means = {name: float(np.mean(values)) for name, values in groups.items()}
        return {
            "value": self.value(records),
            "windows": len(records),
            "empty": sum(not record["answer"].strip() for record in records),
            "truncated": sum(bool(r["cut_tokens"] or r["truncated"]) for r in records),
            "aggregate": f"{self.aggregate}({','.join(scores)})",
            "flat": float(np.mean(list(scores.values()))),
            "category_macro": float(np.mean(list(means.values()))),
            **{f"category:{name}": mean for name, mean in means.items()},
            **scores,
        }

    def aggregates(self, cells: Sequence[Record], records: Sequence[Record]) -> Record:
        """The paper's table at the longest length, in percent: categories, data sets, means."""
        longest = max(cell["length"] for cell in cells)
        names = [name for name in self.known if name in cells[0]]
        groups = dict.fromkeys(f"category:{self.known[name].group}" for name in names)
        shown = [*groups, *names, "flat", "category_macro"]
        return {
            cell["method"]: {"length": longest} | {key: round(100 * cell[key], 2) for key in shown}
            for cell in cells
            if cell["length"] == longest
        }

    def scores_by_set(self, records: Sequence[Record]) -> dict[str, float]:
        """Mean score of each data set."""
        found: dict[str, list[float]] = {}
        for record in records:
            found.setdefault(record["dataset"], []).append(record["correct"])
        return {name: float(np.mean(found[name])) for name in self.known if name in found}


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
