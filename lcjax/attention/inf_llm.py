"""InfLLM (Xiao et al. 2024, arXiv 2402.04617): a memory of blocks behind a window, untrained."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from lcjax.attention.base import Pass, Pattern, Places
from lcjax.attention.inf_llm_retrieval import read
from lcjax.attention.near_far import near_and_far
from lcjax.errors import InputError, whole_number, whole_numbers
from lcjax.rope.base import Rotation
from pallas_kernels import Mask, prefix


@Pattern.register_subclass("inf_llm")
@dataclass(frozen=True)
class InfLLM(Pattern):
    """A window, the first tokens, and the blocks of older tokens that look most relevant.

    Query i sees key j of its window, 0 <= i - j < window, at distance i - j. Everything older
    stands at one distance, window - 1: the first `sinks` tokens, the chosen blocks, and tokens in
    no block yet (sec. 3.1 and 3.2). Tokens behind the sinks form blocks of `block`; a block can be
    chosen as soon as the window has left all of it (in the released code one token later). Its
    summary is, per head, the mean unrotated key of the `representatives` tokens that received most
    attention, summed over the queries that had them in their window. `chunk` tokens of a text share
    one choice: the `top_k` blocks with the greatest product of summary and mean query, summed over
    heads, or for every head its own with `per_head`. A chunk that is read in several calls, as in
    decoding, chooses in each of them anew.

    The one distance and the choice of representatives are the released code's: the paper has
    distance `window`, and means of logits instead of sums of attention. The masks are exact and
    disjoint, where that code counts some keys twice in a prompt.
    All keys stay in device memory: moving old blocks to the host and caching the popular ones is a
    matter of that implementation, not of the method. In a chunk above 1 the choice for a token
    depends on the chunk's later ones, too, so perplexities are slightly favoured, as in the paper.
    """

    examples = (
        {"window": 9, "sinks": 3, "block": 4, "top_k": 2, "representatives": 2, "chunk": 1},
        {"window": 6, "sinks": 0, "block": 3, "top_k": 3, "representatives": 2, "chunk": 1,
         "per_head": True},
    )  # fmt: skip
    moves_keys = True

    window: int = 4096  # keys at their own distance, the token itself included (released: n_local)
    sinks: int = 128  # first tokens that stay visible (n_init)
    block: int = 128  # tokens of a block (block_size)
    top_k: int = 16  # blocks that are read (topk)
    representatives: int = 4  # tokens that stand for their block (repr_topk)
    chunk: int = 512  # consecutive tokens with one choice (exc_block_size)
    per_head: bool = False  # whether every query head chooses for itself

    def __post_init__(self):
        whole_number("pattern.sinks", self.sinks, 0)
        whole_numbers("pattern", self, 1, "window", "block", "top_k", "representatives", "chunk")
        if self.representatives > self.block:
            raise InputError(
                f"pattern.representatives={self.representatives} must not exceed the tokens of a "
                f"block, pattern.block={self.block}"
            )

    def blocks_in(self, tokens):
        """How many blocks the window has left behind when the last of `tokens` is read."""
        return (tokens - self.window - self.sinks) // self.block

    def passes(self, places: Places) -> list[Pass]:
        """What is seen while the latest blocks are the best: as many keys as in any other case."""
        return near_and_far(places, self.window, self.window - 1, prefix(self.sinks) | Latest(self))

    def notes(self, slots: int, size: int) -> tuple[tuple[int, int], ...]:
        """Attention that each key received while in the window, and the summary of each block."""
        blocks = self.blocks_in(slots)
        return ((1, slots), (blocks, size)) if blocks > 0 else ()

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        rotation: Rotation,
        places: Places,
        *,
        keys_rotated: bool = False,
        implementation: str | None = None,
    ) -> jax.Array:
        self.check_unrotated(keys_rotated)
        rows, heads, size = q.shape[0], q.shape[2], q.shape[3]
        notes = self.notes(k.shape[1], size)
        if notes and q.shape[1] != k.shape[1]:
            raise InputError(
                f"pattern inf_llm: {q.shape[1]} queries of {k.shape[1]} keys do not tell what "
                "attention the older keys received; give the queries of all keys, or use a cache"
            )
        notes = tuple(jnp.zeros((rows, heads, *note), jnp.float32) for note in notes)
        packed = places.q_segments is not None
        run = places.unsplit(implementation)
        return read(self, q, k, v, notes, rotation, places, packed, run)[0]

    def attend_noting(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        notes: tuple[jax.Array, ...],
        rotation: Rotation,
        places: Places,
        *,
        keys_rotated: bool = False,
        implementation: str | None = None,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        self.check_unrotated(keys_rotated)
        run = places.unsplit(implementation)
        return read(self, q, k, v, notes, rotation, places, False, run)


@dataclass(frozen=True)
class Latest(Mask):
    """The last `top_k` blocks that the first query of a chunk may choose, and what follows them."""

    pattern: InfLLM

    def _first(self, q):
        """The first key of them."""
        p = self.pattern
        # In terms of 0 and 1, so that it holds for Python integers and for arrays.
        blocks = p.blocks_in(q // p.chunk * p.chunk + 1) - p.top_k
        return p.sinks + blocks * (blocks > 0) * p.block

    def element(self, q, k):
        return k >= self._first(q)

    def bounds(self, q_lo, q_hi, k_lo, k_hi):
        return k_hi >= self._first(q_lo), k_lo >= self._first(q_hi)
