"""The `model.memory` section of a config: which memory a checkpoint gets."""

import abc
import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import draccus
import jax

from lcjax.attention import Bidirectional, Causal
from lcjax.errors import InputError, whole_number
from lcjax.memory.auto_compressor import AutoCompressor
from lcjax.memory.beacon import Beacon
from lcjax.memory.cepe import Cepe
from lcjax.memory.context_tree import Tree
from lcjax.memory.initial import (
    check_token,
    check_width,
    with_beacons,
    with_embedding,
    with_lower_model,
    with_memory,
)
from lcjax.memory.policies import Policy, Right, policy_note, policy_of
from lcjax.memory.shared_llm import SharedLlm
from lcjax.models.config import ModelConfig
from lcjax.models.memory import Memory


@dataclass(frozen=True)
class MemorySection(draccus.ChoiceRegistry, abc.ABC):
    """A memory for a decoder that has none; a checkpoint that has one brings its own."""

    # Where the encoder comes from: a checkpoint, or a preset's name; None: from the decoder itself.
    encoder: ClassVar[str | None] = None

    @abc.abstractmethod
    def memory(self, config: ModelConfig, encoder: ModelConfig | None = None) -> Memory:
        """Of a decoder with this config, which checks it; `encoder` is that of `self.encoder`."""

    @abc.abstractmethod
    def init_params(
        self,
        params: dict,
        config: ModelConfig,
        encoder: dict | None = None,
        mesh: jax.sharding.Mesh | None = None,
    ) -> dict:
        """`params` of a decoder whose config has the memory, and those with which it begins.

        `encoder`: the weights of `self.encoder`.
        """

    def to_dict(self) -> dict[str, Any]:
        """The section as plain values, with the `type` of each choice."""
        return {"type": self.get_choice_name(type(self))} | dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "MemorySection":
        """Of the values of a `note` but its type."""
        return cls(**fields)


@MemorySection.register_subclass("cepe")
@dataclass(frozen=True)
class CepeSection(MemorySection):
    """CEPE (arXiv 2402.16617): an encoder of chunks, and cross-attention in the last layers."""

    # A checkpoint of the encoder (a run of masked language modelling, hyen/LLaMA-MLM-Large), or the
    # name of a preset, with random weights.
    encoder: str = "cepe-encoder"
    layers: int | None = None  # layers that read the context, from the last one down; null: all
    # The output projection begins with so much of self-attention's: 0 leaves the decoder as it was
    # (the paper), 1 is all of it (the released configs of the warm-up).
    out: float = 0.0

    def __post_init__(self):
        if self.layers is not None:
            way_out = "null: all; without any, leave model.memory out"
            whole_number("model.memory.layers", self.layers, 1, way_out)
        check_share(self.out)

    def memory(self, config: ModelConfig, encoder: ModelConfig | None = None) -> Cepe:
        if not isinstance(encoder.pattern, Bidirectional):
            raise InputError(
                f"model.memory.encoder={self.encoder} is no encoder: its tokens do not see those"
                " after them; give a masked language model, such as hyen/LLaMA-MLM-Large"
            )
        check_width(encoder, config)
        return Cepe(states=encoder, layers=self.layers or config.num_layers)

    def init_params(
        self,
        params: dict,
        config: ModelConfig,
        encoder: dict | None = None,
        mesh: jax.sharding.Mesh | None = None,
    ) -> dict:
        weights = {name: branch for name, branch in encoder.items() if name != "mlm"}
        return with_memory(params, config, weights, out=self.out, mesh=mesh)


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
    # The output projection begins with so much of self-attention's: 0 leaves the model as it was.
    out: float = 0.0

    def __post_init__(self):
        whole_number("model.memory.layers", self.layers, 1, "without any, leave model.memory out")
        check_share(self.out)

    def memory(self, config: ModelConfig, encoder: ModelConfig | None = None) -> SharedLlm:
        return SharedLlm(
            states=lower_config(config, self.layers),
            chunk=self.chunk,
            tree=Tree(tuple(self.ratios), self.noise),
            policy=self.policy,
            placement=self.placement,
            positions=self.positions,
        )

    def init_params(
        self,
        params: dict,
        config: ModelConfig,
        encoder: dict | None = None,
        mesh: jax.sharding.Mesh | None = None,
    ) -> dict:
        return with_lower_model(params, config, out=self.out, mesh=mesh)

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"policy": policy_note(self.policy)}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "SharedLlmSection":
        read = {"policy": policy_of(fields["policy"]), "ratios": tuple(fields["ratios"])}
        return cls(**fields | read)


@MemorySection.register_subclass("beacon")
@dataclass(frozen=True)
class BeaconSection(MemorySection):
    """Activation Beacon (arXiv 2401.03462): windows before the text are condensed by beacons."""

    chunk: int = 1024  # tokens of a window
    ratio: int = 32  # tokens that a beacon stands for, where nothing is trained (128 for 400K)
    # In training each window draws one of these; empty: ratio. 2 to 128 in the paper.
    ratios: tuple[int, ...] = (2, 4, 8, 16, 32, 64, 128)
    begin: int = 2  # the token whose embedding a beacon begins with: EOS, in Llama's vocabulary

    def memory(self, config: ModelConfig, encoder: ModelConfig | None = None) -> Beacon:
        check_token(self.begin, config)
        return Beacon(self.chunk, self.ratio, tuple(self.ratios))

    def init_params(
        self,
        params: dict,
        config: ModelConfig,
        encoder: dict | None = None,
        mesh: jax.sharding.Mesh | None = None,
    ) -> dict:
        return with_beacons(params, config, self.begin, mesh)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "BeaconSection":
        return cls(**fields | {"ratios": tuple(fields["ratios"])})


@MemorySection.register_subclass("auto_compressor")
@dataclass(frozen=True)
class AutoCompressorSection(MemorySection):
    """AutoCompressor (arXiv 2305.14788): segments before the text are summed up in vectors."""

    chunk: int = 1536  # tokens of a segment
    summary: int = 50  # vectors that sum it up
    # Of a text in training, segments that gradients flow through together, as the paper's 2 of 4
    # (with data.chunks.learned); null: all.
    gradient_segments: int | None = None
    begin: int = 2  # the token whose embedding summary tokens begin with: EOS, as above

    def memory(self, config: ModelConfig, encoder: ModelConfig | None = None) -> AutoCompressor:
        check_token(self.begin, config)
        return AutoCompressor(self.chunk, self.summary, self.gradient_segments)

    def init_params(
        self,
        params: dict,
        config: ModelConfig,
        encoder: dict | None = None,
        mesh: jax.sharding.Mesh | None = None,
    ) -> dict:
        return with_embedding(params, config, self.begin, mesh)


def check_share(out: float) -> None:
    """Refuses what is no share of an output projection."""
    if not 0 <= out <= 1:
        raise InputError(
            f"model.memory.out={out} must lie in 0 ... 1: the share of self-attention's output"
            " projection that cross-attention begins with, 0 for none"
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


def from_note(note: dict[str, Any]) -> MemorySection:
    """The inverse of `MemorySection.note`; a note without a type is of CEPE, the first of them."""
    kind = MemorySection.get_choice_class(note.get("type", "cepe"))
    return kind.from_dict({key: value for key, value in note.items() if key != "type"})
