"""TPU kernels of grouped softmax in Pallas' interpreter: the oracle, and plain XLA beside them."""

import functools
import sys
import types
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import landmark_oracle
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import _tpu, _tpu_landmark, _tpu_tables, _xla_landmark
from pallas_kernels._tpu_landmark_layout import layout
from pallas_kernels.backends import BACKENDS, LANDMARK, Backend, LandmarkOperands, LandmarkSpec
from pallas_kernels.landmark import landmark_attention, older_blocks

pytestmark = pytest.mark.slow  # the interpreter: two minutes together


@dataclass(frozen=True)
class Case:
    """Inputs; `places` numbers blocks and puts them into documents, at random, in every row."""

    t: int = 300
    s: int = 304
    block: int = 8
    batch: int = 1
    heads: int = 2
    kv_heads: int = 1
    size: int = 32
    v_size: int = 32
    scale: float | None = None
    places: bool = False
    dtype: str = "float32"


CASES = {
    "several steps of both sides": Case(t=700, s=1280, block=64, size=64, v_size=64),
    "more queries than keys": Case(t=300, s=96, block=16, heads=3, kv_heads=3),
    "fifty-one tokens, as in the paper": Case(t=600, s=612, block=51, size=80, v_size=40),
    "blocks of two, anywhere": Case(t=140, s=170, block=2, batch=2, places=True),
    "three heads per key head, anywhere": Case(
        t=260, s=690, block=23, batch=2, heads=6, kv_heads=2, places=True
    ),
    "heads of 256, blocks longer than a step's": Case(
        t=900, s=1800, block=600, size=256, v_size=96, heads=1
    ),
    "few queries, eight heads per key head": Case(t=3, s=256, heads=16, kv_heads=2, places=True),
    "bfloat16, a scale that it cannot hold": Case(
        t=400, s=640, block=64, size=128, v_size=128, scale=0.1, dtype="bfloat16"
    ),
    "bfloat16, anywhere": Case(t=200, s=357, block=51, batch=2, dtype="bfloat16", places=True),
}


def build(case: Case):
    """(q, k, v, d_out, d_lse), operands and spec."""
    rng = np.random.default_rng(0)
    b, t, s, count = case.batch, case.t, case.s, case.s // case.block
    shapes = [
        (b, t, case.heads, case.size),
        (b, s, case.kv_heads, case.size),
        (b, s, case.kv_heads, case.v_size),
        (b, t, case.heads, case.v_size),
    ]
    arrays = [jnp.asarray(rng.normal(size=shape), case.dtype) for shape in shapes]
    arrays.append(jnp.asarray(rng.normal(size=(b, t, case.heads)), jnp.float32))
    operands = LandmarkOperands()
    if case.places:
        numbers = [rng.integers(0, count, (b, n)) for n in (t, count)]
        segments = [np.sort(rng.integers(0, 4, (b, n)), 1) for n in (t, count)]
        operands = LandmarkOperands(*(jnp.asarray(x, jnp.int32) for x in numbers + segments))
    scale = case.size**-0.5 if case.scale is None else case.scale
    return arrays, operands, LandmarkSpec(case.block, scale)


def run(module, arrays, operands, spec, **options):
    """(out, lse, dq, dk, dv) of a backend."""

    @jax.jit
    def both(q, k, v, d_out, d_lse, operands):
        out, lse = module.forward(q, k, v, operands, spec, **options)
        d_lse = jnp.where(jnp.isfinite(lse), d_lse, 0)
        saved = (q, k, v, out, lse, d_out, d_lse)
        return out, lse, *module.backward(*saved, operands, spec, **options)

    assert module.unsupported(*arrays[:3], operands, spec) is None
    return both(*arrays, operands)


