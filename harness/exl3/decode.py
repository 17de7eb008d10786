"""EXL3 to dense weights on the CPU, at the speed of its vector units.

A 128 x 128 block of the rotated matrix is decoded from its 64 tiles, both Hadamard transforms run on it while it
lies in cache, and it is written once, transposed to the Hugging Face orientation. Blocks are independent, so the
cores share them. The order of every fp32 operation is fixed, and `harness.exl3.decode_torch` keeps the same one:
butterflies of distance 1, 2, 4, ... 64 over the input axis, the same over the output axis, then times
``suh / 128`` (exact: both transforms carry 1/sqrt(128)), then times ``svh``, then one cast.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numba import njit

from harness.exl3.codebook import table, table_fp32
from harness.exl3.layout import RING_COL, RING_ROW, TILE, windows
from harness.exl3.tensors import Exl3Linear

_BLOCK = 128
#: Row length of the work block: past 128 so that its rows do not share one set of the first-level cache.
_PITCH = _BLOCK + 16
_BLOCKS_A_TASK = 16


def decode_rotated(linear: Exl3Linear) -> np.ndarray:
    """The rotated matrix as coded, bit exact: float16 [in, out], padding included."""
    words, rows, columns = _words(linear)
    rotated = np.empty((rows * TILE, columns * TILE), np.uint16)
    values = table(linear.codebook).view(np.uint16)
    cut = windows(words.shape[-1])

    def work(start: int, stop: int) -> None:
        _decode_tiles(words, *cut, values, RING_ROW, RING_COL, start, stop, rotated)

    _share(work, rows, max(1, _BLOCKS_A_TASK * 64 // columns))
    return rotated.view(np.float16)


def dense_weight(
    linear: Exl3Linear, dtype: torch.dtype = torch.float32, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The layer's weight [out_features, in_features], evaluated in float32 and cast once.

    Args:
        linear: a packed layer on the CPU.
        dtype: float32, bfloat16 or float16.
        out: where to write, of that shape and dtype with contiguous rows (one expert of a stack, say).

    Raises:
        ValueError: another dtype, or an ``out`` that does not fit.
    """
    shape = linear.out_features, linear.in_features
    if out is None:
        out = torch.empty(shape, dtype=dtype)
    if tuple(out.shape) != shape or out.dtype != dtype or out.stride(1) != 1 or out.device.type != "cpu":
        raise ValueError(f"out must be a CPU tensor {list(shape)} of {dtype} with contiguous rows")
    if dtype == torch.float16:
        return out.copy_(dense_weight(linear, torch.float32))
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"dense weights are float32, bfloat16 or float16, not {dtype}")
    _dense(linear, out)
    return out


