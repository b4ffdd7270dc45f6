"""Products of groups of rows, each with a matrix of its own, for NVIDIA GPUs in Pallas-Triton.

A program of `products` computes a tile of the result: some rows of one group, times some columns of
its matrix. Programs of the same rows run one after another, so the rows are read from memory once,
and matrices stay in the L2 cache. A program of `sums` computes a tile of the product of a group's
rows, over all of them. Neither adds anything in memory: results are bitwise reproducible.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import nvidia
from pallas_kernels.backends.triton import kernels
from pallas_kernels.backends.triton.kernels import F32, arange, plt, product

LEAST_BLOCK = 16  # rows of a product on tensor cores


def unsupported(x, w, block: int) -> str | None:
    """Returns why these kernels cannot multiply rows x [R, I] with matrices w, or None."""
    if nvidia.architecture() is None:
        return "no NVIDIA GPU of compute capability 8.0 or above is known to this process"
    if kernels.plt is None:
        return "this version of JAX has no Pallas-Triton"
    if str(x.dtype) not in ("float32", "bfloat16") or w.dtype.itemsize not in (2, 4):
        return f"rows of {x.dtype} and matrices of {w.dtype}"
    if block < LEAST_BLOCK or block & (block - 1):
        return f"blocks of {block} rows"
    return None


def products(x, w, owners, *, block: int, transpose: bool = False, interpret=False):
    """Returns x W [R, O] in the dtype of x, or x W^T with `transpose`, for the W of each block.

    Args:
      x: rows [R, I], or [R, O] with `transpose`; float32 or bfloat16.
      w: matrices [E, I, O]; they are converted to the dtype of x.
      owners: int32 [R / block], the matrix of each block of rows; from E on, their results are 0.
      block: rows of a block, a power of two.
    """
    (count, *sizes), rows = w.shape, x.shape[0]
    inner, columns = reversed(sizes) if transpose else sizes
    tile = nvidia.grouped_tile(x.dtype)
    tile = tile._replace(rows=min(tile.rows, block))
    whole = pl.BlockSpec(x.shape, lambda j, i: (0, 0))
    kernel = functools.partial(
        _products_kernel, tile, block // tile.rows, (count, inner, columns), transpose, interpret
    )
    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((rows, columns), x.dtype),
        grid=(pl.cdiv(columns, tile.columns), rows // tile.rows),
        in_specs=[
            whole,
            pl.BlockSpec(w.shape, lambda j, i: (0, 0, 0)),
            pl.BlockSpec(owners.shape, lambda j, i: (0,)),
        ],
        out_specs=pl.BlockSpec((rows, columns), lambda j, i: (0, 0)),
        interpret=interpret,
        name="lcjax_grouped_products",
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
    )
    with jax.enable_x64(False):  # indices have 32 bits
        return call(x, w, owners)


def sums(x, dy, sizes, *, block: int, interpret=False):
    """Returns x^T dy of the rows of each group, float32 [E, I, O]: the gradient of matrices.

    Args:
      x, dy: rows [R, I] and [R, O] of one dtype, float32 or bfloat16.
      sizes: int32 [E], rows of each group, multiples of `block`.
      block: rows of a block, a power of two.
    """
    (rows, inner), columns, count = x.shape, dy.shape[1], sizes.shape[0]
    tile = nvidia.grouped_tile(x.dtype)
    step = min(tile.inner, block)
    ends = jnp.cumsum(sizes).astype(jnp.int32)
    side = tile.columns
    call = pl.pallas_call(
        functools.partial(_sums_kernel, side, step, (inner, columns), interpret),
        out_shape=jax.ShapeDtypeStruct((count, inner, columns), F32),
        grid=(pl.cdiv(columns, side), pl.cdiv(inner, side), count),
        in_specs=[
            pl.BlockSpec((rows, inner), lambda j, i, e: (0, 0)),
            pl.BlockSpec((rows, columns), lambda j, i, e: (0, 0)),
            pl.BlockSpec(ends.shape, lambda j, i, e: (0,)),
            pl.BlockSpec(ends.shape, lambda j, i, e: (0,)),
        ],
        out_specs=pl.BlockSpec((None, inner, columns), lambda j, i, e: (e, 0, 0)),
        interpret=interpret,
        name="lcjax_grouped_sums",
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
    )
    with jax.enable_x64(False):
        return call(x, dy, (ends - sizes).astype(jnp.int32), ends)


class _Part(NamedTuple):
    """Some successive indices of an axis: `size` from `start`, of which those below `end` exist."""

    start: jax.Array | int
    size: int
    end: int

    @property
    def slice(self):
        return pl.ds(self.start, self.size)

    @property
    def exists(self):
        """Whether each index exists; None if all do, wherever the part begins."""
        if self.end % self.size == 0:
            return None
        return arange(self.start, self.size) < self.end


def _load(ref, rows: _Part, columns: _Part, dtype, *lead):
    """Loads a matrix, with 0 for what does not exist."""
    mask = _mask(rows, columns)
    other = None if mask is None else jnp.zeros((), ref.dtype)
    return plt.load(ref.at[*lead, rows.slice, columns.slice], mask=mask, other=other).astype(dtype)


def _store(ref, rows: _Part, columns: _Part, value):
    at = ref.at[rows.slice, columns.slice]
    plt.store(at, value.astype(ref.dtype), mask=_mask(rows, columns))


def _mask(rows: _Part, columns: _Part):
    by_row, by_column = rows.exists, columns.exists
    parts = [] if by_row is None else [by_row[:, None]]
    parts += [] if by_column is None else [by_column[None]]
    parts = [jnp.broadcast_to(x, (rows.size, columns.size)) for x in parts]
    return functools.reduce(jnp.logical_and, parts) if parts else None


def _products_kernel(tile, per_block, sizes, transpose, interpret, x, w, owners, out):
    count, inner, columns = sizes
    row = _Part(pl.program_id(1) * tile.rows, tile.rows, x.shape[0])
    column = _Part(pl.program_id(0) * tile.columns, tile.columns, columns)
    owner = plt.load(owners.at[lax.div(pl.program_id(1), per_block)])
    index = jnp.minimum(owner, count - 1)

    def step(i, total):
        part = _Part(i * tile.inner, tile.inner, inner)
        left = _load(x, row, part, x.dtype)
        if transpose:
            return total + product(left, _load(w, column, part, x.dtype, index), 1, 1, interpret)
        return total + product(left, _load(w, part, column, x.dtype, index), 0, 1, interpret)

    steps = jnp.where(owner < count, jnp.int32(pl.cdiv(inner, tile.inner)), jnp.int32(0))
    zeros = jnp.zeros((tile.rows, tile.columns), F32)
    _store(out, row, column, lax.fori_loop(0, steps, step, zeros))


def _sums_kernel(side, rows, sizes, interpret, x, dy, starts, ends, out):
    inner, columns = sizes
    group = pl.program_id(2)
    row = _Part(pl.program_id(1) * side, side, inner)
    column = _Part(pl.program_id(0) * side, side, columns)
    start, end = plt.load(starts.at[group]), plt.load(ends.at[group])

    def step(i, total):
        part = _Part(start + i * rows, rows, rows)
        left, right = _load(x, part, row, x.dtype), _load(dy, part, column, x.dtype)
        return total + product(left, right, 0, 0, interpret)

    zeros = jnp.zeros((side, side), F32)
    _store(out, row, column, lax.fori_loop(0, lax.div(end - start, rows), step, zeros))
