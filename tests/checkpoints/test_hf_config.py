"""Configs of the four families, in both spellings, and what is refused."""

import dataclasses
import json

import pytest
from convert_support import FAMILIES, tiny_config
from rope_examples import HEAD_DIM, rope_examples

from lcjax.attention import Causal, DualChunk, Longformer, Sliding
from lcjax.checkpoints import config_from_hf, config_to_hf
from lcjax.checkpoints.hf_config import announced_length, trained_for
from lcjax.errors import InputError
from lcjax.models import LayerKind
from lcjax.rope import (
    E2LLM,
    NTK,
    Clex,
    Default,
    DynamicNTK,
    Linear,
    Llama3,
    LongRope,
    NoRotation,
    Yarn,
)

LLAMA2 = {  # as Llama-2-7B ships it: no rope_theta, no head_dim
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vocab_size": 32000,
}
MISTRAL = LLAMA2 | {"model_type": "mistral", "num_key_value_heads": 8}
QWEN2 = LLAMA2 | {"model_type": "qwen2", "sliding_window": 512, "use_sliding_window": False}
QWEN2_OPEN = LLAMA2 | {"model_type": "qwen2"}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_survives_the_way_out_and_back(family):
    config = tiny_config(family)
    assert config_from_hf(config_to_hf(config)) == config


LINEAR = Linear(theta=1e4, factor=4.0)
LCEG = DynamicNTK(theta=1e4, factor=4.0, original_length=64, min_length=512)
YARN = Yarn(theta=1e4, factor=8.0, original_length=64)
CLEX = Clex(theta=1e4, original_length=64, max_factor=4)
# The lengths that transformers reads with these methods of a model of 64 tokens. DynamicNTK's are
# the `max_position_embeddings` of its formula.
ANNOUNCED = {
    Default(theta=1e4): 64,
    LINEAR: 256,
    NTK(theta=1e4, alpha=29.0): 512,
    DynamicNTK(theta=1e4, factor=2.0, original_length=64): 64,
    DynamicNTK(theta=1e4, factor=2.0, original_length=32): 32,
    LCEG: 512,
    YARN: 512,
    Yarn(theta=1e4, factor=8.0, original_length=64, ramp="frequency"): 512,
    LongRope(
        theta=1e4, short_factor=(1,) * 4, long_factor=(4,) * 4, original_length=32, factor=2
    ): 64,
    Llama3(theta=1e4, factor=8.0, original_length=32): 256,
    CLEX: 64,
    E2LLM(theta=1e4, original_length=64): 64,
    E2LLM(theta=1e4, original_length=64, factor=8.0): 512,
    NoRotation(): 64,
}
EXAMPLES = {
    name: tiny_config(rope=rope, head_dim=HEAD_DIM)
    for name, rope in rope_examples(theta=1e4, length=64).items()
}
CONFIGS = EXAMPLES | {str(rope): tiny_config(rope=rope) for rope in ANNOUNCED}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=lambda config: config.rope.type)
def test_the_whole_config_survives_with_every_position_method(config):
    assert config_from_hf(json.loads(json.dumps(config_to_hf(config)))) == config


def test_the_announced_length_is_that_of_the_method():
    for rope, length in ANNOUNCED.items():
        config = tiny_config(rope=rope)
        hf = config_to_hf(config)
        assert hf["max_position_embeddings"] == length, rope
        if rope.hf_length is None:  # dynamic: transformers' formula reads the key
            assert announced_length(config) == length, rope
        assert hf.get("lcjax_max_length", length) == 64
    dynamic = tiny_config(rope=DynamicNTK(theta=1e4, factor=2.0, original_length=64))
    assert announced_length(dynamic) == 128
    assert announced_length(dynamic.replace(rope=LCEG)) == 512


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_announced_length_of_examples_is_the_extended_one(name):
    config = EXAMPLES[name]
    hf, rope = config_to_hf(config), config.rope
    length = 64 if rope.hf_limit is not None else rope.extended_length(64)
    assert announced_length(config) == length >= 64
    assert hf["max_position_embeddings"] == (rope.hf_length or length)
    assert hf.get("lcjax_max_length", hf["max_position_embeddings"]) == 64


