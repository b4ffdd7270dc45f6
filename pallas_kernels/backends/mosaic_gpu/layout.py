"""How attention is cut into tiles for a Hopper GPU.

A program of the grid is some compute warpgroups and one that moves memory. Each compute warpgroup
holds 64 rows of the side that stays (queries in the forward pass and for dq, keys for dk and dv)
while tiles of the other side pass through a ring of stages in shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from pallas_kernels import tuning
from pallas_kernels.dispatch import given_table
from pallas_kernels.tables import from_mask, restrict, transpose

ROWS = 64  # of a warpgroup's matrix products
HEAD = 16  # head sizes are padded to multiples of it: the narrowest tile of the matrix unit
BLOCK = 128  # of a table that the caller does not give
CELLS = 2**22  # pairs of blocks of such a table; longer inputs get larger blocks
FORWARD, D_QUERIES, D_KEYS = "forward", "d_queries", "d_keys"


@dataclass(frozen=True)
class Side:
    """An axis of queries or keys: tiles of `tile` rows, `pieces` of them in a table's block."""

    length: int
    tile: int
    pieces: int
    padded: int

    @property
    def count(self) -> int:
        return self.padded // self.tile

    def pad(self, x, axis: int):
        """`x` with zeros behind, up to whole tiles along `axis`."""
        if x is None or x.shape[axis] == self.padded:
            return x
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, self.padded - x.shape[axis])
        return jnp.pad(x, widths)


def side(length: int, block: int, tile: int) -> Side:
    """Cuts an axis into tiles of `tile` rows or fewer that divide its blocks.

    A block that is alone need not be divided.
    """
    if length <= block:
        while tile > ROWS and length <= tile // 2:
            tile //= 2
        pieces = -(-length // tile)
        return Side(length, tile, pieces, pieces * tile)
    while tile > ROWS and block % tile:
        tile //= 2
    return Side(length, tile, block // tile, -(-length // block) * block)


@dataclass(frozen=True)
class Cut:
    """The tiles of one kernel; a program holds `groups` times 64 rows of the side that stays."""

    queries: Side
    keys: Side
    groups: int
    stages: int


def blocks(q, k) -> tuple[int, int]:
    """Sizes of a table's blocks where the caller gives none."""
    block = BLOCK
    while (-(-q.shape[1] // block)) * (-(-k.shape[1] // block)) > CELLS:
        block *= 2
    return block, block


def cut(kernel: str, q, k, v, q_block: int, k_block: int, capped: bool = False) -> Cut:
    tiles = tuning.mosaic_gpu(kernel, max(q.shape[-1], v.shape[-1]), capped)
    stay, move = tiles.groups * ROWS, tiles.passing
    if kernel == D_KEYS:
        queries, keys = side(q.shape[1], q_block, move), side(k.shape[1], k_block, stay)
        return Cut(queries, keys, keys.tile // ROWS, tiles.stages)
    queries, keys = side(q.shape[1], q_block, stay), side(k.shape[1], k_block, move)
    return Cut(queries, keys, queries.tile // ROWS, tiles.stages)


def table_of(q, k, operands, spec):
    """The blocks to visit, query-major."""
    places = dict(queries=q.shape[1], keys=k.shape[1])
    places |= dict(q_index=operands.q_index, k_index=operands.k_index)
    places |= dict(q_segments=operands.q_segments, k_segments=operands.k_segments)
    given = given_table(operands, spec)
    if given is not None:
        return restrict(given, spec.mask, **places)
    q_block, k_block = blocks(q, k)
    return from_mask(spec.mask, **places, q_block=q_block, k_block=k_block)


def lists(table, kernel: str, plan: Cut, group: int) -> dict:
    """The table's BlockLists as operands of a kernel.

    group: lists of that many query heads become one, of blocks that are numbered through.
    """
    if kernel == D_KEYS:
        if group > 1:
            table = table.heads(lambda x: x.reshape(len(x), -1, group * x.shape[2], *x.shape[3:]))
        found = transpose(table, plan.keys.length)
    elif plan.keys.length <= table.k_block and plan.keys.length < plan.keys.padded:
        # A lone block may be full by itself: its last tile is not.
        found = table.tested().lists()
    else:
        found = table.lists()
    return dict(index=found.index, first=found.first, full=found.full, seen=found.seen)
