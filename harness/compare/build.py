"""Measurements in, comparison out: checked, aligned, paired, judged."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from harness.compare import breakdown
from harness.compare.arms import arm_result
from harness.compare.identity import require_comparable, unlike
from harness.compare.load import Arm, load_arm, load_arms
from harness.compare.metrics import BY_NAME
from harness.compare.model import (
    ArmResult,
    Comparison,
    Difference,
    Estimated,
    Pair,
    PairedOn,
    Reference,
    Settings,
    Tails,
)
from harness.compare.pair import Noise, Plan, differences, held_back, paired_totals, ppl_ratio, require_range, tails_of
from harness.compare.pairing import Aligned, align
from harness.compare.registered import FoundRegistration, all_deviations, bar_outcomes, find_registration
from harness.digest import json_digest
from harness.registration import Registration, excluded_rows
from harness.stats import RESAMPLES, SEED, Estimate, holm, max_t_bands


def compare(
    paths: Sequence[Path],
    *,
    panel: Path | None = None,
    floor: Path | None = None,
    anchors: Sequence[Path] = (),
    tail_range: float | None = None,
) -> Comparison:
    """Compare the measurements in ``paths``; the first is the baseline.

    Args:
        paths: run folders or measurement.json files.
        panel: the panel's folder, for its registration.
        floor: a measurement of the teacher against itself in the same lane.
        anchors: measurements of well-known quantisations, shown beside the arms.
        tail_range: lower bounds only; ``ln(p/q)`` is assumed to vary by at most so much outside the known tokens.

    Raises:
        IncomparableError: they do not belong in one table; both values and the repair are named.
    """
    arms = load_arms(paths)
    require_comparable(arms)
    require_range(arms, tail_range)
    found = find_registration(arms, panel)
    unit = found.registration.unit if found.registration else None
    aligned = align(arms, unit=unit or arms[0].measurement.panel.unit, excluded_rows=excluded_rows(found.registration))
    settings = _settings(aligned, found.registration)
    plan = Plan.of(found.registration, claimed=found.claimed)
    references = [_reference(arms[0], "floor", floor)] if floor else []
    references += [_reference(arms[0], "anchor", path) for path in anchors]
    floor_row = references[0] if floor else None
    results = [arm_result(aligned, at, settings, floor_row) for at in range(len(arms))]
    pairs = _pairs(aligned, settings, plan, results, floor_row, tail_range)
    return _comparison(arms, aligned, settings, plan, found, references, results, pairs, tail_range)


def _settings(aligned: Aligned, registration: Registration | None) -> Settings:
    return Settings(
        unit=aligned.unit,
        units=len(aligned.units),
        interval=registration.interval if registration else "t",
        confidence=registration.confidence if registration else 0.95,
        resamples=registration.resamples if registration else RESAMPLES,
        seed=registration.seed if registration else SEED,
    )


def _reference(base: Arm, kind: Literal["floor", "anchor"], path: Path) -> Reference:
    """A floor or anchor of the same panel, teacher, lane and estimator; another's is refused."""
    arm = load_arm(path)
    require_comparable([base, arm])
    m = arm.measurement
    interval = m.intervals.get("kl_mean")
    known = interval.model_dump() if interval else _no_interval(m.panel.unit, len(m.per_row))
    return Reference(
        kind=kind,
        name=arm.name,
        key=m.key,
        kl=Estimated(estimate=m.summary["kl_mean"], **known),
        top1_agreement=m.summary["top1_agreement"],
        nll_candidate=m.summary["nll_candidate"],
        failed_checks=m.failed_checks,
    )


def _no_interval(unit: str, n: int) -> dict[str, object]:
    return {"low": None, "high": None, "method": "none", "confidence": 0.95, "unit": unit, "n": n}


def _pairs(
    aligned: Aligned,
    settings: Settings,
    plan: Plan,
    results: Sequence[ArmResult],
    floor: Reference | None,
    tail_range: float | None,
) -> list[Pair]:
    """Every candidate against the baseline, secondary metrics corrected over all of them."""
    candidates = range(1, len(aligned.arms))
    bands = _bands(aligned, settings, plan) if len(candidates) > 1 else {}
    judged, tails = [], []
    for at in candidates:
        both = bool(results[0].at_floor and results[at].at_floor)
        noise = Noise(floor=floor.kl.estimate, both_at_floor=both) if floor else None
        found = differences(aligned, at, settings, plan, bands=bands, noise=noise)
        tails.append(tails_of(aligned, at, tail_range))
        judged.append(held_back(found, tails[-1]))
    judged = correct(judged, settings.confidence)
    found_of = zip(candidates, judged, tails, strict=True)
    return [_pair(aligned, at, settings, found, beyond) for at, found, beyond in found_of]


