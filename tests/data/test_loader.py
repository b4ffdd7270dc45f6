"""Batches: packing, targets, order, mixing, processes, and the exact position."""

import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from data_support import (
    BOS,
    EOS,
    Bytes,
    Plain,
    assert_same,
    make_texts,
    rows_of,
    split_documents,
    write_jsonl,
)

import lcjax
from lcjax.data import DataConfig, TextSource, make_loader
from lcjax.errors import InputError

PACKINGS = ["concat", "first_fit", "best_fit"]


@pytest.fixture(scope="module")
def texts():
    return make_texts(40)


@pytest.fixture(scope="module")
def path(texts, tmp_path_factory):
    return write_jsonl(tmp_path_factory.mktemp("data") / "text.jsonl", texts)


def config_for(path, pack="concat", **more):
    return DataConfig(
        **{"path": path, "length": 32, "pack": pack, "packing_bins": 4, "repeat": 1} | more
    )


def expected(text):
    return [BOS, *text.encode(), EOS]


@pytest.mark.parametrize("pack", PACKINGS)
def test_every_token_of_every_document_appears_once_in_an_epoch(pack, path, texts):
    batches = list(make_loader(config_for(path, pack), Bytes(), 4))
    seen = np.sort(np.concatenate([b["tokens"][b["segments"] > 0] for b in batches]))
    wanted = np.sort(np.concatenate([expected(t) for t in texts]))
    np.testing.assert_array_equal(seen, wanted)


def test_concat_runs_the_documents_together_without_padding_but_at_the_end(path, texts):
    config = config_for(path, shuffle=False)
    batches = list(make_loader(config, Bytes(), 4))
    stream = np.concatenate([b["tokens"].ravel() for b in batches])
    wanted = np.concatenate([expected(t) for t in texts])
    np.testing.assert_array_equal(stream[: len(wanted)], wanted)
    filled = np.concatenate([b["segments"].ravel() for b in batches]) > 0
    assert filled[: len(wanted)].all() and not filled[len(wanted) :].any()


@pytest.mark.parametrize("pack", PACKINGS)
def test_every_token_but_the_first_of_each_document_is_a_target_once(pack, path, texts):
    batches = list(make_loader(config_for(path, pack), Bytes(), 4))
    targets = np.sort(np.concatenate([b["targets"][b["weights"] == 1] for b in batches]))
    wanted = np.sort(np.concatenate([expected(t)[1:] for t in texts]))
    np.testing.assert_array_equal(targets, wanted)


@pytest.mark.parametrize("pack", PACKINGS)
def test_targets_are_the_tokens_shifted_inside_documents(pack, path):
    for batch in make_loader(config_for(path, pack), Bytes(), 4):
        tokens, segments = batch["tokens"], batch["segments"]
        same = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
        np.testing.assert_array_equal(batch["targets"][:, :-1][same], tokens[:, 1:][same])
        assert (batch["weights"][:, :-1][same] == 1).all()
        ends = (tokens == EOS) | (segments == 0)
        assert (batch["weights"][ends] == 0).all() and (batch["targets"][ends] == 0).all()


def test_the_last_place_of_a_row_predicts_the_first_token_of_the_next(path):
    batches = list(make_loader(config_for(path, shuffle=False), Bytes(), 4))
    tokens = np.concatenate([b["tokens"] for b in batches])
    targets = np.concatenate([b["targets"] for b in batches])
    weights = np.concatenate([b["weights"] for b in batches])
    cut = np.flatnonzero(weights[:-1, -1] == 1)
    assert len(cut) > 20
    np.testing.assert_array_equal(targets[cut, -1], tokens[cut + 1, 0])


@pytest.mark.parametrize("pack", PACKINGS)
def test_positions_restart_in_every_segment_and_only_padding_has_segment_zero(pack, path):
    batches = list(make_loader(config_for(path, pack), Bytes(), 4))
    for batch in batches:
        assert {k: v.dtype.name for k, v in batch.items()} == {
            "tokens": "int32",
            "targets": "int32",
            "segments": "int32",
            "positions": "int32",
            "weights": "float32",
        }
        assert all(value.shape == (4, 32) for value in batch.values())
        for segments, positions in zip(batch["segments"], batch["positions"], strict=True):
            numbers, counts = np.unique(segments[segments > 0], return_counts=True)
            assert numbers.tolist() == list(range(1, len(numbers) + 1))
            wanted = np.concatenate([np.arange(n) for n in counts]) if len(counts) else []
            np.testing.assert_array_equal(positions[: counts.sum()], wanted)
            assert (positions[counts.sum() :] == 0).all()
        assert (batch["tokens"][batch["segments"] == 0] == 0).all()
        assert (batch["weights"][batch["segments"] == 0] == 0).all()


