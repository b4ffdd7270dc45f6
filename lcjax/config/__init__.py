"""Parses a YAML file and `--a.b=value` overrides into frozen dataclasses.

`parse` reads a config, `dump` writes one that `parse` reads back, and `main` runs a script with
one. Wrong input raises an InputError with a message of one line. A method is a choice type: the
file sets `model.rope.type=yarn`, and `--model.rope.type=linear` overrides it.
"""

import contextlib
import dataclasses
import errno
import importlib.util
import itertools
import os
import re
import sys
import traceback
import typing
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import draccus
import yaml

from lcjax.config.decode import (
    IMPORT,
    Text,
    UnknownTypeError,
    check_choices,
    check_instance,
    constructor,
    parse_text,
    read_yaml,
    recipe_of,
    recipes,
    section,
    to_data_path,
)
from lcjax.config.help import help_text, is_choice, is_output_closed, print_help
from lcjax.errors import (
    InputError,
    NonEmpty,
    OutOfMemoryError,
    check_fields,
    check_flags,
    check_type,
    one_line,
    suggestion,
)
from lcjax.files import check_path, write_whole
from lcjax.storage import to_path

__all__ = [
    "ERROR", "ErrorReport", "RunFolder", "UnknownTypeError", "check_choices", "check_instance",
    "constructor", "dump", "import_modules", "main", "parse", "read_yaml", "recipe_of", "recipes",
    "split_options", "to_data_path",
]  # fmt: skip

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
ERROR = "error.txt"  # file of a run folder: the traceback of an I/O or device error
T = typing.TypeVar("T")


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """The folder of the results, the treatment of a run that it holds, and checks at the start."""

    folder: typing.Annotated[str, NonEmpty("name one, such as runs/first")]
    # What happens to a run in folder; overwrite removes the files of that run and no others.
    existing: typing.Literal["resume", "overwrite", "refuse"] = "resume"
    ignore_memory: bool = False  # go on where the estimated memory is more than there is

    def __post_init__(self):
        check_fields("run", self)
        check_path("run.folder", self.folder)


def split_options(
    words: Sequence[str], names: Sequence[str], flags: Sequence[str] = ()
) -> tuple[list[str], dict[str, str | None], list[str]]:
    """Splits the words of a command line into positional words, options and config keys.

    A value is the word after its option, or follows `=`.

    Args:
      words: the words after the command.
      names: options with a value, without dashes. All options in neither `names` nor `flags` are
        keys of the config.
      flags: options without a value, without dashes.

    Returns:
      The positional words, the values of `names` and `flags` (None if absent; "" for a flag), and
      the config keys as `--key=value`.

    Raises:
      InputError: an option has no value.
    """
    positional, rest = [], []
    options: dict[str, str | None] = dict.fromkeys((*names, *flags))
    remaining = iter(words)
    for word in remaining:
        key, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--"):
            positional.append(word)
            continue
        if key not in flags and not equals:
            value = next(remaining, "--")
            if value.startswith("--"):
                raise InputError(f"{word} has no value; write {word}=value")
        if key in options:
            options[key] = value
        else:
            rest.append(f"--{key}={value}")
    return positional, options, rest


def import_modules(words: Sequence[str]) -> list[str]:
    """Imports the modules of `--import NAME`, which register a user's methods, memories or tasks.

    Args:
      words: words of a command line. NAME is a module or a `.py` file, or several of them,
        separated by commas.

    Returns:
      The words without `--import NAME`.

    Raises:
      InputError: a module cannot be imported.
    """
    if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
        raise InputError(f"argv={words!r:.60} must be a list of words")
    rest, words = [], list(words)
    while words:
        key, equals, value = words.pop(0).partition("=")
        if key != "--import":
            rest.append(f"{key}{equals}{value}")
            continue
        value = value if equals or not words else words.pop(0)
        for name in value.split(","):
            _import(name)
    return rest


def _import(name: str) -> None:
    """Imports a module, or runs a .py file as the module of its name."""
    try:
        if name.endswith(".py"):
            _import_file(Path(name).expanduser())
        else:
            importlib.import_module(name)
    except (Exception, SystemExit) as error:  # the code of a user may raise anything
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if Path(frame.filename).name == Path(name).name]
        place = f"line {lines[-1]}: " if lines else ""
        kind = "" if isinstance(error, ImportError | OSError) else f"{type(error).__name__}: "
        raise InputError(
            f"--import={name} cannot be imported ({place}{kind}{one_line(error)}); give a module"
            " or a .py file"
        ) from error


