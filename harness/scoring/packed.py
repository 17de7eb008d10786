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

import numba
import numpy as np
from numba import types
from numba.extending import overload

from harness.scoring.microkernel import COLUMNS, ROWS, outer_sums, turn
from harness.scoring.rows import _widen
from harness.scoring.simd import LANES

#: The longest chain of fp32 additions; a panel of it takes 24 KB of the first-level cache.
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
    return -(-hidden // (blocks * LANES)) * LANES


class Packed:
    """Hidden states ``[R, H]`` packed for products; ``R`` is a multiple of ``ROWS``."""

    def __init__(self, states_RH: np.ndarray) -> None:
        self.rows, self.hidden = states_RH.shape
        self.depth = depth_of(self.hidden)
        blocks = -(-self.hidden // self.depth)
        self.blocks = np.zeros(blocks * self.depth * self.rows, np.float32)
        _compiled_pack(states_RH, self.depth, self.blocks)

    def multiply(self, weight_WH: np.ndarray, brain: bool, out_RW: np.ndarray) -> None:
        """Write ``states @ weight.T``; the weight is fp32, or uint16 patterns of bf16 (``brain``) or fp16."""
        panel, wide = aligned(1, self.depth * COLUMNS)[0], aligned(COLUMNS, self.depth)
        _compiled_multiply(self.blocks, self.depth, weight_WH, brain, panel, wide, out_RW)


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


def _wide_row(row: np.ndarray, brain: bool, out: np.ndarray) -> None:
    """fp32 of a row of weights."""
    raise NotImplementedError("compiled code only")


@overload(_wide_row)
def _wide_row_typed(row, brain, out):  # type: ignore[no-untyped-def]
    if row.dtype == types.float32:

        def copied(row, brain, out):  # type: ignore[no-untyped-def]
            out[:] = row

        return copied
    return lambda row, brain, out: _widen(row, brain, out)


@numba.njit(nogil=True)
def _panel(
    weight: np.ndarray,
    columns: tuple[int, int],
    span: tuple[int, int],
    brain: bool,
    wide: np.ndarray,
    panel: np.ndarray,
) -> None:
    """``panel[k, c]`` = the weights of the ``columns`` over the ``span`` of the width, zeros where there is none."""
    count = span[1] - span[0]
    depth = -(-count // LANES) * LANES
    wide[:, count:depth] = 0.0
    for c in range(COLUMNS):
        if c < columns[1] - columns[0]:
            _wide_row(weight[columns[0] + c, span[0] : span[1]], brain, wide[c, :count])
        else:
            wide[c, :count] = 0.0
    for c in range(0, COLUMNS, LANES):
        for k in range(0, depth, LANES):
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
    brain: bool,
    panel: np.ndarray,
    wide: np.ndarray,
    out: np.ndarray,
) -> None:
    """See `Packed.multiply`."""
    stride, hidden = out.strides[0] // 4, weight.shape[1]
    for low in range(0, hidden, depth):
        span, at, fresh = (low, min(low + depth, hidden)), low * len(out), low == 0
        count = -(-(span[1] - low) // LANES) * LANES
        for column in range(0, len(weight), COLUMNS):
            end = min(column + COLUMNS, len(weight))
            _panel(weight, (column, end), span, brain, wide, panel)
            if end - column < COLUMNS:
                _edge(packed, at, panel, depth, count, out[:, column:end], fresh)
                continue
            for first in range(0, len(out), ROWS):
                place = first * stride + column
                outer_sums(packed, at + first * depth, panel, count, out, place, stride, fresh)


def _entries(stamp: int) -> tuple[Callable[..., None], Callable[..., None]]:
    """The compiled entry points, cached on disk; ``stamp`` as in `rows`."""

    @numba.njit(nogil=True, cache=True)
    def pack(states, depth, packed):  # type: ignore[no-untyped-def]
        if stamp >= 0:
            _pack(states, depth, packed)

    @numba.njit(nogil=True, cache=True)
    def multiply(packed, depth, weight, brain, panel, wide, out):  # type: ignore[no-untyped-def]
        if stamp >= 0:
            _multiply(packed, depth, weight, brain, panel, wide, out)

    return pack, multiply


def _source_stamp() -> int:
    here = Path(__file__).parent
    names = ("simd.py", "microkernel.py", "rows.py", "packed.py")
    return zlib.crc32(b"".join((here / name).read_bytes() for name in names))


_compiled_pack, _compiled_multiply = _entries(_source_stamp())
