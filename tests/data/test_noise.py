"""Context that is hidden in training: how much of it, where, and that every resume repeats it."""

import json
from dataclasses import replace

import numpy as np
import pytest
from data_support import Bytes, make_texts, write_jsonl

from lcjax.data import Chunks, DataConfig, Noise, TextSource, make_loader
from lcjax.data.chunks import hide_context
from lcjax.errors import InputError


def masks(noise, count, length, rows, seed=0):
    """bool [rows, count, length] of rows that are all text."""
    random = np.random.default_rng(seed)
    row = {"chunk_mask": np.ones((count, length), bool)}
    return np.stack([hide_context(row, random, noise)["chunk_mask"] for _ in range(rows)])


def test_the_papers_noise_hides_0_165_of_the_context():
    # 0.3 x (0.1 + 0.9 x (C + 1) / 2C); sixteen chunks of 256 tokens, as CEPE trains
    found = masks(Noise(), 16, 256, 2000)
    kept = found.sum(2)
    whole, part = (kept == 0).mean(), ((kept > 0) & (kept < 256)).mean()
    # a suffix of all 256 tokens leaves nothing either
    assert whole == pytest.approx(0.3 * (0.1 + 0.9 / 256), abs=0.003)
    assert part == pytest.approx(0.3 * 0.9 * 255 / 256, abs=0.007)
    assert (~found).mean() == pytest.approx(0.3 * (0.1 + 0.9 * 257 / 512), abs=0.005)
    assert (~found).mean() == pytest.approx(0.165, abs=0.006)


def test_what_is_hidden_is_a_suffix_and_all_lengths_come_equally_often():
    kept = masks(Noise(rate=1.0, whole=0.0), 8, 6, 3000).sum(2)
    counts = np.bincount(kept.ravel(), minlength=7) / kept.size
    np.testing.assert_allclose(counts[:6], 1 / 6, atol=0.01)
    assert counts[6] == 0, "every chunk was touched"
    found = masks(Noise(rate=1.0, whole=0.0), 8, 6, 50)
    assert (found[..., :-1] >= found[..., 1:]).all()


def test_as_in_the_released_code_a_suffix_may_leave_a_token():
    kept = masks(Noise(rate=1.0, whole=0.0, leave=1), 8, 6, 3000).sum(2)
    counts = np.bincount(kept.ravel(), minlength=7) / kept.size
    np.testing.assert_allclose(counts, [0, *[1 / 5] * 5, 0], atol=0.01)


@pytest.mark.parametrize(("rate", "whole", "kept"), [(0.0, 1.0, 6), (1.0, 1.0, 0)])
def test_the_ends_of_the_rates_are_nothing_and_everything(rate, whole, kept):
    assert (masks(Noise(rate=rate, whole=whole), 4, 6, 50).sum(2) == kept).all()


def test_padding_stays_padding():
    mask = np.arange(24).reshape(4, 6) >= 8
    row, random = {"chunk_mask": mask}, np.random.default_rng(1)
    visible = hide_context(row, random, Noise())["chunk_mask"]
    assert not (visible & ~mask).any()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_jsonl(tmp_path_factory.mktemp("data") / "text.jsonl", make_texts(40, high=150))


def config_for(path, noise, **more):
    chunks = Chunks(count=4, length=6, noise=noise)
    plain = {"length": 32, "repeat": 1, "document_mask": False, "chunks": chunks}
    return DataConfig(sources=[TextSource(path, stride=8)], **plain | more)


def test_only_the_mask_of_training_rows_changes_and_every_row_for_itself(path):
    noisy, plain = (config_for(path, noise) for noise in (Noise(), None))
    pairs = list(zip(make_loader(noisy, Bytes(), 4), make_loader(plain, Bytes(), 4), strict=True))
    for a, b in pairs:
        for name in b:
            if name != "chunk_mask":
                np.testing.assert_array_equal(a[name], b[name])
    hidden = np.concatenate([(b["chunk_mask"] & ~a["chunk_mask"]) for a, b in pairs])
    assert 0.1 < hidden.mean() < 0.25
    assert len(np.unique(hidden.reshape(len(hidden), -1), axis=0)) > len(hidden) / 4
    held = replace(noisy, holdout=0.3)
    for batch in make_loader(held, Bytes(), 4, split="validation"):
        text = np.append(batch["chunk_mask"].reshape(4, -1), np.ones((4, 1), bool), axis=1)
        assert (np.diff(text.astype(int), axis=1) >= 0).all(), "nothing is hidden in validation"


def test_noise_is_the_same_after_a_resume_and_on_any_number_of_processes(path):
    config = config_for(path, Noise())
    loader = make_loader(config, Bytes(), 4)
    states, found = [loader.get_state()], []
    for batch in loader:
        found.append(batch["chunk_mask"])
        states.append(json.loads(json.dumps(loader.get_state())))
    for step in range(0, len(found) - 1, 7):
        for rows in ([0, 1, 2, 3], [3]):
            resumed = make_loader(config, Bytes(), 4, rows=rows)
            resumed.set_state(states[step])
            np.testing.assert_array_equal(next(resumed)["chunk_mask"], found[step][rows])
            resumed.close()
    other = make_loader(replace(config, seed=1, shuffle=False), Bytes(), 4)
    same = make_loader(replace(config, shuffle=False), Bytes(), 4)
    assert (next(other)["chunk_mask"] != next(same)["chunk_mask"]).any(), "data.seed decides"


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"leave": 6}, r"chunks.noise.leave=6 hides no token of chunks.length=6; set"),
    ],
)
def test_noise_that_cannot_be_raises_input_error(fields, match):
    with pytest.raises(InputError, match=match):
        Chunks(count=4, length=6, noise=Noise(**fields))
