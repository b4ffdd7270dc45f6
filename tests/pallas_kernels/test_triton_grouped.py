"""Triton kernels of products of groups of rows, interpreted, beside products in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import grouped, self_check
from pallas_kernels.backends.triton import grouped as kernels
from pallas_kernels.dispatch import CannotRun

# Inputs, outputs, rows of a block, blocks of each group; one more block belongs to no group.
CALLS = {
    "whole tiles": (64, 128, 64, (2, 1)),
    "parts of tiles, and an empty group": (80, 130, 16, (3, 0, 1, 2)),
    "blocks of several tiles": (40, 24, 256, (1, 2)),
    "no row of any group": (16, 16, 16, (0, 0)),
}


def case(name):
    inputs, outputs, block, counts = CALLS[name]
    rng, rows = np.random.default_rng(0), block * (sum(counts) + 1)
    x, dy = rng.normal(size=(rows, inputs)), rng.normal(size=(rows, outputs))
    w = rng.normal(size=(len(counts), inputs, outputs))
    owners = np.repeat(np.arange(len(counts) + 1), [*counts, 1]).astype(np.int32)
    return x, w, dy, owners, np.array(counts, np.int32) * block, block


def oracle(x, w, dy, owners, block):
    """x W, dy W^T and the sums of x^T dy."""
    y, dx, dw = np.zeros_like(dy), np.zeros_like(x), np.zeros_like(w)
    for number, owner in enumerate(owners):
        at = slice(number * block, (number + 1) * block)
        if owner < len(w):
            y[at], dx[at] = x[at] @ w[owner], dy[at] @ w[owner].T
            dw[owner] += x[at].T @ dy[at]
    return y, dx, dw


def results(x, w, dy, owners, sizes, block, dtype, w_dtype):
    x, dy, w = jnp.asarray(x, dtype), jnp.asarray(dy, dtype), jnp.asarray(w, w_dtype)
    options = {"block": block, "interpret": True}
    return (
        kernels.products(x, w, owners, **options),
        kernels.products(dy, w, owners, transpose=True, **options),
        kernels.sums(x, dy, sizes, **options),
    )


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("wide", [False, True])
def test_products_and_gradients_are_those_of_each_group(name, wide):
    x, w, dy, owners, sizes, block = case(name)
    with jax.enable_x64(wide):
        actual = results(x, w, dy, owners, sizes, block, jnp.float32, jnp.float32)
    for a, b in zip(actual, oracle(x, w, dy, owners, block), strict=True):
        assert a.dtype == jnp.float32
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_matrices_of_another_dtype_are_rounded_to_that_of_the_rows():
    x, w, dy, owners, sizes, block = case("parts of tiles, and an empty group")
    actual = results(x, w, dy, owners, sizes, block, jnp.bfloat16, jnp.float32)
    rounded = (np.asarray(jnp.asarray(y, jnp.bfloat16), np.float64) for y in (x, w, dy))
    y, dx, dw = oracle(*rounded, owners, block)
    assert [a.dtype for a in actual] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]
    for a, b in zip(actual[:2], (y, dx), strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b, atol=2**-8 * np.abs(b).max())
    np.testing.assert_allclose(actual[2], dw, atol=1e-4)


def described(kind="NVIDIA H100 80GB HBM3"):
    device = jax.sharding.AbstractDevice(kind, None, "gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def test_kernels_run_on_gpus_where_they_passed_their_check(monkeypatch):
    x, w = jnp.zeros((64, 8), jnp.bfloat16), jnp.zeros((2, 8, 8), jnp.bfloat16)
    assert grouped.gpu_kernels(x, w, 32) is None  # of this process
    with described("NVIDIA Tesla T4"):
        assert grouped.gpu_kernels(x, w, 32) is None
    with described():
        assert grouped.gpu_kernels(x, w, 32) is kernels
        assert grouped.gpu_kernels(x, w, 8) is None
        assert grouped.gpu_kernels(x.astype(jnp.float16), w, 32) is None
        assert "blocks of 24 rows" in kernels.unsupported(x, w, 24)
        for outcome in ("passed", "relative error of dk 3.0e-01"):
            passed = {"triton": {self_check.GROUPED: {"forward": "passed", "backward": outcome}}}
            monkeypatch.setattr(self_check, "results", lambda dtype, passed=passed: passed)
            chosen = grouped.gpu_kernels(x, w, 32)
            assert chosen is (kernels if outcome == "passed" else None)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_self_check_tells_right_kernels_from_wrong_ones(dtype, monkeypatch):
    monkeypatch.setattr(kernels, "unsupported", lambda *x: None)
    for name in ("products", "sums"):
        interpreted = getattr(kernels, name)
        monkeypatch.setattr(
            kernels, name, lambda *x, f=interpreted, **y: f(*x, interpret=True, **y)
        )
    check = self_check.cases(dtype)[self_check.GROUPED]._replace(size=32)
    inputs = self_check.arrays(check, dtype)
    actual = jax.jit(self_check.program(check, "triton", True))(*inputs)
    actual = {name: np.asarray(x, np.float32) for name, x in actual.items()}
    wanted = self_check.expected(check, inputs, True)
    assert actual.keys() == wanted.keys() == {"out", "dq", "dk"}
    assert self_check.compare(actual, wanted, dtype) == self_check.PASSED
    assert self_check.compare(actual | {"dk": 1.1 * actual["dk"]}, wanted, dtype) != "passed"


def test_the_self_check_of_float16_finds_no_kernel():
    check = self_check.cases("float16")[self_check.GROUPED]._replace(size=32)
    inputs = self_check.arrays(check, "float16")
    with described(), pytest.raises(CannotRun, match="rows of float16"):
        self_check.program(check, "triton", True)(*inputs)
    with pytest.raises(CannotRun, match="it has none"):
        self_check.program(check, "cudnn", True)
