"""The interface of attention patterns, and the partial attentions that they consist of.

A pattern is a list of passes. A pass defines the positions to which queries and keys are rotated,
and the visible keys. `partial_attention` computes one pass, and `pallas_kernels.merge` merges the
results of several passes.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import draccus
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Num

from lcjax.attention.cache import FullCache, LayerCache, LayerShape
from lcjax.attention.inserted import InsertedTokens
from lcjax.attention.relative import RelativeTerms
from lcjax.errors import InputError, check_fields
from lcjax.rope.rotation import Rotation, no_rotation
from pallas_kernels import (
    Alibi,
    Bias,
    FoldedHeads,
    Layout,
    Mask,
    Quantised,
    causal,
    flash,
    merge,
    window,
)

# How a model encodes positions: rotations, biases of logits, absolute embeddings.
POSITIONS = ("rope", "alibi", "t5", "transformer_xl", "deberta", "sinusoidal", "learned")


class Parameter(NamedTuple):
    """An array that a pattern adds to each layer (`Pattern.parameters`).

    Axes are letters: D width, N query heads, K key heads, H channels of a head, and those of
    `Pattern.sizes`.
    """

    axes: str  # of the array
    tensor: str  # its name in a Hugging Face layer, such as self_attn.indexer.wk.weight
    tensor_axes: str  # as `lcjax.checkpoints.hf_names` writes them: "IJ,D" is a matrix [I*J, D]
    # "normal" has standard deviation 0.02; numbers are those along the last axis
    init: Literal["normal", "zeros", "ones"] | tuple[float, ...] = "normal"
    dtype: str | None = None  # None: that of the model's parameters

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(sizes[letter] for letter in self.axes)


class Features(NamedTuple):
    """What a pattern computes from the hidden states of a layer with its parameters, by name."""

    queries: dict[str, Float[Array, "B T ..."]]
    keys: dict[str, Float[Array, "B S h J"]]  # which a cache keeps
    layer: dict[str, Array]  # of no token


@dataclass(frozen=True)
class AttentionMetadata:
    """Positions, documents, rotation and kernel options of one attention call.

    A decoder layer builds it once per call, in training and in decoding.

    An *order index* is the place of a token in its own document: 0, 1, 2, ... Padding and the other
    documents of a packed row are not counted. Masks test order indices, so "the first tokens" and
    "chunks" of a method are counted in each document.
    """

    q_positions: Num[Array, "B T"]  # positions of the rotation; integers or fractions
    k_positions: Num[Array, "B S"]
    _: KW_ONLY
    rotation: Rotation = field(default_factory=no_rotation)
    q_index: Int[Array, "*B T"] | None = None  # order indices [T] or [B, T]; None: 0, 1, 2, ...
    k_index: Int[Array, "*B S"] | None = None
    q_segments: Int[Array, "B T"] | None = None  # documents from 1, 0 is padding
    k_segments: Int[Array, "B S"] | None = None
    # Indices in the row of (queries [T], keys [S]); an entry of None means 0, 1, 2, ... Inside a
    # document they differ by as much as order indices. None if slots are not in text order.
    row_indices: tuple[Int[Array, " T"] | None, Int[Array, " S"] | None] | None = None
    num_heads: int = 1  # query heads, for masks that differ between heads; `attend` sets it
    # Added to the logits: a function of the distance of order indices (`Bias`), or terms that also
    # depend on the content (`RelativeTerms`)
    bias: Bias | RelativeTerms | None = None
    soft_cap: float | None = None  # c: logits become c tanh(logit / c)
    keys_rotated: bool = False  # keys are already rotated to `Pattern.key_positions` (a cache)
    # Partials (out, lse) of the same queries over other keys, which share a softmax with these keys
    extra_partials: Sequence[tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]] = ()
    layout: Layout | None = None  # the mesh axes over which rows, heads and length are split
    implementation: str | None = None  # of `pallas_kernels.flash`; None chooses one
    features: Features = Features({}, {}, {})  # of a pattern with `parameters`
    # For caches that score tokens by them: the output projection of the layer, and the norms of the
    # hidden states from which queries, keys and values are projected
    output_kernel: Float[Array, "N H D"] | None = None
    input_norms: Float[Array, "B T"] | None = None

    def replace(self, **changes: Any) -> AttentionMetadata:
        return dataclasses.replace(self, **changes)

    def without_layout(self) -> AttentionMetadata:
        """Returns metadata for kernel calls without a layout.

        On a mesh it selects the implementation `xla`, which the compiler can partition.
        """
        if self.layout is None:
            return self
        return self.replace(layout=None, implementation=self.implementation or "xla")

    @property
    def q_order(self) -> Int[Array, "*B T"]:
        """Order indices of the queries, [T] or [B, T]."""
        length = self.q_positions.shape[1]
        return jnp.arange(length, dtype=jnp.int32) if self.q_index is None else self.q_index

    @property
    def k_order(self) -> Int[Array, "*B S"]:
        """Order indices of the keys, [S] or [B, S]."""
        length = self.k_positions.shape[1]
        return jnp.arange(length, dtype=jnp.int32) if self.k_index is None else self.k_index

    def mask_indices(
        self, mask: Mask
    ) -> tuple[Int[Array, "*B T"] | None, Int[Array, "*B S"] | None]:
        """Returns the indices of queries and keys that `mask` tests.

        They are order indices. If the mask depends only on differences of indices, they are indices
        in the row, which give the same result and may be constants at trace time. The tables of
        visible blocks are then static.
        """
        if self.row_indices is not None and mask.shift_invariant:
            return self.row_indices
        return self.q_index, self.k_index


class Pass(NamedTuple):
    """One partial attention: the positions of queries and keys, and the mask of visible keys."""

    q_positions: Num[Array, "B T"]
    k_positions: Num[Array, "B S"]
    mask: Mask  # rule over order indices, which keep counting where positions repeat or jump
    same_position: bool = False  # whether all keys have one position, that of the first key


def partial_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    attention_pass: Pass,
    metadata: AttentionMetadata,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
    """Computes one pass: rotates queries and keys, then attends to the keys visible in its mask.

    Args:
      q, k, v: unrotated queries and keys, and values. With `metadata.keys_rotated`, keys must be
        rotated to the positions of the pass.
      attention_pass: positions of queries and keys, and the mask.
      metadata: rotation, order indices, segments, bias and kernel options of the call.

    Returns:
      The output, and the float32 log-sum-exp of the logits.
    """
    if isinstance(metadata.bias, RelativeTerms):
        return metadata.bias.attend(q, k, v, attention_pass, metadata)
    q, k = rotate_qk(q, k, metadata, attention_pass)
    q_index, k_index = metadata.mask_indices(attention_pass.mask)
    bias, lse_shift = pass_bias(attention_pass, metadata)
    with jax.named_scope("attention"):
        out, lse = flash(
            q,
            k,
            v,
            attention_pass.mask,
            soft_cap=metadata.soft_cap,
            q_index=q_index,
            k_index=k_index,
            q_segments=metadata.q_segments,
            k_segments=metadata.k_segments,
            bias=bias,
            layout=metadata.layout,
            implementation=metadata.implementation,
        )
    return out, lse if lse_shift is None else lse + lse_shift


def rotate_qk(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    metadata: AttentionMetadata,
    attention_pass: Pass | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B S K H"]]:
    """Rotates q, and k if it is not rotated yet, to the positions of a pass.

    If `attention_pass` is None, the positions are those of `metadata`.
    """
    positions, rotation = attention_pass or metadata, metadata.rotation
    with jax.named_scope("rope"):
        q = rotate_queries(q, positions.q_positions, rotation)
        if not metadata.keys_rotated:
            k = rotation.rotate(k, positions.k_positions)
    return q, k


def rotate_queries(
    q: Float[Array, "B T N H"], positions: Num[Array, "B T"], rotation: Rotation
) -> Float[Array, "B T N H"]:
    """Rotates queries to `positions` and multiplies them by `rotation.query_scale`.

    It multiplies in float32 and rounds once. JAX would round a Python float to the dtype of q
    first, so the same bfloat16 row would get different factors alone and in a stacked rotation.
    """
    rotated = rotation.rotate(q.astype(jnp.float32), positions)
    return (rotated * rotation.query_scale).astype(q.dtype)


def pass_bias(
    attention_pass: Pass, metadata: AttentionMetadata
) -> tuple[Bias | None, Float[Array, "B T N"] | None]:
    """Returns the bias of a pass whose positions may differ from those of the metadata.

    If all keys of a pass are at one distance, or if the bias is linear in the distance and only
    queries move, then all logits of a query change by the same number. The output of the pass does
    not change, and this number is added to the log-sum-exp.

    Returns:
      The bias by order indices, and a summand of the log-sum-exp; either may be None.

    Raises:
      TypeError: the bias at the moved positions has no such form.
    """
    bias, keys_unmoved = metadata.bias, attention_pass.k_positions is metadata.k_positions
    if bias is None or (keys_unmoved and attention_pass.q_positions is metadata.q_positions):
        return bias, None
    if attention_pass.same_position:
        first_key = attention_pass.k_positions[:, :1]
        logits = bias.logits(attention_pass.q_positions, first_key)  # [B, N, T, 1]
        return None, jnp.swapaxes(logits[..., 0], 1, 2)
    if not (keys_unmoved and isinstance(bias, Alibi)):
        kind = type(bias).__name__
        raise TypeError(f"no rule moves {kind} to the positions of {attention_pass!r}")
    reduction = metadata.q_positions - attention_pass.q_positions  # of the distance, [B, T]
    return bias, bias.slopes.astype(jnp.float32) * reduction.astype(jnp.float32)[..., None]


def near_and_far(metadata: AttentionMetadata, size: int, distance: int, far: Mask) -> list[Pass]:
    """Returns two passes: the last `size` keys at their true distance, older ones at `distance`.

    Args:
      metadata: positions of the call.
      size: keys of the first pass, the token itself included.
      distance: distance of all keys of the second pass.
      far: mask of the older keys that are visible.
    """
    far = causal() & ~window(size) & far
    near = Pass(metadata.q_positions, metadata.k_positions, causal() & window(size))
    return [near, pass_at_distance(metadata, distance, far)]


def pass_at_distance(metadata: AttentionMetadata, distance: int, mask: Mask) -> Pass:
    """Returns a pass over the keys of `mask`, all of them at the same `distance`."""
    q_positions = jnp.full_like(metadata.q_positions, distance)
    return Pass(q_positions, jnp.zeros_like(metadata.k_positions), mask, same_position=True)


@dataclass(frozen=True)
class Pattern(draccus.ChoiceRegistry, abc.ABC):
    """Which keys a query sees, and at which positions: the `model.pattern` config section.

    A pattern lists passes over disjoint sets of keys, and their results are merged by log-sum-exp.
    """

    # Fields of small instances, on which the tests of all patterns run.
    examples: ClassVar[tuple[dict, ...]] = ({},)
    # Whether the position of a key depends on the query. A cache must then keep unrotated keys.
    moves_keys: ClassVar[bool] = False
    # Whether `at_length` changes the rotation; subclasses may define it as a property.
    depends_on_length: ClassVar[bool] = False
    # Whether a prompt is read in one call, because the pattern chooses keys for each call; it may
    # be a property.
    needs_whole_prompt: ClassVar[bool] = False
    # Whether a token sees only tokens before it. Otherwise a text has no score, and a model cannot
    # be trained to predict it. It may be a property.
    is_causal: ClassVar[bool] = True
    # Whether tokens may be evicted from a cache: every token sees all tokens before it.
    allows_eviction: ClassVar[bool] = False
    # Copies of the queries and outputs that a layer holds at a time, beside one
    query_copies: ClassVar[int] = 0
    # Whether the model reads texts with inserted tokens (`inserted_tokens`).
    inserts_tokens: ClassVar[bool] = False
    # Whether layers have patterns of their own (`for_layer`); it may be a property.
    differs_by_layer: ClassVar[bool] = False

    def __post_init__(self):
        check_fields("pattern", self)

    def check_scores(self) -> None:
        """Raises an InputError if a loss under this pattern is meaningless (`is_causal`)."""
        if not self.is_causal:
            kind = self.get_choice_name(type(self))
            raise InputError(
                f"model.pattern.type={kind} lets later tokens choose what earlier ones see, so a"
                " text has no score under it; it is for reading prompts"
            )

    @property
    def encodings(self) -> tuple[str, ...]:
        """The entries of POSITIONS that the pattern supports.

        By default all of them, or only rope if the pattern overrides `attend`. A pattern that moves
        tokens to other positions must also move a bias, and cannot move absolute embeddings.
        """
        return POSITIONS if type(self).attend is Pattern.attend else ("rope",)

    @property
    def is_position_based(self) -> bool:
        """Whether visibility depends on order indices alone, so tokens may be in any order."""
        return type(self).attend is Pattern.attend

    @property
    def supports_soft_cap(self) -> bool:
        """Whether logits may be capped (`AttentionMetadata.soft_cap`)."""
        return self.is_position_based

    @abc.abstractmethod
    def passes(self, metadata: AttentionMetadata) -> list[Pass]:
        """Returns the passes over the keys of a call; their masks are disjoint."""

    @property
    def parameters(self) -> Mapping[str, Parameter]:
        """The arrays that each layer has for this pattern, by name; by default none."""
        return {}

    @property
    def sizes(self) -> Mapping[str, int]:
        """The sizes of the axes of `parameters` that are not the model's, by letter."""
        return {}

    def features(
        self,
        parameters: Mapping[str, Array],
        x: Float[Array, "B T D"],
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        metadata: AttentionMetadata,
    ) -> Features:
        """Returns what `attend` needs of new tokens beside q, k and v, as `metadata.features`.

        Those of keys are kept in the cache (`FullCache.features`), so that `attend` has them of all
        keys.

        Args:
          parameters: those of the layer, in the compute dtype or their own.
          x: normed hidden states, from which q, k and v are projected.
          q, k: unrotated queries and keys.
          metadata: positions of the queries, and the rotation.
        """
        del parameters, x, q, k, metadata
        return Features({}, {}, {})

    def choice_flops(self, layer: LayerShape, length: int, keys: float) -> float:
        """Returns the FLOPs with which a query chooses among the keys before it; 0: it does not.

        Args:
          layer: the sizes of the layer.
          length: tokens of the text.
          keys: mean number of keys from which a query chooses.
        """
        return 0.0

    def key_positions(
        self, positions: Num[Array, "B S"], order: Int[Array, "*B S"]
    ) -> Num[Array, "B S"]:
        """Returns the positions of keys, which are the same for all queries.

        A cache stores keys rotated to these positions, unless the pattern `moves_keys`. `passes`
        receives them as `metadata.k_positions`.

        Args:
          positions: true positions of the keys.
          order: order indices of the keys.
        """
        del order
        return positions

    def at_length(self, rotation: Rotation, length: int) -> Rotation:
        """Returns the rotation of a request, given the rope's rotation for the same length.

        Args:
          rotation: the rope's rotation.
          length: tokens of the whole request, as in `Rope.frequencies`, so that later queries agree
            with keys that were rotated before them.
        """
        del length
        return rotation

    @property
    def inserted_tokens(self) -> InsertedTokens | None:
        """The tokens that the model reads among those of a text; None: only those of the text.

        Raises:
          InputError: a field that they need is not set.
        """
        return None

    @property
    def layer_cache(self) -> LayerCache:
        """What a layer remembers of the tokens that it has read: by default all keys and values."""
        return FullCache()

    @property
    def is_bounded(self) -> bool:
        """Whether a token sees a bounded part of the text, so that a layer need not keep it all."""
        return not self.layer_cache.keeps_all

    def for_inference(self) -> Pattern:
        """Returns the pattern for evaluation and generation after training with this one."""
        return self

    def for_layer(self, layer: int, num_layers: int) -> Pattern:
        """Returns the pattern of one layer, which does not differ by layer (`differs_by_layer`).

        Args:
          layer: its number, from 0.
          num_layers: number of layers of the model.
        """
        del layer, num_layers
        return self

    def attend(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B S K H"],
        v: Float[Array, "B S K Hv"],
        metadata: AttentionMetadata,
    ) -> Float[Array, "B T N Hv"]:
        """Computes attention of q over k and v.

        Patterns whose visible keys depend on the data override this method.

        Args:
          q, k, v: unrotated queries and keys, and values; K divides N. With
            `metadata.keys_rotated`, keys are already rotated.
          metadata: positions, documents, rotation and kernel options.

        Returns:
          The output, in the dtype of `q`.

        Raises:
          InputError: as in `check_metadata`.
          TypeError: a pass moves keys, but the pattern does not set `moves_keys`.
        """
        self.check_metadata(metadata)
        k_positions = self.key_positions(metadata.k_positions, metadata.k_order)
        metadata = metadata.replace(k_positions=k_positions, num_heads=q.shape[2])
        passes = self.passes(metadata)
        if not self.moves_keys and any(p.k_positions is not k_positions for p in passes):
            raise TypeError(f"{type(self).__name__} moves keys and must set moves_keys = True")
        partials = []
        for attention_pass in passes:
            partials.append(partial_attention(q, k, v, attention_pass, metadata))
        partials += metadata.extra_partials
        out, _ = partials[0] if len(partials) == 1 else merge(partials)
        return out

    def check_metadata(self, metadata: AttentionMetadata) -> None:
        """Raises an InputError for inputs that the pattern does not support.

        These are a bias for a pattern that supports only rope, rotated keys for a pattern that
        moves keys, extra partials for a pattern whose visible keys depend on the data, and a soft
        cap for one that does not cap logits.
        """
        if metadata.soft_cap is not None and not self.supports_soft_cap:
            raise InputError(
                f"pattern {self!r} does not cap logits (soft_cap={metadata.soft_cap}); use a"
                " pattern that chooses keys by their position alone, or moba"
            )
        if metadata.bias is not None and self.encodings == ("rope",):
            raise InputError(
                f"pattern {self!r} places tokens itself and takes no bias of the logits"
            )
        if metadata.keys_rotated and self.moves_keys:
            raise InputError(
                f"pattern {self!r} moves keys to other positions, so the cache must keep "
                "unrotated keys"
            )
        if metadata.extra_partials and not self.is_position_based:
            raise InputError(
                f"pattern {self!r} cannot share a softmax with other keys, such as those of a "
                "memory, or with learned sinks; use model.pattern.type=causal"
            )


