"""InfiniteBench (arXiv 2402.13718): twelve tasks from the official JSONL files.

Prompts are those of one family of the official `prompt.py` where that lies in the folder or its
src/, or of an installed lm-eval, and this library's own otherwise. A prompt over the budget loses
its middle; the answer comes on top of it, and generation is greedy without a stop. Scores are the
official ones; where the scorer stops with an error (a decimal for Math.Find's whole number), the
answer counts as wrong.
"""

import dataclasses
import json
import random
import re
import statistics
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from lcjax.errors import InputError, one_of
from lcjax.evaluation import metrics
from lcjax.evaluation.corpus import Corpus
from lcjax.evaluation.generation import OWN_WORDING, Example
from lcjax.evaluation.metrics import infinitebench as scores
from lcjax.evaluation.task import Limits, Record, Task
from lcjax.evaluation.tasks import local_files
from lcjax.evaluation.tasks.benchmark import DataSet, TextCutBenchmark, best_of

# Rows of the tasks whose official files are generated (`MADE`), in this library's own text. PassKey
# and Number hide digits between equal lines; KV asks for a value among many pairs of UUIDs;
# Math.Find asks for a rank in a list of numbers. Sizes are the official ones, or as many as fit.
_DEPTHS = 59  # one every 90 of 5,220 lines
_FILLER = "The road is long. The hill is steep. The wind is cold. Off we go. Up and down again."
_NEEDLE = "The {thing} is {key}. Keep it in mind: {key} is the {thing}."
# Index of the answer in the sorted distinct values; None is their median.
_RANKS = {
    "largest": -1, "second largest": -2, "third largest": -3, "smallest": 0, "second smallest": 1,
    "third smallest": 2, "median": None,
}  # fmt: skip


def _hidden(thing: str, key: Callable[[random.Random], str]) -> Callable[..., dict]:
    def row(rng: random.Random, units: int, index: int, count: int) -> dict:
        digits, depth = key(rng), index * _DEPTHS // count
        lines = [_FILLER] * units
        lines.insert(round(units * depth / (_DEPTHS - 1)), _NEEDLE.format(thing=thing, key=digits))
        return _row("\n".join(lines), f"What is the {thing}?", digits)

    return row


def _five(rng: random.Random) -> str:
    return f"{rng.randrange(100_000):05}"


def _ten(rng: random.Random) -> str:
    """Five random digits, and five copies inserted beside random ones."""
    digits = _five(rng)
    while len(digits) < 10:
        place = rng.randrange(len(digits))
        digits = digits[:place] + digits[place] + digits[place:]
    return digits


def _pairs(rng: random.Random, units: int, index: int, count: int) -> dict:
    keys, values = (
        [str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in range(units)]
        for _ in range(2)
    )
    pair = index * units // count
    return _row(json.dumps(dict(zip(keys, values))), f'Key: "{keys[pair]}"\nValue:', values[pair])


def _ranked(rng: random.Random, units: int, index: int, count: int) -> dict:
    """Numbers from 0 to 99, with the bound on the side that is asked for drawn anew."""
    name, rank = list(_RANKS.items())[index % len(_RANKS)]
    low, high = rng.randint(0, 19), rng.randint(79, 99)
    upper = rank < 0 if rank is not None else rng.random() < 0.5
    low, high = (0, high) if upper else (low, 99)
    numbers: list[int] = []
    while len(set(numbers)) < 3:  # a third one has to be there
        numbers = [rng.randint(low, high) for _ in range(units)]
    answer = statistics.median(numbers) if rank is None else sorted(set(numbers))[rank]
    answer = int(answer) if answer == int(answer) else answer
    return _row(str(numbers), f"The {name} number of the list is:", answer)


def _row(context: str, question: str, answer: str | int | float) -> dict:
    return {"context": context, "input": question, "answer": [answer], "options": []}


