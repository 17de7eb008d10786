"""Positions against a tile of the vocabulary: the loops that feed the kernels and keep the states.

Blocks of ordinary numbers go through the fp32 lanes. A block with a NaN or an infinity in it, and the last few columns
of an odd width, are summed one entry at a time in float64. A row is always walked in the same blocks in the same
order, whatever the number of threads or rows, so its digits do not depend on its company.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from pathlib import Path

import numba
import numpy as np
from numba import types
from numba.extending import overload

from harness.scoring import kernel as k
from harness.scoring import state as slot
from harness.scoring.state import centre, move, shift

BLOCK = 1024
#: A block that holds something special is tried again in pieces of this length.
PIECE = 64
TOP = 5
#: exp of more than this is not to be trusted in fp32.
RANGE = 60.0
STRIDE = k.STRIDE


@numba.njit(nogil=True)
def _widen(half: np.ndarray, is_bf16: bool, out: np.ndarray) -> None:
    bits = out.view(np.uint32)
    if is_bf16:
        for i in range(len(half)):
            bits[i] = np.uint32(half[i]) << np.uint32(16)
        return
    for i in range(len(half)):
        h = np.uint32(half[i])
        bits[i] = ((h & np.uint32(0x8000)) << np.uint32(16)) | ((h & np.uint32(0x7FFF)) << np.uint32(13))
    # The two formats' exponents differ by 112 in bias; multiplying also makes subnormal halves right.
    for i in range(len(half)):
        out[i] *= np.float32(2.0**112)
    # What was infinite or NaN became a number from 65536 on, which no half is.
    for i in range(len(half)):
        bits[i] |= np.uint32(0x7F800000) * np.uint32(abs(out[i]) >= np.float32(65536.0))


def _floats(row: np.ndarray, low: int, high: int, is_bf16: bool, buffer: np.ndarray) -> np.ndarray:
    """``row[low:high]`` as fp32: a view of fp32, or 16-bit patterns widened into ``buffer``."""
    raise NotImplementedError("compiled code only")


@overload(_floats, inline="never")
def _floats_typed(row, low, high, is_bf16, buffer):  # type: ignore[no-untyped-def]
    if row.dtype == types.float32:
        return lambda row, low, high, is_bf16, buffer: row[low:high]

    def widened(row, low, high, is_bf16, buffer):  # type: ignore[no-untyped-def]
        _widen(row[low:high], is_bf16, buffer[: high - low])
        return buffer[: high - low]

    return widened


@numba.njit(nogil=True)
def _note_tops(t: np.ndarray, c: np.ndarray, first_id: int, state: np.ndarray) -> None:
    """Record the lowest id, the ties and a common top of maxima that this block reaches."""
    for i in range(len(t)):
        top_t, top_c = t[i] == state[slot.TOP_T], c[i] == state[slot.TOP_C]
        if top_t:
            state[slot.TIES_T] += 1.0
            if state[slot.ID_T] < 0.0:
                state[slot.ID_T] = first_id + i
        if top_c:
            state[slot.TIES_C] += 1.0
            if state[slot.ID_C] < 0.0:
                state[slot.ID_C] = first_id + i
        if top_t and top_c:
            state[slot.JOINT] = 1.0


@numba.njit(nogil=True)
def _lane_sums(t: np.ndarray, c: np.ndarray, shift_t: float, c0: float, calm: bool, sums: np.ndarray) -> None:
    """Sum a block with the kernel that suits it."""
    high = np.float32(c0)
    shifts = (np.float32(shift_t), np.float32(shift_t + c0), high, np.float32(c0 - high))
    if abs(c0) <= k.NEAR:
        if calm:
            k.near_calm_sums(t, c, len(t), shifts, sums)
        else:
            k.near_sums(t, c, len(t), shifts, sums)
    elif calm:
        k.far_calm_sums(t, c, len(t), shifts, sums)
    else:
        k.far_sums(t, c, len(t), shifts, sums)


@numba.njit(nogil=True)
def _lane_block(t: np.ndarray, c: np.ndarray, first_id: int, state: np.ndarray, sums: np.ndarray) -> bool:
    """Add a block through the fp32 lanes; False, and nothing added, where it holds something special."""
    while True:
        shift_t, c0, calm = shift(state[slot.TOP_T]), state[slot.C0], state[slot.CALM] > 0.0
        _lane_sums(t, c, shift_t, c0, calm, sums)
        top_t, top_c = max(sums[k.MAX_T], state[slot.TOP_T]), max(sums[k.MAX_C], state[slot.TOP_C])
        if top_t == math.inf or top_c == math.inf:
            return False
        if top_t > state[slot.TOP_T] or top_c > state[slot.TOP_C]:
            # A larger logit: move the state to shifts that suit it, and sum the block again.
            mass, moment = state[slot.SUM_S], state[slot.SUM_M]
            if max(top_t - shift_t, top_c - (shift_t + c0)) < RANGE:
                mass, moment = mass + sums[k.S], moment + sums[k.M]
            move(state, top_t, top_c, centre(top_t, top_c, c0, mass, moment))
            continue
        state[slot.CALM] = sums[k.MAX_U] < 1.0
        if state[slot.CALM] > 0.0 or not calm:
            break
    if not math.isfinite(sums[k.M] + sums[k.N] + sums[k.A] + sums[k.B] + sums[k.E] + sums[k.F]):
        return False
    for i in range(8):
        state[slot.SUM_S + i] += sums[k.S + i]
    if sums[k.MAX_T] == state[slot.TOP_T] or sums[k.MAX_C] == state[slot.TOP_C]:
        _note_tops(t, c, first_id, state)
    return True


@numba.njit(nogil=True)
def _add_pair(t: float, c: float, p: float, q: float, c0: float, state: np.ndarray) -> None:
    """Add the entry's share of M, N, A and B; -inf is a probability of exactly zero."""
    if t == -math.inf and c == -math.inf:
        return
    if t == -math.inf:
        state[slot.SUM_A] += q
        state[slot.LOST_C] = max(state[slot.LOST_C], c)
    elif c == -math.inf:
        state[slot.SUM_M] -= p
        state[slot.SUM_B] += p
        state[slot.LOST_T] = max(state[slot.LOST_T], t)
    else:
        d = (c - t) - c0
        state[slot.SUM_M] += p * d
        state[slot.SUM_N] += q * d
        state[slot.SUM_A] += p * (math.expm1(d) - d) if abs(d) < 1.0 else q - p - p * d
        state[slot.SUM_B] += q * (math.expm1(-d) + d) if abs(d) < 1.0 else p - q + q * d


