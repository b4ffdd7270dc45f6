"""A model ready for use: `LanguageModel.load(...)` reads, scores and writes text.

lm = LanguageModel.load("smollm2-135m-instruct", rope=Yarn(factor=4))
print(lm.chat("What is a dog?"))
"""

import copy
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Unpack

import jax
import numpy as np

from lcjax.attention import Landmark, Pattern
from lcjax.checkpoints import Tokenizer
from lcjax.checkpoints.build import ModelSection, Settings, build, resolve_rope
from lcjax.errors import InputError, whole_number
from lcjax.generation import generate as generation
from lcjax.generation.contexts import Contexts, Row, ask, context_chunk_size, cut, passages, search
from lcjax.generation.contexts import encode as encode_chunks
from lcjax.generation.continuations import Continuation, by_rows, check, scored
from lcjax.generation.generate import Piece
from lcjax.generation.landmark_nll import landmark_nll
from lcjax.generation.mixture import Mixture
from lcjax.generation.prefix import Prefix
from lcjax.generation.sampling import Sampling, Written, written
from lcjax.generation.texts import rows_of_tokens, text_nll
from lcjax.models import Decoder, unstack_layers, unstack_layers_in_place
from lcjax.models.memory import Encoded, Memory, check_memory
from lcjax.parallel.sharding import Mesh, make_mesh, padding_rows
from lcjax.rope import Default, Rope, Rotation, stack_rotations


