"""CLEX: the published layer's arrays, its start as NTK, its gradients and limits."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rope_golden import arrays, clex_cases, cos_sin_tolerance, make_rope

from lcjax.checkpoints.hf_names import entries
from lcjax.checkpoints.weights import TensorInfo, read_params
from lcjax.errors import InputError
from lcjax.models import preset
from lcjax.rope import NTK, Clex, rotate

turn = jax.jit(rotate)
SMALL = Clex(theta=1e4, original_length=64, max_factor=4, time_dt=0.1)


init = jax.jit(Clex.init, static_argnums=(0, 2))


def learned(case):
    names = ("up", "down", "inv_freq")
    return {name: (arrays()[f"{case['id']}/{name}"]) for name in names}


@pytest.mark.parametrize("case", clex_cases(), ids=lambda case: case["id"])
def test_the_table_equals_the_published_layer(case):
    table = np.asarray(make_rope(case).table(learned(case)))
    np.testing.assert_allclose(table, arrays()[f"{case['id']}/freq_table"], rtol=1e-4)
    # nearer to the exact solution than the published float32 code is
    np.testing.assert_allclose(table, arrays()[f"{case['id']}/freq_table64"], rtol=5e-6)


@pytest.mark.parametrize("case", clex_cases(), ids=lambda case: case["id"])
def test_a_request_takes_the_row_of_its_length_factor(case):
    rope, params = make_rope(case), learned(case)
    table = arrays()[f"{case['id']}/freq_table"]
    for item in case["eval"]:
        assert rope.length_factor(item["seq_len"]) == item["t"]
        inv_freq, scale = rope.frequencies(case["head_dim"], item["seq_len"], params)
        np.testing.assert_allclose(inv_freq, table[item["t"] - 1], rtol=1e-4)
        assert scale == 1.0
    stored = np.asarray(params["inv_freq"])
    np.testing.assert_array_equal(rope.frequencies(case["head_dim"], 4096, params)[0], stored)


@pytest.mark.parametrize("case", clex_cases(), ids=lambda case: case["id"])
def test_rotation_with_the_published_row_gives_the_published_cos_and_sin(case):
    half = case["head_dim"] // 2
    for item in case["eval"]:
        row = arrays()[f"{case['id']}/freq_table"][item["t"] - 1]
        positions = np.asarray(item["positions"])
        unit = np.repeat([1, 0], half).astype(np.float32)
        x = np.broadcast_to(unit, (1, len(positions), 1, 2 * half))
        out = np.asarray(turn(x, positions[None], row))[0, :, 0]
        tolerance = cos_sin_tolerance(1.0, positions, row)
        for name, ours in (("cos", out[:, :half]), ("sin", out[:, half:])):
            reference = arrays()[f"{case['id']}/s{item['seq_len']}/{name}"]
            assert (np.abs(ours - reference) <= tolerance).all()


def test_untrained_clex_is_ntk_of_strength_2t_minus_1():
    rope = dataclasses.replace(SMALL, max_factor=32)
    params = init(rope, jax.random.key(0), 64)
    table = rope.table(params)
    for t in (1, 2, 8, 32):
        ntk, _ = NTK(theta=1e4, alpha=2.0 * t - 1).frequencies(64, 1)
        np.testing.assert_allclose(table[t - 1], ntk, rtol=1e-6)


def published_solution(params, theta, t_end, steps, act):
    """The published equation as it is written, float64, by the classic Runge-Kutta rule."""
    up, down = (np.asarray(params[name], np.float64) for name in ("up", "down"))
    d = 2 * up.shape[0]
    index = np.arange(0, d, 2)

    def slope(t, z):
        alpha = 2 * t - 1
        xi = 10000.0 ** (-index / d) * alpha ** (-index / (d - 2))
        return act((z + np.log(xi)) @ up) @ down - 2 * index / ((d - 2) * alpha)

    z, h = np.log(theta ** (-index / d)), (t_end - 1) / steps
    for t in 1 + h * np.arange(steps):
        k1 = slope(t, z)
        k2 = slope(t + h / 2, z + h * k1 / 2)
        k3 = slope(t + h / 2, z + h * k2 / 2)
        k4 = slope(t + h, z + h * k3)
        z = z + h * (k1 + 2 * k2 + 2 * k3 + k4) / 6
    return np.exp(z)


@pytest.mark.parametrize("act", ["silu", "tanh"])
def test_theta_sets_the_start_while_the_network_keeps_base_10000(act):
    rope = dataclasses.replace(SMALL, theta=5e5, act=act, time_dt=0.05)
    params = random_params(rope, 32)
    function = {"silu": lambda x: x / (1 + np.exp(-x)), "tanh": np.tanh}[act]
    exact = published_solution(params, 5e5, 4.0, 300, function)
    np.testing.assert_allclose(rope.table(params)[3], exact, rtol=1e-5)
    untrained = init(rope, jax.random.key(0), 32)
    assert np.abs(np.log(exact / rope.table(untrained)[3])).max() > 0.05, "the network matters"


def random_params(rope, head_dim, seed=0):
    params = init(rope, jax.random.key(seed), head_dim)
    down = 0.05 * np.random.default_rng(seed).standard_normal(params["down"].shape)
    return {**params, "down": down.astype(np.float32)}


def test_a_traced_factor_gives_the_rows_of_the_table():
    params = random_params(SMALL, 32)
    table = SMALL.table(params)
    rows = jax.jit(jax.vmap(lambda t: SMALL.frequencies_at(params, t)))(np.arange(1.0, 5.0))
    np.testing.assert_allclose(rows, table, rtol=1e-5)


def test_a_step_that_divides_no_unit_still_meets_whole_factors():
    params = random_params(SMALL, 32)
    uneven = dataclasses.replace(SMALL, time_dt=0.0625 * 1.1)
    np.testing.assert_allclose(uneven.table(params), SMALL.table(params), rtol=2e-2)
    at = np.stack([uneven.frequencies_at(params, np.float32(t)) for t in (2, 3, 4)])
    np.testing.assert_allclose(at, SMALL.table(params)[1:], rtol=1e-4)


def test_the_largest_factor_may_be_1_or_2():
    for largest in (1, 2):
        rope = dataclasses.replace(SMALL, max_factor=largest)
        params = random_params(rope, 32)
        table = rope.table(params)
        assert table.shape == (largest, 16)
        np.testing.assert_allclose(table, SMALL.table(params)[:largest], rtol=1e-5)


def test_gradients_reach_both_projections_and_agree_with_differences():
    params = random_params(SMALL, 16)

    @jax.jit
    def loss(params):
        return jnp.sum(jnp.log(SMALL.frequencies_at(params, jnp.float32(3.0))))

    grads = jax.jit(jax.grad(loss))(params)
    assert not np.any(grads["inv_freq"]), "a buffer"
    for name in ("up", "down"):
        direction = np.random.default_rng(7).standard_normal(params[name].shape)
        slope = np.vdot(grads[name], direction)
        moved = [
            float(loss({**params, name: np.float32(params[name] + sign * 1e-2 * direction)}))
            for sign in (1, -1)
        ]
        assert slope == pytest.approx((moved[0] - moved[1]) / 2e-2, rel=2e-2)
        assert abs(slope) > 1e-3


def test_untrained_gradients_start_at_the_second_projection():
    params = init(SMALL, jax.random.key(0), 16)
    grads = jax.jit(jax.grad(lambda p: jnp.sum(SMALL.frequencies_at(p, jnp.float32(2.0)))))(params)
    assert np.abs(grads["down"]).max() > 0
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))


def test_log_scaling_multiplies_queries_only():
    rope = dataclasses.replace(SMALL, log_scale=True)
    params = init(rope, jax.random.key(0), 16)
    rotation = rope.rotation(16, 128, params)
    assert rotation.scale == 1.0
    assert rotation.query_scale == pytest.approx(math.log(128) / math.log(64))
    assert rope.rotation(16, 32, params).query_scale == pytest.approx(5 / 6)
    assert SMALL.rotation(16, 128, params).query_scale == 1.0


def test_initial_arrays_have_the_published_shapes_and_bounds():
    rope = dataclasses.replace(SMALL, param_factor=2)
    params = init(rope, jax.random.key(0), 32)
    assert params["up"].shape == (16, 64)
    assert params["down"].shape == (64, 16)
    assert not params["down"].any()
    assert 0.9 / 8 < np.abs(params["up"]).max() <= 1 / 8


class Published:
    """A checkpoint in memory, in bfloat16, with the names of the authors' files."""

    path = "published"

    def __init__(self, arrays):
        self._arrays = {name: np.asarray(a).astype(jnp.bfloat16) for name, a in arrays}
        self.tensors = {n: TensorInfo(a.shape, a.dtype.name) for n, a in self._arrays.items()}

    def rows(self, name, start, stop):
        return self._arrays[name][start:stop]


