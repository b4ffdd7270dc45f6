"""Hugging Face `config.json` <-> `ModelConfig`, for the families that the decoder covers."""

from typing import Any

from lcjax.attention import Causal, Landmark, Sliding
from lcjax.checkpoints.hf_files import check_types
from lcjax.checkpoints.hf_names import is_phi
from lcjax.errors import InputError
from lcjax.models.config import LayerKind, ModelConfig, repeating
from lcjax.rope import NoRotation, Rope, from_hf

_LANDMARK = "llama_with_landmark"  # the model type of Mohtashami & Jaggi 2023 and LCEG
_TOP_K = 5  # blocks that both codes retrieve when they evaluate; no config names it
SUPPORTED = ("llama", "mistral", "qwen2", "phi", "ministral", "smollm3")
CLASSES = {kind: f"{kind.capitalize()}ForCausalLM" for kind in SUPPORTED}
CLASSES["smollm3"] = "SmolLM3ForCausalLM"
# What transformers takes of all but smollm3 for an absent `sliding_window`; null means none.
DEFAULT_WINDOW = 4_096
_FULL, _SLIDING = "full_attention", "sliding_attention"  # values of `layer_types`
_MAX_LENGTH = "lcjax_max_length"
_GELU_TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
# Sizes by their keys, and what the config of a family holds without a key for it.
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "width",
    "intermediate_size": "mlp_width",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
}
_PHI = {
    "norm": "layer",
    "activation": "gelu_tanh",
    "block": "parallel",
    "gated_mlp": False,
    "qkv_bias": True,
    "out_bias": True,
    "mlp_bias": True,
    "head_bias": True,
}
_SEQUENTIAL = {"norm": "rms", "activation": "silu", "gated_mlp": True, "head_bias": False}


