"""The row kernels for a GPU: one Triton program a position, walking the whole vocabulary. Imported only with a GPU.

The algebra is that of `harness.scoring.state`: fp32 within a block, the state in float64
registers. fp64 work is a few dozen operations a block, so a slow fp64 unit does not matter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from harness.scoring import state as slot

BLOCK = 2048


@triton.jit
def _exp(a):  # type: ignore[no-untyped-def]
    """e**a, 0 below -87; the reduction keeps the error of the hardware's exp2 from growing with |a|."""
    kept = tl.maximum(a, -88.0)
    whole = tl.floor(kept * 1.4426950408889634 + 0.5)
    rest = (kept - whole * 0.693359375) + whole * 2.1219444e-4
    return tl.where(a >= -87.0, tl.exp(rest) * tl.exp2(whole), 0.0)


@triton.jit
def _phi_over_square(d, u):  # type: ignore[no-untyped-def]
    even = ((2.5333924623525635e-05 * u + 0.0013885812911644084) * u + 0.04166671693482817) * u + 0.5
    odd = ((2.8061414124279793e-06 * u + 0.00019838122708726574) * u + 0.008333339598402507) * u + 0.166666666472699
    return even + d * odd


@triton.jit
def _sum(x):  # type: ignore[no-untyped-def]
    return tl.sum(x, 0).to(tl.float64)


@triton.jit
def _largest(x):  # type: ignore[no-untyped-def]
    return tl.max(x, 0).to(tl.float64)


@triton.jit
def _shift(top):  # type: ignore[no-untyped-def]
    return tl.where(top > -float("inf"), top, 0.0)


@triton.jit
def _centre(t, c, pair, st, old_st, middle, s, m, c0, reach):  # type: ignore[no-untyped-def]
    """The mean of c - t over all that is known and this block, as `state.centre`."""
    weight = tl.where(pair, _exp(t - st.to(tl.float32)), 0.0)
    kept = tl.where(s > 0, tl.exp(old_st - st), 0.0)
    mass = _sum(weight) + kept * s
    moment = _sum(tl.where(pair, weight * (c - t), 0.0)) + kept * (m + c0 * s)
    mean = tl.where(mass > 0, moment / tl.where(mass > 0, mass, 1.0), middle)
    mean = tl.where(tl.abs(mean) < float("inf"), mean, middle)
    mean = tl.minimum(tl.maximum(mean, middle - reach), middle + reach)
    return (st + mean).to(tl.float32).to(tl.float64) - st


@triton.jit
def _move(s, q, m, n, a, b, e, f, rise_t, rise_c):  # type: ignore[no-untyped-def]
    """The sums after the shifts rise, as `state.move`."""
    moved_t = tl.where(s == 0, rise_c, rise_t)
    moved_c = tl.where(q == 0, rise_t, rise_c)
    nothing = (s == 0) & (q == 0)
    moved_t, moved_c = tl.where(nothing, 0.0, moved_t), tl.where(nothing, 0.0, moved_c)
    fp, fq, dl = tl.exp(-moved_t), tl.exp(-moved_c), moved_c - moved_t
    near = tl.abs(dl) < 1.0
    small = tl.where(near, dl, 0.0)
    down, up = tl.exp(-small) - 1.0, tl.exp(small) - 1.0
    near_a = fp * ((1.0 + down) * a + (down + small) * s + down * m)
    near_b = fq * ((1.0 + up) * b + (up - small) * q - up * n)
    s2, q2, m2, n2 = fp * s, fq * q, fp * (m - dl * s), fq * (n - dl * q)
    a2, b2 = tl.where(near, near_a, q2 - s2 - m2), tl.where(near, near_b, s2 - q2 + n2)
    return s2, q2, m2, n2, a2, b2, fp * (e - moved_t * s), fq * (f - moved_c * q)


