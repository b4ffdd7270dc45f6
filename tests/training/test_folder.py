"""`run.existing=overwrite` removes files that a run wrote, and no others."""

import os
import shutil

import jax
import numpy as np
import pytest
from training_support import tiny

from lcjax.attention import Longformer, Sliding
from lcjax.checkpoints import ByteTokenizer, load, save_hf
from lcjax.checkpoints.orbax_io import FOLDER
from lcjax.data import Chunks, Masking
from lcjax.errors import InputError
from lcjax.files import CHECKSUMS
from lcjax.generation.language_model import LanguageModel
from lcjax.memory import CepeSection
from lcjax.models import LayerKind, preset
from lcjax.models.decoder import random_params
from lcjax.models.lora import LoRA
from lcjax.parallel.run_lock import RunLock
from lcjax.parallel.sharding import Mesh
from lcjax.rope import Default
from lcjax.training import folder as folder_lib
from lcjax.training import run
from lcjax.training.language_modelling import LanguageModelTask
from lcjax.training.loop import Training

pytestmark = pytest.mark.usefixtures("compiled_once", "traced_once")
OVERWRITE = {"existing": "overwrite"}


def short(folder, corpus, **sections):
    settings = {"steps": 2, "save_every": 1, "lora": LoRA(rank=2)}
    return tiny(folder, corpus, mesh=Mesh(), **settings, **sections)


@pytest.fixture(scope="module")
def complete(tmp_path_factory, corpus):
    """A run with a model and adapters."""
    folder = tmp_path_factory.mktemp("complete") / "run"
    run(short(folder, corpus))
    return folder


@pytest.fixture
def folder(complete, tmp_path):
    return shutil.copytree(complete, tmp_path / "run")


@pytest.mark.slow
def test_a_run_folder_and_exported_folders_have_checksums(folder, corpus):
    files = (folder / CHECKSUMS).read_text()
    assert all(f"  {name}\n" in files for name in ("config.yaml", "model.yaml", "metrics.jsonl"))
    assert "  tokenizer/" in files
    for name in ("model", "adapter"):
        lines = (folder / name / CHECKSUMS).read_text().splitlines()
        names = {line.split("  ")[1] for line in lines}
        assert names == set(os.listdir(folder / name)) - {CHECKSUMS}
    run(short(folder, corpus, checksums=False))  # exports again, without them
    assert list(folder.rglob(CHECKSUMS)) == [folder / CHECKSUMS]


def snapshot(folder):
    return {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}


def add(folder, name):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if name.endswith("/"):
        path.mkdir()
    elif name.endswith("@"):
        path.symlink_to(folder)
    else:
        path.write_text("mine")


@pytest.mark.slow
def test_the_old_run_is_all_that_is_removed(folder, corpus):
    config = short(folder, corpus, run=OVERWRITE)
    for name in ("notes.txt", "eval/run.json", "bad_batch_7.npz", "error.txt", "checkpoints/3/"):
        add(folder, name)
    add(folder, "checkpoints/2.damaged/state/x")
    for name in ("tensorboard/events.out.tfevents.1", "wandb/latest-run@", "wandb.json"):
        add(folder, name)
    add(folder, "profile/plugins/profile/day/host.xplane.pb")
    assert folder_lib.check(config) == folder
    folder_lib.begin(config, folder)
    assert sorted(os.listdir(folder)) == ["config.yaml", "eval", "notes.txt"]


@pytest.mark.parametrize(
    "name",
    [
        *("checkpoints/thesis.txt", "checkpoints/old/", "tokenizer/vocab.txt", "profile/a/b.txt"),
        *("tensorboard/plot.png", "model/README.md", "model/.git/empty/", "adapter/thesis.txt"),
        *("model/tokenizer.model@", "checkpoints/7@", "loss.png/thesis.txt"),
    ],
)
def test_other_files_among_the_results_are_listed_and_nothing_is_removed(
    folder, corpus, monkeypatch, name
):
    monkeypatch.setattr(LanguageModelTask, "load", lambda _: pytest.fail("a model was read"))
    if name.startswith("loss.png"):
        (folder / "loss.png").unlink()
    add(folder, name)
    before = snapshot(folder)
    last = name.removeprefix("model/").removeprefix("adapter/")
    with pytest.raises(InputError, match=f"lcjax does not write {last} into"):
        run(short(folder, corpus, run=OVERWRITE))
    with pytest.raises(InputError):  # it may have come after the first check
        folder_lib.begin(short(folder, corpus, run=OVERWRITE), folder)
    assert snapshot(folder) == before