@dataclasses.dataclass(frozen=True)
class Made:
    """A generated task: row(rng, units, index, count) is the `index`-th of `count` questions."""

    count: int  # questions of the official file
    units: int  # lines, pairs or numbers in each of its contexts
    row: Callable[..., dict]
    least: int = 10  # units

    def fitting(self, fits: Callable[[int], bool]) -> int:
        """As many units as fit, and no more than the official ones; `least` if none do."""
        low, high = self.least, self.units
        if fits(high):
            return high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low


MADE = {
    "passkey": Made(590, 5220, _hidden("pass key", _five)),
    "number_string": Made(590, 5220, _hidden("sequence of digits", _ten)),
    "kv_retrieval": Made(500, 2500, _pairs),
    "math_find": Made(350, 60_000, _ranked),
}


SOURCE = (
    "InfiniteBench's data (Hugging Face: xinrongzhang2022/InfiniteBench), one <task>.jsonl a task;"
    " src/prompt.py of its code belongs beside them"
)
_FIELDS = ("context", "input", "answer", "options")
_VARIABLES = {"yarn-mistral": "yarn_mistral_templates", "gpt4": "gpt4_templates"} | {
    "claude2": "claude2_templates"
}
# Of what type labels are, where they are no texts.
_NUMBERS = {"code_run": int, "math_calc": int, "math_find": int | float}
_CHOOSING = ("code_debug", "longbook_choice_eng")
_OPTIONS = ("OPTION_A", "OPTION_B", "OPTION_C", "OPTION_D")
_CHOICES = "\nA. {OPTION_A}\nB. {OPTION_B}\nC. {OPTION_C}\nD. {OPTION_D}\n\n"
_BOOK = "Here is a book, and after it a question about it.\n\n{context}\n\nQuestion: {question}"
_NUMBER = "Somewhere in these lines stands a number that you will be asked for.\n\n{context}\n\n"
WORDING = {
    "passkey": _NUMBER + "{input}\n\nThe pass key is",
    "number_string": _NUMBER + "{input}\n\nThe digits are",
    "kv_retrieval": (
        "Here is a JSON object; give the value of the key that is asked for.\n\n{context}\n\n"
        "{input}"
    ),
    "longbook_sum_eng": "Here is a book.\n\n{context}\n\nA summary of the book:",
    "longbook_choice_eng": _BOOK + _CHOICES + "The right one is",
    "longbook_qa_eng": _BOOK + "\nThe answer in a few words:",
    "longbook_qa_chn": (
        "下面是一本书，之后有一个问题。\n\n{context}\n\n问题：{question}\n简短的回答："
    ),
    "math_find": "{prefix}\n\n{context}\n\n{input}",
    "math_calc": (
        "All values on the way through a sum, from left to right.\n\nSum: 2 + 5 - 1\n"
        "Values: [2, 7, 6]\n\nSum: {context}\nValues:"
    ),
    "code_run": "Here are Python functions.\n\n{context}\n\nThe value of {func_call} is",
    "code_debug": (
        "One function in this Python code has an error that was put there on purpose.\n\n{context}"
        "\n\nWhich one is it?" + _CHOICES + "The correct option is:"
    ),
    "longdialogue_qa_eng": (
        "In this script one name was replaced with $$MASK$$.\n\n{context}\n\nThe name in the place"
        " of $$MASK$$ is"
    ),
}


def _of_label(metric: Callable) -> Callable[[str, Record], float]:
    return lambda answer, facts: metric(answer, facts["references"])


def _one(metric: Callable) -> Callable[[str, Record], float]:
    return lambda answer, facts: metric(answer, facts["references"][0])


def _math_find(answer: str, facts: Record) -> float:
    try:
        return scores.math_find(answer, facts["references"])
    except ValueError:  # where the official scorer stops
        return 0.0


def _exact_number(answer: str, facts: Record) -> float:
    return scores.math_find(answer, facts["references"], parity=False)


def _lsum(answer: str, reference: str) -> float:
    return metrics.rouge_lsum(answer, reference, stem=False)


