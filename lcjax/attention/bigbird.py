"""BigBird's blocks: near, first and random ones (Zaheer et al. 2020, arXiv 2007.14062)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lcjax.attention.base import Pass, Pattern, Places
from lcjax.errors import InputError, whole_number, whole_numbers
from pallas_kernels import Mask, causal, chunk_distance, per_head, prefix, random_blocks

Rows = tuple[tuple[int, ...], ...]


@Pattern.register_subclass("bigbird")
@dataclass(frozen=True)
class BigBird(Pattern):
    """The blocks just before a token, the first blocks of the text, and some drawn at random.

    A token of block n sees, up to itself, the blocks n - near to n, the first `global_blocks`, and
    `random` of those between, which `seed` fixes (sec. 2, the ITC form with blocks, sec. D).

    This is the causal form, for language models. The paper's encoder sees as much ahead (a window
    of 3 blocks is `near: 1`), and its last block is global, too; before a text has ended nobody
    knows that block. Random blocks are drawn here among the ones before the window, row by row, so
    that they stay when the text grows; the released plans draw them once for a fixed length, also
    ahead of the token. `table` gives such a plan (its `rand_attn`, one list of block numbers for
    each block of queries, per head or once for all): what it lists ahead of a token is not seen.
    """

    examples = (
        {"block": 5, "random": 1, "near": 2, "global_blocks": 2, "per_head": False},
        {"block": 16, "table": (((), (2,), (0,), (1, 0), (1,), (2,)),)},
    )

    block: int = 64  # tokens
    near: int = 1  # blocks of the window before the own one
    global_blocks: int = 1  # first blocks of the text, seen by all
    random: int = 3  # blocks drawn for each block of queries
    per_head: bool = True  # heads draw blocks of their own; each costs a call of the kernel
    seed: int = 0
    table: tuple[Rows, ...] | None = None  # instead of drawing: [heads or 1][query block][blocks]

    def __post_init__(self):
        whole_number("pattern.block", self.block, 1)
        whole_numbers("pattern", self, 0, "near", "global_blocks", "random", "seed")
        for plan in self.table or ():
            for row in plan:
                for number in row:
                    whole_number("pattern.table: a block", number, 0)

    def passes(self, places: Places) -> list[Pass]:
        seen = chunk_distance(self.block, 0, self.near) | prefix(self.global_blocks * self.block)
        plans = self._plans(places.k_positions.shape[1], places.heads)
        parts = [random_blocks(self.block, plan) for plan in plans]
        drawn: Mask = parts[0] if len(parts) == 1 else per_head(*((part, 1) for part in parts))
        return [Pass(places.q_positions, places.k_positions, causal() & (seen | drawn))]

    def _plans(self, length: int, heads: int) -> tuple[Rows, ...]:
        """The blocks of each block of queries; one plan for all heads, or one for each."""
        if self.table is not None:
            if len(self.table) not in (1, heads):
                raise InputError(
                    f"pattern.table holds {len(self.table)} plans; must hold 1 or {heads}, the "
                    "number of heads"
                )
            return self.table
        blocks = -(-length // self.block)
        return tuple(self._draw(blocks, head) for head in range(heads if self.per_head else 1))

    def _draw(self, blocks: int, head: int) -> Rows:
        """`random` different blocks between the global ones and the window, or all of them.

        Rows are drawn one after the other, so those of a longer text begin with the same ones.
        """
        first = self.global_blocks
        there = np.maximum(np.arange(blocks) - self.near - first, 0)
        shares = np.random.default_rng([self.seed, head]).random((blocks, self.random))
        picked = np.zeros((blocks, 0), np.int64)
        for count in range(self.random):
            # Among those that are left, counted past the ones that were picked before.
            choice = (shares[:, count] * (there - count)).astype(np.int64)
            for column in np.sort(picked, axis=1).T:
                choice += choice >= column
            picked = np.concatenate([picked, choice[:, None]], axis=1)
        numbers = np.sort(picked + first, axis=1)
        return tuple(
            tuple(range(first, first + some)) if some <= self.random else tuple(row)
            for some, row in zip(there.tolist(), numbers.tolist())
        )
