"""What stands under every table: how the numbers were made, and what they cannot tell.

The words "lower bound" and "at least" appear only where the estimator is one.
"""

from __future__ import annotations

from typing import Any

from harness.receipt import Measurement
from harness.registration import Registration, deviations, lead_time
from harness.report.numbers import count, number, percent

#: A mean that one row carries to more than this share is said to be driven by it.
DRIVEN_BY_ONE = 0.2

LANES = {
    "weights": "the decoded weights in a reference forward pass",
    "served": "the engine as it is served: its kernels, KV cache and batching are part of the number",
}
ESTIMATORS = {
    "exact": "over the full vocabulary",
    "lower_bound": "on the known tokens and one bucket for all others: a lower bound of the full-vocabulary value",
}


def floor_text(floor: float | None, lane: str) -> str:
    """What a perfect quant would score here, or that it is not known."""
    if floor is None:
        return "Floor of the lane: not measured."
    return f"Floor of the {lane} lane (the teacher against itself): {number(floor)} nats."


def registration_text(m: Measurement, started: str | None = None) -> str:
    """Whether the question was asked before the measurement, how long before, and what departs from it."""
    sealed = m.panel.registration_sha256
    if sealed is None:
        return "Exploratory: the panel has no registration, so nothing was fixed in advance."
    text = f"Registered in advance (registration SHA-256 `{sealed}`{_commit_text(m.registration or {}, started)})"
    if m.registration is None:
        return f"{text}; its content is not in this receipt, so deviations could not be looked for."
    departed = deviations(Registration.model_validate(m.registration["content"]), m)
    return f"{text}; **deviations: {'; '.join(departed)}**." if departed else f"{text}; no deviations."


def _commit_text(block: dict[str, Any], started: str | None) -> str:
    """``, commit 0123abcd of 2026-09-01, 3 d before the run``, as far as it is known."""
    if not block.get("commit"):
        return ""
    text = f", commit `{str(block['commit'])[:12]}` of {block['committed']}"
    if block.get("changed_since_commit"):
        text += ", **changed since that commit**"
    return text + (f", {lead_time(str(block['committed']), started)}" if started else "")


def how_measured(m: Measurement, floor: float | None = None, started: str | None = None) -> list[str]:
    """The how-measured paragraph, sentence by sentence."""
    t, c = m.teacher, m.candidate
    return [
        f"Direction: `{m.direction}`.",
        f"Estimator: {m.estimator.replace('_', ' ')}, {ESTIMATORS[m.estimator]}.",
        f"Lane: {m.lane}, {LANES[m.lane]}.",
        f"Panel: {m.panel.name}, {m.rows_measured} of {m.rows_planned} rows, {count(m.positions)} scored positions, "
        f"SHA-256 `{m.panel.sha256}`.",
        f"Teacher: {t.model} at {t.revision}, {t.weights_dtype} weights, {t.compute_dtype} arithmetic, "
        f"engine {t.engine} {t.version}.",
        f"Candidate: {c.model} at {c.revision}, {c.weights_dtype} weights, {c.compute_dtype} arithmetic, "
        f"engine {c.engine} {c.version}.",
        f"Intervals resample {m.panel.unit}s, never positions.",
        floor_text(floor, m.lane),
        registration_text(m, started),
    ]


def cannot_tell(m: Measurement, top_row: tuple[int, float] | None, floor: float | None = None) -> list[str]:
    """What these numbers do not say, with the conditions of this run."""
    domains = sorted({row.domain for row in m.per_row})
    lines = [
        f"Other text: the panel holds {m.rows_measured} contexts of {len(domains)} kinds ({', '.join(domains)}). "
        "The intervals speak of more contexts of these kinds, and no interval covers rare contexts that are not in it.",
        "Skill at tasks: KL and agreement say how close the candidate is to its teacher, not how good either is; "
        "near the teacher they do not predict which of two quants scores higher on a benchmark.",
        "Other tokenizers: ppl_token is per token of this tokenizer on this panel; it compares with nothing else.",
        "Long generations: every position is predicted from the panel's own text, so errors do not feed on themselves.",
    ]
    if m.lane == "weights":
        lines.append(
            "The served model: kernels, KV-cache type and batching of an engine are not in this number, "
            "and may move it either way."
        )
    if floor is None:
        lines.append("What a perfect quant would score here: the floor of this lane was not measured.")
    if m.estimator == "lower_bound":
        lines.append("The full-vocabulary KL: it is at least this number; how much more is not known.")
    return [*lines, *_conditions(m, top_row)]


def _conditions(m: Measurement, top_row: tuple[int, float] | None) -> list[str]:
    lines = []
    if m.status == "partial":
        lines.append(f"The whole panel: only {m.rows_measured} of {m.rows_planned} rows were measured.")
    if m.status == "invalid":
        lines.append("Anything: this run is marked invalid; its numbers are shown to find the fault.")
    if top_row is not None and top_row[1] > DRIVEN_BY_ONE and top_row[1] > 1.5 / m.rows_measured:
        lines.append(
            f"A typical context: row {top_row[0]} alone carries {percent(top_row[1], 1)} of the summed KL; "
            "the mean is driven by one context."
        )
    failed = [check.name for check in m.preflight if not check.passed]
    if failed:
        lines.append(f"What the failed checks put in doubt: {'; '.join(failed)}.")
    return lines
