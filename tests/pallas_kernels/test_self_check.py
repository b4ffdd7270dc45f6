"""Which kernel a GPU runs that was not measured, and the check of kernels on first use."""

import concurrent.futures
import json
import logging
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    Alibi,
    RelativeBias,
    causal,
    dispatch,
    everything,
    explain,
    flash,
    landmark_attention,
    nvidia,
    prefix,
    self_check,
    tables,
    timings,
    window,
)
from pallas_kernels.backends.mosaic_gpu import attention as mosaic_gpu

fused = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
H100, A100, T4 = ("NVIDIA H100 80GB HBM3", "9.0"), ("NVIDIA A100-SXM4-40GB", "8.0"), ("T4", "7.5")
# A child that says every case is right, except what the test puts in front.
CHILD = """
import json, os, sys, time
sys.path.insert(0, {root!r})
assert os.environ["LCJAX_KERNEL_CHECK"] == "0"
assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
assert os.environ["JAX_PLATFORMS"] == "cuda,cpu"
name, dtype, cases = {name!r}, {dtype!r}, {cases!r}
right = dict.fromkeys(("forward", "backward"), "passed")
def say(case, of):
    print("@case " + json.dumps({{case: of}}), flush=True)
{begin}
for case in cases:
    say(case, right)
"""


def nothing(direction, choice, arrays, operands, spec):
    """In place of `dispatch.run`: results of the right shapes."""
    q, k, v = (jnp.zeros_like(x) for x in arrays[:3])
    if direction == "forward":
        return q, jnp.zeros(q.shape[:3], jnp.float32)
    return q, k, v, jax.tree.map(jnp.zeros_like, operands.bias)


class Gpu:
    """The GPU that this process seems to have."""

    def __init__(self, monkeypatch, folder):
        self.monkeypatch, self.folder, self.started, self.begin = monkeypatch, folder, [], {}

    def become(self, kind: str, capability: str, processes: int = 1):
        device = types.SimpleNamespace(device_kind=kind, compute_capability=capability)
        patch = self.monkeypatch.setattr
        patch(nvidia, "_device", lambda: device)
        patch(dispatch, "platform", lambda: "cuda")
        patch(jax, "process_count", lambda: processes)
        patch(fused, "check_cudnn_version", lambda: 91100)
        number = float(capability)
        patch(fused, "check_compute_capability", lambda least: float(least) <= number)
        patch(fused, "is_cuda_compute_capability_equal", lambda other: other == capability)
        # They are written for a newer JAX than the oldest one.
        patch(mosaic_gpu, "_kernels", lambda: None)
        patch(nvidia, "assembler", lambda: (12, 9, 86))
        patch(self_check, "command", self.command)
        patch(dispatch, "run", nothing)
        patch(dispatch, "_blocks_of", lambda *call: ())  # `test_explanations.py` has the blocks
        patch(timings, "driver", lambda: "550.54")

    def command(self, name: str, dtype: str) -> list[str]:
        self.started.append((name, dtype))
        values = dict(name=name, dtype=dtype, begin=self.begin.get(name, ""))
        values |= dict(cases=list(self_check.cases(dtype)), root=str(self.folder))
        return [sys.executable, "-S", "-c", CHILD.format(**values)]

    def restart(self):
        """As in another process."""
        self_check._results.cache_clear()
        dispatch._warn_once.cache_clear()
        self.started.clear()


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    monkeypatch.setenv(timings.VARIABLE, str(tmp_path))
    monkeypatch.delenv(self_check.SWITCH, raising=False)
    found = Gpu(monkeypatch, tmp_path)
    found.restart()
    timings._read.cache_clear()
    yield found
    found.restart()
    timings._read.cache_clear()


def shapes(t=512, s=None, size=64, dtype="bfloat16"):
    q = jax.ShapeDtypeStruct((1, t, 4, size), dtype)
    k = jax.ShapeDtypeStruct((1, s or t, 2, size), dtype)
    return q, k, k


