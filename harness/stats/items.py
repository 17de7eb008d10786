"""Two models on the same task items: who flipped which way, McNemar's exact test, and paired intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.stats.bootstrap import RESAMPLES, SEED
from harness.stats.influence import Estimate, group_totals, t_interval, t_quantile
from harness.stats.proportions import two_sided_binomial


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemComparison:
    """``a_only`` items only the first got right, ``b_only`` only the second; ``difference`` is b minus a."""

    n: int
    a_correct: int
    b_correct: int
    a_only: int
    b_only: int
    difference: Estimate
    bootstrap: Estimate
    by_cluster: Estimate | None
    p: float


def compare_items(
    a_N: np.ndarray,
    b_N: np.ndarray,
    cluster_N: np.ndarray | Sequence[object] | None = None,
    *,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = SEED,
) -> ItemComparison:
    """Paired comparison of item outcomes (0/1 or bool, same items in the same order)."""
    a_N, b_N = np.asarray(a_N).astype(bool), np.asarray(b_N).astype(bool)
    if a_N.shape != b_N.shape or a_N.ndim != 1 or len(a_N) == 0:
        raise ValueError("two arrays of outcomes of the same items are needed")
    a_only, b_only = int((a_N & ~b_N).sum()), int((b_N & ~a_N).sum())
    by_cluster = None
    if cluster_N is not None:
        totals = group_totals(b_N.astype(float) - a_N.astype(float), cluster_N)
        by_cluster = t_interval(totals, confidence=confidence, unit="subject")
    return ItemComparison(
        n=len(a_N),
        a_correct=int(a_N.sum()),
        b_correct=int(b_N.sum()),
        a_only=a_only,
        b_only=b_only,
        difference=paired_difference(a_only, b_only, len(a_N), confidence),
        bootstrap=_bootstrap(a_only, b_only, len(a_N), confidence, resamples, seed),
        by_cluster=by_cluster,
        p=two_sided_binomial(a_only, a_only + b_only),
    )


def paired_difference(a_only: int, b_only: int, n: int, confidence: float = 0.95) -> Estimate:
    """Accuracy difference (second minus first) with the paired standard error."""
    difference = (b_only - a_only) / n
    error = float(np.sqrt(max((a_only + b_only) / n - difference**2, 0.0) / n))
    half = t_quantile(n, confidence) * error if n > 1 else float("nan")
    return Estimate(
        estimate=difference,
        low=difference - half if n > 1 else None,
        high=difference + half if n > 1 else None,
        method="paired t over items",
        confidence=confidence,
        unit="item",
        n=n,
        standard_error=error,
        note="" if n > 1 else "one item gives no interval",
    )


def _bootstrap(a_only: int, b_only: int, n: int, confidence: float, resamples: int, seed: int) -> Estimate:
    """Paired bootstrap over items; a resample's flips are multinomial, so only their counts are drawn."""
    rng = np.random.Generator(np.random.PCG64(seed))
    shares = [a_only / n, b_only / n, (n - a_only - b_only) / n]
    drawn_B3 = rng.multinomial(n, shares, size=resamples)
    tail = (1 - confidence) / 2
    low, high = np.quantile((drawn_B3[:, 1] - drawn_B3[:, 0]) / n, [tail, 1 - tail])
    return Estimate(
        estimate=(b_only - a_only) / n,
        low=float(low),
        high=float(high),
        method=f"percentile bootstrap over items, {resamples} resamples, seed {seed}",
        confidence=confidence,
        unit="item",
        n=n,
    )
