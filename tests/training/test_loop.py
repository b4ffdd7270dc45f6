"""Whole runs: results on disk, resuming after any end, refusals."""

import dataclasses
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from training_support import STEPS, losses, tiny

from lcjax import checkpoints
from lcjax import config as config_lib
from lcjax.checkpoints.run_folder import load_run
from lcjax.data import make_loader
from lcjax.errors import InputError
from lcjax.generation.language_model import LanguageModel
from lcjax.models import Decoder
from lcjax.models.lora import LoRA
from lcjax.parallel.sharding import Mesh
from lcjax.training import batches, loop, run
from lcjax.training import folder as folder_lib
from lcjax.training.language_modelling import LanguageModelTask
from lcjax.training.tracking import read
from lcjax.training.train_config import EvalSection, Rate, TrackSection, TrainConfig
from lcjax.tree import flatten

pytestmark = pytest.mark.usefixtures("compiled_once", "traced_once")


@pytest.fixture(scope="module")
def reference(tmp_path_factory, corpus):
    """A run that nothing disturbed: (folder, final metrics, losses by step)."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    metrics = run(tiny(folder, corpus))
    return folder, metrics, losses(folder)


def test_checkpoints_are_also_saved_by_time(corpus, tmp_path, monkeypatch, reference):
    """Every look at the clock takes 30 s, and each step looks once, as does each checkpoint."""
    clock, saved, save = itertools.count(0.0, 30.0), [], loop.Checkpoints.save
    monkeypatch.setattr(loop, "monotonic", lambda: next(clock))

    def recording_save(checkpoints, step, *args):
        saved.append(step)
        save(checkpoints, step, *args)

    monkeypatch.setattr(loop.Checkpoints, "save", recording_save)
    run(tiny(tmp_path / "run", corpus, save_every=STEPS, save_minutes=1.5, export=False))
    assert saved[:3] == [3, 6, 9] and saved[-1] == STEPS
    assert losses(tmp_path / "run") == reference[2], "saving changes nothing"


@pytest.mark.slow
def test_the_loss_falls_on_a_toy_corpus(reference):
    _, metrics, losses_by_step = reference
    assert list(losses_by_step) == list(range(1, STEPS + 1))
    assert losses_by_step[1] > 5.3 and losses_by_step[STEPS] < 3.6  # ln 259 = 5.56 at the start
    assert metrics["step"] == STEPS and metrics["stopped"] is None
    assert metrics["loss"] == losses_by_step[STEPS] and metrics["mfu"] > 0


@pytest.mark.slow
def test_a_run_on_one_of_the_devices_has_the_losses_of_a_run_on_all(reference, corpus, tmp_path):
    metrics = run(tiny(tmp_path, corpus, mesh=Mesh(fsdp=1)), devices=jax.devices()[3:4])
    assert metrics["loss"] == pytest.approx(reference[1]["loss"], rel=1e-4)


def test_a_run_leaves_metrics_curve_config_and_checkpoints(reference):
    folder = reference[0]
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert {"step", "loss", "grad_norm", "lr", "tokens", "skipped"} <= rows[-1].keys()
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(os.listdir(folder / "checkpoints")) == ["12", "8"]
    parsed = config_lib.parse(TrainConfig, ["--config", str(folder / "config.yaml")])
    assert parsed.train.lr == 3e-3 and parsed.model.preset == "tiny"


def test_the_exported_folder_and_the_run_folder_are_the_same_model(reference):
    folder = reference[0]
    params, config, tokenizer = load_run(folder)
    exported, _, other = checkpoints.load(folder / "model")
    for path, leaf in flatten(params).items():
        np.testing.assert_array_equal(leaf, flatten(exported)[path], err_msg=path)
    text = "the cat sat on a mat"
    assert tokenizer.encode(text) == other.encode(text)
    lm = LanguageModel(Decoder(config), params, tokenizer)
    assert lm.nll(np.array([lm.encode(text)])).mean() < 4


def test_an_older_checkpoint_can_be_loaded_by_its_step(reference):
    early, late = (load_run(reference[0], step)[0] for step in (8, 12))
    assert (early["embed"]["embedding"] != late["embed"]["embedding"]).any()
    with pytest.raises(InputError, match=r"no checkpoint of step 3; there are: \[8, 12\]"):
        load_run(reference[0], 3)


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[3])
import conftest
from training_support import compile_quickly, tiny
compile_quickly(sys.argv[4])
from lcjax.training import estimate, loop
estimate.of_run = lambda *_: []
log = loop.Progress.report
def report(self, step, metrics):
    log(self, step, metrics)
    if step == 6:
        os.kill(os.getpid(), signal.SIGKILL)
loop.Progress.report = report
loop.run(tiny(sys.argv[1], sys.argv[2]))
"""


