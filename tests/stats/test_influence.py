"""The t interval over groups against independent formulas."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
from scipy import stats as scipy_stats

from harness.errors import ScoreError
from harness.stats import Estimate, Totals, group_totals, log_t_interval, t_interval
from harness.stats.influence import t_quantile


def row_mean_interval(values_N: np.ndarray, row_of_N: np.ndarray, unit: str = "row") -> Estimate:
    """t interval of per-position values over rows."""
    return t_interval(group_totals(values_N, row_of_N), unit=unit)


def totals_of_means(means_R: np.ndarray, counts_R: np.ndarray, group_R: np.ndarray) -> Totals:
    """Totals by group from the means and position counts of rows."""
    return Totals(group_totals(means_R * counts_R, group_R).sums_G, group_totals(counts_R, group_R).sums_G)


def miller_standard_error(values_N: np.ndarray, group_N: np.ndarray) -> float:
    """Slow pure-Python double sum over pairs of one cluster, with the G/(G-1) correction."""
    n, mean = len(values_N), sum(values_N) / len(values_N)
    total = 0.0
    for i in range(n):
        for j in range(n):
            if group_N[i] == group_N[j]:
                total += (values_N[i] - mean) * (values_N[j] - mean)
    groups = len(set(group_N.tolist()))
    return float((total / n**2 * groups / (groups - 1)) ** 0.5)


def test_standard_error_equals_the_double_sum_over_clusters_of_unequal_length() -> None:
    rng = np.random.default_rng(1)
    group_N = np.repeat(np.arange(6), [3, 9, 1, 14, 5, 8])
    values_N = rng.lognormal(size=len(group_N)) + rng.normal(size=6)[group_N]
    shuffled = rng.permutation(len(group_N))
    got = row_mean_interval(values_N[shuffled], group_N[shuffled])
    assert got.estimate == pytest.approx(values_N.mean(), rel=1e-14)
    assert got.standard_error == pytest.approx(miller_standard_error(values_N, group_N), rel=1e-12)
    assert got.n == 6


def test_equal_lengths_give_scipys_t_interval_of_the_row_means() -> None:
    means_R = np.random.default_rng(2).lognormal(size=32)
    reference = scipy_stats.ttest_1samp(means_R, 0).confidence_interval(0.95)
    got = t_interval(Totals(means_R * 2047, np.full(32, 2047.0)))
    assert (got.low, got.high) == pytest.approx((reference.low, reference.high), rel=1e-12)


@pytest.mark.parametrize("groups", [2, 5, 32, 512])
@pytest.mark.parametrize("confidence", [0.9, 0.95])
def test_t_quantile_against_mpmath(groups: int, confidence: float) -> None:
    """The two-sided tail beyond the factor, as an incomplete beta function, is 1 - confidence."""
    t, df = mpmath.mpf(t_quantile(groups, confidence)), groups - 1
    tail = mpmath.betainc(mpmath.mpf(df) / 2, mpmath.mpf(1) / 2, 0, df / (df + t * t), regularized=True)
    assert float(tail) == pytest.approx(1 - confidence, rel=1e-9)


def test_one_group_has_no_interval_and_says_why() -> None:
    """One row gives no verdict."""
    got = row_mean_interval(np.array([1.0, 2.0]), np.array([0, 0]), unit="document")
    assert got.estimate == 1.5
    assert got.low is None and got.high is None and not got.has_interval
    assert "one document gives no interval" in got.note


def test_padding_never_enters_a_mean() -> None:
    """Rows of 3 and 5 positions weigh by their positions, not as rows of 5."""
    values = np.array([1.0, 2.0, 3.0, 10.0, 10.0, 10.0, 10.0, 10.0])
    assert row_mean_interval(values, np.array([0] * 3 + [1] * 5)).estimate == pytest.approx(56 / 8)


def test_a_row_with_two_positions_weighs_two_positions() -> None:
    """Few scored tokens do not make a wild mean."""
    values = np.concatenate([np.full(2046, 0.1), [50.0, 50.0]])
    groups = np.concatenate([np.zeros(2046), [1, 1]])
    assert row_mean_interval(values, groups).estimate == pytest.approx((204.6 + 100) / 2048)


def test_summation_keeps_nine_digits_over_twenty_million_values() -> None:
    """fp32 accumulation gave 0.1048576."""
    got = group_totals(np.full(20_000_000, 0.1), np.zeros(20_000_000, dtype=np.int8))
    assert abs(got.mean - 0.1) < 1e-9


def test_positions_are_not_independent() -> None:
    """A row effect of sd 0.5 (log) makes the clustered error several times the naive one."""
    rng = np.random.default_rng(3)
    kl_RL = np.exp(-5 + 0.5 * rng.normal(size=(32, 1)) + 1.5 * rng.normal(size=(32, 1024)))
    clustered = row_mean_interval(kl_RL.ravel(), np.repeat(np.arange(32), 1024)).standard_error
    naive = kl_RL.std(ddof=1) / np.sqrt(kl_RL.size)
    assert clustered is not None
    assert 3 < clustered / naive < 12


def test_pseudo_replication_is_undone_by_grouping_documents() -> None:
    """24 windows of 4 documents are 4 units."""
    rng = np.random.default_rng(4)
    document_R = np.repeat(np.arange(4), 6)
    means_R = rng.normal(size=4)[document_R] + 0.05 * rng.normal(size=24)
    by_window = t_interval(totals_of_means(means_R, np.full(24, 100), np.arange(24)))
    by_document = t_interval(totals_of_means(means_R, np.full(24, 100), document_R), unit="document")
    assert by_document.n == 4 and by_window.n == 24
    assert by_document.high - by_document.low > 3 * (by_window.high - by_window.low)  # type: ignore[operator]


def test_non_finite_values_are_refused_with_their_place() -> None:
    with pytest.raises(ScoreError, match="2 of 4 values are not finite .first at index 1."):
        group_totals(np.array([0.0, np.nan, 1.0, np.inf]), np.zeros(4))


def test_log_t_stays_above_zero_and_is_not_wild() -> None:
    """Five windows, cv .47: lower end above 0, upper end below five times the mean."""
    means_R = np.array([1.0, 0.6, 0.9, 2.0, 0.8])
    got = log_t_interval(Totals(means_R, np.ones(5)))
    assert got.low is not None and got.high is not None
    assert got.standard_error is not None
    assert 0 < got.low < got.estimate < got.high < 5 * got.estimate
    expected = got.estimate * np.exp(2.776445105 * got.standard_error / got.estimate)
    assert got.high == pytest.approx(expected, rel=1e-8)


def test_paired_difference_of_equal_arms_is_exactly_zero() -> None:
    totals = group_totals(np.random.default_rng(5).lognormal(size=100), np.repeat(np.arange(10), 10))
    got = t_interval(totals.minus(totals))
    assert (got.estimate, got.low, got.high) == (0.0, 0.0, 0.0)


def test_programmer_errors() -> None:
    with pytest.raises(ValueError, match="one length"):
        group_totals(np.ones(3), np.ones(4))
    with pytest.raises(ValueError, match="same positions"):
        Totals(np.ones(2), np.ones(2)).minus(Totals(np.ones(2), np.full(2, 2.0)))
    with pytest.raises(ValueError, match="at least one position"):
        Totals(np.ones(2), np.array([1.0, 0.0]))
