"""Bootstrap intervals against scipy, a slow resampling loop, and closed forms."""

from __future__ import annotations

import time
from typing import get_args

import numpy as np
import pytest
from scipy import stats as scipy_stats

from harness.stats import Method, Totals, bootstrap_interval, mean_interval, resample_matrix
from harness.stats.bootstrap import expanded_tail, studentised

LOGNORMAL = Totals(np.random.default_rng(7).lognormal(size=40), np.ones(40))
UNEQUAL = Totals(np.random.default_rng(8).lognormal(size=12) * np.arange(3, 15), np.arange(3.0, 15.0))


def test_bca_levels_equal_scipys_on_the_same_resamples() -> None:
    """scipy's BCa draws other resamples; with 200,000 both agree to Monte Carlo error."""
    reference = scipy_stats.bootstrap(
        (LOGNORMAL.sums_G,), np.mean, n_resamples=200_000, method="BCa", vectorized=True, axis=-1, batch=20_000, rng=1
    ).confidence_interval
    got = bootstrap_interval(LOGNORMAL, method="bca", resamples=200_000)
    assert (got.low, got.high) == pytest.approx((reference.low, reference.high), rel=0.01)
    percentile = bootstrap_interval(LOGNORMAL, method="percentile", resamples=200_000)
    assert got.high is not None and percentile.high is not None and got.high > percentile.high * 1.03


def test_weights_are_multinomial_seeded_and_built_once() -> None:
    matrix = resample_matrix(12, 5000, 3)
    assert matrix is resample_matrix(12, 5000, 3)
    assert (matrix.weights_BG.sum(axis=1) == 12).all()
    assert not np.array_equal(matrix.weights_BG, resample_matrix(12, 5000, 4).weights_BG)
    assert matrix.weights_BG.mean() == pytest.approx(1.0)
    assert matrix.weights_BG.var() == pytest.approx(11 / 12, rel=0.02)
    with pytest.raises(ValueError):
        matrix.weights_BG[0, 0] = 2.0


def test_studentised_values_equal_a_loop_over_resamples() -> None:
    """Every resample is materialised, and its t computed by the definition, unequal lengths included."""
    matrix = resample_matrix(len(UNEQUAL), 300, 5)
    got_B = studentised(UNEQUAL, matrix)
    for weights, got in zip(matrix.weights_BG, got_B, strict=True):
        drawn = np.repeat(np.arange(len(UNEQUAL)), weights.astype(int))
        again = Totals(UNEQUAL.sums_G[drawn], UNEQUAL.counts_G[drawn])
        assert got == pytest.approx((again.mean - UNEQUAL.mean) / again.standard_error, rel=1e-9)


def test_bootstrap_t_by_the_definition() -> None:
    got = bootstrap_interval(UNEQUAL, method="bootstrap-t", resamples=4000, seed=9)
    t_B = np.sort(studentised(UNEQUAL, resample_matrix(12, 4000, 9)))
    assert got.low == pytest.approx(UNEQUAL.mean - UNEQUAL.standard_error * t_B[3899], rel=0.01)
    assert got.high == pytest.approx(UNEQUAL.mean - UNEQUAL.standard_error * t_B[99], rel=0.01)


def test_expanded_percentile_is_as_wide_as_t_on_normal_data() -> None:
    """Percentile intervals are narrow by sqrt((G-1)/G) and use z; the expanded one gives both back."""
    normal = Totals(np.random.default_rng(11).normal(size=8) + 5, np.ones(8))
    got = bootstrap_interval(normal, method="expanded percentile", resamples=200_000)
    assert got.low is not None and got.high is not None and got.standard_error is not None
    t_width = 2 * 2.364624 * got.standard_error
    assert got.high - got.low == pytest.approx(t_width, rel=0.06)
    assert expanded_tail(8, 0.95) == pytest.approx(scipy_stats.norm.cdf(-((8 / 7) ** 0.5) * 2.3646242510), rel=1e-7)


def test_basic_mirrors_percentile() -> None:
    basic, percentile = (bootstrap_interval(LOGNORMAL, method=m) for m in ("basic", "percentile"))
    assert basic.low == pytest.approx(2 * LOGNORMAL.mean - percentile.high)  # type: ignore[operator]


@pytest.mark.parametrize("method", get_args(Method))
def test_constant_data_give_no_width_and_no_nan(method: Method) -> None:
    """scipy's BCa is NaN on constant data; A == B must be [0, 0]."""
    got = bootstrap_interval(Totals(np.zeros(32), np.full(32, 7.0)), method=method)
    assert (got.estimate, got.low, got.high) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("method", get_args(Method))
def test_same_seed_same_digits(method: Method) -> None:
    first = bootstrap_interval(UNEQUAL, method=method, seed=1)
    resample_matrix.cache_clear()
    assert bootstrap_interval(UNEQUAL, method=method, seed=1) == first
    assert bootstrap_interval(UNEQUAL, method=method, seed=2) != first


def test_few_groups_are_not_bootstrapped_by_default() -> None:
    """Five windows take t on ln(mean), not BCa (81 %) nor bootstrap-t (18 times the mean)."""
    five = Totals(np.array([1.0, 0.6, 0.9, 2.0, 0.8]), np.ones(5))
    got = mean_interval(five, "divergence")
    assert got.method == "t on ln(mean)" and got.high is not None and got.high < 5 * got.estimate
    assert "not to be trusted" in bootstrap_interval(five, method="bca").note
    assert mean_interval(LOGNORMAL, "divergence").method.startswith("bootstrap-t over rows, 10000 resamples")
    assert mean_interval(Totals(np.zeros(4), np.ones(4)), "divergence").high == 0.0


def test_two_groups_have_no_finite_bootstrap_t() -> None:
    got = bootstrap_interval(Totals(np.array([1.0, 2.0]), np.ones(2)), method="bootstrap-t")
    assert got.low is None and "no finite interval" in got.note
    assert bootstrap_interval(Totals(np.array([1.0]), np.ones(1))).note.startswith("one row")


def test_ten_thousand_resamples_of_512_rows_and_40_metrics_take_under_two_cpu_seconds() -> None:
    rows_GK = np.random.default_rng(12).lognormal(size=(512, 40))
    resample_matrix.cache_clear()
    start = time.process_time()
    means_BK = resample_matrix(512).sums(rows_GK) / 512
    ends = np.quantile(means_BK, [0.025, 0.975], axis=0)
    assert time.process_time() - start < 2.0
    assert means_BK.shape == (10_000, 40) and (ends[0] < rows_GK.mean(axis=0)).all()
