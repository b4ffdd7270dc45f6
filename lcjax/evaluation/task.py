"""The interface of a benchmark: it plans units, scores them, and summarises the scores."""

import abc
import collections
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import draccus
import numpy as np

from lcjax.errors import check_fields
from lcjax.evaluation import plots
from lcjax.evaluation.corpus import TokenizedCorpus
from lcjax.evaluation.prompt import Prompt
from lcjax.evaluation.statistics import Record, Records, bootstrap, group_by, wilson


@dataclasses.dataclass(frozen=True)
class Limits:
    """The settings of a run that planning depends on."""

    lengths: tuple[int, ...]
    stride: int = 256
    max_documents: int | None = None
    max_windows: int | None = None
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Unit:
    """One example to score: its tokens, and the fields of its record.

    Units with equal `shape` run in one compiled function. `digest` is a hash of the tokens, so that
    a run is not continued on other data.
    """

    index: int
    shape: tuple
    tokens: np.ndarray  # int32 [n]
    fields: Record
    prompt: Prompt | None = None
    # Of a document of lm-evaluation-harness, each with its repetitions
    requests: tuple[tuple[Any, ...], ...] = ()

    @property
    def digest(self) -> str:
        return hashlib.sha256(np.ascontiguousarray(self.tokens, np.int32)).hexdigest()[:12]


@dataclasses.dataclass(frozen=True)
class Metric:
    """Name and format of the number that a task reports."""

    name: str
    title: str
    lower_is_better: bool
    decimals: int
    example_unit: str = ""  # of `Task.example`, if it differs from that of the number

    @property
    def heading(self) -> str:
        """The title with its first letter capitalized."""
        return self.title[0].upper() + self.title[1:]


