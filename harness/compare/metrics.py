"""The quantities that are compared, each defined once: from the columns of positions.parquet, or from row means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from harness.measure.summary import TAILS
from harness.registration import Endpoint

Columns = Mapping[str, np.ndarray]


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
    values: Callable[[Columns], np.ndarray]
    row_field: str | None = None
    ratio: bool = False


def column(name: str) -> Callable[[Columns], np.ndarray]:
    """The column itself, as float64."""
    return lambda c: np.asarray(c[name], dtype=np.float64)


def delta_p(c: Columns) -> np.ndarray:
    """Change of the true token's probability, candidate minus teacher."""
    return np.asarray(np.exp(-c["nll_candidate"]) - np.exp(-c["nll_teacher"]))


def agreement(c: Columns) -> np.ndarray:
    """Whether both choose alike; nan where a server does not tell the candidate's choice."""
    return np.where(c["top1_candidate"] < 0, np.nan, np.asarray(c["agree"], dtype=np.float64))


def top5(c: Columns) -> np.ndarray:
    """Share of the teacher's five most likely tokens among the candidate's; nan where it is not known."""
    overlap = np.asarray(c["top5_overlap"], dtype=np.float64)
    return np.where(overlap < 0, np.nan, overlap / 5)


def above(nats: float) -> Callable[[Columns], np.ndarray]:
    """Whether KL exceeds a threshold; nan stays nan."""
    return lambda c: np.where(np.isnan(c["kl"]), np.nan, np.asarray(c["kl"] > nats, dtype=np.float64))


NLLS = ("nll_candidate", "nll_teacher")
METRICS: tuple[Metric, ...] = (
    Metric(
        name="kl_mean",
        label="KL",
        unit="nats",
        lower_is_better=True,
        columns=("kl",),
        values=column("kl"),
        row_field="kl_mean",
        ratio=True,
    ),
    Metric(
        name="nll_candidate",
        label="NLL of the text",
        unit="nats",
        lower_is_better=True,
        columns=("nll_candidate",),
        values=column("nll_candidate"),
        row_field="nll_candidate_mean",
    ),
    Metric(
        name="top1_agreement",
        label="top-1 agreement",
        unit="share",
        lower_is_better=False,
        columns=("agree", "top1_candidate"),
        values=agreement,
        row_field="top1_agreement",
    ),
    Metric(
        name="top5_overlap",
        label="top-5 overlap",
        unit="share",
        lower_is_better=False,
        columns=("top5_overlap",),
        values=top5,
        row_field="top5_overlap",
    ),
    Metric(
        name="tv_mean",
        label="total variation",
        unit="share",
        lower_is_better=True,
        columns=("tv",),
        values=column("tv"),
        row_field="tv_mean",
        ratio=True,
    ),
    Metric(
        name="kl_reverse_mean",
        label="reverse KL",
        unit="nats",
        lower_is_better=True,
        columns=("kl_reverse",),
        values=column("kl_reverse"),
        row_field="kl_reverse_mean",
        ratio=True,
    ),
    Metric(
        name="delta_p",
        label="Δp of the true token",
        unit="share",
        lower_is_better=None,
        columns=NLLS,
        values=delta_p,
    ),
    Metric(
        name="delta_p_abs",
        label="|Δp| of the true token",
        unit="share",
        lower_is_better=True,
        columns=NLLS,
        values=lambda c: np.abs(delta_p(c)),
        ratio=True,
    ),
    *(
        Metric(
            name=f"tail_rate_{nats:g}",
            label=f"positions with KL > {nats:g}",
            unit="share",
            lower_is_better=True,
            columns=("kl",),
            values=above(nats),
        )
        for nats in TAILS
    ),
)
BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}

#: Margins where nothing was registered; they carry this name wherever they are shown.
EXPLORATORY = "exploratory default"
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


def margin_text(endpoint: Endpoint) -> str:
    """``10% of the baseline`` or ``0.0025``."""
    return f"{endpoint.margin:.4g}" if endpoint.margin_kind == "absolute" else f"{endpoint.margin:.4g} of the baseline"
