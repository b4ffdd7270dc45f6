"""Generators of RULER's samples, and how many units of haystack fill a length.

The number of units is the median, over random questions, of the largest number that fits.
Upstream's binary search draws one random question for each number of units that it tries. A single
short question can then set a number with which most samples are too long, and each of these is
shortened by a whole step: 25 of the 47 lines of `niah_multikey_3` at 4,096 tokens. The median is
the result of most of upstream's seeds.
"""

import abc
import dataclasses
import functools
import math
import random
import statistics
import string
from collections.abc import Callable, Sequence

import numpy as np

from lcjax.checkpoints.tokenizer import Tokenizer, encode_mid_text
from lcjax.errors import InputError
from lcjax.evaluation.prompt import Budget, PromptEncoder, Segment
from lcjax.evaluation.prompt_task import Example
from lcjax.evaluation.tasks.ruler.texts import (
    Essays,
    Question,
    RulerTemplates,
    WordList,
    random_number,
    random_uuid,
)

FIXED_SEED = 42  # of upstream's shuffles
DEPTHS = tuple(int(x) for x in np.round(np.linspace(0, 100, 40)))  # percent of the sentences
_NUM_PROBES = 31  # questions of the median, odd
_NUM_HOPS = 4  # of variable tracking
_EXAMPLE_TOKENS = 500  # of the solved example of variable tracking
_NUM_COMMON = 10  # most common words
_ZETA = math.pi**2 / 6  # zeta(2)
_CODE_LETTERS = 6  # letters of a coded word


@dataclasses.dataclass
class Sources:
    """The texts that samples are made of, and their tokenizer."""

    wording: RulerTemplates
    tokenizer: Tokenizer
    fixed: bool  # whether all samples have the same shuffles, those of upstream
    words: WordList | None = None
    essays: Essays | None = None
    questions: Sequence[Question] = ()
    documents: Sequence[str] = ()


class Generator(abc.ABC):
    """Draws samples of one task with a given number of units of haystack."""

    new_tokens: int  # tokens to generate
    min_units: int = 1
    max_units: int | None = None
    num_questions: int | None = None  # of the data; None: any number

    def __init__(self, sources: Sources):
        self._sources, self._wording = sources, sources.wording

    @abc.abstractmethod
    def step(self, length: int) -> int:
        """Returns the number of units that are removed at a time from a sample that is too long."""

    @abc.abstractmethod
    def draw(self, rng: random.Random, units: int, index: int) -> Example:
        """Draws the `index`-th sample."""

    def min_units_of(self, index: int) -> int:
        """Returns the minimum number of units for one question."""
        return self.min_units

    def num_units(
        self, prompt_encoder: PromptEncoder, budget: Budget, seeds: Sequence[int | str]
    ) -> int:
        """Returns the median over `seeds` of the largest number of units that fits the budget.

        As in upstream's search, every seed draws a sample of the task's first question.
        """

        def fits(seed: int | str, units: int) -> bool:
            return self.fits(prompt_encoder, budget, self.draw(random.Random(seed), units, 0))

        step = max(self.step(budget.length), self.min_units)
        return median_maximum(fits, seeds, self.min_units, self.max_units, step)

    def sample(
        self,
        prompt_encoder: PromptEncoder,
        budget: Budget,
        seed: str,
        units: int,
        index: int,
        name: str,
    ) -> tuple[Example, int]:
        """Draws the sample of a seed with `units` of haystack, or as many steps fewer as needed.

        Returns:
          The sample, and its number of units.

        Raises:
          InputError: The sample does not fit the budget with the smallest number of units.
        """
        step, min_units = self.step(budget.length), self.min_units_of(index)
        while True:
            sample = self.draw(random.Random(seed), units, index)
            if self.fits(prompt_encoder, budget, sample):
                return sample, units
            if units <= min_units:
                used = budget.used(prompt_encoder.prompt(sample.segments))
                raise InputError(
                    f"lengths: {budget.length} is too short for {name}, whose shortest prompt and"
                    f" answer take {used} tokens; use at least {used}"
                )
            units = max(units - step if units > step else units - 1, min_units)

    def fits(self, prompt_encoder: PromptEncoder, budget: Budget, sample: Example) -> bool:
        return budget.left(prompt_encoder.prompt(sample.segments)) >= 0

    def shuffle(self, rng: random.Random, items: list) -> None:
        (random.Random(FIXED_SEED) if self._sources.fixed else rng).shuffle(items)

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of `text` inside a longer text."""
        return encode_mid_text(self._sources.tokenizer, text)


def probe_seeds(name: str) -> list[str]:
    """Returns seeds of the questions that set a task's number of units; fixed for all runs."""
    return [f"ruler {name} probe {index}" for index in range(_NUM_PROBES)]


