"""Exact proportions, signs, quantiles, tail rates and single-context influence."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
from scipy import stats as scipy_stats

from harness.errors import ScoreError
from harness.stats import (
    Estimate,
    Kind,
    Totals,
    block_bootstrap,
    clopper_pearson,
    concentration,
    group_totals,
    mean_interval,
    newcombe,
    order_quantile,
    pooled_ratio,
    row_log_ratio,
    sign_count,
    t_interval,
    two_sided_binomial,
    wilson,
    woodruff,
)
from harness.stats.means import unseen_share


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
    """The smallest x with p < .05, two-sided."""
    assert two_sided_binomial(needed, n) < 0.05 <= two_sided_binomial(needed - 1, n)


def test_signs_are_counted_with_ties_apart() -> None:
    got = sign_count(np.array([-1.0, -2.0, 0.0, 3.0, -1.0]))
    assert (got.lower, got.higher, got.ties, got.n) == (3, 1, 1, 5)
    assert (got.low, got.high) == pytest.approx(clopper_pearson(3, 4))
    assert got.p == pytest.approx(0.625)
    empty = sign_count(np.zeros(4))
    assert (empty.low, empty.ties, empty.p) == (None, 4, 1.0)


def test_newcombe_of_two_unpaired_accuracies() -> None:
    """951 against 953 of 1,140 is not distinguishable. Newcombe's worked example 56/70 against 48/80."""
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
    """2,047 positions hold two beyond p99.9; and many exceedances of one context do not help."""
    rng = np.random.default_rng(2)
    thin = woodruff(rng.random(2047), np.arange(2047) % 32, 0.999)
    assert thin.low is None and "2 positions lie beyond it" in thin.note
    values_N = rng.random(65_504)
    values_N[:200] += 10
    one_context = woodruff(values_N, np.repeat(np.arange(32), 2047), 0.999)
    assert one_context.low is None and "come from 1 contexts" in one_context.note
    assert woodruff(rng.random(65_504), np.repeat(np.arange(32), 2047), 0.999).has_interval


def tail_rate(values_N: np.ndarray, group_N: np.ndarray | list[int], threshold: float) -> Estimate:
    """Share of positions above a threshold, with its interval over groups."""
    return mean_interval(group_totals(np.where(np.isnan(values_N), np.nan, values_N > threshold), group_N), "share")


def test_tail_rate_and_its_zero_case() -> None:
    """No exceedance in 32, 128, 512 rows leaves 8.9, 2.3, 0.58 % of rows possible."""
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
    got = mean_interval(group_totals(agree_RL.ravel(), np.repeat(np.arange(40), 1000)), "share")
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
    """The share that the top context carries, and the mean without each one."""
    got = concentration(Totals(np.array([1.0, 1.0, 6.0, 2.0]), np.ones(4)))
    assert (got.top, got.top_share, got.driven_by_one) == (2, 0.6, True)
    assert got.even_share == 0.25
    assert (got.leave_one_out_low, got.leave_one_out_high) == pytest.approx((4 / 3, 3.0))
    assert not concentration(Totals(np.ones(32), np.ones(32))).driven_by_one


@pytest.mark.parametrize("groups", [1, 2, 3, 4, 8, 32])
def test_equal_contexts_never_drive_a_mean(groups: int) -> None:
    """C18: four equal rows were each "the one"; the rule is the fall of the mean without the top context."""
    assert not concentration(Totals(np.ones(groups), np.ones(groups))).driven_by_one
    if groups < 2:
        return
    for heavy in (1.5, 2.0, 4.0, 9.0):
        sums_G = np.ones(groups)
        sums_G[-1] = heavy
        got = concentration(Totals(sums_G, np.ones(groups)))
        assert got.driven_by_one == (got.leave_one_out_low < 0.8 * sums_G.mean())


