"""Language modelling with retrieved chunks: perplexity of a text by number of chunks.

CEPE (arXiv 2402.16617, sec. 4.1): 2,048 tokens of text and k chunks of 256 that were retrieved for
the first 256 of them, which are the query and are not scored; k is 0, 8, 20 or 50, so lengths are
2,048, 4,096, 7,168 and 14,848. Tables show the mean over domains of their perplexities.

The chunks precede the text, with the best one next to it (in-context RALM), or with `best: first`
farthest from it, as in CEPE's code. The order matters only if the decoder reads the chunks. A
memory reads each retrieved chunk as one chunk of its context. REPLUG reads the text after each of
them, with the weights softmax(score / temperature), or equal weights if a chunk has no score.

`python -m lcjax.retrieval windows` writes a file of texts with their chunks. With a `retriever`,
chunks are retrieved in the evaluation for the beginning of the text, up to the first scored token.
Its datastore must hold passages of `chunk` tokens (of this model's tokenizer), from other documents
than the texts.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, ClassVar

import numpy as np

from lcjax.config import to_data_path
from lcjax.errors import InputError, OneOf, PositiveInt, check_fields
from lcjax.evaluation.corpus import TokenizedCorpus
from lcjax.evaluation.prompt import Prompt, Span
from lcjax.evaluation.retrieval import RetrieverSection
from lcjax.evaluation.split import with_movable
from lcjax.evaluation.statistics import group_by
from lcjax.evaluation.task import (
    Limits,
    Metric,
    Record,
    Records,
    Task,
    Unit,
    equal_weights,
    pad_batch,
)
from lcjax.evaluation.tasks import local_files
from lcjax.evaluation.tasks.perplexity import Perplexity

PLACES = ("last", "first")
SOURCE = "a JSONL file with input_ids or text, and chunks: [{text or ids, score}], a row a text"

Chunk = tuple[np.ndarray, float | None]  # tokens and score
Text = tuple[int, str, np.ndarray, list[Chunk]]  # line, domain, tokens; chunks, best last


@Task.register_subclass("rag_lm")
@dataclasses.dataclass(frozen=True)
class RagLm(Task):
    """Texts with their chunks, from a file of the user.

    Rows hold `input_ids` (of this model's tokenizer) or `text`; `chunks`, each with `ids` or `text`
    and an optional `score` (without scores the best one comes first); and an optional `domain`.
    A length leaves out the rows with too few chunks for it. There is no BOS, as texts are from the
    middle of documents.
    """

    metric: ClassVar[Metric] = Metric(
        "perplexity", "Perplexity with retrieved chunks (rag_lm)", True, 2, "nats a token"
    )

    path: str = ""  # the JSONL file; empty, with a retriever: beginnings of the run's `data`
    decoder: PositiveInt = 2048  # tokens of the text
    scored: PositiveInt = 1792  # scored tokens, at the end of the text
    chunk: PositiveInt = 256  # tokens of a chunk: longer chunks are cut, shorter ones left out
    # Place of the best chunk: last, next to the text, or first. A method that reads only some
    # chunks (its `chunks`) reads the last ones if they have no scores.
    best: Annotated[str, OneOf(PLACES)] = "last"
    max_examples: PositiveInt | None = None  # maximum number of texts, the first ones; null: all
    retriever: RetrieverSection | None = None  # finds the chunks; null: those of the file

    @property
    def needs_data(self) -> bool:
        return not self.path

    @property
    def _windows(self) -> Perplexity:
        """The task that scores the last tokens of a window."""
        return Perplexity(protocol="last_k", last=self.scored)

    def check(self, limits: Limits, key: str) -> None:
        check_fields(key, self)
        if self.scored >= self.decoder:
            raise InputError(
                f"{key}.scored={self.scored} must be below {key}.decoder={self.decoder}: what is"
                " before was the query"
            )
        for length in limits.lengths:
            if length < self.decoder or (length - self.decoder) % self.chunk:
                chunks = max(0, round((length - self.decoder) / self.chunk))
                raise InputError(
                    f"lengths: {length} must be {key}.decoder={self.decoder} and a number of chunks"
                    f" of {self.chunk}; nearest: {self.decoder + chunks * self.chunk}"
                )
        if self.retriever is not None:
            self.retriever.check(f"{key}.retriever")
        from_data = self.needs_data and self.retriever is not None
        if not from_data and not to_data_path(self.path).is_file():
            raise InputError(f"{key}.path={self.path!r} is no file; give {SOURCE}")

    def plan(self, corpus: TokenizedCorpus, length: int, limits: Limits) -> list[Unit]:
        count, units = (length - self.decoder) // self.chunk, []
        for line, domain, text, chunks in self._texts(corpus):
            if len(chunks) < count:
                continue
            chunks = chunks[len(chunks) - count :]
            chunks = chunks if self.best == "last" else chunks[::-1]
            ids, scores = zip(*chunks) if count else ((), ())
            tokens = np.concatenate([*ids, text])
            spans = [
                Span("context", place * self.chunk, (place + 1) * self.chunk, score)
                for place, score in enumerate(scores)
            ]
            first = length - self.scored
            fields = {
                "protocol": "rag_lm", "length": length, "stride": None, "bos": "none",
                "document": line, "domain": domain, "chunks": count, "start": 0, "size": length,
                "first": first, "weight": 1.0, "bytes": None,
            }  # fmt: skip
            prompt = Prompt(tokens, tuple(spans))
            units.append(Unit(len(units), (length, first), tokens, fields, prompt))
        return units

    def longest_length(self, corpus: TokenizedCorpus) -> tuple[int, str]:
        num_chunks = max((len(chunks) for *_, chunks in self._texts(corpus)), default=0)
        where = self.path or "data"
        reason = f"{where} has texts of {self.decoder} tokens with up to {num_chunks} chunks"
        return self.decoder + num_chunks * self.chunk, reason

    def _texts(self, corpus: TokenizedCorpus) -> list[Text]:
        return corpus.once(self, lambda: list(self._read(corpus)))

    def _read(self, corpus: TokenizedCorpus) -> Iterator[Text]:
        tokenizer = corpus.tokenizer
        texts = self._of_file(tokenizer) if self.path else self._of_data(corpus)
        texts = itertools.islice(texts, self.max_examples)
        if self.retriever is None:
            yield from texts
            return
        texts = list(texts)
        size = self.decoder - self.scored
        queries = [tokenizer.decode(ids[:size], skip_special=True) for _, _, ids, _ in texts]
        for text, hits in zip(texts, self.retriever.search(queries), strict=True):
            chunks = [{"text": hit.passage.text, "score": hit.score} for hit in hits]
            yield *text[:-1], self._whole(chunks, tokenizer)

    def _of_file(self, tokenizer) -> Iterator[Text]:
        def parse(line: int, row: dict) -> Text:
            text = _ids(row, "input_ids", tokenizer)[: self.decoder]
            chunks = _list(row["chunks"]) if self.retriever is None else []
            if len(text) < self.decoder:
                raise ValueError(f"has {len(text)} tokens of text, {self.decoder} are read")
            return line, str(row.get("domain", "text")), text, self._whole(chunks, tokenizer)

        fields = ("chunks",) if self.retriever is None else ()
        return local_files.rows(to_data_path(self.path), fields, parse)

    def _of_data(self, corpus: TokenizedCorpus) -> Iterator[Text]:
        for number, document in enumerate(corpus.documents(self.decoder, self.max_examples)):
            yield number, "text", document.tokens[: self.decoder], []

    def _whole(self, chunks: list, tokenizer) -> list[Chunk]:
        """Returns the first tokens of those `chunks` that have enough, the best last."""
        pairs = _best_last(_chunk(chunk, tokenizer) for chunk in chunks)
        return [(ids[: self.chunk], score) for ids, score in pairs if len(ids) >= self.chunk]

    def score(self, model, units: Sequence[Unit], batch: int) -> list[Record]:
        prompts = pad_batch([unit.prompt for unit in units], batch)
        records = self._windows.score(with_movable(model, prompts), units, batch)
        field = {} if model.decoder_tokens is None else {"decoder": self.decoder}
        return [record | field for record in records]

    def summarise(self, records: Records) -> Record:
        """Returns the mean over domains of exp(mean of window means), and that of each domain."""
        domains = group_by(records, "domain")
        values = {name: self._windows.summarise(group)["value"] for name, group in domains.items()}
        summary = {
            **self._windows.summarise(records),
            "value": math.fsum(values.values()) / len(values),
            "aggregate": f"mean over {len(values)} domains",
            "chunks": records[0]["chunks"],
        }
        if len(values) > 1:
            summary |= {f"domain:{name}": value for name, value in values.items()}
        return summary

    def example(self, record: Record) -> float | None:
        return self._windows.example(record)

    def weights(self, records: Records) -> list[float]:
        """Returns weights that are equal for all domains."""
        return equal_weights(records, "domain")

    def interval(self, records: Records) -> tuple[float, float]:
        """Returns the bootstrap interval over texts of one domain; NaN for several domains."""
        if len({record["domain"] for record in records}) > 1:
            return math.nan, math.nan
        return self._windows.interval(records)


def _ids(row, name: str, tokenizer) -> np.ndarray:
    """Returns the token ids of a row or of its text; raises ValueError if it has neither."""
    if not isinstance(row, dict):
        raise ValueError("has a chunk that is no object")
    if isinstance(row.get(name), list) and all(isinstance(i, int) for i in row[name]):
        if not all(0 <= i < tokenizer.vocab_size for i in row[name]):
            raise ValueError(f"has {name} beyond the tokenizer's {tokenizer.vocab_size}")
        return np.asarray(row[name], np.int32)
    if isinstance(row.get("text"), str):
        return np.asarray(tokenizer.encode(row["text"]), np.int32)
    raise ValueError(f"has neither {name} nor a text")


def _list(chunks) -> list:
    if not isinstance(chunks, list):
        raise ValueError("has chunks that are no list")
    return chunks


def _chunk(chunk, tokenizer) -> Chunk:
    return _ids(chunk, "ids", tokenizer), local_files.parse_score(chunk.get("score"))


def _best_last(chunks: Iterable[Chunk]) -> list[Chunk]:
    """Sorts chunks by score, the best last; without scores the first is the best."""
    backwards = list(chunks)[::-1]
    if any(score is None for _, score in backwards):
        return backwards
    return sorted(backwards, key=lambda chunk: chunk[1])
