"""A training step over eight devices: the same numbers, and no device holds every row."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lcjax.cost.program import collectives
from lcjax.errors import InputError
from lcjax.models import Decoder, preset
from lcjax.parallel import sharding
from lcjax.parallel.sharding import (
    Mesh,
    batch_sharding,
    device_mesh,
    make_mesh,
    mesh_sizes,
    param_shardings,
)
from lcjax.rope.positions import PlainPositions
from lcjax.training.objective import language_model

ROWS, LENGTH = 8, 24
CONFIG = preset("tiny").replace(vocab_size=256, width=64, mlp_width=96)
MESHES = [Mesh(8, 1, 1), Mesh(1, 8, 1), Mesh(2, 2, 2)]


@pytest.fixture(scope="module")
def params():
    init = jax.jit(Decoder(CONFIG).init)
    return init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]


@pytest.fixture(scope="module")
def batch():
    tokens = np.random.default_rng(0).integers(0, 256, (ROWS, LENGTH)).astype(np.int32)
    return {
        "tokens": tokens,
        "targets": np.roll(tokens, -1, 1),
        "segments": np.ones_like(tokens),
        "positions": np.broadcast_to(np.arange(LENGTH, dtype=np.int32), tokens.shape),
        "weights": np.ones(tokens.shape, np.float32),
    }


def _step(mesh, config=CONFIG, **settings):
    """Loss and gradients of the sum over all rows."""
    objective = language_model(config, PlainPositions(), mesh=mesh, **settings)

    def loss(params, batch):
        return objective(params, {}, batch, jax.random.key(0))[0] / (ROWS * LENGTH)

    return jax.value_and_grad(loss)


@functools.cache
def _alone(config):
    return jax.jit(_step(None, config))


def _sharded(mesh, params, batch, config=CONFIG, **settings):
    layout = param_shardings(mesh, params)
    step = _step(mesh, config, **settings)
    step = jax.jit(step, out_shardings=(None, layout))
    return step, jax.device_put(params, layout), jax.device_put(batch, batch_sharding(mesh))


def _collectives(text):
    """(operation, sizes of its results) of every collective in a compiled program."""
    found = []
    names = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    for result, name in re.findall(rf"= (.*?) ({names})(?:-start)?\(", text):
        shapes = re.findall(r"\w+\[([\d,]*)\]", result)
        found.append((name, [tuple(int(n) for n in shape.split(",") if n) for shape in shapes]))
    return found


@pytest.mark.parametrize(
    ("shape", "devices", "said"),
    [
        (Mesh(context=4), 1, "^mesh.context=4 must divide .* 1; set --mesh.context=1$"),
        (Mesh(tensor=2, context=3), 8, "mesh.tensor=2 x mesh.context=3 = 6 .* --mesh.context=1$"),
        (Mesh(fsdp=3), 8, "^mesh.fsdp=3 must equal .* 8; set --mesh.fsdp=-1$"),
        (Mesh(2, 2, 3), 8, "set --mesh.fsdp=-1 --mesh.tensor=1$"),
        (Mesh(1, 1), 8, "set --mesh.fsdp=-1$"),
    ],
)
def test_sizes_that_do_not_fit_the_devices_are_named_with_what_does(shape, devices, said):
    with pytest.raises(InputError, match=said) as error:
        mesh_sizes(shape, devices)
    ways = dict(re.findall(r"--mesh\.(\w+)=(-?\d+)", str(error.value)))
    changed = dataclasses.replace(shape, **{axis: int(size) for axis, size in ways.items()})
    assert math.prod(dataclasses.astuple(mesh_sizes(changed, devices))) == devices


def test_meshes_of_users_get_all_axes_and_the_type_auto():
    devices = np.array(jax.devices()[:8])
    mesh = device_mesh(jax.make_mesh((2, 4), ("tensor", "fsdp")))  # of type Explicit
    assert mesh.shape == {"data": 1, "fsdp": 4, "tensor": 2, "context": 1, "expert": 1}
    assert mesh.axis_types == (jax.sharding.AxisType.Auto,) * 5
    mesh = device_mesh(jax.sharding.Mesh(devices.reshape(2, 4), ("tensor", "fsdp")))
    assert (mesh.devices[0, :, :, 0, 0] == devices.reshape(2, 4).T).all()
    assert device_mesh(mesh) is mesh and device_mesh(None) is None
    for names in (("x", "y"), ("data", "model")):
        with pytest.raises(InputError, match=rf"mesh: the axis {names[-1]}|axis x .* is none of"):
            device_mesh(jax.make_mesh((2, 4), names))
    for value in ("data", list(devices), jax.sharding.AbstractMesh((8,), ("data",)), 8):
        with pytest.raises(InputError, match="must be an lcjax.Mesh"):
            device_mesh(value)


def test_a_decoder_on_an_explicit_mesh_computes_what_it_does_on_one_device(params):
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"))
    tokens = (jnp.arange(16) + jnp.arange(4)[:, None]) % 256
    one, many = Decoder(CONFIG), Decoder(CONFIG, mesh)
    expected = jax.jit(lambda p, x: one.apply({"params": p}, x).hidden)(params, tokens)
    sharded = jax.device_put(params, param_shardings(mesh, params))
    hidden = jax.jit(lambda p, x: many.apply({"params": p}, x).hidden)(sharded, tokens)
    np.testing.assert_allclose(hidden, expected, atol=2e-5)


def test_a_mesh_may_be_given_with_or_without_its_devices():
    shape = Mesh(data=2, fsdp=2, tensor=2)
    mesh = device_mesh(shape)
    assert shape.shape == dict(mesh.shape) and list(shape.shape) == list(mesh.shape)
    assert mesh == make_mesh(shape) and device_mesh(mesh) is mesh and device_mesh(None) is None
    with pytest.raises(InputError, match=r"^mesh=8 must be an lcjax.Mesh or a jax.sharding.Mesh$"):
        device_mesh(8)
    sizes = "'data': 1, 'fsdp': -1, 'tensor': 4, 'context': 1, 'expert': 1"
    with pytest.raises(InputError, match=f"^mesh={{{sizes}}}: write how many devices .*, not -1$"):
        _ = Mesh(tensor=4).shape


@pytest.mark.slow_except("Mesh(data=2, fsdp=2, tensor=2, context=1, expert=1)")
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_loss_and_gradients_on_a_mesh_are_those_of_one_device(shape, params, batch):
    want = _alone(CONFIG)(params, batch)
    step, *arguments = _sharded(make_mesh(shape), params, batch)
    got = step(*arguments)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6), got, want)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shape", [Mesh(1, 2, 1, 4), Mesh(1, 8), Mesh(2, 2, 2, 1)], ids=str)
def test_gradients_that_are_added_up_part_by_part_are_those_of_one_device(
    shape, tied, params, batch, monkeypatch
):
    monkeypatch.setattr(sharding, "_HIDDEN", 1)
    config = CONFIG.replace(tie_embeddings=tied)
    params = {name: child for name, child in params.items() if not tied or name != "head"}
    want = _alone(config)(params, batch)
    step, *arguments = _sharded(make_mesh(shape), params, batch, config)
    got = step(*arguments)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6), got, want)
    found = collectives(step.lower(*arguments).compile().as_text())
    assert {"reduce-scatter", "all-to-all"} <= set(found)
    if shape.data == shape.tensor == 1:  # elsewhere parts are summed, and activations
        # No matrix of weights is summed as a whole, the embedding and the head included.
        smallest = CONFIG.width * CONFIG.num_kv_heads * CONFIG.head_dim
        assert found["all-reduce"].bytes < 4 * smallest


def test_few_devices_leave_the_sums_to_the_compiler():
    asked = "layers/mlp/up/kernel", (2, 64, 96), ROWS, LENGTH
    assert sharding.gradient_reduce_scatter(make_mesh(Mesh(1, 8)), *asked) is None
    assert sharding.gradient_reduce_scatter(None, *asked) is None


@pytest.mark.slow
def test_no_collective_moves_the_hidden_states_of_all_rows(params, batch):
    step, *arguments = _sharded(make_mesh(Mesh(1, 8, 1)), params, batch)
    sent = _collectives(step.lower(*arguments).compile().as_text())
    assert {name for name, _ in sent} >= {"all-gather", "all-reduce"}
    hidden = ROWS * LENGTH * CONFIG.width
    everyone = [
        (name, shape)
        for name, shapes in sent
        for shape in shapes
        if math.prod(shape) % hidden == 0 and LENGTH in shape
    ]
    assert not everyone
