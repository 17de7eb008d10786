"""What stands under every table: how the numbers were made, and what they cannot tell.

The words "lower bound" and "at least" appear only where the estimator is one.
"""

from __future__ import annotations

from harness.measure.receipt import SideIdentity
from harness.numbers import count, percent
from harness.report.basis import Basis

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
        f"{side.model} at {revision}, {side.weights_dtype or 'unknown'} weights, "
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
