"""Compiling the training step for devices that are not present: shapes, reports and errors."""

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from installed_compilers import CUDA_PLUGIN, needs_cuda_plugin, needs_libtpu
from training_support import quick_compilation

from lcjax import config as config_lib
from lcjax import cost
from lcjax.cost.chips import Topology
from lcjax.cost.compilers import devices
from lcjax.errors import InputError
from lcjax.evaluation import reproduce
from lcjax.parallel.sharding import Mesh, make_mesh
from lcjax.training import TrainConfig, compile_only, estimate
from lcjax.training.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
TINY = (
    *("--model.preset=tiny", "--data.length=64", "--train.batch_size=8", "--mesh.fsdp=4"),
    *("--mesh.context=2", "--train.accumulation=2"),
)


def parse(*words):
    return config_lib.parse(TrainConfig, list(words))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--topology"], "--topology has no value; write --topology=value"),
        (["--topology=v9:4x4"], "unknown chip; choose one of v4"),
        (["--topology=v5e:4"], "--topology=v5e:4: write the devices, as v5e:4x4"),
    ],
)
def test_what_cannot_be_compiled_is_one_line(words, message, capsys):
    assert main(["--compile_only", *words]) == 2
    output = capsys.readouterr().err
    assert message in output and output.count("\n") == 1


@needs_libtpu
@pytest.mark.parametrize(
    ("topology", "kernels"),
    [("v5e:1x1", ["lcjax_d_all", "lcjax_forward"]),
     ("v4:2x2x1", ["lcjax_d_keys", "lcjax_d_queries", "lcjax_forward"])],
)  # fmt: skip
def test_the_step_has_the_kernels_of_its_chip(topology, kernels):
    config = parse("--model.preset=tiny", "--data.length=256", "--train.batch_size=8")
    mesh = make_mesh(config.mesh, devices(Topology.parse(topology)))
    text = compile_only.lower(config, estimate.model_of(config), mesh).as_text()
    assert sorted(set(re.findall(r'kernel_name = "(\w+)"', text))) == kernels


@needs_libtpu
def test_a_mesh_axis_may_be_a_part_of_an_axis_of_the_torus():
    mesh = make_mesh(Mesh(context=4), devices(Topology.parse("v5p:8x8x8")))
    assert dict(mesh.shape) == {"data": 1, "fsdp": 128, "tensor": 1, "context": 4, "expert": 1}
    assert len(set(mesh.devices.flat)) == 512


@pytest.mark.skipif(CUDA_PLUGIN is not None, reason="jax's CUDA plugin is installed")
def test_gpus_need_the_plugin_and_the_way_to_it_is_said(capsys):
    assert main(["--compile_only", "--topology", "h200:8", *TINY]) == 2
    output = capsys.readouterr().err
    assert "pip install 'jax[cuda12]" in output and output.count("\n") == 1


def test_a_checkpoint_that_is_not_here_is_known_by_its_name_or_refused():
    llama = estimate.model_of(parse("--model.path=meta-llama/Llama-2-7b-hf"))
    assert (llama.width, llama.num_layers, llama.dtype) == (4096, 32, "bfloat16")
    with pytest.raises(InputError, match="--model.preset=llama2-7b"):
        estimate.model_of(parse("--model.path=nobody/model"))


def test_adapters_and_new_tokens_are_part_of_the_model():
    recipe = str(ROOT / "configs" / "landmark_7b.yaml")
    assert estimate.model_of(parse("--config", recipe)).vocab_size == 32_002
    recipe = str(ROOT / "configs" / "longlora_7b_32k.yaml")
    assert estimate.model_of(parse("--config", recipe)).lora.rank == 8


@pytest.mark.slow
def test_the_step_is_lowered_without_an_array(tmp_path):
    config = parse(*TINY)
    before = len(jax.live_arrays())
    model = estimate.model_of(config)
    mesh = make_mesh(Mesh(fsdp=4, context=2))
    with quick_compilation(tmp_path):
        memory = compile_only.lower(config, model, mesh).compile().memory_analysis()
    assert len(jax.live_arrays()) == before
    # Weights and both moments, a few of them whole on all devices; tokens beside them.
    share = 12 * cost.estimate(model, 64).parameters / 8
    assert share < memory.argument_size_in_bytes < 2 * share
    assert memory.alias_size_in_bytes > 0.9 * memory.output_size_in_bytes


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize(("rows", "code"), [(8, 0), (262_144, 1)])
def test_the_compiler_says_whether_a_step_fits(rows, code):
    words = [*TINY, f"--train.batch_size={rows}", "--train.accumulation=1"]
    command = [sys.executable, "train.py", "--compile_only", "--topology", "v5e:2x4", *words]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == code, done.stderr[-2000:]
    assert ("does not fit" if code else ": fits") in done.stdout
    if code == 0:
        assert "collective-permute" in done.stdout and "all-gather" in done.stdout


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("name", ["v5e:1x1", "v6e:1x1", "v5p:1x1x1", "v5e:1x2", "v5e:2x4"])
def test_topologies_of_less_than_a_host_have_their_devices(name):
    topology = Topology.parse(name)
    assert len(devices(topology)) == topology.devices


