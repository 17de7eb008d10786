"""Quantiles of clustered positions, and the one rule by which a quantile is withheld.

Clustered Woodruff: the interval of the distribution function at the quantile (a t interval over groups around
``q``) is mapped back through the order statistics. It covers where the cluster bootstrap does not, and costs one sort.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from harness.stats.influence import Estimate, group_totals, require_finite, t_quantile, too_few, without_interval

#: A quantile's interval needs this many positions beyond it.
MIN_BEYOND = 50
#: A quantile with less than this beyond it is extreme: it is withheld, number and all, where the positions beyond it
#: are fewer than `MIN_BEYOND` or come from fewer than `MIN_GROUPS_BEYOND` groups.
EXTREME, MIN_GROUPS_BEYOND = 0.01, 10


def order_quantile(values_N: np.ndarray, q: float) -> float:
    """The order statistic x_(ceil(q N)), a value that occurred."""
    return float(np.quantile(np.asarray(values_N, dtype=np.float64), q, method="inverted_cdf"))


def why_withheld(values_N: np.ndarray, group_N: np.ndarray | Sequence[object], q: float) -> str:
    """Why quantile ``q`` of these finite values says nothing about other positions, or nothing."""
    if min(q, 1 - q) >= EXTREME * (1 - 1e-9):
        return ""
    if note := _too_thin(len(values_N), q):
        return note
    value = order_quantile(values_N, q)
    beyond_N = values_N >= value if q >= 0.5 else values_N <= value
    groups = len(np.unique(np.asarray(group_N)[beyond_N]))
    if groups < MIN_GROUPS_BEYOND:
        return f"the positions beyond it come from {groups} contexts, {MIN_GROUPS_BEYOND} are needed"
    return ""


def _too_thin(positions: int, q: float) -> str:
    expected = positions * min(q, 1 - q)
    return "" if expected >= MIN_BEYOND else f"{expected:.0f} positions lie beyond it, {MIN_BEYOND} are needed"


def woodruff(
    values_N: np.ndarray,
    group_N: np.ndarray | Sequence[object],
    q: float,
    *,
    confidence: float = 0.95,
    unit: str = "row",
) -> Estimate:
    """Quantile ``q`` of the positions with the clustered Woodruff interval.

    One that is withheld (`why_withheld`) is nan, and its note says why.
    """
    values_N = np.asarray(values_N, dtype=np.float64)
    require_finite(values_N)
    value = order_quantile(values_N, q)
    below = group_totals(values_N <= value, group_N)
    named: dict[str, Any] = {"method": "clustered Woodruff", "confidence": confidence, "unit": unit, "n": len(below)}
    if withheld := why_withheld(values_N, group_N, q):
        return Estimate(estimate=float("nan"), low=None, high=None, **named, note=withheld, withheld=True)
    if note := too_few(len(below), unit) or _too_thin(len(values_N), q):
        return without_interval(value, **named, note=note)
    half = t_quantile(len(below), confidence) * below.standard_error
    if q + half >= 1:
        note = "the interval would end beyond the largest value seen"
        return without_interval(value, **named, note=note)
    low, high = order_quantile(values_N, max(q - half, 0.0)), order_quantile(values_N, q + half)
    return Estimate(estimate=value, low=low, high=high, **named)
