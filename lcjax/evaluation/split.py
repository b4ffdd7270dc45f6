"""Windows whose beginning a method reads beside its decoder: in chunks, or passage by passage.

Of a typed prompt only documents and demonstrations go there, the earliest first; instruction,
question and the answer's beginning stay with the decoder.

CEPE's Table 1 (arXiv 2402.16617): of 8,192 tokens the last 4,096 are the decoder's, the 16 chunks
of 256 before them the encoder's; 4,096 are 2,048 and 8 chunks, longer ones 4,096 and the rest.
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from lcjax.errors import InputError, one_of, whole_numbers
from lcjax.evaluation.prompt import Prompt
from lcjax.evaluation.task import Unit
from lcjax.generation.contexts import context_chunk_size
from lcjax.generation.contexts import split_into_chunks as chunks_of
from lcjax.generation.replug import Replug
from lcjax.generation.scoring import Continuation
from lcjax.memory import Beacon, Cepe, Policy, SharedLlm
from lcjax.models.memory import Memory, check_memory

SOURCES = ("own", "foreign")


@dataclasses.dataclass(frozen=True)
class Split(abc.ABC):
    """What of a window is read beside the decoder, and how."""

    key: ClassVar[str]  # of a method's settings

    # Tokens at the end of a window that the decoder reads; null: half of the window, and no more
    # than the model was trained for, or than one of a memory's own windows.
    decoder: int | None = None
    chunk: int | None = None  # tokens of a chunk; null: what the memory was trained with
    chunks: int | None = None  # only the last so many before the decoder's text; null: all
    # own, or foreign as a control: each chunk is one of another document.
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
        """Chunks that are kept of a window beside what the decoder reads, and tokens of each."""

    @abc.abstractmethod
    def tokens(self, model, length: int) -> int:
        """What the decoder reads of windows of `length` tokens."""

    def shape(self, model, length: int) -> tuple[int, int]:
        """Rows that one prompt takes in a batch, and tokens of each."""
        return 1, self.tokens(model, length)

    @abc.abstractmethod
    def nll(self, model, tokens: np.ndarray, passages: list, chunk: int, **options) -> np.ndarray:
        """As `LanguageModel.nll`, with the `passages` of each row."""

    @abc.abstractmethod
    def generate(self, model, parts: list["Part"], sampling, passages: list, chunk: int):
        """As `LanguageModel.generate`, with the `passages` of each part."""

    @abc.abstractmethod
    def continuations(self, model, parts: list["Part"], options, passages: list, chunk: int):
        """As `LanguageModel.continuations`, with the `passages` of each part."""

    def passages(self, context: np.ndarray, chunk: int) -> list[np.ndarray]:
        """The chunks of what stands before the decoder's text; the odd one is the first."""
        return self.kept(chunks_of(context, chunk))

    def kept(self, chunks: list[np.ndarray]) -> list[np.ndarray]:
        """Those that `chunks` allows: the last ones."""
        return chunks if self.chunks is None else chunks[max(len(chunks) - self.chunks, 0) :]


