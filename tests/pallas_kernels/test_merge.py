"""Merging partial attentions over disjoint keys gives the attention over all of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import causal, flash, merge, window
from pallas_kernels.online_softmax import merge_parts


def arrays(t=75, s=75, heads=4, kv_heads=2, size=16, seed=3):
    rng = np.random.default_rng(seed)
    shapes = [(2, t, heads, size), (2, s, kv_heads, size), (2, s, kv_heads, size)]
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def values_and_gradients(attention, *inputs):
    rng = np.random.default_rng(4)
    (out, lse), pull = jax.vjp(attention, *inputs)
    seen = jnp.isfinite(lse)
    cotangents = rng.normal(size=out.shape), rng.normal(size=lse.shape)
    d_out, d_lse = (jnp.asarray(x, jnp.float32) for x in cotangents)
    return out, jnp.where(seen, lse, 0.0), *jax.tree.leaves(pull((d_out, d_lse)))


def assert_same(x, y):
    for a, b in zip(x, y, strict=True):
        assert np.all(np.isfinite(a))
        assert np.linalg.norm(a - b) < 3e-6 * np.linalg.norm(b)


@jax.jit
def whole(q, k, v):
    return values_and_gradients(lambda q, k, v: flash(q, k, v, causal()), q, k, v)


@jax.jit
def split(q, k, v, places, segments):
    """Two parts: the keys at `places`, of which those in segment 1 count."""

    def attention(q, k, v):
        here = jnp.ones(q.shape[:2], jnp.int32)
        parts = []
        for place, segment in zip(places, segments, strict=True):
            segment = jnp.broadcast_to(segment, (k.shape[0], len(place)))
            parts.append(
                flash(
                    q, k[:, place], v[:, place], causal(), k_index=place, q_segments=here,
                    k_segments=segment,
                )
            )  # fmt: skip
        return merge(parts)

    return values_and_gradients(attention, q, k, v)


@settings(max_examples=25, deadline=None)
@given(owner=st.lists(st.booleans(), min_size=75, max_size=75), seed=st.integers(0, 5))
def test_keys_split_at_random_merge_to_the_whole(owner, seed):
    # Both parts have 75 places, of which some are padding, so that every split is one program.
    inputs, owner = arrays(seed=seed), np.array(owner)
    order = np.argsort(owner, stable=True).astype(np.int32)
    parts = [order, order[::-1].copy()]
    counts = [owner.size - owner.sum(), owner.sum()]
    segments = [(np.arange(owner.size) < n).astype(np.int32) for n in counts]
    assert_same(split(*inputs, parts, segments), whole(*inputs))


def test_near_and_far_masks_merge_to_the_whole():
    q, k, v = arrays()
    near, far = causal() & window(20), causal() & ~window(20)

    def both(q, k, v):
        return merge([flash(q, k, v, near), flash(q, k, v, far)])

    found = jax.jit(lambda *x: values_and_gradients(both, *x))(q, k, v)
    assert_same(found, whole(q, k, v))


def test_two_passes_of_self_extend_equal_one_dense_softmax():
    # Jin et al. 2024: neighbours at their own rotation, farther keys at grouped ones.
    t, near = 75, causal() & window(20)
    q, k, v = arrays()
    grouped = arrays(seed=8)

    def passes(q, k, v, far_q, far_k):
        return merge([flash(q, k, v, near), flash(far_q, far_k, v, causal() & ~window(20))])

    def dense(q, k, v, far_q, far_k):
        away = jnp.arange(t)[:, None] - jnp.arange(t)[None]
        high = jax.lax.Precision.HIGHEST
        k, v, far_k = (jnp.repeat(x, 2, 2) for x in (k, v, far_k))
        near, far = (
            jnp.einsum("btnh,bsnh->btns", *x, precision=high) / 4 for x in ((q, k), (far_q, far_k))
        )
        away = away[None, :, None]
        logits = jnp.where(away < 20, near, far)
        logits = jnp.where(away >= 0, logits, -jnp.inf)
        p = jax.nn.softmax(logits, -1)
        return jnp.einsum("btns,bsnh->btnh", p, v, precision=high), jax.nn.logsumexp(logits, -1)

    inputs = q, k, v, grouped[0], grouped[1]
    found, expected = (
        jax.jit(lambda *x, f=f: values_and_gradients(f, *x))(*inputs) for f in (passes, dense)
    )
    assert_same(found, expected)


def test_merging_is_associative_and_one_partial_is_itself():
    @jax.jit
    def run(q, k, v):
        parts = slice(0, 20), slice(20, 33), slice(33, None)
        a, b, c = (flash(q, k[:, part], v[:, part]) for part in parts)
        return merge([merge([a, b]), c]), merge([a, merge([b, c])]), merge([a]), a

    left, right, single, alone = run(*arrays())
    for x, y in zip(left, right, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6)
    for x, y in zip(single, alone, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7)


def test_rows_empty_in_every_partial_stay_empty_without_nan():
    q, k, v = arrays(t=10, s=12)
    ahead = np.arange(12) + 6  # queries 0..5 see no key

    def both(q, k, v):
        return merge(
            [
                flash(q, k[:, :5], v[:, :5], causal(), k_index=ahead[:5]),
                flash(q, k[:, 5:], v[:, 5:], causal(), k_index=ahead[5:]),
            ]
        )

    def single(q, k, v):
        return flash(q, k, v, causal(), k_index=ahead)

    @jax.jit
    def run(q, k, v):
        return both(q, k, v), *(values_and_gradients(f, q, k, v) for f in (both, single))

    (out, lse), found, expected = run(q, k, v)
    assert np.all(np.isneginf(lse[:, :6])) and not np.any(out[:, :6])
    assert np.all(np.isfinite(lse[:, 6:]))
    assert_same(found, expected)


def test_sinks_are_one_more_partial_without_values():
    q, k, v = arrays()
    sinks = jnp.asarray([0.3, -1.0, 2.0, 5.0])

    def merged(q, k, v, sinks):
        out, lse = flash(q, k, v, causal())
        return merge([(out, lse), (jnp.zeros_like(out), jnp.broadcast_to(sinks, lse.shape))])

    def single(q, k, v, sinks):
        return flash(q, k, v, causal(), sinks=sinks)

    @jax.jit
    def run(*inputs):
        return [values_and_gradients(f, *inputs) for f in (single, merged)]

    assert_same(*run(q, k, v, sinks))


def test_merging_nothing_raises_value_error():
    with pytest.raises(ValueError, match="at least one"):
        merge([])


@pytest.mark.parametrize("count", [1, 2, 64])
def test_parts_in_one_array_are_merged_as_those_of_a_list(count):
    rng = np.random.default_rng(count)
    outs = rng.normal(size=(count, 2, 3, 4, 8)).astype(np.float32)
    lses = 10 * rng.normal(size=outs.shape[:-1]).astype(np.float32)
    lses[: count // 2] = -np.inf  # empty parts
    lses[:, 0, 1] = -np.inf  # a row without a key
    outs[lses == -np.inf] = 0.0
    actual = jax.jit(merge_parts)(outs, lses)
    expected = jax.jit(merge)([*zip(outs, lses, strict=True)])
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-6, atol=1e-6)
