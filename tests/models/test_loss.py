"""The chunked loss against optax on sizes that are no multiple of any block."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lcjax.models.loss import Projection, cross_entropy, token_nll
from lcjax.parallel.sharding import Mesh, batch_sharding, make_mesh


def _inputs(batch, length, width, vocabulary, seed=0):
    random = np.random.default_rng(seed)
    shapes = (batch, length, width), (width, vocabulary), (vocabulary,)
    hidden, kernel, bias = (random.normal(size=shape).astype(np.float32) for shape in shapes)
    targets = random.integers(0, vocabulary, (batch, length), np.int32)
    weights = np.float32(1.5) * (random.uniform(size=(batch, length)) > 0.3)
    return hidden, 0.3 * kernel, bias, targets, weights


def _optax_loss(hidden, kernel, bias, targets, weights):
    nll = optax.softmax_cross_entropy_with_integer_labels(hidden @ kernel + bias, targets)
    return (nll * weights).sum() / weights.sum()


@pytest.mark.slow_except(
    "own head-2-29-257-None",
    "tied-1-50-333-999",
    "tied-2-29-257-None",
    "tied-2-13-127-4",
    "tied-3-37-1001-16",
    "tied-1-1-2-1",
)
@pytest.mark.parametrize(
    ("batch", "length", "vocabulary", "chunk"),
    [(1, 1, 2, 1), (2, 13, 127, 4), (3, 37, 1001, 16), (2, 29, 257, None), (1, 50, 333, 999)],
)
@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied"])
def test_loss_and_gradients_equal_optax(batch, length, vocabulary, chunk, tied):
    hidden, kernel, bias, targets, weights = _inputs(batch, length, 24, vocabulary)
    weights[0, 0] = 0.7  # at least one token counts

    def ours(hidden, kernel, bias, weights):
        projection = Projection(kernel.T if tied else kernel, bias, tied)
        total, count = cross_entropy(hidden, projection, targets, weights, chunk=chunk)
        return total / count

    def peer(hidden, kernel, bias, weights):
        return _optax_loss(hidden, kernel, bias, targets, weights)

    arguments = (hidden, kernel, bias, weights)
    got = jax.jit(jax.value_and_grad(ours, argnums=(0, 1, 2, 3)))(*arguments)
    want = jax.jit(jax.value_and_grad(peer, argnums=(0, 1, 2, 3)))(*arguments)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), got, want)


def test_token_nll_is_the_loss_of_each_position():
    hidden, kernel, bias, targets, _ = _inputs(2, 23, 16, 91)
    want = optax.softmax_cross_entropy_with_integer_labels(hidden @ kernel + bias, targets)
    got = jax.jit(lambda *x: token_nll(x[0], Projection(*x[1:]), targets, chunk=7))
    got = got(hidden, kernel, bias)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied"])
def test_gradients_of_token_nll_equal_optax_in_any_loss_of_it(tied):
    hidden, kernel, bias, targets, _ = _inputs(6, 13, 16, 91)

    def mixture(nll):
        """-log of a mean over three rows of the product over tokens: no sum over tokens."""
        return -jax.nn.logsumexp(-nll.sum(-1).reshape(2, 3), axis=1).sum() + (nll**2).mean()

    def ours(hidden, kernel, bias):
        projection = Projection(kernel.T if tied else kernel, bias, tied)
        return mixture(token_nll(hidden, projection, targets, chunk=5))

    def peer(hidden, kernel, bias):
        logits = hidden @ kernel + bias
        return mixture(optax.softmax_cross_entropy_with_integer_labels(logits, targets))

    got, want = (
        jax.jit(jax.value_and_grad(one, argnums=(0, 1, 2)))(hidden, kernel, bias)
        for one in (ours, peer)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=3e-6), got, want)


def test_padding_and_unscored_tokens_change_neither_loss_nor_gradients():
    hidden, kernel, _, targets, weights = _inputs(2, 17, 16, 50)
    weights[:, 11:] = 0

    def loss(hidden, kernel, length):
        total, count = cross_entropy(
            hidden[:, :length],
            Projection(kernel),
            targets[:, :length],
            weights[:, :length],
            chunk=5,
        )
        return total / count

    both = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)), static_argnums=2)
    long, short = (both(hidden, kernel, length) for length in (17, 11))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), long, short)


def test_logits_of_a_long_sequence_never_exist_in_the_backward_pass():
    shapes = (
        jax.ShapeDtypeStruct((1, 8192, 32), jnp.float32),
        jax.ShapeDtypeStruct((32, 4001), jnp.float32),
    )
    targets, weights = jnp.zeros((1, 8192), jnp.int32), jnp.ones((1, 8192))

    def loss(hidden, kernel):
        return cross_entropy(hidden, Projection(kernel), targets, weights, chunk=64)[0]

    memory = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*shapes).compile().memory_analysis()
    whole = 8192 * 4001 * 4
    assert memory.temp_size_in_bytes < whole / 8


@pytest.mark.parametrize("shape", [Mesh(8, 1, 1), Mesh(2, 2, 2)], ids=str)
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no bias"])
def test_each_device_goes_through_its_rows_and_the_kernels_gradient_crosses_once(shape, biased):
    mesh = make_mesh(shape)
    hidden, kernel, bias, targets, weights = _inputs(8, 13, 16, 64)
    bias = bias if biased else None
    rows = batch_sharding(mesh)
    spread = [jax.device_put(x, rows) for x in (hidden, targets, weights)]

    def grads(hidden, targets, weights, mesh=None):
        def total(hidden, kernel, bias, weights):
            return cross_entropy(
                hidden, Projection(kernel, bias), targets, weights, chunk=4, mesh=mesh
            )[0]

        argnums = (0, 1, 2, 3) if biased else (0, 1, 3)
        return jax.value_and_grad(total, argnums)(hidden, kernel, bias, weights)

    want = jax.jit(grads)(hidden, targets, weights)
    program = jax.jit(functools.partial(grads, mesh=mesh)).lower(*spread).compile()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 2e-5, 2e-5), program(*spread), want)
    loops = re.findall(r"^%?\S*(?:body|region)\S* .*?^}", program.as_text(), re.M | re.S)
    assert loops  # 13 positions in chunks of 4 are a loop
    assert not [body for body in loops if re.search(r"f32\[16,\d+\]\S* all-reduce\(", body)]
    assert re.search(r"f32\[16,\d+\][^=]*all-reduce", program.as_text())


def test_a_target_that_is_no_token_counts_nothing_where_its_weight_is_zero():
    hidden, kernel, _, targets, weights = _inputs(2, 9, 16, 50)
    weights[0, 3] = 0

    def loss(hidden, targets):
        return cross_entropy(hidden, Projection(kernel), targets, weights, chunk=4)[0]

    both = jax.jit(jax.value_and_grad(loss))
    want = both(hidden, targets)
    for ignored in (-100, -1, 50, 10**6):
        changed = targets.copy()
        changed[0, 3] = ignored
        got = both(hidden, changed)
        jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_gradients_of_scaled_and_capped_logits_are_those_of_autodiff(tied):
    keys = jax.random.split(jax.random.key(0), 4)
    hidden = jax.random.normal(keys[0], (2, 7, 8))
    kernel = jax.random.normal(keys[1], (11, 8) if tied else (8, 11))
    targets = jax.random.randint(keys[2], (2, 7), 0, 11)
    weights = jax.random.uniform(keys[3], (2, 7))

    def projected(kernel):
        return Projection(kernel, None, tied, 0.7, 1.5)

    def fused(hidden, kernel):
        return cross_entropy(hidden, projected(kernel), targets, weights, chunk=3)[0]

    def plain(hidden, kernel):
        logits = 1.5 * jnp.tanh(hidden @ (kernel.T if tied else kernel) * 0.7 / 1.5)
        nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]
        return (weights * nll).sum()

    np.testing.assert_allclose(fused(hidden, kernel), plain(hidden, kernel), rtol=1e-6)
    for mine, expected in zip(
        jax.grad(fused, (0, 1))(hidden, kernel), jax.grad(plain, (0, 1))(hidden, kernel)
    ):
        np.testing.assert_allclose(mine, expected, atol=1e-6)
    nll = token_nll(hidden, projected(kernel), targets, chunk=3)
    np.testing.assert_allclose((weights * nll).sum(), plain(hidden, kernel), rtol=1e-6)
