"""Decodes nested dicts into dataclasses; every error names key, value and the way out.

draccus decodes the single values and holds the registries of choices (`type: yarn`). The walk over
sections is done here: draccus would not say what a wrong key or choice should have been, nor in
which section a dataclass refused its values.
"""

import dataclasses
import math
import typing

import draccus
import yaml
from draccus.utils import DraccusException

from lcjax.config.help import as_yaml, is_choice, split_union, type_text
from lcjax.config.read import near
from lcjax.errors import InputError


class Text(str):
    """A value from the command line: YAML, unless its field turns out to hold a string."""


def _build(kind: typing.Any, raw: typing.Any, name: str, example: str = "") -> typing.Any:
    """The value of type `kind` that `raw` describes; its key and an example for the messages."""
    kinds, optional = split_union(kind)
    origin, items = typing.get_origin(kinds[0]), typing.get_args(kinds[0])
    sequence = origin in (tuple, list)
    if isinstance(raw, Text) and (str not in kinds or (optional and raw == "null")):
        bare = sequence and raw != "null" and not raw.startswith(("[", "{"))
        try:
            raw = yaml.safe_load(f"[{raw}]" if bare else raw)
        except yaml.YAMLError:
            raw = str(raw)
    if raw is None and optional:
        return None
    if dataclasses.is_dataclass(kinds[0]) or is_choice(kinds[0]):
        return section(kinds[0], raw, name)
    if sequence:
        if not isinstance(raw, list):
            raise InputError(f"{name}={raw!r} must be a list, as in [{raw}]")
        if origin is tuple and items[-1] is not Ellipsis:
            if len(raw) != len(items):
                raise InputError(
                    f"{name}={raw} is a list of {len(raw)}; needs {len(items)} values{example}"
                )
        else:
            items = items[:1] * len(raw)
        pairs = enumerate(zip(items, raw, strict=True))
        return origin(_build(item, value, f"{name}.{i}") for i, (item, value) in pairs)
    return _leaf(kind, raw, name, example)


def _leaf(kind: typing.Any, raw: typing.Any, name: str, example: str) -> typing.Any:
    kinds, _ = split_union(kind)
    known = [v for k in kinds if typing.get_origin(k) is typing.Literal for v in typing.get_args(k)]
    need = near(raw, map(str, known)) if known else type_text(kind) + example
    # draccus would take true for 1 and print a mapping into a string field.
    wrong = raw is None or isinstance(raw, dict) or (isinstance(raw, bool) and bool not in kinds)
    try:
        if not wrong:
            value = draccus.decode(kind, str(raw) if isinstance(raw, Text) else raw)
            if not isinstance(value, float) or math.isfinite(value):
                return value
            need = "a finite number" + example
    except (DraccusException, ValueError, TypeError):
        pass
    raise InputError(f"{name}={raw!r} is not valid; needs: {need}")


def section(cls: typing.Any, raw: typing.Any, name: str) -> typing.Any:
    if not isinstance(raw, dict):
        raise InputError(f"{name}={raw!r} must be a section of `key: value` lines")
    raw, dot = dict(raw), name + "." if name else ""
    label, known = cls.__name__, {}
    if is_choice(cls):
        known = cls.get_known_choices()
        label = raw.pop("type", cls.default_choice_name())
        if label not in known:
            problem = "is missing" if label is None else "is unknown"
            raise InputError(f"{dot}type={label!r} {problem}; {near(label, known)}")
        cls = known[label]
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    for key in raw:
        if key not in fields:
            guess = near(key, fields)
            others = "" if guess.startswith("did you mean") else _that_have(key, known, dot)
            raise InputError(f"{dot}{key}={raw[key]!r} is no key of {label}{others}; {guess}")
    for key, field in fields.items():
        if key not in raw and field.default is field.default_factory is dataclasses.MISSING:
            raise InputError(f"{dot}{key} is missing; set it in the file or with --{dot}{key}=")
    hints = typing.get_type_hints(cls)
    values = {
        key: _build(hints[key], value, dot + key, _example(fields[key]))
        for key, value in raw.items()
    }
    try:
        return cls(**values)
    except ValueError as error:
        raise InputError(_placed(str(error), name)) from error


def _that_have(key: str, known: dict[str, type], dot: str) -> str:
    """The entries of a registry that have a key which the chosen one lacks, and how to say so."""
    names = [
        name
        for name, choice in known.items()
        if any(field.init and field.name == key for field in dataclasses.fields(choice))
    ]
    return f", but of {', '.join(names)}: --{dot}type={names[0]}" if names else ""


def _example(field: dataclasses.Field) -> str:
    """The default, where it shows what a value looks like."""
    empty = field.default in (dataclasses.MISSING, None, "", ())
    return "" if empty else f", such as {as_yaml(field.default)}"


def _placed(message: str, name: str) -> str:
    """A dataclass's own complaint, `rope.factor=0 must ...`, with the whole key in front."""
    parents, _, last = name.rpartition(".")
    if not name or message.startswith(f"{name}."):
        return message
    if message.startswith(f"{last}."):
        return f"{parents}.{message}" if parents else message
    return f"{name}: {message}"
