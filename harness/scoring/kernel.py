"""The two inner loops: sums over a block of the vocabulary, in fp32 lanes, for one position of both sides.

With shifts ``st, sc`` near the rows' maxima, ``c0 = sc - st``, ``p = exp(t - st)``, ``q = exp(c - sc)`` and
``d = (c - t) - c0`` (so ``q = p e^d``), let ``phi(d) = e^d - 1 - d >= 0``. A block adds to

    S = sum p   Q = sum q   M = sum p d   A = sum p phi(d)   B = sum q phi(-d)   E = sum p (t - st)   F = sum q (c - sc)

and with ``x = (A + M) / S``:  KL(teacher||candidate) = A / S - (x - log1p x),  exactly, for any shifts. No term of A
or B is negative and x is of the order of sqrt(KL), so a KL of 1e-9 keeps six digits where the difference of two
log-probabilities keeps none. The subtraction ``c - t`` is compensated, so a large common offset costs nothing.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from harness.scoring import simd
from harness.scoring.simd import I64, Vec

UNROLL = 2
#: Block lengths handed to the kernels are multiples of it.
STRIDE = simd.LANES * UNROLL
#: Order of the results of `pair_sums`.
MAX_T, MAX_C, S, Q, M, A, B, E, F = range(9)
#: phi(d) / d**2 = EVEN(d**2) + d ODD(d**2) for |d| < 0.5, highest power first: minimax relative errors 3e-8 and 8e-9.
EVEN = (0.001397535939339583, 0.04166599877498356, 0.5)
ODD = (0.0001994478598858335, 0.00833323635448782, 0.16666666800994479)


def _difference(t: Vec, c: Vec, c0: Vec, c0_low: Vec) -> Vec:
    """``(c - t) - (c0 + c0_low)`` with the rounding error of ``c - t`` put back (Knuth's two-difference)."""
    s = c - t
    v = s - c
    error = (c - (s - v)) - (t + v)
    return (s - c0) + (error - c0_low)


def _polynomial(u: Vec, coefficients: tuple[float, ...]) -> Vec:
    y = u.fma(coefficients[0], coefficients[1])
    for coefficient in coefficients[2:]:
        y = y.fma(u, coefficient)
    return y


def _pair_step(t: Vec, c: Vec, shifts: tuple[Vec, ...], held: list[Vec]) -> list[Vec]:
    st, sc, c0, c0_low = shifts
    at, ac = t - st, c - sc
    p, q = simd.exp(at), simd.exp(ac)
    d = _difference(t, c, c0, c0_low)
    u = d * d
    even, odd = _polynomial(u, EVEN), _polynomial(u, ODD)
    pd, gap, small = p * d, q - p, u.below(0.25)
    forward = ((p * u) * d.fma(odd, even)).where(small, gap - pd)
    backward = ((q * u) * (-d).fma(odd, even)).where(small, q.fma(d, -gap))
    return [
        t.larger(held[MAX_T]),
        c.larger(held[MAX_C]),
        held[S] + p,
        held[Q] + q,
        held[M] + pd,
        held[A] + forward,
        held[B] + backward,
        p.fma(at, held[E]),
        q.fma(ac, held[F]),
    ]


def _store(builder: ir.IRBuilder, out: ir.Value, slot: int, total: Vec, largest: bool) -> None:
    lanes = total.lanes()
    result = lanes[0]
    for lane in lanes[1:]:
        if largest:
            result = builder.select(builder.fcmp_ordered(">", lane, result), lane, result)
        else:
            result = builder.fadd(result, lane)
    builder.store(result, builder.gep(out, [I64(slot)]))


@intrinsic
def pair_sums(typingctx, t, c, count, st, sc, c0, c0_low, out):  # type: ignore[no-untyped-def]
    """``out[:9]`` (float64) = the block's maxima and sums over ``t[:count]`` and ``c[:count]`` (fp32, contiguous).

    ``count`` is a positive multiple of ``STRIDE``. An entry of NaN or infinity leaves a non-finite M.
    """
    f4 = types.float32
    signature = types.void(t, c, types.intp, f4, f4, f4, f4, out)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        data = [context.make_array(sig.args[k])(context, builder, args[k]).data for k in (0, 1, 7)]
        shifts = tuple(simd.splat(builder, value) for value in args[3:7])
        zero, lowest = simd.constant(builder, 0.0), simd.constant(builder, float("-inf"))

        def step(place: ir.Value, held: list[Vec]) -> list[Vec]:
            return _pair_step(simd.load(builder, data[0], place), simd.load(builder, data[1], place), shifts, held)

        totals = simd.loop(builder, args[2], [lowest, lowest] + [zero] * 7, step, UNROLL)
        for slot, total in enumerate(totals):
            _store(builder, data[2], slot, total, largest=slot in (MAX_T, MAX_C))
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def gap_sum(typingctx, t, c, count, st, sc, ratio):  # type: ignore[no-untyped-def]
    """``sum |exp(t - st) - ratio exp(c - sc)|`` as float64 over ``t[:count]``, ``c[:count]``; -inf is a zero."""
    f4 = types.float32
    signature = types.float64(t, c, types.intp, f4, f4, f4)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        t_data, c_data = (context.make_array(sig.args[k])(context, builder, args[k]).data for k in (0, 1))
        st, sc, ratio = (simd.splat(builder, value) for value in args[3:6])

        def step(place: ir.Value, held: list[Vec]) -> list[Vec]:
            p = simd.exp(simd.load(builder, t_data, place) - st)
            q = simd.exp(simd.load(builder, c_data, place) - sc)
            # The product is rounded before the subtraction: with ratio 1 and equal sides the gap is exactly 0.
            return [held[0] + (p - q * ratio).abs()]

        (total,) = simd.loop(builder, args[2], [simd.constant(builder, 0.0)], step, UNROLL)
        lanes = total.lanes()
        result = lanes[0]
        for lane in lanes[1:]:
            result = builder.fadd(result, lane)
        return result

    return signature, codegen
