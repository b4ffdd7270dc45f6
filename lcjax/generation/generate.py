"""Generation: chunked prefill, then one token at a time, streamed as text.

Two compiled functions do the work: `prefill` reads a chunk of the prompts into the cache, and
`_step` picks a token and reads it. What prompts begin with may have been read before, once for all
of them (`Prefix`). The next step is always under way before the last one's tokens are looked at, so
the accelerator does not wait for Python.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from lcjax.attention import Landmark
from lcjax.attention.landmark.tokens import Landmarks, aligned, in_prompt
from lcjax.checkpoints.tokenizer import TextStream, Tokenizer
from lcjax.errors import InputError
from lcjax.generation import packed_prompts
from lcjax.generation.mixture import Mixture
from lcjax.generation.prefix import Prefix
from lcjax.generation.sampling import Sampling, pick
from lcjax.generation.shapes import chunk_spans, prefill_chunk_size, prompt_bucket
from lcjax.generation.texts import token_ids
from lcjax.models import Decoder
from lcjax.models import cache as cache_lib
from lcjax.models.memory import Encoded
from lcjax.parallel import distributed
from lcjax.parallel.sharding import keep_rows, padding_rows
from lcjax.rope import Rotation


@dataclasses.dataclass(frozen=True)
class Piece:
    """New text of one row and the tokens picked since its last piece.

    `finish` is "stop", "length" or, while the row goes on, None.
    """

    row: int
    text: str
    ids: tuple[int, ...]
    finish: str | None = None


def stream(
    model: Decoder,
    params: dict,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling = Sampling(),
    *,
    rotations: Callable[[np.ndarray], Rotation],
    exact: bool = False,
    prefill_chunk: int | None = None,
    memory: Encoded | None = None,
    mixture: Mixture | None = None,
    prefix: Prefix | None = None,
) -> Iterator[Piece]:
    """Pieces of text for every prompt (lists of token ids) until all have finished.

    The arguments are checked at once; prompts are read when the first piece is asked for.

    `rotations(lengths)` is that of a batch of requests of these lengths, shared or stacked. A row's
    rotation is fixed by its own prompt plus
    `max_new_tokens`, so that a step never disagrees with the keys in the cache. `exact=True` lets
    it follow the length instead: the cache keeps unrotated keys, and every step rotates all of
    them anew. (What deeper layers kept of earlier tokens is not computed anew, as in every cache.)
    Long prompts are read `prefill_chunk` tokens at a time, which bounds the memory; shorter ones
    are read at once. A model with landmarks reads them among the tokens, and at most
    `pattern.chunk` tokens at a time; none is ever picked. On the mesh of `model` every device gets
    equally many rows: those that are lacking repeat the first prompt, and nobody sees them; in
    `memory`, which the rows read beside their prompts, they are there already. Under a `mixture`
    several prompts are one text: their probabilities are mixed, and all read the token picked. A
    `prefix`, for patterns of any order without a `memory`, is not read again.
    """
    prompts = _checked(prompts, model.config.vocab_size)
    # The last token that is picked is not read.
    model.config.check_length(max(map(len, prompts)) + sampling.max_new_tokens - 1)
    mixture = mixture or Mixture.of_itself(len(prompts))
    sampling.check_texts(mixture.texts)
    chunk = prefill_chunk_size(prefill_chunk)
    if Landmarks.read_by(model.config.pattern) is not None:
        _check_not_exact(exact)
        chunk = _whole_chunk(chunk, model.config.pattern)
    return _read_and_write(
        model, params, tokenizer, prompts, sampling, rotations, exact, chunk, memory, mixture,
        prefix,
    )  # fmt: skip


def _read_and_write(
    model, params, tokenizer, prompts, sampling, rotations, exact, chunk, memory, mixture, prefix
):
    """`stream` of checked arguments."""
    mesh = model.mesh
    prompts = [*prompts, *[prompts[0]] * padding_rows(mesh, len(prompts))]
    lengths, new = np.array([len(prompt) for prompt in prompts]), sampling.max_new_tokens
    marks = Landmarks.read_by(model.config.pattern)
    closing = 0  # places of landmarks among the new tokens of a row
    if marks is not None:
        prompts = [in_prompt(prompt, marks) for prompt in prompts]
        closing = new // marks.every + 1
    texts = np.array([len(prompt) for prompt in prompts])
    fixed = None if exact else rotations(texts + new + closing)

    def rotation(step):
        return rotations(texts + step) if exact else fixed

    logits, cache = read_prompts(
        model, params, prompts, rotation(0), chunk=chunk,
        # A block that one row fills takes a slot of all rows.
        room=new + len(prompts) * closing,
        rotated=False if exact else None,  # as the pattern wants it
        marks=marks, memory=memory, prefix=prefix,
    )  # fmt: skip

    def step(cache, token, count):
        place = _place(lengths + count, marks)
        token = mixture.read_by(token, len(prompts))
        return _step(model, params, cache, token, *place, rotation(count + 1), memory)

    yield from _decode(step, tokenizer, logits, cache, sampling, mixture)


def read_prompts(
    model: Decoder,
    params: dict,
    prompts: Sequence[Sequence[int]],
    rotation: Rotation,
    *,
    room: int,
    chunk: int,
    rotated: bool | None = None,
    marks: Landmarks | None = None,
    memory: Encoded | None = None,
    prefix: Prefix | None = None,
) -> tuple[jax.Array, cache_lib.Cache]:
    """The logits [B, V] after the prompts, and a cache with them and `room` for more tokens."""
    tokens, segments, padding, ends = _lay_out(prompts, chunk, marks)
    width = tokens.shape[1]
    slots, mesh, first = cache_lib.whole_blocks(width + room), model.mesh, 0
    if prefix is not None:
        first = width - prompt_bucket(max(map(len, prompts)) - prefix.tokens, chunk)
    if first > 0:
        cache = cache_lib.branch(prefix.cache, np.int32(first), padding, slots, mesh)
    else:
        first, options = 0, {"chunk": chunk, "rotated": rotated, "mesh": mesh}
        cache = cache_lib.create(model.config, len(prompts), slots, **options)
    positions = np.maximum(np.arange(width)[None] - padding[:, None], 0)
    plain = not first and marks is None and memory is None and width <= chunk
    sizes = [len(prompt) for prompt in prompts]
    if plain and packed_prompts.better(model, cache, sizes, width, rotation):
        return packed_prompts.read(model, params, cache, prompts, segments, positions, rotation)
    for start, stop in chunk_spans(width - first, chunk):
        part = slice(first + start, first + stop)
        texts = tokens[:, part], segments[:, part], positions[:, part]
        logits, cache = prefill(model, params, cache, *texts, rotation, ends, memory)
    return logits, cache


def taken_over(lengths: Sequence[int], tokens: int, chunk: int) -> np.ndarray:
    """Of a prefix of `tokens`, how many a batch of prompts does not read again, int [B].

    All rows end together: shorter ones read the end of the prefix again, while longer ones read
    what follows it, which is as long as its program.
    """
    return np.maximum(np.array(lengths) - prompt_bucket(max(lengths) - tokens, chunk), 0)


def _decode(step, tokenizer, logits, cache, sampling, mixture):
    eos = jnp.array(tokenizer.eos_ids, jnp.int32)
    rows = [Row(index, tokenizer, sampling) for index in range(mixture.texts)]
    logits = mixture.logits(logits)
    key = sampling.key(len(logits))
    token = pick(logits, key, 0, eos, sampling)
    for count in range(sampling.max_new_tokens):
        current = token
        if count + 1 < sampling.max_new_tokens:
            logits, cache = step(cache, token, count)
            token = pick(mixture.logits(logits), key, count + 1, eos, sampling)
        for row, picked in zip(rows, distributed.gather(current)[: len(rows)], strict=True):
            if row.finish is None:
                piece = row.add(int(picked))
                if piece is not None:
                    yield piece
        if all(row.finish for row in rows):
            return


def _checked(prompts, vocab_size: int) -> list[list[int]]:
    """The prompts as lists of token ids that the model knows."""
    rows = [token_ids(f"prompts[{n}]", prompt, vocab_size) for n, prompt in enumerate(prompts)]
    if not rows or not all(map(len, rows)):
        raise InputError("prompts must be a non-empty list of non-empty token lists")
    return [row.tolist() for row in rows]


def _check_not_exact(exact: bool) -> None:
    if exact:
        raise InputError(
            "exact=True: rotations that follow the length have no published form with landmarks;"
            " leave it out"
        )


def _whole_chunk(chunk: int, pattern: Landmark) -> int:
    """Whole blocks, at least one and no more than retrieval leaves room for."""
    most = min(chunk, pattern.chunk or chunk)
    return max(most // pattern.block, 1) * pattern.block


def _lay_out(prompts, chunk: int, marks: Landmarks | None):
    """tokens and segments int32 [B, T], the padding [B] before each prompt, and where it ends.

    The latter [B] is the token, counted from the end, that knows what follows; None: the last one.
    """
    if marks is None:
        return *pad_left(prompts, chunk), None
    return aligned(prompts, prompt_bucket(max(map(len, prompts)), chunk), marks)


def _place(count, marks: Landmarks | None):
    """segments, positions [B, T] and ends [B] of the `count`-th token of every row, from 0.

    Where it fills a block in some row, T is 2: its landmark follows it, or padding.
    """
    if marks is None:
        return None, count[:, None], None
    position = (count + count // marks.every)[:, None]
    closes = (count + 1) % marks.every == 0
    if not closes.any():
        return None, position, None
    segments = np.stack([np.ones_like(closes), closes], 1).astype(np.int32)
    ends = np.where(closes & (marks.loss == "predict"), 1, 2)
    return segments, np.concatenate([position, position + 1], 1), ends


class Row:
    """Tokens of one row turned into text that ends before a stop string."""

    def __init__(self, index: int, tokenizer: Tokenizer, sampling: Sampling):
        self.finish: str | None = None
        self._index, self._sampling, self._eos = index, sampling, tokenizer.eos_ids
        self._text, self._count = TextStream(tokenizer), 0
        self._ids, self._held = [], ""  # picked, and decoded, but not shown yet

    def add(self, token: int) -> Piece | None:
        """The text that `token` completes, if any, or the last piece."""
        self._count += 1
        self._ids.append(token)
        if token in self._eos:
            self.finish = "stop"
        else:
            self._held += self._text.push(token)
            if self._count == self._sampling.max_new_tokens:
                self.finish = "length"
        if self.finish:
            self._held += self._text.finish()
        found = [self._held.index(stop) for stop in self._sampling.stop if stop in self._held]
        if found:
            self._held, self.finish = self._held[: min(found)], "stop"
        shown = len(self._held)
        if not self.finish:
            shown -= _overlap(self._held, self._sampling.stop)
        if not shown and not self.finish:
            return None
        piece = Piece(self._index, self._held[:shown], tuple(self._ids), self.finish)
        self._ids, self._held = [], self._held[shown:]
        return piece


def _overlap(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that may be the start of a stop string."""
    sizes = [
        size
        for stop in stops
        for size in range(1, min(len(stop), len(text) + 1))
        if text.endswith(stop[:size])
    ]
    return max(sizes, default=0)


