"""The interface of RoPE methods, and their form in Hugging Face configs.

A method changes the frequencies `f_j` of the angle `position * f_j`, and sometimes the amplitude of
cos and sin, so that a model reads longer texts than it was trained with. Every function takes the
length as an argument and has no state, so results do not depend on the order of calls.

Old Hugging Face configs (`transformers` 4) have `rope_theta` and `rope_scaling`; new ones (5) have
one dictionary `rope_parameters`. Both are read and written. A method that transformers does not
implement is exported as the nearest one that it implements, and in full under `lcjax_rope`.
"""

import dataclasses
import math
import numbers
import reprlib
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import draccus
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from lcjax.errors import (
    INT32_MAX,
    InputError,
    Interval,
    check_arguments,
    check_fields,
    check_integer,
    is_finite_number,
)
from lcjax.rope.rotation import Rotation

_KEY = "lcjax_rope"  # field of a Hugging Face config with the full form of a method
_EXPORTED = "exported_as"  # entry of the full form: the `rope_parameters` written with it
# For these types, transformers takes a missing trained length from the config.
_NEED_TRAINED_LENGTH = ("yarn", "longrope", "su", "llama3")
# Factors are ratios of lengths, which are int32. The largest published theta is about 1e11.
# Target length / trained length.
Extension = Annotated[float, Interval(least=1, hint="target length / trained length")]
_MAX_NUMBER, _MAX_THETA = INT32_MAX, 1e15
_SCALES = 1e-3, 1e3  # of cos and sin; published ones lie between 0.7 and 2


