"""Verdicts, equivalence, multiplicity, items and power against closed forms and published figures."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats as scipy_stats
from scipy.stats import multivariate_t, nct, norm
from scipy.stats import t as t_dist

from harness.stats import (
    Totals,
    compare_items,
    contexts_needed,
    decide,
    detectable_difference,
    group_deviation,
    holm,
    max_t_bands,
    p_of_difference,
    p_of_equivalence,
    t_interval,
)
from harness.stats.tests import power_of, simultaneous_t


def normal_rows(mean: float, seed: int = 1, rows: int = 32) -> Totals:
    """Rows whose sample mean is exactly ``mean`` and whose sample sd is exactly 1."""
    draws = np.random.default_rng(seed).normal(size=rows)
    return Totals((draws - draws.mean()) / draws.std(ddof=1) + mean, np.ones(rows))


def test_p_values_equal_scipys_one_and_two_sided_tests() -> None:
    rows = normal_rows(0.3)
    estimate = t_interval(rows)
    assert p_of_difference(estimate) == pytest.approx(scipy_stats.ttest_1samp(rows.sums_G, 0).pvalue)
    lower = scipy_stats.ttest_1samp(rows.sums_G, -0.5, alternative="greater").pvalue
    upper = scipy_stats.ttest_1samp(rows.sums_G, 0.5, alternative="less").pvalue
    assert p_of_equivalence(estimate, 0.5) == pytest.approx(max(lower, upper))


def test_equivalence_is_the_90_percent_interval_inside_the_margin() -> None:
    rows = normal_rows(0.1)
    inner = t_interval(rows, confidence=0.90)
    assert inner.high is not None
    assert (
        p_of_equivalence(t_interval(rows), inner.high * 1.0001)
        < 0.05
        < p_of_equivalence(t_interval(rows), inner.high * 0.9999)
    )


@pytest.mark.parametrize(
    ("mean", "margin", "lower_is_better", "verdict"),
    [
        (-1.0, 0.1, True, "better"),
        (-1.0, 0.1, False, "worse"),
        (1.0, 0.1, True, "worse"),
        (1.0, 0.1, False, "better"),
        (0.1, 0.1, True, "undecided"),
        (0.1, 1.0, True, "equivalent"),
        (-0.5, 5.0, True, "equivalent"),
    ],
)
def test_verdicts(mean: float, margin: float, lower_is_better: bool, verdict: str) -> None:
    decision = decide(t_interval(normal_rows(mean)), margin, lower_is_better=lower_is_better)
    assert decision.verdict == verdict
    if (mean, margin) == (-0.5, 5.0):
        assert "though lower in the 95% interval" in decision.reason


def test_a_against_itself_is_equivalent() -> None:
    decision = decide(t_interval(Totals(np.zeros(32), np.ones(32))), 1e-9, lower_is_better=True)
    assert (decision.verdict, decision.p_difference, decision.p_equivalence) == ("equivalent", 1.0, 0.0)
    assert decision.non_inferior


def test_one_row_gets_no_verdict() -> None:
    """A single window said that 8 bits are worse than 6."""
    decision = decide(t_interval(Totals(np.array([-1.4]), np.ones(1))), 0.1, lower_is_better=True)
    assert decision.verdict == "no verdict" and "one row" in decision.reason


def test_constant_difference_is_decided_without_division_by_zero() -> None:
    assert decide(t_interval(Totals(np.ones(4), np.ones(4))), 0.5, lower_is_better=True).verdict == "worse"


def test_non_inferiority_looks_at_the_worse_side_only() -> None:
    estimate = t_interval(normal_rows(-2.0))
    assert decide(estimate, 0.1, lower_is_better=True).non_inferior
    assert not decide(estimate, 0.1, lower_is_better=False).non_inferior


def test_holm_on_a_worked_example() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_bands_are_wider_than_single_intervals_and_collapse_for_equal_arms() -> None:
    same, moved = Totals(np.zeros(32), np.ones(32)), normal_rows(0.2)
    bands = max_t_bands([same, moved, normal_rows(0.1, seed=2)])
    assert (bands[0].low, bands[0].high) == (0.0, 0.0)
    single = t_interval(moved)
    assert bands[1].high > single.high  # type: ignore[operator]
    assert max_t_bands([moved]) == [single]


def test_mcnemar_from_flips() -> None:
    """30 and 20 flips of 14,042 items: -0.07 pp, p = 0.2026, nobody is worse."""
    a_N, b_N = np.zeros(14_042, bool), np.zeros(14_042, bool)
    a_N[:30] = True
    b_N[30:50] = True
    a_N[50:8000] = b_N[50:8000] = True
    got = compare_items(a_N, b_N, np.arange(14_042) % 57)
    assert (got.a_only, got.b_only) == (30, 20)
    assert got.p == pytest.approx(0.2026, abs=5e-5)
    assert got.difference.estimate == pytest.approx(-10 / 14_042)
    paired = scipy_stats.ttest_rel(b_N.astype(float), a_N.astype(float))
    reference = paired.confidence_interval()
    assert (got.difference.low, got.difference.high) == pytest.approx((reference.low, reference.high), rel=1e-3)
    assert (got.bootstrap.low, got.bootstrap.high) == pytest.approx((reference.low, reference.high), abs=8e-5)
    assert got.by_cluster is not None and got.by_cluster.n == 57
    assert (got.a_only + got.b_only) / got.n == pytest.approx(50 / 14_042)


def test_items_that_all_agree() -> None:
    got = compare_items(np.array([1, 0, 1]), np.array([1, 0, 1]))
    assert (got.p, got.difference.low, got.difference.high, got.by_cluster) == (1.0, 0.0, 0.0, None)
    with pytest.raises(ValueError, match="same items"):
        compare_items(np.ones(3), np.ones(2))


def test_power_formula() -> None:
    """The noncentral t; for many rows it comes to R = 7.85 (sd/delta)^2 and MDE = 2.8 sd / sqrt(R)."""
    assert contexts_needed(0.2835, 0.1) == 66
    assert contexts_needed(1.0, 1.0) == 10
    assert detectable_difference(1.0, 4_096) == pytest.approx(2.8016 / 64, rel=1e-3)
    assert contexts_needed(2.0, detectable_difference(2.0, 128)) == 128
    assert group_deviation(normal_rows(3.0)) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="difference of 0"):
        contexts_needed(1.0, 0.0)


@pytest.mark.parametrize(("groups", "power"), [(6, 0.615), (8, 0.673), (16, 0.745), (32, 0.775)])
def test_normal_quantiles_promise_too_much(groups: int, power: float) -> None:
    """What 80 % by z alone really is, by scipy's own noncentral t."""
    effect = (norm.ppf(0.975) + norm.ppf(0.8)) / groups**0.5
    bound = t_dist.ppf(0.975, groups - 1)
    shift = effect * groups**0.5
    expected = nct.sf(bound, groups - 1, shift) + nct.cdf(-bound, groups - 1, shift)
    assert power_of(effect, groups) == pytest.approx(expected, abs=1e-9) == pytest.approx(power, abs=1e-3)


