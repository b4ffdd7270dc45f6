"""seqio's examples as rows with context chunks, and as prompts with answers."""

import functools
import json

import numpy as np
import pytest
from data_support import Bytes, assert_same, make_texts, rows_of, split_context

from lcjax.data import Chunks, DataConfig, SeqioSource, TextSource, make_loader
from lcjax.data.seqio_source import context_chunks
from lcjax.errors import InputError

seqio = pytest.importorskip("seqio", reason="seqio is not installed: pip install -e '.[seqio]'")
tf = pytest.importorskip("tensorflow")

FOUR = Chunks(count=4, length=6)  # 24 tokens
TEXTS = make_texts(30, low=1, high=70)
CONTEXTS = make_texts(30, seed=1, low=1, high=60)
KINDS = {"targets": TEXTS, "context": CONTEXTS, "inputs": CONTEXTS}


class ByteIds(Bytes):
    """seqio's ids of bytes: PAD, EOS and UNK come before them; BOS is one of the extra ids."""

    bos_id, eos_ids, add_bos, vocab_size, fingerprint = 260, (1,), False, 261, "byte ids"

    def encode(self, text):
        return [byte + 3 for byte in text.encode()]


def ids(text, eos=True):
    return ByteIds().encode(text) + [1] * eos


def add_task(name, *features):
    def read(split, shuffle_files, seed=None):
        return tf.data.Dataset.from_tensor_slices({feature: KINDS[feature] for feature in features})

    vocabulary = seqio.ByteVocabulary()
    seqio.TaskRegistry.add(
        name,
        seqio.FunctionDataSource(read, splits=["train"]),
        preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos],
        output_features={
            feature: seqio.Feature(vocabulary, add_eos=feature == "targets") for feature in features
        },
        shuffle_buffer_size=40,
    )


@pytest.fixture(scope="module", autouse=True)
def registry():
    """The tasks of these tests, and nothing left behind."""
    add_task("lcjax_long", "targets")
    add_task("lcjax_pairs", "context", "targets")
    add_task("lcjax_answers", "inputs", "targets")
    seqio.MixtureRegistry.add("lcjax_pairs_mix", [("lcjax_pairs", 1.0)])
    yield
    for name in ("lcjax_long", "lcjax_pairs", "lcjax_answers"):
        seqio.TaskRegistry.remove(name)
    seqio.MixtureRegistry.remove("lcjax_pairs_mix")


def config_for(task, **more):
    fields = [k for k in more if k in SeqioSource.__dataclass_fields__]
    source = SeqioSource(task=task, **{k: more.pop(k) for k in fields})
    plain = {"length": 32, "repeat": 1, "shuffle": False, "chunks": FOUR}
    return DataConfig(**{"sources": [source]} | plain | more)


def expected(context, targets, *, length=8, chunks=FOUR, bos=None):
    """The rows of one example, made with the splitter of every other source."""
    targets = ([] if bos is None else [bos]) + targets
    rows = []
    for start in range(0, len(targets) - 1, length):
        here = targets[start : start + length]
        text = np.array(context + targets[: start + len(here)], np.int32)
        pieces, mask, rest = split_context(text, chunks.count, chunks.length, len(here))
        assert rest.tolist() == here
        after = targets[start + 1 : start + 1 + length]
        row = {
            "tokens": here,
            "targets": after,
            "segments": [1] * len(here),
            "positions": list(range(len(here))),
            "weights": [1.0] * len(after),
        }
        row = {k: v + [0] * (length - len(v)) for k, v in row.items()}
        rows.append(row | {"chunks": pieces, "chunk_mask": mask})
    return rows


def stacked(rows):
    floats = {"weights": np.float32, "chunk_mask": bool}
    return {k: np.array([row[k] for row in rows], floats.get(k, np.int32)) for k in rows[0]}


