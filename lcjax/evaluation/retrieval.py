"""Retrievers in evaluations: the section that opens one, and tables of how well it finds.

python eval.py retrieval --path=questions.jsonl --retrievers='[{folder: store, kind: sparse}]'

A line of the file is a `question` with `answer` (a text or a list), `relevant` (ids of passages, or
gains by id), or both. Answers are searched in the text of the hits (`has_answer`).
"""

import dataclasses
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lcjax.errors import InputError, check_integer, check_integers, check_one_of
from lcjax.evaluation import plots
from lcjax.evaluation.metrics import qa, ranking
from lcjax.evaluation.split import SOURCES, check_scored, windows_of_others
from lcjax.evaluation.task import Record, Records
from lcjax.files import write_whole
from lcjax.generation.language_model import LanguageModel
from lcjax.generation.retrieval_reader import METHODS, RetrievalReader, Retriever
from lcjax.generation.sampling import GeneratedText, Sampling
from lcjax.generation.scorer import Ids, PassageSpan, Scorer, Spans, WrappedScorer
from lcjax.storage import local_path, to_path

# Scores at several numbers of hits, and those of a whole ranking, with their titles.
_BY_K = {"answer_recall": "answer recall", "hit": "hit", "recall": "recall"}
_SINGLE = {"answer_mrr": "answer MRR", "mrr": "MRR", "ndcg@10": "nDCG@10"}
SOURCE = "a JSONL file with question, and answer or relevant (ids of passages, or gains by id)"


@dataclasses.dataclass(frozen=True)
class RetrieverSection:
    """A datastore, and how it is searched (`lcjax.retrieval.Retriever.open`)."""

    folder: str = ""  # the datastore
    kind: str | None = None  # sparse, dense or hybrid; null: what the datastore has
    encoder: str | None = None  # of queries; null: the one that made the vectors
    index: str = "exact"  # of the vectors
    k: int | None = None  # most hits of a search; null: 100, but 4 where a method reads them all
    name: str = ""  # row of a table; empty: the kind

    def check(self, key: str) -> None:
        """Raises an InputError for settings or a datastore that cannot be searched.

        Args:
          key: the section's place in the config.
        """
        from lcjax.retrieval.datastore import WHY_MAPPED

        check_integers(key, self, 1, "k")
        folder = local_path(f"{key}.folder", self.folder, WHY_MAPPED).expanduser()
        if not self.folder or not folder.is_dir():
            raise InputError(
                f"{key}.folder={self.folder!r} is no folder; name a datastore that"
                " python -m lcjax.retrieval build made"
            )
        self.open()  # before models are loaded and long work begins

    @property
    def label(self) -> str:
        return self.name or self.kind or Path(self.folder).name

    def open(self) -> Retriever:
        """Opens the datastore."""
        from lcjax.retrieval.retriever import Retriever  # with its extras, only where it is used

        options = {"kind": self.kind, "encoder": self.encoder, "index": self.index}
        return Retriever.open(self.folder, **options)

    @property
    def fingerprint(self) -> str:
        """The content of the datastore as a digest."""
        from lcjax.retrieval.datastore import Datastore

        return Datastore(self.folder).fingerprint

    def search(self, queries: Sequence[str], k: int | None = None) -> list[list[Any]]:
        """Opens the datastore, and returns the best hits of each query: `self.k`, at most `k`."""
        most = self.k or 100
        most = most if k is None else min(most, k)
        return self.open().search(list(queries), most) if len(queries) else []


