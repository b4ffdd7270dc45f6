"""Splits windows into the decoder's text, and a context in chunks for a memory or REPLUG.

In a prompt, only documents and demonstrations move to the context, the earliest first; the decoder
reads instruction, question and answer prefix. In a prompt with retrieved passages, only the
passages move, each as a whole, and the decoder also reads the demonstrations. A memory reads all
passages but the best ones (`decoder_passages`), and REPLUG reads all of them.

In CEPE's Table 1 (arXiv 2402.16617) the decoder reads the last 2,048 of 4,096 tokens and the last
4,096 of longer windows; the encoder reads the tokens before in chunks of 256. Its REPLUG weighs the
chunks before a text by the products of Contriever's vectors (app. B).
"""

import abc
import copy
import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar

import numpy as np

from lcjax.errors import InputError, NonNegativeInt, OneOf, PositiveFloat, PositiveInt, check_fields
from lcjax.evaluation.corpus import SentenceEnds
from lcjax.evaluation.prompt import Prompt
from lcjax.generation.contexts import context_chunk_size, split_into_chunks
from lcjax.generation.language_model import LanguageModel
from lcjax.generation.replug import MARGINALS, Replug
from lcjax.generation.sampling import GeneratedText, Sampling
from lcjax.generation.scorer import Ids, PassageSpan, Scorer, Spans, WrappedScorer
from lcjax.generation.scoring import Continuation
from lcjax.memory import Policy
from lcjax.models.memory import Memory, check_memory
from lcjax.retrieval.datastore import EncoderSection
from lcjax.retrieval.encoder import Encoder

SOURCES = ("own", "foreign")
# The memory class to which a setting of `ContextSplit` applies, and the field that it replaces.
_MEMORY_SETTINGS = {
    "trained_context": ("Cepe", "trained_context"),
    "policy": ("SharedLlm", "policy"),
    "ratios": ("SharedLlm", "tree"),
    "ratio": ("Beacon", "ratio"),
}


@dataclasses.dataclass(frozen=True)
class Split(abc.ABC):
    """How a window is split into the decoder's text and its context."""

    key: ClassVar[str]  # field of a method's settings, for messages

    # Tokens at the end of a window that the decoder reads; null: half of the window, at most the
    # trained length, or the window size of a memory that reads window by window.
    decoder: PositiveInt | None = None
    chunk: PositiveInt | None = None  # tokens of a chunk; null: as the memory was trained
    chunks: NonNegativeInt | None = None  # maximum number of chunks, the last ones; null: all
    # own, or foreign as a control: chunks of other documents.
    source: Annotated[str, OneOf(SOURCES)] = "own"

    def __post_init__(self):
        check_fields(self.key, self)

    @abc.abstractmethod
    def reader(self, model, length: int, *, prompts: bool = False) -> "SplitModel":
        """Returns a reader of windows, or prompts, of `length` tokens (`config.apply_method`)."""

    @abc.abstractmethod
    def context(self, model, length: int) -> tuple[int, int] | None:
        """Returns (chunks, tokens per chunk) of the memory stored for a window, or None."""

    @abc.abstractmethod
    def tokens(self, model, length: int) -> int:
        """Returns the number of tokens that the decoder reads in windows of `length` tokens."""

    def shape(self, model, length: int) -> tuple[int, int]:
        """Returns (rows that one prompt takes in a batch, tokens per row)."""
        return 1, self.tokens(model, length)

    @abc.abstractmethod
    def context_passages(self, passages: Sequence[PassageSpan]) -> list[PassageSpan]:
        """Returns those of `passages` that move to the context."""

    @abc.abstractmethod
    def scorer(
        self, model: LanguageModel, chunks: list, scores: list, chunk: int
    ) -> tuple[Scorer, dict[str, Any]]:
        """Returns the scorer of the text, and its options for each row's chunks and scores."""

    @abc.abstractmethod
    def build_prompts(
        self, model: LanguageModel, parts: list["Part"], chunks: list
    ) -> tuple[list, list]:
        """Returns the prompts and the chunks of each row; `parts` are the split prompts."""

    def best_passages(self, passages: Sequence[PassageSpan]) -> list[PassageSpan]:
        """Returns the `self.chunks` best passages (None: all), in the order of the prompt.

        Equal scores are ordered by rank; passages without a rank by position, the last first.
        """

        def order(passage: PassageSpan):
            rank = -passage.start if passage.rank is None else passage.rank
            return -(passage.score or 0.0), rank

        return sorted(sorted(passages, key=order)[: self.chunks])

    def last_chunks(self, chunks: list[np.ndarray]) -> list[np.ndarray]:
        """Returns the last `self.chunks` of `chunks` (None: all)."""
        return chunks if self.chunks is None else chunks[max(len(chunks) - self.chunks, 0) :]


