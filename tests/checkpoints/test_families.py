"""Every model family: equal to its class in transformers, in both directions."""

import dataclasses
import functools
import json
import os
import re
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from convert_support import assert_same
from safetensors import safe_open

from lcjax import LanguageModel, Sampling
from lcjax.attention import Landmark
from lcjax.checkpoints import ByteTokenizer, config_from_hf, config_to_hf, load, save_hf
from lcjax.checkpoints.adapters import save_peft
from lcjax.checkpoints.families import FAMILIES
from lcjax.errors import InputError
from lcjax.models import Decoder, preset
from lcjax.models.layer_groups import stack_layers, unstack_layers
from lcjax.models.lora import LoRA
from lcjax.models.loss import Projection, cross_entropy, token_nll
from lcjax.rope import Default, Yarn
from lcjax.rope.positions import PlainPositions
from lcjax.training.objective import language_model
from lcjax.training.step import accumulate

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


def test_every_family_is_tested():
    assert {kind for kind, _ in MODELS.values()} == set(FAMILIES)


# With plain names of tensors, with fused ones, and with another order of rows;
# models/test_transformers.py has more, quick.
@pytest.mark.slow_except("qwen3", "phi3", "glm4")
@pytest.mark.parametrize("name", MODELS)
def test_a_model_gives_the_logits_and_texts_of_transformers_and_is_exported_as_it_was(
    tmp_path, name
):
    from transformers import AutoModelForCausalLM

    (tmp_path / "hf").mkdir()
    model = saved(name, tmp_path / "hf", "bin" if name in STATE_DICTS else "safetensors")
    params, config, tokenizer = load(tmp_path / "hf", allow_pickle=True)
    tokens = np.random.default_rng(1).integers(0, 256, (2, 40))
    with torch.no_grad():
        expected = model(torch.tensor(tokens)).logits.numpy()
    lm = LanguageModel(Decoder(config), params, tokenizer)
    actual = lm.logits(tokens)
    np.testing.assert_allclose(actual, expected, atol=1e-4 * np.abs(expected).max())

    # The tokens that follow, each read beside the cache.
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        written = model.generate(torch.tensor(tokens), do_sample=False, max_new_tokens=12)
    for text, ids in zip(
        lm.generate(tokens.tolist(), Sampling(max_new_tokens=12)), written[:, 40:].tolist()
    ):
        assert list(text.ids) == ids[: len(text.ids)] and text.ids

    save_hf(tmp_path / "out", params, config, tokenizer)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert type(again) is type(model)
    state = again.state_dict()
    assert set(state) == set(model.state_dict())
    assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())
    with torch.no_grad():
        exported = again(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(exported, expected, atol=1e-5 * np.abs(expected).max())
    assert config_from_hf(again.config.to_dict()) == config
    eos = again.generation_config.eos_token_id
    assert tokenizer.eos_ids == ((eos,) if isinstance(eos, int) else tuple(eos))
    reread, reread_config, _ = load(tmp_path / "out")
    assert reread_config == config
    assert_same(reread, params)


@pytest.mark.slow_except(  # each stores other tensors
    "llama", "phi3", "gemma3", "mixtral", "llama4"
)
@pytest.mark.parametrize("name", MODELS)
def test_pickles_in_two_files_hold_the_model_of_safetensors(tmp_path, name):
    for form in ("safetensors", "bin"):
        (tmp_path / form).mkdir()
    model = saved(name, tmp_path / "safetensors")
    model.config.save_pretrained(tmp_path / "bin")
    ByteTokenizer().save(tmp_path / "bin")
    state = model.state_dict()
    files = [f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)]
    half = len(state) // 2
    weight_map = {key: files[i >= half] for i, key in enumerate(state)}
    for file in files:
        torch.save(
            {k: state[k] for k, f in weight_map.items() if f == file}, tmp_path / "bin" / file
        )
    total = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (tmp_path / "bin/pytorch_model.bin.index.json").write_text(json.dumps(index))

    params, config, _ = load(tmp_path / "bin", allow_pickle=True)
    expected, expected_config, _ = load(tmp_path / "safetensors")
    assert config == expected_config
    assert_same(params, expected)
    (tmp_path / "bin" / files[1]).unlink()
    with pytest.raises(InputError, match=rf"1 of 2 shards are missing: {files[1]}"):
        load(tmp_path / "bin", allow_pickle=True)


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