@dataclass(frozen=True, kw_only=True)
class Rope(draccus.ChoiceRegistry):
    """A rotary position method: the `model.rope` config section.

    `head_dim` is always the number of *rotary* channels R: with partial rotary embeddings
    `int(head_dim * rotary_fraction)`. The exponents of all methods use it.
    """

    # Base of the frequencies theta^(-2j/d); null: that of the checkpoint (see `resolve`)
    theta: Annotated[float, Interval(above=1, hint="Llama-2 has 10000")] | None = None

    # Fields of small instances, on which the tests of all types run: for 16 rotary channels, and
    # with a trained length of 16 or 32 tokens, so that requests of 64 tokens go beyond it.
    examples: ClassVar[tuple[dict, ...]] = ({},)
    depends_on_length: ClassVar[bool] = False  # whether `length` changes the frequencies
    learned: ClassVar[bool] = False  # whether the method has trainable arrays (see `init`)
    hf_types: ClassVar[tuple[str, ...]] = ()  # `rope_type` names in Hugging Face configs

    def __post_init__(self):
        self.check_numbers()
        try:
            check_fields("rope", self)
        except InputError as error:
            raise InputError(f"{error} (rope {self.type})") from None
        length = getattr(self, "original_length", None)  # types of users may declare no limits
        self.require(length is None or length >= 1, "original_length", "be the trained length")

    @property
    def type(self) -> str:
        """The name in the registry, `type` in a YAML section."""
        return Rope.get_choice_name(type(self))

    @check_arguments
    def resolve(self, *, theta: float | None = None, length: int | None = None) -> "Rope":
        """Returns a copy in which `theta` and `original_length` are filled in if they are None.

        Args:
          theta: base of the checkpoint's frequencies.
          length: trained length of the checkpoint in tokens.
        """
        values = {"theta": theta, "original_length": length}
        unset = {f.name for f in dataclasses.fields(self) if getattr(self, f.name) is None}
        return dataclasses.replace(
            self, **{k: v for k, v in values.items() if k in unset and v is not None}
        )

    @check_arguments
    def frequencies(
        self, head_dim: int, length: int, params: Mapping[str, Any] | None = None
    ) -> tuple[Float[np.ndarray, " R//2"], float]:
        """Computes the frequencies and the scale of cos and sin for a request.

        They are computed in float64 on the host and rounded once, to float32: a half-precision
        frequency is wrong by whole turns at large positions.

        Args:
          head_dim: rotary channels R.
          length: tokens of the whole request, prompt and new tokens, so that keys that were
            rotated early agree with later queries.
          params: arrays of a learned method.

        Returns:
          float32 frequencies in radians per position, and the scale.

        Raises:
          InputError: a frequency or the scale is not a positive normal number of float32.
        """
        del params  # only learned methods have any
        self.check_head_dim(head_dim)
        try:
            with np.errstate(all="ignore"):  # `check_range` raises an error on overflow
                inv_freq, scale = self.compute(head_dim, length)
        except InputError:
            raise
        except (ArithmeticError, ValueError) as error:  # ValueError: log(0) of `math`
            raise self.range_error(
                f"computing them raises {type(error).__name__}", head_dim
            ) from error
        return self.check_range(inv_freq, scale)

    def compute(self, head_dim: int, length: int) -> tuple[Float[np.ndarray, " R//2"], float]:
        """Returns float64 frequencies and the scale of cos and sin: the formula of the method."""
        raise NotImplementedError(f"{type(self).__name__} has to define `compute`")

    @check_arguments
    def rotation(
        self, head_dim: int, length: int, params: Mapping[str, Any] | None = None
    ) -> Rotation:
        """Returns `frequencies`, with the same arguments, as a `Rotation` for attention."""
        inv_freq, scale = self.frequencies(head_dim, length, params)
        return Rotation(jnp.asarray(inv_freq, jnp.float32), scale)

    def init(self, key: Array, head_dim: int) -> dict[str, Array]:
        """Returns the initial learned arrays; empty if the method has none."""
        del key, head_dim
        return {}

    # Checks

    def require(self, holds: bool, field: str, rule: str) -> None:
        """Raises an InputError with the message "`field` must `rule`" unless `holds`."""
        if not holds:
            value = reprlib.repr(getattr(self, field))  # shortens long values
            raise InputError(f"rope.{field}={value} ({self.type}) must {rule}")

    def check_numbers(self) -> None:
        """Raises an InputError if a field has a wrong type, or is not finite or absurdly large.

        None is valid if the annotation of the field allows it.
        """
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            kinds = typing.get_args(hints[field.name]) or (hints[field.name],)
            value = getattr(self, field.name)
            if kinds == (bool,):
                self.require(isinstance(value, bool), field.name, "be true or false")
            if not {int, float} & set(kinds) or (value is None and type(None) in kinds):
                continue
            is_tuple = Ellipsis in kinds  # tuple[float, ...]
            values = value if isinstance(value, (list, tuple)) else [value]
            kind = numbers.Integral if int in kinds else numbers.Real
            holds = is_tuple == isinstance(value, (list, tuple)) and all(
                isinstance(x, kind) and is_finite_number(x) for x in values
            )
            rule = "hold finite numbers" if is_tuple else "be a finite number"
            if int in kinds:
                rule = "be a finite whole number"
            if field.default not in (None, dataclasses.MISSING):
                rule += f", such as {field.default}"
            self.require(holds, field.name, rule + (", or null" if type(None) in kinds else ""))
            most = _MAX_THETA if field.name == "theta" else _MAX_NUMBER
            largest = max(map(abs, values), default=0)
            self.require(largest <= most, field.name, f"be {most:g} or less")

    def check_range(
        self, inv_freq: Float[np.ndarray, " R//2"], scale: float
    ) -> tuple[Float[np.ndarray, " R//2"], float]:
        """Rounds `inv_freq` to float32 and checks the result.

        Raises:
          InputError: a frequency or the scale is not a positive normal number of float32, or the
            scale is not in 0.001 ... 1000.
        """
        with np.errstate(all="ignore"):
            rounded = np.asarray(inv_freq, np.float32)
            for name, values in (("frequencies", rounded), ("scales", np.float32([scale]))):
                # Devices flush subnormal numbers to 0.
                if not np.all((values >= np.finfo(np.float32).tiny) & np.isfinite(values)):
                    problem = f"{name} range from {values.min():g} to {values.max():g}"
                    raise self.range_error(problem, 2 * rounded.size)
        if not _SCALES[0] <= scale <= _SCALES[1]:
            problem = f"the scale {scale:g} is not in {_SCALES[0]:g} ... {_SCALES[1]:g}"
            raise self.range_error(problem, 2 * rounded.size)
        return rounded, float(scale)

    def range_error(self, problem: str, head_dim: int) -> InputError:
        """Returns an InputError that lists all fields, since any of them may be the cause."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        settings = [f"{k}={reprlib.repr(v)}" for k, v in values.items() if v is not None]
        return InputError(
            f"rope {self.type} with {', '.join(settings)} must give positive frequencies and a "
            f"positive scale in float32; for {head_dim} rotary channels {problem}; use values "
            "nearer to the published ones"
        )

    def get_resolved(self, field: str) -> Any:
        """Returns the value of `field`; raises an InputError if it is None (see `resolve`)."""
        value = getattr(self, field)
        if value is None:
            raise InputError(
                f"rope.{field}=None ({self.type}) is not known: set it, or fill it from the "
                "checkpoint with rope.resolve(theta=..., length=...)"
            )
        return value

    def check_head_dim(self, head_dim: int) -> int:
        """Returns `head_dim`; raises an InputError unless it is even and positive."""
        if not is_finite_number(head_dim) or head_dim < 2 or head_dim % 2:
            raise InputError(
                f"rotary channels={head_dim} must be even and at least 2: they turn in pairs; "
                "change head_dim or the rotary fraction"
            )
        return head_dim

    def check_length(self, length: int | None) -> int:
        """Returns `length`; raises an InputError unless it is a positive number."""
        if not is_finite_number(length) or length < 1:
            raise InputError(
                f"length={length!r} must be the number of tokens of the request, 1 or more: "
                f"the frequencies of rope {self.type} depend on it"
            )
        return int(length)

    def describe(self) -> str:
        """Returns the type, the factor and the fields that differ from their defaults."""
        words = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None or (value == field.default and field.name != "factor"):
                continue
            if isinstance(value, tuple):
                value = f"[{value[0]:g} ... {value[-1]:g}]"
            value = f"{value:g}" if isinstance(value, float) else value
            words.append(f"{field.name}={value}")
        return f"rope {self.type}" + (f" ({', '.join(words)})" if words else "")

    def check_export(self, head_dim: int | None) -> int:
        """Returns `head_dim`; raises an InputError if it is None."""
        if head_dim is None:
            raise InputError(
                f"rope {self.type} has another form in transformers that depends on the number of "
                "rotary channels: call to_hf(head_dim=...)"
            )
        return self.check_head_dim(head_dim)

    # Hugging Face

    def hf_rope(self, head_dim: int | None) -> tuple[dict, dict]:
        """Returns transformers' rope dictionary (`rope_type`, ...) and other config entries.

        They describe the nearest method that transformers implements, here plain rope; `to_hf` adds
        the full form.
        """
        return {"rope_type": "default", "rope_theta": self.theta}, {}

    @classmethod
    def from_hf_rope(cls, rope: dict, config: dict) -> "Rope":
        """Reads a method from transformers' rope dictionary and the config that contains it."""
        raise NotImplementedError(f"{cls.__name__} has to define `from_hf_rope`")

    @property
    def hf_limit(self) -> int | None:
        """The length up to which transformers computes the same from `to_hf`; None: no limit.

        0 for a method without an `hf_rope` of its own.
        """
        return 0 if type(self).hf_rope is Rope.hf_rope else None

    @property
    def hf_length(self) -> int | None:
        """`max_position_embeddings` if transformers' formula reads it; None: it may be any."""
        return None

    def extended_length(self, length: int) -> int:
        """Returns the tokens that a model trained for `length` tokens reads with this method.

        Exports announce it (`max_position_embeddings`), so methods with an `hf_limit` keep
        `length`: transformers reads them as plain rope.
        """
        return length

    def scaled_length(self, length: int, factor: float | None) -> int:
        """Returns `factor` times the trained length, or `length` if that is more."""
        check_integer("length", length, 1)
        trained = getattr(self, "original_length", None) or length
        return min(max(length, round(trained * (factor or 1))), INT32_MAX)

    def to_hf(self, head_dim: int | None = None) -> dict[str, Any]:
        """Returns entries of a Hugging Face config from which `from_hf` restores this method.

        They override the model's entries, because some types set `max_position_embeddings`. A
        method that transformers does not implement is exported as plain rope, which is equal up to
        `hf_limit` tokens.

        Args:
          head_dim: rotary channels; required by methods that have another form in transformers:
            ntk, dynamic_ntk with `min_length`, and yarn with the frequency ramp.

        Returns:
          The old `rope_scaling` and `rope_theta`, the new `rope_parameters`, and `lcjax_rope` if
          these do not determine the method.
        """
        parameters, entries = self.hf_rope(head_dim)
        parameters = {k: v for k, v in parameters.items() if v is not None}
        scaling = {k: v for k, v in parameters.items() if k != "rope_theta"}
        kind = scaling["rope_type"]
        if kind in ("linear", "dynamic"):
            # transformers before 4.43 takes exactly `type` and `factor`; later versions also do.
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
        if _read(entries) != self:
            entries[_KEY] = {"type": self.type, **_encode(self), _EXPORTED: dict(parameters)}
        return entries


