"""Counts the lengths of training rows: python -m lcjax.data lengths --config FILE

The length of a row is its number of tokens, including those of its chunks, without padding.
"""

from dataclasses import dataclass, field
from typing import Annotated

import numpy as np

from lcjax.checkpoints import load_tokenizer
from lcjax.data.data_config import DataConfig
from lcjax.data.loader import Batch, make_loader
from lcjax.errors import NonEmpty, PositiveInt, check_fields


@dataclass(frozen=True)
class LengthsConfig:
    """Settings of `python -m lcjax.data lengths`."""

    # Tokenizer of the model, as model.path
    tokenizer: Annotated[str, NonEmpty("name the model whose tokens are counted")] = ""
    data: DataConfig = field(default_factory=DataConfig)  # rows as the training will read them
    rows: PositiveInt = 1000  # number of rows that are counted

    def __post_init__(self):
        check_fields("", self)


def row_tokens(batch: Batch) -> np.ndarray:
    """Returns the number of tokens of text in each row of a batch, int [B]."""
    tokens = (batch["segments"] > 0).sum(1)
    return tokens + batch["chunk_mask"].sum((1, 2)) if "chunk_mask" in batch else tokens


def count_lengths(config: LengthsConfig) -> list[tuple[int, float, float]]:
    """Returns the shares of rows and of tokens by the length of rows.

    Returns:
      A tuple (most tokens, share of the rows, share of the tokens) for each of
      `data.length_shares`; if there are none, for each quarter of `data.length`.
    """
    data = config.data
    loader = make_loader(data, load_tokenizer(config.tokenizer), 1)
    try:
        sizes = [int(row_tokens(batch)[0]) for _, batch in zip(range(config.rows), loader)]
    finally:
        loader.close()
    bounds = [part.tokens for part in data.length_shares]
    bounds = bounds or [data.length * quarter // 4 for quarter in range(1, 5)]
    bins = np.minimum(np.searchsorted(bounds, sizes), len(bounds) - 1)
    rows, tokens = (np.bincount(bins, w, len(bounds)) for w in (None, sizes))
    return [(*row,) for row in zip(bounds, rows / sum(rows), tokens / sum(tokens))]


def report(config: LengthsConfig) -> None:
    """Prints `count_lengths` as a Markdown table, beside the expected `data.length_shares`."""
    expected = [f"{part.share:.1%}" for part in config.data.length_shares]
    print("| tokens | rows | tokens of all | data.length_shares |\n|---:|---:|---:|---:|")
    for index, (most, rows, tokens) in enumerate(count_lengths(config)):
        share = expected[index] if expected else ""
        print(f"| up to {most:,} | {rows:.1%} | {tokens:.1%} | {share} |")
