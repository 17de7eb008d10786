"""All sections in order, at full size or at a size for tests, and their JSON."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.bench import accuracy, capture_store, exl3_decode, from_logits, memory, resampling, through_head
from harness.bench.figure import Figure, Section
from harness.environment import environment
from harness.errors import UsageError
from harness.progress import phase

FORMAT = "exl3-fidelity/bench/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large each section is. ``logits`` and ``heads`` hold one tuple of arguments a case."""

    name: str
    logits: Sequence[tuple[int, int, int]]
    heads: Sequence[tuple[int, int, int, int, float]]
    accuracy: tuple[int, int]
    features: int
    store: tuple[int, int]
    memory: tuple[list[int], list[int], int, int]
    resamples: tuple[int, int, int]
    rounds: int


FULL = Sizes(
    name="full",
    logits=[(154_880, 96, 7), (49_152, 192, 7)],
    heads=[(49_152, 576, 256, 5, 3e10), (154_880, 4096, 256, 2, 3e10)],
    accuracy=(154_880, 8),
    features=2048,
    store=(4096, 2048),
    memory=([8, 32, 128], [49_152, 154_880], 65, 64),
    resamples=(512, 10_000, 40),
    rounds=5,
)
TINY = Sizes(
    name="tiny",
    logits=[(3000, 4, 1)],
    heads=[(3000, 64, 4, 1, 1e7)],
    accuracy=(3000, 2),
    features=128,
    store=(64, 65),
    memory=([2], [512, 1024], 9, 16),
    resamples=(16, 200, 4),
    rounds=1,
)


def sections(sizes: Sizes, folder: Path) -> dict[str, Callable[[], list[Figure]]]:
    """What there is to run, by name; ``folder`` is for files that a section writes."""
    return {
        "from logits": lambda: [f for case in sizes.logits for f in from_logits.run(*case)],
        "through the head": lambda: [f for case in sizes.heads for f in through_head.run(*case)],
        "accuracy of KL": lambda: accuracy.run(*sizes.accuracy),
        "EXL3": lambda: exl3_decode.run(sizes.features, sizes.rounds),
        "capture store": lambda: capture_store.run(folder, *sizes.store, sizes.rounds),
        "memory": lambda: memory.run(*sizes.memory),
        "bootstrap": lambda: resampling.run(*sizes.resamples, sizes.rounds),
    }


def run_bench(sizes: Sizes = FULL, only: Sequence[str] = ()) -> list[Section]:
    """Run all sections, or those named in ``only``.

    Raises:
        UsageError: ``only`` names no section.
    """
    with tempfile.TemporaryDirectory() as folder:
        every = sections(sizes, Path(folder))
        unknown = [name for name in only if name not in every]
        if unknown:
            raise UsageError(f"there is no section {unknown[0]!r}", f"choose from: {', '.join(every)}")
        chosen = {name: every[name] for name in only or every}
        done = []
        with phase("bench", total=len(chosen), unit="figures", item="section") as advance:
            for name, work in chosen.items():
                start = time.perf_counter()
                figures = work()
                done.append(Section(name=name, figures=figures, seconds=time.perf_counter() - start))
                advance(1, len(figures))
    return done


def bench_json(done: Sequence[Section], sizes: Sizes) -> dict[str, Any]:
    """Everything that was measured, and on what: no host name, no path."""
    return {
        "format": FORMAT,
        "size": sizes.name,
        "environment": environment(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "sections": [section.plain() for section in done],
    }


def _processor() -> str:
    """The processor's product name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown"
