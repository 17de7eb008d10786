"""The numba kernels under `harness.exl3.decode`. Arrays in, arrays out; no checks.

A block is 128 x 128 weights: 8 x 8 tiles. One ring position of all 64 tiles is cut and decoded at a time, so the
inner loop has 64 equal lanes, and the codebook is computed in them: the 256 KB table would miss the first-level
cache on every weight (measured 4 times slower). Work blocks lie flat with a pitch of 144, past 128 so that
rows do not fall into one set of that cache, and with that pitch spelled out as a constant, without which the
compiler cannot prove that rows do not overlap and leaves the butterflies scalar (measured 20 times slower).
numba widens uint32 arithmetic to 64 bits, hence the ``u32`` around every step.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from harness.exl3.codebook import MARKERS, Codebook
from harness.exl3.layout import RING_COL, RING_ROW

u32 = np.uint32
PITCH = 144
#: Where ring position i of tile (0, 0) lies in a fresh block: its row, and 8 columns (one per tile) together.
PLACE: np.ndarray = RING_ROW * PITCH + RING_COL * 8

#: (sums bytes, multiplier, addend) of each codebook's hash.
HASHES: dict[Codebook, tuple[bool, np.uint32, np.uint32]] = {
    "3inst": (False, u32(89226354), u32(64248484)),
    "mcg": (False, u32(MARKERS["mcg"]), u32(0)),
    "mul1": (True, u32(MARKERS["mul1"]), u32(0)),
}


def workspace(width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Uninitialised work arrays of one thread for `dense_blocks`, about 160 KB; they stay in the second-level cache."""
    block, turned = np.empty(128 * PITCH, np.float32), np.empty(128 * PITCH, np.float32)
    return np.empty(64 * width, np.uint32), block, turned, np.empty(64 + 128, np.float32)