def config_from_hf(hf: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Returns the config that a transformers config describes.

    Positions may be given the old way (`rope_scaling`) or the new one (`rope_parameters`). Models
    of Landmark attention have more keys than the Llama that they extend.
    """
    check_types(hf, where)
    if hf.get("model_type") == _LANDMARK:
        config = config_from_hf(hf | {"model_type": "llama"}, where)
        return config.replace(pattern=_landmark_from_hf(hf, config.vocab_size, where))
    kind = hf.get("model_type")
    if kind not in SUPPORTED:
        raise InputError(
            f"{where}: model_type={kind!r} is not supported; supported: {', '.join(SUPPORTED)} "
            "(SmolLM2, Llama-2 and Llama-3 are llama, Phi-2 is phi)"
        )
    if settings := hf.get("quantization_config"):
        method = settings.get("quant_method") if isinstance(settings, dict) else settings
        raise InputError(
            f"{where}: quantization_config (quant_method={method!r}) is not supported; use the "
            "unquantised checkpoint, or a GGUF file of this model"
        )

    def get(key: str) -> int:
        value = hf.get(key)
        if value is None:
            raise InputError(f"{where}: the key {key!r} is missing; is this a model's config.json?")
        return value

    heads = get("num_attention_heads")
    fraction = (hf.get("rope_parameters") or {}).get("partial_rotary_factor")
    if fraction is None:
        fraction = hf.get("partial_rotary_factor")
    if fraction is None:
        fraction = 0.5 if kind == "phi" else 1.0
    if kind != "phi" and fraction != 1:  # transformers ignores the key, or fails over it
        raise InputError(
            f"{where}: partial_rotary_factor={fraction} is not supported for model_type={kind!r}, "
            "whose heads are rotated whole; remove it if the weights were trained so"
        )
    rope = from_hf(hf).resolve(theta=default_theta(kind), length=get("max_position_embeddings"))
    return ModelConfig(
        **{field: get(key) for key, field in _SIZES.items()},
        # transformers reads null as absent.
        num_kv_heads=hf.get("num_key_value_heads") or heads,
        head_dim=hf.get("head_dim") or get("hidden_size") // heads,
        max_length=hf.get(_MAX_LENGTH) or get("max_position_embeddings"),
        rotary_fraction=fraction,
        tie_embeddings=bool(_or_default(hf.get("tie_word_embeddings"), kind == "smollm3")),
        param_dtype=stated_dtype(hf) or "float32",
        **{"rope": rope} | _layer_fields(hf, kind, where),
        **(_phi_fields(hf, where) if kind == "phi" else _llama_fields(hf, kind, where)),
    )


def default_theta(model_type: str) -> float:
    """Returns the base of rotations that transformers takes for a config without `rope_theta`."""
    return 2_000_000.0 if model_type == "smollm3" else 10_000.0


def stated_dtype(hf: dict[str, Any]) -> str | None:
    """Returns the dtype of the weights that a config names."""
    name = hf.get("dtype") or hf.get("torch_dtype")
    return name and name.removeprefix("torch.")


def _require(hf: dict[str, Any], where: str, key: str, default: Any, allowed: tuple) -> None:
    value = hf.get(key, default)
    if value not in allowed:
        raise InputError(
            f"{where}: {key}={value!r} is not supported for model_type={hf['model_type']!r}; "
            f"supported: {', '.join(map(str, allowed))}"
        )


def _or_default(value: Any, default: Any) -> Any:
    return default if value is None else value


def _llama_fields(hf: dict[str, Any], kind: str, where: str) -> dict[str, Any]:
    _require(hf, where, "hidden_act", "silu", ("silu", "swish"))
    has_flags = kind in ("llama", "smollm3")
    attention_bias = has_flags and bool(hf.get("attention_bias"))
    return {
        "norm_epsilon": _or_default(hf.get("rms_norm_eps"), 1e-6),
        "qkv_bias": attention_bias or kind == "qwen2",  # Qwen2 has them without a key for them
        "out_bias": attention_bias,
        "mlp_bias": has_flags and bool(hf.get("mlp_bias")),
    }


def _phi_fields(hf: dict[str, Any], where: str) -> dict[str, Any]:
    _require(hf, where, "hidden_act", "gelu_new", _GELU_TANH)
    _require(hf, where, "qk_layernorm", False, (False,))
    _require(hf, where, "tie_word_embeddings", False, (False,))
    return _PHI | {"norm_epsilon": _or_default(hf.get("layer_norm_eps"), 1e-5)}


def _layer_fields(hf: dict[str, Any], kind: str, where: str) -> dict[str, Any]:
    """Returns `pattern` and `layers`, or `rope`: which layers have a window, and which rotate."""
    count = hf["num_hidden_layers"]
    window = hf.get("sliding_window", None if kind == "smollm3" else DEFAULT_WINDOW)
    if kind in ("qwen2", "smollm3") and not hf.get("use_sliding_window"):
        window = None
    if kind in ("llama", "phi"):
        window = None
    rotated = [True] * count
    if kind == "smollm3":
        interval = _or_default(hf.get("no_rope_layer_interval"), 4)
        rotated = hf.get("no_rope_layers") or [(i + 1) % interval != 0 for i in range(count)]
    types = hf.get("layer_types") if kind != "mistral" else None  # which does not read them
    if not types and kind == "qwen2":
        full = hf.get("max_window_layers", 28)
        types = [_FULL if i < full else _SLIDING for i in range(count)]
    elif not types and kind == "smollm3":
        types = [_FULL if has_rope else _SLIDING for has_rope in rotated]
    types = types or [_SLIDING] * count
    if len(set(types)) == 1:
        types = types[:1] * count
    if len(types) != count or len(rotated) != count or not set(types) <= {_FULL, _SLIDING}:
        raise InputError(
            f"{where}: layer_types={types!r:.60} and no_rope_layers must have an entry for each of"
            f" the {count} layers; supported types: {_FULL}, {_SLIDING}"
        )
    kinds = [
        LayerKind(
            pattern=None if window is None or name == _FULL else Sliding(window=window),
            rope=None if has_rope else NoRotation(),
        )
        for name, has_rope in zip(types, rotated, strict=True)
    ]
    if len(set(kinds)) == 1:
        fields = {"pattern": kinds[0].pattern or Causal(), "rope": kinds[0].rope}
        return {key: value for key, value in fields.items() if value is not None}
    return {"pattern": Causal(), "layers": repeating(kinds)}


def _landmark_from_hf(hf: dict[str, Any], vocab_size: int, where: str) -> Landmark:
    """Returns the pattern of a `config.json`; absent keys default as in the released config class.

    Raises:
      InputError: if `mem_id` is absent: no token is the landmark by default.
    """
    token = hf.get("mem_id")
    if type(token) is not int or not 0 <= token < vocab_size:
        raise InputError(
            f"{where}: mem_id={token!r} must be the id of the landmark token, below "
            f"vocab_size={vocab_size}; the released models have 32001"
        )
    every, length = hf.get("mem_freq", 50), hf.get("train_context_length", 512)
    if length // (every + 1) < 3:
        raise InputError(
            f"{where}: train_context_length={length} must hold 3 blocks of mem_freq + 1 = "
            f"{every + 1} tokens, one of them retrieved"
        )
    return Landmark(
        block=every + 1,
        top_k=min(_TOP_K, length // (every + 1) - 2),
        train_length=length,
        token=token,
        loss="predict" if hf.get("include_landmark_in_loss", True) else "skip",
    )


def _landmark_to_hf(pattern: Landmark) -> dict[str, Any]:
    """Returns the keys of `config.json` that the released code reads beside those of Llama."""
    if pattern.token is None:
        raise InputError("model.pattern.token is not set: a checkpoint names its landmark token")
    return {
        "model_type": _LANDMARK,
        "mem_id": pattern.token,
        "mem_freq": pattern.block - 1,
        "train_context_length": pattern.train_length,
        "include_landmark_in_loss": pattern.loss == "predict",
    }


def model_type_of(config: ModelConfig) -> str:
    """Returns the family whose transformers class computes what `config` describes."""
    if is_phi(config):
        return "phi"
    if config.qkv_bias and not config.out_bias:
        return "qwen2"
    if any(isinstance(layer.rope, NoRotation) for layer, _ in config.layer_counts):
        return "smollm3"
    if config.layers:
        return "ministral"
    return "mistral" if isinstance(config.pattern, Sliding) else "llama"


def config_to_hf(config: ModelConfig, *, dtype: str | None = None) -> dict[str, Any]:
    """Returns the `config.json` with which transformers computes the same logits.

    They are the same up to `config.rope.hf_limit` tokens when the RoPE method has one. Of Landmark
    attention it is the `config.json` of the released code.
    """
    if isinstance(config.pattern, Landmark):
        added = _landmark_to_hf(config.pattern)
        plain = config_to_hf(config.replace(pattern=Causal()), dtype=dtype)
        if plain["model_type"] != "llama":
            raise InputError(
                f"there is no Landmark checkpoint of model_type={plain['model_type']!r}, only of "
                "llama; keep the run folder instead"
            )
        return plain | added
    config = config.for_inference()
    if len(config.kinds) == 1:
        config = config.layer(0)
    kind = model_type_of(config)
    _check_exportable(config, kind)
    hf = {
        "architectures": [CLASSES[kind]],
        "model_type": kind,
        **{key: getattr(config, field) for key, field in _SIZES.items()},
        "num_key_value_heads": config.num_kv_heads,
        "max_position_embeddings": config.max_length,
        "tie_word_embeddings": config.tie_embeddings,
        "dtype": dtype or config.param_dtype,
        "torch_dtype": dtype or config.param_dtype,  # what transformers 4 reads
    }
    if kind == "phi":
        hf |= {
            "hidden_act": "gelu_new",
            "layer_norm_eps": config.norm_epsilon,
            "partial_rotary_factor": config.rotary_fraction,
            "qk_layernorm": False,
        }
    else:
        hf |= {
            "hidden_act": "silu",
            "rms_norm_eps": config.norm_epsilon,
            "head_dim": config.head_dim,
        }
    hf |= _family_fields(config, kind)
    hf |= _rotations(config)[0].to_hf(config.rotary_dim)
    if hf["max_position_embeddings"] != config.max_length:
        # A dynamic rope stores its own length there: transformers has no other key for it.
        hf[_MAX_LENGTH] = config.max_length
    if kind == "phi" and isinstance(hf.get("rope_parameters"), dict):
        # transformers 5 reads the factor from here, transformers 4 from the top level.
        hf["rope_parameters"] = hf["rope_parameters"] | {
            "partial_rotary_factor": config.rotary_fraction
        }
    return hf


def windows(config: ModelConfig) -> list[int | None]:
    """The window of each layer; None: it sees the whole text."""
    layers = map(config.layer, range(config.num_layers))
    return [getattr(layer.pattern, "window", None) for layer in layers]


def _rotations(config: ModelConfig) -> list[Rope]:
    """The RoPE methods of layers that rotate, each once; that of the model if none does."""
    ropes = dict.fromkeys(layer.rope for layer, _ in config.layer_counts)
    return [rope for rope in ropes if not isinstance(rope, NoRotation)] or [config.rope]


def _family_fields(config: ModelConfig, kind: str) -> dict[str, Any]:
    if kind == "phi":
        return {}
    if kind == "llama":
        return {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}
    sizes = windows(config)
    window = max((size for size in sizes if size is not None), default=None)
    if kind == "mistral":
        return {"sliding_window": window}
    fields = {"sliding_window": window}
    if config.layers or kind == "smollm3":
        fields["layer_types"] = [_FULL if size is None else _SLIDING for size in sizes]
    if kind != "ministral":
        fields["use_sliding_window"] = window is not None
    if kind == "qwen2":
        # transformers 4 reads the first layer of those with a window, which all after it have.
        first = sizes.index(window) if window is not None else config.num_layers
        fields["max_window_layers"] = first if None not in sizes[first:] else config.num_layers
    if kind == "smollm3":
        layers = map(config.layer, range(config.num_layers))
        fields["no_rope_layers"] = [int(not isinstance(x.rope, NoRotation)) for x in layers]
        fields |= {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}
    return fields


def _check_exportable(config: ModelConfig, kind: str) -> None:
    """transformers has no class for some combinations that the decoder can compute."""
    if kind == "phi":
        required = _PHI | {"tie_embeddings": False}
    elif kind in ("llama", "smollm3"):
        required = _SEQUENTIAL | {"out_bias": config.qkv_bias, "rotary_fraction": 1.0}
    else:
        required = _SEQUENTIAL | {"mlp_bias": False, "out_bias": False, "rotary_fraction": 1.0}
    required |= {"position": "rope"}
    wrong = [f"{k}={getattr(config, k)!r}" for k, v in required.items() if getattr(config, k) != v]
    has_windows = kind in ("mistral", "qwen2", "ministral", "smollm3")
    wrong += [
        f"{'layers.' if config.layers else ''}pattern={pattern}"
        for pattern in config.patterns
        if not isinstance(pattern, Causal) and not (has_windows and isinstance(pattern, Sliding))
    ]
    if not wrong and len({*windows(config)} - {None}) > 1:
        wrong.append(f"layers of windows {sorted({*windows(config)} - {None})}")
    ropes = {layer.rope for layer, _ in config.layer_counts}
    rotating = {rope for rope in ropes if not isinstance(rope, NoRotation)}
    if len(rotating) > 1 or (ropes != rotating and kind != "smollm3"):
        wrong.append(f"layers of ropes {', '.join(sorted(map(repr, ropes)))}")
    if kind == "phi" and config.head_dim * config.num_heads != config.width:
        wrong.append(f"head_dim={config.head_dim}")
    if wrong:
        raise InputError(
            f"transformers has no {kind} model with model.{', model.'.join(wrong)}, so this cannot "
            "be exported as a Hugging Face folder; keep the run folder instead"
        )
