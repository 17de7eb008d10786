"""The project's own fp32 product of hidden states with a head, which takes the head's 16-bit weights as they are.

A BLAS wants fp32 operands in memory and packs both anew for every tile. Here the states are packed once for the whole
vocabulary, and the weights are widened into the packed panel that the inner loop reads from the first-level cache:
nothing is written to memory but the logits. An entry is summed in blocks of at most ``MOST_DEPTH`` along the hidden
width, each block one chain of fused multiply-adds: its digits are those of any processor, tile and number of threads.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from harness.scoring import kernel
from harness.scoring.kernel import F32, I32, I64, Vec
from harness.scoring.rows import _widen

#: Side of the squares in which weights are turned, and what an inner depth is a multiple of.
SQUARE = 8
EIGHT = ir.VectorType(F32, SQUARE)
#: Lanes of a register. An entry of the product is one chain of its own, so digits do not depend on it.
WIDE = 16 if llvm.get_host_cpu_features().get("avx512f") else 8
FLOATS = ir.VectorType(F32, WIDE)
#: Rows and columns of the product that are held in registers: 24 sums of 32 registers, or 12 of 16.
ROWS, COLUMNS = (12 if WIDE == 16 else 6), 2 * WIDE
#: Steps of k written out; k is a multiple of ``SQUARE``, which it divides.
UNROLL = 4
#: The longest chain of fp32 additions; a panel of it takes 24 KB or 48 KB of the cache nearest to the registers.
MOST_DEPTH = 384
LINE = 16


def aligned(rows: int, width: int) -> np.ndarray:
    """An uninitialised fp32 array whose rows start at cache lines, an odd number of them apart.

    A stride of a power of two would put a column's entries into the same few places of the cache. Columns past
    ``width`` are there to be ignored.
    """
    stride = (-(-width // LINE) | 1) * LINE
    flat = np.empty(rows * stride + LINE, np.float32)
    start = (-flat.ctypes.data // 4) % LINE
    return flat[start : start + rows * stride].reshape(rows, stride)


def depth_of(hidden: int) -> int:
    """Entries of the hidden width summed in one chain: equal blocks of at most ``MOST_DEPTH``."""
    blocks = -(-hidden // MOST_DEPTH)
    return -(-hidden // (blocks * SQUARE)) * SQUARE


class Packed:
    """Hidden states ``[R, H]`` packed for products; ``R`` is a multiple of ``ROWS``."""

    def __init__(self, states_RH: np.ndarray) -> None:
        self.rows, self.hidden = states_RH.shape
        self.depth = depth_of(self.hidden)
        blocks = -(-self.hidden // self.depth)
        self.blocks = np.zeros(blocks * self.depth * self.rows, np.float32)
        _compiled_pack(states_RH, self.depth, self.blocks)

    def multiply(self, weight_WH: np.ndarray, is_bf16: bool, out_RW: np.ndarray) -> None:
        """Write ``states @ weight.T``; the weight is fp32, or uint16 patterns of bf16 (``is_bf16``) or fp16."""
        panel, wide = aligned(1, self.depth * COLUMNS)[0], aligned(COLUMNS, self.depth)
        _compiled_multiply(self.blocks, self.depth, weight_WH, is_bf16, panel, wide, out_RW)


@numba.njit(nogil=True)
def _pack(states: np.ndarray, depth: int, packed: np.ndarray) -> None:
    """Block by block along the width, group by group of ``ROWS`` rows: ``[depth, ROWS]``."""
    at = 0
    for low in range(0, states.shape[1], depth):
        high = min(low + depth, states.shape[1])
        for first in range(0, len(states), ROWS):
            for k in range(low, high):
                for r in range(ROWS):
                    packed[at + (k - low) * ROWS + r] = states[first + r, k]
            at += depth * ROWS


def _wide_row(row: np.ndarray, is_bf16: bool, out: np.ndarray) -> None:
    """fp32 of a row of weights."""
    raise NotImplementedError("compiled code only")


@overload(_wide_row)
def _wide_row_typed(row, is_bf16, out):  # type: ignore[no-untyped-def]
    if row.dtype == types.float32:

        def copied(row, is_bf16, out):  # type: ignore[no-untyped-def]
            out[:] = row

        return copied
    return lambda row, is_bf16, out: _widen(row, is_bf16, out)


@numba.njit(nogil=True)
def _panel(
    weight: np.ndarray,
    columns: tuple[int, int],
    span: tuple[int, int],
    is_bf16: bool,
    wide: np.ndarray,
    panel: np.ndarray,
) -> None:
    """``panel[k, c]`` = the weights of the ``columns`` over the ``span`` of the width, zeros where there is none."""
    count = span[1] - span[0]
    depth = -(-count // SQUARE) * SQUARE
    wide[:, count:depth] = 0.0
    for c in range(COLUMNS):
        if c < columns[1] - columns[0]:
            _wide_row(weight[columns[0] + c, span[0] : span[1]], is_bf16, wide[c, :count])
        else:
            wide[c, :count] = 0.0
    for c in range(0, COLUMNS, SQUARE):
        for k in range(0, depth, SQUARE):
            turn(wide, c * wide.shape[1] + k, wide.shape[1], panel, k * COLUMNS + c, COLUMNS)


@numba.njit(nogil=True)
def _edge(packed: np.ndarray, at: int, panel: np.ndarray, depth: int, count: int, out: np.ndarray, fresh: bool) -> None:
    """The last few columns: computed beside, then added."""
    spill = np.empty((ROWS, COLUMNS), np.float32)
    for first in range(0, len(out), ROWS):
        outer_sums(packed, at + first * depth, panel, count, spill, 0, COLUMNS, True)
        for r in range(ROWS):
            for c in range(out.shape[1]):
                out[first + r, c] = spill[r, c] if fresh else out[first + r, c] + spill[r, c]


@numba.njit(nogil=True)
def _multiply(
    packed: np.ndarray,
    depth: int,
    weight: np.ndarray,
    is_bf16: bool,
    panel: np.ndarray,
    wide: np.ndarray,
    out: np.ndarray,
) -> None:
    """See `Packed.multiply`."""
    stride, hidden = out.strides[0] // 4, weight.shape[1]
    for low in range(0, hidden, depth):
        span, at, fresh = (low, min(low + depth, hidden)), low * len(out), low == 0
        count = -(-(span[1] - low) // SQUARE) * SQUARE
        for column in range(0, len(weight), COLUMNS):
            end = min(column + COLUMNS, len(weight))
            _panel(weight, (column, end), span, is_bf16, wide, panel)
            if end - column < COLUMNS:
                _edge(packed, at, panel, depth, count, out[:, column:end], fresh)
                continue
            for first in range(0, len(out), ROWS):
                place = first * stride + column
                outer_sums(packed, at + first * depth, panel, count, out, place, stride, fresh)


# ---- the innermost loop and the turning of its operand ---------------------------------------------------------------


def _start(context: Any, builder: ir.IRBuilder, kind: Any, array: ir.Value, at: ir.Value) -> ir.Value:
    """The address of the entry ``at`` of an array's data."""
    return builder.gep(context.make_array(kind)(context, builder, array).data, [at])


