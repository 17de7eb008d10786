"""Token-weighted means of positions that share a row or a document: influence values and what follows from them.

Positions of one row share text, domain and cache state, so the row (or the document, where rows are cut from
fewer documents) is the unit. With ``S_g`` the sum and ``L_g`` the number of scored positions of group ``g``::

    theta = sum S_g / sum L_g        u_g = (S_g - theta * L_g) / mean(L)        SE = sd(u) / sqrt(G)

which is the cluster-robust standard error with the G/(G-1) correction; equal lengths give the plain t interval of
the row means.

Two arms are compared in size by two ratios that answer different questions and can point in different directions: the
*pooled* ratio compares the two means, the *per-row log ratio* is the geometric mean over contexts, the ratio on a
typical context. `concentration` says how much one context decides. Suffix G: groups. Suffix N: positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import stdtrit

from harness.errors import ScoreError

ONE_GROUP = "one {unit} gives no interval: nothing can be said about other {unit}s"
#: One arm's mean or quantile has an interval from this many groups on; below, two or three numbers tell no spread.
MIN_GROUPS = 4
#: A mean that falls by more than this when its top context is left out is "driven by one context".
DRIVEN = 0.20


def too_few(groups: int, unit: str) -> str:
    """Why so few groups carry no interval of one arm (``fewer than 4 documents``), or nothing."""
    return f"fewer than {MIN_GROUPS} {unit}s" if groups < MIN_GROUPS else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A number with its interval.

    ``low`` and ``high`` are None where no honest interval exists; ``note`` then says why, and otherwise holds
    a warning or nothing. ``unit`` is what was resampled (row, document, item) and ``n`` how many of them there are.
    ``withheld`` says that the number itself is not shown: it is nan.
    """

    estimate: float
    low: float | None
    high: float | None
    method: str
    confidence: float
    unit: str
    n: int
    standard_error: float | None = None
    note: str = ""
    withheld: bool = False

    @property
    def has_interval(self) -> bool:
        """Whether both ends exist."""
        return self.low is not None and self.high is not None

    def bounds(self) -> dict[str, Any]:
        """The fields of `harness.measure.receipt.Interval`."""
        return {name: getattr(self, name) for name in ("low", "high", "method", "confidence", "unit", "n", "note")}


