"""The text of `--help`: every key with its type, default, choices and comment in the source."""

import ast
import contextlib
import dataclasses
import inspect
import io
import json
import os
import sys
import textwrap
import tokenize
import types
import typing
from pathlib import Path

import draccus

from lcjax.errors import Limits, OneOf, declared_limits


def is_choice(kind: typing.Any) -> bool:
    """Returns whether `kind` is the base class of a registry; the key `type` chooses an entry."""
    return isinstance(kind, type) and draccus.ChoiceRegistry in kind.__bases__


def split_union(kind: typing.Any) -> tuple[list, bool]:
    """Returns the members of `A | B | None` without None, and whether None was among them."""
    is_union = isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union
    members = list(typing.get_args(kind)) if is_union else [kind]
    kinds = [member for member in members if member is not types.NoneType]
    return kinds, len(kinds) < len(members)


HOW = """\
FILE.yaml holds sections of these keys: `train: {lr: 1e-4}` in the file is `--train.lr=1e-4` on the
command line, which takes precedence. `model: !include other.yaml` reads a section from a file, and
`<<: !include other.yaml` adds its keys to others; paths are relative to the file that names them.
lcjax:NAME is a recipe of the library, lcjax:quickstart_train or lcjax:model/smollm2_135m, instead
of a FILE.yaml; `--config lcjax:` lists them.
`--import FILE.py` (or a module) registers methods, memories and tasks of your own."""


REQUIRED = "(required)"


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of the list of a config's keys.

    Attributes:
      key: the full key, such as `train.lora.rank`; empty for a heading.
      type: the type as in YAML, the choices of a registry, or the text of a heading; empty above
        the keys of a section that may be null.
      default: the default as in YAML, or (required); None: the line has none.
      is_optional: whether the section `key`, or the section that `key` is the type of, may be null.
      note: the comment in the source.
      depth: levels of indentation.
    """

    key: str = ""
    type: str = ""
    default: str | None = None
    is_optional: bool = False
    note: str = ""
    depth: int = 1

    def __str__(self) -> str:
        if not self.key:
            text = self.type
        elif not self.type:
            null = "null (default)" if self.default == "null" else "null"
            text = f"--{self.key}={null}, or with:"
        else:
            text = f"--{self.key}  {self.type}"
            if self.default is not None:
                text += f" {self.default}" if self.default == REQUIRED else f" = {self.default}"
            if self.is_optional:
                text += f" (or --{self.key.removesuffix('.type')}=null)"
        note = f"  # {self.note}" if self.note else ""
        return "  " * self.depth + text + note


def help_text(cls: type) -> str:
    """Returns the purpose and usage of the script, and one line for each key, by section."""
    lines = [f"usage: {command()} [--config FILE.yaml] [--section.key=value ...]", "", HOW]
    lines += ["", "Keys, types, defaults:"]
    # A script's docstring contains an example. lcjax-train and lcjax-eval have no docstring.
    purpose = inspect.cleandoc(sys.modules["__main__"].__doc__ or cls.__doc__ or "")
    keys = [str(line or "") for line in key_lines(cls)]
    return "\n".join([*([purpose, ""] if purpose else []), *lines, *keys])


def print_help(text: str) -> None:
    """Prints a text; silent if the reader has seen enough, as in `--help | head`."""
    with contextlib.suppress(BrokenPipeError):
        print(text, flush=True)
    is_output_closed()


def is_output_closed() -> bool:
    """Returns whether nobody reads stdout any more; it then leads nowhere from now on."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes stdout once more when it ends, and would report this error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def command() -> str:
    """Returns the command of this process: `python eval.py`, `lcjax-eval`, `python -m package`."""
    module = sys.modules["__main__"].__spec__  # set by `python -m package`; None for a script
    script = Path(sys.argv[0])
    python = "python " if script.suffix == ".py" else ""
    return f"python -m {module.parent}" if module else f"{python}{script.name}"


