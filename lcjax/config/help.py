"""The text of `--help`: every key with its type, default, choices and the comment beside it."""

import ast
import dataclasses
import inspect
import io
import textwrap
import tokenize
import types
import typing

import draccus


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
    return "\n".join([usage, *_lines(cls, "")])


def _lines(cls: type, prefix: str) -> list[str]:
    """The keys of one section, then those of the sections in it; a blank line between."""
    own, sections = [], []
    hints, notes = typing.get_type_hints(cls), comments(cls)
    for field in dataclasses.fields(cls):
        kind = split_union(hints[field.name])[0][0]
        many = typing.get_origin(kind) in (tuple, list)
        item = typing.get_args(kind)[0] if many else kind
        key = prefix + field.name
        inner = f"{key}.0." if many else f"{key}."
        note = f"  # {notes[field.name]}" if field.name in notes else ""
        if is_choice(item):
            names = " | ".join(item.get_known_choices())
            sections += ["", f"  --{inner}type  {names}{_default(field)}{note}"]
            sections += _choices(item, inner)
        elif dataclasses.is_dataclass(item):
            sections += ["", *_lines(item, inner)]
        else:
            own.append(f"  --{key}  {_type(hints[field.name])}{_default(field)}{note}")
    return own + sections


def _choices(head: type, prefix: str) -> list[str]:
    """The keys of all entries of a registry; a key that several share stands once."""
    known = head.get_known_choices()
    owners: dict[str, list[str]] = {}
    for name, choice in known.items():
        for line in filter(None, _lines(choice, prefix)):
            owners.setdefault(line, []).append(name)
    labels = {line: "" if len(of) == len(known) else ", ".join(of) for line, of in owners.items()}
    return [f"{line}  [{label}]" if label else line for line, label in labels.items()]


def _type(kind: typing.Any) -> str:
    kinds, optional = split_union(kind)
    names = [
        " | ".join(map(str, typing.get_args(k)))
        if typing.get_origin(k) is typing.Literal
        else (str(k) if typing.get_args(k) else k.__name__)
        for k in kinds
    ]
    return " | ".join(names + ["null"] * optional)


def _default(field: dataclasses.Field) -> str:
    if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
        return " (required)"
    value = field.default if field.default is not dataclasses.MISSING else field.default_factory()
    if dataclasses.is_dataclass(value):
        heads = filter(is_choice, type(value).__mro__)
        names = [head.get_choice_name(type(value)) for head in heads]
        return f" = {(names or [type(value).__name__])[0]}"
    return f" = {_yaml(value)}"


def _yaml(value: typing.Any) -> str:
    """A default as one would write it in the file."""
    words = {None: "null", True: "true", False: "false"}
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_yaml, value))}]"
    return words[value] if value is None or isinstance(value, bool) else str(value) or "''"


def comments(cls: type) -> dict[str, str]:
    """What stands beside each field in the source, or above it; base classes included."""
    found = {}
    for owner in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(owner):
            continue
        try:
            source = textwrap.dedent(inspect.getsource(owner))
        except OSError:  # defined at a prompt: no file, no comments
            continue
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        notes = {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}
        lines = source.splitlines()
        for node in ast.parse(source).body[0].body:
            if isinstance(node, ast.AnnAssign):
                rows = [row for row in range(node.lineno, node.end_lineno + 1) if row in notes]
                above = node.lineno - 1
                while not rows[:1] and lines[above - 1].lstrip().startswith("#"):
                    above -= 1
                rows = rows or list(range(above + 1, node.lineno))
                if rows:
                    found[node.target.id] = " ".join(notes[row] for row in rows)
    return found
