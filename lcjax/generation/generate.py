"""Text generation: prompts are read in chunks, then one token at a time is picked and read.

Each step is dispatched before the tokens of the previous step are read, so the accelerator does not
wait for Python.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from lcjax.attention.inserted import InsertedTokens
from lcjax.checkpoints.tokenizer import TextStream, Tokenizer
from lcjax.errors import InputError
from lcjax.generation.inference_model import InferenceModel
from lcjax.generation.sampling import Mixture, Sampling, TokenLogprobs, pick, token_logprobs
from lcjax.generation.session import (
    CachedPrefix,
    check_token_ids,
    fill_rows,
    prefill_chunk_size,
    read_prompts,
)
from lcjax.models.memory import EncodedContext
from lcjax.parallel import distributed


@dataclasses.dataclass(frozen=True)
class Piece:
    """New text of one row, and the tokens picked since its last piece.

    `finish` is "stop" or "length" in the last piece of a row, and None before. `logprobs` has an
    entry for each of `ids` if the request sets `top_logprobs`, else it is empty.
    """

    row: int
    text: str
    ids: tuple[int, ...]
    finish: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()


def generate_pieces(
    lm: InferenceModel,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    exact: bool = False,
    prefill_chunk: int | None = None,
    memory: EncodedContext | None = None,
    mixture: Mixture | None = None,
    prefix: CachedPrefix | None = None,
    top_logprobs: int | None = None,
) -> Iterator[Piece]:
    """Returns an iterator over pieces of text for every prompt, until all have finished.

    The call checks the arguments; the prompts are read when the iterator is first advanced.

    Args:
      lm: the model. It may read inserted tokens among those of the text; it never generates them.
      prompts: token ids.
      sampling: how tokens are picked and when to stop.
      exact: whether the rotation follows the length of the text as it grows. The cache then keeps
        unrotated keys, and every step rotates all of them again. (As in every cache, the outputs of
        deeper layers for earlier tokens are not recomputed.) False: the rotation of a row is made
        for its prompt plus `max_new_tokens`, so every step agrees with the keys in the cache.
      prefill_chunk: number of prompt tokens that are read at once, which bounds device memory;
        None: a size that suits the platform.
      memory: the encoded context of the prompts, including filler rows for the mesh.
      mixture: combines several prompts into one text: their probabilities are mixed, and all of
        them read the picked token.
      prefix: the cached common prefix of all prompts. Not with `memory`.
      top_logprobs: pieces have log p of their tokens and of this many most probable tokens; None:
        pieces have no log-probabilities.

    Raises:
      InputError: an argument is invalid, or a prompt is too long.
    """
    config = lm.model.config
    rows = _check_prompts(prompts, config.vocab_size)
    # The last picked token is not read, so it needs no position.
    config.check_length(max(map(len, rows)) + sampling.max_new_tokens - 1)
    if prefix is not None:
        prefix.check_keys(lm, [len(row) + sampling.max_new_tokens for row in rows])
    mixture = mixture or Mixture(len(rows))
    sampling.check_texts(mixture.texts)
    chunk = prefill_chunk_size(prefill_chunk)
    inserted = config.pattern.inserted_tokens
    if inserted is not None:
        if exact:
            raise InputError(
                "exact=True: rotations that follow the length have no published form with"
                " inserted tokens; leave it out"
            )
        chunk = inserted.chunk_size(chunk)
    return _pieces(
        lm, fill_rows(lm.model, rows), sampling, mixture, inserted,
        exact=exact, chunk=chunk, memory=memory, prefix=prefix, top_logprobs=top_logprobs,
    )  # fmt: skip


def _pieces(
    lm, prompts, sampling: Sampling, mixture: Mixture, inserted: InsertedTokens | None,
    *, exact: bool, chunk: int, memory, prefix, top_logprobs: int | None,
) -> Iterator[Piece]:  # fmt: skip
    """Implements `generate_pieces` for checked `prompts`, with filler rows for the mesh."""
    max_new = sampling.max_new_tokens
    num_tokens = np.array([len(prompt) for prompt in prompts])
    num_inserted = 0  # among the new tokens of a row
    if inserted is not None:
        prompts = [inserted.in_prompt(prompt) for prompt in prompts]
        num_inserted = inserted.most_among(max_new)
    lengths = np.array([len(prompt) for prompt in prompts])
    rotation = lm.rotations(lengths if exact else lengths + max_new + num_inserted)
    logits, session = read_prompts(
        lm, prompts, rotation, chunk=chunk,
        # A token that is inserted into one row takes a cache slot in all rows.
        num_new=max_new + len(prompts) * num_inserted,
        rotated=False if exact else None,
        inserted=inserted, memory=memory, prefix=prefix,
        with_ffn_input=mixture.needs_ffn_input,
    )  # fmt: skip
    eos = jnp.array(lm.tokenizer.eos_ids, jnp.int32)
    rows = [RowText(index, lm.tokenizer, sampling) for index in range(mixture.texts)]
    mixed = mixture.logits(logits)
    key = sampling.key(len(mixed))

    def pick_next(mixed, step: int) -> tuple[jax.Array, TokenLogprobs | None]:
        token = pick(mixed, key, step, eos, sampling)
        return token, None if top_logprobs is None else token_logprobs(mixed, token, top_logprobs)

    following = pick_next(mixed, 0)
    for step in range(max_new):
        token, logprobs = following
        if step + 1 < max_new:
            if exact:
                session.rotation = lm.rotations(lengths + step + 1)
            mixture = mixture.after(logits, token)
            count = num_tokens + step
            places = (None, count[:, None], None) if inserted is None else inserted.after(count)
            logits = session.read(mixture.read_by(token, len(prompts)), *places)
            following = pick_next(mixture.logits(logits), step + 1)
        logprobs = jax.tree.map(distributed.gather, logprobs)
        for row, picked in zip(rows, distributed.gather(token)[: len(rows)], strict=True):
            if row.finish is None:
                entry = logprobs and TokenLogprobs(*(x[row.index] for x in logprobs))
                piece = row.add(int(picked), entry)
                if piece is not None:
                    yield piece
        if all(row.finish for row in rows):
            return


def _check_prompts(prompts, vocab_size: int) -> list[list[int]]:
    rows = [check_token_ids(f"prompts[{n}]", ids, vocab_size) for n, ids in enumerate(prompts)]
    if not rows or not all(map(len, rows)):
        raise InputError("prompts must be a non-empty list of non-empty token lists")
    return [row.tolist() for row in rows]


class RowText:
    """Decodes the tokens of one row into text that ends before a stop string.

    The text of special tokens is not shown, but a stop string may be one, or have one in it: both
    the shown text and the text with special tokens are searched. (transformers'
    `StopStringCriteria` matches the strings of tokens, too.)
    """

    def __init__(self, index: int, tokenizer: Tokenizer, sampling: Sampling):
        self.finish: str | None = None
        self.ends_with_stop = False  # whether a stop string ended the text, rather than its end
        self.index, self._sampling, self._tokenizer = index, sampling, tokenizer
        self._decoder, self._count = TextStream(tokenizer), 0
        # Text that is not yet in a piece, with special tokens, and which characters are shown.
        self._text, self._is_shown = "", []
        self._ids, self._logprobs = [], []  # picked, but not yet in a piece

    def add(self, token: int, logprobs: TokenLogprobs | None = None) -> Piece | None:
        """Returns the text that can be emitted after `token`, or the last piece of the row.

        Returns None while all text that is left may be the beginning of a stop string.
        """
        self._count += 1
        self._ids.append(token)
        self._logprobs += [] if logprobs is None else [logprobs]
        is_eos = token in self._tokenizer.eos_ids
        if is_eos:
            self.finish = "stop"
        elif self._count == self._sampling.max_new_tokens:
            self.finish = "length"
        text = "" if is_eos else self._decoder.push(token)
        text += self._decoder.finish() if self.finish else ""
        hidden = self._hidden(token, is_eos)
        self._text += text + hidden
        self._is_shown += [True] * len(text) + [False] * len(hidden)
        shown = self._take(is_eos)
        if not shown and not self.finish:
            return None
        piece = Piece(self.index, shown, tuple(self._ids), self.finish, tuple(self._logprobs))
        self._ids, self._logprobs = [], []
        return piece

    def _hidden(self, token: int, is_eos: bool) -> str:
        """Returns the text of a special token, which only stop strings can match; else ""."""
        if not self._sampling.stop:
            return ""
        is_special = is_eos or not self._tokenizer.decode([token], skip_special=True)
        return self._tokenizer.decode([token]) if is_special else ""

    def _take(self, is_eos: bool) -> str:
        """Removes and returns the shown text that no stop string can begin in; may set `finish`."""
        text, stops = self._text, self._sampling.stop
        places = [place for place, is_shown in enumerate(self._is_shown) if is_shown]
        shown = "".join(text[place] for place in places)
        starts = [text.index(stop) for stop in stops if stop in text]
        starts += [places[shown.index(stop)] for stop in stops if stop in shown]
        if starts:
            end = min(starts)
            # A stop string that is EOS cuts nothing that EOS would not.
            self.finish, self.ends_with_stop = "stop", not is_eos or any(self._is_shown[end:])
        elif self.finish:
            end = len(text)
        else:
            size = _overlap(shown, stops)
            end = min([len(text) - _overlap(text, stops), *places[len(shown) - size :]])
        shown = "".join(itertools.compress(text[:end], self._is_shown))
        self._text, self._is_shown = text[end:], self._is_shown[end:]
        return shown


def _overlap(text: str, stops: Sequence[str]) -> int:
    """Returns the length of the longest end of `text` that may be the start of a stop string."""
    sizes = [
        size
        for stop in stops
        for size in range(1, min(len(stop), len(text) + 1))
        if text.endswith(stop[:size])
    ]
    return max(sizes, default=0)
