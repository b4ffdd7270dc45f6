"""How the next token is picked: greedily, or drawn after temperature, top-k and top-p.

And what was picked, as a text.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from lcjax.errors import InputError, whole_number


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is picked and when to stop."""

    max_new_tokens: int = 128
    min_new_tokens: int = 0  # the end-of-text token is not picked before
    temperature: float = 0.0  # 0 is greedy
    top_k: int | None = None  # so many of the most probable tokens are kept; null: all
    top_p: float = 1.0  # of these, the smallest set with this much probability is kept
    stop: tuple[str, ...] = ()  # text before the first of these is the answer
    # Of all draws; or one for each text, which then does not depend on those beside it.
    seed: int | tuple[int, ...] = 0

    def __post_init__(self):
        whole_number("max_new_tokens", self.max_new_tokens, 1)
        whole_number("min_new_tokens", self.min_new_tokens, 0)
        if self.min_new_tokens > self.max_new_tokens:
            raise InputError(
                f"min_new_tokens={self.min_new_tokens} must lie between 0 and"
                f" max_new_tokens={self.max_new_tokens}"
            )
        for seed in self.seed if isinstance(self.seed, tuple) else (self.seed,):
            whole_number("seed", seed, 0)
            if seed >= 2**32:
                raise InputError(f"seed={seed} must lie between 0 and 2**32 - 1")
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float | np.floating):
                raise InputError(f"{name}={value!r} must be a number")
        if not 0 <= self.temperature < math.inf:
            raise InputError(f"temperature={self.temperature} must be 0 (greedy) or more, finite")
        if self.top_k is not None:
            whole_number("top_k", self.top_k, 1, "None keeps all tokens")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p={self.top_p} must lie in (0, 1]")
        listed = isinstance(self.stop, tuple | list)
        if not listed or not all(isinstance(stop, str) and stop for stop in self.stop):
            raise InputError(f"stop={self.stop!r} must be a tuple of stop strings, none empty")

    def check_texts(self, count: int) -> None:
        """Refuses seeds of texts that are not as many as the texts."""
        if isinstance(self.seed, tuple) and len(self.seed) != count:
            raise InputError(
                f"seed={self.seed} has {len(self.seed)} numbers for {count} prompts; give one for"
                " each, or a single one"
            )

    def key(self, rows: int) -> jax.Array:
        """What `pick` draws `rows` tokens with: a key, or a key [rows] of each.

        Rows that fill up a mesh come last, and draw as the first.
        """
        if not isinstance(self.seed, tuple):
            return jax.random.key(self.seed)
        seeds = [*self.seed, *[self.seed[0]] * (rows - len(self.seed))]
        return jax.vmap(jax.random.key)(jnp.array(seeds, jnp.uint32))


def pick(logits: jax.Array, key: jax.Array, step: int, eos: jax.Array, sampling: Sampling):
    """The token [B] of step `step` from float32 logits [B, V]; `eos` lists what ends a text."""
    early, drawn = step < sampling.min_new_tokens, sampling.temperature > 0
    return _draw(
        logits, key, step, eos, early, float(sampling.temperature), float(sampling.top_p),
        greedy=not drawn,
        top_k=int(sampling.top_k) if drawn and sampling.top_k is not None else None,
        nucleus=drawn and sampling.top_p < 1,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("greedy", "top_k", "nucleus"))
def _draw(logits, key, step, eos, early, temperature, top_p, *, greedy, top_k, nucleus):
    """`pick` with only what changes the program as static arguments."""
    logits = logits.at[:, eos].add(jnp.where(early, -jnp.inf, 0.0))
    if greedy:
        return logits.argmax(-1).astype(jnp.int32)
    logits = logits / temperature
    if top_k is not None:
        logits = _best(logits, top_k)
    if nucleus:
        logits = _nucleus(logits, top_p)
    if key.ndim:
        keys = jax.vmap(jax.random.fold_in, (0, None))(key, step)
        return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
    return jax.random.categorical(jax.random.fold_in(key, step), logits).astype(jnp.int32)


def _best(logits: jax.Array, count: int) -> jax.Array:
    """Keeps the `count` most probable tokens, and those as probable as the last of them.

    Top-k sampling, Fan et al. 2018.
    """
    least = jax.lax.top_k(logits, min(count, logits.shape[-1]))[0][..., -1:]
    return jnp.where(logits >= least, logits, -jnp.inf)


def _nucleus(logits: jax.Array, top_p: float | jax.Array) -> jax.Array:
    """Keeps the most probable tokens up to and including the one that reaches `top_p`.

    Nucleus sampling, Holtzman et al. 2020.
    """
    order = jnp.argsort(-logits, axis=-1)
    ranked = jnp.take_along_axis(jax.nn.softmax(logits, axis=-1), order, axis=-1)
    before = jnp.cumsum(ranked, axis=-1) - ranked
    kept = jnp.put_along_axis(
        jnp.zeros(logits.shape, bool), order, before < top_p, axis=-1, inplace=False
    )
    return jnp.where(kept, logits, -jnp.inf)


class Written(str):
    """A text that a model wrote: `ids` are all tokens that it picked, `finish` is why it ended."""

    def __new__(cls, text: str, ids: tuple[int, ...] = (), finish: str | None = None):
        made = super().__new__(cls, text)
        made.ids, made.finish = ids, finish
        return made


def written(pieces: Iterable, rows: int) -> list[Written]:
    """The whole text of each row, from the pieces of `stream`."""
    found = [Written("")] * rows
    for piece in pieces:
        old = found[piece.row]
        found[piece.row] = Written(old + piece.text, old.ids + piece.ids, piece.finish)
    return found
