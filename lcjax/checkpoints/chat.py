"""Conversations as token ids: special tokens come from the chat template, never from a message.

The rendered text is encoded once, as a whole, so tokenizers that treat the beginning of a text in
another way (a space before it) do so only there. To tell a special token of the template from its
string in a message, the conversation is rendered again with these strings changed: one character
of each becomes a rare one, of which the template knows nothing. What is equal in both texts is the
template's.
"""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from lcjax.errors import InputError
from lcjax.files import parse_json

Message = dict[str, Any]  # role and content, and other keys that the chat template reads
Result = TypeVar("Result")
Span = tuple[int, int]  # characters (start, stop) of a text
# Letters of Linear A: Python prints them as they are, unlike private or unassigned characters.
_RARE = range(0x10600, 0x10737)
# Stand in for special tokens in a text that has their strings, too; one for each token.
_ALIASES = range(0x100000, 0x10FFFE)
_HIDDEN = "\uffff"  # a noncharacter, part of no special token


class ChatTokens(NamedTuple):
    """A conversation as text and token ids.

    Attributes:
      text: the rendered conversation.
      ids: the ids of the whole text.
      spans: the characters of `text` that each token covers. Several tokens may be parts of one
        character; each has its span, or some are empty.
      generated: what `{% generation %}` marks in the template: text that the model writes.
    """

    text: str
    ids: list[int]
    spans: list[Span]
    generated: tuple[Span, ...] = ()

    def after(self, start: int) -> list[int] | None:
        """Returns the ids of `text[start:]`, or None if a token covers both sides of `start`."""
        is_cut = any(first < start < stop for first, stop in self.spans)
        return None if is_cut else self.ids[sum(first < start for first, _ in self.spans) :]


