"""Writes tiny GGUF files as llama.cpp's converter does."""

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
