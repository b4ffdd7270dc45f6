"""Conversations: earlier turns stay in the KV cache, and contexts can be added between turns.

talk = Conversation(lm, context=["a long document ..."])
print(talk.say("Who is the harbour master?"))
talk.add_context(["a passage that was found later"])
print(talk.say("And since when?"))

talk.save("harbour.talk")                           # Conversation.open goes on without reading

talk = Conversation(lm, retriever=lcjax.retrieval.Retriever.open("store"))
talk.say("Who is the harbour master?").passages     # what was read for this answer
"""

import copy
import dataclasses
import hashlib
import json
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lcjax.attention import Pattern
from lcjax.checkpoints.hf_config import announced_length
from lcjax.checkpoints.tokenizer import check_template_variables, encode_mid_text
from lcjax.errors import InputError, check_integer
from lcjax.files import atomic_file, sha256
from lcjax.generation.contexts import ContextRow, Contexts
from lcjax.generation.generate import Piece, RowText
from lcjax.generation.language_model import LanguageModel
from lcjax.generation.passages import (
    SEPARATOR,
    Retriever,
    Search,
    check_retriever,
    join_title,
    search,
)
from lcjax.generation.sampling import GeneratedText, Sampling, join_pieces, pick
from lcjax.generation.session import (
    Session,
    check_token_ids,
    chunk_of_cache,
    prefill_chunk_size,
)
from lcjax.models import cache as cache_lib
from lcjax.parallel import distributed
from lcjax.parallel.digest import weights_digest
from lcjax.parallel.sharding import padding_rows
from lcjax.storage import to_path

# Attributes of a conversation that a file has as they are, without the underscore.
_SAVED = (
    *("ids", "chat_text", "ends_with_stop", "num_generated", "num_read", "num_cut"),
    *("chunk", "variables", "allow_special", "projected"),
)
_FORMAT = 2  # of the file
_STATE = "conversation"  # the member of a file with all but the arrays of the cache
# Fields of a model that change no array of its cache.
_FREE = ("context_parallel", "context_group", "extended_length", "family", "remat")


def _digest_of(tree: Any) -> str:
    """Returns the SHA-256 of the arrays of a tree, and of its structure."""
    leaves, structure = jax.tree.flatten(tree)
    digest = hashlib.sha256(str(structure).encode())
    for leaf in leaves:
        digest.update(distributed.gather(leaf).tobytes())
    return digest.hexdigest()


def _described(name: str, value: Any) -> Any:
    """Returns JSON that differs if a field of a config does; of a file it has the content."""
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        inner = {field.name: _described(field.name, getattr(value, field.name)) for field in fields}
        return [type(value).__name__, inner]
    if name == "file" and value is not None:
        return sha256(to_path(value))
    return repr(value)


