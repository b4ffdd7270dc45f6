"""Defines `LanguageModel`, which loads a checkpoint, scores text and generates text.

lm = LanguageModel.load("smollm2-135m-instruct", rope=Yarn(factor=4))
print(lm.chat("What is a dog?"))
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import jax
import numpy as np

from lcjax import cost
from lcjax.attention import CacheMethod, Pattern
from lcjax.checkpoints import save_hf
from lcjax.checkpoints.build import (
    ModelSection,
    Settings,
    build,
    check_trained,
    untrained_rope,
)
from lcjax.checkpoints.tokenizer import check_template_variables
from lcjax.config import check_instance
from lcjax.errors import (
    InputError,
    check_arguments,
    check_flags,
    check_integer,
    check_type,
    suggestion,
)
from lcjax.generation.contexts import (
    ContextRow,
    Contexts,
    context_chunk_size,
    embed_queries,
    encode,
    search,
    split_row,
)
from lcjax.generation.generate import Piece, generate_pieces
from lcjax.generation.inference_model import InferenceModel
from lcjax.generation.sampling import GeneratedText, Mixture, Sampling, join_pieces
from lcjax.generation.scorer import Scorer
from lcjax.generation.scoring import (
    Continuation,
    Text,
    score_by_cache_method,
    score_continuations,
    score_texts,
    score_with_inserted,
    text_logits,
)
from lcjax.generation.session import (
    CachedPrefix,
    can_share_prefix,
    check_first,
    check_rows,
    check_token_rows,
)
from lcjax.generation.shared_prefix import PrefixReader
from lcjax.models import Decoder
from lcjax.models.cache import check_cache
from lcjax.models.loss import token_nll
from lcjax.models.memory import EncodedContext, Memory, check_memory
from lcjax.models.weight_storage import num_weights
from lcjax.parallel.sharding import Mesh, device_mesh, padding_rows
from lcjax.rope import Rope
from lcjax.tree import flatten


class LanguageModel(InferenceModel, Scorer):
    """A decoder with its weights, tokenizer and method; `with_method` changes only the method."""

    @classmethod
    def load(
        cls,
        source: str | ModelSection,
        *,
        mesh: Mesh | jax.sharding.Mesh | None = None,
        **settings: Unpack[Settings],
    ) -> "LanguageModel":
        """Loads a model from a checkpoint.

        Args:
          source: the path or name of a checkpoint, or a `ModelSection`.
          mesh: the devices that share weights, rows and caches: `Mesh(tensor=8, fsdp=1)`, or a
            `jax.sharding.Mesh` with the axes of `Mesh`; None: the default device.
          **settings: fields of `ModelSection`, which replace those of a section.

        Raises:
          InputError: a setting is unknown or invalid, or the checkpoint cannot be read.
        """
        for name, value in settings.items():
            if name not in (known := Settings.__annotations__):
                guess = suggestion(name, {*known, "mesh"})
                call = f"{name}={value!r:.40} is no option of LanguageModel.load"
                raise InputError(f"{call}; {guess}")
        mesh = device_mesh(mesh)
        if isinstance(source, ModelSection):
            source = dataclasses.replace(source, **settings)
        else:
            source = ModelSection(path=str(source), **settings)
        return cls(*build(source, mesh, scan_layers=False))

    def __repr__(self) -> str:
        config = self.config
        shapes = {path: leaf.shape for path, leaf in flatten(self.params).items()}
        num_params = sum(num_weights(path, shape) for path, shape in shapes.items())
        storage = config.param_dtype if config.weights is None else config.weights.name
        parts = [
            f"{num_params / 1e6:.3g}M parameters in {storage}",
            f"{config.num_layers} layers, trained length {config.max_length}",
            f"position={config.position}",
        ]
        methods = {name: getattr(config, name) for name in ("rope", "pattern", "cache", "memory")}
        parts += [f"{name}={type(x).__name__}" for name, x in methods.items() if x is not None]
        if len(config.kinds) > 1:
            parts.append(f"{len(config.kinds)} kinds of layers")
        if self.mesh is not None:
            parts.append(f"{self.mesh.size} devices")
        return f"LanguageModel({', '.join(parts)})"

    @property
    def shares_prefixes(self) -> bool:
        """Whether prompts can reuse the KV cache of a common prefix.

        The visible keys of a token must depend only on its position. Under landmark, inf_llm and
        patterns for prompts only they depend on the other tokens of the call. The cache must keep
        all keys: a pattern that keeps only a few has little to share.
        """
        return can_share_prefix(self.config)

    @check_arguments
    def with_shared_prefixes(self, prompts: Sequence[Sequence[int]]) -> Scorer:
        if not len(prompts) or not self.shares_prefixes:
            return self
        return PrefixReader(self, prompts)

    @check_arguments
    def inference_memory(
        self, rows: int, length: int, context: tuple[int, int] | None = None
    ) -> cost.MemoryEstimate:
        check_integer("rows", rows, 1)
        check_integer("length", length, 1)
        mesh = self.mesh or Mesh(fsdp=1)
        device = jax.local_devices()[0] if self.mesh is None else self.mesh.devices.flat[0]
        options = {"chunk": length, "context": context, "platform": device.platform}
        return cost.generation_memory(self.config, length, rows, mesh, **options)

    @check_arguments
    def cache_bytes(self, length: int) -> int | None:
        """Returns the bytes of the KV cache of a row of `length` tokens, at the end of its prompt.

        It is None for a model with a memory, whose contexts are not in the cache.
        """
        check_integer("length", length, 1)
        return None if self.config.memory is not None else cost.cache_bytes(self.config, length)

    def with_method(
        self,
        *,
        rope: Rope | None = None,
        pattern: Pattern | None = None,
        cache: CacheMethod | None = None,
        memory: Memory | None = None,
        length: int | None = None,
    ) -> "LanguageModel":
        """Returns a model with the same weights and another method of reading.

        Args:
          rope: RoPE method of the layers that have none of their own in `config.layers`; None:
            unchanged.
          pattern: attention pattern of the layers that have none of their own; None: unchanged.
          cache: which tokens layers keep while texts are read and generated; None: unchanged.
          memory: the memory of `config` with other settings, such as CEPE's `trained_context`;
            None: unchanged.
          length: minimum number of tokens that rotations are made for; None: the length of each
            call, even if this model has a length.

        Raises:
          InputError: the weights do not fit the method, or a file of it is missing, damaged or
            made for another model.
        """
        for name, value, base in (
            ("rope", rope, Rope), ("pattern", pattern, Pattern), ("cache", cache, CacheMethod),
            ("memory", memory, Memory),
        ):  # fmt: skip
            check_instance(name, value, base)
        if length is not None:
            check_integer("length", length, 1, "None takes that of each call")
        other = copy.copy(self)
        other.length, other._rotations = length, {}
        changes: dict[str, Any] = {}
        if rope is not None:
            rope = untrained_rope(rope, self.config, self.params)
            changes |= {"rope": rope, "extended_length": None}
        if length is not None and length > self.config.max_length:
            changes["extended_length"] = length
        if pattern is not None:
            changes["pattern"] = pattern.for_inference()
        if cache is not None:
            changes["cache"] = cache
        if memory is not None:
            check_memory(self.config.memory)
            kind = type(self.config.memory)
            if not isinstance(memory, kind):
                raise InputError(
                    f"memory={memory!r:.60} must be a {kind.__name__}, which the weights are of;"
                    " change its settings with dataclasses.replace(lm.config.memory, ...)"
                )
            changes["memory"] = memory.for_inference()
        config = self.config.replace(**changes)
        check_cache(config)
        check_trained(config, self.params)
        other.model = Decoder(config, self.mesh)
        return other

    def save(
        self,
        folder: str | Path,
        *,
        dtype: str | None = None,
        overwrite: bool = False,
        checksums: bool = True,
    ) -> Path:
        """Writes a Hugging Face folder: weights, tokenizer and the method; returns its path.

        `load` opens it with the same rope, pattern and memory. transformers does if it implements
        them: RoPE methods up to `config.rope.hf_limit` tokens, and the sliding window of Mistral
        and Qwen2. `config.cache` is not written, since it belongs to a program and not to weights.

        Args:
          folder: the folder to create.
          dtype: dtype of the stored weights; None: unchanged.
          overwrite: whether to replace a folder that lcjax wrote.
          checksums: whether to add the SHA-256 sums of all files, for `python -m lcjax.check`.

        Raises:
          InputError: no Hugging Face config describes this method (most patterns), or `folder`
            exists.
        """
        if self.length is not None and self.depends_on_length:
            raise InputError(
                f"length={self.length} of with_method cannot be saved: the rotation of a checkpoint"
                " follows the length of each request; save lm.with_method(length=None)"
            )
        options = {"dtype": dtype, "overwrite": overwrite, "checksums": checksums}
        return save_hf(folder, self.params, self.config, self.tokenizer, **options)

    def encode_contexts(
        self,
        contexts: Sequence[ContextRow],
        *,
        chunk: int | None = None,
        batch_tokens: int | None = None,
        projected: bool = False,
        after: Contexts | None = None,
        query: Sequence[str | Sequence[int]] | None = None,
    ) -> Contexts:
        """Encodes the context outside the window of every row, for use in any number of calls.

        Args:
          contexts: for each row a document, or a list of passages (each a text, or token ids).
            Every passage starts a new chunk, and long passages are split into several. For prefix
            memories (Activation Beacon, AutoCompressor), BOS precedes the first text of a row if
            the model expects one, and no later text; token ids are unchanged. For memories with
            passages per chunk of the text (RETRO), a row is a list with the passages of each chunk,
            [] for none; with `after`, the row continues at the chunk after those of `after`.
          chunk: size in tokens of the chunks that long texts are split into; None: the size that
            the memory was trained with (CEPE: 256, SharedLLM: 1,024). Shorter texts are shorter
            chunks.
          batch_tokens: number of tokens that are encoded at once, which bounds device memory; None:
            a size that suits the platform.
          projected: whether to store the keys and values of every reader layer instead of the
            encoder's states: faster to read, many times larger.
          after: contexts to which these chunks are added; its own chunks are not encoded again.
          query: a question for each row (text or token ids), for query-dependent memories. Its last
            token is compared with the context. None: the question of `after`; without one, every
            call searches with its own text. `search_contexts` searches with another question.
        """
        check_rows("context", contexts, '[["a document"]], with an entry for each row')
        for row in contexts:
            if not isinstance(row, str):
                check_rows("context: a row", row, '["a passage", "another"]')
        memory = self.config.memory
        if memory is None and not any(len(row) for row in contexts):
            return Contexts(None, *[(0,) * len(contexts)] * 2, self.params)
        check_memory(memory)
        size, num_rows = context_chunk_size(memory, chunk), len(contexts)
        encode_text, vocab_size = self.tokenizer.encode, self.config.vocab_size
        bos = [self.tokenizer.bos_id] if memory.is_prefix and self.tokenizer.add_bos else []
        has_bos = [False] * num_rows if after is None else after.precede(num_rows)
        chunks = [
            split_row(row, memory, size, encode_text, vocab_size, () if has_context else bos)
            for row, has_context in zip(contexts, has_bos, strict=True)
        ]
        if query is not None:
            query = embed_queries(self, query, num_rows) if memory.query_dependent else None
        rotation = self.rotation(size) if memory.is_prefix else None
        options = {"batch_tokens": batch_tokens, "projected": projected, "rotation": rotation}
        return encode(self, chunks, after=after, query=query, **options)

    @check_arguments
    def search_contexts(self, contexts: Contexts, query: Sequence[str | Sequence[int]]) -> Contexts:
        """Encodes `contexts` for other questions, one for each row.

        Only nodes that were not encoded before are encoded. A single row of contexts is repeated
        for all questions. Contexts that do not depend on a question are returned unchanged.
        """
        check_type("contexts", contexts, Contexts)
        contexts.check(self)
        if not contexts.source:
            return contexts
        contexts = contexts.repeated(len(query))
        embedded = embed_queries(self, query, len(contexts.tokens))
        return search(self, contexts, embedded)

    def _encode_if_needed(self, context: Contexts | Sequence[ContextRow] | None) -> Contexts | None:
        if context is None or (isinstance(context, list | tuple) and not context):
            return None
        return context if isinstance(context, Contexts) else self.encode_contexts(context)

    def _memory(
        self,
        context: Contexts | Sequence[ContextRow] | None,
        texts: Sequence[Sequence[int]],
    ) -> EncodedContext | None:
        """Returns the encoded context of `texts`, including filler rows for the mesh."""
        if (context := self._encode_if_needed(context)) is None:
            return None
        context.check(self)
        if context.needs_query:
            context = self.search_contexts(context, texts)
        return context.rows(len(texts), padding_rows(self.mesh, len(texts)))

    def nll(
        self,
        tokens: np.ndarray,
        *,
        first: int = 1,
        lengths: np.ndarray | None = None,
        context: Contexts | Sequence[ContextRow] | None = None,
    ) -> np.ndarray:
        """Computes -log p(tokens[t] | tokens[:t]), float32 [B, T]; 0 for t < first or t >= lengths.

        A pattern may insert tokens (`Pattern.inserted_tokens`); the text is then read in chunks. A
        cache policy (`model.cache`) cuts after each of its chunks, or, without chunks, once: the
        tokens before the one that predicts `first` are then the prompt, and scored tokens stay.

        Args:
          tokens: int [B, T], padded on the right.
          first: the first scored position, at least 1; logits are computed only from there on.
          lengths: int [B], number of tokens of each row; None: T. Later tokens are not read, so a
            row has the same scores as alone.
          context: the context of every row, as `encode_contexts` takes or returns it. A
            query-dependent encoding without a question is searched with the token before `first`.

        Raises:
          InputError: `tokens` are not ids of the vocabulary, or `lengths` or `first` do not fit.
        """
        return self.score(token_nll, tokens, first=first, lengths=lengths, context=context)

    def score(
        self,
        score: Callable[..., Any],
        tokens: np.ndarray,
        *,
        first: int = 1,
        lengths: np.ndarray | None = None,
        context: Contexts | Sequence[ContextRow] | None = None,
        with_ffn_input: bool = False,
    ) -> Any:
        """Computes a function of the hidden state before each token, such as -log p in `nll`.

        Args:
          score: `score(hidden, projection, targets)` returns a tree of arrays [B, m, ...] for
            hidden states [B, m, D], the projection to logits, and the next tokens int32 [B, m].
            It is compiled: pass the same function object in every call, not a new one.
          tokens: as in `nll`.
          first: as in `nll`.
          lengths: as in `nll`.
          context: as in `nll`.
          with_ffn_input: whether the hidden states are `lcjax.models.decoder.States`, which add the
            input of the last layer's feed-forward.

        Returns:
          A tree of arrays [B, T, ...], 0 where `nll` is 0.

        Raises:
          InputError: as `nll`.
        """
        check_type("score", score, Callable)
        self.config.check_scores()
        tokens, lengths = check_token_rows(tokens, lengths, self.config.vocab_size)
        width = tokens.shape[1]
        check_first(first, width)
        starts = [row[: max(min(first, length), 1)] for row, length in zip(tokens, lengths)]
        memory = self._memory(context, starts)
        if (inserted := self.config.pattern.inserted_tokens) is not None:
            options = (inserted, tokens, lengths, first, memory, with_ffn_input)
            return jax.tree.map(
                lambda x: np.pad(x, [(0, 0), (first, 0)] + [(0, 0)] * (x.ndim - 2)),
                score_with_inserted(self, score, *options),
            )
        if not self.config.has_exact_cache:
            return score_by_cache_method(self, score, tokens, lengths, first, with_ffn_input)
        texts = [
            Text(row[:length], first - 1, row[first:length])
            for row, length in zip(tokens, lengths, strict=True)
        ]
        rotation = self.rotations(np.maximum(lengths, 1))
        scores = score_texts(self, score, texts, rotation, memory, with_ffn_input)

        def place(*rows):
            values = np.zeros((*tokens.shape, *rows[0].shape[1:]), rows[0].dtype)
            for row, row_values in zip(values, rows, strict=True):
                row[first : first + len(row_values)] = row_values
            return values

        return jax.tree.map(place, *scores)

    def logits(
        self,
        tokens: np.ndarray,
        *,
        lengths: np.ndarray | None = None,
        context: Contexts | Sequence[ContextRow] | None = None,
    ) -> np.ndarray:
        """Computes the logits of the token after each of `tokens`, float32 [B, T, V].

        They take 4 B T V bytes: 16 GB for 128K tokens of a vocabulary of 32K. `nll` projects a few
        positions at a time. With inserted tokens, as in `nll`, the logits are those of the tokens
        that predict the next ordinary ones.

        Args:
          tokens: int [B, T], padded on the right.
          lengths: int [B], number of tokens of each row, as in `nll`; logits after them are 0.
          context: as in `nll`, but a query-dependent encoding without a question is searched with
            the last token of each row.

        Raises:
          InputError: as `nll`.
        """
        self.config.check_scores()
        tokens, lengths = check_token_rows(tokens, lengths, self.config.vocab_size)
        rows = [row[:length] for row, length in zip(tokens, lengths, strict=True)]
        memory = self._memory(context, rows)
        if (inserted := self.config.pattern.inserted_tokens) is not None:
            tokens = np.pad(tokens, [(0, 0), (0, 1)])  # a next token, which is not read
            options = (inserted, tokens, lengths + 1, 1, memory)
            return score_with_inserted(self, text_logits, *options)
        if not self.config.has_exact_cache:
            tokens = np.pad(tokens, [(0, 0), (0, 1)])
            return score_by_cache_method(self, text_logits, tokens, lengths + 1, 1)[:, 1:]
        rotation = self.rotations(np.maximum(lengths, 1))
        # `text_logits` ignores the targets: only their number counts.
        texts = [Text(row, 0, row) for row in rows]
        logits = np.zeros((*tokens.shape, self.config.vocab_size), np.float32)
        for out, row_logits in zip(logits, score_texts(self, text_logits, texts, rotation, memory)):
            out[: len(row_logits)] = row_logits
        return logits

    def continuations(
        self,
        prompts: Sequence[Sequence[int]],
        continuations: Sequence[Sequence[Sequence[int]]],
        *,
        context: Contexts | Sequence[ContextRow] | None = None,
        prefix: CachedPrefix | None = None,
    ) -> list[list[Continuation]]:
        """Scores the continuations of each prompt (token ids), reading the prompt once.

        `context` is the context of every prompt, as in `generate`; `prefix` as in `stream`.
        """
        self.config.check_scores()
        if prefix is not None:
            check_type("prefix", prefix, CachedPrefix)
            prefix.check(self.config, prompts, context=context, exact=False)
        if self.config.pattern.inserts_tokens:
            return super().continuations(prompts, continuations, context=context)
        memory = self._memory(context, prompts)
        return score_continuations(self, prompts, continuations, memory=memory, prefix=prefix)

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: Sampling = Sampling(),
        *,
        context: Contexts | Sequence[ContextRow] | None = None,
        exact: bool = False,
        prefill_chunk: int | None = None,
    ) -> list[GeneratedText]:
        """Generates text for every prompt.

        Args:
          prompts: texts or token ids; a list even for a single prompt.
          sampling: how tokens are picked and when to stop.
          context: the context of every row, as `encode_contexts` takes or returns it. A
            query-dependent encoding without a question is searched with the last token of the
            prompt.
          exact: whether a rotation that depends on the length follows it while the text grows: all
            keys are rotated again for every token. False: the rotation of a row is made for its own
            prompt plus `max_new_tokens`.
          prefill_chunk: number of prompt tokens that are read at once, which bounds device memory;
            None: a size that suits the platform. Patterns for prompts only (vertical_slash,
            tri_shape, xattention, flex_prefill) always read the whole prompt at once.

        Returns:
          A string for each prompt, with its token ids as `ids`.
        """
        pieces = self.stream(
            prompts, sampling, context=context, exact=exact, prefill_chunk=prefill_chunk
        )
        return join_pieces(list(pieces), len(prompts))

    def stream(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: Sampling = Sampling(),
        *,
        context: Contexts | Sequence[ContextRow] | None = None,
        exact: bool = False,
        prefill_chunk: int | None = None,
        mixture: Mixture | None = None,
        prefix: CachedPrefix | None = None,
        top_logprobs: int | None = None,
    ) -> Iterator[Piece]:
        """Yields the text of `generate` piece by piece; the call itself checks the arguments.

        A `mixture` combines several prompts into one text (`lcjax.generation.replug`). A `prefix`
        is the cached common prefix of all prompts (`lcjax.generation.shared_prefix`). With
        `top_logprobs` (0 or more), pieces have log p of their tokens and of this many most probable
        tokens.
        """
        if top_logprobs is not None:
            check_integer("top_logprobs", top_logprobs, 0, "None leaves them out")
        check_rows("prompts", prompts, '["a prompt"]')
        check_flags(exact=exact)
        if not isinstance(sampling, Sampling):
            raise InputError(f"sampling={sampling!r:.60} must be a Sampling(max_new_tokens=...)")
        check_type("mixture", mixture, Mixture, type(None))
        context, num_rows = self._encode_if_needed(context), len(prompts)
        has_context = [False] * num_rows if context is None else context.precede(num_rows)
        ids = [
            self.encode(prompt, begins=not follows) if isinstance(prompt, str) else prompt
            for prompt, follows in zip(prompts, has_context, strict=True)
        ]
        exact = exact and self.depends_on_length
        if prefix is not None:
            check_type("prefix", prefix, CachedPrefix)
            prefix.check(self.config, ids, context=context, exact=exact)
        return generate_pieces(
            self, ids, sampling, exact=exact, prefill_chunk=prefill_chunk,
            memory=self._memory(context, ids), mixture=mixture, prefix=prefix,
            top_logprobs=top_logprobs,
        )  # fmt: skip

    def chat(
        self,
        messages: str | list[dict[str, Any]],
        sampling: Sampling = Sampling(),
        *,
        context: Contexts | ContextRow | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        allow_special: bool = False,
    ) -> str:
        """Generates the answer to a conversation, or to one question, in the model's chat format.

        `context` is a document or a list of passages for the model to read. `chat_template_kwargs`
        are variables of the chat template, such as `{"enable_thinking": False}` of Qwen3,
        `{"tools": [...]}` or `{"documents": [...]}`. Special tokens in messages are text, unless
        `allow_special` is set (as in transformers).
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        variables = check_template_variables(chat_template_kwargs)
        chat = self.tokenizer.encode_chat(messages, allow_special=allow_special, **variables)
        ids = chat.ids
        if context is not None:
            context = context if isinstance(context, Contexts) else self.encode_contexts([context])
            ids = context.without_bos(list(ids), self.tokenizer.bos_id)
        return self.generate([ids], sampling, context=context)[0]
