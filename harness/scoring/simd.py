"""Eight fp32 lanes at a time, written as arithmetic and compiled by numba through LLVM's vector types.

numba's own loop vectoriser needs `fastmath` to sum in lanes, and `fastmath` may reorder the very subtractions that
keep a tiny divergence exact. Writing the vectors out leaves every rounding where the formula puts it, on every
processor: the digits do not depend on the width of its registers.
"""

from __future__ import annotations

import struct

from llvmlite import ir
from numba.core import cgutils

LANES = 8
F32, F64, I32, I64 = ir.FloatType(), ir.DoubleType(), ir.IntType(32), ir.IntType(64)
FLOATS, INTS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)

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
        return other.value if isinstance(other, Vec) else ir.Constant(FLOATS, [float32(other)] * LANES)

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
        function = _intrinsic(self.builder, "llvm.fma", 3)
        return Vec(self.builder, self.builder.call(function, [self.value, self._of(factor), self._of(addend)]))

    def abs(self) -> Vec:
        return Vec(self.builder, self.builder.call(_intrinsic(self.builder, "llvm.fabs", 1), [self.value]))

    def larger(self, held: Vec) -> Vec:
        """The larger of both; a NaN in ``self`` leaves ``held``."""
        return self.where(self.builder.fcmp_ordered(">", self.value, held.value), held)

    def below(self, bound: float) -> ir.Value:
        return self.builder.fcmp_ordered("<", self.value, self._of(bound))

    def where(self, mask: ir.Value, other: Vec | float) -> Vec:
        return Vec(self.builder, self.builder.select(mask, self.value, self._of(other)))

    def lanes(self) -> list[ir.Value]:
        """The lanes as float64 scalars."""
        return [self.builder.fpext(self.builder.extract_element(self.value, I32(k)), F64) for k in range(LANES)]


def _intrinsic(builder: ir.IRBuilder, name: str, arguments: int) -> ir.Function:
    kind = ir.FunctionType(FLOATS, [FLOATS] * arguments)
    return cgutils.get_or_insert_function(builder.module, kind, f"{name}.v{LANES}f32")


def constant(builder: ir.IRBuilder, x: float) -> Vec:
    return Vec(builder, ir.Constant(FLOATS, [float32(x)] * LANES))


def splat(builder: ir.IRBuilder, scalar: ir.Value) -> Vec:
    """One fp32 scalar in every lane."""
    undefined = ir.Constant(FLOATS, ir.Undefined)
    first = builder.insert_element(undefined, scalar, I32(0))
    return Vec(builder, builder.shuffle_vector(first, undefined, ir.Constant(INTS, [0] * LANES)))


def load(builder: ir.IRBuilder, data: ir.Value, index: ir.Value) -> Vec:
    """The lanes at ``data[index : index + LANES]``."""
    place = builder.bitcast(builder.gep(data, [index]), FLOATS.as_pointer())
    return Vec(builder, builder.load(place, align=4))


def exp(a: Vec) -> Vec:
    """e**a for a <= 0 (relative error below 2e-7); 0 below -87, for -inf and for NaN; exp(0) is exactly 1."""
    builder = a.builder
    rounded = a.fma(LOG2E, ROUNDER)
    whole = rounded - ROUNDER
    rest = a.fma(LOG2E - float32(LOG2E), a.fma(LOG2E, -whole))
    y = constant(builder, EXP2[0])
    for coefficient in EXP2[1:]:
        y = y.fma(rest, coefficient)
    exponent = builder.shl(builder.bitcast(rounded.value, INTS), ir.Constant(INTS, [23] * LANES))
    scaled = builder.bitcast(builder.add(builder.bitcast(y.value, INTS), exponent), FLOATS)
    return Vec(builder, scaled).where(builder.fcmp_ordered(">=", a.value, a._of(LEAST)), 0.0)


def loop(builder: ir.IRBuilder, count: ir.Value, start: list[Vec], step, unroll: int) -> list[Vec]:  # type: ignore[no-untyped-def]
    """Run ``accumulators = step(index, accumulators)`` for index 0, 8, 16, ... below ``count``.

    ``count`` is a positive multiple of ``LANES * unroll``.
    """
    before, body, after = builder.block, builder.append_basic_block("lanes"), builder.append_basic_block("sums")
    builder.branch(body)
    builder.position_at_end(body)
    index = builder.phi(I64)
    held = [builder.phi(FLOATS) for _ in start]
    accumulators, place = [Vec(builder, value) for value in held], index
    for _ in range(unroll):
        accumulators = step(place, accumulators)
        place = builder.add(place, I64(LANES))
    index.add_incoming(I64(0), before)
    index.add_incoming(place, body)
    for phi, first, last in zip(held, start, accumulators, strict=True):
        phi.add_incoming(first.value, before)
        phi.add_incoming(last.value, body)
    builder.cbranch(builder.icmp_signed("<", place, count), body, after)
    builder.position_at_end(after)
    return accumulators
