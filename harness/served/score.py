"""One row as a server answered it against its captured teacher: what its known log-probabilities prove, and no more.

Two ways. *Top-k*: the server names its own most probable ids; known are those and the row's next token. *Fixed ids*:
the server scores ids of our choice; known are the teacher's top ``K``, and ids drawn from the rest of the teacher's
distribution give an unbiased estimate of what the bound leaves out. ``kl`` is the lower bound in both.

What an answer does not tell is NaN, or -1 for ids and ranks, never a number. A log-probability of -inf means that the
server did not observe the id: it belongs to the tail. NaN where a number was due makes the position invalid.

A receipt gets how much of the teacher was known and what the known part cannot say beside the numbers of every
measurement. The standard error of the estimate is that of drawing the ids, with the panel held fixed; its interval
resamples the panel's unit and holds both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from harness.capture import Capture, CapturedRow
from harness.errors import EngineError
from harness.measure.quantities import interval_of
from harness.measure.receipt import Interval
from harness.measure.result import Extras, panel_units
from harness.scoring import bounds
from harness.served.known_ids import (
    AskedIds,
    Choice,
    Known,
    choice_of,
    known_of_asked,
    known_of_list,
    listed_ids,
    observed,
    top5_overlap,
)
from harness.served.seam import ServedRow
from harness.stats import group_totals
from harness.types import SCORE_DTYPES, Panel, Row, Scores

#: More probability than this on known ids is no rounding: the server's numbers are not of one distribution.
EXCESS = 1e-3

#: Arrays beside `Scores`, an entry a position. ``captured_*``: probability on the known ids. ``all_known``: every id
#: that was asked for has a finite number. ``agree_known``: whether ``agree`` is certain (else it is False). ``kl_*``
#: are nats: the capped lower bound, the renormalised number (no bound), a guess of what the bound lacks, and the
#: unbiased estimate of the whole KL with the standard error that the drawing gives it.
EXTRA_DTYPES: Mapping[str, str] = {
    "captured_teacher_mass": "float64",
    "captured_candidate_mass": "float64",
    "all_known": "bool",
    "agree_known": "bool",
    "mass_rounded": "bool",
    "kl_capped": "float64",
    "kl_renormalised": "float64",
    "kl_shortfall": "float64",
    "kl_tail_estimate": "float64",
    "kl_tail_se": "float64",
}


#: Means that are given an interval of their own beside the bound's.
_MEANS = ("kl_capped", "kl_tail_estimate")


def score_served(
    capture: Capture, stored: CapturedRow, row: Row, answer: ServedRow, asked: AskedIds | None, vocab: int | None
) -> tuple[Scores, dict[str, np.ndarray]]:
    """Scores of one row, and the arrays of `EXTRA_DTYPES`.

    Args:
        capture: the teacher's capture, for its head.
        stored: the teacher's row.
        answer: the server's.
        asked: what the server was asked (fixed ids), or None (its own top ``k``).
        vocab: the vocabulary of a capture of logits; a head declares its own.

    Raises:
        EngineError: the answer has another shape, names an id twice, or holds more than all the probability.
        ScoreError: it names an id outside the vocabulary.
    """
    _check(row, answer, asked)
    listed, teacher = listed_ids(capture, stored, row, answer, asked, vocab)
    known = known_of_asked(answer, asked) if asked else known_of_list(answer, listed, teacher)
    bound = bounds.lower_bound(known.lp_TK, known.lq_TK, resolution=bounds.FP32_RESOLUTION)
    _require_a_distribution(row, bound)
    invalid = known.invalid_T | np.isnan(stored.p_top1)
    choice = choice_of(stored, answer, listed, known)
    kl = np.where(invalid, np.nan, bound.kl)
    return _scores(stored, answer, kl, known.invalid_T, choice, top5_overlap(answer, teacher)), {
        name: np.asarray(values).astype(EXTRA_DTYPES[name])
        for name, values in _extras(known, bound, invalid, choice, asked, answer).items()
    }


# ---- checks ----------------------------------------------------------------------------------------------------------


def _check(row: Row, answer: ServedRow, asked: AskedIds | None) -> None:
    """Refuse an answer of another shape, or one that names an id twice."""
    positions = len(row.ids_T) - 1
    shapes = [answer.target_logprob_T.shape == (positions,), answer.ids_TK.shape == answer.logprobs_TK.shape]
    shapes.append(answer.ids_TK.ndim == 2 and len(answer.ids_TK) == positions)
    if asked:
        shapes.append(answer.asked_TM is not None and answer.asked_TM.shape == asked.ids_TM.shape)
    else:
        shapes.append(answer.ids_TK.size > 0)
    if not all(shapes):
        raise EngineError(
            f"row {row.index}: the server's answer has other shapes than {positions} positions and what was asked",
            "this server's answer is in a form that is not understood: report it with its version",
        )
    ids = np.sort(answer.ids_TK, axis=1)
    twice = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] >= 0)
    if twice.any():
        t, slot = (int(where[0]) for where in np.nonzero(twice))
        raise EngineError(
            f"row {row.index}, position {t}: the server names token {int(ids[t, slot])} twice",
            "its mass would count twice: report this with the server's version",
        )


def _require_a_distribution(row: Row, bound: bounds.Bound) -> None:
    over = np.flatnonzero(bound.tail_q < -EXCESS)
    if len(over):
        t = int(over[0])
        raise EngineError(
            f"row {row.index}, position {t}: the server's probabilities of known tokens add up to "
            f"{1 - bound.tail_q[t]:.4f}",
            "turn off temperature, penalties and logit bias in the server: raw log-probabilities add up to at most 1",
        )


# ---- results ---------------------------------------------------------------------------------------------------------


def _scores(
    stored: CapturedRow,
    answer: ServedRow,
    kl: np.ndarray,
    invalid: np.ndarray,
    choice: Choice,
    overlap: np.ndarray,
) -> Scores:
    unknown = np.full(len(kl), np.nan)
    known_top = (choice.top1_T >= 0) & (stored.top1 >= 0)
    columns: dict[str, np.ndarray] = {
        "kl": kl,
        "nll_teacher": stored.nll,
        "nll_candidate": -answer.target_logprob_T.astype(np.float64),
        "entropy_teacher": unknown if stored.entropy is None else stored.entropy,
        "top1_teacher": stored.top1,
        "top1_candidate": choice.top1_T,
        "agree": choice.agree_T,
        "agree_lowest_id": known_top & (choice.top1_T == stored.top1),
        "tied_teacher": choice.tied_teacher_T,
        "tied_candidate": choice.tied_candidate_T,
        "p_top1_teacher": stored.p_top1,
        "nonfinite_teacher": np.isnan(stored.nll),
        "nonfinite_candidate": invalid,
        "top5_overlap": overlap,
        "rank": choice.rank_T,
    }
    return Scores(**{name: columns.get(name, unknown).astype(dtype) for name, dtype in SCORE_DTYPES.items()})


def _extras(
    known: Known,
    bound: bounds.Bound,
    invalid: np.ndarray,
    choice: Choice,
    asked: AskedIds | None,
    answer: ServedRow,
) -> dict[str, np.ndarray]:
    capped = bounds.capped_bound(
        known.wide_lp,
        known.wide_lq,
        cap_p_T=known.cap_p_T,
        cap_q_T=known.cap_q_T,
        resolution=bounds.FP32_RESOLUTION,
    )
    total, error = _estimate(known, asked, answer)
    nats = {
        "captured_teacher_mass": bound.mass_p,
        "captured_candidate_mass": bound.mass_q,
        "kl_capped": capped if asked is None else bound.kl,
        "kl_renormalised": bounds.renormalised(known.lp_TK, known.lq_TK),
        "kl_shortfall": bounds.shortfall(known.lp_TK, known.lq_TK, np.maximum(bound.tail_p, 0.0)),
        "kl_tail_estimate": total,
        "kl_tail_se": error,
    }
    return {name: np.where(invalid, np.nan, values) for name, values in nats.items()} | {
        "all_known": known.all_known_T,
        "agree_known": choice.agree_known_T,
        "mass_rounded": bound.rounded & ~invalid,
    }


def _estimate(known: Known, asked: AskedIds | None, answer: ServedRow) -> tuple[np.ndarray, np.ndarray]:
    """The unbiased estimate of the KL and its standard error; NaN where nothing was drawn or not all is known."""
    nothing = np.full(len(known.lp_TK), np.nan)
    if asked is None or not asked.m or answer.asked_TM is None:
        return nothing, nothing
    drawn = observed(answer.asked_TM[:, asked.k : asked.k + asked.m])
    tail = bounds.tail_estimate(asked.teacher.tail_logp_TM, drawn, asked.teacher.tail_mass_T)
    whole = (np.isfinite(known.lq_TK) | ~(known.lp_TK > -np.inf)).all(1)
    total = bounds.known_sum(known.lp_TK, known.lq_TK) + tail.value
    return np.where(whole, total, np.nan), np.where(whole, tail.standard_error, np.nan)


# ---- what a lower bound adds to a receipt ----------------------------------------------------------------------------


class Positions(Protocol):
    """Columns by name: a pyarrow table or a pandas frame of positions.parquet."""

    def __getitem__(self, name: str, /) -> Any: ...


def receipt_extras(table: Positions, panel: Panel) -> Extras:
    """Summary, intervals and counts of a run whose positions hold the columns of `EXTRA_DTYPES`."""
    columns = {name: np.asarray(table[name].to_numpy()) for name in (*EXTRA_DTYPES, "kl", "agree", "top1_candidate")}
    row_N = np.asarray(table["row"].to_numpy())
    return Extras(
        summary=served_summary(columns),
        intervals=served_intervals(columns, row_N, panel),
        counts=served_counts(columns),
    )


def served_summary(columns: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Masses and shares, and the other numbers beside the bound, in nats."""
    kl, mass = columns["kl"], columns["captured_teacher_mass"]
    valid = mass[np.isfinite(mass)]
    out: dict[str, Any] = {
        "captured_teacher_mass_mean": float(mass.mean()),
        "captured_teacher_mass_p01": float(np.quantile(valid, 0.01, method="inverted_cdf")) if len(valid) else None,
        "captured_teacher_mass_min": float(valid.min()) if len(valid) else None,
        "captured_candidate_mass_mean": float(columns["captured_candidate_mass"].mean()),
        "all_known_share": float(columns["all_known"].mean()),
        "kl_capped_mean": float(columns["kl_capped"].mean()),
        "kl_renormalised_mean": float(columns["kl_renormalised"].mean()),
        "kl_shortfall_mean": float(columns["kl_shortfall"].mean()),
    }
    estimated = _estimated(columns)
    out["kl_tail_estimate_mean"] = float(columns["kl_tail_estimate"].mean()) if estimated else None
    error = columns["kl_tail_se"]
    out["kl_tail_estimate_se"] = float(np.sqrt((error**2).sum()) / len(error)) if estimated else None
    return out | _agreement(columns, kl)


