"""The parts of the Hopper kernels: a program's warpgroups, the ring that feeds them, element tests.

One warpgroup visits the list of visible blocks and has the copy engine (TMA) bring their tiles into
a ring of stages; the others multiply (wgmma). Barriers say when a stage is filled and when it is
free again. Full blocks come first in a list and are taken without an element test.

Logits are held as multiples of log 2, so that softmax uses powers of two. Values that a warpgroup
holds in registers have the layout in which the matrix unit (wgmma) leaves them.
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
# A program each; the last varies fastest, over the interleaved heads of all rows. Where an axis of
# the device mesh has such a name, Pallas uses the index on the mesh.
GRID = ("_lcjax_heads", "_lcjax_tiles", "_lcjax_rows")
WARPGROUP = "_lcjax_warpgroup"
# Registers of a thread, of those that compute and of those that copy, by the number of compute
# warpgroups: 2 x 240 + 24 and 3 x 160 + 32 of the 512 that there are.
REGISTERS = {2: (240, 24), 3: (160, 32)}


def fill(shape, value: float, axis: int | None = None):
    """A matrix of one value, or a vector that lies along axis `axis` of matrices."""
    layout = WGMMA if axis is None else WGMMA.reduce(1 - axis)
    return plgpu.layout_cast(jnp.full(shape, value, F32), layout)


def column(ref, axis: int):
    """A vector in shared memory that lies along axis `axis` of matrices."""
    index = inspect.signature(plgpu.load).parameters.get("idx")
    is_required = index is not None and index.default is inspect.Parameter.empty  # until jax 0.10
    return plgpu.load(ref, **({"idx": ()} if is_required else {}), layout=WGMMA.reduce(1 - axis))


def repeat(x, axis: int, shape):
    """A vector along axis `axis` of a matrix, repeated along the other."""
    return lax.broadcast_in_dim(x, shape, (axis,))


def iota(axis: int, shape):
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=WGMMA)


def rem(x, n: int):
    return jnp.zeros_like(x) if n == 1 else lax.rem(x, jnp.asarray(n, x.dtype))


def div(x, n: int):
    return x if n == 1 else lax.div(x, jnp.asarray(n, x.dtype))


def product(a, b, between: Callable = lambda: None):
    """a b^T of tiles in shared memory, float32."""

    def multiply(total):
        plgpu.wgmma(total, a, b.transpose((1, 0)))
        between()
        return total[...]

    return pl.run_scoped(multiply, plgpu.ACC((a.shape[0], b.shape[0]), F32))


def sums_on(starts, begin: Callable) -> list:
    """`starts` and the products that `begin(sums, ready)` adds to them; waits for the products.

    ready(i, later): what sum i is, while the last `later` products that were begun go on.
    """

    def run(sums):
        begin(sums, lambda i, later: plgpu.wgmma_accumulator_load(sums[i], wait_n=later))

    return pl.run_state(run)([plgpu.ACC.init(x) for x in starts])


def add_product(total, a, b) -> None:
    """Adds a b to a sum of products; a is of values in registers, b a tile in shared memory."""
    plgpu.wgmma(total, a.astype(b.dtype), b)


class ProgramIndex(NamedTuple):
    """The batch row, query head, key head and resident tile of a program."""

    row: object
    head: object
    key_head: object
    tile: object


class Visits(NamedTuple):
    """The tiles that a block of the resident side meets: `full` of `seen` need no element test.

    start: the offset of the block's list among those at `list_index` in `index`.
    repeats: the number of heads that meet the same tiles, one after the other.
    blocks: the number of blocks of one head, if the heads of a group have lists of their own.
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
        """The number of a step's head in its group."""
        if self.blocks is None:
            return rem(step, self.repeats)
        return div(self._entry(step), self.blocks)

    def tile(self, step):
        """The number of a step's streamed tile."""
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
    """heads: the number of query heads that pass by, each with its tiles."""
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
    """Rows `first`.. of an operand, of this program's batch row and head."""
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
        """Waits until all is free: who has waited for a barrier once sees it to its end."""

        def wait(i, _):
            for free in self.scratch["free"]:
                plgpu.barrier_wait(free.at[self.slot(steps - 1 - i)])

        lax.fori_loop(0, jnp.minimum(steps, self.stages), wait, None)

    def wait(self, i: int, step) -> None:
        plgpu.barrier_wait(self.scratch["filled"][i].at[self.slot(step)])

    def release(self, i: int, step) -> None:
        if any(self.scratch[name].ndim == 2 for name in self.names[i]):
            # Vectors are read by threads and not by the matrix unit: without a fence, nothing
            # orders that before the copy engine writes there again.
            plgpu.commit_smem()
        plgpu.barrier_arrive(self.scratch["free"][i].at[self.slot(step)])

    def first(self, visits: Visits, step):
        """The first row of a step's tile."""
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

    resident: its first row.
    streamed: a function that returns the first row of the other.
    vectors: indices and segments in shared memory, and 0, 1, ... for the axis that passes: numbers
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
            return seen & (q == k) & (k != 0)  # padding behind the last key has segment 0, too
        length = spec.tiling.keys.length
        return seen if spec.tiling.keys.padded == length else seen & (number(k_axis) < length)

    def hide(self, spec: KernelSpec, masked, values, otherwise: float):
        """`values`, or `otherwise` where the element test of a step hides them."""

        def test(values):
            return jnp.where(self.seen(spec), values, otherwise)

        return lax.cond(masked, test, lambda values: values, values)


