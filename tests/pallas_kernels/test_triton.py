"""GPU kernels in Pallas' interpreter against a float64 NumPy oracle, values and gradients."""

import functools
import sys
import types

import decode_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import Blocked, Case, oracle, relative_error, run

from pallas_kernels import (
    RelativeBias,
    causal,
    chunks,
    decode,
    dispatch,
    everything,
    flash,
    keys_in,
    nvidia,
    per_head,
    prefix,
    tables,
    window,
)
from pallas_kernels.backends.triton import attention as _triton
from pallas_kernels.dispatch import BACKENDS, Backend, Constant, Operands, Spec
from pallas_kernels.nvidia import Tile

slow = pytest.mark.slow
HEADS_APART = per_head((causal() & window(20), 1), (causal() & chunks(25), 3))
QUICK = {
    "three queries per key, window and sinks": Case(
        batch=1, heads=3, kv_heads=1, mask=causal() & (window(20) | prefix(3))
    ),
    "a traced table per query head, documents, biases, soft cap, odd head sizes": Case(
        t=70, s=83, heads=2, kv_heads=1, size=24, v_size=40, segments=3, soft_cap=3.0,
        bias="alibi", table=Blocked(1, 2, 64, 64, traced=True),
    ),
}  # fmt: skip
CASES = QUICK | {
    "one head per key head, padded head size": Case(heads=3, kv_heads=3, size=80, v_size=96),
    "a lone full block of fewer keys than a tile": Case(
        t=40, s=24, heads=2, mask=None, table=Blocked(2, 2, 40, 24)
    ),
    "keys of each query, several spans": Case(
        t=41, s=4300, heads=2, kv_heads=1, mask=None, chosen=0.05, soft_cap=3.0
    ),
    "large heads": Case(t=41, s=41, heads=2, kv_heads=2, size=256, v_size=128),
    "no mask, own scale, whole blocks": Case(t=64, s=96, heads=2, mask=None, scale=0.7),
    "a scale below zero": Case(t=40, s=40, heads=2, scale=-0.2),
    "more keys than queries, from an offset": Case(t=131, s=300, offset=150, v_size=24),
    "queries before every key, sinks": Case(t=40, s=70, heads=8, offset=-25, sinks=True),
    "documents with padding": Case(t=130, s=130, heads=2, kv_heads=1, segments=5),
    "documents of a memory": Case(t=90, s=201, heads=2, segments=3, mask=everything()),
    "lengths, one row empty": Case(batch=3, t=70, heads=2, mask=None, k_lengths=(50, 0, 7)),
    "rows at places of their own": Case(t=80, s=99, heads=2, own_places=True, bias="alibi"),
    "a table": Case(t=131, s=77, heads=2, mask=None, table=Blocked()),
    "a table of several steps a block": Case(heads=2, t=131, s=150, table=Blocked(1, 1, 128, 64)),
    "a table per row and key head, traced": Case(
        t=131, s=131, heads=4, segments=3, table=Blocked(2, 2, 16, 32, traced=True)
    ),
    "masks and tables per head": Case(
        heads=4, mask=HEADS_APART, bias="alibi", table=Blocked(2, 4, traced=True)
    ),
    "bfloat16": Case(t=130, s=130, heads=3, kv_heads=1, dtype="bfloat16"),
    "bfloat16, odd head sizes, soft cap": Case(size=80, v_size=40, soft_cap=3.0, dtype="bfloat16"),
}
QUICK |= {
    "keys of each query": Case(batch=2, t=70, s=300, heads=4, kv_heads=2, chosen=0.1),
}
CASES |= QUICK
FEW = {  # rows of one product
    "one query, four heads per key head": Case(t=1, s=190, heads=4, kv_heads=1, offset=160),
    "several queries, padding, soft cap": Case(
        t=5, s=190, heads=4, offset=160, segments=3, soft_cap=2.0
    ),
    "bfloat16, sinks, a table of one block of queries": Case(
        t=3, s=190, offset=160, sinks=True, dtype="bfloat16", table=Blocked(2, 2, 16, 32)
    ),
}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """The backend "interpreted" for CPUs, in small steps; `tile` holds their sizes."""
    module = types.ModuleType("interpreted_triton")
    module.forward = functools.partial(_triton.forward, interpret=True)
    module.backward = functools.partial(_triton.backward, interpret=True)
    module.unsupported = lambda *inputs: None
    module.tile = Tile(32, 16, 4, 1)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(BACKENDS, "interpreted", Backend(module.__name__, ("cpu",)))
    monkeypatch.setattr(nvidia, "triton", lambda *of: module.tile)
    yield module
    dispatch.run.clear_cache()


def assert_equals_the_oracle(case):
    expected, actual = oracle(case), run(case, "interpreted")
    assert actual["out"].dtype == actual["dq"].dtype == case.dtype
    assert actual["lse"].dtype == jnp.float32 and actual.keys() == expected.keys()
    for what, x in actual.items():
        exact = 2e-6 if what in ("out", "lse") else 5e-6
        error = relative_error(x, expected[what])
        limit = exact if case.dtype == "float32" else 5e-3
        assert error < limit, f"{what}: relative error {error:.1e}"


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=n, marks=() if n in QUICK else slow) for n, c in CASES.items()]
)
def test_values_and_gradients_equal_the_dense_float64_formulas(case):
    assert_equals_the_oracle(case)


@slow
@pytest.mark.parametrize("case", FEW.values(), ids=FEW)
def test_few_queries_equal_the_dense_float64_formulas(case):
    assert_equals_the_oracle(case)