def test_resuming_after_kill_9_has_bit_equal_losses(tmp_path, corpus, reference, compiled_once):
    folder, tests_folder = tmp_path / "run", Path(__file__).parent
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(
            [str(tests_folder), str(tests_folder.parent), str(tests_folder.parents[1])]
        )
    }
    command = [sys.executable, "-c", KILLED, folder, corpus, str(tests_folder), compiled_once]
    killed = subprocess.run([*map(str, command)], env=env, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert losses(folder) == {step: reference[2][step] for step in range(1, 7)}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')  # what a kill in the middle of a line leaves
    run(tiny(folder, corpus, export=False))
    assert losses(folder) == reference[2]
    assert sorted(os.listdir(folder / "checkpoints")) == ["12", "8"]


def at_step(monkeypatch, step, action):
    """Does `action` when the run reports that step."""
    report = loop.Progress.report

    def reporting(self, now, metrics):
        report(self, now, metrics)
        if now == step:
            action()

    monkeypatch.setattr(loop.Progress, "report", reporting)


def test_sigterm_saves_and_the_same_command_resumes_with_one_state_in_memory(
    tmp_path, corpus, reference, monkeypatch, capsys
):
    with monkeypatch.context() as patch:
        at_step(patch, 5, lambda: signal.raise_signal(signal.SIGTERM))
        metrics = run(tiny(tmp_path / "run", corpus, export=False))
    # Step 6 had begun when the results of step 5 were reported.
    assert metrics == {"step": 6, "folder": str(tmp_path / "run"), "stopped": "SIGTERM"}
    assert "step 6 is saved" in capsys.readouterr().out
    read_in, freed = [], []
    load, restore = LanguageModelTask.load, loop.Checkpoints.restore

    def loaded(self):
        trained, frozen = load(self)
        read_in.extend(flatten(trained).values())
        return trained, frozen

    def restored(self, target):
        assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(target))
        freed.extend(leaf.is_deleted() for leaf in read_in)
        return restore(self, target)

    monkeypatch.setattr(LanguageModelTask, "load", loaded)
    monkeypatch.setattr(loop.Checkpoints, "restore", restored)
    monkeypatch.setattr(loop, "init_state", None)
    run(tiny(tmp_path / "run", corpus, export=False))
    assert len(freed) > 5 and all(freed)
    assert losses(tmp_path / "run") == reference[2]


def test_ctrl_c_saves_and_prints_how_to_resume(tmp_path, corpus, monkeypatch):
    at_step(monkeypatch, 2, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt, match="stopped by SIGINT; step 3 is saved"):
        run(tiny(tmp_path / "run", corpus))
    assert os.listdir(tmp_path / "run" / "checkpoints") == ["3"]


def poison(monkeypatch, *bad):
    """Makes the weights of the batches with these numbers (from 1) not a number."""
    put, local_batches = batches.put, []

    def poisoned(local, mesh):
        local_batches.append(local)
        if len(local_batches) in bad:
            local = local | {"weights": local["weights"] * np.nan}
        return put(local, mesh)

    monkeypatch.setattr(batches, "put", poisoned)
    return local_batches


def test_a_loss_that_is_not_finite_stops_before_it_and_names_the_batch(
    tmp_path, corpus, reference, monkeypatch
):
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        local_batches = poison(patch, 7)
        with pytest.raises(loop.NonFiniteError, match=r"step 7: loss nan.*bad_batch_7.npz"):
            run(tiny(folder, corpus))
    bad = np.load(folder / "bad_batch_7.npz")
    np.testing.assert_array_equal(bad["tokens"], local_batches[6]["tokens"])
    assert "position" in bad
    run(tiny(folder, corpus, export=False))  # the batch is read again, and is well this time
    assert losses(folder) == reference[2]


