"""Landmark tokens among ordinary ones: in training rows, in prompts and while generating.

A block is `every` ordinary tokens and the landmark that closes it (Mohtashami & Jaggi 2023, arXiv
2305.16300, sec. 3.1). Landmarks take positions of their own, so the pattern's `block` is
`every` + 1. In a row every document is cut into blocks for itself.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from lcjax.attention import Landmark, Pattern
from lcjax.attention.landmark.pattern import LOSSES
from lcjax.errors import InputError, whole_number


@dataclass(frozen=True)
class Landmarks:
    """Which token is the landmark, how many tokens it stands for, and what is learned around it.

    predict: landmarks are tokens like others: the last token of a block predicts one, and it
        predicts the token after it (epfml's LLaMA code and LCEG).
    skip: nothing predicts a landmark and it predicts nothing, nor does an end-of-text token: the
        last token of a block predicts the first one of the next (the paper's language models).
    drop: as skip, but every full block is closed, also the last one, and end-of-text tokens count:
        rows have to be whole blocks (LLaMA with fused attention).
    """

    token: int
    every: int = 63
    loss: str = "predict"

    def __post_init__(self):
        whole_number("landmarks.token", self.token, 0)
        whole_number("landmarks.every", self.every, 1, "released models have 63, the paper 50")
        if self.loss not in LOSSES:
            raise InputError(f"landmarks.loss={self.loss!r} must be one of {', '.join(LOSSES)}")

    @classmethod
    def of(cls, pattern: Landmark) -> "Landmarks":
        """Those that a model with this pattern reads."""
        if pattern.token is None:
            raise InputError(
                "pattern.token is not set: give the id of the landmark token; the released models "
                "have 32001, the second one after Llama's vocabulary"
            )
        return cls(pattern.token, pattern.block - 1, pattern.loss)

    @classmethod
    def read_by(cls, pattern: Pattern) -> "Landmarks | None":
        """Those of a model with this pattern, whichever it is: most read none."""
        return cls.of(pattern) if isinstance(pattern, Landmark) else None

    def row_length(self, length: int) -> int:
        """Tokens of a row that held `length` ordinary ones; rows of short documents are padded."""
        if self.loss != "drop":
            return length + (length - 1) // self.every
        below = length // self.every * self.every
        if below != length:
            near = ", ".join(str(n) for n in (below, below + self.every) if n)
            raise InputError(
                f"data.length={length} must be a multiple of landmarks.every={self.every} for "
                f"landmarks.loss=drop; nearest: {near}"
            )
        return length + length // self.every


def insert(
    batch: dict[str, np.ndarray], landmarks: Landmarks, eos_ids: Collection[int] = ()
) -> dict[str, np.ndarray]:
    """A training batch with landmarks in it: fields [B, T] become [B, row_length(T)].

    `eos_ids` are the end-of-text tokens that loss "skip" learns nothing from.
    """
    wide = landmarks.row_length(batch["tokens"].shape[1])
    rows = [
        _insert_row({name: field[row] for name, field in batch.items()}, landmarks, eos_ids, wide)
        for row in range(len(batch["tokens"]))
    ]
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def _insert_row(row, landmarks: Landmarks, eos_ids, wide: int) -> dict[str, np.ndarray]:
    tokens, targets, segments, weights = (
        row[name] for name in ("tokens", "targets", "segments", "weights")
    )
    text, order = segments != 0, _order(segments)
    full = text & (order % landmarks.every == landmarks.every - 1)  # the last of a full block
    goes_on = np.append((segments[1:] == segments[:-1]) & text[:-1], False)
    closed = full if landmarks.loss == "drop" else full & goes_on
    place = np.arange(len(tokens)) + np.cumsum(closed) - closed  # of the ordinary tokens
    marks = place[closed] + 1
    predict = landmarks.loss == "predict"
    if landmarks.loss == "skip" and len(eos_ids):
        weights = np.where(np.isin(tokens, list(eos_ids)), 0, weights)
    before = np.where(closed, landmarks.token, targets) if predict else targets
    after = weights[closed] if predict else 0
    fields = {
        "tokens": (tokens, landmarks.token),
        "targets": (before, targets[closed] if predict else 0),
        "segments": (segments, segments[closed]),
        "weights": (weights, after),
    }
    out = {}
    for name, (ordinary, mark) in fields.items():
        out[name] = np.zeros(wide, row[name].dtype)
        out[name][place], out[name][marks] = ordinary, mark
    positions = np.where(out["segments"] != 0, _order(out["segments"]), 0)
    return out | {"positions": positions.astype(row["positions"].dtype)}


def _order(segments: np.ndarray) -> np.ndarray:
    """The place of every token in its stretch of equal segments."""
    at = np.arange(len(segments))
    starts = np.append(True, segments[1:] != segments[:-1])
    return at - np.maximum.accumulate(np.where(starts, at, 0))


def in_prompt(ids: Sequence[int], landmarks: Landmarks) -> list[int]:
    """A prompt with a landmark after every full block, also at its end."""
    every, out = landmarks.every, []
    for start in range(0, len(ids), every):
        out += ids[start : start + every]
        if start + every <= len(ids):
            out.append(landmarks.token)
    return out


def aligned(
    texts: Sequence[Sequence[int]], longest: int, landmarks: Landmarks
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Texts with landmarks as rows [B, T]: tokens, segments; padding before [B] and ends [B].

    Blocks of all rows begin in the same columns, so that every chunk of whole blocks is one of the
    text too; T is `longest` or a little more. `ends` is the place whose logits give the next token,
    counted from the end (`asked`).
    """
    block = landmarks.every + 1
    width = -(-longest // block) * block
    tokens, segments = np.zeros((2, len(texts), width), np.int32)
    after = np.array([-len(text) % block for text in texts])
    before = np.array([width - len(text) for text in texts]) - after
    for row, text in enumerate(texts):
        tokens[row, before[row] : before[row] + len(text)] = text
        segments[row, before[row] : before[row] + len(text)] = 1
    ends = after - np.array([asked(text, landmarks) for text in texts])
    return tokens, segments, before, ends


def asked(ids: Sequence[int], landmarks: Landmarks) -> int:
    """The place in `ids` whose logits give the next ordinary token, counted from the end: -1, -2.

    A model that learned to predict landmarks knows from the landmark what follows; others were
    never asked there.
    """
    closed = len(ids) > 1 and ids[-1] == landmarks.token
    return -2 if closed and landmarks.loss != "predict" else -1
