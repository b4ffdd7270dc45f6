"""Grouped softmax over older landmark blocks for NVIDIA GPUs in Pallas-Triton: forward, dq, dk, dv.

Programs and their lists are those of block-sparse attention (`attention.py`), with landmark blocks
in place of blocks of keys. Arrays are read in their own layout, the tokens of a block padded to the
next power of two, and nothing is accumulated in memory. A program does not visit blocks that none
of its rows may see: those of their own number and above, and those of other documents.

A step is one landmark block, with scores [rows, tokens]. The softmax inside it is computed and used
within the step (and again in the backward pass). So a row has one weight for a block, and the
visibility test is on vectors of rows, not on scores. Scores have the same axes if the block is
resident (dk, dv): the sums over tokens then stay within a few threads, which is worth transposing
the weights for the last two products.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import nvidia
from pallas_kernels import online_softmax as online
from pallas_kernels.backends.triton.attention import (
    kernel_blocks,
    list_operands,
    residuals,
    table_blocks,
    unsupported_arrays,
    vectors,
)
from pallas_kernels.backends.triton.kernels import (
    F32,
    Block,
    KernelSpec,
    arange,
    axis,
    by_keys,
    by_rows,
    dot,
    finish,
    matrix,
    next_power_of_two,
    over_heads,
    row_of,
    store,
    visit,
)
from pallas_kernels.dispatch import visible_blocks
from pallas_kernels.explanations import report
from pallas_kernels.tables import transpose


def forward(q, k, v, operands, spec, *, platform="cuda", interpret=False):
    """Returns out [B, T, N, Hv] in q's dtype and lse float32 [B, T, N]."""
    kernel_spec, x = _prepare("forward", q, k, v, operands, spec, interpret)
    x |= {"q": q, "k": k, "v": v}
    out, lse = by_rows(landmark_forward, kernel_spec, x, [(q.dtype, v.shape[-1]), "vector"])
    return out[0], lse[0].swapaxes(1, 2)


def backward(q, k, v, out, lse, d_out, d_lse, operands, spec, *, platform="cuda", interpret=False):
    """Returns the cotangents of q, k and v; that of lse enters through `di`."""
    arrays = residuals(q, k, v, out, lse, d_out, d_lse)
    kernel_spec, x = _prepare("d_queries", q, k, v, operands, spec, interpret)
    (dq,) = by_rows(landmark_d_queries, kernel_spec, x | arrays, [(q.dtype, q.shape[-1])])
    kernel_spec, x = _prepare("d_keys", q, k, v, operands, spec, interpret)
    return dq[0], *by_keys(landmark_d_keys, kernel_spec, x | arrays), None


def unsupported(q, k, v, operands, spec) -> str | None:
    """Returns why these kernels cannot run the inputs, or None; reads no values of arrays."""
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
    size = next_power_of_two(max(q.shape[-1], v.shape[-1]))
    return nvidia.landmark(kind, size, next_power_of_two(spec.block), q.dtype)


def _prepare(kind: str, q, k, v, operands, spec, interpret: bool):
    """Returns the static part of a kernel, and the operands besides q, k, v and residuals."""
    (queries, block), transposed = (q.shape[1], spec.block), kind == "d_keys"
    tile, count = _tile(kind, q, v, spec), k.shape[1] // block
    q_block, k_block = table_blocks(queries, count, tile)
    rows, keys = axis(queries, q_block, tile.rows), axis(count, k_block, tile.keys)
    table = visible_blocks(operands, spec, queries, count, q_block, k_block)
    block_lists = transpose(table, count) if transposed else table.lists()
    # The kernels test the rows of every block.
    report(lambda: kernel_blocks(kind, tile, rows, keys, 1, table.tested(), block=block))
    kernel_spec = LandmarkSpec(
        mask=spec.mask,
        scale=spec.scale,
        soft_cap=None,
        rows=rows,
        keys=keys,
        size=q.shape[-1],
        v_size=v.shape[-1],
        group=q.shape[2] // k.shape[2],
        transposed=transposed,
        has_full=False,  # the test is cheap: one per row
        has_partial=True,
        copies=block,
        warps=tile.warps,
        stages=tile.stages,
        interpret=interpret,
        block=block,
    )
    return kernel_spec, vectors(operands) | list_operands(block_lists, rows, keys)


@dataclass(frozen=True, kw_only=True)
class LandmarkSpec(KernelSpec):
    """The static part; `keys` counts landmark blocks, one per step; indices are block numbers."""

    block: int  # tokens of a landmark block, the landmark included

    @property
    def height(self) -> int:
        """The number of keys that a step reads: a power of two."""
        return next_power_of_two(self.block)


