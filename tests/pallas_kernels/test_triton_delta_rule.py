"""Triton kernels of the gated delta rule, as far as those of other platforms differ from them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from delta_rule_cases import assert_agree, both, inputs, oracle, register_interpreted, rule

from pallas_kernels import explain, gated_delta_rule, nvidia, self_check
from pallas_kernels.backends.triton import delta_rule as kernels
from pallas_kernels.delta_rule import BACKENDS

F32 = jnp.float32
by_kernels = functools.partial(rule, implementation="interpreted")


@pytest.mark.slow
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("kind", ["random", "equal keys", "strong decays", "only strong decays"])
def test_decays_of_channels_equal_the_recurrence_in_float64(kind, is_packed, monkeypatch):
    register_interpreted(monkeypatch, kernels, needs_gpu=True)
    actual = both(by_kernels(is_packed), inputs(kind, per_channel=True), F32)
    assert_agree(actual, oracle(kind, True, is_packed))


@pytest.mark.slow
def test_several_groups_with_columns_of_several_programs_equal_the_recurrence(monkeypatch):
    monkeypatch.setattr(kernels, "GROUP", 128)
    monkeypatch.setattr(nvidia, "delta_rule_tile", lambda *sizes: nvidia.StateTile(4, 4, 1))
    register_interpreted(monkeypatch, kernels, needs_gpu=True)
    actual = both(by_kernels(), inputs(t=300), F32)
    assert_agree(actual, oracle("random", False, False, 300))


H100 = "NVIDIA H100 80GB HBM3"


def described(kind=H100):
    device = jax.sharding.AbstractDevice(kind, None, "gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def arrays(dtype="bfloat16", key=128, value=128, t=5000):
    q, v = (jax.ShapeDtypeStruct((1, t, 4, size), dtype) for size in (key, value))
    gate = jax.ShapeDtypeStruct((1, t, 4), "float32")
    return q, q, v, gate, gate


def program(**options):
    def loss(*x):
        out, last = gated_delta_rule(*x, **options)
        return jnp.sum(out.astype(F32)) + jnp.sum(last)

    with described():
        traced = jax.jit(jax.grad(loss, range(5))).trace(*arrays())
        return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.slow
def test_a_program_for_a_gpu_holds_three_kernels():
    """Forward; and backward, where the states of a group's chunks are computed again."""
    text = program()
    for name, count in (("forward", 2), ("backward", 1)):
        calls = [x for x in text.splitlines() if f"lcjax_delta_rule_{name}" in x]
        assert sum("@__gpu$xla.gpu.triton" in x for x in calls) == count
    assert "triton" not in program(implementation="xla")


@pytest.mark.parametrize(
    ("kind", "call", "chosen", "reason"),
    [
        (H100, arrays(), "triton", None),
        (H100, arrays("float32", 64, 64), "triton", None),
        (H100, arrays("float32"), "xla", "float32 heads of 128: above 64"),
        (H100, arrays(key=300), "xla", "the head size 300 is above 256"),
        ("NVIDIA Tesla T4", arrays(), "xla", "no NVIDIA GPU of compute capability 8.0"),
    ],
)
def test_programs_for_gpus_run_the_kernels_that_fit_registers(kind, call, chosen, reason):
    with described(kind):
        (explained,) = explain(gated_delta_rule, *call)
    assert explained.implementation == chosen
    assert reason is None or reason in dict(explained.reasons)["triton"]


def test_kernels_that_did_not_pass_the_self_check_run_by_name_only(monkeypatch):
    monkeypatch.setattr(self_check, "results", lambda dtype: "LCJAX_KERNEL_CHECK=0")
    with described():
        (explained,) = explain(gated_delta_rule, *arrays())
        assert explained.implementation == "xla"
        assert dict(explained.reasons)["triton"] == "not checked: LCJAX_KERNEL_CHECK=0"
        by_name = functools.partial(gated_delta_rule, implementation="triton")
        assert explain(by_name, *arrays())[0].implementation == "triton"
    case = "gated delta rule, heads of 128"
    for outcome in ("passed", "relative error of dk 3.0e-01"):
        passed = {"triton": {case: {"forward": "passed", "backward": outcome}}}
        monkeypatch.setattr(self_check, "results", lambda dtype, passed=passed: passed)
        with described():
            (explained,) = explain(gated_delta_rule, *arrays())
        assert explained.implementation == ("triton" if outcome == "passed" else "xla")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_kernels_pass_the_self_check(dtype, monkeypatch):
    """Its limits of errors, and what it compares."""
    register_interpreted(monkeypatch, kernels, needs_gpu=True)
    case = next(x for x in self_check.cases(dtype).values() if x.call == self_check.DELTA_RULE)
    case = case._replace(t=150, s=150)
    inputs = self_check.arrays(case, dtype)
    actual = jax.jit(self_check.program(case, "interpreted", True))(*inputs)
    actual = {name: np.asarray(x, np.float32) for name, x in actual.items()}
    assert actual.keys() == {"out", "state", "dq", "dk", "dv"}
    wanted = self_check.expected(case, inputs, True)
    assert self_check.compare(actual, wanted, dtype) == self_check.PASSED
    assert self_check.compare(actual | {"dk": 1.1 * actual["dk"]}, wanted, dtype) != "passed"
    assert BACKENDS["triton"].needs_check
