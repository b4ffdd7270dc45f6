"""Tokens that a pattern inserts into texts, such as landmarks: one protocol for all readers.

Training rows, prompts, scored texts and generated text ask it where inserted tokens stand, and
which token predicts the next ordinary one. Inserted tokens occupy positions.
"""

from __future__ import annotations

import abc
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int


class InsertedTokens(abc.ABC):
    """The tokens that a model reads among those of a text."""

    token: int  # id of an inserted token; it is never generated

    @abc.abstractmethod
    def identity(self) -> dict[str, Any]:
        """Returns the settings that determine training rows, as plain values."""

    @abc.abstractmethod
    def chunk_size(self, chunk: int) -> int:
        """Returns the largest size of at most `chunk` in which prompts can be read, at least 1."""

    @abc.abstractmethod
    def chunk_for(self, length: int) -> int:
        """Returns the size of the chunks in which a text of `length` tokens is scored."""

    @abc.abstractmethod
    def row_length(self, length: int) -> int:
        """Returns the length of a training row of `length` ordinary tokens with inserted ones.

        Raises:
          InputError: rows of this length cannot be cut.
        """

    @abc.abstractmethod
    def in_row(
        self, batch: dict[str, np.ndarray], eos_ids: Collection[int] = ()
    ) -> dict[str, np.ndarray]:
        """Inserts tokens into the rows of a training batch.

        Args:
          batch: fields tokens, targets, segments, weights and positions, each [B, T].
          eos_ids: end-of-text tokens.

        Returns:
          The same fields, each [B, row_length(T)].
        """

    @abc.abstractmethod
    def in_prompt(self, ids: Sequence[int]) -> list[int]:
        """Returns a prompt with inserted tokens."""

    @abc.abstractmethod
    def aligned(
        self, texts: Sequence[Sequence[int]], longest: int
    ) -> tuple[
        Int[np.ndarray, "B T"], Int[np.ndarray, "B T"], Int[np.ndarray, " B"], Int[np.ndarray, " B"]
    ]:
        """Lays out prompts (`in_prompt`) so that they can be read in chunks.

        Args:
          texts: token ids, inserted ones included.
          longest: minimum number of columns.

        Returns:
          int32 tokens and segments; the number of padding tokens before each text; and the column
          whose logits predict the next token, counted from the end: 1 is the last one.
        """

    @abc.abstractmethod
    def places(self, count: int) -> Int[np.ndarray, " T"]:
        """Returns the index of each of `count` ordinary tokens in the text with inserted ones."""

    @abc.abstractmethod
    def sources(self, places: Int[np.ndarray, " T"], first: int) -> Int[np.ndarray, " M"]:
        """Returns the indices of the tokens that predict the ordinary tokens from `first` on.

        `places` are the indices of all ordinary tokens.
        """

    @abc.abstractmethod
    def most_among(self, count: int) -> int:
        """Returns how many tokens are at most inserted among `count` generated ones of a row."""

    @abc.abstractmethod
    def after(
        self, count: Int[np.ndarray, " B"]
    ) -> tuple[Int[np.ndarray, "B T"] | None, Int[np.ndarray, "B T"], Int[np.ndarray, " B"] | None]:
        """Returns segments, positions and ends for reading token `count` of every row.

        T is 2 if a token is inserted after it in some row; padding follows it in the other rows.
        The ends are as in `aligned`. Segments and ends are None without an inserted token.
        """
