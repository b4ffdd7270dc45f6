"""Backward kernels for Hopper: dq, and dk with dv, from the saved log-sum-exp.

A step's second product, of d_out and v, waits until p is there: beside the sums, no thread has the
registers for both products and an element test.
"""

from __future__ import annotations

import functools

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._mosaic_gpu_layout import ROWS
from pallas_kernels._mosaic_gpu_program import (
    Body,
    Meeting,
    Ring,
    fetch,
    of_keys,
    of_queries,
    probabilities,
    send,
    specialise,
    walk,
)
from pallas_kernels._mosaic_gpu_values import F32, add_product, column, product, repeat


def d_queries(body: Body, x, dq, room) -> None:
    """Cotangent of 64 queries: the sum over key tiles of ds k."""
    here, cut = of_queries(body), body.cut
    walked = walk(body, x, here, cut.queries, cut.keys)
    ring = Ring(room["names"], room, cut.stages, cut.keys.tile)
    shape = (ROWS, cut.keys.tile)

    def move():
        lax.fori_loop(0, walked.seen, lambda i, _: ring.fill(x, here, i, walked.tile(i)), None)
        ring.drain(walked.seen)

    def compute(group):
        first = here.tile * cut.queries.tile + group * ROWS
        fetch(x, room, room["own_names"], here, first, group)
        own = {name: room[name].at[group] for name in room["own_names"]}
        lse, di = column(own["lse"], 0), column(own["di"], 0)

        def visit(step, total):
            ring.wait(0, step)
            ring.wait(1, step)
            key, value = ring.at("k", step), ring.at("v", step)
            products = product(own["q"], key)
            passing = {name: ring.at(name, step) for name in ring.names[0] if name != "k"}
            k_first = functools.partial(ring.first, walked, step)
            meeting = Meeting(shape, 0, first, k_first, own | passing)
            masked = step >= walked.full
            _, p = probabilities(body, products, lambda: lse, 0, meeting, masked)
            dp = product(own["d_out"], value)
            ring.release(1, step)
            ds = p * (dp - repeat(di, 0, shape))
            add_product(total, ds, key)
            plgpu.wgmma_wait(0)
            ring.release(0, step)

        def everything(total):
            lax.fori_loop(0, walked.seen, lambda step, _: visit(step, total), None)
            return total[...]

        size = room["q"].shape[-1]
        found = pl.run_scoped(everything, plgpu.ACC((ROWS, size), F32))
        own["q"][...] = (found * body.scale).astype(dq.dtype)
        send((own["q"], dq.at[here.row, pl.ds(first, ROWS), here.head]))

    specialise(body, compute, move)


def d_keys(body: Body, x, dk, dv, room) -> None:
    """Cotangents of 64 keys and values: sums over the query tiles of all heads of their group."""
    here, cut = of_keys(), body.cut
    walked = walk(body, x, here, cut.keys, cut.queries, heads=body.group)
    ring = Ring(room["names"], room, cut.stages, cut.queries.tile)
    shape = (ROWS, cut.queries.tile)

    def move():
        def bring(step, _):
            head = here.key_head * body.group + walked.head(step)
            ring.fill(x, here._replace(head=head), step, walked.tile(step))

        lax.fori_loop(0, walked.seen, bring, None)
        ring.drain(walked.seen)

    def compute(group):
        first = here.tile * cut.keys.tile + group * ROWS
        fetch(x, room, room["own_names"], here, first, group)
        own = {name: room[name].at[group] for name in room["own_names"]}

        def visit(step, sums):
            ring.wait(0, step)
            query, d_out = ring.at("q", step), ring.at("d_out", step)
            products = product(own["k"], query)
            passing = {
                name: ring.at(name, step) for name in ring.names[0] if name not in ("q", "d_out")
            }
            q_first = functools.partial(ring.first, walked, step)
            meeting = Meeting(shape, 1, first, q_first, own | passing)
            lse, masked = functools.partial(column, passing["lse"], 1), step >= walked.full
            p, bent = probabilities(body, products, lse, 1, meeting, masked)
            add_product(sums[1], p, d_out)
            dp = product(own["v"], d_out)
            ds = bent * (dp - repeat(column(passing["di"], 1), 1, shape))
            add_product(sums[0], ds, query)
            plgpu.wgmma_wait(0)
            ring.release(0, step)

        def everything(*sums):
            lax.fori_loop(0, walked.seen, lambda step, _: visit(step, sums), None)
            return tuple(total[...] for total in sums)

        shapes = [plgpu.ACC((ROWS, room[name].shape[-1]), F32) for name in ("k", "v")]
        d_key, d_value = pl.run_scoped(everything, *shapes)
        own["k"][...] = (d_key * body.scale).astype(dk.dtype)
        own["v"][...] = d_value.astype(dv.dtype)
        rows = pl.ds(first, ROWS)
        send(
            (own["k"], dk.at[here.row, rows, here.key_head]),
            (own["v"], dv.at[here.row, rows, here.key_head]),
        )

    specialise(body, compute, move)
