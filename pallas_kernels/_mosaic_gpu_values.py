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
    needs_index = "idx" in inspect.signature(plgpu.load).parameters  # until jax 0.11
    return plgpu.load(ref, **({"idx": ()} if needs_index else {}), layout=WGMMA.reduce(1 - axis))


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


def sums_on(starts, begin: Callable, in_registers: bool) -> list:
    """`starts` and the products that `begin(sums, ready)` adds to them; waits for the products.

    ready(i, later): what sum i is, while the last `later` products that were begun go on. Pallas'
    interpreter has no sums that start at values: there the starts are added.
    """

    def run(*sums):
        def ready(i: int, later: int):
            found = plgpu.wgmma_accumulator_load(sums[i], wait_n=later)
            return found if in_registers else starts[i] + found

        begin(sums, ready)
        return None if in_registers else [ready(i, 0) for i in range(len(sums))]

    if in_registers:
        return pl.run_state(lambda sums: run(*sums))([plgpu.ACC.init(x) for x in starts])
    return pl.run_scoped(run, *(plgpu.ACC(x.shape, F32) for x in starts))


def add_product(total, a, b, place=None) -> None:
    """Adds a b to a sum of products; a is of values, b a tile in shared memory.

    place: where the values are put if they cannot be a factor, as in Pallas' interpreter.
    """
    a = a.astype(b.dtype)
    if place is not None:
        place[...] = a
        plgpu.commit_smem()
        a = place
    plgpu.wgmma(total, a, b)
