"""Hopper kernels in Pallas' GPU interpreter, with its race detector, against dense formulas.

The interpreter runs warpgroups, copies and barriers as the GPU would, on the CPU. It needs jax 0.11
or newer (Python 3.12); tools/ptx/mosaic_gpu_interpreter.py teaches it what it lacks. What the GPU's
compiler accepts is in test_mosaic_gpu_compile.py.
"""

import contextlib
import functools
import os

import attention_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import Case, oracle, relative_error
from mosaic_gpu_cases import CASES

from pallas_kernels import causal, dispatch, flash, nvidia
from pallas_kernels.backends.mosaic_gpu import attention as _mosaic_gpu
from pallas_kernels.biases import Alibi
from pallas_kernels.dispatch import BACKENDS, Backend, Operands, Spec
from pallas_kernels.masks import keys_in
from pallas_kernels.tables import from_mask

plgpu = pytest.importorskip("jax.experimental.pallas.mosaic_gpu")

BOUNDS = {"bfloat16": 4e-3, "float16": 6e-4}


@contextlib.contextmanager
def described(kind="NVIDIA H100 80GB HBM3"):
    """Programs are for this GPU, which need not be there."""
    device = jax.sharding.AbstractDevice(device_kind=kind, platform="gpu", num_cores=132)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        yield


@pytest.fixture
def interpreted(monkeypatch):
    """`flash(implementation="mosaic_gpu")` runs the kernels in the interpreter."""
    if not hasattr(plgpu, "InterpretGPUParams"):
        pytest.skip(f"jax {jax.__version__} has no interpreter of these kernels; 0.11 has it")
    from tools.ptx import mosaic_gpu_interpreter

    mosaic_gpu_interpreter.teach(monkeypatch)
    params = plgpu.InterpretGPUParams(detect_races=True)
    for name in ("forward", "backward"):
        call = functools.partial(getattr(_mosaic_gpu, name), interpret=params)
        monkeypatch.setattr(_mosaic_gpu, name, call)
    monkeypatch.setitem(
        BACKENDS, "mosaic_gpu", Backend("pallas_kernels.backends.mosaic_gpu.attention", ("cpu",))
    )
    dispatch.run.clear_cache()
    with described():
        yield mosaic_gpu_interpreter
    dispatch.run.clear_cache()


@pytest.mark.slow  # ten seconds each
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_dense_formulas_without_races(interpreted, name):
    case = CASES[name]
    found, expected = attention_oracle.run(case, "mosaic_gpu"), oracle(case)
    for key, value in expected.items():
        bound = 1e-5 if key == "lse" else BOUNDS[case.dtype]
        assert relative_error(found[key], value) < bound, key
        assert not np.isnan(np.asarray(found[key], np.float32)).any()
    assert not interpreted.races_found()


