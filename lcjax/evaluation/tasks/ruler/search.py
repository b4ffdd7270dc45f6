"""How many units of haystack fill a length: the median over random questions of the most that fit.

Upstream's binary search draws one random question for each number of units that it tries. A single
short question then sets a number that most samples exceed, and each of those gives up a whole step:
25 of the 47 lines of `niah_multikey_3` at 4,096 tokens. The median is what most of upstream's seeds
give.
"""

import abc
import dataclasses
import functools
import random
import statistics
from collections.abc import Callable, Sequence

from lcjax.checkpoints.tokenizer import inside
from lcjax.errors import InputError
from lcjax.evaluation.prompt import Budget, Layout, Segment
from lcjax.evaluation.tasks.ruler.wording import Wording

FIXED_SEED = 42  # of upstream's shuffles
_PROBES = 31  # questions of the median, odd


@dataclasses.dataclass(frozen=True)
class Drawn:
    """One question: its segments, the right answers, and facts for the record."""

    segments: Sequence[Segment]
    answers: Sequence[str]
    facts: dict = dataclasses.field(default_factory=dict)


class Maker(abc.ABC):
    """Draws questions of one task with so many units of haystack.

    With `fixed` the shuffles are upstream's, the same for all samples.
    """

    new_tokens: int  # tokens to generate, of which the length leaves room
    least: int = 1  # units below which there is no question
    most: int | None = None  # units beyond which there are none

    def __init__(self, wording: Wording, tokenizer, fixed: bool = False):
        self._wording, self._tokenizer, self._fixed = wording, tokenizer, fixed

    @abc.abstractmethod
    def step(self, length: int) -> int:
        """Units that a sample which came out too long gives up at a time."""

    @abc.abstractmethod
    def draw(self, rng: random.Random, units: int, index: int) -> Drawn:
        """The `index`-th question; the same generator gives the same one."""

    def least_of(self, index: int) -> int:
        """`least` of one question."""
        return self.least

    def units(self, layout: Layout, budget: Budget, seeds: Sequence[int | str]) -> int:
        """The median over the questions of these seeds of the most units that fit the budget.

        Each is a random draw about the task's first question (`index` 0), as in upstream's search.
        """

        def fits(seed: int | str, units: int) -> bool:
            return self.fits(layout, budget, self.draw(random.Random(seed), units, 0))

        step = max(self.step(budget.length), self.least)
        return median_maximum(fits, seeds, self.least, self.most, step)

    def shuffle(self, rng: random.Random, items: list) -> None:
        (random.Random(FIXED_SEED) if self._fixed else rng).shuffle(items)

    def ids(self, text: str) -> list[int]:
        """Of `text` inside a longer one."""
        return inside(self._tokenizer, text)

    def fits(self, layout: Layout, budget: Budget, drawn: Drawn) -> bool:
        return budget.left(layout.prompt(drawn.segments)) >= 0


def probe_seeds(name: str) -> list[str]:
    """Seeds of the questions that set a task's number of units, the same in every run."""
    return [f"ruler {name} probe {index}" for index in range(_PROBES)]


def median_maximum(
    fits: Callable[[int | str, int], bool],
    seeds: Sequence[int | str],
    least: int,
    most: int | None,
    step: int,
) -> int:
    """The median over seeds of the largest number for which `fits(seed, number)` holds.

    Args:
        fits: a test that holds for all numbers up to some limit of the seed.
        seeds: an odd number of seeds.
        least: the result for a seed where no number fits.
        most: the largest number that is allowed, None for no such limit.
        step: the first number that is tried; other seeds start at the median so far.
    """
    maxima: list[int] = []
    for seed in seeds:
        start, stride = (statistics.median_low(maxima), 1) if maxima else (step, step)
        maxima.append(_maximum(functools.partial(fits, seed), least, most, start, stride))
    return statistics.median_low(maxima)


def _maximum(
    fits: Callable[[int], bool], least: int, most: int | None, start: int, stride: int
) -> int:
    """The largest number that fits: from `start` in strides that double, then by halving."""
    low, high = least, (most or 1 << 40) + 1  # low fits, high does not
    number = min(max(start, least), high - 1)
    while high - low > 1:
        if fits(number):
            low = number
            number = min(low + stride, (low + high) // 2)
        else:
            high = number
            number = max(high - stride, (low + high) // 2)
        stride *= 2
    return low


def sample(
    maker: Maker, layout: Layout, budget: Budget, seed: str, units: int, index: int, name: str
) -> tuple[Drawn, int]:
    """The question of a seed, with `units` of haystack, or so many steps fewer that it fits."""
    step = maker.step(budget.length)
    while True:
        drawn = maker.draw(random.Random(seed), units, index)
        if maker.fits(layout, budget, drawn):
            return drawn, units
        if units <= maker.least_of(index):
            used = budget.used(layout.prompt(drawn.segments))
            raise InputError(
                f"lengths: {budget.length} is too short for {name}, whose shortest prompt and"
                f" answer take {used} tokens; use at least {used}"
            )
        fewer = units - step if units > step else units - 1
        units = max(fewer, maker.least_of(index))