@numba.njit(nogil=True)
def _careful_block(t: np.ndarray, c: np.ndarray, first_id: int, state: np.ndarray) -> None:
    """Add a block one entry at a time in float64, whatever it holds."""
    top_t, top_c = state[slot.TOP_T], state[slot.TOP_C]
    for i in range(len(t)):
        if t[i] < math.inf:
            top_t = max(top_t, np.float64(t[i]))
        if c[i] < math.inf:
            top_c = max(top_c, np.float64(c[i]))
    if top_t > state[slot.TOP_T] or top_c > state[slot.TOP_C]:
        c0 = centre(top_t, top_c, state[slot.C0], state[slot.SUM_S], state[slot.SUM_M])
        move(state, top_t, top_c, c0)
    shift_t, shift_c = shift(top_t), shift(top_t) + state[slot.C0]
    for i in range(len(t)):
        a, b = np.float64(t[i]), np.float64(c[i])
        good_t, good_c = a < math.inf, b < math.inf
        p = math.exp(a - shift_t) if good_t else 0.0
        q = math.exp(b - shift_c) if good_c else 0.0
        state[slot.BAD_T] += not good_t
        state[slot.BAD_C] += not good_c
        state[slot.SUM_S] += p
        state[slot.SUM_Q] += q
        state[slot.SUM_E] += p * (a - shift_t) if p > 0.0 else 0.0
        state[slot.SUM_F] += q * (b - shift_c) if q > 0.0 else 0.0
        if good_t and good_c:
            _add_pair(a, b, p, q, state[slot.C0], state)
    _note_tops(t, c, first_id, state)


@numba.njit(nogil=True)
def _largest(values: np.ndarray) -> float:
    top = -np.inf
    for value in values:
        top = max(top, value)
    return top


@numba.njit(nogil=True)
def _add_block(t: np.ndarray, c: np.ndarray, first_id: int, state: np.ndarray, sums: np.ndarray) -> None:
    """Add any block; its maxima are left in ``sums[:2]``."""
    whole = len(t) - len(t) % STRIDE
    if whole == len(t) and _lane_block(t, c, first_id, state, sums):
        return
    for low in range(0, whole, PIECE):
        high = min(low + PIECE, whole)
        if not _lane_block(t[low:high], c[low:high], first_id + low, state, sums):
            _careful_block(t[low:high], c[low:high], first_id + low, state)
    if whole < len(t):
        _careful_block(t[whole:], c[whole:], first_id + whole, state)
    sums[k.MAX_T], sums[k.MAX_C] = _largest(t), _largest(c)