def median_maximum(
    fits: Callable[[int | str, int], bool],
    seeds: Sequence[int | str],
    min_number: int,
    max_number: int | None,
    step: int,
) -> int:
    """Returns the median over seeds of the largest number for which `fits(seed, number)` holds.

    Args:
      fits: A test that holds for all numbers up to a limit that depends on the seed.
      seeds: An odd number of seeds.
      min_number: The result for a seed for which no number fits.
      max_number: The largest allowed number; None for no limit.
      step: The first number to test; other seeds start at the median so far.
    """
    maxima: list[int] = []
    for seed in seeds:
        start, stride = (statistics.median_low(maxima), 1) if maxima else (step, step)
        fits_seed = functools.partial(fits, seed)
        maxima.append(_maximum(fits_seed, min_number, max_number, start, stride))
    return statistics.median_low(maxima)


def _maximum(
    fits: Callable[[int], bool], min_number: int, max_number: int | None, start: int, stride: int
) -> int:
    """Returns the largest number that fits: doubles strides from `start`, then bisects."""
    low, high = min_number, (max_number or 1 << 40) + 1  # low fits, high does not
    number = min(max(start, min_number), high - 1)
    while high - low > 1:
        if fits(number):
            low = number
            number = min(low + stride, (low + high) // 2)
        else:
            high = number
            number = max(high - stride, (low + high) // 2)
        stride *= 2
    return low


@dataclasses.dataclass(frozen=True)
class NeedleKind:
    """One row of the paper's table of needle tasks."""

    haystack: str  # noise, essay, needle
    key: str = "words"
    value: str = "numbers"
    keys: int = 1
    values: int = 1  # of every key
    queries: int = 1


NEEDLE_KINDS = {
    "niah_single_1": NeedleKind("noise"),
    "niah_single_2": NeedleKind("essay"),
    "niah_single_3": NeedleKind("essay", value="uuids"),
    "niah_multikey_1": NeedleKind("essay", keys=4),
    "niah_multikey_2": NeedleKind("needle"),
    "niah_multikey_3": NeedleKind("needle", key="uuids", value="uuids"),
    "niah_multivalue": NeedleKind("essay", values=4),
    "niah_multiquery": NeedleKind("essay", keys=4, queries=4),
}


class Needles(Generator):
    """Keys with values hidden in a haystack.

    Units are lines of noise or of other needles, or words of the essays.
    """

    new_tokens = 128

    def __init__(self, sources: Sources, kind: NeedleKind):
        super().__init__(sources)
        self.kind = kind
        # Needles stand between distinct lines.
        self.min_units = 1 if kind.haystack == "essay" else kind.keys * kind.values
        self._noise = self.encode("\n" + self._wording.noise)

    def step(self, length: int) -> int:
        if self.kind.haystack == "essay":
            return 500
        return 25 if length >= 4096 else 5

    def _needle(self, key: str, value: str) -> str:
        return self._wording.needle.format(type_needle_v=self.kind.value, key=key, value=value)

    def _random(self, rng: random.Random, kind: str) -> str:
        if kind == "numbers":
            return random_number(rng)
        return random_uuid(rng) if kind == "uuids" else self._sources.words.pair(rng)

    def draw(self, rng: random.Random, units: int, index: int) -> Example:
        kind = self.kind
        keys = [self._random(rng, kind.key) for _ in range(kind.keys)]
        values = [[self._random(rng, kind.value) for _ in range(kind.values)] for _ in keys]
        pairs = zip(keys, values, strict=True)
        needles = [self._needle(key, value) for key, of_key in pairs for value in of_key]
        self.shuffle(rng, needles)
        key_ids = rng.sample(range(kind.keys), kind.queries)
        queries = [keys[i] for i in key_ids]
        answers = [value for i in key_ids for value in values[i]]
        query = queries[0]
        if len(queries) > 1:
            query = ", ".join(queries[:-1]) + ", and " + queries[-1]
        one = kind.queries * kind.values == 1
        template = self._wording.template(
            "niah", singular=one, query=query, type_needle_v=kind.value[:-1] if one else kind.value
        )
        if kind.haystack == "essay":
            context, depths = self._in_essay(rng, units, needles)
            context = self.encode(template.separator) + context
        else:
            context, depths = self._between_lines(rng, units, needles)
        return Example(template.segments(context), answers, {"depths": depths, "query": query})

    def _in_essay(self, rng, units: int, needles: list[str]) -> tuple[list[int], list[int]]:
        """Returns the token ids of the context, and the depths of the needles in percent."""
        sentences = self._sources.essays.first(units)
        depths = sorted(rng.sample(DEPTHS, len(needles)))
        context, last = [], 0
        for needle, depth in zip(needles, depths, strict=True):
            index = len(sentences) * depth // 100
            context += [*_flatten(sentences[last:index]), *self.encode(" " + needle)]
            last = index
        return context + _flatten(sentences[last:]), depths

    def _between_lines(self, rng, units: int, needles: list[str]) -> tuple[list[int], list[float]]:
        """Returns the token ids of the context, and the depths of the needles in percent."""
        if self.kind.haystack == "noise":
            lines = [self._noise] * units
        else:
            kinds = self.kind.key, self.kind.value
            lines = [
                self.encode("\n" + self._needle(*(self._random(rng, kind) for kind in kinds)))
                for _ in range(units)
            ]
        indices = sorted(rng.sample(range(units), len(needles)), reverse=True)
        for index, needle in zip(indices, needles, strict=True):
            lines.insert(index, self.encode("\n" + needle))
        return _flatten(lines), sorted(round(100 * index / units, 1) for index in indices)


def _flatten(blocks: Sequence[Sequence[int]]) -> list[int]:
    return [token for block in blocks for token in block]


class _Chain(Generator):
    """A chain of five variables whose lines stand in order among lines of noise, the units."""

    new_tokens = 30
    min_units = _NUM_HOPS + 1

    def __init__(self, sources: Sources, letters: int):
        super().__init__(sources)
        self._letters = letters  # of a name
        self._noise = self.encode("\n" + self._wording.noise)

    def step(self, length: int) -> int:
        return 10 if length >= 4096 else 5

    def draw(self, rng: random.Random, units: int, index: int) -> Example:
        return self.at_lines(rng, units, sorted(rng.sample(range(units), _NUM_HOPS + 1)))

    def at_lines(self, rng: random.Random, units: int, indices: list[int]) -> Example:
        """Draws a chain whose assignments stand before the lines `indices`."""
        names: list[str] = []
        while len(names) <= _NUM_HOPS:
            name = "".join(rng.choices(string.ascii_uppercase, k=self._letters))
            names += [name] * (name not in names)
        value = str(rng.randrange(10_000, 99_999))
        lines = [f"VAR {names[0]} = {value}"]
        lines += [f"VAR {new} = VAR {old} " for new, old in zip(names[1:], names, strict=False)]
        template = self._wording.template("variable_tracking", query=value, num_v=_NUM_HOPS + 1)
        blocks = [self._noise] * units
        for shift, (index, line) in enumerate(zip(indices, lines, strict=True)):
            blocks.insert(index + shift, self.encode("\n" + line))
        # Every line begins with a newline, so the last one of the separator is left out.
        context = self.encode(template.separator[:-1]) + _flatten(blocks)
        depths = [round(100 * index / units, 1) for index in indices]
        return Example(template.segments(context), names, {"depths": depths})


class VariableTracking(_Chain):
    """A chain after one solved example of at most 500 tokens, as upstream."""

    def __init__(self, sources: Sources, seed: int):
        super().__init__(sources, letters=5)
        self._example = _Chain(sources, letters=3)
        self._prompt_encoder = PromptEncoder(sources.tokenizer)
        budget = Budget(_EXAMPLE_TOKENS, 0, bos=False)
        seeds = probe_seeds("vt example")
        self._example_units = self._example.num_units(self._prompt_encoder, budget, seeds)
        rng = random.Random(f"vt {seed}")
        self._example_lines = sorted(rng.sample(range(self._example_units), _NUM_HOPS + 1))

    def draw(self, rng: random.Random, units: int, index: int) -> Example:
        """Draws a sample; the places of the example's lines are the same in all samples.

        The names and the value of the example differ between samples.
        """
        example = self._example.at_lines(rng, self._example_units, self._example_lines)
        prompt = self._prompt_encoder.prompt(example.segments)
        ids = prompt.ids[prompt.tokens("bos") :].tolist()
        ids += self.encode(" " + " ".join(example.references) + "\n\n")
        sample = super().draw(rng, units, index)
        segments = [Segment("demo", ids=ids), *sample.segments]
        return dataclasses.replace(sample, segments=segments)


class CommonWords(Generator):
    """A numbered list whose ten most common words are the answers.

    Units are distinct words: ten occur thirty times and the others three times.

    With a chat template, the example is inside the user's turn. Upstream applies the template to
    the example as well, so that it is a turn and an answer of its own.
    """

    new_tokens = 120
    min_units = _NUM_COMMON + 1

    def __init__(self, sources: Sources, length: int):
        super().__init__(sources)
        self._words = sources.words.all
        random.Random(FIXED_SEED).shuffle(self._words)
        self.max_units = len(self._words)
        short = length < 4096
        self._repeats = (6, 1) if short else (30, 3)  # of common and of other words
        self._example = (20, 3, 1) if short else (40, 10, 3)  # units and repeats

    def step(self, length: int) -> int:
        return 10

    def _list(
        self, rng: random.Random, units: int, common: int, rare: int
    ) -> tuple[str, list[str]]:
        """Returns the numbered list, and its common words."""
        words = rng.sample(self._words, units)
        entries = words[:_NUM_COMMON] * common + words[_NUM_COMMON:] * rare
        self.shuffle(rng, entries)
        return _numbered(entries), words[:_NUM_COMMON]

    def draw(self, rng: random.Random, units: int, index: int) -> Example:
        template = self._wording.template("common_words_extraction", query="")
        text, answers = self._list(rng, *self._example)
        before = template.instruction + template.separator
        demo = f"{before}{text}{template.question}{template.answer} {_numbered(answers)}\n"
        text, answers = self._list(rng, units, *self._repeats)
        segments = template.segments(self.encode(template.separator + text))
        return Example([Segment("demo", demo), *segments], answers)


def _numbered(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


class FrequentWords(Generator):
    """A text of coded words with zeta-law frequencies; the answers are the most frequent words.

    The most frequent word of all is dots; the next three are the answers.
    Units are the entries of the text.
    """

    new_tokens = 50
    min_units = 27  # so that the fourth word occurs once

    def __init__(self, sources: Sources, budget: Budget, prompt_encoder: PromptEncoder):
        super().__init__(sources)
        self._num_tokens = max(budget.left(prompt_encoder.prompt([])), 0)
        self._vocab_size = max(self._num_tokens // 50, 4)

    def step(self, length: int) -> int:
        return max(self._num_tokens // 32, 1)

    def num_units(
        self, prompt_encoder: PromptEncoder, budget: Budget, seeds: Sequence[int | str]
    ) -> int:
        """Returns a sixth of the budget plus a median number of steps, as in upstream."""
        first, step = self._num_tokens // _CODE_LETTERS, self.step(budget.length)

        def fits(seed: int | str, steps: int) -> bool:
            sample = self.draw(random.Random(seed), first + steps * step, 0)
            return self.fits(prompt_encoder, budget, sample)

        return max(first + step * median_maximum(fits, seeds, -1, None, 1), self.min_units)

    def _vocabulary(self, rng: random.Random) -> list[str]:
        codes: set[str] = set()
        while len(codes) < self._vocab_size:
            codes.add("".join(rng.choices(string.ascii_lowercase, k=_CODE_LETTERS)))
        words = sorted(codes)
        self.shuffle(rng, words)
        return ["...", *words[1:]]

    def draw(self, rng: random.Random, units: int, index: int) -> Example:
        vocabulary = self._vocabulary(rng)
        counts = [int(units / (rank**2 * _ZETA)) for rank in range(1, len(vocabulary) + 1)]
        pairs = zip(vocabulary, counts, strict=True)
        entries = [word for word, count in pairs for _ in range(count)]
        self.shuffle(rng, entries)
        template = self._wording.template("freq_words_extraction", query="")
        segments = template.segments(self.encode(template.separator + " ".join(entries)))
        return Example(segments, vocabulary[1:4], {"counts": counts[:5], "entries": sum(counts)})


class Passages(Generator):
    """A question over documents, the units; each document is a segment of its own."""

    new_tokens = 32

    def __init__(self, sources: Sources):
        super().__init__(sources)
        self._questions, self._documents = sources.questions, sources.documents
        self.num_questions = len(self._questions)
        self.min_units = self.min_units_of(0)
        self._encoded: dict[int, list[int]] = {}  # token ids by document

    def step(self, length: int) -> int:
        return 10

    def min_units_of(self, index: int) -> int:
        return len(self._questions[index].gold)

    def draw(self, rng: random.Random, units: int, index: int) -> Example:
        question, num_documents = self._questions[index], len(self._documents)
        if units < num_documents:
            indices = self._choose(rng, question, max(units, len(question.gold)))
        else:
            indices = [number % num_documents for number in range(units)]
        self.shuffle(rng, indices)
        template = self._wording.template("qa", query=question.text)
        segments = template.segments(*(self._document(n, i) for n, i in enumerate(indices, 1)))
        gold = [indices.index(document) + 1 for document in question.gold]
        return Example(segments, question.answers, {"query": question.text, "gold": gold})

    def _choose(self, rng: random.Random, question: Question, units: int) -> list[int]:
        gold, related = list(question.gold), list(question.related)
        num_other = units - len(gold)
        if num_other <= len(related):
            return gold + rng.sample(related, num_other)
        used = {*gold, *related}
        others = [index for index in range(len(self._documents)) if index not in used]
        return gold + related + rng.sample(others, min(num_other - len(related), len(others)))

    def _document(self, number: int, index: int) -> list[int]:
        if index not in self._encoded:
            self._encoded[index] = self.encode("\n" + self._documents[index])
        return self.encode(f"\n\nDocument {number}:") + self._encoded[index]