@pytest.mark.slow
@needs_cuda_plugin
def test_a_step_is_compiled_for_gpus_that_are_not_here():
    command = [sys.executable, "train.py", "--compile_only", "--topology", "h200:8", *TINY]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "of 143: fits" in done.stdout and "all-gather" in done.stdout


@pytest.mark.slow
@needs_libtpu
def test_llama_2_7b_at_32768_tokens_fits_64_chips_as_its_recipe_says(monkeypatch):
    monkeypatch.chdir(ROOT)
    recipe = parse("--config", "configs/pi_7b_32k.yaml")
    compiled, model, mesh = compile_only.compile_step(recipe, Topology.parse("v5e:8x8"))
    assert compiled.fits and (model.num_layers, mesh.size) == (32, 64)
    estimated = estimate.training_memory(recipe, model, mesh).total
    assert 0.85 < estimated / compiled.peak_memory < 1.15
    assert set(compiled.traffic) >= {"all-gather", "reduce-scatter", "all-to-all"}
    # Every gradient is summed in parts: what all devices still sum is small.
    assert compiled.traffic["all-reduce"].bytes < 0.01 * sum(
        t.bytes for t in compiled.traffic.values()
    )


def compiled_headers():
    """Recipes with `Hardware: v5e:8x8 (64 TPU chips), 12.4 of the 16.9 GB of each as compiled`."""
    header = re.compile(r"^# Hardware: (\S+) \(\d+ TPU chips\), ([\d.]+) of the", re.MULTILINE)
    for file in sorted(ROOT.glob("configs/*.yaml")):
        if found := header.search(file.read_text()):
            yield file.stem, found[1], float(found[2])


@pytest.fixture(scope="module")
def equal_programs_compiled_once():
    """Compiles a program once for all steps that have its operations and shapes.

    Only constant scalars, such as the weight of a loss, are left out of the comparison.
    """
    costs, program_cost = {}, compile_only.program_cost

    def cached(lowered, chip):
        text = re.sub(r"dense<[^>]*> : tensor<[fi]32>", "", lowered.as_text())
        key = chip, hashlib.sha256(text.encode()).digest()
        if key not in costs:
            costs[key] = program_cost(lowered, chip)
        return costs[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_only, "program_cost", cached)
        yield


@pytest.mark.slow
@needs_libtpu
@pytest.mark.usefixtures("equal_programs_compiled_once")
@pytest.mark.parametrize(("recipe", "topology", "gigabytes"), list(compiled_headers()))
def test_a_recipe_needs_the_memory_that_its_header_says(recipe, topology, gigabytes):
    compiled, _, _ = compile_only.compile_step(
        parse("--config", f"lcjax:{recipe}"), Topology.parse(topology)
    )
    assert compiled.fits
    assert compiled.peak_memory / 1e9 == pytest.approx(gigabytes, rel=0.02)


def trainings_of_tables():
    """Trainings that tables of configs/reproduce do at the paper's scale, each program once."""
    recipes = {recipe: topology for recipe, topology, _ in compiled_headers()}
    programs = {}
    for table in reproduce.names():
        config = reproduce.config_at(table, "paper", [])
        for method in config.methods:
            if method.train is not None:
                extended = config.study.extend.removeprefix("lcjax:")
                changes = tuple(
                    change
                    for change in method.train
                    if not change.startswith(("data.sources", "model.path=runs/"))
                )
                programs.setdefault((extended, changes), f"{table} {method.name}")
    for (recipe, changes), name in programs.items():
        if changes:  # else it is the recipe's own program
            yield pytest.param(recipe, recipes[recipe], changes, id=name)


@pytest.mark.slow
@needs_libtpu
@pytest.mark.usefixtures("equal_programs_compiled_once")
@pytest.mark.parametrize(("recipe", "topology", "changes"), list(trainings_of_tables()))
def test_the_trainings_of_a_table_compile(recipe, topology, changes):
    words = ["--config", f"lcjax:{recipe}", *(f"--{change}" for change in changes)]
    compiled, _, _ = compile_only.compile_step(parse(*words), Topology.parse(topology))
    assert compiled.peak_memory > 1e9
