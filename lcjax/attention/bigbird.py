"""BigBird's blocks: near, first and random ones (Zaheer et al. 2020, arXiv 2007.14062)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from lcjax.attention.base import AttentionMetadata, Pass, Pattern
from lcjax.errors import InputError, NonNegativeInt, PositiveInt, check_integer
from pallas_kernels import Mask, causal, chunk_distance, per_head, prefix, random_blocks

Plan = tuple[tuple[int, ...], ...]  # the random blocks of each block of queries


@Pattern.register_subclass("bigbird")
@dataclass(frozen=True)
class BigBird(Pattern):
    """The blocks just before a token, the first blocks of the text, and random blocks.

    A token of block n sees, up to itself, the blocks n - near to n, the first `global_blocks`, and
    `random` blocks between them, which depend on `seed` (sec. 2, the ITC form with blocks, sec. D).

    This is the causal form for language models. The paper's encoder has a window to both sides (3
    blocks are `near: 1`), and its last block is also global; while a text grows, that block is
    unknown. Here random blocks are drawn from those before the window, one block of queries after
    the other, so that they stay the same when the text grows. The released plans are drawn once for
    a fixed length, and include blocks after the token. `table` is such a plan (`rand_attn` of the
    released code: a list of block ids for each block of queries, per head or one for all heads);
    its later blocks are not visible.
    """

    examples = (
        {"block": 5, "random": 1, "near": 2, "global_blocks": 2, "per_head": False},
        {"block": 16, "table": (((), (2,), (0,), (1, 0), (1,), (2,)),)},
    )

    block: PositiveInt = 64  # tokens
    near: NonNegativeInt = 1  # blocks of the window before the block of the query
    global_blocks: NonNegativeInt = 1  # first blocks of the text, seen by all
    random: NonNegativeInt = 3  # blocks drawn for each block of queries
    per_head: bool = True  # each head draws its own blocks and needs its own kernel call
    seed: NonNegativeInt = 0
    table: tuple[Plan, ...] | None = None  # fixed plan: [heads or 1][query block][blocks]

    def __post_init__(self):
        super().__post_init__()
        for plan in self.table or ():
            for block_id in itertools.chain.from_iterable(plan):
                check_integer("pattern.table: a block", block_id, 0)

    def passes(self, metadata: AttentionMetadata) -> list[Pass]:
        fixed = chunk_distance(self.block, 0, self.near) | prefix(self.global_blocks * self.block)
        plans = self._plans(metadata.k_positions.shape[1], metadata.num_heads)
        masks = [random_blocks(self.block, plan) for plan in plans]
        random: Mask = masks[0] if len(masks) == 1 else per_head(*((mask, 1) for mask in masks))
        return [Pass(metadata.q_positions, metadata.k_positions, causal() & (fixed | random))]

    def _plans(self, length: int, heads: int) -> tuple[Plan, ...]:
        """Returns the random blocks of each block of queries: one plan, or one per head."""
        if self.table is not None:
            if len(self.table) not in (1, heads):
                raise InputError(
                    f"pattern.table holds {len(self.table)} plans; must hold 1 or {heads}, the "
                    "number of heads"
                )
            return self.table
        blocks = -(-length // self.block)
        return tuple(self._draw(blocks, head) for head in range(heads if self.per_head else 1))

    def _draw(self, blocks: int, head: int) -> Plan:
        """Draws up to `random` distinct blocks between the global blocks and the window.

        Random numbers are drawn block by block, so the plan of a longer text begins with that of a
        shorter one.
        """
        first = self.global_blocks
        num_candidates = np.maximum(np.arange(blocks) - self.near - first, 0)
        uniform = np.random.default_rng([self.seed, head]).random((blocks, self.random))
        drawn = np.zeros((blocks, 0), np.int64)
        for count in range(self.random):
            # An index among the remaining candidates, shifted past those that are already drawn.
            choice = (uniform[:, count] * (num_candidates - count)).astype(np.int64)
            for column in np.sort(drawn, axis=1).T:
                choice += choice >= column
            drawn = np.concatenate([drawn, choice[:, None]], axis=1)
        block_ids = np.sort(drawn + first, axis=1)
        return tuple(
            tuple(range(first, first + count)) if count <= self.random else tuple(row)
            for count, row in zip(num_candidates.tolist(), block_ids.tolist())
        )
