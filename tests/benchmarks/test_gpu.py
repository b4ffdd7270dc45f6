"""What is to be run on a GPU runs here: `benchmarks.gpu.attention` and `benchmarks.gpu.check`."""

import copy
import functools
import json
import runpy
import subprocess
import sys
import time
import types

import jax
import numpy as np
import pytest

from benchmarks.gpu import attention, check, implementations, measure, records, report
from benchmarks.gpu.runs import JaxRun
from benchmarks.gpu.workers import ROOT, supervise
from benchmarks.gpu.workloads import workloads
from pallas_kernels import by_heads
from pallas_kernels.dispatch import BACKENDS, Backend

SMALL = {w.name: w for w in workloads(unit=8) if (w.heads, w.size) == (2, 32)}
EVERY = pytest.mark.parametrize("w", SMALL.values(), ids=list(SMALL))


@pytest.fixture(scope="module", autouse=True)
def device_described_once():
    """Every run asks a new process for the device. Here the first one does so for all runs."""
    describe = functools.cache(records.about_here)
    with pytest.MonkeyPatch.context() as patch:
        for module in (records, check):
            patch.setattr(module, "about_here", lambda: copy.deepcopy(describe()))
        yield


def visible(w):
    """bool [N, T, S] of all pairs."""
    q, k = np.arange(w.t)[:, None], np.arange(w.s)
    parts = [np.repeat(m.element(q, k)[None], n, 0) for m, n in by_heads(w.mask, w.heads)]
    seen = np.concatenate(parts)
    if w.documents:
        seen = seen & (w.segments[0][:, None] == w.segments[0])
    if w.filled is not None:
        seen = seen & (k < w.filled)
    return seen if w.listed is None else seen & w.listed[q // w.block, k // w.block]


@EVERY
def test_counted_pairs_are_those_that_are_visible(w):
    seen = visible(w)
    height = min(w.block, w.t)
    blocks = seen.reshape(w.heads, w.t // height, height, w.s // w.block, w.block)
    found, visited = w.pairs
    assert found == seen.sum()
    assert visited == blocks.any((2, 4)).sum() * height * w.block
    assert w.flops("fwd") == (4 * w.size * found, 4 * w.size * visited)


@pytest.mark.slow  # importing torch is
@EVERY
def test_torch_masks_equal_block_masks(w):
    torch = pytest.importorskip("torch")
    if w.landmark:
        with pytest.raises(implementations.Unavailable, match="no FlexAttention mask"):
            implementations.mask_mod(w, "cpu")
        return
    seen, mod = visible(w), implementations.mask_mod(w, "cpu")
    h, q, k = (torch.arange(n) for n in (w.heads, w.t, w.s))
    found = torch.broadcast_to(mod(0, h[:, None, None], q[:, None], k), seen.shape).numpy()
    blocks = implementations.block_mask(w, "cpu").to_dense()[0].numpy().astype(bool)
    listed = blocks.repeat(w.block, 1).repeat(w.block, 2)[:, : w.t, : w.s]
    np.testing.assert_array_equal(found & listed, seen)


def test_a_run_writes_rows_of_all_sides_and_tables(tmp_path, capsys):
    options = ["--cpu", "--only", "a causal, 32 x 32, 2/2 heads of 16", "--seconds", "0"]
    options += ["--sides", "lcjax|^jax|tokamax", "--passes", "fwd", "bwd"]
    assert attention.main([*options, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    (file,) = tmp_path.glob("*.json")
    content = json.loads(file.read_text())
    (run,) = content["runs"]
    assert run["about"]["platform"] == "cpu" and run["ceilings"]["matmul"] > 0
    assert run["clocks"] == {content["rows"][0]["workload"]: {}}, "nvidia-smi is asked after it"
    rows = {(row["side"], row["pass"]): row for row in content["rows"]}
    assert len(rows) == len(content["rows"]) == 2 * len({side for side, _ in rows})
    for which in ("fwd", "bwd"):
        ours = rows["lcjax xla", which]
        assert ours["ms"] > 0 and ours["same_bits"] and ours["error"] < 0.01
        assert set(ours["errors"]) == {"out", "dq", "dk", "dv"}
        assert ours["kept_bytes"] >= 4 * ours["array_bytes"]
        assert "it runs on cuda" in rows["lcjax triton", which]["reason"]
        assert rows["jax.nn cudnn", which]["reason"]
    assert rows["lcjax xla", "fwd"]["useful_tflops"] == pytest.approx(
        4 * 16 * 2 * (32 * 33 // 2) / rows["lcjax xla", "fwd"]["ms"] / 1e9
    )
    # The same command has nothing left to measure.
    assert attention.main([*options, "--out", str(tmp_path)]) == 0
    assert "which has 2 workloads" in capsys.readouterr().out
    assert json.loads(file.read_text())["rows"] == content["rows"]
    assert attention.main(["--report", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() in printed
    assert attention.main(["--report", "--out", str(tmp_path / "none")]) == 0
    assert "No workload has results" in capsys.readouterr().out
    text = (tmp_path / f"{file.stem}.md").read_text()
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in tables if "lcjax xla" in line}) == 1
    assert printed.rindex("## Targets") > printed.rindex("## Milliseconds")


def test_results_of_other_kernels_stay_until_their_workload_is_measured_again(tmp_path, capsys):
    def name(length):
        return f"a causal, {length} x {length}, 2/2 heads of 16"

    def measured(length, *options):
        common = ["--cpu", "--seconds", "0", "--sides", "lcjax xla", "--passes", "fwd"]
        words = ["--only", name(length), "--out", str(tmp_path)]
        assert attention.main([*common, *words, *options]) == 0

    (file,) = [tmp_path / "cpu.json"]
    measured(32)
    content = json.loads(file.read_text())
    content["runs"][0]["about"]["kernels"] = "others"
    file.write_text(json.dumps(content))
    measured(128)
    content = json.loads(file.read_text())
    assert [r["about"]["kernels"] == "others" for r in content["runs"]] == [True, False]
    assert [(r["workload"], r["run"]) for r in content["rows"]] == [(name(32), 0), (name(128), 1)]
    capsys.readouterr()
    words = ["--cpu", "--outdated", "--only", "a causal,", "--out", str(tmp_path)]
    about = content["runs"][1]["about"]
    left = attention.left(attention.arguments(words), about)
    assert left == (left[1] - 1, left[1]), "one has results of today's kernels"
    run = attention.Report(attention.arguments([*words, "--passes", "fwd", "--sides", "lcjax xla"]))
    run.resume(about)
    assert run.names()[-1] == name(32), "what was never measured comes first"
    measured(128, "--outdated")
    assert json.loads(file.read_text())["rows"] == content["rows"], "nothing was left"
    measured(32, "--outdated")
    content = json.loads(file.read_text())
    assert len(content["runs"]) == 1, "the first run has no rows any more"
    assert {(r["workload"], r["run"]) for r in content["rows"]} == {(name(32), 0), (name(128), 0)}


def test_without_a_gpu_nothing_is_begun_and_the_way_out_is_said(tmp_path, capsys):
    assert attention.main(["--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "JAX runs on cpu here" in said and "--cpu" in said
    assert not list(tmp_path.iterdir())


@pytest.fixture
def wrong(monkeypatch):
    """A backend whose outputs are a little too large."""
    from pallas_kernels.backends.xla import attention as _xla

    def forward(*inputs, **options):
        out, lse = _xla.forward(*inputs, **options)
        return 1.1 * out, lse

    module = types.ModuleType("wrong_backend")
    module.forward, module.backward, module.unsupported = forward, _xla.backward, _xla.unsupported
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(BACKENDS, "wrong", Backend(module.__name__, ("cpu",)))
    yield "wrong"
    jax.clear_caches()


def test_wrong_results_are_called_wrong(wrong, tmp_path, capsys):
    options = ["--cpu", "--only", "a causal, 32 x 32, 2/2 heads of 16", "--seconds", "0"]
    options += ["--sides", "lcjax", "--passes", "fwd", "--out", str(tmp_path)]
    assert attention.main(options) == 1
    assert " WRONG |" in capsys.readouterr().out


@pytest.mark.slow
def test_what_was_fastest_is_kept_unless_it_was_wrong_for_such_calls(
    wrong, tmp_path, monkeypatch, capsys
):
    log = check.Log(["wrong", "xla"])
    monkeypatch.setattr(check, "run", lambda args, options, earlier: log)
    options = ["--cpu", "--only", "a causal, 32 x 32, 2/2 heads of 16", "--seconds", "0"]
    options += ["--sides", "lcjax (xla|wrong)", "--out", str(tmp_path / "report")]
    attention.main([*options, "--keep", str(tmp_path)])
    assert "- never wrong, bfloat16, few queries: wrong in a causal" in capsys.readouterr().out
    found = json.loads((tmp_path / "cpu.json").read_text())
    assert list(found["wrong"]) == ["wrong, bfloat16, few queries"]
    (times,) = found["milliseconds"].values()
    assert list(found["milliseconds"]) == ["few queries, heads of 64"]
    assert {x: set(of) for x, of in times.items()} == {"forward": {"xla"}, "backward": {"xla"}}


def test_implementations_are_ranked_on_the_workload_that_most_of_them_did():
    def row(workload, side, ms, **more):
        start = {"workload": workload, "kind": "causal, heads of 64", "pass": "fwd", "side": side}
        return start | {"ms": ms, "error": 0.001, "same_bits": True} | more

    rows = [
        row("a long", "lcjax triton", 5.0), row("a short", "lcjax triton", 2.0),
        row("a short", "lcjax xla", 8.0), row("a short", "jax.nn cudnn", 1.0),
        row("a short", "lcjax cudnn", 1.0), row("i", "lcjax xla", 1.0, kind=None),
        row("a short", "lcjax mosaic_gpu", 1.0), row("a long", "lcjax other", 1.0, error=0.1),
        row("a short", "lcjax xla", 9.0) | {"pass": "bwd"},
        row("a short", "lcjax cudnn", 1.5, same_bits=False) | {"pass": "bwd"},
    ]  # fmt: skip
    rows.append(row("a short", "lcjax apart", 0.5, same_bits=False))
    failed = {"backend": "mosaic_gpu", "case": "a case", "status": "FAIL", "why": "it is off"}
    others = failed | {"backend": "triton", "case": "of float32"}
    lost = [{"lost": "b", "step": x, "why": "silent"} for x in ("lcjax triton", "torch", None)]
    forms = {"a short": {"causal"}, "a long": {"causal"}, "b": {"window"}}
    calls = {"a case": ("bfloat16", {"documents", "causal"}), "of float32": ("float32", {"causal"})}
    wrong = report.wrong_implementations(
        rows, [failed, others], lost, forms.__getitem__, calls.__getitem__
    )
    assert list(wrong) == [
        "other, bfloat16, causal", "apart, bfloat16, causal", "mosaic_gpu, bfloat16, causal",
        "mosaic_gpu, bfloat16, documents", "triton, float32, causal", "triton, bfloat16, window",
    ]  # fmt: skip
    assert wrong["mosaic_gpu, bfloat16, causal"] == "a case: it is off"
    assert "b: silent" in wrong["triton, bfloat16, window"]
    # Two runs of cuDNN's backward pass may differ in bits, and those of its forward pass not.
    times = {
        "forward": {"triton": 2.0, "xla": 8.0, "cudnn": 1.0}, "backward": {"xla": 9.0, "cudnn": 1.5}
    }  # fmt: skip
    kept = report.milliseconds(rows, wrong)
    assert kept == {"causal, heads of 64": times}
    line = "- causal, heads of 64: forward cudnn 1.00 ms, backward cudnn 1.50 ms"
    assert report.fastest(kept) == line
    varying = row("a short", "lcjax cudnn", 1.0, same_bits=False)
    assert not report.is_right(varying) and report.is_right(varying | {"pass": "both"})


def test_the_check_exempts_gradients_that_are_added_up_in_any_order():
    one, other = ({"out": np.zeros(2), "lse": np.ones(2), "dq": np.full(2, x)} for x in (1.0, 2.0))
    for backend, status in (("cudnn", "ok"), ("triton", "FAIL")):
        assert check._same(check._reproducible([one, other], backend), "")[0] == status
    changed = one | {"out": np.ones(2)}
    assert check._same(check._reproducible([one, changed], "cudnn"), "")[0] == "FAIL"


def test_cases_of_the_check_have_a_dtype_and_forms():
    names = {
        "tiles, float16: documents, two rows": ("float16", {"documents"}),
        "tiles, bfloat16: masks per head": ("bfloat16", {"causal", "window"}),
        "small, float32: a table": ("float32", {"blocks"}),
        "decode, bfloat16: window": ("bfloat16", {"few queries"}),
    }
    assert {name: check.calls_of(name) for name in names} == names


def test_what_is_kept_is_written_after_every_workload(tmp_path):
    args = attention.arguments(["--cpu", "--keep", str(tmp_path), "--out", str(tmp_path / "out")])
    events = attention.Report(args)
    events.take(about={"device": "some GPU"})
    name = next(iter(SMALL))
    events.take(lost=name, step="lcjax triton", why="silent", again=True)
    wrong = json.loads((tmp_path / "some_GPU.json").read_text())["wrong"]
    assert all(x.startswith("triton, bfloat16, ") for x in wrong) and wrong


@pytest.mark.slow
def test_every_kind_of_call_that_is_dispatched_is_timed_unless_groups_are_chosen():
    every = measure.chosen(attention.arguments([]))
    assert {w.kind for w in every} >= {
        f"{form}, heads of {size}"
        for form in ("causal", "dense", "window", "documents", "blocks", "cross", "few queries",
                     "landmark")
        for size in (64, 128)
    }  # fmt: skip
    assert {w.group for w in measure.chosen(attention.arguments(["--group", "aj"]))} == {"a", "j"}


def test_the_device_is_said_before_a_job_can_end_the_process():
    events = []
    measure.work([], attention.arguments(["--cpu"]), lambda **event: events.append(event))
    assert events[0]["about"]["device"] == "cpu"


def test_the_check_passes_right_results_and_fails_wrong_ones(wrong, capsys):
    only = ["--cpu", "--only", "small, float32: causal, odd"]
    assert check.main([*only, "--backends", "xla"]) == 0
    assert "ok   xla" in capsys.readouterr().out
    assert check.main([*only, "--backends", "wrong"]) == 1
    assert "FAIL wrong" in capsys.readouterr().out


def test_a_run_that_checks_first_reports_failures(tmp_path, monkeypatch, capsys):
    log = check.Log(["some"])
    log.take(row={"backend": "some", "case": "this one", "status": "FAIL", "why": "it is wrong"})
    monkeypatch.setattr(check, "run", lambda args, options, earlier: log)
    options = ["--cpu", "--check", "--only", "nothing has this name", "--out", str(tmp_path)]
    assert attention.main(options) == 1
    report = capsys.readouterr().out
    assert "FAIL some       this one: it is wrong; some: 0 ok, 0 skip, 1 FAIL" in report


def test_a_check_is_not_repeated_until_the_code_of_an_implementation_changes(
    tmp_path, monkeypatch, capsys
):
    file = tmp_path / "cpu.json"
    words = ["--cpu", "--only", "small, float32: causal, odd", "--results", str(file)]
    about = records.describe()
    assert check.left(check.arguments(words), about) == (1, 1)
    assert check.main(words) == 0 and "ok   xla" in capsys.readouterr().out
    assert check.left(check.arguments(words), about) == (0, 1)
    assert check.main(words) == 0
    printed = capsys.readouterr().out
    assert "xla: 1 ok, 0 skip, 0 FAIL" in printed and "ok   xla" not in printed
    # A case two_cases, as if the check had been cut off before it: only this one is checked.
    two_cases = ["--cpu", "--only", "small, float32: odd", "--results", str(file)]
    missing, count = check.left(check.arguments(two_cases), about)
    assert (missing, count) == (1, 2)
    record = json.loads(file.read_text())["cases"]["xla"]
    assert "pallas_kernels/backends/xla" in record["code"]
    assert "tests/pallas_kernels/attention_oracle.py" in record["code"]
    assert "pallas_kernels/backends/tpu" not in record["code"]
    monkeypatch.setattr(records, "_hash", lambda x: "changed" if x.endswith("masks.py") else "")
    assert check.left(check.arguments(words), about) == (1, 1)


def test_the_check_fails_where_nothing_could_run(capsys):
    only = ["--cpu", "--only", "small, float32: causal, odd"]
    assert check.main([*only, "--backends", "mosaic_gpu"]) == 1
    assert "skip mosaic_gpu" in capsys.readouterr().out


def test_every_result_is_written_over_nan():
    import attention_oracle as oracle

    case = oracle.Case(batch=1, t=9, s=9, heads=1, kv_heads=1, size=8, v_size=8)
    run, poisons = check.poisoned(oracle.program(case, "xla"), oracle.inputs(case))
    results = run()
    assert poisons == sum(x.nbytes for x in results.values())
    assert all(np.isfinite(x).all() for x in results.values())


class Broken:
    """A program that its compiler does not take."""

    def compile(self):
        raise RuntimeError("no such instruction")


@pytest.mark.parametrize("when", ["traced", "compiled"])
def test_a_side_without_a_backward_pass_is_timed_forward(when):
    w = next(iter(SMALL.values()))
    call = w.attention("xla")
    if when == "traced":
        call = jax.custom_vjp(call)
        call.defvjp(lambda *x: (call(*x), None), lambda *_: 1 / 0)
    run = JaxRun(call, w, w.arrays(), ("fwd", "bwd"), 1.0)
    if when == "compiled":
        run.lowered |= {"check": Broken(), "bwd": Broken()}
    for name in reversed(list(run.lowered)):
        run.compile(name)
    assert run.check().keys() == {"out"} and run.sample("fwd") > 0
    assert run.ready("fwd") and not run.ready("bwd")
    said = {"traced": "division by zero", "compiled": "no such instruction"}
    assert said[when] in run.reasons["bwd"]


CHILD = """
import sys, time
from benchmarks.gpu.workers import emit, jobs_of_child
for job in jobs_of_child():
    emit(job=job["name"])
    for step in ("good", "dies", "waits"):
        if step in job["skip"]:
            continue
        emit(step=step)
        if step == "dies" and job["name"] != "c":
            sys.exit(7)
        if step == "waits" and job["name"] == "a":
            time.sleep(60)
        emit(row=[job["name"], step])
    emit(done=job["name"])
"""


def test_steps_that_die_or_hang_are_left_out_and_the_rest_is_done():
    command = [sys.executable, "-c", CHILD]
    jobs = [{"name": name} for name in "abc"]
    deadline = time.monotonic() + 30
    events = list(supervise(command, jobs, deadline=deadline, patience=2.0))
    lost = [(e["lost"], e["step"], e["why"]) for e in events if "lost" in e]
    assert lost == [
        ("a", "dies", "exit code 7"), ("a", "waits", "silent for 2 s"), ("b", "dies", "exit code 7")
    ]  # fmt: skip
    assert [e["done"] for e in events if "done" in e] == ["a", "b", "c"]
    rows = [tuple(e["row"]) for e in events if "row" in e]
    # "dies" was lost in two jobs, so "c" is spared it.
    assert rows[-3:] == [("b", "waits"), ("c", "good"), ("c", "waits")]


CRASHES = """
import os, sys
from benchmarks.gpu.workers import emit, jobs_of_child
for job in jobs_of_child():
    emit(job=job["name"])
    for side in ("right", "crashes"):
        if side not in job["skip"]:
            emit(step=side if job.get("alone") else None)
            if side == "crashes":
                os._exit(9)
    emit(row=[job["name"], job["skip"]])
    emit(done=job["name"])
"""


def test_a_crash_without_a_step_is_found_by_doing_one_thing_after_another():
    jobs = [{"name": "a", "alone": False}, {"name": "b"}]
    deadline = time.monotonic() + 30
    events = list(supervise([sys.executable, "-c", CRASHES], jobs, deadline=deadline, patience=9.0))
    lost = [(e["lost"], e["step"], e["again"]) for e in events if "lost" in e]
    assert lost == [("a", None, True), ("a", "crashes", True), ("b", None, False)]
    assert [e["row"] for e in events if "row" in e] == [["a", ["crashes"]]]


@pytest.mark.parametrize("alone", [False, True])
def test_a_compiler_that_hangs_costs_its_side_and_not_the_workload(alone, monkeypatch):
    class Run:
        def __init__(self, side):
            self.lowered, self.reasons, self.side = ["fwd"], {}, side

        def compile(self, name):
            time.sleep(1.5 if self.side == "b" else 0.0)

    def end(code):
        raise SystemExit(code)

    monkeypatch.setattr(measure, "COMPILING", 0.2)
    monkeypatch.setattr(measure.os, "_exit", end)
    monkeypatch.setattr(measure.implementations, "names", lambda: dict.fromkeys("abc", "jax"))
    monkeypatch.setattr(measure.implementations, "attention", lambda side, w: side)
    monkeypatch.setattr(measure, "JaxRun", lambda side, *_: Run(side))
    events, args = [], attention.arguments(["--cpu", "--sides", "."])
    job = {"name": "w", "skip": [], "alone": alone}
    with pytest.raises(SystemExit, match="4"):
        measure.begin(None, (), args, job, lambda **event: events.append(event))
    assert events[-1] == {"step": "b"}


def test_jobs_that_time_leaves_no_room_for_are_named():
    command = [sys.executable, "-c", CHILD]
    jobs = [{"name": "a", "skip": ["dies"]}, {"name": "b"}]
    *_, last = supervise(command, jobs, deadline=time.monotonic() + 1.5, patience=50.0)
    assert last == {"left": ["a", "b"]}


def test_the_check_runs_in_processes_of_its_own_from_any_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    only = ["--only", "small, float32: causal, odd", "--backends", "xla", "--processes", "1"]
    assert check.main(only) == 0
    assert "xla: 1 ok, 0 skip, 0 FAIL" in capsys.readouterr().out


EVERYTHING = """
import importlib, pkgutil, sys
sys.modules |= dict.fromkeys(sys.argv[1:])  # None: importing it is an error
import benchmarks.gpu
for module in pkgutil.iter_modules(benchmarks.gpu.__path__):
    importlib.import_module(f"benchmarks.gpu.{module.name}")
benchmarks.gpu.check.cases(0)
"""


def test_it_is_imported_where_nothing_but_jax_and_numpy_is_installed():
    absent = ["lcjax", "flax", "optax", "orbax", "grain", "draccus", "seqio", "jaxtyping", "torch"]
    absent += ["transformers", "tokenizers", "matplotlib", "pyarrow", "yaml", "tqdm", "hypothesis"]
    command = [sys.executable, "-c", EVERYTHING, *absent]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize(
    "words, said",
    [
        (("attention", "--cpu", "--minutes", "0"), "workloads were not reached"),
        (("check", "--cpu", "--minutes", "0"), "cases were not reached"),
        (("compile", "--help"), "usage: compile.py"),
    ],
    ids=["attention", "check", "compile"],
)
def test_its_modules_are_commands(words, said, tmp_path, monkeypatch, capsys):
    name = f"benchmarks.gpu.{words[0]}"
    options = ["--out", str(tmp_path)] if words[0] == "attention" else []
    monkeypatch.setattr(sys, "argv", [name, *words[1:], *options])
    monkeypatch.delitem(sys.modules, name, raising=False)  # as where nothing has imported it
    with pytest.raises(SystemExit):
        runpy.run_module(name, run_name="__main__", alter_sys=True)  # what `python -m` does
    assert said in capsys.readouterr().out


def test_targets_are_judged_by_their_levels():
    def row(workload, which, side, ms, rate, **more):
        return {
            "workload": workload, "group": workload[0], "pass": which, "side": side, "ms": ms,
            "shape": "another", "density": None, "visited_share": 0.5, "error": 0.004,
            "same_bits": True, "useful_tflops": rate, "executed_tflops": rate, "compile_s": 3.0,
            "kept_bytes": 410, "peak_bytes": 920, "array_bytes": 100,
        } | more  # fmt: skip

    causal = report.CAUSAL + "128"
    rows = [
        row(causal, "fwd", "lcjax triton", 2.0, 400.0),
        row(causal, "fwd", "lcjax mosaic_gpu", 1.0, 630.0),
        row(causal, "fwd", "jax.nn cudnn", 0.9, 700.0),
        row(causal, "both", "lcjax triton", 3.0, 500.0),
        row(causal, "bwd", "lcjax mosaic_gpu", 9.0, 900.0, error=float("nan")),
    ]
    for share, ms in ((1.0, 8.0), (0.125, 1.25), (0.05, 0.44)):
        name, more = f"f blocks {100 * share:g} %", {"visited_share": share, "density": share}
        rows.append(row(name, "fwd", "lcjax triton", ms, 1.0, shape="16k x 16k", **more))
    rows = report.with_ratios(rows)
    assert rows[1]["speed_to"] == {"jax.nn cudnn": pytest.approx(0.9)}
    lines = report.targets(rows, {"static_ms": 15.0, "traced_share": 0.04}).splitlines()[2:]
    met = {x.split(" | ")[0].strip("| "): x.split(" | ")[-1].strip(" |") for x in lines}
    assert met["forward causal 16k, heads of 128"] == "good"  # not excellent: 0.90 of cuDNN
    assert met["backward causal 16k, heads of 128"] == "?"  # its results are wrong
    assert met["block-sparse efficiency"] == "floor"  # 0.80 and 0.91
    assert met["table of 128k: static; traced"] == "good"
    assert met["memory: kept for the backward pass, and at most"] == "excellent"
    assert met["compile time, slowest of ours"] == "good"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["decode, bfloat16: window", "Landmark: tiny", "documents, two"])
def test_every_kind_of_case_is_checked(name, capsys):
    assert check.main(["--cpu", "--only", name]) == 0
    assert "xla 0 ok" not in capsys.readouterr().out


@pytest.mark.slow
def test_interpreted_kernels_and_torch_take_part(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setitem(BACKENDS, "triton", BACKENDS["triton"])  # is put back afterwards
    options = ["--cpu", "--interpret", "--only", "causal, 32 x 32, 2/2 heads of 16"]
    options += ["--seconds", "0", "--sides", "lcjax|torch", "--out", str(tmp_path)]
    try:
        assert attention.main(options) == 0
    finally:
        jax.clear_caches()
    (file,) = tmp_path.glob("*.json")
    rows = json.loads(file.read_text())["rows"]
    for side in ("lcjax triton", "torch flash"):
        found = [row for row in rows if row["side"] == side]
        assert len(found) == 3
        assert all(row["ms"] > 0 and row["error"] < 0.01 for row in found)
    assert any(row["side"] == "torch flex" and "on GPUs only" in row["reason"] for row in rows)
