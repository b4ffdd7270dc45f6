"""Longformer, BigBird and the Sparse Transformer: who sees whom, against their definitions."""

import functools

import attention_golden as golden
import jax.numpy as jnp
import numpy as np
import pytest

from lcjax.attention import (
    AttentionMetadata,
    BigBird,
    Chunked,
    Longformer,
    Sliding,
    SparseTransformer,
)
from lcjax.errors import InputError
from pallas_kernels import band, by_heads, keys_in, queries_in, stride

T = 48
CAUSAL = np.tri(T, dtype=bool)


@functools.cache
def stored(name):
    with np.load(golden.FOLDER / "attention.npz") as data:
        return data[f"masks.static_t48.{name}"].astype(bool)


def dense(mask, length=T):
    at = np.arange(length)
    return np.broadcast_to(mask.element(at[:, None], at[None]), (length, length))


def seen(pattern, heads=4, length=T):
    """bool [N, T, T] of a pattern, head by head."""
    at = jnp.arange(length)[None]
    (step,) = pattern.passes(AttentionMetadata(at, at, num_heads=heads))
    parts = by_heads(step.mask, heads)
    return np.concatenate([np.repeat(dense(mask, length)[None], n, 0) for mask, n in parts])


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("sliding_causal_w8", Sliding(8)),
        ("sliding_causal_w8", Longformer(window=8)),
        ("sliding_symmetric_w4", Longformer(window=5)),
        ("dilated_causal_w4_d3", Longformer(window=5, dilation=3)),
        ("dilated_symmetric_w3_d2", Longformer(window=4, dilation=2)),
        ("longformer_w4_global_0_9", Longformer(window=5, global_tokens=(0, 9))),
        ("sparse_transformer_fixed_l8_c2", SparseTransformer(kind="fixed", stride=8, summary=2)),
    ],
    ids=str,
)
def test_a_pattern_sees_the_causal_half_of_the_stored_mask(name, pattern):
    np.testing.assert_array_equal(seen(pattern), np.broadcast_to(stored(name) & CAUSAL, (4, T, T)))


@pytest.mark.parametrize(
    ("name", "mask"),
    [
        ("sliding_symmetric_w4", band(-4, 4)),
        ("dilated_symmetric_w3_d2", band(-6, 6) & stride(2)),
        ("longformer_w4_global_0_9", band(-4, 4) | keys_in((0, 9)) | queries_in((0, 9))),
    ],
)
def test_masks_to_both_sides_equal_the_stored_ones(name, mask):
    np.testing.assert_array_equal(dense(mask), stored(name))


@pytest.mark.parametrize("size", [1, 7, T])
def test_chunked_attention_equals_separate_texts(size):
    expected = np.zeros((T, T), bool)
    for start in range(0, T, size):
        stop = min(start + size, T)
        expected[start:stop, start:stop] = np.tri(stop - start, dtype=bool)
    np.testing.assert_array_equal(seen(Chunked(size)), np.broadcast_to(expected, (4, T, T)))


def test_the_strided_heads_of_the_sparse_transformer_equal_the_stored_masks():
    near, far = stored("sparse_transformer_local_l8"), stored("sparse_transformer_strided_l8")
    split = seen(SparseTransformer(stride=8, heads="split"), heads=3)
    np.testing.assert_array_equal(split, [near, far, far])
    merged = seen(SparseTransformer(stride=8), heads=1)
    np.testing.assert_array_equal(merged[0], near | far)


def test_heads_take_groups_of_summaries_in_turn():
    got = seen(SparseTransformer(kind="fixed", stride=8, summary=2, columns=3), heads=4)
    at = np.arange(T)
    own = at[:, None] // 8 == at[None] // 8
    for head, tail in enumerate([(6, 7), (4, 5), (2, 3), (6, 7)]):
        np.testing.assert_array_equal(got[head], CAUSAL & (own | np.isin(at % 8, tail)[None]))
    split = seen(SparseTransformer(kind="fixed", stride=8, summary=2, heads="split"), heads=2)
    np.testing.assert_array_equal(split, [CAUSAL & own, CAUSAL & (at % 8 >= 6)[None]])


