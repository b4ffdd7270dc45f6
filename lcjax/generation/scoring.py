"""Scores given text: -log p of every token of a text, and of continuations of a prompt.

Texts of different lengths are padded to rows of one length, and padding costs as much as text. If
packing saves an eighth of all tokens or more, texts are packed as documents of fewer, longer rows.
Padding never changes a score: no text token sees it, and segments mask it for patterns that score
keys or queries before masking them.

The continuations of a prompt, such as the answers to a multiple-choice question, are read after
the prompt's KV cache, so the prompt is read once. A prompt with only one continuation is read with
it as one text. Continuations of a single token need only the prompt's logits.
"""

import copy
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lcjax.attention.inserted import InsertedTokens
from lcjax.errors import InputError
from lcjax.generation import session as session_lib
from lcjax.generation.inference_model import InferenceModel
from lcjax.generation.programs import InferenceJit
from lcjax.generation.session import (
    CachedPrefix,
    Session,
    check_rows,
    check_token_ids,
    fill_rows,
    pad_right,
    prefill_chunk_size,
    read_prompts,
    round_up_to_bucket,
)
from lcjax.models import Decoder, ModelConfig, head
from lcjax.models import cache as cache_lib
from lcjax.models import decoder as decoder_lib
from lcjax.models.loss import Projection, over_chunks
from lcjax.models.memory import EncodedContext
from lcjax.parallel import distributed
from lcjax.parallel.sharding import keep_rows, padding_rows
from lcjax.rope import Rotation

Ids = Sequence[int]

_MIN_NEW = 32  # slots for continuations; a constant, so prompts of one size share a program
_CONTINUATION_SIZES = [0, *(8 * 4**n for n in range(12))]  # compiled sizes, in tokens to read


# Score functions of `score_texts` and `Session.score`


def text_logits(hidden: jax.Array, projection: Projection, targets: jax.Array) -> jax.Array:
    """Returns float32 logits [R, m, V] and ignores the targets; a `score` for `score_texts`."""
    del targets
    return projection(hidden)


