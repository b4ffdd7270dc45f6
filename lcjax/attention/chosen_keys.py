"""Attention to keys that an indexer chooses for all heads together: what DSA and QSA share.

Letters: I index heads, J channels of an index head, C entries that the indexer scores, M keys that
a query reads.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from lcjax.attention.base import AttentionMetadata, Pass, partial_attention, rotate_qk
from lcjax.attention.cache import FullCache, LayerCache
from lcjax.attention.indexer import DistilledPattern, kl_divergence, log_softmax, logits
from lcjax.attention.on_devices import DocumentTokens, on_devices
from lcjax.errors import PositiveInt
from lcjax.rope.rotation import no_rotation
from pallas_kernels import causal, flash, gather, key_bits, window

_BITS = "key_bits"  # checkpoint name of a choice
# A choice of up to so many words is saved for the backward pass, that of attention and that of the
# divergence; a larger one is made again.
_MAX_SAVED = 2**26
# Numbers that are computed for a block of keys: smaller blocks take more steps of a TPU, and arrays
# of larger ones more memory in the backward pass.
_BLOCK = 2**23


class Entries(NamedTuple):
    """What an indexer scores: each key, or runs of consecutive keys of a document."""

    vectors: Float[Array, "B C J"]
    last: Int[Array, "B C"]  # order index of the last token
    segments: Int[Array, "B C"]  # document; 0 or less: there is no such entry
    of_keys: Int[Array, "B S"] | None = None  # the entry of each key, C for none; None: its own

    def visible_to(self, queries: DocumentTokens) -> Bool[Array, "B T C"]:
        """Returns which entries end at or before each query."""
        return DocumentTokens(self.last, self.last, self.segments).visible_to(queries)

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
                ids, is_key = gather.by_tile(
                    lambda tokens: gather.listed(is_read(tokens), self.num_read),
                    arrays[1:],
                    rows * size,
                )
                return _attend_to_copies(q, k, v, ids, is_key, metadata.soft_cap)

        def of_tile(arrays, k, v):
            q, *tokens = arrays
            with jax.named_scope("choose"):
                bits = gather.by_tile(
                    lambda tokens: key_bits.pack(is_read(tokens)), tuple(tokens), rows * size
                )
                bits = checkpoint_name(bits, _BITS)
            with jax.named_scope("attention"):
                return flash(q, k, v, key_bits=bits, **options)[0]

        words = rows * key_bits.num_words(size)
        if length * words > gather.BUDGET:
            of_tile = _checkpoint(of_tile, length * words)
        return gather.by_tile(of_tile, arrays, words, (k, v))

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
        plain = metadata.replace(rotation=no_rotation(), keys_rotated=True)
        entries = self.entries(keys.with_segments(), metadata)
        rows, size, count = len(q), k.shape[1], entries.last.shape[1]
        if not count:  # fewer tokens than a run
            return jnp.zeros(q.shape[:2])
        devices = 1 if axis is None else lax.axis_size(axis)
        options = {"soft_cap": metadata.soft_cap, "implementation": metadata.implementation}
        arrays = q, metadata.features.queries, queries.with_segments()
        reads_all = self.reads_all(size)
        is_causal = reads_all and entries.of_keys is None  # runs leave the last keys out
        if is_causal:
            one = Pass(metadata.q_positions, metadata.k_positions, causal())
            arrays += (partial_attention(q, k, k, one, plain)[1],)

        def of_tile(arrays, vectors):
            q, features, queries, *lse = arrays
            scored = entries._replace(vectors=vectors)
            visible = scored.visible_to(queries)
            if not reads_all:
                bits = key_bits.pack(self._is_chosen(features, scored, visible))
                visible = key_bits.unpack(checkpoint_name(bits, _BITS))[..., :count]
            of_keys = entries.keys_of(visible)
            if not is_causal:
                lse = [flash(q, k, k, key_bits=key_bits.pack(of_keys), **options)[1]]
            teacher = _probabilities(q, k, *lse, of_keys, metadata.soft_cap)
            teacher = entries.sums(jnp.where(of_keys, teacher, 0))
            teacher = teacher if axis is None else lax.psum(teacher, axis)
            teacher /= q.shape[2] * devices
            return kl_divergence(teacher, _scores(features, scored, visible), visible)

        of_tile = _checkpoint(of_tile, rows * q.shape[1] * key_bits.num_words(count))
        with jax.named_scope("divergence"):
            return gather.by_tile(of_tile, arrays, rows * size, (entries.vectors,))

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
        margin = gather.tie(features["index"].dtype) * bound[..., None]
        scores = _scores(features, entries, visible)
        return gather.is_best(scores, self.num_chosen, visible, margin)


def _scores(
    features: dict[str, Float[Array, "B T ..."]], entries: Entries, visible: Bool[Array, "B T C"]
) -> Float[Array, "B T C"]:
    """Returns the indexer's scores of visible entries, a block of entries after the other."""
    dtype, weights = features["index"].dtype, features["weight"]
    queries = features["index"].astype(jnp.float32)  # the gradients of blocks are added in float32

    def of_block(vectors):
        vectors = vectors.astype(dtype)

        def of_heads(heads: slice):
            products = gather.einsum("BTIJ,BCJ->BTIC", queries[:, :, heads].astype(dtype), vectors)
            return (jax.nn.relu(products) * weights[:, :, heads, None]).sum(2)

        return _sum_of_heads(of_heads, queries.shape[2])

    return _by_keys(of_block, entries.vectors, visible, queries.size // queries.shape[-1])


def _probabilities(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    lse: Float[Array, "B T N"],
    visible: Bool[Array, "B T S"],
    soft_cap: float | None,
) -> Float[Array, "B T S"]:
    """Returns the sum over heads of exp(logit - lse) of visible keys, a block after the other."""
    rows, length, heads, size = q.shape
    group = heads // k.shape[2]

    def of_block(k):
        k = k.astype(q.dtype)

        def of_heads(some: slice):
            of_group = k[:, :, slice(some.start // group, -(-some.stop // group))]
            queries, sums = (
                x[:, :, some].reshape(rows, length, of_group.shape[2], -1, *x.shape[3:])
                for x in (q, lse)
            )
            x = gather.einsum("BTKGH,BSKH->BTKGS", queries, of_group) * size**-0.5
            x = x if soft_cap is None else soft_cap * jnp.tanh(x / soft_cap)
            return jnp.exp(x - sums[..., None]).sum((2, 3))

        return _sum_of_heads(of_heads, heads)

    return _by_keys(of_block, k, visible, rows * length * heads)


def _checkpoint(run: Callable[..., Array], words: int) -> Callable[..., Array]:
    """Returns `run` computed again in the backward pass, but for choices of few words."""
    names = [_BITS] if words <= _MAX_SAVED else []
    return jax.checkpoint(run, policy=jax.checkpoint_policies.save_only_these_names(*names))


def _sum_of_heads(of_heads: Callable[[slice], Array], count: int) -> Array:
    """Returns the sum of `of_heads` over heads: on CPUs of one after the other.

    The compiler for TPUs adds products up as it makes them, without an array for each head; that
    for CPUs would write it.
    """
    return lax.platform_dependent(
        cpu=lambda: sum(of_heads(slice(n, n + 1)) for n in range(count)),
        default=lambda: of_heads(slice(0, count)),
    )


def _by_keys(
    run: Callable[[Array], Array],
    keys: Float[Array, "B S ..."],
    visible: Bool[Array, "B T S"],
    elements: int,
) -> Float[Array, "B T S"]:
    """Returns `run` of all keys, for a block of keys after the other if they are many.

    Blocks are computed again in the backward pass. Those in which no query sees a key are left out.

    Args:
      run: a function from keys [B, s, ...] to an array [B, T, s].
      visible: the keys whose results are needed; those of others may be any number.
      elements: numbers that it computes for one key.
    """
    length = keys.shape[1]
    size = max(1, _BLOCK // elements // key_bits.LANES) * key_bits.LANES
    if size >= length:
        return run(keys)
    count = -(-length // size)
    padding = 0, count * size - length
    padded = jnp.pad(keys, [(0, 0), padding] + [(0, 0)] * (keys.ndim - 2))
    blocks = padded.reshape(len(keys), count, size, *keys.shape[2:]).swapaxes(0, 1)
    is_needed = jnp.pad(visible.any((0, 1)), [padding]).reshape(count, size).any(1)
    zeros, recomputed = jnp.zeros((*visible.shape[:2], size)), jax.checkpoint(run)

    def of_block(block):
        keys, is_needed = block
        return lax.cond(is_needed, recomputed, lambda _: zeros, keys)

    results = jnp.moveaxis(lax.map(of_block, (blocks, is_needed)), 0, 2)
    return results.reshape(*results.shape[:2], -1)[..., :length]


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
