"""What is kept of the past while generating: a fixed number of key/value slots per row.

Two policies. A *full* cache has a slot for every token; all rows of a batch fill the same slots, so
shorter prompts are padded on the left, and `segments` says which slots hold a token. A *rolling*
cache serves patterns that see the first and the last tokens only (`Pattern.cache_window`): each
row writes its tokens to the sinks, then round a ring, and however long the text grows the cache
does not.
Which slot holds which token is data there: masks are asked about `index`, the order indices.

Keys are kept rotated, which is exact as long as the rotation stays the same for the whole request,
or unrotated (`rotated=False`) so that every step may rotate all of them anew: patterns that move
keys need that, and so does a rotation that depends on the length (YaRN, section 3.3).
"""

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from lcjax.attention import AttentionMetadata, Pattern
from lcjax.errors import InputError
from lcjax.parallel.sharding import rows_over
from lcjax.rope import rotate

if TYPE_CHECKING:
    from lcjax.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Rolling:
    """Which tokens a rolling cache holds: the first `sinks`, and round a ring the last ones."""

    sinks: int
    recent: int  # last tokens that a new one may see, itself included

    def slots_for(self, chunk: int) -> int:
        """Slots with which `chunk` tokens can be read at once: the first of them sees `recent`."""
        return self.sinks + self.recent + chunk - 1

    def slot(self, order: jax.Array, slots: int) -> jax.Array:
        """The slot of the token with this order index."""
        ring = slots - self.sinks
        return jnp.where(order < self.sinks, order, self.sinks + (order - self.sinks) % ring)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values in S slots, for every layer.

    `layers` holds (keys, values), each [B, K, S, H], and the pattern's state
    (`Pattern.cache_state_shapes`): stacked [L, ...] for scanned layers, else one such tuple per
    layer. Heads stand before slots, the order in which a decoding step multiplies them, so that
    reading the cache never copies it.
    """

    layers: Any
    segments: jax.Array  # int32 [B, S]: 1 where a slot holds a token, 0 where not
    positions: jax.Array  # float32 [B, S], the positions of the keys
    index: jax.Array  # int32 [B, S], their order indices
    filled: jax.Array  # int32 scalar, tokens read, padding included
    tokens: jax.Array  # int32 [B], tokens read of each row, padding not counted
    rotated: bool = dataclasses.field(metadata={"static": True}, default=True)
    rolling: Rolling | None = dataclasses.field(metadata={"static": True}, default=None)

    @property
    def capacity(self) -> int:
        return self.segments.shape[1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class View:
    """The cache as one call sees it, the places of its T new tokens included."""

    segments: jax.Array  # int32 [B, S]
    positions: jax.Array  # [B, S]
    index: jax.Array  # int32 [B, S]
    start: jax.Array  # int32 scalar; a full cache writes to slots start .. start + T - 1
    slots: jax.Array | None  # int32 [B, T], where a rolling cache writes; S for padding
    q_index: jax.Array  # int32 [B, T], order indices of the new tokens
    q_segments: jax.Array  # int32 [B, T]
    rotated: bool = dataclasses.field(metadata={"static": True}, default=True)

    def update_metadata(self, metadata: AttentionMetadata) -> AttentionMetadata:
        """Replaces the keys of a call by those of the cache; the queries are its new tokens."""
        slots = self.start + jnp.arange(self.q_index.shape[1], dtype=jnp.int32)
        return metadata.replace(
            k_positions=self.positions,
            q_index=self.q_index,
            k_index=self.index,
            # A query that is padding itself sees nothing, like a key that is padding.
            q_segments=self.q_segments,
            k_segments=self.segments,
            row_indices=(slots, None) if self.slots is None else None,
            keys_rotated=self.rotated,
        )


def create(
    config: "ModelConfig",
    batch: int,
    length: int,
    *,
    chunk: int | None = None,
    rotated: bool | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> Cache:
    """An empty cache for `length` tokens in the compute dtype of `config`.

    `chunk` is the most tokens that are read at once; with it, a pattern that keeps only some keys
    gets a rolling cache where that is the smaller one. Keys are `rotated` unless the pattern moves
    them. On `mesh` rows lie over data and fsdp, heads over tensor; every device makes its own part.
    """
    pattern = config.pattern.for_inference()
    slots, rolling = policy(pattern, length, chunk)
    shape = (batch, config.num_kv_heads, slots, config.head_dim)
    dtype, count = config.compute_dtype(), config.num_layers

    def zeros(shape, dtype):
        return jnp.zeros(shape, dtype, device=_layout(mesh, shape))

    state_shapes = pattern.cache_state_shapes(slots, config.head_dim)
    notes = [(batch, config.num_heads, *shape) for shape in state_shapes]

    def layer(*stack):
        pair = [zeros((*stack, *shape), dtype) for _ in range(2)]
        return (*pair, *(zeros((*stack, *note), jnp.float32) for note in notes))

    return Cache(
        layers=layer(count) if config.stacked else tuple(layer() for _ in range(count)),
        segments=zeros((batch, slots), jnp.int32),
        positions=zeros((batch, slots), jnp.float32),  # may be fractional
        index=zeros((batch, slots), jnp.int32),
        filled=zeros((), jnp.int32),
        tokens=zeros((batch,), jnp.int32),
        rotated=not pattern.moves_keys if rotated is None else rotated,
        rolling=rolling,
    )


def policy(pattern: Pattern, length: int, chunk: int | None) -> tuple[int, Rolling | None]:
    """(slots, how they are used) of a cache for `length` tokens, read `chunk` at a time."""
    window = pattern.cache_window()
    if window is None or chunk is None:
        return length, None
    rolling = Rolling(*window)
    slots = whole_blocks(rolling.slots_for(min(chunk, length)))
    return (slots, rolling) if slots < length else (length, None)


def keep_layout(cache: Any, mesh: jax.sharding.Mesh | None) -> Any:
    """Under jit: a cache, or some of its arrays, laid out as `create` lays it.

    So it is written where it lies.
    """
    if mesh is None:
        return cache

    def keep(x):
        return jax.lax.with_sharding_constraint(x, _layout(mesh, x.shape))

    return jax.tree.map(keep, cache)


def _layout(mesh: jax.sharding.Mesh | None, shape: tuple[int, ...]) -> NamedSharding | None:
    """Of what layers keep [.., B, K, S, H], of what is known of slots [B, S], or of a number []."""
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

    `segments` [B, T] is 1 for a token and 0 for padding, which stands before the first token (all
    are tokens if None). Writing past the capacity of a full cache cannot be seen under jit: callers
    size it for prompt + new tokens.
    """
    rows, length = positions.shape
    if segments is None:
        segments = jnp.ones((rows, length), jnp.int32)
    segments = segments.astype(jnp.int32)
    order = next_order(cache, segments, length)
    slots = _slots(cache, segments, order)
    fields = {"segments": segments, "positions": positions, "index": order}
    for name, new in fields.items():
        kept = getattr(cache, name)
        new = new.astype(kept.dtype)
        if slots is None:
            fields[name] = jax.lax.dynamic_update_slice(kept, new, (0, cache.filled))
        else:
            fields[name] = kept.at[jnp.arange(rows)[:, None], slots].set(new, mode="drop")
    view = View(
        **fields,
        start=cache.filled,
        slots=slots,
        q_index=order,
        q_segments=segments,
        rotated=cache.rotated,
    )
    counts = {"filled": cache.filled + length, "tokens": cache.tokens + segments.sum(1)}
    return dataclasses.replace(cache, **fields, **counts), view


