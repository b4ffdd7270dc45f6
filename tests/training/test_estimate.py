"""Estimates of memory, FLOPs and hours for devices that are not present."""

import functools
import math
import re

import pytest

from lcjax import config as config_lib
from lcjax import cost
from lcjax.cost import __main__ as command
from lcjax.errors import InputError
from lcjax.parallel import device_memory
from lcjax.parallel.sharding import Mesh, make_mesh
from lcjax.training import TrainConfig, estimate, loop
from lcjax.training.__main__ import main as train_main

LLAMA = ("--model.preset=llama2-7b", "--model.remat=full", "--data.length=32768")


def memory(mesh):
    config = config_lib.parse(TrainConfig, [*LLAMA, "--train.batch_size=16"])
    return estimate.training_memory(config, estimate.model_of(config), mesh)


@pytest.mark.slow
def test_state_and_activations_are_shared_by_the_devices_of_a_text():
    whole, cut = memory(Mesh(1, 16, 1, 1)), memory(Mesh(1, 16, 1, 4))
    for part in ("weights", "gradients", "optimizer"):
        assert getattr(cut, part) == pytest.approx(getattr(whole, part) / 4, rel=0.01)
    # Two chunks of logits of at most a GiB, and the float32 weights gathered for a layer
    same = 2 * 2**30 + 4 * (4 * 4096**2 + 3 * 4096 * 11_008)
    assert cut.activations - same == pytest.approx((whole.activations - same) / 4, rel=0.15)


def test_a_rank_of_lora_that_no_matrix_has_raises_input_error_before_weights_are_read():
    config = config_lib.parse(
        TrainConfig, ["--model.preset=llama2-7b", "--run.folder=r", "--train.lora.rank=5000"]
    )
    with pytest.raises(InputError, match="lora.rank=5000 must be at most the width 4096"):
        estimate.check_rules(config)


def test_hours_follow_from_flops_peak_and_mfu(capsys):
    words = [*LLAMA, "--train.batch_size=32", "--train.steps=961", "--topology=v5e:16x16"]
    words += ["--mesh.context=8", "--mfu=0.5"]
    assert command.main(words) == 0
    output = capsys.readouterr().out
    assert "6,738,415,616" in output and "6.59e+19 in all" in output and ": fits" in output
    hours = 6.59e19 / (256 * 197e12 * 0.5) / 3600
    assert f"{hours:.1f} h, {hours * 256:.0f}" in output


def test_the_length_given_is_that_of_the_rows(capsys):
    words = [*LLAMA, "--length", "262144", "--topology", "a100-80:8", "--train.batch_size=8"]
    assert command.main(words) == 1  # a row on each device, and the states of 32 layers
    output = capsys.readouterr().out
    assert "rows of 262,144 tokens" in output and "does not fit" in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--topology is missing: name the devices"),
        (["--topology=h200:8", "--mfu=40"], "--mfu=40 must be a share"),
        (["--topology=h200:8", "--programs=train"], "add it, or leave both out"),
        (["--topology=h200:8", "--longest", "--compiled"], "leave one out"),
        (["--topology=h200:8", "--mesh.fsdp=3"], "set --mesh.fsdp=-1"),
        (["--topology=h200:8", "--train.batch_size=12"], "nearest: 16 (--train.batch_size=16)"),
        (["--topology=h200:8", "--model.preset=null"], "(--model.preset=llama3-8b)"),
    ],
)
def test_what_cannot_be_estimated_is_one_line(words, message, capsys):
    assert command.main([*LLAMA, *words]) == 2
    output = capsys.readouterr().err
    assert message in output and output.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "rows"),
    [
        (["--topology=h200:8"], 8),
        (["--topology=v5e:4x4"], 16),
        (["--topology=h200:3"], 9),
        (["--topology=v5e:4x4", "--train.accumulation=2"], 32),
        (["--topology=h200:16", "--mesh.fsdp=4", "--mesh.tensor=4"], 8),
    ],
)
def test_without_a_config_the_default_batch_gives_all_devices_equally_many_rows(
    words, rows, capsys
):
    command.main(["--model.preset=tiny", "--length=256", *words])
    assert f"rows of 256 tokens, {rows} per update" in capsys.readouterr().out


