"""Trainings of CEPE (RetDoc) and RETRO on rows with retrieved passages."""

import numpy as np
import pytest
from training_support import tiny

pytest.importorskip("bm25s")

from lcjax.checkpoints import ByteTokenizer
from lcjax.checkpoints.build import ModelSection, build
from lcjax.data import Chunks, DataConfig, RetrievedSource, TextConfig
from lcjax.errors import InputError
from lcjax.memory import CepeSection, RetroSection
from lcjax.retrieval import BuildConfig, Chunking, ChunksConfig, write_chunks
from lcjax.retrieval import build as build_store
from lcjax.training import run
from lcjax.training.tracking import read
from lcjax.tree import flatten

pytestmark = pytest.mark.usefixtures("compiled_once")

RETDOC = Chunks(count=4, length=16, text="retrieved")
RETRO = Chunks(count=8, length=16, text="retrieved", stride=8)
MEMORIES = {
    RETDOC: CepeSection(encoder="tiny-encoder"),
    RETRO: RetroSection(encoder_layers=1, chunk=8, neighbours=2, neighbour_tokens=16),
}


@pytest.fixture(scope="module")
def stored(corpus, tmp_path_factory):
    """A function that stores rows with these chunks once, and returns the section `data`."""
    out = tmp_path_factory.mktemp("stored")
    text, store = str(corpus), str(out / "store")
    build_store(BuildConfig(TextConfig(text), Chunking("words", 6), out=store, workers=1))
    ByteTokenizer().save(out / "tokenizer")

    def data(chunks):
        folder = out / f"rows{chunks.stride}"
        if not folder.exists():
            rows = DataConfig(path=text, length=32, chunks=chunks, threads=0, prefetch=0)
            names = {"store": store, "tokenizer": str(out / "tokenizer"), "out": str(folder)}
            write_chunks(ChunksConfig(data=rows, rows=32, **names))
        return {"path": "", "sources": [RetrievedSource(str(folder))], "chunks": chunks}

    return data


def config(folder, corpus, data, memory, **train):
    model = {"preset": "tiny", "memory": memory}
    return tiny(folder, corpus, data=data, model=model, trainable=("memory",), **train)


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [RETDOC, RETRO], ids=["cepe", "retro"])
def test_a_run_trains_a_memory_on_retrieved_passages(chunks, corpus, stored, tmp_path):
    folder, memory = tmp_path / "run", MEMORIES[chunks]
    run(config(folder, corpus, stored(chunks), memory, steps=3, warmup_steps=1))
    losses = [line["loss"] for line in read(folder / "metrics.jsonl") if "loss" in line]
    assert len(losses) == 3 and losses[-1] < losses[0]
    _, before, _ = build(ModelSection(preset="tiny", memory=memory))
    _, after, _ = build(ModelSection(path=str(folder / "model")))
    before, after = flatten(before), flatten(after)
    for path, value in after.items():
        is_memory = "/memory/" in path or path.startswith("encoder/")
        assert is_memory or np.array_equal(value, before[path]), path
    assert any(not np.array_equal(after[path], before[path]) for path in after)


@pytest.mark.parametrize(
    ("chunks", "memory", "match"),
    [
        (RETRO, MEMORIES[RETDOC], r"data.chunks.stride=8: the passages of each part of a row"),
        (RETDOC, MEMORIES[RETRO], r"4 passages for each row, and model.memory reads neighbours=2"),
        (
            RETRO,
            RetroSection(encoder_layers=1, chunk=4, neighbour_tokens=16),
            r"2 passages for each 8 tokens, and .* chunk=4 tokens; .*stride=4 and count=2",
        ),
        (
            RETRO,
            RetroSection(encoder_layers=1, chunk=8, neighbours=1, neighbour_tokens=16),
            r"model.memory reads neighbours=1 for each chunk=8",
        ),
    ],
)
def test_passages_for_another_memory_raise_input_error(
    chunks, memory, match, corpus, stored, tmp_path
):
    with pytest.raises(InputError, match=match) as caught:
        run(config(tmp_path / "run", corpus, stored(chunks), memory))
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()
