"""What a difference of two lower bounds leaves out, and by how much that could change its verdict.

With the same known tokens on both sides, ``KL_B - KL_A = (bound_B - bound_A) + p_T (tail_B - tail_A)``: the bounds
differ as the divergences do, up to the teacher's mass ``p_T`` outside the known tokens times the difference of the
tails' divergences. Those are at least 0, so only the tail of the arm with the lower bound can undo the difference. If
``ln(p/q)`` varies by at most ``R`` there, a tail's divergence is at most ``R^2 / 8`` (Hoeffding's lemma).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from harness.compare.load import Arm
from harness.compare.metrics import BY_NAME
from harness.compare.model import Difference, Tails
from harness.compare.pairing import Aligned
from harness.errors import UsageError


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
