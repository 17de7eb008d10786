"""Shares of clustered positions: intervals of a proportion, the sign test, and quantiles through the share below them.

The sign test speaks of the median context, never of the mean: skewed differences with mean 0 make it reject often.
A quantile's interval is that of the share below it, mapped back through order statistics (Woodruff).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import bdtr, betaincinv, ndtri

from harness.stats.influence import Estimate, group_totals, require_finite, t_quantile, too_few, without_interval


def clopper_pearson(successes: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Exact interval of a proportion."""
    if not 0 <= successes <= trials or trials < 1:
        raise ValueError("0 <= successes <= trials and trials >= 1 are needed")
    tail = (1 - confidence) / 2
    low = 0.0 if successes == 0 else float(betaincinv(successes, trials - successes + 1, tail))
    high = 1.0 if successes == trials else float(betaincinv(successes + 1, trials - successes, 1 - tail))
    return low, high


def wilson(
    successes: float, trials: float, confidence: float = 0.95, *, factor: float | None = None
) -> tuple[float, float]:
    """Score interval of a proportion; counts may be effective (fractional) ones.

    Args:
        factor: in place of the normal quantile, where the variance was estimated from few groups.
    """
    if trials <= 0 or not 0 <= successes <= trials:
        raise ValueError("0 <= successes <= trials and trials > 0 are needed")
    z = float(ndtri(0.5 + confidence / 2)) if factor is None else factor
    share, shrink = successes / trials, 1 + z * z / trials
    centre = (share + z * z / (2 * trials)) / shrink
    half = z * np.sqrt(share * (1 - share) / trials + z * z / (4 * trials**2)) / shrink
    return max(0.0, float(centre - half)), min(1.0, float(centre + half))


def newcombe(first: tuple[int, int], second: tuple[int, int], confidence: float = 0.95) -> tuple[float, float]:
    """Interval of ``share(second) - share(first)`` of two unpaired (successes, trials), from their Wilson intervals."""
    share_1, share_2 = first[0] / first[1], second[0] / second[1]
    low_1, high_1 = wilson(*first, confidence)
    low_2, high_2 = wilson(*second, confidence)
    difference = share_2 - share_1
    low = difference - np.hypot(share_2 - low_2, high_1 - share_1)
    return float(low), float(difference + np.hypot(high_2 - share_2, share_1 - low_1))


def two_sided_binomial(successes: int, trials: int) -> float:
    """Exact two-sided p of a fair coin; 1 where there is nothing to count."""
    return 1.0 if trials == 0 else min(1.0, 2 * float(bdtr(min(successes, trials - successes), trials, 0.5)))


@dataclass(frozen=True, slots=True, kw_only=True)
class SignCount:
    """On how many groups a difference was negative, positive or exactly 0.

    ``low`` and ``high`` bound the share of groups with a negative difference among those that are not tied (exact).
    """

    lower: int
    higher: int
    ties: int
    low: float | None
    high: float | None
    p: float
    confidence: float

    @property
    def n(self) -> int:
        """All groups, ties included."""
        return self.lower + self.higher + self.ties


def sign_count(difference_G: np.ndarray, confidence: float = 0.95) -> SignCount:
    """Describe the signs of paired group differences."""
    lower, higher = int((difference_G < 0).sum()), int((difference_G > 0).sum())
    untied = lower + higher
    low, high = clopper_pearson(lower, untied, confidence) if untied else (None, None)
    return SignCount(
        lower=lower,
        higher=higher,
        ties=len(difference_G) - untied,
        low=low,
        high=high,
        p=two_sided_binomial(lower, untied),
        confidence=confidence,
    )


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
