"""The rotation of queries and keys, with angles that are accurate at any int32 position.

The float32 product of a position and a frequency has an error of 0.03 radians in the fastest
channel at position 1,000,000, and of 0.12 at position 4,000,000. Attention needs the angle modulo
whole turns only. So a frequency is written in fixed point, as the part of a turn that one position
adds: `whole` counts units of 2^-32 turns, `fine` counts units of 2^-48 turns, and a float32 holds
the rest. The int32 product with `whole` may overflow, because an overflow drops whole turns. All
other steps are exact or round a small number.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num

from lcjax.errors import InputError, check_arguments, check_type

UNITS = 2.0**32  # units of `whole` in a turn
RADIANS = 2 * math.pi / UNITS  # radians in a unit
FINE = 2.0**-16  # units in a unit of `fine`


class Rotation(NamedTuple):
    """The frequencies and scales with which attention rotates queries and keys; a pytree."""

    # float32 radians per position; R rotary channels; [B, R//2] if rows differ
    inv_freq: Float[Array, " R//2"] | Float[Array, "B R//2"]
    scale: float | Array = 1.0  # multiplies cos and sin of queries and keys (logits get its square)
    query_scale: float | Array = 1.0  # multiplies queries only (CLEX log scaling)
    # The rotation of each of `ModelConfig.kinds` if layers differ
    kinds: tuple["Rotation", ...] = ()

    def rotate(
        self, x: Float[Array, "B T N H"], positions: Num[Array, "B T"]
    ) -> Float[Array, "B T N H"]:
        """Rotates queries or keys to `positions`, without `query_scale` (`rotate`)."""
        return rotate(x, positions, self.inv_freq, self.scale)

    def rows(self, index: Int[np.ndarray, " M"]) -> "Rotation":
        """Returns the rows `index` of a stacked rotation (`stack_rotations`)."""
        return jax.tree.map(lambda x: x[index], self)

    def equals(self, other: "Rotation") -> bool:
        """Returns whether both have equal numbers, including those of all kinds of layers."""
        return bool(jax.tree.all(jax.tree.map(np.array_equal, self, other)))

    def of_kind(self, kind: int) -> "Rotation":
        """Returns the rotation of layers of one kind, an index in `ModelConfig.kinds`."""
        return self.kinds[kind] if self.kinds else self


def no_rotation() -> Rotation:
    """Returns a rotation of 0 channels."""
    return Rotation(np.zeros(0, np.float32))


@check_arguments
def stack_rotations(rotations: Sequence[Rotation]) -> Rotation:
    """Stacks one rotation per row to fields of shape [B, R//2], [B, 1, 1] and [B, 1, 1, 1]."""
    if not len(rotations):
        raise InputError("rotations is empty; give one for each row")
    for rotation in rotations:
        check_type("rotations: one", rotation, Rotation)
    inv_freq, scale, query_scale = (
        jnp.stack([jnp.asarray(x, jnp.float32) for x in field])
        for field in zip(*(rotation[:3] for rotation in rotations))
    )
    kinds = tuple(map(stack_rotations, zip(*(rotation.kinds for rotation in rotations))))
    # The scales broadcast to angles [B, T, R//2] and queries [B, T, N, H].
    return Rotation(inv_freq, scale[:, None, None], query_scale[:, None, None, None], kinds)


def rotate(
    x: Float[Array, "B T N H"],
    positions: Num[Array, "B T"],
    inv_freq: Float[Array, " R//2"] | Float[Array, "B R//2"],
    scale: float | Array = 1.0,
) -> Float[Array, "B T N H"]:
    """Rotates pairs (j, j + R/2) of the first R channels by `positions * inv_freq[j]`.

    y[j] = x[j] cos - x[j + R/2] sin, y[j + R/2] = x[j + R/2] cos + x[j] sin, both times `scale`:
    Hugging Face's half-split layout of RoFormer (arXiv 2104.09864, sec. 3.2).

    Args:
      x: queries or keys. Channels from R = 2 * inv_freq.shape[-1] on are returned unchanged.
      positions: integers or fractions, up to millions (see `angles`).
      inv_freq: radians per position; one row for all rows of `x`, or one for each.
      scale: multiplies cos and sin.

    Returns:
      The rotated `x`, in its dtype. It is computed in float32: bfloat16 has no odd integer above
      256.
    """
    half = inv_freq.shape[-1]
    with jax.named_scope("rope"):
        cos, sin = jax.lax.platform_dependent(
            jnp.asarray(positions),
            jnp.asarray(inv_freq, jnp.float32),
            cpu=_cos_sin_on_cpu,
            default=_cos_sin,
        )
        cos, sin = (scale * cos)[:, :, None], (scale * sin)[:, :, None]
        a = x[..., :half].astype(jnp.float32)
        b = x[..., half : 2 * half].astype(jnp.float32)
        rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)
        if 2 * half == x.shape[-1]:
            return rotated
        return jnp.concatenate([rotated, x[..., 2 * half :]], -1)


