"""Sources of type chat: conversations, of which only the answers are learned.

The tokenizer's chat template renders a conversation, or the prompt of the source makes a text of a
record. The text is encoded as a whole, as at inference, and a token is learned if it has a part of
an answer.
"""

import functools
import json
import re
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lcjax.checkpoints.chat import ChatTokens, Message, Span, read_message, strings, with_objects
from lcjax.checkpoints.long_text import encode_long, spans_long
from lcjax.checkpoints.tokenizer import check_template_variables
from lcjax.data.data_config import ChatSource, TextConfig
from lcjax.data.readers import Document, RecordFiles, checked_text, field_value
from lcjax.errors import InputError
from lcjax.files import parse_json

# ShareGPT's names of roles, and those of its relatives. Other names reach the template.
_ROLES = {
    "human": "user", "prompter": "user", "gpt": "assistant", "bot": "assistant",
    "chatgpt": "assistant", "model": "assistant", "ai": "assistant", "chatbot": "assistant",
    "function_call": "assistant", "observation": "tool", "tool_response": "tool",
}  # fmt: skip
_KNOWN = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
_WEIGHTS = ("weight", "train", "loss")  # OpenAI's and Mistral's key, axolotl's, ms-swift's
_VARIABLES = ("tools", "documents", "chat_template_kwargs")  # fields of a record beside messages
# Marks around the number of a field: a letter of Linear A, and digits for numbers
_MARK, _DIGITS = "\U00010740", "7319046409137"
_MARKED = re.compile(f"(?:{_MARK}|{_DIGITS})0*([0-9]+?)(?:{_MARK}|{_DIGITS})")


class PromptAnswer(NamedTuple):
    """A prompt and its answer without a chat template, as text or token ids."""

    prompt: str | np.ndarray
    answer: str | np.ndarray


class Conversation(NamedTuple):
    """Messages, and the variables of the chat template that their record has."""

    messages: list[Message]
    variables: dict[str, Any]


class ChatFiles(RecordFiles):
    """Files of records that hold messages, or the fields of a prompt and an answer."""

    source: ChatSource

    def __init__(self, source: ChatSource, config: TextConfig):
        names = [source.messages_field]
        if source.prompt:
            names = _field_names(source.prompt) + _field_names(source.answer)
        fields = {f"field {i}": name for i, name in enumerate(dict.fromkeys(names))}
        super().__init__(source, config, fields, () if source.prompt else ("system", *_VARIABLES))

    def _document(self, record: dict | str, location: str, name: str) -> Document:
        source = self.source
        if isinstance(record, str):
            if record.strip():
                raise InputError(f"{location} is plain text, not a record: type chat reads records")
            return Document(name, "")
        if source.prompt:
            templates = source.prompt, source.answer
            return Document(name, PromptAnswer(*(_fill(t, record, location) for t in templates)))
        messages = _messages(record, source.messages_field, location)
        return Document(name, Conversation(messages, _variables(record, location)))


