"""The three EXL3 codebooks: a 16-bit trellis state to one fp16 value, computed, never looked up from a file.

``3inst`` and ``mcg`` hash the state, read the two halves of the hash as fp16 numbers near each other's size and
add them in fp16. ``mul1`` sums the four bytes of its hash and scales the sum with one fused multiply-add.
"""

from __future__ import annotations

from functools import cache
from typing import Literal, get_args

import numpy as np

Codebook = Literal["3inst", "mcg", "mul1"]
CODEBOOKS: tuple[Codebook, ...] = get_args(Codebook)

#: Value of the int32 scalar that marks a tensor's codebook on disk; no marker means ``3inst``.
MARKERS: dict[str, int] = {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}

_STATES = 1 << 16


@cache
def table(name: Codebook) -> np.ndarray:
    """Values of all states, float16 [65536], bit exact; read-only and shared.

    Raises:
        ValueError: ``name`` is not one of `CODEBOOKS`.
    """
    if name not in CODEBOOKS:
        raise ValueError(f"codebook {name!r} is none of {', '.join(CODEBOOKS)}")
    state = np.arange(_STATES, dtype=np.uint32)
    if name == "3inst":
        values = _sum_of_halves(state * np.uint32(89226354) + np.uint32(64248484))
    elif name == "mcg":
        values = _sum_of_halves(state * np.uint32(MARKERS["mcg"]))
    else:
        values = _scaled_byte_sum(state * np.uint32(MARKERS["mul1"]))
    values.flags.writeable = False
    return values


@cache
def table_fp32(name: Codebook) -> np.ndarray:
    """The values of `table` as float32 (exact), for kernels without fp16 arithmetic."""
    values = table(name).astype(np.float32)
    values.flags.writeable = False
    return values


def marker_int32(name: Codebook) -> int | None:
    """The signed int32 that a checkpoint stores to mark ``name``; None for ``3inst``, which has no marker."""
    value = MARKERS.get(name)
    return None if value is None else value - (1 << 32)


def _sum_of_halves(hashed: np.ndarray) -> np.ndarray:
    # The mask keeps sign, three low exponent bits and the mantissa; the xor centres the exponent below 1.
    bits = (hashed & np.uint32(0x8FFF8FFF)) ^ np.uint32(0x3B603B60)
    halves = bits.astype("<u4").view("<f2").reshape(-1, 2).astype(np.float32)
    return (halves[:, 0] + halves[:, 1]).astype(np.float16)  # exact in fp32, so one rounding


def _scaled_byte_sum(hashed: np.ndarray) -> np.ndarray:
    total = hashed.astype("<u4").view(np.uint8).reshape(-1, 4).sum(axis=1, dtype=np.int64)
    factor, offset = np.array([0x1EEE, 0xC931], dtype=np.uint16).view(np.float16).astype(np.float64)
    # Exact in float64 (11 x 11 bits and a near exponent), so the cast is the single rounding of an fp16 fma.
    return ((1024 + total) * factor + offset).astype(np.float16)