@dataclasses.dataclass(frozen=True)
class Task(draccus.ChoiceRegistry, abc.ABC):
    """A benchmark. Units do not depend on the method, so all methods have the same examples."""

    # Whether units are prompts with individual lengths instead of windows of text. `score` then
    # fills a KV cache, to generate or to score several continuations.
    generates: ClassVar[bool] = False
    ranks_options: ClassVar[bool] = False  # scores several continuations of one prompt
    needs_data: ClassVar[bool] = True  # whether `plan` reads the corpus, not only its tokenizer
    # Settings that affect only the scores of answers; `eval.py score` may change only these.
    scoring_settings: ClassVar[tuple[str, ...]] = ()
    # Settings that affect prompts and scores. `score` may not change them, and `compare` separates
    # tasks that differ in them.
    table_settings: ClassVar[tuple[str, ...]] = ()

    name: str = ""  # name of the task's files; empty: derived from the settings
    corpus: str = ""  # path of the task's own text, read with the settings of `data`; empty: `data`
    lengths: tuple[int, ...] = ()  # context lengths of this task; empty: those of the run

    @property
    def label(self) -> str:
        """The name of the task, unique within a run; by default the name of its type."""
        return self.name or self.get_choice_name(type(self))

    @property
    @abc.abstractmethod
    def metric(self) -> Metric:
        """Name and format of the number that tables show."""

    @property
    def heading(self) -> str:
        """The title of the metric after the name of the task, if it has one."""
        return f"{self.name}: {self.metric.title}" if self.name else self.metric.heading

    def check(self, limits: Limits, key: str) -> None:
        """Raises InputError for invalid settings, before a model is loaded.

        `key` is the place of the task in the config, such as `tasks.0`, for messages.
        """
        check_fields(key, self)

    @abc.abstractmethod
    def plan(self, corpus: TokenizedCorpus, length: int, limits: Limits) -> list[Unit]:
        """Returns the units of one length; an empty list if the data has no text of that length."""

    def check_model(self, model, units: Sequence[Unit]) -> None:
        """Raises InputError if `model` cannot score some of `units`."""

    def prompts(self, unit: Unit) -> Sequence[Sequence[int] | np.ndarray]:
        """Returns the prompts of `unit`; a prefix shared with other units may be read once."""
        return ()

    @abc.abstractmethod
    def score(self, model, units: Sequence[Unit], batch: int) -> list[Record]:
        """Returns one record per unit, for units of one shape, in order.

        A record may set `read`, the number of tokens read; the default is the size of the unit.
        """

    def scorer(self, model, batch: int) -> Callable[[Sequence[Unit]], list[Record]]:
        """Returns `score` for one model; tasks override it to share results between batches."""
        return functools.partial(self.score, model, batch=batch)

    @abc.abstractmethod
    def summarise(self, records: Records) -> Record:
        """Returns `value` and further numbers from all records of one method at one length."""

    def example(self, record: Record) -> float | None:
        """Returns the value of one record; the mean of these values is the task's number.

        Intervals and paired differences use it. It is None if the record has no value, for example
        if its loss is NaN.
        """
        correct = record.get("correct")
        return None if correct is None else float(correct)

    def values(self, records: Records) -> list[float | None]:
        """Returns the values of records whose weighted mean is the task's number for the records.

        Tasks whose number is not a mean of `example` override it with the contribution of each
        record to the number.
        """
        return [self.example(record) for record in records]

    def weights(self, records: Records) -> list[float]:
        """Returns the weight of each record in the task's number, up to a common factor."""
        return [record.get("weight", 1.0) for record in records]

    def cluster(self, record: Record) -> object:
        """Returns the cluster of a record; records of one cluster (a document) are dependent."""
        return record.get("document", ("window", record["window"]))

    def part(self, record: Record) -> str:
        """Returns the part of the task that a record belongs to, for differences by part."""
        return ""

    def interval(self, records: Records) -> tuple[float, float]:
        """Returns the 95 % interval of `value`, or NaN.

        It is Wilson's interval if the values are independent 0s and 1s of equal weight, else a
        bootstrap over weighted clusters.
        """
        records = [record for record in records if self.example(record) is not None]
        values, weights = self.values(records), self.weights(records)
        clusters = [self.cluster(record) for record in records]
        is_share = set(values) <= {0.0, 1.0} and np.allclose(weights, weights[:1])
        if is_share and len(set(clusters)) == len(clusters):
            return wilson(int(sum(values)), len(values))
        return bootstrap(values, weights=weights, clusters=clusters)

    def references(self, record: Record) -> list[str]:
        """Returns the reference answers of a record or of the fields of a unit."""
        return [str(item) for item in record.get("references", ())]

    def rescore(self, record: Record, tokenizer) -> Record:
        """Scores the answer of a record again with these settings, without a model."""
        return record

    def overall(self, cells: Records) -> float | None:
        """Returns one number of a method from its cells: by default that of the longest length."""
        return max(cells, key=lambda cell: cell["length"])["value"]

    def aggregates(self, cells: Records, records: Records) -> Record:
        """Returns numbers over all lengths, by method."""
        return {}

    def tables(self, records: Records) -> dict[str, Records]:
        """Returns the rows of further CSV tables, by the end of the file's name after the label."""
        return {}

    def figures(self, cells: Records, records: Records, folder: Path) -> list[Path]:
        """Draws the figures of the task (by default its number by length); returns the files."""
        return [plots.over_lengths(cells, self.metric, folder / f"{self.label}.png")]

    def longest_length(self, corpus: TokenizedCorpus) -> tuple[int, str]:
        """Returns the longest length that the data allows, and the reason for the error message."""
        return 0, "choose shorter lengths"


def mean_by(records: Records, field: str) -> dict[str, float]:
    """Returns the mean of `correct` for each value of a field."""
    groups = group_by(records, field)
    return {name: float(np.mean([r["correct"] for r in group])) for name, group in groups.items()}


def equal_weights(records: Records, field: str) -> list[float]:
    """Returns weights with an equal sum for every value of a field."""
    sizes = collections.Counter(record[field] for record in records)
    return [1 / sizes[record[field]] for record in records]


def pad_batch(items: Sequence[Any], batch: int) -> list[Any]:
    """Pads `items` to `batch` with its first item, so that all batches have one compiled shape."""
    return [*items, *items[:1] * (batch - len(items))]
