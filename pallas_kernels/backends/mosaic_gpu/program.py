"""The parts of the Hopper kernels: a program's warpgroups, the ring that feeds them, element tests.

One warpgroup visits the list of visible blocks and starts copies (TMA) of their tiles into a ring
of stages; the others multiply (wgmma). Barriers signal that a stage is filled, or free again. Full
blocks come first in a list and have no element test.

Logits are multiples of log 2, so that softmax uses powers of two. Values in the registers of a
warpgroup have the layout of the matrix unit's (wgmma) results.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.backends.mosaic_gpu.attention import ROWS, KernelSpec, TileAxis

F32 = jnp.float32
WGMMA = plgpu.Layout.WGMMA
LOG2E = math.log2(math.e)
# Axes of the grid; the last varies fastest, over the interleaved heads of all rows. The names are
# unusual because Pallas would use the index on the device mesh if it had an axis of the same name.
GRID = ("_lcjax_heads", "_lcjax_tiles", "_lcjax_rows")
WARPGROUP = "_lcjax_warpgroup"
# Registers per thread that computes, and per thread that copies, by the number of compute
# warpgroups: 2 x 240 + 24 and 3 x 160 + 32 of 512.
REGISTERS = {2: (240, 24), 3: (160, 32)}


def fill(shape, value: float, axis: int | None = None):
    """Returns a matrix of one value, or a vector that lies along axis `axis` of matrices."""
    layout = WGMMA if axis is None else WGMMA.reduce(1 - axis)
    return plgpu.layout_cast(jnp.full(shape, value, F32), layout)


def column(ref, axis: int):
    """Loads a vector from shared memory; it lies along axis `axis` of matrices."""
    index = inspect.signature(plgpu.load).parameters.get("idx")
    is_required = index is not None and index.default is inspect.Parameter.empty  # until jax 0.10
    return plgpu.load(ref, **({"idx": ()} if is_required else {}), layout=WGMMA.reduce(1 - axis))


def repeat(x, axis: int, shape):
    """Returns a vector along axis `axis` of a matrix, repeated along the other."""
    return lax.broadcast_in_dim(x, shape, (axis,))


def iota(axis: int, shape):
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=WGMMA)


def rem(x, n: int):
    return jnp.zeros_like(x) if n == 1 else lax.rem(x, jnp.asarray(n, x.dtype))


def div(x, n: int):
    return x if n == 1 else lax.div(x, jnp.asarray(n, x.dtype))


def product(a, b, between: Callable = lambda: None):
    """Returns a b^T of tiles in shared memory, float32; calls `between` after its start."""

    def multiply(total):
        plgpu.wgmma(total, a, b.transpose((1, 0)))
        between()
        return total[...]

    return pl.run_scoped(multiply, plgpu.ACC((a.shape[0], b.shape[0]), F32))


def sums_on(starts, begin: Callable) -> list:
    """Returns `starts` plus the products that `begin(sums, ready)` starts; waits for the products.

    Args:
      starts: initial values of the sums.
      begin: starts products that add to `sums`. `ready(i, later)` waits for all products except the
        last `later` ones, and returns the value of sum i.
    """

    def run(sums):
        begin(sums, lambda i, later: plgpu.wgmma_accumulator_load(sums[i], wait_n=later))

    return pl.run_state(run)([plgpu.ACC.init(x) for x in starts])


def add_product(total, a, b) -> None:
    """Adds a b to a sum of products; a is in registers, b is a tile in shared memory."""
    plgpu.wgmma(total, a.astype(b.dtype), b)


class ProgramIndex(NamedTuple):
    """The batch row, query head, key head and resident tile of a program."""

    row: object
    head: object
    key_head: object
    tile: object


class Visits(NamedTuple):
    """The tiles that a block of the resident side visits: `full` of `seen` need no element test.

    start: the offset of the block's list in the lists at `list_index` of `index`.
    pieces: the number of tiles of a listed block.
    repeats: the number of heads that visit the same tiles, one after the other.
    blocks: the number of blocks of one head, if the heads of a group have separate lists.
    """

    index: object
    list_index: tuple
    start: object
    pieces: int
    repeats: int
    blocks: int | None
    full: object
    seen: object

    def head(self, step):
        """Returns the number of a step's head in its group."""
        if self.blocks is None:
            return rem(step, self.repeats)
        return div(self._entry(step), self.blocks)

    def tile(self, step):
        """Returns the number of a step's streamed tile."""
        block = self._entry(step) if self.blocks is None else rem(self._entry(step), self.blocks)
        return block * self.pieces + rem(div(step, self.repeats), self.pieces)

    def _entry(self, step):
        return self.index[(*self.list_index, self.start + div(step, self.repeats * self.pieces))]


