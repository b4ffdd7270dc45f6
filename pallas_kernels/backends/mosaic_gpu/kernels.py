"""Kernels for Hopper: the forward pass, dq, and dk with dv, and their launch.

In the backward kernels a step's second product, of d_out and v, starts after the element test:
besides the sums, a thread does not have the registers for both products and the test. The second
product is ready when p is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.backends.mosaic_gpu.attention import ROWS, KernelSpec, TileAxis
from pallas_kernels.backends.mosaic_gpu.program import (
    GRID,
    LOG2E,
    WARPGROUP,
    Ring,
    TilePair,
    Visits,
    add_product,
    column,
    fetch,
    fill,
    grid,
    grid_index,
    hidden,
    list_visits,
    logits,
    of_keys,
    of_queries,
    probabilities,
    product,
    repeat,
    send,
    specialise,
    sums_on,
)
from pallas_kernels.online_softmax import LOWEST

F32 = jnp.float32
Q_VECTORS, K_VECTORS = ("q_index", "q_segments"), ("k_index", "k_segments")
MATRICES = ("q", "k", "v", "d_out")


def forward(spec: KernelSpec, x, out, lse, scratch) -> None:
    """Computes an online softmax over the key tiles of 64 queries (FlashAttention-2, Dao 2023).

    Warpgroups take turns to start products, q k^T of a step and p v of the step before. These are
    multiplied while the other warpgroups compute their softmax (FlashAttention-3, Shah et al. 2024,
    section 3.1). A warpgroup passes its turn on as soon as its products have started, so none waits
    for another's softmax.
    """
    program, tiling = of_queries(spec, grid_index()), spec.tiling
    visits = list_visits(spec, x, program, tiling.queries, tiling.keys)
    ring = Ring(scratch["names"], scratch, tiling.stages, tiling.keys.tile)

    def move():
        lax.fori_loop(0, visits.seen, lambda i, _: ring.fill(x, program, i, visits.tile(i)), None)
        ring.drain(visits.seen)

    def compute(group):
        first = program.tile * tiling.queries.tile + group * ROWS
        fetch(x, scratch, scratch["resident_names"], program, first, group)
        acc, top, total = _softmax(spec, visits, ring, scratch, group, first)
        has_keys = total > 0
        safe = jnp.where(has_keys, total, 1.0)
        out_scratch = scratch["out" if "out" in scratch else "q"].at[group]
        lse_scratch = scratch["lse"].at[group]
        out_scratch[...] = (acc * repeat(1.0 / safe, 0, acc.shape)).astype(out.dtype)
        lse_scratch[...] = jnp.where(has_keys, top / LOG2E + jnp.log(safe), -jnp.inf)
        rows = pl.ds(first, ROWS)
        send(
            (out_scratch, out.at[program.row, rows, program.head]),
            (lse_scratch, lse.at[program.row, program.head, rows]),
        )

    specialise(spec, compute, move)


def _softmax(spec: KernelSpec, visits: Visits, ring: Ring, scratch, group, first):
    """Returns (weighted values, maximum, denominator) of 64 queries."""
    query, shape = scratch["q"].at[group], (ROWS, spec.tiling.keys.tile)
    resident = {name: scratch[name].at[group] for name in scratch["resident_names"] if name != "q"}

    def wait_turn():
        if spec.tiling.groups > 1:
            plgpu.barrier_wait(scratch["turn"].at[group])

    def pass_turn():
        if spec.tiling.groups > 1:
            is_last = group == spec.tiling.groups - 1
            plgpu.barrier_arrive(scratch["turn"].at[jnp.where(is_last, 0, group + 1)])

    def soften(step, products, top, total):
        """Returns p, the new maximum and denominator, and the factor of the earlier sums."""
        values, factor = logits(spec, products)
        streamed = {name: ring.at(name, step) for name in ring.names[0] if name != "k"}
        k_first = functools.partial(ring.first, visits, step)
        tiles = TilePair(shape, 0, first, k_first, resident | streamed)
        values = tiles.hide(spec, step >= visits.full, values, -jnp.inf)
        ring.release(0, step)
        new = jnp.maximum(top, jnp.max(values, 1) * factor)
        keep = jnp.exp2(top - new)
        p = jnp.exp2(values * factor - repeat(new, 0, shape))
        return p.astype(scratch["v"].dtype), new, total * keep + jnp.sum(p, 1), keep

    def visit(step, carry, is_last: bool = False):
        """Adds a step's values, whose products are ready, and starts the next step's products."""
        acc, products, *rows = carry
        p, *rows, keep = soften(step, products, *rows)
        acc, p, *rows = lax.optimization_barrier((acc * repeat(keep, 0, acc.shape), p, *rows))
        ring.wait(1, step)
        if not is_last:
            ring.wait(0, step + 1)
        wait_turn()

        def begin(sums, _):
            if not is_last:
                plgpu.wgmma(sums[1], query, ring.at("k", step + 1).transpose((1, 0)))
            add_product(sums[0], p, ring.at("v", step))
            pass_turn()

        starts = [acc] if is_last else [acc, fill(shape, 0.0)]
        acc, *products = sums_on(starts, begin)
        ring.release(1, step)
        return acc, *products, *rows

    def attend(acc, *rows):
        ring.wait(0, jnp.int32(0))
        pl.when(group > 0)(wait_turn)  # warpgroup 0 has the first turn
        products = product(query, ring.at("k", jnp.int32(0)), pass_turn)
        last = visits.seen - 1
        carry = lax.fori_loop(0, last, visit, (acc, products, *rows))
        carry = visit(last, carry, is_last=True)
        pl.when(group == 0)(wait_turn)
        return carry

    size = ring.scratch["v"].shape[-1]
    empty = fill((ROWS, size), 0.0), fill((ROWS,), LOWEST, 0), fill((ROWS,), 0.0, 0)
    return lax.cond(visits.seen > 0, attend, lambda *x: x, *empty)


def d_queries(spec: KernelSpec, x, dq, scratch) -> None:
    """Computes dq of 64 queries: the sum over key tiles of ds k."""
    program, tiling = of_queries(spec, grid_index()), spec.tiling
    visits = list_visits(spec, x, program, tiling.queries, tiling.keys)
    ring = Ring(scratch["names"], scratch, tiling.stages, tiling.keys.tile)
    shape = (ROWS, tiling.keys.tile)

    def move():
        lax.fori_loop(0, visits.seen, lambda i, _: ring.fill(x, program, i, visits.tile(i)), None)
        ring.drain(visits.seen)

    def compute(group):
        first = program.tile * tiling.queries.tile + group * ROWS
        fetch(x, scratch, scratch["resident_names"], program, first, group)
        resident = {name: scratch[name].at[group] for name in scratch["resident_names"]}
        lse, start = column(resident["lse"], 0), column(resident["start"], 0)

        def visit(step, total):
            ring.wait(0, step)
            ring.wait(1, step)
            key, value = ring.at("k", step), ring.at("v", step)
            products = product(resident["q"], key)
            streamed = {name: ring.at(name, step) for name in ring.names[0] if name != "k"}
            k_first = functools.partial(ring.first, visits, step)
            tiles = TilePair(shape, 0, first, k_first, resident | streamed)
            values, factor = hidden(spec, products, tiles, step >= visits.full)

            def begin(sums, ready):
                plgpu.wgmma(sums[0], resident["d_out"], value.transpose((1, 0)))
                _, p = probabilities(spec, values, factor, lse, 0)
                ds = p * ready(0, later=0)
                ring.release(1, step)
                add_product(sums[1], ds, key)

            _, total = sums_on([repeat(start, 0, shape), total], begin)
            ring.release(0, step)
            return total

        total = lax.fori_loop(0, visits.seen, visit, fill((ROWS, scratch["q"].shape[-1]), 0.0))
        resident["q"][...] = (total * spec.scale).astype(dq.dtype)
        send((resident["q"], dq.at[program.row, pl.ds(first, ROWS), program.head]))

    specialise(spec, compute, move)


def d_keys(spec: KernelSpec, x, dk, dv, scratch) -> None:
    """Computes dk and dv of 64 keys: sums over the query tiles of all heads of their group.

    With `per_query_head` they are sums over one query head, in float32, so that they are not
    rounded before the sum over heads.
    """
    program, tiling = of_keys(spec, grid_index()), spec.tiling
    heads = 1 if spec.per_query_head else spec.group
    visits = list_visits(spec, x, program, tiling.keys, tiling.queries, heads)
    ring = Ring(scratch["names"], scratch, tiling.stages, tiling.queries.tile)
    shape = (ROWS, tiling.queries.tile)

    def move():
        def copy(step, _):
            place = program
            if not spec.per_query_head:
                head = program.key_head * spec.group + visits.head(step)
                place = program._replace(head=head)
            ring.fill(x, place, step, visits.tile(step))

        lax.fori_loop(0, visits.seen, copy, None)
        ring.drain(visits.seen)

    def compute(group):
        first = program.tile * tiling.keys.tile + group * ROWS
        fetch(x, scratch, scratch["resident_names"], program, first, group)
        resident = {name: scratch[name].at[group] for name in scratch["resident_names"]}

        def visit(step, sums):
            ring.wait(0, step)
            query, d_out = ring.at("q", step), ring.at("d_out", step)
            products = product(resident["k"], query)
            streamed = {
                name: ring.at(name, step) for name in ring.names[0] if name not in ("q", "d_out")
            }
            q_first = functools.partial(ring.first, visits, step)
            tiles = TilePair(shape, 1, first, q_first, resident | streamed)
            values, factor = hidden(spec, products, tiles, step >= visits.full)

            def begin(sums, ready):
                plgpu.wgmma(sums[0], resident["v"], d_out.transpose((1, 0)))
                p, slope_p = probabilities(spec, values, factor, column(streamed["lse"], 1), 1)
                add_product(sums[2], p, d_out)
                ds = slope_p * ready(0, later=1)
                add_product(sums[1], ds, query)

            start = repeat(column(streamed["start"], 1), 1, shape)
            _, *sums = sums_on([start, *sums], begin)
            ring.release(0, step)
            return sums

        empty = [fill((ROWS, scratch[name].shape[-1]), 0.0) for name in ("k", "v")]
        d_key, d_value = lax.fori_loop(0, visits.seen, visit, empty)
        if spec.per_query_head:  # written directly: shared memory has no room for float32 tiles
            rows = program.row, pl.ds(first, ROWS), program.head
            dk[rows], dv[rows] = d_key * spec.scale, d_value
            return
        # Computed again, because references would occupy registers while products are summed.
        own_group, rows = lax.axis_index(WARPGROUP), pl.ds(first, ROWS)
        tile = {name: scratch[name].at[own_group] for name in ("k", "v")}
        tile["k"][...] = (d_key * spec.scale).astype(dk.dtype)
        tile["v"][...] = d_value.astype(dv.dtype)
        send(
            *(
                (tile[n], x.at[program.row, rows, program.key_head])
                for n, x in (("k", dk), ("v", dv))
            )
        )

    specialise(spec, compute, move)


def matrix(count: int, rows: int, size: int, dtype, streamed: int = 64):
    """Returns shared memory for `count` tiles, in the layout of matrix units and the copy engine.

    Args:
      streamed: rows of a streamed tile; products contract over them as over head sizes.
    """
    width = math.gcd(size, streamed, 64)  # numbers that are swizzled together: 32 to 128 bytes
    swizzle = width * jnp.dtype(dtype).itemsize
    tiling = plgpu.TilingTransform((8, width))
    transforms = tiling, plgpu.SwizzleTransform(swizzle)
    return plgpu.SMEM((count, rows, size), dtype, transforms=transforms)


def tiles(x, names, count: int, rows: int, streamed: int) -> dict:
    """Returns shared memory for `count` tiles of operands: matrices, and vectors over rows."""
    return {
        name: matrix(count, rows, x[name].shape[-1], x[name].dtype, streamed)
        if name in MATRICES
        else plgpu.SMEM((count, rows), x[name].dtype)
        for name in names
    }


def shared_memory(spec: KernelSpec, x, resident, ring, streamed_rows: int) -> tuple[dict, dict]:
    """Returns the shared memory and the barriers of a program.

    Args:
      resident: names of operands of which each compute warpgroup holds 64 rows.
      ring: sets of names of streamed operands; each set is filled and freed together.
    """
    tiling = spec.tiling
    memory = tiles(x, resident, tiling.groups, ROWS, streamed_rows)
    memory["count"] = plgpu.SMEM((tiling.groups, streamed_rows), jnp.int32)
    streamed = [name for names in ring for name in names]
    memory |= tiles(x, streamed, tiling.stages, streamed_rows, streamed_rows)
    barriers = {
        "resident_rows": plgpu.Barrier(num_arrivals=len(resident), num_barriers=tiling.groups),
        "filled": [
            plgpu.Barrier(num_arrivals=len(names), num_barriers=tiling.stages) for names in ring
        ],
        "free": [
            plgpu.Barrier(num_arrivals=tiling.groups, num_barriers=tiling.stages) for _ in ring
        ],
    }
    return memory, barriers


def launch(
    kernel: Callable,
    spec: KernelSpec,
    x,
    outputs,
    resident,
    ring,
    programs: tuple[int, int, int],
    streamed: TileAxis,
    interpret,
    **extra,
):
    """Runs `kernel(spec, refs of x, *refs of outputs, scratch)`.

    Args:
      x: operands by name; operands that are None are removed from x, `resident` and `ring`.
      resident, ring: as in `shared_memory`.
      programs: sizes of the grid's axes.
      streamed: the axis of the streamed operands.
      extra: further entries of `scratch`.
    """
    x = x | {"count": jnp.arange(streamed.tile, dtype=jnp.int32)}
    x = {name: value for name, value in x.items() if value is not None}
    resident = tuple(name for name in resident if name in x)
    ring = tuple(tuple(name for name in names if name in x) for names in ring)
    memory, barriers = shared_memory(spec, x, resident, ring, streamed.tile)
    names = tuple(x)

    def entry(*refs, **scratch):
        inputs, results = refs[: len(names)], refs[len(names) :]
        scratch = {"names": ring, "resident_names": resident, **scratch}
        kernel(spec, dict(zip(names, inputs, strict=True)), *results, scratch)

    entry.__name__ = f"flash_{kernel.__name__}"
    return plgpu.kernel(
        entry,
        out_type=list(outputs),
        scratch_types=memory | barriers | extra,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        grid=programs,
        grid_names=GRID,
        num_threads=spec.tiling.groups + 1,
        thread_name=WARPGROUP,
        **({"interpret": interpret} if interpret else {}),
    )(*x.values())


def run_forward(spec: KernelSpec, x, interpret):
    """Returns out [B, T, N, Hv] and lse [B, N, T]."""
    tiling, (b, t, n, h), size = spec.tiling, x["q"].shape, x["v"].shape[-1]
    extra = {"lse": plgpu.SMEM((tiling.groups, ROWS), F32)}
    extra["turn"] = plgpu.Barrier(num_barriers=tiling.groups)
    if size != h:  # otherwise the output overwrites the queries
        extra["out"] = matrix(tiling.groups, ROWS, size, x["q"].dtype)
    outputs = like((b, t, n, size), x["q"].dtype), like((b, n, t), F32)
    resident, ring = ("q", "count", *Q_VECTORS), (("k", *K_VECTORS), ("v",))
    programs = grid(spec, n, tiling.queries.count, b)
    streamed = tiling.keys
    return launch(forward, spec, x, outputs, resident, ring, programs, streamed, interpret, **extra)


def run_d_queries(spec: KernelSpec, x, interpret):
    """Returns dq [B, T, N, H]."""
    tiling, (b, _, n, _) = spec.tiling, x["q"].shape
    resident, ring = (
        ("q", "d_out", "lse", "start", "count", *Q_VECTORS),
        (("k", *K_VECTORS), ("v",)),
    )
    outputs = [like(x["q"].shape, x["q"].dtype)]
    programs = grid(spec, n, tiling.queries.count, b)
    return launch(d_queries, spec, x, outputs, resident, ring, programs, tiling.keys, interpret)[0]


def run_d_keys(spec: KernelSpec, x, interpret):
    """Returns dk [B, S, K, H] and dv [B, S, K, Hv]."""
    tiling, (b, s, heads, _) = spec.tiling, x["k"].shape
    resident, ring = ("k", "v", "count", *K_VECTORS), (("q", "d_out", "lse", "start", *Q_VECTORS),)
    outputs = [like(x[name].shape, x[name].dtype) for name in ("k", "v")]
    if spec.per_query_head:
        heads = spec.heads
        outputs = [like((b, s, heads, x[name].shape[-1]), F32) for name in ("k", "v")]
    programs = grid(spec, heads, tiling.keys.count, b)
    cotangents = launch(
        d_keys, spec, x, outputs, resident, ring, programs, tiling.queries, interpret
    )
    if not spec.per_query_head:
        return cotangents
    return [sum_groups(sums, x[name]) for sums, name in zip(cotangents, ("k", "v"), strict=True)]


def sum_groups(x, keys):
    """Sums [B, S, N, H] to [B, S, K, H] in the dtype of `keys`, one head after the other.

    The order of XLA's reduction of an axis may differ between programs.
    """
    parts = x.reshape(*keys.shape[:3], -1, x.shape[-1])
    total = functools.reduce(jnp.add, (parts[:, :, :, i] for i in range(parts.shape[3])))
    return total.astype(keys.dtype)


def like(shape, dtype) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)
