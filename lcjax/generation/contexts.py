"""Contexts outside the window: texts are split into chunks, encoded once, and reused.

contexts = lm.encode_contexts([[passage, passage], [document], []])
contexts = lm.encode_contexts([[], [], [later_passage]], after=contexts)
lm.generate(prompts, context=contexts)

Chunks of all rows are encoded together, a batch at a time, so device memory is bounded for contexts
of any length. Chunks of similar length make a batch, so a few compiled shapes serve every context.
The states of a row are stored without gaps in an array with M slots per row.

Contexts of query-dependent memories keep their tokens, and `search_contexts` encodes them for
another question: only tree nodes that were not encoded before.
"""

import dataclasses
import functools
import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lcjax.checkpoints.tokenizer import without_bos
from lcjax.errors import InputError, check_integer
from lcjax.generation.inference_model import InferenceModel
from lcjax.generation.programs import InferenceJit
from lcjax.generation.session import check_rows, check_token_ids, round_up_to_bucket
from lcjax.memory import Tree
from lcjax.models import Decoder
from lcjax.models import cache as cache_lib
from lcjax.models.memory import EncodedContext, Memory, token_axis
from lcjax.parallel import distributed
from lcjax.parallel.sharding import keep_rows, keep_tokens, padding_rows
from lcjax.rope import Rope, Rotation

_MIN_WIDTH = 32  # tokens of the narrowest batch of chunks that is compiled

# The context of one row: a document, or passages, each a text or token ids; for memories with
# passages per chunk of the text (`Memory.by_chunk`), a document or passages for each chunk.
ContextRow = str | Sequence[int] | Sequence[str | Sequence[int] | Sequence[str | Sequence[int]]]


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A piece of a context that is encoded at once, and the slots of its states."""

    tokens: np.ndarray  # int32 [up to P]
    row: int
    number: int  # place in its row; with `Memory.by_chunk`, number of the chunk of the text
    start: int  # its first slot in the row
    num_slots: int  # maximum number of slots that it fills
    # bool [h - 1], the halves that were chosen for a question; None: query-independent
    path: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Contexts:
    """The encoded contexts of B rows, made by `encode`; immutable."""

    encoded: EncodedContext | None  # [B, M, ..]; None if there is no text, or no query yet
    tokens: tuple[int, ...]  # number of tokens of each row
    chunks: tuple[int, ...]  # number of chunks of each row, or of chunks of the text (`by_chunk`)
    weights: dict = dataclasses.field(repr=False, compare=False)  # parameters of the encoding model
    slots: tuple[int, ...] | None = None  # slots used in each row; None: one for each token
    # Of query-dependent memories: all chunks, and the queries, float32 [B, D].
    source: tuple[Chunk, ...] = dataclasses.field(default=(), repr=False, compare=False)
    query: jax.Array | None = dataclasses.field(default=None, repr=False, compare=False)
    rope: Rope | None = None  # RoPE method of the decoder if it encoded the contexts itself
    memory: Memory | None = dataclasses.field(default=None, repr=False)

    @property
    def needs_query(self) -> bool:
        """Whether there is text that is not encoded yet because no question was given."""
        return bool(self.source) and self.query is None

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows, and number of slots of each row, rounded up to a compiled size."""
        return len(self.tokens), round_up_to_bucket(max(self.slots or self.tokens))

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.encoded))

    def check(self, lm: InferenceModel) -> None:
        """Raises an InputError if `lm` would have encoded the contexts differently."""
        memory, rope = lm.config.memory, lm.prefix_rope
        if lm.params is not self.weights:
            raise InputError(
                "context was encoded by another model; use encode_contexts of the one that reads it"
            )
        if self.encoded is None and not self.source:
            return
        if memory is None or memory.encodes_as(self.memory) != self.memory:
            raise InputError(
                f"context was encoded with {_difference(self.memory, memory)}; use encode_contexts"
                " of the model that reads it (the result of with_method)"
            )
        if self.encoded is not None and rope != self.rope:
            raise InputError(
                f"context was read with rope {self.rope}, and the text after it is read with rope"
                f" {rope}; use encode_contexts of the model that reads it (the result of"
                " with_method)"
            )

    def precede(self, count: int) -> list[bool]:
        """Returns whether each of `count` texts follows a context in one sequence of positions."""
        if self.rope is None:
            return [False] * count
        tokens = self.tokens * count if len(self.tokens) == 1 else self.tokens
        return [row < len(tokens) and tokens[row] > 0 for row in range(count)]

    def without_bos(self, ids: list[int], bos: int | None) -> list[int]:
        """Drops the BOS at the start of a single text if a context precedes it and has the BOS."""
        return without_bos(ids, bos) if self.precede(1)[0] else ids

    def repeated(self, count: int) -> "Contexts":
        """Repeats a single row `count` times; other contexts are returned as they are."""
        if len(self.tokens) != 1 or count == 1:
            return self
        source = tuple(
            dataclasses.replace(chunk, row=row) for row in range(count) for chunk in self.source
        )
        index = np.zeros(count, np.int32)
        encoded, query = jax.tree.map(lambda x: x[index], (self.encoded, self.query))
        counts = {name: getattr(self, name) * count for name in ("tokens", "chunks", "slots")}
        return dataclasses.replace(self, encoded=encoded, source=source, query=query, **counts)

    def rows(self, count: int, filler: int) -> EncodedContext | None:
        """Returns the encoded contexts of `count` texts, and `filler` copies of the first one.

        A single row serves all texts.
        """
        if len(self.tokens) not in (1, count):
            raise InputError(
                f"context has {len(self.tokens)} rows for {count} texts; give a list of passages"
                " for each text, [] where there are none, or one row for all"
            )
        index = [0] * (count + filler) if len(self.tokens) == 1 else [*range(count)] + [0] * filler
        if self.needs_query:
            raise InputError(
                "context: model.memory.policy encodes what a question needs, and there is no"
                " question yet; give encode_contexts or search_contexts a query"
            )
        if self.encoded is None or index == [*range(len(self.tokens))]:
            return self.encoded
        return jax.tree.map(lambda x: x[np.array(index)], self.encoded)