class LanguageModel:
    """Weights, tokenizer and method together; `with_method` swaps the method, not the weights.

    Layers are kept apart (`scan_layers=False`): a scanned layer copies its weights, and its part of
    the cache, out of the stack for every token.
    """

    def __init__(
        self, model: Decoder, params: dict, tokenizer: Tokenizer, *, length: int | None = None
    ):
        """`length` fixes the tokens that rotations are made for; each call's own if None.

        Stacked layers are copied apart, since `params` are the caller's; `load` makes no copy. On
        the mesh of `model` the parameters must lie as `lcjax.parallel.sharding.param_shardings`
        says.
        """
        config = model.config.for_inference()
        self.config, self.tokenizer, self.length = config, tokenizer, length
        if config.stacked:
            params = unstack_layers(params, config)
        config = config.replace(scan_layers=False)
        self.params = params
        # The rotation is an argument of every call: methods share one compiled function.
        self.model = Decoder(config.replace(rope=Default(theta=10_000.0)), model.mesh)
        self._rotations: dict[int, Rotation] = {}

    @classmethod
    def load(
        cls,
        source: str | ModelSection,
        *,
        mesh: Mesh | jax.sharding.Mesh | None = None,
        **settings: Unpack[Settings],
    ) -> "LanguageModel":
        """Opens a checkpoint by path or name with the fields of `ModelSection`, or a section.

        `mesh` spreads weights, rows and caches over devices (`Mesh(tensor=8, fsdp=1)`, or one of
        JAX's with the axes data, fsdp and tensor); everything is on the default device if None.
        """
        if isinstance(source, ModelSection):
            source = dataclasses.replace(source, **settings)
        else:
            source = ModelSection(path=str(source), **settings)
        model, params, tokenizer = build(
            source, make_mesh(mesh) if isinstance(mesh, Mesh) else mesh
        )
        config = model.config
        if config.stacked:
            unstack_layers_in_place(params, config)
        return cls(Decoder(config.replace(scan_layers=False), model.mesh), params, tokenizer)

    @property
    def mesh(self) -> jax.sharding.Mesh | None:
        """Whose devices share weights, rows and caches; None: all is on one device."""
        return self.model.mesh

    @property
    def follows_length(self) -> bool:
        """Whether `rotation` changes with the length of a request."""
        return self.config.rope.depends_on_length or self.config.pattern.depends_on_length

    def with_method(
        self,
        *,
        rope: Rope | None = None,
        pattern: Pattern | None = None,
        memory: Memory | None = None,
        length: int | None = None,
    ) -> "LanguageModel":
        """The same weights under another position method or pattern, set up for `length`.

        `memory` is that of `config` with other settings, such as CEPE's `trained_context`.
        """
        other = copy.copy(self)
        other.length, other._rotations = length, {}
        changes: dict[str, Any] = {}
        if rope is not None:
            changes["rope"] = resolve_rope(rope, self.config)
        if pattern is not None:
            changes["pattern"] = pattern.for_inference()
        if memory is not None:
            check_memory(self.config.memory)
            changes["memory"] = memory.for_inference()
        other.config = self.config.replace(**changes)
        if other.config.rope.learned and "rope" not in self.params:
            raise InputError(
                f"rope type {other.config.rope.type} is learned, and this checkpoint has no"
                " weights for it; train it first, or load a checkpoint that has them"
            )
        model = self.model
        kept = {name: getattr(other.config, name) for name in ("pattern", "memory")}
        other.model = Decoder(model.config.replace(**kept), model.mesh)
        return other

    def rotation(self, length: int) -> Rotation:
        """What queries and keys are rotated with in a request of `length` tokens."""
        length, rope = max(length, self.length or 0), self.config.rope
        if length not in self._rotations:
            # A learned rope solves a differential equation for it.
            learned = self.params.get("rope")
            rotation = rope.rotation(self.config.rotary_dim, length, learned)
            self._rotations[length] = self.config.pattern.at_length(rotation, length)
        return self._rotations[length]

    def rotations(self, lengths: Sequence[int]) -> Rotation:
        """That of a batch of requests of so many tokens: one for all, or stacked where they differ.

        A row is rotated for its own length, so its results do not depend on the other rows.
        """
        lengths = [max(int(length), self.length or 0) for length in lengths]
        if not self.follows_length or len(set(lengths)) == 1:
            return self.rotation(max(lengths))
        return stack_rotations([self.rotation(length) for length in lengths])

    def encode_contexts(
        self,
        contexts: Sequence[Row],
        *,
        chunk: int | None = None,
        batch_tokens: int | None = None,
        projected: bool = False,
        after: Contexts | None = None,
        query: Sequence[str | Sequence[int]] | None = None,
    ) -> Contexts:
        """What lies beside the window of every row, encoded once, for any number of calls.

        Args:
          contexts: for each row a document, or a list of passages (each a text, or token ids);
            every passage begins a chunk, and long ones are cut into several. Where the memory
            stands before the text (Activation Beacon, AutoCompressor), the first text of a row gets
            BOS if the model expects one, and the text behind it none; token ids stay as they are.
          chunk: tokens of the chunks that long texts are cut into; None: what the model's memory
            was trained with (CEPE: 256, SharedLLM: 1,024). Shorter texts are shorter chunks.
          batch_tokens: tokens that are encoded at once, which bounds the memory; None: what suits
            the platform.
          projected: keep the keys and values of every layer that reads contexts: faster to read,
            many times larger.
          after: contexts to which these chunks are added; what it holds is not encoded again.
          query: what is asked of each row (text or token ids), of its last token, for a memory that
            keeps what a question needs; None: as `after` was asked, or else every call asks for
            itself. `search_contexts` asks again.
        """
        if isinstance(contexts, str):
            raise InputError(f"context={contexts[:20]!r} must be a list with one entry per row")
        memory = self.config.memory
        if memory is None and not any(len(row) for row in contexts):
            return Contexts(None, *[(0,) * len(contexts)] * 2, self.params)
        check_memory(memory)
        size = context_chunk_size(memory, chunk)
        encode, vocab, count = self.tokenizer.encode, self.config.vocab_size, len(contexts)
        begin = [self.tokenizer.bos_id] if memory.leads and self.tokenizer.add_bos else []
        begun = [False] * count if after is None else after.begins(count)
        texts = [
            passages(row, encode, vocab, () if there else begin)
            for row, there in zip(contexts, begun, strict=True)
        ]
        rows = [[chunk for text in row for chunk in cut(text, size)] for row in texts]
        asked = None if query is None or not memory.asks else self._asked(query, len(rows))
        return encode_chunks(
            self.model, self.params, rows,
            batch_tokens=batch_tokens, projected=projected, after=after, query=asked,
            rotation=self.rotation(size) if memory.leads else None, rope=self._leading_rope,
        )  # fmt: skip

    def search_contexts(
        self,
        contexts: Contexts,
        query: Sequence[str | Sequence[int]],
        *,
        batch_tokens: int | None = None,
    ) -> Contexts:
        """`contexts` with what they keep for another question, one for each row.

        Only nodes that were not there before are encoded; a memory that does not ask keeps all as
        it is. One row of contexts serves many questions.
        """
        contexts.check(self.params, self.config.memory, self._leading_rope)
        if not contexts.source:
            return contexts
        contexts = contexts.repeated(len(query))
        asked = self._asked(query, len(contexts.tokens))
        return search(self.model, self.params, contexts, asked, batch_tokens=batch_tokens)

    def _asked(self, texts: Sequence[str | Sequence[int]], rows: int) -> jax.Array:
        """What texts ask contexts for: float32 [B, D]."""
        if isinstance(texts, str) or len(texts) != rows:
            raise InputError(
                f"query={texts!r:.40} must be a list with one entry for each of the {rows} rows"
            )
        ids = [self.encode(text) if isinstance(text, str) else text for text in texts]
        return ask(self.model, self.params, ids, self.rotations)

    @property
    def _leading_rope(self) -> Rope | None:
        """What turns the windows before a text; None where no memory stands there."""
        memory = self.config.memory
        return self.config.rope if memory is not None and memory.leads else None

    def _encoded(self, context: Contexts | Sequence[Row] | None) -> Contexts | None:
        """`context`, encoded if it is not yet; None if there is none."""
        if context is None or (isinstance(context, list | tuple) and not context):
            return None
        return context if isinstance(context, Contexts) else self.encode_contexts(context)

    def _memory(
        self, context: Contexts | Sequence[Row] | None, texts: Sequence[Sequence[int]]
    ) -> Encoded | None:
        """What `texts` read, those that fill up the mesh included; None without a context."""
        if (context := self._encoded(context)) is None:
            return None
        context.check(self.params, self.config.memory, self._leading_rope)
        if context.waits:
            context = self.search_contexts(context, texts)
        return context.rows(len(texts), padding_rows(self.mesh, len(texts)))

    def nll(
        self,
        tokens: np.ndarray,
        *,
        first: int = 1,
        lengths: np.ndarray | None = None,
        context: Contexts | Sequence[Row] | None = None,
    ) -> np.ndarray:
        """-log p(tokens[t] | tokens[:t]), float32 [B, T]; 0 for t < first and past `lengths`.

        A model with landmarks reads them among the tokens, in chunks, and retrieves what was before
        (`lcjax.generation.landmark_nll`).

        Args:
          tokens: int [B, T], padded on the right.
          first: the first scored position, at least 1; only from there logits are computed.
          lengths: int [B], tokens of each row that count; all if None. What stands behind them is
            not read: a row has the scores that it has alone.
          context: what every row reads beside its tokens, as `encode_contexts` takes or gives it.
            Where nothing has been asked of it, it is searched for the token before `first`.

        Raises:
          InputError: `tokens` are not ids of the vocabulary, or `lengths` or `first` do not fit.
        """
        self.config.pattern.check_scores()
        tokens, lengths = rows_of_tokens(tokens, lengths, self.config.vocab_size)
        length = tokens.shape[1]
        whole_number("first", first, 1)
        if first >= length:
            raise InputError(f"first={first} must lie between 1 and the length {length} - 1")
        memory = self._memory(
            context, [row[: max(min(first, n), 1)] for row, n in zip(tokens, lengths)]
        )
        score = landmark_nll if isinstance(self.config.pattern, Landmark) else text_nll
        scored = score(self.model, self.params, tokens, lengths, self.rotations, first, memory)
        return np.pad(scored, [(0, 0), (first, 0)])

    def continuations(
        self,
        prompts: Sequence[Sequence[int]],
        continuations: Sequence[Sequence[Sequence[int]]],
        *,
        context: Contexts | Sequence[Row] | None = None,
        prefix: Prefix | None = None,
    ) -> list[list[Continuation]]:
        """What it says of each continuation of each prompt (token ids), the prompt read once.

        `context` is what every prompt reads beside it, as in `generate`; `prefix` as in `stream`.
        """
        self.config.pattern.check_scores()
        if prefix is not None:
            prefix.check(self.config.pattern, prompts, context=context, exact=False)
        if isinstance(self.config.pattern, Landmark):
            more = {"context": context}
            nll, stream = (functools.partial(f, **more) for f in (self.nll, self.stream))
            options = {"follows_length": self.follows_length}
            check(prompts, continuations, self.config.vocab_size)
            return by_rows(nll, stream, prompts, continuations, **options)
        memory = self._memory(context, prompts)
        return scored(
            self.model, self.params, prompts, continuations, rotations=self.rotations,
            memory=memory, prefix=prefix,
        )  # fmt: skip

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: Sampling = Sampling(),
        *,
        context: Contexts | Sequence[Row] | None = None,
        exact: bool = False,
        prefill_chunk: int | None = None,
    ) -> list[Written]:
        """New text for every prompt (text or token ids), each a string with its token ids.

        Args:
          prompts: a list, also for a single prompt.
          sampling: how tokens are picked and when to stop.
          context: what every row reads beside its prompt, as `encode_contexts` takes or gives it.
            Where nothing has been asked of it, it is searched for the prompt.
          exact: a rotation that depends on the length follows it while the text grows: all keys are
            rotated anew for every token. Otherwise a row's own prompt and `max_new_tokens` fix it.
          prefill_chunk: tokens of a prompt that are read at a time, which bounds the memory; None:
            what suits the platform.
        """
        pieces = self.stream(
            prompts, sampling, context=context, exact=exact, prefill_chunk=prefill_chunk
        )
        return written(pieces, len(prompts))

    def stream(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: Sampling = Sampling(),
        *,
        context: Contexts | Sequence[Row] | None = None,
        exact: bool = False,
        prefill_chunk: int | None = None,
        mixture: Mixture | None = None,
        prefix: Prefix | None = None,
    ) -> Iterator[Piece]:
        """`generate` piece by piece as the text appears; the arguments are checked at once.

        Under a `mixture` several prompts are one text (`lcjax.generation.replug`). What all begin
        with may have been read as `prefix` (`lcjax.generation.shared_prefix`).
        """
        if isinstance(prompts, str):
            raise InputError(f"prompts={prompts[:20]!r} must be a non-empty list; write [prompt]")
        context, count = self._encoded(context), len(prompts)
        begun = [False] * count if context is None else context.begins(count)
        ids = [
            self.encode(prompt, begins=not there) if isinstance(prompt, str) else prompt
            for prompt, there in zip(prompts, begun, strict=True)
        ]
        if prefix is not None:
            changes = exact and self.follows_length
            prefix.check(self.config.pattern, ids, context=context, exact=changes)
        return generation.stream(
            self.model, self.params, self.tokenizer, ids, sampling, rotations=self.rotations,
            exact=exact and self.follows_length, prefill_chunk=prefill_chunk,
            memory=self._memory(context, ids), mixture=mixture, prefix=prefix,
        )  # fmt: skip

    def chat(
        self,
        messages: str | list[dict[str, str]],
        sampling: Sampling = Sampling(),
        *,
        context: Contexts | Row | None = None,
        exact: bool = False,
        prefill_chunk: int | None = None,
    ) -> str:
        """The model's answer to a conversation (or one question) in its own chat format.

        `context` is a document or a list of passages that it reads beside; options as in
        `generate`.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if not messages or not all(isinstance(m, dict) and "role" in m for m in messages):
            raise InputError(
                f"messages={messages!r:.60} must be a question, or a list of messages such as"
                ' {"role": "user", "content": "..."}'
            )
        text = self.tokenizer.render_chat(messages)
        ids = self.tokenizer.encode(text, allow_special=True)
        if context is not None:
            context = context if isinstance(context, Contexts) else self.encode_contexts([context])
            ids = context.follow(list(ids), self.tokenizer.bos_id)
        return self.generate(
            [ids], sampling, context=context, exact=exact, prefill_chunk=prefill_chunk
        )[0]

    def encode(self, text: str, *, begins: bool = True) -> list[int]:
        """Token ids of a text, after BOS if the model expects one and nothing stands before it."""
        ids = self.tokenizer.encode(text)
        return [self.tokenizer.bos_id, *ids] if begins and self.tokenizer.add_bos else ids
