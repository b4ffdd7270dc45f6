"""`InputError`, which scripts print as one line with exit code 2, and checks that raise it.

`OutOfMemoryError` is one line with exit code 1.
"""

import contextlib
import dataclasses
import difflib
import functools
import importlib
import importlib.metadata
import inspect
import math
import numbers
import os
import re
import shlex
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, ParamSpec, TypeVar

_CLOSE = 0.65  # difflib's ratio: `trian` suggests `train`, `nope` does not suggest `longrope_7b`
_MAX_ITEMS = 100  # of a list whose types `check_arguments` compares
_MAX_NAMES = 16  # most known names that an error lists; if there are more, only similar ones

P, T = ParamSpec("P"), TypeVar("T")

INT32_MAX = 2**31 - 1  # counts, lengths and steps are int32 on devices


class InputError(ValueError):
    """An error that the user can correct, such as a wrong key, file or length.

    The message is one line that names the key, the value, the rule and a way to correct it.
    """

    def __init__(self, message: str):
        # A path may have line breaks, and NumPy shows a matrix in several lines.
        super().__init__(" ".join(map(str.strip, message.splitlines())))


class OutOfMemoryError(RuntimeError):
    """A device has too little memory; the one-line message says what to change, in order."""


def one_line(error: BaseException) -> str:
    """Returns the message of an error without line breaks; the error's type if it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def is_finite_number(value: object) -> bool:
    """Whether `value` is a real number within float64's range: not True, "2", nan or 10**400."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def check_integer(
    key: str, value: object, least: int, way_out: str = "", *, most: int = INT32_MAX
) -> None:
    """Raises an InputError unless `value` is a whole number in least ... most; a bool is not."""
    is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if is_whole and least <= value <= most:
        return
    rule = f"at least {least}" if not is_whole or value < least else f"at most {most}"
    way_out = f"; {way_out}" if way_out else ""
    raise InputError(f"{key}={_shown(value)} must be a whole number of {rule}{way_out}")


def check_flags(**values: object) -> None:
    """Raises an InputError that names the argument unless all `values` are True or False."""
    for name, value in values.items():
        if not isinstance(value, bool) and type(value).__name__ != "bool":  # that of NumPy
            raise InputError(f"{name}={value!r:.60} must be True or False")


def check_type(name: str, value: object, *types: type) -> None:
    """Raises an InputError unless an argument is an instance of one of the `types`."""
    if not isinstance(value, types):
        known = " or ".join(kind.__name__ for kind in types)
        raise InputError(f"{name} is of type {type(value).__name__}, must be {known}")


@dataclasses.dataclass(frozen=True)
class Range:
    """The whole numbers that a field may have: `repeat: Annotated[int, Range(1, 8)]`.

    `hint` ends the error about another value: an example, or what to do instead.
    """

    least: int
    most: int = INT32_MAX
    hint: str = ""

    def __str__(self) -> str:
        ends = "" if self.most == INT32_MAX else f" and at most {self.most}"
        return f"at least {self.least}{ends}"

    def __contains__(self, value: object) -> bool:
        is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        return is_whole and self.least <= value <= self.most

    def check(self, key: str, value: object, way_out: str = "") -> None:
        """Raises an InputError unless `value` is in the range."""
        check_integer(key, value, self.least, self.hint or way_out, most=self.most)


@dataclasses.dataclass(frozen=True)
class Interval:
    """The finite numbers that a field may have: `rate: Annotated[float, Interval(most=1)]`.

    The ends `least` and `most` belong to the interval, `above` and `below` do not. `hint` is as in
    `Range`.
    """

    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    below: float = math.inf
    hint: str = ""

    def __str__(self) -> str:
        low = f"{self.above:g} < x" if math.isfinite(self.above) else f"{self.least:g} <= x"
        if math.isfinite(self.below):
            return f"{low} < {self.below:g}"
        if math.isfinite(self.most):
            return f"{low} <= {self.most:g}"
        return f"x > {self.above:g}" if math.isfinite(self.above) else f"x >= {self.least:g}"

    def __contains__(self, value: object) -> bool:
        return is_finite_number(value) and (
            self.least <= value <= self.most and self.above < value < self.below
        )

    def check(self, key: str, value: object, way_out: str = "") -> None:
        """Raises an InputError unless `value` is a finite number in the interval."""
        if value not in self:
            hint = self.hint or way_out
            raise InputError(
                f"{key}={_shown(value):.60} must be a number {self}{hint and f'; {hint}'}"
            )


@dataclasses.dataclass(frozen=True)
class OneOf:
    """The texts that a field may have: `pack: Annotated[str, OneOf(PACKINGS)]`."""

    known: Collection[str]

    def __str__(self) -> str:
        return " | ".join(self.known)

    def __contains__(self, value: object) -> bool:
        return isinstance(value, str) and value in self.known

    def check(self, key: str, value: object, way_out: str = "") -> None:
        """Raises an InputError unless `value` is one of the texts."""
        check_one_of(key, value, self.known)


