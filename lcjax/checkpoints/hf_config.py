"""Converts between Hugging Face `config.json` and `ModelConfig`, for the supported families."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from lcjax.attention import Causal
from lcjax.checkpoints import hf_patterns
from lcjax.checkpoints.families import (
    FAMILIES,
    FULL,
    LINEAR,
    SLIDING,
    Family,
    shared_keys,
    unrotated,
    windows,
)
from lcjax.checkpoints.hf_files import FAMILY_TYPES, check_types, stated
from lcjax.checkpoints.nearest_family import family_of
from lcjax.checkpoints.quantised_weights import METHODS, method_of
from lcjax.errors import InputError, is_finite_number
from lcjax.models.experts import Experts
from lcjax.models.mixer import GatedDeltaNet
from lcjax.models.model_config import LayerKind, ModelConfig, shortest_period
from lcjax.rope import NoRotation, Rope, from_hf
from lcjax.rope.base import hf_number, ntk_theta

# The model type of Focused Transformer (arXiv 2307.03170): CStanKonrad/long_llama at bfcb8d1,
# src/configuration_longllama.py.
_LONG_LLAMA = "longllama"
# The trained length, if the RoPE method extends it, or stores its own `max_position_embeddings`.
_MAX_LENGTH = "lcjax_max_length"
_ACTIVATIONS = {  # transformers' names of each activation; the first one is written
    "silu": ("silu", "swish"),
    "gelu_tanh": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
    "relu2": ("relu2",),
}
_WRITTEN = {("hidden_activation", "gelu_tanh"): "gelu_pytorch_tanh"}  # Gemma, also in vLLM
_LAYER_VOCAB = "vocab_size_per_layer_input"
_SHARE = "proportional"  # the type of ropes of which a share of frequencies rotates
_FLOOR_SCALE = 8_192  # if `floor_scale` is absent
# Multimodal models whose text part belongs to a family: its possible model types, each with
# transformers' defaults for keys that `text_config` omits (the published Gemma 3 4B omits most).
# With several types, `text_config` must state its own. Embeddings are tied if the whole model says
# so, or with a default here if the text part does.
_GEMMA4_DEFAULTS = {
    "vocab_size": 262_144,
    "hidden_size": 2_304,
    "intermediate_size": 9_216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
}
WRAPPERS: dict[str, dict[str, dict[str, Any]]] = {
    "qwen3_5": {"qwen3_5_text": {}},
    "qwen3_5_moe": {"qwen3_5_moe_text": {}},
    "mistral3": {"mistral": {}, "ministral3": {}},  # Mistral Small 3.1, Ministral 3
    "gemma3": {
        "gemma3_text": {
            "vocab_size": 262_208,
            "hidden_size": 2_304,
            "intermediate_size": 9_216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131_072,
        },
    },
    "gemma4": {"gemma4_text": _GEMMA4_DEFAULTS | {"max_position_embeddings": 131_072}},
    "gemma4_unified": {
        "gemma4_unified_text": _GEMMA4_DEFAULTS | {"max_position_embeddings": 262_144}
    },
    "llama4": {
        "llama4_text": {
            "vocab_size": 202_048,
            "hidden_size": 5_120,
            "intermediate_size_mlp": 16_384,
            "num_hidden_layers": 48,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "tie_word_embeddings": False,
        },
    },
}
# Keys that transformers reads for all families, and their only values that are supported.
_ONLY = {"is_causal": (True,), "per_layer_config": (None, {})}
# Keys of sizes, and the fields of `ModelConfig` that they set.
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "width",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
}


def text_model(hf: dict[str, Any], where: str = "config.json") -> dict[str, Any]:
    """Returns the config of a multimodal model's text part; other configs unchanged.

    Dtype and token ids are those of the whole model if it states them.
    """
    if hf.get("model_type") not in WRAPPERS:
        return hf
    kinds, text = WRAPPERS[hf["model_type"]], hf.get("text_config")
    only = next(iter(kinds)) if len(kinds) == 1 else None
    kind = text.get("model_type", only) if isinstance(text, dict) else None
    if kind not in kinds:
        raise InputError(
            f"{where}: text_config={text!r:.60} must be an object that describes a"
            f" {' or '.join(kinds)} model; download it again"
        )
    check_types(text, f"{where}: text_config")
    above = {
        key: hf[key]
        for key in ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id")
        if hf.get(key) is not None
    }
    tied = {"tie_word_embeddings": stated(hf).get("tie_word_embeddings", True)}
    if "tie_word_embeddings" in kinds[kind]:
        tied = {}
    return kinds[kind] | stated(text) | above | tied | {"model_type": kind}


def decoder_from_hf(hf: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Returns the config that a transformers config describes.

    Positions may be described by the old key (`rope_scaling`) or the new one (`rope_parameters`).
    Models of Landmark attention have more keys than the Llama that they extend.
    """
    check_types(hf, where)
    hf = stated(hf)
    if hf.get("model_type") in WRAPPERS:
        return decoder_from_hf(text_model(hf, where), f"{where}: text_config")
    if (plain := hf_patterns.plain_model(hf)) is not None:
        config = decoder_from_hf(plain, where)
        return config.replace(pattern=hf_patterns.read(hf, config, where))
    kind = hf.get("model_type")
    if kind == _LONG_LLAMA:
        raise InputError(
            f"{where}: model_type={kind!r} is not supported: beyond last_context_length="
            f"{hf.get('last_context_length')!r:.60} tokens its layers mem_layers="
            f"{hf.get('mem_layers')!r:.60} see all earlier keys as a memory, which lcjax"
            " does not compute; set model_type to llama for texts up to that length, on which the"
            " model is a Llama"
        )
    if kind not in FAMILIES:
        raise InputError(
            f"{where}: model_type={kind!r} is not supported; supported: {', '.join(FAMILIES)} "
            "(SmolLM2, Llama-2 and Llama-3 are llama, Phi-2 is phi)"
        )
    if settings := hf.get("quantization_config"):
        method = method_of(settings)
        if method not in (*METHODS, *FAMILIES[kind].quantised):
            raise InputError(
                f"{where}: quantization_config (quant_method={method!r}) is not supported for"
                f" model_type={kind!r}; use the unquantised checkpoint, or a GGUF file of this"
                " model"
            )

    def get(key: str) -> int:
        if key not in hf:
            raise InputError(f"{where}: the key {key!r} is missing; is this a model's config.json?")
        return hf[key]

    check_types(hf, where, FAMILY_TYPES)
    family, heads = FAMILIES[kind], get("num_attention_heads")
    hf = dict(family.defaults) | hf
    if family.default_rope and not _rope_section(hf):
        hf = hf | {"rope_parameters": dict(family.default_rope)}
    length = get("max_position_embeddings")
    if family.experts and "intermediate_size" not in hf and "moe_intermediate_size" in hf:
        hf = hf | {"intermediate_size": hf["moe_intermediate_size"]}  # all layers are mixtures
    sizes = _SIZES | {family.mlp_width_key: "mlp_width"}
    fields = {field: get(key) for key, field in sizes.items()}
    fields |= family.fixed_fields(fields["width"])
    for key in (*family.keys, family.epsilon):
        fields |= dict.fromkeys(key.fields, key.value(hf))
    _check_activation(hf, family, where)
    if fields.get("layer_embedding"):
        _require(hf, where, _LAYER_VOCAB, 262_144, (fields["vocab_size"],))
    only = _ONLY | family.only
    if family.full_heads:
        del only["per_layer_config"]
    for key, allowed in only.items():
        _require(hf, where, key, allowed[0], allowed)
    dense = family.dense.read(hf) if family.dense else [False] * fields["num_layers"]
    if family.experts and not all(dense):
        values = {field: key.value(hf) for key in family.experts for field in key.fields}
        fields["experts"] = Experts(**values | family.fixed_expert_fields(fields["mlp_width"]))
    layers = _layer_fields(hf, family, dense, where)
    if family.query_scale == "rope":
        fields |= _query_scale(hf, layers["rope"], where)
    elif family.query_scale == "layers":
        fields |= _query_scale_of_layers(hf)
    config = ModelConfig(
        **fields
        | {
            "num_kv_heads": hf.get("num_key_value_heads", heads),
            "head_dim": hf.get("head_dim") or family.head_dim or get("hidden_size") // heads,
            "max_length": hf.get(_MAX_LENGTH, length),
            "rotary_fraction": _rotary_fraction(hf, family, where),
            "tie_embeddings": hf.get("tie_word_embeddings", family.tied),
            "param_dtype": stated_dtype(hf) or "float32",
            **layers,
        }
    )
    trained = getattr(config.rope, "original_length", None) or 0
    if config.rope.hf_length is None and trained < length != announced_length(config):
        config = config.replace(extended_length=length)
    is_unique = family_of(config).name == kind and not family.interleaved
    return config if is_unique else config.replace(family=kind)


