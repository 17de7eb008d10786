"""What is known of a position after any part of the vocabulary, and how it moves when a larger logit turns up.

One float64 array of ``SLOTS`` numbers a position. The sums are those of `harness.scoring.kernel`, with ``st`` at the
teacher's largest finite logit so far and ``c0`` at the mean of ``c - t`` when that was found. ``LOST_T`` is the largest
teacher logit where the candidate has -inf (its KL is infinite when that entry has any probability), ``LOST_C`` the
reverse. ``CALM`` says that the last block's logits differed by less than 1 from c0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numba
import numpy as np

(
    TOP_T, TOP_C, C0, SUM_S, SUM_Q, SUM_M, SUM_N, SUM_A, SUM_B, SUM_E, SUM_F,
    ID_T, ID_C, TIES_T, TIES_C, JOINT, BAD_T, BAD_C, LOST_T, LOST_C, AT_T, AT_C, CALM,
) = range(23)  # fmt: skip
SLOTS = 23
REACH = 30.0
#: Largest magnitude of a row's maximum: shifts up to here are held to 1e-7, and steps of float32 logits there are 8.
LARGEST = 1e8


def fresh(rows: int) -> np.ndarray:
    """States ``[rows, SLOTS]`` that have seen nothing."""
    state = np.zeros((rows, SLOTS))
    state[:, [ID_T, ID_C]] = -1.0
    state[:, [TOP_T, TOP_C, LOST_T, LOST_C]] = -np.inf
    state[:, [AT_T, AT_C]] = np.nan
    state[:, CALM] = 1.0
    return state


@numba.njit(nogil=True)
def shift(top: float) -> float:
    """The shift that belongs to a maximum: any number will do where nothing finite has been seen."""
    return top if top > -math.inf else 0.0


@numba.njit(nogil=True)
def centre(top_t: float, top_c: float, c0: float, mass: float, moment: float) -> float:
    """A better c0: the mean of c - t, given S and M of what is known with the old one.

    It stays within ``REACH`` of the maxima's difference, so that neither exp leaves the range of fp32, and makes
    ``st + c0`` an fp32 number.
    """
    middle = shift(top_c) - shift(top_t)
    if not (mass > 0.0 and math.isfinite(moment / mass)):
        return middle
    better = min(max(c0 + moment / mass, middle - REACH), middle + REACH)
    return np.float64(np.float32(shift(top_t) + better)) - shift(top_t)


@numba.njit(nogil=True)
def move(state: np.ndarray, top_t: float, top_c: float, c0: float) -> None:
    """Move a state to larger maxima (whose ids are then unknown, -1) and a new c0; exact algebra, in float64.

    With ``fp, fq`` the factors that p and q take and ``dl`` the rise of c0, phi(d - dl) = e^-dl phi(d) + expm1(-dl) d
    + (expm1(-dl) + dl), and e^-dl fp = fq. After a large rise little is left of the old A and B to build on, and
    A = Q - S - M, B = S - Q + N lose nothing.
    """
    rise_t = shift(top_t) - shift(state[TOP_T])
    rise_c = rise_t + (c0 - state[C0])
    s, q, m, n = state[SUM_S], state[SUM_Q], state[SUM_M], state[SUM_N]
    # A side that has no mass yet has no shift to keep: let it follow the other.
    if s == 0.0 and q == 0.0:
        rise_t = rise_c = 0.0
    elif s == 0.0:
        rise_t = rise_c
    elif q == 0.0:
        rise_c = rise_t
    fp, fq, dl = math.exp(-rise_t), math.exp(-rise_c), rise_c - rise_t
    state[SUM_S], state[SUM_Q] = fp * s, fq * q
    state[SUM_M], state[SUM_N] = fp * (m - dl * s), fq * (n - dl * q)
    if abs(dl) < 1.0:
        e, g = math.expm1(-dl), math.expm1(dl)
        state[SUM_A] = fp * ((1.0 + e) * state[SUM_A] + (e + dl) * s + e * m)
        state[SUM_B] = fq * ((1.0 + g) * state[SUM_B] + (g - dl) * q - g * n)
    else:
        state[SUM_A] = state[SUM_Q] - state[SUM_S] - state[SUM_M]
        state[SUM_B] = state[SUM_S] - state[SUM_Q] + state[SUM_N]
    state[SUM_E] = fp * (state[SUM_E] - rise_t * s)
    state[SUM_F] = fq * (state[SUM_F] - rise_c * q)
    if top_t > state[TOP_T]:
        state[TOP_T], state[ID_T], state[TIES_T] = top_t, -1.0, 0.0
    if top_c > state[TOP_C]:
        state[TOP_C], state[ID_C], state[TIES_C] = top_c, -1.0, 0.0
    state[C0], state[JOINT] = c0, 0.0


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

    A side with a NaN or +inf, with nothing but -inf, or with a maximum past ``LARGEST``, has NaN results, top-1 id -1
    and a count of at least one.
    """
    with np.errstate(all="ignore"):
        valid = [_valid(state, top, bad) for top, bad in ((TOP_T, BAD_T), (TOP_C, BAD_C))]
        base_t = np.where(state[:, TOP_T] > -np.inf, state[:, TOP_T], 0.0)
        lse = [
            np.where(ok, base + np.log(state[:, total]), np.nan)
            for ok, base, total in zip(valid, (base_t, base_t + state[:, C0]), (SUM_S, SUM_Q), strict=True)
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
        p_top1=np.exp(state[:, TOP_T] - lse[0]),
        joint=pair & (state[:, JOINT] > 0),
    )


def _divergences(state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """KL both ways. Where x is not small, A / S - x is -M / S, and B / Q plus its x is N / Q."""
    s, q = state[:, SUM_S], state[:, SUM_Q]
    x = (state[:, SUM_A] + state[:, SUM_M]) / s
    near, log_x, log_ratio = np.abs(x) < 0.5, np.log1p(x), np.log(q / s)
    forward = np.where(near, state[:, SUM_A] / s - (x - log_x), log_ratio - state[:, SUM_M] / s)
    backward = np.where(near, state[:, SUM_B] / q - (log_x - x / (1.0 + x)), state[:, SUM_N] / q - log_ratio)
    return forward, backward


def _valid(state: np.ndarray, top: int, bad: int) -> np.ndarray:
    return (state[:, bad] == 0) & (np.abs(state[:, top]) <= LARGEST)


def _top1(ids: np.ndarray, valid: np.ndarray) -> np.ndarray:
    return np.where(valid, ids, -1).astype(np.int32)


def _count(bad: np.ndarray, valid: np.ndarray, vocab_size: int) -> np.ndarray:
    return np.where(valid | (bad > 0), bad, vocab_size).astype(np.int32)
