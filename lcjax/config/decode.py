"""Reads YAML configs and decodes them into dataclasses.

Error messages name the key, its value, and valid alternatives. draccus decodes single values and
holds the registries of choices (`type: yarn`). Sections are decoded here, because draccus's errors
suggest no other key or choice, and do not name the section whose dataclass refused its values.
"""

import dataclasses
import math
import os
import re
import typing
from pathlib import Path

import draccus
import yaml
from draccus.parsers.yaml_loader import SafeLoaderWithInclusion
from draccus.utils import DraccusException

from lcjax.config.help import as_yaml, is_choice, split_union, type_text
from lcjax.errors import InputError, one_line, suggestion
from lcjax.storage import URLPath, is_url, to_path

_MAX_FILES = 16  # largest number of files that an error lists
_RECIPE = "lcjax:"  # prefix of the names of the library's recipes


def recipes() -> dict[str, Path]:
    """Returns the files of recipes and parts of recipes by name, such as `model/smollm2_135m`."""
    folder = _folder()
    files = sorted(folder.rglob("*.yaml"))
    return {file.relative_to(folder).with_suffix("").as_posix(): file for file in files}


def _folder() -> Path:
    package = Path(__file__).resolve().parents[1]
    if (package / "configs").is_dir():
        return package / "configs"
    return package.parent / "configs"  # in a clone; a wheel has them in the package


def to_data_path(name: str) -> Path:
    """Returns the path of a name; `lcjax:NAME` is a small file beside the library's recipes."""
    return _folder() / name.removeprefix(_RECIPE) if name.startswith(_RECIPE) else to_path(name)


def recipe_of(path: str) -> str | None:
    """Returns the recipe whose run writes the model at `path`, such as `runs/quickstart/model`."""
    folder = re.escape(path.removesuffix("/model"))
    for name, file in recipes().items():
        text = file.read_text(encoding="utf-8")
        if re.search(rf"^run: \{{folder: {folder}\}}", text, re.MULTILINE):
            return name
    return None


def _locate(name: str, parent: Path | None = None) -> Path:
    """Returns the file of `lcjax:NAME`, or of a path relative to `parent`, which includes it."""
    if not name.startswith(_RECIPE):
        if is_url(name) or isinstance(parent, URLPath):
            return to_path(name) if parent is None or is_url(name) else parent.parent / name
        return Path(name) if parent is None else Path(os.path.normpath(parent.parent / name))
    known, recipe = recipes(), name.removeprefix(_RECIPE)
    if recipe not in known:
        where = "" if parent is None else f" (included from {parent})"
        raise InputError(f"{name}{where} is no recipe of lcjax; {suggestion(recipe, known)}")
    return known[recipe]


def _refuse_duplicates(
    name: str, pairs: list[tuple[yaml.Node, yaml.Node]], sections_only: bool
) -> None:
    seen = set()
    for key, value in pairs:
        if not isinstance(key, yaml.ScalarNode):
            raise InputError(f"{name}: a key is a list or a section; keys must be single words")
        if key.value in seen and (not sections_only or isinstance(value, yaml.MappingNode)):
            raise InputError(
                f"{name}: duplicate key `{key.value}` (here or through `<<:`); one value would "
                f"replace the other; merge inside: `{key.value}: {{<<: !include ..., key: value}}`"
            )
        seen.add(key.value)


class _Loader(SafeLoaderWithInclusion):
    def compose_mapping_node(self, anchor):
        node = super().compose_mapping_node(anchor)
        pairs = [pair for pair in node.value if pair[0].tag != "tag:yaml.org,2002:merge"]
        _refuse_duplicates(self.stream.name, pairs, sections_only=False)
        return node

    def flatten_mapping(self, node):
        # `<<:` may supply defaults of single values, but it merges one level only: if a base sets
        # `train.steps` and the file that includes it `train.lr`, the steps would be lost silently.
        super().flatten_mapping(node)
        _refuse_duplicates(self.stream.name, node.value, sections_only=True)

    def include(self, node):
        file = _locate(self.construct_scalar(node), to_path(self.stream.name))
        with file.open(encoding="utf-8") as stream:
            return yaml.load(stream, _Loader)


_Loader.add_constructor("!include", _Loader.include)


