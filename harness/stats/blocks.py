"""One row's own interval: a moving-block bootstrap over its positions.

Neighbouring positions are not independent, so blocks of them are drawn. Such an interval speaks of this context's
text only ("would another sample of like positions agree?"), never of other contexts.
"""

from __future__ import annotations

import math

import numpy as np

from harness.stats.bootstrap import SEED
from harness.stats.estimate import Estimate, without_interval

ROW_RESAMPLES = 2_000
#: A row needs this many blocks for an interval.
MIN_BLOCKS = 8


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