def test_only_the_last_heads_of_longformer_are_dilated():
    got = seen(Longformer(window=4, dilation=2, dilated_heads=1, global_tokens=(1,)), heads=3)
    at = np.arange(T)
    away = at[:, None] - at[None]
    shared = (at == 1)[None] | (at == 1)[:, None]
    for head, near in enumerate([away < 4, away < 4, (away <= 6) & (away % 2 == 0)]):
        np.testing.assert_array_equal(got[head], CAUSAL & (near | shared))


def drawn(pattern, head, length=96, heads=4):
    """The blocks that each block of queries sees beside the window and the first blocks."""
    size = pattern.block
    blocks = seen(pattern, heads, length)[head][size - 1 :: size, ::size]
    rows = [np.flatnonzero(row) for row in blocks]
    near, first = pattern.near, pattern.global_blocks
    return [[n for n in row.tolist() if first <= n < i - near] for i, row in enumerate(rows)]


def test_bigbird_sees_its_window_the_first_blocks_and_so_many_drawn_ones():
    pattern = BigBird(block=4, near=2, global_blocks=1, random=2)
    got = seen(pattern, length=96)
    blocks = np.arange(96) // 4
    always = (blocks[:, None] - blocks[None] <= 2) | (blocks == 0)[None]
    always = always & np.tri(96, dtype=bool)
    for head in range(4):
        assert (got[head] | ~always).all() and not (got[head] & ~np.tri(96, dtype=bool)).any()
        counts = [len(row) for row in drawn(pattern, head)]
        assert counts == [min(2, max(n - 3, 0)) for n in range(24)]
    # All that may be drawn is drawn by some seed and row; heads and seeds differ.
    others = [BigBird(block=4, near=2, random=2, seed=seed) for seed in range(40)]
    everywhere = {n for other in others for row in drawn(other, 0, heads=1) for n in row}
    assert everywhere == set(range(1, 21))
    assert drawn(pattern, 0) != drawn(pattern, 1)
    assert drawn(pattern, 0) != drawn(BigBird(block=4, near=2, random=2, seed=1), 0)
    shared = BigBird(block=4, near=2, random=2, per_head=False)
    assert drawn(shared, 0) == drawn(shared, 3) == drawn(pattern, 0)


def test_random_blocks_stay_when_the_text_grows():
    pattern = BigBird(block=4, random=2)
    np.testing.assert_array_equal(seen(pattern, length=50), seen(pattern, length=96)[:, :50, :50])


def test_a_plan_of_the_authors_is_taken_as_it_is():
    plan = np.random.default_rng(0).integers(0, 12, (4, 12, 3))  # [heads, query blocks, random]
    pattern = BigBird(block=4, table=tuple(tuple(map(tuple, rows)) for rows in plan.tolist()))
    blocks = np.arange(T) // 4
    ours = (blocks[:, None] - blocks[None] <= 1) | (blocks == 0)[None]
    for head in range(4):
        listed = (plan[head][blocks][:, None] == blocks[None, :, None]).any(-1)
        np.testing.assert_array_equal(seen(pattern)[head], CAUSAL & (ours | listed))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: seen(Longformer(dilation=2, dilated_heads=9)), "9 must not exceed the 4 heads"),
        (
            lambda: SparseTransformer(kind="fixed", stride=8, summary=5, columns=2),
            "pattern.summary=5 times pattern.columns=2 must not exceed pattern.stride=8",
        ),
        (lambda: seen(SparseTransformer(heads="split"), heads=1), "needs 2; there is 1"),
        (lambda: BigBird(block=0), "pattern.block=0 must be"),
        (lambda: BigBird(random=-1), "pattern.random=-1 must be"),
        (lambda: BigBird(table=(((0, -2),),)), "pattern.table: a block=-2 must be"),
        (lambda: seen(BigBird(table=(((0,),),) * 3)), "pattern.table holds 3 plans; must hold 1"),
    ],
)
def test_what_does_not_fit_raises_input_error(make, message):
    with pytest.raises(InputError, match=message) as error:
        make()
    assert "\n" not in str(error.value)
