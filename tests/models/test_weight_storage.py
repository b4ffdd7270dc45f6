"""Codes of frozen weights: what they are, what a model computes with them, and what it keeps."""

import statistics
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lcjax.cost import parameter_shapes
from lcjax.models import Decoder, preset
from lcjax.models.experts import Experts
from lcjax.models.lora import LoRA, is_adapter
from lcjax.models.weight_storage import (
    NF4,
    Int8Weights,
    NF4Weights,
    dequantise_params,
    dynamic_map,
    is_stored,
    quantise_kernel,
    quantise_params,
)
from lcjax.parallel.sharding import Mesh, make_mesh, param_shardings
from lcjax.tree import flatten, nest, split, union

STORAGES = {
    "int8": Int8Weights(),
    "nf4": NF4Weights(block=32),
    "single": NF4Weights(block=16, double=False),
}
GOLDEN = Path(__file__).parent.parent / "golden" / "nf4.npz"
TOKENS = jnp.arange(64).reshape(2, 32) % 50
# Sizes of which blocks of 16 and 32 inputs lie on two devices each
WIDE = {"width": 64, "mlp_width": 128, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}


def _quantiles():
    """The 16 numbers of appendix E: quantiles of both halves of a normal distribution, and 0."""
    quantile, most = statistics.NormalDist().inv_cdf, 0.9677083
    upper = [quantile(p) for p in np.linspace(most, 0.5, 9)[:-1]]
    lower = [-quantile(p) for p in np.linspace(most, 0.5, 8)[:-1]]
    values = np.sort([*upper, 0.0, *lower])
    return values / values.max()


def _dynamic_map():
    """Sign, decimal exponent and linear fraction: section 2.1 of arXiv 1511.04561, with 0 and 1."""
    values = {0.0, 1.0}
    for zeros in range(7):
        count = 2 ** (6 - zeros)
        fractions = 0.1 + 0.9 * (np.arange(count) + 0.5) / count
        values |= {sign * 10.0**-zeros * x for x in fractions for sign in (1, -1)}
    return np.sort([*values])


def _codes(arrays):
    """Codes [I, O] of the arrays of a matrix."""
    packed = np.asarray(arrays["nf4"])
    return np.concatenate([packed >> 4, packed & 15], 1).reshape(-1, packed.shape[-1])


def _nearest(x, values):
    """The index of the nearest value, and how much nearer it is than the second."""
    distances = np.abs(x[..., None] - values)
    first, second = np.sort(distances, -1)[..., :2].transpose(-1, *range(x.ndim))
    return distances.argmin(-1), second - first


def _kernel(inputs=192, outputs=96):
    scale = np.linspace(0.5, 2, outputs)
    return (0.05 * scale * np.random.default_rng(0).normal(size=(inputs, outputs))).astype("f4")


def test_the_values_of_nf4_are_the_quantiles_of_the_paper():
    np.testing.assert_allclose(NF4, _quantiles(), atol=2e-7)


def test_codes_of_nf4_are_the_nearest_quantiles_of_each_block():
    kernel = _kernel()
    arrays = NF4Weights(double=False).quantise(jnp.asarray(kernel))
    blocks = kernel.astype(np.float64).reshape(3, 64, 96)
    absmax = np.abs(blocks).max(1)
    np.testing.assert_array_equal(arrays["absmax"], absmax.astype(np.float32))
    expected, margin = _nearest(blocks / absmax[:, None], _quantiles())
    is_clear = (margin > 1e-6).reshape(192, 96)
    codes = _codes(arrays)
    assert is_clear.mean() > 0.999
    np.testing.assert_array_equal(codes[is_clear], expected.reshape(192, 96)[is_clear])
    floats = NF4Weights(double=False).dequantise(arrays, jnp.float32)
    plain = (_quantiles()[codes].reshape(3, 64, 96) * absmax[:, None]).reshape(192, 96)
    np.testing.assert_allclose(floats, plain, atol=1e-7)


def test_scales_of_double_quantisation_are_codes_in_groups_of_256_less_their_mean():
    kernel, values = _kernel(), _dynamic_map()
    storage = NF4Weights()
    arrays = storage.quantise(jnp.asarray(kernel))
    absmax = np.abs(kernel.astype(np.float64).reshape(3, 64, 96)).max(1)
    np.testing.assert_allclose(arrays["absmax_mean"], absmax.mean(), rtol=1e-6)
    centred = absmax.T.reshape(-1) - absmax.mean()  # of output 0, then of output 1, ...
    groups = np.concatenate([centred, np.zeros(512 - 288)]).reshape(2, 256)
    largest = np.abs(groups).max(1)
    np.testing.assert_allclose(arrays["absmax_scale"], largest, rtol=1e-5)
    expected, margin = _nearest(groups / largest[:, None], values)
    codes = np.asarray(arrays["absmax"]).T.reshape(-1)
    is_clear = margin.reshape(-1)[:288] > 1e-5
    assert is_clear.mean() > 0.95
    np.testing.assert_array_equal(codes[is_clear], expected.reshape(-1)[:288][is_clear])
    scales = storage.with_scales(arrays)["absmax"]
    plain = (values[expected] * largest[:, None]).reshape(-1)[:288] + absmax.mean()
    np.testing.assert_allclose(scales.T.reshape(-1), plain, atol=1e-5)
    # The widest step of the type is 0.9 / 64 of the largest number of a group.
    assert np.abs(scales - absmax).max() < 0.9 / 64 * largest.max()