def key_lines(cls: type) -> list[Line | None]:
    """Returns one line for each key of a config, by section; None separates sections."""
    return _lines(cls, "", {})


def _lines(cls: type, prefix: str, seen: dict[type, str]) -> list[Line | None]:
    """Returns the lines of one section's keys, then those of the sections in it.

    Args:
      cls: dataclass of the section.
      prefix: prefix of its keys, such as `train.`.
      seen: prefix under which the entries of each registry are listed already; updated in place.
    """
    keys, sections = [], []
    hints, notes = typing.get_type_hints(cls), comments(cls)
    limits = declared_limits(cls)
    for field in dataclasses.fields(cls):
        kinds, optional = split_union(hints[field.name])
        many = typing.get_origin(kinds[0]) in (tuple, list)
        item = typing.get_args(kinds[0])[0] if many else kinds[0]
        key = prefix + field.name
        inner = f"{key}.0." if many else f"{key}."
        note = notes.get(field.name, "")
        if is_choice(item):
            names = " | ".join(item.get_known_choices())
            default = None if optional and field.default is None else _default(field)
            sections += [None, Line(f"{inner}type", names, default, optional, note)]
            sections += _choices(item, inner, seen)
        elif dataclasses.is_dataclass(item):
            default = "null" if field.default is None else None
            head = [Line(key, default=default, is_optional=True, note=note)] if optional else []
            sections += [None, *head, *_lines(item, inner, seen)]
        else:
            text = type_text(hints[field.name], limits.get(field.name))
            keys.append(Line(key, text, _default(field), note=note))
    return keys + sections


def _choices(head: type, prefix: str, seen: dict[type, str]) -> list[Line]:
    """Returns the keys that all entries of a registry share, then each entry's other keys."""
    if head in seen:
        return [Line(type=f"keys as those of --{seen[head]}type", depth=2)]
    seen[head] = prefix
    entries = {
        name: list(filter(None, _lines(choice, prefix, seen)))
        for name, choice in head.get_known_choices().items()
    }
    shared = [
        line
        for line in next(iter(entries.values()), [])
        if all(line in lines for lines in entries.values())
    ]
    result = list(shared)
    for name, lines in entries.items():
        others = [dataclasses.replace(x, depth=x.depth + 1) for x in lines if x not in shared]
        result += [Line(type=f"[{name}]", depth=2), *others] if others else []
    return result


def type_text(kind: typing.Any, limits: Limits | None = None) -> str:
    """Formats a type for `--help`: `int | null`, `cosine | linear`, `int, at least 1`."""
    kinds, optional = split_union(kind)
    if isinstance(limits, OneOf):
        return " | ".join([str(limits)] + ["null"] * optional)
    if limits is not None:
        return f"{type_text(kind)}, {limits}"
    names = [
        " | ".join(map(str, typing.get_args(k)))
        if typing.get_origin(k) is typing.Literal
        else (str(k) if typing.get_args(k) else k.__name__)
        for k in kinds
    ]
    return " | ".join(names + ["null"] * optional)


def _default(field: dataclasses.Field) -> str:
    if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
        return REQUIRED
    value = field.default if field.default is not dataclasses.MISSING else field.default_factory()
    if dataclasses.is_dataclass(value):
        heads = filter(is_choice, type(value).__mro__)
        names = [head.get_choice_name(type(value)) for head in heads]
        return (names or [type(value).__name__])[0]
    return as_yaml(value)


def as_yaml(value: typing.Any) -> str:
    """Formats a default as YAML."""
    words = {None: "null", True: "true", False: "false"}
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(as_yaml, value))}]"
    if isinstance(value, str) and "\n" in value:
        return json.dumps(value)  # in double quotes, as YAML writes it, too
    return words[value] if value is None or isinstance(value, bool) else str(value) or "''"


def comments(cls: type) -> dict[str, str]:
    """Returns the comment beside or above each field in the source, also of base classes."""
    result = {}
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
                    result[node.target.id] = " ".join(notes[row] for row in rows)
    return result
