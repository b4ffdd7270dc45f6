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
from pathlib import Path
from typing import ClassVar

import numpy as np

from lcjax.convert.tokenizer import inside
from lcjax.errors import InputError, whole_numbers
from lcjax.evaluation.corpus import Corpus, start_token
from lcjax.evaluation.task import Limits, Metric, Record, Task, Unit

WORDING = "lcjax-1"
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
_ANSWER = "The secret number is"
_SLOT = "@@lcjax-body@@"  # marks the place of the user's text while a template is rendered
_MATCHES = ("first_integer", "first_digits", "token_ids")


@dataclasses.dataclass(frozen=True)
class Pieces:
    """Token ids of all parts of a prompt but the filler between them."""

    head: list[int]  # BOS, template, instruction
    needle: list[int]
    resume: list[int]
    tail: list[int]  # question, template, answer prefix

    @property
    def fixed(self) -> int:
        return len(self.head) + len(self.needle) + len(self.resume) + len(self.tail)


@Task.register_subclass("passkey")
@dataclasses.dataclass(frozen=True)
class Passkey(Task):
    """Five-digit keys at evenly spaced depths, measured in tokens."""

    generates: ClassVar[bool] = True
    needs_data: ClassVar[bool] = False

    depths: int = 10  # places of the key, from the very beginning to the very end
    trials: int = 1  # keys per length and depth
    max_new_tokens: int = 10  # counted in the length, like everything else
    repeat: int = 2  # how often the line states the key (2 in the published versions)
    match: str = "first_integer"  # first_integer (YaRN), first_digits (InfiniteBench), token_ids
    template: str = "none"  # chat: the tokenizer's chat template around the text

    @property
    def label(self) -> str:
        return self.name or "passkey"

    @property
    def metric(self) -> Metric:
        return Metric("accuracy", f"passkey accuracy ({self.match})", False, 2)

    def check(self, limits: Limits, key: str) -> None:
        for field, known in (("match", _MATCHES), ("template", ("none", "chat"))):
            if getattr(self, field) not in known:
                value = getattr(self, field)
                raise InputError(f"{key}.{field}={value!r} is none of {', '.join(known)}")
        whole_numbers(key, self, 1, "depths", "trials", "max_new_tokens", "repeat")

    def plan(self, corpus: Corpus, length: int, limits: Limits) -> list[Unit]:
        tokenizer, units = corpus.tokenizer, []
        for place in range(self.depths):
            depth = place / (self.depths - 1) if self.depths > 1 else 0.5
            for trial in range(self.trials):
                # Seeded by what a cell is, so that other lengths or depths do not change it.
                rng = np.random.default_rng([limits.seed, length, round(depth * 1e6), trial])
                key = str(rng.integers(10_000, 100_000))
                tokens, start = self._prompt(tokenizer, key, depth, length, int(rng.integers(6)))
                facts = {
                    "protocol": f"passkey_{self.match}",
                    "wording": WORDING,
                    "length": length,
                    "bos": "none" if start_token(tokenizer, "auto") is None else "document",
                    "depth": depth,
                    "key_start": start,
                    "trial": trial,
                    "size": len(tokens) + self.max_new_tokens,
                    "key": key,
                }
                units.append(Unit(len(units), (length,), tokens, facts))
        return units

    def _prompt(
        self, tokenizer, key: str, depth: float, length: int, offset: int
    ) -> tuple[np.ndarray, int]:
        """Token ids of a prompt of `length - max_new_tokens` tokens, and where its key line is."""
        pieces = self._pieces(tokenizer, key)
        room = length - self.max_new_tokens - pieces.fixed
        sentences = [inside(tokenizer, " " + text) for text in _FILLER]
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
        start = len(pieces.head) + cut
        ids = pieces.head + filler[:cut] + pieces.needle + pieces.resume + filler[cut:]
        return np.asarray(ids + pieces.tail, np.int32), start

    def _pieces(self, tokenizer, key: str) -> Pieces:
        before, after = "", "\n"
        if self.template == "chat":
            messages = [{"role": "user", "content": _SLOT}]
            before, _, after = tokenizer.render_chat(messages).partition(_SLOT)
        special = {"allow_special": self.template == "chat"}  # the template's marks are tokens
        head = list(tokenizer.encode(before + _INSTRUCTION.rstrip(), **special))
        bos = start_token(tokenizer, "auto")
        if bos is not None:
            # Some chat templates write BOS themselves, perhaps behind sentencepiece's blank.
            written = head.index(bos) + 1 if bos in head[:2] else 0
            head = [bos, *head[written:]]
        needle = _NEEDLE + _REPEAT * (self.repeat - 1)
        return Pieces(
            head=head + inside(tokenizer, "\n\n"),
            needle=inside(tokenizer, needle.format(key=key)),
            resume=inside(tokenizer, _RESUME),
            tail=inside(tokenizer, _QUESTION + after + _ANSWER, **special),
        )

    def score(self, model, units: Sequence[Unit], batch: int) -> list[Record]:
        from lcjax.generate import Sampling

        rows = [unit.tokens.tolist() for unit in units]
        rows += rows[:1] * (batch - len(rows))  # always the compiled shape
        answers = model.generate(rows, Sampling(max_new_tokens=self.max_new_tokens))
        records = []
        for unit, answer in zip(units, answers[: len(units)], strict=True):
            verdict = judge(answer, unit.facts["key"], model.tokenizer)
            records.append({"answer": answer, **verdict, "correct": verdict[self.match]})
        return records

    def summarise(self, records: Sequence[Record]) -> Record:
        return {
            "value": sum(record["correct"] for record in records) / len(records),
            "windows": len(records),
            **{match: sum(r[match] for r in records) / len(records) for match in _MATCHES},
        }

    def aggregates(self, cells: Sequence[Record], records: Sequence[Record]) -> Record:
        """k_max, the effective window of Position Interpolation: the largest length that works."""
        found: Record = {}
        for cell in cells:
            entry = found.setdefault(cell["method"], {"k_max_20": 0, "k_max_90": 0})
            for percent in (20, 90):
                if cell["value"] >= percent / 100:
                    entry[f"k_max_{percent}"] = max(entry[f"k_max_{percent}"], cell["length"])
        return found

    def figures(
        self, cells: Sequence[Record], records: Sequence[Record], folder: Path
    ) -> list[Path]:
        from lcjax.evaluation import plots

        title = f"Passkey accuracy, {self.trials} trial{'s' * (self.trials > 1)} a cell"
        return [
            plots.over_lengths(cells, self.metric, folder / f"{self.label}.png"),
            plots.heat_maps(records, title, folder / f"{self.label}_by_depth.png"),
        ]


def judge(answer: str, key: str, tokenizer) -> dict[str, bool]:
    """Whether an answer counts as right, by each of the published rules."""
    digits = re.search(r"\d+", answer)
    expected = inside(tokenizer, " " + key)
    return {
        "first_integer": digits is not None and int(digits.group()) == int(key),
        "first_digits": digits is not None and digits.group() == key,
        "token_ids": inside(tokenizer, " " + answer.strip())[: len(expected)] == expected,
    }
