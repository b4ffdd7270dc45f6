"""What a pattern is: where queries and keys stand, and who sees whom."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import draccus
import jax
import jax.numpy as jnp

from lcjax.attention.partial import partial_attention
from lcjax.errors import InputError
from lcjax.rope.base import Rotation
from pallas_kernels import Bias, Layout, Mask, merge

# How a model tells its tokens apart by place: rotations, biases of logits, absolute embeddings.
POSITIONS = ("rope", "alibi", "t5", "sinusoidal", "learned")


class Places(NamedTuple):
    """Where the queries and keys of one call stand.

    An *order index* is the place of a token in its own document: 0, 1, 2, ... whatever else is
    packed in the row, padding not counted. Masks test order indices, so what a method says of the
    first tokens, or of chunks, is said of each document.
    """

    q_positions: jax.Array  # [B, T], what the rotation uses; int or fractional
    k_positions: jax.Array  # [B, S]
    q_index: jax.Array | None = None  # order indices int32 [T] or [B, T]; None is 0, 1, 2, ...
    k_index: jax.Array | None = None  # [S] or [B, S]
    q_segments: jax.Array | None = None  # int32 [B, T], documents from 1, 0 is padding
    k_segments: jax.Array | None = None  # [B, S]
    # (queries [T], keys [S]), each None for 0, 1, 2, ...: places in the row, whose differences are
    # those of the order indices inside a document. None where slots do not follow the text.
    row: tuple[jax.Array | None, jax.Array | None] | None = None
    heads: int = 1  # query heads, for masks that differ between them
    bias: Bias | None = None  # of the logits, by the distance of order indices
    layout: Layout | None = None  # over which axes of a mesh rows, heads and length are split

    def unsplit(self, implementation: str | None) -> str | None:
        """The implementation of attention that takes no layout: what the compiler can split."""
        return implementation if self.layout is None else implementation or "xla"

    @property
    def q_order(self) -> jax.Array:
        """The order indices of queries as an array, [T] or [B, T]."""
        length = self.q_positions.shape[1]
        return jnp.arange(length, dtype=jnp.int32) if self.q_index is None else self.q_index

    @property
    def k_order(self) -> jax.Array:
        """The order indices of keys as an array, [S] or [B, S]."""
        length = self.k_positions.shape[1]
        return jnp.arange(length, dtype=jnp.int32) if self.k_index is None else self.k_index


class Pass(NamedTuple):
    """One partial attention: queries and keys rotated to these positions, the keys of `mask`."""

    q_positions: jax.Array  # int or float, [B, T]
    k_positions: jax.Array  # int or float, [B, S]
    mask: Mask  # over order indices, which keep counting where positions repeat or jump
    together: bool = False  # all keys stand at one position, that of the first


@dataclass(frozen=True)
class Pattern(draccus.ChoiceRegistry, abc.ABC):
    """Which keys a query sees, and at which positions: the `model.pattern` config section.

    A pattern lists passes over disjoint sets of keys. Their results are merged by log-sum-exp, so
    a method says what is seen and from where, never how it is computed.
    """

    # Small instances, as the fields of a config: what the tests of all patterns run.
    examples: ClassVar[tuple[dict, ...]] = ({},)
    # Whether a key stands at different positions for different queries in a way that only another
    # rotation of the key can express: then a cache has to keep unrotated keys.
    moves_keys: ClassVar[bool] = False
    # Whether `at_length` changes anything; a property where that is up to a field.
    depends_on_length: ClassVar[bool] = False

    # Whether what an early token sees depends on later ones: then a prompt can be read under the
    # pattern, but no loss means anything.
    prefill_only: ClassVar[bool] = False

    def check_scores(self) -> None:
        """Refuses to score texts where no loss means anything."""
        if self.prefill_only:
            kind = self.get_choice_name(type(self))
            raise InputError(
                f"model.pattern.type={kind} lets later tokens choose what earlier ones see, so a"
                " text has no score under it; it is for reading prompts"
            )

    @property
    def encodings(self) -> tuple[str, ...]:
        """The ones of POSITIONS that the pattern is defined for.

        All of them, unless it moves tokens to other positions: a bias has to be moved as well, and
        what was added to embeddings cannot be.
        """
        return POSITIONS if type(self).attend is Pattern.attend else ("rope",)

    @property
    def any_order(self) -> bool:
        """Whether tokens and keys may lie in any order, as long as their order indices say it."""
        return type(self).attend is Pattern.attend

    @abc.abstractmethod
    def passes(self, places: Places) -> list[Pass]:
        """The passes of queries and keys at `places`; their masks are disjoint."""

    def key_positions(self, positions: jax.Array, order: jax.Array) -> jax.Array:
        """Where keys at `positions` [B, S] with order indices [S] or [B, S] stand for all queries.

        A cache keeps keys rotated there unless the pattern `moves_keys`; `passes` is given it as
        `k_positions`.
        """
        del order
        return positions

    def at_length(self, rotation: Rotation, length: int) -> Rotation:
        """The rotation of a request of `length` tokens, made of the rope's own for that length.

        As in `Rope.frequencies`, the length counts the whole request and is an argument: a step
        agrees with the keys that were rotated before it.
        """
        del length
        return rotation

    def kept(self) -> tuple[int, int] | None:
        """(sinks, recent): the first and last keys that a new token may see; None is all of them.

        `recent` counts the new token. A cache then needs no more room than that, however long the
        text grows.
        """
        return None

    def notes(self, slots: int, size: int) -> tuple[tuple[int, int], ...]:
        """What a cache of `slots` keys of `size` channels keeps besides keys and values.

        The last two axes of float32 arrays [B, N, .., ..] for every layer, zeros at first. Only for
        patterns that keep every key; `attend_noting` is given the arrays.
        """
        return ()

    def attend_noting(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        notes: tuple[jax.Array, ...],
        rotation: Rotation,
        places: Places,
        **options,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """`attend` over a cache, and its `notes` with what these queries add to them.

        Rows of a cache hold one document each.
        """
        return self.attend(q, k, v, rotation, places, **options), notes

    def for_inference(self) -> Pattern:
        """The pattern with which a model that was trained under this one is evaluated."""
        return self

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        rotation: Rotation,
        places: Places,
        *,
        keys_rotated: bool = False,
        more: Sequence[tuple[jax.Array, jax.Array]] = (),
        implementation: str | None = None,
    ) -> jax.Array:
        """Attention of unrotated q [B, T, N, H] over k [B, S, K, H], v [B, S, K, Hv].

        Patterns whose keys depend on the data replace it; arguments as in `lcjax.attention.attend`.
        """
        self.check_unrotated(keys_rotated)
        places = places._replace(k_positions=self.key_positions(places.k_positions, places.k_order))
        steps = self.passes(places)
        if not self.moves_keys and any(s.k_positions is not places.k_positions for s in steps):
            raise TypeError(
                f"{type(self).__name__} moves keys and has to say so: moves_keys = True"
            )
        partials = [
            partial_attention(
                q, k, v, step, rotation, places,
                keys_rotated=keys_rotated, implementation=implementation,
            )
            for step in steps
        ]  # fmt: skip
        partials += more
        out, _ = partials[0] if len(partials) == 1 else merge(partials)
        return out

    def check_unrotated(self, keys_rotated: bool) -> None:
        """Refuses rotated keys where they have to be moved."""
        if keys_rotated and self.moves_keys:
            raise InputError(
                f"pattern {self!r} moves keys to other positions, so the cache must keep "
                "unrotated keys"
            )
