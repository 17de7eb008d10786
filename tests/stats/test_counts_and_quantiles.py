"""Exact proportions, signs, quantiles, tail rates and single-context influence."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
from scipy import stats as scipy_stats

from harness.errors import ScoreError
from harness.stats import (
    Totals,
    block_bootstrap,
    clopper_pearson,
    concentration,
    group_totals,
    newcombe,
    order_quantile,
    pooled_ratio,
    quantile_is_supported,
    rate_interval,
    row_log_ratio,
    sign_count,
    tail_rate,
    two_sided_binomial,
    wilson,
    woodruff,
)
from harness.stats.quantiles import unseen_share


@pytest.mark.parametrize(("x", "n"), [(0, 32), (32, 32), (23, 32), (505, 512), (1, 2)])
def test_clopper_pearson_by_its_definition_and_scipy(x: int, n: int) -> None:
    low, high = clopper_pearson(x, n)
    reference = scipy_stats.binomtest(x, n).proportion_ci(method="exact")
    assert (low, high) == pytest.approx((reference.low, reference.high), abs=1e-10)
    if x:
        tail = mpmath.nsum(
            lambda k: mpmath.binomial(n, k) * mpmath.mpf(low) ** k * (1 - mpmath.mpf(low)) ** (n - k), [x, n]
        )
        assert float(tail) == pytest.approx(0.025, rel=1e-6)


@pytest.mark.parametrize(("x", "n"), [(0, 10), (9, 10), (951, 1140)])
def test_wilson_against_scipy(x: int, n: int) -> None:
    reference = scipy_stats.binomtest(x, n).proportion_ci(method="wilson")
    assert wilson(x, n) == pytest.approx((reference.low, reference.high), abs=1e-12)


@pytest.mark.parametrize(("needed", "n"), [(23, 32), (41, 64), (76, 128), (279, 512)])
def test_contexts_needed_for_a_sign_test(needed: int, n: int) -> None:
    """STATS section 4: the smallest x with p < .05, two-sided."""
    assert two_sided_binomial(needed, n) < 0.05 <= two_sided_binomial(needed - 1, n)


def test_signs_are_counted_with_ties_apart() -> None:
    got = sign_count(np.array([-1.0, -2.0, 0.0, 3.0, -1.0]))
    assert (got.lower, got.higher, got.ties, got.n) == (3, 1, 1, 5)
    assert (got.low, got.high) == pytest.approx(clopper_pearson(3, 4))
    assert got.p == pytest.approx(0.625)
    empty = sign_count(np.zeros(4))
    assert (empty.low, empty.ties, empty.p) == (None, 4, 1.0)


def test_newcombe_of_two_unpaired_accuracies() -> None:
    """Fault B26: 951 against 953 of 1,140 is not distinguishable. Newcombe's worked example 56/70 against 48/80."""
    assert newcombe((48, 80), (56, 70)) == pytest.approx((0.0524, 0.3339), abs=5e-5)
    low, high = newcombe((951, 1140), (953, 1140))
    assert low < 0 < high and high - low == pytest.approx(0.061, abs=0.002)


def test_order_quantile_is_a_value_that_occurred() -> None:
    values = np.arange(1.0, 1001.0)
    assert [order_quantile(values, q) for q in (0.5, 0.95, 0.99, 0.999)] == [500, 950, 990, 999]


def test_woodruff_by_hand() -> None:
    """Rows of equal length: F at the median by row, t around .5, back through the sorted values."""
    rng = np.random.default_rng(1)
    values_RL = rng.lognormal(size=(20, 1)) * rng.lognormal(size=(20, 100))
    got = woodruff(values_RL.ravel(), np.repeat(np.arange(20), 100), 0.5)
    ordered = np.sort(values_RL.ravel())
    shares = (values_RL <= ordered[999]).mean(axis=1)
    half = 2.093024054 * shares.std(ddof=1) / 20**0.5
    assert got.estimate == ordered[999]
    assert got.low == ordered[int(np.ceil((0.5 - half) * 2000)) - 1]
    assert got.high == ordered[int(np.ceil((0.5 + half) * 2000)) - 1]


