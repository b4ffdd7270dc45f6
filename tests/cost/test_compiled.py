"""`python -m lcjax.cost --compiled`: programs compiled here, or for TPUs, beside their bound."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lcjax.cost import __main__ as command
from lcjax.cost import compilers, hlo
from lcjax.cost.chips import Topology
from lcjax.generation import session
from lcjax.models import preset
from lcjax.parallel.sharding import Mesh, make_mesh

ROOT = Path(__file__).resolve().parents[2]
TINY = ("--compiled", "--model.preset=tiny", "--train.batch_size=8")


def rows(text):
    """The cells of each row of the printed table, by its name."""
    lines = [line[1:-1].split("|") for line in text.splitlines() if line.startswith("|")]
    return {name.strip(): [cell.strip() for cell in cells] for name, *cells in lines}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--programs=decode,serve"],
            "--programs='serve' must be one of prefill, cut, decode, train",
        ),
        (["--programs=cut", "--topology=v5e:1x1"], "--programs=cut needs a cache policy"),
        (["--topology=v5e:4"], "--topology=v5e:4: write the devices, as v5e:4x4"),
    ],
)
def test_wrong_input_is_one_line(words, message, capsys):
    assert command.main([*TINY, *words]) == 2
    output = capsys.readouterr().err
    assert message in output and output.count("\n") == 1


def test_the_cut_at_the_end_of_a_prompt_is_a_program(capsys):
    words = ["--programs=cut,decode", "--length=256", "--mesh.fsdp=8", "--mesh.tensor=1"]
    policy = ["--model.cache.type=knorm", "--model.cache.tokens=64"]
    assert command.main([*TINY, *words, *policy]) == 0
    table = rows(capsys.readouterr().out)
    assert table[""] == ["cut", "decoding step"]
    sizes = [float(cell.split()[0]) for cell in table["arguments, GB"]]
    assert sizes[0] > 0 and float(table["outputs, GB (in place)"][0].split()[0]) > 0


def test_without_the_tpu_compiler_the_way_to_it_is_printed(monkeypatch, capsys):
    monkeypatch.setattr(compilers.importlib.util, "find_spec", lambda name: None)
    assert command.main([*TINY, "--topology=v5e:1x1"]) == 2
    output = capsys.readouterr().err
    assert "the TPU compiler is not installed; pip install" in output and output.count("\n") == 1


def test_programs_are_compiled_for_this_machine(capsys):
    words = ["--programs=decode,train", "--length=64", "--mesh.fsdp=4", "--mesh.data=2"]
    assert command.main([*TINY, *words]) == 0
    output = capsys.readouterr().out
    assert "cpu: 8 devices, data=2 fsdp=4; 8 rows of 64 tokens; per device" in output
    table = rows(output)
    assert table[""] == ["decoding step", "training step"]
    assert all(float(cell.split()[0]) > 0 for cell in table["roofline bound, ms"])
    assert table["kernels"] == ["0", "0"]
    assert int(table["float32 products"][0].split()[0]) >= 2 * 7 + 1  # of two layers, and the head
    assert table["copies of the cache"][1] == ""  # a training step has no cache
    assert table["collectives (overlapped)"][0].startswith("all-gather ")


@pytest.mark.slow
def test_programs_are_compiled_for_tpus_that_are_not_here():
    pytest.importorskip("libtpu")
    words = [*TINY, "--topology", "v5e:2x2", "--length=256"]
    command = [sys.executable, "-m", "lcjax.cost", *words]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    table = rows(done.stdout)
    assert table["kernels"] == [
        "2 (lcjax_forward)",
        "2 (lcjax_decode)",
        "4 (lcjax_forward, lcjax_d_all)",
    ]
    assert table["copies of the cache"][:2] == ["0 (0 GB)", "0 (0 GB)"]
    assert table["float32 products"] == ["0", "0", "0"]
    assert all(cell.endswith(" ms") for cell in table["compiler's cycles, M"])


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 4096])
def test_heads_of_64_channels_are_read_from_the_cache_without_a_copy(tokens):
    pytest.importorskip("libtpu")
    config = preset("smollm2-135m").replace(num_layers=2, dtype="bfloat16", param_dtype="bfloat16")
    mesh = make_mesh(Mesh(), compilers.devices(Topology.parse("v5e:1x1")))
    compiled = session.lower_read(config, mesh, 4, 8192, tokens).compile()
    module = hlo.Module(compiled.as_text())
    assert hlo.has_argument(module, session.CACHED_LAYERS)
    assert hlo.copies(module, session.CACHED_LAYERS).count == 0
    assert not hlo.float32_products(module)