@dataclasses.dataclass(frozen=True)
class NonEmpty:
    """A text that may not be empty: `out: Annotated[str, NonEmpty("give --out=")]`."""

    hint: str = ""
    allows_blanks: bool = False  # whether spaces and line breaks alone are a text

    def __str__(self) -> str:
        return "not empty"

    def __contains__(self, value: object) -> bool:
        return _is_of(value, str) and bool(self._text(value))

    def _text(self, value: object) -> str:
        return str(value) if self.allows_blanks else str(value).strip()

    def check(self, key: str, value: object, way_out: str = "") -> None:
        """Raises an InputError if `value` is no text or path, or is empty."""
        _check_annotated(key, value, str)
        if not self._text(value):
            raise InputError(f"{key} is empty{self.hint and f': {self.hint}'}")


@dataclasses.dataclass(frozen=True)
class _Each:
    """The limits of every item of a tuple: `ratios: tuple[PositiveInt, ...]`."""

    limits: Range | Interval | OneOf | NonEmpty
    size: int | None  # number of items; None: any

    def __str__(self) -> str:
        return f"each {self.limits}"

    def __contains__(self, value: object) -> bool:
        is_sized = isinstance(value, tuple | list) and self.size in (None, len(value))
        return is_sized and all(item in self.limits for item in value)

    def check(self, key: str, value: Iterable, way_out: str = "") -> None:
        """Raises an InputError that names the first item outside the limits."""
        for i, item in enumerate(value):
            self.limits.check(f"{key}.{i}", item, way_out)


Limits = Range | Interval | OneOf | NonEmpty | _Each

PositiveInt = Annotated[int, Range(1)]
NonNegativeInt = Annotated[int, Range(0)]
Seed = Annotated[int, Range(0, 2**32 - 1, hint="seeds have 32 bits")]  # of NumPy and JAX
PositiveFloat = Annotated[float, Interval(above=0)]
NonNegativeFloat = Annotated[float, Interval(least=0)]
Fraction = Annotated[float, Interval(least=0, most=1)]


@functools.cache
def declared_limits(owner: type) -> dict[str, Limits]:
    """Returns the limits of a dataclass's fields by name.

    A class that declares a field again, with another default, keeps the limits of its base class
    unless it declares others.
    """
    limits: dict[str, Limits] = {}
    for cls in reversed(owner.__mro__):
        try:
            hints = typing.get_type_hints(cls, include_extras=True)
        except NameError:  # of a class that only type checkers import
            continue
        own = {name: _limits(hints[name]) for name in inspect.get_annotations(cls)}
        limits |= {name: found for name, found in own.items() if found is not None}
    return limits


def _limits(kind: Any) -> Limits | None:
    """Returns the limits in an annotation, with or without `| None`, or of a tuple's items."""
    parts, origin = typing.get_args(kind), typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        return next(filter(None, map(_limits, parts)), None)
    if origin in (tuple, list):
        found = _limits(parts[0]) if parts else None
        return found and _Each(found, None if origin is list or ... in parts else len(parts))
    return next((part for part in parts[1:] if isinstance(part, Limits)), None)


def check_fields(section: str, owner: object) -> None:
    """Raises an InputError for a field of a dataclass that is not as its annotation declares.

    A value must be of the declared type and within the declared limits (`Range`, `Interval`,
    `OneOf`, `NonEmpty`). Values of a config have been decoded to these types; a Python program may
    pass any. Whole numbers without limits are not checked.

    Args:
      section: the fields' section of the config, for error messages; empty: the top level.
      owner: the dataclass instance.
    """
    for name, kind, limits, optional in _declared_fields(type(owner)):
        value = getattr(owner, name)
        is_valid = type(value) is kind if limits is None else value in limits
        if is_valid or (value is None and optional):
            continue
        key = f"{section}.{name}" if section else name
        if limits is None or isinstance(limits, _Each):
            _check_annotated(key, value, kind)
        if limits is not None:
            limits.check(key, value, "null leaves it open" if optional else "")


@functools.cache
def _declared_fields(owner: type) -> list[tuple[str, Any, Limits | None, bool]]:
    """Returns name, type, limits, and whether None is allowed, of the fields to check."""
    fields = []
    for field in dataclasses.fields(owner):
        kind = _annotations(owner).get(field.name, Any)
        parts, limits = typing.get_args(kind), declared_limits(owner).get(field.name)
        if limits is not None or int not in (kind, *parts):
            fields.append((field.name, kind, limits, types.NoneType in parts))
    return fields


