"""Splits windows into the decoder's text and context that is read beside it, in chunks.

Of a prompt only documents and demonstrations move to the context, the earliest first. Instruction,
question and answer prefix stay with the decoder.

In CEPE's Table 1 (arXiv 2402.16617) the decoder reads the last 2,048 of 4,096 tokens and the last
4,096 of longer windows; the encoder reads the tokens before in chunks of 256.
"""

import abc
import copy
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from lcjax.errors import InputError, one_of, whole_numbers
from lcjax.evaluation.prompt import Prompt
from lcjax.generation.contexts import context_chunk_size
from lcjax.generation.contexts import split_into_chunks as chunks_of
from lcjax.generation.language_model import LanguageModel
from lcjax.generation.replug import Replug
from lcjax.generation.sampling import GeneratedText, Sampling
from lcjax.generation.scorer import Ids, Scorer, Spans
from lcjax.generation.scoring import Continuation
from lcjax.memory import Policy
from lcjax.models.memory import Memory, check_memory

SOURCES = ("own", "foreign")
# The memory that has each setting of `ContextSplit`, and the field that it changes.
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
    decoder: int | None = None
    chunk: int | None = None  # tokens of a chunk; null: as the memory was trained
    chunks: int | None = None  # maximum number of chunks, the last ones; null: all
    # own, or foreign as a control: chunks of other documents.
    source: str = "own"

    def __post_init__(self):
        whole_numbers(self.key, self, 1, "decoder", "chunk")
        whole_numbers(self.key, self, 0, "chunks")
        one_of(f"{self.key}.source", self.source, SOURCES)

    @abc.abstractmethod
    def of(self, model, length: int) -> "SplitModel":
        """`model` for windows of `length` tokens."""

    @abc.abstractmethod
    def context(self, model, length: int) -> tuple[int, int] | None:
        """(chunks, tokens of a chunk) whose memory is stored for a window, or None."""

    @abc.abstractmethod
    def tokens(self, model, length: int) -> int:
        """Tokens of the decoder in windows of `length` tokens."""

    def shape(self, model, length: int) -> tuple[int, int]:
        """(rows of one prompt in a batch, tokens of a row)."""
        return 1, self.tokens(model, length)

    @abc.abstractmethod
    def scorer(self, model: LanguageModel, passages: list, chunk: int) -> tuple[Scorer, Any]:
        """The scorer of the text, and its argument `context` for the `passages` of each row."""

    @abc.abstractmethod
    def read(self, model: LanguageModel, parts: list["Part"], passages: list) -> tuple[list, list]:
        """The prompts and the passages of each row, where the prompts are split into `parts`."""

    def passages(self, context: np.ndarray, chunk: int) -> list[np.ndarray]:
        """Splits the context into chunks; the first one may be shorter."""
        return self.last(chunks_of(context, chunk))

    def last(self, chunks: list[np.ndarray]) -> list[np.ndarray]:
        """The last `self.chunks` of `chunks`, or all."""
        return chunks if self.chunks is None else chunks[max(len(chunks) - self.chunks, 0) :]


