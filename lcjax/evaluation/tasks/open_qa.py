"""Open-domain questions with retrieved passages: NQ, TriviaQA and PopQA, by number of passages.

CEPE (arXiv 2402.16617, section 4.2): two demonstrations, each with its best passage, then k
passages, the question and the beginning of the answer; 25 tokens, up to a newline; exact match over
all aliases. Files are those of CEPE or Contriever: JSONL with `question`, `answer` and `ctxs`, the
passages with the best first, with or without a `score`. `wording` names a file with other prompts.

The decoder of a model with a memory reads the demonstrations and the first ten passages; the memory
reads each of the other passages as one chunk (`context: {decoder_passages: 10}` of a method).
REPLUG reads the demonstrations and one passage in every pass, with the weights
softmax(score / temperature).

With a `retriever`, passages are retrieved for the questions, and files need no `ctxs`. The sets
`own_1` to `own_60`, and those without passages (`nq_0`, closed book), run only if `tasks` names
them.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from lcjax.errors import check_integers
from lcjax.evaluation import plots
from lcjax.evaluation.corpus import TokenizedCorpus
from lcjax.evaluation.metrics import qa
from lcjax.evaluation.prompt import Segment
from lcjax.evaluation.prompt_task import Example
from lcjax.evaluation.retrieval import RetrieverSection
from lcjax.evaluation.statistics import at_longest
from lcjax.evaluation.task import Limits, Record, Records, Task
from lcjax.evaluation.tasks import local_files
from lcjax.evaluation.tasks.benchmark import AnswerBenchmark, DataSet, best_of, by_name
from lcjax.evaluation.tasks.local_files import Wording

PASSAGES = (0, 1, 5, 10, 15, 20, 30, 60)
OWN_PASSAGES = (0, 1, 2, 3, *PASSAGES[2:])
SOURCE = (
    "CEPE's retrieval files (its retrieval/README.md): nq-open/test.jsonl and train.jsonl,"
    " triviaqa/validation.jsonl and train.jsonl, popqa/test.jsonl"
)
# Folder, questions, and demonstrations; those of PopQA are its other questions.
_FILES = {
    "nq": ("nq-open", "test.jsonl", "train.jsonl"),
    "triviaqa": ("triviaqa", "validation.jsonl", "train.jsonl"),
    "popqa": ("popqa", "test.jsonl", "test.jsonl"),
    "own": ("own", "test.jsonl", "train.jsonl"),
}
_TITLES = {"nq": "Natural Questions", "triviaqa": "TriviaQA", "popqa": "PopQA", "own": "Questions"}
_FIELDS = ("question", "answer", "ctxs")
_TEXTS = local_files.library_prompts("open_qa")
_PLACEHOLDERS = {
    "instruction": "", "passage": "title? text", "untitled": "text", "question": "question",
    "omitted": "",
}  # fmt: skip


_best = functools.partial(best_of, strip=True)
_SCORES = {
    "exact_match": _best(qa.exact_match), "substring_match": _best(qa.substring_match),
    "f1": _best(qa.qa_f1_verdict),
}  # fmt: skip
_SETS = tuple(
    DataSet(f"{name}_{count}", name, 25, _SCORES, stop=("\n",))
    for name in _FILES
    for count in (OWN_PASSAGES if name == "own" else PASSAGES)
)


@dataclasses.dataclass(frozen=True)
class _Row:
    line: int
    question: str
    answers: list[str]
    passages: list[tuple[Any, float | None]]  # with title and text, and their scores

    def text(self, wording: Wording, count: int = 0, *, answered: bool = False) -> str:
        """Returns the question after its best `count` passages; `answered` adds an answer."""
        passages = [_titled(wording, passage) for passage, _ in self.passages[:count]]
        text = "\n\n".join([*passages, wording.fill("question", question=self.question)])
        return f"{text} {self.answers[0]}\n\n" if answered else text


@Task.register_subclass("open_qa")
@dataclasses.dataclass(frozen=True)
class OpenQa(AnswerBenchmark):
    """Data sets such as `nq_10`; the end of the last passages may be cut, never the question."""

    datasets: ClassVar[dict[str, DataSet]] = by_name(_SETS)
    title: ClassVar[str] = "Open-domain QA"
    source: ClassVar[str] = SOURCE
    cut: ClassVar[str] = "right"

    demonstrations: int = 2
    seed: int = 42  # of the demonstrations, and of the choice of max_examples questions
    retriever: RetrieverSection | None = None  # finds the passages; null: those of the files
    # YAML file with instruction, passage, untitled, question and omitted; null: this library's own
    wording: str | None = None

    def selection(self) -> list[DataSet]:
        chosen = super().selection()
        if self.tasks:
            return chosen
        return [data for data in chosen if data.group != "own" and _num_passages(data)]

    def check(self, limits: Limits, key: str) -> None:
        super().check(limits, key)
        if self.retriever is not None:
            self.retriever.check(f"{key}.retriever")
        check_integers(key, self, 0, "demonstrations", "seed")
        self.read_wording(key)
        for data in self.selection():
            if self.demonstrations:
                folder, _, train = _FILES[data.group]
                local_files.find(self.path, (f"{folder}/{train}",), key, SOURCE)

    def read_wording(self, key: str) -> Wording:
        return local_files.read_wording(self.wording, _TEXTS, _PLACEHOLDERS, key)

    def files(self, name: str) -> tuple[str, ...]:
        folder, test, _ = _FILES[self.datasets[name].group]
        return (f"{folder}/{test}",)

    def read(self, data: DataSet, path: Path, corpus: TokenizedCorpus) -> Iterator[Example]:
        rows, pool = corpus.once((self, path), lambda: self._rows(data.group, path))
        count, wording = _num_passages(data), self.read_wording(self.label)
        for row in rows:
            demos, passages = self._demonstrations(pool, row), row.passages[:count]
            demo_texts = [demo.text(wording, min(count, 1), answered=True) for demo in demos]
            passage_texts = [(f"{_titled(wording, p)}\n\n", score) for p, score in passages]
            segments = [
                Segment("instruction", wording.texts["instruction"]),
                *(Segment("demo", text) for text in demo_texts),
                *(Segment("passage", text, score=score) for text, score in passage_texts),
                Segment("question", row.text(wording)),
            ]
            fields = {"line": row.line, **wording.fields}
            fields |= {"passages": len(passages), "question": row.question}
            mark = f"\n\n{wording.texts['omitted']}"
            yield Example(segments, row.answers, fields, cut_mark=mark)

    def cluster(self, record: Record) -> object:
        """Returns the question of a record; records of other numbers of passages share it."""
        return self.datasets[record["dataset"]].group, record["line"]

    def summarise(self, records: Records) -> Record:
        further = [name for name in _SCORES if name != "exact_match"]
        return {**super().summarise(records), **self.further_means(records, further)}

    def aggregates(self, cells: Records, records: Records) -> Record:
        """Adds the means of the other scores to `FileBenchmark.aggregates`."""
        rows = super().aggregates(cells, records)
        for cell in at_longest(cells):
            means = {key: cell[key] for key in cell if key.startswith("all:")}
            rows[cell["method"]] |= {key: round(100 * mean, 2) for key, mean in means.items()}
        return rows

    def figures(self, cells: Records, records: Records, folder: Path) -> list[Path]:
        """Draws the number by length, and the curve of each set by its number of passages."""
        files, cells = super().figures(cells, records, folder), at_longest(cells)
        panels: dict[str, dict[str, int]] = {}
        for name, data in self.datasets.items():
            if _num_passages(data) and any(name in cell for cell in cells):
                title = f"{_TITLES[data.group]} at {cells[0]['length']:,} tokens"
                panels.setdefault(title, {})[name] = _num_passages(data)
        if max(map(len, panels.values()), default=1) == 1:
            return files
        path = folder / f"{self.label}_by_passages.png"
        return [*files, plots.over_counts(cells, panels, ("passages", "exact match"), path)]

    def _rows(self, group: str, path: Path) -> tuple[list[_Row], list[_Row]]:
        """Returns the questions, and questions with answers to draw demonstrations from.

        The latter do not include the former, except for PopQA, which has one file.
        """
        train = path.with_name(_FILES[group][2])
        counts = [_num_passages(data) for data in self.selection() if data.group == group]
        has_passages = self.retriever is None and max(counts) > 0
        pool = rows = _rows(path, max(counts) if has_passages else None)
        if self.max_examples is not None and len(rows) > self.max_examples:
            order = np.random.default_rng(self.seed).permutation(len(rows))[: self.max_examples]
            rows = [rows[index] for index in order]
        if train != path and self.demonstrations:
            questions = {qa.normalise(row.question) for row in rows}
            pool = _rows(train, 1 if has_passages else None)
            pool = [row for row in pool if qa.normalise(row.question) not in questions]
        if self.retriever is not None and max(counts) > 0:
            lines = {demo.line for row in rows for demo in self._demonstrations(pool, row)}
            chosen = self._search([row for row in pool if row.line in lines], 1)
            by_line = {row.line: row for row in chosen}
            return self._search(rows, max(counts)), [by_line.get(r.line, r) for r in pool]
        return rows, pool

    def _search(self, rows: Sequence[_Row], count: int) -> list[_Row]:
        """Returns `rows` with the passages that the retriever finds."""
        results = self.retriever.search([row.question for row in rows], count)
        return [
            dataclasses.replace(row, passages=[(hit.passage, hit.score) for hit in hits])
            for row, hits in zip(rows, results, strict=True)
        ]

    def _demonstrations(self, pool: Sequence[_Row], row: _Row) -> list[_Row]:
        rng = np.random.default_rng([self.seed, row.line])
        # One more than needed, as one of them may be the question itself.
        indices = rng.permutation(len(pool))[: self.demonstrations + 1]
        demos = [pool[index] for index in indices if pool[index].question != row.question]
        return demos[: self.demonstrations]


def _num_passages(data: DataSet) -> int:
    """Returns the number of passages of a data set such as nq_10."""
    return int(data.name.rpartition("_")[2])


def _rows(path: Path, num_passages: int | None) -> list[_Row]:
    """Reads the questions of a file with their first passages; None reads no passages."""

    def parse(number: int, row: dict) -> _Row:
        answers = [answer for answer in qa.flat(row["answer"]) if isinstance(answer, str)]
        if not isinstance(row["question"], str) or not answers:
            raise ValueError("has a question or an answer that is no text")
        if num_passages is None:
            return _Row(number, row["question"].strip(), answers, [])
        if not isinstance(row["ctxs"], list) or not all(map(_has_text, row["ctxs"])):
            raise ValueError("has a passage without a text")
        passages = [_passage(passage) for passage in row["ctxs"][:num_passages]]
        return _Row(number, row["question"].strip(), answers, passages)

    fields = _FIELDS[:2] if num_passages is None else _FIELDS
    return list(local_files.rows(path, fields, parse))


def _has_text(passage) -> bool:
    return isinstance(passage, dict) and isinstance(passage.get("text"), str)


def _passage(passage: dict) -> tuple[SimpleNamespace, float | None]:
    """Returns a passage with title and text, and its score."""
    text = SimpleNamespace(title=passage.get("title"), text=passage["text"])
    return text, local_files.parse_score(passage.get("score"))


def _titled(wording: Wording, passage: Any) -> str:
    """Returns the text of a passage after its title."""
    if not passage.title:
        return wording.fill("untitled", text=passage.text)
    return wording.fill("passage", title=str(passage.title), text=passage.text)
