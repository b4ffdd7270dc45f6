"""TPU kernels of grouped softmax in Pallas' interpreter: the oracle, and plain XLA beside them."""

import functools

import jax
import jax.numpy as jnp
import landmark_cases
import landmark_oracle
import pytest
from jax.experimental.pallas import tpu as pltpu
from landmark_cases import Case, build

from pallas_kernels import dispatch
from pallas_kernels.backends.tpu import attention as _tpu
from pallas_kernels.backends.tpu import grid as _tpu_grid
from pallas_kernels.backends.tpu import landmark as _tpu_landmark
from pallas_kernels.backends.tpu.landmark import make_tiling
from pallas_kernels.dispatch import Operands
from pallas_kernels.landmark import landmark_attention, older_blocks, older_spec

pytestmark = pytest.mark.slow  # the interpreter: two minutes together


CASES = landmark_cases.CASES | {
    "heads of 256, blocks longer than a step's": Case(
        t=900, s=1800, block=600, size=256, v_size=96, heads=1
    ),
}
compare = functools.partial(landmark_cases.compare, _tpu_landmark)


@pytest.fixture(params=["two kernels", "one kernel"])
def backward(request, monkeypatch):
    """How dq, dk and dv are computed."""
    if request.param == "one kernel":
        monkeypatch.setattr(_tpu_grid, "vmem", lambda: 128 * _tpu_grid.MIB)


@pytest.mark.parametrize("name", CASES)
def test_kernels_equal_plain_xla_with_a_cotangent_of_lse(name, backward):
    landmark_cases.assert_kernels_equal_plain_xla(_tpu_landmark, CASES[name])


def test_rows_that_see_nothing_are_zero_and_have_zero_gradients(backward):
    landmark_cases.assert_rows_that_see_nothing_are_zero(_tpu_landmark)


@pytest.mark.parametrize(("places", "unrolled"), [(False, 100), (True, 100), (True, 1)])
def test_lists_too_long_for_scalar_memory_are_cut_into_calls_with_the_same_result(
    monkeypatch, places, unrolled
):
    monkeypatch.setattr(_tpu_grid, "UNROLLED", unrolled)
    arrays, operands, spec = build(Case(t=700 if places else 1100, s=1096, places=places, heads=1))
    monkeypatch.setattr(_tpu_grid, "SCALAR_BYTES", 4 * 3)
    seen, cut = [], _tpu_grid._split_lists
    monkeypatch.setattr(_tpu_grid, "_split_lists", lambda *a: seen.append(a) or cut(*a))
    compare(arrays, operands, spec)
    assert len(seen) > 3 if unrolled > 1 else len(seen) <= 3  # three kernels


# Interpreter with the machine's memory: uninitialised memory is NaN, races are errors.
@pytest.mark.parametrize(
    "case",
    [
        Case(t=200, s=180, block=20, batch=2, places=True),
        Case(t=520, s=576, block=64, heads=1),
    ],
    ids=["anywhere", "two row blocks, two key blocks"],
)
def test_kernels_have_no_races_and_read_nothing_unwritten(case, backward):
    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    compare(*build(case), interpret=params)
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    assert not interpret_pallas_call.races.races_found


@pytest.fixture
def interpreted(monkeypatch):
    """The name of an implementation: all its TPU kernels, interpreted on a CPU."""
    landmark_cases.register_interpreted(monkeypatch, _tpu, _tpu_landmark)
    dispatch.run.clear_cache()
    yield "interpreted"
    dispatch.run.clear_cache()


@pytest.mark.parametrize("name", landmark_oracle.CASES)
def test_the_whole_of_landmark_attention_by_kernels_equals_the_oracle(interpreted, name):
    case = landmark_oracle.CASES[name]
    found = landmark_oracle.run(case, interpreted)
    landmark_oracle.assert_same(found, landmark_oracle.oracle(case)[:3], case.loose)


def test_landmark_values_are_never_used():
    landmark_cases.assert_landmark_values_are_never_used(_tpu_landmark)


@pytest.mark.parametrize(
    ("block", "height"), [(2, 8), (51, 56), (64, 64), (100, 112), (200, 224), (1024, 1024)]
)
def test_a_step_holds_whole_blocks_in_whole_lanes(block, height):
    q = jax.ShapeDtypeStruct((1, 8192, 4, 128), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((1, 8192 // block * block, 4, 128), jnp.bfloat16)
    for backward in (False, True):
        cut, groups = make_tiling(q, k, k, block, backward)
        assert groups.height == height and groups.step * height == cut.key_block
        assert cut.key_block % 128 == 0 and cut.key_block <= 1024


@pytest.mark.parametrize(
    ("places", "implementation", "number"), [(False, None, 4), (True, None, 4), (True, "xla", 0)]
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
    assert ("lcjax_landmark_d_all" in text) == (number > 0)
    assert "tpu_custom_call" not in program("cpu")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(dtype="float16"), "all bfloat16, they are float16"),
        (dict(size=320), "head size 320 is above 256"),
        (dict(block=1025, s=2050), "blocks of 1025 tokens are above 1024"),
    ],
)
def test_unsupported_calls_return_reason(change, reason):
    arrays, operands, spec = build(Case(**change))
    assert reason in _tpu_landmark.unsupported(*arrays[:3], operands, spec)


def test_too_many_blocks_return_reason():
    q = jax.ShapeDtypeStruct((1, 2**25, 1, 128), jnp.float32)
    reason = _tpu_landmark.unsupported(q, q, q, Operands(), older_spec(64, 1.0))
    assert "65536 x 65536 blocks of a step are more than 16383" in reason


def test_selecting_the_kernels_by_name_on_a_cpu_raises_an_error():
    q = jnp.ones((1, 32, 1, 8))
    for call in (landmark_attention, functools.partial(older_blocks, scale=1.0)):
        reason = r"landmark_attention\(.*'tpu'\): it runs on tpu and this .* cpu"
        with pytest.raises(ValueError, match=reason):
            call(q, q, q, 8, implementation="tpu")
