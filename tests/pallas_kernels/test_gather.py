"""Summaries, scores and choices of blocks against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gather

best = jax.jit(gather.best, static_argnums=1)
best_blocks = jax.jit(gather.best_blocks, static_argnums=(2, 3))
pooled = jax.jit(gather.pooled, static_argnums=1)
RNG = np.random.default_rng(0)
K = RNG.normal(size=(2, 24, 2, 8)).astype(np.float32)
Q = RNG.normal(size=(2, 5, 4, 8)).astype(np.float32)
# Five blocks of four; the second row's lie in other slots, not in order.
SLOTS = np.stack([np.arange(20), RNG.permutation(24)[:20]]).reshape(2, 5, 4).astype(np.int32)
BLOCKS = K[np.arange(2)[:, None, None], SLOTS]  # [B, C, block, K, H]


def test_a_landmark_is_the_last_key_of_its_block():
    np.testing.assert_array_equal(jax.jit(gather.landmarks)(K, SLOTS), BLOCKS[:, :, -1])


def test_scores_are_products_of_a_head_with_the_keys_it_shares():
    got = jax.jit(gather.scores)(Q, BLOCKS[:, :, 0])
    want = np.einsum("btnh,bcnh->btnc", Q, np.repeat(BLOCKS[:, :, 0], 2, 2))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_pooling_leaves_out_padding_and_missing_blocks():
    x = RNG.normal(size=(2, 5, 4, 6)).astype(np.float32)
    is_query, exists = np.ones((2, 5), bool), np.ones((2, 6), bool)
    is_query[1, :2], exists[0, 4:] = False, False
    assert gather.pooled(x, "token_and_head") is x
    chunk = pooled(x, "chunk", is_query)
    np.testing.assert_allclose(chunk[1], x[1, 2:].mean(0).sum(0), rtol=1e-5, atol=1e-5)
    head = np.asarray(pooled(x, "head_and_chunk", is_query, exists))
    p = np.exp(x[0, :, :, :4])
    np.testing.assert_allclose(
        head[0, :, :4], np.log(p / p.sum(-1, keepdims=True)).max(0), rtol=1e-5, atol=1e-6
    )
    p = np.exp(x[1, 2:])
    np.testing.assert_allclose(
        head[1], np.log(p / p.sum(-1, keepdims=True)).max(0), rtol=1e-5, atol=1e-6
    )
    nothing = pooled(x, "head_and_chunk", is_query, np.zeros((2, 6), bool))
    assert np.isfinite(nothing).all()
    with pytest.raises(ValueError, match="token_and_head, head_and_chunk, chunk"):
        gather.pooled(x, "head")


def test_the_best_blocks_come_in_the_order_of_the_text():
    x = RNG.normal(size=(3, 7)).astype(np.float32)
    ids, is_valid = best(x, 3)
    np.testing.assert_array_equal(ids, np.sort(np.argsort(-x)[:, :3]))
    assert np.all(is_valid)
    ids, is_valid = best(x, 9)
    np.testing.assert_array_equal(ids, np.tile(np.arange(7), (3, 1)))


def test_missing_blocks_are_not_taken():
    x = np.array([[9.0, 1, 2, 8, 3]], np.float32)
    exists = np.array([[1, 1, 1, 0, 0]], bool)
    ids, is_valid = best(x, 2, exists)
    np.testing.assert_array_equal(ids, [[0, 2]])
    ids, is_valid = best(x, 4, exists)
    np.testing.assert_array_equal(ids, [[0, 1, 2, 0]])
    np.testing.assert_array_equal(is_valid, [[True, True, True, False]])
    _, is_valid = best(x, 2, np.zeros((1, 5), bool))
    assert not np.any(is_valid)


@pytest.mark.parametrize("margin", [0.0, 0.3])
@pytest.mark.parametrize("count", [1, 3, 6, 8])
def test_of_scores_within_the_margin_of_the_least_taken_one_the_later_are_taken(margin, count):
    x = np.round(np.random.default_rng(1).normal(size=(200, 8)), 1).astype(np.float32)
    exists = np.random.default_rng(2).random((200, 8)) < 0.8
    ids, is_valid = map(np.asarray, best(x, count, exists, margin=np.float32(margin)))
    for row in range(200):
        real = np.flatnonzero(exists[row])
        expected = real
        if len(real) > count:
            least = np.sort(x[row, real])[-count]
            above = real[x[row, real] > least + np.float32(margin)]
            equal = [n for n in real if n not in above and x[row, n] >= least - np.float32(margin)]
            expected = np.sort([*above, *equal[len(equal) - (count - len(above)) :]])
        np.testing.assert_array_equal(ids[row, is_valid[row]], expected)


@pytest.mark.parametrize("per", gather.SCOPES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rounding_does_not_choose_between_equal_blocks(per, dtype):
    """Blocks of one summary, moved by rounding, are taken from the end, also at a score of 0."""
    rng, eps = np.random.default_rng(3), float(jnp.finfo(dtype).eps)
    vector = rng.normal(size=(2, 1, 2, 64))
    q = rng.normal(size=(2, 3, 4, 64))
    # The first query is orthogonal to the summary: products cancel, rounding stays.
    q[:, 0] -= (q[:, 0] * np.repeat(vector[:, 0], 2, 1)).sum(-1, keepdims=True) * np.repeat(
        vector[:, 0] / (vector[:, 0] ** 2).sum(-1, keepdims=True), 2, 1
    )
    noise = 1 + eps * rng.uniform(-0.5, 0.5, (2, 9, 2, 64))
    summary = (vector * noise).astype(np.float32).astype(dtype)
    ids, is_valid = best_blocks(q.astype(dtype), summary, 4, per)
    assert np.all(is_valid)
    np.testing.assert_array_equal(ids, np.broadcast_to([5, 6, 7, 8], ids.shape))
    # A block that fits better by more than that is taken, wherever it stands.
    summary[:, 1] = 9 * q.mean((1, 2))[:, None]
    ids, _ = best_blocks(q.mean(1, keepdims=True).astype(dtype), summary, 4, "chunk")
    np.testing.assert_array_equal(ids, np.broadcast_to([1, 6, 7, 8], ids.shape))


def test_every_query_head_reads_its_own_blocks():
    ids = RNG.integers(0, 5, (2, 3, 4, 2))  # [B, T, N, M]
    slots = SLOTS[np.arange(2)[:, None, None, None], ids]
    got = np.asarray(jax.jit(gather.tokens)(K, slots))
    assert got.shape == (2, 3, 4, 2, 4, 8)
    for row, t, head, m in np.ndindex(2, 3, 4, 2):
        np.testing.assert_array_equal(
            got[row, t, head, m], BLOCKS[row, ids[row, t, head, m], :, head // 2]
        )


@pytest.mark.parametrize("length", [1, 7, 8])
def test_queries_are_handled_a_few_at_a_time(monkeypatch, length):
    monkeypatch.setattr(gather, "BUDGET", 100)
    x, y = RNG.normal(size=(2, length, 3)), RNG.normal(size=(2, length))
    seen = []

    def run(pair):
        seen.append(pair[0].shape)
        return pair[0] * pair[1][:, None], pair[1].sum()[None]

    got, _ = jax.jit(lambda *pair: gather.by_query(run, pair, 30))(x, y)
    np.testing.assert_allclose(got, x * y[..., None], rtol=1e-6)
    assert set(seen) == {(2, 3)}
    made = str(jax.make_jaxpr(lambda x: gather.by_query(jnp.sin, x, 30))(x))
    assert f"length={max(1, length // 3)}" in made