def test_skipping_leaves_the_batch_out_and_counts_it(tmp_path, corpus, monkeypatch, capfd):
    monkeypatch.setattr(loop, "_MAX_SKIPS", 3)
    poison(monkeypatch, 3)
    run(tiny(tmp_path / "run", corpus, on_nan="skip", save_every=STEPS, export=False))
    rows = {row["step"]: row for row in read(tmp_path / "run" / "metrics.jsonl")}
    assert rows[3]["loss"] is None and rows[2]["skipped"] == 0
    assert all(rows[step]["skipped"] == 1 for step in range(3, STEPS + 1))
    assert rows[STEPS]["loss"] < 4
    assert "skipped step 3: loss nan" in capfd.readouterr().err


def test_skipping_for_ever_is_rejected(tmp_path, corpus, monkeypatch):
    monkeypatch.setattr(loop, "_MAX_SKIPS", 3)
    poison(monkeypatch, *range(5, 20))
    with pytest.raises(loop.NonFiniteError, match="stopped at step 7"):
        run(tiny(tmp_path / "run", corpus, on_nan="skip"))


@pytest.mark.slow
def test_while_steps_are_not_finite_the_last_finite_checkpoint_stays_and_is_named(
    tmp_path, corpus, monkeypatch
):
    monkeypatch.setattr(loop, "_MAX_SKIPS", 4)
    poison(monkeypatch, *range(6, 20))
    config = tiny(tmp_path / "run", corpus, on_nan="skip", save_every=1, export=False)
    with pytest.raises(loop.NonFiniteError) as stop:
        run(config.replace(run=dataclasses.replace(config.run, accept=("train.lr",))))
    assert sorted(os.listdir(tmp_path / "run" / "checkpoints")) == ["4", "7", "8"]
    assert (
        "4 steps in a row were not finite: the weights may be ruined; the last checkpoint from"
        f" which a step was finite is that of step 4: move 7, 8 out of {tmp_path}/run/checkpoints,"
        " and resume with a lower train.lr"
    ) in str(stop.value)
    advice = str(stop.value).partition(";")[2]
    assert "on_nan" not in advice and "run.accept" not in advice  # both are set already


@pytest.mark.slow
@pytest.mark.parametrize("on_nan", ["stop", "skip"])
def test_weights_that_are_not_finite_end_the_run_because_no_skip_can_help(
    tmp_path, corpus, monkeypatch, on_nan
):
    next_batch = loop.Training._next_batch

    def ruin(self, step):
        if step == 5:
            params = jax.tree.map(lambda x: x * np.inf, self.state.params)
            self.state = dataclasses.replace(self.state, params=params)
        return next_batch(self, step)

    monkeypatch.setattr(loop.Training, "_next_batch", ruin)
    with pytest.raises(loop.NonFiniteError, match="stopped at step 6") as stop:
        run(tiny(tmp_path / "run", corpus, on_nan=on_nan, save_every=1, export=False))
    for part in ("no skip can help", "step 4: move 5 out of", "and run.accept=[train.lr]"):
        assert part in str(stop.value)
    assert sorted(os.listdir(tmp_path / "run" / "checkpoints")) == ["4", "5"]


def test_a_step_is_dispatched_before_the_results_of_the_one_before_are_waited_for(
    tmp_path, corpus, monkeypatch
):
    events, put, get = [], batches.put, jax.device_get
    monkeypatch.setattr(
        batches, "put", lambda local, mesh: events.append("step") or put(local, mesh)
    )

    def fetch(tree):
        if isinstance(tree, dict) and "grad_norm" in tree:
            events.append("results")
        return get(tree)

    monkeypatch.setattr(jax, "device_get", fetch)
    run(tiny(tmp_path / "run", corpus, save_every=STEPS, export=False))
    assert events == ["step", *["step", "results"] * (STEPS - 1), "results"]


