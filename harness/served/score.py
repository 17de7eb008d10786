"""One row as a server answered it against its captured teacher: what its known log-probabilities prove, and no more.

Two ways. *Top-k*: the server names its own most probable ids; known are those and the row's next token. *Fixed ids*:
the server scores ids of our choice; known are the teacher's top ``K``, and ids drawn from the rest of the teacher's
distribution give an unbiased estimate of what the bound leaves out. ``kl`` is the lower bound in both.

What an answer does not tell is NaN, or -1 for ids and ranks, never a number. A log-probability of -inf means that the
server did not observe the id: it belongs to the tail. NaN where a number was due makes the position invalid.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from harness.capture import Capture, CapturedRow
from harness.errors import EngineError, ScoreError
from harness.score_row import targets_of
from harness.scoring import bounds
from harness.scoring.known import TopAndTail, teacher_logprobs_at, teacher_top_and_tail
from harness.served.seam import ServedRow
from harness.types import SCORE_DTYPES, Row, Scores, TopK

#: More probability than this on known ids is no rounding: the server's numbers are not of one distribution.
EXCESS = 1e-3
TOP = 5
#: Positions whose vocabulary is marked at a time where two lists of ids are compared.
MARKED = 64

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
    listed, teacher = _listed(capture, stored, row, answer, asked, vocab)
    known = _fixed(row, answer, asked) if asked else _named(row, answer, listed, teacher)
    bound = bounds.lower_bound(known.lp_TK, known.lq_TK, resolution=bounds.FP32_RESOLUTION)
    _require_a_distribution(row, bound)
    invalid = known.invalid_T | ~np.isfinite(stored.nll)
    choice = _choice(stored, answer, listed, known)
    kl = np.where(invalid, np.nan, bound.kl)
    return _scores(stored, answer, kl, known.invalid_T, choice, _overlap(answer, teacher)), {
        name: np.asarray(values).astype(EXTRA_DTYPES[name])
        for name, values in _extras(known, bound, invalid, choice, asked, answer).items()
    }


# ---- what is known ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
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


def _observed(logprobs: np.ndarray) -> np.ndarray:
    """Fault A16: a sentinel says that an id was not observed, not that it is impossible."""
    return np.where(logprobs == -np.inf, np.nan, logprobs.astype(np.float64))


def _fixed(row: Row, answer: ServedRow, asked: AskedIds) -> _Known:
    """The teacher's top ids as the server scored them."""
    assert answer.asked_TM is not None
    used = asked.ids_TM >= 0
    invalid = (used & np.isnan(answer.asked_TM)).any(1)
    lq = _observed(answer.asked_TM[:, : asked.k])
    lp, none = asked.teacher.logp_TK, np.ones(len(lq))
    return _Known(
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
class _Listed:
    """The server's list and the row's next token, each id once; then the teacher's own top id. Teacher's numbers."""

    ids_TK: np.ndarray
    lp_TK: np.ndarray
    lp_top1_T: np.ndarray


def _listed(
    capture: Capture, stored: CapturedRow, row: Row, answer: ServedRow, asked: AskedIds | None, vocab: int | None
) -> tuple[_Listed, TopAndTail]:
    """What the teacher thinks of the ids that the server named, and its own top ids."""
    targets = targets_of(row)[:, None]
    named = (answer.ids_TK == targets).any(1)[:, None]
    ids = np.concatenate([answer.ids_TK, np.where(named, -1, targets)], axis=1).astype(np.int32)
    also = np.concatenate([ids, stored.top1[:, None]], axis=1)
    if asked:
        teacher, lp = asked.teacher, teacher_logprobs_at(stored, capture.head, also, vocab_size=vocab)
    else:
        k = answer.ids_TK.shape[1]
        if isinstance(stored.outputs, TopK):
            k = min(k, int((stored.outputs.ids_TK >= 0).sum(1).min()))
        teacher = teacher_top_and_tail(stored, capture.head, k, also_TL=also, vocab_size=vocab)
        lp = teacher.also_logp_TL
    return _Listed(ids_TK=ids, lp_TK=lp[:, :-1], lp_top1_T=lp[:, -1]), teacher


def _named(row: Row, answer: ServedRow, listed: _Listed, teacher: TopAndTail) -> _Known:
    """The ids that the server named, and its cap on all it did not name."""
    target_lq = np.where(listed.ids_TK[:, -1] >= 0, answer.target_logprob_T, -np.inf)
    raw = np.concatenate([answer.logprobs_TK, target_lq[:, None]], axis=1)
    lq = np.where(listed.ids_TK >= 0, _observed(raw), np.nan)
    missing = ~_is_in(teacher.ids_TK, listed.ids_TK) & (teacher.ids_TK >= 0)
    extra = np.where(missing, teacher.logp_TK, np.nan)
    used = answer.ids_TK >= 0
    # An unobserved id in the list breaks the order, so nothing is known of what the list leaves out.
    whole = used.all(1) & np.isfinite(answer.logprobs_TK).all(1)
    with np.errstate(invalid="ignore"):
        cap_q = np.where(whole, np.exp(answer.logprobs_TK.astype(np.float64).min(1, initial=0.0)), 1.0)
    return _Known(
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


def _is_in(ids_TK: np.ndarray, others_TL: np.ndarray) -> np.ndarray:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """The candidate's most probable token: -1 where it is not known, and whether agreement is certain all the same."""

    top1_T: np.ndarray
    agree_T: np.ndarray
    agree_known_T: np.ndarray
    tied_teacher_T: np.ndarray
    tied_candidate_T: np.ndarray
    rank_T: np.ndarray


def _choice(stored: CapturedRow, answer: ServedRow, listed: _Listed, known: _Known) -> _Choice:
    if answer.ids_TK.shape[1]:
        return _choice_of_list(stored, answer, listed, known.invalid_T)
    return _choice_of_asked(stored, known)


def _choice_of_list(stored: CapturedRow, answer: ServedRow, listed: _Listed, invalid: np.ndarray) -> _Choice:
    """From the server's own list. Ids that tie with its first entry are its choice too."""
    valid = (stored.top1 >= 0) & ~invalid & (answer.ids_TK[:, 0] >= 0) & (answer.logprobs_TK[:, 0] > -np.inf)
    lq = np.where(answer.ids_TK >= 0, answer.logprobs_TK, -np.inf)
    chosen = (lq == lq.max(1, keepdims=True)) & valid[:, None]
    equal_teacher = listed.lp_TK == listed.lp_top1_T[:, None]
    top_teacher = (answer.ids_TK == stored.top1[:, None]) | equal_teacher[:, :-1]
    is_top1 = answer.ids_TK == stored.top1[:, None]
    own = np.where(is_top1, lq, np.inf).min(1, initial=np.inf)
    rank = np.where(is_top1.any(1) & valid & np.isfinite(own), 1 + (lq > own[:, None]).sum(1), -1)
    return _Choice(
        top1_T=np.where(valid, np.where(chosen, answer.ids_TK, np.iinfo(np.int32).max).min(1), -1),
        agree_T=(chosen & top_teacher).any(1),
        agree_known_T=valid,
        tied_teacher_T=(equal_teacher & (listed.ids_TK != stored.top1[:, None]) & (listed.ids_TK >= 0)).any(1),
        tied_candidate_T=chosen.sum(1) > 1,
        rank_T=rank,
    )


def _choice_of_asked(stored: CapturedRow, known: _Known) -> _Choice:
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
    return _Choice(
        top1_T=np.where(certain, np.where(chosen, known.ids_TK, np.iinfo(np.int32).max).min(1), -1),
        agree_T=agree & certain,
        agree_known_T=certain | beaten,
        tied_teacher_T=valid & (top_teacher.sum(1) > 1),
        tied_candidate_T=certain & (chosen.sum(1) > 1),
        rank_T=np.full(len(best), -1),
    )


def _overlap(answer: ServedRow, teacher: TopAndTail) -> np.ndarray:
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


def _scores(
    stored: CapturedRow,
    answer: ServedRow,
    kl: np.ndarray,
    invalid: np.ndarray,
    choice: _Choice,
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
    known: _Known,
    bound: bounds.Bound,
    invalid: np.ndarray,
    choice: _Choice,
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


def _estimate(known: _Known, asked: AskedIds | None, answer: ServedRow) -> tuple[np.ndarray, np.ndarray]:
    """The unbiased estimate of the KL and its standard error; NaN where nothing was drawn or not all is known."""
    nothing = np.full(len(known.lp_TK), np.nan)
    if asked is None or not asked.m or answer.asked_TM is None:
        return nothing, nothing
    drawn = _observed(answer.asked_TM[:, asked.k : asked.k + asked.m])
    tail = bounds.tail_estimate(asked.teacher.tail_logp_TM, drawn, asked.teacher.tail_mass_T)
    whole = (np.isfinite(known.lq_TK) | ~(known.lp_TK > -np.inf)).all(1)
    total = bounds.known_sum(known.lp_TK, known.lq_TK) + tail.value
    return np.where(whole, total, np.nan), np.where(whole, tail.standard_error, np.nan)
