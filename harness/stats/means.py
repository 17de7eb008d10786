"""One arm's mean with the interval that its kind of quantity carries: the one rule for every table that shows it.

- A *divergence* is at least 0 and skewed: bootstrap-t over groups. Where there are few groups, or its lower end would
  pass 0, the t interval of ``ln(mean)``.
- A *share* lies within 0 and 1: t over groups. With few groups, near 0 and 1, and wherever t would pass them: Wilson on
  the effective number of positions, with Student's t in place of the normal quantile.
- A *real* quantity has no such limit: t over groups.

Below `MIN_GROUPS` groups each is withheld. Paired differences have rules of their own: see `t_interval`.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from harness.stats.bootstrap import FEW_GROUPS, RESAMPLES, SEED, bootstrap_interval
from harness.stats.influence import (
    Estimate,
    Totals,
    log_t_interval,
    t_interval,
    t_quantile,
    too_few,
    without_interval,
)
from harness.stats.proportions import wilson

#: Standard deviation of the logs of documents' means from which no interval of their mean covers 93 % in simulation.
UNEQUAL = 0.7
Kind = Literal["divergence", "share", "real"]
#: A share nearer than this to 0 or 1 has a skewed sampling distribution.
NEAR = 0.01


def mean_interval(
    totals: Totals,
    kind: Kind,
    *,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = SEED,
    unit: str = "row",
) -> Estimate:
    """The mean of ``totals`` and its interval; without one, its note says why."""
    if note := too_few(len(totals), unit):
        return without_interval(totals.mean, method="none", confidence=confidence, unit=unit, n=len(totals), note=note)
    if kind == "divergence":
        return _divergence(totals, confidence, resamples, seed, unit)
    if kind == "share":
        return _share(totals, confidence, unit)
    return t_interval(totals, confidence=confidence, unit=unit)


def _divergence(totals: Totals, confidence: float, resamples: int, seed: int, unit: str) -> Estimate:
    if not totals.sums_G.any():
        return t_interval(totals, confidence=confidence, unit=unit)
    if len(totals) >= FEW_GROUPS:
        found = bootstrap_interval(
            totals, method="bootstrap-t", confidence=confidence, resamples=resamples, seed=seed, unit=unit
        )
        if found.low is None or found.low > 0:
            return found
    return log_t_interval(totals, confidence=confidence, unit=unit)


def unequal(totals: Totals) -> float | None:
    """How unequal the groups are, where that makes the interval of a mean of non-negative values optimistic.

    The standard deviation of the logs of their means; None below `UNEQUAL`, and where there is nothing to take logs of.
    """
    means_G = totals.sums_G[totals.sums_G > 0] / totals.counts_G[totals.sums_G > 0]
    if len(means_G) < 2:
        return None
    spread = float(np.log(means_G).std(ddof=1))
    return spread if spread >= UNEQUAL else None


def _share(totals: Totals, confidence: float, unit: str) -> Estimate:
    """A share of exactly 0 or 1 has no interval; its note bounds the share of groups that hold an exception."""
    found, share = t_interval(totals, confidence=confidence, unit=unit), totals.mean
    if share in (0.0, 1.0):
        most = unseen_share(len(totals), confidence)
        note = f"no exception in {len(totals)} {unit}s: at most {most:.2%} of {unit}s have one ({confidence:.0%})"
        return without_interval(
            share, method="zero exceptions", confidence=confidence, unit=unit, n=len(totals), note=note
        )
    plain = len(totals) >= FEW_GROUPS and NEAR <= share <= 1 - NEAR and _within_shares(found)
    if plain or not totals.standard_error:
        return found
    effective = share * (1 - share) / totals.standard_error**2
    low, high = wilson(share * effective, effective, factor=t_quantile(len(totals), confidence))
    return Estimate(
        estimate=share,
        low=low,
        high=high,
        method="Wilson on the effective number of positions, Student's t",
        confidence=confidence,
        unit=unit,
        n=len(totals),
        standard_error=totals.standard_error,
    )


def _within_shares(found: Estimate) -> bool:
    return found.low is not None and found.high is not None and found.low >= 0 and found.high <= 1


def unseen_share(groups: int, confidence: float = 0.95) -> float:
    """Upper limit of the share of groups that hold an event when none of ``groups`` did."""
    return float(1 - (1 - confidence) ** (1 / groups))