def test_codes_and_scales_are_those_of_bitsandbytes():
    golden = np.load(GOLDEN)
    kernel = 0.02 * np.random.default_rng(7).standard_t(4, size=(24, 1024))
    arrays = NF4Weights().quantise(jnp.asarray(kernel.T, jnp.float32))
    codes = _codes(arrays).T
    np.testing.assert_array_equal(codes[:, ::2] << 4 | codes[:, 1::2], golden["codes"])
    np.testing.assert_array_equal(np.asarray(arrays["absmax"]).T.reshape(-1), golden["absmax"])
    np.testing.assert_allclose(arrays["absmax_scale"], golden["scale"], rtol=1e-6)
    np.testing.assert_allclose(arrays["absmax_mean"], golden["offset"], rtol=1e-6)
    np.testing.assert_array_equal(dynamic_map(), golden["map"])


def test_int8_has_one_scale_for_each_output_channel():
    kernel = _kernel()
    arrays = Int8Weights().quantise(jnp.asarray(kernel))
    scale = np.abs(kernel.astype(np.float64)).max(0) / 127
    np.testing.assert_allclose(arrays["scale"], scale, rtol=1e-6)
    exact = kernel / scale
    is_clear = np.abs(np.abs(exact - np.floor(exact)) - 0.5) > 1e-4
    np.testing.assert_array_equal(arrays["int8"][is_clear], np.round(exact)[is_clear])
    floats = Int8Weights().dequantise(arrays, jnp.float32)
    assert (np.abs(floats - kernel) <= 0.501 * scale).all()


def test_zeros_and_constants_survive():
    for storage in (Int8Weights(), NF4Weights(), NF4Weights(double=False)):
        for value in (0.0, 2.0):
            kernel = jnp.full((64, 4), value)
            arrays = storage.quantise(kernel)
            np.testing.assert_allclose(storage.dequantise(arrays, "f4"), kernel, rtol=1e-6)


def test_a_matrix_of_two_input_axes_has_blocks_over_both():
    kernel = _kernel(128, 8).reshape(4, 32, 8)
    arrays = NF4Weights().quantise(jnp.asarray(kernel), inputs=2)
    flat = NF4Weights().quantise(jnp.asarray(kernel.reshape(128, 8)))
    jax.tree.map(np.testing.assert_array_equal, arrays, flat)


@pytest.mark.parametrize("name", ["int8", "nf4"])
def test_codes_do_not_depend_on_the_program_that_computes_them(name):
    """A run folder compares them: of one layer or a stack, on one device or several."""
    random, storage = np.random.default_rng(3), {"int8": Int8Weights(), "nf4": NF4Weights(16)}[name]
    stack = jnp.asarray(random.standard_t(4, size=(3, 64, 160)), jnp.bfloat16)
    path, mesh = "mlp/gate/kernel", make_mesh(Mesh(data=1, fsdp=2, tensor=4))
    together = quantise_kernel(storage, f"layers/{path}", stack)
    shared = quantise_kernel(storage, f"layers/{path}", stack, mesh)
    jax.tree.map(np.testing.assert_array_equal, shared, together)
    for layer in range(3):
        for options in ((), (mesh,)):
            one = quantise_kernel(storage, f"layers_{layer}/{path}", stack[layer], *options)
            for key, array in one.items():
                np.testing.assert_array_equal(array, together[key][layer], err_msg=key)
        with jax.disable_jit():
            plain = storage.quantise(stack[layer])
        for key, array in plain.items():
            np.testing.assert_array_equal(array, together[key][layer], err_msg=key)


# A mixture whose shared expert gets adapters.
SHARED = Experts(4, shared_width=128, shared_gate=True)


def _models(storage, **changes):
    """A model that stores codes and one that has the same weights as floats, with parameters."""
    lora = LoRA(rank=4, targets=("query", "out", "up"))
    plain = preset("tiny").replace(lora=lora, num_layers=2, **changes)
    stored = plain.replace(weights=storage)
    shapes, random = parameter_shapes(plain), np.random.default_rng(1)
    params = nest({
        path: jnp.asarray(0.1 * random.normal(size=leaf.shape), leaf.dtype)
        for path, leaf in shapes.items()
    })  # fmt: skip
    codes = quantise_params(dict(params), storage)
    return stored, codes, plain, dequantise_params(codes, storage, shapes)


def _loss(config, params, tokens=TOKENS, mesh=None):
    """Returns a function of the adapters, the adapters, and the other parameters."""
    model = Decoder(config, mesh)
    adapters, frozen = split(params, is_adapter)

    def loss(adapters, frozen):
        hidden = model.apply({"params": union(adapters, frozen)}, tokens).hidden
        return (hidden * jnp.sin(jnp.arange(hidden.size)).reshape(hidden.shape)).sum()

    return loss, adapters, frozen


