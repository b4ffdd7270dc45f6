"""Sources of type chat: conversations, of which only the answers are learned.

A conversation is written as the model reads it (the tokenizer's chat template, or a prompt of one's
own), as pieces of text that are learned or not. Each piece is tokenised for itself, so no token
belongs to both sides; while generating, the answer begins at a token of its own as well.
"""

import string
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from lcjax.data.config import ChatSource
from lcjax.data.readers import Document, Reader, RecordFiles, field_of
from lcjax.errors import InputError

Message = dict[str, str]
# ShareGPT's names and the usual ones.
_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "chatgpt": "assistant"}


class Plain(NamedTuple):
    """A prompt and its answer, both as they stand: text, or token ids."""

    prompt: str | np.ndarray
    answer: str | np.ndarray


class ChatFiles(RecordFiles):
    """Records that hold messages, or the fields of a prompt and an answer."""

    source: ChatSource

    def __init__(self, source: ChatSource, on_bad_text: str = "error"):
        super().__init__(source, (), on_bad_text)
        fields = [source.messages_field]
        if source.prompt:
            fields = _names(source.prompt) + _names(source.answer)
        self._fields = {f"field {i}": name for i, name in enumerate(dict.fromkeys(fields))}

    def document(self, reader: Reader, index: int) -> Document:
        record, where, name = reader.record(index), reader.where(index), reader.name(index)
        if isinstance(record, str):
            if record.strip():
                raise InputError(f"{where} is plain text, not a record: type chat reads records")
            value: Any = []
        elif self.source.prompt:
            value = Plain(*(_filled(t, record, where) for t in self._templates()))
        else:
            value = _messages(record, self.source.messages_field, where)
        length = sum(map(len, value if isinstance(value, Plain) else _contents(value)))
        return Document(name, value, ".", length)

    def _templates(self) -> tuple[str, str]:
        return self.source.prompt, self.source.answer


class ChatTokenise:
    """Messages or a prompt and answer -> ids, and which of them are learned."""

    def __init__(self, tokenizer: Any, source: ChatSource):
        self._tokenizer, self._every = tokenizer, source.learn == "all"

    def __call__(self, name: str, value: Any) -> tuple[np.ndarray, np.ndarray]:
        """int32 ids [n] and bool [n]."""
        if isinstance(value, Plain):
            parts = [(value.prompt, self._every), (value.answer, True)]
            return self._join([(self._ids(text), how) for text, how in parts])
        pieces = turns(self._tokenizer.render_chat, value, name) if value else []
        return self._join([self._piece(text, answer) for text, answer in pieces])

    def _ids(self, text: str | np.ndarray) -> list[int] | np.ndarray:
        return self._tokenizer.encode(text) if isinstance(text, str) else text

    def _piece(self, text: str, answer: bool) -> tuple[list[int], Any]:
        ids = self._tokenizer.encode(text, allow_special=True)
        learned = np.full(len(ids), answer or self._every)
        if answer and not self._every:
            # What the template adds behind the end of a turn is never generated.
            ends = np.flatnonzero(np.isin(ids, list(self._tokenizer.eos_ids)))
            learned[ends[-1] + 1 if len(ends) else len(ids) :] = False
        return ids, learned

    def _join(self, pieces: list[tuple[list[int], Any]]) -> tuple[np.ndarray, np.ndarray]:
        ids = [np.array(ids, np.int32) for ids, _ in pieces]
        learned = [np.broadcast_to(how, len(i)) for i, (_, how) in zip(ids, pieces, strict=True)]
        if not ids:
            return np.zeros(0, np.int32), np.zeros(0, bool)
        return np.concatenate(ids), np.concatenate(learned)


def turns(render: Callable[..., str], messages: list[Message], name: str) -> list[tuple[str, bool]]:
    """The rendered conversation cut into (text, whether it is an answer)."""
    pieces, done = [], ""
    for at, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(messages[:at], add_generation_prompt=True)
        after = render(messages[: at + 1], add_generation_prompt=False)
        if not before.startswith(done) or not after.startswith(before):
            raise InputError(
                f"{name}: the chat template writes earlier turns anew for message {at + 1}, so"
                " where its answer begins is not known: set prompt and answer, or split the"
                " conversation into one record per answer"
            )
        pieces += [(before[len(done) :], False), (after[len(before) :], True)]
        done = after
    return pieces


def _messages(record: dict, field: str, where: str) -> list[Message]:
    value = field_of(record, field, where, "messages_field")
    if not isinstance(value, list) or not all(isinstance(m, dict) for m in value):
        raise InputError(f"{where}: field {field!r} is no list of messages (role and content)")
    found = []
    for number, message in enumerate(value, start=1):
        role = message.get("role", message.get("from"))
        content = message.get("content", message.get("value"))
        if not isinstance(role, str) or not isinstance(content, str):
            raise InputError(
                f"{where}: message {number} has {', '.join(sorted(message)) or 'nothing'}, not"
                " role and content (or from and value) as text"
            )
        found.append({"role": _ROLES.get(role, role), "content": content})
    return found


def _contents(messages: list[Message]) -> list[str]:
    return [message["content"] for message in messages]


def _names(template: str) -> list[str]:
    """Fields that a template takes, as {instruction}."""
    return [name for _, name, _, _ in string.Formatter().parse(template) if name]


def _filled(template: str, record: dict, where: str) -> str:
    pieces = []
    for text, name, _, _ in string.Formatter().parse(template):
        value = "" if name is None else field_of(record, name, where, "prompt")
        pieces += [text, "" if value is None else str(value)]
    return "".join(pieces)
