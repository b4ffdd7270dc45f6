"""The dense specification against loops in float64 that follow its definition word by word."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels import reference
from pallas_kernels.tables import from_block_mask

B, T, S, N, K, H = 2, 7, 9, 4, 2, 8
MASK = pk.causal() & pk.per_head((pk.window(5), 1), (pk.chunks(3), 2), (pk.everything(), 1))
BY_HEAD = [pk.causal() & x for x in (pk.window(5), pk.chunks(3), pk.chunks(3), pk.everything())]


def arrays():
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=shape) for shape in ((B, T, N, H), (B, S, K, H), (B, S, K, 5)))
    bias, sinks = rng.normal(size=(N, T, S)), rng.normal(size=N)
    q_index = np.stack([np.arange(T) + 2, np.arange(T)])
    k_index = np.stack([np.arange(S), np.arange(S)[::-1]])
    q_segments = np.array([[1, 1, 1, 2, 2, 0, 2], [3] * 7])
    k_segments = np.array([[1, 1, 1, 1, 2, 2, 2, 2, 0], [3] * 6 + [0] * 3])
    blocks = rng.random((B, K, 3, 3)) < 0.8
    return q, k, v, bias, sinks, (q_index, k_index, q_segments, k_segments), blocks


def by_loops(q, k, v, bias, sinks, places, blocks, *, scale, soft_cap):
    """Blocks of 3 queries and 4 keys."""
    q_index, k_index, q_segments, k_segments = places
    out, lse = np.zeros((B, T, N, v.shape[-1])), np.full((B, T, N), -np.inf)
    for b, t, n in np.ndindex(B, T, N):
        head, logits = n // (N // K), {}
        for s in range(S):
            same = q_segments[b, t] == k_segments[b, s] != 0
            seen = bool(BY_HEAD[n].element(int(q_index[b, t]), int(k_index[b, s])))
            if same and seen and blocks[b, head, t // 3, s // 4]:
                logit = scale * q[b, t, n] @ k[b, s, head]
                logits[s] = soft_cap * np.tanh(logit / soft_cap) + bias[n, t, s]
        total = sum(np.exp(x) for x in logits.values())
        total += 0.0 if sinks is None else np.exp(sinks[n])
        if total:
            lse[b, t, n] = np.log(total)
            out[b, t, n] = sum((np.exp(x) / total * v[b, s, head] for s, x in logits.items()), 0.0)
    return out, lse


@pytest.mark.parametrize("with_sinks", [False, True])
def test_dense_attention_with_every_option_follows_the_loops(with_sinks):
    q, k, v, bias, sinks, places, blocks = arrays()
    sinks = sinks if with_sinks else None
    expected = by_loops(q, k, v, bias, sinks, places, blocks, scale=0.7, soft_cap=1.5)
    table = from_block_mask(blocks, q_block=3, k_block=4)

    @jax.jit
    def dense(q, k, v, bias):
        return reference.attention(
            q, k, v, *places, mask=MASK, scale=0.7, soft_cap=1.5, bias=bias, sinks=sinks,
            table=table,
        )  # fmt: skip

    out, lse = dense(*(jnp.asarray(x, jnp.float32) for x in (q, k, v, bias)))
    assert np.isneginf(expected[1]).any() != with_sinks
    np.testing.assert_allclose(out, expected[0], atol=2e-6)
    np.testing.assert_allclose(lse, expected[1], atol=2e-6)


def test_a_bias_may_be_logits_a_function_or_an_object_with_such_a_method():
    q, k, v, _, _, places, _ = arrays()
    q, k, v = (jnp.asarray(x, jnp.float32) for x in (q, k, v))
    alibi = pk.Alibi(jnp.asarray(pk.alibi_slopes(N)))
    logits = alibi.logits(*(jnp.asarray(x) for x in places[:2]))
    results = [
        reference.attention(q, k, v, *places, mask=pk.causal(), scale=1.0, bias=bias)
        for bias in (alibi, alibi.logits, logits, None)
    ]
    for out, lse in results[1:3]:
        np.testing.assert_array_equal(out, results[0][0])
        np.testing.assert_array_equal(lse, results[0][1])
    assert not np.array_equal(results[0][0], results[3][0])


def test_rows_that_see_nothing_have_no_gradient_and_the_others_a_finite_one():
    q, k, v, bias, _, places, blocks = arrays()
    table = from_block_mask(blocks & False, q_block=3, k_block=4)

    def loss(q, k, v, bias, table):
        out, lse = reference.attention(
            q, k, v, *places, mask=MASK, scale=1.0, bias=bias, table=table
        )
        return jnp.sum(out**2) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0.0))

    inputs = [jnp.asarray(x, jnp.float32) for x in (q, k, v, bias)]
    gradients = jax.jit(jax.grad(loss, (0, 1, 2, 3)))
    assert not any(np.any(x) for x in gradients(*inputs, table))
    some = gradients(*inputs, None)
    assert all(np.isfinite(x).all() and np.any(x) for x in some)
    assert not np.any(some[0][0, 5])  # a query of padding


def test_a_table_that_overflowed_makes_everything_nan():
    q, k, v = (x.astype(np.float32) for x in arrays()[:3])

    @jax.jit
    def dense(blocks):
        table = from_block_mask(blocks, q_block=3, k_block=4, capacity=2)
        return reference.attention(q, k, v, mask=pk.everything(), scale=1.0, table=table)

    fits = np.array([[True, False, True]] * 3)
    assert all(np.isfinite(x).all() for x in dense(fits))
    assert all(np.isnan(x).all() for x in dense(fits | True))