def test_keys_that_change_no_batch_may_change_when_a_run_resumes(corpus, reference):
    changed = {"repeat": 7, "scan": True, "threads": 1, "prefetch": 0}
    assert run(tiny(reference[0], corpus, data=changed))["step"] == STEPS


def test_another_learning_rate_raises_input_error_unless_it_is_accepted(
    tmp_path, corpus, reference
):
    folder = reference[0]
    with pytest.raises(InputError, match=r"train.lr=0.001 but the run .* began with 0.003"):
        run(tiny(folder, corpus, lr=1e-3))
    with pytest.raises(InputError, match=r"data\.length=16"):
        run(tiny(folder, corpus, data={"length": 16}))
    with pytest.raises(InputError, match="holds a run"):
        run(tiny(folder, corpus, run={"existing": "refuse"}))
    metrics = run(tiny(folder, corpus, lr=1e-3, run={"accept": ("train.lr",)}))
    assert metrics["step"] == STEPS  # complete already: nothing is trained again


def test_overwriting_removes_the_run_and_nothing_else(tmp_path, corpus, reference):
    folder = shutil.copytree(reference[0], tmp_path / "run")
    (folder / "notes.txt").write_text("mine")
    (folder / "checkpoints" / "4").mkdir()
    for name in ("tensorboard", "wandb", "profile"):
        (folder / name).mkdir()
    (folder / "wandb.json").write_text("{}")
    run(tiny(folder, corpus, export=False, run={"existing": "overwrite"}))
    assert losses(folder) == reference[2]
    assert (folder / "notes.txt").read_text() == "mine"
    left = set(os.listdir(folder)) - {"notes.txt"}
    assert left == set(os.listdir(reference[0])) - {"model"}
    assert sorted(os.listdir(folder / "checkpoints")) == ["12", "8"]


def test_a_start_that_fails_costs_the_run_before_nothing(corpus, reference):
    folder, overwrite = reference[0], {"existing": "overwrite"}
    with pytest.raises(InputError, match="no-such-model"):
        run(tiny(folder, corpus, model={"path": "no-such-model"}, run=overwrite))
    with pytest.raises(InputError, match="no-such-text"):
        run(tiny(folder, corpus, data={"path": "no-such-text"}, run=overwrite))
    assert losses(folder) == reference[2]
    assert sorted(os.listdir(folder / "checkpoints")) == ["12", "8"]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"data": {"path": "no-such-text"}}, r"data\.path=no-such-text does not exist"),
        ({"data": {"path": ""}}, r"data\.path is empty"),
        ({"model": {"dtype": "float32"}}, r"model\.path=null: give a checkpoint"),
        ({"model": {"preset": "tyni"}}, "tiny"),
        ({"model": {"path": "no-such-model"}}, r"model\.path=no-such-model: no such file"),
        ({"mesh": Mesh(data=3)}, r"mesh\.data"),
        ({"trainable": ("norms", "embedings")}, r"'embedings' matches no .*near: embeddings"),
        (
            {"lora": LoRA(), "rates": (Rate("norms", 0.1),)},
            r"train\.rates: rule 'norms' matches no",
        ),
    ],
)
def test_what_is_wrong_with_paths_mesh_and_rules_is_said_before_a_model_is_read(
    tmp_path, corpus, monkeypatch, capsys, sections, message
):
    monkeypatch.setattr(LanguageModelTask, "load", lambda _: pytest.fail("a model was read"))
    with pytest.raises(InputError, match=message):
        run(tiny(tmp_path / "run", corpus, **sections))
    assert capsys.readouterr().err == "" and not (tmp_path / "run").exists()


def test_a_package_that_is_missing_is_said_before_a_model_is_read(tmp_path, corpus, monkeypatch):
    monkeypatch.setattr(LanguageModelTask, "load", lambda _: pytest.fail("a model was read"))
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InputError, match=r"track\.wandb=p needs wandb: pip install"):
        run(tiny(tmp_path / "run", corpus).replace(track=TrackSection(wandb="p")))


