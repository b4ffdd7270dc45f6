"""Rows in two parts: chunks of context for an encoder, and the decoder's tokens behind them."""

import json
from dataclasses import replace

import numpy as np
import pytest
from data_support import (
    BOS,
    EOS,
    Bytes,
    assert_same,
    make_texts,
    rows_of,
    split_context,
    write_jsonl,
)

from lcjax import config as configs
from lcjax.attention.landmark.tokens import Landmarks
from lcjax.data import ChatSource, Chunks, DataConfig, Masking, Noise, TextSource, make_loader
from lcjax.errors import InputError

FOUR = Chunks(count=4, length=6)  # 24 tokens


@pytest.fixture(scope="module")
def texts():
    return make_texts(40, high=150)


@pytest.fixture(scope="module")
def path(texts, tmp_path_factory):
    return write_jsonl(tmp_path_factory.mktemp("data") / "text.jsonl", texts)


def config_for(path="", **more):
    """Rows of 24 + 8 tokens, 8 apart, so that every token but the first 24 is learned once."""
    if path:
        more = {"sources": [TextSource(path, stride=8)]} | more
    plain = {"length": 32, "repeat": 1, "shuffle": False, "document_mask": False, "chunks": FOUR}
    return DataConfig(**plain | more)


def test_the_last_tokens_are_the_decoders_and_chunks_are_those_right_before():
    chunks, mask, rest = split_context(np.arange(1, 41), 4, 6, 8)
    assert rest.tolist() == list(range(33, 41))
    np.testing.assert_array_equal(chunks, np.arange(9, 33).reshape(4, 6))
    assert mask.all() and mask.dtype == bool and chunks.dtype == np.int32


@pytest.mark.parametrize("count", range(34))
def test_text_that_is_too_short_leaves_the_first_chunks_empty(count):
    tokens = np.arange(1, count + 1)
    chunks, mask, rest = split_context(tokens, 4, 6, 8)
    assert chunks.shape == mask.shape == (4, 6)
    assert (chunks[~mask] == 0).all()
    np.testing.assert_array_equal(np.concatenate([chunks[mask], rest]), tokens[-32:])
    assert len(rest) == min(count, 8) and mask.sum() == min(max(count - 8, 0), 24)
    # the context ends where the last chunk ends, right before the decoder's first token
    assert (np.diff(mask.ravel().astype(int)) >= 0).all()


def test_rows_run_on_from_their_chunks_and_learn_every_token_behind_the_first_context(path, texts):
    rows = rows_of(config_for(path))
    stream = np.concatenate([[BOS, *t.encode(), EOS] for t in texts])
    whole = np.concatenate([rows["chunks"].reshape(len(rows["tokens"]), -1), rows["tokens"]], 1)
    for i, row in enumerate(whole[:-1]):
        np.testing.assert_array_equal(row, stream[8 * i : 8 * i + 32])
    assert rows["tokens"].shape[1] == rows["weights"].shape[1] == 8
    assert rows["chunks"].dtype == np.int32 and rows["chunk_mask"].dtype == bool
    assert (rows["positions"][0] == np.arange(8)).all() and (rows["segments"][:-1] == 1).all()
    # the last row, which is not full, reads eight tokens as well
    learned = np.concatenate([t[w == 1] for t, w in zip(rows["targets"], rows["weights"])][:-1])
    wanted = stream[25:][stream[25:] != BOS]  # no document predicts the next one
    np.testing.assert_array_equal(learned, wanted[: len(learned)])
    assert 0 < len(wanted) - len(learned) <= 8


def test_a_row_at_the_end_of_the_text_is_context_and_decoder_as_far_as_it_goes(path):
    held = config_for(path, length=32, holdout=0.2, sources=[TextSource(path)])
    rows = rows_of(held, split="validation")
    plain = rows_of(replace(held, chunks=None), split="validation")
    text = (plain["segments"][-1] > 0).sum()
    assert 0 < text < 8, "the last row is not even the decoder's"
    assert not rows["chunk_mask"][-1].any()
    for key in ("tokens", "targets", "segments", "positions", "weights"):
        np.testing.assert_array_equal(rows[key][-1], plain[key][-1, :8])
    # all of the held-out text is less than one row
    wide = replace(held, length=16 * 128 + 8, chunks=Chunks(16, 128))
    rows = rows_of(wide, split="validation")
    mask = rows["chunk_mask"]
    assert len(mask) == 1 and not mask[0, 0].any() and mask[0, -1].all()
    stream = np.concatenate([rows["chunks"][mask], rows["tokens"][0]])
    everything = plain["tokens"][plain["segments"] > 0]
    np.testing.assert_array_equal(stream, everything)


def test_rows_inside_documents_keep_the_document_mask(path, texts):
    source = TextSource(path, pack="windows", stride=8)
    config = config_for(sources=[source], document_mask=True)
    rows = rows_of(config)
    docs = [[BOS, *t.encode(), EOS] for t in texts]
    starts = [(d, i) for d in docs for i in range(0, len(d) - 31, 8)]
    assert rows["chunks"].reshape(-1, 24).tolist() == [d[i : i + 24] for d, i in starts]
    assert rows["tokens"].tolist() == [d[i + 24 : i + 32] for d, i in starts]
    assert (rows["segments"] == 1).all() and (rows["positions"] == np.arange(8)).all()


