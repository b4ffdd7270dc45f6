"""Which rows of a batch a process reads, for meshes over several processes."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from data_support import Bytes, make_texts, write_jsonl

from lcjax.data import DataConfig, make_loader
from lcjax.errors import InputError
from lcjax.sharding import AXES, Mesh, batch_sharding, make_mesh, process_rows


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


def test_rows_that_do_not_fit_the_mesh_or_the_batch_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"batch size 6 must be .* mesh.fsdp = 4; nearest: 8"):
        process_rows(mesh_of((2, 2, 1), [0, 0, 1, 1]), 6, 0)
    config = DataConfig(path=write_jsonl(tmp_path / "a.jsonl", make_texts(9)), length=8)
    for rows in ([], [0, 4], [-1]):
        with pytest.raises(InputError, match=r"must be some of 0 ... 3, the rows of a batch"):
            make_loader(config, Bytes(), 4, rows=rows)