_DIGITS = {"first_digits": _of_label(scores.digits)}
_CHOICE = {"choice": _of_label(scores.choice)}
_DEBUG = {"code_debug": _of_label(scores.code_debug), "letter": _of_label(scores.option_letter)}
_FIND = {"first_number": _math_find, "exact_number": _exact_number}
_SETS = (
    DataSet("passkey", "retrieval", 6, _DIGITS),
    DataSet("number_string", "retrieval", 12, _DIGITS),
    DataSet("kv_retrieval", "retrieval", 50, {"word_match": _one(scores.kv_retrieval)}),
    DataSet("longbook_sum_eng", "english", 1200, {"rouge_lsum": best_of(_lsum)}),
    DataSet("longbook_qa_eng", "english", 40, {"qa_f1": best_of(metrics.qa_f1)}),
    DataSet("longbook_choice_eng", "english", 40, _CHOICE),
    DataSet("longdialogue_qa_eng", "english", 40, {"name": _of_label(scores.dialogue)}),
    DataSet("longbook_qa_chn", "chinese", 40, {"character_f1": best_of(metrics.qa_f1_characters)}),
    DataSet("code_debug", "code", 5, _DEBUG),
    DataSet("code_run", "code", 5, {"last_number": _of_label(scores.code_run)}),
    DataSet("math_calc", "math", 30_000, {"prefix": _of_label(scores.math_calc)}),
    DataSet("math_find", "math", 3, _FIND),
)


