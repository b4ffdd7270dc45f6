"""The KV cache of a decoder: what all layers remember of the tokens that they have read.

`lcjax.attention.cache` has the kinds of caches of a layer. If layers differ, each layer has the
kind and the slots that its own pattern needs.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Int, Num

from lcjax.attention import CacheMethod
from lcjax.attention.cache import (
    LayerCache,
    LayerShape,
    NoSlots,
    Prompt,
    Tokens,
    View,
    branch_parts,
    whole_blocks,
)
from lcjax.models.mixer import StateCache
from lcjax.parallel import distributed
from lcjax.parallel.device_memory import check_fits
from lcjax.parallel.sharding import LENGTH, ROWS, Mesh, attention_layout, rows_over
from lcjax.rope import Rotation

if TYPE_CHECKING:
    from lcjax.models.model_config import ModelConfig

__all__ = [
    "Cache",
    "abstract_cache",
    "branch",
    "check_cache",
    "create",
    "extend",
    "keep_heads",
    "keep_layout",
    "repeat_row",
    "restore",
    "state_of",
    "whole_blocks",
]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """What all layers remember of B rows of text.

    `layers` holds the arrays of each layer by name (`LayerCache.arrays`), each [B, heads, _, _]:
    stacked [L, ...] for scanned layers, else one such dict per layer. Layers of the same kind with
    as many slots share `slots`.
    """

    layers: Any
    slots: tuple[Any, ...]  # `LayerCache.shared` of each of `kinds`
    filled: Int[Array, ""]  # tokens read, padding included
    tokens: Int[Array, " B"]  # tokens read in each row, without padding
    kinds: tuple[LayerCache, ...] = dataclasses.field(metadata={"static": True})
    kind_by_layer: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @property
    def capacity(self) -> int:
        """The largest number of slots of any layer."""
        return max(self._num_slots)

    @property
    def bounds_length(self) -> bool:
        """Whether `capacity` is the maximum number of tokens; a ring takes any number."""
        largest = self._num_slots.index(self.capacity)
        return self.kinds[self.kind_by_layer[largest]].keeps_all

    @property
    def is_stacked(self) -> bool:
        """Whether `layers` are stacked; they are then of one kind."""
        return isinstance(self.layers, dict)

    @property
    def separate_layers(self) -> tuple[dict[str, jax.Array], ...]:
        """The arrays of each layer, or of all stacked layers as of one."""
        return (self.layers,) if self.is_stacked else self.layers

    @property
    def _num_slots(self) -> list[int]:
        kinds = map(self.kinds.__getitem__, self.kind_by_layer)
        return [kind.slots_of(arrays) for kind, arrays in zip(kinds, self.separate_layers)]


def create(
    config: "ModelConfig",
    batch: int,
    length: int,
    *,
    chunk: int | None = None,
    prompt: int | None = None,
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
      prompt: maximum number of tokens of the first prompt, unless `begin_prompt` names more. None:
        `length`.
      rotated: whether keys are stored rotated; None: unless the pattern of a layer moves them.
      mesh: shards rows over data and fsdp, heads over tensor, and slots over context where the
        kind of a layer allows it (`LayerCache.share_slots`); each device creates its part.

    Raises:
      InputError: the cache is larger than the free memory of a device.
    """
    options = {"chunk": chunk, "prompt": prompt, "rotated": rotated, "mesh": mesh}
    cache = abstract_cache(config, batch, length, **options)
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
    prompt: int | None = None,
    rotated: bool | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> Cache:
    """Returns shapes, dtypes and shardings of the cache that `create` returns, unallocated."""

    fitted = fitted_caches(config, length, chunk, rotated, mesh)
    if prompt is not None:
        fitted = [kind.for_prompt(slots, prompt) for kind, slots in fitted]
    distinct = list(dict.fromkeys(fitted))

    def layer(number, *stack):
        kind, slots = fitted[number]
        arrays = kind.arrays(layer_shape(config.layer(number)), slots)
        return {
            name: jax.ShapeDtypeStruct((*stack, batch, *one.shape), one.dtype)
            for name, one in arrays.items()
        }

    count = len(fitted)
    is_stacked = config.stacked and len(distinct) == 1
    cache = Cache(
        layers=layer(0, count) if is_stacked else tuple(map(layer, range(count))),
        slots=tuple(kind.shared(batch, slots) for kind, slots in distinct),
        filled=jax.ShapeDtypeStruct((), jnp.int32),
        tokens=jax.ShapeDtypeStruct((batch,), jnp.int32),
        kinds=tuple(kind for kind, _ in distinct),
        kind_by_layer=tuple(map(distinct.index, fitted)),
    )
    return _with_shardings(cache, mesh)


