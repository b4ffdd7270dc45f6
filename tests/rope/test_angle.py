"""Angles against exact integer arithmetic, at every size of position and frequency."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lcjax.rope import Default
from lcjax.rope.rotation import angles

INV_FREQ, _ = Default(theta=1e4).frequencies(64, 1)
PI = Fraction("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899")
PLACES = 240  # binary places of the oracle
TURNS_PER_RADIAN = math.floor(2**PLACES / (2 * PI))
LIMIT = 6e-7  # what `angles` promises


def exact_angles(positions, frequencies):
    """position * frequency modulo 2 pi in [0, 2 pi), float64 [P, F], by Python's integers."""

    def as_integers(numbers):  # number = integer * 2^-100
        return np.array([int(Fraction(x) * 2**100) for x in numbers], object)

    positions = as_integers(np.asarray(positions).tolist())
    frequencies = as_integers(np.float32(frequencies).tolist())
    turns = positions[:, None] * frequencies * TURNS_PER_RADIAN >> 200
    return (turns % 2**PLACES / 2**PLACES * (2 * math.pi)).astype(np.float64)


def errors(compiled, positions, frequencies):
    """Distances in radians [P, F] of `angles`, `compiled`, from the exact ones."""
    got = compiled(positions[None], frequencies)[0]
    off = np.asarray(got, np.float64) - exact_angles(positions, frequencies)
    return np.abs((off + np.pi) % (2 * np.pi) - np.pi)


def positions_of_every_size(rng):
    """int64 positions of each power of two up to 2^31, both signs, and the ends of int32."""
    sizes = [rng.integers(2**e, 2 ** (e + 1), 8) for e in range(31)]
    positions = np.concatenate([*sizes, 2 ** np.arange(31), 2 ** np.arange(1, 32) - 1])
    return np.concatenate([[-(2**31), 0], positions, -positions])


COMPILED = {name: jax.jit(lambda *x: angles(*x)) for name in ("optimised", "unoptimised")}


@pytest.fixture(params=COMPILED)
def compiled(request):
    """`angles`. Optimised programs fuse products and sums, which rounds differently."""
    if request.param == "optimised":
        request.getfixturevalue("enable_xla_optimizations")
    return COMPILED[request.param]


@pytest.mark.parametrize("seed", range(3))
def test_angles_are_within_their_limit_at_every_int32_position(compiled, seed):
    rng = np.random.default_rng(seed)
    positions = positions_of_every_size(rng)
    frequencies = np.concatenate([10 ** rng.uniform(-9, 0, 40), rng.uniform(0.1, 1, 20), [1.0]])
    assert errors(compiled, positions.astype(np.int32), np.float32(frequencies)).max() < LIMIT


@pytest.mark.parametrize("seed", range(3))
def test_angles_are_within_their_limit_at_fractional_positions(compiled, seed):
    rng = np.random.default_rng(seed)
    positions = np.concatenate([rng.uniform(-(2**e), 2**e, 16) for e in range(-3, 32)])
    frequencies = np.concatenate([10 ** rng.uniform(-9, 0, 40), rng.uniform(0.1, 1, 20), [1.0]])
    assert errors(compiled, np.float32(positions), np.float32(frequencies)).max() < LIMIT


def test_frequencies_above_1_are_exact_at_whole_positions(compiled):
    rng = np.random.default_rng(5)
    positions = positions_of_every_size(rng)
    frequencies = np.float32(np.concatenate([10 ** rng.uniform(0, 3.6, 30), [2 * np.pi, 4095]]))
    assert errors(compiled, positions.astype(np.int32), frequencies).max() < LIMIT
    # A fraction of a position adds its product with the frequency, rounded to float32.
    fractions = np.float32(rng.uniform(-1000, 1000, 100))
    assert np.all(errors(compiled, fractions, frequencies) < LIMIT + frequencies * 2.0**-23)


def test_angles_are_those_of_every_row_under_vmap():
    positions = np.array([[7, 2**31 - 1], [-(2**31), 123_456_789]], np.int32)
    frequencies = np.stack([INV_FREQ, INV_FREQ / 3])
    rows = jax.jit(jax.vmap(lambda p, f: angles(p[None], f)[0]))(positions, frequencies)
    np.testing.assert_array_equal(rows, jax.jit(angles)(positions, frequencies))


@pytest.mark.parametrize("top", [1.0, 1e3, 4e6, 2e9])
def test_small_angles_have_the_relative_precision_of_float32(compiled, top):
    frequencies = np.float32([1e-3, 1e-9, 1e-20, 0.0])
    positions = np.random.default_rng(3).uniform(-top, top, 200).astype(np.float32)
    exact = positions.astype(np.float64)[:, None] * frequencies.astype(np.float64)
    got = np.asarray(compiled(positions[None], frequencies)[0])
    small = np.abs(exact) < 3  # less than half a turn
    np.testing.assert_allclose(got[small], exact[small], rtol=1e-6, atol=1e-10)


def test_gradients_of_frequencies_and_positions_are_right_at_large_positions():
    positions = np.array([[3.0, 1000.5, 4_000_000.0]], np.float32)
    frequencies = np.stack([INV_FREQ, INV_FREQ / 3])[:1]

    def total(frequencies, positions):
        return jnp.sum(jnp.sin(angles(positions, frequencies)))

    gradient = jax.jit(jax.grad(total, (0, 1)))
    of_frequencies, of_positions = gradient(frequencies, positions)
    wide, place = frequencies[:, None].astype(np.float64), positions[..., None].astype(np.float64)
    slope = np.cos(place * wide)
    tolerance = {"rtol": 1e-5, "atol": 1e-5}
    np.testing.assert_allclose(of_frequencies / 4e6, (slope * place).sum(1) / 4e6, **tolerance)
    np.testing.assert_allclose(of_positions, (slope * wide).sum(-1), **tolerance)
