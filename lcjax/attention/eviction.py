"""Cache policies: a layer keeps the tokens with the greatest scores, chosen by each key head.

A `CachePolicy` says how many tokens stay, and scores them; `lcjax.attention.policies` has the
published ones. `Evicting` is the layer cache that all policies share. Kept keys stay rotated to
their true positions, so a later query sees them at their true distances, unless `positions` moves
them together. Heads of a row hold different tokens, and each slot has its own order index.
Attention therefore folds key heads into rows: B x K rows of one key head and its G query heads.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from lcjax.attention.base import attend_by_head, rotate_queries
from lcjax.attention.budgets import (
    Critical,
    HeadBudget,
    LayerBudget,
    TextParts,
    Threshold,
    first_of_parts,
    in_spans,
    part_budgets,
    value_norms,
)
from lcjax.attention.cache import (
    Arrays,
    FullCache,
    LayerCache,
    LayerShape,
    Prompt,
    Tokens,
    View,
    resize_slots,
    whole_blocks,
    write_tokens,
)
from lcjax.attention.cache_method import CacheMethod
from lcjax.attention.cache_storage import Exact, Storage
from lcjax.attention.candidates import Candidates, Seen, on_each_device, turn_by_head
from lcjax.attention.channels import Channels, restore_channels, take_channels
from lcjax.attention.merging import Merging
from lcjax.errors import InputError, Interval, OneOf, PositiveInt
from lcjax.rope import Rotation


class Reading(NamedTuple):
    """Tokens that a model reads after a text, without keeping them, to score tokens of the text."""

    ids: Sequence[int]
    start: int  # order indices of the tokens of the text to which it refers
    stop: int


@dataclass(frozen=True)
class CachePolicy(CacheMethod):
    """Which tokens a layer keeps: a `model.cache` that evicts the others.

    Every key head keeps the tokens with the greatest scores; of equal scores, those of later
    tokens. By default a prompt is read under full attention and cut at its end. With `chunk`, the
    text is read in chunks and cut after each of them, so memory does not grow with the text if
    `tokens` is set: a chunk sees the tokens kept before it and its own. Both cut again after every
    `every` generated tokens. What is evicted stays evicted. Layers whose pattern needs a bounded
    part of the text are left alone.
    """

    examples: ClassVar[tuple[dict, ...]] = ({"tokens": 32},)
    evicts: ClassVar[bool] = True
    # Whether a part of `part` tokens is scored as if it were the whole text; for policies without
    # arrays of their own
    scores_part: ClassVar[bool] = False
    scores_attention: ClassVar[bool] = False  # whether scores are weights of attention, at least 0
    # Names of arrays [B, K, S, 1] float32 with a number for each slot, which moves with its token.
    slot_state: ClassVar[tuple[str, ...]] = ()
    # How much stays: a number of tokens for each key head, all but a share of the tokens read, or
    # the tokens of great scores, however many they are
    tokens: PositiveInt | None = None
    ratio: Annotated[float, Interval(least=0, below=1)] | None = None  # the share that is evicted
    threshold: Threshold | None = None  # evicts what leaves a window with a low score (DMS)
    # Tokens read between two cuts; null: a prompt is cut at its end only
    chunk: PositiveInt | None = None
    every: PositiveInt = 512  # generated tokens between two cuts
    layers: LayerBudget | None = None  # how layers share what stays; null: equally
    heads: HeadBudget | None = None  # how the key heads of a layer share it; null: equally
    critical: Critical | None = None  # weights scores by values in a second stage (CriticalKV)
    # Tokens that stay or go together, the same ones in all heads (ChunkKV); null: each on its own
    span: PositiveInt | None = None
    # Tokens of a part of the text, each of which keeps its share of ratio; null: it has one part
    part: PositiveInt | None = None
    # Where kept tokens stand: at their positions in the text, or at 0, 1, 2, ... and the next token
    # behind them (StreamingLLM, section 3.2; KeyRerotation of kvpress)
    positions: Annotated[str, OneOf(("text", "consecutive"))] = "text"
    merge: Merging | None = None  # adds values of evicted tokens to those that stay
    channels: Channels | None = None  # of keys, that are dropped at the end of a prompt (ThinK)
    # In which form they are kept. Scores are those of the keys and values that attention reads.
    storage: Storage = Exact()

    def __post_init__(self):
        super().__post_init__()
        budgets = self.tokens, self.ratio, self.threshold
        if sum(budget is not None for budget in budgets) != 1:
            kind = self.get_choice_name(type(self))
            settings = [f"{name}={getattr(self, name)}" for name in ("tokens", "ratio", "threshold")
                     if getattr(self, name) is not None]  # fmt: skip
            has = f" and has {' and '.join(settings)}" if settings else ""
            raise InputError(
                f"model.cache.type={kind} needs one of tokens, a number that each key head keeps,"
                f" ratio, the share that it evicts, and threshold, the score that tokens need{has}"
            )
        if self.threshold is not None:
            self._check_alone("threshold", "layers", "heads", "critical", "span", "part")
            if self.positions == "consecutive":
                raise InputError(
                    "model.cache.positions=consecutive needs heads that keep equally many tokens,"
                    " and threshold keeps different numbers; leave one of the two out"
                )
        if self.tokens is not None and self.tokens < self.protected:
            raise InputError(
                f"model.cache keeps the last {self.protected} tokens in any case, more than tokens="
                f"{self.tokens}; give more tokens, or a smaller window (window, recent)"
            )
        if self.layers is not None:
            self._check_layers()
        if self.heads is not None and self.heads.needs_attention and not self.scores_attention:
            kind = self.get_choice_name(type(self))
            raise InputError(
                f"model.cache.heads.normalized=True weights heads by sums of attention, and type="
                f"{kind} has other scores; leave normalized out, or use snapkv"
            )
        if self.span is not None and (self.heads or self.critical):
            other = "heads" if self.heads else "critical"
            raise InputError(
                f"model.cache.{other} chooses tokens for each head, and span keeps the same tokens"
                " in all heads; leave one of the two out"
            )
        if self.part is not None:
            self._check_part()
        if self.chunk is not None and not self.cuts_text:
            kind = self.get_choice_name(type(self))
            raise InputError(
                f"model.cache.chunk={self.chunk} evicts tokens while a text is read, and"
                f" type={kind} with these heads does so at the end of a prompt; leave chunk out, or"
                " choose another type or model.cache.heads"
            )
        if self.layers is not None and self.heads is not None and self.heads.across_layers:
            raise InputError(
                "model.cache.heads of type across_layers divides what stays among layers, too;"
                " leave model.cache.layers out"
            )
        if self.positions == "consecutive" and (self.layers or self.heads):
            other = "layers" if self.layers else "heads"
            raise InputError(
                "model.cache.positions=consecutive gives the next token one position in all layers"
                f" and heads, so they keep equally many; leave model.cache.{other} out"
            )

        self._check_storage()
        if self.channels is not None:
            self._check_channels()
        if self.merge is not None:
            self._check_merge()

    def _check_part(self) -> None:
        """Raises an InputError if parts have no share, or no choice."""
        if self.ratio is None:
            raise InputError(
                f"model.cache.part={self.part} gives each part of a text its share of ratio; set"
                " ratio in place of tokens, or leave part out"
            )
        if self.span is not None:
            raise InputError(
                f"model.cache.span={self.span} chooses spans of the whole text, and part="
                f"{self.part} tokens of each part; leave one of the two out"
            )

    def _check_layers(self) -> None:
        """Raises an InputError if fields beside `layers` would have no effect."""
        if self.span is not None:
            raise InputError(
                f"model.cache.span={self.span} keeps equally many spans in all layers; leave one of"
                " span and model.cache.layers out"
            )
        if self.tokens is not None and self.layers.replaces_ratio:
            raise InputError(
                f"model.cache.tokens={self.tokens} has no effect beside model.cache.layers.ratios,"
                " which are shares; set model.cache.ratio in place of tokens"
            )

    def _check_storage(self) -> None:
        """Raises an InputError if the policy cannot move what is stored."""
        name = Storage.get_choice_name(type(self.storage))
        if not self.storage.codes_tokens:
            raise InputError(
                f"model.cache.storage.type={name} codes several tokens together, of which a policy"
                " may evict some; use type int8, fp8 or turboquant"
            )
        if self.positions == "consecutive" and not self.storage.is_exact:
            raise InputError(
                "model.cache.positions=consecutive turns the keys that stay after every cut, and"
                f" storage type {name} would round them each time; use positions=text"
            )

    def _check_channels(self) -> None:
        """Raises an InputError if a field is set with which channels of keys cannot be dropped."""
        for name, has_no_form, reason in (
            ("threshold", self.threshold is not None, "leaves tokens in their slots"),
            ("chunk", self.chunk is not None, "cuts a text before its last queries are known"),
            ("positions", self.positions != "text", "turns keys, which needs all channels"),
            ("storage", not self.storage.is_exact, "codes all channels of a key together"),
        ):
            if has_no_form:
                raise InputError(
                    f"model.cache.{name}={getattr(self, name)} {reason}, and channels drops some of"
                    f" them at the end of a prompt; leave {name} or channels out"
                )

    def _check_merge(self) -> None:
        """Raises an InputError if a field is set with which values cannot be merged."""
        for name, has_no_form, reason in (
            ("threshold", self.threshold is not None, "chooses no survivors"),
            ("critical", self.critical is not None, "scores values as they were computed"),
            ("storage", not self.storage.is_exact, "would round values again at every cut"),
        ):
            if has_no_form:
                raise InputError(
                    f"model.cache.{name}={getattr(self, name)} {reason}, and merge changes the"
                    f" values of survivors; leave {name} or merge out"
                )

    def _check_alone(self, name: str, *others: str) -> None:
        """Raises an InputError if a way to divide what stays is set beside the field `name`."""
        for other in others:
            if getattr(self, other) is not None:
                raise InputError(
                    f"model.cache.{other} divides what stays, and {name} leaves nothing to divide;"
                    f" leave {other} out"
                )

    @property
    def differs_by_layer(self) -> bool:
        """Whether layers keep different numbers of tokens, or score the same keys differently."""
        return self.layers is not None or (self.heads is not None and self.heads.differs_by_layer)

    @property
    def cuts_text(self) -> bool:
        """Whether tokens are evicted while a text is read by chunks or generated.

        Otherwise they are evicted at the end of a prompt only, and those that follow it stay.
        """
        return not self.reads_again and not (self.heads and self.heads.across_layers)

    @property
    def reads_output(self) -> bool:
        """Whether `observe` needs the output projection and the norms of inputs."""
        return False

    @property
    def protected(self) -> int:
        """How many of the last tokens always stay."""
        return 0

    def state(self, layer: LayerShape) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the policy's own arrays of a row, each [heads, _, _], beside those of slots."""
        return {}

    def check_layer(self, layer: LayerShape, num_layers: int) -> None:
        """Raises an InputError if the policy is made for other layers.

        Args:
          layer: sizes of a layer that evicts tokens.
          num_layers: number of such layers, 1 unless they differ (`differs_by_layer`).
        """

    def observe(self, seen: Seen) -> Arrays:
        """Returns the new values of the policy's arrays, including those of `slot_state`."""
        return {}

    @property
    def observing(self) -> Hashable:
        """The settings on which `observe` may depend: those of the score, and not how much stays.

        Empty if the policy observes nothing.
        """
        if type(self).observe is CachePolicy.observe:
            return ()
        common = {field.name for field in dataclasses.fields(CachePolicy)}
        fields = (field.name for field in dataclasses.fields(self) if field.name not in common)
        return type(self), *(getattr(self, name) for name in fields)

    def move(self, state: Arrays, by: Int[Array, " B"], rotation: Rotation) -> Arrays:
        """Returns those of the policy's arrays that change if all later positions move `by`."""
        return {}

    def is_due(self, before: Int[Array, " B"], after: Int[Array, " B"]) -> Bool[Array, " B"] | None:
        """Returns which rows are cut after a call that read their tokens `before` to `after` - 1.

        A cut is one of all rows, so it must leave those that are not due as they are. None, the
        default: rows are cut after chunks, and after `every` generated tokens.
        """
        return None

    @abc.abstractmethod
    def score(self, slots: Candidates) -> Float[Array, "B K S"]:
        """Returns the scores of tokens; the values for empty slots do not matter.

        A token of score inf stays before all others.
        """

    def budgets(self, length: int, layer: tuple[int, int] | None = None) -> np.ndarray:
        """Returns how many tokens a head keeps of 0, 1, ... `length` tokens read, int [length + 1].

        A ratio keeps max(1, int(n (1 - ratio))) of n tokens, computed in float64 as in kvpress.

        Args:
          length: the largest number of tokens.
          layer: number of the layer among those that evict tokens, and their number; None: the
            mean over layers.
        """
        read = np.arange(length + 1)
        if self.threshold is not None:
            return read
        if self.part is not None and self.layers is None:
            return part_budgets(length, self.part, self.ratio)
        if self.tokens is not None:
            mean = np.minimum(float(self.tokens), read)
        else:
            mean = read * (1 - self.ratio)
        counts = mean
        if self.layers is not None:
            layers = self.layers
            counts = (
                layers.mean(read, mean)
                if layer is None
                else layers.divide(read, mean, self.protected, *layer)
            )
        counts = counts.astype(np.int64)
        return np.minimum(np.maximum(counts, 1), read)

    def total_budgets(self, length: int, heads: int) -> np.ndarray:
        """Returns how many tokens `heads` heads keep together, int [length + 1] (`budgets`).

        A ratio evicts int(heads n ratio) of their tokens, in float64, or keeps
        max(1, int(heads n (1 - ratio))) if `self.heads.rounds_down`.
        """
        read = heads * np.arange(length + 1)
        if self.ratio is None:
            return np.minimum(heads * self.tokens, read)
        if self.heads.rounds_down:
            return np.minimum(np.maximum((read * (1 - self.ratio)).astype(np.int64), 1), read)
        return read - (read * self.ratio).astype(np.int64)

    def loses_nothing(self, length: int, layer: tuple[int, int] | None) -> bool:
        """Returns whether a text of `length` tokens stays whole; `layer` is as in `budgets`."""
        if self.channels is not None:
            return False
        if self.threshold is not None:
            return length <= self.threshold.window
        return bool((self.budgets(length, layer) == np.arange(length + 1)).all())

    @property
    def lazy_tokens(self) -> int | None:
        """How many tokens heads keep in layers that a text makes lazy (`is_lazy`); None: no such.

        It does not depend on the length of a text.
        """
        return None

    def is_lazy(self, slots: Candidates) -> Bool[Array, " B"]:
        """Returns for which rows a layer keeps `lazy_tokens` tokens only."""
        return jnp.zeros(slots.tokens.shape, bool)

    def readings(
        self, text: Sequence[int], start: int, encode: Callable[[str], Sequence[int]]
    ) -> list[Reading]:
        """Returns what the model reads again of a prompt before it is cut (`reads_again`).

        Layers do not keep these tokens. While they are read, `observe` gets their queries, and the
        policy's arrays contain `span`, int32 [B, 1, 2, 1]: `start` and `stop` of the reading.

        Args:
          text: token ids of a row since the last cut.
          start: order index of the first of them.
          encode: encodes a text in the middle of another one.
        """
        return []

    def layer_cache(self, pattern, soft_cap):
        if pattern.is_bounded:
            return self.storage.layer_cache(pattern.layer_cache)
        return Evicting(self, soft_cap, storage=self.storage)


