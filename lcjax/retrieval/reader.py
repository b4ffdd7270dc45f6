"""Generates and scores text with passages that a retriever finds for the text itself.

reader = RetrievalReader(lm, retriever, how="input", when=16)
(text,) = reader.generate(["The harbour master of Arnsund is"])
text.passages       # the searches: query, hits, and the number of tokens generated before

A retriever is any object with `search(queries, k)`, which returns the hits of every query, the
best first; a hit has `score` and `passage.id`, `.title` and `.text`. Three options define a method:

- `k`: the number of passages of a search.
- `how` the passages are read: "input", in front of the text, the best one next to it (in-context
  RALM, Ram et al. 2023, arXiv 2302.00083); "context", as chunks of the model's memory (CEPE,
  SharedLLM and others); "fid", as such chunks that begin with the query (Fusion-in-Decoder, Izacard
  and Grave 2021); "mixture", one passage at a time, with the weights softmax(scores / temperature)
  (REPLUG); "rag_token" and "rag_sequence", the marginals of RAG (Lewis et al. 2020, arXiv
  2005.11401) over p(z | x) = softmax(scores): of every token, or of the whole text.
- `when` to search: "once", with the whole prompt as query; or a number of tokens after which the
  last 32 (`query_tokens`) of the text are the query of a new search, and the text is read again
  with the new passages.
"""

import dataclasses
import itertools
import warnings
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np

from lcjax.checkpoints.hf_config import announced_length
from lcjax.checkpoints.tokenizer import encode_mid_text
from lcjax.errors import (
    InputError,
    NonNegativeInt,
    OneOf,
    PositiveFloat,
    PositiveInt,
    check_fields,
    check_integer,
    check_type,
)
from lcjax.generation.generate import RowText
from lcjax.generation.language_model import LanguageModel
from lcjax.generation.passages import (
    SEPARATOR,
    Retriever,
    Search,
    check_retriever,
    join_title,
    search,
)
from lcjax.generation.replug import Replug
from lcjax.generation.sampling import GeneratedText, Sampling, join_pieces
from lcjax.generation.scorer import Ids, Scorer, WrappedScorer
from lcjax.generation.scoring import Continuation
from lcjax.generation.session import check_first, check_rows, check_token_ids, check_token_rows
from lcjax.models.memory import check_memory

METHODS = ("input", "context", "fid", "mixture", "rag_token", "rag_sequence")
QUERY_TOKENS = 32  # Ram et al., section 5
_LEAST_SPREAD = 0.05  # of scores / temperature: below it weights differ by 5 % at most


