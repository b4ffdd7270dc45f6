"""FlexPrefill (Lai et al. 2025, arXiv 2502.20766): each head chooses how to read a prompt.

Letters: P probes, the last queries; S keys; nq and nk blocks of queries and of keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from lcjax.attention.base import Pattern
from lcjax.attention.prompt_blocks import PromptBlocks, PromptHead, ranks
from lcjax.errors import Interval, PositiveInt
from pallas_kernels import gather

# Entries that are counted as one block when budgets are computed, whatever `block` is, as in the
# released code.
_COUNTED = 128


@Pattern.register_subclass("flex_prefill")
@dataclass(frozen=True)
class FlexPrefill(PromptBlocks):
    """Each head of a prompt sees columns and diagonals of blocks, or the best pairs of blocks.

    The last `block` queries are probes. Their mean attention to each block of keys is compared with
    a guess, the softmax of the products of their mean and the mean keys of blocks:

    - If the square root of the Jensen-Shannon divergence is `tau` or more, the head is a
      vertical-slash head. Its budget of columns is the number of keys with the greatest attention
      that reach `gamma`, in blocks, and that of diagonals counts distances likewise.
    - Otherwise it is query-aware: pairs of blocks with the greatest softmax of mean query and mean
      key are visible, as long as their sum is at most `gamma` times that of all pairs. Both budgets
      are the least ones.

    All queries see the columns of blocks and the diagonals of blocks with the greatest sums, up to
    the budgets, and always the first block and their own one. Budgets are counted as in the
    released code.

    The method needs no training and is for prompts only: the last tokens choose what early ones
    see, so neither training nor perplexity is meaningful. Each call chooses for its own queries. A
    prompt is therefore read in one call, whatever `prefill_chunk` is, and each turn of a
    conversation chooses again for its new text. Blocks begin at the first token of a document, and
    each document of a packed row chooses for itself. Documents of at most 2 `block` tokens, or
    `min_budget`, and calls with fewer than `block` queries, such as decoding, see all keys.
    """

    examples = ({"block": 8, "min_budget": 8},)
    gamma: Annotated[float, Interval(above=0, most=1)] = 0.9  # share of attention that is kept
    # Divergence, at most 0.83, below which a head is query-aware; 0: no head is
    tau: Annotated[float, Interval(least=0, most=1)] = 0.1
    block: PositiveInt = 128  # tokens of a block
    min_budget: PositiveInt = 1024  # least tokens of columns, and of diagonals (512 to 1,024)

    @property
    def _least_blocks(self) -> int:
        return -(-self.min_budget // self.block)

    def choose(self, head: PromptHead) -> Bool[Array, "nq nk"]:
        current = head.first // self.block + jnp.arange(len(head.q) // self.block)
        attention, is_query_aware = self._probe(head)
        visible = self._vertical_slash(attention, current, is_query_aware)
        visible |= lax.cond(
            is_query_aware, self._best_pairs, lambda *_: jnp.zeros_like(visible), head, current
        )
        # Heads of short documents, and without enough queries for the probes, see all blocks.
        is_short = attention.num_keys <= self.block * max(2, self._least_blocks)
        return visible | is_short | (head.is_query.sum() < self.block)

    def _probe(self, head: PromptHead) -> tuple[_ProbeAttention, Bool[Array, ""]]:
        """Returns the attention of the probes, and whether the head is query-aware."""
        block, size = self.block, head.q.shape[-1]
        num_queries, num_keys = head.is_query.sum(), head.is_key.sum()
        start = jnp.argmax(head.is_query) + jnp.maximum(num_queries - block, 0)
        probes = lax.dynamic_slice_in_dim(head.q, start, block)
        slots = jnp.arange(len(head.k))
        # Entry i is the distance of key i from a probe, and also the key at distance i from it.
        apart = (head.first + start + jnp.arange(block))[:, None] - slots
        logits = gather.einsum("PH,SH->PS", probes, head.k) * size**-0.5
        is_visible = (apart >= 0) & head.is_key
        # -1e30 is finite, so that softmax gives no NaN for slots without a query.
        logits = jnp.where(is_visible, logits, -1e30)
        weights = jnp.where(is_visible, jax.nn.softmax(logits, axis=-1), 0.0) / block
        vertical = weights.sum(0)
        by_distance = jnp.take_along_axis(weights, jnp.clip(apart, 0, len(slots) - 1), axis=1)
        slash = jnp.where(apart >= 0, by_distance, 0.0).sum(0)
        k = self._block_means(head.k, head.is_key)
        mean = probes.astype(jnp.float32).mean(0)
        logits = gather.einsum("H,CH->C", mean, k) * size**-0.5
        has_key = head.is_key.reshape(-1, block).any(1)
        guess = jax.nn.softmax(jnp.where(has_key, logits, -1e30))
        is_query_aware = _divergence(guess, self._block_sums(vertical)) < self.tau
        return _ProbeAttention(vertical, slash, num_keys), is_query_aware

    def _vertical_slash(
        self,
        attention: _ProbeAttention,
        current: Int[Array, " nq"],
        is_query_aware: Bool[Array, ""],
    ) -> Bool[Array, "nq nk"]:
        """Returns the blocks in the best columns and diagonals of blocks."""
        vertical, slash, num_keys = attention
        num_blocks = -(-num_keys // self.block)
        ids = jnp.arange(len(vertical) // self.block)
        columns = jnp.where(ids == 0, jnp.inf, self._block_sums(vertical))
        # Diagonals form blocks from the greatest distance on, so the nearest block may be smaller.
        distances = jnp.arange(len(slash))
        block_distance = num_blocks - 1 - (num_keys - 1 - distances) // self.block
        diagonals = jnp.zeros(len(ids)).at[block_distance].add(slash, mode="drop")
        diagonals = jnp.where(ids == 0, jnp.inf, diagonals)

        def best(sums, values):
            counted = jnp.sum(jnp.cumsum(jnp.sort(values)[::-1]) <= self.gamma) + 1
            budget = jnp.maximum(counted // _COUNTED + 1, self._least_blocks)
            budget = jnp.where(is_query_aware, self._least_blocks, budget)
            return ranks(sums) < budget

        apart = current[:, None] - ids
        is_diagonal = jnp.take(best(diagonals, slash), jnp.maximum(apart, 0)) & (apart >= 0)
        return best(columns, vertical) | is_diagonal

    def _best_pairs(self, head: PromptHead, current: Int[Array, " nq"]) -> Bool[Array, "nq nk"]:
        """Returns the pairs of blocks with the greatest attention between their means."""
        q = self._block_means(head.q, head.is_query)
        k = self._block_means(head.k, head.is_key)
        has_query = head.is_query.reshape(-1, self.block).any(1)
        logits = gather.einsum("QH,CH->QC", q, k) * head.q.shape[-1] ** -0.5
        logits = jnp.where(jnp.arange(len(k)) <= current[:, None], logits, -1e30)
        weights = jnp.where(has_query[:, None], jax.nn.softmax(logits, axis=-1), 0.0).reshape(-1)
        order = jnp.argsort(-weights, stable=True)
        is_chosen = jnp.cumsum(weights[order]) <= self.gamma * has_query.sum()
        return jnp.zeros(weights.shape, bool).at[order].set(is_chosen).reshape(logits.shape)

    def _block_sums(self, x: Float[Array, " S"]) -> Float[Array, " nk"]:
        return x.reshape(-1, self.block).sum(1)

    def _block_means(
        self, x: Float[Array, "S H"], is_token: Bool[Array, " S"]
    ) -> Float[Array, "nk H"]:
        """Returns float32 means over the tokens of each block."""
        sums = x.astype(jnp.float32).reshape(-1, self.block, x.shape[-1]).sum(1)
        return sums / jnp.maximum(is_token.reshape(-1, self.block).sum(1), 1)[:, None]


class _ProbeAttention(NamedTuple):
    """The mean attention of the probes of a head, float32."""

    vertical: Float[Array, " S"]  # to each key
    slash: Float[Array, " S"]  # to each distance
    num_keys: Int[Array, ""]


def _divergence(p: Float[Array, " nk"], q: Float[Array, " nk"]) -> Float[Array, ""]:
    """Returns the square root of the Jensen-Shannon divergence, in nats."""
    mean = (p + q) / 2

    def relative(x):
        return jnp.where(x > 0, x * jnp.log(jnp.where(x > 0, x, 1) / mean), 0.0).sum()

    return jnp.sqrt(jnp.maximum((relative(p) + relative(q)) / 2, 0))
