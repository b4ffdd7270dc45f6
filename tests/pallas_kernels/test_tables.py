"""Block tables against dense visibility, block by block.

Tables of causal & (window(4096) | prefix(64)) take 0.6 ms for 131,072 tokens and 57 ms for
1,048,576 (blocks of 512, one core of a 2-core machine); `benchmarks/tables.py` prints such times.
The limits below are generous, for slow machines, and still far below any work of O(T^2).
"""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import Case, seen_by
from block_tables import agree, listed, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st

import pallas_kernels as pk
from pallas_kernels import causal, prefix, window
from pallas_kernels.masks import PerHead
from pallas_kernels.reference import expand
from pallas_kernels.tables import (
    from_block_mask,
    from_mask,
    from_top_k,
    restrict,
)

PARTS = pk.per_head((causal() & pk.chunks(8), 2), (window(5), 1), (causal(), 1))
LAMBDA = causal() & (window(9) | prefix(3))
ATOMS = st.one_of(
    st.sampled_from([causal(), pk.nothing(), pk.tail_of(6, 2), pk.documents([3, 17, 18])]),
    st.builds(window, st.integers(1, 30)),
    st.builds(prefix, st.integers(0, 30)),
    st.builds(pk.stride, st.integers(1, 9)),
    st.builds(pk.chunks, st.integers(1, 20), st.integers(-9, 9)),
    st.builds(pk.keys_in, st.lists(st.integers(0, 60), max_size=5)),
    st.builds(pk.queries_in, st.lists(st.integers(-20, 60), max_size=5)),
)
MASKS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.builds(lambda a, b: a & b, inner, inner),
        st.builds(lambda a, b: a | b, inner, inner),
        st.builds(lambda a: ~a, inner),
    ),
    max_leaves=5,
)


def blocks_of(seen, q_block, k_block, reduce=np.any):
    """bool [..., T, S] -> [..., nq, nk]: `reduce` over every block, the last ones shorter."""
    rows = range(0, seen.shape[-2], q_block)
    columns = range(0, seen.shape[-1], k_block)
    return np.stack(
        [
            np.stack(
                [reduce(seen[..., i : i + q_block, j : j + k_block], (-2, -1)) for j in columns], -1
            )
            for i in rows
        ],
        -2,
    )


def dense(mask, t, s, q_index=None, k_index=None, **segments):
    """bool [1 or B, 1 or N, T, S] by NumPy: JAX compiles programs for every mask and shape."""
    index = (np.arange(n) if x is None else x for x, n in ((q_index, t), (k_index, s)))
    q_index, k_index = map(np.atleast_2d, index)
    rows = [len(x) for x in (q_index, k_index, *segments.values())]
    heads = 4 if isinstance(mask, PerHead) else 1
    case = Case(batch=max(rows), t=t, s=s, heads=heads, mask=mask)
    return seen_by(case, q_index, k_index, **segments)


