"""InfiniteBench's tasks whose official files are generated, too: rows like theirs, from a seed.

PassKey and Number hide digits between equal lines, at 59 depths; KV asks for the value of one of
many pairs of UUIDs, swept through them; Math.Find for one of seven ranks in a list of numbers. The
text is this library's own. Sizes are the official ones, or as much as a length holds.
"""

import dataclasses
import json
import random
import statistics
import uuid
from collections.abc import Callable

_DEPTHS = 59  # one every 90 of 5,220 lines
_FILLER = "The road is long. The hill is steep. The wind is cold. Off we go. Up and down again."
_NEEDLE = "The {thing} is {key}. Keep it in mind: {key} is the {thing}."
# Which of the distinct values is asked for, from below (from above where negative).
_RANKS = {
    "largest": -1, "second largest": -2, "third largest": -3, "smallest": 0, "second smallest": 1,
    "third smallest": 2, "median": None,
}  # fmt: skip


def _hidden(thing: str, key: Callable[[random.Random], str]) -> Callable[..., dict]:
    def row(rng: random.Random, units: int, index: int, count: int) -> dict:
        digits, depth = key(rng), index * _DEPTHS // count
        lines = [_FILLER] * units
        lines.insert(round(units * depth / (_DEPTHS - 1)), _NEEDLE.format(thing=thing, key=digits))
        return _row("\n".join(lines), f"What is the {thing}?", digits)

    return row


def _five(rng: random.Random) -> str:
    return f"{rng.randrange(100_000):05}"


def _ten(rng: random.Random) -> str:
    """Five digits, of which five more are copies that stand beside them."""
    digits = _five(rng)
    while len(digits) < 10:
        place = rng.randrange(len(digits))
        digits = digits[:place] + digits[place] + digits[place:]
    return digits


def _pairs(rng: random.Random, units: int, index: int, count: int) -> dict:
    keys, values = (
        [str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in range(units)]
        for _ in range(2)
    )
    asked = index * units // count
    return _row(json.dumps(dict(zip(keys, values))), f'Key: "{keys[asked]}"\nValue:', values[asked])


def _ranked(rng: random.Random, units: int, index: int, count: int) -> dict:
    """Numbers from 0 to 99, with the bound on the side that is asked for drawn anew."""
    name, rank = list(_RANKS.items())[index % len(_RANKS)]
    low, high = rng.randint(0, 19), rng.randint(79, 99)
    upper = rank < 0 if rank is not None else rng.random() < 0.5
    low, high = (0, high) if upper else (low, 99)
    numbers: list[int] = []
    while len(set(numbers)) < 3:  # a third one has to be there
        numbers = [rng.randint(low, high) for _ in range(units)]
    answer = statistics.median(numbers) if rank is None else sorted(set(numbers))[rank]
    answer = int(answer) if answer == int(answer) else answer
    return _row(str(numbers), f"The {name} number of the list is:", answer)


def _row(context: str, question: str, answer: str | int | float) -> dict:
    return {"context": context, "input": question, "answer": [answer], "options": []}


@dataclasses.dataclass(frozen=True)
class Made:
    """A generated task: row(rng, units, index, count) is the `index`-th of `count` questions."""

    count: int  # questions of the official file
    units: int  # lines, pairs or numbers in each of its contexts
    row: Callable[..., dict]
    least: int = 10  # units

    def fitting(self, fits: Callable[[int], bool]) -> int:
        """As many units as fit, and no more than the official ones; `least` if none do."""
        low, high = self.least, self.units
        if fits(high):
            return high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low


MADE = {
    "passkey": Made(590, 5220, _hidden("pass key", _five)),
    "number_string": Made(590, 5220, _hidden("sequence of digits", _ten)),
    "kv_retrieval": Made(500, 2500, _pairs),
    "math_find": Made(350, 60_000, _ranked),
}
