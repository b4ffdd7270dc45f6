"""`data:` sections as Tasks and Mixtures of seqio, and the papers' mixtures among them."""

import importlib
import json
from dataclasses import replace

import numpy as np
import pytest
from data_support import BOS, EOS, Bytes, assert_same, make_texts, write_jsonl

from lcjax.checkpoints import ByteTokenizer
from lcjax.data import ChatSource, Chunks, DataConfig, SeqioSource, TextSource, make_loader
from lcjax.data.prepare import PrepareConfig, prepare
from lcjax.data.seqio_source import context_chunks
from lcjax.data.seqio_tasks import register
from lcjax.errors import InputError

seqio = pytest.importorskip("seqio", reason="seqio is not installed: pip install -e '.[seqio]'")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for i, name in enumerate(("books", "web")):
        (folder / name).mkdir()
        write_jsonl(folder / name / "a.jsonl", make_texts(30, seed=i, high=150))
    return folder


@pytest.fixture
def registered():
    """`register`, and what it has registered is gone afterwards."""
    made = []

    def add(name, *arguments):
        tasks = register(name, *arguments)
        made.append((name, tasks))
        return tasks

    yield add
    for name, tasks in made:
        seqio.MixtureRegistry.remove(name)
        for task in tasks:
            seqio.TaskRegistry.remove(task)


def mixture(folder, **more):
    sources = [
        TextSource(str(folder / "books"), 2.0, pack="windows", stride=8),
        TextSource(str(folder / "web"), 1.0, stride=8),
    ]
    plain = {"length": 32, "chunks": Chunks(4, 6), "document_mask": False}
    return DataConfig(**{"sources": sources} | plain | more)


def test_a_data_section_becomes_a_task_per_source_and_a_mixture_by_weight(folder, registered):
    tasks = registered("lcjax_test", mixture(folder), Bytes())
    assert tasks == ["lcjax_test_0", "lcjax_test_1"]
    made = seqio.get_mixture_or_task("lcjax_test")
    rates = {task.name: made.get_rate(task) for task in made.tasks}
    assert rates == {"lcjax_test_0": 2.0, "lcjax_test_1": 1.0}
    assert set(made.output_features) == {"context", "targets"}
    assert list(made.splits) == ["train"]
    vocabulary = made.output_features["targets"].vocabulary
    assert (vocabulary.vocab_size, vocabulary.bos_id, vocabulary.eos_id) == (258, BOS, EOS)
    assert vocabulary.encode("ab") == [97, 98] == vocabulary.encode_tf("ab").numpy().tolist()
    assert vocabulary.decode([97, 98]) == "ab"
    assert vocabulary.decode_tf(np.array([97, 98], np.int32)).numpy() == b"ab"
    assert vocabulary == made.output_features["context"].vocabulary


def test_examples_are_the_rows_of_the_loader(folder, registered):
    config = mixture(folder, shuffle=False, repeat=1)
    registered("lcjax_test", config, Bytes())
    for i, source in enumerate(config.sources):
        dataset = seqio.get_dataset(
            f"lcjax_test_{i}",
            {"context": 24, "targets": 8},
            dataset_split="train",
            shuffle=False,
            feature_converter=context_chunks(config.chunks, 8, context="context"),
        )
        rows = list(dataset.as_numpy_iterator())
        alone = replace(config, sources=[source])
        wanted = list(make_loader(alone, Bytes(), 1))
        assert len(rows) == len(wanted) > 20
        for row, batch in zip(rows, wanted, strict=True):
            for key in ("tokens", "chunks", "chunk_mask", "segments", "positions"):
                np.testing.assert_array_equal(row[key], batch[key][0], err_msg=key)