SEGMENTS = {
    "q_segments": np.array([[1] * 20 + [2] * 17, [3] * 30 + [0] * 7], np.int32),
    "k_segments": np.array([[1] * 16 + [2] * 25 + [0] * 2, [0] * 3 + [3] * 40], np.int32),
}
PLACES = {
    "places by default": {},
    "later queries": {"q_index": np.arange(6, 43, dtype=np.int32)},
    "segments": SEGMENTS,
    "places by row": {
        "q_index": np.stack([np.arange(37), np.arange(37) % 13]).astype(np.int32),
        "k_index": np.stack([np.arange(43)[::-1], np.arange(43) // 2]).astype(np.int32),
    },
    "places by row and segments": SEGMENTS
    | {"q_index": np.stack([np.arange(37) % 20, np.arange(37)]).astype(np.int32)},
}
TABLES = {
    "causal": causal(),
    "lambda": LAMBDA,
    "chunks and listed keys": causal() & (pk.chunks(8) | pk.keys_in([1, 30])),
    "far keys": causal() & ~window(12),
    "everything": pk.everything(),
    "nothing": pk.nothing(),
    "per head": PARTS,
}


@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("mask", TABLES.values(), ids=TABLES)
def test_a_table_holds_every_visible_block_and_calls_full_only_full_ones(mask, places):
    t, s, q_block, k_block = 37, 43, 8, 5
    table = from_mask(mask, queries=t, keys=s, q_block=q_block, k_block=k_block, **places)
    assert table.static and table.overflow is None
    visited, full = listed(table, -(-s // k_block))
    seen = dense(mask, t, s, **places)
    some, whole = (blocks_of(seen, q_block, k_block, f) for f in (np.any, np.all))
    shape = np.broadcast_shapes(some.shape, visited.shape)
    some, whole = (np.broadcast_to(x, shape) for x in (some, whole))
    assert (visited | ~some).all() and (whole | ~full).all()
    assert not full[..., -1].any(), "a shorter last key block needs its test"
    if not places:
        np.testing.assert_array_equal(visited, some)
        np.testing.assert_array_equal(full[..., :-1], whole[..., :-1])


@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
def test_a_traced_table_has_the_rows_of_the_static_one(places):
    sizes = dict(queries=37, keys=43, q_block=8, k_block=5)
    places = {"k_index": np.arange(43, dtype=np.int32)} | places

    @jax.jit
    def traced(places):
        return [from_mask(mask, **sizes, **places) for mask in TABLES.values()]

    for table, mask in zip(traced(places), TABLES.values(), strict=True):
        assert table.overflow is None
        agree(table, from_mask(mask, **sizes, **places))


def test_a_table_made_where_nothing_is_traced_stays_numpy_under_jit():
    def program(x):
        table = from_mask(causal(), queries=16, keys=16, q_block=4, k_block=4)
        assert table.static
        return x + table.seen.sum()

    assert jax.jit(program)(0) == 10


@settings(max_examples=150, deadline=None)
@given(MASKS, *[st.integers(1, 60)] * 2, *[st.integers(1, 17)] * 2, st.integers(-20, 30))
def test_tables_of_random_masks_contain_brute_force(mask, t, s, q_block, k_block, offset):
    q_index = offset + np.arange(t)
    table = from_mask(mask, queries=t, keys=s, q_block=q_block, k_block=k_block, q_index=q_index)
    visited, full = listed(table, -(-s // k_block))
    seen = np.broadcast_to(mask.element(q_index[:, None], np.arange(s)[None]), (t, s))[None, None]
    assert (visited | ~blocks_of(seen, q_block, k_block)).all()
    assert (blocks_of(seen, q_block, k_block, np.all) | ~full).all()


def test_block_masks_of_all_heads_or_rows_have_an_axis_of_one():
    visible = np.tril(np.ones((3, 3), bool))
    one = from_block_mask(visible, q_block=4, k_block=4)
    assert one.index.shape == (1, 1, 3, 3) and one.full.sum() == 0
    assert from_block_mask(visible[None], q_block=4, k_block=4).seen.shape == (1, 1, 3)
    for bad in (visible[0], visible[None, None, None]):
        with pytest.raises(ValueError, match=r"must be \[nq, nk\]"):
            from_block_mask(bad, q_block=4, k_block=4)
    with pytest.raises(ValueError, match=r"full has shape \(2, 3\)"):
        from_block_mask(visible, q_block=4, k_block=4, full=visible[:2])


def brute_top_k(indices, valid, count):
    visible = np.zeros((*indices.shape[:3], count), bool)
    for *row, n in np.ndindex(indices.shape):
        if valid[(*row, n)] and 0 <= indices[(*row, n)] < count:
            visible[(*row, indices[(*row, n)])] = True
    return visible


@pytest.mark.parametrize("traced", [False, True])
def test_top_k_lists_valid_choices_once_and_the_blocks_of_a_mask(traced):
    rng = np.random.default_rng(0)
    indices = rng.integers(-1, 9, (2, 3, 5, 4)).astype(np.int32)
    valid = rng.random(indices.shape) < 0.7

    def tables(indices, valid, later):
        make = functools.partial(from_top_k, keys=30, q_block=6, k_block=4)
        near = make(indices, valid, also=LAMBDA)
        return (
            make(indices),
            make(indices, valid),
            near,
            make(indices, also=causal(), q_index=later),
        )

    later = np.arange(30) + 9
    *plain, near, far = (jax.jit(tables) if traced else tables)(indices, valid, later)
    chosen, every = brute_top_k(indices, valid, 8), brute_top_k(indices, valid | True, 8)
    for table, expected in zip(plain, (every, chosen), strict=True):
        np.testing.assert_array_equal(listed(table, 8)[0], expected)
        assert table.full.sum() == 0 and table.overflow is None and table.capacity <= 4
    seen = blocks_of(dense(LAMBDA, 30, 30), 6, 4)
    np.testing.assert_array_equal(listed(near, 8)[0], chosen | seen)
    seen = blocks_of(dense(causal(), 30, 30, q_index=later), 6, 4)
    np.testing.assert_array_equal(listed(far, 8)[0], every | seen)
    assert far.capacity <= 8 and far.overflow is None


def test_top_k_of_key_heads_is_joined_with_a_mask_per_query_head():
    indices = np.array([3, 0]).reshape(1, 2, 1, 1)
    make = functools.partial(from_top_k, keys=16, q_block=4, k_block=4, also=PARTS)
    table = jax.jit(make)(indices)
    expected = brute_top_k(indices.repeat(2, 1), np.ones((1, 4, 1, 1), bool), 4)
    np.testing.assert_array_equal(
        listed(table, 4)[0], expected | blocks_of(dense(PARTS, 4, 16), 4, 4)
    )
    with pytest.raises(ValueError, match="of 3 heads does not fit a mask of 4 heads"):
        from_top_k(indices.repeat(3, 1)[:, :3], keys=8, q_block=4, k_block=4, also=PARTS)


@pytest.mark.parametrize(
    ("places", "traced"),
    [(places, False) for places in PLACES] + [("places by row and segments", True)],
)
def test_restricting_a_table_leaves_the_blocks_of_both(places, traced):
    sizes, places = dict(queries=37, keys=43), PLACES[places]
    rng = np.random.default_rng(1)
    visible = rng.random((2, 4, 5, 9)) < 0.6
    for mask in (LAMBDA, PARTS, pk.everything()):

        def both(visible, mask=mask):
            table = from_block_mask(visible, q_block=8, k_block=5)
            return restrict(table, mask, **sizes, **places)

        found = listed((jax.jit(both) if traced else both)(visible), 9)
        alone = listed(from_mask(mask, **sizes, q_block=8, k_block=5, **places), 9)
        for part, other in zip(found, alone, strict=True):
            np.testing.assert_array_equal(part, visible & other)


def test_restrict_keeps_the_order_and_full_blocks():
    index = np.array([[[[3, 0, 2, 1]]]], np.int32)
    counts = np.array([[[2]]], np.int32), np.array([[[4]]], np.int32)
    table = pk.BlockTable(index, *counts, None, q_block=4, k_block=4)
    kept = restrict(table, window(1), queries=4, keys=16)
    assert rows_of(kept) == {(0, 0, 0): ([3, 0, 2, 1], [])}
    kept = restrict(table, ~pk.stride(3) & ~pk.keys_in(range(8, 12)), queries=4, keys=16)
    assert rows_of(kept) == {(0, 0, 0): ([3, 0], [1])}
    segments = np.array([[1] * 4]), np.array([[1] * 13 + [0] * 3])
    kept = restrict(
        table, window(1), queries=4, keys=16, q_segments=segments[0], k_segments=segments[1]
    )
    assert rows_of(kept) == {(0, 0, 0): ([0, 2, 1], [3])}
    with pytest.raises(ValueError, match="of 3 heads does not fit a mask of 4 heads"):
        restrict(table.heads(lambda x: np.repeat(x, 3, 1)), PARTS, queries=4, keys=16)


SMALL = dict(queries=32, keys=32, q_block=4, k_block=4, capacity=3)


def test_a_capacity_that_is_too_small_is_an_error_where_it_is_known():
    for make in (
        lambda: from_mask(causal(), **SMALL),
        lambda: from_mask(causal(), **SMALL, q_index=jnp.arange(32)),
        lambda: from_mask(pk.per_head((window(2) & causal(), 1), (causal(), 1)), **SMALL),
        lambda: from_block_mask(np.ones((8, 8), bool), q_block=4, k_block=4, capacity=3),
        lambda: from_top_k(
            np.arange(8)[None, None, None], keys=32, q_block=4, k_block=4, capacity=3
        ),
    ):
        with pytest.raises(ValueError, match="capacity=3 is too small.* give at least 8"):
            make()
    with pytest.raises(ValueError, match="capacity=0 must be an integer of at least 1"):
        from_mask(causal(), **SMALL | {"capacity": 0})


def test_a_traced_capacity_that_is_too_small_raises_the_flag():
    @jax.jit
    def tables(q_index):
        made = from_mask(causal(), **SMALL, q_index=q_index)
        kept = restrict(made, window(9), queries=32, keys=32)
        return made, kept, from_mask(causal() & window(3), **SMALL, q_index=q_index)

    made, kept, fits = tables(np.arange(32))
    assert bool(made.overflow) and bool(kept.overflow)
    assert made.capacity == 3 and int(made.seen.max()) == 3 and not bool(fits.overflow)
    agree(fits, from_mask(causal() & window(3), **SMALL))
    exact = tables(np.arange(32) - 20)
    assert not any(bool(table.overflow) for table in exact)
    roomy = from_mask(causal(), **SMALL | {"capacity": 20})
    assert roomy.capacity == 20
    agree(roomy, from_mask(causal(), **SMALL | {"capacity": None}))


def test_a_table_expands_to_the_tokens_of_its_blocks():
    visible = np.array([[True, False, True], [False, False, False]])
    table = from_block_mask(visible, q_block=3, k_block=2)
    expected = visible.repeat(3, 0).repeat(2, 1)[:5, :5]
    np.testing.assert_array_equal(expand(table, 5, 5)[0, 0], expected)
    traced = jax.jit(lambda x: expand(from_block_mask(x, q_block=3, k_block=2), 5, 5))(visible)
    np.testing.assert_array_equal(traced[0, 0], expected)


def test_places_without_their_partner_raise_value_error():
    sizes = dict(queries=4, keys=4, q_block=2, k_block=2)
    with pytest.raises(ValueError, match="give both q_segments and k_segments"):
        from_mask(causal(), **sizes, q_segments=np.ones((1, 4), np.int32))
    with pytest.raises(ValueError, match="block=0"):
        from_mask(causal(), **sizes | {"q_block": 0})


@pytest.mark.parametrize(("tokens", "limit"), [(131_072, 0.2), (1_048_576, 2.0)])
def test_tables_of_long_texts_take_next_to_no_time(tokens, limit):
    def took(mask):
        start = time.perf_counter()
        table = from_mask(mask, queries=tokens, keys=tokens, q_block=512, k_block=512)
        return time.perf_counter() - start, table

    for mask in (causal() & (window(4096) | prefix(64)), causal()):
        seconds, table = min((took(mask) for _ in range(3)), key=lambda x: x[0])
        assert seconds < limit
    blocks = tokens // 512
    assert int(table.seen.sum()) == blocks * (blocks + 1) // 2