@dataclasses.dataclass(frozen=True)
class ContextSplit(Split):
    """What of a window is read by the memory of a model."""

    key: ClassVar[str] = "context"

    # Contexts of more tokens are attended to more sharply (Cepe.trained_context); null: never.
    trained_context: int | None = None
    # Which half of a node is split again (SharedLLM): right, query, random; null: the model's own.
    policy: Policy | None = None
    # Of how many tokens one is kept at each level of a tree (SharedLLM), so also how many levels;
    # null: as the model was trained.
    ratios: tuple[int, ...] | None = None
    # Tokens that a beacon stands for (Activation Beacon), 0 for all; null: the model's own.
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
        """That of the model with these settings."""
        memory = model.config.memory
        check_memory(memory)
        settings = (("trained_context", Cepe), ("policy", SharedLlm), ("ratios", SharedLlm))
        settings += (("ratio", Beacon),)
        for name, kind in settings:
            if (value := getattr(self, name)) is None:
                continue
            if not isinstance(memory, kind):
                raise InputError(
                    f"context.{name}={value} is a setting of {kind.__name__}, and this model has"
                    f" {type(memory).__name__}; leave it out"
                )
            if name == "ratios":
                name, value = "tree", dataclasses.replace(memory.tree, ratios=value)
            memory = dataclasses.replace(memory, **{name: value})
        return memory

    def size(self, model) -> int:
        """Tokens of a chunk."""
        return context_chunk_size(self._memory(model), self.chunk)

    def context(self, model, length: int) -> tuple[int, int] | None:
        if model.config.memory is None:
            return None
        size = self.size(model)
        chunks = -(-(length - self.tokens(model, length)) // size)
        return chunks if self.chunks is None else min(chunks, self.chunks), size

    def tokens(self, model, length: int) -> int:
        memory, usual = model.config.memory, min(length // 2, model.config.max_length)
        if memory is not None and memory.leads:  # the text is the window behind all others
            usual = min(usual, memory.chunk)
        return min(usual if self.decoder is None else self.decoder, length)

    def nll(self, model, tokens: np.ndarray, passages: list, chunk: int, **options) -> np.ndarray:
        return model.nll(tokens, context=self._encoded(model, passages, chunk), **options)

    def generate(self, model, parts: list["Part"], sampling, passages: list, chunk: int):
        prompts, passages = self._read(model, parts, passages)
        return model.generate(prompts, sampling, context=self._encoded(model, passages, chunk))

    def continuations(self, model, parts: list["Part"], options, passages: list, chunk: int):
        prompts, passages = self._read(model, parts, passages)
        return model.continuations(prompts, options, context=self._encoded(model, passages, chunk))

    def _read(self, model, parts: list["Part"], passages: list) -> tuple[list, list]:
        """Prompts, and what is read beside them; a BOS begins what stands before the text."""
        prompts, context = [[*part.head, *part.rest] for part in parts], list(passages)
        for row, (part, own) in enumerate(zip(parts, passages, strict=True)):
            bos = [*part.head[:1]] == [model.tokenizer.bos_id]
            if model.config.memory.leads and own and bos:
                prompts[row] = prompts[row][1:]
                context[row] = [np.concatenate([part.head[:1], own[0]]), *own[1:]]
        return prompts, context

    def _encoded(self, model, passages: list, chunk: int):
        return model.encode_contexts(passages, chunk=chunk)


@dataclasses.dataclass(frozen=True)
class ReplugSplit(Split):
    """What of a window is read by REPLUG: each chunk in front of the decoder's text, in turn.

    All chunks count alike. `decoder` leaves room for a chunk where it is null.
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
        usual = min(length // 2, model.config.max_length) - self.chunk
        if usual < 1:
            raise InputError(
                f"replug.chunk={self.chunk} leaves the decoder no text in windows of {length}"
                f" tokens; at most {usual + self.chunk - 1}, or set replug.decoder"
            )
        return usual

    def shape(self, model, length: int) -> tuple[int, int]:
        decoder = self.tokens(model, length)
        passages = -(-(length - decoder) // self.chunk)
        passages = passages if self.chunks is None else min(passages, self.chunks)
        return max(passages, 1), decoder + self.chunk

    def context(self, model, length: int) -> None:
        """Nothing is kept: a passage is read before the text, and again with the next one."""

    def nll(self, model, tokens: np.ndarray, passages: list, chunk: int, **options) -> np.ndarray:
        return Replug(model, batch=len(tokens)).nll(tokens, context=passages, **options)

    def generate(self, model, parts: list["Part"], sampling, passages: list, chunk: int):
        prompts, context = self._read(parts, passages)
        return Replug(model).generate(prompts, sampling, context=context)

    def continuations(self, model, parts: list["Part"], options, passages: list, chunk: int):
        prompts, context = self._read(parts, passages)
        replug = Replug(model, batch=len(prompts))
        return replug.continuations(prompts, options, context=context)

    def _read(self, parts: list["Part"], passages: list) -> tuple[list, list]:
        """Every passage has the beginning of the prompt, such as BOS and instruction, before it."""
        context = [
            [np.concatenate([part.head, passage]) for passage in own]
            for part, own in zip(parts, passages, strict=True)
        ]
        prompts = [
            list(part.rest) if own else [*part.head, *part.rest]
            for part, own in zip(parts, passages, strict=True)
        ]
        return prompts, context


@dataclasses.dataclass(frozen=True)
class Part:
    """Of a prompt what the decoder reads, before and after what is read beside it."""

    head: np.ndarray  # int32 [n]
    rest: np.ndarray
    beside: list[np.ndarray]  # texts, each of which begins a chunk


class SplitModel:
    """A model that reads the last `decoder` tokens of a window, and the rest beside them."""

    def __init__(self, model, split: Split, decoder: int, chunk: int):
        self.tokenizer, self.config = model.tokenizer, model.config
        self.decoder, self._model, self._split, self._chunk = decoder, model, split, chunk

    def nll(self, tokens: np.ndarray, first: int, lengths: np.ndarray) -> np.ndarray:
        """As `LanguageModel.nll`, of what the decoder reads."""
        start = tokens.shape[1] - self.decoder
        self.check_scored(tokens.shape[1], first, np.min(lengths))
        read, found = tokens[:, start:], np.zeros(tokens.shape, np.float32)
        found[:, start:] = self._split.nll(
            self._model, read, [self._passages(row[:start]) for row in tokens], self._chunk,
            first=first - start, lengths=np.asarray(lengths) - start,
        )  # fmt: skip
        return found

    def check_scored(self, length: int, first: int, size: int) -> None:
        """Raises InputError where tokens `first : size` of a window of `length` are not read."""
        start = length - self.decoder
        if first <= start or size <= start + 1:
            raise InputError(
                f"{self._split.key}: this protocol scores tokens from {first} on, and the decoder"
                f" reads from {start} on; use protocol=last_k, with last below {self.decoder}"
            )

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling,
        movable: Sequence[Sequence[tuple[int, int]]] | None = None,
    ) -> list[str]:
        """As `LanguageModel.generate`; new tokens count as the decoder's.

        `movable` are first and end of the documents of each prompt, which alone may be read beside
        the decoder, the earliest first; None: all but the last token.
        """
        parts, passages = self._parts(prompts, movable, sampling.max_new_tokens)
        return self._split.generate(self._model, parts, sampling, passages, self._chunk)

    def continuations(
        self,
        prompts: Sequence[Sequence[int]],
        continuations: Sequence[Sequence[Sequence[int]]],
        movable: Sequence[Sequence[tuple[int, int]]] | None = None,
    ) -> list[list[Continuation]]:
        """As `LanguageModel.continuations`; what follows a prompt counts as the decoder's."""
        longest = max(len(ids) for row in continuations for ids in row)
        parts, passages = self._parts(prompts, movable, longest)
        return self._split.continuations(self._model, parts, continuations, passages, self._chunk)

    def _parts(self, prompts, movable, new: int) -> tuple[list["Part"], list[list[np.ndarray]]]:
        """How prompts are cut that `new` tokens follow, and the chunks that are read beside."""
        rows = [np.asarray(prompt, np.int32) for prompt in prompts]
        spans = [[(0, len(row) - 1)] for row in rows] if movable is None else movable
        parts = [self._part(row, own, new) for row, own in zip(rows, spans, strict=True)]
        passages = [
            self._split.kept([chunk for text in part.beside for chunk in self._passages(text)])
            for part in parts
        ]
        return parts, passages

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
        """The earliest of `spans`, as many as a request of `size` tokens is too long."""
        moved, over = [], size - self.decoder
        for start, stop in spans:
            if over <= 0:
                break
            moved.append((start, min(stop, start + over)))
            over -= moved[-1][1] - start
        return [span for span in moved if span[1] > span[0]]

    def unread(self, size: int, movable: Sequence[tuple[int, int]] | None = None) -> int:
        """Tokens of a window of `size` that neither the decoder reads nor a chunk holds."""
        if self._split.chunks is None:
            return 0
        spans = [(0, size)] if movable is None else movable
        beside = [np.zeros(b - a, np.int32) for a, b in self._moved(size, spans)]
        kept = self._split.kept([chunk for text in beside for chunk in self._passages(text)])
        return sum(map(len, beside)) - sum(map(len, kept))

    def _passages(self, context: np.ndarray) -> list[np.ndarray]:
        return self._split.passages(context, self._chunk)

    def fed(self, unit: Unit, units: Sequence[Unit], seed: int) -> Unit:
        """What is read in place of `unit`: itself, or with chunks of other documents beside."""
        start = len(unit.tokens) - self.decoder
        if self._split.source == "own" or start <= 0:
            return unit
        others = [u for u in units if u.facts.get("document") != unit.facts.get("document")]
        others = [u for u in others if len(u.tokens) >= start]
        if not others:
            raise InputError(
                f"{self._split.key}.source=foreign takes chunks of other documents, and all windows"
                " are of one; give more text, or raise max_windows"
            )
        tokens, rng = unit.tokens.copy(), np.random.default_rng([seed, unit.index])
        for stop in range(start, 0, -self._chunk):
            part = slice(max(stop - self._chunk, 0), stop)
            tokens[part] = others[rng.integers(len(others))].tokens[part]
        return dataclasses.replace(unit, tokens=tokens)


def generate(model, prompts: Sequence[Prompt], sampling) -> list[str]:
    """Answers to prompts, whose documents a split model reads beside its decoder."""
    rows = [prompt.ids.tolist() for prompt in prompts]
    return model.generate(rows, sampling, *_beside(model, prompts))


def continuations(model, prompts: Sequence[Prompt], options) -> list[list[Continuation]]:
    """What `model` says of the options (token ids) behind each prompt, read as in `generate`."""
    rows = [prompt.ids.tolist() for prompt in prompts]
    return model.continuations(rows, options, *_beside(model, prompts))


def _beside(model, prompts: Sequence[Prompt]) -> list:
    """What a split model may read beside its decoder; nothing to say to others."""
    return [[prompt.movable for prompt in prompts]] if isinstance(model, SplitModel) else []
