"""Open-domain questions with passages, by their number and by the position of the right one.

open_qa: NQ, TriviaQA and PopQA with retrieved passages, by number of passages. CEPE (arXiv
  2402.16617, section 4.2): two demonstrations, each with its best passage, then k passages, the
  question and the beginning of the answer; 25 tokens, up to a newline; exact match over all
  aliases. Files are those of CEPE or Contriever: JSONL with `question`, `answer` and `ctxs`, the
  passages with the best first, with or without a `score`. With a `retriever`, passages are
  retrieved for the questions, and files need no `ctxs`. The sets `own_1` to `own_60`, and those
  without passages (`nq_0`, closed book), run only if `tasks` names them.
multi_document_qa: questions of NQ with k documents, one of which answers them, by its position. Liu
  et al., Lost in the Middle (arXiv 2307.03172, sections 2 and 3): 100 tokens; an answer is right if
  its first line contains one of the aliases. Files are the published ones, with `question`,
  `answers` and `ctxs`, of which one has `isgold`.

`wording` names a file with other prompts. The decoder of a model with a memory reads the
demonstrations and the first ten passages; the memory reads each of the other passages as one chunk
(`context: {decoder_passages: 10}` of a method). REPLUG reads the demonstrations and one passage in
every pass, with the weights softmax(score / temperature).
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from lcjax.errors import InputError, NonNegativeInt
from lcjax.evaluation import plots
from lcjax.evaluation.corpus import TokenizedCorpus
from lcjax.evaluation.metrics import qa
from lcjax.evaluation.prompt import Segment
from lcjax.evaluation.prompt_task import Example
from lcjax.evaluation.retrieval import RetrieverSection
from lcjax.evaluation.statistics import at_longest, group_by, wilson
from lcjax.evaluation.task import Limits, Record, Records, Task
from lcjax.evaluation.tasks import local_files
from lcjax.evaluation.tasks.benchmark import AnswerBenchmark, DataSet, best_of, by_name
from lcjax.evaluation.tasks.local_files import Wording
from lcjax.retrieval.negatives import has_answer

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

    demonstrations: NonNegativeInt = 2
    seed: NonNegativeInt = 42  # of the demonstrations, and of the choice of max_examples questions
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
        files, places = super().figures(cells, records, folder), {}
        for name, data in self.datasets.items():
            if count := _num_passages(data):
                places[name] = f"{_TITLES[data.group]} at {{:,}} tokens", count
        path = folder / f"{self.label}_by_passages.png"
        return files + _curves(cells, places, ("passages", "exact match"), path)

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


def _rows(path: Path, num_passages: int | None, answer_field: str = "answer") -> list[_Row]:
    """Reads the questions of a file with their first passages; None reads no passages."""

    def parse(number: int, row: dict) -> _Row:
        answers = [answer for answer in qa.flat(row[answer_field]) if isinstance(answer, str)]
        if not isinstance(row["question"], str) or not answers:
            raise ValueError("has a question or an answer that is no text")
        if num_passages is None:
            return _Row(number, row["question"].strip(), answers, [])
        if not isinstance(row["ctxs"], list) or not all(map(_has_text, row["ctxs"])):
            raise ValueError("has a passage without a text")
        passages = [_passage(passage) for passage in row["ctxs"][:num_passages]]
        return _Row(number, row["question"].strip(), answers, passages)

    fields = ("question", answer_field, *(() if num_passages is None else ("ctxs",)))
    return list(local_files.rows(path, fields, parse))


def _has_text(passage) -> bool:
    return isinstance(passage, dict) and isinstance(passage.get("text"), str)


def _passage(passage: dict) -> tuple[SimpleNamespace, float | None]:
    """Returns a passage with title, text and whether it is a gold document, and its score."""
    is_gold = passage.get("isgold") is True
    text = SimpleNamespace(title=passage.get("title"), text=passage["text"], is_gold=is_gold)
    return text, local_files.parse_score(passage.get("score"))


def _titled(wording: Wording, passage: Any, number: int = 0) -> str:
    """Returns the text of a passage after its title; `number` is for texts that show it."""
    values = {"text": passage.text, "number": str(number)}
    if not passage.title:
        return wording.fill("untitled", **values)
    return wording.fill("passage", title=str(passage.title), **values)


def _subspan_match(answer: str, fields: Record) -> float:
    return qa.best(qa.substring_match, answer.split("\n")[0], fields["references"])


TOTALS = (10, 20, 30)  # numbers of documents in the published files
GOLD_POSITIONS = (0, 4, 9, 14, 19, 24, 29)
GOLD_SOURCE = (
    "the files of Lost in the Middle (github.com/nelson-liu/lost-in-the-middle, qa_data), plain or"
    " as .gz"
)
_ALL = 1 << 30  # passages of a question
_REFERENCES = {"oracle": "oracle", "closed_book": "closed book"}
_GOLD_TEXTS = local_files.library_prompts("multi_document_qa")
_GOLD_PLACEHOLDERS = {
    "instruction": "question?", "passage": "number? title? text", "untitled": "number? text",
    "question": "question", "closed_book": "question",
}  # fmt: skip
# As the evaluation script scores an answer, so one that begins with a newline is wrong; and after
# its leading blanks and newlines, which the paper's script for Llama-2 removes before.
_GOLD_SCORES = {
    "best_subspan_em": _subspan_match,
    "best_subspan_em_stripped": lambda answer, fields: _subspan_match(answer.strip(), fields),
}


@Task.register_subclass("multi_document_qa")
@dataclasses.dataclass(frozen=True)
class MultiDocumentQa(AnswerBenchmark):
    """Data sets such as `20_at_9`: 20 documents with the gold document at position 9, from 0.

    `oracle` has the gold document alone, and `closed_book` none. They do not count in the number of
    the task, which is the mean over positions. One file is enough for all sets of the same or a
    smaller number of documents: the gold document is moved, and the last others are left out. If a
    question has too few documents, those of the questions after it are added, without any that
    contains an answer (`padded` of records). Prompts are not cut.
    """

    title: ClassVar[str] = "Multi-document QA"
    source: ClassVar[str] = GOLD_SOURCE
    table_settings: ClassVar[tuple[str, ...]] = ("tasks", "total_documents", "positions")

    total_documents: tuple[int, ...] = TOTALS  # numbers of documents, the gold one included
    positions: tuple[int, ...] = GOLD_POSITIONS  # of the gold document; those within each number
    # YAML file with instruction, passage, untitled, question, closed_book; null: this library's own
    wording: str | None = None

    @functools.cached_property
    def datasets(self) -> dict[str, DataSet]:
        groups = {name: name for name in _REFERENCES}
        groups |= {name: f"{total}_documents" for name, (total, _) in self._places.items()}
        return by_name([DataSet(name, g, 100, _GOLD_SCORES) for name, g in groups.items()])

    @functools.cached_property
    def _places(self) -> dict[str, tuple[int, int]]:
        """The number of documents and the position of the gold one, by data set."""
        pairs = itertools.product(self.total_documents, self.positions)
        return {f"{total}_at_{at}": (total, at) for total, at in pairs if at < total}

    def check(self, limits: Limits, key: str) -> None:
        for field, least in (("total_documents", 2), ("positions", 0)):
            values = getattr(self, field)
            if not values or len(set(values)) < len(values) or min(values) < least:
                rule = f"must be different whole numbers of at least {least}"
                raise InputError(f"{key}.{field}={values} {rule}")
        if min(self.total_documents) <= min(self.positions):
            raise InputError(
                f"{key}.positions={self.positions} has no position of {min(self.total_documents)}"
                " documents, which are counted from 0; add one, or leave this number out"
            )
        super().check(limits, key)
        self.read_wording(key)

    def read_wording(self, key: str) -> Wording:
        return local_files.read_wording(self.wording, _GOLD_TEXTS, _GOLD_PLACEHOLDERS, key)

    def files(self, name: str) -> tuple[str, ...]:
        total, _ = self._places.get(name, (self.total_documents[0], 0))
        totals = sorted({total, *TOTALS}, key=lambda n: (n < total, abs(n - total)))
        names = [
            f"{folder}nq-open-{n}_total_documents_gold_at_{position}.jsonl"
            for n in totals
            for position in sorted({*GOLD_POSITIONS, *self.positions})
            for folder in ("", f"{n}_total_documents/")
            if position < n
        ]
        names += ["nq-open-oracle.jsonl"] * (name in _REFERENCES)
        return tuple(f"{file}{ending}" for file in names for ending in ("", ".gz"))

    def read(self, data: DataSet, path: Path, corpus: TokenizedCorpus) -> Iterator[Example]:
        rows = corpus.once((self, path), lambda: _gold_rows(path))
        total, position = self._places.get(data.name, (int(data.name == "oracle"), 0))
        wording = self.read_wording(self.label)
        wording_fields = wording.fields
        for index, row in enumerate(rows):
            others = [passage for passage, _ in row.passages if not passage.is_gold]
            padding = _padding(path, rows, index, total - 1 - len(others))
            documents = [*others[: max(total - 1, 0)], *padding]
            documents[position:position] = [p for p, _ in row.passages if p.is_gold and total]
            # Without scores, as the gold document has none: REPLUG then weights all alike.
            texts = [f"{_titled(wording, p, n)}\n" for n, p in enumerate(documents, 1)]
            opening = wording.fill("instruction", question=row.question)
            segments = [
                *([Segment("instruction", opening)] if documents else []),
                *(Segment("passage", text) for text in texts),
                Segment("question", wording.fill(
                    "question" if documents else "closed_book", question=row.question
                )),
            ]  # fmt: skip
            fields = {"line": row.line, **wording_fields, "documents": total}
            fields |= {"position": position if documents else None, "padded": len(padding)}
            fields |= {"question": row.question}
            yield Example(segments, row.answers, fields)

    def cluster(self, record: Record) -> object:
        """Returns the question of a record; records of other positions share it."""
        return record["line"]

    def averaged(self, names: Sequence[str]) -> list[str]:
        """Returns the sets of positions, or `names` if there is none."""
        return [name for name in names if name in self._places] or list(names)

    def summarise(self, records: Records) -> Record:
        """Adds how much the position matters, for each number of documents.

        `range` is the difference between the best and the worst position, and `middle_to_ends` the
        mean score in the middle third of the positions over that in the outer thirds.
        """
        cell = super().summarise(records)
        places = group_by((name for name in self._places if name in cell), self._group)
        for group, names in places.items():
            scores = [cell[name] for name in names]
            cell[f"{group}:range"] = max(scores) - min(scores)
            thirds = [3 * (self._places[name][1] + 0.5) / self._places[name][0] for name in names]
            middle = [s for s, third in zip(scores, thirds, strict=True) if 1 <= third < 2]
            ends = [s for s, third in zip(scores, thirds, strict=True) if not 1 <= third < 2]
            if middle and sum(ends):
                cell[f"{group}:middle_to_ends"] = float(np.mean(middle) / np.mean(ends))
        return {**cell, **self.further_means(records, ["best_subspan_em_stripped"])}

    def _group(self, name: str) -> str:
        return self.datasets[name].group

    def aggregates(self, cells: Records, records: Records) -> Record:
        """Adds the range over positions in percent, and the ratio of middle and ends."""
        rows = super().aggregates(cells, records)
        for cell in at_longest(cells):
            spread = {key: 100 * cell[key] for key in cell if key.endswith(":range")}
            spread |= {key: cell[key] for key in cell if key.endswith(":middle_to_ends")}
            rows[cell["method"]] |= {key: round(value, 2) for key, value in spread.items()}
        return rows

    def tables(self, records: Records) -> dict[str, Records]:
        """Returns the curve of each method and length, with Wilson's 95 % intervals."""
        rows = []
        for (method, length, name), group in group_by(records, _curve_key).items():
            low, high = wilson(sum(r["correct"] == 1 for r in group), len(group))
            row = {"method": method, "length": length, "dataset": name}
            row |= {key: group[0][key] for key in ("documents", "position")}
            row |= {"value": float(np.mean([r["correct"] for r in group]))}
            rows.append({**row, "ci_low": low, "ci_high": high, "questions": len(group)})
        return {"by_gold_position": rows}

    def figures(self, cells: Records, records: Records, folder: Path) -> list[Path]:
        """Draws the number by length, and the curve over positions of each number of documents."""
        files = super().figures(cells, records, folder)
        places = {
            name: (f"{total} documents, lengths up to {{:,}} tokens", position)
            for name, (total, position) in self._places.items()
        }
        path = folder / f"{self.label}_by_gold_position.png"
        labels = ("position of the document with the answer (0: first)", "best subspan EM")
        options = {"scale": "linear", "levels": _REFERENCES}
        return files + _curves(cells, places, labels, path, **options)


