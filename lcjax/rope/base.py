"""What every position method is: a frequency vector, a scale, and the rotation that uses them.

A method maps a trained length onto a longer one by changing the frequencies `f_j` of the angle
`position * f_j`, and sometimes the amplitude of cos and sin. Everything about the length is an
argument: the same object gives the same answer in any order of calls.
"""

import dataclasses
import math
import numbers
import reprlib
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import draccus
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num

from lcjax.errors import InputError, is_finite_number
from lcjax.rope.angle import angles


class Rotation(NamedTuple):
    """What attention needs in order to rotate queries and keys; a pytree."""

    inv_freq: Float[Array, " R//2"]  # float32, R rotary channels; [B, R//2] when rows differ
    scale: float | Array = 1.0  # multiplies cos and sin of queries and keys (logits get its square)
    query_scale: float | Array = 1.0  # multiplies queries only (CLEX log scaling)

    def rows(self, index: np.ndarray) -> "Rotation":
        """Those rows of a stacked rotation (`stack_rotations`)."""
        return Rotation(*(field[index] for field in self))


def stack_rotations(rotations: Sequence[Rotation]) -> Rotation:
    """A rotation per row: fields of shape [B, R//2], [B, 1, 1] and [B, 1, 1, 1]."""
    inv_freq, scale, query_scale = (
        jnp.stack([jnp.asarray(x, jnp.float32) for x in field]) for field in zip(*rotations)
    )
    # One number per row, against angles [B, T, R//2] and queries [B, T, N, H].
    return Rotation(inv_freq, scale[:, None, None], query_scale[:, None, None, None])


