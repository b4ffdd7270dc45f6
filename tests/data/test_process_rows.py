"""Which rows of a batch a process reads, and resuming on another number of processes."""

import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from data_support import Bytes, assert_same, make_texts, write_jsonl

from lcjax.checkpoints.orbax_io import Checkpoints
from lcjax.data import (
    ChatSource,
    DataConfig,
    Masking,
    Share,
    TextSource,
    Upsample,
    make_loader,
)
from lcjax.errors import InputError
from lcjax.parallel.sharding import AXES, Mesh, batch_sharding, make_mesh, process_rows


def mesh_of(shape, owners):
    """A mesh as seen by processes: `owners` names the process of each device, in mesh order.

    The axes that `shape` leaves out, the last ones, have size 1.
    """
    shape = (*shape, *(1,) * (len(AXES) - len(shape)))
    devices = [SimpleNamespace(process_index=owner) for owner in owners]
    grid = np.array(devices, object).reshape(shape)
    return SimpleNamespace(devices=grid, shape=dict(zip(AXES, shape, strict=True)))


@pytest.mark.parametrize(
    ("shape", "owners", "wanted"),
    [
        # data and fsdp over processes: each its own rows
        ((2, 2, 1), [0, 0, 1, 1], [[0, 1, 2, 3], [4, 5, 6, 7]]),
        # a tensor-parallel group over both processes: both need all rows
        ((1, 1, 4), [0, 0, 1, 1], [[*range(8)], [*range(8)]]),
        # two groups over two processes each: the processes of a group need equal rows
        ((2, 1, 4), [0, 0, 1, 1, 2, 2, 3, 3], [[0, 1, 2, 3]] * 2 + [[4, 5, 6, 7]] * 2),
        # a mesh that scatters the devices of a process over the rows
        ((2, 2, 1), [0, 1, 0, 1], [[0, 1, 4, 5], [2, 3, 6, 7]]),
    ],
)
def test_a_process_reads_the_rows_that_its_devices_hold(shape, owners, wanted, tmp_path):
    mesh = mesh_of(shape, owners)
    assert [process_rows(mesh, 8, process) for process in range(len(wanted))] == wanted
    config = DataConfig(path=write_jsonl(tmp_path / "a.jsonl", make_texts(20)), length=16, repeat=1)
    whole = list(make_loader(config, Bytes(), 8))
    for rows in wanted:
        for batch, own in zip(whole, make_loader(config, Bytes(), 8, rows=rows), strict=True):
            for key in batch:
                np.testing.assert_array_equal(own[key], batch[key][rows])


def test_rows_lie_where_the_batch_sharding_puts_them():
    mesh = make_mesh(Mesh(data=2, fsdp=2, tensor=2))
    places = batch_sharding(mesh).devices_indices_map((8,))
    for device, (place,) in places.items():
        alone = mesh_of((2, 2, 2), [int(other != device) for other in mesh.devices.flat])
        assert process_rows(alone, 8, process=0) == list(range(8))[place]
    assert process_rows(mesh, 8) == list(range(8))
    assert jax.process_count() == 1


def test_rows_that_do_not_fit_the_mesh_or_the_batch_raise_input_error(tmp_path):
    with pytest.raises(InputError, match=r"batch size 6 must be .* mesh.fsdp = 4; nearest: 8"):
        process_rows(mesh_of((2, 2, 1), [0, 0, 1, 1]), 6, 0)
    config = DataConfig(path=write_jsonl(tmp_path / "a.jsonl", make_texts(9)), length=8)
    for rows in ([], [0, 4], [-1]):
        with pytest.raises(InputError, match=r"must be a non-empty list of indices in 0 ... 3"):
            make_loader(config, Bytes(), 4, rows=rows)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for name in ("books", "web"):
        (folder / name).mkdir()
        for i in range(3):
            write_jsonl(folder / name / f"{i}.jsonl", make_texts(40, seed=len(name) + i))
    return folder


def mixture(folder):
    """Every kind of source and of random choice at once."""
    chosen = Upsample(
        tokens=800, ratio=0.5, below=15, shares=[Share("books", 0.5), Share("web", 0.5)]
    )
    sources = [
        TextSource(str(folder), 2.0, upsample=chosen),
        TextSource(str(folder / "web"), 1.0, pack="windows", stride=8),
        TextSource(str(folder / "books"), 1.0, pack="best_fit", stream=True),
        ChatSource(str(folder / "web"), prompt="{id}: ", answer="{text}"),
    ]
    return DataConfig(
        sources=sources, length=32, shuffle_rows=12, masking=Masking(), packing_bins=3
    )


def rows_of(processes, process, batch_size):
    """Rows of a process when the devices of 4 data-parallel places are dealt to `processes`."""
    devices = [SimpleNamespace(process_index=i * processes // 4) for i in range(4)]
    shape = (4, *(1,) * (len(AXES) - 1))
    grid = np.array(devices, object).reshape(shape)
    mesh = SimpleNamespace(devices=grid, shape=dict(zip(AXES, shape, strict=True)))
    return process_rows(mesh, batch_size, process)


def read(config, processes, count, state=None):
    """Global batches put together from all processes, and each one's state at the end."""
    parts, states = [], []
    for process in range(processes):
        loader = make_loader(config, Bytes(), 8, rows=rows_of(processes, process, 8))
        if state is not None:
            loader.set_state(state)
        parts.append([next(loader) for _ in range(count)])
        states.append(json.loads(json.dumps(loader.get_state())))
        loader.close()
    joined = [
        {key: np.concatenate([part[key] for part in batch]) for key in batch[0]}
        for batch in zip(*parts, strict=True)
    ]
    return joined, states


@pytest.mark.slow
def test_a_position_belongs_to_the_data_not_to_the_processes(folder):
    config = mixture(folder)
    whole, _ = read(config, 1, 12)
    positions = []
    for before in (1, 2, 4):
        first, states = read(config, before, 5)
        assert_same(whole[:5], first)
        positions += states
    assert all(position == positions[0] for position in positions)
    for after in (1, 2, 4):
        rest, _ = read(config, after, 7, positions[0])
        assert_same(whole[5:], rest)


def test_a_checkpoint_of_two_processes_resumes_in_four(folder, tmp_path):
    config = mixture(folder)
    whole, _ = read(config, 1, 8)
    _, states = read(config, 2, 4)
    state = {"step": jax.numpy.zeros(())}
    with Checkpoints(tmp_path / "run", keep=1) as checkpoints:
        checkpoints.save(4, state, states[0])
        checkpoints.wait()
    with Checkpoints(tmp_path / "run", keep=1) as checkpoints:
        _, _, position = checkpoints.restore(jax.eval_shape(lambda: state))
    rest, _ = read(config, 4, 4, position)
    assert_same(whole[4:], rest)
