"""Splits rows into chunks of context for an encoder and the tokens that the decoder reads.

CEPE (Yen et al. 2024, arXiv 2402.16617, sec. 2.3) reads consecutive tokens in two parts. The
decoder reads and learns the last ones. The tokens before them are cut into chunks of equal length,
which the encoder reads in parallel. Chunks contain only tokens of the text: BOS and EOS are where
documents begin and end, not at the beginning of each chunk.
"""

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from lcjax.errors import Fraction, InputError, NonNegativeInt, OneOf, PositiveInt, check_fields

Row = dict[str, np.ndarray]
TEXTS = ("before", "same", "beginning", "retrieved")


@dataclass(frozen=True)
class Noise:
    """`data.chunks.noise`: hides parts of the context in training (CEPE, app. A.2).

    Each chunk is selected with probability `rate`. A share `whole` of the selected chunks is hidden
    entirely. The others lose their last n tokens, with n uniform in 1 ... P - `leave` for chunks of
    P tokens.
    """

    rate: Fraction = 0.3
    whole: Fraction = 0.1
    leave: NonNegativeInt = 0  # tokens of a chunk that always stay visible; the released code has 1

    def __post_init__(self):
        check_fields("noise", self)


@dataclass(frozen=True)
class Chunks:
    """`data.chunks`: the context of a row, `count` chunks of `length` tokens."""

    count: PositiveInt = 16  # chunks in a row
    length: PositiveInt = 256  # tokens in a chunk
    # Text in the chunks. before: the tokens before the decoder's. same: the decoder's tokens, which
    # it learns to copy (the warm-up of CEPE). beginning: the first full chunks of a document, or of
    # the question in a conversation (SharedLLM); see `cut_context`. retrieved: passages of a
    # datastore, stored with the rows by `python -m lcjax.retrieval chunks`
    text: Annotated[str, OneOf(TEXTS)] = "before"
    noise: Noise | None = None  # hides parts of the context in training, not in validation
    # text=beginning: maximum number of tokens that the decoder reads
    decoder: PositiveInt | None = None
    # text=beginning: maximum for a text without a question; null: count
    most: PositiveInt | None = None
    # Learn to predict the tokens of chunks, too: for memories whose chunks the decoder reads one
    # after the other (beacon, auto_compressor)
    learned: bool = False
    # text=retrieved: tokens of a document from one search to the next; each search fills an equal
    # share of the chunks (RETRO). null: one search for the row
    stride: PositiveInt | None = None

    def __post_init__(self):
        check_fields("chunks", self)
        if self.noise is not None and self.noise.leave >= self.length:
            raise InputError(
                f"chunks.noise.leave={self.noise.leave} hides no token of chunks.length="
                f"{self.length}; set it to 0 or 1"
            )
        if self.learned and self.text in ("same", "retrieved"):
            raise InputError(
                "chunks.learned=true adds targets for the tokens before the decoder's, and"
                f" chunks.text={self.text} has none; leave it out"
            )
        if self.stride is not None and self.text != "retrieved":
            raise InputError(
                f"chunks.stride={self.stride} is for chunks.text=retrieved; leave it out"
            )
        begins = self.text == "beginning"
        if begins and (self.decoder or 0) < 2 * self.length:
            raise InputError(
                f"chunks.decoder={self.decoder} must be at least {2 * self.length} with"
                f" chunks.text=beginning: it reads up to two chunks of {self.length} tokens of a"
                " question and the answer"
            )
        for key in ("decoder", "most"):
            if not begins and getattr(self, key) is not None:
                raise InputError(
                    f"chunks.{key}={getattr(self, key)} is for chunks.text=beginning; leave it out"
                )

    @property
    def tokens(self) -> int:
        """Number of context tokens in a row."""
        return self.count * self.length

    def num_passages(self, length: int) -> int:
        """Number of passages of one search, for `text` "retrieved" and rows of `length` tokens."""
        if self.stride is None:
            return self.count
        searches = length // self.stride
        if not searches or self.count % searches:
            raise InputError(
                f"data.chunks.count={self.count} must be a multiple of the {searches} searches"
                f" that data.length={length} and chunks.stride={self.stride} make; nearest:"
                f" {max(1, round(self.count / max(1, searches))) * searches or 'a smaller stride'}"
            )
        return self.count // searches

    def decoder_length(self, length: int) -> int:
        """Number of tokens that the decoder reads in a row of `length` tokens."""
        if self.text == "retrieved":
            self.num_passages(length)  # raises an InputError for a count that does not fit
            return length
        shape = f"data.chunks of {self.count} x {self.length} = {self.tokens} tokens"
        if self.text == "same":
            if length != self.tokens:
                raise InputError(
                    f"data.length={length} must equal {shape} with chunks.text=same, which cover"
                    f" the whole row; set it to {self.tokens}"
                )
            return length
        if self.text == "beginning":
            if length > self.tokens + self.decoder:
                raise InputError(
                    f"data.length={length} is more than {shape} and chunks.decoder={self.decoder}"
                    f" hold; set it to {self.tokens + self.decoder} or less"
                )
            return self.decoder
        if length < self.tokens + 2:
            raise InputError(
                f"data.length={length} leaves fewer than 2 tokens for the decoder after {shape};"
                f" set it to, say, {2 * self.tokens}"
            )
        return length - self.tokens


