"""`python -m lcjax.retrieval negatives`: makes training pairs of an encoder from questions.

A search ranks passages for each question. The best passage with the answer becomes the positive,
and the best passages without it become the hard negatives, as in DPR (Karpukhin et al. 2020, arXiv
2004.04906, sec. 3.2), whose negatives come from BM25.

    has_answer("... in Nîmes.", ["Nimes", "Nîmes"])        # True
"""

import functools
import json
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tqdm.auto import tqdm

from lcjax.errors import InputError, check_integer
from lcjax.files import parse_json, write_whole
from lcjax.retrieval.retriever import Hit, Retriever
from lcjax.storage import local_path, to_path

_QUESTIONS_AT_ONCE = 256  # searched together


class _Question(NamedTuple):
    text: str
    answers: list[str]


class MinedPairs(NamedTuple):
    """Numbers of pairs that `mine` wrote, and of questions that it left out by reason."""

    num_pairs: int
    num_without_answer: int  # questions whose answer is in no passage of the search
    num_without_negatives: int  # questions with too few passages that lack the answer

    def __str__(self) -> str:
        return (
            f"{self.num_pairs:,} pairs; left out: {self.num_without_answer:,} questions whose"
            f" answer no passage has, {self.num_without_negatives:,} with too few negatives"
            " (a larger k finds more)"
        )


def mine(
    questions: str | Path, retriever: Retriever, out: str | Path, *, k: int = 100, count: int = 7
) -> MinedPairs:
    """Writes a file of records {query, positive, negatives} for `retriever.pairs`.

    Args:
      questions: file of JSON lines with `question` and `answer` (a text or a list; also `answers`).
      retriever: retriever that ranks the passages.
      out: the file to write, which must not exist.
      k: number of passages of the search for each question.
      count: number of hard negatives of each question.

    Raises:
      InputError: a line has no question or answer, `out` exists, or no question gives a pair.
    """
    check_integer("k", k, 1)
    check_integer("count", count, 0)
    questions = to_path(questions)
    out = local_path("out", out, "copy the file when it is complete")
    if out.exists():
        raise InputError(f"out={out} exists and is not replaced; name another file")
    rows = list(_read(questions))
    counts, lines = dict.fromkeys(MinedPairs._fields, 0), []
    with tqdm(total=len(rows), desc="search", unit="question", delay=1) as bar:
        for start in range(0, len(rows), _QUESTIONS_AT_ONCE):
            part = rows[start : start + _QUESTIONS_AT_ONCE]
            for question, hits in zip(part, retriever.search([q.text for q in part], k)):
                field, record = _pair(question, hits, count)
                counts[field] += 1
                if record is not None:
                    lines.append(json.dumps(record, ensure_ascii=False) + "\n")
            bar.update(len(part))
    pairs = MinedPairs(**counts)
    if not lines:
        raise InputError(f"{questions}: {pairs}; check that the datastore holds the answers")
    write_whole(out, "".join(lines))
    return pairs


def _pair(
    question: _Question, hits: Sequence[Hit], count: int
) -> tuple[str, dict[str, Any] | None]:
    """Returns the field of `MinedPairs` that counts the question, and its record."""
    groups: dict[bool, list[dict[str, str]]] = {True: [], False: []}
    for hit in hits:
        passage = {"title": hit.passage.title, "text": hit.passage.text}
        groups[has_answer(hit.passage.text, question.answers)].append(passage)
    if not groups[True]:
        return "num_without_answer", None
    if len(groups[False]) < count:
        return "num_without_negatives", None
    fields = {"positive": groups[True][0], "negatives": groups[False][:count]}
    return "num_pairs", {"query": question.text, "answers": question.answers} | fields


def _read(path: Path) -> Iterator[_Question]:
    if not path.is_file():
        raise InputError(f"path={path} is no file; name lines of {{question, answer}}")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # JSON may hold U+2028 and U+0085
    except ValueError as error:
        raise InputError(f"{path} is not UTF-8 ({error}); save it as UTF-8") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError as error:
            raise InputError(f"{path}:{number} is not JSON ({error})") from None
        fields = row if isinstance(row, dict) else {}
        text = fields.get("question")
        answers = fields.get("answers") or fields.get("answer") or []
        answers = answers if isinstance(answers, list) else [answers]
        if not isinstance(text, str) or not text.strip():
            raise InputError(f"{path}:{number} has no question")
        if not answers or not all(isinstance(answer, str) for answer in answers):
            raise InputError(f"{path}:{number} has no answer: a text, or a list of texts")
        yield _Question(text.strip(), answers)


def has_answer(text: str, answers: Sequence[str]) -> bool:
    """Returns whether `text` contains one of `answers` as whole words, after DPR's normalisation.

    Text and answers are decomposed (NFD), split into words, and put in lower case. A word is a run
    of letters, numbers and marks, or another single character (`SimpleTokenizer`, arXiv
    2004.04906). So "cat" is not in "category", and "Nîmes" is another word than "Nimes". An answer
    without a word is in no text.
    """
    words = _words(text)
    return any(_words(answer).strip() and _words(answer) in words for answer in answers)


def _words(text: str) -> str:
    """Returns the words of a text, each between blanks."""
    words = "".join(map(_separated, unicodedata.normalize("NFD", text))).split()
    return f" {' '.join(words).lower()} "


@functools.cache
def _separated(char: str) -> str:
    """Returns a character of a word as it is, a blank for spaces, and others between blanks."""
    group = unicodedata.category(char)[0]
    return char if group in "LNM" else " " if group in "ZC" else f" {char} "