IDS = jnp.ones((1, 512), jnp.int32)
TABLE = tables.from_block_mask(np.ones((8, 8), bool), q_block=64, k_block=64)
RELATIVE = RelativeBias(jnp.zeros((32, 4)))
# A call, its shapes, and what runs on an H100, an A100 and a T4.
OWN = ("mosaic_gpu", "triton", "xla")
CALLS = {
    "dense": (lambda *x: flash(*x), {}, OWN),
    "causal": (lambda *x: flash(*x, causal()), {}, OWN),
    "causal, float16": (
        lambda *x: flash(*x, causal()), {"dtype": "float16"}, ("mosaic_gpu", "cudnn", "xla")
    ),
    "causal window": (lambda *x: flash(*x, causal() & window(9)), {}, OWN),
    "window and first keys": (lambda *x: flash(*x, causal() & (window(9) | prefix(4))), {}, OWN),
    "documents": (lambda *x: flash(*x, causal(), q_segments=IDS, k_segments=IDS), {}, OWN),
    "table": (lambda *x: flash(*x, causal(), table=TABLE), {}, OWN),
    "decoding": (
        lambda *x: flash(*x, causal(), q_index=IDS[0, :1]), dict(t=1, s=512),
        ("triton", "triton", "xla"),
    ),
    "cross": (lambda *x: flash(*x), dict(s=1024), OWN),
    "cross, lengths": (lambda *x: flash(*x, k_lengths=IDS[0, :1]), dict(s=1024), OWN),
    "landmark": (
        lambda *x: landmark_attention(*x, 64), {}, ("triton", "triton", "xla")
    ),
    "float32": (lambda *x: flash(*x, causal()), {"dtype": "float32"}, ("triton", "triton", "xla")),
    "float32, heads of 128": (
        lambda *x: flash(*x, causal()), dict(dtype="float32", size=128), ("xla", "xla", "xla")
    ),
    "heads of 256": (lambda *x: flash(*x, causal()), dict(size=256), ("cudnn", "triton", "xla")),
    "heads of 256, table": (
        lambda *x: flash(*x, causal(), table=TABLE), dict(size=256), ("triton", "triton", "xla")
    ),
    "soft cap": (lambda *x: flash(*x, causal(), soft_cap=5.0), {}, OWN),
    "ALiBi": (
        lambda *x: flash(*x, causal(), bias=Alibi(jnp.ones(4))), {}, ("triton", "triton", "xla")
    ),
    "T5": (lambda *x: flash(*x, causal(), bias=RELATIVE), {}, ("xla", "xla", "xla")),
}  # fmt: skip


def implementations(function, inputs, d_lse=False) -> tuple[list[str], list[str]]:
    """What runs forward and backward; of the family that the function is about."""

    def loss(q, k, v):
        out, lse = function(q, k, v)
        total = jnp.sum(out.astype(jnp.float32))
        return total + jnp.sum(lse) if d_lse else total

    found = explain(jax.grad(loss, (0, 1, 2)), *shapes(**inputs))
    family = "landmark" if any("landmark" in x.call for x in found) else "flash"
    found = [x for x in found if x.call.startswith(family)]
    return tuple(
        [x.implementation for x in found if f" {way}" in x.call.split(" (")[0]]
        for way in ("forward", "backward")
    )


