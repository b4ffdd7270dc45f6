"""What several tasks share that hide one thing in a text: depths, trials, a heat map."""

import abc
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from lcjax.errors import whole_numbers
from lcjax.evaluation.corpus import Corpus
from lcjax.evaluation.generation import OWN_WORDING, Example, GenerationTask
from lcjax.evaluation.report import plots
from lcjax.evaluation.task import Limits, Record


@dataclasses.dataclass(frozen=True)
class Spot:
    """Where a question hides what it asks for."""

    length: int
    depth: float  # 0: the very beginning, 1: the very end
    # Of random numbers: what the question is, so that other lengths or depths do not change it.
    seeds: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class DepthTask(GenerationTask):
    """Something hidden at evenly spaced depths, each asked for a few times."""

    depths: int = 10  # places of what is hidden, from the very beginning to the very end
    trials: int = 1  # questions per length and depth; one makes a cell 0 or 1

    @abc.abstractmethod
    def hidden(self, corpus: Corpus, spot: Spot, limits: Limits) -> Example:
        """The question that hides its answer at a spot."""

    def check(self, limits: Limits, key: str) -> None:
        super().check(limits, key)
        whole_numbers(key, self, 1, "depths", "trials")

    def examples(self, corpus: Corpus, length: int, limits: Limits) -> Iterator[Example]:
        for place in range(self.depths):
            depth = place / (self.depths - 1) if self.depths > 1 else 0.5
            for trial in range(self.trials):
                seeds = (limits.seed, length, round(depth * 1e6), trial)
                example = self.hidden(corpus, Spot(length, depth, seeds), limits)
                facts = {"wording": OWN_WORDING, "depth": depth, "trial": trial}
                yield dataclasses.replace(example, facts={**facts, **example.facts})

    def figures(
        self, cells: Sequence[Record], records: Sequence[Record], folder: Path
    ) -> list[Path]:
        title = self.metric.title[0].upper() + self.metric.title[1:]
        title += f", {self.trials} trial{'s' * (self.trials > 1)} a cell"
        return [
            *super().figures(cells, records, folder),
            plots.heat_maps(records, title, folder / f"{self.label}_by_depth.png"),
        ]