@njit(cache=True, nogil=True, error_model="numpy")
def dense_blocks(words, first, second, shift, code, scales, place, span, target, layout, work):  # type: ignore[no-untyped-def]
    """Dense weight of blocks ``span = (start, stop)``, numbered along ``in`` first.

    Args:
        words: uint16 [in/16, out/16, width]; first, second, shift: `layout.windows`.
        code: an entry of `HASHES`; scales: float32 (suh / 128 [in], svh [out]).
        place: `PLACE`.
        target: flat patterns of float32 (uint32) or bfloat16 (uint16).
        layout: rows and columns of ``target`` (what is past them is cropped), the distance between its rows, and
            the output feature that its row 0 is.
        work: from `workspace`; made outside because numba counts references to arrays made inside at every slice.
    """
    row_scale, column_scale = scales
    rows, columns, pitch, origin = layout
    across = words.shape[0] // 8
    lanes, block, turned, line = work
    for n in range(span[0], span[1]):
        a0, b0 = 8 * (n % across), 8 * (n // across)
        _gather(words, a0, b0, lanes)
        _decode(lanes, first, second, shift, code, place, line[128:], block)
        _butterflies(block)
        _turn(block, turned)
        _butterflies(turned)
        wide = min(128, columns - 16 * a0)
        for c in range(min(128, origin + rows - 16 * b0)):
            own = column_scale[16 * b0 + c]
            _scaled(turned[c * 144 : c * 144 + 128], row_scale[16 * a0 : 16 * a0 + 128], own, line)
            at = (16 * b0 + c - origin) * pitch + 16 * a0
            _write(line[:wide], target[at : at + wide])


@njit(cache=True, nogil=True, error_model="numpy")
def _gather(words, a0, b0, lanes):  # type: ignore[no-untyped-def]
    """Word w of tile (a, b) to ``lanes[64 w + 8 a + b]``."""
    for a in range(8):
        for b in range(8):
            tile = words[a0 + a, b0 + b]
            for w in range(len(tile)):
                lanes[w * 64 + a * 8 + b] = tile[w]


@njit(cache=True, nogil=True, error_model="numpy")
def _decode(lanes, first, second, shift, code, place, value, block):  # type: ignore[no-untyped-def]
    """All weights of a block, as [in 128][out: 16 columns of a tile][8 tiles]."""
    sums_bytes, factor, addend = code
    bits = value.view(np.uint32)
    for i in range(256):
        high = lanes[first[i] * 64 : first[i] * 64 + 64]
        low = lanes[second[i] * 64 : second[i] * 64 + 64]
        # The masks tell the compiler that a shift stays inside 32 bits, and an index is not negative.
        by, at = u32(shift[i]) & u32(31), place[i] & 0x7FFF
        if sums_bytes:
            for k in range(64):
                bits[k] = _mul1(u32(u32(_state(high[k], low[k], by) * factor) + addend))
        else:
            for k in range(64):
                bits[k] = _halves(u32(u32(_state(high[k], low[k], by) * factor) + addend))
        for a in range(8):
            for b in range(8):
                block[at + a * 2304 + b] = value[a * 8 + b]


@njit(cache=True, nogil=True, error_model="numpy")
def _state(high, low, by):  # type: ignore[no-untyped-def]
    return u32(u32(u32(u32(high << u32(16)) | low) >> by) & u32(0xFFFF))


@njit(cache=True, nogil=True, error_model="numpy")
def _halves(hashed):  # type: ignore[no-untyped-def]
    """float32 bits of the fp16 sum of the two fp16 halves of a masked hash; their exponents are never subnormal."""
    m = u32(u32(hashed & u32(0x8FFF8FFF)) ^ u32(0x3B603B60))
    low = u32(
        u32(u32(u32(m << u32(13)) & u32(0x0FFFE000)) + u32(0x38000000)) | u32(u32(m << u32(16)) & u32(0x80000000))
    )
    high = u32(u32(u32(u32(m >> u32(3)) & u32(0x0FFFE000)) + u32(0x38000000)) | u32(m & u32(0x80000000)))
    return _round_to_fp16(np.float32(np.uint32(low).view(np.float32) + np.uint32(high).view(np.float32)))


@njit(cache=True, nogil=True, error_model="numpy")
def _mul1(hashed):  # type: ignore[no-untyped-def]
    """float32 bits of fp16 fma(1024 + byte sum, k, c); in fp32 the sum is inexact but rounds to the same fp16."""
    pairs = u32(u32(hashed & u32(0x00FF00FF)) + u32(u32(hashed >> u32(8)) & u32(0x00FF00FF)))
    total = u32(u32(pairs + u32(pairs >> u32(16))) & u32(0x3FF))
    scaled = np.float32(np.float32(u32(total + u32(1024))) * np.float32(0.00676727294921875))
    return _round_to_fp16(np.float32(scaled - np.float32(10.3828125)))


@njit(cache=True, nogil=True, error_model="numpy")
def _round_to_fp16(value):  # type: ignore[no-untyped-def]
    """float32 bits of ``value`` rounded to 11 significant bits, ties to even: fp16 while it is not subnormal there."""
    bits = np.float32(value).view(np.uint32)
    return u32(u32(u32(bits + u32(0xFFF)) + u32(u32(bits >> u32(13)) & u32(1))) & u32(0xFFFFE000))


@njit(cache=True, nogil=True, error_model="numpy")
def _butterflies(x):  # type: ignore[no-untyped-def]
    """Unscaled 128-point Hadamard transform over the rows of a block: distances 1, 2, 4; 8, 16; 32, 64."""
    for strip in range(0, 128, 32):
        for base in range(16):
            start = base * 1152 + strip
            for i in range(start, start + 32):
                a0, a1, a2, a3 = x[i] + x[i + 144], x[i] - x[i + 144], x[i + 288] + x[i + 432], x[i + 288] - x[i + 432]
                a4, a5 = x[i + 576] + x[i + 720], x[i + 576] - x[i + 720]
                a6, a7 = x[i + 864] + x[i + 1008], x[i + 864] - x[i + 1008]
                b0, b1, b2, b3 = a0 + a2, a1 + a3, a0 - a2, a1 - a3
                b4, b5, b6, b7 = a4 + a6, a5 + a7, a4 - a6, a5 - a7
                x[i], x[i + 144], x[i + 288], x[i + 432] = b0 + b4, b1 + b5, b2 + b6, b3 + b7
                x[i + 576], x[i + 720], x[i + 864], x[i + 1008] = b0 - b4, b1 - b5, b2 - b6, b3 - b7
        for quarter in range(4):
            for k in range(8):
                start = quarter * 4608 + k * 144 + strip
                for i in range(start, start + 32):
                    a0, a1 = x[i] + x[i + 1152], x[i] - x[i + 1152]
                    a2, a3 = x[i + 2304] + x[i + 3456], x[i + 2304] - x[i + 3456]
                    x[i], x[i + 1152], x[i + 2304], x[i + 3456] = a0 + a2, a1 + a3, a0 - a2, a1 - a3
        for k in range(32):
            start = k * 144 + strip
            for i in range(start, start + 32):
                a0, a1 = x[i] + x[i + 4608], x[i] - x[i + 4608]
                a2, a3 = x[i + 9216] + x[i + 13824], x[i + 9216] - x[i + 13824]
                x[i], x[i + 4608], x[i + 9216], x[i + 13824] = a0 + a2, a1 + a3, a0 - a2, a1 - a3


@njit(cache=True, nogil=True, error_model="numpy")
def _turn(block, turned):  # type: ignore[no-untyped-def]
    """Transpose to [out 128][in 128], undoing the column order of `_decode`."""
    for r0 in range(0, 128, 8):
        for column in range(16):
            for r in range(8):
                for tile in range(8):
                    turned[(tile * 16 + column) * 144 + r0 + r] = block[(r0 + r) * 144 + column * 8 + tile]


@njit(cache=True, nogil=True, error_model="numpy")
def _scaled(source, scale, own, line):  # type: ignore[no-untyped-def]
    for r in range(128):
        line[r] = source[r] * scale[r] * own


@njit(cache=True, nogil=True, error_model="numpy")
def _write(line, target):  # type: ignore[no-untyped-def]
    """Store float32 patterns, or in a 16-bit target those of bfloat16, ties to even (values are finite)."""
    bits = line.view(np.uint32)
    if target.itemsize == 4:
        for r in range(len(target)):
            target[r] = bits[r]
    else:
        for r in range(len(target)):
            target[r] = u32(u32(bits[r] + u32(0x7FFF)) + u32(u32(bits[r] >> u32(16)) & u32(1))) >> u32(16)
