"""Kernels of the gated delta rule of every platform, interpreted, beside the float64 oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from delta_rule_cases import (
    SEGMENTS,
    assert_agree,
    both,
    inputs,
    layout,
    on_one_device,
    oracle,
    recurrence,
    register_interpreted,
    rule,
    weak_after_strong,
    wide,
)

from pallas_kernels import gated_delta_rule
from pallas_kernels.backends.tpu import delta_rule as tpu
from pallas_kernels.backends.triton import delta_rule as triton

F32 = jnp.float32
# Groups of two small chunks
SIZES = {
    tpu: dict(CHUNK=32, GROUP=64, HEADS=2, SOLVED=16, BLOCK=8),
    triton: dict(CHUNK=32, GROUP=64),
}


@pytest.fixture(autouse=True, params=SIZES, ids=["tpu", "triton"])
def interpreted(request, monkeypatch):
    """Makes the kernels an implementation for CPUs."""
    for name, size in SIZES[request.param].items():
        monkeypatch.setattr(request.param, name, size)
    register_interpreted(monkeypatch, request.param, needs_gpu=request.param is triton)


by_kernels = functools.partial(rule, implementation="interpreted")


@pytest.mark.slow
def test_values_and_gradients_of_packed_documents_equal_the_recurrence_in_float64():
    actual = both(by_kernels(True), inputs("strong decays"), F32)
    assert_agree(actual, oracle("strong decays", False, True))


@pytest.mark.slow
@pytest.mark.parametrize("t", [2, 33, 64])
def test_any_length_equals_the_recurrence(t):
    assert_agree(both(by_kernels(), inputs(t=t), F32), oracle("random", False, False, t))


@pytest.mark.slow
def test_a_decay_of_minus_infinity_forgets_all_and_weak_ones_after_it_keep_their_digits():
    arrays, expected = weak_after_strong()
    log_decay = arrays[3].copy()
    log_decay[:, 3] = -np.inf
    arrays = [*arrays[:3], log_decay, *arrays[4:]]
    actual = both(by_kernels(), arrays, F32)
    assert_agree(actual, expected)
    assert not np.any(actual[2][3][:, 3])


@pytest.mark.slow
def test_calls_that_continue_a_state_equal_one_call():
    arrays = [jnp.asarray(x, F32) for x in inputs(t=77)]
    run = functools.partial(gated_delta_rule, implementation="interpreted")
    out, last = run(*arrays[:5], state=arrays[5])
    state, parts = arrays[5], []
    for start, stop in [(0, 33), (33, 40), (40, 77)]:
        piece, state = run(*(x[:, start:stop] for x in arrays[:5]), state=state)
        parts.append(piece)
    np.testing.assert_allclose(np.concatenate(parts, 1), out, atol=2e-6)
    np.testing.assert_allclose(state, last, atol=2e-6)


@pytest.mark.slow
def test_padding_changes_nothing_and_has_output_0():
    arrays = [np.asarray(x, np.float32) for x in inputs(t=20)]
    pads = [(0, 0), (9, 11)]
    padded = [np.pad(x, pads + [(0, 0)] * (x.ndim - 2), constant_values=-3) for x in arrays[:5]]
    run = functools.partial(gated_delta_rule, state=arrays[5], implementation="interpreted")
    out, last = run(*arrays[:5])
    actual, state = run(*padded, segments=np.pad(np.full((2, 20), 4), pads))
    np.testing.assert_allclose(actual[:, 9:29], out, atol=2e-6)
    np.testing.assert_allclose(state, last, atol=2e-6)
    assert not np.any(actual[:, :9]) and not np.any(actual[:, 29:])
    nothing, state = run(*padded, segments=np.zeros((2, 40), int))
    np.testing.assert_array_equal(state, arrays[5])
    assert not np.any(nothing)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "bound"), [("random", 2**-7), ("equal keys", 2**-6), ("strong decays", 2**-7)]
)
def test_bfloat16_products_round_their_factors_alone(kind, bound):
    """Factors are rounded by 2^-9; the errors of equal keys add up, also with an exact inverse."""
    arrays = [*inputs(kind)]
    arrays[:3] = [np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64) for x in arrays[:3]]
    with jax.enable_x64(True):
        run = functools.partial(recurrence, segments=jnp.asarray(SEGMENTS))
        expected = both(run, arrays, jnp.float64)

    def rounded(q, k, v, *rest):
        out, last = by_kernels(True)(*(x.astype(jnp.bfloat16) for x in (q, k, v)), *rest)
        assert out.dtype == jnp.bfloat16 and last.dtype == F32
        return out.astype(F32), last

    assert_agree(both(rounded, arrays, F32), expected, bound=bound)


LAYOUTS = {
    "length": dict(length=2),
    "all axes": dict(rows=2, heads=2, length=2),
    "rows and heads": dict(rows=2, heads=4),
}


@pytest.mark.slow
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_kernels_over_devices_equal_one_device(name, is_packed):
    run = wide(is_packed, layout=layout(**LAYOUTS[name]), implementation="interpreted")
    actual = both(run, inputs("random", False, 80), F32)
    assert_agree(actual, on_one_device(False, is_packed), bound=4e-6)


@pytest.mark.slow
def test_vmap_and_64_bits_equal_the_xla_form():
    with jax.enable_x64(True):
        arrays = [jnp.asarray(x, F32) for x in inputs(t=40)]
        run = functools.partial(gated_delta_rule, implementation="interpreted")
        keys = jnp.stack([arrays[1], -arrays[1]])
        many = jax.vmap(lambda k: run(arrays[0], k, *arrays[2:5])[0])(keys)
    for key, out in zip(keys, many, strict=True):
        known = gated_delta_rule(arrays[0], key, *arrays[2:5])[0]
        np.testing.assert_allclose(out, known, atol=2e-6)