class ChatTokenise:
    """Tokenises messages, or a prompt and an answer, and marks the tokens that are learned."""

    def __init__(self, tokenizer: Any, source: ChatSource):
        self._tokenizer, self._learn_all = tokenizer, source.learn == "all"
        self._allow_special = getattr(source, "allow_special", False)

    def __call__(self, name: str, value: Any) -> tuple[np.ndarray, np.ndarray]:
        """Returns int32 ids [n] and bool [n], which tokens are learned.

        `name` is for error messages. Raises an InputError for a conversation that the template
        refuses.
        """
        if isinstance(value, PromptAnswer):
            return self._prompt_answer(*value)
        messages, variables = value if isinstance(value, Conversation) else (value, {})
        try:
            return with_objects(messages, lambda messages: self._conversation(messages, variables))
        except InputError as error:
            raise InputError(f"{name}: {error}") from None

    def _prompt_answer(
        self, prompt: str | np.ndarray, answer: str | np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        tokenizer = self._tokenizer
        if isinstance(prompt, str) and isinstance(answer, str):
            text = prompt + answer
            ids, spans = encode_long(tokenizer, text), spans_long(tokenizer, text)
            is_learned = _covers(spans, len(text), [(len(prompt), len(text))])
            return ids, is_learned | self._learn_all
        parts = [tokenizer.encode(p) if isinstance(p, str) else p for p in (prompt, answer)]
        is_learned = np.repeat([self._learn_all, True], [len(part) for part in parts])
        return np.concatenate([np.array(part, np.int32) for part in parts]), is_learned

    def _conversation(
        self, messages: Sequence[Message], variables: Mapping[str, Any]
    ) -> tuple[np.ndarray, np.ndarray]:
        weights = [_pop_weight(message, self._learn_all) for message in messages]
        messages = [message for message, _ in weights]
        answers = [n for n, m in enumerate(messages) if n > 0 and m["role"] == "assistant"]
        learned = [n for n in answers if weights[n][1]]
        if not self._learn_all:
            _check_roles(messages)
            messages = messages[: max(learned, default=-1) + 1]
        if not messages:
            return np.zeros(0, np.int32), np.zeros(0, bool)
        tokens = self._tokenizer.encode_chat(
            messages, False, allow_special=self._allow_special, **variables
        )
        tokens = tokens._replace(spans=np.array(tokens.spans, np.int64).reshape(-1, 2))
        render = functools.partial(self._tokenizer.render_chat, **variables)
        size, ids = len(tokens.text), np.array(tokens.ids, np.int32)
        if self._learn_all:
            others = [n for n in answers if not weights[n][1]]
            spans = answer_spans(render, messages, tokens.text, others)
            return ids, ~_covers(tokens.spans, size, spans)
        if tokens.generated and len(learned) == len(answers):
            return ids, _covers(tokens.spans, size, tokens.generated)
        spans = answer_spans(render, messages, tokens.text, learned)
        if not tokens.generated:
            return ids, _covers(tokens.spans, size, self._without_frame(spans, tokens))
        is_answer, is_generated = np.zeros((2, size + 1), bool)
        for mask, ranges in ((is_answer, spans), (is_generated, tokens.generated)):
            for start, stop in ranges:
                mask[start:stop] = True
        return ids, _covers_mask(tokens.spans, is_answer & is_generated)

    def _without_frame(self, spans: Sequence[Span], tokens: ChatTokens) -> list[Span]:
        """Ends answers after their last EOS: the model never generates the text after it."""
        is_eos = np.isin(tokens.ids, list(self._tokenizer.eos_ids))
        starts, stops = tokens.spans[is_eos].T
        ends = []
        for start, stop in spans:
            last = int(np.searchsorted(starts, stop)) - 1
            has_eos = last >= 0 and starts[last] >= start
            ends.append((start, min(stop, int(stops[last])) if has_eos else stop))
        return ends


def _covers(spans: Sequence[Span], size: int, ranges: Sequence[Span]) -> np.ndarray:
    """Returns bool [n]: the tokens that have a character of `ranges` in a text of `size`."""
    mask = np.zeros(size + 1, bool)
    for start, stop in ranges:
        mask[start:stop] = True
    return _covers_mask(spans, mask)


def _covers_mask(spans: Sequence[Span], mask: np.ndarray) -> np.ndarray:
    """Returns bool [n]: the tokens with a character in the mask [size + 1]."""
    starts, stops = np.array(spans, np.int64).reshape(-1, 2).T
    counts = np.concatenate([[0], np.cumsum(mask)])
    # An empty span is a part of the character that follows.
    return counts[np.maximum(stops, starts + 1)] > counts[starts]


def answer_spans(
    render: Callable[..., str], messages: Sequence[Message], text: str, answers: Sequence[int]
) -> list[Span]:
    """Finds answers in a rendered conversation.

    An answer is what the template adds to the messages before it with their generation prompt. Of a
    long conversation only some are found in that way, as each takes two renderings. For the
    others, the text between the fields of messages is compared, which one more rendering gives.

    Args:
      render: the tokenizer's `render_chat`.
      messages: the conversation.
      text: all messages rendered.
      answers: indices of the answers, in order.

    Returns:
      The characters (start, stop) of each answer.

    Raises:
      InputError: the template changes earlier turns when a message is added.
    """

    @functools.cache
    def exact(index: int) -> Span:
        before = render(messages[:index], add_generation_prompt=True)
        is_last = index == len(messages) - 1
        after = text if is_last else render(messages[: index + 1], add_generation_prompt=False)
        if not text.startswith(after) or not after.startswith(before):
            raise InputError(
                f"the chat template changes earlier turns at message {index + 1}, so the beginning"
                " of its answer is not known: give the answers before the last one `weight` 0, set"
                " prompt and answer, or split the conversation into one record per answer"
            )
        return len(before), len(after)

    frames = _frames(render, messages, text) if len(answers) > 2 else {}
    groups: dict[Any, list[int]] = {}
    for index in answers:
        groups.setdefault(frames[index].around if index in frames else index, []).append(index)
    spans = {}
    for group in groups.values():
        spans |= {index: exact(index) for index in (group[0], group[-1])}
        if len(group) < 3:
            continue
        distances = {frames[index].distances(spans[index]) for index in (group[0], group[-1])}
        lead, trail = distances.pop()
        for index in group[1:-1]:
            frame = frames[index]
            is_like = not distances and lead is not None
            spans[index] = (frame.start - lead, frame.stop + trail) if is_like else exact(index)
    return [spans[index] for index in answers]


class _Frame(NamedTuple):
    """The place of a message in a rendered conversation.

    Attributes:
      start: first character of its first field.
      stop: end of its last field.
      around: the text of the template before, between and after its fields.
    """

    start: int
    stop: int
    around: tuple[str, ...]

    def distances(self, span: Span) -> tuple[int, int] | tuple[None, None]:
        """Returns the numbers of characters of `span` before and after the fields.

        They are None if `span` does not lie between the fields of the other messages.
        """
        lead, trail = self.start - span[0], span[1] - self.stop
        is_inside = 0 <= lead <= len(self.around[0]) and 0 <= trail <= len(self.around[-1])
        return (lead, trail) if is_inside else (None, None)


def _frames(
    render: Callable[..., str], messages: Sequence[Message], text: str
) -> dict[int, _Frame]:
    """Finds messages in a rendered conversation by rendering it with marks instead of fields.

    Returns:
      The frames by the index of the message; none if the template changes or omits fields, apart
      from blanks at their ends, and ids.
    """
    try:
        marked, fields = _mark_fields(messages)
        pieces = _MARKED.split(render(marked, add_generation_prompt=False))
    except (InputError, RecursionError):  # a template may check a field
        return {}
    numbers, around = [int(number) for number in pieces[1::2]], pieces[::2]
    needed = [n for n, field in enumerate(fields) if not field.is_id]
    is_known = {*needed} <= {*numbers} <= {*range(len(fields))} and len(numbers) == len({*numbers})
    if _MARK in text or not is_known or not text.startswith(around[0]):
        return {}
    indices = [fields[number].index for number in numbers]
    if indices != sorted(indices):
        return {}
    frames: dict[int, _Frame] = {}
    position = len(around[0])
    for number, before, after in zip(numbers, around, around[1:], strict=False):
        index, variants = fields[number].index, _variants(fields[number].value)
        written = next((v for v in variants if text.startswith(v + after, position)), None)
        if written is None:
            return {}
        stop = position + len(written)
        old = frames.get(index)
        start, texts = (old.start, old.around) if old else (position, (before,))
        frames[index] = _Frame(start, stop, (*texts, after))
        position = stop + len(after)
    return frames if position == len(text) else {}


class _Field(NamedTuple):
    """A text or number in a message: the message's index, the value, and whether it is an id."""

    index: int
    value: Any
    is_id: bool


def _mark_fields(messages: Sequence[Message]) -> tuple[list[Message], list[_Field]]:
    """Returns messages with marks instead of texts and numbers, and these."""
    fields: list[_Field] = []

    def mark(value: Any, index: int, is_id: bool = False) -> Any:
        if isinstance(value, Mapping):
            return {key: mark(item, index) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [mark(item, index) for item in value]
        is_number = type(value) in (int, float)
        if not is_number and not (isinstance(value, str) and value.strip()):
            return value
        fields.append(_Field(index, value, is_id))
        number = str(len(fields) - 1)
        if is_number:
            return int(_DIGITS + number + _DIGITS)
        # Of the same length, because Mistral's templates demand nine characters of an id.
        return _MARK + number.zfill(len(value) - 2) + _MARK

    def mark_call(call: Mapping[str, Any], index: int) -> dict[str, Any]:
        keys = [key for key in ("id", "arguments") if key in call]
        changes = {key: mark(call[key], index, key == "id") for key in keys}
        if isinstance(function := call.get("function"), Mapping):
            changes["function"] = mark_call(function, index)
        return {**call, **changes}

    marked = []
    for index, message in enumerate(messages):
        keys = [key for key in ("reasoning_content", "content", "tool_call_id") if key in message]
        changes = {key: mark(message[key], index, key == "tool_call_id") for key in keys}
        if message.get("tool_calls"):
            changes["tool_calls"] = [mark_call(call, index) for call in message["tool_calls"]]
        marked.append({**message, **changes})
    return marked, fields


def _variants(value: Any) -> list[str]:
    """Returns the forms of a field in a rendered conversation: stripped, or inside of JSON."""
    if not isinstance(value, str):
        return [json.dumps(value), str(value)]
    stripped = [value, value.rstrip(), value.lstrip(), value.strip()]
    return [*stripped, *(json.dumps(value, ensure_ascii=ascii)[1:-1] for ascii in (False, True))]


def _pop_weight(message: Message, learn_all: bool) -> tuple[Message, bool]:
    """Returns a message without its weight, and whether it is learned if it is an answer."""
    keys = [key for key in _WEIGHTS if message.get(key) is not None]
    is_learned = True
    for key in keys:
        weight = message[key]
        if weight not in (0, 1):
            raise InputError(f"{key}={weight!r:.40} of a message must be 0 or 1, or false or true")
        is_learned = is_learned and bool(weight)
        if message["role"] != "assistant" and is_learned != learn_all:
            raise InputError(
                f"{key}={weight} of a message with the role {message['role']}: only those of the"
                " assistant can be chosen; leave it out"
            )
    return {key: value for key, value in message.items() if key not in keys}, is_learned


def _check_roles(messages: Sequence[Message]) -> None:
    """Raises an InputError if no message is an answer because roles have unknown names."""
    roles = list(dict.fromkeys(message["role"] for message in messages))
    unknown = [role for role in roles if role not in _KNOWN]
    if unknown and "assistant" not in roles:
        raise InputError(
            f"no message has the role assistant, the roles are {', '.join(roles)}: rename the one"
            " that answers to assistant"
        )


def _messages(record: dict, field: str, location: str) -> list[Message]:
    """Returns the messages of a record as chat templates expect them."""
    value = field_value(record, field, location, "messages_field")
    if not isinstance(value, list) or not all(isinstance(m, dict) for m in value):
        raise InputError(f"{location}: field {field!r} is no list of messages (role and content)")
    messages = [
        _message(message, f"{location}: message {number}")
        for number, message in enumerate(value, start=1)
    ]
    system = record.get("system")
    has_system = bool(messages) and messages[0]["role"] in ("system", "developer")
    if isinstance(system, str) and system.strip() and messages and not has_system:
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _message(message: dict[str, Any], where: str) -> Message:
    fields = dict(message)
    for name, other in (("role", "from"), ("content", "value")):
        if fields.get(name) is None and other in fields:
            fields[name] = fields.pop(other)
    fields = read_message(fields, where)
    role = fields.get("role")
    if isinstance(role, str):
        name = role.strip().lower()
        fields["role"] = _ROLES.get(name, name if name in _KNOWN else role)
        if name == "function_call" and isinstance(fields.get("content"), str):
            # ShareGPT with tools writes a call as the text of a message.
            calls = _json(fields["content"], f"{where}: function_call")
            calls = calls if isinstance(calls, list) else [calls]
            if not all(isinstance(call, dict) for call in calls):
                raise InputError(f"{where}: function_call holds {calls!r:.80}, no object")
            calls = [{"type": "function", "function": call} for call in calls]
            fields |= read_message({"content": None, "tool_calls": calls}, where)
    content = fields.get("content")
    has_content = isinstance(content, str) or (content is None and bool(fields.get("tool_calls")))
    if not isinstance(role, str) or not has_content:
        raise InputError(
            f"{where} has {', '.join(sorted(message)) or 'nothing'}, not role and content (or from"
            " and value) as text"
        )
    for text in strings(fields):
        checked_text(text, where)
    return fields


def _variables(record: dict, location: str) -> dict[str, Any]:
    """Returns the template's variables in a record, whose lists may be written as JSON."""
    fields = {name: record[name] for name in _VARIABLES if record.get(name)}
    for name, value in fields.items():
        where = f"{location}: field {name!r}"
        value = fields[name] = _json(value, where) if isinstance(value, str) else value
        if name != "chat_template_kwargs" and not isinstance(value, list):
            raise InputError(f"{where} is no list of objects")
        for text in strings(value):
            checked_text(text, where)
    try:
        return fields | check_template_variables(fields.pop("chat_template_kwargs", None))
    except InputError as error:
        raise InputError(f"{location}: {error}") from None


def _json(text: str, where: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise InputError(f"{where} is not JSON: {error}") from None


def _field_names(template: str) -> list[str]:
    """Lists the fields in a template such as "{instruction}"."""
    return [name for _, name, _, _ in string.Formatter().parse(template) if name]


def _fill(template: str, record: dict, location: str) -> str:
    # Not str.format_map: "a.b" names a field of a nested mapping, and None becomes an empty text.
    pieces = []
    for text, name, _, _ in string.Formatter().parse(template):
        value = "" if name is None else field_value(record, name, location, "prompt")
        if isinstance(value, list | dict):
            raise InputError(
                f"{location}: field {name!r} holds a {type(value).__name__}, not text; messages"
                " are read without `prompt`, with messages_field"
            )
        pieces += [text, "" if value is None else str(value)]
    return checked_text("".join(pieces), location)