def read_yaml(name: str | os.PathLike) -> dict:
    """Reads a YAML file as nested dicts and lists.

    Args:
      name: a path or URL, or `lcjax:NAME` for a recipe of the library. `!include` accepts the same
        names, with paths relative to the file that contains it.

    Raises:
      InputError: the file or an included one is missing, or is not YAML with a mapping at the top.
    """
    path = _locate(str(name))
    try:
        with path.open(encoding="utf-8") as stream:
            raw = yaml.load(stream, _Loader)
    except FileNotFoundError as error:
        missing = to_path(error.filename)
        where = "" if missing == path else f" (included from {path})"
        recipe = missing.with_suffix("").as_posix().removeprefix("configs/")
        if recipe in recipes():  # the documentation's path, which a clone has
            guess = f"the recipe of lcjax is {_RECIPE}{recipe}"
        else:
            names = [file.name for file in missing.parent.glob("*.yaml")]
            guess = suggestion(missing.name, names, ".yaml")
        raise InputError(f"{missing}{where} does not exist; {guess}") from None
    except IsADirectoryError as error:
        folder = to_path(error.filename)
        where = "" if folder == path else f" (included from {path})"
        files = sorted(file.name for file in folder.glob("*.yaml"))
        ellipsis = ", ..." if len(files) > _MAX_FILES else ""
        names = f"it has {', '.join(files[:_MAX_FILES])}{ellipsis}" if files else "it has no .yaml"
        raise InputError(f"{folder}{where} is a folder; give a file: {names}") from None
    except RecursionError:
        raise InputError(
            f"{path} includes itself, or is nested too deeply; take one `!include` or level out"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as YAML: {one_line(error)}") from None
    if not isinstance(raw or {}, dict):
        raise InputError(f"{path} must hold `key: value` lines, not one {type(raw).__name__}")
    return raw or {}


class Text(str):
    """A value from the command line, which is decoded as YAML unless its field is a string."""


def _build(kind: typing.Any, raw: typing.Any, name: str, example: str = "") -> typing.Any:
    """Decodes `raw` as the type `kind`; errors begin with its key `name` and end in `example`."""
    kinds, optional = split_union(kind)
    origin, items = typing.get_origin(kinds[0]), typing.get_args(kinds[0])
    sequence = origin in (tuple, list)
    if isinstance(raw, Text) and (str not in kinds or (optional and raw == "null")):
        bare = sequence and raw != "null" and not raw.startswith(("[", "{"))
        try:
            raw = yaml.safe_load(f"[{raw}]" if bare else raw)
        except (yaml.YAMLError, ValueError):  # ValueError: too many digits for Python
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
    required = suggestion(raw, map(str, known)) if known else type_text(kind) + example
    # draccus would decode true as 1, and a mapping or a list as its text for a string field.
    wrong = raw is None or isinstance(raw, dict) or (isinstance(raw, bool) and bool not in kinds)
    wrong |= isinstance(raw, list) and not {typing.get_origin(k) for k in kinds} & {list, tuple}
    try:
        if not wrong:
            value = draccus.decode(kind, str(raw) if isinstance(raw, Text) else raw)
            if not isinstance(value, float) or math.isfinite(value):
                return value
            required = "a finite number" + example
    except (DraccusException, ValueError, TypeError):
        pass
    raise InputError(f"{name}={raw!r:.60} is not valid; needs: {required}")


def section(cls: typing.Any, raw: typing.Any, name: str) -> typing.Any:
    """Decodes the section `raw` as the dataclass `cls`, or as an entry of its registry.

    Args:
      cls: a dataclass or the base class of a registry.
      raw: the section as a dictionary.
      name: key of the section; empty for the whole config.

    Raises:
      InputError: if a key is unknown or missing, a value cannot be decoded, or a dataclass refuses
        its values.
    """
    if not isinstance(raw, dict):
        raise InputError(f"{name}={raw!r} must be a section of `key: value` lines")
    raw, dot = dict(raw), name + "." if name else ""
    label, known = cls.__name__, {}
    if is_choice(cls):
        known = cls.get_known_choices()
        label = raw.pop("type", cls.default_choice_name())
        if label not in known:
            problem = "is missing" if label is None else "is unknown"
            raise InputError(
                f"{dot}type={label!r} {problem}; {suggestion(label, known)}; for one of your own"
                " add --import FILE.py"
            )
        cls = known[label]
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    for key in raw:
        if key not in fields:
            guess = suggestion(key, fields)
            others = "" if guess.startswith("did you mean") else _entries_with(key, known, dot)
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


def check_instance(key: str, value: object, base: type) -> None:
    """Raises an InputError unless `value` is None or an instance of the registry `base`.

    If `value` names a class (`"yarn"`, `{"type": "yarn"}`, `Yarn`), the error shows what to pass
    instead: `lcjax.rope.Yarn(factor=...)`.
    """
    if value is None or isinstance(value, base):
        return
    known = base.get_known_choices()
    kind = value.get("type") if isinstance(value, dict) else value
    matches = [cls for name, cls in known.items() if kind is cls or kind == name]
    way_out = f"pass {constructor(matches[0])}" if matches else suggestion(kind, known)
    raise InputError(f"{key}={value!r:.60} must be an instance of {base.__name__}; {way_out}")


def constructor(cls: type) -> str:
    """Returns the call that makes a registered class, such as `lcjax.rope.Yarn(factor=...)`.

    It has the required fields, and names the public package: `lcjax.rope`, not `lcjax.rope.yarn`.
    """
    package = ".".join(cls.__module__.split(".")[:2])
    required = (
        f"{field.name}=..."
        for field in dataclasses.fields(cls)
        if field.default is field.default_factory is dataclasses.MISSING
    )
    return f"{package}.{cls.__name__}({', '.join(required)})"


def _entries_with(key: str, known: dict[str, type], dot: str) -> str:
    """Returns a hint: the entries of a registry that have a key, and how to choose the first."""
    names = [
        name
        for name, choice in known.items()
        if any(field.init and field.name == key for field in dataclasses.fields(choice))
    ]
    return f", but of {', '.join(names)}: --{dot}type={names[0]}" if names else ""


def _example(field: dataclasses.Field) -> str:
    """Returns the end of an error that shows a field's default as an example; "" without one."""
    is_empty = field.default in (dataclasses.MISSING, None, "", ())
    return "" if is_empty else f", such as {as_yaml(field.default)}"


def _placed(message: str, name: str) -> str:
    """Completes the key in a dataclass's error, such as `rope.factor=0 must ...`, by `name`."""
    parents, _, last = name.rpartition(".")
    if not name or message.startswith(f"{name}."):
        return message
    if message.startswith(f"{last}."):
        return f"{parents}.{message}" if parents else message
    return f"{name}: {message}"
