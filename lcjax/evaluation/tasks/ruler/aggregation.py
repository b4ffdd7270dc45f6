"""RULER's aggregation: the most common words of a list, the most frequent ones of a coded text."""

import math
import random
import string
from collections.abc import Sequence

from lcjax.evaluation.prompt import Budget, Layout, Segment
from lcjax.evaluation.tasks.ruler.search import FIXED_SEED, Drawn, Maker, median_maximum
from lcjax.evaluation.tasks.ruler.wording import Wording
from lcjax.evaluation.tasks.ruler.words import Words

_COMMON = 10
_ZETA = math.pi**2 / 6  # of 2
_WORD = 6  # letters of a coded word


def _numbered(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


class CommonWords(Maker):
    """Units are distinct words, of which ten stand thirty times and the others three times."""

    new_tokens = 120
    least = _COMMON + 1

    def __init__(self, wording: Wording, words: Words, tokenizer, fixed: bool, length: int):
        super().__init__(wording, tokenizer, fixed)
        self._words = words.all
        random.Random(FIXED_SEED).shuffle(self._words)
        self.most = len(self._words)
        short = length < 4096
        self._repeats = (6, 1) if short else (30, 3)
        self._shown = (20, 3, 1) if short else (40, 10, 3)  # words and repeats of the example

    def step(self, length: int) -> int:
        return 10

    def _list(self, rng: random.Random, units: int, common: int, rare: int):
        chosen = rng.sample(self._words, units)
        entries = chosen[:_COMMON] * common + chosen[_COMMON:] * rare
        self.shuffle(rng, entries)
        return _numbered(entries), chosen[:_COMMON]

    def draw(self, rng: random.Random, units: int, index: int) -> Drawn:
        parts = self._wording.parts("common_words_extraction", query="")
        text, found = self._list(rng, *self._shown)
        before = parts.instruction + parts.glue
        example = f"{before}{text}{parts.question}{parts.answer} {_numbered(found)}\n"
        text, common = self._list(rng, units, *self._repeats)
        asked = parts.around(self.ids(parts.glue + text))
        return Drawn([Segment("demo", example), *asked], common)


class FrequentWords(Maker):
    """Units are entries of a text whose words follow a zeta law; the most frequent one is dots."""

    new_tokens = 50
    least = 27  # so that the fourth word stands once

    def __init__(self, wording: Wording, tokenizer, fixed: bool, budget: Budget, layout: Layout):
        super().__init__(wording, tokenizer, fixed)
        self._room = max(budget.left(layout.prompt([])), 0)
        self._vocabulary = max(self._room // 50, 4)

    def step(self, length: int) -> int:
        return max(self._room // 32, 1)

    def units(self, layout: Layout, budget: Budget, seeds: Sequence[int | str]) -> int:
        """As in upstream a sixth of the budget plus a number of steps, the median of `seeds`."""
        first, step = self._room // _WORD, self.step(budget.length)

        def fits(seed: int | str, steps: int) -> bool:
            drawn = self.draw(random.Random(seed), first + steps * step, 0)
            return self.fits(layout, budget, drawn)

        return max(first + step * median_maximum(fits, seeds, -1, None, 1), self.least)

    def _drawn(self, rng: random.Random) -> list[str]:
        found: set[str] = set()
        while len(found) < self._vocabulary:
            found.add("".join(rng.choices(string.ascii_lowercase, k=_WORD)))
        words = sorted(found)
        self.shuffle(rng, words)
        return ["...", *words[1:]]

    def draw(self, rng: random.Random, units: int, index: int) -> Drawn:
        vocabulary = self._drawn(rng)
        counts = [int(units / (rank**2 * _ZETA)) for rank in range(1, len(vocabulary) + 1)]
        pairs = zip(vocabulary, counts, strict=True)
        entries = [word for word, count in pairs for _ in range(count)]
        self.shuffle(rng, entries)
        parts = self._wording.parts("freq_words_extraction", query="")
        segments = parts.around(self.ids(parts.glue + " ".join(entries)))
        return Drawn(segments, vocabulary[1:4], {"counts": counts[:5], "entries": sum(counts)})
