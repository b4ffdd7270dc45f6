"""Position methods in Hugging Face configs, both ways and in both of their spellings.

Old configs (`transformers` 4) have `rope_theta` and `rope_scaling`; new ones (5) one dictionary
`rope_parameters`. What transformers has no name for is exported as the nearest thing it can
compute, and in full under `lcjax_rope`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from lcjax.errors import InputError
from lcjax.rope.base import Rope, hf_number

KEY = "lcjax_rope"
_WRITTEN = "exported_as"  # in it: the rope_parameters that were written beside it
# transformers gives these the trained length, when the dictionary has none, from the config
_NEED_TRAINED_LENGTH = ("yarn", "longrope", "su", "llama3")


def from_hf(config: Mapping[str, Any]) -> Rope:
    """The position method of a Hugging Face config (the dictionary of `config.json`).

    Reads `rope_scaling` (with `type` or `rope_type`) and `rope_parameters`; when both are there the
    first wins, as in transformers. `theta` stays None when the config has none: each model family
    has its own default (`Rope.resolve`). `partial_rotary_factor` belongs to the model's config.
    """
    config = dict(config)
    full = config.pop(KEY, None)
    rope = _read(config)
    if full is None:
        return rope
    full = dict(full)
    written = full.pop(_WRITTEN, None)
    if written and rope != _read({**config, "rope_scaling": None, "rope_parameters": written}):
        raise InputError(
            f"{KEY} (type {full.get('type')}) was written beside rope_parameters={written}, which "
            "have changed since; delete the key to use rope_parameters, or restore them"
        )
    return _decode(full)


def write(rope: Rope, head_dim: int | None) -> dict[str, Any]:
    """`Rope.to_hf`: entries for a Hugging Face config such that `from_hf` gives `rope` again."""
    parameters, entries = rope.hf_rope(head_dim)
    parameters = {k: v for k, v in parameters.items() if v is not None}
    scaling = {k: v for k, v in parameters.items() if k != "rope_theta"}
    kind = scaling["rope_type"]
    if kind in ("linear", "dynamic"):
        # transformers before 4.43 takes exactly `type` and `factor`, later versions take that too
        scaling["type"] = scaling.pop("rope_type")
    else:
        scaling["type"] = kind
    entries = {
        "rope_scaling": None if kind == "default" else scaling,
        "rope_parameters": parameters,
        **entries,
    }
    if "rope_theta" in parameters:
        entries["rope_theta"] = parameters["rope_theta"]
    if _read(entries) != rope:
        entries[KEY] = {"type": rope.type, **_encode(rope), _WRITTEN: dict(parameters)}
    return entries


def _read(config: dict) -> Rope:
    """The method that transformers would see."""
    new = config.get("rope_parameters") or {}
    rope = dict(config.get("rope_scaling") or new)
    layers = sorted(k for k, v in rope.items() if isinstance(v, Mapping))
    if layers:
        raise InputError(
            f"rope_parameters has a section for each of {', '.join(layers)}: models whose layers "
            "rotate differently are not supported; use a model with one position method"
        )
    theta = rope.get("rope_theta", config.get("rope_theta", new.get("rope_theta")))
    kind = rope.get("rope_type") or rope.get("type") or "default"
    rope |= {"rope_type": kind, "rope_theta": theta}
    if theta is not None:
        rope["rope_theta"] = hf_number(rope, "rope_theta")
    if kind in _NEED_TRAINED_LENGTH:
        _fill_lengths(rope, config)
    by_name = {name: c for c in Rope.get_known_choices().values() for name in c.hf_types}
    if kind not in by_name:
        raise InputError(
            f"rope_type={kind!r} of the Hugging Face config is not known; "
            f"known: {', '.join(sorted(by_name))}"
        )
    return by_name[kind].from_hf_rope(rope, config)


def _fill_lengths(rope: dict, config: dict) -> None:
    """transformers' rules for the trained length, and for a factor that is left out."""
    longest = config.get("max_position_embeddings")
    key = "original_max_position_embeddings"
    # A value at the top of the config (Phi-3) beats the one in the dictionary.
    trained = config.get(key) or rope.get(key) or longest
    if trained is None:
        return
    rope[key] = int(hf_number({**rope, key: trained}, key))
    if rope.get("factor") is not None or longest is None:
        return
    # longrope takes its attention factor from the factor, and nothing else; llama3 has to name one
    unset = rope.get("attention_factor") is None and rope["rope_type"] != "llama3"
    if rope["rope_type"] == "yarn" or unset:
        rope["factor"] = longest / rope[key]


def _encode(rope: Rope) -> dict[str, Any]:
    values = {f.name: getattr(rope, f.name) for f in dataclasses.fields(rope)}
    return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


def _decode(values: dict) -> Rope:
    kind = values.pop("type", None)
    choices = Rope.get_known_choices()
    if kind not in choices:
        raise InputError(f"{KEY}.type={kind!r} is not known; known: {', '.join(sorted(choices))}")
    fields = dataclasses.fields(choices[kind])
    if unknown := sorted(set(values) - {f.name for f in fields}):
        raise InputError(
            f"{KEY} has unknown keys {', '.join(unknown)} for type {kind}; "
            f"known: {', '.join(sorted(f.name for f in fields))}"
        )
    required = {f.name for f in fields if f.default is dataclasses.MISSING}
    if missing := sorted(required - set(values)):
        raise InputError(f"{KEY} of type {kind} lacks {', '.join(missing)}; add the value")
    return choices[kind](**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
