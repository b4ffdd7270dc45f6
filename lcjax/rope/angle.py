"""Angles `position * frequency` that are right at any position, in float32 and int32 alone.

A float32 product of position 1,000,000 is off by 0.03 radians in the fastest channel, one of
4,000,000 by 0.12. What matters is the angle within its turn, so a frequency is kept as what it adds
to the turn in 2^-32 parts of it: a whole number, whose product with a position may overflow, since
that drops whole turns, and a small rest. Every step below is either exact or rounds what is small.
"""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num

PARTS = 2.0**32  # of a turn
RADIANS = 2 * math.pi / PARTS  # in one of them


def angles(
    positions: Num[Array, "B T"], inv_freq: Float[Array, " R//2"] | Float[Array, "B R//2"]
) -> Float[Array, "B T R//2"]:
    """positions * inv_freq without whole turns, float32: within 6e-7 of it up to |position| 2^31.

    Differentiable in both; positions may be fractions, of which float32 has fewer the larger they
    are.
    """
    inv_freq = jnp.asarray(inv_freq, jnp.float32)
    constant = jax.lax.stop_gradient(inv_freq)
    whole, rest = parts_of_a_turn(constant)
    # All that a gradient has to see: the angle grows by the position with the frequency.
    slope = rest * RADIANS + (inv_freq - constant)
    inv_freq, whole, slope = (jnp.expand_dims(x, -2) for x in (inv_freq, whole, slope))
    positions = jnp.asarray(positions)[..., None]
    tokens = positions
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        tokens = jnp.floor(positions)
    turned = (tokens.astype(jnp.int32) * whole).astype(jnp.float32) * RADIANS
    angle = turned + tokens.astype(jnp.float32) * slope
    if tokens is positions:
        return angle
    return angle + (positions - tokens).astype(jnp.float32) * inv_freq


def parts_of_a_turn(
    inv_freq: Float[Array, "*B R//2"],
) -> tuple[Int[Array, "*B R//2"], Float[Array, "*B R//2"]]:
    """inv_freq * 2^32 / (2 pi) as int32, modulo 2^32, and the rest float32.

    Both factors are cut into pieces of 12 bits, so that float32 holds each product exactly.
    """
    high = jax.lax.bitcast_convert_type(inv_freq, jnp.int32) & -(2**12)
    high = jax.lax.bitcast_convert_type(high, jnp.float32)
    pieces = jnp.stack([high, inv_freq - high])
    turns = pieces * _TURNS_PER_RADIAN.reshape(-1, *(1,) * pieces.ndim)
    parts = (turns - jnp.round(turns)) * PARTS
    whole = jnp.round(parts)
    return whole.astype(jnp.int32).sum((0, 1), dtype=jnp.int32), (parts - whole).sum((0, 1))


def _pieces(value: Fraction, first: int, count: int) -> np.ndarray:
    """float32 [count] whose sum is `value` to `first` + 12 (count - 1) binary places."""
    pieces = []
    for places in range(first, first + 12 * count, 12):
        piece = Fraction(math.floor(value * 2**places), 2**places)
        pieces.append(float(piece))
        value -= piece
    return np.array(pieces, np.float32)


_PI = Fraction("3.14159265358979323846264338327950288419716939937510582097494459")
_TURNS_PER_RADIAN = _pieces(1 / (2 * _PI), first=14, count=4)
