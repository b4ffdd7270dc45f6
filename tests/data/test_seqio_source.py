"""Tasks and Mixtures of seqio as sources: order, packing, position, vocabulary and errors."""

import functools
import json
from dataclasses import replace

import numpy as np
import pytest
from data_support import Bytes, assert_same, make_texts, split_documents, write_jsonl

from lcjax.data import DataConfig, SeqioSource, TextSource, documents, make_loader
from lcjax.errors import InputError

seqio = pytest.importorskip("seqio", reason="seqio is not installed: pip install -e '.[seqio]'")
tf = pytest.importorskip("tensorflow")

TEXTS = make_texts(40)
OTHER = ["OTHER" + text for text in make_texts(15, seed=1)]


PREPARE = (seqio.preprocessors.tokenize, seqio.preprocessors.append_eos)


class ByteIds(Bytes):
    """seqio's ids of bytes: PAD, EOS and UNK come before them."""

    bos_id, eos_ids, add_bos, vocab_size, fingerprint = None, (1,), False, 259, "byte ids"

    def encode(self, text):
        return [byte + 3 for byte in text.encode()]


def source_of(texts):
    def read(split, shuffle_files, seed=None):
        return tf.data.Dataset.from_tensor_slices({"text": texts if split == "train" else ["few"]})

    return seqio.FunctionDataSource(read, splits=["train", "validation"])


def add_task(name, texts, preprocessors=PREPARE, **more):
    rekey = functools.partial(seqio.preprocessors.rekey, key_map={"targets": "text"})
    features = {"targets": seqio.Feature(seqio.ByteVocabulary())}
    seqio.TaskRegistry.add(
        name,
        source=source_of(texts),
        preprocessors=[rekey, *preprocessors],
        output_features=more.pop("output_features", features),
        **more,
    )


@pytest.fixture(scope="module", autouse=True)
def registry():
    """The tasks of these tests, and nothing left behind."""
    add_task("lcjax_bytes", TEXTS, shuffle_buffer_size=40)
    add_task("lcjax_other", OTHER)
    add_task("lcjax_ordered", TEXTS, shuffle_buffer_size=None)
    add_task("lcjax_cached", TEXTS, [seqio.CacheDatasetPlaceholder(), *PREPARE])
    seqio.MixtureRegistry.add("lcjax_mix", [("lcjax_bytes", 3), ("lcjax_other", 1)])
    yield
    for name in ("lcjax_bytes", "lcjax_other", "lcjax_ordered", "lcjax_cached"):
        seqio.TaskRegistry.remove(name)
    seqio.MixtureRegistry.remove("lcjax_mix")


def config_for(task="lcjax_bytes", **more):
    source = {k: more.pop(k) for k in list(more) if k in SeqioSource.__dataclass_fields__}
    return DataConfig(
        **{"sources": [SeqioSource(task=task, **source)], "length": 32, "repeat": 1} | more
    )


def decoded(batches):
    return sorted(Bytes().decode(piece) for piece in split_documents(batches))


def test_a_task_is_packed_like_any_text(tmp_path):
    config = config_for(shuffle=False)
    plain = DataConfig(
        path=write_jsonl(tmp_path / "a.jsonl", TEXTS), length=32, repeat=1, shuffle=False
    )
    assert [text for _, text in documents(config)] == TEXTS
    assert_same(list(make_loader(config, Bytes(), 4)), list(make_loader(plain, Bytes(), 4)))


def test_shuffling_follows_the_seed_and_differs_between_epochs():
    def texts(**more):
        config = config_for(length=128, pack="first_fit", packing_bins=1, **more)
        pieces = split_documents(make_loader(config, Bytes(), 1))
        return [Bytes().decode(piece) for piece in pieces]

    first = texts(seed=1)
    assert first == texts(seed=1)
    assert first != texts(seed=2)
    assert sorted(first) == sorted(texts(seed=2)) == sorted(TEXTS)
    twice = texts(seed=1, repeat=2)
    assert sorted(twice) == sorted(TEXTS * 2)
    assert twice[40:] != twice[:40]


