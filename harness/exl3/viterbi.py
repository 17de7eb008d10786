"""Exact tail-biting Viterbi search: the ring of trellis states whose codebook values lie nearest to 256 weights.

A *context* is what one state hands to the next: its low bits. Step ``i`` drops ``d_(i+1)`` old bits and takes
``d_i`` fresh ones, so each of the 65,536 states is one edge of every step, at any rate. Two passes make the ring
close: the first starts free at position 128 and finds the context at the seam between 255 and 0, the second starts
and ends in that context.

Path costs are 16-bit integers, so that a vector register holds 16 edges: the metric of a weight ``w`` and a codebook
value ``x`` is ``(2^n (w - x))^2 >> 16`` in fixed point, saturating, and the least path cost is taken off at every
step. Weights so far out that this would saturate take a plain step with the excess over the nearest codebook value.
Path costs are kept every few steps; the traceback tries all paths in between again.

All compiled code of the search is in this file, because numba's cache watches only the file of the outermost function.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from harness.exl3.codebook import Codebook, table
from harness.exl3.layout import RING, WIDTHS

LANES = 16
STATES = 1 << 16
_UNREACHED = 65535
#: The vector step keeps this many running minima at most, one register each.
_GROUP = 8


class Trellis(NamedTuple):
    """What a search at one rate with one codebook needs; weights and codes are in units of ``1 / scale``.

    codes_S: int16, the codebook by state. even_S, odd_S: int16, the same in the vector step's order for even and odd
    positions. limit: weights beyond it take the plain step. lowest, highest: ends of the codebook.

    The other four are numbers held as the lengths of tuples, so that they are part of the type and constants in the
    compiled code. even, odd: fresh bits of even and odd positions. doublings: how often a difference is doubled
    before it is squared. stride: steps between kept path costs.
    """

    codes_S: np.ndarray
    even_S: np.ndarray
    odd_S: np.ndarray
    scale: float
    limit: float
    lowest: float
    highest: float
    even: tuple[int, ...]
    odd: tuple[int, ...]
    doublings: tuple[int, ...]
    stride: tuple[int, ...]


@cache
def trellis(bits: float, codebook: Codebook) -> Trellis:
    """The trellis of ``bits`` a weight.

    Raises:
        ValueError: no such rate, or a half rate with another codebook than mul1.
    """
    if bits not in WIDTHS or (bits != int(bits) and codebook != "mul1"):
        raise ValueError(f"{codebook} has no rate of {bits} bits")
    even, odd = int(bits), int(bits) + (bits != int(bits))
    # Differences get smaller with the rate: with these scales and doublings (each saturates) the metric keeps 20 to
    # 60 units at the mean distortion of every rate, and path costs more than 1,000 times that.
    scale, doublings = {1: 4095.0, 2: 5500.0, 3: 7000.0}.get(even, 8190.0), max(0, even - 3)
    codes_S = np.rint(table(codebook).astype(np.float64) * scale).astype(np.int16)
    lowest, highest = float(codes_S.min()), float(codes_S.max())
    return Trellis(
        codes_S=codes_S,
        even_S=edge_blocks(codes_S, even, odd),
        odd_S=edge_blocks(codes_S, odd, even),
        scale=scale,
        limit=min(32767.0, max(-lowest, highest) + 32767 / (2 << doublings) - scale / 2),
        lowest=lowest,
        highest=highest,
        even=(0,) * even,
        odd=(0,) * odd,
        doublings=(0,) * doublings,
        stride=(0,) * max(s for s in (1, 2, 4) if s == 1 or (even + odd) * s <= 8),
    )


# ---------------------------------------------------------------------------------------------------------------
# One step on vectors. The lanes are 16 neighbouring predecessors, so old costs need no shuffle; only the new costs,
# 2^d_out times fewer than edges, are transposed into the order of their contexts.

#: Rates up to this have 16 neighbouring predecessors.
_VECTOR_BITS = 6


def edge_blocks(codes_S: np.ndarray, d_in: int, d_out: int) -> np.ndarray:
    """Codebook in the order in which `_vector_step` reads it: [p / 16, f / group, k, f in group, p in 16].

    A state is ``k`` (the ``d_out`` bits to be dropped), ``p``, ``f`` (the ``d_in`` fresh bits), high bits first.
    """
    fresh, group = 1 << d_in, min(1 << d_in, _GROUP)
    if max(d_in, d_out) > _VECTOR_BITS:
        return codes_S
    split = codes_S.reshape(1 << d_out, -1, LANES, fresh // group, group)
    return np.ascontiguousarray(split.transpose(1, 3, 0, 4, 2)).reshape(-1)


@intrinsic
def _vector_step(typing, old, new, blocks, weight, floor, d_in, d_out, doublings):  # type: ignore[no-untyped-def]
    """``new[p, f] = min over k of old[k, p] + metric(k, p, f) - floor``; gives the least of ``new``."""
    signature = types.uint16(old, new, blocks, weight, floor, d_in, d_out, doublings)
    shape = d_in.count, d_out.count, doublings.count

    def emit(context, builder, sig, args):  # type: ignore[no-untyped-def]
        arrays = zip(sig.args[:3], args[:3], strict=True)
        old, new, blocks = (context.make_array(kind)(context, builder, array).data for kind, array in arrays)
        return _StepEmitter(builder, *shape).emit(old, new, blocks, args[3], args[4])

    return signature, emit


class _StepEmitter:
    """Writes the LLVM code of one step in generic vectors, which every processor gets in its own instructions."""

    i16, i32, i64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
    vector = ir.VectorType(i16, LANES)

    def __init__(self, builder: Any, d_in: int, d_out: int, doublings: int) -> None:
        self.b, self.doublings = builder, doublings
        self.fresh, self.dropped = 1 << d_in, 1 << d_out
        self.predecessors = STATES // (self.fresh * self.dropped)
        self.group = min(self.fresh, _GROUP)

    def emit(self, old: Any, new: Any, blocks: Any, weight: Any, floor: Any) -> Any:
        b, i64 = self.b, self.i64
        old, new, blocks = (b.bitcast(pointer, self.i16.as_pointer()) for pointer in (old, new, blocks))
        weight, floor = self._splat(weight), self._splat(floor)
        least, *minima = (cgutils.alloca_once_value(b, self._all(-1)) for _ in range(1 + self.group))
        groups = self.fresh // self.group
        with (
            cgutils.for_range(b, i64(self.predecessors // LANES), intp=i64) as p,
            cgutils.for_range(b, i64(groups), intp=i64) as g,
        ):
            for minimum in minima:
                b.store(self._all(-1), minimum)
            first_p = b.mul(p.index, i64(LANES))
            edges = b.mul(b.add(b.mul(p.index, i64(groups)), g.index), i64(self.dropped * self.group * LANES))
            with cgutils.for_range(b, i64(self.dropped), intp=i64) as k:
                costs = self._load(old, b.add(b.mul(k.index, i64(self.predecessors)), first_p))
                row = b.add(edges, b.mul(k.index, i64(self.group * LANES)))
                for f, minimum in enumerate(minima):
                    metric = self._metric(weight, self._load(blocks, b.add(row, i64(f * LANES))))
                    self._lower(minimum, self._call("uadd.sat", costs, metric))
            rows = [self._call("usub.sat", b.load(minimum), floor) for minimum in minima]
            for costs in rows:
                self._lower(least, costs)
            self._store(new, b.add(b.mul(first_p, i64(self.fresh)), b.mul(g.index, i64(self.group))), rows)
        across = ir.FunctionType(self.i16, [self.vector])
        across = cgutils.get_or_insert_function(b.module, across, f"llvm.vector.reduce.umin.v{LANES}i16")
        return b.call(across, [b.load(least)])

    def _metric(self, weight: Any, codes: Any) -> Any:
        difference = self._call("ssub.sat", weight, codes)
        for _ in range(self.doublings):
            difference = self._call("sadd.sat", difference, difference)
        wide = self.b.sext(difference, ir.VectorType(self.i32, LANES))
        square = self.b.lshr(self.b.mul(wide, wide), ir.Constant(wide.type, [16] * LANES))
        return self.b.trunc(square, self.vector)  # one high-half multiplication in machine code

    def _store(self, new: Any, first: Any, rows: list[Any]) -> None:
        """Write ``rows[f][p]`` to ``new[first + p * fresh + f]``, interleaving pairs inside 128-bit halves."""
        low = [half * 8 + i // 2 + LANES * (i % 2) for half in (0, 1) for i in range(8)]
        middle = len(rows) // 2
        for _ in range(middle.bit_length()):
            rows = [
                self.b.shuffle_vector(rows[i], rows[i + middle], self._lanes(lane + shift for lane in low))
                for i in range(middle)
                for shift in (0, 4)
            ]
        for j, row in enumerate(rows):
            for half in (0, 1):
                piece = self.b.shuffle_vector(row, row, self._lanes(range(half * 8, half * 8 + 8)))
                at = self.b.add(first, self.i64((half * 8 + j * 8 // len(rows)) * self.fresh))
                self.b.store(piece, self.b.bitcast(self.b.gep(new, [at]), piece.type.as_pointer()), align=2)

    def _lower(self, minimum: Any, costs: Any) -> None:
        self.b.store(self._call("umin", self.b.load(minimum), costs), minimum)

    def _load(self, pointer: Any, at: Any) -> Any:
        return self.b.load(self.b.bitcast(self.b.gep(pointer, [at]), self.vector.as_pointer()), align=2)

    def _call(self, name: str, left: Any, right: Any) -> Any:
        kind = ir.FunctionType(self.vector, [self.vector, self.vector])
        function = cgutils.get_or_insert_function(self.b.module, kind, f"llvm.{name}.v{LANES}i16")
        return self.b.call(function, [left, right])

    def _all(self, value: int) -> Any:
        return ir.Constant(self.vector, [value] * LANES)

    def _lanes(self, chosen: Iterable[int]) -> Any:
        lanes = list(chosen)
        return ir.Constant(ir.VectorType(self.i32, len(lanes)), lanes)

    def _splat(self, scalar: Any) -> Any:
        one = self.b.insert_element(self._all(0), scalar, self.i32(0))
        return self.b.shuffle_vector(one, one, self._lanes([0] * LANES))


# ---------------------------------------------------------------------------------------------------------------
# One step in plain loops: any rate, any weight


@njit(cache=True, nogil=True)
def _near(code, weight, factor):  # type: ignore[no-untyped-def]
    """The branch metric of the vector step; ``factor`` is 2^doublings. The casts keep the lanes narrow."""
    difference = np.int32((np.int32(weight) - np.int32(code)) * factor)
    difference = min(max(difference, np.int32(-32768)), np.int32(32767))
    return np.uint16(np.int32(difference * difference) >> 16)


@njit(cache=True, nogil=True)
def _far(code, weight, nearest, factor):  # type: ignore[no-untyped-def]
    """The branch metric of a far-out weight, less that of the codebook value nearest to it."""
    distance, unit = weight - np.float32(code), factor * factor / np.float32(65536)
    excess = (distance * distance - nearest * nearest) * unit
    return np.uint16(np.int32(min(excess, np.float32(65535))))


@njit(cache=True, nogil=True)
def _nearest(t, weight):  # type: ignore[no-untyped-def]
    """How far a weight lies beyond the codebook."""
    return np.float32(max(weight - t.highest, t.lowest - weight, 0.0))


@njit(cache=True, nogil=True)
def _measure(t, code, weight):  # type: ignore[no-untyped-def]
    """The branch metric of one state."""
    factor = 1 << len(t.doublings)
    if abs(weight) > t.limit:
        return np.int64(_far(code, np.float32(weight), _nearest(t, weight), np.float32(factor)))
    return np.int64(_near(code, np.int16(np.rint(weight)), np.int32(factor)))


@njit(cache=True, nogil=True)
def _metrics(t, weight, metrics_S):  # type: ignore[no-untyped-def]
    """Branch metrics of one weight, uint16 by state."""
    codes_S, factor = t.codes_S, 1 << len(t.doublings)
    if abs(weight) > t.limit:
        narrow, nearest, factor_32 = np.float32(weight), _nearest(t, weight), np.float32(factor)
        for s in range(STATES):
            metrics_S[s] = _far(codes_S[s], narrow, nearest, factor_32)
    else:
        rounded, whole = np.int16(np.rint(weight)), np.int32(factor)
        for s in range(STATES):
            metrics_S[s] = _near(codes_S[s], rounded, whole)


@njit(cache=True, nogil=True)
def _plain_step(old, new, metrics_S, floor, d_in, d_out):  # type: ignore[no-untyped-def]
    """What `_vector_step` does, from metrics by state."""
    fresh, predecessors = 1 << d_in, STATES >> (d_in + d_out)
    least = np.uint16(_UNREACHED)
    for p in range(predecessors):
        row = new[p * fresh : (p + 1) * fresh]
        row[:] = _UNREACHED
        for k in range(1 << d_out):
            cost = old[k * predecessors + p]
            edges = metrics_S[(k * predecessors + p) * fresh : (k * predecessors + p + 1) * fresh]
            for f in range(fresh):
                path = np.uint16(cost + edges[f])
                path = np.uint16(_UNREACHED) if path < cost else path
                row[f] = min(row[f], path)
        for f in range(fresh):
            row[f] = np.uint16(row[f] - floor) if row[f] > floor else np.uint16(0)
            least = min(least, row[f])
    return least


# ---------------------------------------------------------------------------------------------------------------
# The search


@njit(cache=True, nogil=True)
def _fresh_at(t, position):  # type: ignore[no-untyped-def]
    return len(t.odd) if position & 1 else len(t.even)


@njit(cache=True, nogil=True)
def _step(t, old, new, position, weight, floor, metrics_S):  # type: ignore[no-untyped-def]
    """New path costs from old ones, less ``floor``; gives the least of the new."""
    if len(t.odd) > _VECTOR_BITS or abs(weight) > t.limit:
        _metrics(t, weight, metrics_S)
        return _plain_step(old, new, metrics_S, floor, _fresh_at(t, position), _fresh_at(t, position + 1))
    rounded = np.int16(np.rint(weight))
    if position & 1:
        return _vector_step(old, new, t.odd_S, rounded, floor, t.odd, t.even, t.doublings)
    return _vector_step(old, new, t.even_S, rounded, floor, t.even, t.odd, t.doublings)


@njit(cache=True, nogil=True)
def _forward(t, first, weights, unfloored, kept, between, metrics_S):  # type: ignore[no-untyped-def]
    """All 256 steps from position ``first`` on, starting with the costs in ``kept[0]``."""
    floor, stride = np.uint16(0), len(t.stride)
    for j in range(RING):
        old = between[j & 1] if j % stride else kept[j // stride]
        new = between[(j + 1) & 1] if (j + 1) % stride else kept[(j + 1) // stride]
        position = (first + j) & 255
        floor = _step(t, old, new, position, weights[position], floor, metrics_S)
        if j < unfloored:
            floor = np.uint16(0)


@njit(cache=True, nogil=True)
def _walk(t, first, context, path, weights, states):  # type: ignore[no-untyped-def]
    """Go back ``stride`` steps to ``first`` from the context after them; ``path`` holds the bits to put back.

    Writes the states; gives the context before and the cost of the way.
    """
    cost = np.int64(0)
    for i in range(first + len(t.stride) - 1, first - 1, -1):
        dropped = _fresh_at(t, i + 1)
        state = (path & ((1 << dropped) - 1)) << (16 - dropped) | context
        path >>= dropped
        cost += _measure(t, t.codes_S[state], weights[i & 255])
        states[i & 255] = state
        context = state >> _fresh_at(t, i)
    return context, cost


@njit(cache=True, nogil=True)
def _trace_block(t, first, context, seam, weights, costs, states):  # type: ignore[no-untyped-def]
    """Try every way back to position ``first``, where the path costs are ``costs``; keep the best.

    ``seam`` >= 0 is the context that position 0 starts in: ways that cannot have come from there are left out.
    Writes the states of the best way and gives its first context.
    """
    choices = (len(t.stride) >> 1) * (len(t.even) + len(t.odd)) + (len(t.stride) & 1) * _fresh_at(t, first + 1)
    taken = (first >> 1) * (len(t.even) + len(t.odd)) + (first & 1) * len(t.even)
    from_seam = 16 - _fresh_at(t, first) - taken if seam >= 0 else 0
    best, best_path = np.int64(1) << 60, 0
    for path in range(1 << choices):
        c, cost = _walk(t, first, context, path, weights, states)
        if from_seam > 0 and c >> taken != seam & ((1 << from_seam) - 1):
            continue
        if cost + costs[c] < best:
            best, best_path = cost + costs[c], path
    return _walk(t, first, context, best_path, weights, states)[0]


@njit(cache=True, nogil=True)
def _search(t, weights_N256, states_N256, kept, between, metrics_S):  # type: ignore[no-untyped-def]
    stride = len(t.stride)
    for n in range(len(weights_N256)):
        seam = np.int64(-1)
        for closing in range(2):
            kept[0] = 0
            first, last, unfloored = RING // 2, RING // 2, 0
            if closing:
                kept[0] = _UNREACHED
                kept[0, seam] = 0
                # Costs grow freely until every context can be reached, so that none overtakes `_UNREACHED` before.
                first, last, unfloored = 0, 0, 16 // len(t.even)
            _forward(t, first, weights_N256[n], unfloored, kept, between, metrics_S)
            context = seam if closing else np.int64(np.argmin(kept[RING // stride]))
            for j in range(RING - stride, last - 1, -stride):
                context = _trace_block(t, first + j, context, seam, weights_N256[n], kept[j // stride], states_N256[n])
            seam = context


def search(weights_N256: np.ndarray, bits: float, codebook: Codebook) -> np.ndarray:
    """States of the ring nearest to each row of weights, by exact search on one thread.

    Args:
        weights_N256: finite, in units of the codebook (rms about 1.24 for mcg and 3inst, 1.0 for mul1), ring order.
        bits: rate, 1..8, and 1.5, 2.5 or 3.5 with mul1.
        codebook: whose values are to come near the weights.

    Returns:
        uint16 [N, 256]; each state continues the one before, and the first the last.
    """
    t = trellis(bits, codebook)
    states = np.zeros((len(weights_N256), RING), np.uint16)
    contexts = STATES >> len(t.even)
    kept = np.empty((RING // len(t.stride) + 1, contexts), np.uint16)
    scratch = np.empty((2, contexts), np.uint16), np.empty(STATES, np.uint16)
    _search(t, np.asarray(weights_N256, np.float64) * t.scale, states, kept, *scratch)
    return states
