"""Forward kernel for Hopper."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.backends.mosaic_gpu.layout import ROWS
from pallas_kernels.backends.mosaic_gpu.program import (
    LOG2E,
    Body,
    Meeting,
    Ring,
    Walk,
    fetch,
    logits,
    of_queries,
    send,
    specialise,
    walk,
)
from pallas_kernels.backends.mosaic_gpu.values import add_product, fill, product, repeat, sums_on
from pallas_kernels.backends.online_softmax import LOWEST


def forward(body: Body, x, out, lse, room) -> None:
    """Online softmax over the key tiles of 64 queries (FlashAttention-2, Dao 2023).

    Two warpgroups take turns: one multiplies, p v of a step and q k^T of the next without a wait
    between them, while the other computes its softmax (FlashAttention-3, Shah et al. 2024, section
    3.1).
    """
    here, cut = of_queries(body), body.cut
    walked = walk(body, x, here, cut.queries, cut.keys)
    ring = Ring(room["names"], room, cut.stages, cut.keys.tile)

    def move():
        lax.fori_loop(0, walked.seen, lambda i, _: ring.fill(x, here, i, walked.tile(i)), None)
        ring.drain(walked.seen)

    def compute(group):
        first = here.tile * cut.queries.tile + group * ROWS
        fetch(x, room, room["own_names"], here, first, group)
        acc, top, total = _softmax(body, walked, ring, room, group, first)
        some = total > 0
        safe = jnp.where(some, total, 1.0)
        out_room = room["out" if "out" in room else "q"].at[group]
        lse_room = room["lse"].at[group]
        out_room[...] = (acc * repeat(1.0 / safe, 0, acc.shape)).astype(out.dtype)
        lse_room[...] = jnp.where(some, top / LOG2E + jnp.log(safe), -jnp.inf)
        rows = pl.ds(first, ROWS)
        send(
            (out_room, out.at[here.row, rows, here.head]),
            (lse_room, lse.at[here.row, here.head, rows]),
        )

    specialise(body, compute, move)


def _softmax(body: Body, walked: Walk, ring: Ring, room, group, first):
    """(weighted values, maximum, denominator) of 64 queries."""
    query, shape = room["q"].at[group], (ROWS, body.cut.keys.tile)
    own = {name: room[name].at[group] for name in room["own_names"] if name != "q"}

    def turn(arrive: bool = True, wait: bool = True):
        if arrive and body.cut.groups > 1:
            plgpu.barrier_arrive(room["turn"].at[0])
        if wait and body.cut.groups > 1:
            plgpu.barrier_wait(room["turn"].at[0])

    def soften(step, products, top, total):
        """(p, maximum and denominator with this step's keys, what is kept of the sums before)."""
        values, factor = logits(body, products)
        passing = {name: ring.at(name, step) for name in ring.names[0] if name != "k"}
        k_first = functools.partial(ring.first, walked, step)
        meeting = Meeting(shape, 0, first, k_first, own | passing)
        values = meeting.hide(body, step >= walked.full, values, -jnp.inf)
        ring.release(0, step)
        new = jnp.maximum(top, jnp.max(values, 1) * factor)
        keep = jnp.exp2(top - new)
        p = jnp.exp2(values * factor - repeat(new, 0, shape))
        return p.astype(room["v"].dtype), new, total * keep + jnp.sum(p, 1), keep

    def visit(step, carry, more: bool = True):
        """Adds a step's values; its products are there, and the next step's are begun with them."""
        acc, products, *rows = carry
        p, *rows, keep = soften(step, products, *rows)
        acc, p, *rows = lax.optimization_barrier((acc * repeat(keep, 0, acc.shape), p, *rows))
        turn(wait=False)
        ring.wait(1, step)
        if more:
            ring.wait(0, step + 1)
        turn(arrive=False)

        def begin(sums, _):
            add_product(sums[0], p, ring.at("v", step))
            if more:
                plgpu.wgmma(sums[1], query, ring.at("k", step + 1).transpose((1, 0)))
                turn()

        starts = [acc, fill(shape, 0.0)] if more else [acc]
        acc, *products = sums_on(starts, begin)
        ring.release(1, step)
        return acc, *products, *rows

    def attend(acc, *rows):
        ring.wait(0, jnp.int32(0))
        pl.when(group == 1)(turn)
        products = product(query, ring.at("k", jnp.int32(0)), turn)
        last = walked.seen - 1
        carry = lax.fori_loop(0, last, visit, (acc, products, *rows))
        found = visit(last, carry, more=False)
        pl.when(group == 0)(turn)
        return found

    size = ring.room["v"].shape[-1]
    empty = fill((ROWS, size), 0.0), fill((ROWS,), LOWEST, 0), fill((ROWS,), 0.0, 0)
    return lax.cond(walked.seen > 0, attend, lambda *x: x, *empty)
