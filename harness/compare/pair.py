"""One candidate against the baseline: paired differences of every metric, with their verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from harness.compare.arms import share_of
from harness.compare.metrics import BY_NAME, DEFAULT_MARGINS, EXPLORATORY, METRICS, Metric, absolute_margin, margin_text
from harness.compare.model import Difference, Figure, Held, Resolution, Settings, Signs
from harness.compare.pairing import Aligned
from harness.registration import Endpoint, Registration
from harness.stats import (
    Decision,
    Estimate,
    Totals,
    bootstrap_interval,
    contexts_needed,
    decide,
    detectable_difference,
    exponentiated,
    group_deviation,
    pooled_ratio,
    row_log_ratio,
    sign_count,
    t_interval,
)

Role = Literal["primary", "secondary", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Which metric is asked first, and the margin of each; from the registration, or the exploratory defaults."""

    primary: str
    secondary: tuple[str, ...]
    endpoints: Mapping[str, Endpoint]
    registered: frozenset[str]

    @classmethod
    def of(cls, registration: Registration | None) -> Plan:
        """The registered plan, or: KL first, all judged metrics after it."""
        if registration is None:
            judged = tuple(m.name for m in METRICS if m.lower_is_better is not None and m.name != "kl_mean")
            return cls(primary="kl_mean", secondary=judged, endpoints=DEFAULT_MARGINS, registered=frozenset())
        named: dict[str, Endpoint] = {endpoint.metric: endpoint for endpoint in registration.endpoints}
        return cls(
            primary=registration.primary.metric,
            secondary=tuple(endpoint.metric for endpoint in registration.secondary),
            endpoints={**DEFAULT_MARGINS, **named},
            registered=frozenset(named),
        )

    def role(self, metric: str) -> Role:
        """Whether a metric is the primary one, in the secondary family, or only shown."""
        return "primary" if metric == self.primary else ("secondary" if metric in self.secondary else "other")

    @property
    def order(self) -> list[Metric]:
        """The primary metric first, then the secondary ones as planned, then the rest."""
        names = [self.primary, *self.secondary]
        return [BY_NAME[n] for n in names] + [m for m in METRICS if m.name not in names]


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Mean KL of the teacher against itself in this lane, and whether both arms' intervals reach down to it."""

    floor: float
    both_at_floor: bool


def paired_totals(aligned: Aligned, metric: Metric, at: int) -> Totals | None:
    """Unit totals of *arm ``at`` minus baseline*, on observations finite in every arm."""
    values = aligned.values(metric)
    if values is None:
        return None
    mask = aligned.mask(values)
    return aligned.by_unit(values[at], mask).totals.minus(aligned.by_unit(values[0], mask).totals)


def differences(
    aligned: Aligned,
    at: int,
    settings: Settings,
    plan: Plan,
    *,
    bands: Mapping[str, Sequence[Estimate]],
    noise: Noise | None,
) -> list[Difference]:
    """Every metric's paired difference, the primary one first; ``bands`` by metric where there are more candidates."""
    found = []
    for metric in plan.order:
        values = aligned.values(metric)
        if values is not None:
            band = bands[metric.name][at - 1] if metric.name in bands else None
            found.append(_difference(aligned, at, metric, values, settings, plan, band, noise))
    return found


def _difference(
    aligned: Aligned,
    at: int,
    metric: Metric,
    values: Sequence[np.ndarray],
    settings: Settings,
    plan: Plan,
    band: Estimate | None,
    noise: Noise | None,
) -> Difference:
    mask = aligned.mask(values)
    a, b = (aligned.by_unit(values[i], mask).totals for i in (0, at))
    paired = b.minus(a)
    single = difference_interval(paired, settings)
    endpoint = plan.endpoints.get(metric.name)
    margin = absolute_margin(endpoint, a.mean) if endpoint else None
    decision, held = judge(aligned, at, metric, band or single, margin, noise)
    fit = metric.ratio and a.mean > 0
    given = {"confidence": settings.confidence, "unit": settings.unit}
    return Difference(
        metric=metric.name,
        label=metric.label,
        unit=metric.unit,
        role=plan.role(metric.name),
        lower_is_better=metric.lower_is_better,
        baseline=a.mean,
        other=b.mean,
        positions=int(aligned.weight_N[mask].sum()),
        excluded=int(aligned.weight_N[~mask].sum()),
        difference=Figure.of(single),
        bootstrap=Figure.of(_bootstrap(paired, settings)),
        band=Figure.of(band) if band else None,
        pooled_ratio=Figure.of(pooled_ratio(a, b, **given)) if fit else None,  # type: ignore[arg-type]
        row_ratio=Figure.of(row_log_ratio(a, b, **given)) if fit else None,  # type: ignore[arg-type]
        margin=margin,
        margin_source=_margin_source(plan, metric.name, endpoint),
        verdict=decision.verdict,
        held=held,
        reason=decision.reason,
        p=decision.p_difference,
        p_holm=None,
        p_equivalence=decision.p_equivalence,
        non_inferior=decision.non_inferior,
        signs=_signs(aligned, values[0], values[at], mask, paired),
        share=share_of(aligned, values[at] - values[0], mask),
        resolution=_resolution(paired, a.mean, settings),
    )


