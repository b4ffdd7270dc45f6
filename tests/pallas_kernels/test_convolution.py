"""The short causal convolution equals sums over the tokens of each document."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from pallas_kernels import Layout, causal_convolution

B, T, C, W = 3, 48, 4, 4
SEGMENTS = np.array(
    [[1] * 48,
     # Padding before, between and after documents; documents shorter than the kernel.
     [0] * 17 + [1] * 2 + [2] * 9 + [0] * 3 + [4] * 11 + [3] + [0] * 5,
     # The first token is the last one of a device's part of 6 or of 24.
     [0] * 23 + [1] * 5 + [2] * 20],
    np.int32,
)  # fmt: skip


def inputs(seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape) for shape in ((B, T, C), (W, C), (B, W - 1, C))]


def sums(x, kernel, state, segments):
    """y and the last state, document by document, in the precision of the inputs."""
    y, last = np.zeros_like(x), np.array(state)
    for row in range(len(x)):
        tokens = np.flatnonzero(segments[row])
        documents = list(dict.fromkeys(segments[row, tokens]))
        for document in documents:
            at = np.flatnonzero(segments[row] == document)
            before = state[row] if document == documents[0] else np.zeros_like(state[row])
            window = np.concatenate([before, x[row, at]])
            for i, t in enumerate(at):
                y[row, t] = (window[i : i + W] * kernel).sum(0)
            last[row] = window[len(window) - (W - 1) :]
    return y, last


def layout(rows=1, channels=1, length=1, kind=AxisType.Auto):
    devices = jax.devices()[: rows * channels * length]
    mesh = jax.make_mesh(
        (rows, channels, length), ("r", "h", "s"), axis_types=(kind,) * 3, devices=devices
    )
    return Layout(mesh, ("r",), "h", "s")


def run(segments=None, **options):
    if segments is not None:
        segments = jnp.asarray(segments)

    def convolution(x, kernel, state):
        return causal_convolution(x, kernel, state=state, segments=segments, **options)

    return convolution


def both(convolution, arrays):
    """y, the last state, and the gradients for fixed cotangents of both."""
    rng = np.random.default_rng(7)
    weights = tuple(jnp.asarray(rng.normal(size=arrays[i].shape), jnp.float32) for i in (0, 2))

    @jax.jit
    def program(arrays):
        results, pull = jax.vjp(convolution, *arrays)
        return *results, pull(weights)

    return jax.device_get(program([jnp.asarray(x, jnp.float32) for x in arrays]))


def assert_agree(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=5e-6)


@pytest.mark.parametrize("segments", [np.ones((B, T), np.int32), SEGMENTS, 0 * SEGMENTS])
def test_values_equal_sums_over_each_document(segments):
    arrays = inputs()
    assert_agree(both(run(segments), arrays)[:2], sums(*arrays, segments))


def test_without_segments_a_row_is_one_document():
    arrays = inputs()
    assert_agree(both(run(), arrays), both(run(np.ones((B, T), int)), arrays))


def test_gradients_equal_those_of_the_linear_map():
    """With y linear in (x, state) and in the kernel, <w, y> = <gradient, input> for each."""
    arrays = inputs()
    y, last, (dx, dk, ds) = both(run(SEGMENTS), arrays)
    rng = np.random.default_rng(7)
    w, ws = rng.normal(size=y.shape), rng.normal(size=last.shape)
    total = (w * y).sum() + (ws * last).sum()
    x, kernel, state = arrays
    np.testing.assert_allclose((dx * x).sum() + (ds * state).sum(), total, rtol=1e-5)
    np.testing.assert_allclose((dk * kernel).sum(), (w * y).sum(), rtol=1e-5)
    step = [x + 1e-3 * rng.normal(size=x.shape), kernel, state + rng.normal(size=state.shape)]
    moved = sums(*step, SEGMENTS)
    change = (w * (moved[0] - y)).sum() + (ws * (moved[1] - last)).sum()
    expected = (dx * (step[0] - x)).sum() + (ds * (step[2] - state)).sum()
    np.testing.assert_allclose(change, expected, rtol=1e-4)


def test_calls_that_continue_a_state_equal_one_call():
    x, kernel, state = (jnp.asarray(x, jnp.float32) for x in inputs())
    y, last = causal_convolution(x, kernel, state=state)
    parts = []
    for start, stop in [(0, 40), (40, 42), (42, 47), (47, 48)]:
        part, state = causal_convolution(x[:, start:stop], kernel, state=state)
        parts.append(part)
    np.testing.assert_allclose(np.concatenate(parts, 1), y, atol=1e-6)
    np.testing.assert_array_equal(state, last)


def test_padding_of_a_prompt_leaves_the_state_after_its_last_token():
    x, kernel, _ = (jnp.asarray(x, jnp.float32) for x in inputs())
    for tokens in (1, 2, 3, 30):
        alone = causal_convolution(x[:, :tokens], kernel)
        pads = [(0, 0), (5, 6), (0, 0)]
        padded = jnp.pad(x[:, :tokens], pads, constant_values=9.0)
        segments = np.pad(np.full((B, tokens), 2), pads[:2])
        y, state = causal_convolution(padded, kernel, segments=segments)
        np.testing.assert_allclose(y[:, 5 : 5 + tokens], alone[0], atol=1e-6)
        np.testing.assert_array_equal(state, alone[1])
        assert not np.any(y[:, :5]) and not np.any(y[:, 5 + tokens :])


def test_values_equal_torch():
    torch = pytest.importorskip("torch")
    x, kernel, _ = (np.asarray(x, np.float32) for x in inputs())
    conv = torch.nn.functional.conv1d
    weight = torch.tensor(kernel.T[:, None].copy())
    expected = conv(torch.tensor(x).mT, weight, padding=W - 1, groups=C)[..., :T].mT
    np.testing.assert_allclose(causal_convolution(x, kernel)[0], expected, atol=1e-5)


@pytest.mark.slow_except("eight-True", "two-False", "all axes-True")
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [dict(length=2), dict(length=8), dict(channels=2, length=4), dict(channels=4)],
    ids=["two", "eight", "all axes", "channels"],
)
def test_a_length_over_devices_equals_one_device(sizes, is_packed):
    segments = SEGMENTS if is_packed else None
    actual = both(run(segments, layout=layout(**sizes)), inputs())
    assert_agree(actual, both(run(segments), inputs()))


def test_a_step_of_generation_is_computed_by_all_devices_of_a_split_length():
    x, kernel, state = (jnp.asarray(x, jnp.float32) for x in inputs())
    actual = causal_convolution(x[:, :1], kernel, state=state, layout=layout(length=8))
    assert_agree(actual, causal_convolution(x[:, :1], kernel, state=state))


@pytest.mark.slow
@pytest.mark.parametrize("with_layout", [False, True])
def test_axes_of_the_kind_explicit(with_layout):
    explicit = layout(1, 2, 2, AxisType.Explicit)
    x, kernel, state = (jnp.asarray(x, jnp.float32) for x in inputs())
    split = jax.device_put(x, jax.NamedSharding(explicit.mesh, jax.P(None, None, "h")))
    options = dict(state=state, layout=explicit if with_layout else None)
    actual = jax.jit(lambda x: causal_convolution(x, kernel, **options))(split)
    rows, length = ("r", "s") if with_layout else (None, None)
    assert jax.typeof(actual[0]).sharding.spec == jax.P(rows, length, "h")
    assert jax.typeof(actual[1]).sharding.spec == jax.P(rows, None, "h")
    known = causal_convolution(x, kernel, state=state)
    assert_agree([np.asarray(y) for y in actual], list(known))


def test_a_kernel_of_one_tap_scales_tokens():
    x, kernel, _ = (jnp.asarray(x, jnp.float32) for x in inputs())
    y, state = causal_convolution(x, kernel[:1], segments=SEGMENTS, layout=layout(length=2))
    np.testing.assert_allclose(y, jnp.where((SEGMENTS != 0)[..., None], x * kernel[0], 0))
    assert state.shape == (B, 0, C)


def test_bfloat16_inputs_are_summed_in_float32():
    x, kernel, state = (jnp.asarray(x, jnp.bfloat16) for x in inputs())
    y, last = causal_convolution(x, kernel, state=state)
    wide = (a.astype(jnp.float32) for a in (x, kernel, state))
    known = run()(*wide)[0]
    assert y.dtype == last.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, known.astype(jnp.bfloat16))


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (ValueError, r"kernel has shape \(4, 5\), must be \[W, C = 4\]", {"kernel": (W, 5)}),
        (ValueError, r"state has shape .* must be \[B = 3, P = 3, C = 4\]", {"state": (B, 4, C)}),
        (ValueError, r"x has shape \(3, 4\)", {"x": (B, C)}),
        (ValueError, r"kernel has shape \(0, 4\); give it a tap", {"kernel": (0, C)}),
    ],
)
def test_wrong_shapes_raise_errors_that_name_the_argument(error, message, change):
    shapes = {"x": (B, T, C), "kernel": (W, C), "state": (B, W - 1, C)} | change
    with pytest.raises(error, match=message):
        causal_convolution(**{name: jnp.ones(shape) for name, shape in shapes.items()})


def test_parts_shorter_than_the_kernel_raise_value_error():
    with pytest.raises(ValueError, match="2 tokens for each device along 's' must be at least"):
        causal_convolution(jnp.ones((1, 16, C)), jnp.ones((W, C)), layout=layout(length=8))


def test_values_equal_those_with_several_documents_in_any_numbering():
    arrays = inputs(3)
    order = np.array([0, 9, 2, 30, 4], np.int32)  # documents need no ascending numbers
    renamed = functools.partial(both, arrays=arrays)
    assert_agree(renamed(run(SEGMENTS)), renamed(run(order[SEGMENTS])))