@pytest.mark.parametrize("device", [H100, A100, T4], ids=["H100", "A100", "T4"])
def test_unmeasured_gpus_run_the_first_kernel_that_supports_a_call(gpu, device):
    gpu.become(*device)
    column = (H100, A100, T4).index(device)
    for name, (function, inputs, wanted) in CALLS.items():
        wanted = wanted[column]
        # cuDNN's gradients are not the same in every run, so others come first.
        others = {"cudnn": "cudnn" if column == 1 and "16" in name else OWN[column]}
        if name == "heads of 256":
            others = {"cudnn": "triton"}
        found = implementations(function, inputs)
        assert found == ([wanted], [others.get(wanted, wanted)]), name
        if name == "landmark":
            continue  # its parts are merged by lse
        if column == 1:  # cuDNN takes no cotangent of lse
            others = {"cudnn": "xla"}
        found = implementations(function, inputs, d_lse=True)
        assert found == ([wanted], [others.get(wanted, wanted)]), name
    # Each backend was checked once for each dtype.
    checked = [(x, dtype) for dtype in self_check.DTYPES for x in nvidia.order()]
    assert sorted(gpu.started) == sorted(checked)


def test_a_gpu_without_rules_runs_xla(gpu):
    gpu.become("NVIDIA B200", "10.0")
    assert implementations(*CALLS["causal"][:2]) == (["xla"], ["xla"])
    assert not gpu.started


def test_results_are_read_by_later_processes_until_jax_or_the_driver_changes(gpu, monkeypatch):
    gpu.become(*H100)
    call = CALLS["causal"][:2]
    assert implementations(*call) == (["mosaic_gpu"], ["mosaic_gpu"])
    assert implementations(*CALLS["table"][:2]) == (["mosaic_gpu"], ["mosaic_gpu"])
    assert gpu.started == [(x, "bfloat16") for x in ("mosaic_gpu", "cudnn", "triton")]
    gpu.restart()
    assert implementations(*call) == (["mosaic_gpu"], ["mosaic_gpu"]) and not gpu.started
    gpu.restart()
    monkeypatch.setattr(timings, "driver", lambda: "570.1")
    assert implementations(*call) == (["mosaic_gpu"], ["mosaic_gpu"]) and len(gpu.started) == 3
    gpu.restart()
    monkeypatch.setattr(jax, "__version__", "99.0")
    assert implementations(*call) == (["mosaic_gpu"], ["mosaic_gpu"]) and len(gpu.started) == 3
    (file, *others) = gpu.folder.glob("self_check_*.json")
    assert len(others) == 2
    gpu.restart()
    file.write_text("{")  # damaged: it is run again
    for other in others:
        other.unlink()
    assert implementations(*call) == (["mosaic_gpu"], ["mosaic_gpu"]) and len(gpu.started) == 3


def wrong(case, direction):
    return f'say({case!r}, right | {{{direction!r}: "it is off"}}); cases.remove({case!r})'


