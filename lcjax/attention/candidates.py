"""The tokens from which a cache policy chooses, and the attention that they receive."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from lcjax.attention.cache import Arrays, LayerShape
from lcjax.rope import Rotation
from pallas_kernels import Layout

_BLOCK = 128  # queries whose weights are computed at once


class Candidates(NamedTuple):
    """The slots of a layer, from which a policy chooses.

    Slots that hold tokens are in text order. Between them may be empty ones, those of padding.
    """

    # Rotated to their positions; float32 if they are codes, and 0 in channels that were dropped
    keys: Float[Array, "B K S H"]
    values: Float[Array, "B K S H"]
    index: Int[Array, "B K S"]  # order indices of the tokens; -1: an empty slot
    tokens: Int[Array, " B"]  # tokens of each row that were read, also those that were evicted
    next_position: Int[Array, " B"]  # of the token that follows
    state: Arrays  # arrays of the policy's own (`CachePolicy.state`)
    soft_cap: float | None = None  # c: logits are c tanh(logit / c)
    question: Int[Array, " B"] | None = None  # how many of the last tokens ask; None: not known
    layer: int = 0  # number of the layer among those that evict tokens
    positions: Int[Array, "B K S"] | None = None  # to which the keys are rotated
    rotation: Rotation | None = None  # with which they are
    layout: Layout | None = None  # the mesh axes over which rows and heads are split

    @property
    def is_token(self) -> Bool[Array, "B K S"]:
        """Whether a slot holds a token."""
        return self.index >= 0

    @property
    def ranks(self) -> Int[Array, "B K S"]:
        """Place of each token among those of its head: 0, 1, 2, ... in text order."""
        return jnp.cumsum(self.is_token, axis=-1, dtype=jnp.int32) - 1

    @property
    def counts(self) -> Int[Array, "B K 1"]:
        """Number of tokens of each head."""
        return self.is_token.sum(-1, keepdims=True, dtype=jnp.int32)

    def unrotated_keys(self) -> Float[Array, "B K S H"]:
        """Returns the keys as they were before their rotation, in float32."""
        inverse = self.rotation._replace(scale=1 / self.rotation.scale)
        return turn_by_head(self.keys.astype(jnp.float32), -self.positions, inverse)

    def from_first(self, x: Array, fill: float | bool) -> Array:
        """Moves `x` [B, K or 1, S, ...] so that the tokens of a head come first, in text order."""
        is_token = self.is_token[:, : x.shape[1]]
        order = jnp.argsort(~is_token, axis=-1, stable=True)
        order, is_token = (y.reshape(*y.shape, *[1] * (x.ndim - 3)) for y in (order, is_token))
        is_moved = self.take(is_token, order)
        return jnp.where(is_moved, self.take(x, order), fill)

    def to_slots(self, x: Array) -> Array:
        """Moves `x` [B, K or 1, S] back, from the order of `from_first` to the slots."""
        return self.take(x, jnp.maximum(self.ranks[:, : x.shape[1]], 0))

    def take(self, x: Array, places: Array) -> Array:
        """Returns the entries of `x` [B, K or 1, S, ...] at `places` [B, K or 1, M, ...]."""
        take = functools.partial(jnp.take_along_axis, axis=2)
        return on_each_device(take, self.layout, x, places)


class Seen(NamedTuple):
    """The new tokens of a call, after its attention, for policies that keep statistics of them."""

    queries: Float[Array, "B N T H"]  # as attention multiplied them with keys
    unrotated: Float[Array, "B N T H"]
    index: Int[Array, "B T"]  # order indices; -1: padding
    rotation: Rotation
    slots: Candidates  # with the new tokens
    # For policies with `reads_output`: the output projection of the layer, and the norms of its
    # inputs, the hidden states from which queries, keys and values are projected
    output_kernel: Float[Array, "N H D"] | None = None
    input_norms: Float[Array, "B T"] | None = None

    @property
    def is_new(self) -> Bool[Array, "B K S"]:
        """Whether a slot holds one of the new tokens."""
        largest = jnp.iinfo(jnp.int32).max
        oldest = jnp.min(jnp.where(self.index >= 0, self.index, largest), axis=-1)
        return self.slots.index >= oldest[:, None, None]


def last_queries(number: int, layer: LayerShape) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes and dtypes of the arrays of a row with its last `number` queries."""
    shape = (layer.num_heads, number, layer.head_dim)
    places = jax.ShapeDtypeStruct((1, number, 1), jnp.int32)
    # Order indices plus 1; 0: there is no query yet.
    return {"queries": jax.ShapeDtypeStruct(shape, layer.dtype), "query_order": places}


def observe_last_queries(seen: Seen) -> Arrays:
    """Returns the arrays of `last_queries` after new tokens, which may come from several calls."""

    def last(old, new, is_new):
        """Returns the last of the old and the new entries [B, _, n, _] that are tokens."""
        both = jnp.concatenate([old, new.astype(old.dtype)], axis=2)
        # Padding may precede or follow the new tokens; it goes in front.
        is_entry = jnp.pad(is_new, [(0, 0), (old.shape[2], 0)], constant_values=True)
        order = jnp.argsort(is_entry, axis=-1, stable=True)[:, -old.shape[2] :]
        return jnp.take_along_axis(both, order[:, None, :, None], axis=2)

    state, is_new = seen.slots.state, seen.index >= 0
    places = seen.index[:, None, :, None] + 1
    return {
        "queries": last(state["queries"], seen.queries, is_new),
        "query_order": last(state["query_order"], places, is_new),
    }


