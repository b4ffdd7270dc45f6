"""Passkey retrieval: a number hidden in repetitive text has to be repeated.

The task of Landmark attention (arXiv 2305.16300, section 4.2), used by Position Interpolation,
LongLoRA and YaRN: instruction, filler, one line that states the key, filler, question, the
beginning of the answer. The wording here is this library's own, and records say so. Prompts are put
together from token ids, so that a prompt of length L is exactly L tokens with everything counted:
BOS, chat template, answer prefix and the tokens to be generated.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from lcjax.checkpoints.tokenizer import inside
from lcjax.errors import InputError, one_of, whole_numbers
from lcjax.evaluation.corpus import Corpus
from lcjax.evaluation.generation import Example
from lcjax.evaluation.prompt import Layout, Segment
from lcjax.evaluation.task import Limits, Metric, Record, Task, Unit
from lcjax.evaluation.tasks.grid import DepthTask, Spot

_INSTRUCTION = (
    "Somewhere in the following notes a secret number is written down. Everything else in them is "
    "idle talk. Find the number and remember it, because you will be asked for it.\n\n"
)
_FILLER = (
    "The harbour was quiet that morning.",
    "A gull walked along the wall and looked at the boats.",
    "Nobody had anything urgent to do.",
    "The tide came in slowly and went out again.",
    "Someone painted a door, and the paint took all day to dry.",
    "In the evening the lamps were lit one after another.",
)
_NEEDLE = "\nThe secret number is {key}."
_REPEAT = " Keep it in mind: {key} is the secret number."
_RESUME = "\n"
_QUESTION = "\n\nWhat is the secret number?"
_ANSWER = "\nThe secret number is"
_MATCHES = ("first_integer", "first_digits", "token_ids")


@Task.register_subclass("passkey")
@dataclasses.dataclass(frozen=True)
class Passkey(DepthTask):
    """Five-digit keys at evenly spaced depths, measured in tokens."""

    judging: ClassVar[tuple[str, ...]] = ("match",)

    max_new_tokens: int = 10  # counted in the length, like everything else
    repeat: int = 2  # how often the line states the key (2 in the published versions)
    match: str = "first_integer"  # first_integer (YaRN), first_digits (InfiniteBench), token_ids

    @property
    def metric(self) -> Metric:
        return Metric("accuracy", f"passkey accuracy ({self.match})", False, 2)

    @property
    def shown(self) -> str:
        return self.match

    def check(self, limits: Limits, key: str) -> None:
        super().check(limits, key)
        one_of(f"{key}.match", self.match, _MATCHES)
        whole_numbers(key, self, 1, "repeat")

    def hidden(self, corpus: Corpus, spot: Spot, limits: Limits) -> Example:
        rng = np.random.default_rng(spot.seeds)
        key = str(rng.integers(10_000, 100_000))
        layout, first = self.layout(corpus.tokenizer), int(rng.integers(len(_FILLER)))
        segments, start = self._segments(layout, key, spot.depth, spot.length, first)
        facts = {"protocol": f"passkey_{self.match}", "key_start": start, "key": key}
        return Example(segments, [key], facts)

    def _segments(
        self, layout: Layout, key: str, depth: float, length: int, offset: int
    ) -> tuple[list[Segment], int]:
        """A prompt of `length - max_new_tokens` tokens, and where its key line is."""
        needle = (_NEEDLE + _REPEAT * (self.repeat - 1)).format(key=key)
        needle, resume = (inside(layout.tokenizer, text) for text in (needle, _RESUME))

        def around(context: list[int]) -> list[Segment]:
            return [
                Segment("instruction", _INSTRUCTION),
                Segment("context_doc", ids=context),
                Segment("question", _QUESTION),
                Segment("answer_prefix", _ANSWER),
            ]

        bare = layout.prompt(around(needle + resume))
        room = self.budget(length, self.max_new_tokens).left(bare)
        sentences = [inside(layout.tokenizer, " " + text) for text in _FILLER]
        if room < 2 * max(map(len, sentences)):
            least = length - room + 2 * max(map(len, sentences))
            raise InputError(
                f"lengths: {length} leaves no room for filler in passkey, whose instruction, "
                f"question and answer take {length - room} tokens; use at least {least}"
            )
        filler, borders = [], [0]
        while len(filler) < room:
            filler += sentences[(offset + len(borders) - 1) % len(sentences)]
            borders.append(min(len(filler), room))
        filler = filler[:room]  # the last sentence is cut where the budget ends
        cut = min(borders, key=lambda border: abs(border - depth * room))
        context = filler[:cut] + needle + resume + filler[cut:]
        return around(context), bare.start("context_doc") + cut

    def judge(self, answer: str, unit: Unit, tokenizer) -> dict[str, bool]:
        return judge(answer, unit.facts["key"], tokenizer, unit.facts.get("ids"))

    def rescored(self, record: Record, tokenizer) -> Record:
        return {**super().rescored(record, tokenizer), "protocol": f"passkey_{self.match}"}

    def aggregates(self, cells: Sequence[Record], records: Sequence[Record]) -> Record:
        """k_max, the effective window of Position Interpolation: the largest length that works."""
        found: Record = {}
        for cell in cells:
            entry = found.setdefault(cell["method"], {"k_max_20": 0, "k_max_90": 0})
            for percent in (20, 90):
                if cell["value"] >= percent / 100:
                    entry[f"k_max_{percent}"] = max(entry[f"k_max_{percent}"], cell["length"])
        return found


def judge(answer: str, key: str, tokenizer, ids: Sequence[int] | None = None) -> dict[str, bool]:
    """Whether an answer counts as right, by each of the published rules.

    `ids` are those that the model picked; None: what its text is encoded as.
    """
    digits = re.search(r"\d+", answer)
    expected = inside(tokenizer, " " + key)
    picked = inside(tokenizer, " " + answer.strip()) if ids is None else list(ids)
    return {
        "first_integer": digits is not None and int(digits.group()) == int(key),
        "first_digits": digits is not None and digits.group() == key,
        "token_ids": picked[: len(expected)] == expected,
    }
