"""QSA: the runs that its indexer chooses, against the authors' code, and its divergence."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sparse_golden as golden
from chosen_support import check_generation
from tiny_lm import sharp_lm

from lcjax.attention import QSA
from lcjax.errors import InputError
from lcjax.rope import Rotation
from pallas_kernels import gather


def is_read(metadata, pattern):
    """Which keys each token of one row reads [T, S], by values that are the numbers of keys."""
    length = metadata.k_positions.shape[1]
    zeros, values = jnp.zeros((1, length, 1, 8)), jnp.eye(length)[None, :, None]
    attend = jax.jit(functools.partial(pattern.attend, metadata=metadata))
    return attend(zeros, zeros, values)[0, :, 0] > 0


def with_features(metadata, pattern, hidden, query_key, scales=None):
    """Metadata with the features of hidden states; scales of the norms are 1 + theirs."""
    zeros = np.zeros(pattern.head_dim, np.float32)
    query, key = (zeros, zeros) if scales is None else scales
    parameters = {
        "run_query_key": query_key.reshape(len(query_key), -1, pattern.head_dim),
        "run_query_norm_scale": query,
        "run_key_norm_scale": key,
    }
    parameters = {name: jnp.asarray(x, jnp.float32) for name, x in parameters.items()}
    features = pattern.features(parameters, jnp.asarray(hidden), None, None, metadata)
    return metadata.replace(features=features)


def test_the_keys_that_are_read_are_those_of_transformers(monkeypatch):
    monkeypatch.setattr(gather, "TIE", 2.0**-22)  # the authors choose among near scores, too
    params, x = golden.params("qsa.indexer"), golden.arrays("qsa.indexer")
    rotary, length = params["rope_dim"], x["hidden"].shape[1]
    frequencies = params["rope_base"] ** -(np.arange(0, rotary, 2) / rotary)
    metadata = golden.metadata({"cu_seqlens": [0, length]})
    metadata = metadata.replace(rotation=Rotation(jnp.asarray(frequencies, jnp.float32)))
    pattern = QSA(params["heads"], params["dim"], params["budget"], run=params["ratio"])
    scales = x["norm_q_factor"] - 1, x["norm_k_factor"] - 1
    metadata = with_features(metadata, pattern, x["hidden"], x["wqk"], scales)
    np.testing.assert_array_equal(is_read(metadata, pattern), x["chosen"][0])


@pytest.mark.parametrize("top_k", [9, 900])
def test_the_divergence_is_between_probabilities_of_runs(top_k):
    """Packed documents, in float64; nothing is learned where no run is complete."""
    ends, run = [0, 2, 25, 54], 3
    pattern = QSA(heads=4, head_dim=6, top_k=top_k, run=run)
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(1, ends[-1], n, 8)).astype(np.float32) for n in (4, 2))
    hidden, query_key = rng.normal(size=(1, ends[-1], 16)), rng.normal(size=(16, 30))
    metadata = golden.metadata({"cu_seqlens": ends})
    metadata = with_features(metadata, pattern, hidden.astype(np.float32), query_key)
    apart = jax.jit(functools.partial(pattern.divergence, metadata=metadata))(q, k)[0]
    q, k = (x[0].astype(float) for x in (q, np.repeat(k, 2, axis=2)))
    index = (hidden[0] @ query_key).reshape(ends[-1], 5, 6)

    def normed(x):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)

    want = np.zeros(ends[-1])
    for first, last in zip(ends, ends[1:]):
        for token in range(first + run - 1, last):
            count = (token + 1 - first) // run
            runs = slice(first, first + run * count)
            means = normed(index[runs, -1].reshape(count, run, 6).mean(1))
            products = normed(index[token, :-1]) @ means.T
            scores = np.maximum(products, 0).sum(0) / np.sqrt(6)
            chosen = np.argsort(-scores)[: top_k // run]
            logits = np.einsum("NH,SNH->NS", q[token], k[runs]).reshape(4, count, run) / np.sqrt(8)
            weights = np.exp(logits)[:, chosen]
            teacher = (weights / weights.sum((1, 2), keepdims=True)).sum(2).mean(0)
            student = np.exp(scores[chosen]) / np.exp(scores[chosen]).sum()
            want[token] = (teacher * np.log(teacher / student)).sum()
    np.testing.assert_allclose(apart, want, rtol=2e-4, atol=2e-6)


def test_a_text_shorter_than_a_run_teaches_nothing():
    pattern, x = QSA(heads=2, head_dim=8, top_k=8, run=4), np.ones((1, 3, 5), np.float32)
    metadata = with_features(golden.metadata({"cu_seqlens": [0, 3]}), pattern, x, np.ones((5, 24)))
    q, k = jnp.ones((1, 3, 2, 8)), jnp.ones((1, 3, 1, 8))
    assert not np.any(jax.jit(lambda q, k: pattern.divergence(q, k, metadata))(q, k))


def test_generation_equals_reading_the_text_again():
    check_generation(sharp_lm(pattern=QSA(heads=2, head_dim=16, top_k=16, run=4)))


def test_a_choice_of_tokens_is_one_of_whole_runs():
    with pytest.raises(InputError, match=r"pattern.top_k=10 must be a multiple of pattern.run=4"):
        QSA(top_k=10)
