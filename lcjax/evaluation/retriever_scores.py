"""`eval.py retrieval`: how well retrievers find the passages of questions.

python eval.py retrieval --path=questions.jsonl --retrievers='[{folder: store, kind: sparse}]'

A line of the file is a `question` with `answer` (a text or a list), `relevant` (ids of passages, or
gains by id), or both. Answers are searched in the text of the hits (`has_answer`).
"""

import dataclasses
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lcjax.errors import InputError, PositiveInt, check_fields
from lcjax.evaluation import plots
from lcjax.evaluation.metrics import qa
from lcjax.evaluation.report import tables
from lcjax.evaluation.retrieval import RetrieverSection
from lcjax.evaluation.task import Record, Records
from lcjax.evaluation.tasks import local_files
from lcjax.files import check_outputs, write_whole
from lcjax.retrieval.negatives import has_answer
from lcjax.storage import to_path

# Scores at several numbers of hits, and those of a whole ranking, with their titles.
_BY_K = {"answer_recall": "answer recall", "hit": "hit", "recall": "recall"}
_SINGLE = {"answer_mrr": "answer MRR", "mrr": "MRR", "ndcg@10": "nDCG@10"}
SOURCE = "a JSONL file with question, and answer or relevant (ids of passages, or gains by id)"


@dataclasses.dataclass(frozen=True)
class RetrievalConfig:
    """The config of `eval.py retrieval`."""

    retrievers: tuple[RetrieverSection, ...] = ()  # rows of the table
    path: str = ""  # the questions
    k: tuple[PositiveInt, ...] = (1, 5, 10, 20, 50, 100)  # columns of the table
    # Maximum number of questions, the first ones; null: all
    max_examples: PositiveInt | None = None
    out: str | None = None  # folder for the table, its numbers and the curves; null: printed only


@dataclasses.dataclass(frozen=True)
class Question:
    """A question, its answers, and the gains of relevant passages by id."""

    text: str
    answers: list[str]
    relevant: Mapping[str, float]

    @classmethod
    def parse(cls, _: int, row: dict) -> "Question":
        """Returns the question of a row of a file; raises a ValueError if it has none."""
        answers = qa.flat(row.get("answers") or row.get("answer", []))
        relevant = row.get("relevant", {})
        if isinstance(relevant, list):
            relevant = dict.fromkeys(relevant, 1.0)
        if not isinstance(row["question"], str) or not row["question"].strip():
            raise ValueError("has a question that is no text")
        if not isinstance(relevant, dict) or not all(map(_is_gain, relevant.values())):
            raise ValueError("has relevant that is neither a list of ids nor gains by id")
        if not all(isinstance(answer, str) and answer.strip() for answer in answers):
            raise ValueError("has an answer that is empty or no text")
        relevant = {str(name): float(gain) for name, gain in relevant.items() if gain}
        if not answers and not relevant:
            raise ValueError("has neither an answer nor a relevant passage")
        return cls(row["question"].strip(), answers, relevant)

    def scores(self, hits: Sequence[Any], ks: Sequence[int]) -> Record:
        """Returns the scores of this question's hits by name."""
        scores = {}
        gains = [self.relevant.get(str(result.passage.id), 0.0) for result in hits]
        if self.answers:
            is_answer = [float(has_answer(result.passage.text, self.answers)) for result in hits]
            scores |= {f"answer_recall@{k}": hit(is_answer, k) for k in ks}
            scores["answer_mrr"] = reciprocal_rank(is_answer)
        if self.relevant:
            total = len(self.relevant)
            scores |= {f"hit@{k}": hit(gains, k) for k in ks}
            scores |= {f"recall@{k}": recall(gains, k, total) for k in ks}
            scores["mrr"] = reciprocal_rank(gains)
            scores["ndcg@10"] = ndcg(gains, 10, list(self.relevant.values()))
        return scores


def hit(gains: Sequence[float], k: int) -> float:
    """Returns 1 if one of the first `k` hits is relevant (has a gain above 0), else 0."""
    return float(any(gain > 0 for gain in gains[:k]))


def recall(gains: Sequence[float], k: int, num_relevant: int) -> float:
    """Returns the share of the `num_relevant` relevant passages among the first `k` hits."""
    return sum(gain > 0 for gain in gains[:k]) / num_relevant


