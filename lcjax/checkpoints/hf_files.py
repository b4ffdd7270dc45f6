"""Reads the JSON files of Hugging Face folders and checks the types of the keys that lcjax reads.

A key has the same meaning in `config.json`, `generation_config.json` and `tokenizer_config.json`,
so one table serves all of them; keys of single families are checked when a model is read. Other
keys are not checked. Null is read as absent, but for a few keys (`stated`).
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from lcjax.errors import INT32_MAX, InputError, is_finite_number
from lcjax.files import FolderSums, read_json
from lcjax.models.model_config import MAX_LAYERS

HF_DTYPES = ("float32", "float16", "bfloat16")
_MAX_EPSILON = 0.1  # published ones lie between 1e-12 and 1e-3


class _Type(NamedTuple):
    rule: str
    holds: Callable[[Any], bool]


def _is_whole(value: Any, least: int, most: int = INT32_MAX) -> bool:
    return type(value) is int and least <= value <= most


def _is_number(value: Any, low: float, high: float) -> bool:
    return is_finite_number(value) and low <= value <= high


def _is_token(value: Any) -> bool:
    return isinstance(value.get("content") if isinstance(value, dict) else value, str)


def _is_template(value: Any) -> bool:
    """Returns whether `value` is a template, or a list of named templates."""
    if not isinstance(value, list):
        return isinstance(value, str)
    fields = ("name", "template")
    return all(
        isinstance(t, dict) and all(isinstance(t.get(f), str) for f in fields) for t in value
    )


def _are_tokens_by_id(value: Any) -> bool:
    return isinstance(value, dict) and all(
        index.isdecimal() and _is_token(token) for index, token in value.items()
    )


_COUNT = _Type("a whole number of at least 1", lambda value: _is_whole(value, 1))
_DEPTH = _Type(f"a whole number from 1 to {MAX_LAYERS:,}", lambda v: _is_whole(v, 1, MAX_LAYERS))
_LAYERS = _Type("a whole number of at least 0", lambda value: _is_whole(value, 0))
_EPSILON = _Type(f"a number from 0 to {_MAX_EPSILON}", lambda v: _is_number(v, 0, _MAX_EPSILON))
_SHARE = _Type("a number from 0 to 1", lambda value: _is_number(value, 0, 1))
_NUMBER = _Type("a finite number", is_finite_number)
_POSITIVE = _Type("a number above 0", lambda value: is_finite_number(value) and value > 0)
_LENGTH = _Type("a number of at least 1", lambda value: is_finite_number(value) and value >= 1)
_FLAG = _Type("true or false", lambda value: isinstance(value, bool))
_FLAGS = _Type("a list of 0 and 1", lambda v: isinstance(v, list) and all(x in (0, 1) for x in v))
_NUMBERS = _Type(
    "a list of numbers of layers", lambda v: isinstance(v, list) and all(type(x) is int for x in v)
)
_PERIOD = _Type(
    "a whole number of at least 0, or letters L and G",
    lambda v: set(v) in ({"L"}, {"G"}, {"L", "G"}) if isinstance(v, str) else _is_whole(v, 0),
)
_BASES = _Type(
    "a list of numbers of at least 0",
    lambda v: isinstance(v, list) and all(is_finite_number(x) and x >= 0 for x in v),
)
_OVERRIDES = _Type(
    "an object of objects by the numbers of layers",
    lambda v: (
        isinstance(v, dict)
        and all(str(key).isdecimal() and isinstance(x, dict) for key, x in v.items())
    ),
)
_TEXT = _Type("text", lambda value: isinstance(value, str))
_SECTION = _Type("an object", lambda value: isinstance(value, dict))
_NAMES = _Type(
    "a list of names", lambda v: isinstance(v, list) and all(isinstance(name, str) for name in v)
)
_DTYPE = _Type(
    f"one of {', '.join(HF_DTYPES)}",
    lambda value: isinstance(value, str) and value.removeprefix("torch.") in HF_DTYPES,
)
# Llama-1 and some Llama-2 have `pad_token_id: -1`.
_IDS = _Type(
    "a token id or a list of them",
    lambda v: all(_is_whole(index, -1) for index in (v if isinstance(v, list) else [v])),
)
_TOKEN = _Type("a token: text, or an object with `content`", _is_token)

_TYPES = {
    **dict.fromkeys(
        (
            "vocab_size", "hidden_size", "intermediate_size",
            "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings",
            "lcjax_max_length", "mem_freq", "train_context_length", "no_rope_layer_interval",
        ),
        _COUNT,
    ),
    "num_hidden_layers": _DEPTH,
    **dict.fromkeys(("sliding_window", "max_window_layers"), _LAYERS),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps"), _EPSILON),
    **dict.fromkeys(
        (
            "tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window",
            "qk_layernorm", "include_landmark_in_loss", "do_cross_attention", "add_bos_token",
            "attention_out_bias", "use_bias", "use_qk_norm",
        ),
        _FLAG,
    ),
    **dict.fromkeys(
        ("rope_scaling", "rope_parameters", "lcjax_rope", "lcjax_landmark", "lcjax_cepe"), _SECTION
    ),
    **dict.fromkeys(("model_type", "hidden_act"), _TEXT),
    **dict.fromkeys(("architectures", "layer_types"), _NAMES),
    "no_rope_layers": _FLAGS,
    **dict.fromkeys(("dtype", "torch_dtype"), _DTYPE),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), _IDS),
    **dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), _TOKEN),
    "partial_rotary_factor": _SHARE,
    "rope_theta": _NUMBER,
    "model_max_length": _LENGTH,
    "chat_template": _Type("a template, or a list of named ones", _is_template),
    "added_tokens_decoder": _Type("an object of tokens by their ids", _are_tokens_by_id),
}  # fmt: skip

# Keys of single families. Model types that lcjax does not read, but whose tokenizers it does, have
# other values of some of them.
FAMILY_TYPES = {
    **dict.fromkeys(
        (
            "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step",
            "intermediate_size_mlp", "attention_chunk_size", "floor_scale",
            "shared_expert_intermediate_size",
            "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
            "linear_value_head_dim", "linear_conv_kernel_dim", "full_attention_interval",
            "global_head_dim", "num_global_key_value_heads", "top_k_experts",
        ),
        _COUNT,
    ),
    **dict.fromkeys(
        (
            "query_pre_attn_scalar", "final_logit_softcapping", "attn_logit_softcapping",
            "embedding_multiplier", "residual_multiplier", "attention_multiplier",
            "logits_scaling", "rope_local_base_freq", "logit_scale",
        ),
        _POSITIVE,
    ),
    # 0: all layers are dense, if their family has such layers
    **dict.fromkeys(("num_experts", "num_local_experts", "interleave_moe_layer_step"), _LAYERS),
    **dict.fromkeys(("mlp_only_layers", "moe_layers"), _NUMBERS),
    **dict.fromkeys(("router_aux_loss_coef", "attn_scale"), _NUMBER),
    **dict.fromkeys(
        (
            "norm_topk_prob", "qkv_bias", "attn_temperature_tuning", "linear_allow_neg_eigval",
            "attention_k_eq_v", "enable_moe_block", "use_double_wide_mlp",
        ),
        _FLAG,
    ),
    "sliding_window_pattern": _PERIOD,
    "layer_rope_theta": _BASES,
    **dict.fromkeys(("hidden_size_per_layer_input", "num_kv_shared_layers"), _LAYERS),
    "per_layer_config": _OVERRIDES,
}  # fmt: skip
# Null switches these off; if they are absent, some families have them.
_NULLS = (
    *("sliding_window", "attention_chunk_size", "final_logit_softcapping"),
    *("attn_logit_softcapping", "rope_theta", "per_layer_config"),
)


def stated(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the keys of a config that have a value: not null, unless null is one."""
    return {key: value for key, value in values.items() if value is not None or key in _NULLS}


def check_types(values: dict[str, Any], where: str, types: dict[str, _Type] = _TYPES) -> None:
    """Raises an InputError that names the first key whose value has a wrong type or range."""
    for key, kind in types.items():
        value = values.get(key)
        if value is not None and not kind.holds(value):
            raise InputError(f"{where}: {key}={value!r:.60} must be {kind.rule}; correct it")


def read_hf_json(path: Path, default: Any = None) -> dict[str, Any]:
    """Returns a JSON file of a Hugging Face folder (`default` if absent) with checked types."""
    values = read_json(path, default)
    try:  # an export writes the texts again
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{path}: holds half of a surrogate pair ({error}); correct it") from None
    check_types(values, str(path))
    return values


def check_folder_sums(folder: Path) -> None:
    """Raises an InputError if a small file differs from its sum; folders without sums pass."""
    way_out = (
        "copy the folder again, or write the sums of the files as they are with"
        f" `python -m lcjax.check {folder} --write`"
    )
    FolderSums(folder, way_out).check_small()