@pytest.mark.parametrize("pack", ["first_fit", "best_fit"])
def test_fitting_packers_keep_documents_whole(pack, path, texts):
    config = config_for(path, pack, length=128)
    pieces = split_documents(make_loader(config, Bytes(), 4))
    assert sorted(pieces) == sorted(tuple(expected(t)) for t in texts)


def test_documents_longer_than_a_row_are_split_cut_or_dropped(path, texts):
    def pieces(overlong):
        config = config_for(path, "first_fit", overlong=overlong)
        return sorted(split_documents(make_loader(config, Bytes(), 2)))

    docs = [tuple(expected(t)) for t in texts]
    assert pieces("truncate") == sorted(d[:32] for d in docs)
    assert pieces("drop") == sorted(d for d in docs if len(d) <= 32)
    assert pieces("split") == sorted(d[i : i + 32] for d in docs for i in range(0, len(d), 32))


def test_without_a_document_mask_a_row_is_one_segment_with_the_same_predictions(path):
    masked = list(make_loader(config_for(path), Bytes(), 4))
    open_rows = list(make_loader(config_for(path, document_mask=False), Bytes(), 4))
    for a, b in zip(masked, open_rows, strict=True):
        for key in ("tokens", "targets", "weights"):
            np.testing.assert_array_equal(a[key], b[key])
        text = a["segments"] > 0
        np.testing.assert_array_equal(b["segments"], text)
        np.testing.assert_array_equal(b["positions"], np.where(text, np.arange(32), 0))


def test_special_tokens_follow_the_tokenizer_and_the_config(path, texts):
    def first_row(tokenizer, **more):
        config = config_for(path, shuffle=False, **more)
        return next(make_loader(config, tokenizer, 1))["tokens"][0].tolist()

    text = list(texts[0].encode())
    assert first_row(Plain())[:5] == text[:5]
    assert first_row(Bytes(), add_bos=False)[:5] == text[:5]
    assert EOS not in first_row(Bytes(), add_eos=False)

    class Chat(Bytes):
        add_bos = False

    assert first_row(Chat())[:5] == text[:5]
    assert first_row(Chat(), add_bos=True)[:5] == [BOS, *text[:4]]
    with pytest.raises(InputError, match=r"data.add_bos=true, but the tokenizer has no BOS"):
        make_loader(config_for(path, add_bos=True), Plain(), 1)


def test_the_same_seed_gives_the_same_batches_and_another_seed_others(path):
    config = config_for(path, seed=3)
    first = list(make_loader(config, Bytes(), 4))
    assert_same(first, list(make_loader(config, Bytes(), 4)))
    other = list(make_loader(replace(config, seed=4), Bytes(), 4))
    assert any((a["tokens"] != b["tokens"]).any() for a, b in zip(first, other, strict=True))


def test_every_epoch_has_its_own_order(path, texts):
    batches = list(make_loader(config_for(path, "first_fit", length=128, repeat=2), Bytes(), 1))
    pieces = split_documents(batches)
    assert sorted(pieces) == sorted(2 * [tuple(expected(t)) for t in texts])
    plain = config_for(path, repeat=2, length=128)
    stream = np.concatenate([b["tokens"].ravel() for b in make_loader(plain, Bytes(), 1)])
    half = sum(len(expected(t)) for t in texts)
    assert (stream[:half] != stream[half : 2 * half]).any()


@pytest.mark.parametrize(
    ("extra", "pack"),
    [
        pytest.param(extra, pack, marks=() if pack in quick else pytest.mark.slow)
        for extra, quick in {
            "plain": PACKINGS,
            "shuffled_rows": ["concat"],
            "mixture": ["first_fit"],
        }.items()
        for pack in PACKINGS
    ],
)
def test_resuming_anywhere_continues_bit_for_bit(pack, extra, path, tmp_path):
    config = config_for(path, pack, repeat=2)
    if extra == "shuffled_rows":
        config = replace(config, shuffle_rows=20)
    if extra == "mixture":
        other = write_jsonl(tmp_path / "other.jsonl", make_texts(30, seed=1))
        config = replace(config, path="", sources=[TextSource(path), TextSource(other, weight=2.5)])
    loader, states, batches = make_loader(config, Bytes(), 2), [], []
    states.append(loader.get_state())
    for batch in loader:
        batches.append(batch)
        states.append(loader.get_state())
    assert len(batches) > 20
    for step in range(0, len(states), 13):
        resumed = make_loader(config, Bytes(), 2)
        resumed.set_state(json.loads(json.dumps(states[step])))
        assert resumed.get_state() == states[step]
        assert_same(batches[step:], list(resumed))