def _with_shardings(cache: Cache, mesh: jax.sharding.Mesh | None) -> Cache:
    """Returns the shapes of a cache with the shardings of `create`."""
    if mesh is None:
        return cache
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        cache,
        _shardings(cache, mesh),
    )


def fitted_caches(
    config: "ModelConfig",
    length: int,
    chunk: int | None,
    rotated: bool | None = None,
    mesh: Mesh | jax.sharding.Mesh | None = None,
) -> list[tuple[LayerCache, int]]:
    """Returns the kind of cache of each layer for a request, and its slots.

    The arguments are those of `create`.
    """
    fitted = [cache.fit(length, chunk) for cache in layer_caches(config, rotated)]
    if any(kind.acts_on_chunk for kind, _ in fitted):  # rows begin in one column
        fitted = [(kind.pad_between(), slots) for kind, slots in fitted]
    if mesh is None:
        return fitted
    fitted = [
        kind.share_slots(slots, slot_devices(config.layer(number), kind, mesh.shape))
        for number, (kind, slots) in enumerate(fitted)
    ]
    # Layers that keep all tokens branch and are cut together, so they have equally many slots.
    most = max((slots for kind, slots in fitted if kind.keeps_all), default=0)
    return [(kind, most if kind.keeps_all else slots) for kind, slots in fitted]


def slot_devices(config: "ModelConfig", kind: LayerCache, sizes: Mapping[str, int]) -> int:
    """Returns how many devices share the slots of a layer: those along the mesh axis `context`.

    Other kinds of caches, and patterns that choose keys by their content, need slots in text order,
    and each device holds all of them.

    Args:
      config: of the layer.
      kind: its cache.
      sizes: sizes of the mesh axes.
    """
    in_any_order = config.pattern.for_inference().is_position_based
    return sizes[LENGTH] if kind.shares_slots and in_any_order else 1


def abstract_after_prompt(
    config: "ModelConfig",
    batch: int,
    length: int,
    new: int,
    rotation: Rotation,
    *,
    chunk: int,
    mesh: jax.sharding.Mesh | None = None,
) -> Cache:
    """Returns the abstract cache of a prompt of `length` tokens after `end_prompt(new=new)`."""
    cache = abstract_cache(config, batch, length, chunk=chunk, mesh=mesh)
    rotations = tuple(map(rotation.of_kind, config.kind_by_layer))
    end = functools.partial(_end_prompt, new=new, chunk=1, mesh=None, question=None)
    cache = jax.eval_shape(end, cache, rotations)
    return _with_shardings(cache, mesh)


def lower_cut(
    config: "ModelConfig",
    mesh: jax.sharding.Mesh,
    batch: int,
    length: int,
    new: int,
    rotation: Rotation,
    chunk: int,
) -> jax.stages.Lowered:
    """Lowers `end_prompt` after a prompt of `length` tokens; the devices need not be present."""
    cache = abstract_cache(config, batch, length, chunk=chunk, mesh=mesh)
    rotations = tuple(map(rotation.of_kind, config.kind_by_layer))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return _end_prompt.trace(cache, rotations, new, 1, mesh, None).lower()


def layer_caches(config: "ModelConfig", rotated: bool | None = None) -> list[LayerCache]:
    """Returns the kind of cache of each layer; `rotated` is as in `create`."""
    caches = [layer_cache(config.of_kind(kind), rotated) for kind in config.kinds]
    caches = [caches[kind] for kind in config.kind_by_layer]
    # Layers of codes, such as rings, are not all layers that share a budget.
    coded = [number for number, cache in enumerate(caches) if cache.stores_by_layer]
    for place, number in enumerate(coded):
        caches[number] = caches[number].with_storage_of(place, len(coded))
    differing = [number for number, cache in enumerate(caches) if cache.differs_by_layer]
    for place, number in enumerate(differing):
        caches[number] = caches[number].for_layer(place, len(differing))
    return caches


