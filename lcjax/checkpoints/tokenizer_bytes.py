"""A tokenizer without a vocabulary file: UTF-8 bytes, for tests and demonstrations."""

import re
from collections.abc import Iterable
from pathlib import Path

from lcjax.checkpoints.tokenizer import JsonTokenizer, Message, Specials, fingerprint
from lcjax.errors import InputError

_SPECIAL = ("<s>", "</s>", "<pad>")
_BYTES = 256


class ByteTokenizer:
    """Ids 0-255 are bytes, 256 begins and 257 ends a document, 258 pads."""

    bos_id = _BYTES
    eos_ids = (_BYTES + 1,)
    pad_id = _BYTES + 2
    add_bos = True
    vocab_size = _BYTES + len(_SPECIAL)

    @property
    def fingerprint(self) -> str:
        return fingerprint(_byte_vocabulary() | _special_vocabulary(), self.encode)

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        if not allow_special:
            return list(text.encode())
        ids: list[int] = []
        for part in re.split(f"({'|'.join(_SPECIAL)})", text):
            ids += [_BYTES + _SPECIAL.index(part)] if part in _SPECIAL else part.encode()
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        out = bytearray()
        for index in map(int, ids):
            if index >= self.vocab_size:
                raise InputError(f"id={index} must be below {self.vocab_size} (bytes and specials)")
            if index < _BYTES:
                out.append(index)
            elif not skip_special:
                out += _SPECIAL[index - _BYTES].encode()
        return out.decode("utf-8", "replace")

    def render_chat(self, messages: list[Message], add_generation_prompt: bool = True) -> str:
        turns = [f"{m['role']}: {m['content']}\n" for m in messages]
        return "".join(turns) + ("assistant: " if add_generation_prompt else "")

    def save(self, folder: str | Path) -> None:
        """Writes the same tokenizer as `tokenizer.json`: byte-level BPE without merges."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        backend = Tokenizer(models.BPE(vocab=_byte_vocabulary(), merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens(list(_SPECIAL))
        specials = Specials(self.bos_id, self.eos_ids, self.pad_id, add_bos=True)
        JsonTokenizer(backend, specials).save(folder)


def _special_vocabulary() -> dict[str, int]:
    return {name: _BYTES + i for i, name in enumerate(_SPECIAL)}


def _byte_vocabulary() -> dict[str, int]:
    """GPT-2's printable stand-in of each byte: itself where it prints, else from U+0100 on."""
    prints = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in prints]
    return {chr(b): b for b in prints} | {chr(256 + i): b for i, b in enumerate(rest)}