@Task.register_subclass("infinitebench")
@dataclasses.dataclass(frozen=True)
class InfiniteBench(TextCutBenchmark):
    """InfiniteBench's tasks; the official length of prompts is 131,072 tokens.

    Generated ones have the official number of questions, lines, pairs and numbers, or of the latter
    three as many as the length holds uncut.
    """

    known: ClassVar[dict[str, DataSet]] = {data.name: data for data in _SETS}
    title: ClassVar[str] = "InfiniteBench"
    source: ClassVar[str] = SOURCE

    # Whose official prompts: yarn-mistral (for base models, with the answer's beginning), gpt4,
    # claude2
    family: str = "yarn-mistral"
    # auto: those in the folder, else an installed lm-eval's (gpt4 alone, six tasks), else this
    # library's own; folder: not lm-eval's; lm_eval: these alone
    wording: str = "auto"
    # Make passkey, number_string, kv_retrieval and math_find from the run's seed, without files
    generated: bool = False

    def has_file(self, data: DataSet) -> bool:
        return not (self.generated and data.name in MADE)

    def files(self, name: str) -> tuple[str, ...]:
        return f"{name}.jsonl", f"data/{name}.jsonl", f"data/InfiniteBench/{name}.jsonl"

    def check(self, limits: Limits, key: str) -> None:
        one_of(f"{key}.family", self.family, _VARIABLES)
        super().check(limits, key)
        if self.wording == "lm_eval" and self.family != "gpt4":
            raise InputError(
                f"{key}.family={self.family}: lm-eval has the prompts of gpt4; use that, or"
                " wording=folder"
            )
        for data in self.chosen():
            self._template(data.name, key)

    def read(self, data: DataSet, path: Path, corpus: Corpus) -> Iterator[Example]:
        worded = self._template(data.name)
        for number, row in local_files.rows(path, _FIELDS):
            try:
                example = _example(row, data.name, *worded)
            except ValueError as fault:
                local_files.skip(path, number, str(fault))
                continue
            facts = {"line": number, "id": row.get("id"), **example.facts}
            yield dataclasses.replace(example, facts=facts)

    def examples_of(
        self, data: DataSet, corpus: Corpus, length: int, limits: Limits
    ) -> Iterator[Example]:
        if self.has_file(data):
            yield from super().examples_of(data, corpus, length, limits)
            return
        made, worded = MADE[data.name], self._template(data.name)
        count = self.max_examples or made.count

        def asked(index: int, units: int) -> Example | None:
            rng = random.Random(f"infinitebench {limits.seed} {data.name} {index}")
            row = made.row(rng, units, index, count)
            facts = {"source": f"generated, {OWN_WORDING}", "units": units}
            example = _example(row, data.name, *worded, **facts)
            return self._whole(example, data, corpus.tokenizer, length)

        most = made.fitting(lambda units: asked(0, units) is not None)
        for index in range(count):
            own = most
            while (example := asked(index, own)) is None:
                if own == made.least:
                    raise InputError(
                        f"lengths: {length} is too short for {data.name} with {own} lines, pairs or"
                        " numbers; use longer ones"
                    )
                own = max(own - max(own // 100, 1), made.least)
            yield example

    def _whole(self, example: Example, data: DataSet, tokenizer, length: int) -> Example | None:
        """An example as it is asked, if nothing has to be cut."""
        asked = self.asked(example, data, tokenizer, length)
        prompt = self.layout(tokenizer).prompt(asked.segments)
        over = self.budget(length, asked.max_new_tokens).left(prompt) < 0
        return None if over or asked.facts.get("cut_tokens") else asked

    def _template(self, name: str, key: str = "tasks") -> tuple[str, str]:
        places = ("prompt.py", "src/prompt.py", "../src/prompt.py")

        def official() -> tuple[str, str] | None:
            variable = _VARIABLES[self.family]
            found = self.path and local_files.python_templates(self.path, places, variable)
            if not found or not found[0].get(name):
                return None
            return found[0][name], f"official ({found[1]}, {self.family})"

        def lm_eval() -> tuple[str, str] | None:
            if self.family != "gpt4":
                return None
            task = re.sub("_eng$", "_en", name)
            return local_files.lm_eval_template("infinitebench", f"infinitebench_{task}")

        return local_files.worded(self.wording, name, official, lm_eval, WORDING[name], key)


def _example(row: dict, name: str, template: str, wording: str, **facts) -> Example:
    """What a row asks; ValueError says what of it does not fit."""
    fields, label = _fields(row, name), _label(row, name)
    facts |= {"wording": wording, "template_text": local_files.wording_hash(template)}
    return Example(local_files.fill(template, fields), label, facts)


def _fields(row: dict, name: str) -> dict[str, str]:
    """What a template may ask for; ValueError names what a row lacks."""
    if not isinstance(row["context"], str) or not isinstance(row["input"], str):
        raise ValueError("has a context or input that is no text")
    fields = {"context": row["context"], "input": row["input"], "question": row["input"]}
    if name in _CHOOSING:
        if not isinstance(row["options"], list) or len(row["options"]) != len(_OPTIONS):
            raise ValueError(f"has options={row['options']!r}, not four")
        fields |= dict(zip(_OPTIONS, map(str, row["options"]), strict=True))
    elif name == "code_run":
        call = re.search(r"func_[0-9]+\(-?[0-9]+\)", row["input"])
        if call is None:
            raise ValueError("has no call such as func_1(2) in its input")
        fields |= {"func_call": call.group(), "func": call.group().split("(")[0]}
    elif name == "math_find":
        asked = re.search("The .+ of", row["input"])
        if asked is None:
            raise ValueError('has no "The ... of" in its input')
        number = asked.group().lower().removesuffix(" of")
        fields["prefix"] = f"What is {number} in the following list?"
    return fields


def _label(row: dict, name: str) -> Sequence:
    """What the score compares with; ValueError where that is of another type."""
    answer = row["answer"]
    label = answer if isinstance(answer, list) else [answer]
    if label and isinstance(label[0], list):
        label = label[0]
    if not label:
        raise ValueError("has an empty answer")
    kind = _NUMBERS.get(name, str)
    if not all(isinstance(item, kind) for item in label):
        raise ValueError(f"has answer={answer!r}, no {'text' if kind is str else 'number'}")
    return scores.labels(label, row["options"]) if name in _CHOOSING else label
