"""Contexts beside the window: texts are cut into chunks, encoded once, and kept for any use.

contexts = lm.encode_contexts([[passage, passage], [document], []])
contexts = lm.encode_contexts([[], [], [later_passage]], after=contexts)
lm.generate(prompts, context=contexts)

Chunks of all rows are encoded together, a few at a time, so memory is bounded however long a
context is; their states lie without gaps in one array with room for M tokens in each row.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from lcjax import cache as cache_lib
from lcjax.errors import InputError, whole_number
from lcjax.models import Decoder
from lcjax.models.memory import Encoded
from lcjax.sharding import keep_rows, keep_tokens, padding_rows

# The context of one row: a document or passages, each a text or token ids.
Row = str | Sequence[int] | Sequence[str | Sequence[int]]

_SHORTEST = 32  # tokens of the narrowest batch of chunks that is compiled


@dataclasses.dataclass(frozen=True)
class Contexts:
    """The encoded contexts of B rows, made by `encode`; nothing in it ever changes."""

    encoded: Encoded | None  # [B, M, ..]; None as long as no row has a context
    tokens: tuple[int, ...]  # of each row
    chunks: tuple[int, ...]  # of each row
    weights: dict = dataclasses.field(repr=False, compare=False)  # that they were encoded with

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.encoded))

    def check_weights(self, weights: dict) -> None:
        if weights is not self.weights:
            raise InputError(
                "context was encoded by another model; use encode_contexts of the one that reads it"
            )

    def rows(self, count: int, filler: int) -> Encoded | None:
        """What `count` texts read, and `filler` rows like the first; one row serves all texts."""
        if len(self.tokens) not in (1, count):
            raise InputError(
                f"context has {len(self.tokens)} rows for {count} texts; give a list of passages"
                " for each text, [] where there are none, or one row for all"
            )
        wanted = [0] * (count + filler) if len(self.tokens) == 1 else [*range(count)] + [0] * filler
        if self.encoded is None or wanted == [*range(len(self.tokens))]:
            return self.encoded
        return jax.tree.map(lambda x: x[np.array(wanted)], self.encoded)


def passages(row: Row, encode: Callable[[str], Sequence[int]], vocab_size: int) -> list[np.ndarray]:
    """Token ids int32 of every passage of a row."""
    if isinstance(row, str) or (len(row) and not isinstance(row[0], str) and np.isscalar(row[0])):
        row = [row]  # one document
    return [_checked(encode(p) if isinstance(p, str) else p, vocab_size) for p in row]


def cut(ids: np.ndarray, size: int) -> list[np.ndarray]:
    """A passage in chunks of `size` tokens; the odd one is first."""
    edges = [*range(len(ids), 0, -size), 0][::-1]
    return [ids[a:b] for a, b in itertools.pairwise(edges)]


def _checked(ids: Sequence[int], vocab_size: int) -> np.ndarray:
    try:
        ids = np.asarray(ids)
    except ValueError:  # lists of unequal lengths
        ids = np.zeros((1, 1))
    if not ids.size:
        return np.zeros(0, np.int32)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InputError("context: a passage must be a text or a list of token ids")
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.size:
        raise InputError(f"context: token={outside[0]} must lie between 0 and {vocab_size - 1}")
    return ids.astype(np.int32)


def encode(
    model: Decoder,
    params: dict,
    rows: Sequence[Sequence[np.ndarray]],
    *,
    batch_tokens: int | None = None,
    projected: bool = False,
    after: Contexts | None = None,
) -> Contexts:
    """The contexts of rows of chunks (`cut`), or `after` with these chunks added.

    Args:
      batch_tokens: tokens that are encoded at once; None: what suits the platform.
      projected: keep the keys and values of every reading layer instead of the encoder's states:
        faster to read, many times larger. `after` says it for chunks that are added.
    """
    if after is None:
        none = (0,) * len(rows)
        after = Contexts(None, none, none, params)
    after.check_weights(params)
    if len(rows) != len(after.tokens):
        raise InputError(
            f"after: contexts of {len(after.tokens)} rows can be extended by as many, and"
            f" {len(rows)} are given; write [] for a row that gets nothing"
        )
    sizes = [sum(map(len, chunks)) for chunks in rows]
    if not any(sizes):
        return after
    if after.encoded is not None:
        projected = after.encoded.layers is not None
    tokens = tuple(np.add(after.tokens, sizes).tolist())
    kept, room = after.encoded, bucketed(max(tokens))
    for batch in _batches(rows, after.tokens, _at_once(batch_tokens), model.mesh):
        new = _encode(model, params, batch.tokens, batch.mask, projected)
        if kept is after.encoded:  # a copy, since what is written to is given up
            kept = _with_room(model.mesh, kept, new, len(rows), max(room, _room(kept)))
        kept = _put(model.mesh, kept, new, batch.rows, batch.starts)
    counts = np.add(after.chunks, [len(chunks) for chunks in rows])
    return Contexts(kept, tokens, tuple(counts.tolist()), params)


def bucketed(length: int) -> int:
    """The next of eight sizes an octave, at least 64: at most an eighth of it is padding."""
    step = max(1 << (length - 1).bit_length() >> 4, 8)
    return max(-(-length // step) * step, 64)


def _at_once(wanted: int | None) -> int:
    """Tokens of a batch of chunks; None: what a matrix unit wants, or a CPU's caches hold."""
    if wanted is None:
        return 4096 if jax.default_backend() == "cpu" else 65_536
    whole_number("batch_tokens", wanted, 1, "leave it out for the default")
    return int(wanted)