def without_interval(estimate: float, *, method: str, confidence: float, unit: str, n: int, note: str) -> Estimate:
    """An estimate that has no interval, with the reason."""
    return Estimate(
        estimate=estimate, low=None, high=None, method=method, confidence=confidence, unit=unit, n=n, note=note
    )


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums and counts of a per-position quantity by group; all that its mean and interval need."""

    sums_G: np.ndarray
    counts_G: np.ndarray

    def __post_init__(self) -> None:
        if self.sums_G.shape != self.counts_G.shape or self.sums_G.ndim != 1 or len(self.sums_G) == 0:
            raise ValueError("sums and counts must be two arrays of one length, at least 1")
        if not (self.counts_G > 0).all():
            raise ValueError("every group needs at least one position")

    def __len__(self) -> int:
        return len(self.sums_G)

    @property
    def mean(self) -> float:
        """The token-weighted mean."""
        return float(self.sums_G.sum() / self.counts_G.sum())

    @property
    def means_G(self) -> np.ndarray:
        """The mean of each group."""
        return self.sums_G / self.counts_G

    @property
    def influence_G(self) -> np.ndarray:
        """Influence of each group on the mean; they sum to 0 (up to rounding)."""
        return (self.sums_G - self.mean * self.counts_G) / self.counts_G.mean()

    @property
    def standard_error(self) -> float:
        """Cluster-robust standard error of the mean; nan for one group."""
        if len(self) < 2:
            return float("nan")
        return float(self.influence_G.std(ddof=1) / np.sqrt(len(self)))

    def minus(self, other: Totals) -> Totals:
        """Totals of the paired difference; both sides must cover the same positions."""
        if not np.array_equal(self.counts_G, other.counts_G):
            raise ValueError("a paired difference needs the same positions on both sides")
        return Totals(self.sums_G - other.sums_G, self.counts_G)


def require_finite(values_N: np.ndarray, what: str = "values") -> None:
    """Refuse NaN and infinities: callers decide what happens to them, an average must not."""
    bad = np.flatnonzero(~np.isfinite(values_N))
    if len(bad):
        raise ScoreError(
            f"{len(bad)} of {values_N.size} {what} are not finite (first at index {bad[0]})",
            "exclude these positions on both sides, count them, and say so beside the number",
        )


def group_totals(values_N: np.ndarray, group_N: np.ndarray | Sequence[object]) -> Totals:
    """Sum per-position values by group, in the sorted order of the group labels."""
    values_N = np.asarray(values_N, dtype=np.float64)
    labels, index_N = np.unique(np.asarray(group_N), return_inverse=True)
    if values_N.shape != index_N.shape or values_N.ndim != 1:
        raise ValueError(f"values {values_N.shape} and groups {index_N.shape} must be two arrays of one length")
    require_finite(values_N)
    sums_G = np.bincount(index_N, weights=values_N, minlength=len(labels))
    return Totals(sums_G, np.bincount(index_N, minlength=len(labels)).astype(np.float64))


def t_quantile(groups: int, confidence: float) -> float:
    """Two-sided Student t factor with ``groups - 1`` degrees of freedom."""
    return float(stdtrit(groups - 1, 0.5 + confidence / 2))


def t_interval(totals: Totals, *, confidence: float = 0.95, unit: str = "row") -> Estimate:
    """Mean with the t interval of its group influence values; the default for paired differences and rates."""
    method = "t on group influence values"
    if len(totals) < 2:
        note = ONE_GROUP.format(unit=unit)
        return without_interval(totals.mean, method=method, confidence=confidence, unit=unit, n=len(totals), note=note)
    half = t_quantile(len(totals), confidence) * totals.standard_error
    return Estimate(
        estimate=totals.mean,
        low=totals.mean - half,
        high=totals.mean + half,
        method=method,
        confidence=confidence,
        unit=unit,
        n=len(totals),
        standard_error=totals.standard_error,
    )


def log_t_interval(totals: Totals, *, confidence: float = 0.95, unit: str = "row") -> Estimate:
    """Mean of a positive quantity with a t interval on ``ln(mean)`` (delta method); its lower end stays above 0.

    For few groups: there the bootstrap has too few distinct resamples to be trusted.
    """
    method = "t on ln(mean)"
    if len(totals) < 2 or totals.mean <= 0:
        note = ONE_GROUP.format(unit=unit) if len(totals) < 2 else "the mean is not positive"
        return without_interval(totals.mean, method=method, confidence=confidence, unit=unit, n=len(totals), note=note)
    factor = np.exp(t_quantile(len(totals), confidence) * totals.standard_error / totals.mean)
    return Estimate(
        estimate=totals.mean,
        low=float(totals.mean / factor),
        high=float(totals.mean * factor),
        method=method,
        confidence=confidence,
        unit=unit,
        n=len(totals),
        standard_error=totals.standard_error,
    )


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
    """How much one group decides: ``top`` is its index in group order, ``top_share`` its part of the sum.

    ``even_share`` is its part of the positions: what it would carry if all groups were alike.
    """

    top: int
    top_share: float
    even_share: float
    leave_one_out_low: float
    leave_one_out_high: float

    @property
    def driven_by_one(self) -> bool:
        """Whether the mean falls by more than a fifth without the top group; one group alone is no such case.

        With many groups that is a share of a fifth, with four alike (a quarter each) a share of 40 %.
        """
        return self.top_share - self.even_share > DRIVEN * (1 - self.even_share)


def concentration(totals: Totals) -> Concentration:
    """Top group's share of the absolute sum, and the range of the mean when any one group is left out."""
    size_G = np.abs(totals.sums_G)
    top, whole = int(size_G.argmax()), float(size_G.sum())
    left_out_G = np.full(1, np.nan)
    if len(totals) > 1:
        left_out_G = (totals.sums_G.sum() - totals.sums_G) / (totals.counts_G.sum() - totals.counts_G)
    return Concentration(
        top=top,
        top_share=float(size_G[top] / whole) if whole > 0 else 0.0,
        even_share=float(totals.counts_G[top] / totals.counts_G.sum()),
        leave_one_out_low=float(left_out_G.min()),
        leave_one_out_high=float(left_out_G.max()),
    )
