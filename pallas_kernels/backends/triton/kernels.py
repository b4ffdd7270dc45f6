"""Kernel bodies for GPUs in Pallas-Triton: the forward pass, dq, and dk with dv.

A program computes one block of rows (forward, dq) or of keys (dk, dv) of one head. It visits its
listed blocks: first those that need no element test, then the others. A listed block may be several
steps. Logits are in base 2, so that an exponential is one instruction. They are [keys, rows] if
keys are resident, so that the summed axis is never transposed in registers.

A program's block of an array is its batch row and its heads; the kernel indexes rows and keys in
it. Head sizes are padded to the next power of two, which Triton requires.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import online_softmax as online
from pallas_kernels.key_bits import BITS, LANES, SPAN
from pallas_kernels.masks import Mask

try:
    from jax.experimental.pallas import triton as plt
except ImportError:  # deprecated since JAX 0.11: `attention.unsupported` refuses without it
    plt = None

LOG2_E = math.log2(math.e)
F32 = jnp.float32
MIN_TILE = 16  # fewest rows, keys and features of a product on tensor cores
LISTS = ("index", "first", "full", "seen")


def next_power_of_two(n: int) -> int:
    """Returns n rounded up to a power of two of at least MIN_TILE."""
    return max(MIN_TILE, 1 << (n - 1).bit_length())


@dataclass(frozen=True)
class Axis:
    """Steps of `unit` rows or keys along an axis of `length`, `steps` of them per listed block."""

    length: int
    unit: int
    steps: int

    @property
    def blocks(self) -> int:
        return -(-self.length // self.unit)

    def is_ragged(self, listed: bool) -> bool:
        """Returns whether a step reaches beyond the end; `listed`: if whole blocks are visited."""
        return self.length % (self.unit * self.steps if listed else self.unit) != 0


@dataclass(frozen=True)
class KernelSpec:
    """The static part of a kernel; `transposed`: keys are resident and rows are streamed."""

    mask: Mask
    scale: float
    soft_cap: float | None
    rows: Axis
    keys: Axis
    size: int
    v_size: int
    group: int  # query heads of a key head
    transposed: bool
    has_full: bool  # some listed block needs no element test
    has_partial: bool  # some listed block needs an element test
    by_head: bool = False  # each query head of a key head has its own list
    cache: bool = False  # k and v are [B, K, S, H], and rows have the same layout
    copies: int = 1  # consecutive rows that share an order index
    parts: int = 1  # programs that share a list
    warps: int = 4
    stages: int = 2
    interpret: bool = False

    @property
    def ragged_rows(self) -> bool:
        return self.rows.is_ragged(self.transposed)

    @property
    def ragged_keys(self) -> bool:
        return self.keys.is_ragged(not self.transposed)

    @property
    def end_of_rows(self) -> int | None:
        """The end of the rows; None: no step reaches beyond it."""
        return self.rows.length if self.ragged_rows else None

    @property
    def end_of_keys(self) -> int | None:
        return self.keys.length if self.ragged_keys else None

    def width(self, name: str) -> int:
        """Returns the number of features of a matrix."""
        return self.size if name in ("q", "k") else self.v_size


def axis(length: int, block: int, most: int) -> Axis:
    """Returns the largest steps up to `most` that divide a table's blocks; one block is padded."""
    if length <= block:
        unit = min(most, next_power_of_two(length))
        return Axis(length, unit, -(-length // unit))
    unit = min(most, block & -block)
    return Axis(length, unit, block // unit)


def dot(spec: KernelSpec, a, b, axis: int, of: int = 1):
    """Returns a times b, over axis `of` of a and `axis` of b, in float32."""
    return product(a, b, axis, of, spec.interpret)


def product(a, b, axis: int, of: int, interpret):
    """Returns a times b, over axis `of` of a and `axis` of b, in float32.

    `interpret` is whether the kernel is interpreted, where TF32 does not exist.
    """
    precision = None
    if a.dtype == F32:  # three TF32 products on tensor cores are almost as exact as float32
        precision = lax.Precision.HIGHEST if interpret else lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    dims = (((of,), (axis,)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=F32)


def arange(start, size: int):
    return start + lax.broadcasted_iota(jnp.int32, (size,), 0)


def _inside(start, size: int, end, width: int, wide: int):
    """Returns which elements are inside a matrix, bool [size, wide]; None: all of them."""
    rows = None if end is None else (arange(start, size) < end)[:, None]
    columns = None if width == wide else (arange(0, wide) < width)[None]
    parts = [jnp.broadcast_to(x, (size, wide)) for x in (rows, columns) if x is not None]
    return functools.reduce(jnp.logical_and, parts) if parts else None


def matrix(ref, start, size: int, width: int, end=None, head=None):
    """Loads rows [size, padded width] from `start`, with 0 from `end`; `head` indexes axis 1."""
    mask = _inside(start, size, end, width, ref.shape[-1])
    rows = pl.ds(start, size)
    part = ref.at[rows, :] if head is None else ref.at[rows, head, :]
    return plt.load(part, mask=mask, other=None if mask is None else jnp.zeros((), ref.dtype))


def _vector(ref, start, size: int, ragged: bool, other=0, head=None):
    """Loads elements [size] from `start` on, `other` beyond the end."""
    part = ref.at[pl.ds(start, size)] if head is None else ref.at[head, pl.ds(start, size)]
    if not ragged:
        return plt.load(part)
    return plt.load(part, mask=arange(start, size) < ref.shape[-1], other=other)


def store(ref, start, value, width: int, end=None):
    mask = _inside(start, len(value), end, width, ref.shape[-1])
    plt.store(ref.at[pl.ds(start, len(value)), :], value.astype(ref.dtype), mask=mask)


def visit(spec: KernelSpec, x, step, carry, head=0):
    """Runs `carry = step(masked, start, carry)` over the program's listed blocks."""
    streamed = spec.rows if spec.transposed else spec.keys
    head = head if spec.by_head else 0
    full, seen = (x[name][head] * streamed.steps for name in ("full", "seen"))
    first, low, high = x["first"][head], jnp.int32(0), seen
    if spec.parts > 1:
        share = lax.div(seen + (spec.parts - 1), spec.parts)
        low = jnp.minimum(lax.rem(pl.program_id(0), spec.parts) * share, seen)
        high = jnp.minimum(low + share, seen)

    def start(n):
        block = x["index"][head, first + lax.div(n, streamed.steps)].astype(jnp.int32)
        return (block * streamed.steps + lax.rem(n, streamed.steps)) * streamed.unit

    def run(masked):
        return lambda n, carry: step(masked, start(n), carry)

    middle = jnp.clip(full, low, high) if spec.has_partial else high
    if spec.has_full:
        carry = lax.fori_loop(low, middle, run(False), carry)
        low = middle
    return lax.fori_loop(low, high, run(True), carry) if spec.has_partial else carry


def row_of(spec: KernelSpec):
    """Returns the program's first row; later blocks, which see most of a text, run first."""
    return (spec.rows.blocks - 1 - lax.div(pl.program_id(0), spec.parts)) * spec.rows.unit


class Block:
    """The logits of a step, [rows, keys] or transposed."""

    def __init__(self, spec: KernelSpec, x):
        self.spec, self.x = spec, x

    def matrix(self, name: str, start, head=None):
        """Loads rows of "q" or "d_out", or keys of "k" or "v"."""
        spec, rows = self.spec, name in ("q", "d_out")
        axis, end = (spec.rows, spec.end_of_rows) if rows else (spec.keys, spec.end_of_keys)
        return matrix(self.x[name], start, axis.unit, spec.width(name), end, head)

    def keys(self, name: str, key):
        """Returns keys of "k" or "v" as numbers of q's dtype, and their scales or None."""
        scale = self.x[f"{name}_scale"]
        if scale is not None:
            scale = _vector(scale, key, self.spec.keys.unit, self.spec.ragged_keys, 0.0)
        return self.matrix(name, key).astype(self.x["q"].dtype), scale

    def row_vector(self, name: str, row, other, head=None):
        return _vector(self.x[name], row, self.spec.rows.unit, self.spec.ragged_rows, other, head)

    def along(self, rows=None, keys=None):
        """Returns a vector of rows or of keys, broadcastable to the logits."""
        if rows is not None:
            return rows[None] if self.spec.transposed else rows[:, None]
        return keys[:, None] if self.spec.transposed else keys[None]

    def _key_number(self, key):
        return arange(key, self.spec.keys.unit)

    def index(self, row, key):
        """Returns the order indices of the queries and of the keys."""
        x, spec = self.x, self.spec
        if x["q_index"] is not None:
            rows = self.row_vector("q_index", row, 0)
        else:
            rows = lax.div(arange(row, spec.rows.unit), spec.copies)
        keys = self._key_number(key)
        if x["k_index"] is not None:
            keys = _vector(x["k_index"], key, spec.keys.unit, spec.ragged_keys)
        return self.along(rows=rows), self.along(keys=keys)

    def seen(self, row, key):
        x, spec = self.x, self.spec
        seen = spec.mask.element(*self.index(row, key))
        if x["q_segments"] is not None:
            q = self.along(rows=self.row_vector("q_segments", row, 0))
            k = _vector(x["k_segments"], key, spec.keys.unit, spec.ragged_keys)
            k = self.along(keys=k)
            seen = seen & (q == k) & (k != 0)
        if x.get("key_bits") is not None:
            seen = seen & self._chosen(row, key)
        if spec.ragged_keys:
            seen = seen & self.along(keys=self._key_number(key) < spec.keys.length)
        return seen

    def _chosen(self, row, key):
        """Returns which keys the queries see by their words, [T, W] or transposed.

        All keys of a step are in one tile of 128, so they are one bit of as many words.
        """
        spec, transposed = self.spec, self.spec.transposed
        word = lax.div(key, jnp.int32(SPAN)) * LANES + lax.rem(key, jnp.int32(LANES))
        bit = lax.rem(lax.div(key, jnp.int32(LANES)), jnp.int32(BITS))
        at = pl.ds(row, spec.rows.unit), pl.ds(word, spec.keys.unit)
        mask = None
        if spec.ragged_rows:
            mask = self.along(rows=arange(row, spec.rows.unit) < spec.rows.length)
            shape = [part.size for part in at[:: -1 if transposed else 1]]
            mask = jnp.broadcast_to(mask, shape)
        other = None if mask is None else jnp.int32(0)
        words = self.x["key_bits"].at[at[:: -1 if transposed else 1]]
        words = plt.load(words, mask=mask, other=other)
        return (words & lax.shift_left(jnp.int32(1), bit)) != 0

    def distance(self, row, key):
        q, k = self.index(row, key)
        return jnp.abs(q - k).astype(F32)

    def logits(self, products, row, key, head=0):
        """Returns (x, factor > 0, the cap's tanh or None); the logits in base 2 are factor x."""
        spec, slopes, tanh = self.spec, self.x["slopes"], None
        if spec.soft_cap is None and slopes is None and spec.scale > 0:
            return products, spec.scale * LOG2_E, tanh
        if spec.soft_cap is None:
            logits = products * (spec.scale * LOG2_E)
        else:
            tanh = jnp.tanh(products * (spec.scale / spec.soft_cap))
            logits = tanh * (spec.soft_cap * LOG2_E)
        if slopes is not None:
            logits = logits - (slopes[head] * LOG2_E) * self.distance(row, key)
        return logits, 1.0, tanh

    def probabilities(self, masked: bool, products, lse, row, key, head=0):
        """Returns p, from the saved lse in base 2, and the cap's tanh or None."""
        logits, factor, tanh = self.logits(products, row, key, head)
        p = jnp.exp2(logits * factor - self.along(rows=lse))
        return (jnp.where(self.seen(row, key), p, 0.0) if masked else p), tanh


def forward(spec: KernelSpec, x, out, lse):
    """Computes an online softmax over a row block's keys (FlashAttention, Dao et al. 2022)."""
    row, block = row_of(spec), Block(spec, x)
    query = block.matrix("q", row)

    def step(masked: bool, key, carry):
        top, total, acc = carry
        keys, scale = block.keys("k", key)
        products = dot(spec, query, keys, 1)
        if scale is not None:
            products = products * scale[None]
        logits, factor, _ = block.logits(products, row, key)
        if masked:
            logits = jnp.where(block.seen(row, key), logits, -jnp.inf)
        new = jnp.maximum(top, jnp.max(logits, 1) * factor)
        p, keep = jnp.exp2(logits * factor - new[:, None]), jnp.exp2(top - new)
        value, scale = block.keys("v", key)
        weights = p if scale is None else p * scale[None]
        acc = acc * keep[:, None] + dot(spec, weights.astype(value.dtype), value, 0)
        return new, total * keep + jnp.sum(p, 1), acc

    start = online.start((spec.rows.unit,), x["v"].shape[-1])
    top, total, acc = visit(spec, x, step, start)
    finish(spec, row, top, total, acc, out, lse)


def finish(spec: KernelSpec, row, top, total, acc, out, lse):
    """Stores out and lse of a running softmax, whose maximum is in base 2."""
    has_keys = total > 0
    safe = jnp.where(has_keys, total, 1.0)
    store(out, row, acc / safe[:, None], spec.v_size, spec.end_of_rows)
    sums = jnp.where(has_keys, top * (1 / LOG2_E) + jnp.log(safe), -jnp.inf)
    mask = arange(row, len(sums)) < spec.rows.length if spec.ragged_rows else None
    plt.store(lse.at[pl.ds(row, len(sums))], sums, mask=mask)


def d_queries(spec: KernelSpec, x, dq, d_slope):
    """Computes dq of a row block, and its part of the cotangent of the head's slope."""
    row, block = row_of(spec), Block(spec, x)
    query, d_out = block.matrix("q", row), block.matrix("d_out", row)
    lse, di = block.row_vector("lse", row, jnp.inf), block.row_vector("di", row, 0)

    def step(masked: bool, key, carry):
        acc, slope = carry
        k = block.matrix("k", key)
        p, tanh = block.probabilities(masked, dot(spec, query, k, 1), lse, row, key)
        d = p * (dot(spec, d_out, block.matrix("v", key), 1) - di[:, None])
        if slope is not None:
            slope = slope - jnp.sum(d * block.distance(row, key), 1)
        d = d if tanh is None else d * (1 - tanh * tanh)
        return acc + dot(spec, d.astype(k.dtype), k, 0), slope

    slope = None if d_slope is None else jnp.zeros(spec.rows.unit, F32)
    start = jnp.zeros((spec.rows.unit, x["k"].shape[-1]), F32), slope
    acc, slope = visit(spec, x, step, start)
    store(dq, row, acc * spec.scale, spec.size, spec.end_of_rows)
    if slope is not None:
        d_slope[0] = jnp.sum(slope)


def d_keys(spec: KernelSpec, x, dk, dv):
    """Computes dk and dv of a block of keys: sums over all rows, and so over the group."""
    key, block = pl.program_id(0) * spec.keys.unit, Block(spec, x)
    k, v = block.matrix("k", key), block.matrix("v", key)

    def step(head, masked: bool, row, carry):
        acc_k, acc_v = carry
        lane = None if spec.group == 1 else head
        query, d_out = block.matrix("q", row, lane), block.matrix("d_out", row, lane)
        lse = block.row_vector("lse", row, jnp.inf, lane)
        p, tanh = block.probabilities(masked, dot(spec, k, query, 1), lse, row, key, head)
        acc_v = acc_v + dot(spec, p.astype(d_out.dtype), d_out, 0)
        di = block.row_vector("di", row, 0, lane)
        d = p * (dot(spec, v, d_out, 1) - di[None])
        d = d if tanh is None else d * (1 - tanh * tanh)
        return acc_k + dot(spec, d.astype(query.dtype), query, 0), acc_v

    sum_k, sum_v = over_heads(spec, x, step, spec.keys.unit)
    store(dk, key, sum_k * spec.scale, spec.size, spec.end_of_keys)
    store(dv, key, sum_v, spec.v_size, spec.end_of_keys)


def over_heads(spec: KernelSpec, x, step, keys: int):
    """Returns the sums [keys, size] of dk and dv over the rows of all heads that share the keys."""

    def of_head(head, carry):
        return visit(spec, x, functools.partial(step, head), carry, head)

    sums = tuple(jnp.zeros((keys, x[name].shape[-1]), F32) for name in ("k", "v"))
    return of_head(0, sums) if spec.group == 1 else lax.fori_loop(0, spec.group, of_head, sums)


def by_rows(kernel, spec: KernelSpec, x, outputs):
    """Runs a kernel per block of rows of a query head; returns outputs [parts, B, ...]."""
    batch, _, heads = _sizes(x["q"], spec)
    grid = (spec.rows.blocks * spec.parts, heads, batch)
    outputs = [None if kind is None else _output(kind, x, spec) for kind in outputs]
    return launch(kernel, spec, x, _block_specs(x, spec, heads), grid=grid, outputs=outputs)


def _sizes(q, spec: KernelSpec) -> tuple[int, int, int]:
    """Returns the numbers of batch rows, of rows of a head, and of heads."""
    batch, rows, heads = q.shape[:3]
    return (batch, heads, rows) if spec.cache else (batch, rows, heads)


def by_keys(kernel, spec: KernelSpec, x):
    """Runs a kernel per block of keys of a key head; returns cotangents of keys and values."""
    batch, heads = x["k"].shape[0], x["k"].shape[2]
    specs = _block_specs(x, spec, heads)
    outputs = [
        (jax.ShapeDtypeStruct(x[name].shape, x[name].dtype), specs[name]) for name in ("k", "v")
    ]
    return launch(kernel, spec, x, specs, grid=(spec.keys.blocks, heads, batch), outputs=outputs)


def _block_specs(x, spec: KernelSpec, heads: int):
    return {
        name: None if value is None else _block_spec(name, value, spec, heads)
        for name, value in x.items()
    }


def _block_spec(name: str, value, spec: KernelSpec, heads: int):
    """Returns the block of an array that program (i, h, b) reads; `heads` is the number of h."""
    shape, resident = value.shape, spec.keys if spec.transposed else spec.rows
    width = next_power_of_two(shape[-1])
    group = spec.group if spec.transposed and spec.group > 1 else None

    def row(b):
        return b if shape[0] > 1 else 0

    if name == "slopes":
        return pl.BlockSpec((group or 1,), lambda i, h, b: (h,))
    if name in ("k_scale", "v_scale"):
        return pl.BlockSpec((None, None, shape[2]), lambda i, h, b: (b, h, 0))
    if name in ("q", "k", "v") and spec.cache:
        return pl.BlockSpec((None, None, shape[2], width), lambda i, h, b: (b, h, 0, 0))
    if name in ("q", "d_out"):
        return pl.BlockSpec((None, shape[1], group, width), lambda i, h, b: (b, 0, h, 0))
    if name in ("lse", "di"):
        return pl.BlockSpec((None, group, shape[2]), lambda i, h, b: (b, h, 0))
    if name in ("k", "v"):
        head = 1 if spec.transposed else spec.group
        return pl.BlockSpec(
            (None, shape[1], None, width), lambda i, h, b: (b, 0, lax.div(h, head), 0)
        )
    if name == "key_bits":
        return pl.BlockSpec((None, *shape[1:]), lambda i, h, b: (row(b), 0, 0))
    if name not in LISTS:
        return pl.BlockSpec((None, shape[1]), lambda i, h, b: (row(b), 0))

    def listed(i, h, b):
        i = i if spec.transposed else spec.rows.blocks - 1 - lax.div(i, spec.parts)
        head = h if spec.by_head else lax.div(h, heads // shape[1])
        return row(b), head, 0 if name == "index" else lax.div(i, resident.steps)

    lists = spec.group if spec.by_head else 1
    return pl.BlockSpec((None, lists, shape[2] if name == "index" else None), listed)


def _output(kind, x, spec: KernelSpec):
    """Returns (shape, block) of an output of rows.

    Args:
      kind: (dtype, width) for a matrix, "vector", or "number" for one number per block of rows.
    """
    (batch, rows, heads), parts = _sizes(x["q"], spec), spec.parts
    lead = parts, batch

    def with_part(i, *rest):
        return lax.rem(i, parts), *rest

    if kind == "vector":
        return (
            jax.ShapeDtypeStruct((*lead, heads, rows), jnp.float32),
            pl.BlockSpec((None, None, None, rows), lambda i, h, b: with_part(i, b, h, 0)),
        )
    if kind == "number":
        return (
            jax.ShapeDtypeStruct((*lead, heads, spec.rows.blocks), jnp.float32),
            pl.BlockSpec(
                (None, None, None, 1), lambda i, h, b: with_part(i, b, h, lax.div(i, parts))
            ),
        )
    dtype, width = kind
    if spec.cache:
        return (
            jax.ShapeDtypeStruct((*lead, heads, rows, width), dtype),
            pl.BlockSpec(
                (None, None, None, rows, next_power_of_two(width)),
                lambda i, h, b: with_part(i, b, h, 0, 0),
            ),
        )
    return (
        jax.ShapeDtypeStruct((*lead, rows, heads, width), dtype),
        pl.BlockSpec(
            (None, None, rows, None, next_power_of_two(width)),
            lambda i, h, b: with_part(i, b, 0, h, 0),
        ),
    )


def launch(kernel, spec: KernelSpec, x, specs, *, grid, outputs):
    """Runs `kernel` on `grid`; `outputs` are (shape, block) or None."""
    shapes, blocks = (tuple(x) for x in zip(*(o or (None, None) for o in outputs), strict=True))
    return pl.pallas_call(
        functools.partial(kernel, spec),
        out_shape=shapes,
        grid=grid,
        in_specs=[specs],
        out_specs=blocks,
        interpret=spec.interpret,
        name=f"lcjax_{kernel.__name__}",
        compiler_params=plt.CompilerParams(num_warps=spec.warps, num_stages=spec.stages),
    )(x)
