"""The innermost loop of a matrix product and the turning of its operand, written out in eight fp32 lanes.

Each entry of the product is one chain of fused multiply-adds over k, whatever lies around it, so its digits depend
neither on the place of its row or column nor on the processor.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from harness.scoring import simd
from harness.scoring.simd import FLOATS, I32, I64, INTS, LANES, Vec

#: Rows and columns of the product that are held in registers: 12 sums of 8 lanes, of 16 registers.
ROWS, COLUMNS = 6, 2 * LANES
#: Steps of k written out; k is a multiple of ``LANES``, which it divides.
UNROLL = 4


def _start(context: Any, builder: ir.IRBuilder, kind: Any, array: ir.Value, at: ir.Value) -> ir.Value:
    """The address of the entry ``at`` of an array's data."""
    return builder.gep(context.make_array(kind)(context, builder, array).data, [at])


def _store(builder: ir.IRBuilder, value: ir.Value, place: ir.Value) -> None:
    builder.store(value, builder.bitcast(place, FLOATS.as_pointer()), align=4)


def _prefetch(builder: ir.IRBuilder, place: ir.Value) -> None:
    """Ask for a cache line that will be written."""
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    builder.call(function, [builder.bitcast(place, byte), I32(1), I32(3), I32(1)])


def _steps(builder: ir.IRBuilder, left: ir.Value, right: ir.Value, at: ir.Value, sums: list[Vec]) -> list[Vec]:
    """``UNROLL`` steps of k from ``at`` on."""
    for step in range(UNROLL):
        k = builder.add(at, I64(step))
        row, column = builder.mul(k, I64(ROWS)), builder.mul(k, I64(COLUMNS))
        b = [simd.load(builder, right, builder.add(column, I64(v * LANES))) for v in (0, 1)]
        for r in range(ROWS):
            a = simd.splat(builder, builder.load(builder.gep(left, [builder.add(row, I64(r))])))
            for v in (0, 1):
                sums[2 * r + v] = a.fma(b[v], sums[2 * r + v])
    return sums


def _loop(builder: ir.IRBuilder, left: ir.Value, right: ir.Value, count: ir.Value) -> list[Vec]:
    """The sums over all k."""
    before, loop, done = builder.block, builder.append_basic_block("k"), builder.append_basic_block("sums")
    builder.branch(loop)
    builder.position_at_end(loop)
    at, held = builder.phi(I64), [builder.phi(FLOATS) for _ in range(2 * ROWS)]
    sums = _steps(builder, left, right, at, [Vec(builder, phi) for phi in held])
    further = builder.add(at, I64(UNROLL))
    at.add_incoming(I64(0), before)
    at.add_incoming(further, loop)
    for phi, total in zip(held, sums, strict=True):
        phi.add_incoming(ir.Constant(FLOATS, [0.0] * LANES), before)
        phi.add_incoming(total.value, loop)
    builder.cbranch(builder.icmp_signed("<", further, count), loop, done)
    builder.position_at_end(done)
    return sums


@intrinsic
def outer_sums(typingctx, left, left_at, right, count, out, out_at, stride, fresh):  # type: ignore[no-untyped-def]
    """``out[r, c] = or += sum_k left[k, r] right[k, c]`` for ``ROWS`` x ``COLUMNS`` entries; ``=`` where ``fresh``.

    ``left`` from ``left_at`` on is ``[count, ROWS]``, ``right`` is ``[count, COLUMNS]``; ``out``'s entry ``(r, c)`` is
    at ``out_at + r stride + c``. ``count`` is a positive multiple of ``UNROLL``.
    """
    intp = types.intp
    signature = types.void(left, intp, right, intp, out, intp, intp, types.boolean)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        a = _start(context, builder, sig.args[0], args[0], args[1])
        b = _start(context, builder, sig.args[2], args[2], I64(0))
        first = _start(context, builder, sig.args[4], args[4], args[5])
        lines = [builder.gep(first, [builder.mul(args[6], I64(r))]) for r in range(ROWS)]
        for line in lines:
            _prefetch(builder, line)
        sums = _loop(builder, a, b, args[3])
        for index, total in enumerate(sums):
            place = builder.gep(lines[index // 2], [I64(index % 2 * LANES)])
            before = simd.load(builder, place, I64(0))
            kept = builder.select(args[7], ir.Constant(FLOATS, [0.0] * LANES), before.value)
            _store(builder, (Vec(builder, kept) + total).value, place)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def turn(typingctx, source, source_at, source_stride, out, out_at, out_stride):  # type: ignore[no-untyped-def]
    """``out[k, r] = source[r, k]`` for 8 x 8 entries; an array is given by its first entry and its stride."""
    intp = types.intp
    signature = types.void(source, intp, intp, out, intp, intp)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        first = _start(context, builder, sig.args[0], args[0], args[1])
        lines = [simd.load(builder, first, builder.mul(args[2], I64(r))).value for r in range(LANES)]
        place = _start(context, builder, sig.args[3], args[3], args[4])
        for k, line in enumerate(_turned(builder, lines)):
            _store(builder, line, builder.gep(place, [builder.mul(args[5], I64(k))]))
        return context.get_dummy_value()

    return signature, codegen


def _turned(builder: ir.IRBuilder, lines: list[ir.Value]) -> list[ir.Value]:
    """The transpose of eight vectors: pairs within 64, then 128, then 256 bits."""

    def mix(one: ir.Value, two: ir.Value, order: list[int]) -> ir.Value:
        return builder.shuffle_vector(one, two, ir.Constant(INTS, order))

    low, high = [0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15]
    pairs = [mix(lines[r], lines[r + 1], order) for r in range(0, LANES, 2) for order in (low, high)]
    low, high = [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]
    fours = [mix(pairs[r + s], pairs[r + s + 2], order) for r in (0, 4) for s in (0, 1) for order in (low, high)]
    low, high = [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]
    return [mix(fours[k], fours[4 + k], order) for order in (low, high) for k in range(4)]
