"""Key-value retrieval: the value of one key in a JSON object of random UUIDs, made from a seed.

Liu et al., Lost in the Middle (arXiv 2307.03172, section 3); InfiniteBench's Retrieve.KV has 2,500
pairs, the asked one swept through them, and its score. Here a prompt of length L is filled with as
many pairs as it holds, everything counted, and the asked one is at evenly spaced depths.
"""

import dataclasses
import uuid

import numpy as np

from lcjax.checkpoints.tokenizer import inside
from lcjax.errors import InputError
from lcjax.evaluation.corpus import Corpus
from lcjax.evaluation.generation import Example
from lcjax.evaluation.metrics import infinitebench, string_match_all
from lcjax.evaluation.prompt import Segment
from lcjax.evaluation.task import Limits, Metric, Task, Unit
from lcjax.evaluation.tasks.grid import DepthTask, Spot

_INSTRUCTION = "Here is a JSON object. You will be asked for the value of one of its keys.\n\n{"
_QUESTION = '\n}}\n\nKey: "{key}"'
_ANSWER = "\nThe value of this key is"


@Task.register_subclass("kv_retrieval")
@dataclasses.dataclass(frozen=True)
class KvRetrieval(DepthTask):
    """Right where the value is a word of the answer; `substring` counts it anywhere."""

    max_new_tokens: int = 50  # counted in the length, like everything else; a UUID is about 25

    @property
    def metric(self) -> Metric:
        return Metric("accuracy", "Key-value retrieval, accuracy", False, 2)

    @property
    def shown(self) -> str:
        return "word_match"

    def hidden(self, corpus: Corpus, spot: Spot, limits: Limits) -> Example:
        tokenizer, length = corpus.tokenizer, spot.length
        rng = np.random.default_rng(spot.seeds)
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
        place = round(spot.depth * len(pairs))
        pairs.insert(place, needle)
        # The first one has no comma before it.
        parts = [pairs[0], *(f",{pair}" for pair in pairs[1:])]
        ids = [token for part in parts for token in inside(tokenizer, part)]
        facts = {"pairs": len(pairs), "place": place, "key": key}
        return Example([frame[0], Segment("context_doc", ids=ids), *frame[1:]], [value], facts)

    def judge(self, answer: str, unit: Unit, tokenizer) -> dict[str, float]:
        references = unit.facts["references"]
        return {
            "word_match": infinitebench.kv_retrieval(answer, references[0]),
            "substring": string_match_all(answer, references),
        }


def _uuid(rng: np.random.Generator) -> str:
    return str(uuid.UUID(bytes=rng.bytes(16), version=4))