def _curves(
    cells: Records,
    places: Mapping[str, tuple[str, int]],
    labels: tuple[str, str],
    path: Path,
    **options: Any,
) -> list[Path]:
    """Draws the numbers of data sets at the longest length over a count; returns the file.

    Args:
      cells: The cells of the task.
      places: By data set, the title of its panel, with a place for the length, and its count.
      labels: Of the axes.
      path: The file.
      **options: Those of `plots.over_counts`.

    Returns:
      The file; none if no panel has two points.
    """
    cells, panels = at_longest(cells), {}
    for name, (title, count) in places.items():
        if any(name in cell for cell in cells):
            panels.setdefault(title.format(cells[0]["length"]), {})[name] = count
    if max(map(len, panels.values()), default=1) == 1:
        return []
    return [plots.over_counts(cells, panels, labels, path, **options)]


def _curve_key(record: Record) -> tuple[str, int, str]:
    return record["method"], record["length"], record["dataset"]


def _gold_rows(path: Path) -> list[_Row]:
    """Reads the questions of a file that have exactly one gold document."""
    rows = []
    for row in _rows(path, _ALL, "answers"):
        num_gold = sum(passage.is_gold for passage, _ in row.passages)
        if num_gold == 1:
            rows.append(row)
        else:
            local_files.warn_skipped(path, row.line, f"has {num_gold} passages with isgold, not 1")
    return rows


def _padding(path: Path, rows: Sequence[_Row], index: int, count: int) -> list[Any]:
    """Returns `count` documents of the questions after row `index` that do not answer it."""
    if count <= 0:
        return []
    row, following = rows[index], [*rows[index + 1 :], *rows[:index]]
    present, padding = {passage.text for passage, _ in row.passages}, []
    most = max(len(other.passages) for other in rows)
    candidates = (
        other.passages[rank][0]
        for rank in range(most)
        for other in following
        if rank < len(other.passages)
    )
    while len(padding) < count:
        passage = next(candidates, None)
        if passage is None:
            raise InputError(
                f"{path} has too few documents for total_documents={count + len(row.passages)}:"
                f" question {row.line} lacks {count - len(padding)}"
            )
        if passage.text not in present and not has_answer(passage.text, row.answers):
            present.add(passage.text)
            padding.append(passage)
    return padding
