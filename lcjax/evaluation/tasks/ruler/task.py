"""RULER as a task of a run: which generators, how many questions, one score over all."""

import collections
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from lcjax.errors import InputError, one_of, whole_numbers
from lcjax.evaluation import metrics
from lcjax.evaluation.corpus import Corpus
from lcjax.evaluation.generation import Example, GenerationTask, counts
from lcjax.evaluation.prompt import Budget, Layout
from lcjax.evaluation.report import plots
from lcjax.evaluation.task import Limits, Metric, Record, Task, Unit
from lcjax.evaluation.tasks.ruler.aggregation import CommonWords, FrequentWords
from lcjax.evaluation.tasks.ruler.niah import KINDS, Needles
from lcjax.evaluation.tasks.ruler.qa import Passages, read
from lcjax.evaluation.tasks.ruler.search import Maker, probe_seeds, sample
from lcjax.evaluation.tasks.ruler.summary import GROUPS, over_lengths, tidy
from lcjax.evaluation.tasks.ruler.tracing import Tracing
from lcjax.evaluation.tasks.ruler.wording import Wording, wording
from lcjax.evaluation.tasks.ruler.words import SPLITTER, Essays, Words, words

TASKS = (*KINDS, "vt", "cwe", "fwe", "qa_1", "qa_2")
_DATA = {"qa_1": "squad", "qa_2": "hotpotqa"}
_SHUFFLES = ("random", "fixed")


def _draws_words(name: str) -> bool:
    return name == "cwe" or (name in KINDS and KINDS[name].key == "words")


def _hides_in_essays(name: str) -> bool:
    return name in KINDS and KINDS[name].haystack == "essay"


@Task.register_subclass("ruler")
@dataclasses.dataclass(frozen=True)
class Ruler(GenerationTask):
    """The thirteen tasks of RULER (arXiv 2404.06654), generated to fill each length.

    A length counts everything, BOS too, which upstream leaves out. Essays come from the run's
    `data`, collapsed to single blanks, in the order of its files.
    """

    max_new_tokens: int | None = None  # null: 128 for needles, 30 vt, 120 cwe, 50 fwe, 32 qa
    tasks: tuple[str, ...] = ()  # such as niah_single_1, vt, cwe; empty: all thirteen
    samples: int = 100  # questions of each; the paper has 500
    # fixed: upstream's shuffles, the same for all samples; random: another one for each
    shuffles: str = "random"
    benchmark: str | None = None  # copy of NVIDIA/RULER with its wording; null: this library's own
    words: str | None = (
        None  # one word a line, or a folder with wonderwords' lists; null: installed
    )
    squad: str | None = None  # dev-v2.0.json, for qa_1
    hotpotqa: str | None = None  # hotpot_dev_distractor_v1.json, for qa_2

    @property
    def metric(self) -> Metric:
        return Metric("score", f"RULER, mean of {len(self.chosen)} tasks", False, 3)

    @property
    def shown(self) -> str:
        return "string_match"

    @property
    def chosen(self) -> tuple[str, ...]:
        return self.tasks or TASKS

    @property
    def needs_data(self) -> bool:
        return any(map(_hides_in_essays, self.chosen))

    def check(self, limits: Limits, key: str) -> None:
        super().check(limits, key)
        whole_numbers(key, self, 1, "samples")
        for name in self.chosen:
            if name not in TASKS:
                raise InputError(f"{key}.tasks: {name!r} is none of {', '.join(TASKS)}")
        if len(set(self.chosen)) < len(self.chosen):
            raise InputError(f"{key}.tasks={list(self.tasks)} names a task twice")
        one_of(f"{key}.shuffles", self.shuffles, _SHUFFLES)
        wording(self.benchmark, f"{key}.benchmark")
        if any(map(_draws_words, self.chosen)):
            words(self.words, f"{key}.words")
        for name in _DATA.keys() & set(self.chosen):
            read(getattr(self, _DATA[name]), _DATA[name], f"{key}.{_DATA[name]}")

    def examples(self, corpus: Corpus, length: int, limits: Limits) -> Iterator[Example]:
        source = corpus.once((self, limits), lambda: Generators(self, corpus, limits))
        for name in self.chosen:
            maker = source.maker(name, length)
            budget = source.budget(maker, length)
            seed = f"ruler {limits.seed} {name} {length}"
            units = maker.units(source.layout, budget, probe_seeds(f"{name} {length}"))
            for index in range(source.samples(maker)):
                own = f"{seed} {index}"
                found, used = sample(maker, source.layout, budget, own, units, index, name)
                facts = {
                    "protocol": "ruler",
                    "task": name,
                    "sample": index,
                    "units": used,
                    "shuffles": self.shuffles,
                    **source.facts(name),
                    **found.facts,
                }
                yield Example(found.segments, found.answers, facts, budget.new_tokens)

    def judge(self, answer: str, unit: Unit, tokenizer) -> dict[str, float]:
        text, references = tidy(answer), unit.facts["references"]
        flavours = {
            "all": metrics.string_match_all(text, references),
            "part": metrics.string_match_part(text, references),
        }
        own = "part" if unit.facts["task"] in _DATA else "all"
        return {"string_match": flavours[own], **flavours}

    def _by_task(self, records: Sequence[Record]) -> dict[str, float]:
        return {
            name: float(np.mean(own))
            for name in self.chosen
            if (own := [r["correct"] for r in records if r["task"] == name])
        }

    def summarise(self, records: Sequence[Record]) -> Record:
        """The plain mean of the tasks, each task's score, and those of the four groups of tasks."""
        scores = self._by_task(records)
        groups = {
            name: float(np.mean([scores[task] for task in tasks if task in scores]))
            for name, tasks in GROUPS.items()
            if any(task in scores for task in tasks)
        }
        value = float(np.mean(list(scores.values())))  # however many questions each has
        return {"value": value, **counts(records), **groups, **scores}

    def weights(self, records: Sequence[Record]) -> list[float]:
        """Tasks count alike."""
        sizes = collections.Counter(record["task"] for record in records)
        return [1 / sizes[record["task"]] for record in records]

    def aggregates(self, cells: Sequence[Record], records: Sequence[Record]) -> Record:
        return over_lengths(cells)

    def figures(
        self, cells: Sequence[Record], records: Sequence[Record], folder: Path
    ) -> list[Path]:
        """Also every task's score by length."""
        files = super().figures(cells, records, folder)
        if len(self.chosen) == 1:
            return files
        own = sorted(records, key=lambda record: self.chosen.index(record["task"]))
        path = folder / f"{self.label}_by_task.png"
        return [*files, plots.heat_maps(own, "RULER by task", path, by="task")]