@numba.njit(nogil=True)
def _gap(t: np.ndarray, c: np.ndarray, shift_t: float, shift_c: float, ratio: float, sums: np.ndarray) -> float:
    """``sum |exp(t - shift_t) - ratio exp(c - shift_c)|`` of a block."""
    whole = len(t) - len(t) % STRIDE
    sums[0] = 0.0
    if whole:
        k.gap_sum(t, c, whole, (np.float32(shift_t), np.float32(shift_c), np.float32(ratio)), sums)
    total = sums[0]
    for i in range(whole, len(t)):
        total += abs(math.exp(np.float64(t[i]) - shift_t) - ratio * math.exp(np.float64(c[i]) - shift_c))
    return total


@numba.njit(nogil=True)
def _largest_blocks(tops: np.ndarray) -> np.ndarray:
    """Marks the ``TOP`` blocks of the largest maxima, ties to the first."""
    wanted = np.zeros(len(tops), np.bool_)
    for _ in range(min(TOP, len(tops))):
        best = -1
        for block in range(len(tops)):
            if not wanted[block] and (best < 0 or tops[block] > tops[best]):
                best = block
        wanted[best] = True
    return wanted


@numba.njit(nogil=True)
def _top_ids(row: np.ndarray, is_bf16: bool, tops: np.ndarray, buffer: np.ndarray) -> np.ndarray:
    """Ids of the ``TOP`` largest logits, ties to the lowest id; -1 where the row is shorter.

    They all lie in the ``TOP`` blocks of the largest maxima: every other entry has as many before it.
    """
    best, ids = np.empty(TOP, np.float32), np.empty(TOP, np.int64)
    for i in range(TOP):
        best[i], ids[i] = -np.inf, -1
    wanted = _largest_blocks(tops)
    for block in range(len(tops)):
        if not wanted[block]:
            continue
        low = block * BLOCK
        values = _floats(row, low, min(low + BLOCK, len(row)), is_bf16, buffer)
        for i in range(len(values)):
            if values[i] > best[TOP - 1] or ids[TOP - 1] < 0:
                place = TOP - 1
                while place > 0 and (ids[place - 1] < 0 or values[i] > best[place - 1]):
                    best[place], ids[place] = best[place - 1], ids[place - 1]
                    place -= 1
                best[place], ids[place] = values[i], low + i
    return ids


@numba.njit(nogil=True)
def _rank(row: np.ndarray, is_bf16: bool, tops: np.ndarray, token: int, buffer: np.ndarray) -> int:
    """1 + the number of logits above that of ``token``."""
    at = _floats(row, token, token + 1, is_bf16, buffer)[0]
    above = 0
    for block in range(len(tops)):
        if tops[block] > at:
            low = block * BLOCK
            values = _floats(row, low, min(low + BLOCK, len(row)), is_bf16, buffer)
            for i in range(len(values)):
                above += values[i] > at
    return above + 1


@numba.njit(nogil=True)
def _second_pass(
    t: np.ndarray, c: np.ndarray, is_bf16: np.ndarray, state: np.ndarray, tops: np.ndarray, buffers: np.ndarray
) -> tuple[float, int, int]:
    """Total variation, top-5 overlap and rank of one valid row that has all of its vocabulary at hand."""
    shift_t, shift_c = state[slot.TOP_T], state[slot.TOP_T] + state[slot.C0]
    ratio, gap, sums = state[slot.SUM_S] / state[slot.SUM_Q], 0.0, np.empty(1)
    for low in range(0, len(t), BLOCK):
        high = min(low + BLOCK, len(t))
        a = _floats(t, low, high, is_bf16[0], buffers[0])
        gap += _gap(a, _floats(c, low, high, is_bf16[1], buffers[1]), shift_t, shift_c, ratio, sums)
    ids_t = _top_ids(t, is_bf16[0], tops[0], buffers[0])
    ids_c = _top_ids(c, is_bf16[1], tops[1], buffers[0])
    overlap = 0
    for i in ids_t:
        for j in ids_c:
            overlap += i == j and i >= 0
    return 0.5 * gap / state[slot.SUM_S], overlap, _rank(c, is_bf16[1], tops[1], int(state[slot.ID_T]), buffers[0])


