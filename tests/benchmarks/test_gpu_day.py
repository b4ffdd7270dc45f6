"""`benchmarks.gpu.day` and what it runs: order, limits, resuming, packing, and its table."""

import json
import os
import re
import subprocess
import sys
import time
import zipfile

import pytest

from benchmarks.gpu import check, day, model, pack, records, rows, summary
from benchmarks.gpu.workers import ROOT
from benchmarks.gpu.workloads import workloads

ABOUT = {"device": "a GPU", "platform": "gpu", "jax": "0", "commit": "abc"}

# A part whose cases take one of these ways; it writes a record only if it ends well.
PART = """
import argparse, json, os, sys, time
from pathlib import Path
from benchmarks.gpu.records import Records

def arguments(words):
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--way")
    return parser.parse_args(words)

def records_of(args):
    return Records(args.out / "a_GPU.json")

def left(args, about):
    return int(args.way not in records_of(args).by_case), 1

if __name__ == "__main__":
    args = arguments(sys.argv[1:])
    args.out.mkdir(parents=True, exist_ok=True)
    if args.way == "hangs":
        child = os.fork()  # a process of its own, as a compiler or a worker has
        Path(f"{args.out}.child").write_text(str(child or os.getpid()))
        time.sleep(600)
    print("12:00:00 begins")
    print("what it prints", flush=True)
    if args.way == "crashes":
        os.abort()
    if args.way == "runs out of memory":
        raise MemoryError
    records_of(args).add({"case": args.way, "about": {}, "limit": args.minutes})
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Returns a function that runs parts of one case each, by the ways that they take."""
    package = tmp_path / "fake"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "part.py").write_text(PART)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.setattr(day, "__package__", "fake")
    monkeypatch.setattr(day, "GRACE", 0.5)
    monkeypatch.setattr(day, "LEAST", 0.5)

    def run(*ways: str, seconds: float = 20.0, minutes: float = 1.0):
        parts = [day.Part(way, seconds, "part", way, ("--way", way)) for way in ways]
        words = ["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
        args = day.arguments(words)
        args.parts = list(ways)
        day.run(args, ABOUT, time.monotonic() + 60 * minutes, parts)
        return records.Records.of(tmp_path / "out" / day.PARTS_FILE, ABOUT).by_case

    return run


def test_a_part_that_fails_does_not_stop_the_next_one(fake, tmp_path, capsys):
    outcomes = fake("crashes", "runs out of memory", "works")
    assert {name: x["ended"] for name, x in outcomes.items()} == {
        "crashes": "signal SIGABRT", "runs out of memory": "exit code 1", "works": ""
    }  # fmt: skip
    assert {name: x["left"] for name, x in outcomes.items()} == {
        "crashes": 1, "runs out of memory": 1, "works": 0
    }  # fmt: skip
    assert outcomes["works"]["about"] == ABOUT
    record = json.loads((tmp_path / "out/works/a_GPU.json").read_text())["cases"]["works"]
    assert record["limit"] == pytest.approx(20 / 60)
    said = capsys.readouterr().err
    assert "crashes begins, 1 cases are left, at most 20 s" in said
    log = tmp_path / "work" / "crashes.log"
    assert f"signal SIGABRT, see {log}:\n    12:00:00 begins\n    what it prints\n" in said
    assert "\n12:00:00 begins\n" in said and "\nwhat it prints" not in said
    assert "MemoryError" in said, "the end of the log has the error"
    # The next call leaves out what is done.
    fake("crashes", "works")
    said = capsys.readouterr().err
    assert "crashes begins" in said and "works begins" not in said


def test_a_part_that_hangs_is_ended_with_its_processes(fake, tmp_path):
    outcomes = fake("hangs", "works", seconds=2.0)
    assert outcomes["hangs"]["ended"] == "it was ended after 2 s"
    assert outcomes["works"]["ended"] == ""
    child = int((tmp_path / "out/hangs.child").read_text())
    with pytest.raises(ProcessLookupError):
        for _ in range(100):  # until init has collected it
            os.kill(child, 0)
            time.sleep(0.05)


def test_a_part_ends_with_the_day(tmp_path, fake):
    """As when a machine is taken back: SIGTERM to the day alone."""
    program = (
        "import signal, sys; from benchmarks.gpu import day; day.__package__ = 'fake'\n"
        "part = day.Part('hangs', 60, 'part', 'hangs', ('--way', 'hangs'))\n"
        "day.end_with_sigterm()\n"
        "args = day.arguments(sys.argv[1:]); args.parts = ['hangs']\n"
        f"day.run(args, {ABOUT!r}, 1e9, [part])"
    )
    words = ["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    run = subprocess.Popen([sys.executable, "-c", program, *words], cwd=ROOT)
    mark = tmp_path / "out/hangs.child"
    while not (mark.exists() and mark.read_text()) and run.poll() is None:
        time.sleep(0.05)
    run.terminate()
    assert run.wait(30) == 143
    with pytest.raises(ProcessLookupError):
        for _ in range(100):
            os.kill(int(mark.read_text()), 0)
            time.sleep(0.05)


def test_no_part_begins_without_time(fake, capsys):
    assert fake("works", minutes=0.001) == {}
    assert "the time is up; the same command goes on" in capsys.readouterr().err


def test_the_plan_names_the_order_the_limits_and_what_is_done(tmp_path, capsys):
    results = {"runs": [{"about": ABOUT, "options": {}, "done": []}], "rows": []}
    records.write(tmp_path / "a_GPU.json", results)
    outcomes = records.Records(tmp_path / "day/a_GPU.json")
    ended = {"date": "2026-01-02 03:04", "seconds": 61.0, "left": 3, "ended": "exit code 1"}
    outcomes.add({"case": "decode", "about": ABOUT} | ended)
    assert day.main(["--plan", "--out", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "a GPU"
    parts = [line.split(" | ")[0].removeprefix("| ") for line in lines[4:]]
    assert parts == [part.name for part in day.PARTS]
    assert parts[:4] == ["check", "decode", "read", "train"] and "rows" in parts
    decode = lines[5]
    assert "| 90 | 100 compiling, 45 running | 7 of 7 |" in decode
    assert "| 2026-01-02 03:04, 61 s, exit code 1 |" in decode
    assert "`model --outdated" in decode and "'decode 1.1b 16k' 'decode 1.1b 64k'" in decode


def test_every_part_selects_cases_of_its_command(capsys):
    args = day.arguments(["--out", "nowhere"])
    counts = {part.name: part.left(args, ABOUT) for part in day.PARTS}
    assert all(left == count for left, count in counts.values()), "nothing has been measured"
    number = {name: count for name, (count, _) in counts.items()}
    assert number["check"] == 3 * len(check.cases(1)) and number["rows"] == len(rows.METHODS)
    # Both lengths with three sides of decoding and "xla"; four sides of reading; three of training.
    assert [number[x] for x in ("decode", "read", "train", "attention")] == [7, 4, 3, 22]
    assert number["shapes"] == len(workloads())
    assert day.main(["--plan", "--out", "nowhere"]) == 0
    assert "nowhere has no results, so everything is left on any GPU." in capsys.readouterr().out
    tiny = day.arguments(["--out", "nowhere", "--tiny"])
    assert all(part.left(tiny, ABOUT)[0] in (1, 2) for part in day.PARTS)


def test_a_device_without_a_gpu_is_refused_with_the_way_out(monkeypatch, capsys, tmp_path):
    monkeypatch.delenv(records.ABOUT, raising=False)
    monkeypatch.setattr(day.signal, "signal", lambda *_: None)  # of the process of the tests

    def supervise(command, jobs, **_):
        yield {"about": ABOUT | {"platform": "cpu"}}

    monkeypatch.setattr(model, "supervise", supervise)
    assert day.main(["--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "JAX runs on cpu here" in said and "--tiny" in said
    monkeypatch.setattr(model, "supervise", lambda *_, **__: iter([{"missing": ["draccus"]}]))
    assert day.main(["--out", str(tmp_path)]) == 2
    assert "missing: draccus" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        day.main(["--pack", str(tmp_path / "none")])
    assert "is no folder" in capsys.readouterr().err


def test_the_table_has_ratios_to_the_peers_and_the_figures_before(tmp_path):
    def record(case, rate, peak=2.0, **figures):
        kind, name, tokens, side = case.split(" ", 3)
        record = {"case": case, "kind": kind, "model": name, "tokens": tokens, "side": side}
        record |= {"about": ABOUT, "code": {}, "range": [rate - 1, rate + 1], "peak_gb": peak}
        return record | {"tokens_per_second": rate} | figures

    models = records.Records(tmp_path / "model/a_GPU.json")
    models.add(record("decode 1.1b 16k lcjax", 120.0) | {"about": ABOUT | {"commit": "old"}})
    models.add(record("decode 1.1b 16k lcjax", 400.0, bandwidth_share=0.31))
    models.add(record("decode 1.1b 16k jax.nn xla", 320.0))
    models.add(record("read 1.1b 128k cepe", 990.0, peak=1.0))
    models.add(record("read 1.1b 128k full", 100.0, peak=6.0))
    models.add(record("train 1.1b 64k lcjax", 5.0) | {"reason": "RESOURCE_EXHAUSTED"})
    made = {"case": "ntk_32k", "about": ABOUT, "code": {}, "cells": {"pg19": {"32768": 5.25}}}
    made |= {"steps": 24, "loss": 1.5, "tokens_per_second": 40_000.0}
    records.Records(tmp_path / "rows/a_GPU.json").add(made)
    counts = {"ok": 3, "skip": 1, "FAIL": 0}
    checked = {"case": "triton", "about": ABOUT, "code": {}, "counts": counts, "cases": 119}
    records.Records(tmp_path / "check/a_GPU.json").add(checked)
    lines = summary.table(tmp_path).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    by_case = {line.split(" | ")[1]: line for line in lines[3:]}
    assert "400 tokens/s (399 - 401), 31% of bandwidth, 2.00 GB" in by_case["decode 1.1b 16k lcjax"]
    assert (
        "| 1.25x as fast as jax.nn xla | 120 tokens/s, old | abc |"
        in (by_case["decode 1.1b 16k lcjax"])
    )
    assert "| 9.90x as fast as full, 0.17 of its memory |" in by_case["read 1.1b 128k cepe"]
    assert "| RESOURCE_EXHAUSTED |" in by_case["train 1.1b 64k lcjax"]
    row = "24 steps, last loss 1.500, 40,000 tokens/s; pg19 5.25 at 32,768"
    assert row in by_case["ntk_32k"]
    assert "3 ok, 1 skip, 0 FAIL of 119" in by_case["triton"]
    # A failure does not hide the last good figure, nor erase it for the next record.
    models.add(record("decode 1.1b 16k lcjax", 400.0) | {"reason": "it hung"})
    failed = next(x for x in summary.table(tmp_path).splitlines() if "16k lcjax" in x)
    assert "| it hung |  | 400 tokens/s, abc | abc |" in failed
    models.by_case["decode 1.1b 16k lcjax"].pop("tokens_per_second")
    models.by_case["decode 1.1b 16k lcjax"].pop("peak_gb")
    models.add(record("decode 1.1b 16k lcjax", 500.0))
    assert models.by_case["decode 1.1b 16k lcjax"]["before"]["tokens_per_second"] == 400.0
    # A peer of other code or versions is none.
    for change in ({"about": ABOUT | {"jax": "1"}}, {"code": {"lcjax/models": "old"}}):
        code = {"code": {"lcjax/models": "new"}}
        models.add(record("decode 1.1b 16k lcjax", 500.0) | code)
        models.add(record("decode 1.1b 16k jax.nn xla", 320.0) | change)
        assert "as fast as jax.nn" not in summary.table(tmp_path)


@pytest.mark.parametrize("page", summary.PAGES)
def test_the_tables_of_the_docs_are_those_of_the_results(page):
    text = (ROOT / page).read_text()
    blocks = re.findall(r"<!-- gpu: (.*?) -->", text)
    assert blocks and {*blocks} <= summary.BLOCKS.keys()
    assert summary.filled(text) == text, "python -m benchmarks.gpu.summary --write"


def test_a_record_is_outdated_when_code_changes_that_its_process_imported(tmp_path, monkeypatch):
    command = "import benchmarks.gpu.records as r, lcjax.errors, json; print(json.dumps(r.code()))"
    run = subprocess.run([sys.executable, "-c", command], cwd=ROOT, capture_output=True, check=True)
    code = json.loads(run.stdout)
    assert "lcjax/errors.py" in code
    assert not any(part.startswith(("pallas_kernels", "lcjax/models", "bench")) for part in code)
    stored = records.Records(tmp_path / "a.json")
    stored.add({"case": "a", "about": ABOUT, "code": code})
    stored = records.Records(tmp_path / "a.json")
    assert stored.state("a", ABOUT) == "done" and stored.state("b", ABOUT) == "missing"
    assert stored.state("a", ABOUT | {"jax": "1"}) == "outdated"
    stored.add({"case": "a", "about": ABOUT, "code": code, "reason": "it is lost"})
    assert stored.state("a", ABOUT) == "failed"
    old = records._hash
    monkeypatch.setattr(
        records, "_hash", lambda part: "x" if part == "lcjax/errors.py" else old(part)
    )
    assert stored.state("a", ABOUT) == "outdated"


def test_packed_files_are_divided_and_what_has_arrived_is_unpacked(tmp_path):
    source, out = tmp_path / "wheels", tmp_path / "out"
    source.mkdir()
    out.mkdir()
    data = {"one": b"o" * 100, "two": b"t" * 3000, "large": bytes(range(200)) * 400}
    for name, content in data.items():
        with zipfile.ZipFile(source / f"{name}-1-py3-none-any.whl", "w") as archive:
            archive.writestr(f"{name}/data.bin", content)
            archive.writestr(f"{name}-1.dist-info/METADATA", "")
    pack.divide(list(source.glob("*")), out, 8000)
    parts = [sum(x.stat().st_size for x in part.iterdir()) for part in sorted(out.iterdir())]
    assert max(parts) <= 8000 and len(parts) == 11 and not list(source.iterdir())
    (out / "2" / "something.tmp").touch()  # of a transfer
    last = out / "11"
    last.rename(tmp_path / "later")  # it has not arrived yet
    site = pack.unpack(out)
    assert (site / "two/data.bin").read_bytes() == data["two"]
    assert not (site / "large").exists()
    (tmp_path / "later").rename(last)
    pack.unpack(out)
    assert (site / "large/data.bin").read_bytes() == data["large"], "also beyond nine parts"


def test_a_row_names_its_method_its_training_and_its_data(tmp_path):
    from lcjax.evaluation import reproduce, study

    words = ["--data", str(tmp_path), "--work", str(tmp_path / "work"), "--methods", "yarn_32k"]
    args = rows.arguments(words)
    name, table, *others = rows.words("yarn_32k", args)
    assert name == "reproduce"
    config = reproduce._only(reproduce.config_at(table, "smollm2_32k", _keys(others)), "yarn_32k")
    (training,) = study.trainings(config).values()
    assert training.train.steps == rows.STEPS and training.data.path == str(tmp_path)
    assert training.data.length == rows.LENGTH and training.model.rope.type == "yarn"
    assert training.run.folder == str(tmp_path / "work/trained/yarn_32k")
    assert {task.label for task in config.tasks} == {*rows.TASKS}
    assert {config.tasks[1].lengths, config.tasks[2].lengths} == {(32768,), (8192, 32768)}


def _keys(words: list[str]) -> list[str]:
    """Returns the keys of eval.py, without the options of `reproduce`."""
    return [word for word in words if word.startswith("--") and "=" in word]


# A worker of `rows` whose evaluation takes one of these ways, named by the folder of its work.
ROW = """
import signal, sys, time, types
from benchmarks.gpu import rows

def main(words):
    if "/no_essays" in str(words):
        print("error: no essays", file=sys.stderr)
        return 2
    if "/no_module" in str(words):
        import a_module_that_is_not_there
    if "/no_memory" in str(words):
        raise MemoryError("no memory")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print("a checkpoint is written", file=sys.stderr)
    time.sleep(600)

sys.modules["lcjax.evaluation"] = evaluation = types.ModuleType("lcjax.evaluation")
evaluation.command = types.SimpleNamespace(main=main)
sys.exit(rows.main(sys.argv[1:]))
"""


def test_a_row_that_is_refused_says_why_and_one_that_is_cut_off_has_no_record(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    supervise = rows.supervise

    def with_script(command, jobs, **limits):
        return supervise([sys.executable, "-c", ROW, *command[3:]], jobs, **limits)

    monkeypatch.setattr(rows, "supervise", with_script)
    monkeypatch.setattr(rows, "about_here", lambda: ABOUT)
    monkeypatch.setattr(rows, "ENDING", 1.0)
    monkeypatch.setattr(sys, "argv", ["rows"])

    def run(way: str, *methods: str, minutes: str, code: int = 0):
        options = ["--work", str(tmp_path / way), "--minutes", minutes, "--methods", *methods]
        assert rows.main([*options, "--out", str(tmp_path)]) == code

    run("no_essays", "ntk_32k", "yarn_32k", minutes="1", code=2)
    said = capfd.readouterr().err
    assert said.count("error: no essays") == 2, "by the row and by its parent: no other is tried"
    run("no_module", "ntk_32k", "yarn_32k", minutes="1", code=2)
    said = capfd.readouterr().err
    assert "error: No module named 'a_module_that_is_not_there'; `python -m" in said
    assert not list(tmp_path.glob("*.json")), "these rows are made when what is missing is there"
    run("trains", "yarn_32k", "ntk_32k", minutes="0.08")
    assert "yarn_32k was cut off; the same command goes on with it" in capfd.readouterr().err
    assert not list(tmp_path.glob("*.json"))
    run("no_memory", "ntk_32k", minutes="1")
    record = json.loads((tmp_path / "a_GPU.json").read_text())["cases"]["ntk_32k"]
    assert record["reason"] == "MemoryError: no memory"


def test_a_row_that_failed_is_made_again_when_code_changes_and_a_good_one_is_not(tmp_path):
    args, stored = rows.arguments(["--out", str(tmp_path)]), records.Records.of(tmp_path, ABOUT)
    now, old = {"lcjax/models": records._hash("lcjax/models")}, {"lcjax/models": "old"}
    first, second, third, *others = rows.METHODS
    stored.add({"case": first, "about": ABOUT, "code": now, "reason": "it is lost"})
    stored.add({"case": second, "about": ABOUT, "code": old, "reason": "it is lost"})
    stored.add({"case": third, "about": ABOUT, "code": old})
    assert rows.waiting(args, ABOUT) == [second, *others]


@pytest.mark.slow
def test_all_parts_run_at_tiny_sizes(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu.day", "--tiny", "--out", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    start = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    outcomes = records.Records(tmp_path / "day/cpu.json").by_case
    assert {name: (x["left"], x["ended"]) for name, x in outcomes.items()} == {
        part.name: (0, "") for part in day.PARTS if part.name != "shapes"
    }, done.stderr
    assert time.monotonic() - start < 600
    for kind in ("check", "decode", "read", "train", "attention", "rows"):
        assert f"| {kind} | " in done.stdout
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert " begins" not in done.stderr, "nothing is left"
