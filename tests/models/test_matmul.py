"""The matrix product's own gradient rule against JAX's."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lcjax.models.layers import matmul


def _inputs(shape, outputs, dtype=jnp.float32):
    random = np.random.default_rng(0)
    shapes = shape, (shape[-1], outputs), (*shape[:-1], outputs)
    return [jnp.asarray(random.normal(size=s), dtype) for s in shapes]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _both(ours, plain, x, kernel, dy):
    """Value and gradients of two products."""
    results = []
    for product in (ours, plain):
        y, pull = jax.vjp(product, x, kernel)
        results.append((y, *pull(dy)))
    return results


@pytest.mark.parametrize("shape", [(7, 5), (2, 3, 5), (1, 5), (2, 1, 3, 5)], ids=str)
def test_value_and_gradients_equal_the_plain_product(shape):
    x, kernel, dy = _inputs(shape, 11)
    (got, *grads), (want, *plain) = _both(matmul, jnp.matmul, x, kernel, dy)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    for a, b in zip(grads, plain, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_16_bit_operands_keep_their_dtype():
    x, kernel, dy = _inputs((2, 3, 5), 4, jnp.bfloat16)
    found, _ = jax.eval_shape(functools.partial(_both, matmul, jnp.matmul), x, kernel, dy)
    assert {leaf.dtype for leaf in found} == {jnp.dtype("bfloat16")}


def test_32_bit_operands_are_not_rounded_on_accelerators():
    x, kernel, _ = _inputs((3, 5), 4)
    text = jax.jit(matmul).lower(x, kernel).as_text()
    assert "precision = [HIGHEST, HIGHEST]" in text
    low = jax.jit(matmul).lower(x.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16)).as_text()
    assert "HIGHEST" not in low


def test_a_frozen_kernel_costs_no_gradient():
    def loss(x, kernel):
        return jnp.sin(matmul(jnp.sin(matmul(x, kernel)), kernel.T)).sum()

    x, kernel, _ = _inputs((6, 5), 4)
    products = {
        which: len(
            re.findall(r" dot\(| custom-call\(", _compiled(jax.grad(loss, which), x, kernel))
        )
        for which in (0, (0, 1))
    }
    assert products[0] < products[0, 1]


def _compiled(function, *arguments):
    return jax.jit(function).lower(*arguments).compile().as_text()
