"""Relative position terms that depend on content: Transformer-XL and DeBERTa.

`pallas_kernels.biases` has terms that depend only on the distance (ALiBi, T5).
"""

from __future__ import annotations

import abc
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from lcjax.errors import InputError
from lcjax.rope.rotation import rotate
from pallas_kernels import flash, gather, reference

if TYPE_CHECKING:
    from lcjax.attention.base import AttentionMetadata, Pass


class RelativeTerms(abc.ABC):
    """Content-dependent terms of one layer's logits, for `AttentionMetadata.bias`.

    Like `pallas_kernels.Bias`, it is a pytree whose leaves have query heads as the last axis.
    """

    @abc.abstractmethod
    def attend(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B S K H"],
        v: Float[Array, "B S K Hv"],
        attention_pass: Pass,
        metadata: AttentionMetadata,
    ) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
        """Returns the output and log-sum-exp of one pass, as `partial_attention` does."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["content", "position", "projection"],
    meta_fields=[],
)
@dataclass(frozen=True)
class TransformerXL(RelativeTerms):
    """Logits (q_i + u) k_j + (q_i + v) W R_{i-j} (Dai et al. 2019, arXiv 1901.02860, sec. 3.3).

    R_d has the sines, then the cosines of d 10000^(-2f/D). It is R_0 rotated by the angle of d, so

        (q_i + v) W R_{i-j} = rotate(W^T (q_i + v), i) . rotate(R_0, j).

    These D channels are appended to those of queries and keys. This is exact for any positions, and
    works with every kernel that supports heads of H + D channels.
    """

    content: Float[Array, "H N"]  # u
    position: Float[Array, "H N"]  # v
    projection: Float[Array, "D H N"]  # W

    def attend(self, q, k, v, attention_pass, metadata):
        size, width = q.shape[-1], self.projection.shape[0]
        wide = q.astype(jnp.float32)
        u, v_bias, w = (
            jnp.moveaxis(x.astype(jnp.float32), -1, 0)
            for x in (self.content, self.position, self.projection)
        )
        inv_freq = 10_000.0 ** -(jnp.arange(0, width, 2, dtype=jnp.float32) / width)
        waves = reference.products("BTNH,NDH->BTND", wide + v_bias, w)
        start = jnp.concatenate([jnp.zeros(width // 2), jnp.ones(width // 2)])  # R_0
        start = jnp.broadcast_to(start, (*k.shape[:2], 1, width))
        q_waves = rotate(waves, attention_pass.q_positions, inv_freq)
        k_waves = rotate(start, attention_pass.k_positions, inv_freq)
        k_waves = jnp.broadcast_to(k_waves, (*k.shape[:3], width)).astype(k.dtype)
        q_index, k_index = metadata.mask_indices(attention_pass.mask)
        with jax.named_scope("attention"):
            return flash(
                jnp.concatenate([wide + u, q_waves], -1).astype(q.dtype),
                jnp.concatenate([k, k_waves], -1),
                v,
                attention_pass.mask,
                scale=size**-0.5,
                q_index=q_index,
                k_index=k_index,
                q_segments=metadata.q_segments,
                k_segments=metadata.k_segments,
                layout=metadata.layout,
                implementation=metadata.implementation,
            )


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["keys", "queries"],
    meta_fields=["max_distance"],
)
@dataclass(frozen=True)
class Disentangled(RelativeTerms):
    """Logits q_i k_j + q_i keys[b] + k_j queries[b], b the bucket of i - j, over sqrt(3 H).

    DeBERTa's disentangled attention (He et al. 2021, arXiv 2006.03654, sec. 3.1) with the buckets
    of its second version: one for each distance up to a quarter of the table in each direction,
    then logarithmically growing ranges up to `max_distance`. For the last term, the paper uses the
    bucket of j - i; the released code and this class use that of i - j.

    No kernel supports such terms: XLA computes all logits of a few queries at a time.
    """

    keys: Float[Array, "X H N"]  # rows of the table for all buckets, projected as keys
    queries: Float[Array, "X H N"]  # the same rows, projected as queries
    max_distance: int

    def buckets(self, distance: Int[Array, ...]) -> Int[Array, ...]:
        """Returns the int32 rows of the table for distances i - j."""
        span = self.keys.shape[0] // 2
        middle, away = span // 2, np.arange(self.max_distance + 1)
        # Computed in float32, as in the released code, because rounding decides some buckets.
        ratio = np.log(np.maximum(away, middle).astype(np.float32) / np.float32(middle))
        ratio /= np.log(np.float32((self.max_distance - 1) / middle))
        far = middle + np.ceil(ratio * (middle - 1)).astype(np.int32)
        table = jnp.asarray(np.where(away <= middle, away, far).astype(np.int32))
        bucket = table[jnp.minimum(jnp.abs(distance), self.max_distance)] * jnp.sign(distance)
        return jnp.clip(bucket + span, 0, 2 * span - 1)

    def attend(self, q, k, v, attention_pass, metadata):
        moved = (
            attention_pass.q_positions is not metadata.q_positions
            or attention_pass.k_positions is not metadata.k_positions
        )
        if moved:
            raise TypeError(f"no rule moves Disentangled to the positions of {attention_pass!r}")
        if metadata.implementation not in (None, "xla", "reference"):
            raise InputError(
                f"implementation={metadata.implementation} has no terms of the logits that depend"
                " on the content (model.position=deberta); use xla"
            )
        count = q.shape[2]
        q_index, k_index = (
            jnp.broadcast_to(jnp.arange(x.shape[1]) if index is None else index, x.shape[:2])
            for index, x in zip(metadata.mask_indices(attention_pass.mask), (q, k), strict=True)
        )
        q_segments, k_segments = (
            jnp.ones(x.shape[:2], jnp.int32) if segments is None else segments
            for segments, x in ((metadata.q_segments, q), (metadata.k_segments, k))
        )
        scale = (3 * q.shape[-1]) ** -0.5
        repeated = jnp.repeat(k, count // k.shape[2], 2)
        k_terms = reference.products("BSNH,XHN->BNSX", repeated, self.queries)

        @jax.checkpoint
        def attend_query(inputs):
            query, index, segment = (x[:, None] for x in inputs)  # [B, 1, N, H], [B, 1], [B, 1]
            bucket = self.buckets(index[..., None] - k_index[:, None])[:, None]  # [B, 1, 1, S]
            q_terms = reference.products("BTNH,XHN->BNTX", query, self.keys)
            terms = jnp.take_along_axis(q_terms, bucket, -1)
            terms += jnp.take_along_axis(k_terms, bucket[:, :, 0, :, None], -1).swapaxes(-1, -2)
            out, lse = reference.attention(
                *(query, k, v, index, k_index, segment, k_segments),
                mask=attention_pass.mask, scale=scale, bias=scale * terms,
            )  # fmt: skip
            return out[:, 0], lse[:, 0]

        elements = 4 * q.shape[0] * count * k.shape[1]
        return gather.by_query(attend_query, (q, q_index, q_segments), elements)
