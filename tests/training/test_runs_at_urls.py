"""Runs whose folder is at a URL: equal to local ones, and resumed after any kill."""

import dataclasses
import errno
import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from storage_support import KILL_AT, ROOT, dying_at, memory, upload
from training_support import STEPS, tiny

from lcjax import checkpoints, storage
from lcjax.checkpoints import orbax_io
from lcjax.checkpoints.orbax_io import FOLDER, steps_in
from lcjax.checkpoints.run_folder import load_run
from lcjax.errors import InputError
from lcjax.generation.language_model import LanguageModel
from lcjax.parallel.run_lock import LOCK
from lcjax.storage import Staging, remove
from lcjax.training import folder as folder_lib
from lcjax.training import run
from lcjax.training.tracking import read
from lcjax.training.train_config import Profile, TrackSection
from lcjax.tree import flatten

pytestmark = pytest.mark.usefixtures("compiled_once", "traced_once")


@pytest.fixture(scope="module")
def reference(tmp_path_factory, corpus):
    """An undisturbed run in a local folder."""
    folder = tmp_path_factory.mktemp("local") / "run"
    run(tiny(folder, corpus))
    return folder


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))


def losses(folder):
    return {row["step"]: row["loss"] for row in read(folder / folder_lib.METRICS)}


def assert_same_model(folder, other):
    a, b = (flatten(checkpoints.load(path / "model")[0]) for path in (folder, other))
    assert a.keys() == b.keys()
    for path in a:
        np.testing.assert_array_equal(np.asarray(a[path]), np.asarray(b[path]), err_msg=path)


def assert_no_temporary_files():
    assert not list(Path(tempfile.gettempdir()).glob("lcjax-staging-*"))


@pytest.mark.slow
def test_a_run_at_a_url_with_data_at_a_url_is_the_local_one(corpus, reference):
    bucket = memory("runs")
    data = upload(corpus, bucket / "data")
    result = run(tiny(bucket / "run", data))
    assert result["step"] == STEPS and result["folder"] == "memory://runs/run"
    assert losses(bucket / "run") == losses(reference)
    assert steps_in(bucket / "run" / FOLDER) == steps_in(reference / FOLDER) == [8, 12]
    names = {file.relative_to(reference).parts[0] for file in reference.rglob("*")}
    assert {file.relative_to(bucket / "run").parts[0] for file in (bucket / "run").files()} == names
    assert_same_model(bucket / "run", reference)
    assert_no_temporary_files()
    # All that reads a run folder reads this one.
    params = flatten(load_run(str(bucket / "run"), step=8)[0])
    expected = flatten(load_run(reference, step=8)[0])
    for path in expected:
        np.testing.assert_array_equal(np.asarray(params[path]), np.asarray(expected[path]))
    prompt = [[1, 2, 3, 4]]
    np.testing.assert_array_equal(
        LanguageModel.load(str(bucket / "run")).nll(prompt),
        LanguageModel.load(reference).nll(prompt),
    )
    assert folder_lib.finished(tiny(bucket / "run", data))
    with pytest.raises(InputError, match="run.folder=memory://runs/run holds a run"):
        run(tiny(bucket / "run", data, run={"existing": "refuse"}))
    with pytest.raises(InputError, match="the run in memory://runs/run began with 0.003"):
        run(tiny(bucket / "run", data, lr=1.0))
    (bucket / "run" / "notes.txt").write_text("mine")
    run(tiny(bucket / "run", data, run={"existing": "overwrite"}, steps=4))
    assert steps_in(bucket / "run" / FOLDER) == [4]
    assert (bucket / "run" / "notes.txt").is_file()


@pytest.mark.parametrize("name", ["run[1]", "run?", "*"])
@pytest.mark.parametrize("bucket", ["memory", "store"])
def test_the_name_of_a_folder_is_no_pattern(store, name, bucket):
    bucket = store if bucket == "store" else memory("runs")
    for run_folder in (bucket / name, bucket / "run1"):
        for file in ("4/checksums.0", "4/data", "8/checksums.0", "9/data"):
            (run_folder / FOLDER / file).write_text("")
        run_folder.fs.makedirs((run_folder / FOLDER / "8" / "empty").path, exist_ok=True)
    assert steps_in(bucket / name / FOLDER) == [4, 8]
    remove(bucket / name / FOLDER / "8")
    assert steps_in(bucket / name / FOLDER) == [4]
    assert sorted(path.name for path in (bucket / name / FOLDER).iterdir()) == ["4", "9"]
    remove(bucket / name)
    assert not (bucket / name).exists()
    assert steps_in(bucket / "run1" / FOLDER) == [4, 8]
    (bucket / name).write_text("a file")
    remove(bucket / name)
    remove(bucket / name)  # there is none
    assert not (bucket / name).exists() and (bucket / "run1").exists()