@dataclasses.dataclass(frozen=True)
class RetrievalReader(WrappedScorer):
    """A language model that reads retrieved passages. Without hits it equals the model.

    If the token ids of a prompt begin with BOS, it precedes the passages.
    """

    lm: LanguageModel
    retriever: Retriever
    k: NonNegativeInt = 4  # number of passages of a search
    how: Annotated[str, OneOf(METHODS)] = "input"  # how passages are read
    when: str | int = "once"  # or the number of tokens between searches
    # Tokens at the end of the text that are the query; None: all of it if `when` is once, else 32
    query_tokens: PositiveInt | None = None
    temperature: PositiveFloat = 1.0  # divides scores; only for "mixture"
    passage_tokens: PositiveInt | None = (
        None  # longer passages are cut; None: whole passages are read
    )
    # Tokens of a text and its passages above which it warns, if lm is not made for more
    length: PositiveInt | None = None

    def __post_init__(self):
        check_retriever(self.retriever)
        check_fields("", self)
        check_type("when", self.when, str, int)
        if self.when != "once":
            check_integer("when", self.when, 1, "or once")
        if self.how != "mixture" and self.temperature != 1:
            raise InputError(f"temperature={self.temperature} is one of how=mixture; leave it out")
        if self._uses_memory:
            check_memory(self.config.memory)
        if self._is_by_chunk and self.when != "once":
            raise InputError(
                f"when={self.when}: model.memory reads passages of its own for every"
                f" {self.config.memory.chunk} tokens of a text; leave it out"
            )
        Replug(self.lm, self.temperature)  # checks the temperature

    @property
    def _replug(self) -> Replug:
        marginal = "sequence" if self.how == "rag_sequence" else "token"
        return Replug(self.lm, self.temperature, marginal=marginal)

    @property
    def _uses_memory(self) -> bool:
        """Whether the passages are read by a memory."""
        return self.how in ("context", "fid")

    @property
    def _is_by_chunk(self) -> bool:
        """Whether each chunk of the text has its own passages (`Memory.by_chunk`)."""
        return self._uses_memory and self.config.memory.by_chunk

    # Generation

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: Sampling = Sampling(),
        *,
        queries: Sequence[str] | None = None,
        exact: bool = False,
        prefill_chunk: int | None = None,
    ) -> list[GeneratedText]:
        """Generates text for every prompt; its `passages` are the searches that it was read with.

        Args:
          prompts: texts or token ids.
          sampling: how tokens are picked and when to stop.
          queries: a query for each prompt, only with when="once"; None: the prompts, or their last
            `query_tokens`.
          exact: as in `LanguageModel.generate`.
          prefill_chunk: as in `LanguageModel.generate`.
        """
        check_rows("prompts", prompts, '["a prompt"]')
        is_once = self.when == "once" and not self._is_by_chunk
        if queries is not None and (not is_once or len(queries) != len(prompts)):
            raise InputError(
                f"queries={len(queries)} texts must be one for each of {len(prompts)} prompts, with"
                " when=once: later queries are the end of the text"
            )
        options = {"exact": exact, "prefill_chunk": prefill_chunk}
        rows = [self._encode(prompt) for prompt in prompts]
        if not is_once:
            return self._generate_in_strides(rows, sampling, options)
        searches = self._search([self._query(ids) for ids in rows] if queries is None else queries)
        texts = self._generate(rows, searches, sampling, options)
        return [_with_searches(*pair) for pair in zip(texts, ([s] for s in searches), strict=True)]

    def _generate_in_strides(
        self, prompts: list[list[int]], sampling: Sampling, options: dict[str, Any]
    ) -> list[GeneratedText]:
        """Generates `when` tokens at a time, each time from the text so far and a new search."""
        sampling.check_texts(len(prompts))
        rows = [list(prompt) for prompt in prompts]
        texts = [RowText(row, self.tokenizer, sampling) for row in range(len(rows))]
        searches: list[list[Search]] = [[] for _ in rows]
        pieces, start = [], 0
        while start < sampling.max_new_tokens:
            unfinished = [row for row, text in enumerate(texts) if text.finish is None]
            if not unfinished:
                break
            ids = [rows[row] for row in unfinished]
            earlier = [searches[row] for row in unfinished]
            size = self._add_searches(ids, earlier, start)
            stride = _stride(sampling, start, size, unfinished)
            if self._is_by_chunk:
                parts = self.lm.generate(ids, stride, **self._by_chunk(earlier), **options)
            else:
                parts = self._generate(ids, [row[-1] for row in earlier], stride, options)
            for row, part in zip(unfinished, parts, strict=True):
                for token in part.ids:
                    if texts[row].finish is None:
                        rows[row].append(token)
                        pieces.append(texts[row].add(token))
            start += size
        generated = join_pieces([piece for piece in pieces if piece is not None], len(rows))
        return [_with_searches(*pair) for pair in zip(generated, searches, strict=True)]

    def _add_searches(
        self, rows: Sequence[Sequence[int]], searches: Sequence[list[Search]], num_tokens: int
    ) -> int:
        """Adds the next searches to `searches` of each row; returns the tokens until the next."""
        if self._is_by_chunk:
            for added, row in zip(self._search_chunks(rows, searches, num_tokens), searches):
                row += added
            size = self.config.memory.chunk
            return min(size - len(row) % size for row in rows)
        results = self._search([self._query(row) for row in rows], num_tokens)
        for result, row in zip(results, searches, strict=True):
            row.append(result)
        return self.when

    def _generate(
        self, rows: list[list[int]], searches: Sequence[Search], sampling: Sampling, options: dict
    ) -> list[GeneratedText]:
        scorer, prompts, context = self._read(rows, searches, sampling.max_new_tokens - 1)
        return scorer.generate(prompts, sampling, **context, **options)

    # Scores

    def continuations(
        self, prompts: Sequence[Ids], continuations: Sequence[Sequence[Ids]]
    ) -> list[list[Continuation]]:
        """Scores the continuations of each prompt, as `LanguageModel.continuations` does.

        The query is the prompt; if `when` is a number of tokens, it is the text before each stride.
        """
        if self.when != "once" or self._is_by_chunk:
            pairs = zip(prompts, continuations, strict=True)
            return [super(RetrievalReader, self).continuations([p], [c])[0] for p, c in pairs]
        rows = [self._encode(prompt) for prompt in prompts]
        searches = self._search([self._query(ids) for ids in rows])
        longest = max((len(ids) for options in continuations for ids in options), default=1)
        scorer, rows, context = self._read(rows, searches, longest - 1)
        return scorer.continuations(rows, continuations, **context)

    def nll(
        self,
        tokens: np.ndarray,
        *,
        first: int = 1,
        lengths: np.ndarray | None = None,
        searched: np.ndarray | None = None,
    ) -> np.ndarray:
        """Computes -log p of tokens, as `LanguageModel.nll` does.

        The query is the text before `first`, or before each stride of `when` tokens. For a memory
        with passages per chunk of the text (RETRO), every whole chunk is a query. With `searched`,
        int [B, T], queries are taken from the same places of these texts instead.
        """
        tokens, ends = check_token_rows(tokens, lengths, self.config.vocab_size)
        width = tokens.shape[1]
        check_first(first, width)
        searched = tokens if searched is None else searched
        searched, _ = check_token_rows(searched, lengths, self.config.vocab_size)
        if self._is_by_chunk:  # the last token predicts nothing, so no chunk may contain it
            rows = [row[: max(end - 1, 0)] for row, end in zip(searched, ends, strict=True)]
            context = self._by_chunk(self._search_chunks(rows, [()] * len(rows)))
            return self.lm.nll(tokens, first=first, lengths=lengths, **context)
        starts = range(first, width, width if self.when == "once" else self.when)
        queries = [
            self._query(row[:start]) if end > start else ""
            for start in starts
            for row, end in zip(searched, ends, strict=True)
        ]
        searches = self._search(queries)
        if not any(result.hits for result in searches):
            return self.lm.nll(tokens, first=first, lengths=lengths)
        nll = np.zeros(tokens.shape, np.float32)
        for index, start in enumerate(starts):
            stop = min(start + starts.step, width)
            results = searches[index * len(tokens) :][: len(tokens)]
            part = self._nll(tokens[:, :stop], start, np.minimum(ends, stop), results)
            nll[:, start:stop] = part[:, start:]
        return nll

    def _nll(
        self, tokens: np.ndarray, first: int, lengths: np.ndarray, searches: Sequence[Search]
    ) -> np.ndarray:
        """Computes -log p of rows that are read with the hits of their searches."""
        nll = np.zeros(tokens.shape, np.float32)
        heads = np.array([self._num_head(*pair) for pair in zip(tokens, searches, strict=True)])
        for head in np.unique(heads):
            rows = np.flatnonzero(heads == head)
            options = self._options(tokens[rows, :head], [searches[row] for row in rows])
            self._check_length(lengths[rows] - head, options["context"])
            scorer = self.lm if self._uses_memory else self._replug
            columns = slice(head, None)
            nll[rows, columns] = scorer.nll(
                tokens[rows, columns], first=first - head, lengths=lengths[rows] - head, **options
            )
        return nll

    # Searches, and what is read

    def _encode(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            return self.lm.encode(prompt)
        return check_token_ids("prompts: a prompt", prompt, self.config.vocab_size).tolist()

    def _query(self, ids: Sequence[int]) -> str:
        """Returns the query, which is the end of a text."""
        size = self.query_tokens or (len(ids) if self.when == "once" else QUERY_TOKENS)
        ids = [int(token) for token in ids[max(len(ids) - size, 0) :]]
        return self.tokenizer.decode(ids, skip_special=True)

    def _search(self, queries: Sequence[str], num_tokens: int = 0) -> list[Search]:
        hits = search(self.retriever, queries, self.k)
        return [Search(*pair, num_tokens) for pair in zip(queries, hits, strict=True)]

    def _search_chunks(
        self, rows: Sequence[Ids], searches: Sequence[Sequence[Search]], num_tokens: int = 0
    ) -> list[list[Search]]:
        """Searches for the whole chunks of every row that have no search in `searches` yet."""
        size = self.config.memory.chunk
        numbers = [range(len(done), len(row) // size) for row, done in zip(rows, searches)]
        queries = [
            self._query(row[n * size : (n + 1) * size])
            for row, chunks in zip(rows, numbers, strict=True)
            for n in chunks
        ]
        results = iter(self._search(queries, num_tokens))
        return [list(itertools.islice(results, len(chunks))) for chunks in numbers]

    def _by_chunk(self, searches: Sequence[Sequence[Search]]) -> dict[str, Any]:
        """Returns the options of the model for the searches of the chunks of every row."""
        flat = [result for row in searches for result in row]
        if not any(result.hits for result in flat):
            return {}
        passages = iter(self._options([()] * len(flat), flat)["context"])
        return {"context": [list(itertools.islice(passages, len(row))) for row in searches]}

    def _read(
        self, rows: list[list[int]], searches: Sequence[Search], num_new: int
    ) -> tuple[Scorer, list[list[int]], dict[str, Any]]:
        """Returns the scorer of `rows` with their hits, the prompts that it reads, and its options.

        `num_new` further tokens will be read after every row.
        """
        if not any(result.hits for result in searches):
            return self.lm, rows, {}
        heads = [self._num_head(*pair) for pair in zip(rows, searches, strict=True)]
        options = self._options([row[:n] for row, n in zip(rows, heads, strict=True)], searches)
        prompts = [row[n:] for row, n in zip(rows, heads, strict=True)]
        self._check_length([len(ids) + num_new for ids in prompts], options["context"])
        if self.how == "input":  # one joined passage, which precedes the prompt in one text
            pairs = zip(options["context"], prompts, strict=True)
            return (
                self.lm,
                [[*(t for ids in ctx for t in ids.tolist()), *p] for ctx, p in pairs],
                {},
            )
        return self.lm if self._uses_memory else self._replug, prompts, options

    def _check_length(
        self, lengths: Sequence[int], context: Sequence[Sequence[np.ndarray]]
    ) -> None:
        """Warns if passages in front of a text make it too long.

        As everywhere, there is no warning for texts that are too long without passages.

        Args:
          lengths: tokens of every text, without BOS before its passages.
          context: the passages of every text, each of which precedes the text separately.
        """
        limit = max(self.length or 0, self.lm.length or 0, announced_length(self.config))
        longest = max(
            (
                length + max(map(len, passages), default=0)
                for length, passages in zip(lengths, context, strict=True)
                if length <= limit
            ),
            default=0,
        )
        if not self._uses_memory and longest > limit:
            warnings.warn(
                f"how={self.how}, k={self.k}: passages and text are longer than the {limit} tokens"
                " that the model was trained or set up for; lower k or passage_tokens, or set"
                " lm.with_method(rope=..., length=...)",
                stacklevel=1,  # one place, so that it is shown once
            )

    def _num_head(self, row: Sequence[int], result: Search) -> int:
        """Returns how many tokens of a row precede its passages: 1 for BOS, else 0."""
        is_outside = self._uses_memory and not self.config.memory.is_prefix
        if is_outside or not result.hits or not len(row):
            return 0
        return int(row[0] == self.tokenizer.bos_id)

    def _options(
        self, heads: Sequence[Sequence[int]], searches: Sequence[Search]
    ) -> dict[str, Any]:
        """Returns the scorer's options: the passages of every row after its head, and scores."""
        context = []
        for head, result in zip(heads, searches, strict=True):
            passages = [self._passage(hit, result.query) for hit in result.hits]
            if self.how == "input" and passages:
                passages = [np.concatenate(passages[::-1])]
            # A memory reads the passages of a row as one text; else each begins a text of its own.
            num_heads = 1 if self._uses_memory else len(passages)
            with_head = [np.array([*head, *ids], np.int32) for ids in passages[:num_heads]]
            context.append([*with_head, *passages[num_heads:]])
        if self.how == "input" or self._uses_memory:
            return {"context": context}
        scores = [[hit.score for hit in result.hits] for result in searches]
        spread = max((max(row) - min(row) for row in scores if row), default=0.0)
        if 0 < spread < _LEAST_SPREAD * self.temperature:
            warnings.warn(
                f"how={self.how}: the scores of the hits differ by {spread:.2g} at most, so all"
                " passages count nearly alike; search by vectors or by words alone (scores of"
                " hybrid searches are sums of reciprocal ranks), or lower the temperature of"
                " how=mixture",
                stacklevel=2,
            )
        return {"context": context, "scores": scores}

    def _passage(self, hit: Any, query: str) -> np.ndarray:
        text = join_title(hit.passage.title, hit.passage.text)
        ids = list(self.tokenizer.encode(text)[: self.passage_tokens])
        if self.how == "fid":
            ids = [*self.tokenizer.encode(f"{query}\n"), *ids]
        elif self.how != "context":
            ids += encode_mid_text(self.tokenizer, SEPARATOR)
        return np.array(ids, np.int32)


def _stride(sampling: Sampling, start: int, size: int, rows: Sequence[int]) -> Sampling:
    """Returns `sampling` for at most `size` tokens of `rows`, from new token `start` on."""
    num_new = min(size, sampling.max_new_tokens - start)
    seed = sampling.seed
    stride = dataclasses.replace(
        sampling,
        max_new_tokens=num_new,
        min_new_tokens=min(max(sampling.min_new_tokens - start, 0), num_new),
        stop=(),
        seed=tuple(seed[row] for row in rows) if isinstance(seed, tuple) else seed,
    )
    return stride.after(start)


def _with_searches(text: GeneratedText, searches: Sequence[Search]) -> GeneratedText:
    return GeneratedText(str(text), text.ids, text.finish, tuple(searches))