def next_order(cache: Cache, segments: jax.Array | None, length: int) -> jax.Array:
    """The order indices int32 [B, T] of `length` tokens that go on from those in the cache.

    `segments` [B, T] as in `extend`; padding has the index of the token before it.
    """
    if segments is None:
        return cache.tokens[:, None] + jnp.arange(length, dtype=jnp.int32)
    return cache.tokens[:, None] + jnp.cumsum(segments.astype(jnp.int32), axis=1) - 1


def _slots(cache: Cache, segments: jax.Array, order: jax.Array) -> jax.Array | None:
    """Where a rolling cache writes the tokens [B, T]: nowhere (slot S) for padding."""
    rolling, length = cache.rolling, segments.shape[1]
    if rolling is None:
        return None
    room = cache.capacity - rolling.slots_for(1) + 1
    if length > room:
        raise InputError(
            f"{length} tokens at once overwrite keys that they need in a rolling cache of "
            f"{cache.capacity} slots; read at most {room}, or create it with chunk={length}"
        )
    slots = rolling.slot(order, cache.capacity)
    return jnp.where(segments != 0, slots, cache.capacity)


@functools.partial(jax.jit, static_argnums=(3, 4))
def branch(
    cache: Cache,
    filled: jax.Array,
    padding: jax.Array,
    slots: int,
    mesh: jax.sharding.Mesh | None = None,
) -> Cache:
    """Rows that begin with what the one row of a full `cache` begins with.

    As if their first `filled` slots had been read in full: `padding` [B], then tokens of `cache`.
    """
    places = jnp.arange(slots, dtype=jnp.int32)
    wanted = places - padding[:, None]
    there = (wanted >= 0) & (places < filled)

    def rows(x):
        """[1, S'] -> [B, S], or of what layers keep [.., 1, K, S', H] -> [.., B, K, S, H]."""
        wide = x.ndim >= 4
        first, mask = (x.ndim - 4, there[:, None, :, None]) if wide else (0, there)
        x = x.squeeze(first)
        pick = functools.partial(jnp.take, x, axis=-2 if wide else -1, mode="clip")
        return jnp.where(mask, jax.vmap(pick, out_axes=first)(wanted), 0)

    fields = {name: rows(getattr(cache, name)) for name in ("segments", "positions", "index")}
    made = dataclasses.replace(
        cache,
        layers=jax.tree.map(rows, cache.layers),
        **fields,
        filled=filled,
        tokens=jnp.maximum(filled - padding, 0).astype(jnp.int32),
    )
    return keep_layout(made, mesh)


