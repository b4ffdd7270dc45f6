"""Kernel bodies for GPUs in Pallas-Triton: grouped softmax over older blocks, forward and backward.

A step is one landmark block: [rows, tokens] of scores. The softmax inside it is made and used
within the step, in the backward pass a second time, so a row has one weight of a block, and which
rows see the block is a test of vectors, not of scores. Where the block stays, scores lie the same
way: sums over tokens within a few threads are worth turning the weights for the last two products.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.backends import online_softmax as online
from pallas_kernels.backends.triton.kernels import (
    F32,
    Block,
    count,
    dot,
    finish,
    matrix,
    over_heads,
    put,
    row_of,
    visit,
)
from pallas_kernels.backends.triton.layout import Body, power


@dataclass(frozen=True, kw_only=True)
class LandmarkBody(Body):
    """`keys` counts landmark blocks, one in a step; order indices are numbers of blocks."""

    block: int  # tokens of a landmark block, the landmark included

    @property
    def height(self) -> int:
        """Keys that a step reads: a power of two."""
        return power(self.block)


class LandmarkBlock(Block):
    """The scores of one landmark block."""

    def along(self, rows=None, keys=None):
        """Vectors of rows meet the one block of a step as they are."""
        return rows if keys is None else keys

    @property
    def slot(self):
        return count(0, self.body.height)[None]

    def end(self, number):
        """The first key beyond a block's, and beyond all keys; None: a step reads none of them."""
        body = self.body
        if body.block == body.height and not body.cut_keys:
            return None
        end = (number + 1) * body.block
        return jnp.minimum(end, body.keys.length * body.block) if body.cut_keys else end

    def tokens(self, name: str, number):
        """A block's keys or values [height, padded size], 0 where it has no more tokens."""
        body = self.body
        ref, start = self.x[name], number * body.block
        return matrix(ref, start, body.height, body.width(name), self.end(number))

    def scores(self, products):
        """(exp of ordinary logits minus their maximum, its sums [rows], landmarks' logits [rows]).

        The exponentials are 0 for the landmark and for padding; landmarks' logits are in base 2.
        """
        slot, mark = self.slot, self.body.block - 1
        logits, factor, _ = self.logits(products, None, None)
        marks = jnp.sum(jnp.where(slot == mark, logits, 0.0), 1) * factor
        logits = jnp.where(slot < mark, logits, -jnp.inf)
        p = jnp.exp2(logits * factor - (jnp.max(logits, 1) * factor)[:, None])
        return p, jnp.sum(p, 1), marks

    def gradients(self, products, g, lse, di, seen):
        """(weights, cotangent of the logits), both as the scores; g: products of values and d_out.

        With w the weight of a block, p the probabilities inside it and their mean g = sum p_j g_j:
        d landmark = w (g - di), d logit_j = w p_j (g_j - g).
        """
        p, inside, marks = self.scores(products)
        weight = jnp.where(seen, jnp.exp2(marks - lse), 0.0)
        mean = jnp.sum(p * g, 1) / inside
        p = p * (weight / inside)[:, None]
        d_mark, landmark = weight * (mean - di), self.slot == self.body.block - 1
        return p, jnp.where(landmark, d_mark[:, None], p * (g - mean[:, None]))


def landmark_forward(body: LandmarkBody, x, out, lse):
    """Online softmax over landmarks, each of which brings the softmax inside its block."""
    row, block = row_of(body), LandmarkBlock(body, x)
    query = block.matrix("q", row)

    def step(masked: bool, number, carry):
        top, total, acc = carry
        p, inside, marks = block.scores(dot(body, query, block.tokens("k", number), 1))
        marks = jnp.where(block.seen(row, number), marks, -jnp.inf)
        new = jnp.maximum(top, marks)
        weight, keep = jnp.exp2(marks - new), jnp.exp2(top - new)
        value = block.tokens("v", number)
        p = (p * (weight / inside)[:, None]).astype(value.dtype)
        return new, total * keep + weight, acc * keep[:, None] + dot(body, p, value, 0)

    start = online.start((body.rows.unit,), x["v"].shape[-1])
    finish(body, row, *visit(body, x, step, start), out, lse)


def landmark_d_queries(body: LandmarkBody, x, dq):
    """Cotangent of the queries of a row block."""
    row, block = row_of(body), LandmarkBlock(body, x)
    query, d_out = block.matrix("q", row), block.matrix("d_out", row)
    lse, di = block.row_vector("lse", row, jnp.inf), block.row_vector("di", row, 0)

    def step(masked: bool, number, acc):
        k = block.tokens("k", number)
        products, g = dot(body, query, k, 1), dot(body, d_out, block.tokens("v", number), 1)
        _, d = block.gradients(products, g, lse, di, block.seen(row, number))
        return acc + dot(body, d.astype(k.dtype), k, 0)

    acc = visit(body, x, step, jnp.zeros((body.rows.unit, x["k"].shape[-1]), F32))
    put(dq, row, acc * body.scale, body.size, body.end_of_rows)


def landmark_d_keys(body: LandmarkBody, x, dk, dv):
    """Cotangents of a block of keys and of values: sums over all rows, so over the group too."""
    number, block = pl.program_id(0), LandmarkBlock(body, x)
    k, v = block.tokens("k", number), block.tokens("v", number)

    def step(head, masked: bool, row, carry):
        acc_k, acc_v = carry
        lane = None if body.group == 1 else head
        query, d_out = block.matrix("q", row, lane), block.matrix("d_out", row, lane)
        lse, di = block.row_vector("lse", row, jnp.inf, lane), block.row_vector("di", row, 0, lane)
        products, g = dot(body, query, k, 1), dot(body, d_out, v, 1)
        p, d = block.gradients(products, g, lse, di, block.seen(row, number))
        acc_v = acc_v + dot(body, p.astype(d_out.dtype), d_out, 0, of=0)
        return acc_k + dot(body, d.astype(query.dtype), query, 0, of=0), acc_v

    sum_k, sum_v = over_heads(body, x, step, body.height)
    start, end = number * body.block, block.end(number)
    put(dk, start, sum_k * body.scale, body.size, end)
    put(dv, start, sum_v, body.v_size, end)
