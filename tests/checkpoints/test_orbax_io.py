"""Checkpoints survive kills, full disks, damage and a change of mesh."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from storage_support import memory

from lcjax.checkpoints import orbax_io
from lcjax.checkpoints.orbax_io import CheckpointError, Checkpoints, load_state
from lcjax.parallel.sharding import Mesh, make_mesh, param_shardings

ROOT = Path(__file__).parents[2]
# orbax drops its other readers unfinished when one of them meets a damaged file.
pytestmark = [
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(orbax_io, "_PAUSE", 0)


def make_state(value, mesh=None):
    mesh = mesh or make_mesh(Mesh(fsdp=1), jax.devices()[:1])
    kernel = jnp.full((64, 2048), value) + jnp.arange(2048.0)
    state = {"params": {"up": {"kernel": kernel}}, "rng": jax.random.key(value), "step": value}
    state["step"] = jnp.int32(value)
    return jax.device_put(state, param_shardings(mesh, state))


def abstract(state):
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
    )


def position_of(step):
    return {"identity": {"file": "a"}, "position": {"next": step}}


def save(folder, *steps, keep=3):
    with Checkpoints(folder, keep=keep) as checkpoints:
        for step in steps:
            checkpoints.save(step, make_state(step), position_of(step))


def assert_is(state, value):
    np.testing.assert_array_equal(state["params"]["up"]["kernel"][3], value + np.arange(2048.0))
    assert int(state["step"]) == value
    assert (jax.random.key_data(state["rng"]) == jax.random.key_data(jax.random.key(value))).all()


def test_a_new_folder_has_no_checkpoint(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.restore(abstract(make_state(0))) is None


def test_a_large_array_that_two_devices_hold_comes_back(tmp_path):
    # Each of the devices writes its half, as it does not of small arrays.
    two, one = (make_mesh(Mesh(data=n, fsdp=1), jax.devices()[:n]) for n in (2, 1))
    size = 2 * orbax_io._ARRAY_OPTIONS.saving.min_slice_bytes_for_replica_parallel // 4
    expected = np.random.default_rng(0).random((2, size // 2), np.float32)
    state = {"kernel": jax.device_put(expected, jax.NamedSharding(two, jax.P()))}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, position_of(1))
        checkpoints.wait()
        sharding = jax.NamedSharding(one, jax.P())
        like = {"kernel": jax.ShapeDtypeStruct(expected.shape, expected.dtype, sharding=sharding)}
        _, restored, _ = checkpoints.restore(like)
    np.testing.assert_array_equal(restored["kernel"], expected)


def test_state_key_and_data_position_come_back_and_old_ones_go(tmp_path):
    save(tmp_path, 1, 2, 3, keep=2)
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.steps == [2, 3]
        step, state, position = checkpoints.restore(abstract(make_state(0)))
    assert step == 3 and position == position_of(3)
    assert_is(state, 3)


def test_a_state_saved_on_one_mesh_is_restored_onto_another(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(5, make_state(5, make_mesh(Mesh(1, 4, 2))), position_of(5))
    other = make_state(0, make_mesh(Mesh(2, 2, 2)))
    with Checkpoints(tmp_path) as checkpoints:
        state = checkpoints.restore(abstract(other))[1]
    kernel = state["params"]["up"]["kernel"]
    assert kernel.sharding == other["params"]["up"]["kernel"].sharding
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(32, 1024)}
    assert_is(state, 5)


def test_loading_reads_only_the_named_leaves(tmp_path):
    save(tmp_path, 1, 2)
    wanted = {"params": abstract(make_state(0))["params"]}
    assert load_state(tmp_path, wanted).keys() == {"params"}
    found = load_state(tmp_path, wanted, step=1)["params"]["up"]["kernel"]
    assert found[0, 0] == 1


def test_leaves_saved_in_16_bits_are_restored_as_wide_as_is_asked(tmp_path):
    state = make_state(1)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state["params"])
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state | {"params": half}, position_of(1))
    found = load_state(tmp_path, abstract(state))["params"]["up"]["kernel"]
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, half["up"]["kernel"].astype(jnp.float32))


def biggest_file(folder):
    return max((f for f in folder.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)


DAMAGE = {
    "cut_array": lambda f: os.truncate(biggest_file(f / "state"), 1000),
    "cut_manifest": lambda f: os.truncate(f / "state" / "manifest.ocdbt", 5),
    "no_manifest": lambda f: (f / "state" / "manifest.ocdbt").unlink(),
    "empty_files": lambda f: [os.truncate(p, 0) for p in f.rglob("*") if p.is_file()],
    "no_files": lambda f: [shutil.rmtree(p) for p in f.iterdir() if p.is_dir()],
    "cut_position": lambda f: os.truncate(f / "data" / "position.json", 4),
    "no_position": lambda f: (f / "data" / "position.json").unlink(),
}
MORE_DAMAGE = "cut_manifest", "empty_files", "no_manifest"


@pytest.mark.parametrize(
    "damage",
    [pytest.param(name, marks=pytest.mark.slow if name in MORE_DAMAGE else ()) for name in DAMAGE],
)
def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(tmp_path, damage):
    save(tmp_path, 1, 2)
    DAMAGE[damage](tmp_path / "checkpoints" / "2")
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.warns(UserWarning, match=r"checkpoints/2 is damaged .*moved to 2.damaged"):
            step, state, position = checkpoints.restore(abstract(make_state(0)))
        assert step == 1 and position == position_of(1)
        assert_is(state, 1)
        checkpoints.save(2, make_state(2), position_of(2))  # its place is free again
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.restore(abstract(make_state(0)))[0] == 2


def files_of(checkpoint):
    return sorted(file for file in checkpoint.rglob("*") if file.is_file())


def test_a_flipped_bit_in_any_file_falls_back_and_names_the_file(tmp_path):
    save(tmp_path, 1, 2)
    names = [file.relative_to(tmp_path) for file in files_of(tmp_path / "checkpoints" / "2")]
    assert len(names) > 8
    random = np.random.default_rng(0)
    for number, name in enumerate(names):
        copy = shutil.copytree(tmp_path, tmp_path.with_name(f"{tmp_path.name}_{number}")) / name
        data = bytearray(copy.read_bytes())
        data[random.integers(len(data))] ^= 1 << random.integers(7)
        copy.write_bytes(data)
        named = "" if copy.name.startswith("checksums") else str(Path(*name.parts[2:]))
        with pytest.warns(UserWarning, match=rf"2 is damaged \(.*{named}"):
            assert_is(load_state(copy.parents[len(name.parts) - 1], abstract(make_state(0))), 1)


def without_checksums(checkpoint):
    (checkpoint / "checksums.0").unlink()  # as of older versions, or killed just before them


def test_a_checkpoint_without_checksums_is_restored(tmp_path):
    save(tmp_path, 1)
    without_checksums(tmp_path / "checkpoints" / "1")
    with Checkpoints(tmp_path) as checkpoints:
        assert_is(checkpoints.restore(abstract(make_state(0)))[1], 1)


@pytest.mark.parametrize(
    "text",
    ["{}", "[]", '{"identity": {}, "position": 3}', '{"identity": {}, "position": {}, '
    '"last_finite": "2"}'],
)  # fmt: skip
def test_what_is_no_position_falls_back_also_without_checksums(tmp_path, text):
    save(tmp_path, 1, 2)
    without_checksums(tmp_path / "checkpoints" / "2")
    (tmp_path / "checkpoints/2/data/position.json").write_text(text)
    warning = r"2 is damaged \(data/position.json"
    with Checkpoints(tmp_path) as checkpoints, pytest.warns(UserWarning, match=warning):
        assert checkpoints.restore(abstract(make_state(0)))[0] == 1


def test_the_checksums_are_those_of_sha256sum(tmp_path):
    save(tmp_path, 1)
    command = ["sha256sum", "--check", "--strict", "checksums.0"]
    checked = subprocess.run(command, cwd=tmp_path / "checkpoints/1", capture_output=True)
    assert checked.returncode == 0, checked.stderr
    assert len(checked.stdout.splitlines()) == len(files_of(tmp_path / "checkpoints/1")) - 1


def test_the_newest_checkpoint_from_which_a_step_was_finite_is_kept_beside_the_newest(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step, last_finite in ((1, None), (2, 1), (3, 2), (4, 2), (5, 2)):
            checkpoints.last_finite = last_finite
            checkpoints.save(step, make_state(step), position_of(step))
        checkpoints.wait()
        assert checkpoints.steps == [2, 4, 5] and checkpoints.finite_step == 2
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.restore(abstract(make_state(0)))
        assert checkpoints.last_finite == 2
        checkpoints.save(6, make_state(6), position_of(6))
        checkpoints.last_finite = 6
        checkpoints.save(7, make_state(7), position_of(7))
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["6", "7"]


def test_what_a_killed_process_has_deleted_in_part_is_deleted(tmp_path):
    save(tmp_path, 4, 8, 12)
    save(tmp_path / "other", 4, 8, 12, keep=2)
    (tmp_path / "checkpoints/4/state/_METADATA").unlink()  # before `keep=2` had deleted all of it
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        step, state, _ = checkpoints.restore(abstract(make_state(0)))
        assert step == 12 and checkpoints.steps == [8, 12]
    assert_is(state, 12)
    folders = [
        sorted(path.name for path in (folder / "checkpoints").iterdir())
        for folder in (tmp_path, tmp_path / "other")
    ]
    assert folders[0] == folders[1]


def test_loading_for_inference_falls_back_too_and_moves_nothing(tmp_path):
    save(tmp_path, 1, 2)
    DAMAGE["cut_array"](tmp_path / "checkpoints" / "2")
    with pytest.warns(UserWarning, match="is damaged"):
        assert_is(load_state(tmp_path, abstract(make_state(0))), 1)
    assert (tmp_path / "checkpoints" / "2").exists()


def test_a_store_that_does_not_answer_is_no_damage(monkeypatch):
    class HttpError(Exception):
        """As that of gcsfs, it is no OSError."""

    def get_file(store, path, file, **options):
        if "/checkpoints/2/" in path:
            raise HttpError("Service Unavailable, 503")
        return before(store, path, file, **options)

    folder = memory("runs") / "run"
    save(folder, 1, 2)
    files = folder.files()
    before = type(folder.fs).get_file
    monkeypatch.setattr(type(folder.fs), "get_file", get_file)
    match = r"checkpoints/2 cannot be read now .*503.*nothing was changed"
    with Checkpoints(folder) as checkpoints, pytest.raises(CheckpointError, match=match):
        checkpoints.restore(abstract(make_state(0)))
    with pytest.raises(CheckpointError, match=match):
        load_state(folder, abstract(make_state(0)))
    assert folder.files() == files


def test_no_readable_checkpoint_is_an_error_that_lists_them(tmp_path):
    save(tmp_path, 1, 2)
    for step in (1, 2):
        DAMAGE["no_files"](tmp_path / "checkpoints" / str(step))
    with (
        Checkpoints(tmp_path) as checkpoints,
        pytest.raises(CheckpointError, match=r"none of the checkpoints \[1, 2\]"),
    ):
        checkpoints.restore(abstract(make_state(0)))
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["1", "2"]  # still there to look at


KILLED = """
import asyncio, os, signal, sys
import conftest
from lcjax.checkpoints import orbax_io as checkpoint
from test_orbax_io import make_state, save

