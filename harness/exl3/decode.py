"""EXL3 to dense weights on the CPU, at the speed of its vector units.

A 128 x 128 block of the rotated matrix is decoded from its 64 tiles, both Hadamard transforms run on it while it
lies in cache, and it is written once, in the Hugging Face orientation. Blocks are independent, so the cores
share them. The order of every fp32 operation is fixed, and `harness.exl3.decode_torch` keeps the same one:
butterflies of distance 1, 2, 4, ... 64 over the input axis, the same over the output axis, then times
``suh / 128`` (exact: each transform carries 1/sqrt(128)), then times ``svh``, then one cast.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from harness.exl3.kernels import HASHES, PLACE, dense_blocks, workspace
from harness.exl3.layout import windows
from harness.exl3.tensors import PADDING, Exl3Linear

#: Blocks that a thread takes at a time: about a millisecond of work.
_STEP = 16
#: Blocks that are held in float32 before a cast to float16: at most 64 MB.
_STRIP = 1024


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
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"dense weights are float32, bfloat16 or float16, not {dtype}")
    shape = linear.out_features, linear.in_features
    if out is None:
        out = torch.empty(shape, dtype=dtype)
    if tuple(out.shape) != shape or out.dtype != dtype or out.stride(1) != 1 or out.device.type != "cpu":
        raise ValueError(f"out must be a CPU tensor {list(shape)} of {dtype} with contiguous rows")
    across, down = (size // PADDING for size in linear.padded_shape)
    if dtype != torch.float16:
        _dense(linear, 0, across * down, out, 0)
        return out
    step = max(1, _STRIP // across)
    for first in range(0, down, step):
        target = out[first * PADDING : (first + step) * PADDING]
        strip = torch.empty(target.shape, dtype=torch.float32)
        _dense(linear, across * first, across * min(first + step, down), strip, first * PADDING)
        target.copy_(strip)
    return out


def _dense(linear: Exl3Linear, start: int, stop: int, target: torch.Tensor, origin: int) -> None:
    """Blocks ``start .. stop``; row 0 of ``target`` is output feature ``origin``."""
    words = linear.trellis.numpy().view(np.uint16)
    scales = linear.suh.float().numpy() / np.float32(PADDING), linear.svh.float().numpy()
    cut, code = windows(words.shape[-1]), HASHES[linear.codebook]
    (rows, columns), pitch = target.shape, target.stride(0)
    flat = target.as_strided(((rows - 1) * pitch + columns,), (1,))
    pattern = flat.view(torch.uint32 if target.dtype == torch.float32 else torch.uint16).numpy()
    layout = rows, columns, pitch, origin

    def work(begin: int, end: int) -> None:
        dense_blocks(words, *cut, code, scales, PLACE, (begin, end), pattern, layout, workspace(words.shape[-1]))

    _share(work, start, stop, _STEP)


def _share(work: Callable[[int, int], None], start: int, stop: int, step: int) -> None:
    """Run ``work(begin, end)`` over ``start .. stop`` on as many threads as torch uses.

    Own threads, not numba's: its default pool dies when two threads enter it at once.
    """
    threads = min(torch.get_num_threads(), -(-(stop - start) // step))
    if threads <= 1:
        work(start, stop)
        return
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(work, begin, min(begin + step, stop)) for begin in range(start, stop, step)]:
            done.result()
