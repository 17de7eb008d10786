"""The candidate's most probable token as far as a server tells it, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harness.capture import CapturedRow
from harness.scoring import bounds
from harness.scoring.known import TopAndTail
from harness.served.known_ids import Known, Listed
from harness.served.seam import ServedRow

TOP = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The candidate's most probable token: -1 where it is not known, and whether agreement is certain all the same."""

    top1_T: np.ndarray
    agree_T: np.ndarray
    agree_known_T: np.ndarray
    tied_teacher_T: np.ndarray
    tied_candidate_T: np.ndarray
    rank_T: np.ndarray


def choice_of(stored: CapturedRow, answer: ServedRow, listed: Listed, known: Known) -> Choice:
    if answer.ids_TK.shape[1]:
        return _choice_of_list(stored, answer, listed, known.invalid_T)
    return _choice_of_asked(stored, known)


def _choice_of_list(stored: CapturedRow, answer: ServedRow, listed: Listed, invalid: np.ndarray) -> Choice:
    """From the server's own list. Ids that tie with its first entry are its choice too."""
    valid = (stored.top1 >= 0) & ~invalid & (answer.ids_TK[:, 0] >= 0) & (answer.logprobs_TK[:, 0] > -np.inf)
    lq = np.where(answer.ids_TK >= 0, answer.logprobs_TK, -np.inf)
    chosen = (lq == lq.max(1, keepdims=True)) & valid[:, None]
    equal_teacher = listed.lp_TK == listed.lp_top1_T[:, None]
    top_teacher = (answer.ids_TK == stored.top1[:, None]) | equal_teacher[:, :-1]
    is_top1 = answer.ids_TK == stored.top1[:, None]
    own = np.where(is_top1, lq, np.inf).min(1, initial=np.inf)
    rank = np.where(is_top1.any(1) & valid & np.isfinite(own), 1 + (lq > own[:, None]).sum(1), -1)
    return Choice(
        top1_T=np.where(valid, np.where(chosen, answer.ids_TK, np.iinfo(np.int32).max).min(1), -1),
        agree_T=(chosen & top_teacher).any(1),
        agree_known_T=valid,
        tied_teacher_T=(equal_teacher & (listed.ids_TK != stored.top1[:, None]) & (listed.ids_TK >= 0)).any(1),
        tied_candidate_T=chosen.sum(1) > 1,
        rank_T=rank,
    )


def _choice_of_asked(stored: CapturedRow, known: Known) -> Choice:
    """From scored ids alone: the best of them is the candidate's choice where nothing unknown can hold more."""
    lq = np.where(np.isnan(known.lq_TK), -np.inf, known.lq_TK)
    best = lq.max(1)
    valid = (stored.top1 >= 0) & ~known.invalid_T & (best > -np.inf)
    rest = 1.0 - np.exp(lq).sum(1)
    certain = valid & (np.exp(best) > rest + bounds.FP32_RESOLUTION)
    chosen = (lq == best[:, None]) & valid[:, None]
    top_teacher = known.lp_TK == known.lp_TK.max(1, keepdims=True, initial=-np.inf)
    agree = (chosen & top_teacher).any(1)
    # Where a scored id beats all of the teacher's choices, they differ, whatever else the candidate prefers.
    beaten = valid & ~agree & np.isfinite(np.where(top_teacher, lq, np.inf).min(1))
    return Choice(
        top1_T=np.where(certain, np.where(chosen, known.ids_TK, np.iinfo(np.int32).max).min(1), -1),
        agree_T=agree & certain,
        agree_known_T=certain | beaten,
        tied_teacher_T=valid & (top_teacher.sum(1) > 1),
        tied_candidate_T=certain & (chosen.sum(1) > 1),
        rank_T=np.full(len(best), -1),
    )


def top5_overlap(answer: ServedRow, teacher: TopAndTail) -> np.ndarray:
    """Ids in both top fives, -1 where one of the two is not known."""
    if min(answer.ids_TK.shape[1], teacher.ids_TK.shape[1]) < TOP:
        return np.full(len(answer.ids_TK), -1)
    ours = teacher.ids_TK[:, :TOP]
    # Stable: the server's order holds, and equal log-probabilities go to the lowest id as on our side.
    lq = np.where(answer.ids_TK >= 0, answer.logprobs_TK.astype(np.float64), -np.inf)
    order = np.lexsort((answer.ids_TK, -lq), axis=-1)[:, :TOP]
    theirs = np.take_along_axis(answer.ids_TK, order, 1)
    known = np.isfinite(np.take_along_axis(lq, order, 1)).all(1) & (ours >= 0).all(1)
    return np.where(known, (ours[:, :, None] == theirs[:, None, :]).any(-1).sum(1), -1)