def replace_layers(cache: Cache, layers: Any) -> Cache:
    """The cache with the keys and values that the layers returned."""
    return dataclasses.replace(cache, layers=layers)


def attend_cached(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    layer: tuple[Float[Array, "B _ _ _"], ...],
    pattern: Pattern,
    view: View,
    metadata: AttentionMetadata,
) -> tuple[Float[Array, "B T N H"], tuple[Float[Array, "B _ _ _"], ...]]:
    """Writes the new keys and values to the cache and attends to all its keys.

    Args:
      q, k, v: unrotated queries and keys, and values of the new tokens.
      layer: keys and values [B, K, S, H] of the cache, and the pattern's state.
      pattern: visible keys.
      view: slots of the new tokens.
      metadata: positions, documents and rotation of the call (`View.update_metadata`).

    Returns:
      The output, and the updated layer.
    """
    if view.rotated:
        positions = pattern.key_positions(metadata.q_positions, view.q_index)
        k = rotate(k, positions, metadata.rotation.inv_freq, metadata.rotation.scale)
    keys, values = (_write(cached, x, view) for cached, x in zip(layer[:2], (k, v), strict=True))
    out, state = pattern.attend_with_state(
        q, keys.swapaxes(1, 2), values.swapaxes(1, 2), layer[2:], metadata
    )
    return out, (keys, values, *state)


def _write(kept: jax.Array, new: jax.Array, view: View) -> jax.Array:
    """`kept` [B, K, S, H] with `new` [B, T, K, H] in the slots of `view`."""
    new = new.astype(kept.dtype)
    if view.slots is None:
        return jax.lax.dynamic_update_slice(kept, new.swapaxes(1, 2), (0, 0, view.start, 0))
    rows = jnp.arange(new.shape[0])[:, None]
    return kept.at[rows, :, view.slots].set(new, mode="drop")
