"""Block-sparse attention for TPU: forward, dq, and dk with dv, each one Pallas kernel.

The grid has one step per visited pair of blocks (`_tpu_tables`), so time follows the number of
visible blocks, whatever the mask, also where the table is per head or computed on the device.
Batch and heads are axes of the grid. Sums run in a fixed order inside one core and nothing is
accumulated in memory: results are the same bit by bit in every run.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp

from pallas_kernels.backends import online_softmax as online
from pallas_kernels.backends.tpu import decode as decoding
from pallas_kernels.backends.tpu import kernels, levels, tables
from pallas_kernels.backends.tpu import layout as layouts
from pallas_kernels.backends.tpu.kernels import Body
from pallas_kernels.backends.tpu.launch import every_call, launch
from pallas_kernels.backends.tpu.layout import LANES, Layout, wide
from pallas_kernels.biases import Alibi, RelativeBias
from pallas_kernels.block_table import namespace
from pallas_kernels.dispatch import given_table
from pallas_kernels.tables import from_mask, restrict

LARGEST_HEAD = 256
F32 = jnp.float32


def forward(q, k, v, operands, spec, *, platform="tpu", interpret=False):
    """out [B, T, N, Hv] in q's dtype and lse float32 [B, T, N]."""
    if not _relative(operands) and decoding.fits(q, k, v, operands, spec):
        return decoding.forward(q, k, v, operands, spec, interpret=interpret)
    cut, found = _plan(q, k, v, operands, spec, backward=False)
    body, x = _prepare(q, k, v, operands, spec, cut)
    size = x["v"].shape[-1]
    run = functools.partial(
        launch,
        kernels.forward,
        body,
        cut,
        x,
        axis=0,
        outputs=[(q.dtype, size), (F32, None)],
        scratch=[(F32, LANES), (F32, LANES), (F32, size), _scratch(body, 0)],
        interpret=interpret,
    )
    out, lse = every_call(found, cut, 0, run)
    return cut.from_rows(out)[..., : v.shape[-1]], cut.from_rows(lse[:, :, 0])


def backward(q, k, v, out, lse, d_out, d_lse, operands, spec, *, platform="tpu", interpret=False):
    """Cotangents of q, k, v and of the bias; that of lse enters through `di`."""
    cut, found = _plan(q, k, v, operands, spec, backward=True)
    body, x = _prepare(q, k, v, operands, spec, cut)
    di = online.row_cotangent(out, d_out, d_lse)
    # A row without keys is masked everywhere; any finite lse keeps it finite until then.
    x["lse"] = cut.to_rows(jnp.where(jnp.isfinite(lse), lse, 0.0))[:, :, None]
    x["di"] = cut.to_rows(di)[:, :, None]
    x["d_out"] = cut.to_rows(wide(d_out.astype(q.dtype)))

    def run(kernel, axis, outputs, scratch):
        fixed = dict(axis=axis, outputs=outputs, scratch=scratch, interpret=interpret)
        one = functools.partial(launch, kernel, body, cut, x, **fixed)
        return every_call(found, cut, axis, one)

    h, hv, sums, acc_sums = x["k"].shape[-1], x["v"].shape[-1], None, None
    if operands.bias is not None:  # a lane of sums for each row, or for each level
        rows = cut.rows if body.levels is None else LANES
        sums, acc_sums = (F32, None, rows), (F32, LANES, rows)
    dq, d_bias = run(
        kernels.d_queries, 0, [(q.dtype, h), sums], [(F32, h), acc_sums, _scratch(body, 0)]
    )
    dk, dv = run(
        kernels.d_keys, 1, [(k.dtype, h), (v.dtype, hv)], [(F32, h), (F32, hv), _scratch(body, 1)]
    )
    if body.levels is not None:
        d_bias = levels.gradient(d_bias, operands.bias, body.levels)
    elif d_bias is not None:
        d_bias = Alibi(jnp.sum(cut.from_rows(d_bias[:, :, 0]), (0, 1)))
    dq = cut.from_rows(dq)[..., : q.shape[-1]]
    return dq, cut.from_keys(dk, k.shape[-1]), cut.from_keys(dv, v.shape[-1]), d_bias


def _scratch(body: Body, axis: int):
    """Room for the scores of a step, where their bias is made tile by tile."""
    if body.levels is None:
        return None
    return (F32, body.rows, body.key_block) if axis else (F32, body.key_block, body.rows)


def _relative(operands) -> bool:
    return isinstance(operands.bias, RelativeBias)


