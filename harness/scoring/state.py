"""What is known of a position after any part of the vocabulary, and how it moves when a larger logit turns up.

One float64 array of ``SLOTS`` numbers a position. The sums are those of `harness.scoring.kernel` with the shifts at
the largest finite logits seen so far. ``LOST_T`` is the largest teacher logit where the candidate has -inf (its KL is
infinite when that entry has any probability), ``LOST_C`` the reverse.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numba
import numpy as np

(
    TOP_T, TOP_C, SUM_S, SUM_Q, SUM_M, SUM_A, SUM_B, SUM_E, SUM_F,
    ID_T, ID_C, TIES_T, TIES_C, JOINT, BAD_T, BAD_C, LOST_T, LOST_C, AT_T, AT_C,
) = range(20)  # fmt: skip
SLOTS = 20


def fresh(rows: int) -> np.ndarray:
    """States ``[rows, SLOTS]`` that have seen nothing."""
    state = np.zeros((rows, SLOTS))
    state[:, [ID_T, ID_C]] = -1.0
    state[:, [TOP_T, TOP_C, LOST_T, LOST_C]] = -np.inf
    state[:, [AT_T, AT_C]] = np.nan
    return state


@numba.njit(nogil=True)
def shift(top: float) -> float:
    """The shift that belongs to a maximum: any number will do where nothing finite has been seen."""
    return top if top > -math.inf else 0.0


@numba.njit(nogil=True)
def raise_tops(state: np.ndarray, top_t: float, top_c: float) -> None:
    """Move a state to larger maxima (whose ids are then unknown, -1); exact algebra, in float64.

    With ``fp, fq`` the factors that p and q take and ``dl`` the rise of c0: phi(d - dl) = e^-dl phi(d) + expm1(-dl) d
    + (expm1(-dl) + dl), and e^-dl fp = fq. Sum q d is A + B + M, since q = p e^d.
    """
    rise_t = shift(top_t) - shift(state[TOP_T])
    rise_c = shift(top_c) - shift(state[TOP_C])
    s, q, m, a, b = state[SUM_S], state[SUM_Q], state[SUM_M], state[SUM_A], state[SUM_B]
    # A side that has no mass yet has no shift to keep: let it follow the other, so that c0 stays.
    if s == 0.0:
        rise_t = rise_c
    elif q == 0.0:
        rise_c = rise_t
    fp, fq, dl = math.exp(-rise_t), math.exp(-rise_c), rise_c - rise_t
    if s == 0.0 and q == 0.0:
        fp = fq = 1.0
    if abs(dl) < 1.0:
        e, g = math.expm1(-dl), math.expm1(dl)
        state[SUM_A] = fp * ((1.0 + e) * a + (e + dl) * s + e * m)
        state[SUM_B] = fq * ((1.0 + g) * b + (g - dl) * q - g * (a + b + m))
    else:
        state[SUM_A] = fq * a + (fq - fp + fp * dl) * s + (fq - fp) * m
        state[SUM_B] = fp * b + (fp - fq - fq * dl) * q - (fp - fq) * (a + b + m)
    state[SUM_E] = fp * (state[SUM_E] - rise_t * s)
    state[SUM_F] = fq * (state[SUM_F] - rise_c * q)
    state[SUM_M] = fp * (m - dl * s)
    state[SUM_S], state[SUM_Q] = fp * s, fq * q
    if top_t > state[TOP_T]:
        state[TOP_T], state[ID_T], state[TIES_T] = top_t, -1.0, 0.0
    if top_c > state[TOP_C]:
        state[TOP_C], state[ID_C], state[TIES_C] = top_c, -1.0, 0.0
    state[JOINT] = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """Per-position results of both sides and of the pair, float64 ``[T]`` unless a name says otherwise."""

    kl: np.ndarray
    kl_reverse: np.ndarray
    lse: tuple[np.ndarray, np.ndarray]
    nll: tuple[np.ndarray, np.ndarray]
    entropy: tuple[np.ndarray, np.ndarray]
    top1: tuple[np.ndarray, np.ndarray]
    tied: tuple[np.ndarray, np.ndarray]
    nonfinite: tuple[np.ndarray, np.ndarray]
    p_top1: np.ndarray
    joint: np.ndarray


def finish(state: np.ndarray, vocab_size: int) -> Sides:
    """Turn states ``[T, SLOTS]`` that have seen the whole vocabulary into results.

    A side with a NaN or +inf, or with nothing but -inf, has NaN results, top-1 id -1 and a count of at least one.
    """
    with np.errstate(all="ignore"):
        valid = [_valid(state, top, bad) for top, bad in ((TOP_T, BAD_T), (TOP_C, BAD_C))]
        lse = [
            np.where(ok, state[:, top] + np.log(state[:, total]), np.nan)
            for ok, top, total in zip(valid, (TOP_T, TOP_C), (SUM_S, SUM_Q), strict=True)
        ]
        forward, backward = _divergences(state)
        pair = valid[0] & valid[1]
        forward = np.where(np.exp(state[:, LOST_T] - lse[0]) > 0, np.inf, forward)
        backward = np.where(np.exp(state[:, LOST_C] - lse[1]) > 0, np.inf, backward)
        entropy = [
            np.where(ok, np.log(state[:, total]) - state[:, first] / state[:, total], np.nan)
            for ok, total, first in zip(valid, (SUM_S, SUM_Q), (SUM_E, SUM_F), strict=True)
        ]
    return Sides(
        kl=np.where(pair, forward, np.nan),
        kl_reverse=np.where(pair, backward, np.nan),
        lse=(lse[0], lse[1]),
        nll=(lse[0] - state[:, AT_T], lse[1] - state[:, AT_C]),
        entropy=(entropy[0], entropy[1]),
        top1=(_top1(state[:, ID_T], valid[0]), _top1(state[:, ID_C], valid[1])),
        tied=(valid[0] & (state[:, TIES_T] > 1), valid[1] & (state[:, TIES_C] > 1)),
        nonfinite=(_count(state[:, BAD_T], valid[0], vocab_size), _count(state[:, BAD_C], valid[1], vocab_size)),
        p_top1=np.where(valid[0], 1.0 / state[:, SUM_S], np.nan),
        joint=pair & (state[:, JOINT] > 0),
    )


def _divergences(state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    s, q = state[:, SUM_S], state[:, SUM_Q]
    x = (state[:, SUM_A] + state[:, SUM_M]) / s
    near = np.abs(x) < 0.5
    log_ratio = np.where(near, np.log1p(x), np.log(q / s))
    back = np.where(near, -x / (1.0 + x), s / q - 1.0)
    return state[:, SUM_A] / s - (x - log_ratio), state[:, SUM_B] / q - (back + log_ratio)


def _valid(state: np.ndarray, top: int, bad: int) -> np.ndarray:
    return (state[:, bad] == 0) & (state[:, top] > -np.inf)


def _top1(ids: np.ndarray, valid: np.ndarray) -> np.ndarray:
    return np.where(valid, ids, -1).astype(np.int32)


def _count(bad: np.ndarray, valid: np.ndarray, vocab_size: int) -> np.ndarray:
    return np.where(valid | (bad > 0), bad, vocab_size).astype(np.int32)
