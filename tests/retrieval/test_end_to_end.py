"""Training of encoders by a language model: REPLUG-LSR and the marginals of REALM and RAG."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lcjax.retrieval.end_to_end import log_prior, lsr_loss, marginal_nll

B, K, T = 3, 4, 5


@pytest.fixture
def values():
    """Scores, -log p, scored tokens and which passages there are; the last query has one."""
    rng = np.random.default_rng(0)
    scored = (rng.random((B, T)) < 0.7).astype(np.float32)
    scored[:, 0] = 1
    has_passage = np.ones((B, K), bool)
    has_passage[1, 2:], has_passage[2, 1:] = False, False
    scores = rng.normal(size=(B, K)).astype(np.float32)
    nll = rng.exponential(size=(B, K, T)).astype(np.float32)
    return scores, nll, scored, has_passage


def softmax(x):
    return jnp.exp(x) / jnp.exp(x).sum()


def naive_lsr(scores, nll, scored, has_passage, temperature, lm_temperature):
    """The formula of the paper, query by query."""
    losses = []
    for row in range(B):
        mean = (nll[row] * scored[row]).sum(-1) / scored[row].sum()
        num = has_passage[row].sum()
        p = softmax(scores[row, :num] / temperature)
        q = softmax(-mean[:num] / lm_temperature)
        losses.append((p * jnp.log(p / q)).sum())
    return jnp.stack(losses)


def naive_marginal(scores, nll, scored, has_passage, temperature, marginal):
    """Products and sums of probabilities, without logarithms but the last."""
    losses = []
    for row in range(B):
        num = has_passage[row].sum()
        prior = softmax(scores[row, :num] / temperature)
        tokens = jnp.exp(-nll[row, :num]) ** scored[row]
        if marginal == "sequence":
            p = (prior * tokens.prod(-1)).sum()
        else:
            p = (prior[:, None] * tokens).sum(0).prod()
        losses.append(-jnp.log(p))
    return jnp.stack(losses)


def both(ours, naive, scores, nll):
    """Losses and gradients of a weighted sum of them; of the formula in float64."""
    weights = np.arange(1, B + 1)

    def of(loss, *args):
        return loss(*args), jax.grad(lambda *x: (loss(*x) * weights).sum(), (0, 1))(*args)

    found = of(ours, scores, nll)
    with jax.enable_x64():
        expected = of(naive, *(jnp.asarray(x, jnp.float64) for x in (scores, nll)))
        assert expected[0].dtype == jnp.float64
    return found, expected


def close(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_lsr_equals_the_formula_and_has_no_gradient_into_the_language_model(values):
    scores, nll, *masks = values
    temperatures = {"temperature": 0.3, "lm_temperature": 0.2}
    (loss, (by_scores, by_nll)), (expected, (wanted, _)) = both(
        lambda scores, nll: lsr_loss(scores, nll, *masks, **temperatures),
        lambda scores, nll: naive_lsr(scores, nll, *masks, **temperatures),
        scores,
        nll,
    )
    close((loss, by_scores), (expected, wanted))
    assert not np.any(by_nll) and loss[2] == 0 and np.all(loss[:2] > 0)


@pytest.mark.parametrize("marginal", ["sequence", "token"])
def test_marginals_equal_the_formula_with_gradients_into_both_models(values, marginal):
    scores, nll, scored, has_passage = values

    def ours(scores, nll):
        log_p = log_prior(scores, has_passage, 0.7)
        return marginal_nll(log_p, nll, scored, marginal=marginal)

    naive = {"temperature": 0.7, "marginal": marginal}
    found, expected = both(
        ours, lambda *x: naive_marginal(*x, scored, has_passage, **naive), scores, nll
    )
    close(found, expected)
    _, (by_scores, by_nll) = found
    assert np.all(by_scores[:2][has_passage[:2]] != 0) and np.any(by_nll)
    # With one passage it is the language model's own loss, and the encoder learns nothing.
    assert not np.any(by_scores[2])
    np.testing.assert_allclose(found[0][2], (nll[2, 0] * scored[2]).sum(), rtol=1e-6)


def test_the_marginals_differ_with_several_passages_and_tokens(values):
    scores, nll, scored, has_passage = values
    log_p = log_prior(scores, has_passage, 1.0)
    token, sequence = (marginal_nll(log_p, nll, scored, marginal=m) for m in ("token", "sequence"))
    assert np.all(np.abs(token - sequence)[:2] > 1e-3)
    np.testing.assert_allclose(token[2], sequence[2], rtol=1e-6)


def test_a_query_without_passages_gives_finite_losses_and_gradients(values):
    scores, nll, scored, _ = values
    absent = np.zeros((B, K), bool)

    def total(scores):
        lsr = lsr_loss(scores, nll, scored, absent, temperature=0.1, lm_temperature=0.1)
        log_p = log_prior(scores, absent, 1.0)
        return lsr.sum() + marginal_nll(log_p, nll, scored, marginal="token").sum()

    loss, gradient = jax.value_and_grad(total)(scores)
    assert np.isfinite(loss) and not np.any(gradient)
