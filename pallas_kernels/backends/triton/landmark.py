"""Grouped softmax over older blocks for NVIDIA GPUs in Pallas-Triton: forward, dq, dk with dv.

Programs and their lists are those of block-sparse attention beside it (`_triton.py`), with landmark
blocks in place of blocks of keys: arrays are read as they lie, a block's tokens as the power of two
above them, and nothing is accumulated in memory. A program does not visit blocks that none of its
rows may see: those of their own number and above, and those of documents that none of them is in.
"""

from __future__ import annotations

import functools

from pallas_kernels import tuning
from pallas_kernels.backends.triton.attention import (
    lists,
    saved,
    table_blocks,
    unsupported_arrays,
    vectors,
)
from pallas_kernels.backends.triton.layout import axis, by_keys, by_rows, power
from pallas_kernels.dispatch import Operands
from pallas_kernels.landmark import OLDER, older_table
from pallas_kernels.tables import transpose


def forward(q, k, v, operands, spec, *, platform="cuda", interpret=False):
    """out [B, T, N, Hv] in q's dtype and lse float32 [B, T, N]."""
    body, x = _prepare("forward", q, k, v, operands, spec, interpret)
    x |= {"q": q, "k": k, "v": v}
    out, lse = by_rows(_run("forward"), body, x, [(q.dtype, v.shape[-1]), "vector"])
    return out[0], lse[0].swapaxes(1, 2)


def backward(q, k, v, out, lse, d_out, d_lse, operands, spec, *, platform="cuda", interpret=False):
    """Cotangents of q, k and v; that of lse enters through `di`."""
    arrays = saved(q, k, v, out, lse, d_out, d_lse)
    body, x = _prepare("d_queries", q, k, v, operands, spec, interpret)
    (dq,) = by_rows(_run("d_queries"), body, x | arrays, [(q.dtype, q.shape[-1])])
    body, x = _prepare("d_keys", q, k, v, operands, spec, interpret)
    return dq[0], *by_keys(_run("d_keys"), body, x | arrays)


def unsupported(q, k, v, operands, spec) -> str | None:
    """Why these kernels cannot run the inputs, or None; reads shapes and dtypes."""
    if (reason := unsupported_arrays(q, k, v)) is not None:
        return reason
    if _tile("d_keys", q, v, spec) is None:
        size = max(q.shape[-1], v.shape[-1])
        return (
            f"blocks of {spec.block} tokens with {q.dtype} heads of {size}: a step holds a whole "
            "block, and none is known in which registers are not spilled"
        )
    return None


def _tile(kind: str, q, v, spec):
    size = power(max(q.shape[-1], v.shape[-1]))
    return tuning.landmark(kind, size, power(spec.block), q.dtype)


def _run(kind: str):
    from pallas_kernels.backends.triton import landmark_kernels as kernels
    from pallas_kernels.backends.triton.kernels import launch

    return functools.partial(launch, getattr(kernels, f"landmark_{kind}"))


def _prepare(kind: str, q, k, v, operands, spec, interpret: bool):
    """The static part of a kernel, and the operands beside its arrays."""
    from pallas_kernels.backends.triton.landmark_kernels import LandmarkBody

    (queries, block), turned = (q.shape[1], spec.block), kind == "d_keys"
    tile, count = _tile(kind, q, v, spec), k.shape[1] // block
    q_block, k_block = table_blocks(queries, count, tile)
    rows, keys = axis(queries, q_block, tile.rows), axis(count, k_block, tile.keys)
    table = older_table(operands, block, queries, count, q_block=q_block, k_block=k_block)
    found = transpose(table, count) if turned else table.lists()
    body = LandmarkBody(
        mask=OLDER,
        scale=spec.scale,
        soft_cap=None,
        rows=rows,
        keys=keys,
        size=q.shape[-1],
        v_size=v.shape[-1],
        group=q.shape[2] // k.shape[2],
        turned=turned,
        whole=False,  # which blocks a row sees is tested at once
        mixed=True,
        copies=block,
        warps=tile.warps,
        stages=tile.stages,
        interpret=interpret,
        block=block,
    )
    return body, vectors(Operands(*operands)) | lists(found, rows, keys)