def announced_length(config: ModelConfig) -> int:
    """Returns the number of tokens that transformers reads with this model's method."""
    ropes = _rotations(config)
    rope = config.rope if config.rope in ropes else ropes[0]
    if rope.hf_limit is not None:
        return config.max_length
    return config.extended_length or rope.extended_length(config.max_length)


def trained_for(config: ModelConfig, length: int) -> ModelConfig:
    """Returns the config after a training with `length` tokens a row.

    A longer row than the method reads by its fields has extended the model to that row. With a
    memory, rows hold its context, too.
    """
    is_plain = config.memory is None and config.rope.hf_limit is None
    if not is_plain or length <= announced_length(config):
        return config
    return config.replace(extended_length=length)


def _query_scale(hf: dict[str, Any], rope: Rope, where: str) -> dict[str, Any]:
    """Returns the fields of queries that are scaled by their position."""
    section = _rope_section(hf)
    scale = section.get("llama_4_scaling_beta")
    length = section.get("original_max_position_embeddings")
    if (section.get("rope_type") or section.get("type")) in ("yarn", "llama3", "longrope"):
        length = rope.original_length  # transformers fills in the trained length
    if not is_finite_number(scale) or type(length) is not int or length < 1:
        raise InputError(
            f"{where}: rope_parameters of model_type={hf['model_type']!r} must have"
            " llama_4_scaling_beta, a number, and original_max_position_embeddings, a length;"
            f" they are {scale!r:.40} and {length!r:.40}"
        )
    return {"query_scale": float(scale), "query_scale_length": length} if scale else {}


