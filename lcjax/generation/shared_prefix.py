"""Generates and scores prompts with a common prefix, read once into a cache of one row.

reader = PrefixReader(lm, prompts)                    # lists of token ids
for rows in group_by_prefix(prompts):
    answers = reader.generate([prompts[row] for row in rows])

The cache of a batch begins with copies of that row, so answers equal those of prompts that are read
in full, up to rounding. Before the next batch, the prefix is truncated to the part that the batch's
prompts share, and extended from there. Device memory holds one prefix and one batch, however many
prompts there are, and the prefix only while remaining prompts begin with it.
"""

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lcjax.cost import MemoryEstimate
from lcjax.errors import InputError, check_integer
from lcjax.generation.inference_model import InferenceModel
from lcjax.generation.sampling import GeneratedText, Sampling, join_pieces
from lcjax.generation.scorer import Ids, Spans, WrappedScorer
from lcjax.generation.scoring import Continuation
from lcjax.generation.session import (
    CachedPrefix,
    Session,
    can_continue_prefix,
    can_share_prefix,
    check_token_ids,
    prefill_chunk_size,
    prefix_tokens_reused,
    read_prompts,
)
from lcjax.models import ModelConfig
from lcjax.models import cache as cache_lib
from lcjax.parallel.sharding import padding_rows, rows_over

# Tokens of the shortest shared prefix; lengths are multiples of it, so that few programs are
# compiled, and none for short prompts.
LEAST = 1024
_MIN_SHARE = 8  # a prefix has at least 1 / 8 of the tokens of a prompt


def group_by_prefix(prompts: Sequence[Ids], least: int = LEAST) -> list[list[int]]:
    """Groups the indices of prompts that begin with at least `least` common tokens.

    Groups are in the order of their first prompts. Prompts that share nothing form one group.
    """
    check_integer("least", least, 1)
    rows = [np.asarray(prompt, np.int32) for prompt in prompts]
    order = sorted(range(len(rows)), key=lambda row: _key(rows[row]))
    groups: list[list[int]] = []
    for place, row in enumerate(order):
        before = rows[order[place - 1]] if place else rows[row][:0]
        if _worth(common(before, rows[row]), len(rows[row]), least):
            groups[-1].append(row)
        else:
            groups.append([row])
    alone = sorted(row for group in groups if len(group) == 1 for row in group)
    groups = [group for group in groups if len(group) > 1] + [alone] * bool(alone)
    return sorted(groups, key=min)


def common(a: np.ndarray, b: np.ndarray) -> int:
    """Returns the length of the longest common prefix."""
    size = min(len(a), len(b))
    differ = a[:size] != b[:size]
    return int(differ.argmax()) if differ.any() else size


@functools.cmp_to_key
def _key(a: np.ndarray, b: np.ndarray) -> int:
    """Compares token ids in lexicographic order."""
    same = common(a, b)
    return len(a) - len(b) if same == min(len(a), len(b)) else int(a[same]) - int(b[same])


def _worth(tokens: int, length: int, least: int) -> bool:
    return tokens >= least and tokens * _MIN_SHARE >= length


def read_prefix(lm: InferenceModel, ids: Ids, question: int | None = None) -> CachedPrefix | None:
    """Reads a text once, as the `prefix` of any number of prompts that begin with it.

    With a cache policy, the prefix is cut at its end. The prompts then continue what the policy
    kept, chosen before it saw any of them; this is how compression is measured for questions that
    are not known yet. For a policy that chooses by a question (Finch, SnapKV), `question` is the
    number of last tokens of the prefix that ask it; None: there is none in it, or its length is not
    known. What follows the prefix is read whole, before anything is evicted again.

    Layers that keep a state, or the tokens of a window, are continued from the end of the prefix.

    Returns None if prompts must be read in full: where visible keys depend on more than positions,
    for a policy that acts on chunks, for a text that the policy keeps whole, or if the rotation
    follows the length of each prompt. A model whose rotation follows the length must have a
    `length` that covers the prompts and their continuations; otherwise they need another rotation
    than the prefix has, and reading them raises an InputError.
    """
    follows_each = lm.depends_on_length and lm.length is None
    if question is not None and lm.config.evicts:
        check_integer("question", question, 1)
        lm.config.cache.check_question(question)
    can_read = can_share_prefix(lm.config) or can_continue_prefix(lm.config)
    if not can_read or follows_each or not len(ids):
        return None
    array = check_token_ids("prefix", ids, lm.config.vocab_size)
    slots, chunk = cache_lib.whole_blocks(len(array)), prefill_chunk_size(None)
    length = max(len(array), lm.length or 0)
    rotation = lm.rotation(length)
    if not lm.config.evicts:
        cache = cache_lib.create(lm.model.config, 1, slots, chunk=chunk, mesh=lm.mesh)
        session = Session(lm.model, lm.params, cache, rotation)
        session.read_ids(array, 0, chunk)
    elif any(kind.evicts for kind, _ in cache_lib.fitted_caches(lm.model.config, slots, chunk)):
        # Rows that continue it are copies with slots of their own.
        options = {"num_new": 0, "chunk": chunk, "question": question}
        _, session = read_prompts(lm, [array], rotation, **options)
    else:
        return None
    return CachedPrefix(session.cache, array, lm, length)