def _bands(aligned: Aligned, settings: Settings, plan: Plan) -> dict[str, list[Estimate]]:
    """Simultaneous bands of the primary metric over all candidates."""
    totals = [paired_totals(aligned, BY_NAME[plan.primary], at) for at in range(1, len(aligned.arms))]
    known = [t for t in totals if t is not None]
    if len(known) != len(totals) or len(known[0]) < 2:
        return {}
    return {
        plan.primary: max_t_bands(
            known,
            confidence=settings.confidence,
            seed=settings.seed,
            unit=settings.unit,
        )
    }


def correct(pairs: Sequence[Sequence[Difference]], confidence: float) -> list[list[Difference]]:
    """Holm over the secondary metrics of all pairs; what does not survive it is undecided."""
    tested = [d.p for pair in pairs for d in pair if d.role == "secondary" and d.p is not None]
    adjusted = iter(holm(tested))
    return [
        [_corrected(d, next(adjusted), confidence) if d.role == "secondary" and d.p is not None else d for d in pair]
        for pair in pairs
    ]


def _corrected(difference: Difference, p_holm: float, confidence: float) -> Difference:
    update: dict[str, object] = {"p_holm": p_holm}
    if difference.verdict in ("better", "worse") and p_holm >= 1 - confidence:
        update |= {"verdict": "undecided", "held": "Holm", "reason": ""}
    return difference.model_copy(update=update)


def _pair(aligned: Aligned, at: int, settings: Settings, found: list[Difference], tails: Tails | None) -> Pair:
    return Pair(
        baseline=aligned.arms[0].name,
        other=aligned.arms[at].name,
        differences=found,
        ppl_ratio=ppl_ratio(aligned, at, settings),
        rows=breakdown.row_differences(aligned, at, settings),
        domains=breakdown.domains(aligned, at, settings),
        deciles=breakdown.deciles(aligned, at, settings),
        confidence=breakdown.confidence_buckets(aligned, at, settings),
        flips=breakdown.top_flips(aligned, at),
        tails=tails,
    )


def _comparison(
    arms: Sequence[Arm],
    aligned: Aligned,
    settings: Settings,
    plan: Plan,
    found: FoundRegistration,
    references: list[Reference],
    results: list[ArmResult],
    pairs: list[Pair],
    tail_range: float | None,
) -> Comparison:
    first = arms[0].measurement
    used = pairs[0].primary.metric
    departed = all_deviations(found.registration, arms, settings, used) if found.registration else []
    return Comparison(
        key=_key(arms, settings, found, references, tail_range),
        status=found.standing.status,
        status_why=found.standing.why,
        registration=found.record,
        unread_registrations=list(found.unread),
        estimator=first.estimator,
        lane=first.lane,
        direction=first.direction,
        panel=first.panel,
        teacher=first.teacher,
        scoring=first.scoring,
        settings=settings,
        paired_on=PairedOn(
            basis=aligned.basis,
            rows=[row.row for row in aligned.rows],
            positions=aligned.positions,
            excluded_nonfinite=aligned.excluded,
            rows_left_out=list(aligned.rows_left_out),
            rows_excluded_by_registration=list(aligned.rows_excluded),
            teacher_difference=aligned.teacher_difference,
        ),
        arms=results,
        references=references,
        pairs=pairs,
        worst=breakdown.worst_positions(aligned),
        bars=bar_outcomes(found.registration, arms, results) if found.registration else [],
        deviations=departed,
        unlike=unlike(arms),
    )


def _key(
    arms: Sequence[Arm],
    settings: Settings,
    found: FoundRegistration,
    references: Sequence[Reference],
    tail_range: float | None,
) -> str:
    question = {
        "measurements": [[arm.measurement.key, arm.measurement.positions_sha256] for arm in arms],
        "references": [[r.kind, r.key] for r in references],
        "registration": found.record.sha256 if found.record else None,
        "settings": settings.model_dump(),
    }
    return json_digest(question if tail_range is None else question | {"tail_range": tail_range})
