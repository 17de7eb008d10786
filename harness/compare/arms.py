"""Each arm by itself on the common positions: means, percentiles, tail, what one context carries, and warnings."""

from __future__ import annotations

import numpy as np

from harness.compare.metrics import METRICS, Metric
from harness.compare.model import ArmResult, Estimated, Flips, Largest, Reference, Settings, Share, Trend
from harness.compare.pairing import Aligned
from harness.measure.quantities import QUANTILES, interval_of
from harness.measure.receipt import Measurement
from harness.stats import Estimate, Totals, concentration, exponentiated, t_interval, woodruff

#: KL of the last tenth of the positions over the first that is called rising, when the difference is sure.
RISE = 1.5


def arm_result(aligned: Aligned, at: int, settings: Settings, floor: Reference | None) -> ArmResult:
    """Everything about arm number ``at`` alone."""
    measurement = aligned.arms[at].measurement
    metrics = {m.name: f for m in METRICS if (f := _metric(aligned, at, m, settings)) is not None}
    has_positions = aligned.basis == "positions"
    quantiles = _quantiles(aligned, at, settings) if has_positions else {}
    return ArmResult(
        name=aligned.arms[at].name,
        key=measurement.key,
        label=measurement.label,
        candidate=measurement.candidate,
        positions_sha256=measurement.positions_sha256,
        metrics=metrics,
        ppl_token=_ppl(aligned, at, settings),
        quantiles={name: Estimated.of(e) for name, e in quantiles.items() if not e.withheld},
        withheld={name: e.note for name, e in quantiles.items() if e.withheld},
        largest=_largest(aligned, at) if has_positions else _published_largest(measurement),
        share=_share(aligned, at),
        trend=_trend(aligned, at, settings) if has_positions else None,
        flips=_flips(aligned, at) if has_positions else None,
        nonfinite=aligned.nonfinite[at],
        infinite=int(np.isposinf(aligned.columns[at]["kl"]).sum()) if has_positions else 0,
        at_floor=_at_floor(metrics["kl_mean"], floor),
        published=_published(measurement) if not has_positions else {},
        notes=list(measurement.notes),
        captured_mass=measurement.summary.get("captured_teacher_mass_mean"),
        failed_checks=measurement.failed_checks,
    )


def _metric(aligned: Aligned, at: int, metric: Metric, settings: Settings) -> Estimated | None:
    values = aligned.values(metric)
    if values is None:
        return None
    totals = aligned.by_unit(values[at], aligned.mask(values)).totals
    return Estimated.of(arm_interval(metric, totals, settings))


def arm_interval(metric: Metric, totals: Totals, settings: Settings) -> Estimate:
    """One arm's mean and interval: the receipt's own, made with the registered settings."""
    return interval_of(
        metric.name,
        totals,
        unit=settings.unit,
        confidence=settings.confidence,
        resamples=settings.resamples,
        seed=settings.seed,
    )


def _ppl(aligned: Aligned, at: int, settings: Settings) -> Estimated:
    """Perplexity per token: exp of the mean NLL and of its ends."""
    metric = next(m for m in METRICS if m.name == "nll_candidate")
    values = aligned.values(metric)
    if values is None:
        raise ValueError("every measurement has an NLL")
    totals = aligned.by_unit(values[at], aligned.mask(values)).totals
    return Estimated.of(exponentiated(arm_interval(metric, totals, settings), "exp of the t interval of the mean NLL"))


def _quantiles(aligned: Aligned, at: int, settings: Settings) -> dict[str, Estimate]:
    mask = aligned.finite_N
    kl_N, unit_N = aligned.columns[at]["kl"][mask], aligned.unit_N[mask]
    return {
        name: woodruff(kl_N, unit_N, q, confidence=settings.confidence, unit=settings.unit)
        for name, q in QUANTILES.items()
    }


def _largest(aligned: Aligned, at: int) -> Largest | None:
    columns = aligned.columns[at]
    candidates = np.flatnonzero(aligned.finite_N)
    if not len(candidates):
        return None
    best = candidates[int(np.argmax(columns["kl"][candidates]))]
    return Largest(
        value=float(columns["kl"][best]),
        positions=aligned.positions,
        row=int(columns["row"][best]),
        position=int(columns["position"][best]),
        token=int(columns["target"][best]),
    )


def _published_largest(measurement: Measurement) -> Largest | None:
    value = measurement.summary.get("kl_max")
    return Largest(value=float(value), positions=measurement.positions) if value is not None else None


def _published(measurement: Measurement) -> dict[str, float]:
    """Headline numbers of the receipt itself, digit for digit."""
    return {k: v for k, v in measurement.summary.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}


def share_of(aligned: Aligned, values_N: np.ndarray, mask_N: np.ndarray) -> Share | None:
    """What the heaviest row carries of a metric or of a difference."""
    rows = aligned.by_rows(values_N, mask_N)
    if len(rows.totals) < 2:
        return None
    found = concentration(rows.totals)
    return Share(
        row=aligned.rows[int(rows.index_G[found.top])].row,
        share=found.top_share,
        leave_one_out_low=found.leave_one_out_low,
        leave_one_out_high=found.leave_one_out_high,
        driven_by_one=found.driven_by_one,
    )


def _share(aligned: Aligned, at: int) -> Share | None:
    values = aligned.values(METRICS[0])
    return None if values is None else share_of(aligned, values[at], aligned.mask(values))


def _trend(aligned: Aligned, at: int, settings: Settings) -> Trend | None:
    """Last tenth of the positions against the first, paired by unit: an error that grows with length shows here."""
    columns, mask = aligned.columns[at], aligned.finite_N
    length = int(columns["position"].max()) + 1
    if length < 20:
        return None
    first = aligned.by_unit(columns["kl"], mask & (columns["position"] < length // 10))
    last = aligned.by_unit(columns["kl"], mask & (columns["position"] >= length - length // 10))
    both, in_first, in_last = np.intersect1d(first.index_G, last.index_G, return_indices=True)
    if not len(both):
        return None
    rise_G = last.totals.means_G[in_last] - first.totals.means_G[in_first]
    rise = t_interval(Totals(rise_G, np.ones(len(rise_G))), confidence=settings.confidence, unit=settings.unit)
    grown = last.totals.mean > RISE * first.totals.mean
    return Trend(
        first=first.totals.mean,
        last=last.totals.mean,
        difference=Estimated.of(rise),
        rising=bool(grown and rise.low is not None and rise.low > 0),
    )


def _flips(aligned: Aligned, at: int) -> Flips:
    columns, mask = aligned.columns[at], aligned.finite_N
    teacher = (columns["top1_teacher"] == columns["target"])[mask]
    candidate = (columns["top1_candidate"] == columns["target"])[mask]
    return Flips(
        teacher_right=int(teacher.sum()),
        candidate_right=int(candidate.sum()),
        right_to_wrong=int((teacher & ~candidate).sum()),
        wrong_to_right=int((~teacher & candidate).sum()),
    )


def _at_floor(kl: Estimated, floor: Reference | None) -> bool | None:
    """Whether the arm's interval reaches down to the floor's; None where no floor was measured."""
    if floor is None:
        return None
    low = kl.low if kl.low is not None else kl.estimate
    high = floor.kl.high if floor.kl.high is not None else floor.kl.estimate
    return low <= high
