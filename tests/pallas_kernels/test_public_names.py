"""What is imported from the top of pallas_kernels is enough to call all of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import causal, everything, flash, tables


def test_every_public_name_exists_once():
    names = pallas_kernels.__all__
    assert names == sorted(set(names)) and all(hasattr(pallas_kernels, name) for name in names)


def test_a_table_is_made_and_used_with_public_names_alone():
    q = jnp.asarray(np.random.default_rng(0).normal(size=(1, 8, 2, 4)), jnp.float32)
    table = tables.from_mask(causal(), queries=8, keys=8, q_block=4, k_block=4)
    assert isinstance(table, pallas_kernels.BlockTable)
    np.testing.assert_allclose(
        flash(q, q, q, causal(), table=table)[0], flash(q, q, q, causal())[0], atol=1e-6
    )
    only_first = tables.from_block_mask(np.array([[True, False]] * 2), q_block=4, k_block=4)
    found = flash(q, q, q, everything(), table=only_first)[0]
    np.testing.assert_allclose(found, flash(q, q[:, :4], q[:, :4])[0], atol=1e-6)


def test_forward_mode_is_that_of_the_reference():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 4, 1, 8)), jnp.float32)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda q: flash(q, x, x)[0], (x,), (x,))

    def attend(q):
        return flash(q, x, x, implementation="reference")[0]

    # The transpose of a gradient is linear, and its transpose is the forward mode.
    def transposed(u):
        return jax.vjp(lambda q: flash(q, x, x)[0], x)[1](u)[0]

    _, want = jax.jvp(attend, (x,), (x,))
    np.testing.assert_allclose(jax.vjp(transposed, x)[1](x)[0], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "second",
    [
        lambda f, x: jax.grad(lambda q: jax.grad(f)(q).sum())(x),
        lambda f, x: jax.jit(jax.hessian(f))(x),
        lambda f, x: jax.jvp(jax.jit(jax.grad(f)), (x,), (x,)),
        lambda f, x: jax.grad(lambda q: jax.grad(jax.checkpoint(f))(q).sum())(x),
    ],
)
@pytest.mark.parametrize("implementation", [None, "xla"])
def test_second_derivatives_are_those_of_the_reference(second, implementation):
    rng = np.random.default_rng(0)
    x, k = (jnp.asarray(rng.normal(size=(1, 4, n, 8)), jnp.float32) for n in (2, 1))
    segments = jnp.asarray([[1, 1, 2, 2]])

    def total(q, implementation):
        options = {"q_segments": segments, "k_segments": segments, "soft_cap": 3.0}
        out, lse = flash(q, k, k, causal(), implementation=implementation, **options)
        return (out**2).sum() + (lse * out[..., 0]).sum()

    results, expected = (
        second(functools.partial(total, implementation=name), x)
        for name in (implementation, "reference")
    )
    for one, other in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
