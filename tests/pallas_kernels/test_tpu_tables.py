"""Blocks of the TPU kernels: their sizes, and lists that have every visit and output block once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import causal, chunks, prefix, window
from pallas_kernels.backends.tpu import attention as _tpu
from pallas_kernels.backends.tpu import grid as _tpu_grid
from pallas_kernels.dispatch import Constant, Operands, Spec
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
    monkeypatch.setattr(_tpu_grid, "UNROLLED", 100)
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


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("traced", [False, True])
def test_equal_ranges_of_a_loop_hold_what_single_calls_hold(monkeypatch, axis, traced):
    """13 and 17 blocks have no large divisor, so the last range begins earlier."""
    monkeypatch.setattr(_tpu_grid, "SCALAR_BYTES", 4 * 30)
    table = from_mask(causal() & window(40), queries=208, keys=136, q_block=16, k_block=8)

    def lists(table):
        visits = _tpu_grid.list_visits(table, heads=1, split=1)
        calls = _tpu_grid.kernel_calls(visits, axis, rows=13, cols=17, batch=1, heads=1)

        def run(call):  # the list of each block, in its place of an output of as many rows
            steps = call.steps[: call.size]
            step = _tpu_grid.unpack(steps)
            places = (step.row, step.col)[axis] - call.first_block(call.steps)
            live = jnp.arange(call.size) < call.grid
            sums = jnp.zeros(call.blocks, jnp.int32).at[places].add(jnp.where(live, steps, 0))
            return sums[None, None, :, None]

        assert isinstance(calls, _tpu_grid.LoopedCalls) == (_tpu_grid.UNROLLED == 1)
        return _tpu_grid.run_calls(calls, run)

    found = []
    for unrolled in (1, 100):
        monkeypatch.setattr(_tpu_grid, "UNROLLED", unrolled)
        found.append(jax.jit(lists)(table) if traced else lists(table))
    assert found[0].shape == (1, 1, (13, 17)[axis], 1)
    np.testing.assert_array_equal(*found)


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


def window_spec(tokens: int) -> Spec:
    return Spec(causal() & window(tokens), 0.1)


def blocks(tokens: int, q_block: int):
    """A table of causal blocks [q_block, 128]."""
    q, k = np.arange(0, tokens, q_block)[:, None], np.arange(0, tokens, 128)
    return from_block_mask((k <= q)[None, None], q_block=q_block, k_block=128)


@pytest.mark.parametrize(
    ("heads", "spec", "forward", "backward"),
    [
        (8, Spec(causal(), 0.1), (1024, 1024), (512, 1024)),
        (8, window_spec(4096), (1024, 1024), (512, 1024)),
        (8, window_spec(512), (512, 512), (512, 512)),
        (2, window_spec(512), (1024, 512), (512, 512)),  # a block of rows is 256 tokens of 4 heads
        (2, window_spec(1024), (1024, 512), (512, 1024)),
    ],
)
def test_short_windows_have_smaller_blocks(heads, spec, forward, backward):
    q, k = (jax.ShapeDtypeStruct((1, 8192, n, 128), "bfloat16") for n in (8, heads))
    for wanted, is_backward in ((forward, False), (backward, True)):
        tiling, _ = _tpu._plan(q, k, k, Operands(), spec, is_backward)
        assert (tiling.rows, tiling.key_block) == wanted


@pytest.mark.parametrize(
    ("size", "v_size", "spec", "by_head"),
    [
        (64, 64, Spec(causal(), 0.1), True),
        (80, 80, window_spec(2048), True),
        (128, 128, Spec(causal(), 0.1), False),  # whole lanes
        (128, 64, Spec(causal(), 0.1), False),
        (64, 128, Spec(causal(), 0.1), False),
        (64, 64, window_spec(256), False),  # blocks of 128 or 256 tokens of 4 heads see fewer keys
        (64, 64, Spec(causal(), 0.1, table=Constant(blocks(8192, 64))), False),  # 64 rows of a head
        (64, 64, Spec(causal(), 0.1, table=Constant(blocks(8192, 1024))), True),
    ],
)
def test_heads_that_xla_stores_along_sublanes_are_read_so_in_blocks_of_one_head(
    size, v_size, spec, by_head, monkeypatch
):
    shapes = (8, size), (2, size), (2, v_size)
    arrays = [jax.ShapeDtypeStruct((1, 8192, *shape), "bfloat16") for shape in shapes]
    for backward in (False, True):
        arguments = *arrays, Operands(), spec
        plan = _tpu._plan(*arguments, backward)
        found = _tpu._plan_by_head(*arguments, plan, backward)
        assert (found is not None) == by_head
        assert found is None or found[0].by_head
        with monkeypatch.context() as patch:
            patch.setattr(_tpu_grid, "SCALAR_BYTES", 4 * 50)  # several calls
            assert _tpu._plan_by_head(*arguments, plan, backward) is None


@pytest.mark.parametrize("queries", [60, 64])
def test_the_queries_of_a_single_block_are_padded_to_whole_lanes_in_blocks_of_one_head(queries):
    q = jax.ShapeDtypeStruct((1, queries, 8, 64), "bfloat16")
    arguments = q, q, q, Operands(), Spec(causal(), 0.1, table=Constant(blocks(queries, 64)))
    for backward in (False, True):
        plan = _tpu._plan(*arguments, backward)
        tiling, _ = _tpu._plan_by_head(*arguments, plan, backward)
        assert tiling.rows == _tpu_grid.LANES


def test_blocks_of_traced_indices_are_the_usual_ones():
    q = jax.ShapeDtypeStruct((1, 8192, 8, 128), "bfloat16")

    def rows(index):
        tiling, _ = _tpu._plan(q, q, q, Operands(q_index=index), window_spec(512), False)
        return jnp.full(tiling.rows, tiling.key_block)

    assert jax.eval_shape(rows, jax.ShapeDtypeStruct((1, 8192), "int32")).shape == (1024,)
