"""Batches on devices ahead of their turn, and resuming on another number of processes."""

import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from data_support import Bytes, assert_same, make_texts, write_jsonl

from lcjax.checkpoint import Checkpoints
from lcjax.data import (
    ChatSource,
    DataConfig,
    DeviceLoader,
    Masking,
    Share,
    TextSource,
    Upsample,
    make_loader,
)
from lcjax.errors import InputError
from lcjax.sharding import AXES, Mesh, batch_sharding, make_mesh, process_rows


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


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_batches_lie_over_the_mesh_before_their_turn_and_states_do_not_run_ahead(ahead, folder):
    mesh = make_mesh(Mesh(data=2, fsdp=2, tensor=2))
    config = DataConfig(path=str(folder), length=32, repeat=1)
    plain = make_loader(config, Bytes(), 8)
    states, batches = [plain.get_state()], []
    for batch in plain:
        batches.append(batch)
        states.append(plain.get_state())
    loader = DeviceLoader(make_loader(config, Bytes(), 8), mesh, ahead=ahead)
    assert loader.get_state() == states[0]
    seen = []
    for number, arrays in enumerate(loader, start=1):
        assert loader.get_state() == states[number]
        assert all(array.sharding == batch_sharding(mesh) for array in arrays.values())
        assert_same([loader.local], [batches[number - 1]])
        seen.append(jax.device_get(arrays))
    assert_same(batches, seen)
    loader.set_state(states[3])
    assert_same(batches[3:], [jax.device_get(arrays) for arrays in loader])
    loader.close()
    with pytest.raises(ValueError, match="closed"):
        next(loader)
    with pytest.raises(InputError, match=r"ahead=-1 must be 0 or more"):
        DeviceLoader(plain, mesh, ahead=-1)