@dataclasses.dataclass(frozen=True)
class Reading:
    """A method with its own retriever, which reads the retrieved passages in any task.

    The fields are those of `RetrievalReader`.
    """

    # The datastore; its k is the number of passages that are read.
    retriever: RetrieverSection = dataclasses.field(default_factory=RetrieverSection)
    how: str = "input"  # input, context, fid, mixture, rag_token, rag_sequence
    stride: int | None = None  # tokens from one search to the next; null: one search
    query_tokens: int | None = None  # at the end of the text; null: all of it, or 32 with a stride
    temperature: float = 1.0  # of scores, for mixture
    passage_tokens: int | None = None  # longer passages are cut; null: whole
    decoder: int | None = None  # tokens at the end of a window that are read; null: all
    # own, or foreign as a control: what is found for a window of another document. It needs
    # `decoder`, and windows twice as long
    source: str = "own"

    def __post_init__(self):
        check_one_of("retrieval.how", self.how, METHODS)
        check_one_of("retrieval.source", self.source, SOURCES)
        check_integers("retrieval", self, 1, "stride", "query_tokens", "passage_tokens", "decoder")
        if self.source == "foreign" and self.decoder is None:
            raise InputError(
                "retrieval.source=foreign needs retrieval.decoder, the tokens at the end of a"
                " window that are read; give half of the window or less"
            )

    @property
    def fingerprint(self) -> str:
        return self.retriever.fingerprint

    def reader(self, lm: LanguageModel, length: int) -> Scorer:
        """Returns `lm` as a reader of windows of `length` tokens."""
        decoder = min(self.decoder or length, length)
        reader = self._reader(lm.with_method(length=decoder))
        return reader if self.decoder is None else WindowReader(reader, decoder, self.source)

    def _reader(self, lm: LanguageModel) -> RetrievalReader:
        names = ("how", "query_tokens", "temperature", "passage_tokens")
        options = {name: getattr(self, name) for name in names}
        when = "once" if self.stride is None else self.stride
        k = self.retriever.k or RetrievalReader.k
        return RetrievalReader(lm, self.retriever.open(), k, when=when, **options)


@dataclasses.dataclass(frozen=True)
class WindowReader(WrappedScorer):
    """Reads the last `decoder` tokens of a window with the passages retrieved for them.

    With source=foreign the tokens before are the end of a window of another document, and passages
    are those that are found for it.
    """

    lm: RetrievalReader
    decoder: int
    source: str = "own"

    def nll(self, tokens: np.ndarray, *, first: int, lengths: np.ndarray) -> np.ndarray:
        """As `RetrievalReader.nll`, for the tokens of the decoder."""
        width = tokens.shape[1]
        self.check_scored(width, first, np.min(lengths))
        start = width - self.decoder
        searched = None if self.source == "own" else tokens[:, start - self.decoder : start]
        nll = np.zeros(tokens.shape, np.float32)
        nll[:, start:] = self.lm.nll(
            tokens[:, start:],
            first=first - start,
            lengths=np.asarray(lengths) - start,
            searched=searched,
        )
        return nll

    def generate(
        self, prompts: Sequence[Ids], sampling: Sampling = Sampling(), **options: Any
    ) -> list[GeneratedText]:
        """Raises an InputError, as prompts have no windows."""
        raise InputError("retrieval.decoder cuts windows of texts; leave it out for prompts")

    def check_scored(self, length: int, first: int, size: int) -> None:
        check_scored(f"retrieval.decoder={self.decoder}", self.decoder, length, first, size)
        if self.source == "foreign" and length < 2 * self.decoder:
            raise InputError(
                f"retrieval.source=foreign needs windows of {2 * self.decoder} tokens, twice"
                f" retrieval.decoder, and lengths has {length}; raise lengths"
            )

    def with_foreign_context(
        self,
        tokens: np.ndarray,
        others: Iterable[np.ndarray],
        seed: Sequence[int],
        passages: Sequence[PassageSpan] | None = None,
    ) -> np.ndarray:
        if self.source == "own":
            return tokens
        tokens, start = tokens.copy(), len(tokens) - self.decoder
        others = windows_of_others(others, len(tokens), "retrieval")
        other = others[np.random.default_rng(seed).integers(len(others))]
        tokens[start - self.decoder : start] = other[-self.decoder :]
        return tokens

    def num_unread(
        self,
        size: int,
        movable: Spans | None = None,
        passages: Sequence[PassageSpan] = (),
    ) -> int:
        return max(size - self.decoder, 0)


