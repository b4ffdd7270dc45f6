"""Contexts beside the window: texts are cut into chunks, encoded once, and kept for any use.

contexts = lm.encode_contexts([[passage, passage], [document], []])
contexts = lm.encode_contexts([[], [], [later_passage]], after=contexts)
lm.generate(prompts, context=contexts)

Chunks of all rows are encoded together, a few at a time, so memory is bounded however long a
context is; their states lie without gaps in one array with room for M tokens in each row.

Where what is kept depends on a question, contexts remember their tokens, and `search` finds it for
another question: only nodes that were not there before are encoded.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from lcjax.errors import InputError, whole_number
from lcjax.generation.context_store import Chunk, chosen, written
from lcjax.generation.shapes import bucketed
from lcjax.generation.texts import token_ids
from lcjax.memory import Tree
from lcjax.models import Decoder
from lcjax.models.memory import Encoded, Memory
from lcjax.parallel.sharding import keep_rows, padding_rows
from lcjax.rope import Rope, Rotation

# The context of one row: a document or passages, each a text or token ids.
Row = str | Sequence[int] | Sequence[str | Sequence[int]]


@dataclasses.dataclass(frozen=True)
class Contexts:
    """The encoded contexts of B rows, made by `encode`; nothing in it ever changes."""

    encoded: Encoded | None  # [B, M, ..]; None as long as nothing is encoded
    tokens: tuple[int, ...]  # of each row
    chunks: tuple[int, ...]  # of each row
    weights: dict = dataclasses.field(repr=False, compare=False)  # that they were encoded with
    filled: tuple[int, ...] | None = None  # places taken in each row; None: one for each token
    # Of a memory that asks: all text, and what is asked for, float32 [B, D], unless it is open.
    source: tuple[Chunk, ...] = dataclasses.field(default=(), repr=False, compare=False)
    query: jax.Array | None = dataclasses.field(default=None, repr=False, compare=False)
    rope: Rope | None = None  # that the decoder read them with, where they stand before the text
    memory: Memory | None = dataclasses.field(default=None, repr=False)  # that they were encoded by

    @property
    def waits(self) -> bool:
        """Whether there is text for which nothing has been asked, so that it is not encoded."""
        return bool(self.source) and self.query is None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows, and places that each of them needs."""
        return len(self.tokens), bucketed(max(self.filled or self.tokens))

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.encoded))

    def check(self, weights: dict, memory: Memory | None, rope: Rope | None) -> None:
        """Refuses a model with other `weights`, or one that would have encoded them differently."""
        if weights is not self.weights:
            raise InputError(
                "context was encoded by another model; use encode_contexts of the one that reads it"
            )
        if self.encoded is None and not self.source:
            return
        if memory is None or memory.encodes_as(self.memory) != self.memory:
            raise InputError(
                f"context was encoded with {_difference(self.memory, memory)}; use encode_contexts"
                " of the model, as with_method gives it, that reads it"
            )
        if self.encoded is not None and rope != self.rope:
            raise InputError(
                f"context was read with rope {self.rope}, and the text behind it is read with rope"
                f" {rope}; use encode_contexts of the model, as with_method gives it, that reads it"
            )

    def begins(self, count: int) -> list[bool]:
        """Which of `count` texts begin here: those before which a context stands."""
        if self.rope is None:
            return [False] * count
        tokens = self.tokens * count if len(self.tokens) == 1 else self.tokens
        return [row < len(tokens) and tokens[row] > 0 for row in range(count)]

    def follow(self, ids: list[int], bos: int | None) -> list[int]:
        """`ids` of one text without the BOS they begin with, where the text begins here."""
        if not self.begins(1)[0] or bos not in ids[:2]:
            return ids
        return ids[ids.index(bos) + 1 :]  # perhaps behind sentencepiece's blank

    def repeated(self, count: int) -> "Contexts":
        """One row of contexts as `count` of them; as many stay as they are."""
        if len(self.tokens) != 1 or count == 1:
            return self
        source = tuple(
            dataclasses.replace(chunk, row=row) for row in range(count) for chunk in self.source
        )
        index = np.zeros(count, np.int32)
        encoded, query = jax.tree.map(lambda x: x[index], (self.encoded, self.query))
        counts = {name: getattr(self, name) * count for name in ("tokens", "chunks", "filled")}
        return dataclasses.replace(self, encoded=encoded, source=source, query=query, **counts)

    def rows(self, count: int, filler: int) -> Encoded | None:
        """What `count` texts read, and `filler` rows like the first; one row serves all texts."""
        if len(self.tokens) not in (1, count):
            raise InputError(
                f"context has {len(self.tokens)} rows for {count} texts; give a list of passages"
                " for each text, [] where there are none, or one row for all"
            )
        wanted = [0] * (count + filler) if len(self.tokens) == 1 else [*range(count)] + [0] * filler
        if self.waits:
            raise InputError(
                "context: nothing has been asked of it yet, and model.memory.policy keeps what a"
                " question needs; give encode_contexts or search_contexts a query"
            )
        if self.encoded is None or wanted == [*range(len(self.tokens))]:
            return self.encoded
        return jax.tree.map(lambda x: x[np.array(wanted)], self.encoded)


