"""Folders are complete or absent, and only what dead processes left is swept up."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lcjax.errors import InputError
from lcjax.files import FolderFormat, atomic_folder, write_whole

WAIT = [sys.executable, "-c", "input()"]
FORMAT = FolderFormat(
    "a test", files=("file", "note.json"), config="note.json", keys=frozenset({"ours"})
)


@pytest.fixture
def dead_pid():
    with subprocess.Popen(WAIT, stdin=subprocess.PIPE) as child:
        child.communicate(b"\n")
    return child.pid


@pytest.fixture
def live_pid():
    with subprocess.Popen(WAIT, stdin=subprocess.PIPE) as child:
        yield child.pid
        child.communicate(b"\n")


def write(folder, text="new", overwrite=False):
    with atomic_folder(folder, FORMAT, overwrite) as partial:
        (partial / "file").write_text(text)
        (partial / "note.json").write_text('{"ours": true}')


@pytest.fixture
def events(monkeypatch):
    """The inodes that reach the disk, and the renames ("rename"), in order."""
    events, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda f: events.append(os.fstat(f).st_ino) or fsync(f))
    for name in ("replace", "rename"):
        move = getattr(Path, name)
        monkeypatch.setattr(
            Path, name, lambda *args, move=move: events.append("rename") or move(*args)
        )
    return events


def test_a_file_reaches_the_disk_before_its_name_and_the_name_before_the_end(tmp_path, events):
    write_whole(tmp_path / "a", "text")
    assert events == [(tmp_path / "a").stat().st_ino, "rename", tmp_path.stat().st_ino]


def test_a_folder_reaches_the_disk_before_its_name_and_the_name_before_the_end(tmp_path, events):
    write(tmp_path / "m")
    inodes = {path.stat().st_ino for path in (tmp_path / "m", *(tmp_path / "m").iterdir())}
    assert set(events[:3]) == inodes and len(inodes) == 3
    assert events[3:] == ["rename", tmp_path.stat().st_ino]


def leave(folder, name="half"):
    folder.mkdir()
    (folder / name).write_bytes(b"half")
    return folder


def test_what_dead_processes_left_is_swept_up(tmp_path, dead_pid):
    leave(tmp_path / f".m.partial-{dead_pid}")
    leave(tmp_path / f".m.partial-{os.getpid()}")  # of an earlier process of this number
    other = leave(tmp_path / f".other.partial-{dead_pid}")
    write(tmp_path / "m")
    assert sorted(p.name for p in tmp_path.iterdir()) == [other.name, "m"]
    assert sorted(p.name for p in (tmp_path / "m").iterdir()) == ["file", "note.json"]


def test_what_a_live_process_writes_is_left_alone(tmp_path, live_pid):
    writing = leave(tmp_path / f".m.partial-{live_pid}")
    named = leave(tmp_path / ".m.partial-notes")
    write(tmp_path / "m")
    assert (writing / "half").read_bytes() == (named / "half").read_bytes() == b"half"


def test_a_model_set_aside_is_swept_up_only_when_it_is_not_the_only_copy(tmp_path, dead_pid):
    old = leave(tmp_path / f".m.old-{dead_pid}", "file")  # half removed: without its config
    with pytest.raises(KeyboardInterrupt), atomic_folder(tmp_path / "m", FORMAT, True):
        raise KeyboardInterrupt
    assert old.exists() and not (tmp_path / "m").exists()
    write(tmp_path / "m")
    write(tmp_path / "m", overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_a_folder_set_aside_is_not_swept_up_with_a_file_of_other_origin(tmp_path, dead_pid):
    write(tmp_path / "m")
    old = leave(tmp_path / f".m.old-{dead_pid}", "thesis.txt")
    write(tmp_path / "m", overwrite=True)
    assert (old / "thesis.txt").read_bytes() == b"half"


def test_a_failed_exchange_puts_the_old_folder_back(tmp_path, monkeypatch):
    write(tmp_path / "m", "old")
    rename = type(tmp_path).rename

    def fail(self, target):
        if ".partial-" in self.name:
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(type(tmp_path), "rename", fail)
    with pytest.raises(InputError, match=r"could not be written .*Input/output error"):
        write(tmp_path / "m", overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    assert (tmp_path / "m" / "file").read_text() == "old"


def test_a_parent_that_is_a_file_is_an_input_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="could not be written"):
        write(tmp_path / "file" / "m")
