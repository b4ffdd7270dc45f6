"""The architecture of a decoder, and published architectures by name."""

import collections
import dataclasses
import difflib
import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from lcjax.attention import POSITIONS, Bidirectional, CacheMethod, Causal, Pattern, Sliding
from lcjax.config import check_choices
from lcjax.errors import InputError, Interval, OneOf, PositiveInt, Range, check_fields
from lcjax.models.experts import Experts
from lcjax.models.lora import LoRA
from lcjax.models.memory import Memory
from lcjax.models.mixer import GatedDeltaNet, Mixer
from lcjax.models.remat import Remat
from lcjax.models.weight_storage import WeightStorage
from lcjax.parallel.context import CHOICES, Heads, Strategy, strategy
from lcjax.parallel.sharding import Mesh
from lcjax.rope import Default, Llama3, NoRotation, Rope, Rotation, Yarn

Dtype = Annotated[str, OneOf(("float32", "bfloat16", "float16"))]
ContextParallel = Annotated[str, OneOf(CHOICES)]
PositionEncoding = Annotated[str, OneOf(POSITIONS)]
NormPlace = Annotated[str, OneOf(("before", "after", "both"))]
RotaryFraction = Annotated[float, Interval(above=0, most=1)]


# Fields of `LayerKind` in place of those of the model
_ATTENTION_FIELDS = (
    *("pattern", "rope", "head_dim", "num_kv_heads", "rotary_fraction", "values_from_keys"),
    "keys_of",
)
_LAYER_FIELDS = (*_ATTENTION_FIELDS, "mixer", "norm_place", "mlp_width")
MAX_LAYERS = 2_000  # the deepest published transformer has 1,000 (DeepNet, arXiv 2203.00555)


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """Successive layers that differ from the model's others: an entry of `model.layers`."""

    repeat: PositiveInt = 1  # layers
    pattern: Pattern | None = None  # attention pattern; null: that of the model
    rope: Rope | None = None  # position method; null: that of the model
    mixer: Mixer | None = None  # in place of attention; null: that of the model
    dense: bool = False  # whether an MLP of `mlp_width` replaces the model's experts
    norm_place: NormPlace | None = None  # null: that of the model
    # Of attention (Gemma 4); null: those of the model
    head_dim: PositiveInt | None = None
    num_kv_heads: PositiveInt | None = None
    rotary_fraction: RotaryFraction | None = None
    values_from_keys: bool | None = None
    # Number of an earlier layer whose keys and values attention reads, from 0; null: none
    keys_of: Annotated[int, Range(0, MAX_LAYERS)] | None = None
    mlp_width: PositiveInt | None = None

    def __post_init__(self):
        check_choices("layers", self)
        check_fields("layers", self)
        if self.mixer is not None and any(getattr(self, x) is not None for x in _ATTENTION_FIELDS):
            raise InputError(
                "model.layers: an entry with a mixer has no attention, which"
                f" {', '.join(_ATTENTION_FIELDS)} are for; leave them out of it, or leave mixer out"
            )


