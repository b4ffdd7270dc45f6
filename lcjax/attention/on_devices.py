"""Attention whose keys the data chooses, on a mesh: each device reads all keys of its rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Num

from lcjax.attention.base import AttentionMetadata, Features


class DocumentTokens(NamedTuple):
    """Positions, order indices and documents of tokens."""

    positions: Num[Array, "B S"]
    index: Int[Array, "B S"]
    segments: Int[Array, "B S"] | None  # 0 is padding; None: one document

    @classmethod
    def of(cls, positions, index, segments) -> DocumentTokens:
        index = jnp.arange(positions.shape[1], dtype=jnp.int32) if index is None else index
        return cls(positions, jnp.broadcast_to(index, positions.shape), segments)

    def with_segments(self) -> DocumentTokens:
        """Returns the tokens with the number of the one document, if they have none."""
        if self.segments is not None:
            return self
        return self._replace(segments=jnp.ones(self.index.shape, jnp.int32))

    def visible_to(self, queries: DocumentTokens) -> Bool[Array, "*queries S"]:
        """Returns which of these keys tokens [B], or [B, T], may read: both have segments."""
        index, segments = self.index, self.segments
        if queries.index.ndim > 1:
            index, segments = index[:, None], segments[:, None]
        of_queries = queries.segments[..., None]
        same = (segments == of_queries) & (of_queries != 0)
        return same & (index <= queries.index[..., None])


def on_devices(
    run: Callable[..., jax.Array],
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"] | None,
    metadata: AttentionMetadata,
    *,
    by_head: bool,
) -> jax.Array:
    """Calls `run` with the queries of each device, and with the keys of their rows and heads.

    Args:
      run: a function of (q, k, v, queries, keys, metadata, axis). Queries and keys are
        `DocumentTokens`, metadata have the rotation and the features of the device and no layout,
        and `axis` is the mesh axis that shares the heads, or None. It returns an array with the
        axes of q, or [B, T] if v is None.
      q, k, v: queries, keys and values of all devices.
      metadata: that of the call.
      by_head: whether the third axis of `metadata.features.queries` is one of heads.
    """
    queries = DocumentTokens.of(metadata.q_positions, metadata.q_index, metadata.q_segments)
    keys = DocumentTokens.of(metadata.k_positions, metadata.k_index, metadata.k_segments)
    layout, rotation, features = metadata.layout, metadata.rotation, metadata.features
    plain = metadata.replace(layout=None, row_indices=None)

    def local(q, k, v, queries, keys, rotation, features, axis=None):
        one = plain.replace(
            rotation=rotation, features=features,
            q_positions=queries.positions, k_positions=keys.positions,
            q_index=queries.index, k_index=keys.index,
            q_segments=queries.segments, k_segments=keys.segments,
        )  # fmt: skip
        return run(q, k, v, queries, keys, one, axis)

    if layout is None:
        return local(q, k, v, queries, keys, rotation, features)
    layout = layout.fitting(q, k)
    heads = layout.heads if k.shape[2] % layout.size(layout.heads) == 0 else None
    by_row, whole = PartitionSpec(layout.rows), PartitionSpec()
    of_keys, of_tokens = (
        PartitionSpec(layout.rows, None, heads),
        PartitionSpec(layout.rows, layout.length),
    )
    of_queries = PartitionSpec(*of_tokens, heads)
    return jax.shard_map(
        functools.partial(local, axis=heads),
        mesh=layout.mesh,
        in_specs=(
            *(of_queries, of_keys, of_keys, of_tokens, by_row),
            by_row if rotation.inv_freq.ndim > 1 else whole,
            Features(of_queries if by_head else of_tokens, by_row, whole),
        ),
        out_specs=of_tokens if v is None else of_queries,
        check_vma=False,
    )(q, k, v, queries, keys, rotation, features)
