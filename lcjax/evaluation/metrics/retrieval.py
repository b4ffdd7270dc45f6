"""Scores of ranked passages: answer recall, hits, recall, reciprocal rank and nDCG.

gains = [0, 1, 0]                            # of the hits of one query, the best first
hit(gains, 1), reciprocal_rank(gains)        # 0.0, 0.5
has_answer("... in Nîmes.", ["Nimes", "Nîmes"])        # True
"""

import functools
import math
import re
import sys
import unicodedata
from collections.abc import Sequence


def hit(gains: Sequence[float], k: int) -> float:
    """1 if one of the first `k` hits is relevant (has a gain above 0)."""
    return float(any(gain > 0 for gain in gains[:k]))


def recall(gains: Sequence[float], k: int, num_relevant: int) -> float:
    """The share of the `num_relevant` relevant passages that are among the first `k` hits."""
    return sum(gain > 0 for gain in gains[:k]) / num_relevant


def reciprocal_rank(gains: Sequence[float], k: int | None = None) -> float:
    """1 / rank of the first relevant one of `k` hits (None: all), counted from 1; 0 without one."""
    ranks = (rank for rank, gain in enumerate(gains[:k], 1) if gain > 0)
    return 1 / next(ranks, math.inf)


def ndcg(gains: Sequence[float], k: int, relevant: Sequence[float]) -> float:
    """Normalised discounted cumulative gain of the first `k` hits.

    DCG = sum over ranks i of gain_i / log2(i + 1), with gains as they are (trec_eval), over that of
    the best order of the gains of all `relevant` passages.
    """

    def dcg(values: Sequence[float]) -> float:
        return math.fsum(gain / math.log2(rank + 1) for rank, gain in enumerate(values[:k], 1))

    return dcg(gains) / dcg(sorted(relevant, reverse=True))


def has_answer(text: str, answers: Sequence[str]) -> bool:
    """Whether `text` contains one of `answers` as whole words, after DPR's normalisation.

    Both are decomposed (NFD), split into runs of letters, numbers and marks and into other single
    characters, and put in lower case (`SimpleTokenizer`, arXiv 2004.04906). So "cat" is not in
    "category", and "Nîmes" is another word than "Nimes". An answer without a word is in no text.
    """
    words = _words(text)
    return any(_words(answer).strip() and _words(answer) in words for answer in answers)


def _words(text: str) -> str:
    """The words of a text, each between blanks."""
    words = _word_pattern().findall(unicodedata.normalize("NFD", text))
    return f" {' '.join(words).lower()} "


@functools.cache
def _word_pattern() -> re.Pattern[str]:
    r"""DPR's `[\p{L}\p{N}\p{M}]+|[^\p{Z}\p{C}]`, whose classes Python's `re` does not know."""
    edges: dict[str, list[str]] = {"word": [], "blank": []}
    last = ""
    for code in range(sys.maxunicode + 1):
        group = unicodedata.category(chr(code))[0]
        kind = "word" if group in "LNM" else "blank" if group in "ZC" else ""
        if kind and kind == last:
            edges[kind][-1] = edges[kind][-1][:10] + f"-\\U{code:08x}"
        elif kind:
            edges[kind].append(f"\\U{code:08x}")
        last = kind
    word, blank = ("".join(ranges) for ranges in edges.values())
    return re.compile(f"[{word}]+|[^{blank}]")
