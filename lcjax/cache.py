"""What is kept of the past while generating: a fixed number of key/value slots per row.

All rows of a batch fill the same slots, so shorter prompts are padded on the left; `segments` says
which slots hold a token. Keys are kept rotated, which is exact as long as the rotation stays the
same for the whole request, or unrotated (`rotated=False`) so that every step may rotate all of
them anew: a rotation that depends on the length needs that to be exact (YaRN, section 3.3).
"""

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from lcjax.attention import Pattern, attend
from lcjax.rope import rotate
from lcjax.sharding import rows_over

if TYPE_CHECKING:
    from lcjax.models.config import ModelConfig
    from lcjax.models.layers import Context


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of `filled` slots out of S, for every layer.

    `layers` holds (keys, values), each [B, K, S, H]: stacked [L, ...] for scanned layers, else a
    tuple with one pair per layer. Heads stand before slots, the order in which a decoding step
    multiplies them, so that reading the cache never copies it.
    """

    layers: Any
    segments: jax.Array  # int32 [B, S]: 1 where a slot holds a token, 0 where not
    positions: jax.Array  # float32 [B, S], the positions of the keys
    filled: jax.Array  # int32 scalar
    rotated: bool = dataclasses.field(metadata={"static": True}, default=True)

    @property
    def capacity(self) -> int:
        return self.segments.shape[1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class View:
    """The cache as one call sees it: slots `start .. start + T - 1` receive the new tokens."""

    segments: jax.Array  # int32 [B, S], the new tokens included
    positions: jax.Array  # [B, S]
    start: jax.Array  # int32 scalar
    rotated: bool = dataclasses.field(metadata={"static": True}, default=True)


def create(
    config: "ModelConfig",
    batch: int,
    capacity: int,
    *,
    rotated: bool = True,
    mesh: jax.sharding.Mesh | None = None,
) -> Cache:
    """An empty cache of `capacity` slots in the compute dtype of `config`.

    On `mesh` rows lie over data and fsdp, heads over tensor; every device makes its own part.
    """
    shape = (batch, config.num_kv_heads, capacity, config.head_dim)
    dtype, count = config.compute_dtype(), config.num_layers

    def pair(*stack):
        full = (*stack, *shape)
        return tuple(jnp.zeros(full, dtype, device=_layout(mesh, full)) for _ in range(2))

    layers = pair(count) if config.scan_layers else tuple(pair() for _ in range(count))
    by_row = _layout(mesh, (batch, capacity))
    segments = jnp.zeros((batch, capacity), jnp.int32, device=by_row)
    positions = jnp.zeros((batch, capacity), jnp.float32, device=by_row)  # may be fractional
    filled = jnp.zeros((), jnp.int32, device=_layout(mesh, ()))
    return Cache(layers, segments, positions, filled, rotated)


def keep_layout(cache: Cache, mesh: jax.sharding.Mesh | None) -> Cache:
    """Under jit: the cache laid out as `create` lays it, so that it is written where it lies."""
    if mesh is None:
        return cache

    def keep(x):
        return jax.lax.with_sharding_constraint(x, _layout(mesh, x.shape))

    return jax.tree.map(keep, cache)


def _layout(mesh: jax.sharding.Mesh | None, shape: tuple[int, ...]) -> NamedSharding | None:
    """Of keys or values [.., B, K, S, H], of what is known of slots [B, S], or of a number []."""
    if mesh is None:
        return None
    first = max(len(shape) - 4, 0)
    spread = rows_over(mesh, shape[first]) > 1 if shape else False
    heads = len(shape) >= 4 and shape[first + 1] % mesh.shape["tensor"] == 0
    axes = (("data", "fsdp") if spread else None, "tensor" if heads else None)
    return NamedSharding(mesh, PartitionSpec(*(None,) * first, *axes[: len(shape)]))


def whole_blocks(slots: int) -> int:
    """The next capacity that attention reads without padding the whole cache first."""
    unit = 64 if slots <= 1024 else 1024
    return -(-slots // unit) * unit


def extend(cache: Cache, segments: jax.Array | None, positions: jax.Array) -> tuple[Cache, View]:
    """Reserves slots for `positions.shape[1]` new tokens; the layers are written afterwards.

    `segments` [B, T] is 1 for a token and 0 for padding (all tokens if None). Writing past the
    capacity cannot be seen under jit: callers size the cache for prompt + new tokens.
    """
    if segments is None:
        segments = jnp.ones(positions.shape, jnp.int32)
    at = (0, cache.filled)
    all_segments = jax.lax.dynamic_update_slice(cache.segments, segments.astype(jnp.int32), at)
    all_positions = jax.lax.dynamic_update_slice(
        cache.positions, positions.astype(cache.positions.dtype), at
    )
    view = View(all_segments, all_positions, cache.filled, cache.rotated)
    filled = cache.filled + positions.shape[1]
    return dataclasses.replace(
        cache, segments=all_segments, positions=all_positions, filled=filled
    ), view


def replace_layers(cache: Cache, layers: Any) -> Cache:
    """The cache with the keys and values that the layers returned."""
    return dataclasses.replace(cache, layers=layers)


def attend_cached(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    layer: tuple[jax.Array, jax.Array],
    *,
    pattern: Pattern,
    context: "Context",
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Writes `k`, `v` [B, T, K, H] in their slots and attends over everything kept so far.

    `layer` is (keys, values) [B, K, S, H]. Returns the output [B, T, N, H] and the new pair.
    """
    view, rotation = context.view, context.rotation
    if view.rotated:
        k = rotate(k, context.positions, rotation.inv_freq, rotation.scale)
    keys, values = (
        jax.lax.dynamic_update_slice(
            kept, new.swapaxes(1, 2).astype(kept.dtype), (0, 0, view.start, 0)
        )
        for kept, new in zip(layer, (k, v), strict=True)
    )
    length = q.shape[1]
    # A query that is padding itself sees nothing, like a key that is padding.
    q_segments = jax.lax.dynamic_slice_in_dim(view.segments, view.start, length, axis=1)
    out = attend(
        q,
        keys.swapaxes(1, 2),
        values.swapaxes(1, 2),
        pattern=pattern,
        rotation=rotation,
        q_positions=context.positions,
        k_positions=view.positions,
        q_index=view.start + jnp.arange(length, dtype=jnp.int32),
        q_segments=q_segments,
        k_segments=view.segments,
        keys_rotated=view.rotated,
    )
    return out, (keys, values)
