"""Prompts that begin alike: what they have in common is read once, by one row of a cache.

reader = PrefixReader(lm, prompts)                    # lists of token ids
for rows in alike(prompts):
    answers = reader.generate([prompts[row] for row in rows])

The row is a stem: it is cut back to what the next prompts begin with, and read on from there. The
cache of a batch begins with copies of it, so answers are those of prompts that are read in full, up
to rounding. A stem and a batch are all that is kept, however many prompts there are, and the stem
only while prompts to come begin with it.
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

from lcjax.errors import whole_number
from lcjax.generation.continuations import Continuation
from lcjax.generation.generate import prefill, taken_over
from lcjax.generation.language_model import LanguageModel
from lcjax.generation.prefix import Prefix, goes_on
from lcjax.generation.sampling import Sampling, Written, written
from lcjax.generation.shapes import prefill_chunk_size, unpadded_chunks
from lcjax.models import cache as cache_lib
from lcjax.parallel.sharding import padding_rows, rows_over

Ids = Sequence[int] | np.ndarray

# Tokens in common below which a stem is more trouble than use, and a step of its length: so it is
# read by few programs, and short prompts need none of them.
LEAST = 1024
_SHARE = 8  # they must be at least this part of a prompt


def shareable(lm: LanguageModel) -> bool:
    """Whether `lm` may go on from what was read apart.

    What a token sees must follow from its place alone, not from what is read with it (Landmark,
    InfLLM, vertical_slash); and a pattern that keeps few keys has little to share.
    """
    return goes_on(lm.config.pattern)


def alike(prompts: Sequence[Ids], least: int = LEAST) -> list[list[int]]:
    """Numbers of prompts in the order to ask them, those that begin alike in a list of their own.

    `least` tokens in common are worth it, at least 1.
    Lists come in the order of their first prompt; those that begin like no other share one.
    """
    whole_number("least", least, 1)
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
    """Tokens that both begin with."""
    size = min(len(a), len(b))
    differ = a[:size] != b[:size]
    return int(differ.argmax()) if differ.any() else size


@functools.cmp_to_key
def _key(a: np.ndarray, b: np.ndarray) -> int:
    """Sorts token ids as words in a dictionary."""
    same = common(a, b)
    return len(a) - len(b) if same == min(len(a), len(b)) else int(a[same]) - int(b[same])


def _worth(tokens: int, length: int, least: int) -> bool:
    return tokens >= least and tokens * _SHARE >= length


class PrefixReader:
    """`lm` where prompts that begin alike are asked one batch after another.

    `generate` and `continuations` are those of `lm`, of prompts as token ids. Rows whose rotations
    differ, as one that follows the length may, are read in full; so is all where `shareable` says.
    """

    def __init__(self, lm: LanguageModel, prompts: Sequence[Ids] = (), *, least: int = LEAST):
        """`prompts` are those to come, each to be asked once, best in the order of `alike`.

        What others share must be at least `least` tokens, 1 or more.
        """
        whole_number("least", least, 1)
        self.lm, self.tokenizer, self.config = lm, lm.tokenizer, lm.config
        # Tokens of prompts that no batch has read, less those that the stem has. Equal prompts of
        # a batch are one: they fill it up. Below 0 where a stem is not of use yet.
        self.saved = 0
        self._to_come = sorted((np.asarray(ids, np.int32) for ids in prompts), key=_key)
        self._least, self._told = least, bool(self._to_come)
        neighbours = itertools.pairwise(self._to_come)
        self._room = max(itertools.starmap(common, neighbours), default=0)  # of the longest stem
        self._stem: cache_lib.Cache | None = None
        self._ids = np.zeros(0, np.int32)  # that the stem has read
        self._length = 0  # of the requests for which its keys are rotated

    def generate(self, prompts: Sequence[Ids], sampling: Sampling = Sampling()) -> list[Written]:
        """New text for every prompt."""
        prefix = self._prefix(prompts, [sampling.max_new_tokens] * len(prompts))
        texts = written(self.lm.stream(prompts, sampling, prefix=prefix), len(prompts))
        self._give_back()
        return texts

    def continuations(
        self, prompts: Sequence[Ids], continuations: Sequence[Sequence[Ids]]
    ) -> list[list[Continuation]]:
        """What the model says of each continuation of each prompt."""
        longest = [max(map(len, row), default=0) for row in continuations]
        prefix = self._prefix(prompts, longest)
        found = self.lm.continuations(prompts, continuations, prefix=prefix)
        self._give_back()
        return found

    def _prefix(self, prompts: Sequence[Ids], new: Sequence[int]) -> Prefix | None:
        """What `prompts`, which `new` tokens follow, begin with; None where it is not worth it."""
        rows = [np.asarray(prompt, np.int32) for prompt in prompts]
        self._ask(rows)
        if not all(map(len, rows)) or not rows:
            return None  # it is refused
        lengths = {max(len(row) + n, self.lm.length or 0) for row, n in zip(rows, new)}
        if not shareable(self.lm) or (self.lm.follows_length and len(lengths) > 1):
            return None
        if self.lm.follows_length and lengths != {self._length}:
            self._ids = self._ids[:0]
        # The last token is left to ask what follows it.
        shared = min(common(rows[0], row[:-1]) for row in rows)
        kept = common(self._ids, rows[0][:shared])
        more = max(self._wanted(rows, shared) - kept, 0) // self._least * self._least
        fewer = taken_over([*map(len, rows)], kept + more, prefill_chunk_size(None))
        if not _worth(kept + more, max(map(len, rows)), self._least) or not fewer.any():
            return None
        if more:
            self._length = max(lengths)
            self._read_on(rows[0][: kept + more], kept)
        self.saved += sum({row.tobytes(): int(n) for row, n in zip(rows, fewer)}.values()) - more
        return Prefix(self._stem, rows[0][: kept + more])

    def _ask(self, rows: Sequence[np.ndarray]) -> None:
        """Takes `rows` out of what is to come."""
        for row in rows:
            place = bisect.bisect_left(self._to_come, _key(row), key=_key)
            if any(np.array_equal(row, one) for one in self._to_come[place : place + 1]):
                del self._to_come[place]

    def _shared(self, row: np.ndarray) -> int:
        """Tokens of `row` that a prompt to come begins with: one of its two neighbours."""
        place = bisect.bisect_left(self._to_come, _key(row), key=_key)
        near = self._to_come[max(place - 1, 0) : place + 1]
        return max((common(row, one) for one in near), default=0)

    def _give_back(self) -> None:
        """Drops the stem where no prompt to come, if they are known, goes on from it."""
        if self._told and self._shared(self._ids) < self._least:
            self._stem, self._ids = None, self._ids[:0]

    def _wanted(self, rows: Sequence[np.ndarray], shared: int) -> int:
        """How many of the `shared` tokens others read as well: other rows, or prompts to come."""
        mesh = self.lm.mesh
        if len(rows) > rows_over(mesh, len(rows) + padding_rows(mesh, len(rows))):
            return shared
        return min(shared, max(map(self._shared, rows)))

    def _read_on(self, ids: np.ndarray, kept: int) -> None:
        """Makes `ids` what the stem has read, of which it has the first `kept`."""
        lm, chunk, size = self.lm, prefill_chunk_size(None), np.int32(kept)
        model, rotation = lm.model, lm.rotation(self._length)
        self._room = max(self._room, len(ids))
        # Each step gives up the stem before it: what fails on the way leaves none.
        stem, self._stem, self._ids = self._stem, None, ids[:0]
        if stem is None:
            slots = cache_lib.whole_blocks(self._room)
            stem = cache_lib.create(model.config, 1, slots, mesh=lm.mesh)
        elif stem.capacity < len(ids):
            slots = cache_lib.whole_blocks(self._room)
            stem = cache_lib.branch(stem, size, np.zeros(1, np.int32), slots, lm.mesh)
        else:
            stem = _cut_back(stem, size)
        for count in unpadded_chunks(len(ids) - kept, chunk):
            places = np.arange(kept, kept + count)
            text = ids[places][None], None, places[None]
            _, stem = prefill(model, lm.params, stem, *text, rotation)
            kept += count
        self._stem, self._ids = stem, ids


def reader_of(model, prompts: Sequence[Ids]):
    """`model` as a `PrefixReader` of `prompts`, if it is one that may share; else as it is."""
    if prompts and isinstance(model, LanguageModel) and shareable(model):
        return PrefixReader(model, prompts)
    return model


def batches(
    model, items: Sequence[Any], size: int, prompt: Callable[[Any], Ids]
) -> Iterator[list[Any]]:
    """At most `size` of `items` at a time, in their order.

    For a `PrefixReader` those whose `prompt(item)` begin alike are together, as `alike` says.
    """
    lists = [range(len(items))]
    if isinstance(model, PrefixReader):
        lists = alike([prompt(item) for item in items])
    for rows in lists:
        for start in range(0, len(rows), size):
            yield [items[row] for row in rows[start : start + size]]


@functools.partial(jax.jit, donate_argnums=0)
def _cut_back(cache: cache_lib.Cache, tokens: jax.Array) -> cache_lib.Cache:
    """A full cache of one row with its first `tokens`; what follows is written over."""
    segments = jnp.where(jnp.arange(cache.capacity) < tokens, cache.segments, 0)
    return dataclasses.replace(cache, segments=segments, filled=tokens, tokens=tokens[None])