def logits(spec: KernelSpec, products):
    """(values, factor that makes them logits in multiples of log 2); values of a cap are tanh."""
    factor, cap = spec.scale * LOG2E, spec.soft_cap
    if cap is not None:
        # tanh of powers of two: the chip's own is good to 11 bits only.
        tanh = 1.0 - 2.0 / (jnp.exp2(products * (2 * factor / cap)) + 1.0)
        return tanh, cap * LOG2E
    return (products, factor) if factor > 0 else (products * factor, 1.0)


def hidden(spec: KernelSpec, products, tiles: TilePair, masked):
    """(values, factor) of `logits` where keys are seen; elsewhere their power of two is 0."""
    values, factor = logits(spec, products)
    # The square of what is hidden has to stay finite where it is a slope.
    return tiles.hide(spec, masked, values, -jnp.inf if spec.soft_cap is None else -1e18), factor


def probabilities(spec: KernelSpec, values, factor, lse, axis: int):
    """(p, p times the slope of the cap) from the saved lse, in multiples of log 2 along `axis`."""
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

    The last thing that a warpgroup does: the end of the kernel waits for global memory.
    """
    plgpu.commit_smem()
    for source, target in pairs:
        plgpu.copy_smem_to_gmem(source, target)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def grid(spec: KernelSpec, heads: int, tiles: int, rows: int) -> tuple[int, int, int]:
    """The sizes of the axes of GRID."""
    return heads // spec.interleaved, tiles, rows * spec.interleaved


def grid_index() -> tuple:
    """The indices of a program along the axes of GRID."""
    return tuple(lax.axis_index(name) for name in GRID)


def of_queries(spec: KernelSpec, index: tuple) -> ProgramIndex:
    """The program at `index` of a grid over query heads and tiles of queries.

    The last tiles start first: under a causal mask they have the longest lists.
    """
    heads, tile, x = index
    head = heads * spec.interleaved + rem(x, spec.interleaved)
    tile = spec.tiling.queries.count - 1 - tile
    return ProgramIndex(div(x, spec.interleaved), head, div(head, spec.group), tile)


def of_keys(spec: KernelSpec, index: tuple) -> ProgramIndex:
    """The program at `index` of a grid over heads and tiles of keys; head is None for key heads."""
    heads, tile, x = index
    row, head = div(x, spec.interleaved), heads * spec.interleaved + rem(x, spec.interleaved)
    if spec.per_query_head:
        return ProgramIndex(row, head, div(head, spec.group), tile)
    return ProgramIndex(row, None, head, tile)
