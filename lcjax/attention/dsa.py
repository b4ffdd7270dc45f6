"""DeepSeek sparse attention (DeepSeek-V3.2, arXiv 2512.02556, sec. 2.1) on grouped-query models.

Letters: I index heads, J channels of an index head, M keys that a query reads.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from lcjax.attention.base import (
    AttentionMetadata,
    Features,
    Parameter,
    Pass,
    Pattern,
    rotate_qk,
)
from lcjax.attention.cache import FullCache, LayerCache
from lcjax.attention.indexer import (
    DistilledPattern,
    index_rotation,
    kl_divergence,
    log_softmax,
    logits,
)
from lcjax.attention.on_devices import on_devices
from lcjax.errors import PositiveInt
from pallas_kernels import causal, gather, window

_EPSILON = 1e-6  # of the norm of index keys


@Pattern.register_subclass("dsa")
@dataclass(frozen=True)
class DSA(DistilledPattern):
    """A token sees the `top_k` earlier tokens that an indexer scores highest, itself included.

    The indexer has `heads` small query heads and one key head, whose keys a cache keeps. The score
    of a key for a query is the sum over index heads of w relu(q k), in float32, with a weight w of
    each query and head (eq. 1). All attention heads read the keys with the `top_k` highest scores
    in one softmax. Scores that differ by no more than their rounding error count as equal, and of
    equal keys the later ones are read. A text of up to `top_k` tokens has full attention, so a
    dense model is unchanged until its texts are longer.

    An index head multiplies all pairs of tokens, so the indexer must be small. DeepSeek-V3.2 has 64
    heads of 128 channels beside 128 attention heads; 16 heads of 64 cost an eighth of the logits
    and values of Llama-3-8B.

    DeepSeek's indexer computes queries from the latent vector of its attention; here they come from
    the hidden states, as keys and weights do. Index queries and keys are rotated as those of
    attention, in their first channels; with fewer channels, by some of the frequencies.

    Training has two stages. With `dense`, attention is full, and the indexer learns the mean of all
    heads' probabilities (train.trainable=[pattern]); the paper takes 2.1 billion tokens. Then
    `dense` is false and all weights are trained: the model by its own loss, the indexer by the
    divergence over the chosen keys alone (eq. 3 and 4). Neither loss has a gradient for the other
    part, since the indexer reads hidden states without a gradient.

    Attention over chosen keys runs in XLA, for some queries at a time. It copies the chosen keys
    of each query where they are at most an eighth of all keys, and else masks the others.
    """

    examples = (
        {"heads": 2, "head_dim": 16, "top_k": 24},
        {"heads": 3, "head_dim": 16, "top_k": 2},
    )

    heads: PositiveInt = 16  # I, index heads
    head_dim: PositiveInt = 64  # J, channels of an index head
    top_k: PositiveInt = 2048  # keys that a query reads

    @property
    def parameters(self):
        names = functools.partial("self_attn.indexer.{}".format)
        return {
            "index_query": Parameter("DIJ", names("wq_b.weight"), "IJ,D"),
            "index_key": Parameter("DJ", names("wk.weight"), "J,D"),
            "index_norm_scale": Parameter("J", names("k_norm.weight"), "J", "ones"),
            "index_norm_bias": Parameter("J", names("k_norm.bias"), "J", "zeros"),
            "index_weight": Parameter("DI", names("weights_proj.weight"), "I,D"),
        }

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
            mask = mask & window(self.top_k)
        return [Pass(metadata.q_positions, metadata.k_positions, mask)]

    def reads_all(self, keys: int) -> bool:
        """Returns whether every token of a text of so many tokens reads all before it."""
        return self.dense or keys <= self.top_k

    def choice_flops(self, layer, length, keys):
        learns = self.dense or not self.reads_all(length)
        return 2.0 * self.heads * self.head_dim * keys if learns else 0.0

    def features(self, parameters, x, q, k, metadata):
        rotation = index_rotation(metadata.rotation, self.head_dim)
        x = jax.lax.stop_gradient(x)
        queries = gather.einsum("BTD,DIJ->BTIJ", x, parameters["index_query"]).astype(x.dtype)
        keys = gather.einsum("BTD,DJ->BTJ", x, parameters["index_key"])
        keys -= keys.mean(-1, keepdims=True)
        keys *= jax.lax.rsqrt(jnp.square(keys).mean(-1, keepdims=True) + _EPSILON)
        scale, bias = (parameters[f"index_norm_{name}"] for name in ("scale", "bias"))
        keys = (keys * scale.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)
        rotate = functools.partial(rotation.rotate, positions=metadata.q_positions)
        weights = gather.einsum("BTD,DI->BTI", x, parameters["index_weight"])
        weights *= (self.heads * self.head_dim) ** -0.5
        keys = rotate(keys[:, :, None])
        return Features({"index": rotate(queries), "weight": weights}, {"index": keys}, {})

    def attend(self, q, k, v, metadata):
        if self.reads_all(k.shape[1]):
            return super().attend(q, k, v, metadata)
        self.check_metadata(metadata)
        return on_devices(self._attend, q, k, v, metadata, by_head=False)

    def divergence(self, q, k, metadata):
        """Returns the KL divergence of the indexer's softmax from the mean of all heads' (eq. 3).

        Both are over the visible keys if attention is full, else over the chosen ones, for which
        each head's softmax is computed anew.
        """
        return on_devices(self._divergence, q, k, None, metadata, by_head=False)

    def _attend(self, q, k, v, queries, keys, metadata, axis):
        """Computes attention on one device."""
        del axis
        q, k = rotate_qk(q, k, metadata)
        keys, index = keys.with_segments(), metadata.features.keys["index"][:, :, 0]
        copies = 8 * self.top_k <= k.shape[1]

        @jax.checkpoint
        def of_query(arrays):
            q, features, query = arrays
            choice = self._candidates(features, index, keys.visible_to(query))
            if copies:
                ids, is_key = gather.best(*choice)
                pair = (jnp.take_along_axis(x, ids[..., None, None], axis=1) for x in (k, v))
                return _attention(q, *pair, is_key, metadata.soft_cap)
            return _attention(q, k, v, gather.is_best(*choice), metadata.soft_cap)

        size = k.shape[1]
        elements = self.heads * size + q.shape[2] * (self.top_k if copies else size)
        elements += 2 * self.top_k * k.shape[2] * k.shape[3] if copies else 0
        arrays = q, metadata.features.queries, queries.with_segments()
        with jax.named_scope("attention"):
            return gather.by_query(of_query, arrays, len(q) * elements)

    def _divergence(self, q, k, v, queries, keys, metadata, axis):
        q, k = map(jax.lax.stop_gradient, rotate_qk(q, k, metadata))
        keys, index = keys.with_segments(), metadata.features.keys["index"][:, :, 0]

        @jax.checkpoint
        def of_query(arrays):
            q, features, query = arrays
            visible = keys.visible_to(query)
            if not self.reads_all(k.shape[1]):
                visible = gather.is_best(*self._candidates(features, index, visible))
            x = logits(q, k, metadata.soft_cap)
            teacher = jnp.exp(log_softmax(x, visible[:, None, None])).sum((1, 2))
            teacher = teacher if axis is None else jax.lax.psum(teacher, axis)
            num_heads = q.shape[1] * (1 if axis is None else jax.lax.axis_size(axis))
            return kl_divergence(teacher / num_heads, _scores(features, index), visible)

        elements = len(q) * k.shape[1] * (self.heads + q.shape[2])
        arrays = q, metadata.features.queries, queries.with_segments()
        with jax.named_scope("divergence"):
            return gather.by_query(of_query, arrays, elements)

    def _candidates(
        self,
        features: dict[str, Float[Array, "B ..."]],
        index: Float[Array, "B S J"],
        visible: Bool[Array, "B S"],
    ) -> tuple[Float[Array, "B S"], int, Bool[Array, "B S"], Float[Array, "B 1"]]:
        """Returns the arguments of `gather.best` for the keys that a query of each row reads."""
        features, index = jax.lax.stop_gradient((features, index))
        bound = (jnp.abs(features["weight"]) * gather.lengths(features["index"])).sum(-1)
        bound *= jnp.where(visible, gather.lengths(index), 0).max(-1)
        margin = gather.tie(index.dtype) * bound[:, None]
        return _scores(features, index), self.top_k, visible, margin


def _scores(
    features: dict[str, Float[Array, "B ..."]], index: Float[Array, "B S J"]
) -> Float[Array, "B S"]:
    """Returns the indexer's scores of all keys for one query of each row (eq. 1)."""
    products = gather.einsum(
        "BIJ,BSJ->BIS", features["index"], index.astype(features["index"].dtype)
    )
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
