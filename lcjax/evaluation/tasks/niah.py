"""A needle in a haystack: one sentence hidden in essays, over lengths, depths and trials.

The grid of Kamradt's test (LLMTest_NeedleInAHaystack), as Fu et al. (arXiv 2402.10171) and LCEG
(arXiv 2409.12181) run it on base models. Here the length counts everything, needles are random, and
token ids are put together without specials, so that no BOS marks the needle.
"""

import dataclasses
import random
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from lcjax.checkpoints.tokenizer import inside
from lcjax.errors import InputError, one_of
from lcjax.evaluation import metrics
from lcjax.evaluation.corpus import Corpus, Document
from lcjax.evaluation.generation import Example
from lcjax.evaluation.prompt import Layout, Segment
from lcjax.evaluation.task import Limits, Metric, Record, Task, Unit
from lcjax.evaluation.tasks.grid import DepthTask, Spot

_ENDS = ".!?"


class Haystack:
    """The documents of a corpus one after another, repeated where a length needs more.

    Tokenised once, without special tokens. A sentence ends with a token that ends in . ! or ? as in
    Kamradt's test.
    """

    LEAST: ClassVar[int] = 32  # minimum tokens of a document

    def __init__(self, corpus: Corpus, tokens: int, limit: int | None = None):
        """Reads the first `limit` documents (None: all), but no more than hold `tokens` tokens."""
        self._tokenizer = corpus.tokenizer
        gap = inside(self._tokenizer, "\n\n")
        documents = self._documents(corpus, tokens, limit)
        if not documents:
            raise InputError(
                f"data: no document of the haystack has {self.LEAST} tokens; name a folder with"
                " essays or books"
            )
        self._ids: list[int] = [
            int(token) for document in documents for token in (*document.tokens, *gap)
        ]
        self._ends: dict[int, bool] = {}  # by token

    def _documents(self, corpus: Corpus, tokens: int, limit: int | None) -> list[Document]:
        """Tokenises no more documents than needed."""
        count = 1
        while True:
            num_documents = count if limit is None else min(count, limit)
            documents = corpus.documents(self.LEAST, num_documents)
            enough = sum(map(len, documents)) >= tokens
            if enough or len(documents) < num_documents or num_documents == limit:
                return documents
            count *= 2

    def first(self, tokens: int) -> list[int]:
        """The first `tokens` ids."""
        rounds = -(-tokens // len(self._ids))
        return (self._ids * rounds)[:tokens]

    def border(self, ids: list[int], depth: float) -> int:
        """The index for a needle: the share `depth` of `ids`, moved back to the end of a sentence.

        It is len(ids) at depth 1, and 0 if no sentence ends before.
        """
        index = int(len(ids) * depth)
        if depth >= 1:
            return len(ids)
        while index and not self._ends_sentence(ids[index - 1]):
            index -= 1
        return index

    def _ends_sentence(self, token: int) -> bool:
        if token not in self._ends:
            text = self._tokenizer.decode(np.array([token])).rstrip("\"')\u201d\u2019")
            self._ends[token] = text.endswith(tuple(_ENDS))
        return self._ends[token]


_INSTRUCTION = "Below is a long text, and after it a question about one sentence in it.\n\n"
_RANDOM = ("The code of the {key} is {value}.", "\n\nQuestion: What is the code of the {key}?")
_ANSWER = "\nAnswer: The code of the {key} is"
# The fixed needle is of Kamradt's kind: a thing to do in one city, in this library's words.
_FIXED = (
    "The nicest thing to do in San Francisco is to have a sandwich in Dolores Park on a sunny day.",
    "\n\nQuestion: What is the nicest thing to do in San Francisco?",
    "\nAnswer: The nicest thing to do in San Francisco is",
    "have a sandwich in Dolores Park",
)
_PLACES = (
    "lighthouse", "orchard", "foundry", "chapel", "granary", "ferry", "theatre", "quarry",
    "brewery", "station", "museum", "bakery", "shipyard", "library", "windmill", "harbour",
)  # fmt: skip
_COLOURS = ("amber", "crimson", "emerald", "golden", "ivory", "scarlet", "silver", "violet")
_SCORES = ("value_match", "rouge1_f", "word_recall", "word_recall_lceg")
_NEEDLES = ("random", "kamradt")


@dataclasses.dataclass(frozen=True)
class Needle:
    """What is hidden and asked for."""

    sentence: str
    question: str
    answer: str  # the beginning of the model's answer
    value: str  # what has to be in it


@Task.register_subclass("niah")
@dataclasses.dataclass(frozen=True)
class Niah(DepthTask):
    """Needles at evenly spaced depths of the run's `data`, after the sentence that ends there."""

    needs_data: ClassVar[bool] = True
    judging: ClassVar[tuple[str, ...]] = ("measure",)

    max_new_tokens: int = 50  # counted in the length, like everything else
    # random: a key and a number of seven digits, drawn for every cell; kamradt: one fixed sentence
    needle: str = "random"
    # What tables show. value_match: the value stands in the answer; rouge1_f and word_recall: how
    # much of the needle's sentence does; word_recall_lceg: as LCEG counts words that stand twice
    measure: str = "value_match"

    @property
    def label(self) -> str:
        return self.name or ("niah" if self.needle == "random" else f"niah_{self.needle}")

    @property
    def metric(self) -> Metric:
        return Metric(self.measure, f"needle in a haystack ({self.measure})", False, 2)

    @property
    def shown(self) -> str:
        return self.measure

    def check(self, limits: Limits, key: str) -> None:
        super().check(limits, key)
        for field, known in (("needle", _NEEDLES), ("measure", _SCORES)):
            one_of(f"{key}.{field}", getattr(self, field), known)

    def hidden(self, corpus: Corpus, spot: Spot, limits: Limits) -> Example:
        haystack = corpus.once(
            (Haystack, limits),
            lambda: Haystack(corpus, max(limits.lengths), limits.max_documents),
        )
        needle = self._needle(random.Random(f"niah {' '.join(map(str, spot.seeds))}"))
        layout = self.layout(corpus.tokenizer)
        segments, start = self._segments(layout, haystack, needle, spot.depth, spot.length)
        facts = {"protocol": f"niah_{self.needle}", "needle": needle.sentence}
        return Example(segments, [needle.value], {**facts, "needle_start": start})

    def _needle(self, rng: random.Random) -> Needle:
        if self.needle == "kamradt":
            return Needle(*_FIXED)
        key = f"{rng.choice(_COLOURS)} {rng.choice(_PLACES)}"
        value = str(rng.randint(1_000_000, 9_999_999))
        sentence, question = (text.format(key=key, value=value) for text in _RANDOM)
        return Needle(sentence, question, _ANSWER.format(key=key), value)

    def _segments(
        self, layout: Layout, haystack: Haystack, needle: Needle, depth: float, length: int
    ) -> tuple[list[Segment], int]:
        """A prompt that fills the length, and at which token its needle begins."""
        ids = inside(layout.tokenizer, " " + needle.sentence)

        def around(context: Sequence[int]) -> list[Segment]:
            return [
                Segment("instruction", _INSTRUCTION),
                Segment("context_doc", ids=context),
                Segment("question", needle.question),
                Segment("answer_prefix", needle.answer),
            ]

        bare = layout.prompt(around(ids))
        room = self.budget(length, self.max_new_tokens).left(bare)
        if room < haystack.LEAST:
            least = length - room + haystack.LEAST
            raise InputError(
                f"lengths: {length} leaves no room for a haystack in {self.label}, whose"
                f" instruction, needle and question take {length - room} tokens; use at least"
                f" {least}"
            )
        text = haystack.first(room)
        cut = haystack.border(text, depth)
        context = [*text[:cut], *ids, *text[cut:]]
        return around(context), bare.start("context_doc") + cut

    def judge(self, answer: str, unit: Unit, tokenizer) -> dict[str, float]:
        needle = unit.facts["needle"]
        return {
            "value_match": metrics.value_match(answer, unit.facts["references"]),
            "rouge1_f": metrics.rouge1_f(answer, needle),
            "word_recall": metrics.word_recall(answer, needle),
            "word_recall_lceg": metrics.word_recall(answer, needle, distinct=False),
        }

    def aggregates(self, cells: Sequence[Record], records: Sequence[Record]) -> Record:
        """The mean over all cells, and over those within the trained length."""
        found = {}
        for method in dict.fromkeys(cell["method"] for cell in cells):
            own = [cell for cell in cells if cell["method"] == method]
            inside = [cell["value"] for cell in own if cell["length"] <= cell["trained"]]
            mean = sum(cell["value"] for cell in own) / len(own)
            found[method] = {
                "mean": round(mean, 4),
                "mean_within_trained": round(sum(inside) / len(inside), 4) if inside else None,
            }
        return found