CASES = [
    ("int8", {"remat": "dots"}),
    ("nf4", {"remat": "none"}),
    ("single", {"remat": "full", "scan_layers": False}),
    ("nf4", {"remat": "full", "experts": SHARED}),
    ("int8", {"remat": "none", "experts": SHARED}),
]
IDS = ["int8-dots", "nf4-none", "single-apart", "nf4-experts", "int8-experts"]


@pytest.mark.parametrize(("name", "changes"), CASES, ids=IDS)
@pytest.mark.slow_except("int8-dots", "nf4-none")
def test_loss_and_gradients_equal_those_of_the_dequantised_weights(name, changes):
    stored, codes, plain, floats = _models(STORAGES[name], **changes)
    first, second = (
        jax.jit(jax.value_and_grad(loss))(adapters, frozen)
        for loss, adapters, frozen in (_loss(stored, codes), _loss(plain, floats))
    )
    if name == "nf4":  # a compiler may contract the product and the sum of a scale
        np.testing.assert_allclose(first[0], second[0], atol=1e-3)
    else:
        assert first[0] == second[0]
    assert min(jnp.abs(x).max() for x in jax.tree.leaves(second[1])) > 1e-3
    jax.tree.map(_assert_near, first[1], second[1])


def _assert_near(a, b):
    np.testing.assert_allclose(a, b, atol=2e-5 * jnp.abs(b).max())


@pytest.mark.parametrize(("name", "changes"), CASES, ids=IDS)
def test_no_float_of_a_matrix_is_a_residual(name, changes):
    """Measures what the backward pass receives; a matrix is larger than all else for few tokens."""
    stored = preset("tiny").replace(
        **{"lora": LoRA(rank=2), "weights": STORAGES[name], "mlp_width": 1024} | changes
    )

    def sizes(config):
        loss, adapters, frozen = _loss(config, nest(parameter_shapes(config)), TOKENS[:1, :4])
        backward = jax.make_jaxpr(lambda a, f: jax.vjp(lambda a: loss(a, f), a)[1])
        floats = [x for x in backward(adapters, frozen).out_avals if x.dtype == jnp.float32]
        return max(x.size // (stored.num_layers if x.shape[:1] == (2,) else 1) for x in floats)

    matrix = stored.width * stored.expert_width * (stored.experts.count if stored.experts else 1)
    assert sizes(stored) < matrix
    if changes["remat"] == "none":
        assert sizes(stored.replace(weights=None)) >= matrix  # so the test can fail


@pytest.mark.parametrize("name", ["int8", "nf4"])
@pytest.mark.parametrize("experts", [None, SHARED], ids=["mlp", "experts"])
@pytest.mark.slow_except("mlp-nf4")
def test_eight_devices_compute_what_one_computes(name, experts):
    sizes = Mesh(data=1, fsdp=2, tensor=2, expert=2) if experts else Mesh(data=2, fsdp=2, tensor=2)
    changes = WIDE | {"remat": "full", "experts": experts}
    stored, codes, _, _ = _models(STORAGES[name], **changes)
    mesh = make_mesh(sizes)
    whole = jax.jit(jax.value_and_grad(_loss(stored, codes)[0]))
    first = whole(*_loss(stored, codes)[1:])
    sharded = jax.device_put(codes, param_shardings(mesh, codes))
    loss, adapters, frozen = _loss(stored, sharded, mesh=mesh)
    second = jax.jit(jax.value_and_grad(loss))(adapters, frozen)
    np.testing.assert_allclose(first[0], second[0], atol=2e-3)
    jax.tree.map(_assert_near, second[1], first[1])


def test_codes_are_sharded_as_the_weights_and_blocks_are_whole():
    mesh = make_mesh(Mesh(data=1, fsdp=2, tensor=4))
    config = preset("tiny").replace(**WIDE, num_layers=2)
    for storage in (Int8Weights(), NF4Weights(block=16)):
        plain = parameter_shapes(config)
        shapes = parameter_shapes(config.replace(weights=storage))
        places = flatten(param_shardings(mesh, nest(shapes)))
        for path in filter(is_stored, plain):
            leaf, where = shapes[f"{path}/{storage.codes}"], places[f"{path}/{storage.codes}"]
            shard = np.prod(where.shard_shape(leaf.shape))
            expected = np.prod(plain[path].shape) // storage.per_code
            parts = 2 if path.endswith(("key/kernel", "value/kernel")) else 8  # 2 heads
            assert shard == expected // parts, path
            if storage.codes == "nf4":
                scale = f"{path}/absmax"
                assert places[scale].shard_shape(shapes[scale].shape) == tuple(
                    np.delete(
                        where.shard_shape(leaf.shape),
                        leaf.ndim
                        - 2
                        - path.endswith(("query/kernel", "key/kernel", "value/kernel")),
                    )
                )
