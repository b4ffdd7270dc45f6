"""T5's bias by buckets of distance inside a TPU kernel: no lookup per element, no table in VMEM.

Over the distance a = q_index - k_index the bias is a step function: a few dozen levels, each a
number of its head's, with fixed distances at which they start. A step whose distances all lie in
one level, as nearly all steps of a long text do, adds one scalar. The others are taken in tiles of
128 x 128, each of which runs through the levels that its own distances reach: one comparison and
one choice per element and level, in registers. The gradient of a level is the sum of the logits'
cotangents over it, collected the same way, in a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.backends.tpu.layout import LANES
from pallas_kernels.backends.tpu.tables import FULL, NOTHING, PARTIAL
from pallas_kernels.biases import RelativeBias

LEAST, MOST = np.iinfo(np.int32).min, np.iinfo(np.int32).max
MOST_LEVELS = LANES


@dataclass(frozen=True)
class Levels:
    """Level m holds the distances q - k from starts[m] to starts[m + 1] - 1, by `buckets[m]`.

    `group` query heads share a key head; the rows of a step belong to one query head.
    """

    starts: tuple[int, ...]
    buckets: tuple[int, ...]
    group: int

    @property
    def count(self) -> int:
        return len(self.starts)


def of(bias: RelativeBias, group: int) -> Levels:
    later = bias.thresholds
    buckets = range(len(later) + 1)
    if not bias.bidirectional:  # keys ahead of the query share bucket 0
        return Levels((LEAST, *later), tuple(buckets), group)
    # From the farthest key ahead to distance -1, then as above. Where a distance belongs to no
    # bucket, two levels start at the same one and the first is empty.
    ahead = (LEAST, *(1 - start for start in reversed(later)))
    half = len(later) + 1
    places = (*(half + bucket for bucket in reversed(buckets)), *buckets)
    return Levels((*ahead, 0, *later), places, group)


def scalars(bias: RelativeBias, levels: Levels) -> dict:
    """Operands in scalar memory: the starts, filled up to a power of two, and levels by head."""
    starts = np.full(1 << levels.count.bit_length(), MOST, np.int32)
    starts[: levels.count] = levels.starts
    table = bias.table.astype(jnp.float32)[np.array(levels.buckets)]
    return {"starts": jnp.asarray(starts), "levels": table.T.reshape(-1)}


def gradient(sums, bias: RelativeBias, levels: Levels) -> RelativeBias:
    """The table's cotangent from sums [B, K, 1, row blocks * 128], a level per lane."""
    batch, heads = sums.shape[:2]
    sums = sums.reshape(batch, heads, levels.group, -1, LANES).sum((0, 3))
    table = sums.reshape(-1, LANES)[:, np.argsort(levels.buckets)].T
    return RelativeBias(table, bias.max_distance, bias.bidirectional)


def visit(block, key_head, scratch, run):
    """Runs `run(masked, part)` as the kind of the step asks.

    part: None without levels, else `part.value()` is the bias of the step's scores, and
    `part.collect(d_logits, sums)` adds their cotangents to sums [levels, lanes].
    """
    kind = block.step.kind
    if block.body.levels is None:
        pl.when(kind == FULL)(lambda: run(False, None))
        pl.when(kind == PARTIAL)(lambda: run(True, None))
        return
    part = _Part(block, key_head)
    first, last = part.reached(0, block.body.rows, 0, block.body.key_block)
    one, several = _One(part, first), _Several(part, scratch)
    pl.when((kind == FULL) & (first == last))(lambda: run(False, one))
    pl.when((kind == PARTIAL) & (first == last))(lambda: run(True, one))
    pl.when((kind != NOTHING) & (first != last))(lambda: run(True, several))


