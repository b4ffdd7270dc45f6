"""Picks tokens from logits: greedy choice, temperature, top-k, top-p, and mixtures of prompts."""

import dataclasses
import functools
import zlib
from collections.abc import Iterable
from typing import Annotated, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lcjax.errors import (
    InputError,
    Interval,
    NonEmpty,
    NonNegativeInt,
    Range,
    check_fields,
    check_seed,
)


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is picked, and when generation stops."""

    max_new_tokens: Annotated[int, Range(1, 2**24)] = 128
    min_new_tokens: NonNegativeInt = 0  # no end-of-text token is picked before this many tokens
    temperature: Annotated[float, Interval(least=0, hint="0 is greedy")] = 0.0
    # Number of most probable tokens that are kept; null: all
    top_k: Annotated[int, Range(1, hint="None keeps all tokens")] | None = None
    # Of these, the smallest set with at least this probability is kept
    top_p: Annotated[float, Interval(above=0, most=1)] = 1.0
    # The text ends before the first of these strings, which may be or contain special tokens.
    stop: tuple[
        Annotated[str, NonEmpty("an empty string stops at once", allows_blanks=True)], ...
    ] = ()
    # One for all draws; or one for each text, whose draws then do not depend on the other texts.
    seed: int | tuple[int, ...] = 0

    def __post_init__(self):
        check_fields("", self)
        if self.min_new_tokens > self.max_new_tokens:
            raise InputError(
                f"min_new_tokens={self.min_new_tokens} must lie between 0 and"
                f" max_new_tokens={self.max_new_tokens}"
            )
        for seed in self.seed if isinstance(self.seed, tuple) else (self.seed,):
            check_seed("seed", seed)

    def check_texts(self, count: int) -> None:
        """Raises an InputError if `seed` is a tuple without exactly one seed per text."""
        if isinstance(self.seed, tuple) and len(self.seed) != count:
            raise InputError(
                f"seed={self.seed} has {len(self.seed)} numbers for {count} prompts; give one for"
                " each, or a single one"
            )

    def with_seeds(self, prompts: Iterable[Iterable[int]]) -> "Sampling":
        """Returns a copy with a seed for each prompt, a hash of its token ids and `seed`.

        The draws of a prompt then do not depend on the size and order of batches. A copy that
        is greedy, or has a seed for each prompt already, is returned unchanged.
        """
        if not self.temperature or isinstance(self.seed, tuple):
            return self
        ids = (np.asarray(prompt, "<i4").tobytes() for prompt in prompts)
        return dataclasses.replace(self, seed=tuple(zlib.crc32(text, self.seed) for text in ids))

    def after(self, num_tokens: int) -> "Sampling":
        """Returns a copy with other draws, to continue texts after `num_tokens` new tokens."""
        if not self.temperature or not num_tokens:
            return self

        def mixed(seed: int) -> int:
            return int(np.random.SeedSequence([seed, num_tokens]).generate_state(1)[0])

        seeds = self.seed
        seeds = tuple(map(mixed, seeds)) if isinstance(seeds, tuple) else mixed(seeds)
        return dataclasses.replace(self, seed=seeds)

    def key(self, rows: int) -> jax.Array:
        """Returns the key for `pick`, or keys [rows] if each text has a seed.

        Filler rows for the mesh come last and have the key of the first row.
        """
        if not isinstance(self.seed, tuple):
            return jax.random.key(self.seed)
        seeds = [*self.seed, *[self.seed[0]] * (rows - len(self.seed))]
        return jax.vmap(jax.random.key)(jnp.array(seeds, jnp.uint32))


def pick(logits: jax.Array, key: jax.Array, step: int, eos: jax.Array, sampling: Sampling):
    """Picks token number `step` of every text, int32 [B], from float32 logits [B, V].

    Args:
      logits: logits of the next token.
      key: from `Sampling.key`.
      step: number of the new token, counted from 0.
      eos: int32 [n], tokens that end a text; not picked before `min_new_tokens`.
      sampling: how the token is picked.
    """
    is_early = step < sampling.min_new_tokens
    # Below 1e-5 greedy, as in vLLM: float32 logits divided by less overflow.
    is_random = sampling.temperature >= 1e-5
    # In float32 1e39 is inf and 1e-50 is 0: -inf / inf is NaN, and top_p=0 keeps no token. XLA may
    # multiply by 1 / temperature, which must not be subnormal.
    temperature, top_p = min(float(sampling.temperature), 1e37), max(float(sampling.top_p), 1e-37)
    return _draw(
        logits, key, step, eos, is_early, temperature, top_p,
        greedy=not is_random,
        top_k=int(sampling.top_k) if is_random and sampling.top_k is not None else None,
        nucleus=is_random and sampling.top_p < 1,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("greedy", "top_k", "nucleus"))
def _draw(logits, key, step, eos, is_early, temperature, top_p, *, greedy, top_k, nucleus):
    """Implements `pick`; only arguments that change the program are static."""
    logits = logits.at[:, eos].add(jnp.where(is_early, -jnp.inf, 0.0))
    if greedy:
        return logits.argmax(-1).astype(jnp.int32)
    logits = logits / temperature
    if top_k is not None:
        logits = _keep_top_k(logits, top_k)
    if nucleus:
        logits = _keep_top_p(logits, top_p)
    if key.ndim:
        keys = jax.vmap(jax.random.fold_in, (0, None))(key, step)
        return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
    return jax.random.categorical(jax.random.fold_in(key, step), logits).astype(jnp.int32)


def _keep_top_k(logits: jax.Array, count: int) -> jax.Array:
    """Keeps the `count` most probable tokens, and any that are as probable as the last of them.

    Top-k sampling, Fan et al. 2018.
    """
    least = jax.lax.top_k(logits, min(count, logits.shape[-1]))[0][..., -1:]
    return jnp.where(logits >= least, logits, -jnp.inf)


def _keep_top_p(logits: jax.Array, top_p: float | jax.Array) -> jax.Array:
    """Keeps the most probable tokens up to and including the one that reaches `top_p`.

    Nucleus sampling, Holtzman et al. 2020.
    """
    order = jnp.argsort(-logits, axis=-1)
    ranked = jnp.take_along_axis(jax.nn.softmax(logits, axis=-1), order, axis=-1)
    before = jnp.cumsum(ranked, axis=-1) - ranked
    is_kept = jnp.put_along_axis(
        jnp.zeros(logits.shape, bool), order, before < top_p, axis=-1, inplace=False
    )
    return jnp.where(is_kept, logits, -jnp.inf)


class TokenLogprobs(NamedTuple):
    """log p of a token under the model, and the most probable tokens in its place.

    Temperature, top-k and top-p do not change the values.
    """

    logprob: np.ndarray | jax.Array  # float32 [...], of the token
    top_ids: np.ndarray | jax.Array  # int32 [..., k], the most probable first
    top_logprobs: np.ndarray | jax.Array  # float32 [..., k]


@functools.partial(jax.jit, static_argnames="top")
def token_logprobs(logits: jax.Array, tokens: jax.Array, top: int) -> TokenLogprobs:
    """Returns log p of `tokens` int32 [...] from logits [..., V], and the `top` most probable."""
    lse = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    picked = jnp.take_along_axis(logits, tokens[..., None], -1) - lse
    # The same subtraction as above: log p of a token equals its entry among the top ones exactly.
    values, ids = jax.lax.top_k(logits, min(top, logits.shape[-1]))
    return TokenLogprobs(picked[..., 0], ids, values - lse)


class GeneratedText(str):
    """A generated text: `ids` are the picked tokens, `finish` is "stop" or "length".

    `passages` are the searches (`lcjax.generation.passages.Search`) whose hits were read.
    """

    def __new__(
        cls, text: str, ids: tuple[int, ...] = (), finish: str | None = None, passages: tuple = ()
    ):
        generated = super().__new__(cls, text)
        generated.ids, generated.finish, generated.passages = ids, finish, passages
        return generated


def join_pieces(pieces: Iterable, rows: int) -> list[GeneratedText]:
    """Joins the pieces of `stream` to the whole text of each row."""
    texts = [GeneratedText("")] * rows
    for piece in pieces:
        text = texts[piece.row]
        ids = text.ids + piece.ids
        texts[piece.row] = GeneratedText(text + piece.text, ids, piece.finish)
    return texts


# Mixtures of prompts


def log_weights(scores: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Computes log softmax(scores / temperature), float64 [..., n]; a score may be -inf."""
    Interval(above=0).check("temperature", temperature)
    scores = np.asarray(scores, np.float64) / temperature
    top = scores.max(-1, keepdims=True)
    if not np.isfinite(top).all():
        raise InputError("scores must be numbers, at least one of a text above -inf")
    return scores - top - np.log(np.exp(scores - top).sum(-1, keepdims=True))


