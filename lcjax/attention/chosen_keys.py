"""Attention to keys that an indexer chooses for all heads together: what DSA and QSA share.

Letters: I index heads, J channels of an index head, C entries that the indexer scores, M keys that
a query reads.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from lcjax.attention.base import AttentionMetadata, Pass, rotate_qk
from lcjax.attention.cache import FullCache, LayerCache
from lcjax.attention.indexer import DistilledPattern, kl_divergence, log_softmax, logits
from lcjax.attention.on_devices import DocumentTokens, on_devices
from lcjax.errors import PositiveInt
from pallas_kernels import causal, gather, window


class Entries(NamedTuple):
    """What an indexer scores: each key, or runs of consecutive keys of a document."""

    vectors: Float[Array, "B C J"]
    last: Int[Array, "B C"]  # order index of the last token
    segments: Int[Array, "B C"]  # document; 0 or less: there is no such entry
    of_keys: Int[Array, "B S"] | None = None  # the entry of each key, C for none; None: its own

    def visible_to(self, query: DocumentTokens) -> Bool[Array, "B C"]:
        """Returns which entries end at or before one token [B] of each row."""
        segments = query.segments[:, None]
        same = (self.segments == segments) & (segments != 0)
        return same & (self.last <= query.index[:, None])

    def keys_of(self, is_chosen: Bool[Array, "B C"]) -> Bool[Array, "B S"]:
        """Returns which keys are in a chosen entry."""
        if self.of_keys is None:
            return is_chosen
        is_chosen = jnp.pad(is_chosen, [(0, 0), (0, 1)])
        return jnp.take_along_axis(is_chosen, self.of_keys, axis=1)

    def sums(self, x: Float[Array, "B S"]) -> Float[Array, "B C"]:
        """Returns the sums of x over the keys of each entry."""
        if self.of_keys is None:
            return x
        zeros = jnp.zeros(self.last.shape, x.dtype)
        return zeros.at[jnp.arange(len(x))[:, None], self.of_keys].add(x, mode="drop")


@dataclass(frozen=True)
class ChosenKeys(DistilledPattern):
    """A token sees the keys that an indexer scores highest; all heads read them in one softmax.

    The features of a query are `index` [I, J] and `weight` [I]; the score of an entry is the sum
    over index heads of w relu(q k), in float32.

    Attention over chosen keys runs in XLA, for some queries at a time. It copies the chosen keys
    of each query where they are at most an eighth of all keys, and else masks the others.
    """

    heads: PositiveInt = 16  # I, index heads
    head_dim: PositiveInt = 64  # J, channels of an index head
    top_k: PositiveInt = 2048  # keys that a query chooses

    @abc.abstractmethod
    def entries(self, keys: DocumentTokens, metadata: AttentionMetadata) -> Entries:
        """Returns what the indexer scores, from `metadata.features` of all keys."""

    @property
    def num_chosen(self) -> int:
        """Entries that a query chooses."""
        return self.top_k

    @property
    def num_read(self) -> int:
        """M, keys that a query reads at most."""
        return self.top_k

    @property
    def sizes(self):
        return {"I": self.heads, "J": self.head_dim}

    @property
    def supports_soft_cap(self) -> bool:
        return True

    @property
    def layer_cache(self) -> LayerCache:
        return FullCache(features=(("index", 1, self.head_dim),))

    def passes(self, metadata: AttentionMetadata) -> list[Pass]:
        """Returns a pass over the latest keys, which are as many as any choice."""
        mask = causal()
        if not self.reads_all(metadata.k_positions.shape[1]):
            mask = mask & window(self.num_read)
        return [Pass(metadata.q_positions, metadata.k_positions, mask)]

    def reads_all(self, keys: int) -> bool:
        """Returns whether every token of a text of so many tokens reads all before it."""
        return self.dense or keys <= self.num_read

    def choice_flops(self, layer, length, keys):
        learns = self.dense or not self.reads_all(length)
        return 2.0 * self.heads * self.head_dim * keys if learns else 0.0

    def attend(self, q, k, v, metadata):
        if self.reads_all(k.shape[1]):
            return super().attend(q, k, v, metadata)
        self.check_metadata(metadata)
        return on_devices(self._attend, q, k, v, metadata, by_head=False)

    def divergence(self, q, k, metadata):
        """Returns the KL divergence of the indexer's softmax from the mean of all heads'.

        Both are over the visible entries if attention is full, else over the chosen ones, for whose
        keys each head's softmax is computed anew. The probability of an entry is that of its keys.
        """
        return on_devices(self._divergence, q, k, None, metadata, by_head=False)

    def _attend(self, q, k, v, queries, keys, metadata, axis):
        """Computes attention on one device."""
        del axis
        q, k = rotate_qk(q, k, metadata)
        keys = keys.with_segments()
        entries = self.entries(keys, metadata)
        copies = 8 * self.num_read <= k.shape[1]

        @jax.checkpoint
        def of_query(arrays):
            q, features, query = arrays
            is_chosen = self._is_chosen(features, entries, entries.visible_to(query))
            is_read = entries.keys_of(is_chosen) | self.always_reads(query, keys)
            if copies:
                ids, is_key = gather.listed(is_read, self.num_read)
                pair = (jnp.take_along_axis(x, ids[..., None, None], axis=1) for x in (k, v))
                return _attention(q, *pair, is_key, metadata.soft_cap)
            return _attention(q, k, v, is_read, metadata.soft_cap)

        size, read = k.shape[1], self.num_read
        elements = self.heads * size + q.shape[2] * (read if copies else size)
        elements += 2 * read * k.shape[2] * k.shape[3] if copies else 0
        arrays = q, metadata.features.queries, queries.with_segments()
        with jax.named_scope("attention"):
            return gather.by_query(of_query, arrays, len(q) * elements)

    def always_reads(self, query: DocumentTokens, keys: DocumentTokens) -> Bool[Array, "#B #S"]:
        """Returns which keys one token [B] of each row reads without a choice: here none."""
        del query, keys
        return jnp.zeros((1, 1), bool)

    def _divergence(self, q, k, v, queries, keys, metadata, axis):
        q, k = map(jax.lax.stop_gradient, rotate_qk(q, k, metadata))
        entries = self.entries(keys.with_segments(), metadata)

        @jax.checkpoint
        def of_query(arrays):
            q, features, query = arrays
            visible = entries.visible_to(query)
            if not self.reads_all(k.shape[1]):
                visible = self._is_chosen(features, entries, visible)
            x = logits(q, k, metadata.soft_cap)
            of_keys = entries.keys_of(visible)[:, None, None]
            teacher = entries.sums(jnp.exp(log_softmax(x, of_keys)).sum((1, 2)))
            teacher = teacher if axis is None else jax.lax.psum(teacher, axis)
            num_heads = q.shape[1] * (1 if axis is None else jax.lax.axis_size(axis))
            return kl_divergence(teacher / num_heads, _scores(features, entries), visible)

        elements = len(q) * k.shape[1] * (self.heads + q.shape[2])
        arrays = q, metadata.features.queries, queries.with_segments()
        with jax.named_scope("divergence"):
            return gather.by_query(of_query, arrays, elements)

    def _is_chosen(
        self,
        features: dict[str, Float[Array, "B ..."]],
        entries: Entries,
        visible: Bool[Array, "B C"],
    ) -> Bool[Array, "B C"]:
        """Returns which of the visible entries a query of each row chooses."""
        features, entries = jax.lax.stop_gradient((features, entries))
        bound = (jnp.abs(features["weight"]) * gather.lengths(features["index"])).sum(-1)
        bound *= jnp.where(visible, gather.lengths(entries.vectors), 0).max(-1)
        margin = gather.tie(entries.vectors.dtype) * bound[:, None]
        return gather.is_best(_scores(features, entries), self.num_chosen, visible, margin)


def _scores(features: dict[str, Float[Array, "B ..."]], entries: Entries) -> Float[Array, "B C"]:
    """Returns the indexer's scores of all entries for one query of each row."""
    vectors = entries.vectors.astype(features["index"].dtype)
    products = gather.einsum("BIJ,BCJ->BIC", features["index"], vectors)
    return (jax.nn.relu(products) * features["weight"][..., None]).sum(1)


def _attention(
    q: Float[Array, "B N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    visible: Bool[Array, "B S"],
    soft_cap: float | None,
) -> Float[Array, "B N Hv"]:
    """Returns attention of one query of each row to the visible keys; 0 if there are none."""
    weights = jnp.exp(log_softmax(logits(q, k, soft_cap), visible[:, None, None]))
    out = gather.einsum("BKGS,BSKH->BKGH", weights.astype(v.dtype), v)
    return out.reshape(*q.shape[:2], -1).astype(q.dtype)
