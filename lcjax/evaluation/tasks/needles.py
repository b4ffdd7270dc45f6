"""Retrieval of something that is hidden at a depth of a generated text, over lengths and depths.

passkey: the answer is a number hidden in repetitive text. The task of Landmark attention (arXiv
  2305.16300, section 4.2), also of Position Interpolation, LongLoRA and YaRN.
kv_retrieval: the value of one key in a JSON object of random UUIDs. Liu et al., Lost in the Middle
  (arXiv 2307.03172, section 3). InfiniteBench's Retrieve.KV has 2,500 pairs and the same score.
niah: a sentence in essays, a needle in a haystack. The grid of Kamradt's test
  (LLMTest_NeedleInAHaystack), as Fu et al. (arXiv 2402.10171) and LCEG (arXiv 2409.12181) run it on
  base models.

The wording is this library's own or that of the file `wording`, and records name it. The length of
a prompt counts everything: BOS, chat template, answer prefix and the tokens to be generated.
Contexts are token ids without special tokens, so that no BOS marks the hidden text.
"""

import abc
import dataclasses
import math
import random
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np

from lcjax.checkpoints.tokenizer import encode_mid_text
from lcjax.errors import InputError, OneOf, PositiveInt
from lcjax.evaluation import plots
from lcjax.evaluation.corpus import SentenceEnds, TokenizedCorpus, TokenizedDocument
from lcjax.evaluation.metrics import infinitebench, qa, rouge
from lcjax.evaluation.prompt import Prompt, Segment
from lcjax.evaluation.prompt_task import Example, GenerationTask
from lcjax.evaluation.statistics import group_by
from lcjax.evaluation.task import Limits, Metric, Record, Records, Task, Unit
from lcjax.evaluation.tasks import local_files
from lcjax.evaluation.tasks.local_files import Wording


@dataclasses.dataclass(frozen=True)
class Placement:
    """The length of a prompt, and the depth of its hidden text."""

    length: int
    depth: float  # 0: the beginning of the context, 1: its end
    # Seeds of the random numbers. Other lengths or depths of a run do not change a question.
    seeds: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class DepthTask(GenerationTask):
    """A text hidden at several depths, with a number of questions for each depth."""

    depths: PositiveInt = 10  # number of depths, from the context's beginning to its end
    # linear: evenly spaced; sigmoid: closer to each other near both ends (`depth_grid`)
    depth_spacing: Annotated[str, OneOf(("linear", "sigmoid"))] = "linear"
    trials: PositiveInt = 1  # questions per length and depth; one makes a cell 0 or 1
    wording: str | None = None  # YAML file with the texts of prompts; null: this library's own

    # Placeholders that texts may have (`local_files.read_wording`).
    placeholders: ClassVar[Mapping[str, str]] = {}

    @abc.abstractmethod
    def example_at(self, corpus: TokenizedCorpus, placement: Placement, limits: Limits) -> Example:
        """Returns the question whose answer is hidden at `placement`."""

    def check(self, limits: Limits, key: str) -> None:
        super().check(limits, key)
        self.read_wording(key)

    def library_texts(self) -> Mapping[str, Any]:
        """Returns this library's own texts."""
        return local_files.library_prompts(self.get_choice_name(type(self)))

    def read_wording(self, key: str) -> Wording:
        return local_files.read_wording(self.wording, self.library_texts(), self.placeholders, key)

    def cached_wording(self, corpus: TokenizedCorpus) -> Wording:
        """Returns the texts, which are read once for all examples."""
        return corpus.once((DepthTask, self), lambda: self.read_wording(self.label))

    def examples(self, corpus: TokenizedCorpus, length: int, limits: Limits) -> Iterator[Example]:
        for depth in depth_grid(self.depths, self.depth_spacing):
            for trial in range(self.trials):
                seeds = (limits.seed, length, round(depth * 1e6), trial)
                example = self.example_at(corpus, Placement(length, depth, seeds), limits)
                fields = {**self.cached_wording(corpus).fields, "depth": depth, "trial": trial}
                yield dataclasses.replace(example, fields={**fields, **example.fields})

    def haystack_size(self, bare: Prompt, min_tokens: int, length: int) -> int:
        """Returns the number of tokens that fill a prompt with its needle alone up to `length`."""
        num_tokens = self.budget(length, self.max_new_tokens).left(bare)
        if num_tokens < min_tokens:
            used = length - num_tokens
            raise InputError(
                f"lengths: {length} is too short for {self.label}, whose instruction, needle,"
                f" question and answer take {used} tokens; use at least {used + min_tokens}"
            )
        return num_tokens

    def overall(self, cells: Records) -> float:
        """Returns the mean over the lengths, as LCEG's table 1 appears to do."""
        return float(np.mean([cell["value"] for cell in cells]))

    def figures(self, cells: Records, records: Records, folder: Path) -> list[Path]:
        trials = "1 trial" if self.trials == 1 else f"{self.trials} trials"
        title = f"{self.metric.heading}, {trials} a cell"
        return [
            *super().figures(cells, records, folder),
            plots.heat_maps(records, title, folder / f"{self.label}_by_depth.png"),
        ]


