"""What a set of numbers rests on: how it was made, what a lower bound knows, and what the numbers cannot tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.compare.model import Comparison
from harness.measure.receipt import Measurement, PanelIdentity, SideIdentity
from harness.measure.result import deviations, standing_of
from harness.numbers import count, number, percent, with_interval
from harness.registration import Registration, Standing, lead_time
from harness.stats import Totals, concentration

# ---- what a lower bound rests on: none of these numbers stands in a column with an exact KL --------------------------

#: How a receipt of an older or a published run calls the way of asking that it does not name.
WAYS = {
    "top-k": "the server's own top {k} tokens and the row's next token",
    "fixed ids": "the teacher's own top {k} tokens, as the server scores them",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundLine:
    """One number beside a bound: its name, its value, and what it is."""

    name: str
    value: str
    meaning: str


def bound_lines(m: Measurement) -> list[BoundLine]:
    """The lines that belong under a lower bound; none for an exact measurement."""
    if m.estimator != "lower_bound":
        return []
    s = m.summary
    lines = [_line("known tokens", known_tokens(m), "the tokens of the bound; all others are one bucket")]
    masses = [percent(s.get(f"captured_teacher_mass_{name}")) for name in ("mean", "p01", "min")]
    meaning = "how much of the teacher's distribution the known tokens hold"
    lines.append(_line("captured teacher mass: mean / 1st percentile / least", " / ".join(masses), meaning))
    if "all_known_share" in s:
        name = "positions where all tokens asked for are known"
        lines.append(_line(name, percent(s["all_known_share"]), "the others hold less than was asked for"))
    return [*lines, *_numbers(m)]


def _numbers(m: Measurement) -> list[BoundLine]:
    s = m.summary
    out = []
    capped, total = m.intervals.get("kl_capped_mean"), m.intervals.get("kl_tail_estimate_mean")
    if m.scoring.get("way") != "fixed ids" and "kl_capped_mean" in s:
        meaning = "a lower bound too: tokens that the server did not name are no likelier than the last it named"
        out.append(_line("KL capped, mean", with_interval(s["kl_capped_mean"], capped), meaning))
    if s.get("kl_tail_estimate_mean") is not None:
        meaning = (
            f"unbiased for the full-vocabulary KL, from {m.scoring.get('tail_samples', 'the')} tokens a position drawn "
            f"from the teacher's tail; drawing other tokens moves it by {number(s['kl_tail_estimate_se'])} "
            "(standard error)"
        )
        out.append(_line("KL estimate, mean", with_interval(s["kl_tail_estimate_mean"], total), meaning))
    if "kl_shortfall_mean" in s:
        meaning = "a guess, no bound: what the bound lacks if the tail is disturbed as the known tokens are"
        out.append(_line("estimated shortfall of the bound, mean", number(s["kl_shortfall_mean"]), meaning))
    if "kl_renormalised_mean" in s:
        meaning = "**not a bound**: known tokens scaled to add up to 1, for published numbers made that way"
        out.append(_line("KL renormalised over the known tokens, mean", number(s["kl_renormalised_mean"]), meaning))
    return out


def known_tokens(m: Measurement) -> str:
    """``the server's own top 64 tokens and the row's next token``."""
    way, k = m.scoring.get("way"), m.scoring.get("k")
    return WAYS[way].format(k=k) if way in WAYS else "not told"


def floor_text(m: Measurement) -> str | None:
    """The floor that a receipt names: its mean KL, what was run against what, and in which run."""
    floor = m.scoring.get("floor")
    if not isinstance(floor, dict):
        return None
    return f"{number(floor['kl_mean'])} nats ({floor['kind']}, run {floor['run']})"


def repeat_text(m: Measurement) -> str:
    """What stands in for a floor that was not measured in a served lane: the preflight's same row twice, or nothing."""
    figures = [check.figure for check in m.preflight if check.name.startswith("the same row twice")]
    return f"; the same row twice: {figures[0]} nats" if m.lane == "served" and figures else ""