def _import_file(path: Path) -> None:
    path, name = path.absolute(), path.stem
    if name in sys.modules:
        file = getattr(sys.modules[name], "__file__", None)
        if file is None or os.path.realpath(file) != os.path.realpath(path):
            raise ImportError(f"another module {name} is loaded already; rename the file")
        return
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module here
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def parse(
    cls: type[T],
    argv: Sequence[str] | None = None,
    *,
    tree: dict | None = None,
    is_stored: bool = False,
) -> T:
    """Parses a command line, `--config file.yaml --a.b=value ...`, into a config.

    The modules and .py files that the key `import` of the file lists are imported first: they
    register methods of the user. `--config lcjax:NAME` reads a recipe of the library (`recipes`).
    `--config lcjax:` prints a list of the recipes, and `--help` one of the keys; both then exit.

    Args:
      cls: dataclass of the config.
      argv: the words after the command; None: those of this process.
      tree: the content of a config file, in place of `--config`; overrides modify it.
      is_stored: whether the file is part of a run folder. It may be a stranger's, so that nothing
        is imported.

    Raises:
      UnknownTypeError: a method of the user is not registered.
      InputError: a key, a value or the config file is not valid.
    """
    check_type("cls", cls, type)
    check_type("tree", tree, dict, type(None))
    check_flags(is_stored=is_stored)
    words = import_modules(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(words):
        print_help(help_text(cls))
        raise SystemExit(0)
    tree, overrides, file = tree or {}, [], None if tree is None else "the table"
    while words:
        key, equals, value = words.pop(0).partition("=")
        if not key.startswith("--"):
            raise InputError(
                f"{key} is not understood; write --config file.yaml --section.key=value"
            )
        if not equals and (not words or words[0].startswith("--")):
            raise InputError(f"{key} has no value; write {key}=value")
        value = value if equals else words.pop(0)
        if key == "--config":
            if value == "lcjax:":
                print_help(_listing())
                raise SystemExit(0)
            if file is not None:
                raise InputError(
                    f"--config={value}: --config={file} came before; give one file, which may"
                    " `!include` others"
                )
            tree, file = read_yaml(value), value
        else:
            _check_section(cls, key, value)
            overrides.append((key[2:], Text(value)))
    # Whole sections are set before their keys, and a type before the fields that belong to it.
    order = sorted(overrides, key=lambda pair: (pair[0].count("."), not pair[0].endswith("type")))
    for key, value in order:
        _override(tree, key, value)
    code = tree.pop(IMPORT, [])
    if not is_stored:
        for name in code:
            _import(name)
    try:
        return section(cls, tree, "")
    except UnknownTypeError as error:
        if not is_stored or not code:
            raise
        problem, names = str(error).partition(";")[0], ",".join(code)
        raise UnknownTypeError(
            f"{file}: {problem}; the code of a run folder is not run unasked: add --import={names}"
            " (or, in Python, import it first)"
        ) from None


def _listing() -> str:
    """Lists the recipes of the library, each with the first line of its comment."""
    names = recipes()
    lines = []
    for name, file in names.items():
        if "/" not in name:
            with file.open(encoding="utf-8") as stream:
                lines.append(f"lcjax:{name}  {stream.readline().strip()}")
    folders = sorted({f"lcjax:{name.split('/')[0]}/" for name in names if "/" in name})
    return "\n".join([*lines, f"Parts of recipes, for !include, are in {', '.join(folders)}."])


def _check_section(cls: type, key: str, value: str) -> None:
    """Raises an InputError if `cls` lacks a key's section; it may be a typo of `--config`."""
    known = [field.name for field in dataclasses.fields(cls)]
    first = key[2:].partition(".")[0]
    if first not in known:
        raise InputError(f"{key}={value} is unknown; {suggestion(first, ['config', *known])}")


def _override(tree: typing.Any, key: str, value: Text) -> None:
    """Sets a key such as `a.0.c` in `tree`; a new `type` removes the fields of the old one."""
    *sections, last = key.split(".")
    for number, (part, following) in enumerate(itertools.pairwise([*sections, last]), 1):
        if isinstance(tree, list):
            if not part.isdigit() or int(part) >= len(tree):
                raise InputError(f"--{key}={value}: the list has {len(tree)} items, counted from 0")
            part = int(part)
            child = tree[part]
        else:
            child = tree.get(part)
        if isinstance(child, Text):
            with contextlib.suppress(InputError):
                child = parse_text(child, f"--{key}")
        if child is None:
            child = [{}] if following == "0" else {}
        if not isinstance(child, dict | list):
            name = ".".join(sections[:number])
            is_name = isinstance(child, str) and child.isidentifier()
            way_out = f"; if {child} is a type, write {{type: {child}}}" if is_name else ""
            raise InputError(
                f"{name}={child!r:.60} must be a section of `key: value` lines, because"
                f" --{key}={value} sets a key of it{way_out}"
            )
        tree[part] = child
        tree = child
    if not isinstance(tree, dict):
        raise InputError(f"--{key}={value}: give the whole list, or one field: --{key}.x=")
    if last == "type" and tree.get("type", value) != value:
        tree.clear()
    tree[last] = value


def dump(config: typing.Any, path: str | os.PathLike) -> None:
    """Writes the resolved config atomically, as YAML from which `parse` reads an equal config.

    The key `import` lists the modules of the user's own methods in it.
    """
    code = list(dict.fromkeys(_own_code(config)))
    text = yaml.safe_dump({IMPORT: code}, allow_unicode=True) if code else ""
    write_whole(path, text + draccus.dump(config, sort_keys=False))


def _own_code(value: typing.Any) -> Iterator[str]:
    """Yields the modules, or their files, of registered classes that are not part of lcjax."""
    if isinstance(value, tuple | list):
        for item in value:
            yield from _own_code(item)
    if not dataclasses.is_dataclass(value):
        return
    module = type(value).__module__
    is_own = module.partition(".")[0] != "lcjax"
    if is_own and any(map(is_choice, type(value).__mro__)):
        file = getattr(sys.modules.get(module), "__file__", None)
        yield module if "." in module or file is None else os.path.abspath(file)
    for field in dataclasses.fields(value):
        yield from _own_code(getattr(value, field.name))


@draccus.encode.register(tuple)
def _encode_tuple(values: tuple, declared: typing.Any = None) -> list:
    """Encodes every entry by its declared type; draccus does so for the first one only."""
    kinds = list(typing.get_args(declared))
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        kinds = kinds[:1] * len(values)
    if len(kinds) != len(values):
        kinds = [None] * len(values)
    return [draccus.encode(value, kind) for value, kind in zip(values, kinds, strict=True)]


def main(cls: type[T], run: Callable[[T], object], argv: Sequence[str] | None = None) -> int:
    """Parses the arguments, runs a script and returns its exit code; see `ErrorReport`."""
    with ErrorReport() as report:
        report.config = parse(cls, argv)
        run(report.config)
    return report.code


_default_format = warnings.formatwarning


def _format_warning(message: Warning | str, category: type[Warning], *place: typing.Any) -> str:
    if category is UserWarning:
        return f"warning: {' '.join(str(message).split())}\n"
    return _default_format(message, category, *place)


class ErrorReport:
    """Prints errors of a script and sets its exit code; a context manager.

    It prints one line for these errors, and raises all others:

    - InputError, and OSError before the config is parsed or for too long a file name: exit code 2;
    - OSError or OutOfMemoryError during a run: exit code 1, and the traceback goes to the run
      folder;
    - KeyboardInterrupt during a run: exit code 130.

    A UserWarning is one line, too, without its place in the source. If nobody reads stdout any more
    (`| head`), it prints nothing: exit code 141, that of SIGPIPE.

    Attributes:
      config: the config of the script, once it is parsed.
      code: the exit code after the block.
    """

    def __init__(self):
        self.config: typing.Any = None
        self.code = 0

    def __enter__(self) -> "ErrorReport":
        warnings.formatwarning = _format_warning
        return self

    def __exit__(self, kind, error: BaseException | None, _) -> bool:
        warnings.formatwarning = _default_format
        if isinstance(error, KeyboardInterrupt) and self.config is not None:
            # The training loop's message names the saved step and how to continue.
            text = one_line(error) if str(error) else "nothing to save"
            self.code = 130
            print("interrupted:", text, file=sys.stderr)
        elif isinstance(error, BrokenPipeError) and is_output_closed():
            self.code = 141
        elif isinstance(error, InputError) or (
            isinstance(error, OSError)
            and (self.config is None or error.errno == errno.ENAMETOOLONG)
        ):  # ENAMETOOLONG: the config names a file with too long a name
            self.code = 2
            print(f"error: {one_line(error)}", file=sys.stderr)
        elif isinstance(error, OutOfMemoryError):
            self.code = 1
            note = self._keep_traceback(error, shows=False)
            print(f"error: {one_line(error)}{note}", file=sys.stderr)
        elif isinstance(error, OSError):
            self.code = 1
            text = one_line(error)
            is_cut = re.fullmatch(r"\d+ requested and \d+ written", text)  # NumPy's has no errno
            if is_cut:
                text = f"{os.strerror(errno.ENOSPC)}: {text}"
            is_full = is_cut or error.errno in _FULL
            note = "; make room, then run the same command again" if is_full else ""
            note += self._keep_traceback(error, shows=not is_full)
            print(f"error: {text}{note}", file=sys.stderr)
        return self.code != 0

    def _keep_traceback(self, error: Exception, *, shows: bool) -> str:
        """Writes the traceback to `<run>/error.txt` and returns a note that names the file.

        If there is no run folder (yet), or the file cannot be written, it prints the traceback, if
        `shows`, and returns an empty note.
        """
        text = "".join(traceback.format_exception(error))
        folder = getattr(getattr(self.config, "run", None), "folder", None)
        with contextlib.suppress(OSError):
            if folder is not None and to_path(folder).is_dir():
                file = to_path(folder) / ERROR
                file.write_text(text, encoding="utf-8")
                return f" (where it happened: {file})"
        sys.stderr.write(text * shows)
        return ""
