"""Groups of records, intervals, correlations, and paired differences over the same examples.

Examples in one cluster, such as the windows of a document, are not independent. The bootstrap
resamples whole clusters.
"""

import dataclasses
import math
import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from statistics import NormalDist
from typing import Any, TypeVar

import numpy as np

T, K = TypeVar("T"), TypeVar("K", bound=Hashable)
Record = dict[str, Any]  # the fields of a record or of a cell of a table
Records = Sequence[Record]
DRAWS = 2000  # bootstrap samples; ends of a 95 % interval then vary by about 1 % of its width
_CHUNK = 1 << 22  # random numbers per chunk, which bounds memory


def is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def group_by(items: Iterable[T], key: str | Callable[[T], K]) -> dict[K, list[T]]:
    """Groups items by a field, or by a function of each, in the order of the first items."""
    function = operator.itemgetter(key) if isinstance(key, str) else key
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(function(item), []).append(item)
    return groups


def at_longest(items: Records) -> list[Record]:
    """Returns the cells or records of the longest length."""
    longest = max(item["length"] for item in items)
    return [item for item in items if item["length"] == longest]


def wilson(num_right: int, total: int) -> tuple[float, float]:
    """Computes Wilson's 95 % score interval of a share (JASA 1927); NaN for `total` 0.

    It holds near 0 and 1, where a normal interval fails.
    """
    if total < 1:
        return math.nan, math.nan
    from scipy.stats import binomtest

    low, high = binomtest(num_right, total).proportion_ci(0.95, "wilson")
    return float(low), float(high)


def bootstrap(
    values: Sequence[float],
    *,
    weights: Sequence[float] | None = None,
    clusters: Sequence[object] | None = None,
) -> tuple[float, float]:
    """Computes the 95 % bootstrap percentile interval of the weighted mean.

    Args:
      values: Values of the examples.
      weights: Weights of the examples; None for equal weights.
      clusters: The cluster of each example; None if all are independent.

    Returns:
      (low, high), or NaN for fewer than two clusters.
    """
    means = _means(values, weights, clusters)
    if means is None:
        return math.nan, math.nan
    return _central_interval(means)


def _central_interval(means: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def _means(values, weights, clusters) -> np.ndarray | None:
    """Returns weighted means of resampled clusters, float64 [DRAWS]; None below two clusters."""
    values = np.asarray(values, np.float64)
    weights = np.ones_like(values) if weights is None else np.asarray(weights, np.float64)
    names = range(len(values)) if clusters is None else clusters
    order = {name: index for index, name in enumerate(dict.fromkeys(names))}
    count = len(order)
    if count < 2:
        return None
    ids = np.asarray([order[name] for name in names])
    totals = np.bincount(ids, values * weights, count)
    masses = np.bincount(ids, weights, count)
    rng, means = np.random.default_rng(0), []
    step = max(1, _CHUNK // count)
    for start in range(0, DRAWS, step):
        sample = rng.integers(count, size=(min(step, DRAWS - start), count))
        means.append(totals[sample].sum(1) / masses[sample].sum(1))
    return np.concatenate(means)


@dataclasses.dataclass(frozen=True)
class Difference:
    """The mean of `other` minus the mean of `base`, over the examples of both."""

    count: int
    mean: float
    low: float
    high: float
    p: float  # two-sided, of the paired bootstrap; NaN for fewer than two clusters

    @property
    def mark(self) -> str:
        """`**` for p < 0.01, `*` for p < 0.05, else an empty string."""
        if self.p < 0.01:
            return "**"
        return "*" if self.p < 0.05 else ""


def paired(
    base: Sequence[float],
    other: Sequence[float],
    *,
    weights: Sequence[float] | None = None,
    clusters: Sequence[object] | None = None,
) -> Difference:
    """Computes the paired bootstrap of `other - base` (Efron and Tibshirani 1993, ch. 13 and 15).

    p is twice the smaller share of resampled means on one side of 0. It is at least 1 / DRAWS, the
    resolution of the bootstrap. It is also at least 2 / 2**n for n clusters, the smallest p of a
    sign test, as a bootstrap of a few values underestimates p.
    """
    differences = np.asarray(other, np.float64) - np.asarray(base, np.float64)
    if not len(differences):
        return Difference(0, *[math.nan] * 4)
    mean = float(np.average(differences, weights=weights))
    means = _means(differences, weights, clusters)
    if means is None:
        return Difference(len(differences), mean, *[math.nan] * 3)
    low, high = _central_interval(means)
    share = min(np.mean(means <= 0), np.mean(means >= 0))
    num_clusters = len(differences) if clusters is None else len(set(clusters))
    p = min(1.0, max(2 * share, 1 / DRAWS, 2.0 ** (1 - num_clusters)))
    return Difference(len(differences), mean, low, high, float(p))


@dataclasses.dataclass(frozen=True)
class Correlation:
    """A correlation with Fisher's 95 % interval, which is wide for a few methods."""

    value: float
    low: float
    high: float
    count: int


def pearson(x: Sequence[float], y: Sequence[float]) -> Correlation:
    """Computes Pearson's correlation; NaN if x or y is constant."""
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return Correlation(math.nan, math.nan, math.nan, len(x))
    from scipy.stats import pearsonr

    result = pearsonr(x, y)
    low, high = result.confidence_interval(0.95) if len(x) > 3 else (-1.0, 1.0)
    return Correlation(float(result.statistic), float(low), float(high), len(x))


def spearman(x: Sequence[float], y: Sequence[float]) -> Correlation:
    """Computes Spearman's rank correlation; equal values share the mean of their ranks.

    The variance of Fisher's z is that of Bonett and Wright (Psychometrika 2000), which is larger
    than Pearson's.
    """
    from scipy.stats import rankdata

    result = pearson(rankdata(x), rankdata(y))
    if result.count <= 3 or math.isnan(result.value) or abs(result.value) == 1:
        return result
    half = NormalDist().inv_cdf(0.975) * math.sqrt((1 + result.value**2 / 2) / (result.count - 3))
    z = math.atanh(result.value)
    return dataclasses.replace(result, low=math.tanh(z - half), high=math.tanh(z + half))