def agreement_text(m: Measurement) -> str:
    """Top-1 agreement, or the two shares between which it lies."""
    s = m.summary
    if s["top1_agreement"] is not None or "top1_agreement_low" not in s:
        return percent(s["top1_agreement"])
    return f"between {percent(s['top1_agreement_low'])} and {percent(s['top1_agreement_high'])}"


def _line(name: str, value: str, meaning: str) -> BoundLine:
    return BoundLine(name=name, value=value, meaning=meaning)


# ---- what numbers rest on --------------------------------------------------------------------------------------------


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
    standing: Standing
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
        standing=standing_of(m),
        floor=f"{floor.name}, {_kl_text(floor)}" if floor else floor_text(m),
        repeat=repeat_text(m),
        driven_by=_driven(m),
        failed_checks=m.failed_checks,
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
        registration=registration_text(c),
        standing=Standing(status=c.status, why=c.status_why),
        floor=f"{floor.name}, {with_interval(floor.kl.estimate, floor.kl)} nats" if floor else None,
        resolution=_resolution(c),
        driven_by=[f"{name}: row {s.row} carries {percent(s.share, 1)} of its summed KL" for name, s in heavy],
        failed_checks=c.failed_checks,
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


def _resolution(c: Comparison) -> str | None:
    """What this panel could have shown, from the first pair's primary metric."""
    found = c.pairs[0].primary.resolution
    if found.detectable is None:
        return None
    relative = f" ({percent(found.detectable_relative, 1)})" if found.detectable_relative is not None else ""
    return f"a difference of {number(found.detectable)}{relative} in {c.pairs[0].primary.label} with 80 % power"


# ---- registration ----------------------------------------------------------------------------------------------------


def _registration_of(m: Measurement, started: str | None) -> str:
    """Whether the question was asked before the measurement, how long before, and what departs from it."""
    found, block = standing_of(m), m.registration or {}
    if "content" not in block:
        return f"{found.sentence}."
    committed = str(block["committed"]) if block.get("committed") else None
    lead = lead_time(committed, started) if committed and started else None
    departed = deviations(Registration.model_validate(block["content"]), m)
    return _registered(found, block["sha256"], block.get("commit"), committed, lead, departed)


def registration_text(c: Comparison) -> str:
    """The same of a comparison: of all its arms together."""
    found, r = Standing(status=c.status, why=c.status_why), c.registration
    if r is None:
        return f"{found.sentence}."
    return _registered(found, r.sha256, r.commit, r.committed, r.lead_time, c.deviations)


def _registered(
    found: Standing, sha256: str, commit: str | None, committed: str | None, lead: str | None, departed: Sequence[str]
) -> str:
    made = f", commit `{commit[:12]}` of {committed}" if commit else ""
    made += f", {lead}" if lead else ""
    text = f"{found.sentence} (registration SHA-256 `{sha256}`{made})"
    return f"{text}; **deviations: {'; '.join(departed)}**." if departed else f"{text}; no deviations."


# ---- sentences: "lower bound" and "at least" appear only where the estimator is one ----------------------------------

LANES = {
    "weights": "the decoded weights in a reference forward pass",
    "served": "the engine as it is served: its kernels, KV cache and batching are part of the number",
}
ESTIMATORS = {
    "exact": "over the full vocabulary",
    "lower_bound": "on the known tokens and one bucket for all others: a lower bound of the full-vocabulary value",
}

#: What follows "Floor of the ... lane:" where there is none.
NO_FLOOR = {
    "weights": "not measured",
    "served": "not measured, so how much of this KL is the engine's own arithmetic is not known",
}


