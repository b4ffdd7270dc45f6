"""Texts and prompts of different lengths, read one behind the other as they would be alone."""

import numpy as np
import pytest
from tiny_lm import ids, sharp_decoder, sharp_lm

from lcjax.attention import Causal, SelfExtend
from lcjax.checkpoints.build import ModelSection
from lcjax.generation import scoring, session
from lcjax.generation.language_model import LanguageModel
from lcjax.generation.sampling import Sampling
from lcjax.models import LayerKind, preset
from lcjax.parallel.sharding import Mesh
from lcjax.rope import DynamicNTK

LENGTHS = [130, 20, 75, 41]


def spied(monkeypatch, module, name):
    """What the function of that name returns, call by call."""
    seen, function = [], getattr(module, name)

    def spy(*args, **options):
        seen.append(function(*args, **options))
        return seen[-1]

    monkeypatch.setattr(module, name, spy)
    return seen


MESH = pytest.param(Mesh(data=2, fsdp=1, tensor=4), marks=pytest.mark.slow, id="mesh")


@pytest.fixture(scope="module", params=[pytest.param(None, id="alone"), MESH])
def lm(request):
    return sharp_lm(mesh=request.param)


def test_texts_share_a_row_of_each_device_and_have_the_scores_they_have_alone(lm, monkeypatch):
    lm, laid = lm.with_method(length=256), spied(monkeypatch, scoring, "_lay_out")
    tokens = np.zeros((4, max(LENGTHS)), np.int32)
    for row, length in enumerate(LENGTHS):
        tokens[row, :length] = ids(row, length)
    found = lm.nll(tokens, first=30, lengths=np.array(LENGTHS))
    rows = laid[0][0]
    devices = 1 if lm.mesh is None else 2
    assert rows.tokens.shape[0] == devices and rows.tokens.size < 300  # not 4 x 144
    monkeypatch.setattr(session, "packing_saves", lambda *sizes: False)
    wanted = lm.nll(tokens, first=30)
    assert laid[1][0].segments is None
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(found[row, :length], wanted[row, :length], atol=2e-5)
        assert not found[row, length:].any() and not found[row, :30].any()


@pytest.mark.slow
def test_rows_of_packed_texts_are_no_longer_than_one_may_be(monkeypatch):
    lm = sharp_lm().with_method(length=256)
    laid = spied(monkeypatch, scoring, "_lay_out")
    monkeypatch.setattr(session, "MAX_PACKED_ROW", 150)
    tokens = np.zeros((4, max(LENGTHS)), np.int32)
    for row, length in enumerate(LENGTHS):
        tokens[row, :length] = ids(row, length)
    found = lm.nll(tokens, lengths=np.array(LENGTHS))
    assert laid[0][0].tokens.shape == (2, 144) and laid[0][0].segments is not None
    for row, length in enumerate(LENGTHS):
        alone = lm.nll(tokens[row : row + 1, :length])
        np.testing.assert_allclose(found[row, :length], alone[0], atol=2e-5)


def test_texts_of_one_length_keep_rows_of_their_own(lm, monkeypatch):
    laid = spied(monkeypatch, scoring, "_lay_out")
    lm.with_method(length=256).nll(np.array([ids(n, 64) for n in range(4)]))
    assert laid[0][0].tokens.shape == (4, 64) and laid[0][0].segments is None


@pytest.mark.parametrize(
    ("pattern", "exact"),
    [
        (Causal(), False),
        pytest.param(SelfExtend(group=4, window=32), False, marks=pytest.mark.slow),
        pytest.param(Causal(), True, marks=pytest.mark.slow),
    ],
    ids=["causal", "group", "exact"],
)
def test_prompts_are_gone_on_from_as_from_rows_of_their_own(pattern, exact, monkeypatch):
    lm = sharp_lm(pattern=pattern, rope=DynamicNTK(factor=2.0)).with_method(length=512)
    prompts, sampling = [ids(n, length) for n, length in enumerate(LENGTHS)], Sampling(8, 8)

    def written():
        return [text.ids for text in lm.generate(prompts, sampling, exact=exact)]

    with monkeypatch.context() as patched:
        packed = spied(patched, session, "read_packed")
        found = written()
    assert len(packed) == 1
    monkeypatch.setattr(session, "can_pack", lambda *args: False)
    assert found == written()


@pytest.mark.parametrize(
    "pattern",
    [Causal(), pytest.param(SelfExtend(group=4, window=32), marks=pytest.mark.slow)],
    ids=["rotated", "unrotated"],
)
def test_layers_that_read_the_keys_of_others_read_packed_prompts(pattern, monkeypatch):
    layers = (LayerKind(), LayerKind(keys_of=0))
    lm = sharp_decoder(preset("tiny").replace(layers=layers, pattern=pattern))
    packed = spied(monkeypatch, session, "read_packed")
    prompts, sampling = [ids(n, length) for n, length in enumerate(LENGTHS)], Sampling(6, 6)
    texts = lm.generate(prompts, sampling)
    assert len(packed) == 1
    monkeypatch.setattr(session, "can_pack", lambda *args: False)
    assert texts == lm.generate(prompts, sampling)


def test_a_prompt_alone_and_rows_that_are_turned_differently_are_read_as_they_lie(monkeypatch):
    section = ModelSection(preset="tiny", rope=DynamicNTK(factor=2.0, original_length=32))
    lm, packed = LanguageModel.load(section), spied(monkeypatch, session, "read_packed")
    lm.generate([ids(1, 70)], Sampling(1))
    lm.generate([ids(1, 70), ids(2, 9)], Sampling(1))
    assert not packed


def test_rows_without_text_have_no_score(lm):
    actual = lm.nll(np.zeros((2, 4), np.int32), lengths=np.array([0, 0]))
    np.testing.assert_array_equal(actual, np.zeros((2, 4), np.float32))
