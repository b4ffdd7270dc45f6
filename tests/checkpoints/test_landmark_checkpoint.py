"""Landmark checkpoints: their config, their tensors and their two more tokens."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from convert_support import assert_same, edit_json, random_params, saved, tiny_config
from safetensors.numpy import load_file, save_file

from lcjax.attention.landmark.pattern import Landmark
from lcjax.checkpoints import config_from_hf, config_to_hf, landmark_token
from lcjax.checkpoints.safetensors_io import SafetensorsFolder
from lcjax.checkpoints.weights import read_params
from lcjax.errors import InputError

RELEASED = {
    "model_type": "llama_with_landmark", "mem_id": 263, "mem_freq": 63,
    "train_context_length": 512, "include_landmark_in_loss": True,
}  # fmt: skip


def hf(**changes):
    return config_to_hf(tiny_config()) | RELEASED | changes


def test_a_released_config_is_a_llama_with_the_pattern():
    config = config_from_hf(hf())
    pattern = Landmark(block=64, top_k=5, train_length=512, token=263, loss="predict")
    assert config == tiny_config(pattern=pattern)
    assert config.pattern.chunk == 128


def test_absent_keys_are_those_of_the_released_class():
    absent = {k: v for k, v in hf().items() if k in ("model_type", "mem_id") or k not in RELEASED}
    pattern = config_from_hf(absent).pattern
    assert (pattern.block, pattern.train_length, pattern.loss) == (51, 512, "predict")
    assert config_from_hf(hf(include_landmark_in_loss=False)).pattern.loss == "skip"
    assert config_from_hf(hf(train_context_length=320)).pattern.top_k == 3


def test_other_model_types_are_read_as_before():
    config = tiny_config()
    assert config_from_hf(config_to_hf(config)) == config


def test_a_config_survives_the_way_out_and_back():
    config = config_from_hf(hf(mem_freq=50, include_landmark_in_loss=False))
    written = config_to_hf(config)
    assert {k: written[k] for k in RELEASED} == RELEASED | {
        "mem_freq": 50, "include_landmark_in_loss": False
    }  # fmt: skip
    assert config_from_hf(json.loads(json.dumps(written))) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mem_id": None}, "mem_id=None must be the id"),
        ({"mem_id": 264}, "below vocab_size=264"),
        ({"mem_freq": 0}, "mem_freq=0"),
        ({"train_context_length": "512"}, "train_context_length='512'"),
        ({"train_context_length": 191}, "must hold 3 blocks of mem_freq . 1 = 64"),
    ],
)
def test_keys_that_cannot_be_right_are_refused(changes, message):
    with pytest.raises(InputError, match=message):
        config_from_hf(hf(**changes))


def test_what_no_released_checkpoint_is_cannot_be_written():
    with pytest.raises(InputError, match="pattern.token is not set"):
        config_to_hf(tiny_config(pattern=Landmark()))
    with pytest.raises(InputError, match="qwen2"):
        config_to_hf(tiny_config("qwen2", pattern=Landmark(token=1)))


def test_a_folder_with_stale_frequencies_gives_its_weights(tmp_path):
    folder = tmp_path / "model"
    params, config = saved(folder)
    edit_json(folder / "config.json", **RELEASED)
    file = folder / "model.safetensors"
    stale = {
        f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32) for i in range(3)
    }
    save_file(load_file(file) | stale, file, metadata={"format": "pt"})
    read = config_from_hf(json.loads((folder / "config.json").read_text()))
    assert_same(read_params(SafetensorsFolder(folder), read), params)
    assert read.replace(pattern=config.pattern) == config


@pytest.mark.parametrize("family", ["llama", "tied", "phi"])
def test_new_tokens_are_the_mean_of_the_old_ones(family):
    config = tiny_config(family)
    params = random_params(config)
    grown, larger = landmark_token.with_new_tokens(params, config)
    assert larger.vocab_size == 266
    table = grown["embed"]["embedding"]
    np.testing.assert_array_equal(table[:264], params["embed"]["embedding"])
    np.testing.assert_allclose(table[264:], jnp.stack([table[:264].mean(0)] * 2), atol=1e-7)
    if family != "tied":
        kernel = grown["head"]["kernel"]
        np.testing.assert_array_equal(kernel[:, :264], params["head"]["kernel"])
        np.testing.assert_allclose(kernel[:, 265], kernel[:, :264].mean(1), atol=1e-7)
    shapes = jax.tree.map(jnp.shape, random_params(larger))
    assert jax.tree.map(jnp.shape, grown) == shapes
    assert params["embed"]["embedding"].shape == (264, 48)  # left as it was
