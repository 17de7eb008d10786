"""CPU seconds, medians and memory: how the bench measures, so that a busy machine moves ratios as little as it can."""

from __future__ import annotations

import gc
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import psutil
import torch
from threadpoolctl import threadpool_limits

from harness.memory import give_back

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