def check_cache(config: "ModelConfig") -> None:
    """Raises an InputError if `config.cache` is made for other layers than those of the model.

    It reads the files of the cache method, and allocates nothing.
    """
    for number, kind in enumerate([] if config.cache is None else layer_caches(config)):
        kind.fit(1, None)
        kind.arrays(layer_shape(config.layer(number)), 0)


def layer_cache(config: "ModelConfig", rotated: bool | None = None) -> LayerCache:
    """Returns the kind of cache of a layer of `config`, for inference.

    `rotated` is as in `create`.
    """
    if config.mixer is not None:
        return StateCache(config.mixer)
    pattern = config.pattern.for_inference()
    rotated = not pattern.moves_keys if rotated is None else rotated
    kind = pattern.layer_cache
    if config.keys_of is not None:
        kind = NoSlots()
    elif config.cache is not None:
        kind = config.cache.layer_cache(pattern, config.attention_soft_cap)
    return dataclasses.replace(kind, rotated=rotated)


def layer_shape(config: "ModelConfig") -> LayerShape:
    """Returns the sizes of a layer on which its cache depends."""
    return LayerShape(
        config.num_heads, config.num_kv_heads, config.head_dim, config.compute_dtype()
    )


def keep_layout(cache: Cache, mesh: jax.sharding.Mesh | None) -> Cache:
    """Constrains a cache to the shardings of `create` inside jit."""
    if mesh is None:
        return cache
    return jax.tree.map(jax.lax.with_sharding_constraint, cache, _shardings(cache, mesh))


def keep_heads(tree: Any, mesh: jax.sharding.Mesh | None) -> Any:
    """Constrains arrays [.., B, K, S, H] inside jit: rows over `ROWS` and heads over `tensor`."""
    if mesh is None:
        return tree
    return jax.tree.map(
        lambda x: jax.lax.with_sharding_constraint(x, _sharding(mesh, x.shape)), tree
    )


def _shardings(cache: Cache, mesh: jax.sharding.Mesh) -> Cache:
    """Returns the sharding of each array of a cache."""

    def layer(arrays, number):
        kind = cache.kinds[number]
        shared = kind.slot_arrays if kind.parts > 1 else ()
        return {name: _sharding(mesh, x.shape, name in shared) for name, x in arrays.items()}

    layers = tuple(map(layer, cache.separate_layers, cache.kind_by_layer))
    shardings = jax.tree.map(lambda x: _sharding(mesh, x.shape), cache)
    return replace_layers(shardings, layers[0] if cache.is_stacked else layers)


def _sharding(
    mesh: jax.sharding.Mesh, shape: tuple[int, ...], shares_slots: bool = False
) -> NamedSharding:
    """Returns the sharding of layers [.., B, K, S, H], fields of slots [B, S], or scalars []."""
    first = max(len(shape) - 4, 0)
    split_rows = rows_over(mesh, shape[first]) > 1 if shape else False
    split_heads = len(shape) >= 4 and shape[first + 1] % mesh.shape["tensor"] == 0
    axes = (ROWS if split_rows else None, "tensor" if split_heads else None)
    axes += (LENGTH,) * shares_slots
    return NamedSharding(mesh, PartitionSpec(*(None,) * first, *axes[: len(shape)]))


