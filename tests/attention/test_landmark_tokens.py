"""Landmark tokens stand where the released code puts them, in rows, prompts and answers."""

import numpy as np
import pytest

from lcjax.attention.landmark.pattern import Landmark
from lcjax.attention.landmark.tokens import Landmarks
from lcjax.errors import InputError

MARK, EOS = 99, 2


def batch(*documents, length=None, first=10):
    """One row of documents (lists of tokens), whose tokens predict the next one."""
    tokens = np.concatenate([np.asarray(d, np.int32) for d in documents])
    segments = np.concatenate([np.full(len(d), i + 1, np.int32) for i, d in enumerate(documents)])
    targets = np.concatenate([np.append(d[1:], 0).astype(np.int32) for d in documents])
    weights = np.concatenate([np.append(np.ones(len(d) - 1), 0) for d in documents])
    positions = np.concatenate([np.arange(len(d), dtype=np.int32) for d in documents])
    row = {
        "tokens": tokens, "targets": targets, "segments": segments,
        "weights": weights.astype(np.float32), "positions": positions,
    }  # fmt: skip
    spare = 0 if length is None else length - len(tokens)
    return {name: np.pad(x, (0, spare))[None] for name, x in row.items()}


def text(count, start=10):
    return list(range(start, start + count))


def test_a_row_of_512_tokens_becomes_one_of_520_with_an_open_block_of_8():
    row = Landmarks(MARK).in_row(batch(text(512, 1000)))
    tokens = row["tokens"][0]
    assert len(tokens) == 520
    np.testing.assert_array_equal(np.flatnonzero(tokens == MARK), np.arange(63, 520, 64))
    assert tokens[tokens != MARK].tolist() == text(512, 1000)
    np.testing.assert_array_equal(row["positions"][0], np.arange(520))


@pytest.mark.parametrize("length", range(1, 14))
def test_no_landmark_closes_the_last_block_of_a_document(length):
    every, document = 4, text(length)
    row = Landmarks(MARK, every).in_row(batch(document, length=13))
    want = list(document)
    for place in reversed(range(every, length, every)):  # as the released code does
        want.insert(place, MARK)
    tokens = row["tokens"][0]
    assert tokens[: len(want)].tolist() == want and not tokens[len(want) :].any()
    assert (row["segments"][0] != 0).sum() == len(want)
    marks = np.flatnonzero(tokens == MARK)
    np.testing.assert_array_equal(row["positions"][0][marks] % 5, 4)


def test_predicted_landmarks_are_targets_like_others():
    row = Landmarks(MARK, 4).in_row(batch(text(9)))
    assert row["tokens"][0].tolist() == [10, 11, 12, 13, MARK, 14, 15, 16, 17, MARK, 18]
    assert row["targets"][0].tolist() == [11, 12, 13, MARK, 14, 15, 16, 17, MARK, 18, 0]
    assert row["weights"][0].tolist() == [1] * 10 + [0]


def test_skipped_landmarks_neither_predict_nor_are_predicted():
    document = [*text(5), EOS, *text(3, 30)]
    row = Landmarks(MARK, 4, "skip").in_row(batch(document), [EOS])
    assert row["tokens"][0].tolist() == [10, 11, 12, 13, MARK, 14, EOS, 30, 31, MARK, 32]
    assert row["targets"][0].tolist() == [11, 12, 13, 14, 0, EOS, 30, 31, 32, 0, 0]
    assert row["weights"][0].tolist() == [1, 1, 1, 1, 0, 1, 0, 1, 1, 0, 0]


def test_dropped_landmarks_close_every_block_of_a_row_of_whole_blocks():
    row = Landmarks(MARK, 4, "drop").in_row(batch(text(8)), [11])
    assert row["tokens"][0].tolist() == [10, 11, 12, 13, MARK, 14, 15, 16, 17, MARK]
    assert row["targets"][0].tolist() == [11, 12, 13, 14, 0, 15, 16, 17, 0, 0]
    assert row["weights"][0].tolist() == [1, 1, 1, 1, 0, 1, 1, 1, 0, 0]
    with pytest.raises(InputError, match="data.length=512 .*63 tokens.*504, 567"):
        Landmarks(MARK, 63, "drop").in_row(batch(text(512)))


@pytest.mark.parametrize("loss", ["predict", "skip", "drop"])
def test_packed_documents_equal_documents_alone(loss):
    marks, documents = Landmarks(MARK, 4, loss), (text(6), text(4, 30), text(1, 50), text(9, 60))
    row = marks.in_row(batch(*documents, length=24))
    assert row["tokens"].shape == (1, marks.row_length(24))
    for number, document in enumerate(documents, 1):
        here = row["segments"][0] == number
        alone = marks.in_row(batch(document, length=12))
        kept = alone["segments"][0] == 1
        for name in ("tokens", "targets", "weights", "positions"):
            np.testing.assert_array_equal(row[name][0][here], alone[name][0][kept], name)
    padding = row["segments"][0] == 0
    assert not any(row[name][0][padding].any() for name in row)


def test_rows_of_a_batch_keep_their_dtypes_and_weights():
    rows = [batch(text(10), length=16), batch(text(7), text(9, 40))]
    both = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    learned = both["targets"][both["weights"] > 0]
    out = Landmarks(MARK, 4, "skip").in_row(both)
    np.testing.assert_array_equal(out["targets"][out["weights"] > 0], learned)
    assert all(out[name].dtype == both[name].dtype for name in both)
    out = Landmarks(MARK, 4).in_row(both)
    pairs = out["targets"][out["weights"] > 0]
    assert sorted(pairs) == sorted([*learned, *[MARK] * 5])


def test_a_prompt_is_closed_where_a_block_is_full():
    marks = Landmarks(MARK, 4)
    assert marks.in_prompt(text(3)) == text(3)
    assert marks.in_prompt(text(4)) == [*text(4), MARK]
    assert marks.in_prompt(text(9)) == [*text(4), MARK, *text(4, 14), MARK, 18]
    assert marks.in_prompt([]) == []


def test_landmarks_predict_the_next_token_only_if_trained_to():
    closed, open_block = [*text(4), MARK], [*text(4), MARK, 14]
    assert Landmarks(MARK, 4).next_token_offset(closed) == -1
    assert Landmarks(MARK, 4, "skip").next_token_offset(closed) == -2
    assert Landmarks(MARK, 4, "drop").next_token_offset(closed) == -2
    assert Landmarks(MARK, 4, "drop").next_token_offset(open_block) == -1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"token": -1}, "landmarks.token=-1"),
        ({"tokens_per_block": 0}, "landmarks.tokens_per_block=0"),
        ({"loss": "ignore"}, "predict, skip, drop"),
    ],
)
def test_settings_that_cannot_work_raise_input_error(fields, message):
    with pytest.raises(InputError, match=message):
        Landmarks(**{"token": MARK} | fields)


def test_a_pattern_defines_the_landmarks_of_its_model():
    pattern = Landmark(block=51, token=MARK, loss="skip")
    assert pattern.inserted_tokens == Landmarks(MARK, 50, "skip")
    with pytest.raises(InputError, match="pattern.token is not set"):
        _ = Landmark().inserted_tokens
