"""What the Hopper kernels share: a program's warpgroups, the ring that feeds them, element tests.

One warpgroup walks the list of visible blocks and has the copy engine (TMA) bring their tiles into
a ring of stages; the others multiply (wgmma). Barriers say when a stage is filled and when it is
free again. Full blocks come first in a list and are taken without an element test.

Logits are held as multiples of log 2, so that softmax is made of powers of two.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.backends.mosaic_gpu.layout import ROWS, Cut, Side
from pallas_kernels.backends.mosaic_gpu.values import column, div, iota, rem, repeat
from pallas_kernels.masks import Mask

LOG2E = math.log2(math.e)
# A program each; rows of the batch vary fastest. Where an axis of the device mesh has such a name,
# Pallas asks for the place on the mesh.
GRID = ("_lcjax_heads", "_lcjax_tiles", "_lcjax_rows")
WARPGROUP = "_lcjax_warpgroup"
# Registers of a thread where two warpgroups compute: 2 x 240 + 24 of the 512 that there are.
MUCH, LITTLE = 240, 24


@dataclass(frozen=True)
class Body:
    """What is static in a kernel."""

    mask: Mask
    soft_cap: float | None
    scale: float
    heads: int
    key_heads: int
    cut: Cut
    joined: bool  # a key head's list has the blocks of all its query heads behind each other

    @property
    def group(self) -> int:
        return self.heads // self.key_heads


class Here(NamedTuple):
    """Where a program is: numbers of the batch row, query head, key head and staying tile."""

    row: object
    head: object
    key_head: object
    tile: object


class Walk(NamedTuple):
    """The tiles that a block of the staying side meets: `full` of `seen` need no element test.

    start: where the block's list starts among those at `place` in `index`.

    repeats: how many heads meet the same tiles, one after the other. blocks: the length of a list
    of all heads of a group is divided by it, where they have lists of their own; or None.
    """

    index: object
    place: tuple
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
        """The number of a step's passing tile."""
        block = self._entry(step) if self.blocks is None else rem(self._entry(step), self.blocks)
        return block * self.pieces + rem(div(step, self.repeats), self.pieces)

    def _entry(self, step):
        return self.index[(*self.place, self.start + div(step, self.repeats * self.pieces))]


def walk(body: Body, x, here: Here, staying: Side, passing: Side, heads: int = 1) -> Walk:
    """heads: how many query heads pass by, each with its tiles."""
    rows, lists = x["index"].shape[:2]
    own = 0 if lists == 1 else here.key_head if lists == body.key_heads else here.head
    place = here.row if rows > 1 else 0, own
    block = *place, div(here.tile, staying.pieces)
    blocks = passing.count // passing.pieces if body.joined and heads > 1 else None
    repeats = heads if blocks is None else 1
    full, seen = (x[name][block] * (passing.pieces * repeats) for name in ("full", "seen"))
    return Walk(x["index"], place, x["first"][block], passing.pieces, repeats, blocks, full, seen)


def part(x, name: str, here: Here, first, count: int):
    """Rows `first`.. of an operand, of this program's batch row and head."""
    ref, rows = x[name], pl.ds(first, count)
    if name == "count":
        return ref
    if name in ("q_index", "k_index", "q_segments", "k_segments"):
        return ref.at[here.row if ref.shape[0] > 1 else 0, rows]
    if name in ("lse", "start"):
        return ref.at[here.row, here.head, rows]
    return ref.at[here.row, rows, here.key_head if name in ("k", "v") else here.head]


@dataclass(frozen=True)
class Ring:
    """Stages of passing tiles; `names` are sets of operands that are filled and freed together."""

    names: tuple[tuple[str, ...], ...]
    room: dict
    stages: int
    tile: int

    def slot(self, step):
        return rem(step, self.stages)

    def fill(self, x, here: Here, step, tile) -> None:
        slot = self.slot(step)
        for i, names in enumerate(self.names):
            barrier = self.room["filled"][i].at[slot]

            @pl.when(step >= self.stages)
            def _(i=i):
                plgpu.barrier_wait(self.room["free"][i].at[slot])

            for name in names:
                source = part(x, name, here, tile * self.tile, self.tile)
                plgpu.copy_gmem_to_smem(source, self.room[name].at[slot], barrier)

    def drain(self, steps) -> None:
        """Waits until all is free: who has waited for a barrier once sees it to its end."""

        def wait(i, _):
            for free in self.room["free"]:
                plgpu.barrier_wait(free.at[self.slot(steps - 1 - i)])

        lax.fori_loop(0, jnp.minimum(steps, self.stages), wait, None)

    def wait(self, i: int, step) -> None:
        plgpu.barrier_wait(self.room["filled"][i].at[self.slot(step)])

    def release(self, i: int, step) -> None:
        if any(self.room[name].ndim == 2 for name in self.names[i]):
            # Vectors are read by threads and not by the matrix unit: without a fence, nothing
            # orders that before the copy engine writes there again.
            plgpu.commit_smem()
        plgpu.barrier_arrive(self.room["free"][i].at[self.slot(step)])

    def first(self, walked: Walk, step):
        """The first row of a step's tile."""
        return walked.tile(step) * self.tile

    def at(self, name: str, step):
        return self.room[name].at[self.slot(step)]


