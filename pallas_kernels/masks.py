"""Lazy masks: who may see whom, asked of elements or of whole blocks.

A mask is a frozen, hashable expression over *order indices*, the places of a query and a key in
their document. It is never materialised for a whole sequence. Kernels ask it two questions:

- `element(q, k)`: is key `k` visible to query `q`? Elementwise over broadcastable integer arrays.
- `bounds(q_lo, q_hi, k_lo, k_hi) -> (any, all)`: may some pair of the block be visible, and are
  all of them? Interval ends are inclusive. The answer is conservative: `any` may be true for an
  empty block and `all` false for a full one, never the other way round.

Masks combine with `&`, `|` and `~`; `per_head` gives query heads masks of their own. A mask that
depends on `q - k` only is `shift_invariant`. All answers use only integer arithmetic, so the same
code runs on Python integers, NumPy arrays (at trace time) and traced JAX arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pallas_kernels import atoms, lists
from pallas_kernels.algebra import And, Mask, Not, Or, PerHead, by_heads
from pallas_kernels.atoms import integer

__all__ = [
    "And", "Mask", "Not", "Or", "PerHead", "band", "by_heads", "causal", "chunk_distance", "chunks",
    "documents", "everything", "keys_in", "nothing", "per_head", "prefix", "queries_in",
    "random_blocks", "since_chunk", "stride", "tail_of", "window",
]  # fmt: skip


def everything() -> Mask:
    """All keys."""
    return atoms.Everything()


def nothing() -> Mask:
    """No keys."""
    return atoms.Nothing()


def causal() -> Mask:
    """Keys at or before the query: `k <= q`."""
    return atoms.Causal()


def window(size: int) -> Mask:
    """Keys less than `size` behind the query, and all keys ahead of it: `q - k < size`."""
    return atoms.Window(integer("window: size", size, 1))


def band(low: int, high: int) -> Mask:
    """Keys from `low` to `high` behind the query: `low <= q - k <= high`.

    `band(-w, w)` is an encoder's window; `band(-w * r, w * r) & stride(r)` dilates it by r
    (Longformer, Beltagy et al. 2020, sec. 3.1).
    """
    low = integer("band: low", low)
    return atoms.Band(low, integer("band: high", high, low))


def stride(n: int) -> Mask:
    """Every n-th key, counted from the query: `(q - k) % n == 0`.

    The strided pattern of the Sparse Transformer (Child et al. 2019, sec. 4.3).
    """
    return atoms.Stride(integer("stride: n", n, 1))


def tail_of(n: int, c: int) -> Mask:
    """The last `c` keys of every stretch of `n`: `k % n >= n - c`.

    The summaries of the fixed pattern of the Sparse Transformer (Child et al. 2019, sec. 4.3).
    """
    n, c = integer("tail_of: n", n, 1), integer("tail_of: c", c, 1)
    if c > n:
        raise ValueError(f"tail_of({n}, {c}): c must not exceed n; at most {n}")
    return atoms.TailOf(n, c)


def prefix(n: int) -> Mask:
    """The first `n` keys, such as attention sinks: `k < n`."""
    return atoms.Prefix(integer("prefix: n", n, 0))


def chunks(size: int, shift: int = 0) -> Mask:
    """Keys of the query's own chunk: `(q + shift) // size == (k + shift) // size`."""
    return chunk_distance(size, 0, 0, shift)


def chunk_distance(size: int, low: int, high: int | None = None, shift: int = 0) -> Mask:
    """Keys whose chunk is `low` to `high` chunks behind the query's; None leaves `high` open.

    `low <= (q + shift) // size - (k + shift) // size <= high`.
    """
    size, low = integer("chunk_distance: size", size, 1), integer("chunk_distance: low", low)
    high = None if high is None else integer("chunk_distance: high", high, low)
    return atoms.ChunkDistance(size, low, high, integer("chunk_distance: shift", shift))


def since_chunk(stride: int, first: int, recent: int) -> Mask:
    """Keys from `recent` before the query's chunk on: `k >= c(q) - recent`.

    Chunks are what is fed at once: `first` tokens, then `stride` at a time, so c(q) is 0 for
    q < first and first + (q - first) // stride * stride after it. The parallel form of a cache
    that keeps the `recent` last keys between chunks (StreamingLLM, Xiao et al. 2023).
    """
    return atoms.SinceChunk(
        integer("since_chunk: stride", stride, 1),
        integer("since_chunk: first", first, 0),
        integer("since_chunk: recent", recent, 0),
    )


def keys_in(indices: Iterable[int]) -> Mask:
    """The listed keys, for every query."""
    return lists.KeysIn(_places("keys_in: indices", indices))


def queries_in(indices: Iterable[int]) -> Mask:
    """All keys, for the listed queries."""
    return lists.QueriesIn(_places("queries_in: indices", indices))


def documents(starts: Iterable[int]) -> Mask:
    """Keys of the query's own document; `starts` are the places where documents begin."""
    return lists.Documents(_places("documents: starts", starts))


def random_blocks(block: int, table: Sequence[Sequence[int]]) -> Mask:
    """Listed blocks: `k // block in table[q // block]`; queries beyond the table see nothing.

    The random part of BigBird (Zaheer et al. 2020, sec. 2), or any static block list.
    """
    rows = tuple(
        tuple(sorted({integer("random_blocks: a key block", x, 0) for x in row})) for row in table
    )
    return lists.RandomBlocks(integer("random_blocks: block", block, 1), rows)


def per_head(*parts: tuple[Mask, int]) -> PerHead:
    """Masks of consecutive query heads: `per_head((chunks(8), 16), (chunks(8, shift=4), 16))`."""
    return PerHead(tuple((mask, heads) for mask, heads in parts))


def _places(name: str, indices: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted({integer(name, x) for x in indices}))
