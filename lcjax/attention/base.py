"""The interface of attention patterns, and the partial attentions of which they are made.

A pattern is a list of passes. A pass defines the positions at which queries and keys are rotated,
and the visible keys. `partial_attention` computes one pass, and `pallas_kernels.merge` adds up
passes.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, NamedTuple

import draccus
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from lcjax.attention.relative import RelativeTerms
from lcjax.errors import InputError
from lcjax.rope.rotation import Rotation, no_rotation, rotate
from pallas_kernels import Alibi, Bias, Layout, Mask, causal, flash, merge, window

# How a model encodes positions: rotations, biases of logits, absolute embeddings.
POSITIONS = ("rope", "alibi", "t5", "transformer_xl", "deberta", "sinusoidal", "learned")


@dataclass(frozen=True)
class AttentionMetadata:
    """Positions, documents, rotation and kernel options of one attention call.

    A decoder layer builds it once for each call, in training and in decoding.

    An *order index* is the place of a token in its own document: 0, 1, 2, ... Padding and the other
    documents of a packed row are not counted. Masks test order indices, so the first tokens and the
    chunks of a method are those of each document.
    """

    q_positions: Num[Array, "B T"]  # positions of the rotation; integers or fractions
    k_positions: Num[Array, "B S"]
    _: KW_ONLY
    rotation: Rotation = field(default_factory=no_rotation)
    q_index: Int[Array, "*B T"] | None = None  # order indices [T] or [B, T]; None: 0, 1, 2, ...
    k_index: Int[Array, "*B S"] | None = None
    q_segments: Int[Array, "B T"] | None = None  # documents from 1, 0 is padding
    k_segments: Int[Array, "B S"] | None = None
    # Indices in the row of (queries [T], keys [S]); an entry is None for 0, 1, 2, ... Inside a
    # document their differences are those of order indices. None if slots are not in text order.
    row_indices: tuple[Int[Array, " T"] | None, Int[Array, " S"] | None] | None = None
    num_heads: int = 1  # query heads, for masks that differ between heads; `attend` sets it
    # Added to the logits, by the distance of order indices, or terms that depend on content, too
    bias: Bias | RelativeTerms | None = None
    soft_cap: float | None = None  # c: logits become c tanh(logit / c)
    keys_rotated: bool = False  # keys are already rotated to `Pattern.key_positions` (a cache)
    # Partials (out, lse) of the same queries over other keys, in one softmax with these keys.
    extra_partials: Sequence[tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]] = ()
    layout: Layout | None = None  # the mesh axes over which rows, heads and length are split
    implementation: str | None = None  # of `pallas_kernels.flash`; None chooses one

    def replace(self, **changes: Any) -> AttentionMetadata:
        return dataclasses.replace(self, **changes)

    def without_layout(self) -> AttentionMetadata:
        """Metadata for kernel calls without a layout: on a mesh XLA, which can partition them."""
        if self.layout is None:
            return self
        return self.replace(layout=None, implementation=self.implementation or "xla")

    @property
    def q_order(self) -> Int[Array, "*B T"]:
        """The order indices of queries as an array, [T] or [B, T]."""
        length = self.q_positions.shape[1]
        return jnp.arange(length, dtype=jnp.int32) if self.q_index is None else self.q_index

    @property
    def k_order(self) -> Int[Array, "*B S"]:
        """The order indices of keys as an array, [S] or [B, S]."""
        length = self.k_positions.shape[1]
        return jnp.arange(length, dtype=jnp.int32) if self.k_index is None else self.k_index

    def mask_indices(
        self, mask: Mask
    ) -> tuple[Int[Array, "*B T"] | None, Int[Array, "*B S"] | None]:
        """The indices of queries and keys that `mask` tests.

        They are order indices, or the indices in the row if the mask depends on differences: both
        give the same answer. Indices in a whole row are known at trace time, which keeps the tables
        of visible blocks static.
        """
        if self.row_indices is not None and mask.shift_invariant:
            return self.row_indices
        return self.q_index, self.k_index


class Pass(NamedTuple):
    """One partial attention: the positions of queries and keys, and the mask of visible keys."""

    q_positions: Num[Array, "B T"]
    k_positions: Num[Array, "B S"]
    mask: Mask  # over order indices, which keep counting where positions repeat or jump
    same_position: bool = False  # all keys are at one position, that of the first


def partial_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    attention_pass: Pass,
    metadata: AttentionMetadata,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
    """Computes one pass: rotates queries and keys, then attends to the keys of its mask.

    Args:
      q, k, v: unrotated queries and keys, and values. Keys with `metadata.keys_rotated` are already
        at the positions of the pass.
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
    """Rotates q, and k unless it is already rotated, to the positions of a pass.

    Without a pass, the positions are those of `metadata`.
    """
    positions, rotation = attention_pass or metadata, metadata.rotation
    with jax.named_scope("rope"):
        q = rotate_queries(q, positions.q_positions, rotation)
        if not metadata.keys_rotated:
            k = rotate(k, positions.k_positions, rotation.inv_freq, rotation.scale)
    return q, k


