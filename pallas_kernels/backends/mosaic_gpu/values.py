"""Values that a warpgroup holds in registers, laid out as the matrix unit (wgmma) leaves them."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

F32 = jnp.float32
WGMMA = plgpu.Layout.WGMMA


def fill(shape, value: float, axis: int | None = None):
    """A matrix of one value, or a vector that lies along axis `axis` of matrices."""
    layout = WGMMA if axis is None else WGMMA.reduce(1 - axis)
    return plgpu.layout_cast(jnp.full(shape, value, F32), layout)


def column(ref, axis: int):
    """A vector in shared memory that lies along axis `axis` of matrices."""
    index = inspect.signature(plgpu.load).parameters.get("idx")
    needed = index is not None and index.default is inspect.Parameter.empty  # until jax 0.10
    return plgpu.load(ref, **({"idx": ()} if needed else {}), layout=WGMMA.reduce(1 - axis))


def repeat(x, axis: int, shape):
    """A vector along axis `axis` of a matrix, repeated along the other."""
    return lax.broadcast_in_dim(x, shape, (axis,))


def iota(axis: int, shape):
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=WGMMA)


def rem(x, n: int):
    return jnp.zeros_like(x) if n == 1 else lax.rem(x, jnp.asarray(n, x.dtype))


def div(x, n: int):
    return x if n == 1 else lax.div(x, jnp.asarray(n, x.dtype))


def product(a, b, between: Callable = lambda: None):
    """a b^T of tiles in shared memory, float32."""

    def multiply(total):
        plgpu.wgmma(total, a, b.transpose((1, 0)))
        between()
        return total[...]

    return pl.run_scoped(multiply, plgpu.ACC((a.shape[0], b.shape[0]), F32))


def sums_on(starts, begin: Callable) -> list:
    """`starts` and the products that `begin(sums, ready)` adds to them; waits for the products.

    ready(i, later): what sum i is, while the last `later` products that were begun go on.
    """

    def run(sums):
        begin(sums, lambda i, later: plgpu.wgmma_accumulator_load(sums[i], wait_n=later))

    return pl.run_state(run)([plgpu.ACC.init(x) for x in starts])


def add_product(total, a, b) -> None:
    """Adds a b to a sum of products; a is of values in registers, b a tile in shared memory."""
    plgpu.wgmma(total, a.astype(b.dtype), b)
