"""RULER (Hsieh et al. 2024, arXiv 2404.06654): thirteen generated tasks over one length."""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np

from lcjax.errors import InputError, OneOf, PositiveInt, check_one_of
from lcjax.evaluation import plots
from lcjax.evaluation.corpus import TokenizedCorpus
from lcjax.evaluation.metrics import qa
from lcjax.evaluation.prompt_task import Example, GenerationTask, counts
from lcjax.evaluation.statistics import group_by
from lcjax.evaluation.task import (
    Limits,
    Metric,
    Record,
    Records,
    Task,
    Unit,
    equal_weights,
    mean_by,
)
from lcjax.evaluation.tasks.ruler.generators import (
    NEEDLE_KINDS,
    CommonWords,
    FrequentWords,
    Generator,
    Needles,
    Passages,
    Sources,
    VariableTracking,
    probe_seeds,
)
from lcjax.evaluation.tasks.ruler.texts import (
    SPLITTER,
    Essays,
    RulerTemplates,
    WordList,
    read_questions,
    read_templates,
    read_words,
)

TASKS = (*NEEDLE_KINDS, "vt", "cwe", "fwe", "qa_1", "qa_2")
GROUPS = {
    "retrieval": tuple(NEEDLE_KINDS),
    "tracing": ("vt",),
    "aggregation": ("cwe", "fwe"),
    "questions": ("qa_1", "qa_2"),
}
THRESHOLD = 0.856  # Llama-2-7B-chat at 4,096 tokens (RULER, sec. 4)
_DATA = {"qa_1": "squad", "qa_2": "hotpotqa"}
_SHUFFLES = ("random", "fixed")


def _needs_words(name: str) -> bool:
    return name == "cwe" or (name in NEEDLE_KINDS and NEEDLE_KINDS[name].key == "words")


def _needs_essays(name: str) -> bool:
    return name in NEEDLE_KINDS and NEEDLE_KINDS[name].haystack == "essay"


