"""Checks of a model's input: the mask token's embedding, and chunks for its memory."""

import dataclasses

import jax
import numpy as np
import pytest
from training_support import losses, tiny

from lcjax.checkpoints import ByteTokenizer
from lcjax.checkpoints.build import model_config
from lcjax.data import Chunks, Masking, make_loader
from lcjax.errors import InputError
from lcjax.memory import CepeSection
from lcjax.models import preset
from lcjax.parallel.sharding import Mesh, batch_sharding, make_mesh
from lcjax.training import batches, loop, run
from lcjax.training.language_modelling import LanguageModelTask

CHUNKS = {"length": 24, "chunks": Chunks(count=4, length=4), "document_mask": False}
WITH_MEMORY = {"preset": "tiny", "memory": CepeSection(encoder="tiny-encoder")}


pytestmark = pytest.mark.usefixtures("compiled_once")


@pytest.mark.parametrize(
    ("data", "model", "match"),
    [
        (
            {"masking": Masking(token=259)},
            None,
            r"masking.token=259 is beyond the 259 tokens of the model; name one",
        ),
        (CHUNKS, None, r"data.chunks are read by a memory, and this model has none"),
        ({}, WITH_MEMORY, r"data.chunks=null: model.memory reads chunks of text; set data.chunks"),
    ],
)
def test_text_that_a_model_cannot_read_raises_input_error_before_it_is_loaded(
    data, model, match, corpus, tmp_path, monkeypatch
):
    monkeypatch.setattr(LanguageModelTask, "load", None)
    with pytest.raises(InputError, match=match) as caught:
        run(tiny(tmp_path / "run", corpus, data=data, model=model))
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_first_token_behind_the_vocabulary_needs_a_row_of_its_own(corpus, tmp_path):
    config = tiny(tmp_path / "run", corpus, data={"masking": Masking()}, steps=3)
    with pytest.raises(
        InputError, match=r"masking.token=259 is beyond the 259 tokens .*; set data.masking.token"
    ):
        run(config)
    run(config.replace(model=dataclasses.replace(config.model, preset="tiny-encoder")))
    assert len(losses(tmp_path / "run")) == 3


def test_chunks_lie_over_the_mesh_like_the_rows_that_they_belong_to(corpus, tmp_path):
    config = tiny(tmp_path / "run", corpus, data=CHUNKS, model=WITH_MEMORY)
    mesh = make_mesh(config.mesh)
    model = model_config(config.model, preset("tiny"))
    loader = make_loader(config.data, ByteTokenizer(), config.train.batch_size)
    local = next(loader)
    loader.close()
    put = batches.put(local, mesh)
    shapes = {name: value.shape for name, value in put.items()}
    assert shapes["chunks"] == shapes["chunk_mask"] == (8, 4, 4)
    assert all(shapes[name] == (8, 8) for name in ("tokens", "targets", "weights"))
    assert all(value.sharding == batch_sharding(mesh) for value in put.values())
    assert batches.row_length(config, model) == 8
    np.testing.assert_array_equal(jax.device_get(put["chunks"]), local["chunks"])


@pytest.mark.slow
def test_a_run_with_chunks_resumes_with_the_losses_of_one_that_was_not_stopped(corpus, tmp_path):
    def config(folder, **train):
        return tiny(tmp_path / folder, corpus, data=CHUNKS, model=WITH_MEMORY, steps=6, **train)

    run(config("whole", save_every=3))
    first = config("parts", save_every=3)
    stopped = loop.StopRequest.should_stop
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            loop.StopRequest, "should_stop", lambda self, step: step == 3 or stopped(self, step)
        )
        patch.setattr(loop.Training, "_finish_early", lambda *args: {})
        run(first)
    assert max(losses(tmp_path / "parts")) == 3
    run(first)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_a_text_in_parts_must_be_even_behind_its_chunks(corpus, tmp_path):
    data = CHUNKS | {"length": 22}
    config = tiny(tmp_path / "run", corpus, data=data, mesh=Mesh(context=2))
    with pytest.raises(InputError, match=r"data.length=22 less the 16 of its .* = 4; nearest: 24"):
        run(config)