def test_a_stated_length_is_kept_unless_it_is_the_one_before_the_extension():
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096}
    linear = {"rope_type": "linear", "factor": 8.0}
    cases = ((linear, 4096, 4096), (linear, 32768, 32768), (yarn, 4096, 32768), (yarn, 9000, 9000))
    for rope, stated, written in cases:
        hf = LLAMA2 | {"max_position_embeddings": stated, "rope_scaling": rope}
        config = config_from_hf(hf)
        assert config.max_length == stated
        assert config_to_hf(config)["max_position_embeddings"] == written
        assert config_from_hf(config_to_hf(config)) == config


def test_training_on_longer_rows_extends_the_model():
    plain, yarn = tiny_config(), tiny_config(rope=YARN)
    for config, length in ((plain, 128), (yarn, 1024), (tiny_config(rope=LINEAR), 300)):
        trained = trained_for(config, length)
        assert announced_length(trained) == config_to_hf(trained)["max_position_embeddings"]
        assert announced_length(trained) == length
        assert trained_for(config, 8) is config
    clex = tiny_config(rope=CLEX)  # transformers reads it up to the length of the base
    assert trained_for(clex, 256) is clex


@pytest.mark.parametrize("rope", [Linear(theta=1e4, factor=4.0), Yarn(theta=1e4, factor=8.0)])
@pytest.mark.parametrize("family", ["llama", "phi"])
def test_the_position_method_is_in_the_exported_config(family, rope):
    config = tiny_config(family, rope=rope.resolve(length=64))
    hf = config_to_hf(config)
    assert hf["rope_parameters"]["factor"] == hf["rope_scaling"]["factor"] == rope.factor
    old = {k: v for k, v in hf.items() if k != "rope_parameters"}
    new = {k: v for k, v in hf.items() if k not in ("rope_scaling", "rope_theta")}
    assert config_from_hf(hf) == config_from_hf(old) == config_from_hf(new) == config


def test_the_old_llama_2_config_is_read_with_the_defaults_of_transformers():
    config = config_from_hf(LLAMA2)
    assert config.rope == Default(theta=10_000.0)
    assert (config.head_dim, config.param_dtype, config.pattern) == (128, "float16", Causal())


FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("hf", "pattern"),
    [
        (MISTRAL | {"sliding_window": 128}, Sliding(128)),
        (MISTRAL | {"sliding_window": None}, Causal()),
        (MISTRAL, Sliding(4096)),  # transformers' default for a key that is absent
        (LLAMA2 | {"sliding_window": 128}, Causal()),
        (QWEN2, Causal()),
        (QWEN2 | {"use_sliding_window": True, "max_window_layers": 32}, Causal()),
        (QWEN2 | {"use_sliding_window": True, "max_window_layers": 0}, Sliding(512)),
        (QWEN2_OPEN | {"use_sliding_window": True, "max_window_layers": 0}, Sliding(4096)),
        (QWEN2 | {"use_sliding_window": None}, Causal()),
        (QWEN2 | {"use_sliding_window": True, "sliding_window": None}, Causal()),
        (QWEN2 | {"use_sliding_window": True, "layer_types": 32 * [SLIDING]}, Sliding(512)),
    ],
)
def test_the_window_holds_where_transformers_applies_it(hf, pattern):
    assert config_from_hf(hf).pattern == pattern


WINDOWED = QWEN2 | {"use_sliding_window": True}
LOCAL, NOPE = LayerKind(pattern=Sliding(512)), LayerKind(rope=NoRotation())
SMOLLM3 = LLAMA2 | {"model_type": "smollm3"}


