"""REPLUG equals the authors' mixture, and reading one passage is reading it in front."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_lm import ids, sharp_lm

from lcjax.errors import InputError
from lcjax.generation.language_model import LanguageModel
from lcjax.generation.replug import Replug
from lcjax.generation.sampling import Mixture, Sampling, log_weights
from lcjax.parallel.sharding import Mesh
from lcjax.rope import DynamicNTK

GREEDY = Sampling(max_new_tokens=5, min_new_tokens=5)
CASE = "replug.mix_temp1.0."


TOKENS = np.array([ids(1, 12), ids(2, 12)])
PASSAGES = [[ids(3, 9), ids(4, 20), ids(5, 14)], [ids(6, 11)]]
SCORES = [[0.3, -1.0, 1.2], [7.0]]


@pytest.fixture(scope="module")
def lm():
    return sharp_lm(rope=DynamicNTK(factor=2.0))


def test_the_mixture_equals_the_released_code():
    with np.load(Path(__file__).parent.parent / "golden" / "attention.npz") as data:
        case = {k.removeprefix(CASE): data[k] for k in data.files if k.startswith(CASE)}
    rows = case["logits"].swapaxes(0, 1)  # seven texts of five prompts, and filler of a mesh
    filled = np.concatenate([rows.reshape(35, -1), rows[0][:1]])
    mixture = Mixture(7, np.tile(log_weights(case["scores"]), (7, 1)))
    found = np.asarray(mixture.logits(jnp.asarray(filled)))
    np.testing.assert_allclose(found, case["log_prob"], atol=2e-6)
    of_targets = np.take_along_axis(found, case["targets"][:, None], -1)[:, 0]
    np.testing.assert_allclose(of_targets, case["target_log_prob"], atol=2e-6)
    read = mixture.read_by(jnp.arange(7), 36)
    np.testing.assert_array_equal(read, [*np.repeat(np.arange(7), 5), 0])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_weights_are_the_softmax_of_scores_over_the_temperature(temperature):
    scores = np.array([[3.0, -1e4, 2.5], [1.0, 1.0, -np.inf]])
    powers = np.exp((scores - scores.max(1, keepdims=True)) / temperature)
    with np.errstate(divide="ignore"):
        wanted = np.log(powers / powers.sum(1, keepdims=True))
    found = log_weights(scores, temperature)
    np.testing.assert_allclose(np.exp(found), np.exp(wanted), atol=1e-12)
    np.testing.assert_allclose(found[1, :2], np.log(0.5), atol=1e-12)


def alone(lm, passage, tokens):
    """Scores of a text behind one passage, read by itself."""
    text = np.array([[*passage, *tokens]])
    return lm.nll(text, first=len(passage) + 1)[0, len(passage) :]


def test_scores_are_those_of_the_mixture_of_single_passes(lm):
    found = Replug(lm, temperature=0.7, batch=2).nll(TOKENS, context=PASSAGES, scores=SCORES)
    for row, (passages, scores) in enumerate(zip(PASSAGES, SCORES, strict=True)):
        each = np.array([alone(lm, passage, TOKENS[row]) for passage in passages], np.float64)
        powers = np.exp(np.array(scores) / 0.7)
        wanted = -np.log((powers / powers.sum()) @ np.exp(-each[:, 1:]))
        np.testing.assert_allclose(found[row, 1:], wanted, atol=2e-4)


def test_a_passage_beyond_the_trained_length_stretches_only_its_own_text(lm):
    """Dynamic NTK rotates by the length of each text, passage and all."""
    passages = [ids(3, 9), ids(4, 30)]
    short = lm.with_method(rope=DynamicNTK(factor=8.0, original_length=16))
    found = Replug(short).nll(TOKENS[:1], context=[passages])
    each = np.array([alone(short, passage, TOKENS[0])[1:] for passage in passages])
    np.testing.assert_allclose(found[0, 1:], -np.log(np.exp(-each).mean(0)), atol=2e-4)


def test_one_passage_is_read_in_front_whatever_its_score_and_equal_ones_are_one(lm):
    one = Replug(lm).nll(TOKENS[1:], context=PASSAGES[1:], scores=[[-3.0]])
    np.testing.assert_allclose(one[0, 1:], alone(lm, *PASSAGES[1], TOKENS[1])[1:], atol=1e-5)
    many = Replug(lm).nll(TOKENS[1:], context=[PASSAGES[1] * 3], scores=[[1.0, 2.0, 0.5]])
    np.testing.assert_allclose(many, one, atol=1e-4)


def test_without_passages_the_text_is_read_alone_and_padding_is_not_scored(lm):
    lengths = np.array([12, 7])
    found = Replug(lm).nll(TOKENS, context=[[], []], lengths=lengths, first=3)
    wanted = np.zeros((2, 12))
    for row, length in enumerate(lengths):
        wanted[row, :length] = alone(lm, [], TOKENS[row, :length])
    wanted[:, :3] = 0
    np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_texts_that_end_before_the_first_scored_token_are_not_read(lm):
    replug = Replug(lm, batch=1)
    ends = np.array([12, 4])
    found = replug.nll(TOKENS, context=PASSAGES, scores=SCORES, lengths=ends, first=8)
    one = replug.nll(TOKENS[:1], context=PASSAGES[:1], scores=SCORES[:1], first=8)
    np.testing.assert_array_equal(found, [one[0], np.zeros(12)])


def picked(stream, rows):
    found = [[] for _ in range(rows)]
    for piece in stream:
        found[piece.row] += piece.ids
    return found


@functools.partial(jax.jit, static_argnums=0)
def probabilities(model, params, tokens, rotation):
    hidden = model.apply({"params": params}, tokens, rotation=rotation).hidden
    return jax.nn.softmax(model.apply({"params": params}, hidden, method="logits"))


def best(lm, passages, weights, prompt, answer):
    """The most probable token of the mixture before each of `answer`, all read at once."""
    total = np.zeros((len(answer), lm.config.vocab_size))
    for passage, weight in zip(passages, weights, strict=True):
        text = [*passage, *prompt, *answer]
        tokens = np.array([text + [0] * (40 - len(text))])
        found = probabilities(lm.model, lm.params, tokens, lm.rotation(len(text)))[0]
        total += np.exp(weight) * np.asarray(found, np.float64)[len(text) - 6 : len(text) - 1]
    total[:, list(lm.tokenizer.eos_ids)] = 0
    return total.argmax(-1).tolist()


@pytest.mark.slow
def test_every_token_is_picked_from_the_mixture(lm):
    prompts = [ids(8, 7), ids(9, 4)]
    found = picked(Replug(lm).stream(prompts, GREEDY, context=PASSAGES, scores=SCORES), 2)
    weights = log_weights(np.array(SCORES[0]))
    assert found[0] == best(lm, PASSAGES[0], weights, prompts[0], found[0])
    assert found[1] == picked(lm.stream([[*PASSAGES[1][0], *prompts[1]]], GREEDY), 1)[0]
    assert found[0] != picked(lm.stream([[*PASSAGES[0][0], *prompts[0]]], GREEDY), 1)[0]


@pytest.mark.slow
def test_a_mesh_picks_the_same_tokens(lm):
    spread = sharp_lm(rope=DynamicNTK(factor=2.0), mesh=Mesh(2, 2, 2, 1))
    found = [Replug(x).generate(["a", "bc"], GREEDY, context=PASSAGES) for x in (lm, spread)]
    assert found[0] == found[1]


def test_bos_precedes_the_passage(lm, monkeypatch):
    read = []
    monkeypatch.setattr(LanguageModel, "stream", lambda self, ids, *_, **__: read.extend(ids) or [])
    Replug(lm).generate(["b", [5]], context=[["a", "cc"], [[7]]])
    a, b, c = (ord(letter) for letter in "abc")
    bos = lm.tokenizer.bos_id
    assert read == [[bos, a, b], [bos, c, c, b], [7, 5], [7, 5]]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda r: r.nll(TOKENS, context=[["a"]]), "1 rows for 2 texts"),
        (lambda r: r.nll(TOKENS, context="ab"), "context='ab' must be a list"),
        (lambda r: r.nll(TOKENS, context=PASSAGES, scores=[[1.0], [2.0]]), "for each passage"),
        (lambda r: r.nll(TOKENS, context=[["a"], ["b"]], scores=[[np.nan], [1]]), "be numbers"),
        (lambda r: r.nll(TOKENS, context=PASSAGES, scores=3), "scores=3 must be a list"),
        (lambda r: r.nll(TOKENS, context=PASSAGES, scores=[["a"], 1]), "scores=.* rows of numbers"),
        (lambda r: r.nll(TOKENS, context=PASSAGES, lengths=[[1], 2]), "lengths=.* whole numbers"),
        (lambda r: r.lm.nll(TOKENS, context=[1, "a"]), "context: a row=1 must be a list"),
        (lambda r: r.lm.nll(TOKENS, context=b"ab"), "context=b'ab' must be a list"),
        (lambda r: r.generate("text", context=[[]]), "must be a list, such as"),
        (lambda r: Replug(r.lm, temperature=0.0), "temperature=0.0"),
        (lambda r: Replug(r.lm, batch=0), "batch=0"),
    ],
)
def test_invalid_mixtures_raise_input_error(lm, call, words):
    with pytest.raises(InputError, match=words) as caught:
        call(Replug(lm))
    assert "\n" not in str(caught.value)
