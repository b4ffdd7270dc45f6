"""Memories that stand before the text by a run: what is trained, and the folders that it leaves."""

import numpy as np
import pytest
from training_support import tiny

from lcjax import config as configs
from lcjax.checkpoints.build import ModelSection, build
from lcjax.data import Chunks
from lcjax.errors import InputError
from lcjax.memory import AutoCompressorSection, BeaconSection, CepeSection
from lcjax.models.distill import Distill
from lcjax.models.lora import LoRA
from lcjax.training import run
from lcjax.training.train_config import TrainConfig
from lcjax.tree import flatten

BEACON = BeaconSection(chunk=16, ratio=8, ratios=(4, 8))
SUMMARY = AutoCompressorSection(chunk=16, summary=3)
IN_PARTS = AutoCompressorSection(chunk=16, summary=3, gradient_segments=2)


pytestmark = pytest.mark.usefixtures("compiled_once")


def data(**changes):
    chunks = Chunks(**{"count": 2, "length": 16} | changes)
    return {"length": 48, "chunks": chunks, "document_mask": False}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("section", "learned"), [(BEACON, False), (BEACON, True), (SUMMARY, False), (IN_PARTS, True)]
)
def test_a_run_trains_the_memory_and_its_folders_read_alike(section, learned, corpus, tmp_path):
    model = {"preset": "tiny", "memory": section}
    lora = {} if section is BEACON else {"lora": LoRA(2, targets=("query", "value"))}
    rules = ("memory", "lora") if lora else ("memory",)
    rows = data(learned=learned)
    steps = {"steps": 2, "warmup_steps": 0, "save_every": 2}  # the second one moves lora_a as well
    run(tiny(tmp_path / "run", corpus, model=model, trainable=rules, data=rows, **lora, **steps))
    _, initial, _ = build(ModelSection(**model))
    loaded, params, _ = build(ModelSection(path=str(tmp_path / "run" / "model")))
    initial, final = flatten(initial), flatten(params)
    moved = {path for path in initial if not np.array_equal(initial[path], final[path])}
    adapted = {f"layers/attention/{name}/kernel" for name in ("query", "value")} if lora else set()
    added = {p for p in initial if "/memory/" in p or p.startswith("encoder/")}
    assert moved == added | adapted
    again, params, _ = build(ModelSection(path=str(tmp_path / "run")))
    assert again.config.memory == loaded.config.memory
    for path, leaf in flatten(params).items():
        np.testing.assert_allclose(leaf, final[path], atol=1e-6, err_msg=path)


def test_a_config_sets_the_encoding_of_windows(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(
        "model:\n  preset: tiny\n  memory: {type: beacon, chunk: 16, ratio: 8, ratios: [4, 8]}\n"
    )
    words = ["--config", str(file)]
    assert configs.parse(TrainConfig, words).model.memory == BEACON
    loaded = configs.parse(TrainConfig, [*words, "--model.memory.ratios=[]"]).model.memory
    assert loaded.ratios == ()


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (BEACON, {"length": 12}, "data.chunks.length=12 must be a multiple of 8.*nearest: 8, 16"),
        (SUMMARY, {"length": 20, "count": 1}, "length=20 is more than the 16"),
        (
            IN_PARTS,
            {},
            "gradient_segments=2 lets no gradient .* set data.chunks.learned=true",
        ),
        (CepeSection("tiny-encoder"), {"learned": True}, "data.chunks.learned=true adds"),
    ],
)
def test_rows_that_do_not_suit_a_memory_raise_input_error_before_it_is_made(
    model, changes, message, corpus, tmp_path
):
    config = tiny(
        tmp_path / "run", corpus, model={"preset": "tiny", "memory": model}, data=data(**changes)
    )
    with pytest.raises(InputError, match=message) as caught:
        run(config)
    assert "\n" not in str(caught.value)


def test_what_has_no_teacher_raises_input_error(corpus, tmp_path):
    model = {"preset": "tiny", "memory": SUMMARY}
    with pytest.raises(InputError, match=r"learned=true|needs a teacher's rows"):
        run(tiny(tmp_path / "run", corpus, model=model, data=data(learned=True), distill=Distill()))
