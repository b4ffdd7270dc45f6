"""What RULER draws: words from the user's list or an installed package, numbers, UUIDs, essays."""

import dataclasses
import importlib.metadata
import importlib.util
import random
import re
import uuid
from pathlib import Path

import numpy as np

from lcjax.checkpoints.tokenizer import Tokenizer, inside
from lcjax.errors import InputError

_FILES = ("adjectivelist.txt", "nounlist.txt", "verblist.txt")
SPLITTER = "lcjax-1"  # where sentences end; upstream asks NLTK's punkt
# Quotes and brackets that close a sentence are part of it.
_END = re.compile(r"([.!?][\"')\]\u201d\u2019]*) (?=[\"'(\[\u201c\u2018]*[A-Z0-9])")


@dataclasses.dataclass(frozen=True)
class Words:
    """English words: pairs of them are keys, all of them the vocabulary of common words."""

    adjectives: tuple[str, ...]
    nouns: tuple[str, ...]
    verbs: tuple[str, ...]
    source: str  # for records

    @property
    def all(self) -> list[str]:
        return sorted({*self.adjectives, *self.nouns, *self.verbs})

    def pair(self, rng: random.Random) -> str:
        return f"{rng.choice(self.adjectives)}-{rng.choice(self.nouns)}"


def words(path: str | None, key: str) -> Words:
    """From a file with one word a line, a folder with wonderwords' lists, or wonderwords itself."""
    if path is None:
        spec = importlib.util.find_spec("wonderwords")
        if spec is None or spec.origin is None:
            raise InputError(
                f"{key}=null, and wonderwords is not installed: pip install wonderwords, or name a"
                " file with one word a line"
            )
        name = f"wonderwords {importlib.metadata.version('wonderwords')}"
        return _lists(Path(spec.origin).parent / "assets", key, name)
    root = Path(path)
    if root.is_dir():
        return _lists(root, key, root.name)
    if not root.is_file():
        raise InputError(f"{key}={path} is no file and no folder; name one with words")
    found = _read(root)
    if len(found) < 100:
        raise InputError(f"{key}={path} has {len(found)} words; at least 100, one a line")
    return Words(found, found, found, root.name)


def _lists(folder: Path, key: str, source: str) -> Words:
    absent = [name for name in _FILES if not (folder / name).is_file()]
    if absent:
        raise InputError(f"{key}: {folder / absent[0]} is missing; it is one of wonderwords' lists")
    return Words(*(_read(folder / name) for name in _FILES), source)


def _read(path: Path) -> tuple[str, ...]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return tuple(sorted({line.strip() for line in lines if line.strip()}))


def drawn(kind: str, rng: random.Random, vocabulary: Words | None) -> str:
    """A random key or value."""
    if kind == "numbers":  # of seven digits
        return str(rng.randint(1_000_000, 9_999_999))
    if kind == "uuids":
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    return vocabulary.pair(rng)


class Essays:
    """Running text whose first words are the haystack, tokenised sentence by sentence."""

    def __init__(self, texts: list[str], tokenizer: Tokenizer):
        text = " ".join(" ".join(texts).split())
        if not text:
            raise InputError("data: the haystack has no text; name a folder with essays")
        self.tokenizer = tokenizer
        self.sentences = _END.sub(r"\1\n", text).split("\n")
        self._ids: dict[int, list[int]] = {}
        self._ends = np.cumsum([len(sentence.split(" ")) for sentence in self.sentences])

    def first(self, words: int) -> list[list[int]]:
        """Ids of the sentences of the first so many words, each with its blank in front.

        Repeated from the beginning where there are fewer; the last sentence may be cut.
        """
        rounds, rest = divmod(words, int(self._ends[-1]))
        whole = int(np.searchsorted(self._ends, rest, side="right"))
        found = [self._sentence(i) for _ in range(rounds) for i in range(len(self.sentences))]
        found += [self._sentence(i) for i in range(whole)]
        left = rest - (int(self._ends[whole - 1]) if whole else 0)
        if left:
            part = " ".join(self.sentences[whole].split(" ")[:left])
            found.append(inside(self.tokenizer, " " + part))
        return found

    def _sentence(self, index: int) -> list[int]:
        if index not in self._ids:
            self._ids[index] = inside(self.tokenizer, " " + self.sentences[index])
        return self._ids[index]
