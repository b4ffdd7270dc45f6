"""Reads YAML configs and decodes them into dataclasses.

Error messages name the key, its value, and valid alternatives. draccus decodes single values and
holds the registries of choices (`type: yarn`). Sections are decoded here, because draccus's errors
suggest no other key or choice, and do not name the section whose dataclass refused its values.
"""

import dataclasses
import functools
import io
import math
import os
import re
import typing
from pathlib import Path

import draccus
import yaml
from draccus.utils import DraccusException

from lcjax.config.help import as_yaml, is_choice, split_union, type_text
from lcjax.errors import InputError, one_line, suggestion
from lcjax.storage import URLPath, check_regular, is_url, to_path

_MAX_FILES = 16  # largest number of files that an error lists
_RECIPE = "lcjax:"  # prefix of the names of the library's recipes
IMPORT = "import"  # key of a config file: modules and .py files with a user's own methods


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


class _Int(int):
    """An integer and its `text` in a YAML file, which fields of type str take."""


class _Float(float):
    """A number and its `text` in a YAML file, which fields of type str take."""


_TAG = "tag:yaml.org,2002:"
_MERGE = f"{_TAG}merge"
_INCLUDE = "!include"
# Plain scalars that are not text (YAML 1.2, section 10.3.2, core schema), and their first letters.
# PyYAML's own rules are those of YAML 1.1, which reads 1:30 as 90, 010 as 8 and no as false.
_NULL = re.compile(r"null|Null|NULL|~|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
_MAX_VALUES = 1_000_000  # of a file whose aliases are written out


class _Loader(yaml.SafeLoader):
    """Loads one YAML document by the core schema of YAML 1.2, without `!include`."""

    yaml_implicit_resolvers: typing.ClassVar[dict] = {}
    yaml_constructors: typing.ClassVar[dict] = {
        None: yaml.SafeLoader.construct_undefined,
        f"{_TAG}str": yaml.SafeLoader.construct_yaml_str,
        f"{_TAG}seq": yaml.SafeLoader.construct_yaml_seq,
        f"{_TAG}map": yaml.SafeLoader.construct_yaml_map,
    }

    def compose_mapping_node(self, anchor):
        node = super().compose_mapping_node(anchor)
        _check_keys(node, (pair for pair in node.value if pair[0].tag != _MERGE))
        return node

    def flatten_mapping(self, node):
        # `<<:` may supply defaults of single values, but it merges one level only: if a base sets
        # `train.steps` and the file that includes it `train.lr`, the steps would be lost silently.
        super().flatten_mapping(node)
        _check_keys(node, node.value, sections_only=True)

    def get_single_node(self):
        node = super().get_single_node()
        if node is not None:
            _count_values(node, {})
        return node


def _check_keys(
    node: yaml.MappingNode,
    pairs: typing.Iterable[tuple[yaml.Node, yaml.Node]],
    sections_only: bool = False,
) -> None:
    """Raises an InputError if a key is no scalar, or two are equal."""
    seen, name = set(), node.start_mark.name
    for key, value in pairs:
        if not isinstance(key, yaml.ScalarNode):
            raise InputError(f"{name}: a key is a list or a section; keys must be single words")
        if key.value in seen and (not sections_only or isinstance(value, yaml.MappingNode)):
            raise InputError(
                f"{name}: duplicate key `{key.value}` (here or through `<<:`); one value would "
                f"replace the other; merge inside: `{key.value}: {{<<: !include ..., key: value}}`"
            )
        seen.add(key.value)


def _count_values(node: yaml.Node, counts: dict[int, int]) -> int:
    """Returns the number of values below a node in which all aliases are written out.

    A few lines of aliases can stand for 10**9 values, which an error message would print.

    Args:
      node: the node.
      counts: numbers of values by the nodes' ids; -1 inside of the node. Updated in place.
    """
    if id(node) not in counts:
        counts[id(node)] = -1
        children = node.value if isinstance(node, yaml.CollectionNode) else []
        if isinstance(node, yaml.MappingNode):
            children = [child for pair in children for child in pair]
        counts[id(node)] = 1 + sum(_count_values(child, counts) for child in children)
    count = counts[id(node)]
    if not 0 < count <= _MAX_VALUES:
        problem = "contains itself" if count < 0 else f"stands for more than {_MAX_VALUES:,} values"
        mark = node.start_mark
        raise InputError(f"{mark.name}: the value in line {mark.line + 1} {problem}; use no alias")
    return count


def _construct_number(loader: _Loader, node: yaml.ScalarNode) -> _Int | _Float:
    text = loader.construct_scalar(node)
    try:
        if _INT.fullmatch(text) and not node.tag.endswith("float"):
            number = _Int(text, {"0x": 16, "0o": 8}.get(text[:2], 10))
        elif _FLOAT.fullmatch(text) and not node.tag.endswith("int"):
            number = _Float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        else:
            raise ValueError("it is not written as one")
    except ValueError as error:  # also more digits than Python reads
        place = f"{node.start_mark.name}, line {node.start_mark.line + 1}"
        raise InputError(f"{place}: {text!r:.40} is no number that can be read: {error}") from None
    number.text = text
    return number


def _construct_word(loader: _Loader, node: yaml.ScalarNode) -> bool | None:
    text = loader.construct_scalar(node)
    pattern = _BOOL if node.tag.endswith("bool") else _NULL
    if not pattern.fullmatch(text):
        place = f"{node.start_mark.name}, line {node.start_mark.line + 1}"
        words = "true or false" if pattern is _BOOL else "null"
        raise InputError(f"{place}: {text!r:.40} must be {words}")
    return text.lower() == "true" if pattern is _BOOL else None


for _name, _pattern, _first, _construct in (
    ("null", _NULL, ["~", "n", "N", ""], _construct_word),
    ("bool", _BOOL, list("tTfF"), _construct_word),
    ("int", _INT, list("-+0123456789"), _construct_number),
    ("float", _FLOAT, list("-+0123456789."), _construct_number),
):
    # PyYAML calls `match`, which accepts a prefix.
    _whole = re.compile(rf"(?:{_pattern.pattern})\Z")
    _Loader.add_implicit_resolver(f"{_TAG}{_name}", _whole, _first)
    _Loader.add_constructor(f"{_TAG}{_name}", _construct)
_Loader.add_implicit_resolver(_MERGE, re.compile(r"<<\Z"), ["<"])


class _FileLoader(_Loader):
    """Loads a file with the files that it includes.

    Attributes:
      code: the modules that the key `import` of these files names; an included file's come first.
    """

    def __init__(self, stream: typing.IO, path: Path, code: list[str]):
        super().__init__(stream)
        self.name, self._path, self.code = str(path), path, code

    def compose_document(self):
        node = super().compose_document()
        if isinstance(node, yaml.MappingNode):
            for pair in [pair for pair in node.value if pair[0].value == IMPORT]:
                node.value.remove(pair)
                names = self.construct_object(pair[1], deep=True)
                self.code += [_code_path(name, self._path) for name in _code_names(names)]
        return node

    def compose_scalar_node(self, anchor):
        # Included here, not when values are constructed, so that `<<: !include FILE` is merged too.
        node = super().compose_scalar_node(anchor)
        if node.tag != _INCLUDE:
            return node
        node = _compose(_locate(node.value, self._path), self.code) or yaml.ScalarNode(
            f"{_TAG}null", "", node.start_mark, node.end_mark
        )
        if anchor is not None:
            self.anchors[anchor] = node
        return node


def _code_names(names: typing.Any) -> list[str]:
    names = names.split(",") if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(x, str) and x.strip() for x in names):
        raise InputError(f"{IMPORT}={names!r:.60} must be a list of modules or .py files")
    return [name.strip() for name in names]