def test_the_converter_gives_the_rows_of_the_splitter_in_seqios_own_pipeline():
    dataset = seqio.get_dataset(
        "lcjax_pairs_mix",
        {"context": 100, "targets": 100},
        dataset_split="train",
        shuffle=False,
        feature_converter=context_chunks(FOUR, 8, context="context"),
    )
    rows = stacked(list(dataset.as_numpy_iterator()))
    wanted = [
        row
        for context, text in zip(CONTEXTS, TEXTS, strict=True)
        for row in expected(ids(context, eos=False), ids(text))
    ]
    assert_same([stacked(wanted)], [rows])
    shapes = {name: tuple(spec.shape) for name, spec in dataset.element_spec.items()}
    assert shapes["chunks"] == shapes["chunk_mask"] == (4, 6)
    assert all(shapes[name] == (8,) for name in ("tokens", "targets", "segments", "weights"))


def test_a_trimmed_example_is_one_row_of_context_and_targets():
    dataset = seqio.get_dataset(
        "lcjax_pairs",
        {"context": 24, "targets": 8},
        dataset_split="train",
        shuffle=False,
        feature_converter=context_chunks(FOUR, 8, context="context", bos_id=260),
    )
    rows = list(dataset.as_numpy_iterator())
    wanted = []
    for context, text in zip(CONTEXTS, TEXTS, strict=True):
        wanted += expected(ids(context, eos=False)[:24], ids(text)[:8], bos=260)
    assert_same([stacked(wanted)], [stacked(rows)])


def test_one_long_text_is_read_with_what_came_before_as_context():
    rows = rows_of(config_for("lcjax_long", converter="chunks"), ByteIds())
    wanted = [row for text in TEXTS for row in expected([], ids(text))]
    assert_same([stacked(wanted)], [rows])
    # every token but the first of a text is learned once
    learned = np.sort(rows["targets"][rows["weights"] == 1])
    every = np.sort(np.concatenate([ids(text)[1:] for text in TEXTS]))
    np.testing.assert_array_equal(learned, every)


@pytest.mark.parametrize("task", ["lcjax_pairs", "lcjax_pairs_mix"])
def test_a_config_chooses_the_converter_for_any_mixture(task):
    config = config_for(task, converter="chunks", context="context", add_bos=True)
    wanted = []
    for context, text in zip(CONTEXTS, TEXTS, strict=True):
        wanted += expected(ids(context, eos=False), ids(text), bos=260)
    assert_same([stacked(wanted)], [rows_of(config, ByteIds())])


def test_a_decoder_may_copy_its_own_chunks():
    copy = Chunks(count=4, length=2, text="same")
    config = config_for("lcjax_long", converter="chunks", length=8, chunks=copy)
    rows = rows_of(config, ByteIds())
    for row in range(len(rows["tokens"])):
        text = rows["tokens"][row][rows["segments"][row] > 0]
        np.testing.assert_array_equal(rows["chunks"][row][rows["chunk_mask"][row]], text)


@pytest.mark.parametrize("holdout", [0.0, 0.3])
def test_resuming_anywhere_continues_bit_for_bit_on_any_number_of_processes(holdout):
    config = config_for(
        "lcjax_pairs_mix", converter="chunks", context="context", shuffle=True, repeat=2,
        holdout=holdout, shuffle_rows=9,
    )  # fmt: skip
    loader = make_loader(config, ByteIds(), 4)
    batches, states = [], []
    for batch in loader:
        batches.append(batch)
        states.append(json.dumps(loader.get_state()))
    assert len(batches) > 15
    for at in (0, len(batches) - 3):
        for rows in ([0, 1, 2, 3], [2]):
            resumed = make_loader(config, ByteIds(), 4, rows=rows)
            resumed.set_state(json.loads(states[at]))
            wanted = [{k: v[rows] for k, v in b.items()} for b in batches[at + 1 :]]
            assert_same(wanted, list(resumed))