def cut_context(row: Row, config: Chunks, decoder_length: int) -> Row:
    """Splits a row into `chunks`, `chunk_mask` and the decoder's part of all fields.

    The context is padded on the left, so the last chunk ends where the decoder's tokens begin. With
    `chunks.learned`, the result has `chunk_targets` and `chunk_weights` [K, Tc], too. The targets
    were attached before any cut, so the last token of a row keeps its target.

    `chunks.text` "beginning" is the instruction tuning of SharedLLM ("Two are better than one:
    context window extension with multi-grained self-injection", sec. 3.3, and its released code).
    The first max(q // P - 1, 1) chunks of P tokens of a question of q tokens are context. The
    decoder reads the rest of the question and the answer, and only the answer is learned. A text
    without a question is cut in the same way, and the text after its context is learned. Chunks of
    context are full, and chunks before them are padding. Documents must come from `fit_document`.

    Args:
      row: the fields of a training batch, each [T].
      config: the section `data.chunks`.
      decoder_length: number of tokens that the decoder reads.
    """
    end = int((row["segments"] > 0).sum())
    match config.text:
        case "before":
            start = max(end - decoder_length, 0)
        case "same":
            start = end
        case "beginning":
            question = _question_length(row["weights"][:end] > 0) if end else 0
            start = config.length * num_context_chunks(config, question, end)
    context = {"chunks": row["tokens"], "chunk_mask": np.ones(start, bool)}
    if config.learned:
        context |= {f"chunk_{name}": row[name] for name in ("targets", "weights")}
    context = {name: _last_chunks(value[:start], config) for name, value in context.items()}
    if config.text != "same":
        row = _decoder_row(row, start, end, decoder_length)
    return row | context


def num_context_chunks(config: Chunks, question: int, tokens: int) -> int:
    """Returns the number of context chunks of a document, for `chunks.text` "beginning".

    SharedLLM's rule is max(question // length - 1, 1), with the tokens of a chunk as length. The
    number is larger if the decoder cannot hold the rest. At least one token of a question, or two
    of a text, remain for the decoder. So a question of up to one chunk has no context, whereas the
    released code would put the answer there.

    Args:
      config: the section `data.chunks`.
      question: tokens of the question; equals `tokens` for a text without a question.
      tokens: tokens of the document.
    """
    is_text = question == tokens
    rule = max(question // config.length - 1, 1)
    rule = min(rule, config.most or config.count) if is_text else rule
    required = -(-(tokens - config.decoder) // config.length)
    limit = (question - 1 - int(is_text)) // config.length
    return max(min(max(rule, required), limit, config.count), 0)


def fit_document(pair: np.ndarray, config: Chunks, length: int, *, drop: bool) -> np.ndarray | None:
    """Shortens a document so that a row of `chunks.text` "beginning" holds all of it.

    A question that is too long loses its middle, and a text its end. An answer that exceeds the
    decoder loses its end.

    Args:
      pair: int32 [n, 2], tokens and their targets.
      config: the section `data.chunks`.
      length: maximum number of tokens.
      drop: whether to return None for texts and answers that are too long.

    Returns:
      int32 [m, 2] with m <= length, or None.
    """
    is_learned = pair[:, 1] >= 0
    question = _question_length(is_learned)
    excess, is_text = len(pair) - length, question == len(pair)
    if excess > 0 and is_text:
        return None if drop else pair[:length]
    if excess > 0:
        size = max(question - excess, 1)
        ends = size // 2, question - (size - size // 2)
        pair, question = np.concatenate([pair[: ends[0]], pair[ends[1] :]]), size
    capacity = config.decoder + config.length * num_context_chunks(config, question, len(pair))
    if len(pair) > capacity:
        return None if drop else pair[:capacity]
    return pair


def _question_length(is_learned: np.ndarray) -> int:
    """Returns the index of the first learned target of [n], plus 1; n if all are learned."""
    return len(is_learned) if is_learned[0] else int(np.argmax(is_learned)) + 1


def _last_chunks(values: np.ndarray, config: Chunks) -> np.ndarray:
    """Returns the last values as [K, Tc]; if there are fewer, zeros precede them."""
    values = values[-config.tokens :]
    missing = config.tokens - len(values)
    return np.pad(values, (missing, 0)).reshape(config.count, config.length)


def _decoder_row(row: Row, start: int, end: int, length: int) -> Row:
    """Returns tokens `start` to `end` of a row, padded to `length`; segments begin at 1 again."""
    missing = length - (end - start)
    row = {name: np.pad(value[start:end], (0, missing)) for name, value in row.items()}
    segments = row["segments"]
    segments = np.where(segments > 0, segments - segments[0] + 1, 0).astype(np.int32)
    return row | {"segments": segments, "positions": segment_positions(segments)}


def hide_context(row: Row, random: np.random.Generator, noise: Noise) -> Row:
    """Hides context by `noise`: sets `chunk_mask` to False and `chunk_weights` to 0 there."""
    count, length = row["chunk_mask"].shape
    # One random number per chunk decides between none, all and a prefix, as in the released code.
    uniform = random.random(count)
    hidden = random.integers(1, length - noise.leave, count, endpoint=True)
    visible = np.where(uniform < noise.rate, length - hidden, length)
    visible = np.where(uniform < noise.rate * noise.whole, 0, visible)
    is_visible = np.arange(length) < visible[:, None]
    row = row | {"chunk_mask": row["chunk_mask"] & is_visible}
    if "chunk_weights" in row:
        row["chunk_weights"] = row["chunk_weights"] * is_visible.astype(np.float32)
    return row


def segment_positions(segments: np.ndarray) -> np.ndarray:
    """Returns int32 positions [T] that count from 0 in each run of equal `segments` [T].

    They are 0 on padding.
    """
    indices = np.arange(len(segments), dtype=np.int32)
    is_first = np.append(True, segments[1:] != segments[:-1])
    positions = indices - np.maximum.accumulate(np.where(is_first, indices, 0))
    return np.where(segments > 0, positions, 0).astype(np.int32)