save(sys.argv[1], 1)

class Killing(checkpoint._Position):
    async def save(self, directory):
        async def write():
            folder = await directory.await_creation()
            (folder / self._file).write_text('{"ne')
            await asyncio.sleep(float(sys.argv[2]))  # while the arrays are being written
            os.kill(os.getpid(), signal.SIGKILL)
        return write()

checkpoint._Position = Killing
save(sys.argv[1], 2)
"""


@pytest.mark.parametrize("seconds", [0.0, pytest.param(0.3, marks=pytest.mark.slow)])
def test_kill_9_in_the_middle_of_a_save_leaves_the_last_good_checkpoint(tmp_path, seconds):
    paths = ROOT, ROOT / "tests", ROOT / "tests/checkpoints"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(seconds)]
    killed = subprocess.run(command, env=env, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    left = sorted(os.listdir(tmp_path / "checkpoints"))
    assert left[0] == "1" and len(left) == 2 and left[1].startswith("2.")  # an unfinished one
    with Checkpoints(tmp_path) as checkpoints:
        step, state, _ = checkpoints.restore(abstract(make_state(0)))
    assert step == 1
    assert_is(state, 1)
    deadline = time.monotonic() + 30  # what is unfinished is deleted beside the work
    while (left := os.listdir(tmp_path / "checkpoints")) != ["1"] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == ["1"]


def test_a_full_disk_keeps_the_last_checkpoint_and_says_what_to_do(tmp_path, caplog):
    """A limit on file sizes fails writes as a full disk does."""
    save(tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    random = np.random.default_rng(0).random((64, 2048), np.float32)  # zstd cannot shrink it
    big = make_state(2) | {"params": {"up": {"kernel": jnp.asarray(random)}}}
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with (
            pytest.raises(CheckpointError, match=r"could not be written.*step 1 is complete"),
            Checkpoints(tmp_path) as checkpoints,
        ):
            checkpoints.save(2, big, position_of(2))
            checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not caplog.records  # one line, no stacks of background threads
    with Checkpoints(tmp_path) as checkpoints:
        step, state, _ = checkpoints.restore(abstract(make_state(0)))
    assert step == 1
    assert_is(state, 1)
