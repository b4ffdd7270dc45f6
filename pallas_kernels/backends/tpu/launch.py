"""Starts a TPU kernel on a call's grid, and joins the outputs of all calls."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.backends.tpu.kernels import Body
from pallas_kernels.backends.tpu.layout import LANES, Layout
from pallas_kernels.backends.tpu.tables import Call, Visits, calls, col_of, row_of

ROW_OPERANDS = ("q", "d_out", "q_index", "q_segments", "slopes", "lse", "di")
MATRICES = ("q", "k", "v", "d_out")
SCALARS = ("starts", "levels")  # in scalar memory as a whole


def every_call(found: Visits, cut: Layout, axis: int, run):
    """The outputs of `run(call)`, each [batch, heads, ...], of all calls together."""
    sizes = dict(rows=cut.count, cols=cut.key_count, batch=cut.batch, heads=cut.heads)
    parts = [
        _join([_join([run(call) for call in row], 1) for row in rows], 0)
        for rows in calls(found, axis, **sizes)
    ]
    return _join(parts, -2)


def _join(parts, axis: int):
    """Matrices lie as [batch, heads, rows, size] and vectors as [batch, heads, 1, rows]."""
    if len(parts) == 1:
        return parts[0]

    def join(*xs):
        vector = axis == -2 and xs[0].shape[2] == 1
        return jnp.concatenate(xs, 3 if vector else axis)

    return jax.tree.map(join, *parts)


def launch(kernel, body: Body, cut: Layout, x, call: Call, *, axis, outputs, scratch, interpret):
    """One kernel call; `axis` says whether row blocks (0) or key blocks (1) stay.

    outputs: see `start`; scratch likewise.
    """
    staying = cut.key_block if axis else cut.rows
    columns = {
        name: pltpu.VMEM((staying, LANES), value.dtype)
        for name, value in x.items()
        if value is not None
        and name not in (*MATRICES, *SCALARS)
        and (name in ROW_OPERANDS) == (axis == 0)
    }

    def memory(item):
        dtype, width, rows = _sized(item, staying)
        return pltpu.VMEM((rows, width), dtype)

    return start(
        functools.partial(kernel, body, call),
        f"lcjax_{kernel.__name__}",
        x,
        call,
        axis=axis,
        staying=staying,
        operand=lambda name, value: _operand(name, value, cut, call),
        outputs=outputs,
        scratch=(columns, *(None if item is None else memory(item) for item in scratch)),
        interpret=interpret,
    )


def start(kernel, name: str, x, call: Call, *, axis, staying, operand, outputs, scratch, interpret):
    """A kernel on a call's grid; `staying` is the length of a block that stays.

    operand: (name, value) -> the block of an operand that a step reads.
    outputs: (dtype, width) each, width None for a vector, or (dtype, width, rows) where the rows
    are not those of the block that stays; None is left out.
    """
    batch, heads, blocks = (hi - lo for lo, hi in (call.batch, call.heads, call.blocks))

    def shape(output):
        dtype, width, rows = _sized(output, staying)
        length = blocks * rows
        sizes = (1, length) if width is None else (length, width)
        return jax.ShapeDtypeStruct((batch, heads, *sizes), dtype)

    def block(output):
        return _output(*_sized(output, staying)[1:], call=call, axis=axis)

    def each(f):
        return tuple(None if output is None else f(output) for output in outputs)

    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(batch, heads, call.grid),
        in_specs=[{name: operand(name, value) for name, value in x.items()}],
        out_specs=each(block),
        scratch_shapes=scratch,
    )
    run = pl.pallas_call(
        kernel,
        out_shape=each(shape),
        grid_spec=grid_spec,
        interpret=interpret,
        name=name,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
    )
    return run(jnp.asarray(call.steps), x)


def _sized(item, staying: int):
    dtype, width, *rows = item
    return dtype, width, *(rows or [staying])


def _operand(name: str, value, cut: Layout, call: Call):
    """The block of an operand that a step reads."""
    if value is None:
        return None
    if name in SCALARS:
        return pl.BlockSpec(memory_space=pltpu.SMEM)
    by_row = name in ROW_OPERANDS
    size = cut.rows if by_row else cut.key_block
    place = row_of if by_row else col_of
    # Places and segments are the same for all heads, slopes for all batch rows.
    along = {"slopes": (1,)}.get(name, (0,) if value.ndim == 3 else (0, 1))

    def index(b, h, s, steps):
        code = steps[call.place(b, h, s)]
        block = place(code)
        if name in ("q_index", "q_segments"):
            block = jax.lax.rem(block, cut.period)
        lead = [(b + call.batch[0], h + call.heads[0])[i] for i in along]
        if value.shape[0] == 1:
            lead[0] = 0
        return (*lead, block, 0) if name in MATRICES else (*lead, 0, block)

    sizes = (size, value.shape[-1]) if name in MATRICES else (1, size)
    return pl.BlockSpec((*(None,) * len(along), *sizes), index)


def _output(width: int | None, rows: int, *, call: Call, axis: int):
    def index(b, h, s, steps):
        code = steps[call.place(b, h, s)]
        block = (col_of if axis else row_of)(code) - call.blocks[0]
        return (b, h, 0, block) if width is None else (b, h, block, 0)

    sizes = (1, rows) if width is None else (rows, width)
    return pl.BlockSpec((None, None, *sizes), index)
