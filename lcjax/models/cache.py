"""The KV cache: a fixed number of key/value slots per row.

A *full* cache has a slot for every token. All rows of a batch fill the same slots, so shorter
prompts are padded on the left, and `segments` marks the slots that hold a token. A *rolling* cache
serves patterns that see only the first and the last tokens (`Pattern.cache_window`): each row
writes its tokens to the sinks, then to a ring, and the cache does not grow with the text. The slot
of a token then depends on the data, and masks test `index`, the order indices of the slots. If
layers differ, each layer has the slots that its own pattern needs.

Keys are stored rotated, which is exact if the rotation is the same for the whole request. With
`rotated=False` they are stored unrotated, and every step rotates all of them. Patterns that move
keys need unrotated keys, and so do rotations that depend on the length (YaRN, section 3.3).
"""

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, Num

from lcjax.attention import AttentionMetadata, Pattern
from lcjax.errors import InputError
from lcjax.parallel.device_memory import check_fits
from lcjax.parallel.sharding import ROWS, rows_over
from lcjax.rope import rotate

if TYPE_CHECKING:
    from lcjax.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Rolling:
    """The tokens of a rolling cache: the first `sinks`, and the last ones in a ring."""

    sinks: int
    recent: int  # last tokens that a new token may see, itself included

    def slots_for(self, chunk: int) -> int:
        """Returns the number of slots that are needed to read `chunk` tokens at once.

        All `recent` tokens that the first of them sees must stay in the cache.
        """
        return self.sinks + self.recent + chunk - 1

    def slot(self, order: Int[Array, "..."], slots: int) -> Int[Array, "..."]:
        """Returns the slots of the tokens with order indices `order`, in a cache of `slots`."""
        ring = slots - self.sinks
        return jnp.where(order < self.sinks, order, self.sinks + (order - self.sinks) % ring)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotGroup:
    """The contents of S slots that are shared by layers whose patterns need the same keys."""

    segments: Int[Array, "B S"]  # 1 where a slot holds a token, else 0
    positions: Float[Array, "B S"]  # of the keys
    index: Int[Array, "B S"]  # order indices of the keys
    rotated: bool = dataclasses.field(metadata={"static": True}, default=True)
    rolling: Rolling | None = dataclasses.field(metadata={"static": True}, default=None)

    @property
    def num_slots(self) -> int:
        return self.segments.shape[1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of every layer, in slots.

    `layers` holds (keys, values), each [B, K, S, H], and the pattern's state
    (`Pattern.cache_state_shapes`): stacked [L, ...] for scanned layers, else one such tuple per
    layer. Heads precede slots, the order in which a decoding step multiplies them, so that reading
    the cache never copies it.
    """

    layers: Any
    slot_groups: tuple[SlotGroup, ...]
    filled: Int[Array, ""]  # tokens read, padding included
    tokens: Int[Array, " B"]  # tokens read in each row, without padding
    group_by_layer: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @property
    def capacity(self) -> int:
        """The largest number of slots of any layer."""
        return max(group.num_slots for group in self.slot_groups)

    @property
    def rolling(self) -> Rolling | None:
        """The ring of the layers with the most slots; None: they have a slot for every token."""
        return max(self.slot_groups, key=lambda group: group.num_slots).rolling


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class View:
    """The slots of a layer in one call, including the T new tokens."""

    segments: Int[Array, "B S"]
    positions: Float[Array, "B S"]
    index: Int[Array, "B S"]
    start: Int[Array, ""]  # a full cache writes to slots start .. start + T - 1
    write_slots: Int[Array, "B T"] | None  # to which a rolling cache writes; S for padding
    q_index: Int[Array, "B T"]  # order indices of the new tokens
    q_segments: Int[Array, "B T"]
    rotated: bool = dataclasses.field(metadata={"static": True}, default=True)

    def update_metadata(self, metadata: AttentionMetadata) -> AttentionMetadata:
        """Returns metadata whose keys are the slots of the cache; queries are the new tokens."""
        slots = self.start + jnp.arange(self.q_index.shape[1], dtype=jnp.int32)
        return metadata.replace(
            k_positions=self.positions,
            q_index=self.q_index,
            k_index=self.index,
            # Padding queries have segment 0 and so see no keys.
            q_segments=self.q_segments,
            k_segments=self.segments,
            row_indices=(slots, None) if self.write_slots is None else None,
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
    """Returns an empty cache in the compute dtype of `config`.

    Args:
      config: the model.
      batch: number of rows.
      length: maximum number of tokens of a row.
      chunk: maximum number of tokens that are read at once. A pattern that needs only some keys
        gets a rolling cache if that is smaller. None: a full cache.
      rotated: whether keys are stored rotated; None: unless the pattern of a layer moves them.
      mesh: shards rows over data and fsdp, and heads over tensor; each device creates its part.

    Raises:
      InputError: the cache is larger than the free memory of a device.
    """
    cache = abstract_cache(config, batch, length, chunk=chunk, rotated=rotated, mesh=mesh)
    check_fits(
        cache,
        f"a cache for {batch} rows of {length:,} tokens would",
        "read fewer rows at a time or shorter texts, or use more devices or a pattern that keeps"
        " fewer keys (model.pattern)",
    )
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), cache)


def abstract_cache(
    config: "ModelConfig",
    batch: int,
    length: int,
    *,
    chunk: int | None = None,
    rotated: bool | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> Cache:
    """Returns shapes, dtypes and shardings of the cache that `create` returns, unallocated."""

    def array(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=_layout(mesh, shape))

    patterns = [config.of_kind(kind).pattern.for_inference() for kind in config.kinds]
    layouts = [
        (*policy(pattern, length, chunk), not pattern.moves_keys if rotated is None else rotated)
        for pattern in patterns
    ]
    distinct = list(dict.fromkeys(layouts))

    def layer(kind, *stack):
        size, (slots, *_) = config.head_dim, layouts[kind]
        pair = 2 * [((config.num_kv_heads, slots, size), config.compute_dtype())]
        states = patterns[kind].cache_state_shapes(slots, size)
        states = [((config.num_heads, *shape), jnp.float32) for shape in states]
        return tuple(array((*stack, batch, *shape), dtype) for shape, dtype in pair + states)

    kinds = config.kind_by_layer
    return Cache(
        layers=layer(0, len(kinds)) if config.stacked else tuple(map(layer, kinds)),
        slot_groups=tuple(
            SlotGroup(
                segments=array((batch, slots), jnp.int32),
                positions=array((batch, slots), jnp.float32),  # may be fractional
                index=array((batch, slots), jnp.int32),
                rolling=rolling,
                rotated=is_rotated,
            )
            for slots, rolling, is_rotated in distinct
        ),
        filled=array((), jnp.int32),
        tokens=array((batch,), jnp.int32),
        group_by_layer=tuple(distinct.index(layouts[kind]) for kind in kinds),
    )


def policy(pattern: Pattern, length: int, chunk: int | None) -> tuple[int, Rolling | None]:
    """Returns the number of slots for `length` tokens, and the ring (None: a full cache)."""
    window = pattern.cache_window()
    if window is None or chunk is None:
        return length, None
    rolling = Rolling(*window)
    slots = whole_blocks(rolling.slots_for(min(chunk, length)))
    return (slots, rolling) if slots < length else (length, None)


def keep_layout(cache: Any, mesh: jax.sharding.Mesh | None) -> Any:
    """Constrains a cache, or some of its arrays, to the shardings of `create` inside jit."""
    if mesh is None:
        return cache
    return jax.tree.map(
        lambda x: jax.lax.with_sharding_constraint(x, _layout(mesh, x.shape)), cache
    )


def _layout(mesh: jax.sharding.Mesh | None, shape: tuple[int, ...]) -> NamedSharding | None:
    """Returns the sharding of layers [.., B, K, S, H], fields of slots [B, S], or scalars []."""
    if mesh is None:
        return None
    first = max(len(shape) - 4, 0)
    split_rows = rows_over(mesh, shape[first]) > 1 if shape else False
    split_heads = len(shape) >= 4 and shape[first + 1] % mesh.shape["tensor"] == 0
    axes = (ROWS if split_rows else None, "tensor" if split_heads else None)
    return NamedSharding(mesh, PartitionSpec(*(None,) * first, *axes[: len(shape)]))


def whole_blocks(slots: int) -> int:
    """Rounds `slots` up to a multiple that attention reads without padding the cache first."""
    unit = 64 if slots <= 1024 else 1024
    return -(-slots // unit) * unit


def extend(
    cache: Cache, segments: Int[Array, "B T"] | None, positions: Num[Array, "B T"]
) -> tuple[Cache, tuple[View, ...]]:
    """Reserves slots for new tokens; `append` writes the keys and values of each layer.

    Writes past the capacity of a full cache cannot be detected inside jit: create it for the prompt
    and all new tokens.

    Args:
      cache: the earlier tokens.
      segments: 1 for a token, 0 for padding, which precedes the first token; None: all are tokens.
      positions: positions of the new tokens.

    Returns:
      The cache, and the view of each layer.

    Raises:
      InputError: the tokens would overwrite keys of a rolling cache that they need.
    """
    rows, length = positions.shape
    if segments is None:
        segments = jnp.ones((rows, length), jnp.int32)
    segments = segments.astype(jnp.int32)
    order = next_order(cache, segments, length)

    def write(old: SlotGroup) -> tuple[SlotGroup, View]:
        slots = _ring_slots(old, segments, order)
        fields = {"segments": segments, "positions": positions, "index": order}
        for name, new in fields.items():
            cached = getattr(old, name)
            new = new.astype(cached.dtype)
            if slots is None:
                fields[name] = jax.lax.dynamic_update_slice(cached, new, (0, cache.filled))
            else:
                fields[name] = cached.at[jnp.arange(rows)[:, None], slots].set(new, mode="drop")
        view = View(
            **fields,
            start=cache.filled,
            write_slots=slots,
            q_index=order,
            q_segments=segments,
            rotated=old.rotated,
        )
        return dataclasses.replace(old, **fields), view

    groups, views = zip(*map(write, cache.slot_groups))
    counts = {"filled": cache.filled + length, "tokens": cache.tokens + segments.sum(1)}
    cache = dataclasses.replace(cache, slot_groups=groups, **counts)
    return cache, tuple(views[number] for number in cache.group_by_layer)


def next_order(cache: Cache, segments: Int[Array, "B T"] | None, length: int) -> Int[Array, "B T"]:
    """Returns the order indices of `length` tokens that follow those in the cache.

    `segments` is as in `extend`. Padding has the index of the token before it.
    """
    if segments is None:
        return cache.tokens[:, None] + jnp.arange(length, dtype=jnp.int32)
    return cache.tokens[:, None] + jnp.cumsum(segments.astype(jnp.int32), axis=1) - 1


def _ring_slots(group: SlotGroup, segments: jax.Array, order: jax.Array) -> jax.Array | None:
    """Returns the slots [B, T] that a rolling cache writes tokens to; S for padding (dropped).

    None for a full cache.
    """
    rolling, length = group.rolling, segments.shape[1]
    if rolling is None:
        return None
    longest = group.num_slots - rolling.slots_for(1) + 1
    if length > longest:
        raise InputError(
            f"{length} tokens at once overwrite keys that they need in a rolling cache of "
            f"{group.num_slots} slots; read at most {longest}, or create it with chunk={length}"
        )
    return jnp.where(segments != 0, rolling.slot(order, group.num_slots), group.num_slots)


@functools.partial(jax.jit, static_argnums=(3, 4))
def branch(
    cache: Cache,
    filled: jax.Array,
    padding: jax.Array,
    slots: int,
    mesh: jax.sharding.Mesh | None = None,
) -> Cache:
    """Copies a full cache of one row to B rows that continue it.

    Args:
      cache: the cache of one row.
      filled: number of filled slots of each new row, padding included.
      padding: int32 [B], number of padding slots before the tokens of each row.
      slots: capacity of the new cache.
      mesh: shards the new cache as in `create`.
    """
    slot_ids = jnp.arange(slots, dtype=jnp.int32)
    source = slot_ids - padding[:, None]
    is_token = (source >= 0) & (slot_ids < filled)

    def rows(x):
        """Maps [1, S'] to [B, S], or layers [.., 1, K, S', H] to [.., B, K, S, H]."""
        is_layer = x.ndim >= 4
        first, mask = (x.ndim - 4, is_token[:, None, :, None]) if is_layer else (0, is_token)
        x = x.squeeze(first)
        pick = functools.partial(jnp.take, x, axis=-2 if is_layer else -1, mode="clip")
        return jnp.where(mask, jax.vmap(pick, out_axes=first)(source), 0)

    branched = dataclasses.replace(
        cache,
        layers=jax.tree.map(rows, cache.layers),
        slot_groups=jax.tree.map(rows, cache.slot_groups),
        filled=filled,
        tokens=jnp.maximum(filled - padding, 0).astype(jnp.int32),
    )
    return keep_layout(branched, mesh)


def replace_layers(cache: Cache, layers: Any) -> Cache:
    """Returns the cache with new keys and values `layers`, the results of the decoder's layers."""
    return dataclasses.replace(cache, layers=layers)


def append(
    layer: tuple[Float[Array, "B _ _ _"], ...],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    pattern: Pattern,
    view: View,
    metadata: AttentionMetadata,
) -> tuple[Float[Array, "B K S H"], Float[Array, "B K S H"]]:
    """Writes the keys and values of the new tokens to their slots of a layer's cache.

    Args:
      layer: keys and values [B, K, S, H] of the cache, and the pattern's state.
      k, v: unrotated keys, and values of the new tokens.
      pattern: its `key_positions` are the positions to which keys are rotated.
      view: slots of the new tokens.
      metadata: positions and rotation of the call (`View.update_metadata`).

    Returns:
      The keys and values of all slots.
    """
    if view.rotated:
        positions = pattern.key_positions(metadata.q_positions, view.q_index)
        k = rotate(k, positions, metadata.rotation.inv_freq, metadata.rotation.scale)
    return _write(layer[0], k, view), _write(layer[1], v, view)


def _write(cached: jax.Array, new: jax.Array, view: View) -> jax.Array:
    """Writes `new` [B, T, K, H] to the slots of `view` in `cached` [B, K, S, H]."""
    new = new.astype(cached.dtype)
    if view.write_slots is None:
        return jax.lax.dynamic_update_slice(cached, new.swapaxes(1, 2), (0, 0, view.start, 0))
    rows = jnp.arange(new.shape[0])[:, None]
    return cached.at[rows, :, view.write_slots].set(new, mode="drop")
