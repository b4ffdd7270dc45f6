"""Insertion of landmark tokens into training rows, prompts and generated text.

A block is `tokens_per_block` ordinary tokens and a landmark at its end (Mohtashami & Jaggi 2023,
arXiv 2305.16300, sec. 3.1). Landmarks occupy positions, so the pattern's `block` is
`tokens_per_block` + 1. Each document of a row is divided into blocks separately.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from jaxtyping import Bool, Int

from lcjax.attention import Landmark, Pattern
from lcjax.attention.landmark.pattern import LOSSES
from lcjax.errors import InputError, NonNegativeInt, OneOf, check_fields, check_integer


@dataclass(frozen=True)
class Landmarks:
    """The landmark token, the tokens per landmark, and the targets around landmarks (`loss`).

    predict: landmarks are like other tokens. The last token of a block predicts the landmark, and
        the landmark predicts the next token (epfml's LLaMA code and LCEG).
    skip: landmarks are no targets and predict nothing. The last token of a block predicts the first
        token of the next block. End-of-text tokens predict nothing (the paper's language models).
    drop: as skip, but every full block has a landmark, also the last one, and end-of-text tokens
        have targets. Rows must consist of whole blocks (LLaMA with fused attention).
    """

    token: NonNegativeInt
    tokens_per_block: int = 63  # the landmark not included
    loss: Annotated[str, OneOf(LOSSES)] = "predict"

    def __post_init__(self):
        check_fields("landmarks", self)
        check_integer(
            "landmarks.tokens_per_block", self.tokens_per_block, 1,
            "released models have 63, the paper 50",
        )  # fmt: skip

    @classmethod
    def from_pattern(cls, pattern: Landmark) -> Landmarks:
        """Returns the landmarks of models with this pattern.

        Raises:
          InputError: the pattern has no landmark token.
        """
        if pattern.token is None:
            raise InputError(
                "pattern.token is not set: give the id of the landmark token; the released models "
                "have 32001, the second one after Llama's vocabulary"
            )
        return cls(pattern.token, pattern.block - 1, pattern.loss)

    @classmethod
    def read_by(cls, pattern: Pattern) -> Landmarks | None:
        """Returns the landmarks of models with this pattern; None if it is not `Landmark`."""
        return cls.from_pattern(pattern) if isinstance(pattern, Landmark) else None

    def row_length(self, length: int) -> int:
        """Returns the length of a row of `length` ordinary tokens with inserted landmarks.

        Rows of short documents need fewer landmarks and are padded to this length.

        Raises:
          InputError: the loss is "drop" and the row does not consist of whole blocks.
        """
        if self.loss != "drop":
            return length + (length - 1) // self.tokens_per_block
        size = self.tokens_per_block
        below = length // size * size
        if below != length:
            near = ", ".join(str(n) for n in (below, below + size) if n)
            raise InputError(
                f"data.length={length} must be a multiple of {size} tokens (pattern.block - 1) for"
                f" pattern.loss=drop; nearest: {near}"
            )
        return length + length // size


def insert(
    batch: dict[str, np.ndarray], landmarks: Landmarks, eos_ids: Collection[int] = ()
) -> dict[str, np.ndarray]:
    """Inserts landmarks into the rows of a training batch.

    Args:
      batch: fields tokens, targets, segments, weights and positions, each [B, T].
      landmarks: the token, the block size and the kind of loss.
      eos_ids: end-of-text tokens, which predict nothing with the loss "skip".

    Returns:
      The same fields, each [B, row_length(T)].
    """
    length = landmarks.row_length(batch["tokens"].shape[1])
    rows = [
        _insert_row({name: field[row] for name, field in batch.items()}, landmarks, eos_ids, length)
        for row in range(len(batch["tokens"]))
    ]
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def _insert_row(
    row: dict[str, np.ndarray], landmarks: Landmarks, eos_ids: Collection[int], length: int
) -> dict[str, np.ndarray]:
    """Inserts landmarks into one row, whose fields are [T]."""
    tokens, targets, segments, weights = (
        row[name] for name in ("tokens", "targets", "segments", "weights")
    )
    is_closed = _closed_blocks(segments, landmarks)
    token_places = np.arange(len(tokens)) + np.cumsum(is_closed) - is_closed
    landmark_places = token_places[is_closed] + 1
    predict = landmarks.loss == "predict"
    if landmarks.loss == "skip" and len(eos_ids):
        weights = np.where(np.isin(tokens, list(eos_ids)), 0, weights)
    # Per field: values of the ordinary tokens, values of the landmarks
    fields = {
        "tokens": (tokens, landmarks.token),
        "targets": (
            np.where(is_closed, landmarks.token, targets) if predict else targets,
            targets[is_closed] if predict else 0,
        ),
        "segments": (segments, segments[is_closed]),
        "weights": (weights, weights[is_closed] if predict else 0),
    }
    out = {}
    for name, (token_values, landmark_values) in fields.items():
        out[name] = np.zeros(length, row[name].dtype)
        out[name][token_places], out[name][landmark_places] = token_values, landmark_values
    positions = np.where(out["segments"] != 0, _order_indices(out["segments"]), 0)
    return out | {"positions": positions.astype(row["positions"].dtype)}


def _closed_blocks(segments: Int[np.ndarray, " T"], landmarks: Landmarks) -> Bool[np.ndarray, " T"]:
    """Returns whether a landmark follows each token, which then is the last one of a full block.

    Unless the loss is "drop", no landmark follows the last token of a document.
    """
    is_token = segments != 0
    is_last = is_token & (
        _order_indices(segments) % landmarks.tokens_per_block == landmarks.tokens_per_block - 1
    )
    if landmarks.loss == "drop":
        return is_last
    return is_last & np.append((segments[1:] == segments[:-1]) & is_token[:-1], False)


def _order_indices(segments: Int[np.ndarray, " T"]) -> Int[np.ndarray, " T"]:
    """Returns the place of every token in its run of equal segments: `order_indices` in NumPy."""
    places = np.arange(len(segments))
    is_start = np.append(True, segments[1:] != segments[:-1])
    return places - np.maximum.accumulate(np.where(is_start, places, 0))


def in_prompt(ids: Sequence[int], landmarks: Landmarks) -> list[int]:
    """Inserts a landmark after every full block of a prompt, also at its end."""
    size, out = landmarks.tokens_per_block, []
    for start in range(0, len(ids), size):
        out += ids[start : start + size]
        if start + size <= len(ids):
            out.append(landmarks.token)
    return out


def aligned(
    texts: Sequence[Sequence[int]], longest: int, landmarks: Landmarks
) -> tuple[
    Int[np.ndarray, "B T"], Int[np.ndarray, "B T"], Int[np.ndarray, " B"], Int[np.ndarray, " B"]
]:
    """Pads texts with landmarks so that blocks of all rows begin in the same columns.

    Every chunk of whole blocks then consists of whole blocks of each text.

    Args:
      texts: token ids, landmarks included.
      longest: minimum number of columns; it is rounded up to whole blocks.
      landmarks: the token and the block size.

    Returns:
      int32 tokens and segments; the number of padding tokens before each text; and the column whose
      logits predict the next token (`next_token_offset`), counted from the end: 1 is the last one.
    """
    block = landmarks.tokens_per_block + 1
    width = -(-longest // block) * block
    tokens, segments = np.zeros((2, len(texts), width), np.int32)
    padding_after = np.array([-len(text) % block for text in texts])
    padding_before = np.array([width - len(text) for text in texts]) - padding_after
    for row, (text, start) in enumerate(zip(texts, padding_before)):
        tokens[row, start : start + len(text)] = text
        segments[row, start : start + len(text)] = 1
    offsets = np.array([next_token_offset(text, landmarks) for text in texts])
    return tokens, segments, padding_before, padding_after - offsets


def next_token_offset(ids: Sequence[int], landmarks: Landmarks) -> int:
    """Returns the index in `ids` whose logits predict the next ordinary token: -1 or -2.

    After a full block it is the landmark if the model was trained to predict from landmarks, else
    the token before it.
    """
    is_closed = len(ids) > 1 and ids[-1] == landmarks.token
    return -2 if is_closed and landmarks.loss != "predict" else -1