def difference_interval(paired: Totals, settings: Settings) -> Estimate:
    """The registered interval of a paired difference: Student t unless another was fixed."""
    if settings.interval == "t":
        return t_interval(paired, confidence=settings.confidence, unit=settings.unit)
    return bootstrap_interval(
        paired,
        method=settings.interval,  # type: ignore[arg-type]
        confidence=settings.confidence,
        resamples=settings.resamples,
        seed=settings.seed,
        unit=settings.unit,
    )


def _bootstrap(paired: Totals, settings: Settings) -> Estimate:
    return bootstrap_interval(
        paired,
        confidence=settings.confidence,
        resamples=settings.resamples,
        seed=settings.seed,
        unit=settings.unit,
    )


def judge(
    aligned: Aligned,
    at: int,
    metric: Metric,
    difference: Estimate,
    margin: float | None,
    noise: Noise | None,
) -> tuple[Decision, Held | None]:
    """The verdict, held back where broken positions or the floor could have made it, and by which of them."""
    if metric.lower_is_better is None or margin is None:
        return _without_verdict("no verdict", margin or 0.0), "no direction"
    decision = decide(difference, margin, lower_is_better=metric.lower_is_better)
    broken = aligned.nonfinite[at] - aligned.nonfinite[0]
    flattered = decision.verdict == "equivalent" or decision.verdict == ("better" if broken > 0 else "worse")
    if broken and flattered:
        return _without_verdict("undecided", margin, decision), "not finite"
    if noise is None or metric.name != "kl_mean" or decision.verdict not in ("better", "worse"):
        return decision, None
    if noise.both_at_floor:
        return _without_verdict("undecided", margin, decision), "at the floor"
    if abs(difference.estimate) < noise.floor:
        return _without_verdict("undecided", margin, decision), "below the floor"
    return decision, None


def _without_verdict(
    verdict: Literal["undecided", "no verdict"], margin: float, decision: Decision | None = None
) -> Decision:
    """A decision that is not made, with the tests of the one it replaces."""
    return Decision(
        verdict=verdict,
        reason="",
        margin=margin,
        p_difference=decision.p_difference if decision else None,
        p_equivalence=decision.p_equivalence if decision else None,
        non_inferior=decision.non_inferior if decision else None,
    )


def _margin_source(plan: Plan, metric: str, endpoint: Endpoint | None) -> str:
    if endpoint is None:
        return ""
    return f"{'registered' if metric in plan.registered else EXPLORATORY}: {margin_text(endpoint)}"


def _signs(aligned: Aligned, a_N: np.ndarray, b_N: np.ndarray, mask: np.ndarray, paired: Totals) -> Signs:
    by_row = aligned.by_rows(b_N, mask).totals.minus(aligned.by_rows(a_N, mask).totals)
    rows, units = sign_count(by_row.sums_G), sign_count(paired.sums_G)
    return Signs(
        rows_lower=rows.lower,
        rows_higher=rows.higher,
        rows_tied=rows.ties,
        units_lower=units.lower,
        units_higher=units.higher,
        units_tied=units.ties,
        share_lower_low=units.low,
        share_lower_high=units.high,
        p=units.p,
    )


def _resolution(paired: Totals, baseline: float, settings: Settings) -> Resolution:
    deviation = group_deviation(paired)
    if not np.isfinite(deviation):
        return Resolution(deviation=None, detectable=None, detectable_relative=None, units_for_a_tenth=None)
    detectable = detectable_difference(deviation, len(paired), confidence=settings.confidence)
    tenth = 0.1 * abs(baseline)
    return Resolution(
        deviation=deviation,
        detectable=detectable,
        detectable_relative=detectable / abs(baseline) if baseline else None,
        units_for_a_tenth=contexts_needed(deviation, tenth, confidence=settings.confidence) if tenth else None,
    )


def ppl_ratio(aligned: Aligned, at: int, settings: Settings) -> Figure:
    """Perplexity of the candidate over the baseline's: exp of the paired NLL difference and of its ends."""
    paired = paired_totals(aligned, BY_NAME["nll_candidate"], at)
    if paired is None:
        raise ValueError("every measurement has an NLL")
    interval = t_interval(paired, confidence=settings.confidence, unit=settings.unit)
    return Figure.of(exponentiated(interval, "exp of the paired t interval of the NLL difference"))
