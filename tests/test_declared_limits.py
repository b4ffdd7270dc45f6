"""The limits that fields of configs declare (`lcjax.errors.Range` and its siblings) hold."""

import contextlib
import dataclasses
import functools
import importlib
import inspect
import math
import pkgutil
import re
import typing
from types import NoneType

import pytest

import lcjax
from lcjax.checkpoints.build import ModelSection
from lcjax.errors import (
    InputError,
    Interval,
    NonEmpty,
    OneOf,
    Range,
    check_fields,
    declared_limits,
)
from lcjax.models import ModelConfig, preset


@functools.cache
def classes_with_limits():
    """Returns the dataclasses of lcjax whose fields declare limits."""
    modules = []
    for module in pkgutil.walk_packages(lcjax.__path__, "lcjax."):
        if not module.name.endswith(("__main__", "seqio_corpora")):  # they run when imported
            with contextlib.suppress(ModuleNotFoundError):  # of an extra that is not installed
                modules.append(importlib.import_module(module.name))
    classes = {
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__
    }
    found = [cls for cls in classes if dataclasses.is_dataclass(cls) and declared_limits(cls)]
    return sorted(found, key=lambda cls: (cls.__module__, cls.__qualname__))


def own_fields():
    """Returns (class, field, annotation, limits) of all fields with limits, without inherited."""
    rows = []
    for cls in classes_with_limits():
        hints, limits = typing.get_type_hints(cls, include_extras=True), declared_limits(cls)
        for name in inspect.get_annotations(cls):
            if name in limits and "Annotated" in str(hints[name]):
                rows.append((cls, name, hints[name], limits[name]))
    return rows


def inside(limits):
    """Returns the ends of the limits, or values next to an end that is not included."""
    if isinstance(limits, Range):
        return [limits.least, limits.most]
    if isinstance(limits, Interval):
        return [
            limits.least if limits.above == -math.inf else math.nextafter(limits.above, math.inf),
            min(limits.most, math.nextafter(limits.below, -math.inf)),
        ]
    blanks = ["\n"] if getattr(limits, "allows_blanks", False) else []
    return list(limits.known) if isinstance(limits, OneOf) else ["x", " x ", *blanks]


def outside(limits):
    """Returns values next to the ends of the limits, and of other types."""
    others = [None, True, "2", [1], math.nan, math.inf, -math.inf, 10**400]
    if isinstance(limits, Range):
        return [limits.least - 1, limits.most + 1, limits.least + 0.5, *others]
    if isinstance(limits, Interval):
        low = [math.nextafter(limits.least, -math.inf), limits.above]
        high = [math.nextafter(limits.most, math.inf), limits.below]
        return [*low, *high, *others]
    blanks = [] if getattr(limits, "allows_blanks", False) else [" \n"]
    texts = ["nonsense", ""] if isinstance(limits, OneOf) else ["", *blanks]
    return [*texts, None, True, 2.0, ["x"]]


def rule(limits):
    """Returns a pattern of the rule that an error of the limits states."""
    if isinstance(limits, Range):
        return rf"must be a whole number of (at least {limits.least}|at most {limits.most})\b"
    if isinstance(limits, Interval):
        return re.escape(f"must be a number {limits}")
    if isinstance(limits, OneOf):
        return re.escape(f"must be one of {', '.join(limits.known)}")
    return r"(must be of type str|is empty)"


def cases(values):
    """Yields (cls.field, key, annotation, limits, value) of the values of `values(limits)`."""
    for cls, name, hint, limits in own_fields():
        items = getattr(limits, "limits", None)  # of the items of a tuple
        size = 1 if "..." in str(hint) else len(typing.get_args(hint))
        for value in values(items or limits):
            key = r"section\.field\.0" if items else r"section\.field"
            value = (value,) * size if items else value
            yield f"{cls.__qualname__}.{name}", key, hint, items or limits, value


def check_value(hint, value):
    """Applies `check_fields` to a dataclass with one field, `section.field`, of this type."""
    cls = dataclasses.make_dataclass("Config", [("field", hint)])
    check_fields("section", cls(value))


def test_values_just_outside_the_limits_and_of_other_types_are_errors_of_one_line():
    for name, key, hint, limits, value in cases(outside):
        if value is None and NoneType in typing.get_args(hint):
            check_value(hint, None)
            continue
        print(f"{name}={value!r:.60}")  # pytest shows it after a failure
        with pytest.raises(InputError) as error:
            check_value(hint, value)
        text = str(error.value)
        assert "\n" not in text and len(text) < 600
        if not re.match(r"section\.field=.* must be of type (tuple|str)", text):
            assert re.match(rf"{key}\b.*{rule(limits)}", text)
            assert limits.hint in text if hasattr(limits, "hint") else True


def test_values_at_the_ends_of_the_limits_pass():
    for name, _, hint, _, value in cases(inside):
        print(f"{name}={value!r:.60}")
        check_value(hint, value)


# Fields without which a class cannot be made, or that it reads before it checks its limits.
FIELDS = {
    "Batching": {"max_tokens": 8},
    "Experts": {"count": 4},
    "GatedDeltaNet": {"key_heads": 2, "value_heads": 4, "key_dim": 8, "value_dim": 6},
    "Landmarks": {"token": 3},
    "LengthLimit": {"max_tokens": 8, "on_long": "cut", "name": "passages"},
    "Method": {"name": "x"},
    "ModelConfig": {
        field.name: getattr(preset("tiny"), field.name) for field in dataclasses.fields(ModelConfig)
    },
    "PrepareConfig": {"path": "text"},
    "Rate": {"rule": "rope", "factor": 2.0},
    "RunFolder": {"folder": "runs"},
    "ServeConfig": {"model": ModelSection(preset="tiny")},
    "Threshold": {"score": 0.0},
}
COMMANDS = ("EvalConfig", "RetrievalConfig")  # checked by the commands that read them
NOT_MADE = {"KnnLM", "Replug", "RetrievalReader", "Rope"}  # need a model, or are of no type


def calls_the_check(part):
    return part is not None and "check_fields(" in inspect.getsource(part)


def test_classes_with_limits_check_them():
    num_made = 0
    for cls in classes_with_limits():
        bases = [base for base in cls.__mro__ if base.__module__.startswith("lcjax.")]
        assert cls.__name__ in COMMANDS or any(map(calls_the_check, bases)), cls
        makes = [base.__dict__.get("__post_init__") for base in bases]
        if inspect.isabstract(cls) or cls.__name__ in NOT_MADE or cls.__name__[0] == "_":
            continue
        if any(map(calls_the_check, makes)):
            num_made += 1
            fields = FIELDS.get(cls.__name__) or {**(getattr(cls, "examples", None) or [{}])[0]}
            declared = declared_limits(cls)
            fields |= {name: "x" for name in declared if isinstance(declared[name], NonEmpty)}
            for name, limits in declared.items():
                items = getattr(limits, "limits", None)
                value = outside(items or limits)[0]
                print(f"{cls.__name__}.{name}={value!r}")
                with pytest.raises(InputError, match=rf"\b{name}\b"):
                    cls(**fields | {name: (value, value) if items else value})
    assert num_made > 60