def depth_grid(count: int, spacing: str) -> list[float]:
    """Returns `count` increasing depths from 0 to 1; a single depth is 0.5.

    `linear` gives evenly spaced depths x. `sigmoid` gives 1 / (1 + exp(-10 (x - 0.5))), rounded to
    5 digits, with ends of exactly 0 and 1. These are the depths of Kamradt's test
    (LLMTest_NeedleInAHaystack, `document_depth_percent_interval_type`), where 35 of them were used
    for Claude 2.1.
    """
    if count == 1:
        return [0.5]
    even = [index / (count - 1) for index in range(count)]
    if spacing == "linear":
        return even
    return [0.0, *(round(1 / (1 + math.exp(5 - 10 * x)), 5) for x in even[1:-1]), 1.0]


_KEY_MATCHES = ("first_integer", "first_digits", "token_ids")


@Task.register_subclass("passkey")
@dataclasses.dataclass(frozen=True)
class Passkey(DepthTask):
    """Five-digit keys at depths that are measured in tokens."""

    scoring_settings: ClassVar[tuple[str, ...]] = ("match",)

    max_new_tokens: int = 10  # counted in the length, like everything else
    repeat: PositiveInt = 2  # how often the line states the key (2 in the published versions)
    # first_integer (YaRN), first_digits (InfiniteBench), token_ids
    match: Annotated[str, OneOf(_KEY_MATCHES)] = "first_integer"

    placeholders: ClassVar[Mapping[str, str]] = {
        "instruction": "", "question": "", "answer_prefix": "", "key_line": "key",
        "key_repeat": "key", "filler": "",
    }  # fmt: skip

    @property
    def metric(self) -> Metric:
        return Metric("accuracy", f"passkey accuracy ({self.match})", False, 2)

    @property
    def main_score(self) -> str:
        return self.match

    def example_at(self, corpus: TokenizedCorpus, placement: Placement, limits: Limits) -> Example:
        rng = np.random.default_rng(placement.seeds)
        key = str(rng.integers(10_000, 100_000))
        wording = self.cached_wording(corpus)
        filler = wording.texts["filler"]
        first = int(rng.integers(len(filler)))
        prompt_encoder = self.prompt_encoder(corpus.tokenizer)
        line, repeat_line = (wording.fill(name, key=key) for name in ("key_line", "key_repeat"))
        text = line + repeat_line * (self.repeat - 1)
        needle = [
            *encode_mid_text(prompt_encoder.tokenizer, text),
            *encode_mid_text(prompt_encoder.tokenizer, "\n"),
        ]
        sentences = [encode_mid_text(prompt_encoder.tokenizer, " " + text) for text in filler]

        bare = prompt_encoder.prompt(_segments(wording.texts, needle))
        min_tokens = 2 * max(map(len, sentences))
        num_tokens = self.haystack_size(bare, min_tokens, placement.length)
        ids, ends = [], [0]
        while len(ids) < num_tokens:
            ids += sentences[(first + len(ends) - 1) % len(sentences)]
            ends.append(min(len(ids), num_tokens))  # the last sentence may be cut
        index = min(ends, key=lambda end: abs(end - placement.depth * num_tokens))
        context = [*ids[:index], *needle, *ids[index:num_tokens]]
        start = bare.start("context_doc") + index
        fields = {"protocol": f"passkey_{self.match}", "key_start": start, "key": key}
        return Example(_segments(wording.texts, context), [key], fields)

    def score_answer(self, answer: str, unit: Unit, tokenizer) -> dict[str, bool]:
        return key_scores(answer, unit.fields["key"], tokenizer, unit.fields.get("ids"))

    def rescore(self, record: Record, tokenizer) -> Record:
        return {**super().rescore(record, tokenizer), "protocol": f"passkey_{self.match}"}

    def aggregates(self, cells: Records, records: Records) -> Record:
        """Returns k_max, the effective window of Position Interpolation, at 20 and 90 % accuracy.

        It is the longest length with at least that accuracy; 0 if there is none.
        """
        aggregates: Record = {}
        for method, group in group_by(cells, "method").items():
            aggregates[method] = {
                f"k_max_{percent}": max(
                    (cell["length"] for cell in group if cell["value"] >= percent / 100), default=0
                )
                for percent in (20, 90)
            }
        return aggregates


