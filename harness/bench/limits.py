"""What this machine can do, measured in the same run: reading memory, arithmetic, and the products of each BLAS."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from harness.bench.timing import Work


@njit(fastmath=True, cache=True, nogil=True)
def _read(first: np.ndarray, second: np.ndarray) -> float:
    """The sum of two rows, so that no load can be left out."""
    total = np.float32(0.0)
    for i in range(len(first)):
        total += first[i] + second[i]
    return float(total)


def read_probe(teacher: np.ndarray, candidate: np.ndarray) -> Work:
    """Reads both sides' float32 logits once, row by row, as the kernels do, and does nothing else."""

    def work() -> float:
        return sum(_read(first, second) for first, second in zip(teacher, candidate, strict=True))

    return work


@njit(fastmath=True, cache=True, nogil=True)
def _arithmetic(values: np.ndarray, times: int) -> None:
    """A polynomial of degree 8 of numbers that stay in the first-level cache, again and again."""
    for _ in range(times):
        for i in range(len(values)):
            x = values[i]
            y = x * np.float32(0.01) + np.float32(0.02)
            for _step in range(7):
                y = y * x + np.float32(0.03)
            values[i] = y


def arithmetic_probe(times: int) -> Work:
    """Fused multiply-adds on 16 KB of the caller's own: what a thread can compute when memory does not hold it up."""

    def work() -> None:
        _arithmetic(np.full(4096, 0.5, np.float32), times)

    return work


def gemm_probes(rows: int, width: int, columns: int) -> tuple[dict[str, Work], float]:
    """``[rows, width] @ [width, columns]`` in float32, into buffers made once: numpy's BLAS and torch's.

    Returns:
        The works, and the floating-point operations of one.
    """
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(n, width, generator=generator) for n in (rows, columns))
    out = torch.empty(rows, columns)
    a, b, c = left.numpy(), right.numpy(), out.numpy()
    works: dict[str, Work] = {
        "numpy": lambda: np.matmul(a, b.T, out=c),
        "torch": lambda: torch.mm(left, right.T, out=out),
    }
    return works, 2.0 * rows * width * columns