@dataclasses.dataclass(frozen=True)
class ContextSplit(Split):
    """Context for the memory of a model."""

    key: ClassVar[str] = "context"

    # Longer contexts scale attention logits (Cepe.trained_context); null: no scaling.
    trained_context: int | None = None
    # Half of a node that is split again (SharedLLM): right, query, random; null: the model's own.
    policy: Policy | None = None
    # Compression ratio of each level of a tree (SharedLLM), which sets the number of levels; null:
    # as the model was trained.
    ratios: tuple[int, ...] | None = None
    # Tokens per beacon (Activation Beacon), 0 for all ratios; null: the model's own.
    ratio: int | None = None

    def __post_init__(self):
        super().__post_init__()
        whole_numbers(self.key, self, 1, "trained_context")
        whole_numbers(self.key, self, 0, "ratio")

    def of(self, model, length: int) -> "SplitModel":
        decoder = self.tokens(model, length)
        subject = model.with_method(memory=self._memory(model), length=decoder)
        return SplitModel(subject, self, decoder, self.size(model))

    def _memory(self, model) -> Memory:
        """The memory of the model with these settings."""
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
        """Tokens per chunk."""
        return context_chunk_size(self._memory(model), self.chunk)

    def context(self, model, length: int) -> tuple[int, int] | None:
        if model.config.memory is None:
            return None
        size = self.size(model)
        chunks = -(-(length - self.tokens(model, length)) // size)
        return chunks if self.chunks is None else min(chunks, self.chunks), size

    def tokens(self, model, length: int) -> int:
        memory, default = model.config.memory, min(length // 2, model.config.max_length)
        if memory is not None and memory.is_prefix:  # the text is the last window
            default = min(default, memory.chunk)
        return min(default if self.decoder is None else self.decoder, length)

    def scorer(self, model: LanguageModel, passages: list, chunk: int) -> tuple[Scorer, Any]:
        return model, model.encode_contexts(passages, chunk=chunk)

    def read(self, model: LanguageModel, parts: list["Part"], passages: list) -> tuple[list, list]:
        """Prompts and contexts; for memories of earlier windows BOS moves to the first chunk."""
        prompts, context = [[*part.head, *part.rest] for part in parts], list(passages)
        for row, (part, chunks) in enumerate(zip(parts, passages, strict=True)):
            has_bos = [*part.head[:1]] == [model.tokenizer.bos_id]
            if model.config.memory.is_prefix and chunks and has_bos:
                prompts[row] = prompts[row][1:]
                context[row] = [np.concatenate([part.head[:1], chunks[0]]), *chunks[1:]]
        return prompts, context


@dataclasses.dataclass(frozen=True)
class ReplugSplit(Split):
    """Context for REPLUG, which averages probabilities of the decoder's text after each chunk.

    All chunks have equal weights. If `decoder` is null, decoder and chunk fill half of the window.
    """

    key: ClassVar[str] = "replug"

    chunk: int = 256

    def of(self, model, length: int) -> "SplitModel":
        decoder = self.tokens(model, length)
        subject = model.with_method(length=decoder + self.chunk)
        return SplitModel(subject, self, decoder, self.chunk)

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
        decoder = self.tokens(model, length)
        passages = -(-(length - decoder) // self.chunk)
        passages = passages if self.chunks is None else min(passages, self.chunks)
        return max(passages, 1), decoder + self.chunk

    def context(self, model, length: int) -> None:
        """None, as no memory is stored."""

    def scorer(self, model: LanguageModel, passages: list, chunk: int) -> tuple[Scorer, Any]:
        return Replug(model, batch=len(passages)), passages

    def read(self, model: LanguageModel, parts: list["Part"], passages: list) -> tuple[list, list]:
        """Prompts and contexts; the head of a prompt (BOS, instruction) precedes each passage."""
        context = [
            [np.concatenate([part.head, passage]) for passage in row]
            for part, row in zip(parts, passages, strict=True)
        ]
        prompts = [
            list(part.rest) if row else [*part.head, *part.rest]
            for part, row in zip(parts, passages, strict=True)
        ]
        return prompts, context


@dataclasses.dataclass(frozen=True)
class Part:
    """The decoder's text of a prompt before and after the first moved span, and the moved spans."""

    head: np.ndarray  # int32 [n]
    rest: np.ndarray
    context: list[np.ndarray]  # the moved spans; each begins a chunk


class SplitModel(Scorer):
    """A model whose decoder reads the last `decoder` tokens; the tokens before are context."""

    def __init__(self, model, split: Split, decoder: int, chunk: int):
        self.tokenizer, self.config = model.tokenizer, model.config
        self.decoder, self._model, self._split, self._chunk = decoder, model, split, chunk
        self._movable: Sequence[Spans] | None = None

    @property
    def mesh(self) -> jax.sharding.Mesh | None:
        return self._model.mesh

    def nll(self, tokens: np.ndarray, *, first: int, lengths: np.ndarray) -> np.ndarray:
        """As `LanguageModel.nll`, for the tokens of the decoder."""
        start = tokens.shape[1] - self.decoder
        self.check_scored(tokens.shape[1], first, np.min(lengths))
        scorer, context = self._scorer([self._passages(row[:start]) for row in tokens])
        nll = np.zeros(tokens.shape, np.float32)
        nll[:, start:] = scorer.nll(
            tokens[:, start:], context=context, first=first - start,
            lengths=np.asarray(lengths) - start,
        )  # fmt: skip
        return nll

    def _scorer(self, passages: list) -> tuple[Scorer, Any]:
        return self._split.scorer(self._model, passages, self._chunk)

    def check_scored(self, length: int, first: int, size: int) -> None:
        """Raises InputError if the decoder does not read tokens `first : size` of a window."""
        start = length - self.decoder
        if first <= start or size <= start + 1:
            raise InputError(
                f"{self._split.key}: this protocol scores tokens from {first} on, and the decoder"
                f" reads from {start} on; use protocol=last_k, with last below {self.decoder}"
            )

    def with_movable(self, spans: Sequence[Spans]) -> "SplitModel":
        """This model for prompts of which only `spans` may move to the context.

        By default all tokens but the last one of a prompt may.
        """
        other = copy.copy(self)
        other._movable = spans
        return other

    def generate(self, prompts: Sequence[Ids], sampling: Sampling) -> list[GeneratedText]:
        """As `LanguageModel.generate`; new tokens count towards the decoder's."""
        prompts, passages = self._prompts(prompts, sampling.max_new_tokens)
        scorer, context = self._scorer(passages)
        return scorer.generate(prompts, sampling, context=context)

    def continuations(
        self, prompts: Sequence[Ids], continuations: Sequence[Sequence[Ids]]
    ) -> list[list[Continuation]]:
        """As `LanguageModel.continuations`; continuations count towards the decoder's tokens."""
        longest = max(len(ids) for row in continuations for ids in row)
        prompts, passages = self._prompts(prompts, longest)
        scorer, context = self._scorer(passages)
        return scorer.continuations(prompts, continuations, context=context)

    def _prompts(self, prompts: Sequence[Ids], new: int) -> tuple[list, list]:
        """The decoder's prompts, with `new` tokens after them, and the passages of each."""
        rows = [np.asarray(prompt, np.int32) for prompt in prompts]
        spans = self._movable
        if spans is None:
            spans = [[(0, len(row) - 1)] for row in rows]
        parts = [self._part(*pair, new) for pair in zip(rows, spans, strict=True)]
        passages = [
            self._split.last([chunk for text in part.context for chunk in self._passages(text)])
            for part in parts
        ]
        return self._split.read(self._model, parts, passages)

    def _part(self, row: np.ndarray, spans: Sequence[tuple[int, int]], new: int) -> Part:
        moved = self._moved(len(row) + new, spans)
        if sum(stop - start for start, stop in moved) < len(row) + new - self.decoder:
            raise InputError(
                f"{self._split.key}.decoder={self.decoder} leaves no room for a prompt beside"
                f" {new} new tokens; raise it"
            )
        if not moved:
            return Part(row[:0], row, [])
        keep = np.ones(len(row), bool)
        for start, stop in moved:
            keep[start:stop] = False
        first = moved[0][0]
        return Part(row[:first], row[first:][keep[first:]], [row[a:b] for a, b in moved])

    def _moved(self, size: int, spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """The earliest of `spans`, with as many tokens as `size` exceeds the decoder's."""
        moved, over = [], size - self.decoder
        for start, stop in spans:
            if over <= 0:
                break
            moved.append((start, min(stop, start + over)))
            over -= moved[-1][1] - start
        return [span for span in moved if span[1] > span[0]]

    def num_unread(self, size: int, movable: Spans | None = None) -> int:
        if self._split.chunks is None:
            return 0
        spans = [(0, size)] if movable is None else movable
        context = [np.zeros(b - a, np.int32) for a, b in self._moved(size, spans)]
        chunks = self._split.last([chunk for text in context for chunk in self._passages(text)])
        return sum(map(len, context)) - sum(map(len, chunks))

    def _passages(self, context: np.ndarray) -> list[np.ndarray]:
        return self._split.passages(context, self._chunk)

    def with_foreign_context(
        self, tokens: np.ndarray, others: Iterable[np.ndarray], seed: Sequence[int]
    ) -> np.ndarray:
        """Returns `tokens`; for source=foreign with chunks of `others` as context."""
        start = len(tokens) - self.decoder
        if self._split.source == "own" or start <= 0:
            return tokens
        others = [other for other in others if len(other) >= start]
        if not others:
            raise InputError(
                f"{self._split.key}.source=foreign takes chunks of other documents, and all windows"
                " are of one; give more text, or raise max_windows"
            )
        tokens, rng = tokens.copy(), np.random.default_rng(seed)
        for stop in range(start, 0, -self._chunk):
            columns = slice(max(stop - self._chunk, 0), stop)
            tokens[columns] = others[rng.integers(len(others))][columns]
        return tokens


def generate(model: Scorer, prompts: Sequence[Prompt], sampling: Sampling) -> list[GeneratedText]:
    """Generates answers; a `SplitModel` reads documents of the prompts as context."""
    return _with_movable(model, prompts).generate(_rows(prompts), sampling)


def continuations(model: Scorer, prompts: Sequence[Prompt], options) -> list[list[Continuation]]:
    """Scores options (token ids) after each prompt, which is read as in `generate`."""
    return _with_movable(model, prompts).continuations(_rows(prompts), options)


def _with_movable(model: Scorer, prompts: Sequence[Prompt]) -> Scorer:
    return model.with_movable([prompt.movable for prompt in prompts])


def _rows(prompts: Sequence[Prompt]) -> list[list[int]]:
    return [prompt.ids.tolist() for prompt in prompts]
