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
    WARPGROUP,
    Body,
    Meeting,
    Ring,
    fetch,
    hidden,
    of_keys,
    of_queries,
    probabilities,
    send,
    specialise,
    walk,
)
from pallas_kernels._mosaic_gpu_values import F32, add_product, column, product, product_on, repeat


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
        lse, start = column(own["lse"], 0), column(own["start"], 0)

        def visit(step, total):
            ring.wait(0, step)
            ring.wait(1, step)
            key, value = ring.at("k", step), ring.at("v", step)
            products = product(own["q"], key)
            passing = {name: ring.at(name, step) for name in ring.names[0] if name != "k"}
            k_first = functools.partial(ring.first, walked, step)
            meeting = Meeting(shape, 0, first, k_first, own | passing)
            values, factor = hidden(body, products, meeting, step >= walked.full)

            def add(dp):
                _, p = probabilities(body, values, factor, lse, 0)
                ds = p * dp()
                ring.release(1, step)
                add_product(total, ds, key)

            product_on(repeat(start, 0, shape), own["d_out"], value, add)
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
            values, factor = hidden(body, products, meeting, step >= walked.full)

            def add(dp):
                p, bent = probabilities(body, values, factor, column(passing["lse"], 1), 1)
                add_product(sums[1], p, d_out)
                add_product(sums[0], bent * dp(), query)

            start = repeat(column(passing["start"], 1), 1, shape)
            product_on(start, own["v"], d_out, add, later=1)
            ring.release(0, step)

        def everything(*sums):
            lax.fori_loop(0, walked.seen, lambda step, _: visit(step, sums), None)
            return tuple(total[...] for total in sums)

        shapes = [plgpu.ACC((ROWS, room[name].shape[-1]), F32) for name in ("k", "v")]
        d_key, d_value = pl.run_scoped(everything, *shapes)
        # Asked for again: these places would be kept in registers while products are summed.
        mine, rows = lax.axis_index(WARPGROUP), pl.ds(first, ROWS)
        place = {name: room[name].at[mine] for name in ("k", "v")}
        place["k"][...] = (d_key * body.scale).astype(dk.dtype)
        place["v"][...] = d_value.astype(dv.dtype)
        send(*((place[n], x.at[here.row, rows, here.key_head]) for n, x in (("k", dk), ("v", dv))))

    specialise(body, compute, move)