@triton.jit
def _block_sums(t, c, good_t, good_c, st, c0):  # type: ignore[no-untyped-def]
    """S, Q, M, N, A, B, E, F of a block, whatever it holds."""
    gone_t, gone_c = t == -float("inf"), c == -float("inf")
    pair = good_t & good_c & (gone_t == 0) & (gone_c == 0)
    only_c, only_t = gone_t & good_c & (gone_c == 0), gone_c & good_t & (gone_t == 0)
    high = c0.to(tl.float32)
    at, ac = t - st.to(tl.float32), c - (st + c0).to(tl.float32)
    p, q = tl.where(good_t, _exp(at), 0.0), tl.where(good_c, _exp(ac), 0.0)
    difference = c - t
    back = difference - c
    error = (c - (difference - back)) - (t + back)
    d = tl.where(pair, (difference - high) + (error - (c0 - high.to(tl.float64)).to(tl.float32)), 0.0)
    u, gap = d * d, q - p
    forward = tl.where(u < 1.0, p * u * _phi_over_square(d, u), gap - p * d)
    backward = tl.where(u < 1.0, q * u * _phi_over_square(-d, u), q * d - gap)
    m = _sum(p * d - tl.where(only_t, p, 0.0))
    a = _sum(tl.where(pair, forward, tl.where(only_c, q, 0.0)))
    b = _sum(tl.where(pair, backward, tl.where(only_t, p, 0.0)))
    e, f = _sum(tl.where(p > 0, p * at, 0.0)), _sum(tl.where(q > 0, q * ac, 0.0))
    lost_t = _largest(tl.where(only_t, t, -float("inf")))
    lost_c = _largest(tl.where(only_c, c, -float("inf")))
    return _sum(p), _sum(q), m, _sum(q * d), a, b, e, f, lost_t, lost_c


@triton.jit
def _first_id(reached, columns, held):  # type: ignore[no-untyped-def]
    """The lowest id that reaches the top, unless one is held."""
    lowest = tl.min(tl.where(reached, columns, 2147483647), 0)
    return tl.where((lowest < 2147483647) & (held < 0), lowest.to(tl.float64), held)


@triton.jit
def _save(at, x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10):  # type: ignore[no-untyped-def]
    tl.store(at + 0, x0)
    tl.store(at + 1, x1)
    tl.store(at + 2, x2)
    tl.store(at + 3, x3)
    tl.store(at + 4, x4)
    tl.store(at + 5, x5)
    tl.store(at + 6, x6)
    tl.store(at + 7, x7)
    tl.store(at + 8, x8)
    tl.store(at + 9, x9)
    tl.store(at + 10, x10)