_DEFAULT_KIND = LayerKind()


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Configuration of a decoder-only transformer.

    Llama, Mixtral, Qwen, Gemma, OLMo and Phi are values of these fields, not classes.
    """

    vocab_size: int
    width: int  # D, the size of a token's hidden state
    mlp_width: int  # F
    num_layers: Annotated[int, Range(0, MAX_LAYERS)]
    num_heads: int  # query heads
    num_kv_heads: int  # key/value heads; must divide num_heads (grouped-query attention)
    head_dim: int
    max_length: int  # tokens the checkpoint was trained to read
    norm: Annotated[str, OneOf(("rms", "layer"))] = "rms"
    norm_bias: bool = True  # whether LayerNorm adds biases (Cohere does not)
    norm_epsilon: float = 1e-5
    # Of attention and MLP; "after": OLMo 2; "both": Gemma 2 and 3
    norm_place: NormPlace = "before"
    norm_plus_one: bool = False  # RMSNorm multiplies by 1 + scale (Gemma)
    # Norm of queries and keys before their rotation: of each head (Qwen3, Gemma 3), or of all
    # heads together (OLMo 2), or of each head with scales that heads do not share (Command R+);
    # unscaled: of each head after the rotation, without scales, in layers that rotate (Llama 4);
    # rotated: of each head after the rotation, with scales (Hunyuan)
    qk_norm: Annotated[str, OneOf(("none", "head", "all", "each", "unscaled", "rotated"))] = "none"
    value_norm: bool = False  # RMSNorm of the values of each head, without scales (Gemma 4)
    # Values are keys before their norm and rotation, without a projection of their own (Gemma 4)
    values_from_keys: bool = False
    # relu2: the square of ReLU (So et al. 2021, arXiv 2109.08668; Arcee)
    activation: Annotated[str, OneOf(("silu", "gelu_tanh", "relu2"))] = "silu"
    # "parallel": attention and MLP read the same normed input (Phi-2, Cohere)
    block: Annotated[str, OneOf(("sequential", "parallel"))] = "sequential"
    gated_mlp: bool = True
    # Mixtures of experts in place of MLPs (Mixtral), except in dense layers (`layers`)
    experts: Experts | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    # Share of each head that is rotated: its first channels (Phi), whose frequencies are those of a
    # head of their number; or the first frequencies of the whole head, of which those after the
    # share are 0 (Gemma 4)
    rotary_fraction: RotaryFraction = 1.0
    rotary_share: Annotated[str, OneOf(("channels", "frequencies"))] = "channels"
    tie_embeddings: bool = False
    embedding_scale: float = 1.0  # factor of embeddings (Gemma: the root of the width)
    residual_scale: float = 1.0  # factor of the outputs of attention and MLP (Granite)
    # Width of a second embedding of tokens, of which each layer adds a part to its output (Gemma 4
    # E2B); null: there is none
    layer_embedding: PositiveInt | None = None
    # In a config of one layer: the layer whose keys and values it reads (`LayerKind.keys_of`)
    keys_of: int | None = None
    layer_scale: bool = False  # whether a learned number multiplies the output of a layer (Gemma 4)
    attention_scale: float | None = None  # factor of the attention logits; null: 1 / sqrt(H)
    # b and L: queries at position p are multiplied by 1 + b ln(1 + floor(p / L)), which sharpens
    # attention at far positions (Llama 4, Ministral 3); 0 and null: they are not
    query_scale: float = 0.0
    query_scale_length: PositiveInt | None = None
    # all, or only layers without a rotation, where p counts from 1 (Llama 4)
    query_scale_layers: Annotated[str, OneOf(("all", "unrotated"))] = "all"
    # c: attention logits become c tanh(logit / c) (Gemma 2)
    attention_soft_cap: float | None = None
    # A learned logit of each query head in the denominator of attention (gpt-oss)
    attention_sinks: bool = False
    # The output of attention is multiplied by sigmoid(x W), with x its input (Qiu et al. 2025,
    # arXiv 2505.06708; Qwen3-Next)
    attention_gate: bool = False
    logit_scale: float = 1.0  # factor of the vocabulary logits (Granite)
    logit_soft_cap: float | None = None  # c: vocabulary logits become c tanh(logit / c) (Gemma 2)
    # Tokens that exports announce; null: from `max_length` and the rope (`Rope.extended_length`)
    extended_length: int | None = None
    # `model_type` for export to Hugging Face, if several types have the same architecture
    family: str | None = None
    mlm_head: bool = False  # logits of masked language modelling (`lcjax.models.encoder`)
    # or alibi, t5, transformer_xl, deberta, sinusoidal, learned (see `decoder.PositionEmbedding`)
    position: PositionEncoding = "rope"
    rope: Rope = dataclasses.field(default_factory=lambda: Default(theta=10_000.0))
    pattern: Pattern = dataclasses.field(default_factory=Causal)
    mixer: Mixer | None = None  # in place of attention in all layers (`lcjax.models.mixer`)
    # Layers with their own pattern, rope, mixer or MLP, repeated from the first to the last layer.
    # Empty: all layers have those of the model.
    layers: tuple[LayerKind, ...] = ()
    # What layers keep of the tokens that they read and generate; null: all that their patterns need
    cache: CacheMethod | None = None
    dtype: Dtype = "float32"  # of activations; softmax, norms, rotations and losses stay float32
    param_dtype: Dtype = "float32"
    # What the backward pass recomputes: none: nothing; full: whole layers; attention: layers except
    # attention; dots: all but attention and products with weights; offload: as attention, and host
    # memory keeps what is not recomputed; or places of results (`lcjax.models.remat`)
    remat: Remat = "none"
    # Attention over the mesh axis `context` (`lcjax.parallel.context`). ring: keys pass around a
    # ring of devices; all_to_all: heads are exchanged for tokens (needs as many heads on a device
    # as parts of the text); usp: groups of `context_group` devices exchange heads, in a ring of
    # groups; all_gather: every device gets all keys; auto: what fits the heads and the devices
    context_parallel: ContextParallel = "auto"
    context_group: PositiveInt | None = None  # null: the neighbours that can share the heads
    memory: Memory | None = None  # encoder of a context outside the window, and its reader layers
    lora: LoRA | None = None
    weights: WeightStorage | None = None  # codes in place of the matrices of layers; null: floats
    scan_layers: bool = True  # scan over equal layers, which are compiled once (see `stacked`)

    def __post_init__(self):
        check_choices("model", self)
        check_fields("model", self)
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                f"model.num_kv_heads={self.num_kv_heads} must divide num_heads={self.num_heads}"
            )
        if self.lora is not None and self.lora.rank > self.width:
            raise InputError(
                f"lora.rank={self.lora.rank} must be at most the width {self.width} of the model:"
                " its matrices have no higher rank"
            )
        if self.rotary_dim % 2:
            raise InputError(
                f"model.rotary_fraction={self.rotary_fraction} must leave an even number of rotated"
                f" channels of head_dim={self.head_dim}, at least 2; it leaves {self.rotary_dim}"
            )
        if self.mlm_head and not self.tie_embeddings:
            raise InputError(
                "model.mlm_head=true reads logits off the embedding; set tie_embeddings=true"
            )
        if self.qk_norm in ("unscaled", "rotated") and self.rotary_fraction != 1:
            raise InputError(
                f"model.rotary_fraction={self.rotary_fraction} is not defined for qk_norm="
                f"{self.qk_norm}, a norm of rotated heads; set rotary_fraction=1, or another"
                " qk_norm"
            )
        if self.qk_norm == "rotated" and self.norm != "rms":
            raise InputError(
                f"model.norm={self.norm} is not defined for qk_norm=rotated: a rotation changes the"
                " mean that it subtracts; set norm=rms, or another qk_norm"
            )
        if (self.query_scale != 0) != (self.query_scale_length is not None):
            raise InputError(
                f"model.query_scale={self.query_scale} needs query_scale_length, which is"
                f" {self.query_scale_length}; set both (Ministral 3: 0.1 and 16384), or neither"
            )
        if any(kind.mixer or self.mixer for kind in self.kinds):
            self._check_mixers()
        if self.experts is not None:
            self._check_experts()
        if self.memory is not None:
            self._check_memory()
        if self.cache is not None:
            self._check_cache()
        if self.weights is not None:
            self._check_weights()
        caps = all(pattern.supports_soft_cap for pattern in self.patterns)
        for field, is_defined in (
            ("attention_soft_cap", caps), ("attention_sinks", self.is_position_based)
        ):  # fmt: skip
            if getattr(self, field) and not (is_defined and self.position == "rope"):
                raise InputError(
                    f"model.{field} is not defined under pattern"
                    f" {', '.join(map(repr, self.patterns))} with position={self.position}; take a"
                    " pattern that chooses keys by their position alone, such as sliding or"
                    " streaming"
                )
        for kind in self.kinds if self.layers else ():
            if kind.dense and self.experts is None:
                raise InputError(
                    "model.layers: dense=true replaces experts by an MLP, and model.experts is"
                    " null, so all layers have MLPs; leave dense out"
                )
            if kind.norm_place is not None and self.block != "sequential":
                raise InputError(
                    f"model.layers: norm_place={kind.norm_place} is not defined for model.block="
                    f"{self.block}, whose layers have one norm; leave norm_place out"
                )
            layer = self.of_kind(kind)  # its `__post_init__` checks this pattern and rope
            if self.rope.learned and layer.rotary_dim != self.rotary_dim:
                raise InputError(
                    f"model.rope.type={self.rope.type} is learned for {self.rotary_dim} rotary"
                    f" channels, and some model.layers have {layer.rotary_dim}; take another rope"
                )
            if kind.rope is not None and kind.rope.learned:
                raise InputError(
                    f"model.layers: rope type {kind.rope.type} is learned for a whole model; set"
                    f" model.rope.type={kind.rope.type}, and leave it out of layers"
                )
        self._check_sources()
        self._check_parameters()
        choices = [x for x in (self.pattern, *self.patterns) if x.inserts_tokens]
        if choices and self.kinds != (LayerKind(),):
            kind = Pattern.get_choice_name(type(choices[0]))
            raise InputError(
                f"model.layers: pattern type {kind} inserts tokens into texts, which all layers"
                f" read; set model.pattern.type={kind}, and leave model.layers out"
            )
        if self.position == "rope":
            return
        if not isinstance(self.rope, Default):
            raise InputError(
                f"model.rope.type={self.rope.type} turns queries and keys, which a model with "
                f"position={self.position} does not; leave it out"
            )
        if self.position == "transformer_xl" and self.width % 2:
            raise InputError(
                f"model.position=transformer_xl needs an even model.width; it is {self.width}"
            )
        pattern = self.pattern.for_inference()
        for choice in (self.pattern, pattern):
            if self.position not in choice.encodings:
                raise InputError(
                    f"model.position={self.position} is not defined under pattern {choice!r}, "
                    f"which places tokens itself; it takes {', '.join(choice.encodings)}"
                )

    def _check_sources(self) -> None:
        """Raises an InputError if a layer cannot read the keys and values that it is to read."""
        names = ("pattern", "rope", "head_dim", "num_kv_heads", "rotary_fraction", "mixer")
        for index, number in enumerate(self.kind_by_layer):
            source = self.kinds[number].keys_of
            if source is None:
                continue
            if self.position == "deberta":
                raise InputError(
                    "model.position=deberta projects its table with the keys of each layer, which"
                    f" layer {index} has none of (keys_of={source}); take another position"
                )
            if self.qk_norm == "rotated":
                raise InputError(
                    "model.qk_norm=rotated multiplies queries by the scales of keys, which layer"
                    f" {index} has none of (keys_of={source}); take another qk_norm"
                )
            layer, other = self.layer(index), self.layer(source) if source < index else None
            if other is None or other.keys_of is not None or other.mixer is not None:
                raise InputError(
                    f"model.layers: keys_of={source} of layer {index} must be the number of an"
                    " earlier layer with attention and keys of its own"
                )
            wrong = [x for x in names if getattr(layer, x) != getattr(other, x)]
            if wrong:
                raise InputError(
                    f"model.layers: layer {index} reads the keys of layer {source}, whose"
                    f" {', '.join(wrong)} must be the same; they are"
                    f" {', '.join(repr(getattr(other, x)) for x in wrong)} there and"
                    f" {', '.join(repr(getattr(layer, x)) for x in wrong)} here"
                )

    def _check_parameters(self) -> None:
        """Raises an InputError if patterns with parameters cannot have them in this model."""
        for pattern in self.patterns if self.layers else (self.pattern,):
            if not pattern.parameters or self.mixer is not None:
                continue
            shared = any(kind.keys_of is not None for kind in self.kinds)
            if self.memory is not None or shared:
                kind = Pattern.get_choice_name(type(pattern))
                other = "model.memory" if self.memory is not None else "layers with keys_of"
                raise InputError(
                    f"model.pattern.type={kind} has parameters of its own, which are not defined"
                    f" beside {other}; take another pattern"
                )

    def _check_mixers(self) -> None:
        """Raises an InputError if layers with a mixer cannot be beside the others."""
        if self.mixer is not None and self.layers:
            raise InputError(
                "model.mixer takes the place of attention in all layers; to mix them, leave it out"
                " and set mixer in entries of model.layers"
            )
        for pattern in (self.pattern, *self.patterns):
            if pattern.inserts_tokens or not pattern.is_causal:
                raise InputError(
                    f"model.pattern={pattern!r}: layers with a mixer read texts as they are, from"
                    " left to right; take a pattern that inserts no tokens and shows none to come"
                )

    def _check_experts(self) -> None:
        """Raises an InputError if a field has a value that mixtures of experts do not support."""
        for field, value in {"gated_mlp": True, "mlp_bias": False}.items():
            if getattr(self, field) != value:
                raise InputError(
                    f"model.{field}={getattr(self, field)} is not defined for model.experts; set"
                    f" {field}={value}"
                )
        mlp = [name for name in ("gate", "up", "down") if self.lora and name in self.lora.targets]
        if mlp and self.experts.shared_width is None:
            raise InputError(
                f"lora.targets={list(self.lora.targets)}: {', '.join(mlp)} of a mixture of experts"
                " get no adapters; set lora.targets to some of query, key, value, out"
            )

    def _check_memory(self) -> None:
        """Raises an InputError if memories, or this memory, do not support the architecture."""
        plain = {"norm_place": "before", "qk_norm": "none", "residual_scale": 1.0, "experts": None}
        plain |= {"attention_scale": None, "attention_soft_cap": None, "norm_plus_one": False}
        plain |= {"attention_sinks": False, "query_scale": 0.0, "mixer": None}
        plain |= {"attention_gate": False, "rotary_share": "channels"}
        plain |= {"value_norm": False, "values_from_keys": False, "layer_scale": False}
        plain |= {"layer_embedding": None}
        for field, value in plain.items():
            if getattr(self, field) != value:
                raise InputError(
                    f"model.memory is not defined for models with {field}={getattr(self, field)!r};"
                    " take a model of the Llama, Mistral or Qwen2 families"
                )
        for field in ("head_dim", "num_kv_heads", "rotary_fraction", "keys_of", "mlp_width"):
            if any(getattr(kind, field) is not None for kind in self.kinds):
                raise InputError(
                    f"model.memory is not defined for models whose layers have a {field} of their"
                    " own (model.layers); take a model of the Llama, Mistral or Qwen2 families"
                )
        self.memory.check(self)

    def _check_cache(self) -> None:
        """Raises an InputError if `cache` is not defined for this model."""
        if not self.has_exact_cache and (self.memory is not None or self.position != "rope"):
            reason = "model.memory" if self.memory is not None else f"position={self.position}"
            raise InputError(
                f"model.cache is not defined for models with {reason}; leave one of the two out"
            )
        if self.evicts and self.qk_norm == "rotated":
            raise InputError(
                "model.cache: policies that evict tokens are not defined for models with"
                " qk_norm=rotated, whose caches hold keys without the scales of their norm; take"
                " an exact cache, such as quest, or a pattern, such as streaming"
            )
        for pattern in self.patterns:
            self.cache.check(pattern)

    def _check_weights(self) -> None:
        """Raises an InputError if the matrices of this model cannot be stored as codes."""
        if self.memory is not None:
            raise InputError(
                "model.weights is not defined for models with model.memory, whose matrices are"
                " trained; leave one of the two out"
            )
        sizes = {"width": self.width, "heads": self.num_heads * self.head_dim}
        sizes["mlp_width"] = self.expert_width
        if self.experts is not None and self.experts.shared_width is not None:
            sizes["experts.shared_width"] = self.experts.shared_width
        if self.mixer is not None:
            sizes["mixer"] = self.mixer.width
        self.weights.check(sizes)

    @property
    def has_exact_cache(self) -> bool:
        """Whether a token reads all keys that its pattern shows (`CacheMethod.is_exact`)."""
        return self.cache is None or self.cache.is_exact

    @property
    def evicts(self) -> bool:
        """Whether layers evict tokens that their patterns need."""
        return self.cache is not None and self.cache.evicts

    def context_strategy(
        self, mesh: Mesh | jax.sharding.Mesh | None, length: int, near: int | None = None
    ) -> Strategy:
        """Returns what devices exchange that share a text of `length` tokens.

        `near` is the number of successive devices with fast links, if the mesh has sizes alone.
        """
        heads = Heads(self.num_heads, self.num_kv_heads, self.head_dim)
        group = self.context_group
        return strategy(self.context_parallel, mesh, heads, length, group, near=near)

    def for_inference(self) -> "ModelConfig":
        """Returns the config for evaluation and generation."""
        memory = None if self.memory is None else self.memory.for_inference()
        layers = tuple(
            kind if kind.pattern is None
            else dataclasses.replace(kind, pattern=kind.pattern.for_inference())
            for kind in self.layers
        )  # fmt: skip
        return self.replace(pattern=self.pattern.for_inference(), layers=layers, memory=memory)

    # Layers that differ

    # Asked for layer by layer in stacks of any depth, so computed once for a config.
    @functools.cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The distinct kinds of layers; a single one if all layers are equal."""
        if self._pattern_differs_by_layer:
            return tuple(dict.fromkeys(self._kinds_of_layers)) or (LayerKind(),)
        kinds = (dataclasses.replace(kind, repeat=1) for kind in self.layers)
        return tuple(dict.fromkeys(kinds)) or (LayerKind(),)

    @property
    def _pattern_differs_by_layer(self) -> bool:
        patterns = [kind.pattern or self.pattern for kind in self.layers] or [self.pattern]
        return any(pattern.differs_by_layer for pattern in patterns)

    @functools.cached_property
    def _kinds_of_layers(self) -> tuple[LayerKind, ...]:
        """The kind of each layer, with its own form of a pattern that differs by layer."""
        cycle = [
            dataclasses.replace(kind, repeat=1)
            for kind in self.layers or (LayerKind(),)
            for _ in range(min(kind.repeat, self.num_layers))
        ]

        def of_layer(index, kind):
            pattern = kind.pattern or self.pattern
            if kind.mixer is not None or not pattern.differs_by_layer:
                return kind
            return dataclasses.replace(kind, pattern=pattern.for_layer(index, self.num_layers))

        layers = enumerate(itertools.islice(itertools.cycle(cycle), self.num_layers))
        return tuple(of_layer(index, kind) for index, kind in layers)

    @functools.cached_property
    def kind_by_layer(self) -> tuple[int, ...]:
        """The index in `kinds` of each layer."""
        numbers = {kind: number for number, kind in enumerate(self.kinds)}
        return tuple(map(numbers.__getitem__, self._kinds_of_layers))

    def of_kind(self, kind: LayerKind) -> "ModelConfig":
        """Returns a config in which all layers are of `kind`."""
        stated = {name: getattr(kind, name) for name in _LAYER_FIELDS}
        chosen = {name: value for name, value in stated.items() if value is not None}
        experts = None if kind.dense else self.experts
        return self.replace(**chosen, experts=experts, layers=())

    @functools.cached_property
    def _by_kind(self) -> tuple["ModelConfig", ...]:
        """The config of each of `kinds`."""
        return tuple(self.of_kind(kind) for kind in self.kinds)

    def layer(self, index: int) -> "ModelConfig":
        """Returns a config in which all layers are as layer `index`."""
        differs = self.layers or self._pattern_differs_by_layer
        return self._by_kind[self.kind_by_layer[index]] if differs else self

    @functools.cached_property
    def key_sources(self) -> tuple[int, ...]:
        """For each layer the number of that whose keys and values it reads: mostly its own."""
        sources = (self.kinds[kind].keys_of for kind in self.kind_by_layer)
        return tuple(i if source is None else source for i, source in enumerate(sources))

    @functools.cached_property
    def shared_layers(self) -> frozenset[int]:
        """The numbers of the layers whose keys and values other layers read."""
        return frozenset(x for index, x in enumerate(self.key_sources) if x != index)

    def kinds_with(self, layers: tuple[LayerKind, ...]) -> tuple[LayerKind, ...]:
        """Returns kinds of layers with the patterns and ropes of `layers`.

        What weights depend on, such as mixers, dense MLPs, norms and sizes of heads, stays as it is
        in each layer.

        Raises:
          InputError: an entry of `layers` states another value of these than this model has there.
        """
        other, kinds = self.replace(layers=layers), []
        for index, number in enumerate(other.kind_by_layer):
            new, old = other.kinds[number], self.kinds[self.kind_by_layer[index]]
            names = {*_LAYER_FIELDS, "dense"} - {"pattern", "rope"}
            parts = {name: getattr(old, name) for name in sorted(names)}
            for name, part in parts.items():
                if getattr(new, name) not in (getattr(_DEFAULT_KIND, name), part):
                    raise InputError(
                        f"model.layers: {name}={getattr(new, name)} of layer {index} does not fit"
                        f" the weights of this model, whose layer has {name}={part}; leave {name}"
                        " out, which stays as the weights have it"
                    )
            if old.mixer is not None:  # it has nothing to mask or rotate
                parts |= {"pattern": None, "rope": None}
            kinds.append(dataclasses.replace(new, **parts))
        same = all(map(operator.eq, kinds, (other.kinds[i] for i in other.kind_by_layer)))
        return layers if same else shortest_period(kinds)

    @property
    def patterns(self) -> tuple[Pattern, ...]:
        """The distinct patterns of the layers with attention."""
        if self.mixer is not None:
            return ()
        kinds = (kind for kind in self.kinds if kind.mixer is None)
        return tuple(dict.fromkeys(kind.pattern or self.pattern for kind in kinds))

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """The distinct mixers of the layers without attention."""
        mixers = (layer.mixer for layer, _ in self.layer_counts)
        return tuple(dict.fromkeys(mixer for mixer in mixers if mixer is not None))

    @property
    def is_position_based(self) -> bool:
        """Whether order indices alone decide visibility in all layers (`Pattern`)."""
        return all(pattern.is_position_based for pattern in self.patterns)

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether a prompt must be read in one call (`Pattern.needs_whole_prompt`)."""
        return any(pattern.needs_whole_prompt for pattern in self.patterns)

    @property
    def layer_counts(self) -> list[tuple["ModelConfig", int]]:
        """The config of each kind of layers, and its number of layers."""
        counts = collections.Counter(self.kind_by_layer)
        return [(self._by_kind[kind], count) for kind, count in counts.items()]

    def check_scores(self) -> None:
        """Raises an InputError if losses are meaningless in some layer (`Pattern.is_causal`)."""
        for pattern in self.patterns:
            pattern.check_scores()

    @property
    def depends_on_length(self) -> bool:
        """Whether `rotation` depends on the length of the request."""
        return any(
            config.rope.depends_on_length or config.pattern.depends_on_length
            for config in map(self.of_kind, self.kinds)
        )

    def rotation(self, length: int, learned: dict | None = None) -> Rotation:
        """Returns the rotation of a request of `length` tokens.

        Args:
          length: tokens of the whole request, as in `Rope.frequencies`.
          learned: parameters of a learned rope.
        """
        return self.complete(self.rope.rotation(self.rotary_dim, length, learned), length)

    def complete(self, rotation: Rotation, length: int) -> Rotation:
        """Applies `rotary_share` and `Pattern.at_length`, and adds the rotation of each kind.

        Args:
          rotation: the rotation of the model's rope.
          length: tokens of the whole request.
        """

        def of(kind: LayerKind) -> Rotation:
            layer, plain = self.of_kind(kind), rotation
            if self._has_other_rotation(kind):
                plain = layer.rope.rotation(layer.rotary_dim, length)
            return layer._complete(plain, length)

        kinds = tuple(map(of, self.kinds)) if self.layers else ()
        return self._complete(rotation, length)._replace(kinds=kinds)

    def _complete(self, rotation: Rotation, length: int) -> Rotation:
        """Returns the rotation of layers that are as the model, from that of their rope."""
        if self.rotary_share == "frequencies":
            count = int(self.rotary_fraction * self.head_dim // 2)
            turns = np.arange(rotation.inv_freq.shape[-1]) < count
            rotation = rotation._replace(inv_freq=jnp.where(turns, rotation.inv_freq, 0))
        return self.pattern.at_length(rotation, length)

    def _has_other_rotation(self, kind: LayerKind) -> bool:
        """Returns whether the model's rope does not give the frequencies of layers of `kind`."""
        return kind.rope is not None or self.of_kind(kind).rotary_dim != self.rotary_dim

    @property
    def has_several_rotations(self) -> bool:
        """Whether some layers rotate otherwise than the model."""
        fractions = {layer.rotary_fraction for layer, _ in self.layer_counts}
        return fractions != {self.rotary_fraction} or any(map(self._has_other_rotation, self.kinds))

    def check_length(self, length: int) -> None:
        """Raises an InputError if `length` exceeds the rows of a table of learned positions."""
        if self.position == "learned" and length > self.max_length:
            raise InputError(
                f"{length} tokens are more than the {self.max_length} positions that a model with "
                "position=learned has rows for; give it less text"
            )

    @property
    def stacked(self) -> bool:
        """Whether layer weights are stacked [L, ...] under `layers`.

        Otherwise each layer's weights are under `layers_0`, `layers_1`, ... They are so if layers
        differ, or add embeddings of their own; `lcjax.models.layer_groups` then scans groups of
        equal layers.
        """
        memory = self.memory
        is_uniform = memory is None or memory.uniform_layers(self.num_layers)
        is_uniform &= self.layer_embedding is None
        return self.scan_layers and len(self.kinds) == 1 and is_uniform

    @property
    def expert_width(self) -> int:
        """The feed-forward width F of an expert, or of the MLP of a model without experts."""
        return (self.experts and self.experts.width) or self.mlp_width

    @property
    def rotates(self) -> bool:
        """Whether attention rotates queries and keys; of a config whose layers are equal."""
        return self.position == "rope" and not isinstance(self.rope, NoRotation)

    @property
    def rotary_dim(self) -> int:
        """Rotary channels R of each head, of which methods compute the frequencies."""
        if self.rotary_share == "frequencies":
            return self.head_dim
        return int(self.head_dim * self.rotary_fraction)  # as transformers rounds it

    def replace(self, **changes: Any) -> "ModelConfig":
        return dataclasses.replace(self, **changes)

    def compute_dtype(self) -> jnp.dtype:
        return jnp.dtype(self.dtype)


