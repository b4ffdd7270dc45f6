"""Runs on 16-bit checkpoints: what is trained is float32, what is stored is as the base was."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training_support import tiny

from lcjax import checkpoints
from lcjax.checkpoints import ByteTokenizer, save_hf
from lcjax.checkpoints.run_folder import BaseModel, load_run
from lcjax.errors import InputError
from lcjax.models import preset
from lcjax.models.decoder import random_params
from lcjax.models.lora import LoRA, is_adapter, merge
from lcjax.parallel.sharding import Mesh
from lcjax.training import loop, run
from lcjax.training.tracking import read
from lcjax.tree import flatten, union

STEPS = 4
SMALL = {"steps": STEPS, "save_every": 2, "lr": 2e-5, "warmup_steps": 0, "schedule": "constant"}


pytestmark = pytest.mark.usefixtures("compiled_once")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A bfloat16 checkpoint whose weights are large enough that 2e-5 is below their rounding."""
    config = preset("tiny").replace(param_dtype="bfloat16")
    params = jax.tree.map(lambda leaf: leaf * 4, random_params(config, 0))
    return save_hf(tmp_path_factory.mktemp("base") / "hf", params, config, ByteTokenizer())


@pytest.fixture(scope="module")
def whole(tmp_path_factory, corpus, base):
    """A run that nothing disturbed: (folder, the training object)."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        trainings = watched(patch)
        run(settings(folder, corpus, base, ema=0.5))
    return folder, trainings[0]


def settings(folder, corpus, base, **train):
    model = {"path": str(base), "dtype": "float32"}
    return tiny(folder, corpus, model=model, mesh=Mesh(fsdp=8), **SMALL | train)


def watched(monkeypatch):
    """Remembers the training object of the next run."""
    trainings, begin = [], loop.Training.run
    monkeypatch.setattr(loop.Training, "run", lambda self: trainings.append(self) or begin(self))
    return trainings


@pytest.mark.slow
def test_every_trained_weight_of_a_bfloat16_checkpoint_moves(whole, base):
    folder, state = whole[0], whole[1].state
    before = flatten(checkpoints.load(base)[0])
    assert before.keys() == flatten(state.params).keys()
    for path, leaf in flatten(state.params).items():
        assert leaf.dtype == jnp.float32, path
        moved = np.asarray(leaf) != np.asarray(before[path], np.float32)
        # Rows of bytes that the text does not have are left alone.
        assert moved.mean() > (0.03 if path.startswith("embed") else 0.9), path
    params, config, _ = checkpoints.load(folder)
    exported, _, _ = checkpoints.load(folder / "model")
    assert config.param_dtype == "bfloat16"
    for path, leaf in flatten(params).items():
        assert leaf.dtype == jnp.bfloat16, path
        np.testing.assert_array_equal(leaf, flatten(exported)[path], err_msg=path)
    full = checkpoints.load(folder, param_dtype="float32")[0]
    jax.tree.map(np.testing.assert_array_equal, full, state.ema)


@pytest.mark.slow
def test_a_bfloat16_checkpoint_resumes_with_bit_equal_weights(
    tmp_path, corpus, base, whole, monkeypatch
):
    trainings = watched(monkeypatch)
    report = loop.Progress.report

    def stop(self, step, metrics):
        report(self, step, metrics)
        if step == 3:
            raise ConnectionError("the machine is gone")

    with monkeypatch.context() as patch:
        patch.setattr(loop.Progress, "report", stop)
        with pytest.raises(ConnectionError):
            run(settings(tmp_path / "parts", corpus, base, export=False, ema=0.5))
    run(settings(tmp_path / "parts", corpus, base, export=False, ema=0.5))
    assert trainings[1].first == 2
    folders = whole[0], tmp_path / "parts"
    losses = [[row["loss"] for row in read(folder / "metrics.jsonl")] for folder in folders]
    assert losses[0] == losses[1]
    for name in ("params", "opt_state", "ema"):
        one, other = (getattr(training.state, name) for training in (whole[1], trainings[1]))
        jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.slow
def test_adapters_on_a_bfloat16_base_are_rounded_once_with_their_sum(
    tmp_path, corpus, base, monkeypatch
):
    trainings, lora = watched(monkeypatch), LoRA(rank=2)
    run(settings(tmp_path / "run", corpus, base, lora=lora, lr=1e-2, export_dtype="float32"))
    trained, frozen = trainings[0].state.params, trainings[0].frozen
    assert all(is_adapter(path) and x.dtype == jnp.float32 for path, x in flatten(trained).items())
    assert all(leaf.dtype == jnp.bfloat16 for leaf in flatten(frozen).values())
    exact = flatten(merge(union(trained, frozen), lora, dtype="float32"))
    stored, config, _ = load_run(tmp_path / "run")
    assert config.lora is None and config.param_dtype == "bfloat16"
    exported = flatten(checkpoints.load(tmp_path / "run" / "model")[0])
    for path, leaf in flatten(stored).items():
        np.testing.assert_array_equal(leaf, exact[path].astype(jnp.bfloat16), err_msg=path)
        np.testing.assert_array_equal(exported[path], exact[path], err_msg=path)
    kernel = flatten(stored)["layers/attention/query/kernel"]
    plain = flatten(frozen)["layers/attention/query/kernel"]
    assert (np.asarray(kernel) != np.asarray(plain)).any()


def test_rules_that_leave_adapters_untrained_raise_input_error(tmp_path, corpus, base):
    config = settings(tmp_path / "run", corpus, base, lora=LoRA(rank=2), trainable=("norms",))
    with pytest.raises(
        InputError, match=r"trainable=\['norms'\] leaves adapters .*add the rule lora"
    ):
        run(config)


def test_a_note_of_another_version_names_the_fix(tmp_path):
    with pytest.raises(InputError, match="is no run folder: it has no base.json"):
        load_run(tmp_path)
    (tmp_path / "base.json").write_text('{"model": "x", "frozen": null}')
    with pytest.raises(InputError, match=r"of another version; remove it and start the command"):
        BaseModel.read(tmp_path)