@pytest.mark.parametrize(
    ("hf", "layers"),
    [
        (WINDOWED, (LayerKind(28), LayerKind(4, Sliding(512)))),
        (WINDOWED | {"layer_types": [FULL, SLIDING] * 16}, (LayerKind(), LOCAL)),
        (WINDOWED | {"layer_types": [SLIDING] * 3 + [FULL] * 29},
         (LayerKind(3, Sliding(512)), LayerKind(29))),
        (MISTRAL | {"model_type": "ministral", "sliding_window": 512,
                    "layer_types": [FULL, SLIDING, SLIDING, SLIDING] * 8},
         (LayerKind(), LayerKind(3, Sliding(512)))),
        (SMOLLM3, (LayerKind(3), NOPE)),
        (SMOLLM3 | {"no_rope_layer_interval": 2}, (LayerKind(), NOPE)),
        (SMOLLM3 | {"no_rope_layers": [0] + [1] * 31}, (NOPE, LayerKind(31))),
        (SMOLLM3 | {"use_sliding_window": True, "sliding_window": 512},
         (LayerKind(3), LayerKind(1, Sliding(512), NoRotation()))),
    ],
)  # fmt: skip
def test_layers_that_differ_are_read_as_the_shortest_period(hf, layers):
    config = config_from_hf(hf)
    assert (config.layers, config.pattern) == (layers, Causal())
    assert config_from_hf(json.loads(json.dumps(config_to_hf(config)))) == config


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ((LayerKind(pattern=Sliding(4)), LayerKind(pattern=Sliding(8))), r"windows \[4, 8\]"),
        ((LayerKind(rope=Default(theta=1e3)), LayerKind()), "layers of ropes .*1000.0"),
        ((LayerKind(pattern=Longformer(4)), LayerKind()), "layers.pattern=Longformer"),
    ],
)
def test_layers_that_transformers_does_not_know_are_not_exported(layers, words):
    with pytest.raises(InputError, match=words + ".*keep the run folder instead"):
        config_to_hf(tiny_config(layers=layers))


@pytest.mark.parametrize(
    "nulls",
    [
        {"rope_parameters": None, "rope_scaling": None},
        {"rope_parameters": None, "rope_theta": None},
        {"head_dim": None, "num_key_value_heads": None, "partial_rotary_factor": None},
        {"attention_bias": None, "mlp_bias": None, "tie_word_embeddings": None},
        {"quantization_config": None, "sliding_window": None},
        {"rms_norm_eps": None, "dtype": None},
    ],
    ids=lambda nulls: ",".join(nulls),
)
def test_null_is_read_as_absent(nulls):
    absent = {k: v for k, v in LLAMA2.items() if k not in nulls}
    config = config_from_hf(LLAMA2 | nulls)
    assert config == config_from_hf(absent)
    for value in (config.qkv_bias, config.mlp_bias, config.tie_embeddings):
        assert value is False


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_window_survives_the_way_out_and_back(family):
    config = tiny_config(family, pattern=Sliding(7))
    hf = config_to_hf(config)
    assert hf["model_type"] == {"llama": "mistral", "qwen2": "qwen2"}[family]
    assert config_from_hf(hf) == config


LLAMA4 = LLAMA2 | {"model_type": "llama4_text", "intermediate_size_mlp": 96}
QWEN2_MOE = LLAMA2 | {"model_type": "qwen2_moe"}
GRANITE_SWA = LLAMA2 | {"model_type": "granite_swa"}
GEMMA4 = LLAMA2 | {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0}
GEMMA4 = {key: value for key, value in GEMMA4.items() if key != "hidden_act"}
OLMO_HYBRID = LLAMA2 | {"model_type": "olmo_hybrid"}


