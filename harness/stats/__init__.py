"""Intervals, tests and power: arrays in, numbers out. No files, no engines.

Defaults by quantity: paired differences and rates -> `t_interval`, `rate_interval`; one arm's mean KL ->
`mean_kl_interval`; relative size -> `row_log_ratio`, `pooled_ratio`; quantiles -> `woodruff`; items of a task ->
`compare_items`; verdicts -> `decide`.
"""

from harness.stats.bootstrap import (
    METHODS,
    RESAMPLES,
    SEED,
    Method,
    ResampleMatrix,
    block_bootstrap,
    bootstrap_interval,
    mean_kl_interval,
    resample_matrix,
)
from harness.stats.estimate import Estimate, without_interval
from harness.stats.influence import (
    Concentration,
    Totals,
    concentration,
    exponentiated,
    group_totals,
    log_t_interval,
    pooled_ratio,
    row_log_ratio,
    row_mean_interval,
    t_interval,
    totals_of_means,
)
from harness.stats.items import ItemComparison, compare_items, paired_difference
from harness.stats.proportions import SignCount, clopper_pearson, newcombe, sign_count, two_sided_binomial, wilson
from harness.stats.quantiles import order_quantile, quantile_is_supported, rate_interval, tail_rate, woodruff
from harness.stats.tests import (
    Decision,
    Verdict,
    contexts_needed,
    decide,
    detectable_difference,
    group_deviation,
    holm,
    max_t_bands,
    p_of_difference,
    p_of_equivalence,
)

__all__ = [
    "METHODS",
    "RESAMPLES",
    "SEED",
    "Concentration",
    "Decision",
    "Estimate",
    "ItemComparison",
    "Method",
    "ResampleMatrix",
    "SignCount",
    "Totals",
    "Verdict",
    "block_bootstrap",
    "bootstrap_interval",
    "clopper_pearson",
    "compare_items",
    "concentration",
    "contexts_needed",
    "decide",
    "detectable_difference",
    "exponentiated",
    "group_deviation",
    "group_totals",
    "holm",
    "log_t_interval",
    "max_t_bands",
    "mean_kl_interval",
    "newcombe",
    "order_quantile",
    "p_of_difference",
    "p_of_equivalence",
    "paired_difference",
    "pooled_ratio",
    "quantile_is_supported",
    "rate_interval",
    "resample_matrix",
    "row_log_ratio",
    "row_mean_interval",
    "sign_count",
    "t_interval",
    "tail_rate",
    "totals_of_means",
    "two_sided_binomial",
    "wilson",
    "without_interval",
    "woodruff",
]