def test_a_state_is_plain_json_even_where_no_document_is_cut(tmp_path):
    # Rows that end with a document are where grain's packer mistakes lists for tuples.
    path = write_jsonl(tmp_path / "even.jsonl", [chr(97 + i) * 6 for i in range(16)])
    config = config_for(path, length=8, shuffle=False)
    batches = list(make_loader(config, Bytes(), 1))
    for step in range(16):
        loader = make_loader(config, Bytes(), 1)
        for _ in range(step):
            next(loader)
        resumed = make_loader(config, Bytes(), 1)
        resumed.set_state(json.loads(json.dumps(loader.get_state())))
        assert_same(batches[step:], list(resumed))


@pytest.mark.slow
def test_leaving_without_closing_is_silent(path):
    code = (
        "from lcjax.data import DataConfig, make_loader; from data_support import Bytes;"
        f"loader = make_loader(DataConfig(path={path!r}, length=16), Bytes(), 1); next(loader)"
    )
    folders = [str(Path(lcjax.__file__).parent.parent), str(Path(__file__).parent)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_closed_loader_raises_an_error(path):
    loader = make_loader(config_for(path), Bytes(), 2)
    next(loader)
    loader.close()
    loader.close()
    with pytest.raises(ValueError, match="closed"):
        next(loader)


def test_one_loader_can_be_set_back(path):
    loader = make_loader(config_for(path, repeat=None), Bytes(), 2)
    next(loader)
    state = loader.get_state()
    first = [next(loader) for _ in range(5)]
    loader.set_state(state)
    assert_same(first, [next(loader) for _ in range(5)])
    loader.close()


def test_the_batch_size_may_change_at_a_resume(path):
    config = config_for(path)
    loader = make_loader(config, Bytes(), 2)
    for _ in range(3):
        next(loader)
    resumed = make_loader(config, Bytes(), 3)
    resumed.set_state(loader.get_state())
    rows = np.concatenate([b["tokens"] for b in make_loader(config, Bytes(), 1)])
    np.testing.assert_array_equal(next(resumed)["tokens"], rows[6:9])


def test_a_state_of_other_settings_or_other_text_raises_input_error(path, texts, tmp_path):
    state = make_loader(config_for(path), Bytes(), 2).get_state()
    with pytest.raises(InputError, match=r"data.length was 32 when .* is 16 now"):
        make_loader(config_for(path, length=16), Bytes(), 2).set_state(state)
    changed = write_jsonl(tmp_path / "text.jsonl", texts[:-1])
    with pytest.raises(InputError, match=r"number of documents was \[40\] .* is \[39\]"):
        make_loader(config_for(changed), Bytes(), 2).set_state(state)


def test_a_corpus_that_changed_under_its_old_size_raises_input_error(texts, tmp_path):
    path = write_jsonl(tmp_path / "text.jsonl", texts)
    state = make_loader(config_for(path), Bytes(), 2).get_state()
    moved = write_jsonl(tmp_path / "moved" / "text.jsonl", texts)
    make_loader(config_for(moved), Bytes(), 2).set_state(state)
    write_jsonl(tmp_path / "text.jsonl", [*texts[:-1], texts[-1][::-1]])
    with pytest.raises(InputError, match=r"text of the corpus was \['.*'\] when the position"):
        make_loader(config_for(path), Bytes(), 2).set_state(state)


def test_more_epochs_may_be_added_but_none_that_were_read_taken_away(path):
    loader = make_loader(config_for(path, repeat=2), Bytes(), 2)
    batches = list(loader)
    state = loader.get_state()
    longer = make_loader(config_for(path, repeat=3, scan=True), Bytes(), 2)
    longer.set_state(state)
    more = list(longer)
    assert len(batches) / 2 == pytest.approx(len(more), abs=1)
    with pytest.raises(InputError, match=r"after the end of the data: raise data.repeat"):
        make_loader(config_for(path, repeat=1), Bytes(), 2).set_state(state)


@pytest.mark.parametrize("pack", PACKINGS)
def test_threads_and_prefetch_change_nothing_but_the_speed(pack, path):
    config = config_for(path, pack)
    loader = make_loader(config, Bytes(), 4)
    wanted = [next(loader), *loader]
    for threads, prefetch in [(0, 0), (1, 0), (5, 7)]:
        other = make_loader(replace(config, threads=threads, prefetch=prefetch), Bytes(), 4)
        assert_same(wanted, list(other))


@pytest.mark.parametrize("pack", PACKINGS)
def test_processes_share_the_rows_of_the_one_process_batches(pack, path):
    config = config_for(path, pack)
    whole = list(make_loader(config, Bytes(), 4))
    parts = [list(make_loader(config, Bytes(), 4, rows=[2 * i, 2 * i + 1])) for i in range(2)]
    joined = [
        {key: np.concatenate([a[key], b[key]]) for key in a} for a, b in zip(*parts, strict=True)
    ]
    assert all(batch["tokens"].shape == (2, 32) for part in parts for batch in part)
    assert_same(whole, joined)


def test_a_position_saved_by_two_processes_resumes_in_one(path):
    config = config_for(path)
    one_of_two = make_loader(config, Bytes(), 4, rows=[2, 3])
    for _ in range(2):
        next(one_of_two)
    single = make_loader(config, Bytes(), 4)
    single.set_state(one_of_two.get_state())
    assert_same(list(make_loader(config, Bytes(), 4))[2:], list(single))


def test_weights_are_shares_of_the_tokens_whatever_the_length_of_documents(tmp_path):
    short = write_jsonl(tmp_path / "short.jsonl", ["a" * 10] * 50)
    long = write_jsonl(tmp_path / "long.jsonl", ["b" * 500] * 50)
    config = DataConfig(
        sources=[TextSource(short, weight=3), TextSource(long, weight=1)], length=16
    )
    loader = make_loader(config, Bytes(), 4)
    rows = np.concatenate([next(loader)["tokens"] for _ in range(100)])
    loader.close()
    shares = (rows == ord("a")).any(1).mean(), (rows == ord("b")).any(1).mean()
    np.testing.assert_allclose(shares, (0.75, 0.25), atol=0.01)


def test_the_validation_split_is_read_once_and_shares_nothing_with_training(path, texts):
    config = config_for(path, "first_fit", length=128, holdout=0.3, repeat=None)
    held = split_documents(make_loader(config, Bytes(), 4, split="validation"))
    train = split_documents(make_loader(replace(config, repeat=1), Bytes(), 4))
    assert 4 <= len(held) <= 20 and not set(held) & set(train)
    assert sorted(held + train) == sorted(tuple(expected(t)) for t in texts)
    reseeded = make_loader(replace(config, seed=9), Bytes(), 4, split="validation")
    assert split_documents(reseeded) == held


def test_shuffled_rows_are_the_same_rows_in_another_order(path):
    rows = np.concatenate([b["tokens"] for b in make_loader(config_for(path), Bytes(), 1)])
    config = config_for(path, shuffle_rows=8)
    mixed = np.concatenate([b["tokens"] for b in make_loader(config, Bytes(), 1)])
    assert (rows != mixed).any()
    assert sorted(map(tuple, rows)) == sorted(map(tuple, mixed))


def test_an_endless_loader_continues_past_the_end_of_the_text(path, texts):
    loader = make_loader(config_for(path, repeat=None), Bytes(), 4)
    total = sum(len(t) for t in texts)
    seen = sum((b["segments"] > 0).sum() for b in itertools.islice(loader, 3 * total // 128))
    loader.close()
    assert seen > 2 * total


def test_orbax_saves_and_restores_the_position(path, tmp_path):
    from orbax.checkpoint import v1 as ocp

    config = config_for(path)
    batches = list(make_loader(config, Bytes(), 2))
    loader = make_loader(config, Bytes(), 2)
    for _ in range(4):
        next(loader)
    ocp.save_checkpointables(tmp_path / "step", {"data": loader})
    resumed = make_loader(config, Bytes(), 2)
    ocp.load_checkpointables(tmp_path / "step", {"data": resumed})
    assert_same(batches[4:], list(resumed))


def test_a_stream_refuses_a_position_after_its_last_epoch(path):
    config = config_for("", sources=[TextSource(path, stream=True)], repeat=3)
    loader = make_loader(config, Bytes(), 2)
    states = [loader.get_state() for _ in loader]
    with pytest.raises(InputError, match=r"after the end of the data: raise data.repeat"):
        make_loader(replace(config, repeat=1), Bytes(), 2).set_state(states[-2])


def test_a_long_document_is_tokenised_once_for_all_epochs(tmp_path, monkeypatch):
    class Counting(Bytes):
        count = 0

        def encode(self, text):
            self.count += len(text)
            return super().encode(text)

    path, text, tokenizer = tmp_path / "book.txt", "a long book " * 100, Counting()
    path.write_text(text)
    monkeypatch.setattr("lcjax.data.loader._LONG_BYTES", len(text))
    settings = {"path": str(path), "length": 64, "repeat": 20, "shuffle": True}
    rows = rows_of(DataConfig(**settings), tokenizer)
    assert tokenizer.count == len(text)
    monkeypatch.setattr("lcjax.data.loader._LONG_BYTES", 10**9)
    np.testing.assert_equal(rows, rows_of(DataConfig(**settings), Counting()))