def test_published_arrays_are_read_under_our_names_in_float32():
    case = clex_cases()[0]
    params, head_dim = learned(case), case["head_dim"]
    config = preset("tiny").replace(head_dim=head_dim, rope=make_rope(case), num_layers=1)
    plain = [e for e in entries(config) if not e.path.startswith("rope/")]
    arrays = [(name, np.zeros(e.tensor_shape)) for e in plain for name in e.names]
    published = {
        "model.clex_layer.proj_func.ode_up_proj": params["up"],
        "model.clex_layer.proj_func.ode_down_proj": params["down"],
        "model.clex_layer.inv_freq": params["inv_freq"],
    }
    loaded = read_params(Published([*arrays, *published.items()]), config)["rope"]
    for name in params:
        assert loaded[name].dtype == jnp.float32
        np.testing.assert_array_equal(loaded[name], half_precision(params[name]))
    del published["model.clex_layer.inv_freq"]
    with pytest.raises(InputError, match=r"missing: model\.clex_layer\.inv_freq"):
        read_params(Published([*arrays, *published.items()]), config)


def half_precision(array):
    return array.astype(jnp.bfloat16).astype(jnp.float32)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda p: SMALL.frequencies(16, 257, p), r"length=257 must be at most 256: .*max_factor"),
        (lambda p: SMALL.frequencies(16, 64), r"needs its learned arrays up, down, inv_freq"),
        (
            lambda p: dataclasses.replace(SMALL, param_factor=3).frequencies(16, 64, p),
            r"rope\.up has shape \(8, 16\) but must have \(8, 48\).*param_factor=3",
        ),
        (lambda p: SMALL.frequencies(2, 64, p), r"rotary channels=2 must be at least 4"),
    ],
)
def test_limits_are_errors_that_name_the_way_out(call, message):
    params = init(SMALL, jax.random.key(0), 16)
    with pytest.raises(InputError, match=message) as error:
        call(params)
    assert "\n" not in str(error.value)
