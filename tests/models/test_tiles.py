"""Layers that compute one tile of tokens after the other, and results that host memory keeps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lcjax import cost
from lcjax.errors import InputError
from lcjax.models import Decoder, ModelConfig, remat, tiles
from lcjax.models.experts import Experts
from lcjax.models.lora import LoRA
from lcjax.models.tiles import over_tiles
from lcjax.parallel.sharding import Mesh

SMALL = ModelConfig(
    vocab_size=61, width=32, mlp_width=256, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8,
    max_length=64,
)  # fmt: skip


@pytest.fixture
def few_bytes(monkeypatch):
    """Limits tiles to a few tokens."""
    monkeypatch.setitem(tiles._BYTES, "cpu", 40_000)


def mlp(weights, x):
    return jnp.tanh(x @ weights["up"]) @ weights["down"] + weights["bias"]


def arrays(tokens, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"up": (8, 24), "down": (24, 8), "bias": (8,)}
    weights = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    x, dy = rng.normal(size=(2, tokens, 8))
    return jax.tree.map(lambda a: jnp.asarray(a, dtype), (weights, x, dy))


@pytest.mark.parametrize(("tokens", "tile"), [(37, 8), (40, 8), (5, 8), (9, 1)])
def test_tiles_have_the_values_and_gradients_of_all_tokens(tokens, tile):
    weights, x, dy = arrays(tokens)
    whole, pull = jax.vjp(mlp, weights, x)
    tiled, pull_tiled = jax.vjp(lambda weights, x: over_tiles(mlp, weights, x, tile), weights, x)
    np.testing.assert_allclose(tiled, whole, rtol=1e-5, atol=1e-5)
    for actual, expected in zip(*map(jax.tree.leaves, (pull_tiled(dy), pull(dy))), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_gradients_of_weights_are_summed_in_float32():
    weights, x, dy = arrays(4096, jnp.bfloat16)
    exact, pull = jax.vjp(mlp, *jax.tree.map(lambda a: a.astype(jnp.float32), (weights, x)))
    expected, _ = pull(dy.astype(exact.dtype))
    actual, _ = jax.vjp(lambda weights, x: over_tiles(mlp, weights, x, 4), weights, x)[1](dy)
    for name, gradient in actual.items():
        error = jnp.abs(gradient.astype(jnp.float32) - expected[name]).max()
        assert error < 0.02 * jnp.abs(expected[name]).max(), name


def test_frozen_weights_have_no_sums():
    weights, x, dy = arrays(40)

    def products(*names):
        def gradient(learned):
            def run(learned):
                return over_tiles(mlp, weights | learned, x, 8)

            return jax.vjp(run, learned)[1](dy)

        learned = {name: weights[name] for name in names}
        return str(jax.make_jaxpr(gradient)(learned)).count("dot_general[")

    forward = 2  # of the values, and again of a tile before its gradients
    assert products("bias") == 2 * forward
    assert products("down", "bias") == 2 * forward + 1
    assert products("up", "down", "bias") == 2 * forward + 3


def loss_of(config):
    model, tokens = Decoder(config), jnp.arange(2 * 48).reshape(2, 48) % 61

    def loss(params):
        return jnp.sin(model.apply({"params": params}, tokens).hidden).sum()

    return loss


@functools.cache
def parameters(config):
    init = jax.jit(lambda: Decoder(config).init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32)))
    return init()["params"]


def abstract(config):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), parameters(config))


MODELS = {
    "gated": SMALL,
    "plain": SMALL.replace(gated_mlp=False, activation="gelu_tanh", mlp_bias=True),
    "parallel": SMALL.replace(block="parallel", norm="layer"),
    "experts": SMALL.replace(
        experts=Experts(count=4, top_k=2, shared_width=256, shared_gate=True),
        lora=LoRA(rank=2, targets=("gate", "down")),
    ),
    "adapters": SMALL.replace(lora=LoRA(rank=2, targets=("gate", "down"))),
    "separate layers": SMALL.replace(scan_layers=False),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_by_tiles_with_results_on_the_host_equal_plain_ones(name, few_bytes):
    plain = MODELS[name]
    recomputed = plain.replace(remat="offload")
    params = parameters(plain)
    expected, gradients = jax.jit(jax.value_and_grad(loss_of(plain)))(params)
    traced = jax.jit(jax.value_and_grad(loss_of(recomputed))).trace(params)
    actual, by_tiles = traced.lower().compile()(params)
    assert "custom_vjp_call" in str(jax.make_jaxpr(loss_of(recomputed))(params))
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    for a, b in zip(*map(jax.tree.leaves, (by_tiles, gradients)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max() + 1e-9)


def test_tiles_bound_the_memory_of_a_step(monkeypatch):
    config = SMALL.replace(mlp_width=4096, num_layers=1, remat="full")
    params = abstract(config)

    def temporaries():
        step = jax.jit(jax.grad(loss_of(config)))
        return step.lower(params).compile().memory_analysis().temp_size_in_bytes

    whole = temporaries()
    monkeypatch.setitem(tiles._BYTES, "cpu", 400_000)
    widest = 4 * 2 * 48 * 4096  # one float32 array of the MLP
    assert whole > 3 * widest and temporaries() < whole / 4


@pytest.mark.parametrize(
    ("places", "on_host"),
    [
        ("full", 0), ("attention", 0), ("offload", 3), ("input=host", 1),
        ("attention=host, input=device", 2),
    ],
)  # fmt: skip
def test_results_are_kept_where_remat_says(places, on_host):
    """Of all layers: the input of a block, the output of attention, and its log-sum-exp."""
    loss, params = loss_of(SMALL.replace(remat=places)), abstract(SMALL)
    residuals = jax.make_jaxpr(lambda params: jax.vjp(loss, params)[1])(params).out_avals
    stacked = [x for x in residuals if x.shape[:3] == (3, 2, 48)]
    is_on_host = [x.memory_space == jax.memory.Space.Host for x in stacked]
    assert sum(is_on_host) == on_host
    assert (len(is_on_host) == 1) == (places in ("full", "input=host"))


def test_estimates_count_what_the_host_keeps_apart():
    def activations(places):
        return cost.training_memory(SMALL.replace(remat=places), 4096, 1, Mesh(fsdp=1))

    attention, offload = map(activations, ("attention", "offload"))
    assert offload.activations < attention.activations and offload.host > attention.host


def test_bad_places_raise_input_error():
    for places, message in {
        "half": "none, full, attention, dots",
        "inputs=host": "input, attention, product",
        "input=disk": "device, host",
        "input=host,input=device": "twice",
    }.items():
        with pytest.raises(InputError, match=message):
            SMALL.replace(remat=places)
    assert remat.places("product=host, input=device") == {"product": "host", "input": "device"}