@pytest.mark.parametrize("groups", [6, 16, 128])
def test_power_by_simulation(groups: int) -> None:
    """At the detectable difference, four in five panels see it."""
    rng, seen = np.random.default_rng(5), 0
    delta = detectable_difference(1.0, groups)
    for _ in range(1_500):
        estimate = t_interval(Totals(rng.normal(delta, 1.0, size=groups), np.ones(groups)))
        seen += estimate.low > 0  # type: ignore[operator]
    assert seen / 1_500 == pytest.approx(0.80, abs=0.03)


@pytest.mark.parametrize(("candidates", "degrees", "rho"), [(2, 3, 0.5), (5, 7, 0.5), (5, 15, 0.0), (5, 127, 0.5)])
def test_the_factor_of_a_family_is_the_multivariate_t(candidates: int, degrees: int, rho: float) -> None:
    """Against scipy's own integral of the density."""
    shape = np.full((candidates, candidates), rho) + (1 - rho) * np.eye(candidates)
    bound = np.full(candidates, simultaneous_t(shape, degrees))
    assert multivariate_t.cdf(bound, shape=shape, df=degrees, lower_limit=-bound) == pytest.approx(0.95, abs=2e-3)


@pytest.mark.parametrize("groups", [4, 8, 16, 32])
@pytest.mark.parametrize("lognormal", [False, True])
@pytest.mark.parametrize("rho", [0.0, 0.5])
def test_five_equal_candidates_give_no_false_verdict_too_often(groups: int, lognormal: bool, rho: float) -> None:
    """Nominal 5 % a family; the bound is that and three standard errors of this simulation."""
    rng, families, wrong = np.random.default_rng(groups), 500, 0
    for _ in range(families):
        arms = rng.normal(size=(6, groups)) * (1 - rho) ** 0.5 + rng.normal(size=groups) * rho**0.5
        arms = np.exp(arms) if lognormal else arms
        bands = max_t_bands([Totals(arm - arms[0], np.ones(groups)) for arm in arms[1:]], draws=4_000)
        wrong += any(band.low > 0 or band.high < 0 for band in bands)  # type: ignore[operator]
    assert wrong / families <= 0.05 + 3 * (0.05 * 0.95 / families) ** 0.5


def test_a_margin_of_zero_makes_only_identical_arms_equivalent() -> None:
    same = t_interval(Totals(np.zeros(5), np.ones(5)))
    assert decide(same, 0.0, lower_is_better=True).verdict == "equivalent"
    assert decide(t_interval(normal_rows(0.01)), 0.0, lower_is_better=True).verdict == "undecided"


def test_standard_error_of_an_accuracy_is_of_its_own_size() -> None:
    """14,042 items at 0.58 have a standard error of 0.0042; 0.1186 and 0.4029 were printed once."""
    right = np.zeros(14_042)
    right[: round(0.58 * 14_042)] = 1
    assert t_interval(Totals(right, np.ones(14_042)), unit="item").standard_error == pytest.approx(0.00417, abs=1e-5)
