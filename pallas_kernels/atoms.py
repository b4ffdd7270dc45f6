"""The atoms of the mask algebra; `pallas_kernels.masks` has the functions that make them.

Every answer is integer arithmetic and comparison, so one formula serves Python integers, NumPy and
traced arrays, and runs inside kernels. `//` and `%` round down in all of them, so indices below 0
(queries before every key) need no special case. `0 * x` widens an answer about keys alone to the
queries' shape: as integers, because some compilers cannot broadcast booleans.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.algebra import Mask


def integer(name: str, value, least: int | None = None) -> int:
    """`value` as an int of at least `least`, or an error that names the argument."""
    rule = "an integer" if least is None else f"an integer of at least {least}"
    try:
        number = None if isinstance(value, (bool, np.bool_)) else operator.index(value)
    except TypeError:
        number = None
    if number is None or (least is not None and number < least):
        raise ValueError(f"{name} is {value!r}, must be {rule}")
    return number


def floor_divide(x, n: int):
    """x // n. That of JAX asks for signs, which the TPU compiler knows of a present TPU only."""
    return lax.div(x - x % n, jnp.asarray(n, x.dtype)) if isinstance(x, jax.Array) else x // n


class Invariant(Mask):
    """Masks that depend on `q - k` only."""

    @property
    def shift_invariant(self) -> bool:
        return True


@dataclass(frozen=True)
class Everything(Invariant):
    """Every key is visible to every query."""

    def element(self, q, k):
        return 0 * q + 0 * k == 0

    # Known without knowing the indices: NumPy, so that tables stay static for traced indices.
    def bounds(self, q_lo, q_hi, k_lo, k_hi):
        whole = np.ones(np.broadcast_shapes(np.shape(q_lo), np.shape(k_lo)), bool)
        return whole, whole


@dataclass(frozen=True)
class Nothing(Invariant):
    """No key is visible to any query."""

    def element(self, q, k):
        return 0 * q + 0 * k != 0

    def bounds(self, q_lo, q_hi, k_lo, k_hi):
        none = np.zeros(np.broadcast_shapes(np.shape(q_lo), np.shape(k_lo)), bool)
        return none, none


@dataclass(frozen=True)
class Causal(Invariant):
    """A key is visible to queries at or after it: `k <= q`."""

    def element(self, q, k):
        return k <= q

    def bounds(self, q_lo, q_hi, k_lo, k_hi):
        return k_lo <= q_hi, k_hi <= q_lo


@dataclass(frozen=True)
class Window(Invariant):
    """A key is visible while it is less than `size` behind the query: `q - k < size`."""

    size: int

    def element(self, q, k):
        return q - k < self.size

    def bounds(self, q_lo, q_hi, k_lo, k_hi):
        return q_lo - k_hi < self.size, q_hi - k_lo < self.size


@dataclass(frozen=True)
class Band(Invariant):
    """`low <= q - k <= high`."""

    low: int
    high: int

    def element(self, q, k):
        return (q - k >= self.low) & (q - k <= self.high)

    def bounds(self, q_lo, q_hi, k_lo, k_hi):
        least, most = q_lo - k_hi, q_hi - k_lo
        some = (most >= self.low) & (least <= self.high)
        return some, (least >= self.low) & (most <= self.high)


@dataclass(frozen=True)
class Stride(Invariant):
    """`(q - k) % step == 0`."""

    step: int

    def element(self, q, k):
        return q % self.step == k % self.step  # divides rows and columns, not their pairs

    def bounds(self, q_lo, q_hi, k_lo, k_hi):
        least, most = q_lo - k_hi, q_hi - k_lo
        some = most // self.step * self.step >= least
        return some, some & ((most == least) | (self.step == 1))


@dataclass(frozen=True)
class Prefix(Mask):
    """`k < size`."""

    size: int

    def element(self, q, k):
        return k + 0 * q < self.size

    def bounds(self, q_lo, q_hi, k_lo, k_hi):
        return k_lo + 0 * q_lo < self.size, k_hi + 0 * q_lo < self.size


@dataclass(frozen=True)
class ChunkDistance(Mask):
    """`low <= (q + shift) // size - (k + shift) // size <= high`; None leaves `high` open."""

    size: int
    low: int
    high: int | None
    shift: int

    def _within(self, least, most):
        """(some difference from least to most is in the range, all are)."""
        some, whole = most >= self.low, least >= self.low
        if self.high is None:
            return some, whole
        return some & (least <= self.high), whole & (most <= self.high)

    def element(self, q, k):
        q, k = (floor_divide(x + self.shift, self.size) for x in (q, k))
        distance = q - k
        return self._within(distance, distance)[0]

    def bounds(self, q_lo, q_hi, k_lo, k_hi):
        q_lo, q_hi, k_lo, k_hi = ((x + self.shift) // self.size for x in (q_lo, q_hi, k_lo, k_hi))
        return self._within(q_lo - k_hi, q_hi - k_lo)


@dataclass(frozen=True)
class TailOf(Mask):
    """The last `count` keys of every stretch of `size`: `k % size >= size - count`."""

    size: int
    count: int

    def element(self, q, k):
        return k % self.size + 0 * q >= self.size - self.count

    def bounds(self, q_lo, q_hi, k_lo, k_hi):
        k_lo, k_hi, start = k_lo + 0 * q_lo, k_hi + 0 * q_lo, self.size - self.count
        crossing = k_lo // self.size != k_hi // self.size  # then the last of a stretch is inside
        some = crossing | (k_hi % self.size >= start)
        return some, (crossing ^ True | (start == 0)) & (k_lo % self.size >= start)


@dataclass(frozen=True)
class SinceChunk(Mask):
    """`k >= c(q) - recent`, c(q) being the first place of the chunk that q is in."""

    stride: int
    first: int
    recent: int

    def _chunk(self, q):
        return (q >= self.first) * (q - (q - self.first) % self.stride)

    def element(self, q, k):
        return k >= self._chunk(q) - self.recent

    def bounds(self, q_lo, q_hi, k_lo, k_hi):
        return self.element(q_lo, k_hi), self.element(q_hi, k_lo)
