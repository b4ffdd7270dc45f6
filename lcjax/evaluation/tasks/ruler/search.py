"""How much haystack fits: a binary search over random draws, as upstream has it."""

import abc
import dataclasses
import random
from collections.abc import Sequence

from lcjax.checkpoints.tokenizer import inside
from lcjax.errors import InputError
from lcjax.evaluation.prompt import Budget, Layout, Segment
from lcjax.evaluation.tasks.ruler.wording import Wording

FIXED_SEED = 42  # of upstream's shuffles


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

    def units(self, layout: Layout, budget: Budget, rng: random.Random) -> int:
        """Units that a random draw fills the budget with."""
        return search(self, layout, budget, rng)

    def shuffle(self, rng: random.Random, items: list) -> None:
        (random.Random(FIXED_SEED) if self._fixed else rng).shuffle(items)

    def ids(self, text: str) -> list[int]:
        """Of `text` inside a longer one."""
        return inside(self._tokenizer, text)

    def fits(self, layout: Layout, budget: Budget, drawn: Drawn) -> bool:
        return budget.left(layout.prompt(drawn.segments)) >= 0


def search(maker: Maker, layout: Layout, budget: Budget, rng: random.Random) -> int:
    """The number of units that fills the budget, every probe a fresh random draw.

    Doubled from upstream's step on until they do not fit, then halved between; where not even a
    step fits, searched below it, which upstream does not survive.
    """

    def fits(units: int) -> bool:
        return maker.fits(layout, budget, maker.draw(rng, units, 0))

    most = maker.most or 1 << 40
    low, high = maker.least, min(max(maker.step(budget.length), maker.least), most)
    while fits(high):
        low, high = high, min(2 * high, most)
        if low == most:
            return most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
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