def check_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """Decorates a public function: an argument of another type than annotated is an InputError.

    Anything with a shape passes for an array, any iterable but a string for a sequence, and for a
    class any object that is not of a built-in type and no array.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        values, annotations = signature.bind(*args, **kwargs).arguments, _annotations(function)
        for name, value in values.items():
            if "VAR_" not in signature.parameters[name].kind.name:
                _check_annotated(name, value, annotations.get(name, Any))
        return function(*args, **kwargs)

    return checked


def _check_annotated(key: str, value: object, kind: Any) -> None:
    if not _is_of(value, kind):
        text = kind.__name__ if isinstance(kind, type) else str(kind)
        raise InputError(f"{key}={_shown(value):.60} must be of type {text}")


@functools.cache
def _annotations(owner: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(owner)
    except NameError:  # of a class that only type checkers import
        return getattr(owner, "__annotations__", {})


def _is_of(value: object, kind: Any) -> bool:
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return any(_is_of(value, part) for part in parts)
    if kind in (float, int):
        return isinstance(value, numbers.Real if kind is float else numbers.Integral)
    if kind in (str, Path, os.PathLike):  # a URL has the methods of a path
        return isinstance(value, str | os.PathLike) or hasattr(value, "joinpath")
    kind = origin if isinstance(origin, type) else kind
    if kind is Any or not isinstance(kind, type) or kind.__module__.startswith("jaxtyping"):
        return True
    if kind.__module__.startswith(("numpy", "jax")):
        return hasattr(value, "shape") or isinstance(value, list | tuple | numbers.Number)
    if kind in (Sequence, Iterable, Collection, list, tuple):
        if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__iter__"):
            return False
        if kind is tuple and parts and parts[-1] is not ... and hasattr(value, "__len__"):
            return len(value) == len(parts) and all(map(_is_of, value, parts))
        items = value[:_MAX_ITEMS] if isinstance(value, list | tuple) and len(parts) < 3 else ()
        return all(_is_of(item, part) for item in items for part in parts[:1])
    if type(value).__module__.partition(".")[0] not in ("builtins", "numpy", "jax", "jaxlib"):
        # Another class may have the same methods.
        return kind.__module__ != "builtins" or isinstance(value, kind)
    return callable(value) if getattr(kind, "_is_protocol", False) else isinstance(value, kind)


def check_seed(key: str, value: object) -> None:
    """Raises an InputError unless `value` is a valid seed of NumPy and JAX: 0 ... 2**32 - 1."""
    check_integer(key, value, 0, "seeds have 32 bits", most=2**32 - 1)


def _shown(value: object) -> str:
    """Returns `repr(value)`; shortens integers, as Python prints no more than 4,300 digits."""
    if isinstance(value, numbers.Integral) and abs(value) >= 10**40:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)


def check_one_of(key: str, value: object, known: Collection) -> None:
    """Raises an InputError that lists the `known` texts unless `value` is one of them."""
    if not isinstance(value, str) or value not in known:
        raise InputError(f"{key}={value!r} must be one of {', '.join(known)}")


def missing_extra(what: str, package: str, extra: str, error: ImportError) -> InputError:
    """Returns the error that `what` needs `package`, which lcjax's extra `extra` installs."""
    return InputError(f"{what} needs {package}: {install_command(extra)} ({error})")


def install_command(extra: str) -> str:
    """Returns the command that installs the packages of an extra; lcjax itself is on no index."""
    ending = re.compile(rf"extra == ['\"]{re.escape(extra)}['\"]")
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        required = importlib.metadata.requires("lcjax") or []
        packages = {line.partition(";")[0].strip() for line in required if ending.search(line)}
        if packages:
            return shlex.join(["pip", "install", *sorted(packages)])
    return f"pip install -e '.[{extra}]'"  # a clone whose metadata lacks this extra


def import_package(package: str, what: str, extra: str = "") -> ModuleType:
    """Imports a package that only `what` needs.

    Args:
      package: name of the package, or of one of its modules.
      what: the file or command that needs it, for the error.
      extra: the extra of lcjax that installs the package; empty: none does.

    Raises:
      InputError: it cannot be imported.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        if extra:
            raise missing_extra(what, package, extra, error) from None
        install = f"pip install {package.partition('.')[0]}"
        raise InputError(f"{what} needs {package}: {install} ({error})") from None


def suggestion(word: object, known: Iterable[str], ending: str = "") -> str:
    """Returns the end of an error about a name: `did you mean factor? known: beta_fast, factor`.

    Args:
      word: the unknown name.
      known: all names.
      ending: a suffix that all names share; the similarity ignores it.
    """
    known, word = sorted(known), str(word)[:200]  # the time of `difflib` is quadratic
    names = {name.removesuffix(ending): name for name in known}
    close = difflib.get_close_matches(word.removesuffix(ending), names, n=4, cutoff=_CLOSE)
    if close and len(known) > _MAX_NAMES:
        first, *rest = (names[name] for name in close)
        others = f"or {', '.join(rest)}; " if rest else ""
        return f"did you mean {first}? {others}{len(known)} are known"
    guess = f"did you mean {names[close[0]]}? " if close else ""
    return f"{guess}known: {', '.join(known) or 'none'}"
