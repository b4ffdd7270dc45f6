"""Lists of blocks for the TPU kernels: every visit once, every output block written."""

import jax
import numpy as np
import pytest

from pallas_kernels import causal, chunks, prefix, window
from pallas_kernels.backends.tpu import grid as _tpu_grid
from pallas_kernels.tables import from_block_mask, from_mask


def _pairs(calls, axis):
    """{(row, col): kind} of all calls, which must be whole lists with first and last marked."""
    pairs, outputs = {}, set()
    for steps, count in calls:
        step = _tpu_grid.unpack(np.asarray(steps)[: int(count)])
        inside = False
        for row, col, kind, first, last in zip(*step, strict=True):
            assert bool(first) != inside or kind == _tpu_grid.NOTHING
            inside = (inside or bool(first)) and not last
            if first:
                outputs.add(int((row, col)[axis]))
            if kind != _tpu_grid.NOTHING:
                assert pairs.setdefault((int(row), int(col)), int(kind)) == kind
        assert not inside
    return pairs, outputs


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("traced", [False, True])
def test_packed_lists_hold_every_visit_once_and_every_output_block(monkeypatch, axis, cut, traced):
    if cut:
        monkeypatch.setattr(_tpu_grid, "SCALAR_BYTES", 4 * 30)
    mask = causal() & (window(40) | prefix(3)) & ~chunks(64)
    table = from_mask(mask, queries=200, keys=130, q_block=16, k_block=8)
    wanted = {}
    for i in range(13):
        for n in range(table.seen[0, 0, i]):
            kind = _tpu_grid.FULL if n < table.full[0, 0, i] else _tpu_grid.PARTIAL
            wanted |= {(i * 2 + half, int(table.index[0, 0, i, n])): kind for half in (0, 1)}

    def steps(table):
        visits = _tpu_grid.list_visits(table, heads=3, split=2)
        calls = _tpu_grid.kernel_calls(visits, axis, rows=26, cols=17, batch=1, heads=3)
        return [(call.steps, call.grid) for ((call,),) in calls]

    calls = (jax.jit(steps) if traced else steps)(table)
    assert (len(calls) > 1) == cut
    pairs, outputs = _pairs(calls, axis)
    assert pairs == wanted
    assert outputs == set(range((26, 17)[axis]))


def test_a_table_per_query_head_lists_the_group_one_head_after_the_other():
    visible = np.random.default_rng(0).random((1, 6, 5, 4)) < 0.5
    table = from_block_mask(visible, q_block=128, k_block=128)
    found = _tpu_grid.list_visits(table, heads=2, split=1)
    grid = _tpu_grid.kernel_calls(found, 1, rows=15, cols=4, batch=1, heads=2)
    ((call,),) = grid[0]
    lists = np.asarray(call.steps).reshape(2, call.size)
    for head, steps in enumerate(lists):
        step = _tpu_grid.unpack(steps)
        real = step.kind != _tpu_grid.NOTHING
        there = set(zip(step.row[real].tolist(), step.col[real].tolist(), strict=True))
        want = np.argwhere(visible[0, head * 3 : head * 3 + 3].reshape(15, 4))
        assert there == {(int(i), int(j)) for i, j in want}


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("heads", [1, 2])
def test_tables_of_nothing_still_write_every_output_block(axis, heads):
    table = from_block_mask(np.zeros((heads, 5, 4), bool), q_block=128, k_block=128)
    found = _tpu_grid.list_visits(table, heads=heads, split=1)
    [[[call]]] = _tpu_grid.kernel_calls(found, axis, rows=5, cols=4, batch=1, heads=heads)
    steps = _tpu_grid.unpack(call.steps)
    assert np.all(steps.kind == _tpu_grid.NOTHING) and np.all(steps.first & steps.last)
    assert list(steps[axis]) == list(range((5, 4)[axis])) * heads
