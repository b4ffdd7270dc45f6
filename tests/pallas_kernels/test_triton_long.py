"""GPU kernels of the size and with the tiles that an H100 runs them: long caches, long memories.

In Pallas' interpreter against float64 NumPy; lengths and places are traced, as in a model.
"""

import functools

import jax
import landmark_cases
import numpy as np
import pytest
from attention_oracle import Case, inputs, oracle, relative_error, run

from pallas_kernels import causal, decode, everything, nvidia, window
from pallas_kernels.backends.triton import attention as _triton
from pallas_kernels.backends.triton import landmark as _triton_landmark

pytestmark = pytest.mark.slow  # a minute together
BOUNDS = {"float32": 2e-6, "bfloat16": 5e-3}
GRADIENTS = {"float32": 5e-6, "bfloat16": 5e-3}
HALF = dict(dtype="bfloat16")
CACHE = dict(t=1, s=8195, heads=8, size=64, v_size=64)
CACHES = {  # parts that the keys are cut in
    "one query of an odd cache, as many parts as keep a GPU busy": (
        Case(**CACHE, offset=8194), None
    ),
    "a row that is nearly empty beside a full one": (
        Case(**CACHE, mask=everything(), k_lengths=(8195, 3)), 7
    ),
    "two queries, bfloat16, a third of the cache filled, two sizes of heads": (
        Case(**CACHE | HALF | dict(t=2, size=128), offset=2777), 16
    ),
    "more parts than blocks in the window, bfloat16, one key head": (
        Case(**CACHE | HALF, kv_heads=1, mask=causal() & window(300), offset=8001), 40
    ),
    "bfloat16, an empty row, documents": (
        Case(**CACHE | HALF | dict(t=2), batch=3, mask=everything(), segments=4,
             k_lengths=(8195, 0, 5001)), 5
    ),
}  # fmt: skip
MEMORY = dict(batch=3, heads=4, mask=None, size=64, v_size=64)
MEMORIES = {
    "a text and a padded memory": Case(
        **MEMORY | dict(batch=2), t=100, s=4500, k_lengths=(4500, 1237)
    ),
    "bfloat16, an empty row, large heads": Case(
        **MEMORY | HALF | dict(batch=2, heads=2, size=128, v_size=128), t=67, s=4211,
        k_lengths=(4000, 0),
    ),
    "bfloat16, three heads a key head, soft cap": Case(
        **MEMORY | HALF | dict(heads=3), kv_heads=1, t=128, s=4096, k_lengths=(1, 4096, 3333),
        soft_cap=5.0,
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """`implementation="interpreted"` runs the kernels as for an H100."""
    monkeypatch.setattr(nvidia, "architecture", lambda: "sm90")
    landmark_cases.register_interpreted(monkeypatch, _triton, _triton_landmark)
    yield
    jax.clear_caches()


@pytest.mark.parametrize("name", CACHES)
def test_decoding_from_a_long_cache_in_parts_equals_dense_float64_formulas(name):
    case, parts = CACHES[name]
    (q, k, v), _, places, _ = inputs(case)
    step = functools.partial(decode, mask=case.mask, splits=parts, implementation="interpreted")
    out, lse = jax.jit(step)(q, k.swapaxes(1, 2), v.swapaxes(1, 2), **places)
    expected = oracle(case)
    assert out.dtype == case.dtype and lse.dtype == "float32"
    assert relative_error(out, expected["out"]) < BOUNDS[case.dtype]
    assert relative_error(lse, expected["lse"]) < BOUNDS["float32"]
    assert np.all(np.asarray(out, np.float32)[np.isneginf(lse)] == 0)


@pytest.mark.parametrize("name", MEMORIES)
def test_cross_attention_over_a_long_padded_memory_equals_dense_float64_formulas(name):
    case = MEMORIES[name]
    found, expected = run(case, "interpreted"), oracle(case)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        bound = (BOUNDS if key in ("out", "lse") else GRADIENTS)[case.dtype]
        assert relative_error(found[key], value) < bound, key
    for x, length in enumerate(case.k_lengths):  # what is not there moves nothing
        assert not np.any(np.asarray(found["dk"], np.float32)[x, length:])