class _Part:
    """Distances and levels of a step's block, or of a tile that begins at given places of it."""

    def __init__(self, block, key_head):
        body, step = block.body, block.step
        self.block, self.levels, self.x = block, body.levels, block.x
        head = key_head * self.levels.group + lax.div(step.row, jnp.int32(body.period))
        self.own = head * self.levels.count
        places = lax.rem(step.row, jnp.int32(body.period)) * body.rows, step.col * body.key_block
        self.places = dict(zip(("q_index", "k_index"), places, strict=True))

    def value(self, level):
        return self.x["levels"][self.own + level]

    def level(self, distance):
        """The level of a scalar distance, by halving."""
        starts, found, half = self.x["starts"], 0, self.x["starts"].shape[0] // 2
        while half:
            found = jnp.where(starts[found + half] <= distance, found + half, found)
            half //= 2
        return found

    def reached(self, q_start, q_size: int, k_start, k_size: int):
        """First and last level that a part of the block reaches."""
        (q_least, q_most), (k_least, k_most) = (
            self._ends(name, start, size)
            for name, start, size in (("q_index", q_start, q_size), ("k_index", k_start, k_size))
        )
        return self.level(q_least - k_most), self.level(q_most - k_least)

    def _ends(self, name, start, size: int):
        if self.x[name] is None:
            place = self.places[name] + start
            return place, place + (size - 1)
        places = self.x[name][:, pl.ds(start, size)]
        return jnp.min(places), jnp.max(places)

    def _tile_index(self, name, start, axis: int):
        """[128, 1] or [1, 128] of the places from `start` on."""
        if self.x[name] is None:
            shape = (LANES, 1) if axis == 0 else (1, LANES)
            return self.places[name] + start + lax.broadcasted_iota(jnp.int32, shape, axis)
        if name in self.block.columns:
            return self.block.columns[name][pl.ds(start, LANES), :1]
        return self.x[name][:, pl.ds(start, LANES)]

    def each_tile(self, shape, run):
        """`run(tile, distances [128, 128], first, last)` for all tiles of scores of `shape`."""
        turned = self.block.turned

        def tile(i, j):
            i, j = (pl.multiple_of(n * LANES, LANES) for n in (i, j))
            q, k = (j, i) if turned else (i, j)
            q_index = self._tile_index("q_index", q, int(turned))
            distances = q_index - self._tile_index("k_index", k, int(not turned))
            run((pl.ds(i, LANES), pl.ds(j, LANES)), distances, *self.reached(q, LANES, k, LANES))

        @pl.loop(0, shape[0] // LANES)
        def _(i):
            pl.loop(0, shape[1] // LANES)(lambda j: tile(i, j))


class _One:
    """A step in one level."""

    def __init__(self, part: _Part, level):
        self.part, self.level = part, level

    def value(self):
        return self.part.value(self.level)

    def collect(self, d_logits, sums):
        total = jnp.sum(d_logits, 0, keepdims=True)
        parts = (total[:, i : i + LANES] for i in range(0, total.shape[1], LANES))
        sums[pl.ds(self.level, 1), :] += sum(parts, jnp.zeros((1, LANES), jnp.float32))


class _Several:
    """A step of several levels; `scratch` [rows, keys] or turned holds what tiles make or read."""

    def __init__(self, part: _Part, scratch):
        self.part, self.scratch = part, scratch

    def value(self):
        part, starts = self.part, self.part.x["starts"]

        def fill(tile, distances, first, last):
            def choose(m, value):
                return jnp.where(distances >= starts[m], part.value(m), value)

            start = jnp.full(distances.shape, part.value(first), jnp.float32)
            self.scratch[tile] = lax.fori_loop(first + 1, last + 1, choose, start)

        part.each_tile(self.scratch.shape, fill)
        return self.scratch[...]

    def collect(self, d_logits, sums):
        starts = self.part.x["starts"]
        self.scratch[...] = d_logits

        def add(tile, distances, first, last):
            cotangents = self.scratch[tile]

            @pl.loop(first, last + 1)
            def _(m):
                inside = (distances >= starts[m]) & (distances < starts[m + 1])
                part = jnp.where(inside, cotangents, 0.0)
                sums[pl.ds(m, 1), :] += jnp.sum(part, 0, keepdims=True)

        self.part.each_tile(self.scratch.shape, add)
