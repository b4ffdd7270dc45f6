"""SeerAttention-R (Gao et al. 2025, arXiv 2506.08889): gates that learn the blocks a token reads.

Letters: C complete blocks of keys, J channels of a gate, P = 3 poolings of a block's keys, m chosen
blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Num

from lcjax.attention.base import AttentionMetadata, Features, Parameter, Pattern, rotate_qk
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
from lcjax.attention.seer import POOLINGS, pooled, unrotated
from lcjax.errors import PositiveInt
from pallas_kernels import gather


@Pattern.register_subclass("seer_r")
@dataclass(frozen=True)
class SeerAttentionR(DistilledPattern, ChosenBlocks):
    """A token sees its own block up to itself, and the past blocks with the highest learned gates.

    Blocks of `block` tokens count from the first token of a document. Each key head has a gate. Its
    query is a sum of one matrix for each query head of the key head, and its key one matrix of the
    maximum, minimum and mean of a block's keys, all of them unrotated. Both vectors of `gate_dim`
    channels are normed, and rotated to the positions of the token and of the first token of the
    block. The query heads of a key head read the `top_k` - 1 complete past blocks with the largest
    products, and their own. Scores that differ by no more than their rounding error count as equal,
    and of equal blocks the later ones are read. A text of up to `block` x `top_k` tokens has full
    attention.

    The method is for long answers to short questions, and its authors read prompts with full
    attention. Here the tokens of a long prompt choose as generated tokens do, so that a text has a
    score under the pattern.

    With `dense`, attention is full, and the gates alone learn (train.trainable=[pattern]) from the
    largest probability that a query head of the key head gives to a token of the block, divided by
    the sum over blocks. Both are over complete past blocks; the authors' are over the own block,
    too, with the tokens behind the query. They train on 400 million tokens in texts of 32K, whose
    first halves they leave out, with a rate from 1e-3 to 1e-5. Gates can also go on learning over
    all blocks while the model is trained with what it chooses.
    """

    examples = (
        {"block": 8, "top_k": 3, "gate_dim": 8},
        {"block": 5, "top_k": 2, "gate_dim": 16},
    )
    setting: ClassVar[str] = "model.pattern.type=seer_r"
    chooses_by_query_head: ClassVar[bool] = False

    block: PositiveInt = 64  # tokens
    top_k: PositiveInt = 64  # blocks that a token reads, its own included
    gate_dim: PositiveInt = 128  # J, channels of a gate

    @property
    def parameters(self):
        names = "self_attn.attn_gate.attngate_{}.weight".format
        return {
            "token_gate_query": Parameter("NHJ", names("linear_q"), "N,H,J"),
            "token_gate_key": Parameter("KPHJ", names("linear_k"), "K,PH,J"),
            "token_gate_query_norm": Parameter("J", names("qnorm"), "J", "ones"),
            "token_gate_key_norm": Parameter("J", names("knorm"), "J", "ones"),
        }

    @property
    def sizes(self):
        return {"J": self.gate_dim, "P": len(POOLINGS)}

    @property
    def layer_cache(self) -> LayerCache:
        return FullCache() if self.dense else PagedCache(self)

    def reads_all(self, keys):
        return self.dense or super().reads_all(keys)

    def choice_flops(self, layer, length, keys):
        learns = self.dense or not self.reads_all(length)
        return 2.0 * layer.num_kv_heads * self.gate_dim * keys / self.block if learns else 0.0

    def features(self, parameters, x, q, k, metadata):
        rows, length, heads, size = q.shape
        kv_heads = k.shape[2]
        matrix = parameters["token_gate_query"].astype(jnp.float32)
        matrix = matrix.reshape(kv_heads, -1, size, self.gate_dim)
        grouped = lax.stop_gradient(q).astype(jnp.float32)
        grouped = grouped.reshape(rows, length, kv_heads, heads // kv_heads, size)
        gates = gather.einsum("BTKGH,KGHJ->BTKJ", grouped, matrix)
        gates = rms_norm(gates, parameters["token_gate_query_norm"])
        rotation = index_rotation(metadata.rotation, self.gate_dim)
        gates = rotation.rotate(gates, metadata.q_positions).astype(q.dtype)
        names = "token_gate_key", "token_gate_key_norm"
        return Features({"gate": gates}, {}, {name: parameters[name] for name in names})

    def _gates_of_blocks(
        self,
        pools: Float[Array, "B C K P H"],
        starts: Num[Array, "B C"],
        metadata: AttentionMetadata,
        dtype: jnp.dtype,
        first_head: Int[Array, ""] | int = 0,
    ) -> Float[Array, "B C K J"]:
        """Returns the key vectors of blocks, in the dtype in which a cache keeps them.

        Args:
          pools: maxima, minima and means of unrotated keys of some key heads.
          starts: positions of the first tokens of blocks.
          metadata: rotation, and the parameters of the layer.
          dtype: that of keys.
          first_head: the number of the first of these key heads.
        """
        parameters = metadata.features.layer
        matrix = parameters["token_gate_key"].astype(jnp.float32)
        matrix = lax.dynamic_slice_in_dim(matrix, first_head, pools.shape[2])
        gates = gather.einsum("BCKPH,KPHJ->BCKJ", pools, matrix)
        gates = rms_norm(gates, parameters["token_gate_key_norm"])
        rotation = index_rotation(metadata.rotation, self.gate_dim)
        return rotation.rotate(gates, starts).astype(dtype)

    def _gates(
        self,
        k: Float[Array, "B S K H"],
        keys: DocumentTokens,
        blocks: Blocks,
        metadata: AttentionMetadata,
        axis: str | None,
    ) -> Float[Array, "B C K J"]:
        """Returns the key vectors of the complete blocks of the keys of one device."""
        of_tokens = blocks.take(lax.stop_gradient(unrotated(k, keys.positions, metadata)))
        pools = pooled(of_tokens.reshape(*blocks.slots.shape, *k.shape[2:]))
        starts = jnp.take_along_axis(keys.positions, blocks.slots[:, :, 0], axis=1)
        first = 0 if axis is None else lax.axis_index(axis) * k.shape[2]
        return self._gates_of_blocks(jnp.stack(pools, 3), starts, metadata, k.dtype, first)

    def _attend(self, q, k, v, queries, keys, metadata, axis=None):
        blocks = complete_blocks(keys, self.block)
        gates = self._gates(k, keys, blocks, metadata, axis)
        features = metadata.features._replace(layer={"gates": gates})
        metadata = metadata.replace(features=features)
        return super()._attend(q, k, v, queries, keys, metadata, axis)

    def choose(self, q, k, queries, keys, blocks, metadata):
        features = lax.stop_gradient(metadata.features)
        gates, of_queries = features.layer["gates"], features.queries["gate"]

        def best(gate, query, is_candidate):
            return self._best(gate, gates, is_candidate)

        elements = q.shape[0] * gates.shape[1] * gates.shape[2]
        return self.choose_by_query(best, of_queries, queries, blocks, elements)

    def _best(
        self,
        gate: Float[Array, "B K J"],
        gates: Float[Array, "B C K J"],
        is_candidate: Bool[Array, "B C"],
    ) -> tuple[Int[Array, "B K m"], Bool[Array, "B K m"]]:
        """Returns the best past blocks of a query in each row, and whether each is one."""
        is_candidate = is_candidate[:, None]
        longest = jnp.where(is_candidate, gather.lengths(gates).swapaxes(1, 2), 0).max(-1)
        margin = gather.tie(gate.dtype) * gather.lengths(gate) * longest
        scores = gather.einsum("BKJ,BCKJ->BKC", gate, gates)
        return gather.best(scores, self.num_chosen, is_candidate, margin[..., None])

    def divergence(self, q, k, metadata):
        """Returns the KL divergence of the gate from attention to blocks, the mean over key heads.

        It is 0 for the tokens of a document's first block.
        """
        return on_devices(self._divergence, q, k, None, metadata, by_head=True)

    def _divergence(self, q, k, v, queries, keys, metadata, axis):
        if k.shape[1] < self.block:
            return jnp.zeros(q.shape[:2])
        blocks = complete_blocks(keys, self.block)
        gates = self._gates(k, keys, blocks, metadata, axis)
        q, k = map(lax.stop_gradient, rotate_qk(q, k, metadata))
        rows, slots = len(q), blocks.slots.reshape(len(q), 1, -1)
        keys = keys.with_segments()

        @jax.checkpoint
        def of_query(arrays):
            q, gate, query = arrays
            x = logits(q, k, metadata.soft_cap)
            visible = keys.visible_to(query)[:, None, None]
            most = jnp.exp(log_softmax(x, visible)).max(2)  # [B, K, S]
            most = jnp.take_along_axis(most, slots, axis=2)
            most = most.reshape(rows, most.shape[1], -1, self.block).max(-1)
            is_past = self.candidates(blocks, query.index, query.segments)[:, None]
            most = jnp.where(is_past, most, 0)
            teacher = most / jnp.maximum(most.sum(-1, keepdims=True), 1e-37)
            scores = gather.einsum("BKJ,BCKJ->BKC", gate, gates) * self.gate_dim**-0.5
            apart = kl_divergence(teacher, scores, is_past).mean(1)
            return apart if axis is None else lax.pmean(apart, axis)

        elements = rows * k.shape[1] * (q.shape[2] + k.shape[2])
        arrays = q, metadata.features.queries["gate"], queries.with_segments()
        with jax.named_scope("divergence"):
            return gather.by_query(of_query, arrays, elements)

    # The choice of a generated token, for `PagedCache`

    def summary_dtypes(self, layer):
        return {"gates": layer.dtype}

    def summary_size(self, layer):
        return self.gate_dim

    def summarise(self, pages):
        rows, heads, count, size, _ = pages.keys.shape
        keys = jnp.moveaxis(pages.keys, 1, 3)  # [B, P, page, K, H]
        flat = keys.reshape(rows, count * size, heads, -1)
        flat = unrotated(flat, pages.positions.reshape(rows, -1), pages.metadata)
        pools = jnp.stack(pooled(flat.reshape(keys.shape), pages.is_token[:, 0, ..., 0]), 3)
        starts, metadata = pages.positions[:, :, 0], pages.metadata
        gates = self._gates_of_blocks(pools, starts, metadata, keys.dtype)
        return {"gates": gates.swapaxes(1, 2)}

    def choose_past_pages(self, token, arrays, slots):
        gates = arrays["gates"].swapaxes(1, 2)
        is_candidate = jnp.arange(gates.shape[1]) < (token.index // self.block)[:, None]
        return self._best(token.features["gate"], gates, is_candidate)