def _difference(encoded: Memory, reads: Memory | None) -> str:
    """In which settings two memories differ, for a message."""
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
    row: Row, encode: Callable[[str], Sequence[int]], vocab_size: int, begin: Sequence[int] = ()
) -> list[np.ndarray]:
    """Token ids int32 of every passage of a row; before the first one, if a text, stands `begin`.

    Token ids are taken as they are.
    """
    if isinstance(row, str) or (len(row) and not isinstance(row[0], str) and np.isscalar(row[0])):
        row = [row]  # one document
    name = "context: a passage"
    found = [token_ids(name, encode(p) if isinstance(p, str) else p, vocab_size) for p in row]
    first = next((i for i, ids in enumerate(found) if len(ids)), None)
    if first is not None and isinstance(row[first], str):
        found[first] = np.concatenate([np.array(begin, np.int32), found[first]])
    return found


def context_chunk_size(memory: Memory, wanted: int | None) -> int:
    """Tokens of the chunks that long texts are cut into; None: what `memory` was trained with."""
    if wanted is None:
        return memory.usual
    whole_number("chunk", wanted, 1, f"leave it out for {memory.usual}")
    memory.check_chunk(wanted, "chunk")
    return wanted


def cut(ids: np.ndarray, size: int) -> list[np.ndarray]:
    """A passage in chunks of `size` tokens; the odd one is first."""
    edges = [*range(len(ids), 0, -size), 0][::-1]
    return [ids[a:b] for a, b in itertools.pairwise(edges)]


def encode(
    model: Decoder,
    params: dict,
    rows: Sequence[Sequence[np.ndarray]],
    *,
    batch_tokens: int | None = None,
    projected: bool = False,
    after: Contexts | None = None,
    query: jax.Array | None = None,
    rotation: Rotation | None = None,
    rope: Rope | None = None,
) -> Contexts:
    """The contexts of rows of chunks (`cut`), or `after` with these chunks added.

    Args:
      batch_tokens: tokens that are encoded at once; None: what suits the platform.
      projected: keep the keys and values of every reading layer instead of the encoder's states:
        faster to read, many times larger. `after` says it for chunks that are added.
      query: of a memory that asks, what `Decoder.asked` says of each row, float32 [B, D], for
        which `after` is searched too; None: as `after` was asked, or left open.
      rotation: that of the text, for memories that lead it; it is noted by the `rope` it is of.
    """
    if after is None:
        none = (0,) * len(rows)
        after = Contexts(None, none, none, params)
    memory = model.config.memory
    after.check(params, memory, rope)
    after = dataclasses.replace(after, rope=rope, memory=memory)
    if len(rows) != len(after.tokens):
        raise InputError(
            f"after: contexts of {len(after.tokens)} rows can be extended by as many, and"
            f" {len(rows)} are given; write [] for a row that gets nothing"
        )
    if memory.asks and query is not None and after.query is not None:
        after = search(model, params, after, query, batch_tokens=batch_tokens)
    added, whole = _placed(memory, rows, after)
    if memory.asks:
        query = after.query if query is None else query
        if query is None:
            return dataclasses.replace(whole, source=(*after.source, *added))
        kept, added = ((), (*after.source, *added)) if after.waits else (after.source, added)
        added = chosen(model, params, added, query, batch_tokens)
        whole = dataclasses.replace(whole, source=(*kept, *added), query=query)
    if not added:
        return whole
    if after.encoded is not None:
        projected = after.encoded.layers is not None
    options = {"batch_tokens": batch_tokens, "projected": projected, "rotation": rotation}
    return _counted(
        model, whole, written(model, params, after.encoded, added, whole.shape, **options)
    )


