"""Families that rotate neighbouring channels: their order of rows in files, and in the library."""

import jax
import numpy as np
import pytest
from adapter_support import low_rank, merged, write_peft
from convert_support import assert_same, random_params, tiny_config
from safetensors.numpy import load_file

from lcjax.attention import Streaming
from lcjax.checkpoints import ByteTokenizer, load, load_config, save_hf
from lcjax.checkpoints.adapters import save_peft
from lcjax.checkpoints.hf_names import halves
from lcjax.checkpoints.load import kernel_reader
from lcjax.errors import InputError
from lcjax.models import lora
from lcjax.models.lora import LoRA
from lcjax.models.weight_storage import Int8Weights, quantise_params
from lcjax.parallel.sharding import Mesh, make_mesh

# Fields of `tiny_config` beside the family.
FAMILIES = {
    "ernie4_5": {"qkv_bias": True, "out_bias": True, "mlp_bias": True},
    "cohere": {
        "norm": "layer",
        "norm_bias": False,
        "block": "parallel",
        "qkv_bias": True,
        "out_bias": True,
        "logit_scale": 0.0625,
        "qk_norm": "each",
    },
    "glm4": {"qkv_bias": True, "norm_place": "both", "rotary_fraction": 0.5},
}
EVERY = pytest.mark.parametrize("family", FAMILIES)


def base(folder, family):
    """Saves a tiny model of the family; returns its parameters, config and stored tensors."""
    config = tiny_config(**FAMILIES[family]).replace(family=family)
    params = random_params(config)
    save_hf(folder, params, config, ByteTokenizer())
    return params, config, load_file(folder / "model.safetensors")


def test_pairs_of_neighbours_become_pairs_of_halves_and_other_channels_stay():
    assert halves(10, 6).tolist() == [0, 2, 4, 1, 3, 5, 6, 7, 8, 9]
    assert halves(4, 4).tolist() == [0, 2, 1, 3]


@EVERY
def test_rows_of_queries_and_keys_alone_have_another_order_in_the_file(tmp_path, family):
    params, config, tensors = base(tmp_path / "base", family)
    assert config.family == load_config(tmp_path / "base").family == family
    order, attention = halves(config.head_dim, config.rotary_dim), params["layers"]["attention"]
    for name, path, heads in (("q", "query", 6), ("k", "key", 2), ("v", "value", 2)):
        stored = tensors[f"model.layers.1.self_attn.{name}_proj.weight"].reshape(heads, 8, 48)
        bias = tensors[f"model.layers.1.self_attn.{name}_proj.bias"].reshape(heads, 8)
        chosen = np.arange(8) if name == "v" else order
        kernel = attention[path]["kernel"][1]
        np.testing.assert_array_equal(stored[:, chosen].transpose(2, 0, 1), kernel)
        np.testing.assert_array_equal(bias[:, chosen], attention[path]["bias"][1])
        if config.qk_norm == "each" and name != "v":
            scale = tensors[f"model.layers.1.self_attn.{name}_norm.weight"]
            np.testing.assert_array_equal(scale[:, order], attention[f"{path}_norm"]["scale"][1])
    assert_same(load(tmp_path / "base")[0], params)


@EVERY
@pytest.mark.parametrize("shape", [Mesh(1, 8, 1), Mesh(1, 2, 2)])
def test_every_mesh_reads_the_same_rows(tmp_path, family, shape):
    params, _, _ = base(tmp_path / "base", family)
    devices = jax.devices()[: shape.data * shape.fsdp * shape.tensor]
    assert_same(load(tmp_path / "base", mesh=make_mesh(shape, devices))[0], params)


@EVERY
def test_adapters_of_peft_are_merged_in_the_order_of_the_file(tmp_path, family):
    _, _, tensors = base(tmp_path / "base", family)
    pairs = low_rank(tensors)
    write_peft(tmp_path / "lora", pairs, tmp_path / "base")
    save_hf(tmp_path / "out", *load(tmp_path / "lora"))
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert set(written) == set(tensors)
    for name, tensor in merged(tensors, pairs, 2.0).items():
        np.testing.assert_allclose(written[name], tensor, rtol=1e-6, atol=1e-6, err_msg=name)


@EVERY
@pytest.mark.parametrize("changes", [{}, {"pattern": Streaming(sinks=2, recent=9)}], ids=str)
def test_adapters_of_lcjax_are_written_in_the_order_of_their_base(tmp_path, family, changes):
    """Also under a pattern that no family has."""
    tree, config, tensors = base(tmp_path / "base", family)
    adapters = LoRA(rank=2, alpha=3.0, targets=("query", "key", "value"))
    for name, heads in (("query", 6), ("key", 2), ("value", 2)):
        rng = np.random.default_rng(heads)
        tree["layers"]["attention"][name] |= {
            "lora_a": jax.numpy.asarray(rng.normal(size=(3, 48, 2)), "float32"),
            "lora_b": jax.numpy.asarray(rng.normal(size=(3, 2, heads, 8)), "float32"),
        }
    trained = config.replace(lora=adapters, **changes)
    save_peft(tmp_path / "lora", tree, trained, base=str(tmp_path / "base"))
    want, got = lora.merge(tree, adapters), load(tmp_path / "lora")[0]
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-6)
    # What peft adds to the weights of transformers is what an export of the merged model adds.
    pairs = load_file(tmp_path / "lora" / "adapter_model.safetensors")
    save_hf(tmp_path / "out", want, config)
    written = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in merged(tensors, pairs, 1.5).items():
        np.testing.assert_allclose(written[name], tensor, rtol=1e-5, atol=1e-5, err_msg=name)


def test_adapters_of_a_fused_mlp_are_refused(tmp_path):
    tree, config, _ = base(tmp_path / "base", "glm4")
    trained = config.replace(lora=LoRA(rank=2, targets=("query", "up")))
    with pytest.raises(InputError, match="stores the projections of this model together"):
        save_peft(tmp_path / "lora", tree, trained, base=str(tmp_path / "base"))


@EVERY
def test_kernels_stored_as_codes_are_exported_as_the_checkpoint_has_them(tmp_path, family):
    params, config, tensors = base(tmp_path / "base", family)
    storage = Int8Weights()
    config = config.replace(weights=storage)
    codes, reader = quantise_params(params, storage, None), kernel_reader(tmp_path / "base")
    save_hf(tmp_path / "out", codes, config, kernels=reader)
    written = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(written[name], tensor, err_msg=name)
    assert_same(load(tmp_path / "base", weights=storage)[0], codes)


def test_a_model_of_another_family_is_written_in_its_order(tmp_path):
    params, config, _ = base(tmp_path / "base", "ernie4_5")
    save_hf(tmp_path / "llama", params, config.replace(family=None), ByteTokenizer())
    again, other, _ = load(tmp_path / "llama")
    assert other == config.replace(family=None)
    assert_same(again, params)
    stored = load_file(tmp_path / "llama" / "model.safetensors")
    query = stored["model.layers.0.self_attn.q_proj.weight"].reshape(6, 8, 48)
    kernel = params["layers"]["attention"]["query"]["kernel"][0]
    np.testing.assert_array_equal(query.transpose(2, 0, 1), kernel)