def order_indices(segments: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Returns the int32 place of every token in its document, a run of equal `segments`."""
    slots = jnp.arange(segments.shape[1], dtype=jnp.int32)
    is_start = segments[:, 1:] != segments[:, :-1]
    is_start = jnp.pad(is_start, [(0, 0), (1, 0)])  # the first token starts at 0 anyway
    return slots - jax.lax.cummax(jnp.where(is_start, slots, 0), axis=1)


def attend_by_head(
    q: Float[Array, "B T N H"],
    keys: Float[Array, "B K S H"] | Quantised,
    values: Float[Array, "B K S H"] | Quantised,
    index: Int[Array, "B K S"],
    pattern: Pattern,
    metadata: AttentionMetadata,
    channels: Int[Array, "B K 1 D"] | None = None,
    new_keys: Float[Array, "B K R H"] | None = None,
) -> Float[Array, "B T N H"]:
    """Computes attention over rotated keys whose tokens differ between key heads.

    Key heads are folded into rows: B x K rows of one key head and its G query heads. On a mesh each
    device does so with its own rows and heads.

    Args:
      q: unrotated queries.
      keys, values: of the tokens of each head, as arrays or as codes.
      index: order indices of these tokens; -1: there is none.
      pattern: the pattern of the layer.
      metadata: positions and order indices of the queries, and rotation.
      channels: numbers of the channels that `keys` [B, K, S, D] have; None: they have all.
      new_keys: all channels of the keys of the last R slots.
    """
    layout, arrays = metadata.layout, (q, keys, values, index, channels, new_keys)
    rotation, partials = metadata.rotation, list(metadata.extra_partials)
    of_rows = metadata.q_positions, metadata.q_index, metadata.q_segments
    plain = metadata.replace(layout=None, row_indices=None, keys_rotated=True, extra_partials=())

    def local(*arrays):
        return _attend_folded(*arrays, pattern, plain)

    if layout is None:
        return local(partials, *arrays, of_rows, rotation)
    rows = layout.rows if q.shape[0] % layout.size(layout.rows) == 0 else None
    heads = layout.heads if keys.shape[1] % layout.size(layout.heads) == 0 else None
    whole, by_row = PartitionSpec(), PartitionSpec(rows)
    of_rotation = by_row if rotation.inv_freq.ndim > 1 else whole
    of_queries, of_keys = PartitionSpec(rows, None, heads), PartitionSpec(rows, heads)
    return jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(of_queries, of_queries, *[of_keys] * 5, by_row, of_rotation),
        out_specs=of_queries,
        check_vma=False,
    )(partials, *arrays, of_rows, rotation)


def _attend_folded(
    partials, q, keys, values, index, channels, new_keys, of_rows, rotation, pattern, metadata
):
    """Computes `attend_by_head` on one device."""
    rows, length, heads, _ = q.shape
    kv_heads, slots = keys.shape[1:3]
    group = heads // kv_heads

    def fold_queries(x):  # [B, T, N, ...]
        x = x.reshape(rows, length, kv_heads, group, *x.shape[3:]).swapaxes(1, 2)
        return x.reshape(rows * kv_heads, length, group, *x.shape[4:])

    q, partials = jax.tree.map(fold_queries, (q, partials))

    def fold(x):
        if channels is None and isinstance(x, jax.Array):
            return FoldedHeads(x)
        return jax.tree.map(lambda part: part.reshape(rows * kv_heads, part.shape[2], 1, -1), x)

    keys, values, channels, new_keys = map(fold, (keys, values, channels, new_keys))
    index = index.reshape(rows * kv_heads, slots)

    def each_head(x):
        return None if x is None else jnp.repeat(x, kv_heads, axis=0)

    if rotation.inv_freq.ndim > 1:  # one for each row
        rotation = jax.tree.map(each_head, rotation)
    q_positions, q_index, q_segments = map(each_head, of_rows)
    metadata = metadata.replace(
        q_positions=q_positions,
        k_positions=index,
        rotation=rotation,
        q_index=q_index,
        k_index=index,
        q_segments=q_segments,
        k_segments=(index >= 0).astype(jnp.int32),
        extra_partials=partials,
    )
    if channels is None:
        out = pattern.attend(q, keys, values, metadata)
    else:
        out = _attend_by_channels(q, keys, values, channels, new_keys, pattern, metadata)
    out = out.reshape(rows, kv_heads, length, group, -1).swapaxes(1, 2)
    return out.reshape(rows, length, heads, -1)


def _attend_by_channels(
    q: Float[Array, "B T G H"],
    keys: Float[Array, "B S 1 D"],
    values: Float[Array, "B S 1 H"],
    channels: Int[Array, "B 1 1 D"],
    new_keys: Float[Array, "B R 1 H"],
    pattern: Pattern,
    metadata: AttentionMetadata,
) -> Float[Array, "B T G H"]:
    """Attends to some channels of the first keys, and to all channels of the last R ones."""
    whole = rotate_queries(q.astype(jnp.float32), metadata.q_positions, metadata.rotation)
    some = jnp.take_along_axis(whole, channels, axis=-1)
    some *= (keys.shape[-1] / q.shape[-1]) ** 0.5  # logits are divided by the root of D
    metadata = metadata.replace(rotation=no_rotation(), num_heads=q.shape[2])
    size = keys.shape[1]
    first = size - new_keys.shape[1]
    # Masked, not cut off, so that the first values are not copied.
    is_first = jnp.where(jnp.arange(size) < first, metadata.k_segments, 0)
    of_first = metadata.replace(k_segments=is_first)
    partials = [
        partial_attention(some.astype(q.dtype), keys, values, one, of_first)
        for one in pattern.passes(of_first)
    ]
    partials += metadata.extra_partials
    metadata = metadata.replace(
        k_positions=metadata.k_positions[:, first:],
        k_index=metadata.k_index[:, first:],
        k_segments=metadata.k_segments[:, first:],
        extra_partials=partials,
    )
    return pattern.attend(whole.astype(q.dtype), new_keys, values[:, first:], metadata)
