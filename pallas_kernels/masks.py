"""Lazy masks: who may see whom, asked of elements or of whole blocks.

A mask is a frozen, hashable expression over *order indices*, the places of a query and a key in
the text. It is never materialised for a whole sequence. Kernels ask it two questions:

- `element(q, k)`: is key `k` visible to query `q`? Elementwise over broadcastable integer arrays.
- `bounds(q_lo, q_hi, k_lo, k_hi) -> (any, all)`: may some pair of the block be visible, and are
  all of them? Interval ends are inclusive. The answer is conservative: `any` may be true for an
  empty block and `all` false for a full one, never the other way round.

Atoms combine with `&`, `|` and `~`. Both questions use only comparisons and logic, so the same
code runs on Python integers, NumPy arrays (at trace time) and traced JAX arrays.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Mask:
    """Base of all masks; subclasses answer `element` and `bounds`."""

    def element(self, q, k):
        raise NotImplementedError

    def bounds(self, q_lo, q_hi, k_lo, k_hi):
        raise NotImplementedError

    def __and__(self, other: Mask) -> Mask:
        return And(self, other) if isinstance(other, Mask) else NotImplemented

    def __or__(self, other: Mask) -> Mask:
        return Or(self, other) if isinstance(other, Mask) else NotImplemented

    def __invert__(self) -> Mask:
        return Not(self)


@dataclass(frozen=True)
class Everything(Mask):
    """Every key is visible to every query."""

    def element(self, q, k):
        return np.ones(np.broadcast_shapes(np.shape(q), np.shape(k)), bool)

    def bounds(self, q_lo, q_hi, k_lo, k_hi):
        whole = np.ones(np.broadcast_shapes(np.shape(q_lo), np.shape(k_lo)), bool)
        return whole, whole


@dataclass(frozen=True)
class Causal(Mask):
    """A key is visible to queries at or after it: `k <= q`."""

    def element(self, q, k):
        return k <= q

    def bounds(self, q_lo, q_hi, k_lo, k_hi):
        return k_lo <= q_hi, k_hi <= q_lo


@dataclass(frozen=True)
class Window(Mask):
    """A key is visible while it is less than `size` behind the query: `q - k < size`.

    Keys ahead of the query are inside the window too; combine with `causal()` to hide them.
    """

    size: int

    def __post_init__(self):
        if isinstance(self.size, bool) or operator.index(self.size) < 1:
            raise ValueError(f"window({self.size!r}): the size must be an integer of at least 1")

    def element(self, q, k):
        return q - k < self.size

    def bounds(self, q_lo, q_hi, k_lo, k_hi):
        return q_lo - k_hi < self.size, q_hi - k_lo < self.size


@dataclass(frozen=True)
class And(Mask):
    """Visible in both masks."""

    left: Mask
    right: Mask

    def element(self, q, k):
        return self.left.element(q, k) & self.right.element(q, k)

    def bounds(self, q_lo, q_hi, k_lo, k_hi):
        any_l, all_l = self.left.bounds(q_lo, q_hi, k_lo, k_hi)
        any_r, all_r = self.right.bounds(q_lo, q_hi, k_lo, k_hi)
        return any_l & any_r, all_l & all_r


@dataclass(frozen=True)
class Or(Mask):
    """Visible in at least one of the masks."""

    left: Mask
    right: Mask

    def element(self, q, k):
        return self.left.element(q, k) | self.right.element(q, k)

    def bounds(self, q_lo, q_hi, k_lo, k_hi):
        any_l, all_l = self.left.bounds(q_lo, q_hi, k_lo, k_hi)
        any_r, all_r = self.right.bounds(q_lo, q_hi, k_lo, k_hi)
        return any_l | any_r, all_l | all_r


@dataclass(frozen=True)
class Not(Mask):
    """Visible exactly where the inner mask hides."""

    inner: Mask

    # `x ^ True` is logical "not" for Python bools too, where `~True` would be -2.
    def element(self, q, k):
        return self.inner.element(q, k) ^ True

    def bounds(self, q_lo, q_hi, k_lo, k_hi):
        some, whole = self.inner.bounds(q_lo, q_hi, k_lo, k_hi)
        return whole ^ True, some ^ True


def causal() -> Mask:
    """Keys at or before the query."""
    return Causal()


def window(size: int) -> Mask:
    """Keys less than `size` behind the query, and all keys ahead of it."""
    return Window(size)


def everything() -> Mask:
    """All keys."""
    return Everything()
