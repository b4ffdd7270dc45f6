"""Documents, and the rules that cut them into passages.

A passage is a part of one document: some tokens, words, or whole sentences. Its id consists of the
name of its document and its place there, so the same text and settings give the same ids.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np

from lcjax.checkpoints import load_tokenizer
from lcjax.checkpoints.long_text import spans_long
from lcjax.checkpoints.tokenizer import check_text
from lcjax.data.chat import Conversation, PromptAnswer
from lcjax.data.corpus import source_files
from lcjax.data.data_config import Source, TextConfig
from lcjax.data.readers import Reader, RecordFiles, SourceFiles
from lcjax.errors import InputError, NonNegativeInt, OneOf, PositiveInt, check_fields
from lcjax.generation.passages import join_title

UNITS = ("tokens", "words", "sentences")
# Characters of scripts without spaces between words, for a class of a regular expression: Chinese,
# Japanese, Thai, Lao, Burmese and Khmer. Each one counts as a word.
UNSPACED = (
    "\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u9fff\uf900-\ufaff\uff66-\uff9f"
    "\U00020000-\U000323af\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"
)
# At most 64 characters, so that data without spaces, such as base64, is not one huge word.
_WORD = re.compile(rf"[{UNSPACED}]|[^\s{UNSPACED}]{{1,64}}")
_SPACE_BETWEEN = re.compile(rf"(?<=[{UNSPACED}]) (?=[{UNSPACED}])")
_SENTENCE_END = re.compile(r"[.!?…]+[\"'”’»)\]]*$|[。！？]$")
_BLANK_LINE = re.compile(r"\n\s*\n")


@dataclasses.dataclass(frozen=True)
class Document:
    """A text to be cut into passages."""

    name: str  # place in the source, such as a path or `file.jsonl:3`
    text: str
    title: str = ""
    source: str = ""

    def __post_init__(self):
        for text in (self.name, self.text, self.title, self.source):
            check_text(text)


@dataclasses.dataclass(frozen=True)
class Passage:
    """A part of a document: the characters `start` to `end` of its text."""

    id: str
    text: str
    title: str
    source: str
    document: str = ""
    start: int = 0
    end: int = 0

    @property
    def full_text(self) -> str:
        """The title and the text, joined as for sparse search."""
        return join_title(self.title, self.text)


@dataclasses.dataclass(frozen=True)
class Chunking:
    """Rules that cut documents into passages."""

    # Tokens, words, or sentences (as many whole sentences as fit)
    unit: Annotated[str, OneOf(UNITS)] = "words"
    size: PositiveInt = 100  # size of a passage in tokens, or in words with unit words or sentences
    # Tokens or words that a passage repeats from the one before (with unit sentences at most)
    overlap: NonNegativeInt = 0
    tokenizer: str = ""  # as model.path; for unit tokens, and to decode sources of type tokens
    # Field of a record that holds its title; empty: none. A file that is one document has its name
    # as the title
    title_field: str = ""

    def __post_init__(self):
        check_fields("chunking", self)
        if self.overlap >= self.size:
            raise InputError(
                f"chunking.overlap={self.overlap} must be below chunking.size={self.size}"
            )
        if self.unit == "tokens" and not self.tokenizer:
            raise InputError("chunking.tokenizer is empty, and chunking.unit=tokens needs one")

    def passages(self, document: Document) -> Iterator[Passage]:
        """Yields the passages of a document in order; a document without text has none."""
        text = document.text
        spans = self._spans(text, document.name)
        for first, last in self._ranges(text, spans):
            start, end = int(spans[first, 0]), int(spans[last - 1, 1])
            if text[start:end].strip():
                yield Passage(
                    f"{document.name}#{start}-{end}",
                    text[start:end],
                    document.title,
                    document.source,
                    document.name,
                    start,
                    end,
                )

    def _spans(self, text: str, name: str) -> np.ndarray:
        """Returns the character ranges (start, end) of all tokens or words, int64 [n, 2]."""
        if self.unit == "tokens":
            return spans_long(tokenizer(self.tokenizer), text, name=name)
        ends = itertools.chain.from_iterable(match.span() for match in _WORD.finditer(text))
        return np.fromiter(ends, np.int64).reshape(-1, 2)

    def _ranges(self, text: str, spans: np.ndarray) -> Iterator[tuple[int, int]]:
        """Yields the range (first, last + 1) of the tokens or words of every passage."""
        if self.unit == "sentences":
            yield from self._sentence_ranges(sentence_starts(text, spans))
            return
        for first in range(0, len(spans), self.size - self.overlap):
            last = min(first + self.size, len(spans))
            yield first, last
            if last == len(spans):
                return

    def _sentence_ranges(self, starts: np.ndarray) -> Iterator[tuple[int, int]]:
        """Yields the range of the words of every passage of whole sentences.

        `starts` int [sentences + 1] holds the first word of each sentence, and the word count.
        """
        pieces = [0]  # ends of sentences, and of the parts of sentences longer than `size`
        for start, end in zip(starts[:-1], starts[1:]):
            pieces += [*range(start + self.size, end, self.size), int(end)]
        first = 0
        while first < len(pieces) - 1:
            last = first + 1
            while last < len(pieces) - 1 and pieces[last + 1] - pieces[first] <= self.size:
                last += 1
            yield pieces[first], pieces[last]
            if last == len(pieces) - 1:
                return
            # What is repeated leaves space for the next sentence; else a passage would have no new
            # text.
            begin = max(pieces[last] - self.overlap, pieces[last + 1] - self.size)
            repeated = last
            while repeated - 1 > first and pieces[repeated - 1] >= begin:
                repeated -= 1
            first = repeated


def sentence_starts(text: str, words: np.ndarray) -> np.ndarray:
    """Returns the index of the first word of every sentence.

    A sentence ends at a full stop, question mark or exclamation mark before a word that does not
    begin with a lower-case letter, and at a blank line.

    Args:
      text: the text.
      words: int [n, 2], character ranges (start, end) of its words.

    Returns:
      int [sentences + 1], with `n` at the end; [0] for a text without words.
    """
    starts = [0]
    for i in range(1, len(words)):
        end, start = words[i - 1, 1], words[i, 0]
        gap, word = text[end:start], text[words[i - 1, 0] : end]
        is_end = _SENTENCE_END.search(word) and (gap or word in "。！？")
        if _BLANK_LINE.search(gap) or (is_end and not text[start].islower()):
            starts.append(i)
    return np.array([*starts, len(words)] if len(words) else [0], np.int64)


def sentences(text: str) -> list[str]:
    """Splits a text into its sentences (see `sentence_starts`)."""
    words = np.array([match.span() for match in _WORD.finditer(text)], np.int64).reshape(-1, 2)
    starts = sentence_starts(text, words)
    return [text[words[a, 0] : words[b - 1, 1]] for a, b in zip(starts[:-1], starts[1:])]


def split_words(text: str) -> list[str]:
    """Splits a text at white space, and scripts without spaces at every character."""
    return _WORD.findall(text)


def join_words(words: list[str]) -> str:
    """Joins words by spaces, except between characters of scripts without spaces."""
    return _SPACE_BETWEEN.sub("", " ".join(words))


@functools.lru_cache(maxsize=2)
def tokenizer(name: str) -> Any:
    """Loads a tokenizer, and caches it for the process."""
    try:
        return load_tokenizer(name)
    except InputError as error:
        message = str(error).removeprefix(f"{name}: ")
        raise InputError(f"chunking.tokenizer={name}: {message}") from error


def open_files(source: Source, config: TextConfig, chunking: Chunking) -> SourceFiles:
    """Finds the files of a source; records are read with the field of their title."""
    files = source_files(source, config)
    if chunking.title_field and isinstance(files, RecordFiles):
        files.fields["chunking.title_field"] = chunking.title_field
    return files


def read_document(files: SourceFiles, reader: Reader, index: int, chunking: Chunking) -> Document:
    """Reads one record of a source and returns it as a document."""
    name, value = files.document(reader, index).pair
    text = document_text(value, name, chunking.tokenizer)
    title = reader.title(index, chunking.title_field) if text.strip() else ""
    return Document(name, text, title, files.source.name)


def document_text(value: Any, name: str, tokenizer_name: str) -> str:
    """Returns the text of a document's value: a text, a conversation, or token ids to decode."""
    if isinstance(value, str):
        return value
    if isinstance(value, PromptAnswer):
        return "".join(document_text(part, name, tokenizer_name) for part in value)
    if isinstance(value, Conversation):
        turns = (f"{m['role']}: {m.get('content') or ''}" for m in value.messages)
        return "\n".join(turns)
    if not tokenizer_name:
        raise InputError(f"{name} holds token ids: give chunking.tokenizer to read them as text")
    return tokenizer(tokenizer_name).decode(value, skip_special=True)
