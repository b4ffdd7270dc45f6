"""The rotation itself: precision, layout, partial rotation, relative positions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lcjax.attention import DualChunk
from lcjax.attention.base import rotate_queries
from lcjax.rope import Clex, Default, Rotation, Yarn, rotate, stack_rotations

HEAD = 64
turn, turn_queries = jax.jit(rotate), jax.jit(rotate_queries)
INV_FREQ, _ = Default(theta=1e4).frequencies(HEAD, 1)


def features(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def rotate64(x, positions, inv_freq, scale=1.0):
    """The half-split rotation in float64."""
    angle = positions[:, :, None, None] * inv_freq.astype(np.float64)
    half = inv_freq.shape[-1]
    a, b = x[..., :half].astype(np.float64), x[..., half : 2 * half].astype(np.float64)
    cos, sin = scale * np.cos(angle), scale * np.sin(angle)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]], -1)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float32])
@pytest.mark.parametrize("last", [7, 4095, 131_071, 1_000_000, 4_000_000, 2**24])
@pytest.mark.parametrize("run", [turn, rotate], ids=["compiled", "by operations"])
def test_rotation_is_right_at_any_position(last, dtype, run):
    positions = np.stack([last - np.arange(7), np.arange(7) - last, np.linspace(0, last, 7) // 1])
    positions = positions.astype(np.int64)
    x = features((3, 7, 2, HEAD))
    out = run(x, positions.astype(dtype), INV_FREQ)
    # A product rounded to float32 is off by 4e-3 at 131,071 and by 0.12 at 4,000,000.
    np.testing.assert_allclose(out, rotate64(x, positions, INV_FREQ), rtol=1e-6, atol=2e-6)


def test_bfloat16_features_are_rotated_by_float32_angles():
    x = features((1, 4, 1, HEAD)).astype(jnp.bfloat16)
    positions = np.array([[257, 4097, 32767, 131071]])
    out = turn(x, positions, INV_FREQ)
    assert out.dtype == jnp.bfloat16
    exact = rotate64(np.asarray(x, np.float32), positions, INV_FREQ)
    # rounding of the result alone
    np.testing.assert_allclose(np.asarray(out, np.float32), exact, rtol=2**-8, atol=1e-5)


CLEX = Clex(theta=1e4, original_length=64, log_scale=True)
GROWN = DualChunk(chunk=24, local=8, train_length=8, growth="linear")


@functools.cache
def rotation(method, length):
    if method == "dual_chunk":
        return GROWN.at_length(Rotation(INV_FREQ), length)
    params = jax.jit(CLEX.init, static_argnums=1)(jax.random.key(0), HEAD)
    return CLEX.rotation(HEAD, length, params)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("method", ["clex", "dual_chunk"])
def test_the_scale_of_queries_is_rounded_with_their_product_only(method, dtype):
    # 90 tokens give clex the scale 1.082, which bfloat16 does not hold.
    rotations = [rotation(method, length) for length in (90, 47)]
    q = features((2, 9, 3, HEAD)).astype(dtype)
    positions = np.arange(9)[None].repeat(2, 0)
    batch = turn_queries(q, positions, jax.jit(stack_rotations)(rotations))
    for row, of_row in enumerate(rotations):
        rows = slice(row, row + 1)
        alone = turn_queries(q[rows], positions[rows], of_row)
        wide = np.asarray(turn(q[rows].astype(np.float32), positions[rows], *of_row[:2]))
        np.testing.assert_array_equal(alone, (wide * np.float32(of_row.query_scale)).astype(dtype))
        np.testing.assert_array_equal(alone, batch[rows])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_queries_without_a_scale_are_rotated_like_keys(dtype):
    q, positions = features((1, 9, 3, HEAD)).astype(dtype), np.arange(9)[None]
    got = turn_queries(q, positions, Rotation(INV_FREQ[: HEAD // 4], 1.1))
    np.testing.assert_array_equal(got, turn(q, positions, INV_FREQ[: HEAD // 4], 1.1))


def test_scores_depend_on_the_distance_only():
    of_query = np.array([[7, 107, 1004, 4_000_004, 8]])
    of_key = np.array([[3, 103, 1000, 4_000_000, 3]])
    q, k = (features((1, 1, 1, HEAD), seed).repeat(5, 1) for seed in (1, 2))
    scores = np.sum(turn(q, of_query, INV_FREQ) * turn(k, of_key, INV_FREQ), -1)
    near, *far, farther = scores.ravel()
    np.testing.assert_allclose(far, near, atol=2e-5)
    assert abs(farther - near) > 1e-2


def test_the_scale_multiplies_scores_twice():
    x, positions = features((1, 5, 1, HEAD)), np.arange(5)[None]
    turned = [turn(x, positions, INV_FREQ, scale) for scale in (1.0, 1.5)]
    gram = [np.einsum("BTNH,BSNH->BTS", y, y) for y in turned]
    np.testing.assert_allclose(gram[1], 2.25 * gram[0], rtol=1e-5)


def test_partial_rotation_passes_the_other_channels():
    x, positions = features((2, 5, 3, 80)), np.arange(5)[None].repeat(2, 0)
    inv_freq, _ = Default(theta=1e4).frequencies(32, 1)
    out = np.asarray(turn(x, positions, inv_freq))
    np.testing.assert_array_equal(out[..., 32:], x[..., 32:])
    np.testing.assert_array_equal(out[..., :32], turn(x[..., :32], positions, inv_freq))
    assert np.abs(out[:, 1:, :, :32] - x[:, 1:, :, :32]).max() > 0.1


def test_half_split_is_interleaved_after_a_permutation_of_channels():
    x = features((1, 6, 2, HEAD))
    positions = np.arange(6)[None] * 11
    angle = positions[:, :, None, None] * INV_FREQ
    even, odd = x[..., 0::2], x[..., 1::2]
    interleaved = np.empty_like(x)
    interleaved[..., 0::2] = even * np.cos(angle) - odd * np.sin(angle)
    interleaved[..., 1::2] = odd * np.cos(angle) + even * np.sin(angle)
    order = np.concatenate([np.arange(0, HEAD, 2), np.arange(1, HEAD, 2)])
    out = turn(x[..., order], positions, INV_FREQ)
    np.testing.assert_allclose(out, interleaved[..., order], atol=2e-5)


def test_fractional_positions_are_interpolation():
    x, positions = features((1, 8, 1, HEAD)), np.arange(8)[None]
    actual, expected = turn(x, positions / 8, INV_FREQ), turn(x, positions, INV_FREQ / 8)
    np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_rows_may_have_their_own_frequencies():
    x, positions = features((2, 4, 1, HEAD)), np.arange(4)[None].repeat(2, 0)
    both = np.stack([INV_FREQ, INV_FREQ / 3])
    out = turn(x, positions, both)
    for row in range(2):
        one = slice(row, row + 1)
        np.testing.assert_allclose(out[one], turn(x[one], positions[one], both[row]), atol=1e-6)


def test_a_rotation_is_an_argument_of_a_compiled_function():
    x, positions = features((1, 4, 1, HEAD)), np.arange(4)[None]
    traces = []

    @jax.jit
    def turn(x, rotation: Rotation):
        traces.append(1)
        return rotate(x, positions, rotation.inv_freq, rotation.scale)

    for factor in (2.0, 8.0):
        rope = Yarn(theta=1e4, factor=factor, original_length=128)
        rotation = rope.rotation(HEAD, 1)
        expected = rotate64(x, positions, np.asarray(rotation.inv_freq), rotation.scale)
        np.testing.assert_allclose(turn(x, rotation), expected, atol=1e-5)
    assert len(traces) == 1, "another factor must not compile again"


@pytest.mark.parametrize("length", [1, 7])
def test_gradients_of_features_are_the_inverse_rotation(length):
    x, positions = features((1, length, 1, HEAD)), np.arange(length)[None] + 5
    back = jax.jit(jax.grad(lambda x: jnp.sum(rotate(x, positions, INV_FREQ) * x)))(x)
    expected = sum(np.asarray(turn(x, at, INV_FREQ)) for at in (positions, -positions))
    np.testing.assert_allclose(back, expected, atol=1e-5)


@pytest.mark.parametrize("constant", [False, True])
def test_a_cpu_computes_cosines_once_for_all_layers(constant):
    def layers(x, positions, inv_freq):
        for _ in range(3):
            x = 2 * rotate(x, positions, INV_FREQ if constant else inv_freq)
        return x

    x, positions = features((1, 7, 2, HEAD)), np.arange(7)[None]
    text = jax.jit(layers).lower(x, positions, INV_FREQ).compile().as_text()
    assert text.count(" cosine(") == 1
    assert text.count(" sine(") == 1


def test_a_frequency_that_is_no_number_shows():
    inv_freq = np.where(np.arange(HEAD // 2) == 3, np.nan, INV_FREQ)
    assert np.isnan(turn(features((1, 7, 2, HEAD)), np.arange(7)[None], inv_freq)).all()
