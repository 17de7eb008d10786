"""What is known on both sides of a served row: which ids were asked or named, and what the candidate would choose.

`Known` holds the ids of the bound with both sides' log-probabilities; `Choice` is the candidate's most probable token
as far as the answer tells it, and what follows from it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harness.capture import Capture, CapturedRow
from harness.errors import ScoreError
from harness.measure.rows import targets_of
from harness.scoring import bounds
from harness.scoring.known import TopAndTail, teacher_logprobs_at, teacher_top_and_tail
from harness.served.seam import ServedRow
from harness.types import Row

TOP = 5
#: Positions whose vocabulary is marked at a time where two lists of ids are compared.
MARKED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedIds:
    """What a server is asked at each position of one row, and what the teacher thinks of it.

    ``ids_TM`` (int32, -1 where unused) holds the teacher's top ``k``, then ``m`` drawn ids, then the row's next token.
    """

    ids_TM: np.ndarray
    k: int
    m: int
    teacher: TopAndTail


def ask_of(capture: Capture, row: Row, k: int, m: int, seed: int, *, vocab: int | None = None) -> AskedIds:
    """The teacher's top ``k``, ``m`` ids drawn from its tail, and the next token; the same for the same seed."""
    if m == 1:
        raise ScoreError("one drawn id a position gives no standard error", "draw 2 or more, or none")
    teacher = teacher_top_and_tail(capture.row(row.index), capture.head, k, m, seed, vocab_size=vocab)
    ids = np.concatenate([teacher.ids_TK, teacher.tail_ids_TM, targets_of(row)[:, None]], axis=1)
    return AskedIds(ids_TM=ids.astype(np.int32), k=k, m=m, teacher=teacher)


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Ids of the bound with both sides' log-probabilities, NaN where unknown; ``[T, K]``.

    ``wide_*`` hold more: the teacher's own top ids that the server did not name, below its ``cap_q_T``.
    """

    ids_TK: np.ndarray
    lp_TK: np.ndarray
    lq_TK: np.ndarray
    wide_lp: np.ndarray
    wide_lq: np.ndarray
    cap_p_T: np.ndarray
    cap_q_T: np.ndarray
    invalid_T: np.ndarray
    all_known_T: np.ndarray


def observed(logprobs: np.ndarray) -> np.ndarray:
    """-inf as NaN: a server's sentinel says that an id was not observed, not that it is impossible."""
    return np.where(logprobs == -np.inf, np.nan, logprobs.astype(np.float64))


def known_of_asked(answer: ServedRow, asked: AskedIds) -> Known:
    """The teacher's top ids as the server scored them."""
    assert answer.asked_TM is not None
    used = asked.ids_TM >= 0
    invalid = (used & np.isnan(answer.asked_TM)).any(1)
    lq = observed(answer.asked_TM[:, : asked.k])
    lp, none = asked.teacher.logp_TK, np.ones(len(lq))
    return Known(
        ids_TK=asked.teacher.ids_TK,
        lp_TK=lp,
        lq_TK=lq,
        wide_lp=lp,
        wide_lq=lq,
        cap_p_T=none,
        cap_q_T=none,
        invalid_T=invalid,
        all_known_T=(np.isfinite(answer.asked_TM) | ~used).all(1),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """The server's list and the row's next token, each id once; then the teacher's own top id. Teacher's numbers."""

    ids_TK: np.ndarray
    lp_TK: np.ndarray
    lp_top1_T: np.ndarray


def listed_ids(
    capture: Capture, stored: CapturedRow, row: Row, answer: ServedRow, asked: AskedIds | None, vocab: int | None
) -> tuple[Listed, TopAndTail]:
    """What the teacher thinks of the ids that the server named, and its own top ids."""
    targets = targets_of(row)[:, None]
    named = (answer.ids_TK == targets).any(1)[:, None]
    ids = np.concatenate([answer.ids_TK, np.where(named, -1, targets)], axis=1).astype(np.int32)
    also = np.concatenate([ids, stored.top1[:, None]], axis=1)
    if asked:
        teacher, lp = asked.teacher, teacher_logprobs_at(stored, capture.head, also, vocab_size=vocab)
    else:
        k = answer.ids_TK.shape[1]
        teacher = teacher_top_and_tail(stored, capture.head, k, also_TL=also, vocab_size=vocab)
        lp = teacher.also_logp_TL
    return Listed(ids_TK=ids, lp_TK=lp[:, :-1], lp_top1_T=lp[:, -1]), teacher


def known_of_list(answer: ServedRow, listed: Listed, teacher: TopAndTail) -> Known:
    """The ids that the server named, and its cap on all it did not name."""
    target_lq = np.where(listed.ids_TK[:, -1] >= 0, answer.target_logprob_T, -np.inf)
    raw = np.concatenate([answer.logprobs_TK, target_lq[:, None]], axis=1)
    lq = np.where(listed.ids_TK >= 0, observed(raw), np.nan)
    missing = ~is_in(teacher.ids_TK, listed.ids_TK) & (teacher.ids_TK >= 0)
    extra = np.where(missing, teacher.logp_TK, np.nan)
    used = answer.ids_TK >= 0
    # An unobserved id in the list breaks the order, so nothing is known of what the list leaves out.
    whole = used.all(1) & np.isfinite(answer.logprobs_TK).all(1)
    with np.errstate(invalid="ignore"):
        cap_q = np.where(whole, np.exp(answer.logprobs_TK.astype(np.float64).min(1, initial=0.0)), 1.0)
    return Known(
        ids_TK=listed.ids_TK,
        lp_TK=listed.lp_TK,
        lq_TK=lq,
        wide_lp=np.concatenate([listed.lp_TK, extra], axis=1),
        wide_lq=np.concatenate([lq, np.full(extra.shape, np.nan)], axis=1),
        cap_p_T=np.exp(np.where(teacher.ids_TK >= 0, teacher.logp_TK, 0.0).min(1, initial=0.0)),
        cap_q_T=cap_q,
        invalid_T=(used & np.isnan(answer.logprobs_TK)).any(1) | np.isnan(answer.target_logprob_T),
        all_known_T=whole & np.isfinite(answer.target_logprob_T),
    )


def is_in(ids_TK: np.ndarray, others_TL: np.ndarray) -> np.ndarray:
    """Whether each id is among the others of its own position; unused slots (-1) are one id more."""
    out = np.empty(ids_TK.shape, dtype=bool)
    span = int(max(ids_TK.max(initial=0), others_TL.max(initial=0))) + 2
    for low in range(0, len(out), MARKED):
        some, others = ids_TK[low : low + MARKED], others_TL[low : low + MARKED]
        at = np.arange(len(some))[:, None]
        there = np.zeros((len(some), span), dtype=bool)
        there[at, others] = True
        out[low : low + MARKED] = there[at, some]
    return out


# ---- the candidate's choice ------------------------------------------------------------------------------------------


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
    """What the candidate chooses, from its own list where there is one, else from the ids that were asked."""
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
    lq_top1 = np.where(is_top1, lq, np.inf).min(1, initial=np.inf)
    rank = np.where(is_top1.any(1) & valid & np.isfinite(lq_top1), 1 + (lq > lq_top1[:, None]).sum(1), -1)
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