def check_compresses_prefix(config: ModelConfig) -> None:
    """Raises an InputError if a model with `config` cannot be that of a `QueryAgnostic`."""
    if not (config.evicts and can_continue_prefix(config)):
        raise InputError(
            "question=unseen or window needs a cache policy that cuts at the end of a prompt: set"
            " cache (or model.cache) without chunk, or leave question out"
        )


class QueryAgnostic(WrappedScorer):
    """A language model whose cache policy cuts documents before it sees what is asked about them.

    A prompt is read to the end of its documents (`with_movable`), and cut there. The rest of it
    continues what the policy kept. Prompts one after another that begin with the same documents
    read them once. A policy that keeps the documents whole reads prompts in one piece. A prompt
    without documents raises an InputError.
    """

    needs_documents = True

    def __init__(self, lm: InferenceModel):
        check_compresses_prefix(lm.config)
        self.lm = lm
        self._ends: Sequence[int] | None = None
        self._prefix: tuple[bytes, CachedPrefix | None] = b"", None

    def nll(self, tokens: np.ndarray, **options: Any) -> np.ndarray:
        return self.lm.nll(tokens, **options)

    def inference_memory(self, rows: int, length: int, context=None) -> MemoryEstimate | None:
        return self.lm.inference_memory(rows, length, context)

    def cache_bytes(self, length: int) -> int | None:
        return self.lm.cache_bytes(length)

    def with_movable(self, spans: Sequence[Spans], passages: Any = None) -> "QueryAgnostic":
        """Returns this model for prompts whose documents end with the last of `spans`."""
        del passages  # which are among the spans
        self._ends = [max((stop for _, stop in row), default=0) for row in spans]
        return self

    def generate(
        self, prompts: Sequence[Ids], sampling: Sampling = Sampling()
    ) -> list[GeneratedText]:
        """Generates text for every prompt."""
        texts = []
        for rows, prefix in self._by_documents(prompts):
            pieces = self.lm.stream(rows, sampling, prefix=prefix)
            texts += join_pieces(pieces, len(rows))
        return texts

    def continuations(
        self, prompts: Sequence[Ids], continuations: Sequence[Sequence[Ids]]
    ) -> list[list[Continuation]]:
        """Scores the continuations of each prompt."""
        scores: list[list[Continuation]] = []
        for rows, prefix in self._by_documents(prompts):
            part = continuations[len(scores) : len(scores) + len(rows)]
            scores += self.lm.continuations(rows, part, prefix=prefix)
        return scores

    def _ends_of(self, prompts: Sequence[Ids]) -> Sequence[int]:
        """Returns where the documents of prompts end (`with_movable`), once."""
        ends, self._ends = self._ends or [0] * len(prompts), None
        if not all(ends):
            raise InputError(
                "question: a prompt has no documents that could be cut before its question; leave"
                " question out for this task"
            )
        return ends

    def _by_documents(
        self, prompts: Sequence[Ids]
    ) -> Iterator[tuple[list[Ids], CachedPrefix | None]]:
        """Yields prompts that begin with the same documents, in order, and what is kept of them."""
        ends = self._ends_of(prompts)
        documents = [np.asarray(row, np.int32)[:end] for row, end in zip(prompts, ends)]
        for _, rows in itertools.groupby(range(len(prompts)), lambda row: documents[row].tobytes()):
            rows = list(rows)
            yield [prompts[row] for row in rows], self._read(documents[rows[0]])

    def _read(self, ids: np.ndarray) -> CachedPrefix | None:
        if self._prefix[0] != ids.tobytes():
            self._prefix = b"", None  # frees the memory first
            self._prefix = ids.tobytes(), read_prefix(self.lm, ids)
        return self._prefix[1]