def ask(
    model: Decoder,
    params: dict,
    texts: Sequence[Sequence[int]],
    rotations: Callable[[np.ndarray], Rotation],
) -> jax.Array:
    """What the last token of each text asks contexts for: float32 [B, D].

    `rotations(lengths)` is the rotation of texts of these lengths, shared or stacked.
    """
    for number, ids in enumerate(texts):
        token_ids(f"query[{number}]", ids, model.config.vocab_size)
    lengths = [len(own) for own in texts]
    if not all(lengths):
        raise InputError(
            f"query[{lengths.index(0)}] is empty: a context is searched for the last token of a"
            " question; give some text, or a memory with the policy right"
        )
    rows = len(texts) + padding_rows(model.mesh, len(texts))
    tokens, ends = np.zeros((rows, bucketed(max(lengths))), np.int32), np.zeros(rows, np.int32)
    for row, own in zip(tokens, texts, strict=False):
        row[: len(own)] = own
    ends[: len(texts)] = np.array(lengths) - 1
    rotation = rotations(np.pad(lengths, (0, rows - len(texts)), "wrap"))
    return _ask(model, params, tokens, ends, rotation)[: len(texts)]


@functools.partial(jax.jit, static_argnums=0)
def _ask(model: Decoder, params: dict, tokens, ends, rotation: Rotation) -> jax.Array:
    """Of texts [B, T] at their tokens `ends` [B]."""
    tokens = keep_rows(tokens, model.mesh)
    return model.apply({"params": params}, tokens, ends, rotation=rotation, method="asked")


def search(
    model: Decoder,
    params: dict,
    contexts: Contexts,
    query: jax.Array,
    *,
    batch_tokens: int | None = None,
) -> Contexts:
    """`contexts` with what they keep for another `query`, float32 [B, D].

    Every chunk is searched again, by one layer. Of a chunk whose halves are chosen as before down
    to some level, what is kept of the nodes above it stays; the rest of it is encoded anew (all of
    a chunk that is no multiple of its leaves, since halves of it are not equally long).
    """
    found = chosen(model, params, contexts.source, query, batch_tokens)
    whole = dataclasses.replace(contexts, source=tuple(found), query=query)
    kept, tree = contexts.encoded, model.config.memory.tree
    levels: dict[int, list[Chunk]] = {}
    for old, new in zip(contexts.source, found, strict=True):
        level = 1 if kept is None else _first_change(old, new, tree.depth)
        if level is not None:
            levels.setdefault(level, []).append(_rest(new, level, tree))
    for level, chunks in sorted(levels.items()):
        kept = written(
            *(model, params, kept, chunks, whole.shape),
            batch_tokens=batch_tokens,
            tree=tree.below(level) if level > 1 else None,
            owned=kept is not contexts.encoded,
        )
    return _counted(model, whole, kept)


def _counted(model: Decoder, whole: Contexts, kept: Encoded) -> Contexts:
    """`whole` with what is kept of its text, and how many chunks that is where it matters."""
    if model.config.memory.ordered:
        kept = dataclasses.replace(kept, chunks=jnp.array(whole.chunks, jnp.int32))
    return dataclasses.replace(whole, encoded=kept)


def _first_change(old: Chunk, new: Chunk, depth: int) -> int | None:
    """The level from 1 at which another half is chosen; None: at none."""
    changed = np.flatnonzero(old.path != new.path)
    if not changed.size:
        return None
    return int(changed[0]) + 1 if len(new.tokens) % 2**depth == 0 else 1


def _rest(chunk: Chunk, level: int, tree: Tree) -> Chunk:
    """What remains of a chunk where nodes have been preserved at all levels before `level`."""
    tokens = chunk.tokens
    for right in chunk.path[: level - 1]:
        middle = len(tokens) - len(tokens) // 2
        tokens = tokens[middle:] if right else tokens[:middle]
    # What is kept of the nodes above stands behind its own, and must stay.
    room = tree.below(level).kept(len(tokens))
    return dataclasses.replace(chunk, tokens=tokens, room=room, path=chunk.path[level - 1 :])


def _placed(memory: Memory, rows, after: Contexts) -> tuple[list[Chunk], Contexts]:
    """The chunks of `rows` with their places behind `after`, which is counted on."""
    tokens, chunks = list(after.tokens), list(after.chunks)
    filled, added = list(after.filled or after.tokens), []
    for row, own in enumerate(rows):
        for ids in filter(len, own):
            room = memory.room(len(ids))
            added.append(Chunk(ids, row, chunks[row], filled[row], room))
            tokens[row] += len(ids)
            chunks[row] += 1
            filled[row] += room
    counts = {"tokens": tuple(tokens), "chunks": tuple(chunks), "filled": tuple(filled)}
    return added, dataclasses.replace(after, **counts)
