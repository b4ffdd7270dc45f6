"""Bytes that are live at a time, against counts made by hand and against a compiler."""

import jax
import jax.numpy as jnp
import pytest

from lcjax import cost
from lcjax.attention import Sliding
from lcjax.cost.liveness import peak_bytes
from lcjax.models import Decoder, LayerKind, head, preset
from lcjax.models.loss import cross_entropy
from lcjax.models.mixer import GatedDeltaNet
from lcjax.models.remat import policy
from lcjax.parallel.sharding import Mesh

N = 64  # rows and columns of every array
ARRAY = jax.ShapeDtypeStruct((N, N), jnp.float32)
SIZE = 4 * N * N


def peak(function, *arguments, weights=0, platform="tpu", gathers=False):
    """Arrays of SIZE bytes that are live at most, on the device and its host."""
    traced = jax.make_jaxpr(function)(*arguments)
    device, host = peak_bytes(traced, weights, platform, gathers=gathers)
    return device / SIZE, host / SIZE


def test_elementwise_results_are_stored_for_products_alone():
    def chain(x, y):
        return jnp.exp(jnp.tanh(x) * 2 + y).sum()

    assert peak(chain, ARRAY, ARRAY)[0] < 0.01
    assert peak(lambda x, y: (chain(x, y) * x) @ y, ARRAY, ARRAY)[0] == pytest.approx(2, abs=0.01)


def test_an_array_is_live_from_its_first_use_to_its_last():
    def two_live(x, w):
        for _ in range(5):
            x = x @ w
        return x.sum()

    def four_live(x, w):
        first, second = x @ w, w @ x
        return (first @ second @ w + second @ first).sum()

    assert peak(two_live, ARRAY, ARRAY)[0] == 2
    # Both products and the first of the next line; later the second is read as that is written.
    assert peak(four_live, ARRAY, ARRAY)[0] == 4


def test_a_fused_result_takes_the_memory_of_an_operand_that_ends():
    def update(x, w):
        y = x @ w
        return (y * 2 + 1) @ w  # y becomes the left operand

    assert peak(update, ARRAY, ARRAY)[0] == 2


def test_loops_have_stacks_and_one_iteration():
    def loss(w, x):
        def body(x, _):
            return jnp.sin(x @ w), None

        return jax.lax.scan(body, x, None, length=10)[0].sum()

    gradient = jax.grad(loss, argnums=1)
    plain = peak(gradient, ARRAY, ARRAY)[0]
    assert 10 < plain < 14  # the stack, and two or three arrays of an iteration
    assert peak(loss, ARRAY, ARRAY)[0] == 2


def test_stacks_on_the_host_are_counted_there():
    def loss(x):
        def body(x, _):
            x = jax.ad_checkpoint.checkpoint_name(x, "input")
            return jnp.tanh(x @ x), None

        body = jax.checkpoint(body, policy=policy("input=host"), prevent_cse=False)
        return jax.lax.scan(body, x, None, length=10)[0].sum()

    device, host = peak(jax.grad(loss), ARRAY)
    assert 10 <= host <= 11 and device < 8


def test_weights_are_counted_where_they_are_gathered():
    stack = jax.ShapeDtypeStruct((10, N, N), jnp.float32)

    def gradient(stack, x):
        def loss(stack, x):
            return jax.lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, stack)[0].sum()

        return jax.grad(loss)(stack, x)

    shared, whole = (peak(gradient, stack, ARRAY, weights=1, gathers=x)[0] for x in (True, False))
    # One of the ten weights, of which neither the stack nor the gradients are counted.
    assert shared == whole + 1 < 26


def test_branches_of_other_platforms_are_not_counted():
    def small(x):
        return x @ x

    def large(x):
        return jnp.concatenate([x @ x, x @ x, x @ x]).reshape(3, N, N).swapaxes(1, 2)[0] @ x

    def by_platform(x):
        return jax.lax.platform_dependent(x, cpu=large, default=small).sum()

    assert peak(by_platform, ARRAY)[0] < 1.1 and peak(by_platform, ARRAY, platform="cpu")[0] > 3


def test_numbers_that_other_platforms_read_in_a_loop_are_not_counted():
    """A gradient spreads the numbers of a table that TPUs select from, before the loop."""
    codes = jax.ShapeDtypeStruct((3, N, N), jnp.uint8)

    def selected(codes, table=tuple(range(16))):
        half = len(table) // 2
        if not half:
            return jnp.float32(table[0])
        low, high = (selected(codes, part) for part in (table[:half], table[half:]))
        return jnp.where((codes & half).astype(bool), high, low)

    def gradient(of_tpu):
        def step(x, codes):
            matrix = jax.lax.platform_dependent(codes, tpu=of_tpu, default=jnp.float32)
            return jnp.tanh(x @ matrix), None

        return jax.grad(lambda x, codes: jax.lax.scan(step, x, codes)[0].sum())

    few = peak(gradient(lambda codes: 3 * codes.astype(jnp.float32)), ARRAY, codes, platform="gpu")
    assert peak(gradient(selected), ARRAY, codes, platform="gpu") == few
    assert peak(gradient(selected), ARRAY, codes) > few


def test_a_cpu_computes_with_half_precision_as_float32():
    half = jax.ShapeDtypeStruct((N, N), jnp.bfloat16)
    sizes = [peak(lambda x: (x @ x) @ x, half, platform=x)[0] for x in ("tpu", "cpu")]
    assert sizes == [1, 2]


def estimated_and_compiled(config, length):
    """Bytes of activations of two texts: as estimated, and as XLA for CPUs allocates them."""
    config = config.replace(scan_layers=True)
    model = Decoder(config)

    def loss(params, tokens):
        hidden = model.apply({"params": params}, tokens).hidden
        return cross_entropy(hidden, head(params, config), tokens, jnp.ones(tokens.shape))[0]

    tokens = jax.ShapeDtypeStruct((2, length), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
    compiled = jax.jit(jax.grad(loss)).lower(params, tokens).compile().memory_analysis()
    memory = cost.training_memory(config, length, 2, Mesh(fsdp=1), platform="cpu")
    return memory.activations, compiled.temp_size_in_bytes


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "attention", "dots", "full"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_training_step_has_the_memory_that_the_cpu_compiler_gives_it(remat, dtype):
    config = preset("tiny").replace(num_layers=4, width=256, mlp_width=704, vocab_size=4096)
    estimated, compiled = estimated_and_compiled(config.replace(remat=remat, dtype=dtype), 4096)
    assert estimated == pytest.approx(compiled, rel=0.1)


def test_layers_of_several_kinds_have_the_memory_that_the_cpu_compiler_gives_them():
    kinds = LayerKind(2, pattern=Sliding(window=10)), LayerKind()
    config = preset("tiny").replace(num_layers=6, layers=kinds)
    estimated, compiled = estimated_and_compiled(config, 1024)
    assert estimated == pytest.approx(compiled, rel=0.05)


@pytest.mark.parametrize("remat", ["dots", pytest.param("full", marks=pytest.mark.slow)])
def test_a_stack_with_mixers_has_the_memory_that_the_cpu_compiler_gives_it(remat):
    mixer = GatedDeltaNet(key_heads=4, value_heads=8, key_dim=32, value_dim=64)
    kinds = LayerKind(3, mixer=mixer), LayerKind()
    config = preset("tiny").replace(num_layers=4, layers=kinds, remat=remat, width=256)
    estimated, compiled = estimated_and_compiled(config, 2048)
    assert estimated == pytest.approx(compiled, rel=0.15)