def _dense(linear: Exl3Linear, out: torch.Tensor) -> None:
    words, rows, columns = _words(linear)
    kernel = _dense_fp32 if out.dtype == torch.float32 else _dense_bf16
    target = out.numpy() if out.dtype == torch.float32 else out.view(torch.uint16).numpy()
    row_scale = linear.suh.float().numpy() / np.float32(_BLOCK)
    column_scale = linear.svh.float().numpy()
    values, cut = table_fp32(linear.codebook), windows(words.shape[-1])
    across = rows // 8

    def work(start: int, stop: int) -> None:
        kernel(words, *cut, values, RING_ROW, RING_COL, row_scale, column_scale, across, start, stop, target)

    _share(work, across * (columns // 8), _BLOCKS_A_TASK)


def _words(linear: Exl3Linear) -> tuple[np.ndarray, int, int]:
    words = linear.trellis.numpy().view(np.uint16)
    return words, words.shape[0], words.shape[1]


def _share(work: Callable[[int, int], None], total: int, step: int) -> None:
    """Run ``work(start, stop)`` over ``range(total)``, on as many threads as torch uses."""
    threads = min(torch.get_num_threads(), -(-total // step))
    if threads <= 1:
        work(0, total)
        return
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(work, start, min(start + step, total)) for start in range(0, total, step)]:
            done.result()


@njit(cache=True, nogil=True)
def _decode_tiles(words, first, second, shift, values, ring_row, ring_col, start, stop, rotated):  # type: ignore[no-untyped-def]
    for a in range(start, stop):
        for b in range(words.shape[1]):
            for i in range(256):
                pair = np.uint32(words[a, b, first[i]]) << np.uint32(16) | np.uint32(words[a, b, second[i]])
                state = pair >> np.uint32(shift[i]) & np.uint32(0xFFFF)
                rotated[16 * a + ring_row[i], 16 * b + ring_col[i]] = values[state]


@njit(cache=True, nogil=True)
def _decode_block(words, first, second, shift, values, ring_row, ring_col, a0, b0, block):  # type: ignore[no-untyped-def]
    """Decode tiles ``[a0:a0+8, b0:b0+8]`` into ``block`` [in 128, out 128 of 144]."""
    for a in range(8):
        for b in range(8):
            tile = words[a0 + a, b0 + b]
            for i in range(256):
                pair = np.uint32(tile[first[i]]) << np.uint32(16) | np.uint32(tile[second[i]])
                state = pair >> np.uint32(shift[i]) & np.uint32(0xFFFF)
                block[16 * a + ring_row[i], 16 * b + ring_col[i]] = values[state]


@njit(cache=True, nogil=True)
def _butterflies(block):  # type: ignore[no-untyped-def]
    """Unscaled Hadamard transform over the first axis of ``block`` [128, 128 of 144], strip by strip in cache."""
    for strip in range(0, 128, 32):
        h = 1
        while h < 128:
            for base in range(0, 128, 2 * h):
                for r in range(base, base + h):
                    upper, lower = block[r, strip : strip + 32], block[r + h, strip : strip + 32]
                    for c in range(32):
                        x, y = upper[c], lower[c]
                        upper[c] = x + y
                        lower[c] = x - y
            h *= 2


@njit(cache=True, nogil=True)
def _transpose(block, turned):  # type: ignore[no-untyped-def]
    for r0 in range(0, 128, 8):
        for c0 in range(0, 128, 8):
            for r in range(8):
                for c in range(8):
                    turned[c0 + c, r0 + r] = block[r0 + r, c0 + c]


@njit(cache=True, nogil=True)
def _transformed(words, first, second, shift, values, ring_row, ring_col, a0, b0, block, turned):  # type: ignore[no-untyped-def]
    """Both transforms of one block, left in ``turned`` [out 128, in 128 of 144] without their scale."""
    _decode_block(words, first, second, shift, values, ring_row, ring_col, a0, b0, block)
    _butterflies(block)
    _transpose(block, turned)
    _butterflies(turned)


@njit(cache=True, nogil=True)
def _dense_fp32(
    words, first, second, shift, values, ring_row, ring_col, row_scale, column_scale, across, start, stop, target
):  # type: ignore[no-untyped-def]
    """Blocks ``start .. stop`` of the dense float32 weight; ``across`` blocks side by side along ``in``."""
    block, turned = np.empty((128, 144), np.float32), np.empty((128, 144), np.float32)
    for n in range(start, stop):
        a0, b0 = 8 * (n % across), 8 * (n // across)
        _transformed(words, first, second, shift, values, ring_row, ring_col, a0, b0, block, turned)
        wide = min(128, target.shape[1] - 16 * a0)
        scale = row_scale[16 * a0 : 16 * a0 + wide]
        for c in range(min(128, target.shape[0] - 16 * b0)):
            source, own = turned[c, :wide], column_scale[16 * b0 + c]
            line = target[16 * b0 + c, 16 * a0 : 16 * a0 + wide]
            for r in range(wide):
                line[r] = source[r] * scale[r] * own


@njit(cache=True, nogil=True)
def _dense_bf16(
    words, first, second, shift, values, ring_row, ring_col, row_scale, column_scale, across, start, stop, target
):  # type: ignore[no-untyped-def]
    """As `_dense_fp32`, to bfloat16 bit patterns, rounded to nearest even (scales are finite, so no NaN)."""
    block, turned = np.empty((128, 144), np.float32), np.empty((128, 144), np.float32)
    for n in range(start, stop):
        a0, b0 = 8 * (n % across), 8 * (n // across)
        _transformed(words, first, second, shift, values, ring_row, ring_col, a0, b0, block, turned)
        wide = min(128, target.shape[1] - 16 * a0)
        scale = row_scale[16 * a0 : 16 * a0 + wide]
        for c in range(min(128, target.shape[0] - 16 * b0)):
            source, own = turned[c], column_scale[16 * b0 + c]
            for r in range(wide):
                source[r] = source[r] * scale[r] * own
            bits = source.view(np.uint32)
            line = target[16 * b0 + c, 16 * a0 : 16 * a0 + wide]
            for r in range(wide):
                odd = bits[r] >> np.uint32(16) & np.uint32(1)
                line[r] = np.uint16((bits[r] + np.uint32(0x7FFF) + odd) >> np.uint32(16))
