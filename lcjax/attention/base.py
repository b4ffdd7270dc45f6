"""The interface of attention patterns, and the partial attentions of which they are made.

A pattern is a list of passes. A pass says at which positions queries and keys are rotated and which
keys are visible. `partial_attention` computes one pass, and `pallas_kernels.merge` adds up passes.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import draccus
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from lcjax.errors import InputError
from lcjax.rope.rotation import Rotation, rotate
from pallas_kernels import Alibi, Bias, Layout, Mask, causal, flash, merge, window

# How a model encodes positions: rotations, biases of logits, absolute embeddings.
POSITIONS = ("rope", "alibi", "t5", "sinusoidal", "learned")


class Places(NamedTuple):
    """Positions, order indices and documents of the queries and keys of one call.

    An *order index* is the place of a token in its own document: 0, 1, 2, ... Padding and the other
    documents of a packed row are not counted. Masks test order indices, so the first tokens and the
    chunks of a method are those of each document.
    """

    q_positions: Num[Array, "B T"]  # positions of the rotation; integers or fractions
    k_positions: Num[Array, "B S"]
    q_index: Int[Array, "*B T"] | None = None  # order indices [T] or [B, T]; None: 0, 1, 2, ...
    k_index: Int[Array, "*B S"] | None = None
    q_segments: Int[Array, "B T"] | None = None  # documents from 1, 0 is padding
    k_segments: Int[Array, "B S"] | None = None
    # Places in the row of (queries [T], keys [S]); an entry is None for 0, 1, 2, ... Inside a
    # document they differ by as much as order indices. None where slots are not in text order.
    row: tuple[Int[Array, " T"] | None, Int[Array, " S"] | None] | None = None
    heads: int = 1  # query heads, for masks that differ between heads
    bias: Bias | None = None  # added to the logits, by the distance of order indices
    layout: Layout | None = None  # the mesh axes over which rows, heads and length are split

    def partitionable(self, implementation: str | None) -> str | None:
        """The implementation for calls without a layout: XLA on a mesh, which it can partition."""
        return implementation if self.layout is None else implementation or "xla"

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


class Pass(NamedTuple):
    """One partial attention: the positions of queries and keys, and the mask of visible keys."""

    q_positions: Num[Array, "B T"]
    k_positions: Num[Array, "B S"]
    mask: Mask  # over order indices, which keep counting where positions repeat or jump
    together: bool = False  # all keys are at one position, that of the first


def partial_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    attention_pass: Pass,
    rotation: Rotation,
    places: Places,
    *,
    keys_rotated: bool = False,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
    """Computes one pass: rotates queries and keys, then attends to the keys of its mask.

    Args:
      q, k, v: unrotated queries and keys, and values.
      attention_pass: positions of queries and keys, and the mask.
      rotation: frequencies of the rotation.
      places: order indices, segments, bias and layout of the call.
      keys_rotated: `k` is already rotated to the positions of the pass.
      implementation: of `pallas_kernels.flash`.

    Returns:
      The output, and the float32 log-sum-exp of the logits.
    """
    q, k = rotate_qk(q, k, attention_pass, rotation, keys_rotated=keys_rotated)
    q_index, k_index = _mask_indices(attention_pass, places)
    bias, lse_shift = pass_bias(attention_pass, places)
    with jax.named_scope("attention"):
        out, lse = flash(
            q,
            k,
            v,
            attention_pass.mask,
            q_index=q_index,
            k_index=k_index,
            q_segments=places.q_segments,
            k_segments=places.k_segments,
            bias=bias,
            layout=places.layout,
            implementation=implementation,
        )
    return out, lse if lse_shift is None else lse + lse_shift


def rotate_qk(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    positions: Pass | Places,
    rotation: Rotation,
    *,
    keys_rotated: bool,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B S K H"]]:
    """Rotates q and k to the positions of a pass or of a call; `keys_rotated` leaves k as it is."""
    with jax.named_scope("rope"):
        q = rotate_queries(q, positions.q_positions, rotation)
        if not keys_rotated:
            k = rotate(k, positions.k_positions, rotation.inv_freq, rotation.scale)
    return q, k


def rotate_queries(
    q: Float[Array, "B T N H"], positions: Num[Array, "B T"], rotation: Rotation
) -> Float[Array, "B T N H"]:
    """Rotates queries to `positions` and multiplies them by `rotation.query_scale`."""
    rotated = rotate(q, positions, rotation.inv_freq, rotation.scale)
    return (rotated * rotation.query_scale).astype(q.dtype)


def pass_bias(
    attention_pass: Pass, places: Places
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
    bias, keys_unmoved = places.bias, attention_pass.k_positions is places.k_positions
    if bias is None or (keys_unmoved and attention_pass.q_positions is places.q_positions):
        return bias, None
    if attention_pass.together:
        first_key = attention_pass.k_positions[:, :1]
        logits = bias.logits(attention_pass.q_positions, first_key)  # [B, N, T, 1]
        return None, jnp.swapaxes(logits[..., 0], 1, 2)
    if not (keys_unmoved and isinstance(bias, Alibi)):
        kind = type(bias).__name__
        raise TypeError(f"no rule moves {kind} to the positions of {attention_pass!r}")
    reduction = places.q_positions - attention_pass.q_positions  # of the distance, [B, T]
    return bias, bias.slopes.astype(jnp.float32) * reduction.astype(jnp.float32)[..., None]


def _mask_indices(
    attention_pass: Pass, places: Places
) -> tuple[Int[Array, "*B T"] | None, Int[Array, "*B S"] | None]:
    """The indices that the mask tests: order indices, or equivalent places in the row.

    A mask that depends on differences gives the same answer for both. Places in a whole row are
    known at trace time, which keeps the tables of visible blocks static.
    """
    if places.row is not None and attention_pass.mask.shift_invariant:
        return places.row
    return places.q_index, places.k_index


def near_and_far(places: Places, size: int, distance: int, far: Mask) -> list[Pass]:
    """Two passes: the last `size` keys at true distance, older keys of `far` at `distance`."""
    far = causal() & ~window(size) & far
    near = Pass(places.q_positions, places.k_positions, causal() & window(size))
    return [near, pass_at_distance(places, distance, far)]


def pass_at_distance(places: Places, distance: int, mask: Mask) -> Pass:
    """A pass over the keys of `mask`, all of them at the same `distance`."""
    q_positions = jnp.full_like(places.q_positions, distance)
    return Pass(q_positions, jnp.zeros_like(places.k_positions), mask, together=True)


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
    def passes(self, places: Places) -> list[Pass]:
        """The passes of the queries and keys at `places`; their masks are disjoint."""

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
        rotation: Rotation,
        places: Places,
        **options,
    ) -> tuple[Float[Array, "B T N Hv"], tuple[Float[Array, "B N _ _"], ...]]:
        """`attend` over a cache whose rows hold one document each.

        Args:
          q, k, v, rotation, places, **options: as in `attend`.
          state: arrays of `cache_state_shapes`.

        Returns:
          The output and the new state.
        """
        return self.attend(q, k, v, rotation, places, **options), state

    def for_inference(self) -> Pattern:
        """The pattern with which a model that was trained under this one is evaluated."""
        return self

    def attend(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B S K H"],
        v: Float[Array, "B S K Hv"],
        rotation: Rotation,
        places: Places,
        *,
        keys_rotated: bool = False,
        extra_partials: Sequence[tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]] = (),
        implementation: str | None = None,
    ) -> Float[Array, "B T N Hv"]:
        """Attention of unrotated q over k and v; arguments as in `lcjax.attention.attend`.

        Patterns whose visible keys depend on the data replace this method.

        Raises:
          InputError: `keys_rotated` with a pattern that moves keys.
          TypeError: a pass moves keys, but the pattern does not set `moves_keys`.
        """
        self.check_unrotated(keys_rotated)
        places = places._replace(k_positions=self.key_positions(places.k_positions, places.k_order))
        passes = self.passes(places)
        if not self.moves_keys and any(p.k_positions is not places.k_positions for p in passes):
            raise TypeError(f"{type(self).__name__} moves keys and must set moves_keys = True")
        partials = [
            partial_attention(
                q, k, v, attention_pass, rotation, places,
                keys_rotated=keys_rotated, implementation=implementation,
            )
            for attention_pass in passes
        ]  # fmt: skip
        partials += extra_partials
        out, _ = partials[0] if len(partials) == 1 else merge(partials)
        return out

    def check_unrotated(self, keys_rotated: bool) -> None:
        """Raises an InputError for rotated keys if the pattern moves keys."""
        if keys_rotated and self.moves_keys:
            raise InputError(
                f"pattern {self!r} moves keys to other positions, so the cache must keep "
                "unrotated keys"
            )
