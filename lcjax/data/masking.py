"""Masked language modelling: tokens replaced by [MASK], to be told from both sides.

Every token of the text is chosen for itself with the same probability, and always becomes [MASK]
(CEPE's encoder, Yen et al. 2024, arXiv 2402.16617, app. A); special tokens are never chosen.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lcjax.errors import InputError


@dataclass(frozen=True)
class Masking:
    """`data.masking`."""

    rate: float = 0.3  # part of the ordinary tokens
    # Id of [MASK]; null: the first one behind the vocabulary, for which the model needs a row more
    token: int | None = None
    keep: list[int] = field(default_factory=list)  # more ids that stay; BOS, EOS, padding, UNK do

    def __post_init__(self):
        if not 0 < self.rate < 1:
            raise InputError(f"masking.rate={self.rate} must lie between 0 and 1, such as 0.3")
        if self.token is not None and self.token < 0:
            raise InputError(f"masking.token={self.token} must be the id of a token, or null")


class Mask:
    """A batch -> the same with targets at masked places only: what stood there."""

    def __init__(self, config: Masking, tokenizer: Any):
        self._rate = config.rate
        self._token = tokenizer.vocab_size if config.token is None else config.token
        names = ("bos_id", "pad_id", "unk_id")  # a tokenizer need not tell all of them
        special = {getattr(tokenizer, name, None) for name in names} | {*tokenizer.eos_ids}
        self._never = sorted((special | {self._token, *config.keep}) - {None})

    def __call__(
        self, row: dict[str, np.ndarray], random: np.random.Generator
    ) -> dict[str, np.ndarray]:
        tokens = row["tokens"]
        # One number for every place, so that what is chosen depends on nothing but its place.
        chosen = random.random(tokens.shape) < self._rate
        chosen &= (row["segments"] > 0) & ~np.isin(tokens, self._never)
        return row | {
            "tokens": np.where(chosen, np.int32(self._token), tokens),
            "targets": np.where(chosen, tokens, 0),
            "weights": chosen.astype(np.float32),
        }
