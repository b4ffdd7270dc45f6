"""Two policies for one text: one cuts the prompt, the other what is generated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lcjax.attention.cache_method import CacheMethod
from lcjax.attention.eviction import CachePolicy, Evicting
from lcjax.attention.policies.key_geometry import Knorm
from lcjax.attention.policies.lagkv import LagKVOriginal
from lcjax.errors import InputError


@CacheMethod.register_subclass("phases")
@dataclass(frozen=True)
class Phases(CacheMethod):
    """Cuts a prompt by one policy, and by another one what is generated after it.

    With `prompt: null` a prompt stays whole at its end and is cut when `generation.every` tokens
    follow it, as by kvpress' DecodingPress; with both, as by its PrefillDecodingPress. The first
    prompt of a conversation counts as the prompt, and later ones are cut by `generation`, if at
    all. Both policies observe the prompt.
    """

    examples = ({"generation": Knorm(tokens=24, every=4)},)
    evicts: ClassVar[bool] = True

    generation: CacheMethod  # a cache policy
    prompt: CacheMethod | None = None  # a cache policy; null: a prompt is not cut at its end

    def __post_init__(self):
        super().__post_init__()
        for name, policy in (("generation", self.generation), ("prompt", self.prompt)):
            if policy is None and name == "prompt":
                continue
            if not isinstance(policy, CachePolicy):
                raise InputError(
                    f"model.cache.{name}={policy!r:.60} must be a policy that evicts tokens, such"
                    " as {type: knorm, tokens: 1024}"
                )
            if not policy.cuts_text:
                raise InputError(
                    f"model.cache.{name}={policy!r:.60} cuts at the end of prompts alone; use it"
                    " without type=phases"
                )
            if policy.channels is not None:
                raise InputError(
                    f"model.cache.{name}.channels drops channels of all keys at the end of a"
                    " prompt, and type=phases keeps the keys of two policies; leave channels out"
                )
            if policy.chunk is not None:
                raise InputError(
                    f"model.cache.{name}.chunk={policy.chunk} cuts a text while it is read, and"
                    " type=phases cuts prompts at their end; leave chunk out"
                )

        if self.prompt is not None and isinstance(self.generation, LagKVOriginal):
            raise InputError(
                "model.cache.generation of type lagkv_original counts the parts that it has cut,"
                " and model.cache.prompt would cut others; use generation type lagkv, or leave"
                " prompt out"
            )
        if self.prompt is not None and self.prompt.storage != self.generation.storage:
            raise InputError(
                f"model.cache.prompt.storage={self.prompt.storage} and generation.storage="
                f"{self.generation.storage} are forms of the same cache; set both alike"
            )
        if self.prompt is not None and self.prompt.positions != self.generation.positions:
            raise InputError(
                f"model.cache.prompt.positions={self.prompt.positions} and generation.positions="
                f"{self.generation.positions} place the same tokens differently; set both alike"
            )

    def check_question(self, tokens):
        if self.prompt is None:
            super().check_question(tokens)
        self.prompt.check_question(tokens)

    def layer_cache(self, pattern, soft_cap):
        if pattern.is_bounded:
            return self.generation.storage.layer_cache(pattern.layer_cache)
        options = {"storage": self.generation.storage}
        if self.prompt is None:
            return Evicting(self.generation, soft_cap, cuts_prompts=False, **options)
        return Evicting(self.prompt, soft_cap, later=self.generation, **options)
