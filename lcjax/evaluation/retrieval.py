"""Config sections of methods that read retrieved passages, and of kNN-LM."""

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from lcjax.errors import Fraction, InputError, OneOf, PositiveFloat, PositiveInt, check_fields
from lcjax.evaluation.split import SOURCES, check_scored, windows_of_others
from lcjax.generation.language_model import LanguageModel
from lcjax.generation.passages import Retriever
from lcjax.generation.sampling import GeneratedText, Sampling
from lcjax.generation.scorer import Ids, PassageSpan, Scorer, Spans, WrappedScorer
from lcjax.retrieval.reader import METHODS, RetrievalReader
from lcjax.storage import local_path


@dataclasses.dataclass(frozen=True)
class RetrieverSection:
    """A datastore, and how it is searched (`lcjax.retrieval.Retriever.open`)."""

    folder: str = ""  # the datastore
    kind: str | None = None  # sparse, dense or hybrid; null: what the datastore has
    encoder: str | None = None  # encoder of queries; null: the one that made the vectors
    index: str = "exact"  # index of the vectors: exact, or one that was built
    # Maximum hits of a search; null: 100, or 4 if a method reads all of them
    k: PositiveInt | None = None
    name: str = ""  # row of a table; empty: the kind, or else the name of the folder

    def check(self, key: str) -> None:
        """Raises an InputError for settings or a datastore that cannot be searched.

        Args:
          key: The section's place in the config, for messages.
        """
        from lcjax.retrieval.datastore import WHY_MAPPED

        check_fields(key, self)
        folder = local_path(f"{key}.folder", self.folder, WHY_MAPPED)
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
        from lcjax.retrieval.retriever import Retriever  # needs optional packages

        options = {"kind": self.kind, "encoder": self.encoder, "index": self.index}
        return Retriever.open(self.folder, **options)

    @property
    def fingerprint(self) -> str:
        """A digest of the datastore's content."""
        from lcjax.retrieval.datastore import Datastore

        return Datastore(self.folder).fingerprint

    def search(self, queries: Sequence[str], k: int | None = None) -> list[list[Any]]:
        """Opens the datastore and returns the best hits of each query, at most `self.k` and `k`."""
        most = self.k or 100
        most = most if k is None else min(most, k)
        return self.open().search(list(queries), most) if len(queries) else []


@dataclasses.dataclass(frozen=True)
class RetrievalMethod:
    """A method with its own retriever, which reads the retrieved passages in any task.

    The fields are those of `RetrievalReader`.
    """

    # The datastore; its k is the number of passages that are read.
    retriever: RetrieverSection = dataclasses.field(default_factory=RetrieverSection)
    # Input, context, fid, mixture, rag_token, rag_sequence
    how: Annotated[str, OneOf(METHODS)] = "input"
    stride: PositiveInt | None = None  # tokens from one search to the next; null: one search
    # Tokens at the text's end; null: all, or 32 with a stride
    query_tokens: PositiveInt | None = None
    temperature: PositiveFloat = 1.0  # of scores, for mixture
    passage_tokens: PositiveInt | None = None  # longer passages are cut; null: whole
    decoder: PositiveInt | None = None  # tokens at the end of a window that are read; null: all
    # own, or foreign as a control: passages retrieved for a window of another document. It needs
    # `decoder`, and windows twice as long
    source: Annotated[str, OneOf(SOURCES)] = "own"

    def __post_init__(self):
        check_fields("retrieval", self)
        if self.source == "foreign" and self.decoder is None:
            raise InputError(
                "retrieval.source=foreign needs retrieval.decoder, the tokens at the end of a"
                " window that are read; give half of the window or less"
            )

    @property
    def fingerprint(self) -> str:
        return self.retriever.fingerprint

    def reader(self, lm: LanguageModel, length: int, *, prompts: bool = False) -> Scorer:
        """Returns a reader of windows, or prompts, of `length` tokens (`config.apply_method`)."""
        tokens = min(self.decoder or length, length)
        reader = self._reader(lm.with_method(length=None if prompts else tokens), tokens)
        if self.decoder is None:
            return reader
        return RetrievalWindowReader(reader, tokens, self.source)

    def _reader(self, lm: LanguageModel, length: int) -> RetrievalReader:
        names = ("how", "query_tokens", "temperature", "passage_tokens")
        options = {name: getattr(self, name) for name in names} | {"length": length}
        when = "once" if self.stride is None else self.stride
        k = self.retriever.k or RetrievalReader.k
        return RetrievalReader(lm, self.retriever.open(), k, when=when, **options)