def rotate_queries(
    q: Float[Array, "B T N H"], positions: Num[Array, "B T"], rotation: Rotation
) -> Float[Array, "B T N H"]:
    """Rotates queries to `positions` and multiplies them by `rotation.query_scale`.

    The result is rounded once: JAX rounds a Python float to the dtype of its other operand before
    the product, so a bfloat16 row would have another factor alone than in a stacked rotation.
    """
    rotated = rotate(q.astype(jnp.float32), positions, rotation.inv_freq, rotation.scale)
    return (rotated * rotation.query_scale).astype(q.dtype)


def pass_bias(
    attention_pass: Pass, metadata: AttentionMetadata
) -> tuple[Bias | None, Float[Array, "B T N"] | None]:
    """The bias of a pass whose positions may differ from the true ones.

    If all keys of a pass are at one distance, or if the bias is linear in the distance and only the
    query moves, then all logits of a query change by the same number. The output stays as it is,
    and that number is added to the log-sum-exp.

    Returns:
      The bias by order indices, and what to add to the log-sum-exp; either may be None.

    Raises:
      TypeError: the bias of the moved positions has no such form.
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
    """Two passes: the last `size` keys at true distance, older keys of `far` at `distance`."""
    far = causal() & ~window(size) & far
    near = Pass(metadata.q_positions, metadata.k_positions, causal() & window(size))
    return [near, pass_at_distance(metadata, distance, far)]


def pass_at_distance(metadata: AttentionMetadata, distance: int, mask: Mask) -> Pass:
    """A pass over the keys of `mask`, all of them at the same `distance`."""
    q_positions = jnp.full_like(metadata.q_positions, distance)
    return Pass(q_positions, jnp.zeros_like(metadata.k_positions), mask, same_position=True)


@dataclass(frozen=True)
class Pattern(draccus.ChoiceRegistry, abc.ABC):
    """Which keys a query sees, and at which positions: the `model.pattern` config section.

    A pattern lists passes over disjoint sets of keys, and their results are merged by log-sum-exp.
    """

    # Small instances, as the fields of a config: what the tests of all patterns run.
    examples: ClassVar[tuple[dict, ...]] = ({},)
    # Whether the position of a key depends on the query. A cache must then keep unrotated keys.
    moves_keys: ClassVar[bool] = False
    # Whether `at_length` changes the rotation; a property if that depends on a field.
    depends_on_length: ClassVar[bool] = False
    # Whether the visible keys of a token depend on later tokens. Such a pattern can read a prompt,
    # but a loss under it is meaningless.
    prefill_only: ClassVar[bool] = False
    # Whether texts are read with landmark tokens between their own.
    has_landmarks: ClassVar[bool] = False

    def check_scores(self) -> None:
        """Raises an InputError if a loss under this pattern is meaningless (`prefill_only`)."""
        if self.prefill_only:
            kind = self.get_choice_name(type(self))
            raise InputError(
                f"model.pattern.type={kind} lets later tokens choose what earlier ones see, so a"
                " text has no score under it; it is for reading prompts"
            )

    @property
    def encodings(self) -> tuple[str, ...]:
        """The entries of POSITIONS with which the pattern works.

        By default all of them, or only rope if the pattern replaces `attend`: a pattern that moves
        tokens must move a bias too, and cannot move absolute embeddings.
        """
        return POSITIONS if type(self).attend is Pattern.attend else ("rope",)

    @property
    def is_position_based(self) -> bool:
        """Whether order indices alone decide visibility: tokens may be stored in any order."""
        return type(self).attend is Pattern.attend

    @abc.abstractmethod
    def passes(self, metadata: AttentionMetadata) -> list[Pass]:
        """The passes over the keys of a call; their masks are disjoint."""

    def key_positions(
        self, positions: Num[Array, "B S"], order: Int[Array, "*B S"]
    ) -> Num[Array, "B S"]:
        """The positions of keys that all queries share.

        A cache keeps keys rotated to these positions unless the pattern `moves_keys`. `passes`
        receives them as `k_positions`.

        Args:
          positions: true positions of the keys.
          order: order indices of the keys.
        """
        del order
        return positions

    def at_length(self, rotation: Rotation, length: int) -> Rotation:
        """The rotation of a request of `length` tokens, from the rope's rotation for that length.

        As in `Rope.frequencies`, the length counts the whole request, so that later queries agree
        with the keys that were rotated before them.
        """
        del length
        return rotation

    def cache_window(self) -> tuple[int, int] | None:
        """The numbers of keys that a new token may see: (first keys, last keys with its own).

        A cache with this many slots is enough for a text of any length. None: all keys.
        """
        return None

    def cache_state_shapes(self, slots: int, size: int) -> tuple[tuple[int, int], ...]:
        """Shapes of the state that the pattern keeps in a cache besides keys and values.

        Each layer has float32 arrays [B, N, *shape], zeros at first. `attend_with_state` reads and
        updates them. Only patterns that keep every key may have a state.

        Args:
          slots: keys in the cache.
          size: channels of a head.
        """
        return ()

    def attend_with_state(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B S K H"],
        v: Float[Array, "B S K Hv"],
        state: tuple[Float[Array, "B N _ _"], ...],
        metadata: AttentionMetadata,
    ) -> tuple[Float[Array, "B T N Hv"], tuple[Float[Array, "B N _ _"], ...]]:
        """`attend` over a cache whose rows hold one document each, for patterns with a state.

        Args:
          q, k, v, metadata: as in `attend`.
          state: arrays of `cache_state_shapes`.

        Returns:
          The output and the new state.
        """
        raise NotImplementedError(f"{type(self).__name__} keeps a state: define attend_with_state")

    def for_inference(self) -> Pattern:
        """The pattern with which a model that was trained under this one is evaluated."""
        return self

    def attend(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B S K H"],
        v: Float[Array, "B S K Hv"],
        metadata: AttentionMetadata,
    ) -> Float[Array, "B T N Hv"]:
        """Computes attention of q over k and v.

        Patterns whose visible keys depend on the data replace this method.

        Args:
          q, k, v: unrotated queries, keys, and values; K divides N. Keys may be rotated already
            (`metadata.keys_rotated`).
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
        """Raises an InputError for inputs that the pattern cannot use.

        These are a bias for a pattern that takes rope only, rotated keys for a pattern that moves
        keys, and extra partials for a pattern whose visible keys depend on the data.
        """
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
                "memory; use model.pattern.type=causal"
            )


def order_indices(segments: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """The place of every token in its own document, int32; a document is a run of equal values."""
    slots = jnp.arange(segments.shape[1], dtype=jnp.int32)
    is_start = segments[:, 1:] != segments[:, :-1]
    is_start = jnp.pad(is_start, [(0, 0), (1, 0)])  # the first token starts at 0 anyway
    return slots - jax.lax.cummax(jnp.where(is_start, slots, 0), axis=1)