@dataclass(frozen=True, kw_only=True)
class Rope(draccus.ChoiceRegistry):
    """A rotary position method.

    `head_dim` below is always the number of *rotary* channels: with partial rotary embeddings that
    is `int(head_dim * rotary_fraction)`, and every exponent of every method uses it.
    """

    # Base of the frequencies theta^(-2j/d); null: the checkpoint's own (see `resolve`)
    theta: float | None = None

    depends_on_length: ClassVar[bool] = False  # whether `length` changes the frequencies
    learned: ClassVar[bool] = False  # whether `init` makes arrays that training changes
    hf_types: ClassVar[tuple[str, ...]] = ()  # names in Hugging Face configs that are read as this

    def __post_init__(self):
        self.check_numbers()
        if self.theta is not None:
            self.require(self.theta > 1, "theta", "be above 1 (Llama-2 has 10000)")

    @property
    def type(self) -> str:
        """Name in the registry: the `type:` of a YAML section."""
        return Rope.get_choice_name(type(self))

    def resolve(self, *, theta: float | None = None, length: int | None = None) -> "Rope":
        """Fills what was left open with the checkpoint's base `theta` and its trained `length`."""
        known = {"theta": theta, "original_length": length}
        open_fields = {f.name for f in dataclasses.fields(self) if getattr(self, f.name) is None}
        return dataclasses.replace(
            self, **{k: v for k, v in known.items() if k in open_fields and v is not None}
        )

    def frequencies(
        self, head_dim: int, length: int, params: dict | None = None
    ) -> tuple[np.ndarray, float]:
        """Float32 frequencies [head_dim // 2] and the scale of cos and sin, for `length` tokens.

        `length` counts the whole request, prompt and new tokens, so that keys which were rotated
        early agree with queries that come late. Computed in float64 on the host and rounded once:
        a half-precision frequency is wrong by whole turns at long positions.

        Raises:
          InputError: a frequency or the scale is not a positive normal number of float32.
        """
        del params  # only learned methods have any
        self.check_head_dim(head_dim)
        try:
            with np.errstate(all="ignore"):  # what overflows is refused by its value
                inv_freq, scale = self.compute(head_dim, length)
        except InputError:
            raise
        except (ArithmeticError, ValueError) as error:  # ValueError: log(0) of `math`
            raise self.range_error(
                f"computing them raises {type(error).__name__}", head_dim
            ) from error
        return self.check_range(inv_freq, scale)

    def compute(self, head_dim: int, length: int) -> tuple[np.ndarray, float]:
        """Float64 frequencies and scale on the host: the formula of the method."""
        raise NotImplementedError(f"{type(self).__name__} has to define `compute`")

    def rotation(self, head_dim: int, length: int, params: dict | None = None) -> Rotation:
        """`frequencies` as the pytree that attention takes."""
        inv_freq, scale = self.frequencies(head_dim, length, params)
        return Rotation(jnp.asarray(inv_freq, jnp.float32), scale)

    def init(self, key: Array, head_dim: int) -> dict[str, Array]:
        """Learned arrays of the method; none for a fixed one."""
        del key, head_dim
        return {}

    # Checks

    def require(self, holds: bool, field: str, rule: str) -> None:
        """Raises a one-line error about `field` unless `holds`."""
        if not holds:
            value = reprlib.repr(getattr(self, field))  # shortens what is too long for one line
            raise InputError(f"rope.{field}={value} ({self.type}) must {rule}")

    def check_numbers(self) -> None:
        """Refuses number fields that do not hold finite numbers, or None where None is allowed."""
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            kinds = typing.get_args(hints[field.name]) or (hints[field.name],)
            value = getattr(self, field.name)
            if not {int, float} & set(kinds) or (value is None and type(None) in kinds):
                continue
            is_tuple = Ellipsis in kinds  # tuple[float, ...]
            values = value if is_tuple and isinstance(value, (list, tuple)) else [value]
            kind = numbers.Integral if int in kinds else numbers.Real
            holds = all(isinstance(x, kind) and is_finite_number(x) for x in values)
            rule = "hold finite numbers" if is_tuple else "be a finite number"
            if int in kinds:
                rule = "be a finite whole number"
            if field.default not in (None, dataclasses.MISSING):
                rule += f", such as {field.default}"
            self.require(holds, field.name, rule + (", or null" if type(None) in kinds else ""))

    def check_range(self, inv_freq: np.ndarray, scale: float) -> tuple[np.ndarray, float]:
        """Returns `inv_freq` in float32 and `scale`; refuses what is 0, infinite or NaN there."""
        with np.errstate(all="ignore"):
            rounded = np.asarray(inv_freq, np.float32)
            for name, values in (("frequencies", rounded), ("scales", np.float32([scale]))):
                # Devices flush subnormal numbers to 0.
                if not np.all((values >= np.finfo(np.float32).tiny) & np.isfinite(values)):
                    problem = f"{name} range from {values.min():g} to {values.max():g}"
                    raise self.range_error(problem, 2 * rounded.size)
        return rounded, float(scale)

    def range_error(self, problem: str, head_dim: int) -> InputError:
        """An error about all values of the rope, since any of them may be the cause."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        shown = [f"{k}={reprlib.repr(v)}" for k, v in values.items() if v is not None]
        return InputError(
            f"rope {self.type} with {', '.join(shown)} must give positive frequencies and a "
            f"positive scale in float32; for {head_dim} rotary channels {problem}; use values "
            "nearer to the published ones"
        )

    def known(self, field: str) -> Any:
        """The value of `field`, or an error when nobody has filled it yet."""
        value = getattr(self, field)
        if value is None:
            raise InputError(
                f"rope.{field}=None ({self.type}) is not known: set it, or fill it from the "
                "checkpoint with rope.resolve(theta=..., length=...)"
            )
        return value

    def check_head_dim(self, head_dim: int) -> int:
        if head_dim < 2 or head_dim % 2:
            raise InputError(
                f"rotary channels={head_dim} must be even and at least 2: they turn in pairs; "
                "change head_dim or the rotary fraction"
            )
        return head_dim

    def check_length(self, length: int | None) -> int:
        if not is_finite_number(length) or length < 1:
            raise InputError(
                f"length={length!r} must be the number of tokens of the request, 1 or more: "
                f"the frequencies of rope {self.type} depend on it"
            )
        return int(length)

    def check_export(self, head_dim: int | None) -> int:
        if head_dim is None:
            raise InputError(
                f"rope {self.type} has another form in transformers that depends on the number of "
                "rotary channels: call to_hf(head_dim=...)"
            )
        return self.check_head_dim(head_dim)

    # Hugging Face

    def hf_rope(self, head_dim: int | None) -> tuple[dict, dict]:
        """transformers' rope dictionary (`rope_type`, `rope_theta`, ...) and other config entries.

        The nearest equivalent that transformers can compute; `to_hf` adds what it cannot say.
        """
        raise NotImplementedError(f"{type(self).__name__} has to define `hf_rope`")

    @classmethod
    def from_hf_rope(cls, rope: dict, config: dict) -> "Rope":
        """Reads transformers' rope dictionary, beside the other entries of its config."""
        raise NotImplementedError(f"{cls.__name__} has to define `from_hf_rope`")

    @property
    def hf_limit(self) -> int | None:
        """Tokens up to which transformers computes the same from `to_hf`; null: at every length."""
        return None

    def to_hf(self, head_dim: int | None = None) -> dict[str, Any]:
        """Entries of a Hugging Face config: old `rope_scaling` and new `rope_parameters`.

        They go over the model's own entries, because some types fix `max_position_embeddings`.
        `head_dim` (rotary channels) is needed by types that transformers knows only in another
        form: ntk, dynamic_ntk with `min_length`, and yarn with the frequency ramp. What it cannot
        compute at all it reads as plain rope, right up to `hf_limit` tokens.
        """
        from lcjax.rope.hf import write

        return write(self, head_dim)