@pytest.mark.parametrize("text", [None, "model: mine\n", "- mine\n", "{", "\x00"])
def test_a_folder_without_the_settings_of_a_run_is_not_emptied(folder, corpus, text):
    (folder / "config.yaml").unlink()
    if text is not None:
        (folder / "config.yaml").write_text(text)
    before = snapshot(folder)
    with pytest.raises(InputError, match=r"no config\.yaml of a run folder that lcjax wrote"):
        folder_lib.check(short(folder, corpus, run=OVERWRITE))
    assert snapshot(folder) == before


def test_a_model_of_other_origin_is_not_removed(folder, corpus):
    config = short(folder, corpus, run=OVERWRITE)
    text = (folder / "model" / "config.json").read_text()
    (folder / "model" / "config.json").write_text(
        text.replace("{", '{"transformers_version": 5,', 1)
    )
    before = snapshot(folder)
    with pytest.raises(
        InputError, match=r"model cannot be replaced: it has no config\.json of a model"
    ):
        folder_lib.check(config)
    assert snapshot(folder) == before


def test_a_model_that_transformers_cannot_hold_raises_input_error_before_the_first_step(
    tmp_path, corpus
):
    model = {"preset": "tiny", "pattern": Longformer(window=8)}
    with pytest.raises(InputError, match=r"train.export=true: .*pattern.*set train.export=false"):
        run(tiny(tmp_path / "run", corpus, model=model))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_of_layers_that_differ_is_opened_with_them(tmp_path, corpus):
    layers = (LayerKind(pattern=Sliding(8), rope=Default(theta=100.0)), LayerKind())
    model = {"preset": "tiny", "layers": layers}
    with pytest.raises(InputError, match=r"train.export=true: .*layers of ropes .*export=false"):
        run(tiny(tmp_path / "run", corpus, model=model))
    run(tiny(tmp_path / "run", corpus, model=model, steps=2, export=False))
    lm = LanguageModel.load(str(tmp_path / "run"))
    assert lm.config.layers == layers
    uniform = LanguageModel.load(str(tmp_path / "run"), layers=(), pattern=Sliding(8))
    assert uniform.config.layers == () and "layers_1" in uniform.params


CEPE = CepeSection(encoder="tiny-encoder")
MIXED = (LayerKind(pattern=Sliding(8)), LayerKind())


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Two folders: equal layers, and layers that differ."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, layers in (("equal", ()), ("mixed", MIXED)):
        config = preset("tiny").replace(layers=layers)
        save_hf(folder / name, random_params(config, 0), config, ByteTokenizer())
    return folder


CHUNKS = {"length": 32, "chunks": Chunks(count=2, length=8)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "model", "data", "frozen"),
    [
        ("equal", {"layers": MIXED}, {}, {"lora": LoRA(rank=2)}),
        ("equal", {"layers": MIXED}, {}, {"trainable": ("mlp",)}),
        ("mixed", {}, {}, {"lora": LoRA(rank=2)}),
        ("mixed", {"layers": ()}, {}, {"lora": LoRA(rank=2)}),
        ("mixed", {"layers": (), "memory": CEPE}, CHUNKS, {"trainable": ("memory",)}),
        ("equal", {"memory": CEPE}, CHUNKS, {"lora": LoRA(rank=2)}),
        ("equal", {"encoder_layers": 1}, {"masking": Masking()}, {"trainable": ("norms",)}),
    ],
    ids=str,
)
def test_a_run_with_frozen_weights_and_its_exports_are_one_model(
    tmp_path, corpus, checkpoints, base, model, data, frozen
):
    model = {"path": str(checkpoints / base)} | model
    run(tiny(tmp_path / "run", corpus, model=model, data=data, steps=2, **frozen))
    params, config, _ = load(tmp_path / "run")
    exports = ["model"] if "memory" in model or "lora" not in frozen else ["model", "adapter"]
    for name in exports:
        exported, again, _ = load(tmp_path / "run" / name)
        assert again.layers == config.layers
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), exported, params)


