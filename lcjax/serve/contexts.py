"""Contexts that requests name by id: encoded once by a memory, or read once into a KV cache."""

import collections
import dataclasses
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from lcjax.errors import InputError
from lcjax.generation.contexts import ContextRow, Contexts
from lcjax.generation.language_model import LanguageModel
from lcjax.generation.session import CachedPrefix, check_token_ids
from lcjax.generation.shared_prefix import read_prefix


class NotFoundError(Exception):
    """A request names a context or a model that the server does not have."""


@dataclasses.dataclass(frozen=True)
class Context:
    """A context for any number of requests.

    Attributes:
      name: the client's name for it.
      tokens: number of tokens.
      ids: token ids with which every prompt begins, for a model without a memory.
      prefix: the KV cache of `ids`; None if prompts have to be read in full.
      encoded: the encoded context, for a model with a memory.
    """

    name: str | None
    tokens: int
    ids: tuple[int, ...] = ()
    prefix: CachedPrefix | None = None
    encoded: Contexts | None = None
    id: str = dataclasses.field(default_factory=lambda: f"ctx-{uuid.uuid4().hex}")
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    @property
    def nbytes(self) -> int:
        """Bytes on the devices."""
        if self.encoded is not None:
            return self.encoded.nbytes
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.prefix and self.prefix.cache))

    @property
    def options(self) -> dict[str, Any]:
        """Options of `LanguageModel.stream` for prompts with this context."""
        if self.encoded is not None:
            return {"context": self.encoded}
        return {} if self.prefix is None else {"prefix": self.prefix}

    @property
    def precedes_text(self) -> bool:
        """Whether the text continues the context, so that BOS precedes the context instead."""
        return bool(self.ids) or (self.encoded is not None and self.encoded.precede(1)[0])

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "context",
            "created": self.created,
            "name": self.name,
            "tokens": self.tokens,
            "bytes": self.nbytes,
            "kind": "memory" if self.encoded is not None else "prefix",
            "cached": self.encoded is not None or self.prefix is not None,
        }


def make_context(
    lm: LanguageModel, source: ContextRow, name: str | None, most_tokens: int
) -> Context:
    """Encodes a text, passages or token ids; a model without a memory reads only a single text.

    Raises:
      InputError: the source is empty or too long, or does not fit the model.
    """
    if lm.config.memory is not None:
        encoded = lm.encode_contexts([source])
        if not encoded.tokens[0]:
            raise InputError("the context has no tokens; give a text, passages or token ids")
        return Context(name, encoded.tokens[0], encoded=encoded)
    if isinstance(source, Sequence) and not isinstance(source, str):
        if not all(isinstance(token, int) for token in source):
            raise InputError(
                "this model has no memory: the context is read before the prompt, and must be one"
                " text (or one list of token ids), not passages"
            )
        ids = check_token_ids("tokens", source, lm.config.vocab_size).tolist()
    else:
        ids = lm.encode(source)
    if not 0 < len(ids) < most_tokens:
        raise InputError(
            f"the context has {len(ids)} tokens, and this server takes from 1 to {most_tokens - 1}"
            " with a prompt after them; start it with a larger --length"
        )
    # The prefix lacks the last token, because a prompt must have a token after its prefix.
    return Context(name, len(ids), tuple(ids), read_prefix(lm, ids[:-1]))


class ContextStore:
    """The contexts of a server; the least recently used ones are dropped for new ones.

    Requests are read in threads, so a lock guards the contexts.
    """

    def __init__(self, most: int, most_bytes: float):
        self._most, self._most_bytes = most, most_bytes
        self._contexts: collections.OrderedDict[str, Context] = collections.OrderedDict()
        self._lock = threading.Lock()

    def add(self, context: Context) -> None:
        """Adds a context.

        Raises:
          InputError: the context alone exceeds the limit of all contexts.
        """
        if context.nbytes > self._most_bytes:
            raise InputError(
                f"the context takes {context.nbytes / 1e9:.3g} GB, and all contexts of this server"
                f" may take {self._most_bytes / 1e9:.3g}; start it with a larger --max_context_gb"
            )
        with self._lock:
            contexts = self._contexts
            contexts[context.id] = context
            while (
                len(contexts) > self._most
                or sum(c.nbytes for c in contexts.values()) > self._most_bytes
            ):
                contexts.popitem(last=False)

    def get(self, name: str) -> Context:
        """Returns a context, which becomes the most recently used one."""
        with self._lock:
            context = self._contexts.pop(name, None)
            if context is not None:
                self._contexts[name] = context
                return context
        raise self._not_found(name)

    def delete(self, name: str) -> None:
        with self._lock:
            if self._contexts.pop(name, None) is not None:
                return
        raise self._not_found(name)

    def _not_found(self, name: str) -> NotFoundError:
        return NotFoundError(
            f"context={name!r:.80} does not exist: it was never here, was deleted, or dropped"
            f" for newer ones ({self._most} contexts or {self._most_bytes / 1e9:.3g} GB in"
            " all); POST it to /v1/contexts again"
        )

    def __iter__(self) -> Iterator[Context]:
        with self._lock:
            return iter(list(self._contexts.values()))
