"""Documents and the passages that they are cut into.

A passage is a part of one document: some tokens, words, or whole sentences. It keeps the place that
it comes from, so the same text and settings give the same passages with the same ids.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from lcjax.checkpoints import load_tokenizer
from lcjax.checkpoints.tokenizer import check_text
from lcjax.data.chat import PromptAnswer
from lcjax.data.config import Source, TextConfig
from lcjax.data.corpus import source_files
from lcjax.data.readers import Reader, RecordFiles, SourceFiles
from lcjax.errors import InputError, check_integer, check_one_of
from lcjax.generation.retrieval_reader import join_title

UNITS = ("tokens", "words", "sentences")
# Scripts without spaces between words: every character counts as a word.
_CHARACTERS = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
# Up to 64 characters, so that data without spaces, such as base64, makes no endless word.
_WORD = re.compile(rf"[{_CHARACTERS}]|[^\s{_CHARACTERS}]{{1,64}}")
_SENTENCE_END = re.compile(r"[.!?…]+[\"'”’»)\]]*$|[。！？]$")
_BLANK_LINE = re.compile(r"\n\s*\n")


@dataclasses.dataclass(frozen=True)
class Document:
    """A text to be cut into passages."""

    name: str  # its place in the source, such as a path or `file.jsonl:3`
    text: str
    title: str = ""
    source: str = ""

    def __post_init__(self):
        for text in (self.name, self.text, self.title, self.source):
            check_text(text)


@dataclasses.dataclass(frozen=True)
class Passage:
    """A part of a document.

    `start` and `end` are characters of the document's text.
    """

    id: str
    text: str
    title: str
    source: str
    document: str = ""
    start: int = 0
    end: int = 0

    @property
    def full_text(self) -> str:
        """The title and the text, as words are searched."""
        return join_title(self.title, self.text)


@dataclasses.dataclass(frozen=True)
class Chunking:
    """How documents are cut into passages."""

    unit: str = "words"  # tokens, words, or sentences: as many whole ones as fit
    size: int = 100  # of a passage: tokens, or words (also of whole sentences)
    # Tokens, words (or words of whole sentences) at the end of a passage that the next repeats
    overlap: int = 0
    tokenizer: str = ""  # with unit tokens: as model.path; also decodes sources of type tokens
    # Field of a record that holds its title; empty: none. The title of a file that is one document
    # is its name
    title_field: str = ""

    def __post_init__(self):
        check_one_of("chunking.unit", self.unit, UNITS)
        check_integer("chunking.size", self.size, 1)
        check_integer("chunking.overlap", self.overlap, 0)
        if self.overlap >= self.size:
            raise InputError(
                f"chunking.overlap={self.overlap} must be below chunking.size={self.size}"
            )
        if self.unit == "tokens" and not self.tokenizer:
            raise InputError("chunking.tokenizer is empty, and chunking.unit=tokens needs one")

    def passages(self, document: Document) -> Iterator[Passage]:
        """Yields the passages of a document in order; none of a document without text."""
        text = document.text
        spans = np.array(self._spans(text), np.int64).reshape(-1, 2)
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

    def _spans(self, text: str) -> list[tuple[int, int]]:
        """Returns the characters (start, end) of all tokens or words."""
        if self.unit == "tokens":
            return tokenizer(self.tokenizer).spans(text)
        return [match.span() for match in _WORD.finditer(text)]

    def _ranges(self, text: str, spans: np.ndarray) -> Iterator[tuple[int, int]]:
        """Yields (first, last + 1) of the tokens or words of every passage."""
        if self.unit == "sentences":
            yield from self._sentence_ranges(sentence_starts(text, spans))
            return
        for first in range(0, len(spans), self.size - self.overlap):
            last = min(first + self.size, len(spans))
            yield first, last
            if last == len(spans):
                return

    def _sentence_ranges(self, starts: np.ndarray) -> Iterator[tuple[int, int]]:
        """Packs sentences; `starts` int [sentences + 1] are their first words, and the end."""
        pieces = [0]  # ends of sentences, and of parts of those that are too long
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
            repeated = last
            while repeated - 1 > first and pieces[last] - pieces[repeated - 1] <= self.overlap:
                repeated -= 1
            first = repeated


def sentence_starts(text: str, words: np.ndarray) -> np.ndarray:
    """Finds the first word of every sentence.

    A sentence ends at a full stop, question mark or exclamation mark before a word that does not
    begin with a lower-case letter, and at a blank line.

    Args:
      text: the text.
      words: int [n, 2], characters (start, end) of its words.

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
    """Returns the sentences of a text."""
    words = np.array([match.span() for match in _WORD.finditer(text)], np.int64).reshape(-1, 2)
    starts = sentence_starts(text, words)
    return [text[words[a, 0] : words[b - 1, 1]] for a, b in zip(starts[:-1], starts[1:])]


@functools.lru_cache(maxsize=2)
def tokenizer(name: str) -> Any:
    """Loads a tokenizer once in a process."""
    try:
        return load_tokenizer(name)
    except InputError as error:
        message = str(error).removeprefix(f"{name}: ")
        raise InputError(f"chunking.tokenizer={name}: {message}") from error


def open_files(source: Source, config: TextConfig, chunking: Chunking) -> SourceFiles:
    """Opens a source, of which the titles of records are read as well."""
    files = source_files(source, config)
    if chunking.title_field and isinstance(files, RecordFiles):
        files.fields["chunking.title_field"] = chunking.title_field
    return files


def read_document(files: SourceFiles, reader: Reader, index: int, chunking: Chunking) -> Document:
    """Reads a record of a source as a document."""
    name, value = files.document(reader, index).pair
    text = document_text(value, name, chunking.tokenizer)
    title = reader.title(index, chunking.title_field) if text.strip() else ""
    return Document(name, text, title, files.source.name)


def document_text(value: Any, name: str, tokenizer_name: str) -> str:
    """Returns the text of a value of a source: a text, a conversation, or token ids."""
    if isinstance(value, str):
        return value
    if isinstance(value, PromptAnswer):
        return "".join(document_text(part, name, tokenizer_name) for part in value)
    if isinstance(value, list):
        return "\n".join(f"{message['role']}: {message['content']}" for message in value)
    if not tokenizer_name:
        raise InputError(f"{name} holds token ids: give chunking.tokenizer to read them as text")
    return tokenizer(tokenizer_name).decode(value, skip_special=True)