class LandmarkBlock(Block):
    """The scores of one landmark block."""

    def along(self, rows=None, keys=None):
        """Returns a vector of rows, or of the step's only block, unchanged."""
        return rows if keys is None else keys

    @property
    def slot(self):
        return arange(0, self.spec.height)[None]

    def end(self, number):
        """Returns the end of a block's keys, or of all keys; None: no step reads beyond it."""
        spec = self.spec
        if spec.block == spec.height and not spec.ragged_keys:
            return None
        end = (number + 1) * spec.block
        return jnp.minimum(end, spec.keys.length * spec.block) if spec.ragged_keys else end

    def tokens(self, name: str, number):
        """Returns a block's keys or values [height, padded size], with 0 beyond its tokens."""
        spec = self.spec
        ref, start = self.x[name], number * spec.block
        return matrix(ref, start, spec.height, spec.width(name), self.end(number))

    def scores(self, products):
        """Returns exp(ordinary logits - maximum), its sums [rows], and landmarks' logits [rows].

        The exponentials are 0 for the landmark and for padding; landmarks' logits are in base 2.
        """
        slot, mark = self.slot, self.spec.block - 1
        logits, factor, _ = self.logits(products, None, None)
        marks = jnp.sum(jnp.where(slot == mark, logits, 0.0), 1) * factor
        logits = jnp.where(slot < mark, logits, -jnp.inf)
        p = jnp.exp2(logits * factor - (jnp.max(logits, 1) * factor)[:, None])
        return p, jnp.sum(p, 1), marks

    def gradients(self, products, g, lse, di, seen):
        """Returns the weights and the cotangent of the logits, both [rows, tokens].

        Let w be the weight of a block, p the probabilities inside it, g_j = v_j . d_out (argument
        `g`) and m = sum p_j g_j. Then d landmark = w (m - di), d logit_j = w p_j (g_j - m).
        """
        p, inside, marks = self.scores(products)
        weight = jnp.where(seen, jnp.exp2(marks - lse), 0.0)
        mean = jnp.sum(p * g, 1) / inside
        p = p * (weight / inside)[:, None]
        d_mark, landmark = weight * (mean - di), self.slot == self.spec.block - 1
        return p, jnp.where(landmark, d_mark[:, None], p * (g - mean[:, None]))


def landmark_forward(spec: LandmarkSpec, x, out, lse):
    """Computes an online softmax over landmarks, and the softmax inside the block of each."""
    row, block = row_of(spec), LandmarkBlock(spec, x)
    query = block.matrix("q", row)

    def step(masked: bool, number, carry):
        top, total, acc = carry
        p, inside, marks = block.scores(dot(spec, query, block.tokens("k", number), 1))
        marks = jnp.where(block.seen(row, number), marks, -jnp.inf)
        new = jnp.maximum(top, marks)
        weight, keep = jnp.exp2(marks - new), jnp.exp2(top - new)
        value = block.tokens("v", number)
        p = (p * (weight / inside)[:, None]).astype(value.dtype)
        return new, total * keep + weight, acc * keep[:, None] + dot(spec, p, value, 0)

    start = online.start((spec.rows.unit,), x["v"].shape[-1])
    finish(spec, row, *visit(spec, x, step, start), out, lse)


def landmark_d_queries(spec: LandmarkSpec, x, dq):
    """Computes dq of a row block."""
    row, block = row_of(spec), LandmarkBlock(spec, x)
    query, d_out = block.matrix("q", row), block.matrix("d_out", row)
    lse, di = block.row_vector("lse", row, jnp.inf), block.row_vector("di", row, 0)

    def step(masked: bool, number, acc):
        k = block.tokens("k", number)
        products, g = dot(spec, query, k, 1), dot(spec, d_out, block.tokens("v", number), 1)
        _, d = block.gradients(products, g, lse, di, block.seen(row, number))
        return acc + dot(spec, d.astype(k.dtype), k, 0)

    acc = visit(spec, x, step, jnp.zeros((spec.rows.unit, x["k"].shape[-1]), F32))
    store(dq, row, acc * spec.scale, spec.size, spec.end_of_rows)


def landmark_d_keys(spec: LandmarkSpec, x, dk, dv):
    """Computes dk and dv of a landmark block: sums over all rows, and so over the group."""
    number, block = pl.program_id(0), LandmarkBlock(spec, x)
    k, v = block.tokens("k", number), block.tokens("v", number)

    def step(head, masked: bool, row, carry):
        acc_k, acc_v = carry
        lane = None if spec.group == 1 else head
        query, d_out = block.matrix("q", row, lane), block.matrix("d_out", row, lane)
        lse, di = block.row_vector("lse", row, jnp.inf, lane), block.row_vector("di", row, 0, lane)
        products, g = dot(spec, query, k, 1), dot(spec, d_out, v, 1)
        p, d = block.gradients(products, g, lse, di, block.seen(row, number))
        acc_v = acc_v + dot(spec, p.astype(d_out.dtype), d_out, 0, of=0)
        return acc_k + dot(spec, d.astype(query.dtype), query, 0, of=0), acc_v

    sum_k, sum_v = over_heads(spec, x, step, spec.height)
    start, end = number * spec.block, block.end(number)
    store(dk, start, sum_k * spec.scale, spec.size, end)
    store(dv, start, sum_v, spec.v_size, end)
