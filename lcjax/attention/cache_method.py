"""What layers keep of a text: the `model.cache` config section."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import ClassVar

import draccus

from lcjax.attention.base import Pattern
from lcjax.attention.cache import LayerCache
from lcjax.attention.cache_storage import Exact, Storage
from lcjax.config import check_choices
from lcjax.errors import InputError, check_fields


@dataclass(frozen=True)
class CacheMethod(draccus.ChoiceRegistry, abc.ABC):
    """What layers keep of a text, and what a later token reads of it: `model.cache`."""

    # Fields of small instances, on which the tests of all methods run.
    examples: ClassVar[tuple[dict, ...]] = ({},)
    evicts: ClassVar[bool] = False  # whether a token that a pattern needs may be gone
    # Whether a token reads all keys and values that its pattern shows, as they were computed
    is_exact: ClassVar[bool] = False
    # Whether the model reads a prompt again before it is cut (`CachePolicy.readings`)
    reads_again: ClassVar[bool] = False
    chunk: ClassVar[int | None] = None  # tokens that are read at once; None: any number

    def __post_init__(self):
        check_choices("model.cache", self)
        check_fields("model.cache", self)

    def check(self, pattern: Pattern) -> None:
        """Raises an InputError if the method is not defined for layers under `pattern`.

        By default a layer either sees all tokens before a token, or is left alone because it needs
        a bounded part of the text.
        """
        pattern = pattern.for_inference()
        if not (pattern.is_bounded or pattern.allows_eviction):
            kind = Pattern.get_choice_name(type(pattern))
            raise InputError(
                f"model.cache.type={self.get_choice_name(type(self))} is not defined for layers"
                f" under model.pattern.type={kind}; use type causal, or leave model.cache out"
            )

    @property
    def scoring_chunk(self) -> int | None:
        """Tokens of a text that are read at once where they are scored; None: any number."""
        return self.chunk

    def check_question(self, tokens: int) -> None:
        """Raises an InputError if a question of `tokens` tokens cannot choose what stays."""
        kind = self.get_choice_name(type(self))
        raise InputError(
            f"question: model.cache.type={kind} does not choose by the last tokens of a prompt;"
            " leave question out, or use type finch or snapkv"
        )

    @abc.abstractmethod
    def layer_cache(self, pattern: Pattern, soft_cap: float | None) -> LayerCache:
        """Returns the cache of a layer under `pattern`, whose logits are capped at `soft_cap`."""


@CacheMethod.register_subclass("full")
@dataclass(frozen=True)
class KeepAll(CacheMethod):
    """Keeps what the pattern of a layer needs; `storage` says in which form."""

    storage: Storage = Exact()

    @property
    def is_exact(self) -> bool:
        return self.storage.is_exact

    def check(self, pattern):
        """Is defined for every pattern, but codes only for those that choose keys by position."""
        pattern = pattern.for_inference()
        if not self.is_exact and (pattern.moves_keys or not pattern.is_position_based):
            name, kind = (
                base.get_choice_name(type(x))
                for base, x in ((Storage, self.storage), (Pattern, pattern))
            )
            raise InputError(
                f"model.cache.storage.type={name} keeps codes of rotated keys, and model.pattern"
                f".type={kind} moves keys or chooses them by their values; use type exact"
            )

    def layer_cache(self, pattern, soft_cap):
        return self.storage.layer_cache(pattern.layer_cache)