def extend(
    cache: Cache, segments: Int[Array, "B T"] | None, positions: Num[Array, "B T"]
) -> tuple[Cache, tuple[View, ...]]:
    """Reserves slots for new tokens; `LayerCache.attend` writes their keys and values.

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
    new = Tokens(segments, positions, next_order(cache, segments, length))
    views = [
        kind.reserve(slots, new, cache.filled)
        for kind, slots in zip(cache.kinds, cache.slots, strict=True)
    ]
    cache = dataclasses.replace(
        cache,
        slots=tuple(view.slots for view in views),
        filled=cache.filled + length,
        tokens=cache.tokens + segments.sum(1),
    )
    return cache, tuple(views[number] for number in cache.kind_by_layer)


def next_order(cache: Cache, segments: Int[Array, "B T"] | None, length: int) -> Int[Array, "B T"]:
    """Returns the order indices of `length` tokens that follow those in the cache.

    `segments` is as in `extend`. Padding has the index of the token before it.
    """
    if segments is None:
        return cache.tokens[:, None] + jnp.arange(length, dtype=jnp.int32)
    return cache.tokens[:, None] + jnp.cumsum(segments.astype(jnp.int32), axis=1) - 1


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
    slots = max(kind.share_slots(slots, kind.parts)[1] for kind in cache.kinds)
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

    def layer(arrays, number):
        kind, pick = cache.kinds[number], rows
        if kind.parts > 1:
            layout = attention_layout(mesh, "split_keys")
            pick = functools.partial(
                branch_parts, padding=padding, filled=filled, slots=slots, layout=layout
            )
        return kind.branch(arrays, pick)

    layers = tuple(map(layer, cache.separate_layers, cache.kind_by_layer))
    branched = dataclasses.replace(
        cache,
        layers=layers[0] if cache.is_stacked else layers,
        slots=jax.tree.map(rows, cache.slots),
        filled=filled,
        tokens=jnp.maximum(filled - padding, 0).astype(jnp.int32),
    )
    return keep_layout(branched, mesh)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5))
def repeat_row(
    cache: Cache,
    rows: int,
    read: int,
    new: int,
    chunk: int,
    mesh: jax.sharding.Mesh | None = None,
) -> Cache:
    """Copies what layers keep of one row to B rows that continue it, with any kinds of cache.

    Args:
      cache: the cache of one row, after the end of its prompt.
      rows: B.
      read: number of tokens that are read next, padding before them included.
      new: maximum number of tokens after them.
      chunk: maximum number of these that are read at once.
      mesh: shards the new cache as in `create`.
    """

    def repeat(x):
        axis = max(x.ndim - 4, 0)
        return x if x.ndim == 0 else jnp.repeat(x, rows, axis=axis)

    def extend_slots(kind, arrays, slots):
        return kind.extend_slots(arrays, slots, read, new, chunk)

    return _for_each_layer(jax.tree.map(repeat, cache), extend_slots, mesh)


def with_extra_slots(
    cache: Cache, tokens: int, arrays: dict[str, jax.Array], mesh: jax.sharding.Mesh | None = None
) -> Cache:
    """Returns a copy that reads `tokens` more tokens at once and loses none for them.

    Args:
      cache: the earlier tokens.
      tokens: their number.
      arrays: other arrays of the layers that evict tokens.
      mesh: as in `create`.
    """

    def act(kind, layer, slots):
        kind, layer, slots = kind.with_extra_slots(layer, slots, tokens)
        return kind, layer | arrays if kind.evicts else layer, slots

    return _for_each_layer(cache, act, mesh)


def begin_prompt(cache: Cache, tokens: int, mesh: jax.sharding.Mesh | None = None) -> Cache:
    """Begins a prompt: layers with a cache policy evict nothing before `end_prompt`.

    Args:
      cache: the earlier tokens.
      tokens: maximum number of tokens of the prompt.
      mesh: as in `create`.
    """
    is_cut = any(kind.acts_on_prompt for kind in cache.kinds)
    return _begin_prompt(cache, tokens, mesh) if is_cut else cache


@functools.partial(jax.jit, static_argnums=(1, 2))
def _begin_prompt(cache: Cache, tokens: int, mesh: jax.sharding.Mesh | None) -> Cache:
    def act(kind, arrays, slots):
        return kind.begin_prompt(arrays, slots, tokens)

    return _for_each_layer(cache, act, mesh)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _end_prompt(
    cache: Cache,
    rotations: Sequence[Rotation],
    new: int,
    chunk: int,
    mesh: jax.sharding.Mesh | None,
    question: Int[Array, " B"] | None,
) -> Cache:
    layout = attention_layout(mesh)
    prompts = [Prompt(cache.tokens, rotation, question, layout) for rotation in rotations]

    def act(kind, arrays, slots, prompt, counts):
        return kind.end_prompt(arrays, slots, prompt, new, chunk, counts)

    return _for_each_layer(cache, act, mesh, prompts, _shared_counts(cache, prompts))


def _shared_counts(cache: Cache, prompts: Sequence[Prompt]) -> list[Int[Array, "B K"] | None]:
    """Returns how many tokens the heads of each layer keep; None where a layer decides alone."""
    layers, kinds = cache.separate_layers, [cache.kinds[number] for number in cache.kind_by_layer]
    sharing = [i for i, kind in enumerate(kinds) if kind.shares_across_layers]
    counts: list[Any] = [None] * len(kinds)
    if not sharing:
        return counts
    if cache.is_stacked:
        layers = tuple(jax.tree.map(operator.itemgetter(i), cache.layers) for i in sharing)
    each = [(kinds[i], layers[i], prompts[i]) for i in sharing]
    shared = kinds[sharing[0]].shared_counts(each)
    if cache.is_stacked:
        return [jnp.stack(shared)]
    for i, count in zip(sharing, shared, strict=True):
        counts[i] = count
    return counts


def _for_each_layer(
    cache: Cache,
    act: Callable[..., tuple[LayerCache, dict, Any]],
    mesh: jax.sharding.Mesh | None,
    *by_layer: Sequence[Any],
) -> Cache:
    """Replaces kind, arrays and shared slots of each layer by the results of `act` of them.

    `act` also gets an entry of each of `by_layer`.
    """
    kinds, shared, layers = list(cache.kinds), list(cache.slots), []
    for arrays, number, *each in zip(cache.separate_layers, cache.kind_by_layer, *by_layer):
        kinds[number], arrays, shared[number] = act(
            cache.kinds[number], arrays, cache.slots[number], *each
        )
        layers.append(arrays)
    cache = replace_layers(cache, layers[0] if cache.is_stacked else tuple(layers))
    return keep_layout(dataclasses.replace(cache, slots=tuple(shared), kinds=tuple(kinds)), mesh)


def end_prompt(
    cache: Cache,
    rotations: Sequence[Rotation],
    new: int,
    chunk: int,
    mesh: jax.sharding.Mesh | None = None,
    question: Int[Array, " B"] | None = None,
) -> Cache:
    """Ends a prompt: layers with a cache policy evict tokens and free their slots.

    Args:
      cache: the cache with the prompt.
      rotations: that of each layer, with which the prompt was read.
      new: maximum number of tokens that follow.
      chunk: maximum number of these that are read at once.
      mesh: as in `create`.
      question: how many of the last tokens of each row ask; None: not known.
    """
    if not any(kind.acts_on_prompt for kind in cache.kinds):
        return cache
    if any(kind.depends_on_text for kind in cache.kinds):
        needs_few = np.asarray(_needs_few(cache, rotations, mesh))
        kinds = list(cache.kinds)
        for number, is_few in zip(cache.kind_by_layer, needs_few.tolist(), strict=False):
            kinds[number] = kinds[number].with_few(is_few)
        cache = dataclasses.replace(cache, kinds=tuple(kinds))
    return _end_prompt(cache, rotations, new, chunk, mesh, question)


@functools.partial(jax.jit, static_argnums=2)
def _needs_few(
    cache: Cache, rotations: Sequence[Rotation], mesh: jax.sharding.Mesh | None
) -> Bool[Array, " L"]:
    """Returns which layers need few slots at the end of a prompt (`LayerCache.needs_few`)."""
    layout = attention_layout(mesh)
    prompts = [Prompt(cache.tokens, rotation, layout=layout) for rotation in rotations]
    kinds = [cache.kinds[number] for number in cache.kind_by_layer]
    layers = cache.layers
    if cache.is_stacked:
        layers = [jax.tree.map(operator.itemgetter(i), layers) for i in range(len(kinds))]
    needs_few = jnp.stack(
        [
            kind.needs_few(arrays, prompt) if kind.depends_on_text else jnp.zeros((), bool)
            for kind, arrays, prompt in zip(kinds, layers, prompts, strict=True)
        ]
    )
    if mesh is None:
        return needs_few
    return jax.lax.with_sharding_constraint(needs_few, NamedSharding(mesh, PartitionSpec()))


def write_packed(cache: Cache, key_values: Any) -> Cache:
    """Writes the keys and values of packed prompts to the first slots of each row.

    Args:
      cache: empty but for `slots`; its kinds hold keys only (`LayerCache.holds_keys_only`).
      key_values: keys and values [.., 1, B * T, K, H] of each layer, or stacked over layers.
    """

    def write(slots, new):
        """Writes `new` [.., 1, B * T, K, H] into the first T of `slots` [.., B, K, S, H]."""
        *rest, batch, heads, _, size = slots.shape
        new = new.reshape(*rest, batch, -1, heads, size).swapaxes(-3, -2).astype(slots.dtype)
        return jax.lax.dynamic_update_slice(slots, new, (0,) * slots.ndim)

    def layer(arrays, pair):
        pairs = zip(("keys", "values"), pair)  # a layer with `keys_of` holds neither
        return {name: write(arrays[name], new) for name, new in pairs if name in arrays}

    if cache.is_stacked:
        return replace_layers(cache, layer(cache.layers, key_values))
    return replace_layers(cache, tuple(map(layer, cache.layers, key_values)))


def state_of(cache: Cache, empty: Cache) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Returns what a cache has become since it was `empty`, for a file: JSON, and host arrays.

    `restore` inverts it. A collective if the devices of several processes hold the cache.
    """
    layers = cache.separate_layers
    state = {"kinds": [*map(_changes, cache.kinds, empty.kinds)], "layers": [*map(sorted, layers)]}
    leaves = jax.tree.leaves((layers, cache.slots, cache.filled, cache.tokens))
    return state, [*map(distributed.gather, leaves)]