def list_visits(
    spec: KernelSpec,
    x,
    program: ProgramIndex,
    resident: TileAxis,
    streamed: TileAxis,
    heads: int = 1,
) -> Visits:
    """Returns the visits of a program; `heads` is the number of query heads that are streamed."""
    rows, lists = x["index"].shape[:2]
    head = 0 if lists == 1 else program.key_head if lists == spec.key_heads else program.head
    list_index = program.row if rows > 1 else 0, head
    block = *list_index, div(program.tile, resident.pieces)
    blocks = streamed.count // streamed.pieces if spec.joined and heads > 1 else None
    repeats = heads if blocks is None else 1
    full, seen = (x[name][block] * (streamed.pieces * repeats) for name in ("full", "seen"))
    return Visits(
        x["index"], list_index, x["first"][block], streamed.pieces, repeats, blocks, full, seen
    )


def part(x, name: str, program: ProgramIndex, first, count: int):
    """Returns `count` rows of an operand from `first` on, for the program's batch row and head."""
    ref, rows = x[name], pl.ds(first, count)
    if name == "count":
        return ref
    if name in ("q_index", "k_index", "q_segments", "k_segments"):
        return ref.at[program.row if ref.shape[0] > 1 else 0, rows]
    if name in ("lse", "start"):
        return ref.at[program.row, program.head, rows]
    return ref.at[program.row, rows, program.key_head if name in ("k", "v") else program.head]


@dataclass(frozen=True)
class Ring:
    """Stages of streamed tiles; `names` are sets of operands that are filled and freed together."""

    names: tuple[tuple[str, ...], ...]
    scratch: dict
    stages: int
    tile: int

    def slot(self, step):
        return rem(step, self.stages)

    def fill(self, x, program: ProgramIndex, step, tile) -> None:
        slot = self.slot(step)
        for i, names in enumerate(self.names):
            barrier = self.scratch["filled"][i].at[slot]

            @pl.when(step >= self.stages)
            def _(i=i):
                plgpu.barrier_wait(self.scratch["free"][i].at[slot])

            for name in names:
                source = part(x, name, program, tile * self.tile, self.tile)
                plgpu.copy_gmem_to_smem(source, self.scratch[name].at[slot], barrier)

    def drain(self, steps) -> None:
        """Waits until all stages are free.

        A warpgroup that has waited for a barrier once must wait for each of its completions.
        """

        def wait(i, _):
            for free in self.scratch["free"]:
                plgpu.barrier_wait(free.at[self.slot(steps - 1 - i)])

        lax.fori_loop(0, jnp.minimum(steps, self.stages), wait, None)

    def wait(self, i: int, step) -> None:
        plgpu.barrier_wait(self.scratch["filled"][i].at[self.slot(step)])

    def release(self, i: int, step) -> None:
        if any(self.scratch[name].ndim == 2 for name in self.names[i]):
            # Threads read vectors, and not the matrix unit: only a fence orders these reads before
            # the next write of the copy engine.
            plgpu.commit_smem()
        plgpu.barrier_arrive(self.scratch["free"][i].at[self.slot(step)])

    def first(self, visits: Visits, step):
        """Returns the first row of a step's tile."""
        return visits.tile(step) * self.tile

    def at(self, name: str, step):
        return self.scratch[name].at[self.slot(step)]


def fetch(x, scratch, names, program: ProgramIndex, first, group) -> None:
    """Copies the rows of a compute warpgroup to shared memory, and waits for them."""
    for name in names:
        source = part(x, name, program, first, ROWS)
        plgpu.copy_gmem_to_smem(source, scratch[name].at[group], scratch["resident_rows"].at[group])
    plgpu.barrier_wait(scratch["resident_rows"].at[group])


