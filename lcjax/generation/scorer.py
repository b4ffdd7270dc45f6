"""The interface of everything that scores and generates text.

`LanguageModel` is a scorer, and so are the wrappers of one (`WrappedScorer`): REPLUG, readers of
retrieved passages, kNN-LM, windows that are split into context and text. A new scorer defines `nll`
and `generate`; the other methods have defaults. Evaluation calls only these methods, so a new
scorer needs no change there.
"""

import abc
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from lcjax.checkpoints import Tokenizer
from lcjax.cost import MemoryEstimate
from lcjax.generation.sampling import GeneratedText, Sampling
from lcjax.generation.scoring import Continuation, batch_continuations, check_continuations
from lcjax.generation.session import pad_right
from lcjax.models import ModelConfig

Ids = Sequence[int] | np.ndarray
Spans = Sequence[tuple[int, int]]  # (start, stop) of parts of a prompt


class PassageSpan(NamedTuple):
    """A passage of a prompt that is read whole, by the decoder or as one chunk of the context."""

    start: int
    stop: int
    score: float | None = None  # the retriever's; None: not from a search
    rank: int | None = None  # 0 is the best; None: not ranked, and only read as context


class Scorer(abc.ABC):
    """A model that scores and generates text.

    Attributes:
      tokenizer: encodes and decodes text.
      config: the config of the decoder.
      mesh: the devices that share a batch; None: one device.
      decoder_tokens: number of tokens at the end of a window that the decoder reads; None: all.
        Earlier tokens are read as context and cannot be scored.
      depends_on_length: whether the rotation of a text depends on its length.
      shares_prefixes: whether `with_shared_prefixes` returns a model that reads a prefix once.
      needs_documents: whether it must be told where the documents of a prompt end (`with_movable`).
      saved_tokens: number of prompt tokens that were not read so far because they belong to a
        shared prefix.
    """

    tokenizer: Tokenizer
    config: ModelConfig
    mesh: jax.sharding.Mesh | None = None
    decoder_tokens: int | None = None
    depends_on_length: bool = False
    shares_prefixes: bool = False
    saved_tokens: int = 0
    needs_documents: bool = False

    @abc.abstractmethod
    def nll(
        self,
        tokens: np.ndarray,
        *,
        first: int = 1,
        lengths: np.ndarray | None = None,
        **options: Any,
    ) -> np.ndarray:
        """Returns -log p(tokens[t] | tokens[:t]), float32 [B, T].

        Args:
          tokens: int [B, T], padded on the right.
          first: the first scored position, at least 1.
          lengths: int [B], number of tokens of each row; None: T.
          **options: options of the subclass.

        Returns:
          The values, 0 for t < first and for t >= lengths.
        """

    @abc.abstractmethod
    def generate(
        self, prompts: Sequence[Ids], sampling: Sampling = Sampling(), **options: Any
    ) -> list[GeneratedText]:
        """Returns the generated text of each prompt."""

    def continuations(
        self, prompts: Sequence[Ids], continuations: Sequence[Sequence[Ids]], **options: Any
    ) -> list[list[Continuation]]:
        """Scores the continuations of each prompt (token ids).

        The default scores each continuation as the end of a text, and compares it with greedily
        generated text. If the rotation depends on the length, the greedy text of a prompt is
        generated with the length of the prompt's own longest continuation, not the batch's.
        """
        check_continuations(prompts, continuations, self.config.vocab_size)
        longest = [max(map(len, row)) for row in continuations]
        greedy: list[tuple[int, ...]] = [()] * len(prompts)
        for num_new in sorted(set(longest)) if self.depends_on_length else [max(longest)]:
            texts = self.generate(prompts, Sampling(max_new_tokens=num_new), **options)
            for row, text in enumerate(texts):
                if longest[row] == num_new or not self.depends_on_length:
                    greedy[row] = text.ids
        scores: list[list[Continuation]] = [[] for _ in prompts]
        starts = [len(prompt) for prompt in prompts]
        for ids, sizes in batch_continuations(continuations):
            ends = starts + sizes
            tokens = pad_right([[*p, *row[:size]] for p, row, size in zip(prompts, ids, sizes)])
            nll = np.asarray(self.nll(tokens, first=min(starts), lengths=ends, **options))
            for row, row_continuations in enumerate(continuations):
                if len(scores[row]) < len(row_continuations):
                    size = sizes[row]
                    is_greedy = greedy[row][:size] == tuple(ids[row, :size].tolist())
                    row_nll = nll[row, starts[row] : ends[row]]
                    scores[row].append(Continuation(row_nll, is_greedy))
        return scores

    def inference_memory(
        self, rows: int, length: int, context: tuple[int, int] | None = None
    ) -> MemoryEstimate | None:
        """Returns an estimate of the bytes that a batch needs on each device; None: unknown.

        Args:
          rows: rows of the batch.
          length: tokens of a row.
          context: (chunks, tokens of a chunk) of the context of a row.
        """
        return None

    def cache_bytes(self, length: int) -> int | None:
        """Returns the bytes of the KV cache of a row at the end of its prompt; None: unknown.

        Args:
          length: tokens of the row.
        """
        return None

    # Prompts with a common prefix

    def with_shared_prefixes(self, prompts: Sequence[Ids]) -> "Scorer":
        """Returns a model that reads the common prefixes of `prompts` once, if that is possible."""
        return self

    def batches(
        self, items: Sequence[Any], size: int, prompt: Callable[[Any], Ids]
    ) -> Iterator[list[Any]]:
        """Yields lists of at most `size` `items`; `prompt(item)` is the prompt of an item."""
        for start in range(0, len(items), size):
            yield list(items[start : start + size])

    # Windows whose first tokens are context

    def with_movable(
        self,
        spans: Sequence[Spans],
        passages: Sequence[Sequence[PassageSpan]] | None = None,
    ) -> "Scorer":
        """Returns this model for prompts whose parts may be read as context.

        Models that read whole prompts with the decoder ignore the arguments.

        Args:
          spans: (start, stop) of the movable parts of each prompt, the earliest first. They move to
            the context as far as the decoder lacks space.
          passages: the passages of each prompt. Of a prompt with passages, only these move.
        """
        return self

    def check_scored(self, length: int, first: int, size: int) -> None:  # noqa: B027 (optional)
        """Raises an InputError if tokens `first : size` of a window of `length` have no score."""

    def with_foreign_context(
        self,
        tokens: np.ndarray,
        others: Iterable[np.ndarray],
        seed: Sequence[int],
        passages: Sequence[PassageSpan] | None = None,
    ) -> np.ndarray:
        """Returns a window, its context replaced by text of `others` if the model is set up so.

        Args:
          tokens: tokens of the window, int32 [T].
          others: tokens of windows of other documents.
          seed: seed of the choice among `others`.
          passages: the window's passages, if it has any; these are replaced instead of chunks.
        """
        return tokens

    def num_decoder_passages(self, size: int, passages: Sequence[PassageSpan]) -> int:
        """Returns how many of `passages` of a window of `size` the decoder reads."""
        return len(passages)

    def num_unread(
        self,
        size: int,
        movable: Spans | None = None,
        passages: Sequence[PassageSpan] = (),
    ) -> int:
        """Returns how many tokens of a window of `size` are read neither by decoder nor as context.

        `movable` are the spans that may be read as context (None: any token), `passages` the spans
        that are read whole.
        """
        return 0


class WrappedScorer(Scorer):
    """A scorer that reads text with `lm`, and shares its tokenizer, config, mesh and rotation."""

    lm: Scorer

    @property
    def tokenizer(self) -> Tokenizer:
        return self.lm.tokenizer

    @property
    def config(self) -> ModelConfig:
        return self.lm.config

    @property
    def mesh(self) -> jax.sharding.Mesh | None:
        return self.lm.mesh

    @property
    def depends_on_length(self) -> bool:
        return self.lm.depends_on_length
