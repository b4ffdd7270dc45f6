"""Backward kernels for Hopper: dq, and dk with dv, from the saved log-sum-exp.

A step's second product, of d_out and v, is begun behind the element test: beside the sums, no
thread has the registers for both products and the test. Its sums are ready when p is.
"""

from __future__ import annotations

import functools

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.backends.mosaic_gpu.layout import ROWS
from pallas_kernels.backends.mosaic_gpu.program import (
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
from pallas_kernels.backends.mosaic_gpu.values import (
    add_product,
    column,
    fill,
    product,
    repeat,
    sums_on,
)


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

            def begin(sums, ready):
                plgpu.wgmma(sums[0], own["d_out"], value.transpose((1, 0)))
                _, p = probabilities(body, values, factor, lse, 0)
                ds = p * ready(0, later=0)
                ring.release(1, step)
                add_product(sums[1], ds, key)

            _, total = sums_on([repeat(start, 0, shape), total], begin)
            ring.release(0, step)
            return total

        found = lax.fori_loop(0, walked.seen, visit, fill((ROWS, room["q"].shape[-1]), 0.0))
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

            def begin(sums, ready):
                plgpu.wgmma(sums[0], own["v"], d_out.transpose((1, 0)))
                p, bent = probabilities(body, values, factor, column(passing["lse"], 1), 1)
                add_product(sums[2], p, d_out)
                ds = bent * ready(0, later=1)
                add_product(sums[1], ds, query)

            start = repeat(column(passing["start"], 1), 1, shape)
            _, *sums = sums_on([start, *sums], begin)
            ring.release(0, step)
            return sums

        empty = [fill((ROWS, room[name].shape[-1]), 0.0) for name in ("k", "v")]
        d_key, d_value = lax.fori_loop(0, walked.seen, visit, empty)
        # Asked for again: these places would be kept in registers while products are summed.
        mine, rows = lax.axis_index(WARPGROUP), pl.ds(first, ROWS)
        place = {name: room[name].at[mine] for name in ("k", "v")}
        place["k"][...] = (d_key * body.scale).astype(dk.dtype)
        place["v"][...] = d_value.astype(dv.dtype)
        send(*((place[n], x.at[here.row, rows, here.key_head]) for n, x in (("k", dk), ("v", dv))))

    specialise(body, compute, move)
