"""Texts of RULER's prompts: templates, words, essays, and questions with their documents.

Templates are this library's own, or those of the user's copy of RULER, which is read and never
executed. The library's own ones are about as long as RULER's, so that as much haystack fits.
"""

import ast
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import random
import re
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lcjax.checkpoints.tokenizer import Tokenizer, encode_mid_text
from lcjax.config import to_data_path
from lcjax.errors import InputError, install_command
from lcjax.evaluation.prompt import Segment
from lcjax.evaluation.tasks.local_files import PROMPTS_VERSION, assigned_values, library_prompts
from lcjax.files import parse_json, read_text

_FOLDERS = ("scripts/data/synthetic", "data/synthetic", "synthetic", ".")
_SINGULAR = (("Some", "A"), ("are all", "is"), ("are", "is"), ("answers", "answer"))
_WORD_FILES = ("adjectivelist.txt", "nounlist.txt", "verblist.txt")
SPLITTER = "lcjax-1"  # version of the rule for the ends of sentences; upstream uses NLTK's punkt
# Quotes and brackets that close a sentence belong to it.
_SENTENCE_END = re.compile(r"([.!?][\"')\]\u201d\u2019]*) (?=[\"'(\[\u201c\u2018]*[A-Z0-9])")
_QA_FILES = {
    "squad": "dev-v2.0.json of SQuAD 2.0 (https://rajpurkar.github.io/SQuAD-explorer)",
    "hotpotqa": "hotpot_dev_distractor_v1.json of HotpotQA (https://hotpotqa.github.io)",
}


class Template(NamedTuple):
    """The parts of a prompt around its context."""

    instruction: str
    separator: str  # blanks and newlines before the context
    question: str
    answer: str  # the beginning of the answer

    def segments(self, *context: Sequence[int]) -> list[Segment]:
        """Returns the segments of the prompt for the token ids of each document of its context."""
        return [
            Segment("instruction", self.instruction),
            *(Segment("context_doc", ids=ids) for ids in context),
            Segment("question", self.question),
            Segment("answer_prefix", self.answer),
        ]


@dataclasses.dataclass(frozen=True)
class RulerTemplates:
    """Templates by family, with the fields `{context}`, `{query}` and others."""

    templates: dict[str, tuple[str, str]]  # of the prompt, and of the beginning of the answer
    needle: str
    noise: str
    source: str

    @property
    def fields(self) -> dict[str, str]:
        """The fields of records about the templates: their source and hash."""
        text = repr((sorted(self.templates.items()), self.needle, self.noise))
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        return {"wording": self.source, "wording_hash": digest}

    def template(self, family: str, *, singular: bool = False, **values) -> Template:
        """Fills the fields of a template; `singular` replaces plurals by RULER's own rule."""
        prompt, answer = self.templates[family]
        for plural, one in _SINGULAR if singular else ():
            prompt, answer = prompt.replace(plural, one), answer.replace(plural, one)
        before, field, after = prompt.partition("{context}")
        if not field:
            raise InputError(f"RULER's template {family!r} has no {{context}}; restore the file")
        before, question, answer = (text.format(**values) for text in (before, after, answer))
        instruction = before.rstrip()
        return Template(instruction, before[len(instruction) :], question, answer)


def read_templates(benchmark: str | None, key: str) -> RulerTemplates:
    """Reads the templates in a folder with NVIDIA's RULER; None gives this library's own."""
    library = library_prompts("ruler")
    if benchmark is None:
        templates = {family: tuple(texts) for family, texts in library.items()}
        return RulerTemplates(
            templates, **library_prompts("ruler_haystack"), source=PROMPTS_VERSION
        )
    root = to_data_path(benchmark)
    for folder in _FOLDERS:
        constants, niah = root / folder / "constants.py", root / folder / "niah.py"
        if constants.is_file() and niah.is_file():
            tasks = _literal(constants, "TASKS", key)
            try:
                templates = {f: (tasks[f]["template"], tasks[f]["answer_prefix"]) for f in library}
            except (KeyError, TypeError) as error:
                raise InputError(f"{key}: {constants} lacks {error} in TASKS; restore it") from None
            needle, noise = _literal(niah, "needle", key), _literal(niah, "haystack", key)
            return RulerTemplates(templates, needle, noise, "RULER")
    raise InputError(
        f"{key}={benchmark} has no scripts/data/synthetic/constants.py and niah.py; name a copy of"
        " https://github.com/NVIDIA/RULER, or leave it out for this library's own wording"
    )


def _literal(path: Path, name: str, key: str):
    """Returns the first literal that a Python file assigns to a name."""
    for value in assigned_values(path, name):
        try:
            return ast.literal_eval(value)
        except ValueError:
            continue
    raise InputError(f"{key}: {path} gives {name} no value that can be read; restore it")


@dataclasses.dataclass(frozen=True)
class WordList:
    """English words: pairs of them are keys, and all of them are a vocabulary (`CommonWords`)."""

    adjectives: tuple[str, ...]
    nouns: tuple[str, ...]
    verbs: tuple[str, ...]
    source: str  # for records

    @property
    def all(self) -> list[str]:
        return sorted({*self.adjectives, *self.nouns, *self.verbs})

    def pair(self, rng: random.Random) -> str:
        return f"{rng.choice(self.adjectives)}-{rng.choice(self.nouns)}"


