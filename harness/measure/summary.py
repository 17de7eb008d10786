"""From per-position scores to the numbers of a measurement: plain float64 means and order statistics.

Nothing is clamped and nothing dropped: one NaN or infinite position makes the headline mean NaN or infinite,
is counted, and is located. Quantiles are order statistics of the finite positions. A metric that was not measured at
a position that has a KL (a server's top-k answer holds no total variation) is withheld: None, never NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from harness.measure.quantities import SUMMARY_QUANTILES, TAILS, quantile_key
from harness.measure.receipt import RowSummary
from harness.stats import order_quantile, why_withheld
from harness.types import Panel, Scores

#: Edges of the teacher's top-1 probability; the last bucket is closed on the right.
CONFIDENCE_EDGES = (0.0, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
#: Rounding may push a KL below zero by this much; more means unnormalised inputs.
NEGATIVE_ROUNDING = 1e-6


def summarise(scores: Scores, row_N: np.ndarray, position_N: np.ndarray, unit_N: np.ndarray) -> dict[str, Any]:
    """Overall numbers of ``N`` scored positions; see the keys' names for units (nats unless a rate).

    ``unit_N`` names each position's document or row: an extreme quantile needs several of them beyond it.
    """
    kl = scores.kl
    out: dict[str, Any] = {
        "kl_mean": _mean(kl),
        **_quantiles(kl, unit_N),
        "kl_max": float(np.max(kl)),
        "kl_max_at": _where_max(kl, row_N, position_N),
        "kl_reverse_mean": _measured(scores.kl_reverse, kl),
        "nll_teacher": _mean(scores.nll_teacher),
        "nll_candidate": _mean(scores.nll_candidate),
        "ppl_token_teacher": _exp(_mean(scores.nll_teacher)),
        "ppl_token_candidate": _exp(_mean(scores.nll_candidate)),
        "top1_agreement": _mean(scores.agree) if choice_known(scores) else None,
        "top1_agreement_lowest_id": _mean(scores.agree_lowest_id) if choice_known(scores) else None,
        "top1_agree_count": int(scores.agree.sum()),
        "tv_mean": _measured(scores.tv, kl),
        "top5_overlap": _top5_overlap(scores),
        "rank_mean": _measured(np.where(scores.rank > 0, scores.rank, np.nan), kl),
        **_delta_p(scores),
        "entropy_teacher": _measured(scores.entropy_teacher, kl),
        "entropy_candidate": _measured(scores.entropy_candidate, kl),
        "outside_teacher_max": _measured(scores.outside_teacher, kl, np.max),
        "outside_candidate_max": _measured(scores.outside_candidate, kl, np.max),
    }
    out |= {f"tail_rate_{tail:g}": float(np.mean(kl > tail)) for tail in TAILS}
    return out


def counts(scores: Scores) -> dict[str, int]:
    """How many positions are not ordinary, and how."""
    kl = scores.kl
    return {
        "nonfinite_positions": int((~np.isfinite(kl)).sum()),
        "infinite_kl": int(np.isposinf(kl).sum()),
        "infinite_nll": int((np.isposinf(scores.nll_teacher) | np.isposinf(scores.nll_candidate)).sum()),
        "nonfinite_logits_teacher": int((scores.nonfinite_teacher > 0).sum()),
        "nonfinite_logits_candidate": int((scores.nonfinite_candidate > 0).sum()),
        "negative_kl": int((kl < 0).sum()),
        "negative_kl_beyond_rounding": int((kl < -NEGATIVE_ROUNDING).sum()),
        "zero_kl": int((kl == 0).sum()),
        "tied_teacher": int(scores.tied_teacher.sum()),
        "tied_candidate": int(scores.tied_candidate.sum()),
    }


def row_summary(panel: Panel, row: int, scores: Scores) -> RowSummary:
    """The line of one row."""
    meta = panel.rows[row]
    return RowSummary(
        row=row,
        document=meta.document,
        domain=meta.domain,
        positions=len(scores),
        kl_mean=_mean(scores.kl),
        kl_max=float(np.max(scores.kl)),
        kl_reverse_mean=_measured(scores.kl_reverse, scores.kl),
        nll_teacher_mean=_mean(scores.nll_teacher),
        nll_candidate_mean=_mean(scores.nll_candidate),
        top1_agreement=_mean(scores.agree) if choice_known(scores) else None,
        tv_mean=_measured(scores.tv, scores.kl),
        top5_overlap=_top5_overlap(scores),
        nonfinite=int((~np.isfinite(scores.kl)).sum()),
    )


def choice_known(scores: Scores) -> bool:
    """Whether the candidate's most probable token is known wherever there is a KL."""
    return bool((~np.isfinite(scores.kl) | (scores.top1_candidate >= 0)).all())


def _measured(values: np.ndarray, kl: np.ndarray, of: Callable[[np.ndarray], Any] | None = None) -> float | None:
    """The mean, or None where a position that has a KL lacks the value."""
    if (np.isnan(values) & np.isfinite(kl)).any():
        return None
    return _mean(values) if of is None else float(of(values))


def _top5_overlap(scores: Scores) -> float | None:
    overlap = _measured(np.where(scores.top5_overlap >= 0, scores.top5_overlap, np.nan), scores.kl)
    return None if overlap is None else overlap / 5


def _mean(values: np.ndarray) -> float:
    with np.errstate(invalid="ignore", over="ignore"):
        return float(np.mean(values, dtype=np.float64))


def _exp(value: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.exp(value))


def _quantiles(kl: np.ndarray, unit_N: np.ndarray) -> dict[str, float | None]:
    finite = np.isfinite(kl)
    kl, unit_N = kl[finite], unit_N[finite]
    shown = {name: len(kl) > 0 and not why_withheld(kl, unit_N, q) for name, q in SUMMARY_QUANTILES.items()}
    return {quantile_key(name): order_quantile(kl, q) if shown[name] else None for name, q in SUMMARY_QUANTILES.items()}


def _where_max(kl: np.ndarray, row_N: np.ndarray, position_N: np.ndarray) -> dict[str, int]:
    at = int(np.argmax(kl))
    return {"row": int(row_N[at]), "position": int(position_N[at])}


def _delta_p(scores: Scores) -> dict[str, float]:
    """Change of the true token's probability, candidate minus teacher."""
    delta = np.exp(-scores.nll_candidate) - np.exp(-scores.nll_teacher)
    return {"delta_p_mean": _mean(delta), "delta_p_rms": float(np.sqrt(_mean(delta**2)))}