def base_frequencies(theta: float, head_dim: int) -> Float[np.ndarray, " R//2"]:
    """Returns float64 theta^(-2j/d) for j = 0..d/2-1 (RoFormer, arXiv 2104.09864, eq. 15)."""
    return np.float64(theta) ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)


def ntk_theta(theta: float, alpha: float, head_dim: int) -> float:
    """Returns theta * alpha^(d/(d-2)): the fastest pair stays, the slowest is divided by alpha."""
    if head_dim < 4:
        raise InputError(
            f"rotary channels={head_dim} must be at least 4 for NTK scaling, whose exponent is "
            "d/(d-2); use more channels or rope type linear"
        )
    return float(theta) * math.pow(alpha, head_dim / (head_dim - 2))


def hf_number(rope: dict, key: str, default: float | None = None) -> float:
    """Returns a number of a Hugging Face rope dictionary.

    Args:
      rope: the dictionary.
      key: the entry.
      default: replaces a missing entry or None.

    Raises:
      InputError: the value is not a finite number.
    """
    value = rope.get(key)
    value = default if value is None else value
    if not is_finite_number(value):
        raise InputError(
            f"rope_parameters.{key}={reprlib.repr(value)} of the Hugging Face config must be a "
            f"finite number for rope type {rope.get('rope_type')}; correct config.json"
        )
    return float(value)


