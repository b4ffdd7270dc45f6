"""The texts of a run, tokenised on first use."""

import dataclasses
import functools
import re
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

import numpy as np

from lcjax.checkpoints.long_text import encode_long
from lcjax.data.token_files import check_ids
from lcjax.errors import InputError

T = TypeVar("T")
BOS_RULES = ("auto", "always", "never")


def start_token(tokenizer, rule: str) -> int | None:
    """Returns BOS if texts begin with it, else None; `auto` adds BOS if the tokenizer does.

    Raises:
      InputError: The rule needs BOS, and the tokenizer has none.
    """
    if rule == "never" or (rule == "auto" and not tokenizer.add_bos):
        return None
    if tokenizer.bos_id is None:
        raise InputError(f"bos={rule!r}, but this model's tokenizer has no BOS; use bos=auto")
    return tokenizer.bos_id


def prefix_token(tokenizer) -> int:
    """Returns the token before a text without context: BOS, or else the end-of-text token.

    As in lm-evaluation-harness, this also holds for models that were trained without BOS.
    """
    ends = tokenizer.eos_ids
    if tokenizer.bos_id is None and not ends:
        raise InputError(
            "the tokenizer has neither BOS nor an end-of-text token, so the first token of a text"
            " has no probability"
        )
    return ends[0] if tokenizer.bos_id is None else tokenizer.bos_id


class SentenceEnds:
    """Tests whether a token ends a sentence: its text ends in . ! or ?, as in Kamradt's test.

    The full-width marks of Chinese and Japanese end sentences, too.
    """

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self._is_end: dict[int, bool] = {}

    def __call__(self, token: int) -> bool:
        token = int(token)
        if token not in self._is_end:
            text = self._tokenizer.decode(np.array([token])).rstrip("\"')\u201d\u2019")
            self._is_end[token] = text.endswith((".", "!", "?", "\u3002", "\uff01", "\uff1f"))
        return self._is_end[token]

    def split(self, ids: np.ndarray, size: int) -> list[np.ndarray]:
        """Splits token ids at ends of sentences, into chunks of up to `size`."""
        chunks, start = [], 0
        while start < len(ids):
            stop = min(start + size, len(ids))
            if stop < len(ids):
                ends = (end for end in range(stop, start, -1) if self(ids[end - 1]))
                stop = next(ends, stop)
            chunks.append(ids[start:stop])
            start = stop
        return chunks

    def next(self, ids: np.ndarray, index: int) -> int:
        """Returns the first index from `index` on after the end of a sentence, else `index`."""
        ends = (end for end in range(index, len(ids) + 1) if end and self(ids[end - 1]))
        return next(ends, index)


@dataclasses.dataclass(frozen=True)
class TokenizedDocument:
    """Token ids of one text.

    `byte_ends[t]` is the number of UTF-8 bytes of tokens 0..t. It is None if the tokenizer does not
    preserve the text.
    """

    name: str
    tokens: np.ndarray  # int32 [n]
    byte_ends: np.ndarray | None = None  # float64 [n]
    words: float = 0.0  # number of words between blanks

    def __len__(self) -> int:
        return len(self.tokens)

    def with_first(self, token: int | None) -> "TokenizedDocument":
        """Returns the document after `token` (BOS), which has no bytes; None changes nothing."""
        if token is None:
            return self
        ends = None if self.byte_ends is None else np.concatenate([[0.0], self.byte_ends])
        tokens = np.concatenate([[token], self.tokens]).astype(np.int32)
        return dataclasses.replace(self, tokens=tokens, byte_ends=ends)

    def cut(self, limit: int | None) -> "TokenizedDocument":
        """Returns the first `limit` tokens of the document; None keeps all."""
        if limit is None or limit >= len(self):
            return self
        ends = None if self.byte_ends is None else self.byte_ends[:limit]
        words = self.words * limit / len(self)
        return TokenizedDocument(self.name, self.tokens[:limit], ends, words)


@dataclasses.dataclass
class _Entry:
    name: str
    text: str | None  # None once it is tokenised
    size: int  # UTF-8 bytes
    document: TokenizedDocument | None = None


def _count_words(text: str) -> float:
    return 1.0 + sum(1 for _ in re.finditer(r"\s+", text))


