"""InfiniteBench (arXiv 2402.13718): twelve tasks from the official JSONL files.

Prompts are those of one family of the official `prompt.py` if that is in the folder or its src/,
and this library's own otherwise. The middle of a prompt over the budget is cut; the budget does not
count the answer, and generation is greedy without a stop. Scores are the official ones; if the
official scorer raises an error (a decimal for Math.Find's whole number), the answer counts as
wrong.
"""

import bisect
import dataclasses
import functools
import json
import random
import re
import statistics
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, ClassVar

from lcjax.errors import InputError, OneOf
from lcjax.evaluation.corpus import TokenizedCorpus
from lcjax.evaluation.metrics import infinitebench as scores
from lcjax.evaluation.metrics import qa, rouge
from lcjax.evaluation.prompt_task import Example
from lcjax.evaluation.task import Limits, Record, Task
from lcjax.evaluation.tasks import local_files
from lcjax.evaluation.tasks.benchmark import DataSet, Score, TextCutBenchmark, best_of, by_name

# The official files of four tasks are generated; `GENERATED` makes such rows with this library's
# own text. The answers are digits between equal lines (PassKey, Number), the value of a key among
# many pairs of UUIDs (KV), and a rank in a list of numbers (Math.Find).
_NUM_DEPTHS = 59  # one every 90 of 5,220 lines
_FILLER = "The road is long. The hill is steep. The wind is cold. Off we go. Up and down again."
_NEEDLE = "The {thing} is {key}. Keep it in mind: {key} is the {thing}."
# Index of the answer in the sorted distinct values; None is their median.
_RANKS = {
    "largest": -1, "second largest": -2, "third largest": -3, "smallest": 0, "second smallest": 1,
    "third smallest": 2, "median": None,
}  # fmt: skip


def _hidden_digits(thing: str, key: Callable[[random.Random], str]) -> Callable[..., dict]:
    def row(rng: random.Random, units: int, index: int, count: int) -> dict:
        digits, depth = key(rng), index * _NUM_DEPTHS // count
        lines = [_FILLER] * units
        lines.insert(
            round(units * depth / (_NUM_DEPTHS - 1)), _NEEDLE.format(thing=thing, key=digits)
        )
        return _row("\n".join(lines), f"What is the {thing}?", digits)

    return row


def _five_digits(rng: random.Random) -> str:
    return f"{rng.randrange(100_000):05}"


def _ten_digits(rng: random.Random) -> str:
    """Returns five random digits, with five copies inserted beside random ones."""
    digits = _five_digits(rng)
    while len(digits) < 10:
        index = rng.randrange(len(digits))
        digits = digits[:index] + digits[index] + digits[index:]
    return digits


def _pairs(rng: random.Random, units: int, index: int, count: int) -> dict:
    keys, values = (
        [str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in range(units)]
        for _ in range(2)
    )
    pair = index * units // count
    return _row(json.dumps(dict(zip(keys, values))), f'Key: "{keys[pair]}"\nValue:', values[pair])


def _numbers(rng: random.Random, units: int, index: int, count: int) -> dict:
    """Returns a row of numbers from 0 to 99; the bound that the question concerns is random."""
    name, rank = list(_RANKS.items())[index % len(_RANKS)]
    low, high = rng.randint(0, 19), rng.randint(79, 99)
    upper = rank < 0 if rank is not None else rng.random() < 0.5
    low, high = (0, high) if upper else (low, 99)
    numbers: list[int] = []
    while len(set(numbers)) < 3:  # there must be a third largest
        numbers = [rng.randint(low, high) for _ in range(units)]
    answer = statistics.median(numbers) if rank is None else sorted(set(numbers))[rank]
    answer = int(answer) if answer == int(answer) else answer
    return _row(str(numbers), f"The {name} number of the list is:", answer)


def _row(context: str, question: str, answer: str | int | float) -> dict:
    return {"context": context, "input": question, "answer": [answer], "options": []}


@dataclasses.dataclass(frozen=True)
class GeneratedSet:
    """A generated task: row(rng, units, index, count) is the `index`-th of `count` questions."""

    count: int  # questions of the official file
    units: int  # lines, pairs or numbers in each of its contexts
    row: Callable[..., dict]
    min_units: int = 10

    def max_units(self, fits: Callable[[int], bool]) -> int:
        """Returns the largest number of units that fits, up to the official one, or `min_units`."""
        if fits(self.units):
            return self.units
        numbers = range(self.min_units + 1, self.units)
        return self.min_units + bisect.bisect_left(numbers, True, key=lambda n: not fits(n))