class Generators:
    """Makers of one plan, which share words, essays and wording."""

    def __init__(self, task: Ruler, corpus: Corpus, limits: Limits):
        self._task, self._corpus, self._limits = task, corpus, limits
        self.layout: Layout = task.layout(corpus.tokenizer)
        self.wording: Wording = wording(task.benchmark, "benchmark")

    @functools.cached_property
    def _words(self) -> Words:
        return words(self._task.words, "words")

    @functools.cached_property
    def _essays(self) -> Essays:
        return Essays(self._corpus.texts(), self._corpus.tokenizer)

    def facts(self, name: str) -> Record:
        """For records: whose prompts and words a task has, and what ends its sentences."""
        found = {"wordlist": self._words.source} if _draws_words(name) else {}
        found |= {"splitter": SPLITTER} if _hides_in_essays(name) else {}
        return {**self.wording.facts, **found}

    def budget(self, maker: Maker, length: int) -> Budget:
        return self._task.budget(length, self._task.max_new_tokens or maker.new_tokens)

    def samples(self, maker: Maker) -> int:
        wanted = self._task.samples
        return min(wanted, len(maker.questions)) if isinstance(maker, Passages) else wanted

    def maker(self, name: str, length: int) -> Maker:
        fixed, tokenizer = self._task.shuffles == "fixed", self.layout.tokenizer
        if name in KINDS:
            kind = KINDS[name]
            vocabulary = self._words if kind.key == "words" else None
            essays = self._essays if kind.haystack == "essay" else None
            return Needles(kind, self.wording, vocabulary, essays, tokenizer, fixed)
        if name == "vt":
            return Tracing(self.wording, tokenizer, self._limits.seed)
        if name == "cwe":
            return CommonWords(self.wording, self._words, tokenizer, fixed, length)
        if name == "fwe":
            budget = self.budget(FrequentWords, length)
            return FrequentWords(self.wording, tokenizer, fixed, budget, self.layout)
        path = getattr(self._task, _DATA[name])
        found = self._corpus.once((Passages, path), lambda: read(path, _DATA[name], _DATA[name]))
        return Passages(self.wording, *found, tokenizer, fixed)
