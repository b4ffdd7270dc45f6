"""GGUF files of every architecture give the logits of the Hugging Face model that they hold."""

import gguf
import jax
import numpy as np
import pytest
from family_models import MODELS, YARN, hf_model
from gguf import GGMLQuantizationType as Kind
from gguf_support import convert

from lcjax import LanguageModel
from lcjax.checkpoints import ByteTokenizer, gguf_file, load, load_config
from lcjax.checkpoints.engine_check import check
from lcjax.checkpoints.families import FAMILIES
from lcjax.checkpoints.gguf_file import GGUFFile, read_index
from lcjax.errors import InputError
from lcjax.rope import Default, LongRope, NoRotation, Yarn

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
# Changes of a model of family_models to what a file of its architecture can say: the scale of
# attention is not stored, and a head of Granite and Phi-3 has the width over the heads.
CASES = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3, yarn and biases": ("qwen3, yarn and biases", {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 20}),
    "gemma3": ("gemma3", {"query_pre_attn_scalar": 20}),
    "gemma3, longer": (
        "gemma3, longer",
        {"query_pre_attn_scalar": 20, "num_hidden_layers": 6, "layer_types": None},
    ),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {}),
    "olmo3, yarn": ("olmo3, yarn", {}),
    "olmo3, other layers": (
        "olmo3",
        {"layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"]},
    ),
    "phi3": ("phi3", {}),
    "phi3, all channels": ("phi3, all channels", {"original_max_position_embeddings": 128}),
    "granite": ("granite", {}),
    "smollm3": ("smollm3", {}),
    # The factor of the balance loss is not stored, and llama.cpp has no window of Qwen3-MoE.
    "mixtral": ("mixtral", {}),
    "mixtral, tied": ("mixtral, all experts at once", {"router_aux_loss_coef": 0.001}),
    "qwen3_moe": ("qwen3_moe", {"use_sliding_window": False}),
    "olmoe": ("olmoe", {}),
}


def made(name, **sizes):
    base, changes = CASES[name]
    kind, keys = MODELS[base]
    MODELS["gguf"] = (kind, keys | changes | sizes)
    try:
        return hf_model("gguf")
    finally:
        del MODELS["gguf"]


def test_every_family_is_tested_or_refused():
    without = {
        *("ministral", "arcee", "seed_oss", "ernie4_5", "glm", "glm4", "cohere", "cohere2"),
        *("exaone4", "ministral3", "gpt_oss", "qwen2_moe", "llama4_text"),
        *(
            "qwen3_next",
            "qwen3_5_text",
            "qwen3_5_moe_text",
            "olmo_hybrid",
            "granite_swa",
            "hunyuan_v1_dense",
            "gemma4_text",
            "gemma4_unified_text",
        ),
    }
    kinds = {MODELS[base][0] for base, _ in CASES.values()}
    assert kinds == set(FAMILIES) - without - {"phi"}  # phi: tests/checkpoints/test_gguf.py
    readable = {arch.family for arch in gguf_file._ARCHITECTURES.values()}
    for arch in gguf_file._ARCHITECTURES.values():
        readable |= {arch.window_family, arch.expert_family} - {None}
    assert readable == set(FAMILIES) - without


# Older versions of transformers, such as 5.10, rotate all layers of an Olmo3 alike.
olmo3_by_type = pytest.mark.skipif(
    "full_attention" not in transformers.Olmo3Config().rope_parameters,
    reason="this transformers rotates all layers of Olmo3 alike",
)


EVERY_CASE = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[olmo3_by_type] * name.startswith("olmo3")) for name in CASES],
)


@EVERY_CASE
def test_a_file_has_the_weights_and_the_config_of_the_folder_that_it_was_made_of(tmp_path, name):
    model = made(name)
    convert(model, tmp_path / "m.gguf")
    model.save_pretrained(tmp_path / "hf")
    ByteTokenizer().save(tmp_path / "hf")
    (params, config, _), (expected, *_) = load(tmp_path / "m.gguf"), load(tmp_path / "hf")
    assert config == load_config(tmp_path / "m.gguf") == load_config(tmp_path / "hf")
    # Files of Gemma hold norms with 1 added, which rounds them.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-7, rtol=0), params, expected)


