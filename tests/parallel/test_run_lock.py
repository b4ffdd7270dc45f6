"""Locks of run folders: one run at a time, and none is locked out by a run that was killed."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from storage_support import memory

from lcjax.errors import InputError
from lcjax.parallel import run_lock
from lcjax.parallel.run_lock import GUARD, LOCK, RunLock
from lcjax.storage import URLPath

HOLD = "import sys, time; from lcjax.parallel.run_lock import RunLock\n"
HOLD += "with RunLock(sys.argv[1]): print('held', flush=True); time.sleep(60)"


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock of tmp_path/run."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_a_lock_is_released_and_leaves_nothing_behind(tmp_path):
    folder = tmp_path / "a" / "run"
    with RunLock(folder):
        assert [file.name for file in folder.iterdir()] == [LOCK]
    assert not folder.exists()
    folder.mkdir()
    with RunLock(folder):
        pass
    assert folder.exists() and not list(folder.iterdir())
    with RunLock(folder):
        (folder / "metrics.jsonl").touch()
    assert [file.name for file in folder.iterdir()] == ["metrics.jsonl"]


def test_a_second_run_raises_an_error_until_the_first_has_ended(tmp_path, holder):
    folder, lock = tmp_path / "run", tmp_path / "run" / LOCK
    match = rf"run.folder=.*run is in use by process {holder.pid} on .* since 2.*remove .*{LOCK}"
    for _ in range(2):
        with pytest.raises(InputError, match=match), RunLock(folder):
            pass
    text = lock.read_text()
    holder.kill()
    stat = Path(f"/proc/{holder.pid}/stat")
    while ") Z " not in stat.read_text():
        time.sleep(0.01)
    for wait in (lambda: None, holder.wait):  # an ended process is a zombie until its parent waits
        wait()
        lock.write_text(text)
        with RunLock(folder):
            assert json.loads(lock.read_text())["pid"] == os.getpid()


def write_lock(file, age=0.0, **changes):
    file.write_text(json.dumps(run_lock._this_process() | changes))
    os.utime(file, (time.time() - age,) * 2)


def test_a_process_of_the_same_number_does_not_hold_a_lock(tmp_path):
    write_lock(tmp_path / LOCK, started="1")
    with RunLock(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["started"] != "1"


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"pid": 1}'])
def test_a_lock_of_another_machine_is_stale_when_it_is_not_refreshed(tmp_path, text, capsys):
    write_lock(tmp_path / LOCK, age=100.0, machine="another")
    if text is not None:
        (tmp_path / LOCK).write_text(text)
        os.utime(tmp_path / LOCK, (0, 0))
    with RunLock(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == [] and capsys.readouterr().err == ""


def test_a_lock_from_the_future_is_stale_after_the_same_time(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "_STALE", 0.3)
    write_lock(tmp_path / LOCK, machine="another", age=-3600.0)
    (tmp_path / GUARD).touch()
    os.utime(tmp_path / GUARD, (time.time() + 3600,) * 2)
    start = time.monotonic()
    with RunLock(tmp_path):
        pass
    assert time.monotonic() - start < 5 and list(tmp_path.iterdir()) == []


def test_a_start_on_another_machine_waits_for_a_refresh(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_lock, "_STALE", 1.0)
    write_lock(tmp_path / LOCK, machine="another", host="node7")
    with RunLock(tmp_path):  # killed: nobody refreshes it
        pass
    assert re.search(r"may be in use by process \d+ on node7 .* up to 1 s", capsys.readouterr().err)
    monkeypatch.setattr(run_lock, "_STALE", 60.0)
    write_lock(tmp_path / LOCK, machine="another", host="node7")
    timer = threading.Timer(0.5, os.utime, [tmp_path / LOCK])
    timer.start()
    with pytest.raises(InputError, match="is in use by process .* on node7"), RunLock(tmp_path):
        pass
    assert [file.name for file in tmp_path.iterdir()] == [LOCK]


def test_a_full_disk_leaves_no_lock_behind(tmp_path, monkeypatch):
    def write(*_):
        raise OSError(28, "No space left on device")

    def full(path, mode="r", **options):
        file = before(path, mode, **options)
        file.write = write
        return file

    before = Path.open
    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(InputError, match="cannot be written .*No space left"), RunLock(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_the_guard_of_a_killed_start_does_not_lock_a_folder(tmp_path):
    write_lock(tmp_path / LOCK, started="1")
    (tmp_path / GUARD).touch()
    os.utime(tmp_path / GUARD, (0, 0))
    with RunLock(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_lock_is_refreshed_while_it_is_held(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "_REFRESH", 0.01)
    with RunLock(tmp_path):
        os.utime(tmp_path / LOCK, (0, 0))
        deadline = time.monotonic() + 30
        while (tmp_path / LOCK).stat().st_mtime == 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.parametrize("attempt", range(5))
def test_of_many_starts_at_once_exactly_one_holds_a_stale_folder(tmp_path, attempt):
    (tmp_path / LOCK).write_text(json.dumps(run_lock._this_process() | {"started": "1"}))
    start, end, held = threading.Barrier(8), threading.Barrier(8), []

    def run(number):
        lock = RunLock(tmp_path)
        lock._owner = lock._owner | {"since": str(number)}
        start.wait()
        try:
            lock._acquire()
            held.append(number)
        except InputError as error:
            assert "is in use by" in str(error)
        end.wait()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(held) == 1
    assert json.loads((tmp_path / LOCK).read_text())["since"] == str(held[0])
    assert [file.name for file in tmp_path.iterdir()] == [LOCK]


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "/proc/xx/run"])
def test_folders_that_cannot_be_are_an_error_of_one_line(name):
    with pytest.raises(InputError, match=r"run.folder=.* cannot be written .*name another folder"):
        RunLock(name).__enter__()


def test_a_lock_that_is_released_during_a_refresh_does_not_come_back(monkeypatch):
    def write_late(path, data):
        is_refreshing.set()
        time.sleep(0.2)
        return before(path, data)

    folder, is_refreshing, before = memory("locks") / "run", threading.Event(), URLPath.write_bytes
    monkeypatch.setattr(run_lock, "_REFRESH", 0.01)
    with monkeypatch.context() as patch:
        patch.setattr(URLPath, "write_bytes", write_late)
        with RunLock(folder):
            assert is_refreshing.wait(30)
        time.sleep(0.5)
    assert not folder.exists()
    with RunLock(folder):
        pass


def test_a_folder_at_a_url_is_locked_in_the_same_way(monkeypatch):
    folder = memory("locks") / "run"
    with RunLock(folder):
        assert [file.name for file in folder.iterdir()] == [LOCK]
        with (
            pytest.raises(InputError, match=f"run is in use by process {os.getpid()} on"),
            RunLock(str(folder)),
        ):
            pass
    assert not folder.exists()
    owner = run_lock._this_process() | {"machine": "another", "host": "far"}
    (folder / LOCK).write_text(json.dumps(owner))
    monkeypatch.setattr(run_lock, "_REFRESH", 0.05)
    monkeypatch.setattr(run_lock, "_STALE", 0.3)
    with RunLock(folder):  # after the time without a refresh
        written = (folder / LOCK).modified()
        time.sleep(0.2)
        assert (folder / LOCK).modified() > written
    assert not folder.exists()
