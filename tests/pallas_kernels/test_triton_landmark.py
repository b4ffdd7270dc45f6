"""GPU kernels of grouped softmax in Pallas' interpreter: the oracle, and plain XLA beside them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import landmark_cases
import landmark_oracle
import numpy as np
import pytest
from landmark_cases import Case, build

from pallas_kernels import dispatch, nvidia
from pallas_kernels.backends.triton import attention as _triton
from pallas_kernels.backends.triton import landmark as _triton_landmark
from pallas_kernels.dispatch import Operands
from pallas_kernels.landmark import older_spec
from pallas_kernels.nvidia import Tile

slow = pytest.mark.slow
TILES = nvidia.landmark
CASES = landmark_cases.CASES | {
    "odd lengths, blocks of twenty-three, three heads per key head, anywhere": Case(
        t=45, s=92, block=23, heads=3, size=24, v_size=40, places=True
    ),
    "bfloat16, blocks of sixty-four": Case(
        t=150, s=192, block=64, heads=2, kv_heads=2, scale=0.1, dtype="bfloat16"
    ),
    "blocks of 100, a scale below zero": Case(
        t=500, s=600, block=100, scale=-0.1, dtype="bfloat16"
    ),
}


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    """As if an H100 were there, with less in a step than it takes."""
    monkeypatch.setattr(nvidia, "architecture", lambda: "sm90")
    monkeypatch.setattr(nvidia, "LARGEST_EXACT", 256)
    monkeypatch.setattr(nvidia, "triton", lambda *of: Tile(32, 16, 4, 1))
    monkeypatch.setattr(nvidia, "landmark", lambda *of: Tile(32, 1, 4, 1))
    yield
    dispatch.run.clear_cache()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernels_equal_plain_xla_with_a_cotangent_of_lse(case):
    landmark_cases.assert_kernels_equal_plain_xla(_triton_landmark, case)


@slow
@pytest.mark.parametrize("case", landmark_oracle.CASES.values(), ids=landmark_oracle.CASES)
def test_the_whole_of_landmark_attention_by_kernels_equals_the_oracle(monkeypatch, case):
    landmark_cases.register_interpreted(monkeypatch, _triton, _triton_landmark)
    found = landmark_oracle.run(case, "interpreted")
    landmark_oracle.assert_same(found, landmark_oracle.oracle(case)[:3], case.loose)


@slow
def test_rows_that_see_nothing_are_zero_and_have_zero_gradients():
    landmark_cases.assert_rows_that_see_nothing_are_zero(_triton_landmark)


@slow
def test_landmark_values_are_never_used():
    landmark_cases.assert_landmark_values_are_never_used(_triton_landmark)


@slow
@pytest.mark.parametrize("places", [False, True])
def test_listed_blocks_of_several_steps_give_the_same_result(monkeypatch, places):
    case = Case(t=150, s=143, block=11, batch=2, places=places)
    monkeypatch.setattr(_triton, "PAIRS", 10)
    body, _ = _triton_landmark._prepare("forward", *build(case)[0][:3], *build(case)[1:], True)
    assert body.rows.steps > 1 and body.keys.steps > 1 and body.ragged_keys
    landmark_cases.compare(_triton_landmark, *build(case))


def assert_equal_in_spite_of(poison, places, arrays, operands):
    """`poison` of arrays, (array, part) each, leaves `places` of the results as they are."""
    run = functools.partial(landmark_cases.run, _triton_landmark, interpret=True)
    spec, poisoned = older_spec(8, 1.0), list(arrays)
    for array, part in poison:
        poisoned[array] = poisoned[array].at[:, part].set(jnp.nan)
    found, wanted = (run(x, operands, spec) for x in (poisoned, arrays))
    for array, part in places:
        assert np.isfinite(wanted[array][:, part]).all()
        np.testing.assert_array_equal(found[array][:, part], wanted[array][:, part])


@pytest.mark.slow
def test_nothing_is_read_of_other_documents():
    """Two documents of 4 blocks; the first is poison, and so is the second's last block."""
    arrays, *_ = build(Case(t=64, s=64, heads=1))
    numbers, segments = np.arange(64) % 32 // 8, 1 + np.arange(64) // 32
    places = numbers, numbers[::8], segments, segments[::8]
    operands = Operands(*(jnp.asarray(x[None], jnp.int32) for x in places))
    first, last, rest = slice(0, 32), slice(56, 64), slice(40, 64)
    poison = [*((i, first) for i in range(5)), (1, last), (2, last)]
    assert_equal_in_spite_of(poison, [(i, rest) for i in range(5)], arrays, operands)


@slow
def test_nothing_is_read_above_the_diagonal():
    """Of rows in steps of 32, the first step sees 3 blocks of 8 and nobody else's keys."""
    arrays, *_ = build(Case(t=64, s=64, heads=1))
    early, later, unseen = slice(8, 32), slice(32, 64), slice(24, 64)
    poison, places = [(1, unseen), (2, unseen)], [(0, early), (1, early), (2, early)]
    assert_equal_in_spite_of(poison, places, arrays, Operands())
    rows, keys = [(i, slice(0, 32)) for i in (0, 3, 4)], [(3, unseen), (4, unseen)]
    places = [(0, later), (1, later), (2, later), *keys]
    assert_equal_in_spite_of(rows, places, arrays, Operands())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        (dict(dtype="float16"), "all bfloat16, they are float16"),
        (dict(size=320), "head size 320 is above 256"),
        (dict(block=129, s=129), "blocks of 129 tokens with bfloat16 heads of 32: a step holds"),
        (dict(size=130), "blocks of 8 tokens with bfloat16 heads of 130: a step holds"),
        (dict(batch=65536, t=1, s=8), "65536 rows of 2 heads are more than a grid's"),
    ],
)
def test_unsupported_calls_return_reason(monkeypatch, change, reason):
    monkeypatch.setattr(nvidia, "landmark", TILES)
    case = dataclasses.replace(Case(dtype="bfloat16"), **change)
    q, k = (
        jax.ShapeDtypeStruct((case.batch, length, heads, case.size), case.dtype)
        for length, heads in ((case.t, case.heads), (case.s, case.kv_heads))
    )
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(dispatch, "platform", lambda: "cuda")
    arguments = q, k, k, Operands(), older_spec(case.block, 1.0)
    choose = dispatch.choose
    assert "cuda" not in dict(choose(None, *arguments))  # of no known kind
    if reason is None:
        assert choose("triton", *arguments) == (("default", "triton"),)
    else:
        with pytest.raises(ValueError, match=reason):
            choose("triton", *arguments)


def test_products_too_exact_for_registers_return_reason(monkeypatch):
    monkeypatch.setattr(nvidia, "LARGEST_EXACT", 16)
    arrays, operands, spec = build(Case(t=1, s=8))
    reason = _triton_landmark.unsupported(*arrays[:3], operands, spec)
    assert reason == "float32 heads of 32: above 16 registers are spilled"