def test_two_runs_at_once_raise_input_error(tmp_path, corpus):
    config = short(tmp_path / "run", corpus)
    with RunLock(tmp_path / "run"), pytest.raises(InputError, match="is in use by process"):
        run(config)
    assert not (tmp_path / "run").exists()


def test_a_run_that_failed_at_its_start_may_be_replaced(tmp_path, corpus):
    config = short(tmp_path / "run", corpus, run=OVERWRITE)
    assert folder_lib.check(config) == tmp_path / "run"
    (tmp_path / "run").mkdir()
    add(tmp_path / "run", "error.txt")
    assert folder_lib.check(config) == tmp_path / "run"
    folder_lib.begin(config, tmp_path / "run")
    assert folder_lib.check(config) == tmp_path / "run"


@pytest.mark.parametrize("name", ["model/README.md", "adapter/README.md"])
def test_results_that_cannot_be_replaced_raise_input_error_before_the_first_step(
    folder, corpus, monkeypatch, name
):
    add(folder, name)
    config = short(folder, corpus)
    assert folder_lib.finished(config)
    monkeypatch.setattr(LanguageModelTask, "load", lambda _: pytest.fail("a model was read"))
    with pytest.raises(InputError, match=r"cannot be replaced: lcjax does not write README\.md"):
        run(config)


@pytest.mark.parametrize("name", ["checkpoints", "tokenizer", "model"])
@pytest.mark.parametrize("kind", ["a file", "read-only"])
def test_a_folder_that_cannot_take_results_raises_input_error_before_the_model_is_read(
    tmp_path, corpus, monkeypatch, name, kind
):
    monkeypatch.setattr(LanguageModelTask, "load", lambda _: pytest.fail("a model was read"))
    path, access = tmp_path / name, os.access
    if kind == "a file":
        path.write_text("mine")
    else:
        path.mkdir()
        # The user who runs the tests may be allowed to write anywhere.
        monkeypatch.setattr(os, "access", lambda p, mode: p != path and access(p, mode))
    with pytest.raises(InputError, match=rf"run\.folder=.*{name}.*name another folder") as error:
        run(short(tmp_path, corpus))
    assert "\n" not in str(error.value)
    assert os.listdir(tmp_path) == [name]


def test_a_folder_in_the_place_of_a_file_raises_input_error_before_the_model_is_read(
    tmp_path, corpus, monkeypatch
):
    monkeypatch.setattr(LanguageModelTask, "load", lambda _: pytest.fail("a model was read"))
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(InputError, match=r"metrics\.jsonl is a folder, and a file is needed"):
        run(short(tmp_path, corpus))


def test_a_folder_of_other_content_is_not_the_folder_of_a_run(tmp_path, corpus):
    for name in ("tokenizer/tokenizer.json", "model.yaml", "metrics.jsonl", "config.yaml"):
        folder = tmp_path / name.partition(".")[0]
        add(folder, "notes.txt")
        assert folder_lib.check(short(folder, corpus)) == folder
        add(folder, name)
        with pytest.raises(InputError, match="is not the folder of a run.*name a new folder"):
            folder_lib.check(short(folder, corpus))


@pytest.mark.parametrize(
    ("owner", "method", "lost"), [(Training, "_report", "."), (LanguageModelTask, "export", FOLDER)]
)
def test_a_folder_that_is_removed_during_the_run_is_an_error(
    tmp_path, corpus, monkeypatch, owner, method, lost
):
    before = getattr(owner, method)

    def remove(*args, **kwargs):
        before(*args, **kwargs)
        shutil.rmtree(tmp_path / "run" / lost, ignore_errors=True)

    monkeypatch.setattr(owner, method, remove)
    with pytest.raises(InputError, match=r"run.folder=.* was removed during the run"):
        run(short(tmp_path / "run", corpus))