def _store(builder: ir.IRBuilder, value: ir.Value, place: ir.Value) -> None:
    builder.store(value, builder.bitcast(place, value.type.as_pointer()), align=4)


def _steps(builder: ir.IRBuilder, left: ir.Value, right: ir.Value, at: ir.Value, sums: list[Vec]) -> list[Vec]:
    """``UNROLL`` steps of k from ``at`` on."""
    for step in range(UNROLL):
        k = builder.add(at, I64(step))
        row, column = builder.mul(k, I64(ROWS)), builder.mul(k, I64(COLUMNS))
        b = [kernel.load(builder, right, builder.add(column, I64(v * WIDE)), FLOATS) for v in (0, 1)]
        for r in range(ROWS):
            a = kernel.splat(builder, builder.load(builder.gep(left, [builder.add(row, I64(r))])), FLOATS)
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
        phi.add_incoming(ir.Constant(FLOATS, [0.0] * WIDE), before)
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
            kernel.prefetch(builder, line, write=True)
        sums = _loop(builder, a, b, args[3])
        for index, total in enumerate(sums):
            place = builder.gep(lines[index // 2], [I64(index % 2 * WIDE)])
            before = kernel.load(builder, place, I64(0), FLOATS)
            kept = builder.select(args[7], ir.Constant(FLOATS, [0.0] * WIDE), before.value)
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
        lines = [kernel.load(builder, first, builder.mul(args[2], I64(r)), EIGHT).value for r in range(SQUARE)]
        place = _start(context, builder, sig.args[3], args[3], args[4])
        for k, line in enumerate(_turned(builder, lines)):
            _store(builder, line, builder.gep(place, [builder.mul(args[5], I64(k))]))
        return context.get_dummy_value()

    return signature, codegen


def _turned(builder: ir.IRBuilder, lines: list[ir.Value]) -> list[ir.Value]:
    """The transpose of eight vectors: pairs within 64, then 128, then 256 bits."""

    def mix(one: ir.Value, two: ir.Value, order: list[int]) -> ir.Value:
        return builder.shuffle_vector(one, two, ir.Constant(ir.VectorType(I32, SQUARE), order))

    low, high = [0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15]
    pairs = [mix(lines[r], lines[r + 1], order) for r in range(0, SQUARE, 2) for order in (low, high)]
    low, high = [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]
    fours = [mix(pairs[r + s], pairs[r + s + 2], order) for r in (0, 4) for s in (0, 1) for order in (low, high)]
    low, high = [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]
    return [mix(fours[k], fours[4 + k], order) for order in (low, high) for k in range(4)]


# ---- the compiled entry points ---------------------------------------------------------------------------------------


def _entries(stamp: int) -> tuple[Callable[..., None], Callable[..., None]]:
    """The compiled entry points, cached on disk; ``stamp`` as in `rows`, and of the width of a register."""

    @numba.njit(nogil=True, cache=True)
    def pack(states, depth, packed):  # type: ignore[no-untyped-def]
        if stamp >= 0:
            _pack(states, depth, packed)

    @numba.njit(nogil=True, cache=True)
    def multiply(packed, depth, weight, is_bf16, panel, wide, out):  # type: ignore[no-untyped-def]
        if stamp >= 0:
            _multiply(packed, depth, weight, is_bf16, panel, wide, out)

    return pack, multiply


def _source_stamp() -> int:
    here = Path(__file__).parent
    names = ("kernel.py", "rows.py", "packed.py")
    return zlib.crc32(b"".join((here / name).read_bytes() for name in names), WIDE)


_compiled_pack, _compiled_multiply = _entries(_source_stamp())
