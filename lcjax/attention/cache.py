"""What one layer remembers of the tokens that it has read: `LayerCache` and its kinds.

A layer cache is a static description: which arrays a layer keeps, which slots new tokens take, and
how attention reads them. `Pattern.layer_cache` names the kind that a pattern needs, and
`lcjax.models.cache.Cache` holds the arrays of all layers.

A *full* cache has a slot for every token. All rows of a batch fill the same slots, so shorter
prompts are padded on the left, and `segments` marks the slots that hold a token. A *ring* serves
patterns that see only the first and the last tokens: each row writes its tokens to the sinks, then
to a ring, and the cache does not grow with the text. The slot of a token then depends on the data,
and masks test `index`, the order indices of the slots. `lcjax.attention.eviction` has a third kind,
in which each key head keeps the tokens that a policy chooses.

Devices may share the slots of a layer (`LayerCache.share_slots`). Of c devices, number s % c holds
slot s, so that all have the same work, however full the cache is. In the arrays of a layer, slot s
then has the index (s % c) * S / c + s // c. The arrays that layers share, such as order indices,
are in the order of slots, and every device holds all of them.

Keys are stored rotated, which is exact if the rotation is the same for the whole request. With
`rotated=False` they are stored unrotated, and every step rotates all of them. Patterns that move
keys need unrotated keys, and so do rotations that depend on the length (YaRN, section 3.3).
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Num

from lcjax.attention.cache_storage import Arrays, Exact, LayerShape, Storage
from lcjax.errors import InputError
from pallas_kernels import Layout, swap_heads

if TYPE_CHECKING:
    from lcjax.attention.base import AttentionMetadata, Pattern
    from lcjax.rope import Rotation


class Prompt(NamedTuple):
    """What a layer's cache is told of the text that it has read, when tokens are evicted."""

    tokens: Int[Array, " B"]  # of each row
    rotation: Rotation  # with which the layer's keys were rotated
    question: Int[Array, " B"] | None = None  # how many of the last tokens ask; None: not known
    layout: Layout | None = None  # the mesh axes over which rows and heads are split


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tokens:
    """The tokens in S slots of a cache, or S new tokens."""

    segments: Int[Array, "B S"]  # 1 where there is a token, else 0
    positions: Num[Array, "B S"]
    index: Int[Array, "B S"]  # order indices


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class View:
    """The slots of a layer in one call, including the T new tokens."""

    slots: Any  # what layers of this kind share (`LayerCache.shared`), with the new tokens
    new: Tokens  # [B, T]
    start: Int[Array, ""]  # without `write_slots`, tokens are written to start .. start + T - 1
    write_slots: Int[Array, "B T"] | None  # to which a ring writes; S for padding
    kind: LayerCache = dataclasses.field(metadata={"static": True})
    groups: tuple[View, ...] = ()  # those of groups of heads with caches of their own

    def update_metadata(self, metadata: AttentionMetadata) -> AttentionMetadata:
        """Returns metadata whose queries are the new tokens, and whose keys are the slots."""
        # Padding queries have segment 0 and so see no keys.
        queries = {"q_index": self.new.index, "q_segments": self.new.segments}
        return metadata.replace(**queries, **self.kind.key_metadata(self))