_LATER = "later."  # prefix of the names of arrays of `Evicting.later`
_CHANNELS = "channels."  # and of `CachePolicy.channels`


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Fill:
    """How full the layers' caches are."""

    used: Int[Array, ""]  # slots in use, with padding and what a cut leaves empty
    since: Int[Array, ""]  # tokens generated since the last cut
    cuts_first: Bool[Array, ""]  # whether this call evicts tokens before it writes new ones


@dataclass(frozen=True)
class Evicting(FullCache):
    """Keys and values of the tokens that a policy keeps, and of the tokens since the last cut.

    `order` [B, K, S, 1] is the order index of each slot's token plus 1; 0 is an empty slot. Slots
    that hold tokens are in text order.
    """

    keeps_all: ClassVar[bool] = False
    holds_keys_only: ClassVar[bool] = False
    shares_slots: ClassVar[bool] = False  # a cut reads slots in text order
    evicts: ClassVar[bool] = True
    differs_by_layer: ClassVar[bool] = True

    policy: CachePolicy
    soft_cap: float | None = None
    layer: tuple[int, int] | None = None  # its number among layers that evict, and their number
    length: int = 0  # of a fitted cache: maximum number of tokens of a row
    slots: int = 0
    longest: int = 0  # tokens that may be read at once
    is_prompt: bool = False  # whether nothing is evicted before the prompt ends
    # The policy from the end of the first prompt on; None: `policy`. Until then both observe.
    later: CachePolicy | None = None
    is_lazy: bool = False  # whether every row keeps at most `policy.lazy_tokens`
    cuts_prompts: bool = True  # whether prompts are cut at their end
    held: int = 0  # slots that may be in use when a prompt has ended

    @property
    def acts_on_prompt(self) -> bool:
        return self.policy.chunk is None

    @property
    def reading(self) -> Hashable:
        if not self.is_prompt:
            return self
        observers = [(name, observer.observing) for name, observer in self._observers]
        is_indifferent = not any(observing for _, observing in observers)
        # `_moved` and `storage` say which arrays there are, and `slots` their size.
        settings = self.storage, self.rotated, self.slots, self._moved, self.policy.positions
        observed = None if is_indifferent else (self.soft_cap, self.layer, *observers)
        return Evicting, *settings, observed

    @property
    def reads_output(self) -> bool:
        return self._weighs_values or any(policy.reads_output for _, policy in self._policies)

    @property
    def _weighs_values(self) -> bool:
        return any(policy.critical is not None for _, policy in self._policies)

    @property
    def _frees_slots(self) -> bool:
        """Whether cuts while a text is read by chunks or generated make space for its tokens."""
        return self.policy.threshold is None and self.policy.cuts_text

    @property
    def _frees_prompts(self) -> bool:
        """Whether the end of every prompt frees the slots that the prompt needed."""
        return self.acts_on_prompt and self.cuts_prompts and self._frees_slots

    @property
    def _packs_slots(self) -> bool:
        """Whether a cut leaves as many slots in use as the longest row has tokens.

        Otherwise it leaves `num_kept`, which may be all tokens of a text. The number depends on the
        batch, so no later cut may depend on it, and no other layer may share the slots.
        """
        return self.policy.lazy_tokens is not None and self.policy.channels is None

    @property
    def depends_on_text(self) -> bool:
        return self.acts_on_prompt and self.policy.lazy_tokens is not None

    def needs_few(self, arrays, prompt):
        is_few = prompt.tokens <= self.policy.lazy_tokens
        return (is_few | self.policy.is_lazy(self._candidates(arrays, prompt))).all()

    def with_few(self, needs_few):
        return dataclasses.replace(self, is_lazy=needs_few)

    @property
    def shares_across_layers(self) -> bool:
        heads = self.policy.heads
        return self.acts_on_prompt and heads is not None and heads.across_layers

    @property
    def _policies(self) -> list[tuple[str, CachePolicy]]:
        """The policies that observe, each with the prefix of the names of its arrays."""
        return [("", self.policy)] + ([] if self.later is None else [(_LATER, self.later)])

    @property
    def _observers(self) -> list[tuple[str, CachePolicy | Channels]]:
        """What has arrays of its own, with the prefix of their names."""
        channels = self.policy.channels
        is_choosing = channels is not None and not self._has_dropped_channels
        return self._policies + ([(_CHANNELS, channels)] if is_choosing else [])

    @property
    def _has_dropped_channels(self) -> bool:
        """Whether `keys` have some channels, and `new_keys` all of the tokens since the last cut.

        The slots of these tokens are those from `num_kept` on.
        """
        return self.policy.channels is not None and not self.is_prompt

    @property
    def _moved(self) -> tuple[str, ...]:
        """The names of arrays with one entry for each slot."""
        return (*self.storage.names, "order", *self._numbers)

    @property
    def _numbers(self) -> tuple[str, ...]:
        """The names of arrays with one number for each slot."""
        norms = ("value_norms",) if self._weighs_values else ()
        slot_names = [
            prefix + name for prefix, policy in self._policies for name in policy.slot_state
        ]
        return (*norms, *slot_names)

    @property
    def acts_on_chunk(self) -> bool:
        return self.policy.chunk is not None

    def for_layer(self, layer: int, num_layers: int) -> Evicting:
        is_numbered = any(policy.differs_by_layer for _, policy in self._policies)
        return dataclasses.replace(self, layer=(layer, num_layers)) if is_numbered else self

    def fit(self, length: int, chunk: int | None) -> tuple[LayerCache, int]:
        if not self.rotated:
            raise InputError(
                "model.cache: exact=True rotates keys again while the text grows, and a cache that"
                " evicts tokens keeps them rotated; leave one of the two out"
            )
        if all(policy.loses_nothing(length, self.layer) for _, policy in self._policies):
            return FullCache(storage=self.storage), length
        fitted = dataclasses.replace(self, length=length)
        if self.acts_on_prompt:
            return dataclasses.replace(fitted, slots=length, longest=length, is_prompt=True), length
        fitted = fitted._between_cuts(length, min(self.policy.chunk, length))
        return fitted, fitted.slots

    @functools.cached_property  # the table of a million tokens takes tens of milliseconds
    def num_kept(self) -> int:
        """The slots that a cut leaves in use: as many as the head that keeps most may need.

        They are as many also if there are fewer tokens, so that the next cut does not depend on the
        padding of a row.
        """
        policy, most = self.policy, int(self.policy.budgets(self.length, self.layer).max())
        if self.is_lazy:
            most = min(most, policy.lazy_tokens)
        if policy.heads is not None:
            most = math.ceil(policy.heads.most * most)
        if policy.span is not None:
            most += policy.span
        return min(most, self.length)

    def _between_cuts(self, new: int, longest: int) -> Evicting:
        """Returns the cache that evicts while `new` tokens are read, at most `longest` at once."""
        if self.policy.threshold is None:
            held, between = max(self.held, self.num_kept), new
            if self._frees_slots:
                between = min(new, max(longest, self.policy.every))
        else:  # no slot is used again
            between, held = (new, self.held) if self.held else (self.length, 0)
        slots = held + between
        slots = whole_blocks(min(slots, self.length) if self._packs_slots else slots)
        return dataclasses.replace(self, slots=slots, longest=longest, is_prompt=False, held=held)

    def num_visible(self, length: int, tokens: int) -> int:
        if self.acts_on_prompt and tokens > 1:  # a prompt, which is read before it is cut
            return length
        num_kept = dataclasses.replace(self, length=length).num_kept
        between = max(tokens, self.policy.every) if self.policy.cuts_text else tokens
        return min(length, num_kept + between)

    def after_prompt(self, length: int) -> tuple[LayerCache, int]:
        fitted, slots = self.fit(length, None)
        if not (fitted.evicts and fitted.cuts_prompts):
            return fitted, slots
        return dataclasses.replace(fitted, is_prompt=False), fitted.num_kept

    def read_arrays(self, layer, length, tokens, devices=1):
        is_prompt = self.acts_on_prompt and tokens > 1
        kind = dataclasses.replace(self, length=length, is_prompt=is_prompt)
        return kind.arrays(layer, kind.num_visible(length, tokens))

    def arrays(self, layer: LayerShape, slots: int) -> dict[str, jax.ShapeDtypeStruct]:
        order = jax.ShapeDtypeStruct((layer.num_kv_heads, slots, 1), jnp.int32)
        each_slot = jax.ShapeDtypeStruct(order.shape, jnp.float32)
        policy_arrays = dict.fromkeys(self._numbers, each_slot)
        _, num_layers = self.layer or (0, 1)
        for _, policy in self._policies:
            policy.check_layer(layer, num_layers)
            if policy.heads is not None:
                policy.heads.check_layer(layer, num_layers)
        for prefix, observer in self._observers:
            state = observer.state(layer)
            policy_arrays |= {prefix + name: array for name, array in state.items()}
        stored = super().arrays(layer, slots)
        if self._has_dropped_channels:
            heads, dtype = layer.num_kv_heads, layer.dtype
            width = self.policy.channels.num_kept(layer.head_dim)
            shape = heads, slots - self.num_kept, layer.head_dim
            stored["keys"] = jax.ShapeDtypeStruct((heads, slots, width), dtype)
            stored["new_keys"] = jax.ShapeDtypeStruct(shape, dtype)
            stored["channels"] = jax.ShapeDtypeStruct((heads, 1, width), jnp.int32)
        return stored | {"order": order} | policy_arrays

    def shared(self, rows: int, slots: int) -> _Fill:
        count, whether = (jax.ShapeDtypeStruct((), dtype) for dtype in (jnp.int32, jnp.bool_))
        return _Fill(count, count, whether)

    def reserve(self, slots: _Fill, new: Tokens, filled: Int[Array, ""]) -> View:
        length = new.index.shape[1]
        if length > self.longest:
            raise InputError(
                f"{length} tokens at once do not fit a cache of {self.slots} slots that evicts"
                f" tokens; read at most {self.longest}, or create it with chunk={length}"
            )
        start, since, cuts_first = slots.used, slots.since, jnp.zeros((), bool)
        if not self.is_prompt and self._frees_slots:
            cuts_first = start + length > self.slots
            if length == 1:
                cuts_first |= since + length > self.policy.every
            start = jnp.where(cuts_first, self.num_kept, start)
            since = jnp.where(cuts_first, 0, since)
        is_emptied = self._cuts_after(new) if self.policy.threshold is None else False
        used = jnp.where(is_emptied, self.num_kept, start + length)
        # The tokens of a text do not count, since its padding would let a row depend on its batch.
        since = jnp.where(is_emptied, 0, since + (length == 1))
        return View(_Fill(used, since, cuts_first), new, start, None, self)

    def _cuts_after(self, new: Tokens) -> Bool[Array, ""] | bool:
        """Returns whether a call with `new` tokens evicts tokens after its attention."""
        if self.is_prompt:
            return False
        is_chunk = self.acts_on_chunk and new.index.shape[1] > 1
        if is_chunk or (self.policy.threshold is not None and self.policy.cuts_text):
            return True
        after = new.index[:, -1] + 1
        due = self.policy.is_due(after - (new.segments != 0).sum(1, dtype=jnp.int32), after)
        return False if due is None else due.any()

    def attend(self, arrays, q, k, v, pattern, view, metadata):
        new, is_new = view.new, view.new.segments != 0
        after = new.index[:, -1] + 1  # tokens read; padding has the index of the token before it
        before = after - is_new.sum(1)
        if not self.is_prompt and self.policy.threshold is None:

            def cut(arrays):
                return self.cut(arrays, Prompt(before, metadata.rotation, layout=metadata.layout))

            if self.policy.cuts_text:
                arrays = _if(view.slots.cuts_first, cut, arrays)
            if self.policy.positions == "consecutive":
                num_evicted = before - self._next_position(arrays["order"], before)
                metadata = metadata.replace(q_positions=metadata.q_positions - num_evicted[:, None])
        stored = self.append(arrays, k, v, pattern, view, metadata)
        order = jnp.where(is_new, new.index + 1, 0)[:, :, None, None]
        order = write_tokens(arrays["order"], jnp.broadcast_to(order, (*k.shape[:3], 1)), view)
        arrays = arrays | stored | {"order": order}
        if self._weighs_values:
            norms = value_norms(v, metadata.output_kernel, metadata.layout)[..., None]
            arrays["value_norms"] = write_tokens(arrays["value_norms"], norms, view)
        order = arrays["order"][..., 0] - 1
        pair, some = self.storage.read(arrays), (arrays.get("channels"), arrays.get("new_keys"))
        out = attend_by_head(q, *pair, order, pattern, metadata, *some)
        read = Prompt(after, metadata.rotation, layout=metadata.layout)
        arrays, cuts = self._observe(arrays, q, view, metadata, read), self._cuts_after(new)

        def cut(arrays):
            return self.cut(arrays, read, before=before)

        if isinstance(cuts, bool):
            return out, cut(arrays) if cuts else arrays
        return out, _if(cuts, cut, arrays)

    def _observe(self, arrays: Arrays, q, view: View, metadata, read: Prompt) -> Arrays:
        """Returns arrays with those that policies compute of the new tokens."""
        new = view.new
        queries = rotate_queries(q, metadata.q_positions, metadata.rotation).swapaxes(1, 2)
        for prefix, observer in self._observers:
            seen = Seen(
                queries=queries,
                unrotated=q.swapaxes(1, 2),
                index=jnp.where(new.segments != 0, new.index, -1),
                rotation=metadata.rotation,
                slots=self._candidates(arrays, read, prefix),
                output_kernel=metadata.output_kernel,
                input_norms=metadata.input_norms,
            )
            observed = observer.observe(seen)
            arrays = arrays | {prefix + name: array for name, array in observed.items()}
        return arrays

    def append(self, arrays, k, v, pattern, view, metadata):
        if not self._has_dropped_channels:
            return super().append(arrays, k, v, pattern, view, metadata)
        k = metadata.rotation.rotate(k, pattern.key_positions(metadata.q_positions, view.new.index))
        some = take_channels(k.swapaxes(1, 2), arrays["channels"], metadata.layout).swapaxes(1, 2)
        new_view = dataclasses.replace(view, start=view.start - self.num_kept)
        return {
            "keys": write_tokens(arrays["keys"], some, view),
            "values": write_tokens(arrays["values"], v, view),
            "new_keys": write_tokens(arrays["new_keys"], k, new_view),
        }

    def key_metadata(self, view):
        return {}  # the tokens of a slot differ between layers and heads

    def _candidates(self, arrays: Arrays, prompt: Prompt, prefix: str = "") -> Candidates:
        index = arrays["order"][..., 0] - 1
        keys, values = self.storage.decode(arrays)
        if self._has_dropped_channels:
            new, size = arrays["new_keys"], values.shape[-1]
            keys = keys[:, :, : keys.shape[2] - new.shape[2]]
            keys = restore_channels(keys, arrays["channels"], size, prompt.layout)
            keys = jnp.concatenate([keys, new], axis=2)
        layer, _ = self.layer or (0, 1)
        slots = Candidates(
            keys=keys,
            values=values,
            index=index,
            tokens=prompt.tokens,
            next_position=self._next_position(arrays["order"], prompt.tokens),
            state=of_prefix(arrays, prefix),
            soft_cap=self.soft_cap,
            question=prompt.question,
            layer=layer,
            layout=prompt.layout,
            positions=index,
            rotation=prompt.rotation,
        )
        if self.policy.positions == "consecutive":
            slots = slots._replace(positions=slots.ranks)
        return slots

    def _next_position(
        self, order: Int[Array, "B K S 1"], tokens: Int[Array, " B"]
    ) -> Int[Array, " B"]:
        """Returns the position after those in the cache, of which `tokens` were read."""
        if self.policy.positions == "text":
            return tokens
        return (order[:, 0] > 0).sum((1, 2), dtype=jnp.int32)  # as many in every head

    def cut(
        self,
        arrays: Arrays,
        prompt: Prompt,
        counts: Int[Array, "B K"] | None = None,
        before: Int[Array, " B"] | int = 0,
    ) -> Arrays:
        """Keeps the tokens with the greatest scores, in the first slots and in text order.

        Under a threshold, other tokens stay where they are.

        Args:
          arrays: those of a layer.
          prompt: what was read.
          counts: as in `end_prompt`.
          before: tokens of each row that had been read when a threshold was last applied.
        """
        policy, slots = self.policy, self._candidates(arrays, prompt)
        with jax.named_scope("evict"):
            scores = self._scores(slots)
            if policy.threshold is not None:
                goes = policy.threshold.evicts(scores, slots, before)
                return arrays | {"order": jnp.where(goes[..., None], 0, arrays["order"])}
            if policy.heads is not None:
                scores = policy.heads.protect(scores, slots)
            if counts is None:
                counts = jnp.broadcast_to(self._counts(slots)[:, None], scores.shape[:2])
                if policy.heads is not None:
                    layer = self.layer or (0, 1)
                    counts = policy.heads.counts(scores, counts, self.num_kept, slots, layer)
            norms = rescore = None
            if policy.critical is not None:
                norms, rescore = arrays["value_norms"][..., 0], policy.critical.rescore
            if policy.part is not None:
                scores = self._cut_parts(slots, scores, counts, rescore, norms)
            elif rescore is not None:
                scores = rescore(scores, norms, counts)
            if policy.span is not None:
                budget = policy.span, policy.tokens, policy.ratio, self.length
                scores, counts = in_spans(slots, scores, *budget)
            choose = functools.partial(
                _best_places, most=self.num_kept, from_first=self._packs_slots
            )
            places = on_each_device(choose, prompt.layout, scores, counts[..., None])[..., None]

            def gather(x):
                return slots.take(x, jnp.maximum(places, 0))

            survivors = {name: gather(arrays[name]) for name in self._moved}
            survivors["order"] = jnp.where(places < 0, 0, survivors["order"])
            if policy.merge is not None:
                survivors["values"] = policy.merge.merged_values(slots, places[..., 0])
            if policy.positions == "consecutive":
                ranks = jnp.arange(places.shape[2]) - (places < 0).sum(2)
                by = ranks - gather(slots.ranks[..., None])[..., 0]
                rotation = prompt.rotation._replace(scale=1.0)
                survivors["keys"] = turn_by_head(survivors["keys"], by, rotation)
                evicted = slots.counts[:, 0, 0] - (places >= 0).sum((2, 3))[:, 0]
                for prefix, observer in self._policies:
                    state = of_prefix(arrays, prefix)
                    moved = observer.move(state, -evicted, prompt.rotation)
                    arrays = arrays | {prefix + name: array for name, array in moved.items()}
            size = arrays["order"].shape[2]
            survivors = {name: resize_slots(x, size) for name, x in survivors.items()}
            if policy.channels is not None and not self._has_dropped_channels:
                return self._drop_channels(arrays | survivors, prompt)
            return arrays | survivors

    def _drop_channels(self, arrays: Arrays, prompt: Prompt) -> Arrays:
        """Returns arrays whose keys have only the channels that the policy chooses."""
        state, is_token = of_prefix(arrays, _CHANNELS), arrays["order"][..., 0] > 0
        channels = self.policy.channels.choose(state, arrays["keys"], is_token)
        arrays = {name: x for name, x in arrays.items() if not name.startswith(_CHANNELS)}
        new_keys = jnp.zeros_like(arrays["keys"][:, :, self.num_kept :])
        keys = take_channels(arrays["keys"], channels, prompt.layout)
        return arrays | {"keys": keys, "channels": channels, "new_keys": new_keys}

    def _counts(self, slots: Candidates) -> Int[Array, " B"]:
        """Returns how many tokens the heads of each row keep, if they keep equally many."""
        counts, few = self._budgets(slots.tokens), self.policy.lazy_tokens
        if few is None:
            return counts
        is_lazy = True if self.is_lazy else self.policy.is_lazy(slots)
        return jnp.where(is_lazy, jnp.minimum(counts, few), counts)

    def _budgets(self, tokens: Int[Array, " B"]) -> Int[Array, " B"]:
        """Returns `policy.budgets` of the `tokens` read."""
        policy = self.policy
        if policy.ratio is None and policy.layers is None:
            return jnp.minimum(tokens, policy.tokens)
        # A table, as products of float64 decide the rounding; it has a number for each length.
        return jnp.asarray(policy.budgets(self.length, self.layer), jnp.int32)[tokens]

    def _scores(self, slots: Candidates) -> Float[Array, "B K S"]:
        """Returns scores in which any token comes before an empty slot, and a number before NaN."""
        low = jnp.finfo(jnp.float32).min
        policy = self.policy
        is_by_part = policy.part is not None and policy.scores_part
        scores = (self._score_parts if is_by_part else policy.score)(slots).astype(jnp.float32)
        scores = jnp.nan_to_num(scores, nan=low, posinf=jnp.inf, neginf=low)
        return jnp.where(slots.is_token, scores, -jnp.inf)

    def _score_parts(self, slots: Candidates) -> Float[Array, "B K S"]:
        """Returns the scores of tokens, where each part is a text of its own."""
        parts = TextParts(slots, self.policy.part, self.length)

        def score(keys, values, index, positions, tokens):
            part = {"keys": keys, "values": values, "index": index, "positions": positions}
            options = {"tokens": tokens, "next_position": tokens, "state": {}, "question": None}
            return self.policy.score(slots._replace(**part, **options))

        of_slots = (slots.keys, 0), (slots.values, 0), (slots.index, -1), (slots.positions, 0)
        keys, values, index, positions = (parts.split(x, fill) for x, fill in of_slots)
        index = jnp.where(index < 0, -1, index % self.policy.part)
        axes = 2, 2, 2, 2, 1
        scores = jax.vmap(score, axes, 2)(keys, values, index, positions, parts.tokens)
        return parts.join(scores)

    def _cut_parts(
        self,
        slots: Candidates,
        scores: Float[Array, "B K S"],
        counts: Int[Array, "B K"],
        rescore: Callable[..., Array] | None,
        norms: Float[Array, "B K S"] | None,
    ) -> Float[Array, "B K S"]:
        """Returns scores in which the tokens that parts keep come first (`first_of_parts`)."""
        policy, parts = self.policy, TextParts(slots, self.policy.part, self.length)
        if policy.layers is None and policy.heads is None:
            of_parts = parts.shares(policy.ratio)[:, None]
            of_parts = jnp.broadcast_to(of_parts, (*counts.shape, of_parts.shape[-1]))
        else:
            of_parts = parts.divided(counts)
        return first_of_parts(parts, scores, of_parts, rescore, norms)

    def shared_counts(
        self, layers: Sequence[tuple[Evicting, Arrays, Prompt]]
    ) -> list[Int[Array, "B K"]]:
        """Returns how many tokens the heads of each layer keep, if all layers share what stays.

        Args:
          layers: the cache of each layer that evicts tokens, its arrays, and what was read, which
            is the same text. Caches may differ in their storage.
        """
        scores = [kind._scores(kind._candidates(*rest)) for kind, *rest in layers]
        ranked = self.policy.heads.ranked(scores)
        heads = np.cumsum([each.shape[1] for each in ranked])
        total = jnp.asarray(self.policy.total_budgets(self.length, heads[-1]), jnp.int32)
        total = total[layers[0][-1].tokens]
        # As equal as whole numbers are
        place = jnp.arange(heads[-1], dtype=jnp.int32)
        counts = (total[:, None] + heads[-1] - 1 - place) // heads[-1]
        ranked = jnp.concatenate(ranked, axis=1)
        counts = self.policy.heads.counts(ranked, counts, self.num_kept, None, (0, 1))
        counts = jnp.split(counts, heads[:-1], axis=1)
        return [jnp.broadcast_to(x, each.shape[:2]) for x, each in zip(counts, scores, strict=True)]

    def end_prompt(self, arrays, slots, prompt, new, chunk, counts=None):
        cuts = self.cuts_prompts and (self.is_prompt or self.policy.threshold is None)
        if not self.acts_on_prompt or not (cuts or self.is_prompt):
            return self, arrays, slots
        if cuts:

            def cut(arrays, counts):
                return self.cut(arrays, prompt, counts)

            arrays = (jax.vmap(cut) if arrays["order"].ndim > 4 else cut)(arrays, counts)
        after, arrays = self._after_prompt(arrays)
        slots = dataclasses.replace(slots, since=jnp.zeros_like(slots.since))
        if cuts and self.policy.threshold is None:
            used = self.num_kept
            if self._packs_slots:
                used = (arrays["order"] > 0).sum(-2, dtype=jnp.int32).max()
            slots = dataclasses.replace(slots, used=jnp.full_like(slots.used, used))
            after = dataclasses.replace(after, held=self.num_kept)
        elif new < self.length:  # tokens stay in their slots
            after = dataclasses.replace(after, held=self.length - new)
        else:  # the caller does not know how many tokens follow, and has slots for all of its text
            longest, held = min(chunk, new), self.slots
            after = dataclasses.replace(after, longest=longest, held=held, is_prompt=False)
            return after, arrays, slots
        after = after._between_cuts(new, min(chunk, new))
        return after, after._with_slots(arrays), slots

    def for_prompt(self, slots, tokens):
        if not self._frees_prompts:
            return self, slots
        slots = min(whole_blocks(tokens), slots)
        return dataclasses.replace(self, slots=slots, longest=slots), slots

    def begin_prompt(self, arrays, slots, tokens):
        if not self.acts_on_prompt:
            return self, arrays, slots
        size = self.slots
        if self._frees_prompts and self.is_prompt:
            size = max(size, whole_blocks(tokens))
        elif self._frees_prompts and not (self._packs_slots and size >= self.length):
            size = whole_blocks(size + tokens)
        after = dataclasses.replace(self, slots=size, longest=max(self.longest, tokens))
        return after, after._with_slots(arrays), slots

    def with_extra_slots(self, arrays, slots, tokens):
        size = whole_blocks(arrays["order"].shape[2] + tokens)
        after = dataclasses.replace(self, slots=size, longest=tokens)
        return after, after._with_slots(arrays), slots

    def extend_slots(self, arrays, slots, read, new, chunk):
        # Later cuts count the tokens that follow, too.
        after = dataclasses.replace(self, length=self.length + read + new)
        after = after._between_cuts(read + new, read + min(new, max(chunk, self.policy.every)))
        if after._has_dropped_channels:  # `new_keys` are those of the slots behind `num_kept`
            slots = dataclasses.replace(slots, used=jnp.full_like(slots.used, after.num_kept))
        return after, after._with_slots(arrays), slots

    def _with_slots(self, arrays: Arrays) -> Arrays:
        """Returns arrays of `slots` slots."""
        resized = {name: resize_slots(arrays[name], self.slots) for name in self._moved}
        if self._has_dropped_channels:
            resized["new_keys"] = resize_slots(arrays["new_keys"], self.slots - self.num_kept)
        return arrays | resized

    def _after_prompt(self, arrays: Arrays) -> tuple[Evicting, Arrays]:
        """Returns the cache under the policy `later`, and the arrays that this one computed."""
        if self.later is None:
            return self, arrays
        after = dataclasses.replace(self, policy=self.later, later=None)
        later_arrays = of_prefix(arrays, _LATER)
        moved = {name: arrays[name] for name in after._moved if name not in later_arrays}
        return after, moved | later_arrays


