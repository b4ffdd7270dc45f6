"""`benchmarks.gpu.model` at tiny sizes on a CPU: what it measures, keeps and prints."""

import io
import json
import os
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from benchmarks import reading
from benchmarks.gpu import model, model_report, model_runs, records
from benchmarks.gpu.workers import MARK, ROOT
from lcjax.generation.language_model import LanguageModel
from lcjax.generation.sampling import Sampling
from lcjax.models import Decoder
from lcjax.models.decoder import random_params

TINY = {case.name: case for case in model_runs.cases(tiny=True)}
QUICK = ("train tiny 64 jax.nn xla", "read tiny 256 shared_llm")
ABOUT = {"device": "cpu", "platform": "cpu", "jax": "0", "commit": "abc"}


@pytest.mark.slow_except(*QUICK)
@pytest.mark.parametrize("name", TINY)
def test_a_case_has_its_rate_its_spread_and_what_computed_its_attention(name):
    case, began = TINY[name], []
    record = model_runs.measure(case, began.append)
    low, high = record["range"]
    assert 0 < low <= record["tokens_per_second"] <= high
    assert record["compile_s"] > 0 and model_runs.peak_bytes() > 0
    assert began[-1] == f"run {len(record['seconds'])}"
    computed = {*record["attention"]}
    side = "xla" if case.side == "lcjax" else case.side  # what it chooses on a CPU
    if case.kind == "train":
        assert computed == {side} and record["step_flops"] > 0
        assert case.tokens * record["rows"] == pytest.approx(
            record["tokens_per_second"] * sorted(record["seconds"])[len(record["seconds"]) // 2]
        )
    elif case.kind == "longest":
        assert record["timed_tokens"] <= record["longest"] and record["used"] <= 1.0
        assert computed == {"xla"} and record["step_flops"] > 0
    else:  # jax.nn decodes, and lcjax reads the prompt
        assert computed == ({side, "xla"} if case.kind == "decode" else {"xla"})
    json.dumps(record)


@pytest.mark.slow
def test_the_longest_text_is_the_longest_that_the_compiler_plans_for(monkeypatch):
    monkeypatch.setattr(model_runs, "_memory_limit", lambda: 5e6)
    record = model_runs.measure(TINY["longest tiny device"], lambda what: None)
    assert record["longest"] % 64 == 0 and 0 < record["longest"] < 512
    assert 0.7 < record["used"] <= 1.0  # of 95 %; a step is 64 tokens
    monkeypatch.setattr(model_runs, "_memory_limit", lambda: 1e6)
    with pytest.raises(MemoryError, match="no text fits"):
        model_runs.measure(TINY["longest tiny device"], lambda what: None)


def test_the_attention_of_a_peer_computes_the_same():
    config = model_runs.shape("tiny").replace(scan_layers=False)
    prompt, sampling = [*range(3, 67)], Sampling(max_new_tokens=4, min_new_tokens=4)
    params = random_params(config, 0)

    def results(config):
        lm = LanguageModel(Decoder(config), params, reading.Letters())
        pieces = list(lm.stream([prompt], sampling, top_logprobs=0))
        tokens = np.array([prompt])
        output = Decoder(config).apply({"params": params}, tokens, segments=np.ones_like(tokens))
        return [x.logprob for piece in pieces for x in piece.logprobs], output.hidden

    logprobs, hidden = results(config)
    peer_logprobs, peer_hidden = results(config.replace(pattern=model_runs.forced("jax.nn xla")))
    assert len(logprobs) == 4
    np.testing.assert_allclose(peer_logprobs, logprobs, atol=1e-5)
    np.testing.assert_allclose(peer_hidden, hidden, atol=1e-5)


MEASURED = {"tokens_per_second": 2.0, "range": [1.0, 3.0], "attention": {"xla": []}}
MEASURED |= {"rows": 1, "remat": "dots", "mfu": None, "peak_gb": 1.0, "compile_s": 1.0}


@pytest.mark.slow
def test_a_run_that_is_killed_with_its_child_goes_on(tmp_path):
    words = ["--tiny", "--out", str(tmp_path), "--cases", "decode"]
    command = [sys.executable, "-m", "benchmarks.gpu.model", *words]
    file, run = tmp_path / "cpu.json", subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        while not file.exists() and run.poll() is None:
            time.sleep(0.05)
    finally:
        os.killpg(run.pid, signal.SIGKILL)  # and its child, which measures the second case
    first = json.loads(file.read_text())["cases"]
    assert list(first) == ["decode tiny 64 lcjax"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "1 cases are to be measured" in done.stderr
    cases = json.loads(file.read_text())["cases"]
    assert list(cases) == ["decode tiny 64 lcjax", "decode tiny 64 jax.nn xla"]
    assert cases["decode tiny 64 lcjax"] == first["decode tiny 64 lcjax"], "it was not done again"
    assert "### Decoding" in done.stdout and "x as fast |" in done.stdout


@pytest.fixture
def children(monkeypatch):
    """Events that children emit by job, and the jobs that were started."""
    started = []
    code = records.code_of("xla")
    events = {name: [{"record": MEASURED | {"code": code}}] for name in TINY}
    events |= {"about": [{"about": ABOUT}]}

    def supervise(command, jobs, *, deadline, patience, env=None):
        for job in jobs:
            started.append(job["name"])
            yield {"job": job["name"], "code": code}
            for event in events[job["name"]]:
                if "stopped" in event:
                    raise event["stopped"]
                yield event | ({"lost": job["name"]} if "lost" in event else {})
                if "left" in event:
                    return

    monkeypatch.setattr(model, "supervise", supervise)
    return events, started


def test_a_stopped_run_goes_on_with_the_cases_that_have_no_record(children, tmp_path, capsys):
    events, started = children
    words = ["--tiny", "--out", str(tmp_path), "--cases", "decode"]
    peer, own = "decode tiny 64 jax.nn xla", "decode tiny 64 lcjax"
    decoded = events[own][0]["record"] | {"bandwidth_share": None, "prefill": 2.0}
    events |= {own: [{"record": decoded}], peer: [{"stopped": KeyboardInterrupt()}]}
    with pytest.raises(KeyboardInterrupt):
        model.main(words)
    file = tmp_path / "cpu.json"
    first = json.loads(file.read_text())["cases"]
    assert list(first) == [own]
    events |= {own: [], peer: [{"record": decoded}]}
    started.clear()
    assert model.main(words) == 0 and started == ["about", peer]
    printed = capsys.readouterr()
    assert "1 cases are to be measured" in printed.err
    cases = json.loads(file.read_text())["cases"]
    assert list(cases) == [own, peer] and cases[own] == first[own], "it was not done again"
    assert "### Decoding" in printed.out and "x as fast |" in printed.out


HANGS = [{"begins": "compiling"}, {"lost": "x", "step": None, "why": "silent for 180 s"}]
FAILS = [
    {"begins": "run 1"},
    {"failed": "JaxRuntimeError: RESOURCE_EXHAUSTED"},
    {"lost": "x", "step": None, "why": "exit code 1"},
]


def test_failed_and_outdated_cases_are_done_again_only_if_asked(children, tmp_path, capsys):
    events, started = children
    words = ["--tiny", "--out", str(tmp_path), "--cases", "train"]
    events |= {"train tiny 64 lcjax": HANGS}
    assert model.main(words) == 0
    cases = json.loads((tmp_path / "cpu.json").read_text())["cases"]
    assert cases["train tiny 64 lcjax"]["reason"] == "silent for 180 s (compiling)"
    assert cases["train tiny 64 jax.nn xla"]["tokens_per_second"] == 2.0, "others go on"
    assert "- train tiny 64 lcjax: silent for 180 s (compiling)" in capsys.readouterr().out
    started.clear()
    assert model.main(words) == 0 and started == ["about"]
    events |= {"train tiny 64 lcjax": FAILS}
    started.clear()
    assert model.main([*words, "--outdated"]) == 0 and started == ["about"], "no code has changed"
    assert model.main([*words, "--again"]) == 0 and started[2:] == ["train tiny 64 lcjax"]
    cases = json.loads((tmp_path / "cpu.json").read_text())["cases"]
    reason = "JaxRuntimeError: RESOURCE_EXHAUSTED (run 1)"
    assert cases["train tiny 64 lcjax"]["reason"] == reason
    peer = cases["train tiny 64 jax.nn xla"]
    unchanged = peer["about"]["jax"], peer["code"]
    old = {"lcjax/models": "old"}
    for version, code in (unchanged, ("of another JAX", peer["code"]), ("0", old)):
        peer["about"]["jax"], peer["code"] = version, code
        (tmp_path / "cpu.json").write_text(json.dumps({"cases": cases}))
        started.clear()
        assert model.main([*words, "--outdated"]) == 0
        assert ("train tiny 64 jax.nn xla" in started) == ((version, code) != unchanged)
    now = json.loads((tmp_path / "cpu.json").read_text())["cases"]["train tiny 64 jax.nn xla"]
    assert now["before"] == {"tokens_per_second": 2.0, "peak_gb": 1.0, "commit": "abc"}


def test_cases_share_processes_unless_their_peak_memory_is_compared():
    def names(cases):
        return [[case.side for case in group] for group in model.processes(cases)]

    tiny = model_runs.cases(tiny=True)
    alone = [["full"], ["cepe"], ["shared_llm"], ["offload"], ["device"]]
    assert names(tiny) == [["lcjax", "jax.nn xla"]] * 2 + alone


@pytest.fixture
def worker(monkeypatch, capsys):
    """Returns a function that does jobs as a child does and returns its events."""
    peaks = iter([3e9, 2e9, 5e9])
    for name, fake in {
        "measure": lambda case, begin: {}, "peak_bytes": lambda: next(peaks),
        "release": lambda: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(model_runs, name, fake)
    for name in ("register_event_duration_secs_listener", "register_event_listener"):
        monkeypatch.setattr(jax.monitoring, name, lambda listener: None)

    def events(jobs: list[dict]) -> list[dict]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(jobs) + "\n"))
        capsys.readouterr()
        model.main(["--worker", "--tiny"])
        lines = capsys.readouterr().out.splitlines()
        return [json.loads(line.removeprefix(MARK)) for line in lines]

    return events


def test_of_cases_in_one_process_the_peak_is_known_only_where_it_rises(worker):
    names = [name for name in TINY if not name.startswith("train")][:3]
    events = worker([{"name": name, "by": 1e9, "end": 1e9} for name in names])
    assert [x["record"]["peak_gb"] for x in events if "record" in x] == [3.0, None, 5.0]
    planned = record("train 1.1b 16384 lcjax", tokens_per_second=1.0) | {"peak_gb": None}
    assert model_report._costs(planned | {"plan_gb": 33.0})[0] == "33.0"


def test_no_case_begins_after_its_part_or_without_the_time_that_it_needs(worker):
    late, short = {"by": 0, "end": 1e9}, {"by": 1e9, "end": time.monotonic() + 30}
    for limits in (late, short):
        jobs = [{"name": name} | limits for name in TINY]
        assert worker(jobs) == [{"left": list(TINY)}]


def test_a_failure_is_of_the_code_that_ran_until_then():
    """The first case of a process fails after lcjax was imported."""
    program = (
        "import sys, json; from benchmarks.gpu import model, model_runs\n"
        "def measure(case, begin):\n"
        "    import lcjax.errors\n"
        "    begin('compiling'); raise MemoryError('no memory')\n"
        "model_runs.measure = measure; model.main(['--worker', '--tiny'])"
    )
    job = {"name": "train tiny 64 lcjax", "by": 1e9, "end": 1e9}
    run = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps([job]) + "\n",
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    events = [json.loads(x.removeprefix(MARK)) for x in run.stdout.splitlines()]
    fields = {key: value for event in events for key, value in event.items()}
    assert fields["failed"] == "MemoryError: no memory" and "lcjax/errors.py" in fields["code"]
    assert fields["within"] == model.COMPILING


def test_a_case_that_the_time_cuts_off_has_no_record(children, tmp_path, capsys):
    events, started = children
    events["train tiny 64 lcjax"] = [{"begins": "run 1"}, {"left": ["train tiny 64 lcjax"]}]
    assert model.main(["--tiny", "--out", str(tmp_path)]) == 0
    assert started == ["about", "train tiny 64 lcjax"] and not list(tmp_path.iterdir())
    assert "goes on with train tiny 64 lcjax" in capsys.readouterr().err


def test_what_is_missing_is_named_before_anything_is_measured(children, tmp_path, capsys):
    events, started = children
    events["about"] = [{"missing": ["draccus", "universal_pathlib"]}]
    assert model.main(["--tiny", "--out", str(tmp_path)]) == 2
    assert "missing: draccus, universal_pathlib" in capsys.readouterr().err
    events["about"] = [{"about": ABOUT}]
    assert model.main(["--out", str(tmp_path)]) == 2
    assert "JAX runs on cpu here" in capsys.readouterr().err
    assert started == ["about"] * 2 and not list(tmp_path.iterdir())


def test_cases_need_no_package_that_reads_data_or_checkpoints():
    code = (
        "import sys; sys.modules |= dict.fromkeys(sys.argv[1:])\n"
        "from benchmarks.gpu.model_runs import missing_packages; print(missing_packages())\n"
        "del sys.modules['fsspec']; print(missing_packages())"
    )
    command = [sys.executable, "-c", code, "grain", "orbax", "tokenizers", "gguf", "fsspec"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.splitlines() == ["['fsspec']", "[]"], done.stderr


def record(case: str, **figures) -> dict:
    kind, name, tokens, side = case.split(" ", 3)
    common = {"case": case, "kind": kind, "model": name, "tokens": int(tokens), "side": side}
    common |= {"about": {"device": "NVIDIA H100", "commit": "abc", "driver_version": "580"}}
    if "reason" in figures:
        return common | figures
    rate = figures["tokens_per_second"]
    common |= {"range": [0.9 * rate, 1.1 * rate], "attention": {"mosaic_gpu": ["call"]}}
    common |= {"peak_gb": 10.0, "compile_s": 30.0, "clocks": {"clocks.sm": "1980 MHz"}}
    return common | figures


def test_the_report_has_ratios_to_the_peers_of_each_task(tmp_path, capsys):
    trained = {"rows": 2, "remat": "dots", "mfu": 0.41}
    decoded = {"bandwidth_share": 0.5, "prefill": 2.0}
    read = {"encode": 1.0, "prefill": 1.0, "token": 0.01}
    records = [
        record("train 1.1b 16384 lcjax", tokens_per_second=30000.0, **trained),
        record("train 1.1b 16384 jax.nn cudnn", tokens_per_second=20000.0, **trained),
        record("train 1.1b 4096 jax.nn cudnn", tokens_per_second=50000.0, **trained),
        record("decode 1.1b 16384 lcjax", tokens_per_second=300.0, **decoded),
        record("decode 1.1b 16384 jax.nn xla", tokens_per_second=400.0, **decoded),
        record("read 1.1b 131072 cepe", tokens_per_second=80000.0, **read),
        record("read 1.1b 131072 full", tokens_per_second=20000.0, **read | {"peak_gb": 40.0}),
        record("read 7b 131072 full", reason="RESOURCE_EXHAUSTED: out of memory"),
    ]
    file = tmp_path / "NVIDIA_H100.json"
    file.write_text(json.dumps({"cases": {r["case"]: r for r in records}}))
    assert model.main(["--report", "--out", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "## Models on NVIDIA H100"
    rows = {tuple(line.split(" | ")[:3]): line for line in lines if line.startswith("| 1.1b")}
    assert "- read 7b 131072 full: RESOURCE_EXHAUSTED: out of memory" in lines
    assert "| 41.0 | 1.50x as fast |" in rows["| 1.1b", "16,384", "jax.nn cudnn"]
    assert "x as fast" not in rows["| 1.1b", "4,096", "jax.nn cudnn"], "lcjax has no figure there"
    assert "| 50.0 | 0.75x as fast | 8192 |" in rows["| 1.1b", "16,384", "jax.nn xla"]
    cepe = rows["| 1.1b", "131,072", "CEPE"]
    assert "| 4.00x | 10.0 | 1.00x | 10.0 | 0.25x |" in cepe and cepe.endswith("mosaic_gpu |")
    tables = [line for line in lines if line.startswith("|")]
    for title in ("| model | tokens | attention", "| model | context", "| model | tokens | side"):
        start = next(n for n, line in enumerate(tables) if line.startswith(title))
        assert len({line.count("|") for line in tables[start : start + 3]}) == 1


def test_cases_have_names_of_their_own_and_begin_with_training_at_16k():
    cases = model_runs.cases()
    assert len({case.name for case in cases}) == len(cases)
    assert cases[0].name == "train 1.1b 16k lcjax"
    assert {case.side for case in cases if case.kind == "read"} == set(model_report.SIDES)