@dataclasses.dataclass(frozen=True)
class ContextSplit(Split):
    """Context for the memory of a model."""

    key: ClassVar[str] = "context"

    # Longer contexts scale attention logits (Cepe.trained_context); null: no scaling.
    trained_context: PositiveInt | None = None
    # Half of a node that is split again (SharedLLM): right, query, random; null: the model's own.
    policy: Policy | None = None
    # Compression ratio of each level of a tree (SharedLLM), which sets the number of levels; null:
    # as the model was trained.
    ratios: tuple[int, ...] | None = None
    # Tokens per beacon (Activation Beacon), 0 for all ratios; null: the model's own.
    ratio: NonNegativeInt | None = None
    # Retrieved passages, the best ones, that the decoder reads; all others are chunks of the
    # context (CEPE, section 4.2: 10; by the caption of its table 7 these are chunks as well).
    decoder_passages: NonNegativeInt = 10
    # Chunks of up to `chunk` tokens end where sentences end, and the decoder's part of a prompt
    # begins with a sentence (CEPE's needle test); false: chunks of `chunk` tokens
    sentences: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.sentences and self.chunks:
            raise InputError(
                f"context.chunks={self.chunks} counts chunks of equal length, and with"
                " context.sentences=true they differ; leave one of them out"
            )
        check_fields(self.key, self)

    def reader(self, model, length: int, *, prompts: bool = False) -> "SplitModel":
        decoder_tokens = self.tokens(model, length)
        fixed = None if prompts else decoder_tokens
        subject = model.with_method(memory=self._memory(model), length=fixed)
        return SplitModel(subject, self, decoder_tokens, self.size(model))

    def _memory(self, model) -> Memory:
        """Returns the memory of the model with these settings."""
        memory = model.config.memory
        check_memory(memory)
        for name, (kind, field) in _MEMORY_SETTINGS.items():
            if (value := getattr(self, name)) is None:
                continue
            if not hasattr(memory, field):
                raise InputError(
                    f"context.{name}={value} is a setting of {kind}, and this model has"
                    f" {type(memory).__name__}; leave it out"
                )
            if field == "tree":
                value = dataclasses.replace(memory.tree, ratios=value)
            memory = dataclasses.replace(memory, **{field: value})
        return memory

    def size(self, model) -> int:
        """Returns the number of tokens per chunk."""
        return context_chunk_size(self._memory(model), self.chunk)

    def context(self, model, length: int) -> tuple[int, int] | None:
        if model.config.memory is None:
            return None
        size = self.size(model)
        chunks = -(-(length - self.tokens(model, length)) // size)
        chunks *= 1 + self.sentences  # two neighbours together exceed `size` tokens
        return chunks if self.chunks is None else min(chunks, self.chunks), size

    def tokens(self, model, length: int) -> int:
        memory, default = model.config.memory, min(length // 2, model.config.max_length)
        if memory is not None and memory.is_prefix:  # the text is the last window
            default = min(default, memory.chunk)
        return min(default if self.decoder is None else self.decoder, length)

    def context_passages(self, passages: Sequence[PassageSpan]) -> list[PassageSpan]:
        return [p for p in passages if p.rank is None or p.rank >= self.decoder_passages]

    def scorer(
        self, model: LanguageModel, chunks: list, scores: list, chunk: int
    ) -> tuple[Scorer, dict[str, Any]]:
        if model.config.memory.by_chunk:
            chunks = [model.config.memory.group_by_chunk(row) for row in chunks]
        return model, {"context": model.encode_contexts(chunks, chunk=chunk)}

    def build_prompts(
        self, model: LanguageModel, parts: list["Part"], chunks: list
    ) -> tuple[list, list]:
        """Returns prompts and contexts; a prefix memory reads BOS in its first chunk."""
        prompts, context = [[*part.head, *part.rest] for part in parts], list(chunks)
        for index, (part, row) in enumerate(zip(parts, chunks, strict=True)):
            has_bos = [*part.head[:1]] == [model.tokenizer.bos_id]
            if model.config.memory.is_prefix and row and has_bos:
                prompts[index] = prompts[index][1:]
                context[index] = [np.concatenate([part.head[:1], row[0]]), *row[1:]]
        return prompts, context


@dataclasses.dataclass(frozen=True)
class ReplugSplit(Split):
    """Context for REPLUG, which mixes probabilities of the decoder's text after each chunk.

    The weights are softmax(score / temperature). Retrieved passages have the scores of their
    search. The score of other chunks is the product of the `encoder`'s vectors of the chunk and of
    the query, the first `query_tokens` tokens that the decoder reads after the context (CEPE, arXiv
    2402.16617, app. B, with Contriever). Without `encoder` their weights are equal. If `decoder` is
    null, decoder and chunk fill half of the window.
    """

    key: ClassVar[str] = "replug"

    chunk: int = 256
    temperature: PositiveFloat = 1.0  # temperature of the scores
    # What is mixed (`Replug.marginal`): token or sequence
    marginal: Annotated[str, OneOf(MARGINALS)] = "token"
    encoder: EncoderSection | None = None  # scores chunks without a score; null: equal weights
    # Tokens of the query of `encoder`; fewer if the scored or generated tokens begin earlier
    query_tokens: PositiveInt = 256

    def __post_init__(self):
        super().__post_init__()

    def reader(self, model, length: int, *, prompts: bool = False) -> "SplitModel":
        decoder_tokens = self.tokens(model, length)
        subject = model.with_method(length=None if prompts else decoder_tokens + self.chunk)
        return SplitModel(subject, self, decoder_tokens, self.chunk, self.opened_encoder)

    @functools.cached_property  # models of all lengths share its weights and programs
    def opened_encoder(self) -> Encoder | None:
        """The encoder of chunks, opened; None if their weights are equal.

        Raises:
          InputError: `encoder` names no encoder.
        """
        if self.encoder is None:
            return None
        if not self.encoder.path:
            raise InputError(
                f"{self.key}.encoder.path is empty: name an encoder, such as facebook/contriever,"
                f" or set {self.key}.encoder=null for equal weights"
            )
        try:
            return self.encoder.open()
        except InputError as error:
            raise InputError(f"{self.key}.{error}") from error

    def tokens(self, model, length: int) -> int:
        if self.decoder is not None:
            return min(self.decoder, length)
        default = min(length // 2, model.config.max_length) - self.chunk
        if default < 1:
            raise InputError(
                f"replug.chunk={self.chunk} leaves the decoder no text in windows of {length}"
                f" tokens; at most {default + self.chunk - 1}, or set replug.decoder"
            )
        return default

    def shape(self, model, length: int) -> tuple[int, int]:
        decoder_tokens = self.tokens(model, length)
        chunks = -(-(length - decoder_tokens) // self.chunk)
        chunks = chunks if self.chunks is None else min(chunks, self.chunks)
        return max(chunks, 1), decoder_tokens + self.chunk

    def context(self, model, length: int) -> None:
        """Returns None, as no memory is stored."""

    def context_passages(self, passages: Sequence[PassageSpan]) -> list[PassageSpan]:
        return list(passages)

    def scorer(
        self, model: LanguageModel, chunks: list, scores: list, chunk: int
    ) -> tuple[Scorer, dict[str, Any]]:
        replug = Replug(model, self.temperature, len(chunks), self.marginal)
        return replug, {"context": chunks, "scores": scores}

    def build_prompts(
        self, model: LanguageModel, parts: list["Part"], chunks: list
    ) -> tuple[list, list]:
        """Returns prompts and contexts; each chunk follows the head (BOS, instruction)."""
        context = [
            [np.concatenate([part.head, chunk]) for chunk in row]
            for part, row in zip(parts, chunks, strict=True)
        ]
        prompts = [
            list(part.rest) if row else [*part.head, *part.rest]
            for part, row in zip(parts, chunks, strict=True)
        ]
        return prompts, context


@dataclasses.dataclass(frozen=True)
class Part:
    """The decoder's text of a prompt before and after the first moved span, and the moved spans."""

    head: np.ndarray  # int32 [n]
    rest: np.ndarray
    context: list[np.ndarray]  # the chunks
    scores: list[float] | None  # of the chunks; None: unknown


class SplitModel(WrappedScorer):
    """A model whose decoder reads the end of a window, `decoder_tokens`, after a context."""

    def __init__(
        self, model, split: Split, decoder_tokens: int, chunk: int, encoder: Encoder | None = None
    ):
        self.lm, self.decoder_tokens, self._split, self._chunk = model, decoder_tokens, split, chunk
        self._encoder = encoder
        has_ends = getattr(split, "sentences", False)
        self._ends_sentence = SentenceEnds(model.tokenizer) if has_ends else None
        self._movable: Sequence[Spans] | None = None
        self._retrieved: Sequence[Sequence[PassageSpan]] | None = None

    def nll(self, tokens: np.ndarray, *, first: int, lengths: np.ndarray) -> np.ndarray:
        """Returns losses as `LanguageModel.nll` does, for the tokens that the decoder reads.

        Windows with passages begin with them, and the decoder reads the rest; the passages of all
        rows end at the same token.
        """
        if self._retrieved is None:
            start = tokens.shape[1] - self.decoder_tokens
            self.check_scored(tokens.shape[1], first, np.min(lengths))
            chunks = [self._context_chunks(row[:start]) for row in tokens]
            scores = [None] * len(chunks)
        else:
            (start,) = {row[-1].stop if row else 0 for row in self._retrieved}
            pairs = zip(tokens, self._retrieved, strict=True)
            rows = [self._chunks(row, spans, spans) for row, spans in pairs]
            chunks, scores = ([row[part] for row in rows] for part in (0, 1))
        scores = self._scores(scores, chunks, tokens[:, start:first])
        scorer, options = self._split.scorer(self.lm, chunks, scores, self._chunk)
        nll = np.zeros(tokens.shape, np.float32)
        nll[:, start:] = scorer.nll(
            tokens[:, start:], first=first - start, lengths=np.asarray(lengths) - start, **options
        )
        return nll

    def _scores(
        self, scores: list[list[float] | None], chunks: list[list[np.ndarray]], texts: Sequence[Ids]
    ) -> list[list[float]]:
        """Returns `scores` with those of the encoder, or equal ones, where they are unknown.

        Args:
          scores: For each text the scores of its chunks, or None.
          chunks: Token ids of the chunks of each text.
          texts: Token ids that the decoder reads after the chunks, up to the first scored token.
        """
        scores = list(scores)
        for i, row in enumerate(chunks):
            if scores[i] is None and (self._encoder is None or not row):
                scores[i] = [0.0] * len(row)
        missing = [i for i, row in enumerate(scores) if row is None]
        if not missing:
            return scores
        decode = functools.partial(self.lm.tokenizer.decode, skip_special=True)
        query = self._split.query_tokens
        queries = self._encoder.encode_queries([decode(texts[i][:query]) for i in missing])
        passages = [decode(chunk) for i in missing for chunk in chunks[i]]
        vectors = self._encoder.encode_passages(passages).astype(np.float64)
        ends = np.cumsum([len(chunks[i]) for i in missing])
        for i, vector, rows in zip(missing, queries, np.split(vectors, ends[:-1]), strict=True):
            scores[i] = (rows @ vector).tolist()
        return scores

    def check_scored(self, length: int, first: int, size: int) -> None:
        """Raises InputError if the decoder does not read tokens `first : size` of a window."""
        check_scored(self._split.key, self.decoder_tokens, length, first, size)

    def with_movable(
        self,
        spans: Sequence[Spans],
        passages: Sequence[Sequence[PassageSpan]] | None = None,
    ) -> "SplitModel":
        """Returns a copy for prompts in which only `spans`, or `passages`, may move to the context.

        By default, all tokens of a prompt but the last one may.
        """
        other = copy.copy(self)
        other._movable, other._retrieved = spans, passages
        return other

    def generate(self, prompts: Sequence[Ids], sampling: Sampling) -> list[GeneratedText]:
        """Generates as `LanguageModel.generate` does; the decoder also reads the new tokens."""
        prompts, scorer, options = self._prompts(prompts, sampling.max_new_tokens)
        return scorer.generate(prompts, sampling, **options)

    def continuations(
        self, prompts: Sequence[Ids], continuations: Sequence[Sequence[Ids]]
    ) -> list[list[Continuation]]:
        """Scores as `LanguageModel.continuations` does; the decoder also reads `continuations`."""
        longest = max(len(ids) for row in continuations for ids in row)
        prompts, scorer, options = self._prompts(prompts, longest)
        return scorer.continuations(prompts, continuations, **options)

    def _prompts(self, prompts: Sequence[Ids], new: int) -> tuple[list, Scorer, dict[str, Any]]:
        """Returns the decoder's prompts (`new` tokens follow), their scorer and its options."""
        rows = [np.asarray(prompt, np.int32) for prompt in prompts]
        spans = self._movable
        if spans is None:
            spans = [[(0, len(row) - 1)] for row in rows]
        retrieved = self._retrieved or [()] * len(rows)
        parts = [self._part(*row, new) for row in zip(rows, spans, retrieved, strict=True)]
        chunks = [part.context for part in parts]
        scores = self._scores([part.scores for part in parts], chunks, [p.rest for p in parts])
        prompts, context = self._split.build_prompts(self.lm, parts, chunks)
        return prompts, *self._split.scorer(self.lm, context, scores, self._chunk)

    def _part(self, row: np.ndarray, spans: Spans, passages: Sequence[PassageSpan], new: int):
        """Returns the `Part` of one prompt, which `new` tokens follow."""
        moved = self._moved(len(row) + new, spans, passages)
        if sum(span[1] - span[0] for span in moved) < len(row) + new - self.decoder_tokens:
            raise InputError(
                f"{self._split.key}.decoder={self.decoder_tokens} leaves no room for a prompt"
                f" beside {new} new tokens; raise it"
            )
        if not moved:
            return Part(row[:0], row, [], [])
        if self._ends_sentence is not None and not passages:
            start, stop = moved[-1]
            (limit,) = {b for a, b in spans if a == start}
            moved[-1] = (start, self._ends_sentence.next(row[:limit], stop))
        keep = np.ones(len(row), bool)
        for start, stop, *_ in moved:
            keep[start:stop] = False
        first = moved[0][0]
        chunks, scores = self._chunks(row, moved, passages)
        return Part(row[:first], row[first:][keep[first:]], chunks, scores)

    def _chunks(
        self, row: np.ndarray, moved: Sequence, passages: Sequence[PassageSpan]
    ) -> tuple[list[np.ndarray], list[float] | None]:
        """Returns the chunks that are read of the tokens in `moved`, and their scores if known."""
        if not passages:
            pieces = [chunk for a, b in moved for chunk in self._context_chunks(row[a:b])]
            return self._split.last_chunks(pieces), None
        best = self._split.best_passages(moved)
        scores = [passage.score for passage in best]
        chunks = [row[passage.start : passage.stop] for passage in best]
        return chunks, None if None in scores else scores

    def _moved(self, size: int, spans: Spans, passages: Sequence[PassageSpan]) -> list:
        """Returns the parts of a prompt that are read as context.

        With passages, these are the ones of `context_passages`, and as many of the worst others as
        the decoder lacks space for. Without passages, these are the first tokens of `spans`, as
        many as `size` exceeds the tokens of the decoder.
        """
        moved, over = [], size - self.decoder_tokens
        if passages:
            moved = self._split.context_passages(passages)
            over -= sum(passage.stop - passage.start for passage in moved)
            for passage in reversed([passage for passage in passages if passage not in moved]):
                if over > 0:
                    moved.append(passage)
                    over -= passage.stop - passage.start
            return sorted(moved)
        for start, stop in spans:
            if over <= 0:
                break
            moved.append((start, min(stop, start + over)))
            over -= moved[-1][1] - start
        return [span for span in moved if span[1] > span[0]]

    def num_decoder_passages(self, size: int, passages: Sequence[PassageSpan]) -> int:
        return len(passages) - len(self._moved(size, (), passages))

    def num_unread(
        self,
        size: int,
        movable: Spans | None = None,
        passages: Sequence[PassageSpan] = (),
    ) -> int:
        if self._split.chunks is None:
            return 0
        moved = self._moved(size, [(0, size)] if movable is None else movable, passages)
        chunks, _ = self._chunks(np.zeros(size, np.int32), moved, passages)
        return sum(span[1] - span[0] for span in moved) - sum(map(len, chunks))

    def _context_chunks(self, context: np.ndarray) -> list[np.ndarray]:
        if self._ends_sentence is not None:
            return self._ends_sentence.split(context, self._chunk)
        return self._split.last_chunks(split_into_chunks(context, self._chunk))

    def with_foreign_context(
        self,
        tokens: np.ndarray,
        others: Iterable[np.ndarray],
        seed: Sequence[int],
        passages: Sequence[PassageSpan] | None = None,
    ) -> np.ndarray:
        """Returns `tokens`; with source=foreign, chunks of `others` replace the context."""
        start = len(tokens) - self.decoder_tokens
        if passages is not None:
            start = passages[-1].stop if passages else 0
        if self._split.source == "own" or start <= 0:
            return tokens
        others = windows_of_others(others, start, self._split.key)
        tokens, rng = tokens.copy(), np.random.default_rng(seed)
        edges = range(start, 0, -self._chunk)
        spans = passages or [(max(stop - self._chunk, 0), stop) for stop in edges]
        for first, stop, *_ in spans:
            columns = slice(first, stop)
            tokens[columns] = others[rng.integers(len(others))][columns]
        return tokens


def check_scored(key: str, decoder_tokens: int, length: int, first: int, size: int) -> None:
    """Raises InputError unless the decoder reads tokens `first - 1 : size` of a window.

    Args:
      key: Field of the method's settings, for the message.
      decoder_tokens: number of tokens that are read at the end of a window.
      length: Number of tokens of a window.
      first: Index of the first scored token.
      size: Number of tokens of this window that are text, not padding.
    """
    start = length - decoder_tokens
    if first <= start or size <= start + 1:
        raise InputError(
            f"{key}: this protocol scores tokens from {first} on, and the decoder reads from"
            f" {start} on; use protocol=last_k, with last below {decoder_tokens}"
        )


def windows_of_others(others: Iterable[np.ndarray], size: int, key: str) -> list[np.ndarray]:
    """Returns the windows of at least `size` tokens; raises an InputError if there are none.

    Args:
      others: Tokens of windows of other documents.
      size: Minimum number of tokens.
      key: Field of a method's settings, for the message.
    """
    if not (others := [other for other in others if len(other) >= size]):
        raise InputError(
            f"{key}.source=foreign takes text of other documents, and all windows are of one; give"
            " more text, or raise max_windows"
        )
    return others


def generate(model: Scorer, prompts: Sequence[Prompt], sampling: Sampling) -> list[GeneratedText]:
    """Generates answers; a `SplitModel` reads documents of the prompts as context."""
    ids = [prompt.ids.tolist() for prompt in prompts]
    return with_movable(model, prompts).generate(ids, sampling)


def continuations(model: Scorer, prompts: Sequence[Prompt], options) -> list[list[Continuation]]:
    """Scores options (token ids) after each prompt, which is read as in `generate`."""
    ids = [prompt.ids.tolist() for prompt in prompts]
    return with_movable(model, prompts).continuations(ids, options)


def with_movable(model: Scorer, prompts: Sequence[Prompt]) -> Scorer:
    """Returns the model for these prompts, whose documents and passages may move to a context."""
    spans, passages = ([getattr(p, name) for p in prompts] for name in ("movable", "passages"))
    return model.with_movable(spans, passages)
