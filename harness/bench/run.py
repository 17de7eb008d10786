"""All sections in order, at full size or at a size for tests, and their JSON."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm

from harness.bench import tasks, wire
from harness.bench.capture_store import capture_store, scoring_memory
from harness.bench.scores import accuracy, bootstrap, from_logits, through_head
from harness.bench.timing import Figure, Section
from harness.bench.weights import exl3, streaming
from harness.environment import environment
from harness.errors import UsageError
from harness.progress import phase
from harness.scoring.packed import WIDE

FORMAT = "exl3-fidelity/bench/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large each section is. ``logits`` and ``heads`` hold one tuple of arguments a case."""

    name: str
    logits: Sequence[tuple[int, int, int]]
    heads: Sequence[tuple[int, int, int, int, float]]
    accuracy: tuple[int, int]
    exl3: tuple[int, int]
    store: tuple[int, int]
    memory: tuple[list[int], list[int], int, int]
    streaming: tuple[int, int, int, int]
    resamples: tuple[int, int, int]
    tasks: tuple[int, int, int, int, int, int]
    wire: tuple[int, tuple[int, ...], int, tuple[float, ...]]
    rounds: int


FULL = Sizes(
    name="full",
    logits=[(154_880, 96, 7), (49_152, 192, 7)],
    heads=[(49_152, 576, 256, 5, 3e10), (154_880, 4096, 256, 2, 3e10)],
    accuracy=(154_880, 8),
    exl3=(2048, 512),
    store=(4096, 2048),
    memory=([8, 32, 128], [49_152, 154_880], 65, 64),
    streaming=(512, 12, 8, 256),
    resamples=(512, 10_000, 40),
    tasks=(8192, 256, 6, 8, 160, 3),
    wire=(2048, (20, 256), 1000, (1.0, 4.0)),
    rounds=5,
)
TINY = Sizes(
    name="tiny",
    logits=[(3000, 4, 1)],
    heads=[(3000, 64, 4, 1, 1e7)],
    accuracy=(3000, 2),
    exl3=(128, 1),
    store=(64, 65),
    memory=([2], [512, 1024], 9, 16),
    streaming=(64, 2, 2, 16),
    resamples=(16, 200, 4),
    tasks=(64, 64, 1, 2, 16, 1),
    wire=(16, (2, 4), 3, (0.01, 0.01)),
    rounds=1,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One section at one size."""

    section: str
    title: str
    work: Callable[[], list[Figure]]


def cases(sizes: Sizes, folder: Path) -> list[Case]:
    """What there is to run, in order; ``folder`` is for files that a section writes."""
    width, length = sizes.store
    resamples = f"{sizes.resamples[1]:,} x {sizes.resamples[0]} rows"
    return [
        *(
            Case(section="logits", title=f"from logits, V={a[0]:,}, one thread", work=partial(from_logits, *a))
            for a in sizes.logits
        ),
        *(
            Case(
                section="head",
                title=f"through the head, V={a[0]:,} H={a[1]:,}, {2 * a[2]} stacked rows, one thread",
                work=partial(through_head, *a),
            )
            for a in sizes.heads
        ),
        Case(section="accuracy", title="relative error of KL", work=partial(accuracy, *sizes.accuracy)),
        Case(
            section="exl3",
            title=f"EXL3, {sizes.exl3[0]} x {sizes.exl3[0]} weights, {sizes.exl3[1]} Gaussian tiles, one thread",
            work=partial(exl3, *sizes.exl3, 3),
        ),
        Case(
            section="store",
            title=f"capture store, one row of {length} x {width} bf16",
            work=partial(capture_store, folder, width, length, sizes.rounds),
        ),
        Case(
            section="memory",
            title=f"scoring a capture, rows of {sizes.memory[2]} tokens",
            work=partial(scoring_memory, *sizes.memory),
        ),
        Case(
            section="streaming",
            title="streaming, {1} layers {0} wide, {2} rows of {3}, one thread".format(*sizes.streaming),
            work=partial(streaming, folder, *sizes.streaming, min(sizes.rounds, 3)),
        ),
        Case(
            section="bootstrap",
            title=f"bootstrap, {resamples}",
            work=partial(bootstrap, *sizes.resamples, sizes.rounds),
        ),
        Case(
            section="tasks",
            title="answers to {3} questions of about {4} tokens, one thread".format(*sizes.tasks),
            work=partial(tasks.run, *sizes.tasks),
        ),
        Case(
            section="wire",
            title=f"served answers, rows of {sizes.wire[0]:,} tokens, one thread",
            work=partial(wire.run, folder, *sizes.wire, min(sizes.rounds, 3)),
        ),
    ]


def run_bench(sizes: Sizes = FULL, only: Sequence[str] = ()) -> Iterator[Section]:
    """Run all cases, or those of the sections named in ``only``; each is given out as soon as it is measured.

    Raises:
        UsageError: ``only`` names no section.
    """
    with tempfile.TemporaryDirectory() as folder:
        every = cases(sizes, Path(folder))
        names = list(dict.fromkeys(case.section for case in every))
        for name in only:
            if name not in names:
                raise UsageError(f"there is no section {name!r}", f"choose from: {', '.join(names)}")
        chosen = [case for case in every if not only or case.section in only]
        with phase("bench", total=len(chosen), unit="figures", item="case") as advance:
            for case in chosen:
                start = time.perf_counter()
                figures = case.work()
                advance(1, len(figures))
                yield Section(name=case.title, figures=figures, seconds=time.perf_counter() - start)


def bench_json(done: Sequence[Section], sizes: Sizes) -> dict[str, Any]:
    """Everything that was measured, and on what: no host name, no path."""
    return {
        "format": FORMAT,
        "size": sizes.name,
        "environment": environment(),
        "processor": processor(),
        "vectors": vectors(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "sections": [section.plain() for section in done],
    }


def processor() -> str:
    """The processor's product name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown"


def vectors() -> str:
    """What the kernels are compiled for: the name that LLVM has for the processor, its sets of vector instructions,
    and the bits of the registers used."""
    has = llvm.get_host_cpu_features()
    sets = [name for name in ("avx2", "fma", "avx512f", "avx512bw", "neon", "sve") if has.get(name)]
    return f"{llvm.get_host_cpu_name()} ({', '.join(sets) or 'no vector set named'}), {32 * WIDE}-bit registers"