def _difference(encoded: Memory, reads: Memory | None) -> str:
    """Describes the settings in which two memories differ, for an error message."""
    if type(encoded) is not type(reads):
        kind = "none" if reads is None else type(reads).__name__
        return f"the memory {type(encoded).__name__}, and the model that reads it has {kind}"
    names = [field.name for field in dataclasses.fields(encoded)]
    changed = [name for name in names if getattr(encoded, name) != getattr(reads, name)]
    old, new = (
        ", ".join(f"{name}={getattr(memory, name)}" for name in changed)
        for memory in (encoded, reads)
    )
    return f"model.memory.{old}, and the model that reads it has {new}"


def passages(
    row: ContextRow,
    encode: Callable[[str], Sequence[int]],
    vocab_size: int,
    bos: Sequence[int] = (),
) -> list[np.ndarray]:
    """Returns the token ids of each passage of a row, int32 [n].

    `bos` precedes the first passage that is not empty if it is a text; token ids are unchanged.
    """
    is_list = isinstance(row, Sequence | np.ndarray | jax.Array) and len(row)
    if isinstance(row, str) or (is_list and not isinstance(row[0], str) and np.isscalar(row[0])):
        row = [row]  # one document
    check_rows("context: a row", row, '["a passage", "another"]')
    name = "context: a passage"
    ids = [check_token_ids(name, encode(p) if isinstance(p, str) else p, vocab_size) for p in row]
    first = next((i for i, passage in enumerate(ids) if len(passage)), None)
    if first is not None and isinstance(row[first], str):
        ids[first] = np.concatenate([np.array(bos, np.int32), ids[first]])
    return ids


def context_chunk_size(memory: Memory, chunk: int | None) -> int:
    """Returns `chunk` if `memory` can encode that many tokens at once; None: its default size."""
    if chunk is None:
        return memory.default_chunk_size
    check_integer("chunk", chunk, 1, f"leave it out for {memory.default_chunk_size}")
    memory.check_chunk(chunk, "chunk")
    return chunk


def split_into_chunks(ids: np.ndarray, size: int) -> list[np.ndarray]:
    """Splits a passage int32 [n] into chunks of `size` tokens; the odd chunk is first."""
    edges = [*range(len(ids), 0, -size), 0][::-1]
    return [ids[a:b] for a, b in itertools.pairwise(edges)]


def split_row(
    row: ContextRow,
    memory: Memory,
    size: int,
    encode: Callable[[str], Sequence[int]],
    vocab_size: int,
    bos: Sequence[int] = (),
) -> list[list[np.ndarray]]:
    """Splits a row into chunks of up to `size` tokens, and lists the chunks with one number.

    Each chunk has its own number, or that of the chunk of the text that reads it
    (`Memory.by_chunk`).
    """
    if not memory.by_chunk:
        texts = passages(row, encode, vocab_size, bos)
        return [[chunk] for text in texts for chunk in split_into_chunks(text, size)]
    check_rows("context: a row", row, '[["a neighbour"], []], the passages of each chunk of a text')
    groups = [passages(group, encode, vocab_size) for group in row]
    return [[c for text in group for c in split_into_chunks(text, size)] for group in groups]


