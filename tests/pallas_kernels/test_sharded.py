"""Attention over a mesh equals attention on one device, values and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from pallas_kernels import (
    Alibi,
    alibi_slopes,
    band,
    causal,
    chunks,
    flash,
    per_head,
    prefix,
    window,
)
from pallas_kernels.dispatch import Operands
from pallas_kernels.landmark import landmark_attention
from pallas_kernels.sharded import Layout, _hops, zigzag

B, T, N, K, H = 2, 48, 8, 2, 16
MASKS = {
    "causal": causal(),
    "window": causal() & window(9),
    "far": causal() & ~window(9) & prefix(3),
    "by head": causal() & per_head((chunks(12), 4), (chunks(12, 6), 4)),
    "three parts": causal() & per_head((chunks(12), 3), (window(5), 4), (window(40), 1)),
    "both sides": band(-7, 7),
}


def layout(rows=1, heads=1, length=1, method="ring", **options):
    count = rows * heads * length
    shape, names = (rows, heads, length), ("rows", "heads", "length")
    kinds = (AxisType.Auto,) * 3
    mesh = jax.make_mesh(shape, names, axis_types=kinds, devices=jax.devices()[:count])
    return Layout(mesh, ("rows",), "heads", "length", method, **options)


def inputs(seed=0, t=T, heads=N, kv_heads=K):
    """q, k, v and the cotangents of out and lse."""
    rng = np.random.default_rng(seed)
    kept = (B, t, kv_heads, H)
    shapes = [(B, t, heads, H), kept, kept, (B, t, heads, H), (B, t, heads)]
    found = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
    return found[:3], found[3:]


def both(run, arrays, weights):
    """(out, lse) and the gradients of `run` for the cotangents `weights` of both."""

    def value(weights, *arrays):
        out, lse = run(*arrays)
        finite = jnp.where(jnp.isfinite(lse), lse, 0.0)
        return (out * weights[0]).sum() + (finite * weights[1]).sum(), (out, lse)

    (_, found), grads = jax.jit(
        jax.value_and_grad(value, argnums=tuple(range(1, len(arrays) + 1)), has_aux=True)
    )(weights, *arrays)
    return jax.device_get((found, grads))


# Kernels of one device, which have tests of their own, take up to ten times as long to compile.
reference = functools.partial(flash, implementation="reference")


@functools.cache
def on_one_device(name):
    """What every layout has to find with the inputs of seed 0 under a mask."""
    return both(functools.partial(reference, mask=MASKS[name]), *inputs())


def assert_agree(found, wanted):
    for a, b in zip(jax.tree.leaves(found[0]), jax.tree.leaves(wanted[0]), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)
    for a, b in zip(jax.tree.leaves(found[1]), jax.tree.leaves(wanted[1]), strict=True):
        assert np.linalg.norm(a - b) <= 5e-6 * np.linalg.norm(b)


@pytest.mark.parametrize("queries", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_any_number_of_queries_attends_to_keys_of_several_devices(queries):
    (q, k, v), (d_out, d_lse) = inputs(3)
    last = slice(T - queries, None)
    segments = np.array([[1] * T, [0] * 9 + [1] * (T - 9)], np.int32)
    # Keys in any order, as in the slots of a cache.
    order = np.random.default_rng(3).permutation(T)
    places = {"k_index": order.astype(np.int32)[None], "k_segments": segments[:, order]}
    places |= {"q_index": np.arange(T, dtype=np.int32)[None, last], "q_segments": segments[:, last]}

    def run(q, k, v, **options):
        return flash(q, k[:, order], v[:, order], MASKS["far"], **places, **options)

    arrays, weights = (q[:, last], k, v), (d_out[:, last], d_lse[:, last])
    found, expected = (
        both(functools.partial(run, **options), arrays, weights)
        for options in ({"layout": layout(2, 1, 4, "split_keys")}, {"implementation": "reference"})
    )
    assert_agree(found, expected)


@pytest.mark.slow
def test_gradients_do_not_need_jit():
    arrays, weights = inputs()

    def value(arrays, layout):
        return (flash(*arrays, causal(), layout=layout)[0] * weights[0]).sum()

    found, expected = (jax.grad(value)(arrays, x) for x in (layout(rows=2, length=2), None))
    for a, b in zip(found, expected, strict=True):
        assert np.linalg.norm(a - b) <= 5e-6 * np.linalg.norm(b)


LAYOUTS = {
    "rows and heads": dict(rows=2, heads=4),
    "ring": dict(length=8),
    "ring with heads": dict(rows=2, heads=2, length=2),
    "more heads than keys have": dict(heads=4, length=2),
    "exchange": dict(length=4, method="all_to_all"),
    "exchange with heads": dict(rows=2, heads=2, length=2, method="all_to_all"),
    "groups": dict(length=8, method="usp", group=4),
    "groups with heads": dict(heads=2, length=4, method="usp", group=2),
    "gathered": dict(length=8, method="all_gather"),
    "gathered with heads": dict(rows=2, heads=2, length=2, method="all_gather"),
    "keys": dict(length=8, method="split_keys"),
    "keys with heads": dict(rows=2, heads=2, length=2, method="split_keys"),
}


# Every mask and every layout once or more; all pairs would take minutes.
PAIRS = [
    ("causal", "rows and heads"), ("window", "ring"), ("by head", "ring with heads"),
    ("far", "more heads than keys have"), ("three parts", "exchange with heads"),
    ("by head", "groups with heads"), ("far", "gathered"),
]  # fmt: skip
MORE = [
    ("causal", "ring"), ("causal", "exchange with heads"), ("both sides", "ring"),
    ("by head", "rows and heads"), ("by head", "exchange"), ("far", "ring with heads"),
    ("three parts", "more heads than keys have"), ("causal", "more heads than keys have"),
    ("far", "keys"), ("by head", "keys with heads"), ("window", "groups"), ("causal", "groups"),
    ("three parts", "groups with heads"), ("by head", "gathered with heads"),
    ("causal", "gathered"),
]  # fmt: skip
PAIRS += [pytest.param(*pair, marks=pytest.mark.slow) for pair in MORE]


@pytest.mark.parametrize(("name", "how"), PAIRS)
def test_any_layout_gives_the_results_of_one_device(name, how):
    run = functools.partial(flash, mask=MASKS[name], layout=layout(**LAYOUTS[how]))
    assert_agree(both(run, *inputs()), on_one_device(name))


METHODS = {
    "ring": {}, "usp": {"group": 2}, "all_to_all": {}, "all_gather": {}
}  # fmt: skip


@pytest.mark.slow_except("ring", "usp")
@pytest.mark.parametrize("method", METHODS)
def test_packed_rows_and_biases_are_cut_along_with_the_tokens(method):
    arrays, weights = inputs(1)
    segments = np.array([[1] * 19 + [2] * 20 + [0] * 9, [0] * 5 + [1] * 43], np.int32)
    index = np.array([np.r_[:19, :20, :9], np.r_[:5, :43]], np.int32)
    slopes = jnp.asarray(alibi_slopes(N))
    places = dict(q_index=index, k_index=index, q_segments=segments, k_segments=segments)

    def run(q, k, v, slopes, **options):
        return flash(q, k, v, causal(), bias=Alibi(slopes), **places, **options)

    dense = functools.partial(run, implementation="reference")
    wanted = both(dense, [*arrays, slopes], weights)
    over = layout(2, 1, 4, method, **METHODS[method])
    assert_agree(both(functools.partial(run, layout=over), [*arrays, slopes], weights), wanted)


@pytest.mark.slow_except("usp")
@pytest.mark.parametrize("method", METHODS)
def test_tokens_may_lie_in_zigzag_order(method):
    (q, k, v), weights = inputs(2)
    order = zigzag(T, 4)
    back = np.argsort(order)

    def run(q, k, v):
        q, k, v = (x[:, order] for x in (q, k, v))
        over = layout(2, 1, 4, method, **METHODS[method])
        out, lse = flash(q, k, v, causal(), q_index=order, k_index=order, layout=over)
        return out[:, back], lse[:, back]

    assert_agree(
        both(run, [q, k, v], weights), both(lambda *x: reference(*x, causal()), [q, k, v], weights)
    )


@pytest.mark.slow
def test_landmarks_over_a_mesh_equal_those_on_one_device():
    arrays, weights = inputs(3)
    run = functools.partial(landmark_attention, block=6)
    wanted = both(run, arrays, weights)
    assert_agree(both(functools.partial(run, layout=layout(2, 2, 2)), arrays, weights), wanted)


def test_every_device_does_half_of_the_causal_work_in_zigzag_order():
    order = zigzag(T, 4).reshape(4, -1)
    seen = [sum(int(q) + 1 for q in part) for part in order]
    assert len(set(seen)) == 1


def test_keys_travel_no_further_than_the_mask_sees():
    (q, k, _), _ = inputs()
    hops = functools.partial(_hops, q=q, k=k, operands=Operands(), count=8)
    assert hops(causal()) == 8
    assert hops(causal() & window(6)) == 2
    assert hops(causal() & window(1)) == 1
    assert hops(causal() & window(8)) == 3
    assert hops(causal() & prefix(2)) == 8
    assert hops(band(-7, 7)) == 8  # the keys of the next device come last


def test_what_cannot_be_cut_raises_value_error_with_the_way_out():
    arrays, _ = inputs(t=44)
    with pytest.raises(ValueError, match="44 queries cannot be split over the 8 devices.*48"):
        flash(*arrays, causal(), layout=layout(length=8))
    with pytest.raises(ValueError, match="choose one of ring, all_to_all, usp"):
        layout(method="star")
    arrays, _ = inputs(heads=4, kv_heads=2)
    with pytest.raises(ValueError, match="4 query heads.*8 devices.*use method 'ring'"):
        flash(*arrays, causal(), layout=layout(length=8, method="all_to_all"))
    with pytest.raises(ValueError, match="8 devices .* groups of 3"):
        flash(*inputs()[0], causal(), layout=layout(length=8, method="usp", group=3))
    with pytest.raises(ValueError, match="cannot be split into 2 x 8.*48"):
        zigzag(40, 8)
