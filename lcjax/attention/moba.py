"""MoBA, a mixture of block attention (Lu et al. 2025, arXiv 2502.13189).

Letters: C complete blocks of keys, n blocks that a query reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from lcjax.attention.base import Pattern
from lcjax.attention.chosen_blocks import ChosenBlocks
from lcjax.errors import PositiveInt
from pallas_kernels import gather


@Pattern.register_subclass("moba")
@dataclass(frozen=True)
class MoBA(ChosenBlocks):
    """A token sees its own block up to itself, and the past blocks that match its query best.

    Blocks of `block` tokens count from the first token of a document. Each query head scores a past
    block by the product of its query and the mean of the block's keys, both rotated, in float32
    (sec. 2.2), and reads the `top_k - 1` best blocks and its own in one softmax. Scores that differ
    by less than 2^-12 of |q| |mean| (2^-10 in bfloat16) count as equal, and of equal blocks the
    later ones are read. A token with fewer past blocks reads all of them, so a text of up to
    `block` x `top_k` tokens has full attention.

    There are no parameters: a model with full attention can go on with MoBA and back at any step,
    for all layers or some (`model.layers`). The choice has no gradient. Each head of a generated
    token reads `top_k` blocks of the cache, too; the released code reads all keys there. A layer
    holds `top_k - 1` copies of its queries and outputs at a time, at most 8 of a long text.

    The paper continues Llama 3.1 8B to a million tokens with blocks of 4,096 and 12 of them, and
    full attention in the last 3 layers (sec. 3.3).
    """

    examples = ({"block": 8, "top_k": 3}, {"block": 5, "top_k": 2})
    setting: ClassVar[str] = "model.pattern.type=moba"
    chooses_by_query_head: ClassVar[bool] = True

    block: PositiveInt = 4096  # tokens
    top_k: PositiveInt = 12  # blocks that a token reads, its own included

    def choice_flops(self, layer, length, keys):
        if self.reads_all(length):
            return 0.0
        return 2 * layer.num_heads * layer.head_dim * keys / self.block

    def choose(self, q, k, queries, keys, blocks, metadata):
        summaries = blocks.means(jax.lax.stop_gradient(k))

        def best(q, query, is_candidate):
            return self._best(q, summaries, is_candidate)

        elements = q.shape[0] * q.shape[2] * summaries.shape[1]
        return self.choose_by_query(best, q, queries, blocks, elements)

    def _best(
        self,
        q: Float[Array, "B N H"],
        summaries: Float[Array, "B C K H"],
        is_past: Bool[Array, "B C"],
    ) -> tuple[Int[Array, "B N n-1"], Bool[Array, "B N n-1"]]:
        """Returns the best past blocks of a query in each row, and whether each is one."""
        wide = q[:, None].astype(jnp.float32)
        options = {"exists": is_past, "dtype": q.dtype}
        ids, is_block = gather.best_blocks(wide, summaries, self.top_k - 1, **options)
        return ids[:, 0], is_block[:, 0]

    # The choice of a generated token, for `PagedCache`

    def summary_dtypes(self, layer):
        return {"means": jnp.dtype("float32")}

    def summarise(self, pages):
        return {"means": jnp.where(pages.is_token, pages.keys, 0).astype(jnp.float32).mean(3)}

    def choose_past_pages(self, token, arrays, slots):
        means = arrays["means"].swapaxes(1, 2)
        is_past = jnp.arange(means.shape[1]) < (token.index // self.block)[:, None]
        return self._best(token.q, means, is_past)
