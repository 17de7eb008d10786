"""Intervals, tests and power: arrays in, numbers out. No files, no engines.

Defaults a quantity: paired differences, rates -> `t_interval`; one arm's mean KL -> `mean_kl_interval`; relative
size -> `row_log_ratio`; quantiles -> `woodruff`; items of a task -> `mcnemar`.
"""

from harness.stats.bootstrap import (
    METHODS,
    RESAMPLES,
    SEED,
    ResampleMatrix,
    bootstrap_interval,
    mean_kl_interval,
    resample_matrix,
)
from harness.stats.estimate import Estimate
from harness.stats.influence import (
    Totals,
    group_totals,
    log_t_interval,
    row_mean_interval,
    t_interval,
    totals_of_means,
)

__all__ = [
    "METHODS",
    "RESAMPLES",
    "SEED",
    "Estimate",
    "ResampleMatrix",
    "Totals",
    "bootstrap_interval",
    "group_totals",
    "log_t_interval",
    "mean_kl_interval",
    "resample_matrix",
    "row_mean_interval",
    "t_interval",
    "totals_of_means",
]