def how_measured(b: Basis) -> list[str]:
    """The how-measured paragraph, sentence by sentence."""
    estimator = f"Estimator: {b.estimator.replace('_', ' ')}, {ESTIMATORS[b.estimator]}"
    known = [f"known are {b.known}"] if b.known else []
    if b.captured_mass is not None:
        known.append(f"known tokens hold {percent(b.captured_mass)} of the teacher's mass")
    if known:
        estimator += f" ({'; '.join(known)})"
    return [
        f"Direction: `{b.direction}`.",
        f"{estimator}.",
        f"Lane: {b.lane}, {LANES[b.lane]}.",
        f"Panel: {b.panel.name}, {b.rows_measured} of {b.panel.rows} rows, {count(b.positions)} scored positions, "
        f"{_length(b)}SHA-256 `{b.panel.sha256}`.",
        f"Teacher: {_side(b.teacher)}.",
        *(f"Candidate: {_side(candidate)}." for candidate in b.candidates),
        _resampled(b.panel.unit),
        f"Floor of the {b.lane} lane: {b.floor or NO_FLOOR[b.lane] + b.repeat}.",
        b.registration,
    ]


def _length(b: Basis) -> str:
    return "" if b.longest is None else f"at most {count(b.longest + 1)} tokens a row, "


def _resampled(unit: str) -> str:
    """What intervals resample; rows that may share a document are no independent units."""
    if unit == "document":
        return "Intervals resample documents, never positions."
    return "Intervals resample rows, never positions; rows may share a document, so intervals are descriptive only."


def _side(side: SideIdentity) -> str:
    """What one side is, with ``unknown`` for what its receipt does not tell."""
    revision = side.revision or "an unknown revision"
    engine = " ".join(part for part in (side.engine, side.version) if part)
    return (
        f"{side.model} at {revision}, {side.weights_dtype or 'unknown'} weights"
        f"{f' rounded to {side.quantised} before' if side.quantised not in ('', 'EXL3') else ''}, "
        f"{side.compute_dtype or 'unknown'} arithmetic, engine {engine}"
    )


def cannot_tell(b: Basis) -> list[str]:
    """What these numbers do not say, with the conditions of this run."""
    kinds = "one kind" if len(b.domains) == 1 else f"{len(b.domains)} kinds ({', '.join(b.domains)})"
    lines = [
        f"Other text: the panel holds {b.rows_measured} contexts of {kinds}. "
        "The intervals speak of more contexts like these, and no interval covers rare contexts that are not in it.",
        "Skill at tasks: KL and agreement say how close a candidate is to its teacher, not how good either is; "
        "near the teacher they do not predict which of two quants scores higher on a benchmark.",
        "Other tokenizers: ppl_token is per token of this tokenizer on this panel; it compares with nothing else.",
        "Long generations: every position is predicted from the panel's own text, so errors do not feed on themselves.",
    ]
    if b.longest is not None:
        lines.append(f"Longer contexts: nothing past token {count(b.longest + 1)} of a row was scored.")
    if b.lane == "weights":
        lines.append(
            "The served model: kernels, KV-cache type and batching of an engine are not in this number, "
            "and may move it either way."
        )
    if b.floor is None:
        lines.append("What a perfect quant would score here: the floor of this lane was not measured.")
    if b.estimator == "lower_bound":
        more = "an estimate of it stands beside" if b.estimated else "how much more is not known"
        lines.append(f"The full-vocabulary KL: it is at least this number; {more}.")
    if b.resolution:
        lines.append(f"Small differences: this panel resolves {b.resolution}; undecided is not equal.")
    return [*lines, *_conditions(b)]


def _conditions(b: Basis) -> list[str]:
    lines = []
    if b.status == "partial":
        lines.append(f"The whole panel: only {b.rows_measured} of {b.panel.rows} rows were measured.")
    if b.status == "invalid":
        lines.append("Anything: this run is marked invalid; its numbers are shown to find the fault.")
    lines += [f"A typical context: {text}; the mean is driven by one context." for text in b.driven_by]
    if b.failed_checks:
        lines.append(f"What the failed checks put in doubt: {'; '.join(b.failed_checks)}.")
    return lines