@pytest.mark.parametrize(
    ("hf", "words"),
    [
        (LLAMA2 | {"model_type": "deepseek_v2"}, "model_type='deepseek_v2'.*llama, mistral, .*phi"),
        ({}, "model_type=None"),
        (
            GEMMA4 | {"hidden_size_per_layer_input": 8},
            "vocab_size_per_layer_input=262144 is not supported .*; supported: 32000",
        ),
        (
            GEMMA4 | {"num_kv_shared_layers": 27},
            "num_kv_shared_layers=27 must leave a layer of each type before them, of the 32 layers",
        ),
        (
            GEMMA4 | {"use_bidirectional_attention": "all"},
            "use_bidirectional_attention='all' is not supported",
        ),
        (
            GEMMA4 | {"per_layer_config": {"1": {"sliding_window": 3}}},
            "per_layer_config of layer 1 is .* must have head_dim and num_key_value_heads alone",
        ),
        (
            GEMMA4 | {"per_layer_config": {"0": {"head_dim": 8}, "1": {"head_dim": 16}}},
            "per_layer_config of layer 1 is .* the same in all layers of a type",
        ),
        (GEMMA4 | {"per_layer_config": {"x": {}}}, "per_layer_config=.* by the numbers of layers"),
        (
            GEMMA4 | {"rope_parameters": {FULL: {"rope_type": "default"}}},
            r"rope_parameters\['sliding_attention'\]=None .* must be an object with rope_type",
        ),
        (
            GEMMA4
            | {
                "rope_parameters": {
                    FULL: {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
                    SLIDING: {"rope_type": "default"},
                }
            },
            "partial_rotary_factor, a share of 1, for rope_type=proportional alone",
        ),
        (
            GEMMA4 | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            r"rope_scaling=.* is ignored by transformers .* rope_parameters\['full_attention'\]",
        ),
        (
            LLAMA2
            | {"model_type": "longllama", "last_context_length": 1024, "mem_layers": [8, 16, 24]},
            r"'longllama' .*last_context_length=1024 .*mem_layers=\[8, 16, 24\] .*to llama for",
        ),
        ({k: v for k, v in LLAMA2.items() if k != "hidden_size"}, "'hidden_size' is missing"),
        (LLAMA2 | {"hidden_act": "relu"}, "hidden_act='relu'.*silu"),
        (LLAMA2 | {"model_type": "phi", "hidden_act": "gelu_new", "qk_layernorm": True}, "qk_lay"),
        (
            QWEN2 | {"use_sliding_window": True, "layer_types": ["full_attention", "x"]},
            "each of the 32",
        ),
        (LLAMA2 | {"quantization_config": {"quant_method": "gptq"}}, "quant_method='gptq'.*unquan"),
        (LLAMA2 | {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 .*'llama'"),
        (LLAMA2 | {"rope_parameters": {"partial_rotary_factor": 0.5}}, "factor=0.5 .*'llama'"),
        (LLAMA2 | {"hidden_size": "4096"}, "hidden_size='4096' must be a whole number"),
        (LLAMA2 | {"num_attention_heads": 0}, "num_attention_heads=0 must be a whole number"),
        (LLAMA2 | {"num_hidden_layers": 10**6}, "num_hidden_layers=1000000 must be .* to 2,000"),
        (LLAMA2 | {"vocab_size": 32000.5}, "vocab_size=32000.5 must be a whole number"),
        (LLAMA2 | {"model_type": "mixtral", "num_local_experts": 0}, "experts.count=0 must be"),
        (LLAMA4 | {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1 is not supported"),
        (
            LLAMA4 | {"interleave_moe_layer_step": 0},
            "layer_step=0 must be at least 1 .* moe_layers",
        ),
        (LLAMA4 | {"layer_types": 32 * ["sliding_attention"]}, "full_attention, chunked_attention"),
        (QWEN2 | {"use_sliding_window": True, "layer_types": [SLIDING]}, "each of the 32"),
        (OLMO_HYBRID | {"layer_types": [FULL]}, "each of the 32"),
        (GRANITE_SWA | {"layer_rope_theta": [0, 1e4]}, "layer_rope_theta=.* each of the 32 layers"),
        (GRANITE_SWA | {"layer_rope_theta": 32 * [-1]}, "layer_rope_theta=.* of at least 0"),
        (
            LLAMA2
            | {"model_type": "hunyuan_v1_dense", "rope_scaling": {"type": "dynamic", "alpha": "x"}},
            "alpha='x' .* must be a finite number",
        ),
        (OLMO_HYBRID | {"layer_types": 32 * [FULL]}, "both full_attention and linear_attention"),
        (
            OLMO_HYBRID | {"linear_num_key_heads": 6},
            "^config.json: linear_num_key_heads=6, linear_num_value_heads=32, .*key_heads=6 must",
        ),
    ],
)
def test_what_cannot_be_computed_is_refused_in_one_line(hf, words):
    with pytest.raises(InputError, match=words) as error:
        config_from_hf(hf)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("llama_biases", {"rotary_fraction": 0.5, "head_dim": 20}, "rotary_fraction=0.5"),
        ("llama", {"norm": "layer"}, "norm='layer'"),
        ("phi", {"head_bias": False}, "head_bias=False"),
        ("phi", {"pattern": Sliding(4)}, "pattern=Sliding"),
    ],
)
def test_what_transformers_cannot_compute_is_not_exported(family, changes, words):
    with pytest.raises(InputError, match=words):
        config_to_hf(tiny_config(family, **changes))


def test_the_activation_has_the_name_that_the_family_publishes():
    gemma = config_to_hf(config_from_hf(GEMMA4))
    assert gemma["hidden_activation"] == "gelu_pytorch_tanh" and "hidden_act" not in gemma
    assert config_to_hf(tiny_config("phi"))["hidden_act"] == "gelu_new"


def test_a_llama_that_rotates_a_part_of_each_head_is_written_as_a_glm():
    config = tiny_config(rotary_fraction=0.5, head_dim=20)
    hf = config_to_hf(config)
    assert hf["model_type"] == "glm" and (hf["head_dim"], hf["partial_rotary_factor"]) == (20, 0.5)
    assert config_from_hf(hf) == config.replace(family="glm")


QWEN_1M = {
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1010000,
    "rope_theta": 1e7,
    "dual_chunk_attention_config": {
        "chunk_size": 262144,
        "local_size": 8192,
        "original_max_position_embeddings": 262144,
    },
}


def test_the_dual_chunk_attention_of_qwen_is_read_and_written():
    config = config_from_hf(QWEN_1M)
    expected = DualChunk(chunk=262_144, local=8192, train_length=262_144, growth="linear")
    assert config.pattern == expected
    hf = config_to_hf(config)
    name = "dual_chunk_attention_config"
    assert hf["model_type"] == "qwen2" and hf[name] == QWEN_1M[name]
    assert config_from_hf(hf) == config
    assert config_from_hf(QWEN_1M | {name: None}) == config.replace(pattern=Causal())
    sparse = QWEN_1M[name] | {"sparse_attention_config": {"0": {}}}
    with pytest.warns(UserWarning, match="sparse_attention_config is left out"):
        assert config_from_hf(QWEN_1M | {name: sparse}) == config
    with pytest.raises(InputError, match="dual_chunk_attention_config=3 must be an object"):
        config_from_hf(QWEN_1M | {name: 3})
    with pytest.raises(InputError, match="has no qwen2 model with .*growth='square'"):
        config_to_hf(config.replace(pattern=DualChunk()))


OLMO3 = LLAMA2 | {"model_type": "olmo3"}
OLD_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize("layers", [{}, {"layer_types": [FULL] * 32}])
def test_forms_of_layers_with_two_ropes_that_transformers_ignores_are_refused(layers):
    hf, yarn = OLMO3 | layers, OLD_YARN | {"rope_type": "yarn"}
    full = {"rope_parameters": {FULL: OLD_YARN}}
    expected = config_from_hf(hf | {"rope_scaling": yarn})
    assert expected.rope == Yarn(theta=5e5, factor=4.0, original_length=4096)
    assert config_from_hf(hf | full) == config_from_hf(hf | full | {"rope_scaling": yarn})
    assert config_from_hf(hf | full | {"rope_scaling": OLD_YARN}) == expected
    for changes, words in (
        ({"rope_scaling": OLD_YARN}, "rope_scaling of model_type='olmo3' must name its rope_type"),
        ({"rope_parameters": yarn}, "must have the sections full_attention and sliding_attention"),
        ({"rope_scaling": yarn | {"truncate": False}}, "truncate=False is ignored by"),
    ):
        with pytest.raises(InputError, match=words):
            config_from_hf(hf | changes)
    exact = dataclasses.replace(expected.rope, truncate=False)
    with pytest.raises(InputError, match="transformers reads no truncate=false in models with"):
        config_to_hf(expected.replace(rope=exact))
    null = config_from_hf(LLAMA2 | {"rope_scaling": yarn | {"truncate": None}})
    assert null.rope == dataclasses.replace(exact, theta=1e4)  # as transformers reads it


@pytest.mark.parametrize("kind", ["llama", "mixtral", "olmoe", "gemma2", "gemma3_text"])
def test_models_of_other_masks_are_refused(kind):
    gemma = {"hidden_activation": "gelu_pytorch_tanh"} if "gemma" in kind else {}
    hf = LLAMA2 | {"model_type": kind} | gemma
    for key, value in (
        *(("is_causal", False), ("per_layer_config", {"0": {"rms_norm_eps": 0.1}})),
        *((("use_bidirectional_attention", True),) if gemma else ()),
        *((("attn_logit_softcapping", 50.0),) if kind == "gemma3_text" else ()),
    ):
        with pytest.raises(InputError, match=f"{key}=.* is not supported for model_type='{kind}'"):
            config_from_hf(hf | {key: value})


GEMMA2, GRANITE = LLAMA2 | {"model_type": "gemma2"}, LLAMA2 | {"model_type": "granite"}
GEMMA3 = LLAMA2 | {"model_type": "gemma3_text"}
MIXTRAL = LLAMA2 | {"model_type": "mixtral"}
LANDMARK = LLAMA2 | {"model_type": "llama_with_landmark", "mem_id": 31_999}
PHI = LLAMA2 | {"model_type": "phi", "hidden_act": "gelu_new"}


@pytest.mark.parametrize(
    ("hf", "keys"),
    [
        (WINDOWED, ("max_window_layers", "layer_types")),
        (LANDMARK, ("mem_freq", "train_context_length", "include_landmark_in_loss")),
        (PHI, ("qk_layernorm",)),
        (SMOLLM3, ("no_rope_layer_interval", "no_rope_layers")),
        (GEMMA2, ("query_pre_attn_scalar",)),
        (GEMMA3, ("sliding_window_pattern", "rope_local_base_freq")),
        (GRANITE, ("logits_scaling", "embedding_multiplier")),
        (MIXTRAL, ("num_local_experts", "router_aux_loss_coef")),
        (QWEN2_MOE, ("mlp_only_layers", "layer_types")),
        (LLAMA4, ("moe_layers", "no_rope_layers", "layer_types")),
    ],
)
def test_null_is_read_as_absent_for_the_keys_of_one_family(hf, keys):
    assert config_from_hf(hf | dict.fromkeys(keys)) == config_from_hf(hf)


@pytest.mark.parametrize("kind", ["exaone4", "cohere2", "gemma3_text"])
def test_a_period_in_letters_needs_the_type_of_each_layer(kind):
    types = ["sliding_attention", "full_attention"] * 16
    hf = LLAMA2 | {"model_type": kind, "sliding_window_pattern": "LLLG"}
    stated = config_from_hf(hf | {"layer_types": types})
    assert stated == config_from_hf(hf | {"layer_types": types, "sliding_window_pattern": 2})
    for value in ("LLLG", 0):
        with pytest.raises(InputError, match=f"pattern={value!r} .* add .* layer_types"):
            config_from_hf(hf | {"sliding_window_pattern": value})


MINISTRAL3 = {key: value for key, value in LLAMA2.items() if not key.startswith("rope")}
MINISTRAL3 |= {"model_type": "ministral3"}


def test_a_ministral3_without_rope_parameters_has_those_of_transformers():
    transformers = pytest.importorskip("transformers")
    config = config_from_hf(MINISTRAL3)
    full = transformers.AutoConfig.for_model(**MINISTRAL3).to_dict()
    assert full["rope_parameters"]["llama_4_scaling_beta"] == 0.1
    dtypes = {"dtype": "float32", "torch_dtype": None}
    assert config_from_hf(full | dtypes) == config_from_hf(MINISTRAL3 | dtypes)
    assert (config.query_scale, config.query_scale_length) == (0.1, 16_384)
    assert config.rope.factor == 16 and config.rope.theta == 1e6


@pytest.mark.parametrize(
    "section",
    [
        {"rope_type": "default", "original_max_position_embeddings": 64},
        {"rope_type": "default", "llama_4_scaling_beta": 0.1},
        {"rope_type": "linear", "factor": 2.0, "llama_4_scaling_beta": "0.1"},
    ],
)
def test_a_ministral3_must_state_how_queries_are_scaled(section):
    for key in ("rope_parameters", "rope_scaling"):
        with pytest.raises(
            InputError, match=r"'ministral3' must have llama_4_scaling_beta, .* and"
        ):
            config_from_hf(MINISTRAL3 | {key: section | {"rope_theta": 1e4}})


def test_scaled_queries_need_both_fields_and_one_length_of_the_rope():
    for fields in ({"query_scale": 0.1}, {"query_scale_length": 64}):
        with pytest.raises(InputError, match="query_scale=.* needs query_scale_length"):
            tiny_config(**fields)
    config = tiny_config(query_scale=0.1, query_scale_length=16)
    assert config_to_hf(config)["model_type"] == "ministral3"
    longer = config.replace(rope=Yarn(theta=1e4, factor=4.0, original_length=16))
    assert config_from_hf(config_to_hf(longer)) == longer
    longer = config.replace(rope=Yarn(theta=1e4, factor=4.0, original_length=64))
    with pytest.raises(InputError, match="no ministral3 model with model.query_scale_length=16"):
        config_to_hf(longer)


def test_null_switches_windows_and_caps_off():
    absent, off = (
        config_from_hf(GEMMA2),
        dict.fromkeys(("sliding_window", "final_logit_softcapping")),
    )
    assert absent.logit_soft_cap == 30 and absent.layers
    assert config_from_hf(GEMMA2 | off) == absent.replace(logit_soft_cap=None, layers=())


@pytest.mark.parametrize(
    ("hf", "changes"),
    [
        *((GEMMA2, {"query_pre_attn_scalar": value}) for value in (0, "256", True)),
        (GEMMA2, {"final_logit_softcapping": "30"}),
        *((GEMMA3, {"sliding_window_pattern": value}) for value in ("6", "", -1)),
        *((GRANITE, {"logits_scaling": value}) for value in (0, "8", float("inf"))),
        (GRANITE, {"embedding_multiplier": "8"}),
        (MIXTRAL, {"router_aux_loss_coef": "0.1"}),
        *((QWEN2_MOE, {"mlp_only_layers": value}) for value in (3, "all")),
        *((QWEN2_MOE, {key: 0}) for key in ("decoder_sparse_step", "moe_intermediate_size")),
        *((LLAMA4, {key: 0}) for key in ("floor_scale", "attention_chunk_size")),
        *((LLAMA4, {"attn_temperature_tuning": 4}), (LLAMA4, {"moe_layers": 1})),
        (LLAMA2 | {"model_type": "olmoe"}, {"norm_topk_prob": "false"}),
        (LLAMA2, {"architectures": 1}),
    ],
)
def test_values_of_a_wrong_type_or_range_are_named(hf, changes):
    ((key, value),) = changes.items()
    with pytest.raises(InputError, match=f"config.json: {key}={value!r} must be .*; correct it"):
        config_from_hf(hf | changes)


def test_the_length_of_lcjax_does_not_replace_that_of_the_rope():
    hf = {key: value for key, value in LLAMA2.items() if key != "max_position_embeddings"}
    with pytest.raises(InputError, match="'max_position_embeddings' is missing"):
        config_from_hf(hf | {"lcjax_max_length": 64})
