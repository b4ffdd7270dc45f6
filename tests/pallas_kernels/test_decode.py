"""Attention of few queries over a cache in its own layout equals the dense reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_cases import CASES, Case, as_floats, assert_close, build, expected
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import Layout, causal, decode, per_head, window


@functools.partial(jax.jit, static_argnames=("splits", "mask", "soft_cap"))
def attend(arrays, options, splits=None, mask=causal(), soft_cap=None):
    return decode(*arrays, mask, splits=splits, soft_cap=soft_cap, **options)


# Cut or not, every option once; all pairs are among the slow.
DEFAULT = {
    "one query, three heads a key head, odd cache": (3,),
    "window": (None,),
    "a cache that is hardly filled": (None,),
    "padding before the text, several queries": (None,),
    "rows at places of their own, linear biases": (1, 3),
    "sinks and soft cap, key and value heads of two sizes": (3,),
    "queries before every key, with sinks": (None,),
    "one key head, far keys": (None,),
    "bfloat16, window and biases": (None,),
    "int8, odd heads, padding": (3,),
    "int8, whole lanes, soft cap, biases": (None,),
    "float8, window": (None,),
}
RUNS = [
    pytest.param(name, splits, marks=[] if splits in DEFAULT.get(name, ()) else [pytest.mark.slow])
    for name in CASES
    for splits in (None, 1, 3)
]


@pytest.mark.parametrize(("name", "splits"), RUNS)
def test_decoding_equals_the_reference(name, splits):
    case = CASES[name]
    arrays, options = build(case)
    found = attend(arrays, options, splits, case.mask, case.soft_cap)
    assert found[0].dtype == case.dtype and found[1].dtype == jnp.float32
    assert_close(found, expected(case, arrays, options), case.dtype)


@pytest.mark.parametrize("mask", [causal(), causal() & window(40)], ids=["causal", "window"])
def test_keys_that_are_not_there_yet_or_too_old_are_not_read(mask):
    case = Case(s=4096, offset=2100, mask=mask, size=16, v_size=16, batch=1)
    (q, keys, values), options = build(case)
    wanted = expected(case, (q, keys, values), options)
    read = np.arange(4096) // 1024 <= 2100 // 1024  # whole blocks
    if mask != causal():
        read &= np.arange(4096) // 1024 >= (2100 - 40) // 1024
    keys, values = (np.where(read[:, None], x, np.float32(np.nan)) for x in (keys, values))
    assert_close(attend((q, keys, values), options, mask=mask), wanted)


def test_queries_that_see_nothing_are_zero():
    case = CASES["queries before every key"]
    arrays, options = build(case)
    out, lse = attend(arrays, options, 4)
    assert np.all(out[:, :2] == 0) and np.all(lse[:, :2] == -np.inf)
    assert np.all(lse[:, 2:] > -np.inf)


@given(splits=st.sampled_from([3, 9]), place=st.integers(-3, 9))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_any_number_of_splits_gives_the_same_result(splits, place):
    case = Case(s=7, offset=place, t=2, heads=2, kv_heads=1, size=4, v_size=4)
    arrays, options = build(case, seed=place + 3)
    assert_close(attend(arrays, options, splits), attend(arrays, options))


def test_gradients_are_those_of_the_reference_whatever_the_splits():
    case = Case(t=2, s=70, offset=50, alibi=True, sinks=True)
    (q, keys, values), options = build(case)
    bias, sinks = options.pop("bias"), options.pop("sinks")

    def loss(attend, q, k, v, bias, sinks):
        out, lse = attend(q, k, v, causal(), bias=bias, sinks=sinks, soft_cap=2.0, **options)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(lse))

    split = functools.partial(decode, splits=3)
    dense = functools.partial(decode, implementation="reference")
    found = jax.jit(jax.grad(lambda *x: loss(split, *x), range(5)))(q, keys, values, bias, sinks)
    wanted = jax.jit(jax.grad(lambda *x: loss(dense, *x), range(5)))(q, keys, values, bias, sinks)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.linalg.norm(x - y) <= 5e-6 * np.linalg.norm(y) and np.any(y != 0)


def test_masks_per_head_keep_their_splits():
    case = Case(mask=per_head((causal(), 3), (causal() & window(30), 3)))
    arrays, options = build(case)
    found = attend(arrays, options, 2, case.mask)
    assert_close(found, expected(case, arrays, options))


def test_steps_at_new_places_are_one_program():
    case = Case()
    (q, keys, values), _ = build(case)
    step = jax.jit(lambda place, length: decode(
        q, keys, values, case.mask, q_index=place[None], k_lengths=length
    ))  # fmt: skip
    for place in (3, 90, 300):
        step(np.int32(place), np.full(2, place + 1, np.int32))
    assert step._cache_size() == 1


def test_codes_have_no_gradient():
    (q, keys, values), options = build(Case(codes="int8"))
    with pytest.raises(NotImplementedError, match="codes, or as FoldedHeads, have no gradient"):
        jax.grad(lambda q: decode(q, keys, values, causal(), **options)[0].sum())(q)


def test_codes_are_read_by_any_form_of_the_call():
    """Keys alone as codes, masks per head, and rows and heads of a mesh."""
    case = Case(codes="int8", mask=per_head((causal(), 2), (causal() & window(30), 4)))
    coded, options = build(case)
    mesh = jax.make_mesh((2, 2), ("rows", "heads"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    q, keys, values = coded
    for arrays in (coded, (q, keys, as_floats(values))):
        wanted = expected(case, arrays, options)
        for layout in (None, Layout(mesh, ("rows",), "heads")):
            assert_close(decode(*arrays, case.mask, layout=layout, **options), wanted)


def test_no_parts_at_all_raise_value_error():
    arrays, _ = build(Case())
    with pytest.raises(ValueError, match="splits=0 must be an integer of at least 1"):
        decode(*arrays, splits=0)