@Task.register_subclass("ruler")
@dataclasses.dataclass(frozen=True)
class Ruler(GenerationTask):
    """The thirteen tasks of RULER (arXiv 2404.06654), generated to fill each length.

    A length counts everything, also BOS, which upstream does not count. Essays are the run's
    `data` in the order of its files, with runs of whitespace collapsed to single blanks.
    """

    main_score: ClassVar[str] = "string_match"
    table_settings: ClassVar[tuple[str, ...]] = ("tasks",)

    max_new_tokens: int | None = None  # null: 128 for needles, 30 vt, 120 cwe, 50 fwe, 32 qa
    tasks: tuple[str, ...] = ()  # such as niah_single_1, vt, cwe; empty: all thirteen
    samples: PositiveInt = 100  # questions of each task; the paper has 500
    # fixed: upstream's shuffles, the same for all samples; random: another one for each
    shuffles: Annotated[str, OneOf(_SHUFFLES)] = "random"
    benchmark: str | None = None  # copy of NVIDIA/RULER with its wording; null: this library's own
    # One word a line, or a folder with wonderwords' lists; null: installed
    words: str | None = None
    squad: str | None = None  # dev-v2.0.json, for qa_1
    hotpotqa: str | None = None  # hotpot_dev_distractor_v1.json, for qa_2

    @property
    def metric(self) -> Metric:
        return Metric("score", f"RULER, mean of {len(self.task_names)} tasks", False, 3)

    @property
    def task_names(self) -> tuple[str, ...]:
        return self.tasks or TASKS

    @property
    def needs_data(self) -> bool:
        return any(map(_needs_essays, self.task_names))

    def check(self, limits: Limits, key: str) -> None:
        super().check(limits, key)
        for name in self.task_names:
            check_one_of(f"{key}.tasks", name, TASKS)
        if len(set(self.task_names)) < len(self.task_names):
            raise InputError(f"{key}.tasks={list(self.tasks)} names a task twice")
        read_templates(self.benchmark, f"{key}.benchmark")
        if any(map(_needs_words, self.task_names)):
            read_words(self.words, f"{key}.words")
        for name in _DATA.keys() & set(self.task_names):
            read_questions(getattr(self, _DATA[name]), _DATA[name], f"{key}.{_DATA[name]}")

    def examples(self, corpus: TokenizedCorpus, length: int, limits: Limits) -> Iterator[Example]:
        prompt_encoder = self.prompt_encoder(corpus.tokenizer)
        for name in self.task_names:
            generator = self.generator(name, corpus, length, limits)
            budget = self.budget(length, self.max_new_tokens or generator.new_tokens)
            units = generator.num_units(prompt_encoder, budget, probe_seeds(f"{name} {length}"))
            for index in range(min(self.samples, generator.num_questions or self.samples)):
                seed = f"ruler {limits.seed} {name} {length} {index}"
                example, num_units = generator.sample(
                    prompt_encoder, budget, seed, units, index, name
                )
                fields = {
                    "protocol": "ruler",
                    "task": name,
                    "sample": index,
                    "units": num_units,
                    "shuffles": self.shuffles,
                    **self._source_fields(name, corpus),
                    **example.fields,
                }
                yield dataclasses.replace(example, fields=fields, max_new_tokens=budget.new_tokens)

    def generator(
        self, name: str, corpus: TokenizedCorpus, length: int, limits: Limits
    ) -> Generator:
        """Returns the generator of a task; texts of the corpus and of files are read once."""
        tokenizer, field = corpus.tokenizer, _DATA.get(name)
        sources = Sources(self._wording(corpus), tokenizer, self.shuffles == "fixed")
        if _needs_words(name):
            sources.words = self._words(corpus)
        if _needs_essays(name):
            sources.essays = corpus.once("essays", lambda: Essays(corpus.texts(), tokenizer))
        if field is not None:
            path = getattr(self, field)
            sources.questions, sources.documents = corpus.once(
                (field, path), lambda: read_questions(path, field, field)
            )
            return Passages(sources)
        if name == "vt":
            return VariableTracking(sources, limits.seed)
        if name == "cwe":
            return CommonWords(sources, length)
        if name == "fwe":
            budget = self.budget(length, self.max_new_tokens or FrequentWords.new_tokens)
            return FrequentWords(sources, budget, self.prompt_encoder(tokenizer))
        return Needles(sources, NEEDLE_KINDS[name])

    def _wording(self, corpus: TokenizedCorpus) -> RulerTemplates:
        key = "benchmark"
        return corpus.once((key, self.benchmark), lambda: read_templates(self.benchmark, key))

    def _words(self, corpus: TokenizedCorpus) -> WordList:
        return corpus.once(("words", self.words), lambda: read_words(self.words, "words"))

    def _source_fields(self, name: str, corpus: TokenizedCorpus) -> Record:
        """Returns the fields of records about the sources of a task's texts."""
        words = {"wordlist": self._words(corpus).source} if _needs_words(name) else {}
        essays = {"splitter": SPLITTER} if _needs_essays(name) else {}
        return {**self._wording(corpus).fields, **words, **essays}

    def score_answer(self, answer: str, unit: Unit, tokenizer) -> dict[str, float]:
        text, references = clean_answer(answer), unit.fields["references"]
        scores = {
            "all": qa.string_match_all(text, references),
            "part": qa.string_match_part(text, references),
        }
        rule = "part" if unit.fields["task"] in _DATA else "all"
        return {"string_match": scores[rule], **scores}

    def summarise(self, records: Records) -> Record:
        """Returns the plain mean over tasks, and the scores of each task and group of tasks."""
        means = mean_by(records, "task")
        scores = {name: means[name] for name in self.task_names if name in means}
        groups = {
            name: float(np.mean([scores[task] for task in tasks if task in scores]))
            for name, tasks in GROUPS.items()
            if any(task in scores for task in tasks)
        }
        value = float(np.mean(list(scores.values())))  # not weighted by numbers of questions
        return {"value": value, **counts(records), **groups, **scores}

    def weights(self, records: Records) -> list[float]:
        """Returns weights that are equal for all tasks."""
        return equal_weights(records, "task")

    def aggregates(self, cells: Records, records: Records) -> Record:
        """Returns by method the plain and weighted means over lengths, and the effective length.

        The effective length is the longest with a score of at least 0.856; 0 if there is none.
        """
        aggregates = {}
        for method, group in group_by(cells, "method").items():
            group = sorted(group, key=lambda cell: cell["length"])
            scores = np.array([cell["value"] for cell in group])
            weights = np.arange(1, len(group) + 1)
            lengths = [cell["length"] for cell in group if cell["value"] >= THRESHOLD]
            aggregates[method] = {
                "mean": round(float(scores.mean()), 4),
                "weighted_increasing": round(float(np.average(scores, weights=weights)), 4),
                "weighted_decreasing": round(float(np.average(scores, weights=weights[::-1])), 4),
                "effective_length": max(lengths, default=0),
            }
        return aggregates

    def figures(self, cells: Records, records: Records, folder: Path) -> list[Path]:
        """Draws the number by length, and every task's score by length."""
        files = super().figures(cells, records, folder)
        if len(self.task_names) == 1:
            return files
        records = sorted(records, key=lambda record: self.task_names.index(record["task"]))
        path = folder / f"{self.label}_by_task.png"
        return [*files, plots.heat_maps(records, "RULER by task", path, by="task")]


def clean_answer(answer: str) -> str:
    """Returns the answer as upstream scores it: stripped, control characters as newlines."""
    return re.sub(r"[\x00-\x1f]", "\n", answer.strip()).strip()
