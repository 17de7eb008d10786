"""What a bench section returns: figures with their targets beside them. A missed target is shown, never an error."""

from __future__ import annotations

import gc
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import torch
from numba import njit
from threadpoolctl import threadpool_limits

from harness.engines.base import give_back


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured number. ``least`` and ``most`` are the targets of the project, where it has any."""

    name: str
    value: float
    unit: str
    least: float | None = None
    most: float | None = None
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the targets are met; None without a target."""
        if self.least is None and self.most is None:
            return None
        return (self.least is None or self.value >= self.least) and (self.most is None or self.value <= self.most)

    @property
    def target(self) -> str:
        """``>= 9`` and so on."""
        low = "" if self.least is None else f">= {self.least:g}"
        high = "" if self.most is None else f"<= {self.most:g}"
        return " and ".join(part for part in (low, high) if part)

    def plain(self) -> dict[str, Any]:
        """JSON-ready."""
        target = {"least": self.least, "most": self.most, "met": self.met}
        return {"name": self.name, "value": self.value, "unit": self.unit, **target, "note": self.note}


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One part of the bench: its figures and how long it took."""

    name: str
    figures: list[Figure]
    seconds: float = 0.0

    def plain(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "seconds": round(self.seconds, 1),
            "figures": [figure.plain() for figure in self.figures],
        }


# CPU seconds, medians and memory: how the bench measures, so that a busy machine moves ratios as little as it can.

Work = Callable[[], object]


@contextmanager
def one_thread() -> Iterator[None]:
    """Everything on one thread: a pool that waits by spinning would count its waiting as CPU time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(limits=1):
            yield
    finally:
        torch.set_num_threads(before)


def cpu_seconds(work: Work) -> float:
    """CPU time of this process while ``work`` runs."""
    start = time.process_time()
    work()
    return time.process_time() - start


def wall_seconds(work: Work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def in_turns(
    works: Mapping[str, Work], rounds: int, *, clock: Callable[[Work], float] = cpu_seconds, warm: bool = True
) -> dict[str, list[float]]:
    """Seconds of each work in each round, run in turns (A B C A B C ...): a slow spell hits neighbours alike."""
    if warm:
        for work in works.values():
            work()
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            seconds[name].append(clock(work))
    return seconds


def interleaved(
    works: Mapping[str, Work], rounds: int, *, clock: Callable[[Work], float] = cpu_seconds, warm: bool = True
) -> dict[str, float]:
    """Median seconds of each work, run in turns."""
    seconds = in_turns(works, rounds, clock=clock, warm=warm)
    return {name: statistics.median(values) for name, values in seconds.items()}


def extra_megabytes(work: Work) -> float:
    """Growth of this process's resident memory at its highest while ``work`` runs, sampled each half millisecond."""
    gc.collect()
    give_back()
    process = psutil.Process()
    start = peak = process.memory_info().rss
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.0005):
            peak = max(peak, process.memory_info().rss)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        kept = work()
        peak = max(peak, process.memory_info().rss)
        del kept
    finally:
        done.set()
        watcher.join()
    return (peak - start) / 1e6


# What this machine can do, measured in the same run: reading memory, arithmetic, and the products of each BLAS.


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
