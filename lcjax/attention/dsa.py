"""DeepSeek sparse attention (DeepSeek-V3.2, arXiv 2512.02556, sec. 2.1) on grouped-query models.

Letters: I index heads, J channels of an index head, M keys that a query reads.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from lcjax.attention.base import (
    AttentionMetadata,
    Features,
    Parameter,
    Pass,
    Pattern,
    rotate_qk,
)
from lcjax.attention.cache import FullCache, LayerCache
from lcjax.errors import Interval, PositiveInt
from lcjax.rope.rotation import Rotation
from pallas_kernels import causal, gather, window

_EPSILON = 1e-6  # of the norm of index keys


@Pattern.register_subclass("dsa")
@dataclass(frozen=True)
class DSA(Pattern):
    """A token sees the `top_k` earlier tokens that an indexer scores highest, itself included.

    The indexer has `heads` small query heads and one key head, whose keys a cache keeps. The score
    of a key for a query is the sum over index heads of w relu(q k), in float32, with a weight w of
    each query and head (eq. 1). All attention heads read the keys with the `top_k` highest scores
    in one softmax. Scores that differ by no more than their rounding error count as equal, and of
    equal keys the later ones are read. A text of up to `top_k` tokens has full attention, so a
    dense model is unchanged until its texts are longer.

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
    learns_by_divergence: ClassVar[bool] = True

    heads: PositiveInt = 64  # I, index heads
    head_dim: PositiveInt = 128  # J, channels of an index head
    top_k: PositiveInt = 2048  # keys that a query reads
    dense: bool = False  # first stage of training: attention is full, and the indexer learns it
    divergence_factor: Annotated[float, Interval(least=0, most=1)] = 1.0  # of the indexer's loss

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
        if not self._reads_all(metadata.k_positions.shape[1]):
            mask = mask & window(self.top_k)
        return [Pass(metadata.q_positions, metadata.k_positions, mask)]

    def _reads_all(self, keys: int) -> bool:
        return self.dense or keys <= self.top_k

    def features(self, parameters, x, q, k, metadata):
        rotation = _index_rotation(metadata.rotation, self.head_dim)
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
        if self._reads_all(k.shape[1]):
            return super().attend(q, k, v, metadata)
        self.check_metadata(metadata)
        return _on_devices(self._attend, q, k, v, metadata)

    def divergence(self, q, k, metadata):
        """Returns the KL divergence of the indexer's softmax from the mean of all heads' (eq. 3).

        Both are over the visible keys if attention is full, else over the chosen ones, for which
        each head's softmax is computed anew.
        """
        return _on_devices(self._divergence, q, k, None, metadata)

    def _attend(self, q, k, v, queries: _Queries, keys: _Keys, metadata: AttentionMetadata):
        """Computes attention on one device."""
        q, k = rotate_qk(q, k, metadata)
        copies = 8 * self.top_k <= k.shape[1]

        @jax.checkpoint
        def of_query(arrays):
            q, queries = arrays
            ids, is_key = self._choose(queries, keys)
            if copies:
                pair = (jnp.take_along_axis(x, ids[..., None, None], axis=1) for x in (k, v))
                return _attention(q, *pair, is_key, metadata.soft_cap)
            return _attention(q, k, v, _is_listed(ids, is_key, k.shape[1]), metadata.soft_cap)

        rows, size = q.shape[0], k.shape[1]
        elements = self.heads * size + q.shape[2] * (self.top_k if copies else size)
        elements += 2 * self.top_k * k.shape[2] * k.shape[3] if copies else 0
        with jax.named_scope("attention"):
            return gather.by_query(of_query, (q, queries), rows * elements)

    def _divergence(self, q, k, v, queries: _Queries, keys: _Keys, metadata: AttentionMetadata):
        q, k = map(jax.lax.stop_gradient, rotate_qk(q, k, metadata))
        axis = metadata.layout and metadata.layout.heads
        num_heads = q.shape[2] * (1 if axis is None else metadata.layout.size(axis))

        @jax.checkpoint
        def of_query(arrays):
            q, queries = arrays
            visible = keys.visible(queries)
            if not self._reads_all(k.shape[1]):
                visible = _is_listed(*self._choose(queries, keys), k.shape[1])
            logits = _logits(q, k, metadata.soft_cap)
            teacher = jnp.exp(_log_softmax(logits, visible[:, None])).sum(1)
            if axis is not None:
                teacher = jax.lax.psum(teacher, axis)
            teacher = jax.lax.stop_gradient(teacher / num_heads)
            student = _log_softmax(_scores(queries, keys), visible)
            apart = jnp.log(jnp.where(teacher > 0, teacher, 1)) - student
            return jnp.where(visible & (teacher > 0), teacher * apart, 0).sum(-1)

        elements = q.shape[0] * k.shape[1] * (self.heads + q.shape[2])
        with jax.named_scope("divergence"):
            return gather.by_query(of_query, (q, queries), elements)

    def _choose(
        self, queries: _Queries, keys: _Keys
    ) -> tuple[Int[Array, "B M"], Bool[Array, "B M"]]:
        """Returns the keys that a query of each row reads, and whether each is one."""
        queries, keys = jax.lax.stop_gradient((queries, keys))
        share = max(gather.TIE, float(jnp.finfo(queries.index.dtype).eps) / 8)
        of_query, of_keys = (
            jnp.linalg.norm(x.index.astype(jnp.float32), axis=-1) for x in (queries, keys)
        )
        visible = keys.visible(queries)
        bound = (jnp.abs(queries.weight) * of_query).sum(-1)
        bound *= jnp.where(visible, of_keys, 0).max(-1)
        margin = share * bound[:, None]
        return gather.best(_scores(queries, keys), self.top_k, visible, margin)


