"""The text of `--help`: every key with its type, default, choices and the comment beside it."""

import dataclasses
import types
import typing

import draccus
from draccus.wrappers.docstring import get_attribute_docstring


def is_choice(kind: typing.Any) -> bool:
    """Whether `kind` is the head of a registry, whose entries are told apart by `type`."""
    return isinstance(kind, type) and draccus.ChoiceRegistry in kind.__bases__


def split_union(kind: typing.Any) -> tuple[list, bool]:
    """The members of `A | B | None` without None, and whether None was among them."""
    union = isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union
    members = list(typing.get_args(kind)) if union else [kind]
    rest = [member for member in members if member is not types.NoneType]
    return rest, len(rest) < len(members)


def help_text(cls: type) -> str:
    """One line a key, sections apart."""
    usage = "usage: --config file.yaml [--section.key=value ...]\n\nKeys, types, defaults:"
    return "\n".join([usage, *_lines(cls, "", "")])


def _shown(field: dataclasses.Field) -> str:
    if field.default is not dataclasses.MISSING:
        return f" = {field.default!r}"
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
        return (
            f" = {type(value).__name__}()" if dataclasses.is_dataclass(value) else f" = {value!r}"
        )
    return " (required)"


def _lines(cls: type, prefix: str, label: str) -> list[str]:
    lines, sections = [], []
    for field in dataclasses.fields(cls):
        kind = typing.get_type_hints(cls)[field.name]
        only = split_union(kind)[0][0]
        item = typing.get_args(only)[0] if typing.get_origin(only) in (tuple, list) else only
        key = f"{prefix}{field.name}" + ("" if item is only else ".0")
        if is_choice(item):
            choices = item.get_known_choices()
            sections.append(f"\n  --{key}.type  {' | '.join(choices)}{_shown(field)}")
            for name, choice in choices.items():
                sections += _lines(choice, f"{key}.", f"[{name}] ")
        elif dataclasses.is_dataclass(item):
            sections += ["", *_lines(item, f"{key}.", "")]
        else:
            text = get_attribute_docstring(cls, field.name)
            comment = text.comment_inline or text.comment_above or text.docstring_below
            kind_name = (
                kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
            )
            line = f"  --{prefix}{field.name}  {label}{kind_name}{_shown(field)}"
            lines.append(line + (f"  # {comment}" if comment else ""))
    return lines + sections
