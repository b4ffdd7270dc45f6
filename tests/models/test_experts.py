"""Mixtures of experts: products of groups of rows, the router's loss, and meshes of devices."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_lm import text

from lcjax.attention import Chunked, Sliding
from lcjax.cost.chips import Topology
from lcjax.cost.compilers import devices
from lcjax.errors import InputError
from lcjax.models import Decoder, LayerKind, ModelConfig
from lcjax.models import cache as cache_lib
from lcjax.models import experts as experts_module
from lcjax.models.decoder import random_params
from lcjax.models.experts import (
    Biases,
    Experts,
    Kernels,
    _block_sums,
    _kernel_sums,
    apply_experts,
    gated,
    grouped_matmul,
    mixture,
)
from lcjax.models.lora import LoRA
from lcjax.models.weight_storage import NF4Weights
from lcjax.parallel.sharding import Mesh, batch_sharding, make_mesh, param_shardings
from lcjax.rope import NoRotation
from lcjax.rope.positions import PlainPositions
from lcjax.training.objective import language_model
from lcjax.training.step import accumulate
from pallas_kernels.backends.triton import grouped as triton
from pallas_kernels.rows import block_rows, group_rows, max_rows

CONFIG = ModelConfig(
    *(64, 32, 48, 2, 4, 2, 8, 64),
    experts=Experts(6, top_k=3, width=20, shared_width=12, shared_gate=True, balance=0.5),
)
# As gpt-oss has them: biases, clamped units, and a sink of each head.
BIASED = CONFIG.replace(
    experts=dataclasses.replace(CONFIG.experts, bias=True, swiglu_limit=0.5),
    attention_sinks=True,
    qkv_bias=True,
)
# As Llama 4 has them: a dense layer that rotates, and a mixture whose layer does not.
LLAMA4 = CONFIG.replace(
    num_layers=4,
    experts=Experts(6, 2, 20, "sigmoid", False, "input", shared_width=20, balance=0.5),
    qk_norm="unscaled",
    query_scale=0.3,
    query_scale_length=3,
    query_scale_layers="unrotated",
    layers=(LayerKind(pattern=Chunked(5), dense=True), LayerKind(rope=NoRotation())),
)
CONFIGS = {"shared": CONFIG, "biased": BIASED, "llama4": LLAMA4}
SWIGLU = gated(CONFIG.experts, jax.nn.silu)


def random(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


SIZES = {
    "uneven": (4, 8, 4, 12, 4),
    "empty groups": (0, 12, 0, 0, 16),
    "all in one": (0, 0, 32, 0, 0),
    "rows behind the last group": (4, 0, 8, 4, 0),
    "none": (0, 0, 0, 0, 0),
}


@functools.partial(jax.jit, static_argnums=4)
def product_and_gradients(x, w, dy, sizes, traced_count):
    product = functools.partial(grouped_matmul, block=4, traced_count=traced_count)
    y, pull = jax.vjp(lambda x, w: product(x, w, sizes), x, w)
    return y, *pull(dy)


@pytest.mark.parametrize("traced_count", [False, True])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_products_of_groups_and_their_gradients_are_those_of_a_loop(sizes, traced_count):
    x, w, dy = inputs = random(0, 32, 7), random(1, 5, 7, 9), random(2, 32, 9)
    got = product_and_gradients(*inputs, np.asarray(sizes, np.int32), traced_count)
    y, dx, dw = (np.zeros(array.shape) for array in (dy, x, w))
    for expert, (end, size) in enumerate(zip(np.cumsum(sizes), sizes)):
        rows = slice(end - size, end)
        y[rows], dx[rows] = x[rows] @ w[expert], dy[rows] @ w[expert].T
        dw[expert] = x[rows].T @ dy[rows]
    for mine, expected in zip(got, (y, dx, dw)):
        np.testing.assert_allclose(mine, expected, atol=1e-5)


@jax.jit
def sums_of_kernel_and_blocks(x, dy, sizes):
    inputs = x.astype("bfloat16"), dy.astype("bfloat16"), sizes
    want = _block_sums(*inputs, block=128, traced_count=False)
    return _kernel_sums(*inputs, block=128, interpret=True), want


@pytest.mark.parametrize("sizes", [(128, 0, 256, 0), (0, 0, 0, 512), (0, 128, 0, 0)], ids=str)
def test_the_kernel_for_tpus_sums_the_products_of_groups(sizes):
    inputs = random(0, 512, 24), random(2, 512, 40), np.asarray(sizes, np.int32)
    got, want = sums_of_kernel_and_blocks(*inputs)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


def interpreted(*arrays):
    options = {"interpret": True}
    return types.SimpleNamespace(
        products=functools.partial(triton.products, **options),
        sums=functools.partial(triton.sums, **options),
    )


@pytest.mark.parametrize("sizes", [(16, 0, 32, 16), (0, 0, 0, 48), (0, 0, 0, 0)], ids=str)
def test_the_kernels_for_gpus_multiply_each_group(sizes, monkeypatch):
    """As a program for a GPU calls them, with rows behind the last group."""
    x, w, dy = random(0, 80, 24), random(1, 4, 24, 40), random(2, 80, 40)

    def results():
        product = functools.partial(grouped_matmul, block=16)
        y, pull = jax.vjp(lambda x, w: product(x, w, np.asarray(sizes, np.int32)), x, w)
        return y, *pull(dy)

    expected = results()
    monkeypatch.setattr(experts_module, "gpu_kernels", interpreted)
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *x, cuda, **_: cuda(*x))
    for mine, theirs in zip(results(), expected, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-5)


def test_a_program_for_a_gpu_has_kernels_in_place_of_loops():
    array = jax.ShapeDtypeStruct
    x, kernels = array((256, 64), "bfloat16"), [array((4, 64, 64), "bfloat16")] * 3
    pairs = array((256, 2), "float32"), array((256, 2), "int32")

    def gradient(x, weights, chosen, *kernels):
        def total(x, weights, kernels):
            return apply_experts(x, weights, chosen, Kernels(*kernels), SWIGLU).sum()

        return jax.grad(total, (0, 1, 2))(x, weights, kernels)

    device = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", None, "gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        traced = jax.jit(gradient).trace(x, *pairs, *kernels)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "@__gpu$xla.gpu.triton" in line]
    assert sum("lcjax_grouped_products" in line for line in calls) == 6
    assert sum("lcjax_grouped_sums" in line for line in calls) == 3
    assert "stablehlo.while" not in text


@pytest.mark.slow
def test_tpus_compile_a_mixture_and_its_gradient_without_products_of_all_experts():
    pytest.importorskip("libtpu")
    (device, *_) = devices(Topology.parse("v5e:2x2"))
    one = jax.sharding.SingleDeviceSharding(device)
    count, tokens, width, hidden, top_k = 8, 2048, 512, 768, 2

    def array(*shape, dtype="bfloat16"):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=one)

    def gradient(x, weights, chosen, kernels):
        def total(*inputs):
            x, weights, kernels = inputs
            return apply_experts(x, weights, chosen, kernels, SWIGLU).sum()

        return jax.grad(total, (0, 1, 2))(x, weights, kernels)

    kernels = Kernels(*(array(count, width, hidden) for _ in "gu"), array(count, hidden, width))
    pairs = array(tokens, top_k, dtype="float32"), array(tokens, top_k, dtype="int32")
    compiled = jax.jit(gradient).lower(array(tokens, width), *pairs, kernels).compile()
    rows = max_rows(tokens * top_k, count)
    # Forward, and the gradients of the rows and of the weights: three times three products.
    assert compiled.cost_analysis()["flops"] < 1.1 * 3 * 6 * rows * width * hidden
    assert compiled.as_text().count("tpu_custom_call") >= 3


sorted_rows = jax.jit(group_rows, static_argnums=1)


@pytest.mark.parametrize("tokens", [1, 3, 50, 200])
@pytest.mark.parametrize("foreign", [False, True])
def test_rows_are_sorted_into_blocks_of_one_expert_each(tokens, foreign):
    rng, count, top_k = np.random.default_rng(tokens), 6, 3
    chosen = np.stack([rng.permutation(count + 2 * foreign)[:top_k] for _ in range(tokens)])
    groups = jax.tree.map(np.asarray, sorted_rows(chosen, count))
    block, rows = int(groups.block), len(groups.pair)
    assert block == block_rows(tokens * top_k, count)
    assert rows == max_rows(tokens * top_k, count) >= groups.sizes.sum()
    assert not (groups.sizes % block).any()
    owners = np.repeat(np.arange(count), groups.sizes)
    for pair, place in enumerate(groups.places.reshape(-1)):
        expert = chosen.reshape(-1)[pair]
        if expert >= count:
            assert place == rows
        else:
            assert owners[place] == expert and groups.pair[place] == pair
            assert groups.token[place] == pair // top_k
    pads = np.delete(groups.pair, groups.places[groups.places < rows])
    assert (pads == tokens * top_k).all()


@pytest.mark.parametrize(
    ("tokens", "options"),
    [
        *((1, {}), (40, {}), (40, {"bias": True, "swiglu_limit": 1.5, "swiglu_alpha": 1.3})),
        (40, {"scores": "sigmoid", "normalize": False, "weighted": "input"}),  # Llama 4
        (40, {"scores": "sigmoid", "bias": True}),
    ],
)
def test_a_mixture_is_the_weighted_sum_of_its_experts_with_the_gradient_of_that_sum(
    tokens, options
):
    experts, x = Experts(count=5, top_k=2, **options), random(3, tokens, 8)
    router, kernels = (
        random(4, 8, 5), Kernels(random(5, 5, 8, 6), random(6, 5, 8, 6), random(7, 5, 6, 8))
    )  # fmt: skip
    biases = Biases(random(8, 5), random(9, 5, 6), random(10, 5, 6), random(11, 5, 8))
    if not experts.bias:
        biases = jax.tree.map(np.zeros_like, biases)

    def sparse(x, router, kernels, biases):
        of_experts = biases if experts.bias else None
        arrays = x[None], router, kernels, None, of_experts
        return jnp.sin(mixture(*arrays, experts=experts, activate=jax.nn.silu)[0]).sum()

    def dense(x, router, kernels, biases):
        scores = jax.nn.softmax if experts.scores == "softmax" else jax.nn.sigmoid
        p = scores(x @ router + biases.router)
        kept = jnp.where(p >= jnp.sort(p)[:, -2:-1], p, 0)
        if experts.normalize:
            kept = kept / kept.sum(-1, keepdims=True)
        inputs = x[:, None].repeat(5, 1)
        if experts.weighted == "input":
            inputs, kept = inputs * kept[..., None], jnp.sign(kept)
        gate = jnp.einsum("med,edf->mef", inputs, kernels.gate) + biases.gate
        up = jnp.einsum("med,edf->mef", inputs, kernels.up) + biases.up
        if experts.swiglu_limit is None:
            hidden = jax.nn.silu(gate) * up
        else:  # gpt-oss
            gate, up = gate.clip(max=1.5), up.clip(-1.5, 1.5)
            hidden = (up + 1) * gate / (1 + jnp.exp(-1.3 * gate))
        out = jnp.einsum("mef,efd->med", hidden, kernels.down) + biases.down
        return jnp.sin(jnp.einsum("me,med->md", kept, out)).sum()

    inputs, learned = (x, router, kernels, biases), (0, 1, 2, 3)[: 3 + experts.bias]
    (mine, grads), (want, dense_grads) = (
        jax.jit(jax.value_and_grad(f, learned))(*inputs) for f in (sparse, dense)
    )
    np.testing.assert_allclose(mine, want, rtol=1e-5)
    for x, y in zip(jax.tree.leaves(grads), jax.tree.leaves(dense_grads)):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cpu_multiplies_blocks_and_holds_neither_masked_rows_nor_other_weights(dtype):
    count, tokens, width, hidden, top_k = 16, 512, 64, 96, 2
    x = jax.ShapeDtypeStruct((tokens, width), dtype)
    shape = (count, width, hidden)
    kernels = Kernels(
        *(jax.ShapeDtypeStruct(s, "bfloat16") for s in (shape, shape, (count, hidden, width)))
    )
    weights = jax.ShapeDtypeStruct((tokens, top_k), "float32")
    chosen = jax.ShapeDtypeStruct((tokens, top_k), "int32")
    layer = functools.partial(apply_experts, hidden_units=SWIGLU)
    compiled = jax.jit(layer).lower(x, weights, chosen, kernels).compile()
    block = block_rows(tokens * top_k, count)
    rows = max_rows(tokens * top_k, count)
    assert rows <= 1.3 * tokens * top_k + block * count
    # Rows in and out of the products, and one float32 matrix; not all of them.
    largest = 4 * rows * (2 * width + 3 * hidden) + 4 * tokens * top_k * 2 * width
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    assert temporaries < largest + 16 * width * hidden
    assert f"f32[{count},{width},{hidden}]" not in compiled.as_text()
    assert f"f32[{count},{hidden},{width}]" not in compiled.as_text()
    # The cost counts a loop once, which is one block of rows; the rest are sorts and additions.
    assert compiled.cost_analysis()["flops"] < tokens * top_k * width * hidden


def test_several_layers_of_experts_need_the_memory_of_one_on_a_cpu(enable_xla_optimizations):
    count, tokens, width, hidden, top_k = 16, 512, 64, 96, 2
    x = jax.ShapeDtypeStruct((tokens, width), "float32")
    shapes = (count, width, hidden), (count, width, hidden), (count, hidden, width)
    kernels = Kernels(*(jax.ShapeDtypeStruct(shape, "float32") for shape in shapes))

    def temporaries(layers):
        def apply(x, kernels):
            for _ in range(layers):
                weights, chosen = jax.lax.top_k(x[:, :count], top_k)
                x += apply_experts(x, weights, chosen, kernels, SWIGLU)
            return x

        compiled = jax.jit(apply).lower(x, kernels).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(4) < 1.2 * temporaries(1)


@functools.partial(jax.jit, static_argnums=(0, 1))
def read(config, mesh, params, tokens, cache=None):
    output = Decoder(config, mesh).apply({"params": params}, tokens, cache=cache)
    return output.hidden, output.cache


def noisy_params(config):
    """Random parameters, in which no bias is 0."""
    params, rng = random_params(config, 0), np.random.default_rng(0)
    return jax.tree.map(lambda x: x + np.float32(rng.normal(0, 0.1, x.shape)), params)


@pytest.mark.parametrize(
    "name", ["shared", "llama4", pytest.param("biased", marks=pytest.mark.slow)]
)
def test_a_step_beside_the_cache_equals_the_whole_text(name):
    config = CONFIGS[name].replace(num_layers=2, scan_layers=name != "biased")
    params, tokens = noisy_params(config), text(1, 2, 12) % 64
    whole, _ = read(config, None, params, tokens)
    cache, parts = cache_lib.create(config, 2, 12), []
    for part in (tokens[:, :9], *(tokens[:, i : i + 1] for i in range(9, 12))):
        hidden, cache = read(config, None, params, part, cache)
        parts.append(hidden)
    np.testing.assert_allclose(np.concatenate(parts, 1), whole, atol=1e-5)


def test_what_a_mixture_does_not_have_is_refused():
    with pytest.raises(InputError, match=r"lora.targets=.*'up'.* get no adapters; set lora.targ"):
        CONFIG.replace(lora=LoRA(targets=("query", "up")), experts=Experts(4))
    with pytest.raises(InputError, match=r"experts.shared_width is null; set the width"):
        Experts(count=2, shared_gate=True)
    with pytest.raises(InputError, match="dense=true replaces experts by an MLP"):
        CONFIG.replace(experts=None, layers=(LayerKind(dense=True), LayerKind()))
    with pytest.raises(InputError, match="gated_mlp=False is not defined for model.experts"):
        CONFIG.replace(gated_mlp=False)
    with pytest.raises(InputError, match=r"experts.top_k=3 must be at most experts.count=2"):
        Experts(count=2, top_k=3)


def test_other_kinds_of_layers_leave_dense_ones_dense():
    window = LayerKind(3, Sliding(4))
    kinds = LLAMA4.kinds_with((window, LayerKind()))
    dense, sparse = LayerKind(1, Sliding(4), dense=True), LayerKind(1, Sliding(4))
    assert kinds == (dense, sparse, dense, LayerKind())
    assert LLAMA4.kinds_with(()) == (LayerKind(dense=True), LayerKind())
    assert CONFIG.kinds_with((window, LayerKind())) == (window, LayerKind())
    with pytest.raises(InputError, match="dense=True of layer 1 does not fit the weights"):
        LLAMA4.kinds_with((LayerKind(dense=True),))


def loss_and_gradients(config, mesh, params, batch):
    objective = language_model(config, PlainPositions(), mesh=mesh)
    step = jax.jit(functools.partial(accumulate, objective, count=1))
    if mesh is not None:
        params = jax.device_put(params, param_shardings(mesh, params))
        batch = jax.device_put(batch, batch_sharding(mesh))
    loss, _, grads, parts = step(params, {}, batch, jax.random.key(0))
    return loss, parts, grads


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        (Mesh(1, 2, 2, 1, 2), "biased"),
        (Mesh(1, 1, 2, 2, 2), "llama4"),
        pytest.param(Mesh(1, 1, 1, 2, 4), "shared", marks=pytest.mark.slow),
        pytest.param(Mesh(1, 2, 2, 2, 1), "shared", marks=pytest.mark.slow),
        pytest.param(Mesh(2, 4, 1, 1, 1), "shared", marks=pytest.mark.slow),
        pytest.param(Mesh(1, 1, 1, 1, 8), "shared", marks=pytest.mark.slow),
        pytest.param(Mesh(1, 1, 2, 2, 2), "biased", marks=pytest.mark.slow),
        pytest.param(Mesh(1, 2, 1, 1, 4), "llama4", marks=pytest.mark.slow),
        pytest.param(Mesh(1, 2, 2, 2, 1), "llama4", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_loss_and_gradients_on_a_mesh_are_those_of_one_device(shape, name):
    # 8 experts that 8 devices share, or 6 that only 2 of 4 could: then each has them all.
    config = CONFIGS[name]
    experts = dataclasses.replace(config.experts, count=6 if shape.expert == 4 else 8)
    config = config.replace(experts=experts)
    params, rng = noisy_params(config), np.random.default_rng(0)
    tokens = rng.integers(0, 64, (8, 16)).astype(np.int32)
    segments = np.ones_like(tokens)
    segments[3, 9:] = segments[6, 2:] = 0
    batch = {
        "tokens": tokens,
        "targets": np.roll(tokens, -1, 1),
        "segments": segments,
        "weights": segments.astype(np.float32),
        "positions": np.tile(np.arange(16, dtype=np.int32), (8, 1)),
    }
    want = loss_and_gradients(config, None, params, batch)
    got = loss_and_gradients(config, make_mesh(shape), params, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6), got, want)


@pytest.mark.parametrize("shape", [(1, 1, 2, 1, 2), (1, 2, 2, 1, 1)], ids=str)
def test_experts_whose_blocks_of_codes_do_not_divide_are_whole_on_every_device(shape):
    experts = Experts(count=4, top_k=2, width=48, bias=True)  # three blocks of hidden units
    config = CONFIG.replace(experts=experts, weights=NF4Weights(block=16, double=False))
    mesh, params = make_mesh(Mesh(*shape), jax.devices()[:4]), random_params(config, 0)
    tokens = text(1, 4, 8) % 64
    want, _ = read(config, None, params, tokens)
    got, _ = read(config, mesh, jax.device_put(params, param_shardings(mesh, params)), tokens)
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.slow_except("1-sizes0")  # one program: steps of one token
@pytest.mark.parametrize("sizes", [(1, 1, 1), (5, 1)])
@pytest.mark.parametrize("rows", [1, 4])
def test_generation_on_a_mesh_of_experts_reads_what_one_device_reads(rows, sizes):
    config = CONFIG.replace(experts=Experts(count=4, top_k=2, width=20))
    mesh, params = make_mesh(Mesh(1, 1, 2, 1, 4)), random_params(config, 0)
    tokens = text(1, rows, sum(sizes)) % 64
    want, _ = read(config, None, params, tokens)
    spread = jax.device_put(params, param_shardings(mesh, params))
    cache, parts = cache_lib.create(config, rows, 6, mesh=mesh), []
    for part in np.split(tokens, np.cumsum(sizes)[:-1], 1):
        hidden, cache = read(config, mesh, spread, part, cache)
        parts.append(hidden)
    np.testing.assert_allclose(np.concatenate(parts, 1), want, atol=1e-5)