class Conversation:
    """One text that a model and a user write in turns, with one KV cache for all turns.

    A turn is read when an answer is generated, with the context at that time; earlier turns are not
    read again when a context is added. A conversation with a constant context therefore equals
    reading all of it at once. A memory whose encoding depends on a question is searched in every
    turn, with the last token of the text or with the turn's `query`; unchanged parts are not
    encoded again. For prefix memories (Activation Beacon, AutoCompressor), the text is read again
    after a context that has grown, and BOS precedes the context.

    A turn has no padding, so the end of its text is read in smaller chunks, and a cache policy with
    `chunk` cuts after these, too.

    A pattern for prompts only (vertical_slash, tri_shape, xattention, flex_prefill) chooses again
    in every turn, for the new text of the turn; each number of new tokens compiles a program.

    With a `retriever`, every message of `say` is the query of a search. A model with a memory adds
    new passages to the context; other models read all passages before the message, in the same
    turn.

    `say` follows the model's chat format; `read` and `write` leave the format to the caller. Every
    turn has other random draws, also with the same `Sampling`.
    """

    def __init__(
        self,
        lm: LanguageModel,
        *,
        context: ContextRow | Contexts = (),
        length: int | None = None,
        projected: bool = False,
        prefill_chunk: int | None = None,
        retriever: Retriever | None = None,
        k: int = 4,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        allow_special: bool = False,
    ):
        """Creates an empty conversation.

        Args:
          lm: the model. Models that read inserted tokens are not supported.
          context: one row of `LanguageModel.encode_contexts`, or its result.
          length: maximum number of tokens of the text. The cache has as many slots (fewer if the
            pattern sees fewer keys), and rotations are made for this length. None: the length of
            `lm` if it has one, else the length that the model reads with its method, as its export
            announces it.
          projected: as in `LanguageModel.encode_contexts`.
          prefill_chunk: as in `LanguageModel.generate`.
          retriever: finds passages for every message (`lcjax.generation.passages`).
          k: number of passages of a search.
          chat_template_kwargs: as in `LanguageModel.chat`, for all turns.
          allow_special: as in `LanguageModel.chat`.
        """
        if not isinstance(lm, LanguageModel):
            raise InputError(f"lm={lm!r:.40} must be a LanguageModel")
        if lm.config.pattern.inserts_tokens:
            kind = Pattern.get_choice_name(type(lm.config.pattern))
            raise InputError(
                f"model.pattern.type={kind} inserts tokens into texts, which a conversation does"
                " not do between its turns; use LanguageModel.chat"
            )
        self.lm = lm
        self._variables = check_template_variables(chat_template_kwargs)
        self._allow_special = allow_special
        self.length = lm.length or announced_length(lm.config) if length is None else length
        check_integer("length", self.length, 1)
        check_integer("k", k, 0)
        if retriever is not None:
            check_retriever(retriever)
            if lm.config.memory is not None and lm.config.memory.by_chunk:
                raise InputError(
                    "retriever: model.memory reads passages of its own for every"
                    f" {lm.config.memory.chunk} tokens of a text, and a conversation searches once"
                    " for a message; use RetrievalReader(lm, retriever, how='context')"
                )
        self._retriever, self._k, self._passages_read = retriever, k, set()
        self._projected, self.context = projected, context
        if not isinstance(context, Contexts):
            self.context = lm.encode_contexts([context], projected=projected)
        self.messages: list[dict[str, str]] = []  # of `say`
        self._num_generated = 0  # tokens of all turns, so that each has draws of its own
        chunk = prefill_chunk_size(prefill_chunk)
        chunk = chunk_of_cache(lm.config, chunk)
        self._chunk = self.length if lm.config.needs_whole_prompt else chunk
        self._start_over()

    @property
    def tokens(self) -> list[int]:
        """Token ids of the whole text so far."""
        return self._ids.copy()

    def copy(self) -> "Conversation":
        """Returns a conversation that goes on from here, independently of this one.

        It is the way back to this point: what is read later evicts nothing from it. Its cache is a
        copy, so the devices hold both.
        """
        other = copy.copy(self)
        other._ids, other.messages = self._ids.copy(), self.messages.copy()
        other._passages_read = self._passages_read.copy()
        cache = jax.tree.map(jnp.copy, self._session.cache)
        other._session = dataclasses.replace(self._session, cache=cache)
        return other

    def save(self, file: str | os.PathLike) -> None:
        """Writes the text and the cache to a file, with which `open` goes on without reading.

        With a mesh of several processes, all must call it; process 0 writes.

        Args:
          file: its path or URL; an existing file is replaced.

        Raises:
          InputError: the conversation has an encoded context.
        """
        if self.context.encoded is not None or self.context.needs_query:
            raise InputError(
                f"{file}: a conversation with an encoded context is not saved; keep its texts, or"
                " go on from a copy()"
            )
        try:
            json.dumps(self._variables)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"chat_template_kwargs={self._variables!r:.60} cannot be written to a file"
                f" ({error}); use text, numbers, lists and dicts"
            ) from None
        cache, arrays = cache_lib.state_of(
            self._session.cache, self._make_cache(cache_lib.abstract_cache)
        )
        state = {name: getattr(self, f"_{name}") for name in _SAVED} | {"format": _FORMAT}
        state |= {"length": self.length, "messages": self.messages, "cache": cache}
        state |= {"passages_read": sorted(self._passages_read), "made_by": self._made_by()}
        state["arrays"] = [(str(x.dtype), x.shape) for x in arrays]
        try:
            if distributed.is_main_process():
                text = np.frombuffer(json.dumps(state).encode(), np.uint8)
                # NumPy has no bfloat16 and no float8 in files.
                data = {str(number): np.ravel(x).view(np.uint8) for number, x in enumerate(arrays)}
                with atomic_file(file, "wb") as out:
                    np.savez(out, **{_STATE: text}, **data)
        finally:
            distributed.barrier("conversation")

    @classmethod
    def open(
        cls,
        lm: LanguageModel,
        file: str | os.PathLike,
        *,
        retriever: Retriever | None = None,
        k: int = 4,
    ) -> "Conversation":
        """Returns the conversation that `save` wrote.

        Args:
          lm: the model with which it was written, with the same method.
          file: its path or URL.
          retriever: as for a new conversation.
          k: as for a new conversation.

        Raises:
          InputError: the file is damaged or none of a conversation, or its model is another one.
        """
        try:
            with to_path(file).open("rb") as opened, np.load(opened) as data:
                state = json.loads(data[_STATE].tobytes())
                is_known = state["format"] == _FORMAT
                arrays = [
                    data[str(number)].view(jnp.dtype(dtype)).reshape(shape)
                    for number, (dtype, shape) in enumerate(state["arrays"] if is_known else ())
                ]
        except OSError as error:
            raise InputError(f"{file}: cannot be read ({error.strerror or error})") from error
        except (
            LookupError,
            TypeError,
            ValueError,
            EOFError,
            zipfile.BadZipFile,
            zlib.error,
        ) as error:
            raise InputError(
                f"{file}: no file of a conversation, or damaged ({error}); begin a new one"
            ) from error
        if not is_known:
            raise InputError(
                f"{file}: has format {state['format']!r:.20}, and this version reads {_FORMAT};"
                " open it with the version that wrote it"
            )
        options = {"chat_template_kwargs": state["variables"], "prefill_chunk": state["chunk"]}
        options |= {name: state[name] for name in ("allow_special", "length", "projected")}
        talk = cls(lm, retriever=retriever, k=k, **options)
        made_by = talk._made_by()
        others = [name for name, old in state["made_by"].items() if old != made_by.get(name)]
        if others:
            raise InputError(
                f"{file}: the conversation was written with another {', '.join(others)}; open it"
                " with the same model and method"
            )
        for name in _SAVED:
            setattr(talk, f"_{name}", state[name])
        talk.messages, talk._passages_read = state["messages"], set(state["passages_read"])
        # The empty cache is released before the other one takes its memory.
        talk._session.cache = empty = talk._make_cache(cache_lib.abstract_cache)
        cache = cache_lib.restore(state["cache"], arrays, empty, lm.mesh)
        talk._session = dataclasses.replace(talk._session, cache=cache)
        return talk

    def _made_by(self) -> dict[str, Any]:
        """Returns what the arrays of a cache depend on, by the name that an error gives it."""
        config, cache = self.lm.model.config, self._session.cache
        fields = (field.name for field in dataclasses.fields(config))
        return {
            "weights": weights_digest(self.lm.params),
            "tokenizer": self.lm.tokenizer.fingerprint,
            "mesh": [kind.parts for kind in cache.kinds],  # slots of devices have another order
            "rows": self._num_rows,
            "rope": _digest_of(self._session.rotation),
        } | {
            f"model.{name}": _described(name, getattr(config, name))
            for name in fields
            if name not in _FREE
        }

    def add_context(self, context: ContextRow) -> None:
        """Adds a context for the next turns; only the new context is encoded."""
        self.context = self.lm.encode_contexts(
            [context], projected=self._projected, after=self.context
        )
        if self.lm.prefix_rope is not None:
            self._ids = self.context.without_bos(self._ids, self.lm.tokenizer.bos_id)
            self._clear_cache()

    def read(self, text: str | Sequence[int]) -> None:
        """Appends a text or token ids; BOS precedes a text that begins the conversation."""
        lm = self.lm
        if isinstance(text, str) and self._ids:
            text = encode_mid_text(lm.tokenizer, text)
        elif isinstance(text, str):
            text = lm.encode(text, begins=not self.context.precede(1)[0])
        self._ids += check_token_ids("text", text, lm.config.vocab_size).tolist()

    def write(
        self, sampling: Sampling = Sampling(), *, query: str | Sequence[int] | None = None
    ) -> GeneratedText:
        """Generates the next part of the text and appends it.

        `query` is the question whose last token searches the context; None: the text so far, which
        in a chat ends with tokens of the chat template, as in training.
        """
        return join_pieces(self.stream(sampling, query=query), 1)[0]

    def stream(
        self, sampling: Sampling = Sampling(), *, query: str | Sequence[int] | None = None
    ) -> Iterator[Piece]:
        """Yields the text of `write` piece by piece.

        The pieces end before a stop string; the tokens of the conversation include it.
        """
        self._check(len(self._ids), sampling.max_new_tokens)
        return self._stream(sampling, query)

    def say(
        self,
        message: str,
        sampling: Sampling = Sampling(),
        *,
        query: str | Sequence[int] | None = None,
    ) -> GeneratedText:
        """Generates the answer to the next message of a chat; `query` as in `write`.

        If the chat template changes earlier turns, the whole text is read again. With a retriever,
        the `passages` of the answer hold its search.
        """
        searches: tuple[Search, ...] = ()
        if self._retriever is not None:
            (hits,) = search(self._retriever, [message], self._k)
            searches = (Search(message, hits),)
            message = self._with_passages(message, hits)
        messages = [*self.messages, {"role": "user", "content": message}]
        tokenizer = self.lm.tokenizer
        chat = tokenizer.encode_chat(messages, allow_special=self._allow_special, **self._variables)
        text, new_ids = chat.text, None
        if self._chat_text is not None and text.startswith(self._chat_text):
            new_ids = chat.after(len(self._chat_text))
        is_new = new_ids is None
        if is_new:
            ids = self.context.without_bos(chat.ids, tokenizer.bos_id)
        else:  # the template adds the end-of-turn token itself
            ids = self._ids[:-1] if self._ids[-1] in tokenizer.eos_ids else self._ids
            ids = ids + new_ids
        self._check(len(ids), sampling.max_new_tokens)
        if is_new:
            self._start_over()
        self._ids = ids
        self._chat_text = None  # if the turn fails, the next one reads all again
        answer = self.write(sampling, query=query)
        # A stop string is part of the text but not of the chat, so the next turn reads all again.
        self._chat_text = None if self._ends_with_stop else text + answer
        self.messages = [*messages, {"role": "assistant", "content": str(answer)}]
        return GeneratedText(answer, answer.ids, answer.finish, searches)

    def _with_passages(self, message: str, hits: Sequence[Any]) -> str:
        """Returns `message` after the passages of `hits`, or alone if a memory reads them."""
        texts = {hit.passage.id: join_title(hit.passage.title, hit.passage.text) for hit in hits}
        if self.lm.config.memory is None:
            return SEPARATOR.join([*reversed(texts.values()), message])
        new = [text for name, text in texts.items() if name not in self._passages_read]
        if new:
            self.add_context(new)
            self._passages_read |= set(texts)
        return message

    def _check(self, tokens: int, new: int) -> None:
        if not tokens:
            raise InputError("the conversation is empty; give it a text to go on with: read(text)")
        if tokens + new > self.length:
            raise InputError(
                f"length={self.length}: the conversation has {tokens} tokens and may get {new}"
                f" more; begin one with length={tokens + new} or more"
            )

    def _start_over(self) -> None:
        self._ids: list[int] = []
        self._chat_text: str | None = None  # the chat so far, if the template only appends to it
        self._ends_with_stop = False  # whether a stop string ended the last turn
        self._num_rows = 1 + padding_rows(self.lm.mesh, 1)
        self._clear_cache()

    def _clear_cache(self) -> None:
        """Empties the cache; the text is kept and read again later."""
        lm = self.lm
        cache = self._make_cache(cache_lib.create)
        self._session = Session(lm.model, lm.params, cache, lm.rotation(self.length))
        self._num_read = 0  # tokens of the text in the cache; the last one never is
        self._num_cut = 0  # tokens of these before the last end of a prompt

    def _make_cache(self, make: Callable[..., cache_lib.Cache]) -> cache_lib.Cache:
        """Returns the empty cache of the conversation, made by `create` or `abstract_cache`."""
        config, mesh = self.lm.model.config, self.lm.mesh
        slots = cache_lib.whole_blocks(self.length)
        options = {"chunk": self._chunk, "prompt": self._chunk, "mesh": mesh}
        return make(config, self._num_rows, slots, **options)

    def _stream(self, sampling: Sampling, query: str | Sequence[int] | None) -> Iterator[Piece]:
        tokenizer = self.lm.tokenizer
        sampling.check_texts(1)
        # Only the new turn reads the encoding for its question: text in the cache is kept.
        query = self._ids if query is None else query
        self.context = self.lm.search_contexts(self.context, [query])
        key = sampling.after(self._num_generated).key(self._num_rows)
        eos = jnp.array(tokenizer.eos_ids, jnp.int32)
        text = RowText(0, tokenizer, sampling)
        for step in range(sampling.max_new_tokens):
            picked = pick(self._read_text(), key, step, eos, sampling)
            token = int(distributed.gather(picked)[0])
            self._ids.append(token)
            self._num_generated += 1
            piece = text.add(token)
            self._ends_with_stop = text.ends_with_stop
            if piece is not None:
                yield piece
            if text.finish:
                return

    def _read_text(self) -> jax.Array:
        """Reads the tokens that are not in the cache yet; returns the logits after all of them."""
        self._session.memory = self.context.rows(1, self._num_rows - 1)
        ids = np.array(self._ids[self._num_read :], np.int32)
        is_turn = len(ids) > 1 or not self._num_read  # else a generated token
        slots = cache_lib.whole_blocks(self.length)
        if is_turn:
            # Rounded up to whole chunks, as each number compiles programs
            tokens = min(-(-len(ids) // self._chunk) * self._chunk, slots)
            cache = cache_lib.begin_prompt(self._session.cache, tokens, self.lm.mesh)
            self._session.cache = cache
        logits = self._session.read_ids(ids, self._num_read, self._chunk)
        self._num_read += len(ids)
        if is_turn:
            texts = [self._ids[self._num_cut : self._num_read]] * self._num_rows
            # At most `slots` tokens are generated before the next turn: how many is not known yet.
            settings = slots, 1, texts, self.lm.tokenizer
            self._session.end_prompt(*settings, start=self._num_cut)
            self._num_cut = self._num_read
        return logits
