"""Resampling: of rows or documents from one shared matrix of weights, and of blocks of positions within one row.

``weights_BG[b, g]`` says how often resample ``b`` drew group ``g``. It is drawn once for a number of groups and a
seed and reused for every metric, arm, domain and pair, which makes all intervals of a report jointly consistent
and turns 10,000 resamples of a metric into one matrix product.

Neighbouring positions of one row are not independent, so `block_bootstrap` draws blocks of them. Its interval speaks of
this context's text only ("would another sample of like positions agree?"), never of other contexts.

Suffix B: resamples. Suffix G: groups. Suffix T: positions of one row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from scipy.special import ndtr, ndtri

from harness.stats.influence import ONE_GROUP, Estimate, Totals, t_quantile, without_interval

Method = Literal["percentile", "expanded percentile", "basic", "bca", "bootstrap-t"]
RESAMPLES = 10_000
SEED = 20_260
#: Below this many groups a bootstrap is not used by default: few distinct resamples (tests/stats/test_coverage.py).
FEW_GROUPS = 16

ROW_RESAMPLES = 2_000
#: A row needs this many blocks for an interval.
MIN_BLOCKS = 8


@dataclass(frozen=True, slots=True)
class ResampleMatrix:
    """Multinomial weights of ``resamples`` draws of ``groups`` from ``groups``, fixed by ``seed``."""

    weights_BG: np.ndarray
    seed: int

    @property
    def groups(self) -> int:
        """How many groups each resample draws."""
        return self.weights_BG.shape[1]

    @property
    def resamples(self) -> int:
        """How many resamples there are."""
        return self.weights_BG.shape[0]

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Resampled sums of one metric ``[G] -> [B]`` or of many ``[G, K] -> [B, K]``."""
        return self.weights_BG @ np.asarray(values, dtype=np.float64)

    def means(self, totals: Totals) -> np.ndarray:
        """Resampled token-weighted means ``[B]``."""
        return self.sums(totals.sums_G) / self.sums(totals.counts_G)


@lru_cache(maxsize=4)
def resample_matrix(groups: int, resamples: int = RESAMPLES, seed: int = SEED) -> ResampleMatrix:
    """The shared matrix for this many groups: the same arguments give the same digits."""
    if groups < 1 or resamples < 1:
        raise ValueError("groups and resamples must be positive")
    drawn_BG = np.random.Generator(np.random.PCG64(seed)).integers(0, groups, size=(resamples, groups))
    drawn_BG += np.arange(resamples)[:, None] * groups
    counts = np.bincount(drawn_BG.ravel(), minlength=resamples * groups)
    weights_BG = counts.reshape(resamples, groups).astype(np.float64)
    weights_BG.setflags(write=False)
    return ResampleMatrix(weights_BG, seed)


def bootstrap_interval(
    totals: Totals,
    *,
    method: Method = "expanded percentile",
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = SEED,
    unit: str = "row",
) -> Estimate:
    """Mean of ``totals`` with a bootstrap interval over groups; constant data give an interval of no width."""
    kind = method if method == "bootstrap-t" else f"{method} bootstrap"
    name = f"{kind} over {unit}s, {resamples} resamples, seed {seed}"
    if len(totals) < 2:
        note = ONE_GROUP.format(unit=unit)
        return without_interval(totals.mean, method=name, confidence=confidence, unit=unit, n=len(totals), note=note)
    ends = _ends(totals, resample_matrix(len(totals), resamples, seed), method, confidence)
    if not np.isfinite(ends).all():
        note = f"{method} has no finite interval with {len(totals)} {unit}s"
        return without_interval(totals.mean, method=name, confidence=confidence, unit=unit, n=len(totals), note=note)
    return Estimate(
        estimate=totals.mean,
        low=float(ends[0]),
        high=float(ends[1]),
        method=name,
        confidence=confidence,
        unit=unit,
        n=len(totals),
        standard_error=totals.standard_error,
        note=f"few {unit}s: the bootstrap is not to be trusted" if len(totals) < FEW_GROUPS else "",
    )


def _ends(totals: Totals, matrix: ResampleMatrix, method: Method, confidence: float) -> np.ndarray:
    """Both ends of one bootstrap interval; nan or inf where it does not exist."""
    tail = (1 - confidence) / 2
    if not np.ptp(totals.means_G):
        return np.array([totals.mean, totals.mean])
    if method == "bootstrap-t":
        # Order statistics stay defined where single resamples are infinite.
        t_low, t_high = np.quantile(studentised(totals, matrix), [tail, 1 - tail], method="inverted_cdf")
        return totals.mean - totals.standard_error * np.array([t_high, t_low])
    means_B = matrix.means(totals)
    if method == "basic":
        return 2 * totals.mean - np.quantile(means_B, [1 - tail, tail])
    if method == "bca":
        return np.quantile(means_B, _bca_levels(totals, means_B, tail))
    if method == "expanded percentile":
        tail = expanded_tail(len(totals), confidence)
    return np.quantile(means_B, [tail, 1 - tail])