@dataclasses.dataclass(frozen=True)
class LayerCache(abc.ABC):
    """What a layer remembers of the tokens that it has read."""

    # Whether every token keeps its slot. Then rows can branch and be cut to fewer tokens.
    keeps_all: ClassVar[bool]
    # Whether there is nothing but the keys and values of tokens, in slots known before they are
    # read. Then packed prompts can be moved to rows.
    holds_keys_only: ClassVar[bool] = False
    # Whether something happens at the end of a prompt (`end_prompt`), or of a chunk. A cache that
    # acts on chunks gives a row the same result in every batch only if rows begin in one column.
    acts_on_prompt: ClassVar[bool] = False
    acts_on_chunk: ClassVar[bool] = False
    shares_slots: ClassVar[bool] = False  # whether devices may share its slots (`share_slots`)
    evicts: ClassVar[bool] = False  # whether a policy chooses which tokens stay
    # Whether rows go on from copies of the end of one row (`extend_slots`)
    continues: ClassVar[bool] = False
    # Whether layers share what stays at the end of a prompt (`end_prompt`)
    shares_across_layers: ClassVar[bool] = False
    # Whether the slots that the end of a prompt leaves depend on its text (`needs_few`)
    depends_on_text: ClassVar[bool] = False
    differs_by_layer: ClassVar[bool] = False  # whether `for_layer` depends on the layer
    stores_by_layer: ClassVar[bool] = False  # whether `with_storage_of` depends on the layer
    # Whether `attend` needs `metadata.output_kernel` and `input_norms`
    reads_output: ClassVar[bool] = False

    rotated: bool = dataclasses.field(default=True, kw_only=True)  # whether stored keys are
    parts: int = dataclasses.field(default=1, kw_only=True)  # number of devices that share slots

    def share_slots(self, slots: int, devices: int) -> tuple[LayerCache, int]:
        """Returns the cache whose `slots` are shared by `devices`, and its number of slots."""
        if devices == 1:
            return self, slots
        slots = devices * whole_blocks(-(-slots // devices))
        return dataclasses.replace(self, parts=devices), slots

    @property
    def reading(self) -> Hashable:
        """What decides the arrays of a prompt before its end; equal for caches that read alike."""
        return self

    @property
    def slot_arrays(self) -> tuple[str, ...]:
        """The names of arrays [B, heads, S, _] with an entry for each slot."""
        return ("keys", "values")

    def for_layer(self, layer: int, num_layers: int) -> LayerCache:
        """Returns the cache of one of the model's layers, if they differ in more than the pattern.

        Args:
          layer: its number among the layers with a cache that `differs_by_layer`.
          num_layers: number of these layers.
        """
        return self

    def with_storage_of(self, layer: int, num_layers: int) -> LayerCache:
        """Returns the cache of one of the model's layers, if they differ in their storage.

        Args:
          layer: its number among the layers with a cache that `stores_by_layer`.
          num_layers: number of these layers.
        """
        return self

    @abc.abstractmethod
    def fit(self, length: int, chunk: int | None) -> tuple[LayerCache, int]:
        """Returns the cache of a request, of the same kind or a full one, and its slots.

        Args:
          length: maximum number of tokens of a row.
          chunk: maximum number of tokens that are read at once; None: unknown.
        """

    @abc.abstractmethod
    def num_visible(self, length: int, tokens: int) -> int:
        """Returns how many of `length` keys at least one of the last `tokens` tokens sees."""

    def num_multiplied(self, length: int, tokens: int) -> int:
        """Returns a bound on the keys that each of the last `tokens` queries is multiplied by."""
        return self.num_visible(length, tokens)

    def read_arrays(
        self, layer: LayerShape, length: int, tokens: int, devices: int = 1
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shapes and dtypes of what the last `tokens` of `length` tokens read of a row.

        They are those on one of `devices` that share slots.
        """
        return self.arrays(layer, -(-self.num_visible(length, tokens) // devices))

    def after_prompt(self, length: int) -> tuple[LayerCache, int]:
        """Returns the cache at the end of a prompt of `length` tokens, and the slots that it uses.

        Slots that are empty until later tokens are read do not count.
        """
        return self, self.num_visible(length, 1)

    @abc.abstractmethod
    def arrays(self, layer: LayerShape, slots: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shapes and dtypes of one row's arrays by name, each [heads, _, _]."""

    def slots_of(self, arrays: Arrays) -> int:
        """Returns the number of slots of a layer with these arrays."""
        return arrays["values"].shape[-2]

    @abc.abstractmethod
    def shared(self, rows: int, slots: int) -> Any:
        """Returns shapes and dtypes of the arrays that all layers of this kind share."""

    @abc.abstractmethod
    def reserve(self, slots: Any, new: Tokens, filled: Int[Array, ""]) -> View:
        """Reserves slots for new tokens.

        Args:
          slots: the shared arrays.
          new: the new tokens, [B, T].
          filled: tokens read before, padding included.

        Raises:
          InputError: the tokens would overwrite keys that they need.
        """

    def key_metadata(self, view: View) -> dict[str, Any]:
        """Returns the fields of `AttentionMetadata` that describe the keys in shared slots."""
        return {}

    def for_prompt(self, slots: int, tokens: int) -> tuple[LayerCache, int]:
        """Returns the cache before a prompt of at most `tokens` tokens, and its slots.

        It lacks slots that only longer prompts need before they are cut; `begin_prompt` adds them.

        Args:
          slots: slots for all tokens of a row.
          tokens: number of tokens.
        """
        return self, slots

    def begin_prompt(
        self, arrays: Arrays, slots: Any, tokens: int
    ) -> tuple[LayerCache, Arrays, Any]:
        """Returns a cache that reads a prompt in any chunks and evicts nothing before its end.

        Args:
          arrays: as in `end_prompt`, which releases the slots again.
          slots: as in `end_prompt`.
          tokens: maximum number of tokens of the prompt.
        """
        return self, arrays, slots

    def needs_few(self, arrays: Arrays, prompt: Prompt) -> Bool[Array, ""]:
        """Returns whether few slots are enough for all rows at the end of a prompt.

        By default they never are: the text decides only if the cache `depends_on_text`.

        Args:
          arrays: those of a layer.
          prompt: what was read.
        """
        return jnp.zeros((), bool)

    def with_few(self, needs_few: bool) -> LayerCache:
        """Returns the cache that the end of the prompt leaves few slots, or as many as may be."""
        return self

    def end_prompt(
        self,
        arrays: Arrays,
        slots: Any,
        prompt: Prompt,
        new: int,
        chunk: int,
        counts: Int[Array, "B K"] | None = None,
    ) -> tuple[LayerCache, Arrays, Any]:
        """Acts on the end of a prompt, such as evicting tokens and freeing their slots.

        Args:
          arrays: those of a layer, or of all layers, stacked.
          slots: the shared arrays.
          prompt: what was read.
          new: maximum number of tokens that follow.
          chunk: maximum number of these that are read at once.
          counts: tokens that heads keep, if layers share them; None: each layer decides.

        Returns:
          The kind of cache from now on, and its arrays.
        """
        return self, arrays, slots

    def extend_slots(
        self, arrays: Arrays, slots: Any, read: int, new: int, chunk: int
    ) -> tuple[LayerCache, Arrays, Any]:
        """Returns a cache with slots for what follows a prompt that was cut.

        Args:
          arrays: as in `end_prompt`.
          slots: as in `end_prompt`.
          read: number of tokens that are read next, padding before them included. None is evicted
            while they are read.
          new: maximum number of tokens after them.
          chunk: maximum number of these that are read at once.
        """
        return self, arrays, slots

    def pad_between(self) -> LayerCache:
        """Returns the cache for rows with padding between their tokens."""
        return self

    def with_extra_slots(
        self, arrays: Arrays, slots: Any, tokens: int
    ) -> tuple[LayerCache, Arrays, Any]:
        """Returns a copy that reads `tokens` more tokens at once and loses none for them."""
        raise InputError(
            f"model.cache reads prompts again, which has no form for layers with {self!r:.60}; use"
            " another type of model.cache"
        )

    def branch(self, arrays: Arrays, pick: Callable[[jax.Array], jax.Array]) -> Arrays:
        """Returns the arrays of rows that continue one row; of a cache that `keeps_all`.

        Args:
          arrays: those of the row, of a layer or stacked.
          pick: maps an array with an entry for each slot.
        """
        return {name: pick(x) for name, x in arrays.items()}

    @abc.abstractmethod
    def attend(
        self,
        arrays: Arrays,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        pattern: Pattern,
        view: View,
        metadata: AttentionMetadata,
    ) -> tuple[Float[Array, "B T N H"], Arrays]:
        """Adds new tokens to a layer's arrays and computes their attention over all slots.

        Args:
          arrays: those of the earlier tokens.
          q, k, v: unrotated queries and keys, and values, of the new tokens.
          pattern: the pattern of the layer, for inference.
          view: slots of the call.
          metadata: positions and rotation of the call (`View.update_metadata`).

        Returns:
          The output, and the arrays with the new tokens.
        """


@dataclasses.dataclass(frozen=True)
class NoSlots(LayerCache):
    """The cache of a layer that reads the slots of another layer, and so loses no token itself."""

    keeps_all: ClassVar[bool] = True
    holds_keys_only: ClassVar[bool] = True
    continues: ClassVar[bool] = True

    def fit(self, length, chunk):
        return self, 0

    def num_visible(self, length, tokens):
        return 0

    def arrays(self, layer: LayerShape, slots: int):
        return {}

    def slots_of(self, arrays):
        return 0

    def shared(self, rows, slots):
        return ()

    def reserve(self, slots, new, filled):
        return View(slots, new, filled, None, self)

    def pad_between(self):
        return self

    def with_extra_slots(self, arrays, slots, tokens):
        return self, arrays, slots

    def attend(self, arrays, q, k, v, pattern, view, metadata):
        raise TypeError(
            f"{type(self).__name__} has no slots to attend to: a layer with keys_of attends with"
            " the cache of the layer that it reads, and a layer with a mixer does not attend"
        )


@dataclasses.dataclass(frozen=True)
class FullCache(LayerCache):
    """Keys and values [B, K, S, H] in a form of storage, with a slot for every token.

    Heads precede slots, the order in which a decoding step multiplies them, so that reading the
    cache never copies it.
    """

    keeps_all: ClassVar[bool] = True
    continues: ClassVar[bool] = True
    shares_slots: ClassVar[bool] = True

    storage: Storage = dataclasses.field(default=Exact(), kw_only=True)
    # Names, heads and channels of the `Features.keys` of the pattern, which are kept beside them
    features: tuple[tuple[str, int, int], ...] = dataclasses.field(default=(), kw_only=True)
    # Whether padding may lie between tokens. Slots are then further apart than their tokens.
    pads_between: bool = dataclasses.field(default=False, kw_only=True)

    @property
    def slot_arrays(self) -> tuple[str, ...]:
        return (*self.storage.names, *(name for name, *_ in self.features))

    @property
    def holds_keys_only(self) -> bool:
        # A packed row reads keys as they are computed, and a row of its own reads codes.
        return self.storage.is_exact and not self.features

    @property
    def stores_by_layer(self) -> bool:
        return self.storage.differs_by_layer

    def with_storage_of(self, layer: int, num_layers: int) -> LayerCache:
        return dataclasses.replace(self, storage=self.storage.for_layer(layer, num_layers))

    def fit(self, length: int, chunk: int | None) -> tuple[LayerCache, int]:
        if not (self.rotated or self.storage.is_exact):
            raise InputError(
                "model.cache.storage keeps codes of rotated keys, and exact=True rotates keys again"
                " while the text grows; leave one of the two out"
            )
        if self.features and not self.rotated:
            raise InputError(
                f"model.pattern keeps {self.features[0][0]} keys beside those of attention, and"
                " exact=True rotates the latter alone again while the text grows; leave exact out,"
                " or take another pattern"
            )
        return self, length

    def num_visible(self, length: int, tokens: int) -> int:
        return length

    def arrays(self, layer: LayerShape, slots: int) -> dict[str, jax.ShapeDtypeStruct]:
        return self.storage.arrays(layer, slots) | self.feature_arrays(layer, slots)

    def feature_arrays(self, layer: LayerShape, slots: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns those of `arrays` that hold features of keys."""
        return {
            name: jax.ShapeDtypeStruct((heads, slots, size), layer.dtype)
            for name, heads, size in self.features
        }

    def shared(self, rows: int, slots: int) -> Tokens:
        whole = jax.ShapeDtypeStruct((rows, slots), jnp.int32)
        # Positions may be fractional.
        return Tokens(whole, jax.ShapeDtypeStruct((rows, slots), jnp.float32), whole)

    def reserve(self, slots: Tokens, new: Tokens, filled: Int[Array, ""]) -> View:
        def write(cached, new):
            new = new.astype(cached.dtype)
            return jax.lax.dynamic_update_slice(cached, new, (0, filled))

        return View(jax.tree.map(write, slots, new), new, filled, None, self)

    def key_metadata(self, view: View) -> dict[str, Any]:
        places = view.start + jnp.arange(view.new.index.shape[1], dtype=jnp.int32)
        slots, order = view.slots, None
        if self.parts > 1:
            order = jnp.arange(slots.index.shape[1], dtype=jnp.int32)
            slots, order = jax.tree.map(
                functools.partial(by_part, parts=self.parts), (slots, order)
            )
        return {
            "k_positions": slots.positions,
            "k_index": slots.index,
            "k_segments": slots.segments,
            "row_indices": None
            if view.write_slots is not None or self.pads_between
            else (places, order),
            "keys_rotated": self.rotated,
        }

    def extend_slots(self, arrays, slots, read, new, chunk):
        return self.pad_between().with_extra_slots(arrays, slots, read + new)

    def pad_between(self):
        return dataclasses.replace(self, pads_between=True)

    def with_extra_slots(self, arrays, slots, tokens):
        each = -(-tokens // self.parts)

        def pad(x):
            parts = x.reshape(*x.shape[:-2], self.parts, -1, x.shape[-1])
            parts = resize_slots(parts, parts.shape[-2] + each)
            return parts.reshape(*x.shape[:-2], -1, x.shape[-1])

        slots = jax.tree.map(lambda x: jnp.pad(x, [(0, 0), (0, self.parts * each)]), slots)
        return self, jax.tree.map(pad, arrays), slots

    def append(
        self,
        arrays: Arrays,
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        pattern: Pattern,
        view: View,
        metadata: AttentionMetadata,
    ) -> Arrays:
        """Returns the arrays of all slots, with the keys, values and features of new tokens.

        The pattern's `key_positions` are the positions to which keys are rotated.
        """
        if self.rotated:
            positions = pattern.key_positions(metadata.q_positions, view.new.index)
            k = metadata.rotation.rotate(k, positions)
        new, write = self.storage.encode(k, v), functools.partial(write_tokens, view=view)
        new |= {name: metadata.features.keys[name] for name, *_ in self.features}
        return {name: write(arrays[name], x, layout=metadata.layout) for name, x in new.items()}

    def attend(self, arrays, q, k, v, pattern, view, metadata):
        arrays = self.append(arrays, k, v, pattern, view, metadata)
        keys, values = jax.tree.map(swap_heads, self.storage.read(arrays))
        return pattern.attend(q, keys, values, self.with_features(arrays, metadata)), arrays

    def with_features(self, arrays: Arrays, metadata: AttentionMetadata) -> AttentionMetadata:
        """Returns metadata with the features of the keys in all slots."""
        keys = {name: arrays[name].swapaxes(1, 2) for name, *_ in self.features}
        return metadata.replace(features=metadata.features._replace(keys=keys))


@dataclasses.dataclass(frozen=True)
class RingCache(FullCache):
    """Keys and values of the first `sinks` tokens, and of the last ones in a ring."""

    keeps_all: ClassVar[bool] = False
    holds_keys_only: ClassVar[bool] = False
    shares_slots: ClassVar[bool] = False  # they are few

    sinks: int
    recent: int  # last tokens that a new token may see, itself included

    def fit(self, length: int, chunk: int | None) -> tuple[LayerCache, int]:
        full = FullCache(rotated=self.rotated, storage=self.storage).fit(length, chunk)
        if chunk is None:
            return full
        slots = whole_blocks(self.num_slots(min(chunk, length)))
        return (self, slots) if slots < length else full

    def num_visible(self, length: int, tokens: int) -> int:
        return min(length, self.num_slots(tokens))

    def extend_slots(self, arrays, slots, read, new, chunk):
        return self, arrays, slots

    def pad_between(self):
        return self  # its masks test order indices

    def num_slots(self, tokens: int) -> int:
        """Returns the number of slots that are needed to read `tokens` tokens at once.

        All `recent` tokens that the first of them sees must stay in the cache.
        """
        return self.sinks + self.recent + tokens - 1

    def with_extra_slots(self, arrays, slots, tokens):
        old, new = slots.index.shape[1], self.num_slots(tokens)
        if new <= old:
            return self, arrays, slots
        rows = jnp.arange(len(slots.index))[:, None]
        places = jnp.where(slots.segments != 0, self.slot(slots.index, new), new)

        def move(x):
            return jnp.zeros((len(x), new), x.dtype).at[rows, places].set(x, mode="drop")

        def move_heads(x):
            shape = (*x.shape[:2], new, x.shape[3])
            x = x.swapaxes(1, 2)
            return jnp.zeros(shape, x.dtype).at[rows, :, places].set(x, mode="drop")

        return self, jax.tree.map(move_heads, arrays), jax.tree.map(move, slots)

    def slot(self, order: Int[Array, "B T"], slots: int) -> Int[Array, "B T"]:
        """Returns the slots of the tokens with order indices `order`, in a cache of `slots`."""
        ring = slots - self.sinks
        return jnp.where(order < self.sinks, order, self.sinks + (order - self.sinks) % ring)

    def reserve(self, slots: Tokens, new: Tokens, filled: Int[Array, ""]) -> View:
        rows, length = new.index.shape
        capacity = slots.index.shape[1]
        longest = capacity - self.num_slots(1) + 1
        if length > longest:
            raise InputError(
                f"{length} tokens at once overwrite keys that they need in a rolling cache of "
                f"{capacity} slots; read at most {longest}, or create it with chunk={length}"
            )
        places = jnp.where(new.segments != 0, self.slot(new.index, capacity), capacity)

        def write(cached, new):
            new = new.astype(cached.dtype)
            return cached.at[jnp.arange(rows)[:, None], places].set(new, mode="drop")

        return View(jax.tree.map(write, slots, new), new, filled, places, self)


def whole_blocks(slots: int) -> int:
    """Rounds `slots` up to a multiple that attention reads without padding the cache first."""
    unit = 64 if slots <= 1024 else 1024
    return -(-slots // unit) * unit


def resize_slots(x: Num[Array, "... S H"], slots: int) -> Num[Array, "... S2 H"]:
    """Removes the last of S slots, or adds empty ones at the end, so that there are `slots`."""
    if slots <= x.shape[-2]:
        return x[..., :slots, :]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, slots - x.shape[-2]), (0, 0)])


def by_part(x: Num[Array, "*B S"], parts: int) -> Num[Array, "*B S"]:
    """Moves entries of slots to the order in which layers hold them, part after part."""
    return x.reshape(*x.shape[:-1], -1, parts).swapaxes(-1, -2).reshape(x.shape)


def write_tokens(
    cached: Array, new: Float[Array, "B T K H"], view: View, layout: Layout | None = None
) -> Array:
    """Writes `new` to the slots of `view` in `cached` [B, K, S, H].

    `layout` has the mesh of the devices that share slots.
    """
    new = new.astype(cached.dtype)
    if view.kind.parts > 1:
        return _write_parts(cached, new.swapaxes(1, 2), view.start, layout)
    if view.write_slots is None:
        return jax.lax.dynamic_update_slice(cached, new.swapaxes(1, 2), (0, 0, view.start, 0))
    rows = jnp.arange(new.shape[0])[:, None]
    return cached.at[rows, :, view.write_slots].set(new, mode="drop")


def _write_parts(
    cached: Array, new: Float[Array, "B K T H"], start: Int[Array, ""], layout: Layout
) -> Array:
    """Writes tokens to slots start .. start + T - 1, which devices share: each writes its own.

    A device writes as many consecutive slots as any, some of them with their old contents.
    """
    parts, tokens = layout.size(layout.length), new.shape[2]
    spec = cache_spec(layout, cached)
    width = min(-(-tokens // parts), cached.shape[2] // parts)

    def local(cached, new, start):
        part = jax.lax.axis_index(layout.length)
        first = (start - part + parts - 1) // parts  # the first slot of this part from `start` on
        first = jnp.minimum(first, cached.shape[2] - width)
        token = (first + jnp.arange(width)) * parts + part - start
        is_new = ((token >= 0) & (token < tokens))[:, None]
        old = jax.lax.dynamic_slice_in_dim(cached, first, width, 2)
        new = jnp.where(is_new, jnp.take(new, token, axis=2, mode="clip"), old)
        return jax.lax.dynamic_update_slice_in_dim(cached, new, first, 2)

    run = jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(spec, PartitionSpec(*spec[:2]), PartitionSpec()),
        out_specs=spec,
        check_vma=False,
    )
    return run(cached, new, start)


def branch_parts(
    cached: Array, padding: Int[Array, " B"], filled: Int[Array, ""], slots: int, layout: Layout
) -> Array:
    """Copies slots that devices share from one row to B rows, each behind its own padding.

    Padding moves a token to another device. The parts pass around the ring of devices, and a device
    takes from each part the rows that need it, so it never holds more than two parts of a row.

    Args:
      cached: [.., 1, K, S', H].
      padding: number of slots before the tokens of each row.
      filled: number of filled slots of the new rows, padding included.
      slots: S, the slots of the new rows.
      layout: has the mesh of the devices.

    Returns:
      [.., B, K, S, H], 0 where there is no token.
    """
    axis, parts = layout.length, layout.size(layout.length)
    *stack, _, heads, _, size = cached.shape
    new = jax.ShapeDtypeStruct((len(padding), heads, slots, size), cached.dtype)
    spec = cache_spec(layout, new)
    source = PartitionSpec(*(None,) * len(stack), None, *spec[1:])
    target = PartitionSpec(*(None,) * len(stack), *spec)

    def local(cached, padding, filled):
        part = jax.lax.axis_index(axis)
        slot = jnp.arange(slots // parts, dtype=jnp.int32) * parts + part
        token = slot - padding[:, None]
        is_token = (token >= 0) & (slot < filled)
        start = jnp.zeros((*stack, len(padding), cached.shape[-3], *slot.shape, size), cached.dtype)

        def hop(carry, number):
            out, cached = carry
            holder = (part - number) % parts  # the part that is here now
            here = is_token & (token % parts == holder)
            pick = functools.partial(jnp.take, cached[..., 0, :, :, :], axis=-2, mode="clip")
            picked = jax.vmap(pick, out_axes=len(stack))(token // parts)
            out = jnp.where(here[:, None, :, None], picked, out)
            pairs = [(i, (i + 1) % parts) for i in range(parts)]
            return (out, jax.lax.ppermute(cached, axis, pairs)), None

        (out, _), _ = jax.lax.scan(hop, (start, cached), jnp.arange(parts))
        return out

    return jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(source, PartitionSpec(spec[0]), PartitionSpec()),
        out_specs=target,
        check_vma=False,
    )(cached, padding, filled)


def cache_spec(layout: Layout, cached: Array) -> PartitionSpec:
    """Returns the partition of arrays [B, heads, S, _] of a layer whose slots devices share."""
    rows = layout.rows if cached.shape[0] % layout.size(layout.rows) == 0 else None
    heads = layout.heads if cached.shape[1] % layout.size(layout.heads) == 0 else None
    return PartitionSpec(rows, heads, layout.length)
