"""Tokenizers behind one protocol, whatever the checkpoint ships.

`encode` adds no special tokens and reads text as text: "<|im_end|>" typed by a user becomes
ordinary tokens, so a document cannot end a turn. Only with `allow_special=True`, meant for the
output of `render_chat`, do the strings of special tokens become those tokens.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lcjax.checkpoints.chat import render
from lcjax.errors import InputError

Message = dict[str, str]
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
)  # that `save` writes


@runtime_checkable
class Tokenizer(Protocol):
    """What the rest of the library needs of a tokenizer."""

    bos_id: int | None
    eos_ids: tuple[int, ...]  # tokens that end an answer; the first one ends a document
    pad_id: int | None
    add_bos: bool  # whether the model expects `bos_id` before a text; `encode` never adds it
    vocab_size: int  # highest id + 1

    @property
    def fingerprint(self) -> str:
        """Equal for tokenizers that give equal ids, whichever file they came from."""
        ...

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]: ...

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str: ...

    def render_chat(self, messages: list[Message], add_generation_prompt: bool = True) -> str: ...

    def save(self, folder: str | Path) -> None:
        """Writes some of `TOKENIZER_FILES`: folders with other files are never replaced."""
        ...


@dataclasses.dataclass(frozen=True)
class Specials:
    """The tokens with a role, and how a conversation is written."""

    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    unk_id: int | None = None
    chat_template: str | None = None
    add_bos: bool = False
    max_length: int | None = None

    def strings(self, token: Callable[[int], str | None]) -> dict[str, str]:
        """`bos_token` and so on, as templates and transformers' configs name them."""
        eos = self.eos_ids[0] if self.eos_ids else None
        ids = {"bos": self.bos_id, "eos": eos, "pad": self.pad_id, "unk": self.unk_id}
        found = {f"{k}_token": token(i) for k, i in ids.items() if i is not None}
        return {name: text for name, text in found.items() if text is not None}

    def settings(self, token: Callable[[int], str | None]) -> dict[str, Any]:
        """What `tokenizer_config.json` says whatever the kind of tokenizer."""
        settings: dict[str, Any] = self.strings(token)
        settings |= {"clean_up_tokenization_spaces": False, "add_bos_token": self.add_bos}
        if self.max_length:
            settings["model_max_length"] = self.max_length
        if self.chat_template:
            settings["chat_template"] = self.chat_template
        return settings


class JsonTokenizer:
    """A tokenizer of the `tokenizers` package: `tokenizer.json`, or built from GGUF metadata."""

    def __init__(self, backend: Any, specials: Specials, *, settings: dict[str, Any] | None = None):
        """`settings`: the `tokenizer_config.json` that came with it, kept when it is saved."""
        backend.no_truncation()
        backend.no_padding()
        self._json = backend.to_str()
        self._specials = specials
        self._settings = settings or {"tokenizer_class": "PreTrainedTokenizerFast"}
        self._backends: dict[bool, Any] = {}  # by allow_special
        self.bos_id = specials.bos_id
        self.eos_ids = specials.eos_ids
        self.pad_id = specials.pad_id
        self.unk_id = specials.unk_id
        self.add_bos = specials.add_bos
        # Ids may have holes: the model needs a row for the highest one.
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def __getstate__(self) -> dict[str, Any]:
        # A pickled backend forgets whether it splits special tokens; workers build their own.
        return self.__dict__ | {"_backends": {}}

    def _backend(self, allow_special: bool) -> Any:
        if allow_special not in self._backends:
            from tokenizers import Tokenizer as Backend

            backend = Backend.from_str(self._json)
            backend.encode_special_tokens = not allow_special
            self._backends[allow_special] = backend
        return self._backends[allow_special]

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint(self._backend(False).get_vocab(with_added_tokens=True), self.encode)

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        return self._backend(allow_special).encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        ids = [int(i) for i in ids]
        return self._backend(False).decode(ids, skip_special_tokens=skip_special)

    def token(self, index: int) -> str | None:
        return self._backend(False).id_to_token(index)

    def render_chat(self, messages: list[Message], add_generation_prompt: bool = True) -> str:
        return render(
            self._specials.chat_template,
            messages,
            add_generation_prompt=add_generation_prompt,
            **self._specials.strings(self.token),
        )

    def save(self, folder: str | Path) -> None:
        """Writes `tokenizer.json` and `tokenizer_config.json`, which `AutoTokenizer` opens."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(self._json, encoding="utf-8")
        settings = self._settings | self._specials.settings(self.token)
        write_json(folder / "tokenizer_config.json", settings)


# Everything that pre-tokenizers treat differently: digits, spaces, newlines, case, contractions,
# accents in two normal forms, other scripts, characters outside a vocabulary, code.
_PROBE = (
    "Hello world's 1234567890 3.14\t  tabs\r\n\n\nHE'LL we've don't naïve nai\u0308ve ﬁ Ⅳ "
    "日本語のテキスト Привет мир مرحبا हिन्दी 🙂👩\u200d👩\u200d👧 \u0000\x7f"
    "   def f(x, *y):\n        return x**2 != {'a': [1, 22, 333]}  # --- end\n"
)


def fingerprint(vocabulary: dict[str, int], encode: Callable[[str], list[int]]) -> str:
    """A hash of all tokens and of the ids of a text that shows how text is cut."""
    values = [sorted(vocabulary.items()), encode(_PROBE)]
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


def write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int, where: str) -> None:
    """A tokenizer may have fewer ids than the model has rows (padding), never more."""
    if tokenizer.vocab_size > vocab_size:
        raise InputError(
            f"{where}: the tokenizer has {tokenizer.vocab_size} ids but the model only "
            f"{vocab_size} embedding rows; use the tokenizer that the model was trained with"
        )


class TextStream:
    """Turns ids into text piece by piece; never emits a part of a character.

    Decoding each id alone would break characters of several tokens and lose sentencepiece's
    spaces, so a window of recent ids is decoded with and without the new one.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True):
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._ids: list[int] = []
        self._start = 0  # first id of the window
        self._shown = 0  # ids whose text was emitted

    def _decode(self, stop: int | None = None) -> str:
        return self._tokenizer.decode(
            self._ids[self._start : stop], skip_special=self._skip_special
        )

    def push(self, index: int) -> str:
        """The text that `index` completes; empty while a character is incomplete."""
        self._ids.append(int(index))
        text = self._decode()
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        new = text[len(self._decode(self._shown)) :]
        self._start, self._shown = self._shown, len(self._ids)
        return new

    def finish(self) -> str:
        """What is left, with U+FFFD for a character that never became complete."""
        new = self._decode()[len(self._decode(self._shown)) :]
        self._start = self._shown = len(self._ids)
        return new

    def stream(self, ids: Iterable[int]) -> Iterator[str]:
        """Non-empty pieces of text as ids arrive."""
        for index in ids:
            if piece := self.push(index):
                yield piece
        if piece := self.finish():
            yield piece


def inside(tokenizer: Tokenizer, text: str, *, allow_special: bool = False) -> list[int]:
    """Ids of `text` as they are inside a longer text.

    Encoded behind a letter, which is then taken off, because sentencepiece puts a blank in front
    of whatever it is given.
    """
    anchor = list(tokenizer.encode("a"))
    ids = list(tokenizer.encode("a" + text, allow_special=allow_special))
    if ids[: len(anchor)] == anchor:
        return ids[len(anchor) :]
    return list(tokenizer.encode(text, allow_special=allow_special))
