"""Sources of type chat: conversations, of which only the answers are learned.

The tokenizer's chat template, or the prompt of the source, renders a conversation as pieces of text
that are learned or not. Each piece is tokenised separately, so no token belongs to both kinds. When
the model generates, its answer begins at a new token as well.
"""

import string
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from lcjax.data.config import ChatSource, TextConfig
from lcjax.data.readers import Document, RecordFiles, checked_text, field_value
from lcjax.errors import InputError

Message = dict[str, str]
# ShareGPT's names of roles, and the usual ones.
_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "chatgpt": "assistant"}


class PromptAnswer(NamedTuple):
    """A prompt and its answer without a chat template, as text or token ids."""

    prompt: str | np.ndarray
    answer: str | np.ndarray


class ChatFiles(RecordFiles):
    """Files of records that hold messages, or the fields of a prompt and an answer."""

    source: ChatSource

    def __init__(self, source: ChatSource, config: TextConfig):
        names = [source.messages_field]
        if source.prompt:
            names = _field_names(source.prompt) + _field_names(source.answer)
        fields = {f"field {i}": name for i, name in enumerate(dict.fromkeys(names))}
        super().__init__(source, config, fields)

    def _document(self, record: dict | str, location: str, name: str) -> Document:
        source = self.source
        if isinstance(record, str):
            if record.strip():
                raise InputError(f"{location} is plain text, not a record: type chat reads records")
            return Document(name, [])
        if source.prompt:
            templates = source.prompt, source.answer
            return Document(name, PromptAnswer(*(_fill(t, record, location) for t in templates)))
        return Document(name, _messages(record, source.messages_field, location))


class ChatTokenise:
    """Tokenises messages, or a prompt and an answer, and marks the tokens that are learned."""

    def __init__(self, tokenizer: Any, source: ChatSource):
        self._tokenizer, self._learn_all = tokenizer, source.learn == "all"

    def __call__(self, name: str, value: Any) -> tuple[np.ndarray, np.ndarray]:
        """Returns int32 ids [n] and bool [n], which tokens are learned.

        `name` is for error messages. Raises an InputError for a conversation that the template
        refuses.
        """
        if isinstance(value, PromptAnswer):
            parts = [(value.prompt, self._learn_all), (value.answer, True)]
            return _join([(self._ids(text), is_learned) for text, is_learned in parts])
        try:
            pieces = turns(self._tokenizer.render_chat, value, to_end=self._learn_all)
        except InputError as error:
            raise InputError(f"{name}: {error}") from None
        return _join([self._piece(text, is_answer) for text, is_answer in pieces])

    def _ids(self, text: str | np.ndarray) -> list[int] | np.ndarray:
        return self._tokenizer.encode(text) if isinstance(text, str) else text

    def _piece(self, text: str, is_answer: bool) -> tuple[list[int], Any]:
        ids = self._tokenizer.encode(text, allow_special=True)
        is_learned = np.full(len(ids), is_answer or self._learn_all)
        if is_answer and not self._learn_all:
            # The model never generates the text that the template adds after the end of a turn.
            ends = np.flatnonzero(np.isin(ids, list(self._tokenizer.eos_ids)))
            is_learned[ends[-1] + 1 if len(ends) else len(ids) :] = False
        return ids, is_learned


def _join(pieces: list[tuple[list[int], Any]]) -> tuple[np.ndarray, np.ndarray]:
    if not pieces:
        return np.zeros(0, np.int32), np.zeros(0, bool)
    ids = [np.array(ids, np.int32) for ids, _ in pieces]
    masks = [np.broadcast_to(mask, len(i)) for i, (_, mask) in zip(ids, pieces, strict=True)]
    return np.concatenate(ids), np.concatenate(masks)


def turns(
    render: Callable[..., str], messages: list[Message], *, to_end: bool = False
) -> list[tuple[str, bool]]:
    """Renders a conversation, and cuts the text into pieces at the answers.

    Args:
      render: the tokenizer's `render_chat`.
      messages: the conversation.
      to_end: whether to include the messages after the last answer.

    Returns:
      Pairs (text, whether it is an answer) of every piece. The first message is no answer.

    Raises:
      InputError: the template refuses the messages, or changes earlier turns when one is added.
    """
    pieces, prefix = [], ""
    for index, message in enumerate(messages):
        is_answer = message["role"] == "assistant" and index > 0
        if not is_answer and not (to_end and index == len(messages) - 1):
            continue
        before = render(messages[:index], add_generation_prompt=True) if is_answer else prefix
        after = render(messages[: index + 1], add_generation_prompt=False)
        if not before.startswith(prefix) or not after.startswith(before):
            raise InputError(
                f"the chat template changes earlier turns at message {index + 1}, so the beginning"
                " of its answer is not known: set prompt and answer, or split the conversation"
                " into one record per answer"
            )
        pieces += [(before[len(prefix) :], False), (after[len(before) :], is_answer)]
        prefix = after
    return pieces


def _messages(record: dict, field: str, location: str) -> list[Message]:
    value = field_value(record, field, location, "messages_field")
    if not isinstance(value, list) or not all(isinstance(m, dict) for m in value):
        raise InputError(f"{location}: field {field!r} is no list of messages (role and content)")
    messages = []
    for number, message in enumerate(value, start=1):
        role = message.get("role", message.get("from"))
        content = message.get("content", message.get("value"))
        if not isinstance(role, str) or not isinstance(content, str):
            raise InputError(
                f"{location}: message {number} has {', '.join(sorted(message)) or 'nothing'}, not"
                " role and content (or from and value) as text"
            )
        for text in (role, content):
            checked_text(text, f"{location}: message {number}")
        messages.append({"role": _ROLES.get(role, role), "content": content})
    return messages


def _field_names(template: str) -> list[str]:
    """Lists the fields in a template such as "{instruction}"."""
    return [name for _, name, _, _ in string.Formatter().parse(template) if name]


def _fill(template: str, record: dict, location: str) -> str:
    # Not str.format_map: "a.b" names a field of a nested mapping, and None becomes an empty text.
    pieces = []
    for text, name, _, _ in string.Formatter().parse(template):
        value = "" if name is None else field_value(record, name, location, "prompt")
        pieces += [text, "" if value is None else str(value)]
    return checked_text("".join(pieces), location)
