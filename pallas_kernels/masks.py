"""Masks: which keys a query sees, as expressions that kernels test per element or per block.

A mask is a frozen, hashable expression over *order indices*, the positions of a query and a key
in their document. It is never materialised for a whole sequence. A mask has two methods:

- `element(q, k)`: whether key `k` is visible to query `q`, elementwise over broadcastable integer
  arrays.
- `bounds(q_lo, q_hi, k_lo, k_hi) -> (any, all)`: whether some pair of the block may be visible, and
  whether all pairs are. Interval ends are inclusive. The result is conservative: `any` may be true
  for an empty block and `all` false for a full one, never the other way round.

Masks combine with `&`, `|` and `~`; `per_head` combines different masks for different query heads.
A mask that depends on `q - k` only is `shift_invariant`.

Both methods use only integer arithmetic and comparisons. So one formula serves Python integers,
NumPy arrays (at trace time) and traced JAX arrays, and runs inside kernels. `//` and `%` round down
in all of them, so indices below 0 (queries before every key) need no special case. Adding `0 * q`
broadcasts a test of keys only to the queries' shape. It is added to integers, because some
compilers cannot broadcast booleans. A kernel's body cannot contain constant arrays. For traced
indices a short list is therefore unrolled into comparisons with scalars; a long list is looked up
in an array, and `arithmetic` is false.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

__all__ = [
    "And", "Mask", "Not", "Or", "PerHead", "band", "by_heads", "causal", "chunk_distance", "chunks",
    "documents", "everything", "keys_in", "nothing", "per_head", "prefix", "queries_in",
    "random_blocks", "since_chunk", "stride", "tail_of", "window",
]  # fmt: skip

UNROLLED = 128  # longest list that is unrolled
NEAR = 2**30  # numbers below it can be subtracted from order indices above -NEAR without overflow
# A table of random blocks is summed over rectangles up to this many cells (16 MB).
SUMMED_CELLS = 2**22
NO_BLOCK = -(2**31)  # fills unused entries of a table: no key is in this block


@dataclass(frozen=True)
class Mask:
    """Base of all masks; subclasses define `element`, `bounds` and `shift_invariant`.

    `element` and `bounds` return flags of the full broadcast shape of the queries and the keys,
    even if the mask depends on only one of the two.
    """

    def element(self, q, k):
        """Returns whether the query with order index q sees the key with order index k."""
        raise NotImplementedError(f"{type(self).__name__} has no element test")

    def bounds(self, q_lo, q_hi, k_lo, k_hi):
        """Returns (any, all) over the queries from q_lo to q_hi and the keys from k_lo to k_hi.

        Where a flag is not known, `any` is true and `all` is false.
        """
        raise NotImplementedError(f"{type(self).__name__} has no bounds of a block")

    @property
    def shift_invariant(self) -> bool:
        """Whether the mask depends on `q - k` only, so that indices may have any common origin."""
        return False

    @property
    def arithmetic(self) -> bool:
        """Whether `element` uses only integer arithmetic with scalars, as a kernel's body must.

        Masks that look up a long list of indices or blocks in an array do not.
        """
        return True

    # A PerHead operand combines part by part, which its reflected operators do.
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

    @staticmethod
    def combine(a, b):
        raise NotImplementedError

    @property
    def shift_invariant(self) -> bool:
        return self.left.shift_invariant and self.right.shift_invariant

    @property
    def arithmetic(self) -> bool:
        return self.left.arithmetic and self.right.arithmetic

    def element(self, q, k):
        return self.combine(self.left.element(q, k), self.right.element(q, k))

    def bounds(self, q_lo, q_hi, k_lo, k_hi):
        bounds = (mask.bounds(q_lo, q_hi, k_lo, k_hi) for mask in (self.left, self.right))
        return tuple(self.combine(a, b) for a, b in zip(*bounds, strict=True))


class And(_Pair):
    """Shows the pairs that both masks show."""

    combine = staticmethod(operator.and_)


class Or(_Pair):
    """Shows the pairs that at least one of the masks shows."""

    combine = staticmethod(operator.or_)


@dataclass(frozen=True)
class Not(Mask):
    """Shows exactly the pairs that the inner mask hides."""

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
    """Different masks for consecutive query heads: `parts` of (mask, number of heads).

    `element` and `bounds` raise a TypeError; `by_heads` returns the parts, each of which is an
    ordinary mask.
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
        raise TypeError(
            "a mask per head has no single element test; use by_heads() to get its parts"
        )

    def bounds(self, q_lo, q_hi, k_lo, k_hi):
        raise TypeError("a mask per head has no single bounds; use by_heads() to get its parts")

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
    """Returns (mask, number of heads) for runs of query heads; one run unless masks differ."""
    if not isinstance(mask, PerHead):
        return ((mask, heads),)
    if mask.heads != heads:
        raise ValueError(
            f"per_head: the parts cover {mask.heads} query heads and are used with {heads}; "
            "the numbers must agree"
        )
    return mask.parts


