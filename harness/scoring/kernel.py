"""The two inner loops: sums over a block of the vocabulary, in fp32 lanes, for one position of both sides.

With a shift ``st`` near the teacher's maximum, ``c0`` near the mean of ``c - t`` under the teacher, ``sc = st + c0``,
``p = exp(t - st)``, ``q = exp(c - sc)`` and ``d = (c - t) - c0`` (so ``q = p e^d``), let ``phi(d) = e^d - 1 - d >= 0``.
A block adds to

    S = sum p   Q = sum q   M = sum p d   N = sum q d   A = sum p phi(d)   B = sum q phi(-d)
    E = sum p (t - st)      F = sum q (c - sc)

and with ``x = (A + M) / S``:  KL(teacher||candidate) = A / S - (x - log1p x),  exactly, for any shifts. No term of A
or B is negative and x is small, so a KL of 1e-9 keeps six digits where the difference of two log-probabilities keeps
none. Where c0 is not small the subtraction ``c - t`` is compensated, so a common offset costs no digits either.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from harness.scoring import simd
from harness.scoring.simd import Vec

UNROLL = 2
#: Block lengths handed to the kernels are multiples of it.
STRIDE = simd.LANES * UNROLL
#: Order of the results of `pair_sums`.
MAX_T, MAX_C, MAX_U, S, Q, M, N, A, B, E, F = range(11)
RESULTS = 11
#: phi(d) / d**2 = EVEN(d**2) + d ODD(d**2) for |d| < 1, highest power first: minimax relative errors 5e-9 and 1e-9.
EVEN = (2.5333924623525635e-05, 0.0013885812911644084, 0.04166671693482817, 0.5)
ODD = (2.8061414124279793e-06, 0.00019838122708726574, 0.008333339598402507, 0.166666666472699)


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


def _pair_step(t: Vec, c: Vec, shifts: tuple[Vec, ...], held: list[Vec], far: bool, calm: bool) -> list[Vec]:
    st, sc, c0, c0_low = shifts
    at, ac = t - st, c - sc
    d = _difference(t, c, c0, c0_low) if far else (c - t) - c0
    u = d * d
    even, odd = _polynomial(u, EVEN), _polynomial(u, ODD)
    p = simd.exp(at)
    pd = p * d
    forward = (p * u) * d.fma(odd, even)
    q = (p + pd) + forward if calm else simd.exp(ac)
    qd = q * d
    backward = (q * u) * (-d).fma(odd, even)
    if not calm:
        small, gap = u.below(1.0), q - p
        forward, backward = forward.where(small, gap - pd), backward.where(small, qd - gap)
    return [
        t.larger(held[MAX_T]),
        c.larger(held[MAX_C]),
        u.larger(held[MAX_U]),
        held[S] + p,
        held[Q] + q,
        held[M] + pd,
        held[N] + qd,
        held[A] + forward,
        held[B] + backward,
        p.fma(at, held[E]),
        q.fma(ac, held[F]),
    ]


def _data(context: Any, builder: ir.IRBuilder, kind: Any, array: ir.Value) -> ir.Value:
    return context.make_array(kind)(context, builder, array).data


def _pair_sums(far: bool, calm: bool) -> Any:
    def pair_sums(typingctx, t, c, count, shifts, out):  # type: ignore[no-untyped-def]
        signature = types.void(t, c, types.intp, types.Tuple([types.float32] * 4), out)

        def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
            t_data, c_data, out_data = (_data(context, builder, sig.args[k], args[k]) for k in (0, 1, 4))
            shifts = tuple(simd.splat(builder, builder.extract_value(args[3], k)) for k in range(4))

            def step(place: ir.Value, held: list[Vec]) -> list[Vec]:
                t, c = simd.load(builder, t_data, place), simd.load(builder, c_data, place)
                return _pair_step(t, c, shifts, held, far, calm)

            simd.accumulate(builder, args[2], 3, 8, step, out_data, UNROLL)
            return context.get_dummy_value()

        return signature, codegen

    return intrinsic(pair_sums)


#: ``out[:RESULTS]`` (float64) = the block's maxima (of t, c and d**2) and sums over ``t[:count]`` and ``c[:count]``
#: (fp32, contiguous). ``shifts``: fp32 ``(st, sc, c0, c0_low)``, c0 in two parts. ``count`` is a positive multiple of
#: ``STRIDE``. An entry of NaN or infinity leaves a non-finite M. The near ones are for a c0 of at most ``NEAR``, the
#: far ones for any. The calm ones take q from ``p e^d``, which saves an exp and is right where all ``|d| < 1``.
near_sums, near_calm_sums = _pair_sums(far=False, calm=False), _pair_sums(far=False, calm=True)
far_sums, far_calm_sums = _pair_sums(far=True, calm=False), _pair_sums(far=True, calm=True)
#: From here on the rounding of ``c - t`` is felt in the smallest divergences.
NEAR = 0.25


@intrinsic
def gap_sum(typingctx, t, c, count, shifts, out):  # type: ignore[no-untyped-def]
    """``out[0]`` = ``sum |exp(t - st) - ratio exp(c - sc)|`` over ``t[:count]``, ``c[:count]``; -inf is a zero.

    ``shifts``: fp32 ``(st, sc, ratio)``.
    """
    signature = types.void(t, c, types.intp, types.Tuple([types.float32] * 3), out)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        t_data, c_data, out_data = (_data(context, builder, sig.args[k], args[k]) for k in (0, 1, 4))
        st, sc, ratio = (simd.splat(builder, builder.extract_value(args[3], k)) for k in range(3))

        def step(place: ir.Value, held: list[Vec]) -> list[Vec]:
            p = simd.exp(simd.load(builder, t_data, place) - st)
            q = simd.exp(simd.load(builder, c_data, place) - sc)
            # The product is rounded before the subtraction: with ratio 1 and equal sides the gap is exactly 0.
            return [held[0] + (p - q * ratio).abs()]

        simd.accumulate(builder, args[2], 0, 1, step, out_data, UNROLL)
        return context.get_dummy_value()

    return signature, codegen
