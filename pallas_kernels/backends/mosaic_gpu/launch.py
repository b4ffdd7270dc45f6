"""One Mosaic-GPU kernel call: its operands, its shared memory and barriers, its grid."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.backends.mosaic_gpu import backward
from pallas_kernels.backends.mosaic_gpu import forward as forwards
from pallas_kernels.backends.mosaic_gpu.layout import ROWS, Side
from pallas_kernels.backends.mosaic_gpu.program import GRID, WARPGROUP, Body

F32 = jnp.float32
Q_VECTORS, K_VECTORS = ("q_index", "q_segments"), ("k_index", "k_segments")
MATRICES = ("q", "k", "v", "d_out")


def matrix(count: int, rows: int, size: int, dtype, passing: int = 64):
    """`count` tiles in shared memory, in the order that matrix units and the copy engine read.

    passing: rows of a passing tile, over which products sum as they do over head sizes.
    """
    width = math.gcd(size, passing, 64)  # numbers that are shuffled together: 32 to 128 bytes
    swizzle = width * jnp.dtype(dtype).itemsize
    tiling = plgpu.TilingTransform((8, width))
    transforms = tiling, plgpu.SwizzleTransform(swizzle)
    return plgpu.SMEM((count, rows, size), dtype, transforms=transforms)


def tiles(x, names, count: int, rows: int, passing: int) -> dict:
    """Room for `count` tiles of operands: matrices, and vectors of one number a row."""
    return {
        name: matrix(count, rows, x[name].shape[-1], x[name].dtype, passing)
        if name in MATRICES
        else plgpu.SMEM((count, rows), x[name].dtype)
        for name in names
    }


def rooms(body: Body, x, own, ring, passing_rows: int) -> tuple[dict, dict]:
    """Shared memory, and barriers, of a program.

    own: operands of which each compute warpgroup holds 64 rows; ring: two sets of those that pass.
    """
    cut = body.cut
    memory = tiles(x, own, cut.groups, ROWS, passing_rows)
    memory["count"] = plgpu.SMEM((cut.groups, passing_rows), jnp.int32)
    passing = [name for names in ring for name in names]
    memory |= tiles(x, passing, cut.stages, passing_rows, passing_rows)
    barriers = {
        "own": plgpu.Barrier(num_arrivals=len(own), num_barriers=cut.groups),
        "filled": [
            plgpu.Barrier(num_arrivals=len(names), num_barriers=cut.stages) for names in ring
        ],
        "free": [plgpu.Barrier(num_arrivals=cut.groups, num_barriers=cut.stages) for _ in ring],
    }
    return memory, barriers


def launch(
    kernel: Callable, body: Body, x, outputs, own, ring, grid, passing: Side, interpret, **extra
):
    """Runs `kernel(body, refs of x, *refs of outputs, room)`; extra: more of `room`.

    x: operands by name; those that are None are left out of it, of `own` and of `ring`.
    """
    x = x | {"count": jnp.arange(passing.tile, dtype=jnp.int32)}
    x = {name: value for name, value in x.items() if value is not None}
    own = tuple(name for name in own if name in x)
    ring = tuple(tuple(name for name in names if name in x) for names in ring)
    memory, barriers = rooms(body, x, own, ring, passing.tile)
    names = tuple(x)

    def entry(*refs, **room):
        given, made = refs[: len(names)], refs[len(names) :]
        room = {"names": ring, "own_names": own, **room}
        kernel(body, dict(zip(names, given, strict=True)), *made, room)

    entry.__name__ = f"flash_{kernel.__name__}"
    return plgpu.kernel(
        entry,
        out_type=list(outputs),
        scratch_types=memory | barriers | extra,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        grid=grid,
        grid_names=GRID,
        num_threads=body.cut.groups + 1,
        thread_name=WARPGROUP,
        **({"interpret": interpret} if interpret else {}),
    )(*x.values())


def forward(body: Body, x, interpret):
    """out [B, T, N, Hv] and lse [B, N, T]."""
    cut, (b, t, n, h), size = body.cut, x["q"].shape, x["v"].shape[-1]
    extra = {"lse": plgpu.SMEM((cut.groups, ROWS), F32)}
    extra["turn"] = plgpu.Barrier(num_arrivals=cut.groups, num_barriers=1)
    if size != h:  # else the output takes the queries' room
        extra["out"] = matrix(cut.groups, ROWS, size, x["q"].dtype)
    outputs = like((b, t, n, size), x["q"].dtype), like((b, n, t), F32)
    own, ring = ("q", "count", *Q_VECTORS), (("k", *K_VECTORS), ("v",))
    grid = n, cut.queries.count, b
    kernel = forwards.forward
    return launch(kernel, body, x, outputs, own, ring, grid, cut.keys, interpret, **extra)


def d_queries(body: Body, x, interpret):
    """dq [B, T, N, H]."""
    cut, (b, _, n, _) = body.cut, x["q"].shape
    own, ring = ("q", "d_out", "lse", "start", "count", *Q_VECTORS), (("k", *K_VECTORS), ("v",))
    outputs, grid = [like(x["q"].shape, x["q"].dtype)], (n, cut.queries.count, b)
    kernel = backward.d_queries
    return launch(kernel, body, x, outputs, own, ring, grid, cut.keys, interpret)[0]


def d_keys(body: Body, x, interpret):
    """dk [B, S, K, H] and dv [B, S, K, Hv]."""
    cut, (b, _, heads, _) = body.cut, x["k"].shape
    own, ring = ("k", "v", "count", *K_VECTORS), (("q", "d_out", "lse", "start", *Q_VECTORS),)
    outputs = [like(x[name].shape, x[name].dtype) for name in ("k", "v")]
    grid = heads, cut.keys.count, b
    return launch(backward.d_keys, body, x, outputs, own, ring, grid, cut.queries, interpret)


def like(shape, dtype) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)
