"""How InfLLM reads: chunk after chunk, a window of keys and the blocks that the chunk chooses.

A chunk needs no more than a stretch of the keys and a few gathered blocks, whatever the length of
the text. Chunks of one row are read one after another, since the attention that a key receives in
the window decides about its block later on; those of different rows side by side.

Letters: Q queries of a chunk, W keys of its window, P tokens, C blocks of a text, M chosen ones.
Keys and values are held as [B, K, S, H], as a cache holds them. A *run* is the part of a chunk that
one call reads.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lcjax.attention.partial import rotate_queries
from lcjax.rope.base import Rotation, rotate
from pallas_kernels import causal, flash, gather, merge, window

if TYPE_CHECKING:
    from lcjax.attention.base import Places
    from lcjax.attention.inf_llm import InfLLM


class Tokens(NamedTuple):
    """Places of tokens, each [B, S]."""

    index: jax.Array
    segments: jax.Array  # 0 is padding
    positions: jax.Array


class Text(NamedTuple):
    """What a call is given."""

    pattern: InfLLM
    rotation: Rotation
    implementation: str | None
    q: jax.Array  # [B, T, N, H]
    k: jax.Array  # [B, K, S, H]
    v: jax.Array  # [B, K, S, Hv]
    queries: Tokens
    keys: Tokens
    runs: jax.Array  # int32 [B, T], the number of the run that a query belongs to; -1 for padding


class Run(NamedTuple):
    """A run of every row; a row that has no more asks nothing."""

    at: jax.Array  # int32 [B], where in the row its stretch of Q queries begins
    asked: jax.Array  # bool [B, Q], those that belong to it
    q: jax.Array  # [B, Q, N, H]
    places: Tokens  # of the stretch
    segment: jax.Array  # int32 [B], its document
    first: jax.Array  # int32 [B], the order index of its first query
    base: jax.Array  # int32 [B], the slot of the first token of its document
    blocks: jax.Array  # int32 [B], how many blocks it may choose from


class Part(NamedTuple):
    """Some keys for a run."""

    k: jax.Array  # [B, K or N, P, H]
    v: jax.Array
    index: jax.Array  # int32 [B, P]
    there: jax.Array  # bool [B, P]
    positions: jax.Array  # [B, P]


def read(
    pattern: InfLLM,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    notes: tuple[jax.Array, ...],
    rotation: Rotation,
    places: Places,
    packed: bool,
    implementation: str | None,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Out [B, T, N, Hv] of unrotated q [B, T, N, H] over k and v [B, S, K, H], and the new notes.

    notes: (received [B, N, 1, S], summaries [B, N, C, H]), or nothing where no block is complete.
    `packed` says that a row may hold several documents.
    """
    rows, length = q.shape[:2]
    queries = _tokens(places.q_order, places.q_segments, places.q_positions)
    keys = _tokens(places.k_order, places.k_segments, places.k_positions)
    runs, starts = _runs(queries, pattern.chunk)
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    text = Text(pattern, rotation, implementation, q, k, v, queries, keys, runs)
    # One document has no more than `most` runs; packed documents may have one for every token.
    most = 1 + -(-(length - 1) // pattern.chunk)
    rounds = -(-length // most) if packed else 1
    starts = jnp.pad(starts, [(0, 0), (0, most * rounds)], constant_values=length)
    starts = starts[:, : most * rounds].T.reshape(rounds, most, rows)
    numbers = jnp.arange(most * rounds, dtype=jnp.int32).reshape(rounds, most)
    step = _where_some(length, lambda kept, x: _read_run(text, kept, *x))
    steps = _where_some(length, lambda kept, x: lax.scan(step, kept, x)[0])
    empty = jnp.zeros((*q.shape[:3], v.shape[3]), q.dtype)
    return lax.scan(steps, (empty, notes), (numbers, starts))[0]


def _where_some(length: int, run):
    """A step of a scan that does nothing where no row has another run."""

    def step(kept, x):
        return lax.cond((x[1] < length).any(), run, lambda kept, x: kept, kept, x), None

    return step


def _tokens(index, segments, positions) -> Tokens:
    there = jnp.ones(positions.shape, jnp.int32) if segments is None else segments
    return Tokens(jnp.broadcast_to(index, positions.shape).astype(jnp.int32), there, positions)


def _runs(queries: Tokens, chunk: int) -> tuple[jax.Array, jax.Array]:
    """The run of every query, int32 [B, T], and where the runs begin, ascending; T for none."""
    index, segments, _ = queries
    before = jnp.pad(segments[:, :-1], [(0, 0), (1, 0)])
    starts = (segments != 0) & ((index % chunk == 0) | (segments != before))
    numbers = jnp.where(segments != 0, jnp.cumsum(starts, axis=1) - 1, -1)
    length = index.shape[1]
    return numbers, jnp.sort(jnp.where(starts, jnp.arange(length), length), axis=1)


def _read_run(text: Text, kept, number: jax.Array, start: jax.Array):
    """(out, notes) with the runs of this number, which start at `start` [B], added."""
    (out, notes), pattern = kept, text.pattern
    run = _run(text, number, start)
    near = _near(text, run)
    with jax.named_scope("window"):
        q = rotate_queries(run.q, run.places.positions, text.rotation)
        k = rotate(near.k.swapaxes(1, 2), near.positions, *text.rotation[:2])
        seen = causal() & window(pattern.window)
        here = local = _attend(text, run, q, k, near.v.swapaxes(1, 2), near, seen)
    if text.k.shape[2] > pattern.window:
        with jax.named_scope("memory"):
            middle = jnp.full(run.asked.shape, pattern.window - 1)
            turned = rotate_queries(run.q, middle, text.rotation)
            parts = _sinks_and_rest(text, run)
            if notes:
                received, summaries = notes
                summaries = _summarise(text, run, received, summaries)
                parts.append(_chosen(text, run, turned, summaries))
            far = _attend_far(text, run, turned, parts)
        here = merge([local, far])
    if notes:
        with jax.named_scope("received"):
            more = _received(text, run, q, k, near, seen, local[1], here[1])
            received = _add(received, more[:, :, None], _window_start(text, run), 3)
        notes = received, summaries
    old = _cut(out, run.at, run.asked.shape[1], 1)
    new = jnp.where(run.asked[..., None, None], here[0], old)
    return _put(out, new, run.at, 1), notes


def _run(text: Text, number: jax.Array, start: jax.Array) -> Run:
    pattern, length = text.pattern, text.runs.shape[1]
    size = min(pattern.chunk, length)
    at = jnp.minimum(start, length - size)
    places = Tokens(*(_cut(x, at, size, 1) for x in text.queries))
    asked = _cut(text.runs, at, size, 1) == number
    segment = jnp.where(asked, places.segments, 0).max(1)
    first = jnp.where(asked.any(1), jnp.where(asked, places.index, 2**30).min(1), 0)
    begins = (text.keys.segments == segment[:, None]) & (text.keys.index == 0)
    blocks = jnp.maximum(pattern.blocks_in(first + 1), 0)
    q = _cut(text.q, at, size, 1)
    return Run(at, asked, q, places, segment, first, jnp.argmax(begins, 1), blocks)


def _window_start(text: Text, run: Run) -> jax.Array:
    """The first slot [B] of the W keys that the windows of a run's queries cover."""
    slots = text.k.shape[2]
    start = run.base + jnp.maximum(run.first - text.pattern.window + 1, 0)
    return jnp.minimum(start, slots - _window_size(text, run))


def _window_size(text: Text, run: Run) -> int:
    return min(text.pattern.window + run.asked.shape[1] - 1, text.k.shape[2])


def _near(text: Text, run: Run) -> Part:
    return _stretch(text, run, _window_start(text, run), _window_size(text, run))


def _stretch(text: Text, run: Run, start: jax.Array, size: int) -> Part:
    """`size` keys from the slots `start` [B] on, or the last ones where there are fewer."""
    k, v = (_cut(x, start, size, 2) for x in (text.k, text.v))
    index, segments, positions = (_cut(x, start, size, 1) for x in text.keys)
    return Part(k, v, index, segments == run.segment[:, None], positions)


def _sinks_and_rest(text: Text, run: Run) -> list[Part]:
    """The first tokens, and those behind the run's last block that a window may have left."""
    pattern, slots = text.pattern, text.k.shape[2]
    sinks = _stretch(text, run, run.base, min(pattern.sinks, slots))
    after = pattern.sinks + run.blocks * pattern.block
    # The first query has less than a block of them, each later one at most one more.
    rest = min(pattern.block + run.asked.shape[1] - 2, slots)
    rest = _stretch(text, run, run.base + after, rest)
    return [
        sinks._replace(there=sinks.there & (sinks.index < pattern.sinks)),
        rest._replace(there=rest.there & (rest.index >= after[:, None])),
    ]


def _summarise(text: Text, run: Run, received: jax.Array, summaries: jax.Array) -> jax.Array:
    """`summaries` [B, N, C, H] with those of the blocks that a window has left since the last run.

    What a block received no longer changes then, so it does not matter that some are made again.
    """
    pattern = text.pattern
    count = min(-(-pattern.chunk // pattern.block), summaries.shape[2])
    start = jnp.maximum(run.blocks - count, 0)
    slots = _slots(pattern, run, start[:, None] + jnp.arange(count))  # [B, count, block]
    marks = jax.vmap(lambda x, at: jnp.take(x, at, axis=1, mode="clip"))(received[:, :, 0], slots)
    _, best = lax.top_k(marks, pattern.representatives)
    slots = jnp.take_along_axis(slots[:, None], best, 3)  # [B, N, count, representatives]
    keys = _gather(lax.stop_gradient(text.k), slots).astype(jnp.float32).mean(3)
    keys = jnp.where(run.asked.any(1)[:, None, None, None], keys, _cut(summaries, start, count, 2))
    return _put(summaries, keys, start, 2)


def _slots(pattern: InfLLM, run: Run, ids: jax.Array) -> jax.Array:
    """The slots [B, ..., block] of the blocks `ids` [B, ...]."""
    base = jnp.expand_dims(run.base + pattern.sinks, tuple(range(1, ids.ndim + 1)))
    return base + ids[..., None] * pattern.block + jnp.arange(pattern.block)


def _chosen(text: Text, run: Run, turned: jax.Array, summaries: jax.Array) -> Part:
    """The blocks with the best summaries for the mean of the queries `turned` [B, Q, N, H]."""
    pattern = text.pattern
    asked = run.asked[..., None, None]
    total = jnp.where(asked, lax.stop_gradient(turned).astype(jnp.float32), 0.0).sum(1)
    mean = total / jnp.maximum(run.asked.sum(1), 1)[:, None, None]
    exists = jnp.arange(summaries.shape[2]) < run.blocks[:, None]
    per = "token_and_head" if pattern.per_head else "chunk"
    ids, there = gather.best_blocks(
        mean[:, None], summaries.swapaxes(1, 2), pattern.top_k, per, exists=exists
    )
    ids, there = (x.reshape(len(ids), -1, x.shape[-1]) for x in (ids, there))  # [B, N or 1, M]
    slots = _slots(pattern, run, ids).reshape(*ids.shape[:2], -1)
    if not pattern.per_head:
        slots = jnp.broadcast_to(slots, (len(ids), text.k.shape[1], slots.shape[2]))
    # All of them are behind the window of every query, and as many for each head.
    there = jnp.repeat(there[:, 0], pattern.block, axis=1)
    index = jnp.broadcast_to((run.first - pattern.window)[:, None], there.shape)
    return Part(_gather(text.k, slots), _gather(text.v, slots), index, there, index)


def _attend_far(text: Text, run: Run, turned: jax.Array, parts: list[Part]):
    """The partial of the keys behind the window, which stay unrotated."""
    heads = max(part.k.shape[1] for part in parts)

    def joined(name):
        arrays = [getattr(part, name) for part in parts]
        if name in ("index", "there"):
            return jnp.concatenate(arrays, 1)
        arrays = [jnp.repeat(x, heads // x.shape[1], axis=1) for x in arrays]
        return jnp.concatenate(arrays, 2).swapaxes(1, 2)

    k, v, index, there = (joined(name) for name in ("k", "v", "index", "there"))
    part = Part(k, v, index, there, jnp.zeros_like(index))
    k = rotate(k, part.positions, *text.rotation[:2])  # by nothing, but with its scale
    return _attend(text, run, turned, k, v, part, ~window(text.pattern.window))


def _attend(text: Text, run: Run, q, k, v, part: Part, mask):
    """flash over k and v [B, P, K, H] at the places of `part`."""
    return flash(
        q, k, v, mask,
        q_index=run.places.index, k_index=part.index,
        q_segments=run.asked.astype(jnp.int32), k_segments=part.there.astype(jnp.int32),
        implementation=text.implementation,
    )  # fmt: skip


def _received(text: Text, run: Run, q, k, near: Part, seen, local, whole) -> jax.Array:
    """What every key of the window receives from the run's queries, float32 [B, N, W].

    The sums of columns of P' = P exp(local - whole), with P the weights inside the window and the
    log-sum-exps `local` of it and `whole` of all keys. Since out = P v, the gradient of flash in v
    is P^T d_out: with exp(local - whole) for d_out it is what is wanted. A channel for each query
    head that shares a key head keeps those apart.
    """
    q, k, local, whole = (lax.stop_gradient(x) for x in (q, k, local, whole))
    rows, heads, shared = q.shape[0], q.shape[2], k.shape[2]
    group = heads // shared
    share = jnp.exp(local - jnp.where(whole > -jnp.inf, whole, 0.0))  # [B, Q, N]
    channel = jnp.tile(jnp.eye(group, dtype=q.dtype), (shared, 1))  # [N, G]
    v = jnp.zeros((rows, k.shape[1], shared, group), k.dtype)
    _, backward = jax.vjp(lambda v: _attend(text, run, q, k, v, near, seen)[0], v)
    (sums,) = backward(share[..., None].astype(q.dtype) * channel)
    return jnp.moveaxis(sums.reshape(rows, k.shape[1], heads), 1, 2).astype(jnp.float32)


def _gather(x: jax.Array, slots: jax.Array) -> jax.Array:
    """x [B, K, S, H] at slots [B, N, ...], where N is K or a multiple: [B, N, ..., H]."""
    head = jnp.arange(slots.shape[1]) // (slots.shape[1] // x.shape[1])
    head = jnp.expand_dims(head, tuple(range(1, slots.ndim - 1)))
    return jax.vmap(lambda x, at: x.at[head, at].get(mode="clip"))(x, slots)


def _cut(x: jax.Array, start: jax.Array, size: int, axis: int) -> jax.Array:
    """`size` entries of an axis from `start` [B] on, or the last ones where there are fewer."""
    return jax.vmap(functools.partial(lax.dynamic_slice_in_dim, slice_size=size, axis=axis - 1))(
        x, start
    )


def _put(x: jax.Array, part: jax.Array, start: jax.Array, axis: int) -> jax.Array:
    """x with `part` in the place that `_cut` takes it from."""
    write = functools.partial(lax.dynamic_update_slice_in_dim, axis=axis - 1)
    return jax.vmap(write)(x, part, start)


def _add(x: jax.Array, part: jax.Array, start: jax.Array, axis: int) -> jax.Array:
    return _put(x, _cut(x, start, part.shape[axis], axis) + part, start, axis)
