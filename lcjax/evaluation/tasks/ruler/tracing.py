"""RULER's variable tracking: which names got a value, over a chain of assignments in noise."""

import random
import string

from lcjax.evaluation.prompt import Budget, Layout, Segment
from lcjax.evaluation.tasks.ruler.search import Drawn, Maker, probe_seeds
from lcjax.evaluation.tasks.ruler.wording import Wording

_HOPS = 4
_EXAMPLE_TOKENS = 500


class _Chain(Maker):
    """Units are lines of noise; a chain of five names stands among them in order."""

    new_tokens = 30
    least = _HOPS + 1
    letters = 5

    def __init__(self, wording: Wording, tokenizer):
        super().__init__(wording, tokenizer)
        self._noise = self.ids("\n" + wording.noise)

    def step(self, length: int) -> int:
        return 10 if length >= 4096 else 5

    def draw(self, rng: random.Random, units: int, index: int) -> Drawn:
        places = sorted(rng.sample(range(units), _HOPS + 1))
        return self.of(rng, units, places)

    def of(self, rng: random.Random, units: int, places: list[int]) -> Drawn:
        names: list[str] = []
        while len(names) <= _HOPS:
            name = "".join(rng.choices(string.ascii_uppercase, k=self.letters))
            names += [name] * (name not in names)
        value = str(rng.randrange(10_000, 99_999))
        lines = [f"VAR {names[0]} = {value}"]
        pairs = zip(names[1:], names, strict=False)
        lines += [f"VAR {new} = VAR {old} " for new, old in pairs]
        parts = self._wording.parts("variable_tracking", query=value, num_v=_HOPS + 1)
        blocks = [self._noise] * units
        for shift, (place, line) in enumerate(zip(places, lines, strict=True)):
            blocks.insert(place + shift, self.ids("\n" + line))
        context = self.ids(parts.glue[:-1])  # each line has its own newline
        context += [token for block in blocks for token in block]
        depths = [round(100 * place / units, 1) for place in places]
        return Drawn(parts.around(context), names, {"depths": depths})


class _Example(_Chain):
    letters = 3
    new_tokens = 0

    def step(self, length: int) -> int:
        return 5


class Tracing(_Chain):
    """With one solved example in front, of at most 500 tokens, as upstream."""

    def __init__(self, wording: Wording, tokenizer, seed: int):
        super().__init__(wording, tokenizer)
        self._example, budget = _Example(wording, tokenizer), Budget(_EXAMPLE_TOKENS, 0, bos=False)
        self._units = self._example.units(Layout(tokenizer), budget, probe_seeds("vt example"))
        rng = random.Random(f"vt {seed}")
        self._places = sorted(rng.sample(range(self._units), _HOPS + 1))

    def draw(self, rng: random.Random, units: int, index: int) -> Drawn:
        """The example's places are those of all samples, its names and value are not."""
        shown = self._example.of(rng, self._units, self._places)
        solved = [*self._read(shown), *self.ids(" " + " ".join(shown.answers) + "\n\n")]
        found = super().draw(rng, units, index)
        return Drawn([Segment("demo", ids=solved), *found.segments], found.answers, found.facts)

    def _read(self, drawn: Drawn) -> list[int]:
        prompt = Layout(self._tokenizer).prompt(drawn.segments)
        return prompt.ids[prompt.tokens("bos") :].tolist()
