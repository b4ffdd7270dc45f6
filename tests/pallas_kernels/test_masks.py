"""Mask algebra: element tests against definitions, block bounds against brute force."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import causal, everything, window

ATOMS = st.one_of(st.just(causal()), st.just(everything()), st.integers(1, 40).map(window))
MASKS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda pair: pair[0] & pair[1]),
        st.tuples(inner, inner).map(lambda pair: pair[0] | pair[1]),
        inner.map(lambda mask: ~mask),
    ),
    max_leaves=5,
)
RANGES = st.tuples(st.integers(0, 60), st.integers(1, 12))


def dense(mask, q, k):
    return np.broadcast_to(mask.element(q[:, None], k[None, :]), (len(q), len(k)))


def test_atoms_say_what_their_definitions_say():
    q, k = np.arange(7)[:, None], np.arange(9)[None, :]
    np.testing.assert_array_equal(causal().element(q, k), k <= q)
    np.testing.assert_array_equal(window(3).element(q, k), q - k < 3)
    np.testing.assert_array_equal(everything().element(q, k), np.ones((7, 9), bool))
    band = causal() & window(2) | ~causal() & ~window(1)
    np.testing.assert_array_equal(band.element(q, k), (k <= q) & (q - k < 2))


@settings(max_examples=300, deadline=None)
@given(MASKS, RANGES, RANGES)
def test_block_bounds_never_contradict_brute_force(mask, q_range, k_range):
    q, k = (start + np.arange(size) for start, size in (q_range, k_range))
    seen = dense(mask, q, k)
    some, whole = mask.bounds(q[0], q[-1], k[0], k[-1])
    assert some or not seen.any()
    assert not whole or seen.all()


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([causal(), window(5), ~causal(), everything(), ~window(9)]), RANGES, RANGES)
def test_bounds_of_single_atoms_are_tight(mask, q_range, k_range):
    q, k = (start + np.arange(size) for start, size in (q_range, k_range))
    seen = dense(mask, q, k)
    some, whole = mask.bounds(q[0], q[-1], k[0], k[-1])
    assert (bool(some), bool(whole)) == (seen.any(), seen.all())


def test_bounds_are_the_same_on_integers_numpy_and_traced_arrays():
    mask = causal() & ~window(4) | everything() & window(2)
    lo, hi = np.arange(0, 40, 8), np.arange(7, 47, 8)
    grid = lo[:, None], hi[:, None], lo[None], hi[None]
    on_numpy = np.stack(mask.bounds(*grid))
    on_jax = jnp.stack(jax.jit(mask.bounds)(*grid))
    on_integers = [
        [[bool(mask.bounds(a, b, c, d)[i]) for c, d in zip(lo, hi)] for a, b in zip(lo, hi)]
        for i in (0, 1)
    ]
    np.testing.assert_array_equal(on_numpy, on_jax)
    np.testing.assert_array_equal(on_numpy, on_integers)


def test_equal_expressions_are_equal_hashable_values():
    assert causal() & window(3) == causal() & window(3)
    assert len({causal() & window(3), causal() & window(3), causal() & window(4)}) == 2


@pytest.mark.parametrize("size", [0, -1, True])
def test_a_window_without_a_token_is_refused(size):
    with pytest.raises(ValueError, match="at least 1"):
        window(size)
