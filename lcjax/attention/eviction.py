"""Cache policies: a layer keeps the tokens with the greatest scores, chosen by each key head.

Kept keys stay rotated to their true positions, so a later query sees them at their true distances.
Heads of a row hold different tokens, and each slot has its own order index. Attention therefore
folds key heads into rows: B x K rows of one key head and its G query heads.
"""

from __future__ import annotations

import abc
import dataclasses
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import draccus
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from lcjax.attention.base import Pattern
from lcjax.attention.cache import (
    Arrays,
    FullCache,
    LayerCache,
    LayerShape,
    Tokens,
    View,
    whole_blocks,
    write_tokens,
)
from lcjax.errors import InputError, PositiveInt, check_fields


class Candidates(NamedTuple):
    """The slots of a layer, from which a policy chooses."""

    keys: Float[Array, "B K S H"]  # rotated to their positions, in the dtype of the cache
    values: Float[Array, "B K S H"]
    index: Int[Array, "B K S"]  # order indices of the tokens; -1: an empty slot


@dataclass(frozen=True)
class CachePolicy(draccus.ChoiceRegistry, abc.ABC):
    """Which tokens a layer keeps: the `model.cache` config section.

    Every key head keeps the `tokens` tokens with the greatest scores; of equal scores, those of
    later tokens. By default a prompt is read under full attention and cut at its end. With `chunk`,
    the text is read in chunks and cut after each of them, so memory does not grow with the text: a
    chunk sees the tokens kept before it and its own. Both cut again after every `every` generated
    tokens. What is evicted stays evicted. Layers whose pattern needs a bounded part of the text are
    left alone.
    """

    # Fields of small instances, on which the tests of all policies run.
    examples: ClassVar[tuple[dict, ...]] = ({},)

    tokens: PositiveInt = 1024  # tokens that each key head keeps
    # Tokens read between two cuts; null: a prompt is cut at its end only
    chunk: PositiveInt | None = None
    every: PositiveInt = 512  # generated tokens between two cuts

    def __post_init__(self):
        check_fields("model.cache", self)

    @abc.abstractmethod
    def score(self, slots: Candidates) -> Float[Array, "B K S"]:
        """Returns the scores of tokens; the values for empty slots do not matter."""

    def check(self, pattern: Pattern) -> None:
        """Raises an InputError if a layer under `pattern` cannot evict tokens."""
        pattern = pattern.for_inference()
        if pattern.layer_cache.keeps_all and not pattern.allows_eviction:
            kind = Pattern.get_choice_name(type(pattern))
            raise InputError(
                f"model.cache.type={self.get_choice_name(type(self))} is not defined for layers"
                f" under model.pattern.type={kind}; use type causal, or leave model.cache out"
            )

    def layer_cache(self, pattern: Pattern) -> LayerCache:
        """Returns the cache of a layer under `pattern`."""
        needed = pattern.layer_cache
        return Evicting(self) if needed.keeps_all else needed


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Fill:
    """How full the layers' caches are."""

    used: Int[Array, ""]  # slots in use, with padding and what a cut leaves empty
    cuts_first: Bool[Array, ""]  # whether this call evicts tokens before it writes new ones