def test_a_method_of_the_model_leaves_layers_with_a_window_alone(tmp_path):
    (tmp_path / "hf").mkdir()
    saved("gemma3", tmp_path / "hf")
    lm = LanguageModel.load(tmp_path / "hf")
    longer = lm.with_method(rope=Yarn(factor=4.0))
    ropes = [longer.config.layer(i).rope for i in range(6)]
    assert ropes[0] == Default(theta=10_000.0) and ropes[0] == ropes[4]
    assert isinstance(ropes[5], Yarn) and ropes[5].theta == 1_000_000.0


def test_phi3_keeps_its_class_as_long_as_that_takes_the_position_method(tmp_path):
    (tmp_path / "hf").mkdir()
    saved("phi3, all channels", tmp_path / "hf")
    params, config, _ = load(tmp_path / "hf")
    assert config.family == "phi3" == config_to_hf(config)["model_type"]
    assert "model.layers.1.self_attn.qkv_proj.weight" in stored_names(
        save_hf(tmp_path / "same", params, config, ByteTokenizer())
    )
    longer = config.replace(rope=Yarn(theta=1e4, factor=4.0, original_length=128))
    assert config_to_hf(longer)["model_type"] == "llama"
    assert "model.layers.1.self_attn.q_proj.weight" in stored_names(
        save_hf(tmp_path / "longer", params, longer, ByteTokenizer())
    )
    assert_same(load(tmp_path / "longer")[0], params)
    with pytest.raises(InputError, match=r"transformers has no .* with model.rotary_fraction=0.5"):
        config_to_hf(longer.replace(rotary_fraction=0.5, mlp_bias=True))
    with pytest.raises(InputError, match="stores the projections of this model together"):
        save_peft(tmp_path / "adapter", params, config.replace(lora=LoRA(rank=2)), base=None)


def test_a_phi3_that_its_class_does_not_compute_is_written_as_a_glm(tmp_path):
    """GLM rotates a part of each head under any position method, in another order of channels."""
    from transformers import AutoModelForCausalLM

    (tmp_path / "hf").mkdir()
    saved("phi3, all channels", tmp_path / "hf")
    params, config, _ = load(tmp_path / "hf")
    rope = Yarn(theta=1e4, factor=4.0, original_length=128)
    config = config.replace(rope=rope, rotary_fraction=0.5)
    save_hf(tmp_path / "out", params, config, ByteTokenizer())
    again, other, tokenizer = load(tmp_path / "out")
    assert_same(again, params)
    assert other == config.replace(family="glm")
    tokens = np.random.default_rng(1).integers(0, 256, (2, 40))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    with torch.no_grad():
        expected = model(torch.tensor(tokens)).logits.numpy()
    actual = LanguageModel(Decoder(config), params, tokenizer).logits(tokens)
    np.testing.assert_allclose(actual, expected, atol=1e-4 * np.abs(expected).max())


def stored_names(folder):
    with safe_open(folder / "model.safetensors", "np") as file:
        return set(file.keys())


def test_fused_tensors_of_another_size_are_named(tmp_path):
    (tmp_path / "hf").mkdir()
    saved("phi3", tmp_path / "hf")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    (tmp_path / "hf/config.json").write_text(json.dumps(config | {"num_key_value_heads": 4}))
    with pytest.raises(InputError, match=r"missing: .*q_proj.*unexpected: .*qkv_proj"):
        load(tmp_path / "hf")


