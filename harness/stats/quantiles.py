"""Quantiles and tail rates of clustered positions.

Clustered Woodruff: the interval of the distribution function at the quantile (a t interval over groups around
``q``) is mapped back through the order statistics. It covers where the cluster bootstrap does not, and costs one sort.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from harness.stats.estimate import Estimate, without_interval
from harness.stats.influence import ONE_GROUP, Totals, group_totals, require_finite, t_interval, t_quantile
from harness.stats.proportions import wilson

#: A quantile interval needs this many positions beyond it; an extreme one, positions from this many groups.
MIN_BEYOND, MIN_GROUPS_BEYOND, EXTREME = 50, 10, 0.001


def order_quantile(values_N: np.ndarray, q: float) -> float:
    """The order statistic x_(ceil(q N)), a value that occurred."""
    return float(np.quantile(np.asarray(values_N, dtype=np.float64), q, method="inverted_cdf"))


def woodruff(
    values_N: np.ndarray,
    group_N: np.ndarray | Sequence[object],
    q: float,
    *,
    confidence: float = 0.95,
    unit: str = "row",
) -> Estimate:
    """Quantile ``q`` of the positions with the clustered Woodruff interval; withheld where the tail is too thin."""
    values_N = np.asarray(values_N, dtype=np.float64)
    require_finite(values_N)
    value = order_quantile(values_N, q)
    below = group_totals(values_N <= value, group_N)
    note = _too_thin(values_N, np.asarray(group_N), q, value) if len(below) > 1 else ONE_GROUP.format(unit=unit)
    half = t_quantile(len(below), confidence) * below.standard_error if len(below) > 1 else np.nan
    if not note and q + half >= 1:
        note = "the interval would end beyond the largest value seen"
    if note:
        return without_interval(
            value, method="clustered Woodruff", confidence=confidence, unit=unit, n=len(below), note=note
        )
    return Estimate(
        estimate=value,
        low=order_quantile(values_N, max(q - half, 0.0)),
        high=order_quantile(values_N, q + half),
        method="clustered Woodruff",
        confidence=confidence,
        unit=unit,
        n=len(below),
    )


def _too_thin(values_N: np.ndarray, group_N: np.ndarray, q: float, value: float) -> str:
    """Why the tail beyond an extreme quantile is too thin for an interval, or nothing."""
    expected = len(values_N) * min(q, 1 - q)
    if expected < MIN_BEYOND:
        return f"n.a.: {expected:.0f} positions lie beyond it, {MIN_BEYOND} are needed"
    if min(q, 1 - q) > EXTREME * (1 + 1e-9):
        return ""
    groups = len(np.unique(group_N[values_N >= value if q >= 0.5 else values_N <= value]))
    if groups < MIN_GROUPS_BEYOND:
        return f"n.a.: the positions beyond it come from {groups} contexts, {MIN_GROUPS_BEYOND} are needed"
    return ""


def quantile_is_supported(positions: int, q: float) -> bool:
    """Whether a quantile may be printed at all: N * (1 - q) >= 50 on its thinner side."""
    return positions * min(q, 1 - q) >= MIN_BEYOND


def rate_interval(rate: Totals, *, confidence: float = 0.95, unit: str = "row") -> Estimate:
    """A share of positions: t over groups, or Wilson on the effective number of positions near 0 and 1.

    A rate of exactly 0 or 1 has no interval; its note bounds the share of groups that hold an exception.
    """
    estimate = t_interval(rate, confidence=confidence, unit=unit)
    if estimate.standard_error is None or 0.01 <= rate.mean <= 0.99:
        return _within_shares(estimate)
    if rate.mean in (0.0, 1.0):
        most = unseen_share(len(rate), confidence)
        note = f"none in {len(rate)} {unit}s: at most {most:.2%} of {unit}s have one ({confidence:.0%})"
        return without_interval(
            rate.mean, method="zero exceptions", confidence=confidence, unit=unit, n=len(rate), note=note
        )
    if estimate.standard_error == 0:
        return estimate
    effective = rate.mean * (1 - rate.mean) / estimate.standard_error**2
    low, high = wilson(rate.mean * effective, effective, confidence)
    return Estimate(
        estimate=rate.mean,
        low=low,
        high=high,
        method="Wilson on the effective number of positions",
        confidence=confidence,
        unit=unit,
        n=len(rate),
        standard_error=estimate.standard_error,
    )


def _within_shares(estimate: Estimate) -> Estimate:
    """An interval of few groups may reach beyond what a share can be: cutting that off loses no coverage."""
    if estimate.low is None or estimate.high is None or (estimate.low >= 0 and estimate.high <= 1):
        return estimate
    method = f"{estimate.method}, cut at 0 and 1"
    return replace(estimate, low=max(0.0, estimate.low), high=min(1.0, estimate.high), method=method)


def tail_rate(
    values_N: np.ndarray,
    group_N: np.ndarray | Sequence[object],
    threshold: float,
    *,
    confidence: float = 0.95,
    unit: str = "row",
) -> Estimate:
    """Share of positions above a threshold that was fixed in advance."""
    require_finite(np.asarray(values_N, dtype=np.float64))
    return rate_interval(group_totals(np.asarray(values_N) > threshold, group_N), confidence=confidence, unit=unit)


def unseen_share(groups: int, confidence: float = 0.95) -> float:
    """Upper limit of the share of groups that hold an event when none of ``groups`` did."""
    return float(1 - (1 - confidence) ** (1 / groups))
