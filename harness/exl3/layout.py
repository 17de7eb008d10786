"""Where the bits of an EXL3 tile lie: ring order, rates, and states to packed words.

A tile holds 16 x 16 weights in a ring of 256 positions. Position ``i`` owns ``d_i`` fresh bits of a circular
stream (``d_i = K``; for K + 0.5 alternately K and K + 1), and its state is the 16 bits of the stream that end
with them. Disk order of the 16-bit words is most significant bit first with each pair of words swapped.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import njit

TILE = 16
RING = 256

_LANE, _J = np.arange(RING) >> 3, np.arange(RING) & 7
#: Row (input feature) and column (output feature) inside the tile of each ring position: int64 [256].
RING_ROW: np.ndarray = 2 * (_LANE & 3) + (_J & 1) + 8 * ((_J >> 1) & 1)
RING_COL: np.ndarray = (_LANE >> 2) + 8 * ((_J >> 2) & 1)

#: Last-axis length of a trellis tensor for every legal rate.
WIDTHS: dict[float, int] = {**{float(k): 16 * k for k in range(1, 9)}, **{k + 0.5: 16 * k + 8 for k in (1, 2, 3)}}
_BITS = {width: bits for bits, width in WIDTHS.items()}


def bits_of(width: int) -> float:
    """Bits a weight of a trellis whose last axis has ``width`` int16 words.

    Raises:
        ValueError: no rate has this width.
    """
    if width not in _BITS:
        raise ValueError(f"a trellis {width} words wide has no legal rate; legal are {sorted(_BITS)}")
    return _BITS[width]


def fresh_bits(width: int) -> np.ndarray:
    """Fresh bits of each ring position, int64 [256]; they add up to ``16 * width``."""
    bits = bits_of(width)
    return int(bits) + (np.arange(RING) & 1) * int(bits != int(bits))


@cache
def windows(width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """How to cut each state from the stored words: ``((t[first] << 16 | t[second]) >> shift) & 0xFFFF``.

    Returns:
        first, second (word indices as stored, so the pair swap is in them) and shift 1..16, int64 [256] each.
    """
    start = (np.cumsum(fresh_bits(width)) - 16) % (16 * width)
    word = start >> 4
    parts = word ^ 1, ((word + 1) % width) ^ 1, 16 - (start & 15)
    for part in parts:
        part.flags.writeable = False
    return parts


def pack_states(states: np.ndarray, width: int) -> np.ndarray:
    """Stored words of rings of states: uint16 [..., 256] to int16 [..., width].

    Only the fresh (low) bits of each state are stored, so reading gives the states back that form a ring: each one the
    one before, shifted by its fresh bits.

    Raises:
        ValueError: the width has no legal rate, or the last axis is not 256.
    """
    if states.shape[-1] != RING:
        raise ValueError(f"a ring has {RING} states, not {states.shape[-1]}")
    flat = np.ascontiguousarray(states, dtype=np.uint16).reshape(-1, RING)
    words = np.empty((len(flat), width), np.uint16)
    _pack(flat, fresh_bits(width), words)
    return words.view(np.int16).reshape(*states.shape[:-1], width)


@njit(cache=True, nogil=True)
def _pack(states, fresh, words):  # type: ignore[no-untyped-def]
    for n in range(len(states)):
        stream, held, word = np.uint64(0), 0, 0
        for i in range(256):
            own = np.uint64(fresh[i])
            stream = stream << own | np.uint64(states[n, i]) & ((np.uint64(1) << own) - np.uint64(1))
            held += fresh[i]
            while held >= 16:
                held -= 16
                words[n, word ^ 1] = np.uint16(stream >> np.uint64(held) & np.uint64(0xFFFF))
                word += 1