@dataclasses.dataclass(frozen=True)
class Knn:
    """A method that mixes in the next tokens of similar contexts (kNN-LM).

    The fields are those of `lcjax.retrieval.KnnLM`.
    """

    folder: str = ""  # of python -m lcjax.retrieval build-tokens, with the model of this method
    k: int = 1024  # nearest keys
    weight: float = 0.25  # of their tokens, lambda of the paper; 0: the model alone
    temperature: float = 1.0  # squared distances are divided by it
    index: str = "exact"  # or the approximate index of the datastore: ivf or ivf_pq

    def check(self, key: str) -> None:
        """Raises an InputError for invalid settings; `key` is the section's place."""
        from lcjax.retrieval.knn_lm import TokenStore, check_settings

        check_settings(key, self)
        try:
            TokenStore(self.folder)
        except InputError as error:
            raise InputError(f"{key}.folder={error}") from None

    @property
    def fingerprint(self) -> str:
        """The content of the datastore as a digest."""
        from lcjax.retrieval.knn_lm import TokenStore

        return TokenStore(self.folder).fingerprint

    def reader(self, lm: LanguageModel, length: int) -> Scorer:
        """Returns `lm` with the datastore, for windows of `length` tokens."""
        from lcjax.retrieval.knn_lm import KnnLM, TokenStore

        lm = lm.with_method(length=length)
        options = {name: getattr(self, name) for name in ("k", "weight", "temperature", "index")}
        return KnnLM(lm, TokenStore(self.folder), **options)


@dataclasses.dataclass(frozen=True)
class RetrievalConfig:
    """The config of `eval.py retrieval`."""

    retrievers: tuple[RetrieverSection, ...] = ()  # rows of the table
    path: str = ""  # the questions
    k: tuple[int, ...] = (1, 5, 10, 20, 50, 100)  # columns of the table
    max_examples: int | None = None  # questions, the first ones; null: all
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
        answers = qa.flat(row.get("answer", []))
        relevant = row.get("relevant", {})
        if isinstance(relevant, list):
            relevant = dict.fromkeys(relevant, 1.0)
        if not isinstance(row["question"], str) or not row["question"].strip():
            raise ValueError("has a question that is no text")
        if not isinstance(relevant, dict) or not all(map(_is_gain, relevant.values())):
            raise ValueError("has relevant that is neither a list of ids nor gains by id")
        if not all(isinstance(answer, str) for answer in answers):
            raise ValueError("has an answer that is no text")
        relevant = {str(name): float(gain) for name, gain in relevant.items() if gain}
        if not answers and not relevant:
            raise ValueError("has neither an answer nor a relevant passage")
        return cls(row["question"].strip(), answers, relevant)

    def scores(self, hits: Sequence[Any], ks: Sequence[int]) -> Record:
        """The scores of the hits of this question by name."""
        scores = {}
        gains = [self.relevant.get(str(hit.passage.id), 0.0) for hit in hits]
        if self.answers:
            is_answer = [float(ranking.has_answer(hit.passage.text, self.answers)) for hit in hits]
            scores |= {f"answer_recall@{k}": ranking.hit(is_answer, k) for k in ks}
            scores["answer_mrr"] = ranking.reciprocal_rank(is_answer)
        if self.relevant:
            total = len(self.relevant)
            scores |= {f"hit@{k}": ranking.hit(gains, k) for k in ks}
            scores |= {f"recall@{k}": ranking.recall(gains, k, total) for k in ks}
            scores["mrr"] = ranking.reciprocal_rank(gains)
            scores["ndcg@10"] = ranking.ndcg(gains, 10, list(self.relevant.values()))
        return scores


def _is_gain(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e9


def evaluate(config: RetrievalConfig) -> Records:
    """Returns a record for each retriever: means over questions, and seconds per question."""
    from lcjax.evaluation.tasks import local_files  # tasks have a `RetrieverSection`

    if not config.retrievers:
        raise InputError("retrievers is empty; give at least one: [{folder: store, kind: sparse}]")
    for index, section in enumerate(config.retrievers):
        section.check(f"retrievers.{index}")
    labels = [section.label for section in config.retrievers]
    if repeated := sorted({label for label in labels if labels.count(label) > 1}):
        names = ", ".join(repeated)
        raise InputError(f"retrievers: duplicate name {names}; give each a unique name")
    for k in config.k:
        check_integer("k", k, 1)
    check_integers("", config, 1, "max_examples")
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
    """Evaluates retrievers: returns the tables as Markdown, and the files that were written."""
    from lcjax.evaluation.report import tables

    if config.out is not None:
        try:
            to_path(config.out).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"out={config.out} cannot be a folder ({error}); name another"
            ) from None
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
        write_whole(file, content + "\n" * (not content.endswith("\n")))
    panels = {title: counts for title, counts in by_k.items() if len(counts) > 1}
    if panels:
        labels = ("passages", "mean over questions")
        files.append(plots.over_counts(records, panels, labels, folder / "retrieval.png"))
    return text, files
