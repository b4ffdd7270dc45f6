"""Open-domain questions with retrieved passages: NQ, TriviaQA and PopQA, over passages read.

CEPE (arXiv 2402.16617, section 4.2): two demonstrations, each with its best passage, then k
passages, the question and the beginning of the answer; 25 tokens, up to a newline; exact match over
all aliases. Files are those of CEPE or Contriever: JSONL with `question`, `answer` and `ctxs`, the
passages from the best one on. Wording is this library's own. A model with a memory reads what does
not fit its decoder beside it, from the first demonstration on; CEPE keeps the first ten passages
with the decoder.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from lcjax.errors import whole_numbers
from lcjax.evaluation import metrics
from lcjax.evaluation.corpus import Corpus
from lcjax.evaluation.generation import OWN_WORDING, Example
from lcjax.evaluation.metrics.answers import flat
from lcjax.evaluation.prompt import Segment
from lcjax.evaluation.report import plots
from lcjax.evaluation.task import Limits, Record, Task
from lcjax.evaluation.tasks import local_files
from lcjax.evaluation.tasks.benchmark import AnswerBenchmark, DataSet, best_of

PASSAGES = (1, 5, 10, 15, 20, 30, 60)
SOURCE = (
    "CEPE's retrieval files (its retrieval/README.md): nq-open/test.jsonl and train.jsonl,"
    " triviaqa/validation.jsonl and train.jsonl, popqa/test.jsonl"
)
# Folder, questions, and where demonstrations come from, which for PopQA are its other questions.
_FILES = {
    "nq": ("nq-open", "test.jsonl", "train.jsonl"),
    "triviaqa": ("triviaqa", "validation.jsonl", "train.jsonl"),
    "popqa": ("popqa", "test.jsonl", "test.jsonl"),
}
_TITLES = {"nq": "Natural Questions", "triviaqa": "TriviaQA", "popqa": "PopQA"}
_FIELDS = ("question", "answer", "ctxs")
_OMITTED = "\n\n... [The other passages are left out]"


_best = functools.partial(best_of, strip=True)
_SCORES = {
    "exact_match": _best(metrics.exact_match), "substring_match": _best(metrics.substring_match),
    "f1": _best(metrics.qa_f1_verdict),
}  # fmt: skip
_SETS = tuple(
    DataSet(f"{name}_{count}", name, 25, _SCORES, stop=("\n",))
    for name in _FILES
    for count in PASSAGES
)


@dataclasses.dataclass(frozen=True)
class _Row:
    line: int
    question: str
    answers: list[str]
    passages: list[str]


@Task.register_subclass("open_qa")
@dataclasses.dataclass(frozen=True)
class OpenQa(AnswerBenchmark):
    """Data sets are `nq_10` and so on; the end of the last passages is cut, never the question."""

    known: ClassVar[dict[str, DataSet]] = {data.name: data for data in _SETS}
    title: ClassVar[str] = "Open-domain QA"
    source: ClassVar[str] = SOURCE
    cut: ClassVar[str] = "right"

    demonstrations: int = 2
    seed: int = 42  # of the demonstrations, and of the questions where max_examples leaves some out

    def check(self, limits: Limits, key: str) -> None:
        super().check(limits, key)
        whole_numbers(key, self, 0, "demonstrations", "seed")
        for data in self.chosen():
            if self.demonstrations:
                folder, _, train = _FILES[data.group]
                local_files.find(self.path, (f"{folder}/{train}",), key, SOURCE)

    def files(self, name: str) -> tuple[str, ...]:
        folder, test, _ = _FILES[self.known[name].group]
        return (f"{folder}/{test}",)

    def read(self, data: DataSet, path: Path, corpus: Corpus) -> Iterator[Example]:
        rows, pool = corpus.once((self, path), lambda: self._rows(data.group, path))
        count = _passages(data)
        for row in rows:
            shown = self._picked(pool, row)
            parts = [Segment("demo", _text(demo, demo.passages[:1], done=True)) for demo in shown]
            passages = row.passages[:count]
            parts += [Segment("context_doc", f"{passage}\n\n") for passage in passages]
            parts.append(Segment("question", _text(row, [], done=False)))
            facts = {"line": row.line, "wording": OWN_WORDING}
            facts |= {"passages": len(passages), "question": row.question}
            yield Example(parts, row.answers, facts)

    def asked(self, example: Example, data: DataSet, tokenizer, length: int) -> Example:
        """Where the last passages will be cut, a line says so."""
        example = super().asked(example, data, tokenizer, length)
        return self.told(example, _OMITTED, tokenizer, length)

    def figures(
        self, cells: Sequence[Record], records: Sequence[Record], folder: Path
    ) -> list[Path]:
        """Also the curve of each set over the passages that are read, where several numbers are."""
        longest = max(cell["length"] for cell in cells)
        own = [cell for cell in cells if cell["length"] == longest]
        panels: dict[str, dict[str, int]] = {}
        for name, data in self.known.items():
            if any(name in cell for cell in own):
                title = f"{_TITLES[data.group]} at {longest:,} tokens"
                panels.setdefault(title, {})[name] = _passages(data)
        files = super().figures(cells, records, folder)
        if max(map(len, panels.values())) == 1:
            return files
        path = folder / f"{self.label}_by_passages.png"
        return [*files, plots.over_counts(own, panels, ("passages", "exact match"), path)]

    def _rows(self, group: str, path: Path) -> tuple[list[_Row], list[_Row]]:
        """What is asked, and questions with answers to draw demonstrations from.

        What is asked is left out of these, but for PopQA's, which are the same, one by one.
        """
        train = path.with_name(_FILES[group][2])
        most = max(_passages(data) for data in self.chosen() if data.group == group)
        every = list(_rows(path, most))
        rows = every
        if self.max_examples is not None and len(rows) > self.max_examples:
            order = np.random.default_rng(self.seed).permutation(len(rows))[: self.max_examples]
            rows = [rows[place] for place in order]
        if train == path or not self.demonstrations:
            return rows, every
        asked = {metrics.normalise(row.question) for row in rows}
        pool = (row for row in _rows(train, 1) if metrics.normalise(row.question) not in asked)
        return rows, list(pool)

    def _picked(self, pool: Sequence[_Row], row: _Row) -> list[_Row]:
        rng = np.random.default_rng([self.seed, row.line])
        # One more than wanted, as one of them may be the question itself.
        places = rng.permutation(len(pool))[: self.demonstrations + 1]
        found = [pool[place] for place in places if pool[place].question != row.question]
        return found[: self.demonstrations]


def _passages(data: DataSet) -> int:
    """How many of them a data set such as nq_10 reads."""
    return int(data.name.rpartition("_")[2])


def _rows(path: Path, passages: int) -> Iterator[_Row]:
    """Questions of a file with their first `passages` passages."""
    for number, row in local_files.rows(path, _FIELDS):
        answers = [answer for answer in flat(row["answer"]) if isinstance(answer, str)]
        fault = None
        if not isinstance(row["question"], str) or not answers:
            fault = "has a question or an answer that is no text"
        elif not isinstance(row["ctxs"], list) or not all(map(_readable, row["ctxs"])):
            fault = "has a passage without a text"
        if fault is not None:
            local_files.skip(path, number, fault)
            continue
        texts = [_passage(passage) for passage in row["ctxs"][:passages]]
        yield _Row(number, row["question"].strip(), answers, texts)


def _readable(passage) -> bool:
    return isinstance(passage, dict) and isinstance(passage.get("text"), str)


def _passage(passage: dict) -> str:
    title = passage.get("title")
    return f"Passage ({title}): {passage['text']}" if title else f"Passage: {passage['text']}"


def _text(row: _Row, passages: Sequence[str], *, done: bool) -> str:
    """A question, with the answer where it is `done`."""
    parts = [*passages, f"Question: {row.question}\nAnswer:"]
    text = "\n\n".join(parts)
    return f"{text} {row.answers[0]}\n\n" if done else text
