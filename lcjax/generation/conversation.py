"""A running exchange: what was read stays read, and contexts may come in between turns.

talk = Conversation(lm, context=["a long document ..."])
print(talk.say("Who is the harbour master?"))
talk.add_context(["a passage that was found later"])
print(talk.say("And since when?"))
"""

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from lcjax.attention.landmark.tokens import Landmarks
from lcjax.checkpoints.tokenizer import inside
from lcjax.errors import InputError, whole_number
from lcjax.generation.contexts import Contexts, Row
from lcjax.generation.generate import Piece, prefill
from lcjax.generation.generate import Row as _Text
from lcjax.generation.language_model import LanguageModel
from lcjax.generation.sampling import Sampling, pick
from lcjax.generation.shapes import prefill_chunk_size, unpadded_chunks
from lcjax.generation.texts import token_ids
from lcjax.models import cache as cache_lib
from lcjax.parallel import distributed
from lcjax.parallel.sharding import padding_rows


class Conversation:
    """One text that a model and others write in turns, with a cache that lives as long as it.

    Turns are read when an answer is asked for, beside the context that there is by then: what was
    read earlier is not read again when a context is added. So a conversation equals reading all of
    it at once as long as its context stays the same. A memory that keeps what a question needs is
    searched for every turn, for the last token of the text or for the turn's `query`, and what is
    unchanged is not encoded again. Where a context stands
    before the text (`Memory.leads`), the text is read again behind one that has grown, and BOS
    stands before the context.

    `say` follows the model's chat format; `read` and `write` leave the format to the caller.
    """

    def __init__(
        self,
        lm: LanguageModel,
        *,
        context: Row | Contexts = (),
        length: int | None = None,
        projected: bool = False,
        prefill_chunk: int | None = None,
    ):
        """`context` and `projected` are those of `LanguageModel.encode_contexts`, for one row.

        `length` is the most tokens that the text may have, for which rotations are made and room is
        kept; None: what the model was trained with. `prefill_chunk` as in `generate`.
        """
        if Landmarks.read_by(lm.config.pattern) is not None:
            raise InputError(
                "model.pattern.type=landmark closes blocks with landmarks, which a conversation"
                " does not place between its turns; use LanguageModel.chat"
            )
        self.lm = lm
        self.length = lm.length or lm.config.max_length if length is None else length
        whole_number("length", self.length, 1)
        self._projected, self.context = projected, context
        if not isinstance(context, Contexts):
            self.context = lm.encode_contexts([context], projected=projected)
        self.messages: list[dict[str, str]] = []  # what `say` has sent and got
        self._chunk = prefill_chunk_size(prefill_chunk)
        self._start_over()

    @property
    def tokens(self) -> list[int]:
        """The whole text so far."""
        return self._ids.copy()

    def add_context(self, context: Row) -> None:
        """More to read beside the text, from the next turn on; only this is encoded."""
        self.context = self.lm.encode_contexts(
            [context], projected=self._projected, after=self.context
        )
        if self.lm.config.memory.leads:
            self._ids = self.context.follow(self._ids, self.lm.tokenizer.bos_id)
            self._forget()

    def read(self, text: str | Sequence[int]) -> None:
        """Goes on with a text or token ids; BOS, where the model expects one, comes first."""
        if isinstance(text, str):
            begins = not self.context.begins(1)[0]
            lm, inner = self.lm, bool(self._ids)
            text = inside(lm.tokenizer, text) if inner else lm.encode(text, begins=begins)
        self._ids += token_ids("text", text, self.lm.config.vocab_size).tolist()

    def write(
        self, sampling: Sampling = Sampling(), *, query: str | Sequence[int] | None = None
    ) -> str:
        """What the model goes on with.

        `query` is what a context is searched for, by its last token; None: the text so far, which
        in a chat ends with the template's own tokens, as it does in training.
        """
        return "".join(piece.text for piece in self.stream(sampling, query=query))

    def stream(
        self, sampling: Sampling = Sampling(), *, query: str | Sequence[int] | None = None
    ) -> Iterator[Piece]:
        """`write` piece by piece; all of it is part of the text, a stop string included."""
        self._check(len(self._ids), sampling.max_new_tokens)
        return self._stream(sampling, query)

    def say(
        self,
        message: str,
        sampling: Sampling = Sampling(),
        *,
        query: str | Sequence[int] | None = None,
    ) -> str:
        """The model's answer to the next message of a chat; `query` as in `write`.

        Where a chat template changes what was written before, all of it is read anew.
        """
        messages = [*self.messages, {"role": "user", "content": message}]
        text, tokenizer = self.lm.tokenizer.render_chat(messages), self.lm.tokenizer
        anew = self._shown is None or not text.startswith(self._shown)
        if anew:
            ids = list(tokenizer.encode(text, allow_special=True))
            ids = self.context.follow(ids, tokenizer.bos_id)
        else:  # the template writes its own end of a turn
            ids = self._ids[:-1] if self._ids[-1] in tokenizer.eos_ids else self._ids
            ids = ids + inside(tokenizer, text[len(self._shown) :], allow_special=True)
        self._check(len(ids), sampling.max_new_tokens)
        if anew:
            self._start_over()
        self._ids = ids
        answer = self.write(sampling, query=query)
        # A stop string stands in the text, but not in the chat.
        self._shown = None if self._cut else text + answer
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        return answer

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
        self._shown: str | None = None  # the chat so far as text, where the template goes on
        self._cut = False  # whether a stop string ended the last turn
        self._rotation = self.lm.rotation(self.length)
        self._rows = 1 + padding_rows(self.lm.mesh, 1)
        self._forget()

    def _forget(self) -> None:
        """Empties the cache; the text stays, and is read again."""
        self._read = 0  # of _ids, tokens in the cache; the last one never is
        lm, slots = self.lm, cache_lib.whole_blocks(self.length)
        self._cache = cache_lib.create(
            lm.model.config, self._rows, slots, chunk=self._chunk, mesh=lm.mesh
        )

    def _stream(self, sampling: Sampling, query: str | Sequence[int] | None) -> Iterator[Piece]:
        tokenizer = self.lm.tokenizer
        sampling.check_texts(1)
        # What a context keeps is chosen anew for each turn; what was read beside it stays read.
        asked = self._ids if query is None else query
        self.context = self.lm.search_contexts(self.context, [asked])
        key, eos = sampling.key(self._rows), jnp.array(tokenizer.eos_ids, jnp.int32)
        text = _Text(0, tokenizer, sampling)
        for count in range(sampling.max_new_tokens):
            picked = pick(self._read_on(), key, count, eos, sampling)
            token = int(distributed.gather(picked)[0])
            self._ids.append(token)
            piece = text.add(token)
            self._cut = text.finish == "stop" and token not in tokenizer.eos_ids
            if piece is not None:
                yield piece
            if text.finish:
                return

    def _read_on(self) -> jax.Array:
        """The logits after all of the text, of which the cache gets what it lacks.

        In pieces of few sizes and without padding, which would stand between turns for ever.
        """
        lm, memory = self.lm, self.context.rows(1, self._rows - 1)
        for size in unpadded_chunks(len(self._ids) - self._read, self._chunk):
            places = np.arange(self._read, self._read + size)
            tokens = np.array(self._ids[self._read : self._read + size], np.int32)
            tokens, places = (np.tile(x, (self._rows, 1)) for x in (tokens, places))
            logits, self._cache = prefill(
                lm.model, lm.params, self._cache, tokens, None, places, self._rotation,
                memory=memory,
            )  # fmt: skip
            self._read += size
        return logits