def shortest_period(kinds: Sequence[LayerKind]) -> tuple[LayerKind, ...]:
    """Returns the shortest `ModelConfig.layers` that describes layers of these `kinds`.

    Args:
      kinds: the kind of each layer.
    """
    lengths = range(1, len(kinds) + 1)
    period = next(n for n in lengths if all(map(operator.eq, kinds, kinds[n:])))
    runs = ((kind, len(list(run))) for kind, run in itertools.groupby(kinds[:period]))
    return tuple(dataclasses.replace(kind, repeat=length) for kind, length in runs)


def _llama2(width, mlp_width, layers, heads):
    return ModelConfig(32_000, width, mlp_width, layers, heads, heads, 128, 4_096)


def _encoder(vocab, width, mlp_width, layers, heads, length):
    """Returns a bidirectional Llama for masked language modelling; [MASK] is the last token id."""
    return ModelConfig(
        *(vocab, width, mlp_width, layers, heads, heads, width // heads, length),
        norm_epsilon=1e-6,
        tie_embeddings=True,
        mlm_head=True,
        pattern=Bidirectional(),
    )


# As published, after the context extension. Before it, the rope was `Default`, for 8,192 tokens.
_OLMO3 = {
    "norm_epsilon": 1e-6,
    "norm_place": "after",
    "qk_norm": "all",
    "rope": Yarn(theta=500_000.0, factor=8.0, original_length=8_192),
    "layers": (
        LayerKind(repeat=3, pattern=Sliding(window=4_096), rope=Default(theta=500_000.0)),
        LayerKind(),
    ),
}


def _gpt_oss(experts):
    return {
        "qkv_bias": True,
        "out_bias": True,
        "attention_sinks": True,
        "experts": Experts(experts, 4, bias=True, swiglu_limit=7.0, balance=0.9),
        "rope": Yarn(theta=150_000.0, factor=32.0, original_length=4_096, truncate=False),
        "layers": (LayerKind(pattern=Sliding(window=128)), LayerKind()),
    }


PRESETS = {
    # For tests and dry runs: has every part of a Llama, and trains in seconds on a laptop.
    "tiny": ModelConfig(259, 64, 160, 2, 4, 2, 16, 128),
    # Llamas that learn to read code byte by byte in minutes on a laptop, for small studies.
    "llama-400k": ModelConfig(259, 96, 256, 3, 3, 3, 32, 128),
    "llama-1m": ModelConfig(259, 128, 352, 4, 4, 4, 32, 128),
    "smollm2-135m": ModelConfig(
        *(49_152, 576, 1_536, 30, 9, 3, 64, 8_192),
        tie_embeddings=True,
        rope=Default(theta=100_000.0),
    ),
    "tinyllama-1.1b": ModelConfig(32_000, 2_048, 5_632, 22, 32, 4, 64, 2_048),
    # The encoder of CEPE: Llama-2's vocabulary and [MASK] (arXiv 2402.16617, app. A.1).
    "cepe-encoder": _encoder(32_001, 1_024, 4_096, 24, 16, 512),
    # For SmolLM2-135M: a third of its size; two fifths of the parameters are embeddings.
    "smollm2-encoder": _encoder(49_153, 384, 1_536, 12, 6, 512),
    "tiny-encoder": _encoder(260, 32, 80, 2, 2, 64),
    "llama2-7b": _llama2(4_096, 11_008, 32, 32),
    "llama2-13b": _llama2(5_120, 13_824, 40, 40),
    "llama3-8b": ModelConfig(
        *(128_256, 4_096, 14_336, 32, 32, 8, 128, 8_192), rope=Default(theta=500_000.0)
    ),
    "llama3.1-8b": ModelConfig(
        *(128_256, 4_096, 14_336, 32, 32, 8, 128, 131_072),
        rope=Llama3(theta=500_000.0, factor=8.0, original_length=8_192),
    ),
    "qwen2.5-7b": ModelConfig(
        *(152_064, 3_584, 18_944, 28, 28, 4, 128, 32_768),
        norm_epsilon=1e-6,
        qkv_bias=True,
        rope=Default(theta=1_000_000.0),
    ),
    "qwen3-8b": ModelConfig(
        *(151_936, 4_096, 12_288, 36, 32, 8, 128, 40_960),
        norm_epsilon=1e-6,
        qk_norm="head",
        rope=Default(theta=1_000_000.0),
    ),
    # The text part: of every four layers, three of Gated DeltaNet and one with gated attention
    "qwen3.5-9b": ModelConfig(
        *(248_320, 4_096, 12_288, 32, 16, 4, 256, 262_144),
        norm_epsilon=1e-6,
        norm_plus_one=True,
        qk_norm="head",
        attention_gate=True,
        rotary_fraction=0.25,
        rope=Default(theta=10_000_000.0),
        layers=(LayerKind(repeat=3, mixer=GatedDeltaNet(16, 32, 128, 128)), LayerKind()),
    ),
    "olmo3-7b": ModelConfig(*(100_278, 4_096, 11_008, 32, 32, 32, 128, 65_536), **_OLMO3),
    "olmo3-32b": ModelConfig(*(100_278, 5_120, 27_648, 64, 40, 8, 128, 65_536), **_OLMO3),
    "gpt-oss-20b": ModelConfig(*(201_088, 2_880, 2_880, 24, 64, 8, 64, 131_072), **_gpt_oss(32)),
    "gpt-oss-120b": ModelConfig(*(201_088, 2_880, 2_880, 36, 64, 8, 64, 131_072), **_gpt_oss(128)),
    "mistral-7b": ModelConfig(
        *(32_000, 4_096, 14_336, 32, 32, 8, 128, 32_768), pattern=Sliding(window=4_096)
    ),
    "phi-2": ModelConfig(
        *(51_200, 2_560, 10_240, 32, 32, 32, 80, 2_048),
        norm="layer",
        activation="gelu_tanh",
        block="parallel",
        gated_mlp=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        head_bias=True,
        rotary_fraction=0.4,
    ),
}


def preset(name: str) -> ModelConfig:
    """Returns the architecture `name`.

    Raises:
      InputError: the name is unknown; the message lists similar names.
    """
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS) or sorted(PRESETS)
        raise InputError(f"model.preset={name!r} is not known; try {', '.join(near)}")
    return PRESETS[name]


