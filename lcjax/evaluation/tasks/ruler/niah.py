"""RULER's eight needle tasks: keys and values hidden in noise, essays or among other needles."""

import dataclasses
import random

import numpy as np

from lcjax.evaluation.tasks.ruler.search import Drawn, Maker
from lcjax.evaluation.tasks.ruler.wording import Wording
from lcjax.evaluation.tasks.ruler.words import Essays, Words, drawn

DEPTHS = tuple(int(x) for x in np.round(np.linspace(0, 100, 40)))  # per cent of the sentences


@dataclasses.dataclass(frozen=True)
class Kind:
    """One row of the paper's table of needle tasks."""

    haystack: str  # noise, essay, needle
    key: str = "words"
    value: str = "numbers"
    keys: int = 1
    values: int = 1  # of every key
    queries: int = 1


KINDS = {
    "niah_single_1": Kind("noise"),
    "niah_single_2": Kind("essay"),
    "niah_single_3": Kind("essay", value="uuids"),
    "niah_multikey_1": Kind("essay", keys=4),
    "niah_multikey_2": Kind("needle"),
    "niah_multikey_3": Kind("needle", key="uuids", value="uuids"),
    "niah_multivalue": Kind("essay", values=4),
    "niah_multiquery": Kind("essay", keys=4, queries=4),
}


class Needles(Maker):
    """Units are lines of noise or of other needles, or words of the essays."""

    new_tokens = 128

    def __init__(self, kind: Kind, wording: Wording, words: Words, essays: Essays | None, tokenizer,
                 fixed: bool):  # fmt: skip
        super().__init__(wording, tokenizer, fixed)
        self.kind, self._words, self._essays = kind, words, essays
        self.least = kind.keys * kind.values  # lines to put needles between
        if kind.haystack == "essay":
            self.least = 1
        self._noise = self.ids("\n" + wording.noise)

    def step(self, length: int) -> int:
        if self.kind.haystack == "essay":
            return 500
        return 25 if length >= 4096 else 5

    def _needle(self, key: str, value: str) -> str:
        return self._wording.needle.format(type_needle_v=self.kind.value, key=key, value=value)

    def _random(self, rng: random.Random, kind: str) -> str:
        return drawn(kind, rng, self._words)

    def draw(self, rng: random.Random, units: int, index: int) -> Drawn:
        kind = self.kind
        keys = [self._random(rng, kind.key) for _ in range(kind.keys)]
        values = [[self._random(rng, kind.value) for _ in range(kind.values)] for _ in keys]
        pairs = zip(keys, values, strict=True)
        needles = [self._needle(key, value) for key, own in pairs for value in own]
        self.shuffle(rng, needles)
        chosen = rng.sample(range(kind.keys), kind.queries)
        queries = [keys[i] for i in chosen]
        answers = [value for i in chosen for value in values[i]]
        query = queries[0]
        if len(queries) > 1:
            query = ", ".join(queries[:-1]) + ", and " + queries[-1]
        one = kind.queries * kind.values == 1
        parts = self._wording.parts(
            "niah", singular=one, query=query, type_needle_v=kind.value[:-1] if one else kind.value
        )
        hide = self._in_essay if kind.haystack == "essay" else self._between_lines
        context, places = hide(rng, units, needles, parts.glue)
        return Drawn(parts.around(context), answers, {"depths": places, "query": query})

    def _in_essay(self, rng, units: int, needles: list[str], glue: str):
        sentences = self._essays.first(units)
        depths = sorted(rng.sample(DEPTHS, len(needles)))
        blocks, last = [], 0
        for needle, depth in zip(needles, depths, strict=True):
            place = len(sentences) * depth // 100
            blocks += [*sentences[last:place], self.ids(" " + needle)]
            last = place
        blocks += sentences[last:]
        context = [token for block in blocks for token in block]
        return self.ids(glue) + context, depths

    def _between_lines(self, rng, units: int, needles: list[str], glue: str):
        if self.kind.haystack == "noise":
            lines = [self._noise] * units
        else:
            kinds = self.kind.key, self.kind.value
            lines = [
                self.ids("\n" + self._needle(*(self._random(rng, kind) for kind in kinds)))
                for _ in range(units)
            ]
        places = sorted(rng.sample(range(units), len(needles)), reverse=True)
        for place, needle in zip(places, needles, strict=True):
            lines.insert(place, self.ids("\n" + needle))
        context = [token for line in lines for token in line]
        return context, sorted(round(100 * place / units, 1) for place in places)