@dataclasses.dataclass(frozen=True)
class Mixture:
    """B texts, each a mixture of n prompts: rows b n ... b n + n - 1 of a batch are text b.

    Constant weights mix the probabilities of each token separately (REPLUG, RAG-Token). With
    `is_sequence`, the probabilities of whole sequences are mixed (RAG-Sequence): because
    p(y_t | y_<t) = sum_z p(z | y_<t) p(y_t | z, y_<t), the weights are updated to the posterior
    after every picked token.
    """

    texts: int
    # log weights [B, n]; None: every text is one prompt
    weights: np.ndarray | jax.Array | None = None
    is_sequence: bool = False
    # Whether `logits` and `after` get logits with the input of the last feed-forward, a pair
    needs_ffn_input: ClassVar[bool] = False

    def after(self, logits: jax.Array, token: jax.Array) -> "Mixture":
        """Returns the mixture for the step after `token` [B] was picked from `logits` [B n, V]."""
        if self.weights is None or not self.is_sequence:
            return self
        weights = _posterior(logits, jnp.asarray(self.weights, jnp.float32), token)
        return dataclasses.replace(self, weights=weights)

    def logits(self, logits: jax.Array) -> jax.Array:
        """Computes log p [B, V] of the next token of every text from its prompts' logits [B n, V].

        Filler rows for the mesh come last and are dropped.
        """
        if self.weights is None:
            return logits
        return _mixed_rows(logits, jnp.asarray(self.weights, jnp.float32))

    def read_by(self, token: jax.Array, rows: int) -> jax.Array:
        """Returns the tokens [rows] that the prompts read after `token` [B] was picked.

        Filler rows for the mesh read the token of the first text.
        """
        if self.weights is None:
            return token
        tokens = jnp.repeat(token, self.weights.shape[1])
        return jnp.concatenate([tokens, jnp.repeat(token[:1], rows - len(tokens))])


@jax.jit
def _posterior(logits: jax.Array, weights: jax.Array, token: jax.Array) -> jax.Array:
    num_texts, num_prompts = weights.shape
    rows = logits[: num_texts * num_prompts].reshape(num_texts, num_prompts, -1)
    log_probs = jax.nn.log_softmax(rows, -1)
    picked = jnp.take_along_axis(log_probs, token[:num_texts, None, None], -1)[..., 0]
    return jax.nn.log_softmax(weights + picked, -1)


@jax.jit
def _mixed_rows(logits: jax.Array, weights: jax.Array) -> jax.Array:
    num_texts, num_prompts = weights.shape
    rows = logits[: num_texts * num_prompts].reshape(num_texts, num_prompts, -1)
    log_probs = jax.nn.log_softmax(rows, -1).swapaxes(0, 1)
    return jax.nn.logsumexp(log_probs + weights.T[..., None], axis=0)