# Hub checkpoints whose architecture is a preset, so that estimates need no download.
HUB = {
    "HuggingFaceTB/SmolLM2-135M": "smollm2-135m",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "smollm2-135m",
    "TinyLlama/TinyLlama_v1.1": "tinyllama-1.1b",
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": "tinyllama-1.1b",
    "meta-llama/Llama-2-7b-hf": "llama2-7b",
    "meta-llama/Llama-2-7b-chat-hf": "llama2-7b",
    "meta-llama/Llama-2-13b-hf": "llama2-13b",
    "meta-llama/Llama-2-13b-chat-hf": "llama2-13b",
    "meta-llama/Meta-Llama-3-8B": "llama3-8b",
    "meta-llama/Meta-Llama-3-8B-Instruct": "llama3-8b",
    "meta-llama/Llama-3.1-8B": "llama3.1-8b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama3.1-8b",
    "Qwen/Qwen2.5-7B-Instruct": "qwen2.5-7b",
    "Qwen/Qwen3-8B": "qwen3-8b",
    "Qwen/Qwen3.5-9B": "qwen3.5-9b",
    "openai/gpt-oss-20b": "gpt-oss-20b",
    "openai/gpt-oss-120b": "gpt-oss-120b",
    "allenai/Olmo-3-1025-7B": "olmo3-7b",
    "allenai/Olmo-3-1125-32B": "olmo3-32b",
    "microsoft/phi-2": "phi-2",
    "hyen/LLaMA-MLM-Large": "cepe-encoder",
}
