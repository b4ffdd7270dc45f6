"""Insertion of landmark tokens into training rows, prompts and generated text.

A block is `tokens_per_block` ordinary tokens and a landmark at its end (Mohtashami & Jaggi 2023,
arXiv 2305.16300, sec. 3.1). Landmarks occupy positions, so the pattern's `block` is
`tokens_per_block` + 1. Each document of a row is divided into blocks separately.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from jaxtyping import Bool, Int

from lcjax.attention.inserted import InsertedTokens
from lcjax.errors import InputError, NonNegativeInt, OneOf, Range, check_fields

LOSSES = ("predict", "skip", "drop")  # targets around landmarks


@dataclass(frozen=True)
class Landmarks(InsertedTokens):
    """The landmark token, the tokens per landmark, and the targets around landmarks (`loss`).

    predict: landmarks are like other tokens. The last token of a block predicts the landmark, and
        the landmark predicts the next token (epfml's LLaMA code and LCEG).
    skip: landmarks are no targets and predict nothing. The last token of a block predicts the first
        token of the next block. End-of-text tokens predict nothing (the paper's language models).
    drop: as skip, but every full block has a landmark, also the last one, and end-of-text tokens
        have targets. Rows must consist of whole blocks (LLaMA with fused attention).
    """

    token: NonNegativeInt
    # The landmark not included
    tokens_per_block: Annotated[int, Range(1, hint="released models have 63, the paper 50")] = 63
    loss: Annotated[str, OneOf(LOSSES)] = "predict"
    longest: int | None = field(default=None, compare=False)  # tokens read at once; None: any

    def __post_init__(self):
        check_fields("landmarks", self)

    def identity(self) -> dict[str, Any]:
        names = ("token", "tokens_per_block", "loss")
        return {name: getattr(self, name) for name in names}

    @property
    def block(self) -> int:
        """The tokens of a block, the landmark included."""
        return self.tokens_per_block + 1

    def chunk_size(self, chunk: int) -> int:
        """Rounds `chunk` down to whole blocks: at least one, and at most as many as `longest` has.

        Retrieval has no positions for more tokens.
        """
        return max(min(chunk, self.longest or chunk) // self.block, 1) * self.block

    def chunk_for(self, length: int) -> int:
        whole = -(-length // self.block) * self.block
        return whole if self.longest is None else min(self.longest, whole)

    def row_length(self, length: int) -> int:
        # Rows of short documents need fewer landmarks and are padded to this length.
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

    def in_row(
        self, batch: dict[str, np.ndarray], eos_ids: Collection[int] = ()
    ) -> dict[str, np.ndarray]:
        """Inserts landmarks; `eos_ids` predict nothing with the loss "skip"."""
        length = self.row_length(batch["tokens"].shape[1])
        rows = [
            _insert_row({name: x[row] for name, x in batch.items()}, self, eos_ids, length)
            for row in range(len(batch["tokens"]))
        ]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def in_prompt(self, ids: Sequence[int]) -> list[int]:
        """Inserts a landmark after every full block of a prompt, also at its end."""
        size, out = self.tokens_per_block, []
        for start in range(0, len(ids), size):
            out += ids[start : start + size]
            if start + size <= len(ids):
                out.append(self.token)
        return out

    def aligned(self, texts: Sequence[Sequence[int]], longest: int):
        """Pads texts so that blocks of all rows begin in the same columns.

        Every chunk of whole blocks then consists of whole blocks of each text.
        """
        width = -(-longest // self.block) * self.block
        tokens, segments = np.zeros((2, len(texts), width), np.int32)
        padding_after = np.array([-len(text) % self.block for text in texts])
        padding_before = np.array([width - len(text) for text in texts]) - padding_after
        for row, (text, start) in enumerate(zip(texts, padding_before)):
            tokens[row, start : start + len(text)] = text
            segments[row, start : start + len(text)] = 1
        offsets = np.array([self.next_token_offset(text) for text in texts])
        return tokens, segments, padding_before, padding_after - offsets

    def next_token_offset(self, ids: Sequence[int]) -> int:
        """Returns the index in `ids` whose logits predict the next ordinary token: -1 or -2.

        After a full block it is the landmark if the model was trained to predict from landmarks,
        else the token before it.
        """
        is_closed = len(ids) > 1 and ids[-1] == self.token
        return -2 if is_closed and self.loss != "predict" else -1

    def places(self, count: int) -> Int[np.ndarray, " T"]:
        return np.arange(count) + np.arange(count) // self.tokens_per_block

    def sources(self, places: Int[np.ndarray, " T"], first: int) -> Int[np.ndarray, " M"]:
        """As in training, the first token of a block is predicted from the landmark or before it.

        The landmark predicts it with the loss "predict", else the last ordinary token.
        """
        return places[first:] - 1 if self.loss == "predict" else places[first - 1 : -1]

    def most_among(self, count: int) -> int:
        return count // self.tokens_per_block + 1

    def after(self, count: Int[np.ndarray, " B"]):
        """A landmark follows a token that completes a block."""
        position = (count + count // self.tokens_per_block)[:, None]
        is_full = (count + 1) % self.tokens_per_block == 0
        if not is_full.any():
            return None, position, None
        segments = np.stack([np.ones_like(is_full), is_full], 1).astype(np.int32)
        ends = np.where(is_full & (self.loss == "predict"), 1, 2)
        return segments, np.concatenate([position, position + 1], 1), ends


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
