"""One candidate against the baseline: paired differences of every metric, with their verdicts.

With the same known tokens on both sides, ``KL_B - KL_A = (bound_B - bound_A) + p_T (tail_B - tail_A)``: two lower
bounds differ as the divergences do, up to the teacher's mass ``p_T`` outside the known tokens times the difference of
the tails' divergences. Those are at least 0, so only the tail of the arm with the lower bound can undo the difference.
If ``ln(p/q)`` varies by at most ``R`` there, a tail's divergence is at most ``R^2 / 8`` (Hoeffding's lemma).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from harness.compare.arms import share_of
from harness.compare.load import Arm
from harness.compare.metrics import BY_NAME, DEFAULT_MARGINS, METRICS, Metric, absolute_margin
from harness.compare.model import Difference, Estimated, Held, Resolution, Settings, Signs, Tails
from harness.compare.pairing import Aligned
from harness.errors import UsageError
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
    def of(cls, registration: Registration | None, *, claimed: bool = False) -> Plan:
        """The registered plan, or: KL first, all judged metrics after it.

        ``claimed``: it was registered for this question; else its margins are the panel's, and called exploratory.
        """
        if registration is None:
            judged = tuple(m.name for m in METRICS if m.lower_is_better is not None and m.name != "kl_mean")
            return cls(primary="kl_mean", secondary=judged, endpoints=DEFAULT_MARGINS, registered=frozenset())
        named: dict[str, Endpoint] = {endpoint.metric: endpoint for endpoint in registration.endpoints}
        return cls(
            primary=registration.primary.metric,
            secondary=tuple(endpoint.metric for endpoint in registration.secondary),
            endpoints={**DEFAULT_MARGINS, **named},
            registered=frozenset(named) if claimed else frozenset(),
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
        difference=Estimated.of(single),
        bootstrap=Estimated.of(_bootstrap(paired, settings)),
        band=Estimated.of(band) if band else None,
        pooled_ratio=Estimated.of(pooled_ratio(a, b, **given)) if fit else None,  # type: ignore[arg-type]
        row_ratio=Estimated.of(row_log_ratio(a, b, **given)) if fit else None,  # type: ignore[arg-type]
        margin=margin,
        margin_stated=endpoint,
        margin_registered=metric.name in plan.registered,
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


def ppl_ratio(aligned: Aligned, at: int, settings: Settings) -> Estimated:
    """Perplexity of the candidate over the baseline's: exp of the paired NLL difference and of its ends."""
    paired = paired_totals(aligned, BY_NAME["nll_candidate"], at)
    if paired is None:
        raise ValueError("every measurement has an NLL")
    interval = t_interval(paired, confidence=settings.confidence, unit=settings.unit)
    return Estimated.of(exponentiated(interval, "exp of the paired t interval of the NLL difference"))


def require_range(arms: Sequence[Arm], log_range: float | None) -> None:
    """Refuse an assumption that has nothing to speak of, or is none."""
    if log_range is None:
        return
    if arms[0].measurement.estimator == "exact":
        raise UsageError("--tail-range speaks of lower bounds, and these values are exact", "leave it out")
    if not np.isfinite(log_range) or log_range < 0:
        raise UsageError(f"--tail-range {log_range} is no range", "give a number of nats, such as 2")


def tails_of(aligned: Aligned, at: int, log_range: float | None) -> Tails | None:
    """The figures of one pair of bounds; None for exact values, or where the captured mass is not known."""
    arms = (aligned.arms[0], aligned.arms[at])
    values = aligned.values(BY_NAME["kl_mean"])
    if arms[0].measurement.estimator == "exact" or values is None:
        return None
    mask = aligned.mask(values)
    masses = [_mean(aligned, i, mask, "captured_teacher_mass") for i in (0, at)]
    a, b = (aligned.by_unit(values[i], mask).totals.mean for i in (0, at))
    if masses[0] is None or masses[1] is None:
        return None
    uncovered = [1.0 - mass for mass in masses if mass is not None]
    lower = uncovered[0] if a < b else uncovered[1]
    return Tails(
        difference=b - a,
        uncovered_baseline=uncovered[0],
        uncovered_other=uncovered[1],
        overturning=abs(b - a) / lower if lower > 0 else None,
        shortfall_baseline=_mean(aligned, 0, mask, "kl_shortfall"),
        shortfall_other=_mean(aligned, at, mask, "kl_shortfall"),
        log_range=log_range,
        could_move=None if log_range is None else max(lower, 0.0) * log_range**2 / 8,
    )


def _mean(aligned: Aligned, arm: int, mask: np.ndarray, name: str) -> float | None:
    """A column's mean over the common positions; a published receipt has only that of its own positions."""
    if aligned.basis == "positions":
        values = aligned.columns[arm].get(name)
        return None if values is None else float(np.mean(values[mask], dtype=np.float64))
    return aligned.arms[arm].measurement.summary.get(f"{name}_mean")


def held_back(found: Sequence[Difference], tails: Tails | None) -> list[Difference]:
    """The differences, with the verdict on KL undecided where the tails could undo it under the assumed range."""
    if tails is None or tails.could_move is None:
        return list(found)
    return [_held(d, tails.could_move) if d.metric == "kl_mean" else d for d in found]


def _held(d: Difference, could_move: float) -> Difference:
    size = abs(d.difference.estimate)
    undone = d.verdict in ("better", "worse") and could_move > size
    undone |= d.verdict == "equivalent" and d.margin is not None and size + could_move > d.margin
    return d.model_copy(update={"verdict": "undecided", "held": "tails", "reason": ""}) if undone else d