def _estimated(columns: Mapping[str, np.ndarray]) -> bool:
    """Whether every position that has a bound has an estimate too; the mean of some of them would be another number."""
    has = np.isfinite(columns["kl_tail_estimate"])
    return bool(has.any()) and bool((has | ~np.isfinite(columns["kl"])).all())


def _agreement(columns: Mapping[str, np.ndarray], kl: np.ndarray) -> dict[str, float]:
    """Between which shares top-1 agreement lies, where the candidate's choice is not known everywhere."""
    if not (np.isfinite(kl) & (columns["top1_candidate"] < 0)).any():
        return {}
    agreed, unknown = columns["agree"].mean(), (~columns["agree_known"]).mean()
    return {"top1_agreement_low": float(agreed), "top1_agreement_high": float(agreed + unknown)}


def served_counts(columns: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Positions where something that was asked for is not known."""
    has_bound = np.isfinite(columns["kl"])
    out = {
        "top1_unknown": int((columns["top1_candidate"] < 0).sum()),
        "agreement_unknown": int((~columns["agree_known"]).sum()),
        "asked_not_known": int((~columns["all_known"]).sum()),
        "mass_rounded": int(columns["mass_rounded"].sum()),
    }
    if np.isfinite(columns["kl_tail_estimate"]).any():
        out["tail_estimate_unknown"] = int((has_bound & ~np.isfinite(columns["kl_tail_estimate"])).sum())
    return out


def served_intervals(columns: Mapping[str, np.ndarray], row_N: np.ndarray, panel: Panel) -> dict[str, Interval]:
    """Intervals of the other means over the panel's unit; none where a position has no number."""
    unit_N = panel_units(panel, row_N)
    return {
        f"{name}_mean": Interval(
            **interval_of(f"{name}_mean", group_totals(columns[name], unit_N), unit=panel.unit).bounds()
        )
        for name in _MEANS
        if np.isfinite(columns[name]).all()
    }