# The logits follow from equal weights and configs. Those of families whose formulas no other quick
# test compares with transformers are compared in every run.
@pytest.mark.slow_except("gemma2", "gemma3, longer", "olmo3, yarn", "granite", "olmoe")
@EVERY_CASE
def test_a_file_has_the_logits_of_the_model_that_it_was_made_of(tmp_path, name):
    model = made(name)
    convert(model, tmp_path / "m.gguf")
    lm = LanguageModel.load(tmp_path / "m.gguf")
    tokens = np.random.default_rng(1).integers(0, 256, (2, 40))
    with torch.no_grad():
        expected = model(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(lm.logits(tokens), expected, atol=1e-4 * np.abs(expected).max())


def changed(path, monkeypatch, **values):
    """Reads a file whose metadata differs; a key of None is absent."""
    metadata, tensors = read_index(path)
    names = {name.replace("__", "."): value for name, value in values.items()}
    metadata = {k: v for k, v in (metadata | names).items() if v is not None}
    monkeypatch.setattr(gguf_file, "read_index", lambda _: (metadata, tensors))
    return load_config(path)


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "olmo3, yarn"])
def test_how_engines_read_a_file_of_a_later_family_is_not_known(tmp_path, name):
    convert(made(name), tmp_path / "m.gguf")
    assert {row.verdict for row in check(tmp_path / "m.gguf").rows} == {"not known"}


def test_layers_without_rotation_are_those_of_llama_cpp(tmp_path):
    convert(made("smollm3"), tmp_path / "m.gguf")
    config = load_config(tmp_path / "m.gguf")
    still = [isinstance(config.layer(i).rope, NoRotation) for i in range(4)]
    assert still == [False, False, False, True]


@pytest.mark.parametrize(
    ("name", "arch", "layers", "scalar"),
    [("gemma2", "gemma2", 46, 144), ("gemma3", "gemma3", 62, 168)],
)
def test_the_largest_gemma_scales_attention_by_width_over_heads(
    tmp_path, monkeypatch, name, arch, layers, scalar
):
    convert(made(name), tmp_path / "m.gguf")
    sizes = {"block_count": layers, "embedding_length": scalar * 4, "attention__head_count": 4}
    values = {f"{arch}__{key}": value for key, value in sizes.items()}
    config = changed(tmp_path / "m.gguf", monkeypatch, **values)
    np.testing.assert_allclose(config.attention_scale, scalar**-0.5)
    values[f"{arch}__block_count"] = 26
    config = changed(tmp_path / "m.gguf", monkeypatch, **values)
    assert config.head_dim == 20 and config.attention_scale in (None, 20**-0.5)


def test_gemma3_takes_a_base_of_its_layers_with_a_window_and_a_period_from_the_file(
    tmp_path, monkeypatch
):
    convert(made("gemma3"), tmp_path / "m.gguf")
    values = {"gemma3__rope__freq_base_swa": 5000.0, "gemma3__attention__sliding_window_pattern": 3}
    config = changed(tmp_path / "m.gguf", monkeypatch, **values)
    bases = [config.layer(i).rope.theta for i in range(6)]
    assert bases == [5000.0, 5000.0, 1e6, 5000.0, 5000.0, 1e6]
    config = changed(tmp_path / "m.gguf", monkeypatch, gemma3__attention__sliding_window=None)
    assert not config.layers and config.rope == Default(theta=1e6)
    values = {"gemma3__attention__sliding_window_pattern": [True, False]}
    with pytest.raises(
        InputError, match=r"sliding_window_pattern=\[True, False\] must be a period"
    ):
        changed(tmp_path / "m.gguf", monkeypatch, **values)


@pytest.mark.parametrize("attn_factor", [None, 0.1 * np.log(4.0) + 1])
def test_the_attention_factor_of_olmo3_is_that_of_the_folder(tmp_path, attn_factor):
    metadata = [] if attn_factor is None else [
        lambda w: w.add_rope_scaling_attn_factors(float(attn_factor))
    ]  # fmt: skip
    convert(made("olmo3, yarn"), tmp_path / "m.gguf", metadata)
    config = load_config(tmp_path / "m.gguf")
    assert config.layer(3).rope == Yarn(theta=5e5, factor=4.0, original_length=32)
    assert config.layer(0).rope == Default(theta=5e5)
    assert YARN["factor"] == 4.0


