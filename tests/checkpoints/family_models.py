"""Small models of every family, as transformers makes and saves them."""

import os

import pytest

from lcjax.checkpoints import ByteTokenizer

torch = pytest.importorskip("torch")
os.environ.setdefault("USE_TF", "0")
SIZES = {
    "vocab_size": 260,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 258,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
GEMMA4 = {"hidden_size_per_layer_input": 0, "sliding_window": 7}
GEMMA4_OF_TWO_HEADS = GEMMA4 | {
    "num_hidden_layers": 6,
    "head_dim": 20,
    "global_head_dim": 24,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}
# Model type, and keys of its config; a head of 20 channels is not the width over the heads.
MODELS = {
    "llama": ("llama", {"head_dim": 20, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"head_dim": 20, "sliding_window": 7}),
    "qwen2": ("qwen2", {}),
    "qwen2, windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
    ),
    "ministral": (
        "ministral",
        {
            "head_dim": 20,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 4}),
    "phi": ("phi", {"partial_rotary_factor": 0.5}),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "phi3, all channels": ("phi3", {}),
    "phi3": (
        "phi3",
        {
            "partial_rotary_factor": 0.5,
            "sliding_window": 9,
            "original_max_position_embeddings": 32,
            "rope_scaling": {
                "rope_type": "longrope",
                "short_factor": [1.0, 1.1, 1.2],
                "long_factor": [2.0, 3.0, 4.0],
            },
        },
    ),
    "qwen3": ("qwen3", {"head_dim": 20}),
    "qwen3, yarn and biases": (
        "qwen3",
        {"attention_bias": True, "rope_parameters": YARN | {"rope_theta": 1e6}, "head_dim": 16},
    ),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.3,
            "attention_multiplier": 0.1,
            "logits_scaling": 3.0,
            "tie_word_embeddings": True,
        },
    ),
    "granite_swa": (
        "granite_swa",
        {
            "num_hidden_layers": 5,
            "sliding_window": 7,
            "layer_rope_theta": [0, 1e4, 1e4, 1e4, 5e5],
            "attention_multiplier": 0.1,
            "embedding_multiplier": 12.0,
            "logits_scaling": 3.0,
        },
    ),
    "granite_swa, other values": (
        "granite_swa",
        {
            "head_dim": 20,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "layer_rope_theta": [1e3, 1e6, 0.0],
            "attention_bias": True,
            "mlp_bias": True,
            "residual_multiplier": 0.3,
            "tie_word_embeddings": False,
            "rope_parameters": YARN | {"rope_theta": 1e5},
        },
    ),
    "granite_swa, one base": ("granite_swa", {"layer_types": ["full_attention"] * 3}),
    "granite_swa, no rotation": ("granite_swa", {"layer_rope_theta": [0, 0, 0]}),
    "hunyuan_v1_dense": (
        "hunyuan_v1_dense",
        {
            "head_dim": 20,
            "rope_parameters": {"rope_type": "dynamic", "factor": 1.0, "alpha": 50.0},
        },
    ),
    "hunyuan_v1_dense, other values": (
        "hunyuan_v1_dense",
        {
            "head_dim": 16,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": YARN | {"rope_theta": 1e6},
        },
    ),
    "olmo2": ("olmo2", {"head_dim": 20}),
    "olmo3": ("olmo3", {"num_hidden_layers": 4, "sliding_window": 7}),
    "olmo3, yarn": (
        "olmo3",
        {"num_hidden_layers": 4, "sliding_window": 7, "rope_scaling": YARN, "rope_theta": 5e5},
    ),
    "gemma2": ("gemma2", {"head_dim": 20, "sliding_window": 7, "query_pre_attn_scalar": 30}),
    "gemma2, without caps": (
        "gemma2",
        {"final_logit_softcapping": None, "attn_logit_softcapping": None, "head_dim": 20},
    ),
    "gemma3": ("gemma3_text", {"num_hidden_layers": 6, "head_dim": 20, "sliding_window": 7}),
    "gemma3, longer": (
        "gemma3_text",
        {
            "head_dim": 20,
            "sliding_window": 7,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "final_logit_softcapping": 2.0,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gemma4": (
        "gemma4_text",
        GEMMA4_OF_TWO_HEADS
        | {
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma4, values of their own and no share": (
        "gemma4_text",
        GEMMA4
        | {
            "head_dim": 8,
            "global_head_dim": 8,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "attention_bias": True,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "full_attention": YARN | {"rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gemma4, shares in all layers": (
        "gemma4_text",
        GEMMA4
        | {
            "head_dim": 12,
            "num_key_value_heads": 1,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "per_layer_config": {
                "1": {"head_dim": 28, "num_key_value_heads": 4},
                "2": {"head_dim": 28, "num_key_value_heads": 4},
            },
            "attention_bias": True,
            "attention_k_eq_v": True,
            "use_bidirectional_attention": "vision",
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": 1e6,
                    "partial_rotary_factor": 0.25,
                    "factor": 8.0,
                },
                "sliding_attention": {
                    "rope_type": "proportional",
                    "rope_theta": 1e4,
                    "partial_rotary_factor": 0.5,
                },
            },
        },
    ),
    "gemma4, full attention in all layers": (
        "gemma4_text",
        GEMMA4 | {"layer_types": ["full_attention"] * 3, "global_head_dim": 20},
    ),
    "gemma4, mixture": (
        "gemma4_text",
        GEMMA4_OF_TWO_HEADS
        | {
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 3,
            "moe_intermediate_size": 28,
        },
    ),
    "gemma4, keys of other layers": (
        "gemma4_text",
        GEMMA4
        | {
            "num_hidden_layers": 8,
            "head_dim": 20,
            "global_head_dim": 24,
            "layer_types": ["sliding_attention", "full_attention"] * 4,
            "num_kv_shared_layers": 4,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 260,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma4, embeddings of layers": (
        "gemma4_text",
        GEMMA4
        | {
            "layer_types": ["full_attention"] * 3,
            "global_head_dim": 20,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 260,
            "tie_word_embeddings": False,
        },
    ),
    "gemma4_unified, keys of other layers": (
        "gemma4_unified_text",
        {
            "num_hidden_layers": 5,
            "head_dim": 20,
            "sliding_window": 7,
            "layer_types": [
                *("full_attention", "sliding_attention", "full_attention"),
                *("sliding_attention", "full_attention"),
            ],
            "num_kv_shared_layers": 2,
            "attention_k_eq_v": True,
            "attention_bias": True,
        },
    ),
    "gemma4_unified": (
        "gemma4_unified_text",
        {"head_dim": 20, "sliding_window": 7, "global_head_dim": 20},
    ),
    "arcee": ("arcee", {"head_dim": 20}),
    "arcee, biases": (
        "arcee",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "seed_oss": ("seed_oss", {"head_dim": 20}),
    "seed_oss, other biases": (
        "seed_oss",
        {
            "head_dim": 16,
            "attention_bias": False,
            "attention_out_bias": True,
            "mlp_bias": True,
            "rope_parameters": YARN | {"rope_theta": 1e6},
        },
    ),
    "ernie4_5": ("ernie4_5", {"head_dim": 20}),
    "ernie4_5, biases": (
        "ernie4_5",
        {
            "head_dim": 16,
            "use_bias": True,
            "tie_word_embeddings": False,
            "rope_parameters": YARN | {"rope_theta": 1e6},
        },
    ),
    "glm": ("glm", {"head_dim": 20, "partial_rotary_factor": 0.3}),
    "glm, yarn without biases": (
        "glm",
        {
            "head_dim": 16,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "rope_parameters": YARN | {"rope_theta": 1e6, "partial_rotary_factor": 1.0},
        },
    ),
    "glm4": ("glm4", {"head_dim": 20}),
    "cohere": ("cohere", {"head_dim": 20}),
    "cohere, biases": (
        "cohere",
        {
            "attention_bias": True,
            "logit_scale": 0.7,
            "tie_word_embeddings": False,
            "rope_parameters": YARN | {"rope_theta": 1e6},
        },
    ),
    "cohere, norms of queries and keys": ("cohere", {"head_dim": 20, "use_qk_norm": True}),
    "cohere2": ("cohere2", {"num_hidden_layers": 4, "sliding_window": 7, "head_dim": 20}),
    "cohere2, other layers": (
        "cohere2",
        {
            "sliding_window": 7,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "attention_bias": True,
            "logit_scale": 3.0,
        },
    ),
    "cohere2, no rotation": ("cohere2", {"layer_types": ["full_attention"] * 3}),
    "exaone4": ("exaone4", {"num_hidden_layers": 4, "head_dim": 20, "sliding_window": 7}),
    "exaone4, other layers": (
        "exaone4",
        {
            "sliding_window": 7,
            "sliding_window_pattern": "LG",
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "tie_word_embeddings": True,
        },
    ),
    "exaone4, no window": (
        "exaone4",
        {
            "sliding_window": None,
            "layer_types": ["full_attention"] * 3,
            "rope_parameters": YARN | {"rope_theta": 1e6},
        },
    ),
    "exaone4, no rotation": ("exaone4", {"layer_types": ["full_attention"] * 3}),
    "ministral3": (
        "ministral3",
        {
            "head_dim": 20,
            "rope_parameters": YARN | {"rope_theta": 1e6, "llama_4_scaling_beta": 0.4},
        },
    ),
    "ministral3, plain rope and a window": (
        "ministral3",
        {
            "head_dim": 16,
            "sliding_window": 9,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "original_max_position_embeddings": 5,
                "llama_4_scaling_beta": -0.1,
            },
        },
    ),
    "ministral3, no scale": (
        "ministral3",
        {
            "head_dim": 20,
            "rope_parameters": YARN
            | {"rope_theta": 1e6, "llama_4_scaling_beta": 0.0, "mscale": 1.0},
        },
    ),
    "mixtral": (
        "mixtral",
        {"head_dim": 20, "num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 7},
    ),
    "mixtral, all experts at once": (
        "mixtral",
        {"num_local_experts": 6, "router_aux_loss_coef": 0.02, "tie_word_embeddings": True},
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "head_dim": 20,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "use_sliding_window": True,
            "sliding_window": 7,
        },
    ),
    "qwen2_moe": (
        "qwen2_moe",
        {
            "head_dim": 20,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 28,
        },
    ),
    "qwen2_moe, other values": (
        "qwen2_moe",
        {
            "num_hidden_layers": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 90,
            "norm_topk_prob": True,
            "qkv_bias": False,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 3,
        },
    ),
    "qwen2_moe, dense layers": (
        "qwen2_moe",
        {
            "num_hidden_layers": 5,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 28,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3, -1],
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 3,
        },
    ),
    "qwen2_moe, no experts": (
        "qwen2_moe",
        {"num_experts": 0, "num_hidden_layers": 2, "tie_word_embeddings": True},
    ),
    "qwen3_moe, dense layers": (
        "qwen3_moe",
        {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "mlp_only_layers": [0],
            "use_sliding_window": True,
            "sliding_window": 7,
        },
    ),
    "llama4": (
        "llama4_text",
        {
            "head_dim": 20,
            "num_hidden_layers": 5,
            "intermediate_size": 24,
            "intermediate_size_mlp": 80,
            "num_local_experts": 5,
            "attention_chunk_size": 7,
            "interleave_moe_layer_step": 2,
            "floor_scale": 5,
            "attn_scale": 0.6,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 16.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 1.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "llama4, other values": (
        "llama4_text",
        {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "intermediate_size": 24,
            "intermediate_size_mlp": 80,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "attention_chunk_size": 9,
            "moe_layers": [0, 3],
            "no_rope_layers": [0, 1, 0, 1],
            "layer_types": [
                *("full_attention", "full_attention", "chunked_attention", "chunked_attention"),
            ],
            "attention_bias": True,
            "attn_temperature_tuning": False,
            "tie_word_embeddings": True,
            "router_aux_loss_coef": 0.02,
            "rope_parameters": YARN | {"rope_theta": 1e6},
        },
    ),
    "llama4, no experts": (
        "llama4_text",
        {
            "head_dim": 20,
            "num_hidden_layers": 2,
            "intermediate_size_mlp": 80,
            "num_local_experts": 0,
            "moe_layers": [],
            "interleave_moe_layer_step": 0,
            "no_rope_layer_interval": 8,
            "attention_chunk_size": None,
            "use_qk_norm": False,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            "head_dim": 20,
            "num_hidden_layers": 4,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": 7,
            "rope_parameters": YARN | {"rope_theta": 1e4, "truncate": False},
        },
    ),
    "gpt_oss, other values": (
        "gpt_oss",
        {
            "head_dim": 16,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "sliding_window": 9,
            "attention_bias": False,
            "swiglu_limit": 0.6,
            "swiglu_alpha": 1.2,
            "tie_word_embeddings": True,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "qwen3_next": (
        "qwen3_next",
        {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 10,
            "linear_value_head_dim": 6,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 20,
        },
    ),
    "qwen3_next, other values": (
        "qwen3_next",
        {
            "head_dim": 24,
            "full_attention_interval": 2,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 6,
            "linear_value_head_dim": 8,
            "linear_conv_kernel_dim": 2,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 12,
        },
    ),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 6,
            "linear_value_head_dim": 10,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 20,
        },
    ),
    "qwen3_5": (
        "qwen3_5_text",
        {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 6,
            "linear_value_head_dim": 10,
        },
    ),
    "qwen3_5, other values": (
        "qwen3_5_text",
        {
            "head_dim": 20,
            "layer_types": ["full_attention", "linear_attention", "full_attention"],
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 4,
            "linear_conv_kernel_dim": 3,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": YARN | {"rope_theta": 1e6, "partial_rotary_factor": 0.5},
        },
    ),
    "olmo_hybrid": (
        "olmo_hybrid",
        {
            "num_hidden_layers": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": None},
        },
    ),
    "olmo_hybrid, other values": (
        "olmo_hybrid",
        {
            "head_dim": 20,
            "layer_types": ["full_attention", "linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 6,
            "linear_value_head_dim": 10,
            "linear_conv_kernel_dim": 3,
            "linear_allow_neg_eigval": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": YARN | {"rope_theta": 1e6},
        },
    ),
    "olmo_hybrid, the last layer alone has attention": ("olmo_hybrid", {}),
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 2}),
    "olmoe, all experts at once": (
        "olmoe",
        {
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "attention_bias": True,
        },
    ),
}
# Read from .bin files; of mixtures they hold all experts in one array.
STATE_DICTS = (
    *("qwen3", "gemma3", "mixtral, all experts at once", "olmoe, all experts at once"),
    "qwen2_moe, other values",
)


def hf_model(name, dtype=None, **sizes):
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, changes = MODELS[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES | changes | sizes)
    options = {"attn_implementation": "eager", "dtype": dtype}
    model = AutoModelForCausalLM.from_config(config, **options).eval()
    with torch.no_grad():  # biases and norms start at 0 and 1, where a swap would not show
        for path, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + ("norm" in path))
        for path, buffer in model.named_buffers():
            if path.endswith("layer_scalar"):
                buffer.copy_(torch.randn_like(buffer) * 0.2 + 1)
    return model


def saved(name, folder, form="safetensors"):
    """Saves a model as transformers does; returns it."""
    model = hf_model(name)
    if form == "safetensors":
        model.save_pretrained(folder, max_shard_size="100KB")
    else:
        model.config.save_pretrained(folder)
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    ByteTokenizer().save(folder)
    return model
