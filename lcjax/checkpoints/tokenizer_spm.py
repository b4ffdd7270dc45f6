"""sentencepiece tokenizers: `tokenizer.model`, or the pieces inside a GGUF file.

Text is encoded as Meta's Llama reference does: the model's normaliser puts its space before the
text, and no control token is read from it. With `allow_special` the text between special tokens is
encoded piece by piece, each as a text of its own.
"""

import re
import struct
from collections.abc import Iterable
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from lcjax.checkpoints.chat import render
from lcjax.checkpoints.tokenizer import Message, Specials, fingerprint, write_json
from lcjax.errors import InputError

_BPE, _BYTE = 2, 6  # numbers of sentencepiece's model type and token type


class SentencePieceTokenizer:
    """A sentencepiece model and tokens that were added to it (`<pad>` beyond its vocabulary)."""

    def __init__(
        self,
        model: bytes,
        specials: Specials | None = None,
        *,
        added: dict[str, int] | None = None,
        where: str = "tokenizer.model",
    ):
        self._model = model
        self._loaded = processor = _processor(model, where)
        self._specials = specials or Specials(
            bos_id=_valid(processor.bos_id()),
            eos_ids=tuple(i for i in [processor.eos_id()] if i >= 0),
            pad_id=_valid(processor.pad_id()),
            unk_id=_valid(processor.unk_id()),
            add_bos=processor.bos_id() >= 0,
        )
        pieces = range(processor.get_piece_size())
        self.special_ids = {
            processor.id_to_piece(i): i for i in pieces if processor.is_control(i)
        } | (added or {})
        self._strings = {i: text for text, i in self.special_ids.items()}
        self.bos_id = self._specials.bos_id
        self.eos_ids = self._specials.eos_ids
        self.pad_id = self._specials.pad_id
        self.unk_id = self._specials.unk_id
        self.add_bos = self._specials.add_bos
        self.vocab_size = max([len(pieces), *(i + 1 for i in self.special_ids.values())])

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_loaded": None}

    @property
    def _processor(self) -> Any:
        if self._loaded is None:  # unpickled in a worker process
            self._loaded = _processor(self._model, "tokenizer.model")
        return self._loaded

    @cached_property
    def fingerprint(self) -> str:
        processor = self._processor
        vocab = {processor.id_to_piece(i): i for i in range(processor.get_piece_size())}
        return fingerprint(vocab | self.special_ids, self.encode)

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        if not allow_special or not self.special_ids:
            return self._processor.encode(text)
        names = sorted(self.special_ids, key=len, reverse=True)
        ids: list[int] = []
        for part in re.split(f"({'|'.join(map(re.escape, names))})", text):
            special = self.special_ids.get(part)
            ids += self._processor.encode(part) if special is None else [special]
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        runs = groupby((int(i) for i in ids), key=self._strings.__contains__)
        parts = []
        for special, run in runs:
            if not special:
                # Rows that only pad the embedding have no text.
                size = self._processor.get_piece_size()
                parts.append(self._processor.decode([i for i in run if i < size]))
            elif not skip_special:
                parts.extend(self._strings[i] for i in run)
        return "".join(parts)

    def token(self, index: int | None) -> str | None:
        """The string of a special token."""
        if index is None:
            return None
        return self._strings.get(index) or self._processor.id_to_piece(index)

    def render_chat(self, messages: list[Message], add_generation_prompt: bool = True) -> str:
        return render(
            self._specials.chat_template,
            messages,
            add_generation_prompt=add_generation_prompt,
            **self._specials.strings(self.token),
        )

    def save(self, folder: str | Path) -> None:
        """Writes `tokenizer.model` and `tokenizer_config.json`, which `AutoTokenizer` opens."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.model").write_bytes(self._model)
        added = {
            str(i): {"content": text, "special": True, "normalized": False, "lstrip": False}
            | {"rstrip": False, "single_word": False}
            for text, i in self.special_ids.items()
        }
        settings = self._specials.settings(self.token) | {
            "tokenizer_class": "LlamaTokenizer",
            "add_eos_token": False,
            "legacy": True,  # every text after a special token starts with a space, as here
            "added_tokens_decoder": added,
        }
        write_json(folder / "tokenizer_config.json", settings)


def _valid(index: int) -> int | None:
    return index if index >= 0 else None


def _processor(model: bytes, where: str) -> Any:
    import sentencepiece

    try:
        return sentencepiece.SentencePieceProcessor(model_proto=model)
    except (RuntimeError, OSError) as error:
        raise InputError(f"{where}: not a sentencepiece model, or truncated ({error})") from error


def model_from_pieces(
    pieces: list[str], scores: list[float], types: list[int], *, add_prefix: bool
) -> bytes:
    """The sentencepiece BPE model that a GGUF file's vocabulary came from.

    Token types are sentencepiece's own, numbered alike. The protocol buffer is written by hand: it
    takes three messages, not a dependency.
    """
    body = b"".join(
        _message(1, _string(1, piece) + _float(2, score) + _varint(3, kind))
        for piece, score, kind in zip(pieces, scores, types, strict=True)
    )
    byte_fallback = _BYTE in types
    body += _message(2, _varint(3, _BPE) + _varint(35, int(byte_fallback)))
    normaliser = _string(1, "identity") + _varint(3, int(add_prefix)) + _varint(4, 0)
    return body + _message(3, normaliser + _varint(5, 1))


def _number(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _varint(field: int, value: int) -> bytes:
    return _number(field << 3) + _number(value)


def _float(field: int, value: float) -> bytes:
    return _number(field << 3 | 5) + struct.pack("<f", value)


def _message(field: int, body: bytes) -> bytes:
    return _number(field << 3 | 2) + _number(len(body)) + body


def _string(field: int, text: str) -> bytes:
    return _message(field, text.encode())