def encode(
    lm: InferenceModel,
    rows: Sequence[Sequence[Sequence[np.ndarray]]],
    *,
    batch_tokens: int | None = None,
    projected: bool = False,
    after: Contexts | None = None,
    query: jax.Array | None = None,
    rotation: Rotation | None = None,
) -> Contexts:
    """Encodes rows of chunks, or adds them to the contexts `after`.

    Args:
      lm: a model with a memory.
      rows: for each row lists of chunks, int32 [up to P] each (`split_into_chunks`). Chunks of one
        list have the same number; those of the next list have the next one.
      batch_tokens: number of tokens that are encoded at once; None: a size that suits the platform.
      projected: whether to store the keys and values of every reader layer instead of the encoder's
        states: faster to read, many times larger. Added chunks are stored as those of `after`.
      after: contexts of the same model.
      query: float32 [B, D] from `embed_queries`, for query-dependent memories; `after` is searched
        with it, too. None: the query of `after`, or none yet.
      rotation: the rotation of the text, for prefix memories.
    """
    if after is None:
        none = (0,) * len(rows)
        after = Contexts(None, none, none, lm.params)
    memory = lm.config.memory
    after.check(lm)
    after = dataclasses.replace(after, rope=lm.prefix_rope, memory=memory)
    if len(rows) != len(after.tokens):
        raise InputError(
            f"after has {len(after.tokens)} rows, and {len(rows)} rows are given; write [] for a"
            " row that gets nothing"
        )
    if memory.query_dependent and query is not None and after.query is not None:
        after = search(lm, after, query, batch_tokens=batch_tokens)
    added, whole = _add_chunks(memory, rows, after)
    if memory.query_dependent:
        query = after.query if query is None else query
        if query is None:
            return dataclasses.replace(whole, source=(*after.source, *added))
        source, added = (
            ((), (*after.source, *added)) if after.needs_query else (after.source, added)
        )
        added = _choose_paths(lm, added, query, batch_tokens)
        whole = dataclasses.replace(whole, source=(*source, *added), query=query)
    if not added:
        return whole
    if after.encoded is not None:
        projected = after.encoded.layers is not None
    options = {"batch_tokens": batch_tokens, "projected": projected, "rotation": rotation}
    encoded = _encode_into(lm, after.encoded, added, whole.shape, **options)
    return _with_encoded(whole, encoded)


def embed_queries(
    lm: InferenceModel, texts: Sequence[str | Sequence[int]], num_rows: int
) -> jax.Array:
    """Embeds questions for `search`: the first layer's states of their last tokens, float32 [B, D].

    Args:
      lm: the model.
      texts: a question for each row, as text or token ids.
      num_rows: rows of the contexts.
    """
    check_rows("query", texts, '["a question"], with an entry for each row')
    if len(texts) != num_rows:
        raise InputError(
            f"query={texts!r:.40} must be a list with one entry for each of the {num_rows} rows"
        )
    texts = [lm.encode(text) if isinstance(text, str) else text for text in texts]
    for number, ids in enumerate(texts):
        check_token_ids(f"query[{number}]", ids, lm.config.vocab_size)
    lengths = [len(text) for text in texts]
    if not all(lengths):
        raise InputError(
            f"query[{lengths.index(0)}] is empty: a context is searched for the last token of a"
            " question; give some text, or a memory with the policy right"
        )
    rows = len(texts) + padding_rows(lm.mesh, len(texts))
    tokens, ends = (
        np.zeros((rows, round_up_to_bucket(max(lengths))), np.int32),
        np.zeros(rows, np.int32),
    )
    for row, text in zip(tokens, texts, strict=False):
        row[: len(text)] = text
    ends[: len(texts)] = np.array(lengths) - 1
    rotation = lm.rotations(np.pad(lengths, (0, rows - len(texts)), "wrap"))
    return _embed(lm.model, lm.params, tokens, ends, rotation)[: len(texts)]


@functools.partial(InferenceJit, static_argnums=0)
def _embed(model: Decoder, params: dict, tokens, ends, rotation: Rotation) -> jax.Array:
    """Embeds texts [B, T] by their tokens at `ends` [B]: float32 [B, D]."""
    tokens = keep_rows(tokens, model.mesh)
    return model.apply({"params": params}, tokens, ends, rotation=rotation, method="embed_query")


