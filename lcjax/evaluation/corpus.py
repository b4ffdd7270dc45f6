"""Texts of a run, tokenised when they are first asked for."""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

import numpy as np

from lcjax.errors import InputError

T = TypeVar("T")
BOS_RULES = ("auto", "always", "never")


def start_token(tokenizer, rule: str) -> int | None:
    """BOS where a text should begin with it; `auto` asks what the model was trained with."""
    wanted = tokenizer.add_bos
    if rule == "never" or (rule == "auto" and not wanted):
        return None
    if tokenizer.bos_id is None:
        raise InputError(f"bos={rule!r}, but this model's tokenizer has no BOS; use bos=auto")
    return tokenizer.bos_id


def prefix_token(tokenizer) -> int:
    """What stands before a text that has nothing before it: BOS, or else the end of a document.

    As lm-evaluation-harness has it, also where a model was trained without BOS.
    """
    ends = tokenizer.eos_ids
    if tokenizer.bos_id is None and not ends:
        raise InputError("the tokenizer has neither BOS nor an end, so a first token has no p")
    return ends[0] if tokenizer.bos_id is None else tokenizer.bos_id


@dataclasses.dataclass(frozen=True)
class Document:
    """Token ids of one text.

    `byte_ends[t]` is how many UTF-8 bytes of the text the tokens 0..t stand for, or the whole
    array is None where the tokenizer cannot tell.
    """

    name: str
    tokens: np.ndarray  # int32 [n]
    byte_ends: np.ndarray | None = None  # float64 [n]

    def __len__(self) -> int:
        return len(self.tokens)

    def with_first(self, token: int | None) -> "Document":
        """The document with one more token in front (BOS), which stands for no byte."""
        if token is None:
            return self
        ends = None if self.byte_ends is None else np.concatenate([[0.0], self.byte_ends])
        return Document(self.name, np.concatenate([[token], self.tokens]).astype(np.int32), ends)

    def cut(self, limit: int | None) -> "Document":
        """The first `limit` tokens; None keeps all."""
        if limit is None or limit >= len(self):
            return self
        ends = None if self.byte_ends is None else self.byte_ends[:limit]
        return Document(self.name, self.tokens[:limit], ends)


@dataclasses.dataclass
class _Entry:
    name: str
    text: str | None  # given back once the tokens exist
    size: int  # UTF-8 bytes
    document: Document | None = None


class Corpus:
    """Named texts and one tokenizer.

    Texts are read once and tokenised lazily: a text cannot have more tokens than bytes, so one
    that is too short for the longest window is never tokenised.
    """

    def __init__(self, texts: Iterable[tuple[str, str]], tokenizer):
        self.tokenizer = tokenizer
        self._source = iter(texts)
        self._entries: list[_Entry] = []
        self._bytes_of: dict[int, float] = {}  # token id -> bytes; nan: part of a character
        self._made: dict[Hashable, Any] = {}

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` gives when `key` is first asked for: what a task reads for all lengths."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def documents(self, minimum: int = 2, limit: int | None = None) -> list[Document]:
        """The first `limit` documents (None: all) of at least `minimum` tokens, in corpus order."""
        kept: list[Document] = []
        for entry in self._walk():
            # One token more than bytes: sentencepiece puts a blank in front.
            if entry.document is None and entry.size + 1 < minimum:
                continue
            document = self._tokenised(entry)
            if len(document) >= minimum:
                kept.append(document)
                if len(kept) == limit:
                    break
        return kept

    def texts(self) -> list[str]:
        """All texts, for haystacks that are cut by words or sentences."""
        return [self._text(entry) for entry in self._walk()]

    def _text(self, entry: _Entry) -> str:
        if entry.text is None:  # it was given up for its tokens
            return self.tokenizer.decode(entry.document.tokens)
        return entry.text

    def _walk(self):
        yield from list(self._entries)
        for name, text in self._source:
            if not text:
                continue
            entry = _Entry(name, text, len(text.encode()))
            self._entries.append(entry)
            yield entry
        if not self._entries:
            raise InputError(
                "data: the corpus holds no text; name a folder or file with .txt, .jsonl or "
                ".parquet that is not empty, python:stdlib, or package:NAME"
            )

    def _tokenised(self, entry: _Entry) -> Document:
        if entry.document is None:
            tokens = np.asarray(self.tokenizer.encode(entry.text), np.int32)
            entry.document = Document(entry.name, tokens, self._byte_ends(tokens, entry.size))
            entry.text = None
        return entry.document

    def _byte_ends(self, tokens: np.ndarray, total: int) -> np.ndarray | None:
        """Bytes up to and with each token, float64 [n], so that the last is the text's size.

        Tokens that are part of a character share what the whole ones leave over. None when the
        tokenizer rewrites more than 0.1 % of a text: then bytes per token mean nothing.
        """
        unique, inverse = np.unique(tokens, return_inverse=True)
        sizes = np.asarray([self._bytes(int(token)) for token in unique])[inverse]
        partial = np.isnan(sizes)
        rest = total - np.nansum(sizes)
        if partial.any() and rest >= 0:
            sizes[partial] = rest / partial.sum()
        elif not partial.any() and abs(rest) <= max(1.0, 1e-3 * total) and total != rest:
            sizes *= total / np.sum(sizes)
        else:
            return None
        return np.cumsum(sizes)

    @functools.cached_property
    def _anchor(self) -> tuple[list[int], str]:
        """A letter to decode tokens behind: sentencepiece drops a blank at the start of a text."""
        ids = list(self.tokenizer.encode("a"))
        return ids, self.tokenizer.decode(ids)

    def _bytes(self, token: int) -> float:
        if token not in self._bytes_of:
            anchor, bare = self._anchor
            text = self.tokenizer.decode([*anchor, token])
            whole = "\ufffd" not in text and text.startswith(bare)
            size = len(text.encode()) - len(bare.encode())
            self._bytes_of[token] = float(size) if whole else float("nan")
        return self._bytes_of[token]
