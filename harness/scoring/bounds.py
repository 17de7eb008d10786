"""KL(teacher||candidate) from part of the vocabulary: bounds, estimates, and what is neither. Nats, float64.

Arrays are log-probabilities ``[T, K]`` of the same ids on both sides, NaN where a side does not know an id (an unused
slot is NaN on both). A log-probability of -inf is knowledge: that id has probability zero. What the known ids leave
over is one tail bucket, with mass ``1 - sum``. Everything holds position by position, so means of bounds bound means.

Each divergence is summed as ``p (e^d - 1 - d)`` with ``d = ln(q / p)``: both sides' masses add up to 1, so the sum is
the same and no term is negative. The mass of a tail is known only to the rounding of the known log-probabilities
(``resolution``). A teacher's tail below it is joined with the most probable known id; a candidate's counts as whatever
within its rounding gives the least divergence, and each term gives up what the rounding of its log-probabilities may
have added. All that only lowers a bound, which so stays below the KL always; `Bound.rounded` says where a tail was
below the resolution.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

#: Mass that sums of float64 log-probabilities resolve, and sums of fp32 ones (a server's).
FLOAT64_RESOLUTION = 1e-14
FP32_RESOLUTION = 1e-6
#: ln(lambda) lies within this; halved so often, the interval is as narrow as float64 tells apart.
LN_RANGE, HALVINGS = 690.0, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A lower bound and what it rests on; every array has ``T`` entries.

    ``mass_p`` and ``mass_q`` are the probability on the ids known on both sides, as summed; ``tail_q`` may be negative
    by rounding. ``rounded``: a tail was below the resolution.
    """

    kl: np.ndarray
    mass_p: np.ndarray
    mass_q: np.ndarray
    tail_p: np.ndarray
    tail_q: np.ndarray
    rounded: np.ndarray


def lower_bound(lp_TK: np.ndarray, lq_TK: np.ndarray, *, resolution: float = FLOAT64_RESOLUTION) -> Bound:
    """The chain rule on the ids known on both sides and one bucket for all others (data processing).

    ``KL(P||Q) = bound + p_T KL(P(.|T) || Q(.|T))``: tight over all candidates with these values, and it never falls
    when ids are added. Positions without a known id have the bound 0.
    """
    known = ~np.isnan(lp_TK) & ~np.isnan(lq_TK)
    lp, lq = np.where(known, lp_TK, -np.inf), np.where(known, lq_TK, -np.inf)
    p, q = np.exp(lp), np.exp(lq)
    top = _top(lp)
    tail_p, tail_q = _tail(lp, p, top), _tail(lq, q, _top(lq))
    folded = (tail_p <= resolution) & known.any(-1)
    inside = known & ~(folded[:, None] & top)
    gap = np.where(inside, q - p, 0.0)
    with np.errstate(all="ignore"):
        gap = np.where(inside & (p > 0), p * np.expm1(lq - lp), gap)
    rest_p = np.where(folded, 1.0 - np.where(inside, p, 0.0).sum(-1), tail_p)
    rest_q = rest_p - gap.sum(-1)
    cells = np.where(inside, _least_cell(lp, lq, resolution), 0.0).sum(-1)
    return Bound(
        kl=cells + _least_bucket(rest_p, rest_q, resolution),
        mass_p=p.sum(-1),
        mass_q=q.sum(-1),
        tail_p=tail_p,
        tail_q=tail_q,
        rounded=folded | (rest_q < resolution),
    )


def _cell(lp: np.ndarray, lq: np.ndarray) -> np.ndarray:
    """``p (e^d - 1 - d)``: q where p is 0, infinite where only q is."""
    with np.errstate(all="ignore"):
        d = lq - lp
        return np.where(lp > -np.inf, np.exp(lp) * (np.expm1(d) - d), np.exp(lq))


def _least_cell(lp: np.ndarray, lq: np.ndarray, resolution: float) -> np.ndarray:
    """`_cell`, less what the rounding of two log-probabilities may add: its derivative is ``q - p`` in ``d``."""
    with np.errstate(all="ignore"):
        unit = resolution / 8
        cell = _cell(lp, lq)
        slip = unit * (np.abs(lp) + np.abs(lq)) * np.abs(np.exp(lq) - np.exp(lp)) + unit * np.abs(lp) * cell
        return np.where(np.isfinite(slip), np.maximum(cell - slip, 0.0), cell)


def _least_bucket(p: np.ndarray, q: np.ndarray, error: float) -> np.ndarray:
    """The least `_bucket` of ``p`` with any mass within ``error`` of ``q``; it falls towards ``p``."""
    low = np.maximum(q, 0.0)
    return np.maximum(_bucket(p, np.clip(p, low - error, low + error)), 0.0)


