"""Conversations in two parts: the question's beginning in chunks, its end and the answer behind."""

import json
from dataclasses import replace

import numpy as np
import pytest
from data_support import BOS, EOS, Bytes, make_texts, rows_of, write_jsonl

from lcjax.data import ChatSource, Chunks, DataConfig, TextSource, make_loader
from lcjax.data.chunks import num_context_chunks
from lcjax.errors import InputError

FIVE = Chunks(count=5, length=8, text="beginning", decoder=24)


def config_for(sources, **more):
    plain = {"length": 64, "repeat": 1, "shuffle": False, "pack": "single", "chunks": FIVE}
    return DataConfig(**plain | {"overlong": "truncate", "sources": sources} | more)


def chat(tmp_path, *pairs, **more):
    records = ({"q": question, "output": answer} for question, answer in pairs)
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return ChatSource(str(path), prompt="{q}", **more)


def letters(count):
    return "".join(chr(97 + i % 26) for i in range(count))


@pytest.mark.parametrize("question", [2, 7, 8, 9, 15, 16, 17, 24, 31, 32, 39, 40, 55])
@pytest.mark.parametrize("answer", [2, 8])
def test_all_but_the_last_chunk_or_two_of_a_question_are_context(question, answer, tmp_path):
    asked, answered = letters(question - 1), "X" * (answer - 1)  # with BOS and EOS
    rows = rows_of(config_for([chat(tmp_path, (asked, answered))]))
    ids = [BOS, *asked.encode(), *answered.encode(), EOS]
    count = max(question // 8 - 1, 1) if question > 8 else 0
    mask, text = rows["chunk_mask"][0], rows["segments"][0] == 1
    assert mask.all(1).sum() == mask.any(1).sum() == count and mask[5 - count :].all()
    assert rows["chunks"][0][mask].tolist() == ids[: 8 * count]
    assert rows["tokens"][0][text].tolist() == ids[8 * count :]
    assert rows["positions"][0][text].tolist() == list(range(text.sum()))
    learned = rows["weights"][0] == 1
    assert rows["targets"][0][learned].tolist() == [*answered.encode(), EOS]
    assert rows["tokens"].shape == (1, 24) and rows["chunks"].shape == (1, 5, 8)


def test_a_question_that_is_too_long_loses_its_middle(tmp_path):
    asked, answered = letters(79), "X" * 9
    rows = rows_of(config_for([chat(tmp_path, (asked, answered))]))
    text, count = rows["segments"][0] == 1, 5  # 54 tokens are left of the question
    read = [*rows["chunks"][0][rows["chunk_mask"][0]], *rows["tokens"][0][text]]
    ids = [BOS, *asked.encode()]
    assert read == [*ids[:27], *ids[-27:], *answered.encode(), EOS] and len(read) == 64
    assert rows["chunk_mask"].all(2).sum() == count
    learned = rows["weights"][0] == 1
    assert rows["targets"][0][learned].tolist() == [*answered.encode(), EOS]


def test_answers_that_the_decoder_cannot_hold_lose_their_end_or_are_dropped(tmp_path):
    source = chat(tmp_path, (letters(19), "X" * 40), (letters(15), "Y" * 5))
    rows = rows_of(config_for([source]))
    # two chunks leave the decoder four tokens of the question, and all places are full
    assert rows["chunk_mask"].all(2).sum(1).tolist() == [2, 1]
    assert (rows["segments"][0] == 1).all() and rows["weights"][0].sum() == 21
    only = rows_of(config_for([source], overlong="drop"))
    np.testing.assert_array_equal(only["tokens"], rows["tokens"][1:])


def test_texts_without_a_question_are_learned_behind_their_beginning(tmp_path):
    texts = [t for t in make_texts(30, high=120) if len(t) > 20]
    path = write_jsonl(tmp_path / "t.jsonl", texts)
    chunks = replace(FIVE, most=3, decoder=40)
    rows = rows_of(config_for([TextSource(path)], chunks=chunks))
    assert len(rows["tokens"]) == len(texts)
    counts = rows["chunk_mask"].all(2).sum(1)
    for row, (text, count) in enumerate(zip(texts, counts, strict=True)):
        ids = [BOS, *text.encode(), EOS][:64]
        assert count == min(max(len(ids) // 8 - 1, 1), 3)
        here = rows["segments"][row] == 1
        assert rows["chunks"][row][rows["chunk_mask"][row]].tolist() == ids[: 8 * count]
        assert rows["tokens"][row][here].tolist() == ids[8 * count :]
        assert rows["weights"][row][here][:-1].all()
    assert set(counts) > {1, 3}


def test_conversations_and_texts_share_batches_and_every_turn_is_learned(tmp_path):
    path = write_jsonl(tmp_path / "t.jsonl", ["t" * 50])
    both = config_for([chat(tmp_path, (letters(30), "X" * 5)), TextSource(path)])
    batch = next(iter(make_loader(both, Bytes(), 2)))
    assert batch["tokens"].shape == (2, 24) and batch["chunk_mask"].shape == (2, 5, 8)
    assert sorted(batch["weights"].sum(1)) == [6, 52 - 8 * 5 - 1]


def test_the_papers_rows_have_the_chunks_of_the_released_code():
    sft = Chunks(count=15, length=512, text="beginning", decoder=4096, most=8)
    for question, answer in [(600, 50), (1024, 100), (5000, 500), (7900, 292)]:
        count = num_context_chunks(sft, question, question + answer)
        assert count == max(question // 512 - 1, 1)
    for length in (1200, 2048, 4095, 8192):
        assert num_context_chunks(sft, length, length) == min(max(length // 512 - 1, 1), 8)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"overlong": "split"}, "data.overlong=split would separate questions from their answers"),
        ({"pack": "windows"}, "data.chunks.text=beginning cuts whole documents: set pack: single"),
        ({"length": 65}, "data.length=65 is more than.*set it to 64 or less"),
    ],
)
def test_rows_that_are_not_of_one_document_raise_input_error(changes, words, tmp_path):
    with pytest.raises(InputError, match=words):
        config_for([TextSource("x")], **changes)


def test_invalid_chunks_raise_input_error():
    with pytest.raises(InputError, match="chunks.decoder=None must be at least 16"):
        replace(FIVE, decoder=None)
    with pytest.raises(InputError, match="chunks.most=2 is for chunks.text=beginning"):
        Chunks(count=4, length=8, most=2)


@pytest.mark.parametrize("overlong", ["split", "truncate", "drop"])
def test_a_row_for_each_document_without_chunks(overlong, tmp_path):
    texts = ["a" * 10, "b" * 70, "c" * 3]
    path = write_jsonl(tmp_path / "t.jsonl", texts)
    rows = rows_of(config_for([TextSource(path)], chunks=None, overlong=overlong))
    sizes = {"split": [12, 64, 8, 5], "truncate": [12, 64, 5], "drop": [12, 5]}[overlong]
    assert (rows["segments"] == 1).sum(1).tolist() == sizes
    assert rows["tokens"].shape[1] == 64 and rows["segments"].max() == 1