def test_a_long_context_may_carry_its_part_of_the_positions() -> None:
    long = Totals(np.array([5.0, 1.0, 1.0]), np.array([5.0, 1.0, 1.0]))
    assert not concentration(long).driven_by_one
    assert concentration(Totals(long.sums_G, np.ones(3))).driven_by_one


def test_short_rows_have_no_interval_of_their_own() -> None:
    got = block_bootstrap(np.ones(30))
    assert got.low is None and "30 positions are fewer than 8 blocks" in got.note
    flat = block_bootstrap(np.zeros(2047))
    assert (flat.estimate, flat.low, flat.high) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("groups", [4, 5, 8, 15])
def test_a_share_of_few_groups_stays_a_share(groups: int) -> None:
    """C53: t of these reaches beyond 1. Wilson by its definition: |p - end| = t sqrt(end (1 - end) / n)."""
    rates_G = np.where(np.arange(groups) == 0, 0.35, 1.0)
    got = mean_interval(Totals(200 * rates_G, np.full(groups, 200.0)), "share", unit="document")
    p, error = rates_G.mean(), rates_G.std(ddof=1) / groups**0.5
    assert p + scipy_stats.t.ppf(0.975, groups - 1) * error > 1
    assert got.low is not None and got.high is not None and 0 < got.low < p < got.high < 1
    n = p * (1 - p) / error**2
    for end in (got.low, got.high):
        assert abs(p - end) == pytest.approx(scipy_stats.t.ppf(0.975, groups - 1) * (end * (1 - end) / n) ** 0.5)


@pytest.mark.parametrize("kind", ["divergence", "share", "real"])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_fewer_than_four_groups_carry_no_interval(kind: Kind, groups: int) -> None:
    """C18: two documents gave a mean KL [-0.09, 0.22]."""
    got = mean_interval(Totals(np.linspace(0.02, 0.11, groups), np.ones(groups)), kind, unit="document")
    assert (got.low, got.high, got.note, got.n) == (None, None, "fewer than 4 documents", groups)
    assert mean_interval(Totals(np.linspace(0.02, 0.11, 4), np.ones(4)), kind).has_interval


@pytest.mark.parametrize("groups", [4, 8, 16, 17, 40])
def test_a_divergence_stays_above_zero(groups: int) -> None:
    """C18: one heavy group takes t below 0, and the studentised bootstrap may follow it."""
    rng = np.random.default_rng(groups)
    for heavy in (10.0, 100.0, 1000.0):
        sums_G = rng.lognormal(size=groups)
        sums_G[0] = heavy
        totals = Totals(sums_G, np.ones(groups))
        got = mean_interval(totals, "divergence")
        low = t_interval(totals).low
        assert low is not None and (low < 0 or heavy == 10.0)
        assert got.low is None or 0 < got.low < got.estimate < (got.high or 0)


def test_a_divergence_that_rounding_takes_below_zero_has_no_interval() -> None:
    got = mean_interval(Totals(np.array([-3e-17, 1e-17, 1e-17, -1e-17]), np.ones(4)), "divergence")
    assert not got.has_interval and got.note == "the mean is not positive"
    zero = mean_interval(Totals(np.zeros(4), np.ones(4)), "divergence")
    assert (zero.low, zero.high) == (0.0, 0.0)


def test_quantiles_of_few_groups_and_at_the_end() -> None:
    """C18: a value that is no extreme is shown, its interval is not; an extreme one is not shown at all."""
    values_N = np.random.default_rng(6).random(9_000)
    median = woodruff(values_N, np.arange(9_000) % 3, 0.5, unit="document")
    assert median.note == "fewer than 4 documents" and median.estimate == order_quantile(values_N, 0.5)
    extreme = woodruff(values_N, np.arange(9_000) % 3, 0.999)
    assert extreme.withheld and np.isnan(extreme.estimate)
    assert extreme.note == "9 positions lie beyond it, 50 are needed"
    lowest = woodruff(np.random.default_rng(7).random(60_000), np.zeros(60_000), 0.001)
    assert "come from 1 contexts" in lowest.note
