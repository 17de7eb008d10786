"""The bootstrap of a report: one matrix of resamples, drawn once, for all metrics together."""

from __future__ import annotations

import numpy as np
from scipy import stats as scipy_stats

from harness.bench.timing import Figure, cpu_seconds, interleaved, one_thread
from harness.stats import resample_matrix


def run(rows: int, resamples: int, metrics: int, rounds: int) -> list[Figure]:
    """CPU seconds to draw the matrix, and for the intervals of all metrics from it."""
    values = np.random.default_rng(37).lognormal(-5, 1, (rows, metrics))
    seeds = iter(range(1, 1000))
    matrix = resample_matrix(rows, resamples, 0)

    def intervals() -> np.ndarray:
        return np.quantile(matrix.sums(values) / rows, [0.025, 0.975], axis=0)

    def scipy_one() -> object:
        return scipy_stats.bootstrap(
            (values[:, 0],), np.mean, n_resamples=resamples, method="BCa", vectorized=True, rng=np.random.default_rng(1)
        )

    with one_thread():
        seconds = interleaved(
            {
                "draw the matrix": lambda: resample_matrix(rows, resamples, next(seeds)),
                f"percentile intervals of {metrics} metrics": intervals,
                "beside it, scipy.stats.bootstrap BCa of one": scipy_one,
            },
            rounds,
            clock=cpu_seconds,
        )
    resample_matrix.cache_clear()
    return [Figure(name=name, value=value, unit="CPU-s") for name, value in seconds.items()]
