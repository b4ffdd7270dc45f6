"""Intervals, correlations, and the difference of two runs over the same examples.

Examples may come in clusters, such as the windows of one document: then whole clusters are drawn
again, because what they hold is not independent.
"""

import dataclasses
import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

DRAWS = 2000  # of a bootstrap: the ends of a 95 % interval are then known to about 1 % of its width
_CHUNK = 1 << 22  # numbers that are drawn at once


def wilson(right: int, total: int, confidence: float = 0.95) -> tuple[float, float]:
    """Interval of a share (Wilson, JASA 1927): holds near 0 and 1, where +- s fails."""
    if total < 1:
        return math.nan, math.nan
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share, weight = right / total, z * z / total
    middle = (share + weight / 2) / (1 + weight)
    half = z / (1 + weight) * math.sqrt(share * (1 - share) / total + weight / (4 * total))
    return max(0.0, middle - half), min(1.0, middle + half)


def bootstrap(
    values: Sequence[float],
    *,
    weights: Sequence[float] | None = None,
    clusters: Sequence[object] | None = None,
    confidence: float = 0.95,
    seed: int = 0,
) -> tuple[float, float]:
    """Percentile interval of the weighted mean; NaN with fewer than two clusters."""
    means = _means(values, weights, clusters, seed)
    if means is None:
        return math.nan, math.nan
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def _means(values, weights, clusters, seed: int) -> np.ndarray | None:
    """Weighted means of resampled clusters, float64 [DRAWS]; None where nothing can be drawn."""
    values = np.asarray(values, np.float64)
    weights = np.ones_like(values) if weights is None else np.asarray(weights, np.float64)
    names = range(len(values)) if clusters is None else clusters
    order = {name: index for index, name in enumerate(dict.fromkeys(names))}
    count = len(order)
    if count < 2:
        return None
    places = np.asarray([order[name] for name in names])
    totals = np.bincount(places, values * weights, count)
    masses = np.bincount(places, weights, count)
    rng, means = np.random.default_rng(seed), []
    step = max(1, _CHUNK // count)
    for start in range(0, DRAWS, step):
        drawn = rng.integers(count, size=(min(step, DRAWS - start), count))
        means.append(totals[drawn].sum(1) / masses[drawn].sum(1))
    return np.concatenate(means)


@dataclasses.dataclass(frozen=True)
class Difference:
    """Of the mean of `other` from the mean of `base`, over examples that both have answered."""

    count: int
    mean: float
    low: float
    high: float
    p: float  # two-sided, of the paired bootstrap; NaN where nothing can be drawn

    @property
    def mark(self) -> str:
        """`**` below 0.01, `*` below 0.05, else nothing."""
        return "**" * (self.p < 0.01) or "*" * (self.p < 0.05)


def paired(
    base: Sequence[float],
    other: Sequence[float],
    *,
    weights: Sequence[float] | None = None,
    clusters: Sequence[object] | None = None,
    seed: int = 0,
) -> Difference:
    """Paired bootstrap (Efron and Tibshirani 1993, chapters 13 and 15) of `other - base`.

    p is twice the smaller share of resampled differences beyond 0, at least 1 / draws: a bootstrap
    tells of no smaller one. Nor do n clusters that all point one way: it is at least 2 / 2**n, that
    of a sign test, where a bootstrap of few values is too sure.
    """
    gaps = np.asarray(other, np.float64) - np.asarray(base, np.float64)
    if not len(gaps):
        return Difference(0, *[math.nan] * 4)
    mean = float(np.average(gaps, weights=weights))
    means = _means(gaps, weights, clusters, seed)
    if means is None:
        return Difference(len(gaps), mean, *[math.nan] * 3)
    low, high = (float(end) for end in np.quantile(means, [0.025, 0.975]))
    share = min(np.mean(means <= 0), np.mean(means >= 0))
    drawn = len(gaps) if clusters is None else len(set(clusters))
    p = min(1.0, max(2 * share, 1 / DRAWS, 2.0 ** (1 - drawn)))
    return Difference(len(gaps), mean, low, high, float(p))


@dataclasses.dataclass(frozen=True)
class Correlation:
    """With Fisher's 95 % interval, which is wide for as few methods as a study compares."""

    value: float
    low: float
    high: float
    count: int


def pearson(x: Sequence[float], y: Sequence[float]) -> Correlation:
    """How linear y is in x; NaN where one of them does not vary."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return Correlation(*[math.nan] * 3, len(x))
    x, y = x - x.mean(), y - y.mean()
    value = float(np.clip((x @ y) / math.sqrt((x @ x) * (y @ y)), -1, 1))
    variance = 1 / (len(x) - 3) if len(x) > 3 else math.inf
    return Correlation(value, *_fisher(value, variance), len(x))


def spearman(x: Sequence[float], y: Sequence[float]) -> Correlation:
    """Pearson's correlation of ranks; equal values share the mean of their ranks.

    The variance of Fisher's z is that of Bonett and Wright (Psychometrika 2000).
    """
    found = pearson(_ranks(x), _ranks(y))
    if math.isnan(found.value):
        return found
    count = found.count
    variance = (1 + found.value**2 / 2) / (count - 3) if count > 3 else math.inf
    return Correlation(found.value, *_fisher(found.value, variance), count)


def _fisher(value: float, variance: float) -> tuple[float, float]:
    if not math.isfinite(variance):
        return -1.0, 1.0
    if abs(value) == 1:
        return value, value
    middle, half = math.atanh(value), NormalDist().inv_cdf(0.975) * math.sqrt(variance)
    return math.tanh(middle - half), math.tanh(middle + half)


def _ranks(values: Sequence[float]) -> np.ndarray:
    values = np.asarray(values, np.float64)
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse]