def compare(arrays, operands, spec, interpret=True, dtype="float32"):
    """The kernels against XLA in float32; returns what the kernels gave."""
    found = run(_tpu_landmark, arrays, operands, spec, interpret=interpret)
    wide = [x.astype(jnp.float32) for x in arrays]
    wanted = run(_xla_landmark, wide, operands, spec, platform="cpu")
    bounds = (2e-6, 2e-6, 5e-6, 5e-6, 5e-6) if dtype == "float32" else (5e-3,) * 5
    for x, y, bound in zip(found, wanted, bounds, strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert np.array_equal(np.isneginf(x), np.isneginf(y)) and not np.isnan(x).any()
        x, y = (np.where(np.isfinite(z), z, 0) for z in (x, y))
        assert np.linalg.norm(x - y) <= bound * np.linalg.norm(y)
    return found


@pytest.mark.parametrize("name", CASES)
def test_kernels_equal_plain_xla_with_a_cotangent_of_lse(name):
    case = CASES[name]
    out, lse, *gradients = compare(*build(case), dtype=case.dtype)
    assert out.dtype == case.dtype and lse.dtype == jnp.float32
    assert all(x.dtype == case.dtype and x.any() for x in gradients)


def test_rows_that_see_nothing_are_zero_and_have_zero_gradients():
    arrays, operands, spec = build(CASES["blocks of two, anywhere"])
    out, lse, dq, *_ = compare(arrays, operands, spec)
    q, k = (operands.q_numbers, operands.q_segments), (operands.k_numbers, operands.k_segments)
    same = (q[1][:, :, None] == k[1][:, None]) & (k[1] != 0)[:, None]
    empty = ~np.any(same & (k[0][:, None] < q[0][:, :, None]), -1)
    assert empty.any() and not empty.all()
    assert np.all(np.isneginf(lse) == empty[..., None])
    assert not np.any(out[empty]) and not np.any(dq[empty])


@pytest.mark.parametrize("places", [False, True])
def test_lists_too_long_for_scalar_memory_are_cut_into_calls_with_the_same_result(
    monkeypatch, places
):
    arrays, operands, spec = build(Case(t=700 if places else 1100, s=1096, places=places, heads=1))
    monkeypatch.setattr(_tpu_tables, "SCALAR_BYTES", 4 * 3)
    seen, cut = [], _tpu_tables._cut
    monkeypatch.setattr(_tpu_tables, "_cut", lambda *a: seen.append(a) or cut(*a))
    compare(arrays, operands, spec)
    assert len(seen) > 3  # three kernels


# Interpreter with the machine's memory: uninitialised memory is NaN, races are errors.
@pytest.mark.parametrize(
    "case",
    [
        Case(t=200, s=180, block=20, batch=2, places=True),
        Case(t=520, s=576, block=64, heads=1),
    ],
    ids=["anywhere", "two row blocks, two key blocks"],
)
def test_kernels_have_no_races_and_read_nothing_unwritten(case):
    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    compare(*build(case), interpret=params)
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    assert not interpret_pallas_call.races.races_found


@pytest.fixture
def interpreted(monkeypatch):
    """The name of an implementation: all its TPU kernels, interpreted on a CPU."""
    for family, kernels in ((BACKENDS, _tpu), (LANDMARK, _tpu_landmark)):
        module = types.ModuleType(f"interpreted_{kernels.__name__}")
        module.unsupported = kernels.unsupported
        for name in ("forward", "backward"):
            run = functools.partial(getattr(kernels, name), interpret=True)
            setattr(module, name, run)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(family, "interpreted", Backend(module.__name__, ("cpu",)))
    jax.clear_caches()
    yield "interpreted"
    jax.clear_caches()


@pytest.mark.parametrize("name", landmark_oracle.CASES)
def test_the_whole_of_landmark_attention_by_kernels_equals_the_oracle(interpreted, name):
    case = landmark_oracle.CASES[name]
    found = landmark_oracle.run(case, interpreted)
    landmark_oracle.assert_same(found, landmark_oracle.oracle(case)[:3], case.loose)


def test_landmark_values_are_never_used():
    arrays, operands, spec = build(Case())
    changed = arrays.copy()
    changed[2] = arrays[2].at[:, 7::8].set(1e6)
    for x, y in zip(
        run(_tpu_landmark, arrays, operands, spec, interpret=True),
        run(_tpu_landmark, changed, operands, spec, interpret=True),
        strict=True,
    ):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    ("block", "height"), [(2, 8), (51, 56), (64, 64), (100, 112), (200, 224), (1024, 1024)]
)
def test_a_step_holds_whole_blocks_in_whole_lanes(block, height):
    q = jax.ShapeDtypeStruct((1, 8192, 4, 128), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((1, 8192 // block * block, 4, 128), jnp.bfloat16)
    for backward in (False, True):
        cut, groups = layout(q, k, k, block, backward)
        assert groups.height == height and groups.step * height == cut.key_block
        assert cut.key_block % 128 == 0 and cut.key_block <= 1024


@pytest.mark.parametrize(
    ("places", "implementation", "number"), [(False, None, 6), (True, None, 6), (True, "xla", 0)]
)
def test_a_program_for_a_tpu_holds_the_kernels(places, implementation, number):
    device = jax.sharding.AbstractDevice("TPU v5 lite", 1, "tpu")
    q = jax.ShapeDtypeStruct((1, 512, 2, 64), jnp.bfloat16)
    index = jax.ShapeDtypeStruct((1, 512), jnp.int32) if places else None

    def loss(q, k, v, index):
        places = dict(q_index=index, k_index=index, q_segments=index, k_segments=index)
        out, lse = landmark_attention(q, k, v, 64, implementation=implementation, **places)
        return jnp.sum(out.astype(jnp.float32)) + jnp.sum(lse)

    def program(platform):
        step = jax.jit(jax.grad(loss, (0, 1, 2))).trace(q, q, q, index)
        return step.lower(lowering_platforms=(platform,)).as_text()

    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        text = program("tpu")
    assert text.count("tpu_custom_call") == number
    assert ("lcjax_landmark_d_keys" in text) == (number > 0)
    assert "tpu_custom_call" not in program("cpu")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(dtype="float16"), "all bfloat16, they are float16"),
        (dict(size=320), "head size 320 is above 256"),
        (dict(block=1025, s=2050), "blocks of 1025 tokens are above 1024"),
    ],
)
def test_what_cannot_run_says_why(change, reason):
    arrays, operands, spec = build(Case(**change))
    assert reason in _tpu_landmark.unsupported(*arrays[:3], operands, spec)


def test_too_many_blocks_say_why():
    q = jax.ShapeDtypeStruct((1, 2**25, 1, 128), jnp.float32)
    reason = _tpu_landmark.unsupported(q, q, q, LandmarkOperands(), LandmarkSpec(64, 1.0))
    assert "65536 x 65536 blocks of a step are more than 16383" in reason


def test_the_kernels_by_name_say_that_a_cpu_is_no_tpu():
    q = jnp.ones((1, 32, 1, 8))
    for call in (landmark_attention, functools.partial(older_blocks, scale=1.0)):
        reason = r"landmark_attention\(.*'tpu'\): it runs on tpu and this .* cpu"
        with pytest.raises(ValueError, match=reason):
            call(q, q, q, 8, implementation="tpu")