def test_granite_scales_attention_as_llama_cpp_where_the_file_says_nothing(tmp_path, monkeypatch):
    convert(made("granite"), tmp_path / "m.gguf")
    keys = ("attention__scale", "embedding_scale", "residual_scale", "logit_scale")
    values = {f"granite__{key}": None for key in keys}
    config = changed(tmp_path / "m.gguf", monkeypatch, **values)
    assert config.attention_scale in (None, 12**-0.5) and config.logit_scale == 1.0
    values = {"granite__rope__scaling__finetuned": False}
    with pytest.raises(InputError, match="rope.scaling.finetuned=False, a Granite without rotat"):
        changed(tmp_path / "m.gguf", monkeypatch, **values)


def test_longrope_keeps_an_attention_factor_of_its_own_and_is_refused_where_damaged(
    tmp_path, monkeypatch
):
    path = tmp_path / "m.gguf"
    convert(made("phi3"), path)
    rope = load_config(path).rope
    assert isinstance(rope, LongRope) and rope.attention_factor is None
    config = changed(path, monkeypatch, phi3__rope__scaling__attn_factor=1.5)
    assert config.rope.attention_factor == 1.5
    monkeypatch.undo()
    for change, words in (
        ({"phi3__rope__scaling__type": "yarn"}, "type='yarn' with factor=1 beside LongRoPE"),
        ({"phi3__rope__scaling__original_context_length": None}, "original_context_length' is mis"),
        ({"phi3__rope__scaling__yarn_log_multiplier": 0.5}, "yarn_log_multiplier=0.5 cannot"),
    ):
        with pytest.raises(InputError, match=words):
            changed(path, monkeypatch, **change)
        monkeypatch.undo()
    metadata, tensors = read_index(path)
    del tensors["rope_factors_short.weight"]
    monkeypatch.setattr(gguf_file, "read_index", lambda _: (metadata, tensors))
    with pytest.raises(InputError, match=r"rope_factors_short\.weight None must be \[3\]"):
        load_config(path)


