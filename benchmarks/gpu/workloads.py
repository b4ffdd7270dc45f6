"""The workloads of `attention.py`: masks, shapes, their FLOPs, and an oracle for their results.

Groups: a dense and causal, b windows, c windows with sinks, d masks per head, e packed documents,
f random blocks, g cross-attention, h Landmark's grouped softmax, i two calls merged and one,
j one query over a long cache.
Lengths are given in units of 1,024 tokens; a unit of 8 makes small ones for CPUs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import (
    by_heads,
    causal,
    chunk_distance,
    chunks,
    everything,
    explain,
    flash,
    landmark_attention,
    merge,
    per_head,
    prefix,
    window,
)
from pallas_kernels.landmark import own_block
from pallas_kernels.masks import Mask
from pallas_kernels.tables import from_block_mask, from_mask

UNIT = 1024
HEADS = {"16/16": (16, 16), "32/8": (32, 8), "9/3": (9, 3)}
USUAL = 4  # most usual workloads of a shape: causal, packed documents, a window, decoding
SHARES = (1.0, 0.125, 0.05, 0.01, 0.5, 0.25)
ORACLE_SCORES = 2**28  # float32 scores that the oracle holds at a time


@dataclass(frozen=True)
class Workload:
    """One attention: batch 1, bfloat16, T queries and S keys of `size` channels."""

    group: str
    what: str
    t: int
    s: int
    size: int
    heads: int
    kv_heads: int
    mask: Mask
    block: int = 128  # block size of tables, and the unit of "visited"
    density: float | None = None  # share of the blocks that a random table lists
    documents: int = 0
    filled: int | None = None  # number of keys that exist; the others are empty slots
    landmark: int = 0  # tokens of a block of Landmark attention
    parts: tuple[Mask, ...] = ()  # masks of several calls that are merged

    @property
    def name(self) -> str:
        heads = f"{self.heads}/{self.kv_heads} heads of {self.size}"
        return f"{self.group} {self.what}, {short(self.t)} x {short(self.s)}, {heads}"

    @property
    def shape(self) -> str:
        return f"{self.t} x {self.s}, {self.heads}/{self.kv_heads} of {self.size}"

    @functools.cached_property
    def segments(self) -> np.ndarray | None:
        """Numbers of random documents, int32 [1, T]."""
        if not self.documents:
            return None
        cuts = np.random.default_rng(0).choice(self.t - 1, self.documents - 1, replace=False) + 1
        return (1 + np.searchsorted(np.sort(cuts), np.arange(self.t), side="right"))[None].astype(
            np.int32
        )

    @functools.cached_property
    def listed(self) -> np.ndarray | None:
        """Blocks of a random table, bool [nq, nk]: exactly `density`, at least one per row."""
        if self.density is None:
            return None
        rows, columns = -(-self.t // self.block), -(-self.s // self.block)
        rng = np.random.default_rng(0)
        listed = np.zeros((rows, columns), bool)
        listed[np.arange(rows), rng.integers(0, columns, rows)] = True
        more = max(0, round(self.density * listed.size) - rows)
        listed.flat[rng.permutation(np.flatnonzero(~listed))[:more]] = True
        return listed

    def table(self):
        """Returns the visited blocks as a static BlockTable, per head if masks differ by head."""
        if self.listed is not None:
            return from_block_mask(self.listed, full=self.listed, **self._blocks)
        return from_mask(self.mask, queries=self.t, keys=self.s, **self._blocks, **self._ids())

    @property
    def _blocks(self):
        return {"q_block": self.block, "k_block": self.block}

    def _ids(self) -> dict:
        if self.segments is not None:
            return {"q_segments": self.segments, "k_segments": self.segments}
        if self.filled is None:
            return {}
        k_segments = (np.arange(self.s) < self.filled)[None].astype(np.int32)
        return {"q_segments": np.ones((1, self.t), np.int32), "k_segments": k_segments}

    def places(self) -> dict:
        """Returns the arrays that `flash` takes besides q, k and v, by name."""
        if self.filled is not None:
            return {"k_lengths": jnp.asarray([self.filled], jnp.int32)}
        return {name: jnp.asarray(x) for name, x in self._ids().items()}

    def attention(self, implementation: str | None):
        """Returns the function q, k, v -> out of one of lcjax's implementations."""
        if self.landmark:
            return lambda q, k, v: landmark_attention(
                q, k, v, self.landmark, implementation=implementation
            )[0]
        table = self.table() if self.listed is not None else None
        options = {"table": table, "implementation": implementation, **self.places()}
        if not self.parts:
            return lambda q, k, v: flash(q, k, v, self.mask, **options)[0]
        return lambda q, k, v: merge([flash(q, k, v, part, **options) for part in self.parts])[0]

    @functools.cached_property
    def kinds(self) -> set[str]:
        """The kinds of its calls (`pallas_kernels.timings`)."""
        q, k = (
            jax.ShapeDtypeStruct((1, t, n, self.size), jnp.bfloat16)
            for t, n in ((self.t, self.heads), (self.s, self.kv_heads))
        )
        kinds = {x.kind for x in explain(self.attention("xla"), q, k, k)}
        if self.landmark:  # the query's own block is ordinary attention
            kinds = {x for x in kinds if x.startswith("landmark")}
        return kinds

    @property
    def kind(self) -> str | None:
        """The kind by which implementations are ranked for such calls; None: several calls."""
        return next(iter(self.kinds)) if len(self.kinds) == 1 and not self.parts else None

    @functools.cached_property
    def pairs(self) -> tuple[int, int]:
        """Numbers of query-key pairs over all query heads: (visible, in visited blocks)."""
        if self.listed is not None:
            pairs = _pairs(self, everything(), self.table())
            return tuple(self.heads * x for x in pairs)
        pairs = np.zeros(2, np.int64)
        for mask, count in by_heads(self.mask, self.heads):
            sizes = dict(queries=self.t, keys=self.s, **self._blocks)
            table = from_mask(mask, **sizes, **self._ids())
            pairs += count * np.array(_pairs(self, mask, table))
        return int(pairs[0]), int(pairs[1])

    def flops(self, which: str) -> tuple[float, float]:
        """Returns FLOPs of a call: (visible pairs, visited blocks); backward is 2.5 x forward."""
        factor = {"fwd": 4, "bwd": 10, "both": 14}[which] * self.size
        return factor * self.pairs[0], factor * self.pairs[1]

    def arrays(self, dtype="bfloat16"):
        """Returns random q [1, T, N, H], k and v [1, S, K, H], and a cotangent of the output."""
        keys = jax.random.split(jax.random.key(0), 4)
        q, k = (1, self.t, self.heads, self.size), (1, self.s, self.kv_heads, self.size)
        shapes = (q, k, k, q)
        return [
            jax.random.normal(key, x, jnp.float32).astype(dtype) for key, x in zip(keys, shapes)
        ]

    def rows(self) -> np.ndarray:
        """Returns the queries to compare with the oracle: the first, the last and random ones."""
        count = min(self.t, 512, max(2, ORACLE_SCORES // (self.heads * self.s)))
        inner = np.random.default_rng(1).permutation(np.arange(1, self.t - 1))[: count - 2]
        return np.unique(np.concatenate([[0], inner, [self.t - 1]])).astype(np.int32)


def _pairs(w: Workload, mask: Mask, table) -> tuple[int, int]:
    """Returns (visible, visited) pairs of one head; counts elements in partly masked blocks."""
    heights = np.minimum(w.block, w.t - w.block * np.arange(table.seen.shape[2]))
    widths = np.minimum(w.block, w.s - w.block * np.arange(-(-w.s // w.block)))
    index, listed = table.index[0, 0], table.listed[0, 0]
    areas = heights[:, None] * widths[index]
    visited = int(areas[listed].sum())
    if w.listed is not None:
        return visited, visited
    visible = int(areas[table.known_full[0, 0]].sum())
    rows, places = np.nonzero(listed & ~table.known_full[0, 0])
    for some in np.array_split(np.arange(len(rows)), 1 + len(rows) * w.block**2 // 2**24):
        visible += _visible_inside(w, mask, rows[some], index[rows[some], places[some]])
    return visible, visited


def _visible_inside(w: Workload, mask: Mask, rows, columns) -> int:
    q = (w.block * rows[:, None] + np.arange(w.block))[:, :, None]
    k = (w.block * columns[:, None] + np.arange(w.block))[:, None, :]
    seen = mask.element(q, k) & (q < w.t) & (k < w.s)
    if ids := w._ids():
        q_ids = ids["q_segments"][0][np.minimum(q, w.t - 1)]
        k_ids = ids["k_segments"][0][np.minimum(k, w.s - 1)]
        seen = seen & (q_ids == k_ids) & (k_ids != 0)
    return int(seen.sum())


def oracle(w: Workload, arrays) -> dict:
    """Returns dense float32 results for the queries `w.rows()`.

    out and dq are those of these rows; dk and dv are complete, because the cotangents of all other
    rows are zero.
    """
    rows = w.rows()

    @jax.jit
    def run(q, k, v, d_out):
        q, k, v, d_out = (x.astype(jnp.float32) for x in (q, k, v, d_out))
        out, pull = jax.vjp(functools.partial(_dense, w, rows), q[:, rows], k, v)
        return out, *pull(d_out[:, rows])

    return dict(zip(("out", "dq", "dk", "dv"), run(*arrays), strict=True))


def _dense(w: Workload, rows, q, k, v):
    options = {"q_index": rows, "implementation": "reference"}
    if w.landmark:
        return landmark_attention(q, k, v, w.landmark, **options)[0]
    places = w.places()
    if "q_segments" in places:
        places["q_segments"] = places["q_segments"][:, rows]
    table = None
    if w.listed is not None:
        visible = w.listed[rows // w.block]
        table = from_block_mask(visible, full=visible, q_block=1, k_block=w.block)
    return flash(q, k, v, w.mask, table=table, **options, **places)[0]


def workloads(unit: int = UNIT) -> list[Workload]:
    """Returns all workloads, those that matter most to models first.

    The `USUAL` workloads of all shapes come before the other workloads.
    """
    small = unit < UNIT
    sizes = (128, 64) if not small else (32, 16)
    heads = list(HEADS.values()) if not small else [(2, 2), (4, 2), (3, 1)]
    pairs = ((0, 0), (1, 0), (2, 1), (0, 1), (1, 1), (2, 0))
    shapes = [_Shape(unit, *heads[x], sizes[y]).workloads() for x, y in pairs]
    parts = slice(USUAL), slice(USUAL, None)
    return [w for part in parts for shape in shapes for w in shape[part]]


class _Shape(NamedTuple):
    """Heads and their size, and a unit of tokens in which lengths are given."""

    unit: int
    heads: int
    kv_heads: int
    size: int

    def make(self, group, what, length, mask, keys=None, **more) -> Workload:
        t, s = self.unit * length, self.unit * (length if keys is None else keys)
        block = 128 if self.unit == UNIT else 16
        return Workload(
            group, what, t, s, self.size, self.heads, self.kv_heads, mask, block, **more
        )

    def windowed(self, tokens: int, length: int) -> Workload:
        mask = causal() & window(tokens * self.unit)
        return self.make("b", f"window {tokens}k", length, mask)

    def sinks(self, tokens: int) -> Mask:
        return causal() & (window(tokens * self.unit) | prefix(max(1, self.unit // 16)))

    def apart(self, what: str, one: Mask, other: Mask) -> Workload:
        half = self.heads // 2
        mask = per_head((one, self.heads - half), (other, half))
        return self.make("d", what, 32, mask)

    def documents(self, length: int) -> Workload:
        return self.make("e", "12 documents", length, causal(), documents=12)

    def random(self, length: int, share: float) -> Workload:
        return self.make("f", f"blocks {100 * share:g} %", length, everything(), density=share)

    def cross(self, share: float) -> Workload:
        filled = round(share * 128 * self.unit)
        return self.make("g", f"cross {share:.0%} filled", 4, everything(), 128, filled=filled)

    def decode(self, length: int) -> Workload:
        filled = self.unit * length
        one = self.make("j", "one query", 1, everything(), length, filled=filled)
        return replace(one, t=1)

    def landmark(self) -> Workload:
        block = 64 if self.unit == UNIT else 4
        mask = own_block(block) | chunk_distance(block, 1)
        return self.make("h", "Landmark", 32, mask, landmark=block)

    def merged(self) -> Workload:
        near = window(4 * self.unit)
        parts = (causal() & near, causal() & ~near)
        return self.make("i", "two calls merged", 16, causal(), parts=parts)

    def workloads(self) -> list[Workload]:
        """Returns the workloads of this shape, the `USUAL` ones first."""
        chunked = (causal() & chunks(8 * self.unit, shift=x * self.unit) for x in (0, 4))
        return [
            self.make("a", "causal", 16, causal()),
            self.documents(64),
            self.windowed(4, 128),
            self.decode(128),
            *(self.random(16, share) for share in SHARES[:4]),
            self.windowed(1, 32),
            self.make("c", "window 4k and sinks", 128, self.sinks(4)),
            self.apart("shifted chunks of 8k", *chunked),
            self.cross(0.4),
            self.cross(1.0),
            self.landmark(),
            self.merged(),
            self.make("a", "dense", 16, everything()),
            self.apart("half of the heads stream", causal(), self.sinks(1)),
            *(self.random(16, share) for share in SHARES[4:]),
            *(self.make("a", "causal", length, causal()) for length in (4, 64)),
            self.documents(128),
            self.windowed(1, 128),
            self.windowed(4, 32),
            *(self.random(64, share) for share in SHARES),
            *(self.make("a", "dense", length, everything()) for length in (4, 64)),
        ]


def short(length: int) -> str:
    return f"{length // UNIT}k" if length % UNIT == 0 else str(length)
