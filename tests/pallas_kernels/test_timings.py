"""Where implementations were measured, the fastest right one runs."""

import contextlib
import json
import logging
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    causal,
    dispatch,
    everything,
    explain,
    flash,
    landmark_attention,
    nvidia,
    tables,
    timings,
    window,
)
from pallas_kernels.dispatch import BACKENDS, Backend

DEVICE = "NVIDIA H200"


def shapes(t=256, s=256, heads=4, size=64, dtype="bfloat16", rows=2):
    return [jax.ShapeDtypeStruct((rows, n, heads, size), dtype) for n in (t, s, s)]


@contextlib.contextmanager
def described(kind=DEVICE):
    device = jax.sharding.AbstractDevice(device_kind=kind, platform="gpu", num_cores=132)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        yield


def kinds(function, arrays):
    return [found.kind for found in explain(function, *arrays)]


IDS = jnp.ones((2, 256), jnp.int32)
BLOCKS = tables.from_block_mask(np.ones((4, 4), bool), q_block=64, k_block=64)
CALLS = {
    "causal, heads of 64": (lambda *x: flash(*x, causal()), {}),
    "dense, heads of 128": (lambda *x: flash(*x), dict(size=72)),
    "window, heads of 256": (lambda *x: flash(*x, causal() & window(9)), dict(size=200)),
    "documents, heads of 64": (
        lambda *x: flash(*x, causal(), q_segments=IDS, k_segments=IDS), dict(size=32)
    ),
    "blocks, heads of 64": (lambda *x: flash(*x, causal(), table=BLOCKS), {}),
    "cross, heads of 64": (lambda *x: flash(*x, k_lengths=IDS[:, 0]), dict(s=512)),
    "few queries, heads of 64": (lambda *x: flash(*x, causal(), q_index=IDS[0, :1]), dict(t=1)),
    None: (lambda *x: flash(*x, causal()), dict(dtype="float32")),
}  # fmt: skip


@pytest.mark.parametrize("kind", CALLS)
def test_calls_have_kinds(kind):
    function, inputs = CALLS[kind]
    assert kinds(function, shapes(**inputs)) == [kind]


def test_landmark_attention_is_a_kind_beside_its_own_blocks():
    found = kinds(lambda *x: landmark_attention(*x, 64), shapes())
    assert "landmark, heads of 64" in found and len(found) == 2


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    """This process counts as one with an H200, whose kernels are constants; yields the folder."""
    monkeypatch.setenv(timings.VARIABLE, str(tmp_path))
    monkeypatch.setattr(nvidia, "ORDER", {})  # nothing runs there without a measurement
    monkeypatch.setattr(dispatch, "platform", lambda: "cuda")
    for name, takes in {"quick": True, "quicker": False, "refusing": True}.items():
        module = types.ModuleType(f"measured_{name}")
        reason = "it can not" if name == "refusing" else None
        module.unsupported = lambda *x, reason=reason: reason
        module.forward = lambda q, k, v, operands, spec, *, platform: (
            q,
            q[..., 0].astype("float32"),
        )
        monkeypatch.setitem(sys.modules, module.__name__, module)
        new = Backend(module.__name__, ("cuda",), needs_check=True, takes_d_lse=takes)
        monkeypatch.setitem(BACKENDS, name, new)
    dispatch._warn_once.cache_clear()
    timings._read.cache_clear()
    with described():
        yield tmp_path
    timings._read.cache_clear()


def taken(mask, direction="forward", d_lse=False, **inputs):
    spec = dispatch.Spec(mask, 1.0)
    options = dict(direction=direction, d_lse=d_lse)
    return dict(dispatch.choose(None, *shapes(**inputs), dispatch.Operands(), spec, **options))


TIMES = {"quick": 2.0, "quicker": 1.0, "refusing": 0.5, "xla": 9.0}