def nll_and_match(
    hidden: jax.Array, projection: Projection, targets: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Scores `targets` int32 [B, m] after hidden states [B, m, D], some positions at a time.

    Returns -log p float32 [B, m], and bool [B, m]: whether each target is the most probable token.
    """
    return score_of_logits(nll_and_match_of_logits)(hidden, projection, targets)


@functools.cache
def score_of_logits(of_logits: Callable[..., Any]) -> Callable[..., Any]:
    """Turns `of_logits(logits, targets)` into a function of (hidden, projection, targets).

    The result has the arguments of `nll_and_match`. It is the same object in each call, because
    `score_texts` and `Session.score` compile it.
    """

    def of_chunk(hidden, projection, targets):
        return of_logits(projection(hidden), targets)

    return functools.partial(over_chunks, of_chunk)


def nll_and_match_of_logits(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes `nll_and_match` from logits [..., V]."""
    picked = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return jax.nn.logsumexp(logits, -1) - picked, logits.argmax(-1) == targets


# Whole texts


class Text(NamedTuple):
    """A text to read, and the targets that its tokens from `first` on predict."""

    tokens: Sequence[int]
    first: int
    targets: Sequence[int]  # the tokens after these


class TextRows(NamedTuple):
    """Texts in R rows of W places, with at most m targets in each row; all int32."""

    tokens: np.ndarray  # [R, W]
    places: np.ndarray  # [R, m], places of the tokens before the targets
    targets: np.ndarray  # [R, m]
    # [R, W], texts numbered from 1, and 0 for padding; None: each row is one text
    segments: np.ndarray | None
    positions: np.ndarray | None  # [R, W], positions in each text; None: the places in the row


def score_texts(
    lm: InferenceModel,
    score: Callable[..., Any],
    texts: Sequence[Text],
    rotation: Rotation,
    memory: EncodedContext | None = None,
    with_ffn_input: bool = False,
) -> list[Any]:
    """Scores the targets of each text: returns a tree of arrays [m, ...] for each text.

    Calls with texts and targets of similar lengths share one compiled program.

    Args:
      lm: the model.
      score: `score(hidden, projection, targets)` returns a tree of [R, m, ...] for hidden states
        [R, m, D] and targets int32 [R, m].
      texts: texts of any lengths.
      rotation: one for all texts, or stacked.
      memory: the encoded context of the texts, including filler rows for the mesh.
      with_ffn_input: whether the hidden states are `States`, which add the input of the last
        feed-forward.
    """
    is_stacked = rotation.inv_freq.ndim > 1
    rows, spans = _lay_out(lm.model, texts, one_per_row=memory is not None or is_stacked)
    if is_stacked:
        rotation = rotation.rows(np.arange(len(rows.tokens)) % len(texts))
    scores = _score_rows(
        lm.model, score, lm.params, rows, rotation, memory, with_ffn_input=with_ffn_input
    )
    scores = jax.tree.map(distributed.gather, scores)
    return [jax.tree.map(operator.itemgetter(span), scores) for span in spans]


@functools.partial(InferenceJit, static_argnums=(0, 1), static_argnames="with_ffn_input")
def _score_rows(
    model: Decoder, score, params, rows: TextRows, rotation: Rotation, memory, *, with_ffn_input
):
    """Applies `score` to the hidden states before the targets; only these become logits."""
    tokens, targets = (keep_rows(x, model.mesh) for x in (rows.tokens, rows.targets))
    options = {"positions": rows.positions, "segments": rows.segments}
    options |= {"rotation": rotation, "memory": memory, "with_ffn_input": with_ffn_input}
    hidden = decoder_lib.apply(model, params, tokens, **options).hidden
    hidden = jax.tree.map(lambda x: jnp.take_along_axis(x, rows.places[..., None], 1), hidden)
    return score(hidden, head(params, model.config), targets)


def _lay_out(
    model: Decoder, texts: Sequence[Text], one_per_row: bool
) -> tuple[TextRows, list[tuple[int, slice]]]:
    """Returns the rows of texts, and the row and target columns of each text."""
    starts, shape, is_packed = _choose_rows(model, [len(t.tokens) for t in texts], one_per_row)
    num_targets = np.zeros(shape[0], int)
    spans = []
    for (row, _), text in zip(starts, texts, strict=True):
        spans.append((row, slice(num_targets[row], num_targets[row] + len(text.targets))))
        num_targets[row] += len(text.targets)
    width = round_up_to_bucket(int(num_targets.max()), least=8)
    tokens, segments, positions = (np.zeros(shape, np.int32) for _ in range(3))
    places, targets = (np.zeros((shape[0], width), np.int32) for _ in range(2))
    for number, ((row, start), (_, span), text) in enumerate(zip(starts, spans, texts), 1):
        columns = slice(start, start + len(text.tokens))
        tokens[row, columns], segments[row, columns] = text.tokens, number
        positions[row, columns] = np.arange(len(text.tokens))
        places[row, span] = start + text.first + np.arange(len(text.targets))
        targets[row, span] = text.targets
    if not is_packed and (model.config.is_position_based or segments.all()):
        segments = None  # causal masks already hide the padding after a text
    return TextRows(tokens, places, targets, segments, positions if is_packed else None), spans


def _choose_rows(
    model: Decoder, lengths: Sequence[int], one_per_row: bool
) -> tuple[list[tuple[int, int]], tuple[int, int], bool]:
    """Returns row and first place of each text, the rows' shape, and whether texts share rows."""
    config, longest, num_rows = model.config, max(lengths), len(lengths)
    num_packed = max(1, -(-sum(lengths) // session_lib.MAX_PACKED_ROW))  # texts may be empty
    num_rows, num_packed = (n + padding_rows(model.mesh, n) for n in (num_rows, num_packed))
    width = round_up_to_bucket(longest) if config.is_position_based else longest
    if config.position == "learned":
        width = min(width, max(config.max_length, longest))
    elif config.is_position_based and not one_per_row:
        starts, packed_length = _pack(lengths, num_packed)
        packed_width = round_up_to_bucket(packed_length)
        if session_lib.packing_saves(num_packed * packed_width, num_rows * width):
            return starts, (num_packed, packed_width), True
    return [(row, 0) for row in range(len(lengths))], (num_rows, width), False


def _pack(lengths: Sequence[int], num_rows: int) -> tuple[list[tuple[int, int]], int]:
    """Packs texts into rows of similar length: row and first place of each, and the longest row.

    The texts, the longest first, are added to the row that is shortest so far. The longest row is
    at most a third longer than the optimum (Graham 1969, Bounds on Multiprocessing Timing
    Anomalies).
    """
    starts, row_lengths = [(0, 0)] * len(lengths), [0] * num_rows
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        row = row_lengths.index(min(row_lengths))
        starts[number] = row, row_lengths[row]
        row_lengths[row] += lengths[number]
    return starts, max(row_lengths)


def score_with_inserted(
    lm: InferenceModel,
    score: Callable[..., Any],
    inserted: InsertedTokens,
    tokens: np.ndarray,
    lengths: np.ndarray,
    first: int,
    memory: EncodedContext | None,
    with_ffn_input: bool = False,
) -> Any:
    """Scores tokens [B, T] from `first` on with a model that reads inserted tokens.

    The text is read in chunks (`InsertedTokens.chunk_size`), of which later ones see earlier ones
    in the cache. `InsertedTokens.sources` says which token predicts the next one. Rotations are
    made for lengths that include inserted tokens. `score` and `with_ffn_input` are as in
    `score_texts`, the other arguments as in `LanguageModel.nll`.

    Returns:
      The results of `score`, arrays [B, T - first, ...] that are 0 from `lengths` on.
    """
    model = lm.model
    is_scored = np.arange(first, tokens.shape[1]) < lengths[:, None]
    tokens, lengths = (np.array(fill_rows(model, x)) for x in (tokens, lengths))
    num_rows, num_tokens = tokens.shape
    place = inserted.places(num_tokens)
    width = place[-1]  # the last token is not read
    source = inserted.sources(place, first)
    chunk = inserted.chunk_for(width)
    padded = -(-width // chunk) * chunk
    text = np.full((num_rows, padded), inserted.token, np.int32)
    text[:, place[:-1]] = tokens[:, :-1]
    targets = np.zeros((num_rows, padded), np.int32)
    targets[:, source] = tokens[:, first:]
    num_read = place[np.maximum(lengths, 1) - 1]  # the last token of a row is not read either
    rotation = lm.rotations(np.maximum(num_read, 1))
    settings = (rotation, memory, with_ffn_input)
    scores = _score_chunks(lm, score, text, targets, num_read, chunk, *settings)
    scores = jax.tree.map(lambda x: x[: len(is_scored), source], scores)
    for array in jax.tree.leaves(scores):
        array[~is_scored] = 0
    return scores


def score_by_cache_method(
    lm: InferenceModel,
    score: Callable[..., Any],
    tokens: np.ndarray,
    lengths: np.ndarray,
    first: int,
    with_ffn_input: bool = False,
) -> Any:
    """Scores tokens [B, T] from `first` on with a model whose `model.cache` changes what they read.

    A text is read in chunks, and a cache policy may cut after each of them. A policy that cuts at
    the end of a prompt takes the tokens before the one that predicts `first` for the prompt.

    The arguments are those of `LanguageModel.score`. Returns arrays [B, T, ...], 0 where `nll` is.

    Raises:
      InputError: the cache is cut at the end of a prompt, and there is none.
    """
    num_texts, width = tokens.shape
    is_scored = (np.arange(width) >= first) & (np.arange(width) < lengths[:, None])
    tokens, lengths = (np.array(fill_rows(lm.model, x)) for x in (tokens, lengths))
    if lm.model.config.evicts and lm.model.config.cache.chunk is None:
        scores, start = _score_after_cut(lm, score, tokens, lengths, first, with_ffn_input), first
    else:
        scores, start = _score_by_chunk(lm, score, tokens, lengths, with_ffn_input), 1

    def place(x):
        values = np.zeros((num_texts, width, *x.shape[2:]), x.dtype)
        values[:, start:] = x[:num_texts, : width - start]
        values[~is_scored] = 0
        return values

    return jax.tree.map(place, scores)


def _score_by_chunk(lm: InferenceModel, score, tokens, lengths, with_ffn_input: bool) -> Any:
    """Scores all tokens but the first, arrays [B, T - 1 or more, ...]."""
    chunk = _scoring_chunk(lm.model.config)
    num_read = session_lib.prompt_bucket(tokens.shape[1] - 1, chunk)  # not the last token
    text, targets = (pad_right(x, num_read) for x in (tokens[:, :-1], tokens[:, 1:]))
    rotation = lm.rotations(np.maximum(lengths, 1))
    settings = (rotation, None, with_ffn_input)
    return _score_chunks(lm, score, text, targets, lengths - 1, chunk, *settings)


def _score_after_cut(
    lm: InferenceModel, score, tokens, lengths, first: int, with_ffn_input: bool
) -> Any:
    """Scores the tokens from `first` on, arrays [B, T - first or more, ...]."""
    if first < 2:
        raise InputError(
            "model.cache.chunk=None evicts tokens at the end of a prompt, after all tokens of a"
            " text are scored; set model.cache.chunk=1024, or score the end of texts (first=...,"
            " a protocol such as last_k) or continuations of prompts"
        )
    prompts = [row[: max(min(first, n) - 1, 1)].tolist() for row, n in zip(tokens, lengths)]
    num_read = next(size for size in _CONTINUATION_SIZES if size >= tokens.shape[1] - first)
    rotation, chunk = lm.rotations(np.maximum(lengths, 1)), prefill_chunk_size(None)
    options = {"num_new": max(_MIN_NEW, num_read), "chunk": chunk, "keeps_new": True}
    _, session = read_prompts(lm, prompts, rotation, with_ffn_input=with_ffn_input, **options)
    places = np.arange(num_read, dtype=np.int32)
    segments = (places < (lengths - first)[:, None]).astype(np.int32)
    positions = np.array([[len(prompt)] for prompt in prompts]) + places
    text, targets = (pad_right(tokens[:, i : i + num_read], num_read) for i in (first - 1, first))
    return session.score(text, targets, segments, positions, chunk=chunk, score=score)


def _score_chunks(
    lm: InferenceModel,
    score: Callable[..., Any],
    text: np.ndarray,
    targets: np.ndarray,
    num_read: np.ndarray,
    chunk: int,
    *settings: Any,
) -> Any:
    """Scores `targets` after each of the first `num_read` [B] tokens of `text`, both [B, T].

    The text is read into a cache, `chunk` tokens at a time. `settings` are those of `Session`.
    """
    columns = np.arange(text.shape[1], dtype=np.int32)
    # All queries of a chunk may choose keys together, so padding must be masked.
    segments = (columns < num_read[:, None]).astype(np.int32)
    positions = np.broadcast_to(columns, text.shape)
    slots = cache_lib.whole_blocks(text.shape[1])
    cache = cache_lib.create(lm.model.config, len(text), slots, chunk=chunk, mesh=lm.mesh)
    session = Session(lm.model, lm.params, cache, *settings)
    return session.score(text, targets, segments, positions, chunk=chunk, score=score)


def _scoring_chunk(config: ModelConfig) -> int:
    """Returns the number of tokens that are read at once while they are scored."""
    chunk = None if config.cache is None else config.cache.scoring_chunk
    return chunk or prefill_chunk_size(None)


# Continuations of prompts


class Continuation(NamedTuple):
    """The scores of a continuation."""

    nll: np.ndarray  # float32 [m], -log p of every token given all before it
    greedy: bool  # whether every token is the most probable one


def check_continuations(
    prompts: Sequence[Ids], continuations: Sequence[Sequence[Ids]], vocab_size: int
) -> None:
    """Raises an InputError if prompts or continuations are empty, or tokens are out of range."""
    check_rows("prompts", prompts, "[[1, 2]], token ids")
    check_rows("continuations", continuations, "[[[3], [4, 5]]], with a list for each prompt")
    for number, row in enumerate(continuations):
        check_rows(f"continuations[{number}]", row, "[[3], [4, 5]], token ids")
    if len(prompts) != len(continuations) or not len(prompts):
        raise InputError(
            f"continuations={len(continuations)} lists for {len(prompts)} prompts; give a list of"
            " continuations for each prompt, and at least one prompt"
        )
    for number, (prompt, row) in enumerate(zip(prompts, continuations)):
        check_token_ids(f"prompts[{number}]", prompt, vocab_size)
        for place, ids in enumerate(row):
            check_token_ids(f"continuations[{number}][{place}]", ids, vocab_size)
    if not all(len(prompt) for prompt in prompts):
        raise InputError("prompts: one has no token to predict from; begin it with BOS")
    if not all(len(row) and all(len(ids) for ids in row) for row in continuations):
        raise InputError("continuations: each prompt needs at least one, and each a token")


def score_continuations(
    lm: InferenceModel,
    prompts: Sequence[Ids],
    continuations: Sequence[Sequence[Ids]],
    *,
    memory: EncodedContext | None = None,
    prefix: CachedPrefix | None = None,
) -> list[list[Continuation]]:
    """Scores the continuations of each prompt, whose KV cache is shared by its continuations.

    If every prompt has a single continuation, each pair may be read as one text instead. The
    rotation of a prompt is made for the prompt and its longest continuation.

    Args:
      lm: the model, which reads no inserted tokens.
      prompts: token ids.
      continuations: token ids, a list of continuations for each prompt.
      memory: the encoded context of the prompts, including filler rows for the mesh.
      prefix: the cached common prefix of all prompts.
    """
    config = lm.model.config
    check_continuations(prompts, continuations, config.vocab_size)
    lengths = np.array(
        [len(prompt) + max(map(len, row)) for prompt, row in zip(prompts, continuations)]
    )
    longest = int(lengths.max()) - 1  # the last token is predicted, not read
    config.check_length(longest)
    if prefix is not None:
        prefix.check_keys(lm, lengths)
    is_single = prefix is None and all(len(row) == 1 for row in continuations)
    is_single = is_single and config.has_exact_cache  # else it may act between the two
    if is_single and config.is_position_based and longest <= prefill_chunk_size(None):
        return score_at_once(lm, prompts, continuations, lm.rotations(lengths), memory)
    rotation = lm.rotations(np.array(fill_rows(lm.model, lengths)))
    return score_by_cache(lm, prompts, continuations, rotation, memory, prefix)


def score_at_once(lm, prompts, continuations, rotation: Rotation, memory):
    """Scores one continuation for each prompt, reading both as one text.

    The pattern must be position-based, so that no token depends on later tokens.
    """
    pairs = [(prompt, row[0]) for prompt, row in zip(prompts, continuations, strict=True)]
    texts = [Text([*prompt, *ids[:-1]], len(prompt) - 1, ids) for prompt, ids in pairs]
    scores = score_texts(lm, nll_and_match, texts, rotation, memory)
    return [[Continuation(nll, bool(match.all()))] for nll, match in scores]


def score_by_cache(lm, prompts, continuations, rotation: Rotation, memory, prefix):
    """Scores continuations after the KV cache of their prompts.

    A few sizes of prompts and of continuations are compiled. `rotation` is that of all rows,
    including filler rows for the mesh.
    """
    num_prompts, prompts = len(prompts), fill_rows(lm.model, prompts)
    batches = batch_continuations(fill_rows(lm.model, continuations))
    num_new = max(_MIN_NEW, *(ids.shape[1] - 1 for ids, _ in batches))
    chunk = prefill_chunk_size(None)
    logits, session = read_prompts(
        lm, prompts, rotation, num_new=num_new, chunk=chunk, memory=memory, prefix=prefix
    )
    lengths = np.array([len(prompt) for prompt in prompts])
    chunk = _scoring_chunk(lm.model.config)
    scores = [_score_round(session, logits, lengths, ids, sizes, chunk) for ids, sizes in batches]
    return [
        [
            Continuation(nll[row, : len(ids)], bool(match[row, : len(ids)].all()))
            for ids, (nll, match) in zip(continuations[row], scores)
        ]
        for row in range(num_prompts)
    ]


def score_after_prefix(
    lm: InferenceModel,
    of_logits: Callable[..., Any],
    prompt: Ids,
    texts: Sequence[Ids],
    prefix: CachedPrefix,
) -> Any:
    """Scores texts that follow one prompt, of which `prefix` holds all but the last tokens.

    Args:
      lm: the model; its rotation must be the same for all lengths of the texts.
      of_logits: `of_logits(logits, targets)` returns a tree of [B, m, ...] for logits [B, m, V] and
        targets int32 [B, m]. It is compiled: pass the same function object in every call.
      prompt: token ids.
      texts: token ids, none empty.
      prefix: the cached prefix of the prompt.

    Returns:
      A tree of arrays [B, m, ...]; m is at least the length of the longest text.
    """
    rows = fill_rows(lm.model, texts)
    ((ids, sizes),) = batch_continuations([[text] for text in rows])
    lengths, chunk = np.full(len(rows), len(prompt)), prefill_chunk_size(None)
    prefix.check_keys(lm, lengths + sizes)
    logits, session = read_prompts(
        lm, [prompt] * len(rows), lm.rotations(lengths + sizes), chunk=chunk, prefix=prefix,
        num_new=max(_MIN_NEW, ids.shape[1] - 1),
    )  # fmt: skip
    chunk = _scoring_chunk(lm.model.config)
    scores = _score_round(session, logits, lengths, ids, sizes, chunk, of_logits)
    return jax.tree.map(lambda x: x[: len(texts)], scores)


def batch_continuations(
    continuations: Sequence[Sequence[Ids]],
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Batches the first continuation of each prompt, then the second, ...: (ids [B, m], sizes [B]).

    The ids are int32. A prompt with fewer continuations repeats its first one; those scores are not
    used.
    """
    rounds = []
    for number in range(max(map(len, continuations))):
        rows = [row[number] if number < len(row) else row[0] for row in continuations]
        sizes = np.array([len(ids) for ids in rows])
        # The last token is only predicted.
        num_read = next(size for size in _CONTINUATION_SIZES if size >= sizes.max() - 1)
        rounds.append((pad_right(rows, 1 + num_read), sizes))
    return rounds


def _score_round(
    session: Session, logits: jax.Array, lengths, ids, sizes, chunk: int,
    of_logits: Callable[..., Any] = nll_and_match_of_logits,
) -> Any:  # fmt: skip
    """Scores one continuation per prompt: arrays [B, m, ...].

    By default these are -log p of each token and whether it is the most probable one. `logits`
    [B, V] are those after the prompts that `session` has read.
    """
    first = _score_first(logits, ids[:, 0], of_logits)
    first = jax.tree.map(lambda x: distributed.gather(x)[:, None], first)
    if ids.shape[1] == 1:
        return first
    branch = copy.copy(session)
    places = np.arange(ids.shape[1] - 1)[None]
    segments = (places < sizes[:, None] - 1).astype(np.int32)
    positions = lengths[:, None] + places
    rest = branch.score(
        ids[:, :-1], ids[:, 1:], segments, positions, chunk=chunk, in_place=False,
        score=score_of_logits(of_logits),
    )  # fmt: skip
    return jax.tree.map(lambda *pair: np.concatenate(pair, 1), first, rest)


@functools.partial(jax.jit, static_argnums=2)
def _score_first(logits: jax.Array, targets: jax.Array, of_logits: Callable[..., Any]) -> Any:
    return of_logits(logits, targets)
