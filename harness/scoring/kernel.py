"""The two inner loops of a score: sums over a block of the vocabulary for one position of both sides, in fp32 lanes.

With a shift ``st`` near the teacher's maximum, ``c0`` near the mean of ``c - t`` under the teacher, ``sc = st + c0``,
``p = exp(t - st)``, ``q = exp(c - sc)`` and ``d = (c - t) - c0`` (so ``q = p e^d``), let
``phi(d) = e^d - 1 - d >= 0``. A block adds to

    S = sum p   Q = sum q   M = sum p d   N = sum q d   A = sum p phi(d)   B = sum q phi(-d)
    E = sum p (t - st)      F = sum q (c - sc)

and with ``x = (A + M) / S``:  KL(teacher||candidate) = A / S - (x - log1p x),  exactly, for any shifts. No term of A
or B is negative and x is small, so a KL of 1e-9 keeps six digits where the difference of two log-probabilities keeps
none. Where c0 is not small the subtraction ``c - t`` is compensated, so a common offset costs no digits either.

Sixteen lanes at a time are written as arithmetic and compiled by numba through LLVM's vector types: one register of
AVX-512, two of AVX2. numba's own loop vectoriser needs `fastmath` to sum in lanes, and `fastmath` may reorder the very
subtractions that keep a tiny divergence exact. Writing the vectors out leaves every rounding where the formula puts
it, on every processor: the digits do not depend on the width of its registers.

Entries come from memory as fast as they are summed only where they are asked for ahead: two sides are two streams,
and what the processor fetches by itself comes late (0.4 G entries/s instead of 1.7 G on a server with AVX-512, the
sides' rows beginning at cache lines).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
F32, F64, I32, I64 = ir.FloatType(), ir.DoubleType(), ir.IntType(32), ir.IntType(64)
FLOATS, DOUBLES, INTS = (ir.VectorType(kind, LANES) for kind in (F32, F64, I32))
#: Entries summed in fp32 before a float64 sum takes over: 32 additions in each lane.
RUN = 512
UNROLL = 1
#: Entries between what is summed and what is asked of memory: 2 KB.
AHEAD = 512
#: Block lengths handed to the kernels are multiples of it.
STRIDE = LANES * UNROLL
#: Order of the results of `pair_sums`.
MAX_T, MAX_C, MAX_U, S, Q, M, N, A, B, E, F = range(11)
RESULTS = 11
#: phi(d) / d**2 = EVEN(d**2) + d ODD(d**2) for |d| < 1, highest power first: minimax relative errors 5e-9 and 1e-9.
EVEN = (2.5333924623525635e-05, 0.0013885812911644084, 0.04166671693482817, 0.5)
ODD = (2.8061414124279793e-06, 0.00019838122708726574, 0.008333339598402507, 0.166666666472699)

LOG2E = 1.4426950408889634
#: 2**r on [-0.5, 0.5], highest power first: minimax relative error 9.1e-8 with the constant term held at 1.
EXP2 = (0.0013264727123642496, 0.009671512644828833, 0.05550733743497133, 0.24022242085262224, 0.6931469775989927, 1.0)
#: Adding it to a float of magnitude below 2**22 leaves the nearest integer in the low bits.
ROUNDER = 12582912.0
#: exp below this is 0: 2**n must stay a normal number.
LEAST = -87.0


def float32(x: float) -> float:
    """``x`` rounded to fp32."""
    return float(struct.unpack("f", struct.pack("f", x))[0])


class Vec:
    """A vector of fp32 lanes; operators emit one instruction each, in the order written."""

    def __init__(self, builder: ir.IRBuilder, value: ir.Value) -> None:
        self.builder, self.value = builder, value

    def _of(self, other: Vec | float) -> ir.Value:
        kind = self.value.type
        return other.value if isinstance(other, Vec) else ir.Constant(kind, [float32(other)] * kind.count)

    def __add__(self, other: Vec | float) -> Vec:
        return Vec(self.builder, self.builder.fadd(self.value, self._of(other)))

    def __sub__(self, other: Vec | float) -> Vec:
        return Vec(self.builder, self.builder.fsub(self.value, self._of(other)))

    def __mul__(self, other: Vec | float) -> Vec:
        return Vec(self.builder, self.builder.fmul(self.value, self._of(other)))

    def __neg__(self) -> Vec:
        return Vec(self.builder, self.builder.fneg(self.value))

    def fma(self, factor: Vec | float, addend: Vec | float) -> Vec:
        """``self * factor + addend`` with one rounding."""
        function = _intrinsic(self.builder, "llvm.fma", self.value.type, 3)
        return Vec(self.builder, self.builder.call(function, [self.value, self._of(factor), self._of(addend)]))

    def abs(self) -> Vec:
        return Vec(
            self.builder, self.builder.call(_intrinsic(self.builder, "llvm.fabs", self.value.type, 1), [self.value])
        )

    def larger(self, held: Vec) -> Vec:
        """The larger of both; a NaN in ``self`` leaves ``held``."""
        return self.where(self.builder.fcmp_ordered(">", self.value, held.value), held)

    def below(self, bound: float) -> ir.Value:
        return self.builder.fcmp_ordered("<", self.value, self._of(bound))

    def where(self, mask: ir.Value, other: Vec | float) -> Vec:
        return Vec(self.builder, self.builder.select(mask, self.value, self._of(other)))


#: What a loop adds at one index: ``step(index, held) -> held``.
Step = Callable[[ir.Value, list[Vec]], list[Vec]]


def _intrinsic(builder: ir.IRBuilder, name: str, vector: ir.VectorType, arguments: int) -> ir.Function:
    kind = ir.FunctionType(vector, [vector] * arguments)
    return cgutils.get_or_insert_function(builder.module, kind, f"{name}.v{vector.count}f32")


def constant(builder: ir.IRBuilder, x: float) -> Vec:
    return Vec(builder, ir.Constant(FLOATS, [float32(x)] * LANES))


def splat(builder: ir.IRBuilder, scalar: ir.Value, vector: ir.VectorType = FLOATS) -> Vec:
    """One fp32 scalar in every lane."""
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, scalar, I32(0))
    return Vec(builder, builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(I32, vector.count), None)))


def load(builder: ir.IRBuilder, data: ir.Value, index: ir.Value, vector: ir.VectorType = FLOATS) -> Vec:
    """The lanes at ``data[index]`` and after it."""
    place = builder.bitcast(builder.gep(data, [index]), vector.as_pointer())
    return Vec(builder, builder.load(place, align=4))


def prefetch(builder: ir.IRBuilder, place: ir.Value, write: bool = False) -> None:
    """Ask for the cache line of an address, which may lie past the end of an array."""
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    builder.call(function, [builder.bitcast(place, byte), I32(int(write)), I32(3), I32(1)])


def load_both(builder: ir.IRBuilder, sides: tuple[ir.Value, ir.Value], index: ir.Value) -> tuple[Vec, Vec]:
    """The lanes of both sides at ``index``, and a word to memory about those that come next."""
    further = builder.add(index, I64(AHEAD))
    for data in sides:
        prefetch(builder, builder.gep(data, [further]))
    return load(builder, sides[0], index), load(builder, sides[1], index)


def exp(a: Vec) -> Vec:
    """e**a for a <= 0; 0 below -87, for -inf and for NaN; exp(0) is exactly 1.

    The relative error is below 1.6e-7, and 1.4e-8 |a| for log2(e) being rounded: the same slight change of temperature
    for whatever is compared.
    """
    builder = a.builder
    rounded = a.fma(LOG2E, ROUNDER)
    whole = rounded - ROUNDER
    rest = a.fma(LOG2E, -whole)
    y = constant(builder, EXP2[0])
    for coefficient in EXP2[1:]:
        y = y.fma(rest, coefficient)
    exponent = builder.shl(builder.bitcast(rounded.value, INTS), ir.Constant(INTS, [23] * LANES))
    scaled = builder.bitcast(builder.add(builder.bitcast(y.value, INTS), exponent), FLOATS)
    return Vec(builder, scaled).where(builder.fcmp_ordered(">=", a.value, a._of(LEAST)), 0.0)


def accumulate(
    builder: ir.IRBuilder, count: ir.Value, maxima: int, sums: int, step: Step, out: ir.Value, unroll: int
) -> None:
    """``out[:maxima + sums]`` (float64) = maxima and sums of what ``step(index, held)`` adds at index 0, ``LANES``, ...

    ``count`` is a positive multiple of ``LANES * unroll``. Lanes are summed in fp32 over ``RUN`` entries only, then in
    float64: equal entries would otherwise all be rounded to the same side.
    """
    before = builder.block
    outer, inner, after, done = (builder.append_basic_block(name) for name in ("run", "lanes", "flush", "sums"))
    builder.branch(outer)

    builder.position_at_end(outer)
    start = builder.phi(I64)
    held_max = [builder.phi(FLOATS) for _ in range(maxima)]
    held_sum = [builder.phi(DOUBLES) for _ in range(sums)]
    limit = builder.add(start, I64(RUN))
    limit = builder.select(builder.icmp_signed("<", limit, count), limit, count)
    builder.branch(inner)

    builder.position_at_end(inner)
    index = builder.phi(I64)
    held = [builder.phi(FLOATS) for _ in range(maxima + sums)]
    values, place = [Vec(builder, phi) for phi in held], index
    for _ in range(unroll):
        values = step(place, values)
        place = builder.add(place, I64(LANES))
    index.add_incoming(start, outer)
    index.add_incoming(place, inner)
    for phi, first, last in zip(held, [*held_max, *[ir.Constant(FLOATS, [0.0] * LANES)] * sums], values, strict=True):
        phi.add_incoming(first, outer)
        phi.add_incoming(last.value, inner)
    builder.cbranch(builder.icmp_signed("<", place, limit), inner, after)

    builder.position_at_end(after)
    totals = [
        builder.fadd(total, builder.fpext(value.value, DOUBLES))
        for total, value in zip(held_sum, values[maxima:], strict=True)
    ]
    start.add_incoming(I64(0), before)
    start.add_incoming(limit, after)
    for phi, value in zip(held_max, values[:maxima], strict=True):
        phi.add_incoming(ir.Constant(FLOATS, [float("-inf")] * LANES), before)
        phi.add_incoming(value.value, after)
    for phi, total in zip(held_sum, totals, strict=True):
        phi.add_incoming(ir.Constant(DOUBLES, [0.0] * LANES), before)
        phi.add_incoming(total, after)
    builder.cbranch(builder.icmp_signed("<", limit, count), outer, done)

    builder.position_at_end(done)
    tops = [builder.fpext(value.value, DOUBLES) for value in values[:maxima]]
    for slot, lanes in enumerate([*tops, *totals]):
        builder.store(_reduce(builder, lanes, largest=slot < maxima), builder.gep(out, [I64(slot)]))


def _reduce(builder: ir.IRBuilder, lanes: ir.Value, largest: bool) -> ir.Value:
    """The largest or the sum of float64 lanes, in lane order."""
    result = builder.extract_element(lanes, I32(0))
    for k in range(1, LANES):
        lane = builder.extract_element(lanes, I32(k))
        if largest:
            result = builder.select(builder.fcmp_ordered(">", lane, result), lane, result)
        else:
            result = builder.fadd(result, lane)
    return result


# ---- sums over a block -----------------------------------------------------------------------------------------------


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
    p = exp(at)
    pd = p * d
    forward = (p * u) * d.fma(odd, even)
    q = (p + pd) + forward if calm else exp(ac)
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
            shifts = tuple(splat(builder, builder.extract_value(args[3], k)) for k in range(4))

            def step(place: ir.Value, held: list[Vec]) -> list[Vec]:
                t, c = load_both(builder, (t_data, c_data), place)
                return _pair_step(t, c, shifts, held, far, calm)

            accumulate(builder, args[2], 3, 8, step, out_data, UNROLL)
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
        st, sc, ratio = (splat(builder, builder.extract_value(args[3], k)) for k in range(3))

        def step(place: ir.Value, held: list[Vec]) -> list[Vec]:
            t, c = load_both(builder, (t_data, c_data), place)
            p, q = exp(t - st), exp(c - sc)
            # The product is rounded before the subtraction: with ratio 1 and equal sides the gap is exactly 0.
            return [held[0] + (p - q * ratio).abs()]

        accumulate(builder, args[2], 0, 1, step, out_data, UNROLL)
        return context.get_dummy_value()

    return signature, codegen