def fetch(x, room, names, here: Here, first, group) -> None:
    """Brings a compute warpgroup's own rows, and waits for them."""
    for name in names:
        source = part(x, name, here, first, ROWS)
        plgpu.copy_gmem_to_smem(source, room[name].at[group], room["own"].at[group])
    plgpu.barrier_wait(room["own"].at[group])


class Meeting(NamedTuple):
    """A tile of queries and one of keys; the first axis of their products is the one that stays.

    staying: its first row; passing: gives that of the other when it is asked for. vectors: places
    and segments in shared memory, and 0, 1, ... for the axis that passes: numbers made from the
    thread's would be kept in registers while they are not needed.
    """

    shape: tuple[int, int]
    q_axis: int
    staying: object
    passing: Callable
    vectors: dict

    def seen(self, body: Body):
        q_axis, k_axis = self.q_axis, 1 - self.q_axis

        def vector(name: str, axis: int):
            return repeat(column(self.vectors[name], axis), axis, self.shape)

        def place(axis: int):
            if axis == 0:
                return iota(0, self.shape) + self.staying
            return repeat(column(self.vectors["count"], 1) + self.passing(), 1, self.shape)

        def index(name: str, axis: int):
            return vector(name, axis) if name in self.vectors else place(axis)

        seen = body.mask.element(index("q_index", q_axis), index("k_index", k_axis))
        if "q_segments" in self.vectors:
            q, k = vector("q_segments", q_axis), vector("k_segments", k_axis)
            seen = seen & (q == k) & (k != 0)
        length = body.cut.keys.length
        return seen if body.cut.keys.padded == length else seen & (place(k_axis) < length)

    def hide(self, body: Body, masked, values, otherwise: float):
        """`values`, or `otherwise` in their place where the element test of a step hides them."""

        def test(values):
            return jnp.where(self.seen(body), values, otherwise)

        return lax.cond(masked, test, lambda values: values, values)


def logits(body: Body, products):
    """(values, factor that makes them logits in multiples of log 2); values of a cap are tanh."""
    factor, cap = body.scale * LOG2E, body.soft_cap
    if cap is not None:
        # tanh of powers of two: the chip's own is good to 11 bits only.
        bent = 1.0 - 2.0 / (jnp.exp2(products * (2 * factor / cap)) + 1.0)
        return bent, cap * LOG2E
    return (products, factor) if factor > 0 else (products * factor, 1.0)


def hidden(body: Body, products, meeting: Meeting, masked):
    """(values, factor) of `logits` where keys are seen; elsewhere their power of two is 0."""
    values, factor = logits(body, products)
    # The square of what is hidden has to stay finite where it is a slope.
    return meeting.hide(body, masked, values, -jnp.inf if body.soft_cap is None else -1e18), factor


def probabilities(body: Body, values, factor, lse, axis: int):
    """(p, p times the slope of the cap) from the saved lse, in multiples of log 2 along `axis`."""
    p = jnp.exp2(values * factor - repeat(lse, axis, values.shape))
    return p, p if body.soft_cap is None else p * (1.0 - values * values)


def specialise(body: Body, compute: Callable, move: Callable) -> None:
    """Runs `compute(warpgroup)` in the compute warpgroups and `move()` in the last one."""
    group, several = lax.axis_index(WARPGROUP), body.cut.groups > 1

    @pl.when(group < body.cut.groups)
    def _():
        if several:
            plgpu.set_max_registers(MUCH, action="increase")
        compute(group)

    @pl.when(group == body.cut.groups)
    def _():
        if several:
            plgpu.set_max_registers(LITTLE, action="decrease")
        move()


def send(*pairs) -> None:
    """Copies from shared to global memory, and waits until they are done."""
    plgpu.commit_smem()
    for source, target in pairs:
        plgpu.copy_smem_to_gmem(source, target)
    plgpu.wait_smem_to_gmem(0)


def of_queries(body: Body) -> Here:
    """A program's place in a grid over query heads and tiles of queries.

    The last tiles start first: under a causal mask they have the longest lists.
    """
    head, tile, row = (lax.axis_index(name) for name in GRID)
    return Here(row, head, div(head, body.group), body.cut.queries.count - 1 - tile)


def of_keys() -> Here:
    """A program's place in a grid over key heads and tiles of keys."""
    head, tile, row = (lax.axis_index(name) for name in GRID)
    return Here(row, None, head, tile)
