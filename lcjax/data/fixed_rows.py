"""Rows cut once, from documents that run together in the order in which they are stored.

So the long-context studies prepare their data (LongLoRA, Fu et al., LCEG): text, cut into rows
anywhere, and rows read in random order. A row is found by arithmetic; nothing is packed.
"""

from typing import Any

import numpy as np

from lcjax.data.corpus import Corpus
from lcjax.errors import InputError


class FixedRows:
    """Row i holds the places from `i * stride` on of all documents run together.

    A last row that is not full is left out, as is one whose last token has no successor
    (LCEG cuts a row only once the token after it is there).
    """

    def __init__(self, corpus: Corpus, tokenise: Any, length: int, stride: int):
        self._corpus, self._tokenise = corpus, tokenise
        self._length, self._stride = length, stride
        lengths = np.concatenate([reader.lengths for reader in corpus.readers])
        marks = tokenise.bos, tokenise.eos
        inside = np.concatenate([reader.bounded(*marks) for reader in corpus.readers])
        if corpus.indices is not None:
            lengths, inside = lengths[corpus.indices], inside[corpus.indices]
        self._documents = np.flatnonzero(lengths - inside >= tokenise.least)
        added = sum(mark is not None for mark in marks)
        self._ends = np.cumsum((lengths - inside + added)[self._documents])
        total = int(self._ends[-1]) if len(self._ends) else 0
        self._count = max(0, (total - 1 - length) // stride + 1) if total > length else 0
        if not self._count:
            raise InputError(
                f"data.path={corpus.source.name}: {total:,} tokens fill no row of data.length="
                f"{length}; lower it"
            )

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        begin = int(row) * self._stride
        end = begin + self._length
        first = int(np.searchsorted(self._ends, begin, side="right"))
        last = int(np.searchsorted(self._ends, end, side="left"))
        pairs, segments, positions = [], [], []
        for number, at in enumerate(range(first, last + 1), start=1):
            pair = self._tokenise(self._corpus[int(self._documents[at])])["pair"]
            start = int(self._ends[at]) - len(pair)
            pair = pair[max(begin - start, 0) : end - start]
            pairs.append(pair)
            segments.append(np.full(len(pair), number, np.int32))
            positions.append(np.arange(len(pair), dtype=np.int32))
        names = ("pair", "pair_segment_ids", "pair_positions")
        fields = zip(names, (pairs, segments, positions), strict=True)
        return {name: np.concatenate(parts) for name, parts in fields}