def _bucket(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """`_cell` of masses; ``ln(q / p)`` from their difference, which keeps its digits where they are nearly equal."""
    with np.errstate(all="ignore"):
        e = (q - p) / p
        log = np.where(e > -0.5, np.log1p(e), np.log(q) - np.log(p))
        return np.where(p > 0, p * (e - log), q)


def _top(logs_TK: np.ndarray) -> np.ndarray:
    """Mask of the first largest entry of each position."""
    out = np.zeros(logs_TK.shape, dtype=bool)
    if logs_TK.shape[1]:
        out[np.arange(len(out)), logs_TK.argmax(-1)] = True
    return out


def _tail(logs: np.ndarray, probabilities: np.ndarray, top: np.ndarray) -> np.ndarray:
    """One minus the sum, exact to the last digit where one id holds nearly everything."""
    largest = np.where(top, logs, 0.0).sum(-1)
    return -np.expm1(np.where(top.any(-1), largest, -np.inf)) - np.where(top, 0.0, probabilities).sum(-1)


def capped_bound(
    lp_TK: np.ndarray,
    lq_TK: np.ndarray,
    *,
    cap_p_T: np.ndarray | float = 1.0,
    cap_q_T: np.ndarray | float = 1.0,
    resolution: float = FLOAT64_RESOLUTION,
) -> np.ndarray:
    """The least KL of all pairs that fit two different sets of known ids and their caps, ``[T]``.

    Slots known to the teacher alone are ids of which ``q <= cap_q`` (they are not in the candidate's top k), slots
    known to the candidate alone have ``p <= cap_p``. The minimum has one multiplier ``lambda``: unknown q are
    ``min(p / lambda, cap_q)``, unknown p are ``min(lambda q, cap_p)``, and the two rests have the ratio ``lambda``.
    At least `lower_bound` of the same arrays, at most the KL.
    """
    has_p, has_q = ~np.isnan(lp_TK), ~np.isnan(lq_TK)
    lp, lq = np.where(has_p, lp_TK, -np.inf), np.where(has_q, lq_TK, -np.inf)
    p, q = np.exp(lp), np.exp(lq)
    tail_p = np.maximum(_tail(lp, p, _top(lp)), 0.0)
    tail_q = np.maximum(_tail(lq, q, _top(lq)), 0.0) + resolution
    problem = _Capped(
        p_TK=_gathered(p, has_p & ~has_q),
        q_TK=_gathered(q, has_q & ~has_p),
        cap_p_T=np.broadcast_to(np.asarray(cap_p_T, np.float64), tail_p.shape),
        cap_q_T=np.broadcast_to(np.asarray(cap_q_T, np.float64), tail_p.shape),
        tail_p_T=tail_p,
        tail_q_T=tail_q,
    )
    x, y, r, s = problem.solve()
    both = np.where(has_p & has_q, _least_cell(lp, lq, resolution), 0.0).sum(-1)
    cells = _bucket(problem.p_TK, x).sum(-1) + _bucket(y, problem.q_TK).sum(-1) + _bucket(r, s)
    # Both sides' sums are 1 only up to rounding: what they differ by is put back.
    total_p, total_q = p.sum(-1) + y.sum(-1) + r, q.sum(-1) + x.sum(-1) + s
    capped = both + cells + (total_p - total_q) - resolution
    return np.maximum(capped, lower_bound(lp_TK, lq_TK, resolution=resolution).kl)


def _gathered(values_TK: np.ndarray, mask_TK: np.ndarray) -> np.ndarray:
    """The masked values of each position side by side, zeros after them: as many columns as the fullest has."""
    width = int(mask_TK.sum(-1).max(initial=0))
    order = np.argsort(~mask_TK, axis=-1, kind="stable")[:, :width]
    return np.take_along_axis(np.where(mask_TK, values_TK, 0.0), order, axis=-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Capped:
    """Masses known to one side alone (0 in spare slots), the caps of the other side, and the mass left to each."""

    p_TK: np.ndarray
    q_TK: np.ndarray
    cap_p_T: np.ndarray
    cap_q_T: np.ndarray
    tail_p_T: np.ndarray
    tail_q_T: np.ndarray

    def solve(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Unknown q ``x`` and unknown p ``y`` (``[T, K]``), and the rests ``r`` of p and ``s`` of q (``[T]``)."""
        # Past `most` the unknown p would hold more than their side has left.
        most = _root(lambda at: self.tail_p_T - self._y(at).sum(-1), len(self.tail_p_T))
        at = np.minimum(_root(self._excess, len(most)), most)
        x, y = self._x(at), self._y(at)
        r = np.maximum(self.tail_p_T - y.sum(-1), 0.0)
        s = r / at
        # Where the unknown ids take all that is left of both sides, x has a multiplier of its own.
        full = self._x(most).sum(-1) > self.tail_q_T
        if full.any():
            own = _root(lambda at: self._x(at).sum(-1) - self.tail_q_T, len(most))
            x = np.where(full[:, None], self._x(own), x)
            r, s = np.where(full, 0.0, r), np.where(full, 0.0, s)
        return x, y, r, s

    def _x(self, at: np.ndarray) -> np.ndarray:
        return np.minimum(self.p_TK / at[:, None], self.cap_q_T[:, None])

    def _y(self, at: np.ndarray) -> np.ndarray:
        return np.minimum(self.q_TK * at[:, None], self.cap_p_T[:, None])

    def _excess(self, at: np.ndarray) -> np.ndarray:
        """Falls as lambda grows; 0 where the rests have the ratio lambda."""
        return (self.tail_p_T - self._y(at).sum(-1)) / at - (self.tail_q_T - self._x(at).sum(-1))


def _root(falling: Callable[[np.ndarray], np.ndarray], positions: int) -> np.ndarray:
    """Where a falling function of lambda crosses 0, position by position; an end of the range where it does not."""
    low, high = np.full(positions, -LN_RANGE), np.full(positions, LN_RANGE)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        above = falling(np.exp(middle)) > 0
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    return np.exp((low + high) / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class TailEstimate:
    """An unbiased estimate and the standard error that the choice of sampled ids gives it, ``[T]`` each."""

    value: np.ndarray
    standard_error: np.ndarray


def tail_estimate(lp_TM: np.ndarray, lq_TM: np.ndarray, tail_mass_T: np.ndarray) -> TailEstimate:
    """``sum over the tail of p ln(p / q)`` from ``M`` ids drawn independently from the teacher's tail.

    Unbiased: ``p_T mean ln(p / q)``. Add ``sum p ln(p / q)`` over the ids outside the tail for the whole KL. Where the
    teacher has no tail, both are 0; where a drawn id's q is not known, both are NaN. The error needs two ids or more.
    """
    m = lp_TM.shape[1]
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = lp_TM - lq_TM
        value = tail_mass_T * ratio.mean(-1) if m else np.full(len(tail_mass_T), np.nan)
        error = tail_mass_T * ratio.std(-1, ddof=1) / np.sqrt(m) if m > 1 else np.full(len(tail_mass_T), np.nan)
    empty = tail_mass_T == 0
    return TailEstimate(value=np.where(empty, 0.0, value), standard_error=np.where(empty, 0.0, error))


def known_sum(lp_TK: np.ndarray, lq_TK: np.ndarray) -> np.ndarray:
    """``sum p ln(p / q)`` over the ids known on both sides; the exact part of an estimate, no bound of its own."""
    known = ~np.isnan(lp_TK) & ~np.isnan(lq_TK) & (lp_TK > -np.inf)
    with np.errstate(invalid="ignore"):
        return np.where(known, np.exp(lp_TK) * (lp_TK - lq_TK), 0.0).sum(-1)


def upper_bound_of_range(lower_T: np.ndarray, tail_mass_T: np.ndarray, log_range: float) -> np.ndarray:
    """At most this much, *if* ``ln(p / q)`` varies by at most ``log_range`` over the tail (Hoeffding's lemma)."""
    return lower_T + tail_mass_T * log_range**2 / 8


def shortfall(lp_TK: np.ndarray, lq_TK: np.ndarray, tail_mass_T: np.ndarray) -> np.ndarray:
    """A guess, no bound: what the tail would add if ``ln(q / p)`` varied there as it does on the known ids.

    ``p_T Var(ln q/p) / 2``, the variance under the teacher's known probabilities.
    """
    known = np.isfinite(lp_TK) & np.isfinite(lq_TK)
    p = np.where(known, np.exp(lp_TK), 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        weight = p / p.sum(-1, keepdims=True)
        d = np.where(known, lq_TK - lp_TK, 0.0)
        middle = (weight * d).sum(-1, keepdims=True)
        return tail_mass_T * (weight * (d - middle) ** 2).sum(-1) / 2


def renormalised(lp_TK: np.ndarray, lq_TK: np.ndarray) -> np.ndarray:
    """KL after both sides' known probabilities are scaled to add up to 1. **Not a bound**: it may lie on either side.

    For comparison with numbers that others published this way, and for nothing else.
    """
    known = ~np.isnan(lp_TK) & ~np.isnan(lq_TK)
    lp, lq = np.where(known, lp_TK, -np.inf), np.where(known, lq_TK, -np.inf)
    with np.errstate(invalid="ignore", divide="ignore"):
        lp, lq = (side - np.log(np.exp(side).sum(-1, keepdims=True)) for side in (lp, lq))
        return np.where(known.any(-1), np.where(known, _cell(lp, lq), 0.0).sum(-1), np.nan)
