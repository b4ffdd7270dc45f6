"""The blocks and chunks of arrays that the blockwise XLA implementation loops over.

Keys and values have the layout [B, K, S, H], so that a block of them is one slice in the layout of
the product. A cache in this layout is never copied (XLA drops the swap of axes), and a decoding
step reads only the visible part of it. The G query heads that share a key head are rows of one
matrix: keys are never repeated, and every product is one batched matrix product
[rows, H] x [H, keys] over B and K.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import key_bits
from pallas_kernels.dispatch import (
    Operands,
    Spec,
    block_pairs,
    default_q_index,
    user_table,
    visible_blocks,
)
from pallas_kernels.explanations import KernelBlocks
from pallas_kernels.folded import FoldedHeads
from pallas_kernels.masks import Mask
from pallas_kernels.online_softmax import row_cotangent
from pallas_kernels.quantised import Floats, read_slots, swap_heads
from pallas_kernels.tables import BlockTable, from_block_mask

CPU_SCORES = 5 * 2**18  # 5 MB of float32: a step's scores and probabilities share the L3 cache


@dataclass(frozen=True)
class BlockSizes:
    """The numbers of queries and keys of a step, and the most scores of it.

    `scores` bounds batch * heads * queries * keys of one step by loops over batch rows and key
    heads: on a CPU a step's scores must stay in the cache. None: no such loops, so that these axes
    can be sharded.
    """

    q: int
    k: int
    scores: int | None = None
    rule: str = ""  # the choice of the sizes, for `explain`


def forward_blocks(queries: int, keys: int, platform: str) -> BlockSizes:
    """Returns block sizes of the forward pass.

    They are large enough to keep the matrix units busy, and small enough to skip hidden blocks. A
    CPU keeps the scores of one step in its cache; the limits are measured
    (benchmarks/attention.py). Few queries (decoding) make few scores, so their key blocks are
    longer: there are fewer steps, which still read only the visible part of a cache.
    """
    if platform != "cpu":
        return BlockSizes(q=512, k=1024, rule="forward on accelerators")
    if queries <= 64:
        rule = "few queries on a CPU, measured"
        return BlockSizes(q=64, k=1024, scores=CPU_SCORES, rule=rule)
    # Long inputs waste less on the diagonal's masked half.
    size, lengths = (256, "up to") if keys <= 2048 else (512, "more than")
    rule = f"{lengths} 2048 keys on a CPU, measured"
    return BlockSizes(q=size, k=size, scores=CPU_SCORES, rule=rule)


def backward_blocks(platform: str) -> BlockSizes:
    """Returns block sizes of the backward pass: smaller, because it holds twice the scores."""
    if platform != "cpu":
        return BlockSizes(q=512, k=512, rule="backward on accelerators")
    return BlockSizes(q=256, k=256, scores=CPU_SCORES, rule="backward on a CPU, measured")


class Tiling(NamedTuple):
    """The loop structure: `chunks` of [batch, heads], in each `nq` x `nk` blocks of bq x bk."""

    batch: int
    heads: int
    batch_chunks: int
    head_chunks: int
    nq: int
    bq: int
    nk: int
    bk: int
    group: int

    @property
    def chunks(self) -> int:
        return self.batch_chunks * self.head_chunks


def make_tiling(q, k, blocks: BlockSizes, table=None, has_bits: bool = False) -> Tiling:
    """Returns the tiling of q [B, T, N, H] and k [B, S, K, H]; a caller's table sets its blocks.

    Rows or heads whose tables differ are separate chunks. Blocks of codes are whole entries, and
    those of keys with `key_bits` whole lanes.
    """
    unit = math.lcm(getattr(k, "slots_per_entry", 1), key_bits.LANES if has_bits else 1)
    (b, t, n), (s, heads) = q.shape[:3], k.shape[1:3]
    group, batch, chunk_heads = n // heads, b, heads
    if table is None:
        most = blocks.k
        if isinstance(k, FoldedHeads):  # else the one block is a reshaped cache (`folded.py`)
            most = min(most, -(-s // 2))
        (nq, bq), (nk, bk) = _even(t, blocks.q), _even(-(-s // unit), max(most // unit, 1))
        bk *= unit
    else:
        bq, bk = table.q_block, table.k_block
        if bk % unit:
            raise ValueError(
                f"flash: table of blocks of {bk} keys, and {unit} keys share a scale; make it with"
                f" k_block={-(-bk // unit) * unit}"
            )
        nq, nk = -(-t // bq), -(-s // bk)
    if blocks.scores is not None:
        fit = blocks.scores // (bq * group * bk)
        chunk_heads = _largest_divisor(heads, fit)
        # Rows that are heads of a cache are a part of one text's, or those of some texts.
        of_text = k.array.shape[1] if isinstance(k, FoldedHeads) else 1
        batch = _largest_divisor(b, fit // heads, of_text)
    if table is not None:
        rows, table_heads = table.seen.shape[:2]
        batch, chunk_heads = batch if rows == 1 else 1, chunk_heads if table_heads == 1 else 1
    return Tiling(batch, chunk_heads, b // batch, heads // chunk_heads, nq, bq, nk, bk, group)


def kernel_blocks(
    kernel: str, blocks: BlockSizes, tiling: Tiling, table: BlockTable, *, has_user_table: bool
) -> KernelBlocks:
    """Returns the report of a pass; `blocks` are the sizes from which the tiling was made."""
    reasons = [f"{blocks.q} x {blocks.k} is for {blocks.rule}"]
    if has_user_table:
        reasons = ["the caller's table sets the blocks"]
    else:
        for name, count, size, most in (
            ("queries", tiling.nq, tiling.bq, blocks.q),
            ("keys", tiling.nk, tiling.bk, blocks.k),
        ):
            if size != most:
                parts = f"{count} equal blocks of {size} {name}"
                reasons.append(f"one block holds all {name}" if count == 1 else parts)
    if tiling.chunks > 1:
        why = f"a step has at most {blocks.scores} scores, which stay in the CPU's cache"
        if has_user_table and max(table.seen.shape[:2]) > 1:
            why = "the others have another table"
        numbers = (
            (tiling.batch, tiling.batch * tiling.batch_chunks, "batch rows"),
            (tiling.heads, tiling.heads * tiling.head_chunks, "key heads"),
        )
        parts = [f"{few} of {every} {name}" for few, every, name in numbers if few < every]
        reasons.append(f"{' and '.join(parts)} at a time, because {why}")
    return KernelBlocks(
        kernel=kernel,
        queries=tiling.bq,
        heads=tiling.group,
        rows=tiling.bq * tiling.group,
        keys=tiling.bk,
        reason="; ".join(reasons),
        fraction=table.fraction(tiling.nk * table.k_block),
    )


def _even(length: int, block: int) -> tuple[int, int]:
    """Number and size of equal blocks of about `block`: without padding where nearly as good."""
    least = max(1, -(-length // block))
    exact = (n for n in range(least, least + least // 2 + 1) if length % n == 0)
    count = next(exact, least)
    return count, -(-length // count)


def _largest_divisor(n: int, most: int, unit: int = 1) -> int:
    """Returns the largest divisor of `n` up to `most` that divides `unit` or is a multiple."""
    divisors = (d for d in range(1, max(1, min(n, most)) + 1) if n % d == 0)
    return max(d for d in divisors if d % unit == 0 or unit % d == 0)


class Positions(NamedTuple):
    """Order indices and segments of queries and keys, [blocks, 1 or batch, rows of a block]."""

    q_index: jax.Array
    k_index: jax.Array
    q_segments: jax.Array | None
    k_segments: jax.Array | None
    key_bits: jax.Array | None  # [blocks of queries, B, rows of a block, words of all keys]


def positions(operands: Operands, spec: Spec, t: int, s: int, tiling: Tiling) -> Positions:
    """Splits positions like queries and keys; NumPy arrays stay constants of the program."""
    q_index, k_index, q_segments, k_segments = operands[:4]
    q_index = default_q_index(spec, t) if q_index is None else q_index
    k_index = np.arange(s, dtype=np.int32)[None] if k_index is None else k_index
    if q_segments is None and tiling.nk * tiling.bk != s:
        # Padded keys get segment 0, which hides them.
        q_segments, k_segments = np.ones((1, t), np.int32), np.ones((1, s), np.int32)
    # Repeating the last index keeps block bounds tight; padded queries have zero cotangents and
    # are removed again, so what they see does not matter.
    return Positions(
        _blocks(q_index, tiling.nq, tiling.bq, mode="edge"),
        _blocks(k_index, tiling.nk, tiling.bk, mode="edge"),
        _blocks(q_segments, tiling.nq, tiling.bq, mode="edge"),
        _blocks(k_segments, tiling.nk, tiling.bk, mode="constant"),
        _bits_by_block(operands.key_bits, tiling),
    )


def _bits_by_block(bits, tiling: Tiling):
    if bits is None:
        return None
    bits = pad(bits, tiling.nq * tiling.bq)
    return jnp.moveaxis(bits.reshape(len(bits), tiling.nq, tiling.bq, -1), 1, 0)


def _blocks(x, count: int, size: int, mode: str):
    if x is None:
        return None
    xp = np if isinstance(x, np.ndarray) else jnp
    x = xp.pad(x, [(0, 0), (0, count * size - x.shape[1])], mode)
    return xp.moveaxis(x.reshape(x.shape[0], count, size), 1, 0)


class ChunkStart(NamedTuple):
    """The first batch row and the first key head of a chunk."""

    row: jax.Array
    head: jax.Array


def chunk_start(tiling: Tiling, chunk) -> ChunkStart:
    row, head = chunk // tiling.head_chunks, chunk % tiling.head_chunks
    return ChunkStart(row * tiling.batch, head * tiling.heads)


def take(x, i):
    return lax.dynamic_index_in_dim(jnp.asarray(x), i, 0, keepdims=False)


def rows_of(x, tiling: Tiling, chunk):
    """Returns the chunk's rows [batch or 1, ...] of x [1 or B, ...]."""
    if x.shape[0] <= tiling.batch:
        return x
    return lax.dynamic_slice_in_dim(x, chunk_start(tiling, chunk).row, tiling.batch)


