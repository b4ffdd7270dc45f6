"""What a benchmark is to the runner: units of work, scores for them, one number from scores."""

import abc
import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import draccus
import numpy as np

from lcjax.evaluation.corpus import Corpus
from lcjax.evaluation.statistics import bootstrap, wilson

Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Limits:
    """The part of a run's settings that planning depends on."""

    lengths: tuple[int, ...]
    stride: int = 256
    max_documents: int | None = None
    max_windows: int | None = None
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Unit:
    """One thing to score: what is fed to the model, and what the record says about it.

    Units with equal `shape` run in one compiled function. `digest` names the exact tokens, so
    that a run is not continued on other data.
    """

    index: int
    shape: tuple
    tokens: np.ndarray  # int32 [n]
    facts: Record
    payload: Any = None

    @property
    def digest(self) -> str:
        return hashlib.sha256(np.ascontiguousarray(self.tokens, np.int32)).hexdigest()[:12]


@dataclasses.dataclass(frozen=True)
class Metric:
    """How the number of a task is read and printed."""

    name: str
    title: str
    lower_is_better: bool
    decimals: int
    dash_above: float = float("inf")  # tables print a dash, files keep the number


@dataclasses.dataclass(frozen=True)
class Task(draccus.ChoiceRegistry, abc.ABC):
    """A benchmark. Units do not depend on the method, so all methods answer the same questions."""

    # Whether `score` fills a cache: with text, or with a prompt that several options follow.
    generates: ClassVar[bool] = False
    chooses: ClassVar[bool] = False  # asks for continuations of a prompt that is read once
    needs_data: ClassVar[bool] = True  # whether `plan` reads the corpus, not only its tokenizer
    # Settings that say what an answer is worth: they alone may change when a run is scored again.
    judging: ClassVar[tuple[str, ...]] = ()

    name: str = ""  # name of its files; empty: made from the settings

    @property
    def label(self) -> str:
        """Unique name of the task within a run; without a name, that of its type."""
        return self.name or self.get_choice_name(type(self))

    @property
    @abc.abstractmethod
    def metric(self) -> Metric:
        """The number that a table shows."""

    @abc.abstractmethod
    def check(self, limits: Limits, key: str) -> None:
        """Raises InputError where settings cannot work, before a model is loaded.

        `key` is where the task stands in the config, such as `tasks.0`, for the messages.
        """

    @abc.abstractmethod
    def plan(self, corpus: Corpus, length: int, limits: Limits) -> list[Unit]:
        """Everything to score at one length; empty when the data does not reach that length."""

    def check_model(self, model, units: Sequence[Unit]) -> None:
        """Raises InputError where `model` cannot answer some of `units`, before it is asked."""

    def prompts(self, unit: Unit) -> Sequence[Sequence[int] | np.ndarray]:
        """Prompts that `score` asks for `unit`; what several begin with may be read once."""
        return ()

    @abc.abstractmethod
    def score(self, model, units: Sequence[Unit], batch: int) -> list[Record]:
        """One record per unit of one shape, in order, from one call of the model.

        The tokens that it took are the unit's, unless a record says others as `read`.
        """

    def scorer(self, model, batch: int) -> Callable[[Sequence[Unit]], list[Record]]:
        """`score` of one model, batch after batch: for a task that asks it something only once."""
        return lambda units: self.score(model, units, batch)

    @abc.abstractmethod
    def summarise(self, records: Sequence[Record]) -> Record:
        """`value` and its companions from all records of one method at one length."""

    def example(self, record: Record) -> float | None:
        """What the task's number is the mean of, from one record: for intervals and comparisons.

        None where the record has none, such as a loss that is not a number.
        """
        correct = record.get("correct")
        return None if correct is None else float(correct)

    def weights(self, records: Sequence[Record]) -> list[float]:
        """What share each record has in the task's number, up to a factor that all have."""
        return [record.get("weight", 1.0) for record in records]

    def cluster(self, record: Record) -> object:
        """What a record shares with those that are not independent of it; None: with none."""
        return record.get("document")

    def part(self, record: Record) -> str:
        """Which of the task's own parts a record is of, where differences are shown by them."""
        return ""

    def interval(self, records: Sequence[Record]) -> tuple[float, float]:
        """95 % interval of `value`, or NaN.

        Wilson's of a share, else a bootstrap of examples, each with its share in the value.
        """
        records = [record for record in records if self.example(record) is not None]
        values, weights = [self.example(record) for record in records], self.weights(records)
        if set(values) <= {0.0, 1.0} and np.allclose(weights, weights[:1]):
            return wilson(int(sum(values)), len(values))
        return bootstrap(values, weights=weights)

    def references(self, record: Record) -> list[str]:
        """The right answers, from a record or the facts of a unit; none where nothing is asked."""
        return [str(item) for item in record.get("references", ())]

    def rescored(self, record: Record, tokenizer) -> Record:
        """The record as these settings judge its answer, without asking the model again."""
        return record

    def aggregates(self, cells: Sequence[Record], records: Sequence[Record]) -> Record:
        """Numbers over all lengths, by method name."""
        return {}

    @abc.abstractmethod
    def figures(
        self, cells: Sequence[Record], records: Sequence[Record], folder: Path
    ) -> list[Path]:
        """Draws what readers expect and returns the files."""

    def reach(self, corpus: Corpus) -> tuple[int, str]:
        """The longest length that the data allows, and why: for the error about longer ones."""
        return 0, "choose shorter lengths"


def filled(items: Sequence[Any], batch: int) -> list[Any]:
    """`items`, the first one repeated: a batch always has the compiled shape."""
    return [*items, *items[:1] * (batch - len(items))]