@dataclasses.dataclass(frozen=True)
class _Batch:
    """R chunks of P tokens, and where they belong; filler is masked."""

    tokens: np.ndarray  # int32 [R, P]
    mask: np.ndarray  # bool [R, P]
    rows: np.ndarray  # int32 [R]
    starts: np.ndarray  # int32 [R], the place of the first token in its row


def _batches(rows, filled, at_once: int, mesh) -> Iterator[_Batch]:
    """All chunks, those of like length together: a few shapes serve every context."""
    groups: dict[int, list[tuple[int, int, np.ndarray]]] = {}
    longest = max(len(chunk) for chunks in rows for chunk in chunks)
    for row, chunks in enumerate(rows):
        start = filled[row]
        for chunk in chunks:
            width = min(max(1 << (len(chunk) - 1).bit_length(), _SHORTEST), longest)
            groups.setdefault(width, []).append((row, start, chunk))
            start += len(chunk)
    for width, group in sorted(groups.items()):
        most = max(at_once // width, 1)
        for start in range(0, len(group), most):
            part = group[start : start + most]
            # Powers of two, and all devices that share rows get equally many.
            count = min(1 << (len(part) - 1).bit_length(), most)
            count += padding_rows(mesh, count)
            tokens, mask = np.zeros((count, width), np.int32), np.zeros((count, width), bool)
            places = np.zeros((2, count), np.int32)
            for i, (row, place, chunk) in enumerate(part):
                tokens[i, : len(chunk)], mask[i, : len(chunk)] = chunk, True
                places[:, i] = row, place
            yield _Batch(tokens, mask, *places)


@functools.partial(jax.jit, static_argnums=(0, 4))
def _encode(model: Decoder, params: dict, tokens, mask, projected: bool) -> Encoded:
    """R rows of one chunk each."""
    tokens, mask = (keep_rows(x, model.mesh)[:, None] for x in (tokens, mask))
    encoded = model.apply({"params": params}, tokens, mask, method="encode")
    if projected:
        encoded = model.config.memory.projected(params, model.config, encoded)
    return encoded


def _room(encoded: Encoded | None) -> int:
    return 0 if encoded is None else encoded.mask.shape[1]


@functools.partial(jax.jit, static_argnums=(0, 3, 4))
def _with_room(mesh, kept: Encoded | None, like: Encoded, rows: int, room: int) -> Encoded:
    """A copy of `kept` with `room` for tokens, or an empty one for contexts such as `like`."""

    def wide(kind, old=None):
        shape = list(kind.shape)
        shape[0], shape[_axis(kind)] = rows, room
        zeros = jnp.zeros(shape, kind.dtype)
        if old is not None:
            zeros = jax.lax.dynamic_update_slice(zeros, old, (0,) * old.ndim)
        return _laid_out(zeros, mesh)

    return jax.tree.map(wide, like) if kept is None else jax.tree.map(wide, like, kept)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _put(mesh, kept: Encoded, new: Encoded, rows: jax.Array, starts: jax.Array) -> Encoded:
    """`kept` with the R chunks of `new` in these rows, from these places on, without padding."""
    places = starts[:, None] + jnp.cumsum(new.mask, axis=1) - 1
    places = jnp.where(new.mask, places, _room(kept))  # beyond the room: nowhere
    rows = rows[:, None]

    def write(old, part):
        if _axis(old) == 1:
            written = old.at[rows, places].set(part, mode="drop")
        else:  # heads stand before tokens
            written = old.at[rows, :, places].set(part.swapaxes(1, 2), mode="drop")
        return _laid_out(written, mesh)

    return jax.tree.map(write, kept, new)


def _axis(x: jax.Array) -> int:
    """Where the tokens are: the mask is [B, M], states [B, M, E], keys and values [B, K, M, H]."""
    return 2 if x.ndim == 4 else 1


def _laid_out(x: jax.Array, mesh) -> jax.Array:
    """Rows as those of texts, heads over `tensor`, where these divide."""
    return keep_tokens(x, mesh) if _axis(x) == 1 else cache_lib.keep_layout(x, mesh)
