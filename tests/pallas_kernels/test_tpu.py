"""TPU kernels in Pallas' interpreter against the dense reference, values and gradients."""

import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)

from pallas_kernels import causal, everything, key_bits, prefix, reference, window
from pallas_kernels.backends.tpu import attention as _tpu
from pallas_kernels.backends.tpu import grid as _tpu_grid
from pallas_kernels.backends.tpu.kernels import bias_levels
from pallas_kernels.biases import Alibi, RelativeBias
from pallas_kernels.dispatch import Constant, Operands, Spec
from pallas_kernels.masks import keys_in, stride
from pallas_kernels.tables import from_block_mask, from_mask

pytestmark = pytest.mark.slow  # the interpreter: two minutes together

SINKS = causal() & (window(70) | prefix(5))


@dataclass(frozen=True)
class Case:
    """Inputs; `blocks` gives a table of [128 / group, 128] blocks per `tables` (batch, heads)."""

    t: int = 150
    s: int = 300
    batch: int = 1
    heads: int = 2
    kv_heads: int = 1
    size: int = 32
    v_size: int = 32
    mask: object = SINKS
    offset: int | None = None
    segments: bool = False
    own_places: bool = False
    soft_cap: float | None = None
    alibi: bool = False
    relative: str | None = None  # "behind": the keys behind a query have buckets; or "both ways"
    tables: tuple[int, int] | None = None
    q_block: int = 64
    traced: bool = False
    bits: float | None = None  # the share of keys that each query chooses
    dtype: str = "float32"


CASES = {
    "default blocks, odd sizes": Case(t=600, s=611, size=64, v_size=64, mask=causal()),
    "blocks of 128, sinks and window": Case(t=300, s=301, tables=(1, 1)),
    "no table, odd head sizes, places of a chunk": Case(size=80, v_size=40, offset=140),
    "a short window, smaller blocks": Case(
        t=1100, s=1100, heads=1, mask=causal() & window(200), dtype="bfloat16"
    ),
    "one query per row, four heads per key head": Case(
        t=1, s=270, batch=2, heads=8, kv_heads=2, offset=200, segments=True, mask=causal()
    ),
    "documents with padding, traced": Case(
        t=290, s=290, batch=2, segments=True, tables=(1, 1), traced=True, mask=causal()
    ),
    "queries before every key": Case(t=140, s=130, offset=-60, mask=causal()),
    "places of every row, soft cap, linear biases": Case(
        batch=2, own_places=True, soft_cap=2.0, alibi=True, heads=4, kv_heads=2, tables=(1, 1)
    ),
    "tables per query head": Case(
        t=300, heads=4, kv_heads=2, q_block=128, tables=(1, 4), alibi=True, mask=everything()
    ),
    "tables per row and key head, traced": Case(
        t=260, batch=2, heads=4, kv_heads=2, tables=(2, 2), traced=True, mask=causal()
    ),
    "three heads per key head": Case(heads=6, kv_heads=2, mask=causal() & stride(3)),
    "buckets, several blocks": Case(
        t=700, s=650, kv_heads=2, mask=causal(), relative="behind", tables=(1, 1), q_block=128
    ),
    "buckets both ways, places of every row, documents": Case(
        t=200,
        batch=2,
        kv_heads=2,
        mask=everything(),
        own_places=True,
        segments=True,
        relative="both ways",
        soft_cap=2.0,
    ),
    "buckets, two heads per key head, a chunk's places": Case(
        t=140, heads=4, kv_heads=2, offset=140, relative="behind"
    ),
    "buckets, tables per key head, traced": Case(
        t=260,
        batch=2,
        heads=4,
        kv_heads=2,
        tables=(2, 2),
        q_block=128,
        traced=True,
        relative="both ways",
        mask=everything(),
    ),
    "buckets, tables per query head, one query": Case(
        t=1,
        s=270,
        heads=4,
        kv_heads=2,
        offset=200,
        mask=causal(),
        tables=(1, 4),
        q_block=128,
        relative="behind",
    ),
    "keys of each query": Case(t=290, s=301, batch=2, size=64, v_size=64, bits=0.05, mask=causal()),
    "keys of each query, groups, several blocks": Case(
        t=700, s=1100, heads=4, kv_heads=2, bits=0.002, soft_cap=2.0, mask=everything()
    ),
    "keys of each query, documents, heads of 128, several spans": Case(
        t=140,
        s=4500,
        batch=2,
        heads=2,
        kv_heads=1,
        size=128,
        v_size=128,
        segments=True,
        bits=0.1,
        mask=everything(),
        dtype="bfloat16",
    ),
    "bfloat16, buckets": Case(
        t=301,
        s=301,
        kv_heads=2,
        size=64,
        v_size=64,
        mask=causal(),
        relative="behind",
        dtype="bfloat16",
    ),
    "bfloat16": Case(t=260, heads=4, kv_heads=2, dtype="bfloat16", tables=(1, 1), soft_cap=3.0),
    "bfloat16, odd sizes": Case(
        t=301, s=301, size=80, v_size=40, mask=causal(), alibi=True, dtype="bfloat16"
    ),
}


