"""Intervals and correlations against values from elsewhere, and against what must hold."""

import math

import numpy as np
import pytest

from lcjax.evaluation.report.differences import of_records
from lcjax.evaluation.statistics import bootstrap, paired, pearson, spearman, wilson
from lcjax.evaluation.tasks import Icl


def test_wilson_equals_the_published_examples():
    # Newcombe (Statistics in Medicine 1998), table I, method 3
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(15, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert wilson(1, 29) == pytest.approx((0.0061, 0.1718), abs=5e-5)
    assert all(map(math.isnan, wilson(0, 0)))


def test_a_bootstrap_of_many_values_is_the_normal_interval():
    values = np.random.default_rng(0).normal(3, 2, 4000)
    low, high = bootstrap(values)
    error = values.std() / math.sqrt(len(values))
    assert (low, high) == pytest.approx(
        (values.mean() - 1.96 * error, values.mean() + 1.96 * error), abs=0.2 * error
    )
    assert (low, high) == bootstrap(values)  # the same seed
    assert all(map(math.isnan, bootstrap([1.0])))


def test_values_of_one_cluster_count_as_one():
    spread = np.random.default_rng(1).normal(size=40)
    repeated, names = np.repeat(spread, 25), np.repeat(np.arange(40), 25)
    assert bootstrap(repeated, clusters=names.tolist()) == pytest.approx(bootstrap(spread))
    assert np.diff(bootstrap(repeated)) < np.diff(bootstrap(spread)) / 3
    assert all(map(math.isnan, bootstrap([1.0, 2.0], clusters=["a", "a"])))


def test_a_task_counts_repetitions_of_a_question_as_one_example():
    right = np.random.default_rng(2).random(30) < 0.5
    alone = [{"dataset": "sst2", "line": i, "window": i, "correct": x} for i, x in enumerate(right)]
    thrice = [{**record, "window": 3 * i + k} for k in range(3) for i, record in enumerate(alone)]
    task = Icl(path="unused")
    low, high = task.interval(thrice)
    assert high - low == pytest.approx(np.diff(bootstrap(right.astype(float)))[0])
    assert task.interval(alone) == wilson(int(right.sum()), 30)
    gap = of_records(task, *([{**r, "digest": "", "protocol": ""} for r in thrice],) * 2)
    assert gap.count == 90 and gap.p == 1


def test_heavier_values_pull_the_interval():
    low, _ = bootstrap([0.0] * 20 + [1.0] * 20, weights=[1e-9] * 20 + [1.0] * 20)
    assert low > 0.99


def test_paired_differences_detect_what_separate_intervals_hide():
    rng = np.random.default_rng(2)
    base = rng.normal(0, 10, 100)
    other = base + rng.normal(0.5, 1, 100)
    found = paired(base, other)
    assert found.low < found.mean < found.high and found.low > 0
    assert found.p < 0.01 and found.mark == "**"
    assert bootstrap(base)[1] > bootstrap(other)[0]
    back = paired(other, base)
    assert back.mean == pytest.approx(-found.mean) and back.p == pytest.approx(found.p, abs=0.01)


def test_equal_runs_do_not_differ_and_one_example_has_no_p_value():
    same = paired([0, 1, 1], [0, 1, 1])
    assert (same.mean, same.p, same.mark) == (0.0, 1.0, "")
    assert math.isnan(paired([0.0], [1.0]).p) and paired([0.0], [1.0]).mark == ""
    assert paired([], []).count == 0
    assert paired([0.0] * 5, [1.0] * 5).p == 1 / 16  # five signs show no more


def test_correlations_equal_known_values():
    x, y = [1, 2, 3, 4, 5], [2, 1, 4, 3, 5]
    assert pearson(x, y).value == pytest.approx(0.8)
    assert spearman(x, np.exp(y)).value == pytest.approx(0.8)
    # ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4: 4.5 / sqrt(4.5 * 5)
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]).value == pytest.approx(math.sqrt(0.9))
    found = pearson(x, y)
    assert (found.low, found.high) == pytest.approx((-0.2796, 0.9863), abs=2e-4)
    assert found.count == 5
    assert (pearson([1, 2, 3], [1, 2, 4]).low, pearson([1, 2, 3], [1, 2, 4]).high) == (-1, 1)
    assert math.isnan(pearson([1, 1, 1], [1, 2, 3]).value)
