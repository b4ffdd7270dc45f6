"""A training step over eight devices: the same numbers, and no device holds every row."""

import dataclasses
import functools
import math
import re
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lcjax.cost.chips import Topology
from lcjax.cost.compilers import devices
from lcjax.cost.program import collectives
from lcjax.errors import InputError
from lcjax.models import Decoder, preset
from lcjax.parallel import sharding
from lcjax.parallel.context import Heads, strategy
from lcjax.parallel.sharding import (
    Mesh,
    batch_sharding,
    device_mesh,
    make_mesh,
    mesh_sizes,
    param_shardings,
    slice_of,
    slices_along,
    spans_of_slices,
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
    assert math.prod(mesh_sizes(changed, devices).shape.values()) == devices


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


@pytest.fixture
def two_slices(monkeypatch):
    """Devices of even numbers are in one slice, and the others in a second one."""
    kind = type(jax.devices()[0])
    monkeypatch.setattr(kind, "slice_index", property(lambda device: device.id % 2), raising=False)


@pytest.mark.parametrize(
    ("shape", "spanning"),
    [
        (Mesh(data=2), "data"),
        (Mesh(data=4, fsdp=2), "data"),
        (Mesh(fsdp=8), "fsdp"),
        (Mesh(fsdp=1, tensor=2, context=4), "context"),
        (Mesh(data=2, tensor=2, slices=("tensor",)), "tensor"),
    ],
    ids=str,
)
def test_one_axis_spans_slices_and_each_of_its_parts_is_in_one(shape, spanning, two_slices):
    mesh = make_mesh(shape)
    assert sorted(device.id for device in mesh.devices.flat) == list(range(8))
    assert slices_along(mesh) == dict.fromkeys(mesh.axis_names, 1) | {spanning: 2}
    axis = mesh.axis_names.index(spanning)
    line = np.moveaxis(mesh.devices, axis, 0).reshape(mesh.shape[spanning], -1)
    each = [{device.id % 2 for device in part} for part in line]
    half = len(each) // 2
    assert each == [{0}] * half + [{1}] * half


@pytest.mark.parametrize(
    ("shape", "ways"),
    [
        (Mesh(fsdp=8), ["--mesh.data=2 --mesh.fsdp=-1", "--mesh.slices=[data,fsdp]"]),
        (Mesh(fsdp=1, context=8), ["--mesh.slices=[data,context]"]),
        (Mesh(fsdp=8, slices=("tensor",)), ["--mesh.slices=[tensor,fsdp]"]),
        (Mesh(3, 1), ["use one slice"]),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit_the_slices_are_named_with_what_does(shape, ways):
    names = " x ".join(f"mesh.{axis}" for axis in shape.slices or ["data"])
    with pytest.raises(InputError, match=f"^{names}=. cannot be split over the 2 slices") as error:
        spans_of_slices(shape, 2, tpu=True)
    assert all(way in str(error.value) for way in ways) and "\n" not in str(error.value)
    for way in re.findall(r"--mesh.slices=\[(.*?)\]", str(error.value)):
        changed = dataclasses.replace(shape, slices=tuple(way.split(",")))
        assert math.prod(spans_of_slices(changed, 2, tpu=True).values()) == 2


def test_an_axis_that_may_span_slices_is_one_of_the_mesh():
    with pytest.raises(InputError, match=r"mesh.slices.1='model' must be one of data, fsdp"):
        Mesh(slices=("data", "model"))


def test_loss_and_gradients_of_two_slices_are_those_of_one_device(params, batch, two_slices):
    want = _alone(CONFIG)(params, batch)
    step, *arguments = _sharded(make_mesh(Mesh(data=2)), params, batch)
    got = step(*arguments)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6), got, want)


@pytest.mark.skipif(find_spec("libtpu") is None, reason="pip install -e '.[aot]'")
@pytest.mark.parametrize(
    ("name", "shape", "spanning"),
    [
        ("v5p:2x2x1*2", Mesh(data=2, context=4), "data"),
        ("v5e:2x4*4", Mesh(data=4, fsdp=2, context=4), "data"),
        ("v5e:2x2*2", Mesh(slices=("fsdp",)), "fsdp"),
    ],
)
def test_real_slices_are_contiguous_along_the_axis_that_spans_them(name, shape, spanning):
    topology = Topology.parse(name)
    mesh = make_mesh(shape, devices(topology))
    assert mesh.size == topology.devices
    assert slices_along(mesh) == dict.fromkeys(mesh.axis_names, 1) | {spanning: topology.slices}
    slices = np.vectorize(slice_of)(mesh.devices).reshape(topology.slices, -1)
    assert (slices == np.arange(topology.slices)[:, None]).all()


def test_devices_that_share_a_text_know_their_neighbours(two_slices):
    heads = Heads(queries=8, keys=8, size=16)
    near = strategy("auto", make_mesh(Mesh(fsdp=1, context=8)), heads, 64)
    assert (near.method, near.group) == ("usp", 4)
    assert near == strategy("auto", Mesh(fsdp=1, context=8), heads, 64, near=4)
    inside = strategy("auto", make_mesh(Mesh(data=2, fsdp=1, context=4)), heads, 64)
    assert inside.method == "all_to_all"


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


@pytest.mark.slow_except("Mesh(data=2, fsdp=2, tensor=2, context=1, expert=1, slices=())")
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