def build(case: Case, seed: int = 0):
    """(q, k, v, cotangents of out and lse), operands, spec and the table."""
    rng = np.random.default_rng(seed)
    b, t, s = case.batch, case.t, case.s
    shapes = [
        (b, t, case.heads, case.size),
        (b, s, case.kv_heads, case.size),
        (b, s, case.kv_heads, case.v_size),
        (b, t, case.heads, case.v_size),
    ]
    arrays = [jnp.asarray(rng.normal(size=shape), case.dtype) for shape in shapes]
    d_lse = jnp.asarray(rng.normal(size=(b, t, case.heads)), jnp.float32)
    operands = {}
    if case.offset is not None:
        operands["q_index"] = case.offset + jnp.arange(t, dtype=jnp.int32)[None]
    if case.own_places:
        operands["q_index"] = jnp.asarray(rng.permuted([range(t)] * b, axis=1), jnp.int32)
        operands["k_index"] = jnp.asarray(rng.permuted([range(s)] * b, axis=1), jnp.int32)
    if case.segments:
        of = {n: np.sort(rng.integers(0, 4, (b, n)), 1) for n in {t, s}}
        q_segments = of[t] if t > 1 else np.ones((b, 1))
        operands["q_segments"] = jnp.asarray(q_segments, jnp.int32)
        operands["k_segments"] = jnp.asarray(of[s], jnp.int32)
    if case.alibi:
        operands["bias"] = Alibi(jnp.asarray(rng.uniform(0.01, 0.1, case.heads), jnp.float32))
    if case.relative is not None:
        buckets = jnp.asarray(rng.normal(size=(16, case.heads)), jnp.float32)
        operands["bias"] = RelativeBias(buckets, 40, case.relative == "both ways")
    table, constant = None, None
    if case.tables is not None:
        nq, nk = -(-t // case.q_block), -(-s // 128)
        visible = rng.random((*case.tables, nq, nk)) < 0.6
        visible[..., 0, :] = False  # rows that see nothing
        visible |= case.tables == (1, 1)
        sizes = dict(q_block=case.q_block, k_block=128)
        make = (lambda x: from_block_mask(jnp.asarray(x), **sizes)) if case.traced else None
        table = make(visible) if make else from_block_mask(visible, **sizes)
        if case.traced:
            operands["table"] = table
        else:
            constant = Constant(table)
    if case.bits is not None:
        chosen = rng.random((b, t, s)) < case.bits
        chosen[:, : t // 3, : s // 2] = False  # blocks without any
        operands["key_bits"] = key_bits.pack(jnp.asarray(chosen))
    spec = Spec(case.mask, case.size**-0.5, case.soft_cap, constant)
    return (*arrays, d_lse), Operands(**operands), spec, table


def run(arrays, operands, spec, interpret=True):
    """(out, lse, dq, dk, dv, d_bias) by the kernels."""

    @jax.jit
    def both(q, k, v, d_out, d_lse, operands):
        out, lse = _tpu.forward(q, k, v, operands, spec, interpret=interpret)
        d_lse = jnp.where(jnp.isfinite(lse), d_lse, 0)
        saved = (q, k, v, out, lse, d_out, d_lse)
        return out, lse, *_tpu.backward(*saved, operands, spec, interpret=interpret)

    q, k, v = arrays[:3]
    assert _tpu.unsupported(q, k, v, operands, spec) is None
    return both(*arrays, operands)


def expected(arrays, operands, spec, table):
    """The same by differentiating the dense reference in float32."""
    options = dict(mask=spec.mask, scale=spec.scale, soft_cap=spec.soft_cap)

    @jax.jit
    def both(arrays, operands, table):
        def dense(q, k, v, bias):
            more = {"bias": bias, "table": table, "key_bits": operands.key_bits}
            return reference.attention(q, k, v, *operands[:4], **options, **more)

        q, k, v, d_out, d_lse = (x.astype(jnp.float32) for x in arrays)
        places = [
            jnp.arange(x.shape[1])[None] if index is None else index
            for x, index in ((q, operands.q_index), (k, operands.k_index))
        ]
        bias = None if operands.bias is None else operands.bias.logits(*places)
        (out, lse), pull = jax.vjp(dense, q, k, v, bias)
        *gradients, d_bias = pull((d_out, jnp.where(jnp.isfinite(lse), d_lse, 0)))
        if bias is not None:  # JAX would add up a bucket's elements one by one
            d_bias = operands.bias.gradient(*places, d_bias)
        return out, lse, *gradients, d_bias

    return both(arrays, operands, table)


def assert_close(found, wanted, tolerance):
    found, wanted = (np.asarray(x, np.float64) for x in (found, wanted))
    assert np.array_equal(np.isfinite(found), np.isfinite(wanted))
    found, wanted = (np.where(np.isfinite(x), x, 0) for x in (found, wanted))
    assert np.linalg.norm(found - wanted) <= tolerance * np.linalg.norm(wanted) + 1e-30


def compare(found, wanted, dtype="float32"):
    forward, backward = (2e-6, 5e-6) if dtype == "float32" else (5e-3, 5e-3)
    for x, y in zip(found[:2], wanted[:2], strict=True):
        assert_close(x, y, forward)
    for x, y in zip(jax.tree.leaves(found[2:]), jax.tree.leaves(wanted[2:]), strict=True):
        assert_close(x, y, backward)


@pytest.fixture(params=["two kernels", "one kernel"])
def backward(request, monkeypatch):
    """How dq, dk and dv are computed; with a bias always by two kernels."""
    if request.param == "one kernel":
        monkeypatch.setattr(_tpu_grid, "vmem", lambda: 128 * _tpu_grid.MIB)
    return request.param


def kernel_names(arrays, operands, spec):
    """The names of the kernels of a backward pass, in order."""
    q, k, v, d_out, d_lse = arrays

    def backward(*arrays):
        return _tpu.backward(*arrays, operands, spec)

    lowered = jax.jit(backward).trace(q, k, v, q, d_lse, d_out, d_lse)
    return re.findall(
        r'kernel_name = "(\w+)"', lowered.lower(lowering_platforms=("tpu",)).as_text()
    )


def test_the_backward_pass_is_one_kernel_where_dq_fits_into_vmem(monkeypatch):
    arrays, operands, spec, _ = build(Case(t=1100, s=1100, heads=1, mask=causal()))
    two = ["lcjax_d_queries", "lcjax_d_keys"]
    assert kernel_names(arrays, operands, spec) == two  # 16 MB, where the device is not known
    device = jax.sharding.AbstractDevice("TPU v5 lite", 1, "tpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        assert kernel_names(arrays, operands, spec) == ["lcjax_d_all"]
    monkeypatch.setattr(_tpu_grid, "vmem", lambda: 128 * _tpu_grid.MIB)
    monkeypatch.setattr(_tpu_grid, "SCALAR_BYTES", 4)
    assert kernel_names(arrays, operands, spec)[:1] == two[:1]  # lists are cut by blocks of keys


@pytest.mark.parametrize("name", CASES)
def test_kernels_equal_the_reference_with_a_cotangent_of_lse(name, backward):
    case = CASES[name]
    if backward != "two kernels" and (case.alibi or case.relative):
        pytest.skip("with a bias there are always two kernels")
    arrays, operands, spec, table = build(case)
    found = run(arrays, operands, spec)
    assert found[0].dtype == found[2].dtype == case.dtype and found[1].dtype == jnp.float32
    compare(found, expected(arrays, operands, spec, table), case.dtype)


def test_rows_that_see_nothing_are_zero_and_have_zero_gradients(backward):
    arrays, operands, spec, _ = build(CASES["queries before every key"])
    out, lse, dq, dk, dv, _ = run(arrays, operands, spec)
    assert np.all(out[:, :60] == 0) and np.all(lse[:, :60] == -np.inf) and np.all(dq[:, :60] == 0)
    assert np.all(lse[:, 60:] > -np.inf) and np.any(dq[:, 60:] != 0)
    # Keys that only such queries could see: queries 60.. are at places 0 to 79.
    assert np.all(dk[:, 80:] == 0) and np.all(dv[:, 80:] == 0) and np.any(dk[:, :80] != 0)


@pytest.mark.parametrize("unrolled", [1, 100])
@pytest.mark.parametrize("traced", [False, True])
def test_lists_too_long_for_scalar_memory_are_cut_into_calls_with_the_same_result(
    monkeypatch, traced, unrolled
):
    case = Case(t=130, s=140, heads=4, kv_heads=2, tables=(1, 2), mask=causal(), traced=traced)
    arrays, operands, spec, table = build(case)
    monkeypatch.setattr(_tpu_grid, "SCALAR_BYTES", 4 * 3)
    monkeypatch.setattr(_tpu_grid, "UNROLLED", unrolled)
    seen = []
    cut = _tpu_grid._split_lists
    monkeypatch.setattr(_tpu_grid, "_split_lists", lambda *a: seen.append(cut(*a)) or seen[-1])
    compare(run(arrays, operands, spec), expected(arrays, operands, spec, table))
    calls = [call for grid in seen for row in grid for call in row]
    assert len(calls) == 2 * len(seen)  # cut by heads
    assert len(seen) > 3 if unrolled > 1 else len(seen) in (2, 3)  # loops of kernels, or each range
    assert all(call.size <= 3 for call in calls)


# Interpreter with the machine's memory: uninitialised memory is NaN, races are errors.
@pytest.mark.parametrize(
    "case",
    [
        Case(t=129, s=200, tables=(1, 1), q_block=64, offset=50, segments=True, alibi=True),
        Case(t=129, s=130, heads=2, tables=(1, 2), q_block=128, traced=True, mask=causal()),
        Case(t=129, s=260, tables=(1, 1), q_block=128, offset=50, relative="behind"),
        Case(t=1100, s=300, heads=1, segments=True, mask=causal()),
    ],
    ids=["places, documents, biases", "traced tables per query head", "buckets", "documents"],
)
def test_kernels_have_no_races_and_read_nothing_unwritten(case, backward):
    arrays, operands, spec, table = build(case)
    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    compare(run(arrays, operands, spec, interpret=params), expected(arrays, operands, spec, table))
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    assert not interpret_pallas_call.races.races_found


def test_forward_equals_splash_attention_of_jax():
    t, heads, size = 384, 2, 128
    arrays, operands, spec, _ = build(
        Case(t=t, s=t, heads=heads, kv_heads=heads, size=size, v_size=size, mask=causal())
    )
    q, k, v = arrays[:3]
    mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((t, t))] * heads)
    peer = splash_attention_kernel.make_splash_mha_single_device(
        mask, save_residuals=True, interpret=True
    )
    first, *rest = (x[0].swapaxes(0, 1) for x in (q * size**-0.5, k, v))
    out, (lse,) = peer(first, *rest)
    found = run(arrays, operands, spec)
    assert_close(found[0][0], out.swapaxes(0, 1), 3e-3)  # its products are not in full precision
    assert_close(found[1][0], lse.T, 3e-3)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(dtype="float16"), "all bfloat16, they are float16"),
        (dict(size=320), "head size 320 is above 256"),
        (dict(mask=keys_in(tuple(range(0, 600, 2)))), "long list"),
        (dict(tables=(1, 1), q_block=48), "48 queries times 2 heads are 96 rows"),
    ],
)
def test_unsupported_calls_return_reason(change, reason):
    arrays, operands, spec, _ = build(Case(**change))
    assert reason in _tpu.unsupported(*arrays[:3], operands, spec)