def pad_left(prompts, chunk):
    """tokens and segments int32 [B, T], and the padding [B] before each prompt."""
    longest = prompt_bucket(max(len(prompt) for prompt in prompts), chunk)
    tokens = np.zeros((len(prompts), longest), np.int32)
    padding = np.array([longest - len(prompt) for prompt in prompts])
    for row, prompt in enumerate(prompts):
        tokens[row, padding[row] :] = prompt
    segments = (np.arange(longest)[None] >= padding[:, None]).astype(np.int32)
    return tokens, segments, padding


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def prefill(model, params, cache, tokens, segments, positions, rotation, ends=None, memory=None):
    """The logits [B, V] after `tokens` [B, T], and the cache, which is given up, with them in it.

    Arguments as of `Decoder.__call__`; `ends` as `_place` gives it.
    """
    return _read(model, params, cache, tokens, segments, positions, rotation, ends, memory)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _step(model, params, cache, token, segments, positions, ends, rotation, memory):
    tokens = token[:, None]
    if segments is not None:
        mark = jnp.full_like(tokens, model.config.pattern.token)
        tokens = jnp.concatenate([tokens, mark], 1)
    return _read(model, params, cache, tokens, segments, positions, rotation, ends, memory)


def _read(model, params, cache, tokens, segments, positions, rotation, ends, memory):
    """The logits [B, V] after the last of `tokens` [B, T], and the cache with them in it.

    `ends` [B] says which token of each row is asked, counted from the end: 1 is the last.
    """
    hidden, cache = read_on(model, params, cache, tokens, segments, positions, rotation, memory)
    asked = hidden[:, -1] if ends is None else hidden[jnp.arange(len(ends)), -ends]
    logits = model.apply({"params": params}, asked, method="logits")
    if (marks := Landmarks.read_by(model.config.pattern)) is not None:
        logits = logits.at[:, marks.token].set(-jnp.inf)
    return keep_rows(logits, model.mesh), cache


def read_on(model, params, cache, tokens, segments, positions, rotation, memory=None):
    """The hidden states [B, T, D] of `tokens` [B, T], and the cache with them in it."""
    hidden, cache = model.apply(
        {"params": params},
        keep_rows(tokens, model.mesh),
        positions=keep_rows(positions, model.mesh),
        segments=segments,
        rotation=rotation,
        cache=cache,
        memory=memory,
    )
    return hidden, cache_lib.keep_layout(cache, model.mesh)
