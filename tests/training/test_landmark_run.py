"""Training with landmarks: rows, vocabulary, exact resume, and what the run leaves."""

import jax
import numpy as np
import pytest
from training_support import tiny

from lcjax import checkpoints
from lcjax.attention import Landmark
from lcjax.attention.landmark.tokens import Landmarks
from lcjax.checkpoints import ByteTokenizer
from lcjax.checkpoints.landmark_token import with_landmark
from lcjax.checkpoints.run_folder import load_run
from lcjax.data import DataConfig, make_loader
from lcjax.errors import InputError
from lcjax.models import preset
from lcjax.training import batches, loop, run
from lcjax.tree import flatten

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled_once")]

PATTERN = Landmark(block=8, top_k=2, train_length=32, token=260)
LANDMARKS = PATTERN.inserted_tokens


def data(corpus, **fields):
    return DataConfig(**{"path": str(corpus), "length": 32} | fields)


def test_rows_are_those_without_landmarks_with_landmarks_put_in(corpus):
    plain = make_loader(data(corpus), ByteTokenizer(), 4)
    marked = make_loader(data(corpus), ByteTokenizer(), 4, inserted=LANDMARKS)
    for _ in range(3):
        batch, expected = next(marked), LANDMARKS.in_row(next(plain))
        assert batch["tokens"].shape == (4, 36)
        assert (batch["tokens"] == 260).any()
        for name, field in expected.items():
            np.testing.assert_array_equal(batch[name], field)


def test_data_resumes_at_its_position_and_not_with_other_landmarks(corpus):
    loader = make_loader(data(corpus), ByteTokenizer(), 4, inserted=LANDMARKS)
    next(loader)
    state, expected = loader.get_state(), next(loader)
    again = make_loader(data(corpus), ByteTokenizer(), 4, inserted=LANDMARKS)
    again.set_state(state)
    for name, field in next(again).items():
        np.testing.assert_array_equal(field, expected[name])
    with pytest.raises(InputError, match="landmarks was .* and is None"):
        make_loader(data(corpus), ByteTokenizer(), 4).set_state(state)


def test_rows_that_are_not_whole_blocks_raise_input_error_before_training(corpus):
    with pytest.raises(InputError, match="data.length=32 must be a multiple .* nearest: 28, 35"):
        make_loader(data(corpus), ByteTokenizer(), 4, inserted=Landmarks(260, 7, "drop"))


def test_a_run_trains_new_tokens_and_leaves_a_landmark_checkpoint(tmp_path, corpus, monkeypatch):
    folder, local_batches = tmp_path / "run", []
    put = batches.put
    monkeypatch.setattr(
        batches, "put", lambda local, mesh: local_batches.append(local) or put(local, mesh)
    )
    model = {"preset": "tiny", "pattern": PATTERN}
    config = tiny(folder, corpus, model=model, steps=6, save_every=3)
    estimate, lengths = loop.cost.estimate, []
    monkeypatch.setattr(
        loop.cost, "estimate", lambda m, n, **k: lengths.append(n) or estimate(m, n, **k)
    )
    metrics = run(config)
    assert metrics["loss"] < 5.4 and {batch["tokens"].shape for batch in local_batches} == {(8, 36)}
    assert lengths == [36]
    params, config, tokenizer = load_run(folder)
    assert (config.vocab_size, config.pattern, tokenizer.vocab_size) == (261, PATTERN, 261)
    assert tokenizer.decode([97, 260]) == "a<landmark>"
    exported, read, _ = checkpoints.load(folder / "model")
    assert read.pattern == PATTERN
    for path, leaf in flatten(params).items():
        np.testing.assert_array_equal(leaf, flatten(exported)[path], err_msg=path)
    started = np.asarray(params["embed"]["embedding"][259:], np.float32)
    assert np.abs(started[1] - started[0]).max() > 1e-4  # the landmark was trained, [PAD] was not


def test_new_tokens_begin_as_the_mean_of_all_others():
    config = preset("tiny").replace(pattern=PATTERN)
    rng = np.random.default_rng(0)
    params = {
        "embed": {"embedding": rng.normal(size=(259, 64)).astype(np.float32)},
        "head": {"kernel": rng.normal(size=(64, 259)).astype(np.float32)},
    }
    params = jax.tree.map(jax.numpy.asarray, params)
    grown, wide, tokenizer = with_landmark(params, config, ByteTokenizer())
    mean = np.asarray(params["embed"]["embedding"]).mean(0)
    np.testing.assert_allclose(grown["embed"]["embedding"][260], mean, atol=1e-6)
    assert wide.vocab_size == 261 and grown["head"]["kernel"].shape == (64, 261)
    text = "naïve <landmark> text"
    assert tokenizer.encode(text) == ByteTokenizer().encode(text)
    assert tokenizer.encode("[PAD]<landmark>", allow_special=True) == [259, 260]
    known = (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id, tokenizer.add_bos)
    assert known == (256, (257,), 258, True)
    unchanged = with_landmark(grown, wide, tokenizer)
    assert unchanged == (grown, wide, tokenizer)


@pytest.mark.parametrize(
    ("pattern", "more", "message"),
    [
        (Landmark(block=8, top_k=None), {}, "pattern.token is not set"),
        (Landmark(block=8, top_k=None, token=259), {}, "pattern.token=259 exceeds .* use 260"),
        (PATTERN, {"trainable": ("norms",)}, "and <landmark> untrained .*embeddings and head, or"),
    ],
)
def test_a_model_that_cannot_know_its_landmark_is_not_trained(
    tmp_path, corpus, pattern, more, message
):
    model = {"preset": "tiny", "pattern": pattern}
    with pytest.raises(InputError, match=message):
        run(tiny(tmp_path / "run", corpus, model=model, **more))
    assert not (tmp_path / "run").exists()