@pytest.mark.slow_except("mixtral-True")
@pytest.mark.parametrize(
    ("name", "scan"),
    [
        *(("mixtral", True), ("olmoe", False), ("qwen2_moe", True)),
        ("qwen2_moe, dense layers", True),
    ],
)
def test_the_loss_of_a_mixture_and_its_gradient_are_those_of_transformers(tmp_path, name, scan):
    (tmp_path / "hf").mkdir()
    model = saved(name, tmp_path / "hf", "bin")
    params, config, _ = load(tmp_path / "hf", allow_pickle=True)
    config = config.replace(experts=dataclasses.replace(config.experts, balance=0.5))
    model.router_aux_loss_coef = 0.5
    rng = np.random.default_rng(1)
    tokens, mask = rng.integers(0, 256, (3, 17)), np.ones((3, 17), np.int32)
    mask[1, 11:] = mask[2, 4:] = 0
    labels = np.where(mask, tokens, -100)
    labels, tokens, mask = (torch.tensor(x) for x in (labels, tokens, mask))
    expected = model(tokens, attention_mask=mask, labels=labels, output_router_logits=True)
    expected.loss.backward()

    # The gradients of transformers, read like weights.
    gradients = {path: leaf.grad for path, leaf in model.named_parameters()}
    torch.save(gradients, tmp_path / "hf/pytorch_model.bin")
    wanted = load(tmp_path / "hf", allow_pickle=True)[0]

    targets = np.roll(tokens.numpy(), -1, 1)
    weights = np.pad(mask.numpy()[:, 1:], ((0, 0), (0, 1))).astype(np.float32)
    batch = {"tokens": tokens.numpy(), "targets": targets, "segments": mask.numpy()}
    batch |= {"weights": weights, "positions": np.tile(np.arange(17), (3, 1))}
    batch = jax.tree.map(jnp.asarray, batch)
    layers = config.replace(scan_layers=scan, remat="dots")
    tree = params if scan else unstack_layers(params, layers)
    step = functools.partial(accumulate, language_model(layers, PlainPositions()), count=1)
    loss, _, grads, parts = jax.jit(step)(tree, {}, batch, jax.random.key(0))
    np.testing.assert_allclose(loss, expected.loss.detach(), rtol=1e-5)
    np.testing.assert_allclose(parts["balance"], expected.aux_loss.detach(), rtol=1e-5)
    np.testing.assert_allclose(loss, parts["ce"] + 0.5 * parts["balance"], rtol=1e-5)
    grads = grads if scan else stack_layers(grads, layers)
    for mine, want in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(mine, want, atol=1e-4 * np.abs(want).max())
    plain = language_model(config, PlainPositions(), balance=False)
    nll, total, _ = jax.jit(plain)(params, {}, batch, jax.random.key(0))
    np.testing.assert_allclose(nll / total, parts["ce"], rtol=1e-5)


def test_experts_that_are_missing_or_of_another_size_are_named(tmp_path):
    (tmp_path / "hf").mkdir()
    saved("mixtral", tmp_path / "hf", "bin")
    path = tmp_path / "hf/config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"num_local_experts": 7}))
    with pytest.raises(InputError, match=r"missing: .*w1.weight.*unexpected: .*gate_up_proj"):
        load(tmp_path / "hf", allow_pickle=True)
    path.write_text(json.dumps(config))
    params, config, tokenizer = load(tmp_path / "hf", allow_pickle=True)
    save_hf(tmp_path / "out", params, config, tokenizer)
    path = tmp_path / "out/config.json"
    hf = json.loads(path.read_text())
    path.write_text(json.dumps(hf | {"num_local_experts": 6}))
    name = r"model.layers.0.block_sparse_moe.experts.5.w1.weight"
    with pytest.raises(InputError, match=rf"missing: {name}, .*wrong shape: .*gate.weight is \[5"):
        load(tmp_path / "out")
    for key, value in {"router_jitter_noise": 0.1, "clip_qkv": 8.0}.items():
        kind = {"clip_qkv": "olmoe"}.get(key, "mixtral")
        with pytest.raises(InputError, match=rf"{key}=.* is not supported for model_type='{kind}'"):
            config_from_hf(hf | {key: value, "model_type": kind})


