"""The TPU kernel for decoding in Pallas' interpreter equals the dense reference."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_cases import CASES, Case, assert_close, build, expected, places, slots_first
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import causal, window
from pallas_kernels.backends.tpu import attention as _tpu
from pallas_kernels.backends.tpu import decode as _tpu_decode
from pallas_kernels.dispatch import Constant, Operands, Spec
from pallas_kernels.tables import from_block_mask

pytestmark = pytest.mark.slow  # the interpreter


def run(case: Case, splits=None, interpret=True):
    """(out, lse) of the kernel, which never sees sinks, and what it was given."""
    arrays, options = build(dataclasses.replace(case, sinks=False))
    q, keys, values = arrays
    spec = Spec(case.mask, case.size**-0.5, case.soft_cap, None, splits)
    operands = Operands(*_rows(places(arrays, options)), options.get("bias"))
    k, v = slots_first(keys), slots_first(values)
    assert _tpu.unsupported(q, k, v, operands, spec) is None
    assert _tpu_decode.fits(q, k, v, operands, spec)
    found = jax.jit(lambda q, k, v, x: _tpu.forward(q, k, v, x, spec, interpret=interpret))
    return found(q, k, v, operands), arrays, options


def _rows(values):
    return [x if x is None else jnp.atleast_2d(x) for x in values]


@pytest.mark.parametrize("splits", [None, 3])
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_equals_the_reference(name, splits, monkeypatch):
    monkeypatch.setattr(_tpu_decode, "KEY_BYTES", 4 * 128 * 128)  # several blocks of 128 keys up
    case = CASES[name]
    found, arrays, options = run(case, splits)
    assert found[0].dtype == case.dtype and found[1].dtype == jnp.float32
    assert_close(found, expected(case, arrays, options), case.dtype)


@pytest.mark.parametrize("splits", [1, 2, 5, 12])
def test_any_number_of_splits_gives_the_same_result(splits, monkeypatch):
    monkeypatch.setattr(_tpu_decode, "KEY_BYTES", 4 * 32 * 128)
    case = Case(t=2, s=1000, offset=None)
    found, arrays, options = run(case, splits)
    assert_close(found, expected(case, arrays, options))


def test_blocks_that_are_not_filled_or_too_old_are_not_read(monkeypatch):
    monkeypatch.setattr(_tpu_decode, "KEY_BYTES", 4 * 32 * 128)
    case = Case(s=1000, offset=600, filled=601, mask=causal() & window(100))
    (wanted, (q, keys, values), options) = run(case)
    block = np.arange(1000) // 128
    read = ((block >= 501 // 128) & (block <= 600 // 128))[:, None]
    k, v = (jnp.where(read, x, jnp.nan).swapaxes(1, 2) for x in (keys, values))
    operands = Operands(*_rows(places((q, keys, values), options)))
    spec = Spec(case.mask, case.size**-0.5)
    found = jax.jit(lambda *x: _tpu.forward(*x, spec, interpret=True))(q, k, v, operands)
    for x, y in zip(found, wanted, strict=True):
        assert np.array_equal(x, y) and np.all(np.isfinite(x))


@pytest.mark.parametrize("heads", [1, 2])
def test_only_the_blocks_of_a_table_are_read(heads):
    visible = np.array([[[True, False, True]], [[False, True, False]]])[:heads]
    table = from_block_mask(visible, q_block=1, k_block=128)
    case = Case(batch=1, offset=299)
    (q, keys, values), options = build(case)
    spec = Spec(case.mask, case.size**-0.5, None, Constant(table))
    forward = jax.jit(lambda *x: _tpu.forward(*x, spec, interpret=True))

    def run(keys, values):
        k, v = keys.swapaxes(1, 2), values.swapaxes(1, 2)
        return forward(q, k, v, Operands(options["q_index"][None]))

    hidden = np.broadcast_to(np.repeat(~visible[:, 0], 128, 1)[:, :301], (2, 301))
    hidden = jnp.asarray(hidden)[None, :, :, None]
    found, poisoned = (
        run(keys, values),
        run(*(jnp.where(hidden, jnp.nan, x) for x in (keys, values))),
    )
    for x, y in zip(found, poisoned, strict=True):
        assert np.array_equal(x, y) and np.all(np.isfinite(x))


@pytest.mark.parametrize("case", [
    Case(t=2, s=300, batch=2, padding=True, alibi=True, offset=210),
    Case(t=1, s=300, batch=1, kv_heads=1, heads=2, size=128, v_size=64, mask=causal()),
], ids=["padding, biases, turned keys", "one key head in two parts"])  # fmt: skip
def test_the_kernel_has_no_races_and_reads_nothing_unwritten(case, monkeypatch):
    monkeypatch.setattr(_tpu_decode, "KEY_BYTES", 4 * 128 * 128)
    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    found, arrays, options = run(case, interpret=params)
    assert_close(found, expected(case, arrays, options))
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    assert not interpret_pallas_call.races.races_found


def test_codes_are_for_few_queries():
    def unsupported(**fields):
        (q, keys, values), _ = build(Case(**fields))
        spec = Spec(causal(), 1.0)
        return _tpu.unsupported(q, slots_first(keys), slots_first(values), Operands(), spec)

    assert unsupported(codes="int8") is None
    assert "is for decoding: at most 128 rows" in unsupported(codes="int8", t=60)
    assert "codes must be int8 or float8_e4m3fn" in unsupported(codes="float8_e5m2")


def test_many_rows_long_lists_and_tables_per_query_head_take_the_other_kernels():
    def fits(t=1, heads=8, kv_heads=2, s=300, table=None, batch=1):
        q = jax.ShapeDtypeStruct((batch, t, heads, 64), jnp.float32)
        k = jax.ShapeDtypeStruct((batch, s, kv_heads, 64), jnp.float32)
        spec = Spec(causal(), 1.0, None, table)
        return _tpu_decode.fits(q, k, k, Operands(), spec)

    assert fits() and fits(t=32)
    assert not fits(t=33)
    by_head = from_block_mask(np.ones((1, 8, 1, 3), bool), q_block=1, k_block=128)
    by_key_head = from_block_mask(np.ones((1, 2, 1, 3), bool), q_block=1, k_block=128)
    narrow = from_block_mask(np.ones((1, 10), bool), q_block=1, k_block=32)
    assert fits(table=Constant(by_key_head))
    assert not fits(table=Constant(by_head)) and not fits(table=Constant(narrow))
    assert not fits(batch=4096, s=2**20)
