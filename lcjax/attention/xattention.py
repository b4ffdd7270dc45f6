"""XAttention (Xu et al. 2025, arXiv 2503.16428): blocks of a prompt chosen by antidiagonal sums.

Letters: A strided rows of queries and C of keys, each of `stride` tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from lcjax.attention.base import Pattern
from lcjax.attention.prompt_blocks import PromptBlocks, PromptHead
from lcjax.errors import InputError, Interval, PositiveInt
from pallas_kernels import gather


@Pattern.register_subclass("xattention")
@dataclass(frozen=True)
class XAttention(PromptBlocks):
    """A block of a prompt's queries sees the fewest key blocks with most of its attention.

    Tokens are divided into runs of S = `stride`. The logit of query run a and key run c is the sum
    over r < S of q[S a + S - 1 - r] k[S c + r], one antidiagonal of their square, divided by
    S sqrt(H). The softmax over runs c <= a, summed over the runs of a block of queries and of a
    block of keys, estimates the attention between the blocks. A block of queries sees itself, the
    first block and the blocks of the greatest sums, the fewest that together reach `threshold`
    times the sum of all. Each query head chooses for itself.

    The method needs no training and is for prompts only. Blocks begin at the first token of a
    document. A token sees no later token, but the later tokens of its own block take part in the
    choice, so neither training nor perplexity is meaningful. Tokens of later blocks have no part in
    it: calls of `attend` that begin at multiples of `block` give the output of one call. Rows of a
    batch, which are padded, do not all begin there, so models read a prompt in one call, whatever
    `prefill_chunk` is. Calls with fewer than `block` queries, such as decoding, see all keys. A
    turn of a conversation that begins inside a block chooses for the rest of that block.

    The released code, for the first rows that it reads at once, omits the sum of the first block
    and takes one block more than needed; with several such parts and a length that is a multiple of
    their size, its PyTorch path hides the keys of earlier parts; and `keep_sink` shows blocks to
    the first queries instead of showing the first block to all.
    """

    examples = ({"threshold": 0.7, "stride": 2, "block": 8},)
    # Share of the estimated attention that chosen blocks reach (the paper's 0.9); above 1: all
    threshold: Annotated[float, Interval(above=0, most=2)] = 0.9
    stride: PositiveInt = 8  # tokens of a run; 8 or 16 in the paper
    block: PositiveInt = 128  # tokens of a block, a multiple of `stride`

    def __post_init__(self):
        super().__post_init__()
        if self.block % self.stride:
            least = -(-self.block // self.stride) * self.stride
            raise InputError(
                f"pattern.block={self.block} must be a multiple of pattern.stride={self.stride};"
                f" the next one is {least}"
            )

    def choose(self, head: PromptHead) -> Bool[Array, "nq nk"]:
        sums, current = self._block_sums(head)
        ids = jnp.arange(sums.shape[1])
        forced = (ids == current[:, None]) | (ids == 0)
        return _fewest_blocks(sums, forced, self.threshold)

    def _block_sums(self, head: PromptHead) -> tuple[Float[Array, "nq nk"], Int[Array, " nq"]]:
        """Returns the estimated attention between blocks, float32, and the own key blocks.

        Blocks of queries are computed so few at a time that memory is bounded.
        """
        stride, runs = self.stride, self.block // self.stride
        size = head.q.shape[-1]
        k = head.k.reshape(-1, stride * size)  # [C, S H]
        q = head.q.reshape(-1, stride, size)[:, ::-1]  # the last query meets the first key
        q = q.reshape(-1, runs, stride * size)  # [nq, A of a block, S H]
        is_run = head.is_query.reshape(-1, runs, stride).any(-1)
        current = head.first // self.block + jnp.arange(len(q))

        def of_block(q, is_run, current):
            logits = gather.einsum("AF,CF->AC", q, k) * (size**-0.5 / stride)
            run = current * runs + jnp.arange(runs)
            # -1e30 is finite, so that softmax gives no NaN for runs without a token.
            logits = jnp.where(jnp.arange(len(k)) <= run[:, None], logits, -1e30)
            weights = jnp.where(is_run[:, None], jax.nn.softmax(logits, axis=-1), 0.0)
            return weights.sum(0).reshape(-1, runs).sum(1)

        at_once = max(1, min(len(q), gather.BUDGET // (runs * len(k))))
        sums = lax.map(lambda x: of_block(*x), (q, is_run, current), batch_size=at_once)
        return sums, current


def _fewest_blocks(
    sums: Float[Array, "nq nk"], forced: Bool[Array, "nq nk"], share: float
) -> Bool[Array, "nq nk"]:
    """Returns the `forced` blocks and the fewest others that reach `share` of each row's sum.

    Of equal sums, the earlier blocks come first.
    """
    order = jnp.argsort(-jnp.where(forced, jnp.inf, sums), axis=1, stable=True)
    ranked = jnp.take_along_axis(sums, order, axis=1)
    before = jnp.cumsum(ranked, axis=1) - ranked
    needed = before < share * sums.sum(1, keepdims=True)
    return forced | jnp.take_along_axis(needed, jnp.argsort(order, axis=1), axis=1)
