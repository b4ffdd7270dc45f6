"""Scores of ranked passages: hits, recall, reciprocal rank and nDCG.

gains = [0, 1, 0]                            # of the hits of one query, the best first
hit(gains, 1), reciprocal_rank(gains)        # 0.0, 0.5
"""

import math
from collections.abc import Sequence


def hit(gains: Sequence[float], k: int) -> float:
    """Returns 1 if one of the first `k` hits is relevant (has a gain above 0), else 0."""
    return float(any(gain > 0 for gain in gains[:k]))


def recall(gains: Sequence[float], k: int, num_relevant: int) -> float:
    """Returns the share of the `num_relevant` relevant passages among the first `k` hits."""
    return sum(gain > 0 for gain in gains[:k]) / num_relevant


def reciprocal_rank(gains: Sequence[float]) -> float:
    """Returns 1 / rank of the first relevant hit, counted from 1; 0 without one."""
    ranks = (rank for rank, gain in enumerate(gains, 1) if gain > 0)
    return 1 / next(ranks, math.inf)


def ndcg(gains: Sequence[float], k: int, relevant: Sequence[float]) -> float:
    """Computes the normalised discounted cumulative gain of the first `k` hits.

    DCG = sum over ranks i of gain_i / log2(i + 1), with linear gains (trec_eval). It is divided by
    the DCG of the best order of `relevant`, the gains of all relevant passages.
    """

    def dcg(values: Sequence[float]) -> float:
        return math.fsum(gain / math.log2(rank + 1) for rank, gain in enumerate(values[:k], 1))

    return dcg(gains) / dcg(sorted(relevant, reverse=True))