GENERATED = {
    "passkey": GeneratedSet(590, 5220, _hidden_digits("pass key", _five_digits)),
    "number_string": GeneratedSet(590, 5220, _hidden_digits("sequence of digits", _ten_digits)),
    "kv_retrieval": GeneratedSet(500, 2500, _pairs),
    "math_find": GeneratedSet(350, 60_000, _numbers),
}


SOURCE = (
    "InfiniteBench's data (Hugging Face: xinrongzhang2022/InfiniteBench), one <task>.jsonl a task;"
    " src/prompt.py of its code belongs beside them"
)
_FIELDS = ("context", "input", "answer", "options")
_VARIABLES = {
    "yarn-mistral": "yarn_mistral_templates", "gpt4": "gpt4_templates",
    "claude2": "claude2_templates",
}  # fmt: skip
# Types of labels that are no texts.
_LABEL_TYPES = {"code_run": int, "math_calc": int, "math_find": int | float}
_MULTIPLE_CHOICE = ("code_debug", "longbook_choice_eng")
_OPTIONS = ("OPTION_A", "OPTION_B", "OPTION_C", "OPTION_D")


def _of_label(metric: Callable) -> Score:
    return lambda answer, fields: metric(answer, fields["references"])


def _math_find(answer: str, fields: Record) -> float:
    try:
        return scores.math_find(answer, fields["references"])
    except ValueError:  # the official scorer raises
        return 0.0


def _lsum(answer: str, reference: str) -> float:
    return rouge.rouge_lsum(answer, reference, stem=False)


_DIGITS = {"first_digits": _of_label(scores.digits)}
_CHOICE = {"choice": _of_label(scores.choice)}
_DEBUG = {"code_debug": _of_label(scores.code_debug), "letter": _of_label(scores.option_letter)}
_EXACT_NUMBER = _of_label(functools.partial(scores.math_find, parity=False))
_FIND = {"first_number": _math_find, "exact_number": _EXACT_NUMBER}
_SETS = (
    DataSet("passkey", "retrieval", 6, _DIGITS),
    DataSet("number_string", "retrieval", 12, _DIGITS),
    DataSet("kv_retrieval", "retrieval", 50, {"word_match": _of_label(scores.kv_retrieval)}),
    DataSet("longbook_sum_eng", "english", 1200, {"rouge_lsum": best_of(_lsum)}),
    DataSet("longbook_qa_eng", "english", 40, {"qa_f1": best_of(qa.qa_f1)}),
    DataSet("longbook_choice_eng", "english", 40, _CHOICE),
    DataSet("longdialogue_qa_eng", "english", 40, {"name": _of_label(scores.dialogue)}),
    DataSet("longbook_qa_chn", "chinese", 40, {"character_f1": best_of(qa.qa_f1_characters)}),
    DataSet("code_debug", "code", 5, _DEBUG),
    DataSet("code_run", "code", 5, {"last_number": _of_label(scores.code_run)}),
    DataSet("math_calc", "math", 30_000, {"prefix": _of_label(scores.math_calc)}),
    DataSet("math_find", "math", 3, _FIND),
)


