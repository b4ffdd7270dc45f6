"""REPLUG: reads each passage separately before the text, and mixes the predictions.

replug = Replug(lm)
replug.generate(["Question: ...\\nAnswer:"], context=[[passage, passage]], scores=[[1.4, 0.9]])

Shi et al. 2023 (arXiv 2301.12652, sec. 3): p(y | x) = sum_i w_i p(y | d_i x) for every next token
y, with w = softmax(scores / temperature). Each passage costs a pass over the text, but none reads
more than one passage and the text: any decoder can read any number of them.

With `temperature=1` this is also RAG-Token (Lewis et al. 2020, arXiv 2005.11401), whose weights are
p(z | x) = softmax(scores). `marginal="sequence"` is RAG-Sequence: p(y | x) = sum_z p(z | x) p(y |
x, z) of whole texts y, whose tokens have the weights p(z | x, y_<t).
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Annotated

import numpy as np

from lcjax.errors import (
    InputError,
    OneOf,
    PositiveFloat,
    PositiveInt,
    check_fields,
    check_type,
)
from lcjax.generation.contexts import ContextRow, passages
from lcjax.generation.generate import Piece
from lcjax.generation.language_model import LanguageModel
from lcjax.generation.sampling import (
    GeneratedText,
    Mixture,
    Sampling,
    join_pieces,
    log_weights,
)
from lcjax.generation.scorer import Ids, WrappedScorer
from lcjax.generation.scoring import Continuation
from lcjax.generation.session import check_first, check_rows, check_token_rows, pad_right

Scores = Sequence[Sequence[float]]
MARGINALS = ("token", "sequence")


@dataclasses.dataclass(frozen=True)
class Replug(WrappedScorer):
    """A language model that reads each passage separately and mixes the predictions.

    `context` holds the passages of each text (texts or token ids). A text without passages, [], is
    read alone. `scores` holds a number for each passage, such as a retriever's inner product with
    the text; None: equal weights.
    """

    lm: LanguageModel
    # Divides scores: towards 0 only the best passage counts
    temperature: PositiveFloat = 1.0
    batch: PositiveInt = 8  # rows (a passage and its text each) that are scored at once
    # What is mixed: "token", the probabilities of each token (REPLUG, RAG-Token), or "sequence",
    # those of the whole text from the first scored or generated token on (RAG-Sequence)
    marginal: Annotated[str, OneOf(MARGINALS)] = "token"

    def __post_init__(self):
        check_type("lm", self.lm, LanguageModel)
        check_fields("", self)

    def nll(
        self,
        tokens: np.ndarray,
        *,
        context: Sequence[ContextRow],
        scores: Scores | None = None,
        first: int = 1,
        lengths: np.ndarray | None = None,
    ) -> np.ndarray:
        """Computes -log sum_i w_i p(tokens[t] | d_i tokens[:t]), float32 [B, T].

        The arguments are as in `LanguageModel.nll`, but `first` may be 0 if all texts have
        passages. Every passage directly precedes the text, whatever its length. With
        `marginal="sequence"`, the sum over the scored tokens of a text is -log sum_i w_i p(text |
        d_i).
        """
        tokens, lengths = check_token_rows(tokens, lengths, self.lm.config.vocab_size)
        num_rows, length = tokens.shape
        check_first(first, length, 0)
        documents, weights = self._weighted(context, scores, num_rows)
        log_p = np.zeros((*weights.shape, length))
        for pairs in self._batches(documents, np.where(lengths > first, lengths, 0)):
            texts = [np.concatenate([documents[b][i], tokens[b, : lengths[b]]]) for b, i in pairs]
            ends = np.array([len(text) for text in texts])
            starts = np.array([len(documents[b][i]) for b, i in pairs])
            nll = self.lm.nll(pad_right(texts), first=int(starts.min()) + first, lengths=ends)
            for (b, i), row, start in zip(pairs, nll, starts, strict=True):
                log_p[b, i, : lengths[b]] = -row[start : start + lengths[b]]
        scored = np.arange(length)
        scored = (scored >= first) & (scored < lengths[:, None])
        log_p = np.where(scored[:, None], log_p, 0.0)
        prior = weights[..., None]
        if self.marginal == "sequence":  # the weight of a passage given the earlier tokens
            prior = prior + np.pad(np.cumsum(log_p, axis=-1), [(0, 0), (0, 0), (1, 0)])[..., :-1]
            prior = prior - np.logaddexp.reduce(prior, axis=1, keepdims=True)
        mixed = -np.logaddexp.reduce(prior + log_p, axis=1)
        return np.where(scored, mixed, 0).astype(np.float32)

    def continuations(
        self,
        prompts: Sequence[Ids],
        continuations: Sequence[Sequence[Ids]],
        *,
        context: Sequence[ContextRow],
        scores: Scores | None = None,
    ) -> list[list[Continuation]]:
        if self.marginal == "token" or len({len(prompt) for prompt in prompts}) < 2:
            return super().continuations(prompts, continuations, context=context, scores=scores)
        # `nll` has one `first` for all rows, and a sequence must begin where its prompt ends.
        scores = [None] * len(prompts) if scores is None else [[row] for row in _rows_of(scores)]
        rows = zip(prompts, continuations, context, scores, strict=True)
        return [
            super(Replug, self).continuations([ids], [row], context=[passages], scores=row_scores)[
                0
            ]
            for ids, row, passages, row_scores in rows
        ]

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: Sampling = Sampling(),
        *,
        context: Sequence[ContextRow],
        scores: Scores | None = None,
        exact: bool = False,
        prefill_chunk: int | None = None,
    ) -> list[GeneratedText]:
        """Generates text for every prompt, each token from the mixture.

        The options are as in `LanguageModel.generate`.
        """
        options = {"exact": exact, "prefill_chunk": prefill_chunk}
        pieces = self.stream(prompts, sampling, context=context, scores=scores, **options)
        return join_pieces(pieces, len(prompts))

    def stream(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: Sampling = Sampling(),
        *,
        context: Sequence[ContextRow],
        scores: Scores | None = None,
        **options,
    ) -> Iterator[Piece]:
        """Yields the text of `generate` piece by piece, all passages of all prompts in one batch.

        Before a prompt that is a text, BOS precedes the passage if the model expects one. Token ids
        follow the passage unchanged.
        """
        check_rows("prompts", prompts, '["a prompt"]')
        if not len(prompts):
            raise InputError("prompts must be a non-empty list")
        documents, weights = self._weighted(context, scores, len(prompts))
        inputs = []
        for prompt, row in zip(prompts, documents, strict=True):
            ids = [self._join(document, prompt) for document in row]
            # All texts need equally many inputs; the added ones have weight 0.
            inputs += ids + [min(ids, key=len)] * (weights.shape[1] - len(ids))
        mixture = Mixture(len(prompts), weights, self.marginal == "sequence")
        return self.lm.stream(inputs, sampling, mixture=mixture, **options)

    def _join(self, document: np.ndarray, prompt: str | Sequence[int]) -> list[int]:
        if not isinstance(prompt, str):
            return [*document.tolist(), *prompt]
        ids, bos = self.lm.encode(prompt), int(self.lm.tokenizer.add_bos)
        return [*ids[:bos], *document.tolist(), *ids[bos:]]

    def _weighted(self, context, scores, rows: int) -> tuple[list[list[np.ndarray]], np.ndarray]:
        """Returns the passages of every text, or one empty passage, and log weights [B, n]."""
        check_rows("context", context, '[["a passage"]], with an entry for each text')
        if len(context) != rows:
            raise InputError(
                f"context has {len(context)} rows for {rows} texts; give a list of passages for"
                " each text, [] where there are none"
            )
        encode, vocab = self.lm.tokenizer.encode, self.lm.config.vocab_size
        documents = [passages(row, encode, vocab) for row in context]
        scores = [[0.0] * len(row) for row in documents] if scores is None else _rows_of(scores)
        num_scores, num_documents = ([len(row) for row in x] for x in (scores, documents))
        if num_scores != num_documents:
            raise InputError(
                f"scores={num_scores} numbers for {num_documents} passages; give one number for"
                " each passage"
            )
        table = np.full((rows, max(1, *num_documents)), -np.inf)
        for row, values in enumerate(scores):
            table[row, : len(values) or 1] = values if len(values) else 0.0
        weights = log_weights(table, self.temperature)
        return [row or [np.zeros(0, np.int32)] for row in documents], weights

    def _batches(self, documents, lengths) -> Iterator[list[tuple[int, int]]]:
        """Yields batches of (text, passage) indices sorted by length, without texts of length 0."""
        sizes = {
            (b, i): len(document) + int(lengths[b])
            for b, row in enumerate(documents)
            for i, document in enumerate(row)
            if lengths[b]
        }
        order = sorted(sizes, key=sizes.get)
        for start in range(0, len(order), self.batch):
            yield order[start : start + self.batch]


def _rows_of(scores: Scores) -> list[np.ndarray]:
    """Returns the scores of each text, float64 [n]; raises an InputError if they are no numbers."""
    check_rows("scores", scores, "[[1.4, 0.9]], with a row for each text")
    try:
        rows = [np.asarray(row, np.float64) for row in scores]
    except (TypeError, ValueError):
        rows = []
    if len(rows) != len(scores) or any(row.ndim != 1 for row in rows):
        raise InputError(f"scores={scores!r:.60} must be rows of numbers, one for each passage")
    return rows
