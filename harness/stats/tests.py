"""Verdicts and power: equivalence by two one-sided tests, Holm's correction, simultaneous bands for several
candidates, what a panel can resolve, and how many contexts a difference needs.

"Not significant" is never "equal": a difference is better, worse, equivalent, or undecided.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from scipy.special import ndtri, stdtr

from harness.stats.bootstrap import RESAMPLES, SEED, resample_matrix
from harness.stats.influence import Estimate, Totals, t_interval, t_quantile

Verdict = Literal["better", "worse", "equivalent", "undecided", "no verdict"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A verdict with what it rests on.

    ``p_difference`` tests a difference of 0, ``p_equivalence`` the two one-sided tests against ``margin``,
    ``non_inferior`` says whether the worse side of the 90 % interval stays inside the margin.
    """

    verdict: Verdict
    reason: str
    margin: float
    p_difference: float | None
    p_equivalence: float | None
    non_inferior: bool | None


def t_tail(estimate: Estimate, value: float) -> float:
    """One-sided p that the true value is at or below ``value`` (probability of a mean this far above it)."""
    error = estimate.standard_error
    if error is None:
        raise ValueError("an estimate without a standard error has no test")
    if error == 0:
        return 0.0 if estimate.estimate > value else (0.5 if estimate.estimate == value else 1.0)
    return float(stdtr(estimate.n - 1, -(estimate.estimate - value) / error))


def mirrored(estimate: Estimate) -> Estimate:
    """The same estimate with its sign turned, so that a small upper tail keeps its digits."""
    return replace(estimate, estimate=-estimate.estimate)


def p_of_difference(estimate: Estimate) -> float:
    """Two-sided p of the t test that the true difference is 0."""
    if estimate.standard_error == 0:
        return 1.0 if estimate.estimate == 0 else 0.0
    return 2 * min(t_tail(estimate, 0.0), t_tail(mirrored(estimate), 0.0))


def p_of_equivalence(estimate: Estimate, margin: float) -> float:
    """p of the two one-sided tests: below 0.05 exactly when the 90 % interval lies inside (-margin, margin)."""
    return max(t_tail(estimate, -margin), t_tail(mirrored(estimate), -margin))


def decide(difference: Estimate, margin: float, *, lower_is_better: bool) -> Decision:
    """Verdict on a paired difference (other minus baseline) against a margin fixed before measuring.

    Equivalence comes first: a difference that surely lies inside the margin does not matter, even when it is
    surely not 0; the reason then says its direction. With a margin of 0 only identical arms are equivalent.
    """
    if not margin >= 0:
        raise ValueError("the margin must not be negative")
    if difference.standard_error is None or not difference.has_interval:
        return Decision(
            verdict="no verdict",
            reason=difference.note or "no interval",
            margin=margin,
            p_difference=None,
            p_equivalence=None,
            non_inferior=None,
        )
    p_zero, p_equal = p_of_difference(difference), p_of_equivalence(difference, margin)
    worse_side = t_tail(mirrored(difference) if lower_is_better else difference, -margin)
    verdict, reason = _verdict(difference, margin, p_equal, lower_is_better)
    return Decision(
        verdict=verdict,
        reason=reason,
        margin=margin,
        p_difference=p_zero,
        p_equivalence=p_equal,
        non_inferior=worse_side < 0.05,
    )


def _verdict(difference: Estimate, margin: float, p_equal: float, lower_is_better: bool) -> tuple[Verdict, str]:
    low, high = difference.low, difference.high
    assert low is not None and high is not None
    level = f"{difference.confidence:.0%}"
    direction = "lower" if high < 0 else ("higher" if low > 0 else "")
    if low == high == 0:
        return "equivalent", f"identical in every {difference.unit}"
    if p_equal < 0.05:
        side = f", though {direction} in the {level} interval" if direction else ""
        return "equivalent", f"the 90% interval lies inside the margin of {margin:.4g}{side}"
    if not direction:
        return "undecided", f"the {level} interval holds 0 and the 90% interval leaves the margin of {margin:.4g}"
    better = (direction == "lower") == lower_is_better
    return ("better" if better else "worse"), f"the {level} interval lies wholly on the {direction} side of 0"


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjusted p values, in the order given."""
    m, adjusted, running = len(p_values), [0.0] * len(p_values), 0.0
    for rank, index in enumerate(np.argsort(np.asarray(p_values), kind="stable")):
        running = max(running, min(1.0, p_values[index] * (m - rank)))
        adjusted[index] = running
    return adjusted


def max_t_bands(
    differences: Sequence[Totals],
    *,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = SEED,
    unit: str = "row",
) -> list[Estimate]:
    """Simultaneous intervals for several candidates against one baseline, from the shared resamples.

    The factor is the quantile of ``max_k |theta*_k - theta_k| / SE_k``, never below Student's t.
    """
    single = [t_interval(d, confidence=confidence, unit=unit) for d in differences]
    errors_K = np.array([d.standard_error for d in differences])
    moving = np.isfinite(errors_K) & (errors_K > 0)
    if len(differences) < 2 or not moving.any():
        return single
    matrix = resample_matrix(len(differences[0]), resamples, seed)
    sums_GK = np.stack([d.sums_G for d, keep in zip(differences, moving, strict=True) if keep], axis=1)
    means_K = np.array([d.mean for d, keep in zip(differences, moving, strict=True) if keep])
    means_BK = matrix.sums(sums_GK) / matrix.sums(differences[0].counts_G)[:, None]
    largest_B = (np.abs(means_BK - means_K) / errors_K[moving]).max(axis=1)
    factor = max(float(np.quantile(largest_B, confidence)), t_quantile(len(differences[0]), confidence))
    return [_band(e, factor, len(differences)) for e in single]


def _band(single: Estimate, factor: float, candidates: int) -> Estimate:
    half = factor * (single.standard_error or 0.0)
    return Estimate(
        estimate=single.estimate,
        low=single.estimate - half,
        high=single.estimate + half,
        method=f"max-|t| band over {candidates} candidates",
        confidence=single.confidence,
        unit=single.unit,
        n=single.n,
        standard_error=single.standard_error,
    )


def z_sum(power: float = 0.8, confidence: float = 0.95) -> float:
    """``z_(1 - alpha/2) + z_power``: 2.80 for 80 % power at 95 %."""
    return float(ndtri(0.5 + confidence / 2) + ndtri(power))


def group_deviation(difference: Totals) -> float:
    """Standard deviation over groups of the influence of a paired difference; nan for one group."""
    return float(difference.influence_G.std(ddof=1)) if len(difference) > 1 else float("nan")


def detectable_difference(deviation: float, groups: int, *, power: float = 0.8, confidence: float = 0.95) -> float:
    """Smallest true difference that ``groups`` contexts show with this power (MDE)."""
    return z_sum(power, confidence) * deviation / math.sqrt(groups)


def contexts_needed(deviation: float, difference: float, *, power: float = 0.8, confidence: float = 0.95) -> int:
    """How many contexts show a true ``difference`` with this power."""
    if difference == 0 or not math.isfinite(deviation):
        raise ValueError("a difference of 0, or an unknown deviation, needs no finite number of contexts")
    needed = (z_sum(power, confidence) * deviation / abs(difference)) ** 2
    return max(2, math.ceil(np.nextafter(needed, 0)))
