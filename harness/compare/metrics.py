"""The quantities that are compared: their labels, units and directions. Their values are `QUANTITIES`'."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from harness.measure.quantities import QUANTITIES, TAILS, Columns
from harness.registration import Endpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One quantity per position.

    ``lower_is_better`` None means that its direction is no matter of fidelity: shown, never judged. ``row_field`` is
    its mean in `harness.measure.receipt.RowSummary`, where a receipt has no positions. ``ratio`` says that B/A makes
    sense.
    """

    name: str
    label: str
    unit: str
    lower_is_better: bool | None
    columns: tuple[str, ...]
    row_field: str | None = None
    ratio: bool = False

    def values(self, columns: Columns) -> np.ndarray:
        """The quantity at each position ``[N]``; nan where it is not known."""
        return QUANTITIES[self.name].values_N(columns)


NLLS = ("nll_candidate", "nll_teacher")
METRICS: tuple[Metric, ...] = (
    Metric(
        name="kl_mean",
        label="KL",
        unit="nats",
        lower_is_better=True,
        columns=("kl",),
        row_field="kl_mean",
        ratio=True,
    ),
    Metric(
        name="nll_candidate",
        label="NLL of the text",
        unit="nats",
        lower_is_better=True,
        columns=("nll_candidate",),
        row_field="nll_candidate_mean",
    ),
    Metric(
        name="top1_agreement",
        label="top-1 agreement",
        unit="share",
        lower_is_better=False,
        columns=("agree", "top1_candidate"),
        row_field="top1_agreement",
    ),
    Metric(
        name="top5_overlap",
        label="top-5 overlap",
        unit="share",
        lower_is_better=False,
        columns=("top5_overlap",),
        row_field="top5_overlap",
    ),
    Metric(
        name="tv_mean",
        label="total variation",
        unit="share",
        lower_is_better=True,
        columns=("tv",),
        row_field="tv_mean",
        ratio=True,
    ),
    Metric(
        name="kl_reverse_mean",
        label="reverse KL",
        unit="nats",
        lower_is_better=True,
        columns=("kl_reverse",),
        row_field="kl_reverse_mean",
        ratio=True,
    ),
    Metric(
        name="delta_p",
        label="Δp of the true token",
        unit="share",
        lower_is_better=None,
        columns=NLLS,
    ),
    Metric(
        name="delta_p_abs",
        label="|Δp| of the true token",
        unit="share",
        lower_is_better=True,
        columns=NLLS,
        ratio=True,
    ),
    *(
        Metric(
            name=f"tail_rate_{nats:g}",
            label=f"positions with KL > {nats:g}",
            unit="share",
            lower_is_better=True,
            columns=("kl",),
        )
        for nats in TAILS
    ),
)
BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}

#: Margins where nothing was registered.
DEFAULT_MARGINS: Mapping[str, Endpoint] = {
    e.metric: e
    for e in (
        Endpoint(metric="kl_mean", margin=0.10, margin_kind="relative"),
        Endpoint(metric="nll_candidate", margin=0.001),
        Endpoint(metric="top1_agreement", margin=0.0025),
        Endpoint(metric="top5_overlap", margin=0.0025),
        Endpoint(metric="tv_mean", margin=0.10, margin_kind="relative"),
        Endpoint(metric="kl_reverse_mean", margin=0.10, margin_kind="relative"),
        Endpoint(metric="delta_p_abs", margin=0.10, margin_kind="relative"),
        Endpoint(metric="tail_rate_0.1", margin=0.10, margin_kind="relative"),
        Endpoint(metric="tail_rate_1", margin=0.10, margin_kind="relative"),
    )
}


def absolute_margin(endpoint: Endpoint, baseline: float) -> float:
    """The margin in the metric's own unit."""
    return endpoint.margin * abs(baseline) if endpoint.margin_kind == "relative" else endpoint.margin
