"""The model families of transformers that the decoder supports, as a table with an entry for each.

An entry lists the fields that the class of a family fixes, the keys of `config.json` that set
fields of `ModelConfig`, the layers with a window or a rotation of their own, and the modules whose
names differ from Llama's. Reading and writing configs, and the names of tensors, follow from it.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from lcjax.attention import Chunked, Pattern, Sliding
from lcjax.errors import InputError
from lcjax.models.model_config import ModelConfig

# Values of `layer_types`
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
CHUNKED = "chunked_attention"


@dataclasses.dataclass(frozen=True)
class Key:
    """A key of `config.json` that sets one or several fields of `ModelConfig` to one value."""

    name: str
    fields: tuple[str, ...]
    default: Any  # transformers' value of an absent key, or a function of the config
    read: Callable[[Any], Any] = lambda value: value
    write: Callable[[Any, ModelConfig], Any] = lambda value, config: value
    alias: str | None = None  # another name of the key, for reading
    values: tuple | None = None  # of the fields that the key can set; None: all

    def value(self, hf: Mapping[str, Any]) -> Any:
        """Returns the value of the fields."""
        if self.name not in hf and self.alias not in hf and callable(self.default):
            return self.read(self.default(hf))
        return self.read(hf.get(self.name, hf.get(self.alias, self.default)))


class LocalLayers(NamedTuple):
    """How `config.json` calls layers that see a part of the text, and their pattern."""

    type: str  # in `layer_types`
    key: str  # of the size of the part
    pattern: type[Pattern]  # takes the size


class DenseLayers(NamedTuple):
    """How `config.json` states which layers of a mixture of experts have an MLP instead."""

    read: Callable[[dict[str, Any]], list[bool]]  # from the config, whether each layer has one
    write: Callable[[list[bool]], dict[str, Any]]  # the keys


@dataclasses.dataclass(frozen=True)
class Family:
    """A model type of transformers, described by its differences from Llama."""

    architecture: str  # the class of its models
    # Fields of `ModelConfig` that the class fixes; a function is called with the width.
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    keys: tuple[Key, ...] = ()
    epsilon: Key = Key("rms_norm_eps", ("norm_epsilon",), 1e-6)
    activation_key: str = "hidden_act"
    head_dim: int | None = None  # if the key is absent; None: width / number of heads
    tied: bool = False  # if `tie_word_embeddings` is absent
    theta: float = 10_000.0  # if `rope_theta` is absent
    rotary_fraction: float | None = None  # if its key is absent; None: no key, heads rotate whole
    # Layers with the window `local.key`: "none"; "all", unless it is null; "types", those that
    # `layer_types` lists, or without this key `default_types(config.json)`.
    windows: str = "none"
    local: LocalLayers = LocalLayers(SLIDING, "sliding_window", Sliding)
    window: int | None = 4_096  # if `local.key` is absent
    window_switch: bool = False  # whether `use_sliding_window` must be true
    default_types: Callable[[dict[str, Any]], list[str]] | None = None
    # Layers without a rotation: "none"; "listed" by `no_rope_layers`; "full", those without a
    # window; "full beside windows", these unless `sliding_window` is null; "null theta", all if
    # `rope_theta` is null; "zero theta", those whose entry of `layer_rope_theta` is 0, which lists
    # the base of each layer.
    unrotated_layers: str = "none"
    rope_types: tuple[str, ...] | None = None  # supported by its class; None: all
    # Whether rope type "dynamic" with an `alpha` is plain rope with the base of `rope.NTK`
    static_alpha: bool = False
    # `rope_parameters` of a config without any; None: plain rope
    default_rope: Mapping[str, Any] | None = None
    # Keys of queries that are scaled by their position: "none"; "rope", `llama_4_scaling_beta` of
    # `rope_parameters`; "layers", `attn_temperature_tuning` and others, in layers without rotation
    query_scale: str = "none"
    # RoPE base of layers with a window, if no key states it; None: they share the model's rope.
    local_theta: float | None = None
    local_theta_key: str | None = None  # its key in older configs
    # Whether layers with full attention have heads of other sizes than those with a window, values
    # from keys or not (`attention_k_eq_v`), and a share of frequencies that rotates (Gemma 4)
    full_heads: bool = False
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of other absent keys
    own_head_dim: bool = True  # whether the head size may differ from width / number of heads
    # Whether neighbouring channels rotate as a pair (2i, 2i + 1). The library's pairs are
    # (i, i + R/2), so rows of queries and keys are reordered when they are read and written. The
    # config of a checkpoint always states such a family, whose tensors have another order.
    interleaved: bool = False
    fused: tuple[str, ...] = ()  # projections that are stored together, from `hf_names.FUSED`
    mlp_width_key: str = "intermediate_size"
    experts: tuple[Key, ...] = ()  # of a mixture of experts; keys set fields of `Experts`
    # Fields of these that the class fixes; a function is called with the width of MLPs.
    fixed_experts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    dense: DenseLayers | None = None  # None: no layer is dense
    # How the matrices of experts are stored: "each" by itself; those of all in one array, where
    # columns of gate and up-projection are "alternating" or "halves", or rows are halves ("rows")
    expert_arrays: str = "each"
    # Of the mixer of layers that `layer_types` calls LINEAR; keys set fields of `GatedDeltaNet`
    mixer: tuple[Key, ...] = ()
    fixed_mixer: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # fields of it
    mixer_norm_place: str | None = None  # of layers with the mixer; None: as of the others
    mixed: bool = False  # whether there must be layers with the mixer and layers without
    quantised: tuple[str, ...] = ()  # methods of `quantization_config` that are read
    # Keys and the only values that are supported; the first value is that of an absent key.
    only: Mapping[str, tuple] = dataclasses.field(default_factory=dict)
    # Modules whose name differs from Llama's.
    modules: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # Those that have another name in layers with the mixer
    mixer_modules: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # Pairs of names under which transformers reads the same module
    synonyms: tuple[tuple[str, str], ...] = ()

    def fixed_fields(self, width: int) -> dict[str, Any]:
        """Returns the fields that the class fixes, for a model of this width."""
        return {k: v(width) if callable(v) else v for k, v in self.fixed.items()}

    def fixed_expert_fields(self, mlp_width: int) -> dict[str, Any]:
        """Returns the fields of experts that the class fixes, for MLPs of this width."""
        return {k: v(mlp_width) if callable(v) else v for k, v in self.fixed_experts.items()}


def _every(period: int) -> Callable[[dict[str, Any]], list[str]]:
    """Returns a function of `config.json` that gives every `period`-th layer full attention."""
    return lambda hf: [
        SLIDING if (i + 1) % period else FULL for i in range(hf["num_hidden_layers"])
    ]


def _stated_period(period: int) -> Callable[[dict[str, Any]], list[str]]:
    """Returns a function like `_every`, for the period in `config.json`; `period` if none is."""

    def types(hf: dict[str, Any]) -> list[str]:
        stated = hf.get("sliding_window_pattern", period)
        if isinstance(stated, str) or stated == 0:  # EXAONE 4 has both, beside layer_types
            raise InputError(
                f"sliding_window_pattern={stated!r:.60} is not supported without layer_types, as in"
                " transformers; add the type of each layer as layer_types"
            )
        return _every(stated)(hf)

    return types


def _from_layer(hf: dict[str, Any]) -> list[str]:
    full = hf.get("max_window_layers", 28)
    return [FULL if i < full else SLIDING for i in range(hf["num_hidden_layers"])]


def _qwen_dense(hf: dict[str, Any]) -> list[bool]:
    step, listed = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers", [])
    return [
        i in listed or (i + 1) % step != 0 or hf.get("num_experts") == 0
        for i in range(hf["num_hidden_layers"])
    ]


def _llama4_dense(hf: dict[str, Any]) -> list[bool]:
    step, layers = hf.get("interleave_moe_layer_step", 1), range(hf["num_hidden_layers"])
    if "moe_layers" in hf:
        return [i not in hf["moe_layers"] for i in layers]
    if step < 1:
        raise InputError(
            f"interleave_moe_layer_step={step} must be at least 1 in a config without moe_layers;"
            " correct it"
        )
    return [(i + 1) % step != 0 for i in layers]


def _even_layers_before(hf: dict[str, Any]) -> list[str]:
    """Returns a window for layers of even numbers before `max_window_layers` (Qwen2-MoE)."""
    last = hf.get("max_window_layers", 28)
    count = hf["num_hidden_layers"]
    return [SLIDING if i % 2 == 0 and i < last else FULL for i in range(count)]


def unrotated(hf: dict[str, Any]) -> list[bool]:
    """Returns whether each layer of a family with `unrotated_layers` has no rotation."""
    interval = hf.get("no_rope_layer_interval", 4)
    count = hf["num_hidden_layers"]
    rotated = hf.get("no_rope_layers") or [(i + 1) % interval != 0 for i in range(count)]
    return [not layer for layer in rotated]


def _linear_layers(hf: dict[str, Any]) -> list[str]:
    interval = hf.get("full_attention_interval", 4)
    return [FULL if (i + 1) % interval == 0 else LINEAR for i in range(hf["num_hidden_layers"])]


def _linear_layers_and_one_full(hf: dict[str, Any]) -> list[str]:
    types = [FULL if i % 4 == 3 else LINEAR for i in range(hf["num_hidden_layers"])]
    return types if FULL in types else [*types[:-1], FULL]


def _olmo_key_dim(hf: dict[str, Any]) -> int:
    heads = hf.get("linear_num_key_heads", hf["num_attention_heads"])
    return int(0.75 * hf["hidden_size"] / heads)


_EPSILON = Key("rms_norm_eps", ("norm_epsilon",), 1e-5)  # of classes whose default is not Llama's
_ATTENTION_BIAS = Key("attention_bias", ("qkv_bias", "out_bias"), False)
_MLP_BIAS = Key("mlp_bias", ("mlp_bias",), False)
_QWEN_DENSE = DenseLayers(
    _qwen_dense,
    lambda dense: {
        "mlp_only_layers": [i for i, is_dense in enumerate(dense) if is_dense],
        "decoder_sparse_step": 1,
    },
)
_QWEN_LAYERS = {"windows": "types", "window_switch": True, "default_types": _from_layer}
_GEMMA = {
    "activation": "gelu_tanh",
    "norm_place": "both",
    "norm_plus_one": True,
    "embedding_scale": math.sqrt,
}


def _gemma_keys(logit_cap: float | None) -> tuple[Key, ...]:
    def write_scale(scale: float | None, config: ModelConfig) -> int | float:
        value = config.head_dim if scale is None else round(scale**-2, 6)
        return int(value) if value == int(value) else value

    return (
        Key(
            "query_pre_attn_scalar",
            ("attention_scale",),
            256,
            lambda s: s**-0.5,
            write_scale,
        ),
        Key("final_logit_softcapping", ("logit_soft_cap",), logit_cap),
        _ATTENTION_BIAS,
    )


# transformers' Gemma 3 has the key and ignores it.
_ATTENTION_CAP = Key("attn_logit_softcapping", ("attention_soft_cap",), 50.0)
_GRANITE_KEYS = (
    Key("embedding_multiplier", ("embedding_scale",), 1.0),
    Key("residual_multiplier", ("residual_scale",), 1.0),
    Key(
        *("attention_multiplier", ("attention_scale",), 1.0),
        write=lambda scale, config: config.head_dim**-0.5 if scale is None else scale,
    ),
    Key(
        *("logits_scaling", ("logit_scale",), 1.0),
        read=lambda divisor: 1 / divisor,
        write=lambda scale, config: 1 / scale,
    ),
    *(_ATTENTION_BIAS, _MLP_BIAS),
)
_GEMMA4_FAMILY = {
    "fixed": {
        "activation": "gelu_tanh",
        "norm_place": "both",
        "qk_norm": "head",
        "value_norm": True,
        "layer_scale": True,
        "embedding_scale": math.sqrt,
        "attention_scale": 1.0,
        "rotary_share": "frequencies",
    },
    "keys": (Key("final_logit_softcapping", ("logit_soft_cap",), None), _ATTENTION_BIAS),
    "activation_key": "hidden_activation",
    "head_dim": 256,
    "tied": True,
    "theta": 1_000_000.0,
    "windows": "types",
    "default_types": _every(6),
    "local_theta": 10_000.0,
    "default_rope": {
        SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
        FULL: {
            "rope_type": "proportional",
            "rope_theta": 1_000_000.0,
            "partial_rotary_factor": 0.25,
        },
    },
    "full_heads": True,
}
_GEMMA4_ONLY = {
    "use_bidirectional_attention": (None, "vision"),  # of the tokens of images
}
_OLMO = {"norm_place": "after", "qk_norm": "all"}


def _expert_keys(count: str, default: int, top_k: int, balance: float) -> tuple[Key, ...]:
    other = {"num_experts": "num_local_experts"}.get(count)  # transformers 5 writes this for some
    return (
        Key(count, ("count",), default, alias=other),
        Key("num_experts_per_tok", ("top_k",), top_k),
        Key("router_aux_loss_coef", ("balance",), balance),
    )


_GLM = {
    "keys": (Key("attention_bias", ("qkv_bias",), True),),
    "epsilon": Key("rms_norm_eps", ("norm_epsilon",), 1.5625e-7),
    "head_dim": 128,
    "rotary_fraction": 0.5,
    "interleaved": True,
    "fused": ("mlp.gate_up_proj",),
}
_COHERE_KEYS = (Key("logit_scale", ("logit_scale",), 0.0625), _ATTENTION_BIAS)
_COHERE = {
    "fixed": {"norm": "layer", "norm_bias": False, "block": "parallel"},
    "epsilon": Key("layer_norm_eps", ("norm_epsilon",), 1e-5),
    "tied": True,
    "interleaved": True,
}
# Three layers of Gated DeltaNet, and one of gated attention
_QWEN_MIXED = {
    "fixed": {"qk_norm": "head", "norm_plus_one": True, "attention_gate": True},
    "keys": (_ATTENTION_BIAS,),
    "head_dim": 256,
    "rotary_fraction": 0.25,
    "mixer": (
        Key("linear_num_key_heads", ("key_heads",), 16),
        Key("linear_num_value_heads", ("value_heads",), 32),
        Key("linear_key_head_dim", ("key_dim",), 128),
        Key("linear_value_head_dim", ("value_dim",), 128),
        Key("linear_conv_kernel_dim", ("taps",), 4),
    ),
    "default_types": _linear_layers,
}
_QWEN3_5 = {
    "fused": ("self_attn.q_proj", "linear_attn.in_proj_qkv", "linear_attn.conv1d"),
    "modules": {
        "linear_attn.g_proj": "linear_attn.in_proj_z",
        "linear_attn.b_proj": "linear_attn.in_proj_b",
        "linear_attn.a_proj": "linear_attn.in_proj_a",
    },
}
_QWEN_EXPERTS = (
    Key("moe_intermediate_size", ("width",), 512, write=lambda _, c: c.expert_width),
    Key("shared_expert_intermediate_size", ("shared_width",), 512),
)
_NORMALIZE = Key("norm_topk_prob", ("normalize",), False)


def _qk_norm_key(norm: str, default: bool) -> Key:
    """Returns the key of a family whose queries and keys may have a norm of this kind."""
    return Key(
        *("use_qk_norm", ("qk_norm",), default),
        read=lambda has_norm: norm if has_norm else "none",
        write=lambda value, config: value == norm,
        values=("none", norm),
    )


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")  # of an MLP

# Configs without a family are written as the first entry that computes the same model.
FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", keys=(_ATTENTION_BIAS, _MLP_BIAS)),
    "mistral": Family("MistralForCausalLM", windows="all"),
    "qwen2": Family("Qwen2ForCausalLM", {"qkv_bias": True}, **_QWEN_LAYERS),
    "ministral": Family(
        "MinistralForCausalLM",
        windows="types",
        default_types=lambda hf: [SLIDING] * hf["num_hidden_layers"],
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        keys=(_ATTENTION_BIAS, _MLP_BIAS),
        tied=True,
        theta=2_000_000.0,
        windows="types",
        window=None,
        window_switch=True,
        default_types=lambda hf: [SLIDING if none else FULL for none in unrotated(hf)],
        unrotated_layers="listed",
    ),
    "phi": Family(
        "PhiForCausalLM",
        {
            "norm": "layer",
            "activation": "gelu_tanh",
            "block": "parallel",
            "gated_mlp": False,
            "qkv_bias": True,
            "out_bias": True,
            "mlp_bias": True,
            "head_bias": True,
            "tie_embeddings": False,
        },
        epsilon=Key("layer_norm_eps", ("norm_epsilon",), 1e-5),
        rotary_fraction=0.5,
        own_head_dim=False,
        only={"qk_layernorm": (False,), "tie_word_embeddings": (False,)},
        modules={
            "self_attn.o_proj": "self_attn.dense",
            "mlp.up_proj": "mlp.fc1",
            "mlp.down_proj": "mlp.fc2",
            "model.norm": "model.final_layernorm",
        },
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        epsilon=_EPSILON,
        rotary_fraction=1.0,
        own_head_dim=False,
        windows="all",
        window=None,
        rope_types=("default", "longrope"),
        fused=("self_attn.qkv_proj", "mlp.gate_up_proj"),
    ),
    "granite": Family("GraniteForCausalLM", keys=_GRANITE_KEYS),
    "olmo2": Family("Olmo2ForCausalLM", _OLMO, (_ATTENTION_BIAS,), _EPSILON),
    "olmo3": Family(
        *("Olmo3ForCausalLM", _OLMO, (_ATTENTION_BIAS,), _EPSILON),
        theta=500_000.0,
        windows="types",
        default_types=_every(4),
        local_theta=500_000.0,
    ),
    "gemma2": Family(
        *("Gemma2ForCausalLM", _GEMMA, (*_gemma_keys(30.0), _ATTENTION_CAP)),
        activation_key="hidden_activation",
        head_dim=256,
        tied=True,
        windows="types",
        default_types=_every(2),
        only={"use_bidirectional_attention": (False,)},
    ),
    "gemma3_text": Family(
        *("Gemma3ForCausalLM", _GEMMA | {"qk_norm": "head"}, _gemma_keys(None)),
        activation_key="hidden_activation",
        head_dim=256,
        tied=True,
        theta=1_000_000.0,
        windows="types",
        default_types=_stated_period(6),
        local_theta=10_000.0,
        local_theta_key="rope_local_base_freq",
        only={"use_bidirectional_attention": (False,), "attn_logit_softcapping": (None,)},
    ),
    "gemma4_text": Family(
        "Gemma4ForCausalLM",
        **_GEMMA4_FAMILY
        | {
            "keys": (
                *_GEMMA4_FAMILY["keys"],
                Key(
                    *("hidden_size_per_layer_input", ("layer_embedding",), 256),
                    read=lambda width: width or None,
                    write=lambda width, config: width or 0,
                ),
            )
        },
        window=512,
        defaults={"num_key_value_heads": 4},
        only=_GEMMA4_ONLY,
        experts=(
            Key("num_experts", ("count",), None),
            Key("top_k_experts", ("top_k",), None),
            Key("moe_intermediate_size", ("width",), None, write=lambda _, c: c.expert_width),
        ),
        fixed_experts={
            "balance": 0.0,
            "shared_width": lambda mlp_width: mlp_width,
            "branch_norms": True,
            "expert_scale": True,
        },
        dense=DenseLayers(
            lambda hf: [not hf.get("enable_moe_block", False)] * hf["num_hidden_layers"],
            lambda dense: {"enable_moe_block": not all(dense)},
        ),
        expert_arrays="rows",
        modules={
            "mlp.gate": "router.proj",
            "mlp.experts": "experts",
            **{f"mlp.shared_expert.{name}": f"mlp.{name}" for name in _PROJECTIONS},
        },
    ),
    "gemma4_unified_text": Family(
        "Gemma4UnifiedForCausalLM",
        **_GEMMA4_FAMILY,
        window=1_024,
        defaults={"num_key_value_heads": 4},
        only=_GEMMA4_ONLY,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM", {"qk_norm": "head"}, (_ATTENTION_BIAS,), head_dim=128, **_QWEN_LAYERS
    ),
    "arcee": Family(
        "ArceeForCausalLM",
        {"activation": "relu2", "gated_mlp": False},
        keys=(_ATTENTION_BIAS, _MLP_BIAS),
        epsilon=_EPSILON,
    ),
    "seed_oss": Family(
        "SeedOssForCausalLM",
        keys=(
            Key("attention_bias", ("qkv_bias",), True),
            Key("attention_out_bias", ("out_bias",), False),
            _MLP_BIAS,
        ),
        head_dim=128,
    ),
    "ernie4_5": Family(
        "Ernie4_5ForCausalLM",
        keys=(Key("use_bias", ("qkv_bias", "out_bias", "mlp_bias"), False),),
        epsilon=_EPSILON,
        head_dim=128,
        tied=True,
        theta=500_000.0,
        interleaved=True,
    ),
    "glm": Family("GlmForCausalLM", **_GLM),
    "glm4": Family(
        *("Glm4ForCausalLM", {"norm_place": "both"}),
        **_GLM,
        modules={
            "post_attention_layernorm": "post_self_attn_layernorm",
            "pre_feedforward_layernorm": "post_attention_layernorm",
            "post_feedforward_layernorm": "post_mlp_layernorm",
        },
    ),
    "cohere": Family(
        "CohereForCausalLM",
        **_COHERE,
        keys=(*_COHERE_KEYS, _qk_norm_key("each", False)),
        theta=500_000.0,
    ),
    "cohere2": Family(
        "Cohere2ForCausalLM",
        **_COHERE,
        keys=_COHERE_KEYS,
        windows="types",
        default_types=_stated_period(4),
        unrotated_layers="full",
    ),
    "exaone4": Family(
        *("Exaone4ForCausalLM", {"norm_place": "after", "qk_norm": "head"}),
        epsilon=_EPSILON,
        windows="types",
        default_types=_stated_period(4),
        unrotated_layers="full beside windows",
    ),
    "granite_swa": Family(
        *("GraniteSWAForCausalLM", {"attention_sinks": True}, _GRANITE_KEYS, _EPSILON),
        tied=True,
        windows="types",
        window=128,
        default_types=lambda hf: [
            SLIDING if i % 4 else FULL for i in range(hf["num_hidden_layers"])
        ],
        unrotated_layers="zero theta",
    ),
    "hunyuan_v1_dense": Family(
        *("HunYuanDenseV1ForCausalLM", {"qk_norm": "rotated"}, (_ATTENTION_BIAS,), _EPSILON),
        static_alpha=True,
        modules={
            "self_attn.q_norm": "self_attn.query_layernorm",
            "self_attn.k_norm": "self_attn.key_layernorm",
        },
    ),
    "ministral3": Family(
        "Ministral3ForCausalLM",
        epsilon=_EPSILON,
        head_dim=128,
        windows="all",
        window=None,
        default_rope={
            "rope_type": "yarn",
            "rope_theta": 1_000_000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16_384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
        query_scale="rope",
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        epsilon=_EPSILON,
        theta=1_000_000.0,
        windows="all",
        window=None,
        experts=_expert_keys("num_local_experts", 8, 2, 0.001),
        only={"router_jitter_noise": (0.0,)},
        modules={
            "mlp.gate": "block_sparse_moe.gate",
            "mlp.experts.*.gate_proj": "block_sparse_moe.experts.*.w1",
            "mlp.experts.*.up_proj": "block_sparse_moe.experts.*.w3",
            "mlp.experts.*.down_proj": "block_sparse_moe.experts.*.w2",
        },
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        keys=(Key("qkv_bias", ("qkv_bias",), True),),
        windows="types",
        window_switch=True,
        default_types=_even_layers_before,
        experts=(
            *(*_expert_keys("num_experts", 60, 4, 0.001), _NORMALIZE),
            Key("moe_intermediate_size", ("width",), 1_408, write=lambda _, c: c.expert_width),
            Key("shared_expert_intermediate_size", ("shared_width",), 5_632),
        ),
        fixed_experts={"shared_gate": True},
        dense=_QWEN_DENSE,
    ),
    "qwen3_moe": Family(
        *("Qwen3MoeForCausalLM", {"qk_norm": "head"}, (_ATTENTION_BIAS,)),
        windows="all",
        window_switch=True,
        experts=(
            *(*_expert_keys("num_experts", 128, 8, 0.001), _NORMALIZE),
            Key("moe_intermediate_size", ("width",), 768, write=lambda _, c: c.expert_width),
        ),
        dense=_QWEN_DENSE,
    ),
    "olmoe": Family(
        *("OlmoeForCausalLM", {"qk_norm": "all"}, (_ATTENTION_BIAS,), _EPSILON),
        own_head_dim=False,
        experts=(*_expert_keys("num_experts", 64, 8, 0.01), _NORMALIZE),
        only={"clip_qkv": (None,)},
    ),
    "olmo_hybrid": Family(
        *("OlmoHybridForCausalLM", _OLMO, (_ATTENTION_BIAS,)),
        unrotated_layers="null theta",
        mixer=(
            Key("linear_num_key_heads", ("key_heads",), lambda hf: hf["num_attention_heads"]),
            Key("linear_num_value_heads", ("value_heads",), lambda hf: hf["num_attention_heads"]),
            Key("linear_key_head_dim", ("key_dim",), _olmo_key_dim),
            Key(
                *("linear_value_head_dim", ("value_dim",)),
                lambda hf: 2 * hf.get("linear_key_head_dim", _olmo_key_dim(hf)),
            ),
            Key("linear_conv_kernel_dim", ("taps",), 4),
            Key("linear_allow_neg_eigval", ("negative_eigenvalues",), True),
        ),
        fixed_mixer={"norm_epsilon": 1e-5},
        mixer_norm_place="before",
        mixed=True,
        default_types=_linear_layers_and_one_full,
        modules={
            "linear_attn.norm": "linear_attn.o_norm",
            "linear_attn.out_proj": "linear_attn.o_proj",
        },
        mixer_modules={
            "input_layernorm": "attention_layer_norm",
            "post_attention_layernorm": "feedforward_layer_norm",
        },
        synonyms=(
            ("input_layernorm", "attention_layer_norm"),
            ("post_attention_layernorm", "feedforward_layer_norm"),
        ),
    ),
    "qwen3_5_text": Family("Qwen3_5ForCausalLM", **_QWEN_MIXED, **_QWEN3_5),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        **_QWEN_MIXED,
        experts=(
            *(*_expert_keys("num_experts", 512, 10, 0.001), *_QWEN_EXPERTS),
            Key("norm_topk_prob", ("normalize",), True),
        ),
        fixed_experts={"shared_gate": True},
        dense=_QWEN_DENSE,
        fused=(
            *("self_attn.q_proj", "linear_attn.conv1d"),
            *("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"),
        ),
    ),
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeForCausalLM",
        **_QWEN_MIXED,
        **_QWEN3_5,
        experts=(*_expert_keys("num_experts", 256, 8, 0.001), *_QWEN_EXPERTS),
        fixed_experts={"shared_gate": True, "normalize": True},
    ),
    "llama4_text": Family(
        "Llama4ForCausalLM",
        keys=(_ATTENTION_BIAS, _qk_norm_key("unscaled", True)),
        epsilon=_EPSILON,
        head_dim=128,
        theta=500_000.0,
        windows="types",
        local=LocalLayers(CHUNKED, "attention_chunk_size", Chunked),
        window=8_192,
        default_types=lambda hf: [FULL if none else CHUNKED for none in unrotated(hf)],
        unrotated_layers="listed",
        query_scale="layers",
        interleaved=True,
        mlp_width_key="intermediate_size_mlp",
        experts=(
            *_expert_keys("num_local_experts", 16, 1, 0.001),
            Key(
                *("intermediate_size", ("width", "shared_width"), 8_192),
                write=lambda _, config: config.expert_width,
            ),
        ),
        fixed_experts={"scores": "sigmoid", "normalize": False, "weighted": "input"},
        dense=DenseLayers(
            _llama4_dense,
            lambda dense: {"moe_layers": [i for i, is_dense in enumerate(dense) if not is_dense]},
        ),
        expert_arrays="halves",
        only={"router_jitter_noise": (0.0,)},
        modules={
            "mlp.gate": "feed_forward.router",
            "mlp.experts": "feed_forward.experts",
            **{f"mlp.{name}": f"feed_forward.{name}" for name in _PROJECTIONS},
            **{
                f"mlp.shared_expert.{name}": f"feed_forward.shared_expert.{name}"
                for name in _PROJECTIONS
            },
        },
    ),
    "gpt_oss": Family(
        *("GptOssForCausalLM", {"attention_sinks": True}),
        keys=(Key("attention_bias", ("qkv_bias", "out_bias"), True),),
        epsilon=_EPSILON,
        head_dim=64,
        theta=150_000.0,
        default_rope={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4_096,
        },
        windows="types",
        window=128,
        default_types=_every(2),
        experts=(
            *_expert_keys("num_local_experts", 128, 4, 0.001),
            Key("swiglu_limit", ("swiglu_limit",), 7.0),
            Key("swiglu_alpha", ("swiglu_alpha",), 1.702),
        ),
        fixed_experts={"bias": True},
        expert_arrays="alternating",
        quantised=("mxfp4",),
        modules={"mlp.gate": "mlp.router"},
    ),
}


def windows(config: ModelConfig) -> list[int | None]:
    """Returns the window, or the size of chunks, of each layer; None: full attention."""
    patterns = [config.layer(index).pattern for index in range(config.num_layers)]
    return [getattr(x, "size" if isinstance(x, Chunked) else "window", None) for x in patterns]


def shared_keys(has_window: Sequence[bool], count: int) -> list[int | None]:
    """Returns the layer whose keys and values each layer reads (Gemma 4); None: its own.

    The last `count` layers read those of the last layer before them of their type.

    Args:
      has_window: the type of each layer.
      count: `num_kv_shared_layers`.
    """
    first = len(has_window) - count
    last = {kind: index for index, kind in enumerate(has_window[:first])}
    return [None if i < first else last.get(kind) for i, kind in enumerate(has_window)]
