"""REPLUG: one retrieved passage at a time in front of the text, their probabilities mixed.

replug = Replug(lm)
replug.generate(["Question: ...\\nAnswer:"], context=[[passage, passage]], scores=[[1.4, 0.9]])

Shi et al. 2023 (arXiv 2301.12652, sec. 3): p(y | x) = sum_i w_i p(y | d_i x) for every next token
y, with w = softmax(scores / temperature). Each passage costs a pass over the text, but none reads
more than one passage and the text: any decoder can read any number of them.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from lcjax.checkpoints import Tokenizer
from lcjax.errors import InputError, whole_number
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
from lcjax.generation.scorer import Scorer
from lcjax.generation.session import check_rows, check_token_rows
from lcjax.models import ModelConfig

Scores = Sequence[Sequence[float]]


@dataclasses.dataclass(frozen=True)
class Replug(Scorer):
    """A language model that reads passages by turns.

    `context` holds the passages of each text (texts or token ids), [] where there are none: such a
    text is read alone. `scores` holds a number for each passage, such as a retriever's inner
    products with the text; None: all count alike.
    """

    lm: LanguageModel
    temperature: float = 1.0  # scores are divided by it: towards 0 only the best passage counts
    batch: int = 8  # passes that run at once, when texts are scored

    def __post_init__(self):
        log_weights(np.zeros(1), self.temperature)
        whole_number("batch", self.batch, 1)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.lm.tokenizer

    @property
    def config(self) -> ModelConfig:
        return self.lm.config

    @property
    def mesh(self) -> jax.sharding.Mesh | None:
        return self.lm.mesh

    @property
    def follows_length(self) -> bool:
        return self.lm.follows_length

    def nll(
        self,
        tokens: np.ndarray,
        *,
        context: Sequence[ContextRow],
        scores: Scores | None = None,
        first: int = 1,
        lengths: np.ndarray | None = None,
    ) -> np.ndarray:
        """-log sum_i w_i p(tokens[t] | d_i tokens[:t]), float32 [B, T].

        Arguments as in `LanguageModel.nll`. Passages stand right before the text, whatever their
        length.
        """
        tokens, lengths = check_token_rows(tokens, lengths, self.lm.config.vocab_size)
        num_rows, length = tokens.shape
        documents, weights = self._weighted(context, scores, num_rows)
        log_p = np.full((*weights.shape, length), -np.inf)
        for pairs in self._batches(documents, lengths):
            texts = [np.concatenate([documents[b][i], tokens[b, : lengths[b]]]) for b, i in pairs]
            ends = np.array([len(text) for text in texts])
            rows = np.zeros((len(pairs), ends.max()), np.int32)
            for row, text in zip(rows, texts, strict=True):
                row[: len(text)] = text
            starts = np.array([len(documents[b][i]) for b, i in pairs])
            nll = self.lm.nll(rows, first=int(starts.min()) + first, lengths=ends)
            for (b, i), row, start in zip(pairs, nll, starts, strict=True):
                log_p[b, i, : lengths[b]] = -row[start : start + lengths[b]]
        mixed = -np.logaddexp.reduce(weights[..., None] + log_p, axis=1)
        scored = np.arange(length)
        scored = (scored >= first) & (scored < lengths[:, None])
        return np.where(scored, mixed, 0).astype(np.float32)

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
        """Generates text for every prompt, each token from the mixture; as `LanguageModel`'s."""
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

        A prompt that is a text gets BOS before the passage, if the model expects one; one that is a
        list of ids is what follows the passage exactly.
        """
        check_rows("prompts", prompts, '["a prompt"]')
        if not len(prompts):
            raise InputError("prompts must be a non-empty list")
        documents, weights = self._weighted(context, scores, len(prompts))
        inputs = []
        for prompt, row in zip(prompts, documents, strict=True):
            ids = [self._join(document, prompt) for document in row]
            # All texts have equally many inputs; the ones that fill up have weight 0.
            inputs += ids + [min(ids, key=len)] * (weights.shape[1] - len(ids))
        mixture = Mixture(len(prompts), weights)
        return self.lm.stream(inputs, sampling, mixture=mixture, **options)

    def _join(self, document: np.ndarray, prompt: str | Sequence[int]) -> list[int]:
        if not isinstance(prompt, str):
            return [*document.tolist(), *prompt]
        ids, bos = self.lm.encode(prompt), int(self.lm.tokenizer.add_bos)
        return [*ids[:bos], *document.tolist(), *ids[bos:]]

    def _weighted(self, context, scores, rows: int) -> tuple[list[list[np.ndarray]], np.ndarray]:
        """The passages of every text, or one empty one, and their log weights [B, n]."""
        check_rows("context", context, '[["a passage"]], with an entry for each text')
        if len(context) != rows:
            raise InputError(
                f"context has {len(context)} rows for {rows} texts; give a list of passages for"
                " each text, [] where there are none"
            )
        encode, vocab = self.lm.tokenizer.encode, self.lm.config.vocab_size
        documents = [passages(row, encode, vocab) for row in context]
        scores = [[0.0] * len(row) for row in documents] if scores is None else scores
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
        """Yields batches of (text, passage), sorted by length."""
        sizes = {
            (b, i): len(document) + int(lengths[b])
            for b, row in enumerate(documents)
            for i, document in enumerate(row)
        }
        order = sorted(sizes, key=sizes.get)
        for start in range(0, len(order), self.batch):
            yield order[start : start + self.batch]