def expanded_tail(groups: int, confidence: float) -> float:
    """Hesterberg's tail probability: makes the percentile interval as wide as a t interval on normal data."""
    return float(ndtr(-np.sqrt(groups / (groups - 1)) * t_quantile(groups, confidence)))


def studentised(totals: Totals, matrix: ResampleMatrix) -> np.ndarray:
    """``(theta* - theta) / SE*`` of every resample ``[B]``; +-inf where a resample drew one group only."""
    residuals_G, counts_G, groups = totals.sums_G - totals.mean * totals.counts_G, totals.counts_G, len(totals)
    columns = [residuals_G, counts_G, residuals_G**2, residuals_G * counts_G, counts_G**2]
    r_B, l_B, rr_B, rl_B, ll_B = matrix.sums(np.stack(columns, axis=1)).T
    difference_B = r_B / l_B
    # Residuals from the sample mean, so that nothing cancels when groups differ by little.
    spread_B = rr_B - 2 * difference_B * rl_B + difference_B**2 * ll_B
    spread_B[spread_B < 1e-12 * rr_B] = 0.0
    se_B = np.sqrt(spread_B / (groups * (groups - 1))) / (l_B / groups)
    with np.errstate(divide="ignore", invalid="ignore"):
        infinite_B = np.where(difference_B == 0, 0.0, np.copysign(np.inf, difference_B))
        return np.where(se_B > 0, difference_B / se_B, infinite_B)


def _bca_levels(totals: Totals, means_B: np.ndarray, tail: float) -> np.ndarray:
    """Bias-corrected and accelerated tail probabilities, from the jackknife over groups."""
    below = (np.mean(means_B < totals.mean) + np.mean(means_B <= totals.mean)) / 2
    z0 = ndtri(below)
    left_out_G = (totals.sums_G.sum() - totals.sums_G) / (totals.counts_G.sum() - totals.counts_G)
    u_G = left_out_G.mean() - left_out_G
    acceleration = (u_G**3).sum() / (6 * (u_G**2).sum() ** 1.5)
    z = z0 + ndtri(np.array([tail, 1 - tail]))
    return np.asarray(ndtr(z0 + z / (1 - acceleration * z)))


def block_length(positions: int) -> int:
    """``ceil(2 * T**(1/3))``: 26 for 2,047 positions; wide enough for an autocorrelation of about 0.6."""
    return math.ceil(2 * positions ** (1 / 3))


def block_bootstrap(
    values_T: np.ndarray, *, confidence: float = 0.95, resamples: int = ROW_RESAMPLES, seed: int = SEED
) -> Estimate:
    """Mean over one row's positions (in order) with a moving-block bootstrap interval.

    Resampled means are centred on their own expectation, because blocks reach the ends of a row less often.
    """
    length, mean = len(values_T), float(np.mean(values_T))
    width = block_length(length)
    method = f"moving blocks of {width} positions, {resamples} resamples, seed {seed}"
    if length < MIN_BLOCKS * width:
        note = f"{length} positions are fewer than {MIN_BLOCKS} blocks of {width}"
        return without_interval(mean, method=method, confidence=confidence, unit="position", n=length, note=note)
    cumulative = np.concatenate([[0.0], np.cumsum(values_T - mean)])
    block_means = (cumulative[width:] - cumulative[:-width]) / width
    drawn_B = block_means[_starts(length, width, resamples, seed)].mean(axis=1)
    tail = (1 - confidence) / 2
    low, high = np.quantile(drawn_B - block_means.mean(), [tail, 1 - tail])
    return Estimate(
        estimate=mean,
        low=mean + float(low),
        high=mean + float(high),
        method=method,
        confidence=confidence,
        unit="position",
        n=length,
        standard_error=float(drawn_B.std(ddof=1)),
    )


def _starts(length: int, width: int, resamples: int, seed: int) -> np.ndarray:
    """Block starts ``[resamples, blocks]``; the same for all rows of one length."""
    rng = np.random.Generator(np.random.PCG64([seed, length]))
    return rng.integers(0, length - width + 1, size=(resamples, round(length / width)))