@pytest.mark.parametrize("pack", ["concat", "first_fit", "best_fit"])
@pytest.mark.parametrize("task", ["lcjax_bytes", "lcjax_mix"])
def test_resuming_anywhere_continues_bit_for_bit(task, pack):
    config = config_for(task, pack=pack, packing_bins=4, repeat=2, holdout=0.1)
    loader = make_loader(config, Bytes(), 2)
    batches, states = [], []
    for batch in loader:
        batches.append(batch)
        states.append(json.dumps(loader.get_state()))
    for at in (0, len(batches) // 3, len(batches) - 2):
        resumed = make_loader(config, Bytes(), 2)
        resumed.set_state(json.loads(states[at]))
        assert_same(batches[at + 1 :], list(resumed))


def test_a_position_of_another_split_or_feature_raises_input_error():
    state = make_loader(config_for(), Bytes(), 2).get_state()
    with pytest.raises(InputError, match=r"text fields was .*lcjax_bytes.* is .*lcjax_other"):
        make_loader(config_for("lcjax_other"), Bytes(), 2).set_state(state)


def test_processes_share_the_rows_of_the_one_process_batches():
    config = config_for()
    whole = list(make_loader(config, Bytes(), 4))
    for rows in ([0, 1], [1, 3]):
        part = list(make_loader(config, Bytes(), 4, rows=rows))
        assert_same([{k: v[rows] for k, v in batch.items()} for batch in whole], part)


def test_a_mixture_keeps_its_rates_without_end(tmp_path):
    loader = make_loader(
        config_for("lcjax_mix", repeat=None, length=128, pack="best_fit"), Bytes(), 2
    )
    pieces = split_documents([next(loader) for _ in range(150)])
    loader.close()
    share = np.mean([bytes(i for i in p if i < 256).startswith(b"OTHER") for p in pieces])
    np.testing.assert_allclose(share, 0.25, atol=0.06)


def test_a_task_and_files_are_mixed_by_weight(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["#" * 300] * 20)
    sources = [SeqioSource(task="lcjax_bytes"), TextSource(path, weight=3)]
    config = DataConfig(sources=sources, length=16, holdout=0.3)
    loader = make_loader(config, Bytes(), 4)
    rows = np.concatenate([next(loader)["tokens"] for _ in range(100)])
    loader.close()
    np.testing.assert_allclose((rows == ord("#")).any(1).mean(), 0.75, atol=0.01)
    whole = replace(config, length=400, pack="first_fit")
    held = decoded(make_loader(whole, Bytes(), 2, split="validation"))
    assert held == sorted(text for _, text in documents(config, "validation"))
    assert 0 < sum(text[0] == "#" for text in held) < len(held)


def test_the_holdout_cuts_by_content_whatever_the_order():
    config = config_for(holdout=0.3, pack="first_fit", length=128)
    held = decoded(make_loader(config, Bytes(), 2, split="validation"))
    kept = decoded(make_loader(config, Bytes(), 2))
    assert sorted(held + kept) == sorted(TEXTS)
    assert kept == decoded(make_loader(replace(config, seed=5), Bytes(), 2))
    assert 3 < len(held) < 20
    assert sorted(text for _, text in documents(config, "validation")) == held
    assert [t for _, t in documents(config_for(split="validation"))] == ["few"]


def test_token_ids_are_those_of_the_text_when_the_vocabularies_agree():
    ids = config_for(tokens=True)
    assert_same(list(make_loader(ids, ByteIds(), 4)), list(make_loader(config_for(), ByteIds(), 4)))


def test_token_ids_of_another_vocabulary_raise_input_error():
    with pytest.raises(InputError, match=r"ByteVocabulary of 259 ids, which is not the model's of"):
        make_loader(config_for(tokens=True), Bytes(), 4)

    # as many ids, but others
    class Shifted(ByteIds):
        def encode(self, text):
            return [byte + 2 for byte in text.encode()]

    with pytest.raises(InputError, match="tokens: false to read its text"):
        make_loader(config_for(tokens=True), Shifted(), 4)
    with pytest.raises(InputError, match="no text, but token ids, .* set tokens: false for it"):
        list(documents(config_for(tokens=True)))


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"task": "lcjax_byte"}, "no Task or Mixture .* did you mean lcjax_bytes"),
        ({"split": "test"}, "split='test' must be one of train, validation"),
        ({"module": "no_such_module"}, "module=no_such_module cannot be imported"),
        ({"feature": "inputs"}, r"has no text in inputs_pretokenized or inputs; it has targets"),
        ({"cached": True}, "cached=true, but lcjax_bytes has no step with a cache"),
        ({"task": "lcjax_ordered"}, "seqio raises: Shuffling is disallowed"),
        (
            {"task": "lcjax_cached", "cached": True},
            "seqio raises: .*does not exist in any of the",
        ),
    ],
)
def test_what_cannot_be_opened_is_said_in_one_line(fields, match):
    with pytest.raises(InputError, match=match) as caught:
        make_loader(config_for(**fields), Bytes(), 1)
    assert "\n" not in str(caught.value)


def test_a_module_registers_its_tasks_when_it_is_named(tmp_path, monkeypatch):
    (tmp_path / "lcjax_my_tasks.py").write_text(
        "import seqio, tensorflow as tf\n"
        "read = lambda split, shuffle_files, seed=None: "
        "tf.data.Dataset.from_tensor_slices({'targets': ['one', 'two']})\n"
        "seqio.TaskRegistry.add('lcjax_mine', seqio.FunctionDataSource(read, splits=['train']),"
        " preprocessors=[], output_features={'targets': seqio.Feature("
        "seqio.PassThroughVocabulary(0), dtype=tf.string, rank=0, add_eos=False)})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        config = config_for("lcjax_mine", module="lcjax_my_tasks")
        assert [text for _, text in documents(config)] == ["one", "two"]
    finally:
        seqio.TaskRegistry.remove("lcjax_mine")


def test_an_error_inside_the_task_while_reading_is_one_line():
    def broken(dataset):
        return dataset.map(
            lambda e: {
                "targets": tf.strings.as_string(tf.io.decode_raw(e["targets"], tf.int32)[99])
            }
        )

    text = seqio.Feature(seqio.PassThroughVocabulary(0), dtype=tf.string, rank=0, add_eos=False)
    add_task("lcjax_broken", TEXTS, [broken], output_features={"targets": text})
    try:
        with pytest.raises(InputError, match=r"^seqio:lcjax_broken\[train\]: ") as caught:
            list(documents(config_for("lcjax_broken")))
        assert "\n" not in str(caught.value)
    finally:
        seqio.TaskRegistry.remove("lcjax_broken")