def _query_scale_of_layers(hf: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of queries that are scaled by their position in some layers (Llama 4)."""
    scale = hf.get("attn_scale", 0.1)
    if not (hf.get("attn_temperature_tuning", True) and scale):
        return {}
    length = hf.get("floor_scale", _FLOOR_SCALE)
    fields = {"query_scale": float(scale), "query_scale_length": length}
    return fields | {"query_scale_layers": "unrotated"}


def _query_scale_to_hf(config: ModelConfig, hf: dict[str, Any]) -> dict[str, Any]:
    """Returns the sections of the rope in `hf` with the keys that scale queries."""
    length = config.query_scale_length or getattr(config.rope, "original_length", None)
    keys = {
        "llama_4_scaling_beta": config.query_scale,
        "original_max_position_embeddings": length or config.max_length,
    }
    sections = ("rope_scaling", "rope_parameters")
    return {name: hf[name] | keys for name in sections if hf.get(name)}


def _check_activation(hf: dict[str, Any], family: Family, where: str) -> None:
    known = _ACTIVATIONS[family.fixed.get("activation", "silu")]
    value = hf.get(family.activation_key, known[0])
    if value not in known:
        raise InputError(
            f"{where}: {family.activation_key}={value!r} is not supported for model_type="
            f"{hf['model_type']!r}; supported: {', '.join(known)}"
        )


def _rotary_fraction(hf: dict[str, Any], family: Family, where: str) -> float:
    fraction = (hf.get("rope_parameters") or {}).get("partial_rotary_factor")
    if fraction is None:
        fraction = hf.get("partial_rotary_factor")
    if fraction is None:
        return family.rotary_fraction or 1.0
    if (
        family.rotary_fraction is None and fraction != 1
    ):  # transformers ignores it, or fails over it
        raise InputError(
            f"{where}: partial_rotary_factor={fraction} is not supported for model_type="
            f"{hf['model_type']!r}, whose heads are rotated whole; remove it if the weights were "
            "trained so"
        )
    return fraction


def stated_dtype(hf: dict[str, Any]) -> str | None:
    """Returns the dtype of the weights that a config states; None if it states none."""
    name = hf.get("dtype") or hf.get("torch_dtype")
    return name and name.removeprefix("torch.")


def _require(hf: dict[str, Any], where: str, key: str, default: Any, allowed: tuple) -> None:
    value = hf.get(key, default)
    if value not in allowed:
        raise InputError(
            f"{where}: {key}={value!r} is not supported for model_type={hf['model_type']!r}; "
            f"supported: {', '.join(map(str, allowed))}"
        )


def _layer_fields(
    hf: dict[str, Any], family: Family, dense: list[bool], where: str
) -> dict[str, Any]:
    """Returns the fields of layers: windows, rotations, mixers and MLPs.

    Args:
      hf: the config.
      family: its family.
      dense: whether each layer has an MLP in place of experts.
      where: names the config in errors.
    """
    count = hf["num_hidden_layers"]
    rope, local = _ropes(hf, family, where)
    window = hf.get(family.local.key, family.window)
    if family.windows == "none" or (family.window_switch and not hf.get("use_sliding_window")):
        window = None
    mixer = _mixer(hf, family, where)
    states_types = family.windows == "types" or mixer is not None
    types = hf.get("layer_types") if states_types else None
    if not types:
        types = family.default_types(hf) if family.default_types else [family.local.type] * count
    full_heads = local_heads = {}
    if family.full_heads:
        types = [*types[:-1], FULL]  # transformers forces it
        full_heads, local_heads = _heads(hf, types, where)
    no_rotation = {
        **dict.fromkeys(("none", "null theta", "zero theta"), [False] * count),
        "listed": unrotated(hf),
        "full": [window is None or name == FULL for name in types],
        "full beside windows": [window is not None and name == FULL for name in types],
    }[family.unrotated_layers]
    known = (FULL, family.local.type if mixer is None else LINEAR)
    if len(types) != count or len(no_rotation) != count or not set(types) <= {*known}:
        raise InputError(
            f"{where}: layer_types={types!r:.60} and no_rope_layers must have an entry for each of"
            f" the {count} layers; supported types: {', '.join(known)}"
        )
    if family.mixed and len(set(types)) < 2:
        raise InputError(
            f"{where}: layer_types={types!r:.60} of model_type={hf['model_type']!r} must have both"
            f" {FULL} and {LINEAR}, as in transformers"
        )
    ropes = [
        NoRotation() if is_unrotated else local if name == family.local.type else None
        for name, is_unrotated in zip(types, no_rotation, strict=True)
    ]
    if family.unrotated_layers == "zero theta":
        rope, ropes = _ropes_by_theta(hf, rope, types, where)
    shared = _shared_layers(hf, types, where) if family.full_heads else [{}] * count
    kinds = [
        LayerKind(
            pattern=None if window is None or name == FULL else family.local.pattern(window),
            rope=other,
            mixer=mixer if name == LINEAR else None,
            norm_place=family.mixer_norm_place if name == LINEAR else None,
            dense=is_dense and not all(dense),
            **({} if name == FULL else local_heads),
            **reads,
        )
        for name, other, is_dense, reads in zip(types, ropes, dense, shared, strict=True)
    ]
    fields = {"pattern": Causal(), "rope": rope, "mixer": None}
    fields["norm_place"] = family.fixed.get("norm_place", "before")
    for name in fields:  # what all layers have in common is the model's
        values = {getattr(kind, name) for kind in kinds}
        if len(values) == 1:
            fields[name] = values.pop() or fields[name]
            kinds = [dataclasses.replace(kind, **{name: None}) for kind in kinds]
    fields |= full_heads
    return fields | {"layers": shortest_period(kinds) if len(set(kinds)) > 1 else ()}


def _heads(
    hf: dict[str, Any], types: list[str], where: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the fields of heads in layers with full attention, and in those with a window.

    The latter are those that differ from the former (Gemma 4).

    Args:
      hf: the config.
      types: the type of each layer.
      where: names the config in errors.
    """
    sizes = {key: hf.get(key, 256) for key in ("head_dim", "num_key_value_heads")}
    values_from_keys = hf.get("attention_k_eq_v", False)
    if "per_layer_config" in hf:
        overrides = {int(key): value for key, value in (hf["per_layer_config"] or {}).items()}
    else:
        full = {"head_dim": hf.get("global_head_dim", 512)}
        if values_from_keys and "num_global_key_value_heads" in hf:
            full["num_key_value_heads"] = hf["num_global_key_value_heads"]
        overrides = {i: full for i, name in enumerate(types) if name == FULL}
    by_type = {}
    for number, name in enumerate(types):
        stated = sizes | {key: x for key, x in overrides.get(number, {}).items() if x != []}
        is_known = stated.keys() == sizes.keys() and by_type.setdefault(name, stated) == stated
        if not is_known or not all(type(x) is int and x > 0 for x in stated.values()):
            raise InputError(
                f"{where}: per_layer_config of layer {number} is {overrides.get(number)!r:.60}; for"
                f" model_type={hf['model_type']!r} it must have head_dim and num_key_value_heads"
                " alone, whole numbers, and the same in all layers of a type"
            )
    fractions = _rotary_fractions(hf, set(types), where)
    fields = {
        name: {
            "head_dim": stated["head_dim"],
            "num_kv_heads": stated["num_key_value_heads"],
            "rotary_fraction": fractions[name],
            "values_from_keys": values_from_keys and name == FULL,
        }
        for name, stated in by_type.items()
    }
    full, local = fields[FULL], fields.get(SLIDING, {})
    return full, {key: value for key, value in local.items() if value != full[key]}


def _shared_layers(hf: dict[str, Any], types: list[str], where: str) -> list[dict[str, int]]:
    """Returns the fields of layers that read the keys and values of another one (Gemma 4)."""
    count = hf.get("num_kv_shared_layers", 0)
    sources = shared_keys([name != FULL for name in types], min(count, len(types)))
    width = {"mlp_width": 2 * hf["intermediate_size"]} if hf.get("use_double_wide_mlp") else {}
    fields = [{} if source is None else {"keys_of": source} | width for source in sources]
    if len(list(filter(None, fields))) != count:
        raise InputError(
            f"{where}: num_kv_shared_layers={count} must leave a layer of each type before them, of"
            f" the {len(types)} layers of layer_types"
        )
    return fields


def _rotary_fractions(hf: dict[str, Any], types: set[str], where: str) -> dict[str, float]:
    """Returns the share of frequencies that rotates in layers of each of `types` (Gemma 4)."""
    fractions = {}
    if hf.get("rope_scaling"):
        raise InputError(
            f"{where}: rope_scaling={hf['rope_scaling']!r:.60} is ignored by transformers for"
            f" model_type={hf['model_type']!r}; state it in rope_parameters[{FULL!r}]"
        )
    for name in sorted(types):
        section = hf["rope_parameters"].get(name)
        kind = section.get("rope_type") if isinstance(section, dict) else None
        fraction = section.get("partial_rotary_factor", 1.0) if kind else 1.0
        is_share = is_finite_number(fraction) and 0 < fraction <= 1
        if kind is None or not is_share or (kind not in ("default", _SHARE) and fraction != 1):
            raise InputError(
                f"{where}: rope_parameters[{name!r}]={section!r:.80} of model_type="
                f"{hf['model_type']!r} must be an object with rope_type, and with"
                f" partial_rotary_factor, a share of 1, for rope_type={_SHARE} alone"
            )
        fractions[name] = float(fraction) if kind == _SHARE else 1.0
    return fractions


def _without_share(section: dict[str, Any]) -> dict[str, Any]:
    """Returns the section of a rope without the share of frequencies that rotates."""
    if section.get("rope_type") != _SHARE:
        return section
    factor = section.get("factor", 1.0)
    plain = {key: section[key] for key in ("rope_theta",) if key in section}
    return plain | (
        {"rope_type": "default"} if factor == 1 else {"rope_type": "linear", "factor": factor}
    )


def _heads_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Returns the keys of heads in layers with and without a window (Gemma 4).

    transformers reads `per_layer_config` since 5.24, and earlier the others.
    """
    layers = [config.layer(index) for index in range(config.num_layers)]
    shared = [layer for layer in layers if layer.keys_of is not None]
    is_full = [size is None for size in windows(config)]
    full = layers[is_full.index(True)]
    local = layers[is_full.index(False)] if False in is_full else full
    sizes = {"head_dim": full.head_dim, "num_key_value_heads": full.num_kv_heads}
    return {
        "head_dim": local.head_dim,
        "num_key_value_heads": local.num_kv_heads,
        "global_head_dim": full.head_dim,
        "num_global_key_value_heads": full.num_kv_heads,
        "attention_k_eq_v": full.values_from_keys,
        "per_layer_config": {str(i): sizes for i, x in enumerate(is_full) if x and local != full},
        "num_kv_shared_layers": len(shared),
        "use_double_wide_mlp": any(layer.mlp_width != config.mlp_width for layer in shared),
        **({} if config.layer_embedding is None else {_LAYER_VOCAB: config.vocab_size}),
    }


def _mixer(hf: dict[str, Any], family: Family, where: str) -> GatedDeltaNet | None:
    """Returns the mixer of layers without attention; None: the family has no such layers."""
    if not family.mixer:
        return None
    sizes = {key.name: key.value(hf) for key in family.mixer}
    fields = dict(zip((key.fields[0] for key in family.mixer), sizes.values(), strict=True))
    try:
        return GatedDeltaNet(**fields | family.fixed_mixer)
    except InputError as error:
        stated = ", ".join(f"{key}={value}" for key, value in sizes.items())
        raise InputError(f"{where}: {stated} describe no layer: {error}") from None


def _ropes(hf: dict[str, Any], family: Family, where: str) -> tuple[Rope, Rope | None]:
    """Returns the rope of the model, and that of layers with a window; None: the same rope."""
    length, theta = hf.get(_MAX_LENGTH, hf["max_position_embeddings"]), family.theta
    if family.unrotated_layers == "null theta" and _stated_theta(hf, theta) is None:
        return NoRotation(), None
    if family.static_alpha:
        hf = _with_static_alpha(hf, theta)
    if family.local_theta is None:
        return from_hf(hf).resolve(theta=theta, length=length), None
    sections, scaling = hf.get("rope_parameters") or {}, hf.get("rope_scaling") or {}
    full, sliding = (dict(sections.get(name) or {}) for name in (FULL, SLIDING))
    if sections and not (full or sliding):
        raise InputError(
            f"{where}: rope_parameters of model_type={hf['model_type']!r} must have the sections"
            f" {FULL} and {SLIDING}: transformers ignores keys beside them"
        )
    full = (full or {"rope_type": "default"}) | scaling
    kind, stated = (x.get("rope_type") or x.get("type") for x in (full, scaling))
    if scaling and kind != stated:
        raise InputError(
            f"{where}: rope_scaling of model_type={hf['model_type']!r} must name its rope_type:"
            " transformers ignores a type"
        )
    if family.full_heads:
        full, sliding = map(_without_share, (full, sliding))
    for section in (full, sliding):
        if not section.get("truncate", True):
            raise InputError(
                f"{where}: truncate={section['truncate']} is ignored by transformers in sections of"
                " rope_parameters; remove it"
            )
    theta = hf.get("rope_theta") or theta
    top = {"rope_scaling": None, "original_max_position_embeddings": None, "rope_theta": theta}
    rope = from_hf(hf | top | {"rope_parameters": full})
    local_theta = hf.get(family.local_theta_key) or family.local_theta
    local = {"rope_theta": local_theta, "max_position_embeddings": hf["max_position_embeddings"]}
    local = from_hf(local | {"rope_parameters": sliding}).resolve(theta=local_theta, length=length)
    return rope.resolve(theta=theta, length=length), local


def _rope_section(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the section of the rope, of which transformers prefers the older one."""
    return hf.get("rope_scaling") or hf.get("rope_parameters") or {}


def _stated_theta(hf: Mapping[str, Any], theta: float) -> float | None:
    """Returns the base that a config states, which may be null, or `theta` if it states none."""
    return _rope_section(hf).get("rope_theta", hf.get("rope_theta", theta))


def _ropes_by_theta(
    hf: dict[str, Any], rope: Rope, types: list[str], where: str
) -> tuple[Rope, list[Rope | None]]:
    """Returns the rope of the model, and that of each layer; None: the same (Granite SWA).

    Ropes differ in the base that `layer_rope_theta` lists. The base of the model is that of its
    first layer with full attention that rotates, if there is one.

    Args:
      hf: the config.
      rope: the rope with the base that the whole model states.
      types: the type of each layer.
      where: names the config in errors.
    """
    whole = _stated_theta(hf, rope.theta)
    thetas = hf.get("layer_rope_theta", [whole] * len(types))
    if len(thetas) != len(types):
        raise InputError(
            f"{where}: layer_rope_theta={thetas!r:.60} must have an entry for each of the"
            f" {len(types)} layers"
        )
    rotating = [(name != FULL, i) for i, name in enumerate(types) if thetas[i]]
    if not rotating:
        return rope, [NoRotation()] * len(types)
    first = thetas[min(rotating)[1]]
    ropes = {
        theta: rope if theta == whole else dataclasses.replace(rope, theta=float(theta))
        for theta in thetas
        if theta
    }
    ropes |= {0: NoRotation()}
    return ropes[first], [None if theta == first else ropes[theta] for theta in thetas]


def _with_static_alpha(hf: dict[str, Any], theta: float) -> dict[str, Any]:
    """Returns a config in which a fixed `alpha` of rope type "dynamic" is part of the base.

    transformers multiplies the base by alpha^(d / (d - 2)), d the channels of a head, and ignores
    the length of the text (Hunyuan).

    Args:
      hf: the config.
      theta: the base if the config states none.
    """
    section = _rope_section(hf)
    kind, alpha = section.get("rope_type") or section.get("type"), section.get("alpha")
    if kind != "dynamic" or not alpha:
        return hf
    stated = {"rope_type": kind, "alpha": alpha, "rope_theta": _stated_theta(hf, theta)}
    head_dim = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    theta, alpha = hf_number(stated, "rope_theta"), hf_number(stated, "alpha")
    theta = ntk_theta(theta, alpha, head_dim)
    plain = {"rope_type": "default", "rope_theta": theta}
    return hf | {"rope_scaling": None, "rope_parameters": plain, "rope_theta": theta}


def decoder_to_hf(config: ModelConfig, *, dtype: str | None = None) -> dict[str, Any]:
    """Returns the `config.json` with which transformers computes the same logits.

    If the RoPE method has a `config.rope.hf_limit`, they are the same up to that many tokens. For
    Landmark attention the result is the `config.json` of the released code. For Dual Chunk
    Attention it is that of Qwen2.5-1M, whose pattern vLLM reads and transformers ignores. For a
    pattern with parameters of its own transformers computes full attention, and ignores these.

    Raises:
      InputError: no `config.json` describes this model.
    """
    if not isinstance(config.pattern, hf_patterns.RELEASED):
        config = config.for_inference()
        if len(config.kinds) == 1:
            config = config.layer(0)
    if hf_patterns.is_beside_model(config):
        plain = decoder_to_hf(config.replace(pattern=Causal()), dtype=dtype)
        return plain | hf_patterns.write(config, plain["model_type"])
    kind, wrong = family_of(config)
    if wrong:
        raise InputError(
            f"transformers has no {kind} model with model.{', model.'.join(wrong)}, so this cannot "
            "be exported as a Hugging Face folder; keep the run folder instead"
        )
    family = FAMILIES[kind]
    hf = {
        "architectures": [family.architecture],
        "model_type": kind,
        **{key: getattr(config, field) for key, field in _SIZES.items()},
        family.mlp_width_key: config.mlp_width,
        "num_key_value_heads": config.num_kv_heads,
        "max_position_embeddings": announced_length(config),
        family.activation_key: _WRITTEN.get(
            (family.activation_key, config.activation), _ACTIVATIONS[config.activation][0]
        ),
        "tie_word_embeddings": config.tie_embeddings,
        "dtype": dtype or config.param_dtype,
        "torch_dtype": dtype or config.param_dtype,  # what transformers 4 reads
    }
    for key in (*family.keys, family.epsilon):
        hf[key.name] = key.write(getattr(config, key.fields[0]), config)
    if family.own_head_dim or family.rotary_fraction is None:
        hf["head_dim"] = config.head_dim
    if family.rotary_fraction is not None:
        hf["partial_rotary_factor"] = config.rotary_fraction
    for key in family.experts:
        if config.experts is None:
            hf[key.name] = key.default
        else:
            hf[key.name] = key.write(getattr(config.experts, key.fields[0]), config)
    if family.dense:
        layers = map(config.layer, range(config.num_layers))
        hf |= family.dense.write([layer.experts is None for layer in layers])
    hf |= {key: allowed[0] for key, allowed in family.only.items()}
    hf |= _layers_to_hf(config, family, kind) | _ropes_to_hf(config, family)
    if family.full_heads:
        hf |= _heads_to_hf(config)
    if family.query_scale == "rope":
        hf |= _query_scale_to_hf(config, hf)
    elif family.query_scale == "layers":
        hf["attn_temperature_tuning"] = config.query_scale != 0
        hf["attn_scale"] = config.query_scale
        hf["floor_scale"] = config.query_scale_length or _FLOOR_SCALE
    if hf["max_position_embeddings"] != config.max_length:
        hf[_MAX_LENGTH] = config.max_length
    if family.rotary_fraction is not None and isinstance(hf.get("rope_parameters"), dict):
        # transformers 5 reads the factor from here, transformers 4 from the top level.
        hf["rope_parameters"] = hf["rope_parameters"] | {
            "partial_rotary_factor": config.rotary_fraction
        }
    return hf


def _ropes_to_hf(config: ModelConfig, family: Family) -> dict[str, Any]:
    """Returns the keys of the rotation; of both rotations for families with a local one."""
    if family.unrotated_layers == "zero theta":
        return _ropes_with_thetas(config)
    if family.local_theta is None:
        rope = _rotations(config)[0]
        if family.unrotated_layers == "null theta" and isinstance(rope, NoRotation):
            section = {"rope_type": "default", "rope_theta": None}
            return {"rope_parameters": section, "rope_theta": None}
        return rope.to_hf(config.rotary_dim)
    by_type = {FULL: config, SLIDING: config}
    for index, size in enumerate(windows(config)):
        by_type[FULL if size is None else SLIDING] = config.layer(index)
    forms = {name: layer.rope.to_hf(layer.rotary_dim) for name, layer in by_type.items()}
    sections = {name: form["rope_parameters"] for name, form in forms.items()}
    if any("truncate" in section for section in sections.values()):
        raise InputError(
            "transformers reads no truncate=false in models with a rope for each type of layers;"
            " keep the run folder instead"
        )
    if family.full_heads:
        for name, layer in by_type.items():
            if layer.rotary_fraction < 1:
                share = {"rope_type": _SHARE, "partial_rotary_factor": layer.rotary_fraction}
                sections[name] = sections[name] | share
        forms[FULL] = {x: value for x, value in forms[FULL].items() if x != "rope_scaling"}
    local = {family.local_theta_key: by_type[SLIDING].rope.theta} if family.local_theta_key else {}
    return forms[FULL] | {"rope_parameters": sections} | local


def _ropes_with_thetas(config: ModelConfig) -> dict[str, Any]:
    """Returns the keys of the rotation with the base of each layer (Granite SWA)."""
    ropes = _rotations(config)
    rope = config.rope if config.rope in ropes else ropes[0]
    form, thetas = rope.to_hf(config.rotary_dim), []
    for other in (config.layer(i).rope for i in range(config.num_layers)):
        theta = 0
        if not isinstance(other, NoRotation):
            theta = other.to_hf(config.rotary_dim)["rope_parameters"]["rope_theta"]
            if other not in (rope, dataclasses.replace(rope, theta=theta)):
                raise InputError(
                    f"transformers has no layers of ropes {rope} and {other} in one model, whose"
                    " base is another in its config.json; keep the run folder instead"
                )
        thetas.append(theta)
    return form | {"layer_rope_theta": thetas}


def _rotations(config: ModelConfig) -> list[Rope]:
    """Returns the distinct RoPE methods of layers that rotate; the model's own if none does."""
    ropes = dict.fromkeys(layer.rope for layer, _ in config.layer_counts)
    return [rope for rope in ropes if not isinstance(rope, NoRotation)] or [config.rope]


def _layers_to_hf(config: ModelConfig, family: Family, kind: str) -> dict[str, Any]:
    """Returns the keys for layers with a window or a mixer, and for those that do not rotate."""
    layers = [config.layer(index) for index in range(config.num_layers)]
    if family.mixer:
        fields = {"layer_types": [FULL if x.mixer is None else LINEAR for x in layers]}
        for mixer in config.mixers:  # a family describes one
            fields |= {key.name: getattr(mixer, key.fields[0]) for key in family.mixer}
        return fields
    if family.windows == "none":
        return {}
    sizes = windows(config)
    window = max((size for size in sizes if size is not None), default=None)
    fields = {family.local.key: window}
    if family.window_switch:
        fields["use_sliding_window"] = window is not None
    if family.windows == "all":
        return fields
    if config.layers or kind not in ("qwen2", "ministral"):
        fields["layer_types"] = [FULL if size is None else family.local.type for size in sizes]
    if kind == "qwen2":
        # transformers 4 reads the number of the first layer with a window; all after it have one.
        first = sizes.index(window) if window is not None else config.num_layers
        fields["max_window_layers"] = first if None not in sizes[first:] else config.num_layers
    rotated = [not isinstance(layer.rope, NoRotation) for layer in layers]
    if family.unrotated_layers == "listed":
        fields["no_rope_layers"] = list(map(int, rotated))
    null_rotates = family.unrotated_layers == "full beside windows"
    needs_size = "layer_types" in fields and not family.window_switch
    if window is None and needs_size and not (null_rotates and all(rotated)):
        fields[family.local.key] = family.window  # classes compute the mask of an unused window
    return fields