DIES = 'say(cases[0], right); print("Fatal: no such instruction", flush=True); os._exit(3)'
FAILURES = {  # what children do, what runs causal calls forward and backward, what is said
    "one direction": (
        {"mosaic_gpu": wrong("causal, heads of 64", "backward")}, ("mosaic_gpu", "triton"),
        "mosaic_gpu: it is off (causal, heads of 64, backward); ",
    ),
    "another kind": (
        {"mosaic_gpu": wrong("window, heads of 128", "forward")}, ("mosaic_gpu", "mosaic_gpu"),
        "mosaic_gpu: it is off (window, heads of 128, forward); ",
    ),
    "a crash": (
        {"mosaic_gpu": DIES}, ("cudnn", "triton"), "exit code 3: Fatal: no such instruction ("
    ),
    "no result": (
        {"mosaic_gpu": "sys.exit(0)"}, ("cudnn", "triton"),
        "mosaic_gpu: it ended without a result in every case;",
    ),
    "a hang": (
        {"mosaic_gpu": "time.sleep(60)", "triton": "say('x', right); time.sleep(60)"},
        ("cudnn",) * 2, "not done in 2 s",
    ),
    "all of them": (
        dict.fromkeys(("triton", "mosaic_gpu", "cudnn"), "sys.exit(3)"), ("xla",) * 2,
        "triton: exit code 3 in every case",
    ),
    "nonsense": (
        {"mosaic_gpu": "print('@case {'); sys.exit(1)"}, ("cudnn", "triton"), "exit code 1"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILURES)
def test_a_kernel_that_fails_is_not_used_and_one_line_says_so(gpu, name, caplog, monkeypatch):
    gpu.begin, wanted, said = FAILURES[name]
    gpu.become(*H100)
    monkeypatch.setenv(self_check.SECONDS, "2" if name == "a hang" else "60")
    for _ in range(2):  # the second time it is read, and said again
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            found = implementations(*CALLS["causal"][:2])
            assert found == ([wanted[0]], [wanted[1]])
            implementations(*CALLS["causal"][:2])
        (record,) = caplog.records
        assert said in record.message and H100[0] in record.message
        assert record.message.endswith("`python -m pallas_kernels.self_check` runs it again")
        gpu.restart()


def test_kinds_are_judged_apart(gpu):
    gpu.begin = {"mosaic_gpu": wrong("documents, heads of 128", "forward")}
    gpu.become(*H100)
    # Documents with heads of 64 need those of 128, which are the case.
    assert implementations(*CALLS["documents"][:2]) == (["triton"], ["mosaic_gpu"])
    assert implementations(*CALLS["table"][:2]) == (["mosaic_gpu"], ["mosaic_gpu"])
    gpu.restart()
    for file in gpu.folder.glob("*.json"):
        file.unlink()
    gpu.begin = {"mosaic_gpu": wrong("causal, heads of 64", "forward")}
    assert implementations(*CALLS["documents"][:2]) == (["triton"], ["mosaic_gpu"])


def test_switched_off_cudnn_runs_unchecked_and_own_kernels_by_name(gpu, monkeypatch, caplog):
    monkeypatch.setenv(self_check.SWITCH, "0")
    gpu.become(*H100)
    assert implementations(*CALLS["causal"][:2]) == (["cudnn"], ["cudnn"])
    assert not caplog.records
    assert implementations(*CALLS["table"][:2]) == (["xla"], ["xla"])
    assert not gpu.started
    (record,) = caplog.records
    assert "not mosaic_gpu, not checked: LCJAX_KERNEL_CHECK=0" in record.message


def test_a_job_of_several_processes_reads_results_and_makes_none(gpu, caplog):
    gpu.become(*H100, processes=2)
    for _ in range(2):
        assert implementations(*CALLS["causal"][:2]) == (["xla"], ["xla"])
    assert not gpu.started
    (record,) = caplog.records
    assert "run `python -m pallas_kernels.self_check` on every machine" in record.message
    assert self_check.known() == dict.fromkeys(self_check.DTYPES)
    gpu.restart()
    gpu.become(*H100)
    assert self_check.main(["--dtypes", "bfloat16"]) == 0
    gpu.restart()
    gpu.become(*H100, processes=2)
    assert implementations(*CALLS["causal"][:2]) == (["mosaic_gpu"], ["mosaic_gpu"])
    assert not gpu.started and self_check.known()["bfloat16"]["cudnn"]


def test_a_described_gpu_gets_the_program_of_one_that_passes(gpu, monkeypatch):
    device = jax.sharding.AbstractDevice(device_kind=H100[0], platform="gpu", num_cores=132)
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    gpu.become(*A100)
    with jax.sharding.use_abstract_mesh(mesh):
        assert implementations(*CALLS["table"][:2]) == (["mosaic_gpu"], ["mosaic_gpu"])
    gpu.become(*H100)
    monkeypatch.setattr(nvidia, "_device", lambda: None)
    with jax.sharding.use_abstract_mesh(mesh):
        assert implementations(*CALLS["causal"][:2]) == (["mosaic_gpu"], ["mosaic_gpu"])
    assert implementations(*CALLS["table"][:2]) == (["xla"], ["xla"])  # no GPU at all
    assert not gpu.started and not list(gpu.folder.iterdir())


def test_a_mesh_of_gpus_that_are_here_is_not_a_described_one(gpu):
    device = jax.sharding.AbstractDevice(device_kind=H100[0], platform="gpu", num_cores=132)
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    gpu.become(*H100)
    with jax.sharding.use_abstract_mesh(mesh):
        assert implementations(*CALLS["table"][:2]) == (["mosaic_gpu"], ["mosaic_gpu"])
    assert len(gpu.started) == 3


def test_it_is_started_once_while_a_program_is_traced(gpu):
    gpu.become(*H100)
    q, k, v = (jnp.zeros(x.shape, x.dtype) for x in shapes())
    step = jax.jit(jax.grad(lambda q: jnp.sum(flash(q, k, v, causal())[0].astype(jnp.float32))))
    step(q)
    step(q)
    assert len(gpu.started) == 3


def test_a_measurement_comes_first_and_what_it_found_wrong_is_not_used(gpu):
    gpu.become(*H100)
    times = {"forward": {"triton": 1.0, "cudnn": 2.0, "xla": 9.0}}
    off = {timings.case_key("mosaic_gpu", "bfloat16", "blocks"): "off"}
    timings.write(gpu.folder, H100[0], {"causal, heads of 64": times}, off)
    assert implementations(*CALLS["causal"][:2]) == (["triton"], ["mosaic_gpu"])
    assert implementations(*CALLS["table"][:2]) == (["triton"], ["triton"])


@pytest.mark.parametrize("other, wanted", [(1.05, "mosaic_gpu"), (1.15, "cudnn")])
def test_gradients_that_differ_between_runs_have_to_be_much_faster(gpu, other, wanted):
    gpu.become(*H100)
    times = {x: {"cudnn": 1.0, "mosaic_gpu": other} for x in ("forward", "backward")}
    timings.write(gpu.folder, H100[0], {"causal, heads of 64": times})
    assert implementations(*CALLS["causal"][:2]) == (["cudnn"], [wanted])


def test_a_measured_kernel_has_to_pass_the_self_check_too(gpu, caplog):
    gpu.begin = {"triton": wrong("causal, heads of 64", "forward")}
    gpu.become(*H100)
    times = {"forward": {"triton": 1.0, "cudnn": 2.0}, "backward": {"triton": 1.0}}
    timings.write(gpu.folder, H100[0], {"causal, heads of 64": times})
    with caplog.at_level(logging.WARNING):
        assert implementations(*CALLS["causal"][:2]) == (["cudnn"], ["triton"])
    (record,) = caplog.records
    assert "triton: it is off (causal, heads of 64, forward)" in record.message


def test_in_a_job_of_several_processes_a_measurement_of_these_kernels_is_enough(gpu, caplog):
    gpu.become(*H100, processes=2)
    times = {x: {"triton": 1.0} for x in ("forward", "backward")}
    file = timings.write(gpu.folder, H100[0], {"causal, heads of 64": times})
    with caplog.at_level(logging.WARNING):
        assert implementations(*CALLS["causal"][:2]) == (["triton"], ["triton"])
        assert not caplog.records and not gpu.started
        file.write_text(file.read_text().replace(timings.sources(), "other"))
        timings._read.cache_clear()
        assert implementations(*CALLS["causal"][:2]) == (["xla"], ["xla"])
    (record,) = caplog.records
    assert "run `python -m pallas_kernels.self_check` on every machine" in record.message


def test_a_check_without_time_or_memory_is_made_again(gpu, monkeypatch, caplog):
    gpu.become(*H100)
    gpu.begin = {"mosaic_gpu": "time.sleep(60)"}
    monkeypatch.setenv(self_check.SECONDS, "2")
    call = CALLS["causal"][:2]
    assert implementations(*call) == (["cudnn"], ["triton"])
    gpu.restart()
    assert implementations(*call) == (["cudnn"], ["triton"]) and not gpu.started
    gpu.restart()
    monkeypatch.setenv(self_check.SECONDS, "60")
    gpu.begin = {}
    assert implementations(*call) == (["mosaic_gpu"], ["mosaic_gpu"]) and len(gpu.started) == 3
    for file in gpu.folder.glob("*.json"):
        file.unlink()
    full = '{"forward": "XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory"}'
    gpu.begin = {"mosaic_gpu": f"say(cases[1], {full}); cases.remove(cases[1])"}
    for _ in range(2):
        gpu.restart()
        assert implementations(*call)[0] == ["cudnn"] and len(gpu.started) == 3
    assert any("too little free memory" in record.message for record in caplog.records)


def test_other_libraries_and_kernels_are_checked_again(gpu, monkeypatch):
    gpu.become(*H100)
    call = CALLS["causal"][:2]
    implementations(*call)
    for module, name in ((timings, "sources"), (self_check, "_libraries")):
        gpu.restart()
        monkeypatch.setattr(module, name, lambda: "changed")
        implementations(*call)
        assert len(gpu.started) == 3


def test_processes_that_start_at_the_same_time_check_once(gpu):
    gpu.become(*H100)
    of = tuple(self_check.key("bfloat16").items())
    check = self_check._results.__wrapped__
    with concurrent.futures.ThreadPoolExecutor() as pool:  # each opens the lock for itself
        found = list(pool.map(lambda _: check(timings.folder(), of), range(4)))
    assert len(gpu.started) == 3 and all(one == found[0] for one in found)


def test_calls_with_grouped_heads_need_a_case_whose_dk_are_computed_apart(gpu):
    gpu.become(*H100)
    gpu.begin = {"mosaic_gpu": wrong("grouped heads", "backward")}
    for name in ("table", "causal"):
        assert implementations(*CALLS[name][:2])[1] == ["triton"]
    case = self_check.cases("bfloat16")["grouped heads"]
    q, k, v = (jnp.asarray(x) for x in self_check.arrays(case, "bfloat16")[:3])
    operands, spec = dispatch.Operands(), dispatch.Spec(causal(), 1.0)
    kernel = mosaic_gpu.D_KEYS
    tiles = mosaic_gpu._tiles(kernel, q, v, operands, spec)
    blocks = mosaic_gpu.blocks(tiles, q, k)
    tiling = mosaic_gpu.make_tiling(kernel, tiles, q, k, *blocks)
    assert mosaic_gpu._has_few_programs(tiling, q, k, v)


def test_explain_says_what_has_passed(gpu):
    gpu.begin = {"triton": "sys.exit(1)"}
    gpu.become(*H100)
    (found,) = explain(lambda *x: flash(*x, causal(), table=TABLE), *shapes(size=128))
    said = dict(found.reasons)
    passed = "passed the self-check: blocks, heads of 64; causal, heads of 128; grouped heads"
    assert said["mosaic_gpu"] == passed
    assert said["cudnn"] == said["triton"] == "another backend is preferred"
    (found,) = explain(lambda *x: flash(*x, causal(), bias=Alibi(jnp.ones(4))), *shapes())
    said = dict(found.reasons)
    assert said["triton"] == "self-check: causal, heads of 64, forward: exit code 1"
    assert found.implementation == "xla"


def test_the_command_prints_results(gpu, capsys, caplog):
    gpu.become(*A100)
    gpu.begin = {"triton": 'say(cases[0], {"unsupported": "why"}); cases.remove(cases[0])'}
    assert self_check.main([]) == 0
    said = capsys.readouterr().out
    assert "cudnn      soft cap: forward passed, backward passed" in said
    assert "triton     causal, heads of 128: unsupported why" in said
    gpu.begin = {"triton": "sys.exit(1)"}
    assert self_check.main(["--dtypes", "float16"]) == 1
    gpu.become(*T4)
    assert self_check.main([]) == 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_cases_are_calls_of_their_kinds(dtype):
    for name, case in self_check.cases(dtype).items():
        if name in (self_check.BIAS, self_check.CAP, self_check.GROUPS, self_check.GROUPED):
            continue
        inputs = self_check.arrays(case, dtype)
        if dtype == "bfloat16":
            calls = explain(self_check.program(case, "xla", False), *inputs)
            if case.call == self_check.DELTA_RULE:
                assert name == self_check.needed_by_delta_rule(dtype, case.size)
                assert "gated_delta_rule" in str(calls[0])
                continue
            assert name in {x.kind for x in calls}
        q, k, v = inputs[:3]
        assert {x.dtype for x in (q, k, v)} == {jnp.dtype(dtype)}


def test_the_child_finds_kernels_right_or_wrong(monkeypatch, capsys):
    """Its own code, with XLA in place of a kernel, and one that is a little off."""
    from pallas_kernels.backends.xla import attention as xla

    few = {x: self_check.cases("bfloat16")[x] for x in ("causal, heads of 64", "soft cap")}
    monkeypatch.setattr(self_check, "cases", lambda dtype: few)

    def found(name):
        self_check.child(name, "bfloat16")
        lines = capsys.readouterr().out.splitlines()
        return {x: y for line in lines for x, y in json.loads(line[len(self_check.MARK) :]).items()}

    right = dict.fromkeys(("forward", "backward"), self_check.PASSED)
    assert found("xla") == dict.fromkeys(few, right)
    assert found("triton")["soft cap"] == {
        "unsupported": "it runs on cuda and this process runs on cpu"
    }

    def one_row_off(*inputs, **options):
        out, lse = xla.forward(*inputs, **options)
        return out.at[0, -1, 0].multiply(1.5), lse

    def no_gradients(*inputs, **options):
        raise RuntimeError("no such instruction")

    module = types.ModuleType("a_wrong_kernel")
    module.forward, module.backward = one_row_off, xla.backward
    module.unsupported = lambda *inputs: None
    monkeypatch.setitem(sys.modules, module.__name__, module)
    backend = dispatch.Backend(module.__name__, ("cpu",), takes_d_lse=False)
    monkeypatch.setitem(dispatch.BACKENDS, "wrong", backend)
    dispatch.run.clear_cache()
    del few["causal, heads of 64"]
    assert "relative error of out" in found("wrong")["soft cap"]["forward"]
    module.forward, module.backward = xla.forward, no_gradients
    dispatch.run.clear_cache()
    report = found("wrong")["soft cap"]
    assert report["backward"] == "RuntimeError: no such instruction"
    dispatch.run.clear_cache()


@pytest.mark.slow
def test_a_child_process_checks_a_backend(monkeypatch):
    """The command as it is run, on the CPU."""
    found = self_check.check_in_children(["xla"], "float32", 300.0, platforms="cpu")
    assert not self_check.failures(found)
    assert list(found["xla"]) == list(self_check.cases("float32"))


def test_the_command_says_where_there_is_nothing_to_check():
    done = subprocess.run(
        [sys.executable, "-m", "pallas_kernels.self_check"], capture_output=True, text=True
    )
    assert done.returncode == 2 and "no kernel runs" in done.stdout


def test_errors_are_of_single_numbers_too():
    x = np.random.default_rng(0).normal(size=(64, 64))
    y = x.copy()
    assert self_check.error_of(y, x) == 0.0
    y[3, 5] += 1.0
    assert self_check.error_of(y, x) > 0.1
    y[3, 5] = np.nan
    assert not self_check.error_of(y, x) < 1.0
    x[0, 0] = -np.inf
    assert not self_check.error_of(np.zeros_like(x), x) < 1.0


def test_everything_of_a_wrong_setting_is_named(gpu, monkeypatch):
    gpu.become(*H100)
    for setting in ("soon", "0", "nan", "-1", "inf"):
        monkeypatch.setenv(self_check.SECONDS, setting)
        message = f"LCJAX_KERNEL_CHECK_SECONDS='{setting}' is no number of seconds above 0"
        with pytest.raises(ValueError, match=message):
            explain(lambda *x: flash(*x, everything()), *shapes())