def test_p999_is_withheld_where_its_tail_is_thin() -> None:
    """Fault B25: 2,047 positions hold two beyond p99.9; and many exceedances of one context do not help."""
    rng = np.random.default_rng(2)
    thin = woodruff(rng.random(2047), np.arange(2047) % 32, 0.999)
    assert thin.low is None and "2 positions lie beyond it" in thin.note
    assert not quantile_is_supported(2047, 0.999) and quantile_is_supported(65_504, 0.999)
    values_N = rng.random(65_504)
    values_N[:200] += 10
    one_context = woodruff(values_N, np.repeat(np.arange(32), 2047), 0.999)
    assert one_context.low is None and "come from 1 contexts" in one_context.note
    assert woodruff(rng.random(65_504), np.repeat(np.arange(32), 2047), 0.999).has_interval


def test_tail_rate_and_its_zero_case() -> None:
    """STATS section 8: no exceedance in 32, 128, 512 rows leaves 8.9, 2.3, 0.58 % of rows possible."""
    assert [unseen_share(n) for n in (32, 128, 512)] == pytest.approx([0.0894, 0.0231, 0.00583], rel=5e-3)
    group_N = np.repeat(np.arange(32), 10)
    none = tail_rate(np.zeros(320), group_N, 0.1)
    assert (none.estimate, none.low) == (0.0, None) and "at most 8.94% of rows" in none.note
    values_N = np.random.default_rng(3).random(320)
    some = tail_rate(values_N, group_N, 0.5)
    reference = scipy_stats.ttest_1samp((values_N > 0.5).reshape(32, 10).mean(axis=1), 0).confidence_interval()
    assert (some.low, some.high) == pytest.approx((reference.low, reference.high))
    with pytest.raises(ScoreError):
        tail_rate(np.array([np.nan, 1.0]), [0, 1], 0.1)


def test_rates_near_one_stay_below_one() -> None:
    agree_RL = np.ones((40, 1000))
    agree_RL[::10, 0] = 0
    got = rate_interval(group_totals(agree_RL.ravel(), np.repeat(np.arange(40), 1000)))
    assert got.high is not None and got.low is not None and got.low < 0.9999 < got.high < 1.0
    assert got.method.startswith("Wilson")


def test_ratio_of_a_doubled_arm_is_two_without_width() -> None:
    a = Totals(np.array([1.0, 2.0, 5.0]), np.array([10.0, 10.0, 20.0]))
    double = Totals(2 * a.sums_G, a.counts_G)
    for ratio in (row_log_ratio(a, double), pooled_ratio(a, double)):
        assert (ratio.estimate, ratio.low, ratio.high) == pytest.approx((2.0, 2.0, 2.0))
    zero = Totals(np.zeros(3), a.counts_G)
    assert row_log_ratio(a, zero).low is None and pooled_ratio(zero, a).low is None


def test_pooled_and_geometric_ratio_are_different_estimands() -> None:
    """Two typical contexts improve, one heavy context gets worse: the mean rises, the geometric ratio falls."""
    a, b = Totals(np.array([1.0, 1.0, 10.0]), np.ones(3)), Totals(np.array([0.5, 0.5, 13.0]), np.ones(3))
    assert pooled_ratio(a, b).estimate > 1 > row_log_ratio(a, b).estimate


def test_concentration_names_the_context_that_decides() -> None:
    """Fault B23: the share that the top context carries, and the mean without each one."""
    got = concentration(Totals(np.array([1.0, 1.0, 6.0, 2.0]), np.ones(4)))
    assert (got.top, got.top_share, got.driven_by_one) == (2, 0.6, True)
    assert (got.leave_one_out_low, got.leave_one_out_high) == pytest.approx((4 / 3, 3.0))
    assert not concentration(Totals(np.ones(32), np.ones(32))).driven_by_one


def test_short_rows_have_no_interval_of_their_own() -> None:
    got = block_bootstrap(np.ones(30))
    assert got.low is None and "30 positions are fewer than 8 blocks" in got.note
    flat = block_bootstrap(np.zeros(2047))
    assert (flat.estimate, flat.low, flat.high) == (0.0, 0.0, 0.0)


def test_share_of_two_groups_stays_a_share() -> None:
    """A t interval over two groups reaches beyond 0 and 1; the truth cannot lie there."""
    hits = np.repeat([0.1, 0.3], 100) > np.tile(np.linspace(0.0, 0.99, 100), 2)
    got = rate_interval(group_totals(hits.astype(float), np.repeat([0, 1], 100)))
    assert (got.low, got.high) == (0.0, 1.0) and "cut at 0 and 1" in got.method
    assert got.estimate == hits.mean()
