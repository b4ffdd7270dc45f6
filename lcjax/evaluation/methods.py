"""What a method of a config stands for: a section to open, a tokenizer, a model for a length."""

import dataclasses
from collections.abc import Callable
from typing import Any

import draccus

from lcjax.checkpoints import ByteTokenizer
from lcjax.checkpoints.build import ModelSection
from lcjax.checkpoints.identity import identity
from lcjax.errors import InputError
from lcjax.evaluation.config import EvalConfig, Method
from lcjax.evaluation.split import ContextSplit, Split
from lcjax.models import PRESETS


def sections(config: EvalConfig) -> list[ModelSection]:
    """What is loaded for each method: of another checkpoint, its own position method counts."""
    own = dict.fromkeys(("base", "preset", "rope", "pattern", "memory", "tokenizer"))
    return [
        config.model
        if method.path is None
        else dataclasses.replace(config.model, path=method.path, **own)
        for method in config.methods
    ]


def weights(config: EvalConfig) -> dict[str, str]:
    """What the files hold that each method is loaded from, by the method's name."""
    found: list[str] = []
    opened = sections(config)
    for index, section in enumerate(opened):
        known = opened.index(section)
        found.append(_weights_of(section) if known == index else found[known])
    return {method.name: own for method, own in zip(config.methods, found, strict=True)}


def _weights_of(section: ModelSection) -> str:
    encoder = section.memory and section.memory.encoder
    found = [] if section.path is None else [identity(section.path, section.base)]
    if encoder is not None and encoder not in PRESETS:
        found.append(identity(encoder))
    return "+".join(found) or "random"


def tokenizer_of(section: ModelSection, load: Callable[[str], Any]) -> Any:
    """The tokenizer of a model that is not opened; `load` opens one by path."""
    path = section.tokenizer or section.path
    if path is not None:
        return load(path)
    if section.preset is not None:
        return ByteTokenizer()
    raise InputError("model.path is not set; its tokenizer says how long a prompt is")


def split_of(method: Method, model) -> Split | None:
    """How windows are cut, where not all of a window is the decoder's."""
    memory = getattr(model.config, "memory", None)
    return method.context or method.replug or (None if memory is None else ContextSplit())


def subject_of(model, method: Method, length: int):
    """`model` as `method` has it, for windows of `length` tokens."""
    split = split_of(method, model)
    if split is None:
        return model.with_method(**_changes(method), length=length)
    return split.of(model.with_method(**_changes(method)), length)


def _changes(method: Method) -> dict[str, Any]:
    changes = {"rope": method.rope, "pattern": method.pattern}
    return {key: value for key, value in changes.items() if value is not None}


def described(model, method: Method) -> Any:
    """The config of `model` as `method` has it, with its rope's base and scale, as plain values."""
    changes = _changes(method)
    config = model.with_method(**changes).config if changes else model.config
    return draccus.encode(config) if dataclasses.is_dataclass(config) else None
