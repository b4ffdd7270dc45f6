"""Invariances of the decoder: causality, documents, padding, caching, layouts, adapters."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from lcjax.attention import Sliding
from lcjax.errors import InputError
from lcjax.models import (
    Decoder,
    ModelConfig,
    head,
    layer_groups,
    preset,
    stack_layers,
    unstack_layers,
    unstack_layers_in_place,
)
from lcjax.models import cache as cache_lib
from lcjax.models import lora as lora_lib
from lcjax.models.decoder import random_params
from lcjax.models.layers import look_up
from lcjax.models.lora import LoRA
from lcjax.models.loss import cross_entropy, token_nll
from lcjax.parallel.sharding import Mesh, make_mesh, param_shardings
from lcjax.rope import NTK, Default, Linear, Yarn
from lcjax.tree import split

TINY = preset("tiny")
PHI = TINY.replace(
    norm="layer",
    activation="gelu_tanh",
    block="parallel",
    gated_mlp=False,
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    head_bias=True,
    rotary_fraction=0.5,
)
ADAPTERS = LoRA(rank=3, targets=("query", "out", "up", "down"))
CONFIGS = {
    "llama": TINY,
    "window": TINY.replace(pattern=Sliding(window=5)),
    "tied, biased": TINY.replace(tie_embeddings=True, qkv_bias=True),
    "phi": PHI,
    "ntk": TINY.replace(rope=NTK(theta=1e4, alpha=7.0)),
    "linear": TINY.replace(rope=Linear(theta=1e4, factor=4.0)),
    "yarn": TINY.replace(rope=Yarn(theta=1e4, factor=4.0, original_length=16)),
}


@functools.cache
def _model(config: ModelConfig):
    model, random = Decoder(config), np.random.default_rng(0)
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]

    # Biases and adapters start at zero, where a mistake in them would not show.
    def noisy(path, leaf):
        centre = 1 if path[-1].key == "scale" else 0
        return jnp.asarray(centre + 0.16 * random.normal(size=leaf.shape), leaf.dtype)

    return model, jax.tree.map_with_path(noisy, shapes)


@functools.partial(jax.jit, static_argnums=0)
def _read(model, params, tokens, kwargs):
    output = model.apply({"params": params}, tokens, **kwargs)
    hidden, cache = output.hidden, output.cache
    return model.apply({"params": params}, hidden, method="logits"), cache


def _logits(model, params, tokens, **kwargs):
    return np.asarray(_read(model, params, tokens, kwargs)[0])


def _tokens(seed, *shape, vocabulary=259):
    random = np.random.default_rng(seed)
    return random.integers(0, vocabulary, shape).astype(np.int32)


@pytest.mark.slow_except("llama", "window", "phi")  # the others rotate and bias what "llama" does
@pytest.mark.parametrize("name", CONFIGS)
def test_changing_a_token_changes_nothing_before_it(name):
    model, params = _model(CONFIGS[name])
    tokens = _tokens(1, 2, 21)
    before = _logits(model, params, tokens)
    tokens[:, 11] += 1
    after = _logits(model, params, tokens)
    np.testing.assert_array_equal(before[:, :11], after[:, :11])
    assert np.abs(before[:, 11:] - after[:, 11:]).max() > 1e-3


def test_packed_documents_equal_separate_ones():
    model, params = _model(TINY)
    first, second = _tokens(1, 1, 14), _tokens(2, 1, 14)  # of the first document 9 tokens
    packed = np.concatenate([first[:, :9], second, np.zeros((1, 3), np.int32)], axis=1)
    segments = np.array([[1] * 9 + [2] * 14 + [0] * 3], np.int32)
    positions = np.array([[*range(9), *range(14), 0, 0, 0]], np.int32)
    together = _logits(model, params, packed, segments=segments, positions=positions)
    np.testing.assert_allclose(together[:, :9], _logits(model, params, first)[:, :9], atol=2e-5)
    np.testing.assert_allclose(together[:, 9:23], _logits(model, params, second), atol=2e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(side):
    model, params = _model(TINY)
    tokens = _tokens(3, 1, 14)
    pad = (12, 0) if side == "left" else (0, 12)
    padded = np.pad(tokens, [(0, 0), pad], constant_values=7)
    segments = np.pad(np.ones((1, 14), np.int32), [(0, 0), pad])
    positions = np.pad(np.arange(14, dtype=np.int32)[None], [(0, 0), pad])
    got = _logits(model, params, padded, segments=segments, positions=positions)
    got = got[:, 12:] if side == "left" else got[:, :14]
    np.testing.assert_allclose(got, _logits(model, params, tokens), atol=2e-5)


@pytest.mark.slow_except("True-tied, biased", "False-yarn", "True-window", "False-phi")
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("rotated", [True, False])
def test_reading_in_steps_equals_reading_at_once(name, rotated):
    config = CONFIGS[name]
    model, params = _model(config)
    tokens = _tokens(4, 2, 21)
    at_once = _logits(model, params, tokens)
    cache, parts = cache_lib.create(config, 2, 24, rotated=rotated), []
    for start, stop in [(0, 8), (8, 9), (9, 17), *((t, t + 1) for t in range(17, 21))]:
        logits, cache = _read(model, params, tokens[:, start:stop], {"cache": cache})
        parts.append(logits)
    np.testing.assert_allclose(np.concatenate(parts, 1), at_once, atol=3e-5)
    assert int(cache.filled) == 21


@pytest.mark.parametrize("name", ["llama", "phi"])
def test_separate_layers_equal_scanned_ones(name):
    config = CONFIGS[name].replace(lora=ADAPTERS)
    model, params = _model(config)
    tokens = _tokens(5, 2, 9)
    apart = unstack_layers(params, config)
    loop = Decoder(config.replace(scan_layers=False))
    np.testing.assert_allclose(
        _logits(loop, apart, tokens), _logits(model, params, tokens), atol=1e-5
    )
    jax.tree.map(np.testing.assert_array_equal, stack_layers(apart, config), params)


def test_separating_layers_in_place_never_holds_a_second_copy(monkeypatch):
    config = TINY.replace(num_layers=4)
    params = random_params(config, 0)
    want = unstack_layers(jax.tree.map(np.asarray, params), config)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(params["layers"]))
    others = sum(leaf.nbytes for leaf in jax.live_arrays()) - size
    alive, split = [], layer_groups._unstack

    def watched(leaf):
        parts = split(leaf)
        alive.append(sum(leaf.nbytes for leaf in jax.live_arrays()) - others)
        return parts

    monkeypatch.setattr(layer_groups, "_unstack", watched)
    assert unstack_layers_in_place(params, config) is None
    assert size < max(alive) <= size + largest
    assert set(params) == set(want)
    jax.tree.map(np.testing.assert_array_equal, params, want)


def test_separate_layers_lie_on_a_mesh_as_the_stacked_ones_did():
    mesh = make_mesh(Mesh(data=2, fsdp=2, tensor=2))
    params = _model(TINY)[1]
    params = jax.device_put(params, param_shardings(mesh, params))
    apart = unstack_layers(params, TINY)
    back = stack_layers(apart, TINY)
    for tree in (apart, back):
        wanted = param_shardings(mesh, tree)
        jax.tree.map(lambda x, w: _same_layout(x.sharding, w, x.ndim), tree, wanted)
    kernel = apart["layers_1"]["mlp"]["up"]["kernel"]
    assert kernel.addressable_shards[0].data.size == kernel.size // 4
    jax.tree.map(np.testing.assert_array_equal, back, params)


def _same_layout(found, wanted, ndim):
    assert found.is_equivalent_to(wanted, ndim), (found, wanted)


@pytest.mark.parametrize("name", ["llama", "phi"])
def test_merged_adapters_give_the_same_logits(name):
    config = CONFIGS[name].replace(lora=ADAPTERS)
    model, params = _model(config)
    tokens = _tokens(6, 2, 9)
    merged = lora_lib.merge(params, config.lora)
    plain = Decoder(config.replace(lora=None))
    want = _logits(model, params, tokens)
    np.testing.assert_allclose(_logits(plain, merged, tokens), want, atol=5e-5)
    adapters, base = split(params, lora_lib.is_adapter)
    assert np.abs(_logits(plain, base, tokens) - want).max() > 1e-3
    assert {"lora_a", "lora_b"} == set(adapters["layers"]["attention"]["query"])


@pytest.mark.slow
def test_rematerialised_layers_give_the_same_gradients():
    tokens = _tokens(7, 2, 11)

    def grads(remat):
        model, params = _model(TINY.replace(remat=remat))

        def loss(params):
            return (model.apply({"params": params}, tokens).hidden ** 2).sum()

        return jax.jit(jax.grad(loss))(params)

    plain = grads("none")
    for remat in ("full", "dots"):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3),
            grads(remat),
            plain,
        )


def test_bfloat16_compute_stays_near_float32_and_keeps_float32_parameters():
    model, params = _model(TINY)
    half = Decoder(TINY.replace(dtype="bfloat16"))
    tokens = _tokens(8, 2, 21)
    want, got = _logits(model, params, tokens), _logits(half, params, tokens)
    assert got.dtype == np.float32 and params["final_norm"]["scale"].dtype == jnp.float32
    assert np.abs(got - want).max() < 0.05 * np.abs(want).max()


def test_bad_architectures_raise_input_error_with_the_rule():
    with pytest.raises(InputError, match="num_kv_heads=3 must divide"):
        dataclasses.replace(TINY, num_kv_heads=3)
    with pytest.raises(InputError, match="rms, layer"):
        TINY.replace(norm="batch")
    with pytest.raises(InputError, match="even number"):
        TINY.replace(rotary_fraction=0.2)
    with pytest.raises(InputError, match="llama2-7b"):
        preset("llama2_7b")


def test_default_rope_is_resolved():
    assert TINY.rope == Default(theta=10_000.0)


def test_bfloat16_logits_of_an_untied_head_are_those_of_the_loss_and_not_rounded():
    config = TINY.replace(tie_embeddings=False, head_bias=True, dtype="bfloat16")
    model, params = _model(config)
    tokens = _tokens(9, 2, 12)
    assert set(params["head"]) == {"kernel", "bias"}

    @jax.jit
    def read(params):
        hidden = model.apply({"params": params}, tokens).hidden
        logits = model.apply({"params": params}, hidden, method="logits")
        return logits, token_nll(hidden, head(params, config), tokens)

    logits, nll = (np.asarray(found) for found in read(params))
    assert logits.dtype == jnp.float32
    assert (logits != logits.astype(jnp.bfloat16)).mean() > 0.5
    want = -np.take_along_axis(log_softmax(logits, -1), tokens[..., None], -1)
    np.testing.assert_allclose(nll, want[..., 0], atol=1e-5)


@pytest.mark.parametrize(
    ("mesh", "shape", "width", "exchanges"),
    [
        (Mesh(fsdp=8), (8, 16), 16, True),
        (Mesh(data=2, fsdp=2, context=2), (8, 16), 16, True),
        (Mesh(fsdp=8), (3, 16), 16, False),  # every device has all tokens
        (Mesh(data=2, fsdp=2, context=2), (8, 15), 16, False),  # devices of one text have all of it
        (Mesh(fsdp=8), (8, 16), 15, False),  # every device has all columns
    ],
)
def test_embeddings_are_exchanged_where_devices_have_columns_and_other_tokens(
    mesh, shape, width, exchanges
):
    mesh, tokens = make_mesh(mesh), _tokens(0, *shape, vocabulary=32)
    table = np.random.default_rng(0).normal(size=(32, width)).astype(np.float32)
    read = jax.jit(lambda table, tokens: look_up(table, tokens, jnp.float32, mesh))
    assert ("all_to_all" in str(jax.make_jaxpr(read)(table, tokens))) == exchanges
    np.testing.assert_array_equal(read(table, tokens), table[tokens])


def test_hessian_products_are_differences_of_gradients():
    config = preset("tiny").replace(num_layers=2, scan_layers=False)
    model, tokens = Decoder(config), jnp.asarray(np.random.default_rng(0).integers(0, 256, (2, 20)))
    params = model.init(jax.random.key(0), tokens)["params"]
    rng = np.random.default_rng(1)
    along = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), params)

    def loss(params):
        hidden = model.apply({"params": params}, tokens).hidden
        return cross_entropy(hidden, head(params, config), tokens, jnp.ones(tokens.shape))[0]

    gradient = jax.jit(jax.grad(loss))
    _, product = jax.jit(lambda p: jax.jvp(jax.grad(loss), (p,), (along,)))(params)
    step = 1e-4

    def moved(sign):
        return gradient(jax.tree.map(lambda x, d: x + sign * step * d, params, along))

    def compare(result, after, before):
        want = np.asarray(after - before) / (2 * step)
        np.testing.assert_allclose(result, want, atol=0.02 * np.abs(want).max())

    jax.tree.map(compare, product, moved(1), moved(-1))