def search(
    lm: InferenceModel,
    contexts: Contexts,
    query: jax.Array,
    *,
    batch_tokens: int | None = None,
) -> Contexts:
    """Encodes `contexts` for another `query` float32 [B, D].

    Every chunk is searched again, which takes one layer. If its chosen halves are the same down to
    some level, the states of the nodes above that level are kept and the rest is encoded again. A
    chunk whose length is no multiple of its number of leaves is encoded again as a whole, because
    its halves have unequal lengths.
    """
    chunks = _choose_paths(lm, contexts.source, query, batch_tokens)
    whole = dataclasses.replace(contexts, source=tuple(chunks), query=query)
    encoded, tree = contexts.encoded, lm.config.memory.tree
    changed: dict[int, list[Chunk]] = {}  # by the first level that changed
    for old, new in zip(contexts.source, chunks, strict=True):
        level = 1 if encoded is None else _first_change(old, new, tree.depth)
        if level is not None:
            changed.setdefault(level, []).append(_below_level(new, level, tree))
    for level, rest in sorted(changed.items()):
        encoded = _encode_into(
            *(lm, encoded, rest, whole.shape),
            batch_tokens=batch_tokens,
            tree=tree.below(level) if level > 1 else None,
            in_place=encoded is not contexts.encoded,
        )
    return _with_encoded(whole, encoded)


def _with_encoded(contexts: Contexts, encoded: EncodedContext) -> Contexts:
    """Returns `contexts` with these states, and with the number of chunks of each row."""
    encoded = dataclasses.replace(encoded, num_chunks=jnp.array(contexts.chunks, jnp.int32))
    return dataclasses.replace(contexts, encoded=encoded)


def _first_change(old: Chunk, new: Chunk, depth: int) -> int | None:
    """Returns the first level, from 1, at which another half is chosen; None: equal paths."""
    changed = np.flatnonzero(old.path != new.path)
    if not changed.size:
        return None
    return int(changed[0]) + 1 if len(new.tokens) % 2**depth == 0 else 1


def _below_level(chunk: Chunk, level: int, tree: Tree) -> Chunk:
    """Returns the part of a chunk without the nodes of all levels before `level`."""
    tokens = chunk.tokens
    for right in chunk.path[: level - 1]:
        middle = len(tokens) - len(tokens) // 2
        tokens = tokens[middle:] if right else tokens[:middle]
    # The states of the nodes above lie in the slots after these, and must not be overwritten.
    num_slots = tree.below(level).max_selected(len(tokens))
    path = chunk.path[level - 1 :]
    return dataclasses.replace(chunk, tokens=tokens, num_slots=num_slots, path=path)


def _add_chunks(memory: Memory, rows, after: Contexts) -> tuple[list[Chunk], Contexts]:
    """Returns the chunks of `rows`, with slots after those of `after`, and the new counts."""
    tokens, chunks = list(after.tokens), list(after.chunks)
    slots, added = list(after.slots or after.tokens), []
    for row, groups in enumerate(rows):
        for group in groups:
            for ids in group:
                num_slots = memory.num_slots(len(ids))
                added.append(Chunk(ids, row, chunks[row], slots[row], num_slots))
                tokens[row] += len(ids)
                slots[row] += num_slots
            chunks[row] += 1
    counts = {"tokens": tuple(tokens), "chunks": tuple(chunks), "slots": tuple(slots)}
    return added, dataclasses.replace(after, **counts)


# Batches of chunks


def _choose_paths(
    lm: InferenceModel, chunks: Sequence[Chunk], query: jax.Array, batch_tokens: int | None
) -> list[Chunk]:
    """Returns `chunks` with the paths that are chosen for the `query` [B, D] of their rows."""
    paths: list[np.ndarray | None] = [None] * len(chunks)
    batches = list(_batches(chunks, _tokens_at_once(batch_tokens), lm.mesh))
    results = [  # all batches are dispatched before the first result is waited for
        _choose(lm.model, lm.params, b.tokens, b.mask, query, b.rows, b.tags) for b in batches
    ]
    for batch, batch_paths in zip(batches, results, strict=True):
        for index, path in zip(batch.indices, distributed.gather(batch_paths), strict=False):
            paths[index] = path
    return [dataclasses.replace(c, path=p) for c, p in zip(chunks, paths, strict=True)]