def read_words(path: str | None, key: str) -> WordList:
    """Reads a file with one word a line, a folder with wonderwords' lists, or wonderwords itself.

    Args:
      path: The file or folder; None for the installed package wonderwords.
      key: The place of the setting in the config, for messages.
    """
    if path is None:
        spec = importlib.util.find_spec("wonderwords")
        if spec is None or spec.origin is None:
            raise InputError(
                f"{key}=null, and wonderwords is not installed: {install_command('ruler')}, or name"
                " a file with one word a line"
            )
        name = f"wonderwords {importlib.metadata.version('wonderwords')}"
        return _word_lists(Path(spec.origin).parent / "assets", key, name)
    root = to_data_path(path)
    if root.is_dir():
        return _word_lists(root, key, root.name)
    if not root.is_file():
        raise InputError(f"{key}={path} is no file and no folder; name one with words")
    words = _lines(root)
    if len(words) < 100:
        raise InputError(f"{key}={path} has {len(words)} words; at least 100, one a line")
    return WordList(words, words, words, root.name)


def _word_lists(folder: Path, key: str, source: str) -> WordList:
    for name in _WORD_FILES:
        if not (folder / name).is_file():
            raise InputError(f"{key}: {folder / name} is missing; it is one of wonderwords' lists")
    return WordList(*(_lines(folder / name) for name in _WORD_FILES), source)


def _lines(path: Path) -> tuple[str, ...]:
    lines = read_text(path).splitlines()
    return tuple(sorted({line.strip() for line in lines if line.strip()}))


def random_number(rng: random.Random) -> str:
    """Returns a number of seven digits."""
    return str(rng.randint(1_000_000, 9_999_999))


def random_uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


class Essays:
    """Running text whose first words are the haystack, tokenised sentence by sentence."""

    def __init__(self, texts: list[str], tokenizer: Tokenizer):
        text = " ".join(" ".join(texts).split())
        if not text:
            raise InputError("data: the haystack has no text; name a folder with essays")
        self.tokenizer = tokenizer
        self.sentences = _SENTENCE_END.sub(r"\1\n", text).split("\n")
        self._ids: dict[int, list[int]] = {}
        self._ends = np.cumsum([len(sentence.split(" ")) for sentence in self.sentences])

    def first(self, num_words: int) -> list[list[int]]:
        """Returns the token ids of each sentence of the first words, with a blank before it.

        The text is repeated if it has fewer words. The last sentence may be cut.
        """
        rounds, rest = divmod(num_words, int(self._ends[-1]))
        num_whole = int(np.searchsorted(self._ends, rest, side="right"))
        ids = [self._sentence(i) for _ in range(rounds) for i in range(len(self.sentences))]
        ids += [self._sentence(i) for i in range(num_whole)]
        rest -= int(self._ends[num_whole - 1]) if num_whole else 0
        if rest:
            part = " ".join(self.sentences[num_whole].split(" ")[:rest])
            ids.append(encode_mid_text(self.tokenizer, " " + part))
        return ids

    def _sentence(self, index: int) -> list[int]:
        if index not in self._ids:
            self._ids[index] = encode_mid_text(self.tokenizer, " " + self.sentences[index])
        return self._ids[index]


@dataclasses.dataclass(frozen=True)
class Question:
    """A question, and the indices of its documents."""

    text: str
    answers: tuple[str, ...]
    gold: tuple[int, ...]  # documents that every prompt holds
    related: tuple[int, ...] = ()  # of the same article; the first to fill a prompt


def read_questions(path: str | None, name: str, key: str) -> tuple[list[Question], list[str]]:
    """Reads the questions and the distinct documents of an official file.

    Args:
      path: The file.
      name: squad or hotpotqa.
      key: The place of the setting in the config, for messages.
    """
    source = _QA_FILES[name]
    if path is None:
        raise InputError(f"{key}=null, which is needed here: name {source}")
    if not to_data_path(path).is_file():
        raise InputError(f"{key}={path} is no file; it is {source}")
    try:
        data = parse_json(to_data_path(path).read_text(encoding="utf-8"))
        questions, documents = (_squad if name == "squad" else _hotpotqa)(data)
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{key}={path} is not {source} ({error!r:.60})") from None
    if not questions:
        raise InputError(f"{key}={path} has no question with an answer; it is not {source}")
    return questions, documents


def _squad(data) -> tuple[list[Question], list[str]]:
    articles = [article["paragraphs"] for article in data["data"]]
    documents = sorted({p["context"] for paragraphs in articles for p in paragraphs})
    index_of = {document: index for index, document in enumerate(documents)}
    questions = []
    for paragraphs in articles:
        indices = [index_of[p["context"]] for p in paragraphs]
        for paragraph, gold in zip(paragraphs, indices):
            related = tuple(index for index in indices if index != gold)
            questions += [
                Question(q["question"], tuple(a["text"] for a in q["answers"]), (gold,), related)
                for q in paragraph["qas"]
                if not q.get("is_impossible") and q["answers"]
            ]
    return questions, documents


def _hotpotqa(data) -> tuple[list[Question], list[str]]:
    contexts = [[f"{title}\n{''.join(lines)}" for title, lines in row["context"]] for row in data]
    documents = sorted({text for context in contexts for text in context})
    index_of = {document: index for index, document in enumerate(documents)}
    questions = [
        Question(row["question"], (row["answer"],), tuple(index_of[text] for text in context))
        for row, context in zip(data, contexts)
    ]
    return questions, documents