@pytest.mark.slow
def test_a_task_completes_batches_with_the_weights_of_the_step_and_resumes_the_same(
    tmp_path, corpus, monkeypatch
):
    calls = []

    def prepare(self, step, batch, params):
        """Tokens that depend on the weights: any difference would change all later losses."""
        total = float(sum(x.sum() for x in flatten(params).values()))
        calls.append((step, total))
        return batch | {"tokens": (batch["tokens"] + abs(int(1e6 * total))) % 259}

    monkeypatch.setattr(LanguageModelTask, "prepare", prepare)
    options = {"steps": 6, "save_every": 3, "export": False, "data": {"holdout": 0.2}, "ema": 0.9}

    def config(name):
        evaluation = EvalSection(every=3, batches=1)
        return tiny(tmp_path / name, corpus, **options).replace(eval=evaluation)

    run(config("whole"))
    # Of a validation as well, which reads the same weights as the next step.
    assert [step for step, _ in calls] == [0, 1, 2, 3, 3, 4, 5, 6]
    assert calls[3] == calls[4] and len({total for _, total in calls}) == 7
    whole, calls[:] = dict(calls), []
    with monkeypatch.context() as patch:
        at_step(patch, 3, lambda: signal.raise_signal(signal.SIGTERM))
        run(config("parts"))
    run(config("parts"))
    assert dict(calls) == whole
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_a_run_that_failed_before_its_first_checkpoint_may_start_otherwise(tmp_path, corpus):
    folder = tmp_path / "run"
    config_lib.dump(tiny(folder, corpus, lr=1e-5), folder / "config.yaml")
    assert folder_lib.check(tiny(folder, corpus)) == folder


def test_a_batch_that_the_devices_cannot_share_names_the_nearest(tmp_path, corpus):
    with pytest.raises(InputError, match=r"train.batch_size=6 must be a multiple .* = 4; nearest"):
        run(tiny(tmp_path / "run", corpus, batch_size=6))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_adapters_embeddings_and_norms_of_a_run_load_merged_over_their_base(
    tmp_path, corpus, monkeypatch, capsys
):
    folder, opened = tmp_path / "run", []
    monkeypatch.setattr(
        batches, "make_loader", lambda *a, **k: opened.append(k["split"]) or make_loader(*a, **k)
    )
    settings = {"lora": LoRA(rank=2), "trainable": ("lora", "embeddings", "norms"), "ema": 0.5}
    settings |= {"steps": 4, "save_every": 2, "data": {"holdout": 0.2}}
    settings |= {"export_dtype": "bfloat16"}
    config = tiny(folder, corpus, **settings)
    config = config.replace(eval=EvalSection(every=2, batches=2))
    metrics = run(config)
    assert opened == ["train", "validation"]
    counts = [row.get("validation_tokens") for row in read(folder / "metrics.jsonl")]
    assert len(set(counts) - {None}) == 1 and len(list(filter(None, counts))) == 3
    shown = capsys.readouterr().err
    assert "loading tiny" in shown and f"writing {folder / 'model'}" in shown
    params, model, _tokenizer = load_run(folder)
    assert model.lora is None and not any("lora" in path for path in flatten(params))
    exported, _, _ = checkpoints.load(folder / "model")
    for path, leaf in flatten(params).items():
        assert flatten(exported)[path].dtype == "bfloat16", path
        np.testing.assert_array_equal(
            leaf.astype("bfloat16"), flatten(exported)[path], err_msg=path
        )
    assert not (folder / "adapter").exists()  # adapters alone would not be this model
    assert 3 < metrics["validation_loss"] < 5.6
    size = sum(
        file.stat().st_size for file in (folder / "checkpoints/4").rglob("*") if file.is_file()
    )
    frozen = sum(params["layers"]["mlp"][name]["kernel"].nbytes for name in ("gate", "up", "down"))
    assert size < 4 * (sum(leaf.nbytes for leaf in flatten(params).values()) - frozen)
    note = json.loads((folder / "base.json").read_text())
    del note["sha256"]  # as of older versions
    (folder / "base.json").write_text(json.dumps(note | {"seed": 1}))
    with pytest.raises(InputError, match="has other weights than when the run"):
        load_run(folder)
