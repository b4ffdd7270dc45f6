"""TPU kernels of the gated delta rule in Pallas' interpreter, beside the float64 oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from delta_rule_cases import (
    NAMES,
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
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import explain, gated_delta_rule
from pallas_kernels.backends.tpu import delta_rule as kernels
from pallas_kernels.delta_rule import BACKENDS, _run_kernels, _Tokens
from pallas_kernels.dispatch import Backend

F32 = jnp.float32


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Makes the kernels an implementation for CPUs, with steps of two small chunks."""
    set_sizes(monkeypatch, chunk=32, group=64, heads=2, solved=16, block=8)
    register_interpreted(monkeypatch, kernels)


def set_sizes(monkeypatch, **sizes):
    for name, size in sizes.items():
        monkeypatch.setattr(kernels, name.upper(), size)


by_kernels = functools.partial(rule, implementation="interpreted")


@pytest.mark.slow
def test_values_and_gradients_of_packed_documents_equal_the_recurrence_in_float64():
    actual = both(by_kernels(True), inputs("strong decays"), F32)
    assert_agree(actual, oracle("strong decays", False, True))


SIZES = {"small": (32, 64, 16, 8), "one block": (16, 32, 16, 16), "default": None}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "kind", "is_packed"),
    [
        ("small", "equal keys", False),
        ("small", "only strong decays", False),
        ("one block", "random", True),
        ("default", "random", False),
        ("default", "equal keys", True),
        ("default", "strong decays", True),
    ],
)
def test_kernels_equal_the_recurrence_in_float64(sizes, kind, is_packed, monkeypatch):
    monkeypatch.undo()
    names = "chunk", "group", "solved", "block"
    set_sizes(monkeypatch, heads=2, **dict(zip(names, SIZES[sizes] or (), strict=False)))
    register_interpreted(monkeypatch, kernels)
    actual = both(by_kernels(is_packed), inputs(kind), F32)
    assert_agree(actual, oracle(kind, False, is_packed))


@pytest.mark.slow
def test_several_groups_of_the_published_sizes_equal_the_recurrence(monkeypatch):
    monkeypatch.undo()
    register_interpreted(monkeypatch, kernels)
    t = 2 * kernels.GROUP + 100
    assert_agree(both(by_kernels(), inputs(t=t), F32), oracle("random", False, False, t))


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


@pytest.mark.slow
def test_the_inverse_of_bfloat16_inputs_is_exact_to_16_bits():
    rng = np.random.default_rng(0)
    for scale, size in ((1.0, 0), (0.3, 1)):  # equal keys; keys of any kind
        a = np.tril(np.where(size, rng.normal(size=(2, 64, 64)), 1.0), -1) * scale
        expected = np.linalg.inv(np.eye(64) + a)[:, :16, :16]
        actual = kernels._inverses(jnp.asarray(a, F32), False)[0]
        bound = 2**-15 * np.abs(expected).max()
        np.testing.assert_allclose(actual, expected, atol=bound)


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
def test_kernels_have_no_races_and_read_nothing_unwritten():
    q, k, v, log_decay, beta, state = (jnp.asarray(x, F32) for x in inputs(t=100))
    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    tokens = q, k, v, log_decay, beta
    out, last, states = kernels.forward(*tokens, state, keep_states=True, interpret=params)
    known, known_last, _ = kernels.forward(*tokens, state, keep_states=False, interpret=True)
    np.testing.assert_allclose(out, known, atol=1e-6)
    np.testing.assert_allclose(last, known_last, atol=1e-6)
    actual = kernels.backward(*tokens, states, out, last, interpret=params)
    expected = kernels.backward(*tokens, states, out, last, interpret=True)
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    assert not interpret_pallas_call.races.races_found


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


@pytest.mark.slow
def test_a_program_lowered_for_another_platform_runs_the_xla_form():
    """On the machine of a TPU, `jax.jit` may also compile for its CPU."""
    arrays = inputs(t=20)

    def run(*x):
        return _run_kernels(_Tokens(*x[:5]), x[5], ("tpu", 16, jax.lax.Precision.HIGHEST))

    assert_agree(both(run, arrays, F32), oracle("random", False, False, 20))


def program(platform, described="tpu", **options):
    device = jax.sharding.AbstractDevice("TPU v5 lite", 1, described)
    q, state = ((1, 512, 4, 128), "bfloat16"), ((1, 4, 128, 128), "float32")
    q, state = (jax.ShapeDtypeStruct(*x) for x in (q, state))
    gate = jax.ShapeDtypeStruct((1, 512, 4), "float32")

    def loss(q, k, v, log_decay, beta, state):
        out, last = gated_delta_rule(q, k, v, log_decay, beta, state=state, **options)
        return jnp.sum(out.astype(F32)) + jnp.sum(last)

    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        traced = jax.jit(jax.grad(loss, (0, 1, 2, 3, 4, 5))).trace(q, q, q, gate, gate, state)
        return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.slow
def test_a_program_for_a_tpu_holds_two_kernels_and_no_loop(monkeypatch):
    monkeypatch.undo()
    text = program("tpu")
    assert text.count("tpu_custom_call") == 2 and "stablehlo.while" not in text
    assert "lcjax_delta_rule_forward" in text and "lcjax_delta_rule_backward" in text
    assert "tpu_custom_call" not in program("cpu")
    assert "tpu_custom_call" not in program("tpu", implementation="xla")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(implementation="cuda"), "unknown; choose one of tpu, xla"),
        (dict(implementation="tpu"), "it runs on tpu and the program is for cpu"),
        (dict(log_decay=jnp.zeros((2, 77, 4, 12))), "it has one decay for each channel"),
        (dict(q=jnp.zeros((2, 77, 4, 12), jnp.bfloat16)), "must all be float32 or all bfloat16"),
        (dict(q=jnp.zeros((2, 77, 4, 300)), k=jnp.zeros((2, 77, 4, 300))), "300 channels"),
    ],
)
def test_inputs_that_kernels_cannot_run_raise_errors_with_the_reason(change, reason):
    arrays = dict(zip(NAMES[:5], (jnp.asarray(x, F32) for x in inputs()), strict=False))
    with pytest.raises(ValueError, match=reason):
        gated_delta_rule(**(arrays | {"implementation": "interpreted"} | change))


def test_explain_names_the_implementation_and_why(monkeypatch):
    arrays = [jnp.asarray(x, F32) for x in inputs()[:5]]
    (call,) = explain(gated_delta_rule, *arrays)
    assert call.implementation == "xla" and "gated_delta_rule on cpu" in str(call)
    assert "it runs on tpu and the program is for cpu" in dict(call.reasons)["tpu"]
    monkeypatch.setitem(BACKENDS, "tpu", Backend(kernels.__name__, ("cpu", "tpu")))
    (call,) = explain(gated_delta_rule, *arrays)
    assert call.implementation == "tpu"
    (call,) = explain(gated_delta_rule, *(x[:, :1] for x in arrays))
    assert call.implementation == "xla" and "a step of generation" in dict(call.reasons)["tpu"]