@check_arguments
def from_hf(config: Mapping[str, Any]) -> Rope:
    """Reads the RoPE method of a Hugging Face config.

    It reads `rope_scaling` (with `type` or `rope_type`) and `rope_parameters`; the first has
    precedence, as in transformers. `partial_rotary_factor` is part of the model's config instead.

    Args:
      config: the dictionary of `config.json`.

    Returns:
      The method. `theta` is None if the config has none: each model family has its own default
      (`Rope.resolve`).

    Raises:
      InputError: an unknown type, a value that is missing or out of range, or `lcjax_rope` that
        contradicts the `rope_parameters` of the config.
    """
    config = dict(config)
    full_form = config.pop(_KEY, None)
    rope = _read(config)
    if full_form is None:
        return rope
    full_form = dict(full_form)
    exported = full_form.pop(_EXPORTED, None)
    if exported and rope != _read({**config, "rope_scaling": None, "rope_parameters": exported}):
        raise InputError(
            f"{_KEY} (type {full_form.get('type')}) was written beside rope_parameters={exported}, "
            "which have changed since; delete the key to use rope_parameters, or restore them"
        )
    return _decode(full_form)


def _read(config: dict) -> Rope:
    """Returns the method that transformers reads from a config."""
    new = config.get("rope_parameters") or {}
    rope = config.get("rope_scaling") or new
    if not isinstance(rope, Mapping) or not isinstance(new, Mapping):
        raise InputError(f"rope_scaling={rope!r:.60} of the Hugging Face config must be an object")
    rope = dict(rope)
    layers = sorted(k for k, v in rope.items() if isinstance(v, Mapping))
    if layers:
        raise InputError(
            f"rope_parameters has a section for each of {', '.join(layers)}: models whose layers "
            "rotate differently are not supported; use a model with one position method"
        )
    theta = rope.get("rope_theta", config.get("rope_theta"))
    if theta is None and (ignored := new.get("rope_theta")) is not None:
        raise InputError(
            f"rope_parameters.rope_theta={ignored!r:.40} is beside rope_scaling, for which"
            " transformers reads rope_theta from the top of the config; write it there"
        )
    kind = rope.get("rope_type") or rope.get("type")
    if kind is None and "factor" in rope:
        raise InputError(f"rope_scaling={rope!r:.60} has a factor and no rope_type; give it one")
    kind = kind or "default"
    rope |= {"rope_type": kind, "rope_theta": theta}
    if theta is not None:
        rope["rope_theta"] = hf_number(rope, "rope_theta")
    if kind in _NEED_TRAINED_LENGTH:
        _fill_lengths(rope, config)
    by_name = {name: c for c in Rope.get_known_choices().values() for name in c.hf_types}
    if not isinstance(kind, str) or kind not in by_name:
        raise InputError(
            f"rope_type={kind!r} of the Hugging Face config is not known; "
            f"known: {', '.join(sorted(by_name))}"
        )
    return by_name[kind].from_hf_rope(rope, config)


