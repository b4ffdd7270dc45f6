"""Running text to hide things in, as token ids with the ends of its sentences."""

from typing import ClassVar

import numpy as np

from lcjax.checkpoints.tokenizer import inside
from lcjax.errors import InputError
from lcjax.evaluation.corpus import Corpus, Document

_ENDS = ".!?"


class Haystack:
    """The documents of a corpus one after another, repeated where a length needs more.

    Tokenised once and without specials. A sentence ends with the token that ends in a full stop or
    the like, as in Kamradt's test.
    """

    LEAST: ClassVar[int] = 32  # tokens below which there is nothing to hide in

    def __init__(self, corpus: Corpus, tokens: int, limit: int | None = None):
        """The first `limit` documents (None: all), or as many as have so many `tokens`."""
        self._tokenizer = corpus.tokenizer
        gap = inside(self._tokenizer, "\n\n")
        documents = self._documents(corpus, tokens, limit)
        if not documents:
            raise InputError(
                f"data: no document of the haystack has {self.LEAST} tokens; name a folder with"
                " essays or books"
            )
        self._ids: list[int] = [
            int(token) for document in documents for token in (*document.tokens, *gap)
        ]
        self._ends: dict[int, bool] = {}  # by token

    def _documents(self, corpus: Corpus, tokens: int, limit: int | None) -> list[Document]:
        """Only what is needed is tokenised."""
        count = 1
        while True:
            wanted = count if limit is None else min(count, limit)
            documents = corpus.documents(self.LEAST, wanted)
            enough = sum(map(len, documents)) >= tokens
            if enough or len(documents) < wanted or wanted == limit:
                return documents
            count *= 2

    def first(self, tokens: int) -> list[int]:
        """The first so many ids."""
        rounds = -(-tokens // len(self._ids))
        return (self._ids * rounds)[:tokens]

    def border(self, ids: list[int], depth: float) -> int:
        """Where a needle goes: at the share `depth` of `ids`, moved back to a sentence's end.

        The very end at depth 1, the very beginning where no sentence ends before.
        """
        place = int(len(ids) * depth)
        if depth >= 1:
            return len(ids)
        while place and not self._closes(ids[place - 1]):
            place -= 1
        return place

    def _closes(self, token: int) -> bool:
        if token not in self._ends:
            text = self._tokenizer.decode(np.array([token])).rstrip("\"')\u201d\u2019")
            self._ends[token] = text.endswith(tuple(_ENDS))
        return self._ends[token]
