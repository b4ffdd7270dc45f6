"""Block-sparse attention for Hopper GPUs: forward, dq, and dk with dv, in Pallas' Mosaic GPU.

Every kernel walks lists of visible blocks, so dense, causal, windowed, packed, per-head and top-k
attention are one kernel, and time follows the number of visible blocks. Nothing is accumulated in
global memory: results are the same bit by bit in every run.
"""

from __future__ import annotations

import importlib
import math

import jax
import jax.numpy as jnp

from pallas_kernels import tuning
from pallas_kernels.backends import online_softmax as online
from pallas_kernels.backends.mosaic_gpu import layout as layouts
from pallas_kernels.backends.mosaic_gpu.layout import D_KEYS, D_QUERIES, FORWARD, HEAD, ROWS
from pallas_kernels.dispatch import given_table

LARGEST_HEAD = 128
LARGEST_GRID = 65535  # heads, or tiles of 64 rows
# Versions of ptxas, from and up to (CUDA 12.8.0 to 12.9.0), that miscompile causal masks in a
# kernel of JAX's own like these (jax.experimental.pallas.ops.gpu.attention_mgpu, jax 0.11). That
# kernel refuses 12.9.1 as well: it asks the runtime, whose version has no patch level.
MISCOMPILING = (12, 8, 0), (12, 9, 86)


def forward(q, k, v, operands, spec, *, platform="cuda", interpret=False):
    """out [B, T, N, Hv] in q's dtype and lse float32 [B, T, N]."""
    table = layouts.table_of(q, k, operands, spec)
    body, x = _prepare(FORWARD, q, k, v, operands, spec, table)
    out, lse = _launch().forward(body, x, interpret)
    return out[:, : q.shape[1], :, : v.shape[-1]], lse[:, :, : q.shape[1]].swapaxes(1, 2)


def backward(q, k, v, out, lse, d_out, d_lse, operands, spec, *, platform="cuda", interpret=False):
    """Cotangents of q, k and v; that of lse enters through di."""
    table = layouts.table_of(q, k, operands, spec)
    # A row without keys is masked everywhere; any finite lse keeps it finite until then.
    lse = jnp.where(jnp.isfinite(lse), lse, 0.0) * math.log2(math.e)
    rows = {"d_out": d_out.astype(q.dtype)}
    # A score's cotangent is p (d_out v^T - di): the kernels' sums of d_out v^T start at -di.
    rows |= {"lse": lse, "start": -online.row_cotangent(out, d_out, d_lse)}
    body, x = _prepare(D_QUERIES, q, k, v, operands, spec, table, rows)
    dq = _launch().d_queries(body, x, interpret)
    body, x = _prepare(D_KEYS, q, k, v, operands, spec, table, rows)
    dk, dv = _launch().d_keys(body, x, interpret)
    cut = ((dq, q), (dk, k), (dv, v))
    return *(x[:, : like.shape[1], :, : like.shape[3]] for x, like in cut), None


def unsupported(q, k, v, operands, spec) -> str | None:
    """Why these kernels cannot run the inputs, or None; reads shapes, dtypes and structure."""
    if (reason := _absent()) is not None:
        return reason
    dtypes = {str(x.dtype) for x in (q, k, v)}
    if dtypes not in ({"bfloat16"}, {"float16"}):
        found = ", ".join(sorted(dtypes))
        return f"q, k and v must all be bfloat16 or all float16, they are {found}"
    largest = max(q.shape[-1], v.shape[-1])
    if largest > LARGEST_HEAD:
        return (
            f"the head size {largest} is above {LARGEST_HEAD}: dk and dv of {ROWS} keys do not fit "
            "in a warpgroup's registers"
        )
    if q.shape[1] < ROWS:
        return f"{q.shape[1]} queries are fewer than the {ROWS} rows of a warpgroup's product"
    tiles = -(-max(q.shape[1], k.shape[1]) // ROWS)
    if max(tiles, q.shape[2]) > LARGEST_GRID:
        return f"{tiles} tiles of {q.shape[2]} heads are more than a grid's {LARGEST_GRID}"
    if operands.bias is not None:
        return "these kernels add no bias to the logits"
    if not spec.mask.arithmetic:
        return "the mask looks places up in a long list; these kernels compute masks from scalars"
    table = given_table(operands, spec)
    if table is not None:
        lengths = (q.shape[1], table.q_block), (k.shape[1], table.k_block)
        for name, (length, block) in zip(("queries", "keys"), lengths, strict=True):
            if length > block and block % ROWS:
                return f"blocks of {block} {name} are no multiple of {ROWS}"
    return None


def _absent() -> str | None:
    """Why there is no such kernel here, whatever the inputs."""
    if tuning.capability() != 90:
        return "these kernels are for Hopper GPUs (compute capability 9.0)"
    version = tuning.assembler()
    if version is not None and MISCOMPILING[0] <= version < MISCOMPILING[1]:
        said = ".".join(map(str, version))
        return f"JAX knows ptxas {said} to miscompile such kernels; that of CUDA 12.9.1 does not"
    try:
        _launch()
    except (ImportError, AttributeError) as error:
        return f"jax {jax.__version__} does not have what they are written in ({error})"
    return None


def _launch():
    return importlib.import_module("pallas_kernels.backends.mosaic_gpu.launch")


def _prepare(kernel: str, q, k, v, operands, spec, table, rows=None):
    """The kernel's static part, and its operands in whole tiles."""
    from pallas_kernels.backends.mosaic_gpu.program import Body

    capped = spec.soft_cap is not None
    cut = layouts.cut(kernel, q, k, v, table.q_block, table.k_block, capped)
    joined = table.index.shape[1] > k.shape[2]
    body = Body(
        mask=spec.mask,
        soft_cap=spec.soft_cap,
        scale=spec.scale,
        heads=q.shape[2],
        key_heads=k.shape[2],
        cut=cut,
        joined=joined,
    )
    x = {"q": cut.queries.pad(_wide(q), 1)}
    x |= {"k": cut.keys.pad(_wide(k), 1), "v": cut.keys.pad(_wide(v), 1)}
    for name, x_side in (("q", cut.queries), ("k", cut.keys)):
        for vector in (f"{name}_index", f"{name}_segments"):
            value = getattr(operands, vector)
            value = None if value is None else jnp.asarray(value, jnp.int32)
            x[vector] = x_side.pad(value, 1)
    if rows is not None:
        x["d_out"] = cut.queries.pad(_wide(rows["d_out"]), 1)
        x |= {name: cut.queries.pad(rows[name].swapaxes(1, 2), 2) for name in ("lse", "start")}
    return body, x | layouts.lists(table, kernel, cut, body.group if joined else 1)


def _wide(x):
    """The last axis padded to a multiple of HEAD."""
    more = -x.shape[-1] % HEAD
    return jnp.pad(x, [(0, 0)] * 3 + [(0, more)]) if more else x