def test_a_bias_with_more_buckets_than_lanes_returns_reason():
    (q, k, v, *_), operands, spec, _ = build(Case())
    operands = operands._replace(bias=RelativeBias(jnp.zeros((130, 2)), 1000))
    reason = _tpu.unsupported(q, k, v, operands, spec)
    assert "the bias has 130 buckets, the kernels hold 128" in reason


@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize(("buckets", "far"), [(32, 128), (12, 100), (4, 3), (128, 4000)])
def test_levels_of_distances_are_the_buckets(buckets, far, both_ways):
    bias = RelativeBias(jnp.zeros((buckets, 1)), far, both_ways)
    levels = bias_levels(bias, group=1)
    assert sorted(levels.buckets) == list(range(buckets))
    ahead = np.arange(-far - 50, far + 50)
    level = np.searchsorted(levels.starts, -ahead, side="right") - 1
    found = np.array(levels.buckets)[level]
    np.testing.assert_array_equal(found, bias.buckets(np.zeros(1, np.int32), ahead)[0])


def test_narrow_blocks_of_keys_return_reason():
    (q, k, v, *_), operands, spec, _ = build(Case())
    table = from_mask(causal(), queries=150, keys=300, q_block=64, k_block=32)
    reason = _tpu.unsupported(q, k, v, operands, Spec(spec.mask, 1.0, None, Constant(table)))
    assert "blocks of 32 keys are no multiple of 128" in reason
