"""MiniMax sparse attention (MiniMax-M3, arXiv 2606.13392): an indexer chooses blocks of keys.

Letters: C complete blocks of keys, J channels of an index head, m chosen blocks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from lcjax.attention.base import Features, Parameter, Pattern, rotate_qk
from lcjax.attention.cache import FullCache, LayerCache
from lcjax.attention.chosen_blocks import Blocks, ChosenBlocks, complete_blocks
from lcjax.attention.indexer import (
    DistilledPattern,
    index_rotation,
    kl_divergence,
    log_softmax,
    logits,
    rms_norm,
)
from lcjax.attention.on_devices import DocumentTokens, on_devices
from lcjax.attention.pages import PagedCache
from lcjax.errors import PositiveInt
from pallas_kernels import gather


@Pattern.register_subclass("msa")
@dataclass(frozen=True)
class MSA(DistilledPattern, ChosenBlocks):
    """A token sees its own block up to itself, and the past blocks that an indexer scores highest.

    Blocks of `block` tokens count from the first token of a document. The indexer has a query head
    for each key head of attention, and one key head, whose keys a cache keeps; both are normed and
    rotated as attention is, in their first channels. The score of a past block is the largest
    product of the index query with an index key of the block, in float32. The query heads of a key
    head read the `top_k - 1` best blocks and their own in one softmax. Scores that differ by no
    more than their rounding error count as equal, and of equal blocks the later ones are read. A
    text of up to `block` x `top_k` tokens has full attention, so a dense model is unchanged until
    its texts are longer.

    Training has two stages, as that of `dsa`. With `dense`, attention is full, and the indexer
    learns the mean of the probabilities of the query heads that share it
    (train.trainable=[pattern]). Then `dense` is false and all weights are trained, and the indexer
    learns over the keys of the chosen blocks alone. Neither loss has a gradient for the other part.
    """

    examples = (
        {"block": 8, "top_k": 3, "head_dim": 16},
        {"block": 5, "top_k": 2, "head_dim": 6},
    )
    setting: ClassVar[str] = "model.pattern.type=msa"
    chooses_by_query_head: ClassVar[bool] = False

    block: PositiveInt = 128  # tokens
    top_k: PositiveInt = 16  # blocks that a token reads, its own included
    head_dim: PositiveInt = 128  # J, channels of an index head

    @property
    def parameters(self):
        names = functools.partial("self_attn.indexer.{}.weight".format)
        return {
            "block_query": Parameter("DKJ", names("q_proj"), "KJ,D"),
            "block_key": Parameter("DJ", names("k_proj"), "J,D"),
            "block_query_norm_scale": Parameter("J", names("q_norm"), "J", "zeros"),
            "block_key_norm_scale": Parameter("J", names("k_norm"), "J", "zeros"),
        }

    @property
    def sizes(self):
        return {"J": self.head_dim}

    @property
    def layer_cache(self) -> LayerCache:
        if self.dense:
            return FullCache()
        return PagedCache(self, features=(("index", 1, self.head_dim),))

    def reads_all(self, keys):
        return self.dense or super().reads_all(keys)

    def choice_flops(self, layer, length, keys):
        learns = self.dense or not self.reads_all(length)
        return 2.0 * layer.num_kv_heads * self.head_dim * keys if learns else 0.0

    def features(self, parameters, x, q, k, metadata):
        x = jax.lax.stop_gradient(x)
        rotation = index_rotation(metadata.rotation, self.head_dim)

        def index(name, axes):
            y = gather.einsum(f"BTD,D{axes}->BT{axes}", x, parameters[f"block_{name}"])
            y = y.astype(x.dtype).reshape(*x.shape[:2], -1, self.head_dim)
            y = rms_norm(y, 1 + parameters[f"block_{name}_norm_scale"].astype(jnp.float32))
            return rotation.rotate(y, metadata.q_positions)

        return Features({"index": index("query", "KJ")}, {"index": index("key", "J")}, {})

    def choose(self, q, k, queries, keys, blocks, metadata):
        features, index = metadata.features.queries, metadata.features.keys["index"]
        return self._choose(features["index"], index, queries, blocks)

    def _choose(self, index_queries, index_keys, queries, blocks):
        of_blocks = blocks.take(index_keys)[:, :, 0]  # [B, C*block, J]
        longest = gather.lengths(of_blocks).reshape(*blocks.slots.shape).max(-1)

        def best(index, query, is_candidate):
            scores = gather.einsum("BKJ,BSJ->BKS", index, of_blocks.astype(index.dtype))
            scores = scores.reshape(*scores.shape[:2], *blocks.slots.shape[1:]).max(-1)
            return self._best(index, scores, longest, is_candidate)

        rows, _, heads, _ = index_queries.shape
        elements = rows * heads * of_blocks.shape[1]
        return self.choose_by_query(best, index_queries, queries, blocks, elements)

    def _best(
        self,
        index: Float[Array, "B K J"],
        scores: Float[Array, "B K C"],
        longest: Float[Array, "B C"],
        is_candidate: Bool[Array, "B C"],
    ) -> tuple[Int[Array, "B K m"], Bool[Array, "B K m"]]:
        """Returns the best past blocks of a query in each row, and whether each is one.

        Args:
          index: index queries.
          scores: those of the blocks.
          longest: the length of the longest index key of each block.
          is_candidate: blocks that the query may choose.
        """
        bound = gather.lengths(index) * jnp.where(is_candidate, longest, 0).max(-1)[:, None]
        margin = gather.tie(index.dtype) * bound[..., None]
        return gather.best(scores, self.num_chosen, is_candidate[:, None], margin)

    def divergence(self, q, k, metadata):
        """Returns the KL divergence of the indexer from attention, as the mean over key heads.

        The teacher is the mean of the probabilities of the query heads that share the choice. Both
        are over the visible keys if attention is full, else over those of the chosen blocks.
        """
        return on_devices(self._divergence, q, k, None, metadata, by_head=True)

    def _divergence(self, q, k, v, queries, keys, metadata, axis):
        q, k = map(jax.lax.stop_gradient, rotate_qk(q, k, metadata))
        features, index = metadata.features.queries, metadata.features.keys["index"][:, :, 0]
        chosen = None
        if not self.reads_all(k.shape[1]):
            blocks = complete_blocks(keys, self.block)
            pair = jax.lax.stop_gradient((features["index"], index[:, :, None]))
            chosen = self._choose(*pair, queries, blocks).swapaxes(1, 2)  # [B, T, K, m]
        keys = keys.with_segments()

        @jax.checkpoint
        def of_query(arrays):
            q, features, query, chosen = arrays
            visible = keys.visible_to(query)[:, None]
            if chosen is not None:
                visible &= self._in_chosen(chosen, query, keys, blocks)
            teacher = jnp.exp(log_softmax(logits(q, k, metadata.soft_cap), visible[:, :, None]))
            scores = gather.einsum("BKJ,BSJ->BKS", features["index"], index)
            scores *= self.head_dim**-0.5
            apart = kl_divergence(teacher.mean(2), scores, visible).mean(1)
            return apart if axis is None else jax.lax.pmean(apart, axis)

        elements = len(q) * k.shape[1] * (k.shape[2] + q.shape[2])
        arrays = q, features, queries.with_segments(), chosen
        with jax.named_scope("divergence"):
            return gather.by_query(of_query, arrays, elements)

    def _in_chosen(
        self,
        chosen: Int[Array, "B K m"],
        query: DocumentTokens,
        keys: DocumentTokens,
        blocks: Blocks,
    ) -> Bool[Array, "B K S"]:
        """Returns which keys are in the own block of a query of each row, or in a chosen one."""
        is_block = chosen < blocks.numbers.shape[1]
        numbers = jnp.take_along_axis(blocks.numbers[:, None], chosen, axis=2, mode="clip")
        current = jnp.broadcast_to(
            (query.index // self.block)[:, None, None], (*chosen.shape[:2], 1)
        )
        numbers = jnp.concatenate([numbers, current], -1)
        is_block = jnp.concatenate([is_block, jnp.ones(current.shape, bool)], -1)
        of_keys = keys.index // self.block
        listed = gather.is_listed(numbers, is_block, keys.index.shape[1] // self.block + 1)
        return jnp.take_along_axis(listed, of_keys[:, None], axis=2)

    # The choice of a generated token, for `PagedCache`

    def summary_dtypes(self, layer):
        return {}

    def summarise(self, pages):
        return {}

    def choose_past_pages(self, token, arrays, slots):
        index, keys = token.features["index"], arrays["index"][:, 0]
        products = gather.einsum("BKJ,BSJ->BKS", index, keys.astype(index.dtype))
        count = -(-keys.shape[1] // self.block)
        pages = jnp.where(slots.segments != 0, slots.index // self.block, count)
        rows = jnp.arange(len(pages))[:, None]
        least = jnp.full((len(pages), count, index.shape[1]), -jnp.inf)
        scores = least.at[rows, pages].max(products.swapaxes(1, 2), mode="drop").swapaxes(1, 2)
        longest = (
            jnp.zeros((len(pages), count)).at[rows, pages].max(gather.lengths(keys), mode="drop")
        )
        is_candidate = jnp.arange(count) < (token.index // self.block)[:, None]
        return self._best(index, scores, longest, is_candidate)