def _segments(texts: Mapping[str, str], context: Sequence[int]) -> list[Segment]:
    """Returns the segments of a prompt for the token ids of its context."""
    return [
        Segment("instruction", texts["instruction"]),
        Segment("context_doc", ids=context),
        Segment("question", texts["question"]),
        Segment("answer_prefix", texts["answer_prefix"]),
    ]


def key_scores(
    answer: str, key: str, tokenizer, ids: Sequence[int] | None = None
) -> dict[str, bool]:
    """Returns whether an answer is right, by each of the published rules.

    Args:
      answer: The text of the answer.
      key: The right number.
      tokenizer: The tokenizer of the model.
      ids: The generated tokens; None for those of the text.
    """
    digits = re.search(r"\d+", answer)
    expected = encode_mid_text(tokenizer, " " + key)
    generated = encode_mid_text(tokenizer, " " + answer.strip()) if ids is None else list(ids)
    return {
        "first_integer": digits is not None and int(digits.group()) == int(key),
        "first_digits": digits is not None and digits.group() == key,
        "token_ids": generated[: len(expected)] == expected,
    }


@Task.register_subclass("kv_retrieval")
@dataclasses.dataclass(frozen=True)
class KvRetrieval(DepthTask):
    """The value of one key among as many pairs as fit a length.

    An answer is right if one of its words is the value; `substring` accepts the value anywhere.
    """

    metric: ClassVar[Metric] = Metric("accuracy", "Key-value retrieval, accuracy", False, 2)
    main_score: ClassVar[str] = "word_match"

    max_new_tokens: int = 50  # counted in the length, like everything else; a UUID is about 25

    placeholders: ClassVar[Mapping[str, str]] = {
        "instruction": "", "question": "key", "answer_prefix": "key?"
    }  # fmt: skip

    def example_at(self, corpus: TokenizedCorpus, placement: Placement, limits: Limits) -> Example:
        tokenizer, length = corpus.tokenizer, placement.length
        rng = np.random.default_rng(placement.seeds)
        key, value = _uuid(rng), _uuid(rng)
        needle = f'\n "{key}": "{value}"'
        needle_tokens = len(encode_mid_text(tokenizer, f",{needle}"))
        wording = self.cached_wording(corpus)
        instruction, *question = [
            Segment(name, wording.fill(name, key=key))
            for name in ("instruction", "question", "answer_prefix")
        ]
        bare = self.prompt_encoder(tokenizer).prompt([instruction, *question])
        num_tokens = self.budget(length, self.max_new_tokens).left(bare) - needle_tokens
        pairs: list[str] = []
        while num_tokens > 0:
            pair = f'\n "{_uuid(rng)}": "{_uuid(rng)}"'
            num_tokens -= len(encode_mid_text(tokenizer, f",{pair}"))
            if num_tokens >= 0:
                pairs.append(pair)
        if not pairs:
            raise InputError(
                f"lengths: {length} holds no two pairs of {self.label}; use at least"
                f" {length + 2 * needle_tokens - num_tokens}"
            )
        index = round(placement.depth * len(pairs))
        pairs.insert(index, needle)
        # The first pair has no comma before it.
        texts = [pairs[0], *(f",{pair}" for pair in pairs[1:])]
        ids = [token for text in texts for token in encode_mid_text(tokenizer, text)]
        fields = {"pairs": len(pairs), "place": index, "key": key}
        return Example([instruction, Segment("context_doc", ids=ids), *question], [value], fields)

    def score_answer(self, answer: str, unit: Unit, tokenizer) -> dict[str, float]:
        references = unit.fields["references"]
        return {
            "word_match": infinitebench.kv_retrieval(answer, references[0]),
            "substring": qa.string_match_all(answer, references),
        }