def _if(condition: Bool[Array, ""], change: Callable[[Arrays], Arrays], arrays: Arrays) -> Arrays:
    """Returns `change(arrays)`, or `arrays` unless the condition holds.

    It is a loop of at most one round, whose arrays XLA updates in place: of a conditional it copies
    the results, on GPUs in every step.
    """

    def one_round(state):
        return jnp.zeros((), bool), change(state[1])

    return jax.lax.while_loop(lambda state: state[0], one_round, (condition, arrays))[1]


def of_prefix(arrays: Arrays, prefix: str) -> Arrays:
    """Returns the arrays whose names begin with `prefix`, by the rest of their names.

    They are all arrays if the prefix is empty.
    """
    return {
        name.removeprefix(prefix): array
        for name, array in arrays.items()
        if name.startswith(prefix)
    }


def _best_places(
    scores: Float[Array, "B K S"], counts: Int[Array, "B K 1"], most: int, from_first: bool
) -> Int[Array, "B K M"]:
    """Returns the slots of the `counts` greatest scores above -inf, in text order.

    Entries of -1 stand before them, or behind them if they are to be `from_first` on.
    """
    # Of equal scores, `top_k` takes the first ones.
    best, places = jax.lax.top_k(scores[..., ::-1], min(most, scores.shape[-1]))
    stays = (jnp.arange(best.shape[-1]) < counts) & (best > -jnp.inf)
    size = scores.shape[-1]
    if not from_first:
        return jnp.sort(jnp.where(stays, size - 1 - places, -1), axis=-1)
    places = jnp.sort(jnp.where(stays, size - 1 - places, size), axis=-1)
    return jnp.where(places < size, places, -1)
