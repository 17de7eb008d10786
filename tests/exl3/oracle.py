"""EXL3 decoding straight from the format's text, in Python integers and exact fractions, one weight at a time.

Shares nothing with `harness.exl3` but the input arrays, the codebooks' tables (`all_states` and `rotated`, which are
for whole matrices) and the place of a weight in a tile. Rounding to fp16 is the struct module's.
"""

from __future__ import annotations

import struct
from fractions import Fraction
from functools import cache

import numpy as np

from harness.exl3.codebook import table
from harness.exl3.layout import RING_COL, RING_ROW, bits_of


def half(bits: int) -> float:
    return struct.unpack("<e", struct.pack("<H", bits))[0]


def to_half(value: Fraction) -> int:
    """fp16 bits of an exact value; it has few bits, so the double in between is exact."""
    double = float(value)
    assert Fraction(double) == value
    return struct.unpack("<H", struct.pack("<e", double))[0]


@cache
def codebook(name: str, state: int) -> int:
    """fp16 bits of one state."""
    if name == "mul1":
        x = state * 0x83DCD12D % 2**32
        h = 1024 + sum(x.to_bytes(4, "little"))
        return to_half(Fraction(h) * Fraction(half(0x1EEE)) + Fraction(half(0xC931)))
    x = (state * 89226354 + 64248484 if name == "3inst" else state * 0xCBAC1FED) % 2**32
    x = (x & 0x8FFF8FFF) ^ 0x3B603B60
    return to_half(Fraction(half(x & 0xFFFF)) + Fraction(half(x >> 16)))


def fresh(bits: float) -> list[int]:
    whole = int(bits)
    return [whole if bits == whole or i % 2 == 0 else whole + 1 for i in range(256)]


def states(words: np.ndarray, bits: float) -> list[int]:
    """The 256 states of one tile, read bit by bit from the little-endian uint32 view."""
    wide = np.ascontiguousarray(words).astype("<i2").view("<u4").tolist()
    total = int(256 * bits)
    stream = [wide[p >> 5] >> (31 - (p & 31)) & 1 for p in range(total)]
    found, end = [], 0
    for own in fresh(bits):
        end += own
        state = 0
        for p in range(end - 16, end):
            state = state << 1 | stream[p % total]
        found.append(state)
    return found


def all_states(trellis: np.ndarray) -> np.ndarray:
    """`states` of every tile at once: int16 [..., width] to uint16 [..., 256]."""
    bits = bits_of(trellis.shape[-1])
    wide = np.ascontiguousarray(trellis).astype("<i2").view("<u4").astype(">u4").view(np.uint8)
    stream = np.unpackbits(wide, axis=-1)
    ends = np.cumsum(fresh(bits))
    window = stream[..., (ends[:, None] + np.arange(-16, 0)) % stream.shape[-1]]
    return (window @ (1 << np.arange(15, -1, -1))).astype(np.uint16)


def rotated(trellis: np.ndarray, name: str) -> np.ndarray:
    """The rotated matrix as coded, bit exact: float16 [in, out], padding included."""
    down, across, _ = trellis.shape
    tiles = np.empty((down, across, 16, 16), np.float16)
    tiles[:, :, RING_ROW, RING_COL] = table(name)[all_states(trellis)]
    return tiles.transpose(0, 2, 1, 3).reshape(16 * down, 16 * across)


def tile(words: np.ndarray, bits: float, name: str) -> np.ndarray:
    """fp16 bits of one decoded tile, row-major [16, 16]."""
    out = np.zeros((16, 16), np.uint16)
    for i, state in enumerate(states(words, bits)):
        lane, j = i >> 3, i & 7
        row = 2 * (lane & 3) + (j & 1) + 8 * ((j >> 1) & 1)
        column = (lane >> 2) + 8 * ((j >> 2) & 1)
        out[row, column] = codebook(name, state)
    return out


@cache
def hadamard(size: int) -> np.ndarray:
    """Block-diagonal 128-point Sylvester matrix in float64, from the parity of common index bits."""
    index = range(128)
    signs = [[(-1) ** bin(a & b).count("1") for a in index] for b in index]
    return np.kron(np.eye(size // 128), np.array(signs, float) / np.sqrt(128))


def dense(rotated: np.ndarray, suh: np.ndarray, svh: np.ndarray) -> np.ndarray:
    """The weight [out, in] in float64."""
    rows, columns = rotated.shape
    inner = hadamard(rows) @ rotated.astype(float) @ hadamard(columns)
    return (suh.astype(float)[:, None] * inner * svh.astype(float)).T


def ring_value(words: np.ndarray, dim: int, bits: int) -> list[float]:
    """Values of one row-wise ring: word 0 is the fp16 scale, then a stream with its lowest bit first."""
    scale = half(int(words[0]) & 0xFFFF)
    stream = [int(words[1 + p // 16]) >> (p % 16) & 1 for p in range(dim * bits)]
    symbols = [sum(stream[i * bits + b] << b for b in range(bits)) for i in range(dim)]
    values = []
    for i in range(dim):
        state = 0
        for j in range(16):
            state |= symbols[(i - j) % dim] << (j * bits)
        values.append(half(codebook("mul1", state & 0xFFFF)) * scale)
    return values


def proxy_loss(error: np.ndarray, weight: np.ndarray, hessian: np.ndarray) -> float:
    """``tr(E^T H E) / tr(W^T H W)``: how much of the output's energy is lost."""
    return float(np.sum(error * (hessian @ error)) / np.sum(weight * (hessian @ weight)))
