"""Prompts that begin alike: what they have in common is read once, by one row of a cache.

reader = PrefixReader(lm, prompts)                    # lists of token ids
for rows in alike(prompts):
    answers = reader.generate([prompts[row] for row in rows])

The row is a stem: it is cut back to what the next prompts begin with, and read on from there. The
cache of a batch begins with copies of it, so answers are those of prompts that are read in full. A
stem and a batch are all that is kept, however many prompts there are.
"""

import bisect
import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from lcjax import cache as cache_lib
from lcjax.continuations import Continuation
from lcjax.conversation import pieces
from lcjax.generate import Prefix, Sampling, chunk_size, prefill
from lcjax.lm import LanguageModel
from lcjax.sharding import padding_rows, rows_over

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
    pattern = lm.config.pattern
    return pattern.any_order and pattern.kept() is None


def alike(prompts: Sequence[Ids], least: int = LEAST) -> list[list[int]]:
    """Numbers of prompts in the order to ask them, those that begin alike in a list of their own.

    Lists come in the order of their first prompt; those that begin like no other share one.
    """
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
        """`prompts` are those to come, best asked in the order of `alike`."""
        self.lm, self.tokenizer, self.config = lm, lm.tokenizer, lm.config
        self.saved = 0  # tokens of all prompts so far that were not read anew
        self._to_come = sorted((np.asarray(ids, np.int32) for ids in prompts), key=_key)
        self._least, self._room = least, max(map(len, self._to_come), default=0)
        self._stem: cache_lib.Cache | None = None
        self._ids = np.zeros(0, np.int32)  # that the stem has read
        self._length = 0  # of the requests for which its keys are rotated

    def generate(self, prompts: Sequence[Ids], sampling: Sampling = Sampling()) -> list[str]:
        """New text for every prompt."""
        prefix = self._prefix(prompts, [sampling.max_new_tokens] * len(prompts))
        texts = [""] * len(prompts)
        for piece in self.lm.stream(prompts, sampling, prefix=prefix):
            texts[piece.row] += piece.text
        return texts

    def continuations(
        self, prompts: Sequence[Ids], continuations: Sequence[Sequence[Ids]]
    ) -> list[list[Continuation]]:
        """What the model says of each continuation of each prompt."""
        longest = [max(map(len, row), default=0) for row in continuations]
        prefix = self._prefix(prompts, longest)
        return self.lm.continuations(prompts, continuations, prefix=prefix)

    def _prefix(self, prompts: Sequence[Ids], new: Sequence[int]) -> Prefix | None:
        """What `prompts`, which `new` tokens follow, begin with; None where it is not worth it."""
        rows = [np.asarray(prompt, np.int32) for prompt in prompts]
        lengths = {max(len(row) + n, self.lm.length or 0) for row, n in zip(rows, new)}
        if not shareable(self.lm) or (self.lm.follows_length and len(lengths) > 1):
            return None
        if self.lm.follows_length and lengths != {self._length}:
            self._ids = self._ids[:0]
        # The last token is left to ask what follows it.
        shared = min(common(rows[0], row[:-1]) for row in rows)
        kept = common(self._ids, rows[0][:shared])
        more = max(self._wanted(rows, shared) - kept, 0) // self._least * self._least
        if not _worth(kept + more, max(map(len, rows)), self._least):
            return None
        if more:
            self._length = max(lengths)
            self._read_on(rows[0][: kept + more], kept)
        self.saved += len({row.tobytes() for row in rows}) * (kept + more) - more
        return Prefix(self._stem, kept + more)

    def _wanted(self, rows: Sequence[np.ndarray], shared: int) -> int:
        """How many of the `shared` tokens others read as well: other rows, or the next prompt."""
        mesh = self.lm.mesh
        if len(rows) > rows_over(mesh, len(rows) + padding_rows(mesh, len(rows))):
            return shared
        last = max(rows, key=_key)
        after = self._to_come[bisect.bisect_right(self._to_come, _key(last), key=_key) :][:1]
        return max((min(shared, common(last, row)) for row in after), default=0)

    def _read_on(self, ids: np.ndarray, kept: int) -> None:
        """Makes `ids` what the stem has read, of which it has the first `kept`."""
        lm, chunk = self.lm, chunk_size(None)
        model, rotation, size = lm._model, lm.rotation(self._length), np.int32(kept)
        self._room = max(self._room, len(ids))
        if self._stem is None:
            slots = cache_lib.whole_blocks(self._room)
            self._stem = cache_lib.create(model.config, 1, slots, mesh=lm.mesh)
        elif self._stem.capacity < len(ids):
            slots = cache_lib.whole_blocks(self._room)
            self._stem = cache_lib.branch(self._stem, size, np.zeros(1, np.int32), slots, lm.mesh)
        else:
            self._stem = _cut_back(self._stem, size)
        for count in pieces(len(ids) - kept, chunk):
            places = np.arange(kept, kept + count)
            text = ids[places][None], None, places[None]
            _, self._stem = prefill(model, lm.params, self._stem, *text, rotation)
            kept += count
        self._ids = ids


@functools.partial(jax.jit, donate_argnums=0)
def _cut_back(cache: cache_lib.Cache, tokens: jax.Array) -> cache_lib.Cache:
    """A full cache of one row with its first `tokens`; what follows is written over."""
    segments = jnp.where(jnp.arange(cache.capacity) < tokens, cache.segments, 0)
    return dataclasses.replace(cache, segments=segments, filled=tokens, tokens=tokens[None])
