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
from scipy.optimize import brentq
from scipy.special import nctdtr, ndtri, stdtr

from harness.stats.bootstrap import SEED
from harness.stats.influence import Estimate, Totals, t_interval, t_quantile

#: From here on a correlation of candidates is known well enough to narrow their bands by it.
MANY_GROUPS = 32
#: Standard errors from which a test is sure, and past which the noncentral t is not computed.
_SURE = 30.0
#: Draws behind a simultaneous factor: its error is then below 0.5 %.
DRAWS = 200_000
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
    seed: int = SEED,
    unit: str = "row",
    draws: int = DRAWS,
) -> list[Estimate]:
    """Simultaneous intervals for several candidates against one baseline that hold their family level.

    The factor is the quantile of ``max_k |T_k|`` of a multivariate t with the correlation of the candidates' influence
    values and ``G - 1`` degrees of freedom (Dunnett's kind), from seeded draws; below `MANY_GROUPS` groups, where
    that correlation is hardly known, Bonferroni's Student t. Resampling the groups with
    the standard errors held fixed would be far too narrow for few of them: 20 % false verdicts at 4 to 8 documents.
    """
    single = [t_interval(d, confidence=confidence, unit=unit) for d in differences]
    errors_K = np.array([d.standard_error for d in differences])
    moving = np.isfinite(errors_K) & (errors_K > 0)
    if len(differences) < 2 or not moving.any():
        return single
    influence_KG = np.stack([d.influence_G for d, keep in zip(differences, moving, strict=True) if keep])
    groups, candidates = len(differences[0]), len(influence_KG)
    if groups < MANY_GROUPS:
        factor = t_quantile(groups, 1 - (1 - confidence) / candidates)
    else:
        factor = simultaneous_t(np.corrcoef(influence_KG), groups - 1, confidence, draws=draws, seed=seed)
    return [_band(e, factor, len(differences)) for e in single]


def simultaneous_t(
    correlation_KK: np.ndarray, degrees: int, confidence: float = 0.95, *, draws: int = DRAWS, seed: int = SEED
) -> float:
    """Two-sided quantile of ``max_k |T_k|``, T multivariate t, never below Student's own; by seeded draws."""
    correlation_KK = np.atleast_2d(correlation_KK)
    values_K, vectors_KK = np.linalg.eigh(correlation_KK)
    root_KK = vectors_KK * np.sqrt(values_K.clip(min=0.0))
    rng = np.random.default_rng(seed)
    normal_BK = rng.standard_normal((draws, len(correlation_KK))) @ root_KK.T
    scale_B = np.sqrt(rng.chisquare(degrees, draws) / degrees)
    largest_B = np.abs(normal_BK).max(axis=1) / scale_B
    return max(float(np.quantile(largest_B, confidence)), t_quantile(degrees + 1, confidence))


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


def power_of(effect: float, groups: int, confidence: float = 0.95) -> float:
    """Chance that a two-sided t test over ``groups`` finds a difference of ``effect`` standard deviations.

    By the noncentral t: the normal quantiles alone promise 80 % where 61 % is true at 6 groups.
    """
    degrees, shift = groups - 1, effect * math.sqrt(groups)
    if shift > _SURE:
        return 1.0
    bound = t_quantile(groups, confidence)
    # Far below its shift the noncentral t is too small to be computed, and comes out as nan.
    inside, below = (np.nan_to_num(nctdtr(degrees, shift, end)) for end in (bound, -bound))
    return float(1 - inside + below)


def group_deviation(difference: Totals) -> float:
    """Standard deviation over groups of the influence of a paired difference; nan for one group."""
    return float(difference.influence_G.std(ddof=1)) if len(difference) > 1 else float("nan")


def detectable_difference(deviation: float, groups: int, *, power: float = 0.8, confidence: float = 0.95) -> float:
    """Smallest true difference that ``groups`` contexts show with this power (MDE); nan for one group."""
    if groups < 2 or not math.isfinite(deviation):
        return float("nan")
    effect = brentq(lambda size: power_of(size, groups, confidence) - power, 0.0, _SURE / math.sqrt(groups), xtol=1e-10)
    return float(effect) * deviation


def contexts_needed(deviation: float, difference: float, *, power: float = 0.8, confidence: float = 0.95) -> int:
    """How many contexts show a true ``difference`` with this power."""
    if difference == 0 or not math.isfinite(deviation):
        raise ValueError("a difference of 0, or an unknown deviation, needs no finite number of contexts")
    if deviation == 0:
        return 2
    effect = abs(difference) / deviation
    low = max(2, math.floor(((ndtri(0.5 + confidence / 2) + ndtri(power)) / effect) ** 2))
    power -= 1e-9  # `detectable_difference` is right to so much
    while low > 2 and power_of(effect, low - 1, confidence) >= power:
        low -= 1
    while power_of(effect, low, confidence) < power:
        low += 1
    return low