class TokenizedCorpus:
    """Named texts and one tokenizer.

    Texts are read once and tokenised lazily. As a text has at most one token per byte, texts that
    are too short for a window are not tokenised. Documents that are stored as token ids keep these,
    but for BOS at their beginning, which the tasks decide about.
    """

    def __init__(self, texts: Iterable[tuple[str, str | np.ndarray]], tokenizer):
        self.tokenizer = tokenizer
        self._source = iter(texts)
        self._entries: list[_Entry] = []
        self._bytes_of: dict[int, float] = {}  # token id -> bytes; NaN for a part of a character
        self._cache: dict[Hashable, Any] = {}

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Calls `make` once per `key` and caches the result, such as a file of all lengths."""
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    def documents(self, minimum: int = 2, limit: int | None = None) -> list[TokenizedDocument]:
        """Returns the first `limit` documents (None: all) with at least `minimum` tokens."""
        matches: list[TokenizedDocument] = []
        for entry in self._walk():
            # sentencepiece adds a blank in front, so one token more than bytes is possible.
            if entry.document is None and entry.size + 1 < minimum:
                continue
            document = self._tokenised(entry)
            if len(document) >= minimum:
                matches.append(document)
                if len(matches) == limit:
                    break
        return matches

    def texts(self) -> list[str]:
        """Returns all texts, for haystacks that are cut by words or sentences."""
        return [self._text(entry) for entry in self._walk()]

    def _text(self, entry: _Entry) -> str:
        if entry.text is None:  # only its tokens are stored
            return self.tokenizer.decode(entry.document.tokens)
        return entry.text

    def _walk(self):
        yield from list(self._entries)
        for name, text in self._source:
            if not len(text):
                continue
            if isinstance(text, str):
                entry = _Entry(name, text, len(text.encode()))
            else:
                entry = self._stored(name, text)
            del text  # `entry` releases it once it is tokenised
            self._entries.append(entry)
            yield entry
        if not self._entries:
            raise InputError(
                "data: the corpus holds no text; name a folder or file with .txt, .jsonl or "
                ".parquet that is not empty, python:stdlib, or package:NAME"
            )

    def _tokenised(self, entry: _Entry) -> TokenizedDocument:
        if entry.document is None:
            tokens = encode_long(self.tokenizer, entry.text, name=entry.name)
            words = _count_words(entry.text)
            entry.text = None  # before `_byte_ends`, which needs memory of its own
            ends = self._byte_ends(tokens, entry.size)
            entry.document = TokenizedDocument(entry.name, tokens, ends, words)
        return entry.document

    def _stored(self, name: str, ids: np.ndarray) -> _Entry:
        """Returns the entry of a document that is stored as token ids."""
        check_ids(name, ids, self.tokenizer.vocab_size)
        ids = ids[int(ids[0] == self.tokenizer.bos_id) :]
        text = self.tokenizer.decode(ids)
        size = len(text.encode())
        ends = self._byte_ends(ids, size)
        return _Entry(name, None, size, TokenizedDocument(name, ids, ends, _count_words(text)))

    def _byte_ends(self, tokens: np.ndarray, total: int) -> np.ndarray | None:
        """Returns the cumulative bytes of the tokens, float64 [n]; the last is the text's size.

        Tokens that are parts of a character share the bytes that the other tokens do not cover.
        The result is None if the tokenizer changes more than 0.1 % of a text.
        """
        # A table by token: `np.unique` with its inverse needs five times the memory of the tokens.
        table = np.zeros(int(tokens.max(initial=0)) + 1)
        for token in np.flatnonzero(np.bincount(tokens)):
            table[token] = self._bytes(int(token))
        sizes = table[tokens]
        partial = np.isnan(sizes)
        rest = total - np.sum(sizes, where=~partial)  # `nansum` would copy the sizes
        if partial.any() and rest >= 0:
            sizes[partial] = rest / partial.sum()
        elif not partial.any() and abs(rest) <= max(1.0, 1e-3 * total) and total != rest:
            sizes *= total / np.sum(sizes)
        else:
            return None
        return np.cumsum(sizes, out=sizes)

    @functools.cached_property
    def _anchor(self) -> tuple[list[int], str]:
        """A letter before decoded tokens, as sentencepiece drops a blank at the start of a text."""
        ids = list(self.tokenizer.encode("a"))
        return ids, self.tokenizer.decode(ids)

    def _bytes(self, token: int) -> float:
        if token not in self._bytes_of:
            anchor, prefix = self._anchor
            text = self.tokenizer.decode([*anchor, token])
            whole = "\ufffd" not in text and text.startswith(prefix)
            size = len(text.encode()) - len(prefix.encode())
            self._bytes_of[token] = float(size) if whole else float("nan")
        return self._bytes_of[token]