def test_xla_runs_without_measurements_and_explain_names_the_command(gpu, caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert "cuda" not in taken(causal())
    (record,) = caplog.records
    assert DEVICE in record.message
    assert "python -m benchmarks.gpu.attention --keep" in record.message


def test_the_fastest_that_can_runs_in_each_direction(gpu, caplog):
    times = {"forward": TIMES, "backward": TIMES | {"quick": 0.7}}
    timings.write(gpu, DEVICE, {"causal, heads of 64": times})
    with caplog.at_level(logging.WARNING):
        found = taken(causal())
    assert (found["cuda"], found["cpu"]) == ("quicker", "xla")
    assert [r.message for r in caplog.records] == ["flash: not refusing, it can not; quicker runs"]
    assert taken(causal(), "backward")["cuda"] == "quick"
    with described("NVIDIA H100 80GB HBM3"):
        assert "cuda" not in taken(causal())


def test_a_backward_pass_with_a_cotangent_of_lse_goes_to_one_that_takes_it(gpu):
    timings.write(gpu, DEVICE, {"causal, heads of 64": {"backward": TIMES}})
    assert taken(causal(), "backward")["cuda"] == "quicker"
    assert taken(causal(), "backward", d_lse=True)["cuda"] == "quick"


def test_what_is_slower_than_the_portable_one_does_not_run(gpu):
    timings.write(gpu, DEVICE, {"causal, heads of 64": {"forward": TIMES | {"xla": 0.9}}})
    assert taken(causal())["cuda"] == "xla"


def test_the_nearest_kind_counts_where_one_was_not_measured(gpu):
    def only(name):
        return {"forward": {name: 1.0}, "backward": {name: 1.0}}

    known = {"causal, heads of 128": only("quick"), "window, heads of 256": only("quicker")}
    timings.write(gpu, DEVICE, known)
    assert taken(causal() & window(9))["cuda"] == "quicker"  # its own form before its own size
    assert taken(everything())["cuda"] == "quick"
    assert taken(causal(), size=256)["cuda"] == "quick"
    assert "cuda" not in taken(causal(), t=1)  # reading keys is another thing than multiplying
    assert "cuda" not in taken(causal(), dtype="float32")


def test_files_are_extended_and_drop_wrong_implementations(gpu):
    timings.write(gpu, DEVICE, {"causal, heads of 64": {"forward": TIMES}})
    dense = {"dense, heads of 64": {"forward": TIMES}}
    wrong = {timings.case_key("quicker", "bfloat16", "causal"): "off"}
    file = timings.write(gpu, DEVICE, dense, wrong)
    found = json.loads(file.read_text())["milliseconds"]
    left = {k: v for k, v in TIMES.items() if k != "quicker"}
    assert found == {
        "causal, heads of 64": {"forward": left}, "dense, heads of 64": {"forward": TIMES}
    }  # fmt: skip
    assert taken(causal())["cuda"] == "quick" and taken(everything())["cuda"] == "quicker"
    # Another direction, and another implementation, of what is there; what was wrong stays so.
    backward = {"dense, heads of 64": {"backward": TIMES}}
    found = json.loads(timings.write(gpu, DEVICE, backward).read_text())
    assert found["wrong"] == wrong
    assert found["milliseconds"]["dense, heads of 64"] == {
        "forward": TIMES, "backward": TIMES
    }  # fmt: skip
    assert timings.is_current()
    for version in (jax.__version__, timings.sources()):
        file.write_text(file.read_text().replace(version, "0.1.0"))
        timings._read.cache_clear()
        assert not timings.is_current()
        file = timings.write(gpu, DEVICE, dense)
        found = json.loads(file.read_text())
        assert found["wrong"] == {} and found["milliseconds"] == dense  # of other kernels
        timings.write(gpu, DEVICE, {"causal, heads of 64": {"forward": TIMES}}, wrong)


def test_what_was_wrong_is_not_used_for_its_form_and_dtype_whatever_the_times_are_from(gpu):
    wrong = {timings.case_key("quicker", "float16", "window"): "off"}
    timings.write(gpu, DEVICE, {"causal, heads of 64": {"forward": TIMES}}, wrong)
    mask = causal() & window(9)
    assert taken(mask, dtype="float16")["cuda"] == "quick"  # by the times of plain causal calls
    assert taken(mask)["cuda"] == taken(causal(), dtype="float16")["cuda"] == "quicker"


@pytest.mark.parametrize("text", ["", "[]", '{"jax": "0.1"}', '{"milliseconds": {}}'])
def test_a_damaged_file_is_named_and_nothing_of_it_used(gpu, text, caplog):
    (gpu / timings.file_of(DEVICE)).write_text(text)
    with caplog.at_level(logging.WARNING):
        assert "cuda" not in taken(causal())
    assert "NVIDIA_H200.json cannot be read" in caplog.records[0].message


def test_figures_of_another_jax_are_used_and_named(gpu, caplog):
    file = timings.write(gpu, DEVICE, {"causal, heads of 64": {"forward": {"quick": 1.0}}})
    file.write_text(file.read_text().replace(jax.__version__, "0.1.0"))
    timings._read.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert taken(causal())["cuda"] == "quick"
    assert f"measured with jax 0.1.0, this is {jax.__version__}" in caplog.records[0].message


def test_explain_returns_the_implementation_and_the_reason(gpu):
    timings.write(gpu, DEVICE, {"causal, heads of 64": {"forward": TIMES}})
    (found,) = explain(lambda *x: flash(*x, causal()), *shapes())
    lines = str(found).splitlines()
    assert lines[0] == (
        "flash forward (causal, heads of 64) on cuda: " + ", ".join(
            f"{x} bfloat16[2, 256, 4, 64]" for x in "qkv")
    )  # fmt: skip
    said = {line[4:].split()[0]: line for line in lines[1:]}
    assert "1 ms for a call like it" in said["quicker"]
    assert "it can not" in said["refusing"] and "no measurement on this GPU" in said["triton"]
    assert [x for x in said if said[x].startswith("  > ")] == ["quicker"]


def test_explain_finds_backward_passes_and_rejects_functions_without_attention():
    def loss(q, k, v):
        return jnp.sum(flash(q, k, v, causal())[0].astype(jnp.float32))

    found = explain(jax.grad(loss), *shapes())
    assert [x.call.split(" (")[0] for x in found] == ["flash forward", "flash backward"]
    assert {x.implementation for x in found} == {"xla"}
    with pytest.raises(ValueError, match="traced no attention"):
        explain(lambda x: x, jnp.ones(3))
