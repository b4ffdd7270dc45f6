"""What RULER's prompts say: this library's own words, or those of the user's copy of RULER.

Templates are read, never executed. Own ones are about as long, so that as much text fits beside.
"""

import ast
import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lcjax.errors import InputError
from lcjax.evaluation.generation import OWN_WORDING
from lcjax.evaluation.prompt import Segment
from lcjax.evaluation.tasks.local_files import assigned

_FOLDERS = ("scripts/data/synthetic", "data/synthetic", "synthetic", ".")
_OWN = {
    "niah": (
        "Some secret lucky {type_needle_v} are written down somewhere in the text that follows."
        " Keep this in mind. You will be asked for the {type_needle_v} later.\n{context}\nWhat are"
        " all the secret lucky {type_needle_v} for {query} written in the text above?",
        " The secret lucky {type_needle_v} for {query} written in the text above are",
    ),
    "variable_tracking": (
        "Follow the chain(s) of assignments to variables that stand in the text below.\n\n{context}"
        "\nQuestion: Which variables in the text above have been given the value {query}?",
        " Answer: By the chain(s) of assignments to variables above, {num_v} variables have been"
        " given the value {query}, they are:",
    ),
    "common_words_extraction": (
        "Here is a list of words with numbers. Some of its words stand there more often than"
        " others. Remember those that stand there most.\n{context}\nQuestion: Which 10 words are"
        " the most common in this list?",
        " Answer: The 10 words that are the most common in this list are:",
    ),
    "freq_words_extraction": (
        "Look at this text in code and count how often each coded word is there. Name the three"
        " coded words that are there most often. {context}\nQuestion: Give no explanation, and"
        " leave out the dots '....'. Which three coded words are most frequent in the text above?",
        " Answer: In the coded text above, the three most frequent coded words are:",
    ),
    "qa": (
        "Answer the question from the documents. Write the answer alone and no other words.\n\n"
        "These are the documents.\n\n{context}\n\nAnswer the question from the documents. Write the"
        " answer alone and no other words.\n\nQuestion: {query}",
        " Answer:",
    ),
}
_NEEDLE = "One of the secret lucky {type_needle_v} for {key} is: {value}."
_NOISE = "The road is long. The hill is steep. The wind is cold. Off we go. Up and down again."


@dataclasses.dataclass(frozen=True)
class Wording:
    """Templates by family, with `{context}`, `{query}` and the like in them."""

    templates: dict[str, tuple[str, str]]  # of the prompt, of the answer's beginning
    needle: str
    noise: str
    source: str

    @property
    def facts(self) -> dict[str, str]:
        """For records: whose words, and their hash."""
        text = repr((sorted(self.templates.items()), self.needle, self.noise))
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        return {"wording": self.source, "wording_hash": digest}

    def parts(self, family: str, *, singular: bool = False, **fields) -> "Parts":
        """A template with its fields filled in, cut at the context.

        `singular` is RULER's own replacement of words where there is one answer.
        """
        prompt, answer = self.templates[family]
        if singular:
            prompt, answer = _singular(prompt), _singular(answer)
        before, found, after = prompt.partition("{context}")
        if not found:
            raise InputError(f"RULER's template {family!r} has no {{context}}; restore the file")
        before, *rest = (text.format(**fields) for text in (before, after, answer))
        bare = before.rstrip()
        return Parts(bare, before[len(bare) :], *rest)


class Parts(NamedTuple):
    """What stands around the context of a prompt."""

    instruction: str
    glue: str  # blanks and line ends before the context
    question: str
    answer: str  # the beginning of it

    def around(self, *context: Sequence[int]) -> list[Segment]:
        """Segments of the prompt, with ids of the documents of its context."""
        return [
            Segment("instruction", self.instruction),
            *(Segment("context_doc", ids=ids) for ids in context),
            Segment("question", self.question),
            Segment("answer_prefix", self.answer),
        ]


def _singular(text: str) -> str:
    for plural, one in (("Some", "A"), ("are all", "is"), ("are", "is"), ("answers", "answer")):
        text = text.replace(plural, one)
    return text


def wording(benchmark: str | None, key: str) -> Wording:
    """Own words, or those in a folder with NVIDIA's RULER."""
    if benchmark is None:
        return Wording(_OWN, _NEEDLE, _NOISE, OWN_WORDING)
    root = Path(benchmark)
    for folder in _FOLDERS:
        constants, niah = root / folder / "constants.py", root / folder / "niah.py"
        if constants.is_file() and niah.is_file():
            tasks = _value(constants, "TASKS", key)
            try:
                templates = {f: (tasks[f]["template"], tasks[f]["answer_prefix"]) for f in _OWN}
            except (KeyError, TypeError) as error:
                raise InputError(f"{key}: {constants} lacks {error} in TASKS; restore it") from None
            needle, noise = _value(niah, "needle", key), _value(niah, "haystack", key)
            return Wording(templates, needle, noise, "RULER")
    raise InputError(
        f"{key}={benchmark} has no scripts/data/synthetic/constants.py and niah.py; name a copy of"
        " https://github.com/NVIDIA/RULER, or leave it out for this library's own wording"
    )


def _value(path: Path, name: str, key: str):
    """The first literal that a Python file gives to a name."""
    for value in assigned(path, name):
        try:
            return ast.literal_eval(value)
        except ValueError:
            continue
    raise InputError(f"{key}: {path} gives {name} no value that can be read; restore it")
