"""Which blocks of keys a block of queries walks, and what is hidden inside them."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from pallas_kernels.backends.xla.blocks import Cut, Places, rows_of, take
from pallas_kernels.block_table import BlockTable
from pallas_kernels.blocks import blocks_of, meet
from pallas_kernels.dispatch import Operands, Spec, given_table
from pallas_kernels.masks import Mask
from pallas_kernels.tables import from_block_mask, from_mask, restrict


def table_of(operands: Operands, spec: Spec, t: int, s: int, cut: Cut) -> BlockTable:
    """The visits of the cut's blocks: of each chunk of batch rows and of heads, or of all.

    Full blocks need no test at all. Constants where all that the table is made from is known.
    """
    given = given_table(operands, spec)
    places = dict(
        zip(("q_index", "k_index", "q_segments", "k_segments"), operands[:4], strict=True)
    )
    if given is not None:
        return restrict(given, spec.mask, queries=t, keys=s, **places)
    batch = max((x.shape[0] for x in operands[:4] if x is not None), default=1)
    if batch == 1 or cut.batch == 1:
        sizes = dict(queries=t, keys=s, q_block=cut.bq, k_block=cut.bk)
        return from_mask(spec.mask, **sizes, **places)
    return _joint(operands, spec.mask, t, s, cut)


def _joint(operands: Operands, mask: Mask, t: int, s: int, cut: Cut) -> BlockTable:
    """What the rows of a batch chunk see together."""
    q_index, k_index, q_segments, k_segments = operands[:4]
    q = blocks_of(q_index, q_segments, t, cut.bq).take(lambda x: x[:, :, None])
    k = blocks_of(k_index, k_segments, s, cut.bk, cut_is_mixed=True).take(lambda x: x[:, None])
    some, whole = (
        x.reshape(cut.batch_chunks, cut.batch, 1, cut.nq, cut.nk) for x in meet(mask, q, k)
    )
    return from_block_mask(some.any(1), full=whole.all(1), q_block=cut.bq, k_block=cut.bk)


def visible(mask: Mask, places: Places, cut: Cut, chunk, i, j):
    """bool [batch or 1, 1, rows of the query block, rows of the key block]."""

    def of_block(q, k):
        q, k = (rows_of(x, cut, chunk) for x in (take(q, i), take(k, j)))
        return q[:, :, None], k[:, None, :]

    seen = jnp.asarray(mask.element(*of_block(places.q_index, places.k_index)))
    if places.q_segments is not None:
        q, k = of_block(places.q_segments, places.k_segments)
        seen = seen & (q == k) & (k != 0)
    return jnp.repeat(seen, cut.group, axis=1)[:, None]


def walk(table: BlockTable, cut: Cut, chunk, i, step, carry):
    """Runs `carry = step(j, partial, carry)` over the key blocks that query block i sees."""
    batch, heads = table.seen.shape[:2]
    row = chunk // cut.head_chunks if batch > 1 else 0
    head = chunk % cut.head_chunks if heads > 1 else 0
    arrays = (table.index, table.full, table.seen)
    order, full, seen = (take(take(take(x, row), head), i) for x in arrays)

    def run(partial):
        return lambda n, carry: step(take(order, n), partial, carry)

    return lax.fori_loop(full, seen, run(True), lax.fori_loop(0, full, run(False), carry))
