"""Kernel bodies for TPU: what one grid step computes of grouped softmax over older blocks.

A step multiplies some whole landmark blocks by one block of R rows (queries of one key head, see
`_tpu_layout`). Scores are [blocks, height, rows] everywhere: a block's tokens lie along sublanes
and the softmax inside it goes over whole registers; the padding to `height` rows makes it so. What
is one number per query is one row of lanes, [1, R]. Where keys are summed over, in the forward pass
and for dq, the result is gathered as [size, rows] from keys that come turned, [size, keys]: no step
transposes anything.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.backends.online_softmax import LOWEST
from pallas_kernels.backends.tpu.kernels import dot, read
from pallas_kernels.backends.tpu.landmark_layout import SUBLANES
from pallas_kernels.backends.tpu.tables import NOTHING, Call, Step


@dataclass(frozen=True)
class Body:
    """What is static in a kernel.

    Row r of a row block stands for query `(block * rows + r) // group`. The queries come scaled
    already unless `factor` is not 1; `scale` is the whole scale.
    """

    block: int  # tokens of a landmark block, the landmark included
    height: int  # keys that it takes: whole sublanes
    blocks: int  # landmark blocks of a step
    count: int  # landmark blocks that are there
    rows: int
    group: int
    factor: float
    scale: float

    @property
    def ragged(self) -> bool:
        return self.count % self.blocks != 0


class _Step:
    """The scores of one step, and which of them count."""

    def __init__(self, body: Body, step: Step, x):
        self.body, self.step, self.x = body, step, x

    @property
    def slot(self):
        return lax.broadcasted_iota(jnp.int32, (1, self.body.height, 1), 1)

    def q_number(self):
        """Number of the block in which each query stands, [1, rows]."""
        if self.x["q_numbers"] is not None:
            return self.x["q_numbers"][...]
        body = self.body
        place = self.step.row * body.rows + lax.broadcasted_iota(jnp.int32, (1, body.rows), 1)
        return lax.div(place, jnp.int32(body.group * body.block))

    def visible(self):
        """Which blocks each query sees, [blocks, rows]."""
        body, x = self.body, self.x
        place = lax.broadcasted_iota(jnp.int32, (body.blocks, 1), 0) + self.step.col * body.blocks
        seen = (place if x["k_numbers"] is None else x["k_numbers"][...]) < self.q_number()
        if x["k_segments"] is not None:
            segments = x["k_segments"][...]
            seen = seen & (x["q_segments"][...] == segments) & (segments != 0)
        return seen & (place < body.count) if body.ragged else seen

    def products(self, keys: str, rows: str):
        """Products of keys and rows as [blocks, height, rows]."""
        body = self.body
        x = dot(self.x[keys][...], self.x[rows][...], 1)
        return x.reshape(body.blocks, body.height, body.rows)

    def scores(self):
        """(exp of ordinary logits minus their maximum, its sums [blocks, rows], landmarks' logits).

        The exponentials are 0 for landmarks and for padding.
        """
        body = self.body
        logits = self.products("k", "q")
        if body.factor != 1.0:
            logits = logits * body.factor
        start = (body.block - 1) // SUBLANES * SUBLANES  # only one register holds landmarks
        near = slice(start, start + SUBLANES)
        marks = jnp.where(self.slot[:, near] == body.block - 1, logits[:, near], 0.0)
        logits = jnp.where(self.slot < body.block - 1, logits, -jnp.inf)
        p = jnp.exp(logits - jnp.max(logits, 1, keepdims=True))
        return p, jnp.sum(p, 1), jnp.sum(marks, 1)

    def flat(self, x, like):
        """[blocks, height, rows] as a matrix for products with `like`."""
        return x.reshape(-1, self.body.rows).astype(like.dtype)

    def gradients(self):
        """(weights, cotangent of the logits), both [blocks, height, rows].

        With w the weight of a block, p the probabilities inside it, g_j = v_j . d_out and their
        mean g = sum p_j g_j: d landmark = w (g - di), d logit_j = w p_j (g_j - g).
        """
        p, total, marks = self.scores()
        # A row without keys is masked everywhere; any finite lse keeps it finite until then.
        weight = jnp.where(self.visible(), jnp.exp(marks - self.x["lse"][...]), 0.0)
        g = self.products("v", "d_out")
        mean = jnp.sum(p * g, 1) / total
        d_mark = weight * (mean - self.x["di"][...])
        p = p * (weight / total)[:, None]
        landmark = self.slot == self.body.block - 1
        return p, jnp.where(landmark, d_mark[:, None], p * (g - mean[:, None]))


def forward(body: Body, call: Call, steps, x, out, lse, top, total, acc):
    """Online softmax over landmarks, each of which brings the softmax inside its block."""
    step = read(call, steps)

    @pl.when(step.first)
    def _():
        top[...] = jnp.full_like(top, LOWEST)
        total[...] = jnp.zeros_like(total)
        acc[...] = jnp.zeros_like(acc)

    @pl.when(step.kind != NOTHING)
    def _():
        here = _Step(body, step, x)
        p, inside, marks = here.scores()
        marks = jnp.where(here.visible(), marks, -jnp.inf)
        old = top[...]
        new = jnp.maximum(old, jnp.max(marks, 0, keepdims=True))
        weight, keep = jnp.exp(marks - new), jnp.exp(old - new)
        top[...] = new
        total[...] = total[...] * keep + jnp.sum(weight, 0, keepdims=True)
        p = p * (weight / inside)[:, None]
        value = x["v_turned"][...]
        acc[...] = acc[...] * keep + dot(value, here.flat(p, value), 0)

    @pl.when(step.last)
    def _():
        some = total[...] > 0
        safe = jnp.where(some, total[...], 1.0)
        out[...] = (acc[...] / safe).T.astype(out.dtype)
        lse[...] = jnp.where(some, top[...] + jnp.log(safe), -jnp.inf)


def d_queries(body: Body, call: Call, steps, x, dq, acc):
    """Cotangent of the queries of a row block."""
    step = read(call, steps)

    @pl.when(step.first)
    def _():
        acc[...] = jnp.zeros_like(acc)

    @pl.when(step.kind != NOTHING)
    def _():
        here = _Step(body, step, x)
        key = x["k_turned"][...]
        acc[...] += dot(key, here.flat(here.gradients()[1], key), 0)

    @pl.when(step.last)
    def _():
        dq[...] = (acc[...] * body.scale).T.astype(dq.dtype)


def d_keys(body: Body, call: Call, steps, x, dk, dv, acc_k, acc_v):
    """Cotangents of some blocks of keys and of values: sums over all rows, so over the group."""
    step = read(call, steps)

    @pl.when(step.first)
    def _():
        acc_k[...] = jnp.zeros_like(acc_k)
        acc_v[...] = jnp.zeros_like(acc_v)

    @pl.when(step.kind != NOTHING)
    def _():
        here = _Step(body, step, x)
        weights, d_logits = here.gradients()
        query, d_out = x["q"][...], x["d_out"][...]
        acc_v[...] += dot(here.flat(weights, d_out), d_out, 0)
        acc_k[...] += dot(here.flat(d_logits, query), query, 0)

    @pl.when(step.last)
    def _():
        dk[...] = (acc_k[...] * body.factor).astype(dk.dtype)
        dv[...] = acc_v[...].astype(dv.dtype)