def _uuid(rng: np.random.Generator) -> str:
    return str(uuid.UUID(bytes=rng.bytes(16), version=4))


class Haystack:
    """The documents of a corpus one after another, repeated if a length needs more.

    They are tokenised once, without special tokens.
    """

    MIN_TOKENS: ClassVar[int] = 32  # of a document

    def __init__(self, corpus: TokenizedCorpus, tokens: int, limit: int | None = None):
        """Reads the first `limit` documents (None: all), but no more than hold `tokens` tokens."""
        self._tokenizer = corpus.tokenizer
        gap = encode_mid_text(self._tokenizer, "\n\n")
        documents = self._documents(corpus, tokens, limit)
        if not documents:
            raise InputError(
                f"data: no document of the haystack has {self.MIN_TOKENS} tokens; name a folder"
                " with essays or books"
            )
        self._ids: list[int] = [
            int(token) for document in documents for token in (*document.tokens, *gap)
        ]
        self._ends_sentence = SentenceEnds(self._tokenizer)

    def _documents(
        self, corpus: TokenizedCorpus, tokens: int, limit: int | None
    ) -> list[TokenizedDocument]:
        """Returns the first 1, 2, 4, ... documents with `tokens` tokens in all, or all of them."""
        count = 1
        while True:
            num_documents = count if limit is None else min(count, limit)
            documents = corpus.documents(self.MIN_TOKENS, num_documents)
            enough = sum(map(len, documents)) >= tokens
            if enough or len(documents) < num_documents or num_documents == limit:
                return documents
            count *= 2

    def first(self, tokens: int) -> list[int]:
        """Returns the first `tokens` ids."""
        rounds = -(-tokens // len(self._ids))
        return (self._ids * rounds)[:tokens]

    def sentence_end(self, ids: list[int], depth: float) -> int:
        """Returns the index for a needle at `depth` of `ids`, moved back to the end of a sentence.

        It is len(ids) at depth 1, 0 if no sentence ends before the depth, and not moved if `ids`
        have no end of a sentence.
        """
        if depth >= 1:
            return len(ids)
        index = int(len(ids) * depth)
        for end in range(index, 0, -1):
            if self._ends_sentence(ids[end - 1]):
                return end
        return 0 if any(map(self._ends_sentence, ids[index:])) else index


_NEEDLE_SCORES = ("value_match", "rouge1_f", "word_recall", "word_recall_lceg")


@Task.register_subclass("niah")
@dataclasses.dataclass(frozen=True)
class Niah(DepthTask):
    """Needles at several depths of the run's `data`, after the sentence that ends there."""

    needs_data: ClassVar[bool] = True
    scoring_settings: ClassVar[tuple[str, ...]] = ("measure",)

    max_new_tokens: int = 50  # counted in the length, like everything else
    # random: a key and a number of seven digits, drawn for every cell; kamradt: one fixed sentence.
    # A file of `wording` replaces it, with {key} and {value} where those belong.
    needle: Annotated[str, OneOf(("random", "kamradt"))] = "random"
    # The score in tables. value_match: whether the answer contains the value; rouge1_f: ROUGE-1 F1
    # with the needle's sentence; word_recall: the share of words of the expected answer (the part
    # of the sentence that answers the question) in the answer; word_recall_lceg: the same with
    # LCEG's count of repeated words
    measure: Annotated[str, OneOf(_NEEDLE_SCORES)] = "value_match"

    placeholders: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("instruction", "sentence", "question", "answer_prefix", "value", "answer"), "key? value?"
    )

    @property
    def label(self) -> str:
        return self.name or ("niah" if self.needle == "random" else f"niah_{self.needle}")

    @property
    def metric(self) -> Metric:
        return Metric(self.measure, f"needle in a haystack ({self.measure})", False, 2)

    @property
    def main_score(self) -> str:
        return self.measure

    def read_wording(self, key: str) -> Wording:
        wording = super().read_wording(key)
        for name in ("value", "answer"):
            if not wording.texts[name].strip():
                raise InputError(
                    f"{key}.wording={self.wording}: {name} is empty, so every answer would contain"
                    " it; give the text that a right answer contains"
                )
        return wording

    def example_at(self, corpus: TokenizedCorpus, placement: Placement, limits: Limits) -> Example:
        haystack = corpus.once(
            (Haystack, limits),
            lambda: Haystack(corpus, max(limits.lengths), limits.max_documents),
        )
        rng = random.Random(f"niah {' '.join(map(str, placement.seeds))}")
        texts = self._texts(self.cached_wording(corpus), rng)
        prompt_encoder = self.prompt_encoder(corpus.tokenizer)
        needle = encode_mid_text(prompt_encoder.tokenizer, " " + texts["sentence"])
        bare = prompt_encoder.prompt(_segments(texts, needle))
        ids = haystack.first(self.haystack_size(bare, haystack.MIN_TOKENS, placement.length))
        index = haystack.sentence_end(ids, placement.depth)
        fields = {
            "protocol": f"niah_{self.needle}",
            "needle": texts["sentence"],
            "needle_answer": texts["answer"],
            "needle_start": bare.start("context_doc") + index,
        }
        segments = _segments(texts, [*ids[:index], *needle, *ids[index:]])
        return Example(segments, [texts["value"]], fields)

    def library_texts(self) -> Mapping[str, str]:
        library = local_files.library_prompts("niah")
        return {"instruction": library["instruction"], **library[self.needle]}

    def _texts(self, wording: Wording, rng: random.Random) -> dict[str, str]:
        """Returns the texts of a prompt by name, filled with a random key and value."""
        library = local_files.library_prompts("niah")
        key = f"{rng.choice(library['colours'])} {rng.choice(library['places'])}"
        value = str(rng.randint(1_000_000, 9_999_999))
        return {name: wording.fill(name, key=key, value=value) for name in wording.texts}

    def score_answer(self, answer: str, unit: Unit, tokenizer) -> dict[str, float]:
        expected = unit.fields["needle_answer"]
        return {
            "value_match": qa.value_match(answer, unit.fields["references"]),
            # A right answer that is shorter than the needle's sentence does not reach 1. Needle
            # scripts store ten times this.
            "rouge1_f": rouge.rouge_n(answer, unit.fields["needle"], 1, stem=True),
            "word_recall": qa.word_recall(answer, expected),
            "word_recall_lceg": qa.word_recall(answer, expected, distinct=False),
        }

    def aggregates(self, cells: Records, records: Records) -> Record:
        """Returns the mean over all cells, and over those within the trained length."""
        aggregates = {}
        for method, group in group_by(cells, "method").items():
            values = [cell["value"] for cell in group]
            within = [cell["value"] for cell in group if cell["length"] <= cell["trained"]]
            aggregates[method] = {
                "mean": round(sum(values) / len(values), 4),
                "mean_within_trained": round(sum(within) / len(within), 4) if within else None,
            }
        return aggregates
