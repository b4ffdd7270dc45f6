"""Transposed block tables: for each block of keys the blocks of queries that visit it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_tables import agree, listed
from hypothesis import given, settings
from hypothesis import strategies as st

import pallas_kernels as pk
from pallas_kernels import causal, window
from pallas_kernels.tables import BlockLists, from_block_mask, from_top_k, restrict, transpose


def agree_transposed(lists, visited, full):
    """`lists` names the pairs [b, h, nq, nk], for each key block the full ones first, ascending."""
    index, first, whole, seen = (np.asarray(vars(lists)[x]) for x in vars(lists))
    assert index.dtype == first.dtype == whole.dtype == seen.dtype == np.int32
    rows, columns = visited.shape[:2], visited.shape[3]
    assert index.shape[:2] == rows and first.shape == whole.shape == seen.shape == (*rows, columns)
    for b, h, j in np.ndindex(seen.shape):
        found = index[b, h, first[b, h, j] :][: seen[b, h, j]].tolist()
        some, untested = visited[b, h, :, j], full[b, h, :, j]
        expected = *np.flatnonzero(untested), *np.flatnonzero(some & ~untested)
        assert found == list(expected) and whole[b, h, j] == untested.sum()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 7), st.integers(1, 9), st.floats(0, 1))
def test_a_block_mask_is_listed_as_it_is_both_ways(seed, nq, nk, density):
    rng = np.random.default_rng(seed)
    visible = rng.random((2, 3, nq, nk)) < density
    full = visible & (rng.random(visible.shape) < 0.5)
    table = from_block_mask(visible, q_block=4, k_block=2, full=full)
    for found, expected in zip(listed(table, nk), (visible, full), strict=True):
        np.testing.assert_array_equal(found, expected)
    agree_transposed(transpose(table, 2 * nk), visible, full)


@functools.partial(jax.jit, static_argnames="capacity")
def both_ways(visible, full, capacity=None):
    table = from_block_mask(visible, q_block=4, k_block=2, full=full, capacity=capacity)
    return table, vars(transpose(table, 2 * visible.shape[-1]))


@pytest.mark.parametrize("capacity", [None, 4, 12])
@pytest.mark.parametrize("density", [0.0, 0.1, 0.3, 0.9, 1.0])
def test_a_traced_block_mask_is_listed_both_ways_as_far_as_it_fits(density, capacity):
    rng = np.random.default_rng(7)
    visible = rng.random((2, 3, 6, 9)) < density
    visible[0, 1, 2] = visible[1, 0, :, 3] = False
    full = visible & (rng.random(visible.shape) < 0.5)
    table, twin = both_ways(visible, full, capacity)
    fits = capacity is None or visible.sum(-1).max() <= capacity
    assert (table.overflow is None) == (capacity is None) and fits != bool(table.overflow)
    if fits:
        agree(table, from_block_mask(visible, q_block=4, k_block=2, full=full, capacity=capacity))
    agree_transposed(BlockLists(**twin), *listed(table, 9))


def test_chosen_blocks_restricted_by_masks_and_segments_are_listed_by_keys():
    sizes = dict(queries=37, keys=43)
    segments = np.array([[1] * 20 + [2] * 17, [3] * 30 + [0] * 7], np.int32)
    sizes |= dict(q_segments=segments, k_segments=np.pad(segments, ((0, 0), (3, 3))))
    masks = causal(), pk.everything(), pk.nothing(), pk.per_head((window(9), 3), (causal(), 1))
    chosen = np.random.default_rng(3).integers(-1, 12, (2, 4, 5, 6))

    @jax.jit
    def tables(chosen):
        table = from_top_k(chosen, keys=43, q_block=8, k_block=5)
        kept = [restrict(table, mask, **sizes) for mask in masks]
        return [(table, vars(transpose(table, 43))) for table in kept]

    counts = []
    for table, twin in tables(chosen):
        visited, full = listed(table, 9)
        agree_transposed(BlockLists(**twin), visited, full)
        counts.append(visited.sum())
        assert twin["seen"].sum() == visited.sum() and twin["full"].sum() == full.sum()
    # Under a causal mask there are fewer than under none, and under nothing() none at all.
    assert counts[1] > counts[0] > counts[2] == 0 and counts[3] > 0


def test_transposing_a_traced_table_takes_memory_for_its_entries_alone():
    nq = nk = 2048
    shape = jax.ShapeDtypeStruct((1, 8, nq, 96), jnp.int32)

    def turned(chosen):
        table = from_top_k(chosen, keys=64 * nk, q_block=64, k_block=64)
        return vars(transpose(table, 64 * nk))

    made, entries = jax.make_jaxpr(turned)(shape), 8 * nq * 96
    assert max(x.size for x in computed(made)) <= 4 * entries < 8 * nq * nk
    assert {x.shape for x in made.out_avals} == {(1, 8, nq * 96), (1, 8, nk)}


def computed(program):
    """The avals of all that a program computes, also within the programs that it calls."""
    for equation in program.eqns:
        yield from (x.aval for x in equation.outvars)
        for inner in jax.tree.leaves(equation.params):
            if hasattr(inner, "eqns"):
                yield from computed(inner)
