"""Tasks with prompts, and tasks whose answers a model generates."""

import abc
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np

from lcjax.errors import OneOf, PositiveInt
from lcjax.evaluation.corpus import TokenizedCorpus
from lcjax.evaluation.prompt import TEMPLATES, Budget, Prompt, PromptEncoder, Segment, fit
from lcjax.evaluation.split import generate
from lcjax.evaluation.task import Limits, Record, Records, Task, Unit, pad_batch
from lcjax.generation.sampling import GeneratedText, Sampling
from lcjax.generation.session import round_up_to_bucket

if TYPE_CHECKING:  # the package imports this module
    from lcjax.evaluation.tasks.local_files import Wording


@dataclasses.dataclass(frozen=True)
class Example:
    """One question: the segments of its prompt, the references, and fields of its record."""

    segments: Sequence[Segment]
    references: Sequence[str]
    fields: Record = dataclasses.field(default_factory=dict)
    max_new_tokens: int | None = None  # None: the task's
    stop: tuple[str, ...] = ()  # the answer ends before the first of these
    template: str | None = None  # None: the task's
    sampling: Sampling | None = None  # None: greedy
    cut_mark: str = ""  # inserted before the question if the text's end is cut


@dataclasses.dataclass(frozen=True)
class PromptTask(Task):
    """A task of questions as prompts; prompts of similar length run in one compiled function."""

    needs_data: ClassVar[bool] = False
    cut: ClassVar[str] = "refuse"  # how `fit` shortens prompts over budget
    # Fields of GenerationTask; without annotations these are not fields here.
    template = "none"
    max_new_tokens = None

    @abc.abstractmethod
    def examples(self, corpus: TokenizedCorpus, length: int, limits: Limits) -> Iterable[Example]:
        """Returns the questions of one length, which depend on these arguments only."""

    def budget(self, length: int, new_tokens: int) -> Budget:
        """Returns the parts of a prompt that count towards `length`."""
        return Budget(length, new_tokens)

    def read_wording(self, key: str) -> "Wording | None":
        """Returns the texts of prompts; errors name `key`. None: the task has no such texts."""
        return None

    def wording_texts(self) -> Mapping[str, Any]:
        """Returns the texts of prompts in the form of a `wording` file, for the first record."""
        wording = self.read_wording(self.label)
        return {} if wording is None else wording.section

    def prompt_encoder(self, tokenizer) -> PromptEncoder:
        return PromptEncoder(tokenizer, self.template)

    def plan(self, corpus: TokenizedCorpus, length: int, limits: Limits) -> list[Unit]:
        prompt_encoders = {kind: PromptEncoder(corpus.tokenizer, kind) for kind in TEMPLATES}
        units = [
            self._unit(index, example, prompt_encoders[example.template or self.template], length)
            for index, example in enumerate(self.examples(corpus, length, limits))
        ]
        if units and (texts := self.wording_texts()):
            units[0].fields["wording_texts"] = texts
        return units

    def _unit(
        self, index: int, example: Example, prompt_encoder: PromptEncoder, length: int
    ) -> Unit:
        new = example.max_new_tokens or self.max_new_tokens
        budget = self.budget(length, new)
        prompt = prompt_encoder.prompt(example.segments)
        prompt = fit(prompt, budget, prompt_encoder.tokenizer, self.cut, self.label)
        fields = {
            "protocol": self.label,
            "length": length,
            **prompt_encoder.fields,
            "budget": budget.counts,
            "prompt_tokens": len(prompt.ids),
            "max_new_tokens": new,
            "size": len(prompt.ids) + new,
            "truncated": prompt.truncated,
            "references": list(example.references),
            **example.fields,
        }
        if index == 0:
            fields["prompt"] = prompt_encoder.tokenizer.decode(prompt.ids)
        # Prompts of one bucket (48, 64, 96, 128, 192, ... tokens) share a batch.
        bucket = round_up_to_bucket(len(prompt.ids), 2, least=48)
        shape = (bucket, new, tuple(example.stop))
        if example.sampling is not None:
            shape += (example.sampling,)
        return Unit(index, shape, prompt.ids, fields, prompt)

    def prompts(self, unit: Unit) -> list[np.ndarray]:
        return [unit.tokens]


@dataclasses.dataclass(frozen=True)
class GenerationTask(PromptTask):
    """Answers that are generated, greedily by default, and scored by rules.

    A subclass defines `examples` and `score_answer`. A record holds all scores of an answer, and
    tables show the score named `main_score`.
    """

    generates: ClassVar[bool] = True

    max_new_tokens: PositiveInt = 64  # counted in the length, like everything else
    # Chat: the tokenizer's chat template around the text
    template: Annotated[str, OneOf(TEMPLATES)] = "none"

    @abc.abstractmethod
    def score_answer(self, answer: str, unit: Unit, tokenizer) -> dict[str, float]:
        """Returns the scores of an answer by name, 0 to 1.

        `unit.fields` holds the references, and the generated tokens `ids` if the model has any.
        """

    @property
    @abc.abstractmethod
    def main_score(self) -> str:
        """The name of the score that tables show."""

    def score(self, model, units: Sequence[Unit], batch: int) -> list[Record]:
        _, new, stop, *sampling = units[0].shape
        prompts: list[Prompt] = pad_batch([unit.prompt for unit in units], batch)
        sampling = dataclasses.replace(*sampling or [Sampling()], max_new_tokens=new, stop=stop)
        answers = generate(model, prompts, sampling.with_seeds(prompt.ids for prompt in prompts))
        return [
            self._record(answer, unit, model.tokenizer)
            for unit, answer in zip(units, answers[: len(units)], strict=True)
        ]

    def _record(self, answer: str, unit: Unit, tokenizer) -> Record:
        details = {}
        if isinstance(answer, GeneratedText):
            details = {"ids": list(answer.ids), "finish": answer.finish}
            unit = dataclasses.replace(unit, fields={**unit.fields, **details})
        scores = {k: float(v) for k, v in self.score_answer(answer, unit, tokenizer).items()}
        return {
            "answer": str(answer),
            **details,
            "scores": scores,
            "correct": scores[self.main_score],
        }

    def rescore(self, record: Record, tokenizer) -> Record:
        unit = Unit(record["window"], (), np.zeros(0, np.int32), record)
        return {**record, **self._record(record["answer"], unit, tokenizer)}

    def summarise(self, records: Records) -> Record:
        """Returns the mean of the main score, and of every other score that all records have."""
        names = [n for n in records[0]["scores"] if all(n in r["scores"] for r in records)]
        means = {name: float(np.mean([r["scores"][name] for r in records])) for name in names}
        value = float(np.mean([record["correct"] for record in records]))
        return {"value": value, **counts(records), **means}


def counts(records: Records) -> Record:
    """Returns the numbers of examples, of empty answers, and of shortened prompts."""
    return {
        "windows": len(records),
        "empty": sum(not record["answer"].strip() for record in records),
        "truncated": sum(bool(r["truncated"] or r.get("cut_tokens")) for r in records),
    }