def test_a_family_that_is_not_known_is_refused_by_name():
    with pytest.raises(InputError, match=r"model_type='mamba' is not supported; .*llama.*qwen3"):
        config_from_hf({"model_type": "mamba"})


def test_what_no_class_computes_is_not_exported(tmp_path):
    (tmp_path / "hf").mkdir()
    saved("gemma2", tmp_path / "hf")
    params, config, _ = load(tmp_path / "hf")
    wrong = config.replace(block="parallel")
    with pytest.raises(InputError, match="transformers has no gemma2 model with model.block='para"):
        save_hf(tmp_path / "out", params, wrong)
    with pytest.raises(
        InputError, match="attention_soft_cap is not defined under pattern Landmark"
    ):
        config.replace(layers=(), pattern=Landmark(token=259))


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_gradients_of_scaled_and_capped_logits_are_those_of_autodiff(tied):
    keys = jax.random.split(jax.random.key(0), 4)
    hidden = jax.random.normal(keys[0], (2, 7, 8))
    kernel = jax.random.normal(keys[1], (11, 8) if tied else (8, 11))
    targets = jax.random.randint(keys[2], (2, 7), 0, 11)
    weights = jax.random.uniform(keys[3], (2, 7))

    def projected(kernel):
        return Projection(kernel, None, tied, 0.7, 1.5)

    def fused(hidden, kernel):
        return cross_entropy(hidden, projected(kernel), targets, weights, chunk=3)[0]

    def plain(hidden, kernel):
        logits = 1.5 * jnp.tanh(hidden @ (kernel.T if tied else kernel) * 0.7 / 1.5)
        nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]
        return (weights * nll).sum()

    np.testing.assert_allclose(fused(hidden, kernel), plain(hidden, kernel), rtol=1e-6)
    for mine, expected in zip(
        jax.grad(fused, (0, 1))(hidden, kernel), jax.grad(plain, (0, 1))(hidden, kernel)
    ):
        np.testing.assert_allclose(mine, expected, atol=1e-6)
    nll = token_nll(hidden, projected(kernel), targets, chunk=3)
    np.testing.assert_allclose((weights * nll).sum(), plain(hidden, kernel), rtol=1e-6)


@pytest.mark.parametrize("stored", ["both, different", "the head alone"])
def test_a_stored_head_of_a_tied_config_counts_as_in_transformers(tmp_path, stored):
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **SIZES | {"tie_word_embeddings": True})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    ByteTokenizer().save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    embedding = "model.embed_tokens.weight"
    tensors["lm_head.weight"] = torch.randn_like(tensors[embedding]) * 0.2
    if stored == "the head alone":
        del tensors[embedding]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    tokens = np.random.default_rng(1).integers(0, 256, (2, 40))
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
        expected = model(torch.tensor(tokens)).logits.numpy()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        params, config, tokenizer = load(tmp_path)
    actual = LanguageModel(Decoder(config), params, tokenizer).logits(tokens)
    np.testing.assert_allclose(actual, expected, atol=1e-5 * np.abs(expected).max())
    assert config.tie_embeddings == (stored == "the head alone")
    messages = [str(one.message) for one in caught if "lm_head.weight differs" in str(one.message)]
    assert len(messages) == (not config.tie_embeddings)


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
    *("linear_dt_min", "linear_dt_max", "linear_dt_init_floor"),
}
# Keys that a class has and does not use, or for other values of another key.
UNUSED = {
    *(("olmoe", "num_local_experts"), ("olmoe", "sliding_window")),
    ("phi3", "original_max_position_embeddings"),
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
            if not re.match(r"class \w*Vision", part)
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
