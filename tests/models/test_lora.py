"""Adapters: where they go, and that what leaves the library is the same model."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from lcjax.checkpoints import hf_names
from lcjax.checkpoints.adapters import save_peft
from lcjax.errors import InputError
from lcjax.models import Decoder, preset
from lcjax.models import lora as lora_lib
from lcjax.models.lora import LoRA
from lcjax.tree import split


def _params(config):
    tokens, random = jnp.zeros((1, 2), jnp.int32), np.random.default_rng(0)
    shapes = jax.eval_shape(Decoder(config).init, jax.random.key(0), tokens)["params"]
    return jax.tree.map(
        lambda leaf: jnp.asarray(0.2 * random.normal(size=leaf.shape), leaf.dtype), shapes
    )


@pytest.mark.parametrize("block", ["sequential", "parallel"])
def test_peft_files_hold_the_update_that_merging_adds(tmp_path, block):
    lora = LoRA(rank=3, alpha=7.0, targets=("query", "value", "out", "up", "down"))
    config = preset("tiny").replace(lora=lora, block=block)
    if block == "parallel":
        config = config.replace(norm="layer", gated_mlp=False, qkv_bias=True, head_bias=True)
    params = _params(config)
    save_peft(tmp_path, params, config, base="org/model")
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (3, 7.0)
    merged, plain = lora_lib.merge(params, lora), split(params, lora_lib.is_adapter)[1]
    checked = 0
    for entry in hf_names.entries(config):
        *path, leaf = entry.path.split("/")
        if leaf != "kernel" or path[-1] not in lora.targets:
            continue
        for layer, name in enumerate(entry.names):
            after, before = merged, plain
            for part in (*path, leaf):
                after, before = after[part], before[part]
            change = entry.to_tensor(np.asarray(after[layer] - before[layer]))
            module = f"base_model.model.{name.removesuffix('.weight')}"
            a, b = (tensors[f"{module}.lora_{x}.weight"] for x in "AB")
            np.testing.assert_allclose(7.0 / 3 * b @ a, change, atol=1e-6)
            assert module.rsplit(".", 1)[1] in settings["target_modules"]
            checked += 1
    assert checked == 5 * config.num_layers and len(tensors) == 2 * checked


def test_adapters_of_one_layer_are_merged_like_stacked_ones():
    lora = LoRA(rank=2, targets=("query", "down"))  # as many layers as ranks: shapes look alike
    config = preset("tiny").replace(lora=lora)
    params = _params(config)
    stacked = lora_lib.merge(params, lora)["layers"]
    apart = lora_lib.merge(jax.tree.map(lambda leaf: leaf[1], params["layers"]), lora)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[1], b, atol=1e-6), stacked, apart)


def test_float32_adapters_lose_nothing_on_a_bfloat16_base():
    lora = LoRA(rank=2, targets=("up",))
    layer = _params(preset("tiny").replace(lora=lora))["layers"]["mlp"]["up"]
    layer["kernel"] = layer["kernel"].astype(jnp.bfloat16)
    exact = lora_lib.merge({k: v.astype(jnp.float32) for k, v in layer.items()}, lora)["kernel"]
    merged = lora_lib.merge(layer, lora)["kernel"]
    assert merged.dtype == jnp.float32
    np.testing.assert_array_equal(merged, exact)
    stored = lora_lib.merge(layer, lora, dtype="bfloat16")["kernel"]
    np.testing.assert_array_equal(stored, exact.astype(jnp.bfloat16))


@pytest.mark.parametrize("stack", [(), (4,)], ids=["apart", "stacked"])
def test_merging_is_not_rounded_on_accelerators(stack):
    shapes = {"kernel": (8, 6), "lora_a": (8, 2), "lora_b": (2, 6)}
    layer = {
        name: jax.ShapeDtypeStruct((*stack, *shape), jnp.float32) for name, shape in shapes.items()
    }
    lowered = jax.jit(lora_lib.merge, static_argnums=1).lower(layer, LoRA(rank=2)).as_text()
    assert "precision = [HIGHEST, HIGHEST]" in lowered and "DEFAULT" not in lowered


def test_bad_adapter_settings_name_the_projections():
    with pytest.raises(InputError, match="lora.targets is empty; name some of: query"):
        LoRA(targets=())
    with pytest.raises(InputError, match="query, key, value, out, gate, up, down"):
        LoRA(targets=("q_proj",))
    with pytest.raises(InputError, match="no adapters"):
        save_peft("unused", {}, preset("tiny"), base="x")


@pytest.mark.parametrize("rank", [65, 10**9])
def test_a_rank_above_that_of_all_matrices_raises_input_error(rank):
    preset("tiny").replace(lora=LoRA(rank=64))
    with pytest.raises(InputError, match=f"lora.rank={rank} must be at most the width 64"):
        preset("tiny").replace(lora=LoRA(rank=rank))
