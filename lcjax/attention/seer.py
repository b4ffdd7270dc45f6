"""SeerAttention (Gao et al. 2024, arXiv 2410.13276): gates that learn which blocks a prompt reads.

Letters: C blocks of keys, J channels of a gate, P = 3 poolings of a block's keys.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Annotated

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Num

from lcjax.attention.base import (
    AttentionMetadata,
    Features,
    Parameter,
    Pass,
    Pattern,
    rotate_qk,
)
from lcjax.attention.chosen_blocks import complete_blocks
from lcjax.attention.indexer import DistilledPattern, index_rotation, kl_divergence, log_softmax
from lcjax.attention.on_devices import DocumentTokens, on_devices
from lcjax.attention.prompt_blocks import BlockedPrompt, attend_chosen, ranks
from lcjax.errors import Fraction, Interval, NonNegativeInt, PositiveInt
from lcjax.rope.rotation import Rotation, no_rotation
from pallas_kernels import causal, gather

POOLINGS = ("max", "min", "mean")  # the order of the rows of the keys' matrix


@Pattern.register_subclass("seer")
@dataclass(frozen=True)
class SeerAttention(DistilledPattern):
    """A block of a prompt's queries sees the key blocks whose learned gate is above a threshold.

    Blocks of `block` tokens count from the first token of a document. The gate of a query head
    multiplies the mean of a block's queries by one matrix, and the maximum, minimum and mean of a
    block's keys by another, all of them unrotated. Both vectors of `gate_dim` channels are rotated
    to the position of the first token of their block. The softmax of their products, divided by
    sqrt(gate_dim), over the blocks up to the own one estimates the attention between blocks.

    A block of queries sees the blocks whose probability is above `threshold`. With `share`, which
    replaces it, it sees as many blocks of the highest probabilities as let all blocks together read
    this share of the pairs of a full prompt: (1 - sqrt(1 - share)) of the number of blocks. The
    `last` blocks of queries see all. No block is forced, not even the own one, so a token whose
    block chooses none gets 0.

    The method is for prompts: later tokens of the own block take part in the choice, so there is no
    loss, and no score of a text. Calls with fewer than `block` queries, such as decoding, see all
    keys. With `dense`, attention is full, and the gates learn the true attention
    (train.trainable=[pattern]): for each block of queries and of keys the largest probability of a
    pair, divided by the sum of the row. The authors train 500 million tokens of 64K each at a rate
    of 1e-3. Their loss is the mean over elements, without the first quarter of the rows, times 10;
    here it is the divergence of a row, as the mean over heads and rows. Only complete blocks learn.

    Released gates with as many channels as a head have no matrix for queries and one matrix of keys
    for each query head; they are not this form. Gates of single tokens are those of `seer_r`.
    """

    examples = (
        {"block": 8, "gate_dim": 8, "share": 0.5, "last": 0},
        {"block": 8, "gate_dim": 16, "threshold": 0.2},
    )

    block: PositiveInt = 64  # tokens
    gate_dim: PositiveInt = 128  # J, channels of a gate
    threshold: Fraction = 2e-3  # of the probability of a block; 5e-4 to 5e-3 in the paper
    # Share of the pairs of queries and keys that are read, in place of the threshold
    share: Annotated[float, Interval(above=0, most=1)] | None = None
    last: NonNegativeInt = 2  # last blocks of queries that see all

    @property
    def is_causal(self) -> bool:
        return self.dense

    @property
    def needs_whole_prompt(self) -> bool:
        return not self.dense

    @property
    def parameters(self):
        names = "self_attn.attn_gate.mask_linear_{}.weight".format
        return {
            "gate_query": Parameter("NHJ", names("q"), "N,H,J"),
            "gate_key": Parameter("KPHJ", names("k"), "K,PH,J"),
        }

    @property
    def sizes(self):
        return {"J": self.gate_dim, "P": len(POOLINGS)}

    def passes(self, metadata: AttentionMetadata) -> list[Pass]:
        """Returns a pass of full attention."""
        return [Pass(metadata.q_positions, metadata.k_positions, causal())]

    def features(self, parameters, x, q, k, metadata):
        return Features({}, {}, dict(parameters))

    def attend(self, q, k, v, metadata):
        if self.dense or q.shape[1] < self.block:
            return super().attend(q, k, v, metadata)
        self.check_metadata(metadata)
        rotation, positions = metadata.rotation, metadata.k_positions
        choose = functools.partial(self._choose, metadata.features.layer, rotation)
        of_keys = unrotated(k, positions, metadata), positions[:, :, None, None]
        of_each = lax.stop_gradient(((q,), of_keys))
        return attend_chosen(q, k, v, metadata, self.block, choose, *of_each)

    def _choose(
        self, parameters: dict[str, Array], rotation: Rotation, prompt: BlockedPrompt
    ) -> Bool[Array, "B N nq nk"]:
        """Returns which blocks of keys each block of queries sees, as `attend_chosen` needs it."""
        (q,), (k, positions) = prompt.of_queries, prompt.of_keys

        def in_blocks(x):
            return x.reshape(len(x), -1, self.block, *x.shape[2:])

        starts = positions[:, :: self.block, 0, 0]
        count = q.shape[1] // self.block
        current = prompt.first[:, None] // self.block + jnp.arange(count)
        pooled_q = pooled(in_blocks(q), in_blocks(prompt.is_query))[2]
        pooled_k = jnp.stack(pooled(in_blocks(k), in_blocks(prompt.is_key)), 3)
        at = jnp.take_along_axis(starts, current, axis=1, mode="clip")
        gates_q, gates_k = self._gates(parameters, pooled_q, pooled_k, at, starts, rotation)
        group = gates_q.shape[2] // gates_k.shape[2]
        has_key = in_blocks(prompt.is_key).any(2)
        is_past = jnp.arange(starts.shape[1]) <= current[:, :, None]
        is_last = current >= (has_key.sum(1) - self.last)[:, None]

        def of_head(number):
            gate_q, gate_k = gates_q[:, :, number], gates_k[:, :, number // group]
            scores = gather.einsum("BCJ,BDJ->BCD", gate_q, gate_k) * self.gate_dim**-0.5
            probabilities = jnp.exp(log_softmax(scores, is_past & has_key[:, None]))
            return self._is_chosen(probabilities, has_key.sum(1)) | is_last[:, :, None]

        return jnp.moveaxis(lax.map(of_head, jnp.arange(gates_q.shape[2])), 0, 1)

    def _is_chosen(
        self, probabilities: Float[Array, "B nq nk"], blocks: Int[Array, " B"]
    ) -> Bool[Array, "B nq nk"]:
        """Returns which blocks are read, of `blocks` of each document, by their probabilities."""
        if self.share is None:
            return probabilities > self.threshold
        count = jnp.ceil((1 - (1 - self.share) ** 0.5) * blocks)
        return ranks(probabilities) < count[:, None, None]

    def _gates(
        self,
        parameters: dict[str, Array],
        q: Float[Array, "B nq N H"],
        k: Float[Array, "B nk K P H"],
        q_starts: Num[Array, "B nq"],
        k_starts: Num[Array, "B nk"],
        rotation: Rotation,
    ) -> tuple[Float[Array, "B nq N J"], Float[Array, "B nk K J"]]:
        """Returns the float32 vectors of blocks, whose products are the logits of the gates.

        Args:
          parameters: those of the layer.
          q, k: pooled queries and keys of blocks.
          q_starts, k_starts: positions of the first tokens of the blocks.
          rotation: that of the layer.
        """
        of_query, of_key = (
            parameters[f"gate_{name}"].astype(jnp.float32) for name in ("query", "key")
        )
        rotation = index_rotation(rotation, self.gate_dim)
        gates_q = rotation.rotate(gather.einsum("BCNH,NHJ->BCNJ", q, of_query), q_starts)
        gates_k = rotation.rotate(gather.einsum("BCKPH,KPHJ->BCKJ", k, of_key), k_starts)
        return gates_q, gates_k

    def divergence(self, q, k, metadata):
        """Returns the KL divergence of the gate from attention between blocks, the mean over heads.

        A token has that of its block of queries; 0 if the block is not complete.
        """
        tokens = DocumentTokens.of(metadata.q_positions, metadata.q_index, metadata.q_segments)
        rows, length = tokens.index.shape
        if length < self.block:
            return jnp.zeros((rows, length))
        blocks, layout = complete_blocks(tokens, self.block), metadata.layout
        flat, count = blocks.slots.reshape(rows, -1), blocks.numbers.shape[1]

        def in_blocks(x):
            return blocks.take(x).reshape(rows, count, self.block, *x.shape[2:])

        pooled_q = pooled(in_blocks(q))[2]
        pooled_k = jnp.stack(pooled(in_blocks(k)), 3)
        starts = jnp.take_along_axis(tokens.positions, blocks.slots[:, :, 0], axis=1)
        vectors = pooled_q, pooled_k, starts, starts, metadata.rotation
        gates_q, gates_k = self._gates(metadata.features.layer, *vectors)
        q, k = rotate_qk(q, k, metadata)
        of_blocks = in_blocks(q).swapaxes(2, 3).reshape(rows, count, q.shape[2], -1)
        numbers = blocks.numbers, jnp.maximum(blocks.segments, 0)
        keys = {"gates": gates_k, "numbers": numbers[0], "segments": numbers[1]}
        # Blocks take the place of queries, so devices that share a text share its blocks.
        parts = 1 if layout is None else layout.size(layout.length)
        padding = -count % parts
        of_blocks, gates_q, starts, *numbers = (
            jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
            for x in (of_blocks, gates_q, starts, *numbers)
        )
        metadata = metadata.replace(
            q_positions=starts, q_index=numbers[0], q_segments=numbers[1],
            rotation=no_rotation(), keys_rotated=True,
            features=Features({"gates": gates_q}, keys | {"slots": blocks.slots}, {}),
        )  # fmt: skip
        with jax.named_scope("divergence"):
            by_block = on_devices(self._divergence, of_blocks, k, None, metadata, by_head=True)
        of_tokens = jnp.repeat(by_block[:, :count], self.block, axis=1)
        places = jnp.where(jnp.repeat(blocks.segments, self.block, axis=1) > 0, flat, length)
        zeros = jnp.zeros((rows, length), by_block.dtype)
        return zeros.at[jnp.arange(rows)[:, None], places].set(of_tokens, mode="drop")

    def _divergence(self, q, k, v, queries, keys, metadata, axis):
        """Computes `divergence` [B, C] of blocks of queries on one device, by key head."""
        features = metadata.features.keys
        rows, count, heads, _ = q.shape
        kv_heads, size = k.shape[2:]
        gates_q, gates_k = metadata.features.queries["gates"], features["gates"]
        if axis is not None:
            first = lax.axis_index(axis) * kv_heads
            gates_k = lax.dynamic_slice_in_dim(gates_k, first, kv_heads, axis=2)
        is_past = features["numbers"][:, None] <= queries.index[..., None]
        is_past &= features["segments"][:, None] == queries.segments[..., None]
        is_past &= (queries.segments > 0)[..., None]  # [B, C, D], of blocks of keys

        def by_head(x):  # [B, C, N, ...] -> [K, B, C, G, ...]
            x = x.reshape(rows, count, kv_heads, heads // kv_heads, *x.shape[3:])
            return jnp.moveaxis(x, 2, 0)

        q = q.reshape(rows, count, heads, self.block, size)
        arrays = by_head(q), jnp.moveaxis(k, 2, 0)
        slots, keys = features["slots"], keys.with_segments()
        target = functools.partial(self._between_blocks, queries, keys, slots, is_past)
        targets = lax.map(lambda x: target(*x), lax.stop_gradient(arrays))

        @jax.checkpoint
        def of_head(arrays):
            target, gates_q, gates_k = arrays
            scores = gather.einsum("BCGJ,BDJ->BCGD", gates_q, gates_k) * self.gate_dim**-0.5
            return kl_divergence(target, scores, is_past[:, :, None]).mean(2)

        arrays = targets, by_head(gates_q), jnp.moveaxis(gates_k, 2, 0)
        mean = lax.map(of_head, arrays).mean(0)
        return mean if axis is None else lax.pmean(mean, axis)

    def _between_blocks(
        self,
        queries: DocumentTokens,
        keys: DocumentTokens,
        slots: Int[Array, "B D block"],
        is_past: Bool[Array, "B C D"],
        q: Float[Array, "B C G block H"],
        k: Float[Array, "B S H"],
    ) -> Float[Array, "B C G D"]:
        """Returns the attention of blocks of queries to blocks of keys, a few blocks at a time.

        Args:
          queries: document of each block of queries, and its number in place of an order index.
          keys: the tokens of the keys.
          slots: those of the tokens of blocks of keys.
          is_past: blocks of keys that blocks of queries may read.
          q, k: rotated queries and keys of a key head.
        """
        flat = slots.reshape(len(slots), 1, -1)

        def of_block(arrays):
            q, block, is_past = arrays
            index = block.index[:, None] * self.block + jnp.arange(self.block)
            visible = keys.index[:, None] <= index[..., None]
            visible &= (keys.segments == block.segments[:, None])[:, None]
            x = gather.einsum("BGTH,BSH->BGTS", q, k) * q.shape[-1] ** -0.5
            most = jnp.exp(log_softmax(x, visible[:, None])).max(2)
            most = jnp.take_along_axis(most, flat, axis=2)
            most = most.reshape(*most.shape[:2], -1, self.block).max(-1)
            most = jnp.where(is_past[:, None], most, 0)
            return most / jnp.maximum(most.sum(-1, keepdims=True), 1e-37)

        elements = len(q) * q.shape[2] * self.block * k.shape[1]
        return gather.by_query(of_block, (q, queries, is_past), elements)


def unrotated(
    k: Float[Array, "B S K H"], positions: Num[Array, "B S"], metadata: AttentionMetadata
) -> Float[Array, "B S K H"]:
    """Returns keys before their rotation to `positions`, if they are rotated."""
    if not metadata.keys_rotated:
        return k
    inverse = Rotation(metadata.rotation.inv_freq, 1 / metadata.rotation.scale)
    return inverse.rotate(k, -positions)


def pooled(
    x: Float[Array, "B C block K H"], is_token: Bool[Array, "B C block"] | None = None
) -> tuple[Float[Array, "B C K H"], Float[Array, "B C K H"], Float[Array, "B C K H"]]:
    """Returns the float32 maximum, minimum and mean over the tokens of each block; 0 of none."""
    x = x.astype(jnp.float32)
    if is_token is None:
        return x.max(2), x.min(2), x.mean(2)
    shown = is_token[..., None, None]
    count = shown.sum(2)
    most = (jnp.where(shown, sign * x, -jnp.inf).max(2) * sign for sign in (1, -1))
    of_tokens = *most, jnp.where(shown, x, 0).sum(2) / jnp.maximum(count, 1)
    return tuple(jnp.where(count > 0, each, 0) for each in of_tokens)