def _encode_into(
    lm: InferenceModel,
    encoded: EncodedContext | None,
    chunks: Sequence[Chunk],
    shape: tuple[int, int],
    *,
    batch_tokens: int | None = None,
    projected: bool = False,
    tree: Any = None,
    in_place: bool = False,
    rotation: Rotation | None = None,
) -> EncodedContext:
    """Encodes `chunks` and writes their states into `encoded` [B, M, ..], or into a new one.

    Args:
      encoded: states of earlier chunks, or None.
      shape: minimum (B, M) of the result.
      tree: replaces the memory's tree.
      in_place: whether `encoded` may be overwritten; False: a copy is written.
      rotation: the rotation of the text, for prefix memories.
    """
    num_rows, num_slots = shape
    encoded = encoded and dataclasses.replace(encoded, num_chunks=None)
    memory, at_once = lm.config.memory, _tokens_at_once(batch_tokens)
    for batch in _ordered_batches(memory, chunks, at_once, lm.mesh):
        options = memory.select_inputs(
            after=functools.partial(_take_rows, encoded, batch.rows),
            rotation=rotation,
            numbers=batch.numbers[:, None],
            tags=lambda batch=batch: batch.tags[:, None],
            path=None if batch.path is None else batch.path[:, None],
        )
        new = _encode(lm.model, lm.params, batch.tokens, batch.mask, projected, tree, options)
        new = dataclasses.replace(new, num_chunks=None)
        if not in_place:
            num_slots = max(num_slots, _num_slots(encoded))
            encoded, in_place = _resize(lm.mesh, encoded, new, num_rows, num_slots), True
        encoded = _write(lm.mesh, encoded, new, batch.rows, batch.starts, batch.num_slots)
    return encoded


def _tokens_at_once(batch_tokens: int | None) -> int:
    """Returns `batch_tokens`, or by default a size that fills a matrix unit or fits CPU caches."""
    if batch_tokens is None:
        return 4096 if jax.default_backend() == "cpu" else 65_536
    check_integer("batch_tokens", batch_tokens, 1, "leave it out for the default")
    return int(batch_tokens)


@dataclasses.dataclass(frozen=True)
class _Batch:
    """R chunks of P tokens, and where their states go; filler rows are masked."""

    indices: list[int]  # in the list of all chunks, without filler
    tokens: np.ndarray  # int32 [R, P]
    mask: np.ndarray  # bool [R, P]
    rows: np.ndarray  # int32 [R]
    starts: np.ndarray  # int32 [R], the first slot in the row
    num_slots: np.ndarray  # int32 [R], maximum number of slots that the chunk fills
    numbers: np.ndarray  # int32 [R]
    path: np.ndarray | None  # bool [R, h - 1]

    @property
    def tags(self) -> np.ndarray:
        """Hashes uint32 [R] of each chunk's number and tokens, independent of its row."""
        rows = zip(self.tokens, self.mask, self.numbers)
        tags = [zlib.crc32(ids[mask].tobytes(), int(number)) for ids, mask, number in rows]
        return np.array(tags, np.uint32)


