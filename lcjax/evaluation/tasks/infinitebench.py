"""InfiniteBench (arXiv 2402.13718): twelve tasks from the official JSONL files.

Prompts are those of one family of the official `prompt.py` where that lies in the folder or its
src/, and this library's own otherwise. A prompt over the budget loses its middle; the answer comes
on top of it, and generation is greedy without a stop. Scores are the official ones; where the
scorer stops with an error (a decimal for Math.Find's whole number), the answer counts as wrong.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from lcjax.errors import one_of
from lcjax.evaluation import metrics
from lcjax.evaluation.corpus import Corpus
from lcjax.evaluation.generation import OWN_WORDING, Example
from lcjax.evaluation.metrics import infinitebench as scores
from lcjax.evaluation.task import Limits, Record, Task
from lcjax.evaluation.tasks import local_files
from lcjax.evaluation.tasks.benchmark import DataSet, TextCutBenchmark, best_of

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
    """InfiniteBench's tasks; the official length of prompts is 131,072 tokens."""

    known: ClassVar[dict[str, DataSet]] = {data.name: data for data in _SETS}
    title: ClassVar[str] = "InfiniteBench"
    source: ClassVar[str] = SOURCE

    # Whose official prompts: yarn-mistral (for base models, with the answer's beginning), gpt4,
    # claude2
    family: str = "yarn-mistral"

    def files(self, name: str) -> tuple[str, ...]:
        return f"{name}.jsonl", f"data/{name}.jsonl", f"data/InfiniteBench/{name}.jsonl"

    def check(self, limits: Limits, key: str) -> None:
        one_of(f"{key}.family", self.family, _VARIABLES)
        super().check(limits, key)

    def read(self, data: DataSet, path: Path, corpus: Corpus) -> Iterator[Example]:
        template, wording = self._template(data.name)
        for number, row in local_files.rows(path, _FIELDS):
            try:
                fields = _fields(row, data.name)
                label = _label(row, data.name)
            except ValueError as fault:
                local_files.skip(path, number, str(fault))
                continue
            facts = {
                "wording": wording, "line": number, "id": row.get("id"),
                "template_text": local_files.wording_hash(template),
            }  # fmt: skip
            yield Example(local_files.fill(template, fields), label, facts)

    def _template(self, name: str) -> tuple[str, str]:
        places = ("prompt.py", "src/prompt.py", "../src/prompt.py")
        found = local_files.python_templates(self.path, places, _VARIABLES[self.family])
        if found is not None and found[0].get(name):
            return found[0][name], f"official ({found[1]}, {self.family})"
        return WORDING[name], OWN_WORDING


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
