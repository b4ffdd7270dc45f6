"""Writes tiny GGUF files as llama.cpp's converter does."""

import math

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from lcjax.checkpoints import hf_names
from lcjax.tree import lookup

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.dense": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.final_layernorm": "output_norm",
    "lm_head": "output",
}


def gguf_name(name):
    stem, _, suffix = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{NAMES[stem]}.{suffix}"
    _, _, layer, inner = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[inner]}.{suffix}"


def interleave(tensor, heads):
    """llama.cpp's converter: the halves of each head are woven together."""
    rows = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(tensor.shape)


def tensors_of(params, config, arch):
    """(GGUF name, array) as llama.cpp stores them."""
    for entry in hf_names.entries(config):
        for layer, name in enumerate(entry.names):
            leaf = np.asarray(lookup(params, entry.path))
            array = entry.to_tensor(leaf[layer] if entry.stacked else leaf)
            heads = {"q": config.num_heads, "k": config.num_kv_heads}
            projection = name.rpartition("self_attn.")[2][0]
            if arch == "llama" and projection in "qk" and "_proj" in name and "attn" in name:
                array = interleave(array, heads[projection])
            yield gguf_name(name), np.ascontiguousarray(array)


ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "olmo3": gguf.MODEL_ARCH.OLMO2,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "olmoe": gguf.MODEL_ARCH.OLMOE,
}
# Families whose converter class extends that of Llama, and so permutes queries and keys.
PERMUTED = ("llama", "mistral", "granite", "smollm3", "mixtral")


def convert(model, path, metadata=(), dtype=Kind.F32, **tokenizer):
    """Writes the GGUF file of a model of transformers as llama.cpp's converter does.

    The names of tensors are those of the gguf package's own map. `dtype` is that of matrices,
    without routers, which are always float32.
    """
    hf = model.config.to_dict()
    kind, count = hf["model_type"], hf["num_hidden_layers"]
    arch = ARCHITECTURES[kind]
    names = gguf.get_tensor_name_map(arch, count)
    heads = {"q": hf["num_attention_heads"], "k": hf["num_key_value_heads"]}
    head_dim = hf.get("head_dim") or hf["hidden_size"] // heads["q"]
    rope = hf["rope_parameters"]
    rope = rope.get("full_attention", rope)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_block_count(count)
    writer.add_context_length(hf["max_position_embeddings"])
    writer.add_embedding_length(hf["hidden_size"])
    writer.add_feed_forward_length(hf["intermediate_size"])
    writer.add_head_count(heads["q"])
    writer.add_head_count_kv(heads["k"])
    writer.add_layer_norm_rms_eps(hf["rms_norm_eps"])
    if kind not in ("granite", "phi3"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if kind != "gemma2":  # whose file says nothing about its rotation
        writer.add_rope_freq_base(rope["rope_theta"])
    if kind in (*PERMUTED, "phi3"):
        writer.add_rope_dimension_count(int(rope.get("partial_rotary_factor", 1.0) * head_dim))
    if kind == "phi3":
        writer.add_sliding_window(hf["sliding_window"] or 0)
        writer.add_rope_scaling_orig_ctx_len(hf["original_max_position_embeddings"])
    elif kind in ("gemma2", "gemma3_text", "olmo3") or (
        kind in ("mistral", "mixtral") and hf["sliding_window"]
    ):
        writer.add_sliding_window(hf["sliding_window"])
    if "num_experts_per_tok" in hf:
        writer.add_expert_count(hf.get("num_experts") or hf["num_local_experts"])
        writer.add_expert_used_count(hf["num_experts_per_tok"])
    if kind == "qwen3_moe":
        writer.add_expert_feed_forward_length(hf["moe_intermediate_size"])
    if kind == "olmo3":
        writer.add_sliding_window_pattern([t == "sliding_attention" for t in hf["layer_types"]])
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if hf.get(key):
            getattr(writer, f"add_{key}")(hf[key])
    for key, name in (
        ("attention_multiplier", "attention_scale"),
        ("embedding_multiplier", "embedding_scale"),
        ("residual_multiplier", "residual_scale"),
        ("logits_scaling", "logit_scale"),
    ):
        if hf.get(key):
            getattr(writer, f"add_{name}")(hf[key])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    elif rope["rope_type"] == "longrope":
        original = hf["original_max_position_embeddings"]
        scale = hf["max_position_embeddings"] / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))
        for name in ("long", "short"):
            factors = np.array(rope[f"{name}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", factors)
    for add in metadata:
        add(writer)
    add_byte_tokenizer(writer, hf["vocab_size"], **tokenizer)
    for name, tensor in one_by_one(model.state_dict()):
        if name == "lm_head.weight" and hf["tie_word_embeddings"]:
            continue
        array = tensor.float().numpy()
        projection = name.rpartition("self_attn.")[2][0]
        if kind in PERMUTED and "self_attn" in name and projection in heads:
            array = interleave(array, heads[projection])
        if kind.startswith("gemma") and name.endswith("norm.weight"):
            array = array + 1
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        stays = array.ndim == 1 or "ffn_gate_inp" in stored
        form = Kind.F32 if stays else dtype
        array = gguf.quantize(np.ascontiguousarray(array), form)
        writer.add_tensor(stored, array, raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def one_by_one(state):
    """The tensors of a `state_dict`, those of gates and of the others of all experts apart."""
    for name, tensor in state.items():
        if name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate", "up"), tensor.chunk(2, 1), strict=True):
                yield name.replace("gate_up_proj", f"{part}_proj.weight"), half
        else:
            yield f"{name}.weight" if name.endswith("experts.down_proj") else name, tensor


def write_gguf(path, arrays, config, *, arch="llama", kind=Kind.F32, metadata=(), **tokenizer):
    """`arrays`: a parameter tree, or (GGUF name, array) pairs."""
    if isinstance(arrays, dict):
        arrays = tensors_of(arrays, config, arch)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_length)
    writer.add_embedding_length(config.width)
    writer.add_feed_forward_length(config.mlp_width)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_rope_dimension_count(config.rotary_dim)
    if config.norm == "layer":
        writer.add_layer_norm_eps(config.norm_epsilon)
    else:
        writer.add_layer_norm_rms_eps(config.norm_epsilon)
    add_byte_tokenizer(writer, config.vocab_size, **tokenizer)
    for add in metadata:
        add(writer)
    for name, array in arrays:
        if array.ndim > 1 and kind != Kind.F32:
            writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_byte_tokenizer(writer, size, model="gpt2", pre="smollm"):
    prints = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in prints]
    tokens = [""] * 256
    for byte in prints:
        tokens[byte] = chr(byte)
    for i, byte in enumerate(rest):
        tokens[byte] = chr(256 + i)
    tokens += ["<|end|>", "he", "Ġhe", "12"] + [f"<unused{i}>" for i in range(size - 260)]
    types = [1] * 256 + [3, 1, 1, 1] + [5] * (size - 260)
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(["h e", "Ġ he", "1 2"])
    writer.add_eos_token_id(256)