def _cos_sin(positions, inv_freq) -> tuple[Float[Array, "B T R//2"], Float[Array, "B T R//2"]]:
    """Returns the cosines and sines of the angles."""
    angle = angles(positions, inv_freq)
    return jnp.cos(angle), jnp.sin(angle)


def _cos_sin_on_cpu(positions, inv_freq):
    # XLA for CPUs would compute both again for every head of every layer, inside the products with
    # them (jax 0.10.2). It moves no operation out of the branches of a condition, and computes
    # equal conditions once. Constant frequencies must not decide the condition at compile time.
    def nans(positions, inv_freq):
        nan = jnp.nan * (positions[..., None] * inv_freq[..., None, :])
        return nan, nan

    missing = jnp.isnan(jax.lax.optimization_barrier(inv_freq)).any()
    return jax.lax.cond(missing, nans, _cos_sin, positions, inv_freq)


def angles(
    positions: Num[Array, "B T"], inv_freq: Float[Array, " R//2"] | Float[Array, "B R//2"]
) -> Float[Array, "B T R//2"]:
    """Computes `positions * inv_freq` modulo 2 pi, within about [-pi, pi], differentiable in both.

    The error is below 6e-7 for positions -2^31 <= p < 2^31 and frequencies up to 1. For frequencies
    from 1 to 4,096 this holds for whole positions; the product with a fraction adds its rounding.

    Args:
      positions: integers, or floats with fractions.
      inv_freq: radians per position; one row for all rows of positions, or one for each.

    Returns:
      float32 angles.
    """
    inv_freq = jnp.asarray(inv_freq, jnp.float32)
    constant = jax.lax.stop_gradient(inv_freq)
    whole, fine, rest = turn_units(constant)
    # inv_freq - constant is 0 and carries the gradient: d angle / d frequency = position.
    slope = rest * RADIANS + (inv_freq - constant)
    inv_freq, whole, fine, slope = (jnp.expand_dims(x, -2) for x in (inv_freq, whole, fine, slope))
    positions = jnp.asarray(positions)[..., None]
    is_integer = jnp.issubdtype(positions.dtype, jnp.integer)
    rounded = positions if is_integer else jnp.round(positions)
    tokens = rounded.astype(jnp.int32)
    # tokens = high * 2^16 + low with |low| <= 2^15, so that high * fine fits int32.
    high = ((tokens >> 15) + 1) >> 1
    low = (tokens - (high << 16)).astype(jnp.float32)
    units = (tokens * whole + high * fine).astype(jnp.float32)
    small = low * (fine.astype(jnp.float32) * (FINE * RADIANS))
    small += rounded.astype(jnp.float32) * slope
    if not is_integer:
        small += (positions - rounded).astype(jnp.float32) * inv_freq
    return units * RADIANS + small


def turn_units(
    inv_freq: Float[Array, "*B R//2"],
) -> tuple[Int[Array, "*B R//2"], Int[Array, "*B R//2"], Float[Array, "*B R//2"]]:
    """Writes inv_freq / (2 pi) modulo 1 as (whole + fine * 2^-16 + rest) * 2^-32.

    `inv_freq` and 1 / (2 pi) are split into pieces of 12 bits, so that float32 holds each product
    exactly.

    Args:
      inv_freq: float32 radians per position.

    Returns:
      whole (int32 modulo 2^32), fine (int32 in [-2^15, 2^15)) and rest (float32, below 2^-13).
    """
    high = jax.lax.bitcast_convert_type(inv_freq, jnp.int32) & -(2**12)
    high = jax.lax.bitcast_convert_type(high, jnp.float32)
    pieces = jnp.stack([high, inv_freq - high])
    turns = pieces * _TURNS_PER_RADIAN.reshape(-1, *(1,) * pieces.ndim)
    units = (turns - jnp.round(turns)) * UNITS
    whole = jnp.round(units)
    fine_units = (units - whole) / FINE
    fine = jnp.round(fine_units)
    rest = (fine_units - fine).sum((0, 1)) * FINE
    whole, fine = (x.astype(jnp.int32).sum((0, 1), dtype=jnp.int32) for x in (whole, fine))
    carry = (fine + 2**15) >> 16
    return whole + carry, fine - (carry << 16), rest


def _split(value: Fraction, places: int, count: int) -> np.ndarray:
    """Splits `value` into float32 pieces [count] of 12 bits, the first with `places` binary places.

    Their sum equals `value` to `places` + 12 (count - 1) binary places.
    """
    pieces = []
    for last in range(places, places + 12 * count, 12):
        piece = Fraction(math.floor(value * 2**last), 2**last)
        pieces.append(float(piece))
        value -= piece
    return np.array(pieces, np.float32)


_PI = Fraction("3.14159265358979323846264338327950288419716939937510582097494459")
# 74 places: at position 2^31 the truncation adds 1e-12 radians per unit of frequency.
_TURNS_PER_RADIAN = _split(1 / (2 * _PI), places=14, count=6)