def unsupported(q, k, v, operands, spec) -> str | None:
    """Why these kernels cannot run the inputs, or None; reads shapes, dtypes and structure."""
    if (reason := online.mixed_dtypes(q, k, v)) is not None:
        return reason
    if max(q.shape[-1], v.shape[-1]) > LARGEST_HEAD:
        largest = max(q.shape[-1], v.shape[-1])
        return f"the head size {largest} is above {LARGEST_HEAD}: a step would not fit into VMEM"
    if not spec.mask.arithmetic:
        return "the mask looks places up in a long list; TPU kernels compute masks from scalars"
    if _relative(operands) and operands.bias.table.shape[0] > levels.MOST_LEVELS:
        buckets = operands.bias.table.shape[0]
        return f"the bias has {buckets} buckets, the kernels hold {levels.MOST_LEVELS}: a lane each"
    return _table_unsupported(q, k, v, operands, spec)


def _table_unsupported(q, k, v, operands, spec) -> str | None:
    table = given_table(operands, spec)
    (queries, n), (keys, heads) = q.shape[1:3], k.shape[1:3]
    if table is not None:
        width = 1 if _lists(q, k, operands, table) > heads else n // heads
        if queries > table.q_block and table.q_block * width % LANES:
            return (
                f"blocks of {table.q_block} queries times {width} heads are "
                f"{table.q_block * width} rows, no multiple of {LANES}"
            )
        if keys > table.k_block and (table.k_block % LANES or table.k_block > layouts.KEYS):
            return f"blocks of {table.k_block} keys are no multiple of {LANES} up to {layouts.KEYS}"
    for backward in (False, True):
        cut = _layout(q, k, v, operands, table, backward)
        if max(cut.count, cut.key_count) >= tables.LIMIT:
            return (
                f"{cut.count} x {cut.key_count} blocks are more than {tables.LIMIT - 1} along an "
                "axis; larger blocks make fewer"
            )
    return None


def _lists(q, k, operands, given) -> int:
    """How many tables there are along heads.

    A bias by buckets is scalars of one query head, so those of a key head are taken apart.
    """
    if _relative(operands) and q.shape[2] > k.shape[2]:
        return q.shape[2]
    return 1 if given is None else given.index.shape[1]


def _layout(q, k, v, operands, given, backward: bool) -> Layout:
    lists = _lists(q, k, operands, given)
    if given is not None:
        q_block, k_block = given.q_block, given.k_block
    else:
        q_block, k_block = layouts.table_blocks(q, k, v, backward, by_head=lists > k.shape[2])
    sizes = dict(q_block=q_block, k_block=k_block)
    return layouts.layout(q, k, v, lists=lists, **sizes, backward=backward)


def _plan(q, k, v, operands, spec, backward: bool) -> tuple[Layout, tables.Visits]:
    """The layout, and the visits of blocks that it is for."""
    given = given_table(operands, spec)
    cut = _layout(q, k, v, operands, given, backward)
    places = dict(queries=q.shape[1], keys=k.shape[1])
    places |= dict(q_index=operands.q_index, k_index=operands.k_index)
    places |= dict(q_segments=operands.q_segments, k_segments=operands.k_segments)
    if given is None:
        q_block, k_block = layouts.table_blocks(q, k, v, backward, by_head=cut.by_head)
        table = from_mask(spec.mask, **places, q_block=q_block, k_block=k_block)
    else:
        table = restrict(given, spec.mask, **places)
    heads, lists = cut.heads, table.index.shape[1]
    if cut.by_head and lists <= heads:  # query heads are taken apart and share their lists
        repeat = namespace(table.index, table.seen).repeat
        heads, table = lists, table.heads(lambda x: repeat(x, cut.group, 1))
    return cut, tables.visits(table, heads=heads, split=cut.split)


def _prepare(q, k, v, operands, spec, cut: Layout):
    """The kernels' static part, and the operands in their layout."""
    before, factor = online.scales(spec.scale, q.dtype)
    body = Body(
        mask=spec.mask,
        soft_cap=spec.soft_cap,
        factor=factor,
        scale=spec.scale,
        rows=cut.rows,
        key_block=cut.key_block,
        keys=cut.keys,
        group=1 if cut.by_head else cut.group,
        period=cut.period,
        levels=levels.of(operands.bias, cut.group) if _relative(operands) else None,
    )

    def vector(x, lay):
        return None if x is None else lay(jnp.asarray(x, jnp.int32))

    slopes = operands.bias.slopes if isinstance(operands.bias, Alibi) else None
    x = {
        "q": cut.to_rows(wide(q * jnp.asarray(before, q.dtype))),
        "k": cut.to_keys(wide(k)),
        "v": cut.to_keys(wide(v)),
        "q_index": vector(operands.q_index, cut.query_vector),
        "k_index": vector(operands.k_index, cut.key_vector),
        "q_segments": vector(operands.q_segments, cut.query_vector),
        "k_segments": vector(operands.k_segments, cut.key_vector),
        "slopes": None if slopes is None else cut.head_vector(slopes.astype(F32)),
    }
    if body.levels is not None:
        x |= levels.scalars(operands.bias, body.levels)
    return body, x
