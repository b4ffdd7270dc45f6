"""Chunks on their way into the arrays that are read: encoded together, a few at a time.

Chunks of like length make a batch, so a few shapes serve every context and memory is bounded; each
is written where it belongs in its row.
"""

import dataclasses
import functools
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lcjax.errors import whole_number
from lcjax.generation.shapes import bucketed
from lcjax.models import Decoder
from lcjax.models import cache as cache_lib
from lcjax.models.memory import Encoded, Memory, token_axis
from lcjax.parallel import distributed
from lcjax.parallel.sharding import keep_rows, keep_tokens, padding_rows
from lcjax.rope import Rotation

_SHORTEST = 32  # tokens of the narrowest batch of chunks that is compiled


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Text that is encoded at once, and where it belongs."""

    tokens: np.ndarray  # int32 [up to P]
    row: int
    number: int  # in its row
    start: int  # its first place in the row of what is kept
    room: int  # places that it may take
    path: np.ndarray | None = None  # bool [h - 1]: of a memory that asks, what was chosen


def chosen(
    model: Decoder,
    params: dict,
    chunks: Sequence[Chunk],
    query: jax.Array,
    batch_tokens: int | None,
) -> list[Chunk]:
    """`chunks` with the paths that suit the `query` of their rows."""
    paths: list[np.ndarray | None] = [None] * len(chunks)
    found = [  # all on their way before the first is waited for
        (
            batch.indices,
            _choose(model, params, batch.tokens, batch.mask, query, batch.rows, batch.tags),
        )
        for batch in _batches(chunks, _at_once(batch_tokens), model.mesh)
    ]
    for indices, own in found:
        for index, path in zip(indices, distributed.gather(own), strict=False):
            paths[index] = path
    return [dataclasses.replace(c, path=p) for c, p in zip(chunks, paths, strict=True)]


def written(
    model: Decoder,
    params: dict,
    kept: Encoded | None,
    chunks: Sequence[Chunk],
    shape: tuple[int, int],
    *,
    batch_tokens: int | None = None,
    projected: bool = False,
    tree: Any = None,
    owned: bool = False,
    rotation: Rotation | None = None,
) -> Encoded:
    """`kept` [B, M, ..], or nothing, with `chunks` encoded and put in their places.

    `shape` is (B, M) at least; `tree` another one than the memory's; `owned` says that `kept` may
    be written to, and else a copy is. `rotation` is that of a text, for memories that lead it.
    """
    rows, room = shape
    kept, memory = kept and dataclasses.replace(kept, chunks=None), model.config.memory
    for batch in _in_turn(memory, chunks, _at_once(batch_tokens), model.mesh):
        options = {}
        if memory.leads:
            after = None if kept is None else _rows(kept, batch.rows)
            options = {"after": after, "rotation": rotation}
        if memory.ordered:
            options = {"numbers": batch.numbers[:, None], "tags": batch.tags[:, None]}
            if batch.path is not None:
                options["path"] = batch.path[:, None]
        new = _encode(model, params, batch.tokens, batch.mask, projected, tree, options)
        new = dataclasses.replace(new, chunks=None)
        if not owned:  # what is written to is given up
            kept, owned = _with_room(model.mesh, kept, new, rows, max(room, _room(kept))), True
        kept = _put(model.mesh, kept, new, batch.rows, batch.starts, batch.rooms)
    return kept


def _at_once(wanted: int | None) -> int:
    """Tokens of a batch of chunks; None: what a matrix unit wants, or a CPU's caches hold."""
    if wanted is None:
        return 4096 if jax.default_backend() == "cpu" else 65_536
    whole_number("batch_tokens", wanted, 1, "leave it out for the default")
    return int(wanted)


@dataclasses.dataclass(frozen=True)
class _Batch:
    """R chunks of P tokens, and where they belong; filler is masked."""

    indices: list[int]  # in the list of all, without filler
    tokens: np.ndarray  # int32 [R, P]
    mask: np.ndarray  # bool [R, P]
    rows: np.ndarray  # int32 [R]
    starts: np.ndarray  # int32 [R], the first place in its row
    rooms: np.ndarray  # int32 [R], places that it may take
    numbers: np.ndarray  # int32 [R]
    path: np.ndarray | None  # bool [R, h - 1]

    @property
    def tags(self) -> np.ndarray:
        """uint32 [R], of each chunk's number and tokens: the same in whichever row it stands."""
        rows = zip(self.tokens, self.mask, self.numbers)
        found = [zlib.crc32(ids[there].tobytes(), int(number)) for ids, there, number in rows]
        return np.array(found, np.uint32)


