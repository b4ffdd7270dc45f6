"""Kernel bodies for TPU: one grid step of the forward pass, of dq and of dk with dv.

A step multiplies one block of R rows (queries of one key head, see `grid.Tiling`) by one block of
keys. Scores are [rows, keys] in the forward pass and for dq, and [keys, rows] for dk and dv. So the
resident block is always the long side of the matrix products, and no step transposes an operand.
Matrices are [length, H] or [H, length], their memory layout; the resident ones of the latter, and
the outputs, are transposed once for all steps. Vectors over the streamed side (indices, segments,
lse) lie along lanes; those over the resident side are turned into columns once, at its first step.

T5's bias by buckets of distance needs no lookup per element and no table in VMEM. As a function of
the distance q_index - k_index the bias is a step function. It has a few dozen levels, each with one
number per head and a fixed distance at which it starts. A step whose distances all lie in one
level, as in nearly all steps of a long text, adds one scalar. The others are computed in tiles of
128 x 128, each of which loops over the levels that its own distances reach: one comparison and one
selection per element and level, in registers. The gradient of a level is the sum of the cotangents
of its logits, in a fixed order.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.backends.tpu.grid import FULL, LANES, NOTHING, PARTIAL, Call, Step, unpack
from pallas_kernels.biases import RelativeBias
from pallas_kernels.key_bits import BITS
from pallas_kernels.masks import Mask
from pallas_kernels.online_softmax import LOWEST

LEAST, MOST = np.iinfo(np.int32).min, np.iinfo(np.int32).max
MAX_LEVELS = LANES
LOG2_E = math.log2(math.e)
# A forward step computes scores of this many keys at a time: the product of the next ones overlaps
# with the exponentials of the current ones (see also `KernelSpec.undivided`).
SUB_BLOCK = 512


@dataclass(frozen=True)
class BiasLevels:
    """Level m has the distances q - k from starts[m] to starts[m + 1] - 1, and bucket buckets[m].

    `group` query heads share a key head; the rows of a step belong to one query head.
    """

    starts: tuple[int, ...]
    buckets: tuple[int, ...]
    group: int

    @property
    def count(self) -> int:
        return len(self.starts)


@dataclass(frozen=True)
class KernelSpec:
    """The static part of a kernel.

    Row r of a row block is query `(block % period * rows + r) // group`. `scale` is the scale of
    the logits; `factor` is the part of it by which the queries are not multiplied yet.
    """

    mask: Mask
    soft_cap: float | None
    factor: float
    scale: float
    rows: int
    key_block: int
    keys: int
    group: int
    period: int
    levels: BiasLevels | None = None
    # Whether a forward step without a mask computes the scores of all of its keys at once
    undivided: bool = False
    # The axis of a block of k, or v, that counts the keys, and of a block of q (also of out and the
    # cotangents) that counts the rows. In a backward pass all three are equal.
    k_axis: int = 0
    v_axis: int = 0
    q_axis: int = 0

    @property
    def ragged(self) -> bool:
        return self.keys % self.key_block != 0


def dot(a, b, axis: int):
    """Returns a [m, n] times b over axis `axis` of b, accumulated in float32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((1,), (axis,)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def read(call: Call, steps) -> Step:
    b, h, s = (pl.program_id(axis) for axis in range(3))
    return unpack(steps[call.offset(b, h, s)])


def _fill(columns, x):
    """Writes vectors [1, n] into columns, repeated over the lanes."""
    for name, ref in columns.items():
        ref[...] = jnp.broadcast_to(x[name][...], (LANES, ref.shape[0])).T


class Block:
    """The vectors of one step: [rows, 1] and [1, keys], or [1, rows] and [keys, 1].

    `first` and `size` select some of the block's keys, for steps that are not transposed.
    """

    def __init__(
        self, spec: KernelSpec, step: Step, x, columns, transposed: bool, first=0, size=None
    ):
        self.spec, self.step, self.x, self.columns = spec, step, x, columns
        self.transposed, self.first, self.size = transposed, first, size or spec.key_block

    def parts(self, size: int) -> list[Block]:
        """Returns the block in parts of `size` keys, or undivided if `size` does not divide it."""
        whole = self.spec, self.step, self.x, self.columns, self.transposed
        size = size if self.size % size == 0 else self.size
        return [Block(*whole, first, size) for first in range(0, self.size, size)]

    def keys(self, name):
        """Returns the block's keys of the matrix `k` or `v`, codes as numbers of q's dtype."""
        some = slice(self.first, self.first + self.size)
        axis = {"k": self.spec.k_axis, "v": self.spec.v_axis}[name]
        x = self.x[name][:, some] if axis else self.x[name][some]
        return x.astype(self.x["q"].dtype)

    @property
    def width(self) -> int:
        """The number of columns of the scores: queries if they are transposed, else keys."""
        return self.spec.rows if self.transposed else self.size

    def row_vector(self, name):
        """Returns a vector over the queries, as a row or as a column repeated over the lanes."""
        if name in self.columns:
            return widen(self.columns[name][...], self.width)
        return self.x[name][...]

    def vector(self, name, lanes):
        """Returns a vector's part for some columns of the scores, [size, lanes] or [1, lanes]."""
        if name in self.columns:
            return self.columns[name][:, : lanes.size]
        first = lanes.start if self.transposed else lanes.start + self.first
        x = self.x[name]
        return x[...] if x.shape[1] == 1 else x[:, first : first + lanes.size]

    def by_lanes(self, function):
        """Concatenates `function(lanes)` for every 128 columns of the scores.

        Values that depend on the rows only are then the same for all of them and computed once, and
        no column must be broadcast over lanes.
        """
        tiles = range(0, self.width, LANES)
        parts = [function(pl.ds(start, min(LANES, self.width - start))) for start in tiles]
        return jnp.concatenate(parts, 1)

    def _count(self, first, axis: int, lanes):
        """Returns first, first + 1, ... along `axis` of some columns of the scores."""
        rows = self.size if self.transposed else self.spec.rows
        shape = (1 if axis else rows, lanes.size)
        start = lanes.start if axis else 0
        return first + start + lax.broadcasted_iota(jnp.int32, shape, axis)

    def key_number(self, lanes):
        first = self.step.col * self.spec.key_block + self.first
        return self._count(first, 0 if self.transposed else 1, lanes)

    def k_index(self, lanes):
        is_given = self.x["k_index"] is not None
        return self.vector("k_index", lanes) if is_given else self.key_number(lanes)

    def q_index(self, lanes):
        if self.x["q_index"] is not None:
            return self.vector("q_index", lanes)
        spec = self.spec
        first = lax.rem(self.step.row, spec.period) * spec.rows
        row = self._count(first, 1 if self.transposed else 0, lanes)
        return row if spec.group == 1 else lax.div(row, jnp.int32(spec.group))

    def seen(self, lanes):
        seen = self.spec.mask.element(self.q_index(lanes), self.k_index(lanes))
        if self.x["q_segments"] is not None:
            q, k = (self.vector(name, lanes) for name in ("q_segments", "k_segments"))
            seen = seen & (q == k)  # keys of segment 0 have another number here (`hide_padding`)
        if self.x.get("key_bits") is not None:
            seen = seen & self.chosen(lanes)
        return seen & (self.key_number(lanes) < self.spec.keys) if self.spec.ragged else seen

    def chosen(self, lanes):
        """Returns which keys the queries see by their `key_bits`, for some columns of the scores.

        A tile of 128 keys is one bit of 128 words, the same for all rows.
        """
        tiles = self.spec.key_block // LANES
        first = lax.rem(self.step.col * tiles, jnp.int32(BITS)) + self.first // LANES
        if not self.transposed:
            bit = jnp.int32(1) << (first + lanes.start // LANES)
            return (self.x["key_bits"][...] & bit) != 0
        words = self.x["key_bits"][lanes, :].T
        bits = [words & (jnp.int32(1) << (first + tile)) for tile in range(self.size // LANES)]
        return jnp.concatenate(bits, 0) != 0

    def masked(self, scores, value: float):
        """Returns `scores` where the mask shows them, else `value`."""

        def tile(lanes):
            part = scores[:, lanes.start : lanes.start + lanes.size]
            return jnp.where(self.seen(lanes), part, value)

        return self.by_lanes(tile)

    def distance(self):
        def tile(lanes):
            return jnp.abs(self.q_index(lanes) - self.k_index(lanes)).astype(jnp.float32)

        return self.by_lanes(tile)

    def products(self):
        query, spec = self.x["q"][...], self.spec
        if self.transposed:
            return dot(self.x["k"][...], query, 1 - spec.q_axis)
        products = dot(query, self.keys("k"), 1 - spec.k_axis)
        scale = self.x.get("k_scale")  # of the decoding kernel's keys, if they are codes
        return products if scale is None else products * scale[...]

    @property
    def exponent_factor(self) -> float:
        """The factor that the exponent applies, and not `logits`; 1 if there is a cap or a bias."""
        spec = self.spec
        is_plain = spec.soft_cap is None and self.x["slopes"] is None and spec.levels is None
        return spec.factor if is_plain and spec.factor > 0 else 1.0

    def logits(self, bias=None):
        """Returns logits / exponent_factor, [rows, keys] or transposed, and the cap's tanh or None.

        Args:
          bias: as in `visit_step`.
        """
        logits, cap = self.products(), self.spec.soft_cap
        if self.spec.factor != self.exponent_factor:
            logits = logits * self.spec.factor
        tanh = None
        if cap is not None:
            tanh = jnp.tanh(logits * (1 / cap))
            logits = cap * tanh
        if self.x["slopes"] is not None:
            logits = logits - self.row_vector("slopes") * self.distance()
        return (logits if bias is None else logits + bias.value()), tanh

    def probabilities(self, masked: bool, bias):
        """Returns p, from the saved lse in units of log 2, and the cap's tanh or None."""
        logits, tanh = self.logits(bias)
        if masked:  # masking p instead takes more instructions (benchmarks/tpu_bundles.py)
            logits = self.masked(logits, -jnp.inf)
        return jnp.exp2(logits * (self.exponent_factor * LOG2_E) - self.row_vector("lse")), tanh

    def gradients(self, masked: bool, bias):
        """Returns p, the cotangent of the logits, and that of products scaled by `factor`."""
        pair = ("v", "d_out") if self.transposed else ("d_out", "v")
        a, b = (self.x[name][...] for name in pair)
        p, tanh = self.probabilities(masked, bias)
        d_logits = p * (dot(a, b, 1 - self.spec.q_axis) - self.row_vector("di"))
        d_products = d_logits if tanh is None else d_logits * (1 - tanh * tanh)
        return p, d_logits, d_products


def hide_padding(k_segments):
    """Returns the segments of keys with a number for padding, segment 0, that no query has."""
    return None if k_segments is None else jnp.where(k_segments == 0, LEAST, k_segments)


def bias_levels(bias: RelativeBias, group: int) -> BiasLevels:
    later = bias.thresholds
    buckets = range(len(later) + 1)
    if not bias.bidirectional:  # keys ahead of the query share bucket 0
        return BiasLevels((LEAST, *later), tuple(buckets), group)
    # Levels of keys ahead of the query come first, from the farthest to distance -1. If a distance
    # belongs to no bucket, two levels start at it and the first is empty.
    ahead = (LEAST, *(1 - start for start in reversed(later)))
    half = len(later) + 1
    both = (*(half + bucket for bucket in reversed(buckets)), *buckets)
    return BiasLevels((*ahead, 0, *later), both, group)


def level_operands(bias: RelativeBias, levels: BiasLevels) -> dict:
    """Returns operands for scalar memory: starts, padded to a power of two, and levels per head."""
    starts = np.full(1 << levels.count.bit_length(), MOST, np.int32)
    starts[: levels.count] = levels.starts
    table = bias.table.astype(jnp.float32)[np.array(levels.buckets)]
    return {"starts": jnp.asarray(starts), "levels": table.T.reshape(-1)}


def level_gradient(sums, bias: RelativeBias, levels: BiasLevels) -> RelativeBias:
    """Returns the table's cotangent from sums [B, K, 1, row blocks * 128], a level per lane."""
    batch, heads = sums.shape[:2]
    sums = sums.reshape(batch, heads, levels.group, -1, LANES).sum((0, 3))
    table = sums.reshape(-1, LANES)[:, np.argsort(levels.buckets)].T
    return RelativeBias(table, bias.max_distance, bias.bidirectional)


def visit_step(block, key_head, scratch, run):
    """Runs `run(masked, bias)` for the kind of the step.

    `bias` is None without levels. Else `bias.value()` is the bias of the step's scores, and
    `bias.collect(d_logits, sums)` adds their cotangents to sums [levels, lanes].
    """
    kind = block.step.kind
    if block.spec.levels is None:
        pl.when(kind == FULL)(lambda: run(False, None))
        pl.when(kind == PARTIAL)(lambda: run(True, None))
        return
    bias = _LevelBias(block, key_head)
    first, last = bias.reached(0, block.spec.rows, 0, block.spec.key_block)
    one, several = _OneLevel(bias, first), _ManyLevels(bias, scratch)
    pl.when((kind == FULL) & (first == last))(lambda: run(False, one))
    pl.when((kind == PARTIAL) & (first == last))(lambda: run(True, one))
    pl.when((kind != NOTHING) & (first != last))(lambda: run(True, several))


class _LevelBias:
    """The bias of a step's block by levels of the distance."""

    def __init__(self, block, key_head):
        spec, step = block.spec, block.step
        self.block, self.levels, self.x = block, spec.levels, block.x
        head = key_head * self.levels.group + lax.div(step.row, jnp.int32(spec.period))
        self.offset = head * self.levels.count
        first = lax.rem(step.row, jnp.int32(spec.period)) * spec.rows, step.col * spec.key_block
        self.first = dict(zip(("q_index", "k_index"), first, strict=True))

    def value(self, level):
        return self.x["levels"][self.offset + level]

    def level(self, distance):
        """Returns the level of a scalar distance, by binary search."""
        starts, level, half = self.x["starts"], 0, self.x["starts"].shape[0] // 2
        while half:
            level = jnp.where(starts[level + half] <= distance, level + half, level)
            half //= 2
        return level

    def reached(self, q_start, q_size: int, k_start, k_size: int):
        """Returns the first and the last level that a part of the block reaches."""
        (q_least, q_most), (k_least, k_most) = (
            self._ends(name, start, size)
            for name, start, size in (("q_index", q_start, q_size), ("k_index", k_start, k_size))
        )
        return self.level(q_least - k_most), self.level(q_most - k_least)

    def _ends(self, name, start, size: int):
        if self.x[name] is None:
            first = self.first[name] + start
            return first, first + (size - 1)
        index = self.x[name][:, pl.ds(start, size)]
        return jnp.min(index), jnp.max(index)

    def _tile_index(self, name, start, axis: int):
        """Returns order indices [128, 1] or [1, 128] from `start` on."""
        if self.x[name] is None:
            shape = (LANES, 1) if axis == 0 else (1, LANES)
            return self.first[name] + start + lax.broadcasted_iota(jnp.int32, shape, axis)
        if name in self.block.columns:
            return self.block.columns[name][pl.ds(start, LANES), :1]
        return self.x[name][:, pl.ds(start, LANES)]

    def each_tile(self, shape, run):
        """Runs `run(tile, distances [128, 128], first, last)` on all tiles of scores of `shape`."""
        transposed = self.block.transposed

        def tile(i, j):
            i, j = (pl.multiple_of(n * LANES, LANES) for n in (i, j))
            q, k = (j, i) if transposed else (i, j)
            q_index = self._tile_index("q_index", q, int(transposed))
            distances = q_index - self._tile_index("k_index", k, int(not transposed))
            run((pl.ds(i, LANES), pl.ds(j, LANES)), distances, *self.reached(q, LANES, k, LANES))

        @pl.loop(0, shape[0] // LANES)
        def _(i):
            pl.loop(0, shape[1] // LANES)(lambda j: tile(i, j))


class _OneLevel:
    """The bias of a step whose distances are all in one level."""

    def __init__(self, bias: _LevelBias, level):
        self.bias, self.level = bias, level

    def value(self):
        return self.bias.value(self.level)

    def collect(self, d_logits, sums):
        total = jnp.sum(d_logits, 0, keepdims=True)
        parts = (total[:, i : i + LANES] for i in range(0, total.shape[1], LANES))
        sums[pl.ds(self.level, 1), :] += sum(parts, jnp.zeros((1, LANES), jnp.float32))


class _ManyLevels:
    """The bias of a step with several levels, computed by tiles.

    scratch: [rows, keys] or transposed; its tiles hold the bias, or the cotangents of the logits.
    """

    def __init__(self, bias: _LevelBias, scratch):
        self.bias, self.scratch = bias, scratch

    def value(self):
        bias, starts = self.bias, self.bias.x["starts"]

        def fill(tile, distances, first, last):
            def choose(m, value):
                return jnp.where(distances >= starts[m], bias.value(m), value)

            start = jnp.full(distances.shape, bias.value(first), jnp.float32)
            self.scratch[tile] = lax.fori_loop(first + 1, last + 1, choose, start)

        bias.each_tile(self.scratch.shape, fill)
        return self.scratch[...]

    def collect(self, d_logits, sums):
        starts = self.bias.x["starts"]
        self.scratch[...] = d_logits

        def add(tile, distances, first, last):
            cotangents = self.scratch[tile]

            @pl.loop(first, last + 1)
            def _(m):
                inside = (distances >= starts[m]) & (distances < starts[m + 1])
                part = jnp.where(inside, cotangents, 0.0)
                sums[pl.ds(m, 1), :] += jnp.sum(part, 0, keepdims=True)

        self.bias.each_tile(self.scratch.shape, add)


def visit_as(kind, run):
    """Runs `run(masked)` for the kind of a step."""
    pl.when(kind == FULL)(lambda: run(False))
    pl.when(kind == PARTIAL)(lambda: run(True))


def start_softmax(top, total, acc):
    top[...] = jnp.full_like(top, LOWEST)
    total[...] = jnp.zeros_like(total)
    acc[...] = jnp.zeros_like(acc)


def widen(column, size: int):
    """Widens a column [rows, lanes], the same in every lane, to [rows, size].

    Whole lanes are repeated at no cost; broadcasting one lane to the others takes a permutation.
    """
    if size % LANES:
        return column[:, :size] if size < LANES else column[:, :1]
    return jnp.tile(column, (1, size // LANES))


def lane_sums(x):
    """Returns the sums [rows, lanes] of the columns of x that are in the same lane."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % LANES)))
    tiles = (x[:, start : start + LANES] for start in range(0, x.shape[1], LANES))
    return functools.reduce(jnp.add, tiles)


def add_to_softmax(logits, value, axis: int, top, total, acc, factor: float, scale=None):
    """Adds keys to a running softmax of `logits * factor`; axis `axis` of `value` counts the keys.

    With powers of 2 the scale and the logarithm of the base are one factor. `total` has a sum for
    every lane, because a sum over lanes takes many instructions; `end_softmax` computes it once.
    `scale` [1, keys] are factors of the values; None: 1.
    """
    old = top[...]
    new = jnp.maximum(old, jnp.max(logits, 1, keepdims=True))
    p = jnp.exp2((logits - widen(new, logits.shape[1])) * (factor * LOG2_E))
    keep = jnp.exp2((old - new) * (factor * LOG2_E))
    top[...] = new
    weights = p if scale is None else p * scale
    added = dot(weights.astype(value.dtype), value, axis)
    total[...] = total[...] * keep + lane_sums(p)
    acc[...] = acc[...] * widen(keep, acc.shape[1]) + added


def end_softmax(top, total, acc, factor: float):
    """Returns the output [rows, size] in float32, and the lse [rows, lanes], equal in all lanes."""
    sums = jnp.broadcast_to(jnp.sum(total[...], 1, keepdims=True), total.shape)
    has_keys = sums > 0
    safe = jnp.where(has_keys, sums, 1.0)
    lse = jnp.where(has_keys, top[...] * factor + jnp.log(safe), -jnp.inf)
    return acc[...] / widen(safe, acc.shape[1]), lse


def forward(
    spec: KernelSpec, call: Call, steps, x, out, lse, columns, top, total, acc, scratch, query
):
    """Computes an online softmax over a row block's keys (FlashAttention, Dao et al. 2022).

    Args:
      query: VMEM for the queries of a row block as [rows, H] if `q_axis` is 1, else None.
    """
    step, key_head = read(call, steps), pl.program_id(1) + call.heads[0]
    block = Block(spec, step, x if query is None else x | {"q": query}, columns, transposed=False)

    @pl.when(step.first)
    def _():
        _fill(columns, x)
        if query is not None:
            query[...] = x["q"][...].T
        start_softmax(top, total, acc)

    def visit(masked: bool, bias):
        is_whole = bias is not None or (spec.undivided and not masked)
        for part in (block,) if is_whole else block.parts(SUB_BLOCK):
            logits, _ = part.logits(bias)
            if masked:
                logits = part.masked(logits, -jnp.inf)
            value, factor = part.keys("v"), block.exponent_factor
            add_to_softmax(logits, value, spec.v_axis, top, total, acc, factor)

    visit_step(block, key_head, scratch, visit)

    @pl.when(step.last)
    def _():
        normalised, sums = end_softmax(top, total, acc, block.exponent_factor)
        normalised = normalised if query is None else normalised.T
        out[...] = normalised.astype(out.dtype)
        lse[...] = sums.T[:1]


def d_queries(spec: KernelSpec, call: Call, steps, x, dq, d_bias, columns, acc, acc_bias, scratch):
    """Computes dq of a row block, and the cotangent of its rows' slopes or its head's levels."""
    step, key_head = read(call, steps), pl.program_id(1) + call.heads[0]
    block = Block(spec, step, x, columns, transposed=False)

    @pl.when(step.first)
    def _():
        _fill(columns, x)
        acc[...] = jnp.zeros_like(acc)
        if d_bias is not None:
            acc_bias[...] = jnp.zeros_like(acc_bias)

    def visit(masked: bool, bias):
        key = x["k"][...]
        _, d_logits, d_products = block.gradients(masked, bias)
        acc[...] += dot(d_products.astype(key.dtype), key, 0)
        if bias is not None:
            bias.collect(d_logits, acc_bias)
        elif d_bias is not None:
            acc_bias[...] -= jnp.sum(d_logits * block.distance(), 1, keepdims=True)

    visit_step(block, key_head, scratch, visit)

    @pl.when(step.last)
    def _():
        dq[...] = (acc[...] * spec.scale).astype(dq.dtype)
        if d_bias is not None:
            sums = acc_bias[...]
            if spec.levels is not None:
                sums = jnp.broadcast_to(jnp.sum(sums, 1, keepdims=True), sums.shape)
            d_bias[...] = sums.T[:1]


def d_keys(
    spec: KernelSpec,
    call: Call,
    steps,
    x,
    dk,
    dv,
    columns,
    acc_k,
    acc_v,
    scratch,
    key=None,
    value=None,
    add_to_dq=None,
):
    """Computes dk and dv of a block of keys: sums over all rows, and so over the group.

    Args:
      key, value: VMEM for the block's keys and values as [keys, size] if they are read as
        [size, keys], else None.
      add_to_dq: called as add_to_dq(step, d_products) with the cotangents [keys, rows] of the
        products of each step; None: not called.
    """
    step, key_head = read(call, steps), pl.program_id(1) + call.heads[0]
    turned = {} if key is None else {"k": key, "v": value}
    block = Block(spec, step, x | turned, columns, transposed=True)

    @pl.when(step.first)
    def _():
        _fill(columns, x)
        for name, ref in turned.items():
            ref[...] = x[name][...].T
        acc_k[...] = jnp.zeros_like(acc_k)
        acc_v[...] = jnp.zeros_like(acc_v)

    def visit(masked: bool, bias):
        query, d_out = x["q"][...], x["d_out"][...]
        p, _, d_products = block.gradients(masked, bias)
        d_products = d_products.astype(query.dtype)
        acc_k[...] += dot(d_products, query, spec.q_axis)
        acc_v[...] += dot(p.astype(d_out.dtype), d_out, spec.q_axis)
        if add_to_dq is not None:
            add_to_dq(step, d_products)

    visit_step(block, key_head, scratch, visit)

    @pl.when(step.last)
    def _():
        for out, sums in ((dk, acc_k[...] * spec.factor), (dv, acc_v[...])):
            out[...] = (sums.T if turned else sums).astype(out.dtype)


def d_all(
    spec: KernelSpec,
    call: Call,
    steps,
    x,
    dk,
    dv,
    dq,
    columns,
    acc_k,
    acc_v,
    acc_q,
    scratch,
    key=None,
    value=None,
):
    """Computes `d_keys`, and dq of all queries of a key head.

    Scores and probabilities are computed once for both: a step has five products instead of seven.
    """
    arguments = spec, call, steps, x, dk, dv, columns, acc_k, acc_v, scratch, key, value
    keys = x["k"] if key is None else key
    with_d_queries(functools.partial(d_keys, *arguments), spec, keys, dq, acc_q)


def with_d_queries(d_keys, spec, key, dq, acc):
    """Runs `d_keys(add_to_dq=...)` of a step, and sums dq over all steps of a head.

    Args:
      d_keys: calls add_to_dq(step, d_products) with the cotangents [keys, rows] of the products.
      spec: has the `rows` of a step and the `scale` of the products.
      key: the keys [keys, size] of the step.
      dq: the output for all rows of the head, [all rows, size] or [G, size, all rows / G].
      acc: float32 [all rows, size], which stays in VMEM.
    """
    number, blocks = pl.program_id(2), acc.shape[0] // spec.rows

    def rows(block):
        return pl.ds(pl.multiple_of(block * spec.rows, spec.rows), spec.rows)

    @pl.when(number == 0)
    def _():
        @pl.loop(0, blocks)
        def _(block):
            acc[rows(block), :] = jnp.zeros((spec.rows, acc.shape[1]), acc.dtype)

    def add_to_dq(step, d_products):
        acc[rows(step.row), :] += dot(d_products.T, key[...], 0)

    d_keys(add_to_dq=add_to_dq)

    @pl.when(number == pl.num_programs(2) - 1)
    def _():
        @pl.loop(0, blocks)
        def _(block):
            sums = acc[rows(block), :] * spec.scale
            if len(dq.shape) == 2:
                dq[rows(block), :] = sums.astype(dq.dtype)
            else:
                period = jnp.int32(dq.shape[2] // spec.rows)
                head, part = lax.div(block, period), lax.rem(block, period)
                dq[head, :, rows(part)] = sums.T.astype(dq.dtype)
