"""`python -m lcjax.retrieval questions`: makes questions with answers from a datastore.

A kind of question is a regular expression with a group `answer`, and a sentence with places for
other groups:

    {name: parts, pattern: '(?P<answer>\\w+) is a part of (?P<whole>\\w+)',
     question: "What is a part of {whole}?"}

Every match within a passage makes a question, and that passage is relevant to it. Questions with
several answers, and questions that contain their answer, are left out. The same datastore, patterns
and seed give the same questions.
"""

import dataclasses
import json
import random
import re
import string
from pathlib import Path
from typing import Annotated, Any

from lcjax.errors import (
    InputError,
    NonEmpty,
    NonNegativeInt,
    PositiveInt,
    Seed,
    check_arguments,
    check_fields,
)
from lcjax.files import check_path, write_whole
from lcjax.retrieval.datastore import Datastore
from lcjax.retrieval.passages import Passage
from lcjax.storage import local_path

_FIELDS = ("title", "stem")  # of a passage: the title, and the file name without folder and suffix


@dataclasses.dataclass(frozen=True)
class QuestionKind:
    """A kind of question: a pattern of passages, and the text of the question."""

    name: str = ""  # name of the folder of its questions
    # Regular expression (of Python's re) with a group (?P<answer>...) and groups for the question
    pattern: str = ""
    # Text with {groups} of the pattern, {title} of the document, and {stem}, the bare file name
    question: str = ""

    def __post_init__(self):
        check_path("kinds.name", self.name)
        if not re.fullmatch(r"[\w-]+", self.name):
            raise InputError(f"kinds.name={self.name!r} must be a word, the name of a folder")
        try:
            groups = re.compile(self.pattern).groupindex
        except re.error as error:
            raise InputError(f"kinds: the pattern of {self.name} is invalid: {error}") from None
        if "answer" not in groups:
            raise InputError(
                f"kinds: the pattern of {self.name} has no group (?P<answer>...), the answer"
            )
        if reserved := set(_FIELDS) & set(groups):
            raise InputError(
                f"kinds: the pattern of {self.name} has a group {min(reserved)}, which is a field"
                " of the passage; give the group another name"
            )
        known = (*_FIELDS, *groups)
        try:
            fields = list(string.Formatter().parse(self.question))
        except ValueError as error:
            raise InputError(f"kinds: the question of {self.name}: {error}") from None
        names = [name for _, name, *_ in fields]
        if any(spec or conversion for *_, spec, conversion in fields):
            raise InputError(
                f"kinds: the question of {self.name} has a format or conversion; write"
                " {group} alone"
            )
        unknown = [name for name in names if name is not None and name not in known]
        if unknown or not any(names):
            raise InputError(
                f"kinds: the question of {self.name} must have some of"
                f" {', '.join('{' + name + '}' for name in known)}; it has {unknown or 'none'}"
            )

    def matches(self, passage: Passage) -> list[tuple[str, str]]:
        """Returns the pair (question, answer) of every match in a passage."""
        fields = {"title": passage.title, "stem": Path(passage.document).stem}
        pairs = []
        for match in re.finditer(self.pattern, passage.text):
            groups = {k: " ".join((v or "").split()) for k, v in match.groupdict().items()}
            question, answer = self.question.format(**fields, **groups), groups["answer"]
            if answer and answer.casefold() not in question.casefold():
                pairs.append((question, answer))
        return pairs


@dataclasses.dataclass(frozen=True)
class QuestionsConfig:
    """Settings of `python -m lcjax.retrieval questions`."""

    store: Annotated[str, NonEmpty("give --store=FOLDER")] = ""  # the datastore
    kinds: tuple[QuestionKind, ...] = ()
    count: PositiveInt = 100  # questions of each kind
    # Further questions of each kind, for demonstrations in prompts
    demonstrations: NonNegativeInt = 20
    seed: Seed = 0  # seed of the choice of questions
    out: Annotated[str, NonEmpty("give --out=FOLDER")] = ""  # folder to write

    def __post_init__(self):
        check_fields("", self)
        names = [kind.name for kind in self.kinds]
        if not names or len(set(names)) < len(names):
            raise InputError(f"kinds must be one or more with different names, not {names}")


@check_arguments
def write_questions(config: QuestionsConfig) -> list[Path]:
    """Writes `KIND/own/test.jsonl` and `KIND/own/train.jsonl`, which `open_qa` reads.

    A line has the fields `question`, `answer` (a list with one text), `relevant` (ids of the
    relevant passages), and `ctxs` (title and text of the first one, which a model reads if no
    retriever is set).

    Returns:
      The written files.

    Raises:
      InputError: a kind has too few questions.
    """
    check_path("out", config.out)
    out = local_path("out", config.out, "copy the files afterwards")
    store = Datastore(config.store)
    rows: list[dict[str, dict[str, Any]]] = [{} for _ in config.kinds]
    for row in range(store.num_rows):
        if store.valid is not None and not store.valid[row]:
            continue
        (passage,) = store.passages([row])
        for kind, questions in zip(config.kinds, rows):
            for question, answer in kind.matches(passage):
                ctx = {"title": passage.title, "text": passage.text}
                new = {"question": question, "answer": [], "relevant": [], "ctxs": [ctx]}
                line = questions.setdefault(question, new)
                line["answer"] = list(dict.fromkeys([*line["answer"], answer]))
                line["relevant"] = list(dict.fromkeys([*line["relevant"], passage.id]))
    texts: dict[Path, str] = {}
    for kind, questions in zip(config.kinds, rows):
        lines = [line for _, line in sorted(questions.items()) if len(line["answer"]) == 1]
        total = config.count + config.demonstrations
        if len(lines) < total:
            raise InputError(
                f"kinds: {kind.name} has {len(lines)} questions with one answer in"
                f" {config.store}, and count + demonstrations are {total}; lower them, or let the"
                " pattern match more"
            )
        chosen = random.Random(f"{config.seed} {kind.name}").sample(lines, total)
        parts = {"test": chosen[: config.count], "train": chosen[config.count :]}
        for name, part in parts.items():
            path = out / kind.name / "own" / f"{name}.jsonl"
            texts[path] = "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in part)
    for path, text in texts.items():
        if path.exists() and path.read_bytes() != text.encode():
            raise InputError(f"{path} exists with other content; name another folder with out")
    for path, text in texts.items():
        write_whole(path, text)
    return list(texts)