def test_the_batch_of_a_config_is_not_rounded(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text("model: {preset: tiny}\nrun: {folder: r}\n")
    words = ["--config", str(tmp_path / "run.yaml"), "--topology=v5e:4x4", "--length=256"]
    assert command.main(words) == 2
    assert "nearest: 16 (--train.batch_size=16)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "need",
    [
        lambda length: 5e9 + 37_000 * length,
        lambda length: 5e9 + max(37_000 * length, 90_000 * (length - 300_000)),  # two pieces
        lambda length: 1e9 + 10_000 * length + length**2 / 100,
        lambda length: 80e9 - 1 + length // 5000,  # hardly fits
        lambda length: 81e9 + length,
    ],
)
def test_the_longest_text_is_found_with_few_estimates(need):
    lengths = []

    def counted(length):
        lengths.append(length)
        return need(length)

    usable, step = 80e9, 1024
    found = estimate.longest_text(functools.cache(counted), usable, step, 10**8)
    assert found % step == 0 and len(lengths) < 16
    assert found == 0 or need(found) <= usable
    assert need(found + max(step, found // 32)) > usable
    assert estimate.longest_text(need, usable, step, 5000) == min(found, 4096)


@pytest.mark.slow
def test_the_longest_texts_of_a_machine_are_printed_by_remat(capsys, monkeypatch):
    words = {name: estimate.remat.WORDS[name] for name in ("full", "offload")}
    monkeypatch.setattr(estimate.remat, "WORDS", words)
    words = ["--model.preset=llama2-7b", "--model.remat=full", "--train.batch_size=1"]
    words += ["--train.accumulation=1", "--mesh.context=8", "--mesh.fsdp=1"]
    assert command.main([*words, "--topology=h100:8", "--longest"]) == 0
    title, _, *rows = capsys.readouterr().out.splitlines()
    assert title.startswith("h100:8: longest texts that fit 81.6 GB of each h100")
    tokens = {tuple(row.split()[:2]): int(row.split()[2].replace(",", "")) for row in rows}
    assert 100_000 < tokens["full", "none"] < tokens["full", "optimizer"]
    assert tokens["full", "optimizer"] < tokens["offload", "none"] < tokens["offload", "optimizer"]
    assert all("all_to_all" in row and "all_gather" in row for row in rows)


@pytest.mark.parametrize(("main", "words"), [(command.main, []), (train_main, ["--compile_only"])])
def test_help_needs_no_devices(main, words, capsys):
    with pytest.raises(SystemExit) as end:
        main([*words, "--help"])
    assert end.value.code == 0 and "--train.lr  float" in capsys.readouterr().out


def test_a_run_that_does_not_fit_is_refused_in_one_line_before_anything_is_loaded(
    tmp_path, monkeypatch
):
    words = ["--model.preset=tiny", "--train.batch_size=512", "--data.length=1024"]
    words += [f"--data.path={__file__}", f"--run.folder={tmp_path}"]
    mesh, load = make_mesh(Mesh()), "lcjax.training.language_modelling.build"

    def lines(*more):
        config = config_lib.parse(TrainConfig, [*words, *more])
        return estimate.of_run(config, estimate.planned_model(config), mesh)

    (line,) = lines()
    assert re.fullmatch(r"memory, estimated: [\d.]+ GB \(weights 0.0 .* process 0.\d.*\)", line)
    monkeypatch.setattr(device_memory, "free_bytes", lambda device: 0)
    monkeypatch.setattr(load, pytest.fail)
    message = (
        r"train.batch_size=512 rows of 1,024 tokens need about [\d.]+ GB \(.*\), and this machine"
        r" has 0.7 GB for it; raise train.accumulation=1, set model.remat=full, .*, or go on with"
        r" run.ignore_memory=true"
    )
    monkeypatch.setattr(device_memory, "_resident_bytes", lambda: 7 * 10**8)
    with pytest.raises(InputError, match=message) as error:
        loop.run(config_lib.parse(TrainConfig, words))
    assert "\n" not in str(error.value)
    assert lines("--run.ignore_memory=true")[1].startswith("warning: train.batch_size=512 rows of")


@pytest.mark.parametrize("name", ["cepe_smollm2", "study/sharedllm_main"])
def test_a_recipe_that_starts_from_another_one_has_its_architecture(name):
    config = config_lib.parse(TrainConfig, ["--config", f"lcjax:{name}"])
    model = estimate.model_of(config)
    assert (model.num_layers, model.width) == (30, 576) and model.memory is not None


def test_what_a_mesh_does_not_divide_is_named_with_its_bytes(capsys):
    words = ["--model.preset=tiny", "--train.batch_size=6", "--data.length=64", "--mesh.fsdp=6"]
    model = estimate.model_of(config_lib.parse(TrainConfig, words))
    assert estimate.replication_notes(model, Mesh(fsdp=8)) == []
    (line,) = estimate.replication_notes(model, Mesh(fsdp=6))
    assert "the mesh (fsdp=6) does not divide" in line and "mlp/down/kernel [2, 160, 64], " in line
    # All matrices, float32, which a sixth of would lie on a device; norms are always whole.
    matrices = sum(
        math.prod(leaf.shape)
        for path, leaf in cost.parameter_shapes(model).items()
        if path.endswith(("kernel", "embedding"))
    )
    assert f"{4 * matrices * 5 / 6 / 1e6:,.1f} MB more" in line
    command.main([*words, "--topology=h200:6"])
    assert line in capsys.readouterr().out
    # Over fsdp alone, where fsdp and context together do not divide a width of 64.
    (line,) = estimate.replication_notes(model, Mesh(fsdp=2, context=3))
    assert "(fsdp=2 context=3)" in line