BROKEN = {
    "products that nobody waits for": lambda taught: (
        taught, "await_products", lambda *, token, **_: token
    ),
    "vectors and results without fences": lambda taught: (plgpu, "commit_smem", lambda: None),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("how", BROKEN)
def test_races_would_be_found(interpreted, monkeypatch, how):
    """What the test above would say of kernels that free tiles too early."""
    monkeypatch.setattr(*BROKEN[how](interpreted))
    one = dict(batch=1, heads=1, kv_heads=1, size=32, v_size=32, mask=None, dtype="bfloat16")
    try:
        jax.block_until_ready(attention_oracle.run(Case(t=1024, s=64, **one), "mosaic_gpu"))
    except jax.errors.JaxRuntimeError as error:  # from jax 0.12 on
        assert "RACE DETECTED" in str(error)
    else:
        assert interpreted.races_found()


def shapes(t=128, s=128, size=64, dtype="bfloat16"):
    return [jax.ShapeDtypeStruct((1, n, 2, size), dtype) for n in (t, s, s)]


@pytest.mark.parametrize(
    ("inputs", "operands", "spec", "reason"),
    [
        (dict(dtype="float32"), {}, {}, "all float16, they are float32"),
        (dict(size=160), {}, {}, "head size 160 is above 128"),
        (dict(t=1), {}, {}, "1 queries are fewer than the 64 rows"),
        (dict(s=2**23), {}, {}, "131072 tiles of 2 heads are more than a grid's 65535"),
        ({}, dict(bias=Alibi(jnp.ones(2))), {}, "no bias"),
        ({}, {}, dict(mask=keys_in(tuple(range(0, 600, 2)))), "long list"),
    ],
)
def test_unsupported_calls_return_reason(inputs, operands, spec, reason):
    spec = Spec(**{"mask": causal(), "scale": 1.0} | spec)
    with described():
        assert reason in _mosaic_gpu.unsupported(*shapes(**inputs), Operands(**operands), spec)
        assert _mosaic_gpu.unsupported(*shapes(), Operands(), Spec(causal(), 1.0)) is None


def test_blocks_that_do_not_fit_a_warpgroup_return_reason():
    table = from_mask(causal(), queries=128, keys=128, q_block=32, k_block=64)
    with described():
        reason = _mosaic_gpu.unsupported(*shapes(), Operands(table=table), Spec(causal(), 1.0))
    assert reason == "blocks of 32 queries are no multiple of 64"


@pytest.mark.parametrize("kind", ["NVIDIA A100-SXM4-80GB", "NVIDIA B200"])
def test_other_gpus_are_rejected(kind):
    with described(kind):
        reason = _mosaic_gpu.unsupported(*shapes(), Operands(), Spec(causal(), 1.0))
    assert reason == "these kernels are for Hopper GPUs (compute capability 9.0)"


@pytest.mark.parametrize(
    ("version", "refused"),
    [((12, 6, 85), False), ((12, 8, 61), True), ((12, 9, 41), True), ((12, 9, 86), False),
     ((13, 0, 88), False), (None, False)],
)  # fmt: skip
def test_assemblers_that_miscompile_are_rejected(monkeypatch, version, refused):
    monkeypatch.setattr(nvidia, "assembler", lambda: version)
    with described():
        reason = _mosaic_gpu.unsupported(*shapes(), Operands(), Spec(causal(), 1.0))
    assert ("miscompile" in (reason or "")) == refused


def test_the_assembler_is_the_first_that_answers(monkeypatch, tmp_path):
    for name, said in (("broken", "exit 1"), ("old", "echo V12.9.41"), ("new", "echo V13.0.88")):
        (tmp_path / name).mkdir()
        program = tmp_path / name / "ptxas"
        program.write_text(f"#!/bin/sh\n{said}\n")
        program.chmod(0o755)
    folders = [str(tmp_path / name) for name in ("none", "broken", "old", "new")]
    monkeypatch.setenv("PATH", os.pathsep.join(folders))
    assert nvidia.assembler.__wrapped__() == (12, 9, 41)


@pytest.mark.parametrize("names", [("rows", "heads"), ("tiles", "warpgroup")])
def test_no_axis_of_a_mesh_is_taken_for_one_of_the_grid(names):
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.sharding.AbstractMesh((2, 2), names, axis_types=kinds, abstract_device=device)
    on = jax.sharding.PartitionSpec(names[0], None, names[1])

    def run(q):
        return _mosaic_gpu.forward(q, q, q, Operands(), Spec(causal(), 1.0))[0]

    with jax.sharding.use_abstract_mesh(mesh):
        split = jax.shard_map(run, mesh=mesh, in_specs=on, out_specs=on, check_vma=False)
        traced = jax.jit(split).trace(jax.ShapeDtypeStruct((4, 128, 4, 64), "bfloat16"))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "block_id" in text and "device_id" not in text  # of the kernel's instructions


def test_without_a_gpu_the_fallback_runs():
    q = jnp.ones((1, 64, 2, 64), "bfloat16")
    reason = _mosaic_gpu.unsupported(q, q, q, Operands(), Spec(causal(), 1.0))
    assert "for Hopper GPUs" in reason
    assert np.all(flash(q, q, q, causal())[0] == 1.0)