@numba.njit(nogil=True)
def _score_rows(
    teacher: np.ndarray,
    candidate: np.ndarray,
    starts: tuple[int, int],
    is_bf16: tuple[bool, bool],
    columns: tuple[int, int],
    targets: np.ndarray,
    state: np.ndarray,
    second: np.ndarray,
) -> None:
    """See `score_rows`."""
    first, width = columns[0], columns[1] - columns[0]
    buffers, sums = np.empty((2, BLOCK), np.float32), np.empty(k.RESULTS)
    tops = np.empty((2, (width + BLOCK - 1) // BLOCK), np.float32)
    for row in range(len(teacher)):
        side_t = teacher[row, starts[0] : starts[0] + width]
        side_c = candidate[row, starts[1] : starts[1] + width]
        for low in range(0, width, BLOCK):
            high = min(low + BLOCK, width)
            t = _floats(side_t, low, high, is_bf16[0], buffers[0])
            c = _floats(side_c, low, high, is_bf16[1], buffers[1])
            _add_block(t, c, first + low, state[row], sums)
            tops[0, low // BLOCK], tops[1, low // BLOCK] = sums[k.MAX_T], sums[k.MAX_C]
        at = targets[row] - first
        if 0 <= at < width:
            state[row, slot.AT_T] = _floats(side_t, at, at + 1, is_bf16[0], buffers[0])[0]
            state[row, slot.AT_C] = _floats(side_c, at, at + 1, is_bf16[1], buffers[1])[0]
        if len(second):
            second[row, 0], second[row, 1], second[row, 2] = math.nan, -1, -1
            if (
                state[row, slot.BAD_T] + state[row, slot.BAD_C] == 0
                and min(state[row, slot.TOP_T], state[row, slot.TOP_C]) > -math.inf
            ):
                second[row, 0], second[row, 1], second[row, 2] = _second_pass(
                    side_t, side_c, is_bf16, state[row], tops, buffers
                )


@numba.njit(nogil=True)
def _widen_rows(half: np.ndarray, is_bf16: bool, out: np.ndarray) -> None:
    """See `widen`."""
    for row in range(len(half)):
        for low in range(0, half.shape[1], BLOCK):
            high = min(low + BLOCK, half.shape[1])
            _widen(half[row, low:high], is_bf16, out[row, low:high])


def _entries(stamp: int) -> tuple[Callable[..., None], Callable[..., None]]:
    """The compiled entry points, cached on disk.

    numba looks only at this file to tell whether a cached function is stale. Its key also holds the values a function
    closes over, so ``stamp`` brings in the other files.
    """

    @numba.njit(nogil=True, cache=True)
    def score(teacher, candidate, starts, is_bf16, columns, targets, state, second):  # type: ignore[no-untyped-def]
        if stamp >= 0:
            _score_rows(teacher, candidate, starts, is_bf16, columns, targets, state, second)

    @numba.njit(nogil=True, cache=True)
    def wide(half, is_bf16, out):  # type: ignore[no-untyped-def]
        if stamp >= 0:
            _widen_rows(half, is_bf16, out)

    return score, wide


def _source_stamp() -> int:
    here = Path(__file__).parent
    return zlib.crc32(b"".join((here / name).read_bytes() for name in ("kernel.py", "state.py", "rows.py")))


_compiled_score, _compiled_widen = _entries(_source_stamp())


def score_rows(
    teacher: np.ndarray,
    candidate: np.ndarray,
    starts: tuple[int, int],
    is_bf16: tuple[bool, bool],
    columns: tuple[int, int],
    targets: np.ndarray,
    state: np.ndarray,
    second: np.ndarray,
) -> None:
    """Add the vocabulary's ``columns = (first, end)`` of both sides to the states ``[n, SLOTS]``.

    Column ``first`` is at ``starts[side]`` in a side's array, whose rows are contiguous and hold fp32, or uint16
    patterns that are bf16 where ``is_bf16[side]``, else fp16. ``second`` is empty, or ``[n, 3]`` float64 to receive
    total variation, top-5 overlap and rank, when the columns are the whole vocabulary.
    """
    _compiled_score(teacher, candidate, starts, is_bf16, columns, targets, state, second)


def widen(half: np.ndarray, is_bf16: bool, out: np.ndarray) -> None:
    """fp32 ``out[:, :]`` of 16-bit patterns ``[rows, width]``: bf16 where ``is_bf16``, else fp16."""
    _compiled_widen(half, is_bf16, out)