def _batches(chunks: Sequence[Chunk], at_once: int, mesh) -> Iterator[_Batch]:
    """All chunks, those of like length together: a few shapes serve every context."""
    groups: dict[int, list[int]] = {}
    longest = max((len(chunk.tokens) for chunk in chunks), default=0)
    for index, chunk in enumerate(chunks):
        width = min(bucketed(len(chunk.tokens), 1, _SHORTEST), longest)
        groups.setdefault(width, []).append(index)
    for width, group in sorted(groups.items()):
        most = max(at_once // width, 1)
        for start in range(0, len(group), most):
            yield _batch(chunks, group[start : start + most], width, most, mesh)


def _in_turn(memory: Memory, chunks: Sequence[Chunk], at_once: int, mesh) -> Iterator[_Batch]:
    """The batches of all chunks: in any order, or all first ones of a row, then all second ones."""
    if not memory.leads:
        yield from _batches(chunks, at_once, mesh)
        return
    for number in sorted({chunk.number for chunk in chunks}):
        yield from _batches([c for c in chunks if c.number == number], at_once, mesh)


def _batch(chunks: Sequence[Chunk], part: list[int], width: int, most: int, mesh) -> _Batch:
    # Powers of two, and all devices that share rows get equally many.
    count = min(bucketed(len(part), 1, 1), most)
    count += padding_rows(mesh, count)
    own = [chunks[index] for index in part]
    tokens, mask = np.zeros((count, width), np.int32), np.zeros((count, width), bool)
    places = np.zeros((4, count), np.int32)
    for i, chunk in enumerate(own):
        size = len(chunk.tokens)
        tokens[i, :size], mask[i, :size] = chunk.tokens, True
        places[:, i] = chunk.row, chunk.start, chunk.room, chunk.number
    path = None
    if own[0].path is not None:
        path = np.zeros((count, len(own[0].path)), bool)
        path[: len(own)] = [chunk.path for chunk in own]
    return _Batch(part, tokens, mask, *places, path)


@functools.partial(jax.jit, static_argnums=(0, 4, 5))
def _encode(
    model: Decoder, params: dict, tokens, mask, projected: bool, tree=None, options=None
) -> Encoded:
    """R rows of one chunk each."""
    tokens, mask = (keep_rows(x, model.mesh)[:, None] for x in (tokens, mask))
    options = {**(options or {}), **({} if tree is None else {"tree": tree})}
    encoded = model.apply({"params": params}, tokens, mask, method="encode", **options)
    if projected:
        encoded = model.config.memory.projected(params, model.config, encoded)
    return encoded


@functools.partial(jax.jit, static_argnums=0)
def _choose(model: Decoder, params: dict, tokens, mask, query, rows, tags) -> jax.Array:
    """The paths bool [R, h - 1] of R rows of one chunk each, asked for by `query` [B, D]."""
    tokens, mask, query = (keep_rows(x, model.mesh) for x in (tokens, mask, query[rows]))

    def choose(model):
        places = {"query": query, "tags": tags[:, None]}
        return model.encoder.choose(tokens[:, None], mask[:, None], **places)

    return model.apply({"params": params}, method=choose)[:, 0]


@jax.jit
def _rows(kept: Encoded, rows) -> Encoded:
    """What is kept of these rows."""
    return jax.tree.map(lambda x: x[rows], kept)


def _room(encoded: Encoded | None) -> int:
    return 0 if encoded is None else encoded.mask.shape[1]


@functools.partial(jax.jit, static_argnums=(0, 3, 4))
def _with_room(mesh, kept: Encoded | None, like: Encoded, rows: int, room: int) -> Encoded:
    """A copy of `kept` with `room` for tokens, or an empty one for contexts such as `like`."""

    def wide(kind, old=None):
        shape = list(kind.shape)
        shape[0], shape[token_axis(kind)] = rows, room
        zeros = jnp.zeros(shape, kind.dtype)
        if old is not None:
            zeros = jax.lax.dynamic_update_slice(zeros, old, (0,) * old.ndim)
        return _laid_out(zeros, mesh)

    return jax.tree.map(wide, like) if kept is None else jax.tree.map(wide, like, kept)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _put(mesh, kept: Encoded, new: Encoded, rows, starts, rooms) -> Encoded:
    """`kept` with the R chunks of `new` in these rows, from these places on, without padding.

    Of the rooms that they may take, the rest is empty.
    """
    order = jnp.cumsum(new.mask, axis=1) - 1
    places = jnp.where(new.mask, starts[:, None] + order, _room(kept))  # beyond the room: nowhere
    rows = rows[:, None]
    rest = jnp.arange(new.mask.shape[1])
    rest = jnp.where(rest < rooms[:, None], starts[:, None] + rest, _room(kept))
    mask = kept.mask.at[rows, rest].set(False, mode="drop")
    kept = dataclasses.replace(kept, mask=mask)

    def write(old, part):
        if token_axis(old) == 1:
            written = old.at[rows, places].set(part, mode="drop")
        else:  # heads stand before tokens
            written = old.at[rows, :, places].set(part.swapaxes(1, 2), mode="drop")
        return _laid_out(written, mesh)

    return jax.tree.map(write, kept, new)


def _laid_out(x: jax.Array, mesh) -> jax.Array:
    """Rows as those of texts, heads over `tensor`, where these divide."""
    return keep_tokens(x, mesh) if token_axis(x) == 1 else cache_lib.keep_layout(x, mesh)