@Task.register_subclass("infinitebench")
@dataclasses.dataclass(frozen=True)
class InfiniteBench(TextCutBenchmark):
    """InfiniteBench's tasks; the official length of prompts is 131,072 tokens.

    Generated tasks have the official number of questions. Their contexts have the official number
    of lines, pairs or numbers, or as many as fit the length uncut.
    """

    datasets: ClassVar[dict[str, DataSet]] = by_name(_SETS)
    title: ClassVar[str] = "InfiniteBench"
    source: ClassVar[str] = SOURCE

    # Whose official prompts: yarn-mistral (for base models, with the answer's beginning), gpt4,
    # claude2
    family: Annotated[str, OneOf(_VARIABLES)] = "yarn-mistral"
    # A YAML file with your own prompts; null: the official ones in the folder, else this library's
    wording: str | None = None
    # Make passkey, number_string, kv_retrieval and math_find from the run's seed, without files
    generated: bool = False

    def wording_texts(self) -> Record:
        return {data.name: self._template(data.name).text for data in self.selection()}

    def has_file(self, data: DataSet) -> bool:
        return not (self.generated and data.name in GENERATED)

    def files(self, name: str) -> tuple[str, ...]:
        return f"{name}.jsonl", f"data/{name}.jsonl", f"data/InfiniteBench/{name}.jsonl"

    def check(self, limits: Limits, key: str) -> None:
        super().check(limits, key)
        for data in self.selection():
            self._template(data.name, key)

    def read(self, data: DataSet, path: Path, corpus: TokenizedCorpus) -> Iterator[Example]:
        template = self._template(data.name)

        def parse(number: int, row: dict) -> Example:
            return _example(row, data.name, *template, {"line": number, "id": row.get("id")})

        return local_files.rows(path, _FIELDS, parse)

    def examples_of(
        self, data: DataSet, corpus: TokenizedCorpus, length: int, limits: Limits
    ) -> Iterator[Example]:
        if self.has_file(data):
            yield from super().examples_of(data, corpus, length, limits)
            return
        generated, template = GENERATED[data.name], self._template(data.name)
        count = self.max_examples or generated.count

        def whole_example(index: int, units: int) -> Example | None:
            """Returns the prepared example, or None if it would be cut."""
            rng = random.Random(f"infinitebench {limits.seed} {data.name} {index}")
            row = generated.row(rng, units, index, count)
            fields = {"source": f"generated, {local_files.PROMPTS_VERSION}", "units": units}
            example = _example(row, data.name, *template, fields)
            example = self.prepare(example, data, corpus.tokenizer, length)
            prompt = self.prompt_encoder(corpus.tokenizer).prompt(example.segments)
            is_over = self.budget(length, example.max_new_tokens).left(prompt) < 0
            return None if is_over or example.fields.get("cut_tokens") else example

        max_units = generated.max_units(lambda units: whole_example(0, units) is not None)
        for index in range(count):
            units = max_units
            while (example := whole_example(index, units)) is None:
                if units == generated.min_units:
                    raise InputError(
                        f"lengths: {length} is too short for {data.name} with {units} lines, pairs"
                        " or numbers; use longer ones"
                    )
                units = max(units - max(units // 100, 1), generated.min_units)
            yield example

    def _template(self, name: str, key: str = "tasks") -> local_files.ChosenTemplate:
        paths = ("prompt.py", "src/prompt.py", "../src/prompt.py")

        def official() -> tuple[dict[str, str], str]:
            variable = _VARIABLES[self.family]
            templates, file = local_files.python_templates(self.path, paths, variable)
            return templates, f"official ({file}, {self.family})"

        placeholders = ["context", "input?", "question?"]
        placeholders += [f"{option}?" for option in _OPTIONS if name in _MULTIPLE_CHOICE]
        further = {"code_run": ["func_call?", "func?"], "math_find": ["prefix?"]}
        placeholders += further.get(name, [])
        return local_files.choose_template(
            self.wording, "infinitebench", name, official, key, " ".join(placeholders)
        )


def _example(row: dict, name: str, template: str, source: str, fields: Record) -> Example:
    """Parses a row; raises ValueError with what is wrong."""
    segments = local_files.fill_template(template, _template_values(row, name))
    fields = {**fields, **local_files.template_fields(template, source)}
    return Example(segments, _label(row, name), fields)


def _template_values(row: dict, name: str) -> dict[str, str]:
    """Returns the fields of a template; raises ValueError for what a row lacks."""
    if not isinstance(row["context"], str) or not isinstance(row["input"], str):
        raise ValueError("has a context or input that is no text")
    values = {"context": row["context"], "input": row["input"], "question": row["input"]}
    if name in _MULTIPLE_CHOICE:
        if not isinstance(row["options"], list) or len(row["options"]) != len(_OPTIONS):
            raise ValueError(f"has options={row['options']!r}, not four")
        values |= dict(zip(_OPTIONS, map(str, row["options"]), strict=True))
    elif name == "code_run":
        call = re.search(r"func_[0-9]+\(-?[0-9]+\)", row["input"])
        if call is None:
            raise ValueError("has no call such as func_1(2) in its input")
        values |= {"func_call": call.group(), "func": call.group().split("(")[0]}
    elif name == "math_find":
        match = re.search("The .+ of", row["input"])
        if match is None:
            raise ValueError('has no "The ... of" in its input')
        number = match.group().lower().removesuffix(" of")
        values["prefix"] = f"What is {number} in the following list?"
    return values


def _label(row: dict, name: str) -> Sequence:
    """Returns the references; raises ValueError if they have another type."""
    answer = row["answer"]
    label = answer if isinstance(answer, list) else [answer]
    if label and isinstance(label[0], list):
        label = label[0]
    if not label:
        raise ValueError("has an empty answer")
    kind = _LABEL_TYPES.get(name, str)
    if not all(isinstance(item, kind) for item in label):
        raise ValueError(f"has answer={answer!r}, no {'text' if kind is str else 'number'}")
    return scores.labels(label, row["options"]) if name in _MULTIPLE_CHOICE else label