def test_a_registered_mixture_is_a_source_with_the_converter_and_resumes(folder, registered):
    registered("lcjax_test", mixture(folder, holdout=0.2), Bytes())
    source = SeqioSource(task="lcjax_test", converter="chunks", context="context")
    config = mixture(folder, sources=[source])
    loader = make_loader(config, Bytes(), 6)
    batches, states = [], []
    for _ in range(10):
        batches.append(next(loader))
        states.append(json.dumps(loader.get_state()))
    loader.close()
    assert all(batch["chunk_mask"].shape == (6, 4, 6) for batch in batches)
    resumed = make_loader(config, Bytes(), 6, rows=[1, 2])
    resumed.set_state(json.loads(states[6]))
    wanted = [{k: v[[1, 2]] for k, v in batch.items()} for batch in batches[7:]]
    assert_same(wanted, [next(resumed) for _ in wanted])
    resumed.close()
    held = SeqioSource(task="lcjax_test_1", split="validation", converter="chunks")
    rows = next(make_loader(mixture(folder, sources=[held]), Bytes(), 1))
    assert rows["weights"].sum() > 0


def test_rows_without_chunks_are_targets_alone_and_follow_the_seed(folder, registered):
    config = DataConfig(path=str(folder), length=16)
    registered("lcjax_test", config, Bytes())
    task = seqio.get_mixture_or_task("lcjax_test")

    def rows(**more):
        data = task.get_dataset(sequence_length=None, split="train", num_epochs=1, **more)
        return [row["targets"].tolist() for row in data.as_numpy_iterator()]

    plain = make_loader(
        DataConfig(path=str(folder), length=16, shuffle=False, repeat=1), Bytes(), 1
    )
    wanted = [b["tokens"][b["segments"] > 0].tolist() for b in plain]
    assert rows(shuffle=False) == wanted
    shuffled = rows(shuffle=True, seed=3)
    assert shuffled == rows(shuffle=True, seed=3) != rows(shuffle=True, seed=4)


def test_the_papers_mixtures_are_registered_on_import(folder, tmp_path, monkeypatch):
    for label in ("arxiv", "book", "web"):
        (tmp_path / "raw").mkdir(exist_ok=True)
        write_jsonl(tmp_path / "raw" / label / "a.jsonl", ["abc " * 3000])
    monkeypatch.setenv("LCJAX_CORPORA", str(tmp_path))
    text = [TextSource(str(tmp_path / "raw"))]
    ByteTokenizer().save(tmp_path / "bytes")
    out = str(tmp_path / "redpajama")
    prepare(PrepareConfig(sources=text, tokenizer=str(tmp_path / "bytes"), out=out, workers=1))
    importlib.import_module("lcjax.data.seqio_corpora")
    made = seqio.get_mixture_or_task("lcjax_cepe")
    rates = {task.name: made.get_rate(task) for task in made.tasks}
    assert sum(v for k, v in rates.items() if "filter" in k) == pytest.approx(2.0)
    assert sum(v for k, v in rates.items() if "cat" in k) == pytest.approx(1.0)
    assert rates["lcjax_cepe_cat_3"] == pytest.approx(0.67)
    source = SeqioSource(
        task="lcjax_cepe_filter", module="lcjax.data.seqio_corpora", converter="chunks",
        context="context",
    )  # fmt: skip
    config = DataConfig(sources=[source], length=8192, chunks=Chunks(16, 256), document_mask=False)
    loader = make_loader(config, ByteTokenizer(), 2)
    batch = next(loader)
    loader.close()
    assert batch["chunks"].shape == (2, 16, 256) and batch["tokens"].shape == (2, 4096)
    assert batch["chunk_mask"].all() and (batch["weights"].sum(1) >= 4095).all()
    slim = SeqioSource(task="lcjax_slimpajama_upsampled", tokens=True)
    with pytest.raises(InputError, match=r"slimpajama_upsampled holds no tokens") as caught:
        make_loader(DataConfig(sources=[slim]), ByteTokenizer(), 1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"sources": [SeqioSource(task="x")]}, "data.sources.0 is a Task of seqio already: x"),
        ({"sources": [ChatSource("x")]}, "data.sources.0 learns its answers only"),
    ],
)
def test_sources_that_no_task_can_stand_for_raise_input_error(fields, match, folder):
    with pytest.raises(InputError, match=match):
        register("lcjax_test", DataConfig(**fields), Bytes())
    assert "lcjax_test" not in seqio.MixtureRegistry.names()
