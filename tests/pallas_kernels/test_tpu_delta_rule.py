"""TPU kernels of the gated delta rule, as far as those of other platforms differ from them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from delta_rule_cases import (
    NAMES,
    assert_agree,
    both,
    inputs,
    oracle,
    register_interpreted,
    rule,
)
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import explain, gated_delta_rule
from pallas_kernels.backends.tpu import delta_rule as kernels
from pallas_kernels.delta_rule import BACKENDS, Tokens, _run_kernels
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
def test_the_inverse_of_bfloat16_inputs_is_exact_to_16_bits():
    rng = np.random.default_rng(0)
    for scale, size in ((1.0, 0), (0.3, 1)):  # equal keys; keys of any kind
        a = np.tril(np.where(size, rng.normal(size=(2, 64, 64)), 1.0), -1) * scale
        expected = np.linalg.inv(np.eye(64) + a)[:, :16, :16]
        actual = kernels._inverses(jnp.asarray(a, F32), False)[0]
        bound = 2**-15 * np.abs(expected).max()
        np.testing.assert_allclose(actual, expected, atol=bound)


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
def test_a_program_lowered_for_another_platform_runs_the_xla_form():
    """On the machine of a TPU, `jax.jit` may also compile for its CPU."""
    arrays = inputs(t=20)

    def run(*x):
        return _run_kernels(Tokens(*x[:5]), x[5], ("tpu", 16, jax.lax.Precision.HIGHEST))

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
        (dict(implementation="cuda"), "unknown; choose one of tpu, triton, xla"),
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
