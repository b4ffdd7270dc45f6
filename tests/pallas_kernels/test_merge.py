"""Merging partial attentions over disjoint keys gives the attention over all of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import causal, flash, merge, window


def arrays(t=75, s=75, heads=4, kv_heads=2, size=16):
    rng = np.random.default_rng(3)
    shapes = [(2, t, heads, size), (2, s, kv_heads, size), (2, s, kv_heads, size)]
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def values_and_gradients(attention, q, k, v):
    rng = np.random.default_rng(4)
    (out, lse), pull = jax.vjp(jax.jit(attention), q, k, v)
    seen = jnp.isfinite(lse)
    cotangents = rng.normal(size=out.shape), rng.normal(size=lse.shape)
    d_out, d_lse = (jnp.asarray(x, jnp.float32) for x in cotangents)
    return out, jnp.where(seen, lse, 0.0), *pull((d_out, d_lse))


def assert_same(x, y):
    for a, b in zip(x, y, strict=True):
        assert np.all(np.isfinite(a))
        assert np.linalg.norm(a - b) < 3e-6 * np.linalg.norm(b)


def test_keys_split_in_random_parts_merge_to_the_whole():
    q, k, v = arrays()
    owner = np.random.default_rng(0).integers(0, 3, k.shape[1])
    parts = [np.flatnonzero(owner == i) for i in range(3)]

    def split(q, k, v):
        return merge([flash(q, k[:, p], v[:, p], causal(), k_index=jnp.asarray(p)) for p in parts])

    assert_same(
        values_and_gradients(split, q, k, v),
        values_and_gradients(lambda q, k, v: flash(q, k, v, causal()), q, k, v),
    )


def test_near_and_far_masks_merge_to_the_whole():
    q, k, v = arrays()
    near, far = causal() & window(20), causal() & ~window(20)

    def split(q, k, v):
        return merge([flash(q, k, v, near), flash(q, k, v, far)])

    assert_same(
        values_and_gradients(split, q, k, v),
        values_and_gradients(lambda q, k, v: flash(q, k, v, causal()), q, k, v),
    )


def test_merging_is_associative_and_one_partial_is_itself():
    q, k, v = arrays()
    a, b, c = (flash(q, k[:, s], v[:, s]) for s in (slice(0, 20), slice(20, 33), slice(33, None)))
    for x, y in zip(merge([merge([a, b]), c]), merge([a, merge([b, c])])):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6)
    for x, y in zip(merge([a]), a):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7)


def test_rows_empty_in_every_partial_stay_empty_without_nan():
    q, k, v = arrays(t=10, s=12)

    def split(q, k, v):
        ahead = jnp.arange(12) + 6  # queries 0..5 see no key
        return merge(
            [
                flash(q, k[:, :5], v[:, :5], causal(), k_index=ahead[:5]),
                flash(q, k[:, 5:], v[:, 5:], causal(), k_index=ahead[5:]),
            ]
        )

    out, lse = split(q, k, v)
    assert np.all(np.isneginf(lse[:, :6])) and not np.any(out[:, :6])
    assert np.all(np.isfinite(lse[:, 6:]))
    assert_same(
        values_and_gradients(split, q, k, v),
        values_and_gradients(
            lambda q, k, v: flash(q, k, v, causal(), k_index=jnp.arange(12) + 6), q, k, v
        ),
    )


def test_merging_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        merge([])