@dataclasses.dataclass(frozen=True)
class RetrievalWindowReader(WrappedScorer):
    """Reads the end of a window, `decoder_tokens`, with the passages retrieved for it.

    With source=foreign, as many tokens before it are the end of a window of another
    document, and the passages are retrieved for these.
    """

    lm: RetrievalReader
    decoder_tokens: int
    source: str = "own"

    def nll(self, tokens: np.ndarray, *, first: int, lengths: np.ndarray) -> np.ndarray:
        """Returns losses as `RetrievalReader.nll` does, for the tokens of the decoder."""
        width = tokens.shape[1]
        self.check_scored(width, first, np.min(lengths))
        start = width - self.decoder_tokens
        searched = None if self.source == "own" else tokens[:, start - self.decoder_tokens : start]
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
        check_scored(
            f"retrieval.decoder={self.decoder_tokens}", self.decoder_tokens, length, first, size
        )
        if self.source == "foreign" and length < 2 * self.decoder_tokens:
            raise InputError(
                f"retrieval.source=foreign needs windows of {2 * self.decoder_tokens} tokens, twice"
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
        tokens, start = tokens.copy(), len(tokens) - self.decoder_tokens
        others = windows_of_others(others, len(tokens), "retrieval")
        other = others[np.random.default_rng(seed).integers(len(others))]
        tokens[start - self.decoder_tokens : start] = other[-self.decoder_tokens :]
        return tokens

    def num_unread(
        self,
        size: int,
        movable: Spans | None = None,
        passages: Sequence[PassageSpan] = (),
    ) -> int:
        return max(size - self.decoder_tokens, 0)


@dataclasses.dataclass(frozen=True)
class Knn:
    """A method that mixes in the next tokens of similar contexts (kNN-LM).

    The fields are those of `lcjax.retrieval.KnnLM`.
    """

    folder: str = ""  # made by python -m lcjax.retrieval build-tokens with this method's model
    k: PositiveInt = 1024  # nearest keys
    weight: Fraction = 0.25  # of their tokens (lambda of the paper); 0: the model alone
    temperature: PositiveFloat = 1.0  # squared distances are divided by it
    # Or the approximate index of the datastore: ivf or ivf_pq
    index: Annotated[str, OneOf(("exact", "ivf", "ivf_pq"))] = "exact"

    def check(self, key: str) -> None:
        """Raises an InputError for invalid settings; `key` is the section's place in the config."""
        from lcjax.retrieval.knn_lm import TokenStore

        check_fields(key, self)
        try:
            TokenStore(self.folder)
        except InputError as error:
            raise InputError(f"{key}.folder={error}") from None

    @property
    def fingerprint(self) -> str:
        """A digest of the datastore's content."""
        from lcjax.retrieval.knn_lm import TokenStore

        return TokenStore(self.folder).fingerprint

    def reader(self, lm: LanguageModel, length: int, *, prompts: bool = False) -> Scorer:
        """Returns `lm` with the datastore, for windows, or prompts, of `length` tokens."""
        from lcjax.retrieval.knn_lm import KnnLM, TokenStore

        lm = lm.with_method(length=None if prompts else length)
        options = {name: getattr(self, name) for name in ("k", "weight", "temperature", "index")}
        return KnnLM(lm, TokenStore(self.folder), **options)
