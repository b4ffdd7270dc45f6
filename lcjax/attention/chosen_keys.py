"""Attention to keys that an indexer chooses for all heads together: what DSA and QSA share.

Letters: I index heads, J channels of an index head, C entries that the indexer scores, M keys that
a query reads.
"""

from __future__ import annotations

import abc
import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from lcjax.attention.base import AttentionMetadata, Pass, rotate_qk
from lcjax.attention.cache import FullCache, LayerCache
from lcjax.attention.indexer import DistilledPattern, kl_divergence, log_softmax, logits
from lcjax.attention.on_devices import DocumentTokens, on_devices
from lcjax.errors import PositiveInt
from pallas_kernels import causal, flash, gather, key_bits, window


class Entries(NamedTuple):
    """What an indexer scores: each key, or runs of consecutive keys of a document."""

    vectors: Float[Array, "B C J"]
    last: Int[Array, "B C"]  # order index of the last token
    segments: Int[Array, "B C"]  # document; 0 or less: there is no such entry
    of_keys: Int[Array, "B S"] | None = None  # the entry of each key, C for none; None: its own

    def visible_to(self, queries: DocumentTokens) -> Bool[Array, "B T C"]:
        """Returns which entries end at or before each query."""
        segments = queries.segments[..., None]
        same = (self.segments[:, None] == segments) & (segments != 0)
        return same & (self.last[:, None] <= queries.index[..., None])

    def keys_of(self, is_chosen: Bool[Array, "B T C"]) -> Bool[Array, "B T S"]:
        """Returns which keys are in a chosen entry."""
        if self.of_keys is None:
            return is_chosen
        is_chosen = jnp.pad(is_chosen, [(0, 0), (0, 0), (0, 1)])
        return jnp.take_along_axis(is_chosen, self.of_keys[:, None], axis=2)

    def sums(self, x: Float[Array, "B T S"]) -> Float[Array, "B T C"]:
        """Returns the sums of x over the keys of each entry."""
        if self.of_keys is None:
            return x
        zeros = jnp.zeros((*x.shape[:2], self.last.shape[1]), x.dtype)
        rows, queries = np.ogrid[: x.shape[0], : x.shape[1]]
        at = rows[..., None], queries[..., None], self.of_keys[:, None]
        return zeros.at[at].add(x, mode="drop")


