"""Relative size of two arms, and how much one context decides.

Two different questions: the *pooled* ratio compares the two means; the *per-row log ratio* is the geometric mean over
contexts, the ratio on a typical context. They can point in different directions, so both carry their names.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harness.stats.estimate import Estimate, without_interval
from harness.stats.influence import Totals, t_interval, t_quantile

#: A mean of which the top row carries more than this share is "driven by one context".
TOP_SHARE_LIMIT = 0.20


def exponentiated(logarithm: Estimate, method: str) -> Estimate:
    """``exp`` of an estimate and of its ends: for perplexity ratios and log ratios."""
    return Estimate(
        estimate=float(np.exp(logarithm.estimate)),
        low=None if logarithm.low is None else float(np.exp(logarithm.low)),
        high=None if logarithm.high is None else float(np.exp(logarithm.high)),
        method=method,
        confidence=logarithm.confidence,
        unit=logarithm.unit,
        n=logarithm.n,
        note=logarithm.note,
    )


def row_log_ratio(a: Totals, b: Totals, *, confidence: float = 0.95, unit: str = "row") -> Estimate:
    """Geometric mean over groups of ``mean_b / mean_a``; each group counts once."""
    method = f"t on per-{unit} ln(B/A), geometric"
    if (a.sums_G <= 0).any() or (b.sums_G <= 0).any():
        note = f"a {unit} with a mean at or below 0 has no ratio"
        return without_interval(float("nan"), method=method, confidence=confidence, unit=unit, n=len(a), note=note)
    logs = Totals(np.log(b.means_G) - np.log(a.means_G), np.ones(len(a)))
    return exponentiated(t_interval(logs, confidence=confidence, unit=unit), method)


def pooled_ratio(a: Totals, b: Totals, *, confidence: float = 0.95, unit: str = "row") -> Estimate:
    """``mean_b / mean_a`` with a t interval on its logarithm, from the difference of relative influences."""
    method = "t on ln of the ratio of means"
    if a.mean <= 0 or b.mean <= 0 or len(a) < 2:
        note = "a mean at or below 0 has no ratio" if len(a) > 1 else f"one {unit} gives no interval"
        value = b.mean / a.mean if a.mean > 0 else float("nan")
        return without_interval(value, method=method, confidence=confidence, unit=unit, n=len(a), note=note)
    influence_G = b.influence_G / b.mean - a.influence_G / a.mean
    error = float(influence_G.std(ddof=1) / np.sqrt(len(a)))
    half = t_quantile(len(a), confidence) * error
    centre = float(np.log(b.mean / a.mean))
    logarithm = Estimate(
        estimate=centre,
        low=centre - half,
        high=centre + half,
        method=method,
        confidence=confidence,
        unit=unit,
        n=len(a),
    )
    return exponentiated(logarithm, method)


@dataclass(frozen=True, slots=True, kw_only=True)
class Concentration:
    """How much one group decides. ``top`` is its index in group order, ``top_share`` its part of the sum."""

    top: int
    top_share: float
    leave_one_out_low: float
    leave_one_out_high: float

    @property
    def driven_by_one(self) -> bool:
        """Whether the top group carries more than a fifth, beyond its even share."""
        return self.top_share > TOP_SHARE_LIMIT


def concentration(totals: Totals) -> Concentration:
    """Top group's share of the absolute sum, and the range of the mean when any one group is left out."""
    size_G = np.abs(totals.sums_G)
    top, whole = int(size_G.argmax()), float(size_G.sum())
    if len(totals) == 1:
        return Concentration(top=0, top_share=1.0, leave_one_out_low=float("nan"), leave_one_out_high=float("nan"))
    left_out_G = (totals.sums_G.sum() - totals.sums_G) / (totals.counts_G.sum() - totals.counts_G)
    return Concentration(
        top=top,
        top_share=float(size_G[top] / whole) if whole > 0 else 0.0,
        leave_one_out_low=float(left_out_G.min()),
        leave_one_out_high=float(left_out_G.max()),
    )