def resumed_at(folder, corpus, change):
    """Kills a run before its `change`-th change of the store, and goes on with another."""
    with dying_at(change):
        run(tiny(folder, corpus, save_every=3, keep=1))
    # What the process of a lock has left is the subject of the tests of locks.
    (folder / LOCK).unlink(missing_ok=True)
    (folder / f"{LOCK}.guard").unlink(missing_ok=True)
    steps = steps_in(folder / FOLDER)
    run(tiny(folder, corpus, save_every=3, keep=1))
    return steps


def assert_complete(folder, reference):
    assert losses(folder) == losses(reference)
    assert_same_model(folder, reference)
    # The newest, and the newest after which a step was finite.
    assert steps_in(folder / FOLDER) == [9, STEPS]
    assert sorted(path.name for path in (folder / FOLDER).iterdir()) == ["12", "9"]
    assert_no_temporary_files()


@pytest.mark.slow
def test_a_run_resumes_after_a_kill_at_any_change_of_its_store(corpus, reference, store):
    """Every tenth change here, the same loop over all of them is a slow test."""
    with dying_at(None) as counts:
        run(tiny(store / "whole", corpus, save_every=3, keep=1))
    steps = []
    for change in range(3, counts.num_changes, max(1, counts.num_changes // 10)):
        steps += resumed_at(store / f"run{change}", corpus, change)
        assert_complete(store / f"run{change}", reference)
    assert set(steps) == {3, 6, 9, 12}


@pytest.mark.slow
def test_a_run_resumes_after_a_kill_at_every_change_of_its_store(corpus, reference, store):
    with dying_at(None) as counts:
        run(tiny(store / "whole", corpus, save_every=3, keep=1))
    for change in range(1, counts.num_changes):
        resumed_at(store / f"run{change}", corpus, change)
        assert_complete(store / f"run{change}", reference)


KILLED = """
import conftest, storage_support
from training_support import compile_quickly, tiny
import sys
from lcjax.training import loop, run
from lcjax.training.train_config import Profile, TrackSection

folder, corpus, programs = sys.argv[1:]
compile_quickly(programs)
run(tiny(folder, corpus, save_every=3, keep=1))
"""


def process(folder, corpus, programs, kill_at, tmp_path):
    tests_folder = Path(__file__).parent
    parts = tests_folder, tests_folder.parent, tests_folder.parents[1]
    env = {"PYTHONPATH": os.pathsep.join(map(str, parts)), ROOT: str(tmp_path / "store")}
    command = [sys.executable, "-W", "ignore", "-c", KILLED, str(folder), str(corpus), programs]
    return subprocess.run(
        command, env=os.environ | env | {KILL_AT: str(kill_at)}, capture_output=True, text=True
    )


@pytest.mark.slow
def test_a_process_that_is_killed_in_an_upload_is_followed_by_another(
    tmp_path, corpus, reference, store, compiled_once
):
    folder = store / "run"
    killed = process(folder, corpus, compiled_once, 75, tmp_path)
    assert killed.returncode == 9, killed.stderr
    assert (folder / LOCK).is_file()
    steps = steps_in(folder / FOLDER)
    assert 0 < max(steps) < STEPS
    run(tiny(folder, corpus, save_every=3, keep=1))  # the lock is stale: its process has ended
    assert_complete(folder, reference)
    assert not (folder / LOCK).exists()


@pytest.mark.slow
def test_a_damaged_checkpoint_at_a_url_is_set_aside(corpus, reference):
    folder = memory("runs") / "run"
    run(tiny(folder, corpus, export=False))
    file = next(f for f in (folder / FOLDER / str(STEPS) / "state").rglob("*") if "d" in f.parts)
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.warns(UserWarning, match=r"12 is damaged .* another SHA-256 sum\); looking|moved"):
        run(tiny(folder, corpus))
    names = sorted(path.name for path in (folder / FOLDER).iterdir())
    assert names == ["12", "12.damaged", "8"]
    assert losses(folder) == losses(reference)
    assert_same_model(folder, reference)


def test_a_store_that_cannot_be_written_raises_input_error_before_the_model_is_loaded(
    corpus, monkeypatch, store, tmp_path
):
    monkeypatch.setattr("lcjax.training.language_modelling.build", None)  # would fail otherwise
    with pytest.raises(InputError, match=r"run.folder=http://127.0.0.1:9/run|onnect"):
        run(tiny("http://127.0.0.1:9/run", corpus))
    monkeypatch.setattr(type(store.fs), "pipe_file", denied)
    with pytest.raises(InputError, match=r"run.folder=store://bucket/run cannot be written .*403"):
        run(tiny(store / "run", corpus))
    monkeypatch.setattr(type(store.fs), "info", denied)
    with pytest.raises(InputError, match=r"store://bucket/run.*: 403 Forbidden"):
        run(tiny(store / "run", corpus))
    with pytest.raises(InputError, match="nonsense://run: nonsense:// is unknown"):
        tiny("nonsense://run", corpus)


def denied(*_, **__):
    raise PermissionError("403 Forbidden")


@pytest.mark.slow
def test_a_folder_that_cannot_sync_or_lock_holds_the_same_run(tmp_path, corpus, monkeypatch):
    """As a mounted Google Drive: nor are there hard links, times, or renames onto a file."""

    def run_and_resume(folder):
        run(tiny(folder, corpus, steps=8))
        run(tiny(folder, corpus, run={"accept": ["train.steps"]}))

    local, drive = tmp_path / "local" / "run", tmp_path / "drive"
    run_and_resume(local)

    def unknown(name, is_there):
        before = getattr(os, name)

        def call(*args, **options):
            if is_there(*args):
                raise OSError(errno.ENOSYS, "not implemented")
            return before(*args, **options)

        monkeypatch.setattr(os, name, call)

    unknown("fsync", lambda fd: drive.as_posix() in os.readlink(f"/proc/self/fd/{fd}"))
    for name in ("replace", "rename"):
        unknown(name, lambda a, b: drive in Path(b).parents and Path(b).exists())
    for name in ("utime", "link"):
        unknown(name, lambda *paths: drive in Path(paths[-1]).parents)
    run_and_resume(drive / "run")
    assert losses(drive / "run") == losses(local)
    assert_same_model(drive / "run", local)
    assert sorted(path.name for path in (drive / "run" / FOLDER).iterdir()) == ["12", "8"]
    assert_no_temporary_files()


def test_a_folder_where_both_kinds_of_locks_exclude_each_other_can_lock(tmp_path, monkeypatch):
    """As NFS, where Linux makes of flock a lock of all bytes."""
    holders = set()

    def lock(kind):
        def call(file, operation):
            if operation & fcntl.LOCK_UN:
                holders.discard(kind)
            elif holders - {kind}:
                raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
            else:
                holders.add(kind)

        return call

    for kind in ("lockf", "flock"):
        monkeypatch.setattr(fcntl, kind, lock(kind))
    assert orbax_io._can_sync(tmp_path)


def test_temporary_folders_of_processes_that_do_not_run_are_removed_but_not_of_other_containers(
    tmp_path, monkeypatch
):
    """All of them are of processes that this container does not know."""
    monkeypatch.setattr(storage, "is_running", lambda pid: False)
    leftover = Staging(tmp_path, always=True).local
    with monkeypatch.context() as patch:
        patch.setattr(os, "readlink", lambda path: "pid:[1]")
        in_container = Staging(tmp_path, always=True).local
    assert leftover.exists() and in_container.exists()
    with Staging(tmp_path, always=True):
        assert in_container.exists() and not leftover.exists()


@pytest.mark.slow
def test_files_of_the_profiler_are_uploaded(corpus):
    folder = memory("runs") / "run"
    run(tiny(folder, corpus, export=False, profile=Profile(start=2, steps=1)))
    assert list((folder / folder_lib.PROFILE / "plugins").rglob("*"))
    assert_no_temporary_files()


def test_files_of_tensorboard_are_uploaded(corpus):
    pytest.importorskip("tensorboardX")
    folder = memory("runs") / "run"
    config = tiny(folder, corpus, export=False)
    run(dataclasses.replace(config, track=TrackSection(tensorboard=True)))
    assert list((folder / folder_lib.TENSORBOARD).rglob("*tfevents*"))
    assert_no_temporary_files()
