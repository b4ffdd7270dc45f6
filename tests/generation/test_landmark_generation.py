"""A model with landmarks scores and writes ordinary text, whatever it reads among it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lcjax.attention import Landmark
from lcjax.checkpoints import ByteTokenizer
from lcjax.errors import InputError
from lcjax.generation.language_model import LanguageModel
from lcjax.generation.sampling import Sampling
from lcjax.models import Decoder, preset
from lcjax.rope import DynamicNTK

pytestmark = pytest.mark.slow

MARK = 258
ALL = Landmark(block=8, top_k=16, train_length=160, token=MARK)  # 16 are more than there will be


@pytest.fixture(scope="module")
def lm():
    model = Decoder(preset("tiny").replace(num_layers=1))
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    # Sharper than at initialisation, so that the greedy choice does not hang on rounding.
    params = jax.tree.map(lambda leaf: leaf * 3 if leaf.ndim > 1 else leaf, params)
    return LanguageModel(model, params, ByteTokenizer())


def logits_at_once(lm, texts):
    """[B, T, V] of texts with landmarks in them, without a cache."""
    model = Decoder(lm.config.replace(scan_layers=False))
    rotation = lm.rotation(len(texts[0]))
    return np.array(_logits(model, lm.params, np.asarray(texts, np.int32), rotation))


@functools.partial(jax.jit, static_argnums=0)
def _logits(model, params, tokens, rotation):
    hidden = model.apply({"params": params}, tokens, rotation=rotation).hidden
    return model.apply({"params": params}, hidden, method="logits")


def ids(seed, *shape):
    return np.random.default_rng(seed).integers(0, 256, shape)


@pytest.mark.parametrize("loss", ["predict", "skip"])
def test_scores_equal_those_of_the_marked_text_read_at_once(lm, loss):
    lm = lm.with_method(pattern=dataclasses.replace(ALL, loss=loss))
    landmarks = lm.config.pattern.inserted_tokens
    tokens = ids(0, 2, 71)
    logits = logits_at_once(lm, [landmarks.in_prompt(row.tolist()) for row in tokens])
    log_p = np.asarray(jax.nn.log_softmax(logits))
    want = np.zeros((2, 71))
    for t in range(9, 71):
        text = landmarks.in_prompt(tokens[0, :t].tolist())
        want[:, t] = -log_p[[0, 1], len(text) + landmarks.next_token_offset(text), tokens[:, t]]
    want[1, 50:] = 0
    got = lm.nll(tokens, first=9, lengths=np.array([71, 50]))
    np.testing.assert_allclose(got, want, atol=2e-4)


def test_scores_beyond_a_chunk_come_from_retrieved_blocks(lm):
    few = lm.with_method(pattern=Landmark(block=8, top_k=1, train_length=32, token=MARK))
    everything = lm.with_method(pattern=dataclasses.replace(ALL, top_k=None))
    tokens = ids(1, 1, 64)
    got, want = few.nll(tokens), everything.nll(tokens)
    # Sixteen places are read at once: fourteen ordinary tokens, and the one that they predict.
    np.testing.assert_allclose(got[:, :15], want[:, :15], atol=2e-4)
    assert np.abs(got[:, 16:] - want[:, 16:]).max() > 0.01
    changed = tokens.copy()
    changed[0, 40] += 1
    np.testing.assert_array_equal(few.nll(changed % 256)[:, :40], got[:, :40])


@pytest.mark.parametrize("loss", ["predict", "skip"])
def test_greedy_text_equals_reading_the_marked_text_anew(lm, loss):
    lm = lm.with_method(pattern=dataclasses.replace(ALL, loss=loss))
    landmarks, prompts = (
        lm.config.pattern.inserted_tokens,
        [ids(2, 21).tolist(), ids(3, 58).tolist()],
    )
    rows = [list(prompt) for prompt in prompts]
    for _ in range(9):
        for row in rows:
            text = landmarks.in_prompt(row)
            logits = logits_at_once(lm, [text + [0] * (80 - len(text))])[0]
            logits = logits[len(text) + landmarks.next_token_offset(text)]
            logits[MARK] = -np.inf
            row.append(int(logits.argmax()))
    sampling = Sampling(max_new_tokens=9, min_new_tokens=9)
    got = [[], []]
    for piece in lm.stream(prompts, sampling):
        got[piece.row] += piece.ids
    assert got == [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]


def test_rows_with_retrieval_do_not_know_of_each_other(lm):
    # Landmarks are one token, so to a first layer all are the same vector: of these it takes the
    # latest blocks, whatever rounding says.
    lm = lm.with_method(pattern=Landmark(block=8, top_k=1, train_length=32, token=MARK))
    prompts = [ids(4, 90).tolist(), ids(5, 35).tolist()]
    sampling = Sampling(max_new_tokens=9, min_new_tokens=9)
    both = [[], []]
    for piece in lm.stream(prompts, sampling):
        both[piece.row] += piece.ids
    for row, prompt in enumerate(prompts):
        alone = [token for piece in lm.stream([prompt], sampling) for token in piece.ids]
        assert alone == both[row] and MARK not in alone


def test_rotations_that_change_while_decoding_raise_input_error(lm):
    lm = lm.with_method(pattern=ALL, rope=DynamicNTK(factor=2.0))
    with pytest.raises(InputError, match="exact=True"):
        list(lm.stream([[1, 2]], exact=True))
