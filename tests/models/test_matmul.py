"""The matrix product's own gradient rule against JAX's."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lcjax.models.matmul import matmul


def _inputs(shape, outputs, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], shape, dtype)
    kernel = jax.random.normal(keys[1], (shape[-1], outputs), dtype)
    return x, kernel, jax.random.normal(keys[2], (*shape[:-1], outputs), dtype)


@pytest.mark.parametrize("shape", [(7, 5), (2, 3, 5), (1, 5), (2, 1, 3, 5)], ids=str)
def test_value_and_gradients_equal_the_plain_product(shape):
    x, kernel, dy = _inputs(shape, 11)
    got, pull = jax.vjp(matmul, x, kernel)
    want, pull_plain = jax.vjp(jnp.matmul, x, kernel)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    for a, b in zip(pull(dy), pull_plain(dy), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_16_bit_operands_keep_their_dtype():
    x, kernel, dy = _inputs((2, 3, 5), 4, jnp.bfloat16)
    y, pull = jax.vjp(matmul, x, kernel)
    assert {y.dtype, *(d.dtype for d in pull(dy))} == {jnp.dtype("bfloat16")}


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
