"""The state's update by a chunk of the vocabulary, in torch operations, for all positions at once.

The same algebra as the CPU's `rows` and the GPU's `triton_rows`, written plainly: it is what a GPU without Triton
runs, and what both are tested against where there is no GPU. Every entry is handled in place, special or not.
"""

from __future__ import annotations

import torch

from harness.scoring import kernel
from harness.scoring import state as slot


def difference(t: torch.Tensor, c: torch.Tensor, c0: torch.Tensor) -> torch.Tensor:
    """``(c - t) - c0`` in fp32, the rounding of ``c - t`` put back; ``c0`` float64 ``[n, 1]``."""
    high = c0.float()
    s = c - t
    v = s - c
    error = (c - (s - v)) - (t + v)
    return (s - high) + (error - (c0 - high.double()).float())


def phi_over_square(d: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """``(e^d - 1 - d) / d^2`` for |d| < 1."""
    return _polynomial(u, kernel.EVEN) + d * _polynomial(u, kernel.ODD)


def _polynomial(u: torch.Tensor, coefficients: tuple[float, ...]) -> torch.Tensor:
    y = torch.full_like(u, coefficients[0])
    for coefficient in coefficients[1:]:
        y = y * u + coefficient
    return y


def _total(values: torch.Tensor) -> torch.Tensor:
    return values.sum(-1, dtype=torch.float64)


def update(state_NS: torch.Tensor, t: torch.Tensor, c: torch.Tensor, first: int) -> None:
    """Add columns ``first ...`` (fp32 ``[n, w]`` of both sides) to the states, float64 ``[n, SLOTS]``, in place."""
    good_t, good_c = t < torch.inf, c < torch.inf
    gone_t, gone_c = t == -torch.inf, c == -torch.inf
    pair = good_t & good_c & ~gone_t & ~gone_c
    top_t = torch.maximum(state_NS[:, slot.TOP_T], t.masked_fill(~good_t, -torch.inf).amax(-1).double())
    top_c = torch.maximum(state_NS[:, slot.TOP_C], c.masked_fill(~good_c, -torch.inf).amax(-1).double())
    _raise(state_NS, t, c, pair, top_t, top_c)

    st = _shift(state_NS[:, slot.TOP_T])[:, None]
    c0 = state_NS[:, slot.C0][:, None]
    at, ac = t - st.float(), c - (st + c0).float()
    p = torch.where(good_t, torch.exp(at), 0.0)
    q = torch.where(good_c, torch.exp(ac), 0.0)
    d = torch.where(pair, difference(t, c, c0), 0.0)
    u = d * d
    small, gap = u < 1.0, q - p
    forward = torch.where(small, p * u * phi_over_square(d, u), gap - p * d)
    backward = torch.where(small, q * u * phi_over_square(-d, u), q * d - gap)
    only_c, only_t = gone_t & good_c & ~gone_c, gone_c & good_t & ~gone_t
    state_NS[:, slot.SUM_S] += _total(p)
    state_NS[:, slot.SUM_Q] += _total(q)
    state_NS[:, slot.SUM_M] += _total(p * d - torch.where(only_t, p, 0.0))
    state_NS[:, slot.SUM_N] += _total(q * d)
    state_NS[:, slot.SUM_A] += _total(torch.where(pair, forward, torch.where(only_c, q, 0.0)))
    state_NS[:, slot.SUM_B] += _total(torch.where(pair, backward, torch.where(only_t, p, 0.0)))
    state_NS[:, slot.SUM_E] += _total(torch.where(p > 0, p * at, 0.0))
    state_NS[:, slot.SUM_F] += _total(torch.where(q > 0, q * ac, 0.0))
    state_NS[:, slot.BAD_T] += (~good_t).sum(-1)
    state_NS[:, slot.BAD_C] += (~good_c).sum(-1)
    for lost, side, only in ((slot.LOST_T, t, only_t), (slot.LOST_C, c, only_c)):
        largest = side.masked_fill(~only, -torch.inf).amax(-1).double()
        state_NS[:, lost] = torch.maximum(state_NS[:, lost], largest)
    _note_tops(state_NS, t, c, first)


def _shift(top: torch.Tensor) -> torch.Tensor:
    return torch.where(top > -torch.inf, top, 0.0)


def _raise(
    state_NS: torch.Tensor,
    t: torch.Tensor,
    c: torch.Tensor,
    pair: torch.Tensor,
    top_t: torch.Tensor,
    top_c: torch.Tensor,
) -> None:
    """Move the states whose maxima rise to shifts that suit what the chunk brings."""
    st, old = _shift(top_t), _shift(state_NS[:, slot.TOP_T])
    p = torch.where(pair, torch.exp(t - st[:, None].float()), 0.0)
    mass, moment = _total(p), _total(torch.where(pair, p * (c - t), 0.0))
    kept = torch.where(state_NS[:, slot.SUM_S] > 0, torch.exp(old - st), 0.0)
    mass = mass + kept * state_NS[:, slot.SUM_S]
    moment = moment + kept * (state_NS[:, slot.SUM_M] + state_NS[:, slot.C0] * state_NS[:, slot.SUM_S])
    middle = _shift(top_c) - st
    mean = moment / mass
    mean = torch.where(torch.isfinite(mean), mean, middle)
    mean = torch.minimum(torch.maximum(mean, middle - slot.REACH), middle + slot.REACH)
    c0 = (st + mean).float().double() - st
    raised = (top_t > state_NS[:, slot.TOP_T]) | (top_c > state_NS[:, slot.TOP_C])
    c0 = torch.where(raised, c0, state_NS[:, slot.C0])
    _move(state_NS, top_t, top_c, c0, raised)


def _move(
    state_NS: torch.Tensor, top_t: torch.Tensor, top_c: torch.Tensor, c0: torch.Tensor, raised: torch.Tensor
) -> None:
    """`state.move` for all positions."""
    s, q, m, n, a, b, e, f = (state_NS[:, slot.SUM_S + k].clone() for k in range(8))
    rise_t = _shift(top_t) - _shift(state_NS[:, slot.TOP_T])
    rise_c = rise_t + (c0 - state_NS[:, slot.C0])
    rise_t, rise_c = torch.where(s == 0, rise_c, rise_t), torch.where(q == 0, rise_t, rise_c)
    nothing = (s == 0) & (q == 0)
    rise_t, rise_c = rise_t.masked_fill(nothing, 0.0), rise_c.masked_fill(nothing, 0.0)
    fp, fq, dl = torch.exp(-rise_t), torch.exp(-rise_c), rise_c - rise_t
    near, down, up = dl.abs() < 1.0, torch.expm1(-dl), torch.expm1(dl)
    s2, q2, m2, n2 = fp * s, fq * q, fp * (m - dl * s), fq * (n - dl * q)
    a2 = torch.where(near, fp * ((1.0 + down) * a + (down + dl) * s + down * m), q2 - s2 - m2)
    b2 = torch.where(near, fq * ((1.0 + up) * b + (up - dl) * q - up * n), s2 - q2 + n2)
    moved = (s2, q2, m2, n2, a2, b2, fp * (e - rise_t * s), fq * (f - rise_c * q))
    for k, value in enumerate(moved):
        state_NS[:, slot.SUM_S + k] = torch.where(raised, value, state_NS[:, slot.SUM_S + k])
    for top, at, ties, new in (
        (slot.TOP_T, slot.ID_T, slot.TIES_T, top_t),
        (slot.TOP_C, slot.ID_C, slot.TIES_C, top_c),
    ):
        higher = new > state_NS[:, top]
        state_NS[:, at] = state_NS[:, at].masked_fill(higher, -1.0)
        state_NS[:, ties] = state_NS[:, ties].masked_fill(higher, 0.0)
        state_NS[:, top] = new
    state_NS[:, slot.C0] = c0
    state_NS[:, slot.JOINT] = state_NS[:, slot.JOINT].masked_fill(raised, 0.0)


def _note_tops(state_NS: torch.Tensor, t: torch.Tensor, c: torch.Tensor, first: int) -> None:
    at_top = [side == state_NS[:, top, None].float() for side, top in ((t, slot.TOP_T), (c, slot.TOP_C))]
    for reached, at, ties in zip(at_top, (slot.ID_T, slot.ID_C), (slot.TIES_T, slot.TIES_C), strict=True):
        state_NS[:, ties] += reached.sum(-1)
        found = reached.any(-1) & (state_NS[:, at] < 0)
        lowest = first + reached.to(torch.int8).argmax(-1).double()
        state_NS[:, at] = torch.where(found, lowest, state_NS[:, at])
    joint = (at_top[0] & at_top[1]).any(-1)
    state_NS[:, slot.JOINT] = torch.maximum(state_NS[:, slot.JOINT], joint.double())


def second(
    state_NS: torch.Tensor, t: torch.Tensor, c: torch.Tensor, own: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A chunk's share of ``sum |p - q| S`` and of the candidate logits above ``own`` (fp32 ``[n]``)."""
    st = _shift(state_NS[:, slot.TOP_T])[:, None]
    sc = st + state_NS[:, slot.C0, None]
    ratio = (state_NS[:, slot.SUM_S] / state_NS[:, slot.SUM_Q])[:, None]
    gap = (torch.exp(t - st.float()) - torch.exp(c - sc.float()) * ratio.float()).abs()
    return _total(gap), (c > own[:, None]).sum(-1)