def _code_path(name: str, file: Path) -> str:
    """Returns a module's name, or the absolute path of a .py file relative to `file`."""
    if not name.endswith(".py"):
        return name
    if is_url(name) or (isinstance(file, URLPath) and not os.path.isabs(name)):
        raise InputError(f"{file}: {IMPORT}={name} is at a URL; code is run from local files only")
    return os.path.abspath(os.path.join(str(file.parent), os.path.expanduser(name)))


def _compose(path: Path, code: list[str]) -> yaml.Node | None:
    if not str(path).startswith("/dev/fd/"):  # a shell's `--config <(command)`
        check_regular(path)
    with path.open(encoding="utf-8") as stream:
        loader = _FileLoader(stream, path, code)
        try:
            return loader.get_single_node()
        finally:
            loader.dispose()


def parse_text(text: str, name: str) -> typing.Any:
    """Returns the value of a YAML text; errors begin with `name`.

    Raises:
      InputError: `text` is not YAML.
    """
    stream = io.StringIO(text)
    stream.name = name
    try:
        return yaml.load(stream, _Loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise InputError(f"{name}={text!r:.60} is not valid YAML: {one_line(error)}") from None


def read_yaml(name: str | os.PathLike) -> dict:
    """Reads a YAML file as nested dicts and lists.

    Args:
      name: a path or URL, or `lcjax:NAME` for a recipe of the library. `!include` accepts the same
        names, with paths relative to the file that contains it.

    Returns:
      The values. `IMPORT`, if the file or an included one has this key, lists modules and absolute
      paths of .py files; none of them is imported.

    Raises:
      InputError: the file or an included one is missing, or is not YAML with a mapping at the top.
    """
    path = _locate(str(name))
    code: list[str] = []
    try:
        node = _compose(path, code)
        raw = None if node is None else _Loader("").construct_document(node)
    except InputError:
        raise
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
    except (yaml.YAMLError, ValueError) as error:  # ValueError: not UTF-8, or NUL in a path
        raise InputError(f"{path} cannot be read as YAML: {one_line(error)}") from None
    if not isinstance(raw or {}, dict):
        kind = type(raw).__name__.strip("_").lower()
        raise InputError(f"{path} must hold `key: value` lines, not one {kind}")
    return (raw or {}) | ({IMPORT: list(dict.fromkeys(code))} if code else {})


class UnknownTypeError(InputError):
    """The error that a registry has no entry of this name; a user's own is not imported."""


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
            raw = parse_text(f"[{raw}]" if bare else raw, f"--{name}")
        except InputError:
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
    if isinstance(raw, Text):
        raw = str(raw)
    elif str in kinds and not {int, float} & {*kinds}:
        raw = getattr(raw, "text", raw)  # 1.10 stays 1.10
    try:
        if not wrong:
            value = draccus.decode(kind, raw)
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
        raise InputError(
            f"{name}={raw!r:.60} must be a section of `key: value` lines{_form(cls, raw, name)}"
        )
    raw, dot = dict(raw), name + "." if name else ""
    label, known = cls.__name__, {}
    if is_choice(cls):
        known = cls.get_known_choices()
        label = raw.pop("type", cls.default_choice_name())
        if label not in known:
            problem = "is missing" if label is None else "is unknown"
            raise UnknownTypeError(
                f"{dot}type={label!r} {problem}; {suggestion(label, known)}; for one of your own"
                f" add --import FILE.py, or {IMPORT}: [FILE.py] to the config"
            )
        cls = known[label]
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    for key in raw:
        if key not in fields:
            guess = suggestion(key, fields)
            others = "" if guess.startswith("did you mean") else _entries_with(key, known, dot)
            raise InputError(f"{dot}{key}={raw[key]!r} is no key of {label}{others}; {guess}")
    for key in _required(cls):
        if key not in raw:
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


def _form(cls: typing.Any, raw: typing.Any, name: str) -> str:
    """Returns the end of an error about a value in the place of an entry of the registry `cls`."""
    if not is_choice(cls):
        return ""
    known = cls.get_known_choices()
    if not isinstance(raw, str) or raw not in known:
        return f"; write {{type: ...}}; {suggestion(raw, known)}"
    keys = ", ".join([f"type: {raw}", *(f"{key}: ..." for key in _required(known[raw]))])
    return f"; write {{{keys}}}, or --{name}.type={raw}"


@functools.cache
def _choices(owner: type) -> dict[str, type]:
    """Returns the base class of each field of a dataclass whose values are of a registry."""
    try:
        hints = typing.get_type_hints(owner)
    except NameError:  # of a class that only type checkers import
        return {}
    kinds = ((field.name, split_union(hints[field.name])[0]) for field in dataclasses.fields(owner))
    return {name: kind for name, (kind, *_) in kinds if is_choice(kind)}


def check_choices(section: str, owner: object) -> None:
    """Calls `check_instance` for each field of a dataclass whose values are of a registry.

    `section` is the section of the config that the fields belong to, for error messages.
    """
    for name, base in _choices(type(owner)).items():
        check_instance(f"{section}.{name}", getattr(owner, name), base)


def check_instance(key: str, value: object, base: type) -> None:
    """Raises an InputError unless `value` is None or an instance of the registry `base`.

    If `value` names a class (`"yarn"`, `Yarn`), or is a section of a config (`{"type": "yarn",
    "factor": 4}`), the error shows what to pass instead: `lcjax.rope.Yarn(factor=4.0)`.
    """
    if value is None or isinstance(value, base):
        return
    known = base.get_known_choices()
    kind = value.get("type") if isinstance(value, dict) else value
    if isinstance(kind, str):
        kind = known.get(kind, kind)
    matches = [cls for cls in known.values() if kind is cls]
    way_out = f"pass {constructor(matches[0])}" if matches else suggestion(kind, known)
    if matches and isinstance(value, dict) and value.keys() >= set(_required(matches[0])):
        way_out = f"pass {constructor_call(section(base, value, key))}"
    raise InputError(f"{key}={value!r:.60} must be an instance of {base.__name__}; {way_out}")


def constructor(cls: type) -> str:
    """Returns the call that makes a registered class, such as `lcjax.rope.Yarn(factor=...)`.

    It has the required fields, and names the public package: `lcjax.rope`, not `lcjax.rope.yarn`.
    """
    required = ", ".join(f"{name}=..." for name in _required(cls))
    return f"{_public_name(cls)}({required})"


def _public_name(cls: type) -> str:
    """Returns the name of a class in the package that users import it from."""
    package = ".".join(cls.__module__.split(".")[:2])
    return f"{package}.{cls.__name__}"


def _required(cls: type) -> list[str]:
    """Returns the names of the fields of a dataclass that have no default."""
    return [
        field.name
        for field in dataclasses.fields(cls)
        if field.default is field.default_factory is dataclasses.MISSING
    ]


def constructor_call(value: object) -> str:
    """Returns the call that makes an instance, with the fields that are not at their defaults."""
    if isinstance(value, tuple):
        return f"({', '.join(map(constructor_call, value))}{',' * (len(value) == 1)})"
    if not dataclasses.is_dataclass(value):
        return repr(value)
    fields = (
        f"{field.name}={constructor_call(getattr(value, field.name))}"
        for field in dataclasses.fields(value)
        if field.init and getattr(value, field.name) != field.default
    )
    return f"{_public_name(type(value))}({', '.join(fields)})"


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
    if not name or message.startswith((f"{name}.", f"{name} ")):
        return message
    # The key of a config in an error about an argument: `model.cache.type=...` of `cache`
    if f".{name}." in f".{message.partition('=')[0]}.":
        return message
    if message.startswith(f"{last}."):
        return f"{parents}.{message}" if parents else message
    return f"{name}: {message}"