def test_the_document_mask_follows_from_chunks_and_packing():
    chunks, windows = Chunks(4, 6), [TextSource("a.txt", pack="windows")]
    assert DataConfig().document_mask is True
    assert DataConfig(length=32, chunks=chunks).document_mask is False
    assert DataConfig(length=32, chunks=chunks, sources=windows).document_mask is True


def test_the_decoder_may_read_its_own_chunks(path):
    # CEPE's warm-up: copying
    config = config_for(path, chunks=Chunks(4, 8, text="same"))
    rows, plain = rows_of(config), rows_of(replace(config, chunks=None))
    for key, values in plain.items():
        np.testing.assert_array_equal(rows[key], values)
    np.testing.assert_array_equal(rows["chunks"].reshape(-1, 32)[:-1], plain["tokens"][:-1])
    np.testing.assert_array_equal(
        rows["chunks"][rows["chunk_mask"]], plain["tokens"][plain["segments"] > 0]
    )


def test_only_answers_behind_the_context_are_learned(tmp_path):
    records = [{"q": "q" * 40, "output": "r" * 30}]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    source = ChatSource(str(path), prompt="{q}", pack="windows", stride=8)
    rows = rows_of(config_for(sources=[source]))
    assert set(rows["targets"][rows["weights"] == 1]) == {ord("r"), EOS}
    assert (rows["chunks"][0].ravel() == [BOS] + [ord("q")] * 23).all()


@pytest.mark.parametrize("noise", [None, Noise(rate=1.0)], ids=["seen", "hidden"])
def test_what_follows_the_tokens_of_chunks_may_be_learned_too(noise, path):
    rows = rows_of(config_for(path, chunks=replace(FOUR, learned=True, noise=noise)))
    plain = rows_of(replace(config_for(path), chunks=None, document_mask=False))
    shown = rows["chunk_mask"].reshape(-1, 24)
    for name in ("targets", "weights"):
        found = rows[f"chunk_{name}"].reshape(-1, 24)
        assert found.dtype == plain[name].dtype
        wanted = plain[name][:, :24] * (shown if name == "weights" else 1)
        np.testing.assert_array_equal(found[:-1], wanted[:-1])
        np.testing.assert_array_equal(rows[name][:-1], plain[name][:-1, 24:])
    assert shown[:-1].all() == (noise is None)


@pytest.mark.parametrize("pack", ["concat", "windows", "best_fit"])
def test_resuming_anywhere_continues_bit_for_bit_on_any_number_of_processes(pack, path):
    stride = None if pack == "best_fit" else 8
    config = config_for(
        sources=[TextSource(path, pack=pack, stride=stride)], shuffle=True, packing_bins=3
    )
    loader = make_loader(config, Bytes(), 4)
    states, batches = [loader.get_state()], []
    for batch in loader:
        batches.append(batch)
        states.append(json.loads(json.dumps(loader.get_state())))
    assert len(batches) > 20
    for step in range(0, len(states), 11):
        for rows in ([0, 1, 2, 3], [2, 3], [1]):
            resumed = make_loader(config, Bytes(), 4, rows=rows)
            resumed.set_state(states[step])
            wanted = [{k: v[rows] for k, v in b.items()} for b in batches[step : step + 3]]
            assert_same(wanted, [b for b, _ in zip(resumed, wanted)])
            resumed.close()
    with pytest.raises(InputError, match=r"data.chunks was .* and is None now"):
        make_loader(replace(config, chunks=None), Bytes(), 4).set_state(states[1])


def test_missing_rows_of_the_last_batch_have_no_context(path):
    config = config_for(path)
    last = list(make_loader(config, Bytes(), 64))[-1]
    empty = (last["segments"] == 0).all(1)
    assert empty.any() and not last["chunk_mask"][empty].any()


def test_the_section_is_read_from_yaml_and_the_command_line(tmp_path):
    file = tmp_path / "data.yaml"
    file.write_text("length: 8192\ndocument_mask: false\nchunks: {count: 16, length: 256}\n")
    data = configs.parse(DataConfig, ["--config", str(file), "--chunks.count=8"])
    assert data.chunks == Chunks(8, 256) and data.decoder_length == 8192 - 2048
    assert DataConfig(length=77).decoder_length == 77
    configs.dump(data, tmp_path / "again.yaml")
    assert configs.parse(DataConfig, ["--config", str(tmp_path / "again.yaml")]) == data


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        (
            {"length": 24},
            r"data.length=24 leaves fewer than 2 tokens .* of 4 x 6 = 24 tokens; .*48",
        ),
        ({"length": 25}, r"data.length=25 leaves fewer than 2 tokens"),
        ({"chunks": Chunks(4, 6, "same")}, r"data.length=32 must equal .*chunks.text=same"),
        ({"document_mask": True}, r"document_mask=true conflicts with data.chunks"),
        ({"masking": Masking()}, r"data.chunks give the decoder .* keep one of them"),
    ],
)
def test_settings_that_do_not_go_together_raise_input_error(fields, match):
    with pytest.raises(InputError, match=match) as caught:
        config_for(sources=[TextSource("a.txt")], **fields)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        (
            {"text": "same", "learned": True},
            r"chunks.learned=true adds targets",
        ),
    ],
)
def test_chunks_that_cannot_be_raise_input_error(fields, match):
    with pytest.raises(InputError, match=match):
        Chunks(**fields)


def test_landmarks_do_not_go_with_chunks(path):
    with pytest.raises(InputError, match=r"data.chunks cannot be used with inserted tokens"):
        make_loader(config_for(path), Bytes(), 1, inserted=Landmarks(300))