class TilePair(NamedTuple):
    """A tile of queries and one of keys; the first axis of their products is the resident one.

    resident: the first row of the resident tile.
    streamed: a function that returns the first row of the streamed tile.
    vectors: indices and segments in shared memory, and 0, 1, ... for the streamed axis. Numbers
      computed from the thread's index would occupy registers while they are not needed.
    """

    shape: tuple[int, int]
    q_axis: int
    resident: object
    streamed: Callable
    vectors: dict

    def seen(self, spec: KernelSpec):
        q_axis, k_axis = self.q_axis, 1 - self.q_axis

        def vector(name: str, axis: int):
            return repeat(column(self.vectors[name], axis), axis, self.shape)

        def number(axis: int):
            if axis == 0:
                return iota(0, self.shape) + self.resident
            return repeat(column(self.vectors["count"], 1) + self.streamed(), 1, self.shape)

        def index(name: str, axis: int):
            return vector(name, axis) if name in self.vectors else number(axis)

        seen = spec.mask.element(index("q_index", q_axis), index("k_index", k_axis))
        if "q_segments" in self.vectors:
            q, k = vector("q_segments", q_axis), vector("k_segments", k_axis)
            return seen & (q == k) & (k != 0)  # padding after the last key has segment 0, too
        length = spec.tiling.keys.length
        return seen if spec.tiling.keys.padded == length else seen & (number(k_axis) < length)

    def hide(self, spec: KernelSpec, masked, values, otherwise: float):
        """Returns `values`, with `otherwise` where they are hidden; tests only if `masked`."""

        def test(values):
            return jnp.where(self.seen(spec), values, otherwise)

        return lax.cond(masked, test, lambda values: values, values)


def logits(spec: KernelSpec, products):
    """Returns (x, factor): logits are factor x, in multiples of log 2; with a cap x is its tanh."""
    factor, cap = spec.scale * LOG2E, spec.soft_cap
    if cap is not None:
        # tanh is computed by powers of two, because the hardware's tanh has only 11 exact bits.
        tanh = 1.0 - 2.0 / (jnp.exp2(products * (2 * factor / cap)) + 1.0)
        return tanh, cap * LOG2E
    return (products, factor) if factor > 0 else (products * factor, 1.0)


def hidden(spec: KernelSpec, products, tiles: TilePair, masked):
    """Returns `logits`, with values whose power of two is 0 where keys are hidden."""
    values, factor = logits(spec, products)
    # With a cap, hidden values are squared for the slope, which must stay finite.
    return tiles.hide(spec, masked, values, -jnp.inf if spec.soft_cap is None else -1e18), factor


def probabilities(spec: KernelSpec, values, factor, lse, axis: int):
    """Returns p and p times the cap's slope; lse is in multiples of log 2 and lies along `axis`."""
    p = jnp.exp2(values * factor - repeat(lse, axis, values.shape))
    return p, p if spec.soft_cap is None else p * (1.0 - values * values)


def specialise(spec: KernelSpec, compute: Callable, move: Callable) -> None:
    """Runs `compute(warpgroup)` in the compute warpgroups and `move()` in the last one."""
    group, registers = lax.axis_index(WARPGROUP), REGISTERS.get(spec.tiling.groups)

    @pl.when(group < spec.tiling.groups)
    def _():
        if registers:
            plgpu.set_max_registers(registers[0], action="increase")
        compute(group)

    @pl.when(group == spec.tiling.groups)
    def _():
        if registers:
            plgpu.set_max_registers(registers[1], action="decrease")
        move()


def send(*pairs) -> None:
    """Copies from shared to global memory, and waits until shared memory was read.

    It must be a warpgroup's last operation: only the end of the kernel waits for global memory.
    """
    plgpu.commit_smem()
    for source, target in pairs:
        plgpu.copy_smem_to_gmem(source, target)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def grid(spec: KernelSpec, heads: int, tiles: int, rows: int) -> tuple[int, int, int]:
    """Returns the sizes of the axes of GRID."""
    return heads // spec.interleaved, tiles, rows * spec.interleaved


def grid_index() -> tuple:
    """Returns the indices of a program along the axes of GRID."""
    return tuple(lax.axis_index(name) for name in GRID)


def of_queries(spec: KernelSpec, index: tuple) -> ProgramIndex:
    """Returns the program at `index` of a grid over query heads and tiles of queries.

    The last tiles start first: under a causal mask they have the longest lists.
    """
    heads, tile, x = index
    head = heads * spec.interleaved + rem(x, spec.interleaved)
    tile = spec.tiling.queries.count - 1 - tile
    return ProgramIndex(div(x, spec.interleaved), head, div(head, spec.group), tile)


def of_keys(spec: KernelSpec, index: tuple) -> ProgramIndex:
    """Returns the program at `index` of a grid over heads and tiles of keys.

    Its query head is None, unless the grid is over query heads (`per_query_head`).
    """
    heads, tile, x = index
    row, head = div(x, spec.interleaved), heads * spec.interleaved + rem(x, spec.interleaved)
    if spec.per_query_head:
        return ProgramIndex(row, head, div(head, spec.group), tile)
    return ProgramIndex(row, None, head, tile)
