"""Key-value retrieval: the value of one key in a JSON object of random UUIDs, made from a seed.

Liu et al., Lost in the Middle (arXiv 2307.03172, section 3); InfiniteBench's Retrieve.KV has 2,500
pairs, the asked one swept through them, and its score. Here a prompt of length L is filled with as
many pairs as it holds, everything counted, and the asked one is at evenly spaced depths.
"""

import dataclasses
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from lcjax.convert.tokenizer import inside
from lcjax.errors import InputError, whole_numbers
from lcjax.evaluation.corpus import Corpus
from lcjax.evaluation.generation import Example, GenerationTask
from lcjax.evaluation.metrics import infinitebench, string_match_all
from lcjax.evaluation.prompt import Segment
from lcjax.evaluation.report import plots
from lcjax.evaluation.task import Limits, Metric, Record, Task, Unit

WORDING = "lcjax-1"
_INSTRUCTION = "Here is a JSON object. You will be asked for the value of one of its keys.\n\n{"
_QUESTION = '\n}}\n\nKey: "{key}"'
_ANSWER = "\nThe value of this key is"


@Task.register_subclass("kv_retrieval")
@dataclasses.dataclass(frozen=True)
class KvRetrieval(GenerationTask):
    """Right where the value is a word of the answer; `substring` counts it anywhere."""

    max_new_tokens: int = 50  # counted in the length, like everything else; a UUID is about 25
    depths: int = 10  # places of the asked pair, from the first to the last one
    trials: int = 1  # objects per length and depth

    @property
    def label(self) -> str:
        return self.name or "kv_retrieval"

    @property
    def metric(self) -> Metric:
        return Metric("accuracy", "Key-value retrieval, accuracy", False, 2)

    @property
    def shown(self) -> str:
        return "word_match"

    def check(self, limits: Limits, key: str) -> None:
        super().check(limits, key)
        whole_numbers(key, self, 1, "depths", "trials")

    def examples(self, corpus: Corpus, length: int, limits: Limits) -> Iterator[Example]:
        for place in range(self.depths):
            depth = place / (self.depths - 1) if self.depths > 1 else 0.5
            for trial in range(self.trials):
                # Seeded by what a cell is, so that other lengths or depths do not change it.
                seeds = [limits.seed, length, round(depth * 1e6), trial]
                rng = np.random.default_rng(seeds)
                yield self._example(corpus.tokenizer, length, depth, trial, rng)

    def _example(
        self, tokenizer, length: int, depth: float, trial: int, rng: np.random.Generator
    ) -> Example:
        key, value = _uuid(rng), _uuid(rng)
        needle = f'\n "{key}": "{value}"'
        size = len(inside(tokenizer, f",{needle}"))
        frame = [
            Segment("instruction", _INSTRUCTION),
            Segment("question", _QUESTION.format(key=key)),
            Segment("answer_prefix", _ANSWER),
        ]
        empty = self.layout(tokenizer).prompt(frame)
        room = self.budget(length, self.max_new_tokens).left(empty) - size
        pairs: list[str] = []
        while room > 0:
            pair = f'\n "{_uuid(rng)}": "{_uuid(rng)}"'
            room -= len(inside(tokenizer, f",{pair}"))
            if room >= 0:
                pairs.append(pair)
        if not pairs:
            least = length + 2 * size - room
            raise InputError(
                f"lengths: {length} holds no two pairs of {self.label}; use at least {least}"
            )
        place = round(depth * len(pairs))
        pairs.insert(place, needle)
        # The first one has no comma before it.
        parts = [pairs[0], *(f",{pair}" for pair in pairs[1:])]
        ids = [token for part in parts for token in inside(tokenizer, part)]
        facts = {
            "wording": WORDING, "depth": depth, "trial": trial, "pairs": len(pairs),
            "place": place, "key": key,
        }  # fmt: skip
        return Example([frame[0], Segment("context_doc", ids=ids), *frame[1:]], [value], facts)

    def judge(self, answer: str, unit: Unit, tokenizer) -> dict[str, float]:
        references = unit.facts["references"]
        return {
            "word_match": infinitebench.kv_retrieval(answer, references[0]),
            "substring": string_match_all(answer, references),
        }

    def references(self, record: Record) -> list[str]:
        return list(record["references"])

    def figures(
        self, cells: Sequence[Record], records: Sequence[Record], folder: Path
    ) -> list[Path]:
        title = f"Key-value retrieval, {self.trials} trial{'s' * (self.trials > 1)} a cell"
        return [
            *super().figures(cells, records, folder),
            plots.heat_maps(records, title, folder / f"{self.label}_by_depth.png"),
        ]


def _uuid(rng: np.random.Generator) -> str:
    return str(uuid.UUID(bytes=rng.bytes(16), version=4))
