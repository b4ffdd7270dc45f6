"""Trains an encoder by what a language model makes of the passages that it finds.

With x the query, y the text to be predicted, z one of the k best passages, s(z, x) their score, and
P(z | x) = softmax(s(z, x) / temperature) over these k:

- REPLUG-LSR (Shi et al. 2023, arXiv 2301.12652, sec. 4): KL(P(z | x) || Q(z | x, y)) with
  Q = softmax(log p_LM(y | z, x) / lm_temperature). The language model is frozen.
- The marginal likelihood of REALM (Guu et al. 2020, arXiv 2002.08909) and RAG (Lewis et al. 2020,
  arXiv 2005.11401): -log sum_z P(z | x) p(y | x, z) of whole texts (RAG-Sequence), or the sum over
  tokens of -log sum_z P(z | x) p(y_t | x, z, y_<t) (RAG-Token). Both models are trained.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

_ABSENT = -1e30  # in place of -inf, whose differences are not finite


def lsr_loss(
    scores: Float[Array, "B K"],
    nll: Float[Array, "B K T"],
    scored: Float[Array, "B T"],
    has_passage: Bool[Array, "B K"],
    *,
    temperature: float,
    lm_temperature: float,
) -> Float[Array, " B"]:
    """Returns KL(P || Q) of REPLUG-LSR for each query; it has no gradient into `nll`.

    The log-likelihood of a text is the mean over its tokens: a sum would grow with their number,
    and all of Q would be on one passage.

    Args:
      scores: of the passages, from the encoder.
      nll: -log p_LM of every token of the text after each passage.
      scored: 1 for the tokens of y.
      has_passage: whether there is a passage; the others have no probability.
      temperature: of the scores.
      lm_temperature: of the log-likelihoods.
    """
    log_p = log_prior(scores, has_passage, temperature)
    mean_nll = (nll * scored[:, None]).sum(-1) / jnp.maximum(scored.sum(-1), 1)[:, None]
    log_q = log_prior(jax.lax.stop_gradient(-mean_nll), has_passage, lm_temperature)
    return (jnp.exp(log_p) * (log_p - log_q)).sum(-1)


def marginal_nll(
    log_p: Float[Array, "B K"],
    nll: Float[Array, "B K T"],
    scored: Float[Array, "B T"],
    *,
    marginal: str,
) -> Float[Array, " B"]:
    """Returns -log p(y | x) of each query.

    Args:
      log_p: log P(z | x), from `log_prior`.
      nll: -log p of every token of the text after each passage.
      scored: 1 for the tokens of y.
      marginal: what is mixed: the probabilities of the whole text ("sequence"), or of each token.
    """
    nll = nll * scored[:, None]
    if marginal == "sequence":
        return -jax.nn.logsumexp(log_p - nll.sum(-1), axis=1)
    return -(jax.nn.logsumexp(log_p[..., None] - nll, axis=1) * scored).sum(-1)


def log_prior(
    scores: Float[Array, "B K"], has_passage: Bool[Array, "B K"], temperature: float
) -> Float[Array, "B K"]:
    """Returns log softmax(scores / temperature) over the passages that there are."""
    return jax.nn.log_softmax(jnp.where(has_passage, scores / temperature, _ABSENT), axis=-1)
