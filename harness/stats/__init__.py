"""Intervals, tests and power: arrays in, numbers out. No files, no engines.

Defaults by quantity: one arm's mean -> `mean_interval`; its quantiles -> `woodruff`; paired differences ->
`t_interval`; relative size -> `row_log_ratio`, `pooled_ratio`; items of a task -> `compare_items`; verdicts ->
`decide`.
"""

from harness.stats.bootstrap import (
    RESAMPLES,
    SEED,
    Method,
    ResampleMatrix,
    block_bootstrap,
    bootstrap_interval,
    resample_matrix,
)
from harness.stats.influence import (
    MIN_GROUPS,
    Concentration,
    Estimate,
    Totals,
    concentration,
    exponentiated,
    group_totals,
    log_t_interval,
    pooled_ratio,
    row_log_ratio,
    t_interval,
    too_few,
    without_interval,
)
from harness.stats.items import ItemComparison, compare_items, paired_difference
from harness.stats.means import Kind, mean_interval
from harness.stats.proportions import (
    SignCount,
    clopper_pearson,
    newcombe,
    order_quantile,
    sign_count,
    two_sided_binomial,
    why_withheld,
    wilson,
    woodruff,
)
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
    "MIN_GROUPS",
    "RESAMPLES",
    "SEED",
    "Concentration",
    "Decision",
    "Estimate",
    "ItemComparison",
    "Kind",
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
    "mean_interval",
    "newcombe",
    "order_quantile",
    "p_of_difference",
    "p_of_equivalence",
    "paired_difference",
    "pooled_ratio",
    "resample_matrix",
    "row_log_ratio",
    "sign_count",
    "t_interval",
    "too_few",
    "two_sided_binomial",
    "why_withheld",
    "wilson",
    "without_interval",
    "woodruff",
]
