"""The algebra of masks: what a mask answers, and how masks combine with `&`, `|` and `~`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Mask:
    """Base of all masks; subclasses answer `element`, `bounds` and `shift_invariant`.

    `element` and `bounds` return flags of the full broadcast shape of the queries and the keys,
    also where only one of the two matters.
    """

    def element(self, q, k):
        """Whether the query at place q sees the key at place k."""
        raise NotImplementedError(f"{type(self).__name__} is no question about one query and key")

    def bounds(self, q_lo, q_hi, k_lo, k_hi):
        """(any, all) of the queries from q_lo to q_hi and the keys from k_lo to k_hi.

        Where it is not known, the first is true and the second false.
        """
        raise NotImplementedError(f"{type(self).__name__} is no question about a block of pairs")

    @property
    def shift_invariant(self) -> bool:
        """Whether the mask depends on `q - k` only, so that any common origin serves."""
        return False

    @property
    def arithmetic(self) -> bool:
        """Whether `element` is integer arithmetic with scalars, as a kernel's body must be.

        A long list of places or blocks is looked up in an array instead.
        """
        return True

    # A mask of several heads combines part by part: its own reflected operators do that.
    def __and__(self, other: Mask) -> Mask:
        return And(self, other) if _single(other) else NotImplemented

    def __or__(self, other: Mask) -> Mask:
        return Or(self, other) if _single(other) else NotImplemented

    def __invert__(self) -> Mask:
        return Not(self)

    def __bool__(self):
        raise TypeError(
            "a mask is neither true nor false: `a and b` is b alone; combine masks with &, | and ~"
        )


def _single(other) -> bool:
    return isinstance(other, Mask) and not isinstance(other, PerHead)


@dataclass(frozen=True)
class _Pair(Mask):
    left: Mask
    right: Mask

    @property
    def shift_invariant(self) -> bool:
        return self.left.shift_invariant and self.right.shift_invariant

    @property
    def arithmetic(self) -> bool:
        return self.left.arithmetic and self.right.arithmetic


@dataclass(frozen=True)
class And(_Pair):
    """Visible in both masks."""

    def element(self, q, k):
        return self.left.element(q, k) & self.right.element(q, k)

    def bounds(self, q_lo, q_hi, k_lo, k_hi):
        any_l, all_l = self.left.bounds(q_lo, q_hi, k_lo, k_hi)
        any_r, all_r = self.right.bounds(q_lo, q_hi, k_lo, k_hi)
        return any_l & any_r, all_l & all_r


@dataclass(frozen=True)
class Or(_Pair):
    """Visible in at least one of the masks."""

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

    @property
    def shift_invariant(self) -> bool:
        return self.inner.shift_invariant

    @property
    def arithmetic(self) -> bool:
        return self.inner.arithmetic

    # `x ^ True` is logical "not" for Python bools too, where `~True` would be -2.
    def element(self, q, k):
        return self.inner.element(q, k) ^ True

    def bounds(self, q_lo, q_hi, k_lo, k_hi):
        some, whole = self.inner.bounds(q_lo, q_hi, k_lo, k_hi)
        return whole ^ True, some ^ True


@dataclass(frozen=True)
class PerHead(Mask):
    """Different masks for consecutive groups of query heads: `parts` of (mask, heads).

    Not a question about one query and one key, so `element` and `bounds` refuse; `by_heads` gives
    the parts, each of which is an ordinary mask.
    """

    parts: tuple[tuple[Mask, int], ...]

    def __post_init__(self):
        for mask, heads in self.parts:
            if not _single(mask):
                raise ValueError(f"per_head: {mask!r} is no mask of one head; give (mask, heads)")
            if isinstance(heads, bool) or not isinstance(heads, int) or heads < 1:
                raise ValueError(
                    f"per_head: a part of {heads!r} heads; the number must be an integer of at "
                    "least 1"
                )
        if not self.parts:
            raise ValueError("per_head(): give at least one (mask, heads)")

    @property
    def heads(self) -> int:
        """The number of query heads that the parts cover."""
        return sum(heads for _, heads in self.parts)

    @property
    def shift_invariant(self) -> bool:
        return all(mask.shift_invariant for mask, _ in self.parts)

    @property
    def arithmetic(self) -> bool:
        return all(mask.arithmetic for mask, _ in self.parts)

    def element(self, q, k):
        raise TypeError("a mask per head has no single element test; take its parts by_heads()")

    def bounds(self, q_lo, q_hi, k_lo, k_hi):
        raise TypeError("a mask per head has no single bounds; take its parts by_heads()")

    def __and__(self, other):
        return self._combine(other, lambda a, b: a & b)

    def __rand__(self, other):
        return self._combine(other, lambda a, b: b & a)

    def __or__(self, other):
        return self._combine(other, lambda a, b: a | b)

    def __ror__(self, other):
        return self._combine(other, lambda a, b: b | a)

    def __invert__(self):
        return PerHead(tuple((~mask, heads) for mask, heads in self.parts))

    def _combine(self, other, join: Callable[[Mask, Mask], Mask]):
        if not isinstance(other, Mask):
            return NotImplemented
        others = by_heads(other, self.heads)
        ends = [list(accumulate(heads for _, heads in parts)) for parts in (self.parts, others)]
        parts, start, i, j = [], 0, 0, 0
        while start < self.heads:
            stop = min(ends[0][i], ends[1][j])
            parts.append((join(self.parts[i][0], others[j][0]), stop - start))
            i, j, start = i + (stop == ends[0][i]), j + (stop == ends[1][j]), stop
        return PerHead(tuple(parts))


def by_heads(mask: Mask, heads: int) -> tuple[tuple[Mask, int], ...]:
    """(mask, number of heads) of consecutive query heads; one part unless masks differ by head."""
    if not isinstance(mask, PerHead):
        return ((mask, heads),)
    if mask.heads != heads:
        raise ValueError(
            f"per_head: the parts cover {mask.heads} query heads and are used with {heads}; "
            "the numbers must agree"
        )
    return mask.parts