def pad(x, length: int, value=0):
    rest = [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x, [(0, 0), (0, length - x.shape[1]), *rest], constant_values=value)


def heads_first(x, tiling: Tiling):
    """[B, S, K, H] -> [B, K, S, H], padded to whole blocks; folded heads stay folded."""
    slots = x.shape[1]
    if isinstance(x, FoldedHeads):
        return FoldedHeads(swap_heads(pad(swap_heads(x.array), tiling.nk * tiling.bk)))

    def of_array(part):
        return swap_heads(pad(part, tiling.nk * tiling.bk * part.shape[1] // slots))

    return jax.tree.map(of_array, x)


def query_block(x, tiling: Tiling, chunk, i):
    """Returns block i [batch, heads, bq * G, ...] of x [B, T, N, ...]."""
    heads, rest = tiling.heads * tiling.group, x.shape[3:]
    row, head = chunk_start(tiling, chunk)
    first = (row, i * tiling.bq, head * tiling.group, *(0,) * len(rest))
    x = lax.dynamic_slice(_wide(x), first, (tiling.batch, tiling.bq, heads, *rest))
    x = jnp.moveaxis(x.reshape(tiling.batch, tiling.bq, tiling.heads, tiling.group, *rest), 2, 1)
    return x.reshape(tiling.batch, tiling.heads, tiling.bq * tiling.group, *rest)


def key_block(x, tiling: Tiling, chunk, j):
    """Returns block j [batch, heads, bk / n, H] of x [B, K, S / n, H]."""
    if isinstance(x, FoldedHeads):
        _, heads, _, width = x.array.shape
        row, head = divmod(chunk_start(tiling, chunk).row, heads)
        size = max(tiling.batch // heads, 1), min(tiling.batch, heads), tiling.bk, width
        block = lax.dynamic_slice(_wide(x.array), (row, head, j * tiling.bk, 0), size)
        return block.reshape(tiling.batch, 1, tiling.bk, width)
    size = tiling.bk * x.shape[2] // (tiling.nk * tiling.bk)
    first = (*chunk_start(tiling, chunk), j * size, 0)
    return lax.dynamic_slice(_wide(x), first, (tiling.batch, tiling.heads, size, x.shape[3]))


def read_block(x, tiling: Tiling, chunk, j, dtype) -> Floats:
    """Returns block j of keys or values [B, K, S, H] as floats, also if they are codes.

    Args:
      dtype: that of the queries. float16 is read as float32 (`_wide`).
    """
    block = jax.tree.map(
        lambda part: key_block(part, tiling, chunk, j),
        x,
        is_leaf=lambda part: isinstance(part, FoldedHeads),
    )
    return read_slots(block, jnp.dtype("float32") if dtype == jnp.float16 else dtype)


def _wide(x):
    # The cotangents of probabilities may exceed the range of float16.
    return x.astype(jnp.float32) if x.dtype == jnp.float16 else x


def join_chunks(x, tiling: Tiling, length: int, group: int):
    """[chunks, blocks, batch, heads, rows * group, ...] -> [B, length, heads * group, ...]."""
    blocks, rows, rest = x.shape[1], x.shape[4] // group, x.shape[5:]
    chunks = tiling.batch_chunks, tiling.head_chunks
    x = x.reshape(*chunks, blocks, tiling.batch, tiling.heads, rows, group, *rest)
    x = jnp.moveaxis(x, (0, 3, 2, 5, 1, 4, 6), range(7))
    heads = tiling.head_chunks * tiling.heads * group
    return x.reshape(tiling.batch_chunks * tiling.batch, blocks * rows, heads, *rest)[:, :length]


def by_query(x, tiling: Tiling):
    """[..., N, bq, bk] by query head -> [..., heads, bq * G, bk], the layout of scores."""
    x = x.reshape(*x.shape[:-3], tiling.heads, tiling.group, tiling.bq, tiling.bk)
    return x.swapaxes(-2, -3).reshape(*x.shape[:-3], tiling.bq * tiling.group, tiling.bk)


def by_head(x, tiling: Tiling):
    """Inverts `by_query`."""
    x = x.reshape(*x.shape[:-2], tiling.bq, tiling.group, tiling.bk).swapaxes(-2, -3)
    return x.reshape(*x.shape[:-4], tiling.heads * tiling.group, tiling.bq, tiling.bk)


def backward_rows(q, out, lse, d_out, d_lse, tiling: Tiling):
    """Returns [q, d_out, di, lse] padded to whole blocks, for a backward pass.

    lse is inf for rows without keys and for padding, so their probabilities are exp(-inf) = 0.
    """
    rows = tiling.nq * tiling.bq
    padded = [pad(x, rows) for x in (q, d_out, row_cotangent(out, d_out, d_lse))]
    return [*padded, pad(jnp.where(lse == -jnp.inf, jnp.inf, lse), rows, jnp.inf)]


def dot(x, y, axis_x: int, axis_y: int):
    """Returns float32 products of matrices x, y [batch, heads, .., ..] over an axis of each."""
    dims = (((axis_x + 2,), (axis_y + 2,)), ((0, 1), (0, 1)))
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.dot_general(x, y, dims, precision=precision, preferred_element_type=jnp.float32)


def add(sums, j, update):
    """Returns `sums` [blocks, ...] with `update` added to block j."""
    return lax.dynamic_update_index_in_dim(sums, take(sums, j) + update, j, 0)


def block_table(operands: Operands, spec: Spec, t: int, s: int, tiling: Tiling) -> BlockTable:
    """Returns the key blocks that each block of queries visits, per chunk or for all chunks.

    The arrays are constants if all inputs of the table are.
    """
    arrays = *operands[:4], operands.key_bits
    batch = max((x.shape[0] for x in arrays if x is not None), default=1)
    if user_table(operands, spec) is not None or batch == 1 or tiling.batch == 1:
        return visible_blocks(operands, spec, t, s, tiling.bq, tiling.bk)
    return _joint(operands, spec, t, s, tiling)


def _joint(operands: Operands, spec: Spec, t: int, s: int, tiling: Tiling) -> BlockTable:
    """Returns the union of the blocks that the rows of each batch chunk see."""
    shape = tiling.batch_chunks, tiling.batch, 1, tiling.nq, tiling.nk
    pairs = block_pairs(operands, spec, t, s, tiling.bq, tiling.bk)
    visible, full = (x.reshape(shape) for x in pairs)
    return from_block_mask(visible.any(1), full=full.all(1), q_block=tiling.bq, k_block=tiling.bk)


def visible(mask: Mask, positions: Positions, tiling: Tiling, chunk, i, j):
    """Returns the mask of a pair of blocks, bool [batch or 1, 1, rows of i, keys of j]."""

    def of_block(q, k):
        q, k = (rows_of(x, tiling, chunk) for x in (take(q, i), take(k, j)))
        return q[:, :, None], k[:, None, :]

    seen = jnp.asarray(mask.element(*of_block(positions.q_index, positions.k_index)))
    if positions.q_segments is not None:
        q, k = of_block(positions.q_segments, positions.k_segments)
        seen = seen & (q == k) & (k != 0)
    if positions.key_bits is not None:
        words, count = rows_of(take(positions.key_bits, i), tiling, chunk), tiling.bk
        count //= key_bits.LANES
        seen = seen & key_bits.unpack(words, j * count, count)
    return jnp.repeat(seen, tiling.group, axis=1)[:, None]


def walk(table: BlockTable, tiling: Tiling, chunk, i, step, carry):
    """Runs `carry = step(j, partial, carry)` over the key blocks that query block i sees."""
    batch, heads = table.seen.shape[:2]
    row = chunk // tiling.head_chunks if batch > 1 else 0
    head = chunk % tiling.head_chunks if heads > 1 else 0
    arrays = (table.index, table.full, table.seen)
    order, full, seen = (take(take(take(x, row), head), i) for x in arrays)

    def run(partial):
        return lambda n, carry: step(take(order, n), partial, carry)

    return lax.fori_loop(full, seen, run(True), lax.fori_loop(0, full, run(False), carry))