def reciprocal_rank(gains: Sequence[float]) -> float:
    """Returns 1 / rank of the first relevant hit, counted from 1; 0 without one."""
    ranks = (rank for rank, gain in enumerate(gains, 1) if gain > 0)
    return 1 / next(ranks, math.inf)


def ndcg(gains: Sequence[float], k: int, relevant: Sequence[float]) -> float:
    """Computes the normalised discounted cumulative gain of the first `k` hits.

    DCG = sum over ranks i of gain_i / log2(i + 1), with linear gains (trec_eval). It is divided by
    the DCG of the best order of `relevant`, the gains of all relevant passages.
    """

    def dcg(values: Sequence[float]) -> float:
        return math.fsum(gain / math.log2(rank + 1) for rank, gain in enumerate(values[:k], 1))

    return dcg(gains) / dcg(sorted(relevant, reverse=True))


def _is_gain(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e9


def evaluate(config: RetrievalConfig) -> Records:
    """Returns a record for each retriever: means over questions, and seconds per question."""
    if not config.retrievers:
        raise InputError("retrievers is empty; give at least one: [{folder: store, kind: sparse}]")
    for index, section in enumerate(config.retrievers):
        section.check(f"retrievers.{index}")
    labels = [section.label for section in config.retrievers]
    if repeated := sorted({label for label in labels if labels.count(label) > 1}):
        names = ", ".join(repeated)
        raise InputError(f"retrievers: duplicate name {names}; give each a unique name")
    check_fields("", config)
    if not config.k:
        raise InputError("k is empty; give at least one number of hits")
    if not to_path(config.path).is_file():
        raise InputError(f"path={config.path!r} is no file; give {SOURCE}")
    rows = list(local_files.rows(to_path(config.path), ("question",), Question.parse))
    questions = rows[: config.max_examples]
    if not questions:
        raise InputError(f"{config.path} contains no valid row; give {SOURCE}")
    ks = sorted(set(config.k))
    return [_record(section, questions, ks) for section in config.retrievers]


def _record(section: RetrieverSection, questions: Sequence[Question], ks: list[int]) -> Record:
    # nDCG reads ten hits.
    section = dataclasses.replace(section, k=max(ks[-1], 10))
    start = time.perf_counter()
    hits = section.search([question.text for question in questions])
    seconds = time.perf_counter() - start
    scores = [q.scores(row, ks) for q, row in zip(questions, hits, strict=True)]
    names = dict.fromkeys(name for row in scores for name in row)
    means = {name: float(np.mean([row[name] for row in scores if name in row])) for name in names}
    cost = {"questions": len(questions), "seconds_per_question": seconds / len(questions)}
    return {"method": section.label, "folder": section.folder, **means, **cost}


def run(config: RetrievalConfig) -> tuple[str, list[Path]]:
    """Evaluates retrievers; returns the tables as Markdown, and the written files."""
    if config.out is not None:
        try:
            to_path(config.out).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"out={config.out} cannot be a folder ({error}); name another"
            ) from None
        outputs = [to_path(config.out) / f"retrieval.{e}" for e in ("json", "md", "csv", "png")]
        check_outputs(outputs, '"seconds_per_question"')
    records = evaluate(config)
    names = {name for record in records for name in record}
    by_k = {
        title: {f"{field}@{k}": k for k in sorted(set(config.k)) if f"{field}@{k}" in names}
        for field, title in _BY_K.items()
    }
    by_k = {title: counts for title, counts in by_k.items() if counts}
    columns = list(by_k.items())
    columns.append(("retriever", {name: title for name, title in _SINGLE.items() if name in names}))
    texts = []
    for title, heads in columns:
        grid = [[title, *map(str, heads.values())]]
        for record in records:
            cells = [f"{record[name]:.4f}" if name in record else "" for name in heads]
            grid.append([record["method"], *cells])
        texts.append(tables.markdown(grid))
    text = "\n".join(texts)
    if config.out is None:
        return text, []
    folder = to_path(config.out)
    files = [folder / f"retrieval.{ending}" for ending in ("md", "json", "csv")]
    contents = (text, json.dumps(records, indent=1), tables.to_csv(records))
    for file, content in zip(files, contents, strict=True):
        write_whole(file, content if content.endswith("\n") else f"{content}\n")
    panels = {title: counts for title, counts in by_k.items() if len(counts) > 1}
    if panels:
        labels = ("passages", "mean over questions")
        files.append(plots.over_counts(records, panels, labels, folder / "retrieval.png"))
    return text, files
