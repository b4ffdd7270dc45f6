"""Layers with heads of several sizes, as in Gemma 4: caches, rows, devices and gradients."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from tiny_lm import ids, sharp_decoder, text

from lcjax import Sampling
from lcjax.attention import Sliding
from lcjax.attention.policies import SnapKV
from lcjax.cost import cache_bytes, estimate, generation_memory, layer_lines
from lcjax.cost.resources import attention_flops, parameter_shapes, read_cache_bytes
from lcjax.errors import InputError
from lcjax.models import Decoder, LayerKind, preset
from lcjax.models import cache as cache_lib
from lcjax.models.decoder import random_params
from lcjax.models.experts import Experts
from lcjax.models.lora import LoRA
from lcjax.models.weight_storage import (
    NF4Weights,
    dequantise_params,
    quantise_params,
)
from lcjax.parallel.sharding import Mesh, make_mesh, param_shardings, spec_of
from lcjax.rope import Default
from lcjax.rope.positions import E2Positions
from lcjax.training.objective import language_model
from lcjax.training.train_config import matcher
from lcjax.tree import flatten

CONFIG = preset("tiny").replace(
    num_layers=6,
    width=32,
    mlp_width=48,
    head_dim=14,
    num_kv_heads=1,
    rotary_fraction=0.5,
    rotary_share="frequencies",
    qk_norm="head",
    value_norm=True,
    values_from_keys=True,
    layer_scale=True,
    norm_place="both",
    attention_scale=1.0,
    tie_embeddings=True,
    layers=(
        LayerKind(
            *(2, Sliding(window=5), Default(theta=100.0)),
            head_dim=8,
            num_kv_heads=2,
            rotary_fraction=1.0,
            values_from_keys=False,
        ),
        LayerKind(),
    ),
)


# Gemma 4 26B-A4B: a mixture beside the MLP of each layer
EXPERTS = Experts(
    4, 3, width=20, shared_width=48, branch_norms=True, expert_scale=True, balance=0.0
)
THREE = CONFIG.replace(num_layers=3)


def reader(kind, source):
    return dataclasses.replace(kind, repeat=1, keys_of=source, mlp_width=96)


# Gemma 4 E2B: the last four layers read the keys of the first two.
LOCAL, FULL = dataclasses.replace(CONFIG.layers[0], repeat=1), CONFIG.layers[1]
SHARED = CONFIG.replace(
    layers=(LOCAL, FULL, *2 * (reader(LOCAL, 0), reader(FULL, 1))), layer_embedding=10
)


@functools.cache
def params_of(config):
    """Parameters whose vectors are random, too, so that none has no effect."""
    keys = iter(jax.random.split(jax.random.key(1), 200))
    return jax.tree.map(
        lambda x: 2 * x if x.ndim > 1 else x + 0.2 * jax.random.normal(next(keys), x.shape),
        random_params(config.replace(scan_layers=False), 0),
    )


def apply(config, params, tokens, **options):
    return Decoder(config).apply({"params": params}, tokens, **options)


def assert_close(x, y, tolerance=5e-5):
    np.testing.assert_allclose(x, y, atol=tolerance * max(1, np.abs(y).max()), rtol=1e-4)


def test_layers_have_the_parameters_of_their_kind():
    params = {path: leaf.shape for path, leaf in parameter_shapes(THREE).items()}
    attention = "layers_0/attention", "layers_2/attention"
    assert [params[f"{name}/key/kernel"] for name in attention] == [(32, 2, 8), (32, 1, 14)]
    assert [params[f"{name}/query/kernel"] for name in attention] == [(32, 4, 8), (32, 4, 14)]
    assert params["layers_0/attention/value/kernel"] == (32, 2, 8)
    assert "layers_2/attention/value/kernel" not in params
    assert params["layers_2/output_scale"] == (1,)


@pytest.mark.slow_except("three")
@pytest.mark.parametrize("config", [THREE, SHARED], ids=["three", "shared"])
def test_rows_behind_padding_and_packed_documents_are_read_as_alone(config):
    params, tokens = params_of(config), text(0, 2, 41)
    read = jax.jit(functools.partial(apply, config))
    padding = np.array([0, 13])
    whole = [read(params, tokens[i : i + 1, padding[i] :]).hidden[0] for i in range(2)]
    cache, outputs = cache_lib.create(config, 2, 64, chunk=16), []
    shapes = {x["keys"].shape for x in cache.layers if x}
    assert shapes == {(2, 2, 64, 8), (2, 1, 64, 14)}
    rotation, at = config.rotation(64), np.arange(41) - padding[:, None]
    for start, stop in (*((i, i + 8) for i in range(0, 40, 8)), (40, 41)):
        part = slice(start, stop)
        segments = (at[:, part] >= 0).astype(np.int32)
        options = {"positions": np.maximum(at[:, part], 0), "rotation": rotation, "cache": cache}
        output = read(params, tokens[:, part], segments=segments, **options)
        cache = output.cache
        outputs.append(output.hidden)
    hidden = np.concatenate(outputs, 1)
    for row, expected in enumerate(whole):
        assert_close(hidden[row, padding[row] :], expected)

    segments = np.repeat([1, 2, 0], [9, 28, 4])[None].astype(np.int32)
    packed = read(params, tokens[:1], segments=segments).hidden
    for part in (slice(0, 9), slice(9, 37)):
        assert_close(packed[:, part], read(params, tokens[:1, part]).hidden)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "mesh"),
    [
        (CONFIG, Mesh(tensor=2, context=4, fsdp=1)),
        (CONFIG, Mesh(fsdp=4, tensor=2)),
        (CONFIG, Mesh(context=8, fsdp=1)),
        (CONFIG.replace(experts=EXPERTS), Mesh(expert=2, tensor=2, fsdp=2)),
        (CONFIG.replace(experts=EXPERTS), Mesh(context=4, fsdp=2)),
        (SHARED, Mesh(tensor=2, context=4, fsdp=1)),
        (SHARED, Mesh(fsdp=4, tensor=2)),
    ],
    ids=[
        *("tensor, context", "fsdp, tensor", "context", "mixture, expert", "mixture, context"),
        *("shared, context", "shared, tensor"),
    ],
)
def test_devices_and_scans_compute_the_gradients_of_layers_one_by_one(config, mesh):
    tokens = text(2, 4, 32)
    segments = np.repeat([1, 2, 0], [13, 16, 3])[None].repeat(4, 0).astype(np.int32)

    def loss(params, model):
        hidden = model.apply({"params": params}, tokens, segments=segments).hidden
        return (hidden[..., :5] ** 3 * (segments != 0)[..., None]).mean()

    apart, devices = config.replace(scan_layers=False), make_mesh(mesh)
    params, gradient = params_of(config), jax.jit(jax.value_and_grad(loss), static_argnums=1)
    expected, slopes = gradient(params, Decoder(apart))
    for path, slope in flatten(slopes).items():
        assert np.isfinite(slope).all() and (slope != 0).any(), path
    scanned = gradient(params, Decoder(config.replace(remat="dots")))
    sharded = jax.device_put(params, param_shardings(devices, params))
    for actual, actual_slopes in (scanned, gradient(sharded, Decoder(config, devices))):
        np.testing.assert_allclose(actual, expected, rtol=2e-5)
        jax.tree.map(functools.partial(assert_close, tolerance=2e-4), actual_slopes, slopes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "local", "full"), [(CONFIG, 4, 2), (SHARED, 1, 1)], ids=["own", "shared"]
)
def test_a_policy_evicts_from_layers_without_a_window_alone(base, local, full):
    sampling, config = Sampling(max_new_tokens=6), base.replace(cache=SnapKV(tokens=32, window=8))
    lm, exact = sharp_decoder(config), sharp_decoder(base)
    prompts = [ids(6, 90), ids(7, 70)]
    texts = lm.generate(prompts, sampling)
    assert texts == [lm.generate([prompt], sampling)[0] for prompt in prompts]
    short = [ids(8, 30), ids(9, 17)]  # which fit
    assert lm.generate(short, sampling) == exact.generate(short, sampling)
    # Keys and values in float32; layers without a window also hold order indices and 8 queries.
    rings, kept = local * 2 * 5 * 2 * 8, full * (32 * (2 * 14 + 1) + 8 * (4 * 14 + 1))
    assert lm.cache_bytes(1000) == lm.cache_bytes(100_000) == 4 * (rings + kept)


def test_adapters_are_added_to_the_projections_that_layers_have():
    lora = LoRA(rank=2, targets=("query", "key", "value", "out"))
    params = parameter_shapes(SHARED.replace(lora=lora))
    adapters = {path for path in params if path.endswith("lora_a") and "/key/" in path}
    assert adapters == {f"layers_{i}/attention/key/lora_a" for i in (0, 1)}
    params = parameter_shapes(THREE.replace(lora=lora))
    adapters = {path for path in params if path.endswith("lora_a") and "/value/" in path}
    assert adapters == {f"layers_{i}/attention/value/lora_a" for i in (0, 1)}


def test_layers_keep_their_sizes_when_patterns_and_ropes_are_replaced():
    kinds = (LayerKind(rope=Default(theta=5.0)), LayerKind(pattern=Sliding(window=7)))
    other = CONFIG.replace(layers=CONFIG.kinds_with(kinds))
    for index in range(6):
        layer, before = other.layer(index), CONFIG.layer(index)
        for name in ("head_dim", "num_kv_heads", "rotary_fraction", "values_from_keys"):
            assert getattr(layer, name) == getattr(before, name)
        assert layer.rope == (CONFIG.rope if index % 2 else Default(theta=5.0))
    with pytest.raises(InputError, match="head_dim=10 of layer 0 does not fit the weights"):
        CONFIG.kinds_with((LayerKind(head_dim=10),))


@pytest.mark.slow
def test_matrices_of_all_sizes_may_be_codes():
    storage = NF4Weights()
    kinds = tuple(
        dataclasses.replace(kind, head_dim=kind.head_dim and 32, mlp_width=kind.mlp_width and 192)
        for kind in SHARED.layers
    )
    sizes = {"width": 64, "mlp_width": 128, "head_dim": 48, "num_kv_heads": 2, "layers": kinds}
    config, tokens = SHARED.replace(**sizes, num_layers=4, scan_layers=False), text(8, 1, 20)
    params = params_of(config)
    stored = quantise_params(jax.tree.map(jnp.copy, params), storage)
    created = random_params(config.replace(weights=storage), 0)
    assert jax.tree.map(jnp.shape, stored) == jax.tree.map(jnp.shape, created)
    actual = apply(config.replace(weights=storage), stored, tokens).hidden
    rounded = dequantise_params(stored, storage, flatten(params))
    assert_close(actual, apply(config, rounded, tokens).hidden)


def test_layers_that_read_the_keys_of_others_hold_none_and_count_what_they_read():
    # Layers, keys and values, slots, heads, channels, bytes
    local, full = 2 * 5 * 2 * 8 * 4, 2 * 90 * 1 * 14 * 4
    assert cache_bytes(SHARED, 90) == local + full
    assert read_cache_bytes(SHARED, 90) == 3 * (local + full)
    assert attention_flops(SHARED, 90, 1) == 3 * 4 * 4 * (8 * 5 + 14 * 90)
    lines = layer_lines(SHARED, 90)
    assert [line.split(":")[0] for line in lines] == [
        *("layers 0 (1)", "layers 1 (1)", "layers 2, 4 (2)", "layers 3, 5 (2)")
    ]
    assert "cache of 90 of 90 tokens" in lines[1] and "reads the cache of layer 0" in lines[2]
    cache = cache_lib.create(SHARED, 3, 90, chunk=1)
    arrays = sum(leaf.nbytes for leaf in jax.tree.leaves(cache.layers))
    memory = generation_memory(SHARED, 90, 3, Mesh(fsdp=1), chunk=1)
    assert memory.cache == arrays
    params = parameter_shapes(SHARED)
    assert params["layers_2/mlp/up/kernel"].shape == (32, 96)
    assert params["layer_embed/embedding"].shape == (259, 60)


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ((LOCAL, reader(FULL, 1)), "keys_of=1 of layer 1 must be the number of an earlier layer"),
        ((LOCAL, reader(LOCAL, 0), reader(LOCAL, 1)), "keys_of=1 of layer 2 must be the number"),
        ((LOCAL, reader(FULL, 0)), "reads the keys of layer 0, whose pattern, rope, head_dim"),
    ],
)
def test_layers_that_cannot_read_the_keys_of_others_raise_input_error(layers, words):
    with pytest.raises(InputError, match=words) as error:
        CONFIG.replace(num_layers=len(layers), layers=layers)
    assert "\n" not in str(error.value)


def test_numbers_of_layers_and_experts_do_not_decay_and_train_with_norms():
    is_norm = matcher(("norms",), "train.no_decay")
    params = parameter_shapes(SHARED.replace(experts=EXPERTS))
    assert {"layers_1/output_scale", "layers_1/mlp/expert_scale"} <= {*filter(is_norm, params)}
    assert not is_norm("layer_embed/embedding")
    embeddings = matcher(("embeddings",), "train.trainable")
    assert [*filter(embeddings, params)] == ["embed/embedding"]


def test_positions_of_training_are_for_heads_of_one_size():
    config = SHARED.replace(rotary_share="channels", rotary_fraction=1.0)
    kinds = tuple(dataclasses.replace(kind, rope=None) for kind in config.layers)
    with pytest.raises(InputError, match=r"type=e2_llm .* or other rotary channels; leave out"):
        language_model(config.replace(layers=kinds), E2Positions())


@pytest.mark.parametrize(
    "sources",
    [(None, None, 0, 1), (None, 0, None, 0, 2)],
    ids=["equal sources", "a source after a reader"],
)
def test_scans_leave_out_layers_whose_keys_are_read(sources):
    """Equal layers, and layers that repeat, would be scanned with a layer that reads them."""
    layers = tuple(LayerKind(keys_of=source) for source in sources)
    config = preset("tiny").replace(num_layers=len(layers), layers=layers, width=32, mlp_width=40)
    params, tokens = params_of(config), text(3, 2, 11)
    hidden = apply(config, params, tokens).hidden
    assert_close(hidden, apply(config.replace(scan_layers=False), params, tokens).hidden)


def test_embeddings_of_layers_cost_a_row_and_a_product():
    plain = SHARED.replace(layer_embedding=None)
    costs, without = estimate(SHARED, 90), estimate(plain, 90)
    # The projection of all layers, and two matrices of each layer
    matrices = 32 * 60 + 6 * 2 * 32 * 10
    assert costs.matmul_flops - without.matmul_flops == 2 * matrices
    norms, row = 10 + 6 * 32, 60
    assert costs.active_parameters - without.active_parameters == matrices + norms + row
    assert costs.parameters - without.parameters == matrices + norms + 259 * 60
    most, least = (generation_memory(c, 90, 3, Mesh(fsdp=1), chunk=7) for c in (SHARED, plain))
    assert most.activations - least.activations == 3 * 7 * 60 * 4
    mesh = make_mesh(Mesh(fsdp=4, tensor=2))
    assert spec_of("layer_embed/projection/kernel", (32, 64), mesh) == PartitionSpec(
        "fsdp", "tensor"
    )


def test_layers_that_read_the_keys_of_others_have_no_norm_of_rotated_keys():
    layers = (LayerKind(), LayerKind(keys_of=0))
    with pytest.raises(InputError, match="qk_norm=rotated .* layer 1 .*; take another qk_norm"):
        preset("tiny").replace(layers=layers, qk_norm="rotated")


def test_layers_that_all_rotate_another_share_need_the_rotations_of_the_config():
    config = CONFIG.replace(num_layers=2, layers=(LayerKind(rotary_fraction=1.0),))
    assert config.has_several_rotations
    assert not config.replace(layers=(LayerKind(rotary_fraction=0.5),)).has_several_rotations
    plain = config.replace(layers=()).rotation(7)
    with pytest.raises(InputError, match="give model.config.rotation"):
        apply(config, params_of(config), text(3, 1, 7), rotation=plain)


def test_tables_of_embeddings_are_sharded_alike():
    mesh = make_mesh(Mesh(fsdp=4, tensor=2))
    embed, layers = (spec_of(f"{x}/embedding", (256, 64), mesh) for x in ("embed", "layer_embed"))
    assert layers == embed == PartitionSpec("tensor", "fsdp")


def test_embeddings_of_layers_need_token_ids():
    with pytest.raises(InputError, match="layer_embedding.*; give token ids"):
        apply(SHARED, params_of(SHARED), jnp.zeros((1, 4, 32)))