def base_frequencies(theta: float, head_dim: int) -> np.ndarray:
    """theta^(-2j/d) for j = 0..d/2-1, float64 (RoFormer, arXiv 2104.09864, eq. 15)."""
    return np.float64(theta) ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)


def ntk_theta(theta: float, alpha: float, head_dim: int) -> float:
    """theta * alpha^(d/(d-2)): keeps the fastest pair, divides the slowest by `alpha`."""
    if head_dim < 4:
        raise InputError(
            f"rotary channels={head_dim} must be at least 4 for NTK scaling, whose exponent is "
            "d/(d-2); use more channels or rope type linear"
        )
    return float(theta) * math.pow(alpha, head_dim / (head_dim - 2))


def hf_number(rope: dict, key: str, default: float | None = None) -> float:
    """A number of a Hugging Face rope dictionary; an error that names the key when it is none."""
    value = rope.get(key)
    value = default if value is None else value
    if not is_finite_number(value):
        raise InputError(
            f"rope_parameters.{key}={reprlib.repr(value)} of the Hugging Face config must be a "
            f"finite number for rope type {rope.get('rope_type')}; correct config.json"
        )
    return float(value)


def rotate(
    x: Float[Array, "B T N H"],
    positions: Num[Array, "B T"],
    inv_freq: Float[Array, " R//2"] | Float[Array, "B R//2"],
    scale: float | Array = 1.0,
) -> Float[Array, "B T N H"]:
    """Rotates pairs (j, j + R/2) of the first R channels by `positions * inv_freq[j]`.

    y[j] = x[j] cos - x[j + R/2] sin, y[j + R/2] = x[j + R/2] cos + x[j] sin, both times `scale`:
    Hugging Face's half-split layout. Channels from R = 2 * inv_freq.shape[-1] on pass unchanged.
    Positions may be fractions, and millions (`lcjax.rope.angle`). Float32 inside: bfloat16 has no
    odd integer above 256.
    """
    half = inv_freq.shape[-1]
    with jax.named_scope("rope"):
        angle = angles(positions, inv_freq)
        cos = (scale * jnp.cos(angle))[:, :, None]
        sin = (scale * jnp.sin(angle))[:, :, None]
        a = x[..., :half].astype(jnp.float32)
        b = x[..., half : 2 * half].astype(jnp.float32)
        turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)
        if 2 * half == x.shape[-1]:
            return turned
        return jnp.concatenate([turned, x[..., 2 * half :]], -1)
