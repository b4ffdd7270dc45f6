"""Keys of config.json: published files are the presets, and no key is ignored in silence."""

import re
from pathlib import Path

import pytest
from family_models import SIZES

from lcjax.checkpoints import config_from_hf
from lcjax.checkpoints.families import FAMILIES
from lcjax.errors import InputError
from lcjax.models import preset

# The config.json of checkpoints of the hub whose architecture is a preset.
PUBLISHED = {
    "llama3-8b": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "rms_norm_eps": 1e-05,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "max_position_embeddings": 8192, "rope_theta": 500000.0,
    },
    "qwen2.5-7b": {
        "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "rms_norm_eps": 1e-06,
        "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_theta": 1000000.0,
        "use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28,
    },
    "qwen3-8b": {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "rms_norm_eps": 1e-06,
        "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
        "rope_theta": 1000000, "attention_bias": False, "use_sliding_window": False,
    },
    "qwen3.5-9b": {
        "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 4096,
        "intermediate_size": 12288, "num_hidden_layers": 32, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-06, "full_attention_interval": 4, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_value_head_dim": 128, "attn_output_gate": True, "attention_bias": False,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25,
            "mrope_interleaved": True, "mrope_section": [11, 11, 10],
        },
    },
    "olmo3-7b": {
        "model_type": "olmo3", "vocab_size": 100278, "hidden_size": 4096, "rms_norm_eps": 1e-06,
        "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "max_position_embeddings": 65536, "rope_theta": 500000,
        "sliding_window": 4096,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192,
            "beta_fast": 32.0, "beta_slow": 1.0,
        },
    },
    "olmo3-32b": {
        "model_type": "olmo3", "vocab_size": 100278, "hidden_size": 5120, "rms_norm_eps": 1e-06,
        "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40,
        "num_key_value_heads": 8, "max_position_embeddings": 65536, "rope_theta": 500000,
        "sliding_window": 4096,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192,
            "beta_fast": 32.0, "beta_slow": 1.0,
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_is_the_architecture_of_the_published_checkpoint(name):
    config = config_from_hf(PUBLISHED[name] | {"tie_word_embeddings": False})
    assert config.replace(family=preset(name).family) == preset(name)


# Other values than the default of the keys that transformers' classes read.
OTHER_VALUES = {
    **dict.fromkeys(("hidden_act", "hidden_activation"), ("relu",)),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps"), (1e-3,)),
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_bias"), (True, False)),
    **dict.fromkeys(("attention_out_bias", "qk_layernorm"), (True,)),
    "use_qk_norm": (True, False),
    **dict.fromkeys(("qkv_bias", "attn_temperature_tuning"), (False,)),
    "moe_layers": ([1],),
    "interleave_moe_layer_step": (2,),
    **dict.fromkeys(("attention_chunk_size", "floor_scale", "intermediate_size_mlp"), (5,)),
    "attn_scale": (0.3,),
    "logit_scale": (3.0,),
    "sliding_window_pattern": (2,),
    **dict.fromkeys(("norm_topk_prob", "tie_word_embeddings"), (True, False)),
    **dict.fromkeys(("use_bidirectional_attention", "per_layer_config"), (True, {"0": {}})),
    **dict.fromkeys(("num_local_experts", "num_experts", "num_experts_per_tok"), (3,)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "clip_qkv"), (1.5,)),
    **dict.fromkeys(("embedding_multiplier", "logits_scaling", "residual_multiplier"), (3.0,)),
    **dict.fromkeys(("attention_multiplier", "query_pre_attn_scalar"), (3.0,)),
    **dict.fromkeys(("router_jitter_noise", "router_aux_loss_coef"), (0.5,)),
    **dict.fromkeys(("swiglu_alpha", "swiglu_limit"), (0.5,)),
    **dict.fromkeys(("num_hidden_layers", "hidden_size", "intermediate_size"), (96,)),
    **dict.fromkeys(("vocab_size", "num_attention_heads", "moe_intermediate_size"), (96,)),
    "shared_expert_intermediate_size": (96,),
    **dict.fromkeys(("head_dim", "max_position_embeddings"), (64, 32)),
    "num_key_value_heads": (4,),
    "sliding_window": (5,),
    "use_sliding_window": (False,),
    "max_window_layers": (1, 3),
    "layer_types": (["full_attention"] * 4,),
    "is_causal": (False,),
    "partial_rotary_factor": (0.25,),
    "original_max_position_embeddings": (16,),
    "rope_parameters": ({"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4},),
    "decoder_sparse_step": (2,),
    "mlp_only_layers": ([0],),
    "no_rope_layers": ([0, 1, 1, 0],),
    "no_rope_layer_interval": (2,),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), (8, 64)),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), (64,)),
    "linear_conv_kernel_dim": (3,),
    "linear_allow_neg_eigval": (False,),
    "layer_rope_theta": ([0, 1e4, 1e4, 1e4],),
    "attention_k_eq_v": (True,),
    **dict.fromkeys(("hidden_size_per_layer_input", "num_kv_shared_layers"), (2,)),
    "enable_moe_block": (False,),
    "use_double_wide_mlp": (True,),
    **dict.fromkeys(("top_k_experts", "vocab_size_per_layer_input"), (3,)),
}
# Keys without effect on the logits of a text; the last ones are for images.
NO_EFFECT = {
    *("attention_dropout", "embd_pdrop", "resid_pdrop", "initializer_range", "pretraining_tp"),
    "residual_dropout",
    *("use_cache", "output_router_logits", "pad_token_id", "bos_token_id", "eos_token_id"),
    "eod_token_id",
    *("get_text_config", "text_config", "vision_config", "image_token_id", "mm_tokens_per_image"),
    *("image_token_index", "boi_token_index", "eoi_token_index"),
    *("video_token_id", "vision_start_token_id", "vision_end_token_id"),
    *("num_channels", "image_size", "patch_size", "norm_eps", "pixel_shuffle_ratio"),
    *("vision_output_dim", "vision_feature_select_strategy", "multi_modal_projector_bias"),
    *("projector_input_dim", "projector_output_dim", "projector_dropout"),
    *("output_attentions", "output_hidden_states", "return_dict"),
    *("linear_a_log_min", "linear_a_log_max"),  # of initial weights
    *("audio_config", "image_seq_length", "video_token_id", "audio_token_id"),
    *("boi_token_id", "eoi_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index"),
    *("standardize", "use_clipped_linears", "kv_sharing_modes"),
    *("linear_dt_min", "linear_dt_max", "linear_dt_init_floor"),
}
# Keys that a class has and does not use, or for other values of another key.
UNUSED = {
    *(("olmoe", "num_local_experts"), ("olmoe", "sliding_window")),
    ("phi3", "original_max_position_embeddings"),
    # Of layers that read the keys of others
    *(("gemma4_text", "use_double_wide_mlp"), ("gemma4_unified_text", "use_double_wide_mlp")),
}
SWITCHED_ON = {
    "use_sliding_window": True,
    "sliding_window": 7,
    "max_window_layers": 2,
    "num_hidden_layers": 4,
    "num_experts": 6,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "intermediate_size_mlp": 64,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": 260,
    "enable_moe_block": True,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
}


