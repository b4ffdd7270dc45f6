"""The `model.memory` section of a config: which memory a checkpoint gets."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import draccus

from lcjax.attention import Causal
from lcjax.errors import InputError
from lcjax.memory.context_tree import Tree
from lcjax.memory.policies import Policy, Right, policy_note, policy_of
from lcjax.memory.shared_llm import SharedLlm
from lcjax.models.config import ModelConfig


@dataclass(frozen=True)
class MemorySection(draccus.ChoiceRegistry):
    """A memory for a decoder that has none; a checkpoint that has one brings its own."""


@MemorySection.register_subclass("cepe")
@dataclass(frozen=True)
class CepeSection(MemorySection):
    """CEPE (arXiv 2402.16617): an encoder of chunks, and cross-attention in the last layers."""

    # A checkpoint of the encoder (a run of masked language modelling, hyen/LLaMA-MLM-Large), or the
    # name of a preset, with random weights.
    encoder: str = "cepe-encoder"
    layers: int | None = None  # layers that read the context, from the last one down; null: all
    # Of the output projection: zeros leave the decoder as it was (the paper); copy begins with
    # self-attention's, as the released configs of the warm-up do.
    out: Literal["zeros", "copy"] = "zeros"

    def __post_init__(self):
        if self.layers is not None and self.layers < 1:
            raise InputError(
                f"model.memory.layers={self.layers} must be at least 1; null: all; without"
                " any, leave model.memory out"
            )


@MemorySection.register_subclass("shared_llm")
@dataclass(frozen=True)
class SharedLlmSection(MemorySection):
    """SharedLLM: the model reads trees of chunks through keys and values of its lower layers.

    The lower model begins as a copy of the first layers of the same checkpoint.
    """

    layers: int = 4  # M: of the lower model, and as many read it (16 for instructions)
    chunk: int = 1024  # tokens (512 for instructions)
    # At each level of a tree, level 1 first: of so many tokens one is kept. Beta, the tokens of a
    # chunk for each that is kept, is 8 here; [1, 1, 1] keeps all.
    ratios: tuple[int, ...] = (16, 8, 4)
    # gamma, in training: nodes of l tokens are split l / (2 gamma) from the middle, more or less
    # (10 for instructions); null: always in the middle.
    noise: float | None = 5.0
    # Which half of a node is split again: right, query, random
    policy: Policy = dataclasses.field(default_factory=Right)
    placement: str = "bottom"  # of the layers that read: bottom, top, interleaved
    positions: str = "paper"  # of chunks, or released (see `lcjax.memory.SharedLlm`)
    # Of the output projection: zeros leave the model as it was; copy begins with self-attention's
    out: Literal["zeros", "copy"] = "zeros"

    def __post_init__(self):
        if self.layers < 1:
            raise InputError(
                f"model.memory.layers={self.layers} must be at least 1; without any, leave"
                " model.memory out"
            )

    def memory(self, config: ModelConfig) -> SharedLlm:
        """Of a decoder with this config, which checks it."""
        if self.layers > config.num_layers:
            raise InputError(
                f"model.memory.layers={self.layers} is more than the {config.num_layers} layers of"
                f" the model, of which the lower model is made; at most {config.num_layers}"
            )
        return SharedLlm(
            states=lower_config(config, self.layers),
            chunk=self.chunk,
            tree=Tree(tuple(self.ratios), self.noise),
            policy=self.policy,
            placement=self.placement,
            positions=self.positions,
        )


def lower_config(config: ModelConfig, layers: int) -> ModelConfig:
    """Of the first layers of a decoder as a model of its own; how it computes is the decoder's."""
    default = {
        field.name: field.default
        for field in dataclasses.fields(ModelConfig)
        if field.name in ("dtype", "param_dtype", "remat", "context_parallel", "lora", "memory")
    }
    return config.replace(
        num_layers=layers,
        tie_embeddings=True,  # it has no head
        head_bias=False,
        pattern=Causal(),  # nodes are shorter than any window
        scan_layers=True,
        **default,
    )


def to_note(section: MemorySection) -> dict[str, Any]:
    """`section` as plain values, with the `type` of each choice."""
    note = dataclasses.asdict(section)
    if isinstance(section, SharedLlmSection):
        note["policy"] = policy_note(section.policy)
    return {"type": MemorySection.get_choice_name(type(section))} | note


def from_note(note: dict[str, Any]) -> MemorySection:
    """The inverse of `to_note`; a note without a type is of CEPE, the first of them."""
    fields = dict(note)
    kind = MemorySection.get_choice_class(fields.pop("type", "cepe"))
    if "policy" in fields:
        fields["policy"] = policy_of(fields["policy"])
        fields["ratios"] = tuple(fields["ratios"])
    return kind(**fields)