def integer(name: str, value, least: int | None = None) -> int:
    """Returns `value` as an int.

    Raises a ValueError that begins with `name` unless `value` is an integer of at least `least`
    that fits into 32 bits.
    """
    rule = "an integer" if least is None else f"an integer of at least {least}"
    try:
        number = None if isinstance(value, (bool, np.bool_)) else operator.index(value)
    except TypeError:
        number = None
    if number is None or (least is not None and number < least):
        raise ValueError(f"{name}={value!r} must be {rule}")
    if abs(number) >= 2**31:
        raise ValueError(f"{name}={value!r} must fit into 32 bits")
    return number


def floor_divide(x, n: int):
    """Returns x // n; that of JAX needs `sign`, which the TPU compiler lowers only on a TPU."""
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

    # The flags do not depend on the indices: NumPy keeps tables static for traced indices.
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
        # A bound for each query costs a kernel less than a difference for each pair.
        return q - self.size < k if self.size < NEAR else q - k < self.size

    def bounds(self, q_lo, q_hi, k_lo, k_hi):
        return q_lo - k_hi < self.size, q_hi - k_lo < self.size


@dataclass(frozen=True)
class Band(Invariant):
    """`low <= q - k <= high`."""

    low: int
    high: int

    def element(self, q, k):
        if max(abs(self.low), abs(self.high)) < NEAR:
            return (k <= q - self.low) & (q - self.high <= k)
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
        """Returns whether some, and whether all, differences from least to most are in range."""
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
    """`k >= c(q) - recent`, where c(q) is the first index of the chunk of q."""

    stride: int
    first: int
    recent: int

    def _chunk(self, q):
        return (q >= self.first) * (q - (q - self.first) % self.stride)

    def element(self, q, k):
        return k >= self._chunk(q) - self.recent

    def bounds(self, q_lo, q_hi, k_lo, k_hi):
        return self.element(q_lo, k_hi), self.element(q_hi, k_lo)


def _count_up_to(values: tuple[int, ...], x, side: str = "right"):
    """Returns how many of the sorted `values` are at most x ("right") or below x ("left")."""
    if not isinstance(x, jax.Array):
        return np.searchsorted(np.asarray(values, np.int64), x, side=side)
    if len(values) > UNROLLED:
        return jnp.searchsorted(jnp.asarray(values, x.dtype), x, side=side)
    flags = (x >= v if side == "right" else x > v for v in values)
    return sum((flag.astype(x.dtype) for flag in flags), 0 * x)


def _pick(values: tuple[int, ...], i, default: int):
    """Returns values[i], or `default` where i is out of range."""
    if isinstance(i, jax.Array) and len(values) <= UNROLLED:
        picked = jnp.full_like(i, default)
        for index, value in enumerate(values):
            picked = jnp.where(i == index, value, picked)
        return picked
    xp = jnp if isinstance(i, jax.Array) else np
    inside = (i >= 0) & (i < len(values))
    return xp.where(inside, xp.asarray(values, np.int32)[xp.clip(i, 0, len(values) - 1)], default)


@dataclass(frozen=True)
class _Listed(Mask):
    indices: tuple[int, ...]

    @property
    def arithmetic(self) -> bool:
        return len(self.indices) <= UNROLLED

    def _inside(self, lo, hi):
        """Returns the number of listed indices from lo to hi."""
        return _count_up_to(self.indices, hi) - _count_up_to(self.indices, lo, "left")


@dataclass(frozen=True)
class KeysIn(_Listed):
    """The listed keys, for every query."""

    def element(self, q, k):
        return self._inside(k, k) + 0 * q > 0

    def bounds(self, q_lo, q_hi, k_lo, k_hi):
        count = self._inside(k_lo, k_hi) + 0 * q_lo
        return count > 0, count > k_hi - k_lo