def restore(
    state: dict[str, Any],
    arrays: Sequence[np.ndarray],
    empty: Cache,
    mesh: jax.sharding.Mesh | None = None,
) -> Cache:
    """Returns the cache of which `state_of` returned `state` and `arrays`.

    Args:
      state: the JSON.
      arrays: the arrays.
      empty: a cache as it was created for the same request.
      mesh: as in `create`.
    """
    layers = tuple(dict.fromkeys(names, 0) for names in state["layers"])
    tree = jax.tree.structure((layers, empty.slots, empty.filled, empty.tokens))
    layers, slots, filled, tokens = jax.tree.unflatten(tree, arrays)
    cache = Cache(
        layers=layers[0] if empty.is_stacked else layers,
        slots=slots,
        filled=filled,
        tokens=tokens,
        kinds=tuple(map(_changed, empty.kinds, state["kinds"])),
        kind_by_layer=empty.kind_by_layer,
    )
    if mesh is None:
        return jax.tree.map(jnp.asarray, cache)

    def place(array, sharding):
        return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)

    return jax.tree.map(place, cache, _shardings(cache, mesh))


def _changes(kind: LayerCache, before: LayerCache) -> dict[str, Any]:
    """Returns the fields of a cache that have changed, with those of caches inside of it.

    A method that takes the place of another one (`phases`) is named by the field that had it.
    """
    changes = {}
    for field in dataclasses.fields(kind):
        new, old = getattr(kind, field.name), getattr(before, field.name)
        if isinstance(new, LayerCache):
            new, old = _changes(new, old), {}
        if new == old:
            continue
        if isinstance(new, CacheMethod):
            fields = dataclasses.fields(before)
            new = {"was": next(x.name for x in fields if getattr(before, x.name) == new)}
        changes[field.name] = new
    return changes


def _changed(kind: LayerCache, changes: dict[str, Any]) -> LayerCache:
    """Returns a cache with the fields that `_changes` returned."""

    def value(old, new):
        if isinstance(old, LayerCache):
            return _changed(old, new)
        return getattr(kind, new["was"]) if isinstance(new, dict) else new

    fields = {name: value(getattr(kind, name), new) for name, new in changes.items()}
    return dataclasses.replace(kind, **fields)


def with_kinds(cache: Cache, other: Cache) -> Cache:
    """Returns a cache with the kinds of layers of `other`, whose arrays are the same."""
    places = map(other.kind_by_layer.index, range(len(other.kinds)))
    slots = tuple(cache.slots[cache.kind_by_layer[place]] for place in places)
    kinds = {"kinds": other.kinds, "kind_by_layer": other.kind_by_layer}
    return dataclasses.replace(cache, slots=slots, **kinds)


def replace_layers(cache: Cache, layers: Any) -> Cache:
    """Returns the cache with new keys and values `layers`, the results of the decoder's layers."""
    return dataclasses.replace(cache, layers=layers)
