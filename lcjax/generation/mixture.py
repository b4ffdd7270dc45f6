"""Several prompts as one text: their probabilities are mixed, and all read what is picked."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from lcjax.errors import InputError


def mixed(log_probs: jax.Array, log_weights: jax.Array) -> jax.Array:
    """log sum_i w_i p_i over the first axis of both: [n, ...] and [n] or [n, 1, ...]."""
    extra = log_probs.ndim - log_weights.ndim
    return jax.nn.logsumexp(log_probs + log_weights[(..., *[None] * extra)], axis=0)


def log_weights(scores: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """log softmax(scores / temperature), float64 [..., n]; a score of -inf leaves one out."""
    if not 0 < temperature < float("inf"):
        raise InputError(
            f"temperature={temperature} must be above 0 and finite: scores are divided by it"
        )
    scores = np.asarray(scores, np.float64) / temperature
    top = scores.max(-1, keepdims=True)
    if not np.isfinite(top).all():
        raise InputError("scores must be numbers, at least one of a text above -inf")
    return scores - top - np.log(np.exp(scores - top).sum(-1, keepdims=True))


@dataclasses.dataclass(frozen=True)
class Mixture:
    """B texts of n prompts each: rows b n ... b n + n - 1 of a batch are those of text b."""

    texts: int
    weights: np.ndarray | None = None  # log weights [B, n]; None: every text is one prompt

    @classmethod
    def of_itself(cls, texts: int) -> "Mixture":
        """Every row is a text of its own."""
        return cls(texts)

    def logits(self, logits: jax.Array) -> jax.Array:
        """log p [B, V] of the next token of every text from those of its prompts [B n, V].

        Rows that fill up a mesh come last, and are left out.
        """
        if self.weights is None:
            return logits
        return _mixed_rows(logits, jnp.asarray(self.weights, jnp.float32))

    def read_by(self, token: jax.Array, rows: int) -> jax.Array:
        """The tokens [rows] that the prompts read when the texts go on with `token` [B].

        Rows that fill up a mesh follow the first text.
        """
        if self.weights is None:
            return token
        read = jnp.repeat(token, self.weights.shape[1])
        return jnp.concatenate([read, jnp.repeat(token[:1], rows - len(read))])


@jax.jit
def _mixed_rows(logits: jax.Array, weights: jax.Array) -> jax.Array:
    texts, each = weights.shape
    rows = logits[: texts * each].reshape(texts, each, -1)
    return mixed(jax.nn.log_softmax(rows, -1).swapaxes(0, 1), weights.T)
