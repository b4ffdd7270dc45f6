"""Evaluations whose folder and text are at URLs: their results are those of local ones."""

import dataclasses
import json
from pathlib import Path

import pytest
from evaluation_support import fake
from matplotlib.figure import Figure
from storage_support import dying_at, failing, memory, upload

from lcjax.data import TextConfig
from lcjax.errors import InputError
from lcjax.evaluation import RunSection, results, run
from lcjax.evaluation.command import main
from lcjax.parallel.run_lock import LOCK

pytestmark = pytest.mark.usefixtures("quick")
DRAW = Figure.savefig
COSTS = ("seconds", "peak_bytes", "peak_bytes_at_most", "compile_seconds", "tokens_per_second")


def at(config, folder, **more):
    return dataclasses.replace(config, run=RunSection(str(folder), **more))


def content(folder):
    """All results but measured costs, and what names the folder."""
    files = {
        f.relative_to(folder).as_posix(): f.read_bytes() for f in folder.rglob("*") if f.is_file()
    }
    kept = ("records/", "tables/", "figures/perplexity")
    return {name: data for name, data in files.items() if name.startswith(kept)}, files.keys()


@pytest.mark.slow
def test_results_at_a_url_are_those_of_a_local_folder(config, monkeypatch, capsys):
    monkeypatch.setattr(Figure, "savefig", DRAW)
    bucket = memory("evaluations")
    text = upload(Path(config.data.path), bucket / "text")
    run(config, load=fake())
    remote = dataclasses.replace(config, data=TextConfig(path=str(text)))
    run(at(remote, bucket / "run"), load=fake())
    expected, names = content(Path(config.run.folder))
    actual, remote_names = content(bucket / "run")
    assert actual == expected and len(actual) > 4
    assert remote_names == names
    log = []
    run(at(remote, bucket / "run"), load=fake(log=log))  # has all its records
    assert not log
    with pytest.raises(InputError, match="run.folder=memory://evaluations/run holds another run"):
        run(dataclasses.replace(at(remote, bucket / "run"), seed=5), load=fake())
    # The commands that read a run.
    assert main(["report", str(bucket / "run"), "--export=lm_eval"]) == 0
    assert main(["compare", str(bucket / "run"), config.run.folder]) == 0
    assert list((bucket / "run" / "export").rglob("results.json"))
    assert results.read(str(bucket / "run")).models_folder == bucket / "run"
    (bucket / "run" / "notes.txt").write_text("mine")
    run(at(remote, bucket / "run", existing="overwrite"), load=fake())
    assert content(bucket / "run")[0] == expected


def test_a_killed_evaluation_at_a_url_resumes(config, store):
    config = dataclasses.replace(config, lengths=(12,))
    run(config, load=fake())
    expected = content(Path(config.run.folder))[0]
    with dying_at(None) as counts:
        run(at(config, store / "whole"), load=fake())
    for change in range(1, counts.num_changes):
        folder = store / f"run{change}"
        with dying_at(change):
            run(at(config, folder), load=fake())
        for name in (LOCK, f"{LOCK}.guard"):  # of this process, which lives
            (folder / name).unlink(missing_ok=True)
        run(at(config, folder), load=fake())
        assert content(folder)[0] == expected


def test_records_are_put_at_the_url_though_their_costs_cannot_be(config):
    folder = memory("evaluations") / "run"
    with (
        failing(folder, "put_file", path="/costs/perplexity_slide_press.jsonl"),
        pytest.raises(InputError, match="connection reset"),
    ):
        run(at(config, folder), load=fake())
    (file,) = (folder / "records").iterdir()
    assert file.read_bytes()


def test_records_of_an_interrupted_evaluation_are_at_the_url(config):
    folder = memory("evaluations") / "run"
    log = []
    with pytest.raises(KeyboardInterrupt, match="same command continues"):
        run(at(config, folder), load=fake(log=log, fail_after=7))
    (file,) = (folder / "records").iterdir()
    lines = file.read_text().splitlines()
    assert len(lines) > 0 and all(json.loads(line)["method"] for line in lines)
    calls = len(log)
    run(at(config, folder), load=fake(log=log))
    run(config, load=fake(log=(whole := [])))
    assert len(log) == len(whole) + 1 or len(log) - calls < len(whole)