@dataclass(frozen=True)
class Evicting(FullCache):
    """Keys and values of the tokens that a policy keeps, and of the tokens since the last cut.

    `order` [B, K, S, 1] is the order index of each slot's token plus 1; 0 is an empty slot. Slots
    that hold tokens are in text order.
    """

    keeps_all: ClassVar[bool] = False
    holds_keys_only: ClassVar[bool] = False

    policy: CachePolicy
    slots: int = 0  # of a fitted cache
    longest: int = 0  # tokens that may be read at once
    is_prompt: bool = False  # whether nothing is evicted before the prompt ends

    @property
    def acts_on_prompt(self) -> bool:
        return self.policy.chunk is None

    @property
    def acts_on_chunk(self) -> bool:
        return self.policy.chunk is not None

    def fit(self, length: int, chunk: int | None) -> tuple[LayerCache, int]:
        if not self.rotated:
            raise InputError(
                "model.cache: exact=True rotates keys again while the text grows, and a cache that"
                " evicts tokens keeps them rotated; leave one of the two out"
            )
        if length <= self.policy.tokens:
            return FullCache(), length
        if self.acts_on_prompt:
            return dataclasses.replace(self, slots=length, longest=length, is_prompt=True), length
        longest = length if chunk is None else min(chunk, length)
        fitted = self._between_cuts(length, longest)
        return fitted, fitted.slots

    def _between_cuts(self, new: int, longest: int) -> Evicting:
        """Returns the cache that evicts while `new` tokens are read, at most `longest` at once.

        A cut always leaves `tokens` slots in use, also if there are fewer tokens, so that the next
        one does not depend on the padding of a row.
        """
        recent = min(new, max(longest, self.policy.every))
        slots = whole_blocks(self.policy.tokens + recent)
        return dataclasses.replace(self, slots=slots, longest=longest, is_prompt=False)

    def num_visible(self, length: int, tokens: int) -> int:
        return min(length, self.policy.tokens + max(tokens, self.policy.every))

    def arrays(self, layer: LayerShape, slots: int) -> dict[str, jax.ShapeDtypeStruct]:
        order = jax.ShapeDtypeStruct((layer.num_kv_heads, slots, 1), jnp.int32)
        return super().arrays(layer, slots) | {"order": order}

    def shared(self, rows: int, slots: int) -> _Fill:
        used = jax.ShapeDtypeStruct((), jnp.int32)
        return _Fill(used, jax.ShapeDtypeStruct((), jnp.bool_))

    def reserve(self, slots: _Fill, new: Tokens, filled: Int[Array, ""]) -> View:
        length = new.index.shape[1]
        if length > self.longest:
            raise InputError(
                f"{length} tokens at once do not fit a cache of {self.slots} slots that evicts"
                f" tokens; read at most {self.longest}, or create it with chunk={length}"
            )
        start, cuts_first = slots.used, jnp.zeros((), bool)
        if not self.is_prompt:
            most = self.policy.tokens + self.policy.every if length == 1 else self.slots
            cuts_first = start + length > min(most, self.slots)
            start = jnp.where(cuts_first, self.policy.tokens, start)
        used = start + length
        if self._cuts_after(length):
            used = jnp.full_like(used, self.policy.tokens)
        return View(_Fill(used, cuts_first), new, start, None, self)

    def _cuts_after(self, length: int) -> bool:
        """Returns whether a call with `length` tokens is a chunk that is cut."""
        return self.acts_on_chunk and length > 1

    def attend(self, arrays, q, k, v, pattern, view, metadata):
        if not self.is_prompt:
            arrays = jax.lax.cond(view.slots.cuts_first, self.cut, dict, arrays)
        keys, values = self.append(arrays, k, v, pattern, view, metadata)
        order = jnp.where(view.new.segments != 0, view.new.index + 1, 0)[:, :, None, None]
        order = write_tokens(arrays["order"], jnp.broadcast_to(order, (*k.shape[:3], 1)), view)
        arrays = {"keys": keys, "values": values, "order": order}
        out = _attend_by_head(q, arrays, pattern, metadata)
        return out, self.cut(arrays) if self._cuts_after(q.shape[1]) else arrays

    def key_metadata(self, view):
        return {}  # the tokens of a slot differ between layers and heads

    def cut(self, arrays: Arrays) -> Arrays:
        """Keeps the tokens with the greatest scores, in the first slots and in text order."""
        index, slots = arrays["order"][..., 0] - 1, arrays["order"].shape[2]
        scores = self.policy.score(Candidates(arrays["keys"], arrays["values"], index))
        # Any token comes before an empty slot, and a finite score before NaN.
        low = jnp.finfo(jnp.float32).min
        scores = jnp.nan_to_num(scores.astype(jnp.float32), nan=low, posinf=jnp.inf, neginf=low)
        scores = jnp.where(index >= 0, scores, -jnp.inf)
        # Of equal scores, `top_k` takes the first ones.
        kept = slots - 1 - jax.lax.top_k(scores[..., ::-1], self.policy.tokens)[1]
        kept = jnp.sort(kept, axis=-1)[..., None]

        gathered = jax.tree.map(lambda x: jnp.take_along_axis(x, kept, axis=2), arrays)
        return _resize(gathered, slots)

    def end_prompt(self, arrays, slots, new, chunk):
        if not self.acts_on_prompt:
            return self, arrays, slots
        after = self._between_cuts(new, min(chunk, new))
        cut = jax.vmap(self.cut) if arrays["order"].ndim > 4 else self.cut
        used = jnp.full_like(slots.used, self.policy.tokens)
        return after, _resize(cut(arrays), after.slots), dataclasses.replace(slots, used=used)


def _resize(arrays: Arrays, slots: int) -> Arrays:
    """Removes the last slots of arrays [.., S, H], or adds empty ones."""

    def resize(x):
        size = x.shape[-2]
        if slots <= size:
            return x[..., :slots, :]
        return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, slots - size), (0, 0)])

    return jax.tree.map(resize, arrays)


def _attend_by_head(
    q: Float[Array, "B T N H"], arrays: Arrays, pattern: Pattern, metadata
) -> Float[Array, "B T N H"]:
    """Computes attention over keys whose tokens differ between key heads."""
    keys, values, order = arrays["keys"], arrays["values"], arrays["order"]
    rows, length, heads, size = q.shape
    kv_heads, slots = keys.shape[1:3]
    group = heads // kv_heads
    q = q.reshape(rows, length, kv_heads, group, size).swapaxes(1, 2)
    q = q.reshape(rows * kv_heads, length, group, size)
    keys, values = (x.reshape(rows * kv_heads, slots, 1, -1) for x in (keys, values))
    index = order.reshape(rows * kv_heads, slots) - 1

    def each_head(x):
        return jnp.repeat(x, kv_heads, axis=0)

    rotation = metadata.rotation
    if rotation.inv_freq.ndim > 1:  # one for each row
        rotation = jax.tree.map(each_head, rotation)
    metadata = metadata.without_layout().replace(
        q_positions=each_head(metadata.q_positions),
        k_positions=index,
        rotation=rotation,
        q_index=each_head(metadata.q_index),
        k_index=index,
        q_segments=each_head(metadata.q_segments),
        k_segments=(index >= 0).astype(jnp.int32),
        row_indices=None,
        keys_rotated=True,
    )
    out = pattern.attend(q, keys, values, metadata)
    out = out.reshape(rows, kv_heads, length, group, -1).swapaxes(1, 2)
    return out.reshape(rows, length, heads, -1)