def keys_read(kind):
    """The keys of config.json that the installed transformers reads for a model type."""
    import transformers

    name = kind.removesuffix("_text")
    folder = Path(transformers.__file__).parent / "models" / name
    classes, fields = (
        "".join(
            part
            for part in re.split(
                r"^(?=class )", (folder / f"{file}_{name}.py").read_text(), flags=re.M
            )
            if not re.match(r"class \w*(Vision|Audio|Multimodal|Clippable)", part)
        )
        for file in ("modeling", "configuration")
    )
    read = re.findall(r"config\.([a-z]\w*)", classes)
    read += re.findall(r"getattr\((?:self\.)?config, \"([a-z]\w*)\"", classes)
    read += re.findall(r"^    ([a-z]\w*): .*=", fields, re.MULTILINE)
    return {*read, "is_causal", "per_layer_config"} - NO_EFFECT


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_key_that_transformers_reads_is_computed_or_refused(kind):
    hf = SIZES | SWITCHED_ON | {"model_type": kind}
    config, ignored = config_from_hf(hf), []
    for key in sorted(keys_read(kind)):
        assert key in OTHER_VALUES, f"transformers reads a new key of {kind}: {key}"
        for value in OTHER_VALUES[key]:
            try:
                ignored += [key] * (config_from_hf(hf | {key: value}) == config)
            except InputError:
                continue
    ignored = {key for key in ignored if ignored.count(key) == len(OTHER_VALUES[key])}
    assert ignored == {key for name, key in UNUSED if name == kind}