def special_pattern(strings: Iterable[str]) -> re.Pattern | None:
    """Returns a pattern that finds special tokens, the longest of several; None for no tokens."""
    ordered = sorted(filter(None, strings), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def find_specials(
    pattern: re.Pattern | None, text: str, literal: Sequence[int]
) -> Iterator[re.Match]:
    """Yields the matches of special tokens that cover none of the characters `literal`."""
    if pattern is None:
        return iter(())
    characters = list(text)
    for index in literal:
        characters[index] = _HIDDEN
    return pattern.finditer("".join(characters))


def aliases(strings: Sequence[str]) -> dict[str, str]:
    """Maps the string of each special token to one of the same length that occurs in no text."""
    return {text: chr(_ALIASES[i]) * len(text) for i, text in enumerate(strings)}


def with_aliases(text: str, specials: Mapping[int, str], alias: Mapping[str, str]) -> str:
    """Returns `text` with aliases for `specials`, which maps first characters to strings.

    Raises:
      InputError: the text has characters of an alias.
    """
    used = {value[0] for value in alias.values()}.intersection(text)
    if used:
        raise InputError(
            f"a message holds the string of a special token, and the private character"
            f" {used.pop()!a}; remove one of them"
        )
    characters = list(text)
    for start, string in specials.items():
        characters[start : start + len(string)] = alias[string]
    return "".join(characters)


def typed_specials(
    text: str,
    render: Callable[[Any], str],
    values: Any,
    pattern: re.Pattern | None,
    ends: Iterable[str | None],
) -> list[int]:
    """Finds the strings of special tokens that a template copied from `values`.

    Args:
      text: `render(values)`.
      render: applies the template.
      values: the messages, and other values that people may have written.
      pattern: finds special tokens.
      ends: the special tokens that begin and end turns. Others may be read by the template itself,
        as those that look for the end of a reasoning; they mean then what the template makes of
        them.

    Returns:
      Indices of characters in `text`, one or more in each of the strings.

    Raises:
      InputError: the template reads one of `ends` in a message.
    """
    written = list(strings(values))
    typed = sorted({m.group() for s in written for m in pattern.finditer(s)} if pattern else ())
    if not typed:
        return []

    def changed(strings: Sequence[str]) -> list[int] | None:
        """Returns where the text with changed `strings` differs; None for more than that."""
        rare = _rare_characters(strings, written)
        try:
            other = render(_hide(values, strings, rare))
        except (InputError, RecursionError):
            return None
        if other.translate({ord(mark): char for char, mark in rare.items()}) != text:
            return None
        return [i for i, (a, b) in enumerate(zip(text, other, strict=True)) if a != b]

    literal = changed(typed)
    if literal is None:
        copied = [string for string in typed if changed([string]) is not None]
        literal = None if set(typed).difference(copied).intersection(ends) else changed(copied)
    if literal is None:
        raise InputError(
            f"the chat template reads the special token {typed[0]!r} of a message, so it cannot be"
            " kept as text; remove it, or set allow_special"
        )
    return literal


def strings(values: Any) -> Iterator[str]:
    """Yields all strings in nested lists and mappings, once for each object."""
    seen, stack = set(), [values]
    while stack:
        value = stack.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            stack += [*value, *value.values()] if isinstance(value, Mapping) else value


def _rare_characters(strings: Sequence[str], written: Sequence[str]) -> dict[str, str]:
    """Maps the middle character of each string to a rare one that is not `written`."""
    middle = sorted({string[len(string) // 2] for string in strings})
    used = set().union(*written)
    rare = [chr(code) for code in _RARE if chr(code) not in used]
    if len(rare) < len(middle):
        raise InputError(
            "a message holds special tokens and most letters of Linear A; remove either"
        )
    return dict(zip(middle, rare, strict=False))


def _hide(value: Any, strings: Sequence[str], rare: Mapping[str, str]) -> Any:
    """Replaces the middle character of `strings` everywhere in a nested value."""
    if isinstance(value, str):
        for string in sorted(strings, key=len, reverse=True):
            half = len(string) // 2
            hidden = string[:half] + rare[string[half]] + string[half + 1 :]
            while string in value:  # replacing "aba" in "ababa" leaves another one
                value = value.replace(string, hidden)
        return value
    if isinstance(value, Mapping):
        items = value.items()
        return {_hide(k, strings, rare): _hide(v, strings, rare) for k, v in items}
    if isinstance(value, list | tuple):
        return type(value)(_hide(item, strings, rare) for item in value)
    return value


def read_message(message: Mapping[str, Any], where: str) -> Message:
    """Returns a message as chat templates expect it.

    Fields that are null are left out, but `content`, which calls of tools may stand for. A content
    of text parts becomes one text.

    Args:
      message: the fields.
      where: the place of the message, for errors.

    Raises:
      InputError: a part of the content is no text, or `tool_calls` are no objects.
    """
    message = {k: v for k, v in message.items() if v is not None or k == "content"}
    if isinstance(message.get("content"), list | tuple):
        message["content"] = "".join(_part(part, where) for part in message["content"])
    if "tool_calls" in message:
        calls = message["tool_calls"]
        if not isinstance(calls, list | tuple) or not all(isinstance(c, Mapping) for c in calls):
            raise InputError(f"{where}: tool_calls={calls!r:.80} is no list of objects")
        message.setdefault("content", None)  # for which some templates test
    return message


def with_objects(messages: Sequence[Message], use: Callable[[list[Message]], Result]) -> Result:
    """Returns `use(messages)` with the arguments of calls as templates expect them.

    OpenAI writes them as JSON in a string. Most templates expect an object, some such a string.

    Raises:
      InputError: arguments are not JSON, or `use` raises it for both forms.
    """
    parsed = [
        {**m, "tool_calls": [_call(call) for call in m["tool_calls"]]} if "tool_calls" in m else m
        for m in messages
    ]
    try:
        return use(parsed)
    except InputError:
        if any("tool_calls" in message for message in messages):
            with contextlib.suppress(InputError):
                return use(list(messages))
        raise


def _part(part: Any, where: str) -> str:
    """Returns the text of a part of a content."""
    if not isinstance(part, Mapping):
        raise InputError(f"{where}: content: {part!r:.80} is no object with type and text")
    part = {name: value for name, value in part.items() if value is not None}
    is_text = part.keys() == {"type", "text"} and part["type"] == "text"
    if not is_text or not isinstance(part["text"], str):
        raise InputError(f"{where}: content has {part!r:.80}; only parts of type text are read")
    return part["text"]


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a call of a tool whose arguments are an object."""
    if isinstance(function := call.get("function"), Mapping):
        return {**call, "function": _call(function)}
    arguments = call.get("arguments")
    if not isinstance(arguments, str):
        return dict(call)
    try:
        return {**call, "arguments": parse_json(arguments)}
    except ValueError:
        raise InputError(
            f"tool_calls: arguments={arguments!r:.80} is not JSON; write an object"
        ) from None