def _batches(chunks: Sequence[Chunk], at_once: int, mesh) -> Iterator[_Batch]:
    """Yields batches of chunks of similar length, so that few shapes are compiled."""
    groups: dict[int, list[int]] = {}
    longest = max((len(chunk.tokens) for chunk in chunks), default=0)
    for index, chunk in enumerate(chunks):
        width = min(round_up_to_bucket(len(chunk.tokens), 1, _MIN_WIDTH), longest)
        groups.setdefault(width, []).append(index)
    for width, group in sorted(groups.items()):
        max_rows = max(at_once // width, 1)
        for start in range(0, len(group), max_rows):
            yield _make_batch(chunks, group[start : start + max_rows], width, max_rows, mesh)


def _ordered_batches(
    memory: Memory, chunks: Sequence[Chunk], at_once: int, mesh
) -> Iterator[_Batch]:
    """Yields batches of all chunks; a prefix memory reads the chunks of a row in order."""
    if not memory.is_prefix:
        yield from _batches(chunks, at_once, mesh)
        return
    for number in sorted({chunk.number for chunk in chunks}):
        yield from _batches([c for c in chunks if c.number == number], at_once, mesh)


def _make_batch(
    chunks: Sequence[Chunk], indices: list[int], width: int, max_rows: int, mesh
) -> _Batch:
    # A power of two, so that few shapes are compiled, and equally many rows on all devices.
    num_rows = min(round_up_to_bucket(len(indices), 1, 1), max_rows)
    num_rows += padding_rows(mesh, num_rows)
    batch = [chunks[index] for index in indices]
    tokens, mask = np.zeros((num_rows, width), np.int32), np.zeros((num_rows, width), bool)
    places = np.zeros((4, num_rows), np.int32)
    for i, chunk in enumerate(batch):
        size = len(chunk.tokens)
        tokens[i, :size], mask[i, :size] = chunk.tokens, True
        places[:, i] = chunk.row, chunk.start, chunk.num_slots, chunk.number
    path = None
    if batch[0].path is not None:
        path = np.zeros((num_rows, len(batch[0].path)), bool)
        path[: len(batch)] = [chunk.path for chunk in batch]
    return _Batch(indices, tokens, mask, *places, path)


@functools.partial(InferenceJit, static_argnums=(0, 4, 5))
def _encode(
    model: Decoder, params: dict, tokens, mask, projected: bool, tree=None, options=None
) -> EncodedContext:
    """Encodes R rows of one chunk each."""
    tokens, mask = (keep_rows(x, model.mesh)[:, None] for x in (tokens, mask))
    options = {**(options or {}), **({} if tree is None else {"tree": tree})}
    encoded = model.apply({"params": params}, tokens, mask, method="encode", **options)
    if projected:
        encoded = model.config.memory.project_states(params, model.config, encoded)
    return encoded


@functools.partial(InferenceJit, static_argnums=0)
def _choose(model: Decoder, params: dict, tokens, mask, query, rows, tags) -> jax.Array:
    """Returns the paths bool [R, h - 1] of R rows of one chunk each, for `query` [B, D]."""
    tokens, mask, query = (keep_rows(x, model.mesh) for x in (tokens, mask, query[rows]))

    def choose(model):
        places = {"query": query, "tags": tags[:, None]}
        return model.encoder.choose(tokens[:, None], mask[:, None], **places)

    return model.apply({"params": params}, method=choose)[:, 0]


@jax.jit
def _take_rows(encoded: EncodedContext | None, rows) -> EncodedContext | None:
    return jax.tree.map(lambda x: x[rows], encoded)


def _num_slots(encoded: EncodedContext | None) -> int:
    return 0 if encoded is None else encoded.mask.shape[1]


@functools.partial(jax.jit, static_argnums=(0, 3, 4))
def _resize(
    mesh, encoded: EncodedContext | None, like: EncodedContext, num_rows: int, num_slots: int
) -> EncodedContext:
    """Returns a copy of `encoded` with `num_slots`, or an empty one with the dtypes of `like`."""

    def resize(kind, old=None):
        shape = list(kind.shape)
        shape[0], shape[token_axis(kind)] = num_rows, num_slots
        zeros = jnp.zeros(shape, kind.dtype)
        if old is not None:
            zeros = jax.lax.dynamic_update_slice(zeros, old, (0,) * old.ndim)
        return _with_layout(zeros, mesh)

    return jax.tree.map(resize, like) if encoded is None else jax.tree.map(resize, like, encoded)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _write(
    mesh, encoded: EncodedContext, new: EncodedContext, rows, starts, num_slots
) -> EncodedContext:
    """Writes the R chunks of `new` into these rows, from slot `starts` on, without padding.

    The rest of the `num_slots` [R] of each chunk is masked.
    """
    capacity, order = _num_slots(encoded), jnp.cumsum(new.mask, axis=1) - 1
    slots = jnp.where(new.mask, starts[:, None] + order, capacity)  # padding is dropped
    rows = rows[:, None]
    window = jnp.arange(new.mask.shape[1])
    window = jnp.where(window < num_slots[:, None], starts[:, None] + window, capacity)
    mask = encoded.mask.at[rows, window].set(False, mode="drop")
    encoded = dataclasses.replace(encoded, mask=mask)

    def write(old, part):
        if token_axis(old) == 1:
            array = old.at[rows, slots].set(part, mode="drop")
        else:  # the heads axis precedes the token axis
            array = old.at[rows, :, slots].set(part.swapaxes(1, 2), mode="drop")
        return _with_layout(array, mesh)

    return jax.tree.map(write, encoded, new)


def _with_layout(x: jax.Array, mesh) -> jax.Array:
    """Shards rows as those of texts and heads over `tensor`, if divisible; call it inside jit."""
    return keep_tokens(x, mesh) if token_axis(x) == 1 else cache_lib.keep_heads(x, mesh)