def _index_rotation(rotation: Rotation, size: int) -> Rotation:
    """Returns the rotation of index heads with `size` channels, without scales.

    It has the frequencies of the layer; if they are too many for the channels, some, evenly spaced.
    """
    pairs, fitting = rotation.inv_freq.shape[-1], size // 2
    frequencies = rotation.inv_freq
    if fitting < pairs:
        frequencies = frequencies[..., np.arange(fitting) * pairs // max(fitting, 1)]
    return Rotation(frequencies)


class _Queries(NamedTuple):
    """Index queries [B, T] or [B], and what decides which keys they may read."""

    index: Float[Array, "*B I J"]
    weight: Float[Array, "*B I"]
    order: Int[Array, " *B"]  # order indices
    segments: Int[Array, " *B"]  # documents; 0 is padding


class _Keys(NamedTuple):
    index: Float[Array, "B S J"]
    order: Int[Array, "B S"]
    segments: Int[Array, "B S"]

    def visible(self, queries: _Queries) -> Bool[Array, "B S"]:
        """Returns which keys one query of each row may read."""
        segments = queries.segments[:, None]
        same = (self.segments == segments) & (segments != 0)
        return same & (self.order <= queries.order[:, None])


def _scores(queries: _Queries, keys: _Keys) -> Float[Array, "B S"]:
    """Returns the indexer's scores of all keys for one query of each row (eq. 1)."""
    products = gather.einsum("BIJ,BSJ->BIS", queries.index, keys.index.astype(queries.index.dtype))
    return (jax.nn.relu(products) * queries.weight[..., None]).sum(1)


def _is_listed(
    ids: Int[Array, "B M"], is_valid: Bool[Array, "B M"], count: int
) -> Bool[Array, "B S"]:
    """Returns whether each of `count` keys is among the valid `ids`."""
    rows = jnp.arange(len(ids))[:, None]
    ids = jnp.where(is_valid, ids, count)
    return jnp.zeros((len(ids), count), bool).at[rows, ids].set(True, mode="drop")


def _logits(
    q: Float[Array, "B N H"], k: Float[Array, "B S K H"], soft_cap: float | None
) -> Float[Array, "B N S"]:
    grouped = q.reshape(len(q), k.shape[2], -1, q.shape[2])
    x = gather.einsum("BKGH,BSKH->BKGS", grouped, k.astype(q.dtype)) * q.shape[2] ** -0.5
    x = x.reshape(len(q), q.shape[1], -1)
    return x if soft_cap is None else soft_cap * jnp.tanh(x / soft_cap)


def _log_softmax(x: Float[Array, "... S"], visible: Bool[Array, "... S"]) -> Float[Array, "... S"]:
    """Returns the log-softmax over visible entries; -inf for others, and in rows without any."""
    x = jnp.where(visible, x, -jnp.inf)
    largest = jax.lax.stop_gradient(x.max(-1, keepdims=True))
    x = x - jnp.where(largest > -jnp.inf, largest, 0)
    total = jnp.where(visible, jnp.exp(x), 0).sum(-1, keepdims=True)
    return x - jnp.log(jnp.where(total > 0, total, 1))


def _attention(
    q: Float[Array, "B N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    visible: Bool[Array, "B S"],
    soft_cap: float | None,
) -> Float[Array, "B N Hv"]:
    """Returns attention of one query of each row to the visible keys; 0 if there are none."""
    weights = jnp.exp(_log_softmax(_logits(q, k, soft_cap), visible[:, None]))
    grouped = weights.astype(v.dtype).reshape(len(q), k.shape[2], -1, k.shape[1])
    out = gather.einsum("BKGS,BSKH->BKGH", grouped, v)
    return out.reshape(*q.shape[:2], -1).astype(q.dtype)


def _on_devices(
    run: Callable[..., jax.Array],
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"] | None,
    metadata: AttentionMetadata,
) -> jax.Array:
    """Calls `run` with the queries of each device and all keys of their rows.

    `run` has the arguments (q, k, v, queries, keys, metadata), in which metadata have positions and
    rotation, and the layout of the devices if there are several.
    """
    features, shape = metadata.features, q.shape[:2]

    def of_tokens(order, segments, shape):
        order = jnp.broadcast_to(order, shape)
        return order, jnp.ones(shape, jnp.int32) if segments is None else segments

    queries = _Queries(
        features.queries["index"],
        features.queries["weight"],
        *of_tokens(metadata.q_order, metadata.q_segments, shape),
    )
    of_keys = of_tokens(metadata.k_order, metadata.k_segments, k.shape[:2])
    keys = _Keys(features.keys["index"][:, :, 0], *of_keys)
    plain = metadata.replace(
        row_indices=None, features=Features({}, {}, {}), layout=None, q_index=None, k_index=None,
        q_segments=None, k_segments=None,
    )  # fmt: skip
    positions = metadata.q_positions, metadata.k_positions

    def local(q, k, v, queries, keys, positions, rotation, layout=None):
        q_positions, k_positions = positions
        options = {"q_positions": q_positions, "k_positions": k_positions, "rotation": rotation}
        return run(q, k, v, queries, keys, plain.replace(**options, layout=layout))

    if metadata.layout is None:
        return local(q, k, v, queries, keys, positions, metadata.rotation)
    layout = metadata.layout.fitting(q, k)
    heads = layout.heads if k.shape[2] % layout.size(layout.heads) == 0 else None
    layout = dataclasses.replace(layout, heads=heads)
    by_query, by_row = PartitionSpec(layout.rows, layout.length), PartitionSpec(layout.rows)
    of_rotation = by_row if metadata.rotation.inv_freq.ndim > 1 else PartitionSpec()
    of_k = PartitionSpec(layout.rows, None, heads)
    return jax.shard_map(
        functools.partial(local, layout=layout),
        mesh=layout.mesh,
        in_specs=(
            *(PartitionSpec(*by_query, heads), of_k, of_k, by_query, by_row),
            *((by_query, by_row), of_rotation),
        ),
        out_specs=PartitionSpec(*by_query, heads) if v is not None else by_query,
        check_vma=False,
    )(q, k, v, queries, keys, positions, metadata.rotation)