@triton.jit
def score_kernel(  # type: ignore[no-untyped-def]
    t_ptr, c_ptr, t_stride, c_stride, state_ptr, tops_ptr, target_ptr, vocab, blocks, reach,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A fresh state ``[n, SLOTS]`` and the blocks' maxima ``[n, 2, blocks]`` from fp32 logits of both sides."""
    row = tl.program_id(0).to(tl.int64)
    t_ptr += row * t_stride
    c_ptr += row * c_stride
    tops_ptr += row * 2 * blocks
    zero = tl.zeros((), tl.float64)
    top_t, top_c, c0, joint = zero - float("inf"), zero - float("inf"), zero, zero
    s, q, m, n, a, b, e, f = zero, zero, zero, zero, zero, zero, zero, zero
    id_t, id_c, ties_t, ties_c, bad_t, bad_c = zero - 1.0, zero - 1.0, zero, zero, zero, zero
    lost_t, lost_c = zero - float("inf"), zero - float("inf")
    for block in range(blocks):
        columns = block * BLOCK + tl.arange(0, BLOCK)
        inside = columns < vocab
        t = tl.load(t_ptr + columns, mask=inside, other=-float("inf"))
        c = tl.load(c_ptr + columns, mask=inside, other=-float("inf"))
        good_t, good_c = t < float("inf"), c < float("inf")
        block_t = tl.max(tl.where(good_t, t, -float("inf")), 0)
        block_c = tl.max(tl.where(good_c, c, -float("inf")), 0)
        tl.store(tops_ptr + block, block_t)
        tl.store(tops_ptr + blocks + block, block_c)
        new_t, new_c = tl.maximum(top_t, block_t.to(tl.float64)), tl.maximum(top_c, block_c.to(tl.float64))
        if (new_t > top_t) | (new_c > top_c):
            rise_t, middle = _shift(new_t) - _shift(top_t), _shift(new_c) - _shift(new_t)
            finite = good_t & good_c & (t > -float("inf")) & (c > -float("inf"))
            new_c0 = _centre(t, c, finite, _shift(new_t), _shift(top_t), middle, s, m, c0, reach)
            s, q, m, n, a, b, e, f = _move(s, q, m, n, a, b, e, f, rise_t, rise_t + (new_c0 - c0))
            id_t, ties_t = tl.where(new_t > top_t, -1.0, id_t), tl.where(new_t > top_t, 0.0, ties_t)
            id_c, ties_c = tl.where(new_c > top_c, -1.0, id_c), tl.where(new_c > top_c, 0.0, ties_c)
            top_t, top_c, c0, joint = new_t, new_c, new_c0, zero
        ds, dq, dm, dn, da, db, de, df, gone_t, gone_c = _block_sums(t, c, good_t, good_c, _shift(top_t), c0)
        s, q, m, n, a, b, e, f = s + ds, q + dq, m + dm, n + dn, a + da, b + db, e + de, f + df
        lost_t, lost_c = tl.maximum(lost_t, gone_t), tl.maximum(lost_c, gone_c)
        bad_t += _sum(tl.where(good_t, 0, 1))
        bad_c += _sum(tl.where(good_c, 0, 1))
        at_t, at_c = (t == top_t.to(tl.float32)) & inside, (c == top_c.to(tl.float32)) & inside
        id_t, id_c = _first_id(at_t, columns, id_t), _first_id(at_c, columns, id_c)
        ties_t += _sum(tl.where(at_t, 1, 0))
        ties_c += _sum(tl.where(at_c, 1, 0))
        joint = tl.maximum(joint, _sum(tl.where(at_t & at_c, 1, 0)))
    target = tl.load(target_ptr + row)
    own_t, own_c = tl.load(t_ptr + target).to(tl.float64), tl.load(c_ptr + target).to(tl.float64)
    # In the order of the slots of `harness.scoring.state`, which a test compares.
    state_ptr += row * SLOTS
    _save(state_ptr, top_t, top_c, c0, s, q, m, n, a, b, e, f)
    tl.store(state_ptr + 22, zero)
    _save(state_ptr + 11, id_t, id_c, ties_t, ties_c, joint, bad_t, bad_c, lost_t, lost_c, own_t, own_c)


@triton.jit
def second_kernel(  # type: ignore[no-untyped-def]
    t_ptr, c_ptr, t_stride, c_stride, state_ptr, own_ptr, out_ptr, vocab, blocks,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``out[n, 2]``: ``sum |p - ratio q|`` and the number of candidate logits above ``own``."""
    row = tl.program_id(0).to(tl.int64)
    t_ptr += row * t_stride
    c_ptr += row * c_stride
    state_ptr += row * SLOTS
    st, c0 = _shift(tl.load(state_ptr)), tl.load(state_ptr + 2)
    ratio = (tl.load(state_ptr + 3) / tl.load(state_ptr + 4)).to(tl.float32)
    shift_t, shift_c = st.to(tl.float32), (st + c0).to(tl.float32)
    own = tl.load(own_ptr + row)
    gap, above = tl.zeros((), tl.float64), tl.zeros((), tl.float64)
    for block in range(blocks):
        columns = block * BLOCK + tl.arange(0, BLOCK)
        inside = columns < vocab
        t = tl.load(t_ptr + columns, mask=inside, other=-float("inf"))
        c = tl.load(c_ptr + columns, mask=inside, other=-float("inf"))
        gap += _sum(tl.abs(_exp(t - shift_t) - _exp(c - shift_c) * ratio))
        above += _sum(tl.where(c > own, 1, 0))
    tl.store(out_ptr + row * 2, gap)
    tl.store(out_ptr + row * 2 + 1, above)


def first_pass(
    t: torch.Tensor, c: torch.Tensor, targets: torch.Tensor, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """States ``[n, SLOTS]`` and block maxima ``[n, 2, blocks]`` of fp32 logits ``[n, W]`` with contiguous rows."""
    blocks = triton.cdiv(vocab_size, BLOCK)
    state = torch.empty(len(t), slot.SLOTS, dtype=torch.float64, device=t.device)
    tops = torch.empty(len(t), 2, blocks, device=t.device)
    score_kernel[(len(t),)](
        t, c, t.stride(0), c.stride(0), state, tops, targets, vocab_size, blocks, slot.REACH,
        SLOTS=slot.SLOTS, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    return state, tops


def second_pass(
    t: torch.Tensor, c: torch.Tensor, state: torch.Tensor, own: torch.Tensor, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per position ``sum |p - ratio q|`` (to be divided by 2 S) and the candidate logits above ``own``."""
    out = torch.empty(len(t), 2, dtype=torch.float64, device=t.device)
    second_kernel[(len(t),)](
        t, c, t.stride(0), c.stride(0), state, own, out, vocab_size, triton.cdiv(vocab_size, BLOCK),
        SLOTS=slot.SLOTS, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    return out[:, 0], out[:, 1]