class QueryAware(QueryAgnostic):
    """A language model whose cache policy chooses by the question of each prompt (Finch).

    The question is what follows the documents, but for the last token of the prompt, which
    continues what the policy kept. Prompts are read one by one.
    """

    def _by_documents(self, prompts):
        for ids, end in zip(prompts, self._ends_of(prompts), strict=True):
            question = len(ids) - 1 - end
            if question < 1:
                raise InputError(
                    "question=window: a prompt has no question after its documents; leave question"
                    " out for this task"
                )
            yield [ids], read_prefix(self.lm, ids[:-1], question)


class PrefixReader(WrappedScorer):
    """A language model that reads the common beginning of prompts once for many batches.

    `generate` and `continuations` are those of the model, for prompts as token ids. Prompts whose
    rotations differ are read in full, and so are prompts of a model without `shares_prefixes`.

    Attributes:
      saved_tokens: number of prompt tokens that were not read because they are in the prefix, minus
        the tokens read for prefixes (equal prompts of a batch count once). It is negative while a
        prefix has not paid off yet.
    """

    def __init__(self, lm: InferenceModel, prompts: Sequence[Ids] = (), *, least: int = LEAST):
        """Prepares to read `prompts`.

        Args:
          lm: the `LanguageModel`: a scorer whose `stream` and `continuations` take a `prefix`.
          prompts: the prompts that will be read, each once, best in the order of
            `group_by_prefix`; empty: not known, and a prefix is never freed.
          least: minimum number of tokens of a shared prefix, 1 or more.
        """
        check_integer("least", least, 1)
        self.lm, self.saved_tokens = lm, 0
        self._remaining = sorted((np.asarray(ids, np.int32) for ids in prompts), key=_key)
        self._least, self._knows_prompts = least, bool(self._remaining)
        neighbours = itertools.pairwise(self._remaining)
        self._max_prefix = max(itertools.starmap(common, neighbours), default=0)
        self._cache: cache_lib.Cache | None = None  # of the prefix
        self._ids = np.zeros(0, np.int32)  # token ids of the prefix
        self._length = 0  # number of tokens that the rotation of its keys is made for

    def nll(self, tokens: np.ndarray, **options: Any) -> np.ndarray:
        return self.lm.nll(tokens, **options)

    def generate(
        self, prompts: Sequence[Ids], sampling: Sampling = Sampling()
    ) -> list[GeneratedText]:
        """Generates text for every prompt."""
        prefix = self._prefix(prompts, [sampling.max_new_tokens] * len(prompts))
        texts = join_pieces(self.lm.stream(prompts, sampling, prefix=prefix), len(prompts))
        self._release_if_unused()
        return texts

    def continuations(
        self, prompts: Sequence[Ids], continuations: Sequence[Sequence[Ids]]
    ) -> list[list[Continuation]]:
        """Scores the continuations of each prompt."""
        longest = [max(map(len, row), default=0) for row in continuations]
        prefix = self._prefix(prompts, longest)
        scores = self.lm.continuations(prompts, continuations, prefix=prefix)
        self._release_if_unused()
        return scores

    def batches(
        self, items: Sequence[Any], size: int, prompt: Callable[[Any], Ids]
    ) -> Iterator[list[Any]]:
        """Yields lists of at most `size` items, grouped by the common prefixes of their prompts."""
        for rows in group_by_prefix([prompt(item) for item in items]):
            yield from super().batches([items[row] for row in rows], size, prompt)

    def _prefix(self, prompts: Sequence[Ids], num_new: Sequence[int]) -> CachedPrefix | None:
        """Returns the shared prefix of `prompts`; None if reading it separately saves nothing."""
        rows = [np.asarray(prompt, np.int32) for prompt in prompts]
        self._remove_from_remaining(rows)
        if not all(map(len, rows)) or not rows:
            return None  # the model raises the error
        lengths = {max(len(row) + n, self.lm.length or 0) for row, n in zip(rows, num_new)}
        if not self.lm.shares_prefixes or (self.lm.depends_on_length and len(lengths) > 1):
            return None
        if self.lm.depends_on_length and lengths != {self._length}:
            self._ids = self._ids[:0]
        # The logits after a prompt come from its last token, which is never part of the prefix.
        shared = min(common(rows[0], row[:-1]) for row in rows)
        reused = common(self._ids, rows[0][:shared])
        added = max(self._num_worth_reading(rows, shared) - reused, 0) // self._least * self._least
        size = reused + added
        num_saved = prefix_tokens_reused([*map(len, rows)], size, prefill_chunk_size(None))
        if not _worth(size, max(map(len, rows)), self._least) or not num_saved.any():
            return None
        if added:
            self._length = max(lengths)
            self._read_prefix(rows[0][:size], reused)
        distinct = {row.tobytes(): int(n) for row, n in zip(rows, num_saved)}
        self.saved_tokens += sum(distinct.values()) - added
        return CachedPrefix(self._cache, rows[0][:size], self.lm, self._length)

    def _remove_from_remaining(self, rows: Sequence[np.ndarray]) -> None:
        for row in rows:
            place = bisect.bisect_left(self._remaining, _key(row), key=_key)
            if any(np.array_equal(row, other) for other in self._remaining[place : place + 1]):
                del self._remaining[place]

    def _num_shared_with_remaining(self, row: np.ndarray) -> int:
        """Returns how many tokens of `row` a remaining prompt shares: one of its two neighbours."""
        place = bisect.bisect_left(self._remaining, _key(row), key=_key)
        neighbours = self._remaining[max(place - 1, 0) : place + 1]
        return max((common(row, other) for other in neighbours), default=0)

    def _release_if_unused(self) -> None:
        """Frees the prefix if the remaining prompts are known and none begins with it."""
        if self._knows_prompts and self._num_shared_with_remaining(self._ids) < self._least:
            self._cache, self._ids = None, self._ids[:0]

    def _num_worth_reading(self, rows: Sequence[np.ndarray], shared: int) -> int:
        """Returns how many of the `shared` tokens other rows or remaining prompts read, too."""
        mesh = self.lm.mesh
        if len(rows) > rows_over(mesh, len(rows) + padding_rows(mesh, len(rows))):
            return shared
        return min(shared, max(map(self._num_shared_with_remaining, rows)))

    def _read_prefix(self, ids: np.ndarray, reused: int) -> None:
        """Reads `ids` as the new prefix, whose first `reused` tokens are in the cache already."""
        lm, size = self.lm, np.int32(reused)
        self._max_prefix = max(self._max_prefix, len(ids))
        # Each step donates the buffers of the old cache, so after an error there is no prefix.
        cache, self._cache, self._ids = self._cache, None, ids[:0]
        if cache is None:
            slots = cache_lib.whole_blocks(self._max_prefix)
            cache = cache_lib.create(lm.model.config, 1, slots, mesh=lm.mesh)
        elif cache.capacity < len(ids):
            slots = cache_lib.whole_blocks(self._max_prefix)
            cache = cache_lib.branch(cache, size, np.zeros(1, np.int32), slots, lm.mesh)
        else:
            cache = _truncate(cache, size)
        session = Session(lm.model, lm.params, cache, lm.rotation(self._length))
        session.read_ids(ids[reused:], reused, prefill_chunk_size(None))
        self._cache, self._ids = session.cache, ids


@functools.partial(jax.jit, donate_argnums=0)
def _truncate(cache: cache_lib.Cache, tokens: jax.Array) -> cache_lib.Cache:
    """Truncates a full cache of one row to its first `tokens`; later slots may be overwritten."""
    is_kept = jnp.arange(cache.capacity) < tokens  # all layers of a full cache have as many slots
    slots = tuple(
        dataclasses.replace(old, segments=jnp.where(is_kept, old.segments, 0))
        for old in cache.slots
    )
    return dataclasses.replace(cache, slots=slots, filled=tokens, tokens=tokens[None])