def test_examples_are_held_out_whole():
    config = config_for("lcjax_long", converter="chunks", holdout=0.3)
    held, kept = (rows_of(config, ByteIds(), split=split) for split in ("validation", "train"))
    texts = [row["tokens"] for text in TEXTS for row in expected([], ids(text))]
    assert len(held["tokens"]) + len(kept["tokens"]) == len(texts)
    first = {tuple(expected([], ids(text))[0]["tokens"]) for text in TEXTS}
    starts = [
        {tuple(t) for t, m in zip(r["tokens"], r["chunk_mask"]) if not m.any()}
        for r in (held, kept)
    ]
    assert (
        not starts[0] & starts[1] and starts[0] | starts[1] == first and min(map(len, starts)) > 2
    )


def test_converted_rows_and_files_are_mixed_by_weight(tmp_path):
    (tmp_path / "a.txt").write_text("#" * 3000)
    sources = [
        SeqioSource(task="lcjax_pairs", converter="chunks", context="context"),
        TextSource(str(tmp_path), 3.0, pack="windows", stride=8),
    ]
    config = config_for("", sources=sources, repeat=None, shuffle=True)
    loader = make_loader(config, ByteIds(), 4)
    batches = [next(loader) for _ in range(50)]
    loader.close()
    share = np.mean([(b["tokens"] == ord("#") + 3).any(1).mean() for b in batches])
    np.testing.assert_allclose(share, 0.75, atol=0.02)
    assert all(b["chunks"].shape == (4, 4, 6) for b in batches)


@pytest.mark.parametrize("tokens", [False, True])
def test_prompts_are_read_and_only_targets_learned(tokens):
    config = config_for(
        "lcjax_answers", prompt="inputs", tokens=tokens, chunks=None, pack="first_fit",
        length=160, packing_bins=1, add_bos=True,
    )  # fmt: skip
    rows = rows_of(config, ByteIds())
    seen = []
    for row in range(len(rows["tokens"])):
        for segment in range(1, rows["segments"][row].max() + 1):
            at = rows["segments"][row] == segment
            learned = rows["targets"][row][at & (rows["weights"][row] == 1)]
            seen.append((tuple(rows["tokens"][row][at].tolist()), tuple(learned.tolist())))
    wanted = [
        ((260, *ids(prompt, eos=False), *ids(text)), tuple(ids(text)))
        for prompt, text in zip(CONTEXTS, TEXTS, strict=True)
    ]
    assert sorted(seen) == sorted(wanted)


def test_a_tasks_ids_of_another_vocabulary_raise_input_error():
    config = config_for("lcjax_pairs", converter="chunks", context="context")
    with pytest.raises(
        InputError, match=r"feature context has .*ByteVocabulary .*the model's vocabulary"
    ):
        make_loader(config, Bytes(), 1)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"context": "inputs"}, r"has no ids in inputs; it has context \(int32\)"),
        ({"feature": "answer"}, r"has no ids in answer; it has .*name another feature$"),
    ],
)
def test_features_that_are_not_there_are_named(fields, match):
    with pytest.raises(InputError, match=match) as caught:
        make_loader(config_for("lcjax_pairs", converter="chunks", **fields), ByteIds(), 1)
    assert "\n" not in str(caught.value)


def test_a_length_of_nothing_raises_input_error():
    with pytest.raises(InputError, match="length=0 must be 1 or more"):
        context_chunks(FOUR, 0)


def test_an_empty_text_gives_no_row():
    convert = functools.partial(context_chunks, FOUR, 8, context="context", bos_id=7, eos_id=1)
    examples = {"context": [[5, 5], [5, 5]], "targets": [[], [9]]}
    dataset = tf.data.Dataset.from_generator(
        lambda: ({k: v[i] for k, v in examples.items()} for i in range(2)),
        output_signature=dict.fromkeys(examples, tf.TensorSpec([None], tf.int32)),
    )
    rows = list(convert()(dataset, {"context": 2, "targets": 1}).as_numpy_iterator())
    assert_same([stacked(expected([5, 5], [9, 1], bos=7))], [stacked(rows)])