@dataclass(frozen=True)
class QueriesIn(_Listed):
    """All keys, for the listed queries."""

    def element(self, q, k):
        return self._inside(q, q) + 0 * k > 0

    def bounds(self, q_lo, q_hi, k_lo, k_hi):
        count = self._inside(q_lo, q_hi) + 0 * k_lo
        return count > 0, count > q_hi - q_lo


@dataclass(frozen=True)
class Documents(_Listed):
    """Keys of the query's own document; documents begin at the listed indices."""

    def element(self, q, k):
        return _count_up_to(self.indices, q) == _count_up_to(self.indices, k)

    def bounds(self, q_lo, q_hi, k_lo, k_hi):
        q_lo, q_hi, k_lo, k_hi = (_count_up_to(self.indices, x) for x in (q_lo, q_hi, k_lo, k_hi))
        return (q_lo <= k_hi) & (k_lo <= q_hi), (q_lo == k_hi) & (q_hi == k_lo)


@dataclass(frozen=True)
class RandomBlocks(Mask):
    """Key blocks listed for each block of queries: `k // block in table[q // block]`."""

    block: int
    table: tuple[tuple[int, ...], ...]

    @property
    def arithmetic(self) -> bool:
        return len(self.table) <= UNROLLED

    @functools.cached_property
    def _columns(self) -> tuple[tuple[int, ...], ...]:
        width = max(map(len, self.table), default=0)
        return tuple(zip(*(row + (NO_BLOCK,) * (width - len(row)) for row in self.table)))

    @functools.cached_property
    def _sums(self) -> np.ndarray | None:
        """sums[i, j]: the number of listed pairs of query blocks below i and key blocks below j."""
        rows, columns = (
            len(self.table),
            1 + max((max(r, default=-1) for r in self.table), default=-1),
        )
        if (rows + 1) * (columns + 1) > SUMMED_CELLS:
            return None
        sums = np.zeros((rows + 1, columns + 1), np.int32)
        for i, row in enumerate(self.table):
            sums[i + 1, np.asarray(row, np.int64) + 1] = 1
        return sums.cumsum(0, dtype=np.int32).cumsum(1, dtype=np.int32)

    def element(self, q, k):
        q, k = floor_divide(q, self.block), floor_divide(k, self.block)
        seen = 0 * q + 0 * k != 0
        for column in self._columns:
            seen = seen | (_pick(column, q, NO_BLOCK) == k)
        return seen

    def bounds(self, q_lo, q_hi, k_lo, k_hi):
        q_lo, q_hi, k_lo, k_hi = (x // self.block for x in (q_lo, q_hi, k_lo, k_hi))
        if self._sums is None:  # too large to sum: any block of the table may be listed
            some = (q_hi >= 0) & (q_lo < len(self.table)) & (k_hi + 0 * q_lo >= 0)
            return some, some & (0 * q_lo != 0)
        traced = any(isinstance(x, jax.Array) for x in (q_lo, q_hi, k_lo, k_hi))
        xp, rows, columns = (jnp if traced else np), *(n - 1 for n in self._sums.shape)
        sums = xp.asarray(self._sums)
        i, j = xp.clip(q_lo, 0, rows), xp.clip(k_lo, 0, columns)
        m, n = xp.clip(q_hi + 1, 0, rows), xp.clip(k_hi + 1, 0, columns)
        count = sums[m, n] - sums[i, n] - sums[m, j] + sums[i, j]
        return count > 0, count == (q_hi - q_lo + 1) * (k_hi - k_lo + 1)


def everything() -> Mask:
    """Returns a mask that shows all keys."""
    return Everything()


def nothing() -> Mask:
    """Returns a mask that shows no keys."""
    return Nothing()


def causal() -> Mask:
    """Returns a mask that shows keys at or before the query: `k <= q`."""
    return Causal()


def window(size: int) -> Mask:
    """Returns a mask that shows keys less than `size` behind the query: `q - k < size`.

    It shows all keys ahead of the query; combine it with `causal()` to hide them.
    """
    return Window(integer("window: size", size, 1))


def band(low: int, high: int) -> Mask:
    """Returns a mask that shows keys `low` to `high` behind the query: `low <= q - k <= high`.

    `band(-w, w)` is an encoder's window; `band(-w * r, w * r) & stride(r)` dilates it by r
    (Longformer, Beltagy et al. 2020, sec. 3.1).
    """
    low = integer("band: low", low)
    return Band(low, integer("band: high", high, low))


def stride(n: int) -> Mask:
    """Returns a mask that shows every n-th key, counted from the query: `(q - k) % n == 0`.

    The strided pattern of the Sparse Transformer (Child et al. 2019, sec. 4.3).
    """
    return Stride(integer("stride: n", n, 1))


def tail_of(n: int, c: int) -> Mask:
    """Returns a mask that shows the last `c` keys of every stretch of `n`: `k % n >= n - c`.

    The summaries of the fixed pattern of the Sparse Transformer (Child et al. 2019, sec. 4.3).
    """
    n, c = integer("tail_of: n", n, 1), integer("tail_of: c", c, 1)
    if c > n:
        raise ValueError(f"tail_of({n}, {c}): c must not exceed n; at most {n}")
    return TailOf(n, c)


def prefix(n: int) -> Mask:
    """Returns a mask that shows the first `n` keys, such as attention sinks: `k < n`."""
    return Prefix(integer("prefix: n", n, 0))


def chunks(size: int, shift: int = 0) -> Mask:
    """Returns a mask that shows keys of the query's own chunk.

    `(q + shift) // size == (k + shift) // size`.
    """
    return chunk_distance(size, 0, 0, shift)


def chunk_distance(size: int, low: int, high: int | None = None, shift: int = 0) -> Mask:
    """Returns a mask that shows keys whose chunk is `low` to `high` chunks behind the query's.

    `low <= (q + shift) // size - (k + shift) // size <= high`; None leaves `high` open.
    """
    size, low = integer("chunk_distance: size", size, 1), integer("chunk_distance: low", low)
    high = None if high is None else integer("chunk_distance: high", high, low)
    return ChunkDistance(size, low, high, integer("chunk_distance: shift", shift))


def since_chunk(stride: int, first: int, recent: int) -> Mask:
    """Returns a mask that shows keys from `recent` before the query's chunk: `k >= c(q) - recent`.

    c(q) is the first index of the query's chunk. The first chunk has `first` tokens and the others
    `stride`, so c(q) is 0 for q < first, and first + (q - first) // stride * stride after it. This
    is the parallel form of a cache that is fed chunk by chunk, and keeps the `recent` last keys
    between chunks (StreamingLLM, Xiao et al. 2023).
    """
    return SinceChunk(
        integer("since_chunk: stride", stride, 1),
        integer("since_chunk: first", first, 0),
        integer("since_chunk: recent", recent, 0),
    )


def keys_in(indices: Iterable[int]) -> Mask:
    """Returns a mask that shows the listed keys to every query."""
    return KeysIn(_sorted("keys_in: indices", indices))


def queries_in(indices: Iterable[int]) -> Mask:
    """Returns a mask that shows all keys to the listed queries, and none to others."""
    return QueriesIn(_sorted("queries_in: indices", indices))


def documents(starts: Iterable[int]) -> Mask:
    """Returns a mask that shows keys of the query's document; documents begin at `starts`."""
    return Documents(_sorted("documents: starts", starts))


def random_blocks(block: int, table: Sequence[Sequence[int]]) -> Mask:
    """Returns a mask that shows listed blocks: `k // block in table[q // block]`.

    Queries beyond the table see no key. It is the random part of BigBird (Zaheer et al. 2020,
    sec. 2), or any static list of blocks.
    """
    rows = tuple(
        tuple(sorted({integer("random_blocks: a key block", x, 0) for x in row})) for row in table
    )
    return RandomBlocks(integer("random_blocks: block", block, 1), rows)


def per_head(*parts: tuple[Mask, int]) -> PerHead:
    """Combines masks of consecutive query heads, given as pairs (mask, number of heads).

    For example `per_head((chunks(8), 16), (chunks(8, shift=4), 16))`.
    """
    if not all(isinstance(part, tuple) and len(part) == 2 for part in parts):
        raise ValueError(f"per_head{parts!r}: each part must be a pair (mask, number of heads)")
    return PerHead(parts)


def _sorted(name: str, indices: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted({integer(name, x) for x in indices}))