def attention_by_head(
    slots: Candidates,
    queries: Float[Array, "B N W H"],
    index: Int[Array, "B W"],
    reduce: Callable[..., Array],
    *by_head: Float[Array, "B K ..."],
) -> Float[Array, "B K ..."]:
    """Returns `reduce` of the attention weights of queries, for one key head after the other.

    Args:
      slots: the keys, of which a query sees those up to itself.
      queries: rotated, as attention multiplies them with keys.
      index: order indices of the queries; -1: no query, whose weights are 0.
      reduce: maps the weights [B, G, W, S] of the G query heads of a key head to [B, ...]; it also
        gets the part [B, ...] of each of `by_head`.
      by_head: other arrays that `reduce` needs.
    """
    rows, heads, length, size = queries.shape
    kv_heads = slots.keys.shape[1]
    queries = queries.reshape(rows, kv_heads, heads // kv_heads, length, size)
    index = jnp.broadcast_to(index[:, None], (rows, kv_heads, length))

    def head(queries, index, keys, order, *rest):
        precision = jax.lax.Precision.HIGHEST if keys.dtype == jnp.float32 else None
        logits = jnp.einsum(
            "BGWH,BSH->BGWS", queries, keys, precision=precision, preferred_element_type=jnp.float32
        )
        logits *= size**-0.5
        if slots.soft_cap is not None:
            logits = slots.soft_cap * jnp.tanh(logits / slots.soft_cap)
        visible = (order[:, None] >= 0) & (order[:, None] <= index[..., None])
        logits = jnp.where(visible[:, None], logits, -jnp.inf)
        largest = jnp.maximum(logits.max(-1, keepdims=True), jnp.finfo(jnp.float32).min)
        weights = jnp.exp(logits - largest)
        return reduce(weights / jnp.maximum(weights.sum(-1, keepdims=True), 1e-30), *rest)

    arrays = queries, index, slots.keys, slots.index, *by_head
    return for_each_head(head, slots.layout, *arrays)


def for_each_head(
    run: Callable[..., Array], layout: Layout | None, *arrays: Array
) -> Float[Array, "B K ..."]:
    """Returns `run` of the parts [B, ...] of `arrays` [B, K, ...], for one head after the other."""

    def local(*arrays):
        return jax.lax.map(lambda parts: run(*parts), [x.swapaxes(0, 1) for x in arrays])

    return on_each_device(lambda *arrays: local(*arrays).swapaxes(0, 1), layout, *arrays)


def on_each_device(run: Callable[..., Array], layout: Layout | None, *arrays: Array) -> Array:
    """Returns `run` of `arrays` [B or 1, K, ...], where each device has its own rows and heads.

    The compiler would gather the heads of all devices for a loop over heads, or for indices that
    differ between heads.
    """
    if layout is None:
        return run(*arrays)
    count = arrays[0].shape[0]
    rows = layout.rows if count % layout.size(layout.rows) == 0 else None
    is_divided = all(x.shape[1] % layout.size(layout.heads) == 0 for x in arrays)
    heads = layout.heads if is_divided else None
    return jax.shard_map(
        run,
        mesh=layout.mesh,
        in_specs=tuple(PartitionSpec(rows if len(x) == count else None, heads) for x in arrays),
        out_specs=PartitionSpec(rows, heads),
        check_vma=False,
    )(*arrays)


def by_blocks(
    step: Callable[..., Array],
    initial: Array,
    queries: Float[Array, "B N T H"],
    index: Int[Array, "B T"],
    *by_query: Float[Array, "B T"],
) -> Array:
    """Folds blocks of queries: `result = step(result, queries, index, *by_query)` for each block.

    The weights of a block are computed at once; those of all queries would not fit memory.
    """
    size = min(_BLOCK, queries.shape[2])

    def blocks(x, axis, fill):
        padding = [(0, -x.shape[axis] % size if i == axis else 0) for i in range(x.ndim)]
        x = jnp.pad(x, padding, constant_values=fill)
        return jnp.moveaxis(x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :]), axis, 0)

    parts = blocks(queries, 2, 0), blocks(index, 1, -1), *(blocks(x, 1, 1) for x in by_query)
    return jax.lax.scan(lambda result, part: (step(result, *part), None), initial, parts)[0]


def turn(
    x: Float[Array, "B S N H"], by: Int[Array, "B S"], rotation: Rotation
) -> Float[Array, "B S N H"]:
    """Moves rotated queries or keys `by` positions; R(a) R(b) = R(a + b) for rotations."""
    return rotation._replace(scale=1.0).rotate(x, by)


def turn_by_head(
    keys: Float[Array, "B K S H"], by: Int[Array, "B K S"], rotation: Rotation
) -> Float[Array, "B K S H"]:
    """Rotates keys by `by` positions, which differ between heads."""

    def head(keys, by):
        return rotation.rotate(keys[:, :, None], by)[:, :, 0]

    return jax.vmap(head, 1, 1)(keys, by)