@dataclass(frozen=True)
class ChosenKeys(DistilledPattern):
    """A token sees the keys that an indexer scores highest; all heads read them in one softmax.

    The features of a query are `index` [I, J] and `weight` [I]; the score of an entry is the sum
    over index heads of w relu(q k), in float32.

    The choice is a bit of each query and key (`pallas_kernels.key_bits`), for a tile of queries at
    a time, and attention visits the blocks of keys in which a query has chosen one. Queries whose
    chosen keys are fewer than all keys, such as a generated token, copy theirs.
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
        (rows, length), size = q.shape[:2], k.shape[1]
        is_read = functools.partial(self._is_read, entries, keys)
        options = {"soft_cap": metadata.soft_cap, "implementation": metadata.implementation}
        arrays = q, metadata.features.queries, queries.with_segments()
        if length * self.num_read < size:
            with jax.named_scope("attention"):
                ids, is_key = gather.listed(is_read(arrays[1:]), self.num_read)
                return _attend_to_copies(q, k, v, ids, is_key, metadata.soft_cap)

        def of_tile(arrays):
            q, *tokens = arrays
            with jax.named_scope("choose"):
                bits = gather.by_tile(
                    lambda tokens: key_bits.pack(is_read(tokens)), tuple(tokens), rows * size
                )
            with jax.named_scope("attention"):
                return flash(q, k, v, key_bits=bits, **options)[0]

        words = key_bits.num_words(size)
        if rows * length * words > gather.BUDGET:  # the backward pass chooses again
            of_tile = jax.checkpoint(of_tile)
        return gather.by_tile(of_tile, arrays, rows * words)

    def always_reads(
        self, queries: DocumentTokens, keys: DocumentTokens
    ) -> Bool[Array, "B T S"] | None:
        """Returns which keys queries read without a choice; None: none."""
        del queries, keys
        return None

    def _is_read(
        self,
        entries: Entries,
        keys: DocumentTokens,
        tokens: tuple[dict[str, Float[Array, "B T ..."]], DocumentTokens],
    ) -> Bool[Array, "B T S"]:
        """Returns which keys the queries of a tile read, given their features and tokens."""
        features, queries = lax.stop_gradient(tokens)
        is_chosen = self._is_chosen(features, entries, entries.visible_to(queries))
        is_read, always = entries.keys_of(is_chosen), self.always_reads(queries, keys)
        return is_read if always is None else is_read | always

    def _divergence(self, q, k, v, queries, keys, metadata, axis):
        q, k = map(lax.stop_gradient, rotate_qk(q, k, metadata))
        entries = self.entries(keys.with_segments(), metadata)
        rows, size = len(q), k.shape[1]
        devices = 1 if axis is None else lax.axis_size(axis)

        @jax.checkpoint
        def of_tile(arrays):
            q, features, queries = arrays
            visible = entries.visible_to(queries)
            if not self.reads_all(size):
                visible = self._is_chosen(features, entries, visible)
            of_keys = entries.keys_of(visible)
            teacher = entries.sums(_probabilities(q, k, of_keys, metadata.soft_cap))
            teacher = teacher if axis is None else lax.psum(teacher, axis)
            teacher /= q.shape[2] * devices
            return kl_divergence(teacher, _scores(features, entries), visible)

        arrays = q, metadata.features.queries, queries.with_segments()
        with jax.named_scope("divergence"):
            return gather.by_tile(of_tile, arrays, rows * size)

    def _is_chosen(
        self,
        features: dict[str, Float[Array, "B T ..."]],
        entries: Entries,
        visible: Bool[Array, "B T C"],
    ) -> Bool[Array, "B T C"]:
        """Returns which of the visible entries each query chooses."""
        features, entries = lax.stop_gradient((features, entries))
        bound = (jnp.abs(features["weight"]) * gather.lengths(features["index"])).sum(-1)
        bound *= jnp.where(visible, gather.lengths(entries.vectors)[:, None], 0).max(-1)
        margin = gather.tie(entries.vectors.dtype) * bound[..., None]
        return gather.is_best(_scores(features, entries), self.num_chosen, visible, margin)


def _scores(
    features: dict[str, Float[Array, "B T ..."]], entries: Entries
) -> Float[Array, "B T C"]:
    """Returns the indexer's scores of all entries, one index head after the other."""
    vectors = entries.vectors.astype(features["index"].dtype)

    @jax.checkpoint
    def add(total, head):
        query, weight = head
        products = gather.einsum("BTJ,BCJ->BTC", query, vectors)
        return total + jax.nn.relu(products) * weight[..., None], None

    heads = jnp.moveaxis(features["index"], 2, 0), jnp.moveaxis(features["weight"], 2, 0)
    zeros = jnp.zeros((*heads[1].shape[1:], vectors.shape[1]))
    return lax.scan(add, zeros, heads)[0]


def _probabilities(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    visible: Bool[Array, "B T S"],
    soft_cap: float | None,
) -> Float[Array, "B T S"]:
    """Returns the sum over heads of their softmax over visible keys, one head after the other."""
    group, by_head = q.shape[2] // k.shape[2], jnp.moveaxis(k.astype(q.dtype), 2, 0)

    def add(total, head):
        q, number = head
        x = gather.einsum("BTH,BSH->BTS", q, by_head[number // group]) * q.shape[-1] ** -0.5
        x = x if soft_cap is None else soft_cap * jnp.tanh(x / soft_cap)
        return total + jnp.exp(log_softmax(x, visible)), None

    heads = jnp.moveaxis(q, 2, 0), jnp.arange(q.shape[2])
    return lax.scan(add, jnp.zeros(visible.shape), heads)[0]


def _attend_to_copies(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    ids: Int[Array, "B T M"],
    is_key: Bool[Array, "B T M"],
    soft_cap: float | None,
) -> Float[Array, "B T N Hv"]:
    """Returns attention to copies of the keys with these numbers; 0 if there are none."""

    def of_query(arrays):
        q, ids, is_key = arrays
        pair = (jnp.take_along_axis(x, ids[..., None, None], axis=1) for x in (k, v))
        return _attention(q, *pair, is_key, soft_cap)

    elements = len(q) * ids.shape[-1] * (q.shape[2] + 2 * k.shape[2] * k.shape[3])
    return gather.by_query(of_query, (q, ids, is_key), elements)


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
