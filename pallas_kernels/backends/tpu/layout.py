"""How queries and keys are laid out for the TPU kernels: blocks, rows, padding.

The G query heads that share a key head are rows of one matrix, so keys are never repeated: row
r of a key head is query r // G of head r % G. Where tables differ by query head, the queries of
one head come first, then those of the next. Rows are cut into blocks of `rows`, a multiple of the
128 lanes; a table's block of queries may be several of them. Head sizes are padded to whole lanes,
which is how the memory holds them anyway.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax.numpy as jnp

LANES = 128
KEYS = 2048  # most keys of a block
# Rows and keys of a step's blocks, forward and backward, by operand and head size. Blocks of 128
# are slow: the step costs more than its products. A block of keys is read again for every block
# of rows, so the more rows, the less memory traffic: with 1,024 of them v6e is bound by its
# products, with 512 by its memory. A kernel may use 16 MB of VMEM (v5e's limit); scores of
# [1024, 1024] float32 are 4 MB, and a backward step holds four such arrays beside its operands.
# Products of float32 in full precision are six of bfloat16, which smaller blocks keep busy too.
BLOCKS = {
    ("bfloat16", 128): ((1024, 1024), (512, 1024)),
    ("bfloat16", 256): ((512, 1024), (512, 512)),
    ("float32", 128): ((512, 512), (512, 512)),
    ("float32", 256): ((512, 512), (256, 512)),
}


def lanes(n: int) -> int:
    """n rounded up to whole lanes."""
    return -(-n // LANES) * LANES


def divide(rows: int, most: int) -> int:
    """Largest divisor of `rows` of at most `most` that fills whole lanes; 0 when there is none."""
    return next((n for n in range(most, 0, -LANES) if rows % n == 0), 0)


@dataclass(frozen=True)
class Layout:
    """Sizes; `by_head` when tables differ by query head of a key head."""

    batch: int
    heads: int
    group: int
    queries: int
    keys: int
    by_head: bool
    rows: int  # of a block
    split: int  # row blocks in a table's block of queries
    count: int  # row blocks of a key head
    key_block: int
    key_count: int

    @property
    def period(self) -> int:
        """Row blocks after which the same queries come again, for the next head."""
        return self.count // self.group if self.by_head else self.count

    def to_rows(self, x):
        """[B, T, N, ...] -> [B, K, rows, ...]."""
        rest = x.shape[3:]
        x = x.reshape(*x.shape[:2], self.heads, self.group, *rest)
        if self.by_head:
            x = _pad(jnp.moveaxis(x, 1, 3), 3, self.period * self.rows)
            return x.reshape(self.batch, self.heads, -1, *rest)
        x = jnp.moveaxis(x, 1, 2)
        return _pad(x.reshape(self.batch, self.heads, -1, *rest), 2, self.count * self.rows)

    def from_rows(self, x):
        """[B, K, rows, ...] -> [B, T, N, ...]."""
        rest = x.shape[3:]
        if self.by_head:
            x = x.reshape(self.batch, self.heads, self.group, -1, *rest)[:, :, :, : self.queries]
            x = jnp.moveaxis(x, 3, 1)
        else:
            x = x[:, :, : self.queries * self.group]
            x = x.reshape(self.batch, self.heads, self.queries, self.group, *rest)
            x = jnp.moveaxis(x, 2, 1)
        return x.reshape(self.batch, self.queries, self.heads * self.group, *rest)

    def query_vector(self, x):
        """[1 or B, T] -> [1 or B, 1, rows of one period]."""
        x = x if self.by_head else jnp.repeat(x, self.group, axis=1)
        return _pad(x, 1, self.period * self.rows)[:, None]

    def head_vector(self, x):
        """[N] -> [K, 1, rows]."""
        x = jnp.broadcast_to(x, (1, self.queries, x.shape[0]))
        return replace(self, batch=1).to_rows(x)[0][:, None]

    def to_keys(self, x):
        """[B, S, K, H] -> [B, K, padded S, padded H]."""
        return _pad(x, 1, self.key_count * self.key_block).swapaxes(1, 2)

    def from_keys(self, x, size: int):
        """[B, K, padded S, padded H] -> [B, S, K, size]."""
        return x[:, :, : self.keys, :size].swapaxes(1, 2)

    def key_vector(self, x):
        """[1 or B, S] -> [1 or B, 1, padded S]."""
        return _pad(x, 1, self.key_count * self.key_block)[:, None]


def _pad(x, axis: int, length: int):
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, length - x.shape[axis])
    return jnp.pad(x, widths)


def wide(x):
    """The last axis padded to whole lanes."""
    return _pad(x, x.ndim - 1, lanes(x.shape[-1]))


def step_blocks(q, v, backward: bool) -> tuple[int, int]:
    """Rows and keys of a step."""
    size = lanes(max(q.shape[-1], v.shape[-1]))
    return BLOCKS[str(q.dtype), size][backward]


def table_blocks(q, k, v, backward: bool, by_head: bool = False) -> tuple[int, int]:
    """Sizes of a table's blocks of queries and of keys, where the caller gives no table.

    by_head: blocks hold queries of one head.
    """
    rows, most_keys = step_blocks(q, v, backward)
    (queries, n), (keys, heads) = q.shape[1:3], k.shape[1:3]
    group = 1 if by_head else n // heads
    by_rows = ((divide(size * group, rows), -size) for size in (128, 256, 512, 1024))
    q_block = -max(by_rows)[1]
    if queries * group <= LANES and max(q.shape[-1], v.shape[-1]) <= LANES:
        most_keys = KEYS  # decoding reads the cache once and computes little
    return q_block, min(most_keys, lanes(keys))


def layout(q, k, v, *, lists: int, q_block: int, k_block: int, backward: bool) -> Layout:
    """`lists`: how many tables there are along heads (1, K or N)."""
    (batch, queries, n), (keys, heads) = q.shape[:3], k.shape[1:3]
    by_head = lists > heads
    width = 1 if by_head else n // heads
    key_block = min(k_block, lanes(keys))
    rows, most_keys = step_blocks(q, v, backward)
    most = min(rows, max(LANES, rows * most_keys // key_block // LANES * LANES))
    table_rows = -(-queries // q_block)
    if table_rows == 1:  # few queries: no more rows than there are
        rows = min(lanes(queries * width), most)
        split = -(-queries * width // rows)
    else:
        rows = divide(q_block * width, most)
        split = q_block * width // rows
    return Layout(
        batch=batch,
        heads=heads,
        group=n // heads,
        queries=queries,
        keys=keys,
        by_head=by_head,
        rows=rows,
        split=split,
        count=split * table_rows * (n // heads if by_head else 1),
        key_block=key_block,
        key_count=-(-keys // key_block),
    )