@pytest.mark.parametrize("splits", [3, pytest.param(1, marks=slow), pytest.param(20, marks=slow)])
def test_a_cache_read_in_parts_gives_the_same_result_and_only_its_filled_blocks(splits):
    rng = np.random.default_rng(0)
    shapes = (2, 2, 4, 32), (2, 2, 150, 32), (2, 2, 150, 32)
    q, keys, values = (rng.normal(size=shape).astype(np.float32) for shape in shapes)

    @functools.partial(jax.jit, static_argnames=("splits", "implementation"))
    def run(q, keys, values, q_index, **options):
        return decode(q, keys, values, causal() & window(60), q_index=q_index, **options)

    q_index = np.arange(98, 100)
    wanted = run(q, keys, values, q_index, implementation="reference")
    place = np.arange(150)[:, None]
    read = (place >= 32) & (place < 112)  # blocks of 16 keys with a place from 39 to 99
    keys, values = (np.where(read, x, np.float32("nan")) for x in (keys, values))
    found = run(q, keys, values, q_index, splits=splits, implementation="interpreted")
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-6)


@slow
@pytest.mark.parametrize(
    "case",
    [
        decode_cases.Case(codes="int8", t=3, size=48, padding=True, offset=250, s=300),
        pytest.param(
            decode_cases.Case(codes="float8_e4m3fn", s=301, soft_cap=3.0, dtype="bfloat16"),
            marks=slow,
        ),
    ],
    ids=["int8", "float8"],
)
def test_codes_are_read_as_what_they_stand_for(case):
    arrays, options = decode_cases.build(case)
    options |= {"soft_cap": case.soft_cap, "implementation": "interpreted"}
    found = jax.jit(lambda *x: decode(*x, case.mask, **options))(*arrays)
    expected = decode_cases.expected(case, arrays, decode_cases.build(case)[1])
    decode_cases.assert_close(found, expected, case.dtype)


def test_cross_attention_reads_no_blocks_beyond_traced_lengths(interpreted):
    """Blocks of padding are read by no kernel: they are poisoned, forward and backward."""
    rng = np.random.default_rng(0)
    shapes = (2, 40, 2, 32), (2, 128, 2, 32), (2, 128, 2, 32), (2, 40, 2, 32)
    q, k, v, d_out = (jnp.asarray(rng.normal(size=x), jnp.float32) for x in shapes)
    there = np.arange(128)[:, None, None] < np.array([32, 80])[:, None, None, None]

    def run(k, v, lengths, name):
        def attention(q, k, v):
            return flash(q, k, v, k_lengths=lengths, implementation=name)[0]

        out, pull = jax.vjp(attention, q, k, v)
        return out, *pull(d_out)

    lengths = jnp.array([30, 70])
    wanted = jax.jit(functools.partial(run, name="reference"))(k, v, lengths)
    poisoned = (jnp.where(there, x, jnp.nan) for x in (k, v))
    out, dq, dk, dv = jax.jit(functools.partial(run, name="interpreted"))(*poisoned, lengths)
    dk, dv = (jnp.where(there, x, 0) for x in (dk, dv))
    for x, y in zip((out, dq, dk, dv), wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-6)


def inputs(size=64, dtype="bfloat16", heads=2, table=None, mask=causal(), bias=None):
    q, k = (jax.ShapeDtypeStruct((1, 300, n, size), dtype) for n in (heads, 2))
    constant = None if table is None else Constant(table)
    return q, k, k, Operands(bias=bias), Spec(mask, 1.0, None, constant)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        (dict(dtype="float16"), "all bfloat16, they are float16"),
        (dict(size=320), "head size 320 is above 256"),
        (dict(size=128, dtype="float32"), "float32 heads of 128: above 64"),
        (dict(mask=keys_in(range(0, 600, 2))), "long list"),
        (dict(bias=RelativeBias(jnp.zeros((32, 2)))), "support only linear biases"),
        (dict(table=(24, 64)), "blocks of 24 queries are no multiple of 16"),
        (dict(table=(64, 40)), "blocks of 40 keys are no multiple of 16"),
    ],
)
def test_unsupported_calls_return_reason(monkeypatch, change, reason):
    monkeypatch.setattr(nvidia, "architecture", lambda: "sm90")
    if "table" in change:
        blocks = dict(zip(("q_block", "k_block"), change["table"], strict=True))
        change = change | {"table": tables.from_mask(causal(), queries=300, keys=300, **blocks)}
    found = _triton.unsupported(*inputs(**change))
    assert found is None if reason is None else reason in found


def test_kernels_run_when_selected_or_raise_the_reason(monkeypatch):
    arguments = inputs()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(dispatch, "platform", lambda: "cuda")
    monkeypatch.setattr(nvidia, "architecture", lambda: "sm80")
    assert "cuda" not in dict(dispatch.choose(None, *arguments))  # of no known kind
    assert dispatch.choose("triton", *arguments) == (("default", "triton"),)
    # A later version of JAX without Pallas-Triton.
    monkeypatch.setattr(_triton.kernels, "plt", None)
    with pytest.raises(ValueError, match="'triton'.*: this version of JAX has no Pallas-Triton"):
        dispatch.choose("triton", *arguments)


@pytest.mark.parametrize(
    ("kind", "known"),
    [
        ("NVIDIA H100 80GB HBM3", "sm90"), ("NVIDIA A100-SXM4-80GB", "sm80"),
        ("NVIDIA GH200 480GB", "sm90"), ("NVIDIA L40S", "sm86"), ("Tesla T4", None),
        ("NVIDIA B200", "sm80"), ("AMD Instinct MI300X", None),
    ],
)  # fmt: skip
def test_devices_that_are_described_are_known_by_name(kind, known):
    device = jax.sharding.AbstractDevice(device_kind=kind, platform="gpu", num_cores=None)
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        assert nvidia.architecture() == known
    assert nvidia.architecture() is None