def _fill_lengths(rope: dict, config: dict) -> None:
    """Applies transformers' rules for a missing trained length and a missing factor."""
    max_length = config.get("max_position_embeddings")
    key = "original_max_position_embeddings"
    # A value at the top of the config (Phi-3) has precedence over the one in the dictionary.
    length = config.get(key) or rope.get(key) or max_length
    if length is None:
        return
    rope[key] = int(hf_number({**rope, key: length}, key))
    if rope.get("factor") is not None or max_length is None:
        return
    # longrope uses the factor only for its attention factor; llama3 must have a factor.
    is_longrope = rope["rope_type"] in ("longrope", "su")
    if rope["rope_type"] == "yarn" or (is_longrope and rope.get("attention_factor") is None):
        rope["factor"] = max_length / rope[key]


def _encode(rope: Rope) -> dict[str, Any]:
    """Returns the fields of a method as JSON values."""
    values = {f.name: getattr(rope, f.name) for f in dataclasses.fields(rope)}
    return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


def _decode(values: dict) -> Rope:
    """Restores a method from the values of `_encode` and its `type`."""
    kind = values.pop("type", None)
    choices = Rope.get_known_choices()
    if not isinstance(kind, str) or kind not in choices:
        raise InputError(
            f"{_KEY}.type={kind!r} is not known; known: {', '.join(sorted(choices))}; for one of"
            " your own add --import FILE.py (or, in Python, import it first)"
        )
    fields = dataclasses.fields(choices[kind])
    if unknown := sorted(set(values) - {f.name for f in fields}):
        raise InputError(
            f"{_KEY} has unknown keys {', '.join(unknown)} for type {kind}; "
            f"known: {', '.join(sorted(f.name for f in fields))}"
        )
    required = {f.name for f in fields if f.default is dataclasses.MISSING}
    if missing := sorted(required - set(values)):
        raise InputError(f"{_KEY} of type {kind} lacks {', '.join(missing)}; add the value")
    return choices[kind](**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
