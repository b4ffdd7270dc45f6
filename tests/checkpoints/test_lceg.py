"""The merged checkpoints of LCEG (arXiv 2409.12181) and of YaRN's authors, by their config.json.

`type` and not `rope_type`, no rope_theta, 32,001 tokens; only YaRN's raise max_position_embeddings.
The config of the release is written down here from the scripts that made it.
"""

import numpy as np
import pytest
from convert_support import assert_same, edit_json, saved

from lcjax import config as config_lib
from lcjax.checkpoints import config_from_hf, load
from lcjax.checkpoints.build import resolve_rope
from lcjax.convert import main
from lcjax.errors import InputError
from lcjax.evaluation import reproduce
from lcjax.rope import DynamicNTK, Linear, Yarn
from lcjax.training.train_config import TrainConfig

BASE = {  # what transformers 4.35 writes for Llama-2-7B after a fine-tuning
    "_name_or_path": "/models/llama-2-7b-hf",
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.35.2",
    "use_cache": True,
    "vocab_size": 32001,
}
YARN = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096}
PUBLISHED = {
    "PI and LongLoRA, 32k": (
        {"rope_scaling": {"type": "linear", "factor": 8.0}},
        Linear(theta=1e4, factor=8.0),
    ),
    "NTK, 32k": (
        {"rope_scaling": {"type": "dynamic", "factor": 4.0}, "rope_theta": 10000.0},
        DynamicNTK(theta=1e4, factor=4.0, original_length=4096),
    ),
    "NTK, 64k": (
        {"rope_scaling": {"type": "dynamic", "factor": 8.0}},
        DynamicNTK(theta=1e4, factor=8.0, original_length=4096),
    ),
    "YaRN, 32k": (
        {"rope_scaling": YARN, "max_position_embeddings": 32768},
        Yarn(theta=1e4, factor=8.0, original_length=4096),
    ),
    "YaRN's own": (
        {
            "rope_scaling": YARN | {"finetuned": True},
            "max_position_embeddings": 32768,
            "auto_map": {"AutoConfig": "configuration_llama.LlamaConfig"},
        },
        Yarn(theta=1e4, factor=8.0, original_length=4096),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_config_gives_the_position_method_of_the_paper(name):
    changes, rope = PUBLISHED[name]
    config = config_from_hf(BASE | changes)
    assert config.rope == rope
    assert (config.vocab_size, config.param_dtype) == (32001, "bfloat16")
    assert config.max_length == changes.get("max_position_embeddings", 4096)


@pytest.mark.parametrize(
    ("name", "published", "recipe"),
    [
        ("pi_32k", "PI and LongLoRA, 32k", "pi_7b_32k"),
        ("longlora_32k", "PI and LongLoRA, 32k", "longlora_lceg_7b_32k"),
        ("yarn_32k", "YaRN, 32k", "yarn_7b_32k"),
        ("ntk_32k", "NTK, 32k", "ntk_7b_32k"),  # the row adds the trained length
        ("ntk_64k", "NTK, 64k", "ntk_7b_64k"),
    ],
)
def test_a_row_of_the_tables_reads_the_release_with_the_rope_of_its_recipe(name, published, recipe):
    rows = {row.name: row for row in reproduce.config_at("lceg/table2", "paper").methods}
    released = config_from_hf(BASE | PUBLISHED[published][0])
    rope = released.rope if rows[name].rope is None else resolve_rope(rows[name].rope, released)
    trained = config_lib.parse(TrainConfig, ["--config", f"lcjax:{recipe}"]).model.rope
    assert rope == resolve_rope(trained, config_from_hf(BASE))


def test_the_trained_length_of_an_ntk_checkpoint_is_given_and_kept(tmp_path):
    saved(tmp_path / "ntk")
    scaling = {"type": "dynamic", "factor": 4.0}
    published = {"rope_parameters": None, "rope_theta": None, "rope_scaling": scaling}
    edit_json(tmp_path / "ntk" / "config.json", **published)
    released = DynamicNTK(theta=1e4, factor=4.0, original_length=64)
    assert load(tmp_path / "ntk")[1].rope == released
    want = DynamicNTK(theta=1e4, factor=4.0, original_length=64, min_length=512)
    assert load(tmp_path / "ntk", context=512)[1].rope == want
    assert main([str(tmp_path / "ntk"), str(tmp_path / "dst"), "--context", "512"]) == 0
    assert load(tmp_path / "dst")[1].rope == want
    # 4 * 512 / 64 - 3 = 29 at every length up to 512, which is what the paper gives for 32k
    short, trained = (want.frequencies(8, length)[0] for length in (10, 512))
    np.testing.assert_array_equal(short, trained)
    np.testing.assert_allclose(short[-1], 1e4 ** (-6 / 8) / 29, rtol=1e-6)


@pytest.mark.parametrize("context", [0, -5])
def test_a_length_is_a_number_of_tokens(tmp_path, context):
    with pytest.raises(InputError, match=rf"context={context} must be a number of tokens"):
        load(tmp_path, context=context)


def test_other_methods_take_no_trained_length(tmp_path):
    saved(tmp_path, rope=Linear(theta=1e4, factor=8.0))
    with pytest.raises(InputError, match="is a whole model with rope type linear"):
        load(tmp_path, context=512)


def test_buffers_of_old_versions_are_passed_over(tmp_path):
    from safetensors.numpy import load_file, save_file

    params, _ = saved(tmp_path)
    file = tmp_path / "model.safetensors"
    stale = {
        f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32) for i in range(3)
    }
    save_file(load_file(file) | stale, file, metadata={"format": "pt"})
    assert_same(load(tmp_path)[0], params)
