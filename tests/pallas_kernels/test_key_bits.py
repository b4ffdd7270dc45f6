"""Keys that each query chooses by itself: attention to them, and the choice of the best."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import causal, dispatch, flash, gather, key_bits
from pallas_kernels.backends.xla import blocks
from pallas_kernels.tables import from_block_mask


@pytest.mark.parametrize("keys", [1, 127, 129, 4096, 4500])
def test_words_hold_the_bits_of_their_keys(keys):
    visible = np.random.default_rng(keys).random((2, 3, keys)) < 0.5
    words = key_bits.pack(visible)
    np.testing.assert_array_equal(key_bits.pack(jnp.asarray(visible)), words)
    assert words.dtype == jnp.uint32 and words.shape == (2, 3, key_bits.num_words(keys))
    np.testing.assert_array_equal(key_bits.unpack(words)[..., :keys], visible)
    assert not np.any(key_bits.unpack(words)[..., keys:])
    part = np.pad(visible, [(0, 0), (0, 0), (0, 384)])[..., 128:384]
    np.testing.assert_array_equal(key_bits.unpack(words, 1, 2), part)


def test_blocks_without_chosen_keys_are_not_visited():
    q, k = jnp.zeros((2, 1024, 2, 8)), jnp.zeros((2, 4096, 1, 8))
    visible = np.zeros((2, 1024, 4096), bool)
    visible[0, 600, 3000] = visible[1, 3, 5] = True
    operands = dispatch.Operands(key_bits=key_bits.pack(jnp.asarray(visible)))
    sizes = blocks.BlockSizes(q=512, k=512, rule="test")
    tiling = blocks.make_tiling(q, k, sizes, has_bits=True)
    table = blocks.block_table(operands, dispatch.Spec(causal(), 1.0), 1024, 4096, tiling)
    seen = np.zeros((1, 1, 2, 8), bool)
    seen[0, 0, 0, 0] = True  # key 3000 is behind query 600
    want = from_block_mask(seen, q_block=512, k_block=512)
    np.testing.assert_array_equal(table.seen, want.seen)
    assert not np.any(table.full)


def test_wrong_input_names_the_way_out():
    q, k, visible = jnp.zeros((1, 8, 2, 8)), jnp.zeros((1, 70, 1, 8)), np.ones((1, 8, 70), bool)
    with pytest.raises(ValueError, match=r"bool \(1, 8, 70\), must be uint32 \(1, 8, 128\).*pack"):
        flash(q, k, k, key_bits=visible)
    table = from_block_mask(np.ones((1, 1), bool), q_block=8, k_block=70)
    with pytest.raises(ValueError, match="key_bits stand alone"):
        flash(q, k, k, key_bits=key_bits.pack(visible), table=table)


@pytest.mark.parametrize("k", [1, 70, 250, 300])
def test_the_kth_largest_value_is_that_of_a_sort(k):
    rng = np.random.default_rng(k)
    x = rng.normal(size=(3, 2, 300)).astype(np.float32)
    x[0, 0, :200] = x[0, 1, 3]  # equal values
    x[1, 0] = np.where(rng.random(300) < 0.5, -np.inf, x[1, 0])
    x[1, 1] = 0.0
    x[1, 1, ::2] = -0.0
    x[2, 0, :3] = np.inf, -3e38, 1e-45
    want = np.sort(x, -1)[..., ::-1][..., k - 1 : k]
    np.testing.assert_array_equal(jax.jit(gather.kth_largest, static_argnums=1)(x, k), want)


@pytest.mark.parametrize("count", [5, 100, 400])
def test_the_best_are_listed_in_order(count):
    rng = np.random.default_rng(count)
    x = rng.normal(size=(4, 300)).astype(np.float32)
    exists = rng.random((4, 300)) < np.array([[1.0], [0.5], [0.01], [0.0]])
    ids, is_valid = jax.jit(gather.best, static_argnums=1)(x, count, exists)
    assert ids.shape == (4, min(count, 300))
    for row in range(4):
        want = np.argsort(-np.where(exists[row], x[row], -np.inf), kind="stable")
        want = np.sort(want[: min(count, exists[row].sum())])
        np.testing.assert_array_equal(ids[row][is_valid[row]], want)
        assert not np.any(ids[row][~is_valid[row]])


@pytest.mark.parametrize("length", [300, 1500])
def test_of_equal_blocks_the_last_are_chosen(length):
    rng = np.random.default_rng(length)
    x = rng.integers(0, 4, (20, length)).astype(np.float32)
    count = length // 3
    is_best = jax.jit(gather.is_best, static_argnums=1)(x, count)
    order = np.lexsort((np.arange(length) * np.ones((20, 1)), x))[:, -count:]
    want = np.zeros(x.shape, bool)
    np.put_along_axis(want, order, True, -1)
    np.testing.assert_array_equal(is_best, want)


def test_tiles_of_queries_give_what_all_queries_give(monkeypatch):
    monkeypatch.setattr(gather, "BUDGET", 40)
    x = jnp.arange(2 * 23 * 3.0).reshape(2, 23, 3)
    sizes = []

    def run(arrays):
        sizes.append(arrays["x"].shape[1])
        return arrays["x"] * 2, arrays["y"]

    doubled, same = gather.by_tile(run, {"x": x, "y": x[..., 0]}, 8)
    np.testing.assert_array_equal(doubled, 2 * x)
    np.testing.assert_array_equal(same, x[..., 0])
    assert set(sizes) == {5}
