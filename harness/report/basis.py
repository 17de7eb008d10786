"""What a set of numbers rests on: the facts that the how-measured paragraph and the caveats are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.compare.model import Comparison
from harness.measure.receipt import Measurement, PanelIdentity, SideIdentity
from harness.measure.result import deviations
from harness.numbers import number, percent, with_interval
from harness.registration import Registration, lead_time
from harness.report.bound import floor_text, known_tokens, repeat_text
from harness.stats import Totals, concentration
from harness.types import Check


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """One measurement's or one comparison's ground. ``driven_by`` names arms whose mean one row carries.

    ``longest`` is the number of scored positions of the longest row.
    """

    panel: PanelIdentity
    rows_measured: int
    positions: int
    domains: Sequence[str]
    direction: str
    estimator: str
    lane: str
    teacher: SideIdentity
    candidates: Sequence[SideIdentity]
    status: str
    registration: str
    floor: str | None = None
    repeat: str = ""
    resolution: str | None = None
    driven_by: Sequence[str] = ()
    failed_checks: Sequence[str] = ()
    captured_mass: float | None = None
    longest: int | None = None
    known: str | None = None
    estimated: bool = False


def of_measurement(
    m: Measurement,
    *,
    started: str | None = None,
    floor: Measurement | None = None,
) -> Basis:
    """The basis of one measurement; ``started`` is when it began."""
    return Basis(
        panel=m.panel,
        rows_measured=m.rows_measured,
        positions=m.positions,
        domains=sorted({row.domain for row in m.per_row}),
        direction=m.direction,
        estimator=m.estimator,
        lane=m.lane,
        teacher=m.teacher,
        candidates=[m.candidate],
        status=m.status,
        registration=_registration_of(m, started),
        floor=f"{floor.name}, {_kl_text(floor)}" if floor else floor_text(m),
        repeat=repeat_text(m),
        driven_by=_driven(m),
        failed_checks=_failed(m.preflight),
        captured_mass=m.summary.get("captured_teacher_mass_mean"),
        longest=max((row.positions for row in m.per_row), default=None),
        known=known_tokens(m) if "way" in m.scoring else None,
        estimated=m.summary.get("kl_tail_estimate_mean") is not None,
    )


def of_comparison(c: Comparison) -> Basis:
    """The basis of a comparison."""
    floor = next((r for r in c.references if r.kind == "floor"), None)
    masses = [m for arm in c.arms if (m := arm.published.get("captured_teacher_mass_mean")) is not None]
    heavy = [(arm.name, arm.share) for arm in c.arms if arm.share is not None and arm.share.driven_by_one]
    rows = c.pairs[0].rows
    return Basis(
        panel=c.panel,
        rows_measured=len(c.paired_on.rows),
        positions=c.paired_on.positions,
        domains=sorted({row.domain for row in rows}),
        direction=c.direction,
        estimator=c.estimator,
        lane=c.lane,
        teacher=c.teacher,
        candidates=[arm.candidate for arm in c.arms],
        status="complete" if len(c.paired_on.rows) == c.panel.rows else "partial",
        registration=_registration_in(c),
        floor=f"{floor.name}, {with_interval(floor.kl.estimate, floor.kl)} nats" if floor else None,
        resolution=_resolution(c),
        driven_by=[f"{name}: row {s.row} carries {percent(s.share, 1)} of its summed KL" for name, s in heavy],
        captured_mass=min(masses) if masses else None,
        longest=max((row.positions for row in rows), default=None),
    )


def _kl_text(m: Measurement) -> str:
    return f"{with_interval(m.summary['kl_mean'], m.intervals.get('kl_mean'))} nats"


def _driven(m: Measurement) -> list[str]:
    """The row without which the mean would be another one, if there is such a row."""
    counts_R = np.array([row.positions for row in m.per_row], dtype=np.float64)
    sums_R = counts_R * [row.kl_mean for row in m.per_row]
    if not np.isfinite(sums_R).all():
        return []
    found = concentration(Totals(sums_R, counts_R))
    row = m.per_row[found.top].row
    return [f"row {row} alone carries {percent(found.top_share, 1)} of the summed KL"] if found.driven_by_one else []


def _failed(checks: Sequence[Check]) -> list[str]:
    return [check.name for check in checks if not check.passed]


def _resolution(c: Comparison) -> str | None:
    """What this panel could have shown, from the first pair's primary metric."""
    found = c.pairs[0].primary.resolution
    if found.detectable is None:
        return None
    relative = f" ({percent(found.detectable_relative, 1)})" if found.detectable_relative is not None else ""
    return f"a difference of {number(found.detectable)}{relative} in {c.pairs[0].primary.label} with 80 % power"


# ---- registration ----------------------------------------------------------------------------------------------------

EXPLORATORY = "Exploratory: the panel has no registration, so nothing was fixed in advance."


def _registration_of(m: Measurement, started: str | None) -> str:
    """Whether the question was asked before the measurement, how long before, and what departs from it."""
    sealed = m.panel.registration_sha256
    if sealed is None:
        return EXPLORATORY
    block = m.registration or {}
    committed = str(block["committed"]) if block.get("committed") else None
    lead = lead_time(committed, started) if committed and started else None
    text = _registered(sealed, block.get("commit"), committed, lead)
    if block.get("changed_since_commit"):
        text += ", **changed since that commit**"
    if m.registration is None:
        return f"{text}; its content is not in this receipt, so deviations could not be looked for."
    return _with_deviations(text, deviations(Registration.model_validate(block["content"]), m))


def _registration_in(c: Comparison) -> str:
    if c.registration is None:
        return EXPLORATORY
    r = c.registration
    return _with_deviations(_registered(r.sha256, r.commit, r.committed, r.lead_time), c.deviations)


def _registered(sha256: str, commit: str | None, committed: str | None, lead: str | None) -> str:
    text = f"Registered in advance (registration SHA-256 `{sha256}`"
    if commit:
        text += f", commit `{commit[:12]}` of {committed}"
    return text + (f", {lead})" if lead else ")")


def _with_deviations(text: str, departed: Sequence[str]) -> str:
    return f"{text}; **deviations: {'; '.join(departed)}**." if departed else f"{text}; no deviations."
