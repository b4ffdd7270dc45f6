"""What a block table says, as plain lists and flags, with checks of its form."""

import numpy as np


def rows_of(table):
    """Per query block (full, partial) lists of key blocks, and checks of the table's form."""
    index, full, seen = (np.asarray(x) for x in (table.index, table.full, table.seen))
    assert index.dtype == full.dtype == seen.dtype == np.int32
    assert (full <= seen).all() and (seen <= table.capacity).all()
    rows = {}
    for place in np.ndindex(seen.shape):
        row, count = index[place], seen[place]
        assert count == 0 or (row[count:] == row[count - 1]).all(), "the tail repeats the last"
        assert len(set(row[:count])) == count, "a block is visited once"
        rows[place] = row[: full[place]].tolist(), row[full[place] : count].tolist()
    return rows


def listed(table, nk):
    """(visited, full) bool [b, h, nq, nk]."""
    visited, full = (np.zeros((*table.seen.shape, nk), bool) for _ in range(2))
    for place, (whole, partial) in rows_of(table).items():
        visited[place][whole + partial] = True
        full[place][whole] = True
    return visited, full


def agree(a, b):
    assert rows_of(a) == rows_of(b)
    assert (a.q_block, a.k_block) == (b.q_block, b.k_block)