# Rows of 256 numbers are the blocks of Q4_K.
WIDE = {"num_hidden_layers": 2, "hidden_size": 256, "moe_intermediate_size": 256, "head_dim": 32}


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_K])
def test_quantised_experts_are_what_gguf_reads(tmp_path, monkeypatch, kind):
    convert(made("qwen3_moe", **WIDE), tmp_path / "m.gguf")
    metadata, tensors = read_index(tmp_path / "m.gguf")
    rng = np.random.default_rng(0)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    expected = {}
    for layer in range(2):
        for part in ("gate", "up", "down"):
            name = f"blk.{layer}.ffn_{part}_exps.weight"
            raw = rng.integers(0, 256, (5 * 256, 256 // block * size), np.uint8)
            raw &= 0x3F  # keeps the half-precision scales finite
            tensors[name] = tensors[name]._replace(kind=kind.name, data=raw)
            assert tensors[name].shape == (5, 256, 256)
            expected[layer, part] = gguf.dequantize(raw, kind)
    monkeypatch.setattr(gguf_file, "read_index", lambda _: (metadata, tensors))
    params, config, _ = load(tmp_path / "m.gguf")
    assert config.param_dtype == "float32"
    for (layer, part), rows in expected.items():
        kernel = params["layers"]["mlp"]["experts"][part]["kernel"][layer]
        np.testing.assert_array_equal(kernel, rows.reshape(5, 256, 256).swapaxes(1, 2))
    # Those of two experts alone, as a device reads them that holds no others.
    rows = GGUFFile(tmp_path / "m.gguf").rows(
        "model.layers.1.mlp.experts.*.up_proj.weight", 2 * 256, 4 * 256
    )
    np.testing.assert_array_equal(rows, expected[1, "up"][2 * 256 : 4 * 256])


@pytest.mark.parametrize(("kind", "dtype"), [(Kind.F16, "float16"), (Kind.BF16, "bfloat16")])
def test_a_mixture_is_read_in_the_type_of_its_matrices_though_routers_are_float32(
    tmp_path, kind, dtype
):
    convert(made("mixtral"), tmp_path / "m.gguf", dtype=kind)
    _, tensors = read_index(tmp_path / "m.gguf")
    assert tensors["blk.0.ffn_gate_inp.weight"].kind == "F32"
    assert tensors["blk.0.ffn_up_exps.weight"].kind == kind.name
    params, config, _ = load(tmp_path / "m.gguf")
    assert config.param_dtype == dtype == params["layers"]["mlp"]["router"]["kernel"].dtype


def test_a_mixture_is_refused_by_the_key_that_changes_what_it_computes(tmp_path, monkeypatch):
    path = tmp_path / "m.gguf"
    convert(made("olmoe"), path)
    config = load_config(path)
    neutral = {"weights_scale": 1.0, "gating_func": 1, "shared_count": 0, "weights_norm": False}
    values = {f"olmoe__expert_{key}": value for key, value in neutral.items()}
    assert changed(path, monkeypatch, **values) == config
    monkeypatch.undo()
    for key, value in {
        "expert_weights_scale": 2.5,
        "expert_gating_func": 2,  # sigmoid
        "expert_shared_count": 1,
        "expert_shared_feed_forward_length": 64,
        "expert_group_count": 4,
        "expert_weights_norm": True,
        "experts_per_group": 2,
        "leading_dense_block_count": 1,
    }.items():
        with pytest.raises(InputError, match=f": {key}={value} cannot be read from GGUF; load"):
            changed(path, monkeypatch, **{f"olmoe__{key}": value})
        monkeypatch.undo()
    for change, words in (
        ({"olmoe__expert_count": None}, "'olmoe.expert_count' is missing"),
        ({"olmoe__expert_used_count": 0}, "expert_used_count=0 must be a whole number"),
        ({"olmoe__expert_used_count": 7}, "top_k=7 must be at most experts.count=6"),
    ):
        with pytest.raises(InputError, match=words):
            changed(path, monkeypatch, **change)
        monkeypatch.undo()


def test_a_mixture_of_another_architecture_is_refused(tmp_path, monkeypatch):
    convert(made("qwen3"), tmp_path / "m.gguf")
    with pytest.raises(InputError, match="qwen3.expert_count=8 cannot be read from GGUF"):
        changed(tmp_path / "m.gguf", monkeypatch, qwen3__expert_count=8)


def test_experts_of_qwen3_moe_have_the_width_of_llama_cpp_where_the_file_says_nothing(
    tmp_path, monkeypatch
):
    convert(made("qwen3_moe"), tmp_path / "m.gguf")
    assert load_config(tmp_path / "m.gguf").experts.width == 24
    values = {"qwen3moe__expert_feed_forward_length": None, "qwen3moe__feed_forward_length": 90}
    config = changed(tmp_path / "m.gguf", monkeypatch, **values)
    assert config.experts.width == 90 // config.experts.top_k == 30


def test_experts_with_tensors_of_their_own_and_of_another_number_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "m.gguf"
    convert(made("mixtral"), path)
    metadata, tensors = read_index(path)
    six = metadata | {"llama.expert_count": 6}
    monkeypatch.setattr(gguf_file, "read_index", lambda _: (six, tensors))
    with pytest.raises(
        InputError, match=r"experts\.\*\.w1\.weight is \[5, 80, 48\], not \[480, 48"
    ):
        load(path)
    old = dict(tensors)
    stack = old.pop("blk.2.ffn_gate_exps.weight")
    for i in range(5):
        name, rows = f"blk.2.ffn_gate.{i}.weight", slice(80 * i, 80 * i + 80)
        old[name] = stack._replace(name=name, shape=(80, 48), data=stack.data[rows])
    monkeypatch.setattr(gguf_file, "read_index", lambda _: (metadata, old))
    words = r"m\.gguf: blk\.2\.ffn_gate\.0\.weight holds one expert, an old form of GGUF; convert"
    with pytest.raises(InputError, match=words) as error:
        load(path)
    assert "\n" not in str(error.value)


def test_the_names_of_tensors_are_those_of_the_gguf_package():
    names = {*gguf_file._MODULES, *gguf_file._LAYER_MODULES, *gguf_file._ROPE_FACTORS.values()}
    for name, arch in gguf_file._ARCHITECTURES.items():
        number = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == name)
        stored = {
            gguf.TENSOR_NAMES[t].removeprefix("blk.{bid}.") for t in gguf.MODEL_TENSORS[number]
        }
        ignored = {"rope_freqs", "attn_rot_embd"}
        assert stored - ignored <= names | set(arch.modules)
