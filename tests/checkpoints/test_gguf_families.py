"""GGUF files of every architecture give the logits of the Hugging Face model that they hold."""

import gguf
import numpy as np
import pytest
from gguf_support import convert
from test_families import MODELS, YARN, hf_model

from lcjax import LanguageModel
from lcjax.checkpoints import gguf_file, load_config
from lcjax.checkpoints.engine_check import check
from lcjax.checkpoints.families import FAMILIES
from lcjax.checkpoints.gguf_file import read_index
from lcjax.errors import InputError
from lcjax.rope import Default, LongRope, NoRotation, Yarn

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
# Changes of a model of test_families to what a file of its architecture can say: the scale of
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
}


def made(name):
    base, changes = CASES[name]
    kind, keys = MODELS[base]
    MODELS["gguf"] = (kind, keys | changes)
    try:
        return hf_model("gguf")
    finally:
        del MODELS["gguf"]


def test_every_family_is_tested_or_refused():
    without = {"ministral"} | {name for name, family in FAMILIES.items() if family.experts}
    kinds = {MODELS[base][0] for base, _ in CASES.values()}
    assert kinds == set(FAMILIES) - without - {"phi"}  # phi: tests/checkpoints/test_gguf.py
    readable = {arch.family for arch in gguf_file._ARCHITECTURES.values()}
    others = {arch.window_family for arch in gguf_file._ARCHITECTURES.values()} - {None}
    assert readable | others == set(FAMILIES) - without


# Older versions of transformers, such as 5.10, rotate all layers of an Olmo3 alike.
olmo3_by_type = pytest.mark.skipif(
    "full_attention" not in transformers.Olmo3Config().rope_parameters,
    reason="this transformers rotates all layers of Olmo3 alike",
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[olmo3_by_type] * name.startswith("olmo3")) for name in CASES],
)
def test_a_file_has_the_logits_and_the_config_of_the_folder_that_it_was_made_of(tmp_path, name):
    model = made(name)
    convert(model, tmp_path / "m.gguf")
    model.save_pretrained(tmp_path / "hf")
    lm = LanguageModel.load(tmp_path / "m.gguf")
    tokens = np.random.default_rng(1).integers(0, 256, (2, 40))
    with torch.no_grad():
        expected = model(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(lm.logits(tokens), expected, atol=1e-4 * np.abs(expected).max())
    assert load_config(tmp_path / "m.gguf") == load_config(tmp_path / "hf")


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


def test_the_names_of_tensors_are_those_of_the_gguf_package():
    names = {*gguf_file._MODULES, *gguf_file._LAYER_MODULES, *gguf_file._ROPE_FACTORS.values()}
    for name, arch in gguf_file._ARCHITECTURES.items():
        number = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == name)
        stored = {
            gguf.TENSOR_NAMES[t].removeprefix("blk.{bid}.") for t in gguf.MODEL_TENSORS[number]
        }
        ignored = {"rope_freqs", "attn_rot_embd"} | {
            x for x in stored if "_exp" in x or "_gate_" in x
        }
        assert stored - ignored <= names | set(arch.modules)
