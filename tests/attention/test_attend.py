"""Patterns through `attend`: positions, windows, caches, and what a config may say."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lcjax.attention import (
    AttentionMetadata,
    Causal,
    InfLLM,
    Pass,
    Pattern,
    Sliding,
    order_indices,
)
from lcjax.errors import InputError
from lcjax.rope.rotation import Rotation, rotate
from pallas_kernels import causal, window

ROTATION = Rotation(jnp.asarray(100.0 ** -np.linspace(0, 1, 8), jnp.float32), 1.1, 0.9)


turn = jax.jit(rotate)


def arrays(t=45, heads=6, kv_heads=2, size=24):
    rng = np.random.default_rng(6)
    shapes = [(2, t, heads, size), (2, t, kv_heads, size), (2, t, kv_heads, size)]
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def positions(t=45):
    return np.broadcast_to(np.arange(t), (2, t))


@jax.jit(static_argnames="pattern")
def run(q, k, v, pattern):
    metadata = AttentionMetadata(positions(q.shape[1]), positions(k.shape[1]), rotation=ROTATION)
    return pattern.attend(q, k, v, metadata)


def dense(q, k, v, seen):
    """Rotated attention in NumPy float64, seen [T, S]."""
    q = np.asarray(turn(q, positions(), *ROTATION[:2]), np.float64) * ROTATION.query_scale
    k = np.asarray(turn(k, positions(), *ROTATION[:2]), np.float64)
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
    logits = np.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5
    p = np.exp(np.where(seen, logits, -np.inf))
    return np.einsum("bnts,bsnh->btnh", p / p.sum(-1, keepdims=True), v)


@pytest.mark.parametrize(
    ("pattern", "behind"), [(Causal(), 1000), (Sliding(1), 1), (Sliding(7), 7)], ids=str
)
def test_patterns_equal_dense_rotated_attention(pattern, behind):
    q, k, v = arrays()
    distance = np.arange(45)[:, None] - np.arange(45)[None]
    expected = dense(q, k, v, (distance >= 0) & (distance < behind))
    np.testing.assert_allclose(run(q, k, v, pattern), expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("pattern", [Causal(), Sliding(7)], ids=str)
def test_changing_a_token_changes_nothing_before_it(pattern):
    changed = arrays()
    for x in changed:
        x[:, 30] += 1
    before, after = (np.asarray(run(*x, pattern)) for x in (arrays(), changed))
    np.testing.assert_array_equal(before[:, :30], after[:, :30])
    assert np.all(np.any(before != after, (0, 2, 3))[30:37])


@pytest.mark.parametrize("pattern", [Causal(), Sliding(7)], ids=str)
@pytest.mark.parametrize("keys_rotated", [False, True])
def test_decoding_against_a_cache_equals_the_whole(pattern, keys_rotated):
    q, k, v = arrays()
    expected = run(q, k, v, pattern)
    cache = turn(k, positions(), *ROTATION[:2]) if keys_rotated else k

    @jax.jit
    def step(offset):
        here = offset + jnp.arange(5)
        return pattern.attend(
            jax.lax.dynamic_slice_in_dim(jnp.asarray(q), offset, 5, 1),
            cache,
            v,
            AttentionMetadata(
                jnp.broadcast_to(here, (2, 5)),
                positions(),
                rotation=ROTATION,
                q_index=here,
                keys_rotated=keys_rotated,
            ),
        )

    decoded = np.concatenate([step(start) for start in range(0, 45, 5)], 1)
    np.testing.assert_allclose(decoded, expected, rtol=2e-5, atol=2e-6)


def test_several_passes_are_merged():
    @dataclasses.dataclass(frozen=True)
    class NearAndFar(Pattern):
        def passes(self, places):
            here = places.q_positions, places.k_positions
            near, far = causal() & window(9), causal() & ~window(9)
            return [Pass(*here, near), Pass(*here, far)]

    q, k, v = arrays()
    np.testing.assert_allclose(
        run(q, k, v, NearAndFar()), run(q, k, v, Causal()), rtol=2e-5, atol=2e-6
    )


@dataclasses.dataclass(frozen=True)
class Halved(Pattern):
    def passes(self, places):
        return [Pass(places.q_positions // 2, places.k_positions // 2, causal())]


@dataclasses.dataclass(frozen=True)
class Moved(Halved):
    moves_keys = True


@pytest.mark.parametrize(
    ("pattern", "rotated", "error", "message"),
    [
        (Moved(), True, InputError, "cache must keep unrotated keys"),
        (Halved(), False, TypeError, "moves_keys = True"),
    ],
    ids=str,
)
def test_a_pattern_that_moves_keys_sets_moves_keys_and_rejects_rotated_keys(
    pattern, rotated, error, message
):
    q, k, v = arrays()
    with pytest.raises(error, match=message):
        pattern.attend(
            q,
            k,
            v,
            AttentionMetadata(positions(), positions(), rotation=ROTATION, keys_rotated=rotated),
        )


def test_a_pattern_that_chooses_keys_rejects_partials_of_other_keys():
    q, k, v = arrays()
    partial = q, np.zeros(q.shape[:3], np.float32)
    metadata = AttentionMetadata(positions(), positions(), extra_partials=[partial])
    with pytest.raises(InputError, match="cannot share a softmax"):
        InfLLM().attend(q, k, v, metadata)
    assert jax.eval_shape(lambda *x: Causal().attend(*x, metadata), q, k, v).shape == q.shape


def test_order_indices_restart_in_every_document():
    segments = np.array([[0, 0, 1, 1, 1, 2, 2], [3, 3, 3, 3, 1, 1, 0]])
    want = [[0, 1, 0, 1, 2, 0, 1], [0, 1, 2, 3, 0, 1, 0]]
    np.testing.assert_array_equal(jax.jit(order_indices)(segments), want)


@pytest.mark.parametrize("size", [0, -4, 2.5, True, None])
def test_a_window_that_is_no_positive_integer_raises_input_error(size):
    with pytest.raises(InputError, match=r"pattern\.window=.* at least 1"):
        Sliding(size)
